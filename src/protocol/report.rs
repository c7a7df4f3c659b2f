//! What gateways report of their bookings and of workers.

/// The token that joins a gateway's connections in one session; drawn by the gateway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SessionToken {
    /// The upper half.
    pub hi: u64,
    /// The lower half.
    pub lo: u64,
}

/// An opaque handle of a booking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BookingHandle {
    /// Its slot, and a check of its session.
    pub slot: u64,
    /// Which of the bookings of that slot; never 0.
    pub generation: u64,
}

/// A gateway's reference to its booking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BookingRef<'a> {
    /// By the handle of the reply.
    Handle(BookingHandle),
    /// By the request id.
    Request {
        /// Unique within the session while the booking lives.
        request_id: &'a str,
        /// The attempt that made the booking.
        attempt: u32,
    },
}

/// The outcome of a report about a booking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BookingOutcome {
    /// The report changed the booking.
    Applied,
    /// A repeated report; nothing changed.
    AlreadyApplied,
    /// No such booking: never made in this run of the daemon, expired long ago, or of another session.
    Unknown,
    /// A later attempt of the same request holds the booking.
    Superseded,
}

/// A load report of a worker, or of a gateway about a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineLoad {
    /// Tokens still to prefill.
    pub prefill_tokens: u64,
    /// KV blocks of its requests in flight.
    pub decode_blocks: u64,
    /// Requests that the worker computes.
    pub running: u32,
    /// Requests that wait in the worker.
    pub waiting: u32,
    /// Share of KV blocks in use, millionths.
    pub kv_usage_millionths: u32,
}
