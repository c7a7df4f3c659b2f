//! A sample of sessions as the whole load: each session also runs at other times, as often as sessions were left out.
//!
//! A copy has the lengths, the outputs and the think times of its session. What prompts of several users share, as a system
//! prompt, copies share too; what is one user's own is another content in each copy. Copies of a load begin within a stretch
//! of the recorded time after their session, so that its rate keeps the shape that it had.

use hashbrown::HashMap;

use crate::simulate::workload::{Session, Span, Turn, append, slice};

/// Copies begin within this time after their session, seconds, or within a tenth of the recorded time if that is longer.
const WINDOW_S: f64 = 600.0;
/// Multiples of it, modulo 1, are spread evenly, however many there are.
const GOLDEN_RATIO: f64 = 0.618_033_988_749_895;

/// The session's user, as far as a journal tells: a session, or a chain of prompts that continue each other.
pub(super) type Owner = u32;

/// How far each content is shared: the place in the prompt up to which two owners have it.
struct Shared(HashMap<u64, u64>);

impl Shared {
    fn of(sessions: &[(Owner, Session)]) -> Self {
        // By content: the owner with the longest use, its end, and the longest end of another.
        let mut uses: HashMap<u64, (Owner, u64, u64)> = HashMap::new();
        for (owner, span) in sessions.iter().flat_map(|(owner, session)| {
            let spans = session.turns.iter().flat_map(|turn| turn.prompt.iter().chain([&turn.output]));
            spans.map(move |span| (*owner, *span))
        }) {
            let end = span.from + u64::from(span.tokens);
            let (longest, first, second) = uses.entry(span.content).or_insert((owner, 0, 0));
            match (*longest == owner, end > *first) {
                (true, _) => *first = end.max(*first),
                (false, true) => (*longest, *first, *second) = (owner, end, *first),
                (false, false) => *second = end.max(*second),
            }
        }
        Self(uses.into_iter().map(|(content, (_, _, second))| (content, second)).collect())
    }

    /// The tokens of a span that are shared.
    fn tokens(&self, span: &Span) -> u32 {
        let shared = self.0.get(&span.content).copied().unwrap_or(0).saturating_sub(span.from);
        u32::try_from(shared).unwrap_or(u32::MAX).min(span.tokens)
    }

    /// A turn of a copy, whose own contents are `own` beyond those of the session.
    fn copy(&self, turn: &Turn, own: u64) -> Turn {
        let mut prompt = Vec::with_capacity(turn.prompt.len() + 1);
        for span in &turn.prompt {
            let shared = self.tokens(span);
            append(&mut prompt, Span { tokens: shared, ..*span });
            for rest in slice(std::slice::from_ref(span), shared, span.tokens - shared) {
                append(&mut prompt, Span { content: rest.content + own, ..rest });
            }
        }
        let is_shared = self.tokens(&turn.output) == turn.output.tokens;
        let output = Span { content: turn.output.content + if is_shared { 0 } else { own }, ..turn.output };
        Turn { think_s: turn.think_s, prompt, output }
    }
}

/// The sessions of the whole load. `sample` is the share that was recorded, and `contents` a number above all contents.
pub(super) fn with_copies(sessions: Vec<(Owner, Session)>, sample: f64, contents: u64) -> Vec<Session> {
    let end_s = sessions.iter().map(|(_, session)| session.start_s).fold(0.0, f64::max);
    let window_s = WINDOW_S.max(end_s / 10.0).min(end_s);
    let shared = if sample < 1.0 { Shared::of(&sessions) } else { Shared(HashMap::new()) };
    let times = 1.0 / sample;
    let mut all = Vec::with_capacity((sessions.len() as f64 * times) as usize);
    for copy in 1..times.ceil() as u64 {
        let share = (times - copy as f64).min(1.0);
        let later_s = window_s * (copy as f64 * GOLDEN_RATIO).fract();
        for (at, (_, session)) in sessions.iter().enumerate() {
            // Of the last copy a share of the sessions, which is spread evenly.
            if ((at + 1) as f64 * GOLDEN_RATIO).fract() < share {
                let turns = session.turns.iter().map(|turn| shared.copy(turn, copy * contents)).collect();
                let start_s = if end_s > 0.0 { (session.start_s + later_s) % end_s } else { 0.0 };
                all.push(Session { start_s, turns });
            }
        }
    }
    all.extend(sessions.into_iter().map(|(_, session)| session));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(content: u64, from: u64, tokens: u32) -> Span {
        Span { content, from, tokens }
    }

    /// A session of one turn behind the first 100 tokens of content 0.
    fn session(at: u64) -> (Owner, Session) {
        let prompt = vec![span(0, 0, 100), span(1 + at, 100, 50)];
        let turn = Turn { think_s: 0.0, prompt, output: span(1 + at, 150, 10) };
        (at as Owner, Session { start_s: at as f64 * 10.0, turns: vec![turn] })
    }

    #[test]
    fn copies_share_what_users_share_and_nothing_else() {
        let all = with_copies((0..40).map(session).collect(), 0.25, 1000);
        assert_eq!(all.len(), 160);
        let mut own: Vec<u64> = all.iter().map(|session| session.turns[0].output.content).collect();
        assert!(all.iter().all(|session| session.turns[0].prompt[0] == span(0, 0, 100)));
        assert!(all.iter().all(|session| session.turns[0].prompt[1].content == session.turns[0].output.content));
        own.sort_unstable();
        own.dedup();
        assert_eq!(own.len(), 160, "what is a user's own is in one session only");
        assert!(all.iter().all(|session| (0.0..=390.0).contains(&session.start_s)));
    }

    #[test]
    fn a_content_is_shared_as_far_as_two_users_have_it() {
        let turn =
            |tokens| Turn { think_s: 0.0, prompt: vec![span(7, 0, tokens)], output: span(7, u64::from(tokens), 5) };
        let of = |owner, tokens| (owner, Session { start_s: 0.0, turns: vec![turn(tokens), turn(tokens + 20)] });
        let shared = Shared::of(&[of(1, 300), of(1, 400), of(2, 100)]);
        assert_eq!(shared.tokens(&span(7, 0, 300)), 125, "120 tokens of a prompt and 5 of an output");
        let copy = shared.copy(&turn(300), 50);
        assert_eq!(copy.prompt, [span(7, 0, 125), span(57, 125, 175)]);
        assert_eq!(copy.output, span(57, 300, 5));
    }

    #[test]
    fn the_number_of_sessions_follows_the_sample() {
        for sample in [1.0, 0.9, 0.4, 0.3, 0.01] {
            let count = with_copies((0..200).map(session).collect(), sample, 1000).len() as f64;
            assert!((count * sample / 200.0 - 1.0).abs() < 0.01, "{count} of {sample}");
        }
        assert!(with_copies(Vec::new(), 0.1, 1).is_empty());
    }
}
