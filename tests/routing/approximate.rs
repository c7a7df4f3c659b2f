//! Workers without events: the binary, a real socket, and predictions from bookings.

use kvrouted::client::Client;
use kvrouted::ids::Worker;
use kvrouted::load::BookingRef;
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};

use crate::kit::{Daemon, until};

/// Two workers of a space that says this of itself.
fn start(space: &str) -> Daemon {
    Daemon::configured(&format!("{space}\n[[worker]]\nid = 1\n[[worker]]\nid = 2\n"))
}

/// The chosen worker, its device blocks, and how far that is believed.
fn route(client: &mut Client, tokens: &[u32], book: Option<&str>) -> (Worker, u32, String) {
    let space = client.space("m", None).expect("the space").id;
    let book = book.map(|request_id| BookingRequest { request_id, attempt: 0 });
    let request = RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(tokens)) };
    let reply = client.route(&request).expect("a decision");
    let chosen = &reply.candidates[0];
    (chosen.worker, chosen.overlap.device, format!("{} {:?}", chosen.trust.level, chosen.trust.reasons))
}

fn prompt() -> Vec<u32> {
    (0..16 * 20).collect()
}

#[test]
fn a_booked_prompt_is_predicted_where_it_was_booked_until_its_time_is_over() {
    let daemon = start("approximate = true\napproximate_ttl_s = 5");
    let mut client = daemon.client();
    let tokens = prompt();
    let (first, held, trust) = route(&mut client, &tokens, Some("a"));
    assert_eq!((held, trust.as_str()), (0, "predicted {own_decisions}"));
    client.free(&BookingRef::Request { request_id: "a", attempt: 0 }).expect("freed");
    // The predictor takes bookings over by and by.
    let mut seen = None;
    until("the booking is predicted", || {
        let decided = route(&mut client, &tokens, None);
        let predicted = decided.1 == 20;
        seen = predicted.then_some(decided);
        predicted
    });
    assert_eq!(seen, Some((first, 20, "predicted {own_decisions}".into())));
    until("the prediction has expired", || route(&mut client, &tokens, None).1 == 0);
}

#[test]
fn nothing_is_predicted_unless_the_space_says_so() {
    let daemon = start("");
    let mut client = daemon.client();
    let tokens = prompt();
    for request in ["a", "b", "c"] {
        let (_, held, trust) = route(&mut client, &tokens, Some(request));
        assert_eq!((held, trust.as_str()), (0, "none {no_events}"));
    }
}
