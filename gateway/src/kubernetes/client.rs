//! Requests to the API server: one page of a list, and one watch.
//!
//! A client serves one list and the watch after it. The next one reads token and authorities again, which the kubelet
//! replaces while they are in use.

use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{ACCEPT, AUTHORIZATION, HeaderValue, RETRY_AFTER, USER_AGENT};
use hyper::{Request, Response, StatusCode, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use super::access::{AccessError, ApiAccess};
use super::lines::EventLines;
use super::objects::{Status, read_status};
use crate::engines::{BoxBody, ReadError, body_of, causes, read_bounded};
use crate::limits::{
    CONNECT_MAX, KUBERNETES_KEEPALIVE, KUBERNETES_KEEPALIVE_ASKS, KUBERNETES_MESSAGE_BYTES_MAX,
    KUBERNETES_PAGE_BYTES_MAX, KUBERNETES_REFUSAL_BYTES_MAX, KUBERNETES_REPLY_TIMEOUT, KUBERNETES_WATCH_GRACE,
};

/// Why a request gave nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum RequestError {
    /// The URL, the token or the authorities cannot be used.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// No connection, a broken one, or no answer in time.
    #[error("{0}")]
    Lost(String),
    /// 401: the server does not know the token.
    #[error("the API server does not accept the token (401)")]
    Unauthorized,
    /// 403: the account may not do this.
    #[error("the account may not do this (403): {0}")]
    Forbidden(String),
    /// 404: the server has no such resource.
    #[error("the API server has no such resource (404)")]
    Missing,
    /// 410: what was asked for is too old. The objects must be listed again.
    #[error("the API server no longer has the changes since the last one that was read")]
    Expired,
    /// Another status.
    #[error("the API server answers with status {status}: {message}")]
    Refused {
        status: u16,
        message: String,
        /// When the server wants to be asked again.
        after: Option<Duration>,
    },
    /// An answer that no API server gives.
    #[error("the answer is no API server's: {0}")]
    Nonsense(String),
}

impl RequestError {
    /// What an error of a watch's stream or of a reply means.
    pub(super) fn of_status(status: &Status, after: Option<Duration>) -> Self {
        let message = shown(status.message.as_deref().unwrap_or("without a message"));
        match (status.code.unwrap_or_default(), status.reason.as_deref()) {
            (410, _) | (_, Some("Expired" | "Gone")) => Self::Expired,
            (401, _) => Self::Unauthorized,
            (403, _) => Self::Forbidden(message),
            (404, _) => Self::Missing,
            (code, _) => Self::Refused { status: code, message, after },
        }
    }
}

/// Text of the server as people may read it: short, and without characters that a terminal would obey.
pub(super) fn shown(text: &str) -> String {
    text.chars().filter(|char| !char.is_control()).take(KUBERNETES_MESSAGE_BYTES_MAX).collect()
}

/// Sends requests with one token and one set of authorities.
pub(super) struct ApiClient {
    base: Uri,
    authorization: Option<HeaderValue>,
    client: Client<HttpsConnector<HttpConnector>, BoxBody>,
}

impl ApiClient {
    /// Reads token and authorities.
    pub(super) fn new(access: &ApiAccess) -> Result<Self, AccessError> {
        let base = access.base()?;
        let tls = access.tls().config(base.scheme_str() == Some("https")).map_err(AccessError::Tls)?;
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT_MAX));
        // A watch may be silent for a minute. If the server's machine is gone, nothing else would tell.
        tcp.set_keepalive(Some(KUBERNETES_KEEPALIVE));
        tcp.set_keepalive_interval(Some(KUBERNETES_KEEPALIVE));
        tcp.set_keepalive_retries(Some(KUBERNETES_KEEPALIVE_ASKS));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config((*tls).clone())
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            .pool_max_idle_per_host(1)
            .build(connector);
        Ok(Self { base, authorization: access.authorization()?, client })
    }

    /// A whole reply.
    pub(super) async fn page(&self, path_and_query: &str) -> Result<Bytes, RequestError> {
        let deadline = Instant::now() + KUBERNETES_REPLY_TIMEOUT;
        let reply = self.ask(path_and_query, deadline).await?;
        read(reply, KUBERNETES_PAGE_BYTES_MAX, deadline).await
    }

    /// A stream of events, which the server was asked to end after `lasts`.
    pub(super) async fn watch(&self, path_and_query: &str, lasts: Duration) -> Result<EventLines, RequestError> {
        let now = Instant::now();
        let reply = self.ask(path_and_query, now + KUBERNETES_REPLY_TIMEOUT).await?;
        Ok(EventLines::of(reply.into_body(), now + lasts + KUBERNETES_WATCH_GRACE))
    }

    async fn ask(&self, path_and_query: &str, deadline: Instant) -> Result<Response<Incoming>, RequestError> {
        let nonsense = |error: hyper::http::Error| RequestError::Nonsense(error.to_string());
        let mut uri = self.base.clone().into_parts();
        uri.path_and_query = Some(path_and_query.parse().map_err(|error| nonsense(hyper::http::Error::from(error)))?);
        let uri = Uri::from_parts(uri).map_err(|error| nonsense(error.into()))?;
        let mut request = Request::get(uri)
            .header(ACCEPT, "application/json")
            .header(USER_AGENT, concat!("kvrouted-gateway/", env!("CARGO_PKG_VERSION")))
            .body(body_of(Bytes::new()))
            .map_err(nonsense)?;
        if let Some(authorization) = &self.authorization {
            request.headers_mut().insert(AUTHORIZATION, authorization.clone());
        }
        let reply = match tokio::time::timeout_at(deadline.into(), self.client.request(request)).await {
            Ok(Ok(reply)) => reply,
            Ok(Err(error)) => return Err(RequestError::Lost(shown(&causes(&error)))),
            Err(_) => return Err(RequestError::Lost("no answer in time".to_owned())),
        };
        if reply.status() == StatusCode::OK {
            return Ok(reply);
        }
        Err(refusal(reply, deadline).await)
    }
}

async fn refusal(reply: Response<Incoming>, deadline: Instant) -> RequestError {
    let status = reply.status();
    if status.is_redirection() || status.is_success() {
        return RequestError::Nonsense(format!("status {status}"));
    }
    let seconds = reply.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    // The status says enough if the body cannot be read, and a proxy's page is no Status.
    let body = read(reply, KUBERNETES_REFUSAL_BYTES_MAX, deadline).await.unwrap_or_default();
    let said = read_status(&body).unwrap_or_default();
    RequestError::of_status(&Status { code: Some(status.as_u16()), ..said }, seconds.map(Duration::from_secs))
}

async fn read(reply: Response<Incoming>, bytes_max: usize, deadline: Instant) -> Result<Bytes, RequestError> {
    read_bounded(reply.into_body(), bytes_max, deadline).await.map_err(|error| match error {
        ReadError::TooLong(_) => RequestError::Nonsense(error.to_string()),
        ReadError::TimedOut | ReadError::NoRoom => RequestError::Lost(error.to_string()),
        ReadError::Broken(cause) => RequestError::Lost(shown(&causes(&cause))),
    })
}
