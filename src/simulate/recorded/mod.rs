//! What a journal tells of a fleet: the load that it had, how fast its engines were, and how much they held.
//!
//! ```text
//! journal ─▶ reading ─▶ RecordedLoad ─┬▶ workload: sessions and requests at their times
//!                                     ├▶ fitted_fleet: engines, by robust regression on what prefills and outputs took
//!                                     └▶ agreement: what was recorded, beside the simulation of the recorded policy
//! ```
//!
//! A sample of the requests is a thinner load. `copies` brings it back to the recorded rate.

mod agreement;
mod cache_size;
mod copies;
mod fitted_fleet;
mod prefixes;
mod reading;
mod regression;
mod samples;
#[cfg(test)]
mod tests;
mod workload;

use hashbrown::HashSet;

use self::cache_size::Reuse;
use self::prefixes::{Prefix, Prefixes};
use crate::ids::Worker;
use crate::load::EndedBooking;
use crate::route::Policy;

pub use agreement::{Agreement, Felt};
pub use fitted_fleet::{FittedClass, FittedFleet, KvSource, LawSource, engine_file};
pub use reading::{LoadBounds, LoadChoice, LoadReader, LoadSurvey};

/// Tokens of a simulated block, at most, whatever a journal says.
const SIMULATED_BLOCK_TOKENS_MAX: u32 = 1 << 16;

/// From the first arrival to the last, seconds.
fn span_s(requests: &[RecordedRequest]) -> f64 {
    let at = |request: Option<&RecordedRequest>| request.map_or(0, |request| request.arrived_ns);
    at(requests.last()).saturating_sub(at(requests.first())) as f64 * 1e-9
}

/// What is booked on a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Booked {
    requests: f64,
    kv_tokens: f64,
}

/// A session: the daemon's run, and the identity of the session there, which another run would hash with another key.
type SessionName = (u64, u64);

/// A request that was routed and booked.
#[derive(Clone, Debug)]
struct RecordedRequest {
    session: Option<SessionName>,
    /// Nanoseconds since 1970.
    arrived_ns: u64,
    booked_ns: u64,
    prompt_tokens: u32,
    prefix: Prefix,
    /// 0 = unknown.
    expected_output_tokens: u32,
    /// The place of the worker that ran it.
    worker: usize,
    /// Tokens of the prompt that the chosen worker held, by the index.
    held_tokens: u32,
    /// What was booked on the chosen worker before.
    before: Booked,
    /// What became of it; `None` = the journal does not say.
    end: Option<EndedBooking>,
}

impl RecordedRequest {
    /// Seconds to the first token, if it was reported.
    fn ttft_s(&self) -> Option<f64> {
        let waited_s = (self.booked_ns.saturating_sub(self.arrived_ns)) as f64 * 1e-9;
        Some(waited_s + self.end?.first_token_ns? as f64 * 1e-9)
    }

    /// When it ended, nanoseconds since 1970.
    fn end_ns(&self) -> Option<u64> {
        Some(self.booked_ns.saturating_add(self.end?.end_ns))
    }

    /// Output tokens as reported, or else as its gateway expected them.
    fn output_tokens(&self) -> Option<u32> {
        self.reported_output_tokens().or(Some(self.expected_output_tokens).filter(|tokens| *tokens > 0))
    }

    fn reported_output_tokens(&self) -> Option<u32> {
        self.end.map(|end| end.output_tokens).filter(|tokens| *tokens > 0)
    }
}

/// A worker as its journal describes it.
#[derive(Clone, Debug, PartialEq)]
struct RecordedWorker {
    worker: Worker,
    /// The name of its class; empty = not known.
    class: String,
    /// Tokens of its KV memory; 0 = not known.
    capacity_tokens: u64,
    /// Tokens of its steps; 0 = not known.
    step_tokens_max: u64,
    /// Whether the index ever knew what it held.
    believed: bool,
}

impl RecordedWorker {
    const fn new(worker: Worker) -> Self {
        Self { worker, class: String::new(), capacity_tokens: 0, step_tokens_max: 0, believed: false }
    }
}

/// What a simulation of the journal's load lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Requests that were left out because the load is bounded.
    skipped: u64,
    /// Requests that a later attempt took over.
    superseded: u64,
    /// Requests without identities of their prefix.
    without_prefix: u64,
    /// Requests without an end.
    endless: u64,
    /// Decisions and ends that the journal lost.
    decisions: u64,
    ends: u64,
    /// Identities without room.
    prefixes: u64,
    /// Requests with a pin or overrides.
    constrained: u64,
    /// Requests that waited in the daemon's queue.
    queued: u64,
    /// Requests of which the journal has the decode half.
    pairs: u64,
}

/// The requests of one space in the order of their arrival, and what is known of its workers.
#[derive(Clone, Debug, Default)]
pub struct RecordedLoad {
    requests: Vec<RecordedRequest>,
    prefixes: Prefixes,
    /// Tokens for each identity; 0 = there are no identities.
    prefix_tokens: u32,
    /// Tokens of a block, by which costs in blocks count.
    block_size: u32,
    workers: Vec<RecordedWorker>,
    /// The places of the workers that could get the last request.
    present: Vec<usize>,
    /// The policy that made most of the decisions.
    policy: Policy,
    /// How many policies made decisions.
    policies: usize,
    /// The share of the requests that was recorded.
    sample: f64,
    /// Runs of daemons.
    runs: HashSet<u64>,
    reuses: Vec<Reuse>,
    losses: Losses,
}

impl RecordedLoad {
    /// Requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there are no requests.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// The policy that made most of the decisions.
    #[must_use]
    pub const fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Tokens of a block of the space.
    #[must_use]
    pub const fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Tokens of a simulated block: those of an identity or, without identities, about `otherwise`; a multiple of the
    /// space's blocks, unless these are absurdly large.
    #[must_use]
    pub fn simulated_block_size(&self, otherwise: u32) -> u32 {
        let tokens = if self.prefix_tokens > 0 { self.prefix_tokens } else { otherwise };
        tokens.checked_next_multiple_of(self.block_size.max(1)).unwrap_or(u32::MAX).min(SIMULATED_BLOCK_TOKENS_MAX)
    }

    /// The share of the requests that was recorded, above 0.
    #[must_use]
    pub const fn sample(&self) -> f64 {
        self.sample
    }

    /// From the first arrival to the last, seconds.
    #[must_use]
    pub fn span_s(&self) -> f64 {
        span_s(&self.requests)
    }

    /// The load in a sentence, and what a simulation of it lacks.
    #[must_use]
    pub fn remarks(&self) -> Vec<String> {
        let mut remarks = vec![format!(
            "{} requests over {:.0} s on {} workers{}, {} of them in sessions",
            self.requests.len(),
            self.span_s(),
            self.present.len(),
            if self.sample < 1.0 {
                format!(", a sample of {:.4}, each of which runs {:.2} times", self.sample, 1.0 / self.sample)
            } else {
                String::new()
            },
            self.requests.iter().filter(|request| request.session.is_some()).count(),
        )];
        remarks.extend(self.losses.remarks(self.requests.len()));
        if self.policies > 1 {
            let text = format!("{} policies made the decisions; the one that made most is simulated", self.policies);
            remarks.push(text);
        }
        if self.runs.len() > 1 {
            remarks.push(format!(
                "the journal is of {} runs of a daemon: requests share no prefix across them",
                self.runs.len()
            ));
        }
        let unbelieved = self.present.iter().filter(|place| !self.workers[**place].believed).count();
        if unbelieved > 0 {
            let text = format!("{unbelieved} workers publish no events: what they held is not known");
            remarks.push(text);
        }
        remarks
    }
}
