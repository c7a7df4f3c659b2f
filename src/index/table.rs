//! The hash table of a shard: a line for every node, found by (parent, first local hash, variant).
//!
//! Some bits of a key's hash choose one of its segments. Each segment grows on its own: no insert moves more lines than
//! those of one segment. A segment is open addressing with linear probing over a power of two of [`Line`]s, at most six
//! in ten of them in use. Beside its lines a segment has a [tag](tags) of a byte for each. One word says where its lines
//! are and how many, another where its tags are. So a search goes from the words of all segments, which stay in the
//! cache, to the tags, and reads only a line whose tag is the key's. The line *is* the node's header: a hop of a walk is
//! one cache miss, and to find nothing is none where the tags are in the cache. One thread writes ([`TableWriter`]); any
//! number read ([`TableView`] gives them the current [`Segments`]).
//!
//! # What a reader can see at each step
//!
//! Word 0 of a line (see [`header`](super::header)) says whether a search may read it. So each step is one store to it,
//! with CLOSE and OPEN explained there. [`tags`] says when the line's tag is stored, and why a search may trust it.
//!
//! * **insert**: the words, then word 0 with the parent. Before the last store the line is unused or busy; after it,
//!   complete: a search finds nothing, or the whole node (or tries again).
//! * **update**: odd, the words, even. The key stays; a search for it is busy between the two.
//! * **remove**: odd, then unused. If the next line is empty, the line becomes empty, and so do the tombstones just
//!   before it, last first; else it becomes a tombstone. A line becomes empty only when the next one is. So no search
//!   for an existing node meets an empty line, or its tag, on its path.
//! * A node never moves within a table, so a search that passes its line while it exists finds it.
//! * **`Missing`** means: at some moment during the search the key was not there. The caller checks what this says of
//!   several keys together: by the versions of the lines that it walked, and by a word of its own for searches that no
//!   line relates. A node and the nodes below it are published deepest first and removed nearest the root first. So a
//!   node that is not found below an unchanged node did not exist.
//!
//! # Growth
//!
//! The generation is a [`SeqWord`], whose OPEN and DONE are called SHIFT and GROWTH here.
//!
//! | tag    | writer                                                             | reader                               |
//! |--------|--------------------------------------------------------------------|--------------------------------------|
//! | SHIFT  | Relaxed store of an odd generation, then a Release fence, before SWING | the load of GROWTH after the walk |
//! | SWING  | Release stores of both pointers, all lines and tags of the new table before them | SeqCst loads of both for each search |
//! | GROWTH | Release store of the next even generation, after SWING, before any change in the new table | Acquire load before the walk, which must be even; behind a fence once more after the walk |
//!
//! * The new table is filled while no reader knows it. SWING makes its lines and tags visible with their addresses.
//! * The old table is not changed again: all its lines and tags can be read, as they were, until its grace period has passed.
//! * A reader loads the generation, walks, checks the versions, and compares the generation. An equal generation says
//!   that no change was made in any newer table than those it walked. GROWTH comes before such a change. So a reader
//!   that has met one, or anything that the writer published after it, is shown the new generation by CLOSE and the
//!   fence. Any other reader may have walked the old table, which is the segment as it was at the swing.
//! * Two loads can give two tables: both within one walk, one of lines and one of tags, or one in the walk and one when
//!   the versions are checked. A reader that has loaded a pointer of the new one is shown SHIFT or later by its last load
//!   of the generation, and a reader begins only with an even one.
//! * The loads of the pointers are SeqCst for the grace period, like the load that begins the read of a line.

#![expect(
    unsafe_code,
    reason = "a segment is two words: the addresses of its lines and of its tags, each with their number"
)]

mod memory;
mod tags;

use super::header::{Header, Line, PARENT_EMPTY, PARENT_TOMBSTONE, Probe};
use super::reclaim::{Guard, Reclaimer};
use super::row_pool::Rows;
use super::types::spread;
use crate::prefetch::prefetch;
use crate::sync::{Arc, AtomicPtr, Ordering, SeqWord};
use memory::{LineMemory, SegmentMemory, Word};
use tags::{TagLine, Tags, WORD_TAGS};

/// Lines of the smallest table.
const LINES_MIN: usize = 8;
/// Of every [`LOAD_LINES`] lines, at most this many are in use, tombstones included.
const LOAD_USED_MAX: usize = 6;
/// See [`LOAD_USED_MAX`].
const LOAD_LINES: usize = 10;
/// Segments of a shard's table, as a power of two.
pub(super) const SEGMENT_BITS: u32 = 7;
/// Bits of an index that name a line of its segment; the segment is in the bits above.
const LINE_BITS: u32 = 24;

const _: () = assert!(SEGMENT_BITS <= u32::BITS - LINE_BITS, "an index has room for its segment");

/// The segment of a key with this hash, of a power of two of segments. The highest bits name a line of it, the lowest are
/// its tag.
#[inline(always)]
const fn segment_of(hash: u64, segments: usize) -> usize {
    (hash >> 16) as usize & (segments - 1)
}

const _: () = assert!(SEGMENT_BITS + LINE_BITS <= u64::BITS - 16, "each has bits of its own");

/// The lines of a segment that others have replaced. Readers may still be in them.
///
/// Dropping it frees its memory: give it to the garbage of the readers' reclaimer.
#[must_use = "readers may still be in it: give it to the reclaimer"]
#[derive(Debug)]
pub(super) struct Retired {
    segment: SegmentMemory,
    memory: LineMemory,
}

// SAFETY: it owns the lines, except for readers, which have shared references only, and `Line` is `Send + Sync`.
unsafe impl Send for Retired {}

impl Retired {
    /// Memory that dropping it frees.
    pub(super) fn bytes(&self) -> u64 {
        SegmentMemory::bytes(self.segment.lines.count())
    }
}

impl Drop for Retired {
    fn drop(&mut self) {
        // SAFETY: the segment came from this memory and was taken out of the head, once. The caller that drops this
        // promises that no reader has it any more.
        unsafe { self.memory.free(self.segment) };
    }
}

/// The only writer of a table. An index names a line, until its segment grows.
#[derive(Debug)]
pub(super) struct TableWriter {
    head: Arc<TableHead>,
    parts: Box<[SegmentUse]>,
    used: usize,
    /// Lines over all segments, and the most that one segment has had.
    lines: usize,
    lines_most: usize,
    /// Memory of all segments.
    bytes: u64,
    /// Segments that have become too large for their nodes, one bit each.
    underfull: u128,
    /// Lines that one insert has moved, at most.
    #[cfg(test)]
    moved_most: usize,
}

/// The writer's counts of a segment.
#[derive(Clone, Copy, Debug, Default)]
struct SegmentUse {
    used: usize,
    tombstones: usize,
}

const _: () = assert!(1 << SEGMENT_BITS <= u128::BITS, "one bit for each segment");

impl TableWriter {
    /// An empty table of one segment with room for `nodes` nodes; `secret` keys the hash.
    #[cfg(test)]
    pub(super) fn new(nodes: usize, secret: u64) -> Self {
        Self::segmented(0, nodes, secret, Rows::new())
    }

    /// An empty table of `1 << segment_bits` segments, each with room for `nodes` nodes.
    pub(super) fn segmented(segment_bits: u32, nodes: usize, secret: u64, rows: Rows) -> Self {
        let (keys, lines, segments) = (Keys::new(secret), lines_for(nodes), 1 << segment_bits);
        Self {
            head: Arc::new(TableHead::new((segment_bits, lines), keys, LineMemory { rows })),
            parts: vec![SegmentUse::default(); segments].into_boxed_slice(),
            used: 0,
            lines: lines * segments,
            lines_most: lines,
            bytes: SegmentMemory::bytes(lines) * segments as u64,
            underfull: 0,
            #[cfg(test)]
            moved_most: 0,
        }
    }

    /// The part that views of this table share.
    pub(super) fn head(&self) -> &Arc<TableHead> {
        &self.head
    }

    fn segment(&self, segment: usize) -> Table<'_> {
        // SAFETY: only this writer replaces lines, by `&mut self`, so they live as long as this borrow.
        unsafe { self.head.segment(segment) }
    }

    /// The segment of an index.
    fn of(&self, index: usize) -> Table<'_> {
        self.segment(index >> LINE_BITS)
    }

    fn line(&self, index: usize) -> &Line {
        self.of(index).line(index)
    }

    fn hash(&self, parent: u32, first: u64, variant: u8) -> u64 {
        self.head.keys().hash(parent, first, variant)
    }

    /// The table of the only segment.
    #[cfg(test)]
    fn table(&self) -> Table<'_> {
        self.segment(0)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.used
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.used == 0
    }

    #[cfg(test)]
    pub(super) fn lines(&self) -> usize {
        self.lines
    }

    /// Memory of the table, in bytes, without retired lines.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How often a segment was replaced.
    #[cfg(test)]
    pub(super) fn generation(&self) -> u64 {
        self.head.generation().expect("nothing is being replaced") / 2
    }

    /// The line of a node.
    pub(super) fn find(&self, parent: u32, first: u64, variant: u8) -> Option<usize> {
        let hash = self.hash(parent, first, variant);
        let segment = segment_of(hash, self.parts.len());
        let table = self.segment(segment);
        table.search(hash, |at| table.line(at).is_at(parent, first, variant).then_some(segment << LINE_BITS | at))
    }

    /// The header in a line, open or not.
    pub(super) fn header(&self, index: usize) -> Header {
        self.line(index).header()
    }

    /// All nodes, in no particular order.
    #[cfg(test)]
    pub(super) fn headers(&self) -> impl Iterator<Item = (usize, Header)> + '_ {
        let all = (0..self.parts.len()).flat_map(|segment| self.segment(segment).lines().iter().enumerate());
        all.filter(|(_, line)| !is_unused(line)).map(|(at, line)| (at, line.header()))
    }

    /// Bytes by which `more` inserts may make the table grow, at most.
    pub(super) fn growth_bytes(&self, more: usize) -> u64 {
        match *self.parts {
            [_] if self.has_room(0, more) => 0,
            [part] => SegmentMemory::bytes(lines_for(part.used + more)),
            // Each may be in a full segment, whose old lines are garbage until readers have left.
            _ => more.min(self.parts.len()) as u64 * SegmentMemory::bytes(2 * self.lines_most),
        }
    }

    fn has_room(&self, segment: usize, more: usize) -> bool {
        let SegmentUse { used, tombstones } = self.parts[segment];
        (used + tombstones + more) * LOAD_LINES <= self.segment(segment).lines().len() * LOAD_USED_MAX
    }

    /// Makes room for `more` inserts in the only segment.
    #[cfg(test)]
    pub(super) fn reserve(&mut self, more: usize) -> Option<Retired> {
        self.make_room(0, more)
    }

    /// Makes room for `more` inserts in a segment: none of them replaces its lines, and every index stays valid. If the
    /// lines had to be replaced, earlier indexes are void and the old lines are returned.
    fn make_room(&mut self, segment: usize, more: usize) -> Option<Retired> {
        if self.has_room(segment, more) {
            return None;
        }
        Some(self.refit(segment, lines_for(self.parts[segment].used + more)))
    }

    /// Replaces the lines of a segment by another number of lines.
    fn refit(&mut self, segment: usize, lines: usize) -> Retired {
        let old = self.segment(segment);
        let memory = self.head.memory.allocate(lines);
        // SAFETY: the memory was made just above, and is not freed before the table.
        let fresh = unsafe { Table::of(memory) };
        for line in old.lines().iter().filter(|line| !is_unused(line)) {
            let Header { parent, first, variant, .. } = line.header();
            let hash = self.hash(parent, first, variant);
            if let Some(at) = vacancy(fresh, hash) {
                fresh.tags.set(at, hash);
                fresh.line(at).copy_from(line);
            }
        }
        let before = old.lines().len();
        #[cfg(test)]
        {
            self.moved_most = self.moved_most.max(before);
        }
        let retired = self.head.replace(segment, memory);
        self.parts[segment].tombstones = 0;
        self.bytes = self.bytes + SegmentMemory::bytes(lines) - SegmentMemory::bytes(before);
        self.lines = self.lines + lines - before;
        self.lines_most = self.lines_most.max(lines);
        Retired { segment: retired, memory: self.head.memory.clone() }
    }

    /// Shrinks one underfull segment. Its earlier indexes are void.
    pub(super) fn shrink(&mut self) -> Option<Retired> {
        while self.underfull != 0 {
            let segment = self.underfull.trailing_zeros() as usize;
            self.underfull &= self.underfull - 1;
            // It may have been filled again since.
            let lines = lines_for(self.parts[segment].used);
            if self.is_underfull(segment) {
                return Some(self.refit(segment, lines));
            }
        }
        None
    }

    fn is_underfull(&self, segment: usize) -> bool {
        let lines = self.segment(segment).lines().len();
        lines > LINES_MIN && lines_for(self.parts[segment].used) <= lines / 4
    }

    /// Adds a node that does not exist; readers see all of it or nothing. Returns its index, and the old lines of its
    /// segment if they had to be replaced (earlier indexes are then void).
    pub(super) fn insert(&mut self, header: &Header) -> (usize, Option<Retired>) {
        let Header { parent, first, variant, .. } = *header;
        debug_assert!(self.find(parent, first, variant).is_none(), "a node is there once");
        let hash = self.hash(parent, first, variant);
        let segment = segment_of(hash, self.parts.len());
        let retired = self.make_room(segment, 1);
        let table = self.segment(segment);
        // There is one: at most six lines in ten are in use.
        let index = vacancy(table, hash).unwrap_or_default();
        let line = table.line(index);
        let reused = line.parent() == PARENT_TOMBSTONE;
        table.tags.set(index, hash);
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

    /// Begins a change of a node that takes several steps, or that must become visible together with others.
    pub(super) fn open(&mut self, index: usize) {
        self.line(index).open();
    }

    /// Changes an open node; its key stays.
    pub(super) fn write(&mut self, index: usize, header: &Header) {
        let line = self.line(index);
        debug_assert!(line.is_at(header.parent, header.first, header.variant), "a node keeps its key");
        line.write(header);
    }

    /// Shows that no holder bit covers a node any more.
    pub(super) fn uncover(&mut self, index: usize) {
        self.line(index).uncover();
    }

    /// Shows that a node has become longer, as [`Line::lengthen`] says.
    pub(super) fn lengthen(&mut self, index: usize, len: u16) {
        self.line(index).lengthen(len);
    }

    /// Whether a line holds the node of a key.
    pub(super) fn is_at(&self, index: usize, parent: u32, first: u64, variant: u8) -> bool {
        self.line(index).is_at(parent, first, variant)
    }

    pub(super) fn id(&self, index: usize) -> u32 {
        self.line(index).header().id
    }

    pub(super) fn close(&mut self, index: usize) {
        self.line(index).close();
    }

    /// A mutant of [`remove`](Self::remove): the line becomes empty, whatever the next one is.
    #[cfg(all(test, kvrouted_loom))]
    pub(super) fn remove_without_a_tombstone(&mut self, index: usize) {
        self.of(index).vacate(index, PARENT_EMPTY);
    }

    /// Removes a node, open or not.
    pub(super) fn remove(&mut self, index: usize) {
        let segment = index >> LINE_BITS;
        let table = self.segment(segment);
        debug_assert!(!is_unused(table.line(index)), "only a node is removed");
        let is_last = table.line(index + 1).parent() == PARENT_EMPTY;
        let (mut emptied, mut at) = (0, index);
        if is_last {
            table.vacate(at, PARENT_EMPTY);
            // Tombstones keep a path going; this path ends here now.
            while table.line(at.wrapping_sub(1)).parent() == PARENT_TOMBSTONE {
                at = at.wrapping_sub(1);
                table.vacate(at, PARENT_EMPTY);
                emptied += 1;
            }
        } else {
            table.vacate(index, PARENT_TOMBSTONE);
        }
        let part = &mut self.parts[segment];
        part.tombstones = part.tombstones + usize::from(!is_last) - emptied;
        part.used -= 1;
        self.used -= 1;
        if self.is_underfull(segment) {
            self.underfull |= 1 << segment;
        }
    }
}

fn is_unused(line: &Line) -> bool {
    matches!(line.parent(), PARENT_EMPTY | PARENT_TOMBSTONE)
}

/// The line for a new node.
fn vacancy(table: Table<'_>, hash: u64) -> Option<usize> {
    table.path(hash).find(|at| is_unused(table.line(*at)))
}

/// The secret of the tables that the model checker sees.
#[cfg(all(test, kvrouted_loom))]
pub(super) const MODEL_SECRET: u64 = 1;

/// First local hashes of nodes below the root that have one home in the smallest table of that secret, and a tag each.
#[cfg(all(test, kvrouted_loom))]
pub(super) fn keys_of_one_home() -> [u64; 3] {
    let keys = Keys::new(MODEL_SECRET);
    let home = |first: u64| keys.hash(0, first, 0) >> (u64::BITS - LINES_MIN.ilog2());
    let mut firsts = (10..).filter(|first| home(*first) == home(10));
    let firsts = std::array::from_fn(|_| firsts.next().unwrap_or_default());
    let tags: std::collections::BTreeSet<u8> = firsts.iter().map(|first| keys.hash(0, *first, 0) as u8).collect();
    assert_eq!(tags.len(), 3, "no two have one tag");
    firsts
}

/// Lines of a table made for `nodes` nodes: at least a quarter as many more can be inserted before it is replaced.
fn lines_for(nodes: usize) -> usize {
    (5 * nodes * LOAD_LINES).div_ceil(4 * LOAD_USED_MAX).next_power_of_two().max(LINES_MIN)
}

/// The result of a search; `P` says where a line is.
#[derive(Clone, Copy)]
pub(super) enum Found<P> {
    /// The node: its line, and its header as of a version of that line.
    Here(P, u32, Header),
    /// At some moment during the search, the node did not exist.
    Missing,
    /// A line that may hold the node is being changed: try again.
    Busy,
}

/// The secret keys of the hash.
#[derive(Clone, Copy, Debug)]
struct Keys([u64; 2]);

impl Keys {
    fn new(secret: u64) -> Self {
        Self([spread(secret), spread(secret ^ 0x6a09_e667_f3bc_c909)])
    }

    /// The hash of a key; its highest bits choose the segment.
    ///
    /// The two halves of the secret hide both factors, so a client that knows the hash function but not the secret
    /// cannot choose colliding keys. One folded product and one multiplication spread the remaining structure of
    /// consecutive ids.
    #[inline]
    fn hash(self, parent: u32, first: u64, variant: u8) -> u64 {
        let place = u64::from(variant) << 32 | u64::from(parent);
        let product = u128::from(first ^ self.0[0]) * u128::from(place ^ self.0[1]);
        let folded = (product >> 64) as u64 ^ product as u64;
        folded.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// The lines of a segment, and their tags.
#[derive(Clone, Copy, Debug)]
pub(super) struct Table<'a> {
    lines: Word<Line>,
    tags: Tags<'a>,
}

impl<'a> Table<'a> {
    /// A segment.
    ///
    /// # Safety
    ///
    /// Both words came from a [`LineMemory`], and neither is freed for as long as the borrow lasts.
    #[inline(always)]
    const unsafe fn of(memory: SegmentMemory) -> Self {
        // SAFETY: the caller's promise, word for word.
        Self { lines: memory.lines, tags: unsafe { Tags::of(memory.tags) } }
    }

    fn lines(self) -> &'a [Line] {
        // SAFETY: the word has the address of as many lines, they live as long as the caller of `of` promised, and only
        // their atomics change.
        unsafe { std::slice::from_raw_parts(self.lines.start(), self.lines.count()) }
    }

    /// A line by its index; indexes wrap around.
    #[inline(always)]
    fn line(self, index: usize) -> &'a Line {
        // SAFETY: as above, and no index is greater than the mask.
        unsafe { &*self.lines.start().add(index & self.lines.mask()) }
    }

    /// The indexes that a search visits, each line once.
    fn path(self, hash: u64) -> impl Iterator<Item = usize> + use<> {
        let (home, mask) = (self.lines.home(hash), self.lines.mask());
        (0..=mask).map(move |step| (home + step) & mask)
    }

    /// Visits the lines on the path of a key whose tags are the key's, until `visit` returns something.
    #[inline(always)]
    fn search<T>(self, hash: u64, mut visit: impl FnMut(usize) -> Option<T>) -> Option<T> {
        let (home, mask) = (self.lines.home(hash), self.lines.mask());
        let mut step = 0;
        loop {
            let look = self.tags.look(home + step, hash);
            let is_end = look.is_end;
            for line in look {
                if let Some(found) = visit((home + step + line) & mask) {
                    return Some(found);
                }
            }
            step += WORD_TAGS;
            // No table is full. If the writer is faster than this search all the way round, then each line was once
            // another node's.
            if is_end || step > mask {
                return None;
            }
        }
    }

    /// Removes the node from a line. For the writer.
    fn vacate(self, index: usize, parent: u32) {
        self.line(index).vacate(parent);
        self.tags.clear(index, parent == PARENT_EMPTY);
    }

    /// Looks for a node whose key has this hash; returns where its line is.
    #[inline(always)]
    fn find_by(self, hash: u64, parent: u32, first: u64, variant: u8) -> Found<usize> {
        let found = self.search(hash, |at| match self.line(at).probe(parent, first, variant) {
            Probe::Other => None,
            Probe::Here(version, header) => Some(Found::Here(at, version, header)),
            Probe::Busy => Some(Found::Busy),
        });
        found.unwrap_or(Found::Missing)
    }

    /// Prefetches for the search of a key with this hash.
    #[inline(always)]
    fn prefetch(self, hash: u64) {
        let home = self.lines.home(hash);
        self.tags.prefetch(home);
        prefetch(std::ptr::from_ref(self.line(home)).cast());
    }
}

/// The current lines of every segment, and a count of replacements, over all segments.
///
/// Each segment is stored here as two [`Word`]s, the addresses of its lines and of its tags, each with their number. So a
/// search goes from here directly to the tag and the line that it looks for.
#[derive(Debug)]
pub(super) struct TableHead {
    /// A power of two of them.
    segments: Box<[SegmentCell]>,
    keys: Keys,
    generation: SeqWord,
    memory: LineMemory,
}

/// Where readers find a segment.
#[derive(Debug)]
struct SegmentCell {
    lines: AtomicPtr<Line>,
    tags: AtomicPtr<TagLine>,
}

impl SegmentCell {
    fn new(memory: SegmentMemory) -> Self {
        Self { lines: AtomicPtr::new(memory.lines.0), tags: AtomicPtr::new(memory.tags.0) }
    }
}

impl TableHead {
    /// `1 << segment_bits` empty segments, each of `lines` lines.
    fn new((segment_bits, lines): (u32, usize), keys: Keys, memory: LineMemory) -> Self {
        let segments = (0..1 << segment_bits).map(|_| SegmentCell::new(memory.allocate(lines))).collect();
        Self { segments, keys, generation: SeqWord::new(), memory }
    }

    const fn keys(&self) -> Keys {
        self.keys
    }

    /// Twice the count of replacements over all segments; `None` while a segment is being replaced. Load it before a
    /// walk and compare it after the walk.
    #[inline]
    pub(super) fn generation(&self) -> Option<u64> {
        // GROWTH: pairs with the Release store in `replace`. Behind a walk it comes after the fence that ends
        // every read of a line.
        self.generation.begin_read()
    }

    /// The current lines of a segment.
    ///
    /// # Safety
    ///
    /// Lines that are replaced while the borrow lasts must not be freed before the borrow ends.
    #[inline]
    unsafe fn segment(&self, segment: usize) -> Table<'_> {
        let SegmentCell { lines, tags } = &self.segments[segment];
        // SWING, both: pairs with the Release stores in `replace`; SeqCst for the grace period (see the module).
        let memory =
            SegmentMemory { lines: Word(lines.load(Ordering::SeqCst)), tags: Word(tags.load(Ordering::SeqCst)) };
        // SAFETY: all words here come from the table's memory, and by the promise above the lines are not freed.
        unsafe { Table::of(memory) }
    }

    /// Looks for a node in a segment of this table.
    #[cfg(test)]
    pub(super) fn find<'a>(&self, table: Table<'a>, parent: u32, first: u64, variant: u8) -> Found<&'a Line> {
        match table.find_by(self.keys.hash(parent, first, variant), parent, first, variant) {
            Found::Here(at, version, header) => Found::Here(table.line(at), version, header),
            Found::Missing => Found::Missing,
            Found::Busy => Found::Busy,
        }
    }

    /// The lines of the only segment.
    ///
    /// # Safety
    ///
    /// As [`segment`](Self::segment).
    #[cfg(all(test, kvrouted_loom))]
    pub(super) unsafe fn table(&self) -> Table<'_> {
        // SAFETY: the caller's promise, word for word.
        unsafe { self.segment(0) }
    }

    /// Shows readers other, complete lines in place of those of a segment, and returns the lines before. Only the
    /// writer calls this.
    fn replace(&self, segment: usize, fresh: SegmentMemory) -> SegmentMemory {
        let SegmentCell { lines, tags } = &self.segments[segment];
        // Relaxed, both: the writer reads what it wrote.
        let old =
            SegmentMemory { lines: Word(lines.load(Ordering::Relaxed)), tags: Word(tags.load(Ordering::Relaxed)) };
        // SHIFT: a reader that has loaded a new word is shown an odd generation or a later one.
        self.generation.begin_write();
        // SWING, both: pairs with the loads in `segment`.
        lines.store(fresh.lines.0, Ordering::Release);
        tags.store(fresh.tags.0, Ordering::Release);
        // GROWTH: pairs with the load in `generation`.
        self.generation.end_write();
        old
    }
}

impl Drop for TableHead {
    fn drop(&mut self) {
        for SegmentCell { lines, tags } in &self.segments {
            // Relaxed, both: the last owner drops it, after all others let it go.
            let memory =
                SegmentMemory { lines: Word(lines.load(Ordering::Relaxed)), tags: Word(tags.load(Ordering::Relaxed)) };
            // SAFETY: the words in the head came from this memory and have no other owner: borrows of the lines are also
            // borrows of the head.
            unsafe { self.memory.free(memory) };
        }
    }
}

/// A reader's handle on a table.
#[derive(Clone, Debug)]
pub(super) struct TableView {
    head: Arc<TableHead>,
    reclaimer: Reclaimer,
}

impl TableView {
    /// A view of the table behind `head`.
    ///
    /// # Safety
    ///
    /// Tables that are replaced there must go to the garbage of `reclaimer`.
    pub(super) unsafe fn new(head: Arc<TableHead>, reclaimer: Reclaimer) -> Self {
        Self { head, reclaimer }
    }

    /// As [`TableHead::generation`].
    #[inline]
    pub(super) fn generation(&self) -> Option<u64> {
        self.head.generation()
    }

    /// The segments, for as long as the guard is there.
    ///
    /// # Panics
    ///
    /// If the guard is another reclaimer's.
    #[inline]
    pub(super) fn load<'a>(&'a self, guard: &'a Guard<'_>) -> Segments<'a> {
        assert!(guard.is_of(&self.reclaimer), "a guard protects what its own reclaimer frees");
        Segments { head: &self.head }
    }
}

/// The segments of a table, for a reader that is inside. Each search uses the current lines; the generation tells
/// whether some were replaced in the course of a walk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segments<'a> {
    head: &'a TableHead,
}

impl<'a> Segments<'a> {
    #[inline]
    fn table(self, segment: usize) -> Table<'a> {
        // SAFETY: the reclaimer frees replaced lines, and waits for the guard that was given to `load`.
        unsafe { self.head.segment(segment) }
    }

    /// Begins to look for the first variant of a node: prefetches what [`Search::find`] is likely to read.
    #[inline(always)]
    pub(super) fn search(self, parent: u32, first: u64) -> Search<'a> {
        let hash = self.head.keys.hash(parent, first, 0);
        let (segment, table) = self.of(hash);
        table.prefetch(hash);
        Search { segment, table, hash, parent, first }
    }

    /// Looks for any variant of a node.
    pub(super) fn find(self, parent: u32, first: u64, variant: u8) -> Found<u32> {
        let hash = self.head.keys.hash(parent, first, variant);
        let (segment, table) = self.of(hash);
        in_segment(segment, table.find_by(hash, parent, first, variant))
    }

    /// The segment of a key with this hash.
    #[inline(always)]
    fn of(self, hash: u64) -> (usize, Table<'a>) {
        let segment = segment_of(hash, self.head.segments.len());
        (segment, self.table(segment))
    }

    /// The version of a line, to compare with an earlier one; of another line if the segment was replaced.
    #[inline]
    pub(super) fn version(self, index: u32) -> u32 {
        self.table((index >> LINE_BITS) as usize).line(index as usize).version()
    }
}

/// A search that has begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct Search<'a> {
    segment: usize,
    table: Table<'a>,
    hash: u64,
    parent: u32,
    first: u64,
}

impl Search<'_> {
    #[inline(always)]
    pub(super) fn find(self) -> Found<u32> {
        in_segment(self.segment, self.table.find_by(self.hash, self.parent, self.first, 0))
    }
}

/// The same line, by its index in the whole table.
#[inline(always)]
fn in_segment(segment: usize, found: Found<usize>) -> Found<u32> {
    match found {
        Found::Here(at, version, header) => Found::Here((segment << LINE_BITS | at) as u32, version, header),
        Found::Missing => Found::Missing,
        Found::Busy => Found::Busy,
    }
}

#[cfg(all(test, not(kvrouted_loom)))]
mod tests;
