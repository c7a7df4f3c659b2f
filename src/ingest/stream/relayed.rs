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

use super::{Home, Now, Scratch, Stream};
use crate::event::BatchInfo;
use crate::event::flat;
use crate::event::gate::{SequenceGate, Verdict};
use crate::event::trust::{Finding, TrustInput};
use crate::ids::EventSeq;
use crate::ingest::held::Message;
use crate::ingest::stream::snapshot::Taking;
use crate::limits::{RELAY_RESYNC_DOUBLINGS_MAX, RELAY_RESYNC_MS_MIN, RELAY_SILENT_MS_MAX};
use crate::metrics::WorkerCounter;
use crate::trust::TrustReason;

use xxhash_rust::xxh3::xxh3_64;

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
    pub(super) taking: Option<Box<Taking>>,
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
        self.found(Finding::RankConflict, now);
    }

    /// Takes a live message that is no batch of the stream.
    pub(super) fn unnumbered(&mut self, home: &mut Home, scratch: &mut Scratch, payload: &[u8], now: Now) {
        if flat::decode(payload, &mut scratch.batch).is_err() {
            return self.count(WorkerCounter::MessagesUnnumbered, 1);
        }
        let info = *scratch.batch.info();
        if !self.is_ours(&info) {
            return self.another_rank(&info, flat::UNNUMBERED, now);
        }
        match (info.heartbeat_last_seq, info.generation) {
            (Some(last), Some(generation)) => self.heartbeat(home, last, generation, now),
            _ => self.count(WorkerCounter::MessagesUnnumbered, 1),
        }
    }

    fn heartbeat(&mut self, home: &mut Home, last: EventSeq, generation: u64, now: Now) {
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
            return self.restarted(home, last, now);
        }
        match self.gate.last() {
            Some(own) if own < last => self.tail_lost(home, last, now),
            None => self.tail_lost(home, last, now),
            Some(own) => {
                if own == last {
                    self.input(TrustInput::Batch, now);
                }
                if let Some(recovery) = &mut self.recovery {
                    recovery.live(now.uptime_ms);
                }
                self.resync(home, now);
            }
        }
    }

    /// Batches up to `last` were sent and have not come.
    fn tail_lost(&mut self, home: &mut Home, last: EventSeq, now: Now) {
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
        self.admit(home, verdict, now);
        self.gate.go_on_before(next);
    }

    /// Another generation speaks, of which `seq` is the first that is heard.
    fn restarted(&mut self, home: &mut Home, seq: EventSeq, now: Now) {
        if let Some(recovery) = &mut self.recovery {
            recovery.begin(now.uptime_ms);
            self.another_incarnation(home, seq, now);
            return self.hold_for_recovery(SequenceGate::default(), now);
        }
        let before = self.gate.last().unwrap_or_default();
        self.admit(home, Verdict::Restart { seq: EventSeq(seq.0.max(1)), before }, now);
        self.gate = SequenceGate::default();
        if let Some(next) = seq.0.checked_add(1) {
            self.gate.go_on_before(EventSeq(next));
        }
    }

    /// Looks at the generation of a batch that is in its place. `false` = it is of another, and is not to be applied
    /// until what it needs has been fetched.
    pub(super) fn is_of_generation(
        &mut self,
        home: &mut Home,
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
            self.another_incarnation(home, seq, now);
            let mut ahead = SequenceGate::default();
            ahead.batch(seq, payload_hash);
            self.hold_for_recovery(ahead, now);
            if let Some(held) = self.held.as_mut().filter(|_| is_live) {
                held.put_back(Message::Batch { seq, payload_hash, payload: payload.into() });
                self.count(WorkerCounter::MessagesHeld, 1);
            }
            return false;
        }
        self.restarted(home, seq, now);
        self.gate = SequenceGate::default();
        self.gate.batch(seq, payload_hash);
        self.relayed.generation = Some(generation);
        true
    }

    /// Whether a batch is one of the relay's that came before what was applied, however long ago.
    pub(super) fn is_old(
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
        let is_old = flat::decode(payload, &mut scratch.batch).is_ok()
            && scratch.batch.info().generation == Some(generation)
            && self.gate.payload_hash(seq).is_none();
        self.count(WorkerCounter::Duplicates, u64::from(is_old));
        is_old
    }

    /// Asks for everything where batches were missed for good: a relay can send all it holds.
    fn resync(&mut self, home: &mut Home, now: Now) {
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
        self.empty(home, TrustInput::Recovering, now);
        self.gate = SequenceGate::default();
    }
}
