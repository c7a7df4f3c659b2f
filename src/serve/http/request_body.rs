//! Request bodies: received within limits of size and time, and read as JSON.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::memory::{HttpMemory, PERMIT_BYTES};
use super::reply::Refusal;
use crate::error::{Error, Kind};
use crate::limits::{HTTP_BODY_MS_MAX, HTTP_BODY_ROOM_MS_MAX, HTTP_JSON_DEPTH_MAX, HTTP_REPLIES_RETRY_US};
use crate::metrics::{CounterSet, HttpCounter};
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use hyper::body::Body as _;
use serde::de::DeserializeOwned;
use serde_json::error::Category;
use tokio::sync::SemaphorePermit;

/// The limits of request bodies.
#[derive(Debug)]
pub(super) struct Bodies {
    bytes_max: u64,
    memory: HttpMemory,
    time: Duration,
    /// How long a body waits for memory.
    room_time: Duration,
    counters: Arc<CounterSet<HttpCounter>>,
}

impl Bodies {
    /// Bodies of up to `bytes_max` bytes each.
    pub(super) fn new(bytes_max: u64, memory: &HttpMemory, counters: Arc<CounterSet<HttpCounter>>) -> Self {
        let [time, room_time] = [HTTP_BODY_MS_MAX, HTTP_BODY_ROOM_MS_MAX].map(Duration::from_millis);
        Self { bytes_max, memory: memory.clone(), time, room_time, counters }
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
        let Ok(received) = tokio::time::timeout(self.time, self.receive(body)).await else { return Err(self.late()) };
        let received = received?;
        if depth_of(&received.bytes) > HTTP_JSON_DEPTH_MAX {
            self.counters.bump(HttpCounter::BodiesUnusable);
            let message = format!("the body is nested deeper than {HTTP_JSON_DEPTH_MAX}");
            let error = Error::new(Kind::Malformed, message, "leave out undocumented fields");
            return Err(Refusal::new(StatusCode::BAD_REQUEST, error));
        }
        serde_json::from_slice(&received.bytes).map_err(|error| self.unusable(&error))
    }

    async fn receive(&self, mut body: Body) -> Result<BodyBuffer<'_>, Refusal> {
        let mut buffer = BodyBuffer { bytes: Vec::new(), small: 0, permits: None, bodies: self };
        let capacity_max = body.size_hint().upper().unwrap_or(self.bytes_max) as usize;
        while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            let unanswered = |cause: axum::Error| {
                let error = Error::new(Kind::Connection, "the connection ended within the body", "send it again")
                    .caused_by(cause);
                Refusal::new(StatusCode::BAD_REQUEST, error)
            };
            // Trailers are ignored.
            let Ok(part) = frame.map_err(unanswered)?.into_data() else { continue };
            if (buffer.bytes.len() + part.len()) as u64 > self.bytes_max {
                return Err(self.oversized());
            }
            buffer.append(&part, capacity_max).await?;
        }
        Ok(buffer)
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
        let bytes_max = self.memory.bodies.bytes_max();
        let message = format!("other bodies that are being received have all of {bytes_max} bytes");
        Error::new(Kind::Overloaded, message, "send it again later").retry_after_us(HTTP_REPLIES_RETRY_US).into()
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

/// A body so far, and the memory that it has until it is dropped. It takes memory only for bytes that have arrived, twice
/// their number at most, so that a caller who announces a body and does not send it has none.
#[derive(Debug)]
struct BodyBuffer<'a> {
    bytes: Vec<u8>,
    /// Bytes that it has without a permit.
    small: usize,
    permits: Option<SemaphorePermit<'a>>,
    bodies: &'a Bodies,
}

impl BodyBuffer<'_> {
    /// Appends `part`. The buffer doubles when it is full, up to `capacity_max`.
    async fn append(&mut self, part: &[u8], capacity_max: usize) -> Result<(), Refusal> {
        let needed = self.bytes.len() + part.len();
        if needed > self.bytes.capacity() {
            let capacity = (2 * self.bytes.capacity()).min(capacity_max).max(needed);
            self.take(capacity).await?;
            self.bytes.reserve_exact(capacity - self.bytes.len());
        }
        self.bytes.extend_from_slice(part);
        Ok(())
    }

    /// Takes memory for `capacity` bytes in all. It waits only for a short time: if each of several bodies has part of the
    /// memory and needs more, the first that gives up frees its part for the others.
    async fn take(&mut self, capacity: usize) -> Result<(), Refusal> {
        let HttpMemory { bodies, body_small_bytes, small_bodies, .. } = &self.bodies.memory;
        let small = capacity.min(*body_small_bytes);
        small_bodies.add((small - self.small) as u64);
        self.small = small;
        let held = self.permits.as_ref().map_or(0, SemaphorePermit::num_permits);
        let more = (capacity - small).div_ceil(PERMIT_BYTES).saturating_sub(held);
        if more == 0 {
            return Ok(());
        }
        let room = tokio::time::timeout(self.bodies.room_time, bodies.free.acquire_many(more as u32)).await;
        let Ok(Ok(more)) = room else { return Err(self.bodies.crowded()) };
        match &mut self.permits {
            Some(permits) => permits.merge(more),
            None => self.permits = Some(more),
        }
        Ok(())
    }
}

impl Drop for BodyBuffer<'_> {
    fn drop(&mut self) {
        self.bodies.memory.small_bodies.subtract(self.small as u64);
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
    use std::task::{Context, Poll};

    use axum::response::IntoResponse as _;
    use hyper::body::{Frame, SizeHint};
    use serde::Deserialize;

    use super::*;
    use crate::limits::{HTTP_BODIES_BYTES_MAX, HTTP_BODY_SMALL_BYTES_MIN};

    const JSON: &str = "application/json";

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
    async fn a_body_that_does_not_arrive_is_refused_and_has_no_memory_meanwhile() {
        let mut bodies = bodies(HTTP_BODIES_BYTES_MAX);
        bodies.time = Duration::from_millis(20);
        let (unknown, announced, small) = tokio::join!(
            read(&bodies, JSON, Arriving::body(None, 0)),
            read(&bodies, JSON, Arriving::body(Some(8 << 20), 0)),
            read(&bodies, JSON, r#"{"numbers":[7]}"#),
        );
        assert_eq!((unknown, announced, small), (Err(408), Err(408), Ok(vec![7])));
        assert_eq!((bodies.counters.get(HttpCounter::BodiesLate), bodies.memory.used()), (2, 0));
    }

    #[tokio::test(flavor = "current_thread")]
    async fn bodies_that_need_all_memory_do_not_wait_for_each_other_and_small_ones_need_none() {
        let bytes = 1 << 20;
        let mut bodies = Bodies::new(bytes as u64, &HttpMemory::of(1, bytes as u64), Arc::default());
        bodies.room_time = Duration::from_millis(20);
        let large = || read(&bodies, JSON, Arriving::body(Some(bytes), 16 << 10));
        let (one, other) = tokio::join!(large(), large());
        // Spaces are no JSON, which shows only once all of them have arrived.
        let statuses = [one, other].map(|read| read.expect_err("no JSON"));
        assert!(statuses == [400, 503] || statuses == [503, 400], "{statuses:?}");
        assert_eq!((bodies.counters.get(HttpCounter::BodiesCrowded), bodies.memory.used()), (1, 0));
        let all = bodies.memory.bodies.free.try_acquire_many(1024).expect("all memory");
        assert_eq!(read(&bodies, JSON, r#"{"numbers":[7]}"#).await, Ok(vec![7]));
        assert_eq!(read(&bodies, JSON, " ".repeat(HTTP_BODY_SMALL_BYTES_MIN + 1)).await, Err(503));
        drop(all);
    }

    /// A body of spaces, of which a step arrives at every other poll.
    struct Arriving {
        /// `None` = its size is unknown.
        left: Option<usize>,
        /// 0 = nothing ever arrives.
        step_bytes: usize,
        has_paused: bool,
    }

    impl Arriving {
        fn body(left: Option<usize>, step_bytes: usize) -> Body {
            Body::new(Self { left, step_bytes, has_paused: false })
        }
    }

    impl hyper::body::Body for Arriving {
        type Data = bytes::Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<bytes::Bytes>, Self::Error>>> {
            let Self { left: Some(left), step_bytes: 1.., .. } = *self else { return Poll::Pending };
            if left == 0 {
                return Poll::Ready(None);
            }
            self.has_paused = !self.has_paused;
            if self.has_paused {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let step = self.step_bytes.min(left);
            self.left = Some(left - step);
            Poll::Ready(Some(Ok(Frame::data(vec![b' '; step].into()))))
        }

        fn size_hint(&self) -> SizeHint {
            self.left.map_or_else(SizeHint::default, |left| SizeHint::with_exact(left as u64))
        }
    }
}
