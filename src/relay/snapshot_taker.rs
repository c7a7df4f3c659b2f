//! Takes snapshots of a relay's worker when they are wanted. It keeps one for a while, so that several uses share it.

use std::sync::Arc;

use crossbeam::channel::{self, Receiver, TryRecvError};
use parking_lot::Mutex;

use super::publish::Kept;
use super::snapshot::{Failure, Progress, TakenSnapshot};
use crate::ids::Worker;
use crate::ingest::{AbortReason, DumpPart, IngestHandle, RelayName};
use crate::limits::{RELAY_SNAPSHOT_KEPT_MS, RELAY_SNAPSHOT_PAUSE_MS};
use crate::metrics::{CounterSet, RelayCounter};

/// The snapshot that is used or taken.
struct Current {
    snapshot: TakenSnapshot,
    parts: Receiver<DumpPart>,
    /// [`Kept::forgotten`] at the time of the request.
    forgotten: u64,
    used_at_ms: u64,
}

pub(super) struct SnapshotTaker {
    worker: Worker,
    name: RelayName,
    ingest: Arc<IngestHandle>,
    counters: Arc<CounterSet<RelayCounter>>,
    current: Option<Current>,
    requested: u64,
}

impl SnapshotTaker {
    pub(super) const fn new(
        (worker, name): (Worker, RelayName),
        ingest: Arc<IngestHandle>,
        counters: Arc<CounterSet<RelayCounter>>,
    ) -> Self {
        Self { worker, name, ingest, counters, current: None, requested: 0 }
    }

    /// Takes the parts of the snapshot's dump that have arrived.
    pub(super) fn take_parts(&mut self, now_ms: u64) {
        let Some(current) = &mut self.current else { return };
        while current.snapshot.progress() == Progress::Taking {
            match current.parts.try_recv() {
                Ok(part) => current.snapshot.take(&part),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    current.snapshot.fail(Failure::Aborted(AbortReason::PeerGone));
                }
            }
            match current.snapshot.progress() {
                Progress::Taking => {}
                Progress::Whole => self.counters.bump(RelayCounter::Snapshots),
                Progress::Failed(failure) => {
                    self.counters.bump(RelayCounter::SnapshotsFailed);
                    tracing::warn!(?failure, "no snapshot of the worker; a router that needs it asks again");
                }
            }
        }
        let kept_ms = match current.snapshot.progress() {
            Progress::Taking => u64::MAX,
            Progress::Whole => RELAY_SNAPSHOT_KEPT_MS,
            Progress::Failed(_) => RELAY_SNAPSHOT_PAUSE_MS,
        };
        if now_ms.saturating_sub(current.used_at_ms) > kept_ms {
            self.current = None;
        }
    }

    /// The snapshot for one use: one that can be used, one that has failed, or, `is_begun`, the one of which parts were used.
    pub(super) fn usable(&mut self, kept: &Kept, is_begun: bool, now_ms: u64) -> Option<&TakenSnapshot> {
        let current = self.current.as_mut()?;
        // A failed snapshot ends the uses that wait for it.
        let failed = matches!(current.snapshot.progress(), Progress::Failed(_));
        if !failed {
            current.used_at_ms = now_ms;
        }
        (failed || is_begun || is_of_use(current, kept)).then_some(&current.snapshot)
    }

    /// Whether there is a snapshot, however far it is.
    #[cfg(feature = "nats")]
    pub(super) const fn is_there(&self) -> bool {
        self.current.is_some()
    }

    /// Requests a snapshot, unless there is one that can be used. It replaces one that cannot be used, even for answers
    /// that have begun to send that one.
    pub(super) fn need(&mut self, kept: &Mutex<Kept>, now_ms: u64) {
        let kept = kept.lock();
        if self.current.as_ref().is_some_and(|current| is_of_use(current, &kept)) {
            return;
        }
        let forgotten = kept.forgotten;
        drop(kept);
        self.requested += 1;
        let mut snapshot = TakenSnapshot::new(self.requested, self.name);
        let parts = self.ingest.dump(self.worker).unwrap_or_else(|error| {
            self.counters.bump(RelayCounter::SnapshotsFailed);
            tracing::warn!(%error, "a snapshot of the worker cannot be requested");
            snapshot.fail(Failure::Aborted(AbortReason::Busy));
            channel::never()
        });
        self.current = Some(Current { snapshot, parts, forgotten, used_at_ms: now_ms });
    }
}

/// Whether the batches after a snapshot are in the buffer and continue from it.
fn is_of_use(current: &Current, kept: &Kept) -> bool {
    let follows = match current.snapshot.progress() {
        Progress::Failed(_) => false,
        Progress::Taking | Progress::Whole => {
            current.snapshot.watermark().is_none_or(|watermark| watermark.0 + 1 >= kept.buffer.first().0)
        }
    };
    follows && current.forgotten == kept.forgotten
}
