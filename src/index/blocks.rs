//! What the events of one worker do to its blocks.

use super::entries::{Blocks, NONE, ROOT};
use super::lanes::Lane;
use super::positions::Positions;
use super::{Refusal, ShardLimits, StoreBlocks, StoreOutcome, WorkerBlocks};
use crate::ids::{EngineHash, GroupId, Seed, Tier};
use crate::limits::GROUPS_MAX;

/// A block of a store that is being looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Planned {
    entry: u32,
    created: bool,
    binds: bool,
}

enum Verdict {
    Count,
    Ambiguous,
}

impl Blocks {
    /// Applies a store whole, or not at all.
    pub(super) fn store(
        &mut self,
        positions: &mut Positions,
        limits: &ShardLimits,
        store: &StoreBlocks<'_>,
        plan: &mut Vec<Planned>,
    ) -> StoreOutcome {
        if store.hashes.len() != store.locals.len() {
            return StoreOutcome::refused(Refusal::LengthMismatch);
        }
        if store.hashes.is_empty() {
            return StoreOutcome::default();
        }
        self.settle_for(positions, limits, store);
        self.resolve(store, plan);
        match self.judge(positions, limits, store, plan) {
            Ok(Verdict::Count) => self.bind(positions, store, plan),
            Ok(Verdict::Ambiguous) => {
                StoreOutcome { ambiguous: true, already: plan.len() as u32, ..StoreOutcome::default() }
            }
            Err(refusal) => {
                plan.iter().filter(|block| block.created).for_each(|block| self.forget(block.entry));
                StoreOutcome::refused(refusal)
            }
        }
    }

    /// Brings everything that a store will look at up to date with clears that are not yet swept.
    /// Settling may forget entries, so it comes before any number of an entry is kept.
    fn settle_for(&mut self, positions: &mut Positions, limits: &ShardLimits, store: &StoreBlocks<'_>) {
        if self.cursor.is_none() {
            return;
        }
        let mut parent = store.parent;
        for (hash, local) in store.hashes.iter().zip(store.locals) {
            let under = parent.map_or(Some(ROOT), |parent| self.find(parent));
            let same = under.map(|under| self.same_content(under, *local).map(|at| self.entry(at).hash).collect());
            let same: Vec<EngineHash> = same.unwrap_or_default();
            for hash in same.into_iter().chain([*hash]).chain(parent) {
                self.settle(positions, limits, hash);
            }
            parent = Some(*hash);
        }
    }

    fn settle(&mut self, positions: &mut Positions, limits: &ShardLimits, hash: EngineHash) -> Option<u32> {
        let at = self.find(hash)?;
        if self.entry(at).stamp != self.now {
            self.settle_entry(positions, limits, at);
            return self.find(hash);
        }
        Some(at)
    }

    fn settle_entry(&mut self, positions: &mut Positions, limits: &ShardLimits, at: u32) {
        let (tiers, held, now) = (self.tiers_of(at), self.held_of(at), self.now);
        let entry = self.entry_mut(at);
        let was_bound = entry.tiers != 0;
        entry.references.retain(|reference| tiers & (1 << reference.tier.index()) != 0);
        (entry.tiers, entry.held, entry.stamp) = (tiers, held, now);
        if was_bound && tiers == 0 {
            self.unbind(positions, at, limits.dormant_blocks_max as u64);
        }
    }

    /// Finds or makes the entry of every hash of a store.
    fn resolve(&mut self, store: &StoreBlocks<'_>, plan: &mut Vec<Planned>) {
        plan.clear();
        for hash in store.hashes {
            let found = self.find(*hash);
            let entry = found.unwrap_or_else(|| self.create(*hash, store.seed));
            plan.push(Planned { entry, created: found.is_none(), binds: !self.is_bound(entry) });
        }
    }

    /// Whether a store may be applied; changes nothing but marks.
    fn judge(
        &mut self,
        positions: &Positions,
        limits: &ShardLimits,
        store: &StoreBlocks<'_>,
        plan: &[Planned],
    ) -> Result<Verdict, Refusal> {
        self.stores += 1;
        let mark = self.stores;
        let mut twice = false;
        for block in plan {
            twice |= std::mem::replace(&mut self.entry_mut(block.entry).mark, mark) == mark;
        }
        let parent = store.parent.map_or(Some(ROOT), |parent| self.find(parent));
        if store.parent.is_some() && parent.is_some_and(|at| self.entry(at).mark == mark) {
            return Err(Refusal::SelfParent);
        }
        if twice || self.conflicts(store, plan, parent) {
            return Err(Refusal::HashConflict);
        }
        let groups = &self.tiers[store.tier.index()].groups;
        let group = groups.iter().position(|group| *group == store.group);
        if store.parent.is_none() && self.held_before(store.tier, group, plan) {
            return Ok(Verdict::Ambiguous);
        }
        if group.is_none() && groups.len() >= GROUPS_MAX {
            return Err(Refusal::TooManyGroups);
        }
        self.judge_bounds(positions, limits, store, plan, parent)?;
        Ok(Verdict::Count)
    }

    fn conflicts(&self, store: &StoreBlocks<'_>, plan: &[Planned], parent: Option<u32>) -> bool {
        let parents = std::iter::once(parent).chain(plan.iter().map(|block| Some(block.entry)));
        plan.iter().zip(store.locals).zip(parents).any(|((block, local), parent)| {
            let entry = self.entry(block.entry);
            !block.binds && (Some(entry.parent) != parent || entry.local != *local || entry.seed != store.seed)
        })
    }

    fn held_before(&self, tier: Tier, group: Option<usize>, plan: &[Planned]) -> bool {
        let Some(group) = group else { return false };
        plan.iter().all(|block| {
            let reference = self.entry(block.entry).references.find(tier, group as u8);
            reference.is_some_and(|reference| reference.since != self.batch)
        })
    }

    fn judge_bounds(
        &self,
        positions: &Positions,
        limits: &ShardLimits,
        store: &StoreBlocks<'_>,
        plan: &[Planned],
        parent: Option<u32>,
    ) -> Result<(), Refusal> {
        let more = plan.iter().filter(|block| block.binds).count() as u64;
        if self.bound() + more > self.blocks_max.min(u64::from(u32::MAX / 4)) {
            return Err(Refusal::CapacityBound);
        }
        if more > 0 && !positions.room_for(more + self.dormant()) {
            return Err(Refusal::PositionBound);
        }
        let parents = std::iter::once(parent).chain(plan.iter().map(|block| Some(block.entry)));
        for ((block, local), parent) in plan.iter().zip(store.locals).zip(parents) {
            let Some(parent) = parent.filter(|_| block.binds) else { continue };
            let bound = self.same_content(parent, *local).filter(|at| self.is_bound(*at)).count();
            if bound >= self.aliases_max {
                return Err(Refusal::AliasBound);
            }
        }
        let placed = parent.is_some_and(|parent| self.is_placed(parent));
        if !placed && more > 0 && self.dormant() + more > limits.dormant_blocks_max as u64 {
            return Err(Refusal::DormantBound);
        }
        let full = plan.iter().any(|block| self.entry(block.entry).references.iter().any(|one| one.count == u32::MAX));
        if full { Err(Refusal::ReferenceBound) } else { Ok(()) }
    }

    fn bind(&mut self, positions: &mut Positions, store: &StoreBlocks<'_>, plan: &[Planned]) -> StoreOutcome {
        let parent = store.parent.map(|hash| self.find(hash).unwrap_or_else(|| self.create(hash, store.seed)));
        let group = self.announce(positions, store.tier, store.group);
        let mut already = 0;
        // All are bound before any is linked: linking forgets what is unbound and has no children.
        for block in plan {
            already += u32::from(self.add_reference(positions, block.entry, store.tier, group));
        }
        let mut under = parent.unwrap_or(ROOT);
        for (block, local) in plan.iter().zip(store.locals) {
            if block.binds {
                self.entry_mut(block.entry).seed = store.seed;
                self.link(positions, block.entry, under, *local);
            }
            under = block.entry;
        }
        let dormant = if self.is_placed(under) { 0 } else { plan.len() as u32 };
        StoreOutcome { stored: plan.len() as u32, already, dormant, ..StoreOutcome::default() }
    }

    /// A group's place in a tier. Nothing is held any more if it is new: no block has a reference of it.
    fn announce(&mut self, positions: &mut Positions, tier: Tier, group: GroupId) -> u8 {
        let state = &mut self.tiers[tier.index()];
        if let Some(at) = state.groups.iter().position(|known| *known == group) {
            return at as u8;
        }
        state.groups.push(group);
        let at = state.groups.len() as u8 - 1;
        if state.held > 0 {
            self.now += 1;
            self.retire(positions, tier);
        }
        at
    }

    /// Gives up the lane of a tier, and with it at once everything the tier holds.
    fn retire(&mut self, positions: &mut Positions, tier: Tier) {
        let state = &mut self.tiers[tier.index()];
        state.lane_at = self.now;
        if state.held > 0 {
            state.held = 0;
            let lane = std::mem::replace(&mut state.lane, Lane::NONE);
            positions.retire_lane(lane);
            self.retired.push(lane);
        }
        self.want_sweep();
    }

    fn want_sweep(&mut self) {
        if self.cursor.is_some() {
            self.sweep_again = true;
        } else {
            self.cursor = Some(ROOT + 1);
            self.sweeping = std::mem::take(&mut self.retired);
        }
    }

    /// One reference more; returns whether there had been one of this tier and group.
    fn add_reference(&mut self, positions: &mut Positions, at: u32, tier: Tier, group: u8) -> bool {
        let (bit, batch, now) = (1 << tier.index(), self.batch, self.now);
        // Announcing the group may have voided what was held since the entry was settled.
        let held = self.held_of(at);
        let entry = self.entry_mut(at);
        (entry.held, entry.stamp) = (held, now);
        let already = self.entry_mut(at).references.add(tier, group, batch);
        let state = &mut self.tiers[tier.index()];
        state.references += 1;
        if already {
            return true;
        }
        let tiers = self.entry(at).tiers | bit;
        self.set_tiers(at, tiers);
        let entry = self.entry(at);
        let groups = entry.references.iter().filter(|reference| reference.tier == tier).count();
        if groups == self.tiers[tier.index()].groups.len() {
            self.hold(positions, at, tier);
        }
        false
    }

    fn hold(&mut self, positions: &mut Positions, at: u32, tier: Tier) {
        let slot = self.slot;
        let state = &mut self.tiers[tier.index()];
        if !state.lane.is_some() {
            state.lane = positions.give_lane(slot, tier);
        }
        state.held += 1;
        let lane = state.lane;
        self.entry_mut(at).held |= 1 << tier.index();
        if self.is_placed(at) {
            positions.hold(self.entry(at).node, lane);
        }
    }

    /// Takes one reference; `false` if there is none to take.
    pub(super) fn remove(
        &mut self,
        positions: &mut Positions,
        limits: &ShardLimits,
        tier: Tier,
        group: GroupId,
        hash: EngineHash,
    ) -> bool {
        let Some(at) = self.settle(positions, limits, hash) else { return false };
        let state = &mut self.tiers[tier.index()];
        let Some(group) = state.groups.iter().position(|known| *known == group) else { return false };
        let Some(left) = self.entries[at as usize].references.take(tier, group as u8) else { return false };
        state.references -= 1;
        if left > 0 {
            return true;
        }
        let (bit, lane) = (1 << tier.index(), state.lane);
        if self.entry(at).held & bit != 0 {
            self.tiers[tier.index()].held -= 1;
            self.entry_mut(at).held &= !bit;
            if self.is_placed(at) {
                positions.drop_hold(self.entry(at).node, lane);
            }
        }
        if self.entry(at).references.iter().all(|reference| reference.tier != tier) {
            let tiers = self.entry(at).tiers & !bit;
            self.set_tiers(at, tiers);
            if tiers == 0 {
                self.unbind(positions, at, limits.dormant_blocks_max as u64);
            }
        }
        true
    }

    /// Empties one tier, as if it had never been used.
    pub(super) fn clear_tier(&mut self, positions: &mut Positions, tier: Tier) {
        let state = &mut self.tiers[tier.index()];
        state.groups.clear();
        if state.references == 0 {
            return;
        }
        state.references = 0;
        self.now += 1;
        state.cleared_at = self.now;
        let bit = 1 << tier.index();
        for by_tiers in &mut self.population {
            for tiers in (0..by_tiers.len()).filter(|tiers| tiers & bit != 0) {
                by_tiers[tiers & !bit] += std::mem::take(&mut by_tiers[tiers]);
            }
        }
        self.retire(positions, tier);
    }

    /// Settles up to `budget` entries; returns how many it looked at.
    pub(super) fn sweep(&mut self, positions: &mut Positions, limits: &ShardLimits, budget: usize) -> usize {
        let mut looked_at = 0;
        while let Some(at) = self.cursor.filter(|_| looked_at < budget) {
            if at as usize >= self.entries.len() {
                self.sweeping.drain(..).for_each(|lane| positions.free_lane(lane));
                self.cursor = None;
                if std::mem::take(&mut self.sweep_again) {
                    self.want_sweep();
                }
                continue;
            }
            looked_at += 1;
            self.cursor = Some(at + 1);
            if !self.entry(at).used {
                continue;
            }
            if self.is_placed(at) {
                let node = self.entry(at).node;
                self.sweeping.iter().for_each(|lane| positions.drop_hold(node, *lane));
            }
            self.settle_entry(positions, limits, at);
        }
        looked_at
    }

    /// The seed that a child of `hash` takes.
    pub(super) fn seed_of(&self, hash: EngineHash) -> Option<Seed> {
        let at = self.find(hash)?;
        let known = self.is_bound(at) || self.entry(at).first_child != NONE;
        known.then(|| self.entry(at).seed)
    }

    /// The worker's figures.
    pub(super) fn figures(&self) -> WorkerBlocks {
        WorkerBlocks {
            bound: self.bound(),
            by_tier: std::array::from_fn(|tier| self.tiers[tier].held),
            references: std::array::from_fn(|tier| self.tiers[tier].references),
            dormant: self.dormant(),
        }
    }

    /// Hashes that are remembered, bound or not.
    #[cfg(test)]
    pub(super) fn hashes_len(&self) -> usize {
        self.by_hash.len()
    }
}
