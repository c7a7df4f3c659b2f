//! Which vector instructions this x86-64 processor has: detected once, for all modules with vector forms of their
//! functions. (On other processors there is nothing to detect: each processor of the aarch64 target has NEON.)
//!
//! A module maps the level to the forms that it has, and calls a `#[target_feature]` function only at a level that
//! includes its features. (`event::msgpack` and `route` use a crate that detects features itself, and needs a token of that
//! crate for each call.)

use std::sync::atomic::{AtomicU8, Ordering};

/// Vector instructions, each level with those of the levels before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
#[cfg_attr(miri, expect(dead_code, reason = "only the scalar functions run under miri"))]
pub(crate) enum SimdLevel {
    /// None that the code can rely on.
    Scalar = 1,
    /// AVX2 and BMI2.
    Avx2,
    /// AVX-512F.
    Avx512,
    /// AVX-512BW, DQ, VL and IFMA: BW has elements of 16 bits, IFMA has products of 52 bits, and VL gives AVX-512
    /// instructions to narrower registers.
    Avx512Ifma,
}

const UNKNOWN: u8 = 0;
static LEVEL: AtomicU8 = AtomicU8::new(UNKNOWN);

impl SimdLevel {
    /// The level of this processor.
    #[inline]
    pub(crate) fn here() -> Self {
        // Relaxed, as the store in `detect`: the number publishes nothing else, and a thread that does not see it yet
        // detects the same.
        match LEVEL.load(Ordering::Relaxed) {
            4 => Self::Avx512Ifma,
            3 => Self::Avx512,
            2 => Self::Avx2,
            1 => Self::Scalar,
            _ => Self::detect(),
        }
    }

    #[cold]
    fn detect() -> Self {
        let level = Self::of_processor();
        // Relaxed: see `here`, which loads it.
        LEVEL.store(level as u8, Ordering::Relaxed);
        level
    }

    #[cfg(not(miri))]
    fn of_processor() -> Self {
        if !is_x86_feature_detected!("avx2") || !is_x86_feature_detected!("bmi2") {
            Self::Scalar
        } else if !is_x86_feature_detected!("avx512f") {
            Self::Avx2
        } else if is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512ifma")
        {
            Self::Avx512Ifma
        } else {
            Self::Avx512
        }
    }

    #[cfg(miri)]
    fn of_processor() -> Self {
        Self::Scalar
    }
}

#[cfg(test)]
mod tests {
    use super::SimdLevel;

    #[test]
    fn the_level_is_detected_once_and_stays() {
        assert_eq!(SimdLevel::here(), SimdLevel::of_processor());
        assert_eq!(SimdLevel::here(), SimdLevel::of_processor(), "the stored number is that of the level");
        assert!(SimdLevel::Scalar < SimdLevel::Avx2 && SimdLevel::Avx512 < SimdLevel::Avx512Ifma);
    }
}
