//! The daemon's use of snapshots: it loads them at the start and when a worker is added, and writes them while it runs
//! and once more when it stops.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::ingest_threads::IngestThreads;
use super::timed_reads::TimedReads;
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::fleet::{FleetTable, WorkerRecord};
use crate::ids::Worker;
use crate::ingest::{FirstLoad, ShardPlan};
use crate::limits::{SNAPSHOT_LOADS_AT_ONCE_MAX, SNAPSHOT_NEWCOMER_MS_MAX, SNAPSHOT_REMOVALS_AT_ONCE_MAX};
use crate::load::{LearntLaws, Loads};
use crate::metrics::SnapshotCounter;
use crate::requests::RequestTables;
use crate::serve::Turns;
use crate::snapshot::{
    self, Checked, Directory, Expected, Keeper, KeeperPlan, Refusal, Restore, SnapshotStats, SpaceName,
};
use crate::watchdog::Watchlist;

/// The directory of snapshots, if one is configured, and their counters.
#[derive(Clone, Debug)]
pub(super) struct Snapshots {
    directory: Option<Arc<Directory>>,
    pub(super) stats: Arc<SnapshotStats>,
    /// Reads the snapshots of workers added while the daemon runs.
    newcomers: TimedReads<Vec<Checked>>,
    /// Limits the removals by request: each may hold a thread for as long as the file system does not respond.
    removals: Arc<Semaphore>,
    /// What the daemon has learnt that this one takes over from; its blocks come from it too. `None` = there is none.
    taken: Option<Arc<LearntLaws>>,
}

/// The snapshot of a worker that is added while the daemon runs: the load for its shard, and the thread that feeds it.
pub(super) struct Newcomer {
    pub(super) load: FirstLoad,
    restore: Restore,
    place: OwnedSemaphorePermit,
}

impl Snapshots {
    /// Opens the configured directory. A fresh start removes the snapshots in it.
    /// If this daemon takes over from another one, it has `taken` what that one has learnt, and loads no files.
    pub(super) fn open(config: &Config, taken: Option<LearntLaws>) -> Result<Self> {
        let newcomers = TimedReads::new(SNAPSHOT_LOADS_AT_ONCE_MAX, Duration::from_millis(SNAPSHOT_NEWCOMER_MS_MAX));
        let removals = Arc::new(Semaphore::new(SNAPSHOT_REMOVALS_AT_ONCE_MAX));
        let this = Self { directory: None, stats: Arc::default(), newcomers, removals, taken: taken.map(Arc::new) };
        let Some(path) = &config.snapshot.dir else { return Ok(this) };
        let directory = if this.taken.is_some() { Directory::share(path)? } else { Directory::open(path)? };
        let this = Self { directory: Some(Arc::new(directory)), ..this };
        if config.snapshot.fresh {
            let removed = this.remove(None)?;
            this.remove_laws()?;
            tracing::info!(removed, path = %path.display(), "fresh start: snapshots and learnt prefill times removed");
        }
        Ok(this)
    }

    /// The directory, if one is configured.
    pub(super) fn directory(&self) -> Option<Arc<Directory>> {
        self.directory.clone()
    }

    /// Gives `loads` what an earlier run learnt of the workers' prefill times. Call it before workers join their classes.
    pub(super) fn restore_laws(&self, loads: &Loads, now_unix_ms: u64) {
        let taken = self.taken.as_deref().map(|taken| Ok(Some(taken.clone())));
        let read = || self.directory.as_deref().map(snapshot::read_laws);
        let Some(learnt) = taken.or_else(read) else { return };
        let refuse = |refusal: Refusal, class: Option<String>, offset: Option<u64>| {
            self.stats.refuse(refusal);
            let (reason, remedy) = (refusal.name(), refusal.remedy());
            tracing::warn!(reason, class, offset, remedy, "learnt prefill times are not used");
        };
        match learnt {
            Ok(None) => {}
            Ok(Some(learnt)) => {
                let refused = loads.restore_laws(&learnt, now_unix_ms);
                refused.into_iter().for_each(|class| refuse(Refusal::Implausible, Some(class), None));
            }
            Err(fault) => refuse(fault.refusal, None, Some(fault.offset)),
        }
    }

    /// The usable snapshots, checked from the first byte to the last.
    pub(super) fn check(&self, table: &FleetTable) -> Vec<Checked> {
        let Some(directory) = self.directory.as_ref().filter(|_| self.taken.is_none()) else { return Vec::new() };
        let expected: Vec<_> = table.workers.iter().filter_map(|record| expected(table, record)).collect();
        snapshot::check(directory, &expected, &self.stats)
    }

    /// The snapshot of an added worker if it is usable, checked as at a start. The control thread's other tasks go on
    /// meanwhile. Changes of the fleet wait, so it answers in bounded time also if the file system does not.
    pub(super) fn of_newcomer(
        &self,
        table: &FleetTable,
        record: &WorkerRecord,
    ) -> impl Future<Output = Option<Newcomer>> + use<> {
        // The future borrows nothing from the table, so that no table is held while the file is read.
        let sought = self.directory.clone().zip(expected(table, record));
        let (stats, newcomers) = (Arc::clone(&self.stats), self.newcomers.clone());
        async move {
            let (directory, expected) = sought?;
            let (worker, counts) = (expected.worker, Arc::clone(&stats));
            let check = move || snapshot::check(&directory, &[expected], &counts);
            match newcomers.read(check).await {
                Ok((checked, place)) => {
                    let (restore, mut loads) = Restore::new(checked);
                    Some(Newcomer { load: loads.pop()?, restore, place })
                }
                Err(refusal) => {
                    snapshot::refuse_unread(worker, refusal, &stats);
                    None
                }
            }
        }
    }

    /// Starts feeding the load of an added worker.
    pub(super) fn feed_newcomer(&self, newcomer: Newcomer) -> Result<()> {
        let Newcomer { load, restore, place } = newcomer;
        // If the shard did not take the load, the feeding ends at once.
        drop(load);
        self.start(restore, place)
    }

    /// Starts feeding loads to a running shard.
    pub(super) fn feed(&self, restore: Restore) -> Result<()> {
        self.start(restore, ())
    }

    fn start<P: Send + 'static>(&self, restore: Restore, place: P) -> Result<()> {
        // It ends with the last load, or with its shard.
        restore.start(Arc::clone(&self.stats), place).map(drop).map_err(|error| {
            Error::new(Kind::System, "cannot start a thread to load snapshots", "raise the limit of threads")
                .caused_by(error)
        })
    }

    /// Starts the thread that writes snapshots.
    pub(super) fn keep(
        &self,
        config: &Config,
        tables: &RequestTables,
        ingest_threads: &Arc<IngestThreads>,
        (watchlist, turns): (&Watchlist, &Turns),
    ) -> Result<Option<Keeper>> {
        let Some(directory) = &self.directory else { return Ok(None) };
        let (loads, clock, keep_ms) = (Arc::clone(&tables.loads), tables.clock(), config.snapshot.keep_s * 1000);
        let laws = move || {
            let now_unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
            loads.learnt_laws(clock(), now_unix_ms, keep_ms)
        };
        // A weak reference: a slow snapshot must not keep the ingest threads from ending.
        let ingest_threads = Arc::downgrade(ingest_threads);
        let gone = || Error::new(Kind::Draining, "the ingest threads have ended", "ask again after the restart");
        // Before and after its turn another daemon writes to the same directory.
        let turns = turns.clone();
        let ask = move |shard, worker| {
            let ingest_threads = ingest_threads.upgrade().filter(|_| turns.is_ours());
            ingest_threads.ok_or_else(gone)?.dump(shard, worker)
        };
        Keeper::start(KeeperPlan {
            directory: Arc::clone(directory),
            fleet: Arc::clone(&tables.fleet),
            dump: Box::new(ask),
            laws: Box::new(laws),
            stats: Arc::clone(&self.stats),
            every: Duration::from_secs(config.snapshot.every_s),
            keep: Duration::from_secs(config.snapshot.keep_s),
            mark: watchlist.add("snapshot", false),
        })
        .map(Some)
    }

    /// A place for one removal by request.
    ///
    /// # Errors
    /// `Overloaded` while earlier removals have not ended.
    pub(super) fn place_to_remove(&self) -> Result<OwnedSemaphorePermit> {
        Arc::clone(&self.removals).try_acquire_owned().map_err(|_| {
            let problem = "snapshots are still being removed for earlier requests";
            Error::new(
                Kind::Overloaded,
                problem,
                "ask again later; check whether the file system of snapshot.dir responds",
            )
        })
    }

    /// Deletes the snapshot of a worker, or all snapshots.
    pub(super) fn remove(&self, worker: Option<Worker>) -> Result<usize> {
        let Some(directory) = &self.directory else { return Ok(0) };
        let removed = directory.remove(worker).map_err(|error| not_removed(directory, error))?;
        self.stats.counters.add(SnapshotCounter::SnapshotsReset, removed as u64);
        Ok(removed)
    }

    fn remove_laws(&self) -> Result<()> {
        let Some(directory) = &self.directory else { return Ok(()) };
        directory.remove_laws().map(drop).map_err(|error| not_removed(directory, error))
    }
}

fn not_removed(directory: &Directory, error: std::io::Error) -> Error {
    let what = format!("cannot remove snapshots from {}", directory.path().display());
    Error::new(Kind::System, what, "remove them by hand").caused_by(error)
}

/// The facts that a worker's snapshot must match; `None` = the worker publishes no events.
pub(super) fn expected(table: &FleetTable, record: &WorkerRecord) -> Option<Expected> {
    let space = table.space(record.space)?;
    let name = SpaceName { model: space.model.clone(), namespace: space.namespace.clone(), role: space.role };
    let is_provable = record.events.as_ref()?.replay.is_some();
    Some(Expected { worker: record.worker, space: name, scheme: space.scheme.get(), is_provable })
}

/// The loads of a shard's workers, and the thread that feeds them.
pub(super) fn loads_of(plan: &ShardPlan, checked: &mut Vec<Checked>) -> (Restore, Vec<FirstLoad>) {
    let is_of = |checked: &mut Checked| plan.publishers.iter().any(|publisher| publisher.worker == checked.worker());
    Restore::new(checked.extract_if(.., is_of).collect())
}

/// Waits for the last snapshots.
pub(super) fn finish(keeper: Option<Keeper>, deadline: Instant, stats: &SnapshotStats) {
    if keeper.is_some_and(|keeper| !keeper.join(deadline)) {
        stats.counters.bump(SnapshotCounter::SnapshotsLate);
        tracing::warn!(remedy = "raise serve.drain_ms_max", "the last snapshot was not written in time");
    }
}
