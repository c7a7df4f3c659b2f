//! A bound on the bytes of requests that all streams together withhold.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The bytes that are left. Clones share one count.
#[derive(Clone, Debug)]
pub struct BodyBudget(Arc<AtomicUsize>);

/// Bytes that one stream has taken; given back when dropped.
#[derive(Debug)]
pub(super) struct Taken {
    budget: BodyBudget,
    bytes: usize,
}

impl BodyBudget {
    /// A budget of this many bytes.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self(Arc::new(AtomicUsize::new(bytes)))
    }

    /// The bytes that are left.
    #[must_use]
    pub fn left(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn start(&self) -> Taken {
        Taken { budget: self.clone(), bytes: 0 }
    }
}

impl Taken {
    /// Takes more bytes; `false` = there are not that many left, and none were taken.
    pub(super) fn take(&mut self, bytes: usize) -> bool {
        // Relaxed: the count guards no other memory.
        let taken = self.budget.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
        if taken.is_ok() {
            self.bytes += bytes;
        }
        taken.is_ok()
    }

    /// The bytes that it has taken.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Gives some of them back.
    pub(super) fn give_back(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.budget.0.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.budget.0.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_when_a_stream_ends() {
        let budget = BodyBudget::new(100);
        let (mut one, mut other) = (budget.start(), budget.start());
        assert!(one.take(60) && other.take(40));
        assert!(!other.take(1), "nothing is left");
        drop(one);
        assert_eq!(budget.left(), 60);
        assert!(other.take(60));
        drop(other);
        assert_eq!(budget.left(), 100);
    }
}
