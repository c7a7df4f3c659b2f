//! A word that two processes share.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// What of an atomic word a lane needs, so that the model checker can put its own in place of the standard one.
pub trait Word {
    /// As [`AtomicU64::load`].
    fn load(&self, order: Ordering) -> u64;
    /// As [`AtomicU64::store`].
    fn store(&self, value: u64, order: Ordering);
    /// As [`AtomicU64::swap`].
    fn swap(&self, value: u64, order: Ordering) -> u64;
    /// As [`AtomicU64::fetch_or`].
    fn set(&self, bits: u64, order: Ordering);
    /// As [`AtomicU64::fetch_and`] of the complement.
    fn clear(&self, bits: u64, order: Ordering);
    /// As [`fence`] of sequential consistency.
    fn fence();
}

// Inlined everywhere: a call for each word makes a copy seven times as slow.
impl Word for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }

    #[inline]
    fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.swap(value, order)
    }

    #[inline]
    fn set(&self, bits: u64, order: Ordering) {
        self.fetch_or(bits, order);
    }

    #[inline]
    fn clear(&self, bits: u64, order: Ordering) {
        self.fetch_and(!bits, order);
    }

    #[inline]
    fn fence() {
        // SeqCst: every caller names what it pairs with.
        fence(Ordering::SeqCst);
    }
}
