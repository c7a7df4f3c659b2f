//! The published vectors of the scheme, and what the scalar code must hold for any input.

use super::*;
use proptest::prelude::*;

mod isas;
mod timing;

const PLAIN_16: Scheme = Scheme { block_size: 16, window: Window::Plain };

struct Vector {
    name: &'static str,
    tokens: Vec<u32>,
    scheme: Scheme,
    lora: Option<&'static str>,
    salt: Option<&'static str>,
    media: &'static [(u32, u64)],
    locals: &'static [u64],
    sequence: &'static [u64],
}

impl Vector {
    fn plain(name: &'static str, tokens: impl IntoIterator<Item = u32>, block_size: u32) -> Self {
        Self {
            name,
            tokens: tokens.into_iter().collect(),
            scheme: Scheme { block_size, window: Window::Plain },
            lora: None,
            salt: None,
            media: &[],
            locals: &[],
            sequence: &[],
        }
    }
}

fn sixteens(name: &'static str) -> Vector {
    Vector::plain(name, 1..=40, 16)
}

const A_LOCALS: &[u64] = &[0xea06_fc71_a5ee_6e88, 0x1fbf_39bd_106b_e0b5];
const A_SEQUENCE: &[u64] = &[0xea06_fc71_a5ee_6e88, 0xad01_835a_37dd_294c];

fn vectors() -> Vec<Vector> {
    let spread = |i: u64| ((i * 2_654_435_761) % (1 << 32)) as u32 % 128_256;
    vec![
        Vector { locals: A_LOCALS, sequence: A_SEQUENCE, ..sixteens("A") },
        Vector {
            locals: &[0x58cd_e804_6940_7a3a, 0x79c4_4f5d_c971_b6fb],
            sequence: &[0x58cd_e804_6940_7a3a, 0x4a70_8f5d_985d_5e31],
            ..Vector::plain("B", 1..=70, 32)
        },
        Vector {
            locals: &[0xf617_bf3b_93a1_d900, 0xeb9d_ec89_f9d9_51f4],
            sequence: &[0xf617_bf3b_93a1_d900, 0x0e93_4255_bc70_c31f],
            ..Vector::plain("C", 1..=130, 64)
        },
        Vector {
            lora: Some("my-lora"),
            locals: &[0x3990_f1b1_4309_d7e6, 0x27c8_09c2_2da9_1b94],
            sequence: &[0x3990_f1b1_4309_d7e6, 0x6cf1_d862_9426_4b7a],
            ..sixteens("D")
        },
        Vector {
            salt: Some("tenant-a"),
            locals: &[0x7174_2dfe_d906_82a9, 0xb7db_648a_a3df_b040],
            sequence: &[0x7174_2dfe_d906_82a9, 0x10a5_5acc_1223_17d5],
            ..sixteens("E")
        },
        Vector {
            lora: Some("my-lora"),
            salt: Some("tenant-a"),
            locals: &[0x12ed_440c_ccc3_8cf3, 0x9db0_a52c_bd13_0133],
            sequence: &[0x12ed_440c_ccc3_8cf3, 0x5a00_6d57_53bf_da88],
            ..sixteens("F")
        },
        Vector { lora: Some(""), salt: Some(""), locals: A_LOCALS, sequence: A_SEQUENCE, ..sixteens("G") },
        Vector {
            media: &[(1, 0xdead_beef), (1, 7)],
            locals: &[0xea06_fc71_a5ee_6e88, 0x17f6_10fa_8ae6_b163],
            sequence: &[0xea06_fc71_a5ee_6e88, 0xf5c9_2129_edcc_7eb7],
            ..sixteens("H")
        },
        Vector {
            scheme: Scheme { block_size: 16, window: Window::Bigram },
            locals: &[0x5db5_a990_3451_d2d0, 0xc98d_53f2_ae88_291e],
            sequence: &[0x5db5_a990_3451_d2d0, 0x7f65_2463_affb_3fee],
            ..sixteens("I")
        },
        Vector {
            locals: &[0x4ca6_4906_6139_5090; 4],
            sequence: &[0x4ca6_4906_6139_5090, 0x2b0f_a085_7b24_3841, 0xa6c0_f42d_fcb6_fc20, 0xbb3b_a69f_036c_7f48],
            ..Vector::plain("J", [0; 64], 16)
        },
        Vector {
            locals: &[0x985a_f283_7b35_05ff],
            sequence: &[0x985a_f283_7b35_05ff],
            ..Vector::plain("K", [u32::MAX; 32], 32)
        },
        Vector {
            locals: &[0xd3eb_2937_fc7f_f84b],
            sequence: &[0xd3eb_2937_fc7f_f84b],
            ..Vector::plain("L", (0..64).map(spread), 64)
        },
    ]
}

fn locals_of(vector: &Vector, media: &[(u32, u64)]) -> Vec<u64> {
    let mut out = vec![LocalHash(1)];
    let seed = seed(vector.lora, vector.salt);
    local_hashes(vector.scheme, seed, token_bytes(&vector.tokens), media, &mut out);
    out.into_iter().map(|hash| hash.0).collect()
}

#[test]
fn every_vector_matches() {
    for vector in vectors() {
        let locals = locals_of(&vector, vector.media);
        assert_eq!(locals, vector.locals, "local hashes of {}", vector.name);
        assert_eq!(locals.len(), block_count(vector.tokens.len(), vector.scheme), "blocks of {}", vector.name);
        let locals: Vec<_> = locals.into_iter().map(LocalHash).collect();
        let mut sequence = vec![SequenceHash(1)];
        sequence_hashes(&locals, &mut sequence);
        let sequence: Vec<_> = sequence.into_iter().map(|hash| hash.0).collect();
        assert_eq!(sequence, vector.sequence, "sequence hashes of {}", vector.name);
    }
}

#[test]
fn primitives_match() {
    assert_eq!(xxh3_64_with_seed(b"", SEED_BASE), 0xd1f3_e774_4443_0ab9);
    assert_eq!(xxh3_64_with_seed(b"abc", SEED_BASE), 0x3f37_20f1_74d2_52b0);
    assert_eq!(chain(SequenceHash(1), LocalHash(2)), SequenceHash(0xe853_d985_bbde_7cf0));
    assert_eq!(placeholder_token(0xdead_beef), 515_703_087);
    assert_eq!(placeholder_token(7), 1_000_007);
    assert_eq!(placeholder_token(u64::MAX), 1_000_000 + (1 << 30) - 1);
}

#[test]
fn only_whole_blocks_count() {
    let bigram = Scheme { block_size: 16, window: Window::Bigram };
    for (tokens, plain, pairs) in [(0, 0, 0), (15, 0, 0), (16, 1, 0), (17, 1, 1), (32, 2, 1), (33, 2, 2)] {
        assert_eq!(block_count(tokens, PLAIN_16), plain);
        assert_eq!(block_count(tokens, bigram), pairs);
    }
    assert_eq!(block_count(100, Scheme { block_size: 0, window: Window::Plain }), 0);
    assert_eq!(block_count(usize::MAX, Scheme { block_size: u32::MAX, window: Window::Bigram }), 1 << 32);
}

#[test]
fn a_byte_range_at_any_alignment_hashes_the_same() {
    let vector = sixteens("A");
    for shift in 0..8 {
        let mut bytes = vec![0xff; shift];
        bytes.extend_from_slice(token_bytes(&vector.tokens));
        bytes.push(0xff); // less than a token: ignored
        let mut out = Vec::new();
        local_hashes(PLAIN_16, seed(None, None), &bytes[shift..], &[], &mut out);
        assert_eq!(out.iter().map(|hash| hash.0).collect::<Vec<_>>(), A_LOCALS);
    }
}

#[test]
fn given_hashes_are_taken_at_any_alignment() {
    let hashes = [u64::MAX, 0, 0x0123_4567_89ab_cdef].map(LocalHash);
    let mut out = vec![LocalHash(7); 5];
    for shift in 0..8 {
        let mut bytes = vec![0xff; shift];
        hashes.iter().for_each(|hash| bytes.extend_from_slice(&hash.0.to_le_bytes()));
        bytes.extend_from_slice(&[1; 7]); // less than a hash: ignored
        given_hashes(&bytes[shift..], &mut out);
        assert_eq!(out, hashes);
    }
    given_hashes(&[], &mut out);
    assert_eq!(out, []);
}

#[test]
fn a_warm_buffer_is_not_reallocated() {
    let tokens: Vec<u32> = (0..4096).collect();
    let mut out = Vec::new();
    local_hashes(PLAIN_16, Seed(1), token_bytes(&tokens), &[], &mut out);
    let (buffer, capacity) = (out.as_ptr(), out.capacity());
    local_hashes(PLAIN_16, Seed(2), token_bytes(&tokens), &[(3, 1), (0, 9)], &mut out);
    assert_eq!((out.as_ptr(), out.capacity(), out.len()), (buffer, capacity, 256));
}

/// The formula written out with copies: what the streaming and in-place code must equal.
fn by_formula(scheme: Scheme, seed: Seed, tokens: &[u32], media: &[(u32, u64)]) -> Vec<LocalHash> {
    let size = scheme.block_size as usize;
    let window = size + usize::from(scheme.window == Window::Bigram);
    let hash_of = |block: usize| {
        let mut bytes: Vec<u8> =
            tokens[block * size..block * size + window].iter().flat_map(|token| token.to_le_bytes()).collect();
        let mut objects: Vec<u64> =
            media.iter().filter(|(at, _)| *at as usize == block).map(|(_, hash)| *hash).collect();
        objects.sort_unstable();
        bytes.extend(objects.iter().flat_map(|hash| hash.to_le_bytes()));
        LocalHash(xxh3_64_with_seed(&bytes, seed.0))
    };
    (0..block_count(tokens.len(), scheme)).map(hash_of).collect()
}

proptest! {
    #[test]
    fn media_in_any_order_hash_as_the_formula_says(
        tokens in proptest::collection::vec(any::<u32>(), 0..400),
        media in proptest::collection::vec((0u32..12, any::<u64>()), 0..80),
        block_size in 1u32..130,
        bigram: bool,
        seed: u64,
    ) {
        let scheme = Scheme { block_size, window: if bigram { Window::Bigram } else { Window::Plain } };
        let mut out = Vec::new();
        local_hashes(scheme, Seed(seed), token_bytes(&tokens), &media, &mut out);
        prop_assert_eq!(&out, &by_formula(scheme, Seed(seed), &tokens, &media));
        let mut backwards = media.clone();
        backwards.reverse();
        let mut again = Vec::new();
        local_hashes(scheme, Seed(seed), token_bytes(&tokens), &backwards, &mut again);
        prop_assert_eq!(out, again);
    }
}
