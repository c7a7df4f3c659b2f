//! Frames, good and bad, byte by byte.

use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::thread;

use kvrouted::client::Reply;
use kvrouted::error::Kind;
use kvrouted::ids::{CorrelationId, SpaceId};
use kvrouted::limits::{CONNECTIONS_MAX, FRAME_HEADER_BYTES, RECEIVE_BUFFER_BYTES_MIN};
use kvrouted::load::SessionToken;
use kvrouted::metrics::CoreCounter;
use kvrouted::route::RouteRequest;
use kvrouted::wire::{FrameHeader, FrameKind, RequestEncoder};

use super::daemon::{BODY_MAX, Daemon, on_every_engine};
use super::service::INSTANCE;
use crate::kit::raw::{Raw, encoded, frame, header, question, route_frame};

#[test]
fn hello_comes_first_and_once_and_names_the_version() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
        let mut raw = Raw::connect(&daemon.path);
        raw.send(&route_frame(5, 4));
        assert_eq!(raw.error(5), Kind::HelloRequired);
        raw.send(&encoded(|_, out| raw_hello(6, (2, 9), None, out)));
        assert_eq!(raw.error(6), Kind::UnsupportedVersion);
        raw.send(&encoded(|_, out| raw_hello(7, (1, 1), Some(SessionToken { hi: 1, lo: 1 }), out)));
        assert_eq!(raw.error(7), Kind::NotPermitted);
        raw.send(&encoded(|_, out| raw_hello(8, (0, 9), None, out)));
        let (id, Reply::Hello(hello)) = raw.reply() else { panic!("no hello") };
        assert_eq!((id, hello.version, hello.instance_id, hello.spaces.len()), (8, 1, INSTANCE, 2));
        assert_eq!((hello.limits.frame_body_bytes_max, hello.limits.bookings_per_session_max), (BODY_MAX, 5));
        raw.send(&encoded(|_, out| raw_hello(9, (1, 1), None, out)));
        assert_eq!(raw.error(9), Kind::InvalidArgument);
        raw.assert_decided(4);
        assert_eq!(daemon.sessions_open.load(Ordering::SeqCst), 1);
    });
}

fn raw_hello(id: u64, versions: (u16, u16), session: Option<SessionToken>, out: &mut Vec<u8>) {
    RequestEncoder::default().hello_range(CorrelationId(id), versions, "raw", session, out);
}

#[test]
fn frames_may_be_split_anywhere() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
        let two = [route_frame(1, 3), route_frame(2, 5)].concat();
        for at in 1..two.len() {
            let mut raw = daemon.greeted();
            raw.send(&two[..at]);
            // So that the daemon reads the part alone, most of the time.
            thread::yield_now();
            raw.send(&two[at..]);
            assert_eq!((raw.reply().0, raw.reply().0), (1, 2), "split at {at}");
        }
        let mut raw = daemon.greeted();
        for byte in &two {
            raw.send(&[*byte]);
        }
        assert_eq!((raw.reply().0, raw.reply().0), (1, 2), "byte by byte");
    });
}

#[test]
fn bad_bodies_get_typed_errors_and_the_connection_stays() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
        let mut raw = daemon.greeted();
        raw.send(&frame(header(FrameKind::Route, 0, 1), &[]));
        assert_eq!(raw.error(1), Kind::Malformed);
        raw.send(&frame(header(FrameKind::Route, 64, 2), &[0xab; 64]));
        assert_eq!(raw.error(2), Kind::Malformed);
        let good = route_frame(3, 40);
        let half = &good[FRAME_HEADER_BYTES..FRAME_HEADER_BYTES + 64];
        raw.send(&frame(header(FrameKind::Route, 64, 3), half));
        assert_eq!(raw.error(3), Kind::Malformed);
        raw.send(&frame(FrameHeader { version: 2, ..header(FrameKind::Route, 64, 4) }, &[0; 64]));
        assert_eq!(raw.error(4), Kind::UnsupportedVersion);
        raw.send(&frame(FrameHeader { kind: 99, ..header(FrameKind::Route, 8, 5) }, &[0; 8]));
        assert_eq!(raw.error(5), Kind::Unsupported);
        raw.send(&frame(header(FrameKind::WatchReply, 8, 6), &[0; 8]));
        assert_eq!(raw.error(6), Kind::Unsupported);
        raw.send(&encoded(|encoder, out| {
            encoder.admin(CorrelationId(7), &kvrouted::wire::AdminRequest::Status { cursor: 0, limit: 0 }, out)
        }));
        assert_eq!(raw.error(7), Kind::AdminOnly);
        let elsewhere = RouteRequest { space: SpaceId(9), ..question(&[]) };
        raw.send(&encoded(|encoder, out| encoder.route(CorrelationId(8), &elsewhere, out).unwrap()));
        assert_eq!(raw.error(8), Kind::UnknownSpace);
        raw.assert_decided(4);
        assert_eq!(daemon.counters.get(CoreCounter::Errors), 8);
        assert_eq!(daemon.counters.get(CoreCounter::ConnectionsUntrusted), 0);
    });
}

#[test]
fn an_oversized_body_is_skipped_and_the_largest_is_answered() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
        let mut raw = daemon.greeted();
        raw.send(&header(FrameKind::Route, BODY_MAX + 8, 1).encode());
        assert_eq!(raw.error(1), Kind::Oversized, "before the body has come");
        raw.send(&vec![0xff; BODY_MAX as usize + 8]);
        raw.assert_decided(4);
        let tokens = (BODY_MAX as usize - 256) / 4;
        assert!(tokens * 4 > RECEIVE_BUFFER_BYTES_MIN);
        raw.assert_decided(tokens);
        raw.assert_decided(5);
    });
}

#[test]
fn an_untrusted_header_closes_its_connection_only() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
        let mut other = daemon.greeted();
        let good = header(FrameKind::Route, 8, 1);
        let bad = [
            FrameHeader { kind: 0, ..good },
            FrameHeader { flags: 1, ..good },
            FrameHeader { body_bytes: 9, ..good },
            FrameHeader { body_bytes: u32::MAX - 7, ..good },
        ];
        for header in bad {
            let mut raw = daemon.greeted();
            raw.send(&[route_frame(4, 6), header.encode().to_vec()].concat());
            assert_eq!(raw.reply().0, 4, "what came before is answered");
            assert!(raw.is_at_end(), "{header:?}");
        }
        other.assert_decided(4);
        assert_eq!(daemon.counters.get(CoreCounter::ConnectionsUntrusted), 4);
    });
}

#[test]
fn a_half_closed_peer_gets_its_replies() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
        let mut raw = daemon.greeted();
        raw.send(&route_frame(9, 4));
        raw.stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(raw.reply().0, 9);
        assert!(raw.is_at_end());
    });
}
