//! What a shard's readers load first and compare last.

#![expect(unsafe_code, reason = "the lanes are replaced behind a pointer")]

use super::lanes::LaneTable;
use super::sync::{AtomicPtr, AtomicU64, Ordering, fence};

/// The word by which readers tell that more than a node has changed, the lanes of the moment, the epoch.
///
/// | tag    | writer                                                        | reader                              |
/// |--------|---------------------------------------------------------------|-------------------------------------|
/// | TEAR   | Relaxed store of an odd number, Release fence, then changes   | Acquire load before the walk        |
/// | MEND   | Release store of the next even number, after the changes      | Acquire load before the walk        |
/// | AGAIN  | (the same stores)                                             | Acquire fence, then a Relaxed load  |
/// | LANES  | Release store of the pointer, the table before it             | SeqCst load                         |
/// | EPOCH  | Release store                                                 | Acquire load                        |
///
/// A reader whose first load is even and equal to the one after its walk has seen nothing of a tear: what it
/// reads of a change was stored after the Release fence, so its Acquire fence makes the odd number
/// visible to AGAIN. The load of LANES is SeqCst for the grace period (see [`super::reclaim`]).
#[derive(Debug)]
pub(super) struct Head {
    structure: AtomicU64,
    lanes: AtomicPtr<LaneTable>,
    epoch: AtomicU64,
}

impl Head {
    pub(super) fn new(epoch: u64) -> Self {
        let lanes = Box::into_raw(Box::new(LaneTable::default()));
        Self { structure: AtomicU64::new(0), lanes: AtomicPtr::new(lanes), epoch: AtomicU64::new(epoch) }
    }

    /// The writer begins something that must be seen as a whole.
    pub(super) fn tear(&self) {
        // Relaxed: only the writer stores it.
        let before = self.structure.load(Ordering::Relaxed);
        debug_assert!(before.is_multiple_of(2), "torn once at a time");
        // TEAR: the fence orders it before every later store.
        self.structure.store(before + 1, Ordering::Relaxed);
        fence(Ordering::Release);
    }

    /// The whole is there.
    pub(super) fn mend(&self) {
        // Relaxed: only the writer stores it.
        let torn = self.structure.load(Ordering::Relaxed);
        // MEND: pairs with the load in `structure`.
        self.structure.store(torn + 1, Ordering::Release);
    }

    /// Whether the shard is torn; for the writer.
    pub(super) fn is_torn(&self) -> bool {
        // Relaxed: the writer reads what it wrote.
        self.structure.load(Ordering::Relaxed) % 2 == 1
    }

    /// What to compare after a walk; `None` while the shard is torn.
    #[inline]
    pub(super) fn structure(&self) -> Option<u64> {
        // TEAR, MEND: pairs with the stores there.
        let now = self.structure.load(Ordering::Acquire);
        (now.is_multiple_of(2)).then_some(now)
    }

    /// Whether nothing was torn since `structure` was loaded. To be called after an Acquire fence that
    /// follows every load of the walk.
    #[inline]
    pub(super) fn is_still(&self, structure: u64) -> bool {
        // AGAIN: ordered by the caller's fence.
        self.structure.load(Ordering::Relaxed) == structure
    }

    /// Shows readers other lanes; gives back the table before.
    pub(super) fn replace_lanes(&self, table: LaneTable) -> Box<LaneTable> {
        let fresh = Box::into_raw(Box::new(table));
        // Relaxed: the writer reads what it wrote.
        let old = self.lanes.load(Ordering::Relaxed);
        // LANES: pairs with the load in `lanes`.
        self.lanes.store(fresh, Ordering::Release);
        // SAFETY: what is in the head came from `Box::into_raw`, and has just been taken out.
        unsafe { Box::from_raw(old) }
    }

    /// The lanes of the moment.
    ///
    /// # Safety
    ///
    /// A table that is replaced while the borrow lasts must not be freed before the borrow ends.
    #[inline]
    pub(super) unsafe fn lanes(&self) -> &LaneTable {
        // LANES: pairs with the store in `replace_lanes`.
        let lanes = self.lanes.load(Ordering::SeqCst);
        // SAFETY: never null, and by the promise above what it points at is not freed.
        unsafe { &*lanes }
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

impl Drop for Head {
    fn drop(&mut self) {
        // Relaxed: dropped by the last of those who share it, after all others let it go.
        let lanes = self.lanes.load(Ordering::Relaxed);
        // SAFETY: what is in the head came from `Box::into_raw`, and borrows of it are borrows of the head.
        drop(unsafe { Box::from_raw(lanes) });
    }
}
