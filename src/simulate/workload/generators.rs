//! Workloads drawn from a seed: chat, retrieval, agents and few-shot prompts.
//!
//! Lengths are clipped lognormals, and sessions begin as a Poisson process. Where the defaults say "catalog", they are
//! those of the workload catalog of kubernetes-sigs/inference-perf, with its means, deviations and bounds (which it
//! partly gives for other distributions). Numbers of applications, documents and the like are assumptions.
//!
//! A session's conversation is one content: messages and outputs follow one another in it, and each prompt is the
//! session's head and the conversation so far. Prompts are therefore two spans, however long the session.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::{Deserialize, Serialize};

use super::draws::{Lognormal, Popularity, gap_s};
use super::lines::TIME_S_MAX;
use super::{Arrivals, OUTPUT_TOKENS_MAX, PROMPT_TOKENS_MAX, Session, Span, Turn, Workload, append};

/// Heads, documents or example blocks, at most; parameters above it count as this.
const SHARED_MAX: usize = 1 << 20;
/// Documents of a prompt, at most; parameters above it count as this.
const DOCUMENTS_PER_PROMPT_MAX: usize = 1 << 10;

/// People who chat with one of a few applications. A session's prompts are the application's system prompt and the
/// whole conversation so far. The defaults are the catalog's `interactive-chat`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Chat {
    /// Requests of all sessions. Default 10 000.
    pub requests: usize,
    /// Sessions that begin in a second. Default 2.
    pub sessions_per_s: f64,
    /// Applications, each with a system prompt of its own. Default 8.
    pub applications: usize,
    /// The exponent of the applications' popularity. Default 1.
    pub application_exponent: f64,
    /// Tokens of a system prompt. Default 1000 (catalog).
    pub system_tokens: Lognormal,
    /// Tokens of a session's first message, pasted material included. Default mean 2250, deviation 2500, 10 to 13 000:
    /// with it the mean prompt is the catalog's 4000.
    pub first_message_tokens: Lognormal,
    /// Tokens of a later message. Default mean 50, deviation 40, 10 to 1000 (catalog).
    pub message_tokens: Lognormal,
    /// Tokens of an output. Default mean 300, deviation 150, 10 to 1000 (catalog).
    pub output_tokens: Lognormal,
    /// Turns of a session. Default mean 4, deviation 2.5, 1 to 15 (catalog).
    pub turns: Lognormal,
    /// Seconds from an output to the next message. Default mean 45, deviation 40, 5 to 300 (catalog).
    pub think_s: Lognormal,
    /// A session ends before a prompt longer than this, tokens. Default 32 768.
    pub prompt_tokens_max: u32,
}

impl Default for Chat {
    fn default() -> Self {
        Self {
            requests: 10_000,
            sessions_per_s: 2.0,
            applications: 8,
            application_exponent: 1.0,
            system_tokens: Lognormal::new(1000.0, 0.0, 1.0, 100_000.0),
            first_message_tokens: Lognormal::new(2250.0, 2500.0, 10.0, 13_000.0),
            message_tokens: Lognormal::new(50.0, 40.0, 10.0, 1000.0),
            output_tokens: Lognormal::new(300.0, 150.0, 10.0, 1000.0),
            turns: Lognormal::new(4.0, 2.5, 1.0, 15.0),
            think_s: Lognormal::new(45.0, 40.0, 5.0, 300.0),
            prompt_tokens_max: 32_768,
        }
    }
}

impl Chat {
    /// The workload of a seed. Open arrivals of sessions, whose turns wait for one another.
    #[must_use]
    pub fn generate(&self, seed: u64) -> Workload {
        let conversations = Conversations {
            requests: self.requests,
            sessions_per_s: self.sessions_per_s,
            heads: self.applications,
            head_exponent: self.application_exponent,
            head_tokens: self.system_tokens,
            first_message_tokens: self.first_message_tokens,
            message_tokens: self.message_tokens,
            output_tokens: self.output_tokens,
            turns: self.turns,
            think_s: self.think_s,
            prompt_tokens_max: self.prompt_tokens_max,
        };
        conversations.generate(seed, Arrivals::Timed)
    }
}

/// Agents that call tools: a long head of tools and system prompt, then many short turns, each with the result of a
/// tool. A session's next request follows soon after the output. The defaults follow the catalog's `code-generation`,
/// and the recorded coding-agent sessions where it has no figure or an extreme one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Agents {
    /// Requests of all sessions. Default 10 000.
    pub requests: usize,
    /// Sessions that are live at a time; `None` = they begin as a Poisson process. Default 64.
    pub live_sessions: Option<usize>,
    /// Sessions that begin in a second, if `live_sessions` is `None`. Default 0.05.
    pub sessions_per_s: f64,
    /// Kinds of agents, each with a head of its own. Default 16.
    pub kinds: usize,
    /// The exponent of the kinds' popularity. Default 1.
    pub kind_exponent: f64,
    /// Tokens of the tools and the system prompt. Default mean 15 000, deviation 3000, 4000 to 40 000 (recorded).
    pub head_tokens: Lognormal,
    /// Tokens of the task. Default mean 2000, deviation 4000, 50 to 50 000.
    pub task_tokens: Lognormal,
    /// Tokens of a tool's result. Default mean 1500, deviation 1200, 100 to 10 000 (catalog).
    pub result_tokens: Lognormal,
    /// Tokens of an output. Default mean 425, deviation 825, 50 to 10 000 (catalog).
    pub output_tokens: Lognormal,
    /// Turns of a session. Default mean 65, deviation 80, 1 to 1000 (recorded; the catalog has 540 with a deviation of
    /// 48 600).
    pub turns: Lognormal,
    /// Seconds that a tool runs. Default mean 15, deviation 55, 1 to 1000 (catalog).
    pub think_s: Lognormal,
    /// A session ends before a prompt longer than this, tokens. Default 200 000.
    pub prompt_tokens_max: u32,
}

impl Default for Agents {
    fn default() -> Self {
        Self {
            requests: 10_000,
            live_sessions: Some(64),
            sessions_per_s: 0.05,
            kinds: 16,
            kind_exponent: 1.0,
            head_tokens: Lognormal::new(15_000.0, 3000.0, 4000.0, 40_000.0),
            task_tokens: Lognormal::new(2000.0, 4000.0, 50.0, 50_000.0),
            result_tokens: Lognormal::new(1500.0, 1200.0, 100.0, 10_000.0),
            output_tokens: Lognormal::new(425.0, 825.0, 50.0, 10_000.0),
            turns: Lognormal::new(65.0, 80.0, 1.0, 1000.0),
            think_s: Lognormal::new(15.0, 55.0, 1.0, 1000.0),
            prompt_tokens_max: 200_000,
        }
    }
}

impl Agents {
    /// The workload of a seed: closed-loop sessions.
    #[must_use]
    pub fn generate(&self, seed: u64) -> Workload {
        let conversations = Conversations {
            requests: self.requests,
            sessions_per_s: self.sessions_per_s,
            heads: self.kinds,
            head_exponent: self.kind_exponent,
            head_tokens: self.head_tokens,
            first_message_tokens: self.task_tokens,
            message_tokens: self.result_tokens,
            output_tokens: self.output_tokens,
            turns: self.turns,
            think_s: self.think_s,
            prompt_tokens_max: self.prompt_tokens_max,
        };
        conversations.generate(seed, self.live_sessions.map_or(Arrivals::Timed, Arrivals::Live))
    }
}

/// Sessions that have one of a few heads and grow turn by turn.
struct Conversations {
    requests: usize,
    sessions_per_s: f64,
    heads: usize,
    head_exponent: f64,
    head_tokens: Lognormal,
    first_message_tokens: Lognormal,
    message_tokens: Lognormal,
    output_tokens: Lognormal,
    turns: Lognormal,
    think_s: Lognormal,
    prompt_tokens_max: u32,
}

impl Conversations {
    fn generate(&self, seed: u64, arrivals: Arrivals) -> Workload {
        let mut draws = Draws::new(seed, self.sessions_per_s);
        let (mut sessions, mut left) = (Vec::new(), self.requests);
        let heads = SharedContents::new(&mut draws, self.heads, self.head_exponent, &self.head_tokens);
        while left > 0 {
            let session = self.session(&mut draws, &heads, left);
            left -= session.turns.len();
            sessions.push(session);
        }
        Workload { sessions, arrivals }
    }

    /// A session of 1 to `turns_max` turns.
    fn session(&self, draws: &mut Draws, heads: &SharedContents, turns_max: usize) -> Session {
        let (start_s, head, content) = (draws.next_start_s(), heads.draw(draws), draws.fresh_content());
        let turns = turns_max.min(self.turns.draw_whole(&mut draws.rng) as usize);
        let mut session = Session { start_s, turns: Vec::with_capacity(turns.min(1024)) };
        let mut spoken = prompt_tokens(&self.first_message_tokens, draws).min(PROMPT_TOKENS_MAX - head.tokens);
        for place in 0..turns {
            let think_s = if place == 0 { 0.0 } else { self.think_s.draw(&mut draws.rng).clamp(0.0, TIME_S_MAX) };
            let output = Span { content, from: u64::from(spoken), tokens: output_tokens(&self.output_tokens, draws) };
            let prompt = vec![head, Span { content, from: 0, tokens: spoken }];
            session.turns.push(Turn { think_s, prompt, output });
            // Far from overflow: each summand is bounded by a few million.
            spoken += output.tokens + prompt_tokens(&self.message_tokens, draws);
            if head.tokens + spoken > self.prompt_tokens_max.min(PROMPT_TOKENS_MAX) {
                break;
            }
        }
        session.turns.shrink_to_fit();
        session
    }
}

/// Questions about documents: an instruction that all prompts share, some documents out of a corpus in random order,
/// and a question. The defaults follow the catalog's `batch-summarization-rag`, whose mean prompt has 15 000 tokens.
/// Here it has 12 000 to 15 000: a document keeps its length, and the lengths of a seed's popular documents move it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Retrieval {
    /// Requests, each a session of its own. Default 10 000.
    pub requests: usize,
    /// Requests in a second. Default 2.
    pub sessions_per_s: f64,
    /// Tokens of the instruction. Default 500 (catalog).
    pub instruction_tokens: u32,
    /// Documents of the corpus. Default 10 000.
    pub documents: usize,
    /// The exponent of the documents' popularity. Default 1.
    pub document_exponent: f64,
    /// Tokens of a document. Default mean 2900, deviation 4000, 100 to 15 000.
    pub document_tokens: Lognormal,
    /// Different documents in a prompt; never more than the corpus has. Default 5.
    pub documents_per_prompt: usize,
    /// Tokens of a question. Default mean 50, deviation 40, 10 to 1000.
    pub question_tokens: Lognormal,
    /// Tokens of an output. Default mean 500, deviation 300, 50 to 2000 (catalog).
    pub output_tokens: Lognormal,
    /// Documents that would make a prompt longer than this are left out, tokens. Default 80 000 (catalog).
    pub prompt_tokens_max: u32,
}

impl Default for Retrieval {
    fn default() -> Self {
        Self {
            requests: 10_000,
            sessions_per_s: 2.0,
            instruction_tokens: 500,
            documents: 10_000,
            document_exponent: 1.0,
            document_tokens: Lognormal::new(2900.0, 4000.0, 100.0, 15_000.0),
            documents_per_prompt: 5,
            question_tokens: Lognormal::new(50.0, 40.0, 10.0, 1000.0),
            output_tokens: Lognormal::new(500.0, 300.0, 50.0, 2000.0),
            prompt_tokens_max: 80_000,
        }
    }
}

impl Retrieval {
    /// The workload of a seed: independent requests.
    #[must_use]
    pub fn generate(&self, seed: u64) -> Workload {
        let mut draws = Draws::new(seed, self.sessions_per_s);
        let instruction = Span {
            content: draws.fresh_content(),
            from: 0,
            tokens: self.instruction_tokens.min(PROMPT_TOKENS_MAX / 2),
        };
        let corpus = SharedContents::new(&mut draws, self.documents, self.document_exponent, &self.document_tokens);
        let mut places = Vec::new();
        let sessions = (0..self.requests).map(|_| self.session(&mut draws, instruction, &corpus, &mut places));
        Workload { sessions: sessions.collect(), arrivals: Arrivals::Timed }
    }

    fn session(
        &self,
        draws: &mut Draws,
        instruction: Span,
        corpus: &SharedContents,
        places: &mut Vec<usize>,
    ) -> Session {
        let start_s = draws.next_start_s();
        corpus.draw_distinct(draws, self.documents_per_prompt, places);
        let question = prompt_tokens(&self.question_tokens, draws).min(PROMPT_TOKENS_MAX / 2);
        let mut prompt = Vec::with_capacity(places.len() + 2);
        append(&mut prompt, instruction);
        let mut left = self.prompt_tokens_max.min(PROMPT_TOKENS_MAX).saturating_sub(instruction.tokens + question);
        for document in places.iter().filter_map(|&place| corpus.spans.get(place)) {
            if document.tokens <= left {
                left -= document.tokens;
                append(&mut prompt, *document);
            }
        }
        one_turn(draws, start_s, prompt, question, &self.output_tokens)
    }
}

/// Short questions after one of a few long blocks of examples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FewShot {
    /// Requests, each a session of its own. Default 10 000.
    pub requests: usize,
    /// Requests in a second. Default 10.
    pub sessions_per_s: f64,
    /// Blocks of examples. Default 16.
    pub example_blocks: usize,
    /// The exponent of the blocks' popularity. Default 1.
    pub example_exponent: f64,
    /// Tokens of a block of examples. Default mean 4000, deviation 2000, 500 to 16 000.
    pub example_tokens: Lognormal,
    /// Tokens of a question. Default mean 100, deviation 80, 10 to 1000.
    pub question_tokens: Lognormal,
    /// Tokens of an output. Default mean 50, deviation 50, 1 to 500.
    pub output_tokens: Lognormal,
}

impl Default for FewShot {
    fn default() -> Self {
        Self {
            requests: 10_000,
            sessions_per_s: 10.0,
            example_blocks: 16,
            example_exponent: 1.0,
            example_tokens: Lognormal::new(4000.0, 2000.0, 500.0, 16_000.0),
            question_tokens: Lognormal::new(100.0, 80.0, 10.0, 1000.0),
            output_tokens: Lognormal::new(50.0, 50.0, 1.0, 500.0),
        }
    }
}

impl FewShot {
    /// The workload of a seed: independent requests.
    #[must_use]
    pub fn generate(&self, seed: u64) -> Workload {
        let mut draws = Draws::new(seed, self.sessions_per_s);
        let blocks = SharedContents::new(&mut draws, self.example_blocks, self.example_exponent, &self.example_tokens);
        let session = |_| {
            let (start_s, examples) = (draws.next_start_s(), blocks.draw(&mut draws));
            let question = prompt_tokens(&self.question_tokens, &mut draws).min(PROMPT_TOKENS_MAX / 2);
            one_turn(&mut draws, start_s, vec![examples], question, &self.output_tokens)
        };
        Workload { sessions: (0..self.requests).map(session).collect(), arrivals: Arrivals::Timed }
    }
}

/// A session of one turn, whose question and output are one content of their own.
fn one_turn(
    draws: &mut Draws,
    start_s: f64,
    mut prompt: Vec<Span>,
    question_tokens: u32,
    output: &Lognormal,
) -> Session {
    let content = draws.fresh_content();
    append(&mut prompt, Span { content, from: 0, tokens: question_tokens });
    let output = Span { content, from: u64::from(question_tokens), tokens: output_tokens(output, draws) };
    Session { start_s, turns: vec![Turn { think_s: 0.0, prompt, output }] }
}

fn prompt_tokens(lengths: &Lognormal, draws: &mut Draws) -> u32 {
    lengths.draw_whole(&mut draws.rng).min(PROMPT_TOKENS_MAX)
}

fn output_tokens(lengths: &Lognormal, draws: &mut Draws) -> u32 {
    lengths.draw_whole(&mut draws.rng).min(OUTPUT_TOKENS_MAX)
}

/// The state of one generation.
struct Draws {
    rng: Xoshiro256PlusPlus,
    contents: u64,
    mean_gap_s: f64,
    next_start_s: f64,
}

impl Draws {
    fn new(seed: u64, sessions_per_s: f64) -> Self {
        let rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        Self { rng, contents: 0, mean_gap_s: 1.0 / sessions_per_s, next_start_s: 0.0 }
    }

    fn fresh_content(&mut self) -> u64 {
        self.contents += 1;
        self.contents - 1
    }

    /// The first session begins at 0.
    fn next_start_s(&mut self) -> f64 {
        let start_s = self.next_start_s;
        self.next_start_s = (start_s + gap_s(&mut self.rng, self.mean_gap_s)).min(TIME_S_MAX);
        start_s
    }
}

/// Contents that prompts share, by falling popularity.
struct SharedContents {
    spans: Vec<Span>,
    popularity: Popularity,
}

impl SharedContents {
    fn new(draws: &mut Draws, count: usize, exponent: f64, lengths: &Lognormal) -> Self {
        let popularity = Popularity::new(count.min(SHARED_MAX), exponent);
        let span = |_| {
            // Half of the longest prompt, so that there is room for what is not shared.
            let tokens = prompt_tokens(lengths, draws).min(PROMPT_TOKENS_MAX / 2);
            Span { content: draws.fresh_content(), from: 0, tokens }
        };
        Self { spans: (0..popularity.items()).map(span).collect(), popularity }
    }

    fn draw(&self, draws: &mut Draws) -> Span {
        self.spans[self.popularity.draw(&mut draws.rng)]
    }

    /// Overwrites `places` with those of `count` different contents, in random order.
    fn draw_distinct(&self, draws: &mut Draws, count: usize, places: &mut Vec<usize>) {
        let count = count.min(self.spans.len()).min(DOCUMENTS_PER_PROMPT_MAX);
        places.clear();
        for _ in 0..count * 8 {
            if places.len() == count {
                break;
            }
            let place = self.popularity.draw(&mut draws.rng);
            if !places.contains(&place) {
                places.push(place);
            }
        }
        // Almost the whole corpus is asked for, or its popularity is steep: the most popular of the rest.
        let mut rest = 0..self.spans.len();
        while places.len() < count {
            match rest.next() {
                Some(place) if !places.contains(&place) => places.push(place),
                Some(_) => {}
                None => break,
            }
        }
        places.shuffle(&mut draws.rng);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn all(requests: usize, seed: u64) -> [Workload; 4] {
        [
            Chat { requests, ..Chat::default() }.generate(seed),
            Agents { requests, ..Agents::default() }.generate(seed),
            Retrieval { requests, ..Retrieval::default() }.generate(seed),
            FewShot { requests, ..FewShot::default() }.generate(seed),
        ]
    }

    #[test]
    fn a_seed_gives_the_same_requests_every_time() {
        assert_eq!(all(500, 1), all(500, 1));
        for (one, other) in all(500, 1).iter().zip(&all(500, 2)) {
            assert_ne!(one, other);
        }
    }

    #[test]
    fn there_are_as_many_requests_as_asked_for() {
        for requests in [0, 1, 777] {
            assert!(all(requests, 3).iter().all(|workload| workload.requests() == requests));
        }
    }

    #[test]
    fn sessions_begin_at_the_rate_asked_for() {
        let workload = FewShot { requests: 20_000, sessions_per_s: 5.0, ..FewShot::default() }.generate(4);
        assert!(workload.sessions.is_sorted_by(|a, b| a.start_s <= b.start_s));
        assert!((20_000.0 / workload.summary(16).span_s - 5.0).abs() < 0.15);
    }

    #[test]
    fn the_prompt_of_a_turn_is_the_conversation_so_far() {
        let [chat, agents, ..] = all(3000, 5);
        for session in chat.sessions.iter().chain(&agents.sessions) {
            assert_eq!(session.turns[0].think_s, 0.0);
            for (turn, next) in session.turns.iter().zip(session.turns.iter().skip(1)) {
                assert_eq!(turn.prompt[0], next.prompt[0]);
                let (spoken, output) = (next.prompt[1], turn.output);
                assert_eq!((spoken.content, spoken.from), (output.content, 0));
                assert!(output.end() < spoken.end() && output.from == turn.prompt[1].end());
                assert!(next.think_s > 0.0);
            }
        }
    }

    #[test]
    fn the_figures_of_chat_are_those_of_the_catalog() {
        let summary = Chat { requests: 50_000, ..Chat::default() }.generate(6).summary(16);
        assert!((summary.prompt_tokens.mean - 4000.0).abs() < 400.0, "{summary}");
        assert!((summary.output_tokens.mean - 300.0).abs() < 10.0, "{summary}");
        let turns = summary.requests as f64 / summary.sessions as f64;
        assert!((turns - 4.0).abs() < 0.4, "{turns}");
    }

    #[test]
    fn agents_are_live_sessions_with_almost_everything_cached() {
        let agents = Agents { requests: 10_000, live_sessions: Some(9), ..Agents::default() }.generate(7);
        assert_eq!(agents.arrivals, Arrivals::Live(9));
        assert!(agents.summary(16).reusable_share > 0.9);
        assert_eq!(Agents { live_sessions: None, ..Agents::default() }.generate(7).arrivals, Arrivals::Timed);
    }

    #[test]
    fn retrieved_documents_differ_and_stand_in_any_order() {
        let retrieval = Retrieval { requests: 2000, documents: 6, prompt_tokens_max: u32::MAX, ..Retrieval::default() };
        let (mut orders, instruction) = (HashSet::new(), Span { content: 0, from: 0, tokens: 500 });
        for session in retrieval.generate(8).sessions {
            let prompt = &session.turns[0].prompt;
            assert_eq!((prompt.len(), prompt[0]), (7, instruction));
            let documents: Vec<u64> = prompt[1..6].iter().map(|span| span.content).collect();
            assert_eq!(documents.iter().collect::<HashSet<_>>().len(), 5);
            orders.insert(documents);
        }
        // Of 720 orders of five out of six.
        assert!(orders.len() > 500, "{}", orders.len());
    }

    #[test]
    fn parameters_missing_from_a_file_have_their_defaults() {
        let read: Chat = serde_json::from_str("{\"requests\":5}").expect("a field");
        assert_eq!(read, Chat { requests: 5, ..Chat::default() });
        assert!(serde_json::from_str::<Chat>("{\"request\":5}").is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_parameters_make_a_prompt_too_long_or_empty(
            (mean, deviation, min, max) in (any::<f64>(), any::<f64>(), any::<f64>(), any::<f64>()),
            (rate, exponent) in (any::<f64>(), any::<f64>()),
            (count, tokens_max) in (any::<u8>(), any::<u32>()),
            seed: u64,
        ) {
            let any = Lognormal::new(mean, deviation, min, max);
            let (sessions_per_s, prompt_tokens_max) = (rate, tokens_max);
            let chat = Chat {
                requests: 50,
                sessions_per_s,
                applications: count.into(),
                application_exponent: exponent,
                system_tokens: any,
                first_message_tokens: any,
                message_tokens: any,
                output_tokens: any,
                turns: any,
                think_s: any,
                prompt_tokens_max,
            };
            let retrieval = Retrieval {
                requests: 50,
                sessions_per_s,
                instruction_tokens: tokens_max,
                documents: count.into(),
                document_exponent: exponent,
                document_tokens: any,
                documents_per_prompt: count.into(),
                question_tokens: any,
                output_tokens: any,
                prompt_tokens_max,
            };
            for workload in [chat.generate(seed), retrieval.generate(seed)] {
                prop_assert_eq!(workload.requests(), 50);
                for session in &workload.sessions {
                    prop_assert!((0.0..=TIME_S_MAX).contains(&session.start_s));
                    for turn in &session.turns {
                        let tokens: u64 = turn.prompt.iter().map(|span| u64::from(span.tokens)).sum();
                        prop_assert!((1..=u64::from(PROMPT_TOKENS_MAX)).contains(&tokens), "{}", tokens);
                        prop_assert!((1..=OUTPUT_TOKENS_MAX).contains(&turn.output.tokens));
                        prop_assert!((0.0..=TIME_S_MAX).contains(&turn.think_s));
                    }
                }
            }
        }
    }
}
