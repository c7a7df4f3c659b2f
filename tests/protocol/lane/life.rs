//! The end of shm lanes: with the process that holds them.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use kvrouted::client::Client;
use kvrouted::error::Kind;
use kvrouted::ids::CorrelationId;
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::wire::{FrameHeader, FrameKind, Reply, decode_reply};

use super::raw::Raw;
use super::{WORKERS, lane_options, serving, space, with_lane};
use crate::kit::raw::read_frame;
use crate::kit::{Daemon, prompt, test_of_this_binary, until};

const SOCKET: &str = "KVROUTED_TEST_LANE_SOCKET";

/// A gateway as a process of its own: books by a lane, says so, and waits to be killed.
#[test]
fn gateway() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let mut client = Client::connect(socket.as_ref(), &lane_options()).expect("a lane");
    let tokens = prompt(1, 64);
    let book = Some(BookingRequest { request_id: "r", attempt: 0 });
    let request = RouteRequest { book, ..RouteRequest::new(space(&client), Prompt::of_tokens(&tokens)) };
    assert!(client.route(&request).expect("a decision").booking.is_some());
    println!("booked");
    std::thread::sleep(crate::kit::WAIT_MAX);
}

#[test]
fn a_gateway_that_is_killed_leaves_nothing_behind() {
    let folder = crate::kit::folder();
    let config = crate::kit::configure(folder.path(), "[booking]\nsession_grace_s = 0\n[[worker]]\nid = 1\n");
    let daemon = Daemon::serve(folder, &["--config", crate::kit::text(&config)]);
    let mut gateway = test_of_this_binary("lane::life::gateway")
        .env(SOCKET, daemon.socket())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a gateway");
    let said = BufReader::new(gateway.stdout.take().expect("its output"));
    assert!(said.lines().map_while(Result::ok).any(|line| line.contains("booked")));
    assert_eq!(daemon.counter("lanes_open"), 1);
    gateway.kill().expect("killed");
    gateway.wait().expect("ended");
    until("its lane is gone", || daemon.counter("lanes_open") == 0);
    until("its booking is gone", || daemon.counter("bookings_expired_session") == 1);
    assert_eq!(daemon.counter("lanes_closed_with_connection"), 1);
}

#[test]
fn a_gateway_that_leaves_in_the_middle_of_a_frame_leaves_nothing_behind() {
    let daemon = Daemon::start(WORKERS);
    let mut raw = Raw::open(&daemon);
    let mut half = FrameHeader::new(FrameKind::Route, 4096, CorrelationId(1)).encode().to_vec();
    half.extend([7; 800]);
    raw.send(&half);
    raw.is_open();
    drop(raw);
    until("its lane is gone", || daemon.counter("lanes_open") == 0);
    assert_eq!(daemon.counter("lanes_closed_with_connection"), 1);
    drop(with_lane(&daemon));
}

#[test]
fn a_gateway_that_does_not_end_its_frame_is_told_why_its_lane_ends() {
    for io in super::io_backends() {
        let daemon = serving(&format!("frame_timeout_ms = 300\nio = \"{io}\""));
        let mut raw = Raw::open(&daemon);
        raw.send(&FrameHeader::new(FrameKind::Route, 4096, CorrelationId(1)).encode());
        let (header, body) = read_frame(&mut raw.socket).expect("a frame");
        assert_eq!(header.correlation_id, CorrelationId(0), "{io}");
        let Ok(Reply::Error(error)) = decode_reply(header.kind, &body) else { panic!("{io}: no error") };
        assert!(error.kind == Some(Kind::Malformed) && error.message.contains("300 ms"), "{io}: {error:?}");
        raw.closed();
        assert_eq!(daemon.counter("connections_frame_overdue"), 1, "{io}");
        until("its lane has ended", || daemon.counter("lanes_ended_held") == 1);
        drop(raw);
        until("its lane is gone", || daemon.counter("lanes_open") == 0);
    }
}

#[test]
fn a_daemon_that_is_killed_is_noticed() {
    let mut daemon = Daemon::start(WORKERS);
    let mut client = with_lane(&daemon);
    let watching = with_lane(&daemon);
    let mut watch = watching.watch(None).expect("a watch");
    watch.next().expect("the fleet").expect("the fleet");
    let waits = std::thread::spawn(move || watch.next());
    assert_eq!(daemon.process.end("-KILL"), None);
    let error = waits.join().expect("no panic").expect("an end").expect_err("the daemon is gone");
    assert_eq!(error.kind(), Kind::Connection, "{error}");
    let tokens = prompt(1, 64);
    let question = RouteRequest::new(space(&client), Prompt::of_tokens(&tokens));
    assert_eq!(client.route(&question).expect_err("the daemon is gone").kind(), Kind::Connection);
}

#[test]
fn a_drain_answers_what_has_come_and_leaves_it_to_be_read() {
    for io in super::io_backends() {
        let mut daemon = Daemon::start(&[WORKERS, &["--io", io]].concat());
        let mut client = with_lane(&daemon);
        let idle = with_lane(&daemon);
        let tokens = prompt(1, 11_520);
        let question = RouteRequest::new(space(&client), Prompt::of_tokens(&tokens));
        let sent: Vec<_> = (0..5).map(|_| client.send_route(&question).expect("sent")).collect();
        client.flush().expect("sent");
        assert_eq!(daemon.process.end("-TERM"), Some(0), "{io}");
        // The daemon has ended by now; its last words are in the ring.
        for id in sent {
            assert_eq!(client.recv().expect("a reply").0, id, "{io}");
        }
        assert_eq!(client.recv().expect_err("nothing follows").kind(), Kind::Connection);
        drop(idle);
        let log = daemon.process.log();
        assert!(!log.contains("connections are dropped") && !log.contains("panicked"), "{log}");
    }
}
