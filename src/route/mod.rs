//! WHICH worker should run a prompt: filter, cost, select, book. Pure: index, loads, fleet, time and
//! chance are arguments.

mod cost;
mod decide;
mod decision;
mod policy;
mod repeats;
mod request;
mod select;
#[cfg(test)]
mod tests;

pub use crate::load::BookingHandle;
pub use cost::{Ask, CostTerms, cost};
pub use decide::{Scratch, View, decide, demand, overlaps};
pub use decision::{Decision, MatchStatus, ReplyNotes, Rule, Scored};
pub use policy::Policy;
pub use repeats::Repeats;
pub use request::{BookingRequest, Prompt, RouteRequest};
