//! How many lanes there may be, and how they are: what all cores of a daemon share.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::limits::{LANE_RING_BYTES_CEILING, LANE_RING_BYTES_MIN};
use crate::metrics::{CounterSet, LaneCounter};

/// The lanes of a daemon.
#[derive(Debug)]
pub struct Lanes {
    lanes_max: usize,
    ring_bytes_max: u32,
    /// Lanes that are open. Relaxed everywhere: a number that bounds orders nothing.
    open: AtomicUsize,
    counters: CounterSet<LaneCounter>,
}

impl Lanes {
    /// `lanes_max` lanes, 0 = none, with rings of up to `ring_bytes_max` bytes each.
    #[must_use]
    pub fn new(lanes_max: usize, ring_bytes_max: u32) -> Self {
        // The largest power of two that is not beyond it.
        let ring_bytes_max = ring_bytes_max.clamp(LANE_RING_BYTES_MIN, LANE_RING_BYTES_CEILING);
        let ring_bytes_max = 1 << ring_bytes_max.ilog2();
        Self { lanes_max, ring_bytes_max, open: AtomicUsize::new(0), counters: CounterSet::default() }
    }

    /// Whether there may be any.
    #[must_use]
    pub const fn are_on(&self) -> bool {
        self.lanes_max > 0
    }

    /// Lanes at most.
    pub(super) const fn lanes_max(&self) -> usize {
        self.lanes_max
    }

    /// Bytes of a ring at most: a power of two.
    pub(super) const fn ring_bytes_max(&self) -> u32 {
        self.ring_bytes_max
    }

    /// Lanes that are open now.
    #[must_use]
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// What is counted.
    #[must_use]
    pub const fn counters(&self) -> &CounterSet<LaneCounter> {
        &self.counters
    }

    /// Takes one of the places; `None` = all are taken.
    pub(super) fn take(self: &Arc<Self>) -> Option<LanePlace> {
        let more = |open| (open < self.lanes_max).then_some(open + 1);
        self.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(LanePlace(Arc::clone(self)))
    }
}

/// A place of an open lane, given back when it is dropped.
#[derive(Debug)]
pub(super) struct LanePlace(Arc<Lanes>);

impl Drop for LanePlace {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_given_out_once_and_come_back() {
        let lanes = Arc::new(Lanes::new(2, 10_000));
        assert_eq!((lanes.ring_bytes_max(), lanes.open()), (8192, 0));
        let (first, second) = (lanes.take(), lanes.take());
        assert!(first.is_some() && second.is_some() && lanes.take().is_none());
        drop(first);
        assert_eq!(lanes.open(), 1);
        assert!(lanes.take().is_some());
        assert!(Arc::new(Lanes::new(0, 0)).take().is_none());
    }
}
