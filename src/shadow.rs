//! WHAT IF another policy had judged: a decision that was made, judged once more under a second policy, and what the two
//! differ in. Pure.
//!
//! A shadow policy decides nothing. What it would have changed is an estimate: where it had decided, later decisions
//! would have found other caches and other loads.

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
        observation.worker(chosen.index).map(|facts| PolicyChoice::of(observation, &facts))
    }

    /// What a worker that was chosen means; `None` if it is not of the observation.
    #[must_use]
    pub fn chosen(observation: &Observation, chosen: Option<WorkerIndex>) -> Option<PolicyChoice> {
        observation.worker(chosen?).map(|facts| PolicyChoice::of(observation, &facts))
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

/// Sums over decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ShadowTally {
    /// Decisions judged.
    pub decisions: u64,
    /// Those where it chose the same worker.
    pub agreements: u64,
    /// Those where it chose another one.
    pub disagreements: u64,
    /// Of those, where the worker that was chosen was out of the running for it.
    pub excluded: u64,
    /// Those where only one of the two found anybody eligible; neither an agreement nor a disagreement.
    pub nobody: u64,
    /// Prompt blocks held by its choices and not by those that were made, over the decisions where it is ahead.
    pub blocks_saved: u64,
    /// The same over the decisions where it is behind.
    pub blocks_lost: u64,
    /// What the choices that were made cost it above its least, summed. Blocks, where its mode counts in blocks.
    pub cost_regret: f64,
}

impl ShadowTally {
    /// The counts by name, for metrics and status.
    #[must_use]
    pub const fn counts(&self) -> [(&'static str, &'static str, u64); 7] {
        [
            ("shadow_decisions", "Decisions judged by the shadow policy too.", self.decisions),
            ("shadow_agreements", "Decisions for which the shadow policy chose the same worker.", self.agreements),
            ("shadow_disagreements", "Decisions for which the shadow policy chose another worker.", self.disagreements),
            ("shadow_excluded", "Decisions whose worker was out of the running for the shadow policy.", self.excluded),
            ("shadow_nobody", "Decisions for which only one of the two policies found anybody eligible.", self.nobody),
            (
                "shadow_blocks_saved",
                "Prompt blocks that the shadow policy's workers held and the chosen ones did not.",
                self.blocks_saved,
            ),
            (
                "shadow_blocks_lost",
                "Prompt blocks that the chosen workers held and the shadow policy's did not.",
                self.blocks_lost,
            ),
        ]
    }

    /// Adds what another counted.
    pub fn merge(&mut self, other: &Self) {
        self.decisions += other.decisions;
        self.agreements += other.agreements;
        self.disagreements += other.disagreements;
        self.excluded += other.excluded;
        self.nobody += other.nobody;
        self.blocks_saved += other.blocks_saved;
        self.blocks_lost += other.blocks_lost;
        self.cost_regret += other.cost_regret;
    }

    /// Adds a contrast.
    pub fn add(&mut self, compare: PolicyDifference) {
        self.decisions += 1;
        match compare {
            PolicyDifference::Same => self.agreements += 1,
            PolicyDifference::Nobody => self.nobody += 1,
            PolicyDifference::Other { overlap_blocks, cost_regret } => {
                self.disagree(overlap_blocks);
                self.cost_regret += cost_regret;
            }
            PolicyDifference::Excluded { overlap_blocks } => {
                self.disagree(overlap_blocks);
                self.excluded += 1;
            }
        }
    }

    fn disagree(&mut self, overlap_blocks: i64) {
        self.disagreements += 1;
        let blocks = if overlap_blocks > 0 { &mut self.blocks_saved } else { &mut self.blocks_lost };
        *blocks += overlap_blocks.unsigned_abs();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::WorkerState;
    use crate::ids::{TierBlocks, Worker, WorkerIndex};
    use crate::load::Load;
    use crate::route::{Mode, Observation, Policy, RequestFacts, WorkerFacts};

    fn facts(index: u32, device: u32, prefill_tokens: u64) -> WorkerFacts {
        WorkerFacts {
            index: WorkerIndex(index),
            worker: Worker::new(u64::from(index), 0),
            overlap: TierBlocks { device, ..TierBlocks::default() },
            load: Load { prefill_tokens, requests: prefill_tokens / 100, ..Load::default() },
            ..WorkerFacts::default()
        }
    }

    /// Worker 0 holds 8 of the 10 blocks and is busy with 5; worker 1 holds 2 and is idle; worker 2 holds none.
    fn observation() -> Observation {
        let request = RequestFacts {
            prompt_tokens: 160,
            block_size: 16,
            whole_blocks: 10,
            candidates_max: 1,
            ..RequestFacts::default()
        };
        let workers = [facts(0, 8, 80), facts(1, 2, 0), facts(2, 0, 0)].into_iter().collect();
        Observation { request, workers, ..Observation::default() }
    }

    #[test]
    fn a_policy_that_chooses_otherwise_is_held_to_the_choice_that_was_made() {
        let mut comparison = PolicyComparison::default();
        let (mut seen, before) = (observation(), observation());
        let mut compare = |policy: &Policy, chosen| comparison.compare(policy, &mut seen, 1, chosen);
        let kv = Policy::default();
        // 10 + 5 blocks of backlog less 8 of credit are 7, 10 less 2 are 8.
        assert_eq!(compare(&kv, Some(WorkerIndex(0))), PolicyDifference::Same);
        assert_eq!(compare(&kv, Some(WorkerIndex(1))), PolicyDifference::Other { overlap_blocks: 6, cost_regret: 1.0 });
        let less = Policy { device_credit: 0.5, ..kv };
        assert_eq!(
            compare(&less, Some(WorkerIndex(0))),
            PolicyDifference::Other { overlap_blocks: -6, cost_regret: 2.0 }
        );
        assert_eq!(compare(&kv, None), PolicyDifference::Nobody);
        assert_eq!(seen, before, "it is as it was");
    }

    #[test]
    fn who_is_out_of_the_running_costs_nothing_that_could_be_named() {
        let mut seen = observation();
        seen.workers.update(1, |facts| facts.state = WorkerState::Draining);
        let compare = PolicyComparison::default().compare(&Policy::default(), &mut seen, 1, Some(WorkerIndex(1)));
        assert_eq!(compare, PolicyDifference::Excluded { overlap_blocks: 6 });
        (0..seen.workers.len()).for_each(|row| seen.workers.update(row, |facts| facts.allowed = false));
        assert_eq!(PolicyComparison::default().compare(&Policy::default(), &mut seen, 1, None), PolicyDifference::Same);
    }

    #[test]
    fn a_pick_says_what_is_left_to_compute() {
        let mut seen = observation();
        let pick = PolicyComparison::default().pick(&Policy::default(), &mut seen, 1).expect("somebody");
        assert_eq!((pick.index, pick.overlap_blocks, pick.prefill_tokens, pick.busy), (WorkerIndex(0), 8, 32, (80, 0)));
    }

    #[test]
    fn workers_take_turns_under_a_policy_that_says_so() {
        let (mut seen, mut comparison) = (observation(), PolicyComparison::default());
        let policy = Policy { mode: Mode::RoundRobin, ..Policy::default() };
        let picks = [1, 2, 3, 4].map(|seed| comparison.pick(&policy, &mut seen, seed).expect("somebody").index.0);
        assert_eq!(picks, [0, 1, 2, 0]);
        assert_eq!(seen, observation());
    }

    #[test]
    fn contrasts_add_up() {
        let mut tally = ShadowTally::default();
        for compare in [
            PolicyDifference::Same,
            PolicyDifference::Other { overlap_blocks: 6, cost_regret: 1.5 },
            PolicyDifference::Other { overlap_blocks: -2, cost_regret: 0.25 },
            PolicyDifference::Excluded { overlap_blocks: -1 },
            PolicyDifference::Nobody,
        ] {
            tally.add(compare);
        }
        assert_eq!(
            (tally.decisions, tally.agreements, tally.disagreements, tally.excluded, tally.nobody),
            (5, 1, 3, 1, 1)
        );
        assert_eq!((tally.blocks_saved, tally.blocks_lost, tally.cost_regret), (6, 3, 1.75));
        let mut twice = tally;
        twice.merge(&tally);
        assert_eq!((twice.decisions, twice.blocks_saved, twice.cost_regret), (10, 12, 3.5));
        assert_eq!(tally.counts().iter().map(|(_, _, count)| count).sum::<u64>(), 5 + 1 + 3 + 1 + 1 + 6 + 3);
    }
}
