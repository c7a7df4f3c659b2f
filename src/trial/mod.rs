//! WHAT ELSE could have been decided: recorded decisions under other policies, and a search for a better one. Pure.
//!
//! Everything here is an estimate: a decision that had been made otherwise would have changed caches and loads, and so
//! the decisions after it. What is recorded of those stays as it was.

mod search;
mod spread;
#[cfg(test)]
mod tests;

pub use search::{Knob, Objective, Search, Step, Tuned};
pub use spread::{Spread, WorkerShare};
