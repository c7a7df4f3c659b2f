//! The ingest threads, for the parts of the daemon that send them commands.

use std::sync::Arc;

use crossbeam::channel::Receiver;

use crate::budget::{Shed, ShedFlags};
use crate::error::{Error, Kind, Result};
use crate::ids::{ShardId, Worker};
use crate::ingest::{DumpPart, IngestHandle, LoadAnswer, ResetScope};
use crate::metrics::{CounterSet, DaemonCounter};

/// One thread for each shard that has workers.
#[derive(Debug, Default)]
pub(super) struct IngestThreads {
    pub(super) threads: Vec<(ShardId, IngestHandle)>,
    /// Dumps are refused while memory is short.
    pub(super) shed: ShedFlags,
    pub(super) counters: Arc<CounterSet<DaemonCounter>>,
}

impl IngestThreads {
    pub(super) const fn len(&self) -> usize {
        self.threads.len()
    }

    pub(super) fn are_running(&self) -> bool {
        self.threads.iter().all(|(_, thread)| thread.is_running())
    }

    /// The thread that owns a shard.
    pub(super) fn of(&self, shard: ShardId) -> Option<&IngestHandle> {
        self.threads.iter().find(|(id, _)| *id == shard).map(|(_, thread)| thread)
    }

    fn owner_of(&self, shard: ShardId) -> Result<&IngestHandle> {
        let no_thread = || Error::new(Kind::Internal, format!("no ingest thread owns shard {shard}"), "report it");
        self.of(shard).ok_or_else(no_thread)
    }

    /// Asks for all blocks of a worker.
    pub(super) fn dump(&self, shard: ShardId, worker: Worker) -> Result<Receiver<DumpPart>> {
        if self.shed.has(Shed::Dumps) {
            self.counters.bump(DaemonCounter::DumpsRefusedMemory);
            let message = "the daemon's memory budget is nearly used, so nothing is dumped";
            return Err(Error::new(
                Kind::Overloaded,
                message,
                "ask again later, or raise memory_bytes_max in [process]",
            ));
        }
        self.owner_of(shard)?.dump(worker)
    }

    /// Loads a dump into a worker, in place of all that it holds: see [`IngestHandle::load`].
    pub(super) fn load(
        &self,
        shard: ShardId,
        worker: Worker,
        parts: Receiver<DumpPart>,
    ) -> Result<Receiver<LoadAnswer>> {
        self.owner_of(shard)?.load(worker, parts)
    }

    /// Loads an engine's own snapshot: see [`IngestHandle::load_engine_snapshot`].
    pub(super) fn load_engine_snapshot(
        &self,
        shard: ShardId,
        worker: Worker,
        parts: Receiver<DumpPart>,
    ) -> Result<Receiver<LoadAnswer>> {
        self.owner_of(shard)?.load_engine_snapshot(worker, parts)
    }

    /// Empties a worker of a shard, or every worker of every shard.
    pub(super) fn reset(&self, one: Option<(ShardId, Worker)>, scope: ResetScope) -> Result<()> {
        let of = |id: &ShardId| one.is_none_or(|(shard, _)| shard == *id);
        let worker = one.map(|(_, worker)| worker);
        self.threads.iter().filter(|(id, _)| of(id)).try_for_each(|(_, thread)| thread.reset(worker, scope))
    }
}
