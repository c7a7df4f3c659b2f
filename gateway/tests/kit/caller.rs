//! A caller: sends JSON and reads the reply, whole or as server-sent events.

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::{HeaderMap, Request, Response};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

/// A reply that was read to its end.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// The status.
    pub(crate) status: u16,
    /// The headers.
    pub(crate) headers: HeaderMap,
    /// The body as JSON; of a stream, the last event with a usage.
    pub(crate) body: Value,
    /// The generated text.
    pub(crate) text: String,
    /// Whether a stream came to its `[DONE]`.
    pub(crate) is_done: bool,
}

impl Answer {
    /// A header's value as a number.
    #[must_use]
    pub(crate) fn number(&self, header: &str) -> Option<u64> {
        self.headers.get(header)?.to_str().ok()?.parse().ok()
    }

    /// The engine that served, from `x-kvrouted-worker: ID/RANK`.
    #[must_use]
    pub(crate) fn engine(&self) -> Option<u64> {
        self.headers.get("x-kvrouted-worker")?.to_str().ok()?.split('/').next()?.parse().ok()
    }

    /// `usage.prompt_tokens`
    #[must_use]
    pub(crate) fn prompt_tokens(&self) -> Option<u64> {
        self.body["usage"]["prompt_tokens"].as_u64()
    }

    /// `usage.completion_tokens`
    #[must_use]
    pub(crate) fn completion_tokens(&self) -> Option<u64> {
        self.body["usage"]["completion_tokens"].as_u64()
    }

    /// `usage.prompt_tokens_details.cached_tokens`
    #[must_use]
    pub(crate) fn cached_tokens(&self) -> Option<u64> {
        self.body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()
    }
}

/// Sends requests to one server.
#[derive(Clone)]
pub(crate) struct Caller {
    client: Client<HttpConnector, Full<Bytes>>,
    url: String,
}

impl Caller {
    /// A caller of the server at `url`.
    #[must_use]
    pub(crate) fn of(url: &str) -> Self {
        Self { client: Client::builder(TokioExecutor::new()).build_http(), url: url.to_owned() }
    }

    /// Sends a body and returns as soon as the headers came. Dropping the response hangs up.
    pub(crate) async fn send(
        &self,
        path: &str,
        body: &Value,
        headers: &[(&str, &str)],
    ) -> Result<Response<Incoming>, String> {
        let mut request = Request::post(format!("{}{path}", self.url)).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::from(body.to_string())).map_err(|error| error.to_string())?;
        self.client.request(request).await.map_err(|error| error.to_string())
    }

    /// Sends a body and reads the whole reply; an error if the connection broke.
    pub(crate) async fn try_post(&self, path: &str, body: &Value, headers: &[(&str, &str)]) -> Result<Answer, String> {
        let response = self.send(path, body, headers).await?;
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.map_err(|error| error.to_string())?.to_bytes();
        let text = String::from_utf8_lossy(&bytes);
        let (status, headers) = (parts.status.as_u16(), parts.headers);
        let is_stream =
            headers.get("content-type").is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        if is_stream {
            return Ok(streamed(status, headers, &text));
        }
        let body: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let choice = &body["choices"][0];
        let text = choice["message"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default().to_owned();
        Ok(Answer { status, headers, body, text, is_done: true })
    }

    /// The text at a path.
    pub(crate) async fn text(&self, path: &str) -> String {
        let url = format!("{}{path}", self.url).parse().expect("a path");
        let body = self.client.get(url).await.expect("a reply").into_body();
        String::from_utf8(body.collect().await.expect("a body").to_bytes().into()).expect("text")
    }

    /// As [`Caller::try_post`], where the connection must not break.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.try_post(path, body, &[]).await.expect("a reply")
    }

    /// A chat in one piece.
    pub(crate) async fn chat(&self, messages: &[Value]) -> Answer {
        self.post("/v1/chat/completions", &chat(messages, false)).await
    }

    /// A chat as a stream.
    pub(crate) async fn stream(&self, messages: &[Value]) -> Answer {
        self.post("/v1/chat/completions", &chat(messages, true)).await
    }
}

/// The body of a chat.
#[must_use]
pub(crate) fn chat(messages: &[Value], stream: bool) -> Value {
    let mut body = json!({"model": "demo", "messages": messages, "stream": stream});
    if stream {
        body["stream_options"] = json!({"include_usage": true});
    }
    body
}

fn streamed(status: u16, headers: HeaderMap, text: &str) -> Answer {
    let (mut body, mut generated, mut is_done) = (Value::Null, String::new(), false);
    for data in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
        is_done |= data == "[DONE]";
        let Ok(event) = serde_json::from_str::<Value>(data) else { continue };
        let choice = &event["choices"][0];
        generated += choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        if !event["usage"].is_null() {
            body = event;
        }
    }
    Answer { status, headers, body, text: generated, is_done }
}
