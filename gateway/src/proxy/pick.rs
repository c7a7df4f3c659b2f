//! The pick port: other proxies send a request's body and get the engines to send it to, best first.
//!
//! * `POST /pick`, body = the request's body, `x-kvrouted-path` = its path (`/v1/chat/completions` if absent),
//!   `x-request-id` = its id. The answer is `{"id", "first", "endpoints": [...], "workers": [...]}`. Headers say the
//!   same for proxies that cannot read JSON: `x-request-id`, `x-first`, and, as lists of one length, `x-endpoints`,
//!   `x-workers` and `x-ranks`. A rank is what `x-data-parallel-rank` must say to the engine; `-` = leave it out.
//! * `POST /prefilled` with `{"id"}` when the first byte comes; `"worker"` says which worker runs it, if it is not the
//!   first.
//! * `POST /end` with `{"id"}` when the reply has ended; `"usage"` may say what the reply said.
//! * Both take `"failed"`, the endpoints of engines that could not take the request: they back off.
//! * Or the access log says so, by lines that [`super::log_line`] describes.
//!
//! Every answer has `x-request-id`, errors too: a proxy can tell them from its own.
//!
//! The port is for proxies of the operator, and asks for no caller key.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use kvrouted::ids::Worker;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::watch;

use super::attempt::has_ranks;
use super::body::{BodyBudget, ReplyBody, read_body};
use super::choose::{Candidate, Choice};
use super::handle::Proxy;
use super::listener::{ConnectionState, Handle};
use super::log_line::LogLine;
use super::open_picks::{OpenPick, OpenPicks};
use super::{error_reply, headers};
use crate::api::{ApiError, ApiPath, CallKind, Usage};
use crate::engines::Engine;
use crate::limits::{PICK_END_BYTES_MAX, PICK_SWEEP};

const FIRST: HeaderName = HeaderName::from_static("x-first");
const ENDPOINTS: HeaderName = HeaderName::from_static("x-endpoints");
const WORKERS: HeaderName = HeaderName::from_static("x-workers");
const RANKS: HeaderName = HeaderName::from_static("x-ranks");
/// In `x-ranks`: the engine is told no rank.
const NO_RANK: &str = "-";

/// The pick port.
pub struct PickServer {
    proxy: Arc<Proxy>,
    open: Mutex<OpenPicks>,
    booking: Duration,
    /// For the small bodies of `/end` and `/prefilled`.
    small_bodies: BodyBudget,
}

#[derive(Deserialize)]
struct Told {
    id: String,
    worker: Option<String>,
    #[serde(default)]
    failed: Vec<String>,
    usage: Option<ToldUsage>,
}

#[derive(Deserialize)]
struct ToldUsage {
    prompt_tokens: u32,
    #[serde(default)]
    completion_tokens: u32,
    cached_tokens: Option<u32>,
    prompt_tokens_details: Option<ToldDetails>,
}

#[derive(Deserialize)]
struct ToldDetails {
    cached_tokens: Option<u32>,
}

impl Handle for PickServer {
    async fn handle(self: Arc<Self>, request: Request<Incoming>, _: Arc<ConnectionState>) -> Response<ReplyBody> {
        let id = headers::request_id(request.headers());
        let answer = match (request.method(), request.uri().path()) {
            (&Method::POST, "/pick") => self.pick(request, &id).await,
            (&Method::POST, "/prefilled") => self.told(request, false).await,
            (&Method::POST, "/end") => self.told(request, true).await,
            _ => {
                let message = "this port serves POST /pick, POST /prefilled and POST /end";
                Err(ApiError::caller(StatusCode::NOT_FOUND, "unknown_path", message))
            }
        };
        answer.unwrap_or_else(|error| {
            self.proxy.metrics.refused(error.code);
            error_reply::error(&error, Some(&id))
        })
    }
}

impl PickServer {
    /// A pick port that answers as the proxy would route. A pick whose end never comes is freed after `booking`.
    #[must_use]
    pub fn new(proxy: Arc<Proxy>, booking: Duration) -> Self {
        let picks_max = proxy.settings.bounds.picks_max;
        let small_bodies = BodyBudget::of(PICK_END_BYTES_MAX * 256);
        Self { proxy, open: Mutex::new(OpenPicks::new(picks_max)), booking, small_bodies }
    }

    async fn pick(&self, request: Request<Incoming>, id: &HeaderValue) -> Result<Response<ReplyBody>, ApiError> {
        let started = Instant::now();
        let (parts, body) = request.into_parts();
        let path = parts.headers.get(headers::ORIGINAL_PATH).map_or(Ok("/v1/chat/completions"), HeaderValue::to_str);
        let path = path.map_err(|_| {
            let message = format!("{} must be the path of the request", headers::ORIGINAL_PATH);
            ApiError::caller(StatusCode::BAD_REQUEST, "invalid_header", message)
        })?;
        let path = ApiPath::of(path.split('?').next().unwrap_or_default());
        self.proxy.refuse_if_memory_is_short()?;
        if self.open.lock().is_full() {
            let message = "too many picks are open; tell their ends with POST /end or the access log";
            return Err(ApiError::gateway(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message).retry_after(1));
        }
        let body = self.proxy.read(body).await?;
        let name = id.to_str().unwrap_or_default();
        let candidates = match path.kind() {
            CallKind::Generate => self.route(path, &parts.headers, &body.bytes, name, started).await?,
            CallKind::Stateless | CallKind::Models | CallKind::Unknown => {
                let facts = crate::api::read_request(path, &body.bytes).ok();
                let model = facts.and_then(|facts| self.proxy.engines.model(facts.model.as_deref()).ok());
                self.proxy.any_engine(model.as_ref())
            }
        };
        self.answer(&candidates, id)
    }

    async fn route(
        &self,
        path: ApiPath,
        headers: &HeaderMap,
        body: &Bytes,
        id: &str,
        started: Instant,
    ) -> Result<Vec<Candidate>, ApiError> {
        let prepared = self.proxy.prepare(path, headers, body, None)?;
        // Another proxy sends the request to one engine.
        let asked = prepared.asked(path, body, &[], started + self.proxy.settings.deadlines.total);
        let choice = self.proxy.choose.choose(asked).await?;
        self.proxy.metrics.decided(choice.decided_by, choice.token_source);
        let Choice { candidates, booking, observer, .. } = choice;
        let worker = candidates.first().map_or(Worker::new(0, 0), |best| best.worker);
        let pick = OpenPick {
            booking,
            observer,
            worker,
            in_flight: self.proxy.engines.get(worker.id.0).map(|engine| engine.enter()),
            candidates: candidates.iter().map(|candidate| candidate.worker).collect(),
            model: prepared.model.base.clone(),
            expires: Instant::now() + self.booking,
        };
        let open = {
            let mut open = self.open.lock();
            open.insert(id.to_owned(), pick);
            open.len()
        };
        self.count(open);
        Ok(candidates)
    }

    fn answer(&self, candidates: &[Candidate], id: &HeaderValue) -> Result<Response<ReplyBody>, ApiError> {
        let (mut endpoints, mut firsts, mut ranks) = (Vec::new(), Vec::new(), Vec::new());
        let mut workers = Vec::new();
        for Candidate { worker, overlap_tokens } in candidates {
            let Some(engine) = self.proxy.engines.get(worker.id.0) else { continue };
            let Some(endpoint) = endpoint(&engine) else { continue };
            let rank = has_ranks(&engine).then_some(worker.rank.0);
            workers.push(json!({
                "worker": worker.to_string(), "id": worker.id.0, "rank": worker.rank.0, "endpoint": endpoint,
                "url": engine.base().to_string().trim_end_matches('/'), "overlap_tokens": overlap_tokens,
                "data_parallel_rank": rank,
            }));
            // An engine that fails fails with all its ranks.
            if !endpoints.contains(&endpoint) {
                endpoints.push(endpoint);
                firsts.push(worker.to_string());
                ranks.push(rank.map_or_else(|| NO_RANK.to_owned(), |rank| rank.to_string()));
            }
        }
        let Some(first) = candidates.first().filter(|_| !endpoints.is_empty()) else {
            let message = "no engine that serves this is healthy; try again";
            let error = ApiError::engine(StatusCode::SERVICE_UNAVAILABLE, "no_engine", message);
            return Err(error.retry_after(1));
        };
        let first = first.worker.id.0.to_string();
        let id_text = id.to_str().unwrap_or_default();
        let text = json!({ "id": id_text, "first": first, "endpoints": endpoints, "workers": workers }).to_string();
        let mut response = error_reply::json(StatusCode::OK, text);
        let lists = [(ENDPOINTS, endpoints), (WORKERS, firsts), (RANKS, ranks)];
        let lists = lists.map(|(name, list)| (name, list.join(",")));
        for (name, value) in lists.into_iter().chain([(FIRST, first)]) {
            if let Ok(value) = HeaderValue::from_str(&value) {
                response.headers_mut().insert(name, value);
            }
        }
        response.headers_mut().insert(headers::REQUEST_ID, id.clone());
        Ok(response)
    }

    /// `/prefilled` and `/end`.
    async fn told(&self, request: Request<Incoming>, is_end: bool) -> Result<Response<ReplyBody>, ApiError> {
        let time_max = self.proxy.settings.deadlines.body;
        let body = read_body(request.into_body(), PICK_END_BYTES_MAX, time_max, &self.small_bodies).await?;
        let told: Told = serde_json::from_slice(&body.bytes).map_err(|_| {
            let message = "the body must be a JSON object with `id`, the x-request-id of the pick";
            ApiError::caller(StatusCode::BAD_REQUEST, "invalid_json", message)
        })?;
        let failed: Vec<&str> = told.failed.iter().map(String::as_str).collect();
        let was_open = if is_end {
            self.end(&told.id, &failed, false, told.worker.as_deref(), told.usage.as_ref())
        } else {
            self.prefilled(&told.id, told.worker.as_deref(), &failed)
        };
        if !was_open {
            let message = "no pick with this id is open: it has ended, or its time was over";
            return Err(ApiError::caller(StatusCode::NOT_FOUND, "unknown_pick", message));
        }
        Ok(error_reply::json(StatusCode::OK, "{}"))
    }

    /// A line of the access log. Lines of requests that were not picked mean nothing.
    pub(super) fn log_line(&self, said: &LogLine<'_>) {
        match said {
            LogLine::Ended { id, failed, is_success } => self.end(id, failed, *is_success, None, None),
            LogLine::Prefilled { id, worker } => self.prefilled(id, *worker, &[]),
        };
    }

    fn prefilled(&self, id: &str, worker: Option<&str>, failed: &[&str]) -> bool {
        let worker = worker.and_then(|text| self.worker(text));
        let (served, failures) = {
            let mut open = self.open.lock();
            let Some(pick) = open.get_mut(id) else { return false };
            if let Some(worker) = worker.filter(|worker| *worker != pick.worker) {
                pick.worker = worker;
                pick.in_flight = self.proxy.engines.get(worker.id.0).map(|engine| engine.enter());
                if let Some(booking) = &mut pick.booking {
                    booking.served(worker);
                }
            }
            if let Some(booking) = &mut pick.booking {
                booking.prefill_complete();
            }
            (pick.worker, self.failures(pick, failed))
        };
        self.report(&failures);
        if let Some(engine) = self.proxy.engines.get(served.id.0) {
            engine.succeeded();
        }
        true
    }

    /// A worker as `ID/RANK`, as `ID`, or as its engine's endpoint.
    fn worker(&self, text: &str) -> Option<Worker> {
        if let Some((id, rank)) = text.split_once('/') {
            return Some(Worker::new(id.parse().ok()?, rank.parse().ok()?));
        }
        if let Ok(id) = text.parse() {
            return Some(Worker::new(id, 0));
        }
        let is_meant = |engine: &Arc<Engine>| endpoint(engine).is_some_and(|endpoint| endpoint == text);
        self.proxy.engines.iter().find(is_meant).map(|engine| Worker::new(engine.worker(), 0))
    }

    /// The workers of a pick's list whose endpoints are said to have failed, with the pick's model.
    fn failures(&self, pick: &OpenPick, failed: &[&str]) -> Vec<(Worker, String)> {
        let named: Vec<Worker> = failed.iter().filter_map(|text| self.worker(text)).collect();
        let has_failed = |worker: &&Worker| named.iter().any(|failed| failed.id == worker.id);
        pick.candidates.iter().filter(has_failed).map(|worker| (*worker, pick.model.clone())).collect()
    }

    fn report(&self, failures: &[(Worker, String)]) {
        for (worker, model) in failures {
            if let Some(engine) = self.proxy.engines.get(worker.id.0) {
                engine.failed(Instant::now(), "a proxy says that it could not take a request");
            }
            self.proxy.choose.report_failure(*worker, model, "proxy");
        }
    }

    fn end(
        &self,
        id: &str,
        failed: &[&str],
        is_success: bool,
        worker: Option<&str>,
        usage: Option<&ToldUsage>,
    ) -> bool {
        let Some(pick) = self.take(id) else { return false };
        let failures = self.failures(&pick, failed);
        self.report(&failures);
        let has_failed = |worker: &Worker| failures.iter().any(|(failed, _)| failed.id == worker.id);
        if is_success && let Some(served) = pick.candidates.iter().find(|worker| !has_failed(worker)) {
            // Without it, an engine's back-off would grow with each failure of its life.
            if let Some(engine) = self.proxy.engines.get(served.id.0) {
                engine.succeeded();
            }
        }
        if let Some(usage) = usage {
            let details = usage.prompt_tokens_details.as_ref().and_then(|details| details.cached_tokens);
            let usage = Usage {
                prompt_tokens: usage.prompt_tokens,
                cached_tokens: usage.cached_tokens.or(details),
                completion_tokens: usage.completion_tokens,
            };
            self.proxy.metrics.usage(Some(&usage));
            if let Some(observer) = pick.observer {
                observer(worker.and_then(|text| self.worker(text)).unwrap_or(pick.worker), &usage);
            }
        }
        true
    }

    fn take(&self, id: &str) -> Option<OpenPick> {
        let (pick, open) = {
            let mut open = self.open.lock();
            (open.end(id, Instant::now()), open.len())
        };
        self.count(open);
        pick
    }

    fn count(&self, open: usize) {
        self.proxy.metrics.picks_open.set(i64::try_from(open).unwrap_or(i64::MAX));
    }

    /// Frees picks whose end never came, until `stop` says so.
    pub async fn sweep(self: Arc<Self>, mut stop: watch::Receiver<bool>) {
        let mut tick = tokio::time::interval(PICK_SWEEP);
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                _ = stop.wait_for(|stops| *stops) => return,
            }
            let (expired, open) = {
                let mut open = self.open.lock();
                (open.expire(Instant::now()), open.len())
            };
            self.count(open);
            if expired > 0 {
                self.proxy.metrics.picks_expired.inc_by(expired as u64);
                tracing::warn!(expired, "picks were freed because their end never came; see the proxy's access log");
            }
        }
    }
}

/// An engine's host and port.
fn endpoint(engine: &Engine) -> Option<String> {
    let authority = engine.base().authority()?;
    // Engines without a port in their URL listen on the scheme's.
    let port = authority.port_u16().unwrap_or(if engine.base().scheme_str() == Some("https") { 443 } else { 80 });
    Some(format!("{}:{port}", authority.host()))
}
