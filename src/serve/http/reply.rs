//! Replies: JSON, errors with their status, and the memory of replies that were made and not yet read, which is bounded
//! over all connections of the port.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::body::{Body as _, Frame, SizeHint};
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use super::App;
use super::memory::{HttpMemory, PERMIT_BYTES, Permits};
use crate::error::{Error, Kind, Result};
use crate::limits::{HTTP_REPLIES_RETRY_US, HTTP_REPLY_SMALL_BYTES};
use crate::metrics::{CounterSet, HttpCounter};

/// A refused request: its error and status.
#[derive(Debug)]
pub(super) struct Refusal {
    status: StatusCode,
    error: Error,
}

impl Refusal {
    /// With another status than the error's kind has.
    pub(super) const fn new(status: StatusCode, error: Error) -> Self {
        Self { status, error }
    }

    /// The error without its status.
    pub(super) fn into_error(self) -> Error {
        self.error
    }

    /// The request has an invalid value.
    pub(super) fn invalid(message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Error::new(Kind::InvalidArgument, message, remedy).into()
    }

    /// The request names something unknown.
    pub(super) fn not_found(message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, Error::new(Kind::InvalidArgument, message, remedy))
    }

    /// The request conflicts with the present state.
    pub(super) fn conflict(message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, Error::new(Kind::InvalidArgument, message, remedy))
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self { status: status_of(error.kind()), error }
    }
}

/// The status of each kind of error, that of Dynamo's services where they have the error.
const fn status_of(kind: Kind) -> StatusCode {
    match kind {
        Kind::Malformed
        | Kind::InvalidArgument
        | Kind::SchemeMismatch
        | Kind::HelloRequired
        | Kind::UnsupportedVersion
        | Kind::PinnedNotAllowed => StatusCode::BAD_REQUEST,
        Kind::NotPermitted | Kind::AdminOnly => StatusCode::FORBIDDEN,
        Kind::UnknownSpace => StatusCode::NOT_FOUND,
        Kind::BookingExists => StatusCode::CONFLICT,
        Kind::Oversized => StatusCode::PAYLOAD_TOO_LARGE,
        Kind::TooManyBookings | Kind::PinnedBusy | Kind::AllBusy | Kind::QueueFull | Kind::DeadlinePassed => {
            StatusCode::TOO_MANY_REQUESTS
        }
        Kind::Unsupported => StatusCode::NOT_IMPLEMENTED,
        Kind::Draining | Kind::Overloaded | Kind::NobodyAvailable | Kind::AllFiltered | Kind::Connection => {
            StatusCode::SERVICE_UNAVAILABLE
        }
        Kind::Config | Kind::System | Kind::Undecodable | Kind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

#[derive(Serialize)]
struct ErrorBody<'a> {
    error: &'a str,
    code: &'static str,
    retryable: bool,
    remedy: &'a str,
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self { status, error } = &self;
        let body = ErrorBody {
            error: error.message(),
            code: error.kind().name(),
            retryable: error.is_retryable(),
            remedy: error.remedy(),
        };
        let mut response = json(*status, &body);
        if let Some(us) = error.retry_after() {
            let seconds = HeaderValue::from(us.div_ceil(1_000_000));
            response.headers_mut().insert(header::RETRY_AFTER, seconds);
        }
        response
    }
}

/// A reply with a JSON body.
pub(super) fn json(status: StatusCode, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(bytes) => (status, [(header::CONTENT_TYPE, "application/json")], bytes).into_response(),
        Err(error) => {
            tracing::error!(%error, "a reply cannot be written as JSON");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// A reply without other contents, as Dynamo's services write it.
pub(super) fn done(status: StatusCode) -> Response {
    #[derive(Serialize)]
    struct Done {
        status: &'static str,
    }
    json(status, &Done { status: "ok" })
}

/// Endpoints without a request body whose replies grow with the fleet.
const LISTINGS: [&str; 3] = ["/workers", "/loads", "/ready"];

/// Memory for one reply, until all of its copies are dropped.
pub(super) type Room = Arc<OwnedSemaphorePermit>;

/// The limit for the memory of all unread replies of a port.
#[derive(Debug)]
pub(super) struct Replies {
    memory: Permits,
    /// Bytes of the last reply of each of `LISTINGS`.
    listings: [AtomicUsize; LISTINGS.len()],
    /// Held while a large listing is made. Between two of them the port's thread answers other requests.
    large_listing: Semaphore,
    counters: Arc<CounterSet<HttpCounter>>,
}

impl Replies {
    pub(super) fn new(memory: &HttpMemory, counters: Arc<CounterSet<HttpCounter>>) -> Self {
        let memory = memory.replies.clone();
        Self { memory, listings: Default::default(), large_listing: Semaphore::new(1), counters }
    }

    /// Reserves memory for a reply of `bytes`; `None` = it is small and needs none. A handler that changes something
    /// reserves it before, and adds it to its reply as an extension, because its client must get the reply.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] while other replies have the memory.
    pub(super) fn room(&self, bytes: usize) -> Result<Option<Room>> {
        if bytes <= HTTP_REPLY_SMALL_BYTES {
            return Ok(None);
        }
        let room = Arc::clone(&self.memory.free).try_acquire_many_owned(self.permits_of(bytes));
        room.map(|room| Some(Arc::new(room))).map_err(|_| self.crowded())
    }

    /// A listing that was large when it was last made waits for other large listings.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] if there is no memory for it, before any work is done for it.
    async fn listing_permit(&self, listing: Option<usize>) -> Result<Option<SemaphorePermit<'_>>> {
        // Relaxed, here and below: one thread uses the number, and it orders nothing.
        let bytes = listing.map_or(0, |listing| self.listings[listing].load(Ordering::Relaxed));
        if bytes <= HTTP_REPLY_SMALL_BYTES {
            return Ok(None);
        }
        // Always `Some`: the semaphore is never closed.
        let permit = self.large_listing.acquire().await.ok();
        if self.memory.free.available_permits() < self.permits_of(bytes) as usize {
            return Err(self.crowded());
        }
        Ok(permit)
    }

    fn crowded(&self) -> Error {
        self.counters.bump(HttpCounter::RepliesCrowded);
        let message = format!("replies of {} bytes wait to be read by others", self.memory.bytes_max());
        Error::new(Kind::Overloaded, message, "ask again later, and read replies as they come")
            .retry_after_us(HTTP_REPLIES_RETRY_US)
    }

    /// A reply larger than the limit fits if it is the only one.
    fn permits_of(&self, bytes: usize) -> u32 {
        bytes.min(self.memory.bytes_max()).div_ceil(PERMIT_BYTES) as u32
    }
}

/// Refuses replies for which there is no memory.
pub(super) async fn bound(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let is_read = request.method() == Method::GET;
    let listing = LISTINGS.iter().position(|listing| is_read && request.uri().path() == *listing);
    let permit = match app.replies.listing_permit(listing).await {
        Ok(permit) => permit,
        Err(error) => return Refusal::from(error).into_response(),
    };
    let mut response = next.run(request).await;
    drop(permit);
    // A reply that is written while it is read has no known size, and a limit of its own.
    let Some(bytes) = response.body().size_hint().exact() else { return response };
    if let Some(listing) = listing {
        app.replies.listings[listing].store(bytes as usize, Ordering::Relaxed);
    }
    let room = match response.extensions_mut().remove::<Room>() {
        Some(room) => Ok(Some(room)),
        None => app.replies.room(bytes as usize),
    };
    match room {
        Ok(None) => response,
        Ok(Some(room)) => response.map(|body| Body::new(Held { body, room })),
        Err(error) => Refusal::from(error).into_response(),
    }
}

/// A body whose bytes keep their reservation until they are written, wherever they are until then.
struct Held {
    body: Body,
    room: Room,
}

impl hyper::body::Body for Held {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        let room = &self.room;
        let held = |bytes| Bytes::from_owner(HeldBytes { bytes, _room: Arc::clone(room) });
        polled.map(|frame| frame.map(|frame| frame.map(|frame| frame.map_data(held))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

struct HeldBytes {
    bytes: Bytes,
    _room: Room,
}

impl AsRef<[u8]> for HeldBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::HTTP_REPLIES_BYTES_MAX;

    #[test]
    fn a_retryable_error_says_when_and_every_kind_has_an_error_status() {
        let error = Error::new(Kind::QueueFull, "full", "wait").retry_after_us(1_500_000);
        let response = Refusal::from(error).into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[header::RETRY_AFTER], "2");
        for kind in Kind::ALL {
            let status = status_of(*kind);
            assert!(status.is_client_error() || status.is_server_error(), "{kind:?} is {status}");
            let may_help = status == StatusCode::TOO_MANY_REQUESTS || status == StatusCode::SERVICE_UNAVAILABLE;
            assert!(may_help || !kind.is_retryable(), "{kind:?} is retryable, which {status} does not show");
        }
    }

    #[test]
    fn memory_is_reserved_until_the_last_byte_is_dropped_and_small_replies_need_none() {
        let replies = Replies::new(&HttpMemory::default(), Arc::default());
        let taken = |bytes: usize| replies.room(bytes).ok().flatten();
        let all = taken(2 * HTTP_REPLIES_BYTES_MAX).expect("alone even a larger reply fits");
        let error = replies.room(HTTP_REPLY_SMALL_BYTES + 1).expect_err("there is no memory left");
        assert_eq!((error.kind(), error.retry_after()), (Kind::Overloaded, Some(HTTP_REPLIES_RETRY_US)));
        assert!(replies.room(HTTP_REPLY_SMALL_BYTES).is_ok());
        let bytes = Bytes::from_owner(HeldBytes { bytes: Bytes::from_static(b"ab"), _room: all });
        let part = bytes.slice(1..);
        drop(bytes);
        assert!(taken(HTTP_REPLY_SMALL_BYTES + 1).is_none());
        drop(part);
        assert!(taken(HTTP_REPLIES_BYTES_MAX).is_some());
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_large_listing_waits_for_others_and_costs_nothing_without_memory() {
        let replies = Replies::new(&HttpMemory::default(), Arc::default());
        assert!(replies.listing_permit(Some(0)).await.unwrap().is_none(), "its size is not known yet");
        replies.listings[0].store(HTTP_REPLY_SMALL_BYTES + 1, Ordering::Relaxed);
        let first = replies.listing_permit(Some(0)).await.unwrap();
        let mut second = std::pin::pin!(replies.listing_permit(Some(0)));
        let is_waiting = std::future::poll_fn(|cx| Poll::Ready(second.as_mut().poll(cx).is_pending())).await;
        assert!(first.is_some() && is_waiting);
        assert!(
            replies.listing_permit(Some(1)).await.unwrap().is_none()
                && replies.listing_permit(None).await.unwrap().is_none()
        );
        let all = replies.room(HTTP_REPLIES_BYTES_MAX).unwrap();
        drop(first);
        assert_eq!(second.await.expect_err("there is no memory").kind(), Kind::Overloaded);
        drop(all);
        assert!(replies.listing_permit(Some(0)).await.unwrap().is_some());
    }
}
