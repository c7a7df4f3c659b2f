//! XXH3-64 with NEON, which each processor of this target has.
//!
//! Up to 240 bytes, XXH3 is products of 64-bit words. A processor of this kind has instructions for both halves of such
//! a product, and NEON has none: it would need four 32-bit products for each, two at a time. So those lengths take the
//! scalar code. Above 240 bytes, four registers of two words hold the accumulators of one block. Several blocks side by
//! side would gain nothing: the eight sums of one block depend on each other only where they are scrambled.

use super::blocks::Blocks;
use super::keys::Keys;
use super::scalar::{
    self, ACCUMULATORS, LAST_KEY_AT, MERGE_KEY_AT, MIDDLE_BYTES_MAX, PRIME_SCRAMBLE, ROUND_STRIPES, SCRAMBLE_KEY_AT,
    STRIPE_BYTES, STRIPE_SECRET_BYTES,
};
use crate::ids::LocalHash;
use std::arch::aarch64::{
    uint64x2_t, vaddq_u64, vdup_n_u32, vdupq_n_u64, veorq_u64, vextq_u64, vget_low_u32, vld1q_u8, vmlal_high_u32,
    vmlal_u32, vmovn_u64, vmull_u32, vreinterpretq_u32_u64, vreinterpretq_u64_u8, vshlq_n_u64, vshrn_n_u64,
    vshrq_n_u64, vst1q_u64, vuzp1q_u32, vuzp2q_u32,
};

/// Bytes of a register.
const LINE: usize = 16;
/// Registers of a stripe.
const LINES: usize = STRIPE_BYTES / LINE;

/// As the scalar reference.
#[target_feature(enable = "neon")]
pub(super) fn hash_blocks(blocks: Blocks<'_>, keys: &Keys, out: &mut [LocalHash]) {
    assert_eq!(blocks.count(), out.len(), "a hash for each block");
    if blocks.window() <= MIDDLE_BYTES_MAX {
        return scalar::hash_each(blocks, keys, out);
    }
    for (block, to) in out.iter_mut().enumerate() {
        to.0 = scalar::merge(&accumulated(blocks.at(block), keys), blocks.window());
    }
}

/// The accumulators of more than 240 bytes, combined with the keys of the end.
#[target_feature(enable = "neon")]
#[inline]
fn accumulated(block: &[u8], keys: &Keys) -> [u64; 8] {
    let mut sums = Sums::new();
    // The last stripe is handled apart: it has at least one byte of its own. A round is scrambled only if a stripe
    // follows it.
    let (before_last, _) = block[..block.len() - 1].as_chunks::<STRIPE_BYTES>();
    for round in before_last.chunks(ROUND_STRIPES) {
        for (at, stripe) in round.iter().enumerate() {
            sums.add(stripe, key(keys, at * STRIPE_SECRET_BYTES));
        }
        if round.len() == ROUND_STRIPES {
            sums.scramble(key(keys, SCRAMBLE_KEY_AT));
        }
    }
    sums.add(stripe_at(block, block.len() - STRIPE_BYTES), key(keys, LAST_KEY_AT));
    sums.keyed(key(keys, MERGE_KEY_AT))
}

/// The eight accumulators, in pairs.
struct Sums {
    products: [uint64x2_t; LINES],
    /// XXH3 also adds each stripe itself, with its words swapped in pairs. The swap is done once for the sum.
    plain: [uint64x2_t; LINES],
}

impl Sums {
    #[target_feature(enable = "neon")]
    #[inline]
    fn new() -> Self {
        let begin = bytemuck::cast_ref::<[u64; 8], [u8; STRIPE_BYTES]>(&ACCUMULATORS);
        Self { products: load(begin), plain: [vdupq_n_u64(0); LINES] }
    }

    /// Adds a stripe. The lower halves of the words of two registers make one register, as do the upper halves, so that
    /// no instruction but the multiplications widens.
    #[target_feature(enable = "neon")]
    #[inline]
    fn add(&mut self, stripe: &[u8; STRIPE_BYTES], key: &[u8; STRIPE_BYTES]) {
        let (words, key) = (load(stripe), load(key));
        for line in [0, 2] {
            let first = vreinterpretq_u32_u64(veorq_u64(words[line], key[line]));
            let second = vreinterpretq_u32_u64(veorq_u64(words[line + 1], key[line + 1]));
            let (low, high) = (vuzp1q_u32(first, second), vuzp2q_u32(first, second));
            let products = &mut self.products;
            products[line] = vmlal_u32(products[line], vget_low_u32(low), vget_low_u32(high));
            products[line + 1] = vmlal_high_u32(products[line + 1], low, high);
        }
        for (plain, words) in self.plain.iter_mut().zip(words) {
            *plain = vaddq_u64(*plain, words);
        }
    }

    /// The accumulators of the stripes up to here.
    #[target_feature(enable = "neon")]
    #[inline]
    fn all(&self, line: usize) -> uint64x2_t {
        vaddq_u64(self.products[line], vextq_u64::<1>(self.plain[line], self.plain[line]))
    }

    /// Scrambles the accumulators between two rounds.
    #[target_feature(enable = "neon")]
    #[inline]
    fn scramble(&mut self, key: &[u8; STRIPE_BYTES]) {
        let prime = vdup_n_u32(PRIME_SCRAMBLE);
        for (line, key) in load(key).into_iter().enumerate() {
            let all = self.all(line);
            let mixed = veorq_u64(veorq_u64(all, vshrq_n_u64::<47>(all)), key);
            let high = vshlq_n_u64::<32>(vmull_u32(vshrn_n_u64::<32>(mixed), prime));
            self.products[line] = vmlal_u32(high, vmovn_u64(mixed), prime);
        }
        self.plain = [vdupq_n_u64(0); LINES];
    }

    /// The accumulators, combined with the keys of the end.
    #[target_feature(enable = "neon")]
    #[inline]
    fn keyed(&self, key: &[u8; STRIPE_BYTES]) -> [u64; 8] {
        let (key, mut words) = (load(key), [0; 8]);
        for (line, pair) in words.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            // SAFETY: a register is two words.
            unsafe { vst1q_u64(pair.as_mut_ptr(), veorq_u64(self.all(line), key[line])) };
        }
        words
    }
}

/// The 64 bytes at an offset in the seed's secret.
#[inline(always)]
fn key(keys: &Keys, at: usize) -> &[u8; STRIPE_BYTES] {
    stripe_at(keys.secret(), at)
}

/// The 64 bytes at an offset.
#[inline(always)]
fn stripe_at(bytes: &[u8], at: usize) -> &[u8; STRIPE_BYTES] {
    bytes[at..].first_chunk().expect("a stripe ends within its bytes")
}

/// A stripe or its key, at any alignment.
#[target_feature(enable = "neon")]
#[inline]
fn load(bytes: &[u8; STRIPE_BYTES]) -> [uint64x2_t; LINES] {
    let mut lines = [vdupq_n_u64(0); LINES];
    for (line, bytes) in lines.iter_mut().zip(bytes.as_chunks::<LINE>().0) {
        // SAFETY: a register is 16 bytes.
        *line = vreinterpretq_u64_u8(unsafe { vld1q_u8(bytes.as_ptr()) });
    }
    lines
}
