//! WHICH worker should run a prompt. Pure: index, loads, fleet, time and chance are arguments.
//!
//! ```text
//! observe (fleet, index, predictions, loads → plain values) → judge (filter, cost, select) → book
//! ```
//!
//! [`observe`] is the only part that reads what others change, and each thing once. [`judge`] has nothing but its
//! arguments, and draws from one number: an [`Observation`] that is kept can be judged again, bit for bit, or under
//! another policy. [`decide`] is the one after the other.

mod affinity;
mod bound;
mod cost;
mod decide;
mod decision;
mod disaggregate;
mod draws;
mod judge;
mod mode;
mod names;
mod observation;
mod observe;
mod policy;
mod potential;
mod repeats;
mod request;
mod rule;
mod select;
mod shared;
#[cfg(test)]
mod tests;
mod wait;

pub use crate::load::BookingHandle;
pub use affinity::{Affinities, Bound};
pub use bound::{Affinity, AffinityMode, AffinityPolicy, Session};
pub use cost::{Among, CostTerms, cost};
pub use decide::{Scratch, decide, demand, overlaps, propose, take_turn};
pub use decision::{Decision, MatchStatus, Priced, ReplyNotes, Scored};
pub use disaggregate::{Bypass, DisaggregationPolicy, Half, decode_overrides, prefill_pool};
pub use draws::Draws;
pub use judge::judge;
pub use mode::Mode;
pub use names::{Names, Preferences};
pub use observation::{Asked, Observation, Observed};
pub use observe::{Buffers, View, observe, seconds};
pub use policy::{BusyThresholds, Overrides, Policy, PolicyTable, QueuePolicy};
pub use potential::{PotentialLoad, PotentialLoads, potential_loads};
pub use repeats::Repeats;
pub use request::{BookingRequest, Prompt, RouteRequest};
pub use rule::Rule;
pub use wait::Wait;
