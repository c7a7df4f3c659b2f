//! Shm lanes between real processes: the same replies as over the socket, and the lane's end with its connection.

mod hostile;
mod life;
mod raw;

use std::time::Duration;

use crate::kit::{self, Daemon, options, prompt, skipped, until};
use kvrouted::client::{Client, ClientOptions, LaneUse};
use kvrouted::error::Kind;
use kvrouted::ids::{SpaceId, Worker};
use kvrouted::load::{BookingOutcome, BookingRef, SessionToken};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::wire::{Reply, RouteReply, features};

const WORKERS: &[&str] = &["--worker", "id=1", "--worker", "id=2", "--worker", "id=3"];

/// A daemon with these settings of `[serve]`.
fn serving(settings: &str) -> Daemon {
    let folder = kit::folder();
    let workers: String = (1..=3).map(|id| format!("[[worker]]\nid = {id}\n")).collect();
    let path = kit::configure_serve(folder.path(), settings, &workers);
    Daemon::serve(folder, &["--config", kit::text(&path)])
}

fn lane_options() -> ClientOptions {
    ClientOptions { lane: LaneUse::Require, ..options() }
}

fn with_lane(daemon: &Daemon) -> Client {
    let client = Client::connect(&daemon.socket(), &lane_options()).expect("a lane");
    assert!(client.has_lane() && client.lane_refusal().is_none());
    client
}

fn space(client: &Client) -> SpaceId {
    client.space("m", None).expect("the space").id
}

/// What of a decision does not depend on chance.
fn told(reply: &RouteReply) -> (Vec<(Worker, String)>, u32, u64) {
    let mut workers: Vec<_> = reply.candidates.iter().map(|one| (one.worker, format!("{one:?}"))).collect();
    workers.sort_by_key(|(worker, _)| *worker);
    (workers, reply.request_blocks, reply.policy_version)
}

/// The kernel interfaces that work here. Lanes do not use them, but the socket that opens and ends a lane does.
fn io_backends() -> Vec<&'static str> {
    match kvrouted::serve::probe_uring() {
        Ok(()) => vec!["epoll", "uring"],
        Err(error) => {
            skipped("lanes over io_uring", &error.to_string());
            vec!["epoll"]
        }
    }
}

#[test]
fn what_goes_by_a_lane_is_what_goes_by_the_socket() {
    for io in io_backends() {
        // Costs of this mode do not depend on the time.
        let daemon = Daemon::start(&[WORKERS, &["--io", io, "--mode", "kv"]].concat());
        let (mut lane, mut socket) = (with_lane(&daemon), daemon.client());
        assert!(!socket.has_lane());
        let held = prompt(1, 640);
        let book = Some(BookingRequest { request_id: "held", attempt: 0 });
        let booked = RouteRequest { book, ..RouteRequest::new(space(&lane), Prompt::of_tokens(&held)) };
        let handle = lane.route(&booked).expect("a decision").booking.expect("a booking");
        // The last is twice the size of a ring.
        for tokens in [0, 16, 65, 11_520, 131_072] {
            let tokens = prompt(tokens, tokens);
            let question = RouteRequest::new(space(&lane), Prompt::of_tokens(&tokens));
            let (by_lane, by_socket) = (lane.route(&question).expect("a decision"), socket.route(&question));
            assert_eq!(told(&by_lane), told(&by_socket.expect("a decision")), "{io}");
        }
        let nowhere = RouteRequest::new(SpaceId(9), Prompt::of_tokens(&held));
        assert_eq!(lane.route(&nowhere).expect_err("no space").kind(), Kind::UnknownSpace);
        assert_eq!(lane.free(&BookingRef::Handle(handle)).expect("told"), BookingOutcome::Applied);
        let workers = lane.workers(None).expect("workers");
        assert_eq!(workers, socket.workers(None).expect("workers"));
        assert_eq!(daemon.counter("lanes_open"), 1);
        drop(lane);
        until("the lane is gone", || daemon.counter("lanes_open") == 0);
        assert_eq!(["lanes_opened", "lanes_closed_with_connection"].map(|name| daemon.counter(name)), [1, 1]);
    }
}

#[test]
fn replies_come_in_any_number_and_by_the_way_of_their_requests() {
    let daemon = serving("spin_us_max = 200");
    let options = ClientOptions { spin: Duration::from_micros(200), ..lane_options() };
    let mut clients = [0; 2].map(|_| Client::connect(&daemon.socket(), &options).expect("a lane"));
    let mut socket = daemon.client();
    let tokens = prompt(3, 12_000);
    // Far more than both rings hold.
    let question = RouteRequest::new(space(&socket), Prompt::of_tokens(&tokens));
    let mut waiting: [Vec<_>; 2] = Default::default();
    for _ in 0..200 {
        for (client, waiting) in clients.iter_mut().zip(&mut waiting) {
            waiting.push(client.send_route(&question).expect("sent"));
        }
    }
    assert_eq!(socket.route(&question).expect("a decision").candidates.len(), 3, "others have their turn");
    for (client, waiting) in clients.iter_mut().zip(&mut waiting) {
        while !waiting.is_empty() {
            let (id, reply) = client.recv().expect("a reply");
            assert!(matches!(reply, Reply::Route(_)), "{reply:?}");
            let at = waiting.iter().position(|waits| *waits == id).expect("one that was asked");
            waiting.swap_remove(at);
        }
    }
}

#[test]
fn a_lane_is_of_its_connections_session() {
    let daemon = Daemon::start(WORKERS);
    let session = Some(SessionToken { hi: 1, lo: 2 });
    let mut lane = Client::connect(&daemon.socket(), &ClientOptions { session, ..lane_options() }).expect("a lane");
    let mut beside = Client::connect(&daemon.socket(), &ClientOptions { session, ..options() }).expect("a connection");
    let mut stranger = daemon.client();
    let tokens = prompt(1, 64);
    let book = |request_id| {
        let book = Some(BookingRequest { request_id, attempt: 0 });
        RouteRequest { book, ..RouteRequest::new(space(&daemon.client()), Prompt::of_tokens(&tokens)) }
    };
    let handle = lane.route(&book("by-lane")).expect("a decision").booking.expect("a booking");
    assert_eq!(stranger.free(&BookingRef::Handle(handle)).expect("told"), BookingOutcome::Unknown);
    assert_eq!(beside.free(&BookingRef::Handle(handle)).expect("told"), BookingOutcome::Applied);
    // The session outlives its lane.
    let handle = lane.route(&book("left")).expect("a decision").booking.expect("a booking");
    drop(lane);
    until("the lane is gone", || daemon.counter("lanes_open") == 0);
    assert_eq!(beside.free(&BookingRef::Handle(handle)).expect("told"), BookingOutcome::Applied);
}

#[test]
fn late_replies_and_watches_go_by_the_lane() {
    let tables = "[policy]\nqueue_threshold = 0.5\n[[worker]]\nid = 1\nbatched_tokens_max = 100\n";
    let daemon = Daemon::configured(tables);
    let (mut holder, mut waiter) = (daemon.client(), with_lane(&daemon));
    let tokens = prompt(1, 64);
    let book = |request_id| {
        let book = Some(BookingRequest { request_id, attempt: 0 });
        RouteRequest { book, ..RouteRequest::new(space(&daemon.client()), Prompt::of_tokens(&tokens)) }
    };
    let held = holder.route(&book("held")).expect("a decision").booking.expect("a booking");
    let id = waiter.send_route(&book("waits")).expect("sent");
    waiter.flush().expect("sent");
    until("it waits", || daemon.counter("queue_waiting") == 1);
    holder.free(&BookingRef::Handle(held)).expect("told");
    match waiter.recv().expect("a reply") {
        (of, Reply::Route(reply)) => assert!(of == id && reply.booking.is_some()),
        (_, other) => panic!("no decision: {other:?}"),
    }
    let mut watch = waiter.watch(None).expect("a watch");
    assert_eq!(watch.next().expect("the fleet").expect("the fleet").workers.len(), 1);
    daemon.worker_ok(&["add", "id=7"]);
    assert_eq!(watch.next().expect("a change").expect("the fleet").workers.len(), 2);
    // Who waits when the lane goes is forgotten, and what is booked is freed with the session.
    drop(watch);
    until("the lane is gone", || daemon.counter("lanes_open") == 0);
}

#[test]
fn who_gets_no_lane_goes_by_the_socket_and_knows_why() {
    let daemon = serving("lanes_max = 1");
    let first = with_lane(&daemon);
    let error = Client::connect(&daemon.socket(), &lane_options()).expect_err("none left");
    assert_eq!(error.kind(), Kind::Overloaded, "{error}");
    let trying = ClientOptions { lane: LaneUse::Try, ..options() };
    let mut second = Client::connect(&daemon.socket(), &trying).expect("a connection");
    assert!(!second.has_lane());
    assert_eq!(second.lane_refusal().map(kvrouted::error::Error::kind), Some(Kind::Overloaded));
    let tokens = prompt(1, 64);
    let question = RouteRequest::new(space(&second), Prompt::of_tokens(&tokens));
    assert_eq!(second.route(&question).expect("a decision").candidates.len(), 3);
    drop(first);
    until("there is room again", || Client::connect(&daemon.socket(), &trying).is_ok_and(|client| client.has_lane()));
    assert!(daemon.counter("lanes_refused_full") >= 2);

    let without = serving("lanes_max = 0");
    let client = Client::connect(&without.socket(), &trying).expect("a connection");
    assert_eq!(client.hello().features & features::LANES, 0);
    assert_eq!(client.lane_refusal().map(kvrouted::error::Error::kind), Some(Kind::Unsupported));
    assert_ne!(daemon.client().hello().features & features::LANES, 0);
}
