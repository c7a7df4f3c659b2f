//! The slow path of a store: one block at a time, with all checks, and the placement of dormant blocks.
//!
//! The checks come first and change nothing. The changes are one multi-write ([`super::shared_index::ShardHead`]):
//! readers wait or walk again, so no step is seen alone.

use super::arena::CHUNK_WORDS;
use super::holders::{HolderBit, HolderState, Layer};
use super::new_blocks::{BlockSlice, DuplicateNames, StoreError};
use super::node::{NodeId, Place};
use super::store::StoreTarget;
use super::tree::Tree;
use super::worker::{Allowance, DormantBlock, Worker, mixed};
use super::{Binding, Refusal, ShardLimits, Shortfall, StoreBlocks, StoreOutcome};
use crate::ids::{EngineHash, GroupId, LocalHash, Seed};
use crate::limits::{GROUPS_MAX, NODE_BLOCKS_MAX};
use hashbrown::HashSet;
use smallvec::{SmallVec, smallvec};

/// Words that one block may take: a node of its own, and its part of nodes that have to grow.
const BLOCK_WORDS_MAX: u64 = 64;
/// Words that must remain: as many as one node can need to be moved.
const ARENA_SPARE_WORDS: u64 = 4 * CHUNK_WORDS as u64;

impl Worker {
    /// Applies or refuses any store.
    pub(super) fn store_slow(
        &mut self,
        tree: &mut Tree,
        limits: &ShardLimits,
        store: &StoreBlocks<'_>,
        before_shortfall: &mut dyn FnMut(Shortfall),
    ) -> StoreOutcome {
        if store.hashes.len() != store.locals.len() {
            return StoreOutcome::refused(Refusal::LengthMismatch);
        }
        if store.hashes.len() > limits.slow_path_blocks_max {
            return StoreOutcome::refused(Refusal::StoreBound);
        }
        let blocks = store.hashes.len() as u32;
        if let Some(refusal) = self.inconsistent(tree, store) {
            return StoreOutcome::refused(refusal);
        }
        if blocks == 0 {
            return StoreOutcome::default();
        }
        if !limits.counts_copies && self.is_ambiguous_slow(tree, store) {
            return StoreOutcome { ambiguous: true, already: blocks, ..StoreOutcome::default() };
        }
        if let Some(refusal) = self.beyond_bounds(tree, limits, store) {
            return StoreOutcome::refused(refusal);
        }
        self.set_allowance(limits.event_moves_max, limits);
        tree.head.begin_multi_write();
        let mut outcome = self.store_blocks(tree, store);
        if self.allowance.exhausted {
            before_shortfall(Shortfall::Emptied);
            self.hide(tree);
            outcome = StoreOutcome::refused(Refusal::WorkBound);
        } else if outcome.deferred {
            before_shortfall(Shortfall::Deferred);
        }
        tree.head.end_multi_write();
        outcome
    }

    pub(super) fn set_allowance(&mut self, placements: usize, limits: &ShardLimits) {
        let ShardLimits { dormant_blocks_max: dormant_max, event_moves_max: displacements, .. } = *limits;
        self.allowance = Allowance { placements: placements.max(1), displacements, dormant_max, exhausted: false };
    }

    /// Gives places to a slice of the dormant blocks; returns whether there are more. If the allowance is exhausted
    /// afterwards, readers no longer see the worker, and it must be emptied.
    pub(super) fn continue_placement(&mut self, tree: &mut Tree) -> bool {
        tree.head.begin_multi_write();
        self.place_some_dormant(tree);
        tree.publish_touched();
        if self.allowance.exhausted {
            self.hide(tree);
        }
        tree.head.end_multi_write();
        !self.placement_queue.is_empty()
    }

    /// Lets no holder bit of the worker count any more.
    fn hide(&self, tree: &mut Tree) {
        self.all_holders.iter().for_each(|holder| tree.holders.set_state(*holder, HolderState::Retired));
        tree.publish_holders();
    }

    /// Applies a checked store, block by block, in a multi-write.
    fn store_blocks(&mut self, tree: &mut Tree, store: &StoreBlocks<'_>) -> StoreOutcome {
        let Some(target) = self.target(tree, store) else { return StoreOutcome::refused(Refusal::PositionBound) };
        let blocks = store.hashes.len() as u32;
        let mut outcome = StoreOutcome { stored: blocks, ..StoreOutcome::default() };
        let mut parent = store.parent;
        for (name, local) in store.hashes.iter().zip(store.locals) {
            #[cfg(test)]
            super::failpoints::at_block(*name);
            let binding = Binding { parent, local: *local, seed: store.seed };
            let (already, waits) = self.store_block(tree, target, *name, binding);
            outcome.already += u32::from(already);
            if waits {
                // The blocks behind it have no chain to the root either.
                outcome.dormant = blocks;
            }
            if self.allowance.exhausted {
                break;
            }
            parent = Some(*name);
        }
        outcome.deferred = !self.placement_queue.is_empty();
        tree.publish_touched();
        outcome
    }

    pub(super) fn binding(&self, tree: &Tree, name: EngineHash) -> Option<Binding> {
        if let Some(block) = self.dormant.get(name) {
            return Some(Binding { parent: block.parent, local: block.local, seed: block.seed });
        }
        let (place, _) = self.find(tree, name)?;
        let node = &tree.nodes[place.node];
        let seed = node.columns[usize::from(self.column_of(node)?)].seed;
        let local = LocalHash(tree.locals(place.node)[usize::from(place.at)]);
        Some(Binding { parent: self.name_before(tree, place), local, seed })
    }

    /// Whether a store contradicts itself or existing bindings.
    fn inconsistent(&self, tree: &Tree, store: &StoreBlocks<'_>) -> Option<Refusal> {
        if store.parent.is_some_and(|parent| store.hashes.contains(&parent)) {
            return Some(Refusal::SelfParent);
        }
        let distinct: HashSet<EngineHash> = store.hashes.iter().copied().collect();
        let mut parent = store.parent;
        let mut conflict = distinct.len() < store.hashes.len();
        for (name, local) in store.hashes.iter().zip(store.locals) {
            let wanted = Binding { parent, local: *local, seed: store.seed };
            conflict |= self.binding(tree, *name).is_some_and(|bound| bound != wanted);
            parent = Some(*name);
        }
        conflict.then_some(Refusal::HashConflict)
    }

    /// Whether a holder bit refers to a bound block.
    pub(super) fn refers(&self, tree: &Tree, holder: HolderBit, name: EngineHash) -> bool {
        match self.dormant.get(name) {
            Some(block) => block.holders.contains(&holder),
            None => self.find(tree, name).is_some_and(|(place, _)| {
                tree.nodes[place.node].entry(holder).is_some_and(|entry| entry.covers(place.at))
            }),
        }
    }

    /// As `is_ambiguous`, for any store.
    fn is_ambiguous_slow(&mut self, tree: &Tree, store: &StoreBlocks<'_>) -> bool {
        let layer = self.layer(store.tier, store.group);
        let Some(holder) = self.group(layer, store.group).map(|group| group.holder) else { return false };
        store.parent.is_none()
            && store.hashes.iter().all(|name| self.refers(tree, holder, *name))
            && !self.is_new_in_batch(layer, store.group, store.hashes)
    }

    /// The bound that a store would break.
    fn beyond_bounds(&self, tree: &Tree, limits: &ShardLimits, store: &StoreBlocks<'_>) -> Option<Refusal> {
        let layer = self.layer(store.tier, store.group);
        let groups = &self.layers[layer.index()].groups;
        if groups.len() >= GROUPS_MAX && self.group(layer, store.group).is_none() {
            return Some(Refusal::TooManyGroups);
        }
        let is_bound = |name: EngineHash| self.dormant.get(name).is_some() || self.find(tree, name).is_some();
        let new = store.hashes.iter().filter(|name| !is_bound(**name)).count();
        if self.bound.all() + new as u64 > self.blocks_max {
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
        if waits && self.dormant.len() + new > limits.dormant_blocks_max {
            return Some(Refusal::DormantBound);
        }
        if new > 0 && self.removed_inner_blocks > limits.dormant_blocks_max as u64 {
            return Some(Refusal::DormantBound);
        }
        if let Some(group) = self.group(layer, store.group).filter(|_| self.extras_most == u32::MAX) {
            let most = |name: &EngineHash| self.extras.get(*name, group.holder) == u32::MAX;
            if store.hashes.iter().any(most) {
                return Some(Refusal::ReferenceBound);
            }
        }
        let moved = (new + self.dormant.len()) as u64;
        if new > 0 && tree.arena.unopened_words() < moved * BLOCK_WORDS_MAX + ARENA_SPARE_WORDS {
            return Some(Refusal::PositionBound);
        }
        if is_wide {
            return Some(Refusal::BytesBound);
        }
        let ceiling = limits.memory_bytes_max;
        let bytes = || tree.bytes_with(new as u64) + self.growth_bytes(new) + self.dormant.growth_bytes(new);
        (new > 0 && ceiling < u64::MAX && bytes() > ceiling).then_some(Refusal::MemoryBound)
    }

    /// How many bound names one content has after one parent.
    fn names_of(&self, tree: &Tree, parent: Option<EngineHash>, local: LocalHash) -> usize {
        let dormant = parent.map_or(0, |parent| self.dormant.alike(parent, local));
        let places = match parent {
            None => smallvec![Place::ROOT],
            Some(parent) => self.places_after(tree, parent),
        };
        dormant + places.into_iter().map(|place| self.bound_at(tree, place, local)).sum::<usize>()
    }

    /// Places directly behind a name: behind the block that it names, or named before.
    fn places_after(&self, tree: &Tree, parent: EngineHash) -> SmallVec<[Place; 2]> {
        let mut places = SmallVec::new();
        tree.name_map.find(tree.name_map.spot(parent.0), |word| {
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

    /// How many of the worker's blocks at a place are bound and have this content.
    fn bound_at(&self, tree: &Tree, place: Place, local: LocalHash) -> usize {
        let node = &tree.nodes[place.node];
        if place.at < node.len {
            let same = tree.locals(place.node)[usize::from(place.at)] == local.0;
            return usize::from(same && self.binds(node, place.at));
        }
        let variants = tree.variants(place.node, local);
        variants.into_iter().filter(|id| self.binds(&tree.nodes[*id], 0)).count()
    }

    /// The target of a store; adds its group if it is new. A second group of a layer gets the layer a holder bit of its
    /// own, which covers nothing until all groups refer to a block.
    fn target(&mut self, tree: &mut Tree, store: &StoreBlocks<'_>) -> Option<StoreTarget> {
        let (layer, group) = (self.layer(store.tier, store.group), store.group);
        let holder = self.announced(tree, layer, group)?;
        Some(StoreTarget { layer, group, holder })
    }

    /// The holder bit of a group; adds the group if it is new. In a multi-write.
    pub(super) fn announced(&mut self, tree: &mut Tree, layer: Layer, group: GroupId) -> Option<HolderBit> {
        if let Some(known) = self.group(layer, group) {
            return Some(known.holder);
        }
        let is_first = self.layers[layer.index()].groups.is_empty();
        let state = if is_first { HolderState::Shown } else { HolderState::Hidden };
        let holder = tree.holders.give(self.slot, self.life, layer, state)?;
        let shown =
            if is_first { Some(holder) } else { tree.holders.give(self.slot, self.life, layer, HolderState::Shown) };
        let Some(shown) = shown else {
            tree.holders.set_state(holder, HolderState::Free);
            return None;
        };
        self.all_holders.push(holder);
        let of = &mut self.layers[layer.index()];
        if !is_first {
            self.all_holders.push(shown);
            let only = of.groups.len() == 1;
            tree.holders.set_state(of.shown, if only { HolderState::Hidden } else { HolderState::Retired });
            (of.held, of.digest) = (0, 0);
        }
        of.shown = shown;
        self.add_group(layer, group, holder);
        if layer == Layer::Windows {
            tree.holders.set_window_blocks(shown, self.window_blocks);
        }
        tree.publish_holders();
        Some(holder)
    }

    /// Lets a group's blocks count as those of a window from now on. Returns whether they do.
    pub(super) fn announce_window(&mut self, tree: &mut Tree, group: GroupId, window_blocks: u32) -> bool {
        let windows = &self.layers[Layer::Windows.index()];
        let known = self.group(Layer::Windows, group).is_some();
        if known && window_blocks <= self.window_blocks {
            return true;
        }
        let is_counted = self.group(Layer::Device, group).is_some();
        if !known && (is_counted || window_blocks == 0 || windows.groups.len() >= GROUPS_MAX) {
            return false;
        }
        // All groups must have the longest window of them. That may ask for too much, never for too little.
        self.window_blocks = self.window_blocks.max(window_blocks);
        tree.head.begin_multi_write();
        let announced = self.announced(tree, Layer::Windows, group).is_some();
        if known {
            tree.holders.set_window_blocks(self.layers[Layer::Windows.index()].shown, self.window_blocks);
            tree.publish_holders();
        }
        tree.head.end_multi_write();
        announced
    }

    pub(super) fn refers_to(&self, tree: &Tree, layer: Layer, group: GroupId, name: EngineHash) -> bool {
        self.group(layer, group).is_some_and(|group| self.refers(tree, group.holder, name))
    }

    /// Counts a reference to one block, binding it if it is not bound. Returns whether the holder bit already had one,
    /// and whether the block is dormant.
    fn store_block(
        &mut self,
        tree: &mut Tree,
        target: StoreTarget,
        name: EngineHash,
        binding: Binding,
    ) -> (bool, bool) {
        self.layers[target.layer.index()].references += 1;
        if self.refers(tree, target.holder, name) {
            self.refer_again(name, target.holder);
            return (true, self.dormant.get(name).is_some());
        }
        if let Some(at) =
            self.layers[target.layer.index()].groups.iter().position(|group| group.holder == target.holder)
        {
            self.note_new_references(target.layer, at, &[name]);
        }
        if self.dormant.get(name).is_some() {
            self.refer_dormant(target, name);
            return (false, true);
        }
        if let Some((place, _)) = self.find(tree, name) {
            self.refer_placed(tree, target, place, name);
            return (false, false);
        }
        let after = match binding.parent {
            None => Some(Place::ROOT),
            Some(parent) => self.find(tree, parent).map(|(place, _)| Place { at: place.at + 1, ..place }),
        };
        let Binding { parent, local, seed } = binding;
        // Without words for it, the block is dormant too. A store that could run out of words is refused before it
        // begins.
        let place = after.and_then(|after| self.place(tree, target.holder, after, name, local, seed).ok());
        let Some(place) = place else {
            self.dormant.insert(name, DormantBlock::new(parent, local, seed, SmallVec::new()));
            self.refer_dormant(target, name);
            return (false, true);
        };
        self.refer_placed(tree, target, place, name);
        self.place_children_of(tree, name);
        (false, false)
    }

    /// Counts the first reference of a holder bit to a dormant block.
    fn refer_dormant(&mut self, target: StoreTarget, name: EngineHash) {
        let Some(holders) = self.dormant.holders_mut(name) else { return };
        let before = holders.clone();
        holders.push(target.holder);
        let after = holders.clone();
        self.recount(target.layer, &before, &after, name);
    }

    /// Counts the first reference of a holder bit to a block of the tree.
    fn refer_placed(&mut self, tree: &mut Tree, target: StoreTarget, place: Place, name: EngineHash) {
        let before = self.holders_at(tree, place);
        tree.cover(place, target.holder, self.column_at(tree, place));
        let after = self.holders_at(tree, place);
        self.recount(target.layer, &before, &after, name);
        self.show_if_held(tree, target.layer, place, &after);
        tree.publish_later(place.node);
    }

    /// Lets the shown holder bit of a layer with several groups cover a block if all groups refer to it, and not
    /// otherwise.
    fn show_if_held(&self, tree: &mut Tree, layer: Layer, place: Place, holders: &[HolderBit]) {
        let of = &self.layers[layer.index()];
        if of.groups.len() < 2 {
            return;
        }
        if self.is_held(layer, holders) {
            tree.cover(place, of.shown, self.column_at(tree, place));
        } else {
            tree.uncover(place, of.shown);
        }
    }

    fn column_at(&self, tree: &Tree, place: Place) -> u16 {
        self.column_of(&tree.nodes[place.node]).unwrap_or_default()
    }

    /// Whether a layer holds a block to which these holder bits refer.
    pub(super) fn is_held(&self, layer: Layer, holders: &[HolderBit]) -> bool {
        let groups = &self.layers[layer.index()].groups;
        !groups.is_empty() && groups.iter().all(|group| holders.contains(&group.holder))
    }

    /// The holder bits that refer to a block of the tree.
    pub(super) fn holders_at(&self, tree: &Tree, place: Place) -> SmallVec<[HolderBit; 4]> {
        let node = &tree.nodes[place.node];
        let covers = |holder: &HolderBit| node.entry(*holder).is_some_and(|entry| entry.covers(place.at));
        self.references().map(|(_, holder)| holder).filter(covers).collect()
    }

    fn layers_of(&self, holders: &[HolderBit]) -> usize {
        self.references()
            .filter(|(_, holder)| holders.contains(holder))
            .fold(0, |set, (layer, _)| set | 1 << layer.index())
    }

    /// Updates the counts after the holder bits that refer to a block have changed.
    pub(super) fn recount(&mut self, layer: Layer, before: &[HolderBit], after: &[HolderBit], name: EngineHash) {
        let (from, to) = (self.layers_of(before), self.layers_of(after));
        self.bound.change((from, to), 1);
        let (held, holds) = (self.is_held(layer, before), self.is_held(layer, after));
        let of = &mut self.layers[layer.index()];
        match (held, holds) {
            (false, true) => {
                of.held += 1;
                of.digest = of.digest.wrapping_add(mixed(name.0));
            }
            (true, false) => {
                of.held -= 1;
                of.digest = of.digest.wrapping_sub(mixed(name.0));
            }
            _ => {}
        }
    }
}

/// Variants of one content at one place, at most: readers visit each.
pub(super) const ALIASES_CEILING: usize = 64;

impl Worker {
    /// Finds or makes the place of an unbound block, right after `after`. The holder bit has an entry there afterwards,
    /// which does not cover the block yet. Fails if there are no words for one more block.
    pub(super) fn place(
        &mut self,
        tree: &mut Tree,
        holder: HolderBit,
        after: Place,
        name: EngineHash,
        local: LocalHash,
        seed: Seed,
    ) -> Result<Place, StoreError> {
        let slice = BlockSlice { locals: &[local], names: &[name], seed };
        let node = &tree.nodes[after.node];
        if after.at == node.len {
            return self.place_below(tree, holder, after.node, slice);
        }
        let same = tree.locals(after.node)[usize::from(after.at)] == local.0;
        if same && !self.binds(node, after.at) {
            if self.is_named(tree, after, slice) {
                return Ok(after);
            }
            // The worker's names from here on belong to blocks that are no longer bound, so the blocks below lose their
            // places.
            self.displace(tree, Place { at: after.at + 1, ..after });
            if self.allowance.exhausted {
                return Err(StoreError::ArenaFull);
            }
            if tree.nodes[after.node].len == after.at {
                return self.place_below(tree, holder, after.node, slice);
            }
            if let Some(found) = self.name_next(tree, holder, after, slice) {
                return Ok(found);
            }
        }
        let prefix = tree.split(after.node, after.at);
        let rest = after.node;
        let placed = self.place_below(tree, holder, prefix, slice);
        // No holder bit may cover the part that the split left behind.
        if placed.is_err() || placed.is_ok_and(|placed| placed.node != rest) {
            tree.prune(rest);
        }
        placed
    }

    /// Whether the worker's column already has this name for a block of a node.
    fn is_named(&self, tree: &Tree, place: Place, slice: BlockSlice<'_>) -> bool {
        let node = &tree.nodes[place.node];
        let Some(column) = self.column_of(node).map(|at| &node.columns[usize::from(at)]) else { return false };
        let named = tree.names(column).get(usize::from(place.at)) == slice.name_words().first();
        named && column.seed == slice.seed
    }

    /// Adds a name behind the last one of the worker's column.
    fn name_next(&self, tree: &mut Tree, holder: HolderBit, place: Place, slice: BlockSlice<'_>) -> Option<Place> {
        let node = &tree.nodes[place.node];
        let at = self.column_of(node)?;
        let column = node.columns[usize::from(at)];
        if column.len != place.at || column.seed != slice.seed || place.at >= node.len {
            return None;
        }
        tree.extend_column(place.node, at, slice, DuplicateNames::Allowed).ok()?;
        tree.enter(place.node, holder, at);
        Some(place)
    }

    /// The place of a block that begins a node below another.
    fn place_below(
        &mut self,
        tree: &mut Tree,
        holder: HolderBit,
        parent: NodeId,
        slice: BlockSlice<'_>,
    ) -> Result<Place, StoreError> {
        let variants = tree.variants(parent, slice.locals[0]);
        let named = |worker: &Self, id: NodeId| worker.is_named(tree, Place { node: id, at: 0 }, slice);
        if let Some(id) = variants.iter().copied().find(|id| named(self, *id)) {
            return Ok(Place { node: id, at: 0 });
        }
        let free = variants.iter().copied().find(|id| !self.binds(&tree.nodes[*id], 0));
        if let Some(id) = free {
            let place = Place { node: id, at: 0 };
            if self.column_of(&tree.nodes[id]).is_some() {
                self.displace(tree, place);
            }
            if self.allowance.exhausted {
                return Err(StoreError::ArenaFull);
            }
            if tree.nodes.is_used(id) {
                self.forked |= tree.nodes[id].variant > 0 || tree.nodes[id].forks > 0;
                tree.newcomer(id, holder, slice)?;
                return Ok(place);
            }
            return self.place_below(tree, holder, parent, slice);
        }
        let end = tree.nodes[parent].len;
        if variants.is_empty()
            && tree.may_append(parent, holder, slice.seed)
            && tree.append(parent, slice, DuplicateNames::Allowed) == Ok(1)
        {
            tree.nodes[parent].entries[0].cut = end;
            return Ok(Place { node: parent, at: end });
        }
        self.forked |= !variants.is_empty();
        Ok(Place { node: tree.new_variant(parent, holder, slice, &variants)?, at: 0 })
    }

    /// Takes the worker's blocks from a place on, and all below, out of the tree: their chain is no longer complete, or
    /// they belong elsewhere. They become dormant. If more blocks would have to move than one event may, or more would
    /// be dormant than allowed, nothing changes but that the [`Allowance`] is exhausted.
    fn displace(&mut self, tree: &mut Tree, from: Place) {
        let mut stack = vec![from];
        let mut touched = Vec::new();
        let mut displaced = Vec::new();
        let dormant_max = self.allowance.dormant_max.saturating_sub(self.dormant.len());
        let mut work = 0;
        while let Some(from) = stack.pop() {
            let node = &tree.nodes[from.node];
            let Some(column) = self.column_of(node).map(|at| node.columns[usize::from(at)]) else { continue };
            work += 1 + usize::from(column.len.saturating_sub(from.at));
            if work > self.allowance.displacements || displaced.len() > dormant_max {
                self.allowance.exhausted = true;
                return;
            }
            for at in from.at..column.len {
                let place = Place { at, ..from };
                let holders = self.holders_at(tree, place);
                if !holders.is_empty() {
                    let parent = self.name_before(tree, place);
                    let local = LocalHash(tree.locals(place.node)[usize::from(at)]);
                    let name = tree.name(column.names.base + u32::from(at));
                    let holders = holders.into_iter().collect();
                    displaced.push((name, DormantBlock::new(parent, local, column.seed, holders)));
                }
            }
            // Children that only other workers have count as work too, because they are visited.
            let left = self.allowance.displacements - work;
            for child in tree.nodes.children(from.node).take(left + 1) {
                work += 1;
                if self.column_of(&tree.nodes[child]).is_some() {
                    stack.push(Place { node: child, at: 0 });
                }
            }
            touched.push(from);
        }
        if work > self.allowance.displacements || displaced.len() > dormant_max {
            self.allowance.exhausted = true;
            return;
        }
        self.allowance.displacements -= work;
        for from in touched.iter().rev() {
            self.leave(tree, *from);
        }
        for from in touched.iter().rev() {
            if tree.nodes.is_used(from.node) {
                tree.prune(from.node);
            }
        }
        for (name, block) in displaced {
            self.dormant.insert(name, block);
        }
    }

    /// Removes all of the worker's coverage of a node from a place on; at the first block, its entries too.
    fn leave(&self, tree: &mut Tree, from: Place) {
        for holder in &self.all_holders {
            let node = &mut tree.nodes[from.node];
            let Ok(at) = node.find(*holder) else { continue };
            node.entries[at].take(from.at, NODE_BLOCKS_MAX as u16);
            if from.at == 0 {
                tree.remove_entry(from.node, at);
            }
        }
    }

    /// Places the dormant descendants of a name that has got a place. First, the blocks below the places that the name
    /// had before are displaced. As many blocks move as the event allows; slices of a sweep move the rest.
    fn place_children_of(&mut self, tree: &mut Tree, name: EngineHash) {
        self.placement_queue.push(name);
        self.place_some_dormant(tree);
    }

    /// Gives places to dormant blocks below the queued names while the allowance lasts. The rest stays dormant, which
    /// readers see as not held.
    fn place_some_dormant(&mut self, tree: &mut Tree) {
        while self.allowance.placements > 0
            && let Some(name) = self.placement_queue.pop()
        {
            let Some((_, word)) = self.find(tree, name) else { continue };
            for stale in tree.words_named(name).into_iter().filter(|stale| *stale != word) {
                let Some((place, column)) = tree.resolve(stale).filter(|_| tree.name(stale) == name) else { continue };
                if self.column_of(&tree.nodes[place.node]) == Some(column) {
                    self.displace(tree, Place { at: place.at + 1, ..place });
                }
                if self.allowance.exhausted {
                    return;
                }
            }
            self.place_dormant_children(tree, name);
            if self.allowance.exhausted {
                return;
            }
        }
    }

    /// Gives the dormant children of a name their places, as many as may be moved.
    fn place_dormant_children(&mut self, tree: &mut Tree, name: EngineHash) {
        let placements = self.allowance.placements;
        let mut children: Vec<EngineHash> = self.dormant.children(name).take(placements + 1).collect();
        let more = children.len() > placements;
        children.truncate(placements);
        self.allowance.placements -= children.len().max(1);
        let from = self.placement_queue.len();
        for child in children {
            if !self.place_dormant_block(tree, name, child) {
                // The parent has lost its place meanwhile, or there are no words for the child; so it is for its
                // siblings.
                return;
            }
            self.placement_queue.push(child);
        }
        if more {
            self.placement_queue.insert(from, name);
        }
    }

    /// Gives a dormant child of `parent` its place; returns whether there were words for it.
    fn place_dormant_block(&mut self, tree: &mut Tree, parent: EngineHash, child: EngineHash) -> bool {
        let Some((place, _)) = self.find(tree, parent) else { return false };
        let Some(block) = self.dormant.remove(child) else { return true };
        let after = Place { at: place.at + 1, ..place };
        let Ok(place) = self.place(tree, block.holders[0], after, child, block.local, block.seed) else {
            // The block would stay dormant for ever, and the worker would count for too little.
            self.allowance.exhausted = true;
            self.dormant.insert(child, block);
            return false;
        };
        let column = self.column_of(&tree.nodes[place.node]).unwrap_or_default();
        for holder in &block.holders {
            tree.cover(place, *holder, column);
        }
        for layer in Layer::ALL {
            self.show_if_held(tree, layer, place, &block.holders);
        }
        tree.publish_later(place.node);
        true
    }
}
