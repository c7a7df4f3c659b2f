//! What a worker is, as gateways see it.

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
