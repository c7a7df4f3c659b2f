//! The hash table of a shard: a line for every node, found by (parent, first local hash, variant).
//!
//! It has segments, chosen by the highest bits of a key's hash, and each grows on its own: no insert moves more than
//! the lines of one. A segment is open addressing with linear probing over a power of two of [`Line`]s, at most six in
//! ten of them in use. Where its lines are and how many is one word, so a search goes from the words of all segments,
//! which stay in the cache, to the line; and the line *is* the node's header, so a hop of a walk is one cache miss. One
//! thread writes ([`TableWriter`]); any number read ([`TableView`] gives them the [`Segments`] of the moment).
//!
//! # What a reader can see at each step
//!
//! Word 0 of a line (see [`header`](super::header)) says all that a search needs to go on, so each step
//! is one store to it, with tags CLOSE and OPEN as explained there.
//!
//! * **insert**: the words, then word 0 with the parent. Before the last store the line is nobody's or busy;
//!   after it, complete: a search finds nothing, or the whole node (or tries again).
//! * **update**: odd, the words, even. The key stays; a search for it is busy between the two.
//! * **remove**: odd, then nobody. If nobody follows, the line becomes empty and so do the tombstones just before
//!   it, last first; else it becomes a tombstone. A line becomes empty only when the next is, so no
//!   search for a node that is there meets an empty line on its way: it lies on no such path.
//! * A node never moves within a table, so a search that passes its line while it is there finds it.
//! * **`Missing`** means: at some moment during the search the key was not there. What is said of several
//!   keys together is for the caller to check: by the versions of the lines it walked (a node and what hangs
//!   below it are published deepest first and removed nearest the root first, so who is not found below an
//!   unchanged node was not there), and by a word of its own for searches that no line relates.
//!
//! # Growth
//!
//! | tag    | writer                                                             | reader                               |
//! |--------|--------------------------------------------------------------------|--------------------------------------|
//! | SHIFT  | Relaxed store of an odd generation, then a Release fence, before SWING | the load of GROWTH after the walk |
//! | SWING  | Release store of the pointer, all lines of the new table before it | SeqCst load of the pointer for each search |
//! | GROWTH | Release store of the next even generation, after SWING, before any change in the new table | Acquire load before the walk, which must be even; behind a fence once more after the walk |
//!
//! * The new table is filled while no reader knows it. SWING makes its lines visible with its address.
//! * The old table is not touched again: all its lines can be read, as they were, until its grace period has passed.
//! * A reader loads the generation, walks, looks at the versions again, and compares the generation. An equal
//!   generation says that no change was made in any newer table than those it walked: GROWTH comes before such
//!   a change, so a reader who has met one (or anything the writer published after it) is shown the new
//!   generation by CLOSE and the fence. A reader who has not may have walked the old table: it is what the
//!   segment was at the swing.
//! * Two loads of a pointer within one walk, or one in the walk and one when the versions are looked at again, can give
//!   two tables. Who has loaded the new one is shown SHIFT or later by the last load of the generation, and a
//!   reader begins with an even one only.
//! * The load of the pointer is SeqCst for the grace period, as the load that begins the read of a line is.

#![expect(unsafe_code, reason = "tables are replaced behind a pointer, and their memory comes zeroed")]

mod lines;
mod view;

pub(super) use lines::Found;
#[cfg(all(test, kvrouted_loom))]
pub(super) use lines::Table;
pub(super) use view::{Head, Segments, TableView};

use lines::Keys;
#[cfg(not(all(test, kvrouted_loom)))]
use lines::Table;
use lines::Word;

use super::header::{Header, Line, PARENT_EMPTY, PARENT_TOMBSTONE};
use super::sync::Arc;

/// Lines of the smallest table.
pub(super) const LINES_MIN: usize = 8;
/// Of every [`LOAD_LINES`] lines at most this many are in use, tombstones included.
const LOAD_USED_MAX: usize = 6;
/// See [`LOAD_USED_MAX`].
const LOAD_LINES: usize = 10;
/// Segments of a shard's table, as a power of two.
pub(super) const SEGMENT_BITS: u32 = 7;
/// Bits of an index that name a line of its segment; the segment is above.
const LINE_BITS: u32 = 24;

const _: () = assert!(SEGMENT_BITS <= u32::BITS - LINE_BITS, "an index has room for its segment");

/// The segment of a key with this hash, of `1 << segment_bits`.
#[inline]
const fn segment_of(hash: u64, segment_bits: u32) -> usize {
    // Two shifts, as there may be one segment only.
    (hash >> 32 >> (32 - segment_bits)) as usize
}

/// A table that a larger (or a clean) one has replaced. Readers may still be in it.
///
/// To drop it frees its memory: give it to the garbage of the readers' reclaimer.
#[must_use = "readers may still be in it: give it to the reclaimer"]
#[derive(Debug)]
pub(super) struct Retired {
    word: Word,
}

// SAFETY: it owns the lines alone but for readers, who only have shared references, and `Line` is `Send + Sync`.
unsafe impl Send for Retired {}

impl Retired {
    /// Memory that comes back with it.
    pub(super) fn bytes(&self) -> u64 {
        bytes_of(lines::len(self.word))
    }
}

impl Drop for Retired {
    fn drop(&mut self) {
        // SAFETY: the word came from `lines::new` and was taken out of the head, once. That no reader has it any more
        // is what whoever drops this promises.
        unsafe { lines::free(self.word) };
    }
}

/// The one hand that changes a table. Lines are named by their index, which is good until their segment grows.
#[derive(Debug)]
pub(super) struct TableWriter {
    head: Arc<Head>,
    parts: Box<[Part]>,
    used: usize,
    /// Lines over all segments, and of the largest that there has been.
    lines: usize,
    lines_most: usize,
    /// Segments that have become too large for what is in them, one bit each.
    sparse: u128,
    /// Lines that one insert has moved, at most.
    #[cfg(test)]
    pub(super) moved_most: usize,
}

/// What the writer knows of a segment.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    used: usize,
    tombstones: usize,
}

const _: () = assert!(1 << SEGMENT_BITS <= u128::BITS, "one bit for each segment");

impl TableWriter {
    /// An empty table of one segment with room for `nodes` nodes; `secret` is mixed into where they go.
    #[cfg(test)]
    pub(super) fn new(nodes: usize, secret: u64) -> Self {
        Self::segmented(0, nodes, secret)
    }

    /// An empty table of `1 << segment_bits` segments, each with room for `nodes` nodes.
    pub(super) fn segmented(segment_bits: u32, nodes: usize, secret: u64) -> Self {
        let (keys, lines, segments) = (Keys::new(secret), lines_for(nodes), 1 << segment_bits);
        Self {
            head: Arc::new(Head::new(segment_bits, lines, keys)),
            parts: vec![Part::default(); segments].into_boxed_slice(),
            used: 0,
            lines: lines * segments,
            lines_most: lines,
            sparse: 0,
            #[cfg(test)]
            moved_most: 0,
        }
    }

    /// What views of this table share.
    pub(super) fn head(&self) -> &Arc<Head> {
        &self.head
    }

    fn segment(&self, segment: usize) -> Table<'_> {
        // SAFETY: only this writer replaces lines, by `&mut self`, so they live as long as this borrow.
        unsafe { self.head.segment(segment) }
    }

    /// The table of which an index names a line.
    fn of(&self, index: usize) -> Table<'_> {
        self.segment(index >> LINE_BITS)
    }

    fn line(&self, index: usize) -> &Line {
        self.of(index).line(index)
    }

    const fn segment_bits(&self) -> u32 {
        self.parts.len().ilog2()
    }

    fn hash(&self, parent: u32, first: u64, variant: u8) -> u64 {
        self.head.keys().hash(parent, first, variant)
    }

    /// The table of the only segment.
    #[cfg(test)]
    fn table(&self) -> Table<'_> {
        self.segment(0)
    }

    /// Nodes in the table.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.used
    }

    /// Whether nobody is in it.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Lines of the table.
    #[cfg(test)]
    pub(super) fn lines(&self) -> usize {
        self.lines
    }

    /// Memory of the table, in bytes; not that of retired ones.
    pub(super) fn bytes(&self) -> u64 {
        bytes_of(self.lines)
    }

    /// How often a segment was replaced.
    #[cfg(test)]
    pub(super) fn generation(&self) -> u64 {
        self.head.generation().expect("nothing is being replaced") / 2
    }

    /// The line of a node.
    pub(super) fn find(&self, parent: u32, first: u64, variant: u8) -> Option<usize> {
        let segment = segment_of(self.hash(parent, first, variant), self.segment_bits());
        let table = self.segment(segment);
        for at in table.path(parent, first, variant) {
            let line = table.line(at);
            if line.is_at(parent, first, variant) {
                return Some(segment << LINE_BITS | at);
            }
            if line.parent() == PARENT_EMPTY {
                return None;
            }
        }
        None
    }

    /// The header in a line, open or not.
    #[cfg(test)]
    pub(super) fn header(&self, index: usize) -> Header {
        self.line(index).header()
    }

    /// All nodes, in no particular order.
    #[cfg(test)]
    pub(super) fn headers(&self) -> impl Iterator<Item = (usize, Header)> + '_ {
        let all = (0..self.parts.len()).flat_map(|segment| self.segment(segment).lines().iter().enumerate());
        all.filter(|(_, line)| !is_nobody(line)).map(|(at, line)| (at, line.header()))
    }

    /// Bytes of the table that `more` inserts would make necessary, at most.
    pub(super) fn growth_bytes(&self, more: usize) -> u64 {
        match *self.parts {
            [_] if self.has_room(0, more) => 0,
            [part] => bytes_of(lines_for(part.used + more)),
            // Each may be in a segment that is full; of that the old lines are garbage until readers have left.
            _ => more.min(self.parts.len()) as u64 * bytes_of(2 * self.lines_most),
        }
    }

    fn has_room(&self, segment: usize, more: usize) -> bool {
        let Part { used, tombstones } = self.parts[segment];
        (used + tombstones + more) * LOAD_LINES <= self.segment(segment).lines().len() * LOAD_USED_MAX
    }

    /// Makes room for `more` inserts in the only segment.
    #[cfg(test)]
    pub(super) fn reserve(&mut self, more: usize) -> Option<Retired> {
        self.make_room(0, more)
    }

    /// Makes room for `more` inserts in a segment: until so many were made, no insert replaces its table and every
    /// index stays good. If it had to be replaced, indexes given out before are void and the old table comes back.
    fn make_room(&mut self, segment: usize, more: usize) -> Option<Retired> {
        if self.has_room(segment, more) {
            return None;
        }
        Some(self.refit(segment, lines_for(self.parts[segment].used + more)))
    }

    /// Gives a segment another number of lines.
    fn refit(&mut self, segment: usize, lines: usize) -> Retired {
        let old = self.segment(segment);
        let word = lines::new(lines);
        // SAFETY: the word was made just above, and is not given back before the table ends.
        let fresh = unsafe { Table::of(word, self.segment_bits(), self.head.keys()) };
        for line in old.lines().iter().filter(|line| !is_nobody(line)) {
            let Header { parent, first, variant, .. } = line.header();
            if let Some(at) = vacancy(fresh, parent, first, variant) {
                fresh.line(at).copy_from(line);
            }
        }
        let before = old.lines().len();
        #[cfg(test)]
        {
            self.moved_most = self.moved_most.max(before);
        }
        let word = self.head.replace(segment, word);
        self.parts[segment].tombstones = 0;
        self.lines = self.lines + lines - before;
        self.lines_most = self.lines_most.max(lines);
        Retired { word }
    }

    /// Makes one segment smaller that has become too large for what is in it. Indexes given out before are void.
    pub(super) fn shrink(&mut self) -> Option<Retired> {
        while self.sparse != 0 {
            let segment = self.sparse.trailing_zeros() as usize;
            self.sparse &= self.sparse - 1;
            // It may have been filled again since.
            let lines = lines_for(self.parts[segment].used);
            if self.is_sparse(segment) {
                return Some(self.refit(segment, lines));
            }
        }
        None
    }

    fn is_sparse(&self, segment: usize) -> bool {
        let lines = self.segment(segment).lines().len();
        lines > LINES_MIN && lines_for(self.parts[segment].used) <= lines / 4
    }

    /// Adds a node that is not there, complete or not at all for readers. Where it is, and the old table of its
    /// segment if that had to be replaced (indexes given out before are then void).
    pub(super) fn insert(&mut self, header: &Header) -> (usize, Option<Retired>) {
        let Header { parent, first, variant, .. } = *header;
        debug_assert!(self.find(parent, first, variant).is_none(), "a node is there once");
        let segment = segment_of(self.hash(parent, first, variant), self.segment_bits());
        let retired = self.make_room(segment, 1);
        let table = self.segment(segment);
        // There is one: at most six lines in ten are in use.
        let index = vacancy(table, parent, first, variant).unwrap_or_default();
        let line = table.line(index);
        let reused = line.parent() == PARENT_TOMBSTONE;
        line.publish(header);
        self.parts[segment].tombstones -= usize::from(reused);
        self.parts[segment].used += 1;
        self.used += 1;
        (segment << LINE_BITS | index, retired)
    }

    /// Replaces the header of a node; its key stays.
    pub(super) fn update(&mut self, index: usize, header: &Header) {
        self.open(index);
        self.write(index, header);
        self.close(index);
    }

    /// Begins a change of a node that takes more than one step, or that shall become visible together with others.
    pub(super) fn open(&mut self, index: usize) {
        self.line(index).open();
    }

    /// Changes an open node; its key stays.
    pub(super) fn write(&mut self, index: usize, header: &Header) {
        let line = self.line(index);
        debug_assert!(line.is_at(header.parent, header.first, header.variant), "a node keeps its key");
        line.write(header);
    }

    /// Shows that no lane covers a node any more.
    pub(super) fn uncover(&mut self, index: usize) {
        self.line(index).uncover();
    }

    /// Whether a line is a node's.
    pub(super) fn is_at(&self, index: usize, parent: u32, first: u64, variant: u8) -> bool {
        self.line(index).is_at(parent, first, variant)
    }

    /// The number of a node.
    pub(super) fn id(&self, index: usize) -> u32 {
        self.line(index).header().id
    }

    /// Ends a change.
    pub(super) fn close(&mut self, index: usize) {
        self.line(index).close();
    }

    /// Takes a node away, open or not.
    pub(super) fn remove(&mut self, index: usize) {
        let segment = index >> LINE_BITS;
        let table = self.segment(segment);
        debug_assert!(!is_nobody(table.line(index)), "only a node is removed");
        let is_last = table.line(index + 1).parent() == PARENT_EMPTY;
        let (mut emptied, mut at) = (0, index);
        if is_last {
            table.line(at).vacate(PARENT_EMPTY);
            // Tombstones keep a path going; this one ends here now.
            while table.line(at.wrapping_sub(1)).parent() == PARENT_TOMBSTONE {
                at = at.wrapping_sub(1);
                table.line(at).vacate(PARENT_EMPTY);
                emptied += 1;
            }
        } else {
            table.line(index).vacate(PARENT_TOMBSTONE);
        }
        let part = &mut self.parts[segment];
        part.tombstones = part.tombstones + usize::from(!is_last) - emptied;
        part.used -= 1;
        self.used -= 1;
        if self.is_sparse(segment) {
            self.sparse |= 1 << segment;
        }
    }
}

fn is_nobody(line: &Line) -> bool {
    matches!(line.parent(), PARENT_EMPTY | PARENT_TOMBSTONE)
}

/// The line where a node that is not there goes.
fn vacancy(table: Table<'_>, parent: u32, first: u64, variant: u8) -> Option<usize> {
    table.path(parent, first, variant).find(|at| is_nobody(table.line(*at)))
}

/// Lines of a table made for `nodes` nodes: a quarter as many more, at least, can be inserted before the next one.
fn lines_for(nodes: usize) -> usize {
    (5 * nodes * LOAD_LINES).div_ceil(4 * LOAD_USED_MAX).next_power_of_two().max(LINES_MIN)
}

fn bytes_of(lines: usize) -> u64 {
    (lines * size_of::<Line>()) as u64
}

#[cfg(all(test, not(kvrouted_loom)))]
mod tests;
