//! Messages of a stream that wait: while its worker is dumped or loaded, or its lost batches are fetched. Afterwards they
//! are applied in order.
//!
//! | state | message | released | slice taken | held on |
//! |---|---|---|---|---|
//! | Holding | waits; beyond the bound the caller releases, or drops the oldest | Releasing | – | Holding |
//! | Releasing | waits behind the others (its shard leaves it in its socket) | Releasing | until nothing waits | Holding |
//!
//! What waits is bounded for each worker, and by [`HeldBytes`] for all that are recovered in one shard.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Conflicted, SpaceShard, Now, Scratch, Stream};
use crate::event::SourceTrust;
use crate::event::gate::{SequenceGate, Verdict};
use crate::event::trust::TrustInput;
use crate::hash;
use crate::ids::{EngineHash, EventSeq, GroupId, LocalHash, Tier};
use crate::index::{Refusal, StoreBlocks};
use crate::ingest::dump::{AbortReason, DumpBegin};
use crate::ingest::republish::Republisher;
use crate::limits::{
    HELD_BYTES_MAX, HELD_MESSAGES_MAX, INGEST_TURN_BYTES_MAX, INGEST_TURN_MESSAGES_MAX, RECOVERY_HELD_BYTES_MAX,
};
use crate::metrics::WorkerCounter;
use crate::trust::{Trust, TrustLevel, TrustReason, TrustReasons};

/// What the worker is held for.
#[derive(Debug)]
pub(in crate::ingest) enum Purpose {
    /// Its blocks are walked. The gate is a copy that runs ahead, to tell at once what will empty the worker.
    Dump(Box<SequenceGate>),
    /// Blocks are put in; once that has begun, nothing else is in it.
    Load {
        /// Whether it has.
        begun: bool,
    },
    /// Lost batches are fetched. The gate judges what waits, to tell at once when another incarnation speaks.
    Recovery(Box<SequenceGate>),
}

/// Payload bytes that wait in all streams of a shard. One thread counts; atomic only so that a shard can be handed
/// to its thread.
#[derive(Clone, Debug, Default)]
pub(in crate::ingest) struct HeldBytes(Arc<AtomicUsize>);

impl HeldBytes {
    fn add(&self, bytes: usize) {
        // Relaxed, here and below: one thread reads and writes it.
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    fn subtract(&self, bytes: usize) {
        self.0.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// One message that waits.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::ingest) enum Message {
    /// A batch, with the hash of its payload.
    Batch { seq: EventSeq, payload_hash: u64, payload: Box<[u8]> },
    /// So many frames that are no batch.
    Misframed(usize),
}

impl Message {
    fn payload_bytes(&self) -> usize {
        match self {
            Self::Batch { payload, .. } => payload.len(),
            Self::Misframed(_) => 0,
        }
    }
}

/// What the messages that wait have in common with a stream known up to a watermark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ingest) enum Overlap {
    /// Nothing of what waits is from before the watermark.
    None,
    /// So many, from the oldest, are of that stream and from before the watermark.
    Shown(usize),
    /// They are from before the watermark, and none of them is remembered: what follows will show.
    NotYet,
    /// They are of another stream.
    Contradicted,
}

/// The messages that wait, and what for.
#[derive(Debug)]
pub(in crate::ingest) struct Held {
    pub(in crate::ingest) purpose: Purpose,
    waiting: VecDeque<Message>,
    bytes: usize,
    of_shard: HeldBytes,
    is_releasing: bool,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.of_shard.subtract(self.bytes);
    }
}

impl Held {
    pub(in crate::ingest) const fn new(purpose: Purpose, of_shard: HeldBytes) -> Self {
        Self { purpose, waiting: VecDeque::new(), bytes: 0, of_shard, is_releasing: false }
    }

    /// Takes a message; `false` = it is one more than may wait. It is kept all the same: nothing is lost.
    pub(in crate::ingest) fn push(&mut self, message: Message) -> bool {
        self.weigh(&message);
        self.waiting.push_back(message);
        self.waiting.len() <= HELD_MESSAGES_MAX && self.bytes <= HELD_BYTES_MAX
    }

    /// Puts back what was popped last.
    pub(in crate::ingest) fn put_back(&mut self, message: Message) {
        self.weigh(&message);
        self.waiting.push_front(message);
    }

    fn weigh(&mut self, message: &Message) {
        self.bytes += message.payload_bytes();
        self.of_shard.add(message.payload_bytes());
    }

    /// How many messages wait.
    pub(in crate::ingest) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether more waits than may while a worker is recovered.
    pub(in crate::ingest) fn is_over(&self) -> bool {
        self.waiting.len() > HELD_MESSAGES_MAX
            || self.bytes > HELD_BYTES_MAX
            || (self.of_shard.get() > RECOVERY_HELD_BYTES_MAX && self.bytes > 0)
    }

    /// The sequence of the batch that waits longest.
    pub(in crate::ingest) fn first_seq(&self) -> Option<EventSeq> {
        self.waiting.iter().find_map(|message| match message {
            Message::Batch { seq, .. } => Some(*seq),
            Message::Misframed(_) => None,
        })
    }

    /// Drops everything that waits and answers how much that was.
    pub(in crate::ingest) fn clear(&mut self) -> usize {
        let messages = self.waiting.len();
        while self.pop().is_some() {}
        messages
    }

    /// Drops the batches before `seq` that wait longest, and answers how many those were.
    pub(in crate::ingest) fn drop_before(&mut self, seq: EventSeq) -> usize {
        let messages = self.waiting.len();
        while self.first_seq().is_some_and(|first| first < seq) {
            self.pop();
        }
        messages - self.waiting.len()
    }

    /// From now on it waits for something else, and is not being applied any more.
    pub(in crate::ingest) fn hold_on(&mut self, purpose: Purpose) {
        (self.purpose, self.is_releasing) = (purpose, false);
    }

    /// The oldest message that waits.
    pub(in crate::ingest) fn pop(&mut self) -> Option<Message> {
        let message = self.waiting.pop_front()?;
        self.bytes -= message.payload_bytes();
        self.of_shard.subtract(message.payload_bytes());
        Some(message)
    }

    /// How many messages wait.
    pub(in crate::ingest) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// What the oldest messages have in common with a stream of which these payloads are remembered, by ascending
    /// sequence up to the watermark. Only a run of ascending sequences is looked at: behind it another incarnation
    /// may speak.
    pub(in crate::ingest) fn overlap(&self, watermark: EventSeq, remembered: &[(EventSeq, u64)]) -> Overlap {
        let (mut before, mut overlap) = (None, Overlap::None);
        for (at, message) in self.waiting.iter().enumerate() {
            let Message::Batch { seq, payload_hash, .. } = message else { continue };
            if *seq > watermark || before.is_some_and(|before| *seq <= before) {
                break;
            }
            before = Some(*seq);
            match remembered.binary_search_by_key(seq, |(seq, _)| *seq) {
                Ok(found) if remembered[found].1 == *payload_hash => overlap = Overlap::Shown(at + 1),
                Ok(_) => return Overlap::Contradicted,
                Err(_) if overlap == Overlap::None => overlap = Overlap::NotYet,
                Err(_) => {}
            }
        }
        overlap
    }

    /// What waits is to be applied now. Answers whether that is new.
    pub(in crate::ingest) const fn release(&mut self) -> bool {
        !std::mem::replace(&mut self.is_releasing, true)
    }

    /// Whether what waits is being applied.
    pub(in crate::ingest) const fn is_releasing(&self) -> bool {
        self.is_releasing
    }
}

impl Stream {
    /// Whether messages wait, or what waited is being applied.
    pub(in crate::ingest) const fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// Whether what waited is being applied: nothing more is to be received until that is done.
    pub(in crate::ingest) fn is_releasing(&self) -> bool {
        self.held.as_deref().is_some_and(Held::is_releasing)
    }

    /// What its messages are apply_judged by.
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
        if self.kv_groups.has_windows() {
            *level = TrustReason::Hybrid.cap().min(*level);
            reasons.insert(TrustReason::Hybrid);
        }
    }

    /// Lets messages wait from now on. Answers with the last batch applied and the payloads remembered.
    pub(in crate::ingest) fn hold_for_dump(&mut self) -> (Option<EventSeq>, Vec<(EventSeq, u64)>) {
        self.abort_reason = None;
        self.cancel_optional();
        let purpose = Purpose::Dump(Box::new(self.gate.clone()));
        self.held = Some(Box::new(Held::new(purpose, self.held_of_shard.clone())));
        (self.gate.last(), self.gate.remembered())
    }

    /// Lets messages wait from now on; nothing is changed yet.
    pub(in crate::ingest) fn hold_for_load(&mut self) {
        self.abort_reason = None;
        self.cancel_optional();
        self.held = Some(Box::new(Held::new(Purpose::Load { begun: false }, self.held_of_shard.clone())));
    }

    /// Lets a message wait. What shows that the worker is to be emptied, or is one too many, ends the waiting.
    pub(super) fn wait(&mut self, space: &mut SpaceShard, message: Message, now: Now) {
        if self.is_recovering() {
            return self.wait_for_recovery(space, message, now);
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
            self.break_hold(space, reason, now);
        }
    }

    /// The dump or load is over before its end. A load that had begun leaves nothing.
    pub(in crate::ingest) fn break_hold(&mut self, space: &mut SpaceShard, reason: AbortReason, now: Now) {
        let Some(held) = self.held.as_deref_mut().filter(|held| !held.is_releasing()) else { return };
        if matches!(held.purpose, Purpose::Recovery(_)) {
            return;
        }
        let had_begun = matches!(held.purpose, Purpose::Load { begun: true });
        self.abort_reason = Some(reason);
        self.release_or_recover(now);
        if had_begun {
            self.changed = true;
            self.empty(space, TrustInput::LoadFailed, now);
        }
    }

    /// Why the dump or load was broken off, told once.
    pub(in crate::ingest) const fn take_abort_reason(&mut self) -> Option<AbortReason> {
        self.abort_reason.take()
    }

    /// The dump or load has reached its end: what waited may be applied.
    pub(in crate::ingest) fn finish_hold(&mut self, now: Now) {
        self.release_or_recover(now);
    }

    /// Applies a bounded number of the messages that waited; `true` = none is left and none waits any more.
    pub(in crate::ingest) fn release(&mut self, space: &mut SpaceShard, scratch: &mut Scratch, now: Now) -> bool {
        let mut bytes = 0;
        for _ in 0..INGEST_TURN_MESSAGES_MAX {
            // What is applied may show that more was lost, and then the rest waits on.
            if space.writer.is_choked() || bytes > INGEST_TURN_BYTES_MAX || !self.is_releasing() {
                return false;
            }
            match self.release_one(space, scratch, now) {
                Some(payload_bytes) => bytes += payload_bytes,
                None => return true,
            }
        }
        false
    }

    /// Applies everything that waited, whatever that takes, as far as nothing is missing before it.
    pub(in crate::ingest) fn release_all(&mut self, space: &mut SpaceShard, scratch: &mut Scratch, now: Now) {
        while self.is_releasing() && self.release_one(space, scratch, now).is_some() {}
    }

    /// Applies the message that waited longest and answers with its payload's bytes.
    fn release_one(&mut self, space: &mut SpaceShard, scratch: &mut Scratch, now: Now) -> Option<usize> {
        let Some(message) = self.held.as_mut()?.pop() else {
            self.held = None;
            return None;
        };
        match message {
            Message::Batch { seq, payload_hash, payload } => {
                let id = (seq, payload_hash);
                if self.is_old_relay_batch(id, &payload, scratch) {
                    return Some(payload.len());
                }
                if !self.holds_for_lost(space, (seq, payload_hash), &payload, now) {
                    self.batch(space, scratch, (seq, payload_hash), &payload, now);
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
        space: &mut SpaceShard,
        begin: &DumpBegin,
        now: Now,
    ) -> Result<(), AbortReason> {
        if begin.scheme.is_some_and(|own| space.scheme.learn(own) != own) {
            return Err(AbortReason::SchemeMismatch);
        }
        if let Some(held) = &mut self.held {
            held.purpose = Purpose::Load { begun: true };
        }
        self.changed = true;
        self.empty(space, TrustInput::Loading, now);
        self.republish(Republisher::unsayable);
        // One batch for all of it: what the dump says twice is held twice, and not announced again.
        space.writer.begin_batch(self.slot);
        begin.groups.iter().try_for_each(|(tier, group)| self.load_group(space, *tier, *group))
    }

    /// Makes a group one of a tier's: whatever it has no block of is then not held there.
    pub(super) fn load_group(&mut self, space: &mut SpaceShard, tier: Tier, group: GroupId) -> Result<(), AbortReason> {
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
        if let Some(refusal) = space.writer.store(self.slot, &blocks).refused {
            return Err(self.load_refused(refusal));
        }
        space.writer.remove(self.slot, tier, group, hashes);
        self.note_group(tier, group);
        Ok(())
    }

    /// Stores blocks of a dump.
    ///
    /// # Errors
    /// The index refuses them, or nobody knows how they were hashed.
    pub(in crate::ingest) fn load_store(
        &mut self,
        space: &mut SpaceShard,
        store: &StoreBlocks<'_>,
        now: Now,
    ) -> Result<(), AbortReason> {
        if space.scheme.get().is_none() {
            return Err(AbortReason::SchemeMismatch);
        }
        self.changed = true;
        let outcome = self.store_in_index(space, store, now);
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
    pub(in crate::ingest) fn loaded(&mut self, space: &mut SpaceShard, begin: &DumpBegin, now: Now) {
        let Some(watermark) = begin.watermark else { return };
        self.changed = true;
        if let Overlap::Shown(contained) = self.overlap(begin) {
            // More of them than the gate remembers may be in the dump; it would take the others for a restart.
            (0..contained).filter_map(|_| self.held.as_mut()?.pop()).for_each(drop);
            self.count(WorkerCounter::Duplicates, contained as u64);
        }
        self.forget_incarnation();
        self.tier_groups.iter().for_each(|(_, group)| self.kv_groups.counted(*group));
        if begin.view.reasons.contains(TrustReason::HashConflict) {
            // Which hashes contradicted each other is not in a dump: any may be one.
            self.conflicted = Conflicted::any();
        }
        // Which references waited is not in a dump.
        self.offloaded.are_lost = begin.trust.reasons.contains(TrustReason::OffloadUnbound);
        self.offloaded.heard = self.tier_groups.iter().any(|(tier, _)| *tier != Tier::Device);
        self.gate.resume(watermark, &begin.remembered);
        self.input(TrustInput::Loaded(begin.view), now);
        if begin.trust.reasons.contains(TrustReason::Disconnected) {
            self.input(TrustInput::Disconnected, now);
        }
        self.trust.applied(watermark, now.unix_ms);
        self.check_capacity(space, now);
        self.prove_loaded(now);
        self.finish_hold(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(seq: u64, bytes: usize) -> Message {
        Message::Batch { seq: EventSeq(seq), payload_hash: seq, payload: vec![0; bytes].into() }
    }

    #[test]
    fn messages_leave_in_order_and_the_one_too_many_is_kept() {
        let mut held = Held::new(Purpose::Load { begun: true }, HeldBytes::default());
        for seq in 0..HELD_MESSAGES_MAX as u64 {
            assert!(held.push(batch(seq, 1)), "{seq}");
        }
        assert!(!held.push(Message::Misframed(1)));
        for seq in 0..HELD_MESSAGES_MAX as u64 {
            assert_eq!(held.pop(), Some(batch(seq, 1)));
        }
        assert_eq!((held.pop(), held.pop(), held.bytes), (Some(Message::Misframed(1)), None, 0));
    }

    #[test]
    fn bytes_are_bounded_too_and_leave_with_their_message() {
        let mut held = Held::new(Purpose::Load { begun: true }, HeldBytes::default());
        assert!(held.push(batch(0, HELD_BYTES_MAX)));
        assert!(!held.push(batch(1, 1)));
        held.pop();
        assert_eq!(held.bytes, 1);
        assert!(held.push(batch(2, HELD_BYTES_MAX - 1)));
    }

    #[test]
    fn what_waits_is_matched_with_a_stream_by_its_bytes() {
        let remembered: Vec<_> = (90..=100).map(|seq| (EventSeq(seq), seq)).collect();
        let overlap = |messages: &[(u64, u64)]| {
            let mut held = Held::new(Purpose::Load { begun: true }, HeldBytes::default());
            for (seq, payload_hash) in messages {
                held.push(Message::Batch { seq: EventSeq(*seq), payload_hash: *payload_hash, payload: [].into() });
            }
            held.overlap(EventSeq(100), &remembered)
        };
        assert_eq!(overlap(&[]), Overlap::None);
        assert_eq!(overlap(&[(101, 5)]), Overlap::None);
        assert_eq!(overlap(&[(7, 5), (8, 5)]), Overlap::NotYet);
        assert_eq!(overlap(&[(7, 5), (101, 5)]), Overlap::NotYet, "a gap beyond the watermark shows nothing");
        assert_eq!(overlap(&[(89, 5), (90, 90), (91, 91), (101, 5)]), Overlap::Shown(3));
        assert_eq!(overlap(&[(90, 90), (3, 5), (91, 7)]), Overlap::Shown(1), "3 is of another incarnation");
        assert_eq!(overlap(&[(89, 5), (90, 91)]), Overlap::Contradicted);
    }

    #[test]
    fn it_is_released_once() {
        let mut held = Held::new(Purpose::Load { begun: false }, HeldBytes::default());
        assert!(!held.is_releasing() && held.release());
        assert!(held.is_releasing() && !held.release());
    }
}
