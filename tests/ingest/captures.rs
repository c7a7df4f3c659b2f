//! Recorded messages of engines decode to what a general msgpack decoder, or the engine's own, made of them.
//!
//! The project's recordings are always tested, a larger collection where it is present.

#![allow(clippy::unwrap_used)] // clippy knows functions marked as tests, not what they call

use kvrouted::event::format::Format;
use kvrouted::event::media::identifier_hash;
use kvrouted::event::{self, Content, EventBatch, GroupKind, KvEvent, Medium, Reason, Salt};
use kvrouted::ids::{DpRank, Tier};
use proptest::prelude::*;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

#[path = "../../src/ingest/tests/sidecar.rs"]
mod sidecar;
use sidecar::{captures_in, messages};

/// Captures that a collection must have to be worth the name.
const REQUIRED: [&str; 6] = [
    "vllm033/basic",
    "vllm033/evict_clear",
    "vllm033/lora_salt",
    "vllm033/dup_blocks",
    "sglang/v0_5_23_basic",
    "sglang/v0_5_23_evict_clear",
];

/// An event with everything owned.
#[derive(Debug, PartialEq)]
enum Event {
    Stored(Box<Stored>),
    Removed { hashes: Vec<u64>, medium: Medium, group: u32 },
    Cleared,
}

#[derive(Debug, PartialEq)]
struct Stored {
    hashes: Vec<u64>,
    parent: Option<u64>,
    /// `None` = unusable.
    tokens: Option<(Vec<u32>, bool)>,
    block_size: u32,
    medium: Medium,
    group: u32,
    kind: GroupKind,
    lora: Option<String>,
    salt: Option<String>,
    media: Vec<(u32, u64)>,
}

impl Event {
    fn from_decoded(event: &KvEvent<'_>) -> Self {
        match event {
            KvEvent::Stored(stored) => Self::Stored(Box::new(Stored {
                hashes: stored.hashes.iter().map(|hash| hash.0).collect(),
                parent: stored.parent.map(|hash| hash.0),
                tokens: match stored.content {
                    Content::Tokens { tokens, bigram } => Some((tokens.to_vec(), bigram)),
                    Content::LocalHashes(_) => panic!("engines send no local hashes"),
                    Content::Unusable => None,
                },
                block_size: stored.block_size,
                medium: stored.medium,
                group: stored.group.0,
                kind: stored.group_kind,
                lora: stored.lora.map(str::to_owned),
                salt: match stored.salt {
                    Salt::Inherited => None,
                    Salt::Of(salt) => Some(salt.to_owned()),
                    Salt::Seed(_) | Salt::Unknown => panic!("no capture has an ambiguous salt: {stored:?}"),
                },
                media: stored.media.to_vec(),
            })),
            KvEvent::Removed(removed) => Self::Removed {
                hashes: removed.hashes.iter().map(|hash| hash.0).collect(),
                medium: removed.medium,
                group: removed.group.0,
            },
            KvEvent::Cleared(cleared) => {
                assert_eq!(cleared.tier, None);
                Self::Cleared
            }
        }
    }

    /// From named fields, as a sidecar has them.
    fn from_fields(fields: &Value) -> Self {
        let medium = match sidecar::tier_of(fields) {
            None if fields["locality"] == "REMOTE" => Medium::Remote,
            None => Medium::NeverRemoved,
            Some(0) => Medium::Tier(Tier::Device),
            Some(tier) if fields["medium"] == "CPU_PINNED" => Medium::Tier(Tier::ALL[tier]),
            Some(tier) => Medium::Offloaded(Tier::ALL[tier]),
        };
        let group = fields["group_idx"].as_u64().unwrap_or(0) as u32;
        match sidecar::tag_of(fields) {
            "BlockStored" => Self::Stored(Box::new(stored_of(fields, medium, group))),
            "BlockRemoved" => Self::Removed { hashes: sidecar::hashes_of(&fields["block_hashes"]), medium, group },
            "AllBlocksCleared" => Self::Cleared,
            other => panic!("unexpected tag {other}"),
        }
    }
}

fn stored_of(fields: &Value, medium: Medium, group: u32) -> Stored {
    let tokens = sidecar::tokens_of(fields);
    let usable = tokens.is_some();
    Stored {
        hashes: sidecar::hashes_of(&fields["block_hashes"]),
        parent: sidecar::parent_of(fields),
        tokens,
        block_size: fields["block_size"].as_u64().unwrap() as u32,
        medium,
        group,
        kind: match fields["kv_cache_spec_kind"].as_str() {
            None => GroupKind::Unstated,
            Some("full_attention" | "mla_attention" | "sink_full_attention") => GroupKind::Main,
            Some(kind) => {
                let window = fields["kv_cache_spec_sliding_window"].as_u64().map(|tokens| tokens as u32);
                GroupKind::from_name(kind.as_bytes(), window)
            }
        },
        lora: fields["lora_name"].as_str().map(str::to_owned),
        salt: sidecar::salt_of(fields).map(str::to_owned),
        media: if usable { sidecar::media_of(fields, identifier_hash) } else { Vec::new() },
    }
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/events")
}

/// Decodes a capture's messages as one stream and compares each with its row. Tells how many events there were.
fn check(capture: &Path) -> usize {
    let (mut batch, mut sticky, mut events) = (EventBatch::new(), None, 0);
    for message in messages(capture) {
        event::decode(&message.payload, &mut sticky, &mut batch)
            .unwrap_or_else(|error| panic!("{}: {error}", message.name));
        assert_eq!(sticky, Some(Format::Msgpack));
        let decoded: Vec<_> = batch.events().map(|event| Event::from_decoded(&event)).collect();
        let expected: Vec<_> = sidecar::events_of(&message.row).iter().map(Event::from_fields).collect();
        assert_eq!(decoded, expected, "{}", message.name);
        assert_eq!(message.row["seq"].as_u64(), Some(message.seq), "{}", message.name);
        // The JSON parser may be off by one in a float's last place.
        let published_at = message.row["raw"][0].as_f64().unwrap();
        assert!((batch.info().published_at_unix_s - published_at).abs() < 1e-6, "{}", message.name);
        let rank = message.row["raw"].get(2).and_then(Value::as_u64).map(|rank| DpRank(rank as u32));
        assert_eq!(batch.info().dp_rank, rank, "{}", message.name);
        let blocks = |event: &Event| match event {
            Event::Stored(stored) => stored.hashes.len(),
            Event::Removed { hashes, .. } => hashes.len(),
            Event::Cleared => 0,
        };
        assert_eq!(batch.blocks(), expected.iter().map(blocks).sum::<usize>());
        events += expected.len();
    }
    events
}

#[test]
fn the_fixtures_decode_to_what_their_sidecars_say() {
    let captures = captures_in(&fixtures());
    assert_eq!(captures.len(), 3);
    for capture in captures {
        assert!(check(&capture) >= 15, "{}", capture.display());
    }
}

/// What makes its tokens insufficient: an offloaded copy of a salted prompt says the same as one of a plain prompt.
#[test]
fn a_connector_s_stores_have_neither_salts_nor_extra_keys() {
    let (mut batch, mut paths, mut offloaded) = (EventBatch::new(), BTreeMap::new(), 0);
    let capture = fixtures().join("vllm_0_33_offloading.bin");
    for message in messages(&capture) {
        event::msgpack::decode(&message.payload, &mut batch).unwrap();
        let rows = sidecar::events_of(&message.row);
        for (event, row) in batch.events().zip(&rows) {
            let KvEvent::Stored(stored) = event else { continue };
            if row["medium"] == "GPU" {
                continue;
            }
            assert!(row["cache_salt"].is_null() && row["extra_keys"].is_null(), "{row}");
            assert_eq!((stored.salt, stored.media.len()), (Salt::Inherited, 0), "{row}");
            let expected = if row["medium"] == "CPU" { Medium::Offloaded(Tier::Host) } else { Medium::NeverRemoved };
            assert_eq!(stored.medium, expected, "{row}");
            if row["medium"] == "CPU" {
                offloaded += 1;
                let said = (stored.parent.is_none(), row["token_ids"].to_string(), stored.lora.map(str::to_owned));
                paths.entry(said).or_insert_with(BTreeSet::new).insert(stored.hashes[0]);
            }
        }
    }
    assert_eq!(offloaded, 9);
    let named_alike = paths.values().filter(|hashes| hashes.len() == 2).count();
    assert_eq!(named_alike, 3, "each block of the salted prompt looks like one of the plain prompt");
}

#[test]
fn shared_captures_decode_to_what_their_sidecars_say() {
    let Some(shared) = sidecar::shared() else { return };
    for name in REQUIRED {
        assert!(shared.join(name).with_extension("bin").is_file(), "{name} is missing in {}", shared.display());
    }
    for folder in sidecar::FOLDERS {
        for capture in captures_in(&shared.join(folder)) {
            assert!(check(&capture) > 0, "{}", capture.display());
        }
    }
}

#[test]
fn the_fixtures_have_nothing_odd_in_them() {
    let mut batch = EventBatch::new();
    for message in captures_in(&fixtures()).iter().flat_map(|capture| messages(capture)) {
        event::msgpack::decode(&message.payload, &mut batch).unwrap();
        assert!(batch.info().warnings.is_empty(), "{}: {:?}", message.name, batch.info().warnings);
    }
}

#[test]
fn a_payload_cut_anywhere_is_truncated_and_leaves_nothing() {
    let mut batch = EventBatch::new();
    for message in captures_in(&fixtures()).iter().flat_map(|capture| messages(capture)) {
        for len in 0..message.payload.len() {
            let error = event::msgpack::decode(&message.payload[..len], &mut batch).unwrap_err();
            assert_eq!(error.reason, Reason::Truncated, "{} cut at {len}", message.name);
            assert!(error.offset <= len);
            assert!(batch.is_empty() && batch.blocks() == 0);
        }
    }
}

#[test]
fn a_warm_batch_takes_the_same_messages_without_growing() {
    let messages: Vec<_> = captures_in(&fixtures()).iter().flat_map(|capture| messages(capture)).collect();
    let mut batch = EventBatch::new();
    let mut pass = || {
        for message in &messages {
            event::msgpack::decode(&message.payload, &mut batch).unwrap();
        }
        batch.capacity_bytes()
    };
    let warm = pass();
    assert_eq!(pass(), warm);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn flipped_bytes_never_panic_and_an_error_leaves_nothing(
        which: prop::sample::Index,
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let all: Vec<_> = captures_in(&fixtures()).iter().flat_map(|capture| messages(capture)).collect();
        let mut payload = which.get(&all).payload.clone();
        for (at, byte) in flips {
            *at.get_mut(&mut payload) = byte;
        }
        let mut batch = EventBatch::new();
        if event::msgpack::decode(&payload, &mut batch).is_err() {
            prop_assert!(batch.is_empty() && batch.blocks() == 0);
        }
        for event in batch.events() {
            if let KvEvent::Stored(stored) = event && let Content::Tokens { tokens, bigram } = stored.content {
                prop_assert_eq!(tokens.len(), stored.hashes.len() * stored.block_size as usize + usize::from(bigram));
                prop_assert!(stored.media.iter().all(|(block, _)| (*block as usize) < stored.hashes.len()));
            }
        }
    }
}
