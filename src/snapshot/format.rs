//! How a file is framed. All numbers are little-endian.
//!
//! ```text
//! preamble   magic: [u8; 8]   version: u32   zero: u32
//! section*   body_bytes: u32  kind: u32  checksum: u64  body: [u8; body_bytes]     begin, chunk*, end
//! footer     checksum: u128
//! ```
//!
//! A section's checksum is the XXH3-64 of its body under its kind as the seed, so that nothing of a section is
//! believed before all of it was read. The footer's is the XXH3-128 of every byte before it, so that sections
//! cannot be lost, repeated or exchanged. Both guard against disks and accidents, not against an adversary: who
//! can write the directory can write a snapshot.
//!
//! The version moves with every change of this framing, of `schemas/snapshot.fbs`, or of how blocks are hashed.

use crate::fleet::PoolRole;
use crate::ids::Worker;
use crate::ingest::DumpBegin;

/// What a file begins with.
pub(super) const MAGIC: [u8; 8] = *b"KVRDSNAP";
/// The version written and read.
pub(super) const VERSION: u32 = 1;
pub(super) const PREAMBLE_BYTES: usize = 16;
pub(super) const SECTION_HEAD_BYTES: usize = 16;
pub(super) const FOOTER_BYTES: usize = 16;

/// What a section is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum SectionKind {
    Begin = 1,
    Chunk = 2,
    End = 3,
}

impl SectionKind {
    pub(super) const fn from_u32(value: u32) -> Option<Self> {
        match value {
            1 => Some(Self::Begin),
            2 => Some(Self::Chunk),
            3 => Some(Self::End),
            _ => None,
        }
    }
}

/// The checksum of a section.
pub(super) fn section_checksum(kind: SectionKind, body: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64_with_seed(body, kind as u64)
}

/// What is compared of a space: its number is of one daemon run only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpaceName {
    /// The model.
    pub model: String,
    /// What else separates it; empty = the default namespace.
    pub namespace: String,
    /// Which pool it is.
    pub role: PoolRole,
}

/// Whose blocks a snapshot holds, and what they are as of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Whose they are.
    pub worker: Worker,
    /// The space they are of.
    pub space: SpaceName,
    /// When they were taken, milliseconds of Unix time.
    pub taken_unix_ms: u64,
    /// What the dump said of itself.
    pub begin: DumpBegin,
}
