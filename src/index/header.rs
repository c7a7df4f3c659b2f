//! A node's header: all that a walk needs to know of one edge, in one cache line that readers copy whole. And the
//! overflow record beside it, where its holder bits do not fit.
//!
//! # The line
//!
//! A [`Line`] is eight words. Word 0 is the version (low half; odd while the line is being changed) and the parent
//! (high half), so one load says which node the line may hold and whether it can be read. One thread writes.
//!
//! | word | bits 63..32            | bits 31..0                          |
//! |------|------------------------|-------------------------------------|
//! | 0    | parent, complemented   | version                             |
//! | 1    | first                  | first                               |
//! | 2    | id                     | base                                |
//! | 3    | (0), partials_len 8    | flags 8, variant 8, len 16          |
//! | 4    | mask                   | mask                                |
//! | 5, 6 | two partials each: cut 16, holder 16, twice                  ||
//! | 7    | overflow               | overflow                            |
//!
//! The parent is complemented so that zeroed memory is a table of empty lines.
//!
//! # Orderings
//!
//! The seqlock of a line, writer on the left. It is not a [`SeqWord`](crate::sync::SeqWord): the version shares its
//! word with the key's parent, and the load that begins a read is SeqCst.
//!
//! | tag     | writer                                        | reader                                     |
//! |---------|-----------------------------------------------|--------------------------------------------|
//! | CLOSE   | Release store of word 0, even                 | load of word 0 that begins a read          |
//! | OPEN    | Relaxed store of word 0, odd, then a Release fence | Acquire fence, then the reload of word 0 |
//!
//! * CLOSE: a reader that begins with version `v` sees the words of `v` or later, and everything that the writer did
//!   before it closed `v`: the other lines that it published first, the blocks that the header names.
//! * OPEN: a reader that has met a word of a later version than `v` finds word 0 changed when it loads it again. The
//!   fence after the odd store comes before that word's store, and the reader's fence comes after that word's load. So
//!   a read whose two loads of word 0 agree is of one version.
//! * The load that begins a read is SeqCst, although Acquire would do for CLOSE. SeqCst is needed for the grace period
//!   where the operating system has no process-wide barrier. `seize` then enters by a SeqCst store and retires behind a
//!   SeqCst fence, and a thread that the retiring writer saw as absent must not begin a read with the old word. On
//!   x86-64 and AArch64 it is the same instruction.
//!
//! Everything between is Relaxed and needs no partner: the two tags order it.
//!
//! A version never repeats within 2^31 changes of its line. A line that was emptied and is used again goes on counting.

use super::holders::{HolderBit, HolderBits, HolderState, Layer};
use super::node::{Bits, Entry, Node, NodeId};
use crate::sync::{AtomicU64, Ordering, fence};

/// Partially covering holder bits that fit in a header.
const PARTIALS_MAX: usize = 4;
/// The parent in an unused line at which a search ends.
pub(super) const PARENT_EMPTY: u32 = u32::MAX;
/// The parent in an unused line over which a search goes on.
pub(super) const PARENT_TOMBSTONE: u32 = u32::MAX - 1;
/// The greatest id that a parent can have.
const PARENT_MAX: u32 = u32::MAX - 2;
/// [`Header::flags`]: other variants of this key may exist.
pub(super) const FORKED: u8 = 1 << 0;
/// [`Header::flags`]: the node has no children.
pub(super) const LEAF: u8 = 1 << 1;
/// [`Header::flags`]: from this bit on, the number of other variants of this key.
const FORKS_SHIFT: u32 = 2;
/// The greatest number that is counted there; there may be more variants.
const FORKS_MANY: u8 = u8::MAX >> FORKS_SHIFT;

/// A holder bit that covers the first `cut` blocks of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Partial {
    pub(super) holder: u16,
    /// Blocks of the node, from its first.
    pub(super) cut: u16,
}

impl Partial {
    fn pack(self) -> u64 {
        u64::from(self.cut) << 16 | u64::from(self.holder)
    }

    /// From the low 32 bits.
    fn unpack(bits: u64) -> Self {
        Self { holder: bits as u16, cut: (bits >> 16) as u16 }
    }
}

/// All that a walk knows of one node.
///
/// Without padding: a copy of padding beside a byte that was just written waits for the write, and a walk copies one of
/// these for each edge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Header {
    /// The node's first local hash (key).
    pub(super) first: u64,
    /// Which of the holder bits 0..64 cover all of the node.
    pub(super) mask: u64,
    /// Other holder bits: covering a part, or beyond 64; as many as a line has room for, as in words 5 and 6. Only the
    /// first `partials_len` are meaningful.
    pub(super) partials: [u64; 2],
    /// Number of `partials` in use, at most [`PARTIALS_MAX`].
    pub(super) partials_len: u64,
    /// 0, or the address of the [`Overflow`] record.
    pub(super) overflow: u64,
    /// The node above (key), at most [`PARENT_MAX`].
    pub(super) parent: u32,
    /// The node's own id: the parent of its children.
    pub(super) id: u32,
    /// Where the node's local hashes begin in the arena, in words.
    pub(super) base: u32,
    /// Blocks of the node.
    pub(super) len: u16,
    /// Which of the nodes that begin with `first` below `parent` (key).
    pub(super) variant: u8,
    /// [`FORKED`], [`LEAF`] and others.
    pub(super) flags: u8,
}

const _: () = assert!(size_of::<Header>() == 64, "there is no padding");

impl Header {
    /// Other holder bits that it shows: those that cover a part, or are beyond 64.
    #[inline]
    pub(super) fn partials(&self) -> impl Iterator<Item = Partial> + use<> {
        let [low, high] = self.partials;
        let packed = u128::from(high) << 64 | u128::from(low);
        (0..PARTIALS_MAX.min(self.partials_len as usize)).map(move |at| Partial::unpack((packed >> (32 * at)) as u64))
    }

    /// Shows one more of them; `false` if there is no room.
    fn push_partial(&mut self, partial: Partial) -> bool {
        let at = self.partials_len as usize;
        let Some(two) = self.partials.get_mut(at / 2) else { return false };
        *two |= partial.pack() << (at % 2 * 32);
        self.partials_len += 1;
        true
    }

    /// The flags for a number of other variants of a key.
    pub(super) const fn forked(forks: u8) -> u8 {
        let counted = if forks > FORKS_MANY { FORKS_MANY } else { forks };
        if forks > 0 { FORKED | counted << FORKS_SHIFT } else { 0 }
    }

    /// Other variants of this key, at least for as long as the header is shown.
    pub(super) const fn forks(&self) -> u8 {
        match self.flags >> FORKS_SHIFT {
            FORKS_MANY => u8::MAX,
            counted => counted,
        }
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Whether this is the node of the key.
    pub(super) fn is_at(&self, parent: u32, first: u64, variant: u8) -> bool {
        self.parent == parent && self.first == first && self.variant == variant
    }

    /// Words 1 to 7.
    fn pack(&self) -> [u64; 7] {
        let small =
            self.partials_len << 32 | u64::from(self.flags) << 24 | u64::from(self.variant) << 16 | u64::from(self.len);
        [
            self.first,
            u64::from(self.id) << 32 | u64::from(self.base),
            small,
            self.mask,
            self.partials[0],
            self.partials[1],
            self.overflow,
        ]
    }

    fn unpack(parent: u32, words: [u64; 7]) -> Self {
        let [first, place, small, mask, low, high, overflow] = words;
        Self {
            parent,
            variant: variant_of(small),
            first,
            id: (place >> 32) as u32,
            len: small as u16,
            base: place as u32,
            flags: (small >> 24) as u8,
            mask,
            partials: [low, high],
            partials_len: small >> 32,
            overflow,
        }
    }
}

/// The variant in word 3.
fn variant_of(small: u64) -> u8 {
    (small >> 16) as u8
}

fn word_0(version: u32, parent: u32) -> u64 {
    u64::from(!parent) << 32 | u64::from(version)
}

fn version_of(word_0: u64) -> u32 {
    word_0 as u32
}

fn parent_of(word_0: u64) -> u32 {
    !((word_0 >> 32) as u32)
}

/// The version after `word_0`'s, of the same parent.
fn next_version(word_0: u64) -> u64 {
    self::word_0(version_of(word_0).wrapping_add(1), parent_of(word_0))
}

/// Whether `word_0` is of a line that is being changed.
fn is_open(word_0: u64) -> bool {
    word_0 & 1 == 1
}

/// The result of a search in one line.
pub(super) enum Probe {
    /// Another node, or none.
    Other,
    /// The node, as of a version.
    Here(u32, Header),
    /// The line may hold the node, and is being changed.
    Busy,
}

/// One cache line: the version and the header of a node, or an unused line.
#[repr(align(64))]
#[derive(Debug)]
pub(super) struct Line([AtomicU64; 8]);

impl Line {
    /// An empty line: zeroed memory, except under the model checker.
    #[cfg(test)]
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// The version and the header; `None` if the line is being changed, or was changed during the read.
    #[cfg(test)]
    #[inline]
    pub(super) fn read(&self) -> Option<(u32, Header)> {
        // CLOSE, and the grace period (see the module): pairs with the Release store in `close` and `vacate`.
        let word = self.0[0].load(Ordering::SeqCst);
        if is_open(word) { None } else { self.read_from(word) }
    }

    /// The rest of a read that began with `word`.
    #[inline]
    fn read_from(&self, word: u64) -> Option<(u32, Header)> {
        // Relaxed: CLOSE makes them no older than `word`, OPEN below shows if one is newer.
        let words = std::array::from_fn(|at| self.0[at + 1].load(Ordering::Relaxed));
        self.is_still(word).then(|| (version_of(word), Header::unpack(parent_of(word), words)))
    }

    /// Whether everything read of the line before this call belongs to `word`.
    #[inline]
    fn is_still(&self, word: u64) -> bool {
        // OPEN: this fence and the load behind it pair with the store and the fence in `open`.
        fence(Ordering::Acquire);
        self.0[0].load(Ordering::Relaxed) == word
    }

    /// The current version, odd while the line is being changed.
    ///
    /// For a line that was read at version `v`, an equal version says that the line has not changed since. If all lines
    /// of a walk pass, there was a moment at which all were as read. The one writer changes one line after the other,
    /// and a read of the later change shows the earlier change here: CLOSE publishes all that came before, and the
    /// fence keeps this load behind the reads.
    #[inline]
    pub(super) fn version(&self) -> u32 {
        // OPEN: as in `is_still`.
        fence(Ordering::Acquire);
        version_of(self.0[0].load(Ordering::Relaxed))
    }

    /// The key (parent, first, variant) of the node in this line, if there is one and it is not being changed.
    #[cfg(test)]
    #[inline]
    pub(super) fn key(&self) -> Option<(u32, u64, u8)> {
        // CLOSE: as in `read`.
        let word = self.0[0].load(Ordering::SeqCst);
        if is_open(word) || parent_of(word) > PARENT_MAX {
            return None;
        }
        // Relaxed: as in `read_from`.
        let (first, small) = (self.0[1].load(Ordering::Relaxed), self.0[3].load(Ordering::Relaxed));
        self.is_still(word).then(|| (parent_of(word), first, variant_of(small)))
    }

    /// Searches this line for the key.
    #[inline]
    pub(super) fn probe(&self, parent: u32, first: u64, variant: u8) -> Probe {
        // CLOSE: as in `read`.
        let word = self.0[0].load(Ordering::SeqCst);
        if parent_of(word) != parent {
            return Probe::Other;
        }
        // Relaxed: if they are newer than `word`, then the node of `word` is gone, and "not here" was true when it
        // went; if they are the key's, `read_from` checks again.
        let (here, small) = (self.0[1].load(Ordering::Relaxed), self.0[3].load(Ordering::Relaxed));
        if here != first || variant_of(small) != variant {
            // The key does not change while the line is open, except from none to a node's.
            return if !is_open(word) || self.is_still(word) { Probe::Other } else { Probe::Busy };
        }
        if is_open(word) {
            return Probe::Busy;
        }
        match self.read_from(word) {
            Some((version, header)) if header.is_at(parent, first, variant) => Probe::Here(version, header),
            _ => Probe::Busy,
        }
    }

    /// The parent, or one of the two values of unused lines. For the writer.
    pub(super) fn parent(&self) -> u32 {
        // Relaxed: the writer reads what it wrote.
        parent_of(self.0[0].load(Ordering::Relaxed))
    }

    /// The header, open or not. For the writer.
    pub(super) fn header(&self) -> Header {
        // Relaxed, here and in the line above: the writer reads what it wrote.
        Header::unpack(self.parent(), std::array::from_fn(|at| self.0[at + 1].load(Ordering::Relaxed)))
    }

    /// Whether the key (parent, first, variant) is in this line, open or not. For the writer.
    pub(super) fn is_at(&self, parent: u32, first: u64, variant: u8) -> bool {
        // Relaxed: the writer reads what it wrote.
        self.parent() == parent
            && self.0[1].load(Ordering::Relaxed) == first
            && variant_of(self.0[3].load(Ordering::Relaxed)) == variant
    }

    /// Whether the line is being changed. For the writer.
    pub(super) fn is_open(&self) -> bool {
        // Relaxed: the writer reads what it wrote.
        is_open(self.0[0].load(Ordering::Relaxed))
    }

    /// Begins a change: until [`close`](Self::close), no read succeeds, and no read that has begun before.
    pub(super) fn open(&self) {
        // Relaxed: the writer reads what it wrote.
        let word = self.0[0].load(Ordering::Relaxed);
        debug_assert!(!is_open(word), "a line is opened once");
        // OPEN: pairs with the fence and the reload in `is_still` and `version`.
        self.0[0].store(next_version(word), Ordering::Relaxed);
        fence(Ordering::Release);
    }

    /// Changes an open line.
    pub(super) fn write(&self, header: &Header) {
        debug_assert!(header.parent <= PARENT_MAX && header.partials_len as usize <= PARTIALS_MAX);
        // Relaxed, here and below: a reader of any of these words reloads word 0 behind a fence (OPEN).
        let word = self.0[0].load(Ordering::Relaxed);
        debug_assert!(is_open(word), "only an open line is changed");
        for (at, value) in header.pack().into_iter().enumerate() {
            self.0[at + 1].store(value, Ordering::Relaxed);
        }
        if parent_of(word) != header.parent {
            self.0[0].store(word_0(version_of(word), header.parent), Ordering::Relaxed);
        }
    }

    pub(super) fn close(&self) {
        // Relaxed: the writer reads what it wrote.
        let word = self.0[0].load(Ordering::Relaxed);
        debug_assert!(is_open(word), "only an open line is closed");
        // CLOSE: pairs with the load that begins a read.
        self.0[0].store(next_version(word), Ordering::Release);
    }

    /// Replaces the header: [`open`](Self::open), [`write`](Self::write), [`close`](Self::close).
    pub(super) fn publish(&self, header: &Header) {
        self.open();
        self.write(header);
        self.close();
    }

    /// Shows that no holder bit covers the node any more; the rest of its header stays.
    pub(super) fn uncover(&self) {
        self.open();
        // Relaxed, all: as in `write`.
        let small = self.0[3].load(Ordering::Relaxed);
        self.0[3].store(small & u64::from(u32::MAX), Ordering::Relaxed);
        self.0[4].store(0, Ordering::Relaxed);
        self.0[7].store(0, Ordering::Relaxed);
        self.close();
    }

    /// Shows that the node has `len` blocks. Its only holder bit must have covered all of it, so there is one partial at
    /// most and no overflow record, and covers the new blocks too.
    pub(super) fn lengthen(&self, len: u16) {
        self.open();
        // Relaxed, all: as in `write`.
        let small = self.0[3].load(Ordering::Relaxed);
        self.0[3].store(small & !u64::from(u16::MAX) | u64::from(len), Ordering::Relaxed);
        if small >> 32 > 0 {
            let partial = Partial::unpack(self.0[5].load(Ordering::Relaxed));
            self.0[5].store(Partial { cut: len, ..partial }.pack(), Ordering::Relaxed);
        }
        self.close();
    }

    /// Removes the node from the line; `parent` is the value of an unused line to store. Closes the line if it was
    /// open.
    pub(super) fn vacate(&self, parent: u32) {
        debug_assert!(parent > PARENT_MAX);
        if !self.is_open() {
            self.open();
        }
        // Relaxed: the writer reads what it wrote.
        let version = version_of(self.0[0].load(Ordering::Relaxed));
        // CLOSE: pairs with the load that begins a read.
        self.0[0].store(word_0(version.wrapping_add(1), parent), Ordering::Release);
    }

    /// Copies `from`, whether open or not, into this line, which no reader knows yet.
    pub(super) fn copy_from(&self, from: &Self) {
        for (to, from) in self.0.iter().zip(&from.0) {
            // Relaxed: the writer reads what it wrote, and publishes the copy by a pointer.
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

/// Coverage that does not fit into a header line. Never changed: a new record replaces it.
#[derive(Debug, Default)]
pub(super) struct Overflow {
    /// Holder bits that cover all of the node, 64 to a word; those below 64 are in the header too.
    pub(super) full: Vec<u64>,
    /// Holder bits that cover the node up to a first gap.
    pub(super) partials: Vec<Partial>,
    /// Holder bits of lower tiers and windows with blocks beyond a gap: all blocks that they cover. A walk comes to
    /// them in the middle of an edge.
    pub(super) sparse: Vec<(HolderBit, Bits)>,
}

impl Overflow {
    pub(super) fn bytes(&self) -> u64 {
        let parts = self.full.capacity() * 8
            + self.partials.capacity() * size_of::<Partial>()
            + self.sparse.capacity() * size_of::<(HolderBit, Bits)>();
        (parts + size_of::<Self>()) as u64
    }
}

/// Holder bits that cover a part of a node, or are beyond 64 where there is no overflow record.
#[inline]
pub(super) fn partials<'a>(header: &Header, overflow: Option<&'a Overflow>) -> impl Iterator<Item = Partial> + use<'a> {
    // A header with an overflow record shows none.
    header.partials().chain(overflow.into_iter().flat_map(|overflow| overflow.partials.iter().copied()))
}

/// What a header shows of one entry.
enum Shown<'a> {
    Nothing,
    Full,
    Cut(u16),
    Sparse(&'a Bits),
}

fn shown<'a>(entry: &'a Entry, len: u16, holders: &HolderBits) -> Shown<'a> {
    let record = holders.record(entry.holder);
    match &entry.sparse {
        _ if record.state != HolderState::Shown => Shown::Nothing,
        Some(sparse) if record.layer != Layer::Device => Shown::Sparse(sparse),
        _ if entry.cut == len => Shown::Full,
        _ if entry.cut == 0 => Shown::Nothing,
        _ => Shown::Cut(entry.cut),
    }
}

/// The header of a node, with the address that `keep` gives for its overflow record, if the node needs one.
#[inline]
pub(super) fn encode(
    id: NodeId,
    node: &Node,
    holders: &HolderBits,
    keep: impl FnOnce(Option<Box<Overflow>>) -> u64,
) -> Header {
    // Made where the caller wants it: to copy it would wait for each of its small fields to be stored.
    let mut header = Header {
        parent: node.parent.0,
        variant: node.variant,
        first: node.first,
        id: id.0,
        len: node.len,
        base: node.locals.base,
        flags: Header::forked(node.forks) | if node.has_children() { 0 } else { LEAF },
        mask: 0,
        partials: [0; 2],
        partials_len: 0,
        overflow: 0,
    };
    for entry in &node.entries {
        let fits = match shown(entry, node.len, holders) {
            Shown::Nothing => true,
            Shown::Full if entry.holder.0 < 64 => {
                header.mask |= 1 << entry.holder.0;
                true
            }
            Shown::Full => header.push_partial(Partial { holder: entry.holder.0, cut: node.len }),
            Shown::Cut(cut) => header.push_partial(Partial { holder: entry.holder.0, cut }),
            Shown::Sparse(_) => false,
        };
        if !fits {
            // The line is full, so the record shows all entries, and the others need not be looked at here.
            let overflow = Box::new(overflow_of(node, holders));
            header.mask = overflow.full.first().copied().unwrap_or(0);
            header.partials_len = 0;
            header.overflow = keep(Some(overflow));
            return header;
        }
    }
    header.overflow = keep(None);
    header
}

fn overflow_of(node: &Node, holders: &HolderBits) -> Overflow {
    debug_assert!(node.entries.is_sorted_by_key(|entry| entry.holder), "in the order of holder bits");
    let words = node.entries.last().map_or(0, |last| usize::from(last.holder.0 / 64) + 1);
    let mut overflow = Overflow { full: vec![0; words], ..Overflow::default() };
    // The word of the last entry is kept in registers: to add to the one in memory would wait for the addition before.
    let (mut word, mut full) = (0, 0);
    for entry in &node.entries {
        match shown(entry, node.len, holders) {
            Shown::Nothing => {}
            Shown::Full => {
                let next = usize::from(entry.holder.0 / 64);
                if next != word {
                    overflow.full[word] = full;
                    (word, full) = (next, 0);
                }
                full |= 1 << (entry.holder.0 % 64);
            }
            Shown::Cut(cut) => overflow.partials.push(Partial { holder: entry.holder.0, cut }),
            Shown::Sparse(sparse) => overflow.sparse.push((entry.holder, sparse.clone())),
        }
    }
    if let Some(last) = overflow.full.get_mut(word) {
        *last = full;
    }
    overflow.full.truncate(overflow.full.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1));
    overflow.full.shrink_to_fit();
    overflow.partials.shrink_to_fit();
    overflow
}

#[cfg(all(test, not(kvrouted_loom)))]
mod tests {
    use super::*;
    use crate::ids::WorkerSlot;
    use crate::index::lookup_walk::named;
    use std::sync::atomic::AtomicBool;

    fn packed(partials: [(u16, u16); PARTIALS_MAX]) -> [u64; 2] {
        let mut header = Header::default();
        assert!(partials.into_iter().all(|(holder, cut)| header.push_partial(Partial { holder, cut })));
        assert!(!header.push_partial(Partial::default()), "there is no room for more");
        header.partials
    }

    fn full() -> Header {
        Header {
            parent: PARENT_MAX,
            variant: 0xfe,
            first: 0x0123_4567_89ab_cdef,
            id: 0xdead_beef,
            len: 1024,
            base: 0xfeed_f00d,
            flags: FORKED | LEAF | 1 << 7,
            mask: 0x8000_0000_0000_0001,
            partials: packed([(1, 2), (u16::MAX, 1023), (64, u16::MAX), (0, 0)]),
            partials_len: 3,
            overflow: 0xffff_8000_1234_5678,
        }
    }

    #[test]
    fn a_line_is_a_cache_line() {
        assert_eq!((size_of::<Line>(), align_of::<Line>()), (64, 64));
    }

    #[test]
    fn a_written_header_is_read_back() {
        let line = Line::new();
        assert_eq!((line.key(), line.parent(), line.version()), (None, PARENT_EMPTY, 0));
        for header in [full(), Header::default(), full()] {
            line.publish(&header);
            assert_eq!(line.read(), Some((line.version(), header)));
            assert_eq!(line.header(), header);
            assert_eq!(line.key(), Some((header.parent, header.first, header.variant)));
            assert!(line.is_at(header.parent, header.first, header.variant));
        }
        assert_eq!(line.version(), 6);
        let shown: Vec<(u16, u16)> = full().partials().map(|partial| (partial.holder, partial.cut)).collect();
        assert_eq!(shown, [(1, 2), (u16::MAX, 1023), (64, u16::MAX)]);
        assert!(full().has(FORKED) && full().has(LEAF) && !Header::default().has(LEAF));
    }

    #[test]
    fn an_uncovered_line_keeps_its_other_fields() {
        let line = Line::new();
        line.publish(&full());
        let version = line.version();
        line.uncover();
        assert_eq!(line.read(), Some((version + 2, Header { mask: 0, partials_len: 0, overflow: 0, ..full() })));
    }

    #[test]
    fn a_lengthened_line_keeps_its_other_fields() {
        let line = Line::new();
        let whole = Header { partials: [0; 2], partials_len: 0, overflow: 0, ..full() };
        let in_part = |cut| {
            let mut header = Header { mask: 0, ..whole };
            assert!(header.push_partial(Partial { holder: u16::MAX, cut }));
            header
        };
        for (before, after) in [(whole, Header { len: 7, ..whole }), (in_part(6), Header { len: 7, ..in_part(7) })] {
            line.publish(&before);
            let version = line.version();
            line.lengthen(7);
            assert_eq!(line.read(), Some((version + 2, after)));
        }
    }

    #[test]
    fn a_header_shows_every_entry_as_it_is() {
        const HOLDERS: u16 = 300;
        // Which holder bits have entries (each n-th), what these cover in turn, and the end of them.
        const CASES: [(u16, [u16; 3], u16); 9] = [
            (1, [7, 7, 7], 64),
            (1, [7, 7, 7], HOLDERS),
            (70, [7, 7, 7], HOLDERS),
            (90, [3, 7, 7], HOLDERS),
            (1, [7, 3, 0], 66),
            (3, [3, 3, 7], 130),
            (1, [3, 3, 3], 90),
            (1, [0, 0, 0], 90),
            (1, [7, 7, 3], 3),
        ];
        let mut holders = HolderBits::default();
        for slot in 0..HOLDERS {
            holders.give(WorkerSlot(slot), 1, Layer::Device, HolderState::Shown).expect("a holder bit");
        }
        for (step, cuts, end) in CASES {
            let cut = |holder: u16| cuts[usize::from(holder / step) % cuts.len()];
            let entries = (0..end)
                .step_by(usize::from(step))
                .map(|holder| Entry { cut: cut(holder), ..Entry::anchor(HolderBit(holder), 0) });
            let node = Node { len: 7, entries: entries.collect(), ..Node::EMPTY };
            let mut overflow = None;
            let header = encode(NodeId(1), &node, &holders, |record| {
                overflow = record;
                0
            });
            let overflow = overflow.as_deref();
            let of = |word: usize| {
                overflow.map_or(named(&header, word), |overflow| overflow.full.get(word).copied().unwrap_or(0))
            };
            for holder in 0..HOLDERS {
                let cut = if holder < end && holder % step == 0 { cut(holder) } else { 0 };
                let is_full = of(usize::from(holder / 64)) >> (holder % 64) & 1 == 1;
                assert_eq!(is_full, cut == 7, "{holder} of {end}, each {step}, {cuts:?}");
                let in_part = partials(&header, overflow).find(|partial| partial.holder == holder && partial.cut < 7);
                assert_eq!(in_part.map(|partial| partial.cut), (1..7).contains(&cut).then_some(cut));
            }
            assert!(overflow.is_none_or(|overflow| overflow.full.last() != Some(&0) && header.mask == of(0)));
        }
    }

    #[test]
    fn every_field_has_bits_of_its_own() {
        let zero = Header::default().pack();
        let mut seen = [0_u64; 7];
        let ones: [fn(&mut Header); 10] = [
            |header| header.variant = u8::MAX,
            |header| header.first = u64::MAX,
            |header| header.id = u32::MAX,
            |header| header.len = u16::MAX,
            |header| header.base = u32::MAX,
            |header| header.flags = u8::MAX,
            |header| header.mask = u64::MAX,
            |header| header.partials = [u64::MAX; 2],
            |header| header.partials_len = u64::from(u8::MAX),
            |header| header.overflow = u64::MAX,
        ];
        for set in ones {
            let mut header = Header::default();
            set(&mut header);
            assert_eq!(Header::unpack(0, header.pack()), header);
            for (at, word) in header.pack().into_iter().enumerate() {
                assert_eq!(word & seen[at], zero[at], "two fields in the same bits");
                seen[at] |= word;
            }
        }
    }

    #[test]
    fn an_open_line_is_not_read_but_known() {
        let line = Line::new();
        let header = full();
        let find = |first| line.probe(header.parent, first, header.variant);
        assert!(matches!(find(header.first), Probe::Other));
        line.publish(&header);
        assert!(matches!(find(header.first), Probe::Here(2, found) if found == header));
        line.open();
        assert!(line.is_open() && line.read().is_none() && line.key().is_none() && line.version() == 3);
        assert!(matches!(find(header.first), Probe::Busy));
        assert!(matches!(find(1), Probe::Other));
        assert!(matches!(line.probe(7, header.first, header.variant), Probe::Other));
        line.write(&Header { len: 7, ..header });
        line.close();
        assert!(matches!(find(header.first), Probe::Here(4, found) if found.len == 7));
        assert!(matches!(line.probe(header.parent, header.first, 0), Probe::Other));
    }

    #[test]
    fn a_line_used_again_goes_on_counting() {
        let line = Line::new();
        line.publish(&full());
        line.vacate(PARENT_TOMBSTONE);
        assert_eq!((line.version(), line.parent(), line.key()), (4, PARENT_TOMBSTONE, None));
        assert!(matches!(line.probe(full().parent, full().first, full().variant), Probe::Other));
        line.publish(&full());
        line.open();
        line.vacate(PARENT_EMPTY);
        assert_eq!((line.version(), line.parent()), (8, PARENT_EMPTY));
        let copy = Line::new();
        line.publish(&full());
        line.open();
        copy.copy_from(&line);
        assert!(copy.is_open() && copy.version() == line.version() && copy.header() == full());
    }

    #[test]
    fn versions_wrap_without_touching_the_parent() {
        let line = Line([u64::MAX, 0, 0, 0, 0, 0, 0, 0].map(AtomicU64::new));
        line.0[0].store(word_0(u32::MAX - 1, 5), Ordering::Relaxed);
        line.publish(&Header { parent: 5, ..full() });
        assert_eq!((line.version(), line.parent()), (0, 5));
    }

    #[test]
    fn concurrent_reads_are_whole() {
        let line = Line::new();
        // Every field follows from one number.
        let of = |n: u32| Header {
            parent: 1,
            variant: 0,
            first: 9,
            id: n,
            len: n as u16,
            base: !n,
            flags: n as u8,
            mask: u64::from(n) * 3,
            partials: packed([(n as u16, !n as u16); PARTIALS_MAX]),
            partials_len: u64::from(n % 5),
            overflow: u64::from(n) << 20,
        };
        line.publish(&of(0));
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = || {
                let (mut reads, mut last) = (0_u64, 0);
                // Relaxed: only ends the loop.
                while !done.load(Ordering::Relaxed) || reads == 0 {
                    let Some((version, header)) = line.read() else { continue };
                    assert_eq!(header, of(header.id));
                    assert!(header.id >= last && version % 2 == 0);
                    (last, reads) = (header.id, reads + 1);
                }
            };
            scope.spawn(reader);
            scope.spawn(reader);
            (1..100_000).for_each(|n| line.publish(&of(n)));
            done.store(true, Ordering::Relaxed);
        });
    }
}
