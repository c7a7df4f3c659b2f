//! Applies one decoded batch to the index, event by event, in the order in which they happened.
//!
//! A block that cannot be bound is counted with the reason and lowers trust. Nothing is guessed.

use super::copies::{is_repeated, repeats};
use super::groups::Rule;
use super::hashing::{Before, Fit, SeedOf, fit, is_alone, is_partial, seed_of};
use super::lower_tiers::UnboundReferences;
use super::space_shard::SpaceShard;
use super::stream::{Conflicted, Now, Scratch, Stream};
use crate::event::worker_trust::{Flaw, TrustInput};
use crate::event::{Cleared, Content, KvEvent, Medium, Removed, Stored, UnknownName};
use crate::hash;
use crate::ids::{EngineHash, GroupId, LocalHash, Scheme, Seed, Tier};
use crate::index::{Binding, Refusal, StoreBlocks, StoreOutcome};
use crate::limits::LOOK_AHEAD_EVENTS;
use crate::metrics::WorkerCounter;
use crate::trust::TrustReason;

impl Stream {
    /// Applies every event of the batch in `scratch`.
    pub(super) fn apply(&mut self, space: &mut SpaceShard, scratch: &mut Scratch, now: Now) {
        let Scratch { batch, locals, mark } = scratch;
        mark.iter().for_each(|mark| mark.go_on());
        let stated = batch.info().scheme;
        if batch.info().snapshot.is_some() {
            // Parts of a snapshot are not live events. Applied as live events they would be counted twice.
            self.count(WorkerCounter::UnknownTags, batch.len() as u64);
            self.lower_trust(Flaw::UnknownEvents, now);
            return;
        }
        if !self.kv_groups.has_windows() {
            // The worker may have been another engine's, with windows.
            space.writer.forget_windows(self.slot);
        }
        let looks_ahead = batch.len() > LOOK_AHEAD_EVENTS;
        for (at, event) in batch.events().enumerate() {
            if looks_ahead {
                let first = |ahead: usize| batch.first_hash(at + ahead);
                space.writer.look_ahead(first(LOOK_AHEAD_EVENTS), first(LOOK_AHEAD_EVENTS / 2));
            }
            match event {
                KvEvent::Stored(stored) => self.stored(space, &stored, stated, locals, now),
                KvEvent::Removed(removed) => self.removed(space, &removed, now),
                KvEvent::Cleared(cleared) => self.cleared(space, cleared, now),
            }
        }
        self.check_first_offloaded(now);
        if self.kv_groups.lacks_main() {
            self.lower_trust(Flaw::Hybrid, now);
        }
    }

    pub(super) fn stored(
        &mut self,
        space: &mut SpaceShard,
        stored: &Stored<'_>,
        stated: Option<Scheme>,
        locals: &mut Vec<LocalHash>,
        now: Now,
    ) {
        let rule = self.kv_groups.store(stored.group, stored.group_kind, stored.block_size);
        let Some(tier) = self.place(stored.medium, rule, now) else { return };
        if let Rule::Window { blocks, .. } = rule {
            return self.window_stored(space, stored, blocks, now);
        }
        if stored.hashes.is_empty() {
            return;
        }
        if self.unchained {
            return self.refuse_store(stored, tier, WorkerCounter::StoresUnchained, Flaw::UnchainedHashes, now);
        }
        if stored.content == Content::Unusable || matches!(stored.medium, Medium::Offloaded(_)) {
            return self.resolve(space, stored, tier, locals, now);
        }
        let Some(scheme) = self.scheme_of(space, stored, tier, stated, now) else { return };
        if stored.parent.is_some_and(|parent| self.conflicted.contains(parent)) {
            return self.conflict(stored.hashes, now);
        }
        let before = match stored.parent {
            None => Before::Root,
            Some(parent) => space.writer.seed_of(self.slot, parent).map_or(Before::NotHeld, Before::Held),
        };
        let seed = match seed_of(before, stored.lora, stored.salt, self.salts_possible) {
            SeedOf::Known(seed) => seed,
            SeedOf::UnknownRoot => {
                return self.refuse_store(stored, tier, WorkerCounter::StoresUnknownRoot, Flaw::UnknownRoot, now);
            }
            SeedOf::Conflict => return self.conflict(stored.hashes, now),
        };
        let locals = match stored.content {
            Content::Tokens { tokens, .. } => {
                hash::local_hashes(scheme, seed, hash::token_bytes(tokens), stored.media, locals);
                locals.as_slice()
            }
            Content::LocalHashes(hashed) => hashed,
            Content::Unusable => &[],
        };
        let (parent, hashes) = (stored.parent, stored.hashes);
        self.store(space, &StoreBlocks { parent, hashes, locals, tier, group: stored.group, seed }, now);
        self.settle_offloaded(space, hashes, now);
    }

    /// Counts references to blocks whose chain and content are known.
    pub(super) fn store(&mut self, space: &mut SpaceShard, blocks: &StoreBlocks<'_>, now: Now) {
        if self.computes_left_copy(space, blocks) {
            return self.removals_are_for_all(space, now);
        }
        let mut outcome = self.store_in_index(space, blocks, now);
        if outcome.refused == Some(Refusal::HashConflict) && self.release_to_device(space, blocks, now) {
            outcome = self.store_in_index(space, blocks, now);
        }
        let counts_once = self.last_copies.for_all && blocks.tier == Tier::Device;
        let counts_copies = self.counts_copies(space) && !counts_once;
        let is_repeated = is_repeated(blocks, &outcome);
        // If each block is counted once, a repeated chain changes nothing.
        outcome.ambiguous &= !counts_once;
        if !counts_copies && !counts_once && (is_repeated || repeats(blocks, &outcome) && self.may_miss_blocks()) {
            // Takes back one reference to blocks that were held before. Readers see no difference.
            space.writer.take_back_repeated(self.slot, blocks.tier, blocks.group, blocks.hashes);
            self.refuse(WorkerCounter::StoresAmbiguous, Flaw::AmbiguousStore, now);
            if is_repeated {
                return;
            }
        }
        if counts_copies && blocks.tier == Tier::Device && outcome.stored > 0 {
            self.count(WorkerCounter::StoresCopied, u64::from(is_repeated));
            if self.copies.stored(blocks, &outcome, self.kv_groups.has_windows()) {
                return self.full_report(space, now);
            }
        }
        if outcome.stored > 0 {
            self.republish(|republisher| republisher.stored(blocks));
            if counts_once && outcome.already > 0 {
                self.take_back_copies(space, blocks);
            }
            self.note_group(blocks.tier, blocks.group);
            self.kv_groups.counted(blocks.group);
            self.place_unplaced(space, blocks.hashes, now);
        }
        match outcome.refused {
            Some(Refusal::HashConflict | Refusal::SelfParent) => self.conflict(blocks.hashes, now),
            _ => self.count_stored(space, &outcome, now),
        }
    }

    /// Applies a store by its hashes alone, as for stores of connectors. A hash names one block. So each hash means the
    /// block that is held under it, in any tier. A hash that is not held is not guessed: a connector's reference to it
    /// waits until device memory defines the block.
    fn resolve(
        &mut self,
        space: &mut SpaceShard,
        stored: &Stored<'_>,
        tier: Tier,
        locals: &mut Vec<LocalHash>,
        now: Now,
    ) {
        let is_offloaded = matches!(stored.medium, Medium::Offloaded(_));
        let (mut rest, mut unresolved) = (stored.hashes, 0);
        if is_offloaded {
            self.check_naming(stored, tier, now);
        }
        while let Some((first, _)) = rest.split_first() {
            let Some(Binding { parent, local, seed }) = self.binding_of(space, *first) else {
                (rest, unresolved) = (&rest[1..], unresolved + 1);
                if is_offloaded {
                    self.wait_for_device(*first, UnboundReferences { tier, group: stored.group, count: 1 }, now);
                }
                continue;
            };
            let (hashes, behind) = rest.split_at(self.bound_run(space, rest, (local, seed), locals));
            if is_offloaded {
                self.note_offloaded(space, tier, Binding { parent, local, seed });
            }
            self.count(WorkerCounter::BlocksResolved, hashes.len() as u64);
            self.store(space, &StoreBlocks { parent, hashes, locals, tier, group: stored.group, seed }, now);
            rest = behind;
        }
        if unresolved > 0 {
            self.count(WorkerCounter::BlocksUnresolved, unresolved);
            let flaw = if is_offloaded { Flaw::OffloadUnbound } else { Flaw::UnknownRoot };
            self.refuse_store(stored, tier, WorkerCounter::StoresUnusable, flaw, now);
        }
    }

    /// The length of the run of blocks, from the first on, that follow each other in their bindings. `locals` gets
    /// their local hashes. Readers see the whole run at once, as with any store. `first` is the local hash and seed of
    /// the first.
    pub(super) fn bound_run(
        &self,
        space: &SpaceShard,
        hashes: &[EngineHash],
        (first, seed): (LocalHash, Seed),
        locals: &mut Vec<LocalHash>,
    ) -> usize {
        locals.clear();
        locals.push(first);
        for pair in hashes.windows(2) {
            let next = self.binding_of(space, pair[1]);
            let Some(next) = next.filter(|next| next.parent == Some(pair[0]) && next.seed == seed) else { break };
            locals.push(next.local);
        }
        locals.len()
    }

    /// The binding of a hash that identifies one block.
    pub(super) fn binding_of(&self, space: &SpaceShard, hash: EngineHash) -> Option<Binding> {
        space.writer.binding_of(self.slot, hash).filter(|_| !self.conflicted.contains(hash))
    }

    /// Refuses a store. If its group has no block in a tier in which other groups have some, the tier seems to hold
    /// blocks that this group may lack.
    fn refuse_store(&mut self, stored: &Stored<'_>, tier: Tier, counter: WorkerCounter, flaw: Flaw, now: Now) {
        let mut of_tier = self.tier_groups.iter().filter(|(of, _)| *of == tier).map(|(_, group)| *group).peekable();
        if of_tier.peek().is_some() && of_tier.all(|group| group != stored.group) {
            self.lower_trust(Flaw::Hybrid, now);
        }
        self.refuse(counter, flaw, now);
    }

    /// Refuses a store that contradicts a held block. The chain of its hashes is then unknown, so later blocks under
    /// them cannot be placed either: placed under the held blocks, they would be over-counted.
    fn conflict(&mut self, hashes: &[EngineHash], now: Now) {
        self.conflicted.extend(hashes);
        self.refuse(WorkerCounter::StoresHashConflict, Flaw::HashConflict, now);
    }

    pub(super) fn count_stored(&mut self, space: &mut SpaceShard, outcome: &StoreOutcome, now: Now) {
        self.count(WorkerCounter::BlocksStored, u64::from(outcome.stored));
        self.count(WorkerCounter::BlocksDormant, u64::from(outcome.dormant));
        if outcome.ambiguous {
            self.refuse(WorkerCounter::StoresAmbiguous, Flaw::AmbiguousStore, now);
        }
        match outcome.refused {
            // `store` has called `conflict`.
            None | Some(Refusal::HashConflict | Refusal::SelfParent) => {}
            Some(Refusal::MemoryBound) => self.memory_bound(space, now),
            Some(Refusal::BudgetBound) => self.memory_short(now),
            // The index has emptied the worker.
            Some(Refusal::WorkBound) => {
                self.bounded(Refusal::WorkBound, now);
                self.emptied(space);
            }
            Some(Refusal::LengthMismatch) => self.refuse(WorkerCounter::StoresUnusable, Flaw::UnknownRoot, now),
            Some(
                refusal @ (Refusal::StoreBound
                | Refusal::TooManyGroups
                | Refusal::CapacityBound
                | Refusal::PositionBound
                | Refusal::AliasBound
                | Refusal::DormantBound
                | Refusal::BytesBound
                | Refusal::ReferenceBound),
            ) => self.bounded(refusal, now),
            // The plan gives every publisher a slot of its own writer. Without one, nothing would be counted.
            Some(Refusal::UnknownWorker) => self.bounded(Refusal::UnknownWorker, now),
        }
    }

    pub(super) fn removed(&mut self, space: &mut SpaceShard, removed: &Removed<'_>, now: Now) {
        let rule = self.kv_groups.remove(removed.group);
        let Some(tier) = self.place(removed.medium, rule, now) else { return };
        if matches!(rule, Rule::Window { .. }) {
            return self.window_removed(space, removed);
        }
        let copied = self.copied_before(space, removed, tier);
        let outcome = space.writer.remove(self.slot, tier, removed.group, removed.hashes);
        if outcome.removed > 0 {
            if tier == Tier::Device {
                self.copies.removed(outcome.removed);
            }
            self.republish(|republisher| republisher.removed(tier, removed.group, removed.hashes));
        }
        self.count(WorkerCounter::BlocksRemoved, u64::from(outcome.removed));
        let waiting = self.take_waiting(removed.hashes, tier, removed.group, now);
        let unknown = outcome.unknown.saturating_sub(waiting);
        self.count(WorkerCounter::RemovesUnknown, u64::from(unknown));
        self.check_unknown_removal(removed, unknown, now);
        if tier == Tier::Device {
            self.note_left_copies(space, removed, &copied);
            self.check_removals_for_all(unknown, now);
        }
    }

    fn cleared(&mut self, space: &mut SpaceShard, cleared: Cleared, now: Now) {
        self.count(WorkerCounter::Cleared, 1);
        self.before_clear(cleared, now);
        let is_whole = cleared.tier.is_some() && space.writer.is_cleared_whole(self.slot);
        if is_whole {
            self.lower_trust(Flaw::CapacityBound, now);
        }
        space.writer.clear(self.slot, cleared.tier);
        if is_whole {
            self.emptied(space);
        } else {
            self.republish(|republisher| republisher.cleared(cleared.tier));
            self.tier_groups.retain(|(tier, _)| cleared.tier.is_some_and(|cleared| cleared != *tier));
        }
        if cleared.tier.is_none_or(|tier| tier == Tier::Device) {
            self.copies.cleared();
            self.last_copies.cleared();
            self.input(TrustInput::ClearPublished, now);
            self.windows_emptied(space);
        }
        if cleared.tier.is_none() {
            self.conflicted = Conflicted::default();
            self.offloaded.clear();
            self.input(TrustInput::ClearedAllTiers, now);
        }
    }

    /// Notes that a tier has blocks of a group. A dump has to list it.
    pub(super) fn note_group(&mut self, tier: Tier, group: GroupId) {
        if !self.tier_groups.contains(&(tier, group)) {
            self.tier_groups.push((tier, group));
        }
    }

    /// The tier of an event. `None` = its blocks do not count, and a counter says so.
    fn place(&mut self, medium: Medium, rule: Rule, now: Now) -> Option<Tier> {
        self.note_connector(medium, now);
        let elsewhere = match medium {
            Medium::Remote => Some(WorkerCounter::EventsRemote),
            Medium::NeverRemoved => Some(WorkerCounter::EventsNeverRemoved),
            Medium::Tier(_) | Medium::Offloaded(_) | Medium::Unknown => None,
        };
        if let Some(counter) = elsewhere {
            self.count(counter, 1);
            return None;
        }
        let is_window = matches!(rule, Rule::Window { .. });
        // Window rules hold for device memory only.
        let is_excluded = rule == Rule::LeftOut || (is_window && medium != Medium::Tier(Tier::Device));
        if is_excluded || !matches!(rule, Rule::Counts | Rule::Window { proved: true, .. }) {
            self.lower_trust(Flaw::Hybrid, now);
        }
        if is_excluded {
            self.count(WorkerCounter::EventsOtherGroup, 1);
            return None;
        }
        match medium {
            Medium::Tier(tier) | Medium::Offloaded(tier) => Some(tier),
            Medium::Unknown | Medium::Remote | Medium::NeverRemoved => {
                self.count(WorkerCounter::EventsUnknownMedium, 1);
                self.lower_trust(Flaw::UnknownMedium, now);
                None
            }
        }
    }

    /// The scheme to hash a store with. `None` = the store does not fit the space, and a counter says so.
    fn scheme_of(
        &mut self,
        space: &mut SpaceShard,
        stored: &Stored<'_>,
        tier: Tier,
        stated: Option<Scheme>,
        now: Now,
    ) -> Option<Scheme> {
        let own = match fit(space.scheme.get(), stored, stated) {
            Fit::Fits(scheme) => {
                if space.unsure {
                    let is_below = |parent| space.writer.binding_of(self.slot, parent).is_some();
                    space.unsure = is_alone(stored) && !stored.parent.is_some_and(is_below);
                }
                return Some(scheme);
            }
            Fit::Learn(own) => own,
            Fit::Unknown => {
                self.refuse_store(stored, tier, WorkerCounter::StoresSchemeUnknown, Flaw::UnknownRoot, now);
                return None;
            }
            Fit::Mismatch { own, known, .. }
                if (space.unsure || self.kv_groups.has_counted(stored.group)) && is_partial(own, known, stored) =>
            {
                self.count(WorkerCounter::BlocksPartial, 1);
                return None;
            }
            Fit::Mismatch { own, known, teaches: true }
                if space.unsure
                    && own.window == known.window
                    && own.block_size > known.block_size
                    && space.holds_only(self.slot) =>
            {
                self.drop_partial(space, known);
                space.scheme.forget();
                own
            }
            Fit::Mismatch { own, teaches: true, .. } if space.relearns && space.holds_nothing() => {
                space.scheme.forget();
                own
            }
            Fit::Mismatch { own, known, .. } => {
                self.mismatch(stored, tier, (own, known), now);
                return None;
            }
        };
        // Another shard may have learnt a scheme first.
        let known = space.scheme.learn(own);
        if known != own {
            self.mismatch(stored, tier, (own, known), now);
            return None;
        }
        space.unsure = space.relearns && is_alone(stored);
        tracing::info!(space = %space.id, worker = %self.worker, scheme = ?own, "hash scheme learnt");
        Some(own)
    }

    /// Drops all blocks of a space whose scheme was learnt from a block that was not full yet. No whole block of a
    /// prompt can match them. The engine announces them again, under other hashes, when they are full.
    fn drop_partial(&mut self, space: &mut SpaceShard, known: Scheme) {
        let blocks = space.writer.held(self.slot).bound;
        tracing::info!(space = %space.id, worker = %self.worker, scheme = ?known, blocks, "the hash scheme was learnt from blocks that were not full; they are dropped, and the scheme is learnt again");
        self.count(WorkerCounter::BlocksPartial, blocks);
        space.writer.clear(self.slot, None);
        self.republish(|republisher| republisher.cleared(None));
        self.tier_groups.clear();
        self.windows_emptied(space);
    }

    pub(super) fn mismatch(&mut self, stored: &Stored<'_>, tier: Tier, (own, known): (Scheme, Scheme), now: Now) {
        self.refuse_store(stored, tier, WorkerCounter::StoresSchemeMismatch, Flaw::SchemeMismatch, now);
        self.view.refused_scheme.set(own);
        let times = self.view.counters.get(WorkerCounter::StoresSchemeMismatch);
        if times.is_power_of_two() {
            tracing::warn!(worker = %self.worker, worker_scheme = ?own, space_scheme = ?known, times, "a store of another scheme was refused");
        }
    }

    /// Counts a name that this version does not know. The log names it once.
    pub(super) fn count_unknown_name(&self, of: UnknownName, name: &str, times: u32) {
        if self.view.unknown_names.count(of, name, u64::from(times)) {
            tracing::warn!(worker = %self.worker, what = of.name(), name, "the engine uses a name that this version does not know; status counts it");
        }
    }

    /// Drops all blocks of an engine whose hashes do not show where a block is. No further block is bound.
    pub(super) fn unchained_hashes(&mut self, space: &mut SpaceShard, now: Now) {
        if !std::mem::replace(&mut self.unchained, true) {
            self.empty_because(space, Flaw::UnchainedHashes, now);
        }
    }

    pub(super) fn bounded(&mut self, refusal: Refusal, now: Now) {
        self.refuse(WorkerCounter::StoresBounded, Flaw::CapacityBound, now);
        let times = self.view.counters.get(WorkerCounter::StoresBounded);
        if times.is_power_of_two() {
            tracing::warn!(worker = %self.worker, bound = refusal.name(), times, "a store was refused because a limit was reached");
        }
    }

    /// Refuses a store because the space is full. Held blocks stay and count; new ones do not, and trust says so.
    fn memory_bound(&mut self, space: &SpaceShard, now: Now) {
        self.refuse(WorkerCounter::StoresMemoryBound, Flaw::MemoryBound, now);
        let times = self.view.counters.get(WorkerCounter::StoresMemoryBound);
        if times.is_power_of_two() {
            tracing::warn!(
                worker = %self.worker, space = %space.id, times, remedy = TrustReason::MemoryBound.remedy(),
                "a store was refused because the space's memory ceiling is reached"
            );
        }
    }

    /// Refuses a store because the daemon's memory is short. Held blocks stay and count.
    fn memory_short(&mut self, now: Now) {
        self.refuse(WorkerCounter::StoresMemoryShort, Flaw::MemoryShort, now);
        let times = self.view.counters.get(WorkerCounter::StoresMemoryShort);
        if times.is_power_of_two() {
            tracing::warn!(
                worker = %self.worker, times, remedy = TrustReason::MemoryShort.remedy(),
                "a store was refused because the daemon's memory budget is nearly used"
            );
        }
    }

    pub(super) fn refuse(&mut self, counter: WorkerCounter, flaw: Flaw, now: Now) {
        self.count(counter, 1);
        self.lower_trust(flaw, now);
    }
}
