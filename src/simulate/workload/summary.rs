//! Figures of a workload: sizes, duration, and the reuse that an infinite cache would find.

use std::collections::HashSet;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

use super::{Span, Turn, Workload};

/// Figures of a workload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Summary {
    /// Requests of all sessions.
    pub(super) requests: usize,
    /// Sessions.
    pub(super) sessions: usize,
    /// Tokens of a prompt.
    pub(super) prompt_tokens: Distribution,
    /// Tokens of an output.
    pub(super) output_tokens: Distribution,
    /// Seconds between the start of the first session and that of the last.
    pub(super) span_s: f64,
    /// The share, from 0 to 1, of prompt tokens that are in whole blocks of earlier prompts or outputs, sessions taken
    /// one after another: what one infinite cache would hold.
    pub(super) reusable_share: f64,
}

/// Mean and percentiles of a count of tokens; 0 without requests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Distribution {
    /// The mean.
    pub(super) mean: f64,
    /// The median.
    pub(super) p50: u32,
    /// The 99th percentile.
    pub(super) p99: u32,
}

impl Distribution {
    fn of(mut tokens: Vec<u32>) -> Self {
        tokens.sort_unstable();
        let sum: u64 = tokens.iter().map(|&tokens| u64::from(tokens)).sum();
        let percentile = |percent: usize| tokens.get(tokens.len().saturating_sub(1) * percent / 100).copied();
        Self {
            mean: sum as f64 / tokens.len().max(1) as f64,
            p50: percentile(50).unwrap_or(0),
            p99: percentile(99).unwrap_or(0),
        }
    }
}

impl Summary {
    pub(super) fn of(workload: &Workload, block_size: u32) -> Self {
        let turns = || workload.sessions.iter().flat_map(|session| &session.turns);
        let start_s = |session: Option<&super::Session>| session.map_or(0.0, |session| session.start_s);
        Self {
            requests: workload.requests(),
            sessions: workload.sessions.len(),
            prompt_tokens: Distribution::of(turns().map(Turn::prompt_tokens).collect()),
            output_tokens: Distribution::of(turns().map(|turn| turn.output.tokens).collect()),
            span_s: start_s(workload.sessions.last()) - start_s(workload.sessions.first()),
            reusable_share: reusable_share(turns(), block_size),
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (prompt, output) = (&self.prompt_tokens, &self.output_tokens);
        write!(
            f,
            "{} requests in {} sessions over {:.0} s; prompts mean {:.0}, p50 {}, p99 {}; outputs mean {:.0}, p50 {}, \
             p99 {}; {:.2} % of prompt tokens reusable",
            self.requests,
            self.sessions,
            self.span_s,
            prompt.mean,
            prompt.p50,
            prompt.p99,
            output.mean,
            output.p50,
            output.p99,
            100.0 * self.reusable_share
        )
    }
}

/// Hashes of blocks are mixed already, so the set takes them as they are.
#[derive(Default)]
struct MixedHasher(u64);

impl Hasher for MixedHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = mix(self.0, u64::from(byte));
        }
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// Mixes two words; equal results mean equal words for all purposes of a summary.
const fn mix(a: u64, b: u64) -> u64 {
    let x = (a ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xff51_afd7_ed55_8ccd) ^ b.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    let x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 32)
}

fn reusable_share<'a>(turns: impl Iterator<Item = &'a Turn>, block_size: u32) -> f64 {
    let mut seen: HashSet<u64, BuildHasherDefault<MixedHasher>> = HashSet::default();
    let (mut reusable, mut all) = (0_u64, 0_u64);
    let mut blocks = Vec::new();
    for turn in turns {
        let prompt_tokens = turn.prompt_tokens();
        blocks.clear();
        chain(turn.spans(), block_size, &mut blocks);
        all += u64::from(prompt_tokens);
        let prompt_blocks = (prompt_tokens / block_size) as usize;
        // A block stands for all before it, so the blocks that an earlier request had are the first ones.
        let hits = blocks.iter().take(prompt_blocks).take_while(|block| seen.contains(block)).count();
        reusable += hits as u64 * u64::from(block_size);
        seen.extend(blocks.iter().skip(hits));
    }
    reusable as f64 / all.max(1) as f64
}

/// Appends the hashes of the whole blocks, each of which stands for all tokens up to its end. The last token of a turn
/// is never computed, so it is in no block.
fn chain(spans: impl Iterator<Item = Span>, block_size: u32, blocks: &mut Vec<u64>) {
    let (mut hash, mut filled) = (0_u64, 0_u32);
    let mut spans = spans.peekable();
    while let Some(mut span) = spans.next() {
        if spans.peek().is_none() {
            span.tokens -= 1;
        }
        while span.tokens > 0 {
            let taken = span.tokens.min(block_size - filled);
            hash = mix(mix(hash, mix(span.content, span.from)), u64::from(filled) << 32 | u64::from(taken));
            (span.from, span.tokens, filled) = (span.from + u64::from(taken), span.tokens - taken, filled + taken);
            if filled == block_size {
                blocks.push(hash);
                filled = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Arrivals, Session};
    use super::*;

    fn span(content: u64, from: u64, tokens: u32) -> Span {
        Span { content, from, tokens }
    }

    fn workload(turns: Vec<Turn>) -> Workload {
        Workload { sessions: vec![Session { start_s: 2.0, turns }], arrivals: Arrivals::Timed }
    }

    #[test]
    fn an_empty_workload_has_a_summary_of_zeros() {
        let summary = Workload { sessions: Vec::new(), arrivals: Arrivals::Timed }.summary(0);
        assert_eq!((summary.requests, summary.prompt_tokens), (0, Distribution::default()));
        assert_eq!((summary.span_s, summary.reusable_share), (0.0, 0.0));
    }

    #[test]
    fn percentiles_are_of_sorted_tokens() {
        let of = Distribution::of((0..=100).rev().collect());
        assert_eq!(of, Distribution { mean: 50.0, p50: 50, p99: 99 });
    }

    #[test]
    fn outputs_count_as_cached_for_the_next_turn_except_their_last_token() {
        let turn = |prompt, output| Turn { think_s: 0.0, prompt, output };
        let turns = vec![
            turn(vec![span(1, 0, 30)], span(1, 30, 10)),
            // 40 tokens are known, of which 39 were computed: two whole blocks of 16.
            turn(vec![span(1, 0, 48)], span(1, 48, 10)),
        ];
        assert!((workload(turns).summary(16).reusable_share - 32.0 / 78.0).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn reuse_is_that_of_comparing_token_by_token(
            prompts in prop::collection::vec(prop::collection::vec((0..2_u64, 0..6_u64, 1..9_u32), 1..5), 1..12),
            block_size in 1..7_u32,
        ) {
            let turns: Vec<Turn> = prompts
                .iter()
                .map(|spans| Turn {
                    think_s: 0.0,
                    prompt: spans.iter().map(|&(content, from, tokens)| span(content, from, tokens)).collect(),
                    output: span(0, 3, 4),
                })
                .collect();
            let tokens = |turn: &Turn| -> Vec<(u64, u64)> {
                let spans = turn.prompt.iter().chain([&turn.output]);
                spans.flat_map(|span| (span.from..span.end()).map(|at| (span.content, at))).collect()
            };
            let (mut computed, mut reusable, mut all) = (Vec::<Vec<(u64, u64)>>::new(), 0_u32, 0_u32);
            for turn in &turns {
                let known = tokens(turn);
                let prompt = &known[..turn.prompt_tokens() as usize];
                let equal = |old: &Vec<(u64, u64)>| old.iter().zip(prompt).take_while(|(a, b)| a == b).count() as u32;
                let best = computed.iter().map(|old| equal(old) / block_size * block_size).max().unwrap_or(0);
                reusable += best;
                all += turn.prompt_tokens();
                computed.push(known[..known.len() - 1].to_vec());
            }
            let expected = f64::from(reusable) / f64::from(all);
            prop_assert!((workload(turns).summary(block_size).reusable_share - expected).abs() < 1e-9);
        }
    }
}
