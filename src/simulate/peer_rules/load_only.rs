//! Rules that do not look at the prompt.

use rand_xoshiro::Xoshiro256PlusPlus;

use super::{Candidate, Question, Rule, lowest};

/// `round-robin`: one worker after the other.
#[derive(Debug, Default)]
pub(in crate::simulate) struct RoundRobin {
    decisions: usize,
}

impl Rule for RoundRobin {
    fn choose(&mut self, _: &Question<'_>, candidates: &[Candidate<'_>], _: &mut Xoshiro256PlusPlus) -> usize {
        self.decisions += 1;
        (self.decisions - 1) % candidates.len()
    }
}

/// `least-loaded`: least `B`; random among equals. Every gateway has this rule.
#[derive(Debug)]
pub(in crate::simulate) struct LeastLoaded;

impl Rule for LeastLoaded {
    fn choose(&mut self, _: &Question<'_>, candidates: &[Candidate<'_>], chance: &mut Xoshiro256PlusPlus) -> usize {
        lowest(candidates, chance, |candidate| (candidate.requests as f64, 0.0))
    }
}

/// `vllm-dp`: least `4 · waiting + running`, the first of equals.
///
/// Source: vLLM, `v1/engine/core_client.py`, the balancer of data-parallel ranks.
///
/// Replaced: vLLM reads the engines' counts each 100 ms and adds its own choices meanwhile. Here the counts are the
/// router's bookings and always fresh: requests without a first token wait (`W`), the others run (`B - W`).
#[derive(Debug)]
pub(in crate::simulate) struct VllmDp;

impl Rule for VllmDp {
    fn choose(&mut self, _: &Question<'_>, candidates: &[Candidate<'_>], chance: &mut Xoshiro256PlusPlus) -> usize {
        lowest(candidates, chance, |candidate| {
            (4.0 * candidate.waiting() + candidate.decoding(), candidate.worker as f64)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{booked, chance, chosen_places, idle, prompt, workers};
    use super::*;

    #[test]
    fn workers_take_turns() {
        let (mut rule, candidates, mut chance) = (RoundRobin::default(), workers(&[(0, 0); 3]), chance());
        let chosen: Vec<_> = (0..5).map(|_| rule.choose(&prompt(9), &candidates, &mut chance)).collect();
        assert_eq!(chosen, [0, 1, 2, 0, 1]);
    }

    #[test]
    fn one_of_the_least_loaded_workers_is_drawn() {
        let candidates = workers(&[(0, 2), (90, 1), (0, 1), (0, 3)]);
        assert_eq!(chosen_places(&mut LeastLoaded, &prompt(100), &candidates), [1, 2]);
    }

    #[test]
    fn a_waiting_request_counts_as_four_running_ones() {
        let (one, none) = (booked(&[10]), booked(&[]));
        let waits = Candidate { requests: 1, booked: &one, ..idle(0) };
        let runs = |requests, worker| Candidate { requests, booked: &none, ..idle(worker) };
        assert_eq!(VllmDp.choose(&prompt(9), &[waits, runs(3, 1)], &mut chance()), 1);
        assert_eq!(VllmDp.choose(&prompt(9), &[waits, runs(5, 1)], &mut chance()), 0);
        assert_eq!(chosen_places(&mut VllmDp, &prompt(9), &[waits, runs(4, 1)]), [0], "the first of equals");
    }
}
