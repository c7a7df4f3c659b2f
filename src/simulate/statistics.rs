//! Medians over seeds, and how sure they are: paired differences and bootstrap intervals.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// Resamples of a bootstrap. With them, an end of a 95 % interval rests on the 50 most extreme ones.
const RESAMPLES: usize = 2000;

/// A value and the interval that holds it with a confidence of 95 %.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The median.
    pub median: f64,
    /// The 2.5th percentile of the resampled medians.
    pub low: f64,
    /// The 97.5th percentile of the resampled medians.
    pub high: f64,
}

/// The median; of an even number of values, the mean of the two in the middle. Values that are not numbers are left
/// out. NaN if none is left.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|value| !value.is_nan()).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    middle(&sorted)
}

fn middle(sorted: &[f64]) -> f64 {
    let half = sorted.len() / 2;
    match (sorted.get(half), sorted.len() % 2, half.checked_sub(1).and_then(|below| sorted.get(below))) {
        (Some(value), 1, _) => *value,
        (Some(above), _, Some(below)) => f64::midpoint(*above, *below),
        _ => f64::NAN,
    }
}

/// By seed: `ours / theirs`. Seeds that only one of the two has, and those in which a value is not a number or theirs is
/// 0, are left out. Both are sorted by seed.
#[must_use]
pub fn paired_ratios(ours: &[(u64, f64)], theirs: &[(u64, f64)]) -> Vec<f64> {
    paired(ours, theirs, |ours, theirs| ours / theirs)
}

/// By seed: `ours − theirs`, in the unit of the values. Seeds are matched as in [`paired_ratios`].
#[must_use]
pub fn paired_differences(ours: &[(u64, f64)], theirs: &[(u64, f64)]) -> Vec<f64> {
    paired(ours, theirs, |ours, theirs| ours - theirs)
}

fn paired(ours: &[(u64, f64)], theirs: &[(u64, f64)], compare: fn(f64, f64) -> f64) -> Vec<f64> {
    let of_seed = |seed: u64| theirs.iter().find(|(theirs, _)| *theirs == seed);
    let pairs = ours.iter().filter_map(|(seed, ours)| of_seed(*seed).map(|(_, theirs)| compare(*ours, *theirs)));
    pairs.filter(|compared| compared.is_finite()).collect()
}

/// The median of `values` and its 95 % interval by the percentile bootstrap, the same for the same `seed`. With fewer
/// than 2 values, the interval is the median.
#[must_use]
pub fn bootstrap(values: &[f64], seed: u64) -> Interval {
    let values: Vec<f64> = values.iter().copied().filter(|value| !value.is_nan()).collect();
    let median = median(&values);
    if values.len() < 2 {
        return Interval { median, low: median, high: median };
    }
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut drawn = vec![0.0; values.len()];
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            for drawn in &mut drawn {
                *drawn = values[rng.random_range(0..values.len())];
            }
            drawn.sort_unstable_by(f64::total_cmp);
            middle(&drawn)
        })
        .collect();
    medians.sort_unstable_by(f64::total_cmp);
    Interval { median, low: medians[RESAMPLES / 40], high: medians[RESAMPLES - 1 - RESAMPLES / 40] }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::RngExt;

    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_between_the_middle_two() {
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[9.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[f64::NAN, 7.0]), 7.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn seeds_of_one_side_only_are_left_out() {
        let (ours, theirs) = ([(1, 3.0), (2, 8.0), (4, 1.0)], [(2, 4.0), (1, 2.0), (3, 9.0), (4, 0.0)]);
        assert_eq!(paired_ratios(&ours, &theirs), [1.5, 2.0]);
        assert_eq!(paired_differences(&ours, &theirs), [1.0, 4.0, 1.0]);
    }

    #[test]
    fn the_interval_holds_the_true_median_about_19_times_of_20() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(5);
        let holds = (0..200).filter(|seed| {
            let values: Vec<f64> = (0..20).map(|_| rng.random::<f64>()).collect();
            let interval = bootstrap(&values, *seed);
            (interval.low..=interval.high).contains(&0.5)
        });
        let holds = holds.count();
        assert!((180..=199).contains(&holds), "{holds}");
    }

    #[test]
    fn the_interval_is_the_same_for_a_seed() {
        let values = [1.0, 2.0, 5.0, 9.0, 4.0];
        assert_eq!(bootstrap(&values, 3), bootstrap(&values, 3));
        assert_eq!(bootstrap(&[2.0], 1), Interval { median: 2.0, low: 2.0, high: 2.0 });
    }

    proptest! {
        #[test]
        fn the_median_lies_within_its_interval(values in prop::collection::vec(-1e6..1e6_f64, 1..30), seed: u64) {
            let Interval { median, low, high } = bootstrap(&values, seed);
            prop_assert!(low <= median && median <= high);
        }
    }
}
