//! Maintenance of the tree: splits of nodes, joins of a node with its only child, and the sweep that removes a cleared
//! worker's holder bits from the nodes.

use super::holders::{HolderBit, HolderState};
use super::node::{Column, Extent, GRANULE_WORDS, Node, NodeId};
use super::tree::Tree;
use super::worker::Worker;
use crate::ids::WorkerSlot;
use crate::limits::{INDEX_GARBAGE_BYTES_STRAINED, JOIN_BLOCKS_MAX};
use smallvec::SmallVec;

impl Tree {
    /// Splits a node in two: the blocks before `at` become a node of their own, the rest keeps the node ID.
    ///
    /// No data is copied. A reader sees either the unsplit node or both halves, because the second half is published
    /// under its new key before the old key's header is shortened.
    pub(super) fn split(&mut self, id: NodeId, at: u16) -> NodeId {
        self.nodes[id].entries.iter().for_each(|entry| self.holders.drop_node(entry.holder));
        let prefix = self.nodes[id].take_first(at);
        let parts = prefix.entries.iter().chain(&self.nodes[id].entries);
        parts.for_each(|entry| self.holders.add_nodes(entry.holder, 1));
        let prefix_id = self.nodes.add(prefix);
        self.nodes.relink(id, prefix_id);
        self.nodes[prefix_id].first_child = id;
        let first = self.arena.word(self.nodes[id].locals.base);
        let node = &mut self.nodes[id];
        node.first = first;
        (node.parent, node.next, node.previous) = (prefix_id, NodeId::NONE, NodeId::NONE);
        for column in self.nodes[prefix_id].columns.clone() {
            if column.len == at && column.names.room == at {
                self.own(&column.names, column.names.base + u32::from(at), prefix_id);
            } else {
                self.own_all(&column.names, prefix_id);
            }
        }
        self.drop_unused_columns(id);
        self.drop_unused_columns(prefix_id);
        self.insert(id);
        let header = self.header(prefix_id);
        let line = self.line(prefix_id).expect("the whole edge is still there");
        self.table.update(line, &header);
        if self.sweeping {
            self.unswept.push(prefix_id);
        }
        prefix_id
    }
}

impl Node {
    /// Takes the first `at` blocks off, with their words, names and coverage, as a node of their own.
    fn take_first(&mut self, at: u16) -> Self {
        let mut prefix = Self {
            parent: self.parent,
            depth: self.depth,
            first: self.first,
            line: self.line,
            len: at,
            written: at,
            initial: at.min(self.initial),
            variant: self.variant,
            forks: self.forks,
            used: true,
            ..Self::EMPTY
        };
        let rest = self.locals.split_off(at);
        prefix.locals = std::mem::replace(&mut self.locals, rest);
        let goes_on = self.split_columns(&mut prefix);
        self.split_entries(&mut prefix, &goes_on);
        self.len -= at;
        self.written -= at;
        self.initial = self.initial.saturating_sub(at);
        self.depth += u32::from(at);
        (self.variant, self.forks) = (0, 0);
        prefix
    }

    /// Splits every column. For each, returns which of the remaining columns continues it, if one does.
    fn split_columns(&mut self, prefix: &mut Self) -> Vec<Option<u16>> {
        let at = prefix.len;
        let columns = std::mem::take(&mut self.columns);
        let cut = columns.into_iter().map(|column| {
            let mut low = Column { users: 0, ..column };
            let high = (column.len > at).then(|| {
                let high = Column { names: low.names.split_off(at), len: column.len - at, users: 0, ..column };
                low.len = at;
                self.columns.push(high);
                (self.columns.len() - 1) as u16
            });
            prefix.columns.push(low);
            high
        });
        cut.collect()
    }

    /// Splits every entry. In the rest, an entry stays if it covers something or if its worker may have blocks below.
    /// Before it, an entry stays if it covers something or stays in the rest.
    fn split_entries(&mut self, prefix: &mut Self, goes_on: &[Option<u16>]) {
        let (at, len) = (prefix.len, self.len);
        let has_children = self.has_children();
        for mut low in std::mem::take(&mut self.entries) {
            let mut high = low.split_off(at);
            let column = usize::from(low.column);
            let below = goes_on[column].filter(|to| has_children && self.columns[usize::from(*to)].len == len - at);
            let kept = if high.is_empty() { below } else { goes_on[column] };
            if let Some(to) = kept {
                high.column = to;
                self.columns[usize::from(to)].users += 1;
                self.entries.push(high);
            }
            if kept.is_some() || !low.is_empty() {
                prefix.columns[column].users += 1;
                prefix.entries.push(low);
            }
        }
    }
}

impl Tree {
    /// Joins queued nodes, up to about `budget` blocks; returns how much work it was.
    pub(super) fn join_some(&mut self, budget: usize) -> usize {
        let mut work = 0;
        while work < budget
            && self.garbage.waiting_bytes() < INDEX_GARBAGE_BYTES_STRAINED
            && let Some(id) = self.joins.pop_front()
        {
            work += 1;
            self.nodes.unqueue(id);
            if self.nodes.is_used(id) {
                work += self.join(id);
            }
        }
        work
    }

    /// Joins a node with its only child, if all holder bits and columns of the child continue the node's own and there
    /// is little to copy. The child's number stays, so nothing below it changes.
    ///
    /// Meanwhile the line of the upper node is open: readers that meet it walk again.
    fn join(&mut self, upper: NodeId) -> usize {
        let lower = self.nodes[upper].first_child;
        if upper == NodeId::ROOT || !lower.is_some() {
            return 0;
        }
        let Some(columns) = self.joinable(upper, lower) else { return 0 };
        let (up, low) = (&self.nodes[upper], &self.nodes[lower]);
        let (up_len, len) = (up.len, up.len + low.len);
        let meets = up.locals.meets(up.len, &low.locals)
            && columns.iter().all(|(above, below)| above.names.meets(above.len, &below.names));
        // Where names or blocks below begin in the granule in which the lower node ends, the lower node's words stay
        // there.
        let whole = |extent: &Extent| (extent.base + u32::from(low.len)).is_multiple_of(GRANULE_WORDS);
        let ends_whole = whole(&low.locals) && columns.iter().all(|(_, below)| whole(&below.names));
        let copies = usize::from(len) <= JOIN_BLOCKS_MAX
            && (ends_whole || !low.has_children())
            && !self.arena_is_short(len, columns.len());
        if !meets && !copies {
            return 0;
        }
        let places = if meets { SmallVec::new() } else { self.places(len, columns.len() + 1) };
        if !meets && places.is_empty() {
            return 0;
        }
        let line = self.line(upper).expect("a node has a header");
        self.table.open(line);
        let lower_line = self.line(lower).expect("a node has a header");
        self.table.remove(lower_line);
        if meets {
            self.join_extents(upper, lower, &columns);
        } else {
            self.copy_extents(upper, lower, &columns, &places);
        }
        self.join_entries(upper, lower);
        let (up, overflow) = {
            let node = &mut self.nodes[upper];
            let overflow = std::mem::take(&mut node.overflow);
            ((node.parent, node.variant, node.forks, node.depth, node.initial, node.first, node.line), overflow)
        };
        self.waste_overflow(overflow);
        // The lower node takes the upper's place among its siblings.
        self.nodes.relink(upper, lower);
        let node = &mut self.nodes[lower];
        (node.parent, node.variant, node.forks, node.depth, _, node.first, node.line) = up;
        (node.len, node.initial) = (len, up.4.min(len));
        if meets {
            // A section in which the two nodes meet was inside neither.
            self.seal(lower, up_len - 1, up_len + 1);
        } else {
            self.seal(lower, 0, len);
        }
        self.nodes.drop(upper);
        let header = self.header(lower);
        self.table.write(line, &header);
        self.table.close(line);
        if self.sweeping {
            self.unswept.push(lower);
        }
        self.want_join(lower);
        let parent = self.nodes[lower].parent;
        self.want_join(parent);
        usize::from(len)
    }

    /// This many extents of `len` blocks, or none.
    fn places(&mut self, len: u16, count: usize) -> SmallVec<[Extent; 2]> {
        let mut places: SmallVec<[Extent; 2]> = SmallVec::new();
        for _ in 0..count {
            match self.extent(len) {
                Ok(place) => places.push(place),
                Err(_) => {
                    for place in places.drain(..) {
                        self.arena.free(place.base, u32::from(place.room));
                    }
                    break;
                }
            }
        }
        places
    }

    fn arena_is_short(&self, len: u16, columns: usize) -> bool {
        self.arena.free_words() < u64::from(len.next_multiple_of(GRANULE_WORDS as u16)) * (columns as u64 + 1)
    }

    /// The columns of the upper node, each with the lower's column that continues it, if the two may be joined.
    fn joinable(&self, upper: NodeId, lower: NodeId) -> Option<SmallVec<[(Column, Column); 1]>> {
        let (up, low) = (&self.nodes[upper], &self.nodes[lower]);
        let fits = up.len + low.len <= self.node_blocks_max && !low.next.is_some();
        if !fits || low.variant != 0 || low.forks != 0 || low.columns.len() > up.columns.len() {
            return None;
        }
        let mut below: SmallVec<[u16; 4]> = SmallVec::from_elem(u16::MAX, up.columns.len());
        for entry in &low.entries {
            let above = up.entry(entry.holder)?;
            let to = &mut below[usize::from(above.column)];
            if (*to != u16::MAX && *to != entry.column) || up.columns[usize::from(above.column)].len != up.len {
                return None;
            }
            *to = entry.column;
        }
        let mut pairs = SmallVec::new();
        let mut taken: SmallVec<[u16; 4]> = SmallVec::new();
        for (column, below) in up.columns.iter().zip(below) {
            if below == u16::MAX || taken.contains(&below) {
                return None;
            }
            taken.push(below);
            let lower = low.columns[usize::from(below)];
            if column.seed != lower.seed {
                return None;
            }
            pairs.push((*column, lower));
        }
        (pairs.len() == low.columns.len()).then_some(pairs)
    }

    /// Puts the extents of a split together again.
    fn join_extents(&mut self, upper: NodeId, lower: NodeId, columns: &[(Column, Column)]) {
        let joined = |above: &Extent, below: &Extent| Extent { room: above.room + below.room, ..*above };
        let (up, up_len) = (self.nodes[upper].locals, self.nodes[upper].len);
        let node = &mut self.nodes[lower];
        node.locals = joined(&up, &node.locals);
        node.written += up_len;
        node.columns.clear();
        for (above, below) in columns {
            let names = joined(&above.names, &below.names);
            let column = Column { names, len: above.len + below.len, users: 0, seed: above.seed };
            self.nodes[lower].columns.push(column);
            self.own(&above.names, below.names.base, lower);
        }
    }

    /// Copies both nodes' words side by side: the local hashes first, then column by column.
    fn copy_extents(&mut self, upper: NodeId, lower: NodeId, columns: &[(Column, Column)], places: &[Extent]) {
        let place = places[0];
        let (up, low) = (self.nodes[upper].locals, self.nodes[lower].locals);
        let (up_len, low_len) = (self.nodes[upper].len, self.nodes[lower].len);
        self.arena.copy(up.base, place.base, u32::from(up_len));
        self.arena.copy(low.base, place.base + u32::from(up_len), u32::from(low_len));
        self.waste_locals(&up, 0);
        self.waste_locals(&low, 0);
        let node = &mut self.nodes[lower];
        (node.locals, node.written) = (place, up_len + low_len);
        node.columns.clear();
        for ((above, below), place) in columns.iter().zip(&places[1..]) {
            let place = *place;
            for (from, at) in [(above, 0), (below, above.len)] {
                let to = place.base + u32::from(at);
                self.arena.copy(from.names.base, to, u32::from(from.len));
                self.rename(from.names.base, to, from.len);
            }
            let column = Column { names: place, len: above.len + below.len, users: 0, seed: above.seed };
            self.nodes[lower].columns.push(column);
            self.own_all(&place, lower);
        }
        // Only now: words of one pair may lie in the granule in which words of another end.
        columns.iter().for_each(|(_, below)| self.release_names(lower, below.names));
        columns.iter().for_each(|(above, _)| self.release_names(upper, above.names));
    }

    fn join_entries(&mut self, upper: NodeId, lower: NodeId) {
        let (mut entries, len) = (std::mem::take(&mut self.nodes[upper].entries), self.nodes[upper].len);
        let node = &mut self.nodes[lower];
        node.entries.iter().for_each(|entry| self.holders.drop_node(entry.holder));
        for entry in &mut entries {
            if let Some(high) = node.entry(entry.holder) {
                let high = high.clone();
                entry.append(len, &high);
            }
            // The columns of the two were paired in the order of the upper's.
            node.columns[usize::from(entry.column)].users += 1;
        }
        node.entries = entries;
    }
}

/// One sweep over all nodes, for the holder bits that were retired when it began.
#[derive(Debug)]
pub(super) struct Pass {
    holders: Vec<HolderBit>,
    /// By holder bit.
    wanted: Vec<bool>,
    cursor: NodeId,
    /// Slots that are free after the pass.
    pub(super) leaving: Vec<WorkerSlot>,
}

impl Pass {
    pub(super) fn begin(tree: &mut Tree, leaving: Vec<WorkerSlot>) -> Self {
        let holders: Vec<HolderBit> = tree.holders.retired_holders().collect();
        let mut wanted = vec![false; holders.iter().map(|holder| usize::from(holder.0) + 1).max().unwrap_or(0)];
        holders.iter().for_each(|holder| wanted[usize::from(holder.0)] = true);
        tree.sweeping = true;
        Self { holders, wanted, cursor: NodeId(1), leaving }
    }

    pub(super) fn wants(&self, holder: HolderBit) -> bool {
        self.wanted.get(usize::from(holder.0)).copied().unwrap_or(false)
    }

    /// Visits up to about `budget` nodes and entries; returns how much it did, or `None` when the pass is complete.
    pub(super) fn step<'a>(
        &mut self,
        tree: &mut Tree,
        budget: usize,
        worker_of: impl Fn(WorkerSlot, u64) -> Option<&'a Worker>,
    ) -> Option<usize> {
        let mut work = 0;
        while work < budget {
            let id = match tree.unswept.pop() {
                Some(id) => id,
                None if tree.nodes.from(self.cursor).0 < tree.nodes.end() => {
                    let id = tree.nodes.from(self.cursor);
                    self.cursor.0 = id.0 + 1;
                    id
                }
                None => return None,
            };
            work += 1;
            if tree.nodes.is_used(id) {
                work += self.purge(tree, id, &worker_of);
            }
        }
        Some(work)
    }

    /// Removes the retired holder bits from one node. If a worker lives on with other holder bits and may hold blocks
    /// below, one of those keeps its names there.
    fn purge<'a>(
        &self,
        tree: &mut Tree,
        id: NodeId,
        worker_of: impl Fn(WorkerSlot, u64) -> Option<&'a Worker>,
    ) -> usize {
        let retired: Vec<HolderBit> =
            tree.nodes[id].entries.iter().map(|entry| entry.holder).filter(|holder| self.wants(*holder)).collect();
        for holder in &retired {
            let record = *tree.holders.record(*holder);
            let node = &tree.nodes[id];
            if let Some(worker) = worker_of(record.slot, record.life).filter(|_| node.has_children())
                && let Some(heir) = worker.references().map(|(_, holder)| holder).next()
                && let Some(column) = node.entry(*holder).map(|entry| entry.column)
            {
                tree.enter(id, heir, column);
            }
            if let Ok(at) = tree.nodes[id].find(*holder) {
                tree.remove_entry(id, at);
            }
        }
        if !retired.is_empty() {
            tree.prune(id);
        }
        retired.len() * 4
    }

    /// Ends the pass: the holder bits are free. Returns the slots that are free.
    pub(super) fn finish(self, tree: &mut Tree) -> Vec<WorkerSlot> {
        tree.sweeping = false;
        self.holders.iter().for_each(|holder| tree.holders.set_state(*holder, HolderState::Free));
        self.leaving
    }
}
