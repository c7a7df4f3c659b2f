//! What readers hold: the way to the segments of the moment.

use super::lines::{self, Found, Keys, Table, Word};
use super::{LINE_BITS, segment_of};
use crate::index::header::Line;
use crate::index::reclaim::{Guard, Reclaimer};
use crate::index::sync::{Arc, AtomicPtr, AtomicU64, Ordering, fence};

/// The segments of the moment, and how often one was replaced.
///
/// A segment is one [`Word`]: a search goes from here to the line that it wants, with nothing to be followed between.
#[derive(Debug)]
pub(in crate::index) struct Head {
    words: Box<[AtomicPtr<Line>]>,
    segment_bits: u32,
    keys: Keys,
    generation: AtomicU64,
}

impl Head {
    /// `1 << segment_bits` empty segments, each of `lines` lines.
    pub(super) fn new(segment_bits: u32, lines: usize, keys: Keys) -> Self {
        let words = (0..1 << segment_bits).map(|_| AtomicPtr::new(lines::new(lines))).collect();
        Self { words, segment_bits, keys, generation: AtomicU64::new(0) }
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

    /// The lines of a segment at the moment.
    ///
    /// # Safety
    ///
    /// Lines that are replaced while the borrow lasts must not be freed before the borrow ends.
    #[inline]
    pub(super) unsafe fn segment(&self, segment: usize) -> Table<'_> {
        // SWING: pairs with the Release store in `replace`; SeqCst for the grace period (see the module).
        let word = self.words[segment].load(Ordering::SeqCst);
        // SAFETY: all words here come from `lines::new`, and by the promise above the lines are not freed.
        unsafe { Table::of(word, self.segment_bits, self.keys) }
    }

    /// The lines of the only segment.
    ///
    /// # Safety
    ///
    /// As [`segment`](Self::segment).
    #[cfg(all(test, kvrouted_loom))]
    pub(in crate::index) unsafe fn table(&self) -> Table<'_> {
        // SAFETY: the caller's, word for word.
        unsafe { self.segment(0) }
    }

    /// Shows readers other lines in place of those of a segment, complete, and gives back those before. Only the writer
    /// calls this.
    pub(super) fn replace(&self, segment: usize, fresh: Word) -> Word {
        let place = &self.words[segment];
        // Relaxed, all three: the writer reads what it wrote, and the fence orders the store.
        let old = place.load(Ordering::Relaxed);
        let generation = self.generation.load(Ordering::Relaxed);
        self.generation.store(generation + 1, Ordering::Relaxed);
        // SHIFT: who has loaded the new word is shown an odd generation or a later one.
        fence(Ordering::Release);
        // SWING: pairs with the load in `segment`.
        place.store(fresh, Ordering::Release);
        // GROWTH: pairs with the load in `generation`.
        self.generation.store(generation + 2, Ordering::Release);
        old
    }
}

impl Drop for Head {
    fn drop(&mut self) {
        for word in &self.words {
            // Relaxed: dropped by the last of those who share it, after all others let it go.
            let word = word.load(Ordering::Relaxed);
            // SAFETY: what is in the head came from `lines::new` and is nobody else's: borrows of the lines are
            // also borrows of the head.
            unsafe { lines::free(word) };
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

/// The segments of a table, for a reader who is inside. Each search goes to the lines of the moment; whether some were
/// replaced in the course of a walk is told by the generation.
#[derive(Clone, Copy, Debug)]
pub(in crate::index) struct Segments<'a> {
    head: &'a Head,
}

impl<'a> Segments<'a> {
    #[inline]
    fn table(self, segment: usize) -> Table<'a> {
        // SAFETY: lines that are replaced are freed by the reclaimer, which waits for the guard that was shown to `load`.
        unsafe { self.head.segment(segment) }
    }

    /// The lines where a key with this hash may be, and which segment they are.
    #[inline]
    fn of(self, hash: u64) -> (usize, Table<'a>) {
        let segment = segment_of(hash, self.head.segment_bits);
        (segment, self.table(segment))
    }

    /// Looks for a node.
    #[inline]
    pub(in crate::index) fn find(self, parent: u32, first: u64, variant: u8) -> Found<u32> {
        let hash = self.head.keys.hash(parent, first, variant);
        let (segment, table) = self.of(hash);
        match table.find_by(hash, parent, first, variant) {
            Found::Here(at, version, header) => Found::Here((segment << LINE_BITS | at) as u32, version, header),
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
        self.of(hash).1.prefetch(hash);
    }
}
