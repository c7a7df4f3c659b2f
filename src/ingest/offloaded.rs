//! Blocks below device memory that connectors name by their hashes alone: pure.
//!
//! A hash that the worker holds in some tier says what its block is. Any other hash waits here, with the references
//! that were announced for it, until device memory says what it is or the references are taken back.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::ids::{EngineHash, GroupId, Tier};
use crate::limits::{OFFLOADED_PLACES_PER_HASH_MAX, OFFLOADED_UNBOUND_REFERENCES_MAX};

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
