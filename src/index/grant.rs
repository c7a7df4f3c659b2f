//! The memory that a shard may take: its own ceiling, and what it has drawn from the memory that all shards share.
//!
//! A shard draws memory before a store needs it, and some ahead, so that it counts its memory only once in a few thousand
//! blocks. What it has not used by the next quiet moment goes back. The last part of the memory is for workers within
//! their equal share of it.

use std::sync::Arc;

use crate::budget::{Gauge, MemoryPool};
use crate::limits::{INDEX_AHEAD_BLOCKS, INDEX_AHEAD_BYTES, INDEX_LAST_PERCENT};

/// What bounds a store that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bound {
    /// The shard's own ceiling.
    Ceiling,
    /// The memory of all shards.
    Budget,
    /// The worker gets no more memory: it is held back, or takes more than its share where little is left.
    Withheld,
}

/// A shard's part of the memory that all shards share. The default has no bound.
#[derive(Debug, Default)]
pub(super) struct Grant {
    shared: Option<Shared>,
    /// Blocks that may be stored before the shard counts again.
    uncounted: u64,
}

#[derive(Debug)]
struct Shared {
    pool: Arc<MemoryPool>,
    /// Shows what the shard takes.
    gauge: Gauge,
    drawn: u64,
    /// The shard's workers.
    workers: u64,
    /// Whether blocks were stored since the last [`Grant::settle`].
    is_active: bool,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.pool.give_back(self.drawn);
        self.pool.change_users(self.workers, 0);
        self.gauge.set(0);
    }
}

impl Grant {
    /// Draws from `pool` from now on; the shard takes `bytes` already.
    pub(super) fn of(pool: Arc<MemoryPool>, gauge: Gauge, bytes: u64) -> Self {
        pool.force(bytes);
        gauge.set(bytes);
        Self { shared: Some(Shared { pool, gauge, drawn: bytes, workers: 0, is_active: false }), uncounted: 0 }
    }

    /// What keeps the shard from growing by a store of `blocks`, if anything does. `bytes` = an upper bound of its memory
    /// afterwards, `own` = of the worker's part in it.
    pub(super) fn bound(
        &mut self,
        blocks: u64,
        bytes: impl FnOnce() -> u64,
        own: impl FnOnce() -> u64,
    ) -> Option<Bound> {
        let shared = self.shared.as_mut()?;
        if blocks <= self.uncounted {
            self.uncounted -= blocks;
            return None;
        }
        self.uncounted = 0;
        shared.is_active = true;
        let bytes = bytes();
        let ahead = bytes + INDEX_AHEAD_BYTES;
        // Not ahead where little is left: other shards may need it now.
        let is_ample = |more: u64| shared.pool.drawn() + more <= shared.pool.bytes_max() / 8 * 7;
        if ahead <= shared.drawn || (is_ample(ahead - shared.drawn) && shared.draw(ahead)) {
            self.uncounted = INDEX_AHEAD_BLOCKS;
            return None;
        }
        if shared.is_of_the_last(bytes) && own() > shared.pool.share() {
            return Some(Bound::Withheld);
        }
        let covers = bytes <= shared.drawn || shared.draw(bytes);
        (!covers).then_some(Bound::Budget)
    }

    /// What the shard has drawn: the most that it may take now.
    pub(super) fn bytes(&self) -> u64 {
        self.shared.as_ref().map_or(u64::MAX, |shared| shared.drawn)
    }

    /// Shows what the shard takes for its `workers`, and gives back what it drew and does not need.
    pub(super) fn settle(&mut self, workers: usize, bytes: impl FnOnce() -> u64) {
        let Some(shared) = &mut self.shared else { return };
        let before = std::mem::replace(&mut shared.workers, workers as u64);
        shared.pool.change_users(before, shared.workers);
        let bytes = bytes();
        shared.gauge.set(bytes);
        let kept = bytes + if std::mem::take(&mut shared.is_active) { INDEX_AHEAD_BYTES } else { 0 };
        match shared.drawn.checked_sub(kept) {
            Some(surplus) if surplus > 0 => {
                shared.pool.give_back(surplus);
                shared.drawn = kept;
                self.uncounted = 0;
            }
            _ => {
                // The memory is taken already, by what is no store: a split, a removal, a list.
                let more = bytes.saturating_sub(shared.drawn);
                if more > 0 {
                    shared.pool.force(more);
                    shared.drawn = bytes;
                    self.uncounted = 0;
                }
            }
        }
    }
}

impl Shared {
    /// Whether the shard, with `bytes`, would take of the last part of the memory.
    fn is_of_the_last(&self, bytes: u64) -> bool {
        let (all, more) = (self.pool.bytes_max(), bytes.saturating_sub(self.drawn));
        self.pool.drawn().saturating_add(more) > all - all / 100 * INDEX_LAST_PERCENT
    }

    fn draw(&mut self, bytes: u64) -> bool {
        let drawn = self.pool.draw(bytes - self.drawn);
        if drawn {
            self.drawn = bytes;
        }
        drawn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn two(pool_bytes: u64) -> (Arc<MemoryPool>, [Grant; 2], [Gauge; 2]) {
        let pool = Arc::new(MemoryPool::new(pool_bytes));
        let gauges = [Gauge::default(), Gauge::default()];
        let grants = [0, 1].map(|at: usize| Grant::of(Arc::clone(&pool), gauges[at].clone(), MIB));
        (pool, grants, gauges)
    }

    /// Whether a worker without blocks may have its shard grow to `bytes`.
    fn covers(shard: &mut Grant, bytes: u64) -> bool {
        shard.bound(1, || bytes, || 0).is_none()
    }

    #[test]
    fn memory_is_counted_once_in_many_blocks_and_given_back_when_idle() {
        let (pool, [mut shard, _other], gauges) = two(1 << 30);
        let mut counted = 0;
        for _ in 0..INDEX_AHEAD_BLOCKS + 1 {
            let bytes = || {
                counted += 1;
                MIB
            };
            assert_eq!(shard.bound(1, bytes, || 0), None);
        }
        assert_eq!((counted, pool.drawn()), (1, 2 * MIB + INDEX_AHEAD_BYTES));
        shard.settle(1, || 3 * MIB);
        assert_eq!((shard.bytes(), gauges[0].get()), (MIB + INDEX_AHEAD_BYTES, 3 * MIB), "it may go on");
        shard.settle(1, || 3 * MIB);
        assert_eq!((pool.drawn(), shard.bytes()), (4 * MIB, 3 * MIB), "an idle shard keeps what it takes");
        drop(shard);
        assert_eq!((pool.drawn(), gauges[0].get()), (MIB, 0));
    }

    #[test]
    fn where_little_is_left_a_shard_draws_what_it_needs_and_no_more_than_there_is() {
        let (pool, [mut shard, mut other], _) = two(16 * MIB);
        assert!(covers(&mut shard, 10 * MIB) && covers(&mut other, 6 * MIB));
        assert_eq!(pool.drawn(), 16 * MIB);
        assert!(!covers(&mut other, 6 * MIB + 1) && other.bytes() == 6 * MIB, "nothing is drawn");
        shard.settle(1, || 2 * MIB);
        shard.settle(1, || 2 * MIB);
        assert!(covers(&mut other, 6 * MIB + 1), "the other shard has given memory back");
        shard.settle(1, || 11 * MIB);
        assert!(pool.drawn() > 16 * MIB && !covers(&mut other, 7 * MIB), "what is taken counts, also beyond the bound");
    }

    #[test]
    fn the_last_part_is_for_workers_within_their_share() {
        let (pool, [mut shard, mut other], _) = two(100 * MIB);
        shard.settle(3, || MIB);
        other.settle(1, || MIB);
        let share = pool.share();
        assert_eq!(share, 25 * MIB);
        assert_eq!(shard.bound(1, || 96 * MIB, || 95 * MIB), None, "97 MiB in all");
        let beyond = 96 * MIB + 1;
        assert_eq!(shard.bound(1, || beyond, || share + 1), Some(Bound::Withheld));
        assert_eq!(shard.bound(1, || beyond, || share), None);
        assert_eq!(shard.bound(1, || beyond, || share + 1), Some(Bound::Withheld), "also of what is drawn already");
        assert_eq!(other.bound(1, || 5 * MIB, || 5 * MIB), Some(Bound::Budget), "there is no more");
        drop(shard);
        assert_eq!((pool.share(), other.bound(1, || 5 * MIB, || 5 * MIB)), (100 * MIB, None));
    }

    #[test]
    fn without_a_pool_everything_fits() {
        let mut shard = Grant::default();
        assert!(shard.bound(u64::MAX, || u64::MAX, || u64::MAX).is_none() && shard.bytes() == u64::MAX);
    }
}
