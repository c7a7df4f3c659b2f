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
//! * Its **entries** (`cover`) say which lanes (`holders`) cover it: up to a first gap, and beyond it in a bitmap.
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
//! | clear, removal of a worker | the lanes first, their nodes in slices (`sweep`) | the table of `holders` |
//! | what touches several chains that one query walks (`careful`) | any | none: the shard is **torn** meanwhile, and readers wait for it to be whole (`head`) |
//!
//! Splits, joins, moves and deletions show nothing: they leave every answer as it is, and whoever was in
//! the middle of what they touched walks again. The memory orderings are argued in `header`, `table`,
//! `head` and `reclaim`, each with its partners, and run under a model checker by the tests of `index::loom`.

mod arena;
mod dump;
#[cfg(test)]
pub(crate) mod failpoints;
mod header;
mod holders;
#[cfg(test)]
mod invariants;
#[cfg(all(test, kvrouted_loom))]
mod loom;
mod maintain;
mod name_map;
mod node;
mod node_pages;
mod pages;
mod reader;
mod reclaim;
mod remove;
mod shared;
mod simd;
mod slow_path;
mod store;
mod table;
#[cfg(all(test, not(kvrouted_loom)))]
mod tests;
mod tree;
mod types;
mod walk;
mod worker;
mod writer;

pub use dump::DumpCursor;
pub use reader::{Depths, IndexReader, Lookup, ShardReader};
pub use reclaim::Reclaimer;
pub use types::{
    Binding, Refusal, RemoveOutcome, ShardLimits, ShardMemory, Shortfall, StoreBlocks, StoreOutcome, TierDigest,
    WorkerBlocks,
};
pub use writer::ShardWriter;

use crate::ids::ShardId;
use std::sync::Arc;

/// An empty shard with a reclaimer of its own: the hand that changes it and the first of its readers.
#[must_use]
pub fn shard(id: ShardId, limits: ShardLimits) -> (ShardWriter, ShardReader) {
    shard_in(id, limits, &Reclaimer::new())
}

/// An empty shard whose memory is reclaimed together with that of others: a reader of several shards enters
/// them all at once.
#[must_use]
pub fn shard_in(id: ShardId, limits: ShardLimits, reclaimer: &Reclaimer) -> (ShardWriter, ShardReader) {
    let tree = tree::Tree::new(reclaimer, limits.node_blocks_max, limits.secret, 0);
    let shared_cell = Arc::new(shared::SharedIndexCell::new(tree.shared_index(reclaimer), reclaimer.clone()));
    let reader = ShardReader::new(id, Arc::clone(&shared_cell), reclaimer.reader());
    (ShardWriter::new(limits, tree, shared_cell, reclaimer.clone()), reader)
}

/// Does something while somebody is inside, as a lookup that takes that long would be.
#[cfg(test)]
pub(crate) fn while_inside<T>(reclaimer: &Reclaimer, does: impl FnOnce() -> T) -> T {
    let reader = reclaimer.reader();
    let _guard = reader.enter();
    does()
}
