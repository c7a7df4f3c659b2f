//! Several routers that serve one fleet tell each other their load.
//!
//! Each router hears every engine, so the index needs no copy of another. Only a router itself knows its bookings. It
//! therefore sends, for each worker whose bookings changed, the worker's [`Gauge`]: what the router's own bookings add
//! to that worker now. Another router keeps the gauges of each sender, its *origin*, apart, and adds them to its own
//! load.
//!
//! **Why gauges and not bookings.** A gauge replaces the one before it, so a lost or repeated message cannot leave a booking
//! behind that has ended. Its size depends on the number of workers, not of bookings. Booking, prefill, output, and the
//! end of a request all show in it. Nothing about prompts leaves the router.
//!
//! ```text
//!  changed workers ─▶ publisher ─ batches, heartbeats ─▶ carrier ─▶ origins ─▶ effects: set a gauge, drop an origin
//!                         ▲                                           │
//!                         └──────── request for a snapshot ◀──────────┘ joining, a gap, another digest
//! ```
//!
//! * [`protocol`] encodes and decodes messages, and authenticates them.
//! * [`Publisher`] makes the messages of this router.
//! * [`Origins`] has one state machine for each other router ([`OriginPhase`] has its table).
//! * [`Digest`] shows whether two routers hold the same gauges.
//!
//! * A [`Carrier`] brings messages to other routers and from them: [`ZeroMq`], or `Nats` with the feature `nats`.
//! * [`Exchange`] joins these with the loads, on a thread of the daemon.
//!
//! All but the last two are pure: time, randomness and bytes are arguments, and a caller applies the [`Effect`]s. Times are
//! milliseconds of a monotonic clock of one's own; clocks of two machines are never compared.
//!
//! **What is believed.** Every message carries a MAC. An incarnation (one run of an origin) counts as live only after it has
//! answered a request with a fresh nonce. Within it, sequence numbers and heartbeats only go up. A recording of an old
//! stream therefore changes nothing, however old it is: there is no replay window.

mod assembly;
mod backoff;
mod carrier;
mod digest;
mod effects;
mod exchange;
mod gauges;
mod mac;
#[cfg(feature = "nats")]
mod nats;
mod origin;
mod origins;
pub mod protocol;
mod publisher;
mod shared_bindings;
mod shared_loads;
mod values;
mod view;
mod zeromq;

pub use carrier::{Arrived, Asker, Carrier, CarrierCounts, Link, Source};
pub use digest::Digest;
pub use effects::{Effect, Notice, QuarantineReason};
pub use exchange::{Exchange, ExchangeSettings, SharedTables, opening};
pub use mac::{Keys, ShortSecret};
#[cfg(feature = "nats")]
pub use nats::{Nats, NatsPlan};
pub use origin::OriginPhase;
pub use origins::{OriginLoad, OriginSettings, OriginStatus, Origins};
pub use publisher::{AnswerRefusal, Publisher, PublisherSettings};
pub use values::{Binding, Fingerprint, Gauge, Incarnation, Nonce, OriginId, Sender, SessionName, WorkerGauge};
pub use view::{Joining, LinkShown, OwnShown, RoutersShown, RoutersView};
pub use zeromq::{WantedPeers, ZeroMq};

#[cfg(test)]
mod tests;
