//! From a configuration to the tables and plans that threads start from. Nothing is opened here.

use std::collections::BTreeMap;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use crate::config::{Config, Salts, WorkerConfig};
use crate::error::{Error, Kind, Result};
use crate::fleet::{Fleet, FleetTable, SchemeCell, Space, TrustCell, WorkerRecord, WorkerState};
use crate::ids::{ShardId, SpaceId, Worker, WorkerIndex, WorkerSlot};
use crate::index::{IndexReader, ShardLimits, ShardReader, ShardWriter, shard};
use crate::ingest::{Publisher, ShardPlan, WorkerView};
use crate::load::{Loads, LoadsConfig};
use crate::trust::{Trust, TrustLevel, TrustReason};

/// Everything that exists before the first thread.
pub(super) struct Booted {
    pub(super) fleet: Arc<Fleet>,
    pub(super) loads: Arc<Loads>,
    /// By `SpaceId`.
    pub(super) indexes: Vec<IndexReader>,
    /// By `WorkerIndex`.
    pub(super) views: Vec<Arc<WorkerView>>,
    pub(super) plans: Vec<ShardPlan>,
}

/// Builds the tables of `config`.
///
/// # Errors
/// `Config` if a shard cannot hold its workers.
pub(super) fn boot(config: &Config, now_unix_ms: u64) -> Result<Booted> {
    let spaces: Vec<Space> = config
        .spaces
        .iter()
        .enumerate()
        .map(|(id, space)| Space {
            id: SpaceId(id as u32),
            model: space.model.clone(),
            namespace: space.namespace.clone(),
            role: space.role,
            scheme: Arc::new(SchemeCell::new(space.scheme())),
        })
        .collect();
    let mut shards = Shards::default();
    let mut table = FleetTable { version: 1, spaces, workers: Vec::with_capacity(config.workers.len()) };
    let mut views = Vec::with_capacity(config.workers.len());
    for (index, worker) in config.workers.iter().enumerate() {
        let shard = shard_of(worker.worker, config.ingest.shards);
        let slot = shards.add(worker, shard)?;
        let record = record(worker, WorkerIndex(index as u32), shard, slot, now_unix_ms);
        let view = Arc::new(WorkerView::new(Arc::clone(&record.trust)));
        if let Some(publisher) = publisher(config, &table.spaces, &record, &view) {
            shards.publishers.entry(shard).or_default().push(publisher);
        }
        table.workers.push(record);
        views.push(view);
    }
    let loads = LoadsConfig {
        age_ms_max: config.booking.age_s_max * 1000,
        session_grace_ms: config.booking.session_grace_s * 1000,
    };
    let (indexes, plans) = shards.split(table.spaces.len());
    Ok(Booted {
        loads: Arc::new(Loads::new(table.workers.len(), loads)),
        fleet: Arc::new(Fleet::new(table)),
        indexes,
        views,
        plans,
    })
}

/// The shard that owns a worker: a hash of its identity, so that it does not depend on the others.
fn shard_of(worker: Worker, shards: u16) -> ShardId {
    let mut identity = [0; 12];
    identity[..8].copy_from_slice(&worker.id.0.to_le_bytes());
    identity[8..].copy_from_slice(&worker.rank.0.to_le_bytes());
    ShardId((xxh3_64(&identity) % u64::from(shards.max(1))) as u16)
}

fn record(
    worker: &WorkerConfig,
    index: WorkerIndex,
    shard: ShardId,
    slot: WorkerSlot,
    now_unix_ms: u64,
) -> WorkerRecord {
    let (level, reason) = match worker.events {
        Some(_) => (TrustLevel::Unproven, TrustReason::Joining),
        None => (TrustLevel::None, TrustReason::NoEvents),
    };
    let reasons = [reason].into_iter().collect();
    let trust = Trust { level, reasons, since_unix_ms: now_unix_ms, ..Trust::default() };
    WorkerRecord {
        index,
        worker: worker.worker,
        space: worker.space,
        name: worker.name.clone(),
        shard,
        slot,
        capacity_blocks: worker.capacity_blocks,
        batched_tokens_max: worker.batched_tokens_max,
        device_class: worker.device_class,
        weight: worker.weight,
        taints: worker.taints.clone(),
        // Without a stream there is nothing to wait for.
        state: match (worker.state, &worker.events) {
            (WorkerState::Joining, None) => WorkerState::Ready,
            (state, _) => state,
        },
        trust: Arc::new(TrustCell::new(trust)),
        events: worker.events.clone(),
    }
}

fn publisher(config: &Config, spaces: &[Space], record: &WorkerRecord, view: &Arc<WorkerView>) -> Option<Publisher> {
    let place = record.space.0 as usize;
    let (space, said) = (spaces.get(place)?, config.spaces.get(place)?);
    Some(Publisher {
        index: record.index,
        worker: record.worker,
        space: record.space,
        slot: record.slot,
        source: record.events.clone()?,
        scheme: Arc::clone(&space.scheme),
        scheme_configured: said.scheme().is_some(),
        salts_possible: said.salts == Salts::Possible,
        capacity_blocks: record.capacity_blocks,
        view: Arc::clone(view),
    })
}

/// The indexes under construction: one per space and shard that has a worker of it.
#[derive(Default)]
struct Shards {
    indexes: BTreeMap<(ShardId, SpaceId), (ShardWriter, ShardReader)>,
    publishers: BTreeMap<ShardId, Vec<Publisher>>,
}

impl Shards {
    fn add(&mut self, worker: &WorkerConfig, at: ShardId) -> Result<WorkerSlot> {
        let new = || shard(at, ShardLimits::default());
        let (writer, _) = self.indexes.entry((at, worker.space)).or_insert_with(new);
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

    fn split(mut self, spaces: usize) -> (Vec<IndexReader>, Vec<ShardPlan>) {
        let mut readers: Vec<Vec<ShardReader>> = (0..spaces).map(|_| Vec::new()).collect();
        let mut plans: BTreeMap<ShardId, ShardPlan> = BTreeMap::new();
        for ((at, space), (writer, reader)) in self.indexes {
            readers[space.0 as usize].push(reader);
            let publishers = self.publishers.remove(&at).unwrap_or_default();
            let plan = plans.entry(at).or_insert_with(|| ShardPlan { shard: at, writers: Vec::new(), publishers });
            plan.writers.push((space, writer));
        }
        (readers.into_iter().map(IndexReader::new).collect(), plans.into_values().collect())
    }
}
