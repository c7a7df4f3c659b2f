//! The load of an SGLang scheduler, on the socket of `--load-publish-endpoint` (0.5.20 and later).
//!
//! The payload is the array `["LoadStat", running, waiting, tokens, tokens_max, dp_rank|nil, waiting_uncached_tokens,
//! …]`: every version has the first six elements, and later versions append more (`load_publisher.py`).

use super::cursor::{Cursor, Type};
use crate::event::error::{DecodeError, Reason};
use crate::limits::EVENT_MESSAGE_BYTES_MAX;

/// Elements of the array that every version sends, including the tag.
const PLACES_MIN: usize = 6;

/// One reading of the load. A later one replaces it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadStat {
    /// Requests that the engine computes.
    pub running: u32,
    /// Requests that wait in the engine.
    pub waiting: u32,
    /// KV tokens in use.
    pub used_tokens: u64,
    /// KV tokens that fit; 0 = the engine does not know.
    pub capacity_tokens: u64,
    /// Prompt tokens of the waiting requests that are not cached; 0 if the engine's version does not send them.
    pub waiting_uncached_tokens: u64,
}

/// Decodes a payload. Elements after the known ones are checked to be whole values and skipped.
///
/// # Errors
/// The fault and its place: another tag, another type, a negative count, missing or excess bytes.
pub fn decode_load_stat(payload: &[u8]) -> Result<LoadStat, DecodeError> {
    if payload.len() > EVENT_MESSAGE_BYTES_MAX {
        return Err(DecodeError::new(Reason::MessageTooLarge, EVENT_MESSAGE_BYTES_MAX));
    }
    let mut cursor = Cursor::new(payload);
    let start = cursor;
    let places = cursor.array()?;
    if places < PLACES_MIN {
        return Err(start.error(Reason::MissingField));
    }
    let tag = cursor;
    if cursor.str_bytes()? != b"LoadStat" {
        return Err(tag.error(Reason::WrongType));
    }
    let [running, waiting, used_tokens, capacity_tokens] = counts(&mut cursor)?;
    // The socket determines the rank. This field only informs people.
    cursor.skip()?;
    let [waiting_uncached_tokens] = if places > PLACES_MIN { counts(&mut cursor)? } else { [0] };
    for _ in PLACES_MIN + 1..places {
        cursor.skip()?;
    }
    if cursor.remaining() > 0 {
        return Err(cursor.error(Reason::TrailingBytes));
    }
    let requests = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
    let (running, waiting) = (requests(running), requests(waiting));
    Ok(LoadStat { running, waiting, used_tokens, capacity_tokens, waiting_uncached_tokens })
}

/// Non-negative numbers, one after the other.
fn counts<const N: usize>(cursor: &mut Cursor<'_>) -> Result<[u64; N], DecodeError> {
    let mut counts = [0; N];
    for count in &mut counts {
        let start = *cursor;
        if cursor.peek()? != Type::Int {
            return Err(start.error(Reason::WrongType));
        }
        *count = match cursor.int()? {
            (value, false) => value,
            (_, true) => return Err(start.error(Reason::OutOfRange)),
        };
    }
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::event::msgpack::tests::packed;

    fn decode(said: &serde_json::Value) -> Result<LoadStat, Reason> {
        decode_load_stat(&packed(said)).map_err(|error| error.reason)
    }

    #[test]
    fn every_length_that_engines_send_is_read() {
        let whole = json!(["LoadStat", 3, 2, 70_000, 400_000, 0, 9_000, 80_000, 256, 123_456, 7_000_000_000_u64]);
        let stat = LoadStat {
            running: 3,
            waiting: 2,
            used_tokens: 70_000,
            capacity_tokens: 400_000,
            waiting_uncached_tokens: 9_000,
        };
        assert_eq!(decode(&whole), Ok(stat));
        let first = json!(["LoadStat", 3, 2, 70_000, 400_000, null]);
        assert_eq!(decode(&first), Ok(LoadStat { waiting_uncached_tokens: 0, ..stat }));
        let later = json!(["LoadStat", 3, 2, 70_000, 400_000, 1, 9_000, {"what": ["comes"]}, "later"]);
        assert_eq!(decode(&later), Ok(stat));
    }

    #[test]
    fn a_payload_that_is_not_a_reading_is_refused_with_its_fault() {
        for (said, reason) in [
            (json!({"LoadStat": 1}), Reason::WrongType),
            (json!(["LoadStat", 1, 2, 3, 4]), Reason::MissingField),
            (json!(["BlockStored", 1, 2, 3, 4, null]), Reason::WrongType),
            (json!(["LoadStat", -1, 2, 3, 4, null]), Reason::OutOfRange),
            (json!(["LoadStat", 1, 2.5, 3, 4, null]), Reason::WrongType),
            (json!(["LoadStat", 1, 2, 3, 4, null, null]), Reason::WrongType),
        ] {
            assert_eq!(decode(&said), Err(reason), "{said}");
        }
        let whole = packed(&json!(["LoadStat", 1, 2, 3, 4, null, 5]));
        for end in 0..whole.len() {
            assert!(decode_load_stat(&whole[..end]).is_err(), "cut at {end}");
        }
        let more = [&whole[..], &[0]].concat();
        assert_eq!(decode_load_stat(&more).map_err(|error| error.reason), Err(Reason::TrailingBytes));
    }
}
