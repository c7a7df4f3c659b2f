//! The states of a stream in which its messages wait: while its worker is dumped or loaded, while lost batches are
//! fetched, and until the messages that waited have been applied in order. The table is in the parent module.
//!
//! The messages that wait are bounded for each worker, and by [`HeldBytes`] for all streams of a shard that recover.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Conflicted, Now, Scratch, Stream};
use crate::budget::Gauge;
use crate::event::SourceTrust;
use crate::event::sequence_gate::{SequenceGate, Verdict};
use crate::event::worker_trust::TrustInput;
use crate::hash;
use crate::ids::{EngineHash, EventSeq, GroupId, LocalHash, Tier};
use crate::index::{Refusal, StoreBlocks};
use crate::ingest::dump::{AbortReason, DumpBegin};
use crate::ingest::republish::Republisher;
use crate::ingest::space_shard::SpaceShard;
use crate::limits::{
    HELD_BYTES_MAX, HELD_MESSAGES_MAX, INGEST_QUANTUM_BYTES_MAX, INGEST_QUANTUM_MESSAGES_MAX, RECOVERY_HELD_BYTES_MAX,
};
use crate::metrics::WorkerCounter;
use crate::trust::{Trust, TrustLevel, TrustReason, TrustReasons};

/// What happens to the live messages of a stream.
#[derive(Debug, Default)]
pub(super) enum StreamState {
    /// They are applied as they come.
    #[default]
    Live,
    /// They wait while the worker's blocks are dumped. `ahead` is a copy of the gate that judges them already, so that
    /// a batch which will empty the worker aborts the dump at once.
    Dumping { ahead: Box<SequenceGate>, waiting: Waiting },
    /// They wait while a dump is loaded. Once the load has `begun`, the worker holds only blocks of the dump.
    Loading { begun: bool, waiting: Waiting },
    /// They wait while lost batches are fetched. `ahead` judges them already, so that another incarnation of the
    /// publisher shows at once.
    Recovering { ahead: Box<SequenceGate>, waiting: Waiting },
    /// Those that waited are being applied. New ones stay in the socket.
    Releasing { after_recovery: bool, waiting: Waiting },
}

impl StreamState {
    pub(super) const fn is_live(&self) -> bool {
        matches!(self, Self::Live)
    }

    pub(super) const fn is_recovering(&self) -> bool {
        matches!(self, Self::Recovering { .. })
    }

    pub(super) const fn is_releasing(&self) -> bool {
        matches!(self, Self::Releasing { .. })
    }

    pub(super) const fn waiting(&self) -> Option<&Waiting> {
        match self {
            Self::Live => None,
            Self::Dumping { waiting, .. }
            | Self::Loading { waiting, .. }
            | Self::Recovering { waiting, .. }
            | Self::Releasing { waiting, .. } => Some(waiting),
        }
    }

    pub(super) const fn waiting_mut(&mut self) -> Option<&mut Waiting> {
        match self {
            Self::Live => None,
            Self::Dumping { waiting, .. }
            | Self::Loading { waiting, .. }
            | Self::Recovering { waiting, .. }
            | Self::Releasing { waiting, .. } => Some(waiting),
        }
    }

    pub(super) fn waiting_len(&self) -> usize {
        self.waiting().map_or(0, Waiting::len)
    }

    /// The sequence number of the batch that waits longest.
    pub(super) fn first_seq(&self) -> Option<EventSeq> {
        self.waiting().and_then(Waiting::first_seq)
    }

    /// Leaves the state for Live, with the messages that wait.
    pub(super) fn take_waiting(&mut self) -> Option<Waiting> {
        match std::mem::take(self) {
            Self::Live => None,
            Self::Dumping { waiting, .. }
            | Self::Loading { waiting, .. }
            | Self::Recovering { waiting, .. }
            | Self::Releasing { waiting, .. } => Some(waiting),
        }
    }

    /// Recovers from now on. The messages that wait go on to wait.
    pub(super) fn recover(&mut self, ahead: SequenceGate, of_shard: &HeldBytes) {
        let waiting = self.take_waiting().unwrap_or_else(|| Waiting::new(of_shard.clone()));
        *self = Self::Recovering { ahead: Box::new(ahead), waiting };
    }

    /// Applies from now on the messages that wait.
    pub(super) fn release(&mut self) {
        let after_recovery = self.is_recovering() || matches!(self, Self::Releasing { after_recovery: true, .. });
        if let Some(waiting) = self.take_waiting() {
            *self = Self::Releasing { after_recovery, waiting };
        }
    }
}

/// Payload bytes that wait in all streams of a shard, and how many may. One thread counts them.
#[derive(Clone, Debug)]
pub(in crate::ingest) struct HeldBytes {
    bytes: Gauge,
    bytes_max: Arc<AtomicUsize>,
}

impl Default for HeldBytes {
    fn default() -> Self {
        Self { bytes: Gauge::default(), bytes_max: Arc::new(AtomicUsize::new(RECOVERY_HELD_BYTES_MAX)) }
    }
}

impl HeldBytes {
    /// Lowers the bound. Returns the gauge of the bytes.
    pub(in crate::ingest) fn bound(&self, bytes_max: usize) -> Gauge {
        // Relaxed, here and below: one thread reads and writes it, once the shard is on its thread.
        self.bytes_max.store(bytes_max.min(RECOVERY_HELD_BYTES_MAX), Ordering::Relaxed);
        self.bytes.clone()
    }

    /// The most bytes for all workers that recover.
    fn bytes_max(&self) -> usize {
        self.bytes_max.load(Ordering::Relaxed)
    }

    /// The most bytes for one worker: a quarter, which is also what the one dump or load takes on top.
    fn worker_bytes_max(&self) -> usize {
        HELD_BYTES_MAX.min(self.bytes_max() / 4)
    }

    fn get(&self) -> usize {
        self.bytes.get() as usize
    }
}

/// One message that waits.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// A batch, with the hash of its payload.
    Batch { seq: EventSeq, payload_hash: u64, payload: Box<[u8]> },
    /// This number of frames, which are not a batch.
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

/// What the messages that wait have in common with a stream that is known up to a watermark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Overlap {
    /// None of them is from before the watermark.
    None,
    /// This number of the oldest ones belong to that stream and are from before the watermark.
    Shown(usize),
    /// They are from before the watermark, and none of them is remembered. Later messages will show it.
    NotYet,
    /// They belong to another stream.
    Contradicted,
}

/// The messages that wait, the oldest first.
#[derive(Debug)]
pub(super) struct Waiting {
    messages: VecDeque<Message>,
    bytes: usize,
    of_shard: HeldBytes,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.of_shard.bytes.subtract(self.bytes as u64);
    }
}

impl Waiting {
    pub(super) const fn new(of_shard: HeldBytes) -> Self {
        Self { messages: VecDeque::new(), bytes: 0, of_shard }
    }

    /// Adds a message; `false` = it is beyond the limit. It is added all the same, so that no message is lost.
    pub(super) fn push(&mut self, message: Message) -> bool {
        self.count_bytes(&message);
        self.messages.push_back(message);
        self.messages.len() <= HELD_MESSAGES_MAX && self.bytes <= self.of_shard.worker_bytes_max()
    }

    /// Puts back the message that was popped last.
    pub(super) fn put_back(&mut self, message: Message) {
        self.count_bytes(&message);
        self.messages.push_front(message);
    }

    fn count_bytes(&mut self, message: &Message) {
        self.bytes += message.payload_bytes();
        self.of_shard.bytes.add(message.payload_bytes() as u64);
    }

    pub(super) fn len(&self) -> usize {
        self.messages.len()
    }

    /// Whether more messages wait than may while a worker is recovered.
    pub(super) fn is_over(&self) -> bool {
        self.messages.len() > HELD_MESSAGES_MAX
            || self.bytes > self.of_shard.worker_bytes_max()
            || (self.of_shard.get() > self.of_shard.bytes_max() && self.bytes > 0)
    }

    /// The sequence number of the batch that waits longest.
    pub(super) fn first_seq(&self) -> Option<EventSeq> {
        self.messages.iter().find_map(|message| match message {
            Message::Batch { seq, .. } => Some(*seq),
            Message::Misframed(_) => None,
        })
    }

    /// Drops all messages and returns how many there were.
    pub(super) fn clear(&mut self) -> usize {
        let messages = self.messages.len();
        while self.pop().is_some() {}
        messages
    }

    /// Drops the batches before `seq` that wait longest, and returns how many there were.
    pub(super) fn drop_before(&mut self, seq: EventSeq) -> usize {
        let messages = self.messages.len();
        while self.first_seq().is_some_and(|first| first < seq) {
            self.pop();
        }
        messages - self.messages.len()
    }

    /// The sequence numbers of the batches that wait, the oldest first.
    pub(super) fn seqs(&self) -> impl Iterator<Item = EventSeq> + '_ {
        self.messages.iter().filter_map(|message| match message {
            Message::Batch { seq, .. } => Some(*seq),
            Message::Misframed(_) => None,
        })
    }

    /// Takes the oldest messages, up to the first batch behind `watermark`. Returns the batches among them, with the
    /// hashes of their payloads.
    pub(super) fn take_up_to(&mut self, watermark: EventSeq) -> Vec<(EventSeq, u64)> {
        let mut taken = Vec::new();
        while self.first_seq().is_some_and(|first| first <= watermark) {
            if let Some(Message::Batch { seq, payload_hash, .. }) = self.pop() {
                taken.push((seq, payload_hash));
            }
        }
        taken
    }

    /// Takes the oldest message.
    pub(super) fn pop(&mut self) -> Option<Message> {
        let message = self.messages.pop_front()?;
        self.bytes -= message.payload_bytes();
        self.of_shard.bytes.subtract(message.payload_bytes() as u64);
        Some(message)
    }

    /// Compares the oldest messages with a stream whose last payloads up to the watermark are `remembered`, by
    /// ascending sequence number. Only a run of ascending sequence numbers counts: behind it another incarnation may
    /// speak.
    fn overlap(&self, watermark: EventSeq, remembered: &[(EventSeq, u64)]) -> Overlap {
        let (mut before, mut overlap) = (None, Overlap::None);
        for (at, message) in self.messages.iter().enumerate() {
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
}

impl Stream {
    /// Whether messages wait, or those that waited are being applied.
    pub(in crate::ingest) const fn is_held(&self) -> bool {
        !self.state.is_live()
    }

    /// Whether the messages that waited are being applied. No further message is to be received until that is done.
    pub(in crate::ingest) const fn is_releasing(&self) -> bool {
        self.state.is_releasing()
    }

    /// The gate that judges the applied batches.
    pub(in crate::ingest) const fn gate(&self) -> &SequenceGate {
        &self.gate
    }

    /// The trust of a copy of the worker's blocks: of a dump, and of a relay's stream. Neither contains blocks of
    /// window groups.
    pub(in crate::ingest) fn trust(&self) -> Trust {
        let mut trust = self.trust.trust();
        self.lack_windows(&mut trust.level, &mut trust.reasons);
        trust
    }

    /// The trust that the worker's blocks have wherever they are loaded.
    pub(in crate::ingest) fn view_of_blocks(&self) -> SourceTrust {
        let mut view = self.trust.view_of_blocks();
        self.lack_windows(&mut view.level, &mut view.reasons);
        view
    }

    /// Lowers the trust of a copy if the worker has window groups, because a copy lacks their blocks.
    fn lack_windows(&self, level: &mut TrustLevel, reasons: &mut TrustReasons) {
        if self.kv_groups.has_windows() {
            *level = TrustReason::Hybrid.cap().min(*level);
            reasons.insert(TrustReason::Hybrid);
        }
    }

    /// Holds messages for a dump from now on. Returns the last applied batch and the payloads that the gate remembers.
    pub(in crate::ingest) fn hold_for_dump(&mut self) -> (Option<EventSeq>, Vec<(EventSeq, u64)>) {
        self.abort_reason = None;
        self.cancel_optional();
        let ahead = Box::new(self.gate.clone());
        self.state = StreamState::Dumping { ahead, waiting: Waiting::new(self.held_of_shard.clone()) };
        (self.gate.last(), self.gate.remembered())
    }

    /// Holds messages for a load from now on. The worker does not change yet.
    pub(in crate::ingest) fn hold_for_load(&mut self) {
        self.abort_reason = None;
        self.cancel_optional();
        self.state = StreamState::Loading { begun: false, waiting: Waiting::new(self.held_of_shard.clone()) };
    }

    /// Holds a message. A message that shows that the worker is to be emptied, or is beyond the limit, aborts the dump
    /// or load.
    pub(super) fn hold_message(&mut self, space: &mut SpaceShard, message: Message, now: Now) {
        if self.is_recovering() {
            return self.wait_for_recovery(space, message, now);
        }
        let empties = match (&mut self.state, &message) {
            (StreamState::Dumping { ahead, .. }, Message::Batch { seq, payload_hash, .. }) => {
                match ahead.batch(*seq, *payload_hash) {
                    Verdict::Gap { .. } => Some(AbortReason::Gap),
                    Verdict::Restart { .. } => Some(AbortReason::Restarted),
                    Verdict::First { .. } | Verdict::InOrder | Verdict::Duplicate => None,
                }
            }
            _ => None,
        };
        let Some(waiting) = self.state.waiting_mut() else { return };
        let fits = waiting.push(message);
        self.count(WorkerCounter::MessagesHeld, 1);
        if let Some(reason) = empties.or((!fits).then_some(AbortReason::Overflow)) {
            self.break_hold(space, reason, now);
        }
    }

    /// Aborts the dump or load that runs. A load that had begun leaves the worker empty.
    pub(in crate::ingest) fn break_hold(&mut self, space: &mut SpaceShard, reason: AbortReason, now: Now) {
        let had_begun = match self.state {
            StreamState::Dumping { .. } => false,
            StreamState::Loading { begun, .. } => begun,
            StreamState::Live | StreamState::Recovering { .. } | StreamState::Releasing { .. } => return,
        };
        self.abort_reason = Some(reason);
        self.release_or_recover(now);
        if had_begun {
            self.changed = true;
            self.empty(space, TrustInput::LoadFailed, now);
        }
    }

    /// Why the dump or load was aborted; the next call returns `None`.
    pub(in crate::ingest) const fn take_abort_reason(&mut self) -> Option<AbortReason> {
        self.abort_reason.take()
    }

    /// Ends the dump or load: the messages that waited may be applied.
    pub(in crate::ingest) fn finish_hold(&mut self, now: Now) {
        self.release_or_recover(now);
    }

    /// Applies a bounded number of the messages that waited; `true` = none is left.
    pub(in crate::ingest) fn release(&mut self, space: &mut SpaceShard, scratch: &mut Scratch, now: Now) -> bool {
        let mut bytes = 0;
        for _ in 0..INGEST_QUANTUM_MESSAGES_MAX {
            // An applied batch may show that more was lost. Then the rest goes on to wait.
            if space.writer.is_choked() || bytes > INGEST_QUANTUM_BYTES_MAX || !self.is_releasing() {
                return false;
            }
            match self.release_one(space, scratch, now) {
                Some(payload_bytes) => bytes += payload_bytes,
                None => return true,
            }
        }
        false
    }

    /// Applies all messages that waited, up to one before which batches are missing. Not bounded.
    pub(in crate::ingest) fn release_all(&mut self, space: &mut SpaceShard, scratch: &mut Scratch, now: Now) {
        while self.is_releasing() && self.release_one(space, scratch, now).is_some() {}
    }

    /// Applies the oldest message and returns its payload bytes.
    fn release_one(&mut self, space: &mut SpaceShard, scratch: &mut Scratch, now: Now) -> Option<usize> {
        let Some(message) = self.state.waiting_mut()?.pop() else {
            self.state = StreamState::Live;
            return None;
        };
        match message {
            Message::Batch { seq, payload_hash, payload } => {
                let id = (seq, payload_hash);
                if self.is_old_relay_batch(id, &payload, scratch) {
                    return Some(payload.len());
                }
                if !self.holds_for_lost(space, id, &payload, now) {
                    self.batch(space, scratch, id, &payload, now);
                }
                Some(payload.len())
            }
            Message::Misframed(frames) => {
                self.unframed(frames, now);
                Some(0)
            }
        }
    }

    /// Empties the worker for the blocks of a dump, which are cut as `begin` says.
    ///
    /// # Errors
    /// The space has another scheme. Then the worker is unchanged.
    pub(in crate::ingest) fn begin_load(
        &mut self,
        space: &mut SpaceShard,
        begin: &DumpBegin,
        now: Now,
    ) -> Result<(), AbortReason> {
        if begin.scheme.is_some_and(|own| space.scheme.learn(own) != own) {
            return Err(AbortReason::SchemeMismatch);
        }
        if let StreamState::Loading { begun, .. } = &mut self.state {
            *begun = true;
        }
        self.changed = true;
        self.empty(space, TrustInput::Loading, now);
        self.republish(Republisher::note_unpublishable);
        // One index batch for the whole dump: a block that it contains twice is held twice, not announced again.
        space.writer.begin_batch(self.slot);
        begin.groups.iter().try_for_each(|(tier, group)| self.load_group(space, *tier, *group))
    }

    /// Registers a group in a tier: a block that this group lacks is then not held in the tier.
    pub(super) fn load_group(&mut self, space: &mut SpaceShard, tier: Tier, group: GroupId) -> Result<(), AbortReason> {
        // A block is stored and removed at once, while the worker has no other block that it could be mistaken for.
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
    /// The index refuses them, or the space has no scheme.
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
        let counter = match refusal {
            Refusal::MemoryBound => WorkerCounter::StoresMemoryBound,
            Refusal::BudgetBound => WorkerCounter::StoresMemoryShort,
            _ => WorkerCounter::StoresBounded,
        };
        self.count(counter, 1);
        tracing::warn!(worker = %self.worker, bound = refusal.name(), "the index refused blocks of a dump");
        AbortReason::Refused
    }

    /// Whether the applied batches and those that wait show that this is the dump's stream.
    pub(in crate::ingest) fn follows(&self, begin: &DumpBegin) -> bool {
        match self.overlap(begin) {
            Overlap::Shown(_) => true,
            Overlap::NotYet | Overlap::Contradicted => false,
            // The load has already compared the last applied batch, if the dump remembers it.
            Overlap::None => self.gate.last().is_none_or(|last| begin.remembered.iter().any(|(seq, _)| *seq == last)),
        }
    }

    /// Whether the messages that wait show that this is not the dump's stream.
    pub(in crate::ingest) fn contradicts(&self, begin: &DumpBegin) -> bool {
        self.overlap(begin) == Overlap::Contradicted
    }

    fn overlap(&self, begin: &DumpBegin) -> Overlap {
        match (self.state.waiting(), begin.watermark) {
            (Some(waiting), Some(watermark)) => waiting.overlap(watermark, &begin.remembered),
            _ => Overlap::None,
        }
    }

    /// Goes on behind the dump's watermark, with the messages that waited and are not in the dump.
    pub(in crate::ingest) fn loaded(&mut self, space: &mut SpaceShard, begin: &DumpBegin, now: Now) {
        space.writer.end_batch(self.slot);
        let Some(watermark) = begin.watermark else { return };
        self.changed = true;
        if let Some((_, watermark)) = begin.cut() {
            let remembered = self.pass_over_contained(watermark);
            self.go_on_behind(space, begin, (watermark, &remembered), now);
            // The lifetime has shown that the stream goes on there, so no replay has to.
            self.forget_losses();
            return self.finish_hold(now);
        }
        if let Overlap::Shown(contained) = self.overlap(begin) {
            // The dump may contain more of them than the gate remembers. The gate would mistake those for a restart.
            (0..contained).filter_map(|_| self.state.waiting_mut()?.pop()).for_each(drop);
            self.count(WorkerCounter::Duplicates, contained as u64);
        }
        self.go_on_behind(space, begin, (watermark, &begin.remembered), now);
        self.prove_loaded(now);
        self.finish_hold(now);
    }

    /// Makes the loaded blocks the worker's, and the watermark the last batch applied.
    fn go_on_behind(
        &mut self,
        space: &mut SpaceShard,
        begin: &DumpBegin,
        (watermark, remembered): (EventSeq, &[(EventSeq, u64)]),
        now: Now,
    ) {
        self.forget_incarnation();
        self.tier_groups.iter().for_each(|(_, group)| self.kv_groups.counted(*group));
        if begin.view.reasons.contains(TrustReason::HashConflict) {
            // A dump does not say which hashes contradicted each other, so any hash may be one.
            self.conflicted = Conflicted::any();
        }
        // A dump does not contain the references that waited.
        self.offloaded.are_lost = begin.trust.reasons.contains(TrustReason::OffloadUnbound);
        self.offloaded.has_connector = self.tier_groups.iter().any(|(tier, _)| *tier != Tier::Device);
        self.gate.resume(watermark, remembered);
        self.input(TrustInput::Loaded(begin.view), now);
        if begin.trust.reasons.contains(TrustReason::Disconnected) {
            self.input(TrustInput::Disconnected, now);
        }
        self.trust.applied(watermark, now.unix_ms);
        self.check_capacity(space, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(seq: u64, bytes: usize) -> Message {
        Message::Batch { seq: EventSeq(seq), payload_hash: seq, payload: vec![0; bytes].into() }
    }

    #[test]
    fn messages_leave_in_order_and_the_one_beyond_the_limit_is_kept() {
        let mut waiting = Waiting::new(HeldBytes::default());
        for seq in 0..HELD_MESSAGES_MAX as u64 {
            assert!(waiting.push(batch(seq, 1)), "{seq}");
        }
        assert!(!waiting.push(Message::Misframed(1)));
        for seq in 0..HELD_MESSAGES_MAX as u64 {
            assert_eq!(waiting.pop(), Some(batch(seq, 1)));
        }
        assert_eq!((waiting.pop(), waiting.pop(), waiting.bytes), (Some(Message::Misframed(1)), None, 0));
    }

    #[test]
    fn bytes_are_bounded_too_and_leave_with_their_message() {
        let mut waiting = Waiting::new(HeldBytes::default());
        assert!(waiting.push(batch(0, HELD_BYTES_MAX)));
        assert!(!waiting.push(batch(1, 1)));
        waiting.pop();
        assert_eq!(waiting.bytes, 1);
        assert!(waiting.push(batch(2, HELD_BYTES_MAX - 1)));
    }

    #[test]
    fn waiting_messages_are_matched_with_a_stream_by_their_bytes() {
        let remembered: Vec<_> = (90..=100).map(|seq| (EventSeq(seq), seq)).collect();
        let overlap = |messages: &[(u64, u64)]| {
            let mut waiting = Waiting::new(HeldBytes::default());
            for (seq, payload_hash) in messages {
                waiting.push(Message::Batch { seq: EventSeq(*seq), payload_hash: *payload_hash, payload: [].into() });
            }
            waiting.overlap(EventSeq(100), &remembered)
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
    fn messages_stay_through_every_change_of_state_and_their_bytes_leave_with_them() {
        let of_shard = HeldBytes::default();
        let gate = || Box::new(SequenceGate::default());
        let waiting = || {
            let mut waiting = Waiting::new(of_shard.clone());
            waiting.push(batch(1, 3));
            waiting
        };
        let states = [
            StreamState::Dumping { ahead: gate(), waiting: waiting() },
            StreamState::Loading { begun: true, waiting: waiting() },
            StreamState::Recovering { ahead: gate(), waiting: waiting() },
            StreamState::Releasing { after_recovery: true, waiting: waiting() },
            StreamState::Releasing { after_recovery: false, waiting: waiting() },
        ];
        for (mut state, was_recovering) in states.into_iter().zip([false, false, true, true, false]) {
            state.release();
            let StreamState::Releasing { after_recovery, .. } = state else { panic!("{state:?}") };
            assert_eq!((after_recovery, state.first_seq()), (was_recovering, Some(EventSeq(1))));
            state.recover(SequenceGate::default(), &of_shard);
            assert!(state.is_recovering() && state.waiting_len() == 1);
            assert!(state.take_waiting().is_some() && state.is_live());
        }
        assert_eq!(of_shard.get(), 0);
        let mut live = StreamState::Live;
        live.release();
        assert!(live.is_live() && live.waiting_len() == 0);
    }
}
