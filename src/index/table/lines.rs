//! The lines of one table, of a size that does not change, and the search in them.

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

/// A table of a fixed size.
#[derive(Debug)]
pub(in crate::index) struct Table {
    lines: Box<[Line]>,
    /// One less than the number of lines, a power of two.
    mask: usize,
    /// How far the hash of a key is shifted to give an index: left past the bits that chose the segment, then right.
    shifts: [u32; 2],
    keys: Keys,
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

impl Table {
    /// An empty table of `lines` lines, a power of two and at least two, as one of `1 << segment_bits` segments.
    pub(super) fn new(lines: usize, keys: Keys, segment_bits: u32) -> Self {
        debug_assert!(lines.is_power_of_two() && lines >= 2);
        Self { lines: allocate(lines), mask: lines - 1, shifts: [segment_bits, 64 - lines.ilog2()], keys }
    }

    pub(super) fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// A line by its index; indexes go round.
    #[inline]
    pub(super) fn line(&self, index: usize) -> &Line {
        &self.lines[index & self.mask]
    }

    /// Where the search for a key with this hash begins.
    #[inline]
    fn home(&self, hash: u64) -> usize {
        let [left, right] = self.shifts;
        (hash << left >> right) as usize
    }

    /// The indexes that a search visits, each line once.
    pub(super) fn path(&self, parent: u32, first: u64, variant: u8) -> impl Iterator<Item = usize> + use<> {
        let (home, mask) = (self.home(self.keys.hash(parent, first, variant)), self.mask);
        (0..=mask).map(move |step| (home + step) & mask)
    }

    /// Looks for a node, in a table of which there is only this segment.
    #[cfg(test)]
    pub(in crate::index) fn find(&self, parent: u32, first: u64, variant: u8) -> Found<&Line> {
        self.find_by(self.keys.hash(parent, first, variant), parent, first, variant)
    }

    /// Looks for a node whose key has this hash.
    #[inline]
    pub(super) fn find_by(&self, hash: u64, parent: u32, first: u64, variant: u8) -> Found<&Line> {
        let home = self.home(hash);
        for step in 0..=self.mask {
            let line = self.line(home + step);
            match line.probe(parent, first, variant) {
                Probe::Other => {}
                Probe::Here(version, header) => return Found::Here(line, version, header),
                Probe::Empty => return Found::Missing,
                Probe::Busy => return Found::Busy,
            }
        }
        // No table is full; the writer was faster than this search all the way round.
        Found::Busy
    }

    /// The index of one of its lines.
    #[inline]
    pub(super) fn index(&self, line: &Line) -> u32 {
        let bytes = std::ptr::from_ref(line).addr() - self.lines.as_ptr().addr();
        (bytes / size_of::<Line>()) as u32
    }

    /// The version of a line, to compare with one read before.
    #[inline]
    pub(super) fn version(&self, index: u32) -> u32 {
        self.line(index as usize).version()
    }

    /// Hints that a node whose key has this hash will be looked for.
    #[inline]
    pub(super) fn prefetch(&self, hash: u64) {
        let line = self.line(self.home(hash));
        prefetch(std::ptr::from_ref(line).cast());
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
