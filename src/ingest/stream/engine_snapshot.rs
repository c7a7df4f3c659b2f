//! A stream whose engine sends snapshots of its own: the lifetime of its publisher, its heartbeats, and a snapshot that
//! is loaded into its worker.
//!
//! | event | effect |
//! |---|---|
//! | a batch of another lifetime | a restart, also if sequence numbers go on; a dump or load that runs is aborted |
//! | a batch without events (a heartbeat) | as any batch: its number shows whether batches are missing |
//! | heartbeats have come (vLLM), and then no message for several of their intervals | silent |
//! | a snapshot of another lifetime, or behind which the live stream does not go on | refused: the worker stays as it is |
//! | a snapshot that joins | the worker is emptied, the blocks are stored, and the stream goes on behind the watermark |
//!
//! A snapshot is loaded as a dump is ([`crate::ingest::dump`]). What differs is what shows that it is the stream's: not
//! remembered payloads but the lifetime. While messages wait for the load, all of them are of one lifetime, because
//! another one aborts it.

use super::{Now, Scratch, Stream};
use crate::event::sequence_gate::SequenceGate;
use crate::event::worker_trust::{Flaw, TrustInput};
use crate::event::{self, DecodeWarning, KvEvent, Stored};
use crate::ids::{EventSeq, Lifetime, SnapshotProposal};
use crate::ingest::dump::{AbortReason, DumpBegin};
use crate::ingest::space_shard::SpaceShard;
use crate::limits::ENGINE_HEARTBEAT_SILENT_MS_MAX;

/// What gets each store of a batch.
pub(in crate::ingest) type EachStore<'a> = &'a mut dyn FnMut(&Stored<'_>);

/// The engine's own snapshots, as its stream shows them.
#[derive(Debug, Default)]
pub(super) struct OwnSnapshots {
    /// The proposal that they follow; `None` = they are not used.
    proposal: Option<SnapshotProposal>,
    /// The lifetime of the last batch.
    lifetime: Option<Lifetime>,
}

impl OwnSnapshots {
    /// Forgets the lifetime: a replay has shown another incarnation, and its first live batch names its lifetime.
    pub(super) const fn forget_lifetime(&mut self) {
        self.lifetime = None;
    }
}

impl Stream {
    /// Sets which proposal the engine's snapshots follow.
    pub(in crate::ingest) fn set_snapshots(&mut self, proposal: Option<SnapshotProposal>) {
        if self.own_snapshots.proposal != proposal {
            self.own_snapshots = OwnSnapshots { proposal, lifetime: None };
        }
    }

    /// How long the stream may be silent, if its engine sends heartbeats.
    pub(super) fn heartbeat_silence_ms(&self) -> Option<u64> {
        let OwnSnapshots { proposal, lifetime } = self.own_snapshots;
        let beats = proposal == Some(SnapshotProposal::Vllm57789) && lifetime.is_some();
        beats.then_some(ENGINE_HEARTBEAT_SILENT_MS_MAX)
    }

    /// Notes the lifetime of a live batch that is about to be taken. Another one than before is a restart.
    pub(in crate::ingest) fn note_lifetime(
        &mut self,
        space: &mut SpaceShard,
        scratch: &mut Scratch,
        (lifetime, seq): (Lifetime, EventSeq),
        now: Now,
    ) {
        let known = self.own_snapshots.lifetime.replace(lifetime);
        if known.is_none_or(|known| known == lifetime) {
            return;
        }
        // What waits is of the lifetime that has ended.
        self.break_hold(space, AbortReason::Restarted, now);
        self.release_all(space, scratch, now);
        if let Some(waiting) = self.state.waiting_mut() {
            waiting.clear();
        }
        self.another_incarnation(space, seq, now);
        self.own_snapshots.lifetime = Some(lifetime);
        self.last_dropped = None;
        if let Some(recovery) = &mut self.recovery {
            recovery.begin(now.uptime_ms);
            self.hold_for_recovery(SequenceGate::default(), now);
        }
    }

    /// Whether a snapshot joins the live stream: `false` = the messages that wait do not show it yet.
    ///
    /// # Errors
    /// It is of another lifetime, older than what was applied, or the next message after it is missing.
    pub(in crate::ingest) fn joins(&self, cut: (Lifetime, EventSeq)) -> Result<bool, AbortReason> {
        let (lifetime, watermark) = cut;
        let last = self.gate.last();
        match self.own_snapshots.lifetime {
            None => return Ok(false),
            Some(own) if own != lifetime => return Err(AbortReason::OtherIncarnation),
            Some(_) => {}
        }
        if last.is_some_and(|last| last > watermark) {
            return Err(AbortReason::Outdated);
        }
        let (mut before, mut reached) = (last, last == Some(watermark));
        for seq in self.state.waiting().into_iter().flat_map(|waiting| waiting.seqs()) {
            if before.is_some_and(|before| seq <= before) {
                // Sent again; the gate skips it, or judges it.
                continue;
            }
            let is_next_missing = seq > watermark && before.is_none_or(|before| before <= watermark);
            if is_next_missing && watermark.0.checked_add(1) != Some(seq.0) {
                return Err(AbortReason::NotJoined);
            }
            (before, reached) = (Some(seq), reached || seq >= watermark);
        }
        Ok(reached)
    }

    /// Takes away the messages that wait and that the snapshot contains. Returns the payloads that the gate remembers
    /// behind it.
    pub(super) fn pass_over_contained(&mut self, watermark: EventSeq) -> Vec<(EventSeq, u64)> {
        let mut remembered = self.gate.remembered();
        let waiting = self.state.waiting_mut();
        let contained = waiting.map(|waiting| waiting.take_up_to(watermark)).unwrap_or_default();
        self.count(crate::metrics::WorkerCounter::Duplicates, contained.len() as u64);
        remembered.extend(contained);
        remembered.sort_unstable();
        remembered.dedup();
        remembered
    }

    /// Applies one batch of an engine's snapshot to a worker that holds nothing but earlier ones of it. `each_store` gets
    /// its stores.
    ///
    /// References are counted as they stand. The signs by which live events show full reports do not apply here, because
    /// a snapshot stores first and removes what is too much at its end.
    ///
    /// # Errors
    /// The batch cannot be decoded, is another rank's, or is none of a snapshot.
    pub(in crate::ingest) fn apply_snapshot_batch(
        &mut self,
        space: &mut SpaceShard,
        scratch: &mut Scratch,
        (payload, each_store): (&[u8], EachStore<'_>),
        now: Now,
    ) -> Result<(), AbortReason> {
        event::decode(payload, &mut self.format, &mut scratch.batch).map_err(|_| AbortReason::Corrupt)?;
        let Scratch { batch, locals, .. } = scratch;
        let info = *batch.info();
        if !self.is_ours(&info) || info.snapshot.is_some() || info.heartbeat_last_seq.is_some() {
            return Err(AbortReason::Corrupt);
        }
        self.note_batch_facts(space, batch, now);
        if info.warnings.get(DecodeWarning::UnknownTag) > 0 {
            self.lower_trust(Flaw::UnknownEvents, now);
        }
        for event in batch.events() {
            self.copies.cleared();
            self.last_copies.cleared();
            match event {
                KvEvent::Stored(stored) => {
                    each_store(&stored);
                    self.stored(space, &stored, info.scheme, locals, now);
                }
                KvEvent::Removed(removed) => self.removed(space, &removed, now),
                KvEvent::Cleared(_) => return Err(AbortReason::Corrupt),
            }
        }
        self.check_first_offloaded(now);
        if self.kv_groups.lacks_main() {
            self.lower_trust(Flaw::Hybrid, now);
        }
        Ok(())
    }

    /// Begins a worker that an engine's snapshot is built in: nothing of its stream is missing.
    pub(in crate::ingest) fn begin_built(&mut self, space: &mut SpaceShard, now: Now) {
        self.input(TrustInput::Joined(EventSeq(0)), now);
        space.writer.begin_batch(self.slot);
    }

    /// The KV groups that the worker has in each tier, and whether some of them are windows.
    pub(in crate::ingest) fn built(&self) -> (Vec<(crate::ids::Tier, crate::ids::GroupId)>, bool) {
        (self.tier_groups.clone(), self.kv_groups.has_windows())
    }
}

impl DumpBegin {
    /// Where an engine's snapshot ends, if this begins one.
    pub(in crate::ingest) fn cut(&self) -> Option<(Lifetime, EventSeq)> {
        self.lifetime.zip(self.watermark)
    }
}
