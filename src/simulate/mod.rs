//! A fleet in virtual time: which policy is best is what its requests feel.
//!
//! ```text
//! workload ──▶ run ──▶ routers (the product's index, bookings and decision, or a peer's rule)
//!               │  ◀── which worker, or which pair
//!               ├────▶ engines (continuous batching, chunked prefill, KV memory)  ── KV events ──▶ routers
//!               └────▶ figures (time to the first token, between tokens, to the last)
//! ```
//!
//! Everything is a pure function of its arguments: the same workload, settings and seed give the same run. A router
//! knows only what a real one knows: its bookings, first tokens, ends, the engines' events, which may lag, and what the
//! other routers tell of theirs, which may be old.
//!
//! `engine_law` gives the time of an engine's steps.

pub mod bounds;
pub mod capacity;
pub mod cells;
pub mod experiment;
mod figures;
mod fleet;
mod fleet_index;
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
mod routers;
mod run;
pub mod statistics;
pub mod suite;
pub mod suite_workloads;
pub mod verdict;
pub mod workload;

pub use crate::simulated_engine::{EngineSpec, SEQUENCES_MAX, STEP_TOKENS_MAX, TierSpec};
pub use figures::{Distribution, Outcome, Slo};
pub use kv_tuned::{KV_TUNED, TunedWeights, tuned_weights};
pub use peer_rules::TermWeights;
pub use policies::{NAMES, SimulatedPolicy, TRIED_TERMS};
pub use routers::RouterSettings;
pub use run::{EVENT_LAG_S, FleetChange, FleetChangeKind, Settings};

/// Runs `workload` on a fleet under a policy. Returns one outcome for each request that arrived, in the order of their
/// arrival; `None` if the fleet has no engine.
#[must_use]
pub fn simulate(workload: &workload::Workload, settings: &Settings, policy: &SimulatedPolicy) -> Option<Vec<Outcome>> {
    simulate_with_progress(workload, settings, policy, &experiment::silent)
}

/// The same. `arrived` hears from time to time how many more requests have arrived.
fn simulate_with_progress(
    workload: &workload::Workload,
    settings: &Settings,
    policy: &SimulatedPolicy,
    arrived: &dyn Fn(u64),
) -> Option<Vec<Outcome>> {
    let deciders = || policies::deciders(policy, settings);
    Some(run::Run::new(workload, settings, deciders, arrived)?.finish())
}

/// The same under a policy of the product. The fleet has no pools.
#[must_use]
pub fn simulate_under(
    workload: &workload::Workload,
    settings: &Settings,
    policy: &crate::route::Policy,
) -> Option<Vec<Outcome>> {
    settings.engines.first()?;
    let decider = || router::Decider::Product { policy: Box::new(*policy), unseen_weight: 0.0 };
    Some(run::Run::new(workload, settings, || Some(vec![decider()]), &experiment::silent)?.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fleet of small engines.
    pub(super) fn fleet(workers: usize) -> Settings {
        let preset = crate::engine_law::engine_preset("70b-tp4").expect("a preset");
        let engine = EngineSpec { kv_tokens: 100_000, ..EngineSpec::of(preset, 64) };
        Settings::of(vec![engine; workers], 1)
    }
}
