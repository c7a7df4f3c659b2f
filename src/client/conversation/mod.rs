//! The conversation of one connection: hello, a lane if one is wanted, then requests and their replies. Pure: bytes in, bytes
//! out, no I/O and no clock.
//!
//! Every client drives one. A driver connects and calls [`Conversation::begin`]. From then on it writes
//! [`Conversation::unsent`], appends what it reads to [`Conversation::room`], and waits. It calls [`Conversation::opening`]
//! after each read until the connection is open, and [`Conversation::next`] afterwards.

mod replies;

use rustc_hash::FxHashMap;

use super::{LaneUse, unexpected};
use crate::error::{Error, Kind, Result};
use crate::ids::{CorrelationId, SpaceId};
use crate::limits::WORKERS_PAGE_MAX;
use crate::protocol::SessionToken;
use crate::wire::{
    HelloReply, LaneOpened, LaneRequest, PROTOCOL_VERSION, RemoteError, Reply, RequestEncoder, WatchReply, features,
};
use replies::{FleetPages, Inbox, untrusted};

/// The channel of received bytes. Frames of one channel are not mixed with those of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Channel {
    /// The lane of the connection.
    Lane,
    /// Its socket.
    Socket,
}

/// How far a connection has come.
#[derive(Debug)]
enum Stage {
    /// The reply to hello is due.
    Hello(LaneUse),
    /// Hello is answered, and the reply to the request for a lane is due.
    Lane { hello: HelloReply, id: CorrelationId, wanted: LaneUse },
    /// Requests can be sent.
    Open,
}

/// A connection that is open. `L` is its mapped lane.
#[derive(Debug)]
pub(super) struct Opened<L> {
    pub(super) hello: HelloReply,
    pub(super) lane: Option<L>,
    /// Why there is no lane, though one was requested.
    pub(super) lane_refusal: Option<Error>,
}

/// Why a connection did not open.
#[derive(Debug)]
pub(super) struct Rejection {
    pub(super) error: Error,
    /// The daemon, or the client's own options, refuse the connection: a retry without a change fails too.
    pub(super) is_final: bool,
}

impl From<Error> for Rejection {
    fn from(error: Error) -> Self {
        Self { error, is_final: false }
    }
}

/// A frame that the daemon sent on an open connection.
#[derive(Debug)]
pub(super) enum Incoming<T> {
    /// The reply to a request, or the reason why it cannot be read.
    Reply { id: CorrelationId, waiter: T, reply: Result<Reply> },
    /// The daemon says why it is about to close the connection. It answers no request.
    Closing(RemoteError),
    /// The fleet that the connection watches.
    Fleet(WatchReply),
    /// The watch has ended, with a reply that is no fleet.
    WatchEnded(Result<Reply>),
    /// A part of a fleet, or a reply to no request. There is nothing to do.
    Other,
}

/// The state of one connection. `T` is what waits for a reply.
#[derive(Debug)]
pub(super) struct Conversation<T> {
    stage: Stage,
    encoder: RequestEncoder,
    next_id: u64,
    /// Encoded requests that are not sent yet.
    pub(super) unsent: Vec<u8>,
    /// By channel.
    inboxes: [Inbox; 2],
    in_flight: FxHashMap<CorrelationId, T>,
    watch: Option<(CorrelationId, FleetPages)>,
}

impl<T> Default for Conversation<T> {
    fn default() -> Self {
        Self {
            stage: Stage::Hello(LaneUse::Off),
            encoder: RequestEncoder::default(),
            next_id: 1,
            unsent: Vec::new(),
            inboxes: Default::default(),
            in_flight: FxHashMap::default(),
            watch: None,
        }
    }
}

impl<T> Conversation<T> {
    /// Begins a connection: encodes hello.
    pub(super) fn begin(&mut self, name: &str, session: Option<SessionToken>, lane: LaneUse) {
        self.stage = Stage::Hello(lane);
        let id = self.take_id();
        self.encoder.hello(id, name, session, &mut self.unsent);
    }

    /// Notes that the connection has ended. Returns the requests without a reply, in the order of their ids.
    pub(super) fn end(&mut self) -> Vec<T> {
        self.unsent.clear();
        self.inboxes = Default::default();
        self.watch = None;
        let mut left: Vec<_> = self.in_flight.drain().collect();
        left.sort_unstable_by_key(|(id, _)| *id);
        left.into_iter().map(|(_, waiter)| waiter).collect()
    }

    /// Whether the daemon has accepted this connection's hello.
    pub(super) const fn is_greeted(&self) -> bool {
        !matches!(self.stage, Stage::Hello(_))
    }

    /// Whether replies are due, other than those of the watch.
    pub(super) fn is_waiting(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// The buffer to append received bytes to.
    pub(super) fn room(&mut self, channel: Channel) -> &mut Vec<u8> {
        self.inboxes[channel as usize].room()
    }

    /// Takes what has been received while the connection begins; `None` = send `unsent`, and wait for more. `map` maps the lane
    /// that the daemon has opened.
    ///
    /// # Errors
    /// The daemon refuses the connection, sent an invalid frame, or offers no lane though the client requires one.
    pub(super) fn opening<L>(
        &mut self,
        map: impl FnOnce(LaneOpened) -> Result<L>,
    ) -> Result<Option<Opened<L>>, Rejection> {
        while let Some(frame) = self.inboxes[Channel::Socket as usize].next_frame()? {
            match std::mem::replace(&mut self.stage, Stage::Open) {
                Stage::Hello(wanted) => {
                    // The first reply answers hello, or refuses the connection (then with id 0).
                    let hello = accepted(frame.reply).inspect_err(|_| self.stage = Stage::Hello(wanted))?;
                    if wanted == LaneUse::Off {
                        return Ok(Some(Opened { hello, lane: None, lane_refusal: None }));
                    }
                    if hello.features & features::LANES == 0 {
                        let remedy = "raise serve.lanes_max, or go without a lane";
                        let error = Error::new(Kind::Unsupported, "the daemon has no lanes", remedy);
                        return opened(hello, wanted, Err(error)).map(Some);
                    }
                    let id = self.take_id();
                    self.encoder.open_lane(id, LaneRequest::default(), &mut self.unsent);
                    self.stage = Stage::Lane { hello, id, wanted };
                }
                Stage::Lane { hello, id, wanted } => {
                    let reply = match frame.reply {
                        Ok(Reply::Error(_)) => frame.reply,
                        _ if frame.id != id => Err(untrusted("a reply to no request")),
                        reply => reply,
                    };
                    let lane = reply.and_then(|reply| expect!(reply, OpenLane, "open_lane")).and_then(map);
                    return opened(hello, wanted, lane).map(Some);
                }
                // A driver takes further frames by `next`.
                Stage::Open => break,
            }
        }
        Ok(None)
    }

    fn take_id(&mut self) -> CorrelationId {
        let id = CorrelationId(self.next_id);
        self.next_id += 1;
        id
    }

    /// Sends a request that `encode` appends. [`Conversation::next`] returns `waiter` with its reply.
    ///
    /// # Errors
    /// Those of the encoder; then nothing is sent.
    pub(super) fn ask(
        &mut self,
        waiter: T,
        encode: impl FnOnce(&mut RequestEncoder, CorrelationId, &mut Vec<u8>) -> Result<()>,
    ) -> Result<CorrelationId> {
        let id = self.take_id();
        encode(&mut self.encoder, id, &mut self.unsent)?;
        self.in_flight.insert(id, waiter);
        Ok(id)
    }

    /// Watches a space, or the whole fleet.
    pub(super) fn watch(&mut self, space: Option<SpaceId>) {
        let id = self.take_id();
        self.encoder.watch(id, space, (0, WORKERS_PAGE_MAX as u32), &mut self.unsent);
        self.watch = Some((id, FleetPages::default()));
    }

    /// The next received frame, of the lane first; `None` = it is not whole yet.
    ///
    /// # Errors
    /// [`Kind::Malformed`] for an invalid frame: the connection must be closed.
    pub(super) fn next(&mut self) -> Result<Option<Incoming<T>>> {
        let [lane, socket] = &mut self.inboxes;
        let Some(frame) = lane.next_frame().transpose().or_else(|| socket.next_frame().transpose()) else {
            return Ok(None);
        };
        let frame = frame?;
        if let Some(waiter) = self.in_flight.remove(&frame.id) {
            return Ok(Some(Incoming::Reply { id: frame.id, waiter, reply: frame.reply }));
        }
        let watch = self.watch.as_mut().filter(|(id, _)| *id == frame.id);
        Ok(Some(match (watch, frame.reply) {
            (Some((_, pages)), Ok(Reply::Watch(page))) => {
                pages.take(page, frame.bytes)?.map_or(Incoming::Other, Incoming::Fleet)
            }
            (Some(_), reply) => {
                self.watch = None;
                Incoming::WatchEnded(reply)
            }
            (None, Ok(Reply::Error(error))) if frame.id == CorrelationId(0) => Incoming::Closing(error),
            _ => Incoming::Other,
        }))
    }
}

/// Checks the reply to hello.
fn accepted(reply: Result<Reply>) -> Result<HelloReply, Rejection> {
    match reply? {
        Reply::Hello(hello) if hello.version == PROTOCOL_VERSION => Ok(hello),
        Reply::Error(error) => Err(Rejection { is_final: !error.retryable, error: error.into() }),
        other => Err(unexpected("hello", &other).into()),
    }
}

/// A connection that has a lane, or goes without one if the client's options allow that.
fn opened<L>(hello: HelloReply, wanted: LaneUse, lane: Result<L>) -> Result<Opened<L>, Rejection> {
    match lane {
        Ok(lane) => Ok(Opened { hello, lane: Some(lane), lane_refusal: None }),
        Err(error) if wanted == LaneUse::Try && error.kind() != Kind::Connection => {
            Ok(Opened { hello, lane: None, lane_refusal: Some(error) })
        }
        Err(error) => Err(Rejection { is_final: !error.is_retryable(), error }),
    }
}

/// The cursor of the page after one at `cursor`; `None` = that was the last page.
///
/// # Errors
/// [`Kind::Malformed`] if the pages do not advance: a request for each would never end.
pub(super) fn next_page(cursor: u32, next: Option<u32>) -> Result<Option<u32>> {
    match next {
        Some(next) if next <= cursor => Err(Error::new(
            Kind::Malformed,
            "the daemon's pages do not advance",
            "use a client and a daemon of the same release",
        )),
        next => Ok(next),
    }
}

#[cfg(test)]
mod tests;
