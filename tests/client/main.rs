//! The reconnecting clients against daemons that end, fall silent, and come back; and the example gateway.

#![cfg(feature = "daemon")]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kvrouted::client::{Answer, AsyncClient, ClientCounter, FallbackReason, LaneUse, SteadyClient, SteadyOptions};
use kvrouted::error::Kind;
use kvrouted::ids::{SpaceId, Worker};
use kvrouted::load::{BookingOutcome, EngineLoad};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use tokio::runtime::{Builder, Runtime};

mod gateway;
#[path = "../kit/mod.rs"]
mod kit;
mod lane;
use kit::{Daemon, WAIT_MAX, prompt, until};

const WORKERS: [&str; 4] = ["--worker", "id=1", "--worker", "id=2"];

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Waits for replies as long as it takes, but tries a daemon that has gone again soon.
fn options() -> SteadyOptions {
    SteadyOptions { name: "test".into(), timeout: WAIT_MAX, ..SteadyOptions::default() }
}

/// By its socket and by a lane, asleep and looking. Each on a thread of its name, which a failure then says.
fn by_every_way(mut check: impl FnMut(&SteadyOptions) + Send) {
    let looks = Duration::from_micros(500);
    let ways = [
        ("socket", LaneUse::Off, Duration::ZERO),
        ("socket, looking", LaneUse::Off, looks),
        ("lane", LaneUse::Require, Duration::ZERO),
        ("lane, looking", LaneUse::Require, looks),
    ];
    for (name, lane, spin) in ways {
        let way = SteadyOptions { lane, spin, ..options() };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name(name.to_owned());
            thread.spawn_scoped(scope, || check(&way)).expect("a thread");
        });
    }
}

fn question(space: SpaceId, tokens: &[u32]) -> RouteRequest<'_> {
    RouteRequest::new(space, Prompt::of_tokens(tokens))
}

fn booked<'a>(space: SpaceId, tokens: &'a [u32], request_id: &'a str) -> RouteRequest<'a> {
    RouteRequest { book: Some(BookingRequest { request_id, attempt: 0 }), ..question(space, tokens) }
}

/// Requests booked over all workers.
fn bookings(daemon: &Daemon) -> u64 {
    let workers = daemon.status().workers;
    let of = |counters: &[(String, u64)]| {
        counters.iter().find(|(name, _)| name == "active_requests").map_or(0, |(_, value)| *value)
    };
    workers.iter().map(|worker| of(&worker.counters)).sum()
}

async fn space(client: &AsyncClient) -> SpaceId {
    client.connected().await.expect("a connection");
    client.space("m", None, None).expect("the space").id
}

/// Until a condition of the client holds, without blocking its task.
async fn until_holds(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + WAIT_MAX;
    while !holds() {
        assert!(tokio::time::Instant::now() < deadline, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A request from its route to its end.
async fn life(client: AsyncClient, space: SpaceId, seed: u32) {
    let (tokens, name) = (prompt(seed, 100), format!("r{seed}"));
    let answer = client.route(&booked(space, &tokens, &name)).await.expect("an answer");
    let (best, booking) = (answer.best().expect("a worker"), answer.booking().expect("booked"));
    assert!(!answer.is_fallback());
    let applied = Some(BookingOutcome::Applied);
    assert_eq!(client.prefill_complete(booking, 5).await.expect("told"), applied);
    assert_eq!(client.output_progress(booking, 9).await.expect("told"), applied);
    assert_eq!(client.served(booking, Worker::new(3 - best.id.0, 0)).await.expect("told"), applied);
    assert_eq!(client.free(booking).await.expect("told"), applied);
    assert_eq!(client.free(booking).await.expect("told"), Some(BookingOutcome::AlreadyApplied));
}

#[test]
fn many_tasks_share_a_connection_and_everything_can_be_asked() {
    by_every_way(|way| {
        let daemon = Daemon::start(&WORKERS);
        runtime().block_on(async {
            let client = AsyncClient::new(daemon.socket(), SteadyOptions { in_flight_max: 7, ..way.clone() });
            let space = space(&client).await;
            // Threads with runtimes of their own, beside the one that carries the connection.
            let threads: Vec<_> = (0..4_u32)
                .map(|thread| {
                    let client = client.clone();
                    tokio::task::spawn_blocking(move || {
                        runtime().block_on(async {
                            let lives =
                                (0..50).map(|seed| tokio::spawn(life(client.clone(), space, thread * 50 + seed)));
                            for life in lives.collect::<Vec<_>>() {
                                life.await.expect("it ran");
                            }
                        });
                    })
                })
                .collect();
            for thread in threads {
                thread.await.expect("it ran");
            }
            assert_eq!((bookings(&daemon), client.counter(ClientCounter::Connected)), (0, 1));
            let tokens = prompt(1, 100);
            let asked = question(space, &tokens);
            assert_eq!(client.overlap(&asked).await.expect("overlaps").workers.len(), 2);
            assert_eq!(client.potential_loads(&asked).await.expect("loads").workers.len(), 2);
            assert_eq!(client.workers(Some(space)).await.expect("workers").len(), 2);
            assert_eq!(client.fleet().borrow().workers.len(), 2, "without asking");
            assert!(client.report_load(space, Worker::new(1, 0), &EngineLoad::default()).await.expect("taken"));
            assert!(client.report_failure(space, Worker::new(1, 0), "it broke").await.expect("taken") > 0);
            let unknown = client.route(&question(SpaceId(9), &tokens)).await.unwrap_err();
            assert_eq!(unknown.kind(), Kind::UnknownSpace);
            assert!(client.close().await, "everything was answered");
        });
    });
}

#[test]
fn a_call_that_nobody_waits_for_leaves_no_booking() {
    by_every_way(|way| {
        let daemon = Daemon::start(&WORKERS);
        runtime().block_on(async {
            let client = AsyncClient::new(daemon.socket(), way.clone());
            let space = space(&client).await;
            let tokens = prompt(1, 2000);
            for round in 0..200_u32 {
                let name = format!("r{round}");
                let request = booked(space, &tokens, &name);
                // Dropped before it is sent, while it is in flight, or when the reply has just come.
                let patience = Duration::from_micros(u64::from(round) * 10);
                if let Ok(answer) = tokio::time::timeout(patience, client.route(&request)).await {
                    client.free(answer.expect("an answer").booking().expect("booked")).await.expect("told");
                }
            }
            // Reports about a booking are sent, also where no caller waits for the answer.
            for round in 0..50_u32 {
                let name = format!("f{round}");
                let booking = client.route(&booked(space, &tokens, &name)).await.expect("an answer").booking();
                let free = client.free(booking.expect("booked"));
                drop(tokio::time::timeout(Duration::from_micros(u64::from(round)), free).await);
            }
            until_holds("nothing is booked", || bookings(&daemon) == 0).await;
        });
    });
}

#[test]
fn a_silent_daemon_is_answered_for_and_left_alone_and_its_late_bookings_are_given_back() {
    by_every_way(|way| {
        let daemon = Daemon::start(&WORKERS);
        runtime().block_on(async {
            let quick = SteadyOptions { timeout: Duration::from_millis(200), ..way.clone() };
            let client = AsyncClient::new(daemon.socket(), quick);
            let tokens = prompt(1, 100);
            let space = space(&client).await;
            daemon.process.signal("-STOP");
            let (mut reasons, mut answered) = (BTreeSet::new(), Vec::new());
            for round in 0..5 {
                let name = format!("r{round}");
                match client.route(&booked(space, &tokens, &name)).await.expect("an answer") {
                    Answer::Fallback(fallback) => {
                        assert!(fallback.workers.len() == 2 && !fallback.all_down);
                        reasons.insert(fallback.why.name());
                    }
                    // Its threads stop one after the other.
                    answer @ Answer::Daemon { .. } => answered.extend(answer.booking()),
                }
            }
            assert!(reasons.contains(FallbackReason::Silent.name()), "{reasons:?}");
            assert!(client.counter(ClientCounter::DeadlinesPassed) > 0);
            daemon.process.signal("-CONT");
            until_daemon(&client, space, &tokens).await;
            for booking in answered {
                client.free(booking).await.expect("told");
            }
        });
        until("nothing is booked", || bookings(&daemon) == 0);
    });
}

async fn until_daemon(client: &AsyncClient, space: SpaceId, tokens: &[u32]) {
    let deadline = tokio::time::Instant::now() + WAIT_MAX;
    while client.route(&question(space, tokens)).await.expect("an answer").is_fallback() {
        assert!(tokio::time::Instant::now() < deadline, "the daemon is not found again");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn it_goes_on_without_the_daemon_and_with_the_next_one() {
    by_every_way(|way| {
        let mut daemon = Daemon::start(&WORKERS);
        let folder = Arc::clone(&daemon.folder);
        runtime().block_on(async {
            let client = AsyncClient::new(daemon.socket(), way.clone());
            let space = space(&client).await;
            let tokens = prompt(1, 100);
            let before =
                client.route(&booked(space, &tokens, "a")).await.expect("an answer").booking().expect("booked");
            daemon.process.end("-KILL");
            let choose = async |seed: u32| {
                let tokens = prompt(seed, 100);
                match client.route(&booked(space, &tokens, "b")).await.expect("an answer") {
                    Answer::Fallback(fallback) => fallback,
                    Answer::Daemon { reply, .. } => panic!("no daemon can have sent {reply:?}"),
                }
            };
            let first = choose(1).await;
            assert!(matches!(first.why, FallbackReason::Unreachable | FallbackReason::ConnectionLost), "{first:?}");
            assert_eq!(choose(1).await.workers, first.workers, "the same prompt goes to the same worker");
            let mut chosen = BTreeSet::new();
            for seed in 0..64 {
                chosen.insert(choose(seed).await.workers[0]);
            }
            assert_eq!(chosen.len(), 2, "prompts are spread");
            assert!(client.counter(ClientCounter::FallbackUnreachable) >= 60);
            assert_eq!(client.free(before).await.expect("kept"), None, "it is said when the daemon is back");
            let error = client.overlap(&question(space, &tokens)).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Connection, "caches are known to the daemon alone");

            let next = Daemon::start_in(folder, &["--worker", "id=2", "--worker", "id=3", "--worker", "id=4"]);
            until_daemon(&client, space, &tokens).await;
            let mut fleet = client.fleet();
            let known = fleet.wait_for(|fleet| fleet.workers.len() == 3);
            tokio::time::timeout(WAIT_MAX, known).await.expect("the fleet is learnt").expect("a client");
            let told = client.free(before).await.expect("told");
            assert_eq!(told, Some(BookingOutcome::Unknown), "a booking of another run");
            drop(next);
            until_holds("the next has gone", || client.counter(ClientCounter::ConnectionsLost) == 2).await;
            assert!(choose(1).await.workers.iter().all(|worker| worker.id.0 > 1), "by what the next one told");
        });
    });
}

#[test]
fn prompts_are_hashed_here_as_the_daemon_does_and_as_tokens_where_it_knows_better() {
    let daemon = Daemon::configured("approximate = true\n[[worker]]\nid = 1\n[[worker]]\nid = 2\n");
    runtime().block_on(async {
        let hashing = AsyncClient::new(daemon.socket(), SteadyOptions { hash_locally: true, ..options() });
        let plain = AsyncClient::new(daemon.socket(), options());
        let (space, tokens) = (space(&hashing).await, prompt(3, 250));
        plain.connected().await.expect("a connection");
        let request = RouteRequest { salt: Some("tenant"), lora: Some("adapter"), ..booked(space, &tokens, "r") };
        let answer = hashing.route(&request).await.expect("an answer");
        let best = answer.best().expect("a worker");
        let held = async |client: &AsyncClient| {
            let overlap = client.overlap(&request).await.expect("overlaps");
            overlap.workers.iter().find(|entry| entry.worker == best).map(|entry| entry.overlap.device)
        };
        let deadline = tokio::time::Instant::now() + WAIT_MAX;
        while held(&plain).await != Some(15) {
            assert!(tokio::time::Instant::now() < deadline, "what was booked as hashes is found as tokens");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(held(&hashing).await, Some(15));
        assert_eq!(hashing.counter(ClientCounter::HashesRefused), 0);
    });
}

#[test]
fn nobody_decides_where_nobody_is_known_or_the_client_may_not() {
    let folder = kit::folder();
    let nowhere = folder.path().join("s");
    runtime().block_on(async {
        let client = AsyncClient::new(&nowhere, options());
        let error = client.connected().await.unwrap_err();
        assert!(error.kind() == Kind::Connection && error.message().contains("No such file"), "{error}");
        assert_eq!(client.route(&question(SpaceId(0), &[1])).await.unwrap_err().kind(), Kind::Connection);
    });
    let mut daemon = Daemon::start_in(folder, &WORKERS);
    runtime().block_on(async {
        let client = AsyncClient::new(&nowhere, SteadyOptions { fallback: false, ..options() });
        let space = space(&client).await;
        assert_eq!(client.fleet().borrow().version, 0, "who there is is not asked");
        daemon.process.end("-KILL");
        assert_eq!(client.route(&question(space, &[1])).await.unwrap_err().kind(), Kind::Connection);
    });
}

#[test]
fn a_thread_that_blocks_has_the_same_client() {
    by_every_way(|way| {
        let mut daemon = Daemon::start(&WORKERS);
        let client = SteadyClient::new(daemon.socket(), way.clone()).expect("a client");
        client.connected().expect("a connection");
        let space = client.space("m", None, None).expect("the space").id;
        let tokens = prompt(1, 100);
        let answer = client.route(&booked(space, &tokens, "r")).expect("an answer");
        let booking = answer.booking().expect("booked");
        assert_eq!(client.prefill_complete(booking, 0).expect("told"), Some(BookingOutcome::Applied));
        assert_eq!(client.free(booking).expect("told"), Some(BookingOutcome::Applied));
        assert_eq!((client.workers(None).expect("workers").len(), client.fleet().workers.len()), (2, 2));
        assert_eq!(client.overlap(&question(space, &tokens)).expect("overlaps").workers.len(), 2);
        daemon.process.end("-KILL");
        assert!(client.route(&question(space, &tokens)).expect("an answer").is_fallback());
        // Between calls no thread serves the connection.
        std::thread::sleep(Duration::from_millis(100));
        let folder = Arc::clone(&daemon.folder);
        let _next = Daemon::start_in(folder, &WORKERS);
        until("it is found again", || !client.route(&question(space, &tokens)).expect("an answer").is_fallback());
        assert_eq!(client.counter(ClientCounter::Connected), 2);
    });
}

#[test]
fn a_booking_that_waits_for_a_worker_holds_up_nobody_and_is_cancelled_with_its_caller() {
    by_every_way(|way| {
        let mut daemon =
            Daemon::configured("[policy]\nqueue_threshold = 1.0\n[[worker]]\nid = 1\nbatched_tokens_max = 64\n");
        runtime().block_on(async {
            let client = AsyncClient::new(daemon.socket(), way.clone());
            let space = space(&client).await;
            let (long, short) = (prompt(1, 640), prompt(2, 64));
            let first =
                client.route(&booked(space, &long, "first")).await.expect("an answer").booking().expect("booked");
            let hasty = RouteRequest { deadline_us: 20_000, ..booked(space, &short, "hasty") };
            assert_eq!(client.route(&hasty).await.unwrap_err().kind(), Kind::DeadlinePassed);
            let waits = |name: &'static str| {
                let client = client.clone();
                tokio::spawn(async move { client.route(&booked(space, &prompt(3, 64), name)).await })
            };
            let (waiting, given_up) = (waits("waits"), waits("given up"));
            until_holds("both wait", || daemon.counter("queue_waiting") == 2).await;
            assert!(!client.route(&question(space, &short)).await.expect("an answer").is_fallback());
            assert!(!waiting.is_finished(), "asked later, answered earlier");
            given_up.abort();
            client.prefill_complete(first, 0).await.expect("told");
            let second = waiting.await.expect("it ran").expect("an answer");
            assert_eq!(second.best(), Some(Worker::new(1, 0)));
            for booking in [first, second.booking().expect("booked")] {
                assert_eq!(client.free(booking).await.expect("told"), Some(BookingOutcome::Applied));
            }
            // It is dispatched when the second one has made room; no caller takes the reply.
            until_holds("nothing is booked", || bookings(&daemon) == 0 && daemon.counter("queue_waiting") == 0).await;

            // A request that waits while the daemon ends gets an error, and the client decides.
            client.route(&booked(space, &long, "last")).await.expect("an answer").booking().expect("booked");
            let waiting = waits("waits on");
            until_holds("it waits", || daemon.counter("queue_waiting") == 1).await;
            daemon.process.signal("-TERM");
            match waiting.await.expect("it ran").expect("an answer") {
                Answer::Fallback(fallback) => assert_eq!(fallback.why, FallbackReason::Draining),
                Answer::Daemon { reply, .. } => panic!("{reply:?}"),
            }
            daemon.process.ended();
        });
    });
}

#[test]
fn a_socket_that_is_no_daemons_is_a_daemon_that_does_not_answer() {
    let folder = kit::folder();
    let path = folder.path().join("s");
    let listener = std::os::unix::net::UnixListener::bind(&path).expect("bound");
    std::thread::spawn(move || {
        for (at, peer) in listener.incoming().enumerate() {
            let Ok(mut peer) = peer else { return };
            let garbage: &[u8] = [&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], &[0; 16], &[]][at % 3];
            // A client that has left already has heard enough.
            drop(std::io::Write::write_all(&mut peer, garbage));
        }
    });
    runtime().block_on(async {
        let client = AsyncClient::new(&path, options());
        assert_eq!(client.connected().await.unwrap_err().kind(), Kind::Connection);
        until_holds("it is tried again", || client.counter(ClientCounter::ConnectsFailed) >= 4).await;
        assert_eq!(client.counter(ClientCounter::Connected), 0);
        assert_eq!(client.route(&question(SpaceId(0), &[1])).await.unwrap_err().kind(), Kind::Connection);
    });
}

#[test]
fn its_handle_is_for_every_thread() {
    fn is_shared<T: Clone + Send + Sync + 'static>() {}
    is_shared::<AsyncClient>();
}
