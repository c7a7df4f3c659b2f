//! One user who takes all that one user may have, of everything that there is for all, and another who is served all the
//! while.

use std::net::Shutdown;
use std::path::Path;

use kvrouted::error::Kind;
use kvrouted::ids::CorrelationId;
use kvrouted::limits::{CONNECTIONS_MAX, CORE_RECEIVE_BYTES_MAX, FRAME_BODY_BYTES_MAX_DEFAULT};
use kvrouted::route::BookingRequest;
use kvrouted::wire::{FrameKind, LaneAsked};

use crate::identity::{GATEWAY, MEMBER, Someone, daemon};
use crate::process::until;
use crate::raw::{Raw, encoded, header, question};

/// What one user may have, percent.
const SHARE: usize = 2;

fn configured(more: &str) -> String {
    format!("socket_mode = \"0666\"\nuser_share_percent = {SHARE}\n{more}")
}

fn connected(someone: Someone, socket: &Path) -> Raw {
    someone.greets(socket, None).expect("hello")
}

/// So much of `all` is the share.
fn share_of(all: usize) -> usize {
    (all * SHARE).div_ceil(100)
}

#[test]
fn the_connections_of_one_user_leave_some_for_others() {
    let Some((daemon, socket)) = daemon(&configured("cores = 2"), "") else { return };
    let held: Vec<Raw> = (0..share_of(CONNECTIONS_MAX)).map(|_| connected(GATEWAY, &socket)).collect();
    for _ in 0..3 {
        assert!(matches!(GATEWAY.greets(&socket, None), Err(Kind::Overloaded)));
    }
    connected(MEMBER, &socket).assert_served();
    assert_eq!(["connections_refused_user", "connections_refused"].map(|name| daemon.counter(name)), [3, 0]);
    drop(held);
    until("there is room again", || GATEWAY.greets(&socket, None).is_ok());
    daemon.assert_recovered();
}

#[test]
fn the_large_frames_of_one_user_leave_room_for_those_of_others() {
    let Some((daemon, socket)) = daemon(&configured("cores = 1\nframe_timeout_ms = 600000"), "") else { return };
    // The most that a frame may have, but for its end: of one user two such fit.
    let begun = |someone| {
        let mut raw = connected(someone, &socket);
        raw.send(&header(FrameKind::Route, FRAME_BODY_BYTES_MAX_DEFAULT, 7).encode());
        raw.send(&vec![0; FRAME_BODY_BYTES_MAX_DEFAULT as usize - 64]);
        raw
    };
    const { assert!(FRAME_BODY_BYTES_MAX_DEFAULT as usize * 8 < CORE_RECEIVE_BYTES_MAX) };
    let (held, refused): (Vec<Raw>, Vec<Raw>) = ((0..2).map(|_| begun(GATEWAY)).collect(), vec![begun(GATEWAY)]);
    until("the third is refused", || daemon.counter("frames_no_room_user") == 1);
    let other = begun(MEMBER);
    connected(MEMBER, &socket).assert_served();
    let told = held.into_iter().chain(refused).chain([other]).map(|mut raw| {
        raw.stream.shutdown(Shutdown::Write).expect("shut down");
        raw.errors_until_end().first().copied()
    });
    assert_eq!(told.collect::<Vec<_>>(), [None, None, Some(Kind::Overloaded), None]);
    assert_eq!(["frames_no_room_user", "frames_no_room"].map(|name| daemon.counter(name)), [1, 0]);
    daemon.assert_recovered();
}

#[test]
fn the_lanes_of_one_user_leave_some_for_others() {
    let Some((daemon, socket)) = daemon(&configured("lanes_max = 100"), "") else { return };
    let asked = LaneAsked { request_ring_bytes: 4096, reply_ring_bytes: 4096 };
    let ask = |someone| {
        let mut raw = connected(someone, &socket);
        raw.send(&encoded(|encoder, out| encoder.open_lane(CorrelationId(5), asked, out)));
        raw
    };
    // A reply that is not read yet has its descriptors with it: the lane stays.
    let held = [ask(GATEWAY), ask(GATEWAY)];
    until("both are open", || daemon.counter("lanes_opened") == share_of(100) as u64);
    let mut refused = ask(GATEWAY);
    assert_eq!(refused.error(5), Kind::Overloaded);
    refused.assert_served();
    let other = ask(MEMBER);
    until("another user's is open", || daemon.counter("lanes_opened") == 3);
    assert_eq!(["lanes_refused_user", "lanes_refused_full"].map(|name| daemon.counter(name)), [1, 0]);
    drop((held, refused, other));
    until("all have ended", || daemon.counter("lanes_closed_with_connection") == 3);
    daemon.assert_recovered();
}

/// A request of 160 tokens that is booked, or waits.
fn booking(name: &str) -> Vec<u8> {
    let (tokens, book) = (vec![1; 640], Some(BookingRequest { request_id: name, attempt: 0 }));
    let request = kvrouted::route::RouteRequest { book, ..question(&tokens) };
    encoded(|encoder, out| encoder.route(CorrelationId(9), &request, out).expect("encoded"))
}

#[test]
fn the_waiting_requests_of_one_user_leave_places_for_those_of_others() {
    let policy = "batched_tokens_max = 100\n[policy]\nqueue_threshold = 0.5\nqueue_requests_max = 100";
    let Some((daemon, socket)) = daemon(&configured(""), policy) else { return };
    let mut holder = connected(MEMBER, &socket);
    holder.send(&booking("held"));
    assert!(holder.decided(9).booking.is_some());
    let mut greedy = connected(GATEWAY, &socket);
    for name in ["a", "b"] {
        greedy.send(&booking(name));
    }
    until("as many wait as may", || daemon.counter("queue_waiting") == share_of(100) as u64);
    let mut refused = connected(GATEWAY, &socket);
    refused.send(&booking("c"));
    assert_eq!(refused.error(9), Kind::QueueFull);
    let mut other = connected(MEMBER, &socket);
    other.send(&booking("d"));
    until("another user's waits, too", || daemon.counter("queue_waiting") == 3);
    assert_eq!(["queue_refused_user", "queue_refused_requests"].map(|name| daemon.counter(name)), [1, 0]);
    // Who has left has nothing any more.
    drop(greedy);
    until("their places are free", || daemon.counter("queue_waiting") == 1);
    refused.send(&booking("e"));
    until("it waits", || daemon.counter("queue_waiting") == 2);
}
