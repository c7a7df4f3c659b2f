//! Recorded sessions of coding agents: one session a line of JSON, with hashes that are local to the session.
//!
//! A line has `block_size`, `tool_tokens` and `system_tokens`, and `requests`, each of which is
//! `[t, think_time, api_time, in, out, type, depth, [[hash, blocks], …]]`. Times are seconds, and those of the client
//! are null where the recorder missed them. A range stands for `blocks` blocks with consecutive hashes; the tokens of
//! the prompt beyond its last whole block have none. How the reader uses them:
//!
//! * **Type** `s` is a streamed request and `n` one that is not. An engine does the same work for both, so the reader
//!   keeps both and tells them no further apart.
//! * **Depth** above 0 is a subagent. The file lists its requests after the request that started it, with times from
//!   the subagent's own start. The parent waits for its subagents, so their requests are turns of the same session, one
//!   after another. The parent's next think time spans them; the reader subtracts their durations from it. Subagents
//!   that ran at the same time are therefore replayed one after another.
//! * **Think times** are the recorded ones. Without an `api_time`, the recorder counted the API's time as thinking; the
//!   reader then subtracts 0.026 s per output token, the median of the trace. Without a `think_time`, it is the gap
//!   between the two times less the API's time.
//! * **Head**: the first `tool_tokens + system_tokens` tokens of a session's first prompt are the head of all its
//!   prompts that begin with the same hashes. Sessions with equal counts share the head.
//! * **Outputs**: where the next prompt of the same depth begins with all whole blocks of this one and has room for its
//!   output, the tokens after this prompt are taken to be the output (four turns of five in the trace). Otherwise the
//!   output is a content of its own.

use std::collections::HashMap;
use std::io::BufRead;

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Deserialize;

use super::draws::gap_s;
use super::lines::{TIME_S_MAX, TraceLines, output_tokens, prompt_tokens, record, seconds};
use super::{Arrivals, Session, Span, TraceError, Turn, Workload, append, slice};

/// Seconds of a request per output token, where its duration was not recorded.
const API_S_PER_OUTPUT_TOKEN: f64 = 0.026;
/// Depths of subagents, at most.
const DEPTHS: usize = 16;
/// Tokens of a block, at most.
const BLOCK_SIZE_MAX: u64 = 1 << 16;
/// A hash, at most, so that the tokens of its block can be numbered.
const HASH_MAX: u64 = u64::MAX / (2 * BLOCK_SIZE_MAX);

/// When sessions begin, which the trace does not record.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Starts {
    /// In the order of the file, with independent gaps (a Poisson process).
    Poisson {
        /// The mean gap, seconds; if it is not above 0 and finite, all sessions begin at 0.
        mean_gap_s: f64,
        /// Of the gaps.
        seed: u64,
    },
    /// This many sessions are live at a time.
    Live(usize),
}

#[derive(Deserialize)]
struct SessionRecord {
    block_size: u64,
    tool_tokens: u64,
    system_tokens: u64,
    requests: Vec<RequestRecord>,
}

/// `t`, `think_time`, `api_time`, `in`, `out`, `type`, `depth`, `hash_ranges`.
#[derive(Deserialize)]
struct RequestRecord(f64, Option<f64>, Option<f64>, u64, u64, RequestType, u64, Vec<(u64, u64)>);

#[derive(Deserialize)]
enum RequestType {
    #[serde(rename = "n")]
    Whole,
    #[serde(rename = "s")]
    Streamed,
}

/// A request whose values are in range.
struct Request {
    at_s: f64,
    think_s: Option<f64>,
    api_s: Option<f64>,
    prompt_tokens: u32,
    output_tokens: u32,
    /// Below `DEPTHS`.
    depth: usize,
    ranges: Vec<(u64, u64)>,
}

impl Request {
    fn duration_s(&self) -> f64 {
        self.api_s.unwrap_or(f64::from(self.output_tokens) * API_S_PER_OUTPUT_TOKEN)
    }

    /// Whole blocks of the prompt.
    fn blocks(&self, block_size: u32) -> u64 {
        u64::from(self.prompt_tokens / block_size)
    }
}

/// The contents of all sessions.
#[derive(Default)]
struct Contents {
    /// By tool and system tokens.
    heads: HashMap<(u64, u64), u64>,
    used: u64,
}

impl Contents {
    fn fresh(&mut self) -> u64 {
        self.used += 1;
        self.used - 1
    }

    fn head(&mut self, tool_tokens: u64, system_tokens: u64) -> u64 {
        let used = &mut self.used;
        *self.heads.entry((tool_tokens, system_tokens)).or_insert_with(|| {
            *used += 1;
            *used - 1
        })
    }
}

/// Reads a trace, uncompressed. A think time counts as at most `think_s_max` seconds; a value below 0 counts as 0, one
/// that is not a number as no bound.
///
/// # Errors
/// A line that is no such session, has no requests, whose values are out of range, whose ranges do not fit the prompt,
/// or whose times fall from one request to the next of depth 0.
pub fn read(lines: impl BufRead, think_s_max: f64, starts: Starts) -> Result<Workload, TraceError> {
    let (mut lines, mut contents, mut sessions) = (TraceLines::new(lines), Contents::default(), Vec::new());
    while let Some((line, text)) = lines.next()? {
        let session: SessionRecord = record(line, text)?;
        let turns = turns(line, session, think_s_max.max(0.0), &mut contents)?;
        sessions.push(Session { start_s: 0.0, turns });
    }
    let arrivals = match starts {
        Starts::Live(count) => Arrivals::Live(count),
        Starts::Poisson { mean_gap_s, seed } => {
            let (mut rng, mut next_s) = (Xoshiro256PlusPlus::seed_from_u64(seed), 0.0);
            for session in &mut sessions {
                session.start_s = next_s;
                next_s = (next_s + gap_s(&mut rng, mean_gap_s)).min(TIME_S_MAX);
            }
            Arrivals::Timed
        }
    };
    Ok(Workload::sorted(sessions, arrivals))
}

fn turns(
    line: usize,
    record: SessionRecord,
    think_s_max: f64,
    contents: &mut Contents,
) -> Result<Vec<Turn>, TraceError> {
    let block_size = match u32::try_from(record.block_size) {
        Ok(size) if (1..=BLOCK_SIZE_MAX).contains(&record.block_size) => size,
        _ => return Err(TraceError::new(line, format!("block_size must be between 1 and {BLOCK_SIZE_MAX}"))),
    };
    let in_range = |(place, request)| check(line, place, request, block_size);
    let requests: Vec<Request> = record.requests.into_iter().enumerate().map(in_range).collect::<Result<_, _>>()?;
    let Some(first) = requests.first() else {
        return Err(TraceError::new(line, "the session has no requests"));
    };
    let head = Head {
        content: contents.head(record.tool_tokens, record.system_tokens),
        blocks: record.tool_tokens.saturating_add(record.system_tokens) / u64::from(block_size),
        ranges: &first.ranges,
        session: contents.fresh(),
        block_size,
    };
    let thinks_s = think_times(line, &requests)?;
    // From the last request to the first, because the next prompt says what a prompt's tail and output are.
    let mut turns: Vec<Turn> = Vec::with_capacity(requests.len());
    let mut next_places = [None; DEPTHS];
    for (place, (request, think_s)) in requests.iter().zip(thinks_s).enumerate().rev() {
        let next = next_places[request.depth].and_then(|next: usize| {
            let turn = turns.get(requests.len() - 1 - next)?;
            extends(requests.get(next)?, request, block_size).then_some(turn.prompt.as_slice())
        });
        let (prompt, output) = prompt_and_output(&head, request, next, contents);
        turns.push(Turn { think_s: think_s.min(think_s_max), prompt, output });
        next_places[request.depth] = Some(place);
    }
    turns.reverse();
    Ok(turns)
}

fn check(line: usize, place: usize, record: RequestRecord, block_size: u32) -> Result<Request, TraceError> {
    let RequestRecord(at_s, think_s, api_s, prompt, output, RequestType::Whole | RequestType::Streamed, depth, ranges) =
        record;
    let refuse = |why: String| TraceError::new(line, format!("request {place}: {why}"));
    let named = |name: &str| format!("{name} of request {place}");
    let optional = |name: &str, value: Option<f64>| value.map(|v| seconds(line, &named(name), v)).transpose();
    let request = Request {
        at_s: seconds(line, &named("t"), at_s)?,
        think_s: optional("think_time", think_s)?,
        api_s: optional("api_time", api_s)?,
        prompt_tokens: prompt_tokens(line, &named("in"), prompt)?,
        output_tokens: output_tokens(line, &named("out"), output)?,
        depth: usize::try_from(depth).unwrap_or(usize::MAX),
        ranges,
    };
    if request.depth >= DEPTHS {
        return Err(refuse(format!("depth is {depth}, not below {DEPTHS}")));
    }
    let mut blocks = 0_u64;
    for &(hash, count) in &request.ranges {
        if count == 0 || hash > HASH_MAX || count > HASH_MAX {
            return Err(refuse(format!("the range [{hash}, {count}] is empty or beyond {HASH_MAX}")));
        }
        blocks = blocks.saturating_add(count);
    }
    let expected = request.blocks(block_size);
    if blocks != expected {
        let tokens = request.prompt_tokens;
        return Err(refuse(format!("{blocks} blocks, but {tokens} tokens are {expected} blocks of {block_size}")));
    }
    Ok(request)
}

/// The think times of the requests, not yet bounded.
fn think_times(line: usize, requests: &[Request]) -> Result<Vec<f64>, TraceError> {
    let mut previous: [Option<&Request>; DEPTHS] = [None; DEPTHS];
    // By depth: the durations of deeper requests since the last one of that depth.
    let mut nested_s = [0.0; DEPTHS];
    let mut times_s = Vec::with_capacity(requests.len());
    for (place, request) in requests.iter().enumerate() {
        let depth = request.depth;
        let think_s = match previous[depth] {
            Some(before) if request.at_s >= before.at_s => {
                let gap_s = request.at_s - before.at_s;
                let unseen_s = if before.api_s.is_none() { before.duration_s() } else { 0.0 };
                let recorded_s = request.think_s.map(|think_s| think_s - unseen_s);
                (recorded_s.unwrap_or(gap_s - before.duration_s()) - nested_s[depth]).max(0.0)
            }
            Some(_) if depth == 0 => {
                let reason = format!("t of request {place} is before that of the request before it");
                return Err(TraceError::new(line, reason));
            }
            // The first request of a session, or of a subagent.
            _ => 0.0,
        };
        nested_s[depth] = 0.0;
        for shallower_s in &mut nested_s[..depth] {
            *shallower_s += think_s + request.duration_s();
        }
        previous[depth + 1..].fill(None);
        previous[depth] = Some(request);
        times_s.push(think_s);
    }
    Ok(times_s)
}

/// What the prompts of a session have in common.
struct Head<'a> {
    /// The content of the head.
    content: u64,
    /// Whole blocks of the head.
    blocks: u64,
    /// The hashes of the session's first prompt.
    ranges: &'a [(u64, u64)],
    /// The content of all other hashed blocks: the block `hash` is its tokens from `hash × block_size` on.
    session: u64,
    block_size: u32,
}

impl Head<'_> {
    /// The hashed tokens of a prompt.
    fn prompt(&self, ranges: &[(u64, u64)]) -> Vec<Span> {
        // Blocks are no more than the prompt's tokens, which are bounded.
        let tokens = |blocks: u64| u32::try_from(blocks * u64::from(self.block_size)).unwrap_or(u32::MAX);
        let mut shared = common_blocks(self.ranges, ranges).min(self.blocks);
        let mut prompt = Vec::new();
        append(&mut prompt, Span { content: self.content, from: 0, tokens: tokens(shared) });
        for &(hash, count) in ranges {
            let skipped = shared.min(count);
            shared -= skipped;
            let from = (hash + skipped) * u64::from(self.block_size);
            append(&mut prompt, Span { content: self.session, from, tokens: tokens(count - skipped) });
        }
        prompt
    }
}

/// The first blocks that two lists of ranges have in common.
fn common_blocks(a: &[(u64, u64)], b: &[(u64, u64)]) -> u64 {
    let (mut a, mut b) = (a.iter().copied(), b.iter().copied());
    let (mut in_a, mut in_b, mut common) = (a.next(), b.next(), 0);
    while let (Some((hash_a, count_a)), Some((hash_b, count_b))) = (in_a, in_b) {
        if hash_a != hash_b {
            break;
        }
        let both = count_a.min(count_b);
        common += both;
        in_a = if both == count_a { a.next() } else { Some((hash_a + both, count_a - both)) };
        in_b = if both == count_b { b.next() } else { Some((hash_b + both, count_b - both)) };
    }
    common
}

/// Whether the next prompt begins with all whole blocks of a request's prompt and is not shorter.
fn extends(next: &Request, request: &Request, block_size: u32) -> bool {
    next.prompt_tokens >= request.prompt_tokens
        && common_blocks(&next.ranges, &request.ranges) == request.blocks(block_size)
}

/// The whole prompt, whose tail has no hash, and the output. `next` is the next prompt, if it extends this one.
fn prompt_and_output(
    head: &Head<'_>,
    request: &Request,
    next: Option<&[Span]>,
    contents: &mut Contents,
) -> (Vec<Span>, Span) {
    let mut prompt = head.prompt(&request.ranges);
    let tail_tokens = request.prompt_tokens % head.block_size;
    let hashed_tokens = request.prompt_tokens - tail_tokens;
    let Some(next) = next else {
        // The output is what comes after the tail, in the same content.
        let content = contents.fresh();
        append(&mut prompt, Span { content, from: 0, tokens: tail_tokens });
        return (prompt, Span { content, from: u64::from(tail_tokens), tokens: request.output_tokens });
    };
    for span in slice(next, hashed_tokens, tail_tokens) {
        append(&mut prompt, span);
    }
    let output = match slice(next, request.prompt_tokens, request.output_tokens).as_slice() {
        [output] if output.tokens == request.output_tokens => *output,
        _ => Span { content: contents.fresh(), from: 0, tokens: request.output_tokens },
    };
    prompt.shrink_to_fit();
    (prompt, output)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIVE: Starts = Starts::Live(3);

    fn session(requests: &str) -> String {
        format!("{{\"block_size\":64,\"tool_tokens\":100,\"system_tokens\":60,\"requests\":[{requests}]}}\n")
    }

    fn turns_of(requests: &str) -> Vec<Turn> {
        read(session(requests).as_bytes(), f64::INFINITY, LIVE).expect(requests).sessions.remove(0).turns
    }

    fn thinks_s(requests: &str) -> Vec<f64> {
        turns_of(requests).iter().map(|turn| turn.think_s).collect()
    }

    #[test]
    fn sessions_with_equal_counts_share_the_head_only() {
        let text = session("[0,0,1,300,9,\"n\",0,[[1,4]]]") + &session("[0,0,1,300,9,\"s\",0,[[1,4]]]");
        let trace = read(text.as_bytes(), 1.0, LIVE).expect("two sessions");
        assert_eq!(trace.arrivals, Arrivals::Live(3));
        let [a, b] = [0, 1].map(|place| &trace.sessions[place].turns[0].prompt);
        // 160 tokens of tools and system prompt are two whole blocks.
        assert_eq!(a[0], Span { content: a[0].content, from: 0, tokens: 128 });
        assert_eq!(a[0], b[0]);
        assert!(a[1..].iter().all(|span| b[1..].iter().all(|other| other.content != span.content)));
        let other = text.replace("\"tool_tokens\":100", "\"tool_tokens\":101").lines().next().map(str::to_owned);
        let trace = read((text + &other.expect("a line")).as_bytes(), 1.0, LIVE).expect("three sessions");
        assert_ne!(trace.sessions[0].turns[0].prompt[0].content, trace.sessions[2].turns[0].prompt[0].content);
    }

    #[test]
    fn an_output_is_the_part_of_the_next_prompt_that_follows_the_prompt() {
        let turns = turns_of("[0,0,1,300,50,\"n\",0,[[1,4]]],[5,4,1,400,9,\"n\",0,[[1,6]]]");
        let session = turns[1].prompt[1].content;
        assert_eq!(turns[0].output, Span { content: session, from: 64 + 300, tokens: 50 });
        // The prompt's tail of 44 tokens comes from the next prompt, too.
        assert_eq!(turns[0].prompt[1], Span { content: session, from: 64 + 128, tokens: 300 - 128 });
        assert_ne!(turns[1].output.content, session);
    }

    #[test]
    fn an_output_without_room_in_the_next_prompt_is_a_content_of_its_own() {
        for next in ["[5,4,1,310,9,\"n\",0,[[1,4]]]", "[5,4,1,400,9,\"n\",0,[[1,3],[7,3]]]"] {
            let turns = turns_of(&format!("[0,0,1,300,50,\"n\",0,[[1,4]]],{next}"));
            assert!(turns[1].prompt.iter().all(|span| span.content != turns[0].output.content), "{next}");
        }
    }

    #[test]
    fn a_prompt_that_leaves_the_head_early_shares_only_what_is_equal() {
        let turns = turns_of("[0,0,1,256,5,\"n\",0,[[1,4]]],[5,4,1,256,9,\"n\",0,[[1,1],[9,3]]]");
        assert_eq!(turns[1].prompt[0], Span { tokens: 64, ..turns[0].prompt[0] });
        assert_eq!(turns[1].prompt[1].from, 9 * 64);
    }

    #[test]
    fn missing_times_are_derived_from_the_others() {
        let first = |api: &str| format!("[0,0,{api},64,100,\"s\",0,[[1,1]]],");
        // Recorded as it is; then the API's time was counted as thinking; then no think time at all.
        assert_eq!(thinks_s(&(first("2") + "[10,7.5,1,64,1,\"n\",0,[[1,1]]]")), [0.0, 7.5]);
        assert_eq!(thinks_s(&(first("null") + "[10,10,1,64,1,\"n\",0,[[1,1]]]")), [0.0, 10.0 - 2.6]);
        assert_eq!(thinks_s(&(first("2") + "[10,null,1,64,1,\"n\",0,[[1,1]]]")), [0.0, 8.0]);
        assert_eq!(thinks_s(&(first("20") + "[10,null,1,64,1,\"n\",0,[[1,1]]]")), [0.0, 0.0]);
    }

    #[test]
    fn a_parent_does_not_think_while_its_subagents_run() {
        let text = "[50,0,2,64,1,\"n\",0,[[1,1]]],[0,9,3,64,1,\"n\",1,[[7,1]]],[5,4,1,64,1,\"n\",1,[[7,1]]],\
                    [0,9,6,64,1,\"n\",1,[[8,1]]],[90,38,1,64,1,\"n\",0,[[1,1]]]";
        assert_eq!(thinks_s(text), [0.0, 0.0, 4.0, 0.0, 38.0 - 3.0 - 5.0 - 6.0]);
    }

    #[test]
    fn think_times_are_bounded() {
        let text = session("[0,0,2,64,1,\"n\",0,[[1,1]]],[100,98,1,64,1,\"n\",0,[[1,1]]]");
        let think_s = |max_s| read(text.as_bytes(), max_s, LIVE).expect("a session").sessions[0].turns[1].think_s;
        assert_eq!([60.0, -1.0, f64::INFINITY].map(think_s), [60.0, 0.0, 98.0]);
    }

    #[test]
    fn sessions_begin_at_gaps_of_the_seed() {
        let text = session("[0,0,2,64,1,\"n\",0,[[1,1]]]").repeat(500);
        let starts = |mean_gap_s, seed| {
            let trace = read(text.as_bytes(), 1.0, Starts::Poisson { mean_gap_s, seed }).expect("sessions");
            trace.sessions.iter().map(|session| session.start_s).collect::<Vec<_>>()
        };
        assert_eq!(starts(4.0, 1), starts(4.0, 1));
        assert_ne!(starts(4.0, 1), starts(4.0, 2));
        assert!((starts(4.0, 1)[499] / 499.0 - 4.0).abs() < 0.6);
        assert!(starts(f64::NAN, 1).iter().all(|&start_s| start_s == 0.0));
    }

    #[test]
    fn hostile_lines_are_refused_with_their_number() {
        let good = session("[0,0,1,64,1,\"n\",0,[[1,1]]]");
        let bad = [
            "",
            "[-1,0,1,64,1,\"n\",0,[[1,1]]]",
            "[0,-1,1,64,1,\"n\",0,[[1,1]]]",
            "[0,0,1e300,64,1,\"n\",0,[[1,1]]]",
            "[0,0,1,0,1,\"n\",0,[]]",
            "[0,0,1,64,1,\"x\",0,[[1,1]]]",
            "[0,0,1,64,1,\"n\",99,[[1,1]]]",
            "[0,0,1,64,1,\"n\",18446744073709551615,[[1,1]]]",
            "[0,0,1,64,1,\"n\",0,[[1,2]]]",
            "[0,0,1,64,1,\"n\",0,[[1,0],[1,1]]]",
            "[0,0,1,64,1,\"n\",0,[[1,18446744073709551615],[1,2]]]",
            "[0,0,1,64,1,\"n\",0,[[18446744073709551615,1]]]",
            "[0,0,1,64,1,\"n\",0]",
            "[5,0,1,64,1,\"n\",0,[[1,1]]],[4,0,1,64,1,\"n\",0,[[1,1]]]",
        ];
        for requests in bad {
            let text = good.clone() + &session(requests);
            assert_eq!(read(text.as_bytes(), 1.0, LIVE).expect_err(requests).line, 2, "{requests}");
        }
        for (field, value) in [("\"block_size\":64", "\"block_size\":0"), ("\"tool_tokens\":100,", "")] {
            assert!(read(good.replace(field, value).as_bytes(), 1.0, LIVE).is_err(), "{value}");
        }
    }

    proptest! {
        #[test]
        fn common_blocks_are_those_of_the_expanded_lists(
            a in prop::collection::vec((0..4_u64, 1..4_u64), 0..6),
            b in prop::collection::vec((0..4_u64, 1..4_u64), 0..6),
        ) {
            let expand = |ranges: &[(u64, u64)]| -> Vec<u64> {
                ranges.iter().flat_map(|&(hash, count)| hash..hash + count).collect()
            };
            let expected = expand(&a).iter().zip(&expand(&b)).take_while(|(a, b)| a == b).count() as u64;
            prop_assert_eq!(common_blocks(&a, &b), expected);
        }

        #[test]
        fn prompts_have_the_tokens_of_the_trace(
            prompts in prop::collection::vec((1..600_u32, 1..5_u64, 1..200_u32), 1..8),
        ) {
            let requests: Vec<String> = prompts
                .iter()
                .enumerate()
                .map(|(at, &(tokens, hash, output))| {
                    let blocks = tokens / 64;
                    let ranges = if blocks == 0 { String::new() } else { format!("[{hash},{blocks}]") };
                    format!("[{at},0,1,{tokens},{output},\"n\",0,[{ranges}]]")
                })
                .collect();
            let turns = turns_of(&requests.join(","));
            for (turn, &(tokens, _, output)) in turns.iter().zip(&prompts) {
                prop_assert_eq!((turn.prompt_tokens(), turn.output.tokens), (tokens, output));
            }
        }
    }
}
