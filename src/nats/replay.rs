//! The answer to one request for a worker's batches, read from its stream.
//!
//! It has the shape of a connection to a publisher's replay socket, and the answer is that of a relay: the batches from the
//! one asked for on, or a snapshot and the batches behind it, and the end marker.
//!
//! | state | what ends it | next |
//! |---|---|---|
//! | Away | the server lets it subscribe | Looking |
//! | Looking for the last start | it is there | Opening batches; the snapshot, if all is wanted and it has one |
//! | | there is none | Pausing |
//! | Opening | a consumer was made | Reading |
//! | Reading the snapshot | its last part | Opening batches |
//! | Reading batches | the one asked for is not there, and nothing was handed on | Opening the snapshot |
//! | Reading batches | the stream's last one | Over, with the end marker |
//! | Looking, Opening, Reading | refused, gone, or something is missing | Pausing, or Failed once something was handed on |
//! | Pausing | its time | Looking |
//!
//! **What a purge can do.** A relay drops what a newer snapshot contains. A reader may have looked up the older start
//! before, and read any part of it. A missing first part shows by its number in the stream, a missing later part or batch
//! by the snapshot's count and digest and by the batches' numbers, which the stream's own machine checks
//! ([`crate::event`]). A missing end shows because the server then has no message although it had announced some. In each
//! case there is no end marker, and the whole is asked for again.
//!
//! Each question has a number of its own, and each message names its consumer. So what comes late of an earlier question is
//! no answer to this one.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use mio::{Registry, Token};
use rand::RngExt as _;

use super::access::Access;
use super::codec::Delivery;
use super::feed::as_message;
use super::jetstream::{self, Frame, Kind, Names, Place, Question, Refused, Start};
use super::link::{self, Link, LinkEvent};
use crate::endpoint::NatsServer;
use crate::ids::{EventSeq, Worker};
use crate::limits::{
    NATS_ANSWER_MS_MAX, NATS_EVENT_BYTES_MAX, NATS_LOOK_AGAIN_MS, NATS_PULL_MESSAGES, NATS_SKIPPED_PER_QUANTUM_MAX,
};
use crate::zmtp::{self, Message, Next};

/// The number of no batch.
const UNNUMBERED: EventSeq = EventSeq(u64::MAX);

/// Which part of the answer comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// The snapshot of a start.
    Snapshot,
    /// Batches from this number on.
    Batches { least: EventSeq },
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Away,
    Looking { since_ms: u64 },
    Opening { part: Part, since_ms: u64 },
    Reading { part: Part, consumer: String, under_way: u32 },
    Pausing { until_ms: u64 },
    Failed,
    Over,
}

/// What is to be done with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// It is a part of the answer.
    HandOn,
    /// It is before the answer, or a stranger's.
    Skip,
    /// Something before it is missing.
    Missing,
}

/// One answer.
pub(crate) struct Replay {
    link: Link,
    names: Names,
    /// Where answers come. A subject ends with the number of its question.
    inbox: String,
    questions: u64,
    from: EventSeq,
    start: Option<Start>,
    state: State,
    events: VecDeque<zmtp::LinkEvent>,
    /// The end marker is due.
    ends: bool,
    /// Something was handed on, so the answer cannot begin again.
    has_begun: bool,
}

impl std::fmt::Debug for Replay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replay").field("from", &self.from).field("state", &self.state).finish_non_exhaustive()
    }
}

impl Replay {
    /// Connects, and asks for all batches from `from` on.
    pub(crate) fn ask(
        (access, server): (&Access, NatsServer),
        (worker, from): (Worker, EventSeq),
        signals: (Arc<Registry>, Token),
        now_ms: u64,
    ) -> Self {
        // A secret: strangers cannot guess where its answers go.
        let inbox = format!("_INBOX.{:032x}", rand::rng().random::<u128>());
        let mut plan = access.plan(vec![server], format!("kvrouted: replay of {worker}"), vec![format!("{inbox}.*")]);
        (plan.headers, plan.payload_bytes_max) = (true, NATS_EVENT_BYTES_MAX);
        Self {
            link: Link::open(plan, signals, now_ms),
            names: Names::new(access.prefix(), worker),
            inbox,
            questions: 0,
            from,
            start: None,
            state: State::Away,
            events: VecDeque::new(),
            ends: false,
            has_begun: false,
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

    /// Does what is due; `true` = there is something to take.
    pub(crate) fn tick(&mut self, now_ms: u64) -> bool {
        self.link.tick(now_ms);
        self.follow(now_ms);
        let is_late = |since_ms: u64| now_ms.saturating_sub(since_ms) >= NATS_ANSWER_MS_MAX;
        match self.state {
            State::Pausing { until_ms } if now_ms >= until_ms => self.look(now_ms),
            State::Looking { since_ms } | State::Opening { since_ms, .. } if is_late(since_ms) => self.miss(now_ms),
            _ => {}
        }
        self.has_event() || self.ends
    }

    /// Advances the answer and takes its next message.
    pub(crate) fn next(&mut self, now_ms: u64) -> Next {
        for _ in 0..NATS_SKIPPED_PER_QUANTUM_MAX {
            if self.has_event() {
                return Next::Later;
            }
            if std::mem::take(&mut self.ends) {
                return Next::Message(as_message(Frame { kind: Kind::Batch, seq: UNNUMBERED, payload: Bytes::new() }));
            }
            match self.link.next(now_ms) {
                link::Next::Message(delivery) => {
                    if let Some(message) = self.take(&delivery, now_ms) {
                        self.has_begun = true;
                        return Next::Message(message);
                    }
                }
                link::Next::Later => self.follow(now_ms),
                link::Next::Drained => {
                    self.follow(now_ms);
                    return if self.has_event() || self.ends { Next::Later } else { Next::Drained };
                }
            }
        }
        Next::Later
    }

    fn follow(&mut self, now_ms: u64) {
        while let Some(event) = self.link.event() {
            match event {
                LinkEvent::Up if self.state == State::Away => self.look(now_ms),
                LinkEvent::Lost if self.state != State::Over => {
                    self.miss(now_ms);
                    if self.state != State::Failed {
                        self.state = State::Away;
                    }
                }
                LinkEvent::Refused(what) | LinkEvent::Said(what) => {
                    tracing::debug!(server = %self.link.server(), what, "a replay from a NATS server is refused something");
                }
                LinkEvent::Up | LinkEvent::Lost => {}
            }
        }
    }

    /// Asks the next question.
    fn ask_next(&mut self, question: &Question) {
        self.questions += 1;
        self.ask_again(question);
    }

    /// Asks one that has the same number as the last one.
    fn ask_again(&mut self, question: &Question) {
        // One that cannot be sent is not answered, and then asked again.
        let reply = format!("{}.{}", self.inbox, self.questions);
        self.link.publish(&question.subject, Some(&reply), question.body.as_bytes());
    }

    fn look(&mut self, now_ms: u64) {
        self.state = State::Looking { since_ms: now_ms };
        self.ask_next(&Question::start(&self.names));
    }

    /// Handles that something is missing: the answer begins again, or ends without a marker.
    fn miss(&mut self, now_ms: u64) {
        self.state = if self.has_begun {
            self.events.push_back(zmtp::LinkEvent::Disconnected);
            State::Failed
        } else {
            State::Pausing { until_ms: now_ms + NATS_LOOK_AGAIN_MS }
        };
    }

    fn open(&mut self, part: Part, now_ms: u64) {
        let Some(start) = self.start else { return };
        let (subject, from) = match part {
            Part::Snapshot => (&self.names.snapshot, start.begins),
            Part::Batches { .. } => (&self.names.events, start.batches),
        };
        let question = Question::consumer(&self.names, subject, from);
        self.state = State::Opening { part, since_ms: now_ms };
        self.ask_next(&question);
    }

    /// Takes an answer, or a message of the stream.
    fn take(&mut self, delivery: &Delivery, now_ms: u64) -> Option<Message> {
        let Some(question) = delivery.subject.strip_prefix(&*self.inbox) else { return self.read(delivery, now_ms) };
        if question.strip_prefix('.').and_then(|number| number.parse().ok()) != Some(self.questions) {
            return None;
        }
        let body = delivery.payload.as_deref().unwrap_or_default();
        let refused = match self.state {
            State::Looking { .. } => jetstream::started(body).map(|start| self.started(start, now_ms)).err(),
            State::Opening { part, .. } => {
                jetstream::consumer(body).map(|consumer| self.opened(part, consumer, now_ms)).err()
            }
            // There is no further message, although one was announced; or the consumer is gone.
            State::Reading { .. } => Some(Refused::NoMessage),
            _ => None,
        };
        if let Some(refused) = refused {
            tracing::debug!(?refused, stream = self.names.stream, "a replay cannot be read");
            self.miss(now_ms);
        }
        None
    }

    fn started(&mut self, start: Start, now_ms: u64) {
        self.start = Some(start);
        let is_snapshot = self.from == EventSeq(0) && start.begins > 0;
        self.open(if is_snapshot { Part::Snapshot } else { Part::Batches { least: self.from } }, now_ms);
    }

    fn opened(&mut self, part: Part, (consumer, pending): (String, u64), now_ms: u64) {
        let has_snapshot = self.start.is_some_and(|start| start.begins > 0);
        match part {
            Part::Batches { .. } if pending == 0 && self.has_begun => (self.state, self.ends) = (State::Over, true),
            Part::Batches { .. } if pending == 0 && has_snapshot => self.open(Part::Snapshot, now_ms),
            // What the start names was there.
            _ if pending == 0 => self.miss(now_ms),
            part => {
                self.questions += 1;
                self.state = State::Reading { part, consumer, under_way: 0 };
                self.pull();
            }
        }
    }

    /// Asks for further messages, so that some are always under way.
    fn pull(&mut self) {
        let State::Reading { consumer, under_way, .. } = &mut self.state else { return };
        if *under_way <= NATS_PULL_MESSAGES {
            *under_way += NATS_PULL_MESSAGES;
            let question = Question::next(&self.names, consumer, NATS_PULL_MESSAGES);
            self.ask_again(&question);
        }
    }

    /// Takes a message of the stream.
    fn read(&mut self, delivery: &Delivery, now_ms: u64) -> Option<Message> {
        let (of, place) = delivery.reply.as_deref().and_then(Place::of)?;
        let (State::Reading { part, consumer, under_way }, Some(start)) = (&mut self.state, self.start) else {
            return None;
        };
        if of != consumer {
            return None;
        }
        *under_way = under_way.saturating_sub(1);
        let (part, frame) = (*part, delivery.payload.as_ref().and_then(Frame::decode));
        let verdict = match part {
            Part::Snapshot => judge_part((place, frame.as_ref()), &start, self.has_begun),
            Part::Batches { least } => judge_batch(frame.as_ref(), (self.from, least), self.has_begun),
        };
        match (verdict, part) {
            // The stream no longer has what was asked for, and the snapshot contains it.
            (Verdict::Missing, Part::Batches { .. }) if start.begins > 0 => {
                self.open(Part::Snapshot, now_ms);
                return None;
            }
            (Verdict::Missing, Part::Snapshot) => {
                self.miss(now_ms);
                return None;
            }
            (Verdict::HandOn | Verdict::Skip | Verdict::Missing, _) => {}
        }
        self.has_begun |= verdict != Verdict::Skip;
        match part {
            Part::Snapshot if place.number == start.ends => self.open(Part::Batches { least: start.first }, now_ms),
            Part::Snapshot if place.pending == 0 => self.miss(now_ms),
            Part::Batches { .. } if place.pending == 0 => (self.state, self.ends) = (State::Over, true),
            _ => self.pull(),
        }
        frame.filter(|_| verdict != Verdict::Skip).map(as_message)
    }
}

/// Judges a message of the snapshot's subject.
fn judge_part((place, frame): (Place, Option<&Frame>), start: &Start, has_begun: bool) -> Verdict {
    match frame {
        _ if place.number > start.ends || (!has_begun && place.number > start.begins) => Verdict::Missing,
        Some(Frame { kind: Kind::Part, .. }) => Verdict::HandOn,
        _ => Verdict::Skip,
    }
}

/// Judges a message of the events' subject: `from` was asked for, and what is before `least` is known or in the snapshot.
fn judge_batch(frame: Option<&Frame>, (from, least): (EventSeq, EventSeq), has_begun: bool) -> Verdict {
    match frame {
        Some(Frame { kind: Kind::Batch, seq, .. }) if *seq >= least => {
            if has_begun || *seq == from {
                Verdict::HandOn
            } else {
                Verdict::Missing
            }
        }
        _ => Verdict::Skip,
    }
}
