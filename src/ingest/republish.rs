//! What is applied to a relayed worker, said once more in our own format: see [`Republisher`].

use std::fmt;

use xxhash_rust::xxh3::xxh3_64;

use super::dump::DumpChunk;
use super::stream::{SpaceShard, Now, Stream};
use crate::event::flat::Encoder;
use crate::event::{BatchInfo, Cleared, Content, GroupKind, KvEvent, Medium, Removed, Salt, SourceTrust, Stored};
use crate::ids::{DpRank, EngineHash, EventSeq, GroupId, Scheme, Tier, WorkerId};
use crate::index::StoreBlocks;
use crate::limits::EVENT_BATCH_EVENTS_MAX;
use crate::trust::Trust;

/// Where the messages of a relayed worker go. Called on the ingest thread, which waits meanwhile.
pub trait Outlet: Send + fmt::Debug {
    /// A batch of the stream. Batches come in the order of their sequences, without a gap.
    fn batch(&mut self, seq: EventSeq, payload: &[u8]);

    /// A heartbeat, which is no batch of the stream.
    fn heartbeat(&mut self, payload: &[u8]);

    /// What was sent so far is of another generation than what follows: it does not lead to it.
    fn forget(&mut self);

    /// A dump begins that holds what the batches up to this one lead to.
    fn dump_begins(&mut self, last: Republished);
}

/// A batch that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Republished {
    /// Its sequence.
    pub seq: EventSeq,
    /// XXH3-64 of its payload.
    pub payload_hash: u64,
    /// Its generation.
    pub generation: u64,
}

/// Who a relay says that it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelayName {
    /// Drawn at its start.
    pub generation: u64,
    /// The worker's number, where the relay is to say it: readers that call it otherwise refuse its batches.
    pub worker_id: Option<WorkerId>,
    /// The worker's rank, likewise.
    pub dp_rank: Option<DpRank>,
}

/// Turns what is done to one worker's part of the index into a stream of batches.
///
/// A batch of the engine, or what else changed the worker, becomes one batch: the stores, removals and clears as they
/// were applied, with the relay's scheme and what it believes of itself. Whoever applies them in order holds what the
/// relay holds. What the index refused, or what changed nothing, is not said. Where one batch would hold more events
/// than a reader takes, or the worker is loaded, the generation changes instead: readers then ask for a snapshot.
#[derive(Debug)]
pub struct Republisher {
    name: RelayName,
    heartbeat_ms: u64,
    outlet: Box<dyn Outlet>,
    encoder: Encoder,
    next: u64,
    last_hash: u64,
    said: Option<(SourceTrust, Option<Scheme>)>,
    spoke_at_ms: u64,
    now: Now,
    acts: Vec<Act>,
    stores: DumpChunk,
    removed: Vec<EngineHash>,
    /// What was done cannot be said as events.
    is_unsayable: bool,
}

/// One thing done to the worker.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// The store of this number.
    Store(usize),
    /// The removal of these of the hashes removed.
    Remove {
        from: usize,
        to: usize,
        tier: Tier,
        group: GroupId,
    },
    Clear(Option<Tier>),
}

impl Republisher {
    /// A stream that has said nothing yet. `heartbeat_ms`: how long it may be silent.
    #[must_use]
    pub fn new(name: RelayName, heartbeat_ms: u64, outlet: Box<dyn Outlet>) -> Self {
        Self {
            name,
            heartbeat_ms,
            outlet,
            encoder: Encoder::new(),
            next: 0,
            last_hash: 0,
            said: None,
            spoke_at_ms: 0,
            now: Now::default(),
            acts: Vec::new(),
            stores: DumpChunk::default(),
            removed: Vec::new(),
            is_unsayable: false,
        }
    }

    pub(super) const fn at(&mut self, now: Now) {
        self.now = now;
    }

    pub(super) fn stored(&mut self, blocks: &StoreBlocks<'_>) {
        self.acts.push(Act::Store(self.stores.stores()));
        self.stores.push(blocks);
    }

    pub(super) fn removed(&mut self, tier: Tier, group: GroupId, hashes: &[EngineHash]) {
        let from = self.removed.len();
        self.removed.extend(hashes);
        self.acts.push(Act::Remove { from, to: self.removed.len(), tier, group });
    }

    /// `None` = all tiers. What was said in the same batch before that is moot then.
    pub(super) fn cleared(&mut self, tier: Option<Tier>) {
        if tier.is_none() {
            self.forget_acts();
            self.is_unsayable = false;
        }
        self.acts.push(Act::Clear(tier));
    }

    /// The worker is changed in a way that events do not say.
    pub(super) const fn unsayable(&mut self) {
        self.is_unsayable = true;
    }

    /// Sends what was done since the last call, if anything was, or if the relay believes itself otherwise.
    pub(super) fn flush(&mut self, trust: Trust, scheme: Option<Scheme>) {
        let source = SourceTrust { level: trust.level, reasons: trust.reasons };
        if self.is_unsayable || self.acts.len() > EVENT_BATCH_EVENTS_MAX {
            self.begin_anew();
        }
        if self.acts.is_empty() && self.said == Some((source, scheme)) {
            return;
        }
        let seq = EventSeq(self.next);
        let info = BatchInfo { source: Some(source), scheme, ..self.info() };
        let (stores, removed) = (&self.stores, &self.removed);
        let events = self.acts.iter().filter_map(|act| event(*act, stores, removed));
        let payload = self.encoder.encode(&info, events);
        self.last_hash = xxh3_64(payload);
        self.outlet.batch(seq, payload);
        self.next += 1;
        self.said = Some((source, scheme));
        self.spoke_at_ms = self.now.uptime_ms;
        self.forget_acts();
    }

    /// Time has passed: whoever says nothing says that.
    pub(super) fn tick(&mut self, now: Now) {
        self.now = now;
        let Some((source, scheme)) = self.said else { return };
        if now.uptime_ms.saturating_sub(self.spoke_at_ms) < self.heartbeat_ms {
            return;
        }
        let heartbeat_last_seq = self.next.checked_sub(1).map(EventSeq);
        let info = BatchInfo { source: Some(source), scheme, heartbeat_last_seq, ..self.info() };
        self.outlet.heartbeat(self.encoder.encode(&info, []));
        self.spoke_at_ms = now.uptime_ms;
    }

    /// A dump of what was said up to now begins.
    pub(super) fn dump_begins(&mut self) {
        if let Some(last) = self.next.checked_sub(1) {
            let (seq, payload_hash, generation) = (EventSeq(last), self.last_hash, self.name.generation);
            self.outlet.dump_begins(Republished { seq, payload_hash, generation });
        }
    }

    fn begin_anew(&mut self) {
        // 0 is no generation.
        self.name.generation = self.name.generation.wrapping_add(1).max(1);
        tracing::warn!(
            generation = self.name.generation,
            "what was done to a relayed worker has no place in one batch; its readers have to take a snapshot"
        );
        self.outlet.forget();
        self.said = None;
        self.is_unsayable = false;
        self.forget_acts();
    }

    fn forget_acts(&mut self) {
        self.acts.clear();
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

fn event<'a>(act: Act, stores: &'a DumpChunk, removed: &'a [EngineHash]) -> Option<KvEvent<'a>> {
    Some(match act {
        Act::Store(number) => KvEvent::Stored(stored_event(&stores.store(number)?)),
        Act::Remove { from, to, tier, group } => {
            KvEvent::Removed(Removed { hashes: &removed[from..to], medium: Medium::Tier(tier), group })
        }
        Act::Clear(tier) => KvEvent::Cleared(Cleared { tier }),
    })
}

/// Blocks as a relay says them: hashed, with the seed they were hashed under, in groups that count.
#[must_use]
pub fn stored_event<'a>(blocks: &StoreBlocks<'a>) -> Stored<'a> {
    Stored {
        hashes: blocks.hashes,
        parent: blocks.parent,
        content: Content::LocalHashes(blocks.locals),
        // The batch's scheme.
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
    /// Says what is done to the worker from now on; the first batch says what is believed of it.
    pub(super) fn set_republisher(&mut self, republisher: Republisher, space: &SpaceShard, now: Now) {
        self.republisher = Some(Box::new(republisher));
        self.republish(|republisher| republisher.at(now));
        self.flush_republished(space);
    }

    /// Tells a republisher, if there is one.
    pub(super) fn republish(&mut self, say: impl FnOnce(&mut Republisher)) {
        if let Some(republisher) = &mut self.republisher {
            say(republisher);
        }
    }

    /// Sends what was done, as one batch.
    pub(super) fn flush_republished(&mut self, space: &SpaceShard) {
        let trust = self.trust();
        if let Some(republisher) = &mut self.republisher {
            republisher.flush(trust, space.scheme.get());
        }
    }
}
