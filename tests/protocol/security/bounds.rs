//! Every bound of one request: a little more is refused by name, exactly as much is accepted, and the connection goes
//! on.

use flatbuffers::{FlatBufferBuilder, WIPOffset};
use kvrouted::client::Reply;
use kvrouted::error::Kind;
use kvrouted::ids::CorrelationId;
use kvrouted::limits::{
    ALLOW_LIST_MAX, ERROR_TEXT_BYTES_MAX, MEDIA_HASHES_MAX, NAME_BYTES_MAX, PROMPT_TOKENS_MAX, REQUEST_TABLES_MAX,
    REQUEST_TAINTS_MAX, SHARED_HITS_MAX, WORKER_FIELDS_MAX, WORKERS_PAGE_MAX,
};
use kvrouted::schema_generated::routing as fb;
use kvrouted::serve::admin_path;
use kvrouted::wire::FrameKind;

use super::besieged::Besieged;
use crate::kit::raw::{Raw, built, built_route, encoded};

type Builder = FlatBufferBuilder<'static>;
type Fill = fn(&mut Builder, &mut fb::RouteArgs<'static>, usize);

fn text(builder: &mut Builder, bytes: usize) -> WIPOffset<&'static str> {
    builder.create_string(&"x".repeat(bytes))
}

/// The bounds of a route, and how to write a route of each size.
const OF_A_ROUTE: &[(&str, usize, Fill)] = &[
    ("request_id", NAME_BYTES_MAX, |b, a, n| {
        (a.request_id, a.book) = (Some(text(b, n)), true);
    }),
    ("lora", NAME_BYTES_MAX, |b, a, n| a.lora = Some(text(b, n))),
    ("salt", NAME_BYTES_MAX, |b, a, n| a.salt = Some(text(b, n))),
    ("affinity_session", NAME_BYTES_MAX, |b, a, n| a.affinity_session = Some(text(b, n))),
    ("media", MEDIA_HASHES_MAX, |b, a, n| {
        a.media = Some(b.create_vector(&vec![fb::MediaHash::new(0, 7); n]));
    }),
    ("allow", ALLOW_LIST_MAX, |b, a, n| {
        a.allow = Some(b.create_vector(&vec![fb::WorkerRef::new(1, 0); n]));
    }),
    ("required_taints", REQUEST_TAINTS_MAX, |b, a, n| {
        let names: Vec<_> = (0..n).map(|at| b.create_string(&format!("t{at}"))).collect();
        a.required_taints = Some(b.create_vector(&names));
    }),
    ("preferred_taints", REQUEST_TAINTS_MAX, |b, a, n| {
        let taints = taints(b, n);
        a.preferred_taints = Some(b.create_vector(&taints));
    }),
    ("shared_hits", SHARED_HITS_MAX, |b, a, n| {
        a.shared_hits = Some(b.create_vector(&vec![fb::BlockRange::new(0, 0); n]));
    }),
    ("tokens", PROMPT_TOKENS_MAX, |b, a, n| a.tokens = Some(b.create_vector(&vec![7_u32; n]))),
];

fn taints(builder: &mut Builder, count: usize) -> Vec<WIPOffset<fb::Taint<'static>>> {
    let make = |at| {
        let key = builder.create_string(&format!("t{at}"));
        fb::Taint::create(builder, &fb::TaintArgs { key: Some(key), weight: 1.0 })
    };
    (0..count).map(make).collect()
}

fn daemon() -> Besieged {
    // The largest prompt fits.
    Besieged::configured("frame_body_bytes_max = 16777216", "")
}

#[test]
fn as_much_as_may_be_is_looked_at_and_one_more_is_refused_by_name() {
    let daemon = daemon();
    let mut raw = daemon.greeted();
    for (name, max, fill) in OF_A_ROUTE {
        raw.send(&built_route(1, |builder, args| fill(builder, args, max + 1)));
        let (1, Reply::Error(error)) = raw.reply() else { panic!("{name}: no error") };
        let kind = error.kind.expect("a known kind");
        assert!(matches!(kind, Kind::InvalidArgument | Kind::Oversized), "{name}: {error:?}");
        assert!(error.message.len() <= ERROR_TEXT_BYTES_MAX && error.message.contains(name), "{name}: {error:?}");
        raw.send(&built_route(2, |builder, args| fill(builder, args, *max)));
        match raw.reply() {
            (2, Reply::Route(_)) => {}
            // Ranges of nothing mean nothing, however many there are.
            (2, Reply::Error(error)) => assert!(!error.message.contains(&max.to_string()), "{name}: {error:?}"),
            other => panic!("{name}: {other:?}"),
        }
    }
    raw.assert_served();
    drop(raw);
    daemon.assert_recovered();
}

#[test]
fn tables_are_counted_before_they_are_looked_at() {
    let daemon = daemon();
    let mut raw = daemon.greeted();
    raw.send(&built_route(1, |builder, args| {
        let taints = taints(builder, REQUEST_TABLES_MAX + 1);
        args.preferred_taints = Some(builder.create_vector(&taints));
    }));
    assert_eq!(raw.error(1), Kind::Malformed);
    // Many that are one: a body of 1 MiB that would be walked as 4 GiB.
    raw.send(&built_route(2, |builder, args| {
        let long = text(builder, 16 << 10);
        args.required_taints = Some(builder.create_vector(&vec![long; 256 << 10]));
    }));
    assert_eq!(raw.error(2), Kind::Malformed);
    raw.assert_served();
    drop(raw);
    daemon.assert_recovered();
}

#[test]
fn names_and_reasons_elsewhere_are_bounded_too() {
    let daemon = daemon();
    let mut raw = Raw::connect(&daemon.socket());
    let long = "n".repeat(NAME_BYTES_MAX + 1);
    raw.send(&encoded(|encoder, out| encoder.hello(CorrelationId(1), &long, None, out)));
    assert_eq!(raw.error(1), Kind::InvalidArgument, "the name of a client");
    raw.hello(None).expect("hello");
    raw.send(&built(FrameKind::Free, 2, |builder| {
        let request_id = Some(text(builder, NAME_BYTES_MAX + 1));
        fb::Free::create(builder, &fb::FreeArgs { request_id, ..fb::FreeArgs::default() })
    }));
    assert_eq!(raw.error(2), Kind::InvalidArgument, "the name of a booking");
    raw.send(&built(FrameKind::ReportFailure, 3, |builder| {
        let reason = Some(text(builder, NAME_BYTES_MAX + 1));
        let worker = fb::WorkerRef::new(1, 0);
        let args = fb::ReportFailureArgs { reason, worker: Some(&worker), ..fb::ReportFailureArgs::default() };
        fb::ReportFailure::create(builder, &args)
    }));
    assert_eq!(raw.error(3), Kind::InvalidArgument, "the reason of a failure");
    // Pages and lists are cut, not grown.
    raw.send(&encoded(|encoder, out| encoder.workers(CorrelationId(4), None, 0, u32::MAX, out)));
    let (4, Reply::Workers(page)) = raw.reply() else { panic!("no page") };
    assert!(page.workers.len() <= WORKERS_PAGE_MAX);
    raw.send(&built_route(5, |_, args| args.candidates_max = u32::MAX));
    assert_eq!(raw.decided(5).candidates.len(), 1);
    let mut admin = Raw::greeted(&admin_path(&daemon.socket()));
    admin.send(&built(FrameKind::ChangeWorker, 6, |builder| {
        let field = |builder: &mut Builder| {
            let (name, value) = (Some(text(builder, 4)), Some(text(builder, 4)));
            fb::WorkerField::create(builder, &fb::WorkerFieldArgs { name, value })
        };
        let fields: Vec<_> = (0..=WORKER_FIELDS_MAX).map(|_| field(builder)).collect();
        let fields = Some(builder.create_vector(&fields));
        let args = fb::ChangeWorkerArgs { op: fb::WorkerOp::Add, fields, ..fb::ChangeWorkerArgs::default() };
        fb::ChangeWorker::create(builder, &args)
    }));
    assert_eq!(admin.error(6), Kind::InvalidArgument, "the fields of a worker");
    raw.assert_served();
    drop((raw, admin));
    daemon.assert_recovered();
}
