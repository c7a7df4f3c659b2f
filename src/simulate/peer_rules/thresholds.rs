//! Rules that switch between affinity and load at thresholds.

use rand_xoshiro::Xoshiro256PlusPlus;

use super::{Candidate, NEVER, Question, Rule, lowest, request_bounds};

/// When requests in flight are spread so unevenly that affinity is ignored.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Imbalance {
    /// The most exceed the fewest by more than this.
    requests: u64,
    /// And the most exceed this many times the fewest.
    ratio: f64,
}

impl Imbalance {
    /// The defaults of SGLang's router.
    const SGLANG: Self = Self { requests: 32, ratio: 1.1 };

    fn applies(self, candidates: &[Candidate<'_>]) -> bool {
        let (least, most) = request_bounds(candidates);
        most.saturating_sub(least) > self.requests && most as f64 > self.ratio * least as f64
    }
}

/// The share of the prompt that must be held for affinity to count, exclusive: SGLang's default.
const HIT_SHARE: f64 = 0.5;

fn longest_held(candidates: &[Candidate<'_>]) -> u32 {
    candidates.iter().map(|candidate| candidate.held_tokens).max().unwrap_or(0)
}

/// `two-tier`: if `max B - min B > 32` and `max B > 1.1 · min B`: least `B`; else if the longest `hit > 0.5 · L`: least
/// `B` of the workers with that `hit`; else least `B`.
///
/// Source: Dynamo, `lib/router-plugins/builtin/src/two_tier_cost_fn.rs` (#14498), which ports `cache_aware_zmq` of
/// SGLang's experimental router.
///
/// Replaced: the first row among equals, in an order that Dynamo leaves open, by a random one.
#[derive(Debug)]
pub(in crate::simulate) struct TwoTier;

impl Rule for TwoTier {
    fn choose(
        &mut self,
        question: &Question<'_>,
        candidates: &[Candidate<'_>],
        chance: &mut Xoshiro256PlusPlus,
    ) -> usize {
        let longest = longest_held(candidates);
        let has_affinity = !Imbalance::SGLANG.applies(candidates)
            && f64::from(longest) > HIT_SHARE * f64::from(question.prompt_tokens);
        lowest(candidates, chance, |candidate| {
            if has_affinity && candidate.held_tokens < longest {
                return NEVER;
            }
            (candidate.requests as f64, 0.0)
        })
    }
}

/// `smg`: if `max B - min B > 32` and `max B > 1.1 · min B`: least `B`; else if the longest `hit > 0.5 · L`: that
/// worker, of equals least `B`, then the smaller tree; else the worker with the smallest tree, of equals least `B`.
///
/// Source: `cache_aware` of SGLang's router and SMG, library defaults (the command line of vLLM's router has 64, 1.5
/// and 0.3). The last ties are random.
///
/// Replaced: the tree of past requests by the index's overlap, which is exact where the tree guesses. A worker's tree
/// is as large as the uncached tokens that it was sent; the periodic eviction from trees is left out.
#[derive(Debug, Default)]
pub(in crate::simulate) struct Smg {
    /// Tokens, by worker.
    trees: Vec<f64>,
}

impl Rule for Smg {
    fn choose(
        &mut self,
        question: &Question<'_>,
        candidates: &[Candidate<'_>],
        chance: &mut Xoshiro256PlusPlus,
    ) -> usize {
        let workers = candidates.iter().map(|candidate| candidate.worker + 1).max().unwrap_or(0);
        self.trees.resize(self.trees.len().max(workers), 0.0);
        let trees = &mut self.trees;
        let longest = longest_held(candidates);
        let best = if Imbalance::SGLANG.applies(candidates) {
            lowest(candidates, chance, |candidate| (candidate.requests as f64, 0.0))
        } else if f64::from(longest) > HIT_SHARE * f64::from(question.prompt_tokens) {
            lowest(candidates, chance, |candidate| match candidate.held_tokens == longest {
                true => (candidate.requests as f64, trees[candidate.worker]),
                false => NEVER,
            })
        } else {
            lowest(candidates, chance, |candidate| (trees[candidate.worker], candidate.requests as f64))
        };
        trees[candidates[best].worker] += candidates[best].uncached(question);
        best
    }
}

/// `aibrix`: if `max B - min B > 8`: least `B`; else, of the workers that hold a whole percent of the prompt and have
/// `B ≤ mean + 1 · σ`, the one with the highest percentage, of equals least `B`; else least `B`. The last ties are
/// random.
///
/// Source: AIBrix, `prefix_cache.go` at e3e10f9. Later versions also need `max B > 2 · (mean B + 1)` for the first
/// branch.
///
/// Replaced: running requests, which AIBrix counts in its gateway too, by requests in flight; its prefix table by the
/// index's overlap.
#[derive(Debug)]
pub(in crate::simulate) struct Aibrix;

impl Aibrix {
    /// A larger difference in requests is an imbalance.
    const IMBALANCE_REQUESTS: u64 = 8;

    /// Mean plus one standard deviation of the requests in flight.
    fn requests_max(candidates: &[Candidate<'_>]) -> f64 {
        let count = candidates.len() as f64;
        let mean = candidates.iter().map(|candidate| candidate.requests as f64).sum::<f64>() / count;
        let deviations = candidates.iter().map(|candidate| (candidate.requests as f64 - mean).powi(2));
        mean + (deviations.sum::<f64>() / count).sqrt()
    }
}

impl Rule for Aibrix {
    fn choose(
        &mut self,
        question: &Question<'_>,
        candidates: &[Candidate<'_>],
        chance: &mut Xoshiro256PlusPlus,
    ) -> usize {
        let (least, most) = request_bounds(candidates);
        let percent = |candidate: &Candidate<'_>| (100.0 * candidate.hit_share(question)).floor();
        let requests_max = Self::requests_max(candidates);
        let matches =
            |candidate: &Candidate<'_>| percent(candidate) >= 1.0 && candidate.requests as f64 <= requests_max;
        if most - least > Self::IMBALANCE_REQUESTS || !candidates.iter().any(matches) {
            return lowest(candidates, chance, |candidate| (candidate.requests as f64, 0.0));
        }
        lowest(candidates, chance, |candidate| match matches(candidate) {
            true => (-percent(candidate), candidate.requests as f64),
            false => NEVER,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{chance, chosen_places, prompt, workers};
    use super::*;

    fn chosen(rule: &mut dyn Rule, held_and_requests: &[(u32, u64)]) -> Vec<usize> {
        chosen_places(rule, &prompt(100), &workers(held_and_requests))
    }

    #[test]
    fn two_tier_needs_more_than_half_of_the_prompt_for_affinity() {
        assert_eq!(chosen(&mut TwoTier, &[(50, 5), (0, 3), (10, 3)]), [1, 2]);
        assert_eq!(chosen(&mut TwoTier, &[(51, 5), (0, 3), (50, 0)]), [0]);
        assert_eq!(chosen(&mut TwoTier, &[(60, 5), (60, 3), (59, 0), (60, 3)]), [1, 3]);
    }

    #[test]
    fn two_tier_ignores_affinity_only_if_difference_and_ratio_are_exceeded() {
        assert_eq!(chosen(&mut TwoTier, &[(100, 32), (0, 0)]), [0], "a difference of 32 is none");
        assert_eq!(chosen(&mut TwoTier, &[(100, 33), (0, 0)]), [1]);
        assert_eq!(chosen(&mut TwoTier, &[(100, 440), (0, 400)]), [0], "1.1 times");
        assert_eq!(chosen(&mut TwoTier, &[(100, 441), (0, 400)]), [1]);
    }

    #[test]
    fn smg_without_a_match_takes_the_smallest_tree_whatever_its_load() {
        let mut rule = Smg::default();
        let mut chance = chance();
        let mut choose = |tokens, of: &[(u32, u64)]| rule.choose(&prompt(tokens), &workers(of), &mut chance);
        assert_eq!(choose(100, &[(0, 1), (0, 0)]), 1, "of equal trees the lesser load");
        assert_eq!(choose(300, &[(0, 9), (50, 0)]), 0, "the empty tree");
        assert_eq!(choose(100, &[(0, 0), (50, 9)]), 1, "100 tokens against 300");
        assert_eq!(rule.trees, [300.0, 150.0], "held tokens are in the tree already");
    }

    #[test]
    fn smg_breaks_ties_of_a_match_by_load_and_then_by_tree() {
        assert_eq!(chosen(&mut Smg::default(), &[(80, 2), (80, 1), (70, 0)]), [1]);
        let mut rule = Smg { trees: vec![5.0, 4.0] };
        assert_eq!(rule.choose(&prompt(100), &workers(&[(80, 1), (80, 1)]), &mut chance()), 1);
        assert_eq!(chosen(&mut Smg::default(), &[(80, 33), (0, 0)]), [1], "imbalance");
    }

    #[test]
    fn aibrix_skips_a_holder_above_mean_and_deviation() {
        // Mean 2, deviation 3.46: at most 5.46.
        assert_eq!(chosen(&mut Aibrix, &[(90, 8), (40, 0), (0, 0), (0, 0)]), [1]);
        assert_eq!(chosen(&mut Aibrix, &[(90, 8), (0, 1), (0, 0), (0, 0)]), [2, 3], "without another holder: load");
        assert_eq!(chosen(&mut Aibrix, &[(90, 4), (40, 0), (0, 0), (0, 4)]), [0]);
    }

    #[test]
    fn aibrix_ignores_affinity_beyond_a_difference_of_eight() {
        assert_eq!(chosen(&mut Aibrix, &[(90, 9), (0, 1), (0, 9), (0, 9)]), [0]);
        assert_eq!(chosen(&mut Aibrix, &[(90, 9), (0, 0), (0, 9), (0, 9)]), [1]);
    }

    #[test]
    fn aibrix_compares_whole_percentages() {
        let candidates = workers(&[(4_029, 2), (4_000, 1)]);
        assert_eq!(chosen_places(&mut Aibrix, &prompt(10_000), &candidates), [1], "40 percent each");
        assert_eq!(chosen_places(&mut Aibrix, &prompt(10_000), &workers(&[(99, 2), (0, 1)])), [1], "no whole percent");
    }
}
