//! Fingerprints of blocks in a row, so that a lookup that follows a long node need not read it.
//!
//! A **section** is [`SECTION_WORDS`] words of the arena, aligned to as many. Its **fingerprint** is a keyed hash of
//! them of 64 bits. A lookup hashes the query's blocks, which it has in its caches, and reads the fingerprints of the
//! node's whole sections: a line for each 256 blocks, where the blocks are 32 lines.
//!
//! # The hash
//!
//! Words `w` and keys `k` are elements of GF(2^64), reduced by x^64 + x^4 + x^3 + x + 1. The fingerprint is the sum over
//! all pairs of words of `(w[2i] + k[2i]) * (w[2i + 1] + k[2i + 1])`. For two sections that differ, the difference of
//! their fingerprints is a linear function of the keys, and not a constant one. So it is zero for one choice of keys in
//! 2^64, if the sections were chosen by a client that does not know the keys. (Lemire and Kaser, "Faster 64-bit
//! universal hashing using carry-less multiplications", 2016, have the same sum without the reduction.) That is so for
//! keys that are random. These follow from the shard's secret of 64 bits, by SplitMix64.
//!
//! Where fingerprints differ, the words are compared. So a wrong fingerprint could only cost time, unless it is that of
//! another section.
//!
//! [`Keys::new`] makes keys only on a processor that multiplies four pairs at once (AVX-512F with VPCLMULQDQ). Without
//! keys there are no fingerprints, and all words are compared. The scalar function is the specification.

#![cfg_attr(
    all(target_arch = "x86_64", not(miri)),
    expect(
        unsafe_code,
        reason = "vector functions are called on a processor that has them, and vector loads take pointers"
    )
)]

use super::simd::common_prefix;
use super::types::{LINE_BLOCKS, spread};
use crate::prefetch::prefetch;

/// Words of a section: four cache lines.
pub(super) const SECTION_WORDS: usize = 32;

/// A section's words.
pub(super) type Section = [u64; SECTION_WORDS];

/// The keys of a shard's fingerprints. They exist only on a processor that has the vector instructions.
pub(super) struct Keys(Section);

impl Keys {
    /// Keys that follow from a secret; `None` where the processor lacks the instructions.
    pub(super) fn new(secret: u64) -> Option<Self> {
        Self::are_used_here().then(|| Self::of_secret(secret))
    }

    #[cfg(all(target_arch = "x86_64", not(miri)))]
    fn are_used_here() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("pclmulqdq")
            && is_x86_feature_detected!("vpclmulqdq")
    }

    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    const fn are_used_here() -> bool {
        // Tests check the scalar functions with all that uses them.
        cfg!(any(test, miri))
    }

    fn of_secret(secret: u64) -> Self {
        let start = spread(secret ^ 0x3c6e_f372_fe94_f82b);
        Self(std::array::from_fn(|at| spread(start.wrapping_add((at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)))))
    }

    /// The fingerprint of a section.
    #[inline]
    pub(super) fn fingerprint(&self, section: &Section) -> u64 {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: there are keys, so the processor has the instructions.
        unsafe {
            vector::fingerprint(&self.0, section)
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        fingerprint_scalar(&self.0, section)
    }

    /// How many sections at the beginning of `sections` have these fingerprints.
    #[inline]
    fn matching(&self, sections: &[Section], fingerprints: &[u64]) -> usize {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: there are keys, so the processor has the instructions.
        unsafe {
            vector::matching(&self.0, sections, fingerprints)
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        matching_scalar(&self.0, sections, fingerprints)
    }
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys")
    }
}

/// Words in a row, with the fingerprints of the whole sections among them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fingerprinted<'a> {
    pub(super) keys: &'a Keys,
    pub(super) words: &'a [u64],
    /// Words before the first whole section.
    pub(super) head: usize,
    /// The fingerprints of the whole sections, in order.
    pub(super) fingerprints: &'a [u64],
}

impl Fingerprinted<'_> {
    /// Prefetches what [`common_prefix`](Self::common_prefix) reads of words that are all equal.
    #[inline]
    pub(super) fn prefetch(&self) {
        let tail = self.head + self.fingerprints.len() * SECTION_WORDS;
        prefetch_lines(&self.words[..self.head]);
        prefetch_lines(self.fingerprints);
        prefetch_lines(&self.words[tail..]);
    }

    /// The number of leading elements at which the words and `query` are equal. Calls `halfway` when half of the
    /// sections were.
    #[inline]
    pub(super) fn common_prefix(&self, query: &[u64], halfway: impl FnOnce()) -> usize {
        let Self { words, head, fingerprints, .. } = *self;
        let run = common_prefix(&words[..head], query);
        if run < head {
            return run;
        }
        let (sections, _) = query[head..].as_chunks();
        let half = fingerprints.len() / 2;
        let mut matching = self.keys.matching(sections, &fingerprints[..half]);
        if matching == half {
            halfway();
            matching += self.keys.matching(&sections[half..], &fingerprints[half..]);
        }
        let at = head + matching * SECTION_WORDS;
        at + common_prefix(&words[at..], &query[at..])
    }
}

/// Prefetches the lines of words.
#[inline]
fn prefetch_lines(words: &[u64]) {
    words.iter().step_by(LINE_BLOCKS).chain(words.last()).for_each(|word| prefetch(std::ptr::from_ref(word).cast()));
}

/// The specification of the fingerprint.
#[cfg(any(test, not(all(target_arch = "x86_64", not(miri)))))]
fn fingerprint_scalar(keys: &Section, section: &Section) -> u64 {
    let pairs = section.as_chunks().0.iter().zip(keys.as_chunks().0);
    let sum = pairs.fold(0, |sum, ([a, b], [k, l])| sum ^ carry_less_product(a ^ k, b ^ l));
    // The upper half times x^64, which is x^4 + x^3 + x + 1. That leaves at most four bits beyond 64.
    let once = sum as u64 as u128 ^ carry_less_product((sum >> 64) as u64, REDUCTION);
    once as u64 ^ carry_less_product((once >> 64) as u64, REDUCTION) as u64
}

#[cfg(any(test, not(all(target_arch = "x86_64", not(miri)))))]
fn carry_less_product(a: u64, b: u64) -> u128 {
    (0..u64::BITS).filter(|bit| b >> bit & 1 == 1).fold(0, |sum, bit| sum ^ u128::from(a) << bit)
}

#[cfg(any(test, not(all(target_arch = "x86_64", not(miri)))))]
fn matching_scalar(keys: &Section, sections: &[Section], fingerprints: &[u64]) -> usize {
    let pairs = sections.iter().zip(fingerprints);
    pairs.take_while(|(section, known)| fingerprint_scalar(keys, section) == **known).count()
}

/// x^64 modulo the polynomial of the field.
const REDUCTION: u64 = 0b1_1011;

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod vector {
    use super::{REDUCTION, Section};
    use std::arch::x86_64::{
        __m512i, _mm_cvtsi128_si64, _mm512_castsi512_si128, _mm512_clmulepi64_epi128, _mm512_cmpneq_epi64_mask,
        _mm512_loadu_epi64, _mm512_maskz_compress_epi64, _mm512_maskz_loadu_epi64, _mm512_set1_epi64,
        _mm512_setzero_si512, _mm512_shuffle_i64x2, _mm512_ternarylogic_epi64, _mm512_xor_si512,
    };

    /// Words of a register.
    const WIDE: usize = 8;
    /// Sections at once: a register has as many sums.
    const AT_ONCE: usize = 4;
    /// The lower halves of a register's sums.
    const LOWER: u8 = 0b0101_0101;
    /// Of [`_mm512_clmulepi64_epi128`]: the upper half of each 128 bits of the first, the lower of the second.
    const UPPER_BY_LOWER: i32 = 0x01;
    /// Of [`_mm512_ternarylogic_epi64`]: `a ^ b ^ c`.
    const XOR: i32 = 0x96;

    /// The words of a section or of its keys.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn load(section: &Section) -> [__m512i; 4] {
        let words = section.as_ptr();
        // SAFETY: a section is four registers' words.
        unsafe {
            [
                _mm512_loadu_epi64(words.cast()),
                _mm512_loadu_epi64(words.add(WIDE).cast()),
                _mm512_loadu_epi64(words.add(2 * WIDE).cast()),
                _mm512_loadu_epi64(words.add(3 * WIDE).cast()),
            ]
        }
    }

    /// Four sums, of which the sum is that of a section, each of 128 bits.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    #[inline]
    fn sums(keys: [__m512i; 4], section: &Section) -> __m512i {
        let words = load(section);
        let mut sums = _mm512_setzero_si512();
        for (words, keys) in words.into_iter().zip(keys) {
            let both = _mm512_xor_si512(words, keys);
            sums = _mm512_xor_si512(sums, _mm512_clmulepi64_epi128::<UPPER_BY_LOWER>(both, both));
        }
        sums
    }

    /// Each of four 128-bit sums as an element of the field, in its lower half.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    #[inline]
    fn reduced(sums: __m512i) -> __m512i {
        let by = _mm512_set1_epi64(REDUCTION.cast_signed());
        let once = _mm512_clmulepi64_epi128::<UPPER_BY_LOWER>(sums, by);
        let twice = _mm512_clmulepi64_epi128::<UPPER_BY_LOWER>(once, by);
        _mm512_ternarylogic_epi64::<XOR>(sums, once, twice)
    }

    /// The first and second 128 bits of each register added, and the third and fourth: those of `a`, then those of `b`.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn folded(a: __m512i, b: __m512i) -> __m512i {
        let (even, odd) = (_mm512_shuffle_i64x2::<0b10_00_10_00>(a, b), _mm512_shuffle_i64x2::<0b11_01_11_01>(a, b));
        _mm512_xor_si512(even, odd)
    }

    /// As the scalar reference.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    pub(super) fn fingerprint(keys: &Section, section: &Section) -> u64 {
        let sums = sums(load(keys), section);
        let halves = folded(sums, sums);
        _mm_cvtsi128_si64(_mm512_castsi512_si128(reduced(folded(halves, halves)))).cast_unsigned()
    }

    /// As the scalar reference.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    pub(super) fn matching(keys: &Section, sections: &[Section], fingerprints: &[u64]) -> usize {
        let count = sections.len().min(fingerprints.len());
        let (sections, fingerprints) = (&sections[..count], &fingerprints[..count]);
        let loaded = load(keys);
        let (fours, rest) = sections.as_chunks::<AT_ONCE>();
        for (at, [a, b, c, d]) in fours.iter().enumerate() {
            let (ab, cd) = (folded(sums(loaded, a), sums(loaded, b)), folded(sums(loaded, c), sums(loaded, d)));
            let found = _mm512_maskz_compress_epi64(LOWER, reduced(folded(ab, cd)));
            let four = (1 << AT_ONCE) - 1;
            let known = &fingerprints[at * AT_ONCE..][..AT_ONCE];
            // SAFETY: four elements are read, and no more.
            let known = unsafe { _mm512_maskz_loadu_epi64(four, known.as_ptr().cast()) };
            let differ = _mm512_cmpneq_epi64_mask(found, known);
            if differ != 0 {
                return at * AT_ONCE + differ.trailing_zeros() as usize;
            }
        }
        let at = fours.len() * AT_ONCE;
        let pairs = rest.iter().zip(&fingerprints[at..]);
        at + pairs.take_while(|(section, known)| fingerprint(keys, section) == **known).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    fn words(rng: &mut Xoshiro256PlusPlus, count: usize) -> Vec<u64> {
        (0..count).map(|_| rng.random()).collect()
    }

    fn section(rng: &mut Xoshiro256PlusPlus) -> Section {
        std::array::from_fn(|_| rng.random())
    }

    #[test]
    fn the_field_multiplies_and_reduces() {
        assert_eq!(carry_less_product(0b101, 0b11), 0b1111);
        assert_eq!(carry_less_product(u64::MAX, 1 << 63), u128::from(u64::MAX) << 63);
        // All keys and words are zero but for one pair: x^63 * x^63 = x^126 = x^62 * x^64.
        let keys = [0; SECTION_WORDS];
        let mut section = keys;
        (section[8], section[9]) = (1 << 63, 1 << 63);
        // Times x^4 + x^3 + x + 1 it is x^66 + x^65 + x^63 + x^62, and x^66 + x^65 is x^6 + x^4 + x^3 + x.
        assert_eq!(fingerprint_scalar(&keys, &section), 0b11 << 62 | 0b101_1010);
    }

    #[test]
    fn vectors_and_scalar_agree() {
        let Some(keys) = Keys::new(7) else { return eprintln!("skipped: this processor lacks VPCLMULQDQ") };
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
        let mut sections: Vec<Section> = (0..200).map(|_| section(&mut rng)).collect();
        sections.extend([[0; SECTION_WORDS], [u64::MAX; SECTION_WORDS], [1 << 63; SECTION_WORDS], keys.0]);
        for section in &sections {
            assert_eq!(keys.fingerprint(section), fingerprint_scalar(&keys.0, section));
        }
        let fingerprints: Vec<u64> = sections.iter().map(|section| keys.fingerprint(section)).collect();
        for len in 0..20 {
            for first in 0..=len {
                let mut changed = sections[..len].to_vec();
                if let Some(section) = changed.get_mut(first) {
                    section[first % SECTION_WORDS] ^= 1 << (first % 64);
                }
                for known in [&fingerprints[..len], &fingerprints] {
                    assert_eq!(keys.matching(&changed, known), first);
                    assert_eq!(matching_scalar(&keys.0, &changed, known), first);
                }
                assert_eq!(keys.matching(&sections, &fingerprints[..len]), len);
            }
        }
    }

    #[test]
    fn each_bit_and_each_place_and_the_secret_change_a_fingerprint() {
        let (keys, other) = (Keys::of_secret(1), Keys::of_secret(2));
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(2);
        let plain = section(&mut rng);
        let known = fingerprint_scalar(&keys.0, &plain);
        assert_ne!(known, fingerprint_scalar(&other.0, &plain));
        let mut found = std::collections::HashSet::from([known]);
        for at in 0..SECTION_WORDS {
            for bit in 0..64 {
                let mut changed = plain;
                changed[at] ^= 1 << bit;
                assert!(found.insert(fingerprint_scalar(&keys.0, &changed)), "bit {bit} of word {at}");
            }
            for with in 0..at {
                let mut changed = plain;
                changed.swap(at, with);
                assert!(found.insert(fingerprint_scalar(&keys.0, &changed)), "words {with} and {at} swapped");
            }
        }
    }

    #[test]
    fn the_common_prefix_is_that_of_the_words() {
        let Some(keys) = Keys::new(3) else { return eprintln!("skipped: this processor lacks VPCLMULQDQ") };
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
        for _ in 0..3_000 {
            let count = rng.random_range(0..600);
            let words = words(&mut rng, count);
            let head = rng.random_range(0..SECTION_WORDS).min(words.len());
            let mut fingerprints: Vec<u64> =
                words[head..].as_chunks().0.iter().map(|section| keys.fingerprint(section)).collect();
            let mut query = words.clone();
            query.truncate(rng.random_range(0..=words.len()));
            query.extend((0..rng.random_range(0..40)).map(|_| rng.random::<u64>()));
            if let Some(at) =
                (!query.is_empty()).then(|| rng.random_range(0..query.len() * 2)).filter(|at| *at < query.len())
            {
                query[at] ^= 1;
            }
            // A fingerprint that is not known makes a comparison longer, and no answer wrong.
            if let Some(last) = fingerprints.last_mut().filter(|_| rng.random_bool(0.2)) {
                *last ^= 1;
            }
            let fingerprinted = Fingerprinted { keys: &keys, words: &words, head, fingerprints: &fingerprints };
            fingerprinted.prefetch();
            let expected = words.iter().zip(&query).take_while(|(a, b)| a == b).count();
            let mut halves = 0;
            assert_eq!(fingerprinted.common_prefix(&query, || halves += 1), expected);
            let half = head + fingerprints.len() / 2 * SECTION_WORDS;
            assert_eq!(halves == 1, expected >= half && query.len() >= half, "{expected} of {half}");
        }
    }
}
