//! The rules of llm-d's router: the default since August 2026, and the weighted blend before.

use rand_xoshiro::Xoshiro256PlusPlus;

use super::{Candidate, NEVER, Question, Rule, lowest};

/// `llm-d`: only the workers with `hit / L ≥ 0.8`, if there are any, unless the least `A / R` of them exceeds the least
/// `A / R` of the others by more than 18 s; then least `A + u`, of which 4 194 304 tokens count at most. Random among
/// equals.
///
/// Source: llm-d-router, `prefix-cache-affinity-filter` and `token-load-scorer`, default parameters.
///
/// Replaced: `R` (`peakPrefillThroughput`, 15 928 tokens a second by default) by the peak of the first simulated
/// engine, as llm-d's calibration would measure it. Bookings are released at the first token, as there.
#[derive(Clone, Copy, Debug)]
pub(in crate::simulate) struct LlmD {
    /// Prefill tokens per second: `R`.
    pub(in crate::simulate) peak_tokens_per_s: f64,
}

impl LlmD {
    /// The share of the prompt that a sticky worker holds (`affinityThreshold`).
    const STICKY_SHARE: f64 = 0.8;
    /// Seconds by which sticky workers may be slower (`maxTTFTPenaltyMs`).
    const PENALTY_S_MAX: f64 = 18.0;
    /// Tokens from which the scorer rates all workers 0 (`queueThresholdTokens`).
    const WORK_TOKENS_MAX: f64 = 4_194_304.0;

    /// Whether only the sticky workers are eligible.
    fn sticks(self, question: &Question<'_>, candidates: &[Candidate<'_>]) -> bool {
        let (mut sticky, mut other) = (f64::INFINITY, f64::INFINITY);
        for candidate in candidates {
            let least = if Self::is_sticky(question, candidate) { &mut sticky } else { &mut other };
            *least = least.min(candidate.prefill_tokens as f64);
        }
        // Without other workers the difference is negative.
        sticky.is_finite() && (sticky - other) / self.peak_tokens_per_s <= Self::PENALTY_S_MAX
    }

    fn is_sticky(question: &Question<'_>, candidate: &Candidate<'_>) -> bool {
        candidate.hit_share(question) >= Self::STICKY_SHARE
    }
}

impl Rule for LlmD {
    fn choose(
        &mut self,
        question: &Question<'_>,
        candidates: &[Candidate<'_>],
        chance: &mut Xoshiro256PlusPlus,
    ) -> usize {
        let sticks = self.sticks(question, candidates);
        lowest(candidates, chance, |candidate| {
            if sticks && !Self::is_sticky(question, candidate) {
                return NEVER;
            }
            (candidate.prefill_work(question).min(Self::WORK_TOKENS_MAX), 0.0)
        })
    }
}

/// `llm-d-legacy`: most `3 · prefix + 2 · queue + 2 · kv + 2 · cold`, each 0 to 1; random among equals. `prefix` =
/// `hit / L`; `queue` = 1 for the shortest queue, 0 for the longest, in proportion between them; `kv` = the unused
/// share of the KV memory; `cold` = for a prompt that no worker holds, 1 for the worker that got such a prompt longest
/// ago, 0 for the last one, evenly between them, and 0.5 for all other prompts.
///
/// Source: llm-d's default blend before August 2026 (blog `sticky-until-saturated`) and llm-d-router,
/// `prefix-cache-scorer`, `queue-scorer`, `kv-cache-utilization-scorer`, `no-hit-lru-scorer`.
///
/// Replaced: the queue and the KV usage that llm-d scrapes every 50 ms by the router's bookings: requests without a
/// first token, and the tokens of prompts in flight over the capacity.
#[derive(Debug, Default)]
pub(in crate::simulate) struct LlmDLegacy {
    /// By worker: the number of its last cold prompt; 0 = none.
    cold_prompts: Vec<u64>,
    cold_count: u64,
}

impl LlmDLegacy {
    const PREFIX_WEIGHT: f64 = 3.0;
    const QUEUE_WEIGHT: f64 = 2.0;
    const KV_WEIGHT: f64 = 2.0;
    const COLD_WEIGHT: f64 = 2.0;

    /// The `cold` term of a prompt that no worker holds, by candidate.
    fn cold_scores(&self, candidates: &[Candidate<'_>]) -> Vec<f64> {
        let last = |place: usize| self.cold_prompts.get(candidates[place].worker).copied().unwrap_or(0);
        let mut places: Vec<usize> = (0..candidates.len()).collect();
        places.sort_by_key(|place| last(*place));
        let mut scores = vec![1.0; candidates.len()];
        for (rank, place) in places.into_iter().enumerate() {
            scores[place] = 1.0 - rank as f64 / (candidates.len() - 1).max(1) as f64;
        }
        scores
    }

    fn note_cold(&mut self, worker: usize) {
        if worker >= self.cold_prompts.len() {
            self.cold_prompts.resize(worker + 1, 0);
        }
        self.cold_count += 1;
        self.cold_prompts[worker] = self.cold_count;
    }
}

impl Rule for LlmDLegacy {
    fn choose(
        &mut self,
        question: &Question<'_>,
        candidates: &[Candidate<'_>],
        chance: &mut Xoshiro256PlusPlus,
    ) -> usize {
        let is_cold = candidates.iter().all(|candidate| candidate.held_tokens == 0);
        let cold = if is_cold { self.cold_scores(candidates) } else { vec![0.5; candidates.len()] };
        let queues = || candidates.iter().map(Candidate::waiting);
        let (shortest, longest) = (queues().fold(f64::INFINITY, f64::min), queues().fold(0.0, f64::max));
        let mut cold = cold.into_iter();
        let best = lowest(candidates, chance, |candidate| {
            let queue = match longest > shortest {
                true => (longest - candidate.waiting()) / (longest - shortest),
                false => 1.0,
            };
            let used = candidate.kv_tokens as f64 / candidate.capacity_tokens.max(1) as f64;
            let score = Self::PREFIX_WEIGHT * candidate.hit_share(question)
                + Self::QUEUE_WEIGHT * queue
                + Self::KV_WEIGHT * (1.0 - used.min(1.0))
                + Self::COLD_WEIGHT * cold.next().unwrap_or(0.5);
            (-score, 0.0)
        });
        if is_cold {
            self.note_cold(candidates[best].worker);
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{booked, chance, chosen_places, idle, prompt, workers};
    use super::*;

    const RULE: LlmD = LlmD { peak_tokens_per_s: 1000.0 };

    fn behind(worker: usize, held_tokens: u32, prefill_tokens: u64) -> Candidate<'static> {
        Candidate { held_tokens, prefill_tokens, ..idle(worker) }
    }

    #[test]
    fn workers_with_four_fifths_of_the_prompt_go_first() {
        let choose = |of: &[Candidate<'_>]| chosen_places(&mut { RULE }, &prompt(100), of);
        assert_eq!(choose(&[behind(0, 80, 5000), behind(1, 79, 0)]), [0]);
        assert_eq!(choose(&[behind(0, 79, 5000), behind(1, 0, 0)]), [1], "none is sticky");
        assert_eq!(choose(&[behind(0, 80, 50), behind(1, 100, 30), behind(2, 90, 40)]), [1], "least A + u of them");
        assert_eq!(choose(&[behind(0, 80, 50), behind(1, 90, 60), behind(2, 0, 0)]), [0, 1], "equals");
    }

    #[test]
    fn a_backlog_of_more_than_eighteen_seconds_opens_the_filter() {
        let choose = |of: &[Candidate<'_>]| chosen_places(&mut { RULE }, &prompt(100), of);
        assert_eq!(choose(&[behind(0, 100, 18_007), behind(1, 0, 7)]), [0], "exactly 18 s");
        assert_eq!(choose(&[behind(0, 100, 18_008), behind(1, 0, 7)]), [1]);
        assert_eq!(choose(&[behind(0, 100, 18_008), behind(1, 100, 50), behind(2, 0, 7)]), [1], "the best sticky one");
        assert_eq!(choose(&[behind(0, 100, 90_000), behind(1, 90, 95_000)]), [0], "all are sticky");
    }

    #[test]
    fn beyond_the_scorers_range_workers_are_equal() {
        let of = [behind(0, 0, 4_194_304), behind(1, 0, 9_000_000), behind(2, 0, 4_194_304)];
        assert_eq!(chosen_places(&mut { RULE }, &prompt(100), &of), [0, 1, 2]);
    }

    #[test]
    fn the_blend_weighs_prefix_queue_and_memory() {
        let (short, long) = (booked(&[1]), booked(&[1, 1, 1]));
        let of = |worker, held_tokens, kv_tokens, booked| Candidate { held_tokens, kv_tokens, booked, ..idle(worker) };
        // 3 · 0.7 + 2 · 0 + 2 · 1 against 3 · 0 + 2 · 1 + 2 · 1.
        let mut rule = LlmDLegacy::default();
        let mut choose = |of: &[Candidate<'_>]| rule.choose(&prompt(100), of, &mut chance());
        assert_eq!(choose(&[of(0, 70, 0, &long), of(1, 0, 0, &short)]), 0);
        assert_eq!(choose(&[of(0, 65, 0, &long), of(1, 0, 0, &short)]), 1);
        // Equal queues are neutral; 2 · 0.25 of the memory against 3 · 0.16 of the prefix.
        assert_eq!(choose(&[of(0, 16, 25_000, &short), of(1, 0, 0, &short)]), 1);
        assert_eq!(choose(&[of(0, 17, 25_000, &short), of(1, 0, 0, &short)]), 0);
    }

    #[test]
    fn cold_prompts_go_round_by_their_last_use() {
        let (mut rule, mut chance) = (LlmDLegacy::default(), chance());
        let candidates = workers(&[(0, 0); 3]);
        let mut choose = |of: &[Candidate<'_>]| rule.choose(&prompt(100), of, &mut chance);
        assert_eq!([choose(&candidates), choose(&candidates), choose(&candidates)], [0, 1, 2]);
        assert_eq!(choose(&workers(&[(0, 0), (0, 0), (9, 0)])), 2, "not cold: no use is noted");
        assert_eq!([choose(&candidates), choose(&candidates), choose(&candidates)], [0, 1, 2]);
    }
}
