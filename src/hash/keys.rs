//! XXH3's secret under a seed: computed once for all blocks of a prompt.

use xxhash_rust::const_xxh3::const_custom_default_secret;

/// Bytes of the secret.
pub(super) const SECRET_BYTES: usize = 192;
/// The secret of seed 0.
const SECRET: [u8; SECRET_BYTES] = const_custom_default_secret(0);

/// A seed and its secret. Of each 16 bytes of the plain secret, the seed is added to the first word and subtracted from
/// the second.
///
/// The short lengths of XXH3 add the seed to words of the plain secret instead. At multiples of 16 bytes, where nearly
/// all of their words are, that gives the words of this secret.
#[repr(align(64))]
pub(super) struct Keys {
    secret: [u8; SECRET_BYTES],
    seed: u64,
}

/// Those of seed 0.
pub(super) static PLAIN_KEYS: Keys = Keys { secret: SECRET, seed: 0 };

impl Keys {
    pub(super) fn new(seed: u64) -> Self {
        let mut secret = [0; SECRET_BYTES];
        for at in (0..SECRET_BYTES).step_by(16) {
            secret[at..at + 8].copy_from_slice(&Self::plain(at).wrapping_add(seed).to_le_bytes());
            secret[at + 8..at + 16].copy_from_slice(&Self::plain(at + 8).wrapping_sub(seed).to_le_bytes());
        }
        Self { secret, seed }
    }

    #[inline(always)]
    pub(super) fn seed(&self) -> u64 {
        self.seed
    }

    #[cfg(any(target_arch = "x86_64", all(target_arch = "aarch64", not(miri))))]
    #[inline(always)]
    pub(super) fn secret(&self) -> &[u8; SECRET_BYTES] {
        &self.secret
    }

    /// The word at an offset in the seed's secret.
    #[inline(always)]
    pub(super) fn word(&self, at: usize) -> u64 {
        word(&self.secret, at)
    }

    /// The word at an offset in the secret of seed 0.
    #[inline(always)]
    pub(super) fn plain(at: usize) -> u64 {
        word(&SECRET, at)
    }
}

/// The little-endian u64 at an offset.
#[inline(always)]
pub(super) fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// The little-endian u32 at an offset.
#[inline(always)]
pub(super) fn half_word(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}
