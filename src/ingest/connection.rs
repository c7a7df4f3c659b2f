//! A connection that brings a publisher's events or replays them: to an engine's or a relay's own sockets, or to a NATS
//! server where a relay stores them.
//!
//! Either brings the same messages and events in the same order, so the streams know nothing of the difference. What runs on
//! the thread of a shard is one connection for each publisher in both cases: a flood on the subjects of one worker delays that
//! worker.

use std::sync::Arc;

use bytes::Bytes;
use mio::{Registry, Token};

use super::publisher_socket::BOUNDS;
use crate::endpoint::Endpoint;
use crate::error::Result;
use crate::fleet::EventSource;
use crate::ids::{EventSeq, Worker};
#[cfg(feature = "nats")]
use crate::nats::{Access, Feed, Replay};
use crate::zmtp::{self, Bounds, LinkEvent, Next, Opening, Pace, Peer, PeerPlan, Role};

/// What connections to NATS servers need beside an address.
#[derive(Clone, Debug, Default)]
pub struct Brokers {
    #[cfg(feature = "nats")]
    access: Option<Arc<Access>>,
}

impl PartialEq for Brokers {
    /// Whether both are the same, not whether both say the same.
    fn eq(&self, other: &Self) -> bool {
        #[cfg(feature = "nats")]
        return match (&self.access, &other.access) {
            (Some(own), Some(others)) => Arc::ptr_eq(own, others),
            (own, others) => own.is_none() && others.is_none(),
        };
        #[cfg(not(feature = "nats"))]
        {
            let (Self {}, Self {}) = (self, other);
            true
        }
    }
}

impl Eq for Brokers {}

#[cfg(feature = "nats")]
impl Brokers {
    pub(crate) fn new(access: Access) -> Self {
        Self { access: Some(Arc::new(access)) }
    }

    /// What all connections have in common.
    pub(crate) fn access(&self) -> Option<&Arc<Access>> {
        self.access.as_ref()
    }
}

/// Where a connection signals: the registry of the event loop, and the token.
pub(super) type Signals<'a> = (&'a Arc<Registry>, Token);

/// A connection.
#[derive(Debug)]
pub(super) enum Connection {
    Sockets(Box<Peer>),
    #[cfg(feature = "nats")]
    Feed(Box<Feed>),
    #[cfg(feature = "nats")]
    Replay(Box<Replay>),
}

impl Connection {
    /// Starts to subscribe to a worker's events, for ever.
    ///
    /// # Errors
    /// [`crate::error::Kind::Config`] if the endpoint cannot be used.
    pub(super) fn subscribe(
        source: &EventSource,
        of: (&Brokers, Worker),
        (registry, token): Signals<'_>,
        now_ms: u64,
    ) -> Result<Self> {
        #[cfg(feature = "nats")]
        if let (Some(server), Some(access)) = (source.endpoint.nats_server(), of.0.access()) {
            let feed = Feed::open((access, server), of.1, (Arc::clone(registry), token), now_ms);
            return Ok(Self::Feed(Box::new(feed)));
        }
        let _ = of;
        let topic = Bytes::copy_from_slice(source.topic.as_bytes());
        // An engine with snapshots of its own has frames that others lack.
        let bounds = Bounds { keeps_parts: source.snapshots.is_some(), ..BOUNDS };
        let (role, opening) = (Role::Subscriber, Opening::Subscribe(topic));
        let plan = PeerPlan { role, bounds, opening, pace: Pace::ENGINE };
        Ok(Self::Sockets(Box::new(Peer::open(&source.endpoint, plan, (Arc::clone(registry), token), now_ms)?)))
    }

    /// Connects, and asks for all batches of a worker from a sequence number on.
    ///
    /// # Errors
    /// [`crate::error::Kind::Config`] if the endpoint cannot be used.
    pub(super) fn ask(
        (endpoint, from): (&Endpoint, EventSeq),
        of: (&Brokers, Worker),
        (registry, token): Signals<'_>,
        now_ms: u64,
    ) -> Result<Self> {
        #[cfg(feature = "nats")]
        if let (Some(server), Some(access)) = (endpoint.nats_server(), of.0.access()) {
            let replay = Replay::ask((access, server), (of.1, from), (Arc::clone(registry), token), now_ms);
            return Ok(Self::Replay(Box::new(replay)));
        }
        let _ = of;
        // A REQ socket would send this empty frame first. Engines ignore a question without it.
        let question = zmtp::message(&[b""], &from.0.to_be_bytes());
        let (role, opening) = (Role::Dealer, Opening::Send(question));
        let plan = PeerPlan { role, bounds: BOUNDS, opening, pace: Pace::ENGINE };
        Ok(Self::Sockets(Box::new(Peer::open(endpoint, plan, (Arc::clone(registry), token), now_ms)?)))
    }

    /// Signals under another token from now on.
    ///
    /// # Errors
    /// Those of the event loop.
    pub(super) fn set_token(&mut self, token: Token) -> std::io::Result<()> {
        match self {
            Self::Sockets(peer) => peer.set_token(token),
            #[cfg(feature = "nats")]
            Self::Feed(feed) => feed.set_token(token),
            #[cfg(feature = "nats")]
            Self::Replay(replay) => replay.set_token(token),
        }
    }

    /// Checks deadlines; `true` = there is something to take.
    pub(super) fn tick(&mut self, now_ms: u64) -> bool {
        match self {
            Self::Sockets(peer) => peer.tick(now_ms),
            #[cfg(feature = "nats")]
            Self::Feed(feed) => feed.tick(now_ms),
            #[cfg(feature = "nats")]
            Self::Replay(replay) => replay.tick(now_ms),
        }
    }

    /// The next event, if there is one.
    pub(super) fn link_event(&mut self) -> Option<LinkEvent> {
        match self {
            Self::Sockets(peer) => peer.link_event(),
            #[cfg(feature = "nats")]
            Self::Feed(feed) => feed.link_event(),
            #[cfg(feature = "nats")]
            Self::Replay(replay) => replay.link_event(),
        }
    }

    /// Whether [`Self::link_event`] has an event.
    pub(super) fn has_event(&self) -> bool {
        match self {
            Self::Sockets(peer) => peer.has_event(),
            #[cfg(feature = "nats")]
            Self::Feed(feed) => feed.has_event(),
            #[cfg(feature = "nats")]
            Self::Replay(replay) => replay.has_event(),
        }
    }

    /// Advances the connection and takes the next message.
    pub(super) fn next(&mut self, now_ms: u64) -> Next {
        match self {
            Self::Sockets(peer) => peer.next(now_ms),
            #[cfg(feature = "nats")]
            Self::Feed(feed) => feed.next(now_ms),
            #[cfg(feature = "nats")]
            Self::Replay(replay) => replay.next(now_ms),
        }
    }

    /// Messages of strangers that were skipped since the last call.
    pub(super) fn take_skipped(&mut self) -> u64 {
        match self {
            #[cfg(feature = "nats")]
            Self::Feed(feed) => feed.take_skipped(),
            _ => 0,
        }
    }

    /// Whether a NATS server is away, so that nothing can be known of the publisher.
    pub(super) fn excuses_silence(&self, now_ms: u64) -> bool {
        match self {
            #[cfg(feature = "nats")]
            Self::Feed(feed) => feed.excuses_silence(now_ms),
            _ => {
                let _ = now_ms;
                false
            }
        }
    }
}

#[cfg(test)]
impl Connection {
    /// Ends the connection in any state.
    pub(super) fn break_up(&mut self) {
        match self {
            Self::Sockets(peer) => peer.break_up(),
            #[cfg(feature = "nats")]
            Self::Feed(_) | Self::Replay(_) => {}
        }
    }
}
