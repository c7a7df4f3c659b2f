//! The peer's decoder and index behind the socket of `floor`: its own listener is an async task around the same calls.

use std::time::Instant;

use dynamo_kv_router::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::{KvIndexerInterface, ThreadPoolIndexer};
use dynamo_kv_router::protocols::{RouterEvent, WorkerWithDpRank};
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};

use super::floor::{Taken, receive, subscribe};
use super::frames::BLOCK_SIZE;
use super::sender::Sender;
use crate::failure::Failure;

const WORKER: u64 = 1;

/// Decodes a payload into the events that its index takes, hashes included.
///
/// # Errors
/// The peer cannot decode it.
pub(crate) fn events(
    normalizer: &mut ZmqEventNormalizer,
    seq: u64,
    payload: &[u8],
) -> Result<Vec<RouterEvent>, Failure> {
    let batch = decode_event_batch(payload).map_err(|error| Failure::Peer(error.to_string()))?;
    let worker = WorkerWithDpRank::new(WORKER, 0);
    let normal = batch.events.into_iter().filter_map(|raw| normalizer.normalize(raw, seq, worker));
    Ok(normal.filter_map(|placed| placed.into_router_event()).collect())
}

/// A normaliser for these frames.
#[must_use]
pub(crate) fn normalizer() -> ZmqEventNormalizer {
    ZmqEventNormalizer::new(BLOCK_SIZE)
}

/// Takes everything in: one thread receives, decodes and hashes, another applies.
///
/// # Errors
/// Those of libzmq, of the sender and of the peer.
pub(crate) fn measure(mut sender: Sender, messages: u64) -> Result<Taken, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let runtime = runtime.map_err(Failure::system("start a runtime for the peer"))?;
    let index = ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), 1, BLOCK_SIZE);
    let mut normalizer = normalizer();
    let context = zmq::Context::new();
    let socket = subscribe(&context, &sender.endpoint)?;
    sender.go()?;
    let mut taken = receive(&socket, messages, |seq, payload| {
        for event in events(&mut normalizer, seq, payload)? {
            runtime.block_on(index.apply_event(event));
        }
        Ok(())
    })?;
    let behind = Instant::now();
    runtime.block_on(index.flush_and_wait()).map_err(|error| Failure::Peer(error.to_string()))?;
    taken.seconds += behind.elapsed().as_secs_f64();
    Ok(taken)
}
