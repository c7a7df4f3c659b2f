//! Tiers below device memory: blocks that connectors announce by their hashes alone, and tiers that a clear leaves
//! unknown.
//!
//! A hash that the worker holds in some tier identifies its block. References to any other hash wait in [`Offloaded`]
//! until device memory defines the block, or until the references are removed.
//!
//! | event | the blocks | trust |
//! |---|---|---|
//! | a connector's store of a hash that is held in some tier | count there, as the held block | |
//! | a connector's store of any other hash | wait, bounded | offload_unbound |
//! | a store that defines a waiting hash | count there from then on | offload_unbound goes with the last |
//! | a removal | one reference goes, counted or waiting; a removal of any other block is unknown | lower_tiers_unknown |
//! | the first stores of a tier, by hash alone, in whose batch no chain's first block is: chunks may name only their last | count | lower_tiers_unknown |
//! | a connector's store of several blocks: a chunk, which is loaded whole or not at all | count | lookahead_hash |
//! | a store by hash alone of such a connector: only the last block of its chunk | counts | lower_tiers_unknown |
//! | a store that never announces removals | do not count | lower_tiers_unknown |
//! | an engine's clear, after a connector has announced a block | every tier is emptied, although the connector may still hold them | lower_tiers_unknown |
//! | a connector's first event, after a clear that removed reasons about missed events | count | lower_tiers_unknown |
//! | device memory binds a hash to another block than a lower tier did | the lower tier's references are bound to that block | hash_conflict |
//! | the same for the same hash once more | the lower tier's references are forgotten | lower_tiers_unknown |
//!
//! References are bound again once for each hash, because that takes the time of all of them: otherwise two small events,
//! repeated, would have all of a hash's references moved again and again.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::space_shard::SpaceShard;
use super::stream::{Now, Stream};
use crate::event::format::Format;
use crate::event::worker_trust::{Flaw, TrustInput};
use crate::event::{Cleared, Content, Medium, Removed, Stored};
use crate::ids::{EngineHash, GroupId, Tier};
use crate::index::{Binding, StoreBlocks};
use crate::limits::{OFFLOADED_PLACES_PER_HASH_MAX, OFFLOADED_UNBOUND_REFERENCES_MAX, REBOUND_HASHES_MAX};
use crate::metrics::WorkerCounter;

/// References of one tier and group to one block that is not known yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnboundReferences {
    pub(super) tier: Tier,
    pub(super) group: GroupId,
    pub(super) count: u32,
}

/// The announcements of one worker's connectors, in one incarnation of its engine.
#[derive(Debug, Default)]
pub(super) struct Offloaded {
    unbound: FxHashMap<EngineHash, SmallVec<[UnboundReferences; 1]>>,
    /// All references in `unbound`, each counted as often as it was announced.
    references: usize,
    /// References that waited were dropped: even when none waits any more, some are unknown.
    pub(super) are_lost: bool,
    /// A connector has announced a block.
    pub(super) has_connector: bool,
    /// The cache was cleared while events were missing: tiers that no connector had announced yet may hold older
    /// blocks.
    pub(super) may_hold_older: bool,
    /// How the connector announces the blocks of each tier.
    naming: [Naming; Tier::ALL.len()],
    /// Hashes whose references were bound to another block, since the worker last held none. In order, so that no choice
    /// of hashes makes a search slow.
    rebound: BTreeSet<EngineHash>,
}

/// How a connector announces the blocks of one tier. A connector that moves chunks of several blocks names each block
/// of a chunk in a store with tokens, and only the last block in a store without. Other connectors name one block in
/// each store.
#[derive(Clone, Copy, Debug, Default)]
struct Naming {
    /// Stores with tokens have come.
    has_tokens: bool,
    /// One of them named several blocks.
    has_chunks: bool,
    /// The tier was empty when this batch announced, by hash alone, a block that is not the first of its chain. No
    /// first block of a chain has followed.
    lacks_first: bool,
}

impl Offloaded {
    /// Notes how a store names its blocks. Returns whether the connector moves chunks of several blocks.
    #[must_use]
    pub(super) fn note_naming(&mut self, tier: Tier, has_tokens: bool, hashes: usize) -> bool {
        let naming = &mut self.naming[tier.index()];
        naming.has_tokens |= has_tokens;
        naming.has_chunks |= has_tokens && hashes > 1;
        naming.has_chunks
    }

    /// Notes a block that counts in a tier from now on. `is_first` = it is the first of its chain.
    pub(super) fn note_block(&mut self, tier: Tier, is_tier_empty: bool, is_first: bool) {
        let naming = &mut self.naming[tier.index()];
        naming.lacks_first = !is_first && (naming.lacks_first || is_tier_empty && !naming.has_tokens);
    }

    /// Ends a batch. Returns whether a tier got blocks by hash alone and no first block of a chain.
    #[must_use]
    pub(super) fn end_batch(&mut self) -> bool {
        let mut lacks_first = false;
        for naming in &mut self.naming {
            lacks_first |= std::mem::take(&mut naming.lacks_first);
        }
        lacks_first
    }

    /// Whether no reference waits.
    pub(super) fn is_empty(&self) -> bool {
        self.unbound.is_empty()
    }

    /// Adds references that wait. `false` = the limit is reached, and they are dropped.
    #[must_use]
    pub(super) fn wait(&mut self, hash: EngineHash, of: UnboundReferences) -> bool {
        if self.references.saturating_add(of.count as usize) > OFFLOADED_UNBOUND_REFERENCES_MAX {
            return false;
        }
        let list = self.unbound.entry(hash).or_default();
        let has_place = list.len() < OFFLOADED_PLACES_PER_HASH_MAX;
        match list.iter_mut().find(|known| (known.tier, known.group) == (of.tier, of.group)) {
            Some(known) => known.count += of.count,
            None if has_place => list.push(of),
            None => return false,
        }
        self.references += of.count as usize;
        true
    }

    /// Takes one reference; `false` = none waits.
    pub(super) fn take_one(&mut self, hash: EngineHash, tier: Tier, group: GroupId) -> bool {
        let Some(list) = self.unbound.get_mut(&hash) else { return false };
        let Some(at) = list.iter().position(|known| (known.tier, known.group) == (tier, group)) else { return false };
        list[at].count -= 1;
        self.references -= 1;
        if list[at].count == 0 {
            list.swap_remove(at);
        }
        if list.is_empty() {
            self.unbound.remove(&hash);
        }
        true
    }

    /// Takes all references to a block that is now known.
    pub(super) fn take_all(&mut self, hash: EngineHash) -> SmallVec<[UnboundReferences; 1]> {
        let list = self.unbound.remove(&hash).unwrap_or_default();
        self.references -= list.iter().map(|of| of.count as usize).sum::<usize>();
        list
    }

    /// Notes that a hash is bound to another block. Returns whether its references may be bound again too.
    fn rebinds(&mut self, hash: EngineHash) -> bool {
        self.rebound.len() < REBOUND_HASHES_MAX && self.rebound.insert(hash)
    }

    /// Drops all references that wait, because no block is counted any more. The engine may still hold their blocks.
    pub(super) fn lose(&mut self) {
        self.are_lost |= !self.unbound.is_empty();
        (self.unbound, self.references) = (FxHashMap::default(), 0);
        self.rebound.clear();
    }

    /// Drops all references that wait, and forgets that others were lost: every tier was emptied.
    pub(super) fn clear(&mut self) {
        self.lose();
        self.are_lost = false;
    }
}

impl Stream {
    /// Notes that a connector announced blocks, if the medium is a connector's.
    pub(super) fn note_connector(&mut self, medium: Medium, now: Now) {
        if !matches!(medium, Medium::Offloaded(_) | Medium::NeverRemoved) {
            return;
        }
        self.offloaded.has_connector = true;
        if self.offloaded.may_hold_older || medium == Medium::NeverRemoved {
            self.lower_trust(Flaw::LowerTiersUnknown, now);
        }
    }

    /// Holds references until device memory defines their block.
    pub(super) fn wait_for_device(&mut self, hash: EngineHash, of: UnboundReferences, now: Now) {
        if !self.offloaded.wait(hash, of) {
            self.lower_trust(Flaw::LowerTiersUnknown, now);
        }
    }

    /// Checks how a connector's store names its blocks. A chunk of several blocks is loaded whole or not at all. So if
    /// a prompt differs within the chunk, the chunk's earlier blocks are counted and cannot be used.
    pub(super) fn check_naming(&mut self, stored: &Stored<'_>, tier: Tier, now: Now) {
        let has_tokens = stored.content != Content::Unusable;
        if !self.offloaded.note_naming(tier, has_tokens, stored.hashes.len()) {
            return;
        }
        self.lower_trust(Flaw::LookaheadHash, now);
        if !has_tokens {
            self.lower_trust(Flaw::LowerTiersUnknown, now);
        }
    }

    /// Notes a new block in a connector's tier. The blocks of one transfer come in any order, so only the end of the
    /// batch shows whether the first block of a chain is missing.
    pub(super) fn note_offloaded(&mut self, space: &SpaceShard, tier: Tier, binding: Binding) {
        let is_empty = space.writer.held(self.slot).references[tier.index()] == 0;
        self.offloaded.note_block(tier, is_empty, binding.parent.is_none());
    }

    /// Ends a batch. Chunks of several blocks may have been announced by their last block alone.
    pub(super) fn check_first_offloaded(&mut self, now: Now) {
        if self.offloaded.end_batch() {
            self.lower_trust(Flaw::LowerTiersUnknown, now);
        }
    }

    /// Counts the references that waited for these hashes, which are now bound.
    pub(super) fn settle_offloaded(&mut self, space: &mut SpaceShard, hashes: &[EngineHash], now: Now) {
        if self.offloaded.is_empty() {
            return;
        }
        for hash in hashes {
            let Some(binding) = self.binding_of(space, *hash) else { continue };
            for waiting in self.offloaded.take_all(*hash) {
                self.note_offloaded(space, waiting.tier, binding);
                let Binding { parent, local, seed } = binding;
                let (hashes, locals) = (&[*hash], &[local]);
                let UnboundReferences { tier, group, count } = waiting;
                for _ in 0..count {
                    self.store(space, &StoreBlocks { parent, hashes, locals, tier, group, seed }, now);
                }
            }
        }
        self.end_wait_if_none_is_left(now);
    }

    /// Applies removals to the references that wait, and returns how many it applied.
    pub(super) fn take_waiting(&mut self, hashes: &[EngineHash], tier: Tier, group: GroupId, now: Now) -> u32 {
        if self.offloaded.is_empty() {
            return 0;
        }
        let taken = hashes.iter().filter(|hash| self.offloaded.take_one(**hash, tier, group)).count();
        self.end_wait_if_none_is_left(now);
        taken as u32
    }

    fn end_wait_if_none_is_left(&mut self, now: Now) {
        if self.offloaded.is_empty() && !self.offloaded.are_lost {
            self.input(TrustInput::OffloadBound, now);
        }
    }

    /// Lowers trust if a removal named blocks that its tier does not hold.
    pub(super) fn check_unknown_removal(&mut self, removed: &Removed<'_>, unknown: u32, now: Now) {
        if unknown > 0 && matches!(removed.medium, Medium::Offloaded(_)) {
            self.lower_trust(Flaw::LowerTiersUnknown, now);
        }
    }

    /// Lowers trust before a clear of the engine's cache: a connector's tiers may be cleared with it or not.
    pub(super) fn before_clear(&mut self, cleared: Cleared, now: Now) {
        if cleared.tier.is_some() || self.format != Some(Format::Msgpack) {
            return;
        }
        if self.offloaded.has_connector {
            self.lower_trust(Flaw::LowerTiersUnknown, now);
        } else if self.trust.has_missed_events() {
            self.offloaded.may_hold_older = true;
        }
    }

    /// Unbinds lower tiers' blocks that a store in device memory contradicts, so that device memory can bind the
    /// hashes. Their references wait to be bound again, once for each hash. Returns whether it did.
    pub(super) fn release_to_device(&mut self, space: &mut SpaceShard, blocks: &StoreBlocks<'_>, now: Now) -> bool {
        if blocks.tier != Tier::Device || self.tier_groups.iter().all(|(tier, _)| *tier == Tier::Device) {
            return false;
        }
        let contradicted = contradicted(space, self, blocks);
        let is_held = |hash: &EngineHash| space.writer.refers_to(self.slot, Tier::Device, *hash);
        if contradicted.is_empty() || contradicted.iter().any(is_held) {
            return false;
        }
        self.lower_trust(Flaw::HashConflict, now);
        for hash in contradicted {
            self.count(WorkerCounter::BlocksRebound, 1);
            let is_first = self.offloaded.rebinds(hash);
            for (tier, group) in self.tier_groups.clone() {
                let mut count = 0;
                while tier != Tier::Device && space.writer.remove(self.slot, tier, group, &[hash]).removed > 0 {
                    self.republish(|republisher| republisher.removed(tier, group, &[hash]));
                    count += 1;
                }
                if count > 0 && is_first {
                    self.wait_for_device(hash, UnboundReferences { tier, group, count }, now);
                } else if count > 0 {
                    self.lower_trust(Flaw::LowerTiersUnknown, now);
                }
            }
        }
        true
    }
}

/// The hashes of a store that are bound to other blocks.
fn contradicted(space: &SpaceShard, stream: &Stream, blocks: &StoreBlocks<'_>) -> Vec<EngineHash> {
    let parents = std::iter::once(blocks.parent).chain(blocks.hashes.iter().copied().map(Some));
    let stored = blocks.hashes.iter().zip(blocks.locals).zip(parents);
    let differs = |((hash, local), parent): &((&EngineHash, &_), _)| {
        let stored = Binding { parent: *parent, local: **local, seed: blocks.seed };
        space.writer.binding_of(stream.slot, **hash).is_some_and(|bound| bound != stored)
    };
    stored.filter(differs).map(|((hash, _), _)| *hash).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_wait_by_tier_and_group_and_are_bounded() {
        let (mut offloaded, one) = (Offloaded::default(), EngineHash(1));
        let of = |tier, group, count| UnboundReferences { tier, group: GroupId(group), count };
        assert!(offloaded.wait(one, of(Tier::Host, 0, 1)) && offloaded.wait(one, of(Tier::Host, 0, 1)));
        assert!(offloaded.wait(one, of(Tier::Disk, 0, 1)));
        assert!(
            !offloaded.take_one(one, Tier::Host, GroupId(1))
                && !offloaded.take_one(EngineHash(2), Tier::Host, GroupId(0))
        );
        assert!(offloaded.take_one(one, Tier::Disk, GroupId(0)));
        assert_eq!(offloaded.take_all(one)[..], [of(Tier::Host, 0, 2)]);
        assert!(offloaded.is_empty() && offloaded.take_all(one).is_empty());
        let room = (0..2 * OFFLOADED_UNBOUND_REFERENCES_MAX as u64)
            .filter(|hash| offloaded.wait(EngineHash(*hash), of(Tier::Host, 0, 1)))
            .count();
        assert_eq!(room, OFFLOADED_UNBOUND_REFERENCES_MAX);
        assert!(
            !offloaded.wait(EngineHash(0), of(Tier::Host, 0, 1)),
            "another reference of a known hash takes room too"
        );
        assert!(offloaded.take_one(EngineHash(1), Tier::Host, GroupId(0)));
        assert!(
            !offloaded.wait(EngineHash(0), of(Tier::Host, 0, 2)) && offloaded.wait(EngineHash(0), of(Tier::Host, 0, 1))
        );
        offloaded.lose();
        assert!(offloaded.are_lost);
        offloaded.clear();
        assert!(!offloaded.are_lost && offloaded.is_empty() && offloaded.wait(one, of(Tier::Host, 0, 1)));
    }

    #[test]
    fn one_hash_in_very_many_groups_makes_no_look_at_it_long() {
        let mut offloaded = Offloaded::default();
        let of = |group| UnboundReferences { tier: Tier::Host, group: GroupId(group), count: 1 };
        let room = (0..4096).filter(|group| offloaded.wait(EngineHash(1), of(*group))).count();
        assert_eq!(room, OFFLOADED_PLACES_PER_HASH_MAX);
        assert!(offloaded.wait(EngineHash(1), of(0)), "the places it has go on to count");
        assert_eq!(offloaded.take_all(EngineHash(1)).len(), OFFLOADED_PLACES_PER_HASH_MAX);
        assert_eq!(offloaded.references, 0);
    }
}
