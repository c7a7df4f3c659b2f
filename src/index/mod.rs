//! The index: which worker holds which prefix, in which tier.
//!
//! A **shard** is the index of the workers of one ingest thread. [`shard`] makes one and returns its two ends: a
//! [`ShardWriter`], which alone changes the shard, and a [`ShardReader`], of which every serving thread has a clone
//! inside its [`IndexReader`]. The index uses no socket and no clock. Its only thread touches memory before a writer
//! needs it (`prefault`).
//!
//! # What is stored
//!
//! For each worker, an engine hash is **bound** to one `(parent engine hash, local hash, seed)` for as long as some
//! (tier, group) refers to it. References are counted per (tier, group). A tier **holds** a block if it has groups and
//! each of its groups counts a reference to the block. The groups of a tier are those seen in a store since the tier
//! was last cleared.
//!
//! A **chain** is a sequence of bound blocks, each the parent of the next by engine hash, the first without a parent.
//! The answer to a query `q[0..n]` for a worker is the greatest `(device, host, disk, external)`, compared in that
//! order, over all chains of the worker whose local hashes are `q[0..k]`. It is the run of leading blocks held by the
//! device, then the run after it held by the host, and so on.
//!
//! Groups of the device tier may be **windows** ([`ShardWriter::announce_window`]): an engine with sliding-window
//! attention needs only the last blocks of a prefix in such a group. Windows do not decide what the device holds. They
//! cut its run to the greatest length, no more than an engine [uses again](IndexReader::lookup_usable), at whose end
//! every window group has that many blocks, or all there are. The tiers below extend the run that is left.
//!
//! A block whose chain to the root is incomplete counts for nothing. No lookup walks over such a block, or over a
//! removed one. The block counts again once its chain is complete. The answer about one worker never depends on another
//! worker.
//!
//! A block is **dormant** while its chain to the root is unknown: it has no place in the tree. A removed block with
//! others below it is a **removed inner block**: its node stays, with a gap.
//!
//! # Consistency
//!
//! Every call of a [`ShardWriter`] is one event. So is each slice of a sweep that gives places to blocks that a store
//! [deferred](StoreOutcome::deferred); until then those blocks count for nothing. Let `S(s)` be the sequence of states
//! of shard `s` after its events, starting with the empty state, and let a query run from `t0` to `t1`.
//!
//! * For every shard, the depths of all its workers are those of one state in `S(s)`, the newest at some moment between
//!   `t0` and `t1`. They are never those of a moment inside an event.
//! * States of different shards are independent. A worker belongs to one shard.
//! * Consecutive queries of one thread never go back in time.
//! * [`Lookup::contended`] says that a shard changed under the reader so often that the answer may mix states. That
//!   takes [`LOOKUP_TRIES_MAX`](crate::limits::LOOKUP_TRIES_MAX) changes, each in the few nodes that the query walks,
//!   or one multi-write whose writer was stopped in the middle.
//!
//! If a writer's thread panics, its index is not repaired. An empty index replaces it under the readers; `shared_index`
//! says what readers can see of that.
//!
//! "Exact" means exact over 64-bit local hashes. Where the processor allows, long nodes are compared by keyed
//! fingerprints (`fingerprint`): two sections of 32 blocks that differ pass for equal with a probability of 2^-64, as if the keys
//! were random.
//!
//! # How it is stored
//!
//! The index is a path-compressed radix tree over local hashes. A **node** is an edge of up to
//! [`NODE_BLOCKS_MAX`](crate::limits::NODE_BLOCKS_MAX) blocks.
//!
//! * Its **header** is one cache line of the hash table (`table`), which finds a child by (parent, first local hash):
//!   one cache miss a hop, whatever the fan-out. A byte beside the lines says that a child is not there without that
//!   miss. The line is a seqlock (`header`).
//! * Its **local hashes** are words of the `arena`, which readers compare (`simd`). They are written before a header
//!   names them, and are reused only after a grace period (`reclaim`). Sections of them have **fingerprints**, by which a
//!   reader compares a long node without reading most of its words (`fingerprint`).
//! * Its **names**, the engine hashes, are words of the arena too, in one **column** for all workers that use the same
//!   ones. Only the writer reads them. `name_map` maps a name to its word; the owner of the word's granule is the node.
//! * The table and the name map have their memory from one pool of huge pages (`row_pool`), so that few of their lines
//!   need a page that the processor has to look for.
//! * Its **entries** (`node`) say which holder bits (`holders`) cover it: up to a first gap, and beyond the gap in a
//!   bitmap, the **sparse coverage**. Readers see a device's holder bit as full or by its first gap, which suffices for
//!   a walk from the root. Lower tiers, which a walk enters anywhere, and windows, which end anywhere, show their
//!   sparse coverage in an **overflow record** beside the header (`header`). Each tier, and the windows, is a `Layer`;
//!   readers see one holder bit of each layer for each worker.
//!
//! Removing a block that has others below it leaves a gap: nothing below changes, and everything below counts again
//! when the block is stored again. Dormant blocks wait outside the tree (`worker`). Splits move no words (`maintain`),
//! leaves grow in place (`new_blocks`), uncovered blocks are freed (`remove`), and chains without a branch become one node
//! again (`maintain`).
//!
//! A store takes the **fast path** (`store`), runs of blocks at a time, or the **slow path** (`slow_path`), one block
//! at a time. Both give the same answers.
//!
//! # How a change becomes visible
//!
//! After its walk, a reader checks the versions of all headers that it met, and walks again if one has changed. So it
//! saw all of them as they were at one moment. An event is therefore published in an order in which only one step shows
//! anything new. Where there is no such order, the event is a **multi-write**: readers wait for its end, up to a bound.
//!
//! | event | order | the step that shows it |
//! |---|---|---|
//! | store | the lower nodes first (`store`) | the missing block nearest the root |
//! | remove from consecutive nodes of one chain | nearest the root first (`remove`) | the first block that is missing from then on |
//! | remove from nodes of several chains | any (`remove`) | none: a multi-write covers them all |
//! | clear, removal of a worker | the holder bits first, their nodes in slices (`maintain`) | the table of `holders` |
//! | a change of several chains that one query walks (`slow_path`) | any | none: a multi-write covers them all (`shared_index`) |
//!
//! Splits, joins, moves and deletions change no answer. A reader that was inside a node they touched walks again.
//! `header`, `table`, `shared_index` and `reclaim` argue the memory orderings, each with its partner; the tests of
//! `index::loom` run them under a model checker.

mod arena;
mod branching_walk;
mod dump;
#[cfg(test)]
pub(crate) mod failpoints;
mod fingerprint;
mod grant;
mod header;
mod holders;
#[cfg(test)]
mod invariants;
mod lookup_walk;
#[cfg(all(test, kvrouted_loom))]
mod loom;
mod maintain;
mod name_map;
mod new_blocks;
mod new_references;
mod node;
mod node_pages;
mod pages;
mod prefault;
mod reader;
mod reclaim;
mod remove;
mod row_pool;
mod shard_writer;
mod shared_index;
mod simd;
mod slow_path;
mod store;
mod table;
#[cfg(all(test, not(kvrouted_loom)))]
mod tests;
mod tier_reach;
mod tree;
mod types;
mod worker;

pub use dump::DumpCursor;
pub use reader::{Depths, IndexReader, Lookup, ShardReader};
pub use reclaim::Reclaimer;
pub use shard_writer::ShardWriter;
pub use types::{
    Binding, Refusal, RemoveOutcome, ShardLimits, ShardMemory, Shortfall, StoreBlocks, StoreOutcome, TierDigest,
    WorkerBlocks,
};

use crate::ids::ShardId;
use std::sync::Arc;

/// An empty shard with a reclaimer of its own: its writer and the first of its readers.
#[must_use]
pub fn shard(id: ShardId, limits: ShardLimits) -> (ShardWriter, ShardReader) {
    shard_in(id, limits, &Reclaimer::new())
}

/// An empty shard whose memory is reclaimed together with that of others: a reader of several shards enters all of them
/// at once.
#[must_use]
pub fn shard_in(id: ShardId, limits: ShardLimits, reclaimer: &Reclaimer) -> (ShardWriter, ShardReader) {
    prefault::start();
    let tree = tree::Tree::new(reclaimer, limits.node_blocks_max, limits.secret, 0);
    let shared_cell = Arc::new(shared_index::SharedIndexCell::new(tree.shared_index(reclaimer), reclaimer.clone()));
    let reader = ShardReader::new(id, Arc::clone(&shared_cell), reclaimer.reader());
    (ShardWriter::new(limits, tree, shared_cell, reclaimer.clone()), reader)
}

/// The mark of the thread that maps memory ahead of the writers, if it runs.
#[must_use]
pub(crate) fn prefault_mark() -> Option<Arc<crate::watchdog::ThreadMark>> {
    prefault::mark()
}

/// Runs `does` while a reader is inside, as in a lookup that takes that long.
#[cfg(test)]
pub(crate) fn while_inside<T>(reclaimer: &Reclaimer, does: impl FnOnce() -> T) -> T {
    let reader = reclaimer.reader();
    let _guard = reader.enter();
    does()
}
