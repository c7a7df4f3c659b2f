//! Request bodies: received within limits of size and time, and read as JSON.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::memory::{HttpMemory, PERMIT_BYTES, Permits};
use super::reply::Refusal;
use crate::error::{Error, Kind};
use crate::limits::{HTTP_BODY_MS_MAX, HTTP_JSON_DEPTH_MAX};
use crate::metrics::{CounterSet, HttpCounter};
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use hyper::body::Body as _;
use serde::de::DeserializeOwned;
use serde_json::error::Category;

/// The limits of request bodies.
#[derive(Debug)]
pub(super) struct Bodies {
    bytes_max: u64,
    /// Memory for bodies in transfer.
    memory: Permits,
    time: Duration,
    counters: Arc<CounterSet<HttpCounter>>,
}

impl Bodies {
    /// Bodies of up to `bytes_max` bytes each.
    pub(super) fn new(bytes_max: u64, memory: &HttpMemory, counters: Arc<CounterSet<HttpCounter>>) -> Self {
        let memory = memory.bodies.clone();
        Self { bytes_max, memory, time: Duration::from_millis(HTTP_BODY_MS_MAX), counters }
    }

    /// Reads the JSON of a request. Ignores fields that `T` does not have.
    pub(super) async fn read<T: DeserializeOwned>(&self, request: Request) -> Result<T, Refusal> {
        let (head, body) = request.into_parts();
        if !is_json(&head.headers) {
            self.counters.bump(HttpCounter::BodiesUnusable);
            let error = Error::new(
                Kind::Unsupported,
                "the Content-Type of the body is not JSON",
                "set Content-Type: application/json",
            );
            return Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, error));
        }
        let announced = body.size_hint().upper();
        if announced.is_some_and(|bytes| bytes > self.bytes_max) {
            return Err(self.oversized());
        }
        // A body of unannounced size may become as large as the limit.
        let permits = announced.unwrap_or(self.bytes_max).div_ceil(PERMIT_BYTES as u64);
        let room = tokio::time::timeout(self.time, self.memory.free.acquire_many(permits as u32)).await;
        let Ok(Ok(_room)) = room else { return Err(self.crowded()) };
        let Ok(received) = tokio::time::timeout(self.time, self.receive(body)).await else { return Err(self.late()) };
        let received = received?;
        if depth_of(&received) > HTTP_JSON_DEPTH_MAX {
            self.counters.bump(HttpCounter::BodiesUnusable);
            let message = format!("the body is nested deeper than {HTTP_JSON_DEPTH_MAX}");
            let error = Error::new(Kind::Malformed, message, "leave out undocumented fields");
            return Err(Refusal::new(StatusCode::BAD_REQUEST, error));
        }
        serde_json::from_slice(&received).map_err(|error| self.unusable(&error))
    }

    async fn receive(&self, mut body: Body) -> Result<Vec<u8>, Refusal> {
        let mut bytes = Vec::new();
        while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            let unanswered = |cause: axum::Error| {
                let error = Error::new(Kind::Connection, "the connection ended within the body", "send it again")
                    .caused_by(cause);
                Refusal::new(StatusCode::BAD_REQUEST, error)
            };
            // Trailers are ignored.
            let Ok(part) = frame.map_err(unanswered)?.into_data() else { continue };
            if (bytes.len() + part.len()) as u64 > self.bytes_max {
                return Err(self.oversized());
            }
            bytes.extend_from_slice(&part);
        }
        Ok(bytes)
    }

    fn oversized(&self) -> Refusal {
        self.counters.bump(HttpCounter::BodiesOversized);
        let message = format!("the body is larger than {} bytes", self.bytes_max);
        Error::new(Kind::Oversized, message, "send a shorter prompt, or raise http.body_bytes_max").into()
    }

    fn late(&self) -> Refusal {
        self.counters.bump(HttpCounter::BodiesLate);
        let message = format!("the body did not arrive within {HTTP_BODY_MS_MAX} ms");
        Refusal::new(StatusCode::REQUEST_TIMEOUT, Error::new(Kind::Connection, message, "send it faster"))
    }

    fn crowded(&self) -> Refusal {
        self.counters.bump(HttpCounter::BodiesCrowded);
        let message = format!("{} bytes of other bodies are being received", self.memory.bytes_max());
        Error::new(Kind::Overloaded, message, "send it again later").into()
    }

    fn unusable(&self, error: &serde_json::Error) -> Refusal {
        self.counters.bump(HttpCounter::BodiesUnusable);
        let (status, remedy) = match error.classify() {
            Category::Data => (StatusCode::UNPROCESSABLE_ENTITY, "send the fields with the documented types"),
            _ => (StatusCode::BAD_REQUEST, "send one JSON object"),
        };
        Refusal::new(status, Error::new(Kind::Malformed, format!("the body cannot be read: {error}"), remedy))
    }
}

/// The nesting of arrays and objects. For text that is no JSON it is any number.
fn depth_of(json: &[u8]) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let (mut in_text, mut is_escaped) = (false, false);
    for byte in json {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if in_text => is_escaped = true,
            b'"' => in_text = !in_text,
            b'[' | b'{' if !in_text => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' if !in_text => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

/// Whether the content type is JSON. A browser sends that type for a page of another origin only after a preflight
/// request, which this port does not grant; [`browser_guard`](super::browser_guard) refuses pages in any case.
fn is_json(headers: &HeaderMap) -> bool {
    let Some(text) = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()) else { return false };
    let essence = text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let subtype = essence.strip_prefix("application/").unwrap_or_default();
    subtype == "json" || subtype.ends_with("+json")
}

#[cfg(test)]
mod tests {
    use axum::response::IntoResponse as _;
    use serde::Deserialize;

    use super::*;
    use crate::limits::HTTP_BODIES_BYTES_MAX;

    #[derive(Debug, Deserialize)]
    struct Numbers {
        numbers: Vec<u32>,
    }

    fn bodies(bytes_max: u64) -> Bodies {
        Bodies::new(bytes_max, &HttpMemory::default(), Arc::default())
    }

    async fn read(bodies: &Bodies, kind: &str, body: impl Into<Body>) -> Result<Vec<u32>, u16> {
        let request = Request::builder().header(header::CONTENT_TYPE, kind).body(body.into()).unwrap();
        let read = bodies.read::<Numbers>(request).await;
        read.map(|numbers| numbers.numbers).map_err(|refusal| refusal.into_response().status().as_u16())
    }

    #[test]
    fn brackets_in_strings_do_not_nest() {
        for (json, depth) in
            [("1", 0), ("[[{}],[]]", 3), (r#"{"a[[[":"]\"[[[\\"}"#, 1), (r#"["\\",[]]"#, 2), ("]]][", 1)]
        {
            assert_eq!(depth_of(json.as_bytes()), depth, "{json}");
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn the_status_shows_the_problem_of_a_body() {
        let bodies = bodies(64 << 10);
        let deep = |depth: usize| format!("{{\"numbers\":[1],\"x\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
        type Row = (&'static str, String, Result<Vec<u32>, u16>);
        let rows: [Row; 9] = [
            ("application/json", r#"{"numbers":[1,2],"other":{}}"#.into(), Ok(vec![1, 2])),
            ("Application/JSON; charset=utf-8", r#"{"numbers":[]}"#.into(), Ok(vec![])),
            ("text/plain", r#"{"numbers":[]}"#.into(), Err(415)),
            ("application/json", r#"{"numbers":[-1]}"#.into(), Err(422)),
            ("application/json", "{}".into(), Err(422)),
            ("application/json", r#"{"numbers":["#.into(), Err(400)),
            ("application/json", deep(HTTP_JSON_DEPTH_MAX - 1), Ok(vec![1])),
            ("application/json", deep(HTTP_JSON_DEPTH_MAX), Err(400)),
            ("application/json", " ".repeat(65 << 10), Err(413)),
        ];
        for (kind, body, expected) in rows {
            assert_eq!(read(&bodies, kind, body.clone()).await, expected, "{kind} {:.60}", body);
        }
        let counted = |counter| bodies.counters.get(counter);
        assert_eq!((counted(HttpCounter::BodiesUnusable), counted(HttpCounter::BodiesOversized)), (5, 1));
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_body_that_does_not_arrive_and_one_without_memory_are_refused() {
        let mut bodies = bodies(HTTP_BODIES_BYTES_MAX);
        bodies.time = Duration::from_millis(20);
        let never = Body::new(Silent);
        let rest = read(&bodies, "application/json", never);
        let (never, crowded) = tokio::join!(rest, read(&bodies, "application/json", r#"{"numbers":[]}"#));
        assert_eq!((never, crowded), (Err(408), Err(503)));
        assert_eq!(read(&bodies, "application/json", r#"{"numbers":[7]}"#).await, Ok(vec![7]));
    }

    /// A body of unknown size that never arrives.
    struct Silent;

    impl hyper::body::Body for Silent {
        type Data = bytes::Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<hyper::body::Frame<bytes::Bytes>, Self::Error>>> {
            std::task::Poll::Pending
        }
    }
}
