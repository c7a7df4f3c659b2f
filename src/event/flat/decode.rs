//! Decodes a flatbuffer into a batch.

use crate::event::batch::{BatchWriter, EventBatch, Filling, SaltText, StoredHead};
use crate::event::error::{DecodeError, Reason};
use crate::event::{DecodeWarning, GroupKind, Medium, Snapshot, SnapshotPhase, SourceTrust};
use crate::ids::{DpRank, EngineHash, EventSeq, GroupId, LocalHash, Scheme, Seed, Tier, Window, WorkerId};
use crate::limits::{BLOCK_SIZE_TOKENS_MAX, EVENT_BATCH_EVENTS_MAX, EVENT_MESSAGE_BYTES_MAX, NAME_BYTES_MAX};
use crate::schema_generated::events as fb;
use crate::trust::{TrustLevel, TrustReasons};
use flatbuffers::VerifierOptions;

/// Tables of a batch: itself, scheme, heartbeat, snapshot, and an event with its seed.
const TABLES_MAX: usize = 4 + 2 * EVENT_BATCH_EVENTS_MAX;
/// Nesting of a batch: batch, vector of events, event, seed, string.
const DEPTH_MAX: usize = 8;
/// The limit on the apparent size of a batch, in which a shared vector counts as often as it is used.
const APPARENT_BYTES_MAX: usize = 4 * EVENT_MESSAGE_BYTES_MAX;

type Result<T> = std::result::Result<T, Reason>;

/// Decodes a payload into `batch`, and drops its earlier content.
///
/// Kinds and values that this version does not know are skipped and counted in
/// [`BatchInfo::warnings`](crate::event::BatchInfo); so are stored events whose content cannot be used.
///
/// # Errors
/// The fault of the payload. The batch is then empty.
pub fn decode(payload: &[u8], batch: &mut EventBatch) -> std::result::Result<(), DecodeError> {
    let mut writer = BatchWriter::new(batch);
    if payload.len() > EVENT_MESSAGE_BYTES_MAX {
        return Err(DecodeError::new(Reason::MessageTooLarge, EVENT_MESSAGE_BYTES_MAX));
    }
    if payload.len() < 8 || !fb::batch_buffer_has_identifier(payload) {
        return Err(DecodeError::new(Reason::UnknownFormat, 0));
    }
    let options = VerifierOptions {
        max_depth: DEPTH_MAX,
        max_tables: TABLES_MAX,
        max_apparent_size: APPARENT_BYTES_MAX,
        ignore_missing_null_terminator: false,
    };
    let table =
        fb::root_as_batch_with_opts(&options, payload).map_err(|_| DecodeError::new(Reason::InvalidFlatbuffer, 0))?;
    fill(&table, &mut writer).map_err(|reason| DecodeError::new(reason, 0))?;
    writer.finish();
    Ok(())
}

fn fill(table: &fb::Batch<'_>, writer: &mut BatchWriter<'_>) -> Result<()> {
    let scheme = table.scheme().map(|scheme| scheme_of(&scheme)).transpose()?;
    let (level, known) = level_of(table.trust());
    if !known {
        writer.count(DecodeWarning::UnknownValue);
    }
    let snapshot = table.snapshot().and_then(|part| snapshot_of(&part));
    if table.snapshot().is_some() && snapshot.is_none() {
        writer.count(DecodeWarning::UnknownValue);
    }
    let info = writer.info_mut();
    info.published_at_unix_s = table.published_unix_us() as f64 / 1e6;
    info.worker_id = table.worker_id().map(WorkerId);
    info.dp_rank = table.dp_rank().map(DpRank);
    info.generation = Some(table.generation());
    info.source = Some(SourceTrust { level, reasons: TrustReasons::from_bits(table.reasons()) });
    info.scheme = scheme;
    info.heartbeat_last_seq = table.heartbeat().map(|beat| EventSeq(beat.last_seq()));
    info.snapshot = snapshot;
    for event in table.events().iter().flatten() {
        match event.kind() {
            fb::EventKind::Stored => stored(&event, scheme, writer)?,
            fb::EventKind::Removed => {
                push_hashes(&event, writer)?;
                let medium = medium_of(&event, writer);
                writer.removed(medium, GroupId(event.group()))?;
            }
            fb::EventKind::Cleared => cleared(&event, writer)?,
            _ => writer.count(DecodeWarning::UnknownTag),
        }
    }
    Ok(())
}

fn scheme_of(scheme: &fb::Scheme<'_>) -> Result<Scheme> {
    let window = match scheme.window() {
        fb::Window::Plain => Window::Plain,
        fb::Window::Bigram => Window::Bigram,
        _ => return Err(Reason::UnsupportedScheme),
    };
    if scheme.seed_rule() != fb::SeedRule::Xxh3Additive {
        return Err(Reason::UnsupportedScheme);
    }
    if scheme.block_size() == 0 || scheme.block_size() > BLOCK_SIZE_TOKENS_MAX {
        return Err(Reason::OutOfRange);
    }
    Ok(Scheme { block_size: scheme.block_size(), window })
}

/// The level, and whether it is known. An unknown level may mean anything, so it counts as `unproven`.
fn level_of(trust: fb::SourceTrust) -> (TrustLevel, bool) {
    TrustLevel::from_u8(trust.0).map_or((TrustLevel::Unproven, false), |level| (level, true))
}

/// `None` for an unknown phase.
fn snapshot_of(part: &fb::Snapshot<'_>) -> Option<Snapshot> {
    let phase = match part.phase() {
        fb::SnapshotPhase::Begin => SnapshotPhase::Begin,
        fb::SnapshotPhase::Chunk => SnapshotPhase::Chunk,
        fb::SnapshotPhase::End => SnapshotPhase::End,
        _ => return None,
    };
    Some(Snapshot {
        id: part.id(),
        phase,
        watermark: EventSeq(part.watermark()),
        chunk: part.chunk(),
        chunks: part.chunks(),
        blocks: part.blocks(),
        digest: part.digest(),
        watermark_hash: part.watermark_hash(),
    })
}

const fn tier_of(tier: fb::Tier) -> Option<Tier> {
    match tier {
        fb::Tier::Device => Some(Tier::Device),
        fb::Tier::Host => Some(Tier::Host),
        fb::Tier::Disk => Some(Tier::Disk),
        fb::Tier::External => Some(Tier::External),
        _ => None,
    }
}

fn medium_of(event: &fb::Event<'_>, writer: &mut BatchWriter<'_>) -> Medium {
    tier_of(event.tier()).map_or_else(
        || {
            writer.count(DecodeWarning::UnknownValue);
            Medium::Unknown
        },
        Medium::Tier,
    )
}

fn cleared(event: &fb::Event<'_>, writer: &mut BatchWriter<'_>) -> Result<()> {
    match (event.tier(), tier_of(event.tier())) {
        (fb::Tier::All, _) => writer.cleared(None),
        (_, Some(tier)) => writer.cleared(Some(tier)),
        // An unknown tier: none of its blocks were ever counted.
        _ => {
            writer.count(DecodeWarning::UnknownValue);
            Ok(())
        }
    }
}

fn push_hashes(event: &fb::Event<'_>, writer: &mut BatchWriter<'_>) -> Result<()> {
    let Some(hashes) = event.hashes() else { return Err(Reason::MissingField) };
    writer.reserve_hashes(hashes.len())?;
    // Whole slices of bytes: the vector's own iterator looks each element up.
    let (hashes, _) = hashes.bytes().as_chunks();
    writer.push_hashes(hashes.iter().map(|hash| EngineHash(u64::from_le_bytes(*hash))));
    Ok(())
}

fn stored(event: &fb::Event<'_>, scheme: Option<Scheme>, writer: &mut BatchWriter<'_>) -> Result<()> {
    push_hashes(event, writer)?;
    let block_size = match event.block_size() {
        0 => scheme.map_or(0, |scheme| scheme.block_size),
        size => size,
    };
    if block_size > BLOCK_SIZE_TOKENS_MAX {
        return Err(Reason::OutOfRange);
    }
    let filling = match content(event, block_size, scheme, writer)? {
        Ok(filling) => filling,
        Err(warning) => {
            writer.count(warning);
            Filling::Unusable
        }
    };
    let mut head = StoredHead {
        parent: event.parent().map(EngineHash),
        filling,
        block_size,
        medium: medium_of(event, writer),
        group: GroupId(event.group()),
        group_kind: group_kind_of(event.group_kind()),
        lora: None,
        salt: SaltText::Inherited,
    };
    names(event, &mut head, writer)?;
    writer.stored(head)
}

/// Copies tokens or local hashes, and media, into the open event. The inner error is the warning if they are unusable.
fn content(
    event: &fb::Event<'_>,
    block_size: u32,
    scheme: Option<Scheme>,
    writer: &mut BatchWriter<'_>,
) -> Result<std::result::Result<Filling, DecodeWarning>> {
    let blocks = writer.hashes().len();
    for object in event.media().iter().flatten() {
        if object.block() as usize >= blocks {
            return Ok(Err(DecodeWarning::UnassignedMedia));
        }
        writer.push_media(object.block(), object.hash())?;
    }
    if let Some(locals) = event.local_hashes() {
        if locals.len() != blocks {
            return Ok(Err(DecodeWarning::LocalHashCount));
        }
        writer.extend_locals(locals.iter().map(LocalHash))?;
        return Ok(Ok(Filling::LocalHashes));
    }
    let Some(tokens) = event.tokens().filter(|tokens| !tokens.is_empty()) else {
        return Ok(Err(DecodeWarning::NoTokens));
    };
    let bigram = scheme.is_some_and(|scheme| scheme.window == Window::Bigram);
    if tokens.len() != blocks * block_size as usize + usize::from(bigram) {
        return Ok(Err(DecodeWarning::TokenCount));
    }
    let (bytes, _) = tokens.bytes().as_chunks();
    for (slot, token) in writer.extend_tokens(tokens.len())?.iter_mut().zip(bytes) {
        *slot = u32::from_le_bytes(*token);
    }
    Ok(Ok(Filling::Tokens { bigram }))
}

fn names(event: &fb::Event<'_>, head: &mut StoredHead, writer: &mut BatchWriter<'_>) -> Result<()> {
    if let Some(seed) = event.seed_hash() {
        head.salt = SaltText::Seed(Seed(seed));
        return Ok(());
    }
    let Some(seed) = event.seed() else { return Ok(()) };
    let named = |name: Option<&'_ str>| name.filter(|name| !name.is_empty()).map(str::len);
    let longest = named(seed.lora()).max(named(seed.salt())).unwrap_or(0);
    if longest > NAME_BYTES_MAX {
        writer.count(DecodeWarning::OversizedName);
        head.salt = SaltText::Unknown;
        return Ok(());
    }
    if let Some(lora) = seed.lora().filter(|name| !name.is_empty()) {
        head.lora = Some(writer.keep_text(lora)?);
    }
    if !seed.known() {
        head.salt = SaltText::Unknown;
    } else if let Some(salt) = seed.salt().filter(|salt| !salt.is_empty()) {
        head.salt = SaltText::Of(writer.keep_text(salt)?);
    }
    Ok(())
}

const fn group_kind_of(kind: fb::GroupKind) -> GroupKind {
    match kind {
        fb::GroupKind::Unknown => GroupKind::Unstated,
        fb::GroupKind::Full | fb::GroupKind::Mla | fb::GroupKind::SinkFull => GroupKind::Main,
        fb::GroupKind::SlidingWindow
        | fb::GroupKind::SlidingWindowMla
        | fb::GroupKind::Mamba
        | fb::GroupKind::ChunkedLocal
        | fb::GroupKind::EncoderOnly
        | fb::GroupKind::Cross => GroupKind::Other,
        // A kind that this version does not know.
        _ => GroupKind::Unknown,
    }
}
