//! `decide`: one decision with its booking, and its end, in process, on both sides.
//!
//! `prompts` → (`ours` | `peer`) → `report`. Both indexes hold what the tape's fleet holds, and both sides decide the last
//! prompts of the tape, with as many requests in flight. The sides take turns. kvrouted has two turns: one in mode `kv`, which
//! is the peer's rule, and one in mode `latency`, its default.

mod ours;
mod peer;
mod prompts;
mod report;

use std::time::Instant;

use hdrhistogram::Histogram;

use self::ours::{Ours, Rule};
pub(crate) use self::ours::{filled, scheme};
use self::peer::Peer;
pub(crate) use self::prompts::Prompts;
pub(crate) use self::report::Report;
use self::report::{Fleet, Row, Times};
use crate::args::{DecideArgs, TapeArgs};
use crate::compare::machine;
use crate::failure::Failure;
use crate::measure::{Percentiles, clock_ns};
use crate::tape::Tape;

/// Prompts that are asked for: the last ones of the tape.
pub(crate) const PROMPTS_MAX: usize = 4000;
/// Decisions before the first that counts.
pub(crate) const WARM_UP: usize = 500;
/// Longest time that is told from longer ones.
pub(crate) const NS_MAX: u64 = 10_000_000_000;
/// Blocks that a fleet of any other size than the first holds together, and each worker at least.
const FLEET_BLOCKS: u32 = 1_280_000;
const CAPACITY_MIN: u32 = 1000;

/// In what shape prompts are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Given {
    /// As tokens: both sides hash them within the time.
    Tokens,
    /// As hashes of their blocks; the peer also gets the sequence hashes that it asks for.
    Hashes,
}

impl Given {
    const ALL: [Self; 2] = [Self::Tokens, Self::Hashes];
}

/// One side's way to decide and to end.
pub(crate) trait Decider {
    /// Asks for every prompt in turn, `in_flight` of them at a time, and says how long each decision with its booking
    /// and each end took.
    fn run(&mut self, prompts: &Prompts, given: Given, in_flight: usize, timed: &mut Timed) -> Result<(), Failure>;
}

/// The times of one pass.
#[derive(Debug)]
pub(crate) struct Timed {
    decide: Histogram<u64>,
    free: Histogram<u64>,
    both: Histogram<u64>,
    seen: usize,
}

impl Timed {
    fn new() -> Self {
        let histogram = || Histogram::new_with_max(NS_MAX, 3).expect("3 digits up to 10 s is a histogram");
        Self { decide: histogram(), free: histogram(), both: histogram(), seen: 0 }
    }

    /// One decision, and the end of another.
    pub(crate) fn take(&mut self, decide_ns: u64, free_ns: u64) {
        self.seen += 1;
        if self.seen > WARM_UP {
            self.decide.saturating_record(decide_ns.max(1));
            self.free.saturating_record(free_ns.max(1));
            self.both.saturating_record((decide_ns + free_ns).max(1));
        }
    }

    fn times(&self, clock_ns: f64) -> Times {
        Times {
            decide: Percentiles::of(&self.decide, clock_ns),
            free: Percentiles::of(&self.free, clock_ns),
            both: Percentiles::of(&self.both, 2.0 * clock_ns),
        }
    }
}

/// Nanoseconds since `start`.
pub(crate) fn since(start: Instant) -> u64 {
    start.elapsed().as_nanos() as u64
}

/// Runs the comparison.
///
/// # Errors
/// The tape cannot be made, or a side fails.
pub(crate) fn run(args: &DecideArgs) -> Result<Report, Failure> {
    let clock_ns = clock_ns();
    let mut fleets = vec![fleet(args, &args.tape, clock_ns)?];
    for workers in args.fleets.iter().copied().filter(|workers| *workers != args.tape.workers) {
        let capacity = (FLEET_BLOCKS / u32::from(workers)).clamp(CAPACITY_MIN, args.tape.capacity.max(CAPACITY_MIN));
        fleets.push(fleet(args, &TapeArgs { workers, capacity, ..args.tape.clone() }, clock_ns)?);
    }
    Ok(Report::new(args, machine(), clock_ns, fleets))
}

/// Measures a fleet.
fn fleet(args: &DecideArgs, tape: &TapeArgs, clock_ns: f64) -> Result<Fleet, Failure> {
    let mut made = Tape::new(tape)?;
    let prompts = Prompts::new(&mut made, tape.block_size, PROMPTS_MAX);
    let mut ours = Ours::new(&made, tape)?;
    let mut peer = Peer::new(&made, tape)?;
    drop(made);
    let mut rows = Vec::new();
    for given in Given::ALL {
        let [mut of_peer, mut of_kv, mut of_latency] = [const { Vec::new() }; 3];
        for repeat in 0..args.repeat {
            let pass = |side: &mut dyn Decider, times: &mut Vec<Times>| {
                let mut timed = Timed::new();
                side.run(&prompts, given, args.in_flight, &mut timed)?;
                times.push(timed.times(clock_ns));
                Ok::<(), Failure>(())
            };
            // Whoever goes first finds other caches and another clock speed: take turns.
            if repeat % 2 == 0 {
                pass(&mut peer, &mut of_peer)?;
            }
            for rule in if repeat % 2 == 0 { [Rule::Kv, Rule::Latency] } else { [Rule::Latency, Rule::Kv] } {
                ours.rule = rule;
                pass(&mut ours, if rule == Rule::Kv { &mut of_kv } else { &mut of_latency })?;
            }
            if repeat % 2 != 0 {
                pass(&mut peer, &mut of_peer)?;
            }
        }
        rows.push(Row::new(given, Times::medians(&of_peer), Times::medians(&of_kv), Times::medians(&of_latency)));
    }
    let blocks_per_prompt = prompts.blocks() as f64 / prompts.len().max(1) as f64;
    Ok(Fleet { workers: tape.workers, capacity: tape.capacity, prompts: prompts.len(), blocks_per_prompt, rows })
}
