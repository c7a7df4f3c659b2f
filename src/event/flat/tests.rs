//! Encoded batches decode to the same events, and every other payload is refused.

use super::*;
use crate::event::{
    self, BatchInfo, Cleared, Content, DecodeWarning, EventBatch, GroupKind, KvEvent, Medium, Reason, Removed, Salt,
    Snapshot, SnapshotPhase, SourceTrust, Stored, format::Format,
};
use crate::ids::{DpRank, EngineHash, EventSeq, GroupId, LocalHash, Scheme, Seed, Tier, Window, WorkerId};
use crate::schema_generated::events as fb;
use crate::trust::{TrustLevel, TrustReason, TrustReasons};
use proptest::prelude::*;

const HASHES: &[EngineHash] = &[EngineHash(u64::MAX), EngineHash(0)];

fn info(window: Window) -> BatchInfo {
    BatchInfo {
        published_at_unix_s: 1_700_000_000.25,
        worker_id: Some(WorkerId(7)),
        dp_rank: Some(DpRank(3)),
        generation: Some(99),
        source: Some(SourceTrust {
            level: TrustLevel::LowerBound,
            reasons: [TrustReason::JoinedLate].into_iter().collect::<TrustReasons>(),
        }),
        scheme: Some(Scheme { block_size: 2, window }),
        heartbeat_last_seq: Some(EventSeq(41)),
        snapshot: Some(Snapshot {
            id: 5,
            phase: SnapshotPhase::End,
            watermark: EventSeq(40),
            chunk: 1,
            chunks: 2,
            blocks: 3,
            digest: 4,
            watermark_hash: 6,
        }),
        ..BatchInfo::default()
    }
}

fn stored(content: Content<'static>) -> Stored<'static> {
    Stored {
        hashes: HASHES,
        parent: Some(EngineHash(0)),
        content,
        block_size: 2,
        medium: Medium::Tier(Tier::Device),
        group: GroupId(0),
        group_kind: GroupKind::Main,
        lora: None,
        salt: Salt::Inherited,
        media: &[],
    }
}

fn tokens(tokens: &'static [u32], bigram: bool) -> Content<'static> {
    Content::Tokens { tokens, bigram }
}

fn events() -> Vec<KvEvent<'static>> {
    let plain = stored(tokens(&[1, 2, 3, u32::MAX], false));
    vec![
        KvEvent::Cleared(Cleared { tier: None }),
        KvEvent::Cleared(Cleared { tier: Some(Tier::Disk) }),
        KvEvent::Stored(plain),
        KvEvent::Stored(Stored { lora: Some("adapter"), salt: Salt::Of("tenant"), parent: None, ..plain }),
        KvEvent::Stored(Stored { lora: Some("adapter"), ..plain }),
        KvEvent::Stored(Stored { salt: Salt::Seed(Seed(u64::MAX)), ..plain }),
        KvEvent::Stored(Stored { salt: Salt::Unknown, media: &[(0, 9), (1, 3), (1, 4)], ..plain }),
        KvEvent::Stored(Stored {
            content: Content::LocalHashes(&[LocalHash(8), LocalHash(9)]),
            medium: Medium::Tier(Tier::External),
            group: GroupId(2),
            group_kind: GroupKind::Other,
            ..plain
        }),
        KvEvent::Removed(Removed { hashes: HASHES, medium: Medium::Tier(Tier::Host), group: GroupId(2) }),
        KvEvent::Removed(Removed { hashes: &[], medium: Medium::Tier(Tier::Device), group: GroupId(0) }),
    ]
}

#[test]
fn encoded_batches_decode_at_any_alignment() {
    let mut encoder = Encoder::new();
    let payload = encoder.encode(&info(Window::Plain), events()).to_vec();
    assert_eq!(encoder.omitted(), 0);
    for shift in 0..9 {
        let mut bytes = vec![0; shift];
        bytes.extend(&payload);
        let (mut batch, mut sticky) = (EventBatch::new(), None);
        event::decode(&bytes[shift..], &mut sticky, &mut batch).unwrap();
        assert_eq!(sticky, Some(Format::Flatbuffer));
        assert_eq!(*batch.info(), info(Window::Plain));
        assert_eq!(batch.events().collect::<Vec<_>>(), events());
    }
}

#[test]
fn bigram_tokens_and_placeholders_come_back() {
    let pairs = KvEvent::Stored(stored(tokens(&[1, 2, 3, 4, 5], true)));
    let placeholder = KvEvent::Stored(stored(Content::Unusable));
    let mut batch = EventBatch::new();
    decode(Encoder::new().encode(&info(Window::Bigram), [pairs, placeholder]), &mut batch).unwrap();
    assert_eq!(batch.events().collect::<Vec<_>>(), [pairs, placeholder]);
    assert_eq!(batch.info().warnings.iter().collect::<Vec<_>>(), [(DecodeWarning::NoTokens, 1)]);
}

#[test]
fn a_heartbeat_has_no_events() {
    let beat = BatchInfo { heartbeat_last_seq: Some(EventSeq(8)), generation: Some(1), ..BatchInfo::default() };
    let mut batch = EventBatch::new();
    decode(Encoder::new().encode(&beat, []), &mut batch).unwrap();
    assert_eq!((batch.len(), batch.info().heartbeat_last_seq), (0, Some(EventSeq(8))));
    assert_eq!(batch.info().source.map(|source| source.level), Some(TrustLevel::Exact));
}

#[test]
fn blocks_without_a_place_on_the_wire_are_counted_by_the_encoder() {
    let elsewhere = KvEvent::Stored(Stored { medium: Medium::Unknown, ..stored(tokens(&[1, 2, 3, 4], false)) });
    let remote = KvEvent::Removed(Removed { hashes: HASHES, medium: Medium::Remote, group: GroupId(0) });
    let mut encoder = Encoder::new();
    let mut batch = EventBatch::new();
    decode(encoder.encode(&info(Window::Plain), [elsewhere, remote]), &mut batch).unwrap();
    assert!(batch.is_empty());
    assert_eq!(encoder.omitted(), 2);
}

#[test]
fn counts_that_do_not_fit_make_content_unusable() {
    for (content, media, window, warning) in [
        (tokens(&[1, 2, 3], false), &[][..], Window::Plain, DecodeWarning::TokenCount),
        (tokens(&[1, 2, 3, 4], false), &[], Window::Bigram, DecodeWarning::TokenCount),
        (Content::LocalHashes(&[LocalHash(1)]), &[], Window::Plain, DecodeWarning::LocalHashCount),
        (tokens(&[1, 2, 3, 4], false), &[(2, 5)], Window::Plain, DecodeWarning::UnassignedMedia),
    ] {
        let event = KvEvent::Stored(Stored { media, ..stored(content) });
        let mut batch = EventBatch::new();
        decode(Encoder::new().encode(&info(window), [event]), &mut batch).unwrap();
        let Some(KvEvent::Stored(decoded)) = batch.events().next() else { panic!() };
        assert_eq!((decoded.content, decoded.media), (Content::Unusable, &[][..]));
        assert_eq!(batch.info().warnings.iter().collect::<Vec<_>>(), [(warning, 1)]);
    }
}

/// A batch of one event with these arguments, as a publisher newer than us might send it.
fn raw(
    scheme: Option<fb::SchemeArgs>,
    trust: fb::SourceTrust,
    event: &fb::EventArgs<'_>,
    with_hashes: bool,
) -> Vec<u8> {
    let mut builder = flatbuffers::FlatBufferBuilder::new();
    let hashes = with_hashes.then(|| builder.create_vector(&[1u64]));
    let event = fb::Event::create(&mut builder, &fb::EventArgs { hashes, ..*event });
    let events = Some(builder.create_vector(&[event]));
    let scheme = scheme.map(|args| fb::Scheme::create(&mut builder, &args));
    let root = fb::Batch::create(&mut builder, &fb::BatchArgs { scheme, trust, events, ..Default::default() });
    fb::finish_batch_buffer(&mut builder, root);
    builder.finished_data().to_vec()
}

#[test]
fn newer_values_are_counted_and_never_mistaken_for_known_ones() {
    let exact = fb::SourceTrust::Exact;
    let event = |kind, tier| fb::EventArgs { kind, tier, ..Default::default() };
    for (payload, events, warning) in [
        (raw(None, exact, &event(fb::EventKind(9), fb::Tier::Device), true), 0, DecodeWarning::UnknownTag),
        (raw(None, exact, &event(fb::EventKind::Cleared, fb::Tier(9)), false), 0, DecodeWarning::UnknownValue),
        (raw(None, exact, &event(fb::EventKind::Removed, fb::Tier(9)), true), 1, DecodeWarning::UnknownValue),
        (raw(None, exact, &event(fb::EventKind::Removed, fb::Tier::All), true), 1, DecodeWarning::UnknownValue),
        (
            raw(None, fb::SourceTrust(9), &event(fb::EventKind::Cleared, fb::Tier::All), false),
            1,
            DecodeWarning::UnknownValue,
        ),
    ] {
        let mut batch = EventBatch::new();
        decode(&payload, &mut batch).unwrap();
        assert_eq!(batch.len(), events);
        assert_eq!(batch.info().warnings.iter().collect::<Vec<_>>(), [(warning, 1)]);
        if let Some(KvEvent::Removed(removed)) = batch.events().next() {
            assert_eq!(removed.medium, Medium::Unknown);
        }
    }
}

#[test]
fn unsupported_schemes_are_refused_by_name() {
    let scheme = |block_size, window, seed_rule| Some(fb::SchemeArgs { block_size, window, seed_rule });
    let cleared = || fb::EventArgs { kind: fb::EventKind::Cleared, tier: fb::Tier::All, ..Default::default() };
    let exact = fb::SourceTrust::Exact;
    let (plain, additive) = (fb::Window::Plain, fb::SeedRule::Xxh3Additive);
    for (payload, reason) in [
        (raw(scheme(16, fb::Window(9), additive), exact, &cleared(), false), Reason::UnsupportedScheme),
        (raw(scheme(16, plain, fb::SeedRule(1)), exact, &cleared(), false), Reason::UnsupportedScheme),
        (raw(scheme(0, plain, additive), exact, &cleared(), false), Reason::OutOfRange),
        (raw(scheme(1 << 17, plain, additive), exact, &cleared(), false), Reason::OutOfRange),
        (raw(None, exact, &fb::EventArgs::default(), false), Reason::MissingField),
        (raw(None, exact, &fb::EventArgs { block_size: 1 << 17, ..Default::default() }, true), Reason::OutOfRange),
        (b"\0\0\0\0KVE".to_vec(), Reason::UnknownFormat),
        (b"\xff\xff\xff\xffKVEV".to_vec(), Reason::InvalidFlatbuffer),
    ] {
        let mut batch = EventBatch::new();
        assert_eq!(decode(&payload, &mut batch).unwrap_err().reason, reason);
        assert!(batch.is_empty() && *batch.info() == BatchInfo::default());
    }
}

#[test]
fn the_format_sticks_once_a_batch_decoded() {
    let (mut batch, mut sticky) = (EventBatch::new(), None);
    let payload = Encoder::new().encode(&info(Window::Plain), events()).to_vec();
    assert_eq!(event::decode(b"?", &mut sticky, &mut batch).unwrap_err().reason, Reason::UnknownFormat);
    assert!(event::decode(&payload[..20], &mut sticky, &mut batch).is_err());
    assert_eq!(sticky, None);
    event::decode(&payload, &mut sticky, &mut batch).unwrap();
    assert!(!batch.is_empty());
    assert_eq!(event::decode(b"\x92\x01\x90", &mut sticky, &mut batch).unwrap_err().reason, Reason::UnknownFormat);
    assert!(batch.is_empty());
    assert_eq!(sticky, Some(Format::Flatbuffer));
}

#[test]
fn a_payload_cut_anywhere_never_panics_and_an_error_leaves_nothing() {
    let payload = Encoder::new().encode(&info(Window::Plain), events()).to_vec();
    let mut batch = EventBatch::new();
    for len in 0..payload.len() {
        let decoded = decode(&payload[..len], &mut batch);
        assert!(decoded.is_ok() || (batch.is_empty() && batch.blocks() == 0), "cut at {len}");
        assert!(decoded.is_err() || len > payload.len() / 2, "cut at {len}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn damage_never_panics_and_an_error_leaves_nothing(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut payload = Encoder::new().encode(&info(Window::Plain), events()).to_vec();
        for (at, byte) in &flips {
            *at.get_mut(&mut payload) = *byte;
        }
        let mut batch = EventBatch::new();
        let decoded = decode(&payload, &mut batch);
        prop_assert!(decoded.is_ok() || (batch.is_empty() && batch.blocks() == 0));
        for event in batch.events() {
            if let KvEvent::Stored(stored) = event {
                prop_assert!(stored.media.iter().all(|(block, _)| (*block as usize) < stored.hashes.len()));
            }
        }
    }
}
