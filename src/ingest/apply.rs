//! One decoded batch onto the index, event by event in the order in which they happened.
//!
//! Whatever is not bound is counted with its reason and lowers trust; nothing is guessed.

use super::scheme::{Fit, fit};
use super::seed::{Before, SeedOf, seed_of};
use super::stream::{Conflicted, Home, Now, Scratch, Stream};
use crate::event::trust::{Finding, TrustInput};
use crate::event::{Cleared, Content, GroupKind, KvEvent, Medium, Removed, Stored};
use crate::hash;
use crate::ids::{GroupId, LocalHash, Scheme, Tier};
use crate::index::{Refusal, StoreBlocks, StoreOutcome};
use crate::limits::{LOOK_AHEAD_EVENTS, OTHER_GROUPS_MAX};
use crate::metrics::WorkerCounter;
use crate::trust::TrustReason;

impl Stream {
    /// Applies every event of the batch in `scratch`.
    pub(super) fn apply(&mut self, home: &mut Home, scratch: &mut Scratch, now: Now) {
        let Scratch { batch, locals } = scratch;
        let stated = batch.info().scheme;
        if batch.info().snapshot.is_some() {
            // Parts of a snapshot are not live events; applied as such they would be counted twice.
            self.count(WorkerCounter::UnknownTags, batch.len() as u64);
            self.found(Finding::UnknownEvents, now);
            return;
        }
        let looks_ahead = batch.len() > LOOK_AHEAD_EVENTS;
        for (at, event) in batch.events().enumerate() {
            if looks_ahead {
                let first = |ahead: usize| batch.first_hash(at + ahead);
                home.writer.look_ahead(first(LOOK_AHEAD_EVENTS), first(LOOK_AHEAD_EVENTS / 2));
            }
            match event {
                KvEvent::Stored(stored) => self.stored(home, &stored, stated, locals, now),
                KvEvent::Removed(removed) => self.removed(home, &removed, now),
                KvEvent::Cleared(cleared) => self.cleared(home, cleared, now),
            }
        }
    }

    fn stored(
        &mut self,
        home: &mut Home,
        stored: &Stored<'_>,
        stated: Option<Scheme>,
        locals: &mut Vec<LocalHash>,
        now: Now,
    ) {
        let Some(tier) = self.place(stored.medium, stored.group, stored.group_kind, now) else { return };
        if stored.hashes.is_empty() {
            return;
        }
        if stored.group_kind == GroupKind::Unstated && stored.group != GroupId(0) {
            // Counted, which needs every group to hold a block; but what the group is for is not known.
            self.found(Finding::Hybrid, now);
        }
        if stored.content == Content::Unusable {
            return self.refuse(WorkerCounter::StoresUnusable, Finding::UnknownRoot, now);
        }
        let Some(scheme) = self.scheme_of(home, stored, stated, now) else { return };
        if stored.parent.is_some_and(|parent| self.conflicted.contains(parent)) {
            return self.conflict(stored, now);
        }
        let before = match stored.parent {
            None => Before::Root,
            Some(parent) => home.writer.seed_of(self.slot, parent).map_or(Before::NotHeld, Before::Held),
        };
        let seed = match seed_of(before, stored.lora, stored.salt, self.salts_possible) {
            SeedOf::Known(seed) => seed,
            SeedOf::UnknownRoot => return self.refuse(WorkerCounter::StoresUnknownRoot, Finding::UnknownRoot, now),
            SeedOf::Conflict => return self.conflict(stored, now),
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
        let blocks = StoreBlocks { parent, hashes, locals, tier, group: stored.group, seed };
        let outcome = home.writer.store(self.slot, &blocks);
        if outcome.stored > 0 {
            self.note_group(tier, stored.group);
        }
        match outcome.refused {
            Some(Refusal::HashConflict | Refusal::SelfParent) => self.conflict(stored, now),
            _ => self.count_stored(home, &outcome, now),
        }
    }

    /// A store that contradicts what is held. Its blocks are then somewhere else than we think, so what is stored
    /// under them later cannot be placed either: placed under what is held, it would be over-counted.
    fn conflict(&mut self, stored: &Stored<'_>, now: Now) {
        self.conflicted.extend(stored.hashes);
        self.refuse(WorkerCounter::StoresHashConflict, Finding::HashConflict, now);
    }

    fn count_stored(&mut self, home: &Home, outcome: &StoreOutcome, now: Now) {
        self.count(WorkerCounter::BlocksStored, u64::from(outcome.stored));
        self.count(WorkerCounter::BlocksDormant, u64::from(outcome.dormant));
        if outcome.ambiguous {
            self.refuse(WorkerCounter::StoresAmbiguous, Finding::AmbiguousStore, now);
        }
        match outcome.refused {
            // A conflict is seen to by `conflict`.
            None | Some(Refusal::HashConflict | Refusal::SelfParent) => {}
            Some(Refusal::MemoryBound) => self.memory_bound(home, now),
            Some(Refusal::LengthMismatch) => self.refuse(WorkerCounter::StoresUnusable, Finding::UnknownRoot, now),
            Some(
                refusal @ (Refusal::TooManyGroups
                | Refusal::CapacityBound
                | Refusal::PositionBound
                | Refusal::AliasBound
                | Refusal::DormantBound
                | Refusal::ReferenceBound),
            ) => self.bounded(refusal, now),
            // The plan gives every publisher a slot of its own writer; were it not so, nothing would be counted.
            Some(Refusal::UnknownWorker) => self.bounded(Refusal::UnknownWorker, now),
        }
    }

    fn removed(&mut self, home: &mut Home, removed: &Removed<'_>, now: Now) {
        let Some(tier) = self.place(removed.medium, removed.group, GroupKind::Unstated, now) else { return };
        let outcome = home.writer.remove(self.slot, tier, removed.group, removed.hashes);
        self.count(WorkerCounter::BlocksRemoved, u64::from(outcome.removed));
        self.count(WorkerCounter::RemovesUnknown, u64::from(outcome.unknown));
    }

    fn cleared(&mut self, home: &mut Home, cleared: Cleared, now: Now) {
        self.count(WorkerCounter::Cleared, 1);
        home.writer.clear(self.slot, cleared.tier);
        self.groups.retain(|(tier, _)| cleared.tier.is_some_and(|cleared| cleared != *tier));
        if cleared.tier.is_none() {
            self.conflicted = Conflicted::default();
            self.input(TrustInput::ClearedAllTiers, now);
        }
    }

    /// Remembers that a tier has blocks of a group, which a dump has to say.
    pub(super) fn note_group(&mut self, tier: Tier, group: GroupId) {
        if !self.groups.contains(&(tier, group)) {
            self.groups.push((tier, group));
        }
    }

    /// The tier an event is about, or `None` if its blocks are not counted, which is then counted.
    fn place(&mut self, medium: Medium, group: GroupId, kind: GroupKind, now: Now) -> Option<Tier> {
        if medium == Medium::Remote {
            self.count(WorkerCounter::EventsRemote, 1);
            return None;
        }
        match kind {
            GroupKind::Main => {
                self.other_groups.remove(&group);
            }
            // Bounded: a removal in a group that is not remembered names blocks that are not held.
            GroupKind::Other if self.other_groups.len() < OTHER_GROUPS_MAX => {
                self.other_groups.insert(group);
            }
            GroupKind::Other | GroupKind::Unstated => {}
        }
        if kind == GroupKind::Other || self.other_groups.contains(&group) {
            self.count(WorkerCounter::EventsOtherGroup, 1);
            self.found(Finding::Hybrid, now);
            return None;
        }
        match medium {
            Medium::Tier(tier) => Some(tier),
            Medium::Unknown | Medium::Remote => {
                self.count(WorkerCounter::EventsUnknownMedium, 1);
                self.found(Finding::UnknownMedium, now);
                None
            }
        }
    }

    /// The scheme to hash a store with, or `None` if it does not fit, which is then counted.
    fn scheme_of(&mut self, home: &Home, stored: &Stored<'_>, stated: Option<Scheme>, now: Now) -> Option<Scheme> {
        let own = match fit(home.scheme.get(), stored, stated) {
            Fit::Fits(scheme) => return Some(scheme),
            Fit::Learn(own) => own,
            Fit::Unknown => {
                self.refuse(WorkerCounter::StoresSchemeUnknown, Finding::UnknownRoot, now);
                return None;
            }
            Fit::Mismatch { own, teaches: true, .. } if home.relearns && home.holds_nothing() => {
                home.scheme.forget();
                own
            }
            Fit::Mismatch { own, known, .. } => {
                self.mismatch(own, known, now);
                return None;
            }
        };
        // Another shard may have been first.
        let known = home.scheme.learn(own);
        if known != own {
            self.mismatch(own, known, now);
            return None;
        }
        tracing::info!(space = %home.space, worker = %self.worker, scheme = ?own, "hash scheme learnt");
        Some(own)
    }

    fn mismatch(&mut self, own: Scheme, known: Scheme, now: Now) {
        self.refuse(WorkerCounter::StoresSchemeMismatch, Finding::SchemeMismatch, now);
        let times = self.view.counters.get(WorkerCounter::StoresSchemeMismatch);
        if times.is_power_of_two() {
            tracing::warn!(worker = %self.worker, worker_scheme = ?own, space_scheme = ?known, times, "store of another scheme refused");
        }
    }

    fn bounded(&mut self, refusal: Refusal, now: Now) {
        self.refuse(WorkerCounter::StoresBounded, Finding::CapacityBound, now);
        let times = self.view.counters.get(WorkerCounter::StoresBounded);
        if times.is_power_of_two() {
            tracing::warn!(worker = %self.worker, bound = refusal.name(), times, "store refused because a bound was reached");
        }
    }

    /// The space is full: what is held stays held and is answered; what is new is not, and trust says so.
    fn memory_bound(&mut self, home: &Home, now: Now) {
        self.refuse(WorkerCounter::StoresMemoryBound, Finding::MemoryBound, now);
        let times = self.view.counters.get(WorkerCounter::StoresMemoryBound);
        if times.is_power_of_two() {
            tracing::warn!(
                worker = %self.worker, space = %home.space, times, remedy = TrustReason::MemoryBound.remedy(),
                "store refused because the space's memory ceiling is reached"
            );
        }
    }

    fn refuse(&mut self, counter: WorkerCounter, finding: Finding, now: Now) {
        self.count(counter, 1);
        self.found(finding, now);
    }
}

impl Home {
    /// Whether no worker of this space and shard holds anything.
    fn holds_nothing(&self) -> bool {
        self.slots.iter().all(|slot| {
            let held = self.writer.held(*slot);
            held.bound == 0 && held.dormant == 0
        })
    }
}
