//! The shared index of a shard: the part that its writer and its readers share, and how an empty index replaces one
//! whose writer panicked.
//!
//! If the thread of a shard panics, its index may have stopped in the middle of a change: in a multi-write, with a
//! header at an odd version, with garbage that the arena has not got back. Nothing of it is repaired. The writer makes
//! an empty tree ([`ShardWriter::reset_after_panic`](super::ShardWriter::reset_after_panic)), publishes it here, and
//! only then drops the old one.
//!
//! # What a reader can see of a writer that panicked
//!
//! * **Before the swap**: the old tree as it was left, as if the scheduler had stopped the writer for good. Every
//!   reader handles that already: it tries a multi-write or an odd version
//!   [`LOOKUP_TRIES_MAX`](crate::limits::LOOKUP_TRIES_MAX) times, each for a bounded number of spins, and then the
//!   answer says `contended`. So no reader spins for ever. An answer without `contended` is the state before or after
//!   the interrupted event, because one step shows each event. By then trust has fallen, so neither state is called
//!   `exact`.
//! * **After the swap**: the new tree, in which every line is empty. A reader cannot mix the two: one try of a lookup
//!   loads the shared index once, and words, lines and holder bits all come from it. Holder bits of the old tree mean
//!   nothing in the new one: their table has an edition of its own, by which the reader's buffer is filled again.
//! * **Nothing is over-counted**: the new tree holds what was stored into it after the swap. The old one is no longer
//!   written.
//! * **The epoch never goes back**: the new head begins behind the old one.
//!
//! # When the old tree is freed
//!
//! | tag   | writer                                               | reader                                  |
//! |-------|------------------------------------------------------|-----------------------------------------|
//! | INDEX | Release store of the pointer, the new tree before it | SeqCst load of the pointer, once inside |
//!
//! The load is SeqCst for the grace period, like those of tables and holder bits (see [`super::reclaim`]). The old
//! shared index owns the old head, the old table and the old arena's memory together with the old tree. It goes to the
//! new tree's garbage after the swap, and so lives until every reader that can have loaded it has left. The old tree's
//! garbage frees the overflow records beside headers. Some of them may still have been named by a header when the
//! writer panicked. None of those is handed to the reclaimer before the swap, because that is the last step of an
//! event.

#![expect(unsafe_code, reason = "what readers share with the writer is replaced behind pointers")]

use super::arena::ArenaView;
use super::holders::HolderTable;
use super::reclaim::{Guard, Reclaimer};
use super::table::TableView;
use crate::sync::{AtomicPtr, AtomicU64, Ordering, SeqWord};
use std::sync::Arc;

/// One index of a shard, as readers need it.
#[derive(Debug)]
pub(super) struct SharedIndex {
    pub(super) head: Arc<ShardHead>,
    pub(super) table: TableView,
    pub(super) arena: ArenaView,
}

/// Where readers find the current index of a shard.
#[derive(Debug)]
pub(super) struct SharedIndexCell {
    index: AtomicPtr<SharedIndex>,
    reclaimer: Reclaimer,
}

impl SharedIndexCell {
    /// A cell with its first index. Replaced ones go to the garbage of `reclaimer`.
    pub(super) fn new(index: SharedIndex, reclaimer: Reclaimer) -> Self {
        Self { index: AtomicPtr::new(Box::into_raw(Box::new(index))), reclaimer }
    }

    /// The current index.
    ///
    /// # Panics
    ///
    /// If the guard is another reclaimer's.
    #[inline]
    pub(super) fn load<'a>(&'a self, guard: &'a Guard<'_>) -> &'a SharedIndex {
        assert!(guard.is_of(&self.reclaimer), "a guard protects what its own reclaimer frees");
        // INDEX: pairs with the store in `replace`; SeqCst for the grace period.
        let index = self.index.load(Ordering::SeqCst);
        // SAFETY: never null. A replaced index goes to the garbage of the shard's reclaimer, which waits for the guard,
        // and the last one lives as long as the cell.
        unsafe { &*index }
    }

    /// Shows readers another index; returns the one before, which must wait for readers. Only the writer calls this.
    pub(super) fn replace(&self, index: SharedIndex) -> Box<SharedIndex> {
        let fresh = Box::into_raw(Box::new(index));
        // Relaxed: only the writer stores it.
        let old = self.index.load(Ordering::Relaxed);
        // INDEX: pairs with the load in `load`.
        self.index.store(fresh, Ordering::Release);
        // SAFETY: the pointer in the cell came from `Box::into_raw`, and has just been taken out.
        unsafe { Box::from_raw(old) }
    }
}

impl Drop for SharedIndexCell {
    fn drop(&mut self) {
        // Relaxed: the last owner drops it, after all others let it go.
        let index = self.index.load(Ordering::Relaxed);
        // SAFETY: the pointer in the cell came from `Box::into_raw`, and borrows of it are borrows of the cell.
        drop(unsafe { Box::from_raw(index) });
    }
}

/// What readers load first and compare last: the sequence of multi-writes, the current holder bits, the epoch.
///
/// | tag        | writer                                                      | reader                             |
/// |------------|-------------------------------------------------------------|------------------------------------|
/// | OPEN, DONE | those of [`SeqWord`], around a multi-write                  | those of [`SeqWord`], around a walk |
/// | HOLDERS    | Release store of the pointer, the table before it           | SeqCst load                        |
/// | EPOCH      | Release store                                               | Acquire load                       |
///
/// A reader whose first load of the sequence is even and equal to the one after its walk has seen nothing of a
/// multi-write: whatever it reads of the change was stored after the writer's Release fence, so the reader's Acquire
/// fence makes the odd number visible to its second load. The load of HOLDERS is SeqCst for the grace period (see
/// [`super::reclaim`]).
#[derive(Debug)]
pub(super) struct ShardHead {
    multi_writes: SeqWord,
    holders: AtomicPtr<HolderTable>,
    epoch: AtomicU64,
}

impl ShardHead {
    pub(super) fn new(epoch: u64) -> Self {
        let holders = Box::into_raw(Box::new(HolderTable::default()));
        Self { multi_writes: SeqWord::new(), holders: AtomicPtr::new(holders), epoch: AtomicU64::new(epoch) }
    }

    /// Begins several changes that readers must see together. Multi-writes do not nest.
    pub(super) fn begin_multi_write(&self) {
        self.multi_writes.begin_write();
    }

    pub(super) fn end_multi_write(&self) {
        self.multi_writes.end_write();
    }

    /// Whether a multi-write is in progress. For the writer.
    pub(super) fn in_multi_write(&self) -> bool {
        self.multi_writes.is_open()
    }

    /// The sequence to compare after a walk; `None` during a multi-write.
    #[inline]
    pub(super) fn multi_writes(&self) -> Option<u64> {
        self.multi_writes.begin_read()
    }

    /// Whether there was no multi-write since `sequence` was loaded. To be called after an Acquire fence that follows
    /// every load of the walk.
    #[inline]
    pub(super) fn is_still(&self, sequence: u64) -> bool {
        self.multi_writes.is_unchanged_behind_fence(sequence)
    }

    /// Shows readers another table of holder bits; returns the one before.
    pub(super) fn replace_holders(&self, table: HolderTable) -> Box<HolderTable> {
        let fresh = Box::into_raw(Box::new(table));
        // Relaxed: the writer reads what it wrote.
        let old = self.holders.load(Ordering::Relaxed);
        // HOLDERS: pairs with the load in `holders`.
        self.holders.store(fresh, Ordering::Release);
        // SAFETY: the pointer in the head came from `Box::into_raw`, and has just been taken out.
        unsafe { Box::from_raw(old) }
    }

    /// The current holder bits.
    ///
    /// # Safety
    ///
    /// A table that is replaced while the borrow lasts must not be freed before the borrow ends.
    #[inline]
    pub(super) unsafe fn holders(&self) -> &HolderTable {
        // HOLDERS: pairs with the store in `replace_holders`.
        let holders = self.holders.load(Ordering::SeqCst);
        // SAFETY: never null, and by the promise above its target is not freed.
        unsafe { &*holders }
    }

    /// Counts one more ended batch.
    pub(super) fn end_batch(&self) {
        // Relaxed: the writer reads what it wrote.
        let epoch = self.epoch.load(Ordering::Relaxed);
        // EPOCH: pairs with the load in `epoch`: a reader that sees the number sees the batch.
        self.epoch.store(epoch + 1, Ordering::Release);
    }

    /// Batches that have ended.
    #[inline]
    pub(super) fn epoch(&self) -> u64 {
        // EPOCH: pairs with the store in `end_batch`.
        self.epoch.load(Ordering::Acquire)
    }
}

impl Drop for ShardHead {
    fn drop(&mut self) {
        // Relaxed: the last owner drops it, after all others let it go.
        let holders = self.holders.load(Ordering::Relaxed);
        // SAFETY: the pointer in the head came from `Box::into_raw`, and borrows of it are borrows of the head.
        drop(unsafe { Box::from_raw(holders) });
    }
}
