//! A stream that comes from a relay: its heartbeats, generations and snapshots.
//!
//! | event | effect |
//! |---|---|
//! | a heartbeat that names the last batch applied | the stream is whole, and not silent |
//! | a heartbeat that names a later batch | the last batches are lost: a gap, though no batch shows it |
//! | another generation, in a batch or heartbeat | a restart, also if sequence numbers go on |
//! | an earlier batch of the same generation that the gate does not remember | a duplicate: relays only count upwards |
//! | batches were missed for good, and the relay goes on | the daemon asks for all batches now and then |
//! | heartbeats have come, and then no message for several heartbeat intervals | silent |
//!
//! A relay may answer a replay with a snapshot: the worker's whole view, which replaces everything known of the worker.
//! Its parts come in order on one socket: begin, chunks, end. From the first part on the worker is empty and its trust
//! is `unproven`. At the end, count and digest must be those of the stored blocks. Then the stream goes on behind the
//! watermark, with the trust that the relay states. A snapshot that fails leaves the worker empty, and the daemon asks
//! for it again.

use xxhash_rust::xxh3::xxh3_64;

use super::hold::Message;
use super::recover::ReplayEnd;
use super::{Conflicted, Now, Scratch, Stream};
use crate::event::flat;
use crate::event::sequence_gate::{SequenceGate, Verdict};
use crate::event::worker_trust::{Flaw, TrustInput};
use crate::event::{
    BatchInfo, Content, EventBatch, KvEvent, Medium, Salt, Snapshot, SnapshotPhase, SourceTrust, Stored,
};
use crate::ids::EventSeq;
use crate::index::StoreBlocks;
use crate::ingest::References;
use crate::ingest::dump::AbortReason;
use crate::ingest::space_shard::SpaceShard;
use crate::limits::{RELAY_RESYNC_DOUBLINGS_MAX, RELAY_RESYNC_MS_MIN, RELAY_SILENT_MS_MAX};
use crate::metrics::WorkerCounter;
use crate::trust::{TrustLevel, TrustReason};

/// Reasons to trust a worker less than its relay does. A snapshot removes them.
const MISSED: [TrustReason; 3] = [TrustReason::JoinedLate, TrustReason::Gap, TrustReason::Undecodable];

/// The relay that a stream comes from.
#[derive(Debug, Default)]
pub(super) struct RelayState {
    /// The incarnation whose batches were applied; `None` if an engine publishes, or if no batch has come.
    pub(super) generation: Option<u64>,
    /// It has sent a heartbeat, and so will send more.
    pub(super) sends_heartbeats: bool,
    /// The snapshot that is being taken.
    pub(super) snapshot: Option<Box<IncomingSnapshot>>,
    /// When the daemon may ask for all batches once more.
    resync_at_ms: u64,
    /// How often it has asked in vain.
    resyncs: u32,
}

impl Stream {
    /// The generation whose batches were applied.
    #[cfg(test)]
    pub(in crate::ingest) const fn generation(&self) -> Option<u64> {
        self.relay.generation
    }

    /// How long the stream may be silent: a relay sends a message each second, and so do some engines.
    pub(super) fn silence_ms(&self, silence_ms_max: u64) -> u64 {
        let of_relay = self.relay.sends_heartbeats.then_some(RELAY_SILENT_MS_MAX);
        match of_relay.or(self.heartbeat_silence_ms()) {
            Some(of_heartbeats) if silence_ms_max == 0 || silence_ms_max > of_heartbeats => of_heartbeats,
            _ => silence_ms_max,
        }
    }

    /// Whether a batch belongs to this worker. A batch that names no worker and rank does.
    pub(super) fn is_ours(&self, info: &BatchInfo) -> bool {
        info.dp_rank.is_none_or(|rank| rank == self.worker.rank) && info.worker_id.is_none_or(|id| id == self.worker.id)
    }

    /// Refuses a batch of another worker or rank.
    pub(super) fn another_rank(&mut self, info: &BatchInfo, seq: EventSeq, now: Now) {
        self.count(WorkerCounter::RankConflicts, 1);
        let times = self.view.counters.get(WorkerCounter::RankConflicts);
        if times.is_power_of_two() {
            let (rank, id) = (info.dp_rank.map(|rank| rank.0), info.worker_id.map(|id| id.0));
            tracing::warn!(worker = %self.worker, %seq, ?rank, ?id, times, "a batch of another worker or rank was refused");
        }
        self.lower_trust(Flaw::RankConflict, now);
    }

    /// Handles a live message that is not a batch of the stream.
    pub(super) fn unnumbered(&mut self, space: &mut SpaceShard, scratch: &mut Scratch, payload: &[u8], now: Now) {
        if flat::decode(payload, &mut scratch.batch).is_err() {
            return self.count(WorkerCounter::MessagesUnnumbered, 1);
        }
        let info = *scratch.batch.info();
        if !self.is_ours(&info) {
            return self.another_rank(&info, flat::UNNUMBERED, now);
        }
        match (info.heartbeat_last_seq, info.generation) {
            (Some(last), Some(generation)) => self.heartbeat(space, last, generation, now),
            _ => self.count(WorkerCounter::MessagesUnnumbered, 1),
        }
    }

    fn heartbeat(&mut self, space: &mut SpaceShard, last: EventSeq, generation: u64, now: Now) {
        self.relay.sends_heartbeats = true;
        self.count(WorkerCounter::Heartbeats, 1);
        self.changed = true;
        self.input(TrustInput::Duplicate, now);
        if !self.state.is_live() {
            // The next heartbeat shows whether batches are missing behind the messages that wait.
            return;
        }
        if self.relay.generation.is_some_and(|known| known != generation) {
            tracing::info!(worker = %self.worker, "the relay restarted, and its batches are missing");
            return self.relay_restarted(space, last, now);
        }
        match self.gate.last() {
            Some(own) if own < last => self.tail_lost(space, last, now),
            None => self.tail_lost(space, last, now),
            Some(own) => {
                if own == last {
                    self.input(TrustInput::Batch, now);
                }
                if let Some(recovery) = &mut self.recovery {
                    recovery.live(now.uptime_ms);
                }
                self.resync(space, now);
            }
        }
    }

    /// Handles the loss of the last batches: the relay has sent them up to `last`.
    fn tail_lost(&mut self, space: &mut SpaceShard, last: EventSeq, now: Now) {
        let before = self.gate.last();
        tracing::warn!(worker = %self.worker, ?before, %last, "a heartbeat shows that the relay's last batches are lost");
        if let Some(recovery) = &mut self.recovery {
            recovery.begin(now.uptime_ms);
            self.count(WorkerCounter::Gaps, 1);
            return self.hold_for_recovery(self.gate.clone(), now);
        }
        let Some(next) = last.0.checked_add(1).map(EventSeq) else { return };
        let verdict = match before {
            Some(before) => Verdict::Gap { expected: EventSeq(before.0 + 1), got: next, missed: last.0 - before.0 },
            // The first batch was missed, whatever its number.
            None => Verdict::First { seq: EventSeq(last.0.max(1)), before: None },
        };
        self.accept(space, verdict, now);
        self.gate.go_on_before(next);
    }

    /// Handles another generation, of which `seq` is the first batch known.
    fn relay_restarted(&mut self, space: &mut SpaceShard, seq: EventSeq, now: Now) {
        if let Some(recovery) = &mut self.recovery {
            recovery.begin(now.uptime_ms);
            self.another_incarnation(space, seq, now);
            return self.hold_for_recovery(SequenceGate::default(), now);
        }
        let before = self.gate.last().unwrap_or_default();
        self.accept(space, Verdict::Restart { seq: EventSeq(seq.0.max(1)), before }, now);
        self.gate = SequenceGate::default();
        if let Some(next) = seq.0.checked_add(1) {
            self.gate.go_on_before(EventSeq(next));
        }
    }

    /// Notes the generation (the relay run) of a batch that is about to be applied, and handles a change of it. `false`
    /// = the generation is another one and can be replayed: do not apply the batch before the earlier batches of its
    /// generation have been fetched. Without a replay socket, the worker starts over with this batch, and the answer is
    /// `true`.
    pub(super) fn is_of_generation(
        &mut self,
        space: &mut SpaceShard,
        info: &BatchInfo,
        (seq, payload): (EventSeq, &[u8]),
        now: Now,
    ) -> bool {
        let Some(generation) = info.generation.filter(|generation| *generation != 0) else { return true };
        let known = self.relay.generation.replace(generation);
        if known.is_none_or(|known| known == generation) {
            return true;
        }
        let payload_hash = xxh3_64(payload);
        let is_live = !self.awaits_replay();
        if let Some(recovery) = &mut self.recovery {
            recovery.begin(now.uptime_ms);
            self.another_incarnation(space, seq, now);
            let mut ahead = SequenceGate::default();
            ahead.batch(seq, payload_hash);
            self.hold_for_recovery(ahead, now);
            if let Some(waiting) = self.state.waiting_mut().filter(|_| is_live) {
                waiting.put_back(Message::Batch { seq, payload_hash, payload: payload.into() });
                self.count(WorkerCounter::MessagesHeld, 1);
            }
            return false;
        }
        self.relay_restarted(space, seq, now);
        self.gate = SequenceGate::default();
        self.gate.batch(seq, payload_hash);
        self.relay.generation = Some(generation);
        true
    }

    /// Whether a batch is an old one of the relay, from before the last applied batch, however long ago.
    pub(super) fn is_old_relay_batch(
        &mut self,
        (seq, payload_hash): (EventSeq, u64),
        payload: &[u8],
        scratch: &mut Scratch,
    ) -> bool {
        let Some(generation) = self.relay.generation else { return false };
        let is_before = self.gate.last().is_some_and(|last| seq <= last);
        if !is_before || self.gate.payload_hash(seq) == Some(payload_hash) {
            return false;
        }
        // Rare: a remembered batch is recognised without decoding it.
        let is_old_relay_batch = flat::decode(payload, &mut scratch.batch).is_ok()
            && scratch.batch.info().generation == Some(generation)
            && self.gate.payload_hash(seq).is_none();
        self.count(WorkerCounter::Duplicates, u64::from(is_old_relay_batch));
        is_old_relay_batch
    }

    /// Asks for all batches if some were missed for good: a relay can send everything that it holds.
    fn resync(&mut self, space: &mut SpaceShard, now: Now) {
        let reasons = self.trust.own_reasons();
        if !MISSED.iter().any(|reason| reasons.contains(*reason)) {
            self.relay.resyncs = 0;
            return;
        }
        if now.uptime_ms < self.relay.resync_at_ms {
            return;
        }
        let Some(recovery) = &mut self.recovery else { return };
        recovery.begin(now.uptime_ms);
        let doublings = self.relay.resyncs.min(RELAY_RESYNC_DOUBLINGS_MAX);
        self.relay.resync_at_ms = now.uptime_ms + (RELAY_RESYNC_MS_MIN << doublings);
        self.relay.resyncs += 1;
        tracing::info!(worker = %self.worker, ?reasons, "batches of the relay were missed; the daemon asks for everything that it holds");
        self.count(WorkerCounter::Resyncs, 1);
        self.hold_for_recovery(SequenceGate::default(), now);
        self.empty(space, TrustInput::Recovering, now);
        self.gate = SequenceGate::default();
    }
}

/// A snapshot whose end has not come yet.
#[derive(Debug)]
pub(super) struct IncomingSnapshot {
    id: u64,
    generation: u64,
    source: SourceTrust,
    watermark: EventSeq,
    watermark_hash: u64,
    chunks: u32,
    stored: References,
}

impl Stream {
    /// Handles a message of a replay that is not a batch of the stream.
    pub(in crate::ingest) fn replayed_part(
        &mut self,
        space: &mut SpaceShard,
        scratch: &mut Scratch,
        payload: &[u8],
        now: Now,
    ) {
        if !self.awaits_replay() {
            return;
        }
        let decoded = flat::decode(payload, &mut scratch.batch);
        let info = *scratch.batch.info();
        let (Ok(()), Some(part), Some(generation), true) =
            (decoded, info.snapshot, info.generation, self.is_ours(&info))
        else {
            return self.count(WorkerCounter::ReplayFramesUnknown, 1);
        };
        self.changed = true;
        if let Some(recovery) = &mut self.recovery {
            recovery.snapshot_part(now.uptime_ms);
        }
        let taken = match part.phase {
            SnapshotPhase::Begin => self.begin_snapshot(space, &scratch.batch, (part, generation), now),
            SnapshotPhase::Chunk => self.take_chunk(space, &scratch.batch, part, now),
            SnapshotPhase::End => self.end_snapshot(space, part, now),
        };
        if let Err(reason) = taken {
            self.fail_snapshot(space, reason, now);
        }
    }

    /// Empties the worker for the snapshot.
    fn begin_snapshot(
        &mut self,
        space: &mut SpaceShard,
        batch: &EventBatch,
        (part, generation): (Snapshot, u64),
        now: Now,
    ) -> Result<(), AbortReason> {
        let info: &BatchInfo = batch.info();
        let known = self.relay.generation;
        tracing::info!(
            worker = %self.worker, watermark = %part.watermark, last = ?self.gate.last(),
            "the relay no longer has the missing batches and sends a snapshot; the worker is emptied for it"
        );
        if known == Some(generation) {
            // Live batches that were applied meanwhile have to come again if the snapshot does not contain them.
            self.last_dropped = self.last_dropped.max(self.gate.last());
        }
        self.hold_on_for_recovery(now);
        if known.is_some_and(|known| known != generation) {
            self.restart(space, TrustInput::Recovering, now);
        } else {
            self.begin_anew(space, TrustInput::Recovering, now);
        }
        self.gate = SequenceGate::default();
        if let Some(own) = info.scheme {
            if space.relearns && space.holds_nothing() && space.scheme.get() != Some(own) {
                space.scheme.forget();
            }
            if space.scheme.learn(own) != own {
                self.count(WorkerCounter::StoresSchemeMismatch, 1);
                self.lower_trust(Flaw::SchemeMismatch, now);
                return Err(AbortReason::SchemeMismatch);
            }
        }
        // One index batch for the whole snapshot: a block that it contains twice is held twice, not announced again.
        space.writer.begin_batch(self.slot);
        for event in batch.events() {
            let KvEvent::Stored(Stored { medium: Medium::Tier(tier), group, .. }) = event else {
                return Err(AbortReason::Corrupt);
            };
            self.load_group(space, tier, group)?;
        }
        let least = SourceTrust { level: TrustLevel::Unproven, ..SourceTrust::default() };
        self.relay.snapshot = Some(Box::new(IncomingSnapshot {
            id: part.id,
            generation,
            source: info.source.unwrap_or(least),
            watermark: part.watermark,
            watermark_hash: part.watermark_hash,
            chunks: 0,
            stored: References::default(),
        }));
        Ok(())
    }

    fn take_chunk(
        &mut self,
        space: &mut SpaceShard,
        batch: &EventBatch,
        part: Snapshot,
        now: Now,
    ) -> Result<(), AbortReason> {
        // Taken out while its stores are applied: anything that empties the worker meanwhile also ends the snapshot.
        let Some(mut taking) = self.relay.snapshot.take() else { return Err(AbortReason::Corrupt) };
        if (part.id, part.chunk) != (taking.id, taking.chunks) {
            return Err(AbortReason::Corrupt);
        }
        for event in batch.events() {
            let KvEvent::Stored(stored) = event else { return Err(AbortReason::Corrupt) };
            let blocks = hashed(&stored).ok_or(AbortReason::Corrupt)?;
            taking.stored.add(&blocks);
            self.load_store(space, &blocks, now)?;
        }
        taking.chunks += 1;
        self.relay.snapshot = Some(taking);
        Ok(())
    }

    /// Goes on behind the watermark, if the snapshot is whole.
    fn end_snapshot(&mut self, space: &mut SpaceShard, part: Snapshot, now: Now) -> Result<(), AbortReason> {
        let Some(taking) = self.relay.snapshot.take() else { return Err(AbortReason::Corrupt) };
        space.writer.end_batch(self.slot);
        let stated = (part.id, part.chunks, References { blocks: part.blocks, digest: part.digest });
        if stated != (taking.id, taking.chunks, taking.stored) {
            return Err(AbortReason::Corrupt);
        }
        self.tier_groups.iter().for_each(|(_, group)| self.kv_groups.counted(*group));
        if taking.source.reasons.contains(TrustReason::HashConflict) {
            // A snapshot does not say which hashes contradicted each other, so any hash may be one.
            self.conflicted = Conflicted::any();
        }
        self.relay.generation = Some(taking.generation);
        self.gate.resume(taking.watermark, &[(taking.watermark, taking.watermark_hash)]);
        self.input(TrustInput::Restarted(EventSeq(0)), now);
        self.input(TrustInput::Source(taking.source), now);
        self.input(TrustInput::Recovering, now);
        self.trust.applied(taking.watermark, now.unix_ms);
        self.drop_contained(taking.watermark);
        if let Some(recovery) = &mut self.recovery {
            recovery.snapshot_taken(now.uptime_ms);
        }
        self.count(WorkerCounter::SnapshotsTaken, 1);
        self.check_capacity(space, now);
        tracing::info!(worker = %self.worker, watermark = %taking.watermark, references = taking.stored.blocks, "snapshot taken");
        Ok(())
    }

    /// Drops live batches that wait and are in the snapshot: on one connection a relay only counts upwards.
    fn drop_contained(&mut self, watermark: EventSeq) {
        let Some(waiting) = self.state.waiting_mut() else { return };
        let mut contained = 0;
        while waiting.first_seq().is_some_and(|first| first <= watermark) {
            waiting.pop();
            contained += 1;
        }
        self.last_dropped = self.last_dropped.filter(|dropped| *dropped > watermark);
        self.count(WorkerCounter::Duplicates, contained);
    }

    /// Drops what has come of a snapshot. The daemon asks for it again.
    pub(super) fn fail_snapshot(&mut self, space: &mut SpaceShard, reason: AbortReason, now: Now) {
        self.relay.snapshot = None;
        self.count(WorkerCounter::SnapshotsFailed, 1);
        self.view.transfers_aborted.add(reason as usize, 1);
        tracing::warn!(worker = %self.worker, reason = reason.name(), "a relay's snapshot failed; the worker is left empty");
        self.empty(space, TrustInput::Recovering, now);
        self.gate = SequenceGate::default();
        if let Some(recovery) = &mut self.recovery {
            recovery.snapshot_failed(now.uptime_ms);
        }
        self.hold_on_for_recovery(now);
    }

    pub(in crate::ingest) const fn is_taking_snapshot(&self) -> bool {
        self.relay.snapshot.is_some()
    }

    /// Fails a snapshot whose replay ends before it.
    pub(super) fn end_within_snapshot(&mut self, space: &mut SpaceShard, end: ReplayEnd, now: Now) {
        let reason = if end == ReplayEnd::Marker { AbortReason::Corrupt } else { AbortReason::Stalled };
        self.fail_snapshot(space, reason, now);
    }
}

/// The blocks of a store of a relay, which has hashed them.
fn hashed<'a>(stored: &Stored<'a>) -> Option<StoreBlocks<'a>> {
    let (Content::LocalHashes(locals), Salt::Seed(seed), Medium::Tier(tier)) =
        (stored.content, stored.salt, stored.medium)
    else {
        return None;
    };
    Some(StoreBlocks { parent: stored.parent, hashes: stored.hashes, locals, tier, group: stored.group, seed })
}
