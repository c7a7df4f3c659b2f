//! One request: who sends it, what it asks for, and who answers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};
use kvrouted::ids::Worker;
use tokio::sync::Semaphore;

use super::attempt::{Attempts, Begun, CUT_OFF, Outcome};
use super::body::{BodyBudget, HeldBody, ReplyBody, read_body};
use super::choose::{Booking, Candidate, Choice, Choose, Observer};
use super::disaggregate::{OnTwo, PrefillUsage};
use super::error_reply;
use super::headers::{self, Hints};
use super::keys::{CallerKeys, KeyUse};
use super::listener::{ConnectionState, Handle};
use super::prepared::Prepared;
use super::relay::{Held, Relay};
use crate::api::{
    ApiError, ApiPath, CallKind, Edits, SseFilter, UsageReader, decoded, edit_body, read_request,
    refuse_transfer_fields,
};
use crate::config::{Bounds, Config, Deadlines, Forward, ReportMode, Retry};
use crate::engines::{Engine, EngineSet, ServedModel};
use crate::limits::{CONNECTION_USUAL_BYTES, PICK_OPEN_BYTES, REQUEST_USUAL_BYTES, ROUTING_ROUNDS_MAX};
use crate::memory::{Memory, MemoryPart, memory_short};
use crate::metrics::{Counted, Metrics, ReplyEnd};

/// The part of the configuration that requests need.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Bounds.
    pub bounds: Bounds,
    /// Deadlines.
    pub deadlines: Deadlines,
    /// Retries.
    pub retry: Retry,
    /// What becomes of requests and replies.
    pub forward: Forward,
    /// The priority of each objective.
    pub objectives: BTreeMap<String, i32>,
    /// The memory of the process.
    pub memory: Arc<Memory>,
}

impl Settings {
    /// Those of a configuration.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        Self {
            bounds: config.bounds,
            deadlines: config.deadlines,
            retry: config.retry,
            forward: config.forward.clone(),
            objectives: config.objectives.clone(),
            memory: Arc::default(),
        }
    }
}

/// The reverse proxy.
pub struct Proxy {
    pub(super) settings: Settings,
    pub(super) engines: Arc<EngineSet>,
    pub(super) choose: Arc<dyn Choose>,
    pub(super) metrics: Arc<Metrics>,
    keys: Option<Arc<CallerKeys>>,
    budget: BodyBudget,
    places: Arc<Semaphore>,
    /// Spreads requests without a prompt over engines that are equally busy.
    round_robin: AtomicUsize,
}

/// What every step of one request needs.
pub(super) struct Call {
    pub(super) path: ApiPath,
    pub(super) id: HeaderValue,
    pub(super) started: Instant,
    pub(super) connection: Arc<ConnectionState>,
}

impl Call {
    /// The request id as text. It is visible ASCII.
    pub(super) fn id_text(&self) -> &str {
        self.id.to_str().unwrap_or_default()
    }
}

/// A request that the proxy has not answered yet. If it is dropped first, its caller hung up.
struct Unanswered<'a> {
    metrics: &'a Metrics,
    path: ApiPath,
    started: Instant,
    is_answered: bool,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if !self.is_answered {
            self.metrics.ended(self.path, ReplyEnd::HungUp, self.started.elapsed());
        }
    }
}

impl Handle for Proxy {
    async fn handle(
        self: Arc<Self>,
        request: Request<Incoming>,
        connection: Arc<ConnectionState>,
    ) -> Response<ReplyBody> {
        let path = ApiPath::of(request.uri().path());
        let id = headers::request_id(request.headers());
        let call = Call { path, id, started: Instant::now(), connection };
        let mut unanswered = Unanswered { metrics: &self.metrics, path, started: call.started, is_answered: false };
        let answer = self.answer(request, &call).await;
        unanswered.is_answered = true;
        let response = answer.unwrap_or_else(|error| {
            self.metrics.refused(error.code);
            tracing::debug!(request_id = call.id_text(), path = path.label(), code = error.code,
                status = error.status.as_u16(), fault = ?error.fault, "a request got an error");
            error_reply::error(&error, Some(&call.id))
        });
        self.metrics.answered(path, response.status().as_u16());
        response
    }
}

impl Proxy {
    /// A proxy.
    #[must_use]
    pub fn new(
        settings: Settings,
        engines: Arc<EngineSet>,
        choose: Arc<dyn Choose>,
        keys: Option<Arc<CallerKeys>>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let budget = BodyBudget::of(settings.bounds.bodies_bytes_max);
        let places = Arc::new(Semaphore::new(settings.bounds.requests_max));
        let (memory, bodies, counted) = (&settings.memory, budget.clone(), Arc::clone(&metrics));
        memory.watch(MemoryPart::Bodies, move || bodies.held());
        memory.watch(MemoryPart::Requests, move || counted.in_flight.get().unsigned_abs() * REQUEST_USUAL_BYTES);
        let counted = Arc::clone(&metrics);
        memory
            .watch(MemoryPart::Connections, move || counted.connections.get().unsigned_abs() * CONNECTION_USUAL_BYTES);
        let counted = Arc::clone(&metrics);
        memory.watch(MemoryPart::Picks, move || counted.picks_open.get().unsigned_abs() * PICK_OPEN_BYTES);
        Self { settings, engines, choose, metrics, keys, budget, places, round_robin: AtomicUsize::new(0) }
    }

    async fn answer(&self, request: Request<Incoming>, call: &Call) -> Result<Response<ReplyBody>, ApiError> {
        let header_bytes_max = self.settings.bounds.header_bytes_max;
        if headers::size(request.uri(), request.headers()) > header_bytes_max {
            let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
            let message = format!("the headers have more than {header_bytes_max} bytes, which is the most");
            return Err(ApiError::caller(status, "headers_too_large", message));
        }
        let key = match &self.keys {
            Some(keys) => Some(keys.admit(request.headers(), Instant::now())?),
            None => None,
        };
        self.refuse_if_memory_is_short()?;
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| {
            let message = "the gateway has as many requests under way as it may (bounds.requests_max); try again";
            ApiError::gateway(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message).retry_after(1)
        })?;
        let held = Held { _in_flight: Counted::of(&self.metrics.in_flight), _key: key, _place: place };
        if headers::wants_upgrade(request.headers()) || request.method() == Method::CONNECT {
            let message = "the gateway speaks HTTP only; connect to an engine for other protocols";
            return Err(ApiError::caller(StatusCode::NOT_IMPLEMENTED, "upgrade_not_supported", message));
        }
        match call.path.kind() {
            CallKind::Models => self.models(request.method()),
            CallKind::Generate => {
                require(request.method(), &Method::POST)?;
                self.generate(request, call, held).await
            }
            CallKind::Stateless => {
                require(request.method(), &Method::POST)?;
                self.stateless(request, call, held).await
            }
            CallKind::Unknown if self.passes(request.uri()) => self.stateless(request, call, held).await,
            CallKind::Unknown => {
                let message = format!("{} is not served here; see /v1/models for the models", request.uri().path());
                Err(ApiError::caller(StatusCode::NOT_FOUND, "unknown_path", message))
            }
        }
    }

    /// Refuses a new request while memory is short.
    pub(super) fn refuse_if_memory_is_short(&self) -> Result<(), ApiError> {
        if self.settings.memory.refuses_requests() { Err(memory_short()) } else { Ok(()) }
    }

    fn models(&self, method: &Method) -> Result<Response<ReplyBody>, ApiError> {
        if method != Method::HEAD {
            require(method, &Method::GET)?;
        }
        Ok(error_reply::json(StatusCode::OK, self.engines.merged_models_json()))
    }

    /// Whether a path that the gateway does not know goes to an engine.
    fn passes(&self, uri: &Uri) -> bool {
        let Forward { passes_unknown_paths, passed_prefixes, .. } = &self.settings.forward;
        let path = decoded(uri.path());
        // An engine may resolve dots, so that a path would leave its prefix.
        let has_dots = path.split('/').any(|part| matches!(part, "." | ".."));
        *passes_unknown_paths || !has_dots && passed_prefixes.iter().any(|prefix| path.starts_with(prefix.as_str()))
    }

    pub(super) async fn read(&self, body: Incoming) -> Result<HeldBody, ApiError> {
        let Settings { bounds, deadlines, .. } = &self.settings;
        read_body(body, bounds.body_bytes_max, deadlines.body, &self.budget).await
    }

    /// What routing needs of a request with a prompt.
    pub(super) fn prepare(
        &self,
        path: ApiPath,
        headers: &HeaderMap,
        body: &[u8],
        key: Option<&KeyUse>,
    ) -> Result<Prepared, ApiError> {
        let facts = read_request(path, body)?;
        // Elsewhere they go through: engines without roles know what to do with them, or another proxy sent them.
        if self.engines.has_roles() {
            refuse_transfer_fields(body)?;
        }
        if facts.has_report_mode && self.settings.forward.report_mode == ReportMode::Refuse {
            let message = "`kv_cache_report_mode` is not allowed here; remove it";
            return Err(ApiError::caller(StatusCode::BAD_REQUEST, "report_mode_refused", message));
        }
        let model = self.engines.model(facts.model.as_deref())?;
        let mut hints = Hints::read(headers, &self.settings.objectives)?;
        if let Some(KeyUse { key }) = key {
            // Nobody speaks for another tenant.
            hints.tenant = Some(key.tenant.clone());
            hints.priority = key.priority_max.map_or(hints.priority, |most| hints.priority.min(most));
        }
        Ok(Prepared { facts, model, hints, booking_id: headers::new_id() })
    }

    /// A request with a prompt: routed, booked, sent.
    async fn generate(
        &self,
        request: Request<Incoming>,
        call: &Call,
        held: Held,
    ) -> Result<Response<ReplyBody>, ApiError> {
        let (parts, body) = request.into_parts();
        let body = self.read(body).await?;
        let prepared = self.prepare(call.path, &parts.headers, &body.bytes, held._key.as_ref())?;
        let Prepared { facts, model, .. } = &prepared;
        let deadlines = &self.settings.deadlines;
        let deadline = call.started + deadlines.total;
        let mut attempts = Attempts {
            method: parts.method,
            uri: parts.uri,
            headers: headers::for_engine(parts.headers, &call.id, self.keys.is_some()),
            first_byte: if facts.stream { deadline.min(call.started + deadlines.first_byte) } else { deadline },
            can_repeat: body.bytes.len() <= self.settings.retry.body_bytes_max,
            left: self.settings.retry.attempts_max,
            tried: Vec::new(),
            failure: None,
            failed_why: None,
        };
        let on_two = self.on_two_engines(call, &prepared, &body.bytes, &mut attempts, deadline, held).await?;
        let held = match on_two {
            OnTwo::Answered(response) => return Ok(response),
            OnTwo::Whole(held) => held,
        };
        for _ in 0..ROUTING_ROUNDS_MAX {
            let asked = prepared.asked(call.path, &body.bytes, &attempts.tried, deadline);
            let choice = match self.choose.choose(asked).await {
                Ok(choice) => choice,
                // What an engine said is more to the point than that there is no other one.
                Err(_) if attempts.failure.is_some() => break,
                Err(error) => return Err(error),
            };
            self.metrics.decided(choice.decided_by, choice.token_source);
            let edits = self.edits(&choice);
            let edited = edit_body(call.path, &body.bytes, facts, &edits)?;
            if let Some((candidate, begun)) =
                self.first_that_answers(&choice.candidates, &mut attempts, &edited.body, &model.base).await?
            {
                let Choice { candidates, mut booking, observer, .. } = choice;
                if let Some(booking) = booking.as_mut().filter(|_| candidates[0].worker != candidate.worker) {
                    booking.served(candidate.worker);
                }
                let filters_usage = edited.has_extra_usage;
                let reply = Reply { candidate, begun, booking, observer, filters_usage, prefill: None };
                return Ok(self.relay(call, reply, held, deadline));
            }
            if attempts.left == 0 || !attempts.can_repeat {
                break;
            }
        }
        self.give_up(call, attempts, held, deadline)
    }

    pub(super) fn edits<'a>(&self, choice: &'a Choice) -> Edits<'a> {
        let forward = &self.settings.forward;
        Edits {
            ask_usage: forward.asks_usage,
            strip_report_mode: forward.report_mode == ReportMode::Strip,
            token_ids: choice.token_ids.as_deref().filter(|_| forward.sends_token_ids),
        }
    }

    /// Sends the request to one candidate after another until one answers.
    pub(super) async fn first_that_answers(
        &self,
        candidates: &[Candidate],
        attempts: &mut Attempts,
        body: &Bytes,
        model: &str,
    ) -> Result<Option<(Candidate, Begun)>, ApiError> {
        for candidate in candidates {
            let worker = candidate.worker;
            if attempts.left == 0 {
                return Ok(None);
            }
            if attempts.tried.contains(&worker.id.0) {
                continue;
            }
            let Some(engine) = self.engines.get(worker.id.0) else { continue };
            attempts.tried.push(worker.id.0);
            if !engine.is_usable(Instant::now()) {
                continue;
            }
            if let Some(why) = attempts.failed_why {
                self.metrics.retried(why);
            }
            match attempts.send(&engine, Some(worker.rank.0), body).await {
                Outcome::Begun(begun) => return Ok(Some((*candidate, begun))),
                Outcome::Failed(why) => {
                    self.report(worker, model, why);
                    if !attempts.can_repeat {
                        return Ok(None);
                    }
                    attempts.failed_why = Some(why);
                }
                Outcome::TimedOut(error) => {
                    self.choose.report_failure(worker, model, "timeout");
                    return Err(error);
                }
            }
        }
        Ok(None)
    }

    /// Reports a failure to the router, unless it is the request's own.
    pub(super) fn report(&self, worker: Worker, model: &str, why: &str) {
        if why != CUT_OFF {
            self.choose.report_failure(worker, model, why);
        }
    }

    /// A request without a prompt: to the least busy engine that serves its model, or to any.
    async fn stateless(
        &self,
        request: Request<Incoming>,
        call: &Call,
        held: Held,
    ) -> Result<Response<ReplyBody>, ApiError> {
        let (parts, body) = request.into_parts();
        let body = self.read(body).await?;
        let model = match call.path.kind() {
            CallKind::Stateless => {
                let facts = read_request(call.path, &body.bytes)?;
                Some(self.engines.model(facts.model.as_deref())?)
            }
            CallKind::Generate | CallKind::Models | CallKind::Unknown => None,
        };
        let deadline = call.started + self.settings.deadlines.total;
        // Only these methods ask for no change, so that a request whose connection broke may be sent again. The known
        // paths without a prompt change nothing either.
        let is_safe = model.is_some() || matches!(parts.method, Method::GET | Method::HEAD | Method::OPTIONS);
        let mut attempts = Attempts {
            method: parts.method,
            uri: parts.uri,
            headers: headers::for_engine(parts.headers, &call.id, self.keys.is_some()),
            first_byte: deadline,
            can_repeat: is_safe && body.bytes.len() <= self.settings.retry.body_bytes_max,
            left: self.settings.retry.attempts_max,
            tried: Vec::new(),
            failure: None,
            failed_why: None,
        };
        let candidates = self.any_engine(model.as_ref());
        if candidates.is_empty() {
            let message = "no engine that serves this is healthy; try again, and see the gateway's /findings";
            let error = ApiError::engine(StatusCode::SERVICE_UNAVAILABLE, "no_engine", message);
            return Err(error.retry_after(1));
        }
        let name = model.as_ref().map_or("", |model| &model.base);
        match self.first_that_answers(&candidates, &mut attempts, &body.bytes, name).await? {
            Some((candidate, begun)) => {
                let reply =
                    Reply { candidate, begun, booking: None, observer: None, filters_usage: false, prefill: None };
                Ok(self.relay(call, reply, held, deadline))
            }
            None => self.give_up(call, attempts, held, deadline),
        }
    }

    /// Usable engines for a request without a prompt, the least busy first.
    pub(super) fn any_engine(&self, model: Option<&ServedModel>) -> Vec<Candidate> {
        let now = Instant::now();
        let mut engines: Vec<Arc<Engine>> = match model {
            Some(model) => self.engines.serving(model).collect(),
            None => self.engines.iter().collect(),
        };
        engines.retain(|engine| engine.takes_requests() && engine.is_usable(now));
        if !engines.is_empty() {
            let first = self.round_robin.fetch_add(1, Ordering::Relaxed) % engines.len();
            engines.rotate_left(first);
        }
        // The sort is stable: equally busy engines stay in turn.
        engines.sort_by_key(|engine| engine.inflight());
        let candidate =
            |engine: Arc<Engine>| Candidate { worker: Worker::new(engine.worker(), 0), overlap_tokens: None };
        engines.into_iter().map(candidate).collect()
    }

    /// The reply when no engine answered: an engine's own 503, or the last error.
    pub(super) fn give_up(
        &self,
        call: &Call,
        attempts: Attempts,
        held: Held,
        deadline: Instant,
    ) -> Result<Response<ReplyBody>, ApiError> {
        match attempts.failure {
            Some(Ok((worker, begun))) => {
                let candidate = Candidate { worker: Worker::new(worker, 0), overlap_tokens: None };
                let reply =
                    Reply { candidate, begun, booking: None, observer: None, filters_usage: false, prefill: None };
                Ok(self.relay(call, reply, held, deadline))
            }
            Some(Err(error)) => Err(error),
            None => {
                let message = "every engine that could run this backs off after a failure; try again";
                let error = ApiError::engine(StatusCode::SERVICE_UNAVAILABLE, "no_engine", message);
                Err(error.retry_after(1))
            }
        }
    }

    pub(super) fn relay(&self, call: &Call, reply: Reply, held: Held, deadline: Instant) -> Response<ReplyBody> {
        let Reply { candidate, begun, booking, observer, filters_usage, prefill } = reply;
        let Begun { mut parts, first, rest, guard } = begun;
        let is_plain = parts.headers.get(CONTENT_ENCODING).is_none_or(|value| value == "identity");
        let kind = parts.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
        let is_event_stream = is_plain && kind.starts_with(b"text/event-stream");
        let is_generated = call.path.kind() == CallKind::Generate && parts.status.is_success() && is_plain;
        let filter = (filters_usage && is_generated && is_event_stream).then(SseFilter::new);
        headers::for_caller(&mut parts.headers, &call.id, filter.is_some());
        if self.settings.forward.tells_worker && call.path.kind() == CallKind::Generate {
            tell_worker(&mut parts.headers, &candidate, prefill.as_ref().map(|(worker, _)| *worker));
        }
        parts.version = hyper::Version::HTTP_11;
        let relay = Relay {
            path: call.path,
            request_id: call.id_text().to_owned(),
            status: parts.status.as_u16(),
            started: call.started,
            deadline,
            deadlines: self.settings.deadlines,
            worker: candidate.worker,
            is_event_stream,
            reader: is_generated.then(|| UsageReader::new(call.path, is_event_stream)),
            filter,
            booking,
            observer,
            metrics: Arc::clone(&self.metrics),
            connection: Arc::clone(&call.connection),
            held,
            engine: guard,
            prefill_usage: prefill.map(|(_, usage)| usage),
        };
        Response::from_parts(parts, relay.begin(first, rest))
    }
}

/// A reply that has begun, and what belongs to it.
pub(super) struct Reply {
    pub(super) candidate: Candidate,
    pub(super) begun: Begun,
    pub(super) booking: Option<Box<dyn Booking>>,
    pub(super) observer: Option<Observer>,
    pub(super) filters_usage: bool,
    /// The worker that computed the prompt, if another one generates.
    pub(super) prefill: Option<(Worker, PrefillUsage)>,
}

fn tell_worker(headers: &mut HeaderMap, candidate: &Candidate, prefill: Option<Worker>) {
    if let Some(Ok(value)) = prefill.map(|worker| HeaderValue::from_str(&worker.to_string())) {
        headers.insert(headers::PREFILL_WORKER, value);
    }
    if let Ok(value) = HeaderValue::from_str(&candidate.worker.to_string()) {
        headers.insert(headers::WORKER, value);
    }
    if let Some(tokens) = candidate.overlap_tokens {
        headers.insert(headers::OVERLAP_TOKENS, HeaderValue::from(tokens));
    }
}

fn require(method: &Method, wanted: &Method) -> Result<(), ApiError> {
    if method == wanted {
        return Ok(());
    }
    let message = format!("this path takes {wanted} only");
    Err(ApiError::caller(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message))
}
