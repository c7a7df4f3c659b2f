//! The thread that stores the relay's stream at a NATS server, beside the sockets that serve readers themselves.
//!
//! It takes batches from the buffer of replays, as an answer to a request does, and nothing waits for it: an engine and the
//! relay's own readers notice neither a slow server nor one that is away. [`Forward`] decides what is sent.
//!
//! | the server | what happens |
//! |---|---|
//! | lets the relay subscribe | the stream is made, unless it is there |
//! | has the stream | what waits is sent again, then what follows |
//! | refuses a message | after a pause, the relay begins anew |
//! | goes away | what waits is sent again to the next one |
//! | no longer has the start | the relay begins anew |

mod forward;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mio::{Events, Poll, Token, Waker};
use parking_lot::Mutex;
use rand::RngExt as _;

use super::publish::{Bell, Kept};
use super::snapshot_taker::SnapshotTaker;
use crate::endpoint::NatsServer;
use crate::error::{Error, Kind, Result};
use crate::event::flat::UNNUMBERED;
use crate::ids::Worker;
use crate::limits::{
    NAME_BYTES_MAX, NATS_ANSWER_MS_MAX, NATS_EVENT_BYTES_MAX, NATS_REFUSED_MS, NATS_REFUSED_STORE_MS,
    NATS_RELAY_WAIT_MS, NATS_START_LOOK_MS, NATS_UNSTORED_BYTES_MAX, NATS_UNSTORED_MESSAGES_MAX,
};
use crate::log_quota::LogQuota;
use crate::metrics::{CounterSet, RelayCounter};
use crate::nats::jetstream::{self, Frame, Names, Question, Refused};
use crate::nats::{Access, Link, LinkEvent, Next};

pub(super) use forward::Forward;
use forward::{Todo, Unstored, What};

const LINK: Token = Token(0);
const BELL: Token = Token(1);
const POLL_EVENTS: usize = 8;

/// What the relay knows of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stream {
    /// The server is away.
    Away,
    /// Asked for.
    Asked { since_ms: u64 },
    /// It is there. Nothing is sent before this time.
    There { pause_until_ms: u64 },
}

/// What the thread waits for.
pub(super) struct EventLoop {
    poll: Poll,
    /// Wakes it.
    pub(super) bell: Arc<Bell>,
}

impl EventLoop {
    /// # Errors
    /// [`Kind::System`] if the system has none left.
    pub(super) fn new() -> Result<Self> {
        let poll = Poll::new().map_err(no_event_loop)?;
        let waker = Waker::new(poll.registry(), BELL).map_err(no_event_loop)?;
        Ok(Self { poll, bell: Arc::new(Bell::new(Arc::new(waker))) })
    }
}

fn no_event_loop(cause: io::Error) -> Error {
    let remedy = "raise the limit of open files";
    Error::new(Kind::System, "cannot make an event loop for NATS", remedy).caused_by(cause)
}

pub(super) struct Forwarding {
    link: Link,
    poll: Poll,
    events: Events,
    bell: Arc<Bell>,
    names: Names,
    /// Where answers come; a subject ends with what was asked.
    inbox: String,
    forward: Forward,
    stream: Stream,
    look_at_ms: u64,
    snapshots: SnapshotTaker,
    kept: Arc<Mutex<Kept>>,
    counters: Arc<CounterSet<RelayCounter>>,
    ends: Arc<AtomicBool>,
    said: LogQuota,
    started: Instant,
}

impl Forwarding {
    /// Starts to connect.
    ///
    /// # Errors
    /// [`Kind::System`] if the event loop cannot be shared.
    pub(super) fn open(
        EventLoop { poll, bell }: EventLoop,
        (access, servers): (&Access, Vec<NatsServer>),
        (worker, forward): (Worker, Forward),
        (snapshots, kept): (SnapshotTaker, Arc<Mutex<Kept>>),
        (counters, ends): (Arc<CounterSet<RelayCounter>>, Arc<AtomicBool>),
    ) -> Result<Self> {
        let registry = Arc::new(poll.registry().try_clone().map_err(no_event_loop)?);
        let inbox = format!("_INBOX.{:032x}", rand::rng().random::<u128>());
        let mut plan = access.plan(servers, format!("kvrouted: relay of {worker}"), vec![format!("{inbox}.*")]);
        (plan.headers, plan.payload_bytes_max) = (true, NATS_EVENT_BYTES_MAX);
        // What waits for the stream is bounded before; it may be sent twice.
        plan.waiting_bytes_max = 3 * NATS_UNSTORED_BYTES_MAX;
        Ok(Self {
            link: Link::open(plan, (registry, LINK), 0),
            poll,
            events: Events::with_capacity(POLL_EVENTS),
            bell,
            names: Names::new(access.prefix(), worker),
            inbox,
            forward,
            stream: Stream::Away,
            look_at_ms: 0,
            snapshots,
            kept,
            counters,
            ends,
            said: LogQuota::default(),
            started: Instant::now(),
        })
    }

    /// Sends until the relay ends or the event loop fails.
    pub(super) fn run(&mut self) {
        let mut has_more = false;
        // Relaxed: nothing else depends on it.
        while !self.ends.load(Ordering::Relaxed) {
            // A server that is never silent keeps neither the end nor the clock waiting.
            let wait = Duration::from_millis(if has_more { 0 } else { NATS_RELAY_WAIT_MS });
            match self.poll.poll(&mut self.events, Some(wait)) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    tracing::error!(%error, "the event loop of NATS failed; nothing is stored there any more");
                    return;
                }
                _ => {}
            }
            self.bell.answer();
            let now_ms = self.started.elapsed().as_millis() as u64;
            self.link.tick(now_ms);
            // Each answer makes room for a message.
            has_more = self.receive(now_ms) | self.send(now_ms);
        }
    }

    /// Takes some of what the server says; `true` = there may be more.
    fn receive(&mut self, now_ms: u64) -> bool {
        for _ in 0..NATS_UNSTORED_MESSAGES_MAX {
            match self.link.next(now_ms) {
                Next::Message(delivery) => {
                    let answer = delivery.subject.strip_prefix(&*self.inbox).and_then(|rest| rest.strip_prefix('.'));
                    let body = delivery.payload.as_deref().unwrap_or_default();
                    if let Some(answer) = answer {
                        self.answered(answer, body, now_ms);
                    }
                }
                Next::Later => {
                    self.follow(now_ms);
                    return true;
                }
                Next::Drained => {
                    self.follow(now_ms);
                    return false;
                }
            }
        }
        true
    }

    /// Handles the events of the connection.
    fn follow(&mut self, now_ms: u64) {
        while let Some(event) = self.link.event() {
            let server = self.link.server().to_string();
            match event {
                LinkEvent::Up => self.ask_for_stream(now_ms),
                LinkEvent::Lost => {
                    self.stream = Stream::Away;
                    self.counters.bump(RelayCounter::NatsLost);
                    tracing::warn!(server, "the NATS server is gone; the relay goes on, and tries the next one");
                }
                LinkEvent::Refused(what) | LinkEvent::Said(what) => {
                    if self.said.take(Instant::now()).is_some() {
                        let remedy = "correct nats in [relay] or the login in [ingest]; let the relay use its subjects and JetStream";
                        tracing::warn!(server, what, remedy, "the NATS server refuses something");
                    }
                }
            }
        }
    }

    fn question(&mut self, question: &Question, answer: &str) {
        // One that cannot be sent is asked again.
        let reply = format!("{}.{answer}", self.inbox);
        self.link.publish(&question.subject, Some(&reply), question.body.as_bytes());
    }

    fn ask_for_stream(&mut self, now_ms: u64) {
        self.stream = Stream::Asked { since_ms: now_ms };
        self.question(&Question::create(&self.names), "stream");
    }

    fn answered(&mut self, answer: &str, body: &[u8], now_ms: u64) {
        match answer {
            "stream" => match jetstream::done(body) {
                Ok(()) | Err(Refused::OtherSettings) => {
                    self.stream = Stream::There { pause_until_ms: now_ms };
                    // What readers begin with may be gone with the server that had it.
                    self.look_at_ms = now_ms;
                    let again = self.forward.again(now_ms);
                    self.repeat(&again);
                }
                Err(refused) => self.refused(&refused, "the stream", now_ms),
            },
            // It has begun anew since it asked.
            "start" | "oldest" if !self.forward.is_settled() => {}
            "start" => match (jetstream::started(body), self.forward.start()) {
                (Ok(start), Some(own)) if start == own => {}
                (Ok(start), Some(own)) if start.run != own.run => {
                    self.counters.bump(RelayCounter::NatsOthers);
                    let remedy = "run one relay for each worker, or give each fleet its own nats_prefix";
                    self.begin_anew("another relay stores events of the same worker", remedy);
                }
                _ => {
                    let remedy = "let the relay alone publish on the worker's subjects and purge the stream";
                    self.begin_anew("what readers begin with is gone from the stream", remedy);
                }
            },
            "oldest" => {
                if jetstream::done(body).is_err() {
                    let remedy = "let the relay alone purge the stream, and raise its limits";
                    self.begin_anew("the stream no longer has the oldest message that readers need", remedy);
                }
            }
            "purge" => {
                if let Err(refused) = jetstream::done(body) {
                    self.say_refused(&refused, "a purge");
                }
            }
            number => self.stored(number.parse().ok(), body, now_ms),
        }
    }

    /// Handles the stream's answer to a message.
    fn stored(&mut self, number: Option<u64>, body: &[u8], now_ms: u64) {
        let Some(number) = number else { return };
        match jetstream::stored(body) {
            Ok(place) => {
                self.counters.bump(RelayCounter::NatsMessages);
                if let Some(before) = self.forward.stored(number, place, now_ms) {
                    self.counters.bump(RelayCounter::NatsStarts);
                    if let Some(purge) = Question::purge(&self.names, before) {
                        self.question(&purge, "purge");
                    }
                    self.look_at_ms = now_ms + NATS_START_LOOK_MS;
                }
            }
            Err(refused) => {
                self.refused(&refused, "a message", now_ms);
                self.forward.begin_anew();
            }
        }
    }

    fn say_refused(&self, refused: &Refused, what: &str) {
        self.counters.bump(RelayCounter::NatsRefused);
        if self.said.take(Instant::now()).is_some() {
            let remedy = "enable JetStream, and raise the limits of the stream and of its account";
            tracing::warn!(?refused, what, remedy, "JetStream refuses what the relay wants to store");
        }
    }

    /// Handles a refusal: after a pause, the stream is asked for again.
    fn refused(&mut self, refused: &Refused, what: &str, now_ms: u64) {
        self.say_refused(refused, what);
        // As if it had just been asked for: its answer is late after the pause.
        let since_ms = (now_ms + NATS_REFUSED_STORE_MS).saturating_sub(NATS_ANSWER_MS_MAX);
        self.stream = Stream::Asked { since_ms };
    }

    fn begin_anew(&mut self, why: &str, remedy: &str) {
        self.counters.bump(RelayCounter::NatsAnew);
        if self.said.take(Instant::now()).is_some() {
            tracing::warn!(why, remedy, "the relay begins anew in the stream");
        }
        self.forward.begin_anew();
    }

    /// Sends what is due; `true` = something was sent.
    fn send(&mut self, now_ms: u64) -> bool {
        match self.stream {
            Stream::Away => return false,
            Stream::Asked { since_ms } => {
                if now_ms.saturating_sub(since_ms) >= NATS_ANSWER_MS_MAX {
                    self.ask_for_stream(now_ms);
                }
                return false;
            }
            Stream::There { pause_until_ms } if now_ms < pause_until_ms => return false,
            Stream::There { .. } => {}
        }
        self.snapshots.take_parts(now_ms);
        let late = self.forward.late(now_ms);
        self.repeat(&late);
        self.look(now_ms);
        for sent in 0..NATS_UNSTORED_MESSAGES_MAX {
            let kept = self.kept.lock();
            let snapshot = self.snapshots.usable(&kept, self.forward.is_in_snapshot(), now_ms);
            let todo = self.forward.step(&kept, snapshot, now_ms);
            drop(kept);
            match todo {
                Todo::Send(message) => self.publish(&message, now_ms),
                Todo::NeedsSnapshot => {
                    self.need_snapshot(now_ms);
                    return sent > 0;
                }
                Todo::Failed => {
                    self.stream = Stream::There { pause_until_ms: now_ms + NATS_REFUSED_STORE_MS };
                    return sent > 0;
                }
                Todo::Nothing => {
                    self.beat();
                    return sent > 0;
                }
            }
        }
        true
    }

    fn need_snapshot(&mut self, now_ms: u64) {
        if !self.forward.is_in_snapshot() {
            self.snapshots.need(&self.kept, now_ms);
        } else if !self.snapshots.is_there() {
            self.forward.give_up_snapshot();
        }
    }

    fn publish(&mut self, message: &Unstored, now_ms: u64) {
        let payload_bytes_max = self.link.payload_bytes_max();
        if payload_bytes_max > 0 && (message.bytes.len() + NAME_BYTES_MAX) as u64 > payload_bytes_max {
            let (bytes, what) = (message.bytes.len(), message.what.kind());
            tracing::warn!(
                bytes,
                payload_bytes_max,
                ?what,
                remedy = "raise max_payload of the NATS server",
                "a message is larger than the NATS server takes; the relay begins anew"
            );
            self.counters.bump(RelayCounter::NatsAnew);
            self.forward.begin_anew();
            if let What::Part { .. } = message.what {
                self.stream = Stream::There { pause_until_ms: now_ms + NATS_REFUSED_MS };
            }
            return;
        }
        let subject = match message.what {
            What::Batch(_) => &self.names.events,
            What::Part { .. } => &self.names.snapshot,
            What::Start(_) => &self.names.start,
        };
        let reply = format!("{}.{}", self.inbox, message.number);
        // One that cannot be sent is not stored, and then sent again.
        self.link.publish_named(subject, &reply, &message.name, &message.bytes);
    }

    fn repeat(&mut self, messages: &[Unstored]) {
        self.counters.add(RelayCounter::NatsRepeated, messages.len() as u64);
        messages.iter().for_each(|message| self.publish(message, 0));
    }

    /// Sends the relay's heartbeat once the stream has every batch. It is not stored.
    fn beat(&mut self) {
        let mut kept = self.kept.lock();
        if kept.heartbeat.is_none() || !self.forward.is_caught_up(&kept) {
            return;
        }
        let Some(heartbeat) = kept.heartbeat.take() else { return };
        drop(kept);
        let frame = Frame::encode(jetstream::Kind::Heartbeat, UNNUMBERED, &heartbeat);
        self.link.publish(&self.names.alive, None, &frame);
    }

    /// Asks now and then whether readers still find what they begin with.
    fn look(&mut self, now_ms: u64) {
        let Some(start) = self.forward.start().filter(|_| self.forward.is_settled()) else { return };
        if now_ms >= self.look_at_ms {
            self.look_at_ms = now_ms + NATS_START_LOOK_MS;
            self.question(&Question::start(&self.names), "start");
            self.question(&Question::message(&self.names, start.oldest()), "oldest");
        }
    }
}
