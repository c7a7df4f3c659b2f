//! One engine: its configuration, what is known of it, its health and its connections.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, HOST, HeaderMap, HeaderValue};
use hyper::http::uri::{Authority, Scheme};
use hyper::{Request, Response, StatusCode, Uri, Version};
use parking_lot::Mutex;
use rustls::ClientConfig;

use super::address::parse_base;
use super::facts::{EngineFacts, NamedFacts};
use super::health::Health;
use super::learn::{self, LearnError};
use super::transport::{BoxBody, DATA_PARALLEL_RANK, HttpClient, body_of, client};
use crate::api::ApiError;
use crate::limits::{ALIVE_MAX, BREAKS_IN_A_ROW_MAX};

/// A key that is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Hides a key.
    #[must_use]
    pub fn new(key: impl Into<String>) -> Self {
        Self(key.into())
    }

    /// The key.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// What an engine is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EngineRole {
    /// Whole requests.
    #[default]
    Any,
    /// Prompts, whose caches go to a decode engine.
    Prefill,
    /// The tokens after the first.
    Decode,
}

/// An engine as the operator names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// The daemon's worker id.
    pub worker: u64,
    /// `http://host:port` or `https://host:port`
    pub url: String,
    /// The key that the engine wants (`--api-key`).
    pub api_key: Option<Secret>,
    /// What the engine is for.
    pub role: EngineRole,
    /// The name in the engine's certificate, if it is not the URL's host.
    pub tls_name: Option<String>,
    /// What the engine does not tell of itself.
    pub named: NamedFacts,
    /// The ports of ranks 1, 2 and so on, where each rank has a server of its own; the URL is that of rank 0. Empty =
    /// one server for all ranks.
    pub rank_ports: Vec<u16>,
}

impl EngineConfig {
    /// An engine without a key, for whole requests.
    #[must_use]
    pub fn new(worker: u64, url: impl Into<String>) -> Self {
        Self {
            worker,
            url: url.into(),
            api_key: None,
            role: EngineRole::Any,
            tls_name: None,
            named: NamedFacts::default(),
            rank_ports: Vec::new(),
        }
    }
}

/// Why an engine cannot be used, or did not answer.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The URL in the configuration is wrong.
    #[error("the engine's URL {url} cannot be used: {why}; write http://host:port or https://host:port")]
    BadUrl {
        /// The URL, without credentials.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// The key cannot be a header's value.
    #[error("the API key of engine {worker} has characters that no header may have")]
    BadKey {
        /// The engine.
        worker: u64,
    },
    /// Two engines have one worker id.
    #[error("two engines have the worker id {worker}; give each engine an id of its own")]
    SameWorker {
        /// The id.
        worker: u64,
    },
    /// The TLS configuration cannot be used.
    #[error("engines cannot be reached by https: {why}")]
    BadTls {
        /// What is wrong.
        why: String,
    },
    /// No connection: nothing of the request has reached the engine.
    #[error("no connection to the engine: {why}")]
    Connect {
        /// The cause, as the connector gives it.
        why: String,
    },
    /// The connection broke before the reply began. The engine may have begun the request.
    #[error("the connection to the engine broke before its reply: {why}")]
    Broken {
        /// The cause.
        why: String,
    },
    /// No reply began before the deadline.
    #[error("the engine's reply did not begin before the deadline")]
    TimedOut,
}

impl EngineError {
    /// Whether nothing of the request has reached the engine, so that another engine may take it.
    #[must_use]
    pub const fn is_unsent(&self) -> bool {
        matches!(self, Self::Connect { .. })
    }

    /// The reply to a caller whose request failed so.
    #[must_use]
    pub fn api_error(&self) -> ApiError {
        let (status, code) = match self {
            Self::TimedOut => (StatusCode::GATEWAY_TIMEOUT, "engine_timeout"),
            Self::Connect { .. } => (StatusCode::BAD_GATEWAY, "engine_unreachable"),
            _ => (StatusCode::BAD_GATEWAY, "engine_failed"),
        };
        ApiError::engine(status, code, self.to_string())
    }
}

/// An engine.
pub struct Engine {
    config: EngineConfig,
    base: Uri,
    scheme: Scheme,
    authority: Authority,
    /// Host and port of ranks 1, 2 and so on.
    rank_authorities: Vec<Authority>,
    authorization: Option<HeaderValue>,
    client: ArcSwap<HttpClient>,
    facts: ArcSwapOption<EngineFacts>,
    unknown: Arc<EngineFacts>,
    health: Mutex<Health>,
    renderer_health: Mutex<Health>,
    /// Connections that broke since a request last went well.
    breaks: AtomicUsize,
    inflight: AtomicUsize,
    takes_requests: AtomicBool,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("config", &self.config).finish_non_exhaustive()
    }
}

/// One request that an engine runs. It is counted until this is dropped.
#[derive(Debug)]
pub struct InflightGuard(Arc<Engine>);

impl Drop for InflightGuard {
    fn drop(&mut self) {
        self.0.inflight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Engine {
    pub(super) fn new(config: EngineConfig, tls: &ClientConfig) -> Result<Self, EngineError> {
        let base = parse_base(&config.url)?;
        let parts = base.clone().into_parts();
        let (Some(scheme), Some(authority)) = (parts.scheme, parts.authority) else {
            return Err(EngineError::BadUrl { url: config.url, why: "it names no host".to_owned() });
        };
        let at_port = |port: &u16| format!("{}:{port}", authority.host()).parse::<Authority>();
        let rank_authorities = config.rank_ports.iter().map(at_port).collect::<Result<_, _>>();
        let rank_authorities = rank_authorities
            .map_err(|error| EngineError::BadUrl { url: config.url.clone(), why: error.to_string() })?;
        let bad_key = || EngineError::BadKey { worker: config.worker };
        let header = |key: &Secret| HeaderValue::from_str(&format!("Bearer {}", key.expose())).map_err(|_| bad_key());
        let mut authorization = config.api_key.as_ref().map(header).transpose()?;
        if let Some(value) = &mut authorization {
            value.set_sensitive(true);
        }
        let client = client(tls, config.tls_name.as_deref()).map_err(|why| EngineError::BadTls { why })?;
        let unknown = Arc::new(learn::unknown(&config.named));
        Ok(Self {
            config,
            base,
            scheme,
            authority,
            rank_authorities,
            authorization,
            client: ArcSwap::from_pointee(client),
            facts: ArcSwapOption::empty(),
            unknown,
            health: Mutex::default(),
            renderer_health: Mutex::default(),
            breaks: AtomicUsize::new(0),
            inflight: AtomicUsize::new(0),
            takes_requests: AtomicBool::new(true),
        })
    }

    /// The daemon's worker id.
    #[must_use]
    pub fn worker(&self) -> u64 {
        self.config.worker
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Scheme, host and port.
    #[must_use]
    pub fn base(&self) -> &Uri {
        &self.base
    }

    /// What is known. Before the engine's first answer: no models, and a problem that says so.
    #[must_use]
    pub fn facts(&self) -> Arc<EngineFacts> {
        self.facts.load_full().unwrap_or_else(|| self.unknown.clone())
    }

    /// Whether the engine has ever answered what it is.
    #[must_use]
    pub fn has_answered(&self) -> bool {
        self.facts.load().is_some()
    }

    /// Whether requests may go to it: it does not back off, or one may probe it.
    #[must_use]
    pub fn is_usable(&self, now: Instant) -> bool {
        self.health.lock().is_usable(now)
    }

    /// Whether new requests may go to it. An engine that is ending finishes those that it has.
    #[must_use]
    pub fn takes_requests(&self) -> bool {
        self.takes_requests.load(Ordering::Relaxed)
    }

    /// Returns whether that is a change.
    pub(super) fn set_takes_requests(&self, takes_requests: bool) -> bool {
        self.takes_requests.swap(takes_requests, Ordering::Relaxed) != takes_requests
    }

    /// Whether each rank has a server of its own, so that a request names its rank by the port.
    #[must_use]
    pub fn has_rank_ports(&self) -> bool {
        !self.rank_authorities.is_empty()
    }

    /// Its health.
    #[must_use]
    pub fn health(&self) -> Health {
        *self.health.lock()
    }

    /// A request failed through the engine's fault. Returns the rest of its back-off.
    pub fn failed(&self, now: Instant, why: &str) -> Duration {
        let (was_usable, rest) = {
            let mut health = self.health.lock();
            (health.is_usable(now), health.failed(now, rand::random()))
        };
        if was_usable {
            tracing::warn!(worker = self.worker(), url = %self.base, why, back_off_ms = rest.as_millis() as u64,
                "the engine failed; it gets no requests for this time");
        }
        rest
    }

    /// A connection broke before the first byte of a reply. Returns whether the engine lives all the same: a caller can
    /// bring a break about too, with a body that the engine refuses by closing the connection, and must not take the
    /// engine from all others. The engine is asked. It backs off if it does not answer, or if
    /// [`BREAKS_IN_A_ROW_MAX`] connections broke without a request that went well.
    pub(crate) async fn outlives_a_break(&self, why: &str) -> bool {
        // A count by itself: it guards no other memory.
        let breaks = self.breaks.fetch_add(1, Ordering::Relaxed) + 1;
        let lives = breaks < BREAKS_IN_A_ROW_MAX && self.is_alive().await;
        match lives {
            true => drop(self.health.lock().succeeded()),
            false => drop(self.failed(Instant::now(), why)),
        }
        lives
    }

    /// Whether it answers `/health`, which vLLM and SGLang have.
    async fn is_alive(&self) -> bool {
        let mut request = Request::new(body_of(Bytes::new()));
        *request.uri_mut() = Uri::from_static("/health");
        let reply = self.ask(request, Instant::now() + ALIVE_MAX).await;
        reply.is_ok_and(|reply| reply.status().is_success())
    }

    /// A request went well.
    pub fn succeeded(&self) {
        self.breaks.store(0, Ordering::Relaxed);
        if self.health.lock().succeeded() {
            tracing::info!(worker = self.worker(), url = %self.base, "the engine answers again");
        }
    }

    /// Requests that run: those with a guard of [`Engine::enter`].
    #[must_use]
    pub fn inflight(&self) -> usize {
        self.inflight.load(Ordering::Relaxed)
    }

    /// Counts a request until the guard is dropped. Keep it until the reply has ended.
    #[must_use]
    pub fn enter(self: &Arc<Self>) -> InflightGuard {
        self.inflight.fetch_add(1, Ordering::Relaxed);
        InflightGuard(self.clone())
    }

    /// Sends a request. Its path and query are kept; host and API key become the engine's. Redirects are not followed.
    /// The deadline is that of the reply's head. Where each rank has a server of its own, the header that names a rank
    /// becomes the port.
    ///
    /// # Errors
    /// No connection, a broken one, or no reply in time. The caller reports it by [`Engine::failed`].
    pub async fn send(&self, request: Request<BoxBody>, deadline: Instant) -> Result<Response<Incoming>, EngineError> {
        self.health.lock().began(Instant::now());
        self.ask(request, deadline).await
    }

    /// Sends a request that is no probe of the engine's health: a question about itself, or a prompt to render.
    pub(crate) async fn ask(
        &self,
        request: Request<BoxBody>,
        deadline: Instant,
    ) -> Result<Response<Incoming>, EngineError> {
        let (mut parts, body) = request.into_parts();
        let mut uri = hyper::http::uri::Parts::default();
        uri.scheme = Some(self.scheme.clone());
        uri.authority = Some(self.authority_for(&mut parts.headers).clone());
        let path = parts.uri.path_and_query().cloned();
        uri.path_and_query = Some(path.unwrap_or_else(|| hyper::http::uri::PathAndQuery::from_static("/")));
        parts.uri = Uri::from_parts(uri).map_err(|error| EngineError::Broken { why: error.to_string() })?;
        parts.version = Version::HTTP_11;
        parts.headers.remove(HOST);
        if let Some(key) = &self.authorization {
            parts.headers.insert(AUTHORIZATION, key.clone());
        }
        let client = HttpClient::clone(&self.client.load());
        let reply = client.request(Request::from_parts(parts, body));
        match tokio::time::timeout_at(deadline.into(), reply).await {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(error)) if error.is_connect() => Err(EngineError::Connect { why: causes(&error) }),
            Ok(Err(error)) => Err(EngineError::Broken { why: causes(&error) }),
            Err(_) => Err(EngineError::TimedOut),
        }
    }

    /// The server of the rank that a header names; the header goes, because that server has one rank.
    fn authority_for(&self, headers: &mut HeaderMap) -> &Authority {
        if self.rank_authorities.is_empty() {
            return &self.authority;
        }
        let rank = headers.remove(DATA_PARALLEL_RANK).and_then(|rank| rank.to_str().ok()?.parse::<usize>().ok());
        rank.and_then(|rank| self.rank_authorities.get(rank.checked_sub(1)?)).unwrap_or(&self.authority)
    }

    /// New connections use this TLS configuration; those in use stay.
    pub(super) fn set_tls(&self, tls: &ClientConfig) -> Result<(), EngineError> {
        let client = client(tls, self.config.tls_name.as_deref()).map_err(|why| EngineError::BadTls { why })?;
        self.client.store(Arc::new(client));
        Ok(())
    }

    /// Asks the engine what it is. Returns whether the facts changed.
    pub(super) async fn learn(&self, deadline: Instant) -> Result<bool, LearnError> {
        let before = self.facts.load_full();
        let facts = learn::learn(self, before.as_deref(), deadline).await?;
        let has_changed = before.as_deref() != Some(&facts);
        if has_changed {
            let base = facts.base().map(|model| model.id.as_str());
            tracing::info!(worker = self.worker(), url = %self.base, dialect = facts.dialect.label(), model = base,
                block_size = facts.block_size, ranks = facts.ranks.len(), "the engine says what it is");
            for problem in &facts.problems {
                tracing::warn!(worker = self.worker(), url = %self.base, problem, "the engine's setup has a problem");
            }
            self.facts.store(Some(Arc::new(facts)));
        }
        Ok(has_changed)
    }

    /// The health of the engine's renderers, apart from that of the engine: rendering may hang while generation works.
    pub(crate) fn renderer(&self) -> &Mutex<Health> {
        &self.renderer_health
    }
}

/// An error with its causes.
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}
