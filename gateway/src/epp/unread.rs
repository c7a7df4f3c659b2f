//! The bytes of one stream that are held and are no request yet: they have come and are no whole message, or their message
//! waits to be sent on. They count against the budget of withheld requests, because a message that never ends takes
//! memory too.

use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use parking_lot::Mutex;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstCodec;

use super::budget::{BodyBudget, Taken};
use super::messages::bytes_beside_bodies;
use crate::engines::BoxError;
use crate::limits::{EPP_MESSAGE_OVERHEAD_BYTES_MAX, EPP_STREAM_BYTES_FREE};

/// What one stream holds so. Clones are of the same stream.
#[derive(Clone, Debug)]
pub(super) struct Unread(Arc<Mutex<Held>>);

#[derive(Debug)]
struct Held {
    /// Bytes that have come and were not [settled](Unread::settle).
    bytes: usize,
    /// Those of them whose message was read.
    read: usize,
    /// The longest message that was read: the stream's buffer stays as long until the stream ends.
    longest: usize,
    /// What is beyond the share that every stream has.
    taken: Taken,
}

impl Held {
    /// Takes or gives back, so that `taken` is what the stream needs; `false` = there is no room.
    fn count(&mut self) -> bool {
        let needed = self.bytes.max(self.longest).saturating_sub(EPP_STREAM_BYTES_FREE);
        match needed.checked_sub(self.taken.bytes()) {
            Some(more) => self.taken.take(more),
            None => {
                self.taken.give_back(self.taken.bytes() - needed);
                true
            }
        }
    }
}

impl Unread {
    pub(super) fn new(budget: &BodyBudget) -> Self {
        Self(Arc::new(Mutex::new(Held { bytes: 0, read: 0, longest: 0, taken: budget.start() })))
    }

    /// Bytes have come; `false` = the budget has no room for them.
    fn came(&self, bytes: usize) -> bool {
        let mut held = self.0.lock();
        held.bytes += bytes;
        held.count()
    }

    /// A message of this many bytes was read.
    fn was_read(&self, bytes: usize) {
        let mut held = self.0.lock();
        held.read += bytes;
        held.longest = held.longest.max(bytes);
    }

    /// Nothing of the messages that were read is held any more.
    pub(super) fn settle(&self) {
        let mut held = self.0.lock();
        held.bytes = held.bytes.saturating_sub(std::mem::take(&mut held.read));
        held.count();
    }
}

/// The body of a call, whose bytes are counted as they come.
pub(super) struct CountedBody {
    pub(super) body: Incoming,
    pub(super) unread: Unread,
}

impl Body for CountedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Some(frame) = ready!(Pin::new(&mut self.body).poll_frame(cx)?) else { return Poll::Ready(None) };
        let bytes = frame.data_ref().map_or(0, Bytes::len);
        let has_room = self.unread.came(bytes);
        Poll::Ready(Some(if has_room { Ok(frame) } else { Err(no_room().into()) }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

fn no_room() -> Status {
    Status::resource_exhausted("the endpoint picker holds too many bytes of other requests; try again")
}

/// The codec of Envoy's messages. It says how long each message was, and refuses one that would take many times its length.
pub(super) struct CountedCodec<T, U> {
    unread: Unread,
    types: PhantomData<(T, U)>,
}

impl<T, U> CountedCodec<T, U> {
    pub(super) fn new(unread: Unread) -> Self {
        Self { unread, types: PhantomData }
    }
}

/// See [`CountedCodec`].
pub(super) struct CountedDecoder<D> {
    decoder: D,
    unread: Unread,
}

/// Bytes before each message of gRPC: whether it is compressed, and its length.
const MESSAGE_HEADER_BYTES: usize = 5;

impl<T, U> Codec for CountedCodec<T, U>
where
    T: prost::Message + Send + 'static,
    U: prost::Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = <ProstCodec<T, U> as Codec>::Encoder;
    type Decoder = CountedDecoder<<ProstCodec<T, U> as Codec>::Decoder>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::new().encoder()
    }

    fn decoder(&mut self) -> Self::Decoder {
        CountedDecoder { decoder: ProstCodec::<T, U>::new().decoder(), unread: self.unread.clone() }
    }
}

impl<D: Decoder<Error = Status>> Decoder for CountedDecoder<D> {
    type Item = D::Item;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<D::Item>, Status> {
        self.unread.was_read(from.remaining() + MESSAGE_HEADER_BYTES);
        // The message lies in one piece.
        if bytes_beside_bodies(from.chunk()) > EPP_MESSAGE_OVERHEAD_BYTES_MAX {
            return Err(Status::invalid_argument("the message has too many bytes that belong to no body"));
        }
        self.decoder.decode(from)
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::super::messages::{HeaderMap, HeaderValue, HttpBody, HttpHeaders, ProcessingRequest, RequestPart};
    use super::*;

    #[test]
    fn only_the_bytes_of_bodies_are_left_out() {
        let of = |part| {
            bytes_beside_bodies(&ProcessingRequest { part: Some(part), ..ProcessingRequest::default() }.encode_to_vec())
        };
        let body = HttpBody { body: vec![0; 1 << 20].into(), end_of_stream: true };
        for part in [RequestPart::RequestBody(body.clone()), RequestPart::ResponseBody(body)] {
            assert!(of(part) < 16);
        }
        let headers = Some(HeaderMap { headers: vec![HeaderValue::default(); 1000] });
        assert!(of(RequestPart::RequestHeaders(HttpHeaders { headers, end_of_stream: false })) > 2000);
        assert_eq!(bytes_beside_bodies(&[0xff; 9]), 9, "no message");
    }

    #[test]
    fn what_is_beyond_a_streams_own_share_counts_until_it_is_settled() {
        let budget = BodyBudget::new(100);
        let (one, other) = (Unread::new(&budget), Unread::new(&budget));
        assert!(one.came(EPP_STREAM_BYTES_FREE) && one.came(70));
        assert_eq!(budget.left(), 30);
        assert!(!other.came(EPP_STREAM_BYTES_FREE + 31), "there is no room");
        one.was_read(EPP_STREAM_BYTES_FREE + 20);
        assert_eq!(budget.left(), 30, "a message that was read may still be held");
        one.settle();
        assert_eq!(budget.left(), 80, "the buffer is still as long as the longest message");
        one.was_read(50);
        one.settle();
        assert!(one.came(EPP_STREAM_BYTES_FREE), "which has room for another");
        assert_eq!(budget.left(), 80);
        drop((one, other));
        assert_eq!(budget.left(), 100);
    }
}
