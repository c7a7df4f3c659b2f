//! The image of the bookings: what a restart keeps of them, and of the sessions and bindings beside them.
//!
//! ```text
//! write   load::Loads::keep, route::AffinityTable::keep → writer → format::Encoder → store
//! read    store → format::decode_bookings → load::Loads::restore, route::AffinityTable::restore
//! ```
//!
//! [`BookingsWriter`] writes an image every `snapshot.bookings_image_ms` while bookings or bindings change, and one more
//! when the daemon has answered its last request. An image goes to one of two places ([`BookingsStore`]): memory files that
//! the service manager keeps while no daemon runs, or a file beside the snapshots, which also gets some of the others. The
//! last whole image outlives a crash at any moment: of two memory files the other one is written, and the file is renamed.
//!
//! Images are numbered. A start reads all it finds and takes the one with the highest number. An image that cannot be used
//! costs the bookings in it, and nothing else: it is removed, and the daemon starts as one that has never run.

mod format;
mod store;
#[cfg(test)]
mod tests;
mod writer;

pub use format::{Encoder, decode_bookings, encode_bookings};
pub use store::{BookingsStore, Found, read_file as read_bookings};
pub use writer::{BookingsPlan, BookingsWriter};

use crate::load::KeptLoads;
use crate::requests::Identity;
use crate::route::KeptBinding;

/// What one image holds.
#[derive(Clone, Debug, PartialEq)]
pub struct BookingsImage {
    /// The facts about all of it.
    pub facts: ImageFacts,
    /// Bookings, sessions and workers.
    pub loads: KeptLoads,
    /// Bindings of affinity sessions.
    pub bindings: Vec<KeptBinding>,
}

/// The facts about an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageFacts {
    /// Higher than that of the image before, also if an earlier run wrote that.
    pub number: u64,
    /// The identity of the daemon.
    pub identity: Identity,
    /// When the first slice was taken.
    pub taken: ImageTime,
    /// The spaces by their number: a hash of their names.
    pub spaces: Vec<u128>,
}

/// A time that can be compared after a restart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageTime {
    /// The kernel's random id of the time since it booted; 0 = unknown.
    pub boot: u128,
    /// Nanoseconds since it booted.
    pub since_boot_ns: u64,
    /// Milliseconds of Unix time.
    pub unix_ms: u64,
}

impl ImageTime {
    /// Nanoseconds from this time to a later one. A jump of the wall clock does not count unless the machine has booted in
    /// between. A time in the future counts as now.
    #[must_use]
    pub const fn until_ns(self, later: Self) -> u64 {
        if self.boot != 0 && self.boot == later.boot {
            return later.since_boot_ns.saturating_sub(self.since_boot_ns);
        }
        later.unix_ms.saturating_sub(self.unix_ms).saturating_mul(1_000_000)
    }
}
