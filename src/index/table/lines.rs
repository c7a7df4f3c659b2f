//! The lines of one table, of a size that does not change, and the search in them.

use crate::index::header::{Header, Line, Probe};
use crate::index::prefetch::prefetch;

/// What a search finds.
pub(in crate::index) enum Found<'a> {
    /// The node: its line, and its header as of a version of that line.
    Here(&'a Line, u32, Header),
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
    /// How far a mixed key is shifted to give an index.
    shift: u32,
    keys: [u64; 2],
}

impl Table {
    /// An empty table of `lines` lines, a power of two and at least two.
    pub(super) fn new(lines: usize, secret: u64) -> Self {
        debug_assert!(lines.is_power_of_two() && lines >= 2);
        let keys = [expand(secret), expand(secret ^ 0x6a09_e667_f3bc_c909)];
        Self { lines: allocate(lines), mask: lines - 1, shift: 64 - lines.ilog2(), keys }
    }

    pub(super) fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// A line by its index; indexes go round.
    #[inline]
    pub(super) fn line(&self, index: usize) -> &Line {
        &self.lines[index & self.mask]
    }

    /// Where the search for a key begins.
    ///
    /// The secret's two halves hide both factors, so who knows the hash function but not the secret cannot
    /// choose keys that meet; one folded product and one multiplication spread what is left of the structure
    /// of ids given out in order.
    #[inline]
    fn home(&self, parent: u32, first: u64, variant: u8) -> usize {
        let place = u64::from(variant) << 32 | u64::from(parent);
        let product = u128::from(first ^ self.keys[0]) * u128::from(place ^ self.keys[1]);
        let folded = (product >> 64) as u64 ^ product as u64;
        (folded.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }

    /// The indexes that a search visits, each line once.
    pub(super) fn path(&self, parent: u32, first: u64, variant: u8) -> impl Iterator<Item = usize> + use<> {
        let (home, mask) = (self.home(parent, first, variant), self.mask);
        (0..=mask).map(move |step| (home + step) & mask)
    }

    /// Looks for a node.
    #[inline]
    pub(in crate::index) fn find(&self, parent: u32, first: u64, variant: u8) -> Found<'_> {
        let home = self.home(parent, first, variant);
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
    pub(in crate::index) fn index(&self, line: &Line) -> u32 {
        let bytes = std::ptr::from_ref(line).addr() - self.lines.as_ptr().addr();
        (bytes / size_of::<Line>()) as u32
    }

    /// The version of a line, to compare with one read before.
    #[inline]
    pub(in crate::index) fn version(&self, index: u32) -> u32 {
        self.line(index as usize).version()
    }

    /// Hints that a node will be looked for.
    #[inline]
    pub(in crate::index) fn prefetch(&self, parent: u32, first: u64, variant: u8) {
        let line = self.line(self.home(parent, first, variant));
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
