//! A worker's load as every core reads it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crate::ids::WorkerIndex;
use crate::limits::WORKERS_MAX;

/// What a worker is busy with, as far as bookings tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Tokens still to be prefilled.
    pub prefill_tokens: u64,
    /// Blocks of the prompts in flight: those that several share at the same place count once.
    pub decode_blocks: u64,
    /// Requests in flight.
    pub requests: u64,
    /// Counts changes; equal versions mean that nothing moved between.
    pub version: u64,
}

/// One record, on cache lines of its own. A seqlock: odd while it is written.
///
/// | tag | write | read |
/// |---|---|---|
/// | OPEN | `sequence` to odd, then a Release fence | the Acquire fence before `sequence` is read again |
/// | DONE | `sequence` to even, Release | `sequence`, Acquire, before the fields |
#[derive(Debug)]
#[repr(align(128))]
struct Cell {
    /// Whose load it is: a [`WorkerIndex`], or `NOBODY`.
    owner: AtomicU32,
    sequence: AtomicU64,
    prefill_tokens: AtomicU64,
    decode_blocks: AtomicU64,
    requests: AtomicU64,
}

/// No worker's index: its place is beyond all.
const NOBODY: u32 = u32::MAX;

/// The loads of all workers, by place. Written under the bookings' lock, read without one.
#[derive(Debug)]
pub struct LoadCells(Box<[Cell]>);

/// After this many torn reads a reader takes what it has: a load is a hint, and the writer is running.
const READ_TRIES_MAX: usize = 64;

impl LoadCells {
    pub(super) fn new(workers: usize) -> Self {
        let cell = |place: usize| Cell {
            owner: AtomicU32::new(if place < workers { place as u32 } else { NOBODY }),
            sequence: AtomicU64::new(0),
            prefill_tokens: AtomicU64::new(0),
            decode_blocks: AtomicU64::new(0),
            requests: AtomicU64::new(0),
        };
        Self((0..WORKERS_MAX.max(workers)).map(cell).collect())
    }

    /// Whether a place is this worker's. The caller holds the bookings' lock.
    pub(super) fn is_of(&self, worker: WorkerIndex) -> bool {
        // Relaxed: owners change under the lock that the caller holds.
        self.0.get(worker.place()).is_some_and(|cell| cell.owner.load(Ordering::Relaxed) == worker.0)
    }

    /// Gives a place to a worker, idle. The caller holds the bookings' lock.
    pub(super) fn give(&self, worker: WorkerIndex) {
        self.hand_over(worker, worker.0);
    }

    /// Takes a worker's place from it; nothing happens if it is another's. The caller holds the bookings' lock.
    pub(super) fn take(&self, worker: WorkerIndex) -> bool {
        let taken = self.is_of(worker);
        if taken {
            self.hand_over(worker, NOBODY);
        }
        taken
    }

    fn hand_over(&self, worker: WorkerIndex, owner: u32) {
        let Some(cell) = self.0.get(worker.place()) else { return };
        // Relaxed: only the lock's holder writes it; readers see it within the sequence of the change below.
        let was = cell.owner.swap(worker.0, Ordering::Relaxed);
        self.change(worker, |load| *load = Load { version: load.version, ..Load::default() });
        cell.owner.store(owner, Ordering::Relaxed);
        debug_assert!(was == NOBODY || owner == NOBODY, "a place has one owner at a time");
    }

    /// The load now; all zero for a worker that is not in the table.
    #[must_use]
    pub fn read(&self, worker: WorkerIndex) -> Load {
        let Some(cell) = self.0.get(worker.place()) else { return Load::default() };
        // Relaxed: a place changes hands only while nobody can name the owner before, nor yet the one after.
        if cell.owner.load(Ordering::Relaxed) != worker.0 {
            return Load::default();
        }
        let mut load = Load::default();
        for _ in 0..READ_TRIES_MAX {
            // Acquire: pairs with DONE.
            let before = cell.sequence.load(Ordering::Acquire);
            load = Load {
                prefill_tokens: cell.prefill_tokens.load(Ordering::Relaxed),
                decode_blocks: cell.decode_blocks.load(Ordering::Relaxed),
                requests: cell.requests.load(Ordering::Relaxed),
                version: before,
            };
            // Acquire fence: pairs with OPEN; a field of a later write makes the later sequence visible.
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && cell.sequence.load(Ordering::Relaxed) == before {
                return load;
            }
            std::hint::spin_loop();
        }
        load
    }

    /// Changes a worker's load. The caller holds the bookings' lock: there is one writer at a time.
    pub(super) fn change(&self, worker: WorkerIndex, change: impl FnOnce(&mut Load)) {
        let Some(cell) = self.0.get(worker.place()).filter(|_| self.is_of(worker)) else { return };
        // Relaxed: only writers change these, and the lock orders writers.
        let sequence = cell.sequence.load(Ordering::Relaxed);
        let mut load = Load {
            prefill_tokens: cell.prefill_tokens.load(Ordering::Relaxed),
            decode_blocks: cell.decode_blocks.load(Ordering::Relaxed),
            requests: cell.requests.load(Ordering::Relaxed),
            version: sequence,
        };
        change(&mut load);
        cell.sequence.store(sequence + 1, Ordering::Relaxed);
        // OPEN: no field may be seen changed before the odd sequence.
        fence(Ordering::Release);
        cell.prefill_tokens.store(load.prefill_tokens, Ordering::Relaxed);
        cell.decode_blocks.store(load.decode_blocks, Ordering::Relaxed);
        cell.requests.store(load.requests, Ordering::Relaxed);
        // DONE.
        cell.sequence.store(sequence + 2, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_seen_whole_and_counts() {
        let cells = LoadCells::new(2);
        let before = cells.read(WorkerIndex(1));
        cells.change(WorkerIndex(1), |load| load.requests += 1);
        let after = cells.read(WorkerIndex(1));
        assert_eq!((before.requests, after.requests), (0, 1));
        assert_ne!(before.version, after.version);
        assert_eq!(cells.read(WorkerIndex(0)), Load::default());
        assert_eq!(cells.read(WorkerIndex(7)), Load::default());
    }

    #[test]
    fn readers_never_see_half_a_change() {
        let cells = LoadCells::new(1);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..20_000 {
                    cells.change(WorkerIndex(0), |load| {
                        load.prefill_tokens += 2;
                        load.decode_blocks += 3;
                        load.requests += 1;
                    });
                }
            });
            loop {
                let load = cells.read(WorkerIndex(0));
                if load.version.is_multiple_of(2) {
                    assert_eq!((load.prefill_tokens, load.decode_blocks), (load.requests * 2, load.requests * 3));
                }
                if load.requests == 20_000 {
                    break;
                }
            }
        });
    }
}
