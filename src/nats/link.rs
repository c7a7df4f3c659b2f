//! The connection to one of several servers, with reconnects for ever.
//!
//! | state | what ends it | next | event |
//! |---|---|---|---|
//! | BackingOff | its pause is over | Resolving or Open | |
//! | Resolving | addresses | Open (Greeted) | |
//! | Resolving | no address | BackingOff (next server) | |
//! | Open (Greeted) | the server says what it is | Open (LoggingIn) | |
//! | Open (LoggingIn) | it answers the login | Open (Up) | `Up` |
//! | Open, not Up | refused, too late, TLS failed | BackingOff (next server) | `Refused` with a reason, if there is one |
//! | Open (Up) | closed, silent | BackingOff (next server) | `Lost` |
//!
//! Everything runs on the caller's thread. Readiness is edge-triggered, so the caller calls [`Link::next`] until it returns
//! [`Next::Drained`]. Everything that depends on time happens in [`Link::tick`].

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use mio::net::TcpStream;
use mio::{Registry, Token};
use rustls::ClientConfig;

use super::codec::{self, Delivery, Item, PING, PONG, ServerInfo};
use super::login::Login;
use super::wire::{Broken, Step, Wire};
use crate::endpoint::NatsServer;
use crate::limits::{
    NAME_ADDRESSES_MAX, NAME_BYTES_MAX, NATS_CONNECT_MS_MAX, NATS_HEARTBEAT_MS, NATS_HEARTBEAT_TIMEOUT_MS,
    NATS_OPEN_MS_MAX, NATS_QUANTUM_BYTES_MAX, NATS_RECONNECT_MS_MAX, NATS_RECONNECT_MS_MIN, NATS_REFUSED_MS,
};
use crate::zmtp::{Looked, Lookup};

/// What a connection is for.
#[derive(Debug)]
pub(crate) struct LinkPlan {
    /// The servers of one cluster, at least one. The next one is tried when one fails.
    pub(crate) servers: Vec<NatsServer>,
    /// What it shows them.
    pub(crate) login: Arc<Login>,
    /// What TLS trusts; servers with TLS need it.
    pub(crate) tls: Option<Arc<ClientConfig>>,
    /// What servers call the client in their lists.
    pub(crate) name: String,
    /// Whether headers are asked for: what a server says of a stream is in them.
    pub(crate) headers: bool,
    /// Subjects; a subscription's number is its place, from 1.
    pub(crate) subjects: Vec<String>,
    /// Bytes of a message; larger ones are skipped.
    pub(crate) payload_bytes_max: usize,
    /// Bytes that wait for the server.
    pub(crate) waiting_bytes_max: usize,
}

/// An event of the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LinkEvent {
    /// It is subscribed, and messages can be published.
    Up,
    /// It ended after it was up.
    Lost,
    /// The server, or this side, refuses the connection.
    Refused(String),
    /// The server said this, such as that a subject is forbidden.
    Said(String),
}

/// The result of [`Link::next`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// A message.
    Message(Delivery),
    /// No more for now: the event loop signals further bytes.
    Drained,
    /// There may be more. Do other work first, and take the events of [`Link::event`].
    Later,
}

enum State {
    BackingOff { until_ms: u64 },
    Resolving(Lookup),
    Open(Box<Open>),
}

struct Open {
    wire: Wire,
    phase: Phase,
    since_ms: u64,
    /// The name's other addresses, in the order of tries.
    others: VecDeque<SocketAddr>,
    info: ServerInfo,
    /// When bytes came last.
    heard_ms: u64,
    /// The time of a PING after which nothing has come yet.
    pinged_ms: Option<u64>,
    /// All received bytes have been taken, so silence is the server's.
    is_drained: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The server speaks first.
    Greeted,
    LoggingIn,
    Up,
}

/// A connection.
pub(crate) struct Link {
    plan: LinkPlan,
    registry: Arc<Registry>,
    token: Token,
    state: State,
    /// The server that is used or tried.
    at: usize,
    /// The pause after the next failure.
    back_off_ms: u64,
    events: VecDeque<LinkEvent>,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("servers", &self.plan.servers).finish_non_exhaustive()
    }
}

impl Link {
    /// Starts to connect. It goes on for ever.
    pub(crate) fn open(plan: LinkPlan, (registry, token): (Arc<Registry>, Token), now_ms: u64) -> Self {
        let state = State::BackingOff { until_ms: now_ms };
        let back_off_ms = NATS_RECONNECT_MS_MIN;
        let mut this = Self { plan, registry, token, state, at: 0, back_off_ms, events: VecDeque::new() };
        this.connect(now_ms);
        this
    }

    /// The server that is used or tried.
    pub(crate) fn server(&self) -> &NatsServer {
        &self.plan.servers[self.at]
    }

    /// The largest message that the server takes, bytes; 0 = it is not up.
    pub(crate) fn payload_bytes_max(&self) -> u64 {
        match &self.state {
            State::Open(open) if open.phase == Phase::Up => open.info.max_payload,
            _ => 0,
        }
    }

    /// The next event, if there is one.
    pub(crate) fn event(&mut self) -> Option<LinkEvent> {
        self.events.pop_front()
    }

    /// Publishes a message behind what waits. `false` = the connection is not up, too much waits, or the server does not
    /// take a message of this size.
    pub(crate) fn publish(&mut self, subject: &str, reply: Option<&str>, payload: &[u8]) -> bool {
        self.send(payload.len(), || codec::publish(subject, reply, payload))
    }

    /// As [`Self::publish`], with a name of the message, and where the stream's answer is wanted. It needs headers.
    pub(crate) fn publish_named(&mut self, subject: &str, reply: &str, name: &str, payload: &[u8]) -> bool {
        self.send(payload.len() + NAME_BYTES_MAX, || codec::publish_named(subject, reply, name, payload))
    }

    fn send(&mut self, payload_bytes: usize, message: impl FnOnce() -> Bytes) -> bool {
        let waiting_bytes_max = self.plan.waiting_bytes_max;
        let State::Open(open) = &mut self.state else { return false };
        let has_room = open.wire.waiting_bytes() <= waiting_bytes_max && payload_bytes as u64 <= open.info.max_payload;
        if open.phase != Phase::Up || !has_room {
            return false;
        }
        open.wire.queue(message());
        // A connection that has ended shows when it is read.
        open.wire.flush().is_ok()
    }

    /// Registers under another token.
    ///
    /// # Errors
    /// Those of the event loop. It may then never signal the connection again.
    pub(crate) fn set_token(&mut self, token: Token) -> std::io::Result<()> {
        self.token = token;
        match &mut self.state {
            State::BackingOff { .. } => Ok(()),
            State::Resolving(lookup) => lookup.reregister(&self.registry, token),
            State::Open(open) => open.wire.reregister(&self.registry, token),
        }
    }

    /// Advances the connection and takes the next message. Messages come between `Up` and `Lost`.
    pub(crate) fn next(&mut self, now_ms: u64) -> Next {
        if !self.events.is_empty() {
            return Next::Later;
        }
        let next = match &mut self.state {
            State::BackingOff { .. } => return Next::Drained,
            State::Resolving(_) => {
                self.resolved(now_ms);
                return Next::Drained;
            }
            State::Open(_) => self.receive(now_ms),
        };
        let next = next.unwrap_or_else(|broken| {
            self.broken(&broken, now_ms);
            Next::Drained
        });
        if self.events.is_empty() || matches!(next, Next::Message(_)) { next } else { Next::Later }
    }

    /// Does what is due: reconnects, ends a slow handshake, asks for signs of life. `true` = there is an event or a
    /// message to take.
    pub(crate) fn tick(&mut self, now_ms: u64) -> bool {
        match &mut self.state {
            State::BackingOff { until_ms } if now_ms >= *until_ms => self.connect(now_ms),
            State::BackingOff { .. } => {}
            State::Resolving(_) => self.resolved(now_ms),
            State::Open(open) if open.phase != Phase::Up => {
                let ms_max = if open.phase == Phase::Greeted { NATS_CONNECT_MS_MAX } else { NATS_OPEN_MS_MAX };
                if now_ms.saturating_sub(open.since_ms) >= ms_max {
                    self.broken(&Broken::Ended, now_ms);
                }
            }
            State::Open(open) => {
                if let Err(broken) = heartbeat(open, now_ms) {
                    self.broken(&broken, now_ms);
                }
            }
        }
        !self.events.is_empty()
    }

    fn receive(&mut self, now_ms: u64) -> Result<Next, Broken> {
        let mut budget_bytes = NATS_QUANTUM_BYTES_MAX;
        loop {
            let has_event = !self.events.is_empty();
            let State::Open(open) = &mut self.state else { return Ok(Next::Drained) };
            // Also what the item before is answered with.
            open.wire.flush()?;
            if has_event {
                return Ok(Next::Later);
            }
            let step = open.wire.next(&mut budget_bytes)?;
            if open.wire.take_received() {
                (open.heard_ms, open.pinged_ms) = (now_ms, None);
            }
            open.is_drained = matches!(step, Step::Drained);
            match step {
                Step::Item(Item::Message(delivery)) if open.phase == Phase::Up => return Ok(Next::Message(delivery)),
                Step::Item(Item::Message(_)) => return Err(Broken::Violation("a message came before the login")),
                Step::Item(item) => {
                    // Items without messages count too, so that they cannot go on for ever.
                    budget_bytes = budget_bytes.saturating_sub(1);
                    self.handle(item)?;
                }
                Step::Drained => return Ok(Next::Drained),
                Step::Budget => return Ok(Next::Later),
            }
        }
    }

    fn handle(&mut self, item: Item) -> Result<(), Broken> {
        let (plan, server) = (&self.plan, &self.plan.servers[self.at]);
        let State::Open(open) = &mut self.state else { return Ok(()) };
        match (item, open.phase) {
            (Item::Info(info), Phase::Greeted) => {
                if server.is_tls {
                    let Some(tls) = plan.tls.as_ref().filter(|_| info.tls_required || info.tls_available) else {
                        return Err(Broken::Violation("the server has no TLS; nothing is sent to it without"));
                    };
                    open.wire.secure(tls, &server.host)?;
                } else if info.tls_required {
                    return Err(Broken::Violation("the server wants TLS: write tls:// and nats_ca_file"));
                }
                let Some(options) = plan.login.options(info.nonce.as_deref()) else {
                    return Err(Broken::Violation("the server asks for no signature, so credentials are of no use"));
                };
                open.wire.queue(codec::connect(&plan.name, options, plan.headers));
                open.wire.queue(PING);
                (open.info, open.phase) = (info, Phase::LoggingIn);
            }
            (_, Phase::Greeted) => return Err(Broken::Violation("it does not greet as a NATS server")),
            (Item::Pong, Phase::LoggingIn) => {
                // The login is accepted.
                for (number, subject) in (1..).zip(&plan.subjects) {
                    open.wire.queue(codec::subscribe(subject, number));
                }
                open.phase = Phase::Up;
                self.back_off_ms = NATS_RECONNECT_MS_MIN;
                self.events.push_back(LinkEvent::Up);
            }
            (Item::Info(info), _) => open.info = info,
            (Item::Ping, _) => {
                // One whose server does not take them is not read further.
                if open.wire.waiting_bytes() <= plan.waiting_bytes_max {
                    open.wire.queue(PONG);
                }
            }
            (Item::Refused(said), phase) => {
                self.events.push_back(LinkEvent::Said(said));
                if phase == Phase::LoggingIn {
                    return Err(Broken::Violation("it refuses the login"));
                }
            }
            // Messages are handled before.
            (Item::Pong | Item::Message(_), _) => {}
        }
        Ok(())
    }

    /// Ends the connection, or the attempt at one.
    fn broken(&mut self, broken: &Broken, now_ms: u64) {
        let State::Open(open) = std::mem::replace(&mut self.state, State::BackingOff { until_ms: now_ms }) else {
            return;
        };
        let refused = match broken {
            Broken::Ended => None,
            Broken::Violation(what) => Some((*what).to_owned()),
            Broken::Tls(what) => Some(format!("TLS: {what}")),
        };
        let is_refused = refused.is_some();
        self.events.extend(refused.map(LinkEvent::Refused));
        let Open { phase, others, .. } = *open;
        if phase == Phase::Up {
            self.events.push_back(LinkEvent::Lost);
        } else if phase == Phase::Greeted && !is_refused {
            // Perhaps no process listens there.
            return self.try_addresses(others, now_ms);
        }
        if is_refused && self.at + 1 == self.plan.servers.len() {
            // None of the others took it either.
            self.back_off_ms = NATS_REFUSED_MS;
        }
        self.rest(now_ms);
    }

    /// Pauses before the next server is tried.
    fn rest(&mut self, now_ms: u64) {
        self.at = (self.at + 1) % self.plan.servers.len();
        self.state = State::BackingOff { until_ms: now_ms + self.back_off_ms };
        self.back_off_ms = (self.back_off_ms * 2).min(NATS_RECONNECT_MS_MAX);
    }

    /// Begins an attempt.
    fn connect(&mut self, now_ms: u64) {
        let endpoint = &self.plan.servers[self.at].endpoint;
        let address = endpoint.strip_prefix("tcp://").unwrap_or(endpoint);
        if let Ok(address) = address.parse::<SocketAddr>() {
            return self.try_addresses(VecDeque::from([address]), now_ms);
        }
        let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
        let port = port.parse().unwrap_or_default();
        match Lookup::start((host, port), NAME_ADDRESSES_MAX, &self.registry, self.token) {
            // It may have ended before its end was registered.
            Some(lookup) => self.state = State::Resolving(lookup),
            None => self.rest(now_ms),
        }
    }

    /// Takes the result of the lookup, if it has ended.
    fn resolved(&mut self, now_ms: u64) {
        let State::Resolving(lookup) = &self.state else { return };
        match lookup.look() {
            Looked::Pending => {}
            Looked::Found(addresses) => self.try_addresses(addresses.into(), now_ms),
            Looked::Failed => {
                let refused = format!("its host name {} has no address", self.server().host);
                self.events.push_back(LinkEvent::Refused(refused));
                self.rest(now_ms);
            }
        }
    }

    fn try_addresses(&mut self, mut addresses: VecDeque<SocketAddr>, now_ms: u64) {
        while let Some(address) = addresses.pop_front() {
            let stream = TcpStream::connect(address);
            let wire =
                stream.and_then(|stream| Wire::new(stream, self.plan.payload_bytes_max, (&self.registry, self.token)));
            if let Ok(wire) = wire {
                self.state = State::Open(Box::new(Open {
                    wire,
                    phase: Phase::Greeted,
                    since_ms: now_ms,
                    others: addresses,
                    info: ServerInfo::default(),
                    heard_ms: now_ms,
                    pinged_ms: None,
                    is_drained: false,
                }));
                return;
            }
        }
        self.rest(now_ms);
    }
}

/// Notices a server whose host is gone. Unread bytes do not count as silence.
fn heartbeat(open: &mut Open, now_ms: u64) -> Result<(), Broken> {
    match open.pinged_ms {
        Some(since_ms) if now_ms.saturating_sub(since_ms) >= NATS_HEARTBEAT_TIMEOUT_MS && open.is_drained => {
            Err(Broken::Ended)
        }
        None if now_ms.saturating_sub(open.heard_ms) >= NATS_HEARTBEAT_MS => {
            open.pinged_ms = Some(now_ms);
            open.wire.queue(PING);
            open.wire.flush()
        }
        _ => Ok(()),
    }
}
