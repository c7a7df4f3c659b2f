//! Dumps and loads asked of running ingest threads, over real sockets.

use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, bounded};

use super::quiet_shard;
use crate::fleet::{Fleet, FleetTable, SchemeCell, WorkerState};
use crate::hash;
use crate::ids::{EventSeq, Scheme, ShardId, SpaceId, Window, Worker, WorkerIndex, WorkerSlot};
use crate::index::{self, Depths, IndexReader, ShardLimits};
use crate::ingest::FirstLoad;
use crate::ingest::ResetScope;
use crate::ingest::publisher_socket::Link;
use crate::ingest::shard::{Command, Now};
use crate::ingest::tests::vllm::{self, BLOCK_SIZE, Batch};
use crate::ingest::{
    AbortReason, DumpPart, IngestConfig, IngestHandle, LoadAnswer, PublisherPlan, ShardPlan, WorkerView, spawn,
};
use crate::limits::{INGEST_COMMANDS_MAX, TRANSFERS_WAITING_MAX};
use crate::trust::{Trust, TrustLevel, TrustReason};
use std::sync::Arc;

/// Much longer than any step of these tests: only a failure takes this long.
const TIMEOUT: Duration = Duration::from_secs(30);
pub(super) const SCHEME: Scheme = Scheme { block_size: BLOCK_SIZE as u32, window: Window::Plain };

#[track_caller]
pub(super) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// An engine's publisher. XPUB, to know when a subscription has arrived.
pub(super) struct Engine {
    socket: zmq::Socket,
    pub(super) endpoint: String,
}

impl Engine {
    pub(super) fn new() -> Self {
        let socket = zmq::Context::new().socket(zmq::XPUB).expect("a socket");
        socket.set_linger(0).expect("no linger");
        socket.set_sndhwm(0).expect("no mark");
        // The socket reports every subscription, also a second one to the same topic.
        socket.set_xpub_verbose(true).expect("verbose");
        socket.set_rcvtimeo(TIMEOUT.as_millis() as i32).expect("a time limit");
        socket.bind("tcp://127.0.0.1:*").expect("bound");
        let endpoint = socket.get_last_endpoint().expect("an endpoint").expect("of text");
        Self { socket, endpoint }
    }

    pub(super) fn subscribed(&self) {
        // The socket reports the end of a subscription, too.
        while self.socket.recv_bytes(0).expect("a subscription").first() != Some(&1) {}
    }

    /// Its plan for a shard: the scheme of these tests, and no salts.
    pub(super) fn publisher(&self, index: WorkerIndex, worker: Worker, slot: WorkerSlot) -> PublisherPlan {
        PublisherPlan {
            scheme: Arc::new(SchemeCell::new(Some(SCHEME))),
            scheme_configured: true,
            salts_possible: false,
            ..PublisherPlan::at(&self.endpoint, index, worker, slot)
        }
    }

    pub(super) fn send(&self, seq: u64, batch: &Batch) {
        self.socket.send_multipart([b"".as_slice(), &seq.to_be_bytes(), &batch.payload()], 0).expect("sent");
    }
}

/// One daemon's view of worker 1 and of a silent worker 2.
struct Side {
    handle: IngestHandle,
    view: Arc<WorkerView>,
    reader: IndexReader,
    slot: WorkerSlot,
}

impl Side {
    fn start(engine: &Engine) -> Self {
        let (mut writer, reader) = index::shard(ShardId(0), ShardLimits::default());
        let slot = writer.add_worker().expect("room");
        let publisher = engine.publisher(WorkerIndex(0), Worker::new(1, 0), slot);
        let view = Arc::clone(&publisher.view);
        let plan = ShardPlan { shard: ShardId(0), writers: vec![(SpaceId(0), writer)], publishers: vec![publisher] };
        let fleet = Arc::new(Fleet::new(FleetTable::default()));
        let handle = spawn(plan, IngestConfig::default(), fleet).expect("ingest runs");
        engine.subscribed();
        Self { handle, view, reader: IndexReader::new(vec![reader]), slot }
    }

    fn applied(&self, seq: u64) -> Trust {
        until("the batch is applied", || self.view.trust.load().as_of_seq == Some(EventSeq(seq)));
        self.view.trust.load()
    }

    fn device(&self, contents: &[u32]) -> u32 {
        let (mut locals, mut depths) = (Vec::new(), Depths::new());
        let tokens = vllm::tokens(contents);
        hash::local_hashes(SCHEME, hash::seed(None, None), hash::token_bytes(&tokens), &[], &mut locals);
        self.reader.lookup(&locals, &mut depths);
        depths.of(ShardId(0), self.slot).device
    }
}

fn block(seq: u64) -> Batch {
    Batch::new(seq as u32).stored((seq > 0).then(|| seq + 9), &[seq + 10], &[seq as u32])
}

fn last(parts: &Receiver<DumpPart>) -> DumpPart {
    parts.recv_timeout(TIMEOUT).expect("a part");
    parts.try_iter().last().expect("more than one part")
}

#[test]
fn a_daemon_that_joins_late_is_exact_once_it_has_loaded_anothers_dump() {
    let engine = Engine::new();
    let there = Side::start(&engine);
    (0..20).for_each(|seq| engine.send(seq, &block(seq)));
    there.applied(19);
    let here = Side::start(&engine);
    engine.send(20, &block(20));
    assert_eq!(here.applied(20).level, TrustLevel::LowerBound);
    there.applied(20);
    let (sender, parts) = bounded(64);
    let answers = here.handle.load(Worker::new(1, 0), parts).expect("asked");
    assert_eq!(answers.recv_timeout(TIMEOUT), Ok(LoadAnswer::Held { last: Some(EventSeq(20)) }));
    (21..30).for_each(|seq| engine.send(seq, &block(seq)));
    let dump = there.handle.dump(Worker::new(1, 0)).expect("asked");
    (30..60).for_each(|seq| engine.send(seq, &block(seq)));
    while let Ok(part) = dump.recv_timeout(TIMEOUT) {
        sender.send(part).expect("taken");
    }
    let loaded = answers.recv_timeout(TIMEOUT);
    assert!(matches!(loaded, Ok(LoadAnswer::Loaded(references)) if references.blocks >= 21), "{loaded:?}");
    let everything: Vec<u32> = (0..60).collect();
    for side in [&there, &here] {
        assert_eq!(side.applied(59).level, TrustLevel::Exact);
        assert_eq!(side.device(&everything), 60);
    }
}

#[test]
fn other_ends_of_a_dump() {
    let engine = Engine::new();
    let side = Side::start(&engine);
    let unknown = side.handle.dump(Worker::new(9, 0)).expect("asked");
    assert_eq!(unknown.recv_timeout(TIMEOUT), Ok(DumpPart::Aborted(AbortReason::UnknownWorker)));
    let (_sender, parts) = bounded(1);
    let answers = side.handle.load(Worker::new(9, 0), parts).expect("asked");
    assert_eq!(answers.recv_timeout(TIMEOUT), Ok(LoadAnswer::Failed(AbortReason::UnknownWorker)));
    engine.send(0, &block(0));
    side.applied(0);
    let parts = side.handle.dump(Worker::new(1, 0)).expect("asked");
    until("it is dumped", || parts.len() == 3);
    assert!(matches!(last(&parts), DumpPart::End(end) if end.blocks == 1));
    // The worker is removed during its load: the answer says so, and so does the last part of the dump that waits.
    let (_sender, parts) = bounded(1);
    let answers = side.handle.load(Worker::new(1, 0), parts).expect("asked");
    let waits = side.handle.dump(Worker::new(1, 0)).expect("asked");
    assert_eq!(answers.recv_timeout(TIMEOUT), Ok(LoadAnswer::Held { last: Some(EventSeq(0)) }));
    engine.send(1, &block(1));
    side.handle.stop().expect("ended");
    assert_eq!(answers.recv_timeout(TIMEOUT), Ok(LoadAnswer::Failed(AbortReason::WorkerRemoved)));
    assert_eq!(waits.recv_timeout(TIMEOUT), Ok(DumpPart::Aborted(AbortReason::WorkerRemoved)));
}

#[test]
fn a_broken_connection_ends_the_load_and_the_worker_is_as_after_any_break() {
    let engine = Engine::new();
    let side = Side::start(&engine);
    engine.send(0, &block(0));
    side.applied(0);
    let (_sender, parts) = bounded(1);
    let answers = side.handle.load(Worker::new(1, 0), parts).expect("asked");
    assert_eq!(answers.recv_timeout(TIMEOUT), Ok(LoadAnswer::Held { last: Some(EventSeq(0)) }));
    engine.send(1, &block(1));
    drop(engine);
    assert_eq!(answers.recv_timeout(TIMEOUT), Ok(LoadAnswer::Failed(AbortReason::Disconnected)));
    until("the worker is emptied", || side.device(&[0]) == 0);
    assert_eq!(side.view.trust.load().level, TrustLevel::Unproven);
}

#[test]
fn a_bounded_number_of_transfers_waits() {
    use crate::ingest::dump::Sending;
    let (_folder, mut shard) = quiet_shard();
    let mut asked = Vec::new();
    for _ in 0..=TRANSFERS_WAITING_MAX + 1 {
        let (sending, parts) = Sending::new();
        shard.inbox.commands.push(Command::Dump(Worker::new(1, 0), Box::new(sending))).expect("room");
        asked.push(parts);
    }
    assert!(asked.len() <= INGEST_COMMANDS_MAX && !shard.handle_commands());
    let refused = |parts: &Receiver<DumpPart>| parts.try_recv() == Ok(DumpPart::Aborted(AbortReason::Busy));
    assert!(asked.pop().as_ref().is_some_and(refused) && !asked.iter().any(refused));
    assert_eq!(shard.poll_timeout_ms(500), 0);
    // One after the other: begin and end, because the worker holds no block.
    for round in 0..2 * asked.len() + 2 {
        shard.round(Now { unix_ms: 1, uptime_ms: round as u64 });
        shard.transfer(Now { unix_ms: 1, uptime_ms: round as u64 });
    }
    for parts in &asked {
        assert!(matches!(last(parts), DumpPart::End(end) if end.blocks == 0));
    }
}

#[test]
fn a_worker_that_recovers_holds_up_no_dump_or_load_of_another_and_its_own_keep_their_order() {
    use crate::ingest::dump::Sending;
    use crate::limits::TRANSFER_BEGIN_MS_MAX;
    let (_folder, mut shard) = quiet_shard();
    let slot = shard.spaces[0].writer.add_worker().expect("room");
    let (recovers, other) = (Worker::new(1, 0), Worker::new(2, 0));
    let plan = PublisherPlan::at("ipc://@absent", WorkerIndex(1), other, slot);
    shard.open_publisher(&plan, None).expect("opened");
    let at = |uptime_ms| Now { unix_ms: 1, uptime_ms };
    shard.publishers[0].stream.set_replays(true, at(1));
    shard.publishers[0].stream.connected(&mut shard.spaces[0], at(1));
    let ask = |shard: &mut super::Shard, worker| {
        let (sending, parts) = Sending::new();
        shard.inbox.commands.push(Command::Dump(worker, Box::new(sending))).expect("room");
        assert!(!shard.handle_commands());
        parts
    };
    let load_first = |shard: &mut super::Shard, worker| {
        let (parts, received) = bounded(1);
        let (load, answers) = FirstLoad::new(worker, received);
        shard.queue_load(load);
        (parts, answers)
    };
    let (own, (_own_parts, own_load)) = (ask(&mut shard, recovers), load_first(&mut shard, recovers));
    let (others, (others_parts, others_load)) = (ask(&mut shard, other), load_first(&mut shard, other));
    for pass in 2..6 {
        // The messages that waited for the dump are applied before the load begins.
        shard.round(at(pass));
        shard.transfer(at(pass));
    }
    assert!(matches!(last(&others), DumpPart::End(end) if end.blocks == 0), "the other worker is dumped");
    assert_eq!(others_load.try_recv(), Ok(LoadAnswer::Held { last: None }), "and it is being loaded");
    assert!(own.is_empty() && own_load.is_empty());
    // While a load runs, no other one begins, even when the recovery has ended.
    drop(others_parts);
    shard.transfer(at(6));
    assert_eq!(others_load.try_recv(), Ok(LoadAnswer::Failed(AbortReason::PeerGone)));
    shard.transfer(at(7));
    assert!(shard.transfers.timeout_ms() > Some(0), "no thread spins for what waits");
    shard.transfer(at(2 + TRANSFER_BEGIN_MS_MAX - 1));
    assert!(own.is_empty() && own_load.is_empty());
    shard.transfer(at(2 + TRANSFER_BEGIN_MS_MAX));
    assert_eq!(own.try_recv(), Ok(DumpPart::Aborted(AbortReason::Stalled)));
    shard.transfer(at(3 + TRANSFER_BEGIN_MS_MAX));
    assert!(own_load.is_empty(), "the load has its own time");
    let space = &mut shard.spaces[0];
    shard.publishers[0].stream.disconnected(space, at(4 + TRANSFER_BEGIN_MS_MAX));
    shard.transfer(at(5 + TRANSFER_BEGIN_MS_MAX));
    assert_eq!(own_load.try_recv(), Ok(LoadAnswer::Held { last: None }));
}

#[test]
fn nothing_is_taken_of_a_worker_that_is_to_be_loaded_first_until_that_is_over_or_given_up() {
    let (_folder, mut shard) = quiet_shard();
    let worker = shard.publishers[0].stream.worker;
    // Its next message shows a connection that ended.
    shard.publishers[0].link = Link::Up;
    shard.publishers[0].subscription.break_up();
    let is_taken = |shard: &super::Shard| shard.publishers[0].stream.reasons().contains(TrustReason::Disconnected);
    let (_parts, received) = bounded(1);
    let (load, answers) = FirstLoad::new(worker, received);
    shard.publishers[0].waits_for_load = true;
    shard.queue_load(load);
    let now = Now { unix_ms: 1, uptime_ms: 1 };
    for _ in 0..2 {
        shard.enqueue(0);
        shard.round(now);
        shard.transfer(now);
    }
    assert!(!is_taken(&shard) && shard.ready.is_empty(), "it waits, and no thread spins for it");
    shard.inbox.commands.push(Command::Reset(Some(worker), ResetScope::Everything)).expect("room");
    assert!(!shard.handle_commands());
    shard.transfer(now);
    shard.round(now);
    assert!(is_taken(&shard));
    assert!(matches!(answers.iter().last(), Some(LoadAnswer::Failed(AbortReason::Reset))));

    // One that had not even begun.
    let (_folder, mut shard) = quiet_shard();
    shard.publishers[0].link = Link::Up;
    shard.publishers[0].subscription.break_up();
    let (_parts, received) = bounded(1);
    let (load, answers) = FirstLoad::new(worker, received);
    shard.publishers[0].waits_for_load = true;
    shard.queue_load(load);
    shard.inbox.commands.push(Command::Reset(None, ResetScope::Everything)).expect("room");
    assert!(!shard.handle_commands());
    shard.round(now);
    assert!(is_taken(&shard));
    assert!(matches!(answers.iter().last(), Some(LoadAnswer::Failed(AbortReason::Reset))));
}

#[test]
fn an_engine_is_not_down_because_a_load_keeps_the_daemon_from_its_connection() {
    let down_after_ms = super::DOWN_AFTER_MS;
    let state_at = |shard: &mut super::Shard, uptime_ms: u64| {
        shard.tick(Now { unix_ms: 1, uptime_ms });
        shard.update_fleet();
        shard.fleet.load().workers[0].state
    };
    // A load of its own worker, and one of any worker at the start.
    for comes_before_all in [false, true] {
        let (_folder, mut shard) = quiet_shard();
        let worker = shard.publishers[0].stream.worker;
        let (_parts, received) = bounded(1);
        let (load, _answers) = FirstLoad::new(worker, received);
        if comes_before_all {
            shard.load_first(vec![load]);
        } else {
            shard.publishers[0].waits_for_load = true;
            shard.queue_load(load);
        }
        shard.transfer(Now { unix_ms: 1, uptime_ms: 1 });
        let (end_ms, states) = (4 * down_after_ms, [WorkerState::Joining, WorkerState::Down]);
        assert_eq!(state_at(&mut shard, end_ms), states[0], "{comes_before_all}");
        shard.inbox.commands.push(Command::Reset(None, ResetScope::Everything)).expect("room");
        assert!(!shard.handle_commands());
        // The load had begun: it ends with its next slice.
        shard.transfer(Now { unix_ms: 1, uptime_ms: end_ms });
        assert!(!shard.transfers.block_messages() && !shard.publishers[0].waits_for_load);
        let ends = [end_ms + down_after_ms - 1, end_ms + down_after_ms];
        assert_eq!(ends.map(|at_ms| state_at(&mut shard, at_ms)), states, "{comes_before_all}");
    }
}
