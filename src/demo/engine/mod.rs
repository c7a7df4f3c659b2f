//! A simulated engine: the engine of `simulate` in real time, and events as vLLM publishes them.
//!
//! Its steps take as long as those of Llama 70B on four H100, by [their law](crate::engine_law), but many times faster
//! ([`TIME_FACTOR`] in the demo), so that a demo is short. Its clock is that of its steps: a step begins when the one
//! before it was to end, even if the machine wakes the process later, and takes in the prompts that were sent by then.
//! So the times that users feel are those of the law, and not of a machine that is too small for the demo's processes.

mod blocks;
mod publish;

use std::collections::{HashSet, VecDeque};
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc;
use std::time::Duration;

use rustc_hash::FxHashMap;

pub(crate) use self::blocks::{BLOCK_TOKENS, block_names};
use self::publish::{CacheEvent, Publisher};
use super::args::EngineArgs;
use super::engine_messages::{FromEngine, ToEngine};
use super::processes;
use super::run_records::monotonic_ns;
use crate::engine_law::{ENGINE_PRESETS, EnginePreset};
use crate::error::{Error, Kind};
use crate::simulated_engine::{Block, Engine, EngineRequest, EngineSpec, KvEvent, Part, Progress, RequestId};

/// Seconds of an engine's time in a second of the demo.
pub(crate) const TIME_FACTOR: u16 = 8;
/// What the engines are: Llama 70B on four H100.
pub(crate) const PRESET: EnginePreset = ENGINE_PRESETS[3];

/// An engine with this capacity.
pub(crate) fn spec(capacity_blocks: usize) -> EngineSpec {
    let kv_tokens = (capacity_blocks * BLOCK_TOKENS) as u64;
    EngineSpec { kv_tokens, ..EngineSpec::of(&PRESET, BLOCK_TOKENS as u32) }
}

/// Runs an engine until standard input ends. The first line on standard output is its ZeroMQ endpoint.
///
/// # Errors
/// `system` if sockets or the log cannot be used; `internal` if the gateway asks for the impossible.
pub fn run(args: &EngineArgs) -> Result<(), Error> {
    processes::end_with_stdin()?;
    let listener = UnixListener::bind(&args.link)
        .map_err(|error| system(&format!("{} cannot be bound", args.link.display())).caused_by(error))?;
    let publisher = Publisher::bind(&args.log)?;
    writeln!(std::io::stdout().lock(), "{}", publisher.endpoint()?)
        .map_err(|error| system("standard output is closed").caused_by(error))?;
    // Keep the publisher open after the gateway has left: to the daemon a closed publisher is a lost engine. The demo
    // ends this process.
    let _publisher = serve(&listener, publisher, (args.capacity_blocks, args.time_factor))?;
    loop {
        std::thread::park();
    }
}

/// Waits for the daemon's subscription and for a gateway, and serves the gateway until it leaves. Returns the
/// publisher, still open.
fn serve(
    listener: &UnixListener,
    publisher: Publisher,
    (capacity_blocks, time_factor): (usize, u16),
) -> Result<Publisher, Error> {
    publisher.wait_for_subscription()?;
    let (stream, _) = listener.accept().map_err(|error| system("no gateway can be accepted").caused_by(error))?;
    let reading = stream.try_clone().map_err(|error| system("a socket cannot be shared").caused_by(error))?;
    let (arrivals, arrived) = mpsc::channel();
    std::thread::Builder::new()
        .name("link".to_owned())
        .spawn(move || read_requests(reading, &arrivals))
        .map_err(|error| system("no thread can be started").caused_by(error))?;
    let mut engine = RealTimeEngine {
        engine: Engine::new(spec(capacity_blocks)),
        time_factor: f64::from(time_factor),
        now_ns: monotonic_ns(),
        coming: VecDeque::new(),
        sequences: FxHashMap::default(),
        depths: FxHashMap::default(),
        publisher,
        gateway: stream,
        progress: Vec::new(),
        events: Vec::new(),
    };
    engine.reply(FromEngine::Ready)?;
    engine.run(&arrived)?;
    Ok(engine.publisher)
}

fn read_requests(stream: UnixStream, arrivals: &mpsc::Sender<Arrival>) {
    let mut from = std::io::BufReader::with_capacity(1 << 16, stream);
    // A broken stream means the same as a closed one: the gateway has left.
    while let Ok(Some(request)) = ToEngine::read(&mut from) {
        // Hashing happens beside the steps, as in engines.
        let arrival = match request {
            ToEngine::Submit { id, sent_ns, prompt, output } => {
                Arrival::Prompt(Sequence::new((id, sent_ns), prompt, &output))
            }
            ToEngine::Clear => Arrival::Clear,
            ToEngine::Finish => Arrival::Finish,
        };
        if arrivals.send(arrival).is_err() {
            return;
        }
    }
}

enum Arrival {
    Prompt(Sequence),
    Clear,
    Finish,
}

/// A request with its tokens.
struct Sequence {
    id: RequestId,
    /// When the gateway sent it.
    sent_ns: u64,
    /// Prompt and output.
    tokens: Vec<u32>,
    prompt_tokens: usize,
    /// Names of the whole blocks of all tokens but the last, which is never computed.
    chain: Vec<u64>,
    /// Whole blocks of the prompt that were in the cache.
    cached_blocks: u32,
}

impl Sequence {
    fn new((id, sent_ns): (u32, u64), prompt: Vec<u32>, output: &[u32]) -> Self {
        let (prompt_tokens, mut tokens) = (prompt.len(), prompt);
        tokens.extend_from_slice(output);
        let chain = block_names(tokens.split_last().map_or(&[], |(_, computed)| computed));
        Self { id: RequestId(id), sent_ns, tokens, prompt_tokens, chain, cached_blocks: 0 }
    }

    /// The store event of blocks `from..to`.
    fn stored(&self, from: usize, to: usize) -> CacheEvent<'_> {
        CacheEvent::Stored {
            parent: from.checked_sub(1).map(|before| self.chain[before]),
            names: &self.chain[from..to],
            tokens: &self.tokens[from * BLOCK_TOKENS..to * BLOCK_TOKENS],
        }
    }
}

struct RealTimeEngine {
    engine: Engine,
    /// Seconds of the engine's time in a second.
    time_factor: f64,
    /// The engine's clock: when the last step was to end. Nanoseconds of the clock that all processes share.
    now_ns: u64,
    /// Prompts that the engine has not taken in.
    coming: VecDeque<Sequence>,
    /// The requests of the engine.
    sequences: FxHashMap<RequestId, Sequence>,
    /// The place in its chain of every block in the cache.
    depths: FxHashMap<u64, u32>,
    publisher: Publisher,
    gateway: UnixStream,
    progress: Vec<Progress>,
    events: Vec<KvEvent>,
}

impl RealTimeEngine {
    fn run(&mut self, arrived: &mpsc::Receiver<Arrival>) -> Result<(), Error> {
        loop {
            while let Ok(arrival) = arrived.try_recv() {
                self.take(arrival)?;
            }
            if self.step()? {
                continue;
            }
            match self.coming.front() {
                Some(next) => {
                    self.now_ns = self.now_ns.max(next.sent_ns);
                    self.sleep();
                }
                None => {
                    let Ok(arrival) = arrived.recv() else { return Ok(()) };
                    self.take(arrival)?;
                }
            }
        }
    }

    fn take(&mut self, arrival: Arrival) -> Result<(), Error> {
        match arrival {
            Arrival::Prompt(sequence) => {
                self.coming.push_back(sequence);
                Ok(())
            }
            Arrival::Clear if self.coming.is_empty() && self.sequences.is_empty() => {
                self.engine = Engine::new(self.engine.spec().clone());
                self.depths.clear();
                let seq = self.publisher.publish(&[CacheEvent::Cleared])?;
                self.reply(FromEngine::Cleared { seq })
            }
            Arrival::Clear => Err(impossible("to clear a cache in use")),
            Arrival::Finish => {
                let batches = self.publisher.finish()?;
                self.reply(FromEngine::Finished { batches })
            }
        }
    }

    /// Runs one step. `false`: there is nothing to compute.
    fn step(&mut self) -> Result<bool, Error> {
        while let Some(next) = self.coming.pop_front_if(|next| next.sent_ns <= self.now_ns) {
            self.admit(next)?;
        }
        let Some(step_s) = self.engine.begin_step(self.now_ns, &mut self.progress) else { return Ok(false) };
        // Blocks are evicted at the beginning of a step and stored at its end.
        self.publish()?;
        self.now_ns += (step_s / self.time_factor * 1e9) as u64;
        self.sleep();
        self.engine.end_step(&mut self.progress);
        self.publish()?;
        self.report()?;
        Ok(true)
    }

    /// Sleeps until the machine's clock shows the engine's time, if that is to come.
    fn sleep(&self) {
        std::thread::sleep(Duration::from_nanos(self.now_ns.saturating_sub(monotonic_ns())));
    }

    fn admit(&mut self, sequence: Sequence) -> Result<(), Error> {
        let prompt_tokens = sequence.prompt_tokens as u32;
        let output_tokens = sequence.tokens.len() as u32 - prompt_tokens;
        if prompt_tokens == 0 || output_tokens == 0 {
            return Err(impossible("for a request without prompt or output"));
        }
        if !self.engine.can_hold(prompt_tokens, output_tokens) {
            return Err(impossible("for a request that is larger than the cache"));
        }
        let blocks = sequence.chain.iter().map(|name| Block { local: *name, chain: *name }).collect();
        self.engine.push(EngineRequest { id: sequence.id, blocks, prompt_tokens, output_tokens, part: Part::Whole });
        self.sequences.insert(sequence.id, sequence);
        Ok(())
    }

    /// Publishes what has changed in the cache: one batch for evictions, and mostly one for stores.
    ///
    /// An index that applies event by event must show, for any prompt, only depths from before or after a batch. That
    /// lets the demo compare every answer with batch boundaries. So evicted blocks near the root go first, and a chain
    /// that two events extend is in two batches.
    fn publish(&mut self) -> Result<(), Error> {
        self.engine.take_events(&mut self.events);
        let (mut removed, mut batch) = (Vec::new(), Vec::new());
        let (mut extended, mut new) = (HashSet::new(), HashSet::<u64>::new());
        for event in self.events.drain(..) {
            match event {
                KvEvent::Stored { id, from, to, .. } => {
                    let Some(sequence) = self.sequences.get(&id) else { continue };
                    let (from, to) = (from as usize, to as usize);
                    let extends_new = from.checked_sub(1).is_some_and(|before| new.contains(&sequence.chain[before]));
                    if !extended.insert(id) || extends_new {
                        self.publisher.publish(&batch)?;
                        batch.clear();
                        (extended, new) = (HashSet::from([id]), HashSet::new());
                    }
                    new.extend(&sequence.chain[from..to]);
                    let places = (from as u32..).zip(&sequence.chain[from..to]);
                    self.depths.extend(places.map(|(depth, name)| (*name, depth)));
                    batch.push(sequence.stored(from, to));
                }
                KvEvent::Removed { chains, .. } => removed.extend(chains),
                // There is no lower tier.
                KvEvent::Copied { .. } => {}
            }
        }
        if !removed.is_empty() {
            removed.sort_by_cached_key(|name| self.depths.remove(name));
            let removed: Vec<_> = removed.into_iter().map(|name| CacheEvent::Removed { name }).collect();
            self.publisher.publish(&removed)?;
        }
        if !batch.is_empty() {
            self.publisher.publish(&batch)?;
        }
        Ok(())
    }

    /// Tells the gateway which prompts were computed and which requests are complete.
    fn report(&mut self) -> Result<(), Error> {
        let at_ns = self.now_ns;
        for progress in std::mem::take(&mut self.progress) {
            match progress {
                Progress::Scheduled { id, cached_tokens } => {
                    if let Some(sequence) = self.sequences.get_mut(&id) {
                        sequence.cached_blocks = cached_tokens / BLOCK_TOKENS as u32;
                    }
                }
                Progress::FirstToken(id) => {
                    let cached_blocks = self.sequences.get(&id).map_or(0, |sequence| sequence.cached_blocks);
                    self.reply(FromEngine::Prefilled { id: id.0, cached_blocks, at_ns })?;
                }
                Progress::Finished(id) => {
                    self.sequences.remove(&id);
                    self.reply(FromEngine::Done { id: id.0, at_ns })?;
                }
                // No request runs in two parts here.
                Progress::Preempted(_) | Progress::Received(_) => {}
            }
        }
        Ok(())
    }

    fn reply(&mut self, reply: FromEngine) -> Result<(), Error> {
        reply.write(&mut self.gateway).map_err(|error| system("the gateway is gone").caused_by(error))
    }
}

fn system(what: &str) -> Error {
    Error::new(Kind::System, what, "start the demo again; if it persists, check the limits on files and processes")
}

fn impossible(what: &str) -> Error {
    Error::new(Kind::Internal, format!("the gateway asked {what}"), "report it with the command line used")
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::demo::run_records::{BatchRecord, EventRecord, read_all};

    struct Running {
        _folder: tempfile::TempDir,
        log: PathBuf,
        gateway: UnixStream,
        events: zmq::Socket,
    }

    /// Starts an engine with this many blocks, subscribes and connects to it.
    fn start(capacity_blocks: usize) -> Running {
        let folder = tempfile::tempdir().unwrap();
        let (link, log) = (folder.path().join("link"), folder.path().join("log"));
        let listener = UnixListener::bind(&link).unwrap();
        let publisher = Publisher::bind(&log).unwrap();
        let events = zmq::Context::new().socket(zmq::SUB).unwrap();
        events.set_rcvtimeo(10_000).unwrap();
        events.connect(&publisher.endpoint().unwrap()).unwrap();
        events.set_subscribe(b"").unwrap();
        std::thread::spawn(move || serve(&listener, publisher, (capacity_blocks, TIME_FACTOR)).map(drop).unwrap());
        let gateway = UnixStream::connect(&link).unwrap();
        Running { _folder: folder, log, gateway, events }
    }

    impl Running {
        fn say(&mut self, request: &ToEngine) {
            request.write(&mut self.gateway).unwrap();
        }

        fn hear(&mut self) -> FromEngine {
            FromEngine::read(&mut self.gateway).unwrap().unwrap()
        }

        /// Runs a request. Returns its cached blocks, and its times to the first and the last token in nanoseconds.
        fn run(&mut self, id: u32, prompt: std::ops::Range<u32>, output: std::ops::Range<u32>) -> (u32, [u64; 2]) {
            let sent_ns = monotonic_ns();
            self.say(&ToEngine::Submit { id, sent_ns, prompt: prompt.collect(), output: output.collect() });
            let FromEngine::Prefilled { id: prefilled, cached_blocks, at_ns } = self.hear() else {
                panic!("no prefill")
            };
            let FromEngine::Done { id: done, at_ns: end_ns } = self.hear() else { panic!("not done") };
            assert_eq!((prefilled, done), (id, id));
            (cached_blocks, [at_ns - sent_ns, end_ns - sent_ns])
        }
    }

    #[test]
    fn published_events_match_the_cache() {
        let mut engine = start(8);
        assert_eq!(engine.hear(), FromEngine::Ready);
        engine.say(&ToEngine::Clear);
        assert_eq!(engine.hear(), FromEngine::Cleared { seq: 0 });
        assert_eq!(engine.run(1, 0..50, 50..81).0, 0, "3 blocks of prompt, 2 of output");
        assert_eq!(engine.run(2, 0..81, 81..82).0, 5, "the next turn finds both");
        assert_eq!(engine.run(3, 500..564, 0..1).0, 0, "4 blocks, of which the cache has room for 3");
        assert_eq!(engine.run(4, 0..81, 81..82).0, 4, "its last block was evicted");
        engine.say(&ToEngine::Finish);
        let FromEngine::Finished { batches } = engine.hear() else { panic!("not finished") };

        let mut log: Vec<BatchRecord> = Vec::new();
        read_all(&engine.log, |batch| log.push(batch)).unwrap();
        assert_eq!((log.len() as u64, log[0].events.as_slice()), (batches, [EventRecord::Cleared].as_slice()));
        let first: Vec<u32> = (0..80).collect();
        let other: Vec<u32> = (500..564).collect();
        let (first, other) = (block_names(&first), block_names(&other));
        let events: Vec<EventRecord> = log.iter().flat_map(|batch| batch.events.clone()).collect();
        assert_eq!(
            events,
            [
                EventRecord::Cleared,
                EventRecord::Stored(first[..3].to_vec()),
                EventRecord::Stored(first[3..].to_vec()),
                EventRecord::Removed(vec![first[4]]),
                EventRecord::Stored(other.clone()),
                EventRecord::Removed(vec![other[2]]),
                EventRecord::Removed(vec![other[3]]),
                EventRecord::Stored(vec![first[4]]),
            ]
        );
        for batch in &log {
            let frames = engine.events.recv_multipart(0).unwrap();
            assert_eq!(frames.len(), 3);
            assert_eq!((frames[0].as_slice(), frames[1].as_slice()), (&[][..], &batch.seq.to_be_bytes()[..]));
            assert_eq!(frames[2][0], 0x93);
        }
        assert!(log.windows(2).all(|pair| pair[0].sent_ns <= pair[1].sent_ns));
    }

    #[test]
    fn times_are_those_of_the_law_whenever_the_machine_wakes_the_engine() {
        let mut engine = start(8);
        assert_eq!(engine.hear(), FromEngine::Ready);
        let law = PRESET.law;
        let (first_s, step_s) = (law.prefill_s(50.0, 0.0, 8192.0), law.step_s(0.0, 0.0, 1.0, 50.0));
        let (_, took_ns) = engine.run(1, 0..50, 50..81);
        let [first, end] = took_ns.map(|ns| ns as f64 * 1e-9 * f64::from(TIME_FACTOR));
        // Decode steps also read the weights, and read the KV of each token so far.
        assert!((first / law.step_s(50.0, 1250.0, 0.0, 0.0) - 1.0).abs() < 1e-3 && first >= first_s, "{first}");
        assert!(((end - first) / (30.0 * step_s) - 1.0).abs() < 0.01, "{first} {end}");
    }

    #[test]
    fn a_chain_that_two_events_extend_is_in_two_batches() {
        let mut engine = start(64);
        assert_eq!(engine.hear(), FromEngine::Ready);
        // Both are computed in the same step, and the second finds nothing of the first.
        let sent_ns = monotonic_ns() + 200_000_000;
        for (id, tokens) in [(1, 0..33), (2, 0..81)] {
            engine.say(&ToEngine::Submit { id, sent_ns, prompt: tokens.collect(), output: vec![7] });
        }
        let heard: Vec<FromEngine> = (0..4).map(|_| engine.hear()).collect();
        assert!(heard.iter().all(|message| !matches!(message, FromEngine::Prefilled { cached_blocks: 1.., .. })));
        engine.say(&ToEngine::Finish);
        assert_eq!(engine.hear(), FromEngine::Finished { batches: 2 });
        let mut log: Vec<BatchRecord> = Vec::new();
        read_all(&engine.log, |batch| log.push(batch)).unwrap();
        let names = block_names(&(0..80).collect::<Vec<u32>>());
        let stored = |from: usize, to: usize| [EventRecord::Stored(names[from..to].to_vec())];
        assert_eq!((log[0].events.as_slice(), log[1].events.as_slice()), (&stored(0, 2)[..], &stored(2, 5)[..]));
    }

    #[test]
    fn the_engines_are_the_stated_ones() {
        assert_eq!(PRESET.name, "70b-tp4");
    }
}
