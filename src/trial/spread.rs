//! Where decisions send prompts, and what that costs.

use std::collections::BTreeMap;

use crate::ids::{SpaceId, Worker};
use crate::route::Observation;
use crate::shadow::PolicyChoice;

/// What one worker got.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerShare {
    /// Prompts sent to it.
    pub prompts: u64,
    /// Tokens of them that it has to compute.
    pub prefill_tokens: u64,
}

/// What a policy's choices add up to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Spread {
    /// Decisions that found somebody.
    pub picks: u64,
    /// Decisions that found nobody.
    pub nobody: u64,
    /// Whole blocks of the prompts.
    pub prompt_blocks: u64,
    /// Those that the chosen workers held, every tier.
    pub overlap_blocks: u64,
    /// Tokens that the chosen workers have to compute.
    pub prefill_tokens: u64,
    /// Tokens that the chosen workers were busy with when they were chosen.
    pub waiting_tokens: u64,
    /// By worker; everybody who was ever seen.
    pub workers: BTreeMap<(SpaceId, Worker), WorkerShare>,
}

impl Spread {
    /// Adds a decision about `observation`.
    pub fn add(&mut self, space: SpaceId, observation: &Observation, pick: Option<PolicyChoice>) {
        for facts in observation.workers.iter() {
            self.workers.entry((space, facts.worker)).or_default();
        }
        let Some(pick) = pick else {
            self.nobody += 1;
            return;
        };
        self.picks += 1;
        self.prompt_blocks += u64::from(observation.request.whole_blocks);
        self.overlap_blocks += u64::from(pick.overlap_blocks);
        self.prefill_tokens += pick.prefill_tokens;
        self.waiting_tokens += pick.busy.0;
        if let Some(facts) = observation.worker(pick.index) {
            let share = self.workers.entry((space, facts.worker)).or_default();
            share.prompts += 1;
            share.prefill_tokens += pick.prefill_tokens;
        }
    }

    /// Blocks that the chosen worker held, a decision.
    #[must_use]
    pub fn overlap_mean(&self) -> f64 {
        self.overlap_blocks as f64 / self.picks.max(1) as f64
    }

    /// The share of prompt blocks that the chosen workers held, 0 to 1.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        self.overlap_blocks as f64 / self.prompt_blocks.max(1) as f64
    }

    /// The prompts of the worker with the most over the mean; 1 = all alike.
    #[must_use]
    pub fn prompts_imbalance(&self) -> f64 {
        self.imbalance(|share| share.prompts)
    }

    /// The computed tokens of the worker with the most over the mean; 1 = all alike.
    #[must_use]
    pub fn prefill_imbalance(&self) -> f64 {
        self.imbalance(|share| share.prefill_tokens)
    }

    fn imbalance(&self, of: impl Fn(&WorkerShare) -> u64) -> f64 {
        let most = self.workers.values().map(&of).max().unwrap_or(0) as f64;
        let mean = self.workers.values().map(&of).sum::<u64>() as f64 / self.workers.len().max(1) as f64;
        if mean == 0.0 { 1.0 } else { most / mean }
    }
}
