//! Workers that come, change and go while their shard's thread runs: what is asked of it, and its answers.

use tokio::sync::oneshot;

use super::inbox::Command;
use super::{FirstLoad, IngestHandle, Publisher};
use crate::error::{Error, Result};
use crate::fleet::WorkerRecord;
use crate::ids::{SpaceId, WorkerIndex, WorkerSlot};

/// A worker that comes.
#[derive(Clone, Debug)]
pub struct Admission {
    /// Its record; the thread gives it a slot and puts it into the fleet's table.
    pub record: WorkerRecord,
    /// Blocks bound for it at most.
    pub blocks_max: u64,
    /// Where its events come from, if it publishes any; the slot is the thread's to give.
    pub publisher: Option<Publisher>,
    /// What it is loaded with before any of its messages; dropped where its events cannot be received.
    pub load: Option<FirstLoad>,
}

/// What came of an [`Admission`] or an [`Amendment`].
#[derive(Debug, Default)]
pub struct Admitted {
    /// Why its events cannot be received. Its trust says `no_events`.
    pub unheard: Option<Error>,
}

/// What changes of a worker that stays.
#[derive(Clone, Debug)]
pub struct Amendment {
    /// Its record from now on: worker, index, shard, slot and space are as before. The thread decides the
    /// state of a worker that is not draining.
    pub record: WorkerRecord,
    /// Blocks bound for it at most.
    pub blocks_max: u64,
    /// Whether its events come from elsewhere now. Where they can be replayed there, the first replay shows whether
    /// they go on where the others ended; where that is not shown the worker is emptied.
    pub restream: bool,
}

/// A worker that has been taken out of the fleet's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departure {
    /// Which worker it was.
    pub index: WorkerIndex,
    /// The space it served.
    pub space: SpaceId,
    /// What the index calls it.
    pub slot: WorkerSlot,
    /// The first version of the table without it. The slot is used again once no reader has an older one.
    pub gone_since: u64,
}

/// A command and where its answer goes.
#[derive(Debug)]
pub(super) enum Roll {
    Admit(Admission, oneshot::Sender<Result<Admitted>>),
    Amend(Amendment, oneshot::Sender<Result<Admitted>>),
    Depart(Departure, oneshot::Sender<()>),
}

impl IngestHandle {
    /// Asks for a worker to be taken in. The answer is an error, and nothing is changed, where the shard has no
    /// room; a publisher that cannot be opened is none.
    ///
    /// # Errors
    /// [`Kind::Overloaded`](crate::error::Kind::Overloaded) where too many commands wait.
    pub fn admit(&self, admission: Admission) -> Result<oneshot::Receiver<Result<Admitted>>> {
        let (answer, answered) = oneshot::channel();
        self.command(Command::Roll(Box::new(Roll::Admit(admission, answer))))?;
        Ok(answered)
    }

    /// Asks for a worker's record to be changed.
    ///
    /// # Errors
    /// As [`IngestHandle::admit`].
    pub fn amend(&self, amendment: Amendment) -> Result<oneshot::Receiver<Result<Admitted>>> {
        let (answer, answered) = oneshot::channel();
        self.command(Command::Roll(Box::new(Roll::Amend(amendment, answer))))?;
        Ok(answered)
    }

    /// Asks for everything of a worker that has left to be given up. The answer comes when nobody can meet it in
    /// the index any more.
    ///
    /// # Errors
    /// As [`IngestHandle::admit`].
    pub fn depart(&self, departure: Departure) -> Result<oneshot::Receiver<()>> {
        let (answer, answered) = oneshot::channel();
        self.command(Command::Roll(Box::new(Roll::Depart(departure, answer))))?;
        Ok(answered)
    }
}
