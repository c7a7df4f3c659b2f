//! Vector code of the index: the common prefix of two runs of local hashes, and one depth written for many holder bits.
//!
//! The scalar functions are the reference. The vector functions give the same results. On x86-64, `SimdLevel` of
//! `crate::simd` says which of them run on this processor; each processor of the aarch64 target has NEON.
//! They are `#[target_feature]` functions.

#![cfg_attr(
    any(target_arch = "x86_64", all(target_arch = "aarch64", not(miri))),
    expect(unsafe_code, reason = "vector loads and masked stores take raw pointers")
)]

#[cfg(all(target_arch = "x86_64", not(miri)))]
use crate::simd::SimdLevel;

/// The vector functions of a walk. A walk is compiled once for each set of them, so that they are a part of it: most runs
/// are short, and a call would take longer than the comparison.
pub(super) trait Vectors: Copy {
    /// As [`common_prefix`].
    fn common_prefix(self, a: &[u64], b: &[u64]) -> usize;

    /// As [`record`].
    fn record(self, out: &mut [u32; WORD_HOLDERS], holders: u64, depth: u32);
}

/// Those of any processor: each call finds out what this one has.
#[derive(Clone, Copy, Debug)]
pub(super) struct AnyProcessor;

impl Vectors for AnyProcessor {
    #[inline]
    fn common_prefix(self, a: &[u64], b: &[u64]) -> usize {
        common_prefix(a, b)
    }

    #[inline]
    fn record(self, out: &mut [u32; WORD_HOLDERS], holders: u64, depth: u32) {
        record(out, holders, depth);
    }
}

/// Those of a processor with AVX-512F and BMI2.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx512(());

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl Avx512 {
    /// A proof that this processor has them.
    #[inline]
    pub(super) fn here() -> Option<Self> {
        (SimdLevel::here() >= SimdLevel::Avx512).then_some(Self(()))
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl Vectors for Avx512 {
    #[inline(always)]
    fn common_prefix(self, a: &[u64], b: &[u64]) -> usize {
        // SAFETY: `self` proves that the processor has AVX-512F.
        unsafe { vector::common_prefix_avx512(a, b) }
    }

    #[inline(always)]
    fn record(self, out: &mut [u32; WORD_HOLDERS], holders: u64, depth: u32) {
        // SAFETY: as above.
        unsafe { record_avx512(out, holders, depth) }
    }
}

/// Cache lines of `a` that [`common_prefix`] prefetches ahead of the current one: the caller prefetches the first. The
/// processor's own prefetcher begins later, and stops at each page.
pub(super) const LINES_AHEAD: usize = 16;

/// The number of leading elements at which `a` and `b` are equal. `a` is the one that may be far away in memory, and is
/// prefetched up to its end even if `b` is shorter.
#[inline]
pub(super) fn common_prefix(a: &[u64], b: &[u64]) -> usize {
    // Most runs that differ do so in their first element, which needs neither a call nor a vector.
    match (a.first(), b.first()) {
        (Some(first), Some(other)) if first == other => dispatch(a, b),
        _ => 0,
    }
}

#[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
fn dispatch(a: &[u64], b: &[u64]) -> usize {
    common_prefix_scalar(a, b)
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn dispatch(a: &[u64], b: &[u64]) -> usize {
    match SimdLevel::here() {
        // SAFETY: these levels are only those of processors with AVX-512F.
        SimdLevel::Avx512 | SimdLevel::Avx512Ifma => unsafe { vector::common_prefix_avx512(a, b) },
        // SAFETY: this level is only that of processors with AVX2.
        SimdLevel::Avx2 => unsafe { vector::common_prefix_avx2(a, b) },
        SimdLevel::Scalar => common_prefix_scalar(a, b),
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
#[inline]
fn dispatch(a: &[u64], b: &[u64]) -> usize {
    // SAFETY: each processor of the target has NEON.
    unsafe { neon::common_prefix(a, b) }
}

fn common_prefix_scalar(a: &[u64], b: &[u64]) -> usize {
    a.iter().zip(b).take_while(|(left, right)| left == right).count()
}

#[cfg(target_arch = "x86_64")]
#[cfg_attr(miri, expect(dead_code, reason = "miri runs the scalar reference"))]
mod vector {
    use super::LINES_AHEAD;
    use crate::prefetch::prefetch;
    use std::arch::x86_64::{
        __mmask8, _mm256_castsi256_pd, _mm256_cmpeq_epi64, _mm256_loadu_si256, _mm256_movemask_pd,
        _mm512_cmpneq_epi64_mask, _mm512_loadu_epi64, _mm512_mask_cmpneq_epi64_mask, _mm512_maskz_loadu_epi64,
    };

    /// Elements of a 512-bit and of a 256-bit register.
    const WIDE: usize = 8;
    const NARROW: usize = 4;

    /// Which of the 8 elements at `a` and `b` differ.
    ///
    /// # Safety
    /// Both point to 8 readable elements.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn differ_wide(a: *const u64, b: *const u64) -> __mmask8 {
        // SAFETY: the caller guarantees 8 readable elements at each; the loads need no alignment.
        let (left, right) = unsafe { (_mm512_loadu_epi64(a.cast()), _mm512_loadu_epi64(b.cast())) };
        _mm512_cmpneq_epi64_mask(left, right)
    }

    /// As the scalar reference.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(super) fn common_prefix_avx512(a: &[u64], b: &[u64]) -> usize {
        let blocks = a.len().min(b.len());
        let (left, right) = (a.as_ptr(), b.as_ptr());
        let mut at = 0;
        // Two registers in each iteration: one branch for 16 elements, and the loads of both overlap.
        while at + 2 * WIDE <= blocks {
            if at + LINES_AHEAD * WIDE < a.len() {
                prefetch(left.wrapping_add(at + LINES_AHEAD * WIDE).cast());
                prefetch(left.wrapping_add(at + (LINES_AHEAD + 1) * WIDE).cast());
            }
            // SAFETY: both slices have at least `at + 16` elements.
            let (low, high) = unsafe {
                let middle = at + WIDE;
                (differ_wide(left.add(at), right.add(at)), differ_wide(left.add(middle), right.add(middle)))
            };
            let differ = u32::from(low) | u32::from(high) << WIDE;
            if differ != 0 {
                return at + differ.trailing_zeros() as usize;
            }
            at += 2 * WIDE;
        }
        if at + WIDE <= blocks {
            // SAFETY: both slices have at least `at + 8` elements.
            let differ = unsafe { differ_wide(left.add(at), right.add(at)) };
            if differ != 0 {
                return at + differ.trailing_zeros() as usize;
            }
            at += WIDE;
        }
        if at == blocks {
            return blocks;
        }
        let rest: __mmask8 = (1 << (blocks - at)) - 1;
        // SAFETY: `at` is at most the length of both, and elements beyond that are masked, so they are not read.
        let differ = unsafe {
            let (low, other) = (left.add(at).cast(), right.add(at).cast());
            let (low, other) = (_mm512_maskz_loadu_epi64(rest, low), _mm512_maskz_loadu_epi64(rest, other));
            _mm512_mask_cmpneq_epi64_mask(rest, low, other)
        };
        if differ == 0 { blocks } else { at + differ.trailing_zeros() as usize }
    }

    /// Which of the 4 elements at `a` and `b` are equal.
    ///
    /// # Safety
    /// Both point to 4 readable elements.
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn equal_narrow(a: *const u64, b: *const u64) -> u32 {
        // SAFETY: the caller guarantees 4 readable elements at each; the loads need no alignment.
        let (left, right) = unsafe { (_mm256_loadu_si256(a.cast()), _mm256_loadu_si256(b.cast())) };
        _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(left, right))).cast_unsigned()
    }

    /// As the scalar reference.
    #[target_feature(enable = "avx2")]
    pub(super) fn common_prefix_avx2(a: &[u64], b: &[u64]) -> usize {
        const ALL: u32 = (1 << (2 * NARROW)) - 1;
        let blocks = a.len().min(b.len());
        let (left, right) = (a.as_ptr(), b.as_ptr());
        let mut at = 0;
        while at + 2 * NARROW <= blocks {
            // SAFETY: both slices have at least `at + 8` elements.
            let (low, high) = unsafe {
                let middle = at + NARROW;
                (equal_narrow(left.add(at), right.add(at)), equal_narrow(left.add(middle), right.add(middle)))
            };
            let equal = low | high << NARROW;
            if equal != ALL {
                return at + equal.trailing_ones() as usize;
            }
            at += 2 * NARROW;
        }
        at + super::common_prefix_scalar(&a[at..blocks], &b[at..blocks])
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod neon {
    use std::arch::aarch64::{
        uint64x2_t, vdupq_n_u64, veorq_u64, vld1q_u64, vmaxvq_u32, vorrq_u64, vreinterpretq_u32_u64,
    };

    /// Elements of a register, and of an iteration.
    const PAIR: usize = 2;
    const AT_ONCE: usize = 8;

    /// As the scalar reference, which finds the place among the eight elements that differ.
    #[target_feature(enable = "neon")]
    pub(super) fn common_prefix(a: &[u64], b: &[u64]) -> usize {
        let blocks = a.len().min(b.len());
        let (a, b) = (&a[..blocks], &b[..blocks]);
        let pairs = a.as_chunks::<AT_ONCE>().0.iter().zip(b.as_chunks::<AT_ONCE>().0);
        let at = pairs.take_while(|(left, right)| are_equal(left, right)).count() * AT_ONCE;
        at + super::common_prefix_scalar(&a[at..], &b[at..])
    }

    #[target_feature(enable = "neon")]
    #[inline]
    fn are_equal(left: &[u64; AT_ONCE], right: &[u64; AT_ONCE]) -> bool {
        let mut differ = vdupq_n_u64(0);
        for (left, right) in left.as_chunks::<PAIR>().0.iter().zip(right.as_chunks::<PAIR>().0) {
            differ = vorrq_u64(differ, veorq_u64(load(left), load(right)));
        }
        vmaxvq_u32(vreinterpretq_u32_u64(differ)) == 0
    }

    #[target_feature(enable = "neon")]
    #[inline]
    fn load(pair: &[u64; PAIR]) -> uint64x2_t {
        // SAFETY: a register is two elements.
        unsafe { vld1q_u64(pair.as_ptr()) }
    }
}

/// Holder bits of a word.
pub(super) const WORD_HOLDERS: usize = 64;

/// Writes `depth` for each of `holders`; `out` has an element for each holder bit of a word.
#[inline]
pub(super) fn record(out: &mut [u32; WORD_HOLDERS], holders: u64, depth: u32) {
    // A single one is written faster without a vector.
    if holders & holders.wrapping_sub(1) == 0 {
        return record_scalar(out, holders, depth);
    }
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if SimdLevel::here() >= SimdLevel::Avx512 {
        // SAFETY: these levels are only those of processors with AVX-512F.
        return unsafe { record_avx512(out, holders, depth) };
    }
    record_scalar(out, holders, depth);
}

fn record_scalar(out: &mut [u32; WORD_HOLDERS], mut holders: u64, depth: u32) {
    while holders != 0 {
        out[holders.trailing_zeros() as usize] = depth;
        holders &= holders - 1;
    }
}

#[cfg(target_arch = "x86_64")]
#[cfg_attr(miri, expect(dead_code, reason = "miri runs the scalar reference"))]
#[target_feature(enable = "avx512f")]
#[inline]
fn record_avx512(out: &mut [u32; WORD_HOLDERS], holders: u64, depth: u32) {
    use std::arch::x86_64::{_mm512_mask_storeu_epi32, _mm512_set1_epi32};
    let depths = _mm512_set1_epi32(depth.cast_signed());
    for (at, part) in out.chunks_exact_mut(16).enumerate() {
        // SAFETY: the part has 16 elements, and only those of the mask are written.
        unsafe { _mm512_mask_storeu_epi32(part.as_mut_ptr().cast(), (holders >> (at * 16)) as u16, depths) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    /// Longer than four iterations of the widest loop, and no multiple of anything.
    const LENGTH_MAX: usize = 130;

    type CommonPrefix = fn(&[u64], &[u64]) -> usize;

    /// The scalar reference and every vector function that this machine can run.
    fn functions() -> Vec<CommonPrefix> {
        #[cfg_attr(any(not(target_arch = "x86_64"), miri), expect(unused_mut, reason = "no further vectors here"))]
        let mut functions: Vec<CommonPrefix> = vec![common_prefix, common_prefix_scalar];
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            use super::vector::{common_prefix_avx2, common_prefix_avx512};
            if is_x86_feature_detected!("avx2") {
                // SAFETY: detected one line above.
                functions.push(|a, b| unsafe { common_prefix_avx2(a, b) });
            }
            if is_x86_feature_detected!("avx512f") {
                // SAFETY: detected one line above.
                functions.push(|a, b| unsafe { common_prefix_avx512(a, b) });
            }
        }
        functions
    }

    fn blocks(count: usize) -> Vec<u64> {
        (0..count as u64).map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
    }

    #[test]
    fn every_length_and_first_difference() {
        for function in functions() {
            for length in 0..=LENGTH_MAX {
                let a = blocks(length);
                assert_eq!(function(&a, &a), length);
                for first in 0..length {
                    let mut b = a.clone();
                    // One bit, alternately the lowest and the highest; then everything after it differs too.
                    b[first] ^= if first % 2 == 0 { 1 } else { 1 << 63 };
                    assert_eq!(function(&a, &b), first, "{length} blocks");
                    b[first + 1..].fill(0);
                    assert_eq!(function(&a, &b), first, "{length} blocks");
                }
            }
        }
    }

    #[test]
    fn any_start_and_unequal_lengths() {
        let (a, b) = (blocks(64), blocks(64));
        for function in functions() {
            for start in 0..9 {
                for (left, right) in [(55, 0), (0, 55), (55, 20), (17, 55), (33, 32), (8, 55), (16, 16)] {
                    let (a, b) = (&a[start..start + left], &b[start..start + right]);
                    assert_eq!(function(a, b), left.min(right));
                }
                // Elements behind the shorter one are not compared.
                assert_eq!(function(&a[start..start + 3], &b[start..]), 3);
            }
            // Starts at different distances from a line.
            let shifted: Vec<u64> = std::iter::once(1).chain(b.iter().copied()).collect();
            assert_eq!(function(&a, &shifted[1..]), 64);
            assert_eq!(function(&a[1..], &shifted[2..62]), 60);
        }
    }

    #[test]
    #[ignore = "takes times; run with --release --nocapture"]
    fn quick_timing() {
        for length in [1, 4, 8, 24, 64, 256, 1024] {
            let (a, b) = (blocks(length), blocks(length));
            for (name, function) in ["dispatched", "scalar", "avx2", "avx512"].iter().zip(functions()) {
                let started = std::time::Instant::now();
                let rounds = 200_000;
                for _ in 0..rounds {
                    std::hint::black_box(function(std::hint::black_box(&a), std::hint::black_box(&b)));
                }
                let nanos = started.elapsed().as_nanos() as f64 / f64::from(rounds);
                println!("{length} blocks, {name}: {nanos:.1} ns, {:.2} ns/block", nanos / length as f64);
            }
        }
    }

    #[test]
    fn vector_and_scalar_agree_on_every_kind_of_mask() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
        let mut masks = vec![0, u64::MAX, 1, 1 << 63];
        masks.extend((0..500).map(|_| rng.random::<u64>() & rng.random::<u64>()));
        masks.extend((0..64).map(|at| u64::MAX << at));
        for mask in masks {
            let mut expected = [7; WORD_HOLDERS];
            let mut found = expected;
            record_scalar(&mut expected, mask, 99);
            record(&mut found, mask, 99);
            assert_eq!(found, expected, "{mask:#x}");
        }
    }
}
