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
//!
//! Groups of the device tier may be **windows** ([`ShardWriter::announce_window`]): engines with sliding-window
//! attention need of them only the last blocks of a prefix. Such groups do not decide what the device holds; its run is
//! instead cut to the greatest length, no more than an engine [uses again](IndexReader::lookup_usable), at whose end
//! every window group has that many blocks, or all there are. The tiers below extend what is left.
//!
//! A block whose chain to the root is not complete counts for nothing; nothing walks over it or over what
//! was removed, and everything counts again once the chain is complete again. Workers share nothing that
//! could be observed.
//!
//! # Consistency
//!
//! Every call of a [`ShardWriter`] is one event, and so is each slice of a sweep that gives places to blocks which a
//! store [deferred](StoreOutcome::deferred); until then those count for nothing. Let `S(s)` be the sequence of states
//! of shard `s` after its events, starting with the empty one, and let a query run from `t0` to `t1`.
//!
//! * For every shard there is one state in `S(s)`, the newest at some moment between `t0` and `t1`, such that
//!   the depths of all workers of the shard are those of that state. Never something between two events.
//! * States of different shards are independent; a worker belongs to one shard.
//! * Queries that one thread asks one after another never go back.
//! * [`Lookup::contended`] says that a shard changed under the reader so often that the answer may mix
//!   states. That takes [`LOOKUP_TRIES_MAX`](crate::limits::LOOKUP_TRIES_MAX) changes, each in the few nodes that
//!   the query walks, or one change of many parts whose writer was stopped in the middle.
//!
//! Where a writer's thread panics, its index is not repaired: an empty one takes its place under the readers, and
//! `sight` says what they can see of that.
//!
//! "Exact" means exact over 64-bit local hashes.
//!
//! # How it is stored
//!
//! A radix tree over local hashes, path-compressed: a **node** is an edge of up to
//! [`NODE_BLOCKS_MAX`](crate::limits::NODE_BLOCKS_MAX) blocks.
//!
//! * Its **header** is a cache line of the hash table (`table`) in which children are found by (parent, first
//!   local hash): one miss a hop, whatever the fan-out. It is a seqlock.
//! * Its **local hashes** are words of the `arena` that readers compare (`compare`); they are written before a
//!   header says so, and not used again before a grace period has passed (`reclaim`).
//! * Its **names**, the engine hashes, are words of the arena too, in one **column** for all workers that use the
//!   same ones. Only the writer looks at them. `slots` leads from a name to its word, and the owner of
//!   the word's granule to the node.
//! * Its **entries** (`cover`) say which lanes (`lanes`) cover it: up to a first gap, and beyond it in a bitmap.
//!   A device's lane is shown to readers as full or by its first gap, which is all that a walk from the root
//!   can need; lower tiers, which a walk enters anywhere, and windows, which end anywhere, show their bitmaps (`more`).
//!   All of these are `layer`s: of each, readers see one lane for each worker.
//!
//! A block that is removed while others hang under it leaves a gap: nothing below is touched, and everything is
//! back when the block is. Blocks whose chain is not known at all wait outside the tree (`waiting`). Splits
//! move no words (`split`), leaves grow where they are (`grow`), what nobody covers is given back
//! (`shrink`), and chains without a branch become one node again (`join`).
//!
//! # How a change becomes visible
//!
//! A reader checks, after its walk, the versions of all headers it met, and walks again if one has changed: so
//! it saw them as they all were at one moment. Whatever an event changes is therefore published in an order in
//! which each step but one shows nothing new.
//!
//! | event | order | the step that shows it |
//! |---|---|---|
//! | store | what hangs below first (`store`) | the block nearest the root that was missing |
//! | remove of nodes that follow each other | nearest the root first (`remove`) | the first block that is missing from then on |
//! | remove of nodes of several chains | any (`remove`) | none: the shard is **torn** while they are shown |
//! | clear, removal of a worker | the lanes first, their nodes in slices (`sweep`) | the table of `lanes` |
//! | what touches several chains that one query walks (`careful`) | any | none: the shard is **torn** meanwhile, and readers wait for it to be whole (`head`) |
//!
//! Splits, joins, moves and deletions show nothing: they leave every answer as it is, and whoever was in
//! the middle of what they touched walks again. The memory orderings are argued in `header`, `table`,
//! `head` and `reclaim`, each with its partners, and run under a model checker by the tests of `index::loom`.

mod ahead;
mod arena;
mod bits;
mod careful;
#[cfg(test)]
mod check;
mod compare;
mod cover;
mod dump;
mod extras;
mod fresh;
mod grow;
mod head;
mod header;
mod join;
mod lanes;
mod layer;
#[cfg(all(test, kvrouted_loom))]
mod loom;
#[cfg(test)]
pub(crate) mod mishap;
mod more;
mod names;
mod node;
mod nodes;
mod pages;
mod place;
mod prefetch;
mod reader;
mod reclaim;
mod record;
mod remove;
mod shrink;
mod sight;
mod slots;
mod split;
mod store;
mod sweep;
mod sync;
mod table;
#[cfg(all(test, not(kvrouted_loom)))]
mod tests;
mod tree;
mod waiting;
mod walk;
mod ways;
mod words;
mod worker;
mod writer;

pub use dump::DumpCursor;
pub use reader::{Depths, IndexReader, Lookup, ShardReader};
pub use reclaim::Reclaimer;
pub use writer::ShardWriter;

use crate::ids::{EngineHash, GroupId, LocalHash, Seed, ShardId, Tier};
use crate::limits;
use std::sync::Arc;

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
    pub careful_blocks_max: usize,
    /// Lanes that are retired but not yet swept. Beyond it each clear sweeps a slice before it returns.
    pub retired_lanes_max: usize,
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
            careful_blocks_max: limits::INDEX_CAREFUL_BLOCKS_MAX,
            retired_lanes_max: limits::RETIRED_LANES_MAX,
            node_blocks_max: limits::NODE_BLOCKS_MAX,
            memory_bytes_max: u64::MAX,
            garbage_bytes_max: limits::INDEX_GARBAGE_BYTES_CHOKED,
            counts_copies: false,
            secret: 0,
        }
    }
}

/// An empty shard with a reclaimer of its own: the hand that changes it and the first of its readers.
#[must_use]
pub fn shard(id: ShardId, limits: ShardLimits) -> (ShardWriter, ShardReader) {
    shard_in(id, limits, &Reclaimer::new())
}

/// An empty shard whose memory is reclaimed together with that of others: a reader of several shards enters
/// them all at once.
#[must_use]
pub fn shard_in(id: ShardId, limits: ShardLimits, reclaimer: &Reclaimer) -> (ShardWriter, ShardReader) {
    ahead::start();
    let tree = tree::Tree::new(reclaimer, limits.node_blocks_max, limits.secret, 0);
    let place = Arc::new(sight::Place::new(tree.sight(reclaimer), reclaimer.clone()));
    let reader = ShardReader::new(id, Arc::clone(&place), reclaimer.reader());
    (ShardWriter::new(limits, tree, place, reclaimer.clone()), reader)
}

/// Does something while somebody is inside, as a lookup that takes that long would be.
#[cfg(test)]
pub(crate) fn while_inside<T>(reclaimer: &Reclaimer, does: impl FnOnce() -> T) -> T {
    let reader = reclaimer.reader();
    let _guard = reader.enter();
    does()
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
    /// More blocks than `careful_blocks_max` in a store that has to be taken block by block.
    StoreBound,
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
    /// More blocks waiting for a parent than `dormant_blocks_max`, or more removed ones that others hang under.
    DormantBound,
    /// More references to one block than can be counted.
    ReferenceBound,
    /// More memory for the worker's blocks than `worker_bytes_max`.
    BytesBound,
    /// The shard might grow beyond `memory_bytes_max`.
    MemoryBound,
    /// More blocks would have to move than `event_moves_max`, or more would wait than `dormant_blocks_max`. The worker
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
