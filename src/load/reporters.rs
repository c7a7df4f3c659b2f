//! Which user's report is in force at each worker, so that no user reports on more than its share of a space's workers.

use std::collections::BTreeSet;

use hashbrown::HashMap;

use super::session::SessionId;
use crate::ids::{SpaceId, WorkerIndex};

/// The gateway that reports on a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reporter {
    /// The gateway's session, by which its user is known.
    pub session: SessionId,
    /// The worker's space.
    pub space: SpaceId,
    /// How many workers the space has.
    pub workers: usize,
}

/// The refusal of a report: reports of the same user are in force at as many workers of the space as one user may have,
/// and another user has sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BeyondShare;

/// A report that is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct InForce {
    uid: u32,
    space: SpaceId,
    until_ns: u64,
}

/// The reports of one kind that are in force, at most one for each worker, under the bookings' lock.
#[derive(Debug, Default)]
pub(super) struct Reporters {
    by_worker: HashMap<WorkerIndex, InForce>,
    by_end: BTreeSet<(u64, WorkerIndex)>,
    /// How many workers of a space a user's reports are in force at; never 0.
    counts: HashMap<(u32, SpaceId), usize>,
}

impl Reporters {
    /// Whether a user may report on a worker of a space, of whose workers it may report on `workers_max` at a time.
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
        // A report that renews one is bounded too: a user who was alone may have reports in force at all workers.
        count - usize::from(is_theirs) < workers_max
    }

    /// A user's report on a worker is in force until a time, and the one before is no more.
    pub(super) fn put(&mut self, (uid, space): (u32, SpaceId), worker: WorkerIndex, until_ns: u64) {
        self.end(worker);
        self.by_worker.insert(worker, InForce { uid, space, until_ns });
        self.by_end.insert((until_ns, worker));
        *self.counts.entry((uid, space)).or_default() += 1;
    }

    /// No user's report on a worker is in force any more: the worker has left, or speaks for itself.
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
        // A longer report takes the place of the one before, and is counted once.
        reporters.put(here, second, 30);
        assert!(!reporters.admits(here, third, 2, 9));
        assert!(reporters.admits(here, third, 2, 10), "the first has ended");
        assert!(!reporters.admits(here, third, 1, 29));
        reporters.put(here, third, 40);
        assert!(!reporters.admits(here, third, 1, 29), "it holds two where it may hold one, and renews neither");
        assert!(reporters.admits(here, third, 1, 30), "the other has ended");
        reporters.put(here, second, 30);
        reporters.end(third);
        // Another user's report takes the place of this one's.
        reporters.put((8, SpaceId(0)), second, 30);
        assert!(reporters.admits(here, third, 1, 29) && !reporters.admits((8, SpaceId(0)), third, 1, 29));
        reporters.end(second);
        reporters.end(second);
        assert_eq!(reporters.sizes(), [0; 3], "nothing is kept of reports that have ended");
    }
}
