//! The pick port: other proxies send a request's body and get the engines to send it to, best first.
//!
//! * `POST /pick`, body = the request's body, `x-kvrouted-path` = its path (`/v1/chat/completions` if absent),
//!   `x-request-id` = its id. The answer is `{"id", "first", "endpoints": [...], "workers": [...]}`; the headers
//!   `x-request-id`, `x-first` and `x-endpoints` say the same for proxies that cannot read JSON.
//! * `POST /prefilled` with `{"id"}` when the first byte comes; `"worker"` says which worker runs it, if it is not the
//!   first.
//! * `POST /end` with `{"id"}` when the reply has ended; `"usage"` may say what the reply said.
//! * Or the access log: each line sent to the log socket that has `id=ID` ends the pick ID.
//!
//! The port is for proxies of the operator, and asks for no caller key.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
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
use tokio::net::UnixDatagram;
use tokio::sync::watch;

use super::body::{BodyBudget, ReplyBody, read_body};
use super::choose::{Candidate, Choice};
use super::handle::Proxy;
use super::listener::{ConnectionState, Handle, remove_socket};
use super::open_picks::{OpenPick, OpenPicks, id_of_log_line};
use super::{error_reply, headers};
use crate::api::{ApiError, ApiPath, CallKind, Usage};
use crate::limits::{LOG_DATAGRAM_BYTES_MAX, PICK_END_BYTES_MAX, PICK_SWEEP, PICKS_OPEN_MAX};

const FIRST: HeaderName = HeaderName::from_static("x-first");
const ENDPOINTS: HeaderName = HeaderName::from_static("x-endpoints");

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
        let small_bodies = BodyBudget::of(PICK_END_BYTES_MAX * 256);
        Self { proxy, open: Mutex::new(OpenPicks::new(PICKS_OPEN_MAX)), booking, small_bodies }
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
        let pick = OpenPick { booking, observer, worker, expires: Instant::now() + self.booking };
        let open = {
            let mut open = self.open.lock();
            open.insert(id.to_owned(), pick);
            open.len()
        };
        self.count(open);
        Ok(candidates)
    }

    fn answer(&self, candidates: &[Candidate], id: &HeaderValue) -> Result<Response<ReplyBody>, ApiError> {
        let mut endpoints = Vec::new();
        let mut workers = Vec::new();
        for Candidate { worker, overlap_tokens } in candidates {
            let Some(engine) = self.proxy.engines.get(worker.id.0) else { continue };
            let Some(authority) = engine.base().authority() else { continue };
            // Engines without a port in their URL listen on the scheme's.
            let port =
                authority.port_u16().unwrap_or(if engine.base().scheme_str() == Some("https") { 443 } else { 80 });
            let endpoint = format!("{}:{port}", authority.host());
            workers.push(json!({
                "worker": worker.to_string(), "id": worker.id.0, "rank": worker.rank.0, "endpoint": endpoint,
                "url": engine.base().to_string().trim_end_matches('/'), "overlap_tokens": overlap_tokens,
            }));
            if !endpoints.contains(&endpoint) {
                endpoints.push(endpoint);
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
        let list = endpoints.join(",");
        for (name, value) in [(FIRST, &first), (ENDPOINTS, &list)] {
            if let Ok(value) = HeaderValue::from_str(value) {
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
        let was_open = if is_end { self.end(&told) } else { self.prefilled(&told) };
        if !was_open {
            let message = "no pick with this id is open: it has ended, or its time was over";
            return Err(ApiError::caller(StatusCode::NOT_FOUND, "unknown_pick", message));
        }
        Ok(error_reply::json(StatusCode::OK, "{}"))
    }

    fn prefilled(&self, told: &Told) -> bool {
        let mut open = self.open.lock();
        let Some(pick) = open.get_mut(&told.id) else { return false };
        let worker = told.worker.as_deref().and_then(|text| self.worker(text));
        if let Some(worker) = worker.filter(|worker| *worker != pick.worker) {
            pick.worker = worker;
            if let Some(booking) = &mut pick.booking {
                booking.served(worker);
            }
        }
        if let Some(booking) = &mut pick.booking {
            booking.prefill_complete();
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
        let is_meant = |engine: &Arc<crate::engines::Engine>| {
            engine.base().authority().is_some_and(|authority| authority.as_str() == text)
        };
        self.proxy.engines.iter().find(is_meant).map(|engine| Worker::new(engine.worker(), 0))
    }

    fn end(&self, told: &Told) -> bool {
        let Some(pick) = self.take(&told.id) else { return false };
        if let Some(usage) = &told.usage {
            let details = usage.prompt_tokens_details.as_ref().and_then(|details| details.cached_tokens);
            let usage = Usage {
                prompt_tokens: usage.prompt_tokens,
                cached_tokens: usage.cached_tokens.or(details),
                completion_tokens: usage.completion_tokens,
            };
            self.proxy.metrics.usage(Some(&usage));
            if let Some(observer) = pick.observer {
                observer(told.worker.as_deref().and_then(|text| self.worker(text)).unwrap_or(pick.worker), &usage);
            }
        }
        true
    }

    fn take(&self, id: &str) -> Option<OpenPick> {
        let (pick, open) = {
            let mut open = self.open.lock();
            (open.end(id), open.len())
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

/// Reads access-log lines from a Unix datagram socket until `stop` says so. Each one ends its pick.
///
/// # Errors
/// The socket cannot be bound.
pub async fn log_lines(
    path: &Path,
    mode: u32,
    server: Arc<PickServer>,
    mut stop: watch::Receiver<bool>,
) -> io::Result<()> {
    remove_socket(path)?;
    let socket = UnixDatagram::bind(path)?;
    std::fs::set_permissions(path, Permissions::from_mode(mode))?;
    let mut line = vec![0; LOG_DATAGRAM_BYTES_MAX];
    loop {
        let received = tokio::select! {
            received = socket.recv(&mut line) => received,
            _ = stop.wait_for(|stops| *stops) => break,
        };
        match received {
            Ok(bytes) => {
                let text = String::from_utf8_lossy(&line[..bytes]);
                if let Some(id) = id_of_log_line(&text) {
                    drop(server.take(id));
                }
            }
            Err(error) => {
                tracing::warn!(%error, "an access-log line could not be read");
                tokio::time::sleep(crate::limits::ACCEPT_PAUSE).await;
            }
        }
    }
    remove_socket(path)
}
