//! Tiers below device memory: what connectors announce by hash, and what a clear leaves unknown.
//!
//! | what is said | the blocks | trust |
//! |---|---|---|
//! | a connector's store of a hash that is held in some tier | count there, as what is held | |
//! | a connector's store of any other hash | wait, bounded | offload_unbound |
//! | a store that says what a waiting hash is | count there from then on | offload_unbound goes with the last |
//! | a removal | taken from what counts or waits; unknown there | lower_tiers_unknown |
//! | the first stores of a tier, by hash alone, in whose batch no chain's first block is: chunks may name only their last | count | lower_tiers_unknown |
//! | a connector's store of several blocks: a chunk, which is loaded whole or not at all | count | lookahead_hash |
//! | a store by hash alone of such a connector: only the last block of its chunk | counts | lower_tiers_unknown |
//! | a store that never says when its blocks go | do not count | lower_tiers_unknown |
//! | an engine's clear, after a connector was heard of | every tier is emptied: it may hold them still | lower_tiers_unknown |
//! | a connector's first event, after a clear that ended a doubt about the past | count | lower_tiers_unknown |
//! | device memory binds a hash to something else than a lower tier did | the lower tier's are bound again | hash_conflict |

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::stream::{SpaceShard, Now, Stream};
use crate::event::format::Format;
use crate::event::trust::{Flaw, TrustInput};
use crate::event::{Cleared, Content, Medium, Removed, Stored};
use crate::ids::{EngineHash, GroupId, Tier};
use crate::index::{Binding, StoreBlocks};
use crate::limits::{OFFLOADED_PLACES_PER_HASH_MAX, OFFLOADED_UNBOUND_REFERENCES_MAX};
use crate::metrics::WorkerCounter;

/// References of one tier and group to one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct References {
    pub(super) tier: Tier,
    pub(super) group: GroupId,
    pub(super) count: u32,
}

/// What connectors have said of one worker, in one incarnation of its engine.
#[derive(Debug, Default)]
pub(super) struct Offloaded {
    unbound: FxHashMap<EngineHash, SmallVec<[References; 1]>>,
    /// All references in `unbound`, each as often as it was announced.
    references: usize,
    /// References that waited were forgotten: when no other waits, not all are known.
    pub(super) are_lost: bool,
    /// A tier that a connector reports has been heard of.
    pub(super) heard: bool,
    /// Device memory was cleared when older blocks may have been in tiers that had not been heard of.
    pub(super) may_hold_older: bool,
    /// How the connector names the blocks of each tier.
    naming: [Naming; Tier::ALL.len()],
}

/// How a connector names the blocks of one tier. A connector that moves chunks of several blocks names each block of
/// a chunk in a store with tokens, and only the last block in a store without. Other connectors name one block a store.
#[derive(Clone, Copy, Debug, Default)]
struct Naming {
    /// Stores with tokens have come.
    has_tokens: bool,
    /// One of them named several blocks.
    has_chunks: bool,
    /// The tier was empty when this batch stored a block that is not the first of its chain, by hash alone, and no
    /// first block of a chain has followed.
    lacks_first: bool,
}

impl Offloaded {
    /// Notes how a store names its blocks; whether the connector moves chunks of several blocks.
    #[must_use]
    pub(super) fn note_naming(&mut self, tier: Tier, has_tokens: bool, hashes: usize) -> bool {
        let naming = &mut self.naming[tier.index()];
        naming.has_tokens |= has_tokens;
        naming.has_chunks |= has_tokens && hashes > 1;
        naming.has_chunks
    }

    /// Notes a block that counts in a tier from now on. `is_first`: of its chain.
    pub(super) fn note_block(&mut self, tier: Tier, is_tier_empty: bool, is_first: bool) {
        let naming = &mut self.naming[tier.index()];
        naming.lacks_first = !is_first && (naming.lacks_first || is_tier_empty && !naming.has_tokens);
    }

    /// Ends a batch; whether a tier got blocks by hash alone and the first of no chain.
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

    /// Lets references wait. `false`: there is no room, and they are forgotten.
    #[must_use]
    pub(super) fn wait(&mut self, hash: EngineHash, of: References) -> bool {
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

    /// Takes back one reference; `false`: none waits.
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

    /// Takes all references to a block whose hash is known from now on.
    pub(super) fn take_all(&mut self, hash: EngineHash) -> SmallVec<[References; 1]> {
        let list = self.unbound.remove(&hash).unwrap_or_default();
        self.references -= list.iter().map(|of| of.count as usize).sum::<usize>();
        list
    }

    /// Forgets what waits; the engine may hold it still.
    pub(super) fn lose(&mut self) {
        self.are_lost |= !self.unbound.is_empty();
        (self.unbound, self.references) = (FxHashMap::default(), 0);
    }

    /// Forgets what waits, and that other references were lost: every tier was emptied.
    pub(super) fn clear(&mut self) {
        self.lose();
        self.are_lost = false;
    }
}

impl Stream {
    /// Notes that a connector spoke, if one did.
    pub(super) fn hear_connector(&mut self, medium: Medium, now: Now) {
        if !matches!(medium, Medium::Offloaded(_) | Medium::NeverRemoved) {
            return;
        }
        self.offloaded.heard = true;
        if self.offloaded.may_hold_older || medium == Medium::NeverRemoved {
            self.lower_trust(Flaw::LowerTiersUnknown, now);
        }
    }

    /// Lets references wait until device memory says what their block is.
    pub(super) fn wait_for_device(&mut self, hash: EngineHash, of: References, now: Now) {
        if !self.offloaded.wait(hash, of) {
            self.lower_trust(Flaw::LowerTiersUnknown, now);
        }
    }

    /// Looks at the names that a connector's store gives its blocks. A chunk of several blocks is loaded whole or not
    /// at all, so where a prompt parts from the chunk, the blocks before are counted and cannot be used.
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

    /// Notes a block that a connector's tier gets. Blocks of one transfer come in any order, so the end of the batch
    /// shows whether the first block of a chain is missing.
    pub(super) fn note_offloaded(&mut self, space: &SpaceShard, tier: Tier, binding: Binding) {
        let is_empty = space.writer.held(self.slot).references[tier.index()] == 0;
        self.offloaded.note_block(tier, is_empty, binding.parent.is_none());
    }

    /// Ends a batch: chunks of several blocks may have been announced by their last one alone.
    pub(super) fn check_first_offloaded(&mut self, now: Now) {
        if self.offloaded.end_batch() {
            self.lower_trust(Flaw::LowerTiersUnknown, now);
        }
    }

    /// These hashes are bound now: references that waited for one of them count from here on.
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
                let References { tier, group, count } = waiting;
                for _ in 0..count {
                    self.store(space, &StoreBlocks { parent, hashes, locals, tier, group, seed }, now);
                }
            }
        }
        self.end_wait_if_none_is_left(now);
    }

    /// Takes removals from what waits; answers how many there were.
    pub(super) fn take_waiting(
        &mut self,
        hashes: &[EngineHash],
        tier: Tier,
        group: GroupId,
        now: Now,
    ) -> u32 {
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

    /// A removal named blocks of which its tier has no reference.
    pub(super) fn check_unknown_removal(&mut self, removed: &Removed<'_>, unknown: u32, now: Now) {
        if unknown > 0 && matches!(removed.medium, Medium::Offloaded(_)) {
            self.lower_trust(Flaw::LowerTiersUnknown, now);
        }
    }

    /// Where an engine clears its cache, a connector's tiers may go with it or stay.
    pub(super) fn before_clear(&mut self, cleared: Cleared, now: Now) {
        if cleared.tier.is_some() || self.format != Some(Format::Msgpack) {
            return;
        }
        if self.offloaded.heard {
            self.lower_trust(Flaw::LowerTiersUnknown, now);
        } else if self.trust.has_missed_events() {
            self.offloaded.may_hold_older = true;
        }
    }

    /// Whether device memory's word can take the place of what lower tiers said of the same hashes. If so, what they
    /// hold under those hashes waits to be bound again.
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
            for (tier, group) in self.tier_groups.clone() {
                let mut count = 0;
                while tier != Tier::Device && space.writer.remove(self.slot, tier, group, &[hash]).removed > 0 {
                    self.republish(|republisher| republisher.removed(tier, group, &[hash]));
                    count += 1;
                }
                if count > 0 {
                    self.wait_for_device(hash, References { tier, group, count }, now);
                }
            }
        }
        true
    }
}

/// The blocks of a store whose hashes are bound to something else.
fn contradicted(space: &SpaceShard, stream: &Stream, blocks: &StoreBlocks<'_>) -> Vec<EngineHash> {
    let parents = std::iter::once(blocks.parent).chain(blocks.hashes.iter().copied().map(Some));
    let told = blocks.hashes.iter().zip(blocks.locals).zip(parents);
    let differs = |((hash, local), parent): &((&EngineHash, &_), _)| {
        let told = Binding { parent: *parent, local: **local, seed: blocks.seed };
        space.writer.binding_of(stream.slot, **hash).is_some_and(|bound| bound != told)
    };
    told.filter(differs).map(|((hash, _), _)| *hash).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_wait_by_tier_and_group_and_are_bounded() {
        let (mut offloaded, one) = (Offloaded::default(), EngineHash(1));
        let of = |tier, group, count| References { tier, group: GroupId(group), count };
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
        let of = |group| References { tier: Tier::Host, group: GroupId(group), count: 1 };
        let room = (0..4096).filter(|group| offloaded.wait(EngineHash(1), of(*group))).count();
        assert_eq!(room, OFFLOADED_PLACES_PER_HASH_MAX);
        assert!(offloaded.wait(EngineHash(1), of(0)), "the places it has go on to count");
        assert_eq!(offloaded.take_all(EngineHash(1)).len(), OFFLOADED_PLACES_PER_HASH_MAX);
        assert_eq!(offloaded.references, 0);
    }
}
