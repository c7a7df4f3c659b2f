//! The tree of a shard as its writer sees it: nodes, the words they own, and the names that lead to the words.
//!
//! A change of a node ends with its header being published; until then readers see the node as it was. Each change says
//! what it means for readers.

#![expect(
    unsafe_code,
    reason = "headers have the addresses of boxed overflow records, and a table's garbage has one reclaimer"
)]

use super::arena::{Arena, CHUNK_WORDS};
use super::header::{Header, Overflow, encode};
use super::holders::{HolderBit, HolderBits, HolderTable};
use super::name_map::NameMap;
use super::new_references::SpareLists;
use super::node::{Column, Entry, Extent, GRANULE_WORDS, NodeId, Place};
use super::node_pages::Nodes;
use super::reclaim::{Garbage, Reclaimer};
use super::row_pool::Rows;
use super::shared_index::{ShardHead, SharedIndex};
use super::table::{Retired, SEGMENT_BITS, TableView, TableWriter};
use crate::ids::{EngineHash, LocalHash};
use crate::limits::NODE_BLOCKS_MAX;
use hashbrown::HashMap;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::Arc;

/// Memory that the writer no longer needs but that readers may still look at.
#[derive(Debug)]
pub(super) enum Waste {
    /// Words of the arena: the first, and the number.
    Words(u32, u32),
    Overflow(#[expect(dead_code, reason = "dropped after the grace period")] Box<Overflow>),
    HolderTable(#[expect(dead_code, reason = "dropped after the grace period")] Box<HolderTable>),
    Table(#[expect(dead_code, reason = "dropped after the grace period")] Retired),
    SharedIndex(#[expect(dead_code, reason = "dropped after the grace period")] Box<SharedIndex>),
}

/// The tree of one shard, and everything it is made of.
#[derive(Debug)]
pub(super) struct Tree {
    pub(super) arena: Arena,
    /// The memory of the name map and of the table.
    rows: Rows,
    pub(super) name_map: NameMap,
    pub(super) table: TableWriter,
    pub(super) nodes: Nodes,
    pub(super) holders: HolderBits,
    pub(super) garbage: Garbage<Waste>,
    /// Names that several words have, and how many words beyond the first.
    pub(super) duplicate_names: HashMap<EngineHash, u32>,
    pub(super) node_blocks_max: u16,
    /// Nodes that may be joined with their only child.
    pub(super) joins: VecDeque<NodeId>,
    /// Nodes to be published before the multi-write ends.
    touched: Vec<NodeId>,
    /// Nodes that a sweep in progress would miss, because they were made behind it.
    pub(super) unswept: Vec<NodeId>,
    pub(super) sweeping: bool,
    /// Empty lists for the names of the batch that begins next.
    pub(super) spare_lists: SpareLists,
    pub(super) head: Arc<ShardHead>,
    /// All slots of workers are below this.
    pub(super) workers: usize,
    /// Memory of all workers' records.
    pub(super) workers_bytes: u64,
    /// Bound blocks that have a place, over all workers.
    pub(super) placed: u64,
}

/// Bytes that a name takes in the name map, at most: while a segment grows, the name is there twice.
const NAME_BYTES_MAX: u64 = 22;
/// Capacity of `touched` that is kept from one event to the next.
const TOUCHED_KEPT: usize = 1024;

impl Tree {
    /// An empty tree; `epoch` is the number of batches that had ended before it.
    pub(super) fn new(reclaimer: &Reclaimer, node_blocks_max: usize, secret: u64, epoch: u64) -> Self {
        let rows = Rows::new();
        Self {
            arena: Arena::new(secret),
            name_map: NameMap::new(secret, rows.clone()),
            table: TableWriter::segmented(SEGMENT_BITS, 0, secret, rows.clone()),
            rows,
            nodes: Nodes::new(),
            holders: HolderBits::default(),
            garbage: Garbage::new(reclaimer),
            duplicate_names: HashMap::default(),
            node_blocks_max: node_blocks_max.clamp(1, NODE_BLOCKS_MAX) as u16,
            joins: VecDeque::new(),
            touched: Vec::new(),
            unswept: Vec::new(),
            sweeping: false,
            spare_lists: SpareLists::default(),
            head: Arc::new(ShardHead::new(epoch)),
            workers: 0,
            workers_bytes: 0,
            placed: 0,
        }
    }

    /// Has memory mapped before it is needed from now on, or no longer.
    pub(super) fn set_maps_ahead(&mut self, maps_ahead: bool) {
        self.arena.set_maps_ahead(maps_ahead);
        self.rows.set_maps_ahead(maps_ahead);
    }

    /// What readers of this tree need.
    pub(super) fn shared_index(&self, reclaimer: &Reclaimer) -> SharedIndex {
        // SAFETY: replaced tables become the tree's garbage, which goes to this reclaimer.
        let table = unsafe { TableView::new(self.table.head().clone(), reclaimer.clone()) };
        SharedIndex { head: Arc::clone(&self.head), table, arena: self.arena.view() }
    }

    /// Shows readers the current holder bits.
    pub(super) fn publish_holders(&mut self) {
        let table = self.holders.table(self.workers);
        let bytes = table.bytes();
        let nested = self.head.in_multi_write();
        if !nested {
            self.head.begin_multi_write();
        }
        let before = self.head.replace_holders(table);
        if !nested {
            self.head.end_multi_write();
        }
        self.garbage.push(Waste::HolderTable(before), bytes);
    }

    /// Hands garbage to the reclaimer, and reuses what it returns.
    pub(super) fn reclaim(&mut self, all: bool) {
        if all {
            self.garbage.flush_now();
        } else {
            self.garbage.flush();
        }
        let Self { garbage, arena, .. } = self;
        garbage.collect(|waste| {
            if let Waste::Words(base, words) = waste {
                arena.free(base, words);
            }
        });
    }

    /// Memory of the tree, including garbage that waits for readers.
    pub(super) fn bytes(&self) -> u64 {
        let parts = self.arena.bytes() + self.name_map.bytes() + self.table.bytes() + self.nodes.bytes();
        parts + self.idle_rows_bytes() + self.lists_bytes() + self.workers_bytes + self.garbage.waiting_bytes()
    }

    /// Memory that neither the name map nor the table use now.
    pub(super) fn idle_rows_bytes(&self) -> u64 {
        self.rows.idle_bytes()
    }

    /// Memory of the lists of nodes and names for later.
    pub(super) fn lists_bytes(&self) -> u64 {
        let nodes = self.joins.capacity() + self.touched.capacity() + self.unswept.capacity();
        let duplicate_names = self.duplicate_names.capacity() * size_of::<(EngineHash, u32)>();
        (nodes * size_of::<NodeId>() + duplicate_names + self.spare_lists.bytes()) as u64
    }

    /// An upper bound of [`bytes`](Self::bytes) after `blocks` more are stored.
    pub(super) fn bytes_with(&self, blocks: u64) -> u64 {
        // Two words each, in the worst case each with a granule of its own.
        let words = blocks * 2 + 4 * u64::from(GRANULE_WORDS);
        let lacking = (words * 2).saturating_sub(self.arena.free_words()) * 8;
        let chunk = u64::from(CHUNK_WORDS) * 8;
        let nodes = blocks / u64::from(self.node_blocks_max) + 2;
        self.bytes()
            + lacking.next_multiple_of(chunk)
            + self.rows.growth_bytes(self.table.growth_bytes(nodes as usize) + blocks * NAME_BYTES_MAX)
            + self.nodes.growth_bytes(nodes as usize)
    }

    pub(super) fn name(&self, word: u32) -> EngineHash {
        EngineHash(self.arena.word(word))
    }

    pub(super) fn locals(&self, id: NodeId) -> &[u64] {
        let node = &self.nodes[id];
        self.arena.words(node.locals.base, u32::from(node.len))
    }

    pub(super) fn names(&self, column: &Column) -> &[u64] {
        self.arena.words(column.names.base, u32::from(column.len))
    }

    /// The node and block named by a word, and which of the node's columns has the name.
    ///
    /// Where two nodes share a granule, its owner is the lower one, so the nodes above are searched too.
    pub(super) fn resolve(&self, word: u32) -> Option<(Place, u16)> {
        let mut id = NodeId(self.arena.owner(word));
        while id != NodeId::ROOT && id.is_some() {
            // The owner of a word whose name has just been forgotten may be a deleted node.
            let node = self.nodes.get(id)?;
            if let Some((column, at)) = node.named_at(word) {
                return Some((Place { node: id, at }, column));
            }
            id = node.parent;
        }
        None
    }

    /// Prefetches what an event about a name reads first.
    pub(super) fn prefetch_far(&self, name: EngineHash) {
        self.name_map.prefetch(self.name_map.spot(name.0));
    }

    /// Prefetches what it reads next, some time after [`prefetch_far`](Self::prefetch_far).
    pub(super) fn prefetch_near(&self, name: EngineHash) {
        if let Some(word) = self.name_map.likely(self.name_map.spot(name.0)) {
            self.arena.prefetch(word);
            self.arena.prefetch_owner(word);
        }
    }

    /// Prefetches what it reads last, some time after [`prefetch_near`](Self::prefetch_near).
    pub(super) fn prefetch_node(&self, name: EngineHash) {
        if let Some(word) = self.name_map.likely(self.name_map.spot(name.0)) {
            self.nodes.prefetch(NodeId(self.arena.owner(word)));
        }
    }

    /// Shrinks up to `parts_max` underfull segments of the name map, and as many of the table.
    pub(super) fn shrink(&mut self, parts_max: usize) {
        let Self { name_map, arena, .. } = self;
        name_map.shrink(parts_max, |word| arena.word(word));
        for _ in 0..parts_max {
            let Some(retired) = self.table.shrink() else { return };
            let bytes = retired.bytes();
            self.garbage.push(Waste::Table(retired), bytes);
        }
    }

    /// Every word that has a name.
    pub(super) fn words_named(&self, name: EngineHash) -> SmallVec<[u32; 2]> {
        let mut words = SmallVec::new();
        self.name_map.find(self.name_map.spot(name.0), |word| {
            if self.name(word) == name {
                words.push(word);
            }
            false
        });
        words
    }

    /// The entry of a holder bit at a node, made with this column if it does not exist.
    pub(super) fn enter(&mut self, id: NodeId, holder: HolderBit, column: u16) -> &mut Entry {
        let node = &mut self.nodes[id];
        if node.find(holder).is_err() {
            self.holders.add_nodes(holder, 1);
        }
        node.enter(holder, column)
    }

    /// A holder bit covers a block from now on, once the node is published.
    pub(super) fn cover(&mut self, place: Place, holder: HolderBit, column: u16) {
        self.enter(place.node, holder, column).add(place.at, place.at + 1);
    }

    /// A holder bit no longer covers a block, once the node is published.
    pub(super) fn uncover(&mut self, place: Place, holder: HolderBit) {
        let node = &mut self.nodes[place.node];
        if let Ok(at) = node.find(holder) {
            node.entries[at].take(place.at, place.at + 1);
        }
    }

    /// Frees the granules of local hashes from block `from` on, once no reader looks at them.
    pub(super) fn waste_locals(&mut self, locals: &Extent, from: u16) {
        let (base, words) = locals.granules_from(from);
        if words > 0 {
            self.garbage.push(Waste::Words(base, words), u64::from(words) * 8);
        }
    }

    pub(super) fn line(&self, id: NodeId) -> Option<usize> {
        let node = &self.nodes[id];
        let hint = node.line as usize;
        if self.table.is_at(hint, node.parent.0, node.first, node.variant) {
            return Some(hint);
        }
        self.table.find(node.parent.0, node.first, node.variant)
    }

    /// The child of a node that begins with this content.
    pub(super) fn child(&self, of: NodeId, local: LocalHash, variant: u8) -> Option<NodeId> {
        let line = self.table.find(of.0, local.0, variant)?;
        Some(NodeId(self.table.id(line)))
    }

    /// The current header of a node, for readers. Its overflow record replaces the one before.
    pub(super) fn header(&mut self, id: NodeId) -> Header {
        let mut beside = 0;
        let header = encode(id, &self.nodes[id], &self.holders, |overflow| {
            beside = overflow.as_ref().map_or(0, |overflow| overflow.bytes() as usize);
            overflow.map_or(0, |overflow| Box::into_raw(overflow) as u64)
        });
        self.nodes.set_side_bytes(id, self.nodes[id].heap_bytes() + beside);
        let before = std::mem::replace(&mut self.nodes[id].overflow, header.overflow);
        self.waste_overflow(before);
        header
    }

    pub(super) fn waste_overflow(&mut self, address: u64) {
        if address != 0 {
            // SAFETY: every address in a node's `overflow` comes from `Box::into_raw` in `header`. It is taken out of
            // the node before it is given here, so there is one box for it.
            let overflow = unsafe { Box::from_raw(address as *mut Overflow) };
            let bytes = overflow.bytes();
            self.garbage.push(Waste::Overflow(overflow), bytes);
        }
    }

    /// Shows readers the node as it is.
    pub(super) fn publish(&mut self, id: NodeId) {
        if id == NodeId::ROOT {
            return;
        }
        let line = self.line(id).expect("a node has a header");
        self.nodes[id].line = line as u32;
        #[cfg(test)]
        super::failpoints::at_line(self.nodes[id].first, || self.table.open(line));
        let header = self.header(id);
        self.table.update(line, &header);
    }

    /// Shows readers the new length of a node whose one entry covers all of it, as it did before. They must see everything
    /// else of the node already. Cheaper than [`publish`](Self::publish).
    pub(super) fn publish_longer(&mut self, id: NodeId) {
        let line = self.line(id).expect("a node has a header");
        let node = &mut self.nodes[id];
        node.line = line as u32;
        let len = node.len;
        #[cfg(test)]
        super::failpoints::at_line(self.nodes[id].first, || self.table.open(line));
        self.table.lengthen(line, len);
        debug_assert_eq!(
            self.table.header(line),
            encode(id, &self.nodes[id], &self.holders, |_| 0),
            "readers see nothing else of the node that is out of date"
        );
    }

    /// Shows readers a node that lost coverage. Cheaper than [`publish`](Self::publish) for a leaf that no holder bit
    /// covers any more, which is about to be deleted.
    pub(super) fn publish_loss(&mut self, id: NodeId) {
        let node = &self.nodes[id];
        if node.has_children() || !node.entries.iter().all(Entry::is_empty) {
            self.publish(id);
            return;
        }
        let line = self.line(id).expect("a node has a header");
        self.nodes[id].line = line as u32;
        self.table.uncover(line);
    }

    /// During a multi-write: publishes a node when [`publish_touched`](Self::publish_touched) is called. Publishing
    /// after each block would leave an overflow record for each block.
    pub(super) fn publish_later(&mut self, id: NodeId) {
        if self.touched.last() != Some(&id) {
            self.touched.push(id);
        }
    }

    /// Publishes the touched nodes. If one was deleted meanwhile, the node that reuses its number is published instead.
    pub(super) fn publish_touched(&mut self) {
        let mut touched = std::mem::take(&mut self.touched);
        for id in touched.drain(..) {
            if self.nodes.is_used(id) {
                self.publish(id);
            }
        }
        self.touched = touched;
        self.touched.shrink_to(TOUCHED_KEPT);
    }

    /// Shows a node to readers for the first time.
    pub(super) fn insert(&mut self, id: NodeId) {
        let header = self.header(id);
        let (line, retired) = self.table.insert(&header);
        self.nodes[id].line = line as u32;
        if let Some(retired) = retired {
            let bytes = retired.bytes();
            self.garbage.push(Waste::Table(retired), bytes);
        }
    }
}

impl Drop for Tree {
    /// Readers may still be looking at the overflow records of headers.
    fn drop(&mut self) {
        for id in (1..self.nodes.end()).map(NodeId) {
            if !self.nodes.is_used(id) {
                continue;
            }
            let overflow = std::mem::take(&mut self.nodes[id].overflow);
            self.waste_overflow(overflow);
        }
    }
}

impl Tree {
    /// Adds a name for a word, even if other words have the same name.
    pub(super) fn put_name(&mut self, name: u64, word: u32) {
        let Self { name_map, arena, .. } = self;
        let name_of = |word: u32| arena.word(word);
        if name_map.put_new(&[name], word, name_of).is_err() {
            name_map.put(name, word, name_of);
            *self.duplicate_names.entry(EngineHash(name)).or_insert(0) += 1;
        }
    }

    /// Forgets the names of an extent from block `from` up to `to`.
    pub(super) fn take_names(&mut self, names: &Extent, from: u16, to: u16) {
        let Self { name_map, arena, duplicate_names, .. } = self;
        let base = names.base + u32::from(from);
        let names = arena.words(base, u32::from(to.saturating_sub(from)));
        let taken = name_map.take(names, base);
        debug_assert_eq!(taken, names.len(), "names that are forgotten were known");
        if duplicate_names.is_empty() {
            return;
        }
        for name in names {
            if let Some(others) = duplicate_names.get_mut(&EngineHash(*name)) {
                *others -= 1;
                if *others == 0 {
                    duplicate_names.remove(&EngineHash(*name));
                }
            }
        }
    }

    /// Frees the granules of names from block `from` on. At once, as only the writer reads names.
    pub(super) fn free_names(&mut self, names: &Extent, from: u16) {
        let (base, words) = names.granules_from(from);
        if words > 0 {
            self.arena.free(base, words);
        }
    }

    /// Makes node `id` the owner of the granules of an extent of names, from the one in which the extent begins up to,
    /// and not including, the one in which `end` lies. That last granule is not changed: if names of other nodes follow
    /// in it, the last of those nodes owns it.
    pub(super) fn own(&mut self, names: &Extent, end: u32, id: NodeId) {
        let base = names.base / GRANULE_WORDS * GRANULE_WORDS;
        let end = end / GRANULE_WORDS * GRANULE_WORDS;
        if base < end {
            self.arena.set_owner(base, end - base, id.0);
        }
    }

    /// As [`own`](Self::own), for an extent after which no other node's names come.
    pub(super) fn own_all(&mut self, names: &Extent, id: NodeId) {
        let end = (names.base + u32::from(names.room)).next_multiple_of(GRANULE_WORDS);
        self.own(names, end, id);
    }

    /// Frees an extent of names that a node no longer needs.
    ///
    /// The granule in which it begins stays with the node above if that has names in it too. The granule in which it
    /// ends goes to the node below if that has names in it.
    pub(super) fn release_names(&mut self, id: NodeId, names: Extent) {
        let end = names.base + u32::from(names.room);
        let below = self.names_behind(id, end);
        let is_guest = !names.base.is_multiple_of(GRANULE_WORDS) && !names.owns_head;
        if is_guest && end <= names.base.next_multiple_of(GRANULE_WORDS) {
            if below.is_none() {
                self.hand_head(id, &names);
            }
            return;
        }
        if is_guest {
            self.hand_head(id, &names);
        }
        if let Some((node, column)) = below {
            self.nodes[node].columns[column].names.owns_head = true;
        }
        self.free_names(&names.without_tail(below.is_some()), 0);
    }

    /// The names that follow in the granule in which an extent ends. The granule's owner is the last such node.
    fn names_behind(&self, id: NodeId, end: u32) -> Option<(NodeId, usize)> {
        let granule_end = end.next_multiple_of(GRANULE_WORDS);
        let mut below = NodeId(if end == granule_end { 0 } else { self.arena.owner(end) });
        let mut first = None;
        while below != id && below != NodeId::ROOT && self.nodes.is_used(below) {
            let mut columns = self.nodes[below].columns.iter();
            if let Some(at) = columns.position(|column| (end..granule_end).contains(&column.names.base)) {
                first = Some((below, at));
            }
            below = self.nodes[below].parent;
        }
        first
    }

    /// Gives the granule in which an extent begins back to the nearest node above that has names in it.
    fn hand_head(&mut self, id: NodeId, names: &Extent) {
        let granule = names.base / GRANULE_WORDS * GRANULE_WORDS;
        let mut above = self.nodes[id].parent;
        while above.is_some() && above != NodeId::ROOT {
            let is_there = |column: &Column| {
                let own = column.names.base;
                own < names.base && own + u32::from(column.len) > granule
            };
            if self.nodes[above].columns.iter().any(is_there) {
                self.arena.set_owner(granule, GRANULE_WORDS, above.0);
                return;
            }
            above = self.nodes[above].parent;
        }
    }
}
