//! The step between bytes and tables: nothing is read from a body that has not been verified whole.

use flatbuffers::{Follow, InvalidFlatbuffer, Verifiable, VerifierOptions};

use super::header::FRAME_IDENTIFIER;
use crate::error::{Error, Kind, Result};
use crate::limits::{FRAME_TABLE_DEPTH_MAX, NAME_BYTES_MAX};

/// How much of a body's own size its objects may seem to take: vectors may share their elements and
/// tables their vtables, but a small body must not cost a large walk.
pub(super) const APPARENT_SIZE_FACTOR: usize = 8;

/// The table a verified body holds.
///
/// # Errors
/// [`Kind::Malformed`] with the verifier's reason.
pub(super) fn root<'a, T>(body: &'a [u8], tables_max: usize) -> Result<T::Inner>
where
    T: Follow<'a> + Verifiable + 'a,
{
    if body.get(4..8) != Some(FRAME_IDENTIFIER.as_bytes()) {
        return Err(malformed("the body does not carry the identifier KVRT"));
    }
    let options = VerifierOptions {
        max_depth: FRAME_TABLE_DEPTH_MAX,
        max_tables: tables_max,
        max_apparent_size: body.len().saturating_mul(APPARENT_SIZE_FACTOR),
        ignore_missing_null_terminator: true,
    };
    flatbuffers::root_with_opts::<T>(&options, body).map_err(|fault| malformed(&reason(&fault)))
}

/// A verifier's reason on one line, the field it names included.
fn reason(fault: &InvalidFlatbuffer) -> String {
    let text = fault.to_string();
    let mut line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.len() > NAME_BYTES_MAX {
        line.truncate(line.floor_char_boundary(NAME_BYTES_MAX));
    }
    line
}

/// The error for a body that is not what its header says.
pub(super) fn malformed(what: &str) -> Error {
    Error::new(
        Kind::Malformed,
        what,
        "encode the body with schemas/routing.fbs and the file identifier KVRT, padded to 8 bytes",
    )
}
