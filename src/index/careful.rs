//! A store, the careful way: one block at a time, with every question asked.
//!
//! The questions come first and change nothing. What is then done is done while the shard is **torn**
//! ([`super::head::Head::tear`]): readers that come by walk again, so that none of the steps is seen.

use super::arena::CHUNK_WORDS;
use super::fresh::Fresh;
use super::lanes::{Lane, LaneState};
use super::layer::Layer;
use super::node::Place;
use super::place::ALIASES_CEILING;
use super::store::Goal;
use super::tree::Tree;
use super::waiting::Waiter;
use super::worker::{Allowance, GroupLane, Worker, stirred};
use super::{Binding, Refusal, ShardLimits, Shortfall, StoreBlocks, StoreOutcome};
use crate::ids::{EngineHash, GroupId, LocalHash};
use crate::limits::GROUPS_MAX;
use hashbrown::HashSet;
use smallvec::{SmallVec, smallvec};

/// Words that one block may take: a node of its own, and its part of those that have to grow.
const BLOCK_WORDS_MAX: u64 = 64;
/// Words that must be left over: what one node can need to be moved.
const ARENA_SPARE_WORDS: u64 = 4 * CHUNK_WORDS as u64;

impl Worker {
    /// Takes a store, whatever it is.
    pub(super) fn store_carefully(
        &mut self,
        tree: &mut Tree,
        limits: &ShardLimits,
        store: &StoreBlocks<'_>,
        before_shortfall: &mut dyn FnMut(Shortfall),
    ) -> StoreOutcome {
        if store.hashes.len() != store.locals.len() {
            return StoreOutcome::refused(Refusal::LengthMismatch);
        }
        if store.hashes.len() > limits.careful_blocks_max {
            return StoreOutcome::refused(Refusal::StoreBound);
        }
        let blocks = store.hashes.len() as u32;
        if let Some(refusal) = self.inconsistent(tree, store) {
            return StoreOutcome::refused(refusal);
        }
        if blocks == 0 {
            return StoreOutcome::default();
        }
        if !limits.counts_copies && self.says_nothing_new(tree, store) {
            return StoreOutcome { ambiguous: true, already: blocks, ..StoreOutcome::default() };
        }
        if let Some(refusal) = self.beyond_bounds(tree, limits, store) {
            return StoreOutcome::refused(refusal);
        }
        self.allow(limits.event_moves_max, limits);
        tree.head.tear();
        let mut outcome = self.store_blocks(tree, store);
        if self.allowance.overwhelmed {
            before_shortfall(Shortfall::Emptied);
            self.hide(tree);
            outcome = StoreOutcome::refused(Refusal::WorkBound);
        } else if outcome.deferred {
            before_shortfall(Shortfall::Deferred);
        }
        tree.head.mend();
        outcome
    }

    pub(super) fn allow(&mut self, plants: usize, limits: &ShardLimits) {
        let ShardLimits { dormant_blocks_max: waiting_max, event_moves_max: uproots, .. } = *limits;
        self.allowance = Allowance { plants: plants.max(1), uproots, waiting_max, overwhelmed: false };
    }

    /// Gives places to what waits for them, a slice of it; says whether there is more. The worker must be emptied if it
    /// is overwhelmed afterwards; readers see nothing of it any more.
    pub(super) fn go_on_home(&mut self, tree: &mut Tree) -> bool {
        tree.head.tear();
        self.bring_some_home(tree);
        tree.publish_touched();
        if self.allowance.overwhelmed {
            self.hide(tree);
        }
        tree.head.mend();
        !self.homeward.is_empty()
    }

    /// No lane of the worker counts any more.
    fn hide(&self, tree: &mut Tree) {
        self.kin.iter().for_each(|lane| tree.lanes.set_state(*lane, LaneState::Retired));
        tree.publish_lanes();
    }

    /// Applies a store that nothing speaks against, block by block. The shard is torn.
    fn store_blocks(&mut self, tree: &mut Tree, store: &StoreBlocks<'_>) -> StoreOutcome {
        let Some(goal) = self.goal(tree, store) else { return StoreOutcome::refused(Refusal::PositionBound) };
        let blocks = store.hashes.len() as u32;
        let mut outcome = StoreOutcome { stored: blocks, ..StoreOutcome::default() };
        let mut parent = store.parent;
        for (name, local) in store.hashes.iter().zip(store.locals) {
            #[cfg(test)]
            super::mishap::at_block(*name);
            let binding = Binding { parent, local: *local, seed: store.seed };
            let (already, waits) = self.store_block(tree, goal, *name, binding);
            outcome.already += u32::from(already);
            if waits {
                // Nothing behind it has a chain to the root either.
                outcome.dormant = blocks;
            }
            if self.allowance.overwhelmed {
                break;
            }
            parent = Some(*name);
        }
        outcome.deferred = !self.homeward.is_empty();
        tree.publish_touched();
        outcome
    }

    pub(super) fn binding(&self, tree: &Tree, name: EngineHash) -> Option<Binding> {
        if let Some(waiter) = self.waiting.get(name) {
            return Some(Binding { parent: waiter.parent, local: waiter.local, seed: waiter.seed });
        }
        let (place, _) = self.find(tree, name)?;
        let node = &tree.nodes[place.node];
        let seed = node.columns[usize::from(self.column_of(node)?)].seed;
        let local = LocalHash(tree.locals(place.node)[usize::from(place.at)]);
        Some(Binding { parent: self.name_before(tree, place), local, seed })
    }

    /// Why a store contradicts itself or what is bound.
    fn inconsistent(&self, tree: &Tree, store: &StoreBlocks<'_>) -> Option<Refusal> {
        if store.parent.is_some_and(|parent| store.hashes.contains(&parent)) {
            return Some(Refusal::SelfParent);
        }
        let distinct: HashSet<EngineHash> = store.hashes.iter().copied().collect();
        let mut parent = store.parent;
        let mut conflict = distinct.len() < store.hashes.len();
        for (name, local) in store.hashes.iter().zip(store.locals) {
            let told = Binding { parent, local: *local, seed: store.seed };
            conflict |= self.binding(tree, *name).is_some_and(|bound| bound != told);
            parent = Some(*name);
        }
        conflict.then_some(Refusal::HashConflict)
    }

    /// Whether a lane refers to a bound block.
    pub(super) fn refers(&self, tree: &Tree, lane: Lane, name: EngineHash) -> bool {
        match self.waiting.get(name) {
            Some(waiter) => waiter.lanes.contains(&lane),
            None => self.find(tree, name).is_some_and(|(place, _)| {
                tree.nodes[place.node].entry(lane).is_some_and(|entry| entry.covers(place.at))
            }),
        }
    }

    fn says_nothing_new(&mut self, tree: &Tree, store: &StoreBlocks<'_>) -> bool {
        let tier = self.layer(store.tier, store.group);
        let Some(lane) = self.group(tier, store.group).map(|group| group.lane) else { return false };
        store.parent.is_none()
            && store.hashes.iter().all(|name| self.refers(tree, lane, *name))
            && !self.is_fresh(tier, store.group, store.hashes)
    }

    /// Which bound a store would break.
    fn beyond_bounds(&self, tree: &Tree, limits: &ShardLimits, store: &StoreBlocks<'_>) -> Option<Refusal> {
        let tier = self.layer(store.tier, store.group);
        let groups = &self.tiers[tier.index()].groups;
        if groups.len() >= GROUPS_MAX && self.group(tier, store.group).is_none() {
            return Some(Refusal::TooManyGroups);
        }
        let is_bound = |name: EngineHash| self.waiting.get(name).is_some() || self.find(tree, name).is_some();
        let new = store.hashes.iter().filter(|name| !is_bound(**name)).count();
        if self.bound() + new as u64 > self.blocks_max {
            return Some(Refusal::CapacityBound);
        }
        let is_wide = new > 0 && self.bytes_with(tree, new) > self.bytes_max;
        let mut parent = store.parent;
        for (name, local) in store.hashes.iter().zip(store.locals) {
            if !is_bound(*name) && self.names_of(tree, parent, *local) >= limits.aliases_max.clamp(1, ALIASES_CEILING) {
                return Some(Refusal::AliasBound);
            }
            parent = Some(*name);
        }
        let waits = match (store.parent, store.hashes.first()) {
            (Some(parent), Some(first)) => self.find(tree, parent).is_none() && self.find(tree, *first).is_none(),
            _ => false,
        };
        if waits && self.waiting.len() + new > limits.dormant_blocks_max {
            return Some(Refusal::DormantBound);
        }
        if new > 0 && self.left_behind > limits.dormant_blocks_max as u64 {
            return Some(Refusal::DormantBound);
        }
        if let Some(group) = self.group(tier, store.group).filter(|_| self.extras_most == u32::MAX) {
            let most = |name: &EngineHash| self.extras.get(*name, group.lane) == u32::MAX;
            if store.hashes.iter().any(most) {
                return Some(Refusal::ReferenceBound);
            }
        }
        let moved = (new + self.waiting.len()) as u64;
        if new > 0 && tree.arena.unopened_words() < moved * BLOCK_WORDS_MAX + ARENA_SPARE_WORDS {
            return Some(Refusal::PositionBound);
        }
        if is_wide {
            return Some(Refusal::BytesBound);
        }
        let ceiling = limits.memory_bytes_max;
        let bytes = || tree.bytes_with(new as u64) + self.growth_bytes(new) + self.waiting.growth_bytes(new);
        (new > 0 && ceiling < u64::MAX && bytes() > ceiling).then_some(Refusal::MemoryBound)
    }

    /// How many bound names one content has after one parent.
    fn names_of(&self, tree: &Tree, parent: Option<EngineHash>, local: LocalHash) -> usize {
        let waiting = parent.map_or(0, |parent| self.waiting.alike(parent, local));
        let places = match parent {
            None => smallvec![Place::ROOT],
            Some(parent) => self.places_after(tree, parent),
        };
        waiting + places.into_iter().map(|place| self.bound_at(tree, place, local)).sum::<usize>()
    }

    /// Where blocks after a name may be: behind the block it is bound to, or was bound to.
    fn places_after(&self, tree: &Tree, parent: EngineHash) -> SmallVec<[Place; 2]> {
        let mut places = SmallVec::new();
        tree.slots.find(tree.slots.spot(parent.0), |word| {
            if tree.name(word) == parent
                && let Some((place, column)) = tree.resolve(word)
                && self.column_of(&tree.nodes[place.node]) == Some(column)
            {
                places.push(Place { at: place.at + 1, ..place });
            }
            false
        });
        places
    }

    /// The worker's bound blocks at a place that have one content.
    fn bound_at(&self, tree: &Tree, place: Place, local: LocalHash) -> usize {
        let node = &tree.nodes[place.node];
        if place.at < node.len {
            let same = tree.locals(place.node)[usize::from(place.at)] == local.0;
            return usize::from(same && self.binds(node, place.at));
        }
        let variants = tree.variants(place.node, local);
        variants.into_iter().filter(|id| self.binds(&tree.nodes[*id], 0)).count()
    }

    /// The lane of a store's group, which is announced if it is new. A second group of a tier gets the tier
    /// a lane of its own, which begins with nothing: nothing is held until all groups refer to it.
    fn goal(&mut self, tree: &mut Tree, store: &StoreBlocks<'_>) -> Option<Goal> {
        let (tier, group) = (self.layer(store.tier, store.group), store.group);
        let lane = self.announced(tree, tier, group)?;
        Some(Goal { tier, group, lane })
    }

    /// The lane of a group, which is announced if it is new. The shard is torn.
    pub(super) fn announced(&mut self, tree: &mut Tree, tier: Layer, group: GroupId) -> Option<Lane> {
        if let Some(known) = self.group(tier, group) {
            return Some(known.lane);
        }
        let is_first = self.tiers[tier.index()].groups.is_empty();
        let state = if is_first { LaneState::Shown } else { LaneState::Hidden };
        let lane = tree.lanes.give(self.slot, self.life, tier, state)?;
        let shown = if is_first { Some(lane) } else { tree.lanes.give(self.slot, self.life, tier, LaneState::Shown) };
        let Some(shown) = shown else {
            tree.lanes.set_state(lane, LaneState::Free);
            return None;
        };
        self.kin.push(lane);
        let of = &mut self.tiers[tier.index()];
        if !is_first {
            self.kin.push(shown);
            let only = of.groups.len() == 1;
            tree.lanes.set_state(of.shown, if only { LaneState::Hidden } else { LaneState::Retired });
            (of.held, of.digest) = (0, 0);
        }
        of.groups.push(GroupLane { group, lane, fresh: Fresh::default() });
        of.shown = shown;
        if tier == Layer::Windows {
            tree.lanes.set_window_blocks(shown, self.window_blocks);
        }
        tree.publish_lanes();
        Some(lane)
    }

    /// Has a group's blocks count as those of a window from now on. Says whether they do.
    pub(super) fn announce_window(&mut self, tree: &mut Tree, group: GroupId, window_blocks: u32) -> bool {
        let windows = &self.tiers[Layer::Windows.index()];
        let known = self.group(Layer::Windows, group).is_some();
        if known && window_blocks <= self.window_blocks {
            return true;
        }
        let is_counted = self.group(Layer::Device, group).is_some();
        if !known && (is_counted || window_blocks == 0 || windows.groups.len() >= GROUPS_MAX) {
            return false;
        }
        // Groups that reach differently far must all have the farthest: that can only be too much to ask.
        self.window_blocks = self.window_blocks.max(window_blocks);
        tree.head.tear();
        let announced = self.announced(tree, Layer::Windows, group).is_some();
        if known {
            tree.lanes.set_window_blocks(self.tiers[Layer::Windows.index()].shown, self.window_blocks);
            tree.publish_lanes();
        }
        tree.head.mend();
        announced
    }

    /// Whether a group refers to a block.
    pub(super) fn refers_to(&self, tree: &Tree, tier: Layer, group: GroupId, name: EngineHash) -> bool {
        self.group(tier, group).is_some_and(|group| self.refers(tree, group.lane, name))
    }

    /// Counts a reference to one block, binding it if it is not bound. Says whether the lane had one, and
    /// whether the block waits.
    fn store_block(&mut self, tree: &mut Tree, goal: Goal, name: EngineHash, told: Binding) -> (bool, bool) {
        self.tiers[goal.tier.index()].references += 1;
        if self.refers(tree, goal.lane, name) {
            self.refer_again(name, goal.lane);
            return (true, self.waiting.get(name).is_some());
        }
        if let Some(at) = self.tiers[goal.tier.index()].groups.iter().position(|group| group.lane == goal.lane) {
            self.note_fresh(goal.tier, at, &[name]);
        }
        if self.waiting.get(name).is_some() {
            self.refer_waiting(goal, name);
            return (false, true);
        }
        if let Some((place, _)) = self.find(tree, name) {
            self.refer_placed(tree, goal, place, name);
            return (false, false);
        }
        let after = match told.parent {
            None => Some(Place::ROOT),
            Some(parent) => self.find(tree, parent).map(|(place, _)| Place { at: place.at + 1, ..place }),
        };
        let Binding { parent, local, seed } = told;
        // Without words for it, it waits too; a store that might come to that is refused before it begins.
        let place = after.and_then(|after| self.place(tree, goal.lane, after, name, local, seed).ok());
        let Some(place) = place else {
            self.waiting.insert(name, Waiter::new(parent, local, seed, SmallVec::new()));
            self.refer_waiting(goal, name);
            return (false, true);
        };
        self.refer_placed(tree, goal, place, name);
        self.bring_home(tree, name);
        (false, false)
    }

    /// One reference more, of a lane that had none, to a block that waits.
    fn refer_waiting(&mut self, goal: Goal, name: EngineHash) {
        let Some(lanes) = self.waiting.lanes_mut(name) else { return };
        let before = lanes.clone();
        lanes.push(goal.lane);
        let after = lanes.clone();
        self.recount(goal.tier, &before, &after, name);
    }

    /// One reference more, of a lane that had none, to a block of the tree.
    fn refer_placed(&mut self, tree: &mut Tree, goal: Goal, place: Place, name: EngineHash) {
        let before = self.lanes_at(tree, place);
        tree.cover(place, goal.lane, self.column_at(tree, place));
        let after = self.lanes_at(tree, place);
        self.recount(goal.tier, &before, &after, name);
        self.show_if_held(tree, goal.tier, place, &after);
        tree.publish_later(place.node);
    }

    /// A tier of several groups shows a block that all of them refer to, and no other.
    pub(super) fn show_if_held(&self, tree: &mut Tree, tier: Layer, place: Place, lanes: &[Lane]) {
        let of = &self.tiers[tier.index()];
        if of.groups.len() < 2 {
            return;
        }
        if self.is_held(tier, lanes) {
            tree.cover(place, of.shown, self.column_at(tree, place));
        } else {
            tree.uncover(place, of.shown);
        }
    }

    fn column_at(&self, tree: &Tree, place: Place) -> u16 {
        self.column_of(&tree.nodes[place.node]).unwrap_or_default()
    }

    /// Whether a tier holds a block to which these lanes refer.
    pub(super) fn is_held(&self, tier: Layer, lanes: &[Lane]) -> bool {
        let groups = &self.tiers[tier.index()].groups;
        !groups.is_empty() && groups.iter().all(|group| lanes.contains(&group.lane))
    }

    /// The lanes that refer to a block of the tree.
    pub(super) fn lanes_at(&self, tree: &Tree, place: Place) -> SmallVec<[Lane; 4]> {
        let node = &tree.nodes[place.node];
        let covers = |lane: &Lane| node.entry(*lane).is_some_and(|entry| entry.covers(place.at));
        self.references().map(|(_, lane)| lane).filter(covers).collect()
    }

    fn tiers_of(&self, lanes: &[Lane]) -> usize {
        self.references().filter(|(_, lane)| lanes.contains(lane)).fold(0, |set, (tier, _)| set | 1 << tier.index())
    }

    /// The figures after the lanes that refer to a block have changed.
    pub(super) fn recount(&mut self, tier: Layer, before: &[Lane], after: &[Lane], name: EngineHash) {
        let (from, to) = (self.tiers_of(before), self.tiers_of(after));
        if from != to {
            self.population[from] -= u64::from(from != 0);
            self.population[to] += u64::from(to != 0);
        }
        let (held, holds) = (self.is_held(tier, before), self.is_held(tier, after));
        let of = &mut self.tiers[tier.index()];
        match (held, holds) {
            (false, true) => {
                of.held += 1;
                of.digest = of.digest.wrapping_add(stirred(name.0));
            }
            (true, false) => {
                of.held -= 1;
                of.digest = of.digest.wrapping_sub(stirred(name.0));
            }
            _ => {}
        }
    }
}
