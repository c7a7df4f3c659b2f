//! The writer's record of a node: what the readers' header line does not say. Which blocks of it each holder bit
//! covers, and sets of its blocks.

use super::holders::HolderBit;
use crate::ids::Seed;
use crate::limits::NODE_BLOCKS_MAX;
use smallvec::SmallVec;

/// A node of a shard's tree. Its number is reused after the node is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct NodeId(pub(super) u32);

impl NodeId {
    /// The node before every chain: no blocks, no header.
    pub(super) const ROOT: Self = Self(0);
    pub(super) const NONE: Self = Self(u32::MAX);

    pub(super) const fn is_some(self) -> bool {
        self.0 != Self::NONE.0
    }
}

/// A place in the tree, before or after a block: `at` blocks into a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) node: NodeId,
    pub(super) at: u16,
}

impl Place {
    pub(super) const ROOT: Self = Self { node: NodeId::ROOT, at: 0 };

    /// The next place in the node, or that behind its last block.
    pub(super) const fn following(self) -> Self {
        Self { at: self.at + 1, ..self }
    }
}

/// Words of the arena that belong to a node.
///
/// A split cuts an extent in two without moving a word, so an extent may begin or end within a granule. The granule in
/// which two extents meet belongs to the first extent. The first always outlives the second, whose node is below,
/// unless `owns_head` says that the second has inherited the granule.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Extent {
    /// The first word.
    pub(super) base: u32,
    /// Words that may be used.
    pub(super) room: u16,
    pub(super) owns_head: bool,
}

pub(super) const GRANULE_WORDS: u32 = 8;

impl Extent {
    pub(super) const fn of(base: u32, words: u32) -> Self {
        Self { base, room: words as u16, owns_head: false }
    }

    /// The whole granules that belong to its blocks from `from` on, as `(word, words)`.
    pub(super) const fn granules_from(&self, from: u16) -> (u32, u32) {
        let start = self.base + from as u32;
        let start = if from == 0 && self.owns_head {
            start / GRANULE_WORDS * GRANULE_WORDS
        } else {
            start.next_multiple_of(GRANULE_WORDS)
        };
        let end = (self.base + self.room as u32).next_multiple_of(GRANULE_WORDS);
        (start, end.saturating_sub(start))
    }

    /// Without the granule in which it ends, if another extent has inherited that one.
    pub(super) const fn without_tail(self, inherited: bool) -> Self {
        let end = (self.base + self.room as u32) / GRANULE_WORDS * GRANULE_WORDS;
        match end.checked_sub(self.base) {
            _ if !inherited => self,
            Some(room) if room > 0 => Self { room: room as u16, ..self },
            _ => Self { room: 0, owns_head: false, ..self },
        }
    }

    /// Cuts it in two: keeps `at` words and returns the rest.
    pub(super) const fn split_off(&mut self, at: u16) -> Self {
        let rest = Self { base: self.base + at as u32, room: self.room - at, owns_head: false };
        self.room = at;
        rest
    }

    /// Whether `next` begins where the first `len` words end.
    pub(super) const fn meets(&self, len: u16, next: &Self) -> bool {
        self.base + len as u32 == next.base && self.room == len && !next.owns_head
    }
}

/// The names by which some workers call the first `len` blocks of a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    pub(super) names: Extent,
    pub(super) len: u16,
    /// Entries that use it.
    pub(super) users: u16,
    pub(super) seed: Seed,
}

/// A node: an edge of the tree, `len` blocks without a branch.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) parent: NodeId,
    pub(super) first_child: NodeId,
    pub(super) next: NodeId,
    pub(super) previous: NodeId,
    /// Blocks from the root to its first.
    pub(super) depth: u32,
    /// The local hash of its first block.
    pub(super) first: u64,
    /// Where its header was last found.
    pub(super) line: u32,
    pub(super) locals: Extent,
    pub(super) len: u16,
    /// Words of `locals` that readers may have been shown; those beyond `len` must not be changed.
    pub(super) written: u16,
    /// Blocks it had when it was made; later ones were appended.
    pub(super) initial: u16,
    /// Which of the nodes of the same parent that begin with the same content; 0 is the main one.
    pub(super) variant: u8,
    /// Number of other variants, if this is variant 0.
    pub(super) forks: u8,
    pub(super) used: bool,
    /// The address of the overflow record in its header; 0 for none.
    pub(super) overflow: u64,
    /// Bytes on the heap, that record included, as of when the node was last published.
    pub(super) side_bytes: u32,
    pub(super) columns: SmallVec<[Column; 1]>,
    /// In the order of their holder bits.
    pub(super) entries: SmallVec<[Entry; 1]>,
}

impl Node {
    pub(super) const EMPTY: Self = Self {
        parent: NodeId::NONE,
        first_child: NodeId::NONE,
        next: NodeId::NONE,
        previous: NodeId::NONE,
        depth: 0,
        first: 0,
        line: 0,
        locals: Extent { base: 0, room: 0, owns_head: false },
        len: 0,
        written: 0,
        initial: 0,
        variant: 0,
        forks: 0,
        used: false,
        overflow: 0,
        side_bytes: 0,
        columns: SmallVec::new_const(),
        entries: SmallVec::new_const(),
    };

    pub(super) const fn has_children(&self) -> bool {
        self.first_child.is_some()
    }

    pub(super) fn find(&self, holder: HolderBit) -> Result<usize, usize> {
        match &self.entries[..] {
            [one] => match one.holder.cmp(&holder) {
                std::cmp::Ordering::Equal => Ok(0),
                std::cmp::Ordering::Less => Err(1),
                std::cmp::Ordering::Greater => Err(0),
            },
            entries => entries.binary_search_by_key(&holder, |entry| entry.holder),
        }
    }

    pub(super) fn entry(&self, holder: HolderBit) -> Option<&Entry> {
        self.find(holder).ok().map(|at| &self.entries[at])
    }

    /// The entry of a holder bit, made with this column if it does not exist.
    pub(super) fn enter(&mut self, holder: HolderBit, column: u16) -> &mut Entry {
        let at = match self.find(holder) {
            Ok(at) => at,
            Err(at) => {
                self.columns[usize::from(column)].users += 1;
                self.entries.insert(at, Entry::anchor(holder, column));
                at
            }
        };
        &mut self.entries[at]
    }

    /// Heap bytes of entries and columns, without the overflow record.
    pub(super) fn heap_bytes(&self) -> usize {
        let entries = if self.entries.spilled() { self.entries.capacity() * size_of::<Entry>() } else { 0 };
        let columns = if self.columns.spilled() { self.columns.capacity() * size_of::<Column>() } else { 0 };
        let sparse = self.entries.iter().filter(|entry| entry.sparse.is_some()).count();
        entries + columns + sparse * size_of::<Bits>()
    }

    /// The column that contains an arena word, and the block that the word names.
    pub(super) fn named_at(&self, word: u32) -> Option<(u16, u16)> {
        let found = self.columns.iter().position(|column| word.wrapping_sub(column.names.base) < u32::from(column.len));
        found.map(|at| (at as u16, (word - self.columns[at].names.base) as u16))
    }
}

/// Runs of blocks that a change touched; nearly always one.
pub(super) type Runs = SmallVec<[Run; 2]>;

/// A holder bit at a node.
///
/// `cut` is its first gap: it covers `0..cut` and not `cut`. Blocks beyond the gap are in a bitmap, the **sparse
/// coverage**, so that removing blocks in any order costs the same. An entry that covers nothing may stay as an
/// **anchor**: its worker holds, or may hold, blocks in nodes below, whose parents are named in its column.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) holder: HolderBit,
    /// Which of the node's columns has the worker's names.
    pub(super) column: u16,
    pub(super) cut: u16,
    /// All blocks covered, `0..cut` included; present only if some are beyond the gap.
    pub(super) sparse: Option<Box<Bits>>,
}

impl Entry {
    pub(super) const fn anchor(holder: HolderBit, column: u16) -> Self {
        Self { holder, column, cut: 0, sparse: None }
    }

    pub(super) fn covers(&self, at: u16) -> bool {
        at < self.cut || self.sparse.as_ref().is_some_and(|sparse| sparse.contains(at))
    }

    /// One more than the last block covered.
    pub(super) fn end(&self) -> u16 {
        self.sparse.as_ref().map_or(self.cut, |sparse| sparse.end())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.cut == 0 && self.sparse.is_none()
    }

    pub(super) fn bits(&self) -> Bits {
        self.sparse.as_ref().map_or_else(|| Bits::range(0, self.cut), |sparse| Bits::clone(sparse))
    }

    fn set_bits(&mut self, bits: Bits) {
        self.cut = bits.first_gap();
        let beyond = bits.end() > self.cut;
        match &mut self.sparse {
            Some(sparse) if beyond => **sparse = bits,
            sparse => *sparse = beyond.then(|| Box::new(bits)),
        }
    }

    /// Covers `from..to` too; returns the runs that were not covered before.
    pub(super) fn add(&mut self, from: u16, to: u16) -> Runs {
        if self.sparse.is_none() && from <= self.cut {
            let newly = Run { from: self.cut.min(to), to };
            self.cut = self.cut.max(to);
            return if newly.from < to { SmallVec::from_elem(newly, 1) } else { SmallVec::new() };
        }
        let had = self.bits();
        let wanted = Bits::range(from, to);
        let newly = wanted.clone().and_not(&had).runs().collect();
        self.set_bits(had.or(&wanted));
        newly
    }

    /// No longer covers `from..to`; returns the runs that were covered before.
    pub(super) fn take(&mut self, from: u16, to: u16) -> Runs {
        if self.sparse.is_none() && to >= self.cut {
            let taken = Run { from: from.min(self.cut), to: self.cut };
            self.cut = taken.from;
            return if taken.from < taken.to { SmallVec::from_elem(taken, 1) } else { SmallVec::new() };
        }
        let had = self.bits();
        let wanted = Bits::range(from, to);
        let taken = wanted.clone().and(&had).runs().collect();
        self.set_bits(had.and_not(&wanted));
        taken
    }

    /// Keeps the first `at` blocks and returns the rest, as of a node that begins there.
    pub(super) fn split_off(&mut self, at: u16) -> Self {
        let mut high = Self::anchor(self.holder, self.column);
        if self.sparse.is_none() {
            high.cut = self.cut.saturating_sub(at);
            self.cut = self.cut.min(at);
        } else {
            let bits = self.bits();
            high.set_bits(bits.without_first(at));
            self.set_bits(bits.and(&Bits::range(0, at)));
        }
        high
    }

    /// The inverse of [`split_off`](Self::split_off).
    pub(super) fn append(&mut self, at: u16, high: &Self) {
        if self.sparse.is_none() && high.sparse.is_none() && (self.cut == at || high.cut == 0) {
            self.cut += high.cut;
        } else {
            self.set_bits(self.bits().or(&high.bits().behind(at)));
        }
    }
}

const WORDS: usize = NODE_BLOCKS_MAX / 64;

/// A set of blocks of one node, by position from its first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bits([u64; WORDS]);

/// Blocks `from..to` of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) from: u16,
    pub(super) to: u16,
}

impl Run {
    pub(super) const fn new(from: u16, to: u16) -> Self {
        Self { from, to }
    }

    pub(super) const fn len(self) -> u32 {
        (self.to - self.from) as u32
    }
}

impl Bits {
    pub(super) const EMPTY: Self = Self([0; WORDS]);

    pub(super) fn range(from: u16, to: u16) -> Self {
        let mut bits = Self::EMPTY;
        bits.fill(from, to, true);
        bits
    }

    pub(super) const fn contains(&self, at: u16) -> bool {
        self.0[at as usize / 64] >> (at % 64) & 1 == 1
    }

    /// Adds `from..to`, or removes it.
    pub(super) fn fill(&mut self, from: u16, to: u16, value: bool) {
        let mut at = from;
        while at < to {
            let end = to.min((at / 64 + 1) * 64);
            let mask = (u64::MAX >> (64 - (end - at))) << (at % 64);
            let word = &mut self.0[usize::from(at / 64)];
            *word = if value { *word | mask } else { *word & !mask };
            at = end;
        }
    }

    /// The first block that is not in the set; `NODE_BLOCKS_MAX` if all are.
    pub(super) fn first_gap(&self) -> u16 {
        let word = self.0.iter().position(|word| *word != u64::MAX);
        word.map_or(NODE_BLOCKS_MAX as u16, |word| (word * 64) as u16 + self.0[word].trailing_ones() as u16)
    }

    /// One more than the last block in the set.
    pub(super) fn end(&self) -> u16 {
        let word = self.0.iter().rposition(|word| *word != 0);
        word.map_or(0, |word| (word * 64) as u16 + 64 - self.0[word].leading_zeros() as u16)
    }

    pub(super) fn and(mut self, other: &Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(word, other)| *word &= other);
        self
    }

    fn and_not(mut self, other: &Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(word, other)| *word &= !other);
        self
    }

    pub(super) fn or(mut self, other: &Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(word, other)| *word |= other);
        self
    }

    /// Without the first `blocks` blocks, and numbered from the next.
    fn without_first(&self, blocks: u16) -> Self {
        let (words, shift) = (usize::from(blocks / 64), u32::from(blocks % 64));
        Self(std::array::from_fn(|at| {
            let word = |at: usize| self.0.get(at + words).copied().unwrap_or(0);
            if shift == 0 { word(at) } else { word(at) >> shift | word(at + 1) << (64 - shift) }
        }))
    }

    /// Numbered as if `blocks` more came before.
    pub(super) fn behind(&self, blocks: u16) -> Self {
        let (words, shift) = (usize::from(blocks / 64), u32::from(blocks % 64));
        Self(std::array::from_fn(|at| {
            let word = |back: usize| at.checked_sub(words + back).map_or(0, |at| self.0[at]);
            if shift == 0 { word(0) } else { word(0) << shift | word(1) >> (64 - shift) }
        }))
    }

    /// The end of the run of blocks that begins with `from`; `from` itself if that block is not in the set.
    pub(super) fn end_of_run(&self, from: u16) -> u16 {
        if from as usize >= NODE_BLOCKS_MAX { from } else { self.next(from, false).unwrap_or(NODE_BLOCKS_MAX as u16) }
    }

    /// The runs of blocks in the set, in order.
    pub(super) fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        let mut at = 0_u16;
        std::iter::from_fn(move || {
            let from = self.next(at, true)?;
            let to = self.next(from, false).unwrap_or(NODE_BLOCKS_MAX as u16);
            at = to;
            Some(Run { from, to })
        })
    }

    /// The first block at or after `at` that is in the set (`value`) or not in it.
    fn next(&self, at: u16, value: bool) -> Option<u16> {
        let mut word = usize::from(at / 64);
        let mut masked = u64::MAX << (at % 64);
        while let Some(bits) = self.0.get(word) {
            let bits = if value { *bits } else { !*bits } & masked;
            if bits != 0 {
                return Some((word * 64) as u16 + bits.trailing_zeros() as u16);
            }
            (word, masked) = (word + 1, u64::MAX);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(runs: &Runs) -> Vec<(u16, u16)> {
        runs.iter().map(|run| (run.from, run.to)).collect()
    }

    #[test]
    fn a_gap_makes_coverage_sparse_and_closing_it_makes_it_one_run() {
        let mut entry = Entry::anchor(HolderBit(3), 0);
        assert_eq!(runs(&entry.add(0, 10)), [(0, 10)]);
        assert_eq!(runs(&entry.take(4, 6)), [(4, 6)]);
        assert_eq!((entry.cut, entry.end(), entry.sparse.is_some()), (4, 10, true));
        assert_eq!(runs(&entry.take(3, 8)), [(3, 4), (6, 8)]);
        assert_eq!(runs(&entry.add(0, 9)), [(3, 8)]);
        assert_eq!((entry.cut, entry.sparse.is_none()), (10, true));
        assert_eq!(runs(&entry.take(0, 99)), [(0, 10)]);
        assert!(entry.is_empty());
    }

    #[test]
    fn a_split_and_its_inverse_give_the_same() {
        for cuts in [&[(0, 10)][..], &[(0, 3), (5, 9)], &[(2, 4), (7, 8)], &[]] {
            for at in 1..10 {
                let mut entry = Entry::anchor(HolderBit(0), 0);
                cuts.iter().for_each(|(from, to)| drop(entry.add(*from, *to)));
                let whole = entry.bits();
                let high = entry.split_off(at);
                entry.append(at, &high);
                assert_eq!(entry.bits(), whole, "{cuts:?} at {at}");
            }
        }
    }

    fn of(blocks: &[u16]) -> Bits {
        let mut bits = Bits::EMPTY;
        blocks.iter().for_each(|at| bits.fill(*at, at + 1, true));
        bits
    }

    #[test]
    fn runs_ends_and_gaps_are_where_they_are() {
        let bits = of(&[0, 1, 2, 63, 64, 65, 700, 1023]);
        let runs: Vec<(u16, u16)> = bits.runs().map(|run| (run.from, run.to)).collect();
        assert_eq!(runs, [(0, 3), (63, 66), (700, 701), (1023, 1024)]);
        assert_eq!((bits.first_gap(), bits.end()), (3, 1024));
        assert_eq!((Bits::EMPTY.first_gap(), Bits::EMPTY.end()), (0, 0));
        assert_eq!(Bits::range(0, 1024).first_gap(), 1024);
    }

    #[test]
    fn shifts_are_each_others_inverse_where_nothing_is_lost() {
        let bits = of(&[0, 1, 2, 63, 64, 65, 500]);
        for blocks in [0, 1, 63, 64, 65, 128, 400] {
            assert_eq!(bits.behind(blocks).without_first(blocks), bits, "{blocks}");
            let (low, high) = (bits.clone().and(&Bits::range(0, blocks)), bits.without_first(blocks));
            assert_eq!(high.behind(blocks).or(&low), bits, "{blocks}");
        }
    }
}
