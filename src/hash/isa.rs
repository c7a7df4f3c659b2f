//! Picks the implementation once, by CPUID: scalar, AVX2 or AVX-512.

#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "vector code needs a processor with its instructions")
)]

use super::blocks::Blocks;
use super::keys::Keys;
use super::scalar;
use crate::ids::LocalHash;
use std::sync::OnceLock;

/// The implementations, by their instruction set; the widest last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Isa {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// Every implementation that this processor can run.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let isas = [
            (Self::Scalar, true),
            #[cfg(target_arch = "x86_64")]
            (Self::Avx2, has_avx2()),
            #[cfg(target_arch = "x86_64")]
            (Self::Avx512, has_avx512()),
        ];
        isas.into_iter().filter(|(_, is_supported)| *is_supported).map(|(isa, _)| isa)
    }

    /// The widest implementation that this processor can run.
    pub(super) fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::all().last().unwrap_or(Self::Scalar))
    }

    /// Writes the hash of each block to `out`, which has one element for each block.
    #[inline]
    pub(super) fn hash_blocks(self, blocks: Blocks<'_>, keys: &Keys, out: &mut [LocalHash]) {
        assert_eq!(blocks.count(), out.len(), "a hash for each block");
        match self {
            Self::Scalar => scalar::hash_blocks(blocks, keys, out),
            // SAFETY: only `all` makes this value, and only if the processor has these instructions.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { super::avx2::hash_blocks(blocks, keys, out) },
            // SAFETY: as for AVX2.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { super::avx512::hash_blocks(blocks, keys, out) },
        }
    }
}

/// Miri runs the scalar reference.
#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    !cfg!(miri) && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi2")
}

/// The first processors with AVX-512 have no products of 52 bits. They also lower their clock for wide registers, so AVX2 is
/// faster on them.
#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512ifma")
}
