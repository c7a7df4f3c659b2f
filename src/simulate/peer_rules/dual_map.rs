//! The rule of DualMap.

use std::collections::VecDeque;

use rand_xoshiro::Xoshiro256PlusPlus;
use rustc_hash::FxHashMap;

use super::{Candidate, Question, Rule, lowest};
use crate::simulate::figures::Slo;
use crate::simulate::prompt_blocks::mix;
use crate::simulated_engine::Block;

/// `dualmap`: two hashes of the prompt's prefix name two workers. The one with the longer `hit` gets the prompt, unless
/// its predicted TTFT, `(A + u) / R`, exceeds the SLO; then, and if both hold as much, least `A + u` of the two. A
/// prompt without a whole prefix goes to the least `A + u` of all. Random among equals.
///
/// The hashed prefix is the shortest of 4, 8, 16 … 512 blocks that at most `2 / workers` of the last 1000 requests
/// have, or the longest of these that the prompt has. Workers are chosen by rendezvous hashing, so that only the
/// prompts of a worker that leaves move.
///
/// Source: DualMap, ICLR'26, arXiv 2602.06502; the constants are those of its port in Dynamo (#15450). AIBrix has one
/// too (`dualmap.go`).
///
/// Replaced: the SLO of the TTFT by the one that the simulation promises; the paper's queue of tokens by the router's
/// bookings; hash rings by rendezvous hashing, which chooses as evenly. Left out: the migration of queued requests,
/// since a booked prompt stays on its worker for every rule.
#[derive(Debug)]
pub(in crate::simulate) struct DualMap {
    peak_tokens_per_s: f64,
    slo: Slo,
    /// The prefixes of the last requests, the oldest first.
    recent: VecDeque<Prefixes>,
    /// How many of these requests have a prefix.
    counts: FxHashMap<u64, u32>,
}

/// The prefixes of a prompt that may be hashed, by their chains, and how many there are.
type Prefixes = ([u64; DualMap::PREFIXES_MAX], usize);

impl DualMap {
    /// Blocks of the shortest prefix; every further one has twice as many.
    const PREFIX_BLOCKS_MIN: usize = 4;
    const PREFIXES_MAX: usize = 8;
    const RECENT_MAX: usize = 1000;
    /// A prefix is hot if it has more than this many workers' share of the requests.
    const HOT_SHARES: f64 = 2.0;

    /// A rule for engines that prefill this many tokens a second, under a promise.
    pub(in crate::simulate) fn new(peak_tokens_per_s: f64, slo: Slo) -> Self {
        Self { peak_tokens_per_s, slo, recent: VecDeque::new(), counts: FxHashMap::default() }
    }

    fn prefixes(blocks: &[Block]) -> Prefixes {
        let (mut chains, mut count, mut depth) = ([0; Self::PREFIXES_MAX], 0, Self::PREFIX_BLOCKS_MIN);
        for chain in &mut chains {
            let Some(last) = blocks.get(depth - 1) else { break };
            (*chain, count, depth) = (last.chain, count + 1, depth * 2);
        }
        (chains, count)
    }

    /// Notes the request, and returns the prefix that names its workers, if it has one.
    fn prefix(&mut self, question: &Question<'_>, workers: usize) -> Option<u64> {
        let prefixes = Self::prefixes(question.blocks);
        if self.recent.len() == Self::RECENT_MAX
            && let Some((chains, count)) = self.recent.pop_front()
        {
            for chain in &chains[..count] {
                if let Some(requests) = self.counts.get_mut(chain) {
                    *requests -= 1;
                    if *requests == 0 {
                        self.counts.remove(chain);
                    }
                }
            }
        }
        self.recent.push_back(prefixes);
        let chains = &prefixes.0[..prefixes.1];
        chains.iter().for_each(|chain| *self.counts.entry(*chain).or_default() += 1);
        let requests_max = Self::HOT_SHARES / workers as f64 * self.recent.len() as f64;
        let is_cool = |chain: &&u64| self.counts.get(*chain).is_none_or(|count| f64::from(*count) <= requests_max);
        chains.iter().find(is_cool).or(chains.last()).copied()
    }

    /// Whether the worker would miss the SLO with the prompt.
    fn is_late(&self, question: &Question<'_>, candidate: &Candidate<'_>) -> bool {
        let promised_s = self.slo.ttft_s + self.slo.ttft_token_s * f64::from(question.prompt_tokens);
        candidate.prefill_work(question) / self.peak_tokens_per_s > promised_s
    }
}

/// The two workers of a prefix, by their places; `None` = there are not two.
fn pair(prefix: u64, candidates: &[Candidate<'_>]) -> Option<[usize; 2]> {
    let drawn = |hash: u64, but: Option<usize>| {
        let others = (0..candidates.len()).filter(|place| Some(*place) != but);
        others.max_by_key(|place| mix(mix(prefix, hash), candidates[*place].worker as u64))
    };
    let first = drawn(1, None)?;
    Some([first, drawn(2, Some(first))?])
}

impl Rule for DualMap {
    fn choose(
        &mut self,
        question: &Question<'_>,
        candidates: &[Candidate<'_>],
        chance: &mut Xoshiro256PlusPlus,
    ) -> usize {
        let least_work = |candidate: &Candidate<'_>| (candidate.prefill_work(question), 0.0);
        let prefix = self.prefix(question, candidates.len());
        let Some(places) = prefix.and_then(|prefix| pair(prefix, candidates)) else {
            return lowest(candidates, chance, least_work);
        };
        let two = places.map(|place| candidates[place]);
        let holder = usize::from(two[1].held_tokens > two[0].held_tokens);
        let has_holder = two[0].held_tokens != two[1].held_tokens;
        if has_holder && !self.is_late(question, &two[holder]) {
            return places[holder];
        }
        places[lowest(&two, chance, least_work)]
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{chance, chosen_places, idle, prompt, workers};
    use super::*;

    const SLO: Slo = Slo { ttft_s: 2.0, ttft_token_s: 0.0, tpot_s: 0.05 };

    fn blocks(conversation: u64, count: u64) -> Vec<Block> {
        (0..count).map(|at| Block { local: at, chain: mix(conversation, at) }).collect()
    }

    fn asked(blocks: &[Block]) -> Question<'_> {
        Question { blocks, ..prompt(100) }
    }

    #[test]
    fn a_prefix_always_names_the_same_two_workers() {
        let candidates = workers(&[(0, 0); 16]);
        let of_prefix = |prefix| pair(prefix, &candidates).expect("there are 16 workers");
        assert!((0..500).all(|prefix| of_prefix(prefix)[0] != of_prefix(prefix)[1]));
        let mut counts = [0; 16];
        (0..1600).flat_map(of_prefix).for_each(|place| counts[place] += 1);
        assert!(counts.iter().all(|count| (140..260).contains(count)), "{counts:?}");
        // Without worker 3, only its prefixes move.
        let fewer: Vec<_> = candidates.iter().copied().filter(|candidate| candidate.worker != 3).collect();
        for prefix in (0..500).filter(|prefix| !of_prefix(*prefix).contains(&3)) {
            let places = pair(prefix, &fewer).expect("there are 15 workers");
            assert_eq!(places.map(|place| fewer[place].worker), of_prefix(prefix));
        }
        assert_eq!(pair(5, &candidates[..1]), None);
    }

    #[test]
    fn the_holder_is_taken_until_it_would_miss_the_slo() {
        let blocks = blocks(1, 4);
        let question = asked(&blocks);
        let mut candidates = workers(&[(0, 0); 8]);
        let [first, second] = pair(blocks[3].chain, &candidates).expect("there are 8 workers");
        let choose = |of: &[Candidate<'_>]| chosen_places(&mut DualMap::new(1000.0, SLO), &question, of);
        assert_eq!(choose(&candidates), [first.min(second), first.max(second)], "neither holds it, both are idle");
        candidates[second] = Candidate { held_tokens: 40, prefill_tokens: 1940, ..idle(second) };
        assert_eq!(choose(&candidates), [second], "2 s exactly");
        candidates[second].prefill_tokens = 1941;
        assert_eq!(choose(&candidates), [first]);
        candidates[first].prefill_tokens = 5000;
        assert_eq!(choose(&candidates), [second], "the lesser backlog of two that are late");
    }

    #[test]
    fn a_hot_prefix_is_hashed_deeper() {
        // Every conversation begins with the same 4 blocks.
        let of = |conversation| {
            let mut all = blocks(0, 4);
            all.extend(blocks(conversation, 16).split_off(4));
            all
        };
        let mut rule = DualMap::new(1000.0, SLO);
        for conversation in 1..=1500 {
            let blocks = of(conversation);
            // Of fewer than 4 requests, a single one is more than a quarter: everything is hot.
            let expected = if conversation < 4 { 15 } else { 7 };
            assert_eq!(rule.prefix(&asked(&blocks), 8), Some(blocks[expected].chain), "{conversation}");
        }
        assert_eq!((rule.recent.len(), rule.counts.len()), (1000, 1 + 2 * 1000), "old requests are forgotten");
        let blocks = of(9000);
        // With two workers, no prefix is hot.
        assert_eq!(rule.prefix(&asked(&blocks), 2), Some(blocks[3].chain));
    }

    #[test]
    fn a_prompt_without_a_prefix_goes_to_the_least_work() {
        let mut candidates = workers(&[(0, 0), (30, 0), (0, 0)]);
        let blocks = blocks(1, 3);
        assert_eq!(DualMap::new(1000.0, SLO).choose(&asked(&blocks), &candidates, &mut chance()), 1);
        candidates[1].prefill_tokens = 31;
        assert_eq!(chosen_places(&mut DualMap::new(1000.0, SLO), &asked(&blocks), &candidates), [0, 2]);
    }
}
