//! Bodies: reading a caller's within its bounds, and the bodies of replies.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt as _, Full};
use hyper::StatusCode;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::sync::mpsc::Receiver;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::api::ApiError;

/// The bytes that all bodies may hold together. One permit is 1 KiB.
#[derive(Clone, Debug)]
pub(crate) struct BodyBudget {
    permits: Arc<Semaphore>,
    all: usize,
}

impl BodyBudget {
    /// A budget of so many bytes.
    pub(crate) fn of(bytes: usize) -> Self {
        let all = (bytes >> 10).clamp(1, Semaphore::MAX_PERMITS);
        Self { permits: Arc::new(Semaphore::new(all)), all }
    }

    /// Bytes that are held.
    pub(crate) fn held(&self) -> u64 {
        (self.all - self.permits.available_permits()) as u64 * 1024
    }

    /// Makes `held` as large as `bytes` need.
    fn grow(&self, held: &mut Option<OwnedSemaphorePermit>, bytes: usize) -> Result<(), ApiError> {
        let needed = bytes.div_ceil(1 << 10);
        let missing = needed.saturating_sub(held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits));
        if missing == 0 {
            return Ok(());
        }
        let permits = u32::try_from(missing).unwrap_or(u32::MAX);
        let more = Arc::clone(&self.permits).try_acquire_many_owned(permits).map_err(|_| {
            let message = "the gateway holds as many bodies as it may (bounds.bodies_bytes_max); try again";
            ApiError::gateway(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message).retry_after(1)
        })?;
        match held {
            Some(held) => held.merge(more),
            None => *held = Some(more),
        }
        Ok(())
    }
}

/// A body in memory, with its part of the budget.
#[derive(Debug)]
pub(crate) struct HeldBody {
    pub(crate) bytes: Bytes,
    _permit: Option<OwnedSemaphorePermit>,
}

/// Reads a whole body.
///
/// # Errors
/// 413 beyond `bytes_max`, 408 beyond `time_max`, 400 for a body that ends early, 503 beyond the budget.
pub(crate) async fn read_body(
    body: Incoming,
    bytes_max: usize,
    time_max: Duration,
    budget: &BodyBudget,
) -> Result<HeldBody, ApiError> {
    match tokio::time::timeout(time_max, collect(body, bytes_max, budget)).await {
        Ok(read) => read,
        Err(_) => {
            let message = format!("the body did not come within {} ms; send it faster", time_max.as_millis());
            Err(ApiError::caller(StatusCode::REQUEST_TIMEOUT, "body_timeout", message))
        }
    }
}

fn too_large(bytes_max: usize) -> ApiError {
    let message = format!("the body has more than {bytes_max} bytes, which is the most; send a shorter one");
    ApiError::caller(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
}

async fn collect(mut body: Incoming, bytes_max: usize, budget: &BodyBudget) -> Result<HeldBody, ApiError> {
    let announced = body.size_hint().exact().map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    if announced.is_some_and(|bytes| bytes > bytes_max) {
        return Err(too_large(bytes_max));
    }
    let mut permit = None;
    let mut first = Bytes::new();
    let mut all = BytesMut::new();
    let mut total = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| {
            let message = "the body ended before the length that its headers say; send it whole";
            ApiError::caller(StatusCode::BAD_REQUEST, "incomplete_body", message)
        })?;
        // Trailers of a request mean nothing to an engine.
        let Ok(data) = frame.into_data() else { continue };
        total += data.len();
        if total > bytes_max {
            return Err(too_large(bytes_max));
        }
        // A body that comes in one part is not copied.
        if first.is_empty() && all.is_empty() {
            budget.grow(&mut permit, total)?;
            first = data;
            continue;
        }
        if all.capacity() < total {
            // Twice what has come, but not more than will come: a length that is only announced keeps no other body out.
            let room = (2 * total).min(announced.unwrap_or(bytes_max)).max(total);
            budget.grow(&mut permit, room)?;
            all.reserve(room - all.len());
        }
        if !first.is_empty() {
            all.extend_from_slice(&std::mem::take(&mut first));
        }
        all.extend_from_slice(&data);
    }
    let bytes = if all.is_empty() { first } else { all.freeze() };
    Ok(HeldBody { bytes, _permit: permit })
}

/// Why a reply ended before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// The engine's connection broke.
    #[error("the engine ended the reply before its end")]
    Engine,
    /// The request took longer than `deadlines.total_ms`.
    #[error("the request took longer than it may")]
    Deadline,
}

/// The body of a reply.
#[derive(Debug)]
pub enum ReplyBody {
    /// All of it.
    Whole(Full<Bytes>),
    /// Parts that come through a channel from the task that reads the engine.
    Parts {
        /// The parts.
        parts: Receiver<Result<Frame<Bytes>, ReplyError>>,
        /// An error that waits until the parts before it are sent.
        failed: Option<ReplyError>,
        /// The bytes that are still to come, if the engine said so.
        remaining: Option<u64>,
    },
}

impl ReplyBody {
    /// A whole body.
    #[must_use]
    pub fn whole(bytes: impl Into<Bytes>) -> Self {
        Self::Whole(Full::new(bytes.into()))
    }
}

fn never(error: Infallible) -> ReplyError {
    match error {}
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = ReplyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, ReplyError>>> {
        match &mut *self {
            Self::Whole(body) => Pin::new(body).poll_frame(cx).map_err(never),
            Self::Parts { failed: Some(error), .. } => Poll::Ready(Some(Err(*error))),
            Self::Parts { parts, failed, remaining } => match ready!(parts.poll_recv(cx)) {
                Some(Err(error)) => {
                    // The connection sends what it has before it asks again. Only then does it learn of the error,
                    // which closes it.
                    *failed = Some(error);
                    cx.waker().wake_by_ref();
                    Poll::Pending
                }
                Some(Ok(frame)) => {
                    if let (Some(left), Some(data)) = (remaining.as_mut(), frame.data_ref()) {
                        *left = left.saturating_sub(data.len() as u64);
                    }
                    Poll::Ready(Some(Ok(frame)))
                }
                None => Poll::Ready(None),
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(body) => body.is_end_stream(),
            Self::Parts { .. } => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(body) => body.size_hint(),
            Self::Parts { remaining: Some(bytes), .. } => SizeHint::with_exact(*bytes),
            Self::Parts { .. } => SizeHint::default(),
        }
    }
}
