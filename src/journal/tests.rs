//! Journals of simulated runs: written, read, replayed, cut off, damaged.

mod simulation;

use std::sync::Arc;

use proptest::prelude::*;
use simulation::{Simulation, journal_of};

use super::writer_thread::Writer;
use super::*;
use crate::error::Kind;
use crate::ids::{LocalHash, Worker, WorkerIndex};
use crate::limits::JOURNAL_FILE_BYTES_MIN;
use crate::load::{BookingRef, Demand, EndReason, EndedBooking, Loads, LoadsConfig};
use crate::metrics::{CounterSet, JournalCounter};
use crate::route::{Decision, Policy, WorkerFacts};
use crate::watchdog::ThreadMark;

const DECISIONS: usize = 60;

fn replayed(file: &[u8]) -> (Replayed, Ending) {
    let mut replayed = Replayed::default();
    let ending = replayed.read(&mut Reader::open(file).expect("a journal"));
    (replayed, ending)
}

#[test]
fn every_decision_of_a_run_is_replayed_to_the_same_bits() {
    for seed in 1..=4 {
        let (replayed, ending) = replayed(&journal_of(seed, DECISIONS));
        assert_eq!(ending, Ending::Closed);
        assert_eq!((replayed.decisions, replayed.equal), (DECISIONS as u64, DECISIONS as u64), "{replayed:?}");
    }
}

#[test]
fn a_run_with_the_same_seed_writes_the_same_bytes() {
    assert_eq!(journal_of(7, DECISIONS), journal_of(7, DECISIONS));
    assert_ne!(journal_of(7, DECISIONS), journal_of(8, DECISIONS));
}

#[test]
fn records_are_read_as_they_were_written() {
    let mut simulation = Simulation::new(3);
    let mut records = Vec::new();
    let mut file = Vec::new();
    let mut encoder = Encoder::begin(&Origin::default(), &mut file);
    for _ in 0..DECISIONS {
        let record = simulation.step();
        encoder.decision(2, &record, &mut file);
        records.push(record);
    }
    let ended = simulation.ended();
    assert!(!ended.is_empty());
    ended.iter().for_each(|ended| encoder.ended(ended, &mut file));
    encoder.ends_lost(7, &mut file);
    encoder.end(&mut file);
    let mut reader = Reader::open(&file).unwrap();
    assert!(reader.unknown_values().is_empty() && reader.missing_values().is_empty());
    let mut read = DecisionRecord::default();
    for mut record in records {
        assert_eq!(reader.next(&mut read), JournalEntry::Decision { core: 2 });
        for row in 0..record.observation.workers.len() {
            let forget = |facts: &mut WorkerFacts| (facts.trust.since_unix_ms, facts.trust.as_of_unix_ms) = (0, 0);
            record.observation.workers.update(row, forget);
        }
        assert_eq!(read, record);
    }
    for ended in ended {
        assert_eq!(reader.next(&mut read), JournalEntry::Ended(ended));
    }
    assert_eq!(reader.next(&mut read), JournalEntry::EndsLost { lost: 7 });
    assert_eq!(reader.next(&mut read), JournalEntry::End(Ending::Closed));
    assert_eq!(reader.next(&mut read), JournalEntry::End(Ending::Closed), "and no more");
}

#[test]
fn a_decision_with_another_outcome_is_reported() {
    let mut simulation = Simulation::new(3);
    let mut file = Vec::new();
    let mut encoder = Encoder::begin(&Origin::default(), &mut file);
    let mut with_candidates = 0;
    for _ in 0..20 {
        let mut record = simulation.step();
        record.policy = Policy { version: 9, device_credit: record.policy.device_credit + 1.0, ..record.policy };
        with_candidates += u64::from(!record.outcome.listed.is_empty());
        record.outcome.listed.iter_mut().for_each(|listed| listed.cost += 1.0);
        encoder.decision(0, &record, &mut file);
    }
    let (replayed, ending) = replayed(&file);
    assert_eq!((replayed.decisions, replayed.different, ending), (20, with_candidates, Ending::Open));
    assert_eq!(replayed.differences.len(), 8, "the first ones are described");
    assert!(replayed.differences.iter().all(|of| !of.what.is_empty()), "{replayed:?}");
}

#[test]
fn a_file_cut_off_anywhere_keeps_the_records_before_the_cut() {
    let file = journal_of(5, 6);
    let whole = replayed(&file).0;
    let mut decisions = 0;
    for bytes in 0..file.len() {
        let Ok(mut reader) = Reader::open(&file[..bytes]) else { continue };
        let mut replayed = Replayed::default();
        let ending = replayed.read(&mut reader);
        assert!(matches!(ending, Ending::Torn { .. } | Ending::Open), "{bytes}: {ending:?}");
        assert!(replayed.decisions >= decisions && replayed.different == 0, "{bytes}: {replayed:?}");
        decisions = replayed.decisions;
    }
    assert_eq!(decisions, whole.decisions);
}

#[test]
fn a_changed_bit_is_never_believed() {
    let file = journal_of(5, 6);
    for at in 0..file.len() {
        let mut damaged = file.clone();
        damaged[at] ^= 1 << (at % 8);
        let Ok(mut reader) = Reader::open(&damaged) else { continue };
        let mut replayed = Replayed::default();
        let ending = replayed.read(&mut reader);
        assert!(matches!(ending, Ending::Torn { .. } | Ending::Damaged { .. }), "{at}: {ending:?}");
        assert_eq!(replayed.different, 0, "{at}");
    }
}

#[test]
fn a_file_that_is_not_a_journal_is_refused_in_words() {
    let mut other = journal_of(1, 1);
    other[8] = 99;
    let (cut, whole) = (&journal_of(1, 1)[..40], journal_of(1, 1));
    for (bytes, word) in
        [(&b""[..], "not a journal"), (b"KVRDSNAP....", "not a journal"), (&other, "version 99"), (cut, "cut off")]
    {
        let error = Reader::open(bytes).err().expect("refused");
        assert!(error.kind() == Kind::Config && error.message().contains(word), "{error}");
    }
    assert!(Reader::open(&whole).is_ok());
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(head in any::<bool>(), bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let mut file = if head { journal_of(1, 0) } else { Vec::new() };
        file.extend_from_slice(&bytes);
        if let Ok(mut reader) = Reader::open(&file) {
            Replayed::default().read(&mut reader);
        }
    }
}

fn identity() -> impl Strategy<Value = RequestIdentity> {
    let prefix = (0..4_u64, 0..40_u64);
    let numbers = (any::<u64>(), any::<Option<u32>>(), any::<u32>(), any::<u32>());
    (numbers, prefix).prop_map(
        |((waited_ns, booking, expected_output_tokens, prefix_tokens), (conversation, depth))| RequestIdentity {
            booking: booking.map(u64::from),
            session: booking.map(|booking| !u64::from(booking) >> 1),
            waited_ns,
            expected_output_tokens,
            prefix_tokens,
            prefix: (0..depth).map(|at| conversation << 32 | at).collect(),
        },
    )
}

fn ended_booking() -> impl Strategy<Value = EndedBooking> {
    let reasons = [EndReason::Freed, EndReason::Superseded, EndReason::TooOld, EndReason::WorkerLeft];
    let times = (any::<u64>(), any::<Option<u32>>(), any::<u64>());
    let numbers = (0..4_usize, 0..1_000_000_u64, 0..1_000_000_u64, any::<u32>(), any::<bool>());
    (times, numbers).prop_map(move |((booking, first, end_ns), (reason, prefill, cached, output, flag))| EndedBooking {
        booking,
        reason: reasons[reason],
        prefill_tokens: prefill,
        cached_tokens: cached,
        first_token_ns: first.map(u64::from),
        end_ns,
        output_tokens: output,
        began_alone: flag,
        requests: cached,
        decode_blocks: prefill,
        prefilled_us: output,
        ..EndedBooking::default()
    })
}

proptest! {
    #[test]
    fn a_journal_is_read_as_it_was_written(
        entries in proptest::collection::vec((identity(), ended_booking(), 0..3_u64), 0..20),
    ) {
        let mut file = Vec::new();
        let origin = Origin { classes: vec!["a".into(), "b".into()], sample: 0.5, ..Origin::default() };
        let mut encoder = Encoder::begin(&origin, &mut file);
        for (identity, ended, lost) in &entries {
            encoder.decision(3, &DecisionRecord { identity: identity.clone(), ..DecisionRecord::default() }, &mut file);
            encoder.ended(ended, &mut file);
            encoder.ends_lost(*lost, &mut file);
        }
        encoder.end(&mut file);
        let mut reader = Reader::open(&file).unwrap();
        prop_assert_eq!(reader.origin(), &origin);
        let mut read = DecisionRecord::default();
        for (identity, ended, lost) in entries {
            prop_assert_eq!(reader.next(&mut read), JournalEntry::Decision { core: 3 });
            prop_assert_eq!(&read.identity, &identity);
            prop_assert_eq!(reader.next(&mut read), JournalEntry::Ended(ended));
            prop_assert_eq!(reader.next(&mut read), JournalEntry::EndsLost { lost });
        }
        prop_assert_eq!(reader.next(&mut read), JournalEntry::End(Ending::Closed));
    }
}

#[test]
fn numbers_beyond_their_limits_are_refused() {
    let sane = EndedBooking { prefill_tokens: 10, ..EndedBooking::default() };
    for (ended, is_read) in [
        (sane, true),
        (EndedBooking { prefill_tokens: u64::MAX, cached_tokens: 2, ..sane }, false),
        (EndedBooking { cached_tokens: u64::MAX - 5, ..sane }, false),
        (EndedBooking { requests: u64::MAX, ..sane }, false),
        (EndedBooking { decode_blocks: u64::MAX, ..sane }, false),
        (EndedBooking { class: u32::MAX, ..sane }, false),
    ] {
        let mut file = Vec::new();
        Encoder::begin(&Origin::default(), &mut file).ended(&ended, &mut file);
        let entry = Reader::open(&file).unwrap().next(&mut DecisionRecord::default());
        let expected = JournalEntry::Ended(ended);
        assert_eq!(entry == expected, is_read, "{entry:?}");
        assert!(is_read || matches!(entry, JournalEntry::End(Ending::Damaged { .. })), "{entry:?}");
    }
}

/// A file as releases before the second version wrote it: without identities and without ends.
#[test]
fn a_file_of_the_first_version_is_read() {
    let file = journal_of(4, DECISIONS);
    let mut reader = Reader::open(&file).unwrap();
    let (mut record, mut decisions) = (DecisionRecord::default(), Vec::new());
    loop {
        match reader.next(&mut record) {
            JournalEntry::Decision { core } => decisions.push((core, record.clone())),
            JournalEntry::End(_) => break,
            _ => {}
        }
    }
    let old = format::tests_of_old_files::first_version(&decisions);
    let mut reader = Reader::open(&old).unwrap();
    let missing = ["record.booking", "record.session_identity", "record.prefix_tokens", "ended"];
    assert!(
        missing.iter().all(|name| reader.missing_values().iter().any(|of| of == name)),
        "{:?}",
        reader.missing_values()
    );
    let mut replayed = Replayed::default();
    assert_eq!(replayed.read(&mut reader), Ending::Open);
    assert_eq!((replayed.decisions, replayed.equal), (DECISIONS as u64, DECISIONS as u64), "{replayed:?}");
    let mut reader = Reader::open(&old).unwrap();
    reader.next(&mut record);
    assert_eq!(record.identity, RequestIdentity::default());
}

struct Counting(u64);

impl Judge for Arc<parking_lot::Mutex<Counting>> {
    fn judge(&mut self, _: &mut DecisionRecord) {
        self.lock().0 += 1;
    }
}

const LOCALS: [LocalHash; 4] = [LocalHash(10), LocalHash(11), LocalHash(12), LocalHash(13)];

/// Loads in which two ends of recorded bookings wait, and one was lost.
fn ended_loads() -> Arc<Loads> {
    let loads = Loads::new(1, LoadsConfig { ended_waiting_max: 2, ..LoadsConfig::default() });
    loads.set_prefill_class(WorkerIndex(0), Worker::new(1, 0), "class", None);
    let session = loads.open_session(None, 0).unwrap();
    for name in ["a", "b", "c"] {
        let demand = Demand { is_recorded: true, ..Demand::default() };
        let booked = loads.book(session, name, 0, WorkerIndex(0), demand, 0).unwrap();
        loads.free(session, BookingRef::Handle(booked.handle), 5);
    }
    Arc::new(loads)
}

#[test]
fn a_writer_fills_file_after_file_and_marks_lost_decisions() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("journal");
    let (queue, shares) = (Arc::new(DecisionQueue::new(8, usize::MAX)), Arc::new(SampleShares::default()));
    let (counters, judged) = (Arc::new(CounterSet::default()), Arc::new(parking_lot::Mutex::new(Counting(0))));
    let (loads, hasher) = (ended_loads(), IdentityHasher::new(8));
    let mut writer = Writer::new(WriterPlan {
        origin: Origin { instance_id: 5, sample: 1.0, ..Origin::default() },
        files: Some(FilesPlan { dir: dir.clone(), file_bytes_max: JOURNAL_FILE_BYTES_MIN, files_max: 100 }),
        queues: vec![Arc::clone(&queue)],
        loads: Arc::clone(&loads),
        hasher: hasher.clone(),
        judge: Box::new(Arc::clone(&judged)),
        counters: Arc::clone(&counters),
        mark: Arc::new(ThreadMark::new("t", false)),
    })
    .unwrap();
    let mut recorder = DecisionRecorder::new(queue, Arc::clone(&shares), hasher);
    shares.set_journal(1.0);
    shares.set_shadow(1.0);
    let mut simulation = Simulation::new(11);
    let (mut taken, mut lost) = (0, 0);
    for step in 0..200 {
        let decision = simulation.decide();
        let policy = simulation.policy;
        let noted = NotedRequest { locals: Some(&LOCALS), ..NotedRequest::default() };
        match recorder.note((step, crate::ids::SpaceId(0)), &policy, simulation.observation(), (&decision, &noted)) {
            Noted::Queued => taken += 1,
            Noted::Lost => lost += 1,
            Noted::NotSampled => panic!("a share of 1 is all"),
        }
        // Slower than the decisions come.
        if step % 10 == 0 {
            writer.round();
        }
    }
    writer.finish();
    assert!(lost > 0);
    let files = list(&dir).unwrap();
    assert!(files.len() > 1, "{files:?}");
    let mut all = Replayed::default();
    for file in &files {
        let bytes = std::fs::read(file).unwrap();
        let mut reader = Reader::open(&bytes).unwrap();
        assert_eq!(reader.origin().instance_id, 5);
        assert_eq!(all.read(&mut reader), Ending::Closed);
    }
    assert_eq!((all.decisions, all.equal, judged.lock().0), (taken, taken, taken), "{all:?}");
    let written = counters.get(JournalCounter::Bytes);
    assert_eq!(written, files.iter().map(|file| std::fs::metadata(file).unwrap().len()).sum::<u64>());
    assert_eq!((counters.get(JournalCounter::Records), counters.get(JournalCounter::Gaps)), (taken, all.gaps));
    assert_eq!((counters.get(JournalCounter::Ends), counters.get(JournalCounter::EndsLost)), (2, 1));
    let (bytes, mut record) = (std::fs::read(&files[0]).unwrap(), DecisionRecord::default());
    let mut reader = Reader::open(&bytes).unwrap();
    assert_eq!(reader.origin().classes, ["class"]);
    assert!(matches!(reader.next(&mut record), JournalEntry::Decision { .. }));
    assert_eq!((record.identity.prefix_tokens, record.identity.prefix.len()), (8, LOCALS.len() / 2));
    let reveals = |identity: &u64| LOCALS.iter().any(|local| local.0 == *identity);
    assert!(!record.identity.prefix.iter().any(reveals), "no hash of a block is written");
    // The decisions lost after the last queued one are in the counter only.
    assert!(all.lost <= lost && all.lost + 10 > lost, "{lost} lost: {all:?}");
}

#[test]
fn a_failing_disk_costs_journal_records_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("journal");
    let (queue, shares) = (Arc::new(DecisionQueue::new(8, usize::MAX)), Arc::new(SampleShares::default()));
    let counters = Arc::new(CounterSet::default());
    let mut writer = Writer::new(WriterPlan {
        origin: Origin::default(),
        files: Some(FilesPlan { dir: dir.clone(), file_bytes_max: 1 << 20, files_max: 2 }),
        queues: vec![Arc::clone(&queue)],
        loads: Arc::new(Loads::new(0, LoadsConfig::default())),
        hasher: IdentityHasher::default(),
        judge: Box::new(Arc::new(parking_lot::Mutex::new(Counting(0)))),
        counters: Arc::clone(&counters),
        mark: Arc::new(ThreadMark::new("t", false)),
    })
    .unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    let mut recorder = DecisionRecorder::new(queue, Arc::clone(&shares), IdentityHasher::default());
    shares.set_journal(1.0);
    let mut note = || {
        let decision = Decision::default();
        assert_eq!(
            recorder.note(
                (0, crate::ids::SpaceId(0)),
                &Policy::default(),
                &Default::default(),
                (&decision, &NotedRequest::default())
            ),
            Noted::Queued
        );
    };
    note();
    note();
    writer.round();
    assert_eq!((counters.get(JournalCounter::WritesFailed), counters.get(JournalCounter::Unwritten)), (1, 2));
    std::fs::create_dir(&dir).unwrap();
    // It pauses before it tries again.
    for _ in 0..crate::limits::JOURNAL_RETRY_ROUNDS {
        writer.round();
    }
    note();
    writer.finish();
    assert_eq!(counters.get(JournalCounter::Records), 1);
    let bytes = std::fs::read(&list(&dir).unwrap()[0]).unwrap();
    assert_eq!(replayed(&bytes).1, Ending::Closed);
}

#[test]
fn the_head_of_a_file_keeps_its_names() {
    let columns = serde_json::to_value(format::Columns::ours()).unwrap();
    let names: std::collections::BTreeSet<_> = columns.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, ["asked", "ended", "listed", "policy", "record", "removed", "rules", "worker"].into());
}
