//! Sequence hashes: each needs the one before it, so there is nothing to do side by side.

use super::SEED_BASE;
use crate::ids::{LocalHash, SequenceHash};
use xxhash_rust::xxh3::xxh3_64_with_seed;

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
