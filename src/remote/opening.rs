//! How a connection from another host opens, inside TLS. Pure: bytes in, bytes out.
//!
//! ```text
//! caller → daemon   "KVRR"  version u16  length u16  token
//! daemon → caller   "KVRR"  version u16  verdict u16              0 = accepted: frames of the routing protocol follow
//!                                                                 1 = refused: one error frame follows, then the end
//! ```
//!
//! Numbers are little-endian. The caller sends no frame before it has the answer, so that the daemon refuses a peer
//! before it has read anything of a request.

use thiserror::Error;

use crate::limits::{TOKEN_BYTES_MAX, TOKEN_BYTES_MIN};

/// The version of the opening. The frames after it have versions of their own.
pub const OPENING_VERSION: u16 = 1;
/// Bytes before the token, and of the answer.
pub const HEAD_BYTES: usize = 8;

const MAGIC: [u8; 4] = *b"KVRR";

/// Why an opening cannot be used.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum OpeningFault {
    /// It is something else.
    #[error("the peer's first bytes are no opening of kvrouted")]
    Foreign,
    /// It has another version.
    #[error("the peer's opening has version {0}, this one has {OPENING_VERSION}")]
    Version(u16),
    /// No token has this length.
    #[error("the peer announces a token of {0} bytes, but a token has {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX}")]
    TokenLength(usize),
    /// The verdict is neither.
    #[error("the peer answers with the unknown verdict {0}")]
    Verdict(u16),
}

/// The daemon's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Frames follow.
    Accepted = 0,
    /// One error frame follows.
    Refused = 1,
}

fn head(number: u16) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..4].copy_from_slice(&MAGIC);
    head[4..6].copy_from_slice(&OPENING_VERSION.to_le_bytes());
    head[6..].copy_from_slice(&number.to_le_bytes());
    head
}

/// Version and number of a head.
fn parts(head: &[u8; HEAD_BYTES]) -> Result<(u16, u16), OpeningFault> {
    let [a, b, c, d, version @ .., low, high] = *head;
    if [a, b, c, d] != MAGIC {
        return Err(OpeningFault::Foreign);
    }
    Ok((u16::from_le_bytes(version), u16::from_le_bytes([low, high])))
}

/// The opening of a caller with this token, whose length was checked when it was read.
#[must_use]
pub fn encode(token: &[u8]) -> Vec<u8> {
    [&head(token.len() as u16), token].concat()
}

/// The length of the token that follows this head.
///
/// # Errors
/// Why the opening is refused.
pub fn token_bytes(head: &[u8; HEAD_BYTES]) -> Result<usize, OpeningFault> {
    match parts(head)? {
        (version, _) if version != OPENING_VERSION => Err(OpeningFault::Version(version)),
        (_, bytes) if (TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX).contains(&usize::from(bytes)) => Ok(usize::from(bytes)),
        (_, bytes) => Err(OpeningFault::TokenLength(usize::from(bytes))),
    }
}

/// The answer with this verdict.
#[must_use]
pub fn answer(verdict: Verdict) -> [u8; HEAD_BYTES] {
    head(verdict as u16)
}

/// The verdict of an answer. A daemon of another version refuses in words.
///
/// # Errors
/// The peer is no daemon of this protocol.
pub fn verdict(answer: &[u8; HEAD_BYTES]) -> Result<Verdict, OpeningFault> {
    match parts(answer)? {
        (_, 1) => Ok(Verdict::Refused),
        (OPENING_VERSION, 0) => Ok(Verdict::Accepted),
        (OPENING_VERSION, other) => Err(OpeningFault::Verdict(other)),
        (version, _) => Err(OpeningFault::Version(version)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn head_of(bytes: &[u8]) -> &[u8; HEAD_BYTES] {
        bytes.first_chunk().expect("a head")
    }

    #[test]
    fn an_opening_has_its_layout() {
        let token = [b't'; 40];
        let bytes = encode(&token);
        assert_eq!(bytes[..8], *b"KVRR\x01\0\x28\0");
        assert_eq!((token_bytes(head_of(&bytes)), &bytes[8..]), (Ok(40), &token[..]));
        for verdict_of in [Verdict::Accepted, Verdict::Refused] {
            assert_eq!(verdict(&answer(verdict_of)), Ok(verdict_of));
        }
    }

    #[test]
    fn whatever_else_comes_is_refused_with_its_fault() {
        let length = |bytes: u16| token_bytes(&head(bytes));
        assert_eq!(length(31), Err(OpeningFault::TokenLength(31)));
        assert_eq!([length(32), length(256)], [Ok(32), Ok(256)]);
        assert_eq!([257, u16::MAX].map(length), [257, 65_535].map(|bytes| Err(OpeningFault::TokenLength(bytes))));
        assert_eq!(token_bytes(b"GET / HT"), Err(OpeningFault::Foreign));
        assert_eq!(token_bytes(b"KVRR\x02\0\x28\0"), Err(OpeningFault::Version(2)));
        assert_eq!(verdict(b"KVRR\x02\0\x01\0"), Ok(Verdict::Refused), "another version says why");
        assert_eq!(verdict(b"KVRR\x02\0\0\0"), Err(OpeningFault::Version(2)));
        assert_eq!(verdict(b"KVRR\x01\0\x07\0"), Err(OpeningFault::Verdict(7)));
        assert_eq!(verdict(b"HTTP/1.1"), Err(OpeningFault::Foreign));
    }

    proptest! {
        #[test]
        fn no_head_announces_more_than_a_token(bytes: [u8; HEAD_BYTES]) {
            if let Ok(length) = token_bytes(&bytes) {
                prop_assert!((TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX).contains(&length));
                prop_assert_eq!(bytes, head(length as u16));
            }
        }
    }
}
