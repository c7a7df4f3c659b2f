//! The traces of Mooncake: lines of JSON with hashed blocks of 512 tokens.
//!
//! A line has `timestamp` (milliseconds), `input_length` and `output_length` (tokens), and `hash_ids`: one per block of
//! the prompt, of which the last may be partial. An id stands for the block and everything before it.

use std::io::BufRead;

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Deserialize;

use super::lines::{TraceLines, output_tokens, prompt_tokens, record, seconds};
use super::{Arrivals, Session, Span, TraceError, Turn, Workload, append};

/// Tokens of a block.
const BLOCK_TOKENS: u32 = 512;
/// The content of all prompts: the block `id` is its tokens from `id × 512` on. Outputs have contents above it.
const PROMPTS: u64 = 0;
/// An id, at most, so that the tokens of its block can be numbered.
const HASH_ID_MAX: u64 = u64::MAX / (2 * BLOCK_TOKENS as u64);

#[derive(Deserialize)]
struct Request {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// Reads a trace. Each request is a session of one turn, its output a content of its own. Lines out of order are
/// sorted, and the first request arrives at 0.
///
/// # Errors
/// A line that is no such request, whose values are out of range, or whose ids are not one per block.
pub fn read(lines: impl BufRead) -> Result<Workload, TraceError> {
    let (mut lines, mut sessions) = (TraceLines::new(lines), Vec::new());
    while let Some((line, text)) = lines.next()? {
        let request: Request = record(line, text)?;
        let start_s = seconds(line, "timestamp", request.timestamp / 1000.0)?;
        let prompt = prompt_of(line, &request)?;
        let tokens = output_tokens(line, "output_length", request.output_length)?;
        let output = Span { content: PROMPTS + 1 + sessions.len() as u64, from: 0, tokens };
        sessions.push(Session { start_s, turns: vec![Turn { think_s: 0.0, prompt, output }] });
    }
    Ok(Workload::sorted(sessions, Arrivals::Timed))
}

fn prompt_of(line: usize, request: &Request) -> Result<Vec<Span>, TraceError> {
    let mut left = prompt_tokens(line, "input_length", request.input_length)?;
    let (blocks, ids) = (left.div_ceil(BLOCK_TOKENS) as usize, request.hash_ids.len());
    if ids != blocks {
        let reason = format!("hash_ids has {ids} ids, but {left} tokens are {blocks} blocks of {BLOCK_TOKENS}");
        return Err(TraceError::new(line, reason));
    }
    let mut prompt = Vec::new();
    for &id in &request.hash_ids {
        if id > HASH_ID_MAX {
            return Err(TraceError::new(line, format!("the id {id} in hash_ids is above {HASH_ID_MAX}")));
        }
        let tokens = left.min(BLOCK_TOKENS);
        left -= tokens;
        append(&mut prompt, Span { content: PROMPTS, from: id * u64::from(BLOCK_TOKENS), tokens });
    }
    prompt.shrink_to_fit();
    Ok(prompt)
}

/// Spreads sessions that begin at the same time over the `grain_s` seconds after it, at random by `seed`. For traces
/// whose times were rounded down: without it, a fleet sees bursts that never were. Sessions of one time keep their
/// order. A grain that is not above 0 and finite changes nothing.
pub fn jitter(workload: &mut Workload, grain_s: f64, seed: u64) {
    if !(grain_s > 0.0 && grain_s.is_finite()) {
        return;
    }
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut offsets = Vec::new();
    for together in workload.sessions.chunk_by_mut(|a, b| a.start_s.total_cmp(&b.start_s).is_eq()) {
        offsets.clear();
        offsets.extend(together.iter().map(|_| rng.random::<f64>() * grain_s));
        offsets.sort_by(f64::total_cmp);
        for (session, offset_s) in together.iter_mut().zip(&offsets) {
            session.start_s += offset_s;
        }
    }
    workload.sessions.sort_by(|a, b| a.start_s.total_cmp(&b.start_s));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn line(timestamp: &str, input: &str, ids: &str) -> String {
        format!("{{\"timestamp\":{timestamp},\"input_length\":{input},\"output_length\":7,\"hash_ids\":{ids}}}\n")
    }

    fn refusal(text: &str) -> TraceError {
        read(text.as_bytes()).expect_err(text)
    }

    #[test]
    fn consecutive_ids_are_one_span_and_the_last_block_is_partial() {
        let trace = read(line("3000", "1600", "[4,5,9,10]").as_bytes()).expect("a request");
        let turn = &trace.sessions[0].turns[0];
        let span = |from, tokens| Span { content: PROMPTS, from, tokens };
        assert_eq!(turn.prompt, [span(4 * 512, 1024), span(9 * 512, 512 + 64)]);
        assert_eq!(turn.prompt_tokens(), 1600);
        assert_eq!(turn.output, Span { content: 1, from: 0, tokens: 7 });
    }

    #[test]
    fn lines_out_of_order_are_sorted_and_begin_at_zero() {
        let text = line("9000", "5", "[1]") + &line("6000", "6", "[2]");
        let trace = read(text.as_bytes()).expect("two requests");
        let seen: Vec<_> = trace.sessions.iter().map(|s| (s.start_s, s.turns[0].prompt_tokens())).collect();
        assert_eq!(seen, [(0.0, 6), (3.0, 5)]);
    }

    #[test]
    fn hostile_lines_are_refused_with_their_number() {
        let good = line("0", "512", "[0]");
        let bad = [
            line("-1", "512", "[0]"),
            line("NaN", "512", "[0]"),
            line("1e999", "512", "[0]"),
            line("1e300", "512", "[0]"),
            line("0", "0", "[]"),
            line("0", "-5", "[0]"),
            line("0", "513", "[0]"),
            line("0", "512", "[0,1]"),
            line("0", "99999999999", "[0]"),
            line("0", "512", "[18446744073709551615]"),
            line("0", "512", "[-1]"),
            "{\"timestamp\":0}".into(),
            "[]".into(),
            "{".into(),
        ];
        for line in bad {
            assert_eq!(refusal(&(good.clone() + &line)).line, 2, "{line}");
        }
        assert_eq!(refusal("{\"timestamp\":0}").reason, "column 15: missing field `input_length`");
    }

    #[test]
    fn an_empty_trace_has_no_sessions() {
        assert_eq!(read(&b""[..]).expect("nothing").requests(), 0);
    }

    #[test]
    fn jitter_is_the_same_for_a_seed_and_differs_between_seeds() {
        let text: String = (0..20).map(|i| line(if i < 10 { "0" } else { "3000" }, "512", &format!("[{i}]"))).collect();
        let trace = read(text.as_bytes()).expect("requests");
        let jittered = |seed| {
            let mut trace = trace.clone();
            jitter(&mut trace, 3.0, seed);
            trace
        };
        assert_eq!(jittered(1), jittered(1));
        assert_ne!(jittered(1), jittered(2));
        let mut unchanged = trace.clone();
        jitter(&mut unchanged, f64::NAN, 1);
        assert_eq!(unchanged, trace);
    }

    proptest! {
        #[test]
        fn jitter_keeps_order_and_moves_no_session_beyond_the_grain(
            counts in prop::collection::vec(1..5_usize, 1..9),
            seed: u64,
        ) {
            let times = counts.iter().enumerate().flat_map(|(time, &count)| std::iter::repeat_n(time, count));
            let text: String = times.clone().map(|time| line(&format!("{}", time * 3000), "1", "[0]")).collect();
            let mut trace = read(text.as_bytes()).expect("requests");
            jitter(&mut trace, 3.0, seed);
            for (place, (session, time)) in trace.sessions.iter().zip(times).enumerate() {
                let after_s = session.start_s - 3.0 * time as f64;
                prop_assert!((0.0..3.0).contains(&after_s));
                prop_assert_eq!(session.turns[0].output.content, 1 + place as u64);
            }
        }

        #[test]
        fn a_prompt_names_the_tokens_of_its_ids(ids in prop::collection::vec(0..20_u64, 1..30), short in 0..512_u32) {
            let tokens = ids.len() as u32 * 512 - short;
            let trace = read(line("0", &tokens.to_string(), &format!("{ids:?}")).as_bytes()).expect("a request");
            let named = trace.sessions[0].turns[0].prompt.iter().flat_map(|s| s.from..s.end());
            let expected = ids.iter().flat_map(|id| id * 512..(id + 1) * 512).take(tokens as usize);
            prop_assert!(named.eq(expected));
        }
    }
}
