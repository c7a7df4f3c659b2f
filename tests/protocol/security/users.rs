//! One user who takes a user's whole share of everything that clients share, and another user who is served all the
//! while.

use std::net::Shutdown;
use std::path::{Path, PathBuf};

use kvrouted::client::Reply;
use kvrouted::error::Kind;
use kvrouted::ids::{CorrelationId, SpaceId, Worker};
use kvrouted::limits::{
    ACTIVE_WORDS_MAX, BOOKINGS_MAX, CONNECTIONS_MAX, CORE_RECEIVE_BYTES_MAX, FRAME_BODY_BYTES_MAX_DEFAULT,
    QUEUE_SETS_MAX, SESSIONS_MAX,
};
use kvrouted::load::{EngineLoad, SessionToken};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::shares::SharedResource;
use kvrouted::wire::{FrameKind, LaneRequest};

use super::besieged::Besieged;
use super::identity::{GATEWAY, MEMBER, Someone, daemon};
use crate::kit::raw::{Raw, encoded, header, question};
use crate::kit::{until, until_ok};

/// What one user may have, percent.
const SHARE: usize = 2;

fn configured(more: &str) -> String {
    format!("socket_mode = \"0666\"\nuser_share_percent = {SHARE}\n{more}")
}

fn connected(someone: Someone, socket: &Path) -> Raw {
    someone.greets(socket, None).expect("hello")
}

/// A user's share of `all`.
fn share_of(all: usize) -> usize {
    (all * SHARE).div_ceil(100)
}

/// What shows that one user leaves a share of something to others.
const fn attack_on(resource: SharedResource) -> fn() {
    match resource {
        SharedResource::Connections => the_connections_of_one_user_leave_some_for_others,
        SharedResource::ReceiveBytes => the_large_frames_of_one_user_leave_room_for_those_of_others,
        SharedResource::Lanes => the_lanes_of_one_user_leave_some_for_others,
        SharedResource::WaitingRequests | SharedResource::WaitingBytes => {
            the_waiting_requests_of_one_user_leave_places_for_those_of_others
        }
        SharedResource::WaitingSets => the_sets_of_workers_that_one_user_waits_for_leave_some_for_others,
        SharedResource::Sessions => the_sessions_of_one_user_leave_some_for_others,
        SharedResource::Bookings => the_bookings_of_one_user_leave_some_for_others,
        SharedResource::PromptMemory => the_prompts_of_one_user_leave_memory_for_those_of_others,
        SharedResource::AffinityBindings => the_bound_sessions_of_one_user_leave_those_of_others_bound,
        SharedResource::WorkersKeptAway => the_failures_that_one_user_reports_keep_few_workers_from_others,
        SharedResource::WorkersWithReportedLoads => the_loads_that_one_user_reports_are_those_of_few_workers,
    }
}

#[test]
fn of_everything_countable_one_user_leaves_a_share_to_others() {
    let mut done: Vec<fn()> = Vec::new();
    for resource in SharedResource::ALL {
        let attack = attack_on(resource);
        if !done.iter().any(|other| std::ptr::fn_addr_eq(*other, attack)) {
            attack();
            done.push(attack);
        }
    }
}

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

fn the_lanes_of_one_user_leave_some_for_others() {
    let Some((daemon, socket)) = daemon(&configured("lanes_max = 100"), "") else { return };
    let asked = LaneRequest { request_ring_bytes: 4096, reply_ring_bytes: 4096 };
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
    booking_as(name, |request| request)
}

/// The same with something else about it.
fn booking_as<'a>(name: &'a str, change: impl FnOnce(RouteRequest<'a>) -> RouteRequest<'a>) -> Vec<u8> {
    let book = Some(BookingRequest { request_id: name, attempt: 0 });
    let request = change(RouteRequest { book, ..question(&[1; 640]) });
    encoded(|encoder, out| encoder.route(CorrelationId(9), &request, out).expect("encoded"))
}

/// Long enough for sessions to be held by what they have booked.
const LONG_GRACE: &str = "[booking]\nsession_grace_s = 600";

fn the_sessions_of_one_user_leave_some_for_others() {
    let Some((daemon, socket)) = daemon(&configured(""), LONG_GRACE) else { return };
    let token = |lo| Some(SessionToken { hi: 7, lo });
    for lo in 0..share_of(SESSIONS_MAX) as u64 {
        // The connections before it may still be counted.
        let greeted = || GATEWAY.greets(&socket, token(lo)).map_err(|kind| format!("{kind:?}"));
        let mut raw = until_ok("a session", greeted);
        raw.send(&booking("held"));
        assert!(raw.decided(9).booking.is_some());
    }
    until("no other client is connected", || daemon.open().0 <= 1);
    assert!(matches!(GATEWAY.greets(&socket, None), Err(Kind::Overloaded)));
    assert!(GATEWAY.greets(&socket, token(0)).is_ok(), "its own sessions stay");
    connected(MEMBER, &socket).assert_served();
    // What holds nothing makes way.
    let mut raw = GATEWAY.greets(&socket, token(1)).expect("a session");
    raw.send(&encoded(|encoder, out| {
        let booking = kvrouted::load::BookingRef::Request { request_id: "held", attempt: 0 };
        encoder.free(CorrelationId(9), &booking, out);
    }));
    raw.reply();
    drop(raw);
    until("an idle session makes way", || GATEWAY.greets(&socket, None).is_ok());
    assert_eq!(daemon.counter("bookings_live"), share_of(SESSIONS_MAX) as u64 - 1);
}

fn the_bookings_of_one_user_leave_some_for_others() {
    let Some((daemon, socket)) = daemon(&configured(""), "") else { return };
    let mut greedy = connected(GATEWAY, &socket);
    let all: Vec<usize> = (0..share_of(BOOKINGS_MAX)).collect();
    for some in all.chunks(100) {
        let frames: Vec<u8> = some.iter().flat_map(|at| booking(&at.to_string())).collect();
        greedy.send(&frames);
        some.iter().for_each(|_| assert!(greedy.decided(9).booking.is_some()));
    }
    // Not by another session either.
    for mut raw in [greedy, connected(GATEWAY, &socket)] {
        raw.send(&booking("one more"));
        assert_eq!(raw.error(9), Kind::TooManyBookings);
        let mut other = connected(MEMBER, &socket);
        other.send(&booking("another's"));
        assert!(other.decided(9).booking.is_some());
    }
    daemon.greeted().assert_served();
}

fn the_prompts_of_one_user_leave_memory_for_those_of_others() {
    let Some((daemon, socket)) = daemon(&configured(""), "") else { return };
    let blocks = share_of(ACTIVE_WORDS_MAX) / 5;
    let prompt =
        |seed: u32| -> Vec<u8> { (0..blocks as u32 * 16).flat_map(|at| (at ^ (seed << 24)).to_le_bytes()).collect() };
    let ask = |raw: &mut Raw, name: &str, seed| {
        let tokens = prompt(seed);
        raw.send(&booking_as(name, |request| RouteRequest { prompt: Prompt::Tokens(&tokens), ..request }));
        assert!(raw.decided(9).booking.is_some());
    };
    let (mut greedy, mut other) = (connected(GATEWAY, &socket), connected(MEMBER, &socket));
    for seed in 0..6 {
        ask(&mut greedy, &seed.to_string(), seed);
    }
    assert!(daemon.counter("bookings_unshared") >= 1, "those beyond the share are counted in full");
    let before = daemon.counter("bookings_unshared");
    ask(&mut other, "another's", 100);
    assert_eq!(daemon.counter("bookings_unshared"), before);
}

fn the_bound_sessions_of_one_user_leave_those_of_others_bound() {
    let policy = "[policy]\naffinity = \"soft\"\naffinity_sessions_max = 8";
    let Some((daemon, socket)) = daemon(&configured(""), policy) else { return };
    let (mut greedy, mut other) = (connected(GATEWAY, &socket), connected(MEMBER, &socket));
    let bind = |raw: &mut Raw, session: &str| {
        raw.send(&booking_as(session, |request| RouteRequest { affinity_session: Some(session), ..request }));
        assert!(raw.decided(9).booking.is_some());
    };
    (0..50).for_each(|at| bind(&mut greedy, &format!("greedy {at}")));
    bind(&mut other, "another's");
    (50..100).for_each(|at| bind(&mut greedy, &format!("greedy {at}")));
    let book = BookingRequest { request_id: "again", attempt: 0 };
    other.send(&booking_as("another's", |request| RouteRequest {
        book: Some(book),
        affinity_session: Some("another's"),
        ..request
    }));
    assert!(other.decided(9).booking.is_some());
    assert_eq!(["affinity_new", "affinity_kept"].map(|name| daemon.counter(name)), [101, 1]);
}

fn the_sets_of_workers_that_one_user_waits_for_leave_some_for_others() {
    let workers: String = (2..=6).map(|id| format!("[[worker]]\nid = {id}\nbatched_tokens_max = 100\n")).collect();
    // Costs of this mode do not depend on the time.
    let policy = "[policy]\nmode = \"kv\"\nqueue_threshold = 0.5\nqueue_requests_max = 60000";
    let tables = format!("batched_tokens_max = 100\n{workers}{policy}");
    let Some((daemon, socket)) = daemon(&configured(""), &tables) else { return };
    let mut holder = connected(MEMBER, &socket);
    for at in 0..6 {
        holder.send(&booking(&at.to_string()));
        assert!(holder.decided(9).booking.is_some(), "every worker has one");
    }
    let wait = |raw: &mut Raw, set: u64| {
        let allow: Vec<Worker> = (0..6).filter(|bit| set >> bit & 1 == 1).map(|bit| Worker::new(bit + 1, 0)).collect();
        let name = format!("set {set}");
        raw.send(&booking_as(&name, |request| RouteRequest { allow: Some(&allow), ..request }));
    };
    let (mut greedy, mut other) = (connected(GATEWAY, &socket), connected(MEMBER, &socket));
    let sets = share_of(QUEUE_SETS_MAX) as u64;
    (1..=sets).for_each(|set| wait(&mut greedy, set));
    until("all wait", || daemon.counter("queue_waiting") == sets);
    wait(&mut greedy, sets + 1);
    assert_eq!(greedy.error(9), Kind::QueueFull);
    wait(&mut other, sets + 2);
    until("another user's waits, too", || daemon.counter("queue_waiting") == sets + 1);
    assert_eq!(["queue_refused_user", "queue_refused_sets"].map(|name| daemon.counter(name)), [1, 0]);
}

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

/// A space of this many workers, whose reports of failure and of load hold for longer than a test runs.
const REPORTED_WORKERS: u64 = 10;

fn with_reported_workers() -> Option<(Besieged, PathBuf)> {
    let workers: String = (2..=REPORTED_WORKERS).map(|id| format!("[[worker]]\nid = {id}\n")).collect();
    let booking = "[booking]\nback_off_ms = 60000\nback_off_ms_max = 60000\nreported_load_ms_max = 60000";
    let policy = "[policy]\nbusy_prefill_tokens = 1000";
    daemon(&configured(""), &format!("{workers}{booking}\n{policy}"))
}

/// How many workers a gateway may choose among.
fn eligible(raw: &mut Raw) -> usize {
    let request = RouteRequest { candidates_max: REPORTED_WORKERS as usize, ..question(&[1; 640]) };
    raw.send(&encoded(|encoder, out| encoder.route(CorrelationId(9), &request, out).expect("encoded")));
    raw.decided(9).candidates.len()
}

fn the_failures_that_one_user_reports_keep_few_workers_from_others() {
    let Some((daemon, socket)) = with_reported_workers() else { return };
    let (mut greedy, mut other) = (connected(GATEWAY, &socket), connected(MEMBER, &socket));
    let report = |raw: &mut Raw, id: u64| {
        raw.send(&encoded(|encoder, out| {
            encoder.report_failure(CorrelationId(3), (SpaceId(0), Worker::new(id, 0)), "a lie", out);
        }));
        let (3, Reply::ReportFailure(back_off_ms)) = raw.reply() else { panic!("no answer to a report of failure") };
        back_off_ms
    };
    // Where every worker backs off, none does: one is left out.
    let told: Vec<u32> = (1..REPORTED_WORKERS).map(|id| report(&mut greedy, id)).collect();
    assert_eq!((eligible(&mut other), told), (9, [vec![60_000], vec![0; 8]].concat()));
    // Nor by another session; the other user's own reports are heard.
    assert_eq!(report(&mut connected(GATEWAY, &socket), 2), 0);
    assert_eq!((report(&mut other, 2), eligible(&mut other)), (60_000, 8));
    assert_eq!(["failures_reported", "failure_reports_refused_user"].map(|name| daemon.counter(name)), [11, 9]);
}

fn the_loads_that_one_user_reports_are_those_of_few_workers() {
    let Some((daemon, socket)) = with_reported_workers() else { return };
    let (mut greedy, mut other) = (connected(GATEWAY, &socket), connected(MEMBER, &socket));
    let report = |raw: &mut Raw, id: u64, prefill_tokens| {
        let load = EngineLoad { prefill_tokens, ..EngineLoad::default() };
        raw.send(&encoded(|encoder, out| {
            encoder.report_load(CorrelationId(3), (SpaceId(0), Worker::new(id, 0)), &load, out);
        }));
        let (3, Reply::ReportLoad(accepted)) = raw.reply() else { panic!("no answer to a report of load") };
        accepted
    };
    let told: Vec<bool> = (1..=REPORTED_WORKERS).map(|id| report(&mut greedy, id, 2000)).collect();
    assert_eq!((eligible(&mut other), told), (9, [vec![true], vec![false; 9]].concat()));
    assert!(report(&mut greedy, 1, 3000), "the worker that it reports on already");
    assert!(!report(&mut connected(GATEWAY, &socket), 2, 2000), "nor by another session");
    // The other user's word on the same worker takes the place of the first one's, who may report on another then.
    assert!(report(&mut other, 1, 0));
    assert_eq!(eligible(&mut other), REPORTED_WORKERS as usize);
    assert!(report(&mut greedy, 2, 2000));
    assert_eq!(["loads_reported", "load_reports_refused_user"].map(|name| daemon.counter(name)), [14, 10]);
}
