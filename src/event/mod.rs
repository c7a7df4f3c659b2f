//! WHAT a worker says, as values: nothing here touches a socket, a clock or a thread.
//!
//! Bytes of either wire become one [`KvEvent`] type. [`EventBatch`] is the reusable arena that a decoder
//! fills; a batch is only handed out whole, so that a message that fails half way changes nothing.

mod batch;
mod decode_warning;
mod error;
pub mod flat;
pub mod format;
pub mod gate;
mod group_kind;
pub mod media;
pub mod msgpack;
pub mod recovery;
pub mod trust;

pub use batch::{
    BatchInfo, BatchWriter, EventBatch, Filling, SaltText, Snapshot, SnapshotPhase, SourceTrust, StoredHead, Text,
};
pub use decode_warning::{DecodeWarning, DecodeWarnings, UnknownName};
pub use error::{DecodeError, Reason};
pub use group_kind::GroupKind;

use format::Format;

use crate::ids::{EngineHash, GroupId, LocalHash, Seed, Tier};

/// Decodes a payload of either wire into `batch`, whatever was in it before.
///
/// `sticky` is the format of the stream so far; the first batch that decodes fixes it.
///
/// # Errors
/// What is wrong and where; the batch is then empty, and `sticky` unchanged.
pub fn decode(payload: &[u8], sticky: &mut Option<Format>, batch: &mut EventBatch) -> Result<(), DecodeError> {
    batch.clear();
    let format = sticky.or_else(|| format::detect(payload)).ok_or(DecodeError::new(Reason::UnknownFormat, 0))?;
    match format {
        Format::Flatbuffer => flat::decode(payload, batch)?,
        Format::Msgpack => msgpack::decode(payload, batch)?,
    }
    *sticky = Some(format);
    Ok(())
}

/// One thing a worker said about its cache, borrowed from an [`EventBatch`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KvEvent<'a> {
    /// Blocks are now held.
    Stored(Stored<'a>),
    /// One reference to each of these blocks is gone.
    Removed(Removed<'a>),
    /// Nothing is held any more, in one tier or in all.
    Cleared(Cleared),
}

/// A chain of blocks that is now held.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stored<'a> {
    /// What the engine calls the blocks, nearest the root first.
    pub hashes: &'a [EngineHash],
    /// The block before the first; `None` at the root.
    pub parent: Option<EngineHash>,
    /// What is in the blocks.
    pub content: Content<'a>,
    /// Tokens per block as the event states it; 0 = not stated (placeholders).
    pub block_size: u32,
    /// Where the blocks are.
    pub medium: Medium,
    /// Which KV-cache group holds them, `GroupId(0)` where the engine names none.
    pub group: GroupId,
    /// What kind of attention that group serves.
    pub group_kind: GroupKind,
    /// LoRA adapter's name; never empty.
    pub lora: Option<&'a str>,
    /// What the event says about the cache salt of its chain.
    pub salt: Salt<'a>,
    /// Multimodal objects as (block within the event, hash), in ascending block order.
    pub media: &'a [(u32, u64)],
}

/// One reference to each of these blocks is gone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Removed<'a> {
    /// What the engine calls the blocks.
    pub hashes: &'a [EngineHash],
    /// Where they were.
    pub medium: Medium,
    /// Which KV-cache group held them.
    pub group: GroupId,
}

/// Nothing is held any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cleared {
    /// The tier that was emptied; `None` = all that the publisher speaks for. A relay speaks for all tiers, an engine
    /// for its own memory and not for a connector's.
    pub tier: Option<Tier>,
}

/// What is in the blocks of a [`Stored`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Content<'a> {
    /// The tokens as they lie in the prompt, the first block's first token first. Exactly
    /// `hashes.len() * block_size` of them, plus the one that overlaps the next block when `bigram`.
    Tokens {
        /// Token ids.
        tokens: &'a [u32],
        /// Whether the engine sent pairs.
        bigram: bool,
    },
    /// Already hashed by a relay, one per engine hash.
    LocalHashes(&'a [LocalHash]),
    /// Nothing usable: a placeholder (no tokens), or tokens that cannot be assigned to the hashes. What the blocks
    /// are can then only be known from where else their hashes are held.
    Unusable,
}

/// What a [`Stored`] says about the salt of its chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Salt<'a> {
    /// Nothing: it is the parent's, and none at the root.
    Inherited,
    /// The chain's salt is this; never empty.
    Of(&'a str),
    /// A relay's word: LoRA and salt of the chain come to this seed.
    Seed(Seed),
    /// The wire could not say (several candidates, or a source that did not know).
    Unknown,
}

/// Where an event says its blocks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// A tier of which the event says everything.
    Tier(Tier),
    /// A tier that a connector reports: the event's hashes are sound and nothing else of it, and a clear of the
    /// engine does not speak of the tier.
    Offloaded(Tier),
    /// A store that never says when its blocks are gone; they are not counted.
    NeverRemoved,
    /// A name that maps to no tier; the blocks are not counted.
    Unknown,
    /// On another machine; the blocks are not this worker's.
    Remote,
}
