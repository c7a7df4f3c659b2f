//! The search for a policy under which requests of a load feel better: the share of them that meets the SLO, then the mean
//! time to the last token.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::measure::Measured;
use super::policy_trials::{Job, Trials};
use crate::route::{Mode, Policy};

/// Shares of goodput that count as equal: half a percent.
const GOODPUT_STEPS: f64 = 200.0;
/// Random weights that were known already, after which a search ends.
const KNOWN_DRAWS_MAX: usize = 200;

/// A weight to search, and the values to try.
#[derive(Clone, Copy)]
pub struct Knob {
    /// Its field in `[policy]`.
    pub name: &'static str,
    /// The mode that it belongs to.
    mode: Mode,
    values: &'static [f64],
    get: fn(&Policy) -> f64,
    set: fn(&mut Policy, f64),
}

/// The modes to search.
const MODES: [Mode; 3] = [Mode::Latency, Mode::Kv, Mode::Lmetric];

/// A weight of a mode by its field in [`Policy`], with the values to try.
macro_rules! knob {
    ($mode:ident, $field:ident, $values:expr) => {
        Knob {
            name: stringify!($field),
            mode: Mode::$mode,
            values: &$values,
            get: |policy| policy.$field,
            set: |policy, value| policy.$field = value,
        }
    };
}

impl Knob {
    /// The weights to search.
    pub const ALL: &'static [Self] = &[
        knob!(Latency, delay_weight, [0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 1.0]),
        knob!(Latency, later_delay_weight, [0.0, 0.5, 1.0, 2.0]),
        knob!(Latency, output_delay_weight, [0.0, 0.5, 1.0, 2.0]),
        knob!(Kv, device_credit, [0.5, 1.0, 1.25, 1.5, 2.0]),
        knob!(Kv, prefill_load_scale, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]),
        knob!(Kv, active_request_weight, [0.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0]),
        knob!(Kv, credit_decay, [0.0, 0.25, 1.0]),
    ];

    /// The weights of a mode.
    pub fn of_mode(mode: Mode) -> impl Iterator<Item = &'static Self> {
        Self::ALL.iter().filter(move |knob| knob.mode == mode)
    }

    /// Its value in a policy.
    #[must_use]
    pub fn of(&self, policy: &Policy) -> f64 {
        (self.get)(policy)
    }
}

/// The mode and the weights of a policy that a search may change, as fields of `[policy]`.
#[must_use]
pub fn settings_of(policy: &Policy) -> Vec<(String, String)> {
    let weight = |knob: &Knob| (knob.name.to_owned(), format!("{:?}", knob.of(policy)));
    std::iter::once(("mode".to_owned(), policy.mode.name().to_owned()))
        .chain(Knob::of_mode(policy.mode).map(weight))
        .collect()
}

/// A policy that was tried.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The policy.
    pub policy: Policy,
    /// What requests felt under it.
    pub figures: Measured,
}

impl Candidate {
    /// More is better: goodput in steps of half a percent, then the mean time to the last token.
    fn score(&self) -> (i64, f64) {
        let goodput = (self.figures.goodput * GOODPUT_STEPS).round() as i64;
        (goodput, -self.figures.e2e_s.mean)
    }

    /// Whether requests felt better than under another policy.
    #[must_use]
    pub fn is_better_than(&self, other: &Self) -> bool {
        self.score() > other.score()
    }
}

/// The policies that were tried, in order.
#[derive(Clone, Debug)]
pub struct Searched {
    /// The first is the one with which the search began.
    pub candidates: Vec<Candidate>,
    /// The place of the best.
    pub best: usize,
}

/// Searches for a policy under which requests feel better than under `start`, at one load and with the first seed. It tries
/// the modes, changes one weight of the best policy of each mode after the other while that helps, and then begins anew at
/// random weights drawn by `seed`, until `trials_max` policies were tried. The same arguments give the same result.
#[must_use]
pub fn search(trials: &Trials<'_>, start: &Policy, load: f64, (seed, trials_max): (u64, usize)) -> Searched {
    let searched = Searched { candidates: Vec::new(), best: 0 };
    let mut search = Search { trials, load, trials_max: trials_max.max(1), searched };
    let with_mode = |mode: Mode| Policy { mode, ..*start };
    let usual = |mode: Mode| {
        let mut policy = with_mode(mode);
        Knob::ALL.iter().for_each(|knob| (knob.set)(&mut policy, (knob.get)(&Policy::default())));
        policy
    };
    let strong_on_load = Policy { device_credit: 1.5, prefill_load_scale: 16.0, ..usual(Mode::Kv) };
    let first = [*start].into_iter().chain(MODES.map(usual)).chain(MODES.map(with_mode)).chain([strong_on_load]);
    search.attempt(&first.collect::<Vec<_>>());
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    for mode in MODES {
        if let Some(best) = search.best_of(mode) {
            search.descend(best);
        }
    }
    let mut known_draws = 0;
    while !search.is_over() && known_draws < KNOWN_DRAWS_MAX {
        let mode = [Mode::Latency, Mode::Kv][rng.random_range(0..2)];
        let mut drawn = usual(mode);
        for knob in Knob::of_mode(mode) {
            (knob.set)(&mut drawn, knob.values[rng.random_range(0..knob.values.len())]);
        }
        if search.place(&drawn).is_some() {
            known_draws += 1;
            continue;
        }
        search.attempt(&[drawn]);
        search.descend(drawn);
    }
    search.searched
}

struct Search<'a> {
    trials: &'a Trials<'a>,
    load: f64,
    trials_max: usize,
    searched: Searched,
}

impl Search<'_> {
    fn is_over(&self) -> bool {
        self.searched.candidates.len() >= self.trials_max
    }

    fn place(&self, policy: &Policy) -> Option<usize> {
        self.searched.candidates.iter().position(|candidate| does_the_same(&candidate.policy, policy))
    }

    /// Tries the policies that were not tried, all at once.
    fn attempt(&mut self, policies: &[Policy]) {
        let mut new: Vec<Policy> = Vec::new();
        for policy in policies {
            let is_known = self.place(policy).is_some() || new.iter().any(|other| does_the_same(other, policy));
            if !is_known && self.searched.candidates.len() + new.len() < self.trials_max {
                new.push(*policy);
            }
        }
        let jobs: Vec<Job<'_>> = new.iter().map(|policy| (policy, self.load, 1)).collect();
        let measured = self.trials.measured(&jobs);
        for (policy, figures) in new.iter().zip(measured) {
            let candidate = Candidate { policy: *policy, figures };
            let place = self.searched.candidates.len();
            if self.searched.candidates.get(self.searched.best).is_none_or(|best| candidate.is_better_than(best)) {
                self.searched.best = place;
            }
            self.searched.candidates.push(candidate);
        }
    }

    /// The best policy of a mode.
    fn best_of(&self, mode: Mode) -> Option<Policy> {
        let of_mode = self.searched.candidates.iter().filter(|candidate| candidate.policy.mode == mode);
        let best = of_mode.reduce(|best, candidate| if candidate.is_better_than(best) { candidate } else { best });
        best.map(|best| best.policy)
    }

    /// Changes one weight at a time while that helps. All values of a weight are tried at once, so that the number of
    /// threads changes no result.
    fn descend(&mut self, mut at: Policy) {
        let mut helped = true;
        while helped && !self.is_over() {
            helped = false;
            for knob in Knob::of_mode(at.mode) {
                let with = |value: &f64| {
                    let mut policy = at;
                    (knob.set)(&mut policy, *value);
                    policy
                };
                let policies: Vec<Policy> = knob.values.iter().map(with).collect();
                self.attempt(&policies);
                let tried = policies.iter().chain([&at]).filter_map(|policy| self.place(policy));
                let tried = tried.map(|place| &self.searched.candidates[place]);
                let best =
                    tried.reduce(|best, candidate| if candidate.is_better_than(best) { candidate } else { best });
                if let Some(best) = best.filter(|best| !does_the_same(&best.policy, &at)) {
                    (at, helped) = (best.policy, true);
                }
                if self.is_over() {
                    return;
                }
            }
        }
    }
}

/// Whether two policies differ in nothing that their mode reads and a search changes.
fn does_the_same(one: &Policy, other: &Policy) -> bool {
    one.mode == other.mode && Knob::of_mode(one.mode).all(|knob| knob.of(one) == knob.of(other))
}

#[cfg(test)]
mod tests {
    use super::super::figures::Slo;
    use super::super::policy_trials::Stretch;
    use super::super::workload::generators::Chat;
    use super::*;

    #[test]
    fn a_search_finds_what_requests_feel_better_and_is_the_same_for_a_seed() {
        let workload = Chat { requests: 260, sessions_per_s: 6.0, ..Chat::default() }.generate(3);
        let (stretch, fleet) = (Stretch::of(&workload, 0.0, 0.6), super::super::tests::fleet(3));
        let start = Policy { mode: Mode::Kv, device_credit: 0.0, prefill_load_scale: 0.0, ..Policy::default() };
        let find = |threads: usize| {
            let slo = Slo::default();
            let trials = Trials { stretch: &stretch, fleet: &fleet, slo, block_size: 16, threads, tick: &|| {} };
            search(&trials, &start, 1.0, (7, 12))
        };
        let found = find(2);
        assert_eq!((found.candidates.len(), found.candidates[0].policy), (12, start));
        let best = &found.candidates[found.best];
        assert!(best.is_better_than(&found.candidates[0]), "{best:?}");
        assert!(found.candidates.iter().all(|other| !other.is_better_than(best)));
        assert_eq!(find(1).candidates, found.candidates);
    }

    #[test]
    fn settings_name_the_mode_and_its_weights() {
        let latency = Policy { mode: Mode::Latency, delay_weight: 0.5, ..Policy::default() };
        let own = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let weights = [("delay_weight", "0.5"), ("later_delay_weight", "1.0"), ("output_delay_weight", "1.0")];
        let all: Vec<_> =
            [("mode", "latency")].into_iter().chain(weights).map(|(name, value)| own(name, value)).collect();
        assert_eq!(settings_of(&latency), all);
        assert_eq!(settings_of(&Policy { mode: Mode::Lmetric, ..latency }), [own("mode", "lmetric")]);
        assert_eq!(settings_of(&Policy { mode: Mode::Kv, ..latency }).len(), 5);
    }
}
