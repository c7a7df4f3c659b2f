//! What a restart of the daemon need not forget: each worker's blocks in a file.
//!
//! ```text
//! write   ingest dump → keeper → encode → a file aside → fsync → rename
//! read    file → decode: every checksum, whose it is → ingest load → unproven until a replay shows the rest
//! ```
//!
//! A snapshot is a dump ([`crate::ingest::DumpPart`]) with a name on it. [`Keeper`] takes and writes them, one
//! worker at a time and only those that have changed; nothing waits for it but the worker's own messages, within
//! the bounds of every dump. At a start, and when a worker comes later, [`check`] reads each file to its end and
//! [`Restore`] feeds those that are whole to their workers before these take their first message.
//!
//! What is held here is safe to lose and never believed by itself. A snapshot says what an engine held when it was
//! taken; that the engine still holds it, less what it has removed since, only its stream can show. So a worker
//! without a replay endpoint gets nothing of it, and one with a replay endpoint is `unproven` until the engine has
//! sent again the payloads that the snapshot remembers.
//!
//! A file that is broken, cut, or of somebody else is refused by name ([`Refusal`]) and costs the warmth of its
//! worker.

mod decode;
mod directory;
mod encode;
mod format;
mod keeper;
mod refusal;
mod restore;
mod stats;

#[cfg(test)]
mod tests;

pub use decode::{Decoder, Part, decode};
pub use directory::Directory;
pub use encode::Encoder;
pub use format::{Header, SpaceName};
pub use keeper::{AskDump, Keeper, KeeperPlan};
pub use refusal::{Fault, Refusal};
pub use restore::{Checked, Expected, Restore, check};
pub use stats::SnapshotStats;
