//! The messages of one engine, as it puts them on the wire: conversations of a fixed length, stored message by
//! message, and once its cache is full the oldest removed, the last block first.

use kvrouted::event::{BatchInfo, Content, GroupKind, KvEvent, Medium, Removed, Salt, Stored, flat};
use kvrouted::hash;
use kvrouted::ids::{EngineHash, GroupId, LocalHash, Scheme, Tier, Window};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::args::Wire;

/// Tokens per block.
pub(crate) const BLOCK_SIZE: u32 = 16;
/// How all of it is hashed.
pub(crate) const SCHEME: Scheme = Scheme { block_size: BLOCK_SIZE, window: Window::Plain };
/// Blocks the engine's cache holds.
const CAPACITY_BLOCKS: u64 = 65_536;
/// Token ids are below this.
const VOCABULARY: u32 = 128_000;
/// Messages of a conversation at least.
const CONVERSATION_MESSAGES_MIN: u64 = 16;
/// Blocks of a conversation, where that is more.
const CONVERSATION_BLOCKS: u64 = 256;

/// Which messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Their format.
    pub(crate) wire: Wire,
    /// Blocks that each stores.
    pub(crate) blocks: u32,
    /// How many messages.
    pub(crate) messages: u64,
}

impl Shape {
    /// Messages of a conversation: the first of each is the one that is waited for.
    #[must_use]
    pub(crate) fn conversation_messages(&self) -> u64 {
        if self.blocks == 1 { CONVERSATION_MESSAGES_MIN } else { (CONVERSATION_BLOCKS / u64::from(self.blocks)).max(1) }
    }

    /// What a lookup finds once a conversation has begun: its first block.
    #[must_use]
    pub(crate) fn first_block(&self, conversation: u64) -> LocalHash {
        let mut locals = Vec::with_capacity(1);
        let tokens = tokens(self.start_of(conversation), 1);
        hash::local_hashes(SCHEME, hash::seed(None, None), hash::token_bytes(&tokens), &[], &mut locals);
        locals[0]
    }

    /// The number of a conversation's first block.
    fn start_of(&self, conversation: u64) -> u64 {
        conversation * self.conversation_messages() * u64::from(self.blocks)
    }

    /// All messages, in their order.
    pub(crate) fn payloads(&self) -> impl Iterator<Item = Vec<u8>> + use<> {
        let shape = *self;
        let mut encoder = flat::Encoder::new();
        (0..shape.messages).map(move |at| {
            let store = shape.store(at);
            let removed = shape.removed(at);
            match shape.wire {
                Wire::Msgpack => msgpack(at, 0, &store, &removed),
                Wire::Flatbuffer => flatbuffer(&mut encoder, &store, &removed),
            }
        })
    }

    fn store(&self, at: u64) -> Store {
        let blocks = u64::from(self.blocks);
        let first = at * blocks;
        let is_root = at.is_multiple_of(self.conversation_messages());
        Store {
            parent: (!is_root).then(|| name(first - 1)),
            hashes: (first..first + blocks).map(name).collect(),
            tokens: tokens(first, blocks),
        }
    }

    /// As many blocks as a message stores, of the conversation that is the oldest.
    fn removed(&self, at: u64) -> Vec<EngineHash> {
        let per_conversation = self.conversation_messages();
        let capacity_messages = (CAPACITY_BLOCKS / u64::from(self.blocks)).next_multiple_of(per_conversation);
        let Some(gone) = at.checked_sub(capacity_messages) else { return Vec::new() };
        let (conversation, from_its_end) = (gone / per_conversation, gone % per_conversation);
        let blocks = u64::from(self.blocks);
        let end = self.start_of(conversation) + (per_conversation - from_its_end) * blocks;
        (end - blocks..end).rev().map(name).collect()
    }
}

struct Store {
    parent: Option<EngineHash>,
    hashes: Vec<EngineHash>,
    tokens: Vec<u32>,
}

/// What the engine calls a block.
#[must_use]
pub(crate) fn name(block: u64) -> EngineHash {
    // Any mixing will do; engines' hashes are spread.
    EngineHash((block + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 << 63)
}

/// Tokens of blocks with these numbers.
#[must_use]
pub(crate) fn tokens(first_block: u64, blocks: u64) -> Vec<u32> {
    let of_block = |block| {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(block);
        (0..BLOCK_SIZE).map(move |_| rng.random_range(0..VOCABULARY))
    };
    (first_block..first_block + blocks).flat_map(of_block).collect()
}

fn flatbuffer(encoder: &mut flat::Encoder, store: &Store, removed: &[EngineHash]) -> Vec<u8> {
    let (medium, group) = (Medium::Tier(Tier::Device), GroupId(0));
    let stored = KvEvent::Stored(Stored {
        hashes: &store.hashes,
        parent: store.parent,
        content: Content::Tokens { tokens: &store.tokens, bigram: false },
        block_size: BLOCK_SIZE,
        medium,
        group,
        group_kind: GroupKind::Main,
        lora: None,
        salt: Salt::Inherited,
        media: &[],
    });
    let removed = (!removed.is_empty()).then_some(KvEvent::Removed(Removed { hashes: removed, medium, group }));
    let info = BatchInfo { scheme: Some(SCHEME), ..BatchInfo::default() };
    encoder.encode(&info, std::iter::once(stored).chain(removed)).to_vec()
}

/// A message that stores blocks from the beginning of a prompt, as vLLM puts it.
#[must_use]
pub(crate) fn stored(at: u64, hashes: Vec<EngineHash>, tokens: Vec<u32>) -> Vec<u8> {
    msgpack(at, 0, &Store { parent: None, hashes, tokens }, &[])
}

/// The same, with `removed` gone in the same message.
#[must_use]
pub(crate) fn turned_over(at: u64, hashes: Vec<EngineHash>, tokens: Vec<u32>, removed: &[EngineHash]) -> Vec<u8> {
    msgpack(at, 0, &Store { parent: None, hashes, tokens }, removed)
}

/// The same of one data-parallel rank, where the stored blocks follow `parent`.
#[must_use]
pub(crate) fn continued(
    (at, rank): (u64, u32),
    parent: Option<EngineHash>,
    hashes: Vec<EngineHash>,
    tokens: Vec<u32>,
    removed: &[EngineHash],
) -> Vec<u8> {
    msgpack(at, rank, &Store { parent, hashes, tokens }, removed)
}

/// `[time, [event map…], rank]` as vLLM 0.24 and later send it, every number in its shortest form.
fn msgpack(at: u64, rank: u32, store: &Store, removed: &[EngineHash]) -> Vec<u8> {
    let mut out = vec![0x93, 0xcb];
    out.extend((1.7e9 + at as f64).to_be_bytes());
    out.push(0x91 + u8::from(!removed.is_empty()));
    out.push(0x88);
    text(&mut out, "type");
    text(&mut out, "BlockStored");
    text(&mut out, "block_hashes");
    numbers(&mut out, store.hashes.iter().map(|hash| hash.0));
    text(&mut out, "parent_block_hash");
    match store.parent {
        Some(parent) => number(&mut out, parent.0),
        None => out.push(0xc0),
    }
    text(&mut out, "token_ids");
    numbers(&mut out, store.tokens.iter().map(|token| u64::from(*token)));
    text(&mut out, "block_size");
    number(&mut out, u64::from(BLOCK_SIZE));
    text(&mut out, "lora_id");
    out.push(0xc0);
    text(&mut out, "medium");
    text(&mut out, "GPU");
    text(&mut out, "lora_name");
    out.push(0xc0);
    if !removed.is_empty() {
        out.push(0x83);
        text(&mut out, "type");
        text(&mut out, "BlockRemoved");
        text(&mut out, "block_hashes");
        numbers(&mut out, removed.iter().map(|hash| hash.0));
        text(&mut out, "medium");
        text(&mut out, "GPU");
    }
    number(&mut out, u64::from(rank));
    out
}

/// A text of up to 31 bytes, as all of these are.
fn text(out: &mut Vec<u8>, text: &str) {
    out.push(0xa0 | text.len() as u8);
    out.extend(text.as_bytes());
}

fn number(out: &mut Vec<u8>, number: u64) {
    match number {
        0..=0x7f => out.push(number as u8),
        0x80..=0xff => out.extend([0xcc, number as u8]),
        0x100..=0xffff => {
            out.push(0xcd);
            out.extend((number as u16).to_be_bytes());
        }
        0x1_0000..=0xffff_ffff => {
            out.push(0xce);
            out.extend((number as u32).to_be_bytes());
        }
        _ => {
            out.push(0xcf);
            out.extend(number.to_be_bytes());
        }
    }
}

fn numbers(out: &mut Vec<u8>, values: impl ExactSizeIterator<Item = u64>) {
    match values.len() {
        len @ 0..=15 => out.push(0x90 | len as u8),
        len => {
            out.push(0xdc);
            out.extend((len as u16).to_be_bytes());
        }
    }
    values.for_each(|value| number(out, value));
}

/// The payloads of a recording; its layout is told in kvrouted's tests/fixtures/events/README.md.
pub(crate) fn recorded(mut recording: &[u8]) -> Vec<Vec<u8>> {
    let mut payloads = Vec::new();
    while let Some((frames, rest)) = length(recording) {
        recording = rest;
        let mut last = Vec::new();
        for _ in 0..frames {
            let Some((bytes, rest)) = length(recording) else { return payloads };
            let Some((frame, rest)) = rest.split_at_checked(bytes) else { return payloads };
            (last, recording) = (frame.to_vec(), rest);
        }
        payloads.push(last);
    }
    payloads
}

fn length(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (head, rest) = bytes.split_first_chunk()?;
    Some((u32::from_le_bytes(*head) as usize, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvrouted::ids::{EventSeq, Worker};
    use kvrouted::index::{Depths, ShardLimits};
    use kvrouted::ingest::Feed;
    use kvrouted::metrics::WorkerCounter;

    #[test]
    fn both_wires_are_taken_whole_and_the_cache_stays_at_its_size() {
        for (wire, blocks) in [(Wire::Msgpack, 1), (Wire::Msgpack, 16), (Wire::Msgpack, 256), (Wire::Flatbuffer, 256)] {
            let messages = CAPACITY_BLOCKS / u64::from(blocks) + 200;
            let shape = Shape { wire, blocks, messages };
            let (mut feed, reader) = Feed::new(Worker::new(1, 0), None, true, ShardLimits::default());
            for (seq, payload) in shape.payloads().enumerate() {
                feed.message(EventSeq(seq as u64), &payload);
            }
            let counters = &feed.view().counters;
            assert_eq!(counters.get(WorkerCounter::Batches), messages);
            assert_eq!(counters.get(WorkerCounter::BlocksStored), messages * u64::from(blocks));
            assert_eq!(counters.get(WorkerCounter::RemovesUnknown), 0);
            assert!(feed.held().bound <= CAPACITY_BLOCKS + CONVERSATION_BLOCKS, "{:?}", feed.held());
            let (mut depths, last) = (Depths::new(), (messages - 1) / shape.conversation_messages());
            let mut depth = |conversation| {
                reader.lookup(&[shape.first_block(conversation)], &mut depths);
                depths.of(Feed::SHARD, Feed::SLOT).device
            };
            assert_eq!((depth(0), depth(last)), (0, 1), "the oldest is gone, the newest is there");
        }
    }
}
