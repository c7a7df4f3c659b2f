//! One stream between Envoy and the picker, as a state machine: messages and times in, actions out. No I/O.
//!
//! # States
//!
//! ```text
//!  Opening     request headers ─▶ Collecting, or Choosing if they end the stream
//!              a body or trailers without headers ─▶ 500, Refused
//!  Collecting  a piece of body is kept; beyond a bound ─▶ 413 or 503, Refused
//!              the end of the body, or trailers ─▶ Choosing
//!              time is up ─▶ 408, Refused
//!  Choosing    the decision ─▶ headers, body and trailers are answered, Forwarded; an error ─▶ Refused
//!              time is up ─▶ 504, Refused
//!              more body: ignored, it came after the end; trailers: noted
//!  Forwarded   response headers ─▶ answered and reported, Responding
//!              more body: ignored; trailers: answered
//!  Responding  pieces of the response ─▶ answered and reported; its end ─▶ Ended
//!  Ended       further parts of the response ─▶ answered
//!  Refused     everything is ignored: Envoy has the picker's answer
//!  Observing   nothing is answered; the response is reported
//! ```
//!
//! A part of the response in `Opening`, `Collecting` or `Choosing` drops the decision ─▶ `Responding`. Parts that a
//! state does not name are ignored.
//!
//! # Rules that real Envoys taught
//!
//! * The answer to the headers, the body and the trailers are withheld until the request is here and the decision is
//!   made. They then go in that order.
//! * Only the first end of a body counts. Some releases send an end twice for large bodies.
//! * A request without a body has its end of stream at the headers; one with trailers has none at the body.
//! * Envoy enforces no deadline of its own in full duplex, so the exchange has two: for the caller's next piece of
//!   body, and for the decision.
//! * The exchange never ends the stream. Envoy would send the request on with an empty body, or cut the answer short
//!   without an error. The only ends are Envoy's, and errors of the stream itself.
//! * A response may come before a decision, from another filter or from Envoy itself. It passes unchanged.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use hyper::StatusCode;

use super::answer::{self, Side};
use super::budget::{BodyBudget, Taken};
use super::messages::{
    BodyMode, HeaderMap, HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse, ProtocolConfiguration,
    RequestPart,
};
use super::names;
use super::subset::Subset;
use crate::api::{ApiError, ApiPath};
use crate::limits::{EPP_MESSAGE_OVERHEAD_BYTES_MAX, HEADER_NAME_BYTES_MAX};

/// What an exchange is allowed.
#[derive(Clone, Copy, Debug)]
pub struct ExchangeLimits {
    /// The largest body, in bytes.
    pub body_bytes_max: usize,
    /// What the requests of all streams that wait for their decision may hold together, in bytes.
    pub bodies_bytes_max: usize,
    /// How long the caller may take for the next piece of its body.
    pub body_timeout: Duration,
    /// How long a decision may take.
    pub decision_timeout: Duration,
}

/// A request that needs an endpoint.
#[derive(Clone, Debug)]
pub struct Question {
    /// The HTTP method.
    pub method: String,
    /// The path and query.
    pub target: String,
    /// What the path means.
    pub path: ApiPath,
    /// All headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
    /// The endpoints among which to choose; `None` = all.
    pub subset: Option<Subset>,
    /// When the decision is too late.
    pub deadline: Instant,
}

/// The answer to a [`Question`], as far as Envoy hears it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// The endpoints, best first.
    pub endpoints: Vec<SocketAddr>,
    /// Request headers to set.
    pub headers: Vec<(String, String)>,
}

/// The beginning of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseStart {
    /// The HTTP status; `None` = Envoy sent none that is a number.
    pub status: Option<u16>,
    /// The endpoint that answered, as far as Envoy says.
    pub served: Option<SocketAddr>,
    /// Whether the response is a stream of server-sent events.
    pub is_event_stream: bool,
}

/// What the stream's driver must do. The order matters.
#[derive(Debug)]
pub enum Action {
    /// Send a message to Envoy.
    Send(ProcessingResponse),
    /// Find an endpoint, and call [`Exchange::decided`].
    Choose(Box<Question>),
    /// Nobody needs the decision any more: stop looking for it, and free what it booked.
    Abandon,
    /// The stream only observes the request with this id, which another stream decides.
    Observe(String),
    /// The response has begun.
    ResponseStarted(ResponseStart),
    /// A piece of the response's body passed.
    ResponseBody(Bytes),
    /// The response is complete.
    ResponseEnded,
}

/// One stream.
#[derive(Debug)]
pub struct Exchange {
    limits: ExchangeLimits,
    budget: BodyBudget,
    response_mode: BodyMode,
    state: State,
}

#[derive(Debug)]
enum State {
    Opening,
    Collecting(Collecting),
    Choosing(Choosing),
    /// What the request has taken is given back once its body has gone to Envoy.
    Forwarded(Option<Taken>),
    Responding,
    Refused,
    Ended,
    Observing,
}

/// A request of which a part is still to come.
#[derive(Debug)]
struct Collecting {
    headers: HeaderMap,
    subset: Option<Subset>,
    /// A copy: a piece keeps its whole message in memory, which may be much longer than the piece.
    body: BytesMut,
    taken: Taken,
    deadline: Instant,
}

/// A whole request that waits for its decision.
#[derive(Debug)]
struct Choosing {
    /// `None` = the headers ended the stream.
    body: Option<Bytes>,
    has_trailers: bool,
    deadline: Instant,
    taken: Taken,
}

impl Exchange {
    /// A stream that has just begun.
    #[must_use]
    pub fn new(limits: ExchangeLimits, budget: &BodyBudget) -> Self {
        Self { limits, budget: budget.clone(), response_mode: BodyMode::FullDuplexStreamed, state: State::Opening }
    }

    /// The time at which [`Exchange::time_is_up`] must be called.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Collecting(collecting) => Some(collecting.deadline),
            State::Choosing(choosing) => Some(choosing.deadline),
            State::Opening | State::Forwarded(_) | State::Responding => None,
            State::Refused | State::Ended | State::Observing => None,
        }
    }

    /// Whether the request has not gone on yet, so that an error can still be answered.
    #[must_use]
    pub fn is_undecided(&self) -> bool {
        matches!(self.state, State::Opening | State::Collecting(_) | State::Choosing(_))
    }

    /// Whether nothing is under way: nothing has come yet, or all that can come was answered.
    #[must_use]
    pub const fn is_at_rest(&self) -> bool {
        matches!(self.state, State::Opening | State::Refused | State::Ended)
    }

    /// Whether nothing has come yet.
    #[must_use]
    pub const fn is_opening(&self) -> bool {
        matches!(self.state, State::Opening)
    }

    /// All messages of the actions so far have gone to Envoy.
    pub fn all_sent(&mut self) {
        if let State::Forwarded(taken) = &mut self.state {
            *taken = None;
        }
    }

    /// A message of Envoy.
    pub fn receive(&mut self, message: ProcessingRequest, now: Instant, actions: &mut Vec<Action>) {
        if message.observability_mode {
            self.state = State::Observing;
            return observe(message, actions);
        }
        let subset = Subset::of(&message);
        let served = served(&message);
        match message.part {
            Some(RequestPart::RequestHeaders(headers)) => {
                self.request_headers(headers, subset, message.protocol_config.as_ref(), now, actions);
            }
            Some(RequestPart::RequestBody(piece)) => self.request_body(&piece, now, actions),
            Some(RequestPart::RequestTrailers(_)) => self.request_trailers(now, actions),
            Some(RequestPart::ResponseHeaders(headers)) => self.response_headers(&headers, served, actions),
            Some(RequestPart::ResponseBody(piece)) => self.response_body(piece, actions),
            Some(RequestPart::ResponseTrailers(_)) => self.response_trailers(actions),
            None => {} // a part of a later release: nothing waits for an answer that this one could give
        }
    }

    /// The decision.
    pub fn decided(&mut self, decision: Result<Decision, ApiError>, actions: &mut Vec<Action>) {
        let State::Choosing(choosing) = &mut self.state else { return };
        let decision = decision.and_then(|decision| match decision.endpoints.is_empty() {
            false => Ok(decision),
            true => Err(nobody("no endpoint may run this request")),
        });
        match decision {
            Err(error) => self.refuse(&error, actions),
            Ok(decision) => {
                let list = decision.endpoints.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(",");
                let has_trailers = choosing.has_trailers;
                let taken = std::mem::replace(&mut choosing.taken, self.budget.start());
                actions.push(Action::Send(answer::chosen(&list, &decision.headers)));
                if let Some(body) = choosing.body.take() {
                    actions.extend(answer::body(Side::Request, body, !has_trailers).map(Action::Send));
                }
                if has_trailers {
                    actions.push(Action::Send(answer::trailers(Side::Request)));
                }
                self.state = State::Forwarded(Some(taken));
            }
        }
    }

    /// The time of [`Exchange::deadline`] has come.
    pub fn time_is_up(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let error = match &self.state {
            State::Collecting(collecting) if collecting.deadline <= now => ApiError::caller(
                StatusCode::REQUEST_TIMEOUT,
                "body_timeout",
                format!("no more of the body came for {} s; send it faster", self.limits.body_timeout.as_secs()),
            ),
            State::Choosing(choosing) if choosing.deadline <= now => ApiError::gateway(
                StatusCode::GATEWAY_TIMEOUT,
                "decision_timeout",
                "the endpoint picker found no endpoint in time; try again",
            ),
            _ => return,
        };
        self.refuse(&error, actions);
    }

    /// Answers an error in place of an endpoint. Only before the request has gone on; later it does nothing.
    pub fn refuse(&mut self, error: &ApiError, actions: &mut Vec<Action>) {
        if self.is_undecided() {
            self.abandon(actions);
            actions.push(Action::Send(answer::refusal(error)));
            self.state = State::Refused;
        }
    }

    fn request_headers(
        &mut self,
        part: HttpHeaders,
        subset: Option<Subset>,
        modes: Option<&ProtocolConfiguration>,
        now: Instant,
        actions: &mut Vec<Action>,
    ) {
        if !matches!(self.state, State::Opening) {
            return;
        }
        let headers = part.headers.unwrap_or_default();
        let mut taken = self.budget.start();
        let bytes = headers.held_bytes();
        if bytes > EPP_MESSAGE_OVERHEAD_BYTES_MAX {
            return self.refuse(&headers_too_large(), actions);
        }
        let headers = headers.detached();
        if !taken.take(bytes + subset.as_ref().map_or(0, Subset::bytes)) {
            return self.refuse(&crowded(), actions);
        }
        let request_mode = modes.map_or(BodyMode::FullDuplexStreamed, |modes| BodyMode::of(modes.request_body_mode));
        self.response_mode = modes.map_or(self.response_mode, |modes| BodyMode::of(modes.response_body_mode));
        if part.end_of_stream {
            return self.choose((headers, subset, None), false, taken, now, actions);
        }
        if request_mode != BodyMode::FullDuplexStreamed {
            return self.refuse(&wrong_mode(), actions);
        }
        let length = headers.text("content-length").and_then(|text| text.parse::<usize>().ok());
        if length.is_some_and(|length| length > self.limits.body_bytes_max) {
            return self.refuse(&self.too_large(), actions);
        }
        self.state = State::Collecting(Collecting {
            headers,
            subset,
            body: BytesMut::new(),
            taken,
            deadline: now + self.limits.body_timeout,
        });
    }

    fn request_body(&mut self, piece: &HttpBody, now: Instant, actions: &mut Vec<Action>) {
        let State::Collecting(collecting) = &mut self.state else {
            if matches!(self.state, State::Opening) {
                self.refuse(&out_of_order("a body"), actions);
            }
            return;
        };
        if collecting.body.len() + piece.body.len() > self.limits.body_bytes_max {
            return self.refuse(&self.too_large(), actions);
        }
        if !collecting.taken.take(piece.body.len()) {
            return self.refuse(&crowded(), actions);
        }
        if !piece.body.is_empty() {
            collecting.body.extend_from_slice(&piece.body);
            collecting.deadline = now + self.limits.body_timeout;
        }
        if piece.end_of_stream {
            self.collected(false, now, actions);
        }
    }

    fn request_trailers(&mut self, now: Instant, actions: &mut Vec<Action>) {
        match &mut self.state {
            State::Opening => self.refuse(&out_of_order("trailers"), actions),
            State::Collecting(_) => self.collected(true, now, actions),
            State::Choosing(choosing) => choosing.has_trailers = true,
            State::Forwarded(_) => actions.push(Action::Send(answer::trailers(Side::Request))),
            State::Responding | State::Refused | State::Ended | State::Observing => {}
        }
    }

    /// The request is here: asks for the decision.
    fn collected(&mut self, has_trailers: bool, now: Instant, actions: &mut Vec<Action>) {
        let State::Collecting(collecting) = std::mem::replace(&mut self.state, State::Opening) else { return };
        let Collecting { headers, subset, body, taken, .. } = collecting;
        self.choose((headers, subset, Some(body.freeze())), has_trailers, taken, now, actions);
    }

    fn choose(
        &mut self,
        (headers, subset, body): (HeaderMap, Option<Subset>, Option<Bytes>),
        has_trailers: bool,
        taken: Taken,
        now: Instant,
        actions: &mut Vec<Action>,
    ) {
        let deadline = now + self.limits.decision_timeout;
        let target = headers.text(":path").unwrap_or_default().to_owned();
        let path = ApiPath::of(target.split_once('?').map_or(target.as_str(), |(path, _)| path));
        actions.push(Action::Choose(Box::new(Question {
            method: headers.text(":method").unwrap_or_default().to_owned(),
            path,
            target,
            headers,
            body: body.clone().unwrap_or_default(),
            subset,
            deadline,
        })));
        self.state = State::Choosing(Choosing { body, has_trailers, deadline, taken });
    }

    fn response_headers(&mut self, part: &HttpHeaders, served: Option<SocketAddr>, actions: &mut Vec<Action>) {
        if matches!(self.state, State::Forwarded(_)) {
            actions.push(Action::ResponseStarted(response_start(part, served)));
        }
        if !self.passes_response(actions) {
            return;
        }
        actions.push(Action::Send(answer::response_headers()));
        if part.end_of_stream {
            self.end_response(actions);
        }
    }

    fn response_body(&mut self, piece: HttpBody, actions: &mut Vec<Action>) {
        if !self.passes_response(actions) {
            return;
        }
        let ends = piece.end_of_stream;
        if !piece.body.is_empty() {
            actions.push(Action::ResponseBody(piece.body.clone()));
        }
        actions.extend(answer::response_body(self.response_mode, piece).into_iter().map(Action::Send));
        if ends {
            self.end_response(actions);
        }
    }

    fn response_trailers(&mut self, actions: &mut Vec<Action>) {
        if self.passes_response(actions) {
            actions.push(Action::Send(answer::trailers(Side::Response)));
            self.end_response(actions);
        }
    }

    /// A part of the response is here; `false` = it is the picker's own refusal, which needs no answer.
    fn passes_response(&mut self, actions: &mut Vec<Action>) -> bool {
        match self.state {
            State::Refused => return false,
            State::Opening | State::Collecting(_) | State::Choosing(_) => self.abandon(actions),
            State::Forwarded(_) | State::Responding | State::Ended | State::Observing => {}
        }
        if !matches!(self.state, State::Ended) {
            self.state = State::Responding;
        }
        true
    }

    fn end_response(&mut self, actions: &mut Vec<Action>) {
        if !matches!(self.state, State::Ended) {
            actions.push(Action::ResponseEnded);
            self.state = State::Ended;
        }
    }

    fn abandon(&mut self, actions: &mut Vec<Action>) {
        if matches!(self.state, State::Choosing(_)) {
            actions.push(Action::Abandon);
        }
    }

    fn too_large(&self) -> ApiError {
        ApiError::caller(
            StatusCode::PAYLOAD_TOO_LARGE,
            "body_too_large",
            format!("the body is larger than {} bytes, the most that this gateway takes", self.limits.body_bytes_max),
        )
    }
}

/// A stream that only gets copies: nothing is answered.
fn observe(message: ProcessingRequest, actions: &mut Vec<Action>) {
    let served = served(&message);
    match message.part {
        Some(RequestPart::RequestHeaders(part)) => {
            let headers = part.headers.unwrap_or_default();
            if let Some(id) = headers.text("x-request-id").filter(|id| id.len() <= HEADER_NAME_BYTES_MAX) {
                actions.push(Action::Observe(id.to_owned()));
            }
        }
        Some(RequestPart::ResponseHeaders(part)) => {
            actions.push(Action::ResponseStarted(response_start(&part, served)));
            if part.end_of_stream {
                actions.push(Action::ResponseEnded);
            }
        }
        Some(RequestPart::ResponseBody(piece)) => {
            if !piece.body.is_empty() {
                actions.push(Action::ResponseBody(piece.body));
            }
            if piece.end_of_stream {
                actions.push(Action::ResponseEnded);
            }
        }
        Some(RequestPart::ResponseTrailers(_)) => actions.push(Action::ResponseEnded),
        Some(RequestPart::RequestBody(_) | RequestPart::RequestTrailers(_)) | None => {}
    }
}

/// The endpoint that served, by the metadata of Envoy 1.38 or later, else by the attribute that any release can send.
fn served(message: &ProcessingRequest) -> Option<SocketAddr> {
    let metadata =
        || message.metadata_context.as_ref()?.filter_metadata.get(names::LB_NAMESPACE)?.fields.get(names::SERVED);
    let attribute = || message.attributes.get(names::EXT_PROC_FILTER)?.fields.get(names::UPSTREAM_ADDRESS);
    let of = |value: Option<&super::messages::Value>| value?.string_value.as_deref()?.trim().parse().ok();
    of(metadata()).or_else(|| of(attribute()))
}

fn response_start(part: &HttpHeaders, served: Option<SocketAddr>) -> ResponseStart {
    let text = |name| part.headers.as_ref().and_then(|headers| headers.text(name));
    ResponseStart {
        status: text(":status").and_then(|status| status.parse().ok()),
        served,
        is_event_stream: text("content-type").is_some_and(|kind| kind.starts_with("text/event-stream")),
    }
}

/// 503: nobody may run the request.
pub(crate) fn nobody(why: &str) -> ApiError {
    ApiError::gateway(StatusCode::SERVICE_UNAVAILABLE, "no_endpoint", why).retry_after(1)
}

pub(super) fn headers_too_large() -> ApiError {
    let message = format!("the headers take more than {EPP_MESSAGE_OVERHEAD_BYTES_MAX} bytes, which is the most");
    ApiError::caller(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", message)
}

/// 503: other requests have taken what all may hold.
pub(super) fn crowded() -> ApiError {
    let message = "the endpoint picker holds too many bytes of other requests; try again";
    ApiError::gateway(StatusCode::SERVICE_UNAVAILABLE, "bodies_too_large", message).retry_after(1)
}

fn wrong_mode() -> ApiError {
    let message = "Envoy does not stream request bodies to the endpoint picker: set request_body_mode \
                   FULL_DUPLEX_STREAMED and request_trailer_mode SEND in the processing_mode of its ext_proc filter";
    ApiError::gateway(StatusCode::INTERNAL_SERVER_ERROR, "ext_proc_mode", message)
}

fn out_of_order(part: &str) -> ApiError {
    let message = format!(
        "Envoy sent {part} without headers to the endpoint picker: set request_header_mode SEND in the processing_mode \
         of its ext_proc filter"
    );
    ApiError::gateway(StatusCode::INTERNAL_SERVER_ERROR, "ext_proc_mode", message)
}
