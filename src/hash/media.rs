//! Blocks that multimodal objects touch.

use super::blocks::Blocks;
use super::isa::Isa;
use super::keys::Keys;
use crate::ids::{LocalHash, Seed};
use crate::limits::HASH_STAGE_BYTES_MAX as STAGE_BYTES_MAX;
use std::cell::RefCell;
use xxhash_rust::xxh3::Xxh3;

/// Token ids from here on stand for a multimodal object instead of text.
const PLACEHOLDER_TOKEN_FIRST: u32 = 1_000_000;
/// The bits of an object's hash that a placeholder keeps.
const PLACEHOLDER_HASH_MASK: u64 = (1 << 30) - 1;

thread_local! {
    /// For sorting media. It is kept, so that a warm thread allocates nothing.
    static SORTED: RefCell<Vec<(u32, u64)>> = const { RefCell::new(Vec::new()) };
    /// For copying blocks and their objects together. It is kept too, with at most `STAGE_BYTES_MAX`.
    static STAGE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The token id that stands in a prompt for each token of the multimodal object with this hash.
#[must_use]
pub fn placeholder_token(media_hash: u64) -> u32 {
    PLACEHOLDER_TOKEN_FIRST + (media_hash & PLACEHOLDER_HASH_MASK) as u32
}

/// Calls `f` with the media sorted by block, then by hash. Media that are sorted already are not copied.
pub(super) fn with_sorted(media: &[(u32, u64)], f: impl FnOnce(&[(u32, u64)])) {
    if media.is_sorted() {
        return f(media);
    }
    SORTED.with_borrow_mut(|sorted| {
        sorted.clear();
        sorted.extend_from_slice(media);
        sorted.sort_unstable();
        f(sorted);
    });
}

/// Writes the local hash of every block; `media` are sorted.
///
/// A block's input is its tokens and the hashes of its objects. Neighbouring blocks with equally many objects have
/// inputs of equal length: these are copied together and hashed side by side.
pub(super) fn local_hashes(blocks: Blocks<'_>, seed: Seed, mut media: &[(u32, u64)], out: &mut [LocalHash]) {
    let keys = Keys::new(seed.0);
    let mut at = 0;
    while at < blocks.count() {
        let (objects, stage_max) = match media.first() {
            Some((block, _)) if *block as usize == at => {
                let objects = objects_of_first(media);
                (objects, STAGE_BYTES_MAX / bytes_with(blocks, objects))
            }
            _ => (0, 0),
        };
        let to = match objects {
            0 => media.first().map_or(blocks.count(), |(block, _)| blocks.count().min(*block as usize)),
            _ => at + neighbours(media, objects).min(blocks.count() - at).min(stage_max.max(1)),
        };
        let (run, out) = (blocks.part(at, to), &mut out[at..to]);
        let (own, rest) = media.split_at(objects * run.count());
        match (objects, stage_max) {
            (0, _) => Isa::best().hash_blocks(run, &keys, out),
            (_, 0) => out[0].0 = streamed(seed, run.at(0), own),
            _ => STAGE.with_borrow_mut(|stage| staged(run, &keys, own, stage, out)),
        }
        (at, media) = (to, rest);
    }
}

/// The number of objects of the first object's block.
fn objects_of_first(media: &[(u32, u64)]) -> usize {
    media.chunk_by(|(block, _), (next, _)| block == next).next().map_or(0, <[_]>::len)
}

/// The number of consecutive blocks, from the first object's on, that have exactly `objects` objects.
fn neighbours(media: &[(u32, u64)], objects: usize) -> usize {
    let first = media.first().map_or(0, |(block, _)| *block as usize);
    let same = |(index, run): &(usize, &[(u32, u64)])| run.len() == objects && run[0].0 as usize == first + index;
    media.chunk_by(|(block, _), (next, _)| block == next).enumerate().take_while(same).count()
}

/// Bytes of a block and the hashes of `objects` objects.
fn bytes_with(blocks: Blocks<'_>, objects: usize) -> usize {
    blocks.window() + objects * size_of::<u64>()
}

/// Hashes blocks that have equally many objects each.
fn staged(blocks: Blocks<'_>, keys: &Keys, media: &[(u32, u64)], stage: &mut Vec<u8>, out: &mut [LocalHash]) {
    let objects = media.len() / blocks.count();
    stage.clear();
    for (block, own) in media.chunks_exact(objects).enumerate() {
        stage.extend_from_slice(blocks.at(block));
        own.iter().for_each(|(_, hash)| stage.extend_from_slice(&hash.to_le_bytes()));
    }
    Isa::best().hash_blocks(Blocks::side_by_side(stage, bytes_with(blocks, objects)), keys, out);
}

/// The hash of one block with more objects than are copied.
fn streamed(seed: Seed, tokens: &[u8], media: &[(u32, u64)]) -> u64 {
    let mut stream = Xxh3::with_seed(seed.0);
    stream.update(tokens);
    for (_, hash) in media {
        stream.update(&hash.to_le_bytes());
    }
    stream.digest()
}
