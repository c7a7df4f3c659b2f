//! The rule of Mooncake's Conductor.

use rand_xoshiro::Xoshiro256PlusPlus;

use super::{Candidate, PrefillTimes, Question, Rule, lowest};

/// `mooncake`: least predicted time to the first token, `Σ P(booked prefills) + P(u, hit)` in seconds; random among
/// equals. `P` is the prefill time by new and cached tokens.
///
/// Source: Mooncake, FAST'25, §4 and algorithm 1.
///
/// Replaced: the polynomial that Mooncake fits offline is the simulated engine's own law, so the prediction of one
/// prefill is exact. Left out: the fetch of KV from the best holder, since simulated engines have no link between them,
/// and the refusal of requests that would miss their SLO, since no rule here refuses.
#[derive(Debug)]
pub(in crate::simulate) struct Mooncake {
    times: PrefillTimes,
    predicted_s: f64,
}

impl Mooncake {
    pub(in crate::simulate) fn new(times: PrefillTimes) -> Self {
        Self { times, predicted_s: f64::NAN }
    }

    fn ttft_s(&self, question: &Question<'_>, candidate: &Candidate<'_>) -> f64 {
        let prefill_s = |uncached: f64, cached: f64| self.times.prefill_s(candidate.worker, uncached, cached);
        let booked = candidate.booked.prefills.iter();
        let queue_s: f64 = booked.map(|prefill| prefill_s(f64::from(prefill.1), f64::from(prefill.2))).sum();
        queue_s + prefill_s(candidate.uncached(question), f64::from(candidate.held_tokens))
    }
}

impl Rule for Mooncake {
    fn choose(
        &mut self,
        question: &Question<'_>,
        candidates: &[Candidate<'_>],
        chance: &mut Xoshiro256PlusPlus,
    ) -> usize {
        let mut least_s = f64::INFINITY;
        let best = lowest(candidates, chance, |candidate| {
            let ttft_s = self.ttft_s(question, candidate);
            least_s = least_s.min(ttft_s);
            (ttft_s, 0.0)
        });
        self.predicted_s = least_s;
        best
    }

    fn predicted_ttft_s(&self) -> f64 {
        self.predicted_s
    }
}

/// The decode half of a pair under `mooncake`: least predicted time between two tokens with the request, by the requests
/// and the tokens in flight on the worker; random among equals.
///
/// Source: Mooncake, FAST'25, algorithm 1: the prefill instance by its time to the first token, then the decode instance
/// by its load. Replaced: the prediction is the simulated engine's own law, as above.
#[derive(Debug)]
pub(in crate::simulate) struct MooncakeDecode {
    times: PrefillTimes,
}

impl MooncakeDecode {
    pub(in crate::simulate) fn new(times: PrefillTimes) -> Self {
        Self { times }
    }
}

impl Rule for MooncakeDecode {
    fn choose(
        &mut self,
        question: &Question<'_>,
        candidates: &[Candidate<'_>],
        chance: &mut Xoshiro256PlusPlus,
    ) -> usize {
        lowest(candidates, chance, |candidate| {
            let tokens = candidate.kv_tokens as f64 + f64::from(question.prompt_tokens);
            let law = self.times.laws.get(candidate.worker);
            (law.map_or(0.0, |law| law.step_s(0.0, 0.0, candidate.requests as f64 + 1.0, tokens)), 0.0)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{booked, chance, idle, millisecond_a_token, prompt};
    use super::*;
    use crate::engine_law::EngineLaw;

    #[test]
    fn every_booked_prefill_counts_in_full() {
        let mut rule = Mooncake::new(millisecond_a_token(2));
        let booked = booked(&[30, 40]);
        let holder = |held_tokens| Candidate { held_tokens, booked: &booked, ..idle(0) };
        assert_eq!(rule.choose(&prompt(100), &[holder(69), idle(1)], &mut chance()), 1, "70 + 31 against 100");
        assert!((rule.predicted_ttft_s() - 0.1).abs() < 1e-12);
        assert_eq!(rule.choose(&prompt(100), &[holder(71), idle(1)], &mut chance()), 0, "70 + 29 against 100");
        assert!((rule.predicted_ttft_s() - 0.099).abs() < 1e-12);
    }

    #[test]
    fn attention_over_the_cached_prefix_has_its_price() {
        let mut times = millisecond_a_token(2);
        times.laws.iter_mut().for_each(|law| law.prefill.attention_s = 1e-3);
        // 10 new tokens behind 90: 10 + 10 · 95 against 100 + 100 · 50 ms; behind a backlog of 5 s it loses.
        let mut rule = Mooncake::new(times);
        let holder = Candidate { held_tokens: 90, ..idle(0) };
        assert_eq!(rule.choose(&prompt(100), &[holder, idle(1)], &mut chance()), 0);
        assert!((rule.predicted_ttft_s() - 0.96).abs() < 1e-9);
        let busy = booked(&[95]);
        assert_eq!(rule.choose(&prompt(100), &[Candidate { booked: &busy, ..holder }, idle(1)], &mut chance()), 1);
    }

    #[test]
    fn the_decode_half_goes_where_a_step_is_shortest() {
        // A request takes 1 ms of a step, a token 1 µs.
        let law = EngineLaw::of([0.0; 3], [0.0, 1e-3, 1e-6]);
        let mut rule = MooncakeDecode::new(PrefillTimes { laws: vec![law; 2], step_tokens_max: 1000.0 });
        let holds = |worker, requests, kv_tokens| Candidate { requests, kv_tokens, ..idle(worker) };
        assert_eq!(rule.choose(&prompt(100), &[holds(0, 3, 1000), holds(1, 2, 1999)], &mut chance()), 1);
        assert_eq!(rule.choose(&prompt(100), &[holds(0, 3, 1000), holds(1, 2, 2001)], &mut chance()), 0);
    }
}
