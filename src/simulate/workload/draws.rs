//! Random draws that the generators share. All are functions of a seeded generator of numbers.

use std::f64::consts::TAU;

use rand::RngExt;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::{Deserialize, Serialize};

/// A lognormal distribution, clipped. The mean and deviation are those before clipping.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lognormal {
    /// The mean; a value that is not above 0 stands for `min`.
    pub mean: f64,
    /// The standard deviation; 0 = every draw is the mean.
    pub deviation: f64,
    /// The least draw.
    pub min: f64,
    /// The greatest draw.
    pub max: f64,
}

impl Lognormal {
    /// A distribution by its mean and deviation, clipped to `min ..= max`.
    #[must_use]
    pub const fn new(mean: f64, deviation: f64, min: f64, max: f64) -> Self {
        Self { mean, deviation, min, max }
    }

    /// A draw between `min` and `max`; `min`, if the bounds or the mean make no sense.
    pub(super) fn draw(&self, rng: &mut Xoshiro256PlusPlus) -> f64 {
        let variance = (self.deviation / self.mean).powi(2).ln_1p();
        let drawn = (self.mean.ln() - variance / 2.0 + variance.sqrt() * normal(rng)).exp();
        // Not `clamp`, which panics on bounds in the wrong order. A mean below 0 makes `drawn` not a number, for which
        // no comparison holds.
        if drawn >= self.min && drawn <= self.max {
            drawn
        } else if drawn > self.max && self.max >= self.min {
            self.max
        } else {
            self.min
        }
    }

    /// A whole draw, at least 1 and at most `u32::MAX`.
    pub(super) fn draw_whole(&self, rng: &mut Xoshiro256PlusPlus) -> u32 {
        self.draw(rng).round().max(1.0) as u32
    }
}

/// A draw of the standard normal distribution (Box and Muller).
fn normal(rng: &mut Xoshiro256PlusPlus) -> f64 {
    let (radius, angle) = (1.0 - rng.random::<f64>(), rng.random::<f64>());
    (-2.0 * radius.ln()).sqrt() * (TAU * angle).cos()
}

/// The gap to the next arrival of a Poisson process, seconds; 0, if the mean is not above 0 and finite.
pub(super) fn gap_s(rng: &mut Xoshiro256PlusPlus, mean_gap_s: f64) -> f64 {
    if mean_gap_s > 0.0 && mean_gap_s.is_finite() { -mean_gap_s * (1.0 - rng.random::<f64>()).ln() } else { 0.0 }
}

/// Items whose popularity falls with their rank to the power of an exponent (Zipf).
pub(super) struct Popularity {
    /// By item: the summed weights of the items up to it.
    sums: Vec<f64>,
}

impl Popularity {
    /// At least one item. An exponent of 0 makes all items equally popular; one that is not finite counts as 0.
    pub(super) fn new(items: usize, exponent: f64) -> Self {
        let exponent = if exponent.is_finite() { exponent.max(0.0) } else { 0.0 };
        let mut sum = 0.0;
        let weights = (1..=items.max(1)).map(|rank| (rank as f64).powf(-exponent));
        Self {
            sums: weights
                .map(|weight| {
                    sum += weight;
                    sum
                })
                .collect(),
        }
    }

    pub(super) fn items(&self) -> usize {
        self.sums.len()
    }

    /// The place of an item, from 0.
    pub(super) fn draw(&self, rng: &mut Xoshiro256PlusPlus) -> usize {
        let at = rng.random::<f64>() * self.sums.last().copied().unwrap_or(0.0);
        self.sums.partition_point(|&sum| sum <= at).min(self.items() - 1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::SeedableRng;

    use super::*;

    fn mean(draws: u32, mut draw: impl FnMut(&mut Xoshiro256PlusPlus) -> f64) -> f64 {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(7);
        (0..draws).map(|_| draw(&mut rng)).sum::<f64>() / f64::from(draws)
    }

    #[test]
    fn the_mean_and_deviation_are_those_asked_for() {
        let wide = Lognormal::new(300.0, 150.0, 0.0, 1e9);
        let (first, second) = (mean(200_000, |rng| wide.draw(rng)), mean(200_000, |rng| wide.draw(rng).powi(2)));
        assert!((first - 300.0).abs() < 3.0, "{first}");
        assert!(((second - first * first).sqrt() - 150.0).abs() < 4.0, "{second}");
    }

    #[test]
    fn no_deviation_means_a_constant() {
        let constant = Lognormal::new(1000.0, 0.0, 1.0, 5000.0);
        assert!((0..9).all(|seed| constant.draw_whole(&mut Xoshiro256PlusPlus::seed_from_u64(seed)) == 1000));
    }

    #[test]
    fn gaps_have_the_mean_asked_for() {
        assert!((mean(200_000, |rng| gap_s(rng, 0.25)) - 0.25).abs() < 0.003);
        assert_eq!([0.0, -1.0, f64::NAN, f64::INFINITY].map(|gap| mean(9, |rng| gap_s(rng, gap))), [0.0; 4]);
    }

    #[test]
    fn popularity_falls_with_rank() {
        let popularity = Popularity::new(4, 1.0);
        let share = |item| mean(100_000, |rng| f64::from(u8::from(popularity.draw(rng) == item)));
        for (item, expected) in [0.48, 0.24, 0.16, 0.12].into_iter().enumerate() {
            assert!((share(item) - expected).abs() < 0.01);
        }
        assert_eq!(Popularity::new(0, f64::NAN).draw(&mut Xoshiro256PlusPlus::seed_from_u64(1)), 0);
    }

    proptest! {
        #[test]
        fn draws_stay_within_their_bounds(
            (mean, deviation, seed) in (any::<f64>(), any::<f64>(), any::<u64>()),
            (min, width) in (-1e9..1e9_f64, 0.0..1e9_f64),
        ) {
            let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
            let draw = Lognormal::new(mean, deviation, min, min + width).draw(&mut rng);
            prop_assert!((min..=min + width).contains(&draw), "{}", draw);
        }
    }
}
