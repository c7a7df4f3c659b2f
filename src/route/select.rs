//! Selection by cost, and the seeded random draws that it uses.

use fearless_simd::prelude::*;
use fearless_simd::{f64x8, i64x8, u64x8};
use rand::Rng;
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::SeedableRng;

use super::decision::CandidateCost;
use super::policy::Pick;
use crate::ids::Worker;

/// Costs in a register: as many are compared at once, and as many candidates are listed in one.
const REGISTER_COSTS: usize = 8;

/// Up to this many candidates are listed in one pass, if nothing but the cost decides; else they are sorted.
const INSERTED_MAX: usize = 2 * REGISTER_COSTS;

/// What some ways of picking depend on besides the costs, by place.
pub(super) struct PlaceFacts<R, W, F> {
    /// Requests in flight.
    pub(super) requests: R,
    /// The worker.
    pub(super) worker: W,
    /// The predicted seconds to the first token.
    pub(super) first_token_s: F,
}

/// A first token comes about as early if it comes at most this share of the near costs later.
const PROMISE_SHARE: f64 = 1.0 / 16.0;

/// Selects among places with these `costs`. Overwrites `chosen` with the selected place and the next `listed - 1` by
/// ascending cost; equal costs are in order of their places. Returns the number of places with the lowest cost.
#[inline(always)]
pub(super) fn choose<S: Simd>(
    simd: S,
    costs: &[f64],
    places: PlaceFacts<impl Fn(usize) -> f64, impl Fn(usize) -> Worker, impl Fn(usize) -> f64>,
    listed: usize,
    pick: Pick,
    drawing: &mut Drawing,
    chosen: &mut Vec<CandidateCost>,
) -> u32 {
    chosen.clear();
    if costs.is_empty() {
        return 0;
    }
    let priced = |place: usize| {
        let active_requests = if pick == Pick::LowestThenIdlest { (places.requests)(place) } else { 0.0 };
        CandidateCost { place: place as u32, cost: costs[place], active_requests }
    };
    let listed = listed.clamp(1, costs.len());
    let is_inserted = listed <= INSERTED_MAX && pick != Pick::LowestThenIdlest;
    let (lowest, ties) = match pick {
        Pick::LowestThenIdlest => {
            let mut drawn = Drawn::new(rank(&priced(0)));
            (0..costs.len()).for_each(|place| drawn.meet(rank(&priced(place)), place, drawing));
            (drawn.place, drawn.ties as u32)
        }
        _ if !is_inserted => list_lowest::<S, 1>(simd, costs, 1, drawing, chosen),
        _ if listed <= REGISTER_COSTS => list_lowest::<S, 1>(simd, costs, listed, drawing, chosen),
        _ => list_lowest::<S, 2>(simd, costs, listed, drawing, chosen),
    };
    let first = match pick {
        Pick::Lowest | Pick::LowestThenIdlest => lowest,
        Pick::Sampled { temperature } => sampled(costs, temperature, drawing).unwrap_or(lowest),
        Pick::BetterOfTwo => better_of_two(costs, drawing),
        Pick::OwnOrder { near_cost_s, router_id } => {
            first_of_near(costs, (places.worker, places.first_token_s), lowest, near_cost_s, router_id)
        }
    };
    if !is_inserted {
        chosen.clear();
        chosen.extend((0..costs.len()).map(priced));
        if listed < costs.len() {
            chosen.select_nth_unstable_by_key(listed, key);
            chosen.truncate(listed);
        }
        chosen.sort_unstable_by_key(key);
    }
    // Moves the selected place to the front. If it is not among the lowest, it replaces the highest of them.
    let at = chosen.iter().position(|priced| priced.place as usize == first).unwrap_or(listed - 1);
    chosen[..=at].rotate_right(1);
    chosen[0] = priced(first);
    ties
}

/// One of the lowest costs, each equally likely, and their number. Overwrites `chosen` with the `listed` lowest, which
/// have room in `R` registers, in order.
#[inline(always)]
fn list_lowest<S: Simd, const R: usize>(
    simd: S,
    costs: &[f64],
    listed: usize,
    drawing: &mut Drawing,
    chosen: &mut Vec<CandidateCost>,
) -> (usize, u32) {
    let (mut lowest, mut drawn) = (Lowest::<S, R>::new(simd), Drawn::new(ordinal(costs[0])));
    // No comparison with NaN holds: until the list is full, each cost is listed.
    let mut highest = f64::NAN;
    for (stride, of_stride) in costs.chunks(REGISTER_COSTS).enumerate() {
        // A cost as high as the highest listed one comes behind it, and is met only if it is the lowest, too. Many idle workers
        // have one cost. The highest listed one only falls within the stride, so that nothing is skipped too much.
        let to_list = below(simd, of_stride, highest);
        let mut to_meet = to_list | at_most(simd, of_stride, costs[drawn.place]);
        if to_meet == 0 {
            continue;
        }
        while to_meet != 0 {
            let at = to_meet.trailing_zeros() as usize;
            to_meet &= to_meet - 1;
            let (key, place) = (ordinal(of_stride[at]), stride * REGISTER_COSTS + at);
            if to_list >> at & 1 != 0 {
                lowest.insert(simd, key, place);
            }
            drawn.meet(key, place, drawing);
        }
        if stride * REGISTER_COSTS + of_stride.len() >= listed {
            highest = costs[lowest.place(listed - 1)];
        }
    }
    chosen.extend((0..listed).map(|at| {
        let place = lowest.place(at);
        CandidateCost { place: place as u32, cost: costs[place], active_requests: 0.0 }
    }));
    (drawn.place, drawn.ties as u32)
}

/// One bit for each of at most [`REGISTER_COSTS`] costs, set if the cost may have a key below that of `bound`. Other bits
/// may be set, too: all of them if the bound is NaN, and those of costs that are NaN.
#[inline(always)]
fn below<S: Simd>(simd: S, costs: &[f64], bound: f64) -> u64 {
    // The two zeros are equal, but their keys are not: both are below a bound of zero.
    let bound = if bound == 0.0 { bound.next_up() } else { bound };
    let not_below = match costs.as_array::<REGISTER_COSTS>() {
        Some(costs) => f64x8::from_slice(simd, costs).simd_ge(bound).to_bitmask(),
        None => bits(costs, |cost| cost >= bound),
    };
    !not_below & ((1 << costs.len()) - 1)
}

/// One bit for each of at most [`REGISTER_COSTS`] costs, set if the cost is a number and at most `bound`.
#[inline(always)]
fn at_most<S: Simd>(simd: S, costs: &[f64], bound: f64) -> u64 {
    match costs.as_array::<REGISTER_COSTS>() {
        Some(costs) => f64x8::from_slice(simd, costs).simd_le(bound).to_bitmask(),
        None => bits(costs, |cost| cost <= bound),
    }
}

/// One bit for each of at most [`REGISTER_COSTS`] costs.
#[inline(always)]
fn bits(costs: &[f64], is_set: impl Fn(f64) -> bool) -> u64 {
    costs.iter().enumerate().fold(0, |bits, (at, cost)| bits | u64::from(is_set(*cost)) << at)
}

/// The places with the lowest keys, in order. Every insertion runs the same instructions: where the place belongs is as
/// good as random, so that a branch on it would often be predicted wrongly.
struct Lowest<S: Simd, const R: usize> {
    /// Lanes without a place have the highest number.
    keys: [i64x8<S>; R],
    places: [u64x8<S>; R],
}

impl<S: Simd, const R: usize> Lowest<S, R> {
    #[inline(always)]
    fn new(simd: S) -> Self {
        Self { keys: [i64x8::splat(simd, i64::MAX); R], places: [u64x8::splat(simd, 0); R] }
    }

    /// The place with the `nth` lowest key, from 0.
    #[inline(always)]
    fn place(&self, nth: usize) -> usize {
        self.places[nth / REGISTER_COSTS].as_slice()[nth % REGISTER_COSTS] as usize
    }

    /// Inserts a place behind those with a key that is not higher. If there is no room, the highest drops out.
    #[inline(always)]
    fn insert(&mut self, simd: S, key: i64, place: usize) {
        // No number that is computed is the NaN with this key.
        let (key, place) = (i64x8::splat(simd, key.min(i64::MAX - 1)), u64x8::splat(simd, place as u64));
        for at in (0..R).rev() {
            let (lower_keys, lower_places) =
                if at == 0 { (key, place) } else { (self.keys[at - 1], self.places[at - 1]) };
            let (keys, places) = (self.keys[at], self.places[at]);
            // Each lane with the one before it: it stays, takes the new one, or takes what was before it.
            let keys_before = lower_keys.slide::<{ REGISTER_COSTS - 1 }>(keys);
            let places_before = lower_places.slide::<{ REGISTER_COSTS - 1 }>(places);
            let moved = keys_before.simd_le(key).select(place, places_before);
            let stays = keys.simd_le(key);
            self.keys[at] = stays.select(keys, keys_before.max(key));
            self.places[at] = stays.select(places, moved);
        }
    }
}

/// One of the places with the lowest key so far, each equally likely.
struct Drawn<K> {
    key: K,
    place: usize,
    /// Places with that key.
    ties: usize,
}

impl<K: Copy + Ord> Drawn<K> {
    /// Before the first place, which has the key `first`.
    fn new(first: K) -> Self {
        Self { key: first, place: 0, ties: 0 }
    }

    /// Places come in ascending order.
    #[inline(always)]
    fn meet(&mut self, key: K, place: usize, drawing: &mut Drawing) {
        if key > self.key {
            return;
        }
        // Reservoir of one: the n-th equal replaces the choice with probability 1/n.
        self.ties = if key == self.key { self.ties + 1 } else { 1 };
        if self.ties == 1 || drawing.below(self.ties) == 0 {
            (self.key, self.place) = (key, place);
        }
    }
}

/// Sort key of the listed candidates.
fn key(priced: &CandidateCost) -> ((i64, i64), u32) {
    (rank(priced), priced.place)
}

/// Sort key of a cost: the lower, the earlier.
#[inline]
fn rank(priced: &CandidateCost) -> (i64, i64) {
    (ordinal(priced.cost), ordinal(priced.active_requests))
}

/// A whole number in the order of [`f64::total_cmp`].
#[inline]
const fn ordinal(value: f64) -> i64 {
    let bits = value.to_bits() as i64;
    bits ^ (((bits >> 63) as u64) >> 1) as i64
}

/// Draws a place with a probability proportional to exp(-d / temperature), where d is the distance of its cost from the
/// lowest as a share of the range. `None` if all costs are equal.
fn sampled(costs: &[f64], temperature: f64, drawing: &mut Drawing) -> Option<usize> {
    // An infinite cost is never drawn while a finite one exists.
    let finite = || costs.iter().enumerate().filter(|(_, cost)| cost.is_finite());
    let (low, high) = finite().fold((f64::MAX, f64::MIN), |(low, high), (_, cost)| (low.min(*cost), high.max(*cost)));
    // Costs can be so far apart that their difference is infinite; then all are scaled.
    let scale = if (high - low).is_finite() { 1.0 } else { low.abs().max(high.abs()) };
    let step = (high / scale - low / scale) * temperature;
    if step.is_nan() || step <= 0.0 {
        return None;
    }
    let weight = |cost: f64| libm::exp(-((cost / scale - low / scale) / step));
    let sum: f64 = finite().map(|(_, cost)| weight(*cost)).sum();
    let drawn = drawing.unit();
    let mut cumulated = 0.0;
    let mut last = None;
    for (place, cost) in finite() {
        cumulated += weight(*cost) / sum;
        if drawn <= cumulated {
            return Some(place);
        }
        last = Some(place);
    }
    last
}

/// Draws two different places and returns the cheaper, of equals the first.
fn better_of_two(costs: &[f64], drawing: &mut Drawing) -> usize {
    let first = drawing.below(costs.len());
    if costs.len() == 1 {
        return first;
    }
    let second = drawing.below(costs.len() - 1);
    let second = second + usize::from(second >= first);
    if costs[second] < costs[first] { second } else { first }
}

/// Of the places whose cost is at most `near_cost_s` above that of `lowest`, and whose first token comes about as early,
/// the one whose worker is first in the order of the router.
///
/// Routers that do not know of each other's last bookings see the same lowest cost. With orders of their own they choose
/// different workers. One order also keeps workers that are last in it nearly idle, where a long prompt delays no other
/// request.
#[inline(always)]
fn first_of_near(
    costs: &[f64],
    (worker, first_token_s): (impl Fn(usize) -> Worker, impl Fn(usize) -> f64),
    lowest: usize,
    near_cost_s: f64,
    router_id: u64,
) -> usize {
    let latest_s = first_token_s(lowest) + PROMISE_SHARE * near_cost_s;
    let (near_max, own) = (costs[lowest] + near_cost_s, drawn(router_id));
    let mut first = None;
    for (place, cost) in costs.iter().enumerate() {
        if *cost <= near_max {
            let order = Some((order_of(own, worker(place)), place));
            // To predict the first token takes longer than to find the order: only a worker that would be first is asked.
            if order > first && first_token_s(place) <= latest_s {
                first = order;
            }
        }
    }
    first.map_or(lowest, |(_, place)| place)
}

/// A worker's place in the order of a router, given the number drawn from the router's id: the highest comes first. The same
/// on every machine and in every release.
fn order_of(own: u64, worker: Worker) -> u64 {
    drawn(drawn(own ^ worker.id.0) ^ u64::from(worker.rank.0))
}

fn drawn(seed: u64) -> u64 {
    SplitMix64::seed_from_u64(seed).next_u64()
}

/// The seed of a decision. All random draws of the decision follow from it, on every machine and in every later
/// release.
///
/// The generator is SplitMix64, and the mapping of its numbers is written here, so that neither changes with a crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draws {
    seed: u64,
}

impl Draws {
    /// The draws that follow from `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// The seed.
    #[must_use]
    pub const fn seed(self) -> u64 {
        self.seed
    }

    /// Starts at the first draw.
    pub(super) fn begin(self) -> Drawing {
        Drawing(SplitMix64::seed_from_u64(self.seed))
    }
}

/// The draws of a decision in progress.
#[derive(Clone, Debug)]
pub(super) struct Drawing(SplitMix64);

impl Drawing {
    /// A number below `bound`, uniform up to one part in 2⁵⁰; 0 if `bound` is 0.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.0.next_u64()) * bound as u128) >> 64) as usize
    }

    /// A number in [0, 1).
    pub(super) fn unit(&mut self) -> f64 {
        // 53 bits are exact in an `f64`, so the result is the same everywhere.
        (self.0.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use fearless_simd::{Level, dispatch};

    use super::*;
    use crate::route::Draws;
    use crate::route::judge::levels;

    /// Candidates and ties, the same by every kind of instructions that this processor has.
    fn chosen(costs: &[f64], listed: usize, pick: Pick, drawing: &mut Drawing) -> (Vec<u32>, u32) {
        let begun = drawing.clone();
        let mut by_level = levels().into_iter().map(|level| {
            *drawing = begun.clone();
            let mut chosen = Vec::new();
            let worker = |place| Worker::new(place as u64, 0);
            let places = PlaceFacts { requests: |_| 0.0, worker, first_token_s: |_| 0.0 };
            let ties = dispatch!(level, simd => choose(simd, costs, places, listed, pick, drawing, &mut chosen));
            assert!(chosen.iter().all(|priced| priced.cost.to_bits() == costs[priced.place as usize].to_bits()));
            (chosen.iter().map(|priced| priced.place).collect(), ties)
        });
        let first = by_level.next().expect("a baseline");
        assert!(by_level.all(|other| other == first), "{listed} of {costs:?}");
        first
    }

    #[test]
    fn the_lowest_comes_first_and_the_rest_by_cost() {
        let mut drawing = Draws::new(1).begin();
        let mut chosen = |costs: &[f64], listed| chosen(costs, listed, Pick::Lowest, &mut drawing);
        assert_eq!(chosen(&[3.0, 1.0, 2.0, 0.5], 8), (vec![3, 1, 2, 0], 1));
        assert_eq!(chosen(&[3.0, 1.0, 2.0, 0.5], 2), (vec![3, 1], 1));
        assert_eq!(chosen(&[3.0, 1.0], 0), (vec![1], 1), "the chosen one is always listed");
        assert_eq!(chosen(&[], 8), (vec![], 0));
    }

    #[test]
    fn few_and_many_are_listed_in_the_same_order() {
        let mut drawing = Draws::new(5).begin();
        for count in 1..60 {
            let costs: Vec<f64> = (0..count).map(|_| drawing.below(20) as f64).collect();
            for pick in [Pick::Lowest, Pick::BetterOfTwo, Pick::Sampled { temperature: 2.0 }] {
                let (all, ties) = chosen(&costs, usize::MAX, pick, &mut Draws::new(1).begin());
                let mut behind: Vec<u32> = (0..count as u32).filter(|place| *place != all[0]).collect();
                behind.sort_by(|a, b| costs[*a as usize].total_cmp(&costs[*b as usize]));
                assert_eq!(all[1..], behind);
                for listed in 0..count + 2 {
                    let some = chosen(&costs, listed, pick, &mut Draws::new(1).begin());
                    assert_eq!(some, (all[..listed.clamp(1, count)].to_vec(), ties), "{listed} of {costs:?}");
                }
            }
        }
    }

    #[test]
    fn of_many_equal_costs_the_first_are_listed_and_all_are_drawn_from() {
        // One worker is cheaper than the many idle ones, or none is.
        for cheaper in [Some(40), None] {
            let costs: Vec<f64> = (0..100).map(|place| if cheaper == Some(place) { 1.0 } else { 3.0 }).collect();
            let mut drawn = std::collections::BTreeSet::new();
            for seed in 0..400 {
                let (order, ties) = chosen(&costs, 5, Pick::Lowest, &mut Draws::new(seed).begin());
                let expected: Vec<u32> = (0..100).filter(|place| *place != order[0]).take(4).collect();
                assert_eq!((&order[1..], ties), (&expected[..], if cheaper.is_some() { 1 } else { 100 }));
                drawn.insert(order[0]);
            }
            assert!(if cheaper.is_some() { drawn.iter().eq(&[40]) } else { drawn.len() > 90 }, "{drawn:?}");
        }
    }

    #[test]
    fn a_negative_zero_is_listed_before_the_zeros_that_fill_the_list() {
        // The second stride is whole, or has three costs.
        for second in [vec![1.0, -0.0, 1.0, 1.0, -0.0, 1.0, 1.0, 1.0], vec![-0.0, 1.0, -0.0]] {
            let costs = [vec![0.0; 8], second].concat();
            let (order, ties) = chosen(&costs, 8, Pick::Lowest, &mut Draws::new(1).begin());
            let negative = |place: &u32| costs[*place as usize].is_sign_negative();
            assert!(order[..2].iter().all(negative) && !order[2..].iter().any(negative), "{order:?} of {costs:?}");
            assert_eq!((ties, &order[2..]), (2, &[0, 1, 2, 3, 4, 5][..]));
        }
    }

    #[test]
    fn infinite_and_nan_costs_are_ordered_too() {
        let costs = [f64::NAN, f64::INFINITY, 0.0, -f64::NAN, -0.0, f64::NEG_INFINITY, 1.0];
        let many: Vec<f64> = costs.iter().copied().cycle().take(70).collect();
        for listed in 1..=INSERTED_MAX {
            let (order, ties) = chosen(&many, listed, Pick::Lowest, &mut Draws::new(1).begin());
            assert_eq!((order[0] % 7, ties), (3, 10), "the lowest is what is less than no number");
            let mut expected: Vec<u32> = (0..70).filter(|place| *place != order[0]).collect();
            expected.sort_by(|a, b| many[*a as usize].total_cmp(&many[*b as usize]));
            assert_eq!(order[1..], expected[..listed - 1]);
        }
    }

    #[test]
    fn equals_are_chosen_uniformly_and_by_seed() {
        let draw = |seed| {
            let mut drawing = Draws::new(seed).begin();
            let mut counts = [0_u32; 4];
            for _ in 0..9000 {
                let (order, ties) = chosen(&[1.0, 2.0, 1.0, 1.0], 1, Pick::Lowest, &mut drawing);
                assert_eq!(ties, 3);
                counts[order[0] as usize] += 1;
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

    /// How often each cost is selected in 30,000 draws with consecutive seeds.
    fn counts<const N: usize>(costs: [f64; N], pick: Pick) -> [f64; N] {
        let mut counts = [0.0; N];
        for seed in 0..30_000 {
            let (order, _) = chosen(&costs, N, pick, &mut Draws::new(seed).begin());
            counts[order[0] as usize] += 1.0 / 30_000.0;
        }
        counts
    }

    #[test]
    fn temperature_draws_by_the_published_formula() {
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
    fn extreme_costs_are_drawn_without_overflow() {
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
        // Two of the six pairs hold only the third place beside the worst; of equals the first drawn wins.
        for (place, expected) in [(1, 5.0 / 12.0), (2, 1.0 / 6.0), (3, 5.0 / 12.0)] {
            assert!((counts[place] - expected).abs() < 0.01, "{counts:?}");
        }
        assert_eq!(
            self::counts([7.0], Pick::BetterOfTwo),
            [1.0].map(|one: f64| self::counts([7.0], Pick::Lowest)[0] * one)
        );
    }

    #[test]
    fn equal_pools_are_decided_by_requests_in_flight() {
        let requests = |place: usize| [4.0, 2.0, 3.0, 9.0][place];
        let places = PlaceFacts { requests, worker: |_| Worker::default(), first_token_s: |_| 0.0 };
        let mut chosen = Vec::new();
        let drawing = &mut Draws::new(1).begin();
        let level = Level::new();
        let pick = Pick::LowestThenIdlest;
        let ties = dispatch!(level, simd => choose(simd, &[1.0; 4], places, 3, pick, drawing, &mut chosen));
        assert_eq!(ties, 1);
        assert_eq!(chosen.iter().map(|priced| priced.place).collect::<Vec<_>>(), [1, 2, 0]);
    }

    /// The place that a router chooses among workers with these costs and times to the first token.
    fn by_own_order(costs: &[f64], first_token_s: &[f64], router_id: u64) -> usize {
        let worker = |place: usize| Worker::new(place as u64 + 1, 0);
        let places = PlaceFacts { requests: |_| 0.0, worker, first_token_s: |place: usize| first_token_s[place] };
        let mut chosen = Vec::new();
        let pick = Pick::OwnOrder { near_cost_s: 0.5, router_id };
        let (level, drawing) = (Level::new(), &mut Draws::new(3).begin());
        dispatch!(level, simd => choose(simd, costs, places, 1, pick, drawing, &mut chosen));
        chosen[0].place as usize
    }

    #[test]
    fn routers_choose_different_workers_among_near_costs() {
        let costs: Vec<f64> = (0..16).map(|place| 1.0 + f64::from(place) * 0.025).collect();
        let mut counts = [0; 16];
        for router_id in 0..3200 {
            let place = by_own_order(&costs, &[1.0; 16], router_id);
            assert_eq!(place, by_own_order(&costs, &[1.0; 16], router_id), "a router keeps to its order");
            counts[place] += 1;
        }
        assert!(counts.iter().all(|count| (140..260).contains(count)), "{counts:?}");
        // Without the first of its order, a router chooses the second; all others keep their choice.
        for router_id in 0..50 {
            let first = by_own_order(&costs, &[1.0; 16], router_id);
            let mut without = costs.clone();
            let other = (first + 1) % 16;
            without[other] = 9.0;
            assert_eq!(by_own_order(&without, &[1.0; 16], router_id), first);
            without[first] = 9.0;
            assert_ne!(by_own_order(&without, &[1.0; 16], router_id), first);
        }
    }

    #[test]
    fn a_cost_is_near_within_its_bound_and_if_the_first_token_comes_about_as_early() {
        let seen = |costs: &[f64], first_token_s: &[f64]| {
            let mut places: Vec<usize> = (0..200).map(|id| by_own_order(costs, first_token_s, id)).collect();
            places.sort_unstable();
            places.dedup();
            places
        };
        assert_eq!(seen(&[1.0, 1.5, 1.51, 0.9], &[1.0; 4]), [0, 3], "0.6 above the lowest is not near");
        // A sixteenth of 0.5 s later is about as early; earlier is too.
        assert_eq!(seen(&[1.0, 1.1, 1.1, 1.1], &[1.0, 1.031, 1.032, 0.2]), [0, 1, 3]);
        assert_eq!(seen(&[f64::INFINITY, f64::INFINITY], &[0.0; 2]), [0, 1]);
        assert_eq!(seen(&[f64::NAN], &[0.0]), [0]);
    }

    #[test]
    fn a_seed_determines_all_draws() {
        let draw = |seed| {
            let mut drawing = Draws::new(seed).begin();
            (0..8).map(|_| drawing.below(1000)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn the_draws_of_a_seed_never_change() {
        let mut drawing = Draws::new(1).begin();
        let drawn = [drawing.below(1000), drawing.below(1000), drawing.below(1000)];
        assert_eq!(drawn, [566, 745, 971], "the first numbers of SplitMix64 from 1");
        assert_eq!(Draws::new(1).begin().below(0), 0);
    }

    #[test]
    fn draws_stay_within_their_bounds() {
        let mut drawing = Draws::new(3).begin();
        for bound in 1..200 {
            assert!(drawing.below(bound) < bound);
            assert!((0.0..1.0).contains(&drawing.unit()));
        }
    }
}
