//! A plain model of an engine that believes everything: an upper bound of the blocks that may count.
//!
//! Every store counts, under every seed that it could mean. A hash keeps every content that a store gave it while
//! anything refers to the hash. Removals take what is there. The index refuses doubtful events, so it may hold less
//! than this model and never more.
//!
//! A connector's store has hashes alone. Its references wait until another store gives the hash a meaning.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use kvrouted::event::{BatchInfo, Content, EventBatch, KvEvent, Medium, Salt, Stored};
use kvrouted::hash;
use kvrouted::ids::{EngineHash, GroupId, LocalHash, Scheme, Seed, Tier, Window};

/// One thing that a hash was said to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Meaning {
    parent: Option<EngineHash>,
    local: LocalHash,
    seed: Seed,
}

/// The blocks of one engine.
#[derive(Debug, Default)]
pub(crate) struct Engine {
    references: BTreeMap<(EngineHash, Tier, GroupId), u64>,
    /// References of connectors to hashes without a meaning.
    waiting: BTreeMap<(EngineHash, Tier, GroupId), u64>,
    meanings: BTreeMap<EngineHash, BTreeSet<Meaning>>,
}

impl Engine {
    pub(crate) fn apply(&mut self, batch: &EventBatch) {
        for event in batch.events() {
            match event {
                KvEvent::Stored(stored) => match stored.medium {
                    Medium::Tier(tier) => self.store(batch.info(), &stored, tier),
                    Medium::Offloaded(tier) => self.offload(&stored, tier),
                    Medium::NeverRemoved | Medium::Unknown | Medium::Remote => {}
                },
                KvEvent::Removed(removed) => match removed.medium {
                    Medium::Tier(tier) | Medium::Offloaded(tier) => {
                        removed.hashes.iter().for_each(|hash| self.remove(*hash, tier, removed.group));
                    }
                    Medium::NeverRemoved | Medium::Unknown | Medium::Remote => {}
                },
                KvEvent::Cleared(cleared) => {
                    self.references.retain(|(_, tier, _), _| cleared.tier.is_some_and(|of| of != *tier));
                    self.waiting.retain(|(_, tier, _), _| cleared.tier.is_some_and(|of| of != *tier));
                    self.forget_unreferenced();
                }
            }
        }
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    fn store(&mut self, info: &BatchInfo, stored: &Stored<'_>, tier: Tier) {
        for seed in self.seeds(stored) {
            let locals = locals_of(info, stored, seed);
            let mut parent = stored.parent;
            for (hash, local) in stored.hashes.iter().zip(locals) {
                self.meanings.entry(*hash).or_default().insert(Meaning { parent, local, seed });
                parent = Some(*hash);
            }
        }
        for hash in stored.hashes {
            *self.references.entry((*hash, tier, stored.group)).or_default() += 1;
            self.count_waiting(*hash);
        }
    }

    /// Counts what a connector says of hashes that have a meaning; the others wait.
    fn offload(&mut self, stored: &Stored<'_>, tier: Tier) {
        for hash in stored.hashes {
            let of = if self.meanings.contains_key(hash) { &mut self.references } else { &mut self.waiting };
            *of.entry((*hash, tier, stored.group)).or_default() += 1;
        }
    }

    /// Counts what waits for a hash to have a meaning, if it has one.
    fn count_waiting(&mut self, hash: EngineHash) {
        if !self.meanings.contains_key(&hash) {
            return;
        }
        let waiting: Vec<_> = self.waiting.extract_if(all_of(hash), |_, _| true).collect();
        for (of, count) in waiting {
            *self.references.entry(of).or_default() += count;
        }
    }

    /// Every seed that could be meant: what the event says, and what its parent has.
    fn seeds(&self, stored: &Stored<'_>) -> BTreeSet<Seed> {
        let said = match stored.salt {
            Salt::Of(salt) => hash::seed(stored.lora, Some(salt)),
            Salt::Seed(seed) => seed,
            Salt::Inherited | Salt::Unknown => hash::seed(stored.lora, None),
        };
        let parents = stored.parent.and_then(|parent| self.meanings.get(&parent)).into_iter().flatten();
        parents.map(|meaning| meaning.seed).chain([said]).collect()
    }

    fn remove(&mut self, hash: EngineHash, tier: Tier, group: GroupId) {
        if let Some(count) = self.references.get_mut(&(hash, tier, group)) {
            *count -= 1;
            if *count == 0 {
                self.references.remove(&(hash, tier, group));
                self.forget_unreferenced();
            }
            return;
        }
        if let Some(count) = self.waiting.get_mut(&(hash, tier, group)) {
            *count -= 1;
            if *count == 0 {
                self.waiting.remove(&(hash, tier, group));
            }
        }
    }

    fn forget_unreferenced(&mut self) {
        let held: BTreeSet<EngineHash> = self.references.keys().map(|(hash, _, _)| *hash).collect();
        self.meanings.retain(|hash, _| held.contains(hash));
    }

    fn holds(&self, hash: EngineHash, tiers: &[Tier]) -> bool {
        self.references.range(all_of(hash)).any(|((_, tier, _), _)| tiers.contains(tier))
    }

    /// How many leading blocks of a prompt some chain of blocks in these tiers can have.
    pub(crate) fn depth(&self, prompt: &[LocalHash], tiers: &[Tier]) -> u32 {
        let mut ends: BTreeSet<Option<EngineHash>> = BTreeSet::from([None]);
        for (depth, local) in prompt.iter().enumerate() {
            let follows = |meaning: &Meaning| meaning.local == *local && ends.contains(&meaning.parent);
            let next = self.meanings.iter().filter(|(_, meanings)| meanings.iter().any(follows));
            let next: BTreeSet<_> =
                next.filter(|(hash, _)| self.holds(**hash, tiers)).map(|(hash, _)| Some(*hash)).collect();
            if next.is_empty() {
                return depth as u32;
            }
            ends = next;
        }
        prompt.len() as u32
    }

    /// Prompts worth asking for: chains from the root to any block, a few of them, not too long.
    pub(crate) fn prompts(&self, count_max: usize, blocks_max: usize) -> Vec<Vec<LocalHash>> {
        let mut prompts: Vec<Vec<LocalHash>> = Vec::new();
        let mut open: Vec<(Option<EngineHash>, Vec<LocalHash>)> = vec![(None, Vec::new())];
        while let Some((end, prompt)) = open.pop() {
            if prompts.len() >= count_max {
                break;
            }
            let follows = |meaning: &&Meaning| meaning.parent == end && prompt.len() < blocks_max;
            let next: BTreeSet<(EngineHash, LocalHash)> = self
                .meanings
                .iter()
                .flat_map(|(hash, meanings)| meanings.iter().filter(follows).map(|meaning| (*hash, meaning.local)))
                .collect();
            if next.is_empty() {
                prompts.push(prompt);
                continue;
            }
            let longer = |local| prompt.iter().copied().chain([local]).collect();
            open.extend(next.into_iter().take(count_max).map(|(hash, local)| (Some(hash), longer(local))));
        }
        prompts
    }

    /// References in a tier.
    pub(crate) fn references(&self, of: Tier) -> u64 {
        self.references.iter().filter(|((_, tier, _), _)| *tier == of).map(|(_, count)| *count).sum()
    }

    /// Blocks that anything refers to.
    pub(crate) fn blocks(&self) -> u64 {
        self.references.keys().map(|(hash, _, _)| *hash).collect::<BTreeSet<_>>().len() as u64
    }
}

/// The keys of all references to a block.
fn all_of(hash: EngineHash) -> RangeInclusive<(EngineHash, Tier, GroupId)> {
    (hash, Tier::Device, GroupId(0))..=(hash, Tier::External, GroupId(u32::MAX))
}

fn locals_of(info: &BatchInfo, stored: &Stored<'_>, seed: Seed) -> Vec<LocalHash> {
    let mut locals = Vec::new();
    match stored.content {
        Content::Tokens { tokens, bigram } => {
            let window = if bigram { Window::Bigram } else { Window::Plain };
            let scheme = Scheme { block_size: stored.block_size, window };
            hash::local_hashes(scheme, seed, hash::token_bytes(tokens), stored.media, &mut locals);
        }
        Content::LocalHashes(hashed) => locals.extend(hashed),
        Content::Unusable => {}
    }
    debug_assert!(locals.is_empty() || locals.len() == stored.hashes.len(), "{info:?} {stored:?}");
    locals
}
