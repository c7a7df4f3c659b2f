//! The settings of a run from a file that describes a fleet.

use super::routers::RouterSettings;
use super::run::{FleetChange, FleetChangeKind, Settings};
use crate::config::{EngineGroup, FleetChangeName, FleetFile, WorkerChange};
use crate::simulated_engine::{EngineSpec, TierSpec};

impl From<&FleetFile> for Settings {
    /// The fleet of a file, with seed 1.
    fn from(file: &FleetFile) -> Self {
        let FleetFile { block_size, event_lag_s, routers, disaggregation, ref engines, ref changes } = *file;
        let group = |group: &EngineGroup| {
            let spec = EngineSpec {
                class: group.class.clone(),
                role: group.role,
                law: group.law,
                kv_tokens: group.kv_tokens,
                block_size,
                step_tokens_max: group.step_tokens_max,
                sequences_max: group.sequences_max,
                tiers: group.stores.iter().map(|&(tier, tokens, token_s)| TierSpec { tier, tokens, token_s }).collect(),
                receive_token_s: group.receive_token_s,
            };
            std::iter::repeat_n(spec, group.count)
        };
        let change = |&WorkerChange { at_s, worker, what, factor }: &WorkerChange| {
            let kind = match what {
                FleetChangeName::Dies => FleetChangeKind::Dies,
                FleetChangeName::Joins => FleetChangeKind::Joins,
                FleetChangeName::Slows => FleetChangeKind::Slows(factor),
            };
            FleetChange { at_s, worker, kind }
        };
        Self {
            engines: engines.iter().flat_map(group).collect(),
            event_lag_s,
            changes: changes.iter().map(change).collect(),
            prior_factor: routers.constants_factor,
            reports_first_tokens: true,
            routers: RouterSettings {
                count: routers.count,
                age_s: routers.age_s,
                sessions_stick: routers.sessions_stick,
            },
            disaggregation,
            seed: 1,
        }
    }
}
