//! Requests in flight and stored reports, when connections end and callers give up.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use super::*;
use crate::error::Kind;
use crate::ids::Worker;
use crate::limits::FRAME_HEADER_BYTES;
use crate::protocol::{BookingHandle, BookingOutcome};
use crate::wire::{FrameHeader, Request, RequestScratch, RouteReply, ServerLimits, decode_request};

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

type Talk = Conversation<RecordingWaiter>;

fn hello(instance_id: u64) -> Reply {
    Reply::Hello(HelloReply {
        version: PROTOCOL_VERSION,
        instance_id,
        limits: ServerLimits::default(),
        features: features::SERVED,
        spaces: Vec::new(),
        admin_socket: None,
    })
}

/// The encoded requests, in words. They are removed.
fn said(talk: &mut Talk) -> Vec<String> {
    let (mut said, mut rest) = (Vec::new(), talk.unsent.as_slice());
    while let Some(header) = rest.first_chunk::<FRAME_HEADER_BYTES>() {
        let header = FrameHeader::parse(header).expect("a header");
        let end = FRAME_HEADER_BYTES + header.body_bytes as usize;
        let mut scratch = RequestScratch::default();
        let request = decode_request(header.kind, &rest[FRAME_HEADER_BYTES..end], &mut scratch).expect("a request");
        said.push(match request {
            Request::Hello(_) => "hello".to_owned(),
            Request::Watch { .. } => "watch".to_owned(),
            Request::Free(booking) => format!("free {booking:?}"),
            Request::Served { worker, .. } => format!("served {worker}"),
            Request::Workers { .. } => "question".to_owned(),
            other => format!("{other:?}"),
        });
        rest = &rest[end..];
    }
    talk.unsent.clear();
    said
}

fn connect(talk: &mut Talk, instance_id: u64) -> Vec<String> {
    talk.begin("test", SessionToken { hi: 1, lo: 2 });
    assert_eq!(said(talk), ["hello"]);
    let hello = talk.accepted(hello(instance_id)).expect("a hello");
    talk.opened(hello, true, false);
    said(talk)
}

fn talk() -> Talk {
    let mut talk = Talk::new(BackOff::default());
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

fn booked(slot: u64, prefill: u64) -> Reply {
    let handle = |slot| Some(BookingHandle { slot, generation: 1 });
    Reply::Route(RouteReply { booking: handle(slot), prefill_booking: handle(prefill), ..RouteReply::default() })
}

#[test]
fn replies_arrive_in_any_order_and_a_late_booking_is_freed() {
    let mut talk = talk();
    let (ear, left) = (RecordingWaiter::default(), RecordingWaiter { has_left: true, ..RecordingWaiter::default() });
    let (one, other) = (ask(&mut talk, Leftover::Nothing, &ear), ask(&mut talk, booking(), &left));
    talk.answered(other, Ok(booked(7, 8)));
    assert_eq!(said(&mut talk), [free_words(7), free_words(8)], "both halves of a pair");
    talk.answered(one, Ok(Reply::ReportLoad(true)));
    assert_eq!(*ear.heard.borrow(), ["reply"]);
    talk.answered(one, Ok(booked(9, 9)));
    assert_eq!(said(&mut talk), [] as [&str; 0], "no request has this id any more");
    assert_eq!(talk.counters[ClientCounter::BookingsGivenBack as usize], 2);

    let unread = ask(&mut talk, booking(), &ear);
    talk.answered(unread, Err(Error::new(Kind::Unsupported, "a newer daemon's", "")));
    assert_eq!(said(&mut talk), [FREE_OF_R], "the booking is freed by its name");
    assert_eq!(*ear.heard.borrow(), ["reply", "unsupported"]);
}

#[test]
fn reports_in_flight_when_a_connection_ends_are_sent_on_the_next() {
    let mut talk = talk();
    let ear = RecordingWaiter::default();
    ask(&mut talk, booking(), &ear);
    ask(&mut talk, Leftover::Nothing, &ear);
    talk.send_report(free_of(1), Some(ear.clone()));
    talk.send_report(Report { kind: ReportKind::OutputProgress { output_tokens: 5 }, ..free_of(2) }, None);
    talk.send_report(Report { kind: ReportKind::Served { worker: Worker::new(4, 0) }, ..free_of(2) }, None);
    let now = Instant::now();
    talk.ended(true, now, 0.5);
    assert_eq!(*ear.heard.borrow(), ["connection"; 3], "every waiting call gets an error");
    assert_eq!((talk.phase, talk.silence.since()), (Phase::Connecting { is_first: true }, None));
    talk.store_report(free_of(3));
    let owed = connect(&mut talk, 1);
    let expected = [FREE_OF_R.to_owned(), free_words(1), "served 4/0".into(), free_words(3), "watch".into()];
    assert_eq!(owed, expected, "without the count, which the next one replaces");

    // They are still in flight; the next daemon is another run, which knows nothing of them.
    talk.ended(false, now, 0.5);
    assert_eq!((talk.phase, talk.silence.since()), (Phase::BackingOff, Some(now)), "it did not last");
    assert_eq!(connect(&mut talk, 2), ["watch"]);
    assert!(!talk.is_run(1) && talk.is_run(2));
    talk.free_unclaimed(&RunReply { reply: booked(5, 6), instance_id: 1 });
    assert_eq!(said(&mut talk), [] as [&str; 0], "its handles may name other bookings of this run");
    talk.free_unclaimed(&RunReply { reply: booked(5, 6), instance_id: 2 });
    assert_eq!(said(&mut talk), [free_words(5), free_words(6)]);
}

#[test]
fn a_timeout_counts_as_silence_only_if_nothing_arrived_during_the_call() {
    let mut talk = talk();
    let (ear, start) = (RecordingWaiter::default(), Instant::now());
    let id = ask(&mut talk, Leftover::Nothing, &ear);
    talk.answered(id, Ok(Reply::Free(BookingOutcome::Applied)));
    talk.heard_at = Some(start + Duration::from_millis(10));
    let later = start + Duration::from_millis(100);
    talk.timed_out(start, later, 0.5);
    assert_eq!(talk.silence.since(), None, "another reply arrived meanwhile");
    talk.timed_out(start + Duration::from_millis(20), later, 0.5);
    assert_eq!(talk.silence.since(), Some(later));
}

#[test]
fn stored_reports_are_limited_and_dropped_ones_counted() {
    let mut talk = talk();
    talk.ended(true, Instant::now(), 0.5);
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
    let mut talk = Talk::new(BackOff::default());
    let refused = crate::wire::RemoteError {
        code: Kind::NotPermitted as u16,
        kind: Some(Kind::NotPermitted),
        side: crate::error::Side::Gateway,
        retryable: false,
        retry_after_us: 0,
        message: "no".into(),
        remedy: "ask".into(),
    };
    talk.begin("test", SessionToken { hi: 1, lo: 2 });
    assert_eq!(talk.accepted(Reply::Error(refused)).unwrap_err().kind(), Kind::NotPermitted);
    talk.failed(&crate::client::lost(), Instant::now(), 0.5);
    assert_eq!(
        (talk.phase, talk.refusal.as_ref().map(|refusal| refusal.error().kind())),
        (Phase::BackingOff, Some(Kind::NotPermitted))
    );
    talk.unsent.clear();
    connect(&mut talk, 1);
    assert_eq!(talk.refusal, None);
}
