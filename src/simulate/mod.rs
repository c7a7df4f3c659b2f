//! A fleet in virtual time: which policy is best is what its requests feel.
//!
//! ```text
//! workload ──▶ run ──▶ router (the product's index, bookings and decision, or a peer's rule)
//!               │  ◀── which worker
//!               ├────▶ engine (continuous batching, chunked prefill, KV memory)  ── KV events ──▶ router
//!               └────▶ figures (time to the first token, between tokens, to the last)
//! ```
//!
//! Everything is a pure function of its arguments: the same workload, settings and seed give the same run. The router
//! knows only what a real one knows: its bookings, first tokens, ends, and the engines' events, which may lag.
//!
//! `engine_law` gives the time of an engine's steps.

mod engine;
mod figures;
mod kv_pool;
mod peer_rules;
mod policies;
mod prompt_blocks;
mod router;
mod run;
mod spec;
mod tier_store;
pub mod workload;

pub use figures::{Distribution, Figures, Outcome, Slo};
pub use peer_rules::{KV_TUNED, TermWeights, TunedWeights, tuned_weights};
pub use policies::{NAMES, SimulatedPolicy};
pub use run::{FleetChange, FleetChangeKind, Settings};
pub use spec::{EngineSpec, TierSpec};

/// Runs `workload` on a fleet under a policy. Returns one outcome for each request that arrived, in the order of their
/// arrival; `None` if the fleet has no engine.
#[must_use]
pub fn simulate(workload: &workload::Workload, settings: &Settings, policy: &SimulatedPolicy) -> Option<Vec<Outcome>> {
    let decider = policies::decider(policy, settings)?;
    Some(run::Run::new(workload, settings, decider).finish())
}
