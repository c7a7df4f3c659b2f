//! Whose load changed, in order: who keeps what was read of thousands reads again only what is another.

use std::sync::atomic::AtomicU64 as Counter;

use crate::limits::LOAD_CHANGES_KEPT;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Changes that are kept. The model checker gets a small world.
const LOGGED: u64 = if cfg!(all(test, kvrouted_loom)) { 2 } else { LOAD_CHANGES_KEPT };

/// The last changes. Written under the bookings' lock, read without one.
///
/// | tag | write | read |
/// |---|---|---|
/// | CHANGED | `count`, Release, after a cell and the place of the change | `count`, Acquire, before places and cells |
/// | OVERWRITE | a Release fence after `count`, before the place of the next change | an Acquire fence after places, before `count` is read again |
#[derive(Debug)]
pub(super) struct ChangeLog {
    /// How many there were.
    count: AtomicU64,
    /// The places in the table of those whose loads changed; the oldest is overwritten.
    places: Box<[AtomicU32]>,
}

/// Of tables of loads, so that no two count from the same number.
static TABLES: Counter = Counter::new(0);

/// Changes that a table makes in its life are fewer than two to the power of so many.
const TABLE_SHIFT: u32 = 48;

/// How many changes of a table a reader has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChangesSeen(u64);

impl ChangeLog {
    pub(super) fn new() -> Self {
        let places = (0..LOGGED).map(|_| AtomicU32::new(0)).collect();
        // Relaxed: the number is all there is; no other memory hangs on it.
        let table = TABLES.fetch_add(1, Ordering::Relaxed) + 1;
        Self { count: AtomicU64::new(table << TABLE_SHIFT), places }
    }

    fn of(&self, change: u64) -> &AtomicU32 {
        &self.places[(change % LOGGED) as usize]
    }

    /// Notes that the cell of a place was changed. The caller holds the bookings' lock.
    pub(super) fn note(&self, place: u32) {
        // Relaxed: only writers change it, and the lock orders writers.
        let count = self.count.load(Ordering::Relaxed);
        // OVERWRITE: who sees the new place sees that this count was reached.
        fence(Ordering::Release);
        self.of(count).store(place, Ordering::Relaxed);
        // CHANGED.
        self.count.store(count + 1, Ordering::Release);
    }

    /// All there were so far: a cell that is read after this call is at least as new.
    pub(super) fn seen(&self) -> ChangesSeen {
        // Acquire: pairs with CHANGED.
        ChangesSeen(self.count.load(Ordering::Acquire))
    }

    /// Appends the places of those that changed since `seen` to `places`, the same one as often as it changed, and moves
    /// `seen` on. `false` if there were more than are kept: then any may have.
    pub(super) fn since(&self, seen: &mut ChangesSeen, places: &mut Vec<u32>) -> bool {
        let before = seen.0;
        self.copy(seen, places) && self.still_logged(before)
    }

    /// As [`ChangeLog::since`], but the places may be those of later changes.
    fn copy(&self, seen: &mut ChangesSeen, places: &mut Vec<u32>) -> bool {
        let before = seen.0;
        *seen = self.seen();
        // Also where it has seen another table's.
        if seen.0.wrapping_sub(before) >= LOGGED {
            return false;
        }
        // Relaxed: each is whole, and the count read again says whether it is still the one that was meant.
        places.extend((before..seen.0).map(|change| self.of(change).load(Ordering::Relaxed)));
        true
    }

    /// Whether no place was overwritten that was read before this call, of the changes from `before` on.
    fn still_logged(&self, before: u64) -> bool {
        // Acquire fence: pairs with OVERWRITE.
        fence(Ordering::Acquire);
        // The place of the change after the last that was counted may be written already.
        self.count.load(Ordering::Relaxed) - before < LOGGED
    }
}

/// A reader beside the writer, under every order of accesses that the memory model allows:
/// `RUSTFLAGS="--cfg kvrouted_loom" cargo test --lib --release load::changes`
#[cfg(all(test, kvrouted_loom))]
mod loom {
    use std::sync::Arc;

    use super::*;

    /// How the writer notes a change, and how the reader looks at the count again.
    struct Model {
        note: fn(&ChangeLog, u32),
        still_logged: fn(&ChangeLog, u64) -> bool,
    }

    const SOUND: Model = Model { note: ChangeLog::note, still_logged: ChangeLog::still_logged };

    impl Model {
        /// One asks what changed while more changes are made than are kept.
        fn check(self) {
            let told = Arc::new(Counter::new(0));
            let noted = Arc::clone(&told);
            ::loom::model(move || {
                let changes = Arc::new(ChangeLog::new());
                let (shared, before) = (Arc::clone(&changes), changes.seen().0);
                let reader = ::loom::thread::spawn(move || {
                    let (mut seen, mut places) = (ChangesSeen(before), Vec::new());
                    let is_told = shared.copy(&mut seen, &mut places) && (self.still_logged)(&shared, before);
                    is_told.then(|| (seen.0 - before, places))
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
    fn a_reader_that_is_overtaken_says_so() {
        SOUND.check();
    }

    #[test]
    #[should_panic(expected = "of later changes")]
    fn without_a_second_look_it_is_told_later_changes() {
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
    fn what_changed_is_told_once_and_too_much_at_once_is_said_to_be() {
        let (changes, mut seen, mut places) = (ChangeLog::new(), ChangesSeen::default(), Vec::new());
        assert!(!changes.since(&mut seen, &mut places) && places.is_empty(), "of another table");
        assert!(changes.since(&mut seen, &mut places) && places.is_empty());
        [7, 3, 7].into_iter().for_each(|place| changes.note(place));
        assert!(changes.since(&mut seen, &mut places));
        assert!(changes.since(&mut seen, &mut places));
        assert_eq!(places, [7, 3, 7]);
        (1..LOAD_CHANGES_KEPT).for_each(|_| changes.note(1));
        places.clear();
        assert!(changes.since(&mut seen, &mut places));
        assert_eq!(places.len() as u64, LOAD_CHANGES_KEPT - 1);
        (0..LOAD_CHANGES_KEPT).for_each(|_| changes.note(1));
        assert!(!changes.since(&mut seen, &mut places));
        assert_eq!(seen, changes.seen(), "all are read again, and none of these is told later");
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
