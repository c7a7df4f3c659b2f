//! What the engines' KV events tell: the product's own index and fleet table. All routers of a simulated fleet hear the
//! same events at the same time, so they read one index.

use std::sync::Arc;

use crate::fleet::{FleetTable, PoolRole, SchemeCell, Space, WorkerRecord, WorkerState};
use crate::hash;
use crate::ids::{EngineHash, GroupId, LocalHash, Scheme, ShardId, SpaceId, Tier, Window, Worker, WorkerIndex};
use crate::index::{IndexReader, ShardLimits, ShardWriter, StoreBlocks, shard};
use crate::simulated_engine::{EngineSpec, KvEvent};

/// The space that requests name: engines that run whole requests, or the pool that decodes.
pub(super) const SERVES: SpaceId = SpaceId(0);
/// The space of the pool that prefills, if the fleet has one.
pub(super) const PREFILLS: SpaceId = SpaceId(1);

pub(super) struct FleetIndex {
    pub(super) fleet: FleetTable,
    /// By space.
    pub(super) readers: Vec<IndexReader>,
    writers: Vec<ShardWriter>,
    pub(super) scheme: Scheme,
    hashes: Vec<EngineHash>,
    locals: Vec<LocalHash>,
}

/// The space of an engine.
fn space_of(spec: &EngineSpec) -> SpaceId {
    if spec.role == PoolRole::Prefill { PREFILLS } else { SERVES }
}

impl FleetIndex {
    pub(super) fn new(specs: &[EngineSpec]) -> Self {
        let block_size = specs.first().map_or(16, |spec| spec.block_size);
        let scheme = Scheme { block_size, window: Window::Plain };
        let has_pools = specs.iter().any(|spec| spec.role == PoolRole::Prefill);
        let roles = if has_pools { &[PoolRole::Decode, PoolRole::Prefill][..] } else { &[PoolRole::Both] };
        let limits =
            ShardLimits { worker_blocks_max: u64::MAX / 4, worker_bytes_max: u64::MAX / 4, ..Default::default() };
        let shards = (0..roles.len()).map(|at| shard(ShardId(at as u16), limits));
        let (mut writers, readers): (Vec<_>, Vec<_>) = shards.unzip();
        let record = |(at, spec): (usize, &EngineSpec)| {
            let space = space_of(spec);
            let slot = writers[space.0 as usize].add_worker().expect("a shard has room for a simulated fleet");
            WorkerRecord {
                name: format!("w{at}"),
                space,
                shard: ShardId(space.0 as u16),
                batched_tokens_max: u64::from(spec.step_tokens_max),
                capacity_blocks: spec.kv_tokens / u64::from(block_size),
                ..WorkerRecord::new(WorkerIndex(at as u32), Worker::new(at as u64 + 1, 0), slot)
            }
        };
        let workers = specs.iter().enumerate().map(record).collect();
        let space = |(at, role): (usize, &PoolRole)| Space {
            id: SpaceId(at as u32),
            model: "m".into(),
            namespace: String::new(),
            role: *role,
            scheme: Arc::new(SchemeCell::new(Some(scheme))),
        };
        let spaces = roles.iter().enumerate().map(space).collect();
        Self {
            fleet: FleetTable { version: 1, spaces, workers },
            readers: readers.into_iter().map(|reader| IndexReader::new(vec![reader])).collect(),
            writers,
            scheme,
            hashes: Vec::new(),
            locals: Vec::new(),
        }
    }

    /// Applies a batch of a worker's events.
    pub(super) fn apply(&mut self, worker: usize, events: &[KvEvent]) {
        let WorkerRecord { slot, space, .. } = self.fleet.workers[worker];
        let (writer, hashes, locals) = (&mut self.writers[space.0 as usize], &mut self.hashes, &mut self.locals);
        let (seed, group) = (hash::seed(None, None), GroupId(0));
        writer.begin_batch(slot);
        for event in events {
            match event {
                KvEvent::Stored { tier, blocks, from, to, .. } => {
                    let parent = from.checked_sub(1).map(|at| EngineHash(blocks[at as usize].chain));
                    let stored = &blocks[*from as usize..*to as usize];
                    hashes.clear();
                    locals.clear();
                    hashes.extend(stored.iter().map(|block| EngineHash(block.chain)));
                    locals.extend(stored.iter().map(|block| LocalHash(block.local)));
                    writer.store(slot, &StoreBlocks { parent, hashes, locals, tier: *tier, group, seed });
                }
                KvEvent::Removed { tier, chains } => {
                    hashes.clear();
                    hashes.extend(chains.iter().map(|chain| EngineHash(*chain)));
                    writer.remove(slot, *tier, group, hashes);
                }
                KvEvent::Copied { tier, chains } => {
                    for chain in chains {
                        let name = EngineHash(*chain);
                        let Some(binding) = writer.binding_of(slot, name) else { continue };
                        let (hashes, locals, parent) = (&[name], &[binding.local], binding.parent);
                        writer.store(slot, &StoreBlocks { parent, hashes, locals, tier: *tier, group, seed });
                    }
                }
            }
        }
        writer.end_batch(slot);
        writer.publish();
        writer.sweep(1 << 16);
    }

    /// A worker leaves the fleet, and what it held is gone; or it is back, cold.
    pub(super) fn set_present(&mut self, worker: usize, is_present: bool) {
        let WorkerRecord { slot, space, .. } = self.fleet.workers[worker];
        self.fleet.workers[worker].state = if is_present { WorkerState::Ready } else { WorkerState::Down };
        self.fleet.version += 1;
        if !is_present {
            let writer = &mut self.writers[space.0 as usize];
            for tier in [Tier::Device, Tier::Host, Tier::Disk, Tier::External] {
                writer.clear(slot, Some(tier));
            }
            writer.publish();
        }
    }
}
