//! The gRPC services, and the driver of one stream.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::future::{Future, Ready, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use futures_util::stream::{self, Stream, StreamExt};
use hyper::StatusCode;
use hyper::body::Incoming;
use tonic::server::{Grpc, ServerStreamingService, StreamingService, UnaryService};
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use super::answer::add_response_headers;
use super::budget::BodyBudget;
use super::chooser::{Choice, Chooser, Lease};
use super::exchange::{Action, Exchange, ExchangeLimits, Question, crowded, headers_too_large};
use super::health::Health;
use super::messages::{HealthCheckRequest, HealthCheckResponse, ProcessingRequest, ProcessingResponse, ResponsePart};
use super::observers::{Observer, Observers};
use super::unread::{CountedBody, CountedCodec, Unread};
use crate::api::ApiError;
use crate::limits::{
    EPP_MESSAGE_OVERHEAD_BYTES_MAX, EPP_OPENING_MIN, EPP_REST_MIN, EPP_STREAMS_MAX, HEADER_NAME_BYTES_MAX,
    STREAM_USUAL_BYTES,
};
use crate::memory::{Memory, MemoryPart, memory_short};

const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";
const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";
const HEALTH_WATCH: &str = "/grpc.health.v1.Health/Watch";

type Answers<M> = Pin<Box<dyn Stream<Item = Result<M, Status>> + Send>>;
type Deciding<L> = Pin<Box<dyn Future<Output = Result<Choice<L>, ApiError>> + Send>>;

/// What the picker counts. Each only grows, except `streams_open`.
#[derive(Debug, Default)]
pub struct EppCounters {
    /// Streams of Envoy that are open.
    pub streams_open: AtomicUsize,
    /// Requests that asked for an endpoint.
    pub asked: AtomicU64,
    /// Requests that got one.
    pub chosen: AtomicU64,
    /// Requests that got an error.
    pub refused: AtomicU64,
    /// Those of them that got it because memory was short.
    pub memory_short: AtomicU64,
    /// Requests that needed no decision any more before there was one.
    pub abandoned: AtomicU64,
    /// Responses that ended whole.
    pub completed: AtomicU64,
    /// Requests with an endpoint that ended before their response did: the caller left, or the engine died.
    pub cut: AtomicU64,
    /// Requests whose end a stream that observes told without saying whether the response was whole.
    pub observed: AtomicU64,
    /// Streams that ended with an error of their messages.
    pub broken: AtomicU64,
}

impl EppCounters {
    fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// The services. Clones share everything.
pub struct Services<C: Chooser>(Arc<Shared<C>>);

struct Shared<C: Chooser> {
    chooser: C,
    health: Health,
    limits: ExchangeLimits,
    budget: BodyBudget,
    observers: Arc<Observers<C::Lease>>,
    counters: Arc<EppCounters>,
    memory: Arc<Memory>,
    streams_max: usize,
}

impl<C: Chooser> Clone for Services<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<C: Chooser> fmt::Debug for Services<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Services").field("limits", &self.0.limits).finish_non_exhaustive()
    }
}

impl<C: Chooser> Services<C> {
    /// Services that choose by `chooser`.
    #[must_use]
    pub fn new(chooser: C, health: Health, limits: ExchangeLimits) -> Self {
        Self::within(chooser, health, limits, &Arc::default())
    }

    /// The same within a memory budget.
    #[must_use]
    pub fn within(chooser: C, health: Health, limits: ExchangeLimits, memory: &Arc<Memory>) -> Self {
        let bodies_bytes_max = limits.bodies_bytes_max.min(memory.bodies_bytes_max()).max(limits.body_bytes_max);
        let (budget, counters) = (BodyBudget::new(bodies_bytes_max), Arc::<EppCounters>::default());
        let (bodies, streams) = (budget.clone(), Arc::clone(&counters));
        memory.watch(MemoryPart::Bodies, move || (bodies_bytes_max - bodies.left()) as u64);
        memory.watch(MemoryPart::Streams, move || {
            streams.streams_open.load(Ordering::Relaxed) as u64 * STREAM_USUAL_BYTES
        });
        Self(Arc::new(Shared {
            chooser,
            health,
            limits,
            budget,
            observers: Arc::new(Observers::new()),
            counters,
            streams_max: EPP_STREAMS_MAX.min(memory.streams_max()),
            memory: Arc::clone(memory),
        }))
    }

    /// What is counted.
    #[must_use]
    pub fn counters(&self) -> Arc<EppCounters> {
        Arc::clone(&self.0.counters)
    }

    /// Answers one gRPC call.
    ///
    /// # Errors
    /// None: every error is a gRPC status.
    pub async fn call(
        self,
        request: hyper::Request<Incoming>,
    ) -> Result<hyper::Response<tonic::body::Body>, Infallible> {
        Ok(match request.uri().path() {
            PROCESS if self.0.counters.streams_open.load(Ordering::Relaxed) >= 2 * self.0.streams_max => {
                Status::resource_exhausted("twice as many streams are open as may be; those beyond get an error each")
                    .into_http()
            }
            PROCESS => {
                let message_bytes_max = self.0.limits.body_bytes_max.saturating_add(EPP_MESSAGE_OVERHEAD_BYTES_MAX);
                let unread = Unread::new(&self.0.budget);
                let codec = CountedCodec::new(unread.clone());
                let request = request.map(|body| CountedBody { body, unread: unread.clone() });
                let mut grpc = Grpc::new(codec).max_decoding_message_size(message_bytes_max);
                grpc.streaming(Process { shared: self.0, unread }, request).await
            }
            HEALTH_CHECK => Grpc::new(ProstCodec::default()).unary(Check(self.0.health.clone()), request).await,
            HEALTH_WATCH => {
                Grpc::new(ProstCodec::default()).server_streaming(Watch(self.0.health.clone()), request).await
            }
            _ => Status::unimplemented("this picker serves ext_proc and gRPC health only").into_http(),
        })
    }
}

struct Process<C: Chooser> {
    shared: Arc<Shared<C>>,
    unread: Unread,
}

impl<C: Chooser> StreamingService<ProcessingRequest> for Process<C> {
    type Response = ProcessingResponse;
    type ResponseStream = Answers<ProcessingResponse>;
    type Future = Ready<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<Streaming<ProcessingRequest>>) -> Self::Future {
        let driver = Driver::new(Arc::clone(&self.shared), request.into_inner(), self.unread.clone());
        let answers = stream::unfold(driver, |mut driver| async move {
            let answer = driver.next().await?;
            Some((answer, driver))
        });
        ready(Ok(Response::new(answers.boxed())))
    }
}

struct Check(Health);

impl UnaryService<HealthCheckRequest> for Check {
    type Response = HealthCheckResponse;
    type Future = Ready<Result<Response<HealthCheckResponse>, Status>>;

    fn call(&mut self, request: Request<HealthCheckRequest>) -> Self::Future {
        ready(self.0.check(&request.get_ref().service).map(Response::new))
    }
}

struct Watch(Health);

impl ServerStreamingService<HealthCheckRequest> for Watch {
    type Response = HealthCheckResponse;
    type ResponseStream = Answers<HealthCheckResponse>;
    type Future = Ready<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<HealthCheckRequest>) -> Self::Future {
        ready(self.0.watch(request.into_inner().service).map(|statuses| Response::new(statuses.boxed())))
    }
}

/// One stream of Envoy. Everything that belongs to it, a running decision too, is dropped with it.
struct Driver<C: Chooser> {
    shared: Arc<Shared<C>>,
    requests: Streaming<ProcessingRequest>,
    /// What it holds of messages.
    unread: Unread,
    /// When the last message came.
    heard: Instant,
    exchange: Exchange,
    deciding: Option<Deciding<C::Lease>>,
    lease: Option<C::Lease>,
    /// `x-request-id`, by which a stream that observes finds this request.
    request_id: Option<String>,
    observer: Option<Observer<C::Lease>>,
    outgoing: VecDeque<ProcessingResponse>,
    actions: Vec<Action>,
    end: End,
    /// Why the stream's request is refused, as it was when the stream began.
    refusal: Option<Refusal>,
}

/// Why a stream's request is refused before it is looked at.
#[derive(Clone, Copy, Debug)]
enum Refusal {
    /// There are as many streams as may be.
    Streams,
    /// Memory is short.
    Memory,
}

/// How far the stream's end has come.
#[derive(Debug)]
enum End {
    /// Envoy may send more.
    Open,
    /// An error is to be sent after what is queued.
    Failing(Status),
    /// Nothing more is sent.
    Over,
}

impl<C: Chooser> Driver<C> {
    fn new(shared: Arc<Shared<C>>, requests: Streaming<ProcessingRequest>, unread: Unread) -> Self {
        let is_one_too_many = shared.counters.streams_open.fetch_add(1, Ordering::Relaxed) >= shared.streams_max;
        let refusal = match shared.memory.refuses_requests() {
            true => Some(Refusal::Memory),
            false => is_one_too_many.then_some(Refusal::Streams),
        };
        Self {
            exchange: Exchange::new(shared.limits, &shared.budget),
            shared,
            requests,
            unread,
            heard: Instant::now(),
            deciding: None,
            lease: None,
            request_id: None,
            observer: None,
            outgoing: VecDeque::new(),
            actions: Vec::new(),
            end: End::Open,
            refusal,
        }
    }

    /// The next message to Envoy; `None` ends the stream with OK, which happens only after Envoy has ended it.
    ///
    /// Nothing is read while messages wait to be sent, so that a slow reader slows its sender.
    async fn next(&mut self) -> Option<Result<ProcessingResponse, Status>> {
        loop {
            if let Some(answer) = self.outgoing.pop_front() {
                return Some(Ok(answer));
            }
            match std::mem::replace(&mut self.end, End::Over) {
                End::Open => self.end = End::Open,
                End::Failing(status) => return Some(Err(status)),
                End::Over => return None,
            }
            self.exchange.all_sent();
            self.unread.settle();
            let deadline = self.exchange.deadline().or_else(|| self.rest_deadline());
            tokio::select! {
                biased;
                message = self.requests.message() => match message {
                    Ok(Some(message)) => self.receive(message),
                    Ok(None) => self.half_closed(),
                    Err(status) => self.broken(status),
                },
                choice = decision(&mut self.deciding), if self.deciding.is_some() => self.decided(choice),
                () = sleep_until(deadline), if deadline.is_some() => self.time_is_up(),
            }
            self.act();
        }
    }

    /// When a stream on which nothing is under way has been open for too long. An Envoy says something on each stream,
    /// and ends it after the last answer.
    fn rest_deadline(&self) -> Option<Instant> {
        let body_timeout = self.shared.limits.body_timeout;
        let least = if self.exchange.is_opening() { EPP_OPENING_MIN } else { EPP_REST_MIN };
        self.exchange.is_at_rest().then(|| self.heard + body_timeout.max(least))
    }

    fn time_is_up(&mut self) {
        match self.exchange.is_at_rest() {
            true => self.end = End::Failing(Status::deadline_exceeded("nothing more came on this stream")),
            false => self.exchange.time_is_up(Instant::now(), &mut self.actions),
        }
    }

    fn receive(&mut self, message: ProcessingRequest) {
        self.heard = Instant::now();
        match self.refusal.filter(|_| !message.observability_mode) {
            None => {}
            Some(Refusal::Streams) => {
                let text = "the endpoint picker serves as many requests at once as it can; try again";
                let status = StatusCode::SERVICE_UNAVAILABLE;
                let error = ApiError::gateway(status, "too_many_requests_at_once", text).retry_after(1);
                return self.exchange.refuse(&error, &mut self.actions);
            }
            Some(Refusal::Memory) => {
                if self.exchange.is_undecided() {
                    EppCounters::count(&self.shared.counters.memory_short);
                }
                return self.exchange.refuse(&memory_short(), &mut self.actions);
            }
        }
        self.exchange.receive(message, Instant::now(), &mut self.actions);
    }

    fn decided(&mut self, choice: Result<Choice<C::Lease>, ApiError>) {
        self.deciding = None;
        let decision = choice.map(|choice| {
            if !choice.decision.endpoints.is_empty() {
                EppCounters::count(&self.shared.counters.chosen);
                self.lease = Some(choice.lease);
            }
            choice.decision
        });
        self.exchange.decided(decision, &mut self.actions);
    }

    /// Envoy has nothing more to send. Before a decision that means that the caller left; an error keeps an Envoy that
    /// still waits from sending the request on without its body.
    fn half_closed(&mut self) {
        self.end = match self.exchange.is_undecided() && self.observer.is_none() {
            true => End::Failing(Status::cancelled("the request ended before it got an endpoint")),
            false => End::Over,
        };
    }

    /// The stream failed: a reset, a lost connection, or a message that cannot be read.
    fn broken(&mut self, status: Status) {
        let error = match status.code() {
            // tonic's status for a message above max_decoding_message_size
            Code::OutOfRange => Some(ApiError::caller(
                StatusCode::PAYLOAD_TOO_LARGE,
                "body_too_large",
                format!(
                    "the body is larger than {} bytes, the most that this gateway takes",
                    self.shared.limits.body_bytes_max
                ),
            )),
            Code::ResourceExhausted => Some(crowded()),
            Code::InvalidArgument => Some(headers_too_large()),
            Code::Internal => Some(ApiError::gateway(
                StatusCode::INTERNAL_SERVER_ERROR,
                "ext_proc_message",
                "the endpoint picker could not read a message of Envoy; its log says why",
            )),
            _ => None, // Envoy ended the stream: nobody reads an answer
        };
        if let Some(error) = error {
            EppCounters::count(&self.shared.counters.broken);
            tracing::warn!(%status, "could not read a message of Envoy");
            self.exchange.refuse(&error, &mut self.actions);
        }
        self.end = End::Failing(status);
    }

    /// Does what the exchange asked for.
    fn act(&mut self) {
        let mut actions = std::mem::take(&mut self.actions);
        for action in actions.drain(..) {
            match action {
                Action::Send(answer) => self.send(answer),
                Action::Choose(question) => self.choose(*question),
                Action::Abandon => {
                    EppCounters::count(&self.shared.counters.abandoned);
                    self.deciding = None;
                }
                Action::Observe(id) => self.observer = self.shared.observers.register(id),
                Action::ResponseStarted(start) => self.with_lease(|lease| lease.answered(&start)),
                Action::ResponseBody(piece) => self.with_lease(|lease| lease.output(&piece)),
                Action::ResponseEnded => self.response_ended(),
            }
        }
        self.actions = actions; // keeps its capacity
    }

    fn send(&mut self, mut answer: ProcessingResponse) {
        match (&answer.part, &self.lease) {
            (Some(ResponsePart::ImmediateResponse(_)), _) => EppCounters::count(&self.shared.counters.refused),
            (Some(ResponsePart::ResponseHeaders(_)), Some(lease)) => {
                add_response_headers(&mut answer, &lease.response_headers());
            }
            _ => {}
        }
        self.outgoing.push_back(answer);
    }

    fn choose(&mut self, question: Question) {
        EppCounters::count(&self.shared.counters.asked);
        let id = question.headers.text("x-request-id").filter(|id| id.len() <= HEADER_NAME_BYTES_MAX);
        self.request_id = id.map(str::to_owned);
        let shared = Arc::clone(&self.shared);
        self.deciding = Some(Box::pin(async move { shared.chooser.choose(question).await }));
    }

    fn with_lease(&mut self, act: impl FnOnce(&mut C::Lease)) {
        if let Some(lease) = &mut self.lease {
            act(lease);
        } else if let Some(observer) = &self.observer {
            observer.with(act);
        }
    }

    fn response_ended(&mut self) {
        let lease = self.lease.take().or_else(|| self.observer.take().and_then(Observer::end));
        if let Some(lease) = lease {
            EppCounters::count(&self.shared.counters.completed);
            lease.complete();
        }
    }
}

impl<C: Chooser> Drop for Driver<C> {
    fn drop(&mut self) {
        self.shared.counters.streams_open.fetch_sub(1, Ordering::Relaxed);
        let lease = match (self.lease.take(), &self.request_id) {
            (Some(lease), Some(id)) => self.shared.observers.hand_over(id, lease).err(),
            (lease, _) => lease,
        };
        let observed = self.observer.take().and_then(Observer::end);
        if lease.is_some() {
            EppCounters::count(&self.shared.counters.cut);
        }
        if observed.is_some() {
            EppCounters::count(&self.shared.counters.observed);
        }
    }
}

async fn decision<L>(deciding: &mut Option<Deciding<L>>) -> Result<Choice<L>, ApiError> {
    match deciding {
        Some(deciding) => deciding.await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}
