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

pub mod bounds;
pub mod capacity;
pub mod cells;
pub mod experiment;
mod figures;
mod kv_tuned;
pub mod measure;
mod peer_rules;
pub mod picture;
mod policies;
mod prompt_blocks;
pub mod report;
mod router;
mod run;
pub mod statistics;
pub mod suite;
pub mod suite_workloads;
pub mod verdict;
pub mod workload;

pub use crate::simulated_engine::{EngineSpec, TierSpec};
pub use figures::{Distribution, Outcome, Slo};
pub use kv_tuned::{KV_TUNED, TunedWeights, tuned_weights};
pub use peer_rules::TermWeights;
pub use policies::{NAMES, SimulatedPolicy, TRIED_TERMS};
pub use run::{FleetChange, FleetChangeKind, Settings};

/// Runs `workload` on a fleet under a policy. Returns one outcome for each request that arrived, in the order of their
/// arrival; `None` if the fleet has no engine.
#[must_use]
pub fn simulate(workload: &workload::Workload, settings: &Settings, policy: &SimulatedPolicy) -> Option<Vec<Outcome>> {
    let decider = policies::decider(policy, settings)?;
    Some(run::Run::new(workload, settings, decider).finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fleet of small engines.
    pub(super) fn fleet(workers: usize) -> Settings {
        let preset = crate::engine_law::engine_preset("70b-tp4").expect("a preset");
        let engine = EngineSpec {
            class: preset.name.into(),
            law: preset.law,
            kv_tokens: 100_000,
            block_size: 64,
            step_tokens_max: 8192,
            sequences_max: 256,
            tiers: Vec::new(),
        };
        Settings::of(vec![engine; workers], 1)
    }
}
