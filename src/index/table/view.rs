//! What readers hold: the way to the segments of the moment.

use super::lines::{Found, Keys, Table};
use super::{LINE_BITS, segment_of};
use crate::index::reclaim::{Guard, Reclaimer};
use crate::index::sync::{Arc, AtomicPtr, AtomicU64, Ordering, fence};
use std::ptr::NonNull;

/// The segments of the moment, and how often one was replaced.
#[derive(Debug)]
pub(in crate::index) struct Head {
    tables: Box<[AtomicPtr<Table>]>,
    keys: Keys,
    generation: AtomicU64,
}

impl Head {
    /// As many segments as there are tables, a power of two.
    pub(super) fn new(tables: impl Iterator<Item = Table>, keys: Keys) -> Self {
        let tables = tables.map(|table| AtomicPtr::new(Box::into_raw(Box::new(table)))).collect();
        Self { tables, keys, generation: AtomicU64::new(0) }
    }

    pub(super) const fn keys(&self) -> Keys {
        self.keys
    }

    /// Twice how often a segment was replaced; `None` while one is being replaced. Load it before a walk and compare
    /// it after the walk.
    #[inline]
    pub(in crate::index) fn generation(&self) -> Option<u64> {
        // GROWTH: pairs with the Release store in `replace`. Behind a walk it comes after the fence that ends
        // every read of a line.
        let generation = self.generation.load(Ordering::Acquire);
        generation.is_multiple_of(2).then_some(generation)
    }

    /// The table of a segment at the moment.
    ///
    /// # Safety
    ///
    /// A table that is replaced while the borrow lasts must not be freed before the borrow ends.
    #[inline]
    pub(super) unsafe fn segment(&self, segment: usize) -> &Table {
        // SWING: pairs with the Release store in `replace`; SeqCst for the grace period (see the module).
        let table = self.tables[segment].load(Ordering::SeqCst);
        // SAFETY: the pointer is never null, and by the promise above what it points at is not freed.
        unsafe { &*table }
    }

    /// The table of the only segment.
    ///
    /// # Safety
    ///
    /// As [`segment`](Self::segment).
    #[cfg(all(test, kvrouted_loom))]
    pub(in crate::index) unsafe fn table(&self) -> &Table {
        // SAFETY: the caller's, word for word.
        unsafe { self.segment(0) }
    }

    /// Shows readers another table in place of a segment, complete, and gives back the one before. Only the writer
    /// calls this.
    pub(super) fn replace(&self, segment: usize, table: Table) -> NonNull<Table> {
        let fresh = Box::into_raw(Box::new(table));
        let place = &self.tables[segment];
        // Relaxed, all three: the writer reads what it wrote, and the fence orders the store.
        let old = place.load(Ordering::Relaxed);
        let generation = self.generation.load(Ordering::Relaxed);
        self.generation.store(generation + 1, Ordering::Relaxed);
        // SHIFT: who has loaded the new pointer is shown an odd generation or a later one.
        fence(Ordering::Release);
        // SWING: pairs with the load in `segment`.
        place.store(fresh, Ordering::Release);
        // GROWTH: pairs with the load in `generation`.
        self.generation.store(generation + 2, Ordering::Release);
        // SAFETY: what is in the head came from `Box::into_raw`.
        unsafe { NonNull::new_unchecked(old) }
    }
}

impl Drop for Head {
    fn drop(&mut self) {
        for table in &self.tables {
            // Relaxed: dropped by the last of those who share it, after all others let it go.
            let table = table.load(Ordering::Relaxed);
            // SAFETY: what is in the head came from `Box::into_raw` and is nobody else's: borrows of the table are
            // also borrows of the head.
            drop(unsafe { Box::from_raw(table) });
        }
    }
}

/// A reader's handle on a table.
#[derive(Clone, Debug)]
pub(in crate::index) struct TableView {
    head: Arc<Head>,
    reclaimer: Reclaimer,
}

impl TableView {
    /// A view of the table behind `head`.
    ///
    /// # Safety
    ///
    /// Tables that are replaced there must go to the garbage of `reclaimer`.
    pub(in crate::index) unsafe fn new(head: Arc<Head>, reclaimer: Reclaimer) -> Self {
        Self { head, reclaimer }
    }

    /// As [`Head::generation`].
    #[inline]
    pub(in crate::index) fn generation(&self) -> Option<u64> {
        self.head.generation()
    }

    /// The segments, for as long as the guard is there.
    ///
    /// # Panics
    ///
    /// If the guard is another reclaimer's.
    #[inline]
    pub(in crate::index) fn load<'a>(&'a self, guard: &'a Guard<'_>) -> Segments<'a> {
        assert!(guard.is_of(&self.reclaimer), "a guard protects what its own reclaimer frees");
        Segments { head: &self.head }
    }
}

/// The segments of a table, for a reader who is inside. Each search goes to the table of the moment; whether one was
/// replaced in the course of a walk is told by the generation.
#[derive(Clone, Copy, Debug)]
pub(in crate::index) struct Segments<'a> {
    head: &'a Head,
}

impl<'a> Segments<'a> {
    #[inline]
    fn table(self, segment: usize) -> &'a Table {
        // SAFETY: a replaced table is freed by the reclaimer, which waits for the guard that was shown to `load`.
        unsafe { self.head.segment(segment) }
    }

    /// Looks for a node.
    #[inline]
    pub(in crate::index) fn find(self, parent: u32, first: u64, variant: u8) -> Found<u32> {
        let hash = self.head.keys.hash(parent, first, variant);
        let segment = segment_of(hash, self.head.tables.len());
        let table = self.table(segment);
        match table.find_by(hash, parent, first, variant) {
            Found::Here(line, version, header) => {
                Found::Here((segment as u32) << LINE_BITS | table.index(line), version, header)
            }
            Found::Missing => Found::Missing,
            Found::Busy => Found::Busy,
        }
    }

    /// The version of a line, to compare with one read before; of another line if the segment was replaced.
    #[inline]
    pub(in crate::index) fn version(self, index: u32) -> u32 {
        self.table((index >> LINE_BITS) as usize).version(index)
    }

    /// Hints that a node will be looked for.
    #[inline]
    pub(in crate::index) fn prefetch(self, parent: u32, first: u64, variant: u8) {
        let hash = self.head.keys.hash(parent, first, variant);
        self.table(segment_of(hash, self.head.tables.len())).prefetch(hash);
    }
}
