//! How a journal file is framed. All numbers are little-endian.
//!
//! ```text
//! head     magic: [u8; 8]   version: u32   head_bytes: u32   head: JSON   checksum: u64
//! record*  body_bytes: u32  checksum: u64  body: kind: u8, values
//! ```
//!
//! The JSON says who wrote the file and which values a record has, in which order. The values themselves are numbers
//! of a variable number of bytes. A checksum is the XXH3-64 of the body before or after it, its seed the record's place in the
//! file, so that records cannot be lost, repeated or exchanged unseen. It guards against disks and accidents, not
//! against an adversary.
//!
//! A file whose last record is cut off was being written when its writer died: all before it is good.

use serde::{Deserialize, Serialize};

use super::columns::{self, names};
use crate::route::Rule;

pub(super) const MAGIC: [u8; 8] = *b"KVRDJRNL";
/// The version of the framing. It moves when the framing does; values may come and go without.
pub(super) const VERSION: u32 = 1;
pub(super) const PREAMBLE_BYTES: usize = 16;
pub(super) const CHECKSUM_BYTES: usize = 8;
pub(super) const RECORD_HEAD_BYTES: usize = 4 + CHECKSUM_BYTES;

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum RecordKind {
    /// The policy of a space from here on.
    Policy = 1,
    /// A decision.
    Decision = 2,
    /// Decisions of a core that are not here because too many waited to be written.
    Gap = 3,
    /// The file ends as its writer meant it to.
    End = 4,
}

impl RecordKind {
    pub(super) const fn from_u8(value: u8) -> Option<Self> {
        match value {
            1 => Some(Self::Policy),
            2 => Some(Self::Decision),
            3 => Some(Self::Gap),
            4 => Some(Self::End),
            _ => None,
        }
    }
}

/// The checksum of a record; `place` counts the records of a file.
pub(super) fn checksum(place: u64, body: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64_with_seed(body, place)
}

/// A space as a journal names it; decisions have its place in the list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceLabel {
    /// The model.
    pub model: String,
    /// What else separates it; empty = the default namespace.
    pub namespace: String,
    /// Which pool it is: `both`, `prefill` or `decode`.
    pub role: String,
}

/// Who wrote a file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// The release of the daemon.
    pub release: String,
    /// Drawn when the daemon started.
    pub instance_id: u64,
    /// When it started, milliseconds since 1970.
    pub started_unix_ms: u64,
    /// The share of decisions that were to be written, 0 to 1.
    pub sample: f64,
    /// Its spaces.
    pub spaces: Vec<SpaceLabel>,
}

/// The names of the values, in the order in which they are written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Columns {
    pub(super) policy: Vec<String>,
    pub(super) record: Vec<String>,
    /// Files name it `asked`.
    #[serde(rename = "asked")]
    pub(super) request: Vec<String>,
    pub(super) worker: Vec<String>,
    pub(super) listed: Vec<String>,
    pub(super) removed: Vec<String>,
    /// What the numbers of rules mean.
    pub(super) rules: Vec<String>,
}

impl Columns {
    /// Those of this release.
    pub(super) fn ours() -> Self {
        Self {
            policy: names(columns::POLICY),
            record: names(columns::RECORD),
            request: names(columns::REQUEST),
            worker: names(columns::WORKER),
            listed: names(columns::LISTED),
            removed: names(columns::REMOVED),
            rules: Rule::ALL.iter().map(|rule| rule.name().to_owned()).collect(),
        }
    }
}

/// The head of a file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Head {
    pub(super) origin: Origin,
    pub(super) columns: Columns,
}
