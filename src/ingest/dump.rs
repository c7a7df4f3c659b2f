//! A worker's blocks as a stream of parts: dumped from a running shard ([`IngestHandle::dump`]) and loaded into a
//! worker of another shard ([`IngestHandle::load`]).
//!
//! ```text
//! begin{watermark, remembered payloads, scheme, trust}  chunk*  (end{references, digest} | aborted{reason})
//! ```
//!
//! A dump contains the blocks that the worker held after its batch `watermark`, and no later change, although the shard
//! goes on. The shard walks the worker's blocks slice by slice, between the quanta of its publishers. Meanwhile the
//! worker's own messages wait in a bounded buffer, and replies about it name the watermark as their sequence number.
//! When the dump ends or fails, the messages are applied in order. A dump loses no message: if the buffer is full, or a
//! message shows that the worker is to be emptied, the dump is aborted.
//!
//! A load works the other way. The worker is emptied and is `unproven` until the end of the dump agrees with what was
//! stored. Then it goes on behind the watermark as the dumped stream would have. The dump carries the sequence gate's
//! remembered payloads, so a stream of another incarnation is recognised. A load that fails leaves the worker empty and
//! `joined_late`.
//!
//! A load from an engine's own snapshot changes the worker only once the snapshot is whole and joins the live stream
//! ([`IngestHandle::load_engine_snapshot`]). Until then the worker answers as before. If the load fails before, the worker
//! stays as it is.
//!
//! One dump or load runs in a shard at a time; others wait for it. If the worker's lost batches are being fetched, the
//! recovery ends first. Dumps and loads of other workers run meanwhile, and one that cannot begin within
//! [`TRANSFER_BEGIN_MS_MAX`] is aborted. Batches found missing during a dump or load are fetched afterwards. A
//! replay shows that a loaded stream goes on, at once or on connecting. Without a replay endpoint the worker is emptied
//! on connecting.
//!
//! [`IngestHandle::dump`]: super::IngestHandle::dump
//! [`IngestHandle::load`]: super::IngestHandle::load
//! [`IngestHandle::load_engine_snapshot`]: super::IngestHandle::load_engine_snapshot

use crossbeam::channel::{Receiver, Sender, TryRecvError, TrySendError, bounded};
use xxhash_rust::xxh3::xxh3_64;

use super::republish::Republished;
use super::space_shard::SpaceShard;
use super::stream::{Now, Stream};
use crate::event::SourceTrust;
use crate::event::sequence_gate::SequenceGate;
use crate::ids::{EngineHash, EventSeq, GroupId, Lifetime, LocalHash, Scheme, Seed, Tier, Worker};
use crate::index::{DumpCursor, StoreBlocks};
use crate::limits::{DUMP_PARTS_MAX, DUMP_SLICE_BLOCKS, TRANSFER_BEGIN_MS_MAX, TRANSFER_STALL_MS_MAX};
use crate::metrics::WorkerCounter;
use crate::reasons::reasons;
use crate::trust::Trust;

/// One part of a dump.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DumpPart {
    /// The first part.
    Begin(Box<DumpBegin>),
    /// Some of the blocks. A parent comes before its children.
    Chunk(DumpChunk),
    /// The last part of a whole dump: the sum over all chunks.
    End(References),
    /// The last part of an aborted dump. A channel that ends without a last part means the same.
    Aborted(AbortReason),
}

/// The head of a dump.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DumpBegin {
    /// The last batch whose events are contained; `None` = the stream had no batch.
    pub watermark: Option<EventSeq>,
    /// Hashes of the last payloads up to the watermark. They distinguish this publisher from another.
    pub remembered: Vec<(EventSeq, u64)>,
    /// How the blocks are cut and hashed, if known.
    pub scheme: Option<Scheme>,
    /// The KV groups of each tier, also those without a block: a tier holds a block only if all of its groups do.
    pub groups: Vec<(Tier, GroupId)>,
    /// The worker's trust when the dump began.
    pub trust: Trust,
    /// The trust that the blocks have wherever they are loaded: without the reasons that concern only the worker's
    /// connection, but never more than a relay said of them.
    pub view: SourceTrust,
    /// The lifetime of the publisher, if this is an engine's own snapshot. It shows whose stream goes on, in place of
    /// `remembered`.
    pub lifetime: Option<Lifetime>,
    /// In a relay: the last batch sent before, whose effect is contained too.
    pub republished: Option<Republished>,
}

/// The answers to a load: `Held` unless the load is refused at once, then one of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadAnswer {
    /// The worker's messages wait from now on. A dump taken elsewhere after this answer, with a watermark beyond
    /// `last`, contains every batch that was applied here.
    Held {
        /// The last batch that was applied.
        last: Option<EventSeq>,
    },
    /// The worker holds these references, and its stream goes on.
    Loaded(References),
    /// The worker is empty, or unchanged if nothing had been stored yet.
    Failed(AbortReason),
}

reasons! {
    /// Why a dump or a load was aborted.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    AbortReason {}
    /// The shard has no publisher for this worker.
    UnknownWorker = "unknown_worker";
    /// Too many dumps and loads wait in this shard already.
    Busy = "busy";
    /// More messages arrived during the dump or load than may wait.
    Overflow = "overflow";
    /// The receiver took no part, the sender sent none, or the worker's recovery did not end, for too long.
    Stalled = "stalled";
    /// The receiver or the sender is gone.
    PeerGone = "peer_gone";
    /// Batches are missing, so the worker is emptied.
    Gap = "gap";
    /// The publisher restarted, so the worker is emptied.
    Restarted = "restarted";
    /// The publisher's connection broke, so the worker is emptied.
    Disconnected = "disconnected";
    /// The worker was removed, or the shard's thread ended.
    WorkerRemoved = "worker_removed";
    /// A reset emptied the worker.
    Reset = "reset";
    /// Loading: the dump was aborted where it was taken.
    SourceAborted = "source_aborted";
    /// Loading: parts came in a wrong order, or the end does not agree with the chunks.
    Corrupt = "corrupt";
    /// Loading: the dump was taken before its stream had a batch, so no batch can follow it.
    NoWatermark = "no_watermark";
    /// Loading: the worker has applied batches after the watermark.
    Outdated = "outdated";
    /// Loading: the worker's batches differ from those that the dump remembers, or did not reach them in time.
    OtherIncarnation = "other_incarnation";
    /// Loading: the blocks are cut or hashed differently from the space's.
    SchemeMismatch = "scheme_mismatch";
    /// Loading: the index refused blocks. The log names the limit.
    Refused = "refused";
    /// Loading an engine's snapshot: the live stream does not go on where it ends.
    NotJoined = "not_joined";
    /// Loading an engine's snapshot: the engine says that it has none.
    Unavailable = "unavailable";
    /// Loading an engine's snapshot: the endpoint gave no whole answer in time.
    Unanswered = "unanswered";
    /// Loading an engine's snapshot: it has more bytes, parts or blocks than a snapshot may have.
    Oversized = "oversized";
    /// Loading an engine's snapshot: it names blocks, and the daemon does not know their tokens.
    UnknownContent = "unknown_content";
    /// Loading an engine's snapshot: the worker has window groups, or tiers that the snapshot does not tell apart.
    Unsupported = "unsupported";
}

/// The result of one step of a dump or load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// It made progress.
    Moved,
    /// It waits for its receiver or sender.
    Waits,
    /// It has ended. The messages that waited may be applied.
    Over,
}

/// The time since the receiver or sender last made progress.
#[derive(Debug, Default)]
struct StallTimer {
    since_ms: Option<u64>,
}

impl StallTimer {
    /// Notes progress.
    const fn renew(&mut self) {
        self.since_ms = None;
    }

    /// Notes that there was no progress. Returns whether that has lasted for too long.
    fn is_over(&mut self, now_ms: u64) -> bool {
        self.has_lasted(TRANSFER_STALL_MS_MAX, now_ms)
    }

    /// The same for one that cannot begin.
    fn cannot_begin(&mut self, now_ms: u64) -> bool {
        self.has_lasted(TRANSFER_BEGIN_MS_MAX, now_ms)
    }

    fn has_lasted(&mut self, ms: u64, now_ms: u64) -> bool {
        let since_ms = *self.since_ms.get_or_insert(now_ms);
        now_ms.saturating_sub(since_ms) >= ms
    }
}

/// Some stores of a dump.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DumpChunk {
    runs: Vec<Run>,
    hashes: Vec<EngineHash>,
    locals: Vec<LocalHash>,
}

/// One store without its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    parent: Option<EngineHash>,
    tier: Tier,
    group: GroupId,
    seed: Seed,
    /// The range of its blocks.
    from: usize,
    to: usize,
}

impl DumpChunk {
    /// Adds a store. Engine hashes without a local hash, and local hashes without an engine hash, are left out.
    pub fn push(&mut self, store: &StoreBlocks<'_>) {
        let from = self.hashes.len();
        let blocks = store.hashes.len().min(store.locals.len());
        self.hashes.extend(&store.hashes[..blocks]);
        self.locals.extend(&store.locals[..blocks]);
        let StoreBlocks { parent, tier, group, seed, .. } = *store;
        self.runs.push(Run { parent, tier, group, seed, from, to: self.hashes.len() });
    }

    /// Drops all stores but keeps the memory.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.hashes.clear();
        self.locals.clear();
    }

    /// The number of stores.
    #[must_use]
    pub const fn stores(&self) -> usize {
        self.runs.len()
    }

    /// The number of blocks of all stores.
    #[must_use]
    pub const fn blocks(&self) -> usize {
        self.hashes.len()
    }

    /// A store by its number.
    #[must_use]
    pub fn store(&self, number: usize) -> Option<StoreBlocks<'_>> {
        let Run { parent, tier, group, seed, from, to } = *self.runs.get(number)?;
        Some(StoreBlocks { parent, hashes: &self.hashes[from..to], locals: &self.locals[from..to], tier, group, seed })
    }
}

/// A number of references and a digest that does not depend on their order. Two dumps with equal values hold the same
/// references. It guards against loss and mix-ups, not against an adversary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct References {
    /// References: a block counts once for each time that a (tier, group) holds it.
    pub blocks: u64,
    /// The wrapping sum of their hashes.
    pub digest: u64,
}

impl References {
    /// Adds the references of one store.
    pub fn add(&mut self, store: &StoreBlocks<'_>) {
        let mut parent = store.parent;
        for (hash, local) in store.hashes.iter().zip(store.locals) {
            let mut bytes = [0; 38];
            // A block at the root differs from one whose parent has the hash 0.
            bytes[0] = u8::from(parent.is_some());
            bytes[1..9].copy_from_slice(&parent.unwrap_or_default().0.to_le_bytes());
            bytes[9..17].copy_from_slice(&hash.0.to_le_bytes());
            bytes[17..25].copy_from_slice(&local.0.to_le_bytes());
            bytes[25..33].copy_from_slice(&store.seed.0.to_le_bytes());
            bytes[33..37].copy_from_slice(&store.group.0.to_le_bytes());
            bytes[37] = store.tier as u8;
            self.blocks += 1;
            self.digest = self.digest.wrapping_add(xxh3_64(&bytes));
            parent = Some(*hash);
        }
    }
}

/// A dump that waits or runs.
#[derive(Debug)]
pub(in crate::ingest) struct Sending {
    parts: Sender<DumpPart>,
    begun: bool,
    cursor: DumpCursor,
    sent: References,
    stall: StallTimer,
}

impl Sending {
    /// A dump that has not begun, and the channel of its parts.
    pub(in crate::ingest) fn new() -> (Self, Receiver<DumpPart>) {
        // The last part has a place of its own, so it never finds the channel full.
        let (parts, received) = bounded(DUMP_PARTS_MAX + 1);
        let cursor = DumpCursor::default();
        let (sent, stall) = (References::default(), StallTimer::default());
        (Self { parts, begun: false, cursor, sent, stall }, received)
    }

    /// Whether the worker's messages already wait for this dump.
    pub(in crate::ingest) const fn has_begun(&self) -> bool {
        self.begun
    }

    /// Dumps one slice.
    pub(in crate::ingest) fn step(&mut self, stream: &mut Stream, space: &mut SpaceShard, now: Now) -> Step {
        if let Some(reason) = stream.take_abort_reason() {
            return self.abort(stream, space, reason, now);
        }
        if self.parts.len() >= DUMP_PARTS_MAX {
            if self.stall.is_over(now.uptime_ms) {
                return self.abort(stream, space, AbortReason::Stalled, now);
            }
            return Step::Waits;
        }
        if !self.begun {
            return self.begin(stream, space, now);
        }
        self.stall.renew();
        let (mut chunk, sent) = (DumpChunk::default(), &mut self.sent);
        let more = space.writer.dump(stream.slot, &mut self.cursor, DUMP_SLICE_BLOCKS, &mut |store| {
            chunk.push(&store);
            sent.add(&store);
        });
        if chunk.stores() > 0 && !self.send(DumpPart::Chunk(chunk)) {
            return self.abort(stream, space, AbortReason::PeerGone, now);
        }
        if more {
            return Step::Moved;
        }
        if !self.send(DumpPart::End(self.sent)) {
            return self.abort(stream, space, AbortReason::PeerGone, now);
        }
        stream.finish_hold(now);
        stream.count(WorkerCounter::Dumps, 1);
        tracing::info!(worker = %stream.worker, references = self.sent.blocks, "worker dumped");
        Step::Over
    }

    fn begin(&mut self, stream: &mut Stream, space: &mut SpaceShard, now: Now) -> Step {
        // Messages that waited for an earlier dump or a recovery are applied first. A block that gets its place during the
        // walk might be dumped twice, or not at all.
        if stream.is_held() || space.writer.is_deferring(stream.slot) {
            let is_over = self.stall.cannot_begin(now.uptime_ms);
            return if is_over { self.abort(stream, space, AbortReason::Stalled, now) } else { Step::Waits };
        }
        self.stall.renew();
        self.begun = true;
        let (watermark, remembered) = stream.hold_for_dump();
        stream.flush_republished(space);
        let republished = stream.republisher.as_ref().and_then(|republisher| republisher.last());
        let (scheme, groups) = (space.scheme.get(), stream.tier_groups.clone());
        let (trust, view) = (stream.trust(), stream.view_of_blocks());
        let begin = DumpBegin { watermark, remembered, scheme, groups, trust, view, republished, lifetime: None };
        if !self.send(DumpPart::Begin(Box::new(begin))) {
            return self.abort(stream, space, AbortReason::PeerGone, now);
        }
        Step::Moved
    }

    /// Aborts the dump.
    fn abort(&mut self, stream: &mut Stream, space: &mut SpaceShard, reason: AbortReason, now: Now) -> Step {
        if self.begun {
            stream.break_hold(space, reason, now);
            stream.take_abort_reason();
        }
        stream.view.transfers_aborted.add(reason as usize, 1);
        tracing::warn!(worker = %stream.worker, reason = reason.name(), "dump aborted; its worker's events go on");
        self.refuse(reason);
        Step::Over
    }

    /// Sends the reason as the last part.
    pub(in crate::ingest) fn refuse(&self, reason: AbortReason) {
        // The receiver may be gone, which is then the reason.
        let _ = self.parts.try_send(DumpPart::Aborted(reason));
    }

    /// Sends a part; `false` = the receiver is gone.
    fn send(&self, part: DumpPart) -> bool {
        match self.parts.try_send(part) {
            Ok(()) => true,
            Err(TrySendError::Disconnected(_)) => false,
            Err(TrySendError::Full(_)) => {
                debug_assert!(false, "a part was sent without room for it");
                false
            }
        }
    }
}

/// A load that waits or runs.
#[derive(Debug)]
pub(in crate::ingest) struct Loading {
    parts: Receiver<DumpPart>,
    answers: Sender<LoadAnswer>,
    /// It is an engine's own snapshot.
    is_of_engine: bool,
    holds: bool,
    begin: Option<Box<DumpBegin>>,
    /// Whether the worker has been emptied for the blocks.
    stores: bool,
    /// The chunk that is being stored, and the number of the next store in it.
    chunk: Option<(DumpChunk, usize)>,
    stored: References,
    /// Whether the end of the dump has come and agrees with the chunks.
    whole: bool,
    stall: StallTimer,
}

/// The result of one slice of a load.
enum Slice {
    /// All parts that came are stored.
    Stored,
    /// No part has come.
    Empty,
    /// The whole dump is stored.
    Whole(Box<DumpBegin>),
}

impl Loading {
    /// A load that has not begun, and the channel of its answers.
    pub(in crate::ingest) fn new(parts: Receiver<DumpPart>) -> (Self, Receiver<LoadAnswer>) {
        // Two answers at most, `Held` and the last one, so no answer finds the channel full.
        let (answers, answered) = bounded(2);
        (Self::of(parts, answers), answered)
    }

    /// As [`Loading::new`], with a channel for the answers.
    pub(super) fn of(parts: Receiver<DumpPart>, answers: Sender<LoadAnswer>) -> Self {
        let (stored, stall) = (References::default(), StallTimer::default());
        let (holds, stores, whole) = (false, false, false);
        Self { parts, answers, is_of_engine: false, holds, begin: None, stores, chunk: None, stored, whole, stall }
    }

    /// The same load, of an engine's own snapshot.
    pub(in crate::ingest) fn of_engine(self) -> Self {
        Self { is_of_engine: true, ..self }
    }

    /// Whether the worker's messages already wait for this load.
    pub(in crate::ingest) const fn has_begun(&self) -> bool {
        self.holds
    }

    /// Stores one slice.
    pub(in crate::ingest) fn step(&mut self, stream: &mut Stream, space: &mut SpaceShard, now: Now) -> Step {
        if let Some(reason) = stream.take_abort_reason() {
            return self.abort(stream, space, reason, now);
        }
        if !self.holds {
            // Messages that waited for an earlier dump or load or a recovery are applied first.
            if stream.is_held() {
                let is_over = self.stall.cannot_begin(now.uptime_ms);
                return if is_over { self.abort(stream, space, AbortReason::Stalled, now) } else { Step::Waits };
            }
            self.stall.renew();
            stream.hold_for_load();
            self.holds = true;
            stream.count(WorkerCounter::EngineSnapshotsAsked, u64::from(self.is_of_engine));
            self.answer(LoadAnswer::Held { last: stream.gate().last() });
        }
        let slice = self.slice(stream, space, now);
        stream.show(space);
        match slice {
            Err(reason) => self.abort(stream, space, reason, now),
            Ok(Slice::Stored) => {
                self.stall.renew();
                Step::Moved
            }
            Ok(Slice::Empty) if self.stall.is_over(now.uptime_ms) => {
                let reason = self.stalled();
                self.abort(stream, space, reason, now)
            }
            Ok(Slice::Empty) => Step::Waits,
            Ok(Slice::Whole(begin)) => {
                stream.loaded(space, &begin, now);
                stream.show(space);
                stream.count(WorkerCounter::Loads, 1);
                stream.count(WorkerCounter::EngineSnapshotsLoaded, u64::from(self.is_of_engine));
                let references = self.stored.blocks;
                tracing::info!(worker = %stream.worker, references, watermark = ?begin.watermark, "dump loaded");
                self.answer(LoadAnswer::Loaded(self.stored));
                Step::Over
            }
        }
    }

    fn slice(&mut self, stream: &mut Stream, space: &mut SpaceShard, now: Now) -> Result<Slice, AbortReason> {
        let mut blocks = 0;
        while blocks < DUMP_SLICE_BLOCKS {
            if self.whole {
                return self.follows(stream);
            }
            if let Some(begin) = self.begin.as_ref().filter(|_| !self.stores) {
                if !may_begin(begin, stream)? {
                    return Ok(if blocks == 0 { Slice::Empty } else { Slice::Stored });
                }
                stream.begin_load(space, begin, now)?;
                self.stores = true;
            }
            if let Some((chunk, number)) = &mut self.chunk {
                let Some(store) = chunk.store(*number) else {
                    self.chunk = None;
                    continue;
                };
                *number += 1;
                blocks += store.hashes.len().max(1);
                self.stored.add(&store);
                stream.load_store(space, &store, now)?;
                continue;
            }
            match (self.parts.try_recv(), self.begin.is_some()) {
                (Ok(DumpPart::Begin(begin)), false) => {
                    self.begin = Some(begin);
                    blocks += 1;
                }
                (Ok(DumpPart::Chunk(chunk)), true) => {
                    self.chunk = Some((chunk, 0));
                    blocks += 1;
                }
                (Ok(DumpPart::End(end)), true) if end == self.stored => self.whole = true,
                (Ok(DumpPart::Aborted(reason)), _) if self.is_of_engine => return Err(reason),
                (Ok(DumpPart::Aborted(_)), _) => return Err(AbortReason::SourceAborted),
                (Ok(_), _) => return Err(AbortReason::Corrupt),
                (Err(TryRecvError::Empty), _) if blocks == 0 => return Ok(Slice::Empty),
                (Err(TryRecvError::Empty), _) => return Ok(Slice::Stored),
                (Err(TryRecvError::Disconnected), _) => return Err(AbortReason::PeerGone),
            }
        }
        Ok(Slice::Stored)
    }

    /// Whether the messages that wait belong to the dumped stream. If the stream is behind the dump, that shows once it
    /// reaches the payloads that the dump remembers.
    fn follows(&mut self, stream: &mut Stream) -> Result<Slice, AbortReason> {
        let Some(begin) = self.begin.take_if(|begin| begin.cut().is_some() || stream.follows(begin)) else {
            return match &self.begin {
                Some(begin) if stream.contradicts(begin) => Err(AbortReason::OtherIncarnation),
                _ => Ok(Slice::Empty),
            };
        };
        Ok(Slice::Whole(begin))
    }

    /// Aborts the load.
    fn abort(&mut self, stream: &mut Stream, space: &mut SpaceShard, reason: AbortReason, now: Now) -> Step {
        if self.holds {
            stream.break_hold(space, reason, now);
            stream.take_abort_reason();
            stream.show(space);
        }
        stream.view.transfers_aborted.add(reason as usize, 1);
        if self.is_of_engine {
            log_failed(stream, reason);
        } else {
            tracing::warn!(worker = %stream.worker, reason = reason.name(), "load aborted; the worker's events go on");
        }
        self.refuse(reason);
        Step::Over
    }

    /// Why it makes no progress.
    const fn stalled(&self) -> AbortReason {
        match (self.whole, self.stores, &self.begin) {
            (true, ..) => AbortReason::OtherIncarnation,
            (false, false, Some(_)) => AbortReason::NotJoined,
            (false, ..) => AbortReason::Stalled,
        }
    }

    /// Sends the reason as the last answer.
    pub(in crate::ingest) fn refuse(&self, reason: AbortReason) {
        self.answer(LoadAnswer::Failed(reason));
    }

    fn answer(&self, answer: LoadAnswer) {
        // The caller may be gone; the worker is loaded all the same.
        let _ = self.answers.try_send(answer);
    }
}

/// Counts a failed snapshot of an engine. The log says so now and then: the daemon asks again and again.
fn log_failed(stream: &Stream, reason: AbortReason) {
    stream.count(WorkerCounter::EngineSnapshotsFailed, 1);
    let times = stream.view.counters.get(WorkerCounter::EngineSnapshotsFailed);
    if times.is_power_of_two() {
        let (reason, why) = (reason.name(), reason.meaning());
        tracing::warn!(worker = %stream.worker, reason, why, times, "no snapshot of the engine; its worker's events go on");
    }
}

/// Whether the worker may be emptied for the dump that begins so: `false` = not yet.
fn may_begin(begin: &DumpBegin, stream: &Stream) -> Result<bool, AbortReason> {
    match begin.cut() {
        Some(cut) => stream.joins(cut),
        None => agrees(begin, stream.gate()).map(|()| true),
    }
}

/// Whether the batches that the worker has applied so far can be the beginning of the dumped stream.
fn agrees(begin: &DumpBegin, gate: &SequenceGate) -> Result<(), AbortReason> {
    let watermark = begin.watermark.ok_or(AbortReason::NoWatermark)?;
    let Some(last) = gate.last() else { return Ok(()) };
    if last > watermark {
        return Err(AbortReason::Outdated);
    }
    let there = begin.remembered.iter().find(|(seq, _)| *seq == last).map(|(_, hash)| *hash);
    if there.is_some() && there != gate.payload_hash(last) { Err(AbortReason::OtherIncarnation) } else { Ok(()) }
}

/// A load that comes before any message of its worker, either when its shard starts or when the worker is added. The
/// worker's messages wait in their socket meanwhile.
#[derive(Clone, Debug)]
pub struct FirstLoad {
    pub(in crate::ingest) worker: Worker,
    parts: Receiver<DumpPart>,
    answers: Sender<LoadAnswer>,
}

impl FirstLoad {
    /// A load into a worker, and the channel of its answers.
    #[must_use]
    pub fn new(worker: Worker, parts: Receiver<DumpPart>) -> (Self, Receiver<LoadAnswer>) {
        // Two answers at most, `Held` and the last one, so no answer finds the channel full.
        let (answers, answered) = bounded(2);
        (Self { worker, parts, answers }, answered)
    }

    /// Turns it into a load that has not begun.
    pub(in crate::ingest) fn loading(self) -> Loading {
        Loading::of(self.parts, self.answers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_dense_and_their_names_unique() {
        let mut names: Vec<_> = AbortReason::ALL.iter().map(|reason| reason.name()).collect();
        assert!(AbortReason::ALL.iter().enumerate().all(|(at, reason)| at == *reason as usize));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), AbortReason::ALL.len());
    }

    #[test]
    fn a_stall_timer_ends_and_is_renewed() {
        let mut stall = StallTimer::default();
        let max = crate::limits::TRANSFER_STALL_MS_MAX;
        assert!(!stall.is_over(5) && !stall.is_over(4 + max) && stall.is_over(5 + max));
        stall.renew();
        assert!(!stall.is_over(5 + max));
    }

    const HASHES: [EngineHash; 3] = [EngineHash(1), EngineHash(2), EngineHash(3)];
    const LOCALS: [LocalHash; 3] = [LocalHash(11), LocalHash(12), LocalHash(13)];

    fn store(parent: Option<u64>, blocks: std::ops::Range<usize>) -> StoreBlocks<'static> {
        StoreBlocks {
            parent: parent.map(EngineHash),
            hashes: &HASHES[blocks.clone()],
            locals: &LOCALS[blocks],
            tier: Tier::Device,
            group: GroupId(0),
            seed: Seed(7),
        }
    }

    fn sum(stores: &[StoreBlocks<'_>]) -> References {
        let mut sum = References::default();
        stores.iter().for_each(|store| sum.add(store));
        sum
    }

    #[test]
    fn a_chunk_returns_the_stores_pushed_into_it() {
        let mut chunk = DumpChunk::default();
        let stores = [store(None, 0..2), store(Some(2), 2..3), store(None, 0..0)];
        stores.iter().for_each(|store| chunk.push(store));
        assert_eq!((chunk.stores(), chunk.blocks()), (3, 3));
        for (number, store) in stores.iter().enumerate() {
            let back = chunk.store(number).expect("a store");
            assert_eq!((back.parent, back.hashes, back.locals), (store.parent, store.hashes, store.locals));
            assert_eq!((back.tier, back.group, back.seed), (store.tier, store.group, store.seed));
        }
        assert!(chunk.store(3).is_none());
        chunk.push(&StoreBlocks { locals: &LOCALS[..1], ..store(None, 0..3) });
        assert_eq!(chunk.store(3).map(|store| (store.hashes.len(), store.locals.len())), Some((1, 1)));
    }

    #[test]
    fn references_depend_on_everything_but_order_and_runs() {
        let whole = sum(&[store(None, 0..3)]);
        assert_eq!(whole.blocks, 3);
        assert_eq!(sum(&[store(Some(2), 2..3), store(None, 0..2)]), whole);
        let twice = sum(&[store(None, 0..3), store(None, 0..3)]);
        assert_eq!((twice.blocks, twice == whole), (6, false));
        let root = store(None, 0..3);
        for other in [
            store(Some(0), 0..3),
            StoreBlocks { tier: Tier::Host, ..root },
            StoreBlocks { group: GroupId(1), ..root },
            StoreBlocks { seed: Seed(8), ..root },
            StoreBlocks { hashes: &[HASHES[0], HASHES[2], HASHES[1]], ..root },
            StoreBlocks { locals: &[LOCALS[0], LOCALS[2], LOCALS[1]], ..root },
        ] {
            let other = sum(&[other]);
            assert!(other.blocks == 3 && other.digest != whole.digest);
        }
    }
}
