//! The response's half of a stream: what passes, and what is reported of it.

use kvrouted_gateway::epp::ResponseStart;
use kvrouted_gateway::epp::messages::*;

use crate::kit::*;

fn started(status: u16, served: Option<&str>, is_event_stream: bool) -> Heard {
    Heard::Answered(ResponseStart { status: Some(status), served: served.map(address), is_event_stream })
}

const SSE: [(&str, &str); 2] = [(":status", "200"), ("content-type", "text/event-stream; charset=utf-8")];

/// A stream whose request has got its endpoints.
async fn forwarded(picker: &Picker, response_body: BodyMode) -> Stream {
    let mut stream = picker.stream().await;
    stream.send(opening_in(BodyMode::FullDuplexStreamed, response_body, &CHAT, true)).await;
    stream.chosen().await;
    stream
}

async fn passes_headers(stream: &mut Stream, message: ProcessingRequest) {
    stream.send(message).await;
    let answer = stream.answer().await;
    assert!(matches!(answer, ResponsePart::ResponseHeaders(_)), "{answer:?}");
}

#[tokio::test]
async fn events_pass_one_by_one_and_the_end_frees_the_booking_but_not_the_stream() {
    let picker = Picker::start(two(), LIMITS).await;
    let mut stream = forwarded(&picker, BodyMode::FullDuplexStreamed).await;
    let served = with_metadata(
        response_headers(&SSE, false),
        "envoy.lb",
        "x-gateway-destination-endpoint-served",
        Value::text("10.0.0.9:8001"),
    );
    passes_headers(&mut stream, served).await;
    for event in ["data: 1\n\n", "data: 2\n\n"] {
        stream.send(response_body(event, false)).await;
        let ResponsePart::ResponseBody(answer) = stream.answer().await else { panic!("no piece of the response") };
        assert_eq!(piece(answer), HttpBody { body: event.into(), end_of_stream: false });
    }
    assert_eq!(picker.heard().len(), 3);
    stream.send(response_body("", true)).await;
    let ResponsePart::ResponseBody(answer) = stream.answer().await else { panic!("no piece of the response") };
    assert_eq!(piece(answer), HttpBody { body: "".into(), end_of_stream: true });
    picker.hears(&Heard::Complete).await;
    let expected = [started(200, Some("10.0.0.9:8001"), true), Heard::Output(9), Heard::Output(9), Heard::Complete];
    assert_eq!(picker.heard(), expected);
    stream.is_still().await; // Envoy would lose the last event if the picker ended the stream
    stream.half_close().await;
    assert_eq!(stream.next().await.expect("no error"), None);
    assert_eq!(picker.heard(), expected);
}

#[tokio::test]
async fn an_attribute_says_who_served_where_the_metadata_does_not() {
    let picker = Picker::start(two(), LIMITS).await;
    let mut stream = forwarded(&picker, BodyMode::FullDuplexStreamed).await;
    let message = with_attribute(response_headers(&[(":status", "503")], true), "upstream.address", "10.0.0.8:8000");
    passes_headers(&mut stream, message).await;
    picker.hears(&Heard::Complete).await;
    assert_eq!(picker.heard(), [started(503, Some("10.0.0.8:8000"), false), Heard::Complete]);
}

#[tokio::test]
async fn a_served_endpoint_that_is_no_address_is_unknown() {
    let picker = Picker::start(two(), LIMITS).await;
    let mut stream = forwarded(&picker, BodyMode::FullDuplexStreamed).await;
    let key = "x-gateway-destination-endpoint-served";
    let message = with_metadata(response_headers(&SSE, false), "envoy.lb", key, Value::text("engine-1"));
    passes_headers(&mut stream, message).await;
    picker.hears(&started(200, None, true)).await;
}

#[tokio::test]
async fn a_large_piece_of_response_comes_back_in_pieces_that_envoy_takes() {
    let picker = Picker::start(two(), LIMITS).await;
    let mut stream = forwarded(&picker, BodyMode::FullDuplexStreamed).await;
    passes_headers(&mut stream, response_headers(&SSE, false)).await;
    let body: Vec<u8> = (0..200_000_u32).map(|number| (number % 251) as u8).collect();
    stream.send(response_body(body.clone(), true)).await;
    let mut back = Vec::new();
    loop {
        let ResponsePart::ResponseBody(answer) = stream.answer().await else { panic!("no piece of the response") };
        let piece = piece(answer);
        assert!(piece.body.len() <= 62_000);
        back.extend_from_slice(&piece.body);
        if piece.end_of_stream {
            break;
        }
    }
    assert!(back == body, "the response has changed");
}

#[tokio::test]
async fn trailers_end_a_response() {
    let picker = Picker::start(two(), LIMITS).await;
    let mut stream = forwarded(&picker, BodyMode::FullDuplexStreamed).await;
    passes_headers(&mut stream, response_headers(&SSE, false)).await;
    stream.send(response_body("data: 1\n\n", false)).await;
    stream.answer().await;
    stream.send(response_trailers()).await;
    assert!(matches!(stream.answer().await, ResponsePart::ResponseTrailers(_)));
    picker.hears(&Heard::Complete).await;
}

#[tokio::test]
async fn a_caller_who_leaves_in_the_middle_of_an_answer_frees_the_booking() {
    let picker = Picker::start(two(), LIMITS).await;
    let mut stream = forwarded(&picker, BodyMode::FullDuplexStreamed).await;
    passes_headers(&mut stream, response_headers(&SSE, false)).await;
    stream.send(response_body("data: 1\n\n", false)).await;
    stream.answer().await;
    drop(stream);
    picker.hears(&Heard::GivenUp).await;
    assert!(!picker.heard().contains(&Heard::Complete));
    assert_eq!(picker.counters.cut.load(std::sync::atomic::Ordering::Relaxed), 1);
}

#[tokio::test]
async fn a_response_without_a_decision_passes_and_stops_it() {
    let picker = Picker::start(Plan::Hang, LIMITS).await;
    let mut stream = picker.stream().await;
    stream.send(opening(&CHAT, true)).await;
    picker.is_asked().await;
    passes_headers(&mut stream, response_headers(&[(":status", "403")], false)).await;
    picker.drops_a_decision().await;
    stream.send(response_body("no", true)).await;
    let ResponsePart::ResponseBody(answer) = stream.answer().await else { panic!("no piece of the response") };
    assert_eq!(piece(answer), HttpBody { body: "no".into(), end_of_stream: true });
    assert_eq!(picker.heard(), []);
}

#[tokio::test]
async fn without_full_duplex_each_piece_of_response_gets_leave_to_pass() {
    let picker = Picker::start(two(), LIMITS).await;
    for mode in [BodyMode::Streamed, BodyMode::Buffered] {
        let mut stream = forwarded(&picker, mode).await;
        passes_headers(&mut stream, response_headers(&SSE, false)).await;
        stream.send(response_body("data: 1\n\n", true)).await;
        let answer = stream.answer().await;
        assert_eq!(answer, ResponsePart::ResponseBody(CommonAnswer { response: None }), "{mode:?}");
        picker.hears(&Heard::Complete).await;
    }
}

fn observed(message: ProcessingRequest) -> ProcessingRequest {
    ProcessingRequest { observability_mode: true, ..message }
}

#[tokio::test]
async fn a_stream_that_observes_gets_no_answer_and_hears_the_end_of_a_request_whose_own_stream_is_over() {
    let picker = Picker::start(two(), LIMITS).await;
    let connection = picker.connect().await;
    let mut observer = connection.stream().await;
    observer.send(observed(opening(&CHAT, false))).await;
    observer.is_still().await;
    // The request's own stream ends at the response's headers.
    let mut own = connection.stream().await;
    own.send(opening_in(BodyMode::FullDuplexStreamed, BodyMode::None, &CHAT, true)).await;
    own.chosen().await;
    passes_headers(&mut own, response_headers(&SSE, false)).await;
    own.half_close().await;
    own.is_over().await;
    assert_eq!(picker.heard(), [started(200, None, true)], "the booking goes on");
    observer.send(observed(response_body("data: 1\n\n", false))).await;
    picker.hears(&Heard::Output(9)).await;
    observer.send(observed(response_trailers())).await;
    picker.hears(&Heard::Complete).await;
    observer.is_still().await;
}

#[tokio::test]
async fn a_stream_that_observes_and_ends_early_gives_the_booking_up() {
    let picker = Picker::start(two(), LIMITS).await;
    let mut observer = picker.stream().await;
    observer.send(observed(opening(&CHAT, false))).await;
    observer.is_still().await;
    let mut own = forwarded(&picker, BodyMode::None).await;
    passes_headers(&mut own, response_headers(&SSE, false)).await;
    own.half_close().await;
    own.is_over().await;
    assert_eq!(picker.heard().len(), 1, "{:?}", picker.heard());
    drop(observer);
    picker.hears(&Heard::GivenUp).await;
}

#[tokio::test]
async fn without_an_observer_the_booking_ends_with_the_stream() {
    let picker = Picker::start(two(), LIMITS).await;
    let mut own = forwarded(&picker, BodyMode::None).await;
    passes_headers(&mut own, response_headers(&SSE, false)).await;
    own.half_close().await;
    picker.hears(&Heard::GivenUp).await;
}
