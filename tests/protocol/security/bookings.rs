//! A client can neither touch nor see what belongs to another session.

use kvrouted::client::{Client, ClientOptions, Reply};
use kvrouted::error::Kind;
use kvrouted::ids::{CorrelationId, Worker};
use kvrouted::limits::BOOKINGS_PER_SESSION_MAX;
use kvrouted::load::{BookingHandle, BookingOutcome, BookingRef, SessionToken};
use kvrouted::route::{BookingRequest, RouteRequest};

use super::besieged::Besieged;
use crate::kit::raw::{Raw, encoded, question, route_frame};
use crate::kit::{options, prompt};

/// A client that leaves keeps nothing for long.
const SHORT_GRACE: &str = "[booking]\nsession_grace_s = 0";

fn booked(client: &mut Client, request_id: &str) -> BookingHandle {
    let tokens: Vec<u8> = prompt(3, 64).iter().flat_map(|token| token.to_le_bytes()).collect();
    let book = Some(BookingRequest { request_id, attempt: 0 });
    let reply = client.route(&RouteRequest { book, ..question(&tokens) }).expect("a decision");
    reply.booking.expect("a booking")
}

/// What the stranger tells of a booking is not heard.
fn assert_unknown(stranger: &mut Client, booking: &BookingRef<'_>) {
    let told = [
        stranger.prefill_complete(booking),
        stranger.output_progress(booking, 9),
        stranger.served(booking, Worker::new(1, 0)),
        stranger.free(booking),
    ];
    for outcome in told {
        assert_eq!(outcome.expect("told"), BookingOutcome::Unknown, "{booking:?}");
    }
}

#[test]
fn who_knows_a_booking_of_another_session_can_do_nothing_with_it() {
    let daemon = Besieged::configured("", SHORT_GRACE);
    let (mut owner, mut stranger) = (daemon.client(), daemon.client());
    let handle = booked(&mut owner, "mine");
    assert_unknown(&mut stranger, &BookingRef::Handle(handle));
    assert_unknown(&mut stranger, &BookingRef::Request { request_id: "mine", attempt: 0 });
    // Handles that the daemon gave to no client: guesses around it, and wild ones.
    for guess in [
        BookingHandle { slot: handle.slot, generation: handle.generation.wrapping_add(1) },
        BookingHandle { slot: handle.slot.wrapping_add(1), generation: handle.generation },
        BookingHandle { slot: u64::MAX, generation: u64::MAX },
        BookingHandle { slot: handle.slot, generation: u64::MAX },
    ] {
        assert_unknown(&mut stranger, &BookingRef::Handle(guess));
        assert_unknown(&mut owner, &BookingRef::Handle(guess));
    }
    // The same name in another session is another booking, and supersedes nothing.
    let namesake = booked(&mut stranger, "mine");
    assert_ne!((namesake.slot, namesake.generation), (handle.slot, handle.generation));
    assert_eq!(daemon.counter("bookings_live"), 2);
    assert_eq!(stranger.free(&BookingRef::Handle(namesake)).expect("told"), BookingOutcome::Applied);
    // All the while the owner's is as it was.
    let mine = BookingRef::Handle(handle);
    assert_eq!(owner.prefill_complete(&mine).expect("told"), BookingOutcome::Applied);
    assert_eq!(owner.free(&mine).expect("told"), BookingOutcome::Applied);
    assert_eq!(daemon.counter("bookings_moved"), 0);
    // Nor is what became of it told to anybody else.
    assert_eq!(owner.free(&mine).expect("told"), BookingOutcome::AlreadyApplied);
    assert_unknown(&mut stranger, &mine);
    drop((owner, stranger));
    daemon.assert_recovered();
}

#[test]
fn an_id_used_twice_at_once_is_answered_twice_and_confuses_nobody_else() {
    let daemon = Besieged::configured("", "");
    let (mut raw, mut other) = (daemon.greeted(), daemon.greeted());
    let mut frames: Vec<u8> = (0..50).flat_map(|_| route_frame(8, 40)).collect();
    frames.extend(encoded(|encoder, out| encoder.free(CorrelationId(8), &unheard_of(), out)));
    raw.send(&frames);
    other.send(&route_frame(8, 40));
    for _ in 0..50 {
        assert_eq!(raw.decided(8).candidates.len(), 1);
    }
    assert!(matches!(raw.reply(), (8, Reply::Free(_))));
    assert_eq!(other.decided(8).candidates.len(), 1);
    other.assert_served();
    drop((raw, other));
    daemon.assert_recovered();
}

fn unheard_of() -> BookingRef<'static> {
    BookingRef::Request { request_id: "unheard of", attempt: 3 }
}

#[test]
fn who_books_and_never_frees_reaches_its_bound_and_no_further() {
    let daemon = Besieged::configured("", SHORT_GRACE);
    let mut leaker = daemon.client();
    let tokens = [7; 64];
    // Without replies in between: as fast as it goes.
    let mut last = None;
    for at in 0..=BOOKINGS_PER_SESSION_MAX {
        let request_id = format!("leak-{at}");
        let book = Some(BookingRequest { request_id: &request_id, attempt: 0 });
        last = Some(leaker.send_route(&RouteRequest { book, ..question(&tokens) }).expect("queued"));
    }
    leaker.flush().expect("sent");
    let (mut decided, refused) = (0, loop_until_refused(&mut leaker, last));
    while let Some(Reply::Route(_)) = refused.0.get(decided) {
        decided += 1;
    }
    assert_eq!(decided, BOOKINGS_PER_SESSION_MAX);
    assert_eq!(refused.1, Kind::TooManyBookings);
    assert_eq!(daemon.counter("bookings_live"), BOOKINGS_PER_SESSION_MAX as u64);
    // Others still book.
    let mut other = daemon.client();
    let handle = booked(&mut other, "other");
    assert_eq!(other.free(&BookingRef::Handle(handle)).expect("told"), BookingOutcome::Applied);
    drop((leaker, other));
    daemon.assert_recovered();
}

/// Every reply but that to `last`, and the error that this is.
fn loop_until_refused(leaker: &mut Client, last: Option<CorrelationId>) -> (Vec<Reply>, Kind) {
    let mut replies = Vec::new();
    loop {
        match leaker.recv().expect("a reply") {
            (id, Reply::Error(error)) => {
                assert_eq!(Some(id), last, "{error:?}");
                return (replies, error.kind.expect("a known kind"));
            }
            (_, reply) => replies.push(reply),
        }
    }
}

#[test]
fn a_session_taken_up_again_is_the_same_and_one_that_is_guessed_is_new() {
    let daemon = Besieged::configured("", "[booking]\nsession_grace_s = 1");
    let token = SessionToken { hi: 11, lo: 12 };
    let shared = ClientOptions { session: Some(token), ..options() };
    let mut owner = Client::connect(&daemon.socket(), &shared).expect("a connection");
    let handle = booked(&mut owner, "mine");
    for guess in [SessionToken { hi: 11, lo: 13 }, SessionToken { hi: 12, lo: 11 }] {
        let options = ClientOptions { session: Some(guess), ..options() };
        let mut stranger = Client::connect(&daemon.socket(), &options).expect("a connection");
        assert_unknown(&mut stranger, &BookingRef::Handle(handle));
    }
    // A connection that says hello again does not become another session.
    let mut raw = Raw::connect(&daemon.socket());
    raw.hello(None).expect("hello");
    raw.send(&encoded(|encoder, out| encoder.hello(CorrelationId(5), "raw", Some(token), out)));
    assert_eq!(raw.error(5), Kind::InvalidArgument);
    raw.send(&encoded(|encoder, out| encoder.free(CorrelationId(6), &BookingRef::Handle(handle), out)));
    assert!(matches!(raw.reply(), (6, Reply::Free(free)) if free == BookingOutcome::Unknown));
    drop(owner);
    let mut again = Client::connect(&daemon.socket(), &shared).expect("a connection");
    assert_eq!(again.free(&BookingRef::Handle(handle)).expect("told"), BookingOutcome::Applied);
    drop((raw, again));
    daemon.assert_recovered();
}
