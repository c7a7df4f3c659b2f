//! The index contract as a plain model: slow and obvious. Everything is looked up in ordered maps and
//! recomputed for every question.
#![allow(dead_code, reason = "every test file uses a part of it")]

use kvrouted::ids::{EngineHash, GroupId, LocalHash, Seed, Tier, TierBlocks};
use kvrouted::index::{Refusal, RemoveOutcome, ShardLimits, StoreBlocks, StoreOutcome, WorkerBlocks};
use kvrouted::limits::GROUPS_MAX;
use std::collections::{BTreeMap, BTreeSet};

/// To what an engine hash is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Binding {
    pub(crate) parent: Option<EngineHash>,
    pub(crate) local: LocalHash,
    pub(crate) seed: Seed,
}

/// One worker. Workers share nothing, so a fleet is a map of these.
#[derive(Clone, Debug, Default)]
pub(crate) struct Oracle {
    pub(crate) bindings: BTreeMap<EngineHash, Binding>,
    /// References: how many, and the batch in which there was none before.
    pub(crate) counts: BTreeMap<(EngineHash, Tier, GroupId), (u32, u64)>,
    pub(crate) announced: BTreeSet<(Tier, GroupId)>,
    pub(crate) batch: u64,
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
        if self.ambiguous(store) {
            return None;
        }
        let groups = self.announced.iter().filter(|(tier, _)| *tier == store.tier).count();
        if groups >= GROUPS_MAX && !self.announced.contains(&(store.tier, store.group)) {
            return Some(Refusal::TooManyGroups);
        }
        let new = chain.iter().filter(|(hash, _)| !self.bindings.contains_key(hash));
        if (self.bindings.len() + new.clone().count()) as u64 > limits.worker_blocks_max {
            return Some(Refusal::CapacityBound);
        }
        let names = |b: &Binding| self.bindings.values().filter(|o| o.parent == b.parent && o.local == b.local).count();
        new.clone().any(|(_, binding)| names(binding) >= limits.aliases_max).then_some(Refusal::AliasBound)
    }

    fn ambiguous(&self, store: &StoreBlocks<'_>) -> bool {
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
        if self.ambiguous(store) {
            return StoreOutcome { ambiguous: true, already: blocks, ..StoreOutcome::default() };
        }
        let mut already = 0;
        self.announced.insert((store.tier, store.group));
        for (hash, binding) in Self::chain(store) {
            self.bindings.insert(hash, binding);
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
                }
                None => outcome.unknown += 1,
            }
            self.forget_unreferenced();
        }
        outcome
    }

    pub(crate) fn clear(&mut self, tier: Option<Tier>) {
        let kept = |of: Tier| tier.is_some_and(|tier| tier != of);
        self.announced.retain(|(tier, _)| kept(*tier));
        self.counts.retain(|(_, tier, _), _| kept(*tier));
        self.forget_unreferenced();
    }

    fn forget_unreferenced(&mut self) {
        self.counts.retain(|_, (count, _)| *count > 0);
        let counts = &self.counts;
        self.bindings.retain(|hash, _| counts.keys().any(|(of, _, _)| of == hash));
    }

    pub(crate) fn holds(&self, hash: EngineHash, tier: Tier) -> bool {
        let groups: Vec<GroupId> = self.announced.iter().filter(|(of, _)| *of == tier).map(|(_, g)| *g).collect();
        !groups.is_empty() && groups.iter().all(|group| self.counts.contains_key(&(hash, tier, *group)))
    }

    /// The best `[device, host, disk, external]` over all chains for a query.
    pub(crate) fn depths(&self, query: &[LocalHash]) -> TierBlocks {
        let [device, host, disk, external] = self.extend(None, query, Tier::Device, [0; 4]);
        TierBlocks { device, host, disk, external }
    }

    fn extend(&self, parent: Option<EngineHash>, query: &[LocalHash], from: Tier, so_far: [u32; 4]) -> [u32; 4] {
        let Some((local, rest)) = query.split_first() else { return so_far };
        let children = self.bindings.iter().filter(|(_, b)| b.parent == parent && b.local == *local);
        let held = children.filter_map(|(hash, _)| {
            let tier = Tier::ALL.into_iter().find(|tier| *tier >= from && self.holds(*hash, *tier))?;
            let mut longer = so_far;
            longer[tier.index()] += 1;
            Some(self.extend(Some(*hash), rest, tier, longer))
        });
        held.chain([so_far]).max().unwrap_or(so_far)
    }

    /// Whether every parent up to the root is bound.
    pub(crate) fn is_rooted(&self, hash: EngineHash) -> bool {
        let mut at = Some(hash);
        for _ in 0..=self.bindings.len() {
            match at.map(|hash| self.bindings.get(&hash)) {
                None => return true,
                Some(None) => return false,
                Some(Some(binding)) => at = binding.parent,
            }
        }
        false
    }

    /// The figures; `dormant` is every block that has no complete chain.
    pub(crate) fn held(&self) -> WorkerBlocks {
        let by_tier = |of: Tier| self.bindings.keys().filter(|hash| self.holds(**hash, of)).count() as u64;
        let references = |of: Tier| -> u64 {
            let counts = self.counts.iter().filter(|((_, tier, _), _)| *tier == of);
            counts.map(|(_, (count, _))| u64::from(*count)).sum()
        };
        WorkerBlocks {
            bound: self.bindings.len() as u64,
            by_tier: Tier::ALL.map(by_tier),
            references: Tier::ALL.map(references),
            dormant: self.bindings.keys().filter(|hash| !self.is_rooted(**hash)).count() as u64,
        }
    }
}
