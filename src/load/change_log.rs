//! A log of the workers whose load changed, so that a reader with thousands of cached loads reads only those again.

use std::sync::atomic::AtomicU64 as Counter;

use crate::limits::LOAD_CHANGES_KEPT;
use crate::prefetch::prefetch_to_write;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Logged changes. The model checker gets a small world.
const LOGGED: u64 = if cfg!(all(test, kvrouted_loom)) { 2 } else { LOAD_CHANGES_KEPT };

/// Changes whose places a reader guesses at once.
const GUESSED: u64 = 8;

/// The last changes. Written under the bookings' lock, read without one. On a line of its own: the count changes with every
/// booking.
///
/// | tag | write | read |
/// |---|---|---|
/// | CHANGED | `count`, Release, after a cell and the place of the change | `count`, Acquire, before places and cells |
/// | OVERWRITE | a Release fence after `count`, before the place of the next change | an Acquire fence after places, before `count` is read again |
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct ChangeLog {
    /// Changes so far.
    count: AtomicU64,
    /// The places of the workers whose load changed; the oldest is overwritten.
    places: Box<[AtomicU32]>,
}

/// Counts tables of loads, so that no two logs start at the same number.
static TABLES: Counter = Counter::new(0);

/// A table makes fewer changes than two to the power of this.
const TABLE_SHIFT: u32 = 48;

/// The changes of a table that a reader has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChangesSeen(u64);

impl ChangeLog {
    pub(super) fn new() -> Self {
        let places = (0..LOGGED).map(|_| AtomicU32::new(0)).collect();
        // Relaxed: the number publishes no other memory.
        let table = TABLES.fetch_add(1, Ordering::Relaxed) + 1;
        Self { count: AtomicU64::new(table << TABLE_SHIFT), places }
    }

    fn of(&self, change: u64) -> &AtomicU32 {
        &self.places[(change % LOGGED) as usize]
    }

    /// Prefetches the count, which is about to be changed.
    #[inline]
    pub(super) fn prefetch_to_write(&self) {
        prefetch_to_write((&raw const self.count).cast());
    }

    /// Logs a change of a place's cell. The caller holds the bookings' lock.
    pub(super) fn note(&self, place: u32) {
        // Relaxed: only writers change it, and the lock orders writers.
        let count = self.count.load(Ordering::Relaxed);
        // OVERWRITE: a reader that sees the new place sees that the count was reached.
        fence(Ordering::Release);
        self.of(count).store(place, Ordering::Relaxed);
        // CHANGED.
        self.count.store(count + 1, Ordering::Release);
    }

    /// All changes so far. A cell that is read after this call is at least as new.
    pub(super) fn seen(&self) -> ChangesSeen {
        // Acquire: pairs with CHANGED.
        ChangesSeen(self.count.load(Ordering::Acquire))
    }

    /// Appends the places that changed since `seen` to `places`, one for each change, and moves `seen` on. `false` if
    /// the log does not reach back that far: then any load may have changed.
    pub(super) fn since(&self, seen: &mut ChangesSeen, places: &mut Vec<u32>) -> bool {
        let before = seen.0;
        self.copy(seen, places) && self.still_logged(before)
    }

    /// Some of the places that changed since `seen`, the last ones: a guess, for a reader that will ask for all of them.
    pub(super) fn last_since(&self, seen: ChangesSeen) -> impl Iterator<Item = u32> {
        let now = self.seen().0;
        let from = seen.0.max(now.saturating_sub(GUESSED));
        // Relaxed: as in `copy`; nothing depends on it.
        (from..now).map(|change| self.of(change).load(Ordering::Relaxed))
    }

    /// As [`ChangeLog::since`], but the places may be those of later changes.
    fn copy(&self, seen: &mut ChangesSeen, places: &mut Vec<u32>) -> bool {
        let before = seen.0;
        *seen = self.seen();
        // Also if `seen` is of another table's log.
        if seen.0.wrapping_sub(before) >= LOGGED {
            return false;
        }
        // Relaxed: each place is valid by itself; the second reading of the count tells whether it was overwritten.
        places.extend((before..seen.0).map(|change| self.of(change).load(Ordering::Relaxed)));
        true
    }

    /// Whether no place since `before` was overwritten before this call.
    fn still_logged(&self, before: u64) -> bool {
        // Acquire fence: pairs with OVERWRITE.
        fence(Ordering::Acquire);
        // The place of the next change may be written before it is counted.
        self.count.load(Ordering::Relaxed) - before < LOGGED
    }
}

/// A reader concurrent with the writer, under every order of accesses that the memory model allows: `RUSTFLAGS="--cfg
/// kvrouted_loom" cargo test --lib --release load::change_log`
#[cfg(all(test, kvrouted_loom))]
mod loom {
    use std::sync::Arc;

    use super::*;

    /// How the writer logs a change, and how the reader checks the count again.
    struct Model {
        note: fn(&ChangeLog, u32),
        still_logged: fn(&ChangeLog, u64) -> bool,
    }

    const SOUND: Model = Model { note: ChangeLog::note, still_logged: ChangeLog::still_logged };

    impl Model {
        /// A reader asks for changes while the writer makes more than the log holds.
        fn check(self) {
            let told = Arc::new(Counter::new(0));
            let noted = Arc::clone(&told);
            ::loom::model(move || {
                let changes = Arc::new(ChangeLog::new());
                let (shared, before) = (Arc::clone(&changes), changes.seen().0);
                let reader = ::loom::thread::spawn(move || {
                    let (mut seen, mut places) = (ChangesSeen(before), Vec::new());
                    let is_read = shared.copy(&mut seen, &mut places) && (self.still_logged)(&shared, before);
                    is_read.then(|| (seen.0 - before, places))
                });
                (1..=3).for_each(|place| (self.note)(&changes, place));
                let told = reader.join().expect("it ended");
                // Relaxed: one real thread runs all of the model.
                noted.fetch_or(1 << told.as_ref().map_or(LOGGED, |(count, _)| *count), Ordering::Relaxed);
                if let Some((count, places)) = told {
                    assert_eq!(places, (1..=count as u32).collect::<Vec<_>>(), "of later changes");
                }
            });
            assert_eq!(told.load(Ordering::Relaxed), 0b111, "none, one, and too many: each occurs");
        }
    }

    #[test]
    fn an_overtaken_reader_notices_it() {
        SOUND.check();
    }

    #[test]
    #[should_panic(expected = "of later changes")]
    fn without_a_second_look_it_reads_later_changes() {
        Model { still_logged: |_, _| true, ..SOUND }.check();
    }

    #[test]
    #[should_panic(expected = "of later changes")]
    fn without_the_readers_fence_the_second_look_does_not_help() {
        Model { still_logged: |changes, before| changes.count.load(Ordering::Relaxed) - before < LOGGED, ..SOUND }
            .check();
    }

    #[test]
    #[should_panic(expected = "of later changes")]
    fn without_the_writers_fence_the_second_look_does_not_help() {
        fn note(changes: &ChangeLog, place: u32) {
            let count = changes.count.load(Ordering::Relaxed);
            changes.of(count).store(place, Ordering::Relaxed);
            changes.count.store(count + 1, Ordering::Release);
        }
        Model { note, ..SOUND }.check();
    }
}

#[cfg(all(test, not(kvrouted_loom)))]
mod tests {
    use super::*;

    #[test]
    fn changes_are_reported_once_and_an_overflow_is_noticed() {
        let (changes, mut seen, mut places) = (ChangeLog::new(), ChangesSeen::default(), Vec::new());
        assert!(!changes.since(&mut seen, &mut places) && places.is_empty(), "of another table");
        assert!(changes.since(&mut seen, &mut places) && places.is_empty());
        [7, 3, 7].into_iter().for_each(|place| changes.note(place));
        assert!(changes.since(&mut seen, &mut places));
        assert!(changes.since(&mut seen, &mut places));
        assert_eq!(places, [7, 3, 7]);
        let guessed: Vec<u32> = changes.last_since(ChangesSeen(seen.0 - 3)).collect();
        assert_eq!(guessed, [7, 3, 7]);
        (1..LOAD_CHANGES_KEPT).for_each(|_| changes.note(1));
        assert_eq!(changes.last_since(seen).count() as u64, GUESSED, "not all of them");
        places.clear();
        assert!(changes.since(&mut seen, &mut places));
        assert_eq!(places.len() as u64, LOAD_CHANGES_KEPT - 1);
        (0..LOAD_CHANGES_KEPT).for_each(|_| changes.note(1));
        assert!(!changes.since(&mut seen, &mut places));
        assert_eq!(seen, changes.seen(), "all are read again, and none of these is reported later");
    }

    #[test]
    fn no_change_is_missed_while_changes_are_made() {
        const CHANGES: u64 = 200_000;
        let changes = ChangeLog::new();
        let ChangesSeen(first) = changes.seen();
        std::thread::scope(|scope| {
            scope.spawn(|| (0..CHANGES).for_each(|change| changes.note(change as u32)));
            let (mut seen, mut places) = (ChangesSeen(first), Vec::new());
            while seen.0 - first < CHANGES {
                places.clear();
                let before = seen.0;
                if changes.since(&mut seen, &mut places) {
                    let expected: Vec<u32> = (before..seen.0).map(|change| (change - first) as u32).collect();
                    assert_eq!(places, expected);
                }
            }
        });
    }
}
