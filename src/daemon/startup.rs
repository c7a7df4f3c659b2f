//! The tables and plans that threads start with, made from the configuration. Opens no file and no socket.

use std::sync::Arc;

use rand::RngExt;

use super::snapshots::Snapshots;
use super::statistics::WorkerViews;
use super::worker_records::WorkerRecords;
use crate::budget::{MemoryAccounts, MemoryPart, MemoryPool};
use crate::config::{Config, FullReports, SpaceConfig, WorkerConfig};
use crate::error::{Error, Kind, Result};
use crate::fleet::{Fleet, FleetTable, PlaceAllocator};
use crate::ids::{ShardId, SpaceId, WorkerSlot};
use crate::index::{IndexReader, Reclaimer, ShardLimits, ShardReader, ShardWriter, shard_in};
use crate::ingest::{PublisherPlan, ShardPlan, WorkerView};
use crate::load::{BackOff, Loads, LoadsConfig};
use crate::requests::Identity;

/// What exists before the first thread.
pub(super) struct Startup {
    pub(super) fleet: Arc<Fleet>,
    pub(super) loads: Arc<Loads>,
    /// By `SpaceId`.
    pub(super) indexes: Vec<IndexReader>,
    pub(super) views: Arc<WorkerViews>,
    pub(super) records: WorkerRecords,
    /// The places of workers in the tables.
    pub(super) places: PlaceAllocator,
    /// By `ShardId`.
    pub(super) plans: Vec<ShardPlan>,
}

/// Makes the tables of `config`, within the memory of their parts.
///
/// # Errors
/// `Config` if a shard cannot hold its workers.
pub(super) fn prepare(
    config: &Config,
    memory: &MemoryAccounts,
    identity: &Identity,
    now_unix_ms: u64,
) -> Result<Startup> {
    let (bookings_max, active_words_max) = memory.division().bookings();
    let loads = LoadsConfig {
        age_ms_max: config.booking.age_s_max * 1000,
        session_grace_ms: config.booking.session_grace_s * 1000,
        secret: identity.secret,
        prefill: config.booking.prefill(),
        track_output_blocks: config.booking.track_output_blocks,
        back_off: BackOff {
            first_ns: config.booking.back_off_ms * 1_000_000,
            max_ns: config.booking.back_off_ms_max * 1_000_000,
        },
        reported_load_ms_max: config.booking.reported_load_ms_max,
        user_share_percent: config.serve.user_share_percent,
        bookings_max,
        active_words_max,
        ended_waiting_max: config.journal.ended_waiting_max(),
        traced_waiting_max: config.traces.waiting_max(),
    };
    let loads = Arc::new(Loads::new(config.workers.len(), loads));
    let records = WorkerRecords::new(&config.spaces, config.ingest.shards, &loads);
    let (mut shards, mut places) = (Shards::new(config, memory), PlaceAllocator::default());
    let version = identity.fleet_version;
    let (mut table, views) =
        (FleetTable { version, spaces: records.spaces(), workers: Vec::new() }, WorkerViews::default());
    for (worker, index) in config.workers.iter().zip(std::iter::from_fn(|| places.take())) {
        let mut record = records.record(worker, index, now_unix_ms);
        record.slot = shards.add(worker, record.shard)?;
        loads.set_prefill(index, worker.prefill);
        let view = Arc::new(WorkerView::new(Arc::clone(&record.trust)));
        if let Some(publisher) = records.publisher(&record, &view) {
            shards.publishers[usize::from(record.shard.0)].push(publisher);
        }
        table.workers.push(record);
        views.put(index, view);
    }
    let (indexes, plans) = shards.split(table.spaces.len());
    let fleet = Arc::new(Fleet::continuing(table));
    Ok(Startup { loads, fleet, indexes, views: Arc::new(views), records, places, plans })
}

impl Startup {
    /// Restores what an earlier run learnt of the workers' prefill times, and puts the workers into their classes.
    pub(super) fn joined(self, config: &Config, snapshots: &Snapshots, now_unix_ms: u64) -> Self {
        snapshots.restore_laws(&self.loads, now_unix_ms);
        for (worker, record) in config.workers.iter().zip(&self.fleet.load().workers) {
            self.records.join_class(record.index, worker);
        }
        self
    }
}

/// The settings that all shards of one space share.
#[derive(Debug)]
struct SpaceShards {
    limits: ShardLimits,
    /// One for all shards, so that a query enters once.
    reclaimer: Reclaimer,
}

impl SpaceShards {
    /// Divides a space's memory equally among its shards: the shard of a worker depends on its identity alone. `secret`
    /// is the daemon's.
    fn of(space: &SpaceConfig, shards: usize, secret: u64) -> Self {
        let memory_bytes_max = match space.memory_bytes_max {
            0 => u64::MAX,
            bytes => bytes / shards.max(1) as u64,
        };
        let counts_copies = space.full_reports == FullReports::None;
        let limits = ShardLimits { memory_bytes_max, counts_copies, secret, ..ShardLimits::default() };
        Self { limits, reclaimer: Reclaimer::new() }
    }

    /// Makes an empty shard of the space.
    fn shard(&self, at: ShardId) -> (ShardWriter, ShardReader) {
        tracing::debug!(shard = %at, memory_bytes_max = self.limits.memory_bytes_max, "shard made");
        shard_in(at, self.limits, &self.reclaimer)
    }
}

/// The indexes under construction: one per shard and space, because a worker of any space may be added to any shard.
struct Shards {
    /// By `ShardId`, then by `SpaceId`.
    indexes: Vec<Vec<(ShardWriter, ShardReader)>>,
    /// By `ShardId`.
    publishers: Vec<Vec<PublisherPlan>>,
}

impl Shards {
    fn new(config: &Config, memory: &MemoryAccounts) -> Self {
        let shards = usize::from(config.ingest.shards.max(1));
        // Secret, so that no client can choose prompts that collide in the tables.
        let secret = rand::rng().random();
        let bounds: Vec<SpaceShards> =
            config.spaces.iter().map(|space| SpaceShards::of(space, shards, secret)).collect();
        let bytes_max = memory.division().bound(MemoryPart::Index);
        let pool = (bytes_max < u64::MAX).then(|| Arc::new(MemoryPool::new(bytes_max)));
        let shard = |bounds: &SpaceShards, at: usize| {
            let (mut writer, reader) = bounds.shard(ShardId(at as u16));
            if let Some(pool) = &pool {
                writer.draw_from(Arc::clone(pool), memory.gauge(MemoryPart::Index));
            }
            (writer, reader)
        };
        let of_shard = |at: usize| bounds.iter().map(|bounds| shard(bounds, at)).collect();
        Self { indexes: (0..shards).map(of_shard).collect(), publishers: vec![Vec::new(); shards] }
    }

    fn add(&mut self, worker: &WorkerConfig, at: ShardId) -> Result<WorkerSlot> {
        let (writer, _) = &mut self.indexes[usize::from(at.0)][worker.space.0 as usize];
        let slot = writer.add_worker().ok_or_else(|| {
            Error::new(
                Kind::Config,
                format!("worker {} does not fit shard {at}", worker.worker),
                "raise ingest.shards, or run a second daemon",
            )
        })?;
        writer.bound_worker(slot, worker.blocks_max);
        Ok(slot)
    }

    fn split(self, spaces: usize) -> (Vec<IndexReader>, Vec<ShardPlan>) {
        let mut readers: Vec<Vec<ShardReader>> = (0..spaces).map(|_| Vec::new()).collect();
        let mut plans = Vec::with_capacity(self.indexes.len());
        for (at, (indexes, publishers)) in self.indexes.into_iter().zip(self.publishers).enumerate() {
            let mut writers = Vec::with_capacity(indexes.len());
            for (space, (writer, reader)) in indexes.into_iter().enumerate() {
                readers[space].push(reader);
                writers.push((SpaceId(space as u32), writer));
            }
            plans.push(ShardPlan { shard: ShardId(at as u16), writers, publishers });
        }
        (readers.into_iter().map(IndexReader::new).collect(), plans)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Flags, parse};
    use crate::limits::EMPTY_SHARD_BYTES;

    #[test]
    fn the_memory_of_a_space_is_divided_among_the_shards() {
        let mut text = String::from("[ingest]\nshards = 4\n");
        text += "[[space]]\nmodel = \"a\"\nmemory_bytes_max = 1073741824\n[[space]]\nmodel = \"b\"\n";
        text += "[[worker]]\nid = 99\nmodel = \"b\"\n";
        let config = parse("test.toml", &text, &Flags::default()).expect("valid");
        let bounds: Vec<_> = config.spaces.iter().map(|space| SpaceShards::of(space, 4, 7)).collect();
        let ceilings: Vec<u64> = bounds.iter().map(|bounds| bounds.limits.memory_bytes_max).collect();
        assert_eq!(ceilings, [1 << 28, u64::MAX]);
        assert_eq!(bounds[0].limits.secret, bounds[1].limits.secret, "one secret for the daemon");
        let startup = prepare(&config, &MemoryAccounts::unlimited(), &Identity::random(), 0).expect("prepared");
        let plans: Vec<_> = startup.plans.iter().map(|plan| (plan.shard, plan.writers.len())).collect();
        assert_eq!(plans, [0, 1, 2, 3].map(|shard| (ShardId(shard), 2)), "any worker may be added to any shard");
    }

    #[test]
    fn a_shard_without_workers_takes_little_memory() {
        let config = parse("t", "[[space]]\nmodel = \"a\"\n", &Flags::default()).expect("valid");
        let startup = prepare(&config, &MemoryAccounts::unlimited(), &Identity::random(), 0).expect("prepared");
        let bytes: Vec<u64> =
            startup.plans.iter().flat_map(|plan| &plan.writers).map(|(_, writer)| writer.memory().bytes()).collect();
        assert!(bytes.iter().all(|bytes| *bytes <= EMPTY_SHARD_BYTES), "{bytes:?}");
    }
}
