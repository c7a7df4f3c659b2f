//! Commands from other threads, and the dumps and loads they ask for: one at a time, a slice between two rounds.

use std::collections::VecDeque;

use super::{Now, Shard};
use crate::ids::Worker;
use crate::ingest::dump::{AbortReason, FirstLoad, Loading, Sending, Step};
use crate::limits::{TRANSFER_REST_MS, TRANSFERS_WAITING_MAX};

/// One dump or load.
#[derive(Debug)]
enum Transfer {
    Dump(Sending),
    Load(Loading),
}

impl Transfer {
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
    /// How many of them, from the first, come before any message.
    first: usize,
    /// Whether the first could not come further when it last tried.
    stands: bool,
}

impl Transfers {
    /// How long the loop may rest for their sake; `None` = for ever.
    pub(super) fn rest_ms(&self) -> Option<u64> {
        (!self.waiting.is_empty()).then_some(if self.stands { TRANSFER_REST_MS } else { 0 })
    }

    /// A worker has left.
    pub(super) fn refuse_all_of(&mut self, worker: Worker) {
        let mut at = 0;
        while let Some((of, transfer)) = self.waiting.get(at) {
            if *of != worker {
                at += 1;
                continue;
            }
            transfer.refuse(AbortReason::WorkerRemoved);
            self.waiting.remove(at);
            self.first -= usize::from(at < self.first);
        }
    }

    /// Whether a load of the worker waits or runs.
    fn is_loading(&self, worker: Worker) -> bool {
        self.waiting.iter().any(|(of, transfer)| *of == worker && matches!(transfer, Transfer::Load(_)))
    }

    /// Whether messages are to wait in their sockets.
    pub(super) const fn block_messages(&self) -> bool {
        self.first > 0
    }

    /// The one that ran is over.
    fn pop(&mut self) {
        self.waiting.pop_front();
        self.first = self.first.saturating_sub(1);
    }

    /// Gives up the loads of a worker, or of all, that have not begun.
    fn refuse_queued_loads(&mut self, worker: Option<Worker>) {
        let mut at = 0;
        while let Some((of, transfer)) = self.waiting.get(at) {
            let waits = matches!(transfer, Transfer::Load(loading) if !loading.has_begun());
            if !waits || worker.is_some_and(|worker| worker != *of) {
                at += 1;
                continue;
            }
            transfer.refuse(AbortReason::Reset);
            self.waiting.remove(at);
            self.first -= usize::from(at < self.first);
        }
    }

    /// The shard's workers are leaving.
    pub(super) fn end(&mut self) {
        self.waiting.drain(..).for_each(|(_, transfer)| transfer.refuse(AbortReason::WorkerRemoved));
    }
}

impl Shard {
    /// Takes loads that come before any message.
    pub(in crate::ingest) fn load_first(&mut self, loads: Vec<FirstLoad>) {
        self.transfers.first = loads.len();
        loads.into_iter().for_each(|load| self.queue_load(load));
    }

    /// Takes a load that comes before any message of its worker.
    pub(super) fn queue_load(&mut self, load: FirstLoad) {
        self.transfers.waiting.push_back((load.worker, Transfer::Load(load.loading())));
    }

    fn accept(&mut self, worker: Worker, transfer: Transfer) {
        if self.transfers.waiting.len() - self.transfers.first > TRANSFERS_WAITING_MAX {
            transfer.refuse(AbortReason::Busy);
        } else {
            self.transfers.waiting.push_back((worker, transfer));
        }
    }

    /// One slice of the dump or load that runs.
    pub(super) fn transfer(&mut self, now: Now) {
        let Some((worker, transfer)) = self.transfers.waiting.front_mut() else { return };
        let Some(at) = self.publishers.iter().position(|publisher| publisher.stream.worker == *worker) else {
            transfer.refuse(AbortReason::UnknownWorker);
            self.transfers.pop();
            return;
        };
        let publisher = &mut self.publishers[at];
        let space = &mut self.spaces[publisher.space];
        self.current_worker = Some(publisher.index);
        let step = match transfer {
            Transfer::Dump(sending) => sending.step(&mut publisher.stream, space, now),
            // What it stores is events like any other.
            Transfer::Load(_) if space.choked => Step::Waits,
            Transfer::Load(loading) => loading.step(&mut publisher.stream, space, now),
        };
        self.current_worker = None;
        self.transfers.stands = step == Step::Waits;
        if step == Step::Over {
            let was_load = matches!(transfer, Transfer::Load(_));
            self.transfers.pop();
            // What waited is applied in its turns.
            self.enqueue(at);
            if was_load {
                self.resume_messages(at);
            }
        }
    }

    /// Takes a publisher's messages from now on, if they waited for its load.
    fn resume_messages(&mut self, at: usize) {
        if std::mem::take(&mut self.publishers[at].waits_for_load) {
            self.enqueue(at);
        }
    }
}
