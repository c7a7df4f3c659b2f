//! What readers walk: positions by (position of the parent, local hash), each with the lanes that hold it.
//!
//! There are two copies of a [`Trie`]; `left-right` hands one to the readers while the writer's
//! operations are applied to the other. The operations are exact: both copies become equal.

use super::lanes::{Lane, LaneOwner, LaneSet};
use crate::ids::{LocalHash, WorkerSlot};
use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

/// The position before every chain.
pub(super) const ROOT_NODE: u32 = 0;

/// One block further from a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Step {
    /// The position that is left.
    pub(super) parent: u32,
    /// What is in the block.
    pub(super) local: LocalHash,
}

/// A position. It is reached by a step iff some lane holds it.
///
/// Chains mostly do not branch, so one child is named here; a walk along it follows the numbers, which
/// were given out in sequence, and looks nothing up.
#[derive(Clone, Debug, Default)]
pub(super) struct Node {
    /// Who holds it.
    pub(super) lanes: LaneSet,
    /// The step to `child`, where there is one.
    child_local: LocalHash,
    /// A child; `ROOT_NODE` for none.
    child: u32,
    /// Steps to other children: they are in [`Trie::branches`].
    branches: u32,
    /// Whether the step that leads here leads to other positions too ([`Trie::aliases`]).
    pub(super) forked: bool,
}

/// A change of a [`Trie`].
#[derive(Clone, Copy, Debug)]
pub(super) enum TrieOp {
    /// A lane holds a position from now on.
    Hold { node: u32, step: Step, lane: Lane },
    /// A lane no longer holds a position; nothing happens if it did not.
    Drop { node: u32, step: Step, lane: Lane },
    /// A lane is given out.
    Give { lane: Lane, owner: LaneOwner },
    /// A lane counts for nothing from now on.
    Retire { lane: Lane },
    /// One more publish.
    Publish,
}

/// A copy of the index of one shard, as of one publish.
#[derive(Clone, Debug, Default)]
pub(super) struct Trie {
    nodes: Vec<Node>,
    branches: HashMap<Step, u32, FxBuildHasher>,
    aliases: HashMap<Step, Vec<u32>, FxBuildHasher>,
    owners: Vec<Option<LaneOwner>>,
    workers: Vec<[Lane; 4]>,
    start: Vec<u64>,
    lower: Vec<u64>,
    publishes: u64,
}

impl Trie {
    /// The first position that a step leads to, and its number.
    pub(super) fn follow(&self, step: Step) -> Option<(u32, &Node)> {
        let id = self.child(step)?;
        Some((id, self.nodes.get(id as usize)?))
    }

    /// The other positions that a step leads to, where the first says that there are any.
    pub(super) fn aliases(&self, step: Step) -> impl Iterator<Item = (u32, &Node)> {
        let others = self.aliases.get(&step).map_or(&[][..], Vec::as_slice);
        others.iter().filter_map(|id| Some((*id, self.nodes.get(*id as usize)?)))
    }

    fn child(&self, step: Step) -> Option<u32> {
        let parent = self.nodes.get(step.parent as usize)?;
        if parent.child != ROOT_NODE && parent.child_local == step.local {
            return Some(parent.child);
        }
        if parent.branches == 0 { None } else { self.branches.get(&step).copied() }
    }

    /// Makes `child` the first position that a step leads to.
    fn set_child(&mut self, step: Step, child: u32) {
        let parent = &mut self.nodes[step.parent as usize];
        let named = parent.child != ROOT_NODE && parent.child_local == step.local;
        if named || (parent.child == ROOT_NODE && (parent.branches == 0 || !self.branches.contains_key(&step))) {
            (parent.child, parent.child_local) = (child, step.local);
        } else if self.branches.insert(step, child).is_none() {
            parent.branches += 1;
        }
    }

    fn remove_child(&mut self, step: Step) {
        let parent = &mut self.nodes[step.parent as usize];
        if parent.child != ROOT_NODE && parent.child_local == step.local {
            parent.child = ROOT_NODE;
        } else if self.branches.remove(&step).is_some() {
            parent.branches -= 1;
        }
    }

    /// Whose a lane is; `None` for one that has been retired.
    pub(super) fn owner(&self, lane: Lane) -> Option<LaneOwner> {
        self.owners.get(lane.index()).copied().flatten()
    }

    /// The lanes of every worker, by slot and tier.
    pub(super) fn workers(&self) -> &[[Lane; 4]] {
        &self.workers
    }

    /// Every lane in use has a place below this.
    pub(super) fn lanes_len(&self) -> usize {
        self.owners.len()
    }

    /// For every worker the lane of the nearest tier that it has: where a chain begins.
    pub(super) fn start(&self) -> &[u64] {
        &self.start
    }

    /// Lanes whose worker has a lane of a tier further away.
    pub(super) fn lower(&self) -> &[u64] {
        &self.lower
    }

    /// Publishes so far.
    pub(super) const fn publishes(&self) -> u64 {
        self.publishes
    }

    /// Whether no position is held.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.nodes.iter().all(|node| node.lanes.is_empty() && node.child == ROOT_NODE && node.branches == 0)
            && self.branches.is_empty()
            && self.aliases.is_empty()
    }

    fn apply(&mut self, op: TrieOp) {
        match op {
            TrieOp::Hold { node, step, lane } => self.hold(node, step, lane),
            TrieOp::Drop { node, step, lane } => self.drop_hold(node, step, lane),
            TrieOp::Give { lane, owner } => self.give(lane, owner),
            TrieOp::Retire { lane } => self.retire(lane),
            TrieOp::Publish => self.publishes += 1,
        }
    }

    fn hold(&mut self, id: u32, step: Step, lane: Lane) {
        let last = id.max(step.parent) as usize;
        if self.nodes.len() <= last {
            self.nodes.resize_with(last + 1, Node::default);
        }
        let new = self.nodes[id as usize].lanes.is_empty();
        self.nodes[id as usize].lanes.insert(lane);
        if !new {
            return;
        }
        match self.child(step) {
            Some(first) => {
                self.nodes[first as usize].forked = true;
                self.aliases.entry(step).or_default().push(id);
            }
            None => self.set_child(step, id),
        }
    }

    fn drop_hold(&mut self, id: u32, step: Step, lane: Lane) {
        let Some(node) = self.nodes.get_mut(id as usize).filter(|node| node.lanes.contains(lane)) else { return };
        node.lanes.remove(lane);
        if !node.lanes.is_empty() {
            return;
        }
        let forked = std::mem::take(&mut node.forked);
        let Some(first) = self.child(step) else { return };
        if first != id {
            self.forget_alias(step, first, id);
        } else if !forked {
            self.remove_child(step);
        } else if let Some(next) = self.aliases.get(&step).and_then(|others| others.first().copied()) {
            self.set_child(step, next);
            self.nodes[next as usize].forked = true;
            self.forget_alias(step, next, next);
        }
    }

    /// Takes `id` from the other positions of a step whose first is `first`.
    fn forget_alias(&mut self, step: Step, first: u32, id: u32) {
        let Some(others) = self.aliases.get_mut(&step) else { return };
        others.retain(|other| *other != id);
        if others.is_empty() {
            self.aliases.remove(&step);
            self.nodes[first as usize].forked = false;
        }
    }

    fn give(&mut self, lane: Lane, owner: LaneOwner) {
        if self.owners.len() <= lane.index() {
            self.owners.resize(lane.index() + 1, None);
            self.start.resize(lane.word() + 1, 0);
            self.lower.resize(lane.word() + 1, 0);
        }
        let worker = usize::from(owner.slot.0);
        if self.workers.len() <= worker {
            self.workers.resize(worker + 1, [Lane::NONE; 4]);
        }
        self.owners[lane.index()] = Some(owner);
        self.workers[worker][owner.tier.index()] = lane;
        self.relate(owner.slot);
    }

    fn retire(&mut self, lane: Lane) {
        let Some(owner) = self.owner(lane) else { return };
        self.owners[lane.index()] = None;
        self.start[lane.word()] &= !lane.bit();
        self.lower[lane.word()] &= !lane.bit();
        self.workers[usize::from(owner.slot.0)][owner.tier.index()] = Lane::NONE;
        self.relate(owner.slot);
    }

    /// Puts a worker's lanes right in `start` and `lower`.
    fn relate(&mut self, slot: WorkerSlot) {
        let lanes = self.workers[usize::from(slot.0)];
        let mut further = false;
        for (tier, lane) in lanes.iter().enumerate().rev().filter(|(_, lane)| lane.is_some()) {
            let first = lanes[..tier].iter().all(|nearer| !nearer.is_some());
            put(&mut self.start[lane.word()], lane.bit(), first);
            put(&mut self.lower[lane.word()], lane.bit(), further);
            further = true;
        }
    }
}

fn put(word: &mut u64, bit: u64, set: bool) {
    if set {
        *word |= bit;
    } else {
        *word &= !bit;
    }
}

impl left_right::Absorb<TrieOp> for Trie {
    fn absorb_first(&mut self, op: &mut TrieOp, _other: &Self) {
        self.apply(*op);
    }

    fn sync_with(&mut self, first: &Self) {
        self.clone_from(first);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Step = Step { parent: ROOT_NODE, local: LocalHash(7) };

    fn ids(trie: &Trie) -> Vec<u32> {
        let mut ids: Vec<u32> = trie.follow(STEP).into_iter().chain(trie.aliases(STEP)).map(|(id, _)| id).collect();
        ids.sort_unstable();
        ids
    }

    #[test]
    fn a_step_leads_to_every_position_that_is_held_and_to_no_other() {
        let mut trie = Trie::default();
        for node in [1, 2, 3] {
            trie.hold(node, STEP, Lane(0));
        }
        trie.hold(1, STEP, Lane(9));
        assert_eq!(ids(&trie), [1, 2, 3]);
        trie.drop_hold(1, STEP, Lane(0));
        assert_eq!(ids(&trie), [1, 2, 3], "lane 9 still holds it");
        trie.drop_hold(1, STEP, Lane(9));
        assert_eq!(ids(&trie), [2, 3]);
        trie.drop_hold(3, STEP, Lane(0));
        assert!(trie.follow(STEP).is_some_and(|(id, node)| id == 2 && !node.forked));
        trie.drop_hold(3, STEP, Lane(0));
        trie.drop_hold(2, STEP, Lane(0));
        assert!(ids(&trie).is_empty() && trie.is_empty());
    }

    #[test]
    fn a_position_may_have_any_number_of_children() {
        let step = |local| Step { parent: ROOT_NODE, local: LocalHash(local) };
        let mut trie = Trie::default();
        for round in 0..3 {
            (1..100).for_each(|id| trie.hold(id, step(u64::from(id)), Lane(0)));
            let found = |trie: &Trie, id: u32| trie.follow(step(u64::from(id))).map(|(id, _)| id);
            assert!((1..100).all(|id| found(&trie, id) == Some(id)) && found(&trie, 100).is_none());
            (1..100).filter(|id| id % 3 == round).for_each(|id| trie.drop_hold(id, step(u64::from(id)), Lane(0)));
            assert!((1..100).all(|id| found(&trie, id).is_some() == (id % 3 != round)));
        }
        (1..100).for_each(|id| trie.drop_hold(id, step(u64::from(id)), Lane(0)));
        assert!(trie.is_empty());
    }

    #[test]
    fn the_nearest_tier_starts_and_nearer_tiers_have_lower_ones() {
        use crate::ids::Tier;
        let owner = |tier| LaneOwner { slot: WorkerSlot(2), tier };
        let mut trie = Trie::default();
        trie.give(Lane(5), owner(Tier::Disk));
        assert_eq!((trie.start[0], trie.lower[0]), (1 << 5, 0));
        trie.give(Lane(70), owner(Tier::Device));
        assert_eq!((trie.start[0], trie.start[1], trie.lower[0], trie.lower[1]), (0, 1 << 6, 0, 1 << 6));
        trie.retire(Lane(70));
        assert_eq!((trie.start[0], trie.start[1], trie.lower[1]), (1 << 5, 0, 0));
        trie.retire(Lane(5));
        assert_eq!(trie.start, [0, 0]);
        assert!(trie.owner(Lane(5)).is_none());
    }
}
