//! A simulated engine: a prefix cache that publishes events as vLLM does, and a clock in place of a GPU.
//!
//! It runs in steps, as engines do: a step admits waiting prompts, computes them, advances every running request by one
//! block of output, and publishes the changes of the cache as one batch. Only its durations are invented: about a
//! fortieth of a large model's on one accelerator.

mod cache;
mod publish;

use std::collections::VecDeque;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc;
use std::time::{Duration, Instant};

pub(crate) use self::cache::{BLOCK_TOKENS, PrefixCache, block_names};
use self::publish::{CacheEvent, Publisher};
use super::args::EngineArgs;
use super::engine_messages::{FromEngine, ToEngine};
use super::processes;
use crate::error::{Error, Kind};

/// Prompt tokens computed in a second.
const PREFILL_TOKENS_PER_S: f64 = 250_000.0;
/// Time of a step that generates a block for every running request.
const DECODE_BLOCK: Duration = Duration::from_micros(4_000);
/// Most prompt tokens in one step, unless a single prompt has more.
const STEP_PREFILL_TOKENS_MAX: usize = 8_192;
/// Requests running at once.
const RUNNING_MAX: usize = 32;

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
    let _publisher = serve(&listener, publisher, args.capacity_blocks)?;
    loop {
        std::thread::park();
    }
}

/// Waits for the daemon's subscription and for a gateway, and serves the gateway until it leaves. Returns the
/// publisher, still open.
fn serve(listener: &UnixListener, publisher: Publisher, capacity_blocks: usize) -> Result<Publisher, Error> {
    publisher.wait_for_subscription()?;
    let (stream, _) = listener.accept().map_err(|error| system("no gateway can be accepted").caused_by(error))?;
    let reading = stream.try_clone().map_err(|error| system("a socket cannot be shared").caused_by(error))?;
    let (arrivals, arrived) = mpsc::channel();
    std::thread::Builder::new()
        .name("link".to_owned())
        .spawn(move || read_requests(reading, &arrivals))
        .map_err(|error| system("no thread can be started").caused_by(error))?;
    let mut engine = Engine {
        cache: PrefixCache::new(capacity_blocks),
        publisher,
        gateway: stream,
        waiting: VecDeque::new(),
        running: Vec::new(),
        evicted: Vec::new(),
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
            ToEngine::Submit { id, prompt, output } => Arrival::Prompt(Sequence::new(id, prompt, &output)),
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

/// A request and how far it has come.
struct Sequence {
    id: u32,
    /// Prompt and output.
    tokens: Vec<u32>,
    prompt_tokens: usize,
    /// Names of the whole blocks of `tokens`.
    chain: Vec<u64>,
    /// Tokens computed so far.
    computed_tokens: usize,
    /// Leading blocks of `chain` that it has pinned.
    pinned_blocks: usize,
    /// Blocks of the prompt that were in the cache.
    cached_blocks: usize,
}

impl Sequence {
    fn new(id: u32, prompt: Vec<u32>, output: &[u32]) -> Self {
        let (prompt_tokens, mut tokens) = (prompt.len(), prompt);
        tokens.extend_from_slice(output);
        let chain = block_names(&tokens);
        Self { id, tokens, prompt_tokens, chain, computed_tokens: 0, pinned_blocks: 0, cached_blocks: 0 }
    }

    fn prompt_blocks(&self) -> usize {
        self.prompt_tokens / BLOCK_TOKENS
    }

    fn is_done(&self) -> bool {
        self.computed_tokens >= self.tokens.len()
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

struct Engine {
    cache: PrefixCache,
    publisher: Publisher,
    gateway: UnixStream,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    /// Blocks evicted in this step.
    evicted: Vec<u64>,
}

impl Engine {
    fn run(&mut self, arrived: &mpsc::Receiver<Arrival>) -> Result<(), Error> {
        loop {
            if self.is_idle() {
                let Ok(arrival) = arrived.recv() else { return Ok(()) };
                self.take(arrival)?;
            }
            while let Ok(arrival) = arrived.try_recv() {
                self.take(arrival)?;
            }
            if !self.is_idle() {
                self.step()?;
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    fn take(&mut self, arrival: Arrival) -> Result<(), Error> {
        match arrival {
            Arrival::Prompt(sequence) => {
                self.waiting.push_back(sequence);
                Ok(())
            }
            Arrival::Clear if self.is_idle() => {
                self.cache.clear();
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

    fn step(&mut self) -> Result<(), Error> {
        let started = Instant::now();
        let decoding = self.running.len();
        let prefill_tokens = self.admit()?;
        let mut busy = Duration::from_secs_f64(prefill_tokens as f64 / PREFILL_TOKENS_PER_S);
        if decoding > 0 {
            busy += DECODE_BLOCK;
        }
        std::thread::sleep(busy.saturating_sub(started.elapsed()));
        let stored = self.advance(decoding);
        self.publish(&stored)?;
        self.report(decoding)
    }

    /// Admits waiting prompts in order, as far as step and cache have room. Returns the number of tokens to compute.
    fn admit(&mut self) -> Result<usize, Error> {
        let mut prefill_tokens = 0;
        while let Some(next) = self.waiting.front_mut()
            && self.running.len() < RUNNING_MAX
        {
            let prompt_blocks = next.prompt_blocks();
            let uncached = next.prompt_tokens - BLOCK_TOKENS * self.cache.depth(&next.chain[..prompt_blocks]);
            if prefill_tokens > 0 && prefill_tokens + uncached > STEP_PREFILL_TOKENS_MAX {
                break;
            }
            let output_blocks = next.chain.len() - prompt_blocks;
            let Some(cached) = self.cache.admit(&next.chain[..prompt_blocks], output_blocks, &mut self.evicted) else {
                break;
            };
            prefill_tokens += uncached;
            (next.cached_blocks, next.pinned_blocks, next.computed_tokens) =
                (cached, prompt_blocks, next.prompt_tokens);
            self.running.extend(self.waiting.pop_front());
        }
        if self.running.is_empty() {
            return Err(impossible("for a request that is larger than the cache"));
        }
        Ok(prefill_tokens)
    }

    /// Advances the first `decoding` running requests by a block. Returns the newly held blocks, as (running request,
    /// from block, to block).
    fn advance(&mut self, decoding: usize) -> Vec<(usize, usize, usize)> {
        let mut stored = Vec::new();
        for (index, sequence) in self.running.iter_mut().enumerate() {
            if index >= decoding {
                if sequence.cached_blocks < sequence.pinned_blocks {
                    stored.push((index, sequence.cached_blocks, sequence.pinned_blocks));
                }
                continue;
            }
            sequence.computed_tokens = sequence.tokens.len().min(sequence.computed_tokens + BLOCK_TOKENS);
            while sequence.pinned_blocks < sequence.computed_tokens / BLOCK_TOKENS {
                let block = sequence.pinned_blocks;
                sequence.pinned_blocks += 1;
                if self.cache.append(sequence.chain[block], &mut self.evicted) {
                    stored.push((index, block, block + 1));
                }
            }
        }
        stored
    }

    /// Publishes the step's changes: one event for each evicted block, then the stored blocks.
    ///
    /// Within a batch, blocks near the root go first. An index that applies event by event then shows, for any prompt,
    /// only depths from before or after the batch. That lets the demo compare every answer with batch boundaries.
    fn publish(&mut self, stored: &[(usize, usize, usize)]) -> Result<(), Error> {
        let removed = self.evicted.drain(..).rev().map(|name| CacheEvent::Removed { name });
        let stored = stored.iter().map(|(index, from, to)| self.running[*index].stored(*from, *to));
        let events: Vec<CacheEvent<'_>> = removed.chain(stored).collect();
        if !events.is_empty() {
            self.publisher.publish(&events)?;
        }
        Ok(())
    }

    /// Tells the gateway which prompts were computed and which requests are complete, and releases the latter.
    fn report(&mut self, decoding: usize) -> Result<(), Error> {
        for index in decoding..self.running.len() {
            let Sequence { id, cached_blocks, .. } = self.running[index];
            self.reply(FromEngine::Prefilled { id, cached_blocks: cached_blocks as u32 })?;
        }
        let mut left = Vec::with_capacity(self.running.len());
        for sequence in std::mem::take(&mut self.running) {
            if sequence.is_done() {
                self.cache.release(&sequence.chain[..sequence.pinned_blocks]);
                self.reply(FromEngine::Done { id: sequence.id })?;
            } else {
                left.push(sequence);
            }
        }
        self.running = left;
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

    /// Starts an engine with 8 blocks, subscribes and connects to it.
    fn start() -> Running {
        let folder = tempfile::tempdir().unwrap();
        let (link, log) = (folder.path().join("link"), folder.path().join("log"));
        let listener = UnixListener::bind(&link).unwrap();
        let publisher = Publisher::bind(&log).unwrap();
        let events = zmq::Context::new().socket(zmq::SUB).unwrap();
        events.set_rcvtimeo(10_000).unwrap();
        events.connect(&publisher.endpoint().unwrap()).unwrap();
        events.set_subscribe(b"").unwrap();
        std::thread::spawn(move || serve(&listener, publisher, 8).map(drop).unwrap());
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

        fn run(&mut self, id: u32, prompt: std::ops::Range<u32>, output: std::ops::Range<u32>) -> u32 {
            self.say(&ToEngine::Submit { id, prompt: prompt.collect(), output: output.collect() });
            let FromEngine::Prefilled { id: prefilled, cached_blocks } = self.hear() else { panic!("no prefill") };
            assert_eq!((prefilled, self.hear()), (id, FromEngine::Done { id }));
            cached_blocks
        }
    }

    #[test]
    fn published_events_match_the_cache() {
        let mut engine = start();
        assert_eq!(engine.hear(), FromEngine::Ready);
        engine.say(&ToEngine::Clear);
        assert_eq!(engine.hear(), FromEngine::Cleared { seq: 0 });
        assert_eq!(engine.run(1, 0..50, 50..80), 0, "3 blocks of prompt, 2 of output");
        assert_eq!(engine.run(2, 0..80, 80..81), 5, "the next turn finds both");
        assert_eq!(engine.run(3, 500..564, 0..1), 0, "4 blocks, of which the cache has room for 3");
        assert_eq!(engine.run(4, 0..80, 80..81), 4, "its last block was evicted");
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
                EventRecord::Stored(vec![first[3]]),
                EventRecord::Stored(vec![first[4]]),
                EventRecord::Removed(vec![first[4]]),
                EventRecord::Stored(other.clone()),
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
}
