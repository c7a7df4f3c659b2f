//! The terms that were tried for mode `latency`, each with a switch or a weight, those that it has among them: to
//! measure what each of them is worth. With the default weights it decides as `latency`, but with the engines' true
//! constants.

use rand_xoshiro::Xoshiro256PlusPlus;

use super::{Candidate, PrefillTimes, Question, Rule, lowest};
use crate::load::recent_ms;
use crate::route::{Policy, RecentSums};

/// Weights and switches (0 = off) of the terms. The formula is in [`TriedTerms::price`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TermWeights {
    /// Whether a prefill's time counts attention to what is cached.
    pub attention: f64,
    /// Whether the prefill that runs counts only what is left of it.
    pub elapsed: f64,
    /// Whether blocks that other requests compute count as cached.
    pub in_flight: f64,
    /// Own prefill, for each request of the worker.
    pub delay: f64,
    /// Own prefill, for each decoding request of the worker.
    pub decoding_delay: f64,
    /// Own prefill, times load / (1 − load) of the fleet.
    pub later_delay: f64,
    /// The mean time of an output, times the share of the worker's time that prefills took lately.
    pub output_delay: f64,
    /// Whether steps take longer with decoding requests in the batch.
    pub ride_along: f64,
    /// The steps of 300 output tokens: own ones, and what own tokens add to others'.
    pub decode: f64,
    /// Tokens to compute, ten times as dear on a worker whose memory is nearly full.
    pub eviction: f64,
    /// Seconds above the least predicted time to the first token beyond which a worker is left out.
    pub guard_s: f64,
}

impl Default for TermWeights {
    /// The weights of mode `latency`; the terms that it lacks are off.
    fn default() -> Self {
        let Policy { delay_weight, later_delay_weight, output_delay_weight, .. } = Policy::default();
        Self {
            attention: 1.0,
            elapsed: 1.0,
            in_flight: 1.0,
            delay: delay_weight,
            decoding_delay: 0.0,
            later_delay: later_delay_weight,
            output_delay: output_delay_weight,
            ride_along: 0.0,
            decode: 0.0,
            eviction: 0.0,
            guard_s: 1e9,
        }
    }
}

impl TermWeights {
    /// The names of the weights, as [`TermWeights::set`] takes them.
    pub const NAMES: [&'static str; 11] = [
        "attention",
        "elapsed",
        "in_flight",
        "delay",
        "decoding_delay",
        "later_delay",
        "output_delay",
        "ride_along",
        "decode",
        "eviction",
        "guard_s",
    ];

    /// Sets a weight by its name. `false`: there is none of this name.
    pub fn set(&mut self, name: &str, value: f64) -> bool {
        let fields = [
            &mut self.attention,
            &mut self.elapsed,
            &mut self.in_flight,
            &mut self.delay,
            &mut self.decoding_delay,
            &mut self.later_delay,
            &mut self.output_delay,
            &mut self.ride_along,
            &mut self.decode,
            &mut self.eviction,
            &mut self.guard_s,
        ];
        let field = fields.into_iter().zip(Self::NAMES).find(|(_, of)| *of == name);
        field.map(|(field, _)| *field = value).is_some()
    }
}

/// Output tokens that a request is expected to have.
const OUTPUT_TOKENS: f64 = 300.0;

pub(in crate::simulate) struct TriedTerms {
    weights: TermWeights,
    times: PrefillTimes,
    predicted_ttft_s: f64,
}

#[derive(Clone, Copy)]
struct Price {
    ttft_s: f64,
    cost_s: f64,
}

impl TriedTerms {
    pub(in crate::simulate) fn new(weights: TermWeights, mut times: PrefillTimes) -> Self {
        if weights.attention == 0.0 {
            times.laws.iter_mut().for_each(|law| law.prefill.attention_s = 0.0);
        }
        Self { weights, times, predicted_ttft_s: f64::NAN }
    }

    fn queue_s(&self, question: &Question<'_>, candidate: &Candidate<'_>) -> f64 {
        let booked = candidate.booked;
        let seconds = |(at, prefill): (usize, &(u64, u32, u32, u64))| {
            let (_, uncached, cached, booked_ns) = *prefill;
            let all_s = self.times.prefill_s(candidate.worker, f64::from(uncached), f64::from(cached));
            let elapsed_ns = question.now_ns.saturating_sub(booked.since_ns.max(booked_ns));
            let is_running = at == 0 && self.weights.elapsed > 0.0;
            if is_running { (all_s - elapsed_ns as f64 * 1e-9).max(0.0) } else { all_s }
        };
        booked.prefills.iter().enumerate().map(seconds).sum()
    }

    /// `later_wait` and `decode_s` are those of all candidates, as in [`PoolFacts`](crate::route::PoolFacts).
    fn price(&self, question: &Question<'_>, candidate: &Candidate<'_>, (later_wait, decode_s): (f64, f64)) -> Price {
        let weights = &self.weights;
        let in_flight = if weights.in_flight > 0.0 { candidate.running_tokens } else { 0 };
        let cached = f64::from(candidate.held_tokens.max(in_flight).min(question.prompt_tokens.saturating_sub(1)));
        let prompt = f64::from(question.prompt_tokens);
        let law = &self.times.laws[candidate.worker];
        let prefill_s = self.times.prefill_s(candidate.worker, prompt - cached, cached);
        let (decoding, kv_tokens) = (candidate.decoding(), candidate.kv_tokens as f64);
        let beside_s = law.decode.request_s * decoding + law.decode.kv_token_s * kv_tokens;
        let full_step_s = law.prefill.base_s + law.prefill.token_s * self.times.step_tokens_max;
        let slowed = 1.0 + weights.ride_along * beside_s / full_step_s;
        let ttft_s = slowed * (self.queue_s(question, candidate) + prefill_s);
        let delayed = weights.delay * candidate.requests as f64
            + weights.decoding_delay * decoding
            + weights.later_delay * later_wait;
        let own_s = law.decode.request_s + law.decode.kv_token_s * (prompt + OUTPUT_TOKENS / 2.0);
        let is_full = kv_tokens + prompt > 0.9 * candidate.capacity_tokens as f64;
        let eviction_s = law.prefill.token_s * (prompt - cached) * if is_full { 10.0 } else { 1.0 };
        let cost_s = ttft_s
            + delayed * prefill_s
            + weights.output_delay * decode_s * candidate.recent.prefill_share_at(recent_ms(question.now_ns))
            + weights.decode * OUTPUT_TOKENS * (beside_s + (decoding + 1.0) * own_s)
            + weights.eviction * eviction_s;
        Price { ttft_s, cost_s }
    }
}

impl Rule for TriedTerms {
    fn choose(
        &mut self,
        question: &Question<'_>,
        candidates: &[Candidate<'_>],
        chance: &mut Xoshiro256PlusPlus,
    ) -> usize {
        let recents: Vec<_> = candidates.iter().map(|candidate| candidate.recent).collect();
        let of_all = RecentSums::of_all(&recents, recent_ms(question.now_ns));
        let of_all = of_all.later_wait_and_decode_s(candidates.len() as u32);
        let prices: Vec<Price> = candidates.iter().map(|candidate| self.price(question, candidate, of_all)).collect();
        let bound_s = prices.iter().map(|price| price.ttft_s).fold(f64::INFINITY, f64::min) + self.weights.guard_s;
        let mut at = 0..;
        let chosen = lowest(candidates, chance, |_| {
            let price = prices[at.next().unwrap_or(0)];
            if price.ttft_s > bound_s { (f64::INFINITY, 0.0) } else { (price.cost_s, 0.0) }
        });
        self.predicted_ttft_s = prices[chosen].ttft_s;
        chosen
    }

    fn predicted_ttft_s(&self) -> f64 {
        self.predicted_ttft_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_have_names() {
        let mut weights = TermWeights::default();
        for (at, name) in TermWeights::NAMES.into_iter().enumerate() {
            assert!(weights.set(name, at as f64 + 0.5));
        }
        assert!(!weights.set("delays", 1.0));
        assert_eq!((weights.attention, weights.delay, weights.guard_s), (0.5, 3.5, 10.5));
    }
}
