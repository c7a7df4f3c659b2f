//! The stream that a relay publishes: every change of its worker, again, in kvrouted's own format. See [`Republisher`].

use std::fmt;

use xxhash_rust::xxh3::xxh3_64;

use super::dump::DumpChunk;
use super::space_shard::SpaceShard;
use super::stream::{Now, Stream};
use crate::event::flat::Encoder;
use crate::event::{BatchInfo, Cleared, Content, GroupKind, KvEvent, Medium, Removed, Salt, SourceTrust, Stored};
use crate::ids::{DpRank, EngineHash, EventSeq, GroupId, Scheme, Tier, WorkerId};
use crate::index::StoreBlocks;
use crate::limits::EVENT_BATCH_EVENTS_MAX;
use crate::trust::Trust;

/// The receiver of the messages that a relay publishes. It is called on the ingest thread, which waits meanwhile.
pub(crate) trait Outlet: Send + fmt::Debug {
    /// Takes a batch of the stream. Batches come in the order of their sequence numbers, without a gap.
    fn batch(&mut self, seq: EventSeq, payload: &[u8]);

    /// Takes a heartbeat, which is not a batch of the stream.
    fn heartbeat(&mut self, payload: &[u8]);

    /// Forgets all batches sent so far: a new generation begins, which does not continue them.
    fn forget(&mut self);
}

/// A batch that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Republished {
    /// Its sequence number.
    pub seq: EventSeq,
    /// XXH3-64 of its payload.
    pub payload_hash: u64,
    /// The generation that it belongs to.
    pub generation: u64,
}

/// The identity that a relay states in its batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelayName {
    /// Drawn at its start.
    pub generation: u64,
    /// The worker's ID, if the relay is to state it. Readers that know the worker by another ID refuse its batches.
    pub worker_id: Option<WorkerId>,
    /// The worker's rank, if the relay is to state it.
    pub dp_rank: Option<DpRank>,
}

/// Turns the changes of one worker's part of the index into a stream of batches.
///
/// Each batch of the engine, and each other change of the worker, becomes one batch: the stores, removals and clears as
/// they were applied, with the relay's scheme and its own trust. A reader that applies all batches in order holds what
/// the relay holds. Events that the index refused, or that changed nothing, are left out. If one batch would hold more
/// events than a reader accepts, or if a dump is loaded into the worker, the generation changes instead. Readers then
/// ask for a snapshot.
#[derive(Debug)]
pub(crate) struct Republisher {
    name: RelayName,
    heartbeat_ms: u64,
    outlet: Box<dyn Outlet>,
    encoder: Encoder,
    next: u64,
    last_hash: u64,
    stated: Option<(SourceTrust, Option<Scheme>)>,
    spoke_at_ms: u64,
    now: Now,
    changes: Vec<Change>,
    stores: DumpChunk,
    removed: Vec<EngineHash>,
    /// The worker was changed in a way that events cannot express.
    needs_new_generation: bool,
}

/// One change of the worker.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// The store with this number in `stores`.
    Store(usize),
    /// The removal of this range of `removed`.
    Remove {
        from: usize,
        to: usize,
        tier: Tier,
        group: GroupId,
    },
    Clear(Option<Tier>),
}

impl Republisher {
    /// A stream without a batch. After `heartbeat_ms` without a batch it sends a heartbeat.
    #[must_use]
    pub(crate) fn new(name: RelayName, heartbeat_ms: u64, outlet: Box<dyn Outlet>) -> Self {
        Self {
            name,
            heartbeat_ms,
            outlet,
            encoder: Encoder::new(),
            next: 0,
            last_hash: 0,
            stated: None,
            spoke_at_ms: 0,
            now: Now::default(),
            changes: Vec::new(),
            stores: DumpChunk::default(),
            removed: Vec::new(),
            needs_new_generation: false,
        }
    }

    pub(super) const fn at(&mut self, now: Now) {
        self.now = now;
    }

    pub(super) fn stored(&mut self, blocks: &StoreBlocks<'_>) {
        self.changes.push(Change::Store(self.stores.stores()));
        self.stores.push(blocks);
    }

    pub(super) fn removed(&mut self, tier: Tier, group: GroupId, hashes: &[EngineHash]) {
        let from = self.removed.len();
        self.removed.extend(hashes);
        self.changes.push(Change::Remove { from, to: self.removed.len(), tier, group });
    }

    /// `None` = all tiers. That cancels the earlier changes of the same batch.
    pub(super) fn cleared(&mut self, tier: Option<Tier>) {
        if tier.is_none() {
            self.forget_changes();
            self.needs_new_generation = false;
        }
        self.changes.push(Change::Clear(tier));
    }

    /// Notes a change that events cannot express.
    pub(super) const fn note_unpublishable(&mut self) {
        self.needs_new_generation = true;
    }

    /// Sends the changes since the last call, if there are any or if the relay's trust or scheme has changed.
    pub(super) fn flush(&mut self, trust: Trust, scheme: Option<Scheme>) {
        let source = SourceTrust { level: trust.level, reasons: trust.reasons };
        if self.needs_new_generation || self.changes.len() > EVENT_BATCH_EVENTS_MAX {
            self.begin_anew();
        }
        if self.changes.is_empty() && self.stated == Some((source, scheme)) {
            return;
        }
        let seq = EventSeq(self.next);
        let info = BatchInfo { source: Some(source), scheme, ..self.info() };
        let (stores, removed) = (&self.stores, &self.removed);
        let events = self.changes.iter().filter_map(|change| event(*change, stores, removed));
        let payload = self.encoder.encode(&info, events);
        self.last_hash = xxh3_64(payload);
        self.outlet.batch(seq, payload);
        self.next += 1;
        self.stated = Some((source, scheme));
        self.spoke_at_ms = self.now.uptime_ms;
        self.forget_changes();
    }

    /// Sends a heartbeat if one is due.
    pub(super) fn tick(&mut self, now: Now) {
        self.now = now;
        let Some((source, scheme)) = self.stated else { return };
        if now.uptime_ms.saturating_sub(self.spoke_at_ms) < self.heartbeat_ms {
            return;
        }
        let heartbeat_last_seq = self.next.checked_sub(1).map(EventSeq);
        let info = BatchInfo { source: Some(source), scheme, heartbeat_last_seq, ..self.info() };
        self.outlet.heartbeat(self.encoder.encode(&info, []));
        self.spoke_at_ms = now.uptime_ms;
    }

    /// The last batch sent; `None` = there was none.
    pub(super) fn last(&self) -> Option<Republished> {
        let seq = self.next.checked_sub(1).map(EventSeq)?;
        Some(Republished { seq, payload_hash: self.last_hash, generation: self.name.generation })
    }

    fn begin_anew(&mut self) {
        // 0 means no generation.
        self.name.generation = self.name.generation.wrapping_add(1).max(1);
        tracing::warn!(
            generation = self.name.generation,
            "a change of the relayed worker does not fit one batch; its readers have to fetch a snapshot"
        );
        self.outlet.forget();
        self.stated = None;
        self.needs_new_generation = false;
        self.forget_changes();
    }

    fn forget_changes(&mut self) {
        self.changes.clear();
        self.removed.clear();
        self.stores.clear();
    }

    fn info(&self) -> BatchInfo {
        BatchInfo {
            published_at_unix_s: self.now.unix_ms as f64 / 1e3,
            worker_id: self.name.worker_id,
            dp_rank: self.name.dp_rank,
            generation: Some(self.name.generation),
            ..BatchInfo::default()
        }
    }
}

fn event<'a>(change: Change, stores: &'a DumpChunk, removed: &'a [EngineHash]) -> Option<KvEvent<'a>> {
    Some(match change {
        Change::Store(number) => KvEvent::Stored(stored_event(&stores.store(number)?)),
        Change::Remove { from, to, tier, group } => {
            KvEvent::Removed(Removed { hashes: &removed[from..to], medium: Medium::Tier(tier), group })
        }
        Change::Clear(tier) => KvEvent::Cleared(Cleared { tier }),
    })
}

/// Blocks as a relay publishes them: hashed, with their seed, and in groups that count.
#[must_use]
pub(crate) fn stored_event<'a>(blocks: &StoreBlocks<'a>) -> Stored<'a> {
    Stored {
        hashes: blocks.hashes,
        parent: blocks.parent,
        content: Content::LocalHashes(blocks.locals),
        // The scheme of the batch states it.
        block_size: 0,
        medium: Medium::Tier(blocks.tier),
        group: blocks.group,
        group_kind: GroupKind::Main,
        lora: None,
        salt: Salt::Seed(blocks.seed),
        media: &[],
    }
}

impl Stream {
    /// Publishes every change of the worker from now on. The first batch states the worker's trust.
    pub(super) fn set_republisher(&mut self, republisher: Republisher, space: &SpaceShard, now: Now) {
        self.republisher = Some(Box::new(republisher));
        self.republish(|republisher| republisher.at(now));
        self.flush_republished(space);
    }

    /// Hands a change to the republisher, if there is one.
    pub(super) fn republish(&mut self, change: impl FnOnce(&mut Republisher)) {
        if let Some(republisher) = &mut self.republisher {
            change(republisher);
        }
    }

    /// Sends the changes since the last call as one batch.
    pub(super) fn flush_republished(&mut self, space: &SpaceShard) {
        if self.republisher.is_none() {
            return;
        }
        let trust = self.trust();
        if let Some(republisher) = &mut self.republisher {
            republisher.flush(trust, space.scheme.get());
        }
    }
}
