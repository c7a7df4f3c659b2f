//! A fleet whose publishers all reconnect at once, over real sockets: how many replays run at a time, in which order,
//! and that a silent publisher delays no other.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use kvrouted::limits::REPLAYS_AT_ONCE_MAX;
use kvrouted::load::{Demand, Loads, LoadsConfig, PromptBlocks};

use super::*;

/// Engines, unless `KVROUTED_FLEET_ENGINES` says another number.
const ENGINES_DEFAULT: usize = 200;
/// Of one context: two sockets each, and libzmq allows 1023.
const ENGINES_PER_CONTEXT: usize = 250;
/// How long questions that are not to be answered yet wait for a sign of life.
const SIGN_OF_LIFE: Duration = Duration::from_millis(300);
/// Live messages that wait while an engine is asked: from none to this many.
const WAITING_MAX: u64 = 2;

/// What an engine's batch is: one block more in its chain.
fn batch(engine: usize, seq: u64) -> Batch {
    Batch::new(seq as u32).stored((seq > 0).then_some(seq), &[seq + 1], &[content(engine, seq)])
}

fn content(engine: usize, seq: u64) -> u32 {
    engine as u32 * 100 + seq as u32
}

/// A question that is not answered yet.
struct Question {
    engine: usize,
    identity: Vec<u8>,
    from: u64,
}

/// How questions are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    /// At once.
    Free,
    /// Not yet, but for signs of life.
    Held,
    /// One whenever as many are open as may be, or all have been asked.
    OneByOne,
}

/// Where all engines' replay sockets are answered from.
struct Answers {
    /// Batches each engine has.
    sent: Vec<u64>,
    flow: Flow,
    mute: Option<usize>,
    open: VecDeque<Question>,
    /// Who was asked, in order.
    asked: Vec<usize>,
    most_open: usize,
    told_at: Instant,
}

impl Answers {
    fn take(&mut self, engine: usize, frames: Vec<Vec<u8>>) {
        let Ok([identity, _, from]) = <[Vec<u8>; 3]>::try_from(frames) else { return };
        let from = u64::from_be_bytes(from.try_into().expect("a sequence"));
        self.asked.push(engine);
        if self.mute != Some(engine) {
            self.open.push_back(Question { engine, identity, from });
            self.most_open = self.most_open.max(self.open.len());
        }
    }

    fn answer(&mut self, routers: &[zmq::Socket]) {
        match self.flow {
            Flow::Free => self.open.drain(..).for_each(|question| whole(routers, &question, &self.sent)),
            Flow::Held if self.told_at.elapsed() >= SIGN_OF_LIFE => {
                self.told_at = Instant::now();
                self.open.iter().for_each(|question| send(routers, question, Some(question.from)));
            }
            Flow::Held => {}
            Flow::OneByOne => {
                let is_full = self.open.len() >= REPLAYS_AT_ONCE_MAX || self.asked.len() >= self.sent.len();
                if let Some(question) = is_full.then(|| self.open.pop_front()).flatten() {
                    whole(routers, &question, &self.sent);
                }
            }
        }
    }
}

fn whole(routers: &[zmq::Socket], question: &Question, sent: &[u64]) {
    (question.from..sent[question.engine]).for_each(|seq| send(routers, question, Some(seq)));
    send(routers, question, None);
}

/// A batch, or the end marker.
fn send(routers: &[zmq::Socket], question: &Question, seq: Option<u64>) {
    let payload = seq.map_or_else(Vec::new, |seq| batch(question.engine, seq).payload());
    let seq = seq.unwrap_or(u64::MAX).to_be_bytes();
    let frames = [question.identity.as_slice(), b"", &seq, &payload];
    // The asking daemon may be gone.
    let _ = routers[question.engine].send_multipart(frames, 0);
}

fn answer_all(routers: &[zmq::Socket], answers: &Mutex<Answers>, ends: &AtomicBool) {
    let mut items: Vec<_> = routers.iter().map(|router| router.as_poll_item(zmq::POLLIN)).collect();
    // Relaxed: nothing hangs on it.
    while !ends.load(Ordering::Relaxed) {
        let _ = zmq::poll(&mut items, 2);
        let mut answers = answers.lock().expect("whole");
        for (engine, _) in items.iter().enumerate().filter(|(_, item)| item.is_readable()) {
            while let Ok(frames) = routers[engine].recv_multipart(zmq::DONTWAIT) {
                answers.take(engine, frames);
            }
        }
        answers.answer(routers);
    }
}

/// Many engines, each a publisher and a replay socket.
struct Engines {
    contexts: Vec<zmq::Context>,
    publishers: Vec<zmq::Socket>,
    endpoints: Vec<String>,
    replays: Vec<String>,
    answers: Arc<Mutex<Answers>>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Engines {
    fn new(count: usize) -> Self {
        let contexts: Vec<_> = (0..count.div_ceil(ENGINES_PER_CONTEXT)).map(|_| zmq::Context::new()).collect();
        let anew = |kind| {
            let of = |engine: usize| bound(&contexts[engine / ENGINES_PER_CONTEXT], kind, "tcp://127.0.0.1:*");
            (0..count).map(of).collect::<Vec<_>>()
        };
        let (publishers, routers) = (anew(zmq::XPUB), anew(zmq::ROUTER));
        let endpoint = |socket: &zmq::Socket| socket.get_last_endpoint().expect("an endpoint").expect("of text");
        let (endpoints, replays) = (publishers.iter().map(endpoint).collect(), routers.iter().map(endpoint).collect());
        let answers = Arc::new(Mutex::new(Answers {
            sent: vec![0; count],
            flow: Flow::Free,
            mute: None,
            open: VecDeque::new(),
            asked: Vec::new(),
            most_open: 0,
            told_at: Instant::now(),
        }));
        let ends = Arc::new(AtomicBool::new(false));
        let (answers_there, ends_there) = (Arc::clone(&answers), Arc::clone(&ends));
        let thread = std::thread::spawn(move || answer_all(&routers, &answers_there, &ends_there));
        Self { contexts, publishers, endpoints, replays, answers, ends, thread: Some(thread) }
    }

    fn count(&self) -> usize {
        self.endpoints.len()
    }

    fn answers<T>(&self, with: impl FnOnce(&mut Answers) -> T) -> T {
        with(&mut self.answers.lock().expect("whole"))
    }

    /// Every engine has more batches that no subscriber got.
    fn lose(&self, batches: u64) {
        self.answers(|answers| answers.sent.iter_mut().for_each(|sent| *sent += batches));
    }

    /// One batch more that is heard.
    fn publish(&self, engine: usize) {
        let seq = self.answers(|answers| {
            answers.sent[engine] += 1;
            answers.sent[engine] - 1
        });
        let frames: [&[u8]; 3] = [b"", &seq.to_be_bytes(), &batch(engine, seq).payload()];
        self.publishers[engine].send_multipart(frames, 0).expect("sent");
    }

    /// All connections break; `meanwhile`, and then they come back.
    fn connect_again(&mut self, meanwhile: impl FnOnce(&Self)) {
        self.publishers.clear();
        meanwhile(self);
        let again = |(engine, endpoint): (usize, &String)| {
            bound(&self.contexts[engine / ENGINES_PER_CONTEXT], zmq::XPUB, endpoint)
        };
        self.publishers = self.endpoints.iter().enumerate().map(again).collect();
        for publisher in &self.publishers {
            assert_eq!(publisher.recv_bytes(0).expect("a subscription").first(), Some(&1));
        }
    }

    fn is_whole(&self, shard: &Shard, engine: usize) -> bool {
        let (sent, trust) = (self.answers(|answers| answers.sent[engine]), shard.trust(engine));
        trust.level == TrustLevel::Exact && trust.as_of_seq == Some(EventSeq(sent - 1))
    }

    /// Waits until a worker holds and is believed all that its engine sent.
    #[track_caller]
    fn await_whole(&self, shard: &Shard, engine: usize) {
        until("each is whole", || self.is_whole(shard, engine));
        let sent = self.answers(|answers| answers.sent[engine]);
        let contents: Vec<u32> = (0..sent).map(|seq| content(engine, seq)).collect();
        assert_eq!(u64::from(shard.device(engine, &contents)), sent);
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn bound(context: &zmq::Context, kind: zmq::SocketType, endpoint: &str) -> zmq::Socket {
    let socket = context.socket(kind).expect("a socket");
    socket.set_linger(0).expect("no linger");
    socket.set_sndhwm(0).expect("no mark");
    socket.set_rcvtimeo(WAIT_MAX.as_millis() as i32).expect("a time limit");
    until("the endpoint is free", || socket.bind(endpoint).is_ok());
    socket
}

/// How many live messages wait for an engine's replay.
fn waiting(engine: usize) -> u64 {
    engine as u64 % (WAITING_MAX + 1)
}

/// Every fourth is busy.
fn is_busy(engine: usize) -> bool {
    engine % 4 == 1
}

fn loads(count: usize) -> Arc<Loads> {
    let loads =
        Loads::new(count, LoadsConfig { age_ms_max: u64::MAX, session_grace_ms: u64::MAX, ..LoadsConfig::default() });
    let session = loads.open_session(None, 0).expect("a session");
    for engine in (0..count).filter(|engine| is_busy(*engine)) {
        let (name, demand) =
            (format!("r{engine}"), Demand { prefill_tokens: 1, blocks: PromptBlocks::Alone(1), ..Demand::default() });
        loads.book(session, &name, 0, WorkerIndex(engine as u32), demand, 0).expect("booked");
    }
    Arc::new(loads)
}

/// All connections break and come back while no request is answered; then requests are answered one by one.
fn asked_in_order(engines: &mut Engines, shard: &Shard) {
    let count = engines.count();
    engines.answers(|answers| (answers.flow, answers.most_open) = (Flow::Held, 0));
    engines.connect_again(|engines| {
        for engine in 0..count {
            until("each break is noticed", || shard.trust(engine).reasons.contains(R::Disconnected));
        }
        engines.lose(2);
        engines.answers(|answers| answers.asked.clear());
    });
    for engine in 0..count {
        until("each is to be asked", || shard.trust(engine).reasons.contains(R::Recovering));
        (0..waiting(engine)).for_each(|_| engines.publish(engine));
    }
    let at_once = count.min(REPLAYS_AT_ONCE_MAX);
    until("the places are taken", || engines.answers(|answers| answers.open.len()) == at_once);
    for engine in 0..count {
        until("live messages wait", || shard.views[engine].gauges.waiting() == waiting(engine));
    }
    engines.answers(|answers| answers.flow = Flow::OneByOne);
    (0..count).for_each(|engine| engines.await_whole(shard, engine));

    let (mut asked, most_open) = engines.answers(|answers| (answers.asked.clone(), answers.most_open));
    assert_eq!(most_open, at_once, "no more at once than there are places");
    // The first connections have the first places. All others had come when the next place became free.
    let order: Vec<_> = asked.iter().skip(at_once).map(|at| (!is_busy(*at), waiting(*at))).collect();
    assert!(order.is_sorted(), "the busy before the idle, the quiet before the loud: {order:?}");
    asked.sort_unstable();
    assert_eq!(asked, (0..count).collect::<Vec<_>>(), "everybody once");
}

/// All break and come back, and one does not answer until all the others are whole.
fn one_is_mute(engines: &mut Engines, shard: &Shard) {
    let (count, mute) = (engines.count(), 0);
    engines.answers(|answers| (answers.flow, answers.mute) = (Flow::Free, Some(mute)));
    engines.connect_again(|engines| {
        until("the break is noticed", || shard.trust(mute).reasons.contains(R::Disconnected));
        engines.lose(1);
    });
    let before = shard.count(mute, C::ReplaysTimedOut);
    (0..count).filter(|engine| *engine != mute).for_each(|engine| engines.await_whole(shard, engine));
    let trust = shard.trust(mute);
    assert_ne!(trust.level, TrustLevel::Exact, "its lost batches are not there");
    engines.answers(|answers| answers.mute = None);
    if trust.reasons.contains(R::Recovering) {
        engines.await_whole(shard, mute);
        assert!(shard.count(mute, C::ReplaysTimedOut) > before);
    }
}

#[test]
fn a_fleet_that_connects_again_is_asked_a_few_at_a_time_in_order_and_one_that_is_mute_delays_nobody() {
    let said = std::env::var("KVROUTED_FLEET_ENGINES").ok();
    let count = said.map_or(ENGINES_DEFAULT, |said| said.parse().expect("KVROUTED_FLEET_ENGINES is a number"));
    // As many for the engines as for those who listen to them.
    let takers = ingest::descriptors::Takers { publishers: 2 * count, ..Default::default() };
    let (limit, needed) = (ingest::descriptors::raise(), ingest::descriptors::needed(takers));
    assert!(limit >= needed, "the limit of open files, {limit}, is too low: {needed}");
    let mut engines = Engines::new(count);
    engines.lose(4);
    let publishers = engines.endpoints.iter().zip(&engines.replays);
    let publishers: Vec<_> = publishers.map(|(at, replay)| (at.as_str(), Some(replay.as_str()))).collect();
    let config = IngestConfig { probe_after_ms: 0, down_after_ms: 0, ..IngestConfig::default() };
    let shard = Shard::booked(&publishers, "", config, Some(&loads(count)));
    (0..count).for_each(|engine| engines.await_whole(&shard, engine));
    assert!(engines.answers(|answers| answers.most_open) <= REPLAYS_AT_ONCE_MAX);
    asked_in_order(&mut engines, &shard);
    one_is_mute(&mut engines, &shard);
    for engine in 0..count {
        assert_eq!(shard.count(engine, C::Emptied), 0, "no blocks were thrown away");
    }
}
