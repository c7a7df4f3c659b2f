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
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use mio::{Events, Poll, Registry, Token};

use super::carrier::{Arrived, Asker, Carrier, CarrierCounts, Link, Source};
use super::values::OriginId;
use crate::endpoint::{BoundEndpoint, Endpoint};
use crate::error::{Error, Kind, Result};
use crate::limits::{
    LOAD_MESSAGE_BYTES_MAX, LOAD_TICK_MS, ROUTER_CONNECT_MS_MAX, ROUTER_HANDSHAKE_MS_MAX, ROUTER_LINK_HEARTBEAT_MS,
    ROUTER_LINK_TIMEOUT_MS, ROUTER_NAME_EVERY_MS, ROUTER_PARTS_MAX, ROUTER_PEERS_MAX, ROUTER_QUANTUM_MESSAGES_MAX,
    ROUTER_RECONNECT_MS_MAX, ROUTER_WAITING_BYTES_MAX, ROUTER_WAITING_MESSAGES_MAX, ZMQ_COMMAND_BYTES_MAX,
};
use crate::zmtp::{
    self, Bounds, LinkEvent, Looked, Lookup, Next, Opening, Pace, Peer, PeerId, PeerPlan, Role, Sent, Server,
    ServerCounts, ServerPlan,
};

const BOUNDS: Bounds = Bounds {
    message_bytes_max: LOAD_MESSAGE_BYTES_MAX,
    parts_max: ROUTER_PARTS_MAX,
    command_bytes_max: ZMQ_COMMAND_BYTES_MAX,
    keeps_parts: false,
};
const PLAN: ServerPlan = ServerPlan {
    role: Role::Router,
    bounds: BOUNDS,
    peers_max: 2 * ROUTER_PEERS_MAX,
    peers_per_address_max: ROUTER_PEERS_MAX,
    waiting_bytes_max: ROUTER_WAITING_BYTES_MAX,
    waiting_messages_max: ROUTER_WAITING_MESSAGES_MAX,
};
/// A router that is silent for longer than its heartbeats take is not reached.
const PACE: Pace = Pace {
    connect_ms_max: ROUTER_CONNECT_MS_MAX,
    handshake_ms_max: ROUTER_HANDSHAKE_MS_MAX,
    reconnect_ms_max: ROUTER_RECONNECT_MS_MAX,
    heartbeat_ms: ROUTER_LINK_HEARTBEAT_MS,
    heartbeat_timeout_ms: ROUTER_LINK_TIMEOUT_MS,
};
const POLL_EVENTS: usize = 128;

/// The token of a lookup. It signals only that the lookup has ended, which is looked for anyway.
const LOOKUP: Token = Token(usize::MAX);
/// The number of the link that stands for a list that is not known yet.
const AWAITED: usize = usize::MAX - 1;

/// The peers that are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WantedPeers {
    /// By their addresses.
    pub listed: Vec<Endpoint>,
    /// The name of a list that is not known yet: until it is, none of its peers is.
    pub awaited: Option<String>,
    /// And those at all addresses of this host name, with this port.
    pub named: Option<(String, u16)>,
}

/// The bound socket, and the connections to the peers.
pub struct ZeroMq {
    server: Server,
    server_counted: ServerCounts,
    poll: Poll,
    events: Events,
    registry: Arc<Registry>,
    opening: Opening,
    wanted: WantedPeers,
    /// The addresses of the host name, as last found.
    found: Vec<Endpoint>,
    lookup: Option<Lookup>,
    next_lookup_ms: u64,
    /// By token. A place is used again once its peer is no longer wanted.
    peers: Vec<Option<ConnectedPeer>>,
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
        f.debug_struct("ZeroMq").field("server", &self.server).field("wanted", &self.wanted).finish_non_exhaustive()
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

    /// Serves the socket of an endpoint that another daemon has bound.
    ///
    /// # Errors
    /// [`Kind::System`] if it cannot be served.
    pub fn received(endpoint: &BoundEndpoint, socket: OwnedFd) -> Result<Server> {
        Server::received(endpoint, socket, PLAN)
    }

    /// Leaves the file of the socket to another process.
    pub fn leave_file(&mut self) {
        self.server.leave_file();
    }

    /// Starts to connect to the peers. The first message on each connection is `opening`.
    ///
    /// # Errors
    /// [`Kind::System`] if there is no event loop.
    pub fn connect(server: Server, wanted: WantedPeers, opening: &[u8], now_ms: u64) -> Result<Self> {
        let system = |cause: io::Error| {
            Error::new(Kind::System, "cannot make an event loop for other routers", "raise the limit of open files")
                .caused_by(cause)
        };
        let poll = Poll::new().map_err(system)?;
        let registry = Arc::new(poll.registry().try_clone().map_err(system)?);
        let mut carrier = Self {
            server,
            server_counted: ServerCounts::default(),
            poll,
            events: Events::with_capacity(POLL_EVENTS),
            registry,
            opening: Opening::Send(zmtp::message(&[], opening)),
            wanted,
            found: Vec::new(),
            lookup: None,
            next_lookup_ms: now_ms,
            peers: Vec::new(),
            unread: Vec::new(),
            next_tick_ms: now_ms,
            routes: BTreeMap::new(),
            asked: Vec::new(),
            counts: CarrierCounts::default(),
        };
        carrier.open_wanted(now_ms);
        Ok(carrier)
    }

    /// Listens to these peers from now on. Connections to peers that are wanted again stay.
    pub fn follow(&mut self, wanted: WantedPeers, now_ms: u64) {
        if wanted.named != self.wanted.named {
            self.found.clear();
            (self.lookup, self.next_lookup_ms) = (None, now_ms);
        }
        self.wanted = wanted;
        self.open_wanted(now_ms);
    }

    /// Closes connections to peers that are no longer wanted, and opens those that are missing.
    fn open_wanted(&mut self, now_ms: u64) {
        let mut missing: Vec<Endpoint> = self.wanted.listed.iter().chain(&self.found).cloned().collect();
        missing.sort_unstable();
        missing.dedup();
        if missing.len() > ROUTER_PEERS_MAX {
            tracing::error!(
                peers = missing.len(),
                peers_max = ROUTER_PEERS_MAX,
                "this router does not hear all of its peers; name fewer"
            );
            missing.truncate(ROUTER_PEERS_MAX);
        }
        for (at, place) in self.peers.iter_mut().enumerate() {
            let is_of = |of: &ConnectedPeer| missing.iter().position(|endpoint| *endpoint == of.endpoint);
            match place.as_ref().map(is_of) {
                Some(Some(found)) => drop(missing.swap_remove(found)),
                Some(None) => {
                    *place = None;
                    self.routes.retain(|_, link| *link != at);
                }
                None => {}
            }
        }
        for endpoint in missing {
            let at = self.peers.iter().position(Option::is_none).unwrap_or_else(|| {
                self.peers.push(None);
                self.peers.len() - 1
            });
            let plan = PeerPlan { role: Role::Dealer, bounds: BOUNDS, opening: self.opening.clone(), pace: PACE };
            match Peer::open(&endpoint, plan, (Arc::clone(&self.registry), Token(at)), now_ms) {
                Ok(peer) => {
                    self.peers[at] = Some(ConnectedPeer { endpoint, peer, is_up: false, origin: None });
                    self.unread.push(at);
                }
                Err(error) => tracing::error!(%endpoint, %error, "the address of another router cannot be used"),
            }
        }
    }

    /// Looks the host name up, from time to time. While it has no addresses, the last ones stay.
    fn look_up(&mut self, now_ms: u64) {
        let Some((host, port)) = &self.wanted.named else { return };
        match self.lookup.as_ref().map(Lookup::look) {
            None if now_ms >= self.next_lookup_ms => {
                self.next_lookup_ms = now_ms + ROUTER_NAME_EVERY_MS;
                self.lookup = Lookup::start((host, *port), ROUTER_PEERS_MAX, &self.registry, LOOKUP);
            }
            None | Some(Looked::Pending) => {}
            Some(Looked::Failed) => {
                self.lookup = None;
                tracing::debug!(host, "the name of other routers has no address now");
            }
            Some(Looked::Found(addresses)) => {
                self.lookup = None;
                let endpoints = addresses.iter().filter_map(|of| Endpoint::parse(&format!("tcp://{of}")).ok());
                let found: Vec<Endpoint> = endpoints.collect();
                if found != self.found {
                    tracing::info!(host, addresses = found.len(), "the name of other routers has other addresses");
                    self.found = found;
                    self.open_wanted(now_ms);
                }
            }
        }
    }

    /// Takes a quantum of messages of one peer. `true` = there may be more.
    fn read(&mut self, at: usize, now_ms: u64, arrived: &mut Vec<Arrived>) -> bool {
        let Some(of) = self.peers.get_mut(at).and_then(Option::as_mut) else { return false };
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
        self.look_up(now_ms);
        for (at, of) in self.peers.iter_mut().enumerate() {
            let Some(of) = of else { continue };
            if of.peer.tick(now_ms) && !self.unread.contains(&at) {
                self.unread.push(at);
            }
        }
    }
}

impl Carrier for ZeroMq {
    fn receive(&mut self, wait: Duration, now_ms: u64, arrived: &mut Vec<Arrived>) -> io::Result<()> {
        let wait = if self.unread.is_empty() { wait } else { Duration::ZERO };
        match self.poll.poll(&mut self.events, Some(wait)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        let mut readable = std::mem::take(&mut self.unread);
        readable.extend(self.events.iter().map(|event| event.token().0));
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
        let Some(of) = at.and_then(|at| self.peers.get_mut(at)?.as_mut()) else { return false };
        of.peer.send(zmtp::message(&[], message), ROUTER_WAITING_BYTES_MAX)
    }

    fn answer(&mut self, asker: Asker, message: &[u8]) -> bool {
        self.server.send(PeerId::of(asker.place, asker.number), [zmtp::message(&[], message)]) == Sent::Yes
    }

    fn admit(&mut self, asker: Asker) {
        self.server.subscribe(PeerId::of(asker.place, asker.number));
    }

    fn is_admitted(&self, asker: Asker) -> bool {
        self.server.has(PeerId::of(asker.place, asker.number))
    }

    fn identify(&mut self, link: usize, origin: OriginId) {
        let Some(of) = self.peers.get_mut(link).and_then(Option::as_mut) else { return };
        of.origin = Some(origin);
        // If several links lead to the router, the one that brought the latest message counts.
        self.routes.insert(origin, link);
    }

    fn links(&self) -> Vec<(usize, Link)> {
        let link = |of: &ConnectedPeer| {
            let ConnectedPeer { endpoint, is_up, origin, .. } = of;
            Link { address: endpoint.to_string(), is_up: *is_up, origin: *origin, is_broker: false }
        };
        let mut links: Vec<_> =
            self.peers.iter().enumerate().filter_map(|(at, of)| Some((at, link(of.as_ref()?)))).collect();
        // Until it is known which peers there are, none of them is known.
        let unknown = |address| Link { address, is_up: false, origin: None, is_broker: false };
        if let Some((host, port)) = self.wanted.named.as_ref().filter(|_| self.found.is_empty()) {
            links.push((LOOKUP.0, unknown(format!("{host}:{port}"))));
        }
        links.extend(self.wanted.awaited.clone().map(|list| (AWAITED, unknown(list))));
        links
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
