//! The blocks of a token sequence, as the demo's engines name them.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Tokens per KV block of the demo's engines.
pub(crate) const BLOCK_TOKENS: usize = 16;

const ROOT: u64 = 0x6465_6d6f_5f72_6f6f;

/// The names of the whole blocks of `tokens`, first block first.
pub(crate) fn block_names(tokens: &[u32]) -> Vec<u64> {
    let mut parent = ROOT;
    let mut bytes = [0_u8; BLOCK_TOKENS * 4];
    tokens
        .chunks_exact(BLOCK_TOKENS)
        .map(|block| {
            for (to, token) in bytes.chunks_exact_mut(4).zip(block) {
                to.copy_from_slice(&token.to_be_bytes());
            }
            parent = xxh3_64_with_seed(&bytes, parent);
            parent
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_depends_on_everything_before_it_and_partial_blocks_have_none() {
        let tokens: Vec<u32> = (0..40).collect();
        let mut other = tokens.clone();
        other[0] = 99;
        let (names, others) = (block_names(&tokens), block_names(&other));
        assert_eq!(names.len(), 2);
        assert_eq!(names, block_names(&tokens[..32]));
        assert_ne!(names[1], others[1]);
    }
}
