//! Streams of a router that joins, changes its load, loses messages, and restarts.

use kvrouted::ids::Worker;
use kvrouted::routers::protocol::{Content, ENVELOPE_BYTES, SnapshotRequest, encode};
use kvrouted::routers::{
    Binding, Gauge, Incarnation, Nonce, OriginId, Publisher, PublisherSettings, Sender, SessionName,
};

use crate::targets::load_events::{FLEET, keys, stream};

fn publisher(incarnation: u64) -> Publisher {
    let sender = Sender { origin: OriginId(1), incarnation: Incarnation(incarnation), fingerprint: FLEET };
    Publisher::new(sender, PublisherSettings::default(), 0)
}

fn body(publisher: &Publisher, content: &Content) -> Vec<u8> {
    encode(publisher.sender(), content, &keys()).split_off(ENVELOPE_BYTES)
}

/// Everything that is due after a change of some workers.
fn speak(publisher: &mut Publisher, now_ms: u64, workers: std::ops::Range<u64>) -> Vec<Vec<u8>> {
    let gauge_of = |worker: Worker| Gauge {
        requests: (worker.id.0 + now_ms / 1000) as u32 % 3,
        prefill_tokens: worker.id.0 * 100,
        recent_share: 0.5,
        ..Gauge::default()
    };
    workers.for_each(|id| publisher.note_changed(Worker::new(id, 0)));
    let session = SessionName(now_ms.into());
    publisher.note_binding(Binding { session, worker: Worker::new(1, 0), unused_ms: 5, ended: false }, now_ms);
    let mut bodies = Vec::new();
    while let Some(content) = publisher.next_message(now_ms, gauge_of) {
        bodies.push(body(publisher, &content));
    }
    bodies
}

fn answer(publisher: &mut Publisher, nonce: u64) -> Vec<Vec<u8>> {
    let asking = Sender { origin: OriginId(100), incarnation: Incarnation(1), fingerprint: FLEET };
    let request = SnapshotRequest { origin: OriginId(1), nonce: Nonce(nonce), major_min: 0, major_max: u16::MAX };
    let sections = publisher.answer(&asking, &request, std::iter::empty(), 5_000 * nonce).expect("an answer");
    sections.into_iter().map(|section| body(publisher, &Content::Section(section))).collect()
}

/// Streams of a router that tells its load.
pub(crate) fn load_events() -> Vec<Vec<u8>> {
    let pause = || vec![Vec::new()];
    let (mut first, mut second) = (publisher(5), publisher(6));
    let begin = speak(&mut first, 10, 0..4);
    let joined = [begin.clone(), answer(&mut first, 1)].concat();
    let more = speak(&mut first, 1_100, 2..6);
    let lost = speak(&mut first, 2_200, 0..3);
    let last = speak(&mut first, 3_300, 1..2);
    let repaired = answer(&mut first, 2);
    let restarted = [speak(&mut second, 10, 3..5), pause(), answer(&mut second, 2)].concat();
    [
        vec![begin.clone()],
        vec![joined.clone(), more.clone(), lost, last.clone()],
        vec![joined.clone(), more.clone(), pause(), last.clone(), repaired],
        vec![joined.clone(), more, pause(), restarted, last],
        vec![joined, pause(), pause(), pause(), pause(), pause(), pause(), begin],
    ]
    .map(|parts| stream(&parts.concat()))
    .to_vec()
}
