//! Workers that failed requests, and how long they are left alone.

use hashbrown::HashMap;

use crate::ids::WorkerIndex;
use crate::limits::BACK_OFF_DOUBLINGS_MAX;

/// How long a worker is left alone after it failed a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackOff {
    /// After the first failure, nanoseconds; 0 = not at all.
    pub first_ns: u64,
    /// At most.
    pub max_ns: u64,
}

impl Default for BackOff {
    fn default() -> Self {
        Self { first_ns: 500_000_000, max_ns: 30_000_000_000 }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Failed {
    /// Times that the back-off is doubled next.
    doublings: u32,
    until_ns: u64,
}

/// The workers that failed, under the bookings' lock.
#[derive(Debug, Default)]
pub(super) struct Failures(HashMap<WorkerIndex, Failed>);

impl Failures {
    /// A request failed on a worker. Returns until when the worker is to be left alone.
    ///
    /// What fails while it is left alone already was under way before, and adds nothing. After that each failure doubles
    /// the time; each [`BackOff::max_ns`] without one takes a doubling back.
    pub(super) fn add(&mut self, worker: WorkerIndex, back_off: BackOff, now_ns: u64) -> u64 {
        if back_off.first_ns == 0 {
            return 0;
        }
        let failed = self.0.entry(worker).or_default();
        if now_ns < failed.until_ns {
            return failed.until_ns;
        }
        let quiet = (now_ns - failed.until_ns).checked_div(back_off.max_ns).unwrap_or(0);
        let doublings = failed.doublings.saturating_sub(u32::try_from(quiet).unwrap_or(u32::MAX));
        let length_ns = back_off.first_ns.saturating_mul(1 << doublings).min(back_off.max_ns.max(back_off.first_ns));
        failed.doublings = (doublings + 1).min(BACK_OFF_DOUBLINGS_MAX);
        failed.until_ns = now_ns.saturating_add(length_ns);
        failed.until_ns
    }

    /// Until when a worker is left alone, if it is at this time.
    pub(super) fn in_force(&self, worker: WorkerIndex, now_ns: u64) -> Option<u64> {
        self.0.get(&worker).map(|failed| failed.until_ns).filter(|until_ns| now_ns < *until_ns)
    }

    /// Forgets a worker that has left.
    pub(super) fn forget(&mut self, worker: WorkerIndex) {
        self.0.remove(&worker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failure_doubles_the_time_up_to_a_bound_and_quiet_takes_it_back() {
        let (mut failures, back_off) = (Failures::default(), BackOff { first_ns: 10, max_ns: 70 });
        let (worker, mut now, mut lengths) = (WorkerIndex(3), 1000, Vec::new());
        for _ in 0..5 {
            let until = failures.add(worker, back_off, now);
            assert_eq!(failures.add(worker, back_off, until - 1), until, "under way before");
            lengths.push(until - now);
            now = until;
        }
        assert_eq!(lengths, [10, 20, 40, 70, 70]);
        // Two times the bound without a failure take two doublings.
        now += 2 * 70;
        assert_eq!(failures.add(worker, back_off, now) - now, 70);
        now += 70 + 4 * 70;
        assert_eq!(failures.add(worker, back_off, now) - now, 10);
        failures.forget(worker);
        assert_eq!(failures.add(worker, back_off, now), now + 10);
        assert_eq!(failures.add(worker, BackOff { first_ns: 0, max_ns: 70 }, now), 0);
    }
}
