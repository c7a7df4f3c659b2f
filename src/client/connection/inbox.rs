//! Bytes that came from a daemon, and the replies in them.

use crate::client::frame::next_frame;
use crate::error::Result;
use crate::ids::CorrelationId;
use crate::wire::Reply;

/// What has come by one way.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    received: Vec<u8>,
    /// Bytes of `received` that are read already.
    consumed: usize,
}

impl Inbox {
    /// The bytes, to be received behind what they hold; those that are read already are gone.
    pub(super) fn room(&mut self) -> &mut Vec<u8> {
        self.received.drain(..self.consumed);
        self.consumed = 0;
        &mut self.received
    }

    /// The next reply, if all of it is there.
    ///
    /// # Errors
    /// [`Kind::Malformed`](crate::error::Kind::Malformed) if it cannot be read.
    pub(super) fn next_reply(&mut self) -> Result<Option<(CorrelationId, Reply)>> {
        let rest = self.received.get(self.consumed..).unwrap_or_default();
        let Some(frame) = next_frame(rest)? else { return Ok(None) };
        self.consumed += frame.bytes;
        Ok(Some((frame.id, frame.reply?)))
    }
}
