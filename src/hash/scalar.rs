//! The reference: one block after the other. Faster twins must give the same bits.

use super::{SEED_BASE, TOKEN_BYTES, block_count};
use crate::ids::{LocalHash, Scheme, Seed, SequenceHash, Window};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The bytes of every whole block. Blocks of a bigram scheme overlap by one token.
pub(super) fn blocks(scheme: Scheme, tokens_le: &[u8]) -> impl Iterator<Item = &[u8]> {
    let count = block_count(tokens_le.len() / TOKEN_BYTES, scheme);
    let stride = scheme.block_size as usize * TOKEN_BYTES;
    let window = match scheme.window {
        Window::Plain => stride,
        Window::Bigram => stride + TOKEN_BYTES,
    };
    (0..count).map(move |block| &tokens_le[block * stride..block * stride + window])
}

/// Appends the local hash of every whole block.
pub(super) fn local_hashes(scheme: Scheme, seed: Seed, tokens_le: &[u8], out: &mut Vec<LocalHash>) {
    out.extend(blocks(scheme, tokens_le).map(|block| LocalHash(xxh3_64_with_seed(block, seed.0))));
}

/// Appends the chain over `locals`.
pub(super) fn sequence_hashes(locals: &[LocalHash], out: &mut Vec<SequenceHash>) {
    let mut previous = None;
    out.extend(locals.iter().map(|local| {
        let hash = previous.map_or(SequenceHash(local.0), |before| chain(before, *local));
        previous = Some(hash);
        hash
    }));
}

/// One step of the chain.
pub(super) fn chain(previous: SequenceHash, local: LocalHash) -> SequenceHash {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&previous.0.to_le_bytes());
    bytes[8..].copy_from_slice(&local.0.to_le_bytes());
    SequenceHash(xxh3_64_with_seed(&bytes, SEED_BASE))
}
