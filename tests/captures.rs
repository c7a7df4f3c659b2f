//! What engines' own publishers sent decodes to what a general msgpack decoder, or the engine's own, says it was.
//!
//! The project's fixtures are always tested. A larger collection of captures is tested as well where it is present:
//! in `$KVROUTED_SHARED/captures`, or beside the checkout in `../shared/captures`.

#![allow(clippy::unwrap_used)] // clippy knows functions marked as tests, not what they call

use kvrouted::event::format::Format;
use kvrouted::event::media::identifier_hash;
use kvrouted::event::{self, Content, EventBatch, GroupKind, KvEvent, Medium, Reason, Salt};
use kvrouted::ids::{DpRank, Tier};
use proptest::prelude::*;
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Folders of the shared collection whose captures are engines' events.
const FOLDERS: [&str; 4] = ["vllm033", "vllm_old", "sglang", "trtllm_dynamo"];

/// Captures that a collection must have to be worth the name.
const REQUIRED: [&str; 6] = [
    "vllm033/basic",
    "vllm033/evict_clear",
    "vllm033/lora_salt",
    "vllm033/dup_blocks",
    "sglang/v0_5_23_basic",
    "sglang/v0_5_23_evict_clear",
];

/// One recorded message.
struct Message {
    /// Where it is from, for failures.
    name: String,
    payload: Vec<u8>,
    /// Its row of the sidecar.
    row: Value,
}

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
                    Salt::Unknown => panic!("no capture has an ambiguous salt: {stored:?}"),
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
        let tag = fields["type"].as_str().or(fields["_type"].as_str()).unwrap();
        let medium = medium_of(fields);
        let group = fields["group_idx"].as_u64().unwrap_or(0) as u32;
        match tag {
            "BlockStored" => Self::Stored(Box::new(stored_of(fields, medium, group))),
            "BlockRemoved" => Self::Removed { hashes: hashes_of(&fields["block_hashes"]), medium, group },
            "AllBlocksCleared" => Self::Cleared,
            other => panic!("unexpected tag {other}"),
        }
    }
}

fn stored_of(fields: &Value, medium: Medium, group: u32) -> Stored {
    let hashes = hashes_of(&fields["block_hashes"]);
    let block_size = fields["block_size"].as_u64().unwrap() as u32;
    let lora = fields["lora_name"].as_str().map(str::to_owned);
    let mut tokens = tokens_of(&fields["token_ids"]).filter(|(tokens, bigram)| {
        !tokens.is_empty() && tokens.len() == hashes.len() * block_size as usize + usize::from(*bigram)
    });
    let mut salt = fields["cache_salt"].as_str().map(str::to_owned);
    let mut media = Vec::new();
    for (block, keys) in fields["extra_keys"].as_array().into_iter().flatten().enumerate() {
        for key in keys.as_array().into_iter().flatten() {
            match key {
                Value::String(text) if lora.as_deref() == Some(text) => {}
                Value::String(text) => salt = Some(text.clone()),
                Value::Array(object) => media.push((block as u32, identifier_hash(object[0].as_str().unwrap()))),
                _ => tokens = None, // bytes: prompt embeddings
            }
        }
    }
    for (block, info) in fields["block_mm_infos"].as_array().into_iter().flatten().enumerate() {
        for object in info["mm_objects"].as_array().into_iter().flatten() {
            media.push((block as u32, object["mm_hash"].as_u64().unwrap()));
        }
    }
    if tokens.is_none() {
        media.clear();
    }
    let parent = Some(&fields["parent_block_hash"]).filter(|parent| !parent.is_null()).map(hash_of);
    let kind = match fields["kv_cache_spec_kind"].as_str() {
        None => GroupKind::Unstated,
        Some("full_attention" | "mla_attention" | "sink_full_attention") => GroupKind::Main,
        Some(_) => GroupKind::Other,
    };
    Stored { hashes, parent, tokens, block_size, medium, group, kind, lora, salt, media }
}

fn hash_of(value: &Value) -> u64 {
    if let Some(hex) = value["b"].as_str() {
        return u64::from_str_radix(&hex[hex.len().saturating_sub(16)..], 16).unwrap();
    }
    value.as_u64().or(value.as_i64().map(|signed| signed as u64)).unwrap()
}

fn hashes_of(values: &Value) -> Vec<u64> {
    values.as_array().unwrap().iter().map(hash_of).collect()
}

/// The tokens as they lie in the prompt, and whether they came as pairs; `None` if any is no u32.
fn tokens_of(values: &Value) -> Option<(Vec<u32>, bool)> {
    let values = values.as_array().unwrap();
    let token = |value: &Value| value.as_u64().and_then(|token| u32::try_from(token).ok());
    if !values.first().is_some_and(Value::is_array) {
        return values.iter().map(token).collect::<Option<_>>().map(|tokens| (tokens, false));
    }
    let first = token(&values[0][0]);
    let tokens = std::iter::once(first).chain(values.iter().map(|pair| token(&pair[1]))).collect::<Option<_>>()?;
    Some((tokens, true))
}

fn medium_of(fields: &Value) -> Medium {
    if fields["locality"] == "REMOTE" {
        return Medium::Remote;
    }
    Medium::Tier(match fields["medium"].as_str() {
        None | Some("GPU") => Tier::Device,
        Some("CPU" | "cpu" | "CPU_PINNED") => Tier::Host,
        Some("DISK" | "STORAGE" | "FS" | "OBJ") => Tier::Disk,
        Some("EXTERNAL") => Tier::External,
        Some(other) => panic!("unexpected medium {other}"),
    })
}

/// The events a sidecar's row tells of. The engine's own decoder gives array events their names; where it has none
/// or refused the batch, events are maps with names of their own.
fn events_of(row: &Value) -> Vec<Event> {
    let raw = row["raw"][1].as_array().unwrap();
    let named = row["batch"]["events"].as_array();
    let fields = raw.iter().enumerate().map(|(at, event)| {
        if event.is_object() {
            return event.clone();
        }
        let mut fields = named.expect("array events need names")[at].clone();
        if let Some(salt) = event.as_array().and_then(|event| event.get(7)).and_then(|map| map["cache_salt"].as_str()) {
            fields["cache_salt"] = salt.into(); // newer than the engine's own class
        }
        fields
    });
    fields.map(|fields| Event::from_fields(&fields)).collect()
}

fn little_u32(bytes: &mut &[u8]) -> usize {
    let (head, rest) = bytes.split_first_chunk::<4>().unwrap();
    *bytes = rest;
    u32::from_le_bytes(*head) as usize
}

/// The messages of a capture that carry a batch.
fn messages(capture: &Path) -> Vec<Message> {
    let bytes = std::fs::read(capture).unwrap();
    let sidecar: Value = serde_json::from_slice(&std::fs::read(capture.with_extension("json")).unwrap()).unwrap();
    let mut rows = sidecar["messages"].as_array().unwrap().iter();
    let (mut rest, mut messages) = (bytes.as_slice(), Vec::new());
    while !rest.is_empty() {
        let mut payload = &[][..];
        for _ in 0..little_u32(&mut rest) {
            let len = little_u32(&mut rest);
            (payload, rest) = rest.split_at(len);
        }
        let row = rows.next().expect("a row for each message").clone();
        if row["raw"].is_array() {
            let name = format!("{} message {}", capture.display(), messages.len());
            messages.push(Message { name, payload: payload.to_vec(), row });
        }
    }
    assert!(rows.next().is_none(), "a message for each row of {}", capture.display());
    messages
}

fn captures_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut captures: Vec<_> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "bin"))
        .collect();
    captures.sort();
    captures
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
        let expected = events_of(&message.row);
        assert_eq!(decoded, expected, "{}", message.name);
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
    assert_eq!(captures.len(), 2);
    for capture in captures {
        assert!(check(&capture) >= 15, "{}", capture.display());
    }
}

#[test]
fn shared_captures_decode_to_what_their_sidecars_say() {
    let shared = std::env::var_os("KVROUTED_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared"), PathBuf::from)
        .join("captures");
    if !shared.is_dir() {
        // libtest keeps what a passing test prints; a skip must be seen, whole and on a line of its own.
        let line = format!("\nskipped: captures are not at {} (set KVROUTED_SHARED)\n", shared.display());
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        return;
    }
    for name in REQUIRED {
        assert!(shared.join(name).with_extension("bin").is_file(), "{name} is missing in {}", shared.display());
    }
    for folder in FOLDERS {
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
        assert!(batch.info().oddities.is_empty(), "{}: {:?}", message.name, batch.info().oddities);
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
