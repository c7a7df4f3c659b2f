//! The writer's record of a node: what the readers' header line does not say.

use super::cover::Entry;
use super::lanes::Lane;
use crate::ids::Seed;
use smallvec::SmallVec;

/// A node of a shard's tree; its number is used again after it has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct NodeId(pub(super) u32);

impl NodeId {
    /// The node before every chain: no blocks, no header.
    pub(super) const ROOT: Self = Self(0);
    /// No node.
    pub(super) const NONE: Self = Self(u32::MAX);

    pub(super) const fn is_some(self) -> bool {
        self.0 != Self::NONE.0
    }
}

/// A place before or after a block: `at` blocks into a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) node: NodeId,
    pub(super) at: u16,
}

impl Place {
    pub(super) const ROOT: Self = Self { node: NodeId::ROOT, at: 0 };
}

/// Words of the arena that belong to a node.
///
/// A split cuts an extent in two without moving a word, so one may begin or end within a granule. The
/// granule in which two extents meet goes with the first, which always outlives the second (the second is
/// below it) unless `owns_head` says that the second has inherited it.
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

    /// The whole granules that go with its blocks from `from` on, as `(word, words)`.
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

    /// Without the granule in which it ends, where that has become another's.
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

/// What some workers call the first `len` blocks of a node.
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
    /// What is in its first block.
    pub(super) first: u64,
    /// Where its header was last seen.
    pub(super) line: u32,
    pub(super) locals: Extent,
    pub(super) len: u16,
    /// Words of `locals` that readers may have been shown; what is beyond `len` must not be changed.
    pub(super) written: u16,
    /// Blocks it had when it was made; what came later was appended.
    pub(super) initial: u16,
    /// Which of the nodes of the same parent that begin with the same content; 0 comes first.
    pub(super) variant: u8,
    /// Other variants that exist, where this is variant 0.
    pub(super) forks: u8,
    pub(super) used: bool,
    /// The record of coverage that the header points at; 0 for none.
    pub(super) more: u64,
    /// What it has on the heap, that record included, as of when it was last shown.
    pub(super) side_bytes: u32,
    pub(super) columns: SmallVec<[Column; 1]>,
    /// In the order of their lanes.
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
        more: 0,
        side_bytes: 0,
        columns: SmallVec::new_const(),
        entries: SmallVec::new_const(),
    };

    pub(super) const fn has_children(&self) -> bool {
        self.first_child.is_some()
    }

    pub(super) fn find(&self, lane: Lane) -> Result<usize, usize> {
        match &self.entries[..] {
            [one] => match one.lane.cmp(&lane) {
                std::cmp::Ordering::Equal => Ok(0),
                std::cmp::Ordering::Less => Err(1),
                std::cmp::Ordering::Greater => Err(0),
            },
            entries => entries.binary_search_by_key(&lane, |entry| entry.lane),
        }
    }

    pub(super) fn entry(&self, lane: Lane) -> Option<&Entry> {
        self.find(lane).ok().map(|at| &self.entries[at])
    }

    /// The entry of a lane, made with this column if it is not there.
    pub(super) fn enter(&mut self, lane: Lane, column: u16) -> &mut Entry {
        let at = match self.find(lane) {
            Ok(at) => at,
            Err(at) => {
                self.columns[usize::from(column)].users += 1;
                self.entries.insert(at, Entry::anchor(lane, column));
                at
            }
        };
        &mut self.entries[at]
    }

    /// What entries and columns take beside the record.
    pub(super) fn heap_bytes(&self) -> usize {
        let entries = if self.entries.spilled() { self.entries.capacity() * size_of::<Entry>() } else { 0 };
        let columns = if self.columns.spilled() { self.columns.capacity() * size_of::<Column>() } else { 0 };
        let islands = self.entries.iter().filter(|entry| entry.islands.is_some()).count();
        entries + columns + islands * size_of::<super::bits::Bits>()
    }

    /// The column that has an arena word, and the block named there.
    pub(super) fn named_at(&self, word: u32) -> Option<(u16, u16)> {
        let found = self.columns.iter().position(|column| word.wrapping_sub(column.names.base) < u32::from(column.len));
        found.map(|at| (at as u16, (word - self.columns[at].names.base) as u16))
    }
}
