//! WHICH worker should run a prompt. Pure: index, loads, fleet, time and chance are arguments.
//!
//! ```text
//! observe (fleet, index, predictions, loads → plain values) → judge (filter, cost, select) → book
//! ```
//!
//! Observing is the only part that reads what others change, and each thing once; what nobody changed since the decision
//! before is kept from it (`kept`). [`judge`] has nothing but its arguments, and draws from one number: an
//! [`Observation`] that is kept can be judged again, bit for bit, or under another policy. [`decide`] is the one after
//! the other.
//!
//! The cost of a candidate is one function, [`cost`], whoever asks: worker by worker of an observation, or over `columns`
//! of what it depends on, where a policy needs few of the values.

mod affinity;
mod cost;
mod decide;
mod decision;
mod disaggregate;
mod observation;
mod observe;
mod policy;
mod potential;
mod repeats;
mod request;
mod rules;
mod select;
mod space_cache;
#[cfg(test)]
mod tests;
mod wait;

pub use crate::load::BookingHandle;
pub use affinity::{AffinityMode, AffinityOutcome, AffinityPolicy, AffinitySession, AffinityTable, BindOutcome};
pub use cost::{CostTerms, PoolFacts, cost};
pub use decide::{Scratch, advance_round_robin, decide, demand, judge, overlaps, propose};
pub use decision::{CandidateCost, Decision, MatchStatus, ReplyNotes, Scored};
pub use disaggregate::{Bypass, DisaggregationPolicy, Half, decode_overrides, prefill_pool};
pub use observation::{Observation, RequestFacts, WorkerColumns, WorkerFacts};
pub use observe::{View, seconds};
pub use policy::{BusyThresholds, Mode, Overrides, Policy, PolicyTable, QueuePolicy};
pub use potential::{PotentialLoad, PotentialLoads, potential_loads};
pub use repeats::Repeats;
pub use request::{BookingRequest, Names, Preferences, Prompt, RouteRequest};
pub use rules::Rule;
pub use select::Draws;
pub use wait::Wait;
