//! Block hashes of tokens: pure, and bit for bit what other routers of this kind compute.
//!
//! A block's **local hash** is XXH3-64 over its tokens as little-endian u32 and, sorted, the hashes of the
//! multimodal objects it touches (little-endian u64), under the [`seed`] of its LoRA adapter and cache salt. The
//! position of a block does not enter it. A **sequence hash** chains local hashes:
//! `s[0] = l[0]`, `s[i] = xxh3(s[i-1] || l[i])` under the plain seed 1337.
//!
//! Several blocks of a prompt are hashed side by side. `scalar` is the reference implementation of XXH3; `avx2`,
//! `avx512` and, on aarch64, `neon` compute the same with vectors. `isa` picks the implementation.
//!
//! XXH3 is public and not keyed: a caller that chooses prompts can make two blocks collide.

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "vector loads take raw pointers")]
mod avx2;
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "vector loads take raw pointers")]
mod avx512;
mod blocks;
mod isa;
mod keys;
mod media;
#[cfg(all(target_arch = "aarch64", not(miri)))]
#[expect(unsafe_code, reason = "vector loads take raw pointers")]
mod neon;
#[cfg_attr(
    all(target_arch = "x86_64", not(miri)),
    expect(unsafe_code, reason = "an empty instruction keeps words out of vectors")
)]
mod scalar;
#[cfg(feature = "daemon")]
#[cfg_attr(
    all(target_arch = "x86_64", not(miri), not(kvrouted_loom)),
    expect(unsafe_code, reason = "instructions in place of atomic accesses")
)]
pub(crate) mod words;

pub use media::placeholder_token;

use self::blocks::Blocks;
use self::isa::Isa;
use self::keys::{Keys, PLAIN_KEYS};
use crate::ids::{LocalHash, Scheme, Seed, SequenceHash, Window};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

#[cfg(target_endian = "big")]
compile_error!("tokens and hashes are viewed in place as little-endian bytes");

/// The seed of a chain with neither LoRA nor salt, and of every sequence hash.
pub const SEED_BASE: u64 = 1337;
/// Bytes of one token id.
pub const TOKEN_BYTES: usize = 4;

/// The seed of chains under this LoRA adapter and cache salt. An empty name means the same as none.
#[must_use]
pub fn seed(lora: Option<&str>, salt: Option<&str>) -> Seed {
    let mut seed = SEED_BASE;
    if let Some(name) = lora.filter(|name| !name.is_empty()) {
        seed = seed.wrapping_add(xxh3_64_with_seed(name.as_bytes(), 0));
    }
    if let Some(salt) = salt.filter(|salt| !salt.is_empty()) {
        seed = seed.wrapping_add(xxh3_64_with_seed(salt.as_bytes(), 1));
    }
    Seed(seed)
}

/// XXH3-64 of any bytes, under seed 0.
#[must_use]
pub fn of_bytes(bytes: &[u8]) -> u64 {
    if bytes.len() <= scalar::MIDDLE_BYTES_MAX {
        return xxh3_64(bytes);
    }
    // The library's code for longer input uses vectors only if the whole program is compiled for them.
    let mut hash = [LocalHash(0)];
    Isa::best().hash_blocks(Blocks::new(bytes, bytes.len(), bytes.len(), 1), &PLAIN_KEYS, &mut hash);
    hash[0].0
}

/// How many whole blocks `token_count` tokens make. A bigram block needs the token after its last.
///
/// A block size of 0 makes none.
#[must_use]
pub fn block_count(token_count: usize, scheme: Scheme) -> usize {
    let overlap = match scheme.window {
        Window::Plain => 0,
        Window::Bigram => 1,
    };
    token_count.saturating_sub(overlap).checked_div(scheme.block_size as usize).unwrap_or(0)
}

/// Token ids as the bytes that [`local_hashes`] reads, without copying.
#[must_use]
pub fn token_bytes(tokens: &[u32]) -> &[u8] {
    bytemuck::cast_slice(tokens)
}

/// Clears `out` and fills it with the local hash of every whole block.
///
/// `tokens_le` are little-endian u32 token ids at any alignment; what does not fill a block is ignored. `media` are
/// (block index, object hash) in any order; those of blocks that are not whole are ignored. Allocates nothing once
/// `out` is large enough: unsorted `media` are sorted, and blocks with media copied, in buffers that the thread keeps.
pub fn local_hashes(scheme: Scheme, seed: Seed, tokens_le: &[u8], media: &[(u32, u64)], out: &mut Vec<LocalHash>) {
    let blocks = Blocks::of_tokens(scheme, tokens_le);
    // Existing elements are overwritten, not cleared first: that would cost time for nothing.
    out.resize(blocks.count(), LocalHash(0));
    if !media.is_empty() {
        media::with_sorted(media, |sorted| media::local_hashes(blocks, seed, sorted, out));
    } else if blocks.count() < side_by_side_min(blocks.window()) {
        let hash_of = |block| LocalHash(xxh3_64_with_seed(blocks.at(block), seed.0));
        out.iter_mut().enumerate().for_each(|(block, to)| *to = hash_of(block));
    } else {
        Isa::best().hash_blocks(blocks, &Keys::new(seed.0), out);
    }
}

/// The least number of blocks, of `window` bytes each, for which hashing side by side is faster than one by one. The
/// test module `timing` measures it.
const fn side_by_side_min(window: usize) -> usize {
    match window {
        0..=16 => usize::MAX,
        17..=32 => 24,
        33..=64 => 10,
        65..=scalar::SHORT_BYTES_MAX => 16,
        129..=scalar::MIDDLE_BYTES_MAX => 4,
        _ => 2,
    }
}

/// Clears `out` and fills it with local hashes given as little-endian u64 at any alignment; trailing bytes that do not
/// fill a hash are ignored. Allocates nothing once `out` is large enough.
#[expect(unsafe_code, reason = "newtypes over u64 are written as bytes")]
pub fn given_hashes(hashes_le: &[u8], out: &mut Vec<LocalHash>) {
    let count = hashes_le.len() / size_of::<LocalHash>();
    // Existing elements are overwritten, not cleared first: that would cost time for nothing.
    out.resize(count, LocalHash(0));
    let whole = &hashes_le[..count * size_of::<LocalHash>()];
    // SAFETY: `LocalHash` is a transparent newtype of `u64`, so `count` of them are `whole.len()` bytes, and any bytes
    // are valid values. They are borrowed from `out` alone.
    let bytes = unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<u8>(), whole.len()) };
    bytes.copy_from_slice(whole);
}

/// Local hashes that were given as little-endian u64, without a copy. `None` if they are not aligned, if bytes are left
/// over, or on a big-endian processor; then [`given_hashes`] copies them.
#[must_use]
#[expect(unsafe_code, reason = "bytes are read as a newtype over u64")]
pub fn given_in_place(hashes_le: &[u8]) -> Option<&[LocalHash]> {
    // SAFETY: `LocalHash` is a transparent newtype of `u64`, of which any bytes are valid values.
    let (before, hashes, after) = unsafe { hashes_le.align_to::<LocalHash>() };
    (cfg!(target_endian = "little") && before.is_empty() && after.is_empty()).then_some(hashes)
}

/// Clears `out` and fills it with the sequence hashes of `locals`. Each needs the one before it, so they are computed
/// one after the other.
pub fn sequence_hashes(locals: &[LocalHash], out: &mut Vec<SequenceHash>) {
    out.clear();
    let mut previous = None;
    out.extend(locals.iter().map(|local| {
        let hash = previous.map_or(SequenceHash(local.0), |before| chain(before, *local));
        previous = Some(hash);
        hash
    }));
}

/// The sequence hash of a block, from that of the block before it and its own local hash.
#[must_use]
pub fn chain(previous: SequenceHash, local: LocalHash) -> SequenceHash {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&previous.0.to_le_bytes());
    bytes[8..].copy_from_slice(&local.0.to_le_bytes());
    SequenceHash(xxh3_64_with_seed(&bytes, SEED_BASE))
}

#[cfg(test)]
mod tests;
