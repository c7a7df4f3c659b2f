//! The encoder of replies, in one reused buffer, and the replies that are made of plain values. `daemon_replies` has those that
//! are made of the fleet table and of decisions.

use flatbuffers::{FlatBufferBuilder, WIPOffset};

#[cfg(feature = "daemon")]
use super::candidates::CandidateTemplates;
use super::header::{FRAME_IDENTIFIER, FrameKind, append_frame};
use super::schema_conversions::side_to_wire;
use crate::error::{Error, Kind};
use crate::ids::CorrelationId;
use crate::limits::ERROR_TEXT_BYTES_MAX;
use crate::schema_generated::routing as fb;

pub(super) type Builder = FlatBufferBuilder<'static>;

/// Encodes replies. Its buffers are reused: once they have grown, it allocates only when `out` or the fleet must grow.
#[derive(Default)]
pub struct ReplyEncoder {
    pub(super) builder: Builder,
    pub(super) loads: Vec<WIPOffset<fb::PotentialLoad<'static>>>,
    #[cfg(feature = "daemon")]
    pub(super) candidates: CandidateTemplates,
}

impl std::fmt::Debug for ReplyEncoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReplyEncoder").finish_non_exhaustive()
    }
}

impl ReplyEncoder {
    /// Answers any request with an error.
    pub fn error(&mut self, id: CorrelationId, error: &Error, out: &mut Vec<u8>) {
        let builder = &mut self.builder;
        let message = builder.create_string(cut(error.message()));
        let remedy = builder.create_string(cut(error.remedy()));
        let args = fb::ErrorArgs {
            code: error.kind() as u16,
            side: side_to_wire(error.side()),
            retryable: error.is_retryable(),
            retry_after_us: error.retry_after().unwrap_or_else(|| retry_after_us(error.kind())),
            message: Some(message),
            remedy: Some(remedy),
        };
        let root = fb::Error::create(builder, &args);
        self.finish(FrameKind::Error, id, root, out);
    }

    pub(super) fn finish<T>(&mut self, kind: FrameKind, id: CorrelationId, root: WIPOffset<T>, out: &mut Vec<u8>) {
        self.builder.finish(root, Some(FRAME_IDENTIFIER));
        append_frame(out, kind, id, self.builder.finished_data());
        self.builder.reset();
    }
}

/// The pause before a retry, microseconds; 0 = any time, or never.
pub(crate) const fn retry_after_us(kind: Kind) -> u32 {
    match kind {
        // Bookings and slots are freed at the rate at which requests end.
        Kind::TooManyBookings | Kind::Overloaded | Kind::PinnedBusy | Kind::AllBusy => 10_000,
        // Workers return as fast as their publishers connect.
        Kind::NobodyAvailable => 100_000,
        // After a restart, the next daemon runs by then.
        Kind::Draining => 1_000_000,
        _ => 0,
    }
}

pub(super) fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(ERROR_TEXT_BYTES_MAX)]
}
