//! Writing one depth for many lanes.
//!
//! The scalar function is the specification; the vector one gives the same and is chosen as in
//! [`super::compare`].

#![cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "masked stores take raw pointers"))]

/// Lanes of a word.
pub(super) const LANES: usize = 64;

/// Writes `depth` for each of `lanes`; `out` has a place for each of a word's lanes.
#[inline]
pub(super) fn record(out: &mut [u32; LANES], lanes: u64, depth: u32) {
    // A few are quicker one by one.
    if lanes & lanes.wrapping_sub(1) == 0 {
        return record_scalar(out, lanes, depth);
    }
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if super::compare::vector::level() == super::compare::vector::Level::Avx512 {
        // SAFETY: `level` gives this only for a processor with AVX-512F.
        return unsafe { record_avx512(out, lanes, depth) };
    }
    record_scalar(out, lanes, depth);
}

fn record_scalar(out: &mut [u32; LANES], mut lanes: u64, depth: u32) {
    while lanes != 0 {
        out[lanes.trailing_zeros() as usize] = depth;
        lanes &= lanes - 1;
    }
}

#[cfg(target_arch = "x86_64")]
#[cfg_attr(miri, expect(dead_code, reason = "miri runs the scalar twin"))]
#[target_feature(enable = "avx512f")]
fn record_avx512(out: &mut [u32; LANES], lanes: u64, depth: u32) {
    use std::arch::x86_64::{_mm512_mask_storeu_epi32, _mm512_set1_epi32};
    let depths = _mm512_set1_epi32(depth.cast_signed());
    for (at, part) in out.chunks_exact_mut(16).enumerate() {
        // SAFETY: the part has 16 places, and only those of the mask are written.
        unsafe { _mm512_mask_storeu_epi32(part.as_mut_ptr().cast(), (lanes >> (at * 16)) as u16, depths) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    #[test]
    fn the_twins_agree_on_every_kind_of_mask() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
        let mut masks = vec![0, u64::MAX, 1, 1 << 63];
        masks.extend((0..500).map(|_| rng.random::<u64>() & rng.random::<u64>()));
        masks.extend((0..64).map(|at| u64::MAX << at));
        for mask in masks {
            let mut expected = [7; LANES];
            let mut found = expected;
            record_scalar(&mut expected, mask, 99);
            record(&mut found, mask, 99);
            assert_eq!(found, expected, "{mask:#x}");
        }
    }
}
