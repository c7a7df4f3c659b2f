//! Memory of replies that were made and not yet read, bounded over all connections of the port.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::body::{Body as _, Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::app::App;
use super::refusal::Refusal;
use crate::error::{Error, Kind, Result};
use crate::limits::{HTTP_REPLIES_BYTES_MAX, HTTP_REPLIES_RETRY_US, HTTP_REPLY_SMALL_BYTES};
use crate::metrics::{CounterSet, HttpCounter};

/// Bytes for which one permit stands.
const PERMIT_BYTES: usize = 1024;

/// Room for one reply, until all of its copies are dropped.
pub(super) type Room = Arc<OwnedSemaphorePermit>;

/// What all replies of a port are held within.
#[derive(Debug)]
pub(super) struct Replies {
    /// Memory for replies, in permits.
    free: Arc<Semaphore>,
    counters: Arc<CounterSet<HttpCounter>>,
}

impl Replies {
    pub(super) fn new(counters: Arc<CounterSet<HttpCounter>>) -> Self {
        Self { free: Arc::new(Semaphore::new(HTTP_REPLIES_BYTES_MAX / PERMIT_BYTES)), counters }
    }

    /// Room for a reply of so many bytes; `None` = it is small and needs none. A handler that changes something takes room
    /// before, and gives it to its response as an extension: its client must be told.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] while others have taken it.
    pub(super) fn room(&self, bytes: usize) -> Result<Option<Room>> {
        if bytes <= HTTP_REPLY_SMALL_BYTES {
            return Ok(None);
        }
        // A reply larger than the bound has room where there is no other.
        let permits = bytes.min(HTTP_REPLIES_BYTES_MAX).div_ceil(PERMIT_BYTES) as u32;
        Arc::clone(&self.free).try_acquire_many_owned(permits).map(|room| Some(Arc::new(room))).map_err(|_| {
            self.counters.bump(HttpCounter::RepliesCrowded);
            let message = format!("replies of {HTTP_REPLIES_BYTES_MAX} bytes wait to be read by others");
            Error::new(Kind::Overloaded, message, "ask again later, and read replies as they come")
                .retry_after_us(HTTP_REPLIES_RETRY_US)
        })
    }
}

/// Refuses replies for which there is no room.
pub(super) async fn bound(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    // What a handler writes while it is read has no known size, and a bound of its own.
    let Some(bytes) = response.body().size_hint().exact() else { return response };
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

/// A body whose bytes keep their room until they are written, wherever they are kept until then.
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

    #[test]
    fn room_is_taken_until_the_last_byte_is_dropped_and_small_replies_need_none() {
        let replies = Replies::new(Arc::default());
        let taken = |bytes: usize| replies.room(bytes).ok().flatten();
        let all = taken(2 * HTTP_REPLIES_BYTES_MAX).expect("alone even a larger one has room");
        let error = replies.room(HTTP_REPLY_SMALL_BYTES + 1).expect_err("there is none left");
        assert_eq!((error.kind(), error.retry_after()), (Kind::Overloaded, Some(HTTP_REPLIES_RETRY_US)));
        assert!(replies.room(HTTP_REPLY_SMALL_BYTES).is_ok());
        let bytes = Bytes::from_owner(HeldBytes { bytes: Bytes::from_static(b"ab"), _room: all });
        let part = bytes.slice(1..);
        drop(bytes);
        assert!(taken(HTTP_REPLY_SMALL_BYTES + 1).is_none());
        drop(part);
        assert!(taken(HTTP_REPLIES_BYTES_MAX).is_some());
    }
}
