//! What readers of a shard hold, and how another index takes its place under them.
//!
//! Where the thread of a shard panics, its index may have stopped in the middle of a change: the shard torn, a header
//! with an odd version, garbage that the arena has not got back. Nothing of it is repaired. The writer begins with an
//! empty tree ([`ShardWriter::reset_after_panic`](super::ShardWriter::reset_after_panic)), shows it here, and only then lets go of the old one.
//!
//! # What a reader can see of a writer that died
//!
//! * **Before the swap**: the old tree as it was left. It is as if the writer had been stopped by the scheduler and never
//!   went on, which every reader stands already: a torn shard and an odd version are tried
//!   [`LOOKUP_TRIES_MAX`](crate::limits::LOOKUP_TRIES_MAX) times, a bounded number of turns each, and then the answer says
//!   `contended`. So nobody spins for ever. What is seen without `contended` is the state before or after the event that
//!   was under way, as each event shows itself in one step. By then trust has fallen, so that neither is called `exact`.
//! * **After the swap**: the new tree, of which every line is empty. A reader cannot mix the two: one try of a lookup
//!   loads the sight once, and words, lines and lanes all come from it. HolderBits of the old tree mean nothing in the new
//!   one: their table has an edition of its own, by which the reader's buffer is made anew.
//! * **Nothing is over-counted**: the new tree holds what was stored into it after the swap, and the old one is not
//!   written any more.
//! * **The epoch never goes back**: the new head begins behind the old one.
//!
//! # When the old tree is freed
//!
//! | tag   | writer                                              | reader                                  |
//! |-------|-----------------------------------------------------|-----------------------------------------|
//! | INDEX | Release store of the pointer, the new tree before it | SeqCst load of the pointer, once inside |
//!
//! The load is SeqCst for the grace period, as those of tables and lanes are (see [`super::reclaim`]). The old sight owns
//! the old head, the old table and the old arena's memory together with the old tree. It goes to the new tree's garbage
//! after the swap, and so lives until every reader has left that can have loaded it. Records beside headers are freed by
//! the old tree's garbage. That may hold some which a header still named when the writer died: nothing of it is handed
//! over before the swap, as handing over is the last thing that an event does.
//!
//! What a shard's readers load first and compare last.

#![expect(unsafe_code, reason = "what readers share with the writer is replaced behind pointers")]

use super::arena::ArenaView;
use super::holders::HolderTable;
use super::reclaim::{Guard, Reclaimer};
use super::table::TableView;
use crate::sync::{AtomicPtr, AtomicU64, Ordering, fence};
use std::sync::Arc;

/// One index of a shard, as readers need it.
#[derive(Debug)]
pub(super) struct SharedIndex {
    pub(super) head: Arc<ShardHead>,
    pub(super) table: TableView,
    pub(super) arena: ArenaView,
}

/// Where readers find the sight of the moment.
#[derive(Debug)]
pub(super) struct SharedIndexCell {
    index: AtomicPtr<SharedIndex>,
    reclaimer: Reclaimer,
}

impl SharedIndexCell {
    /// A place with its first sight. Sights that are replaced go to the garbage of `reclaimer`.
    pub(super) fn new(index: SharedIndex, reclaimer: Reclaimer) -> Self {
        Self { index: AtomicPtr::new(Box::into_raw(Box::new(index))), reclaimer }
    }

    /// The sight of the moment.
    ///
    /// # Panics
    ///
    /// If the guard is another reclaimer's.
    #[inline]
    pub(super) fn load<'a>(&'a self, guard: &'a Guard<'_>) -> &'a SharedIndex {
        assert!(guard.is_of(&self.reclaimer), "a guard protects what its own reclaimer frees");
        // INDEX: pairs with the store in `replace`; SeqCst for the grace period.
        let index = self.index.load(Ordering::SeqCst);
        // SAFETY: never null. One that is replaced goes to the garbage of the shard's reclaimer, which waits for the
        // guard, and the last one lives as long as the place.
        unsafe { &*index }
    }

    /// Shows readers another index; gives back the sight before, which must wait for readers. Only the writer calls this.
    pub(super) fn replace(&self, index: SharedIndex) -> Box<SharedIndex> {
        let fresh = Box::into_raw(Box::new(index));
        // Relaxed: only the writer stores it.
        let old = self.index.load(Ordering::Relaxed);
        // INDEX: pairs with the load in `load`.
        self.index.store(fresh, Ordering::Release);
        // SAFETY: what is in the place came from `Box::into_raw`, and has just been taken out.
        unsafe { Box::from_raw(old) }
    }
}

impl Drop for SharedIndexCell {
    fn drop(&mut self) {
        // Relaxed: dropped by the last of those who share it, after all others let it go.
        let index = self.index.load(Ordering::Relaxed);
        // SAFETY: what is in the place came from `Box::into_raw`, and borrows of it are borrows of the place.
        drop(unsafe { Box::from_raw(index) });
    }
}

/// The word by which readers tell that more than a node has changed, the lanes of the moment, the epoch.
///
/// | tag    | writer                                                        | reader                              |
/// |--------|---------------------------------------------------------------|-------------------------------------|
/// | BEGIN   | Relaxed store of an odd number, Release fence, then changes   | Acquire load before the walk        |
/// | END   | Release store of the next even number, after the changes      | Acquire load before the walk        |
/// | RECHECK  | (the same stores)                                             | Acquire fence, then a Relaxed load  |
/// | HOLDERS  | Release store of the pointer, the table before it             | SeqCst load                         |
/// | EPOCH  | Release store                                                 | Acquire load                        |
///
/// A reader whose first load is even and equal to the one after its walk has seen nothing of a tear: what it
/// reads of a change was stored after the Release fence, so its Acquire fence makes the odd number
/// visible to RECHECK. The load of HOLDERS is SeqCst for the grace period (see [`super::reclaim`]).
#[derive(Debug)]
pub(super) struct ShardHead {
    structure: AtomicU64,
    holders: AtomicPtr<HolderTable>,
    epoch: AtomicU64,
}

impl ShardHead {
    pub(super) fn new(epoch: u64) -> Self {
        let holders = Box::into_raw(Box::new(HolderTable::default()));
        Self { structure: AtomicU64::new(0), holders: AtomicPtr::new(holders), epoch: AtomicU64::new(epoch) }
    }

    /// The writer begins something that must be seen as a whole.
    pub(super) fn begin_multi_write(&self) {
        // Relaxed: only the writer stores it.
        let before = self.structure.load(Ordering::Relaxed);
        debug_assert!(before.is_multiple_of(2), "torn once at a time");
        // BEGIN: the fence orders it before every later store.
        self.structure.store(before + 1, Ordering::Relaxed);
        fence(Ordering::Release);
    }

    /// The whole is there.
    pub(super) fn end_multi_write(&self) {
        // Relaxed: only the writer stores it.
        let torn = self.structure.load(Ordering::Relaxed);
        // END: pairs with the load in `structure`.
        self.structure.store(torn + 1, Ordering::Release);
    }

    /// Whether the shard is torn; for the writer.
    pub(super) fn in_multi_write(&self) -> bool {
        // Relaxed: the writer reads what it wrote.
        self.structure.load(Ordering::Relaxed) % 2 == 1
    }

    /// What to compare after a walk; `None` while the shard is torn.
    #[inline]
    pub(super) fn structure(&self) -> Option<u64> {
        // BEGIN, END: pairs with the stores there.
        let now = self.structure.load(Ordering::Acquire);
        (now.is_multiple_of(2)).then_some(now)
    }

    /// Whether nothing was torn since `structure` was loaded. To be called after an Acquire fence that
    /// follows every load of the walk.
    #[inline]
    pub(super) fn is_still(&self, structure: u64) -> bool {
        // RECHECK: ordered by the caller's fence.
        self.structure.load(Ordering::Relaxed) == structure
    }

    /// Shows readers other lanes; gives back the table before.
    pub(super) fn replace_holders(&self, table: HolderTable) -> Box<HolderTable> {
        let fresh = Box::into_raw(Box::new(table));
        // Relaxed: the writer reads what it wrote.
        let old = self.holders.load(Ordering::Relaxed);
        // HOLDERS: pairs with the load in `holders`.
        self.holders.store(fresh, Ordering::Release);
        // SAFETY: what is in the head came from `Box::into_raw`, and has just been taken out.
        unsafe { Box::from_raw(old) }
    }

    /// The lanes of the moment.
    ///
    /// # Safety
    ///
    /// A table that is replaced while the borrow lasts must not be freed before the borrow ends.
    #[inline]
    pub(super) unsafe fn holders(&self) -> &HolderTable {
        // HOLDERS: pairs with the store in `replace_holders`.
        let holders = self.holders.load(Ordering::SeqCst);
        // SAFETY: never null, and by the promise above what it points at is not freed.
        unsafe { &*holders }
    }

    /// One more batch has ended.
    pub(super) fn end_batch(&self) {
        // Relaxed: the writer reads what it wrote.
        let epoch = self.epoch.load(Ordering::Relaxed);
        // EPOCH: pairs with the load in `epoch`: who sees it sees the batch.
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
        // Relaxed: dropped by the last of those who share it, after all others let it go.
        let holders = self.holders.load(Ordering::Relaxed);
        // SAFETY: what is in the head came from `Box::into_raw`, and borrows of it are borrows of the head.
        drop(unsafe { Box::from_raw(holders) });
    }
}
