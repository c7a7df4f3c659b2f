//! Commands from other threads, and the dumps and loads they ask for: one at a time, a slice between two rounds.

use std::collections::VecDeque;

use super::{Now, Shard};
use crate::ids::Worker;
use crate::ingest::dump::{AbortReason, Loading, Sending, Step};
use crate::ingest::inbox::Command;
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
    /// Whether the first could not come further when it last tried.
    stands: bool,
}

impl Transfers {
    /// How long the loop may rest for their sake; `None` = for ever.
    pub(super) fn rest_ms(&self) -> Option<u64> {
        (!self.waiting.is_empty()).then_some(if self.stands { TRANSFER_REST_MS } else { 0 })
    }

    /// A worker has left.
    pub(super) fn refuse_of(&mut self, worker: Worker) {
        self.waiting.retain(|(of, transfer)| {
            if *of == worker {
                transfer.refuse(AbortReason::WorkerRemoved);
            }
            *of != worker
        });
    }

    /// The shard's workers are leaving.
    pub(super) fn end(&mut self) {
        self.waiting.drain(..).for_each(|(_, transfer)| transfer.refuse(AbortReason::WorkerRemoved));
    }
}

impl Shard {
    /// Takes what other threads ask for; `true` = to end.
    pub(super) fn obey(&mut self) -> bool {
        while let Some(command) = self.inbox.commands.pop() {
            match command {
                Command::Stop => return true,
                Command::Dump(worker, sending) => self.accept(worker, Transfer::Dump(*sending)),
                Command::Roll(roll) => self.call_roll(*roll, self.clock.now()),
                Command::Load(worker, loading) => self.accept(worker, Transfer::Load(*loading)),
            }
        }
        false
    }

    fn accept(&mut self, worker: Worker, transfer: Transfer) {
        if self.transfers.waiting.len() > TRANSFERS_WAITING_MAX {
            transfer.refuse(AbortReason::Busy);
        } else {
            self.transfers.waiting.push_back((worker, transfer));
        }
    }

    /// One slice of the dump or load that runs.
    pub(super) fn transfer(&mut self, now: Now) {
        let Some((worker, transfer)) = self.transfers.waiting.front_mut() else { return };
        let Some(at) = self.members.iter().position(|member| member.stream.worker == *worker) else {
            transfer.refuse(AbortReason::UnknownWorker);
            self.transfers.waiting.pop_front();
            return;
        };
        let member = &mut self.members[at];
        let home = &mut self.homes[member.home];
        let step = match transfer {
            Transfer::Dump(sending) => sending.step(&mut member.stream, home, now),
            // What it stores is events like any other.
            Transfer::Load(_) if home.choked => Step::Waits,
            Transfer::Load(loading) => loading.step(&mut member.stream, home, now),
        };
        self.transfers.stands = step == Step::Waits;
        if step == Step::Over {
            self.transfers.waiting.pop_front();
            // What waited is applied in its turns.
            self.enqueue(at);
        }
    }
}
