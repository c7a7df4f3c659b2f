//! One publisher with everything that is its own, and its turn.

use std::sync::Arc;

use mio::Token;

use super::replays::{Replay, Urgency};
use super::{Link, Shard};
use crate::endpoint::Endpoint;
use crate::error::Result;
use crate::event::trust::TrustInput;
use crate::fleet::EventSource;
use crate::finding::Symptom;
use crate::ids::WorkerIndex;
use crate::ingest::Publisher;
use crate::ingest::dump::AbortReason;
use crate::ingest::publisher_socket::{Answer, LinkChange, Lost, Received, Subscription};
use crate::ingest::stream::{SpaceShard, Now, ReplayEnd, Scratch, Stream};
use crate::limits::{
    INGEST_TURN_BYTES_MAX, INGEST_TURN_MESSAGES_MAX, REPLAY_BYTES_MAX, REPLAY_TURN_BATCHES_MAX, REPLAY_TURN_BYTES_MAX,
};
use crate::load::Loads;
use crate::metrics::WorkerCounter;
use crate::trust::TrustReason;
use crate::zmtp::{LinkEvent, Refusal};

/// One publisher: its sockets, its connection's life and its stream.
pub(super) struct PublisherState {
    pub(super) index: WorkerIndex,
    /// Where its publisher is to be found.
    pub(super) endpoint: Endpoint,
    /// Which of the shard's spaces its blocks are in.
    pub(super) space: usize,
    pub(super) subscription: Subscription,
    pub(super) link: Link,
    pub(super) stream: Stream,
    /// It was said that the endpoint cannot be opened.
    pub(super) unopened_logged: bool,
    /// Its connection broke, and what was received before has not all been taken.
    pub(super) broken: bool,
    /// It is connected again, which counts once the break has been seen to.
    pub(super) reconnected: bool,
    /// Where it replays lost batches.
    pub(super) replay_endpoint: Option<Endpoint>,
    /// The replay that is under way.
    pub(super) replay: Option<Replay>,
    /// What the last replay brought, payload bytes.
    pub(super) replayed_bytes: Option<usize>,
    /// What workers are busy with.
    pub(super) loads: Option<Arc<Loads>>,
    /// It is loaded first: nothing is taken of its sockets before that is over.
    pub(super) waits_for_load: bool,
    pub(super) queued: bool,
    /// Messages that its last turn took.
    pub(super) quantum_messages: usize,
}

impl PublisherState {
    /// Takes what the connection did, then a bounded number of messages; `false` = there may be more.
    pub(super) fn take_quantum(
        &mut self,
        space: &mut SpaceShard,
        scratch: &mut Scratch,
        changes: &mut Vec<(WorkerIndex, LinkChange)>,
        now: Now,
    ) -> bool {
        self.quantum_messages = 0;
        self.link_events(space, changes, now);
        let was_broken = self.broken;
        if was_broken {
            // The worker is to be emptied: nothing more of it can be dumped or loaded.
            self.stream.break_hold(space, AbortReason::Disconnected, now);
        }
        let drained = self.messages(space, scratch, changes, now);
        // What was received before the break is still good to know its sequences by; once it is taken, the
        // next batch can only be of the next connection.
        if drained && was_broken {
            self.broken = false;
            self.stream.disconnected(space, now);
            if std::mem::take(&mut self.reconnected) {
                self.stream.connected(space, now);
            }
        }
        let replayed = self.broken || self.take_replay(space, scratch, now);
        self.stream.show(space);
        drained && replayed && !self.broken && !self.stream.is_releasing()
    }

    /// How soon it is to be asked for a replay, if at all.
    pub(super) fn urgency(&self, now: Now) -> Option<Urgency> {
        let aim = self.stream.wants_replay(now)?;
        let is_idle = self.loads.as_ref().is_none_or(|loads| loads.read(self.index).requests == 0);
        Some(Urgency { aim, is_idle, waiting: self.stream.waiting() })
    }

    /// Takes a slice of the replay that is under way; `true` = nothing more of it is there.
    fn take_replay(&mut self, space: &mut SpaceShard, scratch: &mut Scratch, now: Now) -> bool {
        let Some(replay) = &mut self.replay else { return true };
        let (mut bytes, now_ms) = (0, now.uptime_ms);
        replay.client.receive_ahead(now_ms);
        for _ in 0..REPLAY_TURN_BATCHES_MAX {
            if !self.stream.awaits_replay() {
                return true;
            }
            if space.writer.is_choked() {
                self.stream.excuse_replay(now);
                return false;
            }
            match replay.client.receive(now_ms) {
                Ok(None) => return replay.client.is_drained(),
                Ok(Some(Answer::Batch(seq, payload))) => {
                    bytes += payload.len();
                    replay.bytes += payload.len();
                    self.stream.replayed(space, scratch, seq, &payload, now);
                }
                Ok(Some(Answer::Part(payload))) => {
                    bytes += payload.len();
                    replay.bytes += payload.len();
                    self.stream.replayed_part(space, scratch, &payload, now);
                }
                Ok(Some(Answer::End)) => self.stream.replay_ended(space, ReplayEnd::Marker, now),
                Ok(Some(Answer::Misframed(_))) => self.stream.count(WorkerCounter::ReplayFramesUnknown, 1),
                Err(lost) => {
                    if let Lost::Refused(refusal) = lost {
                        log_refused(&self.stream, refusal);
                    }
                    self.stream.replay_ended(space, ReplayEnd::Missing, now);
                }
            }
            // A snapshot cannot go on where it was broken off.
            if replay.bytes > REPLAY_BYTES_MAX && !self.stream.is_taking_snapshot() {
                self.stream.replay_ended(space, ReplayEnd::TooLarge, now);
            }
            if bytes > REPLAY_TURN_BYTES_MAX {
                break;
            }
        }
        false
    }

    /// Takes everything that the connection did.
    fn link_events(&mut self, space: &mut SpaceShard, changes: &mut Vec<(WorkerIndex, LinkChange)>, now: Now) {
        while let Some(event) = self.subscription.link_event() {
            match event {
                LinkEvent::Handshake => {
                    self.unopened_logged = false;
                    if let Some(change) = self.link.handshake() {
                        self.log_link_change(change);
                        changes.push((self.index, change));
                        if self.broken {
                            self.reconnected = true;
                        } else {
                            self.stream.connected(space, now);
                        }
                    }
                }
                LinkEvent::Disconnected => {
                    if self.link.disconnected(now.uptime_ms) {
                        self.log_broken();
                        (self.broken, self.reconnected) = (true, false);
                        self.stream.breaking(now);
                    }
                }
                LinkEvent::Unopened => self.unopened(),
                LinkEvent::Refused(refusal) => log_refused(&self.stream, refusal),
                LinkEvent::HandshakeFailed => {
                    self.stream.count(WorkerCounter::HandshakesFailed, 1);
                    let times = self.stream.view.counters.get(WorkerCounter::HandshakesFailed);
                    if times.is_power_of_two() {
                        tracing::warn!(worker = %self.stream.worker, times, "what answers at the endpoint is no event publisher");
                    }
                }
            }
        }
    }

    fn log_broken(&self) {
        let worker = self.stream.worker;
        if self.stream.can_recover() {
            tracing::warn!(%worker, "publisher disconnected; the worker is not believed until it is shown to go on");
        } else {
            tracing::warn!(%worker, "publisher disconnected; the worker is emptied");
        }
    }

    /// Logs what becomes of the connection.
    pub(super) fn log_link_change(&self, change: LinkChange) {
        let (worker, endpoint) = (self.stream.worker, self.endpoint.as_str());
        match change {
            LinkChange::Ready => tracing::info!(%worker, endpoint, "publisher connected"),
            LinkChange::Gone => tracing::warn!(
                %worker, endpoint, remedy = TrustReason::Disconnected.remedy(),
                "publisher gone for too long; the worker is down"
            ),
            LinkChange::Unreached => tracing::warn!(
                %worker, endpoint, remedy = "start the engine with KV events enabled, or correct the endpoint",
                "publisher not reached since the start; the worker is down"
            ),
        }
    }

    /// The endpoint could not be tried at all; said once until it can be.
    fn unopened(&mut self) {
        if !std::mem::replace(&mut self.unopened_logged, true) {
            tracing::warn!(
                worker = %self.stream.worker, endpoint = %self.endpoint,
                remedy = "correct the endpoint's host name or the resolver; else raise the limit of open files",
                "the publisher's host name does not resolve, or there is no socket for it; it is tried again"
            );
        }
    }

    /// Its socket failed: what holds of a broken connection holds, and the worker is down if it stays so.
    pub(super) fn fail(&mut self, space: &mut SpaceShard, scratch: &mut Scratch, now: Now) {
        self.subscription.drop_fetched();
        self.stream.break_hold(space, AbortReason::Disconnected, now);
        self.stream.release_all(space, scratch, now);
        self.link.disconnected(now.uptime_ms);
        (self.broken, self.reconnected) = (false, false);
        self.stream.disconnected(space, now);
        self.stream.show(space);
    }

    /// Its events come from elsewhere from now on. Where they can be replayed there, that shows whether they go on;
    /// where not, the worker is emptied.
    pub(super) fn redirect(&mut self, replay: Option<&Endpoint>, space: &mut SpaceShard, scratch: &mut Scratch, now: Now) {
        self.stream.set_replays(replay.is_some());
        self.fail(space, scratch, now);
        self.replay_endpoint = replay.cloned();
    }

    /// Takes messages, those that waited first; `true` = none is left.
    fn messages(
        &mut self,
        space: &mut SpaceShard,
        scratch: &mut Scratch,
        changes: &mut Vec<(WorkerIndex, LinkChange)>,
        now: Now,
    ) -> bool {
        if self.stream.is_releasing() && !self.stream.release(space, scratch, now) {
            return false;
        }
        let mut bytes = 0;
        while self.quantum_messages < INGEST_TURN_MESSAGES_MAX {
            // They wait in the kernel's buffer of the connection, which is bounded, and then in the engine.
            if space.writer.is_choked() {
                return false;
            }
            let drained = self.subscription.fetch(now.uptime_ms);
            // What the connection did before these messages must be known before their events are applied, which
            // readers see at once.
            self.link_events(space, changes, now);
            if !drained && !self.subscription.has_fetched() {
                return false;
            }
            while let Some(received) = self.subscription.take() {
                self.quantum_messages += 1;
                match received {
                    // It may be of the old connection or of the next. A replay on the next brings it in any case.
                    _ if self.broken && self.stream.can_recover() => {
                        self.stream.count(WorkerCounter::MessagesDroppedBroken, 1);
                    }
                    Received::Batch(seq, payload) => {
                        bytes += payload.len();
                        self.stream.message(space, scratch, seq, &payload, now);
                    }
                    Received::Misframed(frames) => self.stream.misframed(space, frames, now),
                }
                // What was fetched and is not taken now waits for the next turn.
                if bytes > INGEST_TURN_BYTES_MAX || self.stream.is_releasing() || space.writer.is_choked() {
                    return false;
                }
            }
            if drained {
                return true;
            }
        }
        false
    }
}

/// Counts, and logs now and then, that the daemon cut a connection because of what came over it.
fn log_refused(stream: &Stream, refusal: Refusal) {
    let counter = if refusal.is_bound() { WorkerCounter::MessagesUnbounded } else { WorkerCounter::ProtocolErrors };
    stream.count(counter, 1);
    let times = stream.view.counters.get(counter);
    if times.is_power_of_two() {
        let remedy = Symptom::MessageUnbounded.remedy();
        tracing::warn!(worker = %stream.worker, times, %refusal, remedy, "the publisher's connection was cut");
    }
}

impl Shard {
    /// Opens a publisher's sockets and waits for them. Where that fails its worker's trust says so. Its trust begins with
    /// `input`.
    pub(super) fn admit(&mut self, publisher: &Publisher, input: Option<TrustInput>) -> Result<()> {
        let at = self.publishers.len();
        self.current_worker = Some(publisher.index);
        let now = self.clock.now();
        let space = self.space_of(publisher.space);
        let opened = space.and_then(|space| Ok((space, self.subscribe(&publisher.source, at, now)?)));
        let (space, subscription) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                Stream::new(publisher, now).end(TrustInput::NoEventSource, now);
                return Err(error);
            }
        };
        self.current_worker = None;
        let mut stream = Stream::with_trust_input(publisher, input, now);
        stream.share_held_bytes(&self.replays.held_bytes);
        self.publishers.push(PublisherState {
            index: publisher.index,
            endpoint: publisher.source.endpoint.clone(),
            space,
            subscription,
            link: Link::new(now.uptime_ms),
            stream,
            unopened_logged: false,
            broken: false,
            reconnected: false,
            replay_endpoint: publisher.source.replay.clone(),
            replay: None,
            replayed_bytes: None,
            loads: publisher.loads.clone(),
            waits_for_load: false,
            queued: false,
            quantum_messages: 0,
        });
        self.enqueue(at);
        Ok(())
    }

    /// Starts to connect to a publisher, signalled under a publisher's number.
    fn subscribe(&self, source: &EventSource, at: usize, now: Now) -> Result<Subscription> {
        Subscription::open(source, self.config.receive_messages_max, (&self.registry, Token(at)), now.uptime_ms)
    }
}
