//! Captures of real engines, played as streams: the index answers as a plain count of references does.
//!
//! The collection is looked for in `$KVROUTED_SHARED/captures`, else beside the checkout; without one the test
//! says so and passes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{Options, Rig};
use crate::event::{self, Content, EventBatch, KvEvent, Medium, Salt};
use crate::hash;
use crate::ids::{EngineHash, EventSeq, LocalHash, ShardId, Tier, Worker};
use crate::index::Depths;
use crate::trust::TrustLevel;

/// What was on the wire, and what the publisher had sent: they differ where messages were lost.
struct Capture {
    name: String,
    received: Vec<(EventSeq, Vec<u8>)>,
    sent: BTreeMap<u64, Vec<u8>>,
}

#[derive(Clone, Debug)]
struct Block {
    parent: Option<EngineHash>,
    tokens: Vec<u32>,
    lora: Option<String>,
    salt: Option<String>,
    count: u32,
}

/// An engine's device blocks by what it calls them.
#[derive(Default)]
struct Model {
    blocks: BTreeMap<EngineHash, Block>,
    batch: EventBatch,
}

impl Model {
    fn apply(&mut self, payload: &[u8]) {
        event::decode(payload, &mut None, &mut self.batch).unwrap();
        for event in self.batch.events() {
            match event {
                KvEvent::Cleared(_) => self.blocks.values_mut().for_each(|block| block.count = 0),
                KvEvent::Removed(removed) if removed.medium == Medium::Tier(Tier::Device) => {
                    for hash in removed.hashes {
                        if let Some(block) = self.blocks.get_mut(hash) {
                            block.count = block.count.saturating_sub(1);
                        }
                    }
                }
                KvEvent::Stored(stored) if stored.medium == Medium::Tier(Tier::Device) => {
                    let Content::Tokens { tokens, bigram: false } = stored.content else { continue };
                    let mut parent = stored.parent;
                    for (hash, tokens) in stored.hashes.iter().zip(tokens.chunks(stored.block_size as usize)) {
                        let above = parent.and_then(|parent| self.blocks.get(&parent));
                        let salt = match stored.salt {
                            Salt::Of(salt) => Some(salt.to_owned()),
                            Salt::Inherited | Salt::Unknown => above.and_then(|above| above.salt.clone()),
                        };
                        let lora = stored.lora.map(str::to_owned);
                        let block = Block { parent, tokens: tokens.to_vec(), lora, salt, count: 0 };
                        self.blocks.entry(*hash).or_insert(block).count += 1;
                        parent = Some(*hash);
                    }
                }
                KvEvent::Removed(_) | KvEvent::Stored(_) => {}
            }
        }
    }

    /// The blocks from the root to this one; `None` where the root was never seen.
    fn path(&self, of: EngineHash) -> Option<Vec<&Block>> {
        let mut path = vec![self.blocks.get(&of)?];
        while let Some(parent) = path.last()?.parent {
            path.push(self.blocks.get(&parent)?);
        }
        path.reverse();
        Some(path)
    }
}

fn depth(rig: &Rig, path: &[&Block]) -> Option<u32> {
    let scheme = rig.home.scheme.get()?;
    let tokens: Vec<u32> = path.iter().flat_map(|block| &block.tokens).copied().collect();
    let (first, mut locals) = (path.first()?, Vec::<LocalHash>::new());
    let seed = hash::seed(first.lora.as_deref(), first.salt.as_deref());
    hash::local_hashes(scheme, seed, hash::token_bytes(&tokens), &[], &mut locals);
    let mut depths = Depths::new();
    rig.reader.lookup(&locals, &mut depths);
    Some(depths.of(ShardId(0), rig.streams[0].slot).device)
}

/// Compares every path with the model; answers how many were compared.
#[track_caller]
fn compare(name: &str, rig: &Rig, model: &Model) -> usize {
    let trust = rig.trust();
    let mut compared = 0;
    for path in model.blocks.keys().filter_map(|hash| model.path(*hash)) {
        let held = path.iter().take_while(|block| block.count > 0).count() as u32;
        let Some(ours) = depth(rig, &path) else { continue };
        match trust.level {
            TrustLevel::Exact => assert_eq!(ours, held, "{name}: {trust:?}"),
            TrustLevel::LowerBound => assert!(ours <= held, "{name}: {ours} of {held}: {trust:?}"),
            TrustLevel::Unproven | TrustLevel::Predicted | TrustLevel::None => continue,
        }
        compared += 1;
    }
    compared
}

/// Plays a capture; answers how many answers were compared.
fn play(capture: &Capture) -> usize {
    // Forms without a place for salts, whose prompts had none.
    let old = ["vllm_old", "v0_5_10", "v0_5_15", "v0_5_18"].iter().any(|old| capture.name.contains(old));
    let mut rig = Rig::new(&Options { salts_possible: !old, ..Options::default() });
    let (mut model, mut next, mut compared) = (Model::default(), 0, 0);
    let mut first = EventBatch::default();
    event::decode(&capture.received[0].1, &mut None, &mut first).unwrap();
    rig.streams[0].worker = Worker::new(1, first.info().dp_rank.map_or(0, |rank| rank.0));
    for (at, (seq, payload)) in capture.received.iter().enumerate() {
        rig.send_bytes(0, seq.0, payload);
        if seq.0 < next {
            (model, next) = (Model::default(), 0);
        }
        let restarted = capture.received[..at].iter().any(|(before, _)| before.0 >= seq.0);
        for missed in next..seq.0 {
            if let Some(payload) = capture.sent.get(&missed).filter(|_| !restarted) {
                model.apply(payload);
            }
        }
        model.apply(payload);
        next = seq.0 + 1;
        if at % 16 == 0 || at + 1 == capture.received.len() {
            compared += compare(&capture.name, &rig, &model);
        }
    }
    compared
}

fn read(path: &Path) -> Capture {
    let bytes = std::fs::read(path).unwrap();
    let sidecar: serde_json::Value =
        serde_json::from_slice(&std::fs::read(path.with_extension("json")).unwrap()).unwrap();
    let mut capture = Capture { name: path.display().to_string(), received: Vec::new(), sent: BTreeMap::new() };
    let mut rest = bytes.as_slice();
    let number = |rest: &mut &[u8]| {
        let (first, after) = rest.split_at(4);
        *rest = after;
        u32::from_le_bytes(first.try_into().unwrap()) as usize
    };
    for row in sidecar["messages"].as_array().unwrap() {
        let mut frames = Vec::new();
        for _ in 0..number(&mut rest) {
            let len = number(&mut rest);
            let (frame, after) = rest.split_at(len);
            frames.push(frame);
            rest = after;
        }
        let [.., seq, payload] = frames.as_slice() else { continue };
        if !row["raw"].is_array() {
            continue;
        }
        let seq = EventSeq(u64::from_be_bytes((*seq).try_into().unwrap()));
        capture.sent.insert(seq.0, payload.to_vec());
        if row["kind"] == "pub" {
            capture.received.push((seq, payload.to_vec()));
        }
    }
    capture
}

#[test]
fn captured_streams_are_answered_as_counting_references_does() {
    let root = std::env::var_os("KVROUTED_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared"), PathBuf::from);
    let folders = ["vllm033", "vllm_old", "sglang"].map(|folder| root.join("captures").join(folder));
    let entries = folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten();
    let bins =
        entries.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some_and(|ext| ext == "bin"));
    // Edge cases are no engine's history; the oldest SGLang's hashes are no identities.
    let skipped =
        |path: &Path| ["edge", "v0_4_6_post5", "v0_5_2"].iter().any(|name| path.file_stem().unwrap() == *name);
    let mut played = 0;
    for path in bins.filter(|path| !skipped(path)) {
        let capture = read(&path);
        if capture.received.is_empty() {
            continue;
        }
        let compared = play(&capture);
        assert!(compared > 0, "{}: nothing was compared", capture.name);
        played += 1;
    }
    if played == 0 {
        use std::io::Write;
        std::io::stderr().write_all(b"\nskipped: no captures are here to be played\n").unwrap();
    }
}
