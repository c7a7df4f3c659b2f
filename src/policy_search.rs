//! The search for a better policy: recorded decisions are judged again under other policies. Pure.
//!
//! All results are estimates: another decision would have changed caches and loads, and so the decisions after it. The
//! recorded caches and loads of later decisions stay as they are.

use std::collections::BTreeMap;

use rand::{Rng, RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::ids::{SpaceId, Worker};
use crate::journal::DecisionRecord;
use crate::route::{Observation, Policy};
use crate::shadow::{PolicyChoice, PolicyComparison};

/// One worker's part of the prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerShare {
    /// Prompts sent to it.
    pub prompts: u64,
    /// Tokens of them that it has to compute.
    pub prefill_tokens: u64,
}

/// Totals of a policy's choices.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Spread {
    /// Decisions that chose a worker.
    pub picks: u64,
    /// Decisions without an eligible worker.
    pub no_worker: u64,
    /// Whole blocks of the prompts.
    pub prompt_blocks: u64,
    /// Blocks that the chosen workers held, in all tiers.
    pub overlap_blocks: u64,
    /// Tokens that the chosen workers have to compute.
    pub prefill_tokens: u64,
    /// Prefill tokens in flight on the chosen workers at the time of each choice.
    pub waiting_tokens: u64,
    /// By worker; every worker of any observation.
    pub workers: BTreeMap<(SpaceId, Worker), WorkerShare>,
}

impl Spread {
    /// Adds a decision about `observation`.
    pub fn add(&mut self, space: SpaceId, observation: &Observation, pick: Option<PolicyChoice>) {
        for facts in observation.workers.iter() {
            self.workers.entry((space, facts.worker)).or_default();
        }
        let Some(pick) = pick else {
            self.no_worker += 1;
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

    /// Mean number of blocks that the chosen worker held.
    #[must_use]
    pub fn overlap_mean(&self) -> f64 {
        self.overlap_blocks as f64 / self.picks.max(1) as f64
    }

    /// The share of prompt blocks that the chosen workers held, 0 to 1.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        self.overlap_blocks as f64 / self.prompt_blocks.max(1) as f64
    }

    /// The largest number of prompts of one worker, over the mean; 1 = balanced.
    #[must_use]
    pub fn prompts_imbalance(&self) -> f64 {
        self.imbalance(|share| share.prompts)
    }

    /// The largest number of computed tokens of one worker, over the mean; 1 = balanced.
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

/// A weight to search, and the values to try.
#[derive(Clone, Copy)]
pub struct Knob {
    /// Its field in `[policy]`.
    pub name: &'static str,
    values: &'static [f64],
    get: fn(&Policy) -> f64,
    set: fn(&mut Policy, f64),
}

impl std::fmt::Debug for Knob {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Knob").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Knob {
    /// The weights to search.
    pub const ALL: &'static [Self] = &[
        Self {
            name: "device_credit",
            values: &[0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0],
            get: |policy| policy.device_credit,
            set: |policy, value| policy.device_credit = value,
        },
        Self {
            name: "prefill_load_scale",
            values: &[0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0],
            get: |policy| policy.prefill_load_scale,
            set: |policy, value| policy.prefill_load_scale = value,
        },
        Self {
            name: "active_request_weight",
            values: &[0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
            get: |policy| policy.active_request_weight,
            set: |policy, value| policy.active_request_weight = value,
        },
        Self {
            name: "temperature",
            values: &[0.0, 0.05, 0.1, 0.25, 0.5],
            get: |policy| policy.temperature,
            set: |policy, value| policy.temperature = value,
        },
        Self {
            name: "credit_decay",
            values: &[0.0, 0.1, 0.25, 0.5, 1.0, 2.0],
            get: |policy| policy.credit_decay,
            set: |policy, value| policy.credit_decay = value,
        },
    ];

    /// Its value in a policy.
    #[must_use]
    pub fn of(&self, policy: &Policy) -> f64 {
        (self.get)(policy)
    }
}

/// The weighted sum to minimise, in tokens: the tokens to prefill, the tokens queued before them, and the tokens by
/// which the busiest worker's prefill exceeds the mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Objective {
    /// The weight of a token that waits before a prompt, relative to a token to compute.
    pub waiting_weight: f64,
    /// The weight of a token above the mean of all workers.
    pub imbalance_weight: f64,
}

impl Default for Objective {
    fn default() -> Self {
        Self { waiting_weight: 1.0, imbalance_weight: 1.0 }
    }
}

impl Objective {
    /// The sum for one policy's choices.
    #[must_use]
    pub fn of(&self, spread: &Spread) -> f64 {
        let mean = spread.prefill_tokens as f64 / spread.workers.len().max(1) as f64;
        let above = mean * (spread.prefill_imbalance() - 1.0);
        spread.prefill_tokens as f64
            + self.waiting_weight * spread.waiting_tokens as f64
            + self.imbalance_weight * above
    }
}

/// A policy that was tried.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The policy.
    pub policy: Policy,
    /// Its sum, tokens.
    pub tokens: f64,
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuned {
    /// The policy with which the search began: the last recorded one.
    pub before: Step,
    /// The totals of its choices.
    pub before_spread: Spread,
    /// The best policy that was tried; it may be the same.
    pub best: Step,
    /// The totals of its choices.
    pub best_spread: Spread,
    /// Every policy that was better than all before it, in order.
    pub steps: Vec<Step>,
    /// Policies tried.
    pub trials: u32,
}

/// Tries policies on recorded decisions.
#[derive(Debug)]
pub struct Search<'a> {
    records: &'a mut [DecisionRecord],
    objective: Objective,
    comparison: PolicyComparison,
    trials: u32,
    trials_max: u32,
    best: Step,
    best_spread: Spread,
    steps: Vec<Step>,
}

impl<'a> Search<'a> {
    /// Searches from `policy`: changes one weight after the other while that helps, and then again from random weights
    /// drawn by `seed`, until `trials_max` policies were tried. The same arguments give the same result.
    #[must_use]
    pub fn run(
        records: &'a mut [DecisionRecord],
        policy: &Policy,
        objective: Objective,
        seed: u64,
        trials_max: u32,
    ) -> Tuned {
        let best = Step { policy: *policy, tokens: f64::INFINITY };
        let (comparison, best_spread, steps) = Default::default();
        let mut search = Self { records, objective, comparison, trials: 0, trials_max, best, best_spread, steps };
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        search.attempt(policy);
        let (before, before_spread) = (search.best.clone(), search.best_spread.clone());
        let mut start = before.clone();
        while search.descend(start) {
            start = search.drawn(policy, &mut rng);
        }
        let Self { best, best_spread, steps, trials, .. } = search;
        Tuned { before, before_spread, best, best_spread, steps, trials }
    }

    fn drawn(&mut self, policy: &Policy, rng: &mut impl Rng) -> Step {
        let mut drawn = *policy;
        for knob in Knob::ALL {
            (knob.set)(&mut drawn, knob.values[rng.random_range(0..knob.values.len())]);
        }
        let tokens = self.attempt(&drawn);
        Step { policy: drawn, tokens }
    }

    /// Changes one weight at a time while that helps. `true` = trials are left.
    fn descend(&mut self, mut at: Step) -> bool {
        let mut helped = true;
        while helped {
            helped = false;
            for knob in Knob::ALL {
                for value in knob.values {
                    if self.trials >= self.trials_max {
                        return false;
                    }
                    let mut policy = at.policy;
                    (knob.set)(&mut policy, *value);
                    if policy == at.policy {
                        continue;
                    }
                    let tokens = self.attempt(&policy);
                    if tokens < at.tokens {
                        at = Step { policy, tokens };
                        helped = true;
                    }
                }
            }
        }
        self.trials < self.trials_max
    }

    fn attempt(&mut self, policy: &Policy) -> f64 {
        self.trials += 1;
        let mut spread = Spread::default();
        for record in &mut *self.records {
            let pick = self.comparison.pick(policy, &mut record.observation, record.outcome.seed);
            spread.add(record.space, &record.observation, pick);
        }
        let tokens = self.objective.of(&spread);
        if tokens < self.best.tokens {
            self.best = Step { policy: *policy, tokens };
            self.best_spread = spread;
            self.steps.push(self.best.clone());
        }
        tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{TierBlocks, WorkerIndex};
    use crate::load::Load;
    use crate::route::{Decision, Draws, RequestFacts, WorkerFacts, judge};

    const WORKERS: u32 = 4;

    fn facts(index: u32, device: u32, prefill_tokens: u64) -> WorkerFacts {
        WorkerFacts {
            index: WorkerIndex(index),
            worker: Worker::new(u64::from(index), 0),
            overlap: TierBlocks { device, ..TierBlocks::default() },
            load: Load { prefill_tokens, requests: prefill_tokens / 100, ..Load::default() },
            ..WorkerFacts::default()
        }
    }

    /// Decisions that ignore caches, although one worker holds most of each prompt.
    fn records() -> (Vec<DecisionRecord>, Policy) {
        let policy = Policy { device_credit: 0.0, ..Policy::kv() };
        let mut decision = Decision::default();
        let record = |at: u32| {
            let request =
                RequestFacts { prompt_tokens: 320, block_size: 16, whole_blocks: 20, ..RequestFacts::default() };
            let worker = |index| facts(index, if at % WORKERS == index { 16 } else { 0 }, u64::from(index) * 32);
            let workers = (0..WORKERS).map(worker).collect();
            let observation = Observation { request, workers, ..Observation::default() };
            judge(&policy, &observation, Draws::new(u64::from(at)), &mut decision);
            let mut record = DecisionRecord::default();
            record.copy_from((u64::from(at), SpaceId(0)), &policy, &observation, &decision);
            record
        };
        ((0..200).map(record).collect(), policy)
    }

    #[test]
    fn a_search_finds_a_credit_for_cached_blocks() {
        let (mut records, policy) = records();
        let before = records.clone();
        let tuned = Search::run(&mut records, &policy, Objective::default(), 1, 120);
        assert!(tuned.best.policy.device_credit > 0.0, "{tuned:?}");
        assert!(tuned.best.tokens < tuned.before.tokens / 2.0, "{tuned:?}");
        assert_eq!((tuned.trials, tuned.before.policy), (120, policy));
        assert!(tuned.steps.is_sorted_by(|a, b| a.tokens > b.tokens), "each is better than all before it");
        assert_eq!(tuned.steps.last(), Some(&tuned.best));
        assert!(tuned.best_spread.hit_rate() > tuned.before_spread.hit_rate());
        assert_eq!(records, before, "the records are unchanged");
        assert_eq!(
            Search::run(&mut records, &policy, Objective::default(), 1, 120),
            tuned,
            "the same arguments give the same result"
        );
    }

    #[test]
    fn the_first_trial_is_the_recorded_policy() {
        let (mut records, policy) = records();
        let tuned = Search::run(&mut records, &policy, Objective::default(), 1, 1);
        assert_eq!((tuned.trials, &tuned.best), (1, &tuned.before));
        let empty = Search::run(&mut [], &policy, Objective::default(), 1, 10);
        assert_eq!((empty.best.tokens, empty.best.policy), (0.0, policy));
    }

    #[test]
    fn a_spread_sums_prompts_and_overlaps() {
        let (mut records, policy) = records();
        let (mut spread, mut comparison) = (Spread::default(), PolicyComparison::default());
        for record in &mut records {
            let pick = comparison.pick(&policy, &mut record.observation, record.outcome.seed);
            assert_eq!(pick.map(|pick| pick.index), record.outcome.chosen());
            spread.add(record.space, &record.observation, pick);
        }
        spread.add(SpaceId(0), &records[0].observation, None);
        // Worker 0 has the lowest load: without credit it gets every prompt, and holds a quarter of them.
        assert_eq!((spread.picks, spread.no_worker, spread.workers.len()), (200, 1, 4));
        assert_eq!((spread.overlap_blocks, spread.prefill_tokens), (50 * 16, 50 * 64 + 150 * 320));
        assert_eq!((spread.hit_rate(), spread.overlap_mean()), (0.2, 4.0));
        assert_eq!((spread.prompts_imbalance(), spread.prefill_imbalance(), spread.waiting_tokens), (4.0, 4.0, 0));
        let tokens = Objective { waiting_weight: 2.0, imbalance_weight: 0.5 }.of(&spread);
        assert_eq!(tokens, 51_200.0 + 0.5 * 3.0 * 12_800.0);
        assert_eq!((Spread::default().hit_rate(), Spread::default().prompts_imbalance()), (0.0, 1.0));
    }
}
