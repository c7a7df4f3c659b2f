//! The lines of one segment, of a number that does not change, and the search in them.

#![expect(unsafe_code, reason = "a segment is kept as one word: the address of its lines and how many there are")]

use super::LINE_BITS;
use crate::index::header::{Header, Line, Probe};
use crate::index::prefetch::prefetch;

/// What a search finds; `P` says where a line is.
pub(in crate::index) enum Found<P> {
    /// The node: its line, and its header as of a version of that line.
    Here(P, u32, Header),
    /// At some moment during the search it was not there.
    Missing,
    /// What may be the node is being changed: try again.
    Busy,
}

/// What the hash of a key is mixed with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keys([u64; 2]);

impl Keys {
    pub(super) fn new(secret: u64) -> Self {
        Self([expand(secret), expand(secret ^ 0x6a09_e667_f3bc_c909)])
    }

    /// The hash of a key; its highest bits choose the segment.
    ///
    /// The secret's two halves hide both factors, so who knows the hash function but not the secret cannot
    /// choose keys that meet; one folded product and one multiplication spread what is left of the structure
    /// of ids given out in order.
    #[inline]
    pub(super) fn hash(self, parent: u32, first: u64, variant: u8) -> u64 {
        let place = u64::from(variant) << 32 | u64::from(parent);
        let product = u128::from(first ^ self.0[0]) * u128::from(place ^ self.0[1]);
        let folded = (product >> 64) as u64 ^ product as u64;
        folded.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// Bits of an address that the alignment of lines leaves free. They say how many lines there are, as a power of two.
const SIZE_MASK: usize = align_of::<Line>() - 1;

const _: () = assert!(LINE_BITS as usize <= SIZE_MASK, "every size has room beside the address");

/// The address of the lines of a segment with their number in its low bits: readers get both by one load.
pub(super) type Word = *mut Line;

/// Empty lines, a power of two and at least two, as one word. [`free`] takes it.
pub(super) fn new(lines: usize) -> Word {
    debug_assert!(lines.is_power_of_two() && lines >= 2 && lines.ilog2() <= LINE_BITS);
    Box::into_raw(allocate(lines)).cast::<Line>().map_addr(|address| address | lines.ilog2() as usize)
}

/// How many lines a word is of.
#[inline]
pub(super) fn len(word: Word) -> usize {
    1 << (word.addr() & SIZE_MASK)
}

/// Gives the lines of a word back.
///
/// # Safety
///
/// The word came from [`new`], is given back once, and nobody uses the lines any more.
pub(super) unsafe fn free(word: Word) {
    let lines = std::ptr::slice_from_raw_parts_mut(word.map_addr(|address| address & !SIZE_MASK), len(word));
    // SAFETY: the address and the number that `new` put together, by the caller's promise for the only time.
    drop(unsafe { Box::from_raw(lines) });
}

/// The lines of a segment.
#[derive(Clone, Copy, Debug)]
pub(in crate::index) struct Table<'a> {
    /// A power of two of them.
    lines: &'a [Line],
    /// Highest bits of a hash that chose the segment.
    segment_bits: u32,
    keys: Keys,
}

impl<'a> Table<'a> {
    /// The lines of a word, as one of `1 << segment_bits` segments.
    ///
    /// # Safety
    ///
    /// The word came from [`new`], and is not given to [`free`] for as long as the borrow lasts.
    #[inline]
    pub(super) unsafe fn of(word: Word, segment_bits: u32, keys: Keys) -> Self {
        let start = word.map_addr(|address| address & !SIZE_MASK);
        // SAFETY: the address and the number that `new` put together; the lines live as the caller promises, and are
        // only changed by their atomics.
        let lines = unsafe { std::slice::from_raw_parts(start, len(word)) };
        Self { lines, segment_bits, keys }
    }

    pub(super) const fn lines(self) -> &'a [Line] {
        self.lines
    }

    /// A line by its index; indexes go round.
    #[inline]
    pub(super) fn line(self, index: usize) -> &'a Line {
        &self.lines[index & (self.lines.len() - 1)]
    }

    /// Where the search for a key with this hash begins, before indexes go round.
    #[inline]
    const fn home(self, hash: u64) -> usize {
        // Past the bits that chose the segment; then the highest that are left.
        (hash << self.segment_bits >> (u64::BITS - self.lines.len().ilog2())) as usize
    }

    /// The indexes that a search visits, each line once.
    pub(super) fn path(self, parent: u32, first: u64, variant: u8) -> impl Iterator<Item = usize> + use<> {
        let (home, mask) = (self.home(self.keys.hash(parent, first, variant)), self.lines.len() - 1);
        (0..=mask).map(move |step| (home + step) & mask)
    }

    /// Looks for a node, in a table of which there is only this segment.
    #[cfg(test)]
    pub(in crate::index) fn find(self, parent: u32, first: u64, variant: u8) -> Found<&'a Line> {
        match self.find_by(self.keys.hash(parent, first, variant), parent, first, variant) {
            Found::Here(at, version, header) => Found::Here(self.line(at), version, header),
            Found::Missing => Found::Missing,
            Found::Busy => Found::Busy,
        }
    }

    /// Looks for a node whose key has this hash; says where its line is.
    #[inline]
    pub(super) fn find_by(self, hash: u64, parent: u32, first: u64, variant: u8) -> Found<usize> {
        let (home, mask) = (self.home(hash), self.lines.len() - 1);
        for step in 0..=mask {
            let at = (home + step) & mask;
            match self.lines[at].probe(parent, first, variant) {
                Probe::Other => {}
                Probe::Here(version, header) => return Found::Here(at, version, header),
                Probe::Empty => return Found::Missing,
                Probe::Busy => return Found::Busy,
            }
        }
        // No table is full; the writer was faster than this search all the way round.
        Found::Busy
    }

    /// The version of a line, to compare with one read before.
    #[inline]
    pub(super) fn version(self, index: u32) -> u32 {
        self.line(index as usize).version()
    }

    /// Hints that a node whose key has this hash will be looked for.
    #[inline]
    pub(super) fn prefetch(self, hash: u64) {
        prefetch(std::ptr::from_ref(self.line(self.home(hash))).cast());
    }
}

/// A key made of a secret: SplitMix64's output function.
fn expand(secret: u64) -> u64 {
    let mut key = secret.wrapping_add(0x9e37_79b9_7f4a_7c15);
    key = (key ^ key >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    key = (key ^ key >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    key ^ key >> 31
}

/// Empty lines. Zeroed memory is; the operating system gives its pages when they are first written.
#[cfg(not(all(test, kvrouted_loom)))]
fn allocate(lines: usize) -> Box<[Line]> {
    let zeroed = Box::<[Line]>::new_zeroed_slice(lines);
    // SAFETY: a line is eight `AtomicU64`, for which all bits zero is a value.
    unsafe { zeroed.assume_init() }
}

#[cfg(all(test, kvrouted_loom))]
fn allocate(lines: usize) -> Box<[Line]> {
    (0..lines).map(|_| Line::new()).collect()
}
