//! One publisher's stream: from a sequence and a payload to the index, the worker's trust and its counters.
//!
//! No socket and no clock: both are the shard's. What the gate's verdict does here where lost batches cannot be
//! fetched again (`recover` is for where they can):
//!
//! | what happened | the worker | trust |
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
//! While the worker is dumped or loaded its messages wait (`hold`), and nothing of this happens until they are
//! applied.
//!
//! After a gap, blocks whose chain begins in what was lost stay unbound or dormant, so the worker can
//! only be under-counted. A batch that cannot be decoded is a gap of one: it may have held removals.

mod hold;
mod recover;
mod relay;

pub(super) use hold::HeldBytes;
pub(super) use recover::ReplayEnd;

use std::sync::Arc;

use rustc_hash::FxHashSet;
use xxhash_rust::xxh3::xxh3_64;

use super::Publisher;
use super::copies::{Copies, LastCopies};
use super::dump::AbortReason;
use super::groups::{Groups, Unplaced};
use super::lower_tiers::Offloaded;
use super::republish::Republisher;
use super::view::WorkerView;
use crate::event::gate::{SequenceGate, Verdict};
use crate::event::recovery::Recovery;
use crate::event::trust::{Flaw, TrustInput, WorkerTrust};
use crate::event::{self, DecodeError, EventBatch, DecodeWarning, flat};
use crate::fleet::SchemeCell;
use crate::ids::{EngineHash, EventSeq, GroupId, LocalHash, SpaceId, Tier, Worker, WorkerSlot};
use crate::index::{Refusal, ShardWriter, Shortfall, StoreBlocks, StoreOutcome};
use crate::limits::{CONFLICTED_HASHES_MAX, EVENT_MESSAGE_BYTES_MAX};
use crate::metrics::WorkerCounter;
use crate::trust::{Trust, TrustReason};
use hold::{Held, Message};
use relay::Relayed;

/// The time of one turn: of the wall for people, and since boot for deadlines.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Now {
    pub(super) unix_ms: u64,
    pub(super) uptime_ms: u64,
}

/// One space in one shard: everything its workers there share.
#[derive(Debug)]
pub(super) struct SpaceShard {
    pub(super) space: SpaceId,
    pub(super) writer: ShardWriter,
    pub(super) scheme: Arc<SchemeCell>,
    /// Whether a learnt scheme may be learnt again once no worker holds anything.
    pub(super) relearns: bool,
    /// Whether the scheme was learnt from a block that came alone, and nothing has shown since that it was a full one.
    pub(super) unsure: bool,
    /// The workers, to tell when none holds anything.
    pub(super) slots: Vec<WorkerSlot>,
    /// Whether the writer has more to sweep.
    pub(super) unswept: bool,
    /// Whether events wait until the index has got memory back.
    pub(super) choked: bool,
    /// Whether a sweep may have more to say of a worker of which blocks waited for their places.
    pub(super) deferring: bool,
}

/// Memory that is used again from batch to batch.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) batch: EventBatch,
    pub(super) locals: Vec<LocalHash>,
}

/// One publisher's stream.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) worker: Worker,
    pub(super) slot: WorkerSlot,
    pub(super) salts_possible: bool,
    pub(super) view: Arc<WorkerView>,
    /// What its KV groups serve.
    pub(super) kv_groups: Groups,
    /// What its window groups have said of blocks that are not known yet.
    pub(super) unplaced: Unplaced,
    /// Its hashes do not tell where a block is: none is bound.
    pub(super) unchained: bool,
    /// Hashes whose stores contradicted each other: what names one as its parent may mean either.
    pub(super) conflicted: Conflicted,
    /// Whether salts came without and with a gateway's prefix.
    salt_forms: (bool, bool),
    /// What all workers of the space share.
    space_scheme: Arc<SchemeCell>,
    /// What connectors say of tiers below device memory.
    pub(super) offloaded: Offloaded,
    /// Groups that each tier has had blocks of since it was last empty, as the index counts them.
    pub(super) groups: Vec<(Tier, GroupId)>,
    /// How copies are told from full reports.
    pub(super) copies: Copies,
    /// What removals have left of copies.
    pub(super) last_copies: LastCopies,
    capacity_blocks: u64,
    gate: SequenceGate,
    pub(super) trust: WorkerTrust,
    /// What readers see.
    shown: Trust,
    pub(super) format: Option<event::format::Format>,
    last_message_ms: Option<u64>,
    /// Messages that wait while the worker is dumped or loaded.
    held: Option<Box<Held>>,
    /// Why they wait no longer, until the dump or load has heard of it.
    abort_reason: Option<AbortReason>,
    /// What all streams of the shard let wait.
    held_of_shard: HeldBytes,
    /// How lost batches are fetched again; `None` = they cannot be.
    recovery: Option<Recovery>,
    /// The last live batch dropped while the worker was recovered: the replay has to bring it.
    dropped: Option<EventSeq>,
    /// What is known of its relay, if it comes from one.
    relayed: Relayed,
    /// Who says what is done to the worker once more; `None` = nobody.
    republisher: Option<Box<Republisher>>,
    /// Whether something changed since the last [`Stream::show`].
    changed: bool,
    /// What readers saw of its trust each time that the worker had just been emptied.
    #[cfg(test)]
    pub(super) emptied_under: Vec<Trust>,
}

impl Stream {
    pub(super) fn new(publisher: &Publisher, now: Now) -> Self {
        Self::with_trust_input(publisher, None, now)
    }

    /// A stream whose trust begins with an input, which readers see from the first.
    pub(super) fn with_trust_input(publisher: &Publisher, input: Option<TrustInput>, now: Now) -> Self {
        let mut trust = WorkerTrust::new(now.unix_ms);
        if let Some(input) = input {
            trust.apply(input, now.unix_ms);
        }
        let shown = trust.trust();
        publisher.view.trust.store(shown);
        Self {
            worker: publisher.worker,
            slot: publisher.slot,
            salts_possible: publisher.salts_possible,
            view: Arc::clone(&publisher.view),
            kv_groups: Groups::default(),
            unplaced: Unplaced::default(),
            unchained: false,
            conflicted: Conflicted::default(),
            salt_forms: (false, false),
            space_scheme: Arc::clone(&publisher.scheme),
            offloaded: Offloaded::default(),
            groups: Vec::new(),
            copies: Copies::default(),
            last_copies: LastCopies::default(),
            capacity_blocks: publisher.capacity_blocks,
            gate: SequenceGate::default(),
            trust,
            shown,
            format: None,
            last_message_ms: None,
            held: None,
            abort_reason: None,
            held_of_shard: HeldBytes::default(),
            recovery: publisher.source.replay.as_ref().map(|_| Recovery::default()),
            dropped: None,
            relayed: Relayed::default(),
            republisher: None,
            changed: false,
            #[cfg(test)]
            emptied_under: Vec::new(),
        }
    }

    /// The worker has room for so many blocks; 0 = not known. What it holds beyond is seen with the next batch.
    pub(super) fn set_capacity(&mut self, capacity_blocks: u64) {
        self.capacity_blocks = capacity_blocks;
    }

    /// Takes one message of the stream.
    pub(super) fn message(&mut self, space: &mut SpaceShard, scratch: &mut Scratch, seq: EventSeq, payload: &[u8], now: Now) {
        self.last_message_ms = Some(now.uptime_ms);
        if seq == flat::UNNUMBERED {
            return self.unnumbered(space, scratch, payload, now);
        }
        let payload_hash = xxh3_64(payload);
        if self.is_old_relay_batch((seq, payload_hash), payload, scratch) {
            self.input(TrustInput::Duplicate, now);
        } else if self.held.is_some() {
            self.wait(space, Message::Batch { seq, payload_hash, payload: payload.into() }, now);
        } else if !self.holds_for_lost(space, (seq, payload_hash), payload, now) {
            self.batch(space, scratch, (seq, payload_hash), payload, now);
        }
    }

    /// Applies a live batch, if it is in its place.
    fn batch(&mut self, space: &mut SpaceShard, scratch: &mut Scratch, id: (EventSeq, u64), payload: &[u8], now: Now) {
        let verdict = self.gate.batch(id.0, id.1);
        self.apply_judged(space, scratch, (verdict, id.0), payload, now);
    }

    /// Does what the gate says of a batch, and applies it unless it was before.
    fn apply_judged(
        &mut self,
        space: &mut SpaceShard,
        scratch: &mut Scratch,
        (verdict, seq): (Verdict, EventSeq),
        payload: &[u8],
        now: Now,
    ) {
        self.changed = true;
        if !self.admit(space, verdict, now) {
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
                // The refused batch may have held removals of this worker's blocks: its publisher may have got
                // another rank.
                self.empty(space, TrustInput::Flaw(Flaw::RankConflict), now);
            }
            Ok(()) if !self.is_of_generation(space, scratch.batch.info(), (seq, payload), now) => return,
            Ok(()) => {
                self.note_batch_facts(space, &scratch.batch, now);
                self.apply(space, scratch, now);
                if scratch.batch.info().warnings.get(DecodeWarning::UnknownTag) > 0 {
                    // A clear in this batch may have come before it.
                    self.lower_trust(Flaw::UnknownEvents, now);
                }
                self.count(WorkerCounter::Batches, 1);
                self.check_capacity(space, now);
            }
        }
        self.trust.applied(seq, now.unix_ms);
        self.republish(|republisher| republisher.at(now));
        self.flush_republished(space);
    }

    /// Does what the gate says; `false` = the batch is not to be applied.
    fn admit(&mut self, space: &mut SpaceShard, verdict: Verdict, now: Now) -> bool {
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
                self.count(WorkerCounter::Restarts, 1);
                self.note_beginning(seq);
                self.forget_incarnation();
                self.empty(space, TrustInput::Restarted(seq), now);
            }
        }
        true
    }

    /// The connection broke, and everything received before has been taken.
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

    /// The connection broke, and there may be more to take of it or already of the next: nothing is believed
    /// until [`Stream::disconnected`].
    pub(super) fn breaking(&mut self, now: Now) {
        self.changed = true;
        self.input(TrustInput::Disconnected, now);
    }

    /// A message without the frames of a batch. Its sequence is unknown: the next batch shows whether it had one.
    pub(super) fn misframed(&mut self, space: &mut SpaceShard, frames: usize, now: Now) {
        if self.held.is_some() {
            self.wait(space, Message::Misframed(frames), now);
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
            tracing::warn!(worker = %self.worker, frames, times, "message without an 8-byte sequence and a payload skipped");
        }
    }

    /// Time has passed. `silence_ms_max` 0 = silence means nothing.
    pub(super) fn tick(&mut self, silence_ms_max: u64, now: Now) {
        // Another worker of the space may have been the one to bring the second form.
        self.check_salt_forms(now);
        let silent_for = self.last_message_ms.map_or(0, |heard| now.uptime_ms.saturating_sub(heard));
        let silence_ms_max = self.silence_ms(silence_ms_max);
        if silence_ms_max > 0 && silent_for > silence_ms_max && self.gate.last().is_some() {
            self.last_message_ms = None;
            self.changed = true;
            tracing::info!(worker = %self.worker, silent_for_ms = silent_for, "no event batch for longer than configured");
            self.input(TrustInput::Silent, now);
        }
    }

    /// Nothing will be taken any more, for the reason that the input gives.
    pub(super) fn end(&mut self, input: TrustInput, now: Now) {
        self.input(input, now);
        self.shown = self.trust.trust();
        self.view.trust.store(self.shown);
    }

    /// Ends a turn: the index shows what was taken already, and now so does the trust that speaks of it.
    pub(super) fn show(&mut self, space: &mut SpaceShard) {
        self.view.gauges.set_waiting(self.held.as_deref().map_or(0, Held::waiting));
        if !std::mem::take(&mut self.changed) {
            return;
        }
        self.flush_republished(space);
        space.writer.publish();
        self.view.gauges.set(&space.writer.held(self.slot));
        self.shown = self.trust.trust();
        self.view.trust.store(self.shown);
    }

    /// Moves the trust. A fall is shown at once, before the index changes; a rise waits for [`Stream::show`].
    pub(super) fn input(&mut self, input: TrustInput, now: Now) {
        let Self { trust, shown, view, .. } = self;
        move_trust((trust, shown), view, input, now);
    }

    /// Lowers the trust for a reason found in a batch; said once until the reason has gone again.
    pub(super) fn lower_trust(&mut self, flaw: Flaw, now: Now) {
        self.log_flaw(flaw);
        self.input(TrustInput::Flaw(flaw), now);
    }

    /// The same, and drops every block.
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

    /// Drops every block because of what the input says. Trust falls first: [`TrustCell`](crate::fleet::TrustCell) has
    /// the pairing by which no reader that finds the worker empty still believes it as before.
    pub(super) fn empty(&mut self, space: &mut SpaceShard, because: TrustInput, now: Now) {
        self.input(because, now);
        self.relayed.taking = None;
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

    /// The index has emptied the worker by itself.
    pub(super) fn emptied(&mut self, space: &mut SpaceShard) {
        self.count(WorkerCounter::Emptied, 1);
        self.republish(|republisher| republisher.cleared(None));
        self.tier_groups.clear();
        self.forget_blocks(space);
    }

    /// Forgets what is remembered of blocks that the index holds no more.
    fn forget_blocks(&mut self, space: &mut SpaceShard) {
        self.offloaded.lose();
        self.copies.cleared();
        self.last_copies.cleared();
        self.windows_emptied(space);
    }

    fn forget_incarnation(&mut self) {
        (self.relayed.generation, self.relayed.beats) = (None, false);
        self.format = None;
        self.kv_groups.forget();
        self.unchained = false;
        self.conflicted = Conflicted::default();
        self.offloaded = Offloaded::default();
        self.salt_forms = (false, false);
        self.last_copies = LastCopies::default();
    }

    /// To engines `x` and the prefixed `x` are two salts, and here they are one: where both forms come in a space, a
    /// prompt with one may find blocks of the other at any worker that has blocks with a salt.
    fn check_salt_forms(&mut self, now: Now) {
        let is_salted = self.salt_forms.0 || self.salt_forms.1;
        let is_said = self.trust.own_reasons().contains(TrustReason::IsolationUnknown);
        if is_salted && !is_said && self.space_scheme.has_salts_of_two_forms() {
            self.changed = true;
            self.lower_trust(Flaw::IsolationUnknown, now);
        }
    }

    fn undecodable(&mut self, space: &mut SpaceShard, error: DecodeError, seq: EventSeq, now: Now) {
        self.count(WorkerCounter::BatchesUndecodable, 1);
        let times = self.view.undecodable.add(error.reason as usize, 1);
        if times.is_power_of_two() {
            let (reason, offset) = (error.reason.name(), error.offset);
            tracing::warn!(worker = %self.worker, %seq, reason, offset, times, "event batch skipped; the worker is emptied");
        }
        self.empty_because(space, Flaw::Undecodable, now);
    }

    /// Counts what the decoder passed over and takes a relay's word about itself.
    fn note_batch_facts(&mut self, space: &mut SpaceShard, batch: &EventBatch, now: Now) {
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
        for (warning, times) in info.warnings.iter() {
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
                DecodeWarning::UnknownKey | DecodeWarning::UnknownValue => self.count(WorkerCounter::UnknownKeys, times),
                DecodeWarning::TrailingElement => self.count(WorkerCounter::TrailingElements, times),
                // The event they belong to is counted where it is refused.
                _ => {}
            }
        }
    }

    /// Whether the engine may hold blocks that are not counted.
    pub(super) fn may_miss_blocks(&self) -> bool {
        self.trust.may_miss_blocks()
    }

    /// Whether a chain that is announced again is one more copy. Once full reports were seen it is not, until the
    /// engine's cache is cleared.
    pub(super) fn counts_copies(&self, space: &SpaceShard) -> bool {
        space.writer.counts_copies() && !self.trust.own_reasons().contains(TrustReason::FullReports)
    }

    /// Chains were announced that are no copies. Which of the copies counted before were none cannot be told.
    pub(super) fn full_report(&mut self, space: &mut SpaceShard, now: Now) {
        self.count(WorkerCounter::FullReports, 1);
        self.empty_because(space, Flaw::FullReports, now);
    }

    fn check_capacity(&mut self, space: &mut SpaceShard, now: Now) {
        let references = space.writer.held(self.slot).references[Tier::Device.index()];
        if self.capacity_blocks > 0 && references > self.capacity_blocks {
            tracing::warn!(
                worker = %self.worker, references, capacity_blocks = self.capacity_blocks,
                "more blocks in device memory than the worker has; it is emptied"
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

    /// Drops every block. Its engine still holds them, so it is believed as one that was joined late; its stream goes
    /// on where it stands.
    pub(in crate::ingest) fn reset(&mut self, space: &mut SpaceShard, now: Now) {
        self.break_hold(space, AbortReason::Reset, now);
        self.changed = true;
        self.count(WorkerCounter::Resets, 1);
        tracing::info!(worker = %self.worker, "the worker is emptied, as was asked for");
        self.empty(space, TrustInput::Reset, now);
        self.show(space);
    }

    /// Drops what the device holds, because somebody says that its engine's cache was cleared. The engine publishes that
    /// with its next step only; until then batches from before may come. The stream goes on where it stands.
    pub(in crate::ingest) fn device_cleared(&mut self, space: &mut SpaceShard, now: Now) {
        self.break_hold(space, AbortReason::Reset, now);
        self.changed = true;
        self.count(WorkerCounter::Resets, 1);
        tracing::info!(worker = %self.worker, "the worker's device is emptied: its engine's cache was cleared, as somebody says");
        self.input(TrustInput::ClearTold, now);
        space.writer.clear(self.slot, Some(Tier::Device));
        self.republish(|republisher| republisher.cleared(Some(Tier::Device)));
        self.tier_groups.retain(|(tier, _)| *tier != Tier::Device);
        self.copies.cleared();
        self.last_copies.cleared();
        self.show(space);
    }

    /// Counts references in the index. The trust falls before readers see that the index defers or forgets blocks.
    pub(in crate::ingest) fn store_in_index(
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
            move_trust((&mut *trust, &mut *shown), view, input, now);
        });
        if outcome.deferred {
            self.changed = true;
            space.deferring = true;
            tracing::debug!(worker = %self.worker, "blocks wait for their places in the index");
        }
        #[cfg(test)]
        if outcome.refused == Some(Refusal::WorkBound) {
            self.emptied_under.push(self.view.trust.load());
        }
        outcome
    }

    /// The index was swept: takes note of what became of blocks that waited. Answers whether blocks still wait.
    pub(in crate::ingest) fn swept(&mut self, space: &mut SpaceShard, now: Now) -> bool {
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

/// Moves a trust, and shows it at once where it falls.
fn move_trust((trust, shown): (&mut WorkerTrust, &mut Trust), view: &WorkerView, input: TrustInput, now: Now) {
    if trust.apply(input, now.unix_ms) {
        let fallen = trust.trust();
        shown.level = shown.level.min(fallen.level);
        shown.reasons = shown.reasons.union(fallen.reasons);
        shown.since_unix_ms = fallen.since_unix_ms;
        view.trust.store(*shown);
    }
}

/// Engine hashes that are no identity, as far as they are remembered.
#[derive(Debug, Default)]
pub(in crate::ingest) struct Conflicted {
    hashes: FxHashSet<EngineHash>,
    /// There are more than can be remembered: any hash may be one.
    all: bool,
}

impl Conflicted {
    /// Any hash may be one.
    pub(in crate::ingest) fn any() -> Self {
        Self { hashes: FxHashSet::default(), all: true }
    }

    pub(in crate::ingest) fn contains(&self, hash: EngineHash) -> bool {
        self.all || self.hashes.contains(&hash)
    }

    pub(in crate::ingest) fn extend(&mut self, hashes: &[EngineHash]) {
        if self.all || self.hashes.len() + hashes.len() > CONFLICTED_HASHES_MAX {
            *self = Self::any();
        } else {
            self.hashes.extend(hashes);
        }
    }
}
