//! The clocks the demo reads.

use std::time::{SystemTime, UNIX_EPOCH};

/// CLOCK_MONOTONIC in nanoseconds: the same for every process of the machine.
pub(crate) fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Seconds since 1970, as vLLM stamps its batches.
pub(crate) fn unix_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}
