//! The carrier without a broker: each router binds one ROUTER socket, and connects a DEALER socket to that of each peer.
//!
//! ```text
//!  A: ROUTER ◀─ its requests ─ DEALER :B        A: DEALER ─ its requests ─▶ ROUTER :B
//!            ─ batches, answers ─▶                        ◀─ batches, answers ─
//! ```
//!
//! One connection brings everything that a router says to another, so answers and batches come in the order in which they
//! were sent. The first message on each connection proves that its sender is a router of the fleet. Others get no load.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use mio::{Events, Poll, Registry, Token};

use super::carrier::{Arrived, Asker, Carrier, CarrierCounts, Link, Source};
use super::values::OriginId;
use crate::endpoint::{BoundEndpoint, Endpoint};
use crate::error::{Error, Kind, Result};
use crate::limits::{
    LOAD_MESSAGE_BYTES_MAX, LOAD_TICK_MS, ROUTER_PARTS_MAX, ROUTER_PEERS_MAX, ROUTER_QUANTUM_MESSAGES_MAX,
    ROUTER_WAITING_BYTES_MAX, ROUTER_WAITING_MESSAGES_MAX, ZMQ_COMMAND_BYTES_MAX,
};
use crate::zmtp::{self, Bounds, LinkEvent, Next, Opening, Peer, PeerId, Role, Sent, Server, ServerCounts, ServerPlan};

const BOUNDS: Bounds = Bounds {
    message_bytes_max: LOAD_MESSAGE_BYTES_MAX,
    parts_max: ROUTER_PARTS_MAX,
    command_bytes_max: ZMQ_COMMAND_BYTES_MAX,
};
const PLAN: ServerPlan = ServerPlan {
    role: Role::Router,
    bounds: BOUNDS,
    peers_max: 2 * ROUTER_PEERS_MAX,
    peers_per_address_max: ROUTER_PEERS_MAX,
    waiting_bytes_max: ROUTER_WAITING_BYTES_MAX,
    waiting_messages_max: ROUTER_WAITING_MESSAGES_MAX,
};
const POLL_EVENTS: usize = 128;

/// The bound socket, and the connections to the peers.
pub struct ZeroMq {
    server: Server,
    server_counted: ServerCounts,
    poll: Poll,
    peers: Vec<ConnectedPeer>,
    /// Peers that may have more messages, which the event loop does not signal again.
    unread: Vec<usize>,
    next_tick_ms: u64,
    routes: BTreeMap<OriginId, usize>,
    asked: Vec<(PeerId, zmtp::Message)>,
    counts: CarrierCounts,
}

struct ConnectedPeer {
    endpoint: Endpoint,
    peer: Peer,
    is_up: bool,
    origin: Option<OriginId>,
}

impl std::fmt::Debug for ZeroMq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ZeroMq").field("server", &self.server).field("peers", &self.peers.len()).finish_non_exhaustive()
    }
}

impl ZeroMq {
    /// Binds the socket of this router.
    ///
    /// # Errors
    /// As [`Server::bind`].
    pub fn bind(endpoint: &BoundEndpoint) -> Result<Server> {
        Server::bind(endpoint, PLAN)
    }

    /// Starts to connect to the peers. The first message on each connection is `opening`.
    ///
    /// # Errors
    /// [`Kind::System`] if there is no event loop, [`Kind::Config`] if an endpoint cannot be used.
    pub fn connect(server: Server, peers: &[Endpoint], opening: &[u8], now_ms: u64) -> Result<Self> {
        let system = |cause: io::Error| {
            Error::new(Kind::System, "cannot make an event loop for other routers", "raise the limit of open files")
                .caused_by(cause)
        };
        let poll = Poll::new().map_err(system)?;
        let registry: Arc<Registry> = Arc::new(poll.registry().try_clone().map_err(system)?);
        let opening = Opening::Send(zmtp::message(&[], opening));
        let connect = |(at, endpoint): (usize, &Endpoint)| {
            let plan = (Role::Dealer, BOUNDS, opening.clone());
            let peer = Peer::open(endpoint, plan, (Arc::clone(&registry), Token(at)), now_ms)?;
            Ok(ConnectedPeer { endpoint: endpoint.clone(), peer, is_up: false, origin: None })
        };
        let peers: Vec<_> = peers.iter().enumerate().map(connect).collect::<Result<_>>()?;
        Ok(Self {
            unread: (0..peers.len()).collect(),
            server,
            server_counted: ServerCounts::default(),
            poll,
            peers,
            next_tick_ms: now_ms,
            routes: BTreeMap::new(),
            asked: Vec::new(),
            counts: CarrierCounts::default(),
        })
    }

    /// Takes a quantum of messages of one peer. `true` = there may be more.
    fn read(&mut self, at: usize, now_ms: u64, arrived: &mut Vec<Arrived>) -> bool {
        let Some(of) = self.peers.get_mut(at) else { return false };
        for _ in 0..ROUTER_QUANTUM_MESSAGES_MAX {
            while let Some(event) = of.peer.link_event() {
                let address = &of.endpoint;
                match event {
                    LinkEvent::Handshake => of.is_up = true,
                    LinkEvent::Disconnected => {
                        of.is_up = false;
                        self.counts.links_lost += 1;
                    }
                    LinkEvent::Refused(refusal) => {
                        self.counts.connections_cut += 1;
                        tracing::warn!(%address, %refusal, "the connection to another router was cut");
                    }
                    LinkEvent::HandshakeFailed | LinkEvent::Unopened => {}
                }
                tracing::debug!(%address, ?event, "connection to another router");
            }
            match of.peer.next(now_ms) {
                Next::Message(message) => arrived.push(Arrived { from: Source::Link(at), bytes: message.last }),
                Next::Drained if of.peer.has_event() => {}
                Next::Drained => return false,
                Next::Later => {}
            }
        }
        true
    }

    fn tick(&mut self, now_ms: u64) {
        if now_ms < self.next_tick_ms {
            return;
        }
        self.next_tick_ms = now_ms + LOAD_TICK_MS;
        for (at, of) in self.peers.iter_mut().enumerate() {
            if of.peer.tick(now_ms) && !self.unread.contains(&at) {
                self.unread.push(at);
            }
        }
    }
}

impl Carrier for ZeroMq {
    fn receive(&mut self, wait: Duration, now_ms: u64, arrived: &mut Vec<Arrived>) -> io::Result<()> {
        let wait = if self.unread.is_empty() { wait } else { Duration::ZERO };
        let mut events = Events::with_capacity(POLL_EVENTS);
        match self.poll.poll(&mut events, Some(wait)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        let mut readable = std::mem::take(&mut self.unread);
        readable.extend(events.iter().map(|event| event.token().0));
        readable.sort_unstable();
        readable.dedup();
        for at in readable {
            if self.read(at, now_ms, arrived) {
                self.unread.push(at);
            }
        }
        let mut asked = std::mem::take(&mut self.asked);
        self.server.serve_peers(Duration::ZERO, now_ms, &mut asked)?;
        arrived.extend(asked.drain(..).map(|(peer, message)| {
            let (place, number) = peer.parts();
            Arrived { from: Source::Asker(Asker { place, number }), bytes: message.last }
        }));
        self.asked = asked;
        self.tick(now_ms);
        Ok(())
    }

    fn publish(&mut self, message: &[u8]) {
        self.server.publish(&zmtp::message(&[], message));
    }

    fn ask(&mut self, origin: OriginId, message: &[u8]) -> bool {
        let at = self.routes.get(&origin).copied();
        let Some(of) = at.and_then(|at| self.peers.get_mut(at)) else { return false };
        of.peer.send(zmtp::message(&[], message), ROUTER_WAITING_BYTES_MAX)
    }

    fn answer(&mut self, asker: Asker, message: &[u8]) -> bool {
        self.server.send(PeerId::of(asker.place, asker.number), [zmtp::message(&[], message)]) == Sent::Yes
    }

    fn admit(&mut self, asker: Asker) {
        self.server.subscribe(PeerId::of(asker.place, asker.number));
    }

    fn identify(&mut self, link: usize, origin: OriginId) {
        let Some(of) = self.peers.get_mut(link) else { return };
        of.origin = Some(origin);
        // If several links lead to the router, the one that brought the latest message counts.
        self.routes.insert(origin, link);
    }

    fn links(&self) -> Vec<Link> {
        let link = |of: &ConnectedPeer| Link { address: of.endpoint.to_string(), is_up: of.is_up, origin: of.origin };
        self.peers.iter().map(link).collect()
    }

    fn address(&self) -> &str {
        self.server.endpoint()
    }

    fn counts(&mut self) -> CarrierCounts {
        let (now, before) = (self.server.counts(), self.server_counted);
        self.server_counted = now;
        let of = |pick: fn(&ServerCounts) -> u64| pick(&now) - pick(&before);
        let link = std::mem::take(&mut self.counts);
        CarrierCounts {
            messages_dropped: of(|counts| counts.messages_dropped),
            connections_cut: link.connections_cut
                + of(|counts| counts.peers_refused + counts.peers_cut + counts.peers_stalled),
            links_lost: link.links_lost,
        }
    }
}
