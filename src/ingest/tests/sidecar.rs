//! Recorded messages of real engines, with their content as a general decoder, or the engine's own, reads it.
//!
//! A capture is a `.bin` with the frames of its messages and a `.json` with one row for each. Also compiled into
//! `tests/ingest/captures.rs`; so nothing of the crate is used here.

use serde_json::Value;
use std::path::{Path, PathBuf};

/// Folders of the shared collection whose captures are engines' events.
pub(crate) const FOLDERS: [&str; 4] = ["vllm033", "vllm_old", "sglang", "trtllm_dynamo"];

/// One recorded message that carries a batch.
pub(crate) struct Message {
    /// Where it is from, for failures.
    pub(crate) name: String,
    pub(crate) seq: u64,
    pub(crate) payload: Vec<u8>,
    /// Its row of the sidecar.
    pub(crate) row: Value,
}

/// The shared collection, if it is here: in `$KVROUTED_SHARED/captures`, or beside the checkout. If not, says so.
pub(crate) fn shared() -> Option<PathBuf> {
    use std::io::Write;
    let shared = std::env::var_os("KVROUTED_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared"), PathBuf::from)
        .join("captures");
    if !shared.is_dir() {
        // libtest keeps what a passing test prints; a skip must be seen, whole and on a line of its own.
        let line = format!("\nskipped: captures are not at {} (set KVROUTED_SHARED)\n", shared.display());
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        return None;
    }
    Some(shared)
}

/// The captures of a folder, by name.
pub(crate) fn captures_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut captures: Vec<_> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "bin"))
        .collect();
    captures.sort();
    captures
}

fn little_u32(bytes: &mut &[u8]) -> usize {
    let (head, rest) = bytes.split_first_chunk::<4>().unwrap();
    *bytes = rest;
    u32::from_le_bytes(*head) as usize
}

/// The messages of a capture that carry a batch.
pub(crate) fn messages(capture: &Path) -> Vec<Message> {
    let bytes = std::fs::read(capture).unwrap();
    let sidecar: Value = serde_json::from_slice(&std::fs::read(capture.with_extension("json")).unwrap()).unwrap();
    let mut rows = sidecar["messages"].as_array().unwrap().iter();
    let (mut rest, mut messages) = (bytes.as_slice(), Vec::new());
    while !rest.is_empty() {
        let (mut seq, mut payload) = (&[][..], &[][..]);
        for _ in 0..little_u32(&mut rest) {
            let len = little_u32(&mut rest);
            seq = payload;
            (payload, rest) = rest.split_at(len);
        }
        let row = rows.next().expect("a row for each message").clone();
        if row["raw"].is_array() {
            let name = format!("{} message {}", capture.display(), messages.len());
            let seq = u64::from_be_bytes(seq.try_into().unwrap());
            messages.push(Message { name, seq, payload: payload.to_vec(), row });
        }
    }
    assert!(rows.next().is_none(), "a message for each row of {}", capture.display());
    messages
}

/// The events a row tells of, each with its fields by name. The engine's own decoder gives array events their names;
/// where it has none or refused the batch, events are maps with names of their own.
pub(crate) fn events_of(row: &Value) -> Vec<Value> {
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
    fields.collect()
}

/// The kind of event, by its fields.
pub(crate) fn tag_of(fields: &Value) -> &str {
    fields["type"].as_str().or(fields["_type"].as_str()).unwrap()
}

/// A block's hash: bytes by their last eight.
pub(crate) fn hash_of(value: &Value) -> u64 {
    if let Some(hex) = value["b"].as_str() {
        return u64::from_str_radix(&hex[hex.len().saturating_sub(16)..], 16).unwrap();
    }
    value.as_u64().or(value.as_i64().map(|signed| signed as u64)).unwrap()
}

/// A list of them.
pub(crate) fn hashes_of(values: &Value) -> Vec<u64> {
    values.as_array().unwrap().iter().map(hash_of).collect()
}

/// The block before the first.
pub(crate) fn parent_of(fields: &Value) -> Option<u64> {
    Some(&fields["parent_block_hash"]).filter(|parent| !parent.is_null()).map(hash_of)
}

/// The tokens as they lie in the prompt, and whether they came as pairs; `None` if any is no u32, or if they are not
/// those of the blocks.
pub(crate) fn tokens_of(fields: &Value) -> Option<(Vec<u32>, bool)> {
    let values = fields["token_ids"].as_array().unwrap();
    let token = |value: &Value| value.as_u64().and_then(|token| u32::try_from(token).ok());
    let bigram = values.first().is_some_and(Value::is_array);
    let tokens: Vec<u32> = match bigram {
        false => values.iter().map(token).collect::<Option<_>>()?,
        true => {
            let first = token(&values[0][0]);
            std::iter::once(first).chain(values.iter().map(|pair| token(&pair[1]))).collect::<Option<_>>()?
        }
    };
    let blocks = fields["block_hashes"].as_array().unwrap().len();
    let expected = blocks * fields["block_size"].as_u64().unwrap() as usize + usize::from(bigram);
    let of_embeddings = keys_of(fields).any(|(_, key)| key.is_object());
    (!tokens.is_empty() && tokens.len() == expected && !of_embeddings).then_some((tokens, bigram))
}

/// The extra keys that the blocks' hashes cover beside tokens, as (block, key).
pub(crate) fn keys_of(fields: &Value) -> impl Iterator<Item = (u32, &Value)> {
    let blocks = fields["extra_keys"].as_array().into_iter().flatten().enumerate();
    blocks.flat_map(|(block, keys)| keys.as_array().into_iter().flatten().map(move |key| (block as u32, key)))
}

/// The salt that an event names.
pub(crate) fn salt_of(fields: &Value) -> Option<&str> {
    let lora = fields["lora_name"].as_str();
    let strings = keys_of(fields).filter_map(|(_, key)| key.as_str());
    fields["cache_salt"].as_str().or(strings.into_iter().find(|text| Some(*text) != lora))
}

/// Multimodal objects as (block, hash), given a hash function for identifiers.
pub(crate) fn media_of(fields: &Value, identifier_hash: impl Fn(&str) -> u64) -> Vec<(u32, u64)> {
    let identified = keys_of(fields).filter_map(|(block, key)| Some((block, identifier_hash(key[0].as_str()?))));
    let infos = fields["block_mm_infos"].as_array().into_iter().flatten().enumerate();
    let hashed = infos.flat_map(|(block, info)| {
        let objects = info["mm_objects"].as_array().into_iter().flatten();
        objects.map(move |object| (block as u32, object["mm_hash"].as_u64().unwrap()))
    });
    let mut media: Vec<_> = identified.chain(hashed).collect();
    media.sort_unstable();
    media
}

/// The number of the tier in which the blocks are, from the device down; `None` on another machine, and in a store that
/// never says when a block is gone.
pub(crate) fn tier_of(fields: &Value) -> Option<usize> {
    if fields["locality"] == "REMOTE" {
        return None;
    }
    Some(match fields["medium"].as_str() {
        None | Some("GPU") => 0,
        Some("cpu") => return None,
        Some("STORAGE" | "FS" | "OBJ") if fields["ownership"].is_null() => return None,
        Some("CPU" | "CPU_PINNED") => 1,
        Some("DISK" | "STORAGE" | "FS" | "OBJ") => 2,
        Some("EXTERNAL") => 3,
        Some(other) => panic!("unexpected medium {other}"),
    })
}
