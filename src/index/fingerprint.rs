//! Fingerprints of blocks in a row, so that a lookup that follows a long node need not read it.
//!
//! A **section** is [`SECTION_WORDS`] words of the arena, aligned to as many. Its **fingerprint** is a keyed hash of
//! them of 64 bits. A lookup hashes the query's blocks, which it has in its caches, and reads the fingerprints of the
//! node's whole sections: a line for each 256 blocks, where the blocks are 32 lines.
//!
//! # The hash
//!
//! Words `w` and keys `k` are elements of GF(2^64), reduced by x^64 + x^4 + x^3 + x + 1. The fingerprint is the sum of
//! `(w[i] + k[i]) * (w[i + 16] + k[i + 16])` over the 16 words of the first half. For two sections that differ, the
//! difference of their fingerprints is a linear function of the keys, and not a constant one. So it is zero for one choice
//! of keys in 2^64, if the sections were chosen by a client that does not know the keys. (Lemire and Kaser, "Faster
//! 64-bit universal hashing using carry-less multiplications", 2016, have the same sum without the reduction.) That is so
//! for keys that are random. These follow from the shard's secret of 64 bits, by SplitMix64.
//!
//! Where fingerprints differ, the words are compared. So a wrong fingerprint could only cost time, unless it is that of
//! another section.
//!
//! # Processors
//!
//! The scalar functions are the specification. [`functions`] says which vector functions this processor can run. They need
//! an instruction for carry-less products: PCLMULQDQ or VPCLMULQDQ on x86-64, PMULL on aarch64. Without one there are no
//! keys and no fingerprints, and all words are compared.

#![expect(unsafe_code, reason = "vector functions are called on a processor that has them, and registers are loaded")]

use super::simd::common_prefix;
use super::types::{LINE_BLOCKS, spread};
use crate::prefetch::prefetch;

/// Words of a section: four cache lines.
pub(super) const SECTION_WORDS: usize = 32;

/// A section's words.
pub(super) type Section = [u64; SECTION_WORDS];

/// Finds the first section whose fingerprint is not the `known` one at the same place: its place and its fingerprint.
/// It is called only on a processor that has its instructions.
type FirstOther = unsafe fn(keys: &Section, sections: &[Section], known: &[u64]) -> Option<(usize, u64)>;

/// The functions that this processor can run, the fastest first.
fn functions() -> impl Iterator<Item = FirstOther> {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    let vectors = {
        let pairs = is_x86_feature_detected!("avx") && is_x86_feature_detected!("pclmulqdq");
        let wide = pairs && is_x86_feature_detected!("vpclmulqdq");
        [
            (wide && is_x86_feature_detected!("avx512f"), x86::first_other_512 as FirstOther),
            (wide && is_x86_feature_detected!("avx2"), x86::first_other_256),
            (pairs, x86::first_other_128),
        ]
    };
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    let vectors = [(std::arch::is_aarch64_feature_detected!("aes"), neon::first_other_128 as FirstOther)];
    #[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
    let vectors: [(bool, FirstOther); 0] = [];
    // Tests check the scalar functions with all that uses them.
    #[cfg(any(test, miri))]
    let scalar = [(true, first_other_scalar as FirstOther)];
    #[cfg(not(any(test, miri)))]
    let scalar: [(bool, FirstOther); 0] = [];
    vectors.into_iter().chain(scalar).filter_map(|(runs_here, function)| runs_here.then_some(function))
}

/// The keys of a shard's fingerprints. They exist only on a processor that has the vector instructions.
pub(super) struct Keys {
    keys: Section,
    /// One of [`functions`].
    first_other: FirstOther,
}

impl Keys {
    /// Keys that follow from a secret; `None` where the processor lacks the instructions.
    pub(super) fn new(secret: u64) -> Option<Self> {
        functions().next().map(|first_other| Self { keys: keys_of(secret), first_other })
    }

    /// The fingerprint of a section, unless it is the known one.
    #[inline]
    pub(super) fn other(&self, section: &Section, known: u64) -> Option<u64> {
        self.first_other(std::slice::from_ref(section), &[known]).map(|(_, fingerprint)| fingerprint)
    }

    /// How many sections at the beginning of `sections` have these fingerprints.
    #[inline]
    pub(super) fn matching(&self, sections: &[Section], known: &[u64]) -> usize {
        self.first_other(sections, known).map_or(sections.len().min(known.len()), |(at, _)| at)
    }

    #[inline]
    fn first_other(&self, sections: &[Section], known: &[u64]) -> Option<(usize, u64)> {
        // SAFETY: this processor can run each of `functions`.
        unsafe { (self.first_other)(&self.keys, sections, known) }
    }
}

fn keys_of(secret: u64) -> Section {
    let start = spread(secret ^ 0x3c6e_f372_fe94_f82b);
    std::array::from_fn(|at| spread(start.wrapping_add((at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))))
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
#[cfg(any(test, miri))]
fn fingerprint_scalar(keys: &Section, section: &Section) -> u64 {
    const HALF: usize = SECTION_WORDS / 2;
    let product = |at: usize| carry_less_product(section[at] ^ keys[at], section[at + HALF] ^ keys[at + HALF]);
    let sum = (0..HALF).fold(0, |sum, at| sum ^ product(at));
    // The upper half times x^64, which is x^4 + x^3 + x + 1. That leaves at most four bits beyond 64.
    let reduction = 0b1_1011;
    let once = sum as u64 as u128 ^ carry_less_product((sum >> 64) as u64, reduction);
    once as u64 ^ carry_less_product((once >> 64) as u64, reduction) as u64
}

#[cfg(any(test, miri))]
fn carry_less_product(a: u64, b: u64) -> u128 {
    (0..u64::BITS).filter(|bit| b >> bit & 1 == 1).fold(0, |sum, bit| sum ^ u128::from(a) << bit)
}

#[cfg(any(test, miri))]
fn first_other_scalar(keys: &Section, sections: &[Section], known: &[u64]) -> Option<(usize, u64)> {
    let found = sections.iter().map(|section| fingerprint_scalar(keys, section));
    found.zip(known).enumerate().find_map(|(at, (found, known))| (found != *known).then_some((at, found)))
}

/// What the vector functions have in common. Each is compiled once for each kind of register, inside a function that
/// enables its instructions. What those call is inlined into them, down to the instructions, so it has no closures.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
mod vector {
    use super::Section;

    /// Words side by side.
    ///
    /// # Safety
    /// Any bits are a register.
    pub(super) unsafe trait Register: Copy {
        /// The sum of both.
        ///
        /// # Safety
        /// The processor has the instructions for these registers. So it is with the other functions.
        unsafe fn xor(self, other: Self) -> Self;

        /// Sums of products of 128 bits, each of a word and the one at its place in the other: their sum is that of all.
        unsafe fn products(self, other: Self) -> Self;

        /// The sum of such sums: its lower and its upper half.
        unsafe fn total(self) -> [u64; 2];
    }

    /// As the scalar reference. A section has `COUNT` registers.
    ///
    /// # Safety
    /// The processor has the instructions for these registers.
    #[inline(always)]
    pub(super) unsafe fn first_other<R: Register, const COUNT: usize>(
        keys: &Section,
        sections: &[Section],
        known: &[u64],
    ) -> Option<(usize, u64)> {
        let keys = load(keys);
        for (at, (section, known)) in sections.iter().zip(known).enumerate() {
            // SAFETY: the caller's.
            let found = unsafe { fingerprint::<R, COUNT>(keys, load(section)) };
            if found != *known {
                return Some((at, found));
            }
        }
        None
    }

    #[inline(always)]
    fn load<R: Register, const COUNT: usize>(section: &Section) -> [R; COUNT] {
        const { assert!(size_of::<[R; COUNT]>() == size_of::<Section>(), "a section is as many registers") };
        // SAFETY: both have the same size, and any bits are a register.
        unsafe { section.as_ptr().cast::<[R; COUNT]>().read_unaligned() }
    }

    /// # Safety
    /// As [`first_other`].
    #[inline(always)]
    unsafe fn fingerprint<R: Register, const COUNT: usize>(keys: [R; COUNT], words: [R; COUNT]) -> u64 {
        // SAFETY: the caller's.
        unsafe {
            let mut sum = words[0].xor(keys[0]).products(words[COUNT / 2].xor(keys[COUNT / 2]));
            for at in 1..COUNT / 2 {
                let (left, right) = (words[at].xor(keys[at]), words[COUNT / 2 + at].xor(keys[COUNT / 2 + at]));
                sum = sum.xor(left.products(right));
            }
            reduced(sum.total())
        }
    }

    /// A sum of 128 bits as an element of the field. x^64 is x^4 + x^3 + x + 1. The upper half times that leaves four bits
    /// beyond 64, which are added to the upper half in place of another product.
    #[inline(always)]
    const fn reduced([lower, upper]: [u64; 2]) -> u64 {
        let upper = upper ^ upper >> 60 ^ upper >> 61 ^ upper >> 63;
        lower ^ upper << 4 ^ upper << 3 ^ upper << 1 ^ upper
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86 {
    use super::Section;
    use super::vector::{Register, first_other};
    use std::arch::x86_64::{
        __m128i, __m256i, __m512i, _mm_clmulepi64_si128, _mm_cvtsi128_si64, _mm_unpackhi_epi64, _mm_xor_si128,
        _mm256_castsi256_si128, _mm256_clmulepi64_epi128, _mm256_extracti128_si256, _mm256_xor_si256,
        _mm512_castsi512_si256, _mm512_clmulepi64_epi128, _mm512_extracti64x4_epi64, _mm512_xor_si512,
    };

    /// Of a carry-less product: the lower halves of each 128 bits, and the upper halves.
    const LOWER: i32 = 0x00;
    const UPPER: i32 = 0x11;

    /// As the scalar reference.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    pub(super) fn first_other_512(keys: &Section, sections: &[Section], known: &[u64]) -> Option<(usize, u64)> {
        // SAFETY: this function has the instructions of the registers.
        unsafe { first_other::<__m512i, 4>(keys, sections, known) }
    }

    /// As the scalar reference.
    #[target_feature(enable = "avx2,vpclmulqdq")]
    pub(super) fn first_other_256(keys: &Section, sections: &[Section], known: &[u64]) -> Option<(usize, u64)> {
        // SAFETY: this function has the instructions of the registers.
        unsafe { first_other::<__m256i, 8>(keys, sections, known) }
    }

    /// As the scalar reference.
    #[target_feature(enable = "avx,pclmulqdq")]
    pub(super) fn first_other_128(keys: &Section, sections: &[Section], known: &[u64]) -> Option<(usize, u64)> {
        // SAFETY: this function has the instructions of the registers.
        unsafe { first_other::<__m128i, 16>(keys, sections, known) }
    }

    // SAFETY: any bits are integers.
    unsafe impl Register for __m512i {
        #[target_feature(enable = "avx512f,vpclmulqdq")]
        #[inline]
        unsafe fn xor(self, other: Self) -> Self {
            _mm512_xor_si512(self, other)
        }

        #[target_feature(enable = "avx512f,vpclmulqdq")]
        #[inline]
        unsafe fn products(self, other: Self) -> Self {
            let lower = _mm512_clmulepi64_epi128::<LOWER>(self, other);
            _mm512_xor_si512(lower, _mm512_clmulepi64_epi128::<UPPER>(self, other))
        }

        #[target_feature(enable = "avx512f,vpclmulqdq")]
        #[inline]
        unsafe fn total(self) -> [u64; 2] {
            let (lower, upper) = (_mm512_castsi512_si256(self), _mm512_extracti64x4_epi64::<1>(self));
            // SAFETY: the caller's.
            unsafe { _mm256_xor_si256(lower, upper).total() }
        }
    }

    // SAFETY: any bits are integers.
    unsafe impl Register for __m256i {
        #[target_feature(enable = "avx2,vpclmulqdq")]
        #[inline]
        unsafe fn xor(self, other: Self) -> Self {
            _mm256_xor_si256(self, other)
        }

        #[target_feature(enable = "avx2,vpclmulqdq")]
        #[inline]
        unsafe fn products(self, other: Self) -> Self {
            let lower = _mm256_clmulepi64_epi128::<LOWER>(self, other);
            _mm256_xor_si256(lower, _mm256_clmulepi64_epi128::<UPPER>(self, other))
        }

        #[target_feature(enable = "avx2,vpclmulqdq")]
        #[inline]
        unsafe fn total(self) -> [u64; 2] {
            let (lower, upper) = (_mm256_castsi256_si128(self), _mm256_extracti128_si256::<1>(self));
            // SAFETY: the caller's.
            unsafe { _mm_xor_si128(lower, upper).total() }
        }
    }

    // SAFETY: any bits are integers.
    unsafe impl Register for __m128i {
        #[target_feature(enable = "avx,pclmulqdq")]
        #[inline]
        unsafe fn xor(self, other: Self) -> Self {
            _mm_xor_si128(self, other)
        }

        #[target_feature(enable = "avx,pclmulqdq")]
        #[inline]
        unsafe fn products(self, other: Self) -> Self {
            let lower = _mm_clmulepi64_si128::<LOWER>(self, other);
            _mm_xor_si128(lower, _mm_clmulepi64_si128::<UPPER>(self, other))
        }

        #[target_feature(enable = "avx,pclmulqdq")]
        #[inline]
        unsafe fn total(self) -> [u64; 2] {
            let (lower, upper) = (_mm_cvtsi128_si64(self), _mm_cvtsi128_si64(_mm_unpackhi_epi64(self, self)));
            [lower.cast_unsigned(), upper.cast_unsigned()]
        }
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod neon {
    use super::Section;
    use super::vector::{Register, first_other};
    use std::arch::aarch64::{
        uint64x2_t, veorq_u64, vgetq_lane_u64, vmull_high_p64, vmull_p64, vreinterpretq_p64_u64, vreinterpretq_u64_p128,
    };

    /// As the scalar reference.
    #[target_feature(enable = "neon,aes")]
    pub(super) fn first_other_128(keys: &Section, sections: &[Section], known: &[u64]) -> Option<(usize, u64)> {
        // SAFETY: this function has the instructions of the registers.
        unsafe { first_other::<uint64x2_t, 16>(keys, sections, known) }
    }

    // SAFETY: any bits are integers.
    unsafe impl Register for uint64x2_t {
        #[target_feature(enable = "neon,aes")]
        #[inline]
        unsafe fn xor(self, other: Self) -> Self {
            veorq_u64(self, other)
        }

        #[target_feature(enable = "neon,aes")]
        #[inline]
        unsafe fn products(self, other: Self) -> Self {
            let lower = vmull_p64(vgetq_lane_u64::<0>(self), vgetq_lane_u64::<0>(other));
            let upper = vmull_high_p64(vreinterpretq_p64_u64(self), vreinterpretq_p64_u64(other));
            veorq_u64(vreinterpretq_u64_p128(lower), vreinterpretq_u64_p128(upper))
        }

        #[target_feature(enable = "neon,aes")]
        #[inline]
        unsafe fn total(self) -> [u64; 2] {
            [vgetq_lane_u64::<0>(self), vgetq_lane_u64::<1>(self)]
        }
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
        (section[8], section[24]) = (1 << 63, 1 << 63);
        // Times x^4 + x^3 + x + 1 it is x^66 + x^65 + x^63 + x^62, and x^66 + x^65 is x^6 + x^4 + x^3 + x.
        assert_eq!(fingerprint_scalar(&keys, &section), 0b11 << 62 | 0b101_1010);
    }

    /// The keys of a secret, with each function that this machine can run.
    fn keys_of_each_function(secret: u64) -> impl Iterator<Item = Keys> {
        functions().map(move |first_other| Keys { keys: keys_of(secret), first_other })
    }

    #[test]
    fn vectors_and_scalar_agree() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
        let mut sections: Vec<Section> = (0..200).map(|_| section(&mut rng)).collect();
        sections.extend([[0; SECTION_WORDS], [u64::MAX; SECTION_WORDS], [1 << 63; SECTION_WORDS], keys_of(7)]);
        for keys in keys_of_each_function(7) {
            let fingerprints: Vec<u64> =
                sections.iter().map(|section| fingerprint_scalar(&keys.keys, section)).collect();
            for (section, fingerprint) in sections.iter().zip(&fingerprints) {
                assert_eq!(keys.other(section, *fingerprint), None);
                assert_eq!(keys.other(section, fingerprint ^ 1), Some(*fingerprint));
            }
            for len in 0..20 {
                for first in 0..=len {
                    let mut changed = sections[..len].to_vec();
                    if let Some(section) = changed.get_mut(first) {
                        section[first % SECTION_WORDS] ^= 1 << (first % 64);
                    }
                    for known in [&fingerprints[..len], &fingerprints] {
                        assert_eq!(keys.matching(&changed, known), first);
                        assert_eq!(keys.first_other(&changed, known), first_other_scalar(&keys.keys, &changed, known));
                    }
                    assert_eq!(keys.matching(&sections, &fingerprints[..len]), len);
                }
            }
        }
    }

    #[test]
    fn each_bit_and_each_place_and_the_secret_change_a_fingerprint() {
        let (keys, other) = (keys_of(1), keys_of(2));
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(2);
        let plain = section(&mut rng);
        let known = fingerprint_scalar(&keys, &plain);
        assert_ne!(known, fingerprint_scalar(&other, &plain));
        let mut found = std::collections::HashSet::from([known]);
        for at in 0..SECTION_WORDS {
            for bit in 0..64 {
                let mut changed = plain;
                changed[at] ^= 1 << bit;
                assert!(found.insert(fingerprint_scalar(&keys, &changed)), "bit {bit} of word {at}");
            }
            for with in 0..at {
                let mut changed = plain;
                changed.swap(at, with);
                assert!(found.insert(fingerprint_scalar(&keys, &changed)), "words {with} and {at} swapped");
            }
        }
    }

    #[test]
    fn the_common_prefix_is_that_of_the_words() {
        for keys in keys_of_each_function(3) {
            check_common_prefix(&keys);
        }
    }

    fn check_common_prefix(keys: &Keys) {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
        for _ in 0..3_000 {
            let count = rng.random_range(0..600);
            let words = words(&mut rng, count);
            let head = rng.random_range(0..SECTION_WORDS).min(words.len());
            let sections = words[head..].as_chunks().0.iter();
            let mut fingerprints: Vec<u64> = sections.map(|section| fingerprint_scalar(&keys.keys, section)).collect();
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
            let fingerprinted = Fingerprinted { keys, words: &words, head, fingerprints: &fingerprints };
            fingerprinted.prefetch();
            let expected = words.iter().zip(&query).take_while(|(a, b)| a == b).count();
            let mut halves = 0;
            assert_eq!(fingerprinted.common_prefix(&query, || halves += 1), expected);
            let half = head + fingerprints.len() / 2 * SECTION_WORDS;
            assert_eq!(halves == 1, expected >= half && query.len() >= half, "{expected} of {half}");
        }
    }
}
