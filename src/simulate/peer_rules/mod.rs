//! The rules of other routers, with the same facts for all of them: what our router booked, what its index says that
//! workers hold, and the virtual time. No rule sees an engine's own state.
//!
//! In the formulas of this module: `L` = tokens of the prompt, `hit` = its leading tokens that the worker holds,
//! `u = L - hit`, `A` = tokens booked on the worker whose first token has not come, each prompt's uncached ones in
//! full, `B` = requests in flight, `W` = those of them without a first token.

mod dual_map;
mod llm_d;
mod load_only;
mod mooncake;
mod preble;
mod prefill_work;
mod thresholds;
mod tried_terms;

use rand::RngExt;
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::engine_law::EngineLaw;
use crate::load::RecentWork;
use crate::simulated_engine::Block;

pub(super) use dual_map::DualMap;
pub(super) use llm_d::{LlmD, LlmDLegacy};
pub(super) use load_only::{LeastLoaded, RoundRobin, VllmDp};
pub(super) use mooncake::{Mooncake, MooncakeDecode};
pub(super) use preble::Preble;
pub(super) use prefill_work::{Lmetric, Lpwl};
pub(super) use thresholds::{Aibrix, Smg, TwoTier};
pub use tried_terms::TermWeights;
pub(super) use tried_terms::TriedTerms;

/// The request to be placed.
pub(super) struct Question<'a> {
    /// Its number among the requests of the run.
    pub(super) id: u64,
    pub(super) prompt_tokens: u32,
    /// The whole blocks of the prompt.
    pub(super) blocks: &'a [Block],
    pub(super) now_ns: u64,
}

/// What the router books for a worker, beside the product's own load.
#[derive(Clone, Debug, Default)]
pub(super) struct Booked {
    /// Prefills booked and not yet complete: (request, tokens to compute, tokens before them, booked at).
    pub(super) prefills: Vec<(u64, u32, u32, u64)>,
    /// Since when the first of them may be running, ns.
    pub(super) since_ns: u64,
    pub(super) requests: u32,
}

/// A worker that may run the prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate<'a> {
    /// Its number in the fleet, from 0.
    pub(super) worker: usize,
    /// Leading tokens of the prompt that it holds, by the index; at most those of the prompt.
    pub(super) held_tokens: u32,
    /// Leading tokens of the prompt that requests in flight on it have too.
    pub(super) running_tokens: u32,
    /// Booked tokens to prefill, in full until the first token: `A`.
    pub(super) prefill_tokens: u64,
    /// Requests in flight: `B`.
    pub(super) requests: u64,
    /// Tokens of the prompts in flight.
    pub(super) kv_tokens: u64,
    /// Tokens that its KV memory holds.
    pub(super) capacity_tokens: u64,
    /// What it was given lately.
    pub(super) recent: RecentWork,
    /// Its prefills one by one.
    pub(super) booked: &'a Booked,
}

impl Candidate<'_> {
    /// Tokens of the prompt that it would compute: `u`.
    fn uncached(&self, question: &Question<'_>) -> f64 {
        f64::from(question.prompt_tokens.saturating_sub(self.held_tokens))
    }

    /// Tokens to compute until the prompt's first token: `A + u`.
    fn prefill_work(&self, question: &Question<'_>) -> f64 {
        self.prefill_tokens as f64 + self.uncached(question)
    }

    /// The held share of the prompt, 0 to 1: `hit / L`.
    fn hit_share(&self, question: &Question<'_>) -> f64 {
        f64::from(self.held_tokens) / f64::from(question.prompt_tokens.max(1))
    }

    /// Requests without a first token: `W`.
    fn waiting(&self) -> f64 {
        self.booked.prefills.len() as f64
    }

    /// Requests with a first token: `B - W`.
    fn decoding(&self) -> f64 {
        (self.requests as f64 - self.waiting()).max(0.0)
    }
}

/// A rule: which candidate gets the prompt. Every choice is booked.
pub(super) trait Rule {
    /// The place of the chosen one among `candidates`, of which there is at least one.
    fn choose(
        &mut self,
        question: &Question<'_>,
        candidates: &[Candidate<'_>],
        chance: &mut Xoshiro256PlusPlus,
    ) -> usize;

    /// Seconds to the first token that it predicted for the last choice; NaN = it predicts none.
    fn predicted_ttft_s(&self) -> f64 {
        f64::NAN
    }
}

/// The prefill time of every worker, as an operator measured it before.
#[derive(Clone, Debug)]
pub(super) struct PrefillTimes {
    /// By worker.
    pub(super) laws: Vec<EngineLaw>,
    /// Tokens of one step.
    pub(super) step_tokens_max: f64,
}

impl PrefillTimes {
    /// Seconds to compute `uncached` tokens behind `cached` ones on a worker.
    fn prefill_s(&self, worker: usize, uncached: f64, cached: f64) -> f64 {
        self.laws.get(worker).map_or(0.0, |law| law.prefill_s(uncached, cached, self.step_tokens_max))
    }

    /// Tokens per second of one full step without a prefix, on the first worker: what a calibration run measures.
    pub(super) fn peak_tokens_per_s(&self) -> f64 {
        self.step_tokens_max / self.prefill_s(0, self.step_tokens_max, 0.0).max(1e-9)
    }
}

/// The candidate with the lowest key; a random one of equals.
fn lowest<'a>(
    candidates: &[Candidate<'a>],
    chance: &mut Xoshiro256PlusPlus,
    mut key: impl FnMut(&Candidate<'a>) -> (f64, f64),
) -> usize {
    let (mut best, mut least, mut ties) = (0, (f64::INFINITY, f64::INFINITY), 0);
    for (at, candidate) in candidates.iter().enumerate() {
        let key = key(candidate);
        if key < least {
            (best, least, ties) = (at, key, 1);
        } else if key == least {
            ties += 1;
            if chance.random_range(0..ties) == 0 {
                best = at;
            }
        }
    }
    best
}

/// The key of a candidate that is not to be chosen.
const NEVER: (f64, f64) = (f64::INFINITY, f64::INFINITY);

/// The fewest and the most requests in flight on a candidate.
fn request_bounds(candidates: &[Candidate<'_>]) -> (u64, u64) {
    let counts = candidates.iter().map(|candidate| candidate.requests);
    counts.fold((u64::MAX, 0), |(least, most), count| (least.min(count), most.max(count)))
}

#[cfg(test)]
mod fixtures {
    use rand::SeedableRng;

    use super::*;

    static IDLE: Booked = Booked { prefills: Vec::new(), since_ns: 0, requests: 0 };

    /// An idle worker with a KV memory of 100 000 tokens.
    pub(super) fn idle(worker: usize) -> Candidate<'static> {
        Candidate {
            worker,
            held_tokens: 0,
            running_tokens: 0,
            prefill_tokens: 0,
            requests: 0,
            kv_tokens: 0,
            capacity_tokens: 100_000,
            recent: RecentWork::default(),
            booked: &IDLE,
        }
    }

    /// Idle workers that hold these leading tokens and have these requests in flight.
    pub(super) fn workers(held_and_requests: &[(u32, u64)]) -> Vec<Candidate<'static>> {
        let of = |(worker, (held_tokens, requests)): (usize, &(u32, u64))| Candidate {
            held_tokens: *held_tokens,
            requests: *requests,
            ..idle(worker)
        };
        held_and_requests.iter().enumerate().map(of).collect()
    }

    /// Bookings of prefills of this many tokens, none cached.
    pub(super) fn booked(prefills: &[u32]) -> Booked {
        let prefills: Vec<_> = prefills.iter().enumerate().map(|(id, tokens)| (id as u64, *tokens, 0, 0)).collect();
        Booked { requests: prefills.len() as u32, since_ns: 0, prefills }
    }

    /// A prompt without whole blocks, at time 0.
    pub(super) fn prompt(prompt_tokens: u32) -> Question<'static> {
        Question { id: 0, prompt_tokens, blocks: &[], now_ns: 0 }
    }

    /// A law under which every token takes a millisecond.
    pub(super) fn millisecond_a_token(workers: usize) -> PrefillTimes {
        let law = EngineLaw::of([0.0, 1e-3, 0.0], [0.0; 3]);
        PrefillTimes { laws: vec![law; workers], step_tokens_max: 1000.0 }
    }

    pub(super) fn chance() -> Xoshiro256PlusPlus {
        Xoshiro256PlusPlus::seed_from_u64(7)
    }

    /// The places that a rule chooses in 200 trials of one question, without repetition, ascending.
    pub(super) fn chosen_places(rule: &mut dyn Rule, question: &Question<'_>, of: &[Candidate<'_>]) -> Vec<usize> {
        let mut chance = chance();
        let mut places: Vec<usize> = (0..200).map(|_| rule.choose(question, of, &mut chance)).collect();
        places.sort_unstable();
        places.dedup();
        places
    }
}

#[cfg(test)]
mod tests {
    use super::fixtures::{booked, chance, idle, prompt};
    use super::*;

    #[test]
    fn equals_alone_are_drawn_at_random() {
        let candidates: Vec<_> = (0..4).map(idle).collect();
        let mut chance = chance();
        let mut counts = [0_u32; 4];
        for _ in 0..3000 {
            let key = |candidate: &Candidate<'_>| if candidate.worker == 2 { (1.0, 0.0) } else { (0.0, 5.0) };
            counts[lowest(&candidates, &mut chance, key)] += 1;
        }
        assert_eq!(counts[2], 0);
        assert!([0, 1, 3].into_iter().all(|at: usize| (900..1100).contains(&counts[at])), "{counts:?}");
    }

    #[test]
    fn the_second_part_of_a_key_decides_between_equals() {
        let candidates: Vec<_> = (0..3).map(idle).collect();
        let key = |candidate: &Candidate<'_>| (1.0, -(candidate.worker as f64));
        assert_eq!(lowest(&candidates, &mut chance(), key), 2);
    }

    #[test]
    fn requests_without_a_first_token_are_waiting() {
        let booked = booked(&[10, 20]);
        let candidate = Candidate { requests: 5, booked: &booked, held_tokens: 30, prefill_tokens: 7, ..idle(0) };
        assert_eq!((candidate.waiting(), candidate.decoding()), (2.0, 3.0));
        assert_eq!((candidate.uncached(&prompt(100)), candidate.prefill_work(&prompt(100))), (70.0, 77.0));
        assert_eq!(candidate.hit_share(&prompt(120)), 0.25);
    }
}
