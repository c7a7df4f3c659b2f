//! A digest of a set of gauges that does not depend on their order.
//!
//! Two routers with equal digests hold equal gauges, but for an accident of one in 2^64. Messages are authenticated, so
//! the hash needs no key.

use xxhash_rust::xxh3::xxh3_64;

use super::values::Gauge;
use crate::ids::Worker;

/// Bytes of a worker and its gauge.
const ENTRY_BYTES: usize = 64;

/// The sum of a hash of each worker with its gauge, and their number. A gauge of zeros counts as none. Only the fields
/// of version 1.0 are in it, so that versions with more fields agree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digest {
    /// The sum of the hashes.
    pub sum: u64,
    /// The number of gauges.
    pub count: u32,
}

impl Digest {
    /// Adds a worker's gauge, which is not in it yet.
    pub fn add(&mut self, worker: Worker, gauge: &Gauge) {
        if !gauge.is_zero() {
            self.sum = self.sum.wrapping_add(entry_hash(worker, gauge));
            self.count += 1;
        }
    }

    /// Takes away a worker's gauge, which was added.
    pub fn remove(&mut self, worker: Worker, gauge: &Gauge) {
        if !gauge.is_zero() {
            self.sum = self.sum.wrapping_sub(entry_hash(worker, gauge));
            self.count -= 1;
        }
    }
}

fn entry_hash(worker: Worker, gauge: &Gauge) -> u64 {
    let mut bytes = [0; ENTRY_BYTES];
    let mut rest = &mut bytes[..];
    let mut put = |number: &[u8]| {
        let (head, tail) = std::mem::take(&mut rest).split_at_mut(number.len());
        head.copy_from_slice(number);
        rest = tail;
    };
    put(&worker.id.0.to_le_bytes());
    put(&worker.rank.0.to_le_bytes());
    put(&gauge.requests.to_le_bytes());
    put(&gauge.prefills.to_le_bytes());
    put(&gauge.recent_share.to_bits().to_le_bytes());
    for number in [gauge.prefill_tokens, gauge.decode_parts, gauge.queued_ns, gauge.running_ns, gauge.elapsed_ns] {
        put(&number.to_le_bytes());
    }
    xxh3_64(&bytes)
}
