//! The opening of a connection from another host, both ways: what is understood is written as it was read.

use kvrouted::limits::{TOKEN_BYTES_MAX, TOKEN_BYTES_MIN};
use kvrouted::remote::opening::{
    HEAD_BYTES, OPENING_VERSION, OpeningFault, Verdict, answer, encode, token_bytes, verdict,
};

/// A caller's first bytes, and the same bytes as a daemon's answer.
pub(crate) fn opening(data: &[u8]) {
    let Some((head, rest)) = data.split_first_chunk::<HEAD_BYTES>() else { return };
    let version = u16::from_le_bytes([head[4], head[5]]);
    match token_bytes(head) {
        Ok(bytes) => {
            assert!((TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX).contains(&bytes) && version == OPENING_VERSION);
            if let Some(token) = rest.get(..bytes) {
                assert_eq!(encode(token), data[..HEAD_BYTES + bytes]);
            }
        }
        Err(fault) => said(fault, head),
    }
    match verdict(head) {
        Ok(Verdict::Accepted) => assert_eq!(answer(Verdict::Accepted), *head),
        // A daemon of another version refuses too.
        Ok(Verdict::Refused) => assert!(head.starts_with(b"KVRR") && head.ends_with(&[1, 0])),
        Err(fault) => said(fault, head),
    }
}

/// A fault is about what was sent, in one line.
fn said(fault: OpeningFault, head: &[u8; HEAD_BYTES]) {
    let line = fault.to_string();
    assert!(!line.is_empty() && !line.chars().any(char::is_control), "{line}");
    assert_eq!(fault == OpeningFault::Foreign, !head.starts_with(b"KVRR"));
}
