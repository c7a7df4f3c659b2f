//! A decoded batch in arenas that keep their memory, and the writer that fills it.

use std::ops::Range;

use super::decode_warning::shown;
use super::error::Reason;
use super::{
    Cleared, Content, DecodeWarning, DecodeWarnings, GroupKind, KvEvent, Medium, Removed, Salt, Stored, UnknownName,
};
use crate::ids::{DpRank, EngineHash, EventSeq, GroupId, LocalHash, Scheme, Seed, Tier, WorkerId};
use crate::limits::{
    EVENT_BATCH_BLOCKS_MAX, EVENT_BATCH_EVENTS_MAX, EVENT_BATCH_MEDIA_MAX, EVENT_BATCH_TEXT_BYTES_MAX,
    EVENT_BATCH_TOKENS_MAX, UNKNOWN_NAMES_BATCH_MAX,
};
use crate::trust::{TrustLevel, TrustReasons};

/// The fields of a batch beside its events.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BatchInfo {
    /// When the batch was published, seconds of Unix time by the publisher's clock; 0 = not stated.
    pub published_at_unix_s: f64,
    /// The worker that the batch names (relays only).
    pub worker_id: Option<WorkerId>,
    /// The data-parallel rank that the batch names.
    pub dp_rank: Option<DpRank>,
    /// A random number that the publisher draws at each start (relays only).
    pub generation: Option<u64>,
    /// The relay's trust in its own view (relays only).
    pub source: Option<SourceTrust>,
    /// How the relay's blocks are cut and hashed (relays only).
    pub scheme: Option<Scheme>,
    /// The sequence number of the last batch with events, if this is a heartbeat (relays only).
    pub heartbeat_last_seq: Option<EventSeq>,
    /// The part of a snapshot that the batch is, if any (relays only).
    pub snapshot: Option<Snapshot>,
    /// A salt came without a gateway's prefix.
    pub has_plain_salts: bool,
    /// A salt came with the prefix that some gateways put before it. The decoder has removed it.
    pub has_prefixed_salts: bool,
    /// Warnings of the decoder.
    pub warnings: DecodeWarnings,
}

/// A relay's trust in the view that it publishes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceTrust {
    /// The level.
    pub level: TrustLevel,
    /// Why the level is not higher.
    pub reasons: TrustReasons,
}

/// A part of a worker's whole view, sent as a run of stored events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The number of the snapshot.
    pub id: u64,
    /// The part of the snapshot.
    pub phase: SnapshotPhase,
    /// The last sequence number whose events the snapshot contains.
    pub watermark: EventSeq,
    /// Number of the chunk, from 0.
    pub chunk: u32,
    /// At the end: the number of chunks.
    pub chunks: u32,
    /// At the end: the number of (tier, group, block) references in the chunks.
    pub blocks: u64,
    /// At the end: an order-independent digest of those references.
    pub digest: u64,
    /// At the beginning: XXH3-64 of the payload of the batch with the watermark's sequence number.
    pub watermark_hash: u64,
}

/// A part of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotPhase {
    /// The first part.
    Begin,
    /// Some of the blocks.
    Chunk,
    /// The last part.
    End,
}

/// The events of one message, in arenas that keep their memory from message to message.
///
/// Decoders fill it through a `BatchWriter`. It holds a whole batch or none.
#[derive(Debug, Default)]
pub struct EventBatch {
    info: BatchInfo,
    records: Vec<Record>,
    hashes: Vec<EngineHash>,
    tokens: Vec<u32>,
    locals: Vec<LocalHash>,
    media: Vec<(u32, u64)>,
    text: String,
    unknown_names: Vec<(UnknownName, Text, u32)>,
}

/// A run within one arena. Every arena is bounded far below 2^32 entries.
#[derive(Clone, Copy, Debug, Default)]
struct Span {
    start: u32,
    end: u32,
}

impl Span {
    const fn new(start: usize, end: usize) -> Self {
        Self { start: start as u32, end: end as u32 }
    }

    const fn range(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }
}

/// A name or salt that a [`BatchWriter`] has stored.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Text(Span);

/// The decoder's decision about the content of a stored event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Filling {
    /// The open event's tokens.
    Tokens {
        /// Whether the engine sent pairs.
        bigram: bool,
    },
    /// The open event's local hashes.
    LocalHashes,
    /// No usable content: tokens, local hashes and media of the open event are dropped.
    Unusable,
}

/// The fields of a stored event that are not in arenas.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoredHead {
    /// The block before the first.
    pub(super) parent: Option<EngineHash>,
    /// How to read the open event's tokens and local hashes.
    pub(super) filling: Filling,
    /// Tokens per block, 0 = not stated.
    pub(super) block_size: u32,
    /// The medium that holds the blocks.
    pub(super) medium: Medium,
    /// The KV group that holds them.
    pub(super) group: GroupId,
    /// The kind of attention that the group serves.
    pub(super) group_kind: GroupKind,
    /// LoRA adapter.
    pub(super) lora: Option<Text>,
    /// The salt, as far as the event states it.
    pub(super) salt: SaltText,
}

/// A [`Salt`] before the batch is whole.
#[derive(Clone, Copy, Debug)]
pub(super) enum SaltText {
    /// Not stated.
    Inherited,
    /// This salt.
    Of(Text),
    /// This seed.
    Seed(Seed),
    /// The format could not express it.
    Unknown,
}

#[derive(Clone, Copy, Debug)]
enum Record {
    Stored { head: StoredHead, hashes: Span, content: Span, media: Span },
    Removed { hashes: Span, medium: Medium, group: GroupId },
    Cleared(Cleared),
}

impl EventBatch {
    /// An empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Drops all content but keeps the memory.
    pub fn clear(&mut self) {
        self.info = BatchInfo::default();
        self.records.clear();
        self.hashes.clear();
        self.tokens.clear();
        self.locals.clear();
        self.media.clear();
        self.text.clear();
        self.unknown_names.clear();
    }

    /// The fields of the batch beside its events.
    #[must_use]
    pub const fn info(&self) -> &BatchInfo {
        &self.info
    }

    /// The number of events.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there is no event.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The number of blocks stored plus blocks removed.
    #[must_use]
    pub const fn blocks(&self) -> usize {
        self.hashes.len()
    }

    /// The events, in the order in which they happened.
    pub fn events(&self) -> impl ExactSizeIterator<Item = KvEvent<'_>> {
        self.records.iter().map(|record| self.event(record))
    }

    /// The first block of an event: the index looks it up first when it applies the event.
    #[must_use]
    pub fn first_hash(&self, event: usize) -> Option<EngineHash> {
        let hashes = match self.records.get(event)? {
            Record::Stored { hashes, .. } | Record::Removed { hashes, .. } => hashes,
            Record::Cleared(_) => return None,
        };
        self.hashes[hashes.range()].first().copied()
    }

    /// Names that this version does not know, in printable form, and the count of each. The name is empty for all names
    /// after the first [`UNKNOWN_NAMES_BATCH_MAX`].
    pub fn unknown_names(&self) -> impl Iterator<Item = (UnknownName, &str, u32)> {
        self.unknown_names.iter().map(|(of, name, times)| (*of, self.text(*name), *times))
    }

    fn event(&self, record: &Record) -> KvEvent<'_> {
        match record {
            Record::Stored { head, hashes, content, media } => KvEvent::Stored(Stored {
                hashes: &self.hashes[hashes.range()],
                parent: head.parent,
                content: match head.filling {
                    Filling::Tokens { bigram } => Content::Tokens { tokens: &self.tokens[content.range()], bigram },
                    Filling::LocalHashes => Content::LocalHashes(&self.locals[content.range()]),
                    Filling::Unusable => Content::Unusable,
                },
                block_size: head.block_size,
                medium: head.medium,
                group: head.group,
                group_kind: head.group_kind,
                lora: head.lora.map(|name| self.text(name)),
                salt: match head.salt {
                    SaltText::Inherited => Salt::Inherited,
                    SaltText::Of(salt) => Salt::Of(self.text(salt)),
                    SaltText::Seed(seed) => Salt::Seed(seed),
                    SaltText::Unknown => Salt::Unknown,
                },
                media: &self.media[media.range()],
            }),
            Record::Removed { hashes, medium, group } => {
                KvEvent::Removed(Removed { hashes: &self.hashes[hashes.range()], medium: *medium, group: *group })
            }
            Record::Cleared(cleared) => KvEvent::Cleared(*cleared),
        }
    }

    fn text(&self, text: Text) -> &str {
        &self.text[text.0.range()]
    }

    /// Bytes that the arenas have allocated, for status and for tests.
    #[must_use]
    pub fn capacity_bytes(&self) -> usize {
        self.records.capacity() * size_of::<Record>()
            + self.hashes.capacity() * size_of::<EngineHash>()
            + self.tokens.capacity() * size_of::<u32>()
            + self.locals.capacity() * size_of::<LocalHash>()
            + self.media.capacity() * size_of::<(u32, u64)>()
            + self.unknown_names.capacity() * size_of::<(UnknownName, Text, u32)>()
            + self.text.capacity()
    }
}

/// Fills an [`EventBatch`], one event after the other, within the limits of `limits.rs`.
///
/// Hashes, tokens, local hashes and media are pushed in any order and belong to the *open event* until
/// [`stored`](Self::stored), [`removed`](Self::removed), [`cleared`](Self::cleared) or
/// [`discard`](Self::discard) closes it. Dropped without [`finish`](Self::finish), the batch is empty.
/// The writer trusts reservations: a caller must not reserve more than its remaining bytes can hold.
#[derive(Debug)]
pub(super) struct BatchWriter<'b> {
    batch: &'b mut EventBatch,
    /// Where the open event begins in each arena.
    open: Open,
    finished: bool,
    last_text: Text,
}

#[derive(Clone, Copy, Debug, Default)]
struct Open {
    hashes: usize,
    tokens: usize,
    locals: usize,
    media: usize,
}

impl<'b> BatchWriter<'b> {
    /// Clears the batch and starts to fill it.
    #[must_use]
    pub(super) fn new(batch: &'b mut EventBatch) -> Self {
        batch.clear();
        Self { batch, open: Open::default(), finished: false, last_text: Text::default() }
    }

    /// The fields of the batch beside its events.
    pub(super) const fn info_mut(&mut self) -> &mut BatchInfo {
        &mut self.batch.info
    }

    /// Counts a warning.
    pub(super) const fn count(&mut self, warning: DecodeWarning) {
        self.batch.info.warnings.count(warning, 1);
    }

    /// Counts a name that this version does not know.
    pub(super) fn count_unknown_name(&mut self, of: UnknownName, name: &[u8]) {
        let EventBatch { unknown_names, text, .. } = &mut *self.batch;
        let find = |name: &[u8]| {
            let is_it = |(kind, known, _): &(UnknownName, Text, u32)| {
                *kind == of && text[known.0.range()].chars().eq(shown(name))
            };
            unknown_names.iter().position(is_it)
        };
        let name = if find(name).is_some() || unknown_names.len() < UNKNOWN_NAMES_BATCH_MAX { name } else { b"" };
        if let Some(at) = find(name) {
            unknown_names[at].2 = unknown_names[at].2.saturating_add(1);
            return;
        }
        let from = text.len();
        text.extend(shown(name));
        unknown_names.push((of, Text(Span::new(from, text.len())), 1));
    }

    /// Makes room for `count` more hashes.
    ///
    /// # Errors
    /// [`Reason::TooManyBlocks`].
    pub(super) fn reserve_hashes(&mut self, count: usize) -> Result<(), Reason> {
        within(self.batch.hashes.len(), count, EVENT_BATCH_BLOCKS_MAX, Reason::TooManyBlocks)?;
        self.batch.hashes.reserve(count);
        Ok(())
    }

    /// Adds a hash, after a reservation.
    pub(super) fn push_hash(&mut self, hash: EngineHash) {
        self.batch.hashes.push(hash);
    }

    /// Adds hashes, after a reservation.
    pub(super) fn push_hashes(&mut self, hashes: impl ExactSizeIterator<Item = EngineHash>) {
        self.batch.hashes.extend(hashes);
    }

    /// The open event's hashes.
    #[must_use]
    pub(super) fn hashes(&self) -> &[EngineHash] {
        &self.batch.hashes[self.open.hashes..]
    }

    /// Adds `count` zero tokens and returns them to be filled.
    ///
    /// # Errors
    /// [`Reason::TooManyTokens`].
    pub(super) fn extend_tokens(&mut self, count: usize) -> Result<&mut [u32], Reason> {
        let from = self.batch.tokens.len();
        within(from, count, EVENT_BATCH_TOKENS_MAX, Reason::TooManyTokens)?;
        self.batch.tokens.resize(from + count, 0);
        Ok(&mut self.batch.tokens[from..])
    }

    /// The open event's tokens.
    #[must_use]
    pub(super) fn tokens(&self) -> &[u32] {
        &self.batch.tokens[self.open.tokens..]
    }

    /// Drops the open event's tokens.
    pub(super) fn drop_tokens(&mut self) {
        self.batch.tokens.truncate(self.open.tokens);
    }

    /// Adds local hashes, at most one per hash of a batch.
    ///
    /// # Errors
    /// [`Reason::TooManyBlocks`].
    pub(super) fn extend_locals(&mut self, locals: impl ExactSizeIterator<Item = LocalHash>) -> Result<(), Reason> {
        within(self.batch.locals.len(), locals.len(), EVENT_BATCH_BLOCKS_MAX, Reason::TooManyBlocks)?;
        self.batch.locals.extend(locals);
        Ok(())
    }

    /// Adds a multimodal object of a block of the open event.
    ///
    /// # Errors
    /// [`Reason::TooManyMedia`].
    pub(super) fn push_media(&mut self, block: u32, hash: u64) -> Result<(), Reason> {
        within(self.batch.media.len(), 1, EVENT_BATCH_MEDIA_MAX, Reason::TooManyMedia)?;
        self.batch.media.push((block, hash));
        Ok(())
    }

    /// Stores a name or salt. A text equal to the last one is not stored again.
    ///
    /// # Errors
    /// [`Reason::TooMuchText`].
    pub(super) fn keep_text(&mut self, text: &str) -> Result<Text, Reason> {
        if self.batch.text(self.last_text) != text {
            let from = self.batch.text.len();
            within(from, text.len(), EVENT_BATCH_TEXT_BYTES_MAX, Reason::TooMuchText)?;
            self.batch.text.push_str(text);
            self.last_text = Text(Span::new(from, self.batch.text.len()));
        }
        Ok(self.last_text)
    }

    /// Closes the open event as stored blocks.
    ///
    /// # Errors
    /// [`Reason::TooManyEvents`].
    pub(super) fn stored(&mut self, head: StoredHead) -> Result<(), Reason> {
        if head.filling == Filling::Unusable {
            self.drop_tokens();
            self.batch.locals.truncate(self.open.locals);
            self.batch.media.truncate(self.open.media);
        }
        self.batch.media[self.open.media..].sort_unstable();
        let content = match head.filling {
            Filling::Tokens { .. } | Filling::Unusable => Span::new(self.open.tokens, self.batch.tokens.len()),
            Filling::LocalHashes => Span::new(self.open.locals, self.batch.locals.len()),
        };
        let hashes = Span::new(self.open.hashes, self.batch.hashes.len());
        let media = Span::new(self.open.media, self.batch.media.len());
        self.push(Record::Stored { head, hashes, content, media })
    }

    /// Closes the open event as removed blocks.
    ///
    /// # Errors
    /// [`Reason::TooManyEvents`].
    pub(super) fn removed(&mut self, medium: Medium, group: GroupId) -> Result<(), Reason> {
        let hashes = Span::new(self.open.hashes, self.batch.hashes.len());
        self.push(Record::Removed { hashes, medium, group })
    }

    /// Closes the open event as a clear of one tier, or of all.
    ///
    /// # Errors
    /// [`Reason::TooManyEvents`].
    pub(super) fn cleared(&mut self, tier: Option<Tier>) -> Result<(), Reason> {
        self.discard();
        self.push(Record::Cleared(Cleared { tier }))
    }

    /// Drops the open event.
    pub(super) fn discard(&mut self) {
        self.drop_tokens();
        self.batch.hashes.truncate(self.open.hashes);
        self.batch.locals.truncate(self.open.locals);
        self.batch.media.truncate(self.open.media);
    }

    /// Marks the batch as whole.
    pub(super) fn finish(mut self) {
        self.finished = true;
    }

    fn push(&mut self, record: Record) -> Result<(), Reason> {
        within(self.batch.records.len(), 1, EVENT_BATCH_EVENTS_MAX, Reason::TooManyEvents)?;
        self.batch.records.push(record);
        self.open = Open {
            hashes: self.batch.hashes.len(),
            tokens: self.batch.tokens.len(),
            locals: self.batch.locals.len(),
            media: self.batch.media.len(),
        };
        Ok(())
    }
}

impl Drop for BatchWriter<'_> {
    fn drop(&mut self) {
        if !self.finished {
            self.batch.clear();
        }
    }
}

fn within(have: usize, more: usize, max: usize, reason: Reason) -> Result<(), Reason> {
    if more > max.saturating_sub(have) { Err(reason) } else { Ok(()) }
}
