//! A relay's snapshot in the answer to a replay: the worker's whole view, put in place of everything known of it.
//!
//! Its parts come in order on one socket: begin, chunks, end. From the first on the worker is empty and is not believed;
//! at the end counts and digest must be those of what was stored. Then the stream goes on behind the watermark, as the
//! relay believes itself. A snapshot that does not come to that end leaves the worker empty, and is asked for again.

use super::{Home, Now, Scratch, Stream};
use crate::event::flat;
use crate::event::gate::SequenceGate;
use crate::event::trust::{Finding, TrustInput};
use crate::event::{
    BatchInfo, Content, EventBatch, KvEvent, Medium, Salt, Snapshot, SnapshotPhase, SourceTrust, Stored,
};
use crate::ids::EventSeq;
use crate::index::StoreBlocks;
use crate::ingest::References;
use crate::ingest::dump::AbortReason;
use crate::ingest::stream::Conflicted;
use crate::ingest::stream::recover::ReplayEnd;
use crate::metrics::WorkerCounter;
use crate::trust::{TrustLevel, TrustReason};

/// A snapshot of which not all has come.
#[derive(Debug)]
pub(super) struct Taking {
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
        home: &mut Home,
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
            SnapshotPhase::Begin => self.begin_snapshot(home, &scratch.batch, (part, generation), now),
            SnapshotPhase::Chunk => self.take_chunk(home, &scratch.batch, part, now),
            SnapshotPhase::End => self.end_snapshot(home, part, now),
        };
        if let Err(reason) = taken {
            self.fail_snapshot(home, reason, now);
        }
    }

    /// Empties the worker for what comes.
    fn begin_snapshot(
        &mut self,
        home: &mut Home,
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
        self.empty(home, TrustInput::Recovering, now);
        self.forget_incarnation();
        self.gate = SequenceGate::default();
        if let Some(own) = info.scheme {
            if home.relearns && home.holds_nothing() && home.scheme.get() != Some(own) {
                home.scheme.forget();
            }
            if home.scheme.learn(own) != own {
                self.count(WorkerCounter::StoresSchemeMismatch, 1);
                self.found(Finding::SchemeMismatch, now);
                return Err(AbortReason::SchemeMismatch);
            }
        }
        // One batch for all of it: what it says twice is held twice, and not announced again.
        home.writer.begin_batch(self.slot);
        for event in batch.events() {
            let KvEvent::Stored(Stored { medium: Medium::Tier(tier), group, .. }) = event else {
                return Err(AbortReason::Corrupt);
            };
            self.load_group(home, tier, group)?;
        }
        let least = SourceTrust { level: TrustLevel::Unproven, ..SourceTrust::default() };
        self.relayed.taking = Some(Box::new(Taking {
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

    fn take_chunk(&mut self, home: &mut Home, batch: &EventBatch, part: Snapshot, now: Now) -> Result<(), AbortReason> {
        // Out of its place while its stores are put in: whatever empties the worker meanwhile ends it.
        let Some(mut taking) = self.relayed.taking.take() else { return Err(AbortReason::Corrupt) };
        if (part.id, part.chunk) != (taking.id, taking.chunks) {
            return Err(AbortReason::Corrupt);
        }
        for event in batch.events() {
            let KvEvent::Stored(stored) = event else { return Err(AbortReason::Corrupt) };
            let blocks = hashed(&stored).ok_or(AbortReason::Corrupt)?;
            taking.stored.add(&blocks);
            self.load_store(home, &blocks, now)?;
        }
        taking.chunks += 1;
        self.relayed.taking = Some(taking);
        Ok(())
    }

    /// Goes on behind the watermark, if all is there.
    fn end_snapshot(&mut self, home: &mut Home, part: Snapshot, now: Now) -> Result<(), AbortReason> {
        let Some(taking) = self.relayed.taking.take() else { return Err(AbortReason::Corrupt) };
        let said = (part.id, part.chunks, References { blocks: part.blocks, digest: part.digest });
        if said != (taking.id, taking.chunks, taking.stored) {
            return Err(AbortReason::Corrupt);
        }
        self.groups.iter().for_each(|(_, group)| self.kinds.counted(*group));
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
        self.check_capacity(home, now);
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
    pub(super) fn fail_snapshot(&mut self, home: &mut Home, reason: AbortReason, now: Now) {
        self.relayed.taking = None;
        self.count(WorkerCounter::SnapshotsFailed, 1);
        self.view.transfers_aborted.add(reason as usize, 1);
        tracing::warn!(worker = %self.worker, reason = reason.name(), "a relay's snapshot was not taken; the worker is left empty");
        self.empty(home, TrustInput::Recovering, now);
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
    pub(super) fn end_within_snapshot(&mut self, home: &mut Home, end: ReplayEnd, now: Now) {
        let reason = if end == ReplayEnd::Marker { AbortReason::Corrupt } else { AbortReason::Stalled };
        self.fail_snapshot(home, reason, now);
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
