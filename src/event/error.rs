//! Why a payload could not be decoded.

use crate::error::{Error, Kind};
use crate::reasons::reasons;
use std::fmt;

reasons! {
    /// The fault of a payload.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    Reason {}
    /// The first bytes belong to no known format.
    UnknownFormat = "unknown_format";
    /// The payload is larger than `EVENT_MESSAGE_BYTES_MAX`.
    MessageTooLarge = "message_too_large";
    /// The payload ends inside a value, or a length reaches beyond its end.
    Truncated = "truncated";
    /// Bytes follow the batch.
    TrailingBytes = "trailing_bytes";
    /// Values are nested deeper than `MSGPACK_DEPTH_MAX`.
    TooDeep = "too_deep";
    /// A byte that cannot begin a msgpack value.
    InvalidMarker = "invalid_marker";
    /// A value has another type than its field.
    WrongType = "wrong_type";
    /// A number does not fit its field.
    OutOfRange = "out_of_range";
    /// A string is not UTF-8.
    InvalidUtf8 = "invalid_utf8";
    /// A required field of an event is absent.
    MissingField = "missing_field";
    /// A key occurs twice in one event.
    RepeatedField = "repeated_field";
    /// More than `EVENT_BATCH_EVENTS_MAX` events.
    TooManyEvents = "too_many_events";
    /// More than `EVENT_BATCH_BLOCKS_MAX` blocks.
    TooManyBlocks = "too_many_blocks";
    /// More than `EVENT_BATCH_TOKENS_MAX` tokens.
    TooManyTokens = "too_many_tokens";
    /// More than `EVENT_BATCH_MEDIA_MAX` multimodal objects.
    TooManyMedia = "too_many_media";
    /// More than `EVENT_BATCH_TEXT_BYTES_MAX` bytes of names and salts.
    TooMuchText = "too_much_text";
    /// The flatbuffer does not pass its verifier.
    InvalidFlatbuffer = "invalid_flatbuffer";
    /// The batch uses a hash rule or a window that this version does not know.
    UnsupportedScheme = "unsupported_scheme";
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A payload that could not be decoded. No part of it was applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason} at byte {offset}")]
pub struct DecodeError {
    /// What is wrong.
    pub reason: Reason,
    /// The place in the payload, in bytes from its start; 0 if the format's verifier does not say.
    pub offset: usize,
}

impl DecodeError {
    /// An error at a byte of the payload.
    #[must_use]
    pub const fn new(reason: Reason, offset: usize) -> Self {
        Self { reason, offset }
    }
}

impl From<DecodeError> for Error {
    fn from(error: DecodeError) -> Self {
        Self::new(
            Kind::Undecodable,
            format!("event batch skipped: {error}"),
            "check that the engine's version is supported; if it is, report this with a capture",
        )
    }
}
