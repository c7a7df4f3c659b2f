//! `cores`: how decisions scale with serving threads, and ingest with shards, in process.
//!
//! `decisions` and `shards` measure. `model` says what more serving threads would decide if each had a processor.
//! `report` shows both side by side.

mod decisions;
mod model;
mod report;
mod shards;

use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};

use self::decisions::{Decisions, Timing};
pub(crate) use self::report::Report;
use self::report::{Circumstances, DecisionPasses, ShardPasses};
use crate::args::CoresArgs;
use crate::compare::machine;
use crate::decide::{PROMPTS_MAX, Prompts, filled};
use crate::failure::Failure;
use crate::measure::clock_ns;
use crate::ours::Feed;
use crate::socket::load_average;
use crate::tape::Tape;

/// A prompt as hashes.
#[derive(Debug)]
struct HashedPrompt {
    /// The local hashes of its blocks, little-endian.
    hashes: Vec<u8>,
    /// Its tokens.
    tokens: u32,
}

/// From when to when something ran.
#[derive(Clone, Copy, Debug)]
struct Span {
    began: Instant,
    ended: Instant,
}

impl Span {
    /// From the first beginning to the last end, in seconds, above 0.
    fn seconds_around(spans: impl Iterator<Item = Self>) -> f64 {
        let joined = spans.reduce(|a, b| Self { began: a.began.min(b.began), ended: a.ended.max(b.ended) });
        joined.map_or(0.0, |span| (span.ended - span.began).as_secs_f64()).max(1e-9)
    }
}

/// What the scheduler gave the calling thread, nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Scheduled {
    /// On a processor.
    cpu_ns: u64,
    /// Ready to run, but another thread had the processor. Sleeping at a lock is not in it. 0 = the system does not say.
    queued_ns: u64,
}

impl Scheduled {
    /// Until now.
    fn so_far() -> Self {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
        let queued_ns = text.split_whitespace().nth(1).and_then(|ns| ns.parse().ok()).unwrap_or(0);
        let spent = clock_gettime(ClockId::ThreadCPUTime);
        Self { cpu_ns: spent.tv_sec as u64 * 1_000_000_000 + spent.tv_nsec as u64, queued_ns }
    }

    /// Since an earlier time.
    fn since(earlier: Self) -> Self {
        let now = Self::so_far();
        Self {
            cpu_ns: now.cpu_ns.saturating_sub(earlier.cpu_ns),
            queued_ns: now.queued_ns.saturating_sub(earlier.queued_ns),
        }
    }
}

/// Runs all measurements.
///
/// # Errors
/// The tape cannot be made, or kvrouted refuses something.
pub(crate) fn run(args: &CoresArgs) -> Result<Report, Failure> {
    // Before this program computes anything: what else the machine does.
    let load_average = load_average();
    let mut tape = Tape::new(&args.tape)?;
    let prompts = Prompts::new(&mut tape, args.tape.block_size, PROMPTS_MAX);
    let prompts: Vec<HashedPrompt> = prompts
        .iter()
        .map(|prompt| HashedPrompt { hashes: prompt.hashes.clone(), tokens: prompt.tokens.len() as u32 })
        .collect();
    if prompts.is_empty() {
        return Err(Failure::Contract("the tape has no prompts".to_owned()));
    }
    let feed = Feed::new(&tape.nodes, &tape.script);
    let blocks = tape.script.blocks();
    drop(tape);
    let clock_ns = clock_ns();
    let decisions = time_decisions(args, &feed, &prompts, clock_ns)?;
    let shards = time_shards(args, &feed, &prompts)?;
    let prompt_blocks = prompts.iter().map(|prompt| prompt.hashes.len() / 8).sum::<usize>();
    let circumstances = Circumstances {
        tape: args.tape.clone(),
        in_flight: args.in_flight,
        seconds: args.seconds,
        repeat: args.repeat,
        machine: machine(),
        processors: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        load_average,
        clock_ns,
        prompts: prompts.len(),
        blocks_per_prompt: prompt_blocks as f64 / prompts.len() as f64,
        tape_blocks: blocks,
    };
    Ok(Report::new(circumstances, &decisions, &shards))
}

/// Each number of threads in turns, each second round backwards, and the calls that take the lock.
fn time_decisions(
    args: &CoresArgs,
    feed: &Feed,
    prompts: &[HashedPrompt],
    clock_ns: f64,
) -> Result<DecisionPasses, Failure> {
    // The index lives as long as its readers read.
    let (index, fleet) = filled(feed, &args.tape)?;
    let decisions = Decisions::new(args, (index.index(), fleet), prompts)?;
    let by_threads = args.ascending_threads().into_iter().map(|threads| (threads, Vec::new())).collect();
    let mut passes = DecisionPasses { by_threads, locked_ns: Vec::new() };
    for round in 0..args.repeat {
        for (threads, of) in in_turns(&mut passes.by_threads, round) {
            of.push(decisions.pass(*threads, Timing::Whole, clock_ns)?);
        }
        // Two intervals of a turn are timed, each with about one reading of the clock in it.
        let locked_ns = decisions.pass(1, Timing::Locked, clock_ns)?.locked_ns - 2.0 * clock_ns;
        passes.locked_ns.push(locked_ns.max(0.0));
    }
    Ok(passes)
}

/// Each number of shards in turns, each second round backwards.
fn time_shards(args: &CoresArgs, feed: &Feed, prompts: &[HashedPrompt]) -> Result<ShardPasses, Failure> {
    let mut passes: ShardPasses = args.ascending_shards().into_iter().map(|shards| (shards, Vec::new())).collect();
    for round in 0..args.repeat {
        for (shards, of) in in_turns(&mut passes, round) {
            of.push(shards::pass(args.tape.workers, *shards, feed, prompts)?);
        }
    }
    let mut checksums = passes.iter().flat_map(|(_, of)| of).map(|pass| pass.checksum);
    let first = checksums.next();
    if checksums.any(|checksum| Some(checksum) != first) {
        return Err(Failure::Contract("look-ups differ by the number of shards".to_owned()));
    }
    Ok(passes)
}

fn in_turns<T>(items: &mut [T], round: u32) -> Vec<&mut T> {
    let mut turns: Vec<&mut T> = items.iter_mut().collect();
    if round % 2 == 1 {
        turns.reverse();
    }
    turns
}
