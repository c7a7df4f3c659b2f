//! Messages: round trips, versions, secrets, and hostile bytes.

use flatbuffers::FlatBufferBuilder;
use proptest::prelude::*;

use super::super::protocol::{ENVELOPE_BYTES, Fault, MAJOR, MINOR, Refusal, decode, encode, seal};
use super::*;
use crate::limits::{
    GAUGE_DECODE_PARTS_MAX, GAUGE_NS_MAX, GAUGE_SHARE_MAX, GAUGE_TOKENS_MAX, LOAD_MESSAGE_BINDINGS_MAX,
    LOAD_MESSAGE_BYTES_MAX, LOAD_MESSAGE_GAUGES_MAX, LOAD_SNAPSHOT_PARTS_MAX, ROUTER_SECRET_BYTES_MIN,
};
use crate::schema_generated::load_events as fb;

fn gauges() -> impl Strategy<Value = Vec<WorkerGauge>> {
    let times = (0..=GAUGE_NS_MAX, 0..=GAUGE_NS_MAX, 0..=GAUGE_NS_MAX);
    let counts = (any::<u32>(), any::<u32>(), 0..=GAUGE_TOKENS_MAX, 0..=GAUGE_DECODE_PARTS_MAX);
    let one =
        (any::<(u64, u32, u32)>(), counts, times, 0.0..=GAUGE_SHARE_MAX).prop_map(|(named, counts, times, share)| {
            let gauge = Gauge {
                requests: counts.0,
                prefills: counts.1,
                prefill_tokens: counts.2,
                decode_parts: counts.3,
                queued_ns: times.0,
                running_ns: times.1,
                elapsed_ns: times.2,
                recent_share: share,
            };
            WorkerGauge { worker: Worker::new(named.0, named.1), gauge, age_ms: named.2 }
        });
    prop::collection::vec(one, 0..20)
}

fn bindings() -> impl Strategy<Value = Vec<Binding>> {
    let one = any::<(u128, u64, u32, u64, bool)>().prop_map(|(session, id, rank, unused_ms, ended)| Binding {
        session: SessionName(session),
        worker: Worker::new(id, rank),
        unused_ms,
        ended,
    });
    prop::collection::vec(one, 0..20)
}

fn contents() -> impl Strategy<Value = Content> {
    prop_oneof![
        (1..u64::MAX, gauges(), bindings()).prop_map(|(sequence, gauges, bindings)| Content::Batch(Batch {
            sequence,
            gauges,
            bindings
        })),
        any::<(u64, u64, u64, u32)>().prop_map(|(beat, sequence, sum, count)| {
            Content::Heartbeat(Heartbeat { beat, sequence, digest: Digest { sum, count } })
        }),
        any::<(u64, u64, u16, u16)>().prop_map(|(origin, nonce, major_min, major_max)| {
            let (origin, nonce) = (OriginId(origin), Nonce(nonce));
            Content::Request(SnapshotRequest { origin, nonce, major_min, major_max })
        }),
        (any::<(u64, u64, u32)>(), 0..u64::MAX, 0..LOAD_SNAPSHOT_PARTS_MAX, gauges(), bindings()).prop_map(
            |((nonce, sum, count), sequence, part, gauges, bindings)| {
                let (nonce, digest) = (Nonce(nonce), Digest { sum, count });
                let parts = LOAD_SNAPSHOT_PARTS_MAX;
                Content::Section(SnapshotSection { nonce, sequence, part, parts, digest, gauges, bindings })
            }
        ),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_message_is_read_as_it_was_written(content in contents(), origin: u64, incarnation: u64, fingerprint: u64) {
        let (origin, incarnation, fingerprint) = (OriginId(origin), Incarnation(incarnation), Fingerprint(fingerprint));
        let sender = Sender { origin, incarnation, fingerprint };
        let message = decode(&encode(&sender, &content, &keys()), &keys());
        prop_assert_eq!(message, Ok(Message { sender, minor: MINOR, content }));
    }

    #[test]
    fn a_message_of_which_one_bit_differs_is_refused(content in contents(), at: prop::sample::Index, bit in 0..8_u8) {
        let mut bytes = encode(&sender(1, 2), &content, &keys());
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let fault = decode(&bytes, &keys()).map_err(|refusal| refusal.fault);
        let expected = if at < 4 { Fault::NoEnvelope } else { Fault::WrongMac };
        prop_assert_eq!(fault, Err(expected));
    }

    #[test]
    fn a_message_that_is_cut_is_refused(content in contents(), at: prop::sample::Index) {
        let bytes = encode(&sender(1, 2), &content, &keys());
        let cut = at.index(bytes.len());
        let refusal = decode(&bytes[..cut], &keys()).expect_err("a cut message");
        let expected = if cut < ENVELOPE_BYTES { Fault::NoEnvelope } else { Fault::WrongMac };
        prop_assert_eq!(refusal.fault, expected);
    }

    #[test]
    fn any_signed_bytes_are_read_or_refused(body in prop::collection::vec(any::<u8>(), 0..200), minor: u16) {
        let refusal = decode(&seal((MAJOR, minor), OriginId(3), &body, &keys()), &keys());
        prop_assert_eq!(refusal, Err(Refusal { origin: Some(OriginId(3)), fault: Fault::Malformed }));
    }
}

#[test]
fn a_message_of_another_secret_is_refused_and_proves_nothing() {
    let other = Keys::new(OTHER_SECRET, None).expect("long enough");
    let bytes = encode(&sender(1, 2), &Content::Heartbeat(Heartbeat::default()), &other);
    let refusal = decode(&bytes, &keys()).expect_err("another secret");
    assert_eq!(refusal, Refusal { origin: Some(OriginId(1)), fault: Fault::WrongMac });
    assert!(!refusal.is_proven());
}

#[test]
fn two_secrets_are_accepted_while_the_secret_changes() {
    let old = keys();
    let both = Keys::new(OTHER_SECRET, Some(SECRET)).expect("long enough");
    let new = Keys::new(OTHER_SECRET, None).expect("long enough");
    let content = Content::Heartbeat(Heartbeat::default());
    assert!(decode(&encode(&sender(1, 2), &content, &old), &both).is_ok());
    assert!(decode(&encode(&sender(1, 2), &content, &new), &both).is_ok());
    assert!(decode(&encode(&sender(1, 2), &content, &both), &new).is_ok(), "the first one signs");
    assert!(decode(&encode(&sender(1, 2), &content, &both), &old).is_err());
}

#[test]
fn a_short_secret_is_refused_and_no_key_is_printed() {
    let short = Keys::new(&SECRET[..ROUTER_SECRET_BYTES_MIN - 1], None).expect_err("too short");
    assert!(short.to_string().contains("31 bytes"), "{short}");
    assert!(Keys::new(SECRET, Some(b"short")).is_err());
    assert_eq!(format!("{:?}", keys()), "Keys { rotating: false, .. }");
}

#[test]
fn another_major_version_is_refused_by_name_and_another_minor_one_is_read() {
    let body = |content| encode(&sender(1, 2), &content, &keys()).split_off(ENVELOPE_BYTES);
    let body = body(Content::Heartbeat(Heartbeat { beat: 3, ..Heartbeat::default() }));
    for major in [0, MAJOR + 1, u16::MAX] {
        let refusal = decode(&seal((major, 0), OriginId(1), &body, &keys()), &keys()).expect_err("another version");
        assert_eq!(refusal, Refusal { origin: Some(OriginId(1)), fault: Fault::Major(major) });
        assert!(refusal.is_proven());
    }
    for minor in [0, MINOR + 1, u16::MAX] {
        let message = decode(&seal((MAJOR, minor), OriginId(1), &body, &keys()), &keys()).expect("a minor version");
        assert_eq!(message.minor, minor);
    }
}

/// A batch with one gauge, as versions before and after this one may write it.
fn batch_of_another_minor(is_newer: bool) -> Vec<u8> {
    let mut builder = FlatBufferBuilder::new();
    let (ids, ranks) = (builder.create_vector(&[5_u64]), builder.create_vector(&[0_u32]));
    let (requests, more) = (builder.create_vector(&[4_u32]), builder.create_vector(&[9_u64]));
    let start = builder.start_table();
    builder.push_slot_always(fb::Gauges::VT_WORKER_IDS, ids);
    builder.push_slot_always(fb::Gauges::VT_RANKS, ranks);
    builder.push_slot_always(fb::Gauges::VT_REQUESTS, requests);
    if is_newer {
        builder.push_slot_always(fb::Gauges::VT_AGES_MS + 2, more);
    }
    let gauges = builder.end_table(start);
    let start = builder.start_table();
    builder.push_slot(fb::Batch::VT_SEQUENCE, 1_u64, 0);
    builder.push_slot_always(fb::Batch::VT_GAUGES, gauges);
    if is_newer {
        builder.push_slot(fb::Batch::VT_BINDINGS + 2, 8_u32, 0);
    }
    let batch = builder.end_table(start);
    let start = builder.start_table();
    builder.push_slot(fb::Message::VT_FINGERPRINT, 7_u64, 0);
    builder.push_slot(fb::Message::VT_INCARNATION, 2_u64, 0);
    builder.push_slot_always(fb::Message::VT_BATCH, batch);
    if is_newer {
        builder.push_slot(fb::Message::VT_SECTION + 2, 1_u64, 0);
    }
    let root = builder.end_table(start);
    builder.finish(root, Some(fb::MESSAGE_IDENTIFIER));
    let minor = if is_newer { MINOR + 1 } else { 0 };
    seal((MAJOR, minor), OriginId(1), builder.finished_data(), &keys())
}

#[test]
fn fields_that_are_not_known_are_ignored_and_those_that_lack_are_zero() {
    let gauge = Gauge { requests: 4, ..Gauge::default() };
    let gauges = vec![WorkerGauge { worker: worker(5), gauge, age_ms: 0 }];
    for is_newer in [false, true] {
        let message = decode(&batch_of_another_minor(is_newer), &keys()).expect("another minor version");
        let expected = Batch { sequence: 1, gauges: gauges.clone(), bindings: Vec::new() };
        assert_eq!(message.content, Content::Batch(expected));
        assert_eq!(message.sender, sender(1, 2));
    }
}

#[test]
fn content_that_is_not_known_is_named_so() {
    let mut builder = FlatBufferBuilder::new();
    let root = fb::Message::create(&mut builder, &fb::MessageArgs::default());
    builder.finish(root, Some(fb::MESSAGE_IDENTIFIER));
    let bytes = seal((MAJOR, MINOR + 1), OriginId(1), builder.finished_data(), &keys());
    assert_eq!(decode(&bytes, &keys()).expect_err("no content").fault, Fault::Unknown);
}

fn fault_of(content: &Content) -> Option<Fault> {
    decode(&encode(&sender(1, 2), content, &keys()), &keys()).err().map(|refusal| refusal.fault)
}

#[test]
fn what_exceeds_a_limit_is_refused() {
    let batch = |gauges, bindings| Content::Batch(Batch { sequence: 1, gauges, bindings });
    let full = batch(vec![row(1, 3); LOAD_MESSAGE_GAUGES_MAX], vec![Binding::default(); LOAD_MESSAGE_BINDINGS_MAX]);
    assert_eq!(fault_of(&full), None);
    assert!(encode(&sender(1, 2), &full, &keys()).len() < LOAD_MESSAGE_BYTES_MAX);
    let refused = Some(Fault::OutOfRange);
    assert_eq!(fault_of(&batch(vec![row(1, 3); LOAD_MESSAGE_GAUGES_MAX + 1], vec![])), refused);
    assert_eq!(fault_of(&batch(vec![], vec![Binding::default(); LOAD_MESSAGE_BINDINGS_MAX + 1])), refused);
    assert_eq!(fault_of(&Content::Batch(Batch::default())), refused, "sequence 0");
    let section = |part, parts| Content::Section(SnapshotSection { part, parts, ..SnapshotSection::default() });
    assert_eq!(fault_of(&section(0, LOAD_SNAPSHOT_PARTS_MAX + 1)), refused);
    assert_eq!(fault_of(&section(1, 1)), refused);
    assert_eq!(fault_of(&section(0, 0)), refused);
    for bad in [
        Gauge { prefill_tokens: GAUGE_TOKENS_MAX + 1, ..gauge(1) },
        Gauge { decode_parts: u64::MAX, ..gauge(1) },
        Gauge { elapsed_ns: GAUGE_NS_MAX + 1, ..gauge(1) },
        Gauge { recent_share: f32::NAN, ..gauge(1) },
        Gauge { recent_share: -0.5, ..gauge(1) },
        Gauge { recent_share: f32::INFINITY, ..gauge(1) },
    ] {
        let worker = worker(1);
        assert_eq!(fault_of(&batch(vec![WorkerGauge { worker, gauge: bad, age_ms: 0 }], vec![])), refused, "{bad:?}");
        assert_eq!(fault_of(&batch(vec![WorkerGauge { worker, gauge: bad.clamped(), age_ms: 0 }], vec![])), None);
    }
    let long = vec![0; LOAD_MESSAGE_BYTES_MAX + 1];
    assert_eq!(decode(&long, &keys()), Err(Refusal { origin: None, fault: Fault::TooLarge }));
}

#[test]
fn columns_of_different_lengths_are_refused() {
    let mut builder = FlatBufferBuilder::new();
    let (ids, ranks) = (builder.create_vector(&[5_u64, 6]), builder.create_vector(&[0_u32]));
    let gauges = fb::Gauges::create(
        &mut builder,
        &fb::GaugesArgs { worker_ids: Some(ids), ranks: Some(ranks), ..fb::GaugesArgs::default() },
    );
    let batch = fb::Batch::create(&mut builder, &fb::BatchArgs { sequence: 1, gauges: Some(gauges), bindings: None });
    let args = fb::MessageArgs { batch: Some(batch), ..fb::MessageArgs::default() };
    let root = fb::Message::create(&mut builder, &args);
    builder.finish(root, Some(fb::MESSAGE_IDENTIFIER));
    let bytes = seal((MAJOR, MINOR), OriginId(1), builder.finished_data(), &keys());
    assert_eq!(decode(&bytes, &keys()).expect_err("ragged").fault, Fault::Malformed);
}

#[test]
fn a_digest_depends_on_the_set_alone() {
    let rows = [row(1, 3), row(2, 3), row(3, 9)];
    let mut backwards = rows;
    backwards.reverse();
    assert_eq!(digest_of(&rows), digest_of(&backwards));
    let mut digest = digest_of(&rows);
    digest.remove(worker(2), &gauge(3));
    digest.add(worker(4), &Gauge::default());
    assert_eq!(digest, digest_of(&[row(3, 9), row(1, 3)]));
    assert_ne!(digest, digest_of(&[row(3, 9), row(1, 4)]));
    assert_ne!(digest, digest_of(&[row(3, 3), row(1, 9)]), "gauges of each other's workers");
}
