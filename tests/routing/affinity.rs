//! Sessions whose requests go to one worker, on a daemon with two serving threads.

use kvrouted::client::Client;
use kvrouted::ids::Worker;
use kvrouted::load::{BookingHandle, BookingRef};
use kvrouted::route::{BookingRequest, Prompt, ReplyNotes, RouteRequest};
use kvrouted::wire::RouteReply;

use crate::kit::{self, Daemon, prompt};

fn daemon(workers: u64, policy: &str) -> Daemon {
    let workers: String = (1..=workers).map(|id| format!("[[worker]]\nid = {id}\n")).collect();
    let folder = kit::folder();
    let config = kit::configure(folder.path(), &format!("[policy]\nseed = 3\n{policy}\n{workers}"));
    Daemon::serve(folder, &["--config", kit::text(&config), "--cores", "2"])
}

/// Routes and books a request of a session.
fn ask(client: &mut Client, session: &str, request_id: &str, tokens: &[u32]) -> RouteReply {
    let space = client.space("m", None).expect("the space").id;
    let book = Some(BookingRequest { request_id, attempt: 0 });
    let affinity_session = Some(session).filter(|session| !session.is_empty());
    let request =
        RouteRequest { book, affinity_session, explain: true, ..RouteRequest::new(space, Prompt::of_tokens(tokens)) };
    client.route(&request).expect("a decision")
}

fn chosen(reply: &RouteReply) -> (Worker, BookingHandle) {
    (reply.candidates[0].worker, reply.booking.expect("a booking"))
}

fn free(client: &mut Client, handle: BookingHandle) {
    client.free(&BookingRef::Handle(handle)).expect("told");
}

#[test]
fn a_session_comes_back_to_its_worker_on_every_core_until_that_is_overloaded() {
    let daemon = daemon(4, "affinity = \"hard\"");
    let (mut one, mut two) = (daemon.client(), daemon.client());
    let (bound, first) = chosen(&ask(&mut one, "s", "r0", &prompt(0, 64)));
    for n in 1..12 {
        let client = if n % 2 == 0 { &mut one } else { &mut two };
        let reply = ask(client, "s", &format!("r{n}"), &prompt(n, 64));
        let (worker, handle) = chosen(&reply);
        if n == 1 {
            // Two in flight there, none elsewhere: more than 1.25 times the average of 0.5.
            assert_ne!(worker, bound);
            free(client, handle);
            free(&mut one, first);
            let (again, handle) = chosen(&ask(&mut two, "s", "again", &prompt(n, 64)));
            assert_eq!(again, worker, "it is bound anew");
            free(&mut two, handle);
            continue;
        }
        assert_ne!(worker, bound);
        assert_eq!(reply.eligible, 1);
        let removed: usize =
            reply.removed.iter().filter(|(rule, _)| rule == "bound_elsewhere").map(|(_, of)| of.len()).sum();
        assert_eq!(removed, 3);
        free(client, handle);
    }
    let counted = ["affinity_new", "affinity_kept", "affinity_moved_overloaded"].map(|name| daemon.counter(name));
    assert_eq!(counted, [1, 11, 1]);
}

#[test]
fn a_soft_session_says_what_its_worker_costs_less_and_a_pin_wins() {
    let daemon = daemon(2, "affinity = \"soft\"\naffinity_factor = 0.25");
    let mut client = daemon.client();
    let tokens = prompt(1, 64);
    let (bound, handle) = chosen(&ask(&mut client, "s", "a", &tokens));
    free(&mut client, handle);
    let reply = ask(&mut client, "s", "b", &tokens);
    let (worker, handle) = chosen(&reply);
    assert_eq!((worker, reply.eligible), (bound, 2));
    let terms: Vec<_> = reply.candidates.iter().map(|candidate| candidate.terms.expect("terms")).collect();
    assert_eq!([terms[0].affinity_factor, terms[1].affinity_factor], [0.25, 1.0]);
    // Without what its own prefill of before costs an output there, the bound worker costs as much as the other.
    let plain_s = |at: usize| terms[at].cost / terms[at].affinity_factor - terms[at].output_delay_s;
    assert!((plain_s(0) / plain_s(1) - 1.0).abs() < 1e-9, "{terms:?}");
    free(&mut client, handle);

    let other = Worker::new(3 - bound.id.0, 0);
    let space = client.space("m", None).expect("the space").id;
    let pinned = RouteRequest {
        pin: Some(other),
        affinity_session: Some("s"),
        book: Some(BookingRequest { request_id: "c", attempt: 0 }),
        ..RouteRequest::new(space, Prompt::of_tokens(&tokens))
    };
    let (worker, handle) = chosen(&client.route(&pinned).expect("a decision"));
    assert_eq!(worker, other);
    free(&mut client, handle);
    assert_eq!(chosen(&ask(&mut client, "s", "d", &tokens)).0, other, "the pin is where it is bound now");
    let counted = ["affinity_new", "affinity_kept", "affinity_moved_pinned"].map(|name| daemon.counter(name));
    assert_eq!(counted, [1, 2, 1]);
}

#[test]
fn a_session_whose_worker_leaves_is_bound_anew_and_without_affinity_the_reply_says_so() {
    let daemon = daemon(1, "affinity = \"hard\"");
    daemon.worker_ok(&["add", "id=2"]);
    let mut client = daemon.client();
    let tokens = prompt(1, 64);
    let space = client.space("m", None).expect("the space").id;
    let on_two = RouteRequest {
        pin: Some(Worker::new(2, 0)),
        affinity_session: Some("s"),
        book: Some(BookingRequest { request_id: "a", attempt: 0 }),
        ..RouteRequest::new(space, Prompt::of_tokens(&tokens))
    };
    kit::until("the worker is there", || {
        client.route(&RouteRequest { book: None, ..on_two }).is_ok_and(|reply| reply.eligible == 1)
    });
    let (worker, handle) = chosen(&client.route(&on_two).expect("a decision"));
    assert_eq!(worker, Worker::new(2, 0));
    free(&mut client, handle);
    daemon.worker_ok(&["remove", "2"]);
    kit::until("the worker has left", || daemon.status().workers.len() == 1);
    let (worker, _) = chosen(&ask(&mut client, "s", "b", &tokens));
    assert_eq!(worker, Worker::new(1, 0));
    assert_eq!(daemon.counter("affinity_moved_ineligible"), 1);

    let off = self::daemon(1, "");
    let mut client = off.client();
    let reply = ask(&mut client, "s", "a", &tokens);
    assert!(reply.notes.contains(ReplyNotes::AFFINITY_OFF));
    assert!(!ask(&mut client, "", "b", &tokens).notes.contains(ReplyNotes::AFFINITY_OFF));
}

#[test]
fn a_query_of_a_session_goes_where_that_is_bound() {
    let daemon = daemon(4, "affinity = \"hard\"");
    let mut client = daemon.client();
    let (bound, handle) = chosen(&ask(&mut client, "s", "r", &prompt(0, 64)));
    free(&mut client, handle);
    let command = ["query", "--model", "m", "--tokens", "1,2,3", "--session", "s"];
    for _ in 0..8 {
        assert_eq!(daemon.said(&command)["best"]["worker_id"], bound.id.0);
    }
}
