//! A real Envoy between a caller, our picker and three upstreams.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use kvrouted_gateway::api::ApiError;
use kvrouted_gateway::epp::{Certificate, ExchangeLimits, Listen, Question};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;

use crate::kit::{LIMITS, PATIENCE, Picker, Plan, Rule};
use crate::process::{Envoy, Recipe, binary_or_skip};
use crate::upstream::Upstream;

/// The picker's bound in these tests. Larger than the body that must pass.
pub(crate) const BODY_BYTES_MAX: usize = 8 << 20;

const EXCHANGE: ExchangeLimits =
    ExchangeLimits { body_bytes_max: BODY_BYTES_MAX, decision_timeout: Duration::from_millis(400), ..LIMITS };

pub(crate) struct Bench {
    pub(crate) version: &'static str,
    recipe: Recipe,
    upstreams: Vec<(&'static str, Upstream)>,
    addresses: Vec<SocketAddr>,
    /// The picker has a runtime of its own, so that it can die like a process.
    picker: Option<Running>,
    picker_address: SocketAddr,
    envoy: Envoy,
}

/// A picker on a runtime of its own. When dropped it dies as a killed process does: its sockets are closed, and nobody
/// waits.
struct Running {
    runtime: Option<Runtime>,
    picker: Picker,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A small chat body.
pub(crate) fn json(model: &str) -> Bytes {
    Bytes::from(format!(r#"{{"model": "{model}"}}"#))
}

impl Bench {
    /// `None` where this Envoy is not installed.
    pub(crate) async fn start(version: &'static str, recipe: Recipe) -> Option<Self> {
        let binary = binary_or_skip(version, "the endpoint picker")?;
        let mut upstreams = Vec::new();
        for name in ["a", "b", "c"] {
            upstreams.push((name, Upstream::start(name).await));
        }
        let addresses: Vec<_> = upstreams.iter().map(|(_, upstream)| upstream.address).collect();
        let running = start_picker("127.0.0.1:0".parse().expect("an address"), &addresses, recipe).await;
        let picker_address = running.picker.address.expect("a TCP picker");
        let envoy = Envoy::start(&binary, version, recipe, picker_address, &addresses).await;
        Some(Self { version, recipe, upstreams, addresses, picker: Some(running), picker_address, envoy })
    }

    pub(crate) fn picker(&self) -> &Picker {
        &self.picker.as_ref().expect("a picker").picker
    }

    /// Kills the picker as if its process had died.
    pub(crate) fn kill_picker(&mut self) {
        drop(self.picker.take());
    }

    /// Waits until Envoy knows that the picker is gone.
    pub(crate) async fn misses_the_picker(&self) {
        self.envoy.misses(self.picker_address).await;
    }

    /// Starts a picker where the last one was.
    pub(crate) async fn start_picker(&mut self) {
        self.picker = Some(start_picker(self.picker_address, &self.addresses, self.recipe).await);
    }

    pub(crate) fn upstream(&self, name: &str) -> &Upstream {
        let found = self.upstreams.iter().find(|(known, _)| *known == name);
        &found.expect("an upstream").1
    }

    pub(crate) async fn stop_upstream(&mut self, name: &str) {
        let found = self.upstreams.iter_mut().find(|(known, _)| *known == name);
        found.expect("an upstream").1.stop().await;
    }

    /// The list that the picker answers for a model.
    pub(crate) fn list(&self, model: &str) -> String {
        let list = list(model, &self.addresses, self.recipe);
        list.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(",")
    }

    pub(crate) async fn chat(&self, body: Bytes) -> Reply {
        self.post(&[], body).await
    }

    pub(crate) async fn post(&self, headers: &[(&str, &str)], body: Bytes) -> Reply {
        request(self.envoy.callers, Method::POST, "/v1/chat/completions", headers, body).await.expect("a reply")
    }

    /// Sends a body in pieces, and a trailer after them.
    pub(crate) async fn chat_with_trailer(&self, pieces: Vec<Bytes>) -> Reply {
        let trailer = HeaderMap::from_iter([(HeaderName::from_static("x-check"), HeaderValue::from_static("1"))]);
        let mut frames: Vec<_> = pieces.into_iter().map(Frame::data).collect();
        frames.push(Frame::trailers(trailer));
        let body = StreamBody::new(futures_util::stream::iter(frames.into_iter().map(Ok::<_, Infallible>)));
        let headers = [("trailer", "x-check")];
        let path = "/v1/chat/completions";
        let (response, _connection) =
            send(self.envoy.callers, Method::POST, path, &headers, body).await.expect("a reply");
        let (parts, body) = response.into_parts();
        let body = body.collect().await.expect("a whole reply").to_bytes();
        Reply { status: parts.status, headers: parts.headers, body }
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        request(self.envoy.callers, Method::GET, path, &[], Bytes::new()).await.expect("a reply")
    }

    /// Begins a stream of events.
    pub(crate) async fn stream(&self, model: &str) -> Events {
        let headers = [("x-test-stream", "1")];
        let path = "/v1/chat/completions";
        let response =
            send(self.envoy.callers, Method::POST, path, &headers, Full::new(json(model))).await.expect("a reply");
        assert_eq!(response.0.status(), StatusCode::OK);
        Events { body: response.0.into_body(), _connection: response.1 }
    }

    /// Waits until Envoy asks the picker again.
    pub(crate) async fn picks_again(&self) {
        let asked = async {
            while self.picker().questions().is_empty() {
                assert_eq!(self.chat(json("b")).await.status, StatusCode::OK);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        assert!(tokio::time::timeout(PATIENCE, asked).await.is_ok(), "the new picker is not asked");
    }

    /// Waits until requests for a model are served again.
    pub(crate) async fn serves(&self, model: &'static str) {
        let served = async {
            while self.chat(json(model)).await.upstream() != Some(model) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        assert!(tokio::time::timeout(PATIENCE, served).await.is_ok(), "requests are not served again");
    }
}

/// The endpoints for a model: its own, and then the next one.
fn list(model: &str, addresses: &[SocketAddr], recipe: Recipe) -> Vec<SocketAddr> {
    let first = match model {
        "b" => 1,
        "c" => 2,
        _ => 0,
    };
    let length = if recipe == Recipe::OriginalDst && model != "list" { 1 } else { 3 };
    (0..length).map(|place| addresses[(first + place) % addresses.len()]).collect()
}

async fn start_picker(address: SocketAddr, addresses: &[SocketAddr], recipe: Recipe) -> Running {
    let addresses = addresses.to_vec();
    let rule = Rule(Arc::new(move |question| plan(question, &addresses, recipe)));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let starting = runtime.spawn(async move {
        let picker =
            Picker::start_at(&Listen::Tcp(address), Some(Certificate::SelfSigned), Plan::Rule(rule), EXCHANGE).await;
        picker.health.set_ready(true);
        picker
    });
    let picker = starting.await.expect("a picker");
    Running { runtime: Some(runtime), picker }
}

fn plan(question: &Question, addresses: &[SocketAddr], recipe: Recipe) -> Plan {
    let model = question.body.split(|byte| *byte == b'"').nth(3).map(String::from_utf8_lossy).unwrap_or_default();
    match &*model {
        "shed" => Plan::Error(
            ApiError::gateway(StatusCode::TOO_MANY_REQUESTS, "all_busy", "every engine is busy").retry_after(7),
        ),
        "nobody" => Plan::Endpoints(Vec::new()),
        "unknown" => Plan::Error(ApiError::caller(StatusCode::NOT_FOUND, "model_not_found", "there is no such model")),
        "malformed" => Plan::Error(ApiError::caller(StatusCode::BAD_REQUEST, "malformed_json", "this is no JSON")),
        "hang" => Plan::Hang,
        model => {
            let mut list = list(model, addresses, recipe);
            list.retain(|address| question.subset.as_ref().is_none_or(|subset| subset.allows(address)));
            Plan::Endpoints(list)
        }
    }
}

/// A whole reply.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Reply {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// The upstream that answered.
    pub(crate) fn upstream(&self) -> Option<&str> {
        self.header("x-test-upstream").filter(|_| self.status == StatusCode::OK)
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }
}

/// A reply that is a stream of events.
pub(crate) struct Events {
    body: Incoming,
    _connection: Connection,
}

impl Events {
    /// The next event; `None` = the reply is complete.
    pub(crate) async fn event(&mut self) -> Option<String> {
        let frame = tokio::time::timeout(PATIENCE, self.body.frame()).await.expect("an event, or the end")?;
        let data = frame.expect("the reply was cut").into_data().expect("data");
        Some(String::from_utf8(data.to_vec()).expect("text"))
    }

    /// How the reply goes on without a further event: `cut` or `complete`.
    pub(crate) async fn error(&mut self) -> &'static str {
        match tokio::time::timeout(PATIENCE, self.body.frame()).await.expect("an end") {
            Some(Ok(_)) => "goes on",
            Some(Err(_)) => "cut",
            None => "complete",
        }
    }
}

/// A connection that ends when dropped, as that of a caller who leaves.
pub(crate) struct Connection(tokio::task::JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn send(
    address: SocketAddr,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Body<Data = Bytes, Error = Infallible> + Send + 'static,
) -> Result<(hyper::Response<Incoming>, Connection), Box<dyn std::error::Error>> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let connection = Connection(tokio::spawn(async move { drop(connection.await) }));
    let mut request = Request::builder().method(method).uri(path).header("host", "gateway");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = sender.send_request(request.body(BodyExt::boxed_unsync(body))?).await?;
    Ok((response, connection))
}

async fn request(
    address: SocketAddr,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: Bytes,
) -> Result<Reply, Box<dyn std::error::Error>> {
    let whole = async {
        let (response, _connection) = send(address, method, path, headers, Full::new(body)).await?;
        let (parts, body) = response.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(Reply { status: parts.status, headers: parts.headers, body })
    };
    tokio::time::timeout(PATIENCE, whole).await?
}
