//! Rules without constants, by the tokens that a worker would have to compute.

use rand_xoshiro::Xoshiro256PlusPlus;

use super::{Candidate, Question, Rule, lowest};

/// `lpwl` (least prefill work left): least `A + u`; of equals least `B`; of equals one after the other.
///
/// Source: gahow `agentic-kvc`, `analysis/lpwl_5policy_600s.md`, policy `leastwork`. It has no constants.
///
/// Replaced: nothing. The original keeps the same bookings in its proxy.
#[derive(Debug, Default)]
pub(in crate::simulate) struct Lpwl {
    decisions: usize,
}

impl Rule for Lpwl {
    fn choose(&mut self, question: &Question<'_>, candidates: &[Candidate<'_>], _: &mut Xoshiro256PlusPlus) -> usize {
        // The scan begins one place later each time, so that equals take turns.
        let first = self.decisions % candidates.len();
        self.decisions += 1;
        let (mut best, mut least) = (first, (f64::INFINITY, u64::MAX));
        for at in (first..candidates.len()).chain(0..first) {
            let key = (candidates[at].prefill_work(question), candidates[at].requests);
            if key < least {
                (best, least) = (at, key);
            }
        }
        best
    }
}

/// `lmetric`: least `(A + u) · (B + 1)`; random among equals.
///
/// Source: LMetric, OSDI'26, arXiv 2603.15202. It has no constants.
///
/// Replaced: the engine's batch size by the router's count of requests in flight.
#[derive(Debug)]
pub(in crate::simulate) struct Lmetric;

impl Rule for Lmetric {
    fn choose(
        &mut self,
        question: &Question<'_>,
        candidates: &[Candidate<'_>],
        chance: &mut Xoshiro256PlusPlus,
    ) -> usize {
        lowest(candidates, chance, |candidate| {
            (candidate.prefill_work(question) * (candidate.requests as f64 + 1.0), 0.0)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{chance, chosen_places, idle, prompt, workers};
    use super::*;

    #[test]
    fn backlog_and_uncached_tokens_are_added() {
        let behind = |prefill_tokens| Candidate { held_tokens: 80, prefill_tokens, requests: 9, ..idle(0) };
        let mut rule = Lpwl::default();
        assert_eq!(rule.choose(&prompt(100), &[behind(79), idle(1)], &mut chance()), 0);
        assert_eq!(rule.choose(&prompt(100), &[behind(81), idle(1)], &mut chance()), 1);
    }

    #[test]
    fn of_equal_work_fewer_requests_win_and_then_workers_take_turns() {
        let (mut rule, mut chance) = (Lpwl::default(), chance());
        let candidates = workers(&[(0, 1), (0, 2), (0, 1), (0, 1)]);
        let chosen: Vec<_> = (0..6).map(|_| rule.choose(&prompt(100), &candidates, &mut chance)).collect();
        assert_eq!(chosen, [0, 2, 2, 3, 0, 2]);
    }

    #[test]
    fn requests_in_flight_multiply_the_work() {
        // 50 · 4 = 200 against 100 · 2.
        let candidates = workers(&[(50, 3), (0, 1)]);
        assert_eq!(chosen_places(&mut Lmetric, &prompt(100), &candidates), [0, 1]);
        assert_eq!(chosen_places(&mut Lmetric, &prompt(100), &workers(&[(51, 3), (0, 1)])), [0]);
        assert_eq!(chosen_places(&mut Lmetric, &prompt(100), &workers(&[(50, 4), (0, 1)])), [1]);
    }
}
