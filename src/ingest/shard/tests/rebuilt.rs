//! A thread that panics in the middle of an event: its shard is rebuilt, the other shards of the daemon go on, and no
//! worker's trust is too high meanwhile. Over real sockets.

use super::transfers::{Engine, SCHEME, until};
use super::*;
use crate::hash;
use crate::index::failpoints;
use crate::ingest::RemoveWorker;
use crate::ingest::tests::vllm::{self, Batch};
use crate::ingest::{IngestHandle, spawn};
use crate::limits::INGEST_PANICS_PER_WORKER_MAX;
use crate::trust::TrustLevel;
use crate::trust::TrustReason;

/// Two workers of one shard, each with an engine of its own.
struct Pair {
    handle: IngestHandle,
    fleet: Arc<Fleet>,
    reader: IndexReader,
    publishers: Vec<PublisherPlan>,
    engines: [Engine; 2],
}

impl Pair {
    fn start() -> Self {
        let engines = [Engine::new(), Engine::new()];
        let (mut writer, reader) = index::shard(ShardId(0), ShardLimits::default());
        let publisher = |(at, engine): (usize, &Engine)| {
            let slot = writer.add_worker().expect("room");
            engine.publisher(WorkerIndex(at as u32), Worker::new(at as u64, 0), slot)
        };
        let publishers: Vec<PublisherPlan> = engines.iter().enumerate().map(publisher).collect();
        let fleet = fleet_of(&publishers, WorkerState::Joining);
        let writers = vec![(SpaceId(0), writer)];
        let plan = ShardPlan { shard: ShardId(0), writers, publishers: publishers.clone() };
        let handle = spawn(plan, IngestConfig::default(), Arc::clone(&fleet)).expect("ingest runs");
        engines.iter().for_each(Engine::subscribed);
        Self { handle, fleet, reader: IndexReader::new(vec![reader]), publishers, engines }
    }

    fn trust(&self, worker: usize) -> Trust {
        self.publishers[worker].view.trust.load()
    }

    fn rebuilds(&self, worker: usize) -> u64 {
        self.publishers[worker].view.counters.get(WorkerCounter::Rebuilds)
    }

    /// The blocks in a worker's device tier, and whether the lookup was not contended.
    fn device(&self, worker: usize, contents: &[u32]) -> (u32, bool) {
        let (mut locals, mut depths) = (Vec::new(), Depths::new());
        let tokens = vllm::tokens(contents);
        hash::local_hashes(SCHEME, hash::seed(None, None), hash::token_bytes(&tokens), &[], &mut locals);
        let lookup = self.reader.lookup(&locals, &mut depths);
        (depths.of(ShardId(0), self.publishers[worker].slot).device, !lookup.contended)
    }

    /// Has the thread panic over a worker's batch, in a multi-write of the shard.
    fn harm(&self, worker: usize, seq: u64) {
        // A store with a second name of a content takes the slow path.
        let batch = Batch::new(seq as u32).stored(None, &[1], &[1]).stored(None, &[failpoints::IN_MULTI_WRITE.0], &[1]);
        self.engines[worker].send(seq, &batch);
    }
}

#[test]
fn a_shard_is_rebuilt_after_a_panic_and_a_worker_that_panics_again_is_excluded() {
    let pair = Pair::start();
    for (worker, engine) in pair.engines.iter().enumerate() {
        engine.send(0, &Batch::new(0).stored(None, &[1, 2, 3], &[1, 2, 3]));
        until("it is exact", || pair.trust(worker).level == TrustLevel::Exact);
        assert_eq!(pair.device(worker, &[1, 2, 3]), (3, true));
    }
    for times in 1..=u64::from(INGEST_PANICS_PER_WORKER_MAX) {
        pair.harm(1, times);
        until("the panic is noted", || pair.rebuilds(0) == times && pair.rebuilds(1) == times);
        // Events of the innocent worker are received again, and its earlier blocks do not count.
        pair.engines[0].subscribed();
        assert!(pair.handle.is_running());
        let trust = pair.trust(0);
        assert_eq!((trust.level, trust.as_of_seq), (TrustLevel::None, None));
        assert!(trust.reasons.contains(TrustReason::IngestFailed), "{trust:?}");
        assert_eq!(pair.device(0, &[1, 2, 3]), (0, true), "an empty index is whole");
        pair.engines[0].send(times, &Batch::new(1).stored(None, &[1, 2], &[1, 2]));
        until("it is heard", || pair.trust(0).as_of_seq == Some(crate::ids::EventSeq(times)));
        let trust = pair.trust(0);
        assert_eq!(trust.level, TrustLevel::LowerBound);
        assert!(!trust.reasons.contains(TrustReason::IngestFailed), "{trust:?}");
        assert_eq!(pair.device(0, &[1, 2, 3]), (2, true), "what it said since, and no more");
        if times < u64::from(INGEST_PANICS_PER_WORKER_MAX) {
            pair.engines[1].subscribed();
        }
    }
    let excluded = pair.trust(1);
    assert_eq!(excluded.level, TrustLevel::None);
    assert!(excluded.reasons.contains(TrustReason::NoEvents) && excluded.reasons.contains(TrustReason::IngestFailed));
    assert_eq!(pair.device(1, &[1]), (0, true));

    // Its thread takes commands, as any.
    pair.fleet.update(|table| table.take(WorkerIndex(1)).is_some());
    let removal = RemoveWorker {
        index: WorkerIndex(1),
        space: SpaceId(0),
        slot: pair.publishers[1].slot,
        table_version: pair.fleet.load().version,
    };
    let gone = pair.handle.remove_worker(removal).expect("a command waits");
    gone.blocking_recv().expect("it is gone");
    assert!(pair.handle.stop().is_ok());
}

#[test]
fn a_relays_shard_is_not_built_anew() {
    let (_folder, mut shard) = quiet_shard();
    assert!(shard.can_be_rebuilt());
    shard.republishes = true;
    assert!(!shard.can_be_rebuilt());
}

#[test]
fn an_admission_that_panics_is_answered_and_its_worker_left_out() {
    let (_folder, mut shard) = quiet_shard();
    let (answer, mut answered) = oneshot::channel();
    (shard.current_worker, shard.pending_answer) = (Some(WorkerIndex(0)), Some((WorkerIndex(0), true, answer)));
    shard.discard();
    let admitted = answered.try_recv().expect("an answer").expect("it is in the table");
    assert!(admitted.no_events.is_some_and(|error| error.to_string().contains("panicked")));
    shard.reopen();
    assert!(shard.publishers.is_empty(), "it is not opened again");
    let (answer, mut answered) = oneshot::channel();
    shard.pending_answer = Some((WorkerIndex(9), true, answer));
    shard.discard();
    assert!(answered.try_recv().expect("an answer").is_err(), "it never came into the table");
}
