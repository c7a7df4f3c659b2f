//! As much of OpenAI's completions API as an example needs, over hyper: `POST /v1/completions` with a `prompt` (a text or
//! token ids), `max_tokens` and `session`, answered as server-sent events.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http_body_util::{BodyExt as _, Either, Full, Limited};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{Receiver, channel};

use crate::completion::{Asked, Chunk, Gateway};

const BODY_BYTES_MAX: usize = 16 << 20;
const OUTPUT_TOKENS_MAX: u64 = 1 << 16;
/// What one connection may take to say what it wants.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Rest after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Chunks that wait for a slow caller.
const CHUNKS_MAX: usize = 16;

type Answer = Response<Either<Full<Bytes>, Events>>;

/// Serves until the process ends.
pub(crate) async fn serve(listener: TcpListener, gateway: Arc<Gateway>) -> ! {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Short of descriptors or memory: connections that end give some back.
                eprintln!("cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let gateway = Arc::clone(&gateway);
        tokio::spawn(async move {
            let service = service_fn(|request| answer(request, Arc::clone(&gateway)));
            let mut builder = http1::Builder::new();
            builder.timer(TokioTimer::new()).header_read_timeout(REQUEST_TIMEOUT);
            // A caller that hangs up is no error of the gateway's.
            drop(builder.serve_connection(TokioIo::new(stream), service).await);
        });
    }
}

async fn answer(request: Request<Incoming>, gateway: Arc<Gateway>) -> Result<Answer, Infallible> {
    if (request.method(), request.uri().path()) != (&Method::POST, "/v1/completions") {
        return Ok(refusal(StatusCode::NOT_FOUND, "POST /v1/completions is all there is"));
    }
    let body = tokio::time::timeout(REQUEST_TIMEOUT, Limited::new(request.into_body(), BODY_BYTES_MAX).collect()).await;
    let Ok(Ok(body)) = body else { return Ok(refusal(StatusCode::BAD_REQUEST, "the body is too large or late")) };
    let asked = match asked(&body.to_bytes()) {
        Ok(asked) => asked,
        Err(why) => return Ok(refusal(StatusCode::BAD_REQUEST, why)),
    };
    let head = json!({"id": asked.id, "object": "text_completion", "model": gateway.model});
    let (sender, mut chunks) = channel(CHUNKS_MAX);
    tokio::spawn(async move { gateway.complete(&asked, &sender).await });
    // Only once it runs somewhere is it known that it can be answered.
    match chunks.recv().await {
        Some(Chunk::Failed(why)) => Ok(refusal(StatusCode::SERVICE_UNAVAILABLE, &why)),
        None => Ok(refusal(StatusCode::INTERNAL_SERVER_ERROR, "the request was dropped")),
        first => {
            let mut response = Response::new(Either::Right(Events { head, first, chunks, is_over: false }));
            response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static("text/event-stream"));
            Ok(response)
        }
    }
}

fn refusal(status: StatusCode, why: &str) -> Answer {
    let mut response = Response::new(Either::Left(Full::from(json!({"error": {"message": why}}).to_string())));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static("application/json"));
    response
}

fn asked(body: &[u8]) -> Result<Asked, &'static str> {
    let asked: Value = serde_json::from_slice(body).map_err(|_| "the body is no JSON")?;
    let token = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    let prompt = match &asked["prompt"] {
        // A tokenizer is beside the point here: a byte is a token.
        Value::String(text) => Some(text.bytes().map(u32::from).collect()),
        Value::Array(ids) => ids.iter().map(token).collect(),
        _ => None,
    };
    let max_tokens = asked["max_tokens"].as_u64().unwrap_or(16).clamp(1, OUTPUT_TOKENS_MAX);
    Ok(Asked {
        id: format!("cmpl-{:032x}", rand::random::<u128>()),
        session: asked["session"].as_str().map(str::to_owned),
        prompt: prompt.ok_or("`prompt` is a text or a list of token ids")?,
        // What a model would think of.
        output: (0..max_tokens as u32).map(|at| at % 50_000).collect(),
    })
}

/// The body of an answer: one event a chunk. Dropped when the caller hangs up, and the channel with it.
struct Events {
    head: Value,
    first: Option<Chunk>,
    chunks: Receiver<Chunk>,
    is_over: bool,
}

impl Events {
    fn event(&mut self, chunk: Chunk) -> Bytes {
        let mut event = self.head.clone();
        match chunk {
            Chunk::Tokens { tokens, worker, is_fallback, cached_blocks, is_last } => {
                let finish_reason = is_last.then_some("length");
                event["choices"] = json!([{"index": 0, "tokens": tokens, "finish_reason": finish_reason}]);
                let decided_by = if is_fallback { "fallback" } else { "daemon" };
                event["kvrouted"] =
                    json!({"worker": worker.id.0, "decided_by": decided_by, "cached_blocks": cached_blocks});
            }
            Chunk::Failed(why) => event["error"] = json!({"message": why}),
        }
        format!("data: {event}\n\n").into()
    }
}

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let chunk = match self.first.take() {
            Some(first) => Some(first),
            None if self.is_over => return Poll::Ready(None),
            None => ready!(self.chunks.poll_recv(cx)),
        };
        let bytes = match chunk {
            Some(chunk) => self.event(chunk),
            None => {
                self.is_over = true;
                Bytes::from_static(b"data: [DONE]\n\n")
            }
        };
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }
}
