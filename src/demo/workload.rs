//! Workloads: generated multi-turn conversations, repeatable bit for bit by their seed, and Mooncake traces. Pure.
//!
//! A request is described by segments, each a prefix of one endless pseudo-random token stream, so that a
//! workload of millions of tokens is a few kilobytes and equal history is equal by construction.
//!
//! Lengths follow the Mooncake conversation trace by its quantiles at a quarter, without the longest, so that
//! prompts stay near ten thousand tokens. Conversations are longer than the trace's (where only one request
//! in three continues another), because multi-turn chat is the point.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};

use serde::Deserialize;

use super::engine::{BLOCK_TOKENS, block_names};
use crate::error::{Error, Kind};

/// Token ids are below this.
const VOCABULARY: u64 = 128_256;
/// System prompts that conversations share.
const SYSTEM_PROMPTS: u64 = 8;
/// A conversation ends before a prompt would grow past this.
const PROMPT_TOKENS_MAX: u32 = 10_000;
/// Conversations open at once, at most.
const CONVERSATIONS_OPEN_MAX: u64 = 48;
/// Mean time between two arrivals.
const INTERVAL_US: u64 = 6_000;
/// Requests within which most conversations go on, as they are generated.
const WORKING_SET_REQUESTS: usize = 192;

/// The 0, 5, 10, 25, 50, 75, 90, 95 and 99 % quantiles of a length, in tokens.
type Quantiles = [u32; 9];
const QUANTILE_PER_MILLE: Quantiles = [0, 50, 100, 250, 500, 750, 900, 950, 990];
const OUTPUT: Quantiles = [1, 3, 6, 39, 88, 118, 149, 175, 280];
const FIRST_PROMPT: Quantiles = [220, 225, 227, 372, 1500, 3600, 5000, 5500, 6000];
const FOLLOW_UP: Quantiles = [2, 4, 5, 6, 12, 90, 1050, 1700, 2500];
const SYSTEM_PROMPT: Quantiles = [200, 240, 280, 350, 500, 700, 900, 1000, 1200];

/// The first `tokens` tokens of stream number `stream`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Number of the stream.
    pub(crate) stream: u64,
    /// Length of the prefix.
    pub(crate) tokens: u32,
}

/// One request of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// The prompt, in order.
    pub(crate) prompt: Vec<Segment>,
    /// The output that the engine will generate.
    pub(crate) output: Segment,
    /// Arrival after the start of the phase, unless the request it continues is late.
    pub(crate) arrival_us: u64,
    /// The request whose output is part of this prompt. It must be complete first.
    pub(crate) after: Option<usize>,
}

impl Request {
    /// Tokens of the prompt.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompt.iter().map(|segment| segment.tokens as usize).sum()
    }

    /// Whole blocks of prompt and output: what the engine's cache holds when the request ends.
    pub(crate) fn blocks(&self) -> usize {
        (self.prompt_tokens() + self.output.tokens as usize) / BLOCK_TOKENS
    }
}

/// Requests in the order in which they arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Workload {
    /// Seed of every token.
    pub(crate) seed: u64,
    /// The requests.
    pub(crate) requests: Vec<Request>,
    /// Requests whose blocks together count as the working set.
    pub(crate) working_set_requests: usize,
}

impl Workload {
    /// `requests` requests of conversations that overlap in time.
    pub(crate) fn generate(seed: u64, requests: usize) -> Self {
        let mut chance = SplitMix(mix(seed ^ 0x6b76_726f));
        let open = (requests as u64 / 12).clamp(4, CONVERSATIONS_OPEN_MAX);
        let mut conversations: Vec<Conversation> = Vec::new();
        // The next turns: (arrival time in requests times 16, conversation).
        let mut due = BinaryHeap::new();
        for _ in 0..open {
            due.push(Reverse((chance.below(open * 16), conversations.len())));
            conversations.push(Conversation::open(conversations.len() as u64, &mut chance));
        }
        let (mut list, mut arrival_us) = (Vec::with_capacity(requests), 0);
        while list.len() < requests {
            let Some(Reverse((now, mut number))) = due.pop() else { break };
            if conversations[number].is_over() {
                number = conversations.len();
                conversations.push(Conversation::open(number as u64, &mut chance));
            }
            let index = list.len();
            list.push(conversations[number].speak(index, arrival_us, &mut chance));
            arrival_us += chance.below(2 * INTERVAL_US);
            due.push(Reverse((now + open * 8 + chance.below(open * 16), number)));
        }
        Self { seed, requests: list, working_set_requests: WORKING_SET_REQUESTS }
    }

    /// The prompt of request `index`.
    pub(crate) fn prompt(&self, index: usize) -> Vec<u32> {
        let request = &self.requests[index];
        let mut tokens = Vec::with_capacity(request.prompt_tokens());
        for segment in &request.prompt {
            extend_from_stream(&mut tokens, self.seed, *segment);
        }
        tokens
    }

    /// What the engine generates for request `index`.
    pub(crate) fn output(&self, index: usize) -> Vec<u32> {
        let mut tokens = Vec::new();
        extend_from_stream(&mut tokens, self.seed, self.requests[index].output);
        tokens
    }

    /// Capacity of each of `workers` engines in blocks. Together they hold somewhat more than the working set, so that
    /// it does not fit one engine but fits all; each holds at least three of the longest request.
    pub(crate) fn capacity_blocks(&self, workers: usize) -> usize {
        let longest = self.requests.iter().map(Request::blocks).max().unwrap_or(0);
        let share = self.working_set_blocks() * 2 / workers.max(1);
        share.max(3 * longest).next_multiple_of(256)
    }

    /// Distinct blocks of consecutive requests, averaged over the workload.
    fn working_set_blocks(&self) -> usize {
        let (mut sum, mut windows) = (0, 0);
        for start in (0..self.requests.len()).step_by(self.working_set_requests) {
            let end = (start + self.working_set_requests).min(self.requests.len());
            let mut distinct: HashSet<u64> = HashSet::new();
            for index in start..end {
                let mut tokens = self.prompt(index);
                tokens.extend(self.output(index));
                distinct.extend(block_names(&tokens));
            }
            sum += distinct.len();
            windows += 1;
        }
        sum / windows.max(1)
    }
}

/// One conversation as it grows.
struct Conversation {
    number: u64,
    turns_left: u64,
    turn: u64,
    history: Vec<Segment>,
    last: Option<usize>,
}

impl Conversation {
    fn open(number: u64, chance: &mut SplitMix) -> Self {
        // The smaller of two draws: some system prompts are more popular than others.
        let system = chance.below(SYSTEM_PROMPTS).min(chance.below(SYSTEM_PROMPTS));
        // The length belongs to the prompt, not to the conversation.
        let tokens = SplitMix(mix(system + 1)).length(&SYSTEM_PROMPT);
        let history = vec![Segment { stream: stream(StreamKind::System, system, 0), tokens }];
        Self { number, turns_left: 4 + chance.below(8) + chance.below(8), turn: 0, history, last: None }
    }

    fn is_over(&self) -> bool {
        let tokens: u32 = self.history.iter().map(|segment| segment.tokens).sum();
        self.turns_left == 0 || tokens + 1000 > PROMPT_TOKENS_MAX
    }

    fn speak(&mut self, index: usize, arrival_us: u64, chance: &mut SplitMix) -> Request {
        let length = chance.length(if self.turn == 0 { &FIRST_PROMPT } else { &FOLLOW_UP });
        self.history.push(Segment { stream: stream(StreamKind::User, self.number, self.turn), tokens: length });
        let output =
            Segment { stream: stream(StreamKind::Output, self.number, self.turn), tokens: chance.length(&OUTPUT) };
        let request = Request { prompt: self.history.clone(), output, arrival_us, after: self.last.replace(index) };
        self.history.push(output);
        self.turn += 1;
        self.turns_left -= 1;
        request
    }
}

/// The kind of a token stream; different kinds never share a number.
#[derive(Clone, Copy)]
pub(crate) enum StreamKind {
    /// A shared system prompt.
    System = 1,
    /// A user's message in one turn.
    User = 2,
    /// An engine's output.
    Output = 3,
    /// A block of a trace.
    Trace = 4,
}

/// The number of the stream of `kind` for a conversation (or hash id) and turn.
pub(crate) const fn stream(kind: StreamKind, number: u64, turn: u64) -> u64 {
    ((kind as u64) << 56) | (number << 16) | turn
}

fn extend_from_stream(tokens: &mut Vec<u32>, seed: u64, segment: Segment) {
    let mut state = SplitMix(mix(seed ^ mix(segment.stream)));
    tokens.extend((0..segment.tokens).map(|_| state.below(VOCABULARY) as u32));
}

/// Steele, Lea and Flood's SplitMix64. Written out, so that no new version of a library changes a workload.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`.
    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// A length of this distribution: linear between quantiles, in whole numbers, so that it is the same
    /// on every machine.
    fn length(&mut self, quantiles: &Quantiles) -> u32 {
        let at = self.below(990) as u32;
        let upper = QUANTILE_PER_MILLE.iter().position(|&mark| at < mark).unwrap_or(8).max(1);
        let (low, high) = (QUANTILE_PER_MILLE[upper - 1], QUANTILE_PER_MILLE[upper]);
        let (from, to) = (quantiles[upper - 1], quantiles[upper]);
        from + (to - from) * (at - low) / (high - low)
    }
}

const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Tokens one hash id stands for.
const TRACE_BLOCK_TOKENS: u32 = 512;
/// Mean time between two arrivals, whatever it is in the trace.
const TRACE_INTERVAL_US: f64 = 12_000.0;
/// Requests within which most conversations of the Mooncake conversation trace go on.
const TRACE_WORKING_SET_REQUESTS: usize = 1024;
/// Longest prompt or output of one line, in tokens.
const LENGTH_TOKENS_MAX: u32 = 1 << 20;

#[derive(Deserialize)]
struct TraceLine {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// The first `requests` requests of a trace, by time.
///
/// # Errors
/// `config` with the line's number if a line is not such an object or its lengths and ids disagree.
pub(crate) fn parse_trace(text: &str, seed: u64, requests: usize) -> Result<Workload, Error> {
    let mut lines = Vec::new();
    for (number, text) in text.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
        let line: TraceLine = serde_json::from_str(text).map_err(|error| refuse(number, &error.to_string()))?;
        check_line(&line).map_err(|what| refuse(number, &what))?;
        lines.push(line);
    }
    lines.sort_by(|a, b| a.timestamp.total_cmp(&b.timestamp));
    lines.truncate(requests);
    if lines.is_empty() {
        return Err(Error::new(Kind::Config, "the trace has no requests", "give a file with at least one line"));
    }
    let (first, last) = (lines[0].timestamp, lines[lines.len() - 1].timestamp);
    let scale = if last > first { TRACE_INTERVAL_US * lines.len() as f64 / (last - first) } else { 0.0 };
    let requests = lines
        .iter()
        .enumerate()
        .map(|(index, line)| trace_request(index, line, ((line.timestamp - first) * scale) as u64))
        .collect();
    Ok(Workload { seed, requests, working_set_requests: TRACE_WORKING_SET_REQUESTS })
}

fn check_line(line: &TraceLine) -> Result<(), String> {
    if line.input_length == 0 || line.input_length.max(line.output_length) > LENGTH_TOKENS_MAX {
        return Err(format!("lengths must be 1 to {LENGTH_TOKENS_MAX} tokens"));
    }
    let needed = line.input_length.div_ceil(TRACE_BLOCK_TOKENS) as usize;
    if line.hash_ids.len() != needed {
        return Err(format!("{} tokens need {needed} hash_ids, not {}", line.input_length, line.hash_ids.len()));
    }
    if line.hash_ids.iter().any(|id| *id >= 1 << 40) {
        return Err("a hash id is 2^40 or more".to_owned());
    }
    Ok(())
}

fn trace_request(index: usize, line: &TraceLine, arrival_us: u64) -> Request {
    let mut left = line.input_length;
    let prompt = line
        .hash_ids
        .iter()
        .map(|id| {
            let tokens = left.min(TRACE_BLOCK_TOKENS);
            left -= tokens;
            Segment { stream: stream(StreamKind::Trace, *id, 0), tokens }
        })
        .collect();
    // An engine generates at least one token.
    let output = Segment { stream: stream(StreamKind::Output, index as u64, 0), tokens: line.output_length.max(1) };
    Request { prompt, output, arrival_us, after: None }
}

fn refuse(line_index: usize, what: &str) -> Error {
    Error::new(
        Kind::Config,
        format!("line {} of the trace: {what}", line_index + 1),
        "a line is {\"timestamp\":ms,\"input_length\":tokens,\"output_length\":tokens,\"hash_ids\":[one per 512 tokens]}",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_one_workload_and_another_seed_another() {
        let (one, same, other) = (Workload::generate(7, 200), Workload::generate(7, 200), Workload::generate(8, 200));
        assert_eq!(one, same);
        assert_ne!(one.requests, other.requests);
        assert_eq!(one.prompt(150), same.prompt(150));
        assert_ne!(one.prompt(0)[..16], other.prompt(0)[..16]);
    }

    /// A change of these numbers changes every published result.
    #[test]
    fn the_default_workload_never_changes() {
        let workload = Workload::generate(1, 500);
        let mut digest = 0_u64;
        for index in 0..workload.requests.len() {
            for token in workload.prompt(index).into_iter().chain(workload.output(index)) {
                digest = mix(digest ^ u64::from(token));
            }
        }
        assert_eq!(digest, GOLDEN_DIGEST);
    }
    const GOLDEN_DIGEST: u64 = 7036457159762978659;

    #[test]
    fn a_turn_starts_with_the_whole_turn_before_it() {
        let workload = Workload::generate(3, 300);
        let mut continued = 0;
        for (index, request) in workload.requests.iter().enumerate() {
            assert!(request.prompt_tokens() <= PROMPT_TOKENS_MAX as usize + 4000);
            let Some(before) = request.after else { continue };
            assert!(before < index);
            let mut history = workload.prompt(before);
            history.extend(workload.output(before));
            assert!(workload.prompt(index).starts_with(&history));
            continued += 1;
        }
        assert!(continued > 150, "{continued} of 300 continue a conversation");
    }

    #[test]
    fn lengths_stay_within_their_quantiles_and_reach_both_ends() {
        let mut chance = SplitMix(5);
        let lengths: Vec<u32> = (0..20_000).map(|_| chance.length(&OUTPUT)).collect();
        assert!(lengths.iter().all(|length| (1..=280).contains(length)));
        let below_median = lengths.iter().filter(|length| **length < 88).count();
        assert!((9_500..10_700).contains(&below_median), "{below_median}");
        assert!(lengths.iter().any(|length| *length < 3) && lengths.iter().any(|length| *length > 250));
    }

    const TWO: &str = "{\"timestamp\": 5, \"input_length\": 1000, \"output_length\": 3, \"hash_ids\": [0, 2]}\n\
                       {\"timestamp\": 1, \"input_length\": 600, \"output_length\": 0, \"hash_ids\": [0, 1]}\n";

    #[test]
    fn equal_ids_are_equal_tokens_and_time_gives_the_order() {
        let workload = parse_trace(TWO, 1, 10).unwrap();
        let (first, second) = (workload.prompt(0), workload.prompt(1));
        assert_eq!((first.len(), second.len()), (600, 1000));
        assert_eq!(first[..512], second[..512]);
        assert_ne!(first[512..600], second[512..600]);
        assert_eq!((workload.output(0).len(), workload.output(1).len()), (1, 3));
        assert_eq!((workload.requests[0].arrival_us, workload.requests[1].arrival_us), (0, 24_000));
        assert_eq!(parse_trace(TWO, 1, 1).unwrap().requests.len(), 1);
    }

    #[test]
    fn a_bad_line_is_named() {
        for (bad, what) in [
            ("{\"timestamp\":1,\"input_length\":513,\"output_length\":1,\"hash_ids\":[0]}", "513 tokens need 2"),
            ("{\"timestamp\":1,\"input_length\":0,\"output_length\":1,\"hash_ids\":[]}", "lengths must be"),
            ("{\"timestamp\":1}", "missing field"),
        ] {
            let error = parse_trace(&format!("{TWO}{bad}"), 1, 10).unwrap_err();
            assert!(error.message().contains("line 3") && error.message().contains(what), "{}", error.message());
        }
        assert!(parse_trace("\n", 1, 10).is_err());
    }
}
