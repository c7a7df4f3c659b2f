//! Workers as gateways see them, and the reports about bookings and workers.

/// Which part of a request a pool serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PoolRole {
    /// Prefill and decode.
    #[default]
    Both,
    /// Prefill only.
    Prefill,
    /// Decode only.
    Decode,
}

impl PoolRole {
    /// The lower-case name used in the configuration, logs and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// The state of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WorkerState {
    /// Its publisher has not been reached yet, for less than the configured time. Eligible, because it may be reached
    /// at any moment.
    #[default]
    Joining,
    /// Its publisher is connected.
    Ready,
    /// Takes no new requests.
    Draining,
    /// Its publisher has been gone, or was never reached, for longer than the configured time. Gets no requests while
    /// others can take them, until its publisher connects.
    Down,
}

impl WorkerState {
    /// Whether requests may be sent to it as long as others like it are there.
    #[must_use]
    pub const fn is_schedulable(self) -> bool {
        matches!(self, Self::Joining | Self::Ready)
    }

    /// The lower-case name used in logs, metrics and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Down => "down",
        }
    }
}

/// The class of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceClass {
    /// An accelerator.
    #[default]
    Gpu,
    /// The host's processor.
    Cpu,
}

impl DeviceClass {
    /// The lower-case name used in the configuration, logs and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Cpu => "cpu",
        }
    }
}

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
