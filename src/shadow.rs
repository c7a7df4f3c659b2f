//! A shadow policy: judges recorded decisions again under a second policy, and counts the differences. Pure.
//!
//! A shadow policy decides nothing. Its effect is an estimate: had it decided, later decisions would have met other
//! caches and other loads.

use crate::ids::WorkerIndex;
use crate::limits::WORKERS_MAX;
use crate::route::{Decision, Draws, Mode, Observation, Policy, WorkerFacts, judge};

/// A chosen worker.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PolicyChoice {
    index: WorkerIndex,
    /// Blocks of the prompt that it holds, in all tiers.
    overlap_blocks: u32,
}

impl PolicyChoice {
    const fn of(facts: &WorkerFacts) -> Self {
        Self { index: facts.index, overlap_blocks: facts.overlap.total() }
    }
}

/// The difference between two policies in one decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PolicyDifference {
    /// Both choose the same worker, or none.
    Same,
    /// They choose different workers.
    Other {
        /// Overlap of the second policy's choice minus that of the first policy's choice, blocks.
        overlap_blocks: i64,
        /// Cost of the first policy's choice under the second policy, above the lowest cost; blocks, if its mode counts
        /// blocks.
        cost_regret: f64,
    },
    /// The first policy's choice is not eligible under the second policy.
    Excluded {
        /// As in `Other`.
        overlap_blocks: i64,
    },
    /// Only one of the policies finds an eligible worker.
    NoWorker,
}

/// Judges decisions under a second policy. Its buffers are reused.
#[derive(Debug, Default)]
pub struct PolicyComparison {
    decision: Decision,
    /// The round-robin counter of shadow policies; a record has none if another policy decided.
    round_robin_counter: u64,
}

impl PolicyComparison {
    /// The choice of `policy`; `None` = no worker is eligible. The observation is unchanged on return.
    fn pick(&mut self, policy: &Policy, observation: &mut Observation, seed: u64) -> Option<PolicyChoice> {
        // Compares with every worker's cost, whatever the gateway asked for.
        let request = observation.request;
        observation.request.candidates_max = WORKERS_MAX as u32;
        if policy.under(&request.overrides).mode == Mode::RoundRobin {
            observation.request.round_robin_counter = self.round_robin_counter;
            self.round_robin_counter += 1;
        }
        judge(policy, observation, Draws::new(seed), &mut self.decision);
        observation.request = request;
        let chosen = self.decision.candidates.first()?;
        observation.worker(chosen.index).map(|facts| PolicyChoice::of(&facts))
    }

    /// The facts of a chosen worker; `None` if the observation does not hold it.
    fn chosen(observation: &Observation, chosen: Option<WorkerIndex>) -> Option<PolicyChoice> {
        observation.worker(chosen?).map(|facts| PolicyChoice::of(&facts))
    }

    /// Compares the recorded choice with that of `policy`.
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
            _ => return PolicyDifference::NoWorker,
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

/// Sums of differences over the decisions of one space.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ShadowTally {
    /// Decisions judged.
    pub decisions: u64,
    /// Decisions with the same choice.
    pub agreements: u64,
    /// Decisions with different choices.
    pub disagreements: u64,
    /// Of these, decisions whose worker was not eligible under the shadow policy.
    pub excluded: u64,
    /// Decisions in which only one policy found an eligible worker; neither an agreement nor a disagreement.
    pub no_worker: u64,
    /// Blocks by which the overlap of the shadow policy was larger, summed over the decisions where it was.
    pub blocks_saved: u64,
    /// Blocks by which the overlap of the shadow policy was smaller, summed over the decisions where it was.
    pub blocks_lost: u64,
    /// Cost of the recorded choices under the shadow policy above its lowest cost, summed; blocks, if its mode counts
    /// blocks.
    pub cost_regret: f64,
}

impl ShadowTally {
    /// The counts by name, for metrics and status.
    #[must_use]
    pub const fn counts(&self) -> [(&'static str, &'static str, u64); 7] {
        [
            ("shadow_decisions", "Decisions that the shadow policy judged too.", self.decisions),
            ("shadow_agreements", "Decisions for which the shadow policy chose the same worker.", self.agreements),
            ("shadow_disagreements", "Decisions for which the shadow policy chose another worker.", self.disagreements),
            ("shadow_excluded", "Decisions whose worker was not eligible under the shadow policy.", self.excluded),
            (
                "shadow_nobody",
                "Decisions for which only one of the two policies found an eligible worker.",
                self.no_worker,
            ),
            (
                "shadow_blocks_saved",
                "Prompt blocks by which the shadow policy's worker held more than the chosen one.",
                self.blocks_saved,
            ),
            (
                "shadow_blocks_lost",
                "Prompt blocks by which the shadow policy's worker held fewer than the chosen one.",
                self.blocks_lost,
            ),
        ]
    }

    /// Adds the sums of another tally.
    pub fn merge(&mut self, other: &Self) {
        self.decisions += other.decisions;
        self.agreements += other.agreements;
        self.disagreements += other.disagreements;
        self.excluded += other.excluded;
        self.no_worker += other.no_worker;
        self.blocks_saved += other.blocks_saved;
        self.blocks_lost += other.blocks_lost;
        self.cost_regret += other.cost_regret;
    }

    /// Adds one difference.
    pub fn add(&mut self, difference: PolicyDifference) {
        self.decisions += 1;
        match difference {
            PolicyDifference::Same => self.agreements += 1,
            PolicyDifference::NoWorker => self.no_worker += 1,
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

    /// Worker 0 holds 8 of 10 blocks and has a backlog of 5; worker 1 holds 2 and is idle; worker 2 holds none.
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
    fn another_choice_is_compared_with_the_recorded_one() {
        let mut comparison = PolicyComparison::default();
        let (mut seen, before) = (observation(), observation());
        let mut compare = |policy: &Policy, chosen| comparison.compare(policy, &mut seen, 1, chosen);
        let kv = Policy::kv();
        // 10 + 5 blocks minus 8 of credit are 7; 10 minus 2 are 8.
        assert_eq!(compare(&kv, Some(WorkerIndex(0))), PolicyDifference::Same);
        assert_eq!(compare(&kv, Some(WorkerIndex(1))), PolicyDifference::Other { overlap_blocks: 6, cost_regret: 1.0 });
        let less = Policy { device_credit: 0.5, ..kv };
        assert_eq!(
            compare(&less, Some(WorkerIndex(0))),
            PolicyDifference::Other { overlap_blocks: -6, cost_regret: 2.0 }
        );
        assert_eq!(compare(&kv, None), PolicyDifference::NoWorker);
        assert_eq!(seen, before, "the observation is unchanged");
    }

    #[test]
    fn an_ineligible_worker_has_no_cost() {
        let mut seen = observation();
        seen.workers.update(1, |facts| facts.state = WorkerState::Draining);
        let difference = PolicyComparison::default().compare(&Policy::kv(), &mut seen, 1, Some(WorkerIndex(1)));
        assert_eq!(difference, PolicyDifference::Excluded { overlap_blocks: 6 });
        (0..seen.workers.len()).for_each(|row| seen.workers.update(row, |facts| facts.allowed = false));
        assert_eq!(PolicyComparison::default().compare(&Policy::kv(), &mut seen, 1, None), PolicyDifference::Same);
    }

    #[test]
    fn a_round_robin_shadow_policy_takes_one_worker_after_the_other() {
        let (mut seen, mut comparison) = (observation(), PolicyComparison::default());
        let policy = Policy { mode: Mode::RoundRobin, ..Policy::kv() };
        let picks =
            [1, 2, 3, 4].map(|seed| comparison.pick(&policy, &mut seen, seed).expect("an eligible worker").index.0);
        assert_eq!(picks, [0, 1, 2, 0]);
        assert_eq!(seen, observation());
    }

    #[test]
    fn differences_add_up() {
        let mut tally = ShadowTally::default();
        for difference in [
            PolicyDifference::Same,
            PolicyDifference::Other { overlap_blocks: 6, cost_regret: 1.5 },
            PolicyDifference::Other { overlap_blocks: -2, cost_regret: 0.25 },
            PolicyDifference::Excluded { overlap_blocks: -1 },
            PolicyDifference::NoWorker,
        ] {
            tally.add(difference);
        }
        assert_eq!(
            (tally.decisions, tally.agreements, tally.disagreements, tally.excluded, tally.no_worker),
            (5, 1, 3, 1, 1)
        );
        assert_eq!((tally.blocks_saved, tally.blocks_lost, tally.cost_regret), (6, 3, 1.75));
        let mut twice = tally;
        twice.merge(&tally);
        assert_eq!((twice.decisions, twice.blocks_saved, twice.cost_regret), (10, 12, 3.5));
        assert_eq!(tally.counts().iter().map(|(_, _, count)| count).sum::<u64>(), 5 + 1 + 3 + 1 + 1 + 6 + 3);
    }
}
