//! One clock for all processes, naps that end on time, and what the threads of this one have computed.

use std::num::NonZeroU64;
use std::time::Duration;

use rustix::thread::set_current_timer_slack;
use rustix::time::{ClockId, clock_gettime};

use crate::failure::Failure;

/// Nanoseconds of the clock that every process of this machine reads the same.
#[must_use]
pub(crate) fn clock_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// How late the kernel may end a nap, nanoseconds. Its default of 50 us would be most of a short nap.
const NAP_SLACK_NS: u64 = 1_000;

/// Lets the naps of the calling thread end on time, as far as the system allows.
pub(crate) fn nap_exactly() {
    // A kernel that refuses leaves the naps longer: the figures of both sides grow alike.
    let _ = set_current_timer_slack(NonZeroU64::new(NAP_SLACK_NS));
}

/// Sleeps for that long. A thread that waits this way leaves its processor to the threads that are measured; one that
/// yields in a loop takes a full share of it from them.
pub(crate) fn nap(length: Duration) {
    std::thread::sleep(length);
}

/// Processor time of this process' eldest thread of that name, nanoseconds; 0 = there is none. Threads that libzmq
/// starts are called as the one that asked for them, and are younger.
///
/// # Errors
/// The system does not say.
pub(crate) fn cpu_ns(name: &str) -> Result<u64, Failure> {
    let mut eldest: Option<(u64, u64)> = None;
    for task in std::fs::read_dir("/proc/self/task").map_err(Failure::file("/proc/self/task"))?.flatten() {
        // A thread may end while it is asked about.
        let Ok(of) = std::fs::read_to_string(task.path().join("comm")) else { continue };
        let Ok(spent) = std::fs::read_to_string(task.path().join("schedstat")) else { continue };
        let Some(thread) = task.file_name().to_str().and_then(|number| number.parse().ok()) else { continue };
        if of.trim_end() == name && eldest.is_none_or(|(other, _)| thread < other) {
            let ns = spent.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
            eldest = Some((thread, ns));
        }
    }
    Ok(eldest.map_or(0, |(_, ns)| ns))
}
