//! Two nodes made one again: a node and its only child.

use super::node::{Column, Extent, GRANULE_WORDS, NodeId};
use super::tree::Tree;
use crate::limits::{INDEX_GARBAGE_BYTES_STRAINED, JOIN_BLOCKS_MAX};
use smallvec::SmallVec;

impl Tree {
    /// Joins what may be joined, up to about `budget` blocks; returns how much work it was.
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

    /// Joins a node with its child if that is its only one, all lanes and columns of the child go on from
    /// its own, and there is little to copy. The child's number stays, so nothing below it changes.
    ///
    /// While it is done the line of the upper node is open: readers that come by walk again.
    fn join(&mut self, upper: NodeId) -> usize {
        let lower = self.nodes[upper].first_child;
        if upper == NodeId::ROOT || !lower.is_some() {
            return 0;
        }
        let Some(columns) = self.joinable(upper, lower) else { return 0 };
        let (up, low) = (&self.nodes[upper], &self.nodes[lower]);
        let len = up.len + low.len;
        let meets = up.locals.meets(up.len, &low.locals)
            && columns.iter().all(|(above, below)| above.names.meets(above.len, &below.names));
        // Where what hangs below begins in the granule in which the lower node ends, that node stays there.
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
        let (up, more) = {
            let node = &mut self.nodes[upper];
            let more = std::mem::take(&mut node.more);
            ((node.parent, node.variant, node.forks, node.depth, node.initial, node.first, node.line), more)
        };
        self.waste_more(more);
        // The lower takes the upper's place among its siblings.
        self.nodes.relink(upper, lower);
        let node = &mut self.nodes[lower];
        (node.parent, node.variant, node.forks, node.depth, _, node.first, node.line) = up;
        (node.len, node.initial) = (len, up.4.min(len));
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

    /// So many extents of `len` blocks; none if there are not so many.
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

    /// The columns of the upper node with those of the lower that go on from them, if the two may be joined.
    fn joinable(&self, upper: NodeId, lower: NodeId) -> Option<SmallVec<[(Column, Column); 1]>> {
        let (up, low) = (&self.nodes[upper], &self.nodes[lower]);
        let fits = up.len + low.len <= self.node_blocks_max && !low.next.is_some();
        if !fits || low.variant != 0 || low.forks != 0 || low.columns.len() > up.columns.len() {
            return None;
        }
        let mut below: SmallVec<[u16; 4]> = SmallVec::from_elem(u16::MAX, up.columns.len());
        for entry in &low.entries {
            let above = up.entry(entry.lane)?;
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

    /// The extents of a split, put together again.
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

    /// Copies both nodes' words to where they lie side by side: the local hashes first, then column by column.
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
            self.release_names(lower, below.names);
            self.release_names(upper, above.names);
            let column = Column { names: place, len: above.len + below.len, users: 0, seed: above.seed };
            self.nodes[lower].columns.push(column);
            self.own_all(&place, lower);
        }
    }

    fn join_entries(&mut self, upper: NodeId, lower: NodeId) {
        let (mut entries, len) = (std::mem::take(&mut self.nodes[upper].entries), self.nodes[upper].len);
        let node = &mut self.nodes[lower];
        node.entries.iter().for_each(|entry| self.lanes.drop_node(entry.lane));
        for entry in &mut entries {
            if let Some(high) = node.entry(entry.lane) {
                let high = high.clone();
                entry.append(len, &high);
            }
            // The columns of the two were paired in the order of the upper's.
            node.columns[usize::from(entry.column)].users += 1;
        }
        node.entries = entries;
    }
}
