//! The operator's endpoints: `/metrics`, `/health`, `/ready` and `/findings`.

use std::sync::Arc;
use std::time::Instant;

use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode};
use serde_json::json;
use tokio::sync::watch;

use super::body::ReplyBody;
use super::choose::Choose;
use super::error_reply;
use super::listener::{ConnectionState, Handle};
use crate::api::ApiError;
use crate::engines::{Engine, EngineSet};
use crate::metrics::Metrics;

/// The operator's endpoints.
pub struct Admin {
    engines: Arc<EngineSet>,
    choose: Arc<dyn Choose>,
    metrics: Arc<Metrics>,
    stop: watch::Receiver<bool>,
}

impl Handle for Admin {
    async fn handle(self: Arc<Self>, request: Request<Incoming>, _: Arc<ConnectionState>) -> Response<ReplyBody> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let error = ApiError::caller(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "use GET here");
            return error_reply::error(&error, None);
        }
        match request.uri().path() {
            "/metrics" => {
                let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                error_reply::typed(StatusCode::OK, kind, self.metrics.text(&self.choose.metrics()))
            }
            "/health" => error_reply::json(StatusCode::OK, "{\"status\":\"alive\"}"),
            "/ready" => self.ready(),
            "/findings" => {
                let findings = json!({ "findings": self.choose.findings() });
                error_reply::json(StatusCode::OK, findings.to_string())
            }
            _ => {
                let message = "this port serves /metrics, /health, /ready and /findings";
                error_reply::error(&ApiError::caller(StatusCode::NOT_FOUND, "unknown_path", message), None)
            }
        }
    }
}

impl Admin {
    /// The endpoints of a gateway; `stop` says when it ends, from which time it is not ready.
    #[must_use]
    pub fn new(
        engines: Arc<EngineSet>,
        choose: Arc<dyn Choose>,
        metrics: Arc<Metrics>,
        stop: watch::Receiver<bool>,
    ) -> Self {
        Self { engines, choose, metrics, stop }
    }

    /// Whether requests would be served: an engine is usable, requests can be routed, and the gateway is not stopping.
    fn ready(&self) -> Response<ReplyBody> {
        let now = Instant::now();
        let is_usable =
            |engine: &Arc<Engine>| engine.takes_requests() && engine.has_answered() && engine.is_usable(now);
        let usable = self.engines.iter().filter(is_usable).count();
        let why = match (*self.stop.borrow(), usable, self.choose.is_ready()) {
            (true, ..) => Some("the gateway is stopping"),
            (_, 0, _) => Some("no engine is usable"),
            (_, _, false) => Some("requests cannot be routed yet"),
            (false, _, true) => None,
        };
        let status = if why.is_none() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        let text = json!({ "ready": why.is_none(), "why": why, "usable_engines": usable }).to_string();
        error_reply::json(status, text)
    }
}
