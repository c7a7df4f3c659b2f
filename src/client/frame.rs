//! The daemon's frames in a stream of bytes.

use crate::error::{Error, Kind, Result};
use crate::ids::CorrelationId;
use crate::limits::FRAME_HEADER_BYTES;
use crate::wire::{FrameHeader, PROTOCOL_VERSION, Reply, decode_reply};

/// A whole frame.
pub(super) struct ReplyFrame {
    /// Whose reply it is.
    pub(super) id: CorrelationId,
    /// What it says, if that can be read.
    pub(super) reply: Result<Reply>,
    /// How long it is, its header included.
    pub(super) bytes: usize,
}

/// The first frame of what came; `None` = it is not whole yet.
///
/// # Errors
/// [`Kind::Malformed`] for a header that cannot be trusted: where the next frame begins is not known then.
pub(super) fn next_frame(received: &[u8]) -> Result<Option<ReplyFrame>> {
    let Some(header) = received.first_chunk::<FRAME_HEADER_BYTES>() else { return Ok(None) };
    let header = FrameHeader::parse(header).map_err(|fault| untrusted(&format!("a frame header with {fault}")))?;
    if header.version != PROTOCOL_VERSION {
        return Err(untrusted(&format!("a frame of protocol version {}", header.version)));
    }
    let bytes = FRAME_HEADER_BYTES + header.body_bytes as usize;
    let Some(body) = received.get(FRAME_HEADER_BYTES..bytes) else { return Ok(None) };
    Ok(Some(ReplyFrame { id: header.correlation_id, reply: decode_reply(header.kind, body), bytes }))
}

pub(super) fn untrusted(what: &str) -> Error {
    Error::new(
        Kind::Malformed,
        format!("the daemon sent {what}"),
        "check that the socket is kvrouted's and of the same release",
    )
}
