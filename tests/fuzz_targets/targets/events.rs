//! Event batches of both formats: a decoded batch is within its bounds, agrees with itself, and survives our encoder.

use kvrouted::event::{BatchInfo, Content, DecodeError, EventBatch, GroupKind, KvEvent, Medium, Stored, flat, msgpack};
use kvrouted::ids::{Scheme, Window};
use kvrouted::limits::{
    BLOCK_SIZE_TOKENS_MAX, EVENT_BATCH_BLOCKS_MAX, EVENT_BATCH_EVENTS_MAX, EVENT_BATCH_MEDIA_MAX,
    EVENT_BATCH_TOKENS_MAX, NAME_BYTES_MAX, UNKNOWN_NAME_BYTES_MAX, UNKNOWN_NAMES_BATCH_MAX,
};

/// Events of a batch that are sent through the encoder one by one.
const ENCODED_MAX: usize = 32;
/// What an arena may hold for each byte of a msgpack payload: no element is shorter than a byte, and arenas double.
const ARENA_BYTES_PER_PAYLOAD_BYTE: usize = 64;
const ARENA_BYTES_MIN: usize = 4096;

type Decode = fn(&[u8], &mut EventBatch) -> Result<(), DecodeError>;

/// A payload as engines send it.
pub(crate) fn msgpack(data: &[u8]) {
    let Some(batch) = decoded(data, msgpack::decode) else { return };
    let bytes_max = ARENA_BYTES_PER_PAYLOAD_BYTE * data.len() + ARENA_BYTES_MIN;
    assert!(batch.capacity_bytes() <= bytes_max, "{} bytes held for {}", batch.capacity_bytes(), data.len());
    batch.events().take(ENCODED_MAX).for_each(|event| one_event_goes_round(&event));
}

/// A payload of our own wire.
pub(crate) fn flatbuffer(data: &[u8]) {
    let Some(batch) = decoded(data, flat::decode) else { return };
    let mut encoder = flat::Encoder::new();
    let bytes = encoder.encode(batch.info(), batch.events()).to_vec();
    let mut again = EventBatch::new();
    flat::decode(&bytes, &mut again).expect("what is encoded can be decoded");
    let kept = batch.events().filter(has_a_tier).map(|event| on_our_wire(event, batch.info().scheme));
    assert!(kept.eq(again.events()), "{:?}\nbecame {:?}", shown(&batch), shown(&again));
    // Oddities are the decoder's, and a time of day beyond what a double counts in microseconds is rounded.
    let info = |info: &BatchInfo| BatchInfo {
        warnings: Default::default(),
        published_at_unix_s: info.published_at_unix_s.round(),
        ..*info
    };
    assert_eq!(info(batch.info()), info(again.info()));
}

/// Decodes twice, the second time into memory that held something else, and looks at what came out.
fn decoded(data: &[u8], decode: Decode) -> Option<EventBatch> {
    let (mut batch, mut used) = (EventBatch::new(), EventBatch::new());
    let outcome = decode(data, &mut batch);
    fill(&mut used);
    assert_eq!(decode(data, &mut used), outcome);
    match outcome {
        Ok(()) => {
            within_bounds(&batch);
            assert_eq!(shown(&batch), shown(&used), "what was in the batch before shows");
            Some(batch)
        }
        Err(error) => {
            assert!(error.offset <= data.len(), "{error} of {}", data.len());
            for batch in [&batch, &used] {
                assert!(batch.is_empty() && batch.blocks() == 0 && *batch.info() == BatchInfo::default(), "{error}");
            }
            None
        }
    }
}

fn fill(batch: &mut EventBatch) {
    let stored = Stored {
        hashes: &[kvrouted::ids::EngineHash(7)],
        parent: None,
        content: Content::Tokens { tokens: &[1, 2], bigram: false },
        block_size: 2,
        medium: Medium::Tier(kvrouted::ids::Tier::Device),
        group: kvrouted::ids::GroupId(3),
        group_kind: GroupKind::Main,
        lora: Some("adapter"),
        salt: kvrouted::event::Salt::Of("salt"),
        media: &[(0, 9)],
    };
    let info = BatchInfo { scheme: Some(Scheme { block_size: 2, window: Window::Plain }), ..BatchInfo::default() };
    let mut encoder = flat::Encoder::new();
    flat::decode(encoder.encode(&info, [KvEvent::Stored(stored)]), batch).expect("a sound batch");
}

fn shown(batch: &EventBatch) -> String {
    let events: Vec<_> = batch.events().collect();
    format!("{:?} {events:?} {:?}", batch.info(), batch.unknown_names().collect::<Vec<_>>())
}

fn within_bounds(batch: &EventBatch) {
    let (mut blocks, mut tokens, mut media) = (0, 0, 0);
    for event in batch.events() {
        match event {
            KvEvent::Stored(stored) => {
                blocks += stored.hashes.len();
                tokens += if let Content::Tokens { tokens, .. } = stored.content { tokens.len() } else { 0 };
                media += stored.media.len();
                stored_is_sound(&stored);
            }
            KvEvent::Removed(removed) => blocks += removed.hashes.len(),
            KvEvent::Cleared(_) => {}
        }
    }
    assert!(batch.len() <= EVENT_BATCH_EVENTS_MAX && batch.blocks() <= EVENT_BATCH_BLOCKS_MAX);
    assert!(tokens <= EVENT_BATCH_TOKENS_MAX && media <= EVENT_BATCH_MEDIA_MAX);
    assert_eq!(blocks, batch.blocks(), "every hash belongs to one event");
    // One more stands for all further names.
    assert!(batch.unknown_names().count() <= UNKNOWN_NAMES_BATCH_MAX + 2);
    assert!(batch.unknown_names().all(|(_, name, times)| name.len() <= UNKNOWN_NAME_BYTES_MAX && times > 0));
}

fn stored_is_sound(stored: &Stored<'_>) {
    let blocks = stored.hashes.len();
    match stored.content {
        Content::Tokens { tokens, bigram } => {
            assert!((1..=BLOCK_SIZE_TOKENS_MAX).contains(&stored.block_size), "{stored:?}");
            assert_eq!(tokens.len(), blocks * stored.block_size as usize + usize::from(bigram), "{stored:?}");
        }
        Content::LocalHashes(locals) => assert_eq!(locals.len(), blocks),
        Content::Unusable => assert!(stored.media.is_empty()),
    }
    assert!(stored.media.is_sorted() && stored.media.iter().all(|(block, _)| (*block as usize) < blocks), "{stored:?}");
    let salt = if let kvrouted::event::Salt::Of(salt) = stored.salt { Some(salt) } else { None };
    for name in stored.lora.iter().chain(salt.iter()) {
        assert!((1..=NAME_BYTES_MAX).contains(&name.len()), "{stored:?}");
    }
}

fn one_event_goes_round(event: &KvEvent<'_>) {
    let scheme = match event {
        KvEvent::Stored(Stored { content: Content::Tokens { bigram, .. }, block_size, .. }) => {
            let window = if *bigram { Window::Bigram } else { Window::Plain };
            Some(Scheme { block_size: *block_size, window })
        }
        _ => None,
    };
    let info = BatchInfo { scheme, ..BatchInfo::default() };
    let mut encoder = flat::Encoder::new();
    let bytes = encoder.encode(&info, [*event]).to_vec();
    assert_eq!(encoder.omitted(), usize::from(!has_a_tier(event)));
    if matches!(event, KvEvent::Stored(stored) if stored.block_size > BLOCK_SIZE_TOKENS_MAX) {
        return;
    }
    let mut again = EventBatch::new();
    flat::decode(&bytes, &mut again).unwrap_or_else(|error| panic!("{error}: {event:?}"));
    let expected = has_a_tier(event).then(|| on_our_wire(*event, scheme));
    assert!(expected.into_iter().eq(again.events()), "{event:?}\nbecame {}", shown(&again));
}

/// Whether our wire has a place for it.
fn has_a_tier(event: &KvEvent<'_>) -> bool {
    match event {
        KvEvent::Stored(Stored { medium, .. }) => matches!(medium, Medium::Tier(_)),
        KvEvent::Removed(removed) => matches!(removed.medium, Medium::Tier(_)),
        KvEvent::Cleared(_) => true,
    }
}

/// What remains of an event that our wire carried: see [`flat::Encoder`].
fn on_our_wire(event: KvEvent<'_>, scheme: Option<Scheme>) -> KvEvent<'_> {
    let KvEvent::Stored(stored) = event else { return event };
    let is_empty = matches!(stored.content, Content::Tokens { tokens: [], .. });
    KvEvent::Stored(Stored {
        group_kind: match stored.group_kind {
            GroupKind::Unknown => GroupKind::Unstated,
            GroupKind::Sliding { .. } | GroupKind::SlidingMla { .. } | GroupKind::Mamba => GroupKind::Other,
            kind => kind,
        },
        content: if is_empty { Content::Unusable } else { stored.content },
        media: if is_empty { &[] } else { stored.media },
        block_size: if stored.block_size == 0 {
            scheme.map_or(0, |scheme| scheme.block_size)
        } else {
            stored.block_size
        },
        ..stored
    })
}
