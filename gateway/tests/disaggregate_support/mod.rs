//! Doubles of prefill and decode engines: HTTP servers that check what their real models check, and share the blocks
//! that go from one to the other.
#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod sglang;
pub(crate) mod vllm;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};

pub(crate) type Body = UnsyncBoxBody<Bytes, Infallible>;
/// The connection ends without an answer.
#[derive(Debug, thiserror::Error)]
#[error("the engine died")]
pub(crate) struct Dead;
pub(crate) type Answer = Result<Response<Body>, Dead>;
pub(crate) type Handling = Pin<Box<dyn Future<Output = Answer> + Send>>;

/// What goes wrong with requests for inference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing.
    #[default]
    None,
    /// The connection ends without an answer.
    Close,
    /// The connection ends after the blocks were read or stored, without an answer.
    CloseAtTheEnd,
    /// The answer is this status.
    Status(u16),
    /// No answer comes.
    Hang,
}

/// A request for inference as it came.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Seen {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("text")
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

/// What every double records.
#[derive(Default)]
pub(crate) struct Record {
    seen: Mutex<Vec<Seen>>,
    fault: Mutex<Fault>,
    left: AtomicUsize,
}

/// A server, and what it was asked.
pub(crate) struct Double {
    pub(crate) address: SocketAddr,
    record: Arc<Record>,
    task: JoinHandle<()>,
}

impl Drop for Double {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Double {
    /// A server. `about` answers what the engine says of itself, `infer` the rest.
    pub(crate) async fn start(
        about: impl Fn(&str) -> Option<Value> + Send + Sync + 'static,
        infer: impl Fn(Seen, Fault) -> Handling + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let record = Arc::new(Record::default());
        let (about, infer, kept) = (Arc::new(about), Arc::new(infer), Arc::clone(&record));
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                let (about, infer, record) = (Arc::clone(&about), Arc::clone(&infer), Arc::clone(&kept));
                let service = service_fn(move |request: Request<Incoming>| {
                    let (about, infer, record) = (Arc::clone(&about), Arc::clone(&infer), Arc::clone(&record));
                    async move { serve(request, &*about, &*infer, &record).await }
                });
                connections
                    .spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { address, record, task }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What goes wrong from now on.
    pub(crate) fn fault(&self, fault: Fault) {
        *self.record.fault.lock() = fault;
    }

    /// Ends the server: its port refuses connections, and requests under way break off.
    pub(crate) async fn stop(&mut self) {
        self.task.abort();
        // The end of an aborted task is an error.
        let _ = (&mut self.task).await;
    }

    /// The requests for inference so far.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.record.seen.lock().clone()
    }

    /// How many callers left before the end of their answer.
    pub(crate) fn left(&self) -> usize {
        self.record.left.load(Ordering::SeqCst)
    }
}

/// Counts a caller that leaves.
struct Leaving<'a>(&'a Record, bool);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if !self.1 {
            self.0.left.fetch_add(1, Ordering::SeqCst);
        }
    }
}

async fn serve(
    request: Request<Incoming>,
    about: &(dyn Fn(&str) -> Option<Value> + Send + Sync),
    infer: &(dyn Fn(Seen, Fault) -> Handling + Send + Sync),
    record: &Record,
) -> Answer {
    let path = request.uri().path().to_owned();
    if request.method() == Method::GET {
        return Ok(about(&path).map_or_else(|| json(404, "{}"), |value| json(200, &value.to_string())));
    }
    if path.ends_with("/render") || path == "/tokenize" {
        return Ok(json(404, "{}"));
    }
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(|_| Dead)?.to_bytes();
    let seen = Seen { path, headers: parts.headers, body };
    record.seen.lock().push(seen.clone());
    let fault = *record.fault.lock();
    let mut leaving = Leaving(record, false);
    let answer = match fault {
        Fault::Close => Err(Dead),
        Fault::Status(status) => Ok(json(status, &error("the engine fails"))),
        Fault::Hang => std::future::pending().await,
        Fault::None | Fault::CloseAtTheEnd => infer(seen, fault).await,
    };
    leaving.1 = true;
    answer
}

/// An error as both servers write it.
pub(crate) fn error(message: &str) -> String {
    serde_json::json!({"error": {"message": message, "type": "BadRequestError", "code": 400}}).to_string()
}

pub(crate) fn json(status: u16, text: &str) -> Response<Body> {
    let body = Full::from(text.to_owned()).boxed_unsync();
    let response = Response::builder().status(status).header("content-type", "application/json").body(body);
    response.expect("a response")
}

/// A stream of events, with a pause between them.
pub(crate) fn events(events: Vec<String>) -> Response<Body> {
    let frames = futures_util::stream::unfold(events.into_iter(), |mut events| async move {
        let event = events.next()?;
        tokio::time::sleep(Duration::from_millis(2)).await;
        Some((Ok::<_, Infallible>(Frame::data(Bytes::from(event))), events))
    });
    let body = StreamBody::new(frames).boxed_unsync();
    let response = Response::builder().header("content-type", "text/event-stream; charset=utf-8").body(body);
    response.expect("a response")
}

/// The words of an output, and how they go to the caller.
pub(crate) struct Output {
    pub(crate) words: Vec<&'static str>,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
}

const WORDS: [&str; 8] = ["a", "prefix", "is", "computed", "once", "and", "then", "shared"];

impl Output {
    /// As many words as the body allows.
    pub(crate) fn of(body: &Value, cached_tokens: u64) -> Self {
        let limits = ["max_completion_tokens", "max_tokens"].iter().filter_map(|field| body[*field].as_u64());
        let most = limits.chain(body["sampling_params"]["max_new_tokens"].as_u64()).min().unwrap_or(8);
        let words = WORDS.iter().copied().take(usize::try_from(most).expect("few")).collect();
        Self { words, prompt_tokens: 40, cached_tokens }
    }

    /// `usage` of OpenAI's replies.
    pub(crate) fn usage(&self) -> Value {
        let completion = self.words.len() as u64;
        serde_json::json!({
            "prompt_tokens": self.prompt_tokens, "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        })
    }

    /// The reply of a path, whole or as a stream; `more` is the text of further members of a whole one.
    pub(crate) fn reply(&self, path: &str, body: &Value, more: &str) -> Response<Body> {
        let text = self.words.join(" ");
        let is_chat = path == "/v1/chat/completions";
        if body["stream"] != true {
            let choice = match is_chat {
                true => serde_json::json!({"index": 0, "message": {"role": "assistant", "content": text}}),
                false => serde_json::json!({"index": 0, "text": text}),
            };
            let usage = self.usage();
            return json(200, &format!(r#"{{"id":"1","choices":[{choice}],"usage":{usage}{more}}}"#));
        }
        let event = |value: Value| format!("data: {value}\n\n");
        let word = |word: &&str| match is_chat {
            true => event(serde_json::json!({"id": "1", "choices": [{"index": 0, "delta": {"content": word}}]})),
            false => event(serde_json::json!({"id": "1", "choices": [{"index": 0, "text": word}]})),
        };
        let mut all: Vec<String> = self.words.iter().map(word).collect();
        if body["stream_options"]["include_usage"] == true {
            all.push(event(serde_json::json!({"id": "1", "choices": [], "usage": self.usage()})));
        }
        all.push("data: [DONE]\n\n".into());
        events(all)
    }
}
