//! The binding end: a PUB or ROUTER for many peers, on its caller's thread.
//!
//! Every resource of a peer is bounded, as it arrives: its messages by [`Bounds`], the messages that wait for it by
//! bytes and number, its handshake and its reading by time. The number of peers is bounded, over all and from one
//! address. A peer that exceeds a limit is disconnected, and the others do not notice.
//!
//! Subscriptions are not stored. All messages have the empty topic, which only the empty subscription matches, so a
//! peer's subscriptions are one number, however many it makes.

use std::io;
use std::net::{IpAddr, ToSocketAddrs as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mio::event::Source;
use mio::net::{TcpListener, UnixListener};
use mio::{Events, Interest, Poll, Token, Waker};

use super::address::Address;
use super::codec::{self, Bounds, Decoder, Item, Message, Role};
use super::peer::abstract_address;
use super::wire::{Broken, Step, Stream, Wire};
use crate::endpoint::BoundEndpoint;
use crate::error::{Error, Kind, Result};
use crate::limits::{
    RELAY_HANDSHAKE_MS_MAX, RELAY_PEER_QUANTUM_BYTES_MAX, RELAY_PEER_QUANTUM_MESSAGES_MAX, RELAY_PEER_STALL_MS_MAX,
    RELAY_SUBSCRIBER_LAG_FACTOR_MAX,
};

const LISTENER: Token = Token(usize::MAX);
const WAKER: Token = Token(usize::MAX - 1);
const POLL_EVENTS: usize = 256;

/// The limits of a server's peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerPlan {
    /// [`Role::Publisher`] or [`Role::Router`].
    pub role: Role,
    /// The limits of what a peer may send.
    pub bounds: Bounds,
    /// Peers that may be connected.
    pub peers_max: usize,
    /// Of these, peers from one address.
    pub peers_per_address_max: usize,
    /// Bytes that may wait for one peer, unless nothing else waits.
    pub waiting_bytes_max: usize,
    /// Messages that may wait for one peer.
    pub waiting_messages_max: usize,
}

/// The counters of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerCounts {
    /// Peers refused because too many were connected.
    pub peers_refused: u64,
    /// Peers disconnected for what they sent, or for a handshake that took too long.
    pub peers_cut: u64,
    /// Peers disconnected because they read nothing for too long, or fell too far behind the stream.
    pub peers_stalled: u64,
    /// Messages that a peer missed because too much waited for it.
    pub messages_dropped: u64,
}

/// The id of a peer of a server. It is never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerId {
    place: usize,
    number: u64,
}

impl PeerId {
    /// The id of these numbers.
    pub(crate) const fn of(place: usize, number: u64) -> Self {
        Self { place, number }
    }

    /// Its numbers.
    pub(crate) const fn parts(self) -> (usize, u64) {
        (self.place, self.number)
    }
}

/// The result of sending a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// It is sent, or queued for sending.
    Yes,
    /// Too much waits for the peer.
    Full,
    /// The peer is gone.
    Gone,
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    fn accept(&self) -> io::Result<(Stream, Option<IpAddr>)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept()?;
                stream.set_nodelay(true)?;
                Ok((Stream::Tcp(stream), Some(address.ip())))
            }
            Self::Unix(listener) => Ok((Stream::Unix(listener.accept()?.0), None)),
        }
    }

    fn source(&mut self) -> &mut dyn Source {
        match self {
            Self::Tcp(listener) => listener,
            Self::Unix(listener) => listener,
        }
    }
}

struct Connected {
    number: u64,
    wire: Wire,
    /// `None` over Unix sockets, which only users of this machine reach.
    address: Option<IpAddr>,
    is_ready: bool,
    /// Its subscriptions to the empty prefix, minus the ended ones.
    subscriptions: u64,
    /// The last time when it connected, the kernel took bytes for it, or nothing waited.
    moved_ms: u64,
    sent_bytes: u64,
    lag: Lag,
}

/// How far a subscriber is behind the stream. Subscribers that wait for the same messages share their bytes, so
/// together they hold as much of the stream as the slowest of them.
#[derive(Clone, Copy, Debug)]
struct Lag {
    /// The bytes published before the oldest waiting message; at most a little too few.
    oldest: u64,
    /// Once `mark.0` bytes are sent, no waiting message is older than `mark.1` published bytes.
    mark: (u64, u64),
}

impl Lag {
    /// The bytes published before the oldest waiting message, given `published` bytes by now.
    fn oldest(&mut self, wire: &Wire, published: u64) -> u64 {
        let (sent, waiting) = (wire.sent_bytes(), wire.waiting().0 as u64);
        if waiting == 0 {
            self.oldest = published;
            self.mark = (sent, published);
        } else if sent >= self.mark.0 {
            self.oldest = self.mark.1;
            self.mark = (sent + waiting, published);
        }
        self.oldest
    }
}

/// A bound socket.
pub struct Server {
    plan: ServerPlan,
    poll: Poll,
    waker: Arc<Waker>,
    listener: Listener,
    endpoint: String,
    /// The socket's file, which is removed with the server.
    file: Option<PathBuf>,
    peers: Vec<Option<Connected>>,
    connected: usize,
    next_number: u64,
    /// Peers that may have more bytes than their fairness quantum allowed to read.
    unread: Vec<usize>,
    /// More connections may wait than could be accepted.
    accepts: bool,
    /// Bytes of all messages published so far.
    published_bytes: u64,
    counts: ServerCounts,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("endpoint", &self.endpoint)
            .field("peers", &self.connected)
            .finish_non_exhaustive()
    }
}

impl Server {
    /// Binds an endpoint.
    ///
    /// # Errors
    /// [`Kind::Config`] if it cannot be bound, [`Kind::System`] if no descriptor is left.
    pub fn bind(endpoint: &BoundEndpoint, plan: ServerPlan) -> Result<Self> {
        let refused = |cause: io::Error| {
            let remedy = "name a free port of this machine, tcp://*:PORT, or ipc:///PATH";
            Error::new(Kind::Config, format!("cannot bind `{}`", endpoint.as_str()), remedy).caused_by(cause)
        };
        Self::of(listen(&Address::parse(endpoint.as_str())?).map_err(refused)?, plan)
    }

    /// Serves the listening socket of an endpoint that another process has bound. Its file stays.
    ///
    /// # Errors
    /// [`Kind::System`] if the socket cannot be served.
    pub fn received(endpoint: &BoundEndpoint, socket: OwnedFd, plan: ServerPlan) -> Result<Self> {
        let listener = match Address::parse(endpoint.as_str())? {
            Address::Ip(_) | Address::Name { .. } => {
                let listener = std::net::TcpListener::from(socket);
                listener.set_nonblocking(true).map_err(system)?;
                Listener::Tcp(TcpListener::from_std(listener))
            }
            Address::Path(_) | Address::Abstract(_) => {
                let listener = std::os::unix::net::UnixListener::from(socket);
                listener.set_nonblocking(true).map_err(system)?;
                Listener::Unix(UnixListener::from_std(listener))
            }
        };
        Self::of((listener, endpoint.as_str().to_owned(), None), plan)
    }

    fn of((mut listener, bound, file): (Listener, String, Option<PathBuf>), plan: ServerPlan) -> Result<Self> {
        let poll = Poll::new().map_err(system)?;
        poll.registry().register(listener.source(), LISTENER, Interest::READABLE).map_err(system)?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER).map_err(system)?);
        Ok(Self {
            plan,
            poll,
            waker,
            listener,
            endpoint: bound,
            file,
            peers: Vec::new(),
            connected: 0,
            next_number: 0,
            unread: Vec::new(),
            accepts: false,
            published_bytes: 0,
            counts: ServerCounts::default(),
        })
    }

    /// Leaves the socket's file when the server ends: another process listens there.
    pub fn leave_file(&mut self) {
        self.file = None;
    }

    /// The listening socket.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        match &self.listener {
            Listener::Tcp(listener) => listener.as_fd(),
            Listener::Unix(listener) => listener.as_fd(),
        }
    }

    /// The endpoint that it listens on, with its actual port.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Ends the wait of [`Self::serve_peers`] from another thread.
    #[must_use]
    pub fn waker(&self) -> Arc<Waker> {
        Arc::clone(&self.waker)
    }

    /// The counts so far.
    #[must_use]
    pub const fn counts(&self) -> ServerCounts {
        self.counts
    }

    /// Peers that are connected.
    #[must_use]
    pub const fn peers(&self) -> usize {
        self.connected
    }

    /// Waits for work, for a limited time, and serves every peer by one fairness quantum. Received messages are
    /// appended to `received`.
    ///
    /// # Errors
    /// The event loop failed; no more messages will come.
    pub fn serve_peers(
        &mut self,
        wait: Duration,
        now_ms: u64,
        received: &mut Vec<(PeerId, Message)>,
    ) -> io::Result<()> {
        let mut events = Events::with_capacity(POLL_EVENTS);
        let wait = if self.unread.is_empty() { wait } else { Duration::ZERO };
        match self.poll.poll(&mut events, Some(wait)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        let mut places = std::mem::take(&mut self.unread);
        for event in &events {
            match event.token() {
                WAKER => {}
                LISTENER => self.accepts = true,
                Token(place) => places.push(place),
            }
        }
        // A peer that is signalled while it still has unread bytes gets one quantum nevertheless.
        places.sort_unstable();
        places.dedup();
        for place in places {
            self.attend(place, now_ms, received);
        }
        if self.accepts {
            self.accept(now_ms);
        }
        self.see_overdue(now_ms);
        Ok(())
    }

    /// Sends a message to one peer. The message is given in pieces.
    pub fn send(&mut self, peer: PeerId, pieces: impl IntoIterator<Item = Bytes>) -> Sent {
        let found = self.peers.get_mut(peer.place).and_then(Option::as_mut);
        let Some(connected) = found.filter(|connected| connected.number == peer.number) else { return Sent::Gone };
        match connected.send(&self.plan, pieces) {
            Ok(sent) => sent,
            Err(_) => {
                self.close(peer.place);
                Sent::Gone
            }
        }
    }

    /// Makes a peer of a ROUTER a subscriber, which [`Self::publish`] reaches.
    pub fn subscribe(&mut self, peer: PeerId) {
        let found = self.peers.get_mut(peer.place).and_then(Option::as_mut);
        if let Some(connected) = found.filter(|connected| connected.number == peer.number) {
            connected.subscriptions = 1;
        }
    }

    /// Whether a peer is still connected.
    #[must_use]
    pub fn has(&self, peer: PeerId) -> bool {
        self.peers.get(peer.place).and_then(Option::as_ref).is_some_and(|connected| connected.number == peer.number)
    }

    /// Sends a message to every subscriber. A peer misses it if too much waits for it. A peer for which too old a
    /// message waits is disconnected.
    pub fn publish(&mut self, message: &Bytes) {
        let lag_bytes_max = self.plan.waiting_bytes_max as u64 * RELAY_SUBSCRIBER_LAG_FACTOR_MAX;
        let before = self.published_bytes;
        self.published_bytes += message.len() as u64;
        for place in 0..self.peers.len() {
            let Some(connected) = self.peers[place].as_mut().filter(|connected| connected.subscriptions > 0) else {
                continue;
            };
            if self.published_bytes.saturating_sub(connected.lag.oldest(&connected.wire, before)) > lag_bytes_max {
                self.counts.peers_stalled += 1;
                self.close(place);
                continue;
            }
            match connected.send(&self.plan, [message.clone()]) {
                Ok(Sent::Yes | Sent::Gone) => {}
                Ok(Sent::Full) => self.counts.messages_dropped += 1,
                Err(_) => self.close(place),
            }
        }
    }

    fn close(&mut self, place: usize) {
        if self.peers.get_mut(place).and_then(Option::take).is_some() {
            self.connected -= 1;
        }
    }

    /// Accepts connections until none waits or no descriptor is left.
    fn accept(&mut self, now_ms: u64) {
        // Connections that are refused at once must not delay the peers.
        for _ in 0..self.plan.peers_max {
            match self.listener.accept() {
                Ok((stream, address)) => self.take_in(stream, address, now_ms),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.accepts = false;
                    return;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // It has closed already, or no descriptor is left: the next call tries again.
                Err(_) => return,
            }
        }
    }

    fn take_in(&mut self, stream: Stream, address: Option<IpAddr>, now_ms: u64) {
        let from_there = || self.peers.iter().flatten().filter(|peer| peer.address == address).count();
        let ServerPlan { peers_max, peers_per_address_max, .. } = self.plan;
        if self.connected >= peers_max || (address.is_some() && from_there() >= peers_per_address_max) {
            self.counts.peers_refused += 1;
            return;
        }
        let place = self.peers.iter().position(Option::is_none).unwrap_or(self.peers.len());
        let mut wire = Wire::new(stream, Decoder::new(self.plan.role, self.plan.bounds));
        wire.queue(codec::greeting());
        if wire.register(self.poll.registry(), Token(place)).is_err() {
            self.counts.peers_refused += 1;
            return;
        }
        self.next_number += 1;
        let number = self.next_number;
        let lag = Lag { oldest: self.published_bytes, mark: (0, self.published_bytes) };
        let connected = Connected {
            number,
            wire,
            address,
            is_ready: false,
            subscriptions: 0,
            moved_ms: now_ms,
            sent_bytes: 0,
            lag,
        };
        match self.peers.get_mut(place) {
            Some(free) => *free = Some(connected),
            None => self.peers.push(Some(connected)),
        }
        self.connected += 1;
        // Registration signals bytes that arrived before it.
    }

    /// Serves one peer by a fairness quantum.
    fn attend(&mut self, place: usize, now_ms: u64, received: &mut Vec<(PeerId, Message)>) {
        let Some(connected) = self.peers.get_mut(place).and_then(Option::as_mut) else { return };
        match connected.attend(self.plan.role, place, now_ms, received) {
            Ok(true) => {}
            Ok(false) => self.unread.push(place),
            Err(broken) => {
                if matches!(broken, Broken::Refused(_)) {
                    self.counts.peers_cut += 1;
                    let times = self.counts.peers_cut;
                    if times.is_power_of_two() {
                        let (address, endpoint) = (connected.address, &self.endpoint);
                        tracing::warn!(?address, endpoint, times, ?broken, "a peer was cut");
                    }
                }
                self.close(place);
            }
        }
    }

    /// Disconnects peers whose handshake or reading is too slow.
    fn see_overdue(&mut self, now_ms: u64) {
        for place in 0..self.peers.len() {
            let Some(connected) = &mut self.peers[place] else { continue };
            if connected.sent_bytes != connected.wire.sent_bytes()
                || (connected.is_ready && connected.wire.waiting().0 == 0)
            {
                connected.sent_bytes = connected.wire.sent_bytes();
                if connected.is_ready {
                    connected.moved_ms = now_ms;
                }
            }
            let still_ms = now_ms.saturating_sub(connected.moved_ms);
            if !connected.is_ready && still_ms >= RELAY_HANDSHAKE_MS_MAX {
                self.counts.peers_cut += 1;
                self.close(place);
            } else if still_ms >= RELAY_PEER_STALL_MS_MAX {
                self.counts.peers_stalled += 1;
                self.close(place);
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            // Another server may have replaced the file; there is no caller to report to.
            drop(std::fs::remove_file(file));
        }
    }
}

impl Connected {
    fn send(
        &mut self,
        plan: &ServerPlan,
        pieces: impl IntoIterator<Item = Bytes>,
    ) -> std::result::Result<Sent, Broken> {
        let (bytes, messages) = self.wire.waiting();
        if bytes > 0 && (bytes >= plan.waiting_bytes_max || messages >= plan.waiting_messages_max) {
            self.wire.flush()?;
            let (bytes, messages) = self.wire.waiting();
            if bytes > 0 && (bytes >= plan.waiting_bytes_max || messages >= plan.waiting_messages_max) {
                return Ok(Sent::Full);
            }
        }
        pieces.into_iter().for_each(|piece| self.wire.queue(piece));
        self.wire.flush()?;
        Ok(Sent::Yes)
    }

    /// Reads a peer's share of the quantum; `true` = nothing is left.
    fn attend(
        &mut self,
        role: Role,
        place: usize,
        now_ms: u64,
        received: &mut Vec<(PeerId, Message)>,
    ) -> std::result::Result<bool, Broken> {
        let (mut budget_bytes, mut budget_messages) = (RELAY_PEER_QUANTUM_BYTES_MAX, RELAY_PEER_QUANTUM_MESSAGES_MAX);
        while budget_messages > 0 {
            self.wire.flush()?;
            match self.wire.next(&mut budget_bytes)? {
                Step::Item(Item::Greeted) => self.wire.queue(codec::ready(role)),
                Step::Item(Item::Ready) => (self.is_ready, self.moved_ms) = (true, now_ms),
                Step::Item(Item::Ping(context)) => self.wire.reply(codec::pong(&context)),
                Step::Item(Item::Subscribe(prefix)) => self.subscribe(&prefix),
                Step::Item(Item::Cancel(prefix)) => self.cancel(&prefix),
                Step::Item(Item::Pong) => {}
                Step::Item(Item::Message(message)) if role == Role::Publisher => match message.last.split_first() {
                    Some((1, prefix)) => self.subscribe(prefix),
                    Some((0, prefix)) => self.cancel(prefix),
                    _ => {}
                },
                Step::Item(Item::Message(message)) => {
                    budget_messages -= 1;
                    received.push((PeerId { place, number: self.number }, message));
                }
                Step::Drained => return Ok(true),
                Step::Budget => return Ok(false),
            }
        }
        Ok(false)
    }

    fn subscribe(&mut self, prefix: &[u8]) {
        self.subscriptions = self.subscriptions.saturating_add(u64::from(prefix.is_empty()));
    }

    fn cancel(&mut self, prefix: &[u8]) {
        self.subscriptions = self.subscriptions.saturating_sub(u64::from(prefix.is_empty()));
    }
}

/// A listener, its endpoint as text, and its file.
fn system(cause: io::Error) -> Error {
    Error::new(Kind::System, "cannot open a listening socket", "raise the limit of open files").caused_by(cause)
}

fn listen(address: &Address) -> io::Result<(Listener, String, Option<PathBuf>)> {
    match address {
        Address::Ip(address) => tcp(*address),
        Address::Name { host, port } => {
            let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
            for address in (host.as_str(), *port).to_socket_addrs()? {
                match tcp(address) {
                    Ok(listening) => return Ok(listening),
                    Err(error) => last = error,
                }
            }
            Err(last)
        }
        Address::Path(path) => {
            let listener = UnixListener::bind(path).or_else(|error| {
                if error.kind() == io::ErrorKind::AddrInUse && is_left_behind(path) {
                    std::fs::remove_file(path)?;
                    return UnixListener::bind(path);
                }
                Err(error)
            })?;
            Ok((Listener::Unix(listener), format!("ipc://{}", path.display()), Some(path.clone())))
        }
        Address::Abstract(name) => {
            let listener = UnixListener::bind_addr(&abstract_address(name)?)?;
            Ok((Listener::Unix(listener), format!("ipc://@{}", String::from_utf8_lossy(name)), None))
        }
    }
}

fn tcp(address: std::net::SocketAddr) -> io::Result<(Listener, String, Option<PathBuf>)> {
    let listener = TcpListener::bind(address)?;
    let endpoint = format!("tcp://{}", listener.local_addr()?);
    Ok((Listener::Tcp(listener), endpoint, None))
}

/// Whether a socket's file exists without a listener: its process was killed.
fn is_left_behind(path: &Path) -> bool {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    let refused = || {
        std::os::unix::net::UnixStream::connect(path)
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    };
    is_socket && refused()
}
