//! Tests of the state that routers share.

mod exchange;
mod origin;
mod origins;
mod protocol;
mod publisher;
mod simulation;

use super::protocol::{Batch, Content, Heartbeat, Message, SnapshotRequest, SnapshotSection};
use super::{
    Binding, Digest, Effect, Fingerprint, Gauge, Incarnation, Keys, Nonce, OriginId, Sender, SessionName, WorkerGauge,
};
use crate::ids::Worker;

const SECRET: &[u8] = b"a secret of at least thirty-two bytes";
const OTHER_SECRET: &[u8] = b"another secret, just as long as that";

fn keys() -> Keys {
    Keys::new(SECRET, None).expect("long enough")
}

/// A router of the fleet.
fn sender(origin: u64, incarnation: u64) -> Sender {
    Sender { origin: OriginId(origin), incarnation: Incarnation(incarnation), fingerprint: Fingerprint(7) }
}

fn worker(id: u64) -> Worker {
    Worker::new(id, 0)
}

/// A gauge that differs for each number; zero for 0.
fn gauge(number: u32) -> Gauge {
    let wide = u64::from(number);
    Gauge {
        requests: number,
        prefills: number / 2,
        prefill_tokens: 100 * wide,
        decode_parts: 3 * wide,
        queued_ns: 1_000_000 * wide,
        running_ns: 500_000 * wide,
        elapsed_ns: wide,
        recent_share: number as f32 / 64.0,
    }
}

fn row(id: u64, number: u32) -> WorkerGauge {
    WorkerGauge { worker: worker(id), gauge: gauge(number), age_ms: 0 }
}

fn digest_of(rows: &[WorkerGauge]) -> Digest {
    let mut digest = Digest::default();
    rows.iter().for_each(|row| digest.add(row.worker, &row.gauge));
    digest
}

/// Nonces 1, 2, 3, …
fn counting() -> impl FnMut() -> Nonce {
    let mut last = 0;
    move || {
        last += 1;
        Nonce(last)
    }
}
