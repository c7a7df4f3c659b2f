//! Where one block goes, and what moves on its behalf. Part of the careful way: the shard is torn.

use super::grow::{Homonyms, Odd, Told};
use super::lanes::Lane;
use super::layer::Layer;
use super::node::{NodeId, Place};
use super::tree::Tree;
use super::waiting::Waiter;
use super::worker::Worker;
use crate::ids::{EngineHash, LocalHash, Seed};
use crate::limits::NODE_BLOCKS_MAX;

/// Variants of one content at one place, at most: readers look at each.
pub(super) const ALIASES_CEILING: usize = 64;

impl Worker {
    /// Finds or makes the place of a block that is not bound, right after `after`. The lane's entry is there
    /// afterwards; it does not cover the block yet. Fails where there are no words for one more block.
    pub(super) fn place(
        &mut self,
        tree: &mut Tree,
        lane: Lane,
        after: Place,
        name: EngineHash,
        local: LocalHash,
        seed: Seed,
    ) -> Result<Place, Odd> {
        let told = Told { locals: &[local], names: &[name], seed };
        let node = &tree.nodes[after.node];
        if after.at == node.len {
            return self.place_below(tree, lane, after.node, told);
        }
        let same = tree.locals(after.node)[usize::from(after.at)] == local.0;
        if same && !self.binds(node, after.at) {
            if self.is_named(tree, after, told) {
                return Ok(after);
            }
            // The worker's names from here on are of what is no longer bound: they lose what hung on them.
            self.uproot(tree, Place { at: after.at + 1, ..after });
            if self.allowance.overwhelmed {
                return Err(Odd::Full);
            }
            if tree.nodes[after.node].len == after.at {
                return self.place_below(tree, lane, after.node, told);
            }
            if let Some(found) = self.name_next(tree, lane, after, told) {
                return Ok(found);
            }
        }
        let prefix = tree.split(after.node, after.at);
        let rest = after.node;
        let placed = self.place_below(tree, lane, prefix, told);
        // What the split has left to others may be nobody's.
        if placed.is_err() || placed.is_ok_and(|placed| placed.node != rest) {
            tree.settle(rest);
        }
        placed
    }

    /// Whether a block of a node has a name already, in the worker's column.
    fn is_named(&self, tree: &Tree, place: Place, told: Told<'_>) -> bool {
        let node = &tree.nodes[place.node];
        let Some(column) = self.column_of(node).map(|at| &node.columns[usize::from(at)]) else { return false };
        let named = tree.names(column).get(usize::from(place.at)) == told.name_words().first();
        named && column.seed == told.seed
    }

    /// Names the block after the last that a column names, where the column is the worker's.
    fn name_next(&self, tree: &mut Tree, lane: Lane, place: Place, told: Told<'_>) -> Option<Place> {
        let node = &tree.nodes[place.node];
        let at = self.column_of(node)?;
        let column = node.columns[usize::from(at)];
        if column.len != place.at || column.seed != told.seed || place.at >= node.len {
            return None;
        }
        tree.extend_column(place.node, at, told, Homonyms::Allowed).ok()?;
        tree.enter(place.node, lane, at);
        Some(place)
    }

    /// The place of a block that begins a node below another.
    fn place_below(&mut self, tree: &mut Tree, lane: Lane, parent: NodeId, told: Told<'_>) -> Result<Place, Odd> {
        let variants = tree.variants(parent, told.locals[0]);
        let named = |worker: &Self, id: NodeId| worker.is_named(tree, Place { node: id, at: 0 }, told);
        if let Some(id) = variants.iter().copied().find(|id| named(self, *id)) {
            return Ok(Place { node: id, at: 0 });
        }
        let free = variants.iter().copied().find(|id| !self.binds(&tree.nodes[*id], 0));
        if let Some(id) = free {
            let place = Place { node: id, at: 0 };
            if self.column_of(&tree.nodes[id]).is_some() {
                self.uproot(tree, place);
            }
            if self.allowance.overwhelmed {
                return Err(Odd::Full);
            }
            if tree.nodes.is_used(id) {
                self.forked |= tree.nodes[id].variant > 0 || tree.nodes[id].forks > 0;
                tree.newcomer(id, lane, told)?;
                return Ok(place);
            }
            return self.place_below(tree, lane, parent, told);
        }
        let end = tree.nodes[parent].len;
        if variants.is_empty()
            && tree.may_append(parent, lane, told.seed)
            && tree.append(parent, told, Homonyms::Allowed) == Ok(1)
        {
            tree.nodes[parent].entries[0].cut = end;
            return Ok(Place { node: parent, at: end });
        }
        self.forked |= !variants.is_empty();
        Ok(Place { node: tree.new_variant(parent, lane, told, &variants)?, at: 0 })
    }

    /// Takes the blocks from a place on, and all below, out of the tree: their chain is not complete any
    /// more, or they are to hang elsewhere. They wait. If that is more than one event may move, or more than may wait,
    /// nothing changes but that the worker is [overwhelmed](Allowance).
    fn uproot(&mut self, tree: &mut Tree, from: Place) {
        let mut stack = vec![from];
        let mut touched = Vec::new();
        let mut waiters = Vec::new();
        let waiting_max = self.allowance.waiting_max.saturating_sub(self.waiting.len());
        let mut work = 0;
        while let Some(from) = stack.pop() {
            let node = &tree.nodes[from.node];
            let Some(column) = self.column_of(node).map(|at| node.columns[usize::from(at)]) else { continue };
            work += 1 + usize::from(column.len.saturating_sub(from.at));
            if work > self.allowance.uproots || waiters.len() > waiting_max {
                self.allowance.overwhelmed = true;
                return;
            }
            for at in from.at..column.len {
                let place = Place { at, ..from };
                let lanes = self.lanes_at(tree, place);
                if !lanes.is_empty() {
                    let parent = self.name_before(tree, place);
                    let local = LocalHash(tree.locals(place.node)[usize::from(at)]);
                    let name = tree.name(column.names.base + u32::from(at));
                    let lanes = lanes.into_iter().collect();
                    waiters.push((name, Waiter::new(parent, local, column.seed, lanes)));
                }
            }
            // Children that are only others' are work too, as they are looked at.
            let left = self.allowance.uproots - work;
            for child in tree.nodes.children(from.node).take(left + 1) {
                work += 1;
                if self.column_of(&tree.nodes[child]).is_some() {
                    stack.push(Place { node: child, at: 0 });
                }
            }
            touched.push(from);
        }
        if work > self.allowance.uproots || waiters.len() > waiting_max {
            self.allowance.overwhelmed = true;
            return;
        }
        self.allowance.uproots -= work;
        for from in touched.iter().rev() {
            self.leave(tree, *from);
        }
        for from in touched.iter().rev() {
            if tree.nodes.is_used(from.node) {
                tree.settle(from.node);
            }
        }
        for (name, waiter) in waiters {
            self.waiting.insert(name, waiter);
        }
    }

    /// Covers nothing of a node from a place on, in any lane; at its first block, leaves the node.
    fn leave(&self, tree: &mut Tree, from: Place) {
        for lane in &self.kin {
            let node = &mut tree.nodes[from.node];
            let Ok(at) = node.find(*lane) else { continue };
            node.entries[at].take(from.at, NODE_BLOCKS_MAX as u16);
            if from.at == 0 {
                tree.remove_entry(from.node, at);
            }
        }
    }

    /// A name has got a place: what it was called at places it had before loses what hangs there, and what
    /// waited for it gets a place too, and so on; as much of that as the event may still move, the rest in slices of
    /// a sweep.
    pub(super) fn bring_home(&mut self, tree: &mut Tree, name: EngineHash) {
        self.homeward.push(name);
        self.bring_some_home(tree);
    }

    /// Gives places to what waits for names that have one, as long as the allowance lasts. What is left waits, which
    /// readers see as not held.
    pub(super) fn bring_some_home(&mut self, tree: &mut Tree) {
        while self.allowance.plants > 0
            && let Some(name) = self.homeward.pop()
        {
            let Some((_, word)) = self.find(tree, name) else { continue };
            for stale in tree.words_named(name).into_iter().filter(|stale| *stale != word) {
                let Some((place, column)) = tree.resolve(stale).filter(|_| tree.name(stale) == name) else { continue };
                if self.column_of(&tree.nodes[place.node]) == Some(column) {
                    self.uproot(tree, Place { at: place.at + 1, ..place });
                }
                if self.allowance.overwhelmed {
                    return;
                }
            }
            self.plant_children(tree, name);
            if self.allowance.overwhelmed {
                return;
            }
        }
    }

    /// Gives what waits for a name its place, as much of it as may be moved.
    fn plant_children(&mut self, tree: &mut Tree, name: EngineHash) {
        let plants = self.allowance.plants;
        let mut children: Vec<EngineHash> = self.waiting.children(name).take(plants + 1).collect();
        let more = children.len() > plants;
        children.truncate(plants);
        self.allowance.plants -= children.len().max(1);
        let from = self.homeward.len();
        for child in children {
            if !self.plant(tree, name, child) {
                // The parent lost its place meanwhile, or there are no words for the child; so it is for the others.
                return;
            }
            self.homeward.push(child);
        }
        if more {
            self.homeward.insert(from, name);
        }
    }

    /// Gives a block that waits for `parent` its place right after it; whether there are words for it.
    fn plant(&mut self, tree: &mut Tree, parent: EngineHash, child: EngineHash) -> bool {
        let Some((place, _)) = self.find(tree, parent) else { return false };
        let Some(waiter) = self.waiting.remove(child) else { return true };
        let after = Place { at: place.at + 1, ..place };
        let Ok(place) = self.place(tree, waiter.lanes[0], after, child, waiter.local, waiter.seed) else {
            // A block without a place would wait for ever, and the worker would count for too little.
            self.allowance.overwhelmed = true;
            self.waiting.insert(child, waiter);
            return false;
        };
        let column = self.column_of(&tree.nodes[place.node]).unwrap_or_default();
        for lane in &waiter.lanes {
            tree.cover(place, *lane, column);
        }
        for tier in Layer::ALL {
            self.show_if_held(tree, tier, place, &waiter.lanes);
        }
        tree.publish_later(place.node);
        true
    }
}
