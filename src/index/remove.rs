//! A remove: which blocks, node by node, nearest the root first. And the pruning of uncovered nodes: the tail of a
//! leaf, leaves, and what they leave above them.
//!
//! Readers see all of a remove at once. If its nodes follow each other on one chain, the first missing block ends the
//! chain, so publishing the node nearest the root shows it all. The nodes are published in a multi-write if they lie on
//! several chains, if one query walks several chains of the worker, or if a layer has several groups. Uncovered nodes
//! are pruned afterwards: no answer depends on them.

use super::RemoveOutcome;
use super::holders::{HolderBit, Layer};
use super::name_map::AHEAD;
use super::node::{Column, Entry, Node, NodeId, Place, Run, Runs};
use super::tree::Tree;
use super::worker::{Worker, digest_of};
use crate::ids::{EngineHash, GroupId};
use smallvec::{SmallVec, smallvec};

/// Consecutive blocks of one node that a remove takes.
#[derive(Clone, Copy, Debug)]
struct TakenRun {
    node: NodeId,
    depth: u32,
    run: Run,
}

/// Capacity that is kept from one remove to the next.
const RUNS_KEPT: usize = 4096;

/// Lists of one call of [`Worker::remove`], reused by the next.
#[derive(Debug)]
pub(super) struct Removal {
    taken_runs: Vec<TakenRun>,
    touched: Vec<(u32, NodeId)>,
}

impl Removal {
    pub(super) const EMPTY: Self = Self { taken_runs: Vec::new(), touched: Vec::new() };

    /// Frees the excess capacity after a large remove.
    fn shrink(&mut self) {
        self.taken_runs.clear();
        self.taken_runs.shrink_to(RUNS_KEPT);
        self.touched.clear();
        self.touched.shrink_to(RUNS_KEPT);
    }
}

impl Worker {
    /// Whether a remove of several blocks may touch more than one chain that a query walks.
    fn needs_multi_write(&self, layer: Layer, group: GroupId) -> bool {
        self.forked || layer == Layer::Windows || self.sole_holder(layer, group).is_none()
    }

    /// Takes one reference of a group from each block.
    pub(super) fn remove(
        &mut self,
        tree: &mut Tree,
        removal: &mut Removal,
        layer: Layer,
        group: GroupId,
        names: &[EngineHash],
    ) -> RemoveOutcome {
        let Some(holder) = self.group(layer, group).map(|group| group.holder) else {
            return RemoveOutcome { removed: 0, unknown: names.len() as u32 };
        };
        let mut outcome = RemoveOutcome::default();
        removal.taken_runs.clear();
        let mut at = 0;
        while at < names.len() {
            names.get(at + AHEAD).into_iter().for_each(|name| tree.prefetch_far(*name));
            names.get(at + AHEAD / 2).into_iter().for_each(|name| tree.prefetch_near(*name));
            names.get(at + AHEAD / 4).into_iter().for_each(|name| tree.prefetch_node(*name));
            let run = self.take_run(tree, holder, &names[at..], &mut removal.taken_runs);
            if run > 0 {
                outcome.removed += run as u32;
                at += run;
                continue;
            }
            if self.remove_slow(layer, holder, names[at]) {
                outcome.removed += 1;
            } else {
                outcome.unknown += 1;
            }
            at += 1;
        }
        self.layers[layer.index()].references -= u64::from(outcome.removed);
        self.finish(tree, removal, layer, group, holder);
        removal.shrink();
        outcome
    }

    /// Finds the first name, and how many of the names behind it are its neighbours in its node, in either direction.
    /// Removes them from the holder bit's coverage. Returns 0 if the first is not a block of the tree with one
    /// reference.
    fn take_run(
        &mut self,
        tree: &mut Tree,
        holder: HolderBit,
        names: &[EngineHash],
        taken_runs: &mut Vec<TakenRun>,
    ) -> usize {
        let first = names[0];
        if self.extras.get(first, holder) > 0 {
            return 0;
        }
        let Some((place, word)) = self.find(tree, first) else { return 0 };
        let Ok(entry) = tree.nodes[place.node].find(holder) else { return 0 };
        let node = &tree.nodes[place.node];
        if !node.entries[entry].covers(place.at) {
            return 0;
        }
        let (len, step) = if self.extras.is_empty() {
            self.neighbours(tree, place, word, names, &node.entries[entry])
        } else {
            (1, 1)
        };
        let run =
            if step > 0 { Run::new(place.at, place.at + len) } else { Run::new(place.at + 1 - len, place.at + 1) };
        taken_runs.push(TakenRun { node: place.node, depth: node.depth, run });
        tree.nodes[place.node].entries[entry].take(run.from, run.to);
        usize::from(len)
    }

    fn neighbours(
        &self,
        tree: &Tree,
        place: Place,
        word: u32,
        names: &[EngineHash],
        entry: &super::node::Entry,
    ) -> (u16, i32) {
        let column = usize::from(entry.column);
        let node = &tree.nodes[place.node];
        let all = tree.names(&node.columns[column]);
        let at = usize::from(place.at);
        debug_assert_eq!(word, node.columns[column].names.base + at as u32);
        let up = all[at..].iter().zip(names).take_while(|(name, wanted)| **name == wanted.0).count();
        let up = (1..up).take_while(|more| entry.covers((at + more) as u16)).count() + 1;
        if up > 1 {
            return (up as u16, 1);
        }
        let down = all[..=at].iter().rev().zip(names).take_while(|(name, wanted)| **name == wanted.0).count();
        let down = (1..down).take_while(|more| entry.covers((at - more) as u16)).count() + 1;
        (down as u16, -1)
    }

    /// Removes a reference of a block that has several or is dormant; `false` if there was none.
    fn remove_slow(&mut self, layer: Layer, holder: HolderBit, name: EngineHash) -> bool {
        let extra = self.extras.get(name, holder);
        if extra > 0 {
            self.extras.set(name, holder, extra - 1);
            return true;
        }
        let Some(holders) = self.dormant.holders_mut(name) else { return false };
        let before = holders.clone();
        let Some(at) = before.iter().position(|other| *other == holder) else { return false };
        holders.remove(at);
        let after = holders.clone();
        if after.is_empty() {
            self.dormant.remove(name);
        }
        self.recount(layer, &before, &after, name);
        true
    }

    /// Counts the taken runs and publishes their nodes, nearest the root first; then prunes.
    fn finish(&mut self, tree: &mut Tree, removal: &mut Removal, layer: Layer, group: GroupId, holder: HolderBit) {
        let Removal { taken_runs, touched } = removal;
        for taken in taken_runs.iter() {
            self.lose(tree, layer, holder, taken);
        }
        if let [taken] = taken_runs[..] {
            tree.prune(taken.node);
            return;
        }
        touched.clear();
        touched.extend(taken_runs.iter().map(|taken| (taken.depth, taken.node)));
        touched.sort_unstable();
        touched.dedup();
        let at_once = touched.len() > 1 && (self.needs_multi_write(layer, group) || !is_chain(tree, touched));
        if at_once {
            tree.head.begin_multi_write();
            touched.iter().for_each(|(_, id)| tree.publish_loss(*id));
            tree.head.end_multi_write();
        }
        for (_, id) in touched.iter() {
            if !tree.nodes.is_used(*id) {
                continue;
            }
            if tree.nodes[*id].has_children() {
                if !at_once {
                    tree.publish(*id);
                }
            } else {
                tree.prune(*id);
            }
        }
        for (_, id) in touched.iter().rev() {
            if tree.nodes.is_used(*id) && tree.nodes[*id].has_children() {
                tree.drop_idle_anchors(*id);
                tree.want_join(*id);
            }
        }
    }

    /// Counts a run that the holder bit no longer covers.
    fn lose(&mut self, tree: &mut Tree, layer: Layer, holder: HolderBit, taken: &TakenRun) {
        let node = &tree.nodes[taken.node];
        let runs: Runs = SmallVec::from_elem(taken.run, 1);
        self.count(node, layer, holder, &runs, true);
        let Some(column) = self.column_of(node) else { return };
        let names = node.columns[usize::from(column)].names;
        let words = tree.arena.words(names.base + u32::from(taken.run.from), taken.run.len());
        let of = &mut self.layers[layer.index()];
        if of.groups.len() < 2 {
            of.held -= u64::from(taken.run.len());
            of.digest = of.digest.wrapping_sub(digest_of(words));
            return;
        }
        let shown = of.shown;
        let Ok(at) = tree.nodes[taken.node].find(shown) else { return };
        let hidden = tree.nodes[taken.node].entries[at].take(taken.run.from, taken.run.to);
        for run in hidden {
            let words = tree.arena.words(names.base + u32::from(run.from), run.len());
            let of = &mut self.layers[layer.index()];
            of.held -= u64::from(run.len());
            of.digest = of.digest.wrapping_sub(digest_of(words));
        }
    }
}

/// Whether each of these nodes, in the order of their depths, is a child of the one before.
fn is_chain(tree: &Tree, touched: &[(u32, NodeId)]) -> bool {
    touched.windows(2).all(|pair| tree.nodes[pair[1].1].parent == pair[0].1)
}

/// At a node with more children than this, every worker is assumed to be at one of them.
const CHILDREN_LOOKED_AT: usize = 8;

impl Tree {
    /// Prunes a node that lost coverage. A leaf keeps only blocks that are covered, or is deleted; then its parent is
    /// pruned. Publishes the node unless it is deleted.
    pub(super) fn prune(&mut self, id: NodeId) {
        // A list instead of recursion, because deletions may go on all the way up.
        let mut open: SmallVec<[NodeId; 4]> = smallvec![id];
        while let Some(id) = open.pop() {
            // No node is made meanwhile, so a number that is in use still belongs to the same node.
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

    /// Queues a node with a single child for a join.
    pub(super) fn want_join(&mut self, id: NodeId) {
        if id == NodeId::ROOT {
            return;
        }
        let child = self.nodes[id].first_child;
        if child.is_some() && !self.nodes[child].next.is_some() && self.nodes.queue(id) {
            self.joins.push_back(id);
        }
    }

    /// Removes an entry from a node, and its column if no other entry uses it.
    pub(super) fn remove_entry(&mut self, id: NodeId, at: usize) {
        let node = &mut self.nodes[id];
        let entry = node.entries.remove(at);
        self.holders.drop_node(entry.holder);
        let column = usize::from(entry.column);
        node.columns[column].users -= 1;
        if node.columns[column].users == 0 {
            self.drop_unused_columns(id);
        }
    }

    /// Removes entries from a node, and the columns that no other entry uses.
    fn remove_entries(&mut self, id: NodeId, mut goes: impl FnMut(&Entry) -> bool) {
        let Self { nodes, holders, .. } = self;
        let Node { entries, columns, .. } = &mut nodes[id];
        entries.retain(|entry| {
            let stays = !goes(entry);
            if !stays {
                holders.drop_node(entry.holder);
            }
            columns[usize::from(entry.column)].users -= u16::from(!stays);
            stays
        });
        self.drop_unused_columns(id);
    }

    /// Removes the columns that no entry uses.
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

    /// Removes the entries of a leaf that cover nothing: there is nothing below them.
    fn drop_anchors(&mut self, id: NodeId) {
        self.remove_entries(id, Entry::is_empty);
    }

    /// Removes entries that cover nothing, where it is cheap to see that their workers have nothing below.
    fn drop_idle_anchors(&mut self, id: NodeId) {
        if !self.nodes[id].entries.iter().any(Entry::is_empty) {
            return;
        }
        let below = self.workers_below(id);
        let node = &self.nodes[id];
        let is_idle = |entry: &Entry| {
            let record = self.holders.record(entry.holder);
            let may_hold =
                || below.as_ref().is_none_or(|below| below.binary_search(&(record.slot.0, record.life)).is_ok());
            let names = node.columns[usize::from(entry.column)].len;
            entry.is_empty() && (names < node.len || !may_hold())
        };
        let idle: SmallVec<[bool; 64]> = node.entries.iter().map(is_idle).collect();
        let mut idle = idle.into_iter();
        self.remove_entries(id, |_| idle.next().unwrap_or(false));
    }

    /// The workers, each with its life, at the children of a node, in order; `None` if there are too many children to
    /// visit.
    fn workers_below(&self, id: NodeId) -> Option<SmallVec<[(u16, u64); 8]>> {
        if self.nodes.children(id).nth(CHILDREN_LOOKED_AT).is_some() {
            return None;
        }
        let entries = self.nodes.children(id).flat_map(|child| &self.nodes[child].entries);
        let records = entries.map(|entry| self.holders.record(entry.holder));
        let mut below: SmallVec<[(u16, u64); 8]> = records.map(|record| (record.slot.0, record.life)).collect();
        below.sort_unstable();
        Some(below)
    }

    /// Keeps the first `len` blocks of a leaf, and of each column the part that its users cover.
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

    /// Removes an uncovered leaf from the tree. No reader's answer changes. Returns the main node of its variants,
    /// whose header must show one variant less.
    fn delete(&mut self, id: NodeId) -> Option<NodeId> {
        let line = self.line(id).expect("a node has a header");
        self.table.remove(line);
        self.remove_entries(id, |_| true);
        let locals = self.nodes[id].locals;
        self.waste_locals(&locals, 0);
        let overflow = std::mem::take(&mut self.nodes[id].overflow);
        self.waste_overflow(overflow);
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
