//! Clients that are slow, half gone, or too many.

use std::net::Shutdown;
use std::time::Duration;

use kvrouted::client::Client;
use kvrouted::error::Kind;
use kvrouted::ids::CorrelationId;
use kvrouted::limits::{
    ADMIN_CONNECTIONS_MAX, CONNECTIONS_MAX, CORE_RECEIVE_BYTES_MAX, FRAME_BODY_BYTES_MAX_DEFAULT, FRAME_HEADER_BYTES,
};
use kvrouted::serve::admin_path;
use kvrouted::wire::FrameKind;

use super::besieged::Besieged;
use crate::kit::raw::{Raw, encoded, header, route_frame};
use crate::kit::{options, skipped, until};

/// Slow clients at once.
const SLOW: usize = 100;
/// Of administration: a few places are left for those who have just left.
const ADMIN_MUTE: usize = ADMIN_CONNECTIONS_MAX - 8;

#[test]
fn who_sends_a_frame_byte_by_byte_is_told_and_closed_while_others_are_answered() {
    for io in ["auto", "epoll"] {
        let daemon = Besieged::configured(&format!("frame_timeout_ms = 1500\nio = \"{io}\""), "");
        let frame = route_frame(9, 40);
        let mut slow: Vec<Raw> = (0..SLOW).map(|_| daemon.greeted()).collect();
        let mut other = daemon.greeted();
        // A byte each, now and then, never the last: every read comes in time, the frame does not.
        let (mut sent, mut open) = (0, SLOW);
        until("all of them are closed", || {
            if sent + 1 < frame.len() {
                open = slow.iter_mut().filter_map(|raw| raw.send_if_open(&frame[sent..=sent])).count();
                sent += 1;
            }
            other.assert_served();
            open == 0 || daemon.counter("connections_frame_overdue") >= SLOW as u64
        });
        for mut raw in slow {
            assert_eq!(raw.errors_until_end(), [Kind::Malformed]);
        }
        assert_eq!(daemon.counter("connections_frame_overdue"), SLOW as u64);
        assert_eq!(daemon.counter("connections_hello_overdue"), 0);
        drop(other);
        daemon.assert_recovered();
    }
}

impl Raw {
    /// Whether the daemon still takes it.
    fn send_if_open(&mut self, bytes: &[u8]) -> Option<()> {
        std::io::Write::write_all(&mut self.stream, bytes).ok()
    }
}

#[test]
fn who_never_says_hello_is_told_and_closed_on_either_socket() {
    let daemon = Besieged::configured("frame_timeout_ms = 1000", "");
    let mute: Vec<Raw> = (0..SLOW).map(|_| Raw::connect(&daemon.socket())).collect();
    let greeted = daemon.greeted();
    for mut raw in mute {
        assert_eq!(raw.errors_until_end(), [Kind::HelloRequired]);
    }
    assert_eq!(daemon.counter("connections_hello_overdue"), SLOW as u64);
    // Most places for admin connections, taken by clients without a hello.
    let admin = admin_path(&daemon.socket());
    let mute: Vec<Raw> = (0..ADMIN_MUTE).map(|_| Raw::connect(&admin)).collect();
    for mut raw in mute {
        assert_eq!(raw.errors_until_end(), [Kind::HelloRequired]);
    }
    let mut half = Raw::greeted(&admin);
    half.send(&header(FrameKind::Status, 64, 5).encode());
    assert_eq!(half.errors_until_end(), [Kind::Malformed]);
    assert!(daemon.counter("admin_connections_overdue") > ADMIN_MUTE as u64);
    // Who has said hello and asks nothing owes nothing.
    let mut greeted = greeted;
    greeted.assert_served();
    drop(greeted);
    daemon.assert_recovered();
}

#[test]
fn an_admin_who_takes_no_reply_is_closed() {
    let daemon = Besieged::configured("frame_timeout_ms = 1000", "");
    let mut mute = Raw::greeted(&admin_path(&daemon.socket()));
    let status = encoded(|encoder, out| {
        encoder.admin(CorrelationId(3), &kvrouted::wire::AdminRequest::Status { cursor: 0, limit: 0 }, out)
    });
    mute.stream.set_write_timeout(Some(Duration::from_millis(50))).expect("set");
    // Until neither side takes any more.
    while mute.send_if_open(&status).is_some() {}
    until("it is closed", || daemon.counter("admin_connections_overdue") == 1);
    daemon.assert_recovered();
}

#[test]
fn who_ends_one_half_or_vanishes_harms_nobody() {
    let daemon = Besieged::configured("", "");
    let question = route_frame(3, 40);
    for cut in 0..question.len() {
        let mut raw = daemon.greeted();
        raw.send(&question[..cut]);
        match cut % 3 {
            // The sending half ends in the middle of a frame: nothing is answered, and the rest ends too.
            0 => {
                raw.stream.shutdown(Shutdown::Write).expect("shut down");
                assert!(raw.next().is_none(), "cut at {cut}");
            }
            // The receiving half ends before there is an answer.
            1 => {
                raw.stream.shutdown(Shutdown::Read).expect("shut down");
                let _ = raw.send_if_open(&question[cut..]);
            }
            // Gone without a word, with what was sent unread or half read.
            _ => {}
        }
    }
    let mut raw = daemon.greeted();
    raw.send(&[question.clone(), route_frame(4, 40), question[..20].to_vec()].concat());
    raw.stream.shutdown(Shutdown::Write).expect("shut down");
    assert_eq!([raw.reply().0, raw.reply().0], [3, 4], "what was whole is answered");
    assert!(raw.next().is_none());
    daemon.assert_recovered();
}

#[test]
fn more_connections_than_may_be_are_told_so_and_the_others_go_on() {
    let room = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    if room.maximum.is_some_and(|maximum| maximum < 2 * CONNECTIONS_MAX as u64) {
        return skipped("a flood of connections", "the limit of open files cannot be raised far enough");
    }
    let raised = rustix::process::Rlimit { current: room.maximum, ..room };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).expect("raised");
    let daemon = Besieged::configured("cores = 2\nuser_share_percent = 100", "");
    until("no other client is connected", || daemon.open().0 <= 1);
    let mut held = Vec::new();
    let refused = loop {
        let mut raw = Raw::connect(&daemon.socket());
        match raw.hello(None) {
            Ok(_) => held.push(raw),
            Err(kind) => break (kind, raw.next().is_none()),
        }
        assert!(held.len() <= CONNECTIONS_MAX);
    };
    assert_eq!(refused, (Kind::Overloaded, true), "told, and closed");
    // One that asked before may still have been counted.
    assert!(held.len() >= CONNECTIONS_MAX - 1, "{}", held.len());
    held[0].assert_served();
    held[CONNECTIONS_MAX - 2].assert_served();
    drop(held);
    until("there is room again", || Client::connect(&daemon.socket(), &options()).is_ok());
    assert!(daemon.counter("connections_refused") > 0);
    daemon.assert_recovered();
}

#[test]
fn large_frames_that_never_end_take_no_more_than_there_is_for_all_of_them() {
    let daemon = Besieged::configured("cores = 1\nframe_timeout_ms = 600000\nuser_share_percent = 100", "");
    let before = daemon.footprint();
    // The most that a frame may have, but for its end.
    let part = vec![0; FRAME_BODY_BYTES_MAX_DEFAULT as usize - 64];
    let mut held: Vec<Raw> = (0..64).map(|_| daemon.greeted()).collect();
    for raw in &mut held {
        raw.send(&header(FrameKind::Route, FRAME_BODY_BYTES_MAX_DEFAULT, 7).encode());
        // A client without room gets an error while it sends, and the rest is skipped.
        raw.send(&part);
    }
    daemon.greeted().assert_served();
    let grown_kib = daemon.footprint().rss_kib.saturating_sub(before.rss_kib);
    assert!(grown_kib << 10 < CORE_RECEIVE_BYTES_MAX as u64 * 3 / 2, "{grown_kib} KiB");
    let refused = daemon.counter("frames_no_room");
    assert!((16..64).contains(&refused), "{refused} of 64 were refused");
    let told = held.into_iter().filter_map(|mut raw| {
        raw.stream.shutdown(Shutdown::Write).expect("shut down");
        raw.errors_until_end().first().copied()
    });
    assert_eq!(told.filter(|kind| *kind == Kind::Overloaded).count() as u64, refused);
    daemon.assert_recovered();
}

#[test]
fn thousands_of_tiny_frames_and_of_headers_alone_are_answered_in_order() {
    let daemon = Besieged::configured("", "");
    let mut raw = daemon.greeted();
    let count = 20_000_u64;
    let mut writer = raw.stream.try_clone().expect("cloned");
    let sending = std::thread::spawn(move || {
        let frames: Vec<u8> = (0..count).flat_map(|id| header(FrameKind::Free, 0, id).encode()).collect();
        assert_eq!(frames.len(), count as usize * FRAME_HEADER_BYTES);
        std::io::Write::write_all(&mut writer, &frames).expect("sent");
    });
    let mut other = daemon.greeted();
    for id in 0..count {
        assert_eq!(raw.error(id), Kind::Malformed, "a body of no bytes is no booking");
        if id % 1000 == 0 {
            other.assert_served();
        }
    }
    sending.join().expect("sent");
    raw.assert_served();
    drop((raw, other));
    daemon.assert_recovered();
}
