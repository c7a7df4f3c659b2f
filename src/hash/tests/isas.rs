//! Every implementation that this processor can run, against another implementation of XXH3.

use super::super::blocks::Blocks;
use super::super::isa::Isa;
use super::super::keys::Keys;
use super::*;
use rand::{Rng, RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// Beyond the first scrambling of the accumulators.
const WINDOW_BYTES_MAX: usize = 1100;
/// Four of the longest iterations of the widest implementation, and some more.
const BLOCKS_MAX: usize = 44;
const ALIGNMENTS: usize = 64;

fn noise(bytes: usize, chance: &mut Xoshiro256PlusPlus) -> Vec<u8> {
    let mut noise = vec![0; bytes];
    chance.fill_bytes(&mut noise);
    noise
}

fn reference(blocks: Blocks<'_>, seed: u64) -> Vec<LocalHash> {
    (0..blocks.count()).map(|block| LocalHash(xxh3_64_with_seed(blocks.at(block), seed))).collect()
}

#[track_caller]
fn assert_every_isa(blocks: Blocks<'_>, seed: u64, keys: &Keys) {
    let expected = reference(blocks, seed);
    for isa in Isa::all() {
        let mut out = vec![LocalHash(0); blocks.count()];
        isa.hash_blocks(blocks, keys, &mut out);
        assert_eq!(out, expected, "{isa:?}, {} blocks of {} bytes", blocks.count(), blocks.window());
    }
}

#[test]
fn every_length_and_every_alignment() {
    // One more than the widest implementation's longest iteration.
    const BLOCKS: usize = 11;
    let mut chance = Xoshiro256PlusPlus::seed_from_u64(1);
    let bytes = noise(ALIGNMENTS + BLOCKS * WINDOW_BYTES_MAX, &mut chance);
    for window in 1..=WINDOW_BYTES_MAX {
        let seed = if window % 5 == 0 { 0 } else { chance.random() };
        let keys = Keys::new(seed);
        // Of the longer ones every fourth, each another: a load that asked for alignment would fail as well.
        for shift in (0..ALIGNMENTS).filter(|shift| window <= 300 || (window + shift) % 4 == 0) {
            assert_every_isa(Blocks::side_by_side(&bytes[shift..shift + BLOCKS * window], window), seed, &keys);
        }
    }
}

#[test]
fn every_number_of_blocks() {
    let mut chance = Xoshiro256PlusPlus::seed_from_u64(2);
    let bytes = noise(BLOCKS_MAX * WINDOW_BYTES_MAX, &mut chance);
    // Two lengths or more of each kind, and those between kinds.
    for window in
        [1, 4, 16, 17, 32, 33, 36, 63, 64, 65, 68, 96, 97, 128, 129, 132, 192, 240, 241, 256, 260, 1024, 1025, 1100]
    {
        for count in 0..=BLOCKS_MAX {
            let seed = chance.random();
            assert_every_isa(Blocks::side_by_side(&bytes[..count * window], window), seed, &Keys::new(seed));
        }
    }
}

#[test]
fn nothing_is_as_long_as_nothing() {
    for seed in [0, 1, SEED_BASE, u64::MAX] {
        assert_eq!(scalar::hash(&[], &Keys::new(seed)), xxh3_64_with_seed(&[], seed));
    }
}

#[test]
fn bytes_of_any_length_hash_as_the_library_hashes_them() {
    let mut chance = Xoshiro256PlusPlus::seed_from_u64(6);
    let bytes = noise(70_000, &mut chance);
    for len in (0..2_100).chain(69_900..=70_000) {
        assert_eq!(of_bytes(&bytes[70_000 - len..]), xxh3_64(&bytes[70_000 - len..]), "{len} bytes");
    }
}

#[test]
fn bigram_blocks_overlap_by_a_token() {
    let mut chance = Xoshiro256PlusPlus::seed_from_u64(3);
    let bytes = noise(4 * 8192, &mut chance);
    for block_size in 1..=256 {
        for window in [Window::Plain, Window::Bigram] {
            let blocks =
                Blocks::of_tokens(Scheme { block_size, window }, &bytes[..chance.random_range(0..bytes.len())]);
            let seed = chance.random();
            assert_every_isa(blocks, seed, &Keys::new(seed));
        }
    }
}

#[test]
fn words_at_their_limits_carry_as_they_should() {
    // Products of words that are all zeros or all ones, under keys that are known: every carry there is.
    let mut chance = Xoshiro256PlusPlus::seed_from_u64(4);
    let seed = chance.random();
    let keys = Keys::new(seed);
    for window in [64, 68, 128, 132, 256] {
        for _ in 0..500 {
            let mut bytes = noise(16 * window, &mut chance);
            for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
                let key = keys.word(at % 16 * 8);
                let extreme = [0, u64::MAX, 1, 1 << 63, (1 << 52) - 1, 1 << 52, u64::from(u32::MAX)];
                if let Some(wanted) = extreme.get(chance.random_range(0..12)) {
                    word.copy_from_slice(&(wanted ^ key).to_le_bytes());
                }
            }
            assert_every_isa(Blocks::side_by_side(&bytes, window), seed, &keys);
        }
    }
}

#[test]
#[should_panic(expected = "after their bytes")]
fn blocks_that_end_after_their_bytes_are_never_made() {
    let _ = Blocks::new(&[0; 128], 60, 68, 3);
}

#[test]
fn many_objects_in_one_block_and_in_neighbours() {
    let mut chance = Xoshiro256PlusPlus::seed_from_u64(5);
    let tokens: Vec<u32> = (0..1000).map(|_| chance.random()).collect();
    let stage_objects = crate::limits::HASH_STAGE_BYTES_MAX as u32 / 8;
    for per_block in [1, 2, 7, 100, stage_objects - 8, stage_objects - 7, stage_objects] {
        let mut media: Vec<(u32, u64)> = Vec::new();
        for block in [0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 20, 21, 62, 70] {
            media.extend((0..per_block).map(|_| (block, chance.random())));
        }
        media.push((12, 5)); // a run of equally many ends here
        for window in [Window::Plain, Window::Bigram] {
            let scheme = Scheme { block_size: 16, window };
            let mut out = Vec::new();
            local_hashes(scheme, Seed(9), token_bytes(&tokens), &media, &mut out);
            assert_eq!(out, by_formula(scheme, Seed(9), &tokens, &media), "{per_block} objects");
        }
    }
}
