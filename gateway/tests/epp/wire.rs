//! The bytes on the wire, against bytes that the gRPC project's own classes for Python wrote (xds-protos 1.85.0,
//! grpcio-health-checking 1.85.1).

use std::fmt::Write;
use std::time::Instant;

use kvrouted_gateway::api::ApiError;
use kvrouted_gateway::epp::messages::*;
use kvrouted_gateway::epp::{Action, BodyBudget, Decision, Exchange, Subset};
use prost::Message;

use crate::kit::*;

// Has fields that our structs lack: typed metadata, and leave to send the body early.
const REQUEST_HEADERS: &str = "\
    12350a310a130a053a706174681a0a2f76312f6d6f64656c730a0d0a05782d6f6c641204746578740a0b0a05782d62696e1a\
    02fffe18014281010a620a14656e766f792e6c622e7375627365745f68696e74124a0a480a25782d676174657761792d6465\
    7374696e6174696f6e2d656e64706f696e742d737562736574121f321d0a0f1a0d31302e302e302e383a383030300a0a1a08\
    31302e302e302e39121b0a0769676e6f72656412100a0e747970652e6578616d706c652f784a440a1b656e766f792e66696c\
    746572732e687474702e6578745f70726f6312250a230a10757073747265616d2e61646472657373120f1a0d31302e302e30\
    2e383a3830303050015a06080410011801";
const REQUEST_BODY: &str = "22070a036162631001";
const RESPONSE_BODY: &str = "2a050a03616263";
const RESPONSE_HEADERS: &str = "1a021801";
const REQUEST_TRAILERS: &str = "3200";
const RESPONSE_TRAILERS: &str = "3a00";
const CHOSEN: &str = "\
    0a710a6f126b0a330a2f0a1e782d676174657761792d64657374696e6174696f6e2d656e64706f696e741a0d31302e302e30\
    2e383a383030301802121e782d676174657761792d64657374696e6174696f6e2d656e64706f696e741214782d646174612d\
    706172616c6c656c2d72616e6b280142430a410a08656e766f792e6c6212352a330a310a1e782d676174657761792d646573\
    74696e6174696f6e2d656e64706f696e74120f1a0d31302e302e302e383a38303030";
const STREAMED_REQUEST: &str = "1a0d0a0b1a091a070a036162631001";
const STREAMED_RESPONSE: &str = "220b0a091a071a050a03616263";
const RESPONSE_HEADERS_ANSWER: &str = "12020a00";
const REQUEST_TRAILERS_ANSWER: &str = "2a00";
const RESPONSE_TRAILERS_ANSWER: &str = "3200";
const IMMEDIATE: &str = "\
    3a260a0308ad0312160a140a100a0b72657472792d61667465721a013718021a027b7d2a03776879";
const HEALTH_REQUEST: &str = "0a086c6976656e657373";
const HEALTH_ANSWER: &str = "0801";

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex")).collect()
}

fn hex(message: &impl Message) -> String {
    message.encode_to_vec().iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").expect("written");
        hex
    })
}

fn request(hex: &str) -> ProcessingRequest {
    ProcessingRequest::decode(&bytes(hex)[..]).expect("a request")
}

#[test]
fn requests_are_read_and_unknown_fields_are_skipped() {
    let message = request(REQUEST_HEADERS);
    assert!(message.observability_mode);
    let modes = message.protocol_config.as_ref().expect("modes");
    assert_eq!(BodyMode::of(modes.request_body_mode), BodyMode::FullDuplexStreamed);
    assert_eq!(BodyMode::of(modes.response_body_mode), BodyMode::Streamed);
    let subset = Subset::of(&message).expect("a subset");
    assert!(subset.allows(&address("10.0.0.8:8000")) && subset.allows(&address("10.0.0.9:1")));
    assert!(!subset.allows(&address("10.0.0.8:8001")));
    let attribute = &message.attributes["envoy.filters.http.ext_proc"].fields["upstream.address"];
    assert_eq!(attribute, &Value::text("10.0.0.8:8000"));
    let Some(RequestPart::RequestHeaders(part)) = message.part else { panic!("no headers") };
    assert!(part.end_of_stream);
    let headers = part.headers.expect("headers");
    assert_eq!(headers.text(":path"), Some("/v1/models"));
    assert_eq!(headers.text("x-old"), Some("text"), "the value as text");
    assert_eq!((headers.bytes("x-bin"), headers.text("x-bin")), (Some(&[0xff, 0xfe][..]), None));
}

#[test]
fn each_part_of_a_request_has_its_number() {
    assert_eq!(request(REQUEST_BODY), request_body("abc", true));
    assert_eq!(request(RESPONSE_BODY), response_body("abc", false));
    assert_eq!(
        request(RESPONSE_HEADERS).part,
        Some(RequestPart::ResponseHeaders(HttpHeaders { headers: None, end_of_stream: true }))
    );
    assert_eq!(request(REQUEST_TRAILERS).part, Some(RequestPart::RequestTrailers(HttpTrailers { trailers: None })));
    assert_eq!(request(RESPONSE_TRAILERS), response_trailers());
}

/// What an exchange answers to these messages.
fn answers(messages: Vec<ProcessingRequest>, decision: Result<Decision, ApiError>) -> Vec<String> {
    let (mut exchange, mut actions, now) =
        (Exchange::new(LIMITS, &BodyBudget::new(10_000)), Vec::new(), Instant::now());
    let mut decision = Some(decision);
    for message in messages {
        exchange.receive(message, now, &mut actions);
        if matches!(actions.last(), Some(Action::Choose(_))) {
            exchange.decided(decision.take().expect("one question"), &mut actions);
        }
    }
    let sent = |action: &Action| match action {
        Action::Send(message) => Some(hex(message)),
        _ => None,
    };
    actions.iter().filter_map(sent).collect()
}

fn one() -> Decision {
    Decision { endpoints: vec![address("10.0.0.8:8000")], headers: Vec::new() }
}

#[test]
fn answers_are_written_as_envoy_reads_them() {
    let messages = vec![
        opening(&CHAT, false),
        request_body("abc", true),
        response_headers(&[], false),
        response_body("abc", false),
        response_trailers(),
    ];
    let expected = [CHOSEN, STREAMED_REQUEST, RESPONSE_HEADERS_ANSWER, STREAMED_RESPONSE, RESPONSE_TRAILERS_ANSWER];
    assert_eq!(answers(messages, Ok(one())), expected);
    let with_trailers = answers(vec![opening(&CHAT, false), request_trailers()], Ok(one()));
    assert_eq!(with_trailers, [CHOSEN, REQUEST_TRAILERS_ANSWER]);
}

#[test]
fn a_refusal_is_written_as_envoy_reads_it() {
    let header = HeaderValue { key: "retry-after".into(), value: "".into(), raw_value: "7".into() };
    let set = HeaderValueOption { header: Some(header), append_action: HeaderValueOption::OVERWRITE };
    let refusal = ImmediateResponse {
        status: Some(HttpStatus { code: 429 }),
        headers: Some(HeaderMutation { set_headers: vec![set], remove_headers: Vec::new() }),
        body: "{}".into(),
        details: "why".into(),
    };
    let part = Some(ResponsePart::ImmediateResponse(refusal));
    assert_eq!(hex(&ProcessingResponse { part, dynamic_metadata: None }), IMMEDIATE);
}

#[test]
fn health_has_its_numbers() {
    let request = HealthCheckRequest::decode(&bytes(HEALTH_REQUEST)[..]).expect("a request");
    assert_eq!(request.service, "liveness");
    assert_eq!(hex(&HealthCheckResponse { status: HealthCheckResponse::SERVING }), HEALTH_ANSWER);
}
