//! The rule of Preble.

use std::collections::VecDeque;

use rand_xoshiro::Xoshiro256PlusPlus;

use super::{Candidate, NEVER, PrefillTimes, Question, Rule, lowest};

/// `preble` (E2, exploit or explore): if the longest `hit > 0.5 · L`: that worker, of equals the least load; else least
/// `load + eviction + prefill`, in seconds. Random among equals. `load` = prefill and decode time of the prompts that
/// the rule gave to the worker in the last 3 minutes; `prefill` = `P(u, hit)`; `eviction` = the time to prefill the
/// tokens that the prompt displaces, times the share of tokens that the worker's prompts of the last 3 minutes found
/// cached.
///
/// Source: Preble, ICLR'25, arXiv 2407.00023, and its port in AIBrix (`prefix_cache_preble.go`: window, threshold, 45
/// tokens of output).
///
/// Replaced: the measured prefill times (piecewise linear and quadratic, of an A6000 or V100) by the simulated
/// engine's own law, and the decode time of a token by a step with this prompt alone. The paper weighs each evicted
/// node by its own hits; a router does not know what an engine will evict, so the mean of the window stands for it.
/// Left out: the re-balancing of hot prefixes and the ordering of local queues.
#[derive(Debug)]
pub(in crate::simulate) struct Preble {
    times: PrefillTimes,
    /// The decisions of the window, the oldest first.
    window: VecDeque<Placed>,
    /// By worker.
    histories: Vec<History>,
}

/// A prompt that was given to a worker.
#[derive(Clone, Copy, Debug)]
struct Placed {
    at_ns: u64,
    worker: usize,
    load_ns: u64,
    prompt_tokens: u32,
    held_tokens: u32,
}

/// What a worker was given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct History {
    /// Of the window. Whole nanoseconds: sums of them do not drift.
    load_ns: u64,
    prompt_tokens: u64,
    held_tokens: u64,
    /// Tokens to compute, ever.
    uncached_tokens: u64,
}

impl History {
    fn hit_share(&self) -> f64 {
        self.held_tokens as f64 / self.prompt_tokens.max(1) as f64
    }
}

impl Preble {
    const WINDOW_NS: u64 = 180_000_000_000;
    const HIT_SHARE: f64 = 0.5;
    /// The expected output.
    const OUTPUT_TOKENS: f64 = 45.0;

    pub(in crate::simulate) fn new(times: PrefillTimes) -> Self {
        Self { histories: vec![History::default(); times.laws.len()], times, window: VecDeque::new() }
    }

    fn history(&self, worker: usize) -> History {
        self.histories.get(worker).copied().unwrap_or_default()
    }

    fn prefill_s(&self, question: &Question<'_>, candidate: &Candidate<'_>) -> f64 {
        self.times.prefill_s(candidate.worker, candidate.uncached(question), f64::from(candidate.held_tokens))
    }

    /// Seconds to decode the expected output.
    fn decode_s(&self, question: &Question<'_>, candidate: &Candidate<'_>) -> f64 {
        let kv_tokens = f64::from(question.prompt_tokens);
        self.times
            .laws
            .get(candidate.worker)
            .map_or(0.0, |law| Self::OUTPUT_TOKENS * law.step_s(0.0, 0.0, 1.0, kv_tokens))
    }

    /// Seconds that the evicted tokens are worth.
    fn eviction_s(&self, question: &Question<'_>, candidate: &Candidate<'_>) -> f64 {
        let history = self.history(candidate.worker);
        let unused_tokens = candidate.capacity_tokens.saturating_sub(history.uncached_tokens) as f64;
        let evicted_tokens = (candidate.uncached(question) - unused_tokens).max(0.0);
        self.times.prefill_s(candidate.worker, evicted_tokens, 0.0) * history.hit_share()
    }

    fn forget_old(&mut self, now_ns: u64) {
        while let Some(placed) = self.window.front().copied()
            && placed.at_ns + Self::WINDOW_NS < now_ns
        {
            self.window.pop_front();
            if let Some(history) = self.histories.get_mut(placed.worker) {
                history.load_ns -= placed.load_ns;
                history.prompt_tokens -= u64::from(placed.prompt_tokens);
                history.held_tokens -= u64::from(placed.held_tokens);
            }
        }
    }

    fn note(&mut self, question: &Question<'_>, candidate: &Candidate<'_>) {
        let load_s = self.prefill_s(question, candidate) + self.decode_s(question, candidate);
        let placed = Placed {
            at_ns: question.now_ns,
            worker: candidate.worker,
            load_ns: (load_s * 1e9) as u64,
            prompt_tokens: question.prompt_tokens,
            held_tokens: candidate.held_tokens,
        };
        let Some(history) = self.histories.get_mut(placed.worker) else { return };
        history.load_ns += placed.load_ns;
        history.prompt_tokens += u64::from(placed.prompt_tokens);
        history.held_tokens += u64::from(placed.held_tokens);
        history.uncached_tokens += u64::from(placed.prompt_tokens.saturating_sub(placed.held_tokens));
        self.window.push_back(placed);
    }
}

impl Rule for Preble {
    fn choose(
        &mut self,
        question: &Question<'_>,
        candidates: &[Candidate<'_>],
        chance: &mut Xoshiro256PlusPlus,
    ) -> usize {
        self.forget_old(question.now_ns);
        let load_s = |candidate: &Candidate<'_>| self.history(candidate.worker).load_ns as f64 / 1e9;
        let longest = candidates.iter().map(|candidate| candidate.held_tokens).max().unwrap_or(0);
        let best = if f64::from(longest) > Self::HIT_SHARE * f64::from(question.prompt_tokens) {
            lowest(candidates, chance, |candidate| match candidate.held_tokens == longest {
                true => (load_s(candidate), 0.0),
                false => NEVER,
            })
        } else {
            lowest(candidates, chance, |candidate| {
                let own_s = self.eviction_s(question, candidate) + self.prefill_s(question, candidate);
                (load_s(candidate) + own_s, 0.0)
            })
        };
        self.note(question, &candidates[best]);
        best
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{chance, idle, millisecond_a_token, prompt, workers};
    use super::*;

    fn asked_at(now_s: u64, prompt_tokens: u32) -> Question<'static> {
        Question { now_ns: now_s * 1_000_000_000, ..prompt(prompt_tokens) }
    }

    fn rule() -> Preble {
        Preble::new(millisecond_a_token(3))
    }

    #[test]
    fn more_than_half_of_the_prompt_is_exploited_and_less_is_explored() {
        let (mut rule, mut chance) = (rule(), chance());
        let mut choose = |tokens, of: &[(u32, u64)]| rule.choose(&prompt(tokens), &workers(of), &mut chance);
        assert_eq!(choose(1000, &[(501, 0), (0, 0), (501, 0)]) % 2, 0);
        assert_eq!(choose(9000, &[(0, 0), (4400, 0), (0, 0)]), 1, "explored: the least of load and own prefill");
        assert_eq!(choose(9000, &[(0, 0), (4400, 0), (0, 0)]) % 2, 0, "it has 4.6 s of load now");
        assert_eq!(choose(9000, &[(0, 0), (4501, 0), (4500, 0)]), 1, "exploited, whatever its load");
    }

    #[test]
    fn of_equal_matches_the_one_with_less_load_is_exploited() {
        let (mut rule, mut chance) = (rule(), chance());
        rule.choose(&prompt(100), &[idle(0)], &mut chance);
        let candidates = workers(&[(80, 0), (80, 0)]);
        assert_eq!(rule.choose(&prompt(100), &candidates, &mut chance), 1);
        assert_eq!(rule.choose(&prompt(500), &workers(&[(0, 0), (0, 0)]), &mut chance), 1, "0.1 s against 0.02 s");
    }

    #[test]
    fn decisions_count_for_three_minutes() {
        let (mut rule, mut chance) = (rule(), chance());
        rule.choose(&asked_at(0, 2000), &[idle(0)], &mut chance);
        rule.choose(&asked_at(10, 500), &[idle(1)], &mut chance);
        let two = [idle(0), idle(1)];
        assert_eq!(rule.history(0).load_ns, 2_000_000_000);
        assert_eq!(rule.choose(&asked_at(180, 100), &two, &mut chance), 1);
        assert_eq!(rule.choose(&asked_at(181, 100), &two, &mut chance), 0);
        let history = rule.history(0);
        assert_eq!((history.load_ns, history.prompt_tokens), (100_000_000, 100));
        assert_eq!(history.uncached_tokens, 2100, "the cache does not forget by time");
    }

    #[test]
    fn a_full_worker_with_hits_pays_for_what_it_evicts() {
        let (mut rule, mut chance) = (rule(), chance());
        let small = |worker, held_tokens| Candidate { capacity_tokens: 1000, held_tokens, ..idle(worker) };
        // Both are full and have the same load; only the prompts of worker 0 had hits.
        rule.choose(&prompt(1000), &[small(0, 0)], &mut chance);
        rule.choose(&prompt(1000), &[small(0, 1000)], &mut chance);
        rule.choose(&prompt(1000), &[small(1, 0)], &mut chance);
        let question = prompt(100);
        assert!((rule.eviction_s(&question, &small(0, 0)) - 0.05).abs() < 1e-9, "half of 100 tokens");
        assert_eq!(rule.eviction_s(&question, &small(1, 0)), 0.0);
        assert_eq!(rule.eviction_s(&question, &small(2, 0)), 0.0, "it is empty");
        assert_eq!(rule.choose(&question, &[small(0, 0), small(1, 0)], &mut chance), 1);
    }

    #[test]
    fn the_expected_output_is_part_of_the_load() {
        let mut times = millisecond_a_token(1);
        times.laws[0].decode.step_s = 0.01;
        let mut rule = Preble::new(times);
        rule.choose(&prompt(1000), &[idle(0)], &mut chance());
        assert_eq!(rule.history(0).load_ns, 1_450_000_000);
    }
}
