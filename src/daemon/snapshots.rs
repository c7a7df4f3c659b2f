//! Snapshots as the daemon uses them: loaded at its start, written while it runs and once more when it stops.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::streams::Streams;
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::fleet::{Fleet, FleetTable};
use crate::ids::Worker;
use crate::ingest::{FirstLoad, ShardPlan};
use crate::metrics::SnapshotCounter;
use crate::snapshot::{self, Checked, Directory, Expected, Keeper, KeeperPlan, Restore, SnapshotStats, SpaceName};

/// The directory of snapshots, where one is configured, and what is counted.
#[derive(Clone, Debug, Default)]
pub(super) struct Snapshots {
    directory: Option<Arc<Directory>>,
    pub(super) stats: Arc<SnapshotStats>,
}

impl Snapshots {
    /// Takes the configured directory; a fresh start removes what is in it.
    pub(super) fn open(config: &Config) -> Result<Self> {
        let stats = Arc::default();
        let Some(path) = &config.snapshot.dir else { return Ok(Self { directory: None, stats }) };
        let this = Self { directory: Some(Arc::new(Directory::open(path)?)), stats };
        if config.snapshot.fresh {
            let removed = this.remove(None)?;
            tracing::info!(removed, path = %path.display(), "a fresh start: snapshots removed");
        }
        Ok(this)
    }

    /// The snapshots that may be loaded, checked from the first byte to the last.
    pub(super) fn check(&self, table: &FleetTable) -> Vec<Checked> {
        let Some(directory) = &self.directory else { return Vec::new() };
        let expected = table.workers.iter().filter_map(|record| {
            let space = table.space(record.space)?;
            let name = SpaceName { model: space.model.clone(), namespace: space.namespace.clone(), role: space.role };
            let is_provable = record.events.as_ref()?.replay.is_some();
            Some(Expected { worker: record.worker, space: name, scheme: space.scheme.get(), is_provable })
        });
        snapshot::check(directory, &expected.collect::<Vec<_>>(), &self.stats)
    }

    /// Starts feeding loads to a shard that runs.
    pub(super) fn feed(&self, restore: Restore) -> Result<()> {
        // It ends with the last load, or with its shard.
        restore.start(Arc::clone(&self.stats)).map(drop).map_err(|error| {
            Error::new(Kind::System, "cannot start a thread to load snapshots", "raise the limit of threads")
                .caused_by(error)
        })
    }

    /// Starts writing.
    pub(super) fn keep(&self, config: &Config, fleet: &Arc<Fleet>, streams: &Arc<Streams>) -> Result<Option<Keeper>> {
        let Some(directory) = &self.directory else { return Ok(None) };
        // Not the streams themselves: a thread that is late must not keep them from ending.
        let streams = Arc::downgrade(streams);
        let gone = || Error::new(Kind::Draining, "the ingest threads have ended", "ask again after the restart");
        Keeper::start(KeeperPlan {
            directory: Arc::clone(directory),
            fleet: Arc::clone(fleet),
            dump: Box::new(move |shard, worker| streams.upgrade().ok_or_else(gone)?.dump(shard, worker)),
            stats: Arc::clone(&self.stats),
            every: Duration::from_secs(config.snapshot.every_s),
            keep: Duration::from_secs(config.snapshot.keep_s),
        })
        .map(Some)
    }

    /// Removes the snapshot of a worker, or all, for good.
    pub(super) fn remove(&self, worker: Option<Worker>) -> Result<usize> {
        let Some(directory) = &self.directory else { return Ok(0) };
        let removed = directory.remove(worker).map_err(|error| {
            let what = format!("cannot remove snapshots from {}", directory.path().display());
            Error::new(Kind::System, what, "remove them by hand").caused_by(error)
        })?;
        self.stats.counters.add(SnapshotCounter::SnapshotsReset, removed as u64);
        Ok(removed)
    }
}

/// The loads of a shard's workers, and what feeds them.
pub(super) fn loads_of(plan: &ShardPlan, checked: &mut Vec<Checked>) -> (Restore, Vec<FirstLoad>) {
    let is_of = |checked: &mut Checked| plan.publishers.iter().any(|publisher| publisher.worker == checked.worker());
    Restore::new(checked.extract_if(.., is_of).collect())
}

/// Waits for the last snapshots.
pub(super) fn finish(keeper: Option<Keeper>, deadline: Instant, stats: &SnapshotStats) {
    if keeper.is_some_and(|keeper| !keeper.join(deadline)) {
        stats.counters.bump(SnapshotCounter::SnapshotsLate);
        tracing::warn!(remedy = "raise serve.drain_ms_max", "the last snapshot is not on the disk in time");
    }
}
