//! A search for weights that would have made recorded decisions cheaper.

use rand::{Rng, RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::spread::Spread;
use crate::journal::Record;
use crate::route::Policy;
use crate::shadow::PolicyComparison;

/// One weight that is searched, and the values that are tried.
#[derive(Clone, Copy)]
pub struct Knob {
    /// Its name in `[policy]`.
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
    /// The weights that are searched.
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

/// What is to be small, in tokens: those to compute, those that wait before them, and those by which the worker with
/// the most to compute exceeds the mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Objective {
    /// What a token that waits before the prompt counts, against one to compute.
    pub waiting_weight: f64,
    /// What a token above the mean of all workers counts.
    pub imbalance_weight: f64,
}

impl Default for Objective {
    fn default() -> Self {
        Self { waiting_weight: 1.0, imbalance_weight: 1.0 }
    }
}

impl Objective {
    /// The tokens of a spread.
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
    /// It.
    pub policy: Policy,
    /// What it comes to, tokens.
    pub tokens: f64,
}

/// What a search found.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuned {
    /// The policy that the search began with: the last that was recorded.
    pub before: Step,
    /// What its choices add up to.
    pub before_spread: Spread,
    /// The best that was tried, which may be the same.
    pub best: Step,
    /// What its choices add up to.
    pub best_spread: Spread,
    /// Every policy that was better than all before it, in order.
    pub steps: Vec<Step>,
    /// Policies tried.
    pub trials: u32,
}

/// Tries policies on recorded decisions.
#[derive(Debug)]
pub struct Search<'a> {
    records: &'a mut [Record],
    objective: Objective,
    comparison: PolicyComparison,
    trials: u32,
    trials_max: u32,
    best: Step,
    best_spread: Spread,
    steps: Vec<Step>,
}

impl<'a> Search<'a> {
    /// Searches from `policy`: one weight after the other as long as that helps, and then again from weights that are
    /// drawn from `seed`, until `trials_max` policies were tried. The same arguments find the same.
    #[must_use]
    pub fn run(records: &'a mut [Record], policy: &Policy, objective: Objective, seed: u64, trials_max: u32) -> Tuned {
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

    /// Goes down from a policy as long as one weight alone helps; whether there are trials left.
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
