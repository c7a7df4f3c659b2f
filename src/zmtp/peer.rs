//! The connecting end: one publisher or replay socket, with reconnects for ever.
//!
//! | state | what ends it | next | event |
//! |---|---|---|---|
//! | BackingOff | its pause is over | Resolving or Handshaking | |
//! | Resolving | addresses | Handshaking | |
//! | Resolving | no address | BackingOff | `Unopened` |
//! | Handshaking | READY | Up | `Handshake` |
//! | Handshaking, not connected | refused, unreachable, too late | Handshaking (next address) or BackingOff | |
//! | Handshaking, connected | closed, not ZMTP, too late | BackingOff | `HandshakeFailed` |
//! | Up | closed, silent | BackingOff | `Disconnected` |
//! | Up | a message exceeds a limit | BackingOff, for the longest pause | `Refused`, `Disconnected` |
//!
//! Everything runs on the caller's thread. Readiness is edge-triggered, so the caller calls [`Peer::next`] until it
//! returns [`Next::Drained`]. Everything that depends on time happens in [`Peer::tick`].

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use mio::net::{TcpStream, UnixStream};
use mio::{Registry, Token};

use super::address::{Address, Looked, Lookup};
use super::codec::{self, Bounds, Decoder, Item, Message, Refusal, Role};
use super::wire::{Broken, Step, Stream, Wire};
use crate::endpoint::Endpoint;
use crate::error::Result;
use crate::limits::{
    NAME_ADDRESSES_MAX, ZMQ_CONNECT_MS_MAX, ZMQ_HANDSHAKE_MS_MAX, ZMQ_HEARTBEAT_MS, ZMQ_HEARTBEAT_TIMEOUT_MS,
    ZMQ_QUANTUM_BYTES_MAX, ZMQ_RECONNECT_MS_MAX, ZMQ_RECONNECT_MS_MIN,
};

/// An event of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// The handshake is complete.
    Handshake,
    /// A connection ended after its handshake.
    Disconnected,
    /// No connection could be tried: the host name does not resolve, or no socket could be made.
    Unopened,
    /// The process at the endpoint does not speak our protocol.
    HandshakeFailed,
    /// The peer broke the protocol or a limit; `Disconnected` follows.
    Refused(Refusal),
}

/// The first message on every connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opening {
    /// Subscribe to this prefix.
    Subscribe(Bytes),
    /// Send this message, as [`codec::message`] makes it.
    Send(Bytes),
}

/// How soon a connection counts as lost, and how often it is tried again. TCP itself waits ever longer between two tries: after
/// an outage it needs about as long as the outage lasted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Time for any answer from an address, milliseconds.
    pub connect_ms_max: u64,
    /// Time for an attempt, to the end of the handshake, milliseconds.
    pub handshake_ms_max: u64,
    /// Longest pause between two attempts, milliseconds.
    pub reconnect_ms_max: u64,
    /// Silence after which the peer gets a PING, milliseconds.
    pub heartbeat_ms: u64,
    /// Time for its answer, milliseconds.
    pub heartbeat_timeout_ms: u64,
}

impl Pace {
    /// That of engines, which may be busy for seconds.
    pub const ENGINE: Self = Self {
        connect_ms_max: ZMQ_CONNECT_MS_MAX,
        handshake_ms_max: ZMQ_HANDSHAKE_MS_MAX,
        reconnect_ms_max: ZMQ_RECONNECT_MS_MAX,
        heartbeat_ms: ZMQ_HEARTBEAT_MS,
        heartbeat_timeout_ms: ZMQ_HEARTBEAT_TIMEOUT_MS,
    };
}

/// What a connection is for.
#[derive(Clone, Debug)]
pub struct PeerPlan {
    /// What this end is.
    pub role: Role,
    /// What the peer may send.
    pub bounds: Bounds,
    /// What is said first.
    pub opening: Opening,
    /// How soon a lost connection is noticed.
    pub pace: Pace,
}

/// The result of [`Peer::next`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// A message.
    Message(Message),
    /// No more for now: the event loop signals further bytes.
    Drained,
    /// There may be more. Do other work first, and take the events of [`Peer::link_event`].
    Later,
}

enum State {
    BackingOff {
        until_ms: u64,
    },
    Resolving(Lookup),
    Handshaking {
        wire: Wire,
        since_ms: u64,
        /// The name's other addresses, in the order of tries.
        others: VecDeque<SocketAddr>,
    },
    Up {
        wire: Wire,
        /// The time of the last received bytes, and their count by then.
        heard_ms: u64,
        heard_bytes: u64,
        /// The time of a PING after which nothing has arrived yet.
        pinged_ms: Option<u64>,
        /// All received bytes have been taken, so silence is the peer's.
        drained: bool,
    },
}

/// A connecting socket.
pub struct Peer {
    address: Address,
    plan: PeerPlan,
    registry: Arc<Registry>,
    token: Token,
    state: State,
    /// Events that the caller has not taken yet. They are few, because the connection does not proceed while there are
    /// any.
    events: VecDeque<LinkEvent>,
    /// The pause after the next failure.
    back_off_ms: u64,
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer").field("address", &self.address).field("role", &self.plan.role).finish_non_exhaustive()
    }
}

impl Peer {
    /// Starts to connect. It tries an endpoint without an answer again for ever.
    ///
    /// # Errors
    /// [`crate::error::Kind::Config`] if the endpoint is invalid.
    pub fn open(
        endpoint: &Endpoint,
        plan: PeerPlan,
        (registry, token): (Arc<Registry>, Token),
        now_ms: u64,
    ) -> Result<Self> {
        let address = Address::parse(endpoint)?;
        let (state, events) = (State::BackingOff { until_ms: now_ms }, VecDeque::new());
        let back_off_ms = ZMQ_RECONNECT_MS_MIN;
        let mut this = Self { address, plan, registry, token, state, events, back_off_ms };
        this.connect(now_ms);
        Ok(this)
    }

    /// Registers under another token.
    ///
    /// # Errors
    /// Those of the event loop. It may then never signal the connection again.
    pub fn set_token(&mut self, token: Token) -> io::Result<()> {
        self.token = token;
        match &mut self.state {
            State::BackingOff { .. } => Ok(()),
            State::Resolving(lookup) => lookup.reregister(&self.registry, token),
            State::Handshaking { wire, .. } | State::Up { wire, .. } => wire.reregister(&self.registry, token),
        }
    }

    /// The next event of the connection, if there is one.
    pub fn link_event(&mut self) -> Option<LinkEvent> {
        self.events.pop_front()
    }

    /// Whether [`Self::link_event`] has an event.
    #[must_use]
    pub fn has_event(&self) -> bool {
        !self.events.is_empty()
    }

    /// Does what is due: reconnects, ends a slow handshake, sends heartbeats. `true` = there is an event or a message
    /// to take.
    pub fn tick(&mut self, now_ms: u64) -> bool {
        match &mut self.state {
            State::BackingOff { until_ms } if now_ms >= *until_ms => self.connect(now_ms),
            State::BackingOff { .. } => {}
            State::Handshaking { wire, since_ms, .. } => {
                let is_answered = wire.sent_bytes() > 0;
                let Pace { connect_ms_max, handshake_ms_max, .. } = self.plan.pace;
                let ms_max = if is_answered { handshake_ms_max } else { connect_ms_max };
                if now_ms.saturating_sub(*since_ms) >= ms_max {
                    self.broken(&Broken::Ended, now_ms);
                } else {
                    drop(self.next(now_ms));
                }
            }
            // No message results from it. A caller that takes no messages for a while stays connected nevertheless.
            State::Resolving(_) => drop(self.next(now_ms)),
            State::Up { .. } => self.heartbeat(now_ms),
        }
        self.has_event()
    }

    /// Advances the connection and takes the next message. Messages of a connection come between its `Handshake` and
    /// its `Disconnected`.
    pub fn next(&mut self, now_ms: u64) -> Next {
        if self.has_event() {
            return Next::Later;
        }
        let next = match &mut self.state {
            State::BackingOff { .. } => return Next::Drained,
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

    /// Sends a message, as [`codec::message`] makes it, behind those of which at most `waiting_bytes_max` wait. `false` =
    /// it is not connected, or more wait.
    pub fn send(&mut self, message: Bytes, waiting_bytes_max: usize) -> bool {
        let State::Up { wire, .. } = &mut self.state else { return false };
        if wire.waiting().0 > waiting_bytes_max {
            return false;
        }
        wire.queue(message);
        // A connection that has ended shows when it is read.
        wire.flush().is_ok()
    }

    fn receive(&mut self, now_ms: u64) -> Result<Next, Broken> {
        let State::Up { wire, heard_ms, heard_bytes, pinged_ms, drained } = &mut self.state else {
            return Ok(Next::Drained);
        };
        let mut budget_bytes = ZMQ_QUANTUM_BYTES_MAX;
        let next = loop {
            match wire.next(&mut budget_bytes)? {
                Step::Item(Item::Message(message)) => break Next::Message(message),
                Step::Item(Item::Ping(context)) => wire.reply(codec::pong(&context)),
                // A subscription to a subscriber has no meaning. Commands beyond the budget wait.
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
        let mut budget_bytes = ZMQ_QUANTUM_BYTES_MAX;
        loop {
            wire.flush()?;
            match wire.next(&mut budget_bytes)? {
                Step::Item(Item::Greeted) => wire.queue(codec::ready(self.plan.role)),
                Step::Item(Item::Ready) => {
                    let opening = match &self.plan.opening {
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
        let resting = State::BackingOff { until_ms: now_ms };
        if let State::Handshaking { wire, .. } = std::mem::replace(&mut self.state, resting) {
            let heard_bytes = wire.received_bytes();
            self.state = State::Up { wire, heard_ms: now_ms, heard_bytes, pinged_ms: None, drained: false };
            self.back_off_ms = ZMQ_RECONNECT_MS_MIN;
            self.events.push_back(LinkEvent::Handshake);
        }
        Ok(Next::Later)
    }

    /// Notices a peer whose host is gone. Unread bytes do not count as silence.
    fn heartbeat(&mut self, now_ms: u64) {
        let State::Up { wire, heard_ms, pinged_ms, drained, .. } = &mut self.state else { return };
        let Pace { heartbeat_ms, heartbeat_timeout_ms, .. } = self.plan.pace;
        let result = match *pinged_ms {
            Some(since_ms) if now_ms.saturating_sub(since_ms) >= heartbeat_timeout_ms && *drained => Err(Broken::Ended),
            None if now_ms.saturating_sub(*heard_ms) >= heartbeat_ms => {
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

    /// Ends the connection, or the attempt at one.
    fn broken(&mut self, broken: &Broken, now_ms: u64) {
        let bound = match broken {
            Broken::Refused(refusal) if refusal.is_bound() => Some(*refusal),
            Broken::Refused(_) | Broken::Ended => None,
        };
        match std::mem::replace(&mut self.state, State::BackingOff { until_ms: now_ms }) {
            State::Up { .. } => {
                if let Broken::Refused(refusal) = broken {
                    self.events.push_back(LinkEvent::Refused(*refusal));
                }
                self.events.push_back(LinkEvent::Disconnected);
            }
            State::Handshaking { wire, others, .. } => {
                if wire.sent_bytes() == 0 {
                    // No process listens there.
                    return self.try_addresses(others, now_ms);
                }
                self.events.push_back(LinkEvent::HandshakeFailed);
            }
            State::BackingOff { .. } | State::Resolving(_) => {}
        }
        if bound.is_some() {
            self.back_off_ms = ZMQ_RECONNECT_MS_MAX;
        }
        self.rest(now_ms);
    }

    fn rest(&mut self, now_ms: u64) {
        self.state = State::BackingOff { until_ms: now_ms + self.back_off_ms };
        self.back_off_ms = (self.back_off_ms * 2).min(self.plan.pace.reconnect_ms_max);
    }

    /// Begins an attempt.
    fn connect(&mut self, now_ms: u64) {
        match &self.address {
            Address::Ip(address) => self.try_addresses(VecDeque::from([*address]), now_ms),
            Address::Name { host, port } => {
                match Lookup::start((host, *port), NAME_ADDRESSES_MAX, &self.registry, self.token) {
                    // It may have ended before its end was registered.
                    Some(lookup) => self.state = State::Resolving(lookup),
                    None => self.state = State::BackingOff { until_ms: now_ms + ZMQ_RECONNECT_MS_MIN },
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

    /// Takes the result of the lookup, if it has ended.
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
            let mut wire = Wire::new(stream, Decoder::new(self.plan.role, self.plan.bounds));
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
    /// Whether it waits before it tries again.
    pub(crate) const fn is_backing_off(&self) -> bool {
        matches!(self.state, State::BackingOff { .. })
    }

    /// Ends the connection in any state.
    pub(crate) fn break_up(&mut self) {
        self.state = State::BackingOff { until_ms: u64::MAX };
        self.events.push_back(LinkEvent::Disconnected);
    }
}

/// Whether an attempt failed because no socket could be made, rather than for want of an answer.
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
