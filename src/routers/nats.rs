//! The carrier over NATS, where a team runs it anyway.
//!
//! | subject | who publishes there | who listens |
//! |---|---|---|
//! | `PREFIX.load.ROUTER` | that router: batches, heartbeats | all |
//! | `PREFIX.hello` | a router that has connected; it wants an answer from each | all |
//! | `PREFIX.ask.ROUTER` | others that ask that router for a snapshot | that router |
//! | `PREFIX.to.ROUTER.OTHER` | the other router, which answers | that router |
//!
//! ROUTER and OTHER are the numbers of routers, in 16 hexadecimal digits. A server can therefore allow each router its own
//! subjects only.
//!
//! **Who the others are** is not configured. A router is a peer once a message with a proper MAC has come from it, and no
//! longer once it was not heard for a while. What strangers publish makes no peer. Subjects prove nothing: the MAC does.
//!
//! **Why no JetStream.** A stored message cannot tell what a router has booked now: only an answer to a fresh random
//! number shows that its router lives, and with the router its bookings end. Who joins therefore asks each router that lives. That
//! router knows its load better than any store; the load of one that does not live is nothing. Who missed messages takes a
//! snapshot, which is smaller than the batches that it replaces. So a store would only add states in which it is wrong.
//!
//! **What differs from ZeroMQ.** The server decides who may listen, so `admit` does nothing here: load, which tells nothing
//! of prompts, goes to whomever the server lets subscribe. All messages come over one connection: a flood under the prefix
//! delays the messages of routers, until the server cuts off a router that cannot keep up.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use mio::{Events, Poll, Token};

use super::carrier::{Arrived, Asker, Carrier, CarrierCounts, Link, Source};
use super::values::OriginId;
use crate::endpoint::NatsServer;
use crate::error::{Error, Kind, Result};
use crate::limits::{
    LOAD_MESSAGE_BYTES_MAX, LOAD_TICK_MS, NATS_ASKED_PER_TICK_MAX, NATS_GREETED_MS, NATS_ROUTER_FORGOTTEN_MS,
    ORIGINS_MAX, ROUTER_QUANTUM_MESSAGES_MAX, ROUTER_WAITING_BYTES_MAX,
};
use crate::log_quota::LogQuota;
use crate::nats::{self, Access, LinkEvent, Next};

const TOKEN: Token = Token(0);
const POLL_EVENTS: usize = 16;

/// The link by which messages come whose subject names no router that is known.
const UNPROVEN: usize = ORIGINS_MAX;
/// The link to the server itself.
const SERVER: usize = ORIGINS_MAX + 1;

/// The numbers of the subscriptions.
const LOADS: u64 = 1;
const HELLOS: u64 = 2;
const REQUESTS: u64 = 3;
const ANSWERS: u64 = 4;

/// How a router reaches the others over NATS.
#[derive(Debug)]
pub struct NatsPlan {
    servers: Vec<NatsServer>,
    access: Access,
}

impl NatsPlan {
    /// A plan for the servers of one cluster.
    #[must_use]
    pub(crate) const fn new(servers: Vec<NatsServer>, access: Access) -> Self {
        Self { servers, access }
    }
}

/// The connection to a server, and the routers that were heard.
pub struct Nats {
    link: nats::Link,
    poll: Poll,
    events: Events,
    own: OriginId,
    subjects: Subjects,
    /// Where others hear this router.
    address: String,
    /// What this router says first.
    opening: Vec<u8>,
    /// By place. A place is used again once its router is forgotten.
    heard: Vec<Option<Heard>>,
    /// Whether the connection may have more, which the event loop does not signal again.
    is_unread: bool,
    up_since_ms: Option<u64>,
    now_ms: u64,
    next_tick_ms: u64,
    /// Greetings and requests taken since the last tick.
    asked: u32,
    said: LogQuota,
    counts: CarrierCounts,
}

/// A router that was heard.
struct Heard {
    origin: OriginId,
    at_ms: u64,
}

/// The subjects of one router.
struct Subjects {
    prefix: String,
    own: String,
}

impl Subjects {
    fn new(prefix: String, own: OriginId) -> Self {
        Self { prefix, own: word(own) }
    }

    /// In the order of the subscriptions' numbers.
    fn subscribed(&self) -> Vec<String> {
        let Self { prefix, own } = self;
        vec![
            format!("{prefix}.load.*"),
            format!("{prefix}.hello"),
            format!("{prefix}.ask.{own}"),
            format!("{prefix}.to.{own}.*"),
        ]
    }

    fn load(&self, of: &str) -> String {
        format!("{}.load.{of}", self.prefix)
    }

    fn hello(&self) -> String {
        format!("{}.hello", self.prefix)
    }

    fn ask(&self, whom: OriginId) -> String {
        format!("{}.ask.{}", self.prefix, word(whom))
    }

    /// Where answers to a router go; each that answers adds its own word.
    fn answers(&self, to: &str) -> String {
        format!("{}.to.{to}", self.prefix)
    }

    /// The router whose [`Self::answers`] these are. No answer goes anywhere else.
    fn asker(&self, reply: &str) -> Option<OriginId> {
        origin_of(reply.strip_prefix(&self.prefix)?.strip_prefix(".to.")?)
    }
}

/// A router's number as a word of subjects.
fn word(origin: OriginId) -> String {
    format!("{:016x}", origin.0)
}

fn origin_of(word: &str) -> Option<OriginId> {
    let is_number = word.len() == 16 && word.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    u64::from_str_radix(word, 16).ok().filter(|_| is_number).map(OriginId)
}

impl std::fmt::Debug for Nats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nats").field("link", &self.link).field("own", &self.own).finish_non_exhaustive()
    }
}

impl Nats {
    /// Starts to connect. What this router says first is `opening`.
    ///
    /// # Errors
    /// [`Kind::System`] if there is no event loop.
    pub fn connect(plan: NatsPlan, own: OriginId, opening: Vec<u8>, now_ms: u64) -> Result<Self> {
        let system = |cause: io::Error| {
            Error::new(Kind::System, "cannot make an event loop for other routers", "raise the limit of open files")
                .caused_by(cause)
        };
        let poll = Poll::new().map_err(system)?;
        let registry = Arc::new(poll.registry().try_clone().map_err(system)?);
        let NatsPlan { servers, access } = plan;
        let subjects = Subjects::new(access.prefix().to_owned(), own);
        let mut plan = access.plan(servers, format!("kvrouted {}", subjects.own), subjects.subscribed());
        (plan.payload_bytes_max, plan.waiting_bytes_max) = (LOAD_MESSAGE_BYTES_MAX, ROUTER_WAITING_BYTES_MAX);
        Ok(Self {
            link: nats::Link::open(plan, (registry, TOKEN), now_ms),
            poll,
            events: Events::with_capacity(POLL_EVENTS),
            own,
            address: format!("nats:{}", subjects.load(&subjects.own)),
            opening,
            heard: Vec::new(),
            is_unread: true,
            up_since_ms: None,
            now_ms,
            next_tick_ms: now_ms,
            asked: 0,
            said: LogQuota::default(),
            counts: CarrierCounts::default(),
            subjects,
        })
    }

    fn send(&mut self, subject: &str, reply: Option<&str>, message: &[u8]) -> bool {
        let is_sent = self.link.publish(subject, reply, message);
        if !is_sent && self.up_since_ms.is_some() {
            self.counts.messages_dropped += 1;
        }
        is_sent
    }

    /// Takes a quantum of messages. `true` = there may be more.
    fn read(&mut self, arrived: &mut Vec<Arrived>) -> bool {
        for _ in 0..ROUTER_QUANTUM_MESSAGES_MAX {
            while let Some(event) = self.link.event() {
                self.follow(event);
            }
            match self.link.next(self.now_ms) {
                Next::Message(of) => {
                    arrived.extend(self.source(of.subscription, &of.subject, of.reply.as_deref()).map(
                        // What was too large is no message of a router either.
                        |from| Arrived { from, bytes: of.payload.unwrap_or_else(Bytes::new) },
                    ))
                }
                Next::Drained => return false,
                Next::Later => {}
            }
        }
        true
    }

    /// From where a message is; `None` = no router sends it there.
    fn source(&mut self, subscription: u64, subject: &str, reply: Option<&str>) -> Option<Source> {
        let last = || origin_of(subject.rsplit('.').next()?);
        match subscription {
            LOADS | ANSWERS => {
                let place = last().and_then(|origin| self.place_of(origin));
                Some(Source::Link(place.unwrap_or(UNPROVEN)))
            }
            HELLOS | REQUESTS => {
                self.asked += 1;
                let asker = reply.and_then(|reply| self.subjects.asker(reply));
                if self.asked > NATS_ASKED_PER_TICK_MAX || asker.is_none() {
                    self.counts.messages_dropped += 1;
                    return None;
                }
                asker.map(|origin| Source::Asker(Asker { place: 0, number: origin.0 }))
            }
            _ => None,
        }
    }

    fn place_of(&self, origin: OriginId) -> Option<usize> {
        self.heard.iter().position(|of| of.as_ref().is_some_and(|of| of.origin == origin))
    }

    fn follow(&mut self, event: LinkEvent) {
        let server = self.link.server();
        match event {
            LinkEvent::Up => {
                tracing::info!(%server, prefix = self.subjects.prefix, "connected to NATS");
                if self.link.payload_bytes_max() < LOAD_MESSAGE_BYTES_MAX as u64 {
                    let remedy = "raise max_payload of the server";
                    tracing::warn!(%server, bytes = self.link.payload_bytes_max(), remedy, "NATS does not take large messages");
                }
                self.up_since_ms = Some(self.now_ms);
                // No router could be heard while there was no connection.
                self.heard.iter_mut().flatten().for_each(|of| of.at_ms = self.now_ms);
                let opening = std::mem::take(&mut self.opening);
                let (hello, answers) = (self.subjects.hello(), self.subjects.answers(&self.subjects.own));
                self.send(&hello, Some(&answers), &opening);
                self.publish(&opening);
                self.opening = opening;
            }
            LinkEvent::Lost => {
                tracing::warn!(%server, "the connection to NATS is lost; others' load counts until they are silent for too long");
                self.up_since_ms = None;
                self.counts.links_lost += 1;
            }
            LinkEvent::Refused(why) => {
                self.counts.connections_cut += 1;
                tracing::warn!(%server, why, "no connection to NATS");
            }
            LinkEvent::Said(what) => {
                if let Some(withheld) = self.said.take(Instant::now()) {
                    let remedy = "check nats_user, nats_secret_file and nats_credentials_file, and the permissions of the subjects";
                    tracing::warn!(%server, ?what, remedy, withheld, "NATS refuses something");
                }
            }
        }
    }

    fn tick(&mut self) {
        let now_ms = self.now_ms;
        if now_ms < self.next_tick_ms {
            return;
        }
        self.next_tick_ms = now_ms + LOAD_TICK_MS;
        self.asked = 0;
        self.is_unread |= self.link.tick(now_ms);
        if self.up_since_ms.is_some() {
            for place in &mut self.heard {
                if place.as_ref().is_some_and(|of| now_ms.saturating_sub(of.at_ms) >= NATS_ROUTER_FORGOTTEN_MS) {
                    *place = None;
                }
            }
        }
    }
}

impl Carrier for Nats {
    fn receive(&mut self, wait: Duration, now_ms: u64, arrived: &mut Vec<Arrived>) -> io::Result<()> {
        self.now_ms = now_ms;
        let wait = if self.is_unread { Duration::ZERO } else { wait };
        match self.poll.poll(&mut self.events, Some(wait)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if self.is_unread || !self.events.is_empty() {
            self.is_unread = self.read(arrived);
        }
        self.tick();
        Ok(())
    }

    fn publish(&mut self, message: &[u8]) {
        let subject = self.subjects.load(&self.subjects.own);
        self.send(&subject, None, message);
    }

    fn ask(&mut self, origin: OriginId, message: &[u8]) -> bool {
        let (subject, answers) = (self.subjects.ask(origin), self.subjects.answers(&self.subjects.own));
        self.send(&subject, Some(&answers), message)
    }

    fn answer(&mut self, asker: Asker, message: &[u8]) -> bool {
        let subject = format!("{}.{}", self.subjects.answers(&word(OriginId(asker.number))), self.subjects.own);
        self.send(&subject, None, message)
    }

    fn admit(&mut self, _: Asker) {}

    fn is_admitted(&self, _: Asker) -> bool {
        false
    }

    fn identify(&mut self, _: usize, origin: OriginId) {
        if origin == self.own {
            // Another router uses this one's number, which the origins say.
            return;
        }
        let at_ms = self.now_ms;
        let place = self.place_of(origin).or_else(|| self.heard.iter().position(Option::is_none));
        match place {
            Some(place) => self.heard[place] = Some(Heard { origin, at_ms }),
            None if self.heard.len() < ORIGINS_MAX => self.heard.push(Some(Heard { origin, at_ms })),
            // The origins have no place for it either, and say so.
            None => {}
        }
    }

    fn links(&self) -> Vec<(usize, Link)> {
        let is_up = self.up_since_ms.is_some();
        // Until the others had time to answer a greeting, it is not known who they are.
        let is_greeted =
            self.up_since_ms.is_some_and(|since_ms| self.now_ms.saturating_sub(since_ms) >= NATS_GREETED_MS);
        let origin = is_greeted.then_some(self.own);
        let server = Link { address: self.link.server().to_string(), is_up, origin, is_broker: true };
        let link = |of: &Heard| Link {
            address: format!("nats:{}", self.subjects.load(&word(of.origin))),
            is_up,
            origin: Some(of.origin),
            is_broker: false,
        };
        let heard = self.heard.iter().enumerate().filter_map(|(place, of)| Some((place, link(of.as_ref()?))));
        std::iter::once((SERVER, server)).chain(heard).collect()
    }

    fn address(&self) -> &str {
        &self.address
    }

    fn counts(&mut self) -> CarrierCounts {
        std::mem::take(&mut self.counts)
    }
}
