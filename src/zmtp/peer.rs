//! The connecting end: one publisher or replay socket, connected to again for ever.
//!
//! | state | what ends it | next | told |
//! |---|---|---|---|
//! | Resting | its time is up | Resolving or Handshaking | |
//! | Resolving | addresses | Handshaking | |
//! | Resolving | no address | Resting | `Unopened` |
//! | Handshaking | READY | Up | `Handshake` |
//! | Handshaking, not connected | refused, unreachable, too late | Handshaking (next address) or Resting | |
//! | Handshaking, connected | closed, not ZMTP, too late | Resting | `HandshakeFailed` |
//! | Up | closed, silent | Resting | `Disconnected` |
//! | Up | a message breaks a bound | Resting, for the longest wait | `Refused`, `Disconnected` |
//!
//! Everything runs on the caller's thread. Readiness is edge-triggered, so [`Peer::next`] is called until it says
//! [`Next::Drained`]. What depends on time happens in [`Peer::tick`].

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use mio::net::{TcpStream, UnixStream};
use mio::{Registry, Token};

use super::address::Address;
use super::codec::{self, Bounds, Decoder, Item, Message, Refusal, Role};
use super::lookup::{Looked, Lookup};
use super::wire::{Broken, Step, Stream, Wire};
use crate::endpoint::Endpoint;
use crate::error::Result;
use crate::limits::{
    ZMQ_HANDSHAKE_MS_MAX, ZMQ_HEARTBEAT_MS, ZMQ_HEARTBEAT_TIMEOUT_MS, ZMQ_RECONNECT_MS_MAX, ZMQ_RECONNECT_MS_MIN,
    ZMQ_TURN_BYTES_MAX,
};

/// What the connection did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// A peer is there and takes what we ask of it.
    Handshake,
    /// A connection that had shaken hands ended.
    Disconnected,
    /// The endpoint could not even be tried: its host name does not resolve, or no socket could be made.
    Unopened,
    /// Whoever answers at the endpoint is no peer that we can talk to.
    HandshakeFailed,
    /// The peer broke the protocol or a bound; `Disconnected` follows.
    Refused(Refusal),
}

/// What to say first, on every connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opening {
    /// Subscribe to this prefix.
    Subscribe(Bytes),
    /// Send this message, as [`codec::message`] makes it.
    Send(Bytes),
}

/// What [`Peer::next`] finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// A message.
    Message(Message),
    /// There is no more for now: the event loop will signal what comes.
    Drained,
    /// There may be more, after the caller's other work and after what [`Peer::link_event`] has to say.
    Later,
}

enum State {
    Resting {
        until_ms: u64,
    },
    Resolving(Lookup),
    Handshaking {
        wire: Wire,
        since_ms: u64,
        /// Where else the name leads, in the order to be tried.
        others: VecDeque<SocketAddr>,
    },
    Up {
        wire: Wire,
        /// When bytes last came, and how many had by then.
        heard_ms: u64,
        heard_bytes: u64,
        /// When a PING was sent that nothing has followed yet.
        pinged_ms: Option<u64>,
        /// Everything that came has been taken: silence is the peer's.
        drained: bool,
    },
}

/// A connecting socket.
pub struct Peer {
    address: Address,
    role: Role,
    bounds: Bounds,
    opening: Opening,
    registry: Arc<Registry>,
    token: Token,
    state: State,
    /// What the connection did and nobody has taken yet. A handful at most: nothing goes on while something is here.
    events: VecDeque<LinkEvent>,
    /// The wait after the next failure.
    rest_ms: u64,
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer").field("address", &self.address).field("role", &self.role).finish_non_exhaustive()
    }
}

impl Peer {
    /// Starts to connect. An endpoint that nobody answers at is tried again for ever.
    ///
    /// # Errors
    /// [`crate::error::Kind::Config`] where the endpoint cannot be used.
    pub fn open(
        endpoint: &Endpoint,
        (role, bounds, opening): (Role, Bounds, Opening),
        (registry, token): (Arc<Registry>, Token),
        now_ms: u64,
    ) -> Result<Self> {
        let address = Address::parse(endpoint)?;
        let (state, events) = (State::Resting { until_ms: now_ms }, VecDeque::new());
        let rest_ms = ZMQ_RECONNECT_MS_MIN;
        let mut this = Self { address, role, bounds, opening, registry, token, state, events, rest_ms };
        this.connect(now_ms);
        Ok(this)
    }

    /// Signals under another token from now on.
    ///
    /// # Errors
    /// Those of the event loop. The connection may then never be signalled again.
    pub fn set_token(&mut self, token: Token) -> io::Result<()> {
        self.token = token;
        match &mut self.state {
            State::Resting { .. } => Ok(()),
            State::Resolving(lookup) => lookup.reregister(&self.registry, token),
            State::Handshaking { wire, .. } | State::Up { wire, .. } => wire.reregister(&self.registry, token),
        }
    }

    /// The next thing the connection did, if there is one.
    pub fn link_event(&mut self) -> Option<LinkEvent> {
        self.events.pop_front()
    }

    /// Whether [`Self::link_event`] has something to say.
    #[must_use]
    pub fn has_event(&self) -> bool {
        !self.events.is_empty()
    }

    /// Does what time asks for: connects again, gives up a handshake, sends heartbeats. `true` = something is to be
    /// said or read.
    pub fn tick(&mut self, now_ms: u64) -> bool {
        match &mut self.state {
            State::Resting { until_ms } if now_ms >= *until_ms => self.connect(now_ms),
            State::Handshaking { since_ms, .. } if now_ms.saturating_sub(*since_ms) >= ZMQ_HANDSHAKE_MS_MAX => {
                self.broken(&Broken::Ended, now_ms);
            }
            State::Resting { .. } => {}
            // No message can come of it. A caller that takes none for a while is connected all the same.
            State::Resolving(_) | State::Handshaking { .. } => drop(self.next(now_ms)),
            State::Up { .. } => self.heartbeat(now_ms),
        }
        self.has_event()
    }

    /// Goes on with the connection and takes the next message. Messages of a connection come between its
    /// `Handshake` and its `Disconnected`.
    pub fn next(&mut self, now_ms: u64) -> Next {
        if self.has_event() {
            return Next::Later;
        }
        let next = match &mut self.state {
            State::Resting { .. } => return Next::Drained,
            State::Resolving(_) => {
                self.resolved(now_ms);
                return if self.has_event() { Next::Later } else { Next::Drained };
            }
            State::Handshaking { .. } => self.shake_hands(now_ms),
            State::Up { .. } => self.receive(now_ms),
        };
        next.unwrap_or_else(|broken| {
            self.broken(&broken, now_ms);
            if self.has_event() { Next::Later } else { Next::Drained }
        })
    }

    fn receive(&mut self, now_ms: u64) -> Result<Next, Broken> {
        let State::Up { wire, heard_ms, heard_bytes, pinged_ms, drained } = &mut self.state else {
            return Ok(Next::Drained);
        };
        let mut budget_bytes = ZMQ_TURN_BYTES_MAX;
        let next = loop {
            match wire.next(&mut budget_bytes)? {
                Step::Item(Item::Message(message)) => break Next::Message(message),
                Step::Item(Item::Ping(context)) => wire.reply(codec::pong(&context)),
                // A subscription at a subscriber means nothing; commands beyond the budget wait.
                Step::Item(_) => budget_bytes = budget_bytes.saturating_sub(1),
                Step::Drained => break Next::Drained,
                Step::Budget => break Next::Later,
            }
        };
        *drained = next == Next::Drained;
        if wire.received_bytes() != *heard_bytes {
            (*heard_ms, *heard_bytes, *pinged_ms) = (now_ms, wire.received_bytes(), None);
        }
        if wire.waiting().0 > 0 {
            wire.flush()?;
        }
        Ok(next)
    }

    fn shake_hands(&mut self, now_ms: u64) -> Result<Next, Broken> {
        let State::Handshaking { wire, .. } = &mut self.state else { return Ok(Next::Drained) };
        let mut budget_bytes = ZMQ_TURN_BYTES_MAX;
        loop {
            wire.flush()?;
            match wire.next(&mut budget_bytes)? {
                Step::Item(Item::Greeted) => wire.queue(codec::ready(self.role)),
                Step::Item(Item::Ready) => {
                    let opening = match &self.opening {
                        Opening::Subscribe(prefix) => wire.decoder().subscription(prefix),
                        Opening::Send(message) => message.clone(),
                    };
                    wire.queue(opening);
                    wire.flush()?;
                    break;
                }
                Step::Item(_) => {}
                Step::Drained => return Ok(Next::Drained),
                Step::Budget => return Ok(Next::Later),
            }
        }
        let resting = State::Resting { until_ms: now_ms };
        if let State::Handshaking { wire, .. } = std::mem::replace(&mut self.state, resting) {
            let heard_bytes = wire.received_bytes();
            self.state = State::Up { wire, heard_ms: now_ms, heard_bytes, pinged_ms: None, drained: false };
            self.rest_ms = ZMQ_RECONNECT_MS_MIN;
            self.events.push_back(LinkEvent::Handshake);
        }
        Ok(Next::Later)
    }

    /// Notices a peer whose host is gone. Bytes that were not read yet are no silence.
    fn heartbeat(&mut self, now_ms: u64) {
        let State::Up { wire, heard_ms, pinged_ms, drained, .. } = &mut self.state else { return };
        let result = match *pinged_ms {
            Some(since_ms) if now_ms.saturating_sub(since_ms) >= ZMQ_HEARTBEAT_TIMEOUT_MS && *drained => {
                Err(Broken::Ended)
            }
            None if now_ms.saturating_sub(*heard_ms) >= ZMQ_HEARTBEAT_MS => {
                *pinged_ms = Some(now_ms);
                wire.queue(codec::ping());
                wire.flush()
            }
            _ => Ok(()),
        };
        if let Err(broken) = result {
            self.broken(&broken, now_ms);
        }
    }

    /// The connection, or the attempt at one, is over.
    fn broken(&mut self, broken: &Broken, now_ms: u64) {
        let bound = match broken {
            Broken::Refused(refusal) if refusal.is_bound() => Some(*refusal),
            Broken::Refused(_) | Broken::Ended => None,
        };
        match std::mem::replace(&mut self.state, State::Resting { until_ms: now_ms }) {
            State::Up { .. } => {
                if let Broken::Refused(refusal) = broken {
                    self.events.push_back(LinkEvent::Refused(*refusal));
                }
                self.events.push_back(LinkEvent::Disconnected);
            }
            State::Handshaking { wire, others, .. } => {
                if wire.sent_bytes() == 0 {
                    // Nobody listens there.
                    return self.try_addresses(others, now_ms);
                }
                self.events.push_back(LinkEvent::HandshakeFailed);
            }
            State::Resting { .. } | State::Resolving(_) => {}
        }
        if bound.is_some() {
            self.rest_ms = ZMQ_RECONNECT_MS_MAX;
        }
        self.rest(now_ms);
    }

    fn rest(&mut self, now_ms: u64) {
        self.state = State::Resting { until_ms: now_ms + self.rest_ms };
        self.rest_ms = (self.rest_ms * 2).min(ZMQ_RECONNECT_MS_MAX);
    }

    /// Begins an attempt.
    fn connect(&mut self, now_ms: u64) {
        match &self.address {
            Address::Ip(address) => self.try_addresses(VecDeque::from([*address]), now_ms),
            Address::Name { host, port } => {
                match Lookup::start(host, *port, &self.registry, self.token) {
                    // It may have ended before anybody waited for it.
                    Some(lookup) => self.state = State::Resolving(lookup),
                    None => self.state = State::Resting { until_ms: now_ms + ZMQ_RECONNECT_MS_MIN },
                }
            }
            Address::Path(path) => {
                let stream = UnixStream::connect(path);
                self.attempt(stream.map(Stream::Unix), VecDeque::new(), now_ms);
            }
            Address::Abstract(name) => {
                let stream = abstract_address(name).and_then(|address| UnixStream::connect_addr(&address));
                self.attempt(stream.map(Stream::Unix), VecDeque::new(), now_ms);
            }
        }
    }

    /// Takes what came of the look-up, if it is over.
    fn resolved(&mut self, now_ms: u64) {
        let State::Resolving(lookup) = &self.state else { return };
        match lookup.look() {
            Looked::Pending => {}
            Looked::Found(addresses) => self.try_addresses(addresses.into(), now_ms),
            Looked::Failed => {
                self.events.push_back(LinkEvent::Unopened);
                self.rest(now_ms);
            }
        }
    }

    fn try_addresses(&mut self, mut addresses: VecDeque<SocketAddr>, now_ms: u64) {
        match addresses.pop_front() {
            Some(address) => {
                let stream = TcpStream::connect(address);
                self.attempt(stream.map(Stream::Tcp), addresses, now_ms);
            }
            None => self.rest(now_ms),
        }
    }

    fn attempt(&mut self, stream: io::Result<Stream>, others: VecDeque<SocketAddr>, now_ms: u64) {
        let opened = stream.and_then(|stream| {
            if let Stream::Tcp(stream) = &stream {
                stream.set_nodelay(true)?;
            }
            let mut wire = Wire::new(stream, Decoder::new(self.role, self.bounds));
            wire.queue(codec::greeting());
            wire.register(&self.registry, self.token)?;
            Ok(wire)
        });
        match opened {
            Ok(wire) => self.state = State::Handshaking { wire, since_ms: now_ms, others },
            Err(_) if !others.is_empty() => self.try_addresses(others, now_ms),
            Err(error) => {
                if is_local(&error) {
                    self.events.push_back(LinkEvent::Unopened);
                }
                self.rest(now_ms);
            }
        }
    }
}

#[cfg(test)]
impl Peer {
    /// Has the connection end, whatever it is doing.
    pub(crate) fn break_up(&mut self) {
        self.state = State::Resting { until_ms: u64::MAX };
        self.events.push_back(LinkEvent::Disconnected);
    }
}

/// Whether an attempt failed because no socket could be made, and not because nobody answers.
fn is_local(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let errnos = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::NOSPC, Errno::AFNOSUPPORT];
    let errno = error.raw_os_error();
    errnos.iter().any(|local| errno == Some(local.raw_os_error())) || error.kind() == io::ErrorKind::InvalidInput
}

#[cfg(target_os = "linux")]
pub(super) fn abstract_address(name: &[u8]) -> io::Result<std::os::unix::net::SocketAddr> {
    use std::os::linux::net::SocketAddrExt as _;
    std::os::unix::net::SocketAddr::from_abstract_name(name)
}

#[cfg(not(target_os = "linux"))]
pub(super) fn abstract_address(_: &[u8]) -> io::Result<std::os::unix::net::SocketAddr> {
    Err(io::Error::new(io::ErrorKind::InvalidInput, "only Linux has abstract names of Unix sockets"))
}
