//! What the schema compiler wrote, included once and exempt from the lints and formatting that hold
//! elsewhere. `scripts/gen-schemas` writes the files; `tests/tidy/schemas.rs` fails when they are stale.

#[cfg(feature = "daemon")]
#[allow(warnings, clippy::all, clippy::pedantic, clippy::restriction, unsafe_code, missing_docs, unreachable_pub)]
#[rustfmt::skip]
mod kv_events_generated;
#[cfg(feature = "daemon")]
#[allow(warnings, clippy::all, clippy::pedantic, clippy::restriction, unsafe_code, missing_docs, unreachable_pub)]
#[rustfmt::skip]
mod load_events_generated;
#[allow(warnings, clippy::all, clippy::pedantic, clippy::restriction, unsafe_code, missing_docs, unreachable_pub)]
#[rustfmt::skip]
mod routing_generated;
#[cfg(feature = "daemon")]
#[allow(warnings, clippy::all, clippy::pedantic, clippy::restriction, unsafe_code, missing_docs, unreachable_pub)]
#[rustfmt::skip]
mod snapshot_generated;

/// `schemas/kv_events.fbs`: what a worker says.
#[cfg(feature = "daemon")]
pub mod events {
    pub use super::kv_events_generated::kvrouted::events::*;
}

/// `schemas/load_events.fbs`: what routers say to each other.
#[cfg(feature = "daemon")]
pub mod load_events {
    pub use super::load_events_generated::kvrouted::load_events::*;
}

/// `schemas/routing.fbs`: what a gateway and the daemon say to each other.
pub mod routing {
    pub use super::routing_generated::kvrouted::routing::*;
}

/// `schemas/snapshot.fbs`: one worker's blocks in a file.
#[cfg(feature = "daemon")]
pub mod snapshot {
    pub use super::snapshot_generated::kvrouted::snapshot::*;
}
