//! What readers hold: the way to the table of the moment.

use super::lines::Table;
use crate::index::reclaim::{Guard, Reclaimer};
use crate::index::sync::{Arc, AtomicPtr, AtomicU64, Ordering};
use std::ptr::NonNull;

/// The table of the moment and how often it was replaced.
#[derive(Debug)]
pub(in crate::index) struct Head {
    table: AtomicPtr<Table>,
    generation: AtomicU64,
}

impl Head {
    pub(super) fn new(table: Table) -> Self {
        Self { table: AtomicPtr::new(Box::into_raw(Box::new(table))), generation: AtomicU64::new(0) }
    }

    /// How often the table was replaced. Load it before the table and compare it after the walk.
    #[inline]
    pub(in crate::index) fn generation(&self) -> u64 {
        // GROWTH: pairs with the Release store in `replace`. Behind a walk it comes after the fence that ends
        // every read of a line.
        self.generation.load(Ordering::Acquire)
    }

    /// The table of the moment.
    ///
    /// # Safety
    ///
    /// A table that is replaced while the borrow lasts must not be freed before the borrow ends.
    #[inline]
    pub(in crate::index) unsafe fn table(&self) -> &Table {
        // SWING: pairs with the Release store in `replace`; SeqCst for the grace period (see the module).
        let table = self.table.load(Ordering::SeqCst);
        // SAFETY: the pointer is never null, and by the promise above what it points at is not freed.
        unsafe { &*table }
    }

    /// Shows readers another table, complete, and gives back the one before. Only the writer calls this.
    pub(super) fn replace(&self, table: Table) -> NonNull<Table> {
        let fresh = Box::into_raw(Box::new(table));
        // Relaxed, both: the writer reads what it wrote.
        let old = self.table.load(Ordering::Relaxed);
        let generation = self.generation.load(Ordering::Relaxed);
        // SWING: pairs with the load in `table`.
        self.table.store(fresh, Ordering::Release);
        // GROWTH: pairs with the load in `generation`.
        self.generation.store(generation + 1, Ordering::Release);
        // SAFETY: what is in the head came from `Box::into_raw`.
        unsafe { NonNull::new_unchecked(old) }
    }
}

impl Drop for Head {
    fn drop(&mut self) {
        // Relaxed: dropped by the last of those who share it, after all others let it go.
        let table = self.table.load(Ordering::Relaxed);
        // SAFETY: what is in the head came from `Box::into_raw` and is nobody else's: borrows of the table are
        // also borrows of the head.
        drop(unsafe { Box::from_raw(table) });
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

    /// How often the table was replaced. Load it before the table and compare it after the walk.
    #[inline]
    pub(in crate::index) fn generation(&self) -> u64 {
        self.head.generation()
    }

    /// The table of the moment.
    ///
    /// # Panics
    ///
    /// If the guard is another reclaimer's.
    #[inline]
    pub(in crate::index) fn load<'a>(&'a self, guard: &'a Guard<'_>) -> &'a Table {
        assert!(guard.is_of(&self.reclaimer), "a guard protects what its own reclaimer frees");
        // SAFETY: a replaced table is freed by the reclaimer, which waits for the guard.
        unsafe { self.head.table() }
    }
}
