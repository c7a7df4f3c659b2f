//! Shapes that no capture has: rare, hostile, or from engines to come.

use super::*;
use crate::event::{Content, GroupKind, KvEvent, Medium, Salt, Stored};
use crate::ids::{EngineHash, GroupId, Tier};
use crate::limits::{
    EVENT_BATCH_BLOCKS_MAX, EVENT_BATCH_EVENTS_MAX, EVENT_BATCH_TOKENS_MAX, MSGPACK_DEPTH_MAX, UNKNOWN_NAMES_BATCH_MAX,
};
use serde_json::{Value, json};

/// JSON as msgpack; `{"$bin": hex}` as bytes. Lengths and integers take their longest form, which decoders must
/// accept as well as the shortest that engines send.
fn pack(value: &Value, out: &mut Vec<u8>) {
    let head = |out: &mut Vec<u8>, marker: u8, len: usize| {
        out.push(marker);
        out.extend((len as u32).to_be_bytes());
    };
    match value {
        Value::Null => out.push(0xc0),
        Value::Bool(value) => out.push(0xc2 + u8::from(*value)),
        Value::Number(number) => {
            if let Some(value) = number.as_u64() {
                out.push(0xcf);
                out.extend(value.to_be_bytes());
            } else if let Some(value) = number.as_i64() {
                out.push(0xd3);
                out.extend(value.to_be_bytes());
            } else {
                out.push(0xcb);
                out.extend(number.as_f64().unwrap().to_be_bytes());
            }
        }
        Value::String(text) => {
            head(out, 0xdb, text.len());
            out.extend(text.as_bytes());
        }
        Value::Array(values) => {
            head(out, 0xdd, values.len());
            values.iter().for_each(|value| pack(value, out));
        }
        Value::Object(map) if map.contains_key("$bin") => {
            let hex = map["$bin"].as_str().unwrap();
            head(out, 0xc6, hex.len() / 2);
            out.extend((0..hex.len() / 2).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap()));
        }
        Value::Object(map) => {
            head(out, 0xdf, map.len());
            for (key, value) in map {
                pack(&Value::from(key.as_str()), out);
                pack(value, out);
            }
        }
    }
}

/// JSON as msgpack.
pub(crate) fn packed(value: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    pack(value, &mut out);
    out
}

fn batch_of(events: &Value) -> EventBatch {
    let mut batch = EventBatch::new();
    decode(&packed(&json!([1.5, events, null])), &mut batch).unwrap();
    batch
}

fn only_stored(batch: &EventBatch) -> Stored<'_> {
    match batch.events().next() {
        Some(KvEvent::Stored(stored)) if batch.len() == 1 => stored,
        other => panic!("not one stored event: {other:?}"),
    }
}

fn refused(payload: &[u8]) -> DecodeError {
    let mut batch = batch_of(&json!([{"type": "AllBlocksCleared"}]));
    let error = decode(payload, &mut batch).unwrap_err();
    assert!(batch.is_empty() && batch.blocks() == 0 && *batch.info() == Default::default());
    error
}

/// A stored event of two blocks of two tokens, with these fields on top.
fn stored(fields: &Value) -> Value {
    let mut event = json!({"type": "BlockStored", "block_hashes": [10, 11], "parent_block_hash": null,
        "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": null, "medium": "GPU", "lora_name": null});
    for (key, value) in fields.as_object().unwrap() {
        event[key] = value.clone();
    }
    event
}

fn warnings_of(batch: &EventBatch) -> Vec<(DecodeWarning, u32)> {
    batch.info().warnings.iter().collect()
}

#[test]
fn a_map_event_decodes_whatever_the_order_of_its_keys() {
    // serde_json sorts keys, so `type` comes last here.
    let batch = batch_of(&json!([stored(&json!({"group_idx": 3, "kv_cache_spec_kind": "mamba"}))]));
    let stored = only_stored(&batch);
    assert_eq!(stored.hashes, [EngineHash(10), EngineHash(11)]);
    assert_eq!(stored.content, Content::Tokens { tokens: &[1, 2, 3, 4], bigram: false });
    assert_eq!((stored.parent, stored.block_size), (None, 2));
    assert_eq!((stored.group, stored.group_kind), (GroupId(3), GroupKind::Mamba));
    assert_eq!((stored.lora, stored.salt), (None, Salt::Inherited));
    assert_eq!(stored.medium, Medium::Tier(Tier::Device));
    assert_eq!(batch.info().published_at_unix_s, 1.5);
    assert!(batch.info().warnings.is_empty());
}

#[test]
fn an_empty_batch_is_a_batch() {
    let batch = batch_of(&json!([]));
    assert_eq!((batch.len(), batch.blocks(), batch.info().dp_rank), (0, 0, None));
    let mut batch = EventBatch::new();
    decode(&packed(&json!([7, [], 3, "more", [1]])), &mut batch).unwrap();
    assert_eq!((batch.info().published_at_unix_s, batch.info().dp_rank), (7.0, Some(DpRank(3))));
    assert_eq!(warnings_of(&batch), [(DecodeWarning::TrailingElement, 2)]);
}

#[test]
fn unknown_tags_keys_and_trailing_elements_are_counted() {
    let batch = batch_of(&json!([
        {"type": "BlockMoved", "block_hashes": "not even a list"},
        ["BlockUpdateEvent", {"deep": [[1]]}],
        {"type": "BlockRemoved", "block_hashes": [1], "colour": "red", "shape": {"round": true}},
        ["BlockRemoved", [2], "CPU", 1, "new", "newer"],
        ["AllBlocksCleared", 1],
    ]));
    assert_eq!(
        warnings_of(&batch),
        [(DecodeWarning::UnknownTag, 2), (DecodeWarning::UnknownKey, 2), (DecodeWarning::TrailingElement, 3)]
    );
    assert_eq!((batch.len(), batch.blocks()), (3, 2));
    let names: Vec<_> = batch.unknown_names().collect();
    assert_eq!(names, [(UnknownName::Tag, "BlockMoved", 1), (UnknownName::Tag, "BlockUpdateEvent", 1)]);
}

#[test]
fn hashes_are_taken_by_their_last_eight_bytes() {
    let digest = json!({"$bin": "ffffffffffffffff0102030405060708"});
    let batch = batch_of(&json!([["BlockRemoved", [-1, 5, digest, {"$bin": "0102"}]]]));
    let Some(KvEvent::Removed(removed)) = batch.events().next() else { panic!() };
    let hashes: Vec<_> = removed.hashes.iter().map(|hash| hash.0).collect();
    assert_eq!(hashes, [u64::MAX, 5, 0x0102_0304_0506_0708, 0x0102]);
    let empty = packed(&json!([1, [["BlockRemoved", [{"$bin": ""}]]]]));
    assert_eq!(refused(&empty).reason, Reason::OutOfRange);
}

#[test]
fn media_names_map_in_any_case() {
    for (name, medium) in [
        ("gpu", Medium::Tier(Tier::Device)),
        ("DEVICE", Medium::Tier(Tier::Device)),
        ("cpu", Medium::NeverRemoved),
        ("CPU", Medium::Offloaded(Tier::Host)),
        ("CPU_TIER1", Medium::Offloaded(Tier::Host)),
        ("cpu_tier2", Medium::Offloaded(Tier::Disk)),
        ("NVMe", Medium::Offloaded(Tier::Disk)),
        ("CPU_PINNED", Medium::Tier(Tier::Host)),
        ("STORAGE", Medium::NeverRemoved),
        ("fs", Medium::NeverRemoved),
        ("OBJ", Medium::NeverRemoved),
        ("disk", Medium::Offloaded(Tier::Disk)),
        ("External", Medium::Offloaded(Tier::External)),
        ("shared", Medium::Offloaded(Tier::External)),
        ("TAPE", Medium::Unknown),
    ] {
        let batch = batch_of(&json!([stored(&json!({"medium": name}))]));
        assert_eq!(only_stored(&batch).medium, medium, "{name}");
    }
    let batch =
        batch_of(&json!([{"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "locality": "remote"}]));
    let Some(KvEvent::Removed(removed)) = batch.events().next() else { panic!() };
    assert_eq!(removed.medium, Medium::Remote);
}

#[test]
fn the_salt_is_the_first_blocks_string_beside_the_lora_name() {
    let salt_of = |fields: Value| {
        let batch = batch_of(&json!([stored(&fields)]));
        let stored = only_stored(&batch);
        (format!("{:?}", stored.salt), stored.lora.map(str::to_owned), warnings_of(&batch))
    };
    let plain = |salt: &str, lora: Option<&str>| (salt.to_owned(), lora.map(str::to_owned), vec![]);
    let keys = |keys: Value| json!({"lora_name": "a", "lora_id": 1, "extra_keys": keys});

    assert_eq!(salt_of(keys(json!([["a", "s"], ["a"]]))), plain("Of(\"s\")", Some("a")));
    assert_eq!(salt_of(keys(json!([["s", "a"], ["a"]]))), plain("Of(\"s\")", Some("a")));
    assert_eq!(salt_of(keys(json!([["a", "a"], ["a"]]))), plain("Of(\"a\")", Some("a")));
    assert_eq!(salt_of(keys(json!([["a"], ["a"]]))), plain("Inherited", Some("a")));
    assert_eq!(salt_of(keys(json!([["a", "dynamo-cache-salt:s"], null]))), plain("Of(\"s\")", Some("a")));
    assert_eq!(salt_of(json!({"extra_keys": [["s"], null]})), plain("Of(\"s\")", None));
    assert_eq!(salt_of(json!({"cache_salt": "s"})), plain("Of(\"s\")", None));
    assert_eq!(salt_of(json!({"cache_salt": "dynamo-cache-salt:"})), plain("Of(\"dynamo-cache-salt:\")", None));
    assert_eq!(salt_of(json!({"cache_salt": "", "lora_name": ""})), plain("Inherited", None));
    assert_eq!(salt_of(json!({"cache_salt": "s", "extra_keys": [["s"], null]})), plain("Of(\"s\")", None));

    let unknown = |warning, lora: Option<&str>| ("Unknown".to_owned(), lora.map(str::to_owned), vec![(warning, 1)]);
    let ambiguous = DecodeWarning::AmbiguousSalt;
    assert_eq!(salt_of(keys(json!([["a", "s", "t"], ["a"]]))), unknown(ambiguous, Some("a")));
    assert_eq!(salt_of(keys(json!([["a"], ["a", "s"]]))), unknown(ambiguous, Some("a")), "not on the first block");
    assert_eq!(
        salt_of(json!({"parent_block_hash": 9, "extra_keys": [["s"], null]})),
        unknown(ambiguous, None),
        "not on the first block of the request"
    );
    assert_eq!(salt_of(json!({"cache_salt": "s", "extra_keys": [["t"], null]})), unknown(ambiguous, None));
    assert_eq!(salt_of(json!({"lora_id": 4})), unknown(DecodeWarning::NamelessLora, None));
    assert_eq!(salt_of(json!({"cache_salt": "s".repeat(257)})), unknown(DecodeWarning::OversizedName, None));
    assert_eq!(salt_of(json!({"lora_name": "s".repeat(257)})), unknown(DecodeWarning::OversizedName, None));
}

#[test]
fn multimodal_objects_belong_to_their_block() {
    let image = super::super::media::identifier_hash("img");
    let batch = batch_of(&json!([stored(&json!({"extra_keys": [null, [["img", -2], ["0".repeat(64), 1]]]}))]));
    assert_eq!(only_stored(&batch).media, [(1, 0), (1, image)]);
    let infos = json!([{"mm_objects": [{"mm_hash": 9, "offsets": [[0, 1]]}, {"mm_hash": 8}]}, null]);
    let batch = batch_of(&json!([stored(&json!({"block_mm_infos": infos}))]));
    assert_eq!(only_stored(&batch).media, [(0, 8), (0, 9)]);
    assert!(batch.info().warnings.is_empty());
}

#[test]
fn content_that_cannot_be_matched_is_unusable_and_counted() {
    for (fields, warning) in [
        (json!({"token_ids": []}), DecodeWarning::NoTokens),
        (json!({"token_ids": null, "block_size": 0}), DecodeWarning::NoTokens),
        (json!({"token_ids": [1, 2, 3]}), DecodeWarning::TokenCount),
        (json!({"token_ids": [1, 2, 3, 4, 5, 6]}), DecodeWarning::TokenCount),
        (json!({"block_size": 4}), DecodeWarning::TokenCount),
        (json!({"block_hashes": []}), DecodeWarning::TokenCount),
        (json!({"token_ids": [1, "digest", 3, 4]}), DecodeWarning::TokenValue),
        (json!({"token_ids": [1, 2, -3, 4]}), DecodeWarning::TokenValue),
        (json!({"token_ids": [5_000_000_000_u64, 2, 3, 4]}), DecodeWarning::TokenValue),
        (json!({"token_ids": [[1, 2], [2, 3], [9, 4], [4, 5]]}), DecodeWarning::PairOverlap),
        (json!({"token_ids": [[1, 2], [2, 3], [3, 4]]}), DecodeWarning::TokenCount),
        (json!({"token_ids": [[1, 2], [2, "x"], [3, 4], [4, 5]]}), DecodeWarning::TokenValue),
        (json!({"extra_keys": [[{"$bin": "0101"}], null]}), DecodeWarning::PromptEmbeds),
        (json!({"extra_keys": [[7], null]}), DecodeWarning::UnknownExtraKey),
        (json!({"extra_keys": [[["mm", "id", 3]], null]}), DecodeWarning::UnknownExtraKey),
        (json!({"extra_keys": [null, null, [["img", 0]]]}), DecodeWarning::UnassignedMedia),
        (json!({"block_mm_infos": [{"mm_objects": [{}]}]}), DecodeWarning::UnassignedMedia),
        (
            json!({"mm_keys": [[], [{"type": "mm_key", "hash": "00", "start_offset": 0}]]}),
            DecodeWarning::UnassignedMedia,
        ),
    ] {
        let batch = batch_of(&json!([stored(&fields), {"type": "BlockRemoved", "block_hashes": [77]}]));
        assert_eq!(warnings_of(&batch), [(warning, 1)], "{fields}");
        let mut events = batch.events();
        let Some(KvEvent::Stored(stored)) = events.next() else { panic!("{fields}") };
        assert_eq!((stored.content, stored.media), (Content::Unusable, &[][..]), "{fields}");
        let Some(KvEvent::Removed(removed)) = events.next() else { panic!("{fields}") };
        assert_eq!(removed.hashes, [EngineHash(77)], "{fields}");
    }
}

#[test]
fn pairs_become_one_run_of_tokens() {
    let batch = batch_of(&json!([stored(&json!({"token_ids": [[1, 2], [2, 3], [3, 4], [4, 5]]}))]));
    assert_eq!(only_stored(&batch).content, Content::Tokens { tokens: &[1, 2, 3, 4, 5], bigram: true });
}

#[test]
fn a_block_that_is_its_own_parent_is_passed_on() {
    let batch = batch_of(&json!([stored(&json!({"parent_block_hash": 10}))]));
    assert_eq!(only_stored(&batch).parent, Some(EngineHash(10)));
}

#[test]
fn malformed_payloads_are_refused_by_name() {
    let events = |events: Value| packed(&json!([1, events]));
    for (payload, reason) in [
        (vec![], Reason::Truncated),
        (vec![0x91, 0x01], Reason::MissingField),
        (vec![0x81, 0xa0, 0xc0], Reason::WrongType),
        (vec![0x92, 0xc1, 0x90], Reason::InvalidMarker),
        (vec![0x92, 0x01, 0x91, 0xc1], Reason::InvalidMarker),
        (vec![0x92, 0x01, 0x90, 0x00], Reason::TrailingBytes),
        (packed(&json!([1, [], -1])), Reason::OutOfRange),
        (packed(&json!([1, [], 1u64 << 32])), Reason::OutOfRange),
        (packed(&json!(["when", []])), Reason::WrongType),
        (events(json!([5])), Reason::WrongType),
        (events(json!([[]])), Reason::MissingField),
        (events(json!([{}])), Reason::MissingField),
        (events(json!([{"type": 3}])), Reason::WrongType),
        (events(json!([{"type": "BlockRemoved"}])), Reason::MissingField),
        (events(json!([["BlockStored", [1], null, [1]]])), Reason::MissingField),
        (events(json!([stored(&json!({"block_hashes": null}))])), Reason::WrongType),
        (events(json!([stored(&json!({"block_hashes": ["00"]}))])), Reason::WrongType),
        (events(json!([stored(&json!({"token_ids": [1, 2, null, 4]}))])), Reason::WrongType),
        (events(json!([stored(&json!({"token_ids": [[1, 2, 3]]}))])), Reason::WrongType),
        (events(json!([stored(&json!({"block_size": 65537}))])), Reason::OutOfRange),
        (events(json!([stored(&json!({"medium": 1}))])), Reason::WrongType),
        (events(json!([stored(&json!({"group_idx": -1}))])), Reason::OutOfRange),
    ] {
        assert_eq!(refused(&payload).reason, reason, "{payload:02x?}");
    }
    let twice = [&[0x92, 0x01, 0x91, 0x83][..], b"\xa4type\xacBlockRemoved\xa6medium\xc0\xa6medium\xc0"].concat();
    assert_eq!(refused(&twice), DecodeError::new(Reason::RepeatedField, 30));
    let not_text = [&[0x92, 0x01, 0x91, 0x82][..], b"\xa4type\xabBlockStored\xaacache_salt\xa1\xff"].concat();
    assert_eq!(refused(&not_text).reason, Reason::InvalidUtf8);
}

#[test]
fn lengths_that_lie_reserve_nothing() {
    let removed = b"\x92\x01\x91\x92\xacBlockRemoved";
    let stored = b"\x92\x01\x91\x95\xabBlockStored\x91\x01\xc0";
    let four_billion = b"\xdd\xff\xff\xff\xff\x01\x01\x01";
    for payload in [
        [&removed[..], four_billion].concat(),
        [&stored[..], four_billion].concat(),
        [&b"\x92\x01"[..], four_billion].concat(),
        four_billion.to_vec(),
        b"\x92\x01\x91\xdf\xff\xff\xff\xff".to_vec(),
        b"\x92\x01\x91\x92\xdb\xff\xff\xff\xffBlockRemoved".to_vec(),
        b"\x92\x01\x91\x92\xa1x\xc6\xff\xff\xff\xff".to_vec(),
        b"\x92\x01\x91\x92\xa1x\xc9\xff\xff\xff\xff\x00".to_vec(),
    ] {
        let mut batch = EventBatch::new();
        let error = decode(&payload, &mut batch).unwrap_err();
        assert_eq!(error.reason, Reason::Truncated, "{payload:02x?}");
        assert!(batch.capacity_bytes() < 4096, "{payload:02x?}");
    }
}

#[test]
fn limits_are_named() {
    let removed = |hashes: usize| {
        let mut payload = b"\x92\x01\x91\x92\xacBlockRemoved\xdd".to_vec();
        payload.extend((hashes as u32).to_be_bytes());
        payload.resize(payload.len() + hashes, 0x05);
        payload
    };
    let mut batch = EventBatch::new();
    decode(&removed(EVENT_BATCH_BLOCKS_MAX), &mut batch).unwrap();
    assert_eq!(batch.blocks(), EVENT_BATCH_BLOCKS_MAX);
    assert_eq!(refused(&removed(EVENT_BATCH_BLOCKS_MAX + 1)).reason, Reason::TooManyBlocks);

    let mut tokens = b"\x92\x01\x91\x95\xabBlockStored\x91\x01\xc0\xdd".to_vec();
    tokens.extend((EVENT_BATCH_TOKENS_MAX as u32 + 1).to_be_bytes());
    tokens.resize(tokens.len() + EVENT_BATCH_TOKENS_MAX + 1, 0x05);
    assert_eq!(refused(&tokens).reason, Reason::TooManyTokens);

    let mut clears = b"\x92\x01\xdd".to_vec();
    clears.extend((EVENT_BATCH_EVENTS_MAX as u32 + 1).to_be_bytes());
    clears.extend(b"\x91\xb0AllBlocksCleared".repeat(EVENT_BATCH_EVENTS_MAX + 1));
    assert_eq!(refused(&clears).reason, Reason::TooManyEvents);

    let mut large = vec![0; EVENT_MESSAGE_BYTES_MAX + 1];
    large[0] = 0x90;
    assert_eq!(refused(&large).reason, Reason::MessageTooLarge);
}

#[test]
fn nesting_is_bounded() {
    let nested = |depth: usize| {
        let mut payload = b"\x92\x01\x91\x92\xa7Unknown".to_vec();
        payload.extend([0x91].repeat(depth));
        payload.push(0xc0);
        payload
    };
    let mut batch = EventBatch::new();
    decode(&nested(MSGPACK_DEPTH_MAX - 1), &mut batch).unwrap();
    assert_eq!(warnings_of(&batch), [(DecodeWarning::UnknownTag, 1)]);
    assert_eq!(refused(&nested(MSGPACK_DEPTH_MAX)).reason, Reason::TooDeep);
    assert_eq!(refused(&nested(100_000)).reason, Reason::TooDeep);
}

#[test]
fn the_kind_of_a_group_is_read_from_its_name() {
    for (kind, serves) in [
        ("full_attention", GroupKind::Main),
        ("mla_attention", GroupKind::Main),
        ("sink_full_attention", GroupKind::Main),
        ("sliding_window", GroupKind::Other),
        ("sliding_window_mla", GroupKind::Other),
        ("mamba", GroupKind::Mamba),
        ("chunked_local_attention", GroupKind::Other),
        ("encoder_only_attention", GroupKind::Other),
        ("cross_attention", GroupKind::Other),
        ("unknown", GroupKind::Unknown),
        ("attention of 2031", GroupKind::Unknown),
    ] {
        let batch = batch_of(&json!([stored(&json!({"kv_cache_spec_kind": kind}))]));
        assert_eq!(only_stored(&batch).group_kind, serves, "{kind}");
        let shown = kind.replace(' ', "?");
        let named = (serves != GroupKind::Main).then_some((UnknownName::GroupKind, &*shown, 1));
        assert_eq!(batch.unknown_names().collect::<Vec<_>>(), Vec::from_iter(named), "{kind}");
    }
}

#[test]
fn the_size_of_a_window_is_read_before_or_after_its_name() {
    let kind_of = |kind: &str, window: Value| {
        // serde_json sorts keys; an array has the kind first.
        let map = json!({"kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window});
        let array = json!(["BlockStored", [10, 11], null, [1, 2, 3, 4], 2, null, "GPU", null, null, 1, kind, window]);
        let of = |event: Value| {
            let batch = batch_of(&json!([event]));
            (only_stored(&batch).group_kind, batch.unknown_names().count())
        };
        let kinds = (of(stored(&map)), of(array));
        assert_eq!(kinds.0, kinds.1, "{kind} {window}");
        kinds.0
    };
    assert_eq!(kind_of("sliding_window", json!(1024)), (GroupKind::Sliding { window_tokens: 1024 }, 0));
    assert_eq!(kind_of("sliding_window_mla", json!(128)), (GroupKind::SlidingMla { window_tokens: 128 }, 1));
    for nonsense in [json!(null), json!(0), json!(1), json!(-5), json!(u64::MAX), json!("far"), json!([4])] {
        assert_eq!(kind_of("sliding_window", nonsense), (GroupKind::Other, 1));
    }
    assert_eq!(kind_of("full_attention", json!(1024)), (GroupKind::Main, 0));
}

#[test]
fn names_beyond_the_bound_of_a_batch_are_counted_together() {
    let event = |name: usize| json!([format!("Tag{}", name % 20)]);
    let batch = batch_of(&Value::Array((0..40).map(event).collect()));
    let names: Vec<_> = batch.unknown_names().collect();
    assert_eq!(names.len(), UNKNOWN_NAMES_BATCH_MAX + 1);
    assert_eq!(names[0], (UnknownName::Tag, "Tag0", 2));
    assert_eq!(names[UNKNOWN_NAMES_BATCH_MAX], (UnknownName::Tag, "", 2 * (20 - UNKNOWN_NAMES_BATCH_MAX as u32)));
}

#[test]
fn a_hash_of_the_tokens_alone_is_noticed_where_engines_had_it() {
    // `hash((1, 2))` and `hash(((1, 2), (2, 3)))` of CPython.
    let (plain, pairs) = (-3_550_055_125_485_641_917_i64, 8_374_439_192_799_522_889_i64);
    let unchained = |event: Value| batch_of(&json!([event])).info().warnings.get(DecodeWarning::UnchainedHash);
    assert_eq!(unchained(json!(["BlockStored", [plain], null, [1, 2], 2, null])), 1);
    assert_eq!(unchained(json!(["BlockStored", [plain], 9, [1, 2], 2, null])), 1);
    assert_eq!(unchained(json!(["BlockStored", [pairs], null, [[1, 2], [2, 3]], 2, null])), 1);
    assert_eq!(unchained(json!(["BlockStored", [plain + 1], null, [1, 2], 2, null])), 0);
    assert_eq!(unchained(json!(["BlockStored", [plain, plain], null, [1, 2, 1, 2], 2, null])), 0);
    assert_eq!(unchained(json!(["BlockStored", [plain], null, [1, 2], 2, null, "GPU"])), 0, "newer engines");
}

#[test]
fn every_form_of_a_stored_event_says_the_same() {
    let (hashes, tokens) = (json!([-1, 5]), json!([1, 2, 3, 4]));
    let array = json!([
        "BlockStored",
        hashes,
        9,
        tokens,
        2,
        null,
        "CPU_PINNED",
        null,
        [["s"], null],
        0,
        "full_attention",
        null
    ]);
    let lengths = [6, 7, 8, 9, 10, 12].map(|len| json!(array.as_array().unwrap()[..len]));
    let map = json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": 9, "token_ids": tokens,
        "block_size": 2});
    let forms = lengths.into_iter().chain([map]);
    for form in forms {
        let batch = batch_of(&json!([form]));
        let stored = only_stored(&batch);
        assert_eq!(stored.hashes, [EngineHash(u64::MAX), EngineHash(5)], "{form}");
        assert_eq!(stored.content, Content::Tokens { tokens: &[1, 2, 3, 4], bigram: false }, "{form}");
        assert_eq!((stored.parent, stored.block_size), (Some(EngineHash(9)), 2), "{form}");
        let tier = if form.get(6).is_some() { Tier::Host } else { Tier::Device };
        assert_eq!((stored.medium, stored.group), (Medium::Tier(tier), GroupId(0)), "{form}");
    }
    let salted = json!(["BlockStored", hashes, null, tokens, 2, null, "GPU", {"cache_salt": "s", "new": 1}]);
    let batch = batch_of(&json!([salted]));
    assert_eq!((only_stored(&batch).salt, only_stored(&batch).lora), (Salt::Of("s"), None));
    assert_eq!(warnings_of(&batch), [(DecodeWarning::UnknownKey, 1)]);
    let named = json!(["BlockStored", hashes, null, tokens, 2, 1, "GPU", "adapter", [["adapter", "s"], ["adapter"]]]);
    let batch = batch_of(&json!([named]));
    assert_eq!((only_stored(&batch).salt, only_stored(&batch).lora), (Salt::Of("s"), Some("adapter")));
    assert!(warnings_of(&batch).is_empty());
}
