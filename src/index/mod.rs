//! WHERE blocks are: which worker holds which prefix, in which tier.
//!
//! A **shard** is the index of the workers of one ingest thread. [`shard`] makes one and gives out its two
//! ends: a [`ShardWriter`], the only hand that changes it, and a [`ShardReader`], of which every serving
//! core has a clone inside its [`IndexReader`]. Nothing here knows a socket, a clock or a thread.
//!
//! # What is stored
//!
//! For each worker, an engine hash is bound to one `(parent engine hash, local hash, seed)` for as long as
//! some (tier, group) refers to it; references are counted per (tier, group). A tier **holds** a block while
//! it has groups (those seen in a store since the tier was last cleared) and each counts a reference to it.
//!
//! A **chain** is a sequence of bound blocks, each the parent of the next by engine hash, the first without
//! a parent. The answer to a query `q[0..n]` for a worker is the greatest `(device, host, disk, external)`,
//! compared in that order, over all chains of the worker whose local hashes are `q[0..k]`: the run of
//! leading blocks held by the device, then the run that follows it held by the host, and so on.
//! A block whose chain to the root is not complete counts for nothing; nothing walks over it or over what
//! was removed, and everything counts again once the chain is complete again. Workers share nothing that
//! could be observed.
//!
//! # Consistency
//!
//! Let `B(s)` be the sequence of states of shard `s` at its publishes, starting with the empty one, and let
//! a query run from `t0` to `t1`.
//!
//! * For every shard there is one boundary `b` in `B(s)`, the newest at some moment between `t0` and `t1`,
//!   such that the depths of **all** workers of the shard are those of `b`. Never a mix of two, never
//!   something between two publishes.
//! * Boundaries of different shards are independent; a worker belongs to one shard.
//! * Queries that one [`IndexReader`] answers one after another never go back: their `b` do not decrease.
//!   [`Lookup::epoch`] is the sum over shards of the publishes up to `b`, so an equal epoch from the same
//!   reader means an equal state.
//! * [`Lookup::contended`] is never set by this implementation.
//!
//! A reader never waits, also not for a writer that has stopped in the middle of anything. A writer waits in
//! [`ShardWriter::publish`] for lookups that began before the publish before; a lookup holds nothing
//! else up, and nothing is held between two lookups.
//!
//! "Exact" means exact over 64-bit local hashes.
//!
//! # How it is stored
//!
//! The writer keeps each worker's blocks as trees by parent. Blocks whose chain is known have a *position*
//! in the trie of the shard, keyed by the parent's position and the local hash; a position carries the set
//! of lanes (tiers of workers) that hold it. Within one worker a position belongs to one engine hash: a
//! second hash for the same content takes another position beside it, so a path of positions is a chain of
//! engine blocks. A block that is removed while others hang under it keeps its position reserved: the walk
//! stops there, nothing below is touched, and everything is back when the block is.

mod blocks;
mod chain;
mod entries;
mod lanes;
mod positions;
mod reader;
mod trie;
mod walk;
mod writer;

#[cfg(test)]
mod tests;

pub use reader::{Depths, IndexReader, Lookup, ShardReader};
pub use writer::ShardWriter;

use crate::ids::{EngineHash, GroupId, LocalHash, Seed, ShardId, Tier};
use crate::limits;

/// What bounds one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardLimits {
    /// Blocks bound for one worker over all tiers.
    pub worker_blocks_max: u64,
    /// Blocks of one worker that wait for a parent; also the removed blocks of one worker that are
    /// remembered because others hang under them (beyond it, those others wait instead).
    pub dormant_blocks_max: usize,
    /// Engine hashes of one worker that may name the same content after the same parent, 1 to 64.
    pub aliases_max: usize,
    /// Workers of the shard.
    pub workers_max: usize,
    /// Lanes that are retired but not yet swept. Beyond it a clear sweeps before it returns.
    pub retired_lanes_max: usize,
}

impl Default for ShardLimits {
    fn default() -> Self {
        Self {
            worker_blocks_max: limits::WORKER_BLOCKS_MAX_DEFAULT,
            dormant_blocks_max: limits::WORKER_DORMANT_BLOCKS_MAX,
            aliases_max: limits::ALIASES_MAX,
            workers_max: limits::WORKERS_MAX,
            retired_lanes_max: limits::RETIRED_LANES_MAX,
        }
    }
}

/// An empty shard: the hand that changes it and the first of its readers.
#[must_use]
pub fn shard(id: ShardId, limits: ShardLimits) -> (ShardWriter, ShardReader) {
    let (mut writer, reader) = left_right::new_from_empty(trie::Trie::default());
    // The second publish copies one side to the other as a whole; done now, while both are empty.
    writer.publish();
    writer.publish();
    (ShardWriter::new(limits, positions::Positions::new(writer)), ShardReader::new(id, reader))
}

/// Blocks that a worker says it holds, as a chain.
#[derive(Clone, Copy, Debug)]
pub struct StoreBlocks<'a> {
    /// The block before the first; `None` at the root.
    pub parent: Option<EngineHash>,
    /// What the engine calls the blocks, nearest the root first; each is the parent of the next.
    pub hashes: &'a [EngineHash],
    /// What is in them, one for each of `hashes`.
    pub locals: &'a [LocalHash],
    /// Where they are.
    pub tier: Tier,
    /// Which main-attention group holds them.
    pub group: GroupId,
    /// The seed of the chain.
    pub seed: Seed,
}

/// What became of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreOutcome {
    /// References counted: all blocks of the store, or 0.
    pub stored: u32,
    /// Blocks of the store of which this tier and group had a reference already.
    pub already: u32,
    /// Blocks of the store that wait for a chain to the root.
    pub dormant: u32,
    /// Nothing was counted: at the root, all of it held by this tier and group since before the batch
    /// began. Whether these blocks will be removed once more than they were, nobody can tell.
    pub ambiguous: bool,
    /// Why nothing was changed, if so.
    pub refused: Option<Refusal>,
}

impl StoreOutcome {
    pub(crate) fn refused(refusal: Refusal) -> Self {
        Self { refused: Some(refusal), ..Self::default() }
    }
}

/// Why a store was refused, whole. Where several reasons apply the first of this list is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// The slot is nobody's.
    UnknownWorker,
    /// Not one local hash for each engine hash.
    LengthMismatch,
    /// The parent is one of the blocks.
    SelfParent,
    /// A bound hash would be bound to another parent, local hash or seed, or a hash occurs twice.
    HashConflict,
    /// More groups in one tier than `GROUPS_MAX`.
    TooManyGroups,
    /// More bound blocks than `worker_blocks_max`.
    CapacityBound,
    /// The shard has run out of numbers for positions.
    PositionBound,
    /// More than `aliases_max` hashes for one content after one parent.
    AliasBound,
    /// More blocks waiting for a parent than `dormant_blocks_max`.
    DormantBound,
    /// More references to one block than can be counted.
    ReferenceBound,
}

impl Refusal {
    /// Every reason, in order.
    pub const ALL: [Self; 10] = [
        Self::UnknownWorker,
        Self::LengthMismatch,
        Self::SelfParent,
        Self::HashConflict,
        Self::TooManyGroups,
        Self::CapacityBound,
        Self::PositionBound,
        Self::AliasBound,
        Self::DormantBound,
        Self::ReferenceBound,
    ];

    /// The name used in logs, metrics and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::UnknownWorker => "unknown_worker",
            Self::LengthMismatch => "length_mismatch",
            Self::SelfParent => "self_parent",
            Self::HashConflict => "hash_conflict",
            Self::TooManyGroups => "too_many_groups",
            Self::CapacityBound => "capacity_bound",
            Self::PositionBound => "position_bound",
            Self::AliasBound => "alias_bound",
            Self::DormantBound => "dormant_bound",
            Self::ReferenceBound => "reference_bound",
        }
    }
}

/// What became of a remove.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoveOutcome {
    /// References taken.
    pub removed: u32,
    /// Hashes of which this tier and group had no reference; nothing happened for them.
    pub unknown: u32,
}

/// The figures of one worker, as the writer knows them (published or not).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerBlocks {
    /// Bound blocks.
    pub bound: u64,
    /// Blocks that each tier holds, by [`Tier::index`].
    pub by_tier: [u64; 4],
    /// References of each tier over all its groups.
    pub references: [u64; 4],
    /// Bound blocks that have waited for a chain to the root ever since they were bound or lost their
    /// place. Blocks below a removed block keep their place (and count for nothing), so this is a lower
    /// bound of the blocks that do not count.
    pub dormant: u64,
}
