//! The ingest threads, for the parts of the daemon that send them commands.

use crossbeam::channel::Receiver;

use crate::error::{Error, Kind, Result};
use crate::ids::{ShardId, Worker};
use crate::ingest::{DumpPart, IngestHandle, ResetScope};

/// One thread for each shard that has workers.
#[derive(Debug, Default)]
pub(super) struct IngestThreads(pub(super) Vec<(ShardId, IngestHandle)>);

impl IngestThreads {
    pub(super) const fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn are_running(&self) -> bool {
        self.0.iter().all(|(_, thread)| thread.is_running())
    }

    /// The thread that owns a shard.
    pub(super) fn of(&self, shard: ShardId) -> Option<&IngestHandle> {
        self.0.iter().find(|(id, _)| *id == shard).map(|(_, thread)| thread)
    }

    /// Asks for all blocks of a worker.
    pub(super) fn dump(&self, shard: ShardId, worker: Worker) -> Result<Receiver<DumpPart>> {
        let no_thread = || Error::new(Kind::Internal, format!("no ingest thread owns shard {shard}"), "report it");
        self.of(shard).ok_or_else(no_thread)?.dump(worker)
    }

    /// Empties a worker of a shard, or every worker of every shard.
    pub(super) fn reset(&self, one: Option<(ShardId, Worker)>, scope: ResetScope) -> Result<()> {
        let of = |id: &ShardId| one.is_none_or(|(shard, _)| shard == *id);
        let worker = one.map(|(_, worker)| worker);
        self.0.iter().filter(|(id, _)| of(id)).try_for_each(|(_, thread)| thread.reset(worker, scope))
    }
}
