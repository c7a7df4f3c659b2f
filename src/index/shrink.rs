//! Giving back what nobody holds: the tail of a leaf, leaves, and what they leave behind above them.

use super::cover::Entry;
use super::node::{Column, Node, NodeId};
use super::tree::Tree;
use smallvec::{SmallVec, smallvec};

/// Beyond so many children every worker is taken to be at one of them.
const CHILDREN_LOOKED_AT: usize = 8;

impl Tree {
    /// Sees to a node of which less is covered than before: a leaf keeps only what somebody covers or goes,
    /// and then its parent is looked at. Shows the node to readers unless it has gone.
    pub(super) fn settle(&mut self, id: NodeId) {
        // What a deletion leaves to be looked at is on a list of its own, as it may go on all the way up.
        let mut open: SmallVec<[NodeId; 4]> = smallvec![id];
        while let Some(id) = open.pop() {
            // No node is made meanwhile, so a number that is in use is still the same node's.
            if id == NodeId::ROOT || !self.nodes.is_used(id) {
                continue;
            }
            if self.nodes[id].has_children() {
                self.drop_idle_anchors(id);
                self.publish(id);
                self.want_join(id);
                continue;
            }
            self.drop_anchors(id);
            let needed = self.nodes[id].entries.iter().map(|entry| entry.end()).max().unwrap_or(0);
            if needed == 0 && self.nodes[id].forks == 0 {
                open.push(self.nodes[id].parent);
                open.extend(self.delete(id));
                continue;
            }
            self.trim(id, needed.max(1));
            self.publish(id);
        }
    }

    /// A node with one child only may be joined with it.
    pub(super) fn want_join(&mut self, id: NodeId) {
        if id == NodeId::ROOT {
            return;
        }
        let child = self.nodes[id].first_child;
        if child.is_some() && !self.nodes[child].next.is_some() && self.nodes.queue(id) {
            self.joins.push_back(id);
        }
    }

    /// Takes an entry out of a node, and its column if nobody else uses it.
    pub(super) fn remove_entry(&mut self, id: NodeId, at: usize) {
        let node = &mut self.nodes[id];
        let entry = node.entries.remove(at);
        self.lanes.drop_node(entry.lane);
        let column = usize::from(entry.column);
        node.columns[column].users -= 1;
        if node.columns[column].users == 0 {
            self.drop_unused_columns(id);
        }
    }

    /// Takes entries out of a node, and the columns that nobody else uses.
    fn remove_entries(&mut self, id: NodeId, mut goes: impl FnMut(&Entry) -> bool) {
        let Self { nodes, lanes, .. } = self;
        let Node { entries, columns, .. } = &mut nodes[id];
        entries.retain(|entry| {
            let stays = !goes(entry);
            if !stays {
                lanes.drop_node(entry.lane);
            }
            columns[usize::from(entry.column)].users -= u16::from(!stays);
            stays
        });
        self.drop_unused_columns(id);
    }

    /// Forgets the columns that no entry uses.
    pub(super) fn drop_unused_columns(&mut self, id: NodeId) {
        let node = &mut self.nodes[id];
        if node.columns.iter().all(|column| column.users > 0) {
            return;
        }
        let mut unused: SmallVec<[Column; 1]> = SmallVec::new();
        let mut kept: SmallVec<[Column; 1]> = SmallVec::new();
        let mut moved: SmallVec<[u16; 8]> = SmallVec::new();
        for column in node.columns.drain(..) {
            moved.push(kept.len() as u16);
            if column.users > 0 {
                kept.push(column);
            } else {
                unused.push(column);
            }
        }
        node.columns = kept;
        for entry in &mut node.entries {
            entry.column = moved[usize::from(entry.column)];
        }
        for column in unused {
            self.take_names(&column.names, 0, column.len);
            self.release_names(id, column.names);
        }
    }

    /// In a leaf nothing hangs below, so that entries that cover nothing say nothing.
    fn drop_anchors(&mut self, id: NodeId) {
        self.remove_entries(id, Entry::is_empty);
    }

    /// Entries that cover nothing go where it is cheap to see that nothing hangs below on their behalf.
    pub(super) fn drop_idle_anchors(&mut self, id: NodeId) {
        if !self.nodes[id].entries.iter().any(Entry::is_empty) {
            return;
        }
        let below = self.workers_below(id);
        let node = &self.nodes[id];
        let is_idle = |entry: &Entry| {
            let record = self.lanes.record(entry.lane);
            let may_hold =
                || below.as_ref().is_none_or(|below| below.binary_search(&(record.slot.0, record.life)).is_ok());
            let names = node.columns[usize::from(entry.column)].len;
            entry.is_empty() && (names < node.len || !may_hold())
        };
        let idle: SmallVec<[bool; 64]> = node.entries.iter().map(is_idle).collect();
        let mut idle = idle.into_iter();
        self.remove_entries(id, |_| idle.next().unwrap_or(false));
    }

    /// The workers, each in its life, at the children of a node, in order; `None` where there are too many children
    /// to look at.
    fn workers_below(&self, id: NodeId) -> Option<SmallVec<[(u16, u64); 8]>> {
        if self.nodes.children(id).nth(CHILDREN_LOOKED_AT).is_some() {
            return None;
        }
        let entries = self.nodes.children(id).flat_map(|child| &self.nodes[child].entries);
        let records = entries.map(|entry| self.lanes.record(entry.lane));
        let mut below: SmallVec<[(u16, u64); 8]> = records.map(|record| (record.slot.0, record.life)).collect();
        below.sort_unstable();
        Some(below)
    }

    /// Keeps the first `len` blocks of a leaf, and of each column what its users cover.
    fn trim(&mut self, id: NodeId, len: u16) {
        for at in 0..self.nodes[id].columns.len() {
            let node = &self.nodes[id];
            let column = node.columns[at];
            let users = node.entries.iter().filter(|entry| usize::from(entry.column) == at);
            let end = users.map(|entry| entry.end()).max().unwrap_or(0);
            if end >= column.len {
                continue;
            }
            self.take_names(&column.names, end, column.len);
            self.nodes[id].columns[at].len = end;
            let (_, words) = column.names.granules_from(end);
            if words > 0 && end > 0 {
                self.free_names(&column.names, end);
                let kept = (column.names.base + u32::from(end)).next_multiple_of(super::node::GRANULE_WORDS);
                self.nodes[id].columns[at].names.room = (kept - column.names.base) as u16;
            }
        }
        let node = &mut self.nodes[id];
        if len >= node.len {
            return;
        }
        node.len = len;
        node.initial = node.initial.min(len);
        let locals = node.locals;
        let (_, words) = locals.granules_from(len);
        if words > 0 {
            let kept = (locals.base + u32::from(len)).next_multiple_of(super::node::GRANULE_WORDS);
            node.locals.room = (kept - locals.base) as u16;
            node.written = node.written.min(node.locals.room);
            self.waste_locals(&locals, len);
        }
    }

    /// Takes a leaf that nobody covers out of the tree. No reader's answer changes: nobody covers it. Returns the
    /// first of its variants, whose header is to say that there is one less.
    fn delete(&mut self, id: NodeId) -> Option<NodeId> {
        let line = self.line(id).expect("a node has a header");
        self.table.remove(line);
        self.remove_entries(id, |_| true);
        let locals = self.nodes[id].locals;
        self.waste_locals(&locals, 0);
        let more = std::mem::take(&mut self.nodes[id].more);
        self.waste_more(more);
        let Node { parent, variant, first, .. } = self.nodes[id];
        self.nodes.unlink(id);
        self.nodes.drop(id);
        if variant == 0 {
            return None;
        }
        let main = NodeId(self.table.id(self.table.find(parent.0, first, 0)?));
        self.nodes[main].forks -= 1;
        Some(main)
    }
}
