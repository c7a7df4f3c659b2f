//! The dumps and loads of a shard: one at a time, a slice between two rounds.
//!
//! They run in the order in which they were asked for, except that one whose worker's messages wait for something else, as
//! for the batches of a recovery, lets those of other workers pass.

use std::collections::VecDeque;

use smallvec::{SmallVec, smallvec};

use super::{Now, Shard};
use crate::ids::Worker;
use crate::ingest::dump::{AbortReason, FirstLoad, Loading, Sending, Step};
use crate::limits::{TRANSFER_PAUSE_MS, TRANSFERS_WAITING_MAX};
use crate::watchdog::Activity;

/// One dump or load.
#[derive(Debug)]
pub(super) enum Transfer {
    Dump(Sending),
    Load(Loading),
}

impl Transfer {
    /// Whether its worker's messages wait for it. Then no other one may run.
    const fn has_begun(&self) -> bool {
        match self {
            Self::Dump(sending) => sending.has_begun(),
            Self::Load(loading) => loading.has_begun(),
        }
    }

    fn refuse(&self, reason: AbortReason) {
        match self {
            Self::Dump(sending) => sending.refuse(reason),
            Self::Load(loading) => loading.refuse(reason),
        }
    }
}

/// The dump or load that runs, and those that wait for it.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    waiting: VecDeque<(Worker, Transfer)>,
    /// How many of them, counted from the front, come before any message.
    first: usize,
    /// Whether none made progress at the last try.
    is_stalled: bool,
}

impl Transfers {
    /// How long the event loop may wait before the next slice; `None` = for ever.
    pub(super) fn timeout_ms(&self) -> Option<u64> {
        (!self.waiting.is_empty()).then_some(if self.is_stalled { TRANSFER_PAUSE_MS } else { 0 })
    }

    /// Refuses every dump and load of a worker that has left.
    pub(super) fn refuse_all_of(&mut self, worker: Worker) {
        self.refuse_where(AbortReason::WorkerRemoved, |of, _| of == worker);
    }

    /// Refuses the loads of a worker, or of all workers, that have not begun.
    pub(super) fn refuse_queued_loads(&mut self, worker: Option<Worker>) {
        self.refuse_where(AbortReason::Reset, |of, transfer| {
            let is_queued_load = matches!(transfer, Transfer::Load(loading) if !loading.has_begun());
            is_queued_load && worker.is_none_or(|worker| worker == of)
        });
    }

    fn refuse_where(&mut self, reason: AbortReason, is_meant: impl Fn(Worker, &Transfer) -> bool) {
        let mut at = 0;
        while let Some((of, transfer)) = self.waiting.get(at) {
            if !is_meant(*of, transfer) {
                at += 1;
                continue;
            }
            transfer.refuse(reason);
            self.remove(at);
        }
    }

    /// Whether a load of the worker waits or runs.
    pub(super) fn is_loading(&self, worker: Worker) -> bool {
        self.waiting.iter().any(|(of, transfer)| *of == worker && matches!(transfer, Transfer::Load(_)))
    }

    /// Whether all messages have to wait in their sockets.
    pub(super) const fn block_messages(&self) -> bool {
        self.first > 0
    }

    /// Which ones may run now: the one that has begun, or else the first of each worker, in their order.
    fn may_run(&self) -> SmallVec<[Worker; 1]> {
        if let Some((worker, _)) = self.waiting.iter().find(|(_, transfer)| transfer.has_begun()) {
            return smallvec![*worker];
        }
        let mut workers = SmallVec::new();
        for (worker, _) in self.waiting.iter().take(TRANSFERS_WAITING_MAX + 1) {
            if !workers.contains(worker) {
                workers.push(*worker);
            }
        }
        workers
    }

    /// Removes one that has ended.
    fn remove(&mut self, at: usize) {
        self.waiting.remove(at);
        self.first -= usize::from(at < self.first);
    }

    /// Refuses all: the shard's workers are leaving.
    pub(super) fn end(&mut self) {
        self.waiting.drain(..).for_each(|(_, transfer)| transfer.refuse(AbortReason::WorkerRemoved));
    }
}

impl Shard {
    /// Queues loads that come before any message of the shard.
    pub(in crate::ingest) fn load_first(&mut self, loads: Vec<FirstLoad>) {
        self.transfers.first = loads.len();
        loads.into_iter().for_each(|load| self.queue_load(load));
    }

    /// Queues a load that comes before any message of its worker.
    pub(super) fn queue_load(&mut self, load: FirstLoad) {
        self.transfers.waiting.push_back((load.worker, Transfer::Load(load.loading())));
    }

    pub(super) fn queue_transfer(&mut self, worker: Worker, transfer: Transfer) {
        if self.transfers.waiting.len() - self.transfers.first > TRANSFERS_WAITING_MAX {
            transfer.refuse(AbortReason::Busy);
        } else {
            self.transfers.waiting.push_back((worker, transfer));
        }
    }

    /// Runs one slice of a dump or load.
    pub(super) fn transfer(&mut self, now: Now) {
        self.transfers.is_stalled = true;
        for worker in self.transfers.may_run() {
            let (step, has_begun) = self.transfer_of(worker, now);
            self.transfers.is_stalled &= step == Step::Waits;
            if step != Step::Waits || has_begun {
                return;
            }
        }
    }

    /// Runs one slice of a worker's first dump or load. Returns whether that has begun, too.
    fn transfer_of(&mut self, worker: Worker, now: Now) -> (Step, bool) {
        let mut numbered = self.transfers.waiting.iter_mut().enumerate();
        let Some((number, (_, transfer))) = numbered.find(|(_, (of, _))| *of == worker) else {
            return (Step::Waits, false);
        };
        let Some(at) = self.publishers.iter().position(|publisher| publisher.stream.worker == worker) else {
            transfer.refuse(AbortReason::UnknownWorker);
            self.transfers.remove(number);
            return (Step::Over, false);
        };
        let publisher = &mut self.publishers[at];
        let space = &mut self.spaces[publisher.space];
        publisher.follow_memory(space);
        self.current_worker = Some(publisher.index);
        self.mark.enter_of(Activity::Transferring, publisher.index.0);
        let step = match transfer {
            Transfer::Dump(sending) => sending.step(&mut publisher.stream, space, now),
            // A load stores blocks as events do, so back-pressure holds for it too.
            Transfer::Load(_) if space.choked => Step::Waits,
            Transfer::Load(loading) => loading.step(&mut publisher.stream, space, now),
        };
        self.current_worker = None;
        let has_begun = transfer.has_begun();
        if step == Step::Over {
            let was_load = matches!(transfer, Transfer::Load(_));
            self.transfers.remove(number);
            // The publisher's next quanta apply the messages that waited.
            self.enqueue(at);
            if was_load {
                self.resume_messages(at);
            }
        }
        (step, has_begun)
    }

    /// Takes a publisher's messages again, if they waited for its load.
    pub(super) fn resume_messages(&mut self, at: usize) {
        if std::mem::take(&mut self.publishers[at].waits_for_load) {
            self.enqueue(at);
        }
    }
}
