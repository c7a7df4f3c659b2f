//! What this router says.

use std::collections::BTreeMap;

use super::super::protocol::MAJOR;
use super::super::{AnswerRefusal, Publisher, PublisherSettings};
use super::*;
use crate::limits::{
    LOAD_ANSWER_PAUSE_MS, LOAD_BEAT_PAUSE_MS, LOAD_BINDINGS_PENDING_MAX, LOAD_MESSAGE_BINDINGS_MAX,
    LOAD_MESSAGE_GAUGES_MAX, ORIGINS_MAX,
};

const SETTINGS: PublisherSettings = PublisherSettings { batch_ms: 2, heartbeat_ms: 1000 };

/// The messages that are due.
fn due(publisher: &mut Publisher, now_ms: u64, own: &BTreeMap<Worker, Gauge>) -> Vec<Content> {
    let gauge_of = |worker| own.get(&worker).copied().unwrap_or_default();
    std::iter::from_fn(|| publisher.next_message(now_ms, gauge_of)).collect()
}

fn request(origin: u64) -> SnapshotRequest {
    SnapshotRequest { origin: OriginId(origin), nonce: Nonce(5), major_min: MAJOR, major_max: MAJOR }
}

#[test]
fn changes_of_one_interval_are_one_batch_and_what_is_as_it_was_is_not_sent() {
    let mut publisher = Publisher::new(sender(1, 2), SETTINGS, 0);
    let mut own = BTreeMap::new();
    assert!(matches!(due(&mut publisher, 0, &own)[..], [Content::Heartbeat(Heartbeat { beat: 1, sequence: 0, .. })]));
    own.insert(worker(1), gauge(1));
    publisher.note_changed(worker(1));
    publisher.note_changed(worker(2));
    own.insert(worker(1), gauge(3));
    publisher.note_changed(worker(1));
    assert_eq!(publisher.due_ms(), 2);
    assert!(due(&mut publisher, 1, &own).is_empty());
    let expected = Batch { sequence: 1, gauges: vec![row(1, 3)], bindings: vec![] };
    assert_eq!(due(&mut publisher, 2, &own), [Content::Batch(expected)]);
    assert_eq!(publisher.due_ms(), 1000);
    publisher.note_changed(worker(1));
    assert!(due(&mut publisher, 9, &own).is_empty(), "the same gauge");
    own.remove(&worker(1));
    publisher.note_changed(worker(1));
    let expected = Batch { sequence: 2, gauges: vec![row(1, 0)], bindings: vec![] };
    assert_eq!(due(&mut publisher, 20, &own), [Content::Batch(expected)]);
    let heartbeat = Heartbeat { beat: 2, sequence: 2, digest: Digest::default() };
    assert_eq!(due(&mut publisher, 1000, &own), [Content::Heartbeat(heartbeat)]);
}

#[test]
fn a_router_that_connects_gets_a_heartbeat_soon_and_many_get_one() {
    let mut publisher = Publisher::new(sender(1, 2), SETTINGS, 0);
    let beats = |publisher: &mut Publisher, now_ms| due(publisher, now_ms, &BTreeMap::new()).len();
    assert_eq!(beats(&mut publisher, 0), 1);
    publisher.note_listener(400);
    publisher.note_listener(400);
    assert_eq!((publisher.due_ms(), beats(&mut publisher, 400)), (400, 1));
    publisher.note_listener(410);
    assert_eq!(beats(&mut publisher, 400 + LOAD_BEAT_PAUSE_MS - 1), 0, "not yet again");
    assert_eq!(beats(&mut publisher, 400 + LOAD_BEAT_PAUSE_MS), 1);
    assert_eq!(publisher.due_ms(), 400 + LOAD_BEAT_PAUSE_MS + SETTINGS.heartbeat_ms);
}

#[test]
fn many_changes_come_in_several_batches_of_bounded_size() {
    let mut publisher = Publisher::new(sender(1, 2), SETTINGS, 0);
    let own: BTreeMap<_, _> = (0..2 * LOAD_MESSAGE_GAUGES_MAX as u64 + 1).map(|id| (worker(id), gauge(2))).collect();
    own.keys().for_each(|worker| publisher.note_changed(*worker));
    for session in 0..LOAD_BINDINGS_PENDING_MAX as u128 + 3 {
        publisher.note_binding(Binding { session: SessionName(session), ..Binding::default() }, 0);
    }
    assert_eq!(publisher.bindings_dropped(), 3);
    let (mut gauges, mut bindings, mut sequences) = (0, 0, Vec::new());
    for content in due(&mut publisher, 3, &own) {
        let Content::Batch(batch) = content else { continue };
        assert!(batch.gauges.len() <= LOAD_MESSAGE_GAUGES_MAX && batch.bindings.len() <= LOAD_MESSAGE_BINDINGS_MAX);
        assert!(batch.bindings.iter().all(|binding| binding.unused_ms == 3));
        (gauges, bindings) = (gauges + batch.gauges.len(), bindings + batch.bindings.len());
        sequences.push(batch.sequence);
    }
    assert_eq!((gauges, bindings), (own.len(), LOAD_BINDINGS_PENDING_MAX));
    assert!(sequences.iter().copied().eq(1..=publisher.sequence()));
    assert_eq!(publisher.digest().count as usize, own.len());
}

#[test]
fn a_snapshot_has_all_gauges_with_their_age_as_of_the_last_batch() {
    let mut publisher = Publisher::new(sender(1, 2), SETTINGS, 0);
    let own: BTreeMap<_, _> = (0..LOAD_MESSAGE_GAUGES_MAX as u64 + 1).map(|id| (worker(id), gauge(2))).collect();
    own.keys().for_each(|worker| publisher.note_changed(*worker));
    due(&mut publisher, 10, &own);
    // Not sent yet, so not in the snapshot.
    publisher.note_changed(worker(1 << 20));
    let binding = Binding { session: SessionName(1), ..Binding::default() };
    let sections = publisher.answer(&sender(9, 9), &request(1), std::iter::once(binding), 45).expect("an answer");
    assert_eq!(sections.len(), 2);
    let rows: Vec<_> = sections.iter().flat_map(|section| section.gauges.clone()).collect();
    assert!(rows.len() == own.len() && rows.iter().all(|row| row.age_ms == 35));
    for (at, section) in sections.iter().enumerate() {
        assert_eq!((section.part, section.parts, section.nonce), (at as u32, 2, Nonce(5)));
        assert_eq!((section.sequence, section.digest), (publisher.sequence(), digest_of(&rows)));
    }
    assert_eq!(sections[0].bindings, [binding]);
    let mut empty = Publisher::new(sender(1, 2), SETTINGS, 0);
    assert_eq!(empty.answer(&sender(9, 9), &request(1), std::iter::empty(), 0).map(|sections| sections.len()), Ok(1));
}

#[test]
fn a_router_of_another_fleet_or_version_gets_no_snapshot() {
    let mut publisher = Publisher::new(sender(1, 2), SETTINGS, 0);
    let mut answer = |asking: Sender, request| publisher.answer(&asking, &request, std::iter::empty(), 0);
    assert_eq!(answer(sender(9, 9), request(3)), Err(AnswerRefusal::OtherOrigin(OriginId(3))));
    let foreign = Sender { fingerprint: Fingerprint(8), ..sender(9, 9) };
    assert_eq!(answer(foreign, request(1)), Err(AnswerRefusal::Fingerprint(Fingerprint(8))));
    let newer = SnapshotRequest { major_min: MAJOR + 1, major_max: MAJOR + 2, ..request(1) };
    assert_eq!(answer(sender(9, 9), newer), Err(AnswerRefusal::Version(MAJOR + 1, MAJOR + 2)));
    let wide = SnapshotRequest { major_min: 0, major_max: MAJOR + 2, ..request(1) };
    assert!(answer(sender(9, 9), wide).is_ok());
}

#[test]
fn bindings_are_read_only_for_an_answer() {
    let mut publisher = Publisher::new(sender(1, 2), SETTINGS, 0);
    let mut reads = 0;
    for _recording in 0..100 {
        let bindings = std::iter::from_fn(|| {
            reads += 1;
            None
        });
        let _ = publisher.answer(&sender(9, 9), &request(1), bindings, 0);
    }
    assert_eq!(reads, 1);
}

#[test]
fn a_router_that_asks_too_often_or_asks_the_same_again_gets_no_snapshot() {
    let mut publisher = Publisher::new(sender(1, 2), SETTINGS, 0);
    let mut ask = |asking, nonce, now_ms| {
        let request = SnapshotRequest { nonce: Nonce(nonce), ..request(1) };
        publisher.answer(&sender(asking, 9), &request, std::iter::empty(), now_ms).map(drop)
    };
    assert_eq!(ask(9, 1, 100), Ok(()));
    assert_eq!(ask(9, 2, 100 + LOAD_ANSWER_PAUSE_MS - 1), Err(AnswerRefusal::TooSoon));
    assert_eq!(ask(8, 2, 101), Ok(()), "another router has a pause of its own");
    assert_eq!(ask(9, 1, 100 + LOAD_ANSWER_PAUSE_MS), Err(AnswerRefusal::TooSoon), "a recording");
    assert_eq!(ask(9, 3, 100 + LOAD_ANSWER_PAUSE_MS), Ok(()));
    for asking in 0..4 * ORIGINS_MAX as u64 {
        assert_eq!(ask(1000 + asking, 1, 1000 + asking), Ok(()), "those that asked long ago make room");
    }
}

#[test]
fn what_others_know_by_themselves_is_not_sent_again() {
    let mut publisher = Publisher::new(sender(1, 2), SETTINGS, 0);
    let running = Gauge { running_ns: 5_000_000_000, queued_ns: 5_000_000_000, ..gauge(2) };
    let gauges = |publisher: &mut Publisher, now_ms, gauge: Gauge| {
        publisher.note_changed(worker(1));
        let contents = due(publisher, now_ms, &BTreeMap::from([(worker(1), gauge)])).into_iter();
        contents.filter(|content| matches!(content, Content::Batch(_))).count()
    };
    assert_eq!(gauges(&mut publisher, 10, running), 1);
    let goes_on = Gauge { elapsed_ns: running.elapsed_ns + 400_000_000, recent_share: 0.01, ..running };
    assert_eq!(gauges(&mut publisher, 410, goes_on), 0, "the same prefill, and recent work that fades");
    assert_eq!(gauges(&mut publisher, 413, running), 1, "another prefill of the same length");
    let idle = Gauge { recent_share: 0.5, ..Gauge::default() };
    assert_eq!(gauges(&mut publisher, 500, idle), 1);
    assert_eq!(gauges(&mut publisher, 600, Gauge { recent_share: 0.25, ..idle }), 0);
    // Nothing notes that it fades to nothing; the heartbeat looks.
    let contents: Vec<_> =
        [2_000, 2_010].into_iter().flat_map(|now_ms| due(&mut publisher, now_ms, &BTreeMap::new())).collect();
    assert!(contents.iter().any(|content| matches!(content, Content::Batch(batch) if batch.gauges == [row(1, 0)])));
    assert_eq!(publisher.digest(), Digest::default());
}
