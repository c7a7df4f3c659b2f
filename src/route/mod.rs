//! Which worker should run a prompt. Pure: index, loads, fleet, time and random seed are arguments.
//!
//! ```text
//! observe (fleet, index, predictions, loads → plain values) → judge (rules, costs, selection) → book
//! ```
//!
//! Observing is the only part that reads what other threads change, and it reads each thing once. Facts that did not
//! change since the last decision come from a cache (`space_cache`). [`judge`] depends on its arguments alone, and all
//! its random draws follow from one seed. A recorded [`Observation`] can therefore be judged again with the same
//! result, bit for bit, or under another policy. [`decide`] observes and then judges.
//!
//! One function computes the cost of a worker: [`cost`]. The fast path calls it with the columns that a plain policy
//! depends on, so that a processor computes the costs of several workers at once.

mod affinity;
mod cost;
mod decide;
mod decision;
mod disaggregate;
mod judge;
mod observation;
mod policy;
mod potential_loads;
mod read_observation;
mod repeated_prompts;
mod request_facts;
mod rules;
mod select;
mod space_cache;
#[cfg(test)]
mod tests;
mod wait;

pub use crate::protocol::{
    BookingHandle, BookingRequest, CostTerms, MatchStatus, Mode, Names, Overrides, PotentialLoad, PotentialLoads,
    Preferences, Prompt, ReplyNotes, RouteRequest,
};
pub use affinity::{
    AffinityMode, AffinityOutcome, AffinityPolicy, AffinitySession, AffinityTable, BindOutcome, HEARD_USER, KeptBinding,
};
pub(crate) use cost::RecentSums;
pub use cost::{PoolFacts, cost};
pub use decide::{Scratch, advance_round_robin, decide, overlaps, propose, propose_again};
pub use decision::{CandidateCost, Decision, Scored};
pub use disaggregate::{Bypass, DisaggregationPolicy, Half, decode_overrides, prefill_pool, prefill_request};
pub use judge::judge;
pub use observation::{Observation, WorkerColumns, WorkerFacts};
pub use policy::{BusyThresholds, Policy, PolicyTable, QueuePolicy};
pub use potential_loads::potential_loads;
pub use read_observation::{View, seconds};
pub use repeated_prompts::Repeats;
pub use request_facts::RequestFacts;
pub use rules::Rule;
pub use select::Draws;
pub use wait::Wait;
