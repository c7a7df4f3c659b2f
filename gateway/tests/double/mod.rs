//! A double of an engine's HTTP server, which answers as a test says and records what it was asked.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// How the double answers.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    Json(u16, String),
    Redirect(String),
    /// Accepts the request and never answers.
    Hang,
    /// Answers 200 and a body without end.
    Endless,
    /// Answers 200 and the beginning of a body, and then nothing.
    Stall(String),
    /// Claims a length that it never sends.
    Long(u64),
    /// Closes the connection.
    Cut,
    /// Answers after a while.
    Slow(Duration, String),
}

impl Reply {
    pub(crate) fn ok(json: impl Into<String>) -> Self {
        Self::Json(200, json.into())
    }
}

/// What the double was asked.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

#[derive(Default)]
struct State {
    replies: Mutex<HashMap<String, Reply>>,
    asked: Mutex<Vec<Asked>>,
    connections: AtomicUsize,
}

pub(crate) struct Double {
    pub(crate) url: String,
    pub(crate) port: u16,
    state: Arc<State>,
    server: JoinHandle<()>,
}

impl Drop for Double {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Double {
    /// A server on a free port. Paths without a reply are answered 404.
    pub(crate) async fn start(replies: impl IntoIterator<Item = (&'static str, Reply)>) -> Self {
        Self::start_with(replies, None).await
    }

    pub(crate) async fn start_with(
        replies: impl IntoIterator<Item = (&'static str, Reply)>,
        tls: Option<tokio_rustls::TlsAcceptor>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let state = Arc::new(State::default());
        state.replies.lock().extend(replies.into_iter().map(|(path, reply)| (path.to_owned(), reply)));
        let server = tokio::spawn(accept(listener, state.clone(), tls));
        Self { url: format!("{scheme}://127.0.0.1:{port}"), port, state, server }
    }

    pub(crate) fn set(&self, path: &str, reply: Reply) {
        self.state.replies.lock().insert(path.to_owned(), reply);
    }

    pub(crate) fn remove(&self, path: &str) {
        self.state.replies.lock().remove(path);
    }

    pub(crate) fn asked(&self, path: &str) -> Vec<Asked> {
        self.state.asked.lock().iter().filter(|asked| asked.path == path).cloned().collect()
    }

    pub(crate) fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }
}

async fn accept(listener: TcpListener, state: Arc<State>, tls: Option<tokio_rustls::TlsAcceptor>) {
    // The tasks end with the server, and with them its connections.
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else { return };
        state.connections.fetch_add(1, Ordering::SeqCst);
        let (state, tls) = (state.clone(), tls.clone());
        tasks.spawn(async move {
            match tls {
                Some(tls) => {
                    if let Ok(stream) = tls.accept(stream).await {
                        serve(stream, state).await;
                    }
                }
                None => serve(stream, state).await,
            }
        });
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, state: Arc<State>) {
    let service = service_fn(move |request| answer(state.clone(), request));
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

fn full(status: u16, text: String) -> Response<Body> {
    let body = Full::new(Bytes::from(text)).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).expect("a status");
    response
}

fn streamed(first: String, more: bool) -> Response<Body> {
    let first = stream::iter([Ok(Frame::data(Bytes::from(first)))]);
    let rest = stream::unfold(more, |more| async move {
        if !more {
            std::future::pending::<()>().await;
        }
        tokio::task::yield_now().await;
        Some((Ok(Frame::data(Bytes::from(vec![b' '; 64 << 10]))), more))
    });
    Response::new(StreamBody::new(futures_util::StreamExt::chain(first, rest)).boxed_unsync())
}

async fn answer(state: Arc<State>, request: Request<Incoming>) -> Result<Response<Body>, std::io::Error> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.to_string();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let reply = state.replies.lock().get(&path).cloned();
    state.asked.lock().push(Asked { path, headers: parts.headers, body });
    Ok(match reply {
        None => full(404, r#"{"detail": "Not Found"}"#.to_owned()),
        Some(Reply::Json(status, text)) => full(status, text),
        Some(Reply::Redirect(to)) => {
            let mut response = full(307, String::new());
            response.headers_mut().insert("location", to.parse().expect("a header"));
            response
        }
        Some(Reply::Hang) => std::future::pending().await,
        Some(Reply::Endless) => streamed("[".to_owned(), true),
        Some(Reply::Stall(text)) => streamed(text, false),
        Some(Reply::Long(length)) => {
            let mut response = streamed("{".to_owned(), false);
            response.headers_mut().insert("content-length", length.into());
            response
        }
        Some(Reply::Cut) => return Err(std::io::Error::other("cut")),
        Some(Reply::Slow(rest, text)) => {
            tokio::time::sleep(rest).await;
            full(200, text)
        }
    })
}

/// A list of models as vLLM's: base models, then adapters of the first.
pub(crate) fn models(owner: &str, bases: &[&str], adapters: &[&str]) -> String {
    let base = |id: &&str| {
        serde_json::json!({"id": id, "object": "model", "created": 5, "owned_by": owner, "root": "/weights",
            "parent": null, "max_model_len": 4096})
    };
    let adapter = |id: &&str| {
        let root = format!("/adapters/{id}");
        serde_json::json!({"id": id, "owned_by": owner, "root": root, "parent": bases[0]})
    };
    let data: Vec<_> = bases.iter().map(base).chain(adapters.iter().map(adapter)).collect();
    serde_json::json!({"object": "list", "data": data}).to_string()
}

/// The replies of a vLLM server with everything switched on.
pub(crate) fn vllm() -> Vec<(&'static str, Reply)> {
    let refused = || Reply::Json(400, r#"{"error": {"message": "messages: field required"}}"#.to_owned());
    let metrics = "vllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"True\",engine=\"0\"} 1.0\n";
    let sources = r#"{"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558", "topic": "kv"}}"#;
    vec![
        ("/v1/models", Reply::ok(models("vllm", &["m"], &[]))),
        ("/version", Reply::ok(r#"{"version": "0.32.0"}"#)),
        ("/kv_event_sources", Reply::ok(sources)),
        ("/metrics", Reply::ok(metrics)),
        ("/v1/chat/completions/render", refused()),
        ("/v1/completions/render", refused()),
        ("/v1/responses/render", refused()),
        ("/v1/messages/render", refused()),
    ]
}
