//! The values that callers of the index pass and get, and block hashes as the words they are.

#![expect(unsafe_code, reason = "newtypes over u64 are looked at as u64")]

use crate::ids::{EngineHash, GroupId, LocalHash, Seed, Tier};
use crate::limits;

/// What bounds one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardLimits {
    /// Blocks bound for one worker over all tiers.
    pub worker_blocks_max: u64,
    /// Memory that the blocks of one worker may take, bytes, as if no other worker held any of them.
    pub worker_bytes_max: u64,
    /// Blocks of one worker that wait for a parent; also the removed blocks of one worker that are
    /// remembered because others hang under them: while there are more, it can store nothing that is not bound.
    pub dormant_blocks_max: usize,
    /// Engine hashes of one worker that may name the same content after the same parent, 1 to 64.
    pub aliases_max: usize,
    /// Workers of the shard.
    pub workers_max: usize,
    /// Blocks that one event, or one slice of a sweep, may move out of their places or to places that they waited for.
    /// What waits beyond it follows in slices of the sweep; a worker of which more would have to lose its place is
    /// emptied.
    pub event_moves_max: usize,
    /// Blocks of one store that is taken block by block; a larger one is refused.
    pub slow_path_blocks_max: usize,
    /// HolderBits that are retired but not yet swept. Beyond it each clear sweeps a slice before it returns.
    pub retired_holders_max: usize,
    /// Blocks of one node, 1 to `NODE_BLOCKS_MAX`.
    pub node_blocks_max: usize,
    /// Memory of the shard, bytes. A store of blocks that are not bound is refused if the shard might grow
    /// beyond; `u64::MAX` for no bound.
    pub memory_bytes_max: u64,
    /// Garbage that may wait for readers, bytes, before the shard is choked.
    pub garbage_bytes_max: u64,
    /// Whether a store at the root of what is held already is counted as one more copy. `false` where it may be the same
    /// said again, which nothing would ever remove: it is then [ambiguous](StoreOutcome::ambiguous).
    pub counts_copies: bool,
    /// Mixed into the hash tables, so that who knows the hash functions cannot choose what collides.
    pub secret: u64,
}

impl Default for ShardLimits {
    fn default() -> Self {
        Self {
            worker_blocks_max: limits::WORKER_BLOCKS_MAX_DEFAULT,
            worker_bytes_max: limits::WORKER_BYTES_MAX_DEFAULT,
            dormant_blocks_max: limits::WORKER_DORMANT_BLOCKS_MAX,
            aliases_max: limits::ALIASES_MAX,
            workers_max: limits::WORKERS_MAX,
            event_moves_max: limits::INDEX_EVENT_MOVES_MAX,
            slow_path_blocks_max: limits::INDEX_SLOW_PATH_BLOCKS_MAX,
            retired_holders_max: limits::RETIRED_HOLDERS_MAX,
            node_blocks_max: limits::NODE_BLOCKS_MAX,
            memory_bytes_max: u64::MAX,
            garbage_bytes_max: limits::INDEX_GARBAGE_BYTES_CHOKED,
            counts_copies: false,
            secret: 0,
        }
    }
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
    /// Which KV group holds them.
    pub group: GroupId,
    /// The seed of the chain.
    pub seed: Seed,
}

/// To what a worker's engine hash is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The block before; `None` at the root.
    pub parent: Option<EngineHash>,
    /// What is in the block.
    pub local: LocalHash,
    /// The seed of its chain.
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
    /// began, in a shard that does not count copies. Whether these blocks will be removed once more than they were, nobody can tell.
    pub ambiguous: bool,
    /// Blocks that waited for this store have not all got their places yet: a sweep goes on with them, and until it is
    /// through they count for nothing.
    pub deferred: bool,
    /// Why nothing was changed, if so.
    pub refused: Option<Refusal>,
}

impl StoreOutcome {
    pub(crate) fn refused(refusal: Refusal) -> Self {
        Self { refused: Some(refusal), ..Self::default() }
    }
}

/// Why answers about a worker are too low from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortfall {
    /// Blocks wait for their places until a sweep is [through with them](ShardWriter::is_deferring).
    Deferred,
    /// The worker is emptied, because more of its blocks would have to move than may.
    Emptied,
}

/// Why a store was refused, whole. Where several reasons apply the first of this list is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// The slot is nobody's.
    UnknownWorker,
    /// Not one local hash for each engine hash.
    LengthMismatch,
    /// Overflow blocks than `slow_path_blocks_max` in a store that has to be taken block by block.
    StoreBound,
    /// The parent is one of the blocks.
    SelfParent,
    /// A bound hash would be bound to another parent, local hash or seed, or a hash occurs twice.
    HashConflict,
    /// Overflow groups in one tier than `GROUPS_MAX`.
    TooManyGroups,
    /// Overflow bound blocks than `worker_blocks_max`.
    CapacityBound,
    /// The shard has run out of numbers for positions.
    PositionBound,
    /// Overflow than `aliases_max` hashes for one content after one parent.
    AliasBound,
    /// Overflow blocks waiting for a parent than `dormant_blocks_max`, or more removed ones that others hang under.
    DormantBound,
    /// Overflow references to one block than can be counted.
    ReferenceBound,
    /// Overflow memory for the worker's blocks than `worker_bytes_max`.
    BytesBound,
    /// The shard might grow beyond `memory_bytes_max`.
    MemoryBound,
    /// Overflow blocks would have to move than `event_moves_max`, or more would wait than `dormant_blocks_max`. The worker
    /// has been emptied.
    WorkBound,
}

impl Refusal {
    /// Every reason, in order.
    pub const ALL: [Self; 14] = [
        Self::UnknownWorker,
        Self::LengthMismatch,
        Self::StoreBound,
        Self::SelfParent,
        Self::HashConflict,
        Self::TooManyGroups,
        Self::CapacityBound,
        Self::PositionBound,
        Self::AliasBound,
        Self::DormantBound,
        Self::ReferenceBound,
        Self::BytesBound,
        Self::MemoryBound,
        Self::WorkBound,
    ];

    /// The name used in logs, metrics and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::UnknownWorker => "unknown_worker",
            Self::LengthMismatch => "length_mismatch",
            Self::StoreBound => "store_bound",
            Self::SelfParent => "self_parent",
            Self::HashConflict => "hash_conflict",
            Self::TooManyGroups => "too_many_groups",
            Self::CapacityBound => "capacity_bound",
            Self::PositionBound => "position_bound",
            Self::AliasBound => "alias_bound",
            Self::DormantBound => "dormant_bound",
            Self::ReferenceBound => "reference_bound",
            Self::BytesBound => "bytes_bound",
            Self::MemoryBound => "memory_bound",
            Self::WorkBound => "work_bound",
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

/// The figures of one worker.
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

/// What a tier of a worker holds, in two numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierDigest {
    /// Blocks held.
    pub blocks: u64,
    /// A sum over their engine hashes, whatever the order; equal sets give equal digests.
    pub digest: u64,
}

/// What a shard keeps in memory, bytes unless it says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardMemory {
    /// Local hashes and names.
    pub blocks_bytes: u64,
    /// What of `blocks_bytes` is free for other blocks.
    pub blocks_free_bytes: u64,
    /// From names to blocks.
    pub names_bytes: u64,
    /// Headers and the writer's records of nodes.
    pub nodes_bytes: u64,
    /// What is kept for each worker: references beyond the first, blocks that wait, what is new in a batch.
    pub workers_bytes: u64,
    /// What of all this waits for readers before it can be used again, and tables that were replaced.
    pub garbage_bytes: u64,
    /// Nodes, a count.
    pub nodes: u64,
    /// Names, a count: one for each block of each column.
    pub names: u64,
}

impl ShardMemory {
    /// All of it.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.blocks_bytes + self.names_bytes + self.nodes_bytes + self.workers_bytes
    }
}

/// Local hashes as words.
pub(super) const fn of_locals(locals: &[LocalHash]) -> &[u64] {
    // SAFETY: `LocalHash` is a transparent newtype of `u64`, so a slice of it is one of as many `u64`.
    unsafe { std::slice::from_raw_parts(locals.as_ptr().cast(), locals.len()) }
}

/// Engine hashes as words.
pub(super) const fn of_names(names: &[EngineHash]) -> &[u64] {
    // SAFETY: `EngineHash` is a transparent newtype of `u64`, so a slice of it is one of as many `u64`.
    unsafe { std::slice::from_raw_parts(names.as_ptr().cast(), names.len()) }
}

/// Words as the engine hashes they are.
pub(super) const fn as_names(words: &[u64]) -> &[EngineHash] {
    // SAFETY: as in `of_names`, the other way round; every `u64` is an engine hash.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len()) }
}

/// Words as the local hashes they are.
pub(super) const fn as_locals(words: &[u64]) -> &[LocalHash] {
    // SAFETY: as in `of_locals`, the other way round; every `u64` is a local hash.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len()) }
}
