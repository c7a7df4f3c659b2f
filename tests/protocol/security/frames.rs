//! Frames that lie about their length, version, kind or content.

use kvrouted::error::Kind;
use kvrouted::ids::CorrelationId;
use kvrouted::limits::FRAME_BODY_BYTES_CEILING;
use kvrouted::schema_generated::routing as fb;
use kvrouted::serve::admin_path;
use kvrouted::wire::{AdminRequest, FrameHeader, FrameKind, PolicyOrder, RequestEncoder, ResetOrder};
use rand::SeedableRng;

use super::besieged::Besieged;
use crate::kit::raw::{Raw, built, built_route, encoded, garbage, header, route_frame};

/// Beyond it a body is refused, here.
const BODY_BYTES_MAX: u32 = 1 << 20;

fn daemon() -> Besieged {
    Besieged::configured(&format!("frame_body_bytes_max = {BODY_BYTES_MAX}"), "")
}

#[test]
fn garbage_ends_its_connection_or_gets_errors_and_nothing_else() {
    let daemon = daemon();
    let mut other = daemon.greeted();
    let mut random = rand_xoshiro::Xoshiro256PlusPlus::seed_from_u64(7);
    for round in 0..300 {
        let mut raw = if round % 2 == 0 { daemon.greeted() } else { Raw::connect(&daemon.socket()) };
        raw.send(&garbage(&mut random, round));
        raw.stream.shutdown(std::net::Shutdown::Write).expect("shut down");
        // No answer to what was not asked, and an end.
        raw.errors_until_end();
    }
    other.assert_served();
    drop(other);
    assert!(daemon.counter("connections_untrusted") > 0 && daemon.counter("errors") > 0);
    daemon.assert_recovered();
}

#[test]
fn lengths_that_lie_reserve_nothing() {
    let daemon = daemon();
    let before = daemon.footprint();
    // As much as may be asked for, and nothing of it sent.
    let mut claims: Vec<Raw> = (0..200).map(|_| daemon.greeted()).collect();
    for raw in &mut claims {
        raw.send(&header(FrameKind::Route, BODY_BYTES_MAX, 1).encode());
    }
    // More than may be, which is skipped as it comes.
    let mut skipped = daemon.greeted();
    skipped.send(&header(FrameKind::Route, FRAME_BODY_BYTES_CEILING, 2).encode());
    assert_eq!(skipped.error(2), Kind::Oversized);
    skipped.send(&vec![0xee; 8 << 20]);
    daemon.greeted().assert_served();
    let grown_kib = daemon.footprint().rss_kib.saturating_sub(before.rss_kib);
    assert!(grown_kib < 200 * u64::from(BODY_BYTES_MAX >> 10) / 4, "{grown_kib} KiB for claims alone");
    // No length at all is a body that is missing; lengths that no frame can have end the connection.
    for kind in [FrameKind::Route, FrameKind::Hello, FrameKind::Watch] {
        let mut raw = daemon.greeted();
        raw.send(&header(kind, 0, 3).encode());
        assert_eq!(raw.error(3), Kind::Malformed);
        raw.assert_served();
    }
    for body_bytes in [u32::MAX, u32::MAX - 7, u32::MAX - 15, FRAME_BODY_BYTES_CEILING + 8, 9, 1] {
        let mut raw = daemon.greeted();
        raw.send(&[route_frame(4, 40), header(FrameKind::Route, body_bytes, 5).encode().to_vec()].concat());
        assert_eq!(raw.decided(4).candidates.len(), 1, "what came before is answered");
        assert!(raw.next().is_none(), "{body_bytes}");
    }
    // Shorter than what lies in it: the rest is read as the next header.
    let mut raw = daemon.greeted();
    let mut short = route_frame(6, 400);
    short[..4].copy_from_slice(&64_u32.to_le_bytes());
    raw.send(&short);
    assert_eq!(raw.error(6), Kind::Malformed);
    raw.stream.shutdown(std::net::Shutdown::Write).expect("shut down");
    raw.errors_until_end();
    drop((claims, skipped));
    daemon.assert_recovered();
}

#[test]
fn hello_is_first_and_once_and_of_a_version_that_is_spoken() {
    let daemon = daemon();
    let mut raw = Raw::connect(&daemon.socket());
    for (id, kind) in (10..).zip([FrameKind::Route, FrameKind::Free, FrameKind::Watch, FrameKind::Status]) {
        raw.send(&header(kind, 0, id).encode());
        assert_eq!(raw.error(id), Kind::HelloRequired, "before anything is read");
    }
    // Ranges that leave the version out, are upside down, or are of the far future.
    for (id, range) in (20..).zip([(0, 0), (2, 9), (9, 0), (u16::MAX, 0), (u16::MAX, u16::MAX)]) {
        raw.send(&encoded(|encoder, out| encoder.hello_range(CorrelationId(id), range, "raw", None, out)));
        assert_eq!(raw.error(id), Kind::UnsupportedVersion, "{range:?}");
    }
    raw.send(&encoded(|encoder, out| encoder.hello_range(CorrelationId(30), (0, u16::MAX), "raw", None, out)));
    assert_eq!(raw.reply().0, 30);
    for id in 40..43 {
        raw.send(&encoded(|encoder, out| encoder.hello(CorrelationId(id), "raw", None, out)));
        assert_eq!(raw.error(id), Kind::InvalidArgument, "hello is said once");
    }
    let versioned = FrameHeader { version: 7, ..header(FrameKind::Route, 0, 50) };
    raw.send(&versioned.encode());
    assert_eq!(raw.error(50), Kind::UnsupportedVersion, "a frame of another version than was agreed on");
    raw.assert_served();
    drop(raw);
    daemon.assert_recovered();
}

#[test]
fn what_is_not_understood_is_refused_and_not_passed_over() {
    let daemon = daemon();
    let mut raw = daemon.greeted();
    for bit in 0..64 {
        raw.send(&built_route(bit, |_, args| args.must_understand = 1 << bit));
        match raw.reply() {
            (id, kvrouted::client::Reply::Route(_)) => assert_eq!(id, bit),
            (id, kvrouted::client::Reply::Error(error)) => {
                assert_eq!((id, error.kind), (bit, Some(Kind::Unsupported)));
            }
            other => panic!("{other:?}"),
        }
    }
    raw.send(&built_route(99, |_, args| args.must_understand = u64::MAX));
    assert_eq!(raw.error(99), Kind::Unsupported);
    // Kinds that there are not, and answers where questions belong.
    for kind in [99, 200, 255, FrameKind::RouteReply as u8, FrameKind::Error as u8] {
        raw.send(&FrameHeader { kind, ..header(FrameKind::Route, 0, 100) }.encode());
        assert_eq!(raw.error(100), Kind::Unsupported, "{kind}");
    }
    raw.assert_served();
    drop(raw);
    daemon.assert_recovered();
}

#[test]
fn each_socket_answers_its_own_kinds_only() {
    let daemon = daemon();
    let id = CorrelationId(5);
    let admin_kinds = [
        encoded(|encoder, out| encoder.admin(id, &AdminRequest::Status { cursor: 0, limit: 0 }, out)),
        encoded(|encoder, out| encoder.admin(id, &AdminRequest::Reset(ResetOrder::default()), out)),
        encoded(|encoder, out| encoder.admin(id, &AdminRequest::SetPolicy(PolicyOrder::Promote), out)),
        encoded(|encoder, out| encoder.admin(id, &AdminRequest::RunningConfig { cursor: 0 }, out)),
        built(FrameKind::ChangeWorker, 5, |builder| {
            let args = fb::ChangeWorkerArgs { op: fb::WorkerOp::Remove, ..fb::ChangeWorkerArgs::default() };
            fb::ChangeWorker::create(builder, &args)
        }),
    ];
    let mut raw = daemon.greeted();
    for frame in &admin_kinds {
        raw.send(frame);
        assert_eq!(raw.error(5), Kind::AdminOnly);
    }
    let mut admin = Raw::connect(&admin_path(&daemon.socket()));
    admin.send(&admin_kinds[0]);
    assert_eq!(admin.error(5), Kind::HelloRequired);
    admin.hello(None).expect("hello");
    let mut encoder = RequestEncoder::default();
    let mut routing_kinds = vec![Vec::new(); 2];
    encoder.workers(id, None, 0, 0, &mut routing_kinds[0]);
    encoder.free(id, &kvrouted::load::BookingRef::Request { request_id: "r", attempt: 0 }, &mut routing_kinds[1]);
    routing_kinds.push(route_frame(5, 40));
    for frame in routing_kinds {
        admin.send(&frame);
        assert_eq!(admin.error(5), Kind::Unsupported);
    }
    assert_eq!(daemon.status().workers.len(), 1, "no worker was removed");
    raw.assert_served();
    drop((raw, admin));
    daemon.assert_recovered();
}
