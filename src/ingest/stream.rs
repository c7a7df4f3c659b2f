//! One publisher's stream: from a sequence number and a payload to the index, the worker's trust and its counters.
//!
//! No socket and no clock: the shard has both.
//!
//! # The state of a stream
//!
//! [`StreamState`] says what happens to live messages. `hold` has the transitions.
//!
//! | state | live batch | dump or load begins | batches are missing | dump or load ends or is aborted | nothing is missing any more | no message waits | disconnected |
//! |---|---|---|---|---|---|---|---|
//! | Live | applied | Dumping, Loading | Recovering | – | Live | – | Live |
//! | Dumping, Loading | waits; may abort the dump or load | – | unchanged | Releasing; Recovering if a replay is wanted | – | unchanged | aborted; then as in the state that follows |
//! | Recovering | waits; the oldest are dropped beyond the limit | waits for Live | Recovering | – | Releasing | – | Live; the messages are dropped |
//! | Releasing | stays in its socket | waits for Live | Recovering | – | Releasing | Live | Live if it was Recovering, and the messages are dropped |
//!
//! Four further parts belong to the state. Each is a machine of its own:
//! - the sequence gate judges batches ([`crate::event::sequence_gate`]);
//! - `recovery` decides when to ask for a replay and what its answer means ([`crate::event::recovery`]; `recover`
//!   applies it). It is absent if the publisher cannot replay. It is not a part of [`StreamState`], because a probe
//!   runs while the stream is Live;
//! - a relay's snapshot is taken only while Recovering (`relay`), an engine's own while Loading (`engine_snapshot`);
//! - trust ([`crate::event::worker_trust`]).
//!
//! Beside these, `abort_reason` keeps the reason of an aborted dump or load until the dump or load has read it, and
//! `last_dropped` the last batch that was dropped while Recovering, which the replay has to bring.
//!
//! # The effect of a verdict where the publisher cannot replay
//!
//! `recover` has the same table for publishers that can.
//!
//! | event | the worker | trust |
//! |---|---|---|
//! | first batch, sequence 0 | | exact |
//! | first batch, later | | joined_late |
//! | duplicate | | |
//! | gap | emptied, then the batch is applied | gap |
//! | restart seen from 0 | emptied, then the batch is applied | exact |
//! | restart seen later | emptied, then the batch is applied | joined_late |
//! | disconnected | emptied | disconnected, until the next first batch |
//! | undecodable | emptied | undecodable |
//! | a batch of another rank or worker | emptied | rank_conflict |
//! | more blocks than the worker's capacity | emptied | capacity_bound |
//!
//! While messages wait, nothing of this happens until they are applied.
//!
//! After a gap, blocks whose chain begins in the missing batches stay unbound or dormant, so the worker can only be
//! under-counted. A batch that cannot be decoded is a gap of one: it may have held removals.

mod engine_snapshot;
mod hold;
mod recover;
mod relay;

pub(super) use hold::HeldBytes;
pub(super) use recover::ReplayEnd;

use std::sync::Arc;

use rustc_hash::FxHashSet;

use super::PublisherPlan;
use super::copies::{Copies, LastCopies};
use super::dump::AbortReason;
use super::groups::{Groups, Unplaced};
use super::lower_tiers::Offloaded;
use super::republish::Republisher;
use super::space_shard::SpaceShard;
use super::worker_view::WorkerView;
use crate::event::recovery::Recovery;
use crate::event::sequence_gate::{SequenceGate, Verdict};
use crate::event::worker_trust::{Flaw, TrustInput, WorkerTrust};
use crate::event::{self, DecodeError, DecodeWarning, EventBatch, flat};
use crate::fleet::SchemeCell;
use crate::hash;
use crate::ids::{EngineHash, EventSeq, GroupId, LocalHash, Tier, Worker, WorkerSlot};
use crate::index::{Refusal, Shortfall, StoreBlocks, StoreOutcome};
use crate::limits::{CONFLICTED_HASHES_MAX, EVENT_MESSAGE_BYTES_MAX};
use crate::metrics::WorkerCounter;
use crate::trust::{Trust, TrustReason};
use crate::watchdog::ThreadMark;
use engine_snapshot::OwnSnapshots;
use hold::{Message, StreamState};
use relay::RelayState;

/// The time of one quantum: wall-clock time for people, and time since the start for deadlines.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Now {
    pub(super) unix_ms: u64,
    pub(super) uptime_ms: u64,
}

/// Memory that the shard uses again from batch to batch.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) batch: EventBatch,
    pub(super) locals: Vec<LocalHash>,
    /// The mark of the shard's thread. Each batch is a round of it.
    pub(super) mark: Option<Arc<ThreadMark>>,
}

/// One publisher's stream.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) worker: Worker,
    pub(super) slot: WorkerSlot,
    pub(super) salts_possible: bool,
    pub(super) view: Arc<WorkerView>,
    /// The KV groups of the worker, and which of their blocks count.
    pub(super) kv_groups: Groups,
    /// References of window groups to blocks that are not known yet.
    pub(super) unplaced: Unplaced,
    /// Its engine's hashes do not show where a block is, so no block is bound.
    pub(super) unchained: bool,
    /// Hashes whose stores contradicted each other: a block that names one as its parent may mean either.
    pub(super) conflicted: Conflicted,
    /// Whether salts came without and with a gateway's prefix.
    salt_forms: (bool, bool),
    /// The scheme and the salt forms of the space, shared by all of its workers.
    space_scheme: Arc<SchemeCell>,
    /// The blocks that connectors announce in tiers below device memory.
    pub(super) offloaded: Offloaded,
    /// The KV groups of which each tier has had blocks since it was last empty, as the index counts them.
    pub(super) tier_groups: Vec<(Tier, GroupId)>,
    /// Distinguishes second copies from full reports.
    pub(super) copies: Copies,
    /// References to second copies that removals left behind.
    pub(super) last_copies: LastCopies,
    capacity_blocks: u64,
    gate: SequenceGate,
    pub(super) trust: WorkerTrust,
    /// The trust that readers see.
    shown: Trust,
    pub(super) format: Option<event::format::Format>,
    last_message_ms: Option<u64>,
    state: StreamState,
    /// Why the dump or load was aborted, until it has read the reason.
    abort_reason: Option<AbortReason>,
    /// Payload bytes that wait in all streams of the shard.
    held_of_shard: HeldBytes,
    /// The recovery of lost batches; `None` = the publisher cannot replay.
    recovery: Option<Recovery>,
    /// The last live batch that was dropped while Recovering: the replay has to bring it.
    last_dropped: Option<EventSeq>,
    /// The relay that the stream comes from, if it comes from one.
    relay: RelayState,
    /// The engine's own snapshots, if it sends some.
    own_snapshots: OwnSnapshots,
    /// Publishes the worker's changes again, in a relay.
    pub(super) republisher: Option<Box<Republisher>>,
    /// Whether something changed since the last [`Stream::show`].
    changed: bool,
    /// The trust that readers saw each time that the worker had just been emptied.
    #[cfg(test)]
    pub(super) emptied_under: Vec<Trust>,
}

impl Stream {
    pub(super) fn new(plan: &PublisherPlan, now: Now) -> Self {
        Self::with_trust_input(plan, None, now)
    }

    /// A stream whose trust begins with an input, which readers see at once.
    pub(super) fn with_trust_input(plan: &PublisherPlan, input: Option<TrustInput>, now: Now) -> Self {
        let mut trust = WorkerTrust::new(now.unix_ms);
        if let Some(input) = input {
            trust.apply(input, now.unix_ms);
        }
        let shown = trust.trust();
        plan.view.trust.store(shown);
        let mut this = Self {
            worker: plan.worker,
            slot: plan.slot,
            salts_possible: plan.salts_possible,
            view: Arc::clone(&plan.view),
            kv_groups: Groups::default(),
            unplaced: Unplaced::default(),
            unchained: false,
            conflicted: Conflicted::default(),
            salt_forms: (false, false),
            space_scheme: Arc::clone(&plan.scheme),
            offloaded: Offloaded::default(),
            tier_groups: Vec::new(),
            copies: Copies::default(),
            last_copies: LastCopies::default(),
            capacity_blocks: plan.capacity_blocks,
            gate: SequenceGate::default(),
            trust,
            shown,
            format: None,
            last_message_ms: None,
            state: StreamState::Live,
            abort_reason: None,
            held_of_shard: HeldBytes::default(),
            recovery: plan.source.replay.as_ref().map(|_| Recovery::default()),
            last_dropped: None,
            relay: RelayState::default(),
            own_snapshots: OwnSnapshots::default(),
            republisher: None,
            changed: false,
            #[cfg(test)]
            emptied_under: Vec::new(),
        };
        this.set_snapshots(plan.source.snapshots.as_ref().map(|of| of.proposal));
        this
    }

    /// Sets the number of blocks that fit the worker's device memory; 0 = not known. The next batch checks it.
    pub(super) fn set_capacity(&mut self, capacity_blocks: u64) {
        self.capacity_blocks = capacity_blocks;
    }

    /// Takes one message of the stream.
    pub(super) fn message(
        &mut self,
        space: &mut SpaceShard,
        scratch: &mut Scratch,
        seq: EventSeq,
        payload: &[u8],
        now: Now,
    ) {
        self.last_message_ms = Some(now.uptime_ms);
        if seq == flat::UNNUMBERED {
            return self.unnumbered(space, scratch, payload, now);
        }
        let payload_hash = hash::of_bytes(payload);
        if self.is_old_relay_batch((seq, payload_hash), payload, scratch) {
            self.input(TrustInput::Duplicate, now);
        } else if !self.state.is_live() {
            self.hold_message(space, Message::Batch { seq, payload_hash, payload: payload.into() }, now);
        } else if !self.holds_for_lost(space, (seq, payload_hash), payload, now) {
            self.batch(space, scratch, (seq, payload_hash), payload, now);
        }
    }

    /// Applies a live batch, if it is in its place.
    fn batch(&mut self, space: &mut SpaceShard, scratch: &mut Scratch, id: (EventSeq, u64), payload: &[u8], now: Now) {
        let verdict = self.gate.batch(id.0, id.1);
        self.apply_judged(space, scratch, (verdict, id.0), payload, now);
    }

    /// Carries out the gate's verdict on a batch, and applies the batch unless it was applied before.
    fn apply_judged(
        &mut self,
        space: &mut SpaceShard,
        scratch: &mut Scratch,
        (verdict, seq): (Verdict, EventSeq),
        payload: &[u8],
        now: Now,
    ) {
        self.changed = true;
        if !self.accept(space, verdict, now) {
            return;
        }
        space.writer.begin_batch(self.slot);
        self.copies.begin_batch();
        if payload.len() > EVENT_MESSAGE_BYTES_MAX {
            self.count(WorkerCounter::MessagesOversized, 1);
        }
        match event::decode(payload, &mut self.format, &mut scratch.batch) {
            Err(error) => self.undecodable(space, error, seq, now),
            Ok(()) if !self.is_ours(scratch.batch.info()) => {
                self.another_rank(scratch.batch.info(), seq, now);
                // The refused batch may have held removals of this worker's blocks: its publisher may have a new rank.
                self.empty(space, TrustInput::Flaw(Flaw::RankConflict), now);
            }
            Ok(()) if !self.is_of_generation(space, scratch.batch.info(), (seq, payload), now) => return,
            Ok(()) => {
                self.note_batch_facts(space, &scratch.batch, now);
                self.apply(space, scratch, now);
                if scratch.batch.info().warnings.get(DecodeWarning::UnknownTag) > 0 {
                    // A clear in this batch may have removed the reason, although the unknown event came after it.
                    self.lower_trust(Flaw::UnknownEvents, now);
                }
                self.count(WorkerCounter::Batches, 1);
                self.check_capacity(space, now);
            }
        }
        space.writer.end_batch(self.slot);
        self.trust.applied(seq, now.unix_ms);
        self.republish(|republisher| republisher.at(now));
        self.flush_republished(space);
    }

    /// Carries out a verdict; `false` = the batch is not to be applied.
    fn accept(&mut self, space: &mut SpaceShard, verdict: Verdict, now: Now) -> bool {
        match verdict {
            Verdict::InOrder => self.input(TrustInput::Batch, now),
            Verdict::First { seq, .. } => {
                self.note_beginning(seq);
                self.forget_incarnation();
                self.input(TrustInput::Joined(seq), now);
            }
            Verdict::Duplicate => {
                self.count(WorkerCounter::Duplicates, 1);
                self.input(TrustInput::Duplicate, now);
                return false;
            }
            Verdict::Gap { expected, got, missed } => {
                tracing::warn!(worker = %self.worker, %expected, %got, missed, "gap in the event stream; the worker is emptied");
                self.count(WorkerCounter::Gaps, 1);
                self.count(WorkerCounter::BatchesMissed, missed);
                self.empty(space, TrustInput::Gap, now);
            }
            Verdict::Restart { seq, before } => {
                tracing::info!(worker = %self.worker, %before, %seq, "the publisher restarted; the worker is emptied");
                self.note_beginning(seq);
                self.restart(space, TrustInput::Restarted(seq), now);
            }
        }
        true
    }

    /// Makes the worker that of another incarnation. This is the only place for the effect of a publisher's restart,
    /// however it showed: in a live batch, in a replay or in a relay's snapshot.
    fn restart(&mut self, space: &mut SpaceShard, because: TrustInput, now: Now) {
        self.changed = true;
        self.count(WorkerCounter::Restarts, 1);
        self.begin_anew(space, because, now);
    }

    /// Forgets all that is known of the stream and empties the worker.
    fn begin_anew(&mut self, space: &mut SpaceShard, because: TrustInput, now: Now) {
        self.forget_incarnation();
        self.empty(space, because, now);
    }

    /// Handles a broken connection, once all messages from before the break have been taken.
    pub(super) fn disconnected(&mut self, space: &mut SpaceShard, now: Now) {
        self.changed = true;
        self.count(WorkerCounter::Disconnects, 1);
        if self.recovery.is_some() {
            self.input(TrustInput::Disconnected, now);
            self.wait_for_connection();
        } else {
            self.gate.disconnected();
            self.empty(space, TrustInput::Disconnected, now);
        }
    }

    /// Lowers trust at once when the connection breaks. Messages of it, or already of the next one, may still wait;
    /// [`Stream::disconnected`] follows once they are taken.
    pub(super) fn breaking(&mut self, now: Now) {
        self.changed = true;
        self.input(TrustInput::Disconnected, now);
    }

    /// Handles a message without the frames of a batch. It may have been a batch: the next one shows that.
    pub(super) fn misframed(&mut self, space: &mut SpaceShard, frames: usize, now: Now) {
        if !self.state.is_live() {
            self.hold_message(space, Message::Misframed(frames), now);
        } else {
            self.unframed(frames, now);
        }
    }

    fn unframed(&mut self, frames: usize, now: Now) {
        self.changed = true;
        self.input(TrustInput::Misframed, now);
        self.count(WorkerCounter::MessagesMisframed, 1);
        let times = self.view.counters.get(WorkerCounter::MessagesMisframed);
        if times.is_power_of_two() {
            tracing::warn!(worker = %self.worker, frames, times, "a message without an 8-byte sequence number and a payload was skipped");
        }
    }

    /// Checks for silence. `silence_ms_max` 0 = a stream may be silent for ever.
    pub(super) fn tick(&mut self, silence_ms_max: u64, now: Now) {
        // Another worker of the space may have brought the second form.
        self.check_salt_forms(now);
        let silent_for = self.last_message_ms.map_or(0, |last| now.uptime_ms.saturating_sub(last));
        let silence_ms_max = self.silence_ms(silence_ms_max);
        if silence_ms_max > 0 && silent_for > silence_ms_max && self.gate.last().is_some() {
            self.last_message_ms = None;
            self.changed = true;
            tracing::info!(worker = %self.worker, silent_for_ms = silent_for, "the publisher has sent no message for longer than it may be silent");
            self.input(TrustInput::Silent, now);
        }
    }

    /// Ends the stream, for the reason that the input gives.
    pub(super) fn end(&mut self, input: TrustInput, now: Now) {
        self.input(input, now);
        self.shown = self.trust.trust();
        self.view.trust.store(self.shown);
    }

    /// Ends a quantum. Readers already see its batches in the index; now they see the trust that goes with them.
    pub(super) fn show(&mut self, space: &mut SpaceShard) {
        debug_assert!(self.recovery_will_end(), "{:?} {:?} {:?}", self.state, self.recovery, self.trust);
        self.view.gauges.set_waiting(self.state.waiting_len());
        if !std::mem::take(&mut self.changed) {
            return;
        }
        self.flush_republished(space);
        space.writer.publish();
        self.view.gauges.set(&space.writer.held(self.slot));
        self.shown = self.trust.trust();
        self.view.trust.store(self.shown);
    }

    /// Changes the trust. Readers see a fall at once, before the index changes, and a rise with [`Stream::show`].
    pub(super) fn input(&mut self, input: TrustInput, now: Now) {
        let Self { trust, shown, view, .. } = self;
        change_trust((trust, shown), view, input, now);
    }

    /// Lowers the trust for a flaw of a batch. The log says so once, until the reason has gone.
    pub(super) fn lower_trust(&mut self, flaw: Flaw, now: Now) {
        self.log_flaw(flaw);
        self.input(TrustInput::Flaw(flaw), now);
    }

    /// Lowers the trust for a flaw, and drops every block.
    pub(super) fn empty_because(&mut self, space: &mut SpaceShard, flaw: Flaw, now: Now) {
        self.log_flaw(flaw);
        self.empty(space, TrustInput::Flaw(flaw), now);
    }

    fn log_flaw(&self, flaw: Flaw) {
        if !self.trust.reasons().contains(flaw.reason()) {
            let reason = flaw.reason();
            tracing::warn!(worker = %self.worker, reason = reason.name(), remedy = reason.remedy(), "trust is lowered");
        }
    }

    pub(super) fn count(&self, counter: WorkerCounter, times: u64) {
        self.view.counters.add(counter, times);
    }

    /// Drops every block for the reason that the input gives. Trust falls first: by the pairing in
    /// [`TrustCell`](crate::fleet::TrustCell), no reader that finds the worker empty still sees the earlier trust.
    pub(super) fn empty(&mut self, space: &mut SpaceShard, because: TrustInput, now: Now) {
        self.input(because, now);
        self.relay.snapshot = None;
        let held = space.writer.held(self.slot);
        if held.bound > 0 || held.dormant > 0 {
            space.writer.clear(self.slot, None);
            #[cfg(test)]
            self.emptied_under.push(self.view.trust.load());
            self.count(WorkerCounter::Emptied, 1);
            self.republish(|republisher| republisher.cleared(None));
            self.tier_groups.clear();
        }
        self.forget_blocks(space);
    }

    /// Notes that the index has emptied the worker by itself.
    pub(super) fn emptied(&mut self, space: &mut SpaceShard) {
        self.count(WorkerCounter::Emptied, 1);
        self.republish(|republisher| republisher.cleared(None));
        self.tier_groups.clear();
        self.forget_blocks(space);
    }

    /// Forgets all facts about blocks that the index no longer holds.
    fn forget_blocks(&mut self, space: &mut SpaceShard) {
        self.offloaded.lose();
        self.copies.cleared();
        self.last_copies.cleared();
        self.windows_emptied(space);
    }

    /// Forgets all facts about the engine's current life. The gate is not touched.
    fn forget_incarnation(&mut self) {
        (self.relay.generation, self.relay.sends_heartbeats) = (None, false);
        self.format = None;
        self.kv_groups.forget();
        self.unchained = false;
        self.conflicted = Conflicted::default();
        self.offloaded = Offloaded::default();
        self.salt_forms = (false, false);
        self.last_copies = LastCopies::default();
    }

    /// Lowers trust if salts come in two forms in the space. To engines `x` and the prefixed `x` are two salts, and
    /// here they are one. So a prompt with one form may match blocks of the other, at any worker that has salted
    /// blocks.
    fn check_salt_forms(&mut self, now: Now) {
        let is_salted = self.salt_forms.0 || self.salt_forms.1;
        let is_lowered = self.trust.own_reasons().contains(TrustReason::IsolationUnknown);
        if is_salted && !is_lowered && self.space_scheme.has_salts_of_two_forms() {
            self.changed = true;
            self.lower_trust(Flaw::IsolationUnknown, now);
        }
    }

    fn undecodable(&mut self, space: &mut SpaceShard, error: DecodeError, seq: EventSeq, now: Now) {
        self.count(WorkerCounter::BatchesUndecodable, 1);
        let times = self.view.undecodable.add(error.reason as usize, 1);
        if times.is_power_of_two() {
            let (reason, offset) = (error.reason.name(), error.offset);
            tracing::warn!(worker = %self.worker, %seq, reason, offset, times, "an event batch could not be decoded; the worker is emptied");
        }
        self.empty_because(space, Flaw::Undecodable, now);
    }

    /// Counts the decoder's warnings, and notes a relay's own trust and the forms of salts.
    pub(super) fn note_batch_facts(&mut self, space: &mut SpaceShard, batch: &EventBatch, now: Now) {
        let info = batch.info();
        batch.unknown_names().for_each(|(of, name, times)| self.count_unknown_name(of, name, times));
        if let Some(source) = info.source {
            self.input(TrustInput::Source(source), now);
        }
        self.salt_forms.0 |= info.has_plain_salts;
        self.salt_forms.1 |= info.has_prefixed_salts;
        if info.has_plain_salts || info.has_prefixed_salts {
            self.space_scheme.note_salts(info.has_plain_salts, info.has_prefixed_salts);
        }
        self.check_salt_forms(now);
        if !info.warnings.is_empty() {
            self.note_warnings(space, batch, now);
        }
    }

    fn note_warnings(&mut self, space: &mut SpaceShard, batch: &EventBatch, now: Now) {
        for (warning, times) in batch.info().warnings.iter() {
            let times = u64::from(times);
            self.view.warnings.add(warning as usize, times);
            match warning {
                DecodeWarning::UnknownTag => {
                    self.count(WorkerCounter::UnknownTags, times);
                    self.lower_trust(Flaw::UnknownEvents, now);
                }
                DecodeWarning::UnchainedHash => self.unchained_hashes(space, now),
                DecodeWarning::LookaheadTokens => self.lower_trust(Flaw::LookaheadHash, now),
                DecodeWarning::NoPlaceForSalt if self.salts_possible => self.lower_trust(Flaw::IsolationUnknown, now),
                DecodeWarning::UnknownKey | DecodeWarning::UnknownValue => {
                    self.count(WorkerCounter::UnknownKeys, times);
                }
                DecodeWarning::TrailingElement => self.count(WorkerCounter::TrailingElements, times),
                // Other warnings belong to an event that is refused, and counted, later.
                _ => {}
            }
        }
    }

    /// Whether the engine may hold blocks that are not counted.
    pub(super) fn may_miss_blocks(&self) -> bool {
        self.trust.may_miss_blocks()
    }

    /// Whether a chain that is announced again counts as one more copy. After a full report it does not, until the
    /// engine's cache is cleared.
    pub(super) fn counts_copies(&self, space: &SpaceShard) -> bool {
        space.writer.counts_copies() && !self.trust.own_reasons().contains(TrustReason::FullReports)
    }

    /// Empties the worker after a full report: the chains that it announced are not copies, and earlier counted copies
    /// cannot be told from reports.
    pub(super) fn full_report(&mut self, space: &mut SpaceShard, now: Now) {
        self.count(WorkerCounter::FullReports, 1);
        self.empty_because(space, Flaw::FullReports, now);
    }

    fn check_capacity(&mut self, space: &mut SpaceShard, now: Now) {
        let references = space.writer.held(self.slot).references[Tier::Device.index()];
        if self.capacity_blocks > 0 && references > self.capacity_blocks {
            tracing::warn!(
                worker = %self.worker, references, capacity_blocks = self.capacity_blocks,
                "the engine announced more blocks than its device memory has; the worker is emptied"
            );
            if self.copies.has_counted {
                return self.full_report(space, now);
            }
            if self.has_left_copies() {
                return self.removals_are_for_all(space, now);
            }
            self.empty_because(space, Flaw::CapacityBound, now);
        }
    }

    /// Drops every block for a command. The engine still holds them, so the worker counts as joined late. Its stream
    /// goes on.
    pub(super) fn reset(&mut self, space: &mut SpaceShard, now: Now) {
        self.break_hold(space, AbortReason::Reset, now);
        self.changed = true;
        self.count(WorkerCounter::Resets, 1);
        tracing::info!(worker = %self.worker, "the worker is emptied by a reset");
        self.empty(space, TrustInput::Reset, now);
        self.show(space);
    }

    /// Drops the blocks in device memory for a command that says that the engine's cache was cleared. The engine
    /// publishes the clear only with its next step; until then, batches from before may come. The stream goes on.
    pub(super) fn device_cleared(&mut self, space: &mut SpaceShard, now: Now) {
        self.break_hold(space, AbortReason::Reset, now);
        self.changed = true;
        self.count(WorkerCounter::Resets, 1);
        tracing::info!(worker = %self.worker, "the worker's device tier is emptied: a caller reported that the engine's cache was cleared");
        self.input(TrustInput::ClearReported, now);
        space.writer.clear(self.slot, Some(Tier::Device));
        self.republish(|republisher| republisher.cleared(Some(Tier::Device)));
        self.tier_groups.retain(|(tier, _)| *tier != Tier::Device);
        self.copies.cleared();
        self.last_copies.cleared();
        self.show(space);
    }

    /// Stores blocks in the index. Trust falls before readers can see that the index defers or drops blocks.
    ///
    /// The index places deferred blocks later, in slices of its sweep. Until it is done, overlaps are too low. The
    /// shard calls [`Stream::swept`] after each sweep.
    pub(super) fn store_in_index(
        &mut self,
        space: &mut SpaceShard,
        blocks: &StoreBlocks<'_>,
        now: Now,
    ) -> StoreOutcome {
        let Self { trust, shown, view, .. } = self;
        let outcome = space.writer.store_announced(self.slot, blocks, &mut |shortfall| {
            let input = match shortfall {
                Shortfall::Deferred => TrustInput::Deferred,
                Shortfall::Emptied => TrustInput::Flaw(Flaw::CapacityBound),
            };
            change_trust((&mut *trust, &mut *shown), view, input, now);
        });
        if outcome.deferred {
            self.changed = true;
            space.deferring = true;
            tracing::debug!(worker = %self.worker, "the index places blocks later");
        }
        #[cfg(test)]
        if outcome.refused == Some(Refusal::WorkBound) {
            self.emptied_under.push(self.view.trust.load());
        }
        outcome
    }

    /// Updates the trust after a sweep has placed deferred blocks. Returns whether blocks still wait.
    pub(super) fn swept(&mut self, space: &mut SpaceShard, now: Now) -> bool {
        if !self.trust.is_deferring() {
            return false;
        }
        if space.writer.take_emptied_by_sweep(self.slot) {
            self.bounded(Refusal::WorkBound, now);
            self.emptied(space);
        }
        if space.writer.is_deferring(self.slot) {
            return true;
        }
        self.changed = true;
        self.input(TrustInput::DeferralEnded, now);
        self.show(space);
        false
    }

    #[cfg(test)]
    pub(super) fn reasons(&self) -> crate::trust::TrustReasons {
        self.trust.reasons()
    }
}

/// Changes a trust, and shows it at once if it falls.
fn change_trust((trust, shown): (&mut WorkerTrust, &mut Trust), view: &WorkerView, input: TrustInput, now: Now) {
    if trust.apply(input, now.unix_ms) {
        let fallen = trust.trust();
        shown.level = shown.level.min(fallen.level);
        shown.reasons = shown.reasons.union(fallen.reasons);
        shown.since_unix_ms = fallen.since_unix_ms;
        view.trust.store(*shown);
    }
}

/// Engine hashes that do not identify one block, because their stores contradicted each other.
#[derive(Debug, Default)]
pub(super) struct Conflicted {
    hashes: FxHashSet<EngineHash>,
    /// There are more than the limit, so any hash may be one.
    all: bool,
}

impl Conflicted {
    /// Any hash may be one of them.
    pub(super) fn any() -> Self {
        Self { hashes: FxHashSet::default(), all: true }
    }

    pub(super) fn contains(&self, hash: EngineHash) -> bool {
        self.all || self.hashes.contains(&hash)
    }

    pub(super) fn extend(&mut self, hashes: &[EngineHash]) {
        if self.all || self.hashes.len() + hashes.len() > CONFLICTED_HASHES_MAX {
            *self = Self::any();
        } else {
            self.hashes.extend(hashes);
        }
    }
}
