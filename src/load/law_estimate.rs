//! The estimate of one prefill law: recursive least squares over its three constants, each as a multiple of its prior, on
//! relative errors, with forgetting. Also what a restart keeps of it. Pure.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};

use crate::engine_law::PrefillLaw;

/// The weight of the past at each sample of a class.
const FORGETTING: f64 = 0.99;
/// The variance of a constant's multiple before the first sample, in variances of a sample: of a given prior, and of none.
const VARIANCE_OF_PRIOR: f64 = 12.0;
const VARIANCE_OF_GUESS: f64 = 400.0;
/// The sum of variances above which nothing is forgotten, because samples do not tell the constants apart.
const VARIANCE_MAX: f64 = 1200.0;
/// A sample counts up to this many times the usual error.
const SURPRISE_MAX: f64 = 3.0;
/// The usual relative error before the first sample, and the least.
const ERROR_AT_FIRST: f64 = 1.0;
const ERROR_MIN: f64 = 0.05;
/// The weight of a new sample in the usual error.
const ERROR_WEIGHT: f64 = 0.05;
/// A constant is at most this many times its prior, and at least one part in as many of it.
pub(super) const CONSTANT_FACTOR_MAX: f64 = 64.0;
/// Half of what is left of the certainty that samples gave is lost in this time without samples, seconds.
const HALF_LIFE_S: f64 = 86_400.0;
/// A saved law gives way to another preset than before if the two differ by more than this factor on a typical prompt.
const PRESET_DIFFERENCE_MAX: f64 = 2.0;
/// Those prompts: tokens to compute, and tokens that are cached.
const TYPICAL_PROMPTS: [[f64; 2]; 3] = [[512.0, 0.0], [4096.0, 0.0], [1024.0, 32_768.0]];

/// What was learnt of a class of workers, as a restart keeps it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearntClass {
    /// Its name.
    pub name: String,
    /// The constants that it began with, seconds, in the order of [`PrefillLaw`].
    pub prior: [f64; 3],
    /// Whether a preset gave them.
    pub is_preset: bool,
    /// Their learnt multiples.
    pub factors: [f64; 3],
    /// The covariance of the multiples, in variances of a sample: the diagonal, then rows 0 and 1, 0 and 2, 1 and 2.
    pub variance: [f64; 6],
    /// The usual relative error of a sample.
    pub error: f64,
    /// Samples that it was learnt from.
    pub samples: u64,
    /// When the last of them came, milliseconds of Unix time.
    pub learnt_unix_ms: u64,
}

/// The items that were learnt last, `items_max` of them at most.
pub(super) fn learnt_last<T>(
    items: impl Iterator<Item = T>,
    learnt_unix_ms: impl Fn(&T) -> u64,
    items_max: usize,
) -> impl Iterator<Item = T> {
    let mut items: Vec<T> = items.collect();
    items.sort_by_key(|item| Reverse(learnt_unix_ms(item)));
    items.into_iter().take(items_max)
}

/// Why a saved law is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LawRefusal {
    /// Its constants are beyond the bounds of learning.
    Implausible,
    /// The workers have another preset than before, and the law differs too much from it.
    PresetDiffers,
}

impl LawRefusal {
    /// The reason, for a log line.
    #[must_use]
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Implausible => "its constants are beyond the bounds of learning",
            Self::PresetDiffers => {
                "engine_preset was changed, and the law differs from the new one by more than a factor of 2"
            }
        }
    }
}

/// A law under estimation: `factors` times the prior.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Estimate {
    prior: PrefillLaw,
    is_preset: bool,
    factors: [f64; 3],
    /// Their covariance.
    variance: [[f64; 3]; 3],
    /// The usual relative error of a sample.
    error: f64,
}

impl Estimate {
    pub(super) fn new(prior: Option<PrefillLaw>) -> Self {
        let of_factor = if prior.is_some() { VARIANCE_OF_PRIOR } else { VARIANCE_OF_GUESS };
        let mut variance = [[0.0; 3]; 3];
        (0..3).for_each(|at| variance[at][at] = of_factor);
        let is_preset = prior.is_some();
        Self { prior: prior.unwrap_or_default(), is_preset, factors: [1.0; 3], variance, error: ERROR_AT_FIRST }
    }

    /// Whether a preset gave its prior.
    pub(super) const fn is_preset(&self) -> bool {
        self.is_preset
    }

    pub(super) fn law(&self) -> PrefillLaw {
        let prior = self.prior.constants();
        PrefillLaw::of(std::array::from_fn(|at| prior[at] * self.factors[at]))
    }

    /// Takes a prefill of `uncached` tokens behind `cached` ones that took `took_s` alone. `false`: it teaches nothing.
    pub(super) fn take(&mut self, uncached: f64, cached: f64, took_s: f64) -> bool {
        let by_prior_s = self.prior.prefill_s(uncached, cached);
        let by_law_s = self.law().prefill_s(uncached, cached);
        // Relative to the prediction, so that a long prompt does not outweigh a hundred short ones.
        let parts = [
            self.prior.base_s / by_law_s,
            self.prior.token_s * uncached / by_law_s,
            self.prior.attention_s * uncached * (cached + 0.5 * uncached) / by_law_s,
        ];
        let surprise = took_s / by_law_s - 1.0;
        if !(by_prior_s > 0.0 && by_law_s > 0.0 && surprise.is_finite()) {
            return false;
        }
        let surprise_max = SURPRISE_MAX * self.error;
        let surprise_used = surprise.clamp(-surprise_max, surprise_max);
        let gains = std::array::from_fn::<f64, 3, _>(|row| (0..3).map(|at| self.variance[row][at] * parts[at]).sum());
        let certainty = FORGETTING + (0..3).map(|at| parts[at] * gains[at]).sum::<f64>();
        for (factor, gain) in self.factors.iter_mut().zip(gains) {
            let moved = *factor + gain / certainty * surprise_used;
            *factor = moved.clamp(1.0 / CONSTANT_FACTOR_MAX, CONSTANT_FACTOR_MAX);
        }
        for row in 0..3 {
            for at in 0..3 {
                self.variance[row][at] -= gains[row] * gains[at] / certainty;
            }
        }
        if self.trace() < VARIANCE_MAX {
            self.variance.iter_mut().flatten().for_each(|value| *value /= FORGETTING);
        }
        self.error += ERROR_WEIGHT * (surprise_used.abs() - self.error);
        self.error = self.error.max(ERROR_MIN);
        true
    }

    fn trace(&self) -> f64 {
        (0..3).map(|at| self.variance[at][at]).sum()
    }

    /// What a restart keeps.
    pub(super) fn save(&self, name: &str, samples: u64, learnt_unix_ms: u64) -> LearntClass {
        let [[a, ab, ac], [_, b, bc], [_, _, c]] = self.variance;
        LearntClass {
            name: name.to_owned(),
            prior: self.prior.constants(),
            is_preset: self.is_preset,
            factors: self.factors,
            variance: [a, b, c, ab, ac, bc],
            error: self.error,
            samples,
            learnt_unix_ms,
        }
    }

    /// The estimate that was saved `age_s` seconds ago, for workers with this prior now. It is as uncertain as a preset
    /// once it is old, so that other engines than before are learnt as soon as new ones.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub(super) fn restore(saved: &LearntClass, prior: Option<PrefillLaw>, age_s: f64) -> Result<Self, LawRefusal> {
        if !saved.is_plausible() {
            return Err(LawRefusal::Implausible);
        }
        let before = PrefillLaw::of(saved.prior);
        let law = Self { prior: before, factors: saved.factors, ..Self::new(None) }.law();
        let is_same = |prior: PrefillLaw| saved.is_preset && prior == before;
        if prior.is_some_and(|prior| !is_same(prior) && differ(&law, &prior)) {
            return Err(LawRefusal::PresetDiffers);
        }
        let (is_preset, prior) = (prior.is_some(), prior.unwrap_or_default());
        let scale: [f64; 3] = std::array::from_fn(|at| saved.prior[at] / prior.constants()[at]);
        let factors: [f64; 3] = std::array::from_fn(|at| saved.factors[at] * scale[at]);
        if !factors.iter().all(|factor| is_within_bounds(*factor)) {
            return Err(LawRefusal::Implausible);
        }
        let lost = 1.0 - libm::exp2(-age_s / HALF_LIFE_S);
        let mut variance = saved.matrix();
        for row in 0..3 {
            for at in 0..3 {
                variance[row][at] *= scale[row] * scale[at];
            }
            // Towards that of a preset, never beyond it.
            let of_preset = VARIANCE_OF_PRIOR * factors[row].max(1.0).powi(2);
            variance[row][row] += lost * (of_preset - variance[row][row]).max(0.0);
        }
        let error = saved.error.clamp(ERROR_MIN, ERROR_AT_FIRST);
        let mut estimate = Self { prior, is_preset, factors, variance, error: error + lost * (ERROR_AT_FIRST - error) };
        // Multiples of a smaller prior vary more.
        let excess = (estimate.trace() / variance_ceiling()).max(1.0);
        estimate.variance.iter_mut().flatten().for_each(|value| *value /= excess);
        Ok(estimate)
    }
}

impl LearntClass {
    fn matrix(&self) -> [[f64; 3]; 3] {
        let [a, b, c, ab, ac, bc] = self.variance;
        [[a, ab, ac], [ab, b, bc], [ac, bc, c]]
    }

    /// Whether learning could have made it.
    pub(super) fn is_plausible(&self) -> bool {
        let are_positive = self.prior.iter().all(|constant| constant.is_normal() && *constant > 0.0);
        are_positive
            && self.factors.iter().all(|factor| is_within_bounds(*factor))
            && self.error.is_finite()
            && self.error > 0.0
            && is_covariance(&self.matrix())
    }
}

fn is_within_bounds(factor: f64) -> bool {
    // A saved constant was rounded when it was divided by its prior.
    const ROUNDING: f64 = 1.0 + 1e-9;
    (1.0 / CONSTANT_FACTOR_MAX / ROUNDING..=CONSTANT_FACTOR_MAX * ROUNDING).contains(&factor)
}

/// Whether a symmetric matrix can be a covariance of learning: positive semidefinite, but for rounding, and bounded.
fn is_covariance(of: &[[f64; 3]; 3]) -> bool {
    const ROUNDING: f64 = 1e-6;
    let trace = of[0][0] + of[1][1] + of[2][2];
    let is_bounded = of.iter().flatten().all(|value| value.is_finite())
        && (0..3).all(|at| of[at][at] >= 0.0)
        && trace <= variance_ceiling() * (1.0 + ROUNDING);
    let minor = |a: usize, b: usize| of[a][a] * of[b][b] * (1.0 + ROUNDING) + ROUNDING - of[a][b] * of[a][b];
    let determinant = of[0][0] * (of[1][1] * of[2][2] - of[1][2] * of[1][2])
        - of[0][1] * (of[0][1] * of[2][2] - of[1][2] * of[0][2])
        + of[0][2] * (of[0][1] * of[1][2] - of[1][1] * of[0][2]);
    let slack = ROUNDING * (1.0 + trace * trace * trace);
    is_bounded && [(0, 1), (0, 2), (1, 2)].iter().all(|(a, b)| minor(*a, *b) >= 0.0) && determinant >= -slack
}

/// The largest sum of variances that learning, or ageing, can leave.
const fn variance_ceiling() -> f64 {
    VARIANCE_MAX / FORGETTING + 3.0 * VARIANCE_OF_PRIOR * CONSTANT_FACTOR_MAX * CONSTANT_FACTOR_MAX
}

/// Whether two laws differ too much on a typical prompt.
fn differ(one: &PrefillLaw, other: &PrefillLaw) -> bool {
    TYPICAL_PROMPTS.iter().any(|[uncached, cached]| {
        let ratio = one.prefill_s(*uncached, *cached) / other.prefill_s(*uncached, *cached);
        !(1.0 / PRESET_DIFFERENCE_MAX..=PRESET_DIFFERENCE_MAX).contains(&ratio)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::engine_law::engine_preset;

    fn preset(name: &str) -> PrefillLaw {
        engine_preset(name).expect("a preset").law.prefill
    }

    /// Takes prompts of many sizes from an engine with this law.
    fn teach(estimate: &mut Estimate, truth: &PrefillLaw, samples: usize) {
        for at in 0..samples {
            let (uncached, cached) = (50.0 * 1.37_f64.powi(at as i32 % 20), 700.0 * (at % 7 * (at % 3)) as f64);
            assert!(estimate.take(uncached, cached, truth.prefill_s(uncached, cached)));
        }
    }

    fn error(estimate: &Estimate, truth: &PrefillLaw) -> f64 {
        let off = |[uncached, cached]: &[f64; 2]| {
            (estimate.law().prefill_s(*uncached, *cached) / truth.prefill_s(*uncached, *cached) - 1.0).abs()
        };
        TYPICAL_PROMPTS.iter().map(off).fold(0.0, f64::max)
    }

    fn learnt(truth: &PrefillLaw) -> LearntClass {
        let mut estimate = Estimate::new(None);
        teach(&mut estimate, truth, 400);
        estimate.save("c", 400, 0)
    }

    #[test]
    fn a_saved_law_is_the_learnt_one() {
        let truth = preset("32b-tp2");
        let saved = learnt(&truth);
        for prior in [None, Some(truth), Some(PrefillLaw::default()), Some(truth.slowed(1.5))] {
            let restored = Estimate::restore(&saved, prior, 0.0).unwrap();
            assert!(error(&restored, &truth) < 0.02, "{prior:?}: {}", error(&restored, &truth));
            // As certain as before: a wrong sample moves both as far.
            let mut before = Estimate::restore(&saved, None, 0.0).unwrap();
            let mut after = restored;
            assert!(before.take(4000.0, 0.0, 1.0) && after.take(4000.0, 0.0, 1.0));
            assert!((error(&before, &truth) - error(&after, &truth)).abs() < 1e-6);
        }
    }

    #[test]
    fn an_old_law_gives_way_to_another_engine_soon() {
        let (before, now) = (preset("32b-tp2"), preset("32b-tp2").slowed(0.3));
        let saved = learnt(&before);
        let after = |age_s: f64| {
            let mut estimate = Estimate::restore(&saved, None, age_s).unwrap();
            teach(&mut estimate, &now, 12);
            error(&estimate, &now)
        };
        let week_s = 7.0 * 86_400.0;
        assert!(after(week_s) < 0.3 && after(week_s) < 0.5 * after(0.0), "{} {}", after(week_s), after(0.0));
        assert!(after(86_400.0) < after(3600.0), "the older, the sooner");
        assert!(Estimate::restore(&saved, None, f64::MAX).is_ok());
    }

    #[test]
    fn another_preset_wins_over_a_law_that_differs_from_it() {
        let saved = learnt(&preset("8b-tp1"));
        let of = |name| Estimate::restore(&saved, Some(preset(name)), 0.0);
        assert!(of("8b-tp1").is_ok());
        assert_eq!(of("70b-tp4"), Err(LawRefusal::PresetDiffers), "also if it is what the daemon guessed");
        // The same preset as before wins nothing, however far the law has moved from it.
        let prior = preset("8b-tp1").constants();
        let saved = LearntClass { prior, is_preset: true, factors: [5.0; 3], ..saved };
        assert!(Estimate::restore(&saved, Some(preset("8b-tp1")), 0.0).is_ok());
        assert!(Estimate::restore(&saved, None, 0.0).is_ok(), "no preset says otherwise");
    }

    #[test]
    fn what_learning_cannot_make_is_refused() {
        let saved = learnt(&preset("70b-tp4"));
        let with = |change: &dyn Fn(&mut LearntClass)| {
            let mut changed = saved.clone();
            change(&mut changed);
            Estimate::restore(&changed, None, 0.0).err()
        };
        assert_eq!(with(&|_| {}), None);
        let absurd: [&dyn Fn(&mut LearntClass); 10] = [
            &|saved| saved.factors[0] = 65.0,
            &|saved| saved.factors[1] = 0.01,
            &|saved| saved.factors[2] = f64::NAN,
            &|saved| saved.prior[0] = 0.0,
            &|saved| saved.prior[1] = -1.0,
            &|saved| saved.prior[2] = 1e300,
            &|saved| saved.error = f64::INFINITY,
            &|saved| saved.variance[0] = -1.0,
            &|saved| saved.variance[3] = 1e6,
            &|saved| saved.variance = [1e12; 6],
        ];
        for (at, change) in absurd.iter().enumerate() {
            assert_eq!(with(change), Some(LawRefusal::Implausible), "change {at}");
        }
    }

    proptest! {
        #[test]
        fn everything_learnt_can_be_restored(
            took in prop::collection::vec((1.0..40_000.0_f64, 0.0..60_000.0_f64, 0.0..100.0_f64), 0..300),
            age_s in 0.0..1e7_f64,
            given: bool,
        ) {
            let prior = given.then(|| preset("32b-tp4"));
            let mut estimate = Estimate::new(prior);
            for (uncached, cached, took_s) in took {
                estimate.take(uncached, cached, took_s);
            }
            for _ in 0..3 {
                let saved = estimate.save("c", 1, 0);
                prop_assert!(saved.is_plausible(), "{:?}", saved);
                estimate = Estimate::restore(&saved, prior, age_s).unwrap();
            }
        }
    }
}
