//! Blocks that multimodal objects touch.

use super::scalar::blocks;
use crate::ids::{LocalHash, Scheme, Seed};
use std::cell::RefCell;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// Token ids from here on stand for a multimodal object instead of text.
const PLACEHOLDER_TOKEN_FIRST: u32 = 1_000_000;
/// How much of an object's hash a placeholder keeps.
const PLACEHOLDER_HASH_MASK: u64 = (1 << 30) - 1;

thread_local! {
    /// Where unsorted media are sorted. Kept, so that a warm thread allocates nothing.
    static SORTED: RefCell<Vec<(u32, u64)>> = const { RefCell::new(Vec::new()) };
}

/// The token id that stands in a prompt for each token of the multimodal object with this hash.
#[must_use]
pub fn placeholder_token(media_hash: u64) -> u32 {
    PLACEHOLDER_TOKEN_FIRST + (media_hash & PLACEHOLDER_HASH_MASK) as u32
}

/// Hands `f` the media sorted by block, then by hash; in place when they already are.
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

/// Appends the local hash of every whole block; `media` are sorted.
pub(super) fn local_hashes(
    scheme: Scheme,
    seed: Seed,
    tokens_le: &[u8],
    mut media: &[(u32, u64)],
    out: &mut Vec<LocalHash>,
) {
    for (index, tokens) in blocks(scheme, tokens_le).enumerate() {
        let here = media.partition_point(|(block, _)| *block as usize <= index);
        let (objects, rest) = media.split_at(here);
        media = rest;
        out.push(LocalHash(if objects.is_empty() {
            xxh3_64_with_seed(tokens, seed.0)
        } else {
            with_objects(seed, tokens, objects)
        }));
    }
}

/// The hash over a block's tokens and then its objects' hashes.
fn with_objects(seed: Seed, tokens: &[u8], objects: &[(u32, u64)]) -> u64 {
    let mut stream = Xxh3::with_seed(seed.0);
    stream.update(tokens);
    for (_, hash) in objects {
        stream.update(&hash.to_le_bytes());
    }
    stream.digest()
}
