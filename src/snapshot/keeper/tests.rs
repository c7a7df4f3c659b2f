//! Rounds of snapshots of workers with synthetic dumps.

use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam::channel::bounded;

use super::*;
use crate::event::SourceTrust;
use crate::fleet::{EventSource, PoolRole, Space, TrustCell};
use crate::ids::{EventSeq, SpaceId, WorkerIndex, WorkerSlot};
use crate::ingest::{AbortReason, References};
use crate::load::LearntClass;
use crate::snapshot::{decode, read_laws};
use crate::trust::TrustLevel;
use crate::watchdog::ThreadMark;

fn trust(seq: u64) -> Trust {
    Trust { level: TrustLevel::Exact, as_of_seq: Some(EventSeq(seq)), as_of_unix_ms: seq, ..Trust::default() }
}

fn record(id: u64, seq: Option<u64>) -> WorkerRecord {
    let trust = seq.map_or_else(Trust::default, trust);
    WorkerRecord {
        name: String::new(),
        batched_tokens_max: 1,
        trust: Arc::new(TrustCell::new(trust)),
        events: Some(EventSource {
            endpoint: "tcp://x:1".parse().expect("an endpoint"),
            replay: None,
            topic: String::new(),
            snapshots: None,
        }),
        ..WorkerRecord::new(WorkerIndex(id as u32 - 1), Worker::new(id, 0), WorkerSlot(id as u16))
    }
}

fn dump(seq: u64) -> Vec<DumpPart> {
    let begin = DumpBegin {
        watermark: Some(EventSeq(seq)),
        remembered: vec![(EventSeq(seq), seq)],
        scheme: None,
        groups: Vec::new(),
        trust: trust(seq),
        view: SourceTrust { level: trust(seq).level, reasons: trust(seq).reasons },
        lifetime: None,
        republished: None,
    };
    vec![DumpPart::Begin(Box::new(begin)), DumpPart::End(References::default())]
}

struct Rig {
    _folder: tempfile::TempDir,
    rounds: Rounds,
    asked: Arc<AtomicUsize>,
    stop: Sender<Instant>,
}

impl Rig {
    /// The thread's work without the thread, over dumps that `parts` makes. If it returns `None`, the dump's channel
    /// stays open and empty.
    fn new(records: Vec<WorkerRecord>, parts: fn(Worker) -> Option<Vec<DumpPart>>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let space = Space {
            id: SpaceId(0),
            model: "m".into(),
            namespace: String::new(),
            role: PoolRole::Both,
            scheme: Arc::default(),
        };
        let fleet = Fleet::new(FleetTable { version: 1, spaces: vec![space], workers: records });
        let asked = Arc::new(AtomicUsize::new(0));
        let times = Arc::clone(&asked);
        let ask = move |_, worker| {
            times.fetch_add(1, Ordering::Relaxed);
            let (sender, parts_of) = bounded(8);
            match parts(worker) {
                Some(parts) => parts.into_iter().for_each(|part| sender.send(part).unwrap()),
                None => std::mem::forget(sender),
            }
            Ok(parts_of)
        };
        let plan = KeeperPlan {
            directory: Arc::new(Directory::open(&folder.path().join("s")).unwrap()),
            fleet: Arc::new(fleet),
            dump: Box::new(ask),
            laws: Box::new(LearntLaws::default),
            stats: Arc::default(),
            every: Duration::from_secs(3600),
            keep: Duration::from_secs(3600),
            mark: Arc::new(ThreadMark::new("t", false)),
        };
        let (stop, stopped) = bounded(1);
        let rounds = Rounds { plan, stopped, deadline: None, files: BTreeMap::new(), laws: LearntLaws::default() };
        Self { _folder: folder, rounds, asked, stop }
    }

    fn count(&self, counter: C) -> u64 {
        self.rounds.plan.stats.counters.get(counter)
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }

    fn moves_to(&self, seq: u64) {
        self.rounds.plan.fleet.load().workers[0].trust.store(trust(seq));
    }
}

#[test]
fn a_worker_is_written_again_only_after_an_event() {
    let mut rig = Rig::new(vec![record(1, Some(5)), record(2, None)], |_| Some(dump(5)));
    assert_eq!(rig.rounds.plan.stats.oldest_age_seconds(u64::MAX), None);
    (0..3).for_each(|_| rig.rounds.round());
    assert_eq!((rig.asked(), rig.count(C::SnapshotsWritten), rig.count(C::SnapshotsUnchanged)), (1, 1, 2));
    let bytes = std::fs::read(rig.rounds.plan.directory.file_of(Worker::new(1, 0))).unwrap();
    let (header, ..) = decode(&bytes).expect("whole");
    assert_eq!((header.worker, header.space.model.as_str()), (Worker::new(1, 0), "m"));
    assert_eq!((header.begin.watermark, rig.count(C::SnapshotWrittenBytes)), (Some(EventSeq(5)), bytes.len() as u64));
    rig.moves_to(6);
    rig.rounds.round();
    assert_eq!((rig.asked(), rig.count(C::SnapshotsWritten)), (2, 2));
    assert_eq!(rig.rounds.plan.directory.remove(None).unwrap(), 1, "the other worker has sent no event yet");
    rig.rounds.round();
    assert_eq!(rig.count(C::SnapshotsWritten), 3, "a removed file is written again");
    assert!(rig.rounds.plan.stats.oldest_age_seconds(unix_ms()).is_some());
}

#[test]
fn an_aborted_dump_leaves_the_earlier_snapshot() {
    let aborted = |worker: Worker| {
        let mut parts = dump(1);
        let end =
            if worker.id.0 == 1 { DumpPart::Aborted(AbortReason::Gap) } else { DumpPart::Begin(Box::new(begin())) };
        parts[1] = end;
        if worker.id.0 == 3 {
            parts.truncate(1);
        }
        Some(parts)
    };
    fn begin() -> DumpBegin {
        match dump(1).remove(0) {
            DumpPart::Begin(begin) => *begin,
            _ => unreachable!("a dump begins so"),
        }
    }
    let mut rig = Rig::new((1..=3).map(|id| record(id, Some(1))).collect(), aborted);
    let path = rig.rounds.plan.directory.file_of(Worker::new(1, 0));
    std::fs::write(&path, "before").unwrap();
    rig.rounds.round();
    assert_eq!((rig.count(C::SnapshotsBrokenOff), rig.count(C::SnapshotsWritten)), (3, 0));
    assert_eq!(std::fs::read(&path).unwrap(), b"before");
    assert_eq!(rig.rounds.plan.directory.files().unwrap().len(), 1);
    assert_eq!(std::fs::read_dir(rig.rounds.plan.directory.path()).unwrap().count(), 2, "and the lock");
}

#[test]
fn a_worker_without_a_batch_keeps_its_snapshot() {
    let nothing = |_| {
        let mut parts = dump(1);
        if let DumpPart::Begin(begin) = &mut parts[0] {
            begin.watermark = None;
        }
        Some(parts)
    };
    let mut rig = Rig::new(vec![record(1, Some(1))], nothing);
    std::fs::write(rig.rounds.plan.directory.file_of(Worker::new(1, 0)), "before").unwrap();
    rig.rounds.round();
    assert_eq!((rig.asked(), rig.count(C::SnapshotsWritten), rig.count(C::SnapshotsBrokenOff)), (1, 0, 0));
    assert_eq!(std::fs::read(rig.rounds.plan.directory.file_of(Worker::new(1, 0))).unwrap(), b"before");
}

#[test]
fn a_hybrid_worker_gets_no_snapshot() {
    let hybrid = |_| {
        let mut parts = dump(1);
        if let DumpPart::Begin(begin) = &mut parts[0] {
            begin.trust.level = TrustLevel::Unproven;
            begin.trust.reasons.insert(TrustReason::Hybrid);
        }
        Some(parts)
    };
    let mut rig = Rig::new(vec![record(1, Some(1))], hybrid);
    (0..2).for_each(|_| rig.rounds.round());
    assert_eq!((rig.asked(), rig.count(C::SnapshotsWritten), rig.count(C::SnapshotsBrokenOff)), (2, 0, 0));
    assert!(rig.rounds.plan.directory.files().unwrap().is_empty());
}

#[test]
fn a_stop_ends_the_wait_for_a_dump_at_its_deadline() {
    let mut rig = Rig::new(vec![record(1, Some(1)), record(2, Some(1))], |_| None);
    rig.stop.send(Instant::now()).unwrap();
    rig.rounds.round();
    assert!(rig.rounds.deadline.is_some());
    assert_eq!((rig.asked(), rig.count(C::SnapshotsLate)), (2, 2));
}

#[test]
fn a_stop_writes_changed_workers_and_ends_the_thread() {
    let Rig { _folder, rounds, asked, .. } = Rig::new(vec![record(1, Some(1))], |_| Some(dump(1)));
    let (directory, stats) = (Arc::clone(&rounds.plan.directory), Arc::clone(&rounds.plan.stats));
    let keeper = Keeper::start(rounds.plan).unwrap();
    assert!(keeper.is_running());
    let deadline = Instant::now() + Duration::from_secs(600);
    keeper.finish(deadline);
    assert!(keeper.join(deadline));
    assert_eq!((asked.load(Ordering::Relaxed), stats.counters.get(C::SnapshotsWritten)), (1, 1));
    assert_eq!(directory.files().unwrap().len(), 1);
}

#[test]
fn the_file_of_a_removed_worker_is_removed_once_it_is_old() {
    let mut rig = Rig::new(vec![record(1, Some(1))], |_| Some(dump(1)));
    rig.rounds.round();
    std::fs::write(rig.rounds.plan.directory.file_of(Worker::new(2, 0)), "gone").unwrap();
    rig.rounds.remove_expired();
    assert_eq!(rig.rounds.plan.directory.files().unwrap().len(), 2, "not yet");
    rig.rounds.plan.keep = Duration::ZERO;
    rig.rounds.remove_expired();
    let files: Vec<_> = rig.rounds.plan.directory.files().unwrap().into_iter().map(|file| file.worker).collect();
    assert_eq!((files, rig.count(C::SnapshotsExpired)), (vec![Worker::new(1, 0)], 1));
}

#[test]
fn what_was_learnt_is_written_when_it_has_changed() {
    let mut rig = Rig::new(Vec::new(), |_| None);
    let file = rig.rounds.plan.directory.laws_file();
    rig.rounds.round();
    assert!(!file.exists(), "nothing was learnt");
    let learnt = |samples| LearntLaws {
        classes: vec![LearntClass {
            name: "c".to_owned(),
            prior: [1.0; 3],
            is_preset: true,
            factors: [1.0; 3],
            variance: [0.0; 6],
            error: 0.1,
            samples,
            learnt_unix_ms: 7,
        }],
        workers: Vec::new(),
    };
    rig.rounds.plan.laws = Box::new(move || learnt(1));
    rig.rounds.round();
    assert_eq!(read_laws(&rig.rounds.plan.directory), Ok(Some(learnt(1))));
    std::fs::write(&file, "mine").unwrap();
    rig.rounds.round();
    assert_eq!(std::fs::read(&file).unwrap(), b"mine", "it is not written again");
    rig.rounds.plan.laws = Box::new(move || learnt(2));
    rig.rounds.round();
    assert_eq!(read_laws(&rig.rounds.plan.directory), Ok(Some(learnt(2))));
    std::fs::remove_dir_all(rig.rounds.plan.directory.path()).unwrap();
    rig.rounds.plan.laws = Box::new(move || learnt(3));
    rig.rounds.round();
    assert_eq!(rig.count(C::SnapshotsFailed), 1);
}

#[test]
fn a_worker_that_leaves_during_a_round_is_passed_over_and_no_reader_keeps_its_place() {
    let mut rig = Rig::new((1..=3).map(|id| record(id, Some(5))).collect(), |_| Some(dump(5)));
    let (fleet, dump_of) = (Arc::clone(&rig.rounds.plan.fleet), std::mem::replace(&mut rig.rounds.plan.dump, never()));
    rig.rounds.plan.dump = Box::new(move |shard, worker| {
        if worker.id.0 == 1 {
            fleet.update(|table| table.take(WorkerIndex(1)).is_some());
            assert_eq!(fleet.oldest_in_use(), fleet.load().version, "the table of before has no reader");
        }
        dump_of(shard, worker)
    });
    rig.rounds.round();
    assert_eq!((rig.asked(), rig.count(C::SnapshotsWritten)), (2, 2));
    assert!(!rig.rounds.plan.directory.file_of(Worker::new(2, 0)).exists());
}

fn never() -> AskDump {
    Box::new(|_, _| unreachable!())
}
