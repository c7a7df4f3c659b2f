//! A picker with a scripted chooser, and a client that plays Envoy.

#![allow(dead_code, reason = "two tests share this file, and each uses a part of it")]

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use kvrouted_gateway::api::ApiError;
use kvrouted_gateway::epp::messages::*;
use kvrouted_gateway::epp::{
    Certificate, Choice, Chooser, Decision, EppCounters, EppServer, ExchangeLimits, Health, Lease, Listen, Question,
    ResponseStart, Services,
};
use kvrouted_gateway::memory::Memory;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{mpsc, oneshot, watch};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

/// How long a test waits for something that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// How long a test waits to see that something does not happen.
pub(crate) const STILLNESS: Duration = Duration::from_millis(60);

pub(crate) const LIMITS: ExchangeLimits = ExchangeLimits {
    body_bytes_max: 8 << 20,
    bodies_bytes_max: 1 << 30,
    body_timeout: Duration::from_secs(20),
    decision_timeout: Duration::from_secs(20),
};

/// What the chooser heard of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    Answered(ResponseStart),
    Output(usize),
    Complete,
    /// The booking was given up before the response was complete.
    GivenUp,
}

/// What the chooser answers.
#[derive(Clone, Debug)]
pub(crate) enum Plan {
    Endpoints(Vec<SocketAddr>),
    Error(ApiError),
    /// Never decides.
    Hang,
    /// As the question says.
    Rule(Rule),
}

/// A plan for each question.
#[derive(Clone)]
pub(crate) struct Rule(pub(crate) Arc<dyn Fn(&Question) -> Plan + Send + Sync>);

impl std::fmt::Debug for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Rule")
    }
}

#[derive(Default)]
struct Told {
    questions: Vec<Question>,
    heard: Vec<Heard>,
    /// Decisions that were dropped before they were made.
    dropped: usize,
}

/// A chooser that does as the test says.
#[derive(Clone)]
pub(crate) struct Scripted {
    plan: Arc<Mutex<Plan>>,
    told: Arc<watch::Sender<Told>>,
}

pub(crate) struct ScriptedLease {
    told: Arc<watch::Sender<Told>>,
    is_complete: bool,
}

/// Counts a decision that is dropped before it is made.
struct Undecided(Option<Arc<watch::Sender<Told>>>);

impl Drop for Undecided {
    fn drop(&mut self) {
        if let Some(told) = self.0.take() {
            told.send_modify(|told| told.dropped += 1);
        }
    }
}

impl Chooser for Scripted {
    type Lease = ScriptedLease;

    async fn choose(&self, question: Question) -> Result<Choice<ScriptedLease>, ApiError> {
        let mut undecided = Undecided(Some(Arc::clone(&self.told)));
        let mut plan = self.plan.lock().clone();
        if let Plan::Rule(rule) = &plan {
            plan = (rule.0)(&question);
        }
        self.told.send_modify(|told| told.questions.push(question));
        let decision = match plan {
            Plan::Endpoints(endpoints) => Decision { endpoints, headers: Vec::new() },
            Plan::Error(error) => {
                undecided.0 = None;
                return Err(error);
            }
            Plan::Hang | Plan::Rule(_) => std::future::pending().await,
        };
        undecided.0 = None;
        Ok(Choice { decision, lease: ScriptedLease { told: Arc::clone(&self.told), is_complete: false } })
    }
}

impl Lease for ScriptedLease {
    fn answered(&mut self, start: &ResponseStart) {
        self.told.send_modify(|told| told.heard.push(Heard::Answered(start.clone())));
    }

    fn output(&mut self, piece: &[u8]) {
        self.told.send_modify(|told| told.heard.push(Heard::Output(piece.len())));
    }

    fn complete(mut self) {
        self.is_complete = true;
        self.told.send_modify(|told| told.heard.push(Heard::Complete));
    }
}

impl Drop for ScriptedLease {
    fn drop(&mut self) {
        if !self.is_complete {
            self.told.send_modify(|told| told.heard.push(Heard::GivenUp));
        }
    }
}

/// A running picker.
pub(crate) struct Picker {
    pub(crate) address: Option<SocketAddr>,
    pub(crate) health: Health,
    pub(crate) counters: Arc<EppCounters>,
    chooser: Scripted,
    end: Option<oneshot::Sender<()>>,
    task: tokio::task::JoinHandle<()>,
}

pub(crate) fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

pub(crate) fn two() -> Plan {
    Plan::Endpoints(vec![address("10.0.0.8:8000"), address("10.0.0.9:8001")])
}

impl Picker {
    /// Without TLS, on a free port.
    pub(crate) async fn start(plan: Plan, limits: ExchangeLimits) -> Self {
        Self::start_at(&Listen::Tcp(address("127.0.0.1:0")), None, plan, limits).await
    }

    pub(crate) async fn start_at(
        listen: &Listen,
        tls: Option<Certificate>,
        plan: Plan,
        limits: ExchangeLimits,
    ) -> Self {
        Self::start_within(listen, tls, (plan, limits), &Arc::default()).await
    }

    /// The same within a memory budget.
    pub(crate) async fn start_within(
        listen: &Listen,
        tls: Option<Certificate>,
        (plan, limits): (Plan, ExchangeLimits),
        memory: &Arc<Memory>,
    ) -> Self {
        let chooser =
            Scripted { plan: Arc::new(Mutex::new(plan)), told: Arc::new(watch::Sender::new(Told::default())) };
        let health = Health::new();
        let services = Services::within(chooser.clone(), health.clone(), limits, memory);
        let counters = services.counters();
        let server = EppServer::bind(listen, tls).await.expect("the picker listens");
        let address = server.address();
        let (end, ended) = oneshot::channel();
        let serving = server.serve(services, health.clone(), async { drop(ended.await) }, PATIENCE);
        let task = tokio::spawn(serving);
        Self { address, health, counters, chooser, end: Some(end), task }
    }

    pub(crate) fn plan(&self, plan: Plan) {
        *self.chooser.plan.lock() = plan;
    }

    /// Tells the picker to end, and returns its task.
    pub(crate) fn end(mut self) -> tokio::task::JoinHandle<()> {
        drop(self.end.take());
        self.task
    }

    pub(crate) fn questions(&self) -> Vec<Question> {
        self.chooser.told.borrow().questions.clone()
    }

    pub(crate) fn heard(&self) -> Vec<Heard> {
        self.chooser.told.borrow().heard.clone()
    }

    /// Waits until the chooser has heard this.
    pub(crate) async fn hears(&self, wanted: &Heard) {
        self.wait(|told| told.heard.contains(wanted)).await;
    }

    /// Waits until this many bookings have been given up.
    pub(crate) async fn gives_up(&self, times: usize) {
        let is_given_up = |heard: &&Heard| **heard == Heard::GivenUp;
        self.wait(|told| told.heard.iter().filter(is_given_up).count() >= times).await;
    }

    /// Waits until a decision was dropped before it was made.
    pub(crate) async fn drops_a_decision(&self) {
        self.wait(|told| told.dropped > 0).await;
    }

    /// Waits until the chooser has been asked.
    pub(crate) async fn is_asked(&self) {
        self.wait(|told| !told.questions.is_empty()).await;
    }

    async fn wait(&self, is_so: impl Fn(&Told) -> bool) {
        let mut told = self.chooser.told.subscribe();
        let waited = tokio::time::timeout(PATIENCE, told.wait_for(|told| is_so(told))).await;
        assert!(waited.is_ok(), "what must happen has not happened; heard so far: {:?}", self.heard());
    }

    pub(crate) async fn connect(&self) -> Connection {
        let address = self.address.expect("a TCP picker");
        Connection::over(TcpStream::connect(address).await.expect("the picker accepts")).await
    }

    /// One stream on a connection of its own.
    pub(crate) async fn stream(&self) -> Stream {
        self.connect().await.stream().await
    }
}

/// One HTTP/2 connection, as Envoy has it.
#[derive(Clone)]
pub(crate) struct Connection(SendRequest<tonic::body::Body>);

impl tonic::codegen::Service<hyper::Request<tonic::body::Body>> for Connection {
    type Response = hyper::Response<hyper::body::Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: hyper::Request<tonic::body::Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

impl Connection {
    pub(crate) async fn over(io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Self {
        let (sender, connection) = handshake(TokioExecutor::new(), TokioIo::new(io)).await.expect("HTTP/2");
        tokio::spawn(connection);
        Self(sender)
    }

    pub(crate) async fn over_unix(path: &Path) -> Self {
        Self::over(UnixStream::connect(path).await.expect("the picker accepts")).await
    }

    fn grpc(&self) -> tonic::client::Grpc<Self> {
        tonic::client::Grpc::with_origin(self.clone(), "http://epp".parse().expect("a URI"))
    }

    /// Opens a stream of external processing.
    pub(crate) async fn stream(&self) -> Stream {
        self.try_stream().await.expect("a stream")
    }

    /// The same, or the code by which the picker refuses it.
    pub(crate) async fn try_stream(&self) -> Result<Stream, Code> {
        let (send, receive) = mpsc::channel(64);
        let requests = stream::unfold(receive, |mut receive: mpsc::Receiver<ProcessingRequest>| async move {
            Some((receive.recv().await?, receive))
        });
        let mut grpc = self.grpc();
        grpc.ready().await.expect("a connection");
        let path = "/envoy.service.ext_proc.v3.ExternalProcessor/Process".parse().expect("a path");
        let codec = ProstCodec::<ProcessingRequest, ProcessingResponse>::default();
        let answers = grpc.streaming(Request::new(requests), path, codec).await.map_err(|status| status.code())?;
        Ok(Stream { send: Some(send), answers: answers.into_inner() })
    }

    pub(crate) async fn health(&self, name: &str) -> Result<i32, Code> {
        let mut grpc = self.grpc();
        grpc.ready().await.expect("a connection");
        let path = "/grpc.health.v1.Health/Check".parse().expect("a path");
        let codec = ProstCodec::<HealthCheckRequest, HealthCheckResponse>::default();
        let request = Request::new(HealthCheckRequest { service: name.to_owned() });
        grpc.unary(request, path, codec).await.map(|answer| answer.get_ref().status).map_err(|status| status.code())
    }

    pub(crate) async fn watch_health(&self, name: &str) -> Streaming<HealthCheckResponse> {
        let mut grpc = self.grpc();
        grpc.ready().await.expect("a connection");
        let path = "/grpc.health.v1.Health/Watch".parse().expect("a path");
        let codec = ProstCodec::<HealthCheckRequest, HealthCheckResponse>::default();
        let request = Request::new(HealthCheckRequest { service: name.to_owned() });
        grpc.server_streaming(request, path, codec).await.expect("a stream").into_inner()
    }
}

/// One stream of external processing, from Envoy's side.
pub(crate) struct Stream {
    send: Option<mpsc::Sender<ProcessingRequest>>,
    answers: Streaming<ProcessingResponse>,
}

impl Stream {
    pub(crate) async fn send(&self, message: ProcessingRequest) {
        let sent = self.send.as_ref().expect("an open stream").send(message).await;
        assert!(sent.is_ok(), "the picker no longer reads");
    }

    /// Sends unless the picker no longer reads, or has not read enough for a while.
    pub(crate) fn try_send(&self, message: ProcessingRequest) -> bool {
        self.send.as_ref().is_some_and(|send| send.try_send(message).is_ok())
    }

    pub(crate) async fn half_close(&mut self) {
        self.send = None;
    }

    /// The next answer; `None` = the picker ended the stream with OK.
    pub(crate) async fn next(&mut self) -> Result<Option<ProcessingResponse>, Status> {
        tokio::time::timeout(PATIENCE, self.answers.message()).await.expect("an answer, or an end")
    }

    pub(crate) async fn answer(&mut self) -> ResponsePart {
        self.message().await.part.expect("a part")
    }

    pub(crate) async fn message(&mut self) -> ProcessingResponse {
        self.next().await.expect("no error").expect("no end")
    }

    /// The answer to the request: the list, and the body that came back.
    pub(crate) async fn chosen(&mut self) -> String {
        let message = self.message().await;
        let header = destination_header(&message);
        assert_eq!(header, destination_metadata(&message), "header and metadata differ");
        header
    }

    /// The pieces of the request's body, up to the end or up to the answer to the trailers.
    pub(crate) async fn request_body(&mut self) -> (Vec<u8>, usize, bool) {
        let (mut body, mut pieces) = (Vec::new(), 0);
        loop {
            match self.answer().await {
                ResponsePart::RequestBody(answer) => {
                    let piece = piece(answer);
                    assert!(piece.body.len() <= 62_000, "a piece of {} bytes", piece.body.len());
                    body.extend_from_slice(&piece.body);
                    pieces += 1;
                    if piece.end_of_stream {
                        return (body, pieces, false);
                    }
                }
                ResponsePart::RequestTrailers(_) => return (body, pieces, true),
                other => panic!("not a piece of the request: {other:?}"),
            }
        }
    }

    pub(crate) async fn refusal(&mut self) -> Refusal {
        match self.answer().await {
            ResponsePart::ImmediateResponse(answer) => Refusal::of(&answer),
            other => panic!("not a refusal: {other:?}"),
        }
    }

    /// Waits until the picker has ended the stream with OK, and has dropped what belonged to it.
    pub(crate) async fn is_over(&mut self) {
        assert_eq!(self.next().await.expect("no error"), None);
    }

    /// Nothing comes, and the stream stays open.
    pub(crate) async fn is_still(&mut self) {
        let came = tokio::time::timeout(STILLNESS, self.answers.message()).await;
        assert!(came.is_err(), "nothing should come: {came:?}");
    }
}

/// An answer in place of an endpoint's.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: i32,
    pub(crate) code: String,
    pub(crate) kind: String,
    pub(crate) retry_after: Option<String>,
    pub(crate) details: String,
}

impl Refusal {
    pub(crate) fn of(answer: &ImmediateResponse) -> Self {
        let headers = &answer.headers.as_ref().expect("headers").set_headers;
        let header = |name: &str| {
            let found = headers.iter().filter_map(|set| set.header.as_ref()).find(|header| header.key == name);
            found.map(|header| String::from_utf8(header.bytes().to_vec()).expect("text"))
        };
        assert_eq!(header("content-type").as_deref(), Some("application/json"));
        let body: serde_json::Value = serde_json::from_slice(&answer.body).expect("JSON");
        let text = |key: &str| body["error"][key].as_str().expect("text").to_owned();
        assert!(!text("message").is_empty());
        Self {
            status: answer.status.as_ref().expect("a status").code,
            code: text("code"),
            kind: text("type"),
            retry_after: header("retry-after"),
            details: answer.details.clone(),
        }
    }
}

pub(crate) fn piece(answer: CommonAnswer) -> HttpBody {
    let mutation = answer.response.and_then(|response| response.body_mutation);
    mutation.and_then(|mutation| mutation.streamed_response).expect("a streamed piece")
}

pub(crate) fn destination_header(message: &ProcessingResponse) -> String {
    let Some(ResponsePart::RequestHeaders(answer)) = &message.part else { panic!("not headers: {message:?}") };
    let common = answer.response.as_ref().expect("a response");
    let mutation = common.header_mutation.as_ref().expect("a mutation");
    let name = "x-gateway-destination-endpoint";
    assert!(mutation.remove_headers.iter().any(|removed| removed == name), "the caller's own header stays");
    let mut set =
        mutation.set_headers.iter().filter(|set| set.header.as_ref().is_some_and(|header| header.key == name));
    let (only, more) = (set.next().expect("the header"), set.next());
    assert!(more.is_none(), "the header is set twice");
    assert_eq!(only.append_action, HeaderValueOption::OVERWRITE);
    String::from_utf8(only.header.as_ref().expect("a header").bytes().to_vec()).expect("text")
}

pub(crate) fn destination_metadata(message: &ProcessingResponse) -> String {
    let metadata = message.dynamic_metadata.as_ref().expect("metadata");
    let inner = metadata.fields["envoy.lb"].struct_value.as_ref().expect("an object");
    inner.fields["x-gateway-destination-endpoint"].string_value.clone().expect("text")
}

// ---- messages of Envoy ----------------------------------------------------------------------------------------------

pub(crate) fn part(part: RequestPart) -> ProcessingRequest {
    ProcessingRequest { part: Some(part), ..ProcessingRequest::default() }
}

pub(crate) fn header_map(headers: &[(&str, &str)]) -> HeaderMap {
    let value = |(key, value): &(&str, &str)| HeaderValue {
        key: (*key).to_owned(),
        value: Bytes::new(),
        raw_value: Bytes::copy_from_slice(value.as_bytes()),
    };
    HeaderMap { headers: headers.iter().map(value).collect() }
}

pub(crate) fn http_headers(headers: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    HttpHeaders { headers: Some(header_map(headers)), end_of_stream }
}

pub(crate) const CHAT: [(&str, &str); 4] = [
    (":method", "POST"),
    (":path", "/v1/chat/completions?trace=1"),
    ("x-request-id", "request-1"),
    ("x-gateway-destination-endpoint", "10.6.6.6:666"),
];

/// The first message of a stream, as an Envoy in full duplex sends it.
pub(crate) fn opening(headers: &[(&str, &str)], end_of_stream: bool) -> ProcessingRequest {
    opening_in(BodyMode::FullDuplexStreamed, BodyMode::FullDuplexStreamed, headers, end_of_stream)
}

pub(crate) fn opening_in(
    request_body: BodyMode,
    response_body: BodyMode,
    headers: &[(&str, &str)],
    end_of_stream: bool,
) -> ProcessingRequest {
    let modes =
        ProtocolConfiguration { request_body_mode: request_body.number(), response_body_mode: response_body.number() };
    ProcessingRequest {
        protocol_config: Some(modes),
        ..part(RequestPart::RequestHeaders(http_headers(headers, end_of_stream)))
    }
}

pub(crate) fn request_body(body: impl Into<Bytes>, end_of_stream: bool) -> ProcessingRequest {
    part(RequestPart::RequestBody(HttpBody { body: body.into(), end_of_stream }))
}

pub(crate) fn request_trailers() -> ProcessingRequest {
    part(RequestPart::RequestTrailers(HttpTrailers { trailers: Some(header_map(&[("x-check", "1")])) }))
}

pub(crate) fn response_headers(headers: &[(&str, &str)], end_of_stream: bool) -> ProcessingRequest {
    part(RequestPart::ResponseHeaders(http_headers(headers, end_of_stream)))
}

pub(crate) fn response_body(body: impl Into<Bytes>, end_of_stream: bool) -> ProcessingRequest {
    part(RequestPart::ResponseBody(HttpBody { body: body.into(), end_of_stream }))
}

pub(crate) fn response_trailers() -> ProcessingRequest {
    part(RequestPart::ResponseTrailers(HttpTrailers { trailers: None }))
}

pub(crate) fn with_metadata(message: ProcessingRequest, namespace: &str, key: &str, value: Value) -> ProcessingRequest {
    let fields = [(key.to_owned(), value)].into();
    let filter_metadata = [(namespace.to_owned(), Struct { fields })].into();
    ProcessingRequest { metadata_context: Some(Metadata { filter_metadata }), ..message }
}

pub(crate) fn with_attribute(message: ProcessingRequest, key: &str, value: &str) -> ProcessingRequest {
    let fields = [(key.to_owned(), Value::text(value))].into();
    let attributes = [("envoy.filters.http.ext_proc".to_owned(), Struct { fields })].into();
    ProcessingRequest { attributes, ..message }
}
