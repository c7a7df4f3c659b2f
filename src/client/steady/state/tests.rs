//! Requests in flight and stored reports, when connections end and callers give up.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use super::*;
use crate::client::LaneUse;
use crate::client::daemon_script::{self, booked, error, free_reply, unknown_kind};
use crate::error::Kind;
use crate::protocol::SessionToken;
use crate::wire::PROTOCOL_VERSION;

/// A caller that records its replies, unless it has given up.
#[derive(Clone, Default)]
struct RecordingWaiter {
    heard: Rc<RefCell<Vec<String>>>,
    has_left: bool,
}

impl Waiter for RecordingWaiter {
    fn deliver(self, reply: Result<RunReply>) -> Option<RunReply> {
        if self.has_left {
            return reply.ok();
        }
        let heard = reply.map_or_else(|error| error.kind().name().to_owned(), |_| "reply".to_owned());
        self.heard.borrow_mut().push(heard);
        None
    }
}

type Talk = ClientState<RecordingWaiter>;

/// The encoded requests, in words. They are removed.
fn said(talk: &mut Talk) -> Vec<String> {
    daemon_script::said(&mut talk.conversation.unsent).into_iter().map(|(_, words)| words).collect()
}

fn begin(talk: &mut Talk) {
    talk.begin("test", SessionToken { hi: 1, lo: 2 });
    assert_eq!(said(talk), ["hello"]);
}

/// Receives bytes while the connection begins.
fn opening(talk: &mut Talk, bytes: &[u8]) -> Result<Option<Opened<()>>, Rejection> {
    talk.conversation.room(Channel::Socket).extend_from_slice(bytes);
    talk.opening(Instant::now(), |_| Ok(()))
}

fn connect(talk: &mut Talk, instance_id: u64) -> Vec<String> {
    connect_at(talk, instance_id, Instant::now())
}

fn connect_at(talk: &mut Talk, instance_id: u64, at: Instant) -> Vec<String> {
    begin(talk);
    let opened = opening(talk, &daemon_script::hello(PROTOCOL_VERSION, instance_id, features::SERVED));
    talk.opened(opened.expect("a hello").expect("open"), at);
    said(talk)
}

/// Long enough for a connection to count as stable.
const LASTING: Duration = Duration::from_secs(60);

fn hear(talk: &mut Talk, bytes: &[u8]) {
    talk.receive(Channel::Socket, bytes, Instant::now()).expect("valid frames");
}

fn talk() -> Talk {
    let mut talk = Talk::new(&SteadyOptions::default());
    assert_eq!(connect(&mut talk, 1), ["watch"]);
    talk
}

/// Asks something; answers with its id.
fn ask(talk: &mut Talk, leftover: Leftover, ear: &RecordingWaiter) -> CorrelationId {
    let mut asked = CorrelationId(0);
    let put = |encoder: &mut RequestEncoder, id, out: &mut Vec<u8>| {
        asked = id;
        encoder.workers(id, None, 0, 0, out);
        Ok(())
    };
    talk.ask(put, leftover, ear.clone()).expect("encoded");
    assert_eq!(said(talk), ["question"]);
    asked
}

fn booking() -> Leftover {
    Leftover::Booking { request_id: "r".into(), attempt: 3 }
}

fn free_of(slot: u64) -> Report {
    Report { name: BookingName::Handle(BookingHandle { slot, generation: 1 }), kind: ReportKind::Free }
}

const FREE_OF_R: &str = "free Request { request_id: \"r\", attempt: 3 }";

fn free_words(slot: u64) -> String {
    format!("free Handle(BookingHandle {{ slot: {slot}, generation: 1 }})")
}

/// A reply of a daemon run that booked a pair of workers.
fn pair(slot: u64, prefill_slot: u64, instance_id: u64) -> RunReply {
    let handle = |slot| Some(BookingHandle { slot, generation: 1 });
    let (booking, prefill_booking) = (handle(slot), handle(prefill_slot));
    let route = crate::wire::RouteReply { booking, prefill_booking, ..Default::default() };
    RunReply { reply: Reply::Route(route), instance_id }
}

#[test]
fn replies_arrive_in_any_order_and_a_late_booking_is_freed() {
    let mut talk = talk();
    let (ear, left) = (RecordingWaiter::default(), RecordingWaiter { has_left: true, ..RecordingWaiter::default() });
    let (one, other) = (ask(&mut talk, Leftover::Nothing, &ear), ask(&mut talk, booking(), &left));
    hear(&mut talk, &booked(other, 7, 8));
    assert_eq!(said(&mut talk), [free_words(7), free_words(8)], "both halves of a pair");
    hear(&mut talk, &free_reply(one));
    assert_eq!(*ear.heard.borrow(), ["reply"]);
    hear(&mut talk, &booked(one, 9, 9));
    assert_eq!(said(&mut talk), [] as [&str; 0], "no request has this id any more");
    assert_eq!(talk.counters[ClientCounter::BookingsGivenBack as usize], 2);

    let unread = ask(&mut talk, booking(), &ear);
    hear(&mut talk, &unknown_kind(unread));
    assert_eq!(said(&mut talk), [FREE_OF_R], "the booking is freed by its name");
    assert_eq!(*ear.heard.borrow(), ["reply", "unsupported"]);
}

#[test]
fn reports_in_flight_when_a_connection_ends_are_sent_on_the_next() {
    let mut talk = talk();
    let ear = RecordingWaiter::default();
    ask(&mut talk, booking(), &ear);
    ask(&mut talk, Leftover::Nothing, &ear);
    talk.send_report(&free_of(1), Some(ear.clone()));
    talk.send_report(&Report { kind: ReportKind::OutputProgress { output_tokens: 5 }, ..free_of(2) }, None);
    talk.send_report(&Report { kind: ReportKind::Served { worker: Worker::new(4, 0) }, ..free_of(2) }, None);
    let now = Instant::now() + LASTING;
    talk.ended(None, now, 0.5);
    assert_eq!(*ear.heard.borrow(), ["connection"; 3], "every waiting call gets an error");
    assert_eq!((talk.phase, talk.silence.since()), (Phase::Connecting { is_first: true }, None));
    talk.store_report(free_of(3));
    let owed = connect_at(&mut talk, 1, now);
    let expected = [FREE_OF_R.to_owned(), free_words(1), "served 4/0".into(), free_words(3), "watch".into()];
    assert_eq!(owed, expected, "without the count, which the next one replaces");

    // They are still in flight; the next daemon is another run, which knows nothing of them.
    talk.ended(None, now, 0.5);
    assert_eq!((talk.phase, talk.silence.since()), (Phase::BackingOff, Some(now)), "it did not last");
    assert_eq!(connect(&mut talk, 2), ["watch"]);
    assert!(!talk.is_run(1) && talk.is_run(2));
    talk.free_unclaimed(&pair(5, 6, 1));
    assert_eq!(said(&mut talk), [] as [&str; 0], "its handles may name other bookings of this run");
    talk.free_unclaimed(&pair(5, 6, 2));
    assert_eq!(said(&mut talk), [free_words(5), free_words(6)]);
}

#[test]
fn a_timeout_counts_as_silence_only_if_nothing_arrived_during_the_call() {
    let mut talk = talk();
    let (ear, start) = (RecordingWaiter::default(), Instant::now());
    let id = ask(&mut talk, Leftover::Nothing, &ear);
    let arrived = start + Duration::from_millis(10);
    talk.receive(Channel::Socket, &free_reply(id), arrived).expect("valid frames");
    let later = start + Duration::from_millis(100);
    talk.timed_out(start, later, 0.5);
    assert_eq!(talk.silence.since(), None, "another reply arrived meanwhile");
    talk.timed_out(start + Duration::from_millis(20), later, 0.5);
    assert_eq!(talk.silence.since(), Some(later));
}

#[test]
fn stored_reports_are_limited_and_dropped_ones_counted() {
    let mut talk = talk();
    talk.ended(None, Instant::now() + LASTING, 0.5);
    for slot in 0..=CLIENT_REPORTS_STORED_MAX as u64 {
        talk.store_report(free_of(slot));
    }
    assert_eq!(talk.counters[ClientCounter::ReportsForgotten as usize], 1);
    let owed = connect(&mut talk, 1);
    assert_eq!((owed.len(), &owed[0]), (CLIENT_REPORTS_STORED_MAX + 1, &free_words(1)), "the oldest is dropped");
    assert!(!talk.is_settled());
}

#[test]
fn a_final_refusal_is_remembered_until_a_daemon_accepts_the_connection() {
    let mut talk = Talk::new(&SteadyOptions::default());
    begin(&mut talk);
    let why = opening(&mut talk, &error(CorrelationId(0), Kind::NotPermitted)).unwrap_err();
    assert_eq!((why.error.kind(), why.is_final), (Kind::NotPermitted, true));
    talk.failed(&why, Instant::now(), 0.5);
    talk.failed(&lost().into(), Instant::now(), 0.5);
    assert_eq!(
        (talk.phase, talk.refusal.as_ref().map(|refusal| refusal.error().kind())),
        (Phase::BackingOff, Some(Kind::NotPermitted))
    );
    connect(&mut talk, 1);
    assert_eq!(talk.refusal, None);
}

/// Connects with a lane, if one is asked for. Whether one was.
fn connect_by_lane(talk: &mut Talk, at: Instant) -> bool {
    begin(talk);
    let hello = daemon_script::hello(PROTOCOL_VERSION, 1, features::SERVED);
    let mut opened = opening(talk, &hello).expect("accepted");
    let asked = daemon_script::said(&mut talk.conversation.unsent);
    if let [(id, words)] = asked.as_slice() {
        assert_eq!((words.as_str(), opened.is_none()), ("open_lane", true));
        opened = opening(talk, &daemon_script::lane_opened(*id)).expect("accepted");
    }
    talk.opened(opened.expect("open"), at).is_some()
}

#[test]
fn a_lane_that_breaks_soon_is_not_asked_for_on_the_next_connection() {
    let mut talk = Talk::new(&SteadyOptions { lane: LaneUse::Try, fallback: false, ..SteadyOptions::default() });
    let (start, fault) = (Instant::now(), Error::new(Kind::Connection, "the lane was closed", ""));
    assert!(connect_by_lane(&mut talk, start));
    talk.ended(Some(&fault), start + LASTING, 0.5);
    assert!(connect_by_lane(&mut talk, start), "it had lasted");
    talk.ended(Some(&fault), start, 0.5);
    assert_eq!(
        talk.lane_refusal.as_ref().map(|why| why.error().message().to_owned()),
        Some(fault.message().to_owned())
    );
    assert!(!connect_by_lane(&mut talk, start));
    talk.ended(None, start, 0.5);
    assert!(connect_by_lane(&mut talk, start), "asked for anew");
    assert_eq!(talk.lane_refusal, None);
    talk.ended(None, start, 0.5);
    assert!(connect_by_lane(&mut talk, start), "the lane was not at fault");
    let counted = [ClientCounter::LanesOpened, ClientCounter::LanesRefused, ClientCounter::ConnectionsLost];
    assert_eq!(counted.map(|counter| talk.counters[counter as usize]), [4, 1, 4]);
}

#[test]
fn calls_wait_for_the_first_try_and_fail_during_pauses() {
    let mut talk = Talk::new(&SteadyOptions::default());
    let (start, mut is_tried) = (Instant::now(), false);
    assert!(!talk.may_send(start, &mut is_tried).expect("the first try"));
    talk.failed(&lost().into(), start, 0.5);
    assert!(matches!(talk.may_send(start, &mut is_tried), Err(Failure::NotConnected(_))) && !is_tried);
    let over = talk.silence.paused_until(start).expect("a pause");
    let (mut late, mut later) = (false, false);
    assert!(!talk.may_send(over, &mut late).expect("the next try") && late);
    talk.resumed();
    assert!(!talk.may_send(over, &mut late).expect("it waits for this try"));
    assert!(talk.may_send(over, &mut later).is_err(), "a call that came during the try fails early");
    connect_at(&mut talk, 1, over);
    assert!(talk.may_send(over, &mut later).expect("open"));
    // A daemon that answers no call is in a pause, though the connection is open.
    talk.timed_out(over + LASTING, over + LASTING, 0.5);
    assert!(matches!(talk.may_send(over + LASTING, &mut later), Err(Failure::Unreachable(_))));
    assert!(talk.may_send(over + 2 * LASTING, &mut later).expect("the pause is over"));
}

#[test]
fn what_was_freed_lately_is_freed_again_on_the_next_connection_to_the_same_run() {
    let (mut talk, ear) = (talk(), RecordingWaiter::default());
    let first = Instant::now();
    let freed = |talk: &mut Talk, slot, at| {
        let report = free_of(slot);
        talk.send_report(&report, Some(ear.clone()));
        let (id, _) = daemon_script::said(&mut talk.conversation.unsent).pop().expect("a report");
        talk.receive(Channel::Socket, &free_reply(id), at).expect("valid frames");
    };
    freed(&mut talk, 1, first);
    let later = first + Duration::from_millis(CLIENT_FREES_KEPT_MS + 1);
    freed(&mut talk, 2, later);
    freed(&mut talk, 3, later);
    talk.ended(None, Instant::now() + LASTING, 0.5);
    assert_eq!(connect(&mut talk, 1), [free_words(2), free_words(3), "watch".to_owned()], "1 was freed too long ago");
    freed(&mut talk, 4, later);
    talk.ended(None, Instant::now() + LASTING, 0.5);
    let told = [free_words(2), free_words(3), free_words(4)];
    assert_eq!(connect(&mut talk, 1)[..3], told, "the first two were not answered");
    talk.ended(None, Instant::now() + LASTING, 0.5);
    assert_eq!(connect(&mut talk, 2), ["watch"], "another run knows none of them");
}

#[test]
fn of_many_freed_bookings_the_oldest_are_forgotten() {
    let mut talk = talk();
    let now = Instant::now();
    for slot in 0..CLIENT_FREES_KEPT_MAX as u64 + 2 {
        talk.note_freed(BookingHandle { slot, generation: 1 }, now);
    }
    assert_eq!(talk.freed.len(), CLIENT_FREES_KEPT_MAX);
    assert_eq!(talk.freed.front().map(|(_, handle)| handle.slot), Some(2));
}
