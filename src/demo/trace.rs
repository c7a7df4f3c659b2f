//! A Mooncake trace as a workload. Pure: the text is an argument.
//!
//! A line is `{"timestamp", "input_length", "output_length", "hash_ids"}`, one hash id per 512 tokens of
//! the prompt, the last one possibly partial. Equal ids stand for equal tokens, so the tokens are made up
//! from the ids. Time is compressed: the requests taken arrive as far apart, on average, as engines that are
//! that much faster than real ones can bear.

use serde::Deserialize;

use super::workload::{Request, Segment, StreamKind, Workload, stream};
use crate::error::{Error, Kind};

/// Tokens one hash id stands for.
const TRACE_BLOCK_TOKENS: u32 = 512;
/// Mean time between two arrivals, whatever it was when the trace was taken.
const INTERVAL_US: f64 = 12_000.0;
/// Requests within which most conversations of the Mooncake conversation trace go on.
const WORKING_SET_REQUESTS: usize = 1024;
/// Longest prompt or output of one line, in tokens.
const LENGTH_TOKENS_MAX: u32 = 1 << 20;

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// The first `requests` requests of a trace, by time.
///
/// # Errors
/// `config` with the line's number if a line is no such object or its lengths and ids do not agree.
pub(crate) fn parse(text: &str, seed: u64, requests: usize) -> Result<Workload, Error> {
    let mut lines = Vec::new();
    for (number, text) in text.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
        let line: Line = serde_json::from_str(text).map_err(|error| refuse(number, &error.to_string()))?;
        check(&line).map_err(|what| refuse(number, &what))?;
        lines.push(line);
    }
    lines.sort_by(|a, b| a.timestamp.total_cmp(&b.timestamp));
    lines.truncate(requests);
    if lines.is_empty() {
        return Err(Error::new(Kind::Config, "the trace has no requests", "give a file with at least one line"));
    }
    let (first, last) = (lines[0].timestamp, lines[lines.len() - 1].timestamp);
    let scale = if last > first { INTERVAL_US * lines.len() as f64 / (last - first) } else { 0.0 };
    let requests = lines
        .iter()
        .enumerate()
        .map(|(index, line)| request(index, line, ((line.timestamp - first) * scale) as u64))
        .collect();
    Ok(Workload { seed, requests, working_set_requests: WORKING_SET_REQUESTS })
}

fn check(line: &Line) -> Result<(), String> {
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

fn request(index: usize, line: &Line, arrival_us: u64) -> Request {
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

    const TWO: &str = "{\"timestamp\": 5, \"input_length\": 1000, \"output_length\": 3, \"hash_ids\": [0, 2]}\n\
                       {\"timestamp\": 1, \"input_length\": 600, \"output_length\": 0, \"hash_ids\": [0, 1]}\n";

    #[test]
    fn equal_ids_are_equal_tokens_and_time_gives_the_order() {
        let workload = parse(TWO, 1, 10).unwrap();
        let (first, second) = (workload.prompt(0), workload.prompt(1));
        assert_eq!((first.len(), second.len()), (600, 1000));
        assert_eq!(first[..512], second[..512]);
        assert_ne!(first[512..600], second[512..600]);
        assert_eq!((workload.output(0).len(), workload.output(1).len()), (1, 3));
        assert_eq!((workload.requests[0].arrival_us, workload.requests[1].arrival_us), (0, 24_000));
        assert_eq!(parse(TWO, 1, 1).unwrap().requests.len(), 1);
    }

    #[test]
    fn a_bad_line_is_named() {
        for (bad, what) in [
            ("{\"timestamp\":1,\"input_length\":513,\"output_length\":1,\"hash_ids\":[0]}", "513 tokens need 2"),
            ("{\"timestamp\":1,\"input_length\":0,\"output_length\":1,\"hash_ids\":[]}", "lengths must be"),
            ("{\"timestamp\":1}", "missing field"),
        ] {
            let error = parse(&format!("{TWO}{bad}"), 1, 10).unwrap_err();
            assert!(error.message().contains("line 3") && error.message().contains(what), "{}", error.message());
        }
        assert!(parse("\n", 1, 10).is_err());
    }
}
