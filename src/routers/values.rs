//! The values that routers exchange.

use std::fmt;

use crate::ids::Worker;
use crate::limits::{GAUGE_DECODE_PARTS_MAX, GAUGE_NS_MAX, GAUGE_SHARE_MAX, GAUGE_TOKENS_MAX};
pub use crate::load::Gauge;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:016x}", self.0)
            }
        }
    };
}

number! {
    /// The number of a router, the same in all of its runs.
    OriginId
}
number! {
    /// One run of an origin: a random number of its start.
    Incarnation
}
number! {
    /// A hash of what all routers of a fleet must have in common: the spaces with their model, namespace, role, block
    /// size and scheme. Workers come and go, and are not part of it.
    Fingerprint
}
number! {
    /// A random number of a request for a snapshot, never used twice.
    Nonce
}

/// The keyed 128-bit hash of an affinity session's name, the same at all routers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionName(pub u128);

/// The router that a message comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sender {
    /// Its number.
    pub origin: OriginId,
    /// Its run.
    pub incarnation: Incarnation,
    /// Its fleet.
    pub fingerprint: Fingerprint,
}

impl Gauge {
    /// Whether every number is one that a router may send. Sums of all origins' gauges then cannot overflow.
    #[must_use]
    pub fn is_in_range(&self) -> bool {
        self.prefill_tokens <= GAUGE_TOKENS_MAX
            && self.decode_parts <= GAUGE_DECODE_PARTS_MAX
            && self.queued_ns.max(self.running_ns).max(self.elapsed_ns) <= GAUGE_NS_MAX
            && self.recent_share >= 0.0
            && self.recent_share <= GAUGE_SHARE_MAX
    }

    /// The nearest gauge in range.
    #[must_use]
    pub fn clamped(self) -> Self {
        let share = if self.recent_share > 0.0 { self.recent_share.min(GAUGE_SHARE_MAX) } else { 0.0 };
        Self {
            prefill_tokens: self.prefill_tokens.min(GAUGE_TOKENS_MAX),
            decode_parts: self.decode_parts.min(GAUGE_DECODE_PARTS_MAX),
            queued_ns: self.queued_ns.min(GAUGE_NS_MAX),
            running_ns: self.running_ns.min(GAUGE_NS_MAX),
            elapsed_ns: self.elapsed_ns.min(GAUGE_NS_MAX),
            recent_share: share,
            ..self
        }
    }
}

/// A worker's gauge in a message.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WorkerGauge {
    /// The worker.
    pub worker: Worker,
    /// What the origin's bookings added to it when the gauge was first sent.
    pub gauge: Gauge,
    /// The time since then, milliseconds; 0 in a batch.
    pub age_ms: u32,
}

/// A session of `affinity` and its worker. Of two bindings of one session, the later use wins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Binding {
    /// The session.
    pub session: SessionName,
    /// The worker that it is bound to.
    pub worker: Worker,
    /// Time since the last use, milliseconds. The link's delay comes on top.
    pub unused_ms: u64,
    /// The session is not bound any more.
    pub ended: bool,
}
