//! The live part of a worker's events: a plain subscription to its batches and heartbeats.
//!
//! It has the shape of a connection to a publisher ([`crate::zmtp::Peer`]), so that what follows is the same. But a server
//! stands between: that it is connected says nothing of the relay. So a worker's relay counts as connected from its first
//! message on, and as disconnected once it is silent although the server is there, or once the server is gone.
//!
//! | state | what ends it | next | event |
//! |---|---|---|---|
//! | Away | the server lets it subscribe | Silent | |
//! | Silent | a message of the relay | Heard | `Handshake` |
//! | Heard | silence | Silent | `Disconnected` |
//! | Silent, Heard | the server is gone | Away | `Disconnected`, if it was heard |

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use mio::{Registry, Token};

use super::access::Access;
use super::codec::Delivery;
use super::jetstream::{Frame, Kind, Names};
use super::link::{self, Link, LinkEvent};
use crate::endpoint::NatsServer;
use crate::ids::Worker;
use crate::limits::{NATS_EVENT_BYTES_MAX, NATS_RELAY_SILENT_MS_MAX, NATS_SKIPPED_PER_QUANTUM_MAX};
use crate::log_quota::LogQuota;
use crate::zmtp::{self, Message, Next};

/// The number of the subscription to batches; the other one is of heartbeats.
const EVENTS: u64 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Away,
    Silent { since_ms: u64 },
    Heard { last_ms: u64 },
}

/// The subscription to one worker's events.
pub(crate) struct Feed {
    worker: Worker,
    link: Link,
    names: Names,
    state: State,
    events: VecDeque<zmtp::LinkEvent>,
    /// The message that followed an event.
    next: Option<Message>,
    /// Everything that came was taken, so silence is the relay's.
    is_drained: bool,
    /// Messages of strangers since the last call of [`Self::take_skipped`].
    skipped: u64,
    said: LogQuota,
}

impl std::fmt::Debug for Feed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Feed").field("link", &self.link).field("state", &self.state).finish_non_exhaustive()
    }
}

impl Feed {
    /// Starts to connect. It goes on for ever.
    pub(crate) fn open(
        (access, server): (&Access, NatsServer),
        worker: Worker,
        signals: (Arc<Registry>, Token),
        now_ms: u64,
    ) -> Self {
        let names = Names::new(access.prefix(), worker);
        let subjects = vec![names.events.clone(), names.alive.clone()];
        let mut plan = access.plan(vec![server], format!("kvrouted: events of {worker}"), subjects);
        plan.payload_bytes_max = NATS_EVENT_BYTES_MAX;
        Self {
            worker,
            link: Link::open(plan, signals, now_ms),
            names,
            state: State::Away,
            events: VecDeque::new(),
            next: None,
            is_drained: false,
            skipped: 0,
            said: LogQuota::default(),
        }
    }

    /// Registers under another token.
    ///
    /// # Errors
    /// Those of the event loop.
    pub(crate) fn set_token(&mut self, token: Token) -> io::Result<()> {
        self.link.set_token(token)
    }

    /// The next event, if there is one.
    pub(crate) fn link_event(&mut self) -> Option<zmtp::LinkEvent> {
        self.events.pop_front()
    }

    /// Whether [`Self::link_event`] has an event.
    pub(crate) fn has_event(&self) -> bool {
        !self.events.is_empty()
    }

    /// Whether it is the server that is away, or has just come back, and not the relay.
    pub(crate) fn excuses_silence(&self, now_ms: u64) -> bool {
        match self.state {
            State::Away => true,
            State::Silent { since_ms } => now_ms.saturating_sub(since_ms) < NATS_RELAY_SILENT_MS_MAX,
            State::Heard { .. } => false,
        }
    }

    /// Messages of strangers since the last call.
    pub(crate) const fn take_skipped(&mut self) -> u64 {
        std::mem::replace(&mut self.skipped, 0)
    }

    /// Does what is due; `true` = there is an event or a message to take.
    pub(crate) fn tick(&mut self, now_ms: u64) -> bool {
        self.link.tick(now_ms);
        self.follow(now_ms);
        if let State::Heard { last_ms } = self.state
            && self.is_drained
            && now_ms.saturating_sub(last_ms) >= NATS_RELAY_SILENT_MS_MAX
        {
            // From now on the relay itself is missing.
            self.state = State::Silent { since_ms: last_ms };
            self.events.push_back(zmtp::LinkEvent::Disconnected);
        }
        self.has_event() || self.next.is_some()
    }

    /// Advances the connection and takes the next message.
    pub(crate) fn next(&mut self, now_ms: u64) -> Next {
        self.is_drained = false;
        for _ in 0..NATS_SKIPPED_PER_QUANTUM_MAX {
            if self.has_event() {
                return Next::Later;
            }
            if let Some(message) = self.next.take() {
                return Next::Message(message);
            }
            match self.link.next(now_ms) {
                link::Next::Message(delivery) => {
                    let Some(message) = self.message(&delivery) else {
                        self.skipped += 1;
                        continue;
                    };
                    if let State::Silent { .. } = self.state {
                        self.events.push_back(zmtp::LinkEvent::Handshake);
                    }
                    self.state = State::Heard { last_ms: now_ms };
                    self.next = Some(message);
                }
                link::Next::Later => self.follow(now_ms),
                link::Next::Drained => {
                    self.follow(now_ms);
                    self.is_drained = self.events.is_empty();
                    return if self.is_drained { Next::Drained } else { Next::Later };
                }
            }
        }
        Next::Later
    }

    /// A message as an engine's socket would bring it; `None` = a stranger's.
    fn message(&self, delivery: &Delivery) -> Option<Message> {
        let (kind, subject) = match delivery.subscription {
            EVENTS => (Kind::Batch, &self.names.events),
            _ => (Kind::Heartbeat, &self.names.alive),
        };
        let frame = Frame::decode(delivery.payload.as_ref()?)?;
        (frame.kind == kind && delivery.subject == *subject).then(|| as_message(frame))
    }

    /// Handles the events of the connection to the server.
    fn follow(&mut self, now_ms: u64) {
        while let Some(event) = self.link.event() {
            let worker = self.worker;
            match event {
                LinkEvent::Up => self.state = State::Silent { since_ms: now_ms },
                LinkEvent::Lost => {
                    if let State::Heard { .. } = self.state {
                        self.events.push_back(zmtp::LinkEvent::Disconnected);
                    }
                    self.state = State::Away;
                    tracing::warn!(%worker, server = %self.link.server(), "the NATS server of the worker's events is gone; it is tried again");
                }
                LinkEvent::Refused(why) => {
                    self.events.push_back(zmtp::LinkEvent::HandshakeFailed);
                    if self.said.take(Instant::now()).is_some() {
                        let remedy = "correct the worker's endpoint, or [ingest] nats_user, nats_secret_file, nats_credentials_file and nats_ca_file";
                        tracing::warn!(%worker, server = %self.link.server(), why, remedy, "the NATS server of the worker's events cannot be used");
                    }
                }
                LinkEvent::Said(what) => {
                    if self.said.take(Instant::now()).is_some() {
                        let remedy = "let this client subscribe to the subjects of events, and ask JetStream";
                        tracing::warn!(%worker, server = %self.link.server(), what, remedy, "the NATS server of the worker's events refuses something");
                    }
                }
            }
        }
    }
}

/// A relay's message as an engine's socket would bring it.
pub(super) fn as_message(frame: Frame) -> Message {
    let (bytes, before_last) = (frame.payload.len(), Some(frame.seq.0.to_be_bytes()));
    Message { parts: 3, bytes, before_last, last: frame.payload, earlier: Vec::new() }
}
