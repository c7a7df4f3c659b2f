//! One request, two workers: one reply names the worker that prefills and the one that decodes.

use kvrouted::client::Client;
use kvrouted::error::Kind;
use kvrouted::fleet::PoolRole;
use kvrouted::ids::{SpaceId, Worker};
use kvrouted::limits::NAME_BYTES_MAX;
use kvrouted::load::{BookingOutcome, BookingRef};
use kvrouted::route::{BookingRequest, Prompt, ReplyNotes, RouteRequest};
use kvrouted::wire::{Reply, RouteReply};

use crate::kit::{self, Daemon, prompt, until};

/// Worker 1 prefills, worker 2 decodes.
fn daemon(policy: &str) -> Daemon {
    daemon_of(policy, "")
}

/// The same with more workers.
fn daemon_of(policy: &str, workers: &str) -> Daemon {
    let folder = kit::folder();
    let tables = format!(
        "role = \"decode\"\n[[space]]\nmodel = \"m\"\nblock_size = 16\nrole = \"prefill\"\n[policy]\n{policy}\n\
         [[worker]]\nid = 1\nrole = \"prefill\"\nbatched_tokens_max = 100\n\
         [[worker]]\nid = 2\nrole = \"decode\"\nbatched_tokens_max = 100\n{workers}"
    );
    let config = kit::configure(folder.path(), &tables);
    Daemon::serve(folder, &["--config", kit::text(&config)])
}

fn space(client: &Client, role: PoolRole) -> SpaceId {
    client.hello().spaces.iter().find(|space| space.role == role).expect("the space").id
}

fn pair<'a>(client: &Client, request_id: &'a str, tokens: &'a [u32]) -> RouteRequest<'a> {
    let book = Some(BookingRequest { request_id, attempt: 0 });
    let decode = space(client, PoolRole::Decode);
    RouteRequest { book, disaggregate: true, explain: true, ..RouteRequest::new(decode, Prompt::of_tokens(tokens)) }
}

fn workers(reply: &RouteReply) -> (Option<u64>, Option<u64>) {
    let first = |list: &[kvrouted::wire::Candidate]| list.first().map(|candidate| candidate.worker.id.0);
    (first(&reply.prefill), first(&reply.candidates))
}

/// Requests and tokens to prefill of each worker.
fn loads(daemon: &Daemon) -> Vec<(u64, u64)> {
    let status = daemon.status();
    let of = |counters: &[(String, u64)], name: &str| {
        counters.iter().find(|(of, _)| of == name).map_or(0, |(_, value)| *value)
    };
    let load = |counters: &[(String, u64)]| (of(counters, "active_requests"), of(counters, "active_prefill_tokens"));
    status.workers.iter().map(|worker| load(&worker.counters)).collect()
}

#[test]
fn both_halves_come_in_one_reply_and_end_apart_or_together() {
    let daemon = daemon("");
    let mut client = daemon.client();
    let tokens = prompt(1, 64);
    let reply = client.route(&pair(&client, "a", &tokens)).expect("a decision");
    assert_eq!((workers(&reply), reply.notes), ((Some(1), Some(2)), ReplyNotes::default()));
    let (prefill, decode) = (reply.prefill_booking.expect("booked"), reply.booking.expect("booked"));
    assert_eq!(loads(&daemon), [(1, 64), (1, 0)], "nothing is prefilled where it is decoded");
    let terms = reply.candidates[0].terms.expect("terms");
    assert_eq!((terms.device_credit, terms.prefill), (0.0, 0.0));
    assert_eq!(client.free(&BookingRef::Handle(prefill)).expect("told"), BookingOutcome::Applied);
    assert_eq!(loads(&daemon), [(0, 0), (1, 0)]);
    assert_eq!(client.free(&BookingRef::Handle(decode)).expect("told"), BookingOutcome::Applied);

    client.route(&pair(&client, "b", &tokens)).expect("a decision");
    assert_eq!(loads(&daemon), [(1, 64), (1, 0)]);
    let half = BookingRef::Request { request_id: "b/prefill", attempt: 0 };
    assert_eq!(client.prefill_complete(&half).expect("told"), BookingOutcome::Applied);
    assert_eq!(loads(&daemon), [(1, 0), (1, 0)]);
    let whole = BookingRef::Request { request_id: "b", attempt: 0 };
    assert_eq!(client.free(&whole).expect("told"), BookingOutcome::Applied);
    assert_eq!(loads(&daemon), [(0, 0), (0, 0)]);

    let as_question = RouteRequest { book: None, ..pair(&client, "", &tokens) };
    let reply = client.route(&as_question).expect("a decision");
    assert_eq!((workers(&reply), reply.prefill_booking, reply.booking), ((Some(1), Some(2)), None, None));
    let wrong = RouteRequest { space: space(&client, PoolRole::Prefill), ..as_question };
    assert_eq!(client.route(&wrong).expect_err("no pair").kind(), Kind::InvalidArgument);
    assert_eq!(daemon.counter("pairs"), 3);
}

#[test]
fn a_pair_of_the_longest_request_id_is_booked_reported_and_freed_by_name() {
    let daemon = daemon("");
    let mut client = daemon.client();
    let (tokens, id) = (prompt(1, 64), "x".repeat(NAME_BYTES_MAX));
    let reply = client.route(&pair(&client, &id, &tokens)).expect("a decision");
    assert_eq!((workers(&reply), loads(&daemon)), ((Some(1), Some(2)), vec![(1, 64), (1, 0)]));
    let half = BookingRef::Request { request_id: &format!("{id}/prefill"), attempt: 0 };
    assert_eq!(client.prefill_complete(&half).expect("told"), BookingOutcome::Applied);
    assert_eq!(loads(&daemon), [(1, 0), (1, 0)]);
    let whole = BookingRef::Request { request_id: &id, attempt: 0 };
    assert_eq!(client.free(&whole).expect("told"), BookingOutcome::Applied);
    assert_eq!(loads(&daemon), [(0, 0), (0, 0)]);
    let longer = format!("{id}x");
    let report = BookingRef::Request { request_id: &longer, attempt: 0 };
    assert_eq!(client.free(&report).expect_err("too long").kind(), Kind::InvalidArgument);
}

#[test]
fn without_anybody_to_prefill_one_worker_does_both_and_without_anybody_to_decode_nothing_is_booked() {
    let daemon = daemon("");
    let mut client = daemon.client();
    let tokens = prompt(1, 64);
    daemon.worker_ok(&["set", "1", "draining=true"]);
    until("the only one that prefills drains", || {
        let asked = RouteRequest { book: None, ..pair(&client, "", &tokens) };
        client.route(&asked).expect("a decision").prefill.is_empty()
    });
    let reply = client.route(&pair(&client, "a", &tokens)).expect("a decision");
    assert_eq!((workers(&reply), reply.notes), ((None, Some(2)), ReplyNotes::PREFILL_NOBODY));
    assert_eq!(loads(&daemon), [(0, 0), (1, 64)], "it prefills too");

    daemon.worker_ok(&["set", "1", "draining=false"]);
    until("it is back", || {
        let asked = RouteRequest { book: None, ..pair(&client, "", &tokens) };
        !client.route(&asked).expect("a decision").prefill.is_empty()
    });
    let none = RouteRequest { allow: Some(&[]), ..pair(&client, "b", &tokens) };
    let reply = client.route(&none).expect("a decision");
    assert_eq!((workers(&reply), reply.prefill_booking), ((None, None), None));
    assert_eq!(loads(&daemon), [(0, 0), (1, 64)], "what was booked for the other half is freed");
}

#[test]
fn what_is_not_worth_the_way_is_prefilled_where_it_is_decoded() {
    let daemon = daemon(
        "prefill_bypass = \"isl_or_load\"\nprefill_bypass_tokens = 100\nprefill_bypass_share = 1.0\nprefill_bypass_busy_steps = 1.0",
    );
    let mut client = daemon.client();
    let (short, long) = (prompt(1, 96), prompt(2, 160));
    let whole = RouteRequest { explain: false, ..pair(&client, "long", &long) };
    assert_eq!(workers(&client.route(&whole).expect("a decision")), (Some(1), Some(2)));
    // 160 tokens are more than the 100 of a batch: who prefills is busy.
    let busy = client.route(&pair(&client, "busy", &long)).expect("a decision");
    assert_eq!((workers(&busy), busy.notes), ((None, Some(2)), ReplyNotes::PREFILL_LOCAL));
    let named = BookingRef::Request { request_id: "long", attempt: 0 };
    assert_eq!(client.free(&named).expect("told"), BookingOutcome::Applied);
    let again = client.route(&pair(&client, "again", &long)).expect("a decision");
    assert_eq!(workers(&again), (Some(1), Some(2)));
    client.free(&BookingRef::Request { request_id: "again", attempt: 0 }).expect("told");
    // All 96 are new, fewer than 100, but that is all of it: a share of 1 is not below 1.
    let all_new = client.route(&pair(&client, "short", &short)).expect("a decision");
    assert_eq!(workers(&all_new), (Some(1), Some(2)));
}

#[test]
fn a_pair_waits_for_who_prefills_and_is_booked_whole() {
    let daemon = daemon("queue_threshold = 0.5");
    let (mut holder, mut waiter) = (daemon.client(), daemon.client());
    let tokens = prompt(1, 64);
    let held = holder.route(&pair(&holder, "held", &tokens)).expect("a decision");
    let tokens = prompt(2, 64);
    let asked = pair(&waiter, "next", &tokens);
    waiter.send_route(&asked).expect("queued");
    waiter.flush().expect("sent");
    until("it waits", || daemon.counter("queue_waiting") == 1);
    assert_eq!(loads(&daemon), [(1, 64), (1, 0)], "no half of it is booked");
    let prefill = held.prefill_booking.expect("booked");
    holder.prefill_complete(&BookingRef::Handle(prefill)).expect("told");
    let (_, Reply::Route(reply)) = waiter.recv().expect("a reply") else { panic!("no decision") };
    assert_eq!((workers(&reply), reply.prefill_booking.is_some()), ((Some(1), Some(2)), true));
    assert_eq!(reply.candidates[0].worker, Worker::new(2, 0));
    assert_eq!(loads(&daemon), [(2, 64), (2, 0)]);
}

#[test]
fn a_pair_that_is_freed_by_name_makes_room_where_it_was_prefilled_at_once() {
    let daemon = daemon("queue_threshold = 0.5");
    let (mut holder, mut waiter) = (daemon.client(), daemon.client());
    let tokens = prompt(1, 64);
    let by_name = |request_id| BookingRef::Request { request_id, attempt: 0 };
    for _ in 0..8 {
        holder.route(&pair(&holder, "held", &tokens)).expect("a decision");
        let asked = pair(&waiter, "next", &tokens);
        waiter.send_route(&asked).expect("queued");
        waiter.flush().expect("sent");
        until("it waits", || daemon.counter("queue_waiting") == 1);
        assert_eq!(holder.free(&by_name("held")).expect("told"), BookingOutcome::Applied);
        let (_, Reply::Route(_)) = waiter.recv().expect("a reply") else { panic!("no decision") };
        assert_eq!(waiter.free(&by_name("next")).expect("told"), BookingOutcome::Applied);
    }
    let [woken, found] = ["queue_woken", "queue_found_by_look"].map(|name| daemon.counter(name));
    assert!(woken == 8 && found < woken, "{found} of {woken} were found by the look alone");
    assert_eq!(loads(&daemon), [(0, 0), (0, 0)]);
}

#[test]
fn a_later_attempt_takes_over_both_halves_though_it_is_no_pair_itself() {
    let daemon = daemon("");
    let mut client = daemon.client();
    let tokens = prompt(1, 64);
    client.route(&pair(&client, "a", &tokens)).expect("a decision");
    assert_eq!(loads(&daemon), [(1, 64), (1, 0)]);
    let later = |attempt| Some(BookingRequest { request_id: "a", attempt });
    let alone = RouteRequest { book: later(1), disaggregate: false, ..pair(&client, "a", &tokens) };
    client.route(&alone).expect("a decision");
    assert_eq!(loads(&daemon), [(0, 0), (1, 64)], "who prefilled the first attempt prefills no more");
    let again = RouteRequest { book: later(2), ..pair(&client, "a", &tokens) };
    client.route(&again).expect("a decision");
    assert_eq!(loads(&daemon), [(1, 64), (1, 0)], "a pair keeps the half that it has just booked");
    let whole = BookingRef::Request { request_id: "a", attempt: 2 };
    assert_eq!(client.free(&whole).expect("told"), BookingOutcome::Applied);
    assert_eq!(loads(&daemon), [(0, 0), (0, 0)]);
}

#[test]
fn to_look_whether_the_way_is_worth_it_takes_no_turn() {
    let daemon = daemon_of(
        "mode = \"round-robin\"\nprefill_bypass = \"prefill_load\"\nprefill_bypass_busy_steps = 1.0",
        "[[worker]]\nid = 3\nrole = \"decode\"\n",
    );
    let mut client = daemon.client();
    let tokens = prompt(1, 160);
    let mut decodes = |request_id| {
        let asked = RouteRequest { explain: false, ..pair(&client, request_id, &tokens) };
        workers(&client.route(&asked).expect("a decision"))
    };
    assert_eq!(decodes("pair").0, Some(1));
    // Who prefills is busy from now on.
    let turns = ["a", "b", "c", "d"].map(|request_id| decodes(request_id).1);
    assert!(
        turns == [Some(2), Some(3), Some(2), Some(3)] || turns == [Some(3), Some(2), Some(3), Some(2)],
        "{turns:?}"
    );
}

#[test]
fn a_pair_that_waits_for_who_decodes_takes_one_turn_of_those_who_prefill() {
    let more = "[[worker]]\nid = 3\nrole = \"prefill\"\n[[worker]]\nid = 4\nrole = \"prefill\"\n";
    let daemon = daemon_of("mode = \"round-robin\"\nqueue_threshold = 0.5", more);
    let (mut holder, mut waiter) = (daemon.client(), daemon.client());
    let tokens = prompt(1, 64);
    let alone = RouteRequest { disaggregate: false, ..pair(&holder, "held", &tokens) };
    assert_eq!(workers(&holder.route(&alone).expect("a decision")), (None, Some(2)));
    let asked = pair(&waiter, "next", &tokens);
    waiter.send_route(&asked).expect("queued");
    waiter.flush().expect("sent");
    until("it waits", || daemon.counter("queue_waiting") == 1);
    for weight in 2..6 {
        let before = daemon.counter("queue_put_back");
        daemon.worker_ok(&["set", "3", &format!("weight={weight}")]);
        until("it is checked", || daemon.counter("queue_put_back") > before);
    }
    let held = BookingRef::Request { request_id: "held", attempt: 0 };
    assert_eq!(holder.free(&held).expect("told"), BookingOutcome::Applied);
    let (_, Reply::Route(reply)) = waiter.recv().expect("a reply") else { panic!("no decision") };
    assert_eq!(workers(&reply), (Some(1), Some(2)), "the first turn");
}

#[test]
fn a_later_attempt_ends_the_half_that_prefills_though_who_was_to_decode_has_left() {
    let daemon = daemon("");
    daemon.worker_ok(&["add", "id=3,role=decode"]);
    let mut client = daemon.client();
    let tokens = prompt(1, 64);
    let pinned = RouteRequest { pin: Some(Worker::new(3, 0)), ..pair(&client, "a", &tokens) };
    let asked = RouteRequest { book: None, ..pinned };
    until("it is there", || workers(&client.route(&asked).expect("a decision")).1 == Some(3));
    client.route(&pinned).expect("a decision");
    daemon.worker_ok(&["remove", "3"]);
    until("who was to decode has left", || loads(&daemon) == [(1, 64), (0, 0)]);
    until("its booking has ended", || daemon.counter("bookings_ended_worker_removed") == 1);
    let book = Some(BookingRequest { request_id: "a", attempt: 1 });
    let alone = RouteRequest { book, disaggregate: false, ..pair(&client, "a", &tokens) };
    client.route(&alone).expect("a decision");
    assert_eq!(loads(&daemon), [(0, 0), (1, 64)]);
}

#[test]
fn a_query_names_both_workers_or_says_why_there_is_one() {
    let daemon = daemon("");
    let query = |flags: &[&str]| {
        let plain = ["query", "--socket"];
        let socket = daemon.socket();
        let prompt = [kit::text(&socket), "--model", "m", "--tokens", "1,2,3"];
        kit::run(&[&plain[..], &prompt, flags].concat())
    };
    let pair = query(&["--disaggregate", "--json"]);
    let said: serde_json::Value = serde_json::from_slice(&pair.stdout).expect("JSON");
    assert_eq!((&said["best"]["worker_id"], &said["prefill_candidates"][0]["worker_id"]), (&2.into(), &1.into()));
    let text = String::from_utf8(query(&["--disaggregate"]).stdout).expect("text");
    let (prefill, decode) = text.split_once("\ndecode:\n").expect("two tables");
    assert!(prefill.contains("│ * ┆ 1/0") && decode.contains("│ * ┆ 2/0"), "{text}");
    let alone = query(&["--role", "prefill", "--json"]);
    let said: serde_json::Value = serde_json::from_slice(&alone.stdout).expect("JSON");
    assert_eq!((&said["best"]["worker_id"], said.get("prefill_candidates")), (&1.into(), None));
    assert_eq!(query(&[]).status.code(), Some(1), "two pools fit");
    let wrong = query(&["--role", "other"]);
    assert!(
        wrong.status.code() == Some(64) && String::from_utf8_lossy(&wrong.stderr).contains("both, prefill, decode")
    );

    // If no worker can prefill, one worker does both.
    let mut client = daemon.client();
    let pool = space(&client, PoolRole::Prefill);
    daemon.worker_ok(&["set", "1", "draining=true"]);
    until("it drains", || {
        client.route(&RouteRequest::new(pool, Prompt::of_tokens(&[1]))).expect("a reply").eligible == 0
    });
    let text = String::from_utf8(query(&["--disaggregate"]).stdout).expect("text");
    assert!(
        text.contains("also does the prefill: the model has no prefill pool") && !text.contains("\ndecode:\n"),
        "{text}"
    );
}
