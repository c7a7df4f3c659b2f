//! Encodes events as a flatbuffer.

use crate::event::{
    BatchInfo, Cleared, Content, GroupKind, KvEvent, Medium, Removed, Salt, Snapshot, SnapshotPhase, Stored,
};
use crate::ids::{EngineHash, LocalHash, Scheme, Tier, Window};
use crate::schema_generated::events as fb;
use crate::trust::TrustLevel;
use flatbuffers::{FlatBufferBuilder, WIPOffset};

/// Writes batches, one after the other, into the same memory.
#[derive(Default)]
pub struct Encoder {
    builder: FlatBufferBuilder<'static>,
    events: Vec<WIPOffset<fb::Event<'static>>>,
    omitted: usize,
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder").field("omitted", &self.omitted).finish_non_exhaustive()
    }
}

impl Encoder {
    /// An encoder that has written nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Encodes one message. The bytes are valid until the next call.
    ///
    /// The decoder's warnings are not written. The format has no place for blocks in a medium that is not a tier: their
    /// events are left out and counted in [`omitted`](Self::omitted). It has no place for the size of a window either.
    /// A group kind without a rule is written as a sliding window: readers distinguish only the main kinds. The tokens
    /// must have the window of `info.scheme`; readers cannot use tokens of the other window.
    pub fn encode<'e>(&mut self, info: &BatchInfo, events: impl IntoIterator<Item = KvEvent<'e>>) -> &[u8] {
        self.builder.reset();
        self.events.clear();
        self.omitted = 0;
        for event in events {
            let written = match event {
                KvEvent::Stored(stored) => self.stored(&stored),
                KvEvent::Removed(removed) => self.removed(&removed),
                KvEvent::Cleared(cleared) => Some(self.cleared(cleared)),
            };
            match written {
                Some(event) => self.events.push(event),
                None => self.omitted += 1,
            }
        }
        self.batch(info);
        self.builder.finished_data()
    }

    /// The number of events of the last batch that this format cannot express.
    #[must_use]
    pub const fn omitted(&self) -> usize {
        self.omitted
    }

    fn batch(&mut self, info: &BatchInfo) {
        let builder = &mut self.builder;
        let events = (!self.events.is_empty()).then(|| builder.create_vector(&self.events));
        let scheme = info.scheme.map(|scheme| fb::Scheme::create(builder, &scheme_args(scheme)));
        let heartbeat =
            info.heartbeat_last_seq.map(|last| fb::Heartbeat::create(builder, &fb::HeartbeatArgs { last_seq: last.0 }));
        let snapshot = info.snapshot.map(|part| fb::Snapshot::create(builder, &snapshot_args(part)));
        let args = fb::BatchArgs {
            generation: info.generation.unwrap_or(0),
            worker_id: info.worker_id.map(|id| id.0),
            dp_rank: info.dp_rank.map(|rank| rank.0),
            published_unix_us: (info.published_at_unix_s * 1e6).round() as u64,
            trust: fb::SourceTrust(info.source.map_or(TrustLevel::Exact, |source| source.level) as u8),
            reasons: info.source.map_or(0, |source| source.reasons.bits()),
            scheme,
            events,
            heartbeat,
            snapshot,
        };
        let root = fb::Batch::create(builder, &args);
        fb::finish_batch_buffer(builder, root);
    }

    fn stored(&mut self, event: &Stored<'_>) -> Option<WIPOffset<fb::Event<'static>>> {
        let tier = tier_of(event.medium)?;
        let (mut tokens, mut local_hashes) = (None, None);
        match event.content {
            Content::Tokens { tokens: ids, .. } => tokens = Some(self.builder.create_vector(ids)),
            Content::LocalHashes(locals) => {
                local_hashes = Some(self.builder.create_vector_from_iter(locals.iter().map(|LocalHash(hash)| *hash)));
            }
            Content::Unusable => {}
        }
        let media = (!event.media.is_empty()).then(|| {
            let objects = event.media.iter().map(|(block, hash)| fb::MediaHash::new(*block, *hash));
            self.builder.create_vector_from_iter(objects)
        });
        let seed = self.seed(event.lora, event.salt);
        let hashes = self.hashes(event.hashes);
        let args = fb::EventArgs {
            kind: fb::EventKind::Stored,
            tier,
            group: event.group.0,
            group_kind: group_kind_of(event.group_kind),
            parent: event.parent.map(|parent| parent.0),
            hashes: Some(hashes),
            local_hashes,
            tokens,
            block_size: event.block_size,
            seed,
            media,
            seed_hash: match event.salt {
                Salt::Seed(seed) => Some(seed.0),
                Salt::Inherited | Salt::Of(_) | Salt::Unknown => None,
            },
        };
        Some(fb::Event::create(&mut self.builder, &args))
    }

    fn removed(&mut self, event: &Removed<'_>) -> Option<WIPOffset<fb::Event<'static>>> {
        let tier = tier_of(event.medium)?;
        let hashes = Some(self.hashes(event.hashes));
        let kind = fb::EventKind::Removed;
        let args = fb::EventArgs { kind, tier, group: event.group.0, hashes, ..Default::default() };
        Some(fb::Event::create(&mut self.builder, &args))
    }

    fn cleared(&mut self, event: Cleared) -> WIPOffset<fb::Event<'static>> {
        let tier = event.tier.map_or(fb::Tier::All, |tier| fb::Tier(tier as u8));
        let args = fb::EventArgs { kind: fb::EventKind::Cleared, tier, ..Default::default() };
        fb::Event::create(&mut self.builder, &args)
    }

    fn hashes(&mut self, hashes: &[EngineHash]) -> WIPOffset<flatbuffers::Vector<'static, u64>> {
        self.builder.create_vector_from_iter(hashes.iter().map(|EngineHash(hash)| *hash))
    }

    /// `None` if the event states neither LoRA nor salt.
    fn seed(&mut self, lora: Option<&str>, salt: Salt<'_>) -> Option<WIPOffset<fb::Seed<'static>>> {
        if matches!(salt, Salt::Seed(_)) || (lora.is_none() && salt == Salt::Inherited) {
            return None;
        }
        let lora = lora.map(|name| self.builder.create_string(name));
        let known = salt != Salt::Unknown;
        let salt = match salt {
            Salt::Of(salt) => Some(self.builder.create_string(salt)),
            Salt::Inherited | Salt::Seed(_) | Salt::Unknown => None,
        };
        Some(fb::Seed::create(&mut self.builder, &fb::SeedArgs { lora, salt, known }))
    }
}

const fn scheme_args(scheme: Scheme) -> fb::SchemeArgs {
    let window = match scheme.window {
        Window::Plain => fb::Window::Plain,
        Window::Bigram => fb::Window::Bigram,
    };
    fb::SchemeArgs { block_size: scheme.block_size, window, seed_rule: fb::SeedRule::Xxh3Additive }
}

const fn snapshot_args(part: Snapshot) -> fb::SnapshotArgs {
    let phase = match part.phase {
        SnapshotPhase::Begin => fb::SnapshotPhase::Begin,
        SnapshotPhase::Chunk => fb::SnapshotPhase::Chunk,
        SnapshotPhase::End => fb::SnapshotPhase::End,
    };
    fb::SnapshotArgs {
        id: part.id,
        phase,
        watermark: part.watermark.0,
        chunk: part.chunk,
        chunks: part.chunks,
        blocks: part.blocks,
        digest: part.digest,
        watermark_hash: part.watermark_hash,
    }
}

/// `None` if the format has no such tier.
const fn tier_of(medium: Medium) -> Option<fb::Tier> {
    match medium {
        Medium::Tier(Tier::Device) => Some(fb::Tier::Device),
        Medium::Tier(Tier::Host) => Some(fb::Tier::Host),
        Medium::Tier(Tier::Disk) => Some(fb::Tier::Disk),
        Medium::Tier(Tier::External) => Some(fb::Tier::External),
        Medium::Offloaded(_) | Medium::NeverRemoved | Medium::Unknown | Medium::Remote => None,
    }
}

const fn group_kind_of(kind: GroupKind) -> fb::GroupKind {
    match kind {
        // The relay's own trust distinguishes the two: for the latter it is hybrid.
        GroupKind::Unstated | GroupKind::Unknown => fb::GroupKind::Unknown,
        GroupKind::Main => fb::GroupKind::Full,
        GroupKind::Sliding { .. } | GroupKind::Other => fb::GroupKind::SlidingWindow,
        GroupKind::SlidingMla { .. } => fb::GroupKind::SlidingWindowMla,
        GroupKind::Mamba => fb::GroupKind::Mamba,
    }
}
