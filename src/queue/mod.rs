//! WHEN a request runs that found every worker it may have busy. Pure: time is an argument, and what waits is the
//! caller's own.
//!
//! A request waits with the set of workers that may take it. Requests with the same set share a lane, ordered by
//! [`Rank`]; a worker that has room gets the first of the lanes it is in. So a request whose workers are all busy keeps
//! nobody waiting whose workers are not, and whoever asks looks at the heads of lanes only.
//!
//! ```text
//! push ─▶ waiting ─ next_for / next_where ─▶ in hand ─┬─ finish    it is answered
//!            ▲ │                                       └─ put_back  everybody was busy again: its rank is kept
//!            └─┼───────────────────────────────────────────┘
//!              └─ next_expired, cancel, drain            it is answered with an error, or with nothing
//! ```

mod lanes;
mod rank;
#[cfg(test)]
mod tests;
mod waiting;

pub use rank::{Claim, Discipline, Rank};
pub use waiting::{Dequeued, Queue, QueueFull, QueueLimits, Requeued, Ticket};
