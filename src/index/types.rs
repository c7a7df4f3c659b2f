//! The values that callers of the index pass and get, and views of block hashes as words.

#![expect(unsafe_code, reason = "newtypes over u64 are viewed as u64")]

use crate::ids::{EngineHash, GroupId, LocalHash, Seed, Tier};
use crate::limits;

/// Blocks of a cache line.
pub(super) const LINE_BLOCKS: usize = 64 / size_of::<LocalHash>();

/// The bounds of one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardLimits {
    /// Blocks bound for one worker over all tiers.
    pub worker_blocks_max: u64,
    /// Memory that the blocks of one worker may take, in bytes, counted as if no other worker held any of them.
    pub worker_bytes_max: u64,
    /// Dormant blocks of one worker; also its removed inner blocks. A worker with more of the latter can store only
    /// blocks that are already bound.
    pub dormant_blocks_max: usize,
    /// Engine hashes of one worker that may name the same content after the same parent, 1 to 64.
    pub aliases_max: usize,
    /// Workers of the shard.
    pub workers_max: usize,
    /// Blocks that one event, or one slice of a sweep, may place or displace. Dormant blocks beyond it are placed by
    /// later slices of the sweep. A worker of which more blocks would have to be displaced is emptied.
    pub event_moves_max: usize,
    /// Blocks of one store on the slow path. A larger store is refused.
    pub slow_path_blocks_max: usize,
    /// Holder bits that are retired but not yet swept. Beyond this, each clear sweeps a slice before it returns.
    pub retired_holders_max: usize,
    /// Blocks of one node, 1 to `NODE_BLOCKS_MAX`.
    pub node_blocks_max: usize,
    /// Memory of the shard, in bytes. A store of unbound blocks is refused if the shard might grow beyond; `u64::MAX`
    /// means no bound.
    pub memory_bytes_max: u64,
    /// Garbage that may wait for readers, in bytes, before the shard is choked.
    pub garbage_bytes_max: u64,
    /// Whether a store at the root of blocks that are already held counts as one more copy. With `false` the store is
    /// [ambiguous](StoreOutcome::ambiguous): it may be a repetition, which no remove would ever match.
    pub counts_copies: bool,
    /// Keys the hash tables, so that a client that knows the hash functions cannot choose colliding keys, and the
    /// fingerprints of blocks: a client that knows the secret can choose blocks that pass for others.
    pub secret: u64,
}

impl ShardLimits {
    /// Whether a shard may have a chunk mapped before it is needed. A shard with a ceiling takes no memory on
    /// suspicion.
    pub(super) const fn maps_ahead(&self) -> bool {
        self.memory_bytes_max == u64::MAX
    }
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

/// A key made of a secret: a number without pattern from one that may have any: the finisher of SplitMix64.
pub(super) const fn spread(secret: u64) -> u64 {
    let mut z = secret.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A chain of blocks that a worker says it holds.
#[derive(Clone, Copy, Debug)]
pub struct StoreBlocks<'a> {
    /// The block before the first; `None` at the root.
    pub parent: Option<EngineHash>,
    /// Engine hashes of the blocks, nearest the root first; each block is the parent of the next.
    pub hashes: &'a [EngineHash],
    /// Local hashes of the blocks, one for each of `hashes`.
    pub locals: &'a [LocalHash],
    /// The tier that holds the blocks.
    pub tier: Tier,
    /// The KV group that holds the blocks.
    pub group: GroupId,
    /// The seed of the chain.
    pub seed: Seed,
}

/// The meaning of a worker's bound engine hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The block before; `None` at the root.
    pub parent: Option<EngineHash>,
    /// The local hash of the block.
    pub local: LocalHash,
    /// The seed of its chain.
    pub seed: Seed,
}

/// The outcome of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreOutcome {
    /// References counted: all blocks of the store, or 0.
    pub stored: u32,
    /// Blocks of the store to which this tier and group already had a reference.
    pub already: u32,
    /// Blocks of the store that are dormant.
    pub dormant: u32,
    /// Nothing was counted: the store is at the root, this tier and group held all of it before the batch began, and
    /// the shard does not count copies. It is unknown whether these blocks will be removed once or twice.
    pub ambiguous: bool,
    /// Some dormant blocks below this store have no places yet. A sweep places them; until then they count for nothing.
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
    /// Dormant blocks wait for their places until a sweep [has placed them](ShardWriter::is_deferring).
    Deferred,
    /// The worker is emptied, because more of its blocks would have to move than `event_moves_max`.
    Emptied,
}

/// Why a whole store was refused. If several reasons apply, the first of this list is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// The slot has no worker.
    UnknownWorker,
    /// The numbers of local hashes and engine hashes differ.
    LengthMismatch,
    /// A store on the slow path has more blocks than `slow_path_blocks_max`.
    StoreBound,
    /// The parent is one of the blocks.
    SelfParent,
    /// A bound hash would get another parent, local hash or seed, or a hash occurs twice.
    HashConflict,
    /// The tier would have more groups than `GROUPS_MAX`.
    TooManyGroups,
    /// The worker would have more bound blocks than `worker_blocks_max`.
    CapacityBound,
    /// The shard has no word numbers left for blocks.
    PositionBound,
    /// One content after one parent would have more hashes than `aliases_max`.
    AliasBound,
    /// The worker would have more dormant blocks than `dormant_blocks_max`, or has more removed inner blocks than that.
    DormantBound,
    /// The reference count of a block would overflow.
    ReferenceBound,
    /// The worker's blocks would take more memory than `worker_bytes_max`.
    BytesBound,
    /// The shard might grow beyond `memory_bytes_max`.
    MemoryBound,
    /// The memory that all shards share is used up, or the worker is held back while it is short.
    BudgetBound,
    /// More blocks would have to move than `event_moves_max`, or more would be dormant than `dormant_blocks_max`. The
    /// worker has been emptied.
    WorkBound,
}

impl Refusal {
    /// Every reason, in order.
    pub const ALL: [Self; 15] = [
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
        Self::BudgetBound,
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
            Self::BudgetBound => "budget_bound",
            Self::WorkBound => "work_bound",
        }
    }
}

/// The outcome of a remove.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoveOutcome {
    /// References taken.
    pub removed: u32,
    /// Hashes to which this tier and group had no reference. They changed nothing.
    pub unknown: u32,
}

/// The counts of one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerBlocks {
    /// Bound blocks.
    pub bound: u64,
    /// Blocks that each tier holds, by [`Tier::index`].
    pub by_tier: [u64; 4],
    /// References of each tier over all its groups.
    pub references: [u64; 4],
    /// Bound blocks whose chain to the root was unknown when they were bound, or that lost their place since. Blocks
    /// below a removed block keep their place and count for nothing, so this is a lower bound of the blocks that do not
    /// count.
    pub dormant: u64,
}

/// The set of blocks that a tier of a worker holds, in two numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierDigest {
    /// Blocks held.
    pub blocks: u64,
    /// A sum over their engine hashes, independent of order; equal sets have equal digests.
    pub digest: u64,
}

/// The memory of a shard, in bytes unless a field says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardMemory {
    /// Local hashes and names.
    pub blocks_bytes: u64,
    /// The part of `blocks_bytes` that is free for other blocks.
    pub blocks_free_bytes: u64,
    /// The map from names to blocks.
    pub names_bytes: u64,
    /// Headers and the writer's records of nodes, and what is free for more of them and for names.
    pub nodes_bytes: u64,
    /// Per worker: references beyond the first, dormant blocks, new references of the batch.
    pub workers_bytes: u64,
    /// Replaced tables, and the part of the above that waits for readers before it can be used again.
    pub garbage_bytes: u64,
    /// Number of nodes.
    pub nodes: u64,
    /// Number of names: one for each block of each column.
    pub names: u64,
}

impl ShardMemory {
    /// The sum of all parts.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.blocks_bytes + self.names_bytes + self.nodes_bytes + self.workers_bytes
    }
}

/// Local hashes as words.
pub(super) const fn of_locals(locals: &[LocalHash]) -> &[u64] {
    // SAFETY: `LocalHash` is a transparent newtype of `u64`, so a slice of it is a slice of `u64` of the same length.
    unsafe { std::slice::from_raw_parts(locals.as_ptr().cast(), locals.len()) }
}

/// Engine hashes as words.
pub(super) const fn of_names(names: &[EngineHash]) -> &[u64] {
    // SAFETY: `EngineHash` is a transparent newtype of `u64`, so a slice of it is a slice of `u64` of the same length.
    unsafe { std::slice::from_raw_parts(names.as_ptr().cast(), names.len()) }
}

/// Words as engine hashes.
pub(super) const fn as_names(words: &[u64]) -> &[EngineHash] {
    // SAFETY: as in `of_names`, the other way round; every `u64` is an engine hash.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len()) }
}

/// Words as local hashes.
pub(super) const fn as_locals(words: &[u64]) -> &[LocalHash] {
    // SAFETY: as in `of_locals`, the other way round; every `u64` is a local hash.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len()) }
}
