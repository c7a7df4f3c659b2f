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

use super::{Home, Now, Stream};
use crate::event::format::Format;
use crate::event::trust::{Finding, TrustInput};
use crate::event::{Cleared, Content, Medium, Removed, Stored};
use crate::ids::{EngineHash, GroupId, Tier};
use crate::index::{Binding, StoreBlocks};
use crate::ingest::offloaded::References;
use crate::metrics::WorkerCounter;

impl Stream {
    /// Notes that a connector spoke, if one did.
    pub(in crate::ingest) fn hear_connector(&mut self, medium: Medium, now: Now) {
        if !matches!(medium, Medium::Offloaded(_) | Medium::NeverRemoved) {
            return;
        }
        self.offloaded.heard = true;
        if self.offloaded.may_hold_older || medium == Medium::NeverRemoved {
            self.found(Finding::LowerTiersUnknown, now);
        }
    }

    /// Lets references wait until device memory says what their block is.
    pub(in crate::ingest) fn wait_for_device(&mut self, hash: EngineHash, of: References, now: Now) {
        if !self.offloaded.wait(hash, of) {
            self.found(Finding::LowerTiersUnknown, now);
        }
    }

    /// Looks at the names that a connector's store gives its blocks. A chunk of several blocks is loaded whole or not
    /// at all, so where a prompt parts from the chunk, the blocks before are counted and cannot be used.
    pub(in crate::ingest) fn check_naming(&mut self, stored: &Stored<'_>, tier: Tier, now: Now) {
        let has_tokens = stored.content != Content::Unusable;
        if !self.offloaded.note_naming(tier, has_tokens, stored.hashes.len()) {
            return;
        }
        self.found(Finding::LookaheadHash, now);
        if !has_tokens {
            self.found(Finding::LowerTiersUnknown, now);
        }
    }

    /// Notes a block that a connector's tier gets. Blocks of one transfer come in any order, so the end of the batch
    /// shows whether the first block of a chain is missing.
    pub(in crate::ingest) fn note_offloaded(&mut self, home: &Home, tier: Tier, binding: Binding) {
        let is_empty = home.writer.held(self.slot).references[tier.index()] == 0;
        self.offloaded.note_block(tier, is_empty, binding.parent.is_none());
    }

    /// Ends a batch: chunks of several blocks may have been announced by their last one alone.
    pub(in crate::ingest) fn check_first_offloaded(&mut self, now: Now) {
        if self.offloaded.end_batch() {
            self.found(Finding::LowerTiersUnknown, now);
        }
    }

    /// These hashes are bound now: references that waited for one of them count from here on.
    pub(in crate::ingest) fn settle_offloaded(&mut self, home: &mut Home, hashes: &[EngineHash], now: Now) {
        if self.offloaded.is_empty() {
            return;
        }
        for hash in hashes {
            let Some(binding) = self.binding_of(home, *hash) else { continue };
            for waiting in self.offloaded.take_all(*hash) {
                self.note_offloaded(home, waiting.tier, binding);
                let Binding { parent, local, seed } = binding;
                let (hashes, locals) = (&[*hash], &[local]);
                let References { tier, group, count } = waiting;
                for _ in 0..count {
                    self.store(home, &StoreBlocks { parent, hashes, locals, tier, group, seed }, now);
                }
            }
        }
        self.end_wait_if_none_is_left(now);
    }

    /// Takes removals from what waits; answers how many there were.
    pub(in crate::ingest) fn take_waiting(
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
    pub(in crate::ingest) fn check_unknown_removal(&mut self, removed: &Removed<'_>, unknown: u32, now: Now) {
        if unknown > 0 && matches!(removed.medium, Medium::Offloaded(_)) {
            self.found(Finding::LowerTiersUnknown, now);
        }
    }

    /// Where an engine clears its cache, a connector's tiers may go with it or stay.
    pub(in crate::ingest) fn before_clear(&mut self, cleared: Cleared, now: Now) {
        if cleared.tier.is_some() || self.format != Some(Format::Msgpack) {
            return;
        }
        if self.offloaded.heard {
            self.found(Finding::LowerTiersUnknown, now);
        } else if self.trust.has_missed_events() {
            self.offloaded.may_hold_older = true;
        }
    }

    /// Whether device memory's word can take the place of what lower tiers said of the same hashes. If so, what they
    /// hold under those hashes waits to be bound again.
    pub(in crate::ingest) fn release_to_device(&mut self, home: &mut Home, blocks: &StoreBlocks<'_>, now: Now) -> bool {
        if blocks.tier != Tier::Device || self.groups.iter().all(|(tier, _)| *tier == Tier::Device) {
            return false;
        }
        let contradicted = contradicted(home, self, blocks);
        let is_held = |hash: &EngineHash| home.writer.refers_to(self.slot, Tier::Device, *hash);
        if contradicted.is_empty() || contradicted.iter().any(is_held) {
            return false;
        }
        self.found(Finding::HashConflict, now);
        for hash in contradicted {
            self.count(WorkerCounter::BlocksRebound, 1);
            for (tier, group) in self.groups.clone() {
                let mut count = 0;
                while tier != Tier::Device && home.writer.remove(self.slot, tier, group, &[hash]).removed > 0 {
                    self.said(|republisher| republisher.removed(tier, group, &[hash]));
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
fn contradicted(home: &Home, stream: &Stream, blocks: &StoreBlocks<'_>) -> Vec<EngineHash> {
    let parents = std::iter::once(blocks.parent).chain(blocks.hashes.iter().copied().map(Some));
    let told = blocks.hashes.iter().zip(blocks.locals).zip(parents);
    let differs = |((hash, local), parent): &((&EngineHash, &_), _)| {
        let told = Binding { parent: *parent, local: **local, seed: blocks.seed };
        home.writer.binding_of(stream.slot, **hash).is_some_and(|bound| bound != told)
    };
    told.filter(differs).map(|((hash, _), _)| *hash).collect()
}
