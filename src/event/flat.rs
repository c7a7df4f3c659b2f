//! kvrouted's own event format, `schemas/kv_events.fbs`, which relays publish.
//!
//! A payload is verified before any byte of it is used, at any alignment. Flatbuffers may point to one vector from many
//! places. The batch's limits, and the verifier's limit on the apparent size, bound vectors that several events share.

use crate::ids::EventSeq;

mod decode;
mod encode;

pub use decode::decode;
pub use encode::Encoder;

/// The sequence number in messages that are not batches of a relay's stream: heartbeats and parts of snapshots. Engines
/// end a replay with it and an empty payload.
pub const UNNUMBERED: EventSeq = EventSeq(u64::MAX);

#[cfg(test)]
mod tests;
