//! The events of a watch: one JSON object on each line of a chunked reply, in bounds.

use std::time::Instant;

use bytes::{Buf as _, Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;

use super::client::{RequestError, shown};
use crate::engines::causes;
use crate::limits::{KUBERNETES_EVENT_BYTES_MAX, KUBERNETES_WATCH_BYTES_MAX};

/// The lines of a stream.
pub(super) struct EventLines {
    body: Incoming,
    lines: Lines,
    deadline: Instant,
}

impl EventLines {
    /// The lines of a body that must end by `deadline`.
    pub(super) fn of(body: Incoming, deadline: Instant) -> Self {
        Self { body, lines: Lines::new(KUBERNETES_EVENT_BYTES_MAX, KUBERNETES_WATCH_BYTES_MAX), deadline }
    }

    /// The next line; `None` = the stream has ended, or has brought so much that it is begun again.
    ///
    /// A stream that ends within a line was cut: what the line would have said comes again with the next watch.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, RequestError> {
        loop {
            if let Some(line) = self.lines.next().map_err(RequestError::Nonsense)? {
                return Ok(Some(line));
            }
            if self.lines.is_spent() {
                return Ok(None);
            }
            let frame = tokio::time::timeout_at(self.deadline.into(), self.body.frame()).await;
            match frame {
                Err(_) => return Err(RequestError::Lost("the watch did not end in time".to_owned())),
                Ok(None) => return Ok(None),
                Ok(Some(Err(error))) => return Err(RequestError::Lost(shown(&causes(&error)))),
                Ok(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        self.lines.feed(&data);
                    }
                }
            }
        }
    }
}

/// Splits bytes into lines.
#[derive(Debug)]
pub(super) struct Lines {
    held: BytesMut,
    /// Bytes of `held` that are known to have no end of a line.
    searched: usize,
    line_bytes_max: usize,
    bytes_left: usize,
}

impl Lines {
    pub(super) fn new(line_bytes_max: usize, bytes_max: usize) -> Self {
        Self { held: BytesMut::new(), searched: 0, line_bytes_max, bytes_left: bytes_max }
    }

    pub(super) fn feed(&mut self, data: &[u8]) {
        self.bytes_left = self.bytes_left.saturating_sub(data.len());
        self.held.extend_from_slice(data);
    }

    /// Whether so much has come that the stream should be begun again. No line is cut for it.
    fn is_spent(&self) -> bool {
        self.bytes_left == 0 && self.held.is_empty()
    }

    /// The next whole line that is not empty.
    pub(super) fn next(&mut self) -> Result<Option<Bytes>, String> {
        while let Some(at) = memchr::memchr(b'\n', &self.held[self.searched..]) {
            let end = std::mem::take(&mut self.searched) + at;
            self.check(end)?;
            let line = self.held.split_to(end).freeze();
            self.held.advance(1);
            let line = line.trim_ascii_end();
            if !line.is_empty() {
                return Ok(Some(Bytes::copy_from_slice(line)));
            }
        }
        self.searched = self.held.len();
        self.check(self.held.len())?;
        Ok(None)
    }

    fn check(&self, length: usize) -> Result<(), String> {
        match length > self.line_bytes_max {
            true => Err(format!("an event has more than {} bytes", self.line_bytes_max)),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines_of(pieces: &[&[u8]], line_bytes_max: usize) -> Result<Vec<Vec<u8>>, String> {
        let (mut lines, mut found) = (Lines::new(line_bytes_max, usize::MAX), Vec::new());
        for piece in pieces {
            lines.feed(piece);
            while let Some(line) = lines.next()? {
                found.push(line.to_vec());
            }
        }
        Ok(found)
    }

    #[test]
    fn a_line_may_come_in_pieces_and_several_may_come_in_one() {
        let found = lines_of(&[b"{\"a\"", b":1}\n{}\n", b"\r\n\n[]", b"\n{\"cut"], 100).expect("short lines");
        assert_eq!(found, [&b"{\"a\":1}"[..], b"{}", b"[]"]);
    }

    #[test]
    fn a_line_without_an_end_is_refused_before_it_fills_memory() {
        assert!(lines_of(&[b"12345", b"678"], 8).expect("as long as allowed").is_empty());
        assert!(lines_of(&[b"12345", b"6789"], 8).is_err());
        assert!(lines_of(&[b"123456789\n"], 8).is_err(), "also with an end");
    }

    #[test]
    fn a_stream_that_has_brought_much_is_begun_again_after_a_whole_line() {
        let mut lines = Lines::new(10, 6);
        lines.feed(b"1234\n5");
        assert!(lines.next().expect("a line").is_some() && lines.next().expect("none").is_none());
        assert!(!lines.is_spent(), "a line is under way");
        lines.feed(b"6\n");
        assert_eq!(lines.next().expect("a line").as_deref(), Some(&b"56"[..]));
        assert!(lines.is_spent());
    }

    proptest! {
        #[test]
        fn pieces_change_nothing(text in "[ab\n\r ]{0,60}", cuts in proptest::collection::vec(0_usize..60, 0..8)) {
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|cut| *cut <= text.len()).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &text.as_bytes()[pair[0]..pair[1]]).collect();
            prop_assert_eq!(lines_of(&pieces, 100), lines_of(&[text.as_bytes()], 100));
        }
    }
}
