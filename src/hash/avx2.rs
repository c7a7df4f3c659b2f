//! XXH3-64 with AVX2.
//!
//! Up to 64 bytes, four blocks are multiplied side by side: four 32-bit products make one of 64 bits. For 65 to 240
//! bytes that gains nothing over the scalar multiplier, which is compiled here with the multiplication that leaves the
//! flags alone. Above 240 bytes, two registers hold a block's accumulators.

use super::blocks::Blocks;
use super::keys::Keys;
use super::scalar::{
    self, ACCUMULATORS, LAST_KEY_AT, MERGE_KEY_AT, MIDDLE_BYTES_MAX, PRIME_SCRAMBLE, ROUND_STRIPES, SCRAMBLE_KEY_AT,
    STRIPE_BYTES, STRIPE_SECRET_BYTES,
};
use crate::ids::LocalHash;
use std::arch::x86_64::{
    __m256i, _mm256_add_epi64, _mm256_and_si256, _mm256_blend_epi32, _mm256_loadu_si256, _mm256_mul_epu32,
    _mm256_permute2x128_si256, _mm256_set1_epi64x, _mm256_setzero_si256, _mm256_shuffle_epi32, _mm256_slli_epi64,
    _mm256_srli_epi64, _mm256_storeu_si256, _mm256_unpackhi_epi64, _mm256_unpacklo_epi64, _mm256_xor_si256,
};

/// Blocks of one iteration.
const FOUR: usize = 4;
/// Bytes of a register.
const LINE: usize = 32;

/// As the scalar reference.
#[target_feature(enable = "avx2,bmi2")]
pub(super) fn hash_blocks(blocks: Blocks<'_>, keys: &Keys, out: &mut [LocalHash]) {
    assert_eq!(blocks.count(), out.len(), "a hash for each block");
    match blocks.window() {
        33..=64 => short(blocks, keys, out),
        0..=MIDDLE_BYTES_MAX => scalar::hash_each(blocks, keys, out),
        256 => each_long::<256>(blocks, keys, out),
        260 => each_long::<260>(blocks, keys, out),
        _ => each_long::<0>(blocks, keys, out),
    }
}

/// 33 to 64 bytes: the first and the last 32.
#[target_feature(enable = "avx2,bmi2")]
fn short(blocks: Blocks<'_>, keys: &Keys, out: &mut [LocalHash]) {
    let window = blocks.window();
    let key = |low: usize, high: usize| {
        let mut bytes = [0; LINE];
        bytes[..16].copy_from_slice(&keys.secret()[low..low + 16]);
        bytes[16..].copy_from_slice(&keys.secret()[high..high + 16]);
        bytes
    };
    // SAFETY: both arrays are 32 bytes.
    let (first, last) = unsafe { (load(key(0, 32).as_ptr()), load(key(48, 16).as_ptr())) };
    let mut chunks = out.chunks_exact_mut(FOUR);
    let mut at = 0;
    for chunk in &mut chunks {
        let two = |block: usize| {
            let (left, right) = (blocks.start(block), blocks.start(block + 1));
            // SAFETY: both blocks are below the count, `out` has one hash for each, and have at least 33 bytes.
            unsafe {
                let back = window - LINE;
                let front = products(_mm256_xor_si256(first, load(left)), _mm256_xor_si256(first, load(right)));
                let (left, right) = (load(left.add(back)), load(right.add(back)));
                _mm256_add_epi64(front, products(_mm256_xor_si256(last, left), _mm256_xor_si256(last, right)))
            }
        };
        let (low, high) = (two(at), two(at + 2));
        let sums = _mm256_add_epi64(
            _mm256_permute2x128_si256::<0x20>(low, high),
            _mm256_permute2x128_si256::<0x31>(low, high),
        );
        let mut words = [0_u64; FOUR];
        // SAFETY: four words are 32 bytes.
        unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), sums) };
        for (to, sum) in chunk.iter_mut().zip(words) {
            to.0 = scalar::avalanche(sum.wrapping_add(scalar::of_length(window)));
        }
        at += FOUR;
    }
    for (block, to) in chunks.into_remainder().iter_mut().enumerate() {
        to.0 = scalar::hash(blocks.at(at + block), keys);
    }
}

/// More than 240 bytes. `WINDOW` is 0 if it is not known at compile time.
#[target_feature(enable = "avx2,bmi2")]
fn each_long<const WINDOW: usize>(blocks: Blocks<'_>, keys: &Keys, out: &mut [LocalHash]) {
    let window = if WINDOW > 0 { WINDOW } else { blocks.window() };
    for (block, to) in out.iter_mut().enumerate() {
        let mut sums = [0; 8];
        // SAFETY: the block is below the count and longer than 240 bytes; four words from 0 or 4 on are within eight.
        unsafe {
            let [low, high] = accumulated(blocks.start(block), window, keys);
            _mm256_storeu_si256(sums.as_mut_ptr().cast(), low);
            _mm256_storeu_si256(sums.as_mut_ptr().add(4).cast(), high);
        }
        to.0 = scalar::merge(&sums, window);
    }
}

/// The accumulators of `window` bytes, combined with the keys of the end.
///
/// # Safety
/// `window` bytes, more than 240, are readable at `block`.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn accumulated(block: *const u8, window: usize, keys: &Keys) -> [__m256i; 2] {
    // SAFETY: the stripes before the last are (window - 1) / 64, the last one is the last 64 bytes; keys are 64 bytes
    // from 128 or less on, of 192. Half a stripe is 32 bytes.
    unsafe {
        let key = |at: usize, half: usize| load(keys.secret().as_ptr().add(at + half * LINE));
        let begin = ACCUMULATORS.as_ptr().cast::<u8>();
        let mut sums = [load(begin), load(begin.add(LINE))];
        // XXH3 also adds each stripe itself, with its words swapped in pairs. The swap is done once for the sum.
        let mut plain = [_mm256_setzero_si256(); 2];
        let add = |sums: &mut [__m256i; 2], plain: &mut [__m256i; 2], at: usize, key_at: usize| {
            for half in 0..2 {
                let stripe = load(block.add(at + half * LINE));
                let keyed = _mm256_xor_si256(stripe, key(key_at, half));
                plain[half] = _mm256_add_epi64(plain[half], stripe);
                sums[half] = _mm256_add_epi64(sums[half], _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed)));
            }
        };
        let before_last = (window - 1) / STRIPE_BYTES;
        for stripe in 0..before_last {
            let in_round = stripe % ROUND_STRIPES;
            add(&mut sums, &mut plain, stripe * STRIPE_BYTES, in_round * STRIPE_SECRET_BYTES);
            if in_round == ROUND_STRIPES - 1 {
                for half in 0..2 {
                    let all = _mm256_add_epi64(sums[half], swapped(plain[half]));
                    sums[half] = scrambled(all, key(SCRAMBLE_KEY_AT, half));
                }
                plain = [_mm256_setzero_si256(); 2];
            }
        }
        add(&mut sums, &mut plain, window - STRIPE_BYTES, LAST_KEY_AT);
        let end =
            |half: usize| _mm256_xor_si256(_mm256_add_epi64(sums[half], swapped(plain[half])), key(MERGE_KEY_AT, half));
        [end(0), end(1)]
    }
}

/// Words swapped in pairs.
#[target_feature(enable = "avx2")]
#[inline]
fn swapped(words: __m256i) -> __m256i {
    _mm256_shuffle_epi32::<0b01_00_11_10>(words)
}

/// Scrambles half of the accumulators between two rounds.
#[target_feature(enable = "avx2")]
#[inline]
fn scrambled(sums: __m256i, key: __m256i) -> __m256i {
    let prime = _mm256_set1_epi64x(i64::from(PRIME_SCRAMBLE));
    let mixed = _mm256_xor_si256(_mm256_xor_si256(sums, _mm256_srli_epi64::<47>(sums)), key);
    let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime);
    _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64::<32>(high))
}

/// The folded products of the pairs of words of two blocks, alternating.
#[target_feature(enable = "avx2")]
#[inline]
fn products(left: __m256i, right: __m256i) -> __m256i {
    fold(_mm256_unpacklo_epi64(left, right), _mm256_unpackhi_epi64(left, right))
}

/// The two halves of the products of words, combined by XOR. They are made of 32-bit products, as in long
/// multiplication.
#[target_feature(enable = "avx2")]
#[inline]
fn fold(x: __m256i, y: __m256i) -> __m256i {
    let (x_high, y_high) = (_mm256_srli_epi64::<32>(x), _mm256_srli_epi64::<32>(y));
    let low = _mm256_mul_epu32(x, y);
    let (cross, other) = (_mm256_mul_epu32(x_high, y), _mm256_mul_epu32(x, y_high));
    let high = _mm256_mul_epu32(x_high, y_high);
    let cross = _mm256_add_epi64(cross, _mm256_srli_epi64::<32>(low));
    let other = _mm256_add_epi64(other, _mm256_and_si256(cross, _mm256_set1_epi64x(0xffff_ffff)));
    let carried = _mm256_add_epi64(_mm256_srli_epi64::<32>(cross), _mm256_srli_epi64::<32>(other));
    let low = _mm256_blend_epi32::<0b1010_1010>(low, _mm256_slli_epi64::<32>(other));
    _mm256_xor_si256(_mm256_add_epi64(high, carried), low)
}

/// 32 bytes at any alignment.
///
/// # Safety
/// The bytes are readable.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn load(at: *const u8) -> __m256i {
    // SAFETY: the caller guarantees that the bytes are readable.
    unsafe { _mm256_loadu_si256(at.cast()) }
}
