//! What this router says about its own load: batches, heartbeats, and snapshots for routers that ask.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;

use super::digest::Digest;
use super::origins::OriginLoad;
use super::protocol::{Batch, Content, Heartbeat, MAJOR, SnapshotRequest, SnapshotSection};
use super::values::{Binding, Fingerprint, Gauge, Nonce, OriginId, Sender, SessionName, WorkerGauge};
use crate::ids::Worker;
use crate::limits::{
    LOAD_ANSWER_PAUSE_MS, LOAD_BATCH_MS_DEFAULT, LOAD_BEAT_PAUSE_MS, LOAD_BEGAN_LATER_MS, LOAD_BINDINGS_PENDING_MAX,
    LOAD_HEARTBEAT_MS, LOAD_MESSAGE_BINDINGS_MAX, LOAD_MESSAGE_GAUGES_MAX, LOAD_SNAPSHOT_BINDINGS_MAX,
    ORIGIN_WORKERS_MAX, ORIGINS_MAX,
};

/// How often a router speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublisherSettings {
    /// Time between two batches while something changes, milliseconds.
    pub batch_ms: u64,
    /// Time between two heartbeats, milliseconds.
    pub heartbeat_ms: u64,
}

impl Default for PublisherSettings {
    fn default() -> Self {
        Self { batch_ms: LOAD_BATCH_MS_DEFAULT, heartbeat_ms: LOAD_HEARTBEAT_MS }
    }
}

/// Why a request for a snapshot gets no answer. The asking router learns why from this router's messages.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum AnswerRefusal {
    /// Another router is asked.
    #[error("router {0} is asked")]
    OtherOrigin(OriginId),
    /// The asking router serves another fleet.
    #[error("the asking router serves another fleet ({0})")]
    Fingerprint(Fingerprint),
    /// The asking router reads other versions.
    #[error("the asking router reads versions {0} to {1}")]
    Version(u16, u16),
    /// It asks too often, or it is a recording of an earlier request.
    #[error("a snapshot was sent to that router just now")]
    TooSoon,
}

/// A gauge as it was sent.
#[derive(Clone, Copy, Debug)]
struct SentGauge {
    gauge: Gauge,
    sent_ms: u64,
}

impl SentGauge {
    /// Whether a gauge says something else, at `now_ms`, than this one with the time since then. Others know how a running
    /// prefill goes on and how recent work fades.
    fn differs(&self, gauge: &Gauge, now_ms: u64) -> bool {
        let of_running = |gauge: &Gauge| Gauge { elapsed_ns: 0, recent_share: 0.0, ..*gauge };
        let began_ms = |gauge: &Gauge, at_ms: u64| at_ms.saturating_sub(gauge.elapsed_ns / 1_000_000);
        let is_another = || {
            gauge.prefills > 0 && began_ms(gauge, now_ms) > began_ms(&self.gauge, self.sent_ms) + LOAD_BEGAN_LATER_MS
        };
        of_running(&self.gauge) != of_running(gauge) || self.gauge.is_zero() != gauge.is_zero() || is_another()
    }
}

/// The last answer to a router.
#[derive(Clone, Copy, Debug)]
struct LastAnswer {
    nonce: Nonce,
    at_ms: u64,
}

/// The messages of one incarnation of this router.
///
/// It remembers what it has sent, so that a snapshot, the digest and the batches always agree.
#[derive(Clone, Debug)]
pub struct Publisher {
    sender: Sender,
    settings: PublisherSettings,
    /// That of the last batch; 0 = none.
    sequence: u64,
    beat: u64,
    sent: BTreeMap<Worker, SentGauge>,
    digest: Digest,
    changed: BTreeSet<Worker>,
    /// Changed bindings, and when they were noted.
    bindings: BTreeMap<SessionName, (Binding, u64)>,
    bindings_dropped: u64,
    /// By the router that asked.
    answered: BTreeMap<OriginId, LastAnswer>,
    next_batch_ms: u64,
    next_beat_ms: u64,
    /// Before this time no listener causes a heartbeat.
    may_beat_ms: u64,
}

impl Publisher {
    /// A router that begins to speak. Its first heartbeat is due at once.
    #[must_use]
    pub const fn new(sender: Sender, settings: PublisherSettings, now_ms: u64) -> Self {
        Self {
            sender,
            settings,
            sequence: 0,
            beat: 0,
            sent: BTreeMap::new(),
            digest: Digest { sum: 0, count: 0 },
            changed: BTreeSet::new(),
            bindings: BTreeMap::new(),
            bindings_dropped: 0,
            answered: BTreeMap::new(),
            next_batch_ms: now_ms,
            next_beat_ms: now_ms,
            may_beat_ms: now_ms,
        }
    }

    /// The router itself.
    #[must_use]
    pub const fn sender(&self) -> &Sender {
        &self.sender
    }

    /// The last batch; 0 = none.
    #[must_use]
    pub const fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Of the gauges as of the last batch.
    #[must_use]
    pub const fn digest(&self) -> Digest {
        self.digest
    }

    /// The sum of the gauges as of the last batch.
    pub(super) fn load(&self) -> OriginLoad {
        self.sent.values().fold(OriginLoad::default(), |sum, sent| sum.with(&sent.gauge))
    }

    /// Bindings that were dropped because too many waited.
    #[must_use]
    pub const fn bindings_dropped(&self) -> u64 {
        self.bindings_dropped
    }

    /// Notes that a worker's own bookings changed, or that the worker left.
    pub fn note_changed(&mut self, worker: Worker) {
        self.changed.insert(worker);
    }

    /// Notes that a session was bound, used, or unbound.
    pub fn note_binding(&mut self, binding: Binding, now_ms: u64) {
        let is_full = self.bindings.len() >= LOAD_BINDINGS_PENDING_MAX;
        if is_full && !self.bindings.contains_key(&binding.session) {
            self.bindings_dropped += 1;
            return;
        }
        self.bindings.insert(binding.session, (binding, now_ms));
    }

    /// Notes that a router has connected, which then learns at once what it has missed: the next heartbeat comes soon.
    /// Connections without end do not cause heartbeats without end.
    pub fn note_listener(&mut self, now_ms: u64) {
        self.next_beat_ms = self.next_beat_ms.min(now_ms.max(self.may_beat_ms));
    }

    /// When [`Publisher::next_message`] may have a message, milliseconds.
    #[must_use]
    pub fn due_ms(&self) -> u64 {
        let has_changes = !self.changed.is_empty() || !self.bindings.is_empty();
        if has_changes { self.next_batch_ms.min(self.next_beat_ms) } else { self.next_beat_ms }
    }

    /// The next message that is due, for all routers. `gauge_of` reads what this router's bookings add to a worker now.
    ///
    /// Call it until there is none: more changes than fit into one batch come in several.
    pub fn next_message(&mut self, now_ms: u64, mut gauge_of: impl FnMut(Worker) -> Gauge) -> Option<Content> {
        if now_ms >= self.next_batch_ms
            && let Some(batch) = self.batch(now_ms, &mut gauge_of)
        {
            return Some(Content::Batch(batch));
        }
        if now_ms < self.next_beat_ms {
            return None;
        }
        self.next_beat_ms = now_ms + self.settings.heartbeat_ms;
        self.may_beat_ms = now_ms + LOAD_BEAT_PAUSE_MS;
        self.beat += 1;
        // What is left of workers without requests is recent work, which fades to nothing.
        self.changed.extend(self.sent.iter().filter(|(_, sent)| sent.gauge.requests == 0).map(|(worker, _)| *worker));
        Some(Content::Heartbeat(Heartbeat { beat: self.beat, sequence: self.sequence, digest: self.digest }))
    }

    fn batch(&mut self, now_ms: u64, gauge_of: &mut impl FnMut(Worker) -> Gauge) -> Option<Batch> {
        let mut gauges = Vec::new();
        while gauges.len() < LOAD_MESSAGE_GAUGES_MAX
            && let Some(worker) = self.changed.pop_first()
        {
            let gauge = gauge_of(worker).clamped();
            if self.set(worker, gauge, now_ms) {
                gauges.push(WorkerGauge { worker, gauge, age_ms: 0 });
            }
        }
        let mut bindings = Vec::new();
        while bindings.len() < LOAD_MESSAGE_BINDINGS_MAX
            && let Some((_, (binding, noted_ms))) = self.bindings.pop_first()
        {
            let unused_ms = binding.unused_ms.saturating_add(now_ms.saturating_sub(noted_ms));
            bindings.push(Binding { unused_ms, ..binding });
        }
        if self.changed.is_empty() && self.bindings.is_empty() {
            self.next_batch_ms = now_ms + self.settings.batch_ms;
        }
        if gauges.is_empty() && bindings.is_empty() {
            return None;
        }
        self.sequence += 1;
        Some(Batch { sequence: self.sequence, gauges, bindings })
    }

    /// Remembers a gauge as sent. Whether it is another one than before.
    fn set(&mut self, worker: Worker, gauge: Gauge, now_ms: u64) -> bool {
        let before = self.sent.get(&worker).copied().unwrap_or(SentGauge { gauge: Gauge::default(), sent_ms: now_ms });
        // More workers than others accept cannot be sent: this router has no more places for workers.
        let has_room = self.sent.len() < ORIGIN_WORKERS_MAX || !before.gauge.is_zero();
        if !before.differs(&gauge, now_ms) || !has_room {
            return false;
        }
        self.digest.remove(worker, &before.gauge);
        self.digest.add(worker, &gauge);
        if gauge.is_zero() {
            self.sent.remove(&worker);
        } else {
            self.sent.insert(worker, SentGauge { gauge, sent_ms: now_ms });
        }
        true
    }

    /// Answers a request for a snapshot: all gauges as of the last batch, and the bindings that this router knows, the
    /// latest used first, up to a bound. A router gets one at most every [`LOAD_ANSWER_PAUSE_MS`]. `bindings` is not read
    /// unless there is an answer.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn answer(
        &mut self,
        asking: &Sender,
        request: &SnapshotRequest,
        bindings: impl Iterator<Item = Binding>,
        now_ms: u64,
    ) -> Result<Vec<SnapshotSection>, AnswerRefusal> {
        if request.origin != self.sender.origin {
            return Err(AnswerRefusal::OtherOrigin(request.origin));
        }
        if asking.fingerprint != self.sender.fingerprint {
            return Err(AnswerRefusal::Fingerprint(asking.fingerprint));
        }
        if !(request.major_min..=request.major_max).contains(&MAJOR) {
            return Err(AnswerRefusal::Version(request.major_min, request.major_max));
        }
        if !self.may_answer(asking.origin, request.nonce, now_ms) {
            return Err(AnswerRefusal::TooSoon);
        }
        let age_ms = |sent_ms: u64| u32::try_from(now_ms.saturating_sub(sent_ms)).unwrap_or(u32::MAX);
        let row = |(worker, sent): (&Worker, &SentGauge)| WorkerGauge {
            worker: *worker,
            gauge: sent.gauge,
            age_ms: age_ms(sent.sent_ms),
        };
        let gauges: Vec<_> = self.sent.iter().map(row).collect();
        let bindings: Vec<_> = bindings.take(LOAD_SNAPSHOT_BINDINGS_MAX).collect();
        let (mut gauges, mut bindings) =
            (gauges.chunks(LOAD_MESSAGE_GAUGES_MAX), bindings.chunks(LOAD_MESSAGE_BINDINGS_MAX));
        let parts = gauges.len().max(bindings.len()).max(1) as u32;
        let section = |part| SnapshotSection {
            nonce: request.nonce,
            sequence: self.sequence,
            part,
            parts,
            digest: self.digest,
            gauges: gauges.next().map_or_else(Vec::new, <[_]>::to_vec),
            bindings: bindings.next().map_or_else(Vec::new, <[_]>::to_vec),
        };
        Ok((0..parts).map(section).collect())
    }

    /// Whether a router that asks may get an answer now. Notes that it gets one.
    fn may_answer(&mut self, asking: OriginId, nonce: Nonce, now_ms: u64) -> bool {
        if let Some(last) = self.answered.get(&asking) {
            let is_soon = now_ms.saturating_sub(last.at_ms) < LOAD_ANSWER_PAUSE_MS;
            if is_soon || last.nonce == nonce {
                return false;
            }
        } else if self.answered.len() >= 2 * ORIGINS_MAX {
            // Routers that asked long ago make room, so that restarted fleets with other numbers can ask.
            let oldest = self.answered.iter().min_by_key(|(_, last)| last.at_ms).map(|(origin, _)| *origin);
            oldest.map(|oldest| self.answered.remove(&oldest));
        }
        self.answered.insert(asking, LastAnswer { nonce, at_ms: now_ms });
        true
    }
}
