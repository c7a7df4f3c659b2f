//! Which twin hashes: asked once, of the processor.

#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "a twin runs on processors that have its instructions")
)]

use super::blocks::Blocks;
use super::keys::Keys;
use super::scalar;
use crate::ids::LocalHash;
use std::sync::OnceLock;

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
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let twins = [
            (Self::Scalar, true),
            #[cfg(target_arch = "x86_64")]
            (Self::Avx2, has_avx2()),
            #[cfg(target_arch = "x86_64")]
            (Self::Avx512, has_avx512()),
        ];
        twins.into_iter().filter(|(_, here)| *here).map(|(twin, _)| twin)
    }

    /// The one to use here.
    pub(super) fn here() -> Self {
        static HERE: OnceLock<Twin> = OnceLock::new();
        *HERE.get_or_init(|| Self::all().last().unwrap_or(Self::Scalar))
    }

    /// Writes the hash of each block to `out`, which is as long as there are blocks. Only of a twin that runs here.
    #[inline]
    pub(super) fn hash_blocks(self, blocks: Blocks<'_>, keys: &Keys, out: &mut [LocalHash]) {
        assert_eq!(blocks.count(), out.len(), "a hash for each block");
        match self {
            Self::Scalar => scalar::hash_blocks(blocks, keys, out),
            // SAFETY: `all` gives this twin, and nothing else makes one, only where these instructions are.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { super::avx2::hash_blocks(blocks, keys, out) },
            // SAFETY: as for AVX2.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { super::avx512::hash_blocks(blocks, keys, out) },
        }
    }
}

/// Miri runs the scalar twin.
#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    !cfg!(miri) && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi2")
}

/// The first processors with AVX-512 have no products of 52 bits; they lower their clock for wide registers, too, and are
/// better served by AVX2.
#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512ifma")
}
