//! What a block costs without a socket: decoded, decoded and hashed, and taken into the index.

use std::hint::black_box;
use std::time::Instant;

use kvrouted::event::format::Format;
use kvrouted::event::{self, Content, EventBatch, KvEvent};
use kvrouted::hash;
use kvrouted::ids::{EventSeq, LocalHash, Worker};
use kvrouted::index::ShardLimits;
use kvrouted::ingest::Feed;
use serde::Serialize;

use super::frames::{SCHEME, Shape};
use super::peer;
use crate::args::Wire;
use crate::failure::Failure;

/// Blocks of one pass: what a cache holds, so that nothing is removed.
const BLOCKS: u64 = 32_768;
/// Passes over the same messages, of which the quickest counts: others were disturbed.
const PASSES: usize = 9;

/// Nanoseconds for each block of 16 tokens.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct BlockNs {
    /// Decoded.
    pub(crate) decode: f64,
    /// Decoded and hashed.
    pub(crate) with_hashing: f64,
    /// Everything that an ingest thread does after the socket.
    pub(crate) with_index: f64,
    /// The peer's decoding, where it knows the format.
    pub(crate) peer_decode: Option<f64>,
    /// The peer's decoding and hashing.
    pub(crate) peer_with_hashing: Option<f64>,
}

/// Measures messages of so many blocks.
///
/// # Errors
/// Something does not decode.
pub(crate) fn measure(wire: Wire, blocks: u32) -> Result<BlockNs, Failure> {
    let shape = Shape { wire, blocks, messages: BLOCKS / u64::from(blocks) };
    let payloads: Vec<Vec<u8>> = shape.payloads().collect();
    let count = shape.messages * u64::from(blocks);
    let mut batch = EventBatch::new();
    let mut format: Option<Format> = None;
    let mut locals = Vec::new();
    let decode = best_ns(count, || {
        for payload in &payloads {
            decoded(payload, &mut format, &mut batch)?;
            black_box(batch.blocks());
        }
        Ok(())
    })?;
    let with_hashing = best_ns(count, || {
        for payload in &payloads {
            decoded(payload, &mut format, &mut batch)?;
            hashed(&batch, &mut locals);
        }
        Ok(())
    })?;
    let with_index = best_ns(count, || {
        let (mut feed, reader) = Feed::new(Worker::new(1, 0), None, true, ShardLimits::default());
        for (seq, payload) in payloads.iter().enumerate() {
            feed.message(EventSeq(seq as u64), payload);
        }
        black_box(reader);
        Ok(())
    })?;
    let (mut peer_decode, mut peer_with_hashing) = (None, None);
    if wire == Wire::Msgpack {
        peer_decode = Some(best_ns(count, || {
            for payload in &payloads {
                let batch = dynamo_kv_router::zmq_wire::decode_event_batch(payload);
                black_box(batch.map_err(|error| Failure::Peer(error.to_string()))?);
            }
            Ok(())
        })?);
        peer_with_hashing = Some(best_ns(count, || {
            let mut normalizer = peer::normalizer();
            for (seq, payload) in payloads.iter().enumerate() {
                black_box(peer::events(&mut normalizer, seq as u64, payload)?);
            }
            Ok(())
        })?);
    }
    Ok(BlockNs { decode, with_hashing, with_index, peer_decode, peer_with_hashing })
}

fn decoded(payload: &[u8], format: &mut Option<Format>, batch: &mut EventBatch) -> Result<(), Failure> {
    event::decode(black_box(payload), format, batch).map_err(|error| Failure::Contract(error.to_string()))
}

fn hashed(batch: &EventBatch, locals: &mut Vec<LocalHash>) {
    for event in batch.events() {
        if let KvEvent::Stored(stored) = event
            && let Content::Tokens { tokens, .. } = stored.content
        {
            let seed = hash::seed(stored.lora, None);
            hash::local_hashes(SCHEME, seed, hash::token_bytes(tokens), stored.media, locals);
            black_box(locals.len());
        }
    }
}

fn best_ns(blocks: u64, mut pass: impl FnMut() -> Result<(), Failure>) -> Result<f64, Failure> {
    let mut best = f64::INFINITY;
    for _ in 0..PASSES {
        let start = Instant::now();
        pass()?;
        best = best.min(start.elapsed().as_nanos() as f64 / blocks as f64);
    }
    Ok(best)
}
