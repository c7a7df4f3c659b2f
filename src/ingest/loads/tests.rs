//! Real publishers, in this process, of the loads that an engine's scheduler would publish.

use std::time::Duration;

use serde_json::json;

use super::*;
use crate::event::msgpack::tests::packed;
use crate::ids::Window;
use crate::limits::WORKERS_MAX;
use crate::load::LoadsConfig;
use crate::watchdog::ThreadMark;

fn mark() -> Arc<ThreadMark> {
    Arc::new(ThreadMark::new("engine-loads", false))
}

/// A publisher's socket, which reports subscriptions.
struct Engine {
    socket: zmq::Socket,
    endpoint: String,
    said: u64,
}

impl Engine {
    fn bind(context: &zmq::Context) -> Self {
        let socket = context.socket(zmq::XPUB).expect("a socket");
        socket.bind("tcp://127.0.0.1:*").expect("a free port");
        let endpoint = socket.get_last_endpoint().expect("bound").expect("text");
        Self { socket, endpoint, said: 0 }
    }

    fn wait_for_subscriber(&self) {
        assert_eq!(self.socket.recv_bytes(0).expect("a subscription"), [1]);
    }

    fn say(&mut self, payload: &[u8]) {
        let seq = self.said.to_be_bytes();
        self.socket.send_multipart([&b"load"[..], &seq, payload], 0).expect("sent");
        self.said += 1;
    }
}

fn stat(running: u32, tokens: u64) -> Vec<u8> {
    packed(&json!(["LoadStat", running, 1, tokens, 1600, 0, 77, 0, 0, 0, 0]))
}

fn source(index: u32, engine: &Engine) -> LoadSource {
    let scheme = Arc::new(SchemeCell::new(Some(Scheme { block_size: 16, window: Window::Plain })));
    let worker = Worker::new(u64::from(index), 0);
    LoadSource { index: WorkerIndex(index), worker, endpoint: engine.endpoint.parse().expect("an endpoint"), scheme }
}

/// Waits for an expected value. A fault shows as a hang that the test runner ends.
fn until<T>(look: impl Fn() -> Option<T>) -> T {
    loop {
        if let Some(found) = look() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn published_loads_are_reported_and_follow_the_list_of_sources() {
    let context = zmq::Context::new();
    let mut engines = [Engine::bind(&context), Engine::bind(&context)];
    let (loads, counters) = (Arc::new(Loads::new(2, LoadsConfig::default())), Arc::default());
    let listener = LoadListener::start(Arc::clone(&loads), (Arc::clone(&counters), mark()), || 5).expect("a thread");
    listener.follow(vec![source(0, &engines[0]), source(1, &engines[1])]).expect("woken");
    engines.iter().for_each(Engine::wait_for_subscriber);
    let said = |index, running| {
        let engine = loads.read_at(WorkerIndex(index), 5).engine;
        engine.filter(|engine| engine.running == running)
    };
    engines[0].say(&stat(3, 800));
    engines[1].say(&stat(4, 17));
    let first =
        EngineLoad { prefill_tokens: 77, decode_blocks: 50, running: 3, waiting: 1, kv_usage_millionths: 500_000 };
    assert_eq!(until(|| said(0, 3)), first);
    assert_eq!(until(|| said(1, 4)).decode_blocks, 2);
    // A message that cannot be decoded changes nothing and is counted. The next one is read.
    engines[0].say(b"nothing");
    engines[0].socket.send("one frame", 0).expect("sent");
    let of = |counter| counters.get(counter);
    until(|| (of(LoadReportCounter::ReportsMisframed) == 1).then_some(()));
    engines[0].say(&stat(9, 800));
    until(|| said(0, 9));
    let read = of(LoadReportCounter::ReportsUndecodable) + of(LoadReportCounter::ReportsOvertaken);
    assert_eq!(read, 1, "what cannot be read is counted, unless a newer one had come");
    // The second is no longer listened to, the first goes on undisturbed.
    listener.follow(vec![source(0, &engines[0])]).expect("woken");
    assert_eq!(engines[1].socket.recv_bytes(0).expect("an end"), [0]);
    engines[0].say(&stat(11, 0));
    until(|| said(0, 11));
    assert!(engines[0].socket.recv_bytes(zmq::DONTWAIT).is_err(), "it was not subscribed to again");
    listener.stop().expect("it ends well");
}

#[test]
fn removed_and_unreachable_sources_are_counted() {
    let context = zmq::Context::new();
    let mut engine = Engine::bind(&context);
    let (loads, counters) = (Arc::new(Loads::new(1, LoadsConfig::default())), Arc::default());
    let listener = LoadListener::start(Arc::clone(&loads), (Arc::clone(&counters), mark()), || 5).expect("a thread");
    let invalid = LoadSource { endpoint: Endpoint::unparsed("tcp://"), ..source(0, &engine) };
    listener.follow(vec![invalid, source(WORKERS_MAX as u32 - 1, &engine)]).expect("woken");
    engine.wait_for_subscriber();
    engine.say(&stat(1, 1));
    until(|| (counters.get(LoadReportCounter::ReportsUnknownWorker) == 1).then_some(()));
    assert_eq!(counters.get(LoadReportCounter::SourcesRefused), 1);
    assert_eq!(counters.get(LoadReportCounter::Reports), 0);
}

#[test]
fn a_source_that_floods_gets_one_quantum_in_each_round() {
    let context = zmq::Context::new();
    let mut engine = Engine::bind(&context);
    let (loads, counters) = (Arc::new(Loads::new(1, LoadsConfig::default())), Arc::default());
    let (mut listening, _waker) = Listening::new(loads, Arc::clone(&counters), || 5).expect("an event loop");
    listening.follow(&[source(0, &engine)]);
    let mut events = Events::with_capacity(POLL_EVENTS);
    let mut signalled = |listening: &mut Listening<_>| {
        listening.poll.poll(&mut events, Some(Duration::from_millis(5))).expect("an event loop");
        events.iter().map(|event| event.token()).collect::<Vec<_>>()
    };
    while engine.socket.poll(zmq::POLLIN, 0).expect("polled") == 0 {
        let signalled = signalled(&mut listening);
        listening.read_ready(signalled.into_iter());
        listening.tick();
    }
    engine.wait_for_subscriber();
    // Fewer than the engine's socket drops.
    let messages = 12 * LOAD_REPORT_MESSAGES_MAX as u64;
    (0..messages).for_each(|_| engine.say(&stat(1, 1)));
    let taken = || counters.get(LoadReportCounter::Reports) + counters.get(LoadReportCounter::ReportsOvertaken);
    while taken() < messages {
        let before = taken();
        // It is signalled again while it has unread messages.
        let signalled = signalled(&mut listening);
        listening.read_ready(signalled.into_iter().chain([Token(0)]));
        assert!(taken() - before <= LOAD_REPORT_MESSAGES_MAX as u64, "{} at once", taken() - before);
        assert!(listening.unread.len() <= 1, "{:?}", listening.unread);
    }
}

#[test]
fn tokens_become_blocks_and_a_share() {
    let stat = LoadStat {
        running: 3,
        waiting: 2,
        used_tokens: 70_001,
        capacity_tokens: 400_000,
        waiting_uncached_tokens: 9_000,
    };
    let scheme = Some(Scheme { block_size: 64, window: Window::Plain });
    let load = EngineLoad {
        prefill_tokens: 9_000,
        decode_blocks: 1_094,
        running: 3,
        waiting: 2,
        kv_usage_millionths: 175_002,
    };
    assert_eq!(engine_load(&stat, scheme), load);
    assert_eq!(engine_load(&stat, None).decode_blocks, 4_376);
    let vast = LoadStat { used_tokens: u64::MAX, capacity_tokens: 1, ..stat };
    assert_eq!(engine_load(&vast, scheme).kv_usage_millionths, u32::MAX);
    let unknown = LoadStat { capacity_tokens: 0, ..stat };
    assert_eq!(engine_load(&unknown, scheme).kv_usage_millionths, 0);
}

#[test]
fn silence_is_logged_once_and_so_is_its_end() {
    let mut liveness = Liveness::Waiting { since_ms: 5 };
    assert!(!liveness.tick(LOAD_REPORT_SILENT_MS + 4));
    assert!(liveness.tick(LOAD_REPORT_SILENT_MS + 5));
    assert!(!liveness.tick(u64::MAX));
    assert!(liveness.note_reading(90_000));
    assert!(!liveness.note_reading(91_000));
    assert!(!liveness.tick(91_000 + LOAD_REPORT_SILENT_MS - 1));
    assert!(liveness.tick(91_000 + LOAD_REPORT_SILENT_MS));
}
