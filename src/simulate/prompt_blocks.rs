//! The blocks of a simulated request: what a router hashes, and what an engine caches.

use super::workload::Turn;
use crate::simulated_engine::Block;

/// Mixes two words. A finaliser of 64 bits, so that equal hashes are equal contents for all purposes of a simulation.
pub(super) const fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b.wrapping_add(0x632b_e59b_d9b4_e019);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

/// The whole blocks of a turn's prompt and output. The last token of the output is never computed, so it is in no
/// block.
pub(super) fn blocks_of(turn: &Turn, block_size: u32, blocks: &mut Vec<Block>) {
    let (mut local, mut filled, mut chain) = (0_u64, 0_u32, 0_u64);
    let mut spans = turn.spans().peekable();
    while let Some(span) = spans.next() {
        let is_last = spans.peek().is_none();
        let (mut from, mut left) = (span.from, span.tokens - u32::from(is_last));
        while left > 0 {
            let taken = left.min(block_size - filled);
            local = mix(mix(local, mix(span.content, from)), u64::from(filled) << 32 | u64::from(taken));
            (from, left, filled) = (from + u64::from(taken), left - taken, filled + taken);
            if filled == block_size {
                chain = mix(chain, local);
                blocks.push(Block { local, chain });
                (local, filled) = (0, 0);
            }
        }
    }
}
