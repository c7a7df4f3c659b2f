//! The lines of a trace: read one at a time, bounded, and with the checks that all formats share.

use std::io::{BufRead, Read};

use serde::de::DeserializeOwned;

use super::{OUTPUT_TOKENS_MAX, PROMPT_TOKENS_MAX, TraceError};

/// Bytes of a line, at most.
const LINE_BYTES_MAX: usize = 64 << 20;
/// A time, at most, seconds: beyond the Unix time of any trace, and exact to a microsecond as a float.
pub(super) const TIME_S_MAX: f64 = 1e10;

impl TraceError {
    pub(super) fn new(line: usize, reason: impl Into<String>) -> Self {
        Self { line, reason: reason.into() }
    }
}

/// The lines of a trace that are not blank.
pub(super) struct TraceLines<R> {
    reader: R,
    line: usize,
    bytes: Vec<u8>,
}

impl<R: BufRead> TraceLines<R> {
    pub(super) fn new(reader: R) -> Self {
        Self { reader, line: 0, bytes: Vec::new() }
    }

    /// The next line and its number, from 1; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<(usize, &str)>, TraceError> {
        loop {
            self.bytes.clear();
            self.line += 1;
            let mut bounded = (&mut self.reader).take(LINE_BYTES_MAX as u64 + 1);
            let read = bounded.read_until(b'\n', &mut self.bytes);
            if read.map_err(|error| TraceError::new(self.line, format!("cannot be read: {error}")))? == 0 {
                return Ok(None);
            }
            if self.bytes.len() > LINE_BYTES_MAX {
                return Err(TraceError::new(self.line, format!("longer than {LINE_BYTES_MAX} bytes")));
            }
            if !self.bytes.trim_ascii().is_empty() {
                break;
            }
        }
        match str::from_utf8(&self.bytes) {
            // A file from a spreadsheet begins with a byte-order mark.
            Ok(text) => Ok(Some((self.line, text.trim_start_matches('\u{feff}').trim()))),
            Err(_) => Err(TraceError::new(self.line, "not UTF-8")),
        }
    }
}

/// A record out of a line of JSON.
pub(super) fn record<T: DeserializeOwned>(line: usize, text: &str) -> Result<T, TraceError> {
    serde_json::from_str(text).map_err(|error| {
        let (column, text) = (error.column(), error.to_string());
        // The parser sees one line only, and its "line 1" would contradict the line of the file.
        let reason = text.rsplit_once(" at line ").map_or(text.as_str(), |(reason, _)| reason);
        TraceError::new(line, format!("column {column}: {reason}"))
    })
}

/// A time or duration, seconds.
pub(super) fn seconds(line: usize, name: &str, value_s: f64) -> Result<f64, TraceError> {
    if (0.0..=TIME_S_MAX).contains(&value_s) {
        return Ok(value_s);
    }
    Err(TraceError::new(line, format!("{name} is {value_s} s, not between 0 and {TIME_S_MAX:e} s")))
}

/// Tokens of a prompt.
pub(super) fn prompt_tokens(line: usize, name: &str, tokens: u64) -> Result<u32, TraceError> {
    match u32::try_from(tokens) {
        Ok(tokens @ 1..=PROMPT_TOKENS_MAX) => Ok(tokens),
        _ => Err(TraceError::new(line, format!("{name} is {tokens}, not between 1 and {PROMPT_TOKENS_MAX}"))),
    }
}

/// Tokens of an output. 0 counts as 1: an engine ends a request with a token.
pub(super) fn output_tokens(line: usize, name: &str, tokens: u64) -> Result<u32, TraceError> {
    match u32::try_from(tokens) {
        Ok(tokens @ 0..=OUTPUT_TOKENS_MAX) => Ok(tokens.max(1)),
        _ => Err(TraceError::new(line, format!("{name} is {tokens}, more than {OUTPUT_TOKENS_MAX}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blank_lines_are_skipped_but_counted() {
        let mut lines = TraceLines::new("\u{feff}a\r\n\n  \nb".as_bytes());
        assert_eq!(lines.next(), Ok(Some((1, "a"))));
        assert_eq!(lines.next(), Ok(Some((4, "b"))));
        assert_eq!(lines.next(), Ok(None));
    }

    #[test]
    fn bytes_that_are_no_text_are_refused_with_their_line() {
        let mut lines = TraceLines::new(&b"a\n\xff\xfe\n"[..]);
        assert!(lines.next().is_ok());
        assert_eq!(lines.next(), Err(TraceError::new(2, "not UTF-8")));
    }

    #[test]
    fn a_line_without_end_is_refused_before_memory_runs_out() {
        let endless = std::io::BufReader::new(std::io::repeat(b'x'));
        assert!(TraceLines::new(endless).next().is_err_and(|error| error.reason.starts_with("longer than")));
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for value in [-1.0, f64::NAN, f64::INFINITY, 1e11] {
            assert!(seconds(1, "t", value).is_err(), "{value}");
        }
        assert!(prompt_tokens(1, "in", 0).is_err());
        assert!(prompt_tokens(1, "in", u64::from(PROMPT_TOKENS_MAX) + 1).is_err());
        assert!(prompt_tokens(1, "in", 1 << 32 | 1).is_err());
        assert!(output_tokens(1, "out", u64::MAX).is_err());
        assert_eq!(output_tokens(1, "out", 0), Ok(1));
    }
}
