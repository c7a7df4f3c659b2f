//! Requests that find every worker busy, on a daemon with two serving threads: which wait, which is next, and what ends
//! a wait.

use kvrouted::client::Client;
use kvrouted::error::Kind;
use kvrouted::ids::{CorrelationId, Worker};
use kvrouted::load::{BookingHandle, BookingOutcome, BookingRef};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::wire::{RemoteError, Reply, RouteReply};

use crate::kit::{self, Daemon, prompt, until};

/// A daemon with two serving threads, and workers that are each busy with one prompt of 64 tokens.
fn daemon(workers: u64, policy: &str) -> Daemon {
    let workers: String =
        (1..=workers).map(|id| format!("[[worker]]\nid = {id}\nbatched_tokens_max = 100\n")).collect();
    let folder = kit::folder();
    let config = kit::configure(folder.path(), &format!("[policy]\nqueue_threshold = 0.5\n{policy}\n{workers}"));
    Daemon::serve(folder, &["--config", kit::text(&config), "--cores", "2"])
}

fn request<'a>(client: &Client, request_id: &'a str, tokens: &'a [u32]) -> RouteRequest<'a> {
    let space = client.space("m", None).expect("the space").id;
    let book = Some(BookingRequest { request_id, attempt: 0 });
    RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(tokens)) }
}

/// Books a prompt that finds room.
fn book(client: &mut Client, request_id: &str, tokens: &[u32]) -> (Worker, BookingHandle) {
    let reply = client.route(&request(client, request_id, tokens)).expect("a decision");
    (reply.candidates[0].worker, reply.booking.expect("a booking"))
}

fn send(client: &mut Client, request: &RouteRequest<'_>) -> CorrelationId {
    let id = client.send_route(request).expect("queued");
    client.flush().expect("sent");
    id
}

fn free(client: &mut Client, handle: BookingHandle) {
    assert_eq!(client.free(&BookingRef::Handle(handle)).expect("told"), BookingOutcome::Applied);
}

fn wait_for_waiting(daemon: &Daemon, waiting: u64) {
    until("the queue has this length", || daemon.counter("queue_waiting") == waiting);
}

fn decided(client: &mut Client) -> (CorrelationId, RouteReply) {
    match client.recv().expect("a reply") {
        (id, Reply::Route(reply)) => (id, reply),
        (_, other) => panic!("no decision: {other:?}"),
    }
}

fn refused(client: &mut Client) -> (CorrelationId, RemoteError) {
    match client.recv().expect("a reply") {
        (id, Reply::Error(error)) => (id, error),
        (_, other) => panic!("no error: {other:?}"),
    }
}

fn active_requests(daemon: &Daemon) -> u64 {
    let status = daemon.status();
    let of = |counters: &[(String, u64)]| {
        counters.iter().find(|(name, _)| name == "active_requests").map_or(0, |(_, value)| *value)
    };
    status.workers.iter().map(|worker| of(&worker.counters)).sum()
}

#[test]
fn who_waits_is_answered_in_order_whichever_core_frees_the_worker() {
    let daemon = daemon(1, "");
    let (mut holder, mut low, mut high) = (daemon.client(), daemon.client(), daemon.client());
    let tokens = [prompt(1, 64), prompt(2, 64), prompt(3, 64)];
    let (_, handle) = book(&mut holder, "held", &tokens[0]);
    let asked_low = request(&low, "low", &tokens[1]);
    let low_id = send(&mut low, &asked_low);
    wait_for_waiting(&daemon, 1);
    let asked_high = RouteRequest { priority: 1, ..request(&high, "high", &tokens[2]) };
    let high_id = send(&mut high, &asked_high);
    wait_for_waiting(&daemon, 2);
    // A question takes no room and does not wait.
    let question = RouteRequest { book: None, ..request(&low, "", &tokens[0]) };
    assert_eq!(low.route(&question).expect("a decision").candidates.len(), 1);

    free(&mut holder, handle);
    let (id, reply) = decided(&mut high);
    assert_eq!(id, high_id);
    assert_eq!((daemon.counter("queue_waiting"), active_requests(&daemon)), (1, 1));
    free(&mut high, reply.booking.expect("a booking"));
    let (id, reply) = decided(&mut low);
    assert_eq!(id, low_id);
    let booking = BookingRef::Handle(reply.booking.expect("a booking"));
    assert_eq!(low.free(&booking).expect("told"), BookingOutcome::Applied);
    assert_eq!(["queue_queued", "queue_woken", "queue_waiting"].map(|name| daemon.counter(name)), [2, 2, 0]);
}

#[test]
fn a_prefill_that_is_done_makes_room() {
    let daemon = daemon(1, "");
    let (mut holder, mut waiter) = (daemon.client(), daemon.client());
    let tokens = [prompt(1, 64), prompt(2, 64)];
    let (_, handle) = book(&mut holder, "held", &tokens[0]);
    let asked = request(&waiter, "next", &tokens[1]);
    send(&mut waiter, &asked);
    wait_for_waiting(&daemon, 1);
    let told = holder.prefill_complete(&BookingRef::Handle(handle)).expect("told");
    assert_eq!(told, BookingOutcome::Applied);
    assert!(decided(&mut waiter).1.booking.is_some());
}

/// Times that room is made without a report for that worker.
const ROUNDS: u64 = 8;

/// Each round woke one request, and the periodic recheck found fewer: it may coincide with a wake, but not every time.
fn was_told(daemon: &Daemon, rounds: u64) {
    assert_eq!(daemon.counter("queue_woken"), rounds);
    let found = daemon.counter("queue_found_by_look");
    assert!(found < rounds, "{found} of {rounds} were found by the look alone");
}

#[test]
fn a_later_attempt_elsewhere_makes_room_at_once() {
    let daemon = daemon(2, "");
    let (mut holder, mut waiter) = (daemon.client(), daemon.client());
    let tokens = [prompt(1, 64), prompt(2, 64)];
    for round in 0..ROUNDS {
        let (first, moved) = book(&mut holder, "first", &tokens[0]);
        let at_first = [first];
        let asked = RouteRequest { allow: Some(&at_first), ..request(&waiter, "next", &tokens[1]) };
        send(&mut waiter, &asked);
        wait_for_waiting(&daemon, 1);
        let other = [Worker::new(3 - first.id.0, 0)];
        let again = Some(BookingRequest { request_id: "first", attempt: 1 });
        let again = RouteRequest { book: again, allow: Some(&other), ..request(&holder, "first", &tokens[0]) };
        let again = holder.route(&again).expect("a decision");
        assert_ne!(again.booking, Some(moved));
        let (_, reply) = decided(&mut waiter);
        assert_eq!(reply.candidates[0].worker, first);
        free(&mut waiter, reply.booking.expect("a booking"));
        free(&mut holder, again.booking.expect("a booking"));
        assert_eq!(daemon.counter("queue_woken"), round + 1);
    }
    was_told(&daemon, ROUNDS);
}

#[test]
fn bookings_that_expire_make_room_at_once() {
    let daemon = daemon(1, "[booking]\nsession_grace_s = 0");
    let mut waiter = daemon.client();
    let tokens = [prompt(1, 64), prompt(2, 64)];
    for _ in 0..3 {
        let mut holder = daemon.client();
        book(&mut holder, "held", &tokens[0]);
        let asked = request(&waiter, "next", &tokens[1]);
        send(&mut waiter, &asked);
        wait_for_waiting(&daemon, 1);
        drop(holder);
        let (_, reply) = decided(&mut waiter);
        free(&mut waiter, reply.booking.expect("a booking"));
    }
    assert_eq!(daemon.counter("bookings_expired_session"), 3);
    was_told(&daemon, 3);
}

#[test]
fn a_worker_may_have_figures_of_its_own_for_what_a_prefill_takes() {
    let folder = kit::folder();
    let config = kit::configure(
        folder.path(),
        "[policy]\nqueue_threshold = 0.5\n[booking]\nprefill_model = \"fixed\"\nprefill_token_ns = 1000000000\n\
         [[worker]]\nid = 1\nbatched_tokens_max = 100\nprefill_base_us = 0\nprefill_token_ns = 0\n\
         [[worker]]\nid = 2\nbatched_tokens_max = 100\n",
    );
    let daemon = Daemon::serve(folder, &["--config", kit::text(&config)]);
    let mut client = daemon.client();
    let tokens = prompt(1, 640);
    let at = |id| [Worker::new(id, 0)];
    for (request_id, at) in [("a", at(1)), ("b", at(1)), ("c", at(2))] {
        let asked = RouteRequest { allow: Some(&at), ..request(&client, request_id, &tokens) };
        assert!(client.route(&asked).expect("it need not wait").booking.is_some());
    }
    // What the first has booked is done as soon as it is there; what the second has takes minutes.
    let slow = at(2);
    let asked = RouteRequest { allow: Some(&slow), ..request(&client, "d", &tokens) };
    send(&mut client, &asked);
    wait_for_waiting(&daemon, 1);
}

#[test]
fn who_waits_for_a_busy_worker_keeps_nobody_from_another() {
    let daemon = daemon(2, "");
    let (mut holder, mut waiter) = (daemon.client(), daemon.client());
    let tokens: Vec<_> = (0..4).map(|seed| prompt(seed, 64)).collect();
    let held = [book(&mut holder, "a", &tokens[0]), book(&mut holder, "b", &tokens[1])];
    assert_ne!(held[0].0, held[1].0);
    let [first, second] = held.map(|(worker, _)| [worker]);
    let stuck = RouteRequest { priority: 9, allow: Some(&first), ..request(&waiter, "stuck", &tokens[2]) };
    let stuck_id = send(&mut waiter, &stuck);
    let other = RouteRequest { allow: Some(&second), ..request(&waiter, "other", &tokens[3]) };
    let other_id = send(&mut waiter, &other);
    wait_for_waiting(&daemon, 2);
    free(&mut holder, held[1].1);
    let (id, reply) = decided(&mut waiter);
    assert_eq!((id, reply.candidates[0].worker), (other_id, second[0]));
    assert_eq!(daemon.counter("queue_waiting"), 1);
    free(&mut holder, held[0].1);
    assert_eq!(decided(&mut waiter).0, stuck_id);
}

#[test]
fn a_wait_ends_at_its_deadline_and_at_the_bound() {
    let daemon = daemon(1, "queue_requests_max = 1");
    let (mut holder, mut waiter) = (daemon.client(), daemon.client());
    let tokens = prompt(1, 64);
    book(&mut holder, "held", &tokens);
    let patient = request(&waiter, "patient", &tokens);
    let patient_id = send(&mut waiter, &patient);
    wait_for_waiting(&daemon, 1);
    let too_many = RouteRequest { priority: 9, ..request(&holder, "too many", &tokens) };
    send(&mut holder, &too_many);
    let (_, error) = refused(&mut holder);
    assert_eq!((error.kind, error.retryable), (Some(Kind::QueueFull), true));
    assert!(error.retry_after_us >= 1000, "{error:?}");
    drop(waiter);
    wait_for_waiting(&daemon, 0);
    let hasty = RouteRequest { deadline_us: 30_000, ..request(&holder, "hasty", &tokens) };
    let hasty_id = send(&mut holder, &hasty);
    let (id, error) = refused(&mut holder);
    assert_eq!((id, error.kind, error.retryable), (hasty_id, Some(Kind::DeadlinePassed), true));
    assert_ne!(patient_id, CorrelationId(0));
    assert_eq!(
        ["queue_expired", "queue_refused_requests", "queue_cancelled"].map(|name| daemon.counter(name)),
        [1, 1, 1]
    );
}

#[test]
fn who_leaves_while_waiting_is_booked_nowhere() {
    let daemon = daemon(1, "");
    let (mut holder, mut leaver, mut waiter) = (daemon.client(), daemon.client(), daemon.client());
    let tokens = prompt(1, 64);
    let (_, handle) = book(&mut holder, "held", &tokens);
    let leaving = RouteRequest { priority: 1, ..request(&leaver, "leaving", &tokens) };
    send(&mut leaver, &leaving);
    let asked = request(&waiter, "staying", &tokens);
    send(&mut waiter, &asked);
    wait_for_waiting(&daemon, 2);
    drop(leaver);
    wait_for_waiting(&daemon, 1);
    assert_eq!(daemon.counter("queue_cancelled"), 1);
    free(&mut holder, handle);
    let (_, reply) = decided(&mut waiter);
    assert_eq!(active_requests(&daemon), 1);
    free(&mut waiter, reply.booking.expect("a booking"));
}

#[test]
fn a_worker_that_comes_takes_who_waits() {
    let daemon = daemon(1, "");
    let (mut holder, mut waiter) = (daemon.client(), daemon.client());
    let tokens = prompt(1, 64);
    book(&mut holder, "held", &tokens);
    let tokens = prompt(2, 64);
    let asked = request(&waiter, "waiting", &tokens);
    send(&mut waiter, &asked);
    wait_for_waiting(&daemon, 1);
    daemon.worker_ok(&["add", "id=2,batched_tokens_max=100"]);
    let (_, reply) = decided(&mut waiter);
    assert_eq!(reply.candidates[0].worker, Worker::new(2, 0));
}

#[test]
fn a_drain_answers_all_who_wait() {
    let mut daemon = daemon(1, "");
    let mut clients: Vec<_> = (0..4).map(|_| daemon.client()).collect();
    let tokens = prompt(1, 64);
    book(&mut clients[0], "held", &tokens);
    let names: Vec<_> = (0..12).map(|n| format!("r{n}")).collect();
    for (n, name) in names.iter().enumerate() {
        let client = &mut clients[n % 4];
        let asked = request(client, name, &tokens);
        send(client, &asked);
    }
    wait_for_waiting(&daemon, 12);
    daemon.process.signal("-TERM");
    for n in 0..12 {
        let (_, error) = refused(&mut clients[n % 4]);
        assert_eq!((error.kind, error.retryable), (Some(Kind::Draining), true));
    }
    assert_eq!(daemon.process.ended(), Some(0));
}

#[test]
fn who_waits_takes_one_turn_however_often_it_is_looked_at() {
    let daemon = daemon(3, "mode = \"round-robin\"");
    let (mut holder, mut waiter) = (daemon.client(), daemon.client());
    let tokens = prompt(1, 64);
    let held = ["a", "b", "c"].map(|name| book(&mut holder, name, &tokens));
    assert_eq!(held.map(|(worker, _)| worker.id.0), [1, 2, 3]);
    for name in ["d", "e", "f"] {
        let asked = request(&waiter, name, &tokens);
        send(&mut waiter, &asked);
    }
    wait_for_waiting(&daemon, 3);
    // Each change of the fleet has everybody who waits looked at, whatever room there is.
    for weight in 2..6 {
        let before = daemon.counter("queue_put_back");
        daemon.worker_ok(&["set", "1", &format!("weight={weight}")]);
        until("they are looked at", || daemon.counter("queue_put_back") >= before + 3);
    }
    let mut chosen = Vec::new();
    for (_, handle) in held {
        free(&mut holder, handle);
        let reply = decided(&mut waiter).1;
        chosen.push(reply.candidates[0].worker.id.0);
    }
    // Who only asks does not wait.
    let next = RouteRequest { book: None, candidates_max: 1, ..request(&holder, "", &tokens) };
    chosen.push(holder.route(&next).expect("a decision").candidates[0].worker.id.0);
    assert_eq!(chosen, [1, 2, 3, 1]);
}

/// Books, frees and waits on one connection; what was answered, by the request's number.
fn hammer(daemon: &Daemon, thread: usize, requests: usize) -> Vec<u32> {
    let mut client = daemon.client();
    let tokens: Vec<_> = (0..8).map(|seed| prompt(seed, 64)).collect();
    let names: Vec<_> = (0..requests).map(|n| format!("{thread}-{n}")).collect();
    let mut answered = vec![0; requests];
    let (mut sent, mut ids, mut freed) = (0, std::collections::HashMap::new(), 0);
    while freed < requests {
        while sent < requests && sent - freed < 6 {
            let priority = (sent % 3) as i32;
            let asked = RouteRequest { priority, ..request(&client, &names[sent], &tokens[sent % tokens.len()]) };
            ids.insert(send(&mut client, &asked), sent);
            sent += 1;
        }
        let (id, reply) = client.recv().expect("a reply");
        match reply {
            Reply::Route(reply) => {
                let n = ids.remove(&id).expect("one answer for each request");
                answered[n] += 1;
                client.send_free(&BookingRef::Handle(reply.booking.expect("a booking"))).expect("queued");
            }
            Reply::Free(outcome) => {
                assert_eq!(outcome, BookingOutcome::Applied);
                freed += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    answered
}

#[test]
fn of_many_at_once_none_is_lost_and_none_is_answered_twice() {
    let daemon = daemon(3, "queue_wait_ms_max = 600000");
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                scope.spawn({
                    let daemon = &daemon;
                    move || hammer(daemon, thread, 1500)
                })
            })
            .collect();
        for thread in threads {
            assert!(thread.join().expect("no failure").iter().all(|answers| *answers == 1));
        }
    });
    let [queued, woken, waiting] = ["queue_queued", "queue_woken", "queue_waiting"].map(|name| daemon.counter(name));
    assert!(queued > 100 && queued == woken && waiting == 0, "{queued} {woken} {waiting}");
    until("all is freed", || active_requests(&daemon) == 0);
}
