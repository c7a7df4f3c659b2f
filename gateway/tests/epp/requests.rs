//! The request's half of a stream: what is asked, what is answered, and what is refused.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hyper::StatusCode;
use kvrouted_gateway::api::{ApiError, ApiPath};
use kvrouted_gateway::epp::messages::*;
use kvrouted_gateway::epp::{ExchangeLimits, Listen};
use kvrouted_gateway::memory::Memory;
use tonic::Code;

use crate::kit::*;

const BODY: &[u8] = br#"{"model": "m", "messages": []}"#;

#[tokio::test]
async fn a_post_gets_the_ordered_list_in_both_channels_and_its_body_back() {
    let picker = Picker::start(two(), LIMITS).await;
    let mut stream = picker.stream().await;
    stream.send(opening(&CHAT, false)).await;
    stream.is_still().await; // the headers are not answered before the body is here
    stream.send(request_body(&BODY[..10], false)).await;
    stream.send(request_body(&BODY[10..], false)).await;
    stream.send(request_body("", true)).await;
    // The kit checks that header and metadata agree, and that the caller's own header is removed and overwritten.
    assert_eq!(stream.chosen().await, "10.0.0.8:8000,10.0.0.9:8001");
    assert_eq!(stream.request_body().await, (BODY.to_vec(), 1, false));
    let question = &picker.questions()[0];
    assert_eq!((question.path, question.method.as_str()), (ApiPath::ChatCompletions, "POST"));
    assert_eq!(question.target, "/v1/chat/completions?trace=1");
    assert_eq!(question.body, BODY);
    assert_eq!(question.subset, None);
    stream.is_still().await; // the picker does not end the stream
}

#[tokio::test]
async fn a_request_without_a_body_is_decided_at_its_headers() {
    let picker = Picker::start(two(), LIMITS).await;
    let mut stream = picker.stream().await;
    stream.send(opening(&[(":method", "GET"), (":path", "/v1/models")], true)).await;
    assert_eq!(stream.chosen().await, "10.0.0.8:8000,10.0.0.9:8001");
    stream.is_still().await; // no body is made up
    assert_eq!(picker.questions()[0].path, ApiPath::Models);
}

#[tokio::test]
async fn what_comes_after_the_end_of_a_body_is_ignored() {
    let picker = Picker::start(two(), LIMITS).await;
    let mut stream = picker.stream().await;
    stream.send(opening(&CHAT, false)).await;
    stream.send(request_body(BODY, true)).await;
    stream.send(request_body(BODY, false)).await;
    stream.send(request_body("", true)).await;
    stream.chosen().await;
    assert_eq!(stream.request_body().await, (BODY.to_vec(), 1, false));
    stream.send(request_body("", true)).await;
    stream.is_still().await;
    assert_eq!(picker.questions().len(), 1);
}

#[tokio::test]
async fn with_trailers_no_piece_of_body_carries_the_end() {
    let picker = Picker::start(two(), LIMITS).await;
    let mut stream = picker.stream().await;
    stream.send(opening(&CHAT, false)).await;
    stream.send(request_body(BODY, false)).await;
    stream.send(request_trailers()).await;
    stream.chosen().await;
    assert_eq!(stream.request_body().await, (BODY.to_vec(), 1, true));
    // Trailers without a body.
    let mut stream = picker.stream().await;
    stream.send(opening(&CHAT, false)).await;
    stream.send(request_trailers()).await;
    stream.chosen().await;
    assert_eq!(stream.request_body().await, (Vec::new(), 0, true));
}

#[tokio::test]
async fn subset_hints_reach_the_chooser_as_list_and_as_text() {
    let picker = Picker::start(two(), LIMITS).await;
    for value in [Value::texts(&["10.0.0.9:8001", "10.0.0.7"]), Value::text("10.0.0.9:8001, 10.0.0.7")] {
        let mut stream = picker.stream().await;
        let key = "x-gateway-destination-endpoint-subset";
        stream.send(with_metadata(opening(&CHAT, true), "envoy.lb.subset_hint", key, value)).await;
        stream.chosen().await;
        let questions = picker.questions();
        let subset = questions.last().and_then(|question| question.subset.as_ref()).expect("a subset");
        assert!(subset.allows(&address("10.0.0.9:8001")) && subset.allows(&address("10.0.0.7:1")));
        assert!(!subset.allows(&address("10.0.0.8:8000")));
    }
}

#[tokio::test]
async fn errors_of_the_chooser_reach_the_caller_in_openais_shape() {
    let busy = ApiError::gateway(StatusCode::TOO_MANY_REQUESTS, "all_busy", "every engine is busy").retry_after(7);
    let unknown = ApiError::caller(StatusCode::NOT_FOUND, "model_not_found", "there is no model m");
    let malformed = ApiError::caller(StatusCode::BAD_REQUEST, "malformed_json", "the body is no JSON");
    let picker = Picker::start(two(), LIMITS).await;
    for (error, status, kind, retry_after) in [
        (busy, 429, "rate_limit_error", Some("7")),
        (unknown, 404, "invalid_request_error", None),
        (malformed, 400, "invalid_request_error", None),
    ] {
        let code = error.code;
        picker.plan(Plan::Error(error));
        let mut stream = picker.stream().await;
        stream.send(opening(&CHAT, false)).await;
        stream.send(request_body(BODY, true)).await;
        let expected = Refusal {
            status,
            code: code.to_owned(),
            kind: kind.to_owned(),
            retry_after: retry_after.map(str::to_owned),
            details: format!("kvrouted_{code}"),
        };
        assert_eq!(stream.refusal().await, expected);
        stream.send(request_body("", true)).await;
        stream.is_still().await; // neither a second answer nor an end
    }
}

#[tokio::test]
async fn an_empty_list_is_503_with_retry_after_and_the_booking_is_given_up() {
    let picker = Picker::start(Plan::Endpoints(Vec::new()), LIMITS).await;
    let mut stream = picker.stream().await;
    stream.send(opening(&CHAT, true)).await;
    let refusal = stream.refusal().await;
    assert_eq!((refusal.status, refusal.retry_after.as_deref()), (503, Some("1")));
    picker.hears(&Heard::GivenUp).await;
}

#[tokio::test]
async fn while_memory_is_short_a_new_request_is_503_with_retry_after_and_one_under_way_goes_on() {
    let memory = Arc::new(Memory::undivided(1000));
    let listen = Listen::Tcp(address("127.0.0.1:0"));
    let picker = Picker::start_within(&listen, None, (two(), LIMITS), &memory).await;
    let mut before = picker.stream().await;
    before.send(opening(&CHAT, false)).await;
    before.is_still().await;
    (0..2).for_each(|_| memory.look(950));
    let mut refused = picker.stream().await;
    refused.send(opening(&CHAT, false)).await;
    let refusal = refused.refusal().await;
    assert_eq!(
        (refusal.status, refusal.code.as_str(), refusal.retry_after.as_deref()),
        (503, "memory_short", Some("1"))
    );
    assert_eq!(picker.counters.memory_short.load(Ordering::Relaxed), 1);
    before.send(request_body(BODY, true)).await;
    assert_eq!(before.chosen().await, "10.0.0.8:8000,10.0.0.9:8001");
    (0..20).for_each(|_| memory.look(100));
    let mut after = picker.stream().await;
    after.send(opening(&CHAT, false)).await;
    after.send(request_body(BODY, true)).await;
    assert_eq!(after.chosen().await, "10.0.0.8:8000,10.0.0.9:8001");
}

#[tokio::test]
async fn streams_beyond_the_bound_are_503_and_those_far_beyond_it_are_not_opened() {
    const STREAMS_MAX: usize = 40_000;
    let picker = Picker::start(two(), LIMITS).await;
    let connection = picker.connect().await;
    picker.counters.streams_open.fetch_add(STREAMS_MAX, Ordering::Relaxed);
    let mut refused = connection.stream().await;
    refused.send(opening(&CHAT, false)).await;
    assert_eq!(refused.refusal().await.code, "too_many_requests_at_once");
    picker.counters.streams_open.fetch_add(STREAMS_MAX, Ordering::Relaxed);
    assert_eq!(connection.try_stream().await.err(), Some(Code::ResourceExhausted));
    picker.counters.streams_open.fetch_sub(2 * STREAMS_MAX, Ordering::Relaxed);
    let mut after = connection.stream().await;
    after.send(opening(&CHAT, true)).await;
    assert_eq!(after.chosen().await, "10.0.0.8:8000,10.0.0.9:8001");
}

#[tokio::test]
async fn the_picker_has_a_deadline_of_its_own() {
    let limits = ExchangeLimits { decision_timeout: Duration::from_millis(20), ..LIMITS };
    let picker = Picker::start(Plan::Hang, limits).await;
    let mut stream = picker.stream().await;
    stream.send(opening(&CHAT, true)).await;
    let refusal = stream.refusal().await;
    assert_eq!((refusal.status, refusal.code.as_str()), (504, "decision_timeout"));
    picker.drops_a_decision().await;
    stream.is_still().await;
}

#[tokio::test]
async fn a_caller_who_stops_sending_its_body_gets_408() {
    let limits = ExchangeLimits { body_timeout: Duration::from_millis(20), ..LIMITS };
    let picker = Picker::start(two(), limits).await;
    let mut stream = picker.stream().await;
    stream.send(opening(&CHAT, false)).await;
    stream.send(request_body(BODY, false)).await;
    let refusal = stream.refusal().await;
    assert_eq!((refusal.status, refusal.code.as_str()), (408, "body_timeout"));
    assert!(picker.questions().is_empty());
}

#[tokio::test]
async fn bodies_above_the_bound_get_413_at_whichever_message_tells() {
    let limits = ExchangeLimits { body_bytes_max: 1000, ..LIMITS };
    let picker = Picker::start(two(), limits).await;
    let too_large = |refusal: Refusal| assert_eq!((refusal.status, refusal.code.as_str()), (413, "body_too_large"));

    let mut declared = picker.stream().await;
    declared.send(opening(&[CHAT[0], CHAT[1], ("content-length", "1001")], false)).await;
    too_large(declared.refusal().await);

    let mut grown = picker.stream().await;
    grown.send(opening(&CHAT, false)).await;
    grown.send(request_body(vec![b'x'; 1000], false)).await;
    grown.is_still().await;
    grown.send(request_body("x", false)).await;
    too_large(grown.refusal().await);
    grown.send(request_body(vec![b'x'; 500], true)).await;
    grown.is_still().await;

    let mut just_right = picker.stream().await;
    just_right.send(opening(&[CHAT[0], CHAT[1], ("content-length", "1000")], false)).await;
    just_right.send(request_body(vec![b'x'; 1000], true)).await;
    just_right.chosen().await;
}

#[tokio::test]
async fn a_message_that_is_too_large_for_grpc_is_413_and_then_an_error_never_an_end_with_ok() {
    let limits = ExchangeLimits { body_bytes_max: 1000, ..LIMITS };
    let picker = Picker::start(two(), limits).await;
    let mut stream = picker.stream().await;
    stream.send(opening(&CHAT, false)).await;
    stream.send(request_body(vec![b'x'; 3 << 20], true)).await;
    assert_eq!(stream.refusal().await.status, 413);
    assert_eq!(stream.next().await.expect_err("an error").code(), Code::OutOfRange);
}

#[tokio::test]
async fn one_message_may_be_larger_than_tonics_default_of_four_megabytes() {
    let picker = Picker::start(two(), LIMITS).await;
    let mut stream = picker.stream().await;
    let body = vec![b'x'; 6 << 20];
    stream.send(opening(&CHAT, false)).await;
    stream.send(request_body(body.clone(), true)).await;
    stream.chosen().await;
    let (back, pieces, _) = stream.request_body().await;
    assert!(back == body, "the body has changed");
    assert_eq!(pieces, body.len().div_ceil(62_000));
}

#[tokio::test]
async fn a_caller_who_leaves_before_the_decision_stops_it() {
    let picker = Picker::start(Plan::Hang, LIMITS).await;
    // Envoy resets the stream.
    let stream = picker.stream().await;
    stream.send(opening(&CHAT, true)).await;
    picker.is_asked().await;
    drop(stream);
    picker.drops_a_decision().await;
    // Envoy half-closes it: the answer must be an error, for an OK would send the request on.
    let mut stream = picker.stream().await;
    stream.send(opening(&CHAT, true)).await;
    stream.is_still().await;
    stream.half_close().await;
    assert_eq!(stream.next().await.expect_err("an error").code(), Code::Cancelled);
}

#[tokio::test]
async fn a_processing_mode_that_cannot_work_is_refused_with_the_remedy() {
    let picker = Picker::start(two(), LIMITS).await;
    for mode in [BodyMode::None, BodyMode::Streamed, BodyMode::Buffered] {
        let mut stream = picker.stream().await;
        stream.send(opening_in(mode, BodyMode::FullDuplexStreamed, &CHAT, false)).await;
        let ResponsePart::ImmediateResponse(answer) = stream.answer().await else { panic!("no refusal") };
        assert_eq!(Refusal::of(&answer).status, 500);
        let body = String::from_utf8(answer.body.to_vec()).expect("text");
        assert!(body.contains("request_body_mode FULL_DUPLEX_STREAMED"), "{body}");
        // Without a body the mode does not matter.
        let mut stream = picker.stream().await;
        stream.send(opening_in(mode, BodyMode::FullDuplexStreamed, &CHAT, true)).await;
        stream.chosen().await;
    }
    let mut headless = picker.stream().await;
    headless.send(request_body(BODY, true)).await;
    assert_eq!(headless.refusal().await.code, "ext_proc_mode");
}
