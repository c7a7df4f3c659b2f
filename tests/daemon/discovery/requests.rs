//! Requests on the admin socket.

use kvrouted::ids::Worker;
use kvrouted::load::{BookingOutcome, BookingRef};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};

use super::daemon::workers;
use crate::kit::engine::Publisher;
use crate::kit::{Daemon, prompt, until};

#[test]
fn workers_are_added_set_and_removed_and_nobody_else_loses_a_block() {
    let (mut first, mut second) = (Publisher::new(), Publisher::new());
    let daemon = Daemon::configured(&format!("[[worker]]\nid = 1\nendpoint = \"{}\"\n", first.endpoint()));
    first.await_subscription();
    let (one, two, tokens) = (Worker::new(1, 0), Worker::new(2, 0), prompt(1, 100));
    first.store(&tokens);
    until("the first is heard", || daemon.device(&tokens, one) == Some(6));

    let endpoint = format!("endpoint={}", second.endpoint());
    daemon.worker_ok(&["add", "id=2", &endpoint]);
    second.await_subscription();
    second.store(&tokens[..48]);
    until("the second is heard", || daemon.device(&tokens, two) == Some(3));
    assert_eq!(workers(&daemon), ["1/0 ready config", "2/0 ready admin"]);

    daemon.worker_ok(&["set", "2", "draining=true", "weight=4,taints=a+b"]);
    until("it drains", || workers(&daemon) == ["1/0 ready config", "2/0 draining admin"]);
    assert_eq!(daemon.device(&tokens, two), Some(3), "what does not touch the stream keeps the blocks");
    let told = daemon.client().workers(None).expect("workers");
    let told = told.iter().find(|info| info.worker == two).expect("the worker");
    assert_eq!((told.weight, told.taints.as_slice()), (4.0, ["a".to_owned(), "b".to_owned()].as_slice()));
    daemon.worker_ok(&["set", "2/0", "draining=false"]);
    until("it is back", || workers(&daemon) == ["1/0 ready config", "2/0 ready admin"]);

    let mut third = Publisher::new();
    daemon.worker_ok(&["add", &format!("id=2,endpoint={}", third.endpoint())]);
    third.await_subscription();
    until("it is emptied", || daemon.device(&tokens, two) == Some(0));
    third.store(&tokens[..32]);
    until("it is heard from where it publishes now", || daemon.device(&tokens, two) == Some(2));

    daemon.worker_ok(&["remove", "2"]);
    until("it is gone", || workers(&daemon) == ["1/0 ready config"]);
    assert_eq!(daemon.device(&tokens, two), None);
    daemon.worker_ok(&["add", &format!("id=2,endpoint={}", third.endpoint())]);
    third.await_subscription();
    until("it is back", || daemon.device(&tokens, two) == Some(0));
    assert_eq!(daemon.device(&tokens, one), Some(6));
    assert_eq!([daemon.counter("workers_added"), daemon.counter("workers_removed")], [2, 1]);
    assert_eq!(daemon.counter("workers_emptied"), 1);
}

#[test]
fn what_cannot_be_done_is_refused_by_name() {
    let daemon = Daemon::configured("[[worker]]\nid = 1\nendpoint = \"tcp://127.0.0.1:1\"\n");
    for (arguments, said) in [
        (&["add", "id=5,model=other"][..], "no [[space]] has model `other`"),
        (&["add", "id=1"], "config names it too"),
        (&["add", "id=5,endpoint=tcp://127.0.0.1:1"], "worker 1/0 of config has the same endpoint"),
        (&["add", "id=5,wieght=3"], "did you mean"),
        (&["add", "endpoint=tcp://127.0.0.1:2"], "is missing"),
        (&["remove", "1"], "remove it there (config)"),
        (&["remove", "9"], "there is no worker 9"),
        (&["set", "9", "draining=true"], "there is no worker 9"),
        (&["set", "1", "endpoint=tcp://127.0.0.1:2"], "cannot change while the worker stays"),
        (&["set", "1", "capacity_blocks=5,blocks_max=4"], "is more than blocks_max = 4"),
        (&["set", "1", "capacity_blocks=99999999"], "is more than blocks_max"),
    ] {
        let output = daemon.worker(arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {error}");
        assert!(error.contains(said), "{arguments:?}: {error}");
    }
    assert_eq!(daemon.counter("workers_refused_request"), 11);
    assert_eq!(daemon.status().workers.len(), 1);
    let listed = daemon.worker(&["list"]);
    assert!(String::from_utf8_lossy(&listed.stdout).contains("config"), "{listed:?}");
}

#[test]
fn a_worker_that_is_removed_takes_its_bookings_along() {
    let daemon = Daemon::configured("[[worker]]\nid = 1\n");
    let (mut client, tokens) = (daemon.client(), prompt(1, 64));
    let space = client.space("m", None).expect("the space").id;
    daemon.worker_ok(&["add", "id=2"]);
    until("it is there", || workers(&daemon).len() == 2);
    daemon.worker_ok(&["set", "1", "draining=true"]);
    until("the other drains", || workers(&daemon)[0].contains("draining"));
    let book = Some(BookingRequest { request_id: "r", attempt: 0 });
    let booked = client.route(&RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) });
    let booked = booked.expect("a decision");
    assert_eq!(booked.candidates[0].worker, Worker::new(2, 0));
    daemon.worker_ok(&["remove", "2/0"]);
    until("the booking ends", || daemon.counter("bookings_ended_worker_removed") == 1);
    let handle = BookingRef::Handle(booked.booking.expect("a booking"));
    assert_eq!(client.free(&handle).expect("told"), BookingOutcome::AlreadyApplied);
    // Another in its place owes nothing.
    daemon.worker_ok(&["add", "id=3"]);
    until("another is there", || workers(&daemon).len() == 2);
    let status = daemon.status();
    let another = status.workers.iter().find(|status| status.worker.id.0 == 3).expect("listed");
    let active = another.counters.iter().find(|(name, _)| name == "active_requests").expect("a gauge");
    assert_eq!(active.1, 0);
}
