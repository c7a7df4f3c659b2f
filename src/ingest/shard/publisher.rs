//! One publisher of a shard: its sockets, the life of its connection, its stream, and its quantum of messages.

use std::sync::Arc;

use mio::Token;

use super::Shard;
use super::replays::{Replay, Urgency};
use crate::endpoint::Endpoint;
use crate::error::Result;
use crate::event::worker_trust::TrustInput;
use crate::finding::Symptom;
use crate::fleet::EventSource;
use crate::ids::{Worker, WorkerIndex};
use crate::ingest::PublisherPlan;
use crate::ingest::dump::AbortReason;
use crate::ingest::publisher_socket::{Answer, Link, LinkChange, Lost, Received, Subscription};
use crate::ingest::space_shard::SpaceShard;
use crate::ingest::stream::{Now, ReplayEnd, Scratch, Stream};
use crate::limits::{
    INGEST_QUANTUM_BYTES_MAX, INGEST_QUANTUM_MESSAGES_MAX, REPLAY_BYTES_MAX, REPLAY_QUANTUM_BATCHES_MAX,
    REPLAY_QUANTUM_BYTES_MAX,
};
use crate::load::Loads;
use crate::metrics::WorkerCounter;
use crate::trust::TrustReason;
use crate::zmtp::{LinkEvent, Refusal};

/// The state of one publisher.
pub(super) struct PublisherState {
    pub(super) index: WorkerIndex,
    /// The endpoint of its events.
    pub(super) endpoint: Endpoint,
    /// The position in [`Shard::spaces`] of the space of its blocks.
    pub(super) space: usize,
    pub(super) subscription: Subscription,
    pub(super) link: Link,
    pub(super) stream: Stream,
    /// The log already says that the endpoint cannot be opened.
    pub(super) unopened_logged: bool,
    /// Its connection broke, and messages received before the break have not all been taken.
    pub(super) broken: bool,
    /// It is connected again. That counts once the break has been handled.
    pub(super) reconnected: bool,
    /// The endpoint where it replays lost batches.
    pub(super) replay_endpoint: Option<Endpoint>,
    /// The replay that is under way.
    pub(super) replay: Option<Replay>,
    /// Payload bytes of its last replay.
    pub(super) replayed_bytes: Option<usize>,
    /// The loads of all workers.
    pub(super) loads: Option<Arc<Loads>>,
    /// A load into its worker comes first: its messages stay in its sockets until the load has ended.
    pub(super) waits_for_load: bool,
    pub(super) queued: bool,
    /// Messages of its last quantum.
    pub(super) quantum_messages: usize,
}

impl Shard {
    /// Opens the sockets of a publisher and adds it to the shard. Its worker's trust begins with `input`. If the
    /// sockets cannot be opened, the trust says so.
    pub(super) fn open_publisher(&mut self, plan: &PublisherPlan, input: Option<TrustInput>) -> Result<()> {
        let at = self.publishers.len();
        self.current_worker = Some(plan.index);
        let now = self.clock.now();
        let space = self.space_of(plan.space);
        let opened = space.and_then(|space| Ok((space, self.subscribe((plan.worker, &plan.source), at, now)?)));
        let (space, subscription) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                Stream::new(plan, now).end(TrustInput::NoEventSource, now);
                return Err(error);
            }
        };
        self.current_worker = None;
        let mut stream = Stream::with_trust_input(plan, input, now);
        stream.share_held_bytes(&self.replays.held_bytes);
        self.publishers.push(PublisherState {
            index: plan.index,
            endpoint: plan.source.endpoint.clone(),
            space,
            subscription,
            link: Link::new(now.uptime_ms),
            stream,
            unopened_logged: false,
            broken: false,
            reconnected: false,
            replay_endpoint: plan.source.replay.clone(),
            replay: None,
            replayed_bytes: None,
            loads: plan.loads.clone(),
            waits_for_load: false,
            queued: false,
            quantum_messages: 0,
        });
        self.enqueue(at);
        Ok(())
    }

    /// Starts to connect to a publisher. Its socket is signalled under the publisher's number.
    pub(super) fn subscribe(
        &self,
        (worker, source): (Worker, &EventSource),
        at: usize,
        now: Now,
    ) -> Result<Subscription> {
        let of = ((&self.config.brokers, worker), self.config.receive_messages_max);
        Subscription::open(source, of, (&self.registry, Token(at)), now.uptime_ms)
    }
}

impl Link {
    /// Lets the time until it is Down begin now.
    pub(super) const fn begin_anew(&mut self, now_ms: u64) {
        match self {
            Self::Connecting { since_ms } | Self::Lost { since_ms } => *since_ms = now_ms,
            Self::Up | Self::Down => {}
        }
    }
}

impl PublisherState {
    /// Handles the events of the connection, then a bounded number of messages; `false` = there may be more.
    pub(super) fn take_quantum(
        &mut self,
        space: &mut SpaceShard,
        scratch: &mut Scratch,
        changes: &mut Vec<(WorkerIndex, LinkChange)>,
        now: Now,
    ) -> bool {
        self.quantum_messages = 0;
        self.follow_memory(space);
        self.link_events(space, changes, now);
        let was_broken = self.broken;
        if was_broken {
            // The worker is to be emptied, so no dump or load of it can go on.
            self.stream.break_hold(space, AbortReason::Disconnected, now);
        }
        let drained = self.take_messages(space, scratch, changes, now);
        // Messages from before the break still show the sequences of that connection. Once they are taken, the next
        // batch can only come from the next connection.
        if drained && was_broken {
            self.broken = false;
            self.stream.disconnected(space, now);
            if std::mem::take(&mut self.reconnected) {
                self.stream.connected(space, now);
            }
        }
        let replayed = self.broken || self.apply_replay(space, scratch, now);
        self.stream.show(space);
        drained && replayed && !self.broken && !self.stream.is_releasing()
    }

    /// How urgently the publisher is to be asked for a replay, if at all.
    pub(super) fn urgency(&self, now: Now) -> Option<Urgency> {
        let aim = self.stream.wants_replay(now)?;
        let is_idle = self.loads.as_ref().is_none_or(|loads| loads.read(self.index).requests == 0);
        Some(Urgency { aim, is_idle, waiting: self.stream.waiting() })
    }

    /// Applies a slice of the replay that is under way; `true` = no more of it has arrived.
    fn apply_replay(&mut self, space: &mut SpaceShard, scratch: &mut Scratch, now: Now) -> bool {
        let Some(replay) = &mut self.replay else { return true };
        let (mut bytes, now_ms) = (0, now.uptime_ms);
        replay.client.receive_ahead(now_ms);
        for _ in 0..REPLAY_QUANTUM_BATCHES_MAX {
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
            if bytes > REPLAY_QUANTUM_BYTES_MAX {
                break;
            }
        }
        false
    }

    /// Refuses new blocks of the worker while it is held back for want of memory.
    pub(super) fn follow_memory(&self, space: &mut SpaceShard) {
        space.writer.hold_back(self.stream.slot, self.stream.view.gauges.is_held_back());
    }

    /// Handles all events of the connection.
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
                LinkEvent::Unopened => self.log_unopened(),
                LinkEvent::Refused(refusal) => log_refused(&self.stream, refusal),
                LinkEvent::HandshakeFailed => {
                    self.stream.count(WorkerCounter::HandshakesFailed, 1);
                    let times = self.stream.view.counters.get(WorkerCounter::HandshakesFailed);
                    if times.is_power_of_two() {
                        let (worker, endpoint) = (self.stream.worker, self.endpoint.as_str());
                        tracing::warn!(%worker, endpoint, times, "the process at the endpoint is not an event publisher");
                    }
                }
            }
        }
    }

    fn log_broken(&self) {
        let worker = self.stream.worker;
        if self.stream.can_recover() {
            tracing::warn!(%worker, "publisher disconnected; its worker is unproven until a replay shows that the stream goes on");
        } else {
            tracing::warn!(%worker, "publisher disconnected; its worker is emptied");
        }
    }

    pub(super) fn log_link_change(&self, change: LinkChange) {
        let (worker, endpoint) = (self.stream.worker, self.endpoint.as_str());
        match change {
            LinkChange::Ready => tracing::info!(%worker, endpoint, "publisher connected"),
            LinkChange::Gone => tracing::warn!(
                %worker, endpoint, remedy = TrustReason::Disconnected.remedy(),
                "publisher disconnected for longer than ingest.down_after_ms; its worker is down"
            ),
            LinkChange::Unreached => tracing::warn!(
                %worker, endpoint, remedy = "start the engine with KV events enabled, or correct the endpoint",
                "publisher not reached within ingest.down_after_ms of the start; its worker is down"
            ),
        }
    }

    /// Logs once that the endpoint could not be tried at all.
    fn log_unopened(&mut self) {
        if !std::mem::replace(&mut self.unopened_logged, true) {
            tracing::warn!(
                worker = %self.stream.worker, endpoint = %self.endpoint,
                remedy = "correct the endpoint's host name or the resolver; otherwise raise the limit of open files",
                "the publisher's host name does not resolve, or no socket can be opened for it; the daemon tries again"
            );
        }
    }

    /// Treats a failed socket as a broken connection: the worker goes down if the socket stays so.
    pub(super) fn fail(&mut self, space: &mut SpaceShard, scratch: &mut Scratch, now: Now) {
        self.subscription.drop_fetched();
        self.stream.break_hold(space, AbortReason::Disconnected, now);
        self.stream.release_all(space, scratch, now);
        self.link.disconnected(now.uptime_ms);
        (self.broken, self.reconnected) = (false, false);
        self.stream.disconnected(space, now);
        self.stream.show(space);
    }

    /// The worker's events come from another source from now on. If that source can replay, a replay shows whether the
    /// stream goes on there. Otherwise the worker is emptied.
    pub(super) fn change_source(
        &mut self,
        source: &EventSource,
        space: &mut SpaceShard,
        scratch: &mut Scratch,
        now: Now,
    ) {
        self.stream.set_replays(source.replay.is_some(), now);
        self.stream.set_snapshots(source.snapshots.as_ref().map(|of| of.proposal));
        self.fail(space, scratch, now);
        self.replay_endpoint.clone_from(&source.replay);
    }

    /// Takes messages, the held ones first; `true` = none is left.
    fn take_messages(
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
        while self.quantum_messages < INGEST_QUANTUM_MESSAGES_MAX {
            // Messages wait in the kernel's buffer of the connection, which is bounded, and then in the engine.
            if space.writer.is_choked() {
                return false;
            }
            let drained = self.subscription.fetch(now.uptime_ms);
            // They prove nothing, and what they might hide shows by the numbers of batches.
            self.stream.count(WorkerCounter::MessagesMisframed, self.subscription.take_skipped());
            // Connection events from before these messages come first: readers see the applied batches at once.
            self.link_events(space, changes, now);
            if !drained && !self.subscription.has_fetched() {
                return false;
            }
            while let Some(received) = self.subscription.take() {
                self.quantum_messages += 1;
                match received {
                    // It may be from the old connection or from the next. A replay on the next brings it in any case.
                    _ if self.broken && self.stream.can_recover() => {
                        self.stream.count(WorkerCounter::MessagesDroppedBroken, 1);
                    }
                    Received::Batch(seq, payload) => {
                        bytes += payload.len();
                        self.stream.message(space, scratch, seq, &payload, now);
                    }
                    Received::BatchOf(lifetime, seq, payload) => {
                        bytes += payload.len();
                        self.stream.note_lifetime(space, scratch, (lifetime, seq), now);
                        self.stream.message(space, scratch, seq, &payload, now);
                    }
                    Received::Misframed(frames) => self.stream.misframed(space, frames, now),
                }
                // Messages that were fetched and not taken wait for the next quantum.
                if bytes > INGEST_QUANTUM_BYTES_MAX || self.stream.is_releasing() || space.writer.is_choked() {
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

/// Counts that the daemon cut a connection because of a message that came over it, and logs some of the times.
fn log_refused(stream: &Stream, refusal: Refusal) {
    let counter = match refusal {
        Refusal::NoRoom => WorkerCounter::MessagesNoRoom,
        _ if refusal.is_bound() => WorkerCounter::MessagesUnbounded,
        _ => WorkerCounter::ProtocolErrors,
    };
    stream.count(counter, 1);
    let times = stream.view.counters.get(counter);
    if times.is_power_of_two() {
        let remedy = Symptom::MessageUnbounded.remedy();
        tracing::warn!(worker = %stream.worker, times, %refusal, remedy, "the daemon cut the publisher's connection");
    }
}
