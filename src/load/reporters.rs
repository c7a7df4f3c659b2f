//! Reports on workers: which user's report is in force at each worker, and how long a failed worker gets no requests.

use std::collections::BTreeSet;

use hashbrown::HashMap;

use super::session::SessionId;
use crate::ids::{SpaceId, WorkerIndex};
use crate::limits::BACK_OFF_DOUBLINGS_MAX;

/// The gateway that reports on a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reporter {
    /// The gateway's session, which identifies its user.
    pub session: SessionId,
    /// The worker's space.
    pub space: SpaceId,
    /// Workers of that space.
    pub workers: usize,
}

/// The refusal of a report: the user's reports already cover its share of the space's workers, and another user has
/// sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BeyondShare;

/// A report in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct InForce {
    uid: u32,
    space: SpaceId,
    until_ns: u64,
}

/// The reports of one kind that are in force, at most one for each worker. Under the bookings' lock.
#[derive(Debug, Default)]
pub(super) struct Reporters {
    by_worker: HashMap<WorkerIndex, InForce>,
    by_end: BTreeSet<(u64, WorkerIndex)>,
    /// Workers of a space that a user's reports cover; never 0.
    counts: HashMap<(u32, SpaceId), usize>,
}

impl Reporters {
    /// Whether a user may report on a worker of a space, if its reports may cover `workers_max` workers at a time.
    pub(super) fn admits(
        &mut self,
        (uid, space): (u32, SpaceId),
        worker: WorkerIndex,
        workers_max: usize,
        now_ns: u64,
    ) -> bool {
        self.end_expired(now_ns);
        let is_theirs = self.by_worker.get(&worker).is_some_and(|report| (report.uid, report.space) == (uid, space));
        let count = self.counts.get(&(uid, space)).copied().unwrap_or(0);
        // The limit applies to a renewal too: a user who was alone may cover all workers.
        count - usize::from(is_theirs) < workers_max
    }

    /// Puts a user's report on a worker in force until a time, instead of the previous one.
    pub(super) fn put(&mut self, (uid, space): (u32, SpaceId), worker: WorkerIndex, until_ns: u64) {
        self.end(worker);
        self.by_worker.insert(worker, InForce { uid, space, until_ns });
        self.by_end.insert((until_ns, worker));
        *self.counts.entry((uid, space)).or_default() += 1;
    }

    /// Ends the report on a worker: the worker has left, or reports itself.
    pub(super) fn end(&mut self, worker: WorkerIndex) {
        let Some(report) = self.by_worker.remove(&worker) else { return };
        self.by_end.remove(&(report.until_ns, worker));
        let of = (report.uid, report.space);
        if let Some(count) = self.counts.get_mut(&of) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&of);
            }
        }
    }

    /// Ends at most one report for each worker, and each report once.
    fn end_expired(&mut self, now_ns: u64) {
        while let Some((_, worker)) = self.by_end.first().copied().filter(|(until_ns, _)| *until_ns <= now_ns) {
            self.end(worker);
        }
    }

    #[cfg(test)]
    fn sizes(&self) -> [usize; 3] {
        [self.by_worker.len(), self.by_end.len(), self.counts.len()]
    }
}

/// The back-off of a worker after a failed request: it gets no requests while others can take them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackOff {
    /// After the first failure, nanoseconds; 0 = none.
    pub first_ns: u64,
    /// The longest back-off, nanoseconds.
    pub max_ns: u64,
}

impl Default for BackOff {
    fn default() -> Self {
        Self { first_ns: 500_000_000, max_ns: 30_000_000_000 }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Failed {
    /// Doublings of the next back-off.
    doublings: u32,
    until_ns: u64,
}

/// The workers that failed. Under the bookings' lock.
#[derive(Debug, Default)]
pub(super) struct Failures(HashMap<WorkerIndex, Failed>);

impl Failures {
    /// Counts a failed request of a worker. Returns the end of the worker's back-off.
    ///
    /// A failure during the back-off adds nothing, because its request was already in flight. Each later failure
    /// doubles the back-off; each [`BackOff::max_ns`] without one takes a doubling back.
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

    /// The end of a worker's back-off, if it is in force.
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
    fn a_user_reports_on_its_share_of_each_space_until_its_reports_end() {
        let mut reporters = Reporters::default();
        let [here, there] = [(7, SpaceId(0)), (7, SpaceId(1))];
        let [first, second, third] = [0, 1, 2].map(WorkerIndex);
        reporters.put(here, first, 10);
        reporters.put(here, second, 20);
        assert!(!reporters.admits(here, third, 2, 9));
        assert!(reporters.admits(here, second, 2, 9), "the user reports on it already");
        assert!(reporters.admits(there, third, 2, 9) && reporters.admits((8, SpaceId(0)), third, 2, 9));
        // A longer report replaces the one before, and counts once.
        reporters.put(here, second, 30);
        assert!(!reporters.admits(here, third, 2, 9));
        assert!(reporters.admits(here, third, 2, 10), "the first has ended");
        assert!(!reporters.admits(here, third, 1, 29));
        reporters.put(here, third, 40);
        assert!(!reporters.admits(here, third, 1, 29), "it holds two where it may hold one, and renews neither");
        assert!(reporters.admits(here, third, 1, 30), "the other has ended");
        reporters.put(here, second, 30);
        reporters.end(third);
        // Another user's report replaces this one.
        reporters.put((8, SpaceId(0)), second, 30);
        assert!(reporters.admits(here, third, 1, 29) && !reporters.admits((8, SpaceId(0)), third, 1, 29));
        reporters.end(second);
        reporters.end(second);
        assert_eq!(reporters.sizes(), [0; 3], "nothing is kept of reports that have ended");
    }

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
        // Twice the maximum without a failure takes two doublings back.
        now += 2 * 70;
        assert_eq!(failures.add(worker, back_off, now) - now, 70);
        now += 70 + 4 * 70;
        assert_eq!(failures.add(worker, back_off, now) - now, 10);
        failures.forget(worker);
        assert_eq!(failures.add(worker, back_off, now), now + 10);
        assert_eq!(failures.add(worker, BackOff { first_ns: 0, max_ns: 70 }, now), 0);
    }
}
