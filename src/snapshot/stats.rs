//! What is counted of snapshots.

use std::sync::atomic::{AtomicU64, Ordering};

use super::refusal::Refusal;
use crate::metrics::{CounterSet, SnapshotCounter};

/// Counts and gauges of snapshots, written by their threads and read by any.
#[derive(Debug)]
pub struct SnapshotStats {
    /// What happened.
    pub counters: CounterSet<SnapshotCounter>,
    refused: Box<[AtomicU64]>,
    writing_ns: AtomicU64,
    /// When the worker whose snapshot is furthest behind was last found to be in it; 0 = nobody is to be kept.
    oldest_unix_ms: AtomicU64,
}

impl Default for SnapshotStats {
    fn default() -> Self {
        Self {
            counters: CounterSet::default(),
            refused: Refusal::ALL.iter().map(|_| AtomicU64::new(0)).collect(),
            writing_ns: AtomicU64::new(0),
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

    /// Snapshots that were not used, by every reason.
    pub fn refused(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Refusal::ALL.iter().map(|refusal| (refusal.name(), self.refused[*refusal as usize].load(Ordering::Relaxed)))
    }

    pub(super) fn add_writing_ns(&self, ns: u64) {
        self.writing_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Time spent to take and write snapshots, seconds.
    #[must_use]
    pub fn writing_seconds(&self) -> f64 {
        self.writing_ns.load(Ordering::Relaxed) as f64 * 1e-9
    }

    pub(super) fn set_oldest(&self, unix_ms: u64) {
        self.oldest_unix_ms.store(unix_ms, Ordering::Relaxed);
    }

    /// How far the worker that is furthest behind is behind its stream, seconds at most; `None` = nobody is kept.
    #[must_use]
    pub fn oldest_age_seconds(&self, now_unix_ms: u64) -> Option<f64> {
        let oldest = self.oldest_unix_ms.load(Ordering::Relaxed);
        (oldest > 0).then(|| now_unix_ms.saturating_sub(oldest) as f64 * 1e-3)
    }
}
