//! A decoded batch in arenas that are used again, and the only way to fill it.

use std::ops::Range;

use super::decode_warning::shown;
use super::error::Reason;
use super::{Cleared, Content, DecodeWarning, DecodeWarnings, GroupKind, KvEvent, Medium, Removed, Salt, Stored, UnknownName};
use crate::ids::{DpRank, EngineHash, EventSeq, GroupId, LocalHash, Scheme, Seed, Tier, WorkerId};
use crate::limits::{
    EVENT_BATCH_BLOCKS_MAX, EVENT_BATCH_EVENTS_MAX, EVENT_BATCH_MEDIA_MAX, EVENT_BATCH_TEXT_BYTES_MAX,
    EVENT_BATCH_TOKENS_MAX, UNKNOWN_NAMES_BATCH_MAX,
};
use crate::trust::{TrustLevel, TrustReasons};

/// What a batch says beside its events.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BatchInfo {
    /// When the publisher says it published, seconds of Unix time; 0 where it does not say.
    pub published_at_unix_s: f64,
    /// Which worker the batch says it is of (relays only).
    pub worker_id: Option<WorkerId>,
    /// Which data-parallel rank it is of.
    pub dp_rank: Option<DpRank>,
    /// Drawn anew whenever the publisher starts (relays only).
    pub generation: Option<u64>,
    /// What the relay knows about its own view (relays only).
    pub source: Option<SourceTrust>,
    /// How the relay's blocks are cut and hashed (relays only).
    pub scheme: Option<Scheme>,
    /// The last sequence that carried events, where the batch is a heartbeat (relays only).
    pub heartbeat_last_seq: Option<EventSeq>,
    /// Which part of a snapshot the batch is (relays only).
    pub snapshot: Option<Snapshot>,
    /// A salt came as a gateway's users say it.
    pub has_plain_salts: bool,
    /// A salt came with the prefix that some gateways put before it, which was taken off.
    pub has_prefixed_salts: bool,
    /// What was passed over or could not be used, counted by reason.
    pub warnings: DecodeWarnings,
}

/// A relay's trust in the view it publishes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceTrust {
    /// How much it believes itself.
    pub level: TrustLevel,
    /// Why not more.
    pub reasons: TrustReasons,
}

/// A part of a worker's whole view, sent as a run of stored events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Which snapshot.
    pub id: u64,
    /// Which part of it.
    pub phase: SnapshotPhase,
    /// The events up to and including this sequence are contained.
    pub watermark: EventSeq,
    /// Number of the chunk, from 0.
    pub chunk: u32,
    /// At the end: how many chunks there were.
    pub chunks: u32,
    /// At the end: how many (tier, group, block) references they held.
    pub blocks: u64,
    /// At the end: an order-independent digest of those references.
    pub digest: u64,
    /// At the beginning: XXH3-64 of the payload of the batch that has the watermark's sequence.
    pub watermark_hash: u64,
}

/// Which part of a snapshot a batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotPhase {
    /// It begins.
    Begin,
    /// Some of its blocks.
    Chunk,
    /// It is complete.
    End,
}

/// Events of one message, in arenas that keep their memory from message to message.
///
/// Decoders fill it through a [`BatchWriter`]; it holds a whole batch or none.
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

/// A name or salt that a [`BatchWriter`] has taken.
#[derive(Clone, Copy, Debug, Default)]
pub struct Text(Span);

/// What a decoder says about the content of a stored event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filling {
    /// The open event's tokens.
    Tokens {
        /// Whether the engine sent pairs.
        bigram: bool,
    },
    /// The open event's local hashes.
    LocalHashes,
    /// Nothing that can be used; tokens, local hashes and media of the open event are dropped.
    Unusable,
}

/// A stored event beside what lies in arenas; closes the open event.
#[derive(Clone, Copy, Debug)]
pub struct StoredHead {
    /// The block before the first.
    pub parent: Option<EngineHash>,
    /// What to make of the open event's tokens and local hashes.
    pub filling: Filling,
    /// Tokens per block, 0 = not stated.
    pub block_size: u32,
    /// Where the blocks are.
    pub medium: Medium,
    /// Which KV-cache group holds them.
    pub group: GroupId,
    /// What attention that group serves.
    pub group_kind: GroupKind,
    /// LoRA adapter.
    pub lora: Option<Text>,
    /// What the event says about the salt.
    pub salt: SaltText,
}

/// [`Salt`] before the batch is whole.
#[derive(Clone, Copy, Debug)]
pub enum SaltText {
    /// Nothing said.
    Inherited,
    /// This salt.
    Of(Text),
    /// This seed.
    Seed(Seed),
    /// The wire could not say.
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

    /// Forgets everything but the memory.
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

    /// What the batch says beside its events.
    #[must_use]
    pub const fn info(&self) -> &BatchInfo {
        &self.info
    }

    /// How many events there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there is no event.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Blocks stored plus blocks removed.
    #[must_use]
    pub const fn blocks(&self) -> usize {
        self.hashes.len()
    }

    /// The events, in the order in which they happened.
    pub fn events(&self) -> impl ExactSizeIterator<Item = KvEvent<'_>> {
        self.records.iter().map(|record| self.event(record))
    }

    /// The first block that an event is about: what will be looked up when its turn comes.
    #[must_use]
    pub fn first_hash(&self, event: usize) -> Option<EngineHash> {
        let hashes = match self.records.get(event)? {
            Record::Stored { hashes, .. } | Record::Removed { hashes, .. } => hashes,
            Record::Cleared(_) => return None,
        };
        self.hashes[hashes.range()].first().copied()
    }

    /// Names that no rule covers, and how often each came. What is shown of a name; it is empty for all those that
    /// came after [`UNKNOWN_NAMES_BATCH_MAX`] others.
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

    /// Bytes the arenas hold on to, for status and for the tests of reuse.
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
/// Reservations are the caller's word: it must not claim more than the bytes it still has can hold.
#[derive(Debug)]
pub struct BatchWriter<'b> {
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
    pub fn new(batch: &'b mut EventBatch) -> Self {
        batch.clear();
        Self { batch, open: Open::default(), finished: false, last_text: Text::default() }
    }

    /// What the batch says beside its events.
    pub const fn info_mut(&mut self) -> &mut BatchInfo {
        &mut self.batch.info
    }

    /// Counts something passed over.
    pub const fn count(&mut self, warning: DecodeWarning) {
        self.batch.info.warnings.count(warning, 1);
    }

    /// Counts a name that no rule covers.
    pub fn count_unknown_name(&mut self, of: UnknownName, name: &[u8]) {
        let EventBatch { unknown_names, text, .. } = &mut *self.batch;
        let find = |name: &[u8]| {
            let is_it =
                |(kind, known, _): &(UnknownName, Text, u32)| *kind == of && text[known.0.range()].chars().eq(shown(name));
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
    pub fn reserve_hashes(&mut self, count: usize) -> Result<(), Reason> {
        within(self.batch.hashes.len(), count, EVENT_BATCH_BLOCKS_MAX, Reason::TooManyBlocks)?;
        self.batch.hashes.reserve(count);
        Ok(())
    }

    /// Adds a hash for which room was reserved.
    pub fn push_hash(&mut self, hash: EngineHash) {
        self.batch.hashes.push(hash);
    }

    /// The open event's hashes.
    #[must_use]
    pub fn hashes(&self) -> &[EngineHash] {
        &self.batch.hashes[self.open.hashes..]
    }

    /// Adds `count` zero tokens and hands them out to be filled.
    ///
    /// # Errors
    /// [`Reason::TooManyTokens`].
    pub fn extend_tokens(&mut self, count: usize) -> Result<&mut [u32], Reason> {
        let from = self.batch.tokens.len();
        within(from, count, EVENT_BATCH_TOKENS_MAX, Reason::TooManyTokens)?;
        self.batch.tokens.resize(from + count, 0);
        Ok(&mut self.batch.tokens[from..])
    }

    /// The open event's tokens.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.batch.tokens[self.open.tokens..]
    }

    /// Drops the open event's tokens.
    pub fn drop_tokens(&mut self) {
        self.batch.tokens.truncate(self.open.tokens);
    }

    /// Adds local hashes, at most one per hash of a batch.
    ///
    /// # Errors
    /// [`Reason::TooManyBlocks`].
    pub fn extend_locals(&mut self, locals: impl ExactSizeIterator<Item = LocalHash>) -> Result<(), Reason> {
        within(self.batch.locals.len(), locals.len(), EVENT_BATCH_BLOCKS_MAX, Reason::TooManyBlocks)?;
        self.batch.locals.extend(locals);
        Ok(())
    }

    /// Adds a multimodal object of a block of the open event.
    ///
    /// # Errors
    /// [`Reason::TooManyMedia`].
    pub fn push_media(&mut self, block: u32, hash: u64) -> Result<(), Reason> {
        within(self.batch.media.len(), 1, EVENT_BATCH_MEDIA_MAX, Reason::TooManyMedia)?;
        self.batch.media.push((block, hash));
        Ok(())
    }

    /// Keeps a name or salt. The one kept last is not kept twice.
    ///
    /// # Errors
    /// [`Reason::TooMuchText`].
    pub fn keep_text(&mut self, text: &str) -> Result<Text, Reason> {
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
    pub fn stored(&mut self, head: StoredHead) -> Result<(), Reason> {
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
    pub fn removed(&mut self, medium: Medium, group: GroupId) -> Result<(), Reason> {
        let hashes = Span::new(self.open.hashes, self.batch.hashes.len());
        self.push(Record::Removed { hashes, medium, group })
    }

    /// Closes the open event as a clear of one tier, or of all.
    ///
    /// # Errors
    /// [`Reason::TooManyEvents`].
    pub fn cleared(&mut self, tier: Option<Tier>) -> Result<(), Reason> {
        self.discard();
        self.push(Record::Cleared(Cleared { tier }))
    }

    /// Closes the open event as none.
    pub fn discard(&mut self) {
        self.drop_tokens();
        self.batch.hashes.truncate(self.open.hashes);
        self.batch.locals.truncate(self.open.locals);
        self.batch.media.truncate(self.open.media);
    }

    /// The batch is whole.
    pub fn finish(mut self) {
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
