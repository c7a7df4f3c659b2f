//! The event loop of one ingest thread.
//!
//! One `epoll` waits for the connections to all publishers, for a waker that announces commands, and for the timeout of
//! what depends on time. Connections are edge-triggered, so a publisher that is not drained at the end of its quantum
//! queues itself again. While a publisher is queued the poll does not wait.
//!
//! One pass of [`Shard::run`], in this order:
//!
//! | step | function | file |
//! |---|---|---|
//! | commands of other threads: stop, dump, load, reset, add, update or remove a worker | [`Shard::handle_commands`] | `commands` |
//! | slots of removed workers that no reader can meet any more | [`Shard::free_removed_slots`] | `commands` |
//! | one quantum of messages for each queued publisher | [`Shard::round`] | `publisher` |
//! | one slice of the dump or load that runs | [`Shard::transfer`] | `transfers` |
//! | every [`TICK_MS`]: deadlines, silence, probes, heartbeats | [`Shard::tick`] | |
//! | replays of lost batches | [`Shard::ask_replays`] | `replays` |
//! | changed states of workers, to the fleet | [`Shard::update_fleet`] | |
//! | one slice of the index's sweep for each space | [`SpaceShard::sweep`] | `../space_shard` |
//! | trust, after a sweep has placed deferred blocks | [`Shard::update_deferred`] | |
//! | back-pressure | [`Shard::apply_back_pressure`] | |

mod commands;
mod publisher;
mod rebuild;
mod replays;
mod transfers;

pub(crate) use commands::{AddWorker, RemoveWorker, ResetScope};
pub(super) use commands::{Command, Inbox};
pub use commands::{UpdateWorker, WorkerAccepted};

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam::queue::ArrayQueue;
use mio::{Events, Poll, Registry, Token, Waker};
use rustix::thread::set_current_timer_slack;
use tokio::sync::oneshot;

use super::handle::RefusedPublisher;
use super::publisher_socket::{Link, LinkChange, update_worker_state};
use super::republish::Republisher;
use super::space_shard::SpaceShard;
use super::stream::{Now, Scratch};
use super::{EventMemory, IngestConfig, PublisherPlan, ShardPlan, system};
use crate::budget::MemoryPart;
use crate::error::Result;
use crate::event::worker_trust::TrustInput;
use crate::fleet::Fleet;
use crate::ids::{ShardId, SpaceId, WorkerIndex};
use crate::index::ShardWriter;
use crate::limits::{
    CHOKED_PAUSE_MS, INGEST_COMMANDS_MAX, INGEST_ROUND_INTERVAL_US, INGEST_ROUND_MESSAGES_MAX, INGEST_ROUND_QUANTA_MAX,
    REMOVAL_PAUSE_MS,
};
use crate::metrics::WorkerCounter;
use crate::watchdog::{Activity, ThreadMark};

use commands::Removals;
use publisher::PublisherState;
use rebuild::Panics;
use replays::Replays;
use transfers::Transfers;

const WAKER: Token = Token(usize::MAX);
const POLL_EVENTS: usize = 1024;
/// How often the thread checks deadlines (down, silence).
const TICK_MS: u64 = 200;

/// Everything one ingest thread owns.
pub(super) struct Shard {
    id: ShardId,
    config: IngestConfig,
    poll: Poll,
    /// The registry of `poll`, for connections that open and close their sockets by themselves.
    registry: Arc<Registry>,
    inbox: Arc<Inbox>,
    clock: Clock,
    spaces: Vec<SpaceShard>,
    publishers: Vec<PublisherState>,
    /// Publishers with something to read, in the order in which they get their quanta.
    ready: VecDeque<usize>,
    scratch: Scratch,
    transfers: Transfers,
    replays: Replays,
    removals: Removals,
    fleet: Arc<Fleet>,
    /// Changes for the fleet, made all at once after the round: each update of the fleet copies its table.
    changes: Vec<(WorkerIndex, LinkChange)>,
    /// Every publisher whose events are wanted, by its newest plan: sockets are opened again from these.
    plans: Vec<PublisherPlan>,
    /// The worker whose events or sockets are being handled.
    current_worker: Option<WorkerIndex>,
    /// The worker that is being added (`true`) or updated, and where the answer goes.
    pending_answer: Option<(WorkerIndex, bool, oneshot::Sender<Result<WorkerAccepted>>)>,
    panics: Panics,
    /// When the sockets are opened again that a panic closed.
    reopen_at_ms: Option<u64>,
    /// Whether this is the shard of a relay, which publishes again what the shard holds.
    republishes: bool,
    mark: Arc<ThreadMark>,
    memory: EventMemory,
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
        let ShardPlan { shard, writers, publishers: plans } = plan;
        let mut this = Self {
            id: shard,
            poll,
            registry: Arc::new(registry),
            inbox,
            clock: Clock::start(),
            spaces: spaces(writers, &plans, config.shards),
            config,
            publishers: Vec::with_capacity(plans.len()),
            ready: VecDeque::with_capacity(plans.len()),
            scratch: Scratch::default(),
            transfers: Transfers::default(),
            replays: Replays::default(),
            removals: Removals::default(),
            fleet,
            changes: Vec::new(),
            plans: plans.clone(),
            current_worker: None,
            pending_answer: None,
            panics: Panics::default(),
            reopen_at_ms: None,
            republishes: false,
            mark: Arc::new(ThreadMark::new("ingest", true)),
            memory: EventMemory::default(),
        };
        let mut refused = Vec::new();
        for plan in &plans {
            if let Err(error) = this.open_publisher(plan, None) {
                tracing::error!(worker = %plan.worker, %error, "worker refused: its events cannot be received");
                this.plans.retain(|other| other.index != plan.index);
                refused.push(RefusedPublisher { worker: plan.worker, error });
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

    /// The thread writes this mark, and keeps to these bounds, from now on.
    pub(super) fn set_surroundings(&mut self, mark: Arc<ThreadMark>, memory: EventMemory) {
        let held = self.replays.held_bytes.bound(memory.held_bytes_max);
        memory.accounts.watch(MemoryPart::HeldEvents, move || held.get());
        self.scratch.mark = Some(Arc::clone(&mark));
        (self.mark, self.memory) = (mark, memory);
    }

    /// Publishes again every change of the shard's only worker.
    pub(super) fn republish(&mut self, republisher: Republisher) {
        let now = self.clock.now();
        self.republishes = true;
        if let Some(publisher) = self.publishers.first_mut() {
            publisher.stream.set_republisher(republisher, &self.spaces[publisher.space], now);
        }
    }

    /// Runs until [`Command::Stop`], or until the event loop itself fails.
    pub(super) fn run(&mut self) {
        self.memory.bound_messages();
        let mut events = Events::with_capacity(POLL_EVENTS);
        let mut next_tick_ms = 0_u64;
        let mut unswept = false;
        let mut pace = RoundPace::start();
        tracing::info!(shard = %self.id, publishers = self.publishers.len(), "ingest runs");
        loop {
            let wait_ms = if unswept { 0 } else { self.poll_timeout_ms(next_tick_ms) };
            if wait_ms > 0 {
                self.mark.wait();
                pace.pause();
            }
            match self.poll.poll(&mut events, Some(Duration::from_millis(wait_ms))) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    tracing::error!(shard = %self.id, %error, "the event loop failed; ingest ends");
                    return;
                }
            }
            pace.begin_round();
            self.mark.begin_round(Activity::HandlingCommands);
            events.iter().filter(|event| event.token() != WAKER).for_each(|event| self.enqueue(event.token().0));
            if self.handle_commands() {
                self.mark.wait();
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
                self.mark.enter(Activity::CheckingPublishers);
                self.tick(now);
                next_tick_ms = now.uptime_ms + TICK_MS;
            }
            self.mark.enter(Activity::AskingReplays);
            self.ask_replays(now);
            self.current_worker = None;
            self.update_fleet();
            self.mark.enter(Activity::Sweeping);
            unswept = false;
            for space in &mut self.spaces {
                unswept |= space.sweep(ticks);
            }
            self.update_deferred(now);
            self.apply_back_pressure();
        }
    }

    fn poll_timeout_ms(&self, next_tick_ms: u64) -> u64 {
        let choked = |at: &usize| self.publishers.get(*at).is_some_and(|publisher| self.spaces[publisher.space].choked);
        let while_choked = self.spaces.iter().any(|space| space.choked).then_some(CHOKED_PAUSE_MS);
        let while_removing = (!self.removals.is_empty()).then_some(REMOVAL_PAUSE_MS);
        match self.transfers.timeout_ms().into_iter().chain(while_choked).chain(while_removing).min() {
            _ if !self.transfers.block_messages() && !self.ready.iter().all(choked) => 0,
            Some(timeout_ms) => timeout_ms,
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

    /// One quantum for each queued publisher, within the limits of one round.
    fn round(&mut self, now: Now) {
        let mut messages = 0;
        for _ in 0..self.ready.len().min(INGEST_ROUND_QUANTA_MAX) {
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
            self.mark.enter_of(Activity::ApplyingEvents, publisher.index.0);
            let is_drained = publisher.take_quantum(space, scratch, &mut self.changes, now);
            messages += publisher.quantum_messages;
            if !is_drained {
                self.enqueue(at);
            }
            self.receive_replays();
            self.replays.check |= self.publishers[at].stream.wants_replay(now).is_some();
            self.close_replay(at);
            self.current_worker = None;
        }
    }

    fn tick(&mut self, now: Now) {
        let all_wait = self.transfers.block_messages();
        for publisher in &mut self.publishers {
            self.current_worker = Some(publisher.index);
            if all_wait || publisher.waits_for_load {
                // No event of its connection is taken now, so its time begins when the load has ended.
                publisher.link.begin_anew(now.uptime_ms);
            }
            let is_excused = publisher.subscription.excuses_silence(now.uptime_ms);
            let down_after_ms = if is_excused { 0 } else { self.config.down_after_ms };
            if let Some(change) = publisher.link.tick(now.uptime_ms, down_after_ms) {
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
        self.replays.check = true;
        let replays = self.publishers.iter().filter_map(|publisher| publisher.replay.as_ref());
        self.memory.replays.set(replays.map(|replay| replay.client.held_bytes() as u64).sum());
    }

    /// Lets the streams update their trust after a sweep has placed deferred blocks.
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

    /// Stops taking the events of a space while its index cannot free the memory it gave up, because a reader reads on
    /// and on: further events would make it give up more. Reclaims memory of a choked index first.
    fn apply_back_pressure(&mut self) {
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
                    "the index cannot free the memory it gave up, so events wait; look for a query that does not end"
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
    /// The writers go with the shard, also where its thread panics. Readers then see no blocks, so every trust falls.
    fn drop(&mut self) {
        let now = self.clock.now();
        self.transfers.end();
        for publisher in &mut self.publishers {
            publisher.stream.end(TrustInput::Disconnected, now);
        }
    }
}

/// Joins each writer with the plans of the space's publishers.
fn spaces(writers: Vec<(SpaceId, ShardWriter)>, plans: &[PublisherPlan], shards: usize) -> Vec<SpaceShard> {
    let with_workers = |(id, writer)| {
        let mut space = SpaceShard::new(id, writer);
        plans.iter().filter(|plan| plan.space == id).for_each(|plan| space.add_worker(plan, shards));
        space
    };
    writers.into_iter().map(with_workers).collect()
}

/// Keeps rounds apart in which few messages would be found.
///
/// A message that arrives alone costs a wake-up, a poll and a pass of the loop. Together they cost more than its events
/// do. While messages arrive often, rounds therefore begin at least an interval apart, and each takes several messages. A
/// message that arrives after a silence is taken at once.
struct RoundPace {
    began: Instant,
    is_busy: bool,
}

impl RoundPace {
    const INTERVAL: Duration = Duration::from_micros(INGEST_ROUND_INTERVAL_US);
    /// The kernel may end a pause this late. Its default of 50 us would double the interval.
    const SLACK_NS: u64 = 1_000;

    /// For the calling thread.
    fn start() -> Self {
        // A kernel that refuses makes the pauses longer, and nothing else.
        let _ = set_current_timer_slack(NonZeroU64::new(Self::SLACK_NS));
        Self { began: Instant::now(), is_busy: false }
    }

    fn begin_round(&mut self) {
        let now = Instant::now();
        self.is_busy = now.duration_since(self.began) < 2 * Self::INTERVAL;
        self.began = now;
    }

    /// Waits until the next round may begin. Call it when no work is left.
    fn pause(&self) {
        let pause = Self::INTERVAL.saturating_sub(self.began.elapsed());
        if self.is_busy && !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }
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
