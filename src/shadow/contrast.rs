//! One decision under two policies.

use crate::ids::WorkerIndex;
use crate::limits::WORKERS_MAX;
use crate::route::{Decision, Draws, Mode, Observation, Policy, WorkerFacts, judge};

/// A worker that was chosen, and what running the prompt there means.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyChoice {
    /// Who.
    pub index: WorkerIndex,
    /// Blocks of the prompt that it holds, every tier.
    pub overlap_blocks: u32,
    /// Tokens of the prompt that it has to compute: those that it holds in no tier.
    pub prefill_tokens: u64,
    /// Tokens and requests that it was busy with.
    pub busy: (u64, u64),
}

impl PolicyChoice {
    fn of(observation: &Observation, facts: &WorkerFacts) -> Self {
        let request = &observation.request;
        let held_tokens = u64::from(facts.overlap.total()) * u64::from(request.block_size);
        Self {
            index: facts.index,
            overlap_blocks: facts.overlap.total(),
            prefill_tokens: request.prompt_tokens.saturating_sub(held_tokens),
            busy: (facts.load.prefill_tokens, facts.load.requests),
        }
    }
}

/// What two policies make of one decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PolicyDifference {
    /// Both choose the same worker, or nobody.
    Same,
    /// They choose two workers.
    Other {
        /// Blocks of the prompt that the second one's choice holds, less those that the first one's does.
        overlap_blocks: i64,
        /// What the first one's choice costs the second, above the least. Blocks, where its mode counts in blocks.
        cost_regret: f64,
    },
    /// The first one's choice is out of the running for the second.
    Excluded {
        /// As for `Other`.
        overlap_blocks: i64,
    },
    /// One of the two finds nobody eligible, and the other somebody.
    Nobody,
}

/// Judges decisions under a second policy; its buffers are reused.
#[derive(Debug, Default)]
pub struct PolicyComparison {
    decision: Decision,
    /// Counts the turns of policies by which workers take turns: a record has none where another policy decided.
    round_robin_counter: u64,
}

impl PolicyComparison {
    /// Whom `policy` would have chosen; `None` = nobody. The observation is as before when this returns.
    pub fn pick(&mut self, policy: &Policy, observation: &mut Observation, seed: u64) -> Option<PolicyChoice> {
        // Everybody's cost is wanted, however many the gateway asked for.
        let request = observation.request;
        observation.request.candidates_max = WORKERS_MAX as u32;
        if policy.under(&request.overrides).mode == Mode::RoundRobin {
            observation.request.round_robin_counter = self.round_robin_counter;
            self.round_robin_counter += 1;
        }
        judge(policy, observation, Draws::new(seed), &mut self.decision);
        observation.request = request;
        let chosen = self.decision.candidates.first()?;
        observation.worker(chosen.index).map(|facts| PolicyChoice::of(observation, facts))
    }

    /// What a worker that was chosen means; `None` if it is not of the observation.
    #[must_use]
    pub fn chosen(observation: &Observation, chosen: Option<WorkerIndex>) -> Option<PolicyChoice> {
        observation.worker(chosen?).map(|facts| PolicyChoice::of(observation, facts))
    }

    /// Holds the choice that was made to what `policy` makes of it.
    pub fn compare(
        &mut self,
        policy: &Policy,
        observation: &mut Observation,
        seed: u64,
        chosen: Option<WorkerIndex>,
    ) -> PolicyDifference {
        let second = self.pick(policy, observation, seed);
        let (first, second) = match (Self::chosen(observation, chosen), second) {
            (Some(first), Some(second)) => (first, second),
            (None, None) => return PolicyDifference::Same,
            _ => return PolicyDifference::Nobody,
        };
        if first.index == second.index {
            return PolicyDifference::Same;
        }
        let overlap_blocks = i64::from(second.overlap_blocks) - i64::from(first.overlap_blocks);
        let candidates = &self.decision.candidates;
        let costs = || candidates.iter().map(|scored| scored.terms.cost);
        let Some(cost) = candidates.iter().find(|scored| scored.index == first.index).map(|of| of.terms.cost) else {
            return PolicyDifference::Excluded { overlap_blocks };
        };
        let least = costs().min_by(f64::total_cmp).unwrap_or(cost);
        PolicyDifference::Other { overlap_blocks, cost_regret: (cost - least).max(0.0) }
    }
}
