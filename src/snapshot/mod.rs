//! Snapshots: each worker's blocks in a file, so that a restarted daemon knows them at once.
//!
//! ```text
//! write   ingest dump → keeper → format::Encoder → partial file → fsync → rename
//! read    file → format::Decoder: every checksum, the worker's identity → ingest load → unproven until a replay
//! ```
//!
//! A snapshot is a dump ([`crate::ingest::DumpPart`]) with the worker's name. [`Keeper`] takes and writes snapshots,
//! one worker at a time, and only of workers that have changed. Only the worker's own messages wait for a dump, within
//! the limits of every dump. When the daemon starts, and when a worker joins later, [`check`] reads each file to its
//! end. [`Restore`] feeds the good files to their workers before these take their first message.
//!
//! Losing a snapshot is safe, and a snapshot alone is never believed. It says what an engine held when it was taken.
//! Only the engine's later events can show which of those blocks it still holds. A worker without a replay endpoint is
//! therefore not restored. A worker with one is `unproven` until the engine has sent again the payloads that the
//! snapshot remembers.
//!
//! What was learnt of the workers' prefill times is in a file of its own (`laws`), written and read at the same times. It
//! needs no proof: it loses certainty with age, and what comes corrects it.
//!
//! What a restart keeps of bookings is in an image of its own (`bookings`), which is written more often.
//!
//! A file that is damaged, cut off or of another worker is refused with a reason ([`Refusal`]). Its worker starts
//! empty.

mod bookings;
mod directory;
mod format;
mod keeper;
mod laws;
mod passed;
mod restore;
mod stats;

#[cfg(test)]
mod tests;

pub use bookings::{
    BookingsImage, BookingsPlan, BookingsStore, BookingsWriter, Encoder as BookingsEncoder, Found as FoundBookings,
    ImageFacts, ImageTime, decode_bookings, encode_bookings, read_bookings,
};
pub use directory::Directory;
pub use format::{Encoder, Header, SpaceName, decode};
pub use keeper::{AskDump, AskLaws, Keeper, KeeperPlan};
pub use laws::{decode_laws, encode_laws, read_laws};
pub use passed::{feed_dump, write_dump};
pub use restore::{Checked, Expected, Restore, check, refuse_unread};
pub use stats::{Fault, Refusal, SnapshotStats};
