//! The counters of snapshots, and the reasons why a snapshot is not used.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::metrics::{CounterSet, SnapshotCounter};
use crate::reasons::reasons;

reasons! {
    /// Why a snapshot is not used. Its worker then starts empty, as it would without a snapshot.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    Refusal {
        /// What an operator can do about it.
        remedy: &'static str;
    }
    /// The file cannot be read.
    Unreadable = "unreadable", "check the disk and the directory's owner; the next snapshot replaces the file";
    /// The file does not begin like a snapshot.
    NotASnapshot = "not_a_snapshot", "give the snapshots a directory of their own";
    /// The file has another version of the format.
    OtherVersion = "other_version", "none needed; the next snapshot has this version";
    /// The file ends before its end.
    Truncated = "truncated", "check the disk; the next snapshot replaces the file";
    /// The bytes have changed since they were written.
    Checksum = "checksum", "check the disk; the next snapshot replaces the file";
    /// The checksums are right, but the contents are invalid.
    Malformed = "malformed", "report it with the file; the next snapshot replaces the file";
    /// The file belongs to another worker than its name says.
    OtherWorker = "other_worker", "give each daemon a directory of its own, and rename no file in it";
    /// The file belongs to another model, namespace or role than the worker.
    OtherSpace = "other_space", "none needed if the worker's record was changed; otherwise give each daemon a directory of its own";
    /// The blocks have another size, or another hash, than the space's.
    OtherScheme = "other_scheme", "none needed if the space's block size was changed; otherwise correct it";
    /// The worker has no replay endpoint. Only a replay can show that the worker's events continue from the snapshot.
    Unprovable = "unprovable", "give the worker's record the engine's replay endpoint";
    /// Learnt prefill times are beyond the bounds of learning.
    Implausible = "implausible", "none needed; those workers' class learns anew";
    /// The file of a worker that was added could not be read in time.
    Late = "late", "check whether the file system of snapshot.dir responds; the engine's replay brings what it still has";
    /// Every check passed, but loading the blocks failed. A log line says why.
    LoadFailed = "load_failed", "see the log line of the load before this one";
}

/// A fault of a snapshot, and where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Why it is not used.
    pub refusal: Refusal,
    /// The bytes of the file that were read before the fault showed.
    pub offset: u64,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}", self.refusal.name(), self.offset)
    }
}

/// Counters and gauges of snapshots, written by the snapshot threads and read by any thread.
#[derive(Debug)]
pub struct SnapshotStats {
    /// The counters that operators see.
    pub counters: CounterSet<SnapshotCounter>,
    refused: Box<[AtomicU64]>,
    writing_ns: AtomicU64,
    bookings_ns: AtomicU64,
    /// When the snapshot that is furthest behind its worker was last known to be complete, milliseconds of Unix time.
    /// 0 = no snapshot.
    oldest_unix_ms: AtomicU64,
}

impl Default for SnapshotStats {
    fn default() -> Self {
        Self {
            counters: CounterSet::default(),
            refused: Refusal::ALL.iter().map(|_| AtomicU64::new(0)).collect(),
            writing_ns: AtomicU64::new(0),
            bookings_ns: AtomicU64::new(0),
            oldest_unix_ms: AtomicU64::new(0),
        }
    }
}

impl SnapshotStats {
    /// Counts a snapshot that is not used.
    pub fn refuse(&self, refusal: Refusal) {
        // Relaxed, here and below: a count orders nothing.
        self.refused[refusal as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// The snapshots that were not used, by reason.
    pub fn refused(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Refusal::ALL.iter().map(|refusal| (refusal.name(), self.refused[*refusal as usize].load(Ordering::Relaxed)))
    }

    pub(super) fn add_writing_ns(&self, ns: u64) {
        self.writing_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Time spent on taking and writing snapshots, seconds.
    #[must_use]
    pub fn writing_seconds(&self) -> f64 {
        self.writing_ns.load(Ordering::Relaxed) as f64 * 1e-9
    }

    pub(super) fn add_bookings_ns(&self, ns: u64) {
        self.bookings_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Time spent on taking and writing images of the bookings, seconds.
    #[must_use]
    pub fn bookings_seconds(&self) -> f64 {
        self.bookings_ns.load(Ordering::Relaxed) as f64 * 1e-9
    }

    pub(super) fn set_oldest(&self, unix_ms: u64) {
        self.oldest_unix_ms.store(unix_ms, Ordering::Relaxed);
    }

    /// How long ago the snapshot that is furthest behind its worker was last known to be complete, seconds. `None` = no
    /// worker has a snapshot.
    #[must_use]
    pub fn oldest_age_seconds(&self, now_unix_ms: u64) -> Option<f64> {
        let oldest = self.oldest_unix_ms.load(Ordering::Relaxed);
        (oldest > 0).then(|| now_unix_ms.saturating_sub(oldest) as f64 * 1e-3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_dense_and_their_names_unique() {
        let mut names: Vec<_> = Refusal::ALL.iter().map(|refusal| refusal.name()).collect();
        assert!(Refusal::ALL.iter().enumerate().all(|(at, refusal)| at == *refusal as usize));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Refusal::ALL.len());
    }
}
