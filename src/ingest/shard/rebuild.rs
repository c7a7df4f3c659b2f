//! What becomes of a shard whose thread panicked: its index is discarded and built anew by another thread.
//!
//! In this order:
//! 1. The trust of all of its workers falls to `none`, with the reason `ingest_failed`. From then on no answer about them
//!    is believed, whatever the index still shows.
//! 2. Sockets are closed; dumps and loads are refused; whoever waits for an admission is told.
//! 3. Each index of the shard begins anew, empty (`index::sight` says what readers see of that). Slots are kept, as the
//!    fleet's table names them.
//! 4. Another thread opens the sockets again. Workers that replay are asked for everything; the others are believed again
//!    as far as one is that is joined late.
//!
//! This happens at most [`INGEST_REBUILDS_MAX`] times within [`INGEST_REBUILD_PERIOD_MS`]. Beyond that the shard waits,
//! empty and unbelieved, until the period allows it. A worker in whose hands the thread panicked
//! [`INGEST_PANICS_PER_WORKER_MAX`] times is left out, so that one engine cannot keep the others of its shard from being
//! heard: it comes back when its record changes or it is added again.
//!
//! The shard of a relay is not rebuilt: what it has published cannot be taken back. Its thread ends, and the relay with it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::replays::Replays;
use super::{Now, Shard, Transfers};
use crate::error::{Error, Kind};
use crate::event::trust::TrustInput;
use crate::ids::WorkerIndex;
use crate::index::WorkerBlocks;
use crate::ingest::Publisher;
use crate::ingest::roll::WorkerAccepted;
use crate::limits::{INGEST_PANICS_PER_WORKER_MAX, INGEST_REBUILD_PERIOD_MS, INGEST_REBUILDS_MAX};
use crate::metrics::WorkerCounter;
use crate::trust::{Trust, TrustLevel, TrustReason, TrustReasons};

/// The panics of a shard's threads.
#[derive(Debug, Default)]
pub(super) struct Panics {
    /// When the last rebuilds began, the oldest first, milliseconds of the shard's clock.
    rebuilt_at_ms: VecDeque<u64>,
    by_worker: BTreeMap<WorkerIndex, u32>,
    /// Workers whose sockets are not opened again.
    excluded: BTreeSet<WorkerIndex>,
}

impl Panics {
    /// The thread panicked, with a worker in its hands or none. Answers whether that worker is left out from now on.
    fn note(&mut self, worker: Option<WorkerIndex>, was_opening: bool) -> bool {
        let Some(worker) = worker else { return false };
        let times = self.by_worker.entry(worker).or_default();
        *times += 1;
        let is_excluded = was_opening || *times >= INGEST_PANICS_PER_WORKER_MAX;
        if is_excluded {
            self.excluded.insert(worker);
        }
        is_excluded
    }

    /// Another rebuild begins, now or at the time answered.
    fn rebuild(&mut self, now_ms: u64) -> Option<u64> {
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

    /// A worker has left, or is to be heard elsewhere.
    pub(super) fn forgive(&mut self, worker: WorkerIndex) {
        self.by_worker.remove(&worker);
        self.excluded.remove(&worker);
    }
}

impl Shard {
    /// Whether it may be rebuilt: nobody repeats what it says.
    pub(in crate::ingest) const fn can_be_rebuilt(&self) -> bool {
        !self.republishes
    }

    /// Takes everything down that the panic may have left half done, trust first. Nothing of it is looked into.
    pub(in crate::ingest) fn discard(&mut self) {
        let now = self.clock.now();
        let (hand, admitted) = (self.current_worker.take(), self.pending_answer.take());
        let was_admission = admitted.as_ref().is_some_and(|(_, is_admission, _)| *is_admission);
        let is_new = self.panics.note(hand, was_admission);
        for publisher in &self.plans {
            let is_excluded = self.panics.excluded.contains(&publisher.index);
            fall(publisher, is_excluded, now);
            if is_new && Some(publisher.index) == hand {
                let (worker, remedy) = (publisher.worker, TrustReason::IngestFailed.remedy());
                tracing::error!(%worker, remedy, "the worker made its ingest thread panic; its events are received no more");
            }
        }
        if let Some((index, is_admission, answer)) = admitted {
            let error = Error::new(Kind::Internal, "the ingest thread panicked", "report it with the log around it");
            // One that is in the table stays there, and is not heard.
            let is_there = is_admission && self.fleet.load().worker(index).is_some();
            // Whoever asked may have gone.
            let _ = answer.send(if is_there { Ok(WorkerAccepted { no_events: Some(error) }) } else { Err(error) });
        }
        self.close_all();
        self.ready.clear();
        self.scratch = super::Scratch::default();
        self.changes.clear();
        for space in &mut self.spaces {
            if !space.writer.begin_anew() {
                tracing::error!(shard = %self.id, space = %space.id, "a part of the discarded index could not be freed");
            }
            (space.unsure, space.unswept, space.choked) = (false, false, false);
            let of_space = self.plans.iter().filter(|publisher| publisher.space == space.id);
            space.slots = of_space.map(|publisher| publisher.slot).collect();
        }
    }

    /// Closes every connection. One that cannot be closed because of the state that the panic left it in is leaked.
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
            tracing::error!(shard = %self.id, "a publisher's connection could not be closed; it is leaked");
        }
    }

    /// Opens the sockets of all workers again, or says when it will.
    pub(in crate::ingest) fn reopen(&mut self) {
        let now = self.clock.now();
        match self.panics.rebuild(now.uptime_ms) {
            None => self.open_all(),
            Some(at_ms) => {
                let (rest_ms, rebuilds_max) = (at_ms.saturating_sub(now.uptime_ms), INGEST_REBUILDS_MAX);
                tracing::error!(shard = %self.id, rest_ms, rebuilds_max, "rebuilt too often; the shard's workers wait");
                self.reopen_at_ms = Some(at_ms);
            }
        }
    }

    /// Opens the sockets of all workers that have none, if it is time for that.
    pub(super) fn reopen_if_due(&mut self, now: Now) {
        if self.reopen_at_ms.is_some_and(|at_ms| now.uptime_ms >= at_ms) {
            self.reopen_at_ms = None;
            self.reopen();
        }
    }

    fn open_all(&mut self) {
        for publisher in self.plans.clone() {
            let index = publisher.index;
            if self.panics.excluded.contains(&index) || self.publishers.iter().any(|publisher| publisher.index == index) {
                continue;
            }
            if let Err(error) = self.admit(&publisher, Some(TrustInput::IngestFailed)) {
                tracing::error!(worker = %publisher.worker, %error, "the worker's events cannot be received any more");
                self.plans.retain(|other| other.index != index);
            }
        }
        tracing::warn!(shard = %self.id, publishers = self.publishers.len(), "the shard is rebuilt from its workers' events");
    }
}

/// A worker is not believed any more, and nothing is held for it. One that is left out has no event source any more.
fn fall(publisher: &Publisher, is_excluded: bool, now: Now) {
    let mut reasons: TrustReasons = [TrustReason::IngestFailed].into_iter().collect();
    if is_excluded {
        reasons.insert(TrustReason::NoEvents);
    }
    let view = &publisher.view;
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
            assert_eq!(panics.rebuild(at_ms), None);
        }
        assert_eq!(panics.rebuild(100), Some(INGEST_REBUILD_PERIOD_MS));
        assert_eq!(panics.rebuild(INGEST_REBUILD_PERIOD_MS - 1), Some(INGEST_REBUILD_PERIOD_MS));
        assert_eq!(panics.rebuild(INGEST_REBUILD_PERIOD_MS), None);
        assert_eq!(panics.rebuild(INGEST_REBUILD_PERIOD_MS), Some(INGEST_REBUILD_PERIOD_MS + 1));
    }

    #[test]
    fn a_worker_is_left_out_once_it_has_done_it_too_often_and_until_it_comes_anew() {
        let (mut panics, worker) = (Panics::default(), WorkerIndex(3));
        assert!(!panics.note(None, false));
        for _ in 1..INGEST_PANICS_PER_WORKER_MAX {
            assert!(!panics.note(Some(worker), false));
        }
        assert!(panics.note(Some(worker), false) && panics.excluded.contains(&worker));
        panics.forgive(worker);
        assert!(panics.excluded.is_empty() && panics.by_worker.is_empty());
        assert!(panics.note(Some(worker), true), "at once where it could not even be opened");
    }
}
