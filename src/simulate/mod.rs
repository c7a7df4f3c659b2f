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
mod engine;
pub mod experiment;
mod figures;
mod kv_pool;
mod kv_tuned;
pub mod measure;
mod peer_rules;
pub mod picture;
mod policies;
pub mod policy_search;
pub mod policy_trials;
mod prompt_blocks;
pub mod recorded;
pub mod report;
mod router;
mod run;
mod spec;
pub mod statistics;
pub mod suite;
pub mod suite_workloads;
mod tier_store;
pub mod verdict;
pub mod workload;

pub use figures::{Distribution, Outcome, Slo};
pub use kv_tuned::{KV_TUNED, TunedWeights, tuned_weights};
pub use peer_rules::TermWeights;
pub use policies::{NAMES, SimulatedPolicy, TRIED_TERMS};
pub use run::{FleetChange, FleetChangeKind, Settings};
pub use spec::{EngineSpec, TierSpec};

/// Runs `workload` on a fleet under a policy. Returns one outcome for each request that arrived, in the order of their
/// arrival; `None` if the fleet has no engine.
#[must_use]
pub fn simulate(workload: &workload::Workload, settings: &Settings, policy: &SimulatedPolicy) -> Option<Vec<Outcome>> {
    let decider = policies::decider(policy, settings)?;
    Some(run::Run::new(workload, settings, decider).finish())
}

/// The same under a policy of the product.
#[must_use]
pub fn simulate_under(
    workload: &workload::Workload,
    settings: &Settings,
    policy: &crate::route::Policy,
) -> Option<Vec<Outcome>> {
    settings.engines.first()?;
    Some(run::Run::new(workload, settings, router::Decider::Product(Box::new(*policy))).finish())
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
        let engines = vec![engine; workers];
        Settings { engines, event_lag_s: 0.005, changes: Vec::new(), prior_factor: Some(1.0), seed: 1 }
    }
}
