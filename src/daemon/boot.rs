//! From a configuration to the tables and plans that threads start from. Nothing is opened here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rand::RngExt;
use xxhash_rust::xxh3::xxh3_64;

use crate::config::{Config, Salts, SpaceConfig, WorkerConfig};
use crate::error::{Error, Kind, Result};
use crate::fleet::{Fleet, FleetTable, SchemeCell, Space, TrustCell, WorkerRecord, WorkerState};
use crate::ids::{ShardId, SpaceId, Worker, WorkerIndex, WorkerSlot};
use crate::index::{IndexReader, Reclaimer, ShardLimits, ShardReader, ShardWriter, shard_in};
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
    let mut shards = Shards::new(config);
    let mut table = FleetTable { version: 1, spaces, workers: Vec::with_capacity(config.workers.len()) };
    let mut views = Vec::with_capacity(config.workers.len());
    let loads = LoadsConfig {
        age_ms_max: config.booking.age_s_max * 1000,
        session_grace_ms: config.booking.session_grace_s * 1000,
    };
    let loads = Arc::new(Loads::new(config.workers.len(), loads));
    for (index, worker) in config.workers.iter().enumerate() {
        let shard = shard_of(worker.worker, config.ingest.shards);
        let slot = shards.add(worker, shard)?;
        let predicted = config.spaces.get(worker.space.0 as usize).is_some_and(|space| space.approximate);
        let record = record(worker, WorkerIndex(index as u32), (shard, slot), predicted, now_unix_ms);
        let view = Arc::new(WorkerView::new(Arc::clone(&record.trust)));
        if let Some(publisher) = publisher(config, &table.spaces, &record, (&view, &loads)) {
            shards.publishers.entry(shard).or_default().push(publisher);
        }
        table.workers.push(record);
        views.push(view);
    }
    let (indexes, plans) = shards.split(table.spaces.len());
    Ok(Booted { loads, fleet: Arc::new(Fleet::new(table)), indexes, views, plans })
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
    (shard, slot): (ShardId, WorkerSlot),
    predicted: bool,
    now_unix_ms: u64,
) -> WorkerRecord {
    let (level, reason) = match worker.events {
        Some(_) => (TrustLevel::Unproven, TrustReason::Joining),
        None if predicted => (TrustLevel::Predicted, TrustReason::OwnDecisions),
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

fn publisher(
    config: &Config,
    spaces: &[Space],
    record: &WorkerRecord,
    (view, loads): (&Arc<WorkerView>, &Arc<Loads>),
) -> Option<Publisher> {
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
        loads: Some(Arc::clone(loads)),
    })
}

/// What all shards of one space have in common.
#[derive(Debug)]
struct Bounds {
    limits: ShardLimits,
    /// One for all of them, so that a query enters once.
    reclaimer: Reclaimer,
}

impl Bounds {
    /// Of a space whose workers are in so many shards. The parts are equal, as which worker is where follows
    /// from identities alone. `secret` is the daemon's.
    fn of(space: &SpaceConfig, shards: usize, secret: u64) -> Self {
        let memory_bytes_max = match space.memory_bytes_max {
            0 => u64::MAX,
            bytes => bytes / shards.max(1) as u64,
        };
        Self { limits: ShardLimits { memory_bytes_max, secret, ..ShardLimits::default() }, reclaimer: Reclaimer::new() }
    }

    /// An empty shard of the space.
    fn shard(&self, at: ShardId) -> (ShardWriter, ShardReader) {
        tracing::debug!(shard = %at, memory_bytes_max = self.limits.memory_bytes_max, "shard made");
        shard_in(at, self.limits, &self.reclaimer)
    }
}

/// How many shards have workers of each space.
fn shards_by_space(config: &Config) -> BTreeMap<SpaceId, usize> {
    let places: BTreeSet<(SpaceId, ShardId)> =
        config.workers.iter().map(|worker| (worker.space, shard_of(worker.worker, config.ingest.shards))).collect();
    let mut shards = BTreeMap::new();
    places.iter().for_each(|(space, _)| *shards.entry(*space).or_default() += 1);
    shards
}

/// The indexes under construction: one per space and shard that has a worker of it.
struct Shards {
    /// By `SpaceId`.
    bounds: Vec<Bounds>,
    indexes: BTreeMap<(ShardId, SpaceId), (ShardWriter, ShardReader)>,
    publishers: BTreeMap<ShardId, Vec<Publisher>>,
}

impl Shards {
    fn new(config: &Config) -> Self {
        let shards = shards_by_space(config);
        // Nobody outside knows it, so nobody can choose prompts that collide in the tables.
        let secret = rand::rng().random();
        let of = |(at, space): (usize, &SpaceConfig)| {
            Bounds::of(space, shards.get(&SpaceId(at as u32)).copied().unwrap_or_default(), secret)
        };
        let bounds = config.spaces.iter().enumerate().map(of).collect();
        Self { bounds, indexes: BTreeMap::new(), publishers: BTreeMap::new() }
    }

    fn add(&mut self, worker: &WorkerConfig, at: ShardId) -> Result<WorkerSlot> {
        let bounds = &self.bounds[worker.space.0 as usize];
        let new = || bounds.shard(at);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Flags, parse};

    #[test]
    fn a_spaces_memory_is_divided_among_the_shards_it_has_workers_in() {
        let mut text = String::from("[ingest]\nshards = 4\n");
        text += "[[space]]\nmodel = \"a\"\nmemory_bytes_max = 1073741824\n[[space]]\nmodel = \"b\"\n";
        for id in 1..=20 {
            text += &format!("[[worker]]\nid = {id}\nmodel = \"a\"\n");
        }
        text += "[[worker]]\nid = 99\nmodel = \"b\"\n";
        let config = parse("test.toml", &text, &Flags::default()).expect("valid");
        let shards = shards_by_space(&config);
        assert_eq!((shards[&SpaceId(0)], shards[&SpaceId(1)]), (4, 1));
        let bounds = Shards::new(&config).bounds;
        let ceilings: Vec<u64> = bounds.iter().map(|bounds| bounds.limits.memory_bytes_max).collect();
        assert_eq!(ceilings, [1 << 28, u64::MAX]);
        assert_eq!(bounds[0].limits.secret, bounds[1].limits.secret, "one for the daemon");
        assert_eq!(Bounds::of(&config.spaces[0], 0, 0).limits.memory_bytes_max, 1 << 30, "a space without workers");
        let booted = boot(&config, 0).expect("booted");
        assert_eq!(booted.plans.iter().map(|plan| plan.writers.len()).sum::<usize>(), 5);
    }
}
