//! What the daemon's framed files share: how they begin, and their checksums. Journals and snapshots are such files;
//! the `format` module of each describes the rest.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The length of [`Preamble::to_bytes`].
pub(crate) const PREAMBLE_BYTES: usize = 16;

/// The first bytes of a file. All numbers are little-endian.
///
/// ```text
/// magic: [u8; 8]   version: u32   extra: u32
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Preamble {
    /// Names the kind of file.
    pub(crate) magic: [u8; 8],
    /// The version of the framing.
    pub(crate) version: u32,
    /// Each kind of file defines its meaning.
    pub(crate) extra: u32,
}

impl Preamble {
    pub(crate) fn to_bytes(self) -> [u8; PREAMBLE_BYTES] {
        let mut bytes = [0; PREAMBLE_BYTES];
        bytes[..8].copy_from_slice(&self.magic);
        bytes[8..12].copy_from_slice(&self.version.to_le_bytes());
        bytes[12..].copy_from_slice(&self.extra.to_le_bytes());
        bytes
    }

    pub(crate) const fn from_bytes(bytes: &[u8; PREAMBLE_BYTES]) -> Self {
        let [m0, m1, m2, m3, m4, m5, m6, m7, v0, v1, v2, v3, e0, e1, e2, e3] = *bytes;
        Self {
            magic: [m0, m1, m2, m3, m4, m5, m6, m7],
            version: u32::from_le_bytes([v0, v1, v2, v3]),
            extra: u32::from_le_bytes([e0, e1, e2, e3]),
        }
    }
}

/// The checksum of one frame: the XXH3-64 of its body. The seed binds the body to its kind or position, so that frames
/// cannot be exchanged unnoticed. It guards against disks and accidents, not against an adversary.
pub(crate) fn checksum(seed: u64, body: &[u8]) -> u64 {
    xxh3_64_with_seed(body, seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preamble_is_read_as_it_was_written() {
        let preamble = Preamble { magic: *b"KVRDTEST", version: 0x0403_0201, extra: 7 };
        let bytes = preamble.to_bytes();
        assert_eq!(bytes, *b"KVRDTEST\x01\x02\x03\x04\x07\0\0\0");
        assert_eq!(Preamble::from_bytes(&bytes), preamble);
    }
}
