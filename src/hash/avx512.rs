//! XXH3-64 of eight blocks side by side, with AVX-512.
//!
//! Up to 240 bytes, XXH3 multiplies pairs of words to 128 bits, which no vector instruction does. The lower half is a
//! 64-bit vector product; the upper half is put together from 52-bit products. Two blocks share a register, one in the
//! even elements and one in the odd ones, so that one round of products serves both. Above 240 bytes a block has a
//! register of accumulators to itself, and only its end is multiplied beside others.
//!
//! The time of eight blocks of 64 bytes is bounded by the number of vector instructions: 84, of which 29 are products.
//! A processor that executes them in halves, such as Zen 4, completes two per cycle. Meanwhile two more blocks go
//! through the scalar multiplier.
//!
//! Tried and rejected: four 32-bit products for each of 64 bits (slower by a seventh to a fifth); one, three or four
//! scalar blocks beside each eight (slower by a tenth). Counted and rejected: five 52-bit products, with the lower half
//! as a correction, take two instructions more in all.

use super::blocks::Blocks;
use super::keys::Keys;
use super::scalar::{
    self, ACCUMULATORS, LAST_KEY_AT, MERGE_KEY_AT, MIDDLE_BYTES_MAX, PRIME_AVALANCHE, PRIME_SCRAMBLE, ROUND_STRIPES,
    SCRAMBLE_KEY_AT, SHORT_BYTES_MAX, STRIPE_BYTES, STRIPE_SECRET_BYTES,
};
use crate::ids::LocalHash;
use std::arch::x86_64::{
    __m512i, __mmask8, _mm256_loadu_si256, _mm512_add_epi64, _mm512_castsi256_si512, _mm512_inserti64x4,
    _mm512_loadu_si512, _mm512_madd52hi_epu64, _mm512_madd52lo_epu64, _mm512_maskz_xor_epi64, _mm512_mul_epu32,
    _mm512_mullo_epi64, _mm512_set1_epi64, _mm512_setzero_si512, _mm512_shuffle_epi32, _mm512_shuffle_i64x2,
    _mm512_slli_epi64, _mm512_srli_epi64, _mm512_storeu_si512, _mm512_unpackhi_epi64, _mm512_unpacklo_epi64,
    _mm512_xor_si512,
};

/// Blocks of one iteration: a hash for each element of a register.
const EIGHT: usize = 8;
/// Bytes of a register.
const LINE: usize = 64;
/// From this many left-over blocks on, the last eight blocks are hashed once more, instead of the left-over ones one by
/// one.
const REST_MIN: usize = 4;

/// How the bytes of a block are loaded into registers.
const ONE_LINE: u8 = 0;
const TWO_ENDS: u8 = 1;
const TWO_LINES: u8 = 2;
const STRIPES: u8 = 3;

/// As the scalar reference.
#[target_feature(enable = "avx512f,avx512dq,avx512ifma,avx2,bmi2")]
pub(super) fn hash_blocks(blocks: Blocks<'_>, keys: &Keys, out: &mut [LocalHash]) {
    assert_eq!(blocks.count(), out.len(), "a hash for each block");
    match blocks.window() {
        0..=32 => scalar::hash_each(blocks, keys, out),
        33..LINE => hash_by_eights::<TWO_ENDS, 0>(blocks, 0, keys, out),
        LINE => {
            let at = blocks.lines().map_or(0, |lines| tens(lines, keys, out));
            hash_by_eights::<ONE_LINE, LINE>(blocks, at, keys, out);
        }
        128 => hash_by_eights::<TWO_LINES, 128>(blocks, 0, keys, out),
        65..=MIDDLE_BYTES_MAX => hash_by_eights::<TWO_LINES, 0>(blocks, 0, keys, out),
        256 => hash_by_eights::<STRIPES, 256>(blocks, 0, keys, out),
        260 => hash_by_eights::<STRIPES, 260>(blocks, 0, keys, out),
        _ => hash_by_eights::<STRIPES, 0>(blocks, 0, keys, out),
    }
}

/// Hashes blocks of the most common length in tens: eight side by side, and meanwhile two by the scalar multiplier.
/// Answers with the number of blocks hashed.
#[target_feature(enable = "avx512f,avx512dq,avx512ifma,avx2,bmi2")]
fn tens(lines: &[[u8; LINE]], keys: &Keys, out: &mut [LocalHash]) -> usize {
    let layout = Layout::new(LINE, keys);
    let ((tens, _), (outs, _)) = (lines.as_chunks::<10>(), out.as_chunks_mut::<10>());
    for ([a, b, c, d, e, f, g, h, i, j], out) in tens.iter().zip(outs) {
        let starts = [a, b, c, d, e, f, g, h].map(|line| line.as_ptr());
        // SAFETY: each of them is 64 bytes.
        unsafe { eight::<ONE_LINE, LINE>(starts, LINE, &layout, keys, out) };
        out[8].0 = scalar::hash(i, keys);
        out[9].0 = scalar::hash(j, keys);
    }
    10 * tens.len()
}

/// Hashes all blocks from `at` on, eight per iteration. `WINDOW` is 0 if it is not known at compile time.
#[target_feature(enable = "avx512f,avx512dq,avx512ifma,avx2,bmi2")]
fn hash_by_eights<const SHAPE: u8, const WINDOW: usize>(
    blocks: Blocks<'_>,
    mut at: usize,
    keys: &Keys,
    out: &mut [LocalHash],
) {
    let count = blocks.count();
    if count >= EIGHT {
        let layout = Layout::new(known::<WINDOW>(blocks.window()), keys);
        while count - at >= REST_MIN {
            let from = at.min(count - EIGHT);
            let starts = std::array::from_fn(|block| blocks.start(from + block));
            let chunk = &mut out[from..from + EIGHT];
            // SAFETY: there are eight blocks from `from` on, of the window that chose the shape.
            unsafe { eight::<SHAPE, WINDOW>(starts, blocks.window(), &layout, keys, chunk) };
            if SHAPE == TWO_LINES && blocks.window() > SHORT_BYTES_MAX {
                for (block, to) in chunk.iter_mut().enumerate() {
                    to.0 = scalar::middle_rest(blocks.at(from + block), keys, to.0);
                }
            }
            at = from + EIGHT;
            // Beside eight blocks of two lines, a ninth keeps the scalar multiplier busy.
            if WINDOW == SHORT_BYTES_MAX && at < count {
                out[at].0 = scalar::hash(&blocks.at(at)[..WINDOW], keys);
                at += 1;
            }
        }
    }
    for (block, to) in out.iter_mut().enumerate().skip(at) {
        to.0 = if SHAPE == STRIPES {
            // SAFETY: the block is below the count, and longer than 240 bytes.
            unsafe { long::<WINDOW>(blocks, block, keys) }
        } else {
            scalar::hash(blocks.at(block), keys)
        };
    }
}

/// The length of a block; a constant unless `WINDOW` is 0.
#[inline(always)]
const fn known<const WINDOW: usize>(window: usize) -> usize {
    if WINDOW > 0 { WINDOW } else { window }
}

/// The keys for each 16 bytes of a block of up to 240 bytes, and the offsets of those bytes.
struct Layout {
    front: __m512i,
    back: __m512i,
    front_mask: __mmask8,
    back_mask: __mmask8,
    /// The offset of the back part.
    back_at: usize,
}

impl Layout {
    #[target_feature(enable = "avx512f")]
    fn new(window: usize, keys: &Keys) -> Self {
        let line = |pieces: [usize; 4]| {
            let mut bytes = [0; LINE];
            for (to, at) in bytes.chunks_exact_mut(16).zip(pieces) {
                to.copy_from_slice(&keys.secret()[at..at + 16]);
            }
            bytes
        };
        let (front, back) = match window {
            0..=LINE => ([0, 32, 48, 16], [0; 4]),
            65..=SHORT_BYTES_MAX => ([0, 32, 64, 96], [112, 80, 48, 16]),
            _ => ([0, 16, 32, 48], [64, 80, 96, 112]),
        };
        // Up to 96 bytes, the fourth piece from either end does not count: its product is with 0.
        let (front_mask, back_mask) =
            if (65..=96).contains(&window) { (0b0011_1111, 0b1111_1100) } else { (0xff, 0xff) };
        let back_at = match window {
            0..=LINE => 0,
            65..=SHORT_BYTES_MAX => window - LINE,
            _ => LINE,
        };
        // SAFETY: both arrays are 64 bytes.
        let (front, back) = unsafe { (load(line(front).as_ptr()), load(line(back).as_ptr())) };
        Self { front, back, front_mask, back_mask, back_at }
    }
}

/// Hashes eight blocks; of 129 to 240 bytes, the first 128.
///
/// # Safety
/// At each of `starts`, `window` bytes are readable, of the shape: 64, 33 to 63, 65 to 240, or above 240 bytes.
#[target_feature(enable = "avx512f,avx512dq,avx512ifma,avx2,bmi2")]
#[inline]
unsafe fn eight<const SHAPE: u8, const WINDOW: usize>(
    starts: [*const u8; EIGHT],
    window: usize,
    layout: &Layout,
    keys: &Keys,
    out: &mut [LocalHash],
) {
    let window = known::<WINDOW>(window);
    let [a, b, c, d, e, f, g, h] = starts;
    // SAFETY: the caller guarantees the blocks and their shape.
    let sums = unsafe {
        in_block_order([
            two::<SHAPE, WINDOW>(a, b, window, layout, keys),
            two::<SHAPE, WINDOW>(c, d, window, layout, keys),
            two::<SHAPE, WINDOW>(e, f, window, layout, keys),
            two::<SHAPE, WINDOW>(g, h, window, layout, keys),
        ])
    };
    let of_length = _mm512_set1_epi64(scalar::of_length(window).cast_signed());
    let hashes = avalanche(_mm512_add_epi64(sums, of_length));
    let out = &mut out[..EIGHT];
    // SAFETY: eight hashes, each a u64, are 64 bytes.
    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), hashes) };
}

/// The products of two blocks: the first block's are in the even elements.
///
/// # Safety
/// As for [`eight`], of two blocks.
#[target_feature(enable = "avx512f,avx512dq,avx512ifma,avx2,bmi2")]
#[inline]
unsafe fn two<const SHAPE: u8, const WINDOW: usize>(
    left: *const u8,
    right: *const u8,
    window: usize,
    layout: &Layout,
    keys: &Keys,
) -> __m512i {
    let window = known::<WINDOW>(window);
    let Layout { front, back, front_mask, back_mask, back_at } = *layout;
    // SAFETY: `left` and `right` begin `window` readable bytes, of which the shape takes: all 64; the first and the
    // last 32; the first 64 and 64 more from `back_at`, which is at most `window` - 64; or more than 240.
    unsafe {
        match SHAPE {
            ONE_LINE => products(_mm512_xor_si512(front, load(left)), _mm512_xor_si512(front, load(right))),
            TWO_ENDS => {
                let (left, right) = (load_ends(left, window), load_ends(right, window));
                products(_mm512_xor_si512(front, left), _mm512_xor_si512(front, right))
            }
            TWO_LINES => {
                let whole = WINDOW > 96;
                let key = |mask, key, line| {
                    if whole { _mm512_xor_si512(key, line) } else { _mm512_maskz_xor_epi64(mask, key, line) }
                };
                let first = |block| key(front_mask, front, load(block));
                let second = |block: *const u8| key(back_mask, back, load(block.add(back_at)));
                _mm512_add_epi64(products(first(left), first(right)), products(second(left), second(right)))
            }
            _ => products(accumulated(left, window, keys), accumulated(right, window, keys)),
        }
    }
}

/// One block of more than 240 bytes.
///
/// # Safety
/// `block` is below the count, and the window above 240 bytes.
#[target_feature(enable = "avx512f,avx512dq,bmi2")]
#[inline]
unsafe fn long<const WINDOW: usize>(blocks: Blocks<'_>, block: usize, keys: &Keys) -> u64 {
    let mut sums = [0; 8];
    // SAFETY: the caller guarantees the block; eight words are 64 bytes.
    unsafe {
        let keyed = accumulated(blocks.start(block), known::<WINDOW>(blocks.window()), keys);
        _mm512_storeu_si512(sums.as_mut_ptr().cast(), keyed);
    }
    scalar::merge(&sums, blocks.window())
}

/// The accumulators of `window` bytes, combined with the keys of the end.
///
/// # Safety
/// `window` bytes, more than 240, are readable at `block`.
#[target_feature(enable = "avx512f,avx512dq")]
#[inline]
unsafe fn accumulated(block: *const u8, window: usize, keys: &Keys) -> __m512i {
    // SAFETY: the stripes before the last are (window - 1) / 64, the last one is the last 64 bytes; keys are 64 bytes
    // from 128 or less on, of 192.
    unsafe {
        let key = |at: usize| load(keys.secret().as_ptr().add(at));
        let mut sums = load(ACCUMULATORS.as_ptr().cast());
        // XXH3 also adds each stripe itself, with its words swapped in pairs. The swap is done once for the sum.
        let mut plain = _mm512_setzero_si512();
        let add = |sums: &mut __m512i, plain: &mut __m512i, at: usize, key_at: usize| {
            let stripe = load(block.add(at));
            let keyed = _mm512_xor_si512(stripe, key(key_at));
            *plain = _mm512_add_epi64(*plain, stripe);
            *sums = _mm512_add_epi64(*sums, _mm512_mul_epu32(keyed, _mm512_srli_epi64::<32>(keyed)));
        };
        let before_last = (window - 1) / STRIPE_BYTES;
        for stripe in 0..before_last {
            let in_round = stripe % ROUND_STRIPES;
            add(&mut sums, &mut plain, stripe * STRIPE_BYTES, in_round * STRIPE_SECRET_BYTES);
            if in_round == ROUND_STRIPES - 1 {
                sums = scrambled(_mm512_add_epi64(sums, swapped(plain)), key(SCRAMBLE_KEY_AT));
                plain = _mm512_setzero_si512();
            }
        }
        add(&mut sums, &mut plain, window - STRIPE_BYTES, LAST_KEY_AT);
        _mm512_xor_si512(_mm512_add_epi64(sums, swapped(plain)), key(MERGE_KEY_AT))
    }
}

/// Words swapped in pairs.
#[target_feature(enable = "avx512f")]
#[inline]
fn swapped(words: __m512i) -> __m512i {
    _mm512_shuffle_epi32::<0b01_00_11_10>(words)
}

/// Scrambles the accumulators between two rounds.
#[target_feature(enable = "avx512f,avx512dq")]
#[inline]
fn scrambled(sums: __m512i, key: __m512i) -> __m512i {
    let mixed = _mm512_xor_si512(_mm512_xor_si512(sums, _mm512_srli_epi64::<47>(sums)), key);
    _mm512_mullo_epi64(mixed, _mm512_set1_epi64(i64::from(PRIME_SCRAMBLE)))
}

/// The folded products of the pairs of words of two blocks, alternating.
#[target_feature(enable = "avx512f,avx512dq,avx512ifma")]
#[inline]
fn products(left: __m512i, right: __m512i) -> __m512i {
    fold(_mm512_unpacklo_epi64(left, right), _mm512_unpackhi_epi64(left, right))
}

/// The two halves of the products of words, combined by XOR.
///
/// With 52 bits below and 12 above, a product is `a + 2^52 b + 2^104 c`, where `a` has 52 bits, `b` is the sum of
/// three such and `c` of three that are small. Its upper half does not depend on `a`.
#[target_feature(enable = "avx512f,avx512dq,avx512ifma")]
#[inline]
fn fold(x: __m512i, y: __m512i) -> __m512i {
    let zero = _mm512_setzero_si512();
    let (x_top, y_top) = (_mm512_srli_epi64::<52>(x), _mm512_srli_epi64::<52>(y));
    let low = _mm512_mullo_epi64(x, y);
    let b = _mm512_madd52hi_epu64(zero, x, y);
    let c = _mm512_madd52lo_epu64(zero, x_top, y_top);
    let b = _mm512_madd52lo_epu64(b, x, y_top);
    let c = _mm512_madd52hi_epu64(c, x, y_top);
    let b = _mm512_madd52lo_epu64(b, x_top, y);
    let c = _mm512_madd52hi_epu64(c, x_top, y);
    let high = _mm512_add_epi64(_mm512_srli_epi64::<12>(b), _mm512_slli_epi64::<40>(c));
    _mm512_xor_si512(high, low)
}

/// The sums of the even elements and of the odd elements of each register, one after the other.
#[target_feature(enable = "avx512f")]
#[inline]
fn in_block_order([a, b, c, d]: [__m512i; 4]) -> __m512i {
    let halves = |x, y| _mm512_add_epi64(_mm512_shuffle_i64x2::<0x88>(x, y), _mm512_shuffle_i64x2::<0xdd>(x, y));
    halves(halves(a, b), halves(c, d))
}

/// The last step, of eight hashes.
#[target_feature(enable = "avx512f,avx512dq")]
#[inline]
fn avalanche(sums: __m512i) -> __m512i {
    let mixed = _mm512_xor_si512(sums, _mm512_srli_epi64::<37>(sums));
    let mixed = _mm512_mullo_epi64(mixed, _mm512_set1_epi64(PRIME_AVALANCHE.cast_signed()));
    _mm512_xor_si512(mixed, _mm512_srli_epi64::<32>(mixed))
}

/// 64 bytes at any alignment.
///
/// # Safety
/// The bytes are readable.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn load(at: *const u8) -> __m512i {
    // SAFETY: the caller guarantees the bytes.
    unsafe { _mm512_loadu_si512(at.cast()) }
}

/// The first and the last 32 of `window` bytes.
///
/// # Safety
/// The bytes are readable, and `window` is at least 32.
#[target_feature(enable = "avx512f,avx2")]
#[inline]
unsafe fn load_ends(at: *const u8, window: usize) -> __m512i {
    // SAFETY: the caller guarantees the bytes.
    let (first, last) = unsafe { (_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(window - 32).cast())) };
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), last)
}
