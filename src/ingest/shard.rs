//! The event loop of one ingest thread.
//!
//! One `epoll` over the connections to all publishers, a waker for commands, and the poll's
//! timeout for what depends on time. Connections are edge-triggered, so a publisher that is not drained
//! at the end of its turn queues itself again; while anybody is queued the poll does not wait.

mod commands;
mod publisher;
mod rebuild;
mod replays;
mod transfers;

pub use commands::{AddWorker, WorkerAccepted, UpdateWorker, RemoveWorker, ResetScope};
pub(super) use commands::{Command, Inbox};

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam::queue::ArrayQueue;
use mio::{Events, Poll, Registry, Token, Waker};
use tokio::sync::oneshot;

use super::handle::RefusedPublisher;
use super::publisher_socket::{Link, LinkChange, update_worker_state};
use super::republish::Republisher;
use super::stream::{SpaceShard, Now, Scratch};
use super::{IngestConfig, Publisher, ShardPlan, system};
use crate::error::Result;
use crate::event::trust::TrustInput;
use crate::fleet::Fleet;
use crate::ids::{ShardId, SpaceId, WorkerIndex};
use crate::index::ShardWriter;
use crate::limits::{
    CHOKED_REST_MS, INGEST_COMMANDS_MAX, INGEST_ROUND_MESSAGES_MAX, INGEST_ROUND_TURNS_MAX, INGEST_SWEEP_BLOCKS,
    LEAVING_REST_MS,
};
use crate::metrics::WorkerCounter;

use commands::Removals;
use publisher::PublisherState;
use rebuild::Panics;
use replays::Replays;
use transfers::Transfers;

const WAKER: Token = Token(usize::MAX);
const POLL_EVENTS: usize = 1024;
/// How often deadlines (down, silence) are looked at.
const TICK_MS: u64 = 200;

/// Everything one ingest thread owns.
pub(super) struct Shard {
    id: ShardId,
    config: IngestConfig,
    poll: Poll,
    /// Of the same event loop, for connections that come and go by themselves.
    registry: Arc<Registry>,
    inbox: Arc<Inbox>,
    clock: Clock,
    spaces: Vec<SpaceShard>,
    publishers: Vec<PublisherState>,
    /// Publishers with something to read, in the order of their turns.
    ready: VecDeque<usize>,
    scratch: Scratch,
    transfers: Transfers,
    replays: Replays,
    leaving: Removals,
    fleet: Arc<Fleet>,
    /// What the fleet is to be told after this round, all at once: every telling copies its table.
    changes: Vec<(WorkerIndex, LinkChange)>,
    /// Every publisher that is to be heard, as it was named last: what the sockets are opened from again.
    plans: Vec<Publisher>,
    /// Whose events or sockets are being handled.
    current_worker: Option<WorkerIndex>,
    /// Who is to be told what comes of the admission (`true`) or amendment that is being made.
    pending_answer: Option<(WorkerIndex, bool, oneshot::Sender<Result<WorkerAccepted>>)>,
    panics: Panics,
    /// When the sockets are opened again that a panic closed.
    reopen_at_ms: Option<u64>,
    /// Whether what it holds is said once more, by a relay.
    republishes: bool,
}

impl Shard {
    /// Makes the event loop and opens every publisher that can be opened.
    pub(super) fn open(
        plan: ShardPlan,
        config: IngestConfig,
        fleet: Arc<Fleet>,
    ) -> Result<(Self, Vec<RefusedPublisher>)> {
        let poll = Poll::new().map_err(|error| system("cannot make an event loop").caused_by(error))?;
        let registry =
            poll.registry().try_clone().map_err(|error| system("cannot share an event loop").caused_by(error))?;
        let waker =
            Waker::new(poll.registry(), WAKER).map_err(|error| system("cannot make a waker").caused_by(error))?;
        let inbox = Arc::new(Inbox { commands: ArrayQueue::new(INGEST_COMMANDS_MAX), waker });
        let ShardPlan { shard, writers, publishers } = plan;
        let mut this = Self {
            id: shard,
            config,
            poll,
            registry: Arc::new(registry),
            inbox,
            clock: Clock::start(),
            spaces: spaces(writers, &publishers, config.shards),
            publishers: Vec::with_capacity(publishers.len()),
            ready: VecDeque::with_capacity(publishers.len()),
            scratch: Scratch::default(),
            transfers: Transfers::default(),
            replays: Replays::default(),
            leaving: Removals::default(),
            fleet,
            changes: Vec::new(),
            plans: publishers.clone(),
            current_worker: None,
            pending_answer: None,
            panics: Panics::default(),
            reopen_at_ms: None,
            republishes: false,
        };
        let mut refused = Vec::new();
        for publisher in &publishers {
            if let Err(error) = this.admit(publisher, None) {
                tracing::error!(worker = %publisher.worker, %error, "worker refused: its events cannot be received");
                this.plans.retain(|other| other.index != publisher.index);
                refused.push(RefusedPublisher { worker: publisher.worker, error });
            }
        }
        Ok((this, refused))
    }

    /// Logical CPU to run on.
    pub(super) const fn core(&self) -> Option<usize> {
        self.config.core
    }

    pub(super) const fn id(&self) -> ShardId {
        self.id
    }

    pub(super) fn inbox(&self) -> Arc<Inbox> {
        Arc::clone(&self.inbox)
    }

    /// Says what is done to its only worker.
    pub(super) fn republish(&mut self, republisher: Republisher) {
        let now = self.clock.now();
        self.republishes = true;
        if let Some(publisher) = self.publishers.first_mut() {
            publisher.stream.set_republisher(republisher, &self.spaces[publisher.space], now);
        }
    }

    /// Runs until it is told to stop, or until the event loop itself fails.
    pub(super) fn run(&mut self) {
        let mut events = Events::with_capacity(POLL_EVENTS);
        let mut next_tick_ms = 0_u64;
        let mut unswept = false;
        tracing::info!(shard = %self.id, publishers = self.publishers.len(), "ingest runs");
        loop {
            let wait_ms = if unswept { 0 } else { self.rest_ms(next_tick_ms) };
            match self.poll.poll(&mut events, Some(Duration::from_millis(wait_ms))) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    tracing::error!(shard = %self.id, %error, "the event loop failed; ingest ends");
                    return;
                }
            }
            events.iter().filter(|event| event.token() != WAKER).for_each(|event| self.enqueue(event.token().0));
            if self.handle_commands() {
                tracing::info!(shard = %self.id, "ingest ends");
                return;
            }
            self.current_worker = None;
            self.free_removed_slots();
            let now = self.clock.now();
            if !self.transfers.block_messages() {
                self.round(now);
            }
            self.transfer(now);
            let ticks = now.uptime_ms >= next_tick_ms;
            if ticks {
                self.tick(now);
                next_tick_ms = now.uptime_ms + TICK_MS;
            }
            self.ask_replays(now);
            self.current_worker = None;
            self.update_fleet();
            unswept = false;
            for space in &mut self.spaces {
                unswept |= space.sweep(ticks);
            }
            self.update_deferred(now);
            self.apply_back_pressure();
        }
    }

    /// How long the poll may wait for something to happen.
    fn rest_ms(&self, next_tick_ms: u64) -> u64 {
        let choked = |at: &usize| self.publishers.get(*at).is_some_and(|publisher| self.spaces[publisher.space].choked);
        let chokes = self.spaces.iter().any(|space| space.choked).then_some(CHOKED_REST_MS);
        let leaves = (!self.leaving.is_empty()).then_some(LEAVING_REST_MS);
        match self.transfers.rest_ms().into_iter().chain(chokes).chain(leaves).min() {
            _ if !self.transfers.block_messages() && !self.ready.iter().all(choked) => 0,
            Some(rest_ms) => rest_ms,
            None => next_tick_ms.saturating_sub(self.clock.now().uptime_ms),
        }
    }

    fn enqueue(&mut self, at: usize) {
        if let Some(publisher) = self.publishers.get_mut(at)
            && !std::mem::replace(&mut publisher.queued, true)
        {
            self.ready.push_back(at);
        }
    }

    /// One turn for each queued publisher, within the bounds of one round.
    fn round(&mut self, now: Now) {
        let mut messages = 0;
        for _ in 0..self.ready.len().min(INGEST_ROUND_TURNS_MAX) {
            if messages >= INGEST_ROUND_MESSAGES_MAX {
                return;
            }
            let Some(at) = self.ready.pop_front() else { return };
            let (Some(publisher), scratch) = (self.publishers.get_mut(at), &mut self.scratch) else { continue };
            publisher.queued = false;
            if publisher.waits_for_load {
                continue;
            }
            let space = &mut self.spaces[publisher.space];
            self.current_worker = Some(publisher.index);
            let is_over = publisher.take_quantum(space, scratch, &mut self.changes, now);
            messages += publisher.quantum_messages;
            if !is_over {
                self.enqueue(at);
            }
            self.receive_replays();
            self.replays.look |= self.publishers[at].stream.wants_replay(now).is_some();
            self.close_replay(at);
            self.current_worker = None;
        }
    }

    fn tick(&mut self, now: Now) {
        for publisher in &mut self.publishers {
            self.current_worker = Some(publisher.index);
            if let Some(change) = publisher.link.tick(now.uptime_ms, self.config.down_after_ms) {
                publisher.log_link_change(change);
                self.changes.push((publisher.index, change));
            }
            publisher.stream.tick(self.config.silence_ms_max, now);
            publisher.stream.probe(self.config.probe_after_ms, now);
            publisher.stream.show(&mut self.spaces[publisher.space]);
            publisher.stream.republish(|republisher| republisher.tick(now));
        }
        for at in 0..self.publishers.len() {
            if self.publishers[at].subscription.tick(now.uptime_ms) {
                self.enqueue(at);
            }
            self.end_overdue_replay(at, now);
        }
        self.current_worker = None;
        self.reopen_if_due(now);
        self.replays.look = true;
    }

    /// Has the streams take note of what a sweep did with blocks that waited for their places.
    fn update_deferred(&mut self, now: Now) {
        for (number, space) in self.spaces.iter_mut().enumerate().filter(|(_, space)| space.deferring) {
            space.deferring = false;
            for publisher in self.publishers.iter_mut().filter(|publisher| publisher.space == number) {
                let waits = publisher.stream.swept(space, now);
                space.deferring |= waits;
            }
        }
    }

    fn update_fleet(&mut self) {
        if !self.changes.is_empty() {
            let changes = std::mem::take(&mut self.changes);
            self.fleet.update(|table| {
                let mut changed = false;
                for change in changes {
                    changed |= update_worker_state(table, change);
                }
                changed
            });
        }
    }

    /// Asks every index whether it takes events, handing on what it has given up where it does not.
    pub(super) fn apply_back_pressure(&mut self) {
        for (number, space) in self.spaces.iter_mut().enumerate() {
            if space.writer.is_choked() {
                space.writer.reclaim();
            }
            let choked = space.writer.is_choked();
            if std::mem::replace(&mut space.choked, choked) == choked {
                continue;
            }
            if choked {
                tracing::warn!(
                    shard = %self.id, space = %space.id,
                    "the index cannot free what it gave up; events wait until it can: look for a query that does not end"
                );
            } else {
                tracing::info!(shard = %self.id, space = %space.id, "the index takes events again");
            }
            for publisher in self.publishers.iter().filter(|publisher| publisher.space == number) {
                publisher.stream.view.gauges.set_choked(choked);
                if choked {
                    publisher.stream.count(WorkerCounter::Chokes, 1);
                }
            }
        }
    }
}

impl Drop for Shard {
    /// The writers go, also where the thread panics, and readers then see nothing: nothing may be believed.
    fn drop(&mut self) {
        let now = self.clock.now();
        self.transfers.end();
        for publisher in &mut self.publishers {
            publisher.stream.end(TrustInput::Disconnected, now);
        }
    }
}

impl SpaceShard {
    /// Cleans up a slice of what was emptied; `true` = there is more. `ticks` = also hands on what was given up.
    fn sweep(&mut self, ticks: bool) -> bool {
        // What is swept is given up too: it would only add to what chokes.
        let more = !self.choked && self.writer.sweep(INGEST_SWEEP_BLOCKS);
        if ticks || (self.unswept && !more) {
            // On a quiet shard no batch comes that would fill up what is too little to be handed on by itself.
            self.writer.reclaim();
            self.writer.publish();
        }
        self.unswept = more;
        more
    }

    /// Counts one more worker in, which knows the space's scheme as they all do.
    pub(super) fn take_in(&mut self, publisher: &Publisher, shards: usize) {
        self.scheme = Arc::clone(&publisher.scheme);
        self.relearns = shards == 1 && !publisher.scheme_configured;
        self.slots.push(publisher.slot);
    }
}

/// Joins each writer with what its publishers say of their space.
fn spaces(writers: Vec<(SpaceId, ShardWriter)>, publishers: &[Publisher], shards: usize) -> Vec<SpaceShard> {
    let space = |(space, writer)| {
        let scheme = Arc::default();
        let mut space = SpaceShard {
            space,
            writer,
            scheme,
            relearns: false,
            unsure: false,
            slots: Vec::new(),
            unswept: false,
            choked: false,
            deferring: false,
        };
        let of_space = publishers.iter().filter(|publisher| publisher.space == space);
        of_space.for_each(|publisher| space.take_in(publisher, shards));
        space
    };
    writers.into_iter().map(space).collect()
}

/// The only clock of ingest.
struct Clock {
    started: Instant,
}

impl Clock {
    fn start() -> Self {
        Self { started: Instant::now() }
    }

    fn now(&self) -> Now {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Now { unix_ms: unix.as_millis() as u64, uptime_ms: self.started.elapsed().as_millis() as u64 }
    }
}

#[cfg(test)]
mod tests;
