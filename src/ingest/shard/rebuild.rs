//! The rebuild of a shard after its thread panicked: the index is discarded, and another thread builds it anew.
//!
//! In this order:
//! 1. The trust of all of its workers falls to `none`, with the reason `ingest_failed`. No answer about them counts
//!    from then on, whatever the index still shows.
//! 2. Sockets are closed. Dumps and loads are refused. A command that was being handled gets its answer.
//! 3. Each index of the shard begins anew, empty (`index::shared_index` says what readers see of that). Workers keep
//!    their slots, because the fleet's table names them.
//! 4. Another thread opens the sockets again. It asks workers that replay for all batches. Other workers count as
//!    joined late.
//!
//! A shard is rebuilt at most [`INGEST_REBUILDS_MAX`] times within [`INGEST_REBUILD_PERIOD_MS`]. Beyond that it waits,
//! empty and with the trust `none`, until the period allows another rebuild. A worker whose events or sockets were
//! being handled at [`INGEST_PANICS_PER_WORKER_MAX`] panics is excluded, so that one engine cannot keep the events of
//! the other workers from their shard. It comes back when its event source changes or it is added again.
//!
//! The shard of a relay is not rebuilt: a relay cannot take back what it has published. Its thread ends, and the relay
//! with it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::commands::WorkerAccepted;
use super::replays::Replays;
use super::{Now, Shard, Transfers};
use crate::error::{Error, Kind};
use crate::event::worker_trust::TrustInput;
use crate::ids::WorkerIndex;
use crate::index::WorkerBlocks;
use crate::ingest::PublisherPlan;
use crate::limits::{INGEST_PANICS_PER_WORKER_MAX, INGEST_REBUILD_PERIOD_MS, INGEST_REBUILDS_MAX};
use crate::metrics::WorkerCounter;
use crate::trust::{Trust, TrustLevel, TrustReason, TrustReasons};

/// The panics of a shard's threads.
#[derive(Debug, Default)]
pub(super) struct Panics {
    /// When the newest rebuilds began, the oldest first, milliseconds of the shard's clock.
    rebuilt_at_ms: VecDeque<u64>,
    by_worker: BTreeMap<WorkerIndex, u32>,
    /// Workers whose sockets stay closed.
    excluded: BTreeSet<WorkerIndex>,
}

impl Panics {
    /// Records a panic, with the worker that was being handled. Returns whether that worker is excluded from now on.
    fn record(&mut self, worker: Option<WorkerIndex>, was_opening: bool) -> bool {
        let Some(worker) = worker else { return false };
        let times = self.by_worker.entry(worker).or_default();
        *times += 1;
        let is_excluded = was_opening || *times >= INGEST_PANICS_PER_WORKER_MAX;
        if is_excluded {
            self.excluded.insert(worker);
        }
        is_excluded
    }

    /// Begins another rebuild, or returns the time when one may begin.
    fn begin_rebuild(&mut self, now_ms: u64) -> Option<u64> {
        while self.rebuilt_at_ms.front().is_some_and(|at| now_ms.saturating_sub(*at) >= INGEST_REBUILD_PERIOD_MS) {
            self.rebuilt_at_ms.pop_front();
        }
        let waits = self.rebuilt_at_ms.len() >= INGEST_REBUILDS_MAX;
        if waits {
            return self.rebuilt_at_ms.front().map(|oldest| oldest + INGEST_REBUILD_PERIOD_MS);
        }
        self.rebuilt_at_ms.push_back(now_ms);
        None
    }

    /// Forgets the panics of a worker that has left or has another source.
    pub(super) fn forgive(&mut self, worker: WorkerIndex) {
        self.by_worker.remove(&worker);
        self.excluded.remove(&worker);
    }
}

impl Shard {
    /// Whether it may be rebuilt: no relay has published what it holds.
    pub(in crate::ingest) const fn can_be_rebuilt(&self) -> bool {
        !self.republishes
    }

    /// Takes everything down that the panic may have left half done, trust first, without reading any of it.
    pub(in crate::ingest) fn discard(&mut self) {
        let now = self.clock.now();
        let (current, pending) = (self.current_worker.take(), self.pending_answer.take());
        let was_opening = pending.as_ref().is_some_and(|(_, is_new, _)| *is_new);
        let is_newly_excluded = self.panics.record(current, was_opening);
        for plan in &self.plans {
            let is_excluded = self.panics.excluded.contains(&plan.index);
            distrust(plan, is_excluded, now);
            if is_newly_excluded && Some(plan.index) == current {
                let (worker, remedy) = (plan.worker, TrustReason::IngestFailed.remedy());
                tracing::error!(%worker, remedy, "the worker's events made the ingest thread panic; they are no longer received");
            }
        }
        if let Some((index, is_new, answer)) = pending {
            let error = Error::new(Kind::Internal, "the ingest thread panicked", "report it with the log around it");
            // A worker that is already in the table stays there, without events.
            let is_there = is_new && self.fleet.load().worker(index).is_some();
            // The caller may have gone.
            let _ = answer.send(if is_there { Ok(WorkerAccepted { no_events: Some(error) }) } else { Err(error) });
        }
        self.close_all();
        self.ready.clear();
        self.scratch = super::Scratch { mark: Some(Arc::clone(&self.mark)), ..super::Scratch::default() };
        self.changes.clear();
        for space in &mut self.spaces {
            if !space.writer.reset_after_panic() {
                tracing::error!(shard = %self.id, space = %space.id, "a part of the discarded index could not be freed");
            }
            (space.unsure, space.unswept, space.choked) = (false, false, false);
            let of_space = self.plans.iter().filter(|plan| plan.space == space.id);
            space.slots = of_space.map(|plan| plan.slot).collect();
        }
    }

    /// Closes every connection. A connection that cannot be closed, because of the state that the panic left, is
    /// leaked.
    fn close_all(&mut self) {
        let quietly = |close: &mut dyn FnMut()| catch_unwind(AssertUnwindSafe(close)).is_ok();
        let mut is_whole = quietly(&mut || self.transfers.end());
        self.transfers = Transfers::default();
        for publisher in std::mem::take(&mut self.publishers) {
            let mut publisher = Some(publisher);
            is_whole &= quietly(&mut || drop(publisher.take()));
        }
        self.replays = Replays::default();
        if !is_whole {
            tracing::error!(shard = %self.id, "a publisher's connection could not be closed and is leaked");
        }
    }

    /// Opens the sockets of all workers again, now or when the next rebuild is allowed.
    pub(in crate::ingest) fn reopen(&mut self) {
        let now = self.clock.now();
        match self.panics.begin_rebuild(now.uptime_ms) {
            None => self.open_all(),
            Some(at_ms) => {
                let (wait_ms, rebuilds_max) = (at_ms.saturating_sub(now.uptime_ms), INGEST_REBUILDS_MAX);
                tracing::error!(shard = %self.id, wait_ms, rebuilds_max, "the shard was rebuilt too often; its workers wait");
                self.reopen_at_ms = Some(at_ms);
            }
        }
    }

    /// Opens the sockets that a panic closed, if it is time.
    pub(super) fn reopen_if_due(&mut self, now: Now) {
        if self.reopen_at_ms.is_some_and(|at_ms| now.uptime_ms >= at_ms) {
            self.reopen_at_ms = None;
            self.reopen();
        }
    }

    fn open_all(&mut self) {
        for plan in self.plans.clone() {
            let index = plan.index;
            if self.panics.excluded.contains(&index) || self.publishers.iter().any(|publisher| publisher.index == index)
            {
                continue;
            }
            if let Err(error) = self.open_publisher(&plan, Some(TrustInput::IngestFailed)) {
                tracing::error!(worker = %plan.worker, %error, "the worker's events can no longer be received");
                self.plans.retain(|other| other.index != index);
            }
        }
        tracing::warn!(shard = %self.id, publishers = self.publishers.len(), "the shard is rebuilt from its workers' events");
    }
}

/// Lowers a worker's trust to `none` and its gauges to 0. An excluded worker has no event source any more.
fn distrust(plan: &PublisherPlan, is_excluded: bool, now: Now) {
    let mut reasons: TrustReasons = [TrustReason::IngestFailed].into_iter().collect();
    if is_excluded {
        reasons.insert(TrustReason::NoEvents);
    }
    let view = &plan.view;
    view.trust.store(Trust { level: TrustLevel::None, reasons, since_unix_ms: now.unix_ms, ..Trust::default() });
    view.counters.bump(WorkerCounter::Rebuilds);
    view.gauges.set(&WorkerBlocks::default());
    view.gauges.set_waiting(0);
    view.gauges.set_choked(false);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rebuilds_are_bounded_within_a_period() {
        let mut panics = Panics::default();
        for at_ms in 0..INGEST_REBUILDS_MAX as u64 {
            assert_eq!(panics.begin_rebuild(at_ms), None);
        }
        assert_eq!(panics.begin_rebuild(100), Some(INGEST_REBUILD_PERIOD_MS));
        assert_eq!(panics.begin_rebuild(INGEST_REBUILD_PERIOD_MS - 1), Some(INGEST_REBUILD_PERIOD_MS));
        assert_eq!(panics.begin_rebuild(INGEST_REBUILD_PERIOD_MS), None);
        assert_eq!(panics.begin_rebuild(INGEST_REBUILD_PERIOD_MS), Some(INGEST_REBUILD_PERIOD_MS + 1));
    }

    #[test]
    fn a_worker_with_too_many_panics_is_excluded_until_it_changes() {
        let (mut panics, worker) = (Panics::default(), WorkerIndex(3));
        assert!(!panics.record(None, false));
        for _ in 1..INGEST_PANICS_PER_WORKER_MAX {
            assert!(!panics.record(Some(worker), false));
        }
        assert!(panics.record(Some(worker), false) && panics.excluded.contains(&worker));
        panics.forgive(worker);
        assert!(panics.excluded.is_empty() && panics.by_worker.is_empty());
        assert!(panics.record(Some(worker), true), "at once if the panic came while it was opened");
    }
}
