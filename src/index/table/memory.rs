//! The memory of a table: rows of cache lines, each known by one word that has its address and the number of lines of
//! its segment. So readers get both by one load.

#![expect(unsafe_code, reason = "rows are freed by their addresses")]

use super::super::row_pool::Rows;
use super::tags::TagLine;
use super::{LINE_BITS, Line};

/// Bits of an address that the alignment of lines leaves free.
const SHIFT_MASK: usize = align_of::<Line>() - 1;

const _: () = assert!(SHIFT_MASK == (u64::BITS - 1) as usize, "every shift of a hash has room beside the address");
const _: () = assert!(align_of::<TagLine>() == align_of::<Line>(), "both leave the same bits free");

/// The address of the lines of a segment, or of their tags. The low bits are the number by which a hash is shifted so that
/// its highest bits name a line: 64, less the number of lines as a power of two.
#[derive(Debug)]
pub(super) struct Word<T>(pub(super) *mut T);

impl<T> Clone for Word<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Word<T> {}

impl<T> Word<T> {
    fn new(start: *mut T, lines: usize) -> Self {
        debug_assert!(lines.is_power_of_two() && lines >= 2 && lines.ilog2() <= LINE_BITS);
        Self(start.map_addr(|address| address | (u64::BITS - lines.ilog2()) as usize))
    }

    #[inline(always)]
    pub(super) fn start(self) -> *mut T {
        self.0.map_addr(|address| address & !SHIFT_MASK)
    }

    #[inline(always)]
    fn shift(self) -> u32 {
        (self.0.addr() & SHIFT_MASK) as u32
    }

    /// The line that the highest bits of a hash name.
    #[inline(always)]
    pub(super) fn home(self, hash: u64) -> usize {
        (hash >> self.shift()) as usize
    }

    /// The number of lines of the segment, less one.
    #[inline(always)]
    pub(super) fn mask(self) -> usize {
        (u64::MAX >> self.shift()) as usize
    }

    /// The number of lines of the segment, a power of two.
    #[inline]
    pub(super) fn count(self) -> usize {
        self.mask() + 1
    }
}

/// The lines of a segment and their tags.
#[derive(Clone, Copy, Debug)]
pub(super) struct SegmentMemory {
    pub(super) lines: Word<Line>,
    pub(super) tags: Word<TagLine>,
}

impl SegmentMemory {
    /// Bytes of a segment of this many lines.
    pub(super) const fn bytes(lines: usize) -> u64 {
        ((lines + TagLine::count(lines)) * size_of::<Line>()) as u64
    }
}

/// Where segments have their memory from. All segments of one table come from it, retired ones too.
#[derive(Clone, Debug)]
pub(super) struct LineMemory {
    /// None under the model checker, which follows each line.
    #[cfg_attr(all(test, kvrouted_loom), expect(dead_code, reason = "lines are made one by one"))]
    pub(super) rows: Rows,
}

impl LineMemory {
    /// Empty lines, a power of two and at least two, and their tags. [`free`](Self::free) frees them.
    #[cfg(not(all(test, kvrouted_loom)))]
    pub(super) fn allocate(&self, lines: usize) -> SegmentMemory {
        // A row is zeroed memory, and a line is eight `AtomicU64`, as is a line of tags. All bits zero is a valid value
        // of these.
        let row = |lines| self.rows.allocate(lines).start().as_ptr();
        SegmentMemory {
            lines: Word::new(row(lines).cast(), lines),
            tags: Word::new(row(TagLine::count(lines)).cast(), lines),
        }
    }

    /// Frees a segment.
    ///
    /// # Safety
    ///
    /// It came from [`allocate`](Self::allocate) of this memory, is freed once, and no thread uses its lines any more.
    #[cfg(not(all(test, kvrouted_loom)))]
    pub(super) unsafe fn free(&self, SegmentMemory { lines, tags }: SegmentMemory) {
        let parts =
            [(lines.start().cast::<u8>(), lines.count()), (tags.start().cast::<u8>(), TagLine::count(tags.count()))];
        for (start, lines) in parts {
            if let Some(start) = std::ptr::NonNull::new(start) {
                // SAFETY: `Word::new` put the address and the number together; the rest is the caller's promise.
                unsafe { self.rows.free_at(start, lines) };
            }
        }
    }

    #[cfg(all(test, kvrouted_loom))]
    pub(super) fn allocate(&self, lines: usize) -> SegmentMemory {
        fn made<T>(count: usize, new: fn() -> T) -> *mut T {
            Box::into_raw((0..count).map(|_| new()).collect::<Box<[T]>>()).cast()
        }
        SegmentMemory {
            lines: Word::new(made(lines, Line::new), lines),
            tags: Word::new(made(TagLine::count(lines), TagLine::new), lines),
        }
    }

    /// # Safety
    ///
    /// As without the model checker.
    #[cfg(all(test, kvrouted_loom))]
    pub(super) unsafe fn free(&self, SegmentMemory { lines, tags }: SegmentMemory) {
        let (of_lines, of_tags) = (lines.count(), TagLine::count(tags.count()));
        let lines = std::ptr::slice_from_raw_parts_mut(lines.start(), of_lines);
        let tags = std::ptr::slice_from_raw_parts_mut(tags.start(), of_tags);
        // SAFETY: `Word::new` put the address and the number together; by the caller's promise this is the only call
        // for them.
        drop(unsafe { (Box::from_raw(lines), Box::from_raw(tags)) });
    }
}
