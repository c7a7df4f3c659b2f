//! XXH3-64, one block after the other: the reference that the vector implementations equal bit for bit. Processors
//! without those instructions run it. The words of the secret come from [`Keys`], so that a prompt pays for its seed
//! once.

use super::blocks::Blocks;
use super::keys::{Keys, half_word, word};
use crate::ids::LocalHash;

const PRIME32_1: u64 = 0x9e37_79b1;
const PRIME32_2: u64 = 0x85eb_ca77;
const PRIME32_3: u64 = 0xc2b2_ae3d;
const PRIME64_1: u64 = 0x9e37_79b1_85eb_ca87;
const PRIME64_2: u64 = 0xc2b2_ae3d_27d4_eb4f;
const PRIME64_3: u64 = 0x1656_67b1_9e37_79f9;
const PRIME64_4: u64 = 0x85eb_ca77_c2b2_ae63;
const PRIME64_5: u64 = 0x27d4_eb2f_1656_67c5;
/// The multiplier of the last step of most lengths.
pub(super) const PRIME_AVALANCHE: u64 = 0x1656_6791_9e37_79f9;
const PRIME_RRMXMX: u64 = 0x9fb2_1c65_1e98_df25;

/// The longest input of each group of lengths that XXH3 hashes alike.
pub(super) const SHORT_BYTES_MAX: usize = 128;
pub(super) const MIDDLE_BYTES_MAX: usize = 240;
/// Bytes of a stripe of the long lengths: one word for each accumulator.
pub(super) const STRIPE_BYTES: usize = 64;
/// The secret moves on by this for each stripe of a round.
pub(super) const STRIPE_SECRET_BYTES: usize = 8;
/// Stripes after which the accumulators are scrambled.
pub(super) const ROUND_STRIPES: usize = 16;
/// The offsets in the secret of the keys for scrambling, for the last stripe and for the end.
pub(super) const SCRAMBLE_KEY_AT: usize = 128;
pub(super) const LAST_KEY_AT: usize = 121;
pub(super) const MERGE_KEY_AT: usize = 11;
/// The multiplier of scrambling.
pub(super) const PRIME_SCRAMBLE: u32 = PRIME32_1 as u32;
/// The initial accumulators.
pub(super) const ACCUMULATORS: [u64; 8] =
    [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1];

/// Writes the hash of each block to `out`, which has one element for each block.
pub(super) fn hash_blocks(blocks: Blocks<'_>, keys: &Keys, out: &mut [LocalHash]) {
    hash_each(blocks, keys, out);
}

/// As [`hash_blocks`], inlined so that a vector implementation compiles it with its processor's instructions.
#[inline(always)]
pub(super) fn hash_each(blocks: Blocks<'_>, keys: &Keys, out: &mut [LocalHash]) {
    // The branches on the length are taken once for all blocks. For a length known at compile time there are none.
    match blocks.window() {
        0..=16 => each(blocks, out, |bytes| tiny(bytes, keys)),
        17..=32 => each(blocks, out, |bytes| both_ends::<16>(bytes, keys)),
        64 => each(blocks, out, |bytes| both_ends::<32>(&bytes[..64], keys)),
        33..=64 => each(blocks, out, |bytes| both_ends::<32>(bytes, keys)),
        65..=96 => each(blocks, out, |bytes| both_ends::<48>(bytes, keys)),
        128 => each(blocks, out, |bytes| both_ends::<64>(&bytes[..128], keys)),
        97..=SHORT_BYTES_MAX => each(blocks, out, |bytes| both_ends::<64>(bytes, keys)),
        256 => each(blocks, out, |bytes| long(&bytes[..256], keys)),
        _ => each(blocks, out, |bytes| hash(bytes, keys)),
    }
}

#[inline(always)]
fn each(blocks: Blocks<'_>, out: &mut [LocalHash], hash: impl Fn(&[u8]) -> u64) {
    for (block, to) in out.iter_mut().enumerate() {
        to.0 = hash(blocks.at(block));
    }
}

/// The hash of `bytes` under the seed of `keys`.
#[inline(always)]
pub(super) fn hash(bytes: &[u8], keys: &Keys) -> u64 {
    match bytes.len() {
        0..=16 => tiny(bytes, keys),
        17..=SHORT_BYTES_MAX => short(bytes, keys),
        129..=MIDDLE_BYTES_MAX => middle_rest(bytes, keys, middle_first(bytes, keys)),
        _ => long(bytes, keys),
    }
}

/// The term that the length adds to the sum of the parts.
#[inline(always)]
pub(super) fn of_length(bytes: usize) -> u64 {
    (bytes as u64).wrapping_mul(PRIME64_1)
}

/// The last step of all lengths above 8 bytes.
#[inline(always)]
pub(super) fn avalanche(mut value: u64) -> u64 {
    value ^= value >> 37;
    value = value.wrapping_mul(PRIME_AVALANCHE);
    value ^ value >> 32
}

/// The two halves of the 128-bit product of two words, combined by XOR.
#[inline(always)]
fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    product as u64 ^ (product >> 64) as u64
}

/// Keeps a word in a register of its own. Otherwise the compiler gathers words in vectors, which the next step, a
/// 64-bit multiplication, has to take apart again.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
fn apart(mut word: u64) -> u64 {
    // SAFETY: it is no instruction at all. The register is read and written unchanged.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) word, options(pure, nomem, nostack, preserves_flags));
    }
    word
}

/// On other targets the compiler decides.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
#[inline(always)]
fn apart(word: u64) -> u64 {
    word
}

/// 16 bytes of input under 16 bytes of the seed's secret.
#[inline(always)]
fn mix(bytes: &[u8], at: usize, keys: &Keys, key_at: usize) -> u64 {
    fold(apart(word(bytes, at) ^ keys.word(key_at)), apart(word(bytes, at + 8) ^ keys.word(key_at + 8)))
}

/// 16 bytes of input under the plain secret, moved by the seed.
#[inline(always)]
fn mix_plain(bytes: &[u8], at: usize, keys: &Keys, key_at: usize) -> u64 {
    let low = word(bytes, at) ^ Keys::plain(key_at).wrapping_add(keys.seed());
    fold(low, word(bytes, at + 8) ^ Keys::plain(key_at + 8).wrapping_sub(keys.seed()))
}

/// 0 to 16 bytes.
#[inline(always)]
fn tiny(bytes: &[u8], keys: &Keys) -> u64 {
    let (length, seed) = (bytes.len(), keys.seed());
    match length {
        0 => finish_tiny(seed ^ Keys::plain(56) ^ Keys::plain(64)),
        1..=3 => {
            let (first, middle, last) = (bytes[0], bytes[length >> 1], bytes[length - 1]);
            let all = u32::from_le_bytes([last, length as u8, first, middle]);
            let key = (Keys::plain(0) as u32 ^ (Keys::plain(0) >> 32) as u32) as u64;
            finish_tiny(u64::from(all) ^ key.wrapping_add(seed))
        }
        4..=8 => {
            let seed = seed ^ u64::from((seed as u32).swap_bytes()) << 32;
            let (first, last) = (half_word(bytes, 0), half_word(bytes, length - 4));
            let key = (Keys::plain(8) ^ Keys::plain(16)).wrapping_sub(seed);
            let mut value = (u64::from(last) | u64::from(first) << 32) ^ key;
            value ^= value.rotate_left(49) ^ value.rotate_left(24);
            value = value.wrapping_mul(PRIME_RRMXMX);
            value ^= (value >> 35).wrapping_add(length as u64);
            value = value.wrapping_mul(PRIME_RRMXMX);
            value ^ value >> 28
        }
        _ => {
            let low = word(bytes, 0) ^ (Keys::plain(24) ^ Keys::plain(32)).wrapping_add(seed);
            let high = word(bytes, length - 8) ^ (Keys::plain(40) ^ Keys::plain(48)).wrapping_sub(seed);
            let sum = (length as u64).wrapping_add(low.swap_bytes()).wrapping_add(high);
            avalanche(sum.wrapping_add(fold(low, high)))
        }
    }
}

/// The last step of the lengths up to 3 bytes.
#[inline(always)]
fn finish_tiny(mut value: u64) -> u64 {
    value ^= value >> 33;
    value = value.wrapping_mul(PRIME64_2);
    value ^= value >> 29;
    value = value.wrapping_mul(PRIME64_3);
    value ^ value >> 32
}

/// 17 to 128 bytes: pieces of 16 from both ends, which may overlap in the middle.
#[inline(always)]
fn short(bytes: &[u8], keys: &Keys) -> u64 {
    match bytes.len() {
        0..=32 => both_ends::<16>(bytes, keys),
        33..=64 => both_ends::<32>(bytes, keys),
        65..=96 => both_ends::<48>(bytes, keys),
        _ => both_ends::<64>(bytes, keys),
    }
}

/// The hash of at least `END` bytes, of which the first and the last `END` count. As arrays they need no bounds checks.
#[inline(always)]
fn both_ends<const END: usize>(bytes: &[u8], keys: &Keys) -> u64 {
    let (Some(front), Some(back)) = (bytes.first_chunk::<END>(), bytes.last_chunk::<END>()) else {
        unreachable!("{} bytes have no end of {END}", bytes.len());
    };
    let mut sum = of_length(bytes.len());
    for piece in 0..END / 16 {
        sum = sum.wrapping_add(mix(front, 16 * piece, keys, 32 * piece));
        sum = sum.wrapping_add(mix(back, END - 16 * (piece + 1), keys, 32 * piece + 16));
    }
    avalanche(sum)
}

/// The first 128 of 129 to 240 bytes.
#[inline(always)]
fn middle_first(bytes: &[u8], keys: &Keys) -> u64 {
    let bytes_in_all = bytes.len();
    let bytes = &bytes[..SHORT_BYTES_MAX];
    let add = |sum: u64, piece: usize| sum.wrapping_add(mix(bytes, 16 * piece, keys, 16 * piece));
    avalanche((0..8).fold(of_length(bytes_in_all), add))
}

/// The rest of 129 to 240 bytes, added to the sum of the first 128.
#[inline(always)]
pub(super) fn middle_rest(bytes: &[u8], keys: &Keys, first: u64) -> u64 {
    let add = |sum: u64, piece: usize| sum.wrapping_add(mix_plain(bytes, 16 * piece, keys, 16 * (piece - 8) + 3));
    let sum = (8..bytes.len() / 16).fold(first, add);
    avalanche(sum.wrapping_add(mix_plain(bytes, bytes.len() - 16, keys, 119)))
}

/// More than 240 bytes: stripes into eight accumulators.
#[inline(always)]
fn long(bytes: &[u8], keys: &Keys) -> u64 {
    let mut sums = ACCUMULATORS;
    // The last stripe is handled apart. A round is scrambled only if a stripe follows it.
    let before_last = (bytes.len() - 1) / STRIPE_BYTES;
    for stripe in 0..before_last {
        let key_at = stripe % ROUND_STRIPES * STRIPE_SECRET_BYTES;
        accumulate(&mut sums, &bytes[stripe * STRIPE_BYTES..][..STRIPE_BYTES], keys, key_at);
        if stripe % ROUND_STRIPES == ROUND_STRIPES - 1 {
            scramble(&mut sums, keys);
        }
    }
    accumulate(&mut sums, &bytes[bytes.len() - STRIPE_BYTES..], keys, LAST_KEY_AT);
    for (lane, sum) in sums.iter_mut().enumerate() {
        *sum ^= keys.word(MERGE_KEY_AT + 8 * lane);
    }
    merge(&sums, bytes.len())
}

/// Adds one stripe to the accumulators.
#[inline(always)]
fn accumulate(sums: &mut [u64; 8], stripe: &[u8], keys: &Keys, key_at: usize) {
    for lane in 0..8 {
        let value = word(stripe, 8 * lane);
        let keyed = value ^ keys.word(key_at + 8 * lane);
        sums[lane ^ 1] = sums[lane ^ 1].wrapping_add(value);
        sums[lane] = sums[lane].wrapping_add((keyed & 0xffff_ffff) * (keyed >> 32));
    }
}

/// Scrambles the accumulators between two rounds.
#[inline(always)]
fn scramble(sums: &mut [u64; 8], keys: &Keys) {
    for (lane, sum) in sums.iter_mut().enumerate() {
        *sum = (*sum ^ *sum >> 47 ^ keys.word(SCRAMBLE_KEY_AT + 8 * lane)).wrapping_mul(u64::from(PRIME_SCRAMBLE));
    }
}

/// The hash of `length` bytes, from the accumulators combined with their keys.
#[inline(always)]
pub(super) fn merge(keyed: &[u64; 8], length: usize) -> u64 {
    let add = |sum: u64, lane: usize| sum.wrapping_add(fold(keyed[lane], keyed[lane + 1]));
    avalanche([0, 2, 4, 6].into_iter().fold(of_length(length), add))
}
