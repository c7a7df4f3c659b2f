//! Events of an index as values: the parts of a stream. An event prints as the call that makes it, so that a failing
//! list can be pasted into a test.

use super::Oracle;
use kvrouted::ids::{EngineHash, GroupId, LocalHash, Seed, Tier, WorkerSlot};
use kvrouted::index::{RemoveOutcome, ShardLimits, ShardWriter, StoreBlocks, StoreOutcome};
use std::fmt;

/// An event of a shard. The stream numbers the workers; the writer chooses their slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Store(Stored),
    Remove { worker: usize, tier: Tier, group: GroupId, hashes: Vec<EngineHash> },
    Clear { worker: usize, tier: Option<Tier> },
    Window { worker: usize, group: GroupId, window_blocks: u32 },
    BeginBatch { worker: usize },
    RemoveWorker { worker: usize },
    AddWorker { worker: usize },
    Sweep { budget_blocks: usize },
    Publish,
}

/// The outcome of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Stored(StoreOutcome),
    Removed(RemoveOutcome),
    Announced(bool),
    Nothing,
}

impl Outcome {
    /// The outcome without the number of dormant blocks, which the model does not report.
    pub(crate) fn without_dormant(self) -> Self {
        match self {
            Self::Stored(outcome) => Self::Stored(StoreOutcome { dormant: 0, ..outcome }),
            other => other,
        }
    }
}

/// A store that owns its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) worker: usize,
    pub(crate) parent: Option<EngineHash>,
    pub(crate) hashes: Vec<EngineHash>,
    pub(crate) locals: Vec<LocalHash>,
    pub(crate) tier: Tier,
    pub(crate) group: GroupId,
    pub(crate) seed: Seed,
}

impl Stored {
    /// The store as an argument of the writer.
    pub(crate) fn blocks(&self) -> StoreBlocks<'_> {
        let Self { parent, hashes, locals, tier, group, seed, .. } = self;
        StoreBlocks { parent: *parent, hashes, locals, tier: *tier, group: *group, seed: *seed }
    }
}

impl Event {
    /// The worker of the event, if it concerns one.
    pub(crate) const fn worker(&self) -> Option<usize> {
        match self {
            Self::Store(Stored { worker, .. })
            | Self::Remove { worker, .. }
            | Self::Clear { worker, .. }
            | Self::Window { worker, .. }
            | Self::BeginBatch { worker }
            | Self::RemoveWorker { worker }
            | Self::AddWorker { worker } => Some(*worker),
            Self::Sweep { .. } | Self::Publish => None,
        }
    }

    /// Applies the event to the model of its worker. Adding or removing the worker changes no model.
    pub(crate) fn apply_to_oracle(&self, oracle: &mut Oracle, limits: &ShardLimits) -> Outcome {
        match self {
            Self::Store(stored) => return Outcome::Stored(oracle.store(limits, &stored.blocks())),
            Self::Remove { tier, group, hashes, .. } => return Outcome::Removed(oracle.remove(*tier, *group, hashes)),
            Self::Clear { tier, .. } => oracle.clear(*tier),
            Self::Window { group, window_blocks, .. } => {
                return Outcome::Announced(oracle.announce_window(*group, *window_blocks));
            }
            Self::BeginBatch { .. } => oracle.begin_batch(),
            Self::RemoveWorker { .. } | Self::AddWorker { .. } | Self::Sweep { .. } | Self::Publish => {}
        }
        Outcome::Nothing
    }

    /// Applies the event to the worker's slot of the shard, with the same exception.
    pub(crate) fn apply_to_writer(&self, writer: &mut ShardWriter, slot: WorkerSlot) -> Outcome {
        match self {
            Self::Store(stored) => return Outcome::Stored(writer.store(slot, &stored.blocks())),
            Self::Remove { tier, group, hashes, .. } => {
                return Outcome::Removed(writer.remove(slot, *tier, *group, hashes));
            }
            Self::Clear { tier, .. } => writer.clear(slot, *tier),
            Self::Window { group, window_blocks, .. } => {
                return Outcome::Announced(writer.announce_window(slot, *group, *window_blocks));
            }
            Self::BeginBatch { .. } => {
                writer.end_batch(slot);
                writer.begin_batch(slot);
            }
            Self::RemoveWorker { .. } | Self::AddWorker { .. } | Self::Sweep { .. } | Self::Publish => {}
        }
        Outcome::Nothing
    }
}

/// Blocks as `(engine hash, local hash)`.
pub(crate) fn store(
    worker: usize,
    parent: Option<u64>,
    blocks: &[(u64, u64)],
    tier: Tier,
    group: u32,
    seed: u64,
) -> Event {
    Event::Store(Stored {
        worker,
        parent: parent.map(EngineHash),
        hashes: blocks.iter().map(|(hash, _)| EngineHash(*hash)).collect(),
        locals: blocks.iter().map(|(_, local)| LocalHash(*local)).collect(),
        tier,
        group: GroupId(group),
        seed: Seed(seed),
    })
}

pub(crate) fn remove(worker: usize, tier: Tier, group: u32, hashes: &[u64]) -> Event {
    Event::Remove { worker, tier, group: GroupId(group), hashes: hashes.iter().copied().map(EngineHash).collect() }
}

pub(crate) const fn clear(worker: usize, tier: Option<Tier>) -> Event {
    Event::Clear { worker, tier }
}

pub(crate) const fn window(worker: usize, group: u32, window_blocks: u32) -> Event {
    Event::Window { worker, group: GroupId(group), window_blocks }
}

pub(crate) const fn begin_batch(worker: usize) -> Event {
    Event::BeginBatch { worker }
}

pub(crate) const fn remove_worker(worker: usize) -> Event {
    Event::RemoveWorker { worker }
}

pub(crate) const fn add_worker(worker: usize) -> Event {
    Event::AddWorker { worker }
}

pub(crate) const fn sweep(budget_blocks: usize) -> Event {
    Event::Sweep { budget_blocks }
}

pub(crate) const fn publish() -> Event {
    Event::Publish
}

/// The call that makes the event, with its comma.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Store(Stored { worker, parent, hashes, locals, tier, group, seed }) => {
                let parent = parent.map(|parent| parent.0);
                let blocks: Vec<(u64, u64)> =
                    hashes.iter().zip(locals).map(|(hash, local)| (hash.0, local.0)).collect();
                write!(f, "store({worker}, {parent:?}, &{blocks:?}, Tier::{tier:?}, {group}, {seed}),")
            }
            Self::Remove { worker, tier, group, hashes } => {
                let hashes: Vec<u64> = hashes.iter().map(|hash| hash.0).collect();
                write!(f, "remove({worker}, Tier::{tier:?}, {group}, &{hashes:?}),")
            }
            Self::Clear { worker, tier: None } => write!(f, "clear({worker}, None),"),
            Self::Clear { worker, tier: Some(tier) } => write!(f, "clear({worker}, Some(Tier::{tier:?})),"),
            Self::Window { worker, group, window_blocks } => {
                write!(f, "window({worker}, {group}, {window_blocks}),")
            }
            Self::BeginBatch { worker } => write!(f, "begin_batch({worker}),"),
            Self::RemoveWorker { worker } => write!(f, "remove_worker({worker}),"),
            Self::AddWorker { worker } => write!(f, "add_worker({worker}),"),
            Self::Sweep { budget_blocks } => write!(f, "sweep({budget_blocks}),"),
            Self::Publish => write!(f, "publish(),"),
        }
    }
}
