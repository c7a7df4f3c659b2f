//! Selection by cost, and the seeded random draws that it uses.

use rand::Rng;
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::SeedableRng;

use super::decision::CandidateCost;
use super::policy::Pick;
use crate::ids::Worker;

/// Up to this many candidates are found in one pass; more are sorted.
const INSERTED_MAX: usize = 16;

/// Costs that are compared at once with the highest listed cost.
const STRIDE: usize = 8;

/// What some ways of picking depend on besides the costs, by place.
pub(super) struct PlaceFacts<R, P> {
    /// Requests in flight.
    pub(super) requests: R,
    /// The worker, and the predicted seconds to the first token.
    pub(super) promise: P,
}

/// A first token comes about as early if it comes at most this share of the near costs later.
const PROMISE_SHARE: f64 = 1.0 / 16.0;

/// Selects among places with these `costs`. Overwrites `chosen` with the selected place and the next `listed - 1` by
/// ascending cost; equal costs are in order of their places. Returns the number of places with the lowest cost.
#[inline(always)]
pub(super) fn choose(
    costs: &[f64],
    places: PlaceFacts<impl Fn(usize) -> f64, impl Fn(usize) -> (Worker, f64)>,
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
    let is_inserted = listed <= INSERTED_MAX;
    let inserted = if is_inserted { listed } else { 1 };
    let (lowest, ties) = match pick {
        Pick::LowestThenIdlest => lowest(costs, |place| rank(&priced(place)), priced, inserted, drawing, chosen),
        // Nothing but the cost decides: a key of one number is compared and moved faster.
        _ => lowest(costs, |place| ordinal(costs[place]), priced, inserted, drawing, chosen),
    };
    let first = match pick {
        Pick::Lowest | Pick::LowestThenIdlest => lowest,
        Pick::Sampled { temperature } => sampled(costs, temperature, drawing).unwrap_or(lowest),
        Pick::BetterOfTwo => better_of_two(costs, drawing),
        Pick::OwnOrder { near_cost_s, router_id } => {
            first_of_near(costs, places.promise, lowest, near_cost_s, router_id)
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

/// One of the lowest costs, each equally likely, and their number. Overwrites `chosen` with the `listed` lowest, at most
/// [`INSERTED_MAX`], in order. `key` is the sort key of a place.
#[inline(always)]
fn lowest<K: Copy + Ord>(
    costs: &[f64],
    key: impl Fn(usize) -> K,
    priced: impl Fn(usize) -> CandidateCost,
    listed: usize,
    drawing: &mut Drawing,
    chosen: &mut Vec<CandidateCost>,
) -> (usize, u32) {
    let mut lowest = Lowest { places: [0; INSERTED_MAX], keys: [key(0); INSERTED_MAX], len: 0 };
    let (mut drawn, mut ties, mut least) = (0, 0_usize, key(0));
    for (stride, of_stride) in costs.chunks(STRIDE).enumerate() {
        // A cost above the highest listed one is neither listed nor the lowest. The highest listed one only falls within
        // the stride, so that nothing is skipped too much. NaN is above nothing, and nothing is above NaN: until the list
        // is full, each cost is visited.
        let highest = if lowest.len < listed { f64::NAN } else { costs[lowest.places[listed - 1] as usize] };
        let mut to_visit = not_above(of_stride, highest);
        while to_visit != 0 {
            let place = stride * STRIDE + to_visit.trailing_zeros() as usize;
            to_visit &= to_visit - 1;
            let key = key(place);
            lowest.insert(key, place as u32, listed);
            if key > least {
                continue;
            }
            // Reservoir of one: the n-th equal replaces the choice with probability 1/n.
            ties = if key == least { ties + 1 } else { 1 };
            if ties == 1 || drawing.below(ties) == 0 {
                (drawn, least) = (place, key);
            }
        }
    }
    chosen.extend(lowest.places[..lowest.len].iter().map(|place| priced(*place as usize)));
    (drawn, ties as u32)
}

/// One bit for each of at most [`STRIDE`] costs, set if the cost is not above `highest`.
#[inline(always)]
fn not_above(costs: &[f64], highest: f64) -> u32 {
    const { assert!(STRIDE < u32::BITS as usize) };
    #[inline(always)]
    fn above(costs: &[f64], highest: f64) -> u32 {
        costs.iter().enumerate().fold(0, |bits, (at, cost)| bits | u32::from(*cost > highest) << at)
    }
    let above = match costs.as_array::<STRIDE>() {
        // A number of them that the compiler knows is compared at once.
        Some(costs) => above(costs, highest),
        None => above(costs, highest),
    };
    !above & ((1 << costs.len()) - 1)
}

/// The places with the lowest keys, in order. Keys are apart from places, so that what is compared lies together.
struct Lowest<K> {
    keys: [K; INSERTED_MAX],
    places: [u32; INSERTED_MAX],
    len: usize,
}

impl<K: Copy + Ord> Lowest<K> {
    /// Inserts a place among the `listed` lowest; the highest drops out. Places come in ascending order.
    #[inline(always)]
    fn insert(&mut self, key: K, place: u32, listed: usize) {
        if self.len < listed {
            self.len += 1;
        } else if key >= self.keys[self.len - 1] {
            return;
        }
        let mut at = self.len - 1;
        while at > 0 && key < self.keys[at - 1] {
            (self.keys[at], self.places[at]) = (self.keys[at - 1], self.places[at - 1]);
            at -= 1;
        }
        (self.keys[at], self.places[at]) = (key, place);
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
fn first_of_near(
    costs: &[f64],
    promise: impl Fn(usize) -> (Worker, f64),
    lowest: usize,
    near_cost_s: f64,
    router_id: u64,
) -> usize {
    let latest_s = promise(lowest).1 + PROMISE_SHARE * near_cost_s;
    let is_near = |place: &usize| costs[*place] <= costs[lowest] + near_cost_s;
    let order = |place: usize| {
        let (worker, first_token_s) = promise(place);
        (first_token_s <= latest_s).then(|| (order_of(router_id, worker), place))
    };
    (0..costs.len()).filter(is_near).filter_map(order).max().map_or(lowest, |(_, place)| place)
}

/// A worker's place in the order of a router: the highest comes first. The same on every machine and in every release.
fn order_of(router_id: u64, worker: Worker) -> u64 {
    let drawn = |seed: u64| SplitMix64::seed_from_u64(seed).next_u64();
    drawn(drawn(drawn(router_id) ^ worker.id.0) ^ u64::from(worker.rank.0))
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
    use super::*;
    use crate::route::Draws;

    fn chosen(costs: &[f64], listed: usize, pick: Pick, drawing: &mut Drawing) -> (Vec<u32>, u32) {
        let mut chosen = Vec::new();
        let places = PlaceFacts { requests: |_| 0.0, promise: |place| (Worker::new(place as u64, 0), 0.0) };
        let ties = choose(costs, places, listed, pick, drawing, &mut chosen);
        assert!(chosen.iter().all(|priced| priced.cost.to_bits() == costs[priced.place as usize].to_bits()));
        (chosen.iter().map(|priced| priced.place).collect(), ties)
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
        let places = PlaceFacts { requests, promise: |_| (Worker::default(), 0.0) };
        let mut chosen = Vec::new();
        let drawing = &mut Draws::new(1).begin();
        assert_eq!(choose(&[1.0; 4], places, 3, Pick::LowestThenIdlest, drawing, &mut chosen), 1);
        assert_eq!(chosen.iter().map(|priced| priced.place).collect::<Vec<_>>(), [1, 2, 0]);
    }

    /// The place that a router chooses among workers with these costs and times to the first token.
    fn by_own_order(costs: &[f64], first_token_s: &[f64], router_id: u64) -> usize {
        let promise = |place: usize| (Worker::new(place as u64 + 1, 0), first_token_s[place]);
        let places = PlaceFacts { requests: |_| 0.0, promise };
        let mut chosen = Vec::new();
        let pick = Pick::OwnOrder { near_cost_s: 0.5, router_id };
        choose(costs, places, 1, pick, &mut Draws::new(3).begin(), &mut chosen);
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
