//! Captures of real engines, played as streams: the index gives the same answers as a plain count of references made
//! from the captures' sidecars.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::sidecar::{self, Message};
use super::{Options, Rig};
use crate::event::media::identifier_hash;
use crate::hash;
use crate::ids::{LocalHash, Scheme, ShardId, TierBlocks, Window, Worker};
use crate::index::Depths;
use crate::trust::TrustLevel;
use serde_json::Value;

/// The content of a block.
#[derive(Clone, Debug)]
struct Block {
    parent: Option<u64>,
    /// With the token that overlaps the next block, where there is one.
    tokens: Vec<u32>,
    media: Vec<u64>,
    lora: Option<String>,
    salt: Option<String>,
}

/// A model of one engine from its events: the block of each hash, and its count in each tier.
#[derive(Default)]
struct Model {
    blocks: BTreeMap<u64, Block>,
    counts: BTreeMap<(u64, usize, u64), u32>,
    groups: BTreeSet<(usize, u64)>,
    /// Groups that serve no main attention.
    others: BTreeSet<u64>,
}

impl Model {
    fn apply(&mut self, row: &Value, scheme: Option<Scheme>) {
        for fields in sidecar::events_of(row) {
            let group = fields["group_idx"].as_u64().unwrap_or(0);
            match (sidecar::tag_of(&fields), sidecar::tier_of(&fields)) {
                ("AllBlocksCleared", _) => {
                    self.counts.clear();
                    self.groups.clear();
                }
                ("BlockRemoved", Some(tier)) => {
                    for hash in sidecar::hashes_of(&fields["block_hashes"]) {
                        if let Some(count) = self.counts.get_mut(&(hash, tier, group)) {
                            *count = count.saturating_sub(1);
                        }
                    }
                }
                ("BlockStored", Some(tier)) => self.stored(&fields, tier, group, scheme),
                ("BlockRemoved" | "BlockStored", None) => {}
                (other, _) => panic!("unexpected tag {other}"),
            }
        }
    }

    fn stored(&mut self, fields: &Value, tier: usize, group: u64, scheme: Option<Scheme>) {
        let kind = fields["kv_cache_spec_kind"].as_str();
        if kind.is_some_and(|kind| !["full_attention", "mla_attention", "sink_full_attention"].contains(&kind)) {
            self.others.insert(group);
        }
        let hashes = sidecar::hashes_of(&fields["block_hashes"]);
        if self.others.contains(&group) || hashes.is_empty() {
            return;
        }
        if let Some((tokens, bigram)) = sidecar::tokens_of(fields) {
            let window = if bigram { Window::Bigram } else { Window::Plain };
            let block_size = fields["block_size"].as_u64().unwrap();
            if scheme != Some(Scheme { block_size: block_size as u32, window }) {
                return;
            }
            self.learn(fields, &hashes, &tokens, bigram);
        }
        self.groups.insert((tier, group));
        for hash in hashes {
            *self.counts.entry((hash, tier, group)).or_insert(0) += 1;
        }
    }

    fn learn(&mut self, fields: &Value, hashes: &[u64], tokens: &[u32], bigram: bool) {
        let media = sidecar::media_of(fields, identifier_hash);
        let size = (tokens.len() - usize::from(bigram)) / hashes.len();
        let mut parent = sidecar::parent_of(fields);
        for (at, hash) in hashes.iter().enumerate() {
            let above = parent.and_then(|parent| self.blocks.get(&parent));
            let inherited = above.and_then(|above| above.salt.clone());
            let block = Block {
                parent,
                tokens: tokens[at * size..(at + 1) * size + usize::from(bigram)].to_vec(),
                media: media.iter().filter(|(block, _)| *block as usize == at).map(|(_, hash)| *hash).collect(),
                lora: fields["lora_name"].as_str().map(str::to_owned),
                salt: sidecar::salt_of(fields).map(str::to_owned).or(inherited),
            };
            self.blocks.entry(*hash).or_insert(block);
            parent = Some(*hash);
        }
    }

    /// Whether every group that a tier has counts the block.
    fn holds(&self, hash: u64, tier: usize) -> bool {
        let mut groups = self.groups.range((tier, 0)..=(tier, u64::MAX)).peekable();
        let counts = |group: u64| self.counts.get(&(hash, tier, group)).is_some_and(|count| *count > 0);
        groups.peek().is_some() && groups.all(|(_, group)| counts(*group))
    }

    /// The blocks from the root to this one; `None` where the root was never seen.
    fn path(&self, of: u64) -> Option<Vec<(u64, &Block)>> {
        let mut path = vec![(of, self.blocks.get(&of)?)];
        while let Some(parent) = path.last()?.1.parent {
            path.push((parent, self.blocks.get(&parent).filter(|_| path.len() <= self.blocks.len())?));
        }
        path.reverse();
        Some(path)
    }

    fn held(&self, path: &[(u64, &Block)]) -> TierBlocks {
        let (mut depths, mut from) = ([0; 4], 0);
        for (hash, _) in path {
            let Some(tier) = (from..4).find(|tier| self.holds(*hash, *tier)) else { break };
            depths[tier] += 1;
            from = tier;
        }
        let [device, host, disk, external] = depths;
        TierBlocks { device, host, disk, external }
    }
}

/// The overlaps of the index with the prompt that a path's blocks make.
fn asked(rig: &Rig, scheme: Scheme, path: &[(u64, &Block)]) -> Option<TierBlocks> {
    let size = scheme.block_size as usize;
    let mut tokens: Vec<u32> = path.iter().flat_map(|(_, block)| &block.tokens[..size]).copied().collect();
    let (first, last) = (path.first()?.1, path.last()?.1);
    tokens.extend(&last.tokens[size..]);
    let of_block = |(at, (_, block)): (usize, &(u64, &Block))| {
        block.media.iter().map(|hash| (at as u32, *hash)).collect::<Vec<_>>()
    };
    let media: Vec<(u32, u64)> = path.iter().enumerate().flat_map(of_block).collect();
    let mut locals = Vec::<LocalHash>::new();
    let seed = hash::seed(first.lora.as_deref(), first.salt.as_deref());
    hash::local_hashes(scheme, seed, hash::token_bytes(&tokens), &media, &mut locals);
    let mut depths = Depths::new();
    rig.reader.lookup(&locals, &mut depths);
    Some(depths.of(ShardId(0), rig.streams[0].slot))
}

/// Compares every path with the model; answers how many were compared.
#[track_caller]
fn compare(name: &str, rig: &Rig, model: &Model) -> usize {
    let Some(scheme) = rig.space.scheme.get() else { return 0 };
    let trust = rig.trust();
    // Reasons that blocks may be missing. A worker that is unproven for another reason is still counted right.
    let may_lack = trust.reasons.iter().any(|reason| reason.cap() == TrustLevel::LowerBound);
    let mut compared = 0;
    for path in model.blocks.keys().filter_map(|hash| model.path(*hash)) {
        let (held, Some(ours)) = (model.held(&path), asked(rig, scheme, &path)) else { continue };
        if may_lack {
            assert!(ours.device <= held.device, "{name}: {ours:?} of {held:?}: {trust:?}");
            assert!(ours.total() <= held.total(), "{name}: {ours:?} of {held:?}: {trust:?}");
        } else {
            assert_eq!(ours, held, "{name}: {path:?} {trust:?}");
        }
        compared += 1;
    }
    if !may_lack {
        let held = |tier: usize| model.blocks.keys().filter(|hash| model.holds(**hash, tier)).count() as u64;
        let figures = rig.space.writer.held(rig.streams[0].slot);
        assert_eq!(figures.by_tier, std::array::from_fn(held), "{name}: {trust:?}");
    }
    compared
}

/// Plays a capture; answers how many answers were compared.
fn play(capture: &Path) -> usize {
    let name = capture.display().to_string();
    // Forms without a place for salts, whose prompts had none.
    let old = ["vllm_old", "v0_4", "v0_5_2.", "v0_5_10", "v0_5_15", "v0_5_18"].iter().any(|old| name.contains(old));
    let mut rig = Rig::new(&Options { salts_possible: !old, ..Options::default() });
    let messages = sidecar::messages(capture);
    let is_live = |message: &&Message| message.row["kind"] == "pub";
    let Some(first) = messages.iter().find(is_live) else { return 0 };
    let rank_of = |row: &Value| row["raw"].get(2).and_then(Value::as_u64);
    let rank = rank_of(&first.row).unwrap_or(0);
    rig.streams[0].worker = Worker::new(1, rank as u32);
    let sent: BTreeMap<u64, &Message> = messages.iter().rev().map(|message| (message.seq, message)).collect();
    let (mut model, mut next, mut restarted, mut compared) = (Model::default(), 0, false, 0);
    let every = messages.len().div_ceil(32);
    for (at, message) in messages.iter().filter(is_live).enumerate() {
        rig.send_bytes(0, message.seq, &message.payload);
        if message.seq < next {
            (model, next, restarted) = (Model::default(), 0, true);
        }
        let lost = (next..message.seq).filter(|_| !restarted).filter_map(|seq| sent.get(&seq).copied());
        for said in lost.chain([message]) {
            if rank_of(&said.row).is_none_or(|of| of == rank) {
                model.apply(&said.row, rig.space.scheme.get());
            }
        }
        next = message.seq + 1;
        if at % every == 0 || at + 1 == messages.iter().filter(is_live).count() {
            compared += compare(&message.name, &rig, &model);
        }
    }
    compared
}

#[test]
fn captured_streams_are_answered_as_counting_references_does() {
    let Some(shared) = sidecar::shared() else { return };
    for folder in sidecar::FOLDERS {
        let captures = sidecar::captures_in(&shared.join(folder));
        assert!(!captures.is_empty(), "{folder} has no captures");
        for capture in captures {
            assert!(play(&capture) > 0, "{}: nothing was compared", capture.display());
        }
    }
}
