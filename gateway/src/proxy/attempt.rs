//! Sending a request to one engine, up to the first byte of its reply's body. Until then nothing has gone to the
//! caller, and the request may go to another engine.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::{Frame, Incoming};
use hyper::header::{HeaderMap, HeaderValue};
use hyper::http::response::Parts;
use hyper::{Method, Request, StatusCode, Uri};

use crate::api::ApiError;
use crate::engines::{BoxBody, DATA_PARALLEL_RANK, Dialect, Engine, EngineError, InflightGuard, body_of};

/// A reply whose first part has come.
pub(super) struct Begun {
    pub(super) parts: Parts,
    pub(super) first: Option<Frame<Bytes>>,
    pub(super) rest: Incoming,
    pub(super) guard: InflightGuard,
}

/// A failure that is not the engine's: the connection broke, and the engine lives.
pub(super) const CUT_OFF: &str = "cut_off";

/// How sending to one engine went.
pub(super) enum Outcome {
    /// The reply has begun.
    Begun(Begun),
    /// The engine failed before a first byte; another one may take the request. A short name says how.
    Failed(&'static str),
    /// The first byte did not come in time: no other engine would have time either.
    TimedOut(ApiError),
}

/// A request on its way from engine to engine.
pub(super) struct Attempts {
    pub(super) method: Method,
    pub(super) uri: Uri,
    pub(super) headers: HeaderMap,
    /// When the first byte must have come.
    pub(super) first_byte: Instant,
    /// Whether the request may be sent again.
    pub(super) can_repeat: bool,
    /// Engines that it may still be sent to.
    pub(super) left: usize,
    /// Engines that it was sent to, or that were passed over because they back off.
    pub(super) tried: Vec<u64>,
    /// The last failure: an engine's own 503 with the engine's id, or an error.
    pub(super) failure: Option<Result<(u64, Begun), ApiError>>,
    /// A short name of that failure.
    pub(super) failed_why: Option<&'static str>,
}

impl Attempts {
    /// The same request, sent nowhere yet.
    pub(super) fn fresh(&self) -> Self {
        Self {
            method: self.method.clone(),
            uri: self.uri.clone(),
            headers: self.headers.clone(),
            first_byte: self.first_byte,
            can_repeat: self.can_repeat,
            left: self.left,
            tried: Vec::new(),
            failure: None,
            failed_why: None,
        }
    }

    /// The request with a body.
    pub(super) fn request(&self, body: &Bytes) -> Request<BoxBody> {
        let mut request = Request::new(body_of(body.clone()));
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        request
    }

    /// Sends the request to an engine.
    pub(super) async fn send(&mut self, engine: &Arc<Engine>, rank: Option<u32>, body: &Bytes) -> Outcome {
        self.left -= 1;
        let guard = engine.enter();
        let mut request = self.request(body);
        if let Some(rank) = rank.filter(|_| has_ranks(engine)) {
            request.headers_mut().insert(DATA_PARALLEL_RANK, HeaderValue::from(rank));
        }
        let (parts, mut rest) = match engine.send(request, self.first_byte).await {
            Ok(response) => response.into_parts(),
            Err(error @ EngineError::TimedOut) => return self.timed_out(engine, error.api_error()),
            Err(error) if error.is_unsent() => return self.failed(engine, "refused", error.api_error()),
            Err(error) => return self.broke(engine, error.api_error()).await,
        };
        let first = match tokio::time::timeout_at(self.first_byte.into(), rest.frame()).await {
            Ok(None) => None,
            Ok(Some(Ok(frame))) => Some(frame),
            Ok(Some(Err(_))) => {
                let message = "the engine's connection broke before the first byte of its reply";
                let error = ApiError::engine(StatusCode::BAD_GATEWAY, "engine_failed", message);
                return self.broke(engine, error).await;
            }
            Err(_) => return self.timed_out(engine, EngineError::TimedOut.api_error()),
        };
        let is_unavailable = parts.status == StatusCode::SERVICE_UNAVAILABLE;
        let begun = Begun { parts, first, rest, guard };
        if is_unavailable {
            engine.failed(Instant::now(), "it answered 503");
            self.failure = Some(Ok((engine.worker(), begun)));
            return Outcome::Failed("unavailable");
        }
        engine.succeeded();
        Outcome::Begun(begun)
    }

    /// The connection broke: the engine failed, or only this request did.
    async fn broke(&mut self, engine: &Engine, error: ApiError) -> Outcome {
        let why = if engine.outlives_a_break(&error.message).await { CUT_OFF } else { "broken" };
        self.failure = Some(Err(error));
        Outcome::Failed(why)
    }

    fn failed(&mut self, engine: &Engine, why: &'static str, error: ApiError) -> Outcome {
        engine.failed(Instant::now(), &error.message);
        self.failure = Some(Err(error));
        Outcome::Failed(why)
    }

    fn timed_out(&self, engine: &Engine, error: ApiError) -> Outcome {
        engine.failed(Instant::now(), "it sent no first byte in time");
        Outcome::TimedOut(error)
    }
}

/// Whether the engine must be told which of its ranks is meant: vLLM by the header, a server for each rank by its port.
pub(super) fn has_ranks(engine: &Engine) -> bool {
    let facts = engine.facts();
    engine.has_rank_ports() || facts.dialect == Dialect::Vllm && facts.ranks.len() > 1
}
