//! A stream whose worker is dumped or loaded: its messages wait, and then they are applied in order.

use super::{Conflicted, Home, Now, Scratch, Stream};
use crate::event::SourceTrust;
use crate::event::gate::{SequenceGate, Verdict};
use crate::event::trust::TrustInput;
use crate::hash;
use crate::ids::{EngineHash, EventSeq, GroupId, LocalHash, Tier};
use crate::index::{Refusal, StoreBlocks};
use crate::ingest::dump::{AbortReason, DumpBegin};
use crate::ingest::held::{Held, Message, Overlap, Purpose};
use crate::ingest::republish::Republisher;
use crate::limits::{INGEST_TURN_BYTES_MAX, INGEST_TURN_MESSAGES_MAX};
use crate::metrics::WorkerCounter;
use crate::trust::{Trust, TrustLevel, TrustReason, TrustReasons};

impl Stream {
    /// Whether messages wait, or what waited is being applied.
    pub(in crate::ingest) const fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// Whether what waited is being applied: nothing more is to be received until that is done.
    pub(in crate::ingest) fn is_releasing(&self) -> bool {
        self.held.as_deref().is_some_and(Held::is_releasing)
    }

    /// What its messages are judged by.
    pub(in crate::ingest) const fn gate(&self) -> &SequenceGate {
        &self.gate
    }

    /// How much a copy of what the worker holds is believed: a dump, and what a relay says once more. Neither has what
    /// window groups have.
    pub(in crate::ingest) fn trust(&self) -> Trust {
        let mut trust = self.trust.trust();
        self.lack_windows(&mut trust.level, &mut trust.reasons);
        trust
    }

    /// How much its blocks are to be believed elsewhere.
    pub(in crate::ingest) fn view_of_blocks(&self) -> SourceTrust {
        let mut view = self.trust.view_of_blocks();
        self.lack_windows(&mut view.level, &mut view.reasons);
        view
    }

    /// Lowers what is believed of a copy, which has no blocks of window groups.
    fn lack_windows(&self, level: &mut TrustLevel, reasons: &mut TrustReasons) {
        if self.kinds.has_windows() {
            *level = TrustReason::Hybrid.cap().min(*level);
            reasons.insert(TrustReason::Hybrid);
        }
    }

    /// Lets messages wait from now on. Answers with the last batch applied and the payloads remembered.
    pub(in crate::ingest) fn hold_for_dump(&mut self) -> (Option<EventSeq>, Vec<(EventSeq, u64)>) {
        self.broken_off = None;
        self.cancel_optional();
        let purpose = Purpose::Dump(Box::new(self.gate.clone()));
        self.held = Some(Box::new(Held::new(purpose, self.held_of_shard.clone())));
        (self.gate.last(), self.gate.remembered())
    }

    /// Lets messages wait from now on; nothing is changed yet.
    pub(in crate::ingest) fn hold_for_load(&mut self) {
        self.broken_off = None;
        self.cancel_optional();
        self.held = Some(Box::new(Held::new(Purpose::Load { begun: false }, self.held_of_shard.clone())));
    }

    /// Lets a message wait. What shows that the worker is to be emptied, or is one too many, ends the waiting.
    pub(super) fn wait(&mut self, home: &mut Home, message: Message, now: Now) {
        if self.is_recovering() {
            return self.wait_for_recovery(home, message, now);
        }
        let Some(held) = &mut self.held else { return };
        let empties = match (&mut held.purpose, &message) {
            (Purpose::Dump(gate), Message::Batch { seq, payload_hash, .. }) => match gate.batch(*seq, *payload_hash) {
                Verdict::Gap { .. } => Some(AbortReason::Gap),
                Verdict::Restart { .. } => Some(AbortReason::Restarted),
                Verdict::First { .. } | Verdict::InOrder | Verdict::Duplicate => None,
            },
            _ => None,
        };
        let fits = held.push(message);
        self.count(WorkerCounter::MessagesHeld, 1);
        if let Some(reason) = empties.or((!fits).then_some(AbortReason::Overflow)) {
            self.break_hold(home, reason, now);
        }
    }

    /// The dump or load is over before its end. A load that had begun leaves nothing.
    pub(in crate::ingest) fn break_hold(&mut self, home: &mut Home, reason: AbortReason, now: Now) {
        let Some(held) = self.held.as_deref_mut().filter(|held| !held.is_releasing()) else { return };
        if matches!(held.purpose, Purpose::Recovery(_)) {
            return;
        }
        let had_begun = matches!(held.purpose, Purpose::Load { begun: true });
        self.broken_off = Some(reason);
        self.let_go(now);
        if had_begun {
            self.changed = true;
            self.empty(home, TrustInput::LoadFailed, now);
        }
    }

    /// Why the dump or load was broken off, told once.
    pub(in crate::ingest) const fn take_broken_off(&mut self) -> Option<AbortReason> {
        self.broken_off.take()
    }

    /// The dump or load has reached its end: what waited may be applied.
    pub(in crate::ingest) fn finish_hold(&mut self, now: Now) {
        self.let_go(now);
    }

    /// Applies a bounded number of the messages that waited; `true` = none is left and none waits any more.
    pub(in crate::ingest) fn release(&mut self, home: &mut Home, scratch: &mut Scratch, now: Now) -> bool {
        let mut bytes = 0;
        for _ in 0..INGEST_TURN_MESSAGES_MAX {
            // What is applied may show that more was lost, and then the rest waits on.
            if home.writer.is_choked() || bytes > INGEST_TURN_BYTES_MAX || !self.is_releasing() {
                return false;
            }
            match self.release_one(home, scratch, now) {
                Some(payload_bytes) => bytes += payload_bytes,
                None => return true,
            }
        }
        false
    }

    /// Applies everything that waited, whatever that takes, as far as nothing is missing before it.
    pub(in crate::ingest) fn release_all(&mut self, home: &mut Home, scratch: &mut Scratch, now: Now) {
        while self.is_releasing() && self.release_one(home, scratch, now).is_some() {}
    }

    /// Applies the message that waited longest and answers with its payload's bytes.
    fn release_one(&mut self, home: &mut Home, scratch: &mut Scratch, now: Now) -> Option<usize> {
        let Some(message) = self.held.as_mut()?.pop() else {
            self.held = None;
            return None;
        };
        match message {
            Message::Batch { seq, payload_hash, payload } => {
                let id = (seq, payload_hash);
                if self.is_old(id, &payload, scratch) {
                    return Some(payload.len());
                }
                if !self.waits_for_lost(home, (seq, payload_hash), &payload, now) {
                    self.batch(home, scratch, (seq, payload_hash), &payload, now);
                }
                Some(payload.len())
            }
            Message::Misframed(frames) => {
                self.unframed(frames, now);
                Some(0)
            }
        }
    }

    /// Empties the worker for the blocks of a dump that are cut so.
    ///
    /// # Errors
    /// The space has another scheme; nothing is changed then.
    pub(in crate::ingest) fn begin_load(
        &mut self,
        home: &mut Home,
        begin: &DumpBegin,
        now: Now,
    ) -> Result<(), AbortReason> {
        if begin.scheme.is_some_and(|own| home.scheme.learn(own) != own) {
            return Err(AbortReason::SchemeMismatch);
        }
        if let Some(held) = &mut self.held {
            held.purpose = Purpose::Load { begun: true };
        }
        self.changed = true;
        self.empty(home, TrustInput::Loading, now);
        self.said(Republisher::unsayable);
        // One batch for all of it: what the dump says twice is held twice, and not announced again.
        home.writer.begin_batch(self.slot);
        begin.groups.iter().try_for_each(|(tier, group)| self.load_group(home, *tier, *group))
    }

    /// Makes a group one of a tier's: whatever it has no block of is then not held there.
    pub(super) fn load_group(&mut self, home: &mut Home, tier: Tier, group: GroupId) -> Result<(), AbortReason> {
        // A block and gone again, while the worker has no other that it could be taken for.
        let hashes = &[EngineHash::default()];
        let blocks = StoreBlocks {
            parent: None,
            hashes,
            locals: &[LocalHash::default()],
            tier,
            group,
            seed: hash::seed(None, None),
        };
        if let Some(refusal) = home.writer.store(self.slot, &blocks).refused {
            return Err(self.load_refused(refusal));
        }
        home.writer.remove(self.slot, tier, group, hashes);
        self.note_group(tier, group);
        Ok(())
    }

    /// Stores blocks of a dump.
    ///
    /// # Errors
    /// The index refuses them, or nobody knows how they were hashed.
    pub(in crate::ingest) fn load_store(
        &mut self,
        home: &mut Home,
        store: &StoreBlocks<'_>,
        now: Now,
    ) -> Result<(), AbortReason> {
        if home.scheme.get().is_none() {
            return Err(AbortReason::SchemeMismatch);
        }
        self.changed = true;
        let outcome = self.store_in_index(home, store, now);
        self.count(WorkerCounter::BlocksStored, u64::from(outcome.stored));
        self.count(WorkerCounter::BlocksDormant, u64::from(outcome.dormant));
        if let Some(refusal) = outcome.refused {
            return Err(self.load_refused(refusal));
        }
        self.note_group(store.tier, store.group);
        Ok(())
    }

    fn load_refused(&self, refusal: Refusal) -> AbortReason {
        let bound = match refusal {
            Refusal::MemoryBound => WorkerCounter::StoresMemoryBound,
            _ => WorkerCounter::StoresBounded,
        };
        self.count(bound, 1);
        tracing::warn!(worker = %self.worker, bound = refusal.name(), "blocks of a dump refused");
        AbortReason::Refused
    }

    /// Whether nothing that the stream has seen or that waits can be of another stream than the dump's.
    pub(in crate::ingest) fn follows(&self, begin: &DumpBegin) -> bool {
        match self.overlap(begin) {
            Overlap::Shown(_) => true,
            Overlap::NotYet | Overlap::Contradicted => false,
            // Compared already, if it is remembered there.
            Overlap::None => self.gate.last().is_none_or(|last| begin.remembered.iter().any(|(seq, _)| *seq == last)),
        }
    }

    /// Whether what waits shows that it is of another stream than the dump's.
    pub(in crate::ingest) fn contradicts(&self, begin: &DumpBegin) -> bool {
        self.overlap(begin) == Overlap::Contradicted
    }

    fn overlap(&self, begin: &DumpBegin) -> Overlap {
        match (&self.held, begin.watermark) {
            (Some(held), Some(watermark)) => held.overlap(watermark, &begin.remembered),
            _ => Overlap::None,
        }
    }

    /// Goes on where the dump was taken, with what waited meanwhile and is not in the dump.
    pub(in crate::ingest) fn loaded(&mut self, home: &mut Home, begin: &DumpBegin, now: Now) {
        let Some(watermark) = begin.watermark else { return };
        self.changed = true;
        if let Overlap::Shown(contained) = self.overlap(begin) {
            // More of them than the gate remembers may be in the dump; it would take the others for a restart.
            (0..contained).filter_map(|_| self.held.as_mut()?.pop()).for_each(drop);
            self.count(WorkerCounter::Duplicates, contained as u64);
        }
        self.forget_incarnation();
        self.groups.iter().for_each(|(_, group)| self.kinds.counted(*group));
        if begin.view.reasons.contains(TrustReason::HashConflict) {
            // Which hashes contradicted each other is not in a dump: any may be one.
            self.conflicted = Conflicted::any();
        }
        // Which references waited is not in a dump.
        self.offloaded.are_lost = begin.trust.reasons.contains(TrustReason::OffloadUnbound);
        self.offloaded.heard = self.groups.iter().any(|(tier, _)| *tier != Tier::Device);
        self.gate.resume(watermark, &begin.remembered);
        self.input(TrustInput::Loaded(begin.view), now);
        if begin.trust.reasons.contains(TrustReason::Disconnected) {
            self.input(TrustInput::Disconnected, now);
        }
        self.trust.applied(watermark, now.unix_ms);
        self.check_capacity(home, now);
        self.prove_loaded(now);
        self.finish_hold(now);
    }
}
