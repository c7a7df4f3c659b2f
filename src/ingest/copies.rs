//! Second copies of a block: how they are distinguished from full reports, and from engines that announce only the
//! removal of the last copy.
//!
//! vLLM announces a block once for each physical block that comes to hold it, and announces a removal for each of these
//! when it is used for something else. A request that may not read the cache (`prompt_logprobs`, some pooling) computes
//! its whole prompt again. Then a chain is announced from its root although it is held: a second copy.
//!
//! # Full reports
//!
//! For a request with `kv_cache_report_mode = "full"` the engine sends the same event for the blocks that it found in
//! the cache, and announces no removal for them. The two events are equal byte for byte. So copies are counted only if
//! the space's configuration says that no caller can ask for full reports. A store that cannot be a copy shows that the
//! configuration is wrong:
//!
//! | sign | why a copy does not look so |
//! |---|---|
//! | more references on the device than it has blocks | each copy takes a block |
//! | behind the repeated chain, in its batch, blocks that were not held, and less than half of the chain evicted for it | a request stores all its full blocks of a step in one event, but reports what it found before it stores the rest. The first token that a copy generates may fill a block in the same batch (vLLM schedules a step ahead); the blocks of that copy were evicted before |
//! | more than [`REPORT_FREE_BLOCKS_MAX`] blocks repeated, and none evicted before in the batch, by an engine without windows that has evicted since its last clear | such an engine has no other free blocks than the unfilled ones of requests that have ended, which it uses first. Window groups free blocks that were never announced: those that the window has left behind |
//!
//! Two cases stay unnoticed: reports of fewer blocks, in total, than the device has blocks that are in use and not
//! full, which is about one for each running request; and, if `capacity_blocks` is not known, reports that come before
//! the first eviction and are followed by no new block.
//!
//! # Removals of the last copy
//!
//! vLLM up to 0.33 announces the removal of each copy, so references are counted. An engine that announces one removal
//! for all copies of a block leaves references in the index that no event removes: blocks would count that it no longer
//! holds. No field of an event distinguishes the two kinds of engine, but what such an engine does later does:
//!
//! | sign, after a removal that left references of a block | why an engine that announces each removal does not do so |
//! |---|---|
//! | a request that found the block before it computes the block again, and more behind it | it would have found the copy that is left; alone, the block may be the last of a prompt of whole blocks, which is always computed |
//! | more references on the device than it has blocks | each copy takes a block |
//!
//! The first sign counts only if every event was counted, for a group of main attention in a worker without windows,
//! and for blocks behind the first of a chain. A block that outlives the block before it is not a sign: that depends on
//! the order in which an engine evicts. Until a sign comes, the overlap is too high by the block that such a removal
//! leaves and by the blocks that were held behind it. After a sign, a removal takes all references of a block. If such
//! a block is removed once more, the sign was wrong: copies are counted again, and trust is lower until the worker's
//! cache is cleared.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::space_shard::SpaceShard;
use super::stream::{Now, Stream};
use crate::event::Removed;
use crate::event::worker_trust::Flaw;
use crate::ids::{EngineHash, Tier};
use crate::index::{StoreBlocks, StoreOutcome};
use crate::limits::{COPIES_LEFT_MAX, COPIES_LEFT_OF_ONE_MAX, REPORT_FREE_BLOCKS_MAX};
use crate::metrics::WorkerCounter;

/// The facts about a worker's device memory that distinguish copies from reports.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// Repeated chains were counted since the device was last empty.
    pub(super) has_counted: bool,
    /// Blocks were removed since the device was last empty: at that moment no unused block was free.
    has_evicted: bool,
    /// Blocks were removed in this batch.
    evicts: bool,
    /// Blocks that were removed in this batch and that no store has taken since.
    evicted_unused: usize,
    /// The last blocks of the chains repeated in this batch for which too little was evicted. In order, so that no
    /// choice of hashes makes a search slow.
    repeated: BTreeSet<EngineHash>,
}

impl Copies {
    /// Begins a batch.
    pub(super) fn begin_batch(&mut self) {
        (self.evicts, self.evicted_unused) = (false, 0);
        self.repeated.clear();
    }

    /// Notes a removal of references in device memory.
    pub(super) const fn removed(&mut self, references: u32) {
        (self.has_evicted, self.evicts) = (true, true);
        self.evicted_unused += references as usize;
    }

    /// Notes a store of references in device memory, which takes blocks.
    pub(super) const fn placed(&mut self, references: u32) {
        self.evicted_unused = self.evicted_unused.saturating_sub(references as usize);
    }

    /// Notes that the device is empty.
    pub(super) fn cleared(&mut self) {
        *self = Self::default();
    }

    /// Notes a counted store in device memory. Returns whether it shows a full report.
    pub(super) fn stored(&mut self, blocks: &StoreBlocks<'_>, outcome: &StoreOutcome, has_windows: bool) -> bool {
        let is_evicted_for = 2 * self.evicted_unused >= blocks.hashes.len();
        self.placed(outcome.stored);
        if is_repeated(blocks, outcome) {
            self.has_counted = true;
            self.repeated.extend(blocks.hashes.last().copied().filter(|_| !is_evicted_for));
            let needs_evictions = self.has_evicted && !has_windows;
            return needs_evictions && !self.evicts && blocks.hashes.len() > REPORT_FREE_BLOCKS_MAX;
        }
        outcome.already == 0 && blocks.parent.is_some_and(|parent| self.repeated.contains(&parent))
    }
}

/// Whether a counted store repeats at least some blocks that the device held already. If the engine may hold more than
/// is counted here, the store may be a report that is the first to name the other blocks.
pub(super) fn repeats(blocks: &StoreBlocks<'_>, outcome: &StoreOutcome) -> bool {
    outcome.stored > 0 && outcome.already > 0 && blocks.parent.is_none() && blocks.tier == Tier::Device
}

/// Whether a counted store repeats only blocks that the device held already. If copies are not counted, the index
/// ignores a chain that was held before the batch, but not one whose first reference is of the same batch: one request
/// may store its prompt, and another request of the same step may report it. Tiers below the device are left out,
/// because connectors need every announcement counted.
pub(super) fn is_repeated(blocks: &StoreBlocks<'_>, outcome: &StoreOutcome) -> bool {
    repeats(blocks, outcome) && outcome.already == outcome.stored
}

/// Blocks, each with the block before it.
type Behind = SmallVec<[(EngineHash, Option<EngineHash>); 4]>;

/// The facts about removals that left references.
#[derive(Debug, Default)]
pub(super) struct LastCopies {
    /// Blocks of which a removal left references, keyed by the block before them.
    left: FxHashMap<EngineHash, SmallVec<[EngineHash; 2]>>,
    /// A removal left references since the device was last empty.
    has_left: bool,
    /// A removal of this engine takes all references of a block.
    pub(super) for_all: bool,
}

impl LastCopies {
    /// Notes that the device is empty.
    pub(super) fn cleared(&mut self) {
        *self = Self { for_all: self.for_all, ..Self::default() };
    }

    fn leaves(&mut self, block: EngineHash, before: Option<EngineHash>) {
        self.has_left = true;
        let Some(before) = before else { return };
        if self.left.len() >= COPIES_LEFT_MAX && !self.left.contains_key(&before) {
            return;
        }
        let left = self.left.entry(before).or_default();
        if left.len() < COPIES_LEFT_OF_ONE_MAX && !left.contains(&block) {
            left.push(block);
        }
    }
}

impl Stream {
    /// The blocks of a removal that have several references, so that the removal may leave some.
    pub(super) fn copied_before(&self, space: &SpaceShard, removed: &Removed<'_>, tier: Tier) -> Behind {
        if tier != Tier::Device || !space.writer.has_copies(self.slot) || !self.can_tell_last_copies() {
            return Behind::new();
        }
        let is_copied = |hash: &&EngineHash| self.device_references(space, removed, **hash) > 1;
        let before = |hash: EngineHash| space.writer.binding_of(self.slot, hash).and_then(|binding| binding.parent);
        removed.hashes.iter().filter(is_copied).map(|hash| (*hash, before(*hash))).collect()
    }

    /// Notes the references that an applied removal left. `copied` is the result of [`Stream::copied_before`] for it.
    pub(super) fn note_left_copies(&mut self, space: &SpaceShard, removed: &Removed<'_>, copied: &Behind) {
        for (block, before) in copied {
            if self.device_references(space, removed, *block) > 0 {
                self.last_copies.leaves(*block, *before);
            }
        }
        if self.last_copies.left.is_empty() {
            return;
        }
        for hash in removed.hashes {
            if self.device_references(space, removed, *hash) == 0 {
                // A request that computes the blocks behind it computes it too.
                self.last_copies.left.remove(hash);
            }
        }
    }

    fn device_references(&self, space: &SpaceShard, removed: &Removed<'_>, hash: EngineHash) -> u64 {
        space.writer.references_to(self.slot, Tier::Device, removed.group, hash)
    }

    /// Whether a store in device memory shows that an earlier removal spoke of more references than it took here.
    pub(super) fn computes_left_copy(&self, space: &SpaceShard, store: &StoreBlocks<'_>) -> bool {
        let (Some(before), [first, second, ..]) = (store.parent, store.hashes) else { return false };
        let is_left = |left: &SmallVec<[EngineHash; 2]>| left.contains(first);
        if store.tier != Tier::Device || !self.last_copies.left.get(&before).is_some_and(is_left) {
            return false;
        }
        let references = |hash: EngineHash| space.writer.references_to(self.slot, store.tier, store.group, hash);
        // The request found the block before it, because that has one copy only, and is the first to store the second
        // one.
        self.can_tell_last_copies() && references(before) == 1 && references(*first) > 0 && references(*second) == 0
    }

    /// Whether removals have left references, which may explain more references than the device has blocks.
    pub(super) const fn has_left_copies(&self) -> bool {
        self.last_copies.has_left
    }

    fn can_tell_last_copies(&self) -> bool {
        !self.last_copies.for_all && !self.kv_groups.has_windows() && !self.may_miss_blocks()
    }

    /// From now on a removal takes all references of a block. The references counted so far cannot be trusted, so the
    /// worker is emptied.
    pub(super) fn removals_are_for_all(&mut self, space: &mut SpaceShard, now: Now) {
        self.last_copies.for_all = true;
        self.count(WorkerCounter::LastCopyRemovals, 1);
        self.empty_because(space, Flaw::LastCopyRemovals, now);
    }

    /// Checks for a second removal of a block, which shows that the engine announces each removal after all. Blocks
    /// that it still has copies of may have been dropped here.
    pub(super) fn check_removals_for_all(&mut self, unknown: u32, now: Now) {
        if unknown > 0 && self.last_copies.for_all && !self.may_miss_blocks() {
            self.last_copies.for_all = false;
            self.lower_trust(Flaw::LastCopyRemovals, now);
        }
    }

    /// Takes back all references but one to each block of a counted store.
    pub(super) fn take_back_copies(&mut self, space: &mut SpaceShard, store: &StoreBlocks<'_>) {
        let StoreBlocks { tier, group, .. } = *store;
        let is_copied = |hash: &&EngineHash| space.writer.references_to(self.slot, tier, group, **hash) > 1;
        let copied: Vec<EngineHash> = store.hashes.iter().filter(is_copied).copied().collect();
        if !copied.is_empty() {
            space.writer.remove(self.slot, tier, group, &copied);
            self.republish(|republisher| republisher.removed(tier, group, &copied));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{GroupId, LocalHash, Seed};

    #[test]
    fn a_batch_of_very_many_repeated_chains_takes_a_time_by_its_length() {
        // A search of a list, for each of them, would take minutes.
        let chains = 100_000;
        let mut copies = Copies::default();
        let mut store = |parent: Option<u64>, hash: u64, already: u32| {
            let hashes = &[EngineHash(hash)];
            let (locals, tier, group, seed) = (&[LocalHash(1)], Tier::Device, GroupId(0), Seed(0));
            let blocks = StoreBlocks { parent: parent.map(EngineHash), hashes, locals, tier, group, seed };
            copies.stored(&blocks, &StoreOutcome { stored: 1, already, ..StoreOutcome::default() }, false)
        };
        assert!((0..chains).all(|hash| !store(None, hash, 1)));
        assert!((0..chains).all(|at| !store(Some(chains + at), 2 * chains + at, 0)));
        assert!(store(Some(chains / 2), 0, 0), "new blocks behind a repeated chain");
        copies.begin_batch();
        assert!(copies.repeated.is_empty());
    }
}
