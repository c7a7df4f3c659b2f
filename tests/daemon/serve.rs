//! `kvrouted serve` as a process, with real sockets and clients in another process.

use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use kvrouted::client::{Client, ClientOptions};
use kvrouted::error::Kind;
use kvrouted::ids::Worker;
use kvrouted::load::{BookingOutcome, BookingRef, EngineLoad, SessionToken};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::trust::TrustLevel;
use serde_json::Value;

use crate::kit::engine::Publisher;
use crate::kit::http::scrape;
use crate::kit::ports::free_port;
use crate::kit::{Daemon, Process, WAIT_MAX, options, prompt, text, until};

/// The workers as `kvrouted status` lists them.
fn status(daemon: &Daemon) -> Vec<Value> {
    daemon.said(&["status"])["workers"].as_array().expect("workers").clone()
}

fn query(daemon: &Daemon, tokens: &[u32]) -> Value {
    let tokens: Vec<String> = tokens.iter().map(u32::to_string).collect();
    daemon.said(&["query", "--model", "m", "--tokens", &tokens.join(",")])
}

fn wait_for_seq(daemon: &Daemon, worker: usize, seq: u64) {
    until("the batch is applied", || status(daemon)[worker]["last_seq"].as_u64() == Some(seq));
}

fn worker(id: u64, endpoint: &str) -> String {
    format!("id={id},endpoint={endpoint}")
}

fn device(reply: &Value, worker: u64) -> u64 {
    let candidates = reply["candidates"].as_array().expect("candidates");
    let found = candidates.iter().find(|candidate| candidate["worker_id"] == worker).expect("the worker");
    found["overlap_blocks"]["device"].as_u64().expect("blocks")
}

fn ask<'a>(client: &Client, tokens: &'a [u32], book: Option<BookingRequest<'a>>) -> RouteRequest<'a> {
    let space = client.space("m", None).expect("the space").id;
    RouteRequest { book, explain: true, ..RouteRequest::new(space, Prompt::of_tokens(tokens)) }
}

#[test]
fn what_is_published_is_what_is_answered_and_a_dead_publisher_harms_nobody() {
    let (mut first, mut second) = (Publisher::new(), Publisher::new());
    let (one, two) = (worker(1, &first.endpoint()), worker(2, &second.endpoint()));
    let daemon = Daemon::start(&["--worker", &one, "--worker", &two]);
    first.await_subscription();
    second.await_subscription();
    let tokens = prompt(1, 100);
    first.store(&tokens);
    second.store(&tokens[..32]);
    wait_for_seq(&daemon, 0, 0);
    wait_for_seq(&daemon, 1, 0);
    let reply = query(&daemon, &tokens);
    assert_eq!(reply["best"], serde_json::json!({"worker_id": 1, "dp_rank": 0}));
    assert_eq!((device(&reply, 1), device(&reply, 2)), (6, 2));
    assert_eq!(reply["candidates"][0]["trust"], "exact");
    assert_eq!(status(&daemon)[0]["blocks_held"], 6);

    first.remove_last(&tokens, 4);
    wait_for_seq(&daemon, 0, 1);
    assert_eq!(device(&query(&daemon, &tokens), 1), 2, "after eviction fewer");

    drop(first);
    until("the loss is seen", || status(&daemon)[0]["trust"] == "unproven");
    let reply = query(&daemon, &tokens);
    assert_eq!((device(&reply, 1), device(&reply, 2)), (0, 2));
    assert_eq!(status(&daemon)[0]["reasons"], serde_json::json!(["disconnected"]));
    second.store(&prompt(2, 64));
    wait_for_seq(&daemon, 1, 1);
    assert_eq!(device(&query(&daemon, &prompt(2, 64)), 2), 4, "the other goes on");
}

#[test]
fn bookings_move_decisions_until_they_end() {
    let mut publisher = Publisher::new();
    let (one, two) = (worker(1, &publisher.endpoint()), "id=2".to_owned());
    let daemon = Daemon::start(&["--worker", &one, "--worker", &two]);
    publisher.await_subscription();
    let tokens = prompt(3, 64);
    publisher.store(&tokens);
    wait_for_seq(&daemon, 0, 0);

    let mut client = daemon.client();
    let request_id = |n: u32| format!("r{n}");
    let mut handles = Vec::new();
    for n in 0..2 {
        let name = request_id(n);
        let request = ask(&client, &tokens, Some(BookingRequest { request_id: &name, attempt: 0 }));
        let reply = client.route(&request).expect("a decision");
        handles.push((reply.candidates[0].worker, reply.booking.expect("a booking")));
    }
    let booked = |field: &str| -> u64 {
        status(&daemon).iter().map(|worker| worker["counters"][field].as_u64().expect("a counter")).sum()
    };
    // Both found all 64 tokens cached, and the second adds no block to those that the first runs.
    assert_eq!(handles.iter().map(|(chosen, _)| chosen.id.0).collect::<Vec<_>>(), [1, 1]);
    assert_eq!((booked("active_requests"), booked("active_decode_blocks")), (2, 4));
    assert_eq!(booked("active_prefill_tokens"), 0);
    let request = ask(&client, &tokens, None);
    let reply = client.route(&request).expect("a decision");
    let holder = reply.candidates.iter().find(|candidate| candidate.worker.id.0 == 1).expect("listed");
    let terms = holder.terms.expect("terms");
    let decode = (terms.active_decode_blocks, terms.additional_decode_blocks);
    assert_eq!((decode, terms.active_requests), ((4.0, 0.0), 2.0));
    assert_eq!(holder.trust.level, TrustLevel::Exact);
    // The gateway sent the second elsewhere, where it runs by itself.
    let second = BookingRef::Handle(handles[1].1);
    assert_eq!(client.output_progress(&second, 5).expect("told"), BookingOutcome::Applied);
    assert_eq!(client.served(&second, Worker::new(2, 0)).expect("told"), BookingOutcome::Applied);
    assert_eq!(client.served(&second, Worker::new(2, 0)).expect("told"), BookingOutcome::AlreadyApplied);
    assert_eq!(client.served(&second, Worker::new(3, 0)).expect_err("no such worker").kind(), Kind::InvalidArgument);
    assert_eq!((booked("active_requests"), booked("active_decode_blocks")), (2, 8));

    // A worker that failed is left alone while another can.
    let space = request.space;
    assert_eq!(client.report_failure(space, Worker::new(1, 0), "timeout").expect("told"), 500);
    let elsewhere = client.route(&ask(&client, &tokens, None)).expect("a decision");
    assert_eq!(elsewhere.candidates.iter().map(|one| one.worker.id.0).collect::<Vec<_>>(), [2]);
    assert_eq!(elsewhere.removed, [("backing_off".to_owned(), vec![Worker::new(1, 0)])]);
    let load = EngineLoad { running: 2, ..EngineLoad::default() };
    assert!(client.report_load(space, Worker::new(1, 0), &load).expect("told"));
    let unknown = client.report_failure(space, Worker::new(7, 0), "timeout").expect_err("no such worker");
    assert_eq!(unknown.kind(), Kind::InvalidArgument);

    let again = ask(&client, &tokens, Some(BookingRequest { request_id: "r0", attempt: 0 }));
    assert_eq!(client.route(&again).expect_err("booked").kind(), Kind::BookingExists);
    for (_, handle) in &handles {
        let handle = BookingRef::Handle(*handle);
        assert_eq!(client.prefill_complete(&handle).expect("told"), BookingOutcome::Applied);
        assert_eq!(client.free(&handle).expect("told"), BookingOutcome::Applied);
        assert_eq!(client.free(&handle).expect("told"), BookingOutcome::AlreadyApplied);
    }
    let request = ask(&client, &tokens, None);
    let reply = client.route(&request).expect("a decision");
    assert!(reply.candidates.iter().all(|candidate| candidate.terms.is_some_and(|terms| terms.active_requests == 0.0)));
}

#[test]
fn who_leaves_early_is_not_warned_about_and_no_workers_are() {
    let mut daemon = Daemon::start(&[]);
    for _ in 0..8 {
        let mut client = daemon.client();
        let error = client.space("", None).expect_err("no such model");
        assert!(error.to_string().contains("no model \"\" (it has \"m\")"), "{error}");
        let tokens = prompt(1, 64);
        let request = ask(&client, &tokens, None);
        for _ in 0..200 {
            client.send_route(&request).expect("queued");
        }
        client.flush().expect("sent");
        // Gone with replies unread.
    }
    let ended = daemon.process.end("-TERM");
    let log = daemon.process.log();
    assert_eq!(ended, Some(0), "{log}");
    assert!(log.contains("no workers: every decision will be empty"), "{log}");
    assert!(log.contains("ended") && !log.contains("a connection is closed"), "{log}");
}

#[test]
fn a_session_is_shared_by_its_connections_and_by_nobody_else() {
    let daemon = Daemon::start(&["--worker", "id=1"]);
    let shared = ClientOptions { session: Some(SessionToken { hi: 3, lo: 4 }), ..options() };
    let mut one = Client::connect(&daemon.socket(), &shared).expect("a connection");
    let mut two = Client::connect(&daemon.socket(), &shared).expect("a connection");
    let mut stranger = daemon.client();
    let tokens = prompt(1, 16);
    let request = ask(&one, &tokens, Some(BookingRequest { request_id: "a", attempt: 0 }));
    one.route(&request).expect("a decision");
    let named = BookingRef::Request { request_id: "a", attempt: 0 };
    assert_eq!(stranger.free(&named).expect("told"), BookingOutcome::Unknown);
    drop(one);
    assert_eq!(two.free(&named).expect("told"), BookingOutcome::Applied);
}

#[test]
fn sigterm_drains_and_leaves_nothing_behind() {
    let uring = if kvrouted::serve::probe_uring().is_ok() { "uring" } else { "auto" };
    for io in [uring, "epoll"] {
        let mut daemon = Daemon::start(&["--worker", "id=1", "--io", io]);
        let mut client = daemon.client();
        let request = ask(&client, &[1; 64], None);
        client.route(&request).expect("a decision");
        assert_eq!(daemon.process.end("-TERM"), Some(0));
        assert!(!daemon.socket().exists() && !daemon.folder.path().join("s.admin").exists());
        assert!(client.route(&ask(&client, &[1; 64], None)).is_err());
    }
}

#[test]
fn a_stale_socket_is_taken_over_and_a_live_one_is_not() {
    let mut daemon = Daemon::start(&["--worker", "id=1"]);
    let socket = daemon.socket();
    let flags = ["serve", "--socket", text(&socket), "--model", "m", "--worker", "id=1"];
    let mut second = Process::start(daemon.folder.path(), "second", &flags);
    assert_ne!(second.ended(), Some(0));
    assert_eq!(query(&daemon, &[1; 32])["match"], "matched", "the first is unharmed");

    assert_eq!(daemon.process.end("-KILL"), None);
    assert!(daemon.socket().exists(), "killed, it leaves its file");
    let daemon = Daemon::start_in(Arc::clone(&daemon.folder), &["--worker", "id=1"]);
    let mode = std::fs::metadata(daemon.folder.path().join("s.admin")).expect("the admin socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "administration is for the owner");
}

#[test]
fn the_metrics_page_is_wellformed_and_on_loopback_only() {
    let port = free_port();
    let daemon = Daemon::start(&["--worker", "id=1", "--metrics-port", &port.to_string()]);
    query(&daemon, &[1; 32]);
    let (head, text) = scrape(port);
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("openmetrics-text"), "{head}");
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let (name, value) = line.rsplit_once(' ').expect("a name and a value");
        assert!(name.starts_with("kvrouted_") && value.parse::<f64>().is_ok(), "{line}");
    }
    assert!(text.contains("\nkvrouted_routes_total 1\n") && text.contains("le=\"+Inf\"} 1\n"), "{text}");
    assert!(text.contains("kvrouted_worker_state{worker_id=\"1\",dp_rank=\"0\",state=\"ready\"} 1\n"), "{text}");
    assert_eq!(text.matches("\nkvrouted_worker_state{").count(), 1, "one state at a time");
    assert!(text.contains("kvrouted_worker_trust{worker_id=\"1\",dp_rank=\"0\"} 0\n"), "{text}");
    assert!(text.trim_end().ends_with("# EOF"));
    let elsewhere = TcpStream::connect_timeout(&([127, 0, 0, 2], port).into(), WAIT_MAX);
    assert!(elsewhere.is_err(), "another address of this machine does not answer");
}

#[test]
fn what_cannot_be_decoded_is_named_in_status_and_metrics() {
    let mut publisher = Publisher::new();
    let (worker, port) = (worker(1, &publisher.endpoint()), free_port());
    let daemon = Daemon::start(&["--worker", &worker, "--metrics-port", &port.to_string()]);
    publisher.await_subscription();
    let tokens = prompt(1, 64);
    publisher.store(&tokens);
    publisher.send_payload(b"neither wire");
    publisher.store(&tokens[..32]);
    wait_for_seq(&daemon, 0, 2);
    let status = &status(&daemon)[0];
    assert_eq!(status["trust"], "lower_bound");
    assert_eq!(status["reasons"], serde_json::json!(["undecodable"]));
    let counters = &status["counters"];
    assert_eq!((&counters["batches_undecodable"], &counters["batches"]), (&1.into(), &2.into()));
    let reasons: Vec<_> = counters.as_object().expect("counters").iter().collect();
    let named = reasons.iter().find(|(name, _)| name.starts_with("undecodable_")).expect("a reason");
    let (_, text) = scrape(port);
    let reason = named.0.trim_start_matches("undecodable_");
    let line = format!("kvrouted_worker_undecodable_total{{worker_id=\"1\",dp_rank=\"0\",reason=\"{reason}\"}} 1\n");
    assert!(text.contains(&line), "{line} in {text}");
    assert_eq!(device(&query(&daemon, &tokens), 1), 2, "the stream goes on");
}
