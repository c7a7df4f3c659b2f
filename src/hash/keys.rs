//! What a seed makes of XXH3's secret: computed once for all blocks of a prompt.

use xxhash_rust::const_xxh3::const_custom_default_secret;

/// Bytes of the secret.
pub(super) const SECRET_BYTES: usize = 192;
/// The secret of seed 0.
const SECRET: [u8; SECRET_BYTES] = const_custom_default_secret(0);

/// A seed and its secret: each 16 bytes of the plain secret, a word plus the seed and a word minus the seed.
///
/// The short lengths of XXH3 add the seed to words of the plain secret instead. At multiples of 16 bytes, where all
/// of their words are but for a few, that gives the words of this secret.
#[repr(align(64))]
pub(super) struct Keys {
    secret: [u8; SECRET_BYTES],
    seed: u64,
}

impl Keys {
    /// The keys of a seed.
    pub(super) fn new(seed: u64) -> Self {
        let mut secret = [0; SECRET_BYTES];
        for at in (0..SECRET_BYTES).step_by(16) {
            secret[at..at + 8].copy_from_slice(&Self::plain(at).wrapping_add(seed).to_le_bytes());
            secret[at + 8..at + 16].copy_from_slice(&Self::plain(at + 8).wrapping_sub(seed).to_le_bytes());
        }
        Self { secret, seed }
    }

    /// The seed itself.
    #[inline(always)]
    pub(super) fn seed(&self) -> u64 {
        self.seed
    }

    /// The seed's secret.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn secret(&self) -> &[u8; SECRET_BYTES] {
        &self.secret
    }

    /// The word at a byte of the seed's secret.
    #[inline(always)]
    pub(super) fn word(&self, at: usize) -> u64 {
        word(&self.secret, at)
    }

    /// The word at a byte of the secret of seed 0.
    #[inline(always)]
    pub(super) fn plain(at: usize) -> u64 {
        word(&SECRET, at)
    }
}

/// The little-endian u64 at a byte.
#[inline(always)]
pub(super) fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// The little-endian u32 at a byte.
#[inline(always)]
pub(super) fn half_word(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}
