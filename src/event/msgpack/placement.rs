//! The two payloads of a placement snapshot, as pull request 34407 of sgl-project/sglang proposes them (2026-08-11).
//!
//! | payload | msgpack |
//! |---|---|
//! | header | `[version, epoch, replica_rank, resume_seq, barrier_seq, barrier_id, record_count]` |
//! | chunk | `[[parent_hash\|nil, [block_hash…]]…]` |
//!
//! Later versions may append elements to the header and to a record: they are checked to be whole values and skipped.

use super::cursor::{Cursor, Type};
use crate::event::error::{DecodeError, Reason};
use crate::ids::EngineHash;
use crate::limits::{ENGINE_SNAPSHOT_BLOCKS_MAX, EVENT_MESSAGE_BYTES_MAX};

/// Elements of a header that every version has.
const HEADER_ELEMENTS: usize = 7;
/// Elements of a record that every version has.
const RECORD_ELEMENTS: usize = 2;

/// The header of a placement snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacementHeader<'p> {
    /// The version of the protocol.
    pub version: u64,
    /// The text that names the publisher's lifetime.
    pub epoch: &'p [u8],
    /// The data-parallel rank of the publisher.
    pub replica_rank: u64,
    /// The sequence number with which the live stream goes on.
    pub resume_seq: u64,
    /// The sequence number of the batch that the publisher sent when it took the snapshot.
    pub barrier_seq: u64,
    /// Records of all chunks.
    pub record_count: u64,
}

/// One block of a placement snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The block before it; `None` at the root.
    pub parent: Option<EngineHash>,
    /// Its engine hash.
    pub hash: EngineHash,
}

/// Decodes a header.
///
/// # Errors
/// The fault and its place.
pub fn decode_placement_header(payload: &[u8]) -> Result<PlacementHeader<'_>, DecodeError> {
    let mut cursor = begin(payload)?;
    let start = cursor;
    let elements = cursor.array()?;
    if elements < HEADER_ELEMENTS {
        return Err(start.error(Reason::MissingField));
    }
    let version = number(&mut cursor)?;
    let epoch = cursor.str_bytes()?;
    let [replica_rank, resume_seq, barrier_seq] = [number(&mut cursor)?, number(&mut cursor)?, number(&mut cursor)?];
    // Its batch names it too, in the topic. The sequence number says the same.
    cursor.str_bytes()?;
    let record_count = number(&mut cursor)?;
    end(cursor, elements - HEADER_ELEMENTS)?;
    Ok(PlacementHeader { version, epoch, replica_rank, resume_seq, barrier_seq, record_count })
}

/// Decodes a chunk, and adds its blocks to `placed`. Returns its records.
///
/// # Errors
/// The fault and its place; more than [`ENGINE_SNAPSHOT_BLOCKS_MAX`] blocks in all. `placed` may then hold some of the
/// chunk.
pub fn decode_placements(payload: &[u8], placed: &mut Vec<Placed>) -> Result<u64, DecodeError> {
    let mut cursor = begin(payload)?;
    let records = cursor.array()?;
    for _ in 0..records {
        let start = cursor;
        let elements = cursor.array()?;
        if elements < RECORD_ELEMENTS {
            return Err(start.error(Reason::MissingField));
        }
        let mut parent = if cursor.take_nil()? { None } else { Some(hash(&mut cursor)?) };
        let blocks = cursor.array()?;
        if placed.len() + blocks > ENGINE_SNAPSHOT_BLOCKS_MAX {
            return Err(start.error(Reason::TooManyBlocks));
        }
        for _ in 0..blocks {
            let hash = hash(&mut cursor)?;
            placed.push(Placed { parent, hash });
            parent = Some(hash);
        }
        skip(&mut cursor, elements - RECORD_ELEMENTS)?;
    }
    end(cursor, 0)?;
    Ok(records as u64)
}

fn begin(payload: &[u8]) -> Result<Cursor<'_>, DecodeError> {
    if payload.len() > EVENT_MESSAGE_BYTES_MAX {
        return Err(DecodeError::new(Reason::MessageTooLarge, EVENT_MESSAGE_BYTES_MAX));
    }
    Ok(Cursor::new(payload))
}

fn skip(cursor: &mut Cursor<'_>, elements: usize) -> Result<(), DecodeError> {
    (0..elements).try_for_each(|_| cursor.skip())
}

/// Skips the elements of later versions. Nothing may follow them.
fn end(mut cursor: Cursor<'_>, elements: usize) -> Result<(), DecodeError> {
    skip(&mut cursor, elements)?;
    if cursor.remaining() > 0 { Err(cursor.error(Reason::TrailingBytes)) } else { Ok(()) }
}

/// A number that is not negative.
fn number(cursor: &mut Cursor<'_>) -> Result<u64, DecodeError> {
    let start = *cursor;
    match cursor.int()? {
        (value, false) => Ok(value),
        (_, true) => Err(start.error(Reason::OutOfRange)),
    }
}

/// A block's hash: 64 bits, with or without a sign, as in events.
fn hash(cursor: &mut Cursor<'_>) -> Result<EngineHash, DecodeError> {
    if cursor.peek()? != Type::Int {
        return Err(cursor.error(Reason::WrongType));
    }
    cursor.int().map(|(bits, _)| EngineHash(bits))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::event::msgpack::tests::packed;

    #[test]
    fn a_header_and_its_chunks_are_read_as_they_are_proposed() {
        let said = packed(&json!([1, "0123", 3, 8, 7, "b", 2, {"later": [1]}]));
        let header = decode_placement_header(&said).expect("a header");
        let expected = PlacementHeader {
            version: 1,
            epoch: b"0123",
            replica_rank: 3,
            resume_seq: 8,
            barrier_seq: 7,
            record_count: 2,
        };
        assert_eq!(header, expected);
        let mut placed = Vec::new();
        let chunk = packed(&json!([[null, [1, -2]], [5, [6], "later"], [7, []]]));
        assert_eq!(decode_placements(&chunk, &mut placed), Ok(3));
        let of = |parent: Option<u64>, hash: u64| Placed { parent: parent.map(EngineHash), hash: EngineHash(hash) };
        assert_eq!(placed, [of(None, 1), of(Some(1), u64::MAX - 1), of(Some(5), 6)]);
    }

    #[test]
    fn anything_else_is_refused_with_its_fault() {
        let header = |said: Value| decode_placement_header(&packed(&said)).map(drop).map_err(|error| error.reason);
        assert_eq!(header(json!([1, "e", 0, 1, 0, "b"])), Err(Reason::MissingField));
        assert_eq!(header(json!([1, "e", 0, -1, 0, "b", 0])), Err(Reason::OutOfRange));
        assert_eq!(header(json!([1, 2, 0, 1, 0, "b", 0])), Err(Reason::WrongType));
        let chunk = |said: Value| decode_placements(&packed(&said), &mut Vec::new()).map_err(|error| error.reason);
        assert_eq!(chunk(json!([[null]])), Err(Reason::MissingField));
        assert_eq!(chunk(json!([["p", [1]]])), Err(Reason::WrongType));
        assert_eq!(chunk(json!([[null, [1.5]]])), Err(Reason::WrongType));
        let whole = packed(&json!([1, "e", 0, 1, 0, "b", 0]));
        for end in 0..whole.len() {
            assert!(decode_placement_header(&whole[..end]).is_err(), "cut at {end}");
        }
        let more = [&whole[..], &[0]].concat();
        assert_eq!(decode_placement_header(&more).map_err(|error| error.reason), Err(Reason::TrailingBytes));
    }

    #[test]
    fn more_blocks_than_a_worker_may_have_in_a_snapshot_are_refused() {
        let mut placed = vec![Placed { parent: None, hash: EngineHash(1) }; ENGINE_SNAPSHOT_BLOCKS_MAX];
        let one_more = decode_placements(&packed(&json!([[null, [2]]])), &mut placed);
        assert_eq!(one_more.map_err(|error| error.reason), Err(Reason::TooManyBlocks));
    }
}
