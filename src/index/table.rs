//! The hash table of a shard: a line for every node, found by (parent, first local hash, variant).
//!
//! Open addressing with linear probing over a power of two of [`Line`]s, at most six in ten of them in use.
//! The line *is* the node's header, so a hop of a walk is one cache miss. One thread writes
//! ([`TableWriter`]); any number read ([`TableView`] gives them the [`Table`] of the moment).
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
//! | SWING  | Release store of the pointer, all lines of the new table before it | SeqCst load of the pointer in `load` |
//! | GROWTH | Release store of the generation, after SWING, before any change in the new table | Acquire load before SWING's; behind a fence once more after the walk |
//!
//! * The new table is filled while no reader knows it. SWING makes its lines visible with its address.
//! * The old table is not touched again: all its lines can be read, as they were, until its grace period has passed.
//! * A reader loads the generation, then the pointer, walks, and compares the generation. An equal
//!   generation says that no change was made in any newer table than the one it walked: GROWTH comes before such
//!   a change, so a reader who has met one (or anything the writer published after it) is shown the new
//!   generation by CLOSE and the fence. A reader who has not may have walked the old table: it is what the
//!   shard was at the swing. Two loads of the pointer within one walk can give two tables; the
//!   generation shows that too.
//! * A reader whose first load gives the new generation cannot get the old table: SWING comes before GROWTH.
//! * The load of the pointer is SeqCst for the grace period, as the load that begins the read of a line is.

#![expect(unsafe_code, reason = "tables are replaced behind a pointer, and their memory comes zeroed")]

mod lines;
mod view;

pub(super) use lines::{Found, Table};
pub(super) use view::{Head, TableView};

use super::header::{Header, Line, PARENT_EMPTY, PARENT_TOMBSTONE};
use super::sync::Arc;

/// Lines of the smallest table.
pub(super) const LINES_MIN: usize = 8;
/// Of every [`LOAD_LINES`] lines at most this many are in use, tombstones included.
const LOAD_USED_MAX: usize = 6;
/// See [`LOAD_USED_MAX`].
const LOAD_LINES: usize = 10;

/// A table that a larger (or a clean) one has replaced. Readers may still be in it.
///
/// To drop it frees its memory: give it to the garbage of the readers' reclaimer.
#[must_use = "readers may still be in it: give it to the reclaimer"]
#[derive(Debug)]
pub(super) struct Retired {
    table: std::ptr::NonNull<Table>,
    bytes: u64,
}

// SAFETY: it owns the table alone but for readers, who only have shared references, and `Table` is `Send + Sync`.
unsafe impl Send for Retired {}

impl Retired {
    /// Memory that comes back with it.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Retired {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `Box::into_raw` and was taken out of the head, once. That no reader has
        // it any more is what whoever drops this promises.
        drop(unsafe { Box::from_raw(self.table.as_ptr()) });
    }
}

/// The one hand that changes a table. Lines are named by their index, which is good until the table grows.
#[derive(Debug)]
pub(super) struct TableWriter {
    head: Arc<Head>,
    used: usize,
    tombstones: usize,
    secret: u64,
}

impl TableWriter {
    /// An empty table with room for `nodes` nodes; `secret` is mixed into where they go.
    pub(super) fn new(nodes: usize, secret: u64) -> Self {
        let table = Table::new(lines_for(nodes), secret);
        Self { head: Arc::new(Head::new(table)), used: 0, tombstones: 0, secret }
    }

    /// What views of this table share.
    pub(super) fn head(&self) -> &Arc<Head> {
        &self.head
    }

    fn table(&self) -> &Table {
        // SAFETY: only this writer replaces the table, by `&mut self`, so it lives as long as this borrow.
        unsafe { self.head.table() }
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
    pub(super) fn lines(&self) -> usize {
        self.table().lines().len()
    }

    /// Memory of the table, in bytes; not that of retired ones.
    pub(super) fn bytes(&self) -> u64 {
        bytes_of(self.lines())
    }

    /// How often the table was replaced.
    #[cfg(test)]
    pub(super) fn generation(&self) -> u64 {
        self.head.generation()
    }

    /// The line of a node.
    pub(super) fn find(&self, parent: u32, first: u64, variant: u8) -> Option<usize> {
        let table = self.table();
        let path = table.path(parent, first, variant);
        for at in path {
            let line = table.line(at);
            if line.is_at(parent, first, variant) {
                return Some(at);
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
        self.table().line(index).header()
    }

    /// All nodes, in no particular order.
    #[cfg(test)]
    pub(super) fn headers(&self) -> impl Iterator<Item = (usize, Header)> + '_ {
        let lines = self.table().lines().iter().enumerate();
        lines.filter(|(_, line)| !is_nobody(line)).map(|(at, line)| (at, line.header()))
    }

    /// Bytes of the table that `more` inserts would make necessary; 0 if there is room for them.
    pub(super) fn growth_bytes(&self, more: usize) -> u64 {
        if self.has_room(more) { 0 } else { bytes_of(lines_for(self.used + more)) }
    }

    fn has_room(&self, more: usize) -> bool {
        (self.used + self.tombstones + more) * LOAD_LINES <= self.lines() * LOAD_USED_MAX
    }

    /// Makes room for `more` inserts: until so many were made, no insert replaces the table and every index stays
    /// good. If it had to be replaced, indexes given out before are void and the old table comes back.
    pub(super) fn reserve(&mut self, more: usize) -> Option<Retired> {
        if self.has_room(more) {
            return None;
        }
        let fresh = Table::new(lines_for(self.used + more), self.secret);
        for line in self.table().lines().iter().filter(|line| !is_nobody(line)) {
            let Header { parent, first, variant, .. } = line.header();
            if let Some(at) = vacancy(&fresh, parent, first, variant) {
                fresh.line(at).copy_from(line);
            }
        }
        let bytes = self.bytes();
        let table = self.head.replace(fresh);
        self.tombstones = 0;
        Some(Retired { table, bytes })
    }

    /// Adds a node that is not there, complete or not at all for readers. Where it is, and the old table if
    /// this one had to be replaced (indexes given out before are then void).
    pub(super) fn insert(&mut self, header: &Header) -> (usize, Option<Retired>) {
        debug_assert!(self.find(header.parent, header.first, header.variant).is_none(), "a node is there once");
        let retired = self.reserve(1);
        // There is one: at most six lines in ten are in use.
        let index = vacancy(self.table(), header.parent, header.first, header.variant).unwrap_or_default();
        let line = self.table().line(index);
        let reused = line.parent() == PARENT_TOMBSTONE;
        line.publish(header);
        self.tombstones -= usize::from(reused);
        self.used += 1;
        (index, retired)
    }

    /// Replaces the header of a node; its key stays.
    pub(super) fn update(&mut self, index: usize, header: &Header) {
        self.open(index);
        self.write(index, header);
        self.close(index);
    }

    /// Begins a change of a node that takes more than one step, or that shall become visible together with others.
    pub(super) fn open(&mut self, index: usize) {
        self.table().line(index).open();
    }

    /// Changes an open node; its key stays.
    pub(super) fn write(&mut self, index: usize, header: &Header) {
        let line = self.table().line(index);
        debug_assert!(line.is_at(header.parent, header.first, header.variant), "a node keeps its key");
        line.write(header);
    }

    /// Whether a line is a node's.
    pub(super) fn is_at(&self, index: usize, parent: u32, first: u64, variant: u8) -> bool {
        self.table().line(index).is_at(parent, first, variant)
    }

    /// The number of a node.
    pub(super) fn id(&self, index: usize) -> u32 {
        self.table().line(index).header().id
    }

    /// Ends a change.
    pub(super) fn close(&mut self, index: usize) {
        self.table().line(index).close();
    }

    /// Takes a node away, open or not.
    pub(super) fn remove(&mut self, index: usize) {
        let table = self.table();
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
        self.tombstones = self.tombstones + usize::from(!is_last) - emptied;
        self.used -= 1;
    }
}

fn is_nobody(line: &Line) -> bool {
    matches!(line.parent(), PARENT_EMPTY | PARENT_TOMBSTONE)
}

/// The line where a node that is not there goes.
fn vacancy(table: &Table, parent: u32, first: u64, variant: u8) -> Option<usize> {
    table.path(parent, first, variant).find(|at| is_nobody(table.line(*at)))
}

/// Lines of a table made for `nodes` nodes: as many again can be inserted before the next one.
fn lines_for(nodes: usize) -> usize {
    (2 * nodes * LOAD_LINES).div_ceil(LOAD_USED_MAX).next_power_of_two().max(LINES_MIN)
}

fn bytes_of(lines: usize) -> u64 {
    (lines * size_of::<Line>()) as u64
}

#[cfg(all(test, not(kvrouted_loom)))]
mod tests;
