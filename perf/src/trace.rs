//! Requests: read from a trace, or made up by the generator. Pure: the text is an argument.
//!
//! A line is `{"timestamp", "input_length", "output_length", "hash_ids"}`, one id per 512 tokens of the
//! prompt, the last one possibly partial. Equal ids stand for equal content after an equal prefix.

use serde::Deserialize;

use crate::failure::Failure;

/// Tokens one id stands for.
pub(crate) const ID_TOKENS: u32 = 512;

/// One request, in blocks of [`ID_TOKENS`] tokens.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Request {
    /// Tokens of the prompt.
    #[serde(rename = "input_length")]
    pub(crate) prompt_tokens: u32,
    /// Tokens that are generated.
    #[serde(rename = "output_length")]
    pub(crate) output_tokens: u32,
    /// What the prompt is made of.
    #[serde(rename = "hash_ids")]
    pub(crate) ids: Vec<u64>,
}

impl Request {
    /// Whole blocks of the prompt.
    #[must_use]
    pub(crate) const fn prompt_blocks(&self, block_size: u32) -> u32 {
        self.prompt_tokens / block_size
    }
}

/// The first `rows` requests of a trace; all without a number. The lines are in the order of time.
///
/// # Errors
/// Names the line that is no request, or whose length and ids do not agree.
pub(crate) fn parse(text: &str, rows: Option<usize>) -> Result<Vec<Request>, Failure> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let requests: Vec<Request> =
        lines.take(rows.unwrap_or(usize::MAX)).map(|(at, line)| parse_line(at + 1, line)).collect::<Result<_, _>>()?;
    if requests.is_empty() {
        return Err(Failure::Trace { line: 0, what: "the trace is empty".to_owned() });
    }
    Ok(requests)
}

fn parse_line(line: usize, text: &str) -> Result<Request, Failure> {
    let request: Request =
        serde_json::from_str(text).map_err(|error| Failure::Trace { line, what: error.to_string() })?;
    let ids = request.prompt_tokens.div_ceil(ID_TOKENS) as usize;
    if request.ids.len() != ids {
        let what = format!("{} tokens need {ids} ids, not {}", request.prompt_tokens, request.ids.len());
        return Err(Failure::Trace { line, what });
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = "{\"timestamp\": 0, \"input_length\": 1000, \"output_length\": 3, \"hash_ids\": [0, 2]}\n\n\
                       {\"timestamp\": 1, \"input_length\": 512, \"output_length\": 0, \"hash_ids\": [7]}\n";

    #[test]
    fn lines_become_requests() {
        let requests = parse(TWO, None).expect("a good trace");
        assert_eq!(requests.len(), 2);
        assert_eq!(requests[0], Request { prompt_tokens: 1000, output_tokens: 3, ids: vec![0, 2] });
        assert_eq!((requests[0].prompt_blocks(16), requests[1].prompt_blocks(512)), (62, 1));
        assert_eq!(parse(TWO, Some(1)).expect("a good trace").len(), 1);
    }

    #[test]
    fn a_bad_line_is_named() {
        let bad = format!("{TWO}{{\"input_length\":513,\"output_length\":1,\"hash_ids\":[0]}}");
        let failure = parse(&bad, None).expect_err("one id too few").to_string();
        assert!(failure.contains("line 4") && failure.contains("need 2"), "{failure}");
        assert!(parse("{}", None).is_err() && parse("\n", None).is_err());
    }
}
