//! Who is picked by the costs, and chance among equals.

use super::decision::Priced;
use super::draws::Drawing;
use super::mode::Pick;

/// Puts the chosen candidate first and the next `listed - 1` in ascending cost behind it; the rest is cut
/// off. Equal costs behind the first stand in table order. Returns how many shared the lowest cost.
pub(super) fn choose(candidates: &mut Vec<Priced>, listed: usize, pick: Pick, drawing: &mut Drawing) -> u32 {
    if candidates.is_empty() {
        return 0;
    }
    let order = |a: &Priced, b: &Priced| rank(pick, a).cmp(&rank(pick, b)).then(a.place.cmp(&b.place));
    let (lowest, ties) = lowest(candidates, pick, drawing);
    let chosen = match pick {
        Pick::Lowest | Pick::LowestThenIdlest => lowest,
        Pick::Sampled { temperature } => sampled(candidates, temperature, drawing).unwrap_or(lowest),
        Pick::BetterOfTwo => better_of_two(candidates, drawing),
    };
    candidates.swap(0, chosen);
    let rest = candidates.len() - 1;
    let listed_rest = listed.saturating_sub(1).min(rest);
    if listed_rest <= INSERTED_MAX {
        insert_lowest(&mut candidates[1..], listed_rest, pick);
    } else if listed_rest < rest {
        candidates[1..].select_nth_unstable_by(listed_rest, order);
    }
    candidates.truncate(1 + listed_rest);
    if listed_rest > INSERTED_MAX {
        candidates[1..].sort_unstable_by(order);
    }
    ties
}

/// So many of the lowest are found by going through all once; more by sorting.
const INSERTED_MAX: usize = 16;

/// Puts the `count` lowest first, in order; what becomes of the others does not matter.
fn insert_lowest(candidates: &mut [Priced], count: usize, pick: Pick) {
    let key = |priced: &Priced| (rank(pick, priced), priced.place);
    let Some(last) = count.checked_sub(1) else { return };
    // Of the highest that is held, once so many are; most of the others are higher still.
    let mut bound = None;
    for at in 0..candidates.len() {
        let (candidate, found) = (candidates[at], key(&candidates[at]));
        if bound.is_some_and(|bound| found >= bound) {
            continue;
        }
        let mut place = at.min(last);
        while place > 0 && found < key(&candidates[place - 1]) {
            candidates[place] = candidates[place - 1];
            place -= 1;
        }
        candidates[place] = candidate;
        if at >= last {
            bound = Some(key(&candidates[last]));
        }
    }
}

/// A number for what decides: the lower, the earlier.
#[inline]
fn rank(pick: Pick, priced: &Priced) -> (i64, i64) {
    match pick {
        Pick::LowestThenIdlest => (ordinal(priced.cost), ordinal(priced.active_requests)),
        _ => (ordinal(priced.cost), 0),
    }
}

/// A whole number in the order of [`f64::total_cmp`].
#[inline]
const fn ordinal(value: f64) -> i64 {
    let bits = value.to_bits() as i64;
    bits ^ (((bits >> 63) as u64) >> 1) as i64
}

/// The place of the lowest, each of equals as likely as the others, and how many they are.
fn lowest(candidates: &[Priced], pick: Pick, drawing: &mut Drawing) -> (usize, u32) {
    // Reservoir of one: the n-th equal replaces the choice with probability 1/n.
    let (mut chosen, mut ties, mut least) = (0, 0, (i64::MAX, i64::MAX));
    for (place, priced) in candidates.iter().enumerate() {
        let rank = rank(pick, priced);
        if rank > least {
            continue;
        }
        ties = if rank == least { ties + 1 } else { 1 };
        if ties == 1 || drawing.below(ties) == 0 {
            (chosen, least) = (place, rank);
        }
    }
    (chosen, ties as u32)
}

/// One by one is drawn with a probability proportional to e to the power of -(how far its cost is from the lowest, as
/// a share of how far the highest is) / temperature. `None` where all are equal: then any of the lowest is as good.
fn sampled(candidates: &[Priced], temperature: f64, drawing: &mut Drawing) -> Option<usize> {
    // What costs infinitely much is never drawn as long as something does not.
    let costs = || candidates.iter().map(|priced| priced.cost).filter(|cost| cost.is_finite());
    let (low, high) = costs().fold((f64::MAX, f64::MIN), |(low, high), cost| (low.min(cost), high.max(cost)));
    // Costs may be so far apart that their difference is no number: then all are scaled.
    let scale = if (high - low).is_finite() { 1.0 } else { low.abs().max(high.abs()) };
    let step = (high / scale - low / scale) * temperature;
    if step.is_nan() || step <= 0.0 {
        return None;
    }
    let weight = |priced: &Priced| match priced.cost {
        cost if cost.is_finite() => libm::exp(-((cost / scale - low / scale) / step)),
        _ => 0.0,
    };
    let sum: f64 = candidates.iter().map(weight).sum();
    let drawn = drawing.unit();
    let mut cumulated = 0.0;
    let mut last = None;
    for (place, priced) in candidates.iter().enumerate().filter(|(_, priced)| priced.cost.is_finite()) {
        cumulated += weight(priced) / sum;
        if drawn <= cumulated {
            return Some(place);
        }
        last = Some(place);
    }
    last
}

/// Two different places are drawn; the lower of them, of equals the first drawn.
fn better_of_two(candidates: &[Priced], drawing: &mut Drawing) -> usize {
    let first = drawing.below(candidates.len());
    if candidates.len() == 1 {
        return first;
    }
    let second = drawing.below(candidates.len() - 1);
    let second = second + usize::from(second >= first);
    if candidates[second].cost < candidates[first].cost { second } else { first }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::Draws;

    fn priced(costs: &[f64]) -> Vec<Priced> {
        let one = |(place, cost): (u32, &f64)| Priced { place, cost: *cost, active_requests: 0.0 };
        (0..).zip(costs).map(one).collect()
    }

    fn order(candidates: &[Priced]) -> Vec<u32> {
        candidates.iter().map(|priced| priced.place).collect()
    }

    #[test]
    fn the_lowest_comes_first_and_the_rest_by_cost() {
        let mut drawing = Draws::new(1).begin();
        let mut candidates = priced(&[3.0, 1.0, 2.0, 0.5]);
        assert_eq!(choose(&mut candidates, 8, Pick::Lowest, &mut drawing), 1);
        assert_eq!(order(&candidates), [3, 1, 2, 0]);
        let mut candidates = priced(&[3.0, 1.0, 2.0, 0.5]);
        choose(&mut candidates, 2, Pick::Lowest, &mut drawing);
        assert_eq!(order(&candidates), [3, 1]);
        let mut candidates = priced(&[3.0, 1.0]);
        choose(&mut candidates, 0, Pick::Lowest, &mut drawing);
        assert_eq!(order(&candidates), [1], "the chosen one is always listed");
        assert_eq!(choose(&mut Vec::new(), 8, Pick::Lowest, &mut drawing), 0);
    }

    #[test]
    fn few_and_many_are_listed_in_the_same_order() {
        let mut drawing = Draws::new(5).begin();
        for count in 1..60 {
            let costs: Vec<f64> = (0..count).map(|_| drawing.below(20) as f64).collect();
            let mut all = priced(&costs);
            choose(&mut all, usize::MAX, Pick::Lowest, &mut Draws::new(1).begin());
            for listed in 0..count + 2 {
                let mut some = priced(&costs);
                choose(&mut some, listed, Pick::Lowest, &mut Draws::new(1).begin());
                assert_eq!(some, all[..listed.clamp(1, count)], "{listed} of {costs:?}");
            }
        }
    }

    #[test]
    fn equals_are_chosen_uniformly_and_by_seed() {
        let draw = |seed| {
            let mut drawing = Draws::new(seed).begin();
            let mut counts = [0_u32; 4];
            for _ in 0..9000 {
                let mut candidates = priced(&[1.0, 2.0, 1.0, 1.0]);
                assert_eq!(choose(&mut candidates, 1, Pick::Lowest, &mut drawing), 3);
                counts[candidates[0].place as usize] += 1;
            }
            counts
        };
        let counts = draw(7);
        assert_eq!(counts[1], 0);
        for place in [0, 2, 3] {
            assert!((2700..3300).contains(&counts[place]), "{counts:?}");
        }
        assert_eq!(counts, draw(7));
        assert_ne!(counts, draw(8));
    }

    /// How often each of `costs` is chosen of 30,000 times, one seed after the other.
    fn counts<const N: usize>(costs: [f64; N], pick: Pick) -> [f64; N] {
        let mut counts = [0.0; N];
        for seed in 0..30_000 {
            let mut candidates = priced(&costs);
            choose(&mut candidates, N, pick, &mut Draws::new(seed).begin());
            counts[candidates[0].place as usize] += 1.0 / 30_000.0;
        }
        counts
    }

    #[test]
    fn a_temperature_gives_every_candidate_its_chance() {
        for (temperature, expected) in [(0.5, [0.0707, 0.5224, 0.4069]), (1.0, [0.1635, 0.4444, 0.3922])] {
            let counts = counts([18.0, 10.0, 11.0], Pick::Sampled { temperature });
            for (count, expected) in counts.into_iter().zip(expected) {
                assert!((count - expected).abs() < 0.01, "{temperature}: {counts:?}");
            }
        }
        let cold = counts([18.0, 10.0, 11.0], Pick::Sampled { temperature: 1e-300 });
        assert!(cold[1] > 0.999, "{cold:?}");
        let equal = counts([5.0; 4], Pick::Sampled { temperature: 0.3 });
        assert!(equal.iter().all(|count| (count - 0.25).abs() < 0.01), "{equal:?}");
    }

    #[test]
    fn costs_at_the_end_of_numbers_are_chosen_among_too() {
        let huge = counts([f64::MAX, -f64::MAX, 0.0], Pick::Sampled { temperature: 1.0 });
        let (half, sum) = ((-0.5_f64).exp(), 1.0 + (-0.5_f64).exp() + (-1.0_f64).exp());
        for (count, expected) in huge.into_iter().zip([(-1.0_f64).exp() / sum, 1.0 / sum, half / sum]) {
            assert!((count - expected).abs() < 0.01, "{huge:?}");
        }
        let infinite = counts([f64::INFINITY, 1.0, 2.0], Pick::Sampled { temperature: 1.0 });
        assert!(infinite[0] == 0.0 && infinite[1] > infinite[2] && infinite[2] > 0.0, "{infinite:?}");
        let all = counts([f64::INFINITY; 2], Pick::Sampled { temperature: 1.0 });
        assert!(all.iter().all(|count| (count - 0.5).abs() < 0.01), "{all:?}");
    }

    #[test]
    fn the_better_of_two_is_never_the_worst() {
        let counts = counts([3.0, 1.0, 2.0, 1.0], Pick::BetterOfTwo);
        assert_eq!(counts[0], 0.0);
        // Of six pairs two hold the third beside the first alone; equals go to whom was drawn first.
        for (place, expected) in [(1, 5.0 / 12.0), (2, 1.0 / 6.0), (3, 5.0 / 12.0)] {
            assert!((counts[place] - expected).abs() < 0.01, "{counts:?}");
        }
        assert_eq!(
            self::counts([7.0], Pick::BetterOfTwo),
            [1.0].map(|one: f64| self::counts([7.0], Pick::Lowest)[0] * one)
        );
    }

    #[test]
    fn of_equal_pools_the_idlest_worker_is_taken() {
        let mut candidates = priced(&[1.0, 1.0, 1.0, 0.5]);
        candidates[3].cost = 1.0;
        for (priced, requests) in candidates.iter_mut().zip([4.0, 2.0, 3.0, 9.0]) {
            priced.active_requests = requests;
        }
        assert_eq!(choose(&mut candidates, 3, Pick::LowestThenIdlest, &mut Draws::new(1).begin()), 1);
        assert_eq!(order(&candidates), [1, 2, 0]);
    }
}
