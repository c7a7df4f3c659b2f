//! Our own wire, `schemas/kv_events.fbs`: what a relay beside an engine sends.
//!
//! A payload is verified before a byte of it is believed, at any alignment. What several events share
//! (flatbuffers may point to one vector from many places) is bounded by the batch's limits and by
//! the verifier's bound on the apparent size.

use crate::ids::EventSeq;

mod decode;
mod encode;

pub use decode::decode;
pub use encode::Encoder;

/// Stands in the sequence's frame of what is no batch of a relay's stream: heartbeats and parts of snapshots.
/// Engines end a replay with it and an empty payload.
pub const UNNUMBERED: EventSeq = EventSeq(u64::MAX);

#[cfg(test)]
mod tests;
