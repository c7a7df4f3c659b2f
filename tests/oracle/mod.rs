//! The index contract as a plain model: slow and obvious. It keeps ordered maps and computes every answer anew. The
//! other files are for all tests of the index: events as values, seeded streams, a shard checked against its models,
//! and the report of a failure.
#![allow(dead_code, reason = "every test file uses a part of it")]

pub(crate) mod checked_shard;
pub(crate) mod event;
pub(crate) mod minimise;
pub(crate) mod prompts;
pub(crate) mod seeds;
pub(crate) mod stream;

use kvrouted::ids::{EngineHash, GroupId, LocalHash, Tier, TierBlocks};
use kvrouted::index::{Binding, Refusal, RemoveOutcome, ShardLimits, StoreBlocks, StoreOutcome, WorkerBlocks};
use kvrouted::limits::GROUPS_MAX;
use std::collections::{BTreeMap, BTreeSet};

/// One worker. Workers share nothing, so a fleet is a map of these.
#[derive(Clone, Debug, Default)]
pub(crate) struct Oracle {
    pub(crate) bindings: BTreeMap<EngineHash, Binding>,
    /// The bound hashes after each parent, by content: `bindings` the other way round.
    pub(crate) children: BTreeSet<(Option<EngineHash>, LocalHash, EngineHash)>,
    /// The number of references, and the batch that made the first of them.
    pub(crate) counts: BTreeMap<(EngineHash, Tier, GroupId), (u32, u64)>,
    pub(crate) announced: BTreeSet<(Tier, GroupId)>,
    pub(crate) batch: u64,
    /// Groups of the device tier that serve sliding windows.
    pub(crate) windows: BTreeSet<GroupId>,
    /// The number of last blocks of a prompt that each window must have.
    pub(crate) window_blocks: u32,
}

impl Oracle {
    pub(crate) fn begin_batch(&mut self) {
        self.batch += 1;
    }

    /// The `(hash, binding)` pairs of a store: each block is the parent of the next.
    pub(crate) fn chain(store: &StoreBlocks<'_>) -> Vec<(EngineHash, Binding)> {
        let parents = std::iter::once(store.parent).chain(store.hashes.iter().map(|hash| Some(*hash)));
        let blocks = store.hashes.iter().zip(store.locals).zip(parents);
        blocks.map(|((hash, local), parent)| (*hash, Binding { parent, local: *local, seed: store.seed })).collect()
    }

    fn refusal(&self, limits: &ShardLimits, store: &StoreBlocks<'_>) -> Option<Refusal> {
        let chain = Self::chain(store);
        let distinct: BTreeSet<EngineHash> = store.hashes.iter().copied().collect();
        if store.parent.is_some_and(|parent| distinct.contains(&parent)) {
            return Some(Refusal::SelfParent);
        }
        let conflict = |(hash, binding): &(EngineHash, Binding)| self.bindings.get(hash).is_some_and(|b| b != binding);
        if distinct.len() < chain.len() || chain.iter().any(conflict) {
            return Some(Refusal::HashConflict);
        }
        if self.ambiguous(limits, store) {
            return None;
        }
        let groups = self.announced.iter().filter(|(tier, _)| *tier == store.tier).count();
        let is_known = self.is_window(store.tier, store.group) || self.announced.contains(&(store.tier, store.group));
        if groups >= GROUPS_MAX && !is_known {
            return Some(Refusal::TooManyGroups);
        }
        let new = chain.iter().filter(|(hash, _)| !self.bindings.contains_key(hash));
        if (self.bindings.len() + new.clone().count()) as u64 > limits.worker_blocks_max {
            return Some(Refusal::CapacityBound);
        }
        let names = |binding: &Binding| self.named(binding.parent, binding.local).count();
        new.clone().any(|(_, binding)| names(binding) >= limits.aliases_max).then_some(Refusal::AliasBound)
    }

    /// The bound hashes of one content after one parent.
    fn named(&self, parent: Option<EngineHash>, local: LocalHash) -> impl Iterator<Item = EngineHash> {
        let all = (parent, local, EngineHash(0))..=(parent, local, EngineHash(u64::MAX));
        self.children.range(all).map(|(_, _, hash)| *hash)
    }

    fn ambiguous(&self, limits: &ShardLimits, store: &StoreBlocks<'_>) -> bool {
        if limits.counts_copies {
            return false;
        }
        let before = |hash: &EngineHash| self.counts.get(&(*hash, store.tier, store.group));
        let before = |hash: &EngineHash| before(hash).is_some_and(|(_, since)| *since != self.batch);
        store.parent.is_none() && !store.hashes.is_empty() && store.hashes.iter().all(before)
    }

    /// Applies a store. The outcome's `dormant` is left at 0.
    pub(crate) fn store(&mut self, limits: &ShardLimits, store: &StoreBlocks<'_>) -> StoreOutcome {
        if store.hashes.len() != store.locals.len() {
            return StoreOutcome { refused: Some(Refusal::LengthMismatch), ..StoreOutcome::default() };
        }
        let blocks = store.hashes.len() as u32;
        let refused = self.refusal(limits, store);
        if refused.is_some() || blocks == 0 {
            return StoreOutcome { refused, ..StoreOutcome::default() };
        }
        if self.ambiguous(limits, store) {
            return StoreOutcome { ambiguous: true, already: blocks, ..StoreOutcome::default() };
        }
        let mut already = 0;
        if !self.is_window(store.tier, store.group) {
            self.announced.insert((store.tier, store.group));
        }
        for (hash, binding) in Self::chain(store) {
            self.bindings.insert(hash, binding);
            self.children.insert((binding.parent, binding.local, hash));
            let count = self.counts.entry((hash, store.tier, store.group)).or_insert((0, self.batch));
            already += u32::from(count.0 > 0);
            count.0 += 1;
        }
        StoreOutcome { stored: blocks, already, ..StoreOutcome::default() }
    }

    pub(crate) fn remove(&mut self, tier: Tier, group: GroupId, hashes: &[EngineHash]) -> RemoveOutcome {
        let mut outcome = RemoveOutcome::default();
        for hash in hashes {
            match self.counts.get_mut(&(*hash, tier, group)) {
                Some((count, _)) => {
                    *count -= 1;
                    outcome.removed += 1;
                    if *count == 0 {
                        self.counts.remove(&(*hash, tier, group));
                        self.forget_if_unreferenced(*hash);
                    }
                }
                None => outcome.unknown += 1,
            }
        }
        outcome
    }

    pub(crate) fn clear(&mut self, tier: Option<Tier>) {
        let stays = |of: Tier| tier.is_some_and(|tier| tier != of);
        if !stays(Tier::Device) {
            self.windows.clear();
            self.window_blocks = 0;
        }
        self.announced.retain(|(tier, _)| stays(*tier));
        self.counts.retain(|(_, tier, _), _| stays(*tier));
        for hash in self.bindings.keys().copied().collect::<Vec<_>>() {
            self.forget_if_unreferenced(hash);
        }
    }

    fn forget_if_unreferenced(&mut self, hash: EngineHash) {
        let of_hash = (hash, Tier::Device, GroupId(0))..=(hash, Tier::External, GroupId(u32::MAX));
        if self.counts.range(of_hash).next().is_some() {
            return;
        }
        if let Some(binding) = self.bindings.remove(&hash) {
            self.children.remove(&(binding.parent, binding.local, hash));
        }
    }

    pub(crate) fn holds(&self, hash: EngineHash, tier: Tier) -> bool {
        let mut groups = self.announced.range((tier, GroupId(0))..=(tier, GroupId(u32::MAX))).peekable();
        groups.peek().is_some() && groups.all(|(_, group)| self.counts.contains_key(&(hash, tier, *group)))
    }

    fn is_window(&self, tier: Tier, group: GroupId) -> bool {
        tier == Tier::Device && self.windows.contains(&group)
    }

    /// A group of the device tier counts as a window from now on, unless it has counted for the tier itself.
    pub(crate) fn announce_window(&mut self, group: GroupId, window_blocks: u32) -> bool {
        let known = self.windows.contains(&group);
        let refused = self.announced.contains(&(Tier::Device, group)) || window_blocks == 0;
        if !known && (refused || self.windows.len() >= GROUPS_MAX) {
            return false;
        }
        self.windows.insert(group);
        self.window_blocks = self.window_blocks.max(window_blocks);
        true
    }

    /// The best `[device, host, disk, external]` over all chains for a query.
    pub(crate) fn depths(&self, query: &[LocalHash]) -> TierBlocks {
        self.depths_usable(query, usize::MAX)
    }

    /// The same with a bound on the blocks that can be used again, if the worker has windows.
    pub(crate) fn depths_usable(&self, query: &[LocalHash], usable_max: usize) -> TierBlocks {
        if !self.windows.is_empty() {
            return self.windowed_depths(query, usable_max);
        }
        let mut best = [0; 4];
        let mut open = vec![(None, query, Tier::Device, best)];
        while let Some((parent, rest, from, so_far)) = open.pop() {
            best = best.max(so_far);
            let Some((local, rest)) = rest.split_first() else { continue };
            for hash in self.named(parent, *local) {
                let held_by = Tier::ALL.into_iter().find(|tier| *tier >= from && self.holds(hash, *tier));
                let Some(tier) = held_by else { continue };
                let mut longer = so_far;
                longer[tier.index()] += 1;
                open.push((Some(hash), rest, tier, longer));
            }
        }
        let [device, host, disk, external] = best;
        TierBlocks { device, host, disk, external }
    }

    /// The best over all chains, each taken as the engine does: the tier itself from the root on, then shorter until
    /// every window has the last blocks.
    fn windowed_depths(&self, query: &[LocalHash], usable_max: usize) -> TierBlocks {
        let mut best = [0; 4];
        let mut open: Vec<Vec<EngineHash>> = vec![Vec::new()];
        while let Some(chain) = open.pop() {
            best = best.max(self.windowed_depths_of(&chain, usable_max));
            let Some(local) = query.get(chain.len()) else { continue };
            let next = self.named(chain.last().copied(), *local);
            open.extend(next.map(|hash| chain.iter().copied().chain([hash]).collect()));
        }
        let [device, host, disk, external] = best;
        TierBlocks { device, host, disk, external }
    }

    fn windowed_depths_of(&self, chain: &[EngineHash], usable_max: usize) -> [u32; 4] {
        let device = chain.iter().take_while(|hash| self.holds(**hash, Tier::Device)).count();
        let has_windows = |hash: &EngineHash| {
            self.windows.iter().all(|group| self.counts.contains_key(&(*hash, Tier::Device, *group)))
        };
        let is_usable = |end: &usize| {
            let from = end.saturating_sub(self.window_blocks as usize);
            chain[from..*end].iter().all(has_windows)
        };
        let mut at = (0..=device.min(usable_max)).rev().find(is_usable).expect("0 is usable");
        let mut depths = [at as u32, 0, 0, 0];
        if at < device {
            // No engine's rule says what a lower tier adds to a run that the windows cut back.
            return depths;
        }
        for tier in [Tier::Host, Tier::Disk, Tier::External] {
            let run = chain[at..].iter().take_while(|hash| self.holds(**hash, tier)).count();
            depths[tier.index()] = run as u32;
            at += run;
        }
        depths
    }

    /// The number of blocks that have a complete chain to the root.
    fn rooted(&self) -> u64 {
        let (mut rooted, mut open) = (0, vec![None]);
        while let Some(parent) = open.pop() {
            let first = (parent, LocalHash(0), EngineHash(0));
            let last = (parent, LocalHash(u64::MAX), EngineHash(u64::MAX));
            let before = open.len();
            open.extend(self.children.range(first..=last).map(|(_, _, hash)| Some(*hash)));
            rooted += (open.len() - before) as u64;
        }
        rooted
    }

    /// The figures; `dormant` is every block that has no complete chain.
    pub(crate) fn held(&self) -> WorkerBlocks {
        let by_tier = |of: Tier| self.bindings.keys().filter(|hash| self.holds(**hash, of)).count() as u64;
        let references = |of: Tier| -> u64 {
            let counts =
                self.counts.iter().filter(|((_, tier, group), _)| *tier == of && !self.is_window(*tier, *group));
            counts.map(|(_, (count, _))| u64::from(*count)).sum()
        };
        WorkerBlocks {
            bound: self.bindings.len() as u64,
            by_tier: Tier::ALL.map(by_tier),
            references: Tier::ALL.map(references),
            dormant: self.bindings.len() as u64 - self.rooted(),
        }
    }
}
