//! Events of workers, as values, and the pure state machines over them. No socket, clock or thread is used here.
//!
//! Payloads of both formats become one type, [`KvEvent`]. [`EventBatch`] is the reusable arena that a decoder fills.
//! Readers get only whole batches, so a message that fails half-way changes nothing.

mod batch;
mod decode_warning;
pub mod engine_snapshot;
mod error;
pub mod flat;
pub mod format;
mod group_kind;
pub mod media;
pub mod msgpack;
pub mod recovery;
pub mod sequence_gate;
pub(crate) mod worker_trust;

pub use batch::{BatchInfo, EventBatch, Snapshot, SnapshotPhase, SourceTrust};
pub use decode_warning::{DecodeWarning, DecodeWarnings, UnknownName};
pub use error::{DecodeError, Reason};
pub use group_kind::GroupKind;

use format::Format;

use crate::ids::{EngineHash, GroupId, LocalHash, Seed, Tier};

/// Decodes a payload of either format into `batch`, and drops its earlier content.
///
/// `sticky` is the format of the stream so far. The first batch that decodes fixes it.
///
/// # Errors
/// The fault and its place. The batch is then empty, and `sticky` unchanged.
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

/// One event of a worker's cache, borrowed from an [`EventBatch`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KvEvent<'a> {
    /// Blocks are now held.
    Stored(Stored<'a>),
    /// One reference to each of these blocks is gone.
    Removed(Removed<'a>),
    /// All blocks are gone, in one tier or in all.
    Cleared(Cleared),
}

/// A chain of blocks that is now held.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stored<'a> {
    /// Engine hashes of the blocks, nearest the root first.
    pub hashes: &'a [EngineHash],
    /// The block before the first; `None` at the root.
    pub parent: Option<EngineHash>,
    /// The content of the blocks.
    pub content: Content<'a>,
    /// Tokens per block as the event states them; 0 = not stated (placeholders).
    pub block_size: u32,
    /// The medium that holds the blocks.
    pub medium: Medium,
    /// The KV group that holds them; `GroupId(0)` if the engine names none.
    pub group: GroupId,
    /// The kind of attention that the group serves.
    pub group_kind: GroupKind,
    /// The name of the LoRA adapter; never empty.
    pub lora: Option<&'a str>,
    /// The cache salt of the chain, as far as the event states it.
    pub salt: Salt<'a>,
    /// Multimodal objects as (block within the event, hash), in ascending block order.
    pub media: &'a [(u32, u64)],
}

/// One reference to each of these blocks is gone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Removed<'a> {
    /// Engine hashes of the blocks.
    pub hashes: &'a [EngineHash],
    /// The medium that held them.
    pub medium: Medium,
    /// The KV group that held them.
    pub group: GroupId,
}

/// All blocks of one tier, or of all, are gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cleared {
    /// The tier that was emptied; `None` = all tiers of the publisher. A relay publishes for all tiers, an engine for
    /// its own memory and not for a connector's.
    pub tier: Option<Tier>,
}

/// The content of the blocks of a [`Stored`].
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
    /// Nothing usable: a placeholder (no tokens), or tokens that cannot be assigned to the hashes. The content is then
    /// known only if the same hashes are held elsewhere.
    Unusable,
}

/// The salt of a chain, as far as a [`Stored`] states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Salt<'a> {
    /// Not stated: the salt of the parent, or no salt at the root.
    Inherited,
    /// The salt of the chain; never empty.
    Of(&'a str),
    /// A relay states the seed that LoRA and salt of the chain give.
    Seed(Seed),
    /// The format could not express it (several candidates, or a source that did not know).
    Unknown,
}

/// The place where an event says that its blocks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// A tier whose events are complete.
    Tier(Tier),
    /// A tier that a connector reports. Only the hashes of the event can be used, and a clear of the engine does not
    /// include the tier.
    Offloaded(Tier),
    /// A store that never announces when its blocks are gone. They are not counted.
    NeverRemoved,
    /// A name that maps to no tier. The blocks are not counted.
    Unknown,
    /// Another machine. The blocks are not this worker's.
    Remote,
}
