//! The HTTP face of a simulated engine: as much of vLLM's API as the gateway uses.
//!
//! | path | what it does here |
//! |---|---|
//! | `/health`, `/version`, `/v1/models`, `/metrics`, `/kv_event_sources` | say what the engine is |
//! | `/tokenize` | a text or messages, by the toy's rule |
//! | `/v1/chat/completions/render`, `/v1/completions/render` | the prompt's tokens, without running it |
//! | `/v1/chat/completions`, `/v1/completions` | run it: as a stream or in one piece, with `cached_tokens` |

mod completion;
mod prompt;
mod replies;

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

use self::prompt::CallKind;
use super::engine::SimulatedEngine;
use crate::limits::{ACCEPT_PAUSE, DEMO_BODY_BYTES_MAX};

type Body = BoxBody<Bytes, io::Error>;

/// A simulated engine with its HTTP server.
pub struct Face {
    address: SocketAddr,
    shared: Arc<Shared>,
    server: AbortHandle,
    /// Closed when the server has ended.
    serving: watch::Receiver<()>,
}

struct Shared {
    model: String,
    engine: SimulatedEngine,
}

impl std::fmt::Debug for Face {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Face").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Face {
    /// Starts an engine that serves `model`, with its socket in `folder`, and its HTTP server at `listen`. Both end
    /// when this value is dropped.
    ///
    /// # Errors
    /// The address cannot be bound, or the engine's process cannot be started.
    pub async fn start(
        kvrouted: &Path,
        folder: &Path,
        name: &str,
        model: &str,
        listen: SocketAddr,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(listen).await?;
        let address = listener.local_addr()?;
        let engine = SimulatedEngine::start(kvrouted, folder, name).await?;
        let shared = Arc::new(Shared { model: model.to_owned(), engine });
        let (is_serving, serving) = watch::channel(());
        let serves = serve(listener, Arc::clone(&shared));
        let server = tokio::spawn(async move {
            serves.await;
            drop(is_serving);
        });
        Ok(Self { address, shared, server: server.abort_handle(), serving })
    }

    /// Its address.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where the engine publishes its events.
    #[must_use]
    pub fn events(&self) -> &str {
        self.shared.engine.endpoint()
    }

    /// Its URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Ends it as SIGKILL ends a server: requests under way are cut off.
    pub fn kill(&self) {
        self.server.abort();
        self.shared.engine.kill();
    }

    /// Ends it, and waits until its address is free.
    pub async fn stop(&self) {
        self.kill();
        let mut serving = self.serving.clone();
        // The sender is dropped with the server's task.
        while serving.changed().await.is_ok() {}
    }
}

impl Drop for Face {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Serves until it is aborted; its connections end with it.
async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        let Ok((stream, _)) = accepted else {
            // Short of file descriptors: connections that end give some back.
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            let service = service_fn(|request| answer(request, Arc::clone(&shared)));
            let mut builder = http1::Builder::new();
            // An error is a caller that hung up, or an engine that ended.
            drop(builder.timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), service).await);
        });
    }
}

/// Answers a request. An error closes the connection without an answer, as a server that dies does.
async fn answer(request: Request<Incoming>, shared: Arc<Shared>) -> io::Result<Response<Body>> {
    let path = request.uri().path().to_owned();
    match (request.method(), path.as_str()) {
        (&Method::GET, "/health") => Ok(json(StatusCode::OK, String::new())),
        (&Method::GET, "/version") => Ok(json(StatusCode::OK, replies::version())),
        (&Method::GET, "/v1/models") => Ok(json(StatusCode::OK, replies::models(&shared.model))),
        (&Method::GET, "/metrics") => Ok(text("text/plain; version=0.0.4", replies::metrics())),
        (&Method::GET, "/kv_event_sources") => {
            Ok(json(StatusCode::OK, replies::event_sources(shared.engine.endpoint())))
        }
        (&Method::POST, path) => match CallKind::of(path) {
            Some(kind) => {
                let Some(body) = read(request.into_body()).await else {
                    return Ok(refusal(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large or was cut off"));
                };
                completion::answer(kind, &body, &shared).await
            }
            None => Ok(json(StatusCode::NOT_FOUND, replies::not_found())),
        },
        _ => Ok(json(StatusCode::NOT_FOUND, replies::not_found())),
    }
}

/// A body; `None` = it is too large or was cut off. It is read to its end all the same, as vLLM's server does: who closes
/// a connection on a body that is still being sent is not heard.
async fn read(mut body: Incoming) -> Option<Bytes> {
    let (mut whole, mut bytes) = (BytesMut::new(), 0);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.ok()?.into_data() else { continue };
        bytes += data.len();
        if bytes <= DEMO_BODY_BYTES_MAX {
            whole.extend_from_slice(&data);
        }
    }
    (bytes <= DEMO_BODY_BYTES_MAX).then(|| whole.freeze())
}

fn json(status: StatusCode, body: String) -> Response<Body> {
    let mut response = text("application/json", body);
    *response.status_mut() = status;
    response
}

fn text(kind: &'static str, body: String) -> Response<Body> {
    let mut response = Response::new(Full::from(body).map_err(|never| match never {}).boxed());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn refusal(status: StatusCode, why: &str) -> Response<Body> {
    json(status, replies::error(status.as_u16(), why))
}
