//! The upstream: reads a body, answers fixed bytes. It also says of itself what a vLLM server says, so that gateways and
//! routers take it for one; it publishes no events.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::{BodyExt, Either, Full};
use hyper::body::{Body, Frame, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

use super::bodies::{BLOCK_SIZE, EVENTS, MODEL, STREAM, event, rendered};
use crate::args::{Asked, UpstreamArgs};
use crate::failure::Failure;

type Reply = Response<Either<Full<Bytes>, Events>>;

/// The replies, made once.
struct Replies {
    ids: Bytes,
    chat: Bytes,
    events: Arc<[Bytes]>,
}

/// The child's part: serves until it is killed.
///
/// # Errors
/// It cannot serve.
pub(crate) fn serve(args: &UpstreamArgs) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(Failure::system("start a runtime"))?;
    let replies = Arc::new(Replies {
        ids: Asked::Ids.reply().into(),
        chat: Asked::Chat.reply().into(),
        events: (0..=EVENTS).map(|number| event(number).into()).collect(),
    });
    runtime.block_on(async {
        let bound = TcpListener::bind((Ipv4Addr::LOCALHOST, args.port)).await;
        let listener = bound.map_err(Failure::system("listen"))?;
        loop {
            let (stream, _) = listener.accept().await.map_err(Failure::system("accept a connection"))?;
            stream.set_nodelay(true).map_err(Failure::system("set TCP_NODELAY"))?;
            let replies = Arc::clone(&replies);
            tokio::spawn(async move {
                let service = service_fn(move |request| answer(Arc::clone(&replies), request));
                // A proxy may end a connection whenever it likes.
                let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
            });
        }
    })
}

async fn answer(replies: Arc<Replies>, request: Request<Incoming>) -> Result<Reply, hyper::Error> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let path = parts.uri.path();
    if parts.method != Method::POST {
        return Ok(said(path));
    }
    Ok(match path {
        "/v1/completions" => json(replies.ids.clone()),
        "/v1/chat/completions" if body.windows(STREAM.len()).any(|bytes| bytes == STREAM) => {
            let events = Events { events: Arc::clone(&replies.events), next: 0, rests: false };
            with_type("text/event-stream; charset=utf-8", Either::Right(events))
        }
        "/v1/chat/completions" => json(replies.chat.clone()),
        // An empty object is a question whether there is a renderer.
        "/v1/chat/completions/render" if body.len() > 2 => json(rendered(&body).into()),
        "/v1/chat/completions/render" => refused(StatusCode::BAD_REQUEST),
        _ => refused(StatusCode::NOT_FOUND),
    })
}

/// What a server says of itself.
fn said(path: &str) -> Reply {
    let text = match path {
        "/v1/models" => format!(
            r#"{{"object":"list","data":[{{"id":"{MODEL}","object":"model","created":1700000000,"owned_by":"vllm","max_model_len":32768}}]}}"#
        ),
        "/version" => r#"{"version":"0.32.0"}"#.to_owned(),
        "/kv_event_sources" => r#"{"0":{"publisher":"null"}}"#.to_owned(),
        "/metrics" => {
            let labels = format!(r#"block_size="{BLOCK_SIZE}",enable_prefix_caching="True""#);
            format!("vllm:cache_config_info{{{labels}}} 1.0\n")
        }
        "/health" | "/health_generate" => String::new(),
        _ => return refused(StatusCode::NOT_FOUND),
    };
    json(text.into())
}

fn json(body: Bytes) -> Reply {
    with_type("application/json", Either::Left(Full::new(body)))
}

fn with_type(kind: &'static str, body: Either<Full<Bytes>, Events>) -> Reply {
    let mut reply = Response::new(body);
    reply.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
    reply
}

fn refused(status: StatusCode) -> Reply {
    let mut reply = json(Bytes::from_static(b"{}"));
    *reply.status_mut() = status;
    reply
}

/// Events that are sent one by one, without a pause.
struct Events {
    events: Arc<[Bytes]>,
    next: usize,
    rests: bool,
}

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        // Whoever finds nothing more to send writes what it has: each event becomes a write of its own.
        if std::mem::replace(&mut self.rests, false) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let event = self.events.get(self.next).cloned();
        (self.next, self.rests) = (self.next + 1, true);
        Poll::Ready(event.map(|event| Ok(Frame::data(event))))
    }
}
