//! What is asked of the simulated fleet: sessions of requests, read from a trace or generated from a seed.

pub mod agent_sessions;
mod draws;
pub mod generated;
pub mod generators;
pub mod lengths;
mod lines;
pub mod mooncake;
#[cfg(test)]
mod summary;

use std::fmt;
use std::ops::Range;

use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

pub use draws::Lognormal;
#[cfg(test)]
use summary::Summary;

/// Tokens of a prompt, at most. Readers refuse longer ones; generators end the session.
pub const PROMPT_TOKENS_MAX: u32 = 1 << 22;
/// Tokens of an output, at most. Readers refuse longer ones.
pub const OUTPUT_TOKENS_MAX: u32 = 1 << 20;

/// Jitter moves a session by at most this many mean gaps between two sessions.
const JITTER_GAPS: f64 = 4.0;

/// Tokens of one content: `tokens` of them, from its token `from` on. Two prompts share a block if their spans name the
/// same tokens of the same contents at the same places of the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The content: a document, a system prompt, one user's message, the output of one turn.
    pub content: u64,
    /// The first token of the content that the span names.
    pub from: u64,
    /// Tokens.
    pub tokens: u32,
}

impl Span {
    /// The first token of the content after the span.
    fn end(&self) -> u64 {
        self.from + u64::from(self.tokens)
    }

    /// Tokens of this span and the next as one, if the next continues this one.
    fn tokens_with(&self, next: &Self) -> Option<u32> {
        let continues = self.content == next.content && self.end() == next.from;
        if continues { self.tokens.checked_add(next.tokens) } else { None }
    }
}

/// Appends a span to a prompt: as part of the last one, if it continues that one.
pub(in crate::simulate) fn append(prompt: &mut Vec<Span>, span: Span) {
    match prompt.last_mut() {
        _ if span.tokens == 0 => {}
        Some(last) if last.tokens_with(&span).is_some() => last.tokens += span.tokens,
        _ => prompt.push(span),
    }
}

/// The spans of `tokens` tokens of a prompt, after its first `from`; fewer, if the prompt ends before.
pub(in crate::simulate) fn slice(prompt: &[Span], from: u32, tokens: u32) -> Vec<Span> {
    let (mut skip, mut left, mut taken) = (from, tokens, Vec::new());
    for span in prompt {
        let skipped = skip.min(span.tokens);
        skip -= skipped;
        let tokens = left.min(span.tokens - skipped);
        left -= tokens;
        append(&mut taken, Span { content: span.content, from: span.from + u64::from(skipped), tokens });
        if left == 0 {
            break;
        }
    }
    taken
}

/// One request of a session.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// Seconds between the end of the turn before and the arrival of this one; 0 for the first turn.
    pub think_s: f64,
    /// The prompt.
    pub prompt: Vec<Span>,
    /// The output, which the next turn's prompt may name.
    pub output: Span,
}

impl Turn {
    /// Tokens of the prompt.
    #[must_use]
    pub fn prompt_tokens(&self) -> u32 {
        self.prompt.iter().map(|span| span.tokens).sum()
    }

    /// The spans of the prompt and the output, with those merged that continue one another. Hash blocks over these: the
    /// next turn's prompt may name prompt and output as one span, and a block across the border must be the same in
    /// both.
    pub fn spans(&self) -> impl Iterator<Item = Span> + '_ {
        let mut spans = self.prompt.iter().chain([&self.output]).copied().filter(|span| span.tokens > 0).peekable();
        std::iter::from_fn(move || {
            let mut merged = spans.next()?;
            while let Some(tokens) = spans.peek().and_then(|next| merged.tokens_with(next)) {
                merged.tokens = tokens;
                spans.next();
            }
            Some(merged)
        })
    }
}

/// Requests of one user, each of which waits for the one before. An independent request is a session of one turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    /// The arrival of the first turn, seconds from the beginning of the trace.
    pub start_s: f64,
    /// The requests, in order; at least one.
    pub turns: Vec<Turn>,
}

/// When sessions begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// At their own times.
    Timed,
    /// This many are live at a time: when one ends, the next begins.
    Live(usize),
}

/// Everything that is asked of a fleet in one run.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// By `start_s`, ascending.
    pub sessions: Vec<Session>,
    /// When they begin.
    pub arrivals: Arrivals,
}

impl Workload {
    /// A workload whose first session begins at 0. Sessions that begin at the same time keep their order.
    pub(in crate::simulate) fn sorted(mut sessions: Vec<Session>, arrivals: Arrivals) -> Self {
        sessions.sort_by(|a, b| a.start_s.total_cmp(&b.start_s));
        let first_s = sessions.first().map_or(0.0, |session| session.start_s);
        for session in &mut sessions {
            session.start_s -= first_s;
        }
        Self { sessions, arrivals }
    }

    /// The same sessions, beginning `rate` times as often. Think times stay. A rate that is not above 0 and finite
    /// changes nothing.
    #[must_use]
    pub fn scaled(mut self, rate: f64) -> Self {
        if rate > 0.0 && rate.is_finite() {
            for session in &mut self.sessions {
                session.start_s = (session.start_s / rate).min(f64::MAX);
            }
        }
        self
    }

    /// The same start times, with the sessions in another order. For runs that differ in nothing but their seed.
    #[must_use]
    pub fn shuffled(mut self, seed: u64) -> Self {
        let starts: Vec<f64> = self.sessions.iter().map(|session| session.start_s).collect();
        self.sessions.shuffle(&mut Xoshiro256PlusPlus::seed_from_u64(seed));
        for (session, start_s) in self.sessions.iter_mut().zip(starts) {
            session.start_s = start_s;
        }
        self
    }

    /// The same sessions, each of which begins up to four mean gaps later, at random by `seed`. For runs of a workload with
    /// exact times that differ in nothing but their seed.
    #[must_use]
    pub fn jittered(mut self, seed: u64) -> Self {
        let end_s = self.sessions.last().map_or(0.0, |session| session.start_s);
        let grain_s = JITTER_GAPS * end_s / self.sessions.len().max(1) as f64;
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        self.sessions.iter_mut().for_each(|session| session.start_s += rng.random::<f64>() * grain_s);
        Self::sorted(self.sessions, self.arrivals)
    }

    /// Requests of all sessions.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.sessions.iter().map(|session| session.turns.len()).sum()
    }

    /// The sessions of a range of places, for instance one half of a trace. The first of them begins at 0. Places
    /// beyond the last session are left out.
    #[must_use]
    pub fn take(&self, places: Range<usize>) -> Self {
        let end = places.end.min(self.sessions.len());
        let taken = self.sessions.get(places.start.min(end)..end).unwrap_or_default();
        Self::sorted(taken.to_vec(), self.arrivals)
    }

    /// Figures of the workload. `block_size` is the tokens of a block of the infinite cache that they assume; 0 counts
    /// as 1. Takes about 16 bytes of memory per different block, so a million long prompts need a coarse block.
    #[cfg(test)]
    fn summary(&self, block_size: u32) -> Summary {
        Summary::of(self, block_size.max(1))
    }
}

/// A line of a trace that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceError {
    /// From 1.
    pub line: usize,
    /// What is wrong with it, and what it should be.
    pub reason: String,
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(content: u64, from: u64, tokens: u32) -> Span {
        Span { content, from, tokens }
    }

    fn session(start_s: f64, content: u64) -> Session {
        let turn = |think_s, tokens| Turn {
            think_s,
            prompt: vec![span(content, 0, tokens)],
            output: span(content, u64::from(tokens), 5),
        };
        Session { start_s, turns: vec![turn(0.0, 10), turn(3.0, 20)] }
    }

    fn workload() -> Workload {
        let sessions = (0..4_u32).map(|i| session(10.0 * f64::from(i), u64::from(i))).collect();
        Workload { sessions, arrivals: Arrivals::Timed }
    }

    #[test]
    fn scaling_divides_start_times_and_keeps_think_times() {
        let scaled = workload().scaled(2.0);
        assert_eq!(scaled.sessions.iter().map(|s| s.start_s).collect::<Vec<_>>(), [0.0, 5.0, 10.0, 15.0]);
        assert_eq!(scaled.sessions[3].turns, workload().sessions[3].turns);
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(workload().scaled(rate), workload());
        }
    }

    #[test]
    fn a_half_begins_at_zero_and_ends_with_the_last_session() {
        let half = workload().take(2..100);
        assert_eq!(half.sessions.len(), 2);
        assert_eq!(half.requests(), 4);
        assert_eq!((half.sessions[0].start_s, half.sessions[1].start_s), (0.0, 10.0));
        assert_eq!(half.sessions[0].turns, workload().sessions[2].turns);
        assert!(workload().take(9..12).sessions.is_empty());
    }

    #[test]
    fn jitter_moves_sessions_by_less_than_its_grain_and_keeps_their_turns() {
        let jittered = workload().jittered(7);
        assert_eq!((&jittered, jittered.sessions.len()), (&workload().jittered(7), 4));
        assert_ne!(jittered, workload().jittered(8));
        assert!(jittered.sessions.is_sorted_by(|a, b| a.start_s <= b.start_s) && jittered.sessions[0].start_s == 0.0);
        let start_s = |of: &Workload, content: u64| {
            of.sessions.iter().find(|s| s.turns[0].output.content == content).map_or(f64::NAN, |s| s.start_s)
        };
        let moved: Vec<f64> = (0..4).map(|at| start_s(&jittered, at) - start_s(&workload(), at)).collect();
        let (least, most) = moved.iter().fold((f64::MAX, f64::MIN), |(a, b), moved| (a.min(*moved), b.max(*moved)));
        assert!(most - least < 30.0, "{moved:?}");
        assert!(Workload::sorted(Vec::new(), Arrivals::Timed).jittered(1).sessions.is_empty());
    }

    #[test]
    fn shuffling_keeps_start_times_and_sessions() {
        let shuffled = workload().shuffled(3);
        let starts = |w: &Workload| w.sessions.iter().map(|s| s.start_s).collect::<Vec<_>>();
        assert_eq!(starts(&shuffled), starts(&workload()));
        let mut contents: Vec<u64> = shuffled.sessions.iter().map(|s| s.turns[0].output.content).collect();
        assert_eq!(shuffled, workload().shuffled(3));
        contents.sort_unstable();
        assert_eq!(contents, [0, 1, 2, 3]);
    }

    #[test]
    fn an_output_that_continues_the_prompt_is_one_span_with_it() {
        let prompt = vec![span(1, 0, 10), span(2, 0, 0), span(1, 10, 5), span(3, 7, 2)];
        let turn = Turn { think_s: 0.0, prompt, output: span(3, 9, 4) };
        assert_eq!(turn.spans().collect::<Vec<_>>(), [span(1, 0, 15), span(3, 7, 6)]);
    }
}
