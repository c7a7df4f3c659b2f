//! Picks the implementation: on x86-64 scalar, AVX2 or AVX-512, once, by CPUID; on aarch64 NEON.

#![cfg_attr(
    any(target_arch = "x86_64", all(target_arch = "aarch64", not(miri))),
    expect(unsafe_code, reason = "vector code needs a processor with its instructions")
)]

use super::blocks::Blocks;
use super::keys::Keys;
use super::scalar;
use crate::ids::LocalHash;
#[cfg(target_arch = "x86_64")]
use crate::simd::SimdLevel;

/// The implementations, by their instruction set; the widest last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Isa {
    #[cfg_attr(
        all(target_arch = "aarch64", not(any(miri, test))),
        expect(dead_code, reason = "each processor of this target has NEON; tests compare it with this reference")
    )]
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    Neon,
}

impl Isa {
    /// Every implementation that this processor can run.
    #[cfg(test)]
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let isas = [
            (Self::Scalar, true),
            #[cfg(target_arch = "x86_64")]
            (Self::Avx2, SimdLevel::here() >= SimdLevel::Avx2),
            #[cfg(target_arch = "x86_64")]
            (Self::Avx512, SimdLevel::here() >= SimdLevel::Avx512Ifma),
            #[cfg(all(target_arch = "aarch64", not(miri)))]
            (Self::Neon, true),
        ];
        isas.into_iter().filter(|(_, is_supported)| *is_supported).map(|(isa, _)| isa)
    }

    /// The fastest implementation on this processor.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn best() -> Self {
        match SimdLevel::here() {
            // The first processors with AVX-512 have no products of 52 bits. They also lower their clock for wide
            // registers, so AVX2 is faster on them.
            SimdLevel::Avx512Ifma => Self::Avx512,
            SimdLevel::Avx512 | SimdLevel::Avx2 => Self::Avx2,
            SimdLevel::Scalar => Self::Scalar,
        }
    }

    /// The fastest implementation on this processor. The target's own code uses NEON, so there is nothing to detect.
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    pub(super) fn best() -> Self {
        Self::Neon
    }

    /// There is one implementation here.
    #[cfg(not(any(target_arch = "x86_64", all(target_arch = "aarch64", not(miri)))))]
    pub(super) fn best() -> Self {
        Self::Scalar
    }

    /// Writes the hash of each block to `out`, which has one element for each block.
    #[inline]
    pub(super) fn hash_blocks(self, blocks: Blocks<'_>, keys: &Keys, out: &mut [LocalHash]) {
        assert_eq!(blocks.count(), out.len(), "a hash for each block");
        match self {
            Self::Scalar => scalar::hash_blocks(blocks, keys, out),
            // SAFETY: `all` and `best` make this value, and only if the processor has these instructions.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { super::avx2::hash_blocks(blocks, keys, out) },
            // SAFETY: as for AVX2.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { super::avx512::hash_blocks(blocks, keys, out) },
            // SAFETY: each processor of the target has NEON: its calling convention passes numbers in those registers.
            #[cfg(all(target_arch = "aarch64", not(miri)))]
            Self::Neon => unsafe { super::neon::hash_blocks(blocks, keys, out) },
        }
    }
}
