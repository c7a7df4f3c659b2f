//! A stream that comes from a relay: what heartbeats and generations show.
//!
//! | what happened | then |
//! |---|---|
//! | a heartbeat that names the last batch applied | the stream is whole, and not silent |
//! | a heartbeat that names a later one | its tail is lost: a gap, though no batch shows it |
//! | another generation, in a batch or heartbeat | a restart, also where sequences go on |
//! | a batch from before the last, not remembered, of the same generation | a duplicate: relays number onwards |
//! | batches were missed for good, and the relay goes on | everything is asked for, now and then |
//! | heartbeats have come, and then no message for some of them | silent |
//!
//! A relay's snapshot in the answer to a replay: the worker's whole view, put in place of everything known of it.
//!
//! Its parts come in order on one socket: begin, chunks, end. From the first on the worker is empty and is not believed;
//! at the end counts and digest must be those of what was stored. Then the stream goes on behind the watermark, as the
//! relay believes itself. A snapshot that does not come to that end leaves the worker empty, and is asked for again.

use xxhash_rust::xxh3::xxh3_64;

use super::hold::Message;
use super::recover::ReplayEnd;
use super::{Conflicted, SpaceShard, Now, Scratch, Stream};
use crate::event::flat;
use crate::event::gate::{SequenceGate, Verdict};
use crate::event::trust::{Flaw, TrustInput};
use crate::event::{
    BatchInfo, Content, EventBatch, KvEvent, Medium, Salt, Snapshot, SnapshotPhase, SourceTrust, Stored,
};
use crate::ids::EventSeq;
use crate::index::StoreBlocks;
use crate::ingest::References;
use crate::ingest::dump::AbortReason;
use crate::limits::{RELAY_RESYNC_DOUBLINGS_MAX, RELAY_RESYNC_MS_MIN, RELAY_SILENT_MS_MAX};
use crate::metrics::WorkerCounter;
use crate::trust::{TrustLevel, TrustReason};

/// Reasons to believe a worker less than its relay does, which a snapshot takes away.
const MISSED: [TrustReason; 3] = [TrustReason::JoinedLate, TrustReason::Gap, TrustReason::Undecodable];

/// What is known of the relay a stream comes from.
#[derive(Debug, Default)]
pub(super) struct Relayed {
    /// The incarnation whose batches were applied; `None` where an engine speaks, or nobody yet.
    pub(super) generation: Option<u64>,
    /// It has sent a heartbeat, and so will again.
    pub(super) beats: bool,
    /// The snapshot that is being taken.
    pub(super) taking: Option<Box<IncomingSnapshot>>,
    /// When everything may be asked for once more, and how often it was in vain.
    resync_at_ms: u64,
    resyncs: u32,
}

impl Stream {
    /// Whose batches were applied.
    #[cfg(test)]
    pub(in crate::ingest) const fn generation(&self) -> Option<u64> {
        self.relayed.generation
    }

    /// How long the stream may be silent: a relay has something to say each second.
    pub(super) const fn silence_ms(&self, silence_ms_max: u64) -> u64 {
        match (self.relayed.beats, silence_ms_max) {
            (false, _) => silence_ms_max,
            (true, 1..RELAY_SILENT_MS_MAX) => silence_ms_max,
            (true, _) => RELAY_SILENT_MS_MAX,
        }
    }

    /// Whether a batch is of this worker. Nothing said = yes.
    pub(super) fn is_ours(&self, info: &BatchInfo) -> bool {
        info.dp_rank.is_none_or(|rank| rank == self.worker.rank) && info.worker_id.is_none_or(|id| id == self.worker.id)
    }

    pub(super) fn another_rank(&mut self, info: &BatchInfo, seq: EventSeq, now: Now) {
        self.count(WorkerCounter::RankConflicts, 1);
        let times = self.view.counters.get(WorkerCounter::RankConflicts);
        if times.is_power_of_two() {
            let (rank, id) = (info.dp_rank.map(|rank| rank.0), info.worker_id.map(|id| id.0));
            tracing::warn!(worker = %self.worker, %seq, ?rank, ?id, times, "batch of another worker or rank refused");
        }
        self.lower_trust(Flaw::RankConflict, now);
    }

    /// Takes a live message that is no batch of the stream.
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
        self.relayed.beats = true;
        self.count(WorkerCounter::Heartbeats, 1);
        self.changed = true;
        self.input(TrustInput::Duplicate, now);
        if self.held.is_some() {
            // What is missing behind what waits shows with the next one.
            return;
        }
        if self.relayed.generation.is_some_and(|known| known != generation) {
            tracing::info!(worker = %self.worker, "the relay restarted, and its batches are missing");
            return self.restarted(space, last, now);
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

    /// Batches up to `last` were sent and have not come.
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
            // What came first was missed, whatever its number.
            None => Verdict::First { seq: EventSeq(last.0.max(1)), before: None },
        };
        self.admit(space, verdict, now);
        self.gate.go_on_before(next);
    }

    /// Another generation speaks, of which `seq` is the first that is heard.
    fn restarted(&mut self, space: &mut SpaceShard, seq: EventSeq, now: Now) {
        if let Some(recovery) = &mut self.recovery {
            recovery.begin(now.uptime_ms);
            self.another_incarnation(space, seq, now);
            return self.hold_for_recovery(SequenceGate::default(), now);
        }
        let before = self.gate.last().unwrap_or_default();
        self.admit(space, Verdict::Restart { seq: EventSeq(seq.0.max(1)), before }, now);
        self.gate = SequenceGate::default();
        if let Some(next) = seq.0.checked_add(1) {
            self.gate.go_on_before(EventSeq(next));
        }
    }

    /// Looks at the generation of a batch that is in its place. `false` = it is of another, and is not to be applied
    /// until what it needs has been fetched.
    pub(super) fn is_of_generation(
        &mut self,
        space: &mut SpaceShard,
        info: &BatchInfo,
        (seq, payload): (EventSeq, &[u8]),
        now: Now,
    ) -> bool {
        let Some(generation) = info.generation.filter(|generation| *generation != 0) else { return true };
        let known = self.relayed.generation.replace(generation);
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
            if let Some(held) = self.held.as_mut().filter(|_| is_live) {
                held.put_back(Message::Batch { seq, payload_hash, payload: payload.into() });
                self.count(WorkerCounter::MessagesHeld, 1);
            }
            return false;
        }
        self.restarted(space, seq, now);
        self.gate = SequenceGate::default();
        self.gate.batch(seq, payload_hash);
        self.relayed.generation = Some(generation);
        true
    }

    /// Whether a batch is one of the relay's that came before what was applied, however long ago.
    pub(super) fn is_old_relay_batch(
        &mut self,
        (seq, payload_hash): (EventSeq, u64),
        payload: &[u8],
        scratch: &mut Scratch,
    ) -> bool {
        let Some(generation) = self.relayed.generation else { return false };
        let is_before = self.gate.last().is_some_and(|last| seq <= last);
        if !is_before || self.gate.payload_hash(seq) == Some(payload_hash) {
            return false;
        }
        // Rare: what is remembered is told without being looked into.
        let is_old_relay_batch = flat::decode(payload, &mut scratch.batch).is_ok()
            && scratch.batch.info().generation == Some(generation)
            && self.gate.payload_hash(seq).is_none();
        self.count(WorkerCounter::Duplicates, u64::from(is_old_relay_batch));
        is_old_relay_batch
    }

    /// Asks for everything where batches were missed for good: a relay can send all it holds.
    fn resync(&mut self, space: &mut SpaceShard, now: Now) {
        let reasons = self.trust.own_reasons();
        if !MISSED.iter().any(|reason| reasons.contains(*reason)) {
            self.relayed.resyncs = 0;
            return;
        }
        if now.uptime_ms < self.relayed.resync_at_ms {
            return;
        }
        let Some(recovery) = &mut self.recovery else { return };
        recovery.begin(now.uptime_ms);
        let doublings = self.relayed.resyncs.min(RELAY_RESYNC_DOUBLINGS_MAX);
        self.relayed.resync_at_ms = now.uptime_ms + (RELAY_RESYNC_MS_MIN << doublings);
        self.relayed.resyncs += 1;
        tracing::info!(worker = %self.worker, ?reasons, "batches of the relay were missed; all it holds is asked for");
        self.count(WorkerCounter::Resyncs, 1);
        self.hold_for_recovery(SequenceGate::default(), now);
        self.empty(space, TrustInput::Recovering, now);
        self.gate = SequenceGate::default();
    }
}

/// A snapshot of which not all has come.
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
    /// Takes a message of a replay that is no batch of the stream.
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

    /// Empties the worker for what comes.
    fn begin_snapshot(
        &mut self,
        space: &mut SpaceShard,
        batch: &EventBatch,
        (part, generation): (Snapshot, u64),
        now: Now,
    ) -> Result<(), AbortReason> {
        let info: &BatchInfo = batch.info();
        let known = self.relayed.generation;
        tracing::info!(
            worker = %self.worker, watermark = %part.watermark, last = ?self.gate.last(),
            "what was asked for is gone; the relay sends a snapshot, and the worker is emptied for it"
        );
        self.count(WorkerCounter::Restarts, u64::from(known.is_some_and(|known| known != generation)));
        if known == Some(generation) {
            // What went on live while this was under way is to be brought again if it is not in it.
            self.dropped = self.dropped.max(self.gate.last());
        }
        self.hold_on_for_recovery(now);
        self.empty(space, TrustInput::Recovering, now);
        self.forget_incarnation();
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
        // One batch for all of it: what it says twice is held twice, and not announced again.
        space.writer.begin_batch(self.slot);
        for event in batch.events() {
            let KvEvent::Stored(Stored { medium: Medium::Tier(tier), group, .. }) = event else {
                return Err(AbortReason::Corrupt);
            };
            self.load_group(space, tier, group)?;
        }
        let least = SourceTrust { level: TrustLevel::Unproven, ..SourceTrust::default() };
        self.relayed.taking = Some(Box::new(IncomingSnapshot {
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

    fn take_chunk(&mut self, space: &mut SpaceShard, batch: &EventBatch, part: Snapshot, now: Now) -> Result<(), AbortReason> {
        // Out of its place while its stores are put in: whatever empties the worker meanwhile ends it.
        let Some(mut taking) = self.relayed.taking.take() else { return Err(AbortReason::Corrupt) };
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
        self.relayed.taking = Some(taking);
        Ok(())
    }

    /// Goes on behind the watermark, if all is there.
    fn end_snapshot(&mut self, space: &mut SpaceShard, part: Snapshot, now: Now) -> Result<(), AbortReason> {
        let Some(taking) = self.relayed.taking.take() else { return Err(AbortReason::Corrupt) };
        let said = (part.id, part.chunks, References { blocks: part.blocks, digest: part.digest });
        if said != (taking.id, taking.chunks, taking.stored) {
            return Err(AbortReason::Corrupt);
        }
        self.tier_groups.iter().for_each(|(_, group)| self.kv_groups.counted(*group));
        if taking.source.reasons.contains(TrustReason::HashConflict) {
            // Which hashes contradicted each other is not in it: any may be one.
            self.conflicted = Conflicted::any();
        }
        self.relayed.generation = Some(taking.generation);
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

    /// Live batches that wait and are in a snapshot: on one connection a relay numbers onwards.
    fn drop_contained(&mut self, watermark: EventSeq) {
        let Some(held) = &mut self.held else { return };
        let mut contained = 0;
        while held.first_seq().is_some_and(|first| first <= watermark) {
            held.pop();
            contained += 1;
        }
        self.dropped = self.dropped.filter(|dropped| *dropped > watermark);
        self.count(WorkerCounter::Duplicates, contained);
    }

    /// What came of a snapshot is worth nothing; it is asked for again.
    pub(super) fn fail_snapshot(&mut self, space: &mut SpaceShard, reason: AbortReason, now: Now) {
        self.relayed.taking = None;
        self.count(WorkerCounter::SnapshotsFailed, 1);
        self.view.transfers_aborted.add(reason as usize, 1);
        tracing::warn!(worker = %self.worker, reason = reason.name(), "a relay's snapshot was not taken; the worker is left empty");
        self.empty(space, TrustInput::Recovering, now);
        self.gate = SequenceGate::default();
        if let Some(recovery) = &mut self.recovery {
            recovery.snapshot_failed(now.uptime_ms);
        }
        self.hold_on_for_recovery(now);
    }

    /// Whether a snapshot has begun and not ended.
    pub(in crate::ingest) const fn is_taking_snapshot(&self) -> bool {
        self.relayed.taking.is_some()
    }

    /// The replay ends before its snapshot does.
    pub(super) fn end_within_snapshot(&mut self, space: &mut SpaceShard, end: ReplayEnd, now: Now) {
        let reason = if end == ReplayEnd::Marker { AbortReason::Corrupt } else { AbortReason::Stalled };
        self.fail_snapshot(space, reason, now);
    }
}

/// The blocks of a store that a relay has hashed.
fn hashed<'a>(stored: &Stored<'a>) -> Option<StoreBlocks<'a>> {
    let (Content::LocalHashes(locals), Salt::Seed(seed), Medium::Tier(tier)) =
        (stored.content, stored.salt, stored.medium)
    else {
        return None;
    };
    Some(StoreBlocks { parent: stored.parent, hashes: stored.hashes, locals, tier, group: stored.group, seed })
}
