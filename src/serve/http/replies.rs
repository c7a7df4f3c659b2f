//! Memory of replies that were made and not yet read, bounded over all connections of the port.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::body::{Body as _, Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use super::app::App;
use super::refusal::Refusal;
use crate::error::{Error, Kind, Result};
use crate::limits::{HTTP_REPLIES_BYTES_MAX, HTTP_REPLIES_RETRY_US, HTTP_REPLY_SMALL_BYTES};
use crate::metrics::{CounterSet, HttpCounter};

/// Bytes for which one permit stands.
const PERMIT_BYTES: usize = 1024;

/// What is as long as the fleet is large, and is asked for without a body.
const LISTINGS: [&str; 3] = ["/workers", "/loads", "/ready"];

/// Room for one reply, until all of its copies are dropped.
pub(super) type Room = Arc<OwnedSemaphorePermit>;

/// What all replies of a port are held within.
#[derive(Debug)]
pub(super) struct Replies {
    /// Memory for replies, in permits.
    free: Arc<Semaphore>,
    /// Bytes of the last reply of each of `LISTINGS`.
    listings: [AtomicUsize; LISTINGS.len()],
    /// Who makes a large listing. The thread of the port turns to others between two of them.
    turn: Semaphore,
    counters: Arc<CounterSet<HttpCounter>>,
}

impl Replies {
    pub(super) fn new(counters: Arc<CounterSet<HttpCounter>>) -> Self {
        let free = Arc::new(Semaphore::new(HTTP_REPLIES_BYTES_MAX / PERMIT_BYTES));
        Self { free, listings: Default::default(), turn: Semaphore::new(1), counters }
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
        let room = Arc::clone(&self.free).try_acquire_many_owned(permits_of(bytes));
        room.map(|room| Some(Arc::new(room))).map_err(|_| self.crowded())
    }

    /// A listing that was large when it was last made waits for its turn.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] if there will be no room for it, before it costs anything.
    async fn turn(&self, listing: Option<usize>) -> Result<Option<SemaphorePermit<'_>>> {
        // Relaxed, here and below: the number alone matters, and one thread has it.
        let bytes = listing.map_or(0, |listing| self.listings[listing].load(Ordering::Relaxed));
        if bytes <= HTTP_REPLY_SMALL_BYTES {
            return Ok(None);
        }
        // Never closed.
        let turn = self.turn.acquire().await.ok();
        if self.free.available_permits() < permits_of(bytes) as usize {
            return Err(self.crowded());
        }
        Ok(turn)
    }

    fn crowded(&self) -> Error {
        self.counters.bump(HttpCounter::RepliesCrowded);
        let message = format!("replies of {HTTP_REPLIES_BYTES_MAX} bytes wait to be read by others");
        Error::new(Kind::Overloaded, message, "ask again later, and read replies as they come")
            .retry_after_us(HTTP_REPLIES_RETRY_US)
    }
}

/// A reply larger than the bound has room where there is no other.
fn permits_of(bytes: usize) -> u32 {
    bytes.min(HTTP_REPLIES_BYTES_MAX).div_ceil(PERMIT_BYTES) as u32
}

/// Refuses replies for which there is no room.
pub(super) async fn bound(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let is_read = request.method() == Method::GET;
    let listing = LISTINGS.iter().position(|listing| is_read && request.uri().path() == *listing);
    let turn = match app.replies.turn(listing).await {
        Ok(turn) => turn,
        Err(error) => return Refusal::from(error).into_response(),
    };
    let mut response = next.run(request).await;
    drop(turn);
    // What a handler writes while it is read has no known size, and a bound of its own.
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

    #[tokio::test(flavor = "current_thread")]
    async fn a_large_listing_waits_for_its_turn_and_costs_nothing_where_there_is_no_room() {
        let replies = Replies::new(Arc::default());
        assert!(replies.turn(Some(0)).await.unwrap().is_none(), "nobody knows yet that it is large");
        replies.listings[0].store(HTTP_REPLY_SMALL_BYTES + 1, Ordering::Relaxed);
        let first = replies.turn(Some(0)).await.unwrap();
        let mut second = std::pin::pin!(replies.turn(Some(0)));
        let is_waiting = std::future::poll_fn(|cx| Poll::Ready(second.as_mut().poll(cx).is_pending())).await;
        assert!(first.is_some() && is_waiting);
        assert!(replies.turn(Some(1)).await.unwrap().is_none() && replies.turn(None).await.unwrap().is_none());
        let all = replies.room(HTTP_REPLIES_BYTES_MAX).unwrap();
        drop(first);
        assert_eq!(second.await.expect_err("there is no room").kind(), Kind::Overloaded);
        drop(all);
        assert!(replies.turn(Some(0)).await.unwrap().is_some());
    }
}
