//! What a gateway says of its bookings, owned: it may have to be said again on another connection.

use crate::ids::{CorrelationId, Worker};
use crate::protocol::{BookingHandle, BookingRef};
use crate::wire::RequestEncoder;

/// A booking, and the daemon run that holds it: another run knows nothing of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Booking {
    /// The daemon's name of it.
    pub handle: BookingHandle,
    /// The daemon run.
    pub instance_id: u64,
}

/// How a report names what it is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::client) enum Name {
    Handle(BookingHandle),
    /// What a route whose reply never came may have booked.
    Request {
        request_id: Box<str>,
        attempt: u32,
    },
}

impl Name {
    fn as_ref(&self) -> BookingRef<'_> {
        match self {
            Self::Handle(handle) => BookingRef::Handle(*handle),
            Self::Request { request_id, attempt } => BookingRef::Request { request_id, attempt: *attempt },
        }
    }
}

/// What became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::client) enum Word {
    /// Its prompt is computed, in so many microseconds; 0 = not said.
    PrefillComplete { prefill_us: u64 },
    /// So many tokens have been put out.
    OutputProgress { output_tokens: u32 },
    /// Another worker runs it.
    Served { worker: Worker },
    /// It has ended.
    Free,
}

/// One report. To say it twice changes nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::client) struct Report {
    pub(in crate::client) name: Name,
    pub(in crate::client) word: Word,
}

impl Report {
    /// Appends it as a frame.
    pub(in crate::client) fn encode(&self, encoder: &mut RequestEncoder, id: CorrelationId, out: &mut Vec<u8>) {
        let booking = self.name.as_ref();
        match self.word {
            Word::PrefillComplete { prefill_us } => encoder.prefill_complete(id, &booking, prefill_us, out),
            Word::OutputProgress { output_tokens } => encoder.output_progress(id, &booking, output_tokens, out),
            Word::Served { worker } => encoder.served(id, &booking, worker, out),
            Word::Free => encoder.free(id, &booking, out),
        }
    }
}
