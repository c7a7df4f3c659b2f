//! Ingest over real ZeroMQ sockets: engines publish, and the index and the workers' trust follow.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvrouted::fleet::{EventSource, Fleet, FleetTable, SchemeCell, TrustCell, WorkerRecord, WorkerState};
use kvrouted::hash;
use kvrouted::ids::{EventSeq, Scheme, ShardId, SpaceId, Window, Worker, WorkerIndex, WorkerSlot};
use kvrouted::index::{self, Depths, IndexReader, ShardLimits};
use kvrouted::ingest::{self, IngestConfig, IngestHandle, PublisherPlan, ShardPlan, WorkerView};
use kvrouted::limits::INGEST_QUANTUM_MESSAGES_MAX;
use kvrouted::load::Loads;
use kvrouted::metrics::WorkerCounter as C;
use kvrouted::trust::{Trust, TrustLevel, TrustReason as R};

use crate::kit::engine::Publisher as Engine;
use crate::kit::{WAIT_MAX, until};
use crate::vllm::{self, BLOCK_SIZE, Batch};

mod fleet;
mod recovery;
mod relayed;
#[allow(dead_code, reason = "each test that takes seeds needs a part of it")]
#[path = "../../oracle/seeds.rs"]
mod seeds;

const SCHEME: Scheme = Scheme { block_size: BLOCK_SIZE as u32, window: Window::Plain };

/// One shard with a worker for each endpoint.
struct Shard {
    handle: IngestHandle,
    fleet: Arc<Fleet>,
    reader: IndexReader,
    views: Vec<Arc<WorkerView>>,
    slots: Vec<WorkerSlot>,
}

impl Shard {
    fn start(endpoints: &[&str]) -> Self {
        Self::with(endpoints, "", IngestConfig::default())
    }

    fn with(endpoints: &[&str], topic: &str, config: IngestConfig) -> Self {
        let publishers: Vec<_> = endpoints.iter().map(|endpoint| (*endpoint, None)).collect();
        Self::recovering(&publishers, topic, config)
    }

    /// With where each publisher publishes and replays.
    fn recovering(endpoints: &[(&str, Option<&str>)], topic: &str, config: IngestConfig) -> Self {
        Self::booked(endpoints, topic, config, None)
    }

    /// The same, of workers that are busy with something.
    fn booked(
        endpoints: &[(&str, Option<&str>)],
        topic: &str,
        config: IngestConfig,
        loads: Option<&Arc<Loads>>,
    ) -> Self {
        let (mut writer, reader) = index::shard(ShardId(0), ShardLimits::default());
        let scheme = Arc::new(SchemeCell::default());
        let publishers: Vec<PublisherPlan> = endpoints
            .iter()
            .enumerate()
            .map(|(at, (endpoint, replay))| PublisherPlan {
                index: WorkerIndex(at as u32),
                worker: Worker::new(at as u64 + 1, 0),
                space: SpaceId(0),
                slot: writer.add_worker().expect("room for a worker"),
                source: EventSource {
                    endpoint: endpoint.parse().expect("an endpoint"),
                    replay: replay.map(|replay| replay.parse().expect("an endpoint")),
                    topic: topic.into(),
                    snapshots: None,
                },
                scheme: Arc::clone(&scheme),
                scheme_configured: false,
                salts_possible: true,
                capacity_blocks: 0,
                view: Arc::new(WorkerView::new(Arc::new(TrustCell::new(Trust::default())))),
                loads: loads.map(Arc::clone),
            })
            .collect();
        let workers = publishers.iter().map(record).collect();
        let fleet = Arc::new(Fleet::new(FleetTable { workers, ..FleetTable::default() }));
        let views = publishers.iter().map(|publisher| Arc::clone(&publisher.view)).collect();
        let slots = publishers.iter().map(|publisher| publisher.slot).collect();
        let plan = ShardPlan { shard: ShardId(0), writers: vec![(SpaceId(0), writer)], publishers };
        let handle = ingest::spawn(plan, config, Arc::clone(&fleet)).expect("ingest runs");
        Self { handle, fleet, reader: IndexReader::new(vec![reader]), views, slots }
    }

    fn device(&self, worker: usize, contents: &[u32]) -> u32 {
        let (mut locals, mut depths) = (Vec::new(), Depths::new());
        let tokens = vllm::tokens(contents);
        hash::local_hashes(SCHEME, hash::seed(None, None), hash::token_bytes(&tokens), &[], &mut locals);
        self.reader.lookup(&locals, &mut depths);
        depths.of(ShardId(0), self.slots[worker]).device
    }

    fn trust(&self, worker: usize) -> Trust {
        self.views[worker].trust.load()
    }

    /// Waits until the batch `seq` is applied and answers with the trust of then.
    #[track_caller]
    fn applied(&self, worker: usize, seq: u64) -> Trust {
        until("the batch is applied", || self.trust(worker).as_of_seq == Some(EventSeq(seq)));
        self.trust(worker)
    }

    fn state(&self, worker: usize) -> WorkerState {
        self.fleet.load().workers[worker].state
    }

    fn count(&self, worker: usize, counter: C) -> u64 {
        self.views[worker].counters.get(counter)
    }
}

fn record(publisher: &PublisherPlan) -> WorkerRecord {
    WorkerRecord {
        space: publisher.space,
        name: publisher.worker.to_string(),
        batched_tokens_max: 8192,
        state: WorkerState::Joining,
        trust: Arc::clone(&publisher.view.trust),
        events: Some(publisher.source.clone()),
        ..WorkerRecord::new(publisher.index, publisher.worker, publisher.slot)
    }
}

#[track_caller]
fn assert_trust(trust: Trust, level: TrustLevel, reasons: &[R]) {
    assert_eq!((trust.level, trust.reasons), (level, reasons.iter().copied().collect()));
}

fn chain(stamp: u32) -> Batch {
    Batch::new(stamp).stored(None, &[11, 12, 13], &[1, 2, 3])
}

#[test]
fn blocks_that_an_engine_stores_are_found() {
    let engine = Engine::new();
    let shard = Shard::start(&[&engine.endpoint()]);
    assert_trust(shard.trust(0), TrustLevel::Unproven, &[R::Joining]);
    let engine = engine.subscribed();
    until("the worker is ready", || shard.state(0) == WorkerState::Ready);
    engine.send_batch(0, &chain(0).payload());
    assert_trust(shard.applied(0, 0), TrustLevel::Exact, &[]);
    assert_eq!(shard.device(0, &[1, 2, 3, 4]), 3);
    engine.send_batch(1, &Batch::new(1).removed(&[13]).payload());
    assert_trust(shard.applied(0, 1), TrustLevel::Exact, &[]);
    assert_eq!((shard.device(0, &[1, 2, 3, 4]), shard.views[0].gauges.bound()), (2, 2));
    assert!(shard.trust(0).as_of_unix_ms > 0);
    shard.handle.stop().expect("a clean end");
    assert_trust(shard.views[0].trust.load(), TrustLevel::Unproven, &[R::Disconnected]);
}

#[test]
fn a_burst_longer_than_a_turn_is_taken_whole() {
    let engine = Engine::new();
    let shard = Shard::start(&[&engine.endpoint()]);
    let engine = engine.subscribed();
    let batches = 8 * INGEST_QUANTUM_MESSAGES_MAX as u64 + 7;
    for seq in 0..batches {
        let parent = (seq > 0).then_some(seq);
        engine.send_batch(seq, &Batch::new(seq as u32).stored(parent, &[seq + 1], &[seq as u32]).payload());
    }
    assert_trust(shard.applied(0, batches - 1), TrustLevel::Exact, &[]);
    let contents: Vec<u32> = (0..batches as u32).collect();
    assert_eq!(u64::from(shard.device(0, &contents)), batches);
    assert_eq!((shard.count(0, C::Batches), shard.count(0, C::Gaps)), (batches, 0));
}

#[test]
fn a_gap_empties_the_worker_and_a_restart_from_0_proves_it_again() {
    let engine = Engine::new();
    let shard = Shard::start(&[&engine.endpoint()]);
    let engine = engine.subscribed();
    engine.send_batch(0, &chain(0).payload());
    engine.send_batch(3, &Batch::new(3).stored(None, &[21], &[7]).payload());
    assert_trust(shard.applied(0, 3), TrustLevel::LowerBound, &[R::Gap]);
    assert_eq!((shard.device(0, &[1, 2, 3]), shard.device(0, &[7])), (0, 1));
    assert_eq!((shard.count(0, C::Gaps), shard.count(0, C::BatchesMissed)), (1, 2));
    engine.send_batch(0, &chain(40).payload());
    assert_trust(shard.applied(0, 0), TrustLevel::Exact, &[]);
    assert_eq!((shard.device(0, &[1, 2, 3]), shard.device(0, &[7])), (3, 0));
}

#[test]
fn a_killed_publisher_empties_its_worker_and_comes_back() {
    let engine = Engine::new();
    let endpoint = engine.endpoint();
    let shard = Shard::with(&[&endpoint], "", IngestConfig { down_after_ms: 1, ..IngestConfig::default() });
    let engine = engine.subscribed();
    engine.send_batch(0, &chain(0).payload());
    shard.applied(0, 0);
    drop(engine);
    until("the break is noticed", || shard.trust(0).reasons.contains(R::Disconnected));
    until("the worker is down", || shard.state(0) == WorkerState::Down);
    assert_trust(shard.trust(0), TrustLevel::Unproven, &[R::Disconnected]);
    assert_eq!((shard.device(0, &[1]), shard.count(0, C::Disconnects)), (0, 1));

    let engine = Engine::start(&endpoint).subscribed();
    until("the worker is ready again", || shard.state(0) == WorkerState::Ready);
    engine.send_batch(5, &Batch::new(5).stored(None, &[21], &[7]).payload());
    assert_trust(shard.applied(0, 5), TrustLevel::LowerBound, &[R::JoinedLate]);
    drop(engine);
    until("the second break is noticed", || shard.count(0, C::Disconnects) == 2);

    let engine = Engine::start(&endpoint).subscribed();
    engine.send_batch(0, &chain(60).payload());
    assert_trust(shard.applied(0, 0), TrustLevel::Exact, &[]);
    assert_eq!((shard.device(0, &[1, 2, 3]), shard.device(0, &[7])), (3, 0));
}

#[test]
fn a_publisher_that_is_never_reached_downs_its_worker_until_it_is() {
    let folder = tempfile::tempdir().expect("a folder");
    let endpoint = |name: &str| format!("ipc://{}/{name}", folder.path().display());
    let (late, drained, patient) = (endpoint("late"), endpoint("drained"), endpoint("patient"));
    let with = |endpoints: &[&str], down_after_ms: u64| {
        Shard::with(endpoints, "", IngestConfig { down_after_ms, ..IngestConfig::default() })
    };
    let patient = with(&[&patient], 0);
    let shard = with(&[&late, &drained], 300);
    shard.fleet.set_state(WorkerIndex(1), WorkerState::Draining);
    until("the worker is down", || shard.state(0) == WorkerState::Down);
    assert_trust(shard.trust(0), TrustLevel::Unproven, &[R::Joining]);
    assert_eq!(shard.count(0, C::Disconnects), 0);
    assert_eq!(patient.state(0), WorkerState::Joining);

    let engine = Engine::start(&late).subscribed();
    until("the worker is ready", || shard.state(0) == WorkerState::Ready);
    engine.send_batch(0, &chain(0).payload());
    assert_trust(shard.applied(0, 0), TrustLevel::Exact, &[]);
    assert_eq!(shard.state(1), WorkerState::Draining);
}

#[test]
fn what_cannot_be_read_is_counted_and_the_stream_goes_on() {
    let engine = Engine::new();
    let shard = Shard::start(&[&engine.endpoint()]);
    let engine = engine.subscribed();
    engine.send_batch(0, &chain(0).payload());
    engine.send_frames(&[b"", &1_u64.to_be_bytes(), b"\x93 nonsense"]);
    engine.send_frames(&[b"alone"]);
    engine.send_frames(&[b"", b"short", b"\x93"]);
    // The topic is optional: payload and sequence are taken from the end.
    engine.send_frames(&[&2_u64.to_be_bytes(), &chain(2).payload()]);
    assert_trust(shard.applied(0, 2), TrustLevel::LowerBound, &[R::Undecodable]);
    assert_eq!(shard.device(0, &[1, 2, 3]), 3);
    assert_eq!((shard.count(0, C::BatchesUndecodable), shard.count(0, C::MessagesMisframed)), (1, 2));
    assert_eq!((shard.count(0, C::Batches), shard.count(0, C::Gaps)), (2, 0));
    engine.send_batch(3, &Batch::new(3).cleared().payload());
    assert_trust(shard.applied(0, 3), TrustLevel::Exact, &[]);
}

#[test]
fn one_misbehaving_publisher_leaves_the_other_alone() {
    let (good, bad) = (Engine::new(), Engine::new());
    let shard = Shard::start(&[&good.endpoint(), &bad.endpoint()]);
    let (good, bad) = (good.subscribed(), bad.subscribed());
    good.send_batch(0, &chain(0).payload());
    shard.applied(0, 0);
    for seq in 0..100_u64 {
        bad.send_frames(&[b"", &(seq * 3).to_be_bytes(), &[0x93, seq as u8]]);
        bad.send_frames(&[&[0xff]]);
    }
    good.send_batch(1, &Batch::new(1).stored(Some(13), &[14], &[4]).payload());
    bad.send_batch(1000, &chain(9).payload());
    assert_trust(shard.applied(0, 1), TrustLevel::Exact, &[]);
    assert_eq!(shard.device(0, &[1, 2, 3, 4]), 4);
    assert_trust(shard.applied(1, 1000), TrustLevel::LowerBound, &[R::Gap, R::Undecodable]);
    assert_eq!(shard.device(1, &[1, 2, 3, 4]), 3, "it still counts once it makes sense");
    assert_eq!((shard.count(1, C::BatchesUndecodable), shard.count(1, C::MessagesMisframed)), (100, 100));
    drop(bad);
    until("the break is noticed", || shard.count(1, C::Disconnects) == 1);
    good.send_batch(2, &Batch::new(2).stored(Some(14), &[15], &[5]).payload());
    assert_trust(shard.applied(0, 2), TrustLevel::Exact, &[]);
}

#[test]
fn only_the_topic_subscribed_to_is_taken() {
    let engine = Engine::new();
    let shard = Shard::with(&[&engine.endpoint()], "kv", IngestConfig::default());
    let engine = engine.subscribed();
    engine.send_frames(&[b"load", &0_u64.to_be_bytes(), &chain(0).payload()]);
    engine.send_frames(&[b"kv-events", &0_u64.to_be_bytes(), &Batch::new(0).stored(None, &[21], &[7]).payload()]);
    assert_trust(shard.applied(0, 0), TrustLevel::Exact, &[]);
    assert_eq!((shard.device(0, &[1]), shard.device(0, &[7])), (0, 1));
}

#[test]
fn a_worker_that_an_operator_drains_stays_so() {
    let engine = Engine::new();
    let shard = Shard::start(&[&engine.endpoint()]);
    let engine = engine.subscribed();
    until("the worker is ready", || shard.state(0) == WorkerState::Ready);
    shard.fleet.set_state(WorkerIndex(0), WorkerState::Draining);
    let endpoint = engine.endpoint();
    drop(engine);
    until("the break is noticed", || shard.count(0, C::Disconnects) == 1);
    let engine = Engine::start(&endpoint).subscribed();
    engine.send_batch(0, &chain(0).payload());
    shard.applied(0, 0);
    assert_eq!(shard.state(0), WorkerState::Draining);
}
