//! Our own wire, `schemas/kv_events.fbs`: what a relay beside an engine sends.
//!
//! A payload is verified before a byte of it is believed, at any alignment. What several events share
//! (flatbuffers may point to one vector from many places) is bounded by the batch's limits and by
//! the verifier's bound on the apparent size.

mod decode;
mod encode;

pub use decode::decode;
pub use encode::Encoder;

#[cfg(test)]
mod tests;
