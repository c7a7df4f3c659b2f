//! Which twin hashes: asked once, of the processor.

#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "a twin runs on processors that have its instructions")
)]

use super::blocks::Blocks;
use super::keys::Keys;
use super::scalar;
use crate::ids::LocalHash;
use crate::simd::SimdLevel;

/// The twins, the widest last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Twin {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Twin {
    /// Every twin that this processor can run.
    #[cfg(test)]
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let twins = [
            (Self::Scalar, true),
            #[cfg(target_arch = "x86_64")]
            (Self::Avx2, SimdLevel::here() >= SimdLevel::Avx2),
            #[cfg(target_arch = "x86_64")]
            (Self::Avx512, SimdLevel::here() >= SimdLevel::Avx512Ifma),
        ];
        twins.into_iter().filter(|(_, here)| *here).map(|(twin, _)| twin)
    }

    /// The one to use here.
    pub(super) fn here() -> Self {
        match SimdLevel::here() {
            // The first processors with AVX-512 have no products of 52 bits. They also lower their clock for wide
            // registers, and are better served by AVX2.
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512Ifma => Self::Avx512,
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 | SimdLevel::Avx2 => Self::Avx2,
            _ => Self::Scalar,
        }
    }

    /// Writes the hash of each block to `out`, which is as long as there are blocks. Only of a twin that runs here.
    #[inline]
    pub(super) fn hash_blocks(self, blocks: Blocks<'_>, keys: &Keys, out: &mut [LocalHash]) {
        assert_eq!(blocks.count(), out.len(), "a hash for each block");
        match self {
            Self::Scalar => scalar::hash_blocks(blocks, keys, out),
            // SAFETY: `here` and `all` give this twin, and nothing else makes one, only where these instructions are.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { super::avx2::hash_blocks(blocks, keys, out) },
            // SAFETY: as for AVX2.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { super::avx512::hash_blocks(blocks, keys, out) },
        }
    }
}
