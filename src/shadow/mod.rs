//! WHAT IF another policy had judged: a decision that was made, judged once more under a second policy, and what the two
//! differ in. Pure.
//!
//! A shadow policy decides nothing. What it would have changed is an estimate: where it had decided, later decisions
//! would have found other caches and other loads.

mod contrast;
mod tally;
#[cfg(test)]
mod tests;

pub use contrast::{PolicyChoice, PolicyComparison, PolicyDifference};
pub use tally::ShadowTally;
