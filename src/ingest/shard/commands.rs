//! The commands that an ingest thread handles: the list, how another thread sends each, and what each does.
//!
//! | command | sent by | effect |
//! |---|---|---|
//! | [`Command::Stop`] | [`IngestHandle::stop`] | closes every socket and ends the thread |
//! | [`Command::Dump`] | [`IngestHandle::dump`] | queues a dump of a worker (`transfers`) |
//! | [`Command::Load`] | [`IngestHandle::load`], [`IngestHandle::load_engine_snapshot`] | queues the restore of a worker's blocks (`transfers`) |
//! | [`Command::Reset`] | [`IngestHandle::reset`] | empties a worker, or every worker of the shard |
//! | [`Command::AddWorker`] | [`IngestHandle::add_worker`] | gives a worker a slot and opens its sockets |
//! | [`Command::UpdateWorker`] | [`IngestHandle::update_worker`] | changes a worker's record, and its sockets if its events come from elsewhere |
//! | [`Command::RemoveWorker`] | [`IngestHandle::remove_worker`] | closes a worker's sockets; frees its slot once no reader can still see the worker |
//!
//! A new command is a variant of [`Command`], a method of [`IngestHandle`] and an arm of [`Shard::handle_command`].

use std::sync::Arc;

use crossbeam::channel::Receiver;
use crossbeam::queue::ArrayQueue;
use mio::{Token, Waker};
use tokio::sync::oneshot;

use super::transfers::Transfer;
use super::{Link, Now, PublisherState, Shard};
use crate::error::{Error, Kind, Result};
use crate::event::worker_trust::TrustInput;
use crate::fleet::{EventSource, WorkerRecord, WorkerState};
use crate::ids::{SpaceId, Worker, WorkerIndex, WorkerSlot};
use crate::ingest::dump::{AbortReason, DumpPart, FirstLoad, LoadAnswer, Loading, Sending};
use crate::ingest::handle::IngestHandle;
use crate::ingest::{PublisherPlan, system};
use crate::trust::{Trust, TrustLevel, TrustReason};

/// A command to an ingest thread, with the channel for its reply, if it has one.
#[derive(Debug)]
pub(in crate::ingest) enum Command {
    Stop,
    Dump(Worker, Box<Sending>),
    Load(Worker, Box<Loading>),
    /// Without a worker: every worker of the shard.
    Reset(Option<Worker>, ResetScope),
    AddWorker(Box<AddWorker>, oneshot::Sender<Result<WorkerAccepted>>),
    UpdateWorker(Box<UpdateWorker>, oneshot::Sender<Result<WorkerAccepted>>),
    RemoveWorker(RemoveWorker, oneshot::Sender<()>),
}

/// The queue of commands, and the waker of the thread that waits in its event loop.
#[derive(Debug)]
pub(in crate::ingest) struct Inbox {
    pub(in crate::ingest) commands: ArrayQueue<Command>,
    pub(in crate::ingest) waker: Waker,
}

/// The blocks that a reset drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResetScope {
    /// All blocks, although the engine still holds them.
    Everything,
    /// The blocks in device memory: the engine's cache was cleared, and the engine publishes that only with its next
    /// step.
    ClearedDevice,
}

/// A worker to be added to a shard.
#[derive(Clone, Debug)]
pub(crate) struct AddWorker {
    /// Its record. The thread gives it a slot and puts it into the fleet's table.
    pub(crate) record: WorkerRecord,
    /// The most blocks that the index binds for it.
    pub(crate) blocks_max: u64,
    /// Where its events come from, if it publishes any. The thread fills in the slot.
    pub(crate) publisher: Option<PublisherPlan>,
    /// A load that comes before any of its messages. It is dropped where the worker's events cannot be received.
    pub(crate) load: Option<FirstLoad>,
}

/// The answer to a command that added or updated a worker.
#[derive(Debug, Default)]
pub struct WorkerAccepted {
    /// Why the worker's events cannot be received. Its trust then says `no_events`.
    pub no_events: Option<Error>,
}

/// Changes of a worker that stays in its shard.
#[derive(Clone, Debug)]
pub struct UpdateWorker {
    /// Its new record. Worker, index, shard, slot and space are as before. The thread decides the state of a worker
    /// that is not draining.
    pub record: WorkerRecord,
    /// The most blocks that the index binds for it.
    pub blocks_max: u64,
    /// Whether its events now come from another source. If the new source can replay, the first replay shows whether
    /// the new stream goes on where the old one ended. If nothing shows that, the worker is emptied.
    pub resubscribe: bool,
}

/// A worker that has been taken out of the fleet's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemoveWorker {
    /// Its index in the fleet's table.
    pub(crate) index: WorkerIndex,
    /// The space it served.
    pub(crate) space: SpaceId,
    /// Its slot in the index.
    pub(crate) slot: WorkerSlot,
    /// The first version of the table without it. The slot is used again once no reader has an older version.
    pub(crate) table_version: u64,
}

impl IngestHandle {
    /// Asks for a dump of all blocks of a worker, which is served meanwhile. Take the parts soon: the worker's own
    /// events wait until the dump has ended.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] if too many commands wait. Any other failure is the last part of the dump.
    pub fn dump(&self, worker: Worker) -> Result<Receiver<DumpPart>> {
        let (sending, parts) = Sending::new();
        self.send(Command::Dump(worker, Box::new(sending)))?;
        Ok(parts)
    }

    /// Loads a dump into a worker, in place of everything that it holds. Ask for the dump of a busy worker only once
    /// the first answer is there: an older dump may lack batches that were applied meanwhile.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] if too many commands wait.
    pub fn load(&self, worker: Worker, parts: Receiver<DumpPart>) -> Result<Receiver<LoadAnswer>> {
        let (loading, answers) = Loading::new(parts);
        self.send(Command::Load(worker, Box::new(loading)))?;
        Ok(answers)
    }

    /// As [`IngestHandle::load`], for an engine's own snapshot. The worker changes only once the snapshot's first part
    /// joins the live stream, so send that part once the whole snapshot is there. [`DumpPart::Aborted`] before it says why
    /// there is none.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] if too many commands wait.
    pub fn load_engine_snapshot(&self, worker: Worker, parts: Receiver<DumpPart>) -> Result<Receiver<LoadAnswer>> {
        let (loading, answers) = Loading::new(parts);
        self.send(Command::Load(worker, Box::new(loading.of_engine())))?;
        Ok(answers)
    }

    /// Empties a worker, or every worker of the shard. A dump or load of such a worker is aborted.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] if too many commands wait.
    pub(crate) fn reset(&self, worker: Option<Worker>, scope: ResetScope) -> Result<()> {
        self.send(Command::Reset(worker, scope))
    }

    /// Adds a worker. If the shard has no room, the answer is an error and nothing is changed. A publisher that cannot
    /// be opened is not an error: see [`WorkerAccepted::no_events`].
    ///
    /// # Errors
    /// [`Kind::Overloaded`] if too many commands wait.
    pub(crate) fn add_worker(&self, worker: AddWorker) -> Result<oneshot::Receiver<Result<WorkerAccepted>>> {
        let (answer, answered) = oneshot::channel();
        self.send(Command::AddWorker(Box::new(worker), answer))?;
        Ok(answered)
    }

    /// Changes a worker's record.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] if too many commands wait.
    pub fn update_worker(&self, update: UpdateWorker) -> Result<oneshot::Receiver<Result<WorkerAccepted>>> {
        let (answer, answered) = oneshot::channel();
        self.send(Command::UpdateWorker(Box::new(update), answer))?;
        Ok(answered)
    }

    /// Gives up all blocks of a removed worker. The answer comes once no reader can still see the worker in the index.
    ///
    /// # Errors
    /// As [`IngestHandle::add_worker`].
    pub(crate) fn remove_worker(&self, removal: RemoveWorker) -> Result<oneshot::Receiver<()>> {
        let (answer, answered) = oneshot::channel();
        self.send(Command::RemoveWorker(removal, answer))?;
        Ok(answered)
    }

    fn send(&self, command: Command) -> Result<()> {
        self.inbox.commands.push(command).map_err(|_| {
            Error::new(Kind::Overloaded, "too many commands wait for an ingest thread", "ask again later")
        })?;
        self.inbox.waker.wake().map_err(|error| system("cannot wake an ingest thread").caused_by(error))
    }
}

/// Removals that wait until no reader can meet the worker.
pub(super) type Removals = Vec<(RemoveWorker, oneshot::Sender<()>)>;

impl Shard {
    /// Handles all commands that wait; `true` = the thread is to end.
    pub(super) fn handle_commands(&mut self) -> bool {
        while let Some(command) = self.inbox.commands.pop() {
            if matches!(command, Command::Stop) {
                return true;
            }
            self.handle_command(command);
        }
        false
    }

    fn handle_command(&mut self, command: Command) {
        match command {
            // `handle_commands` has ended the loop.
            Command::Stop => {}
            Command::Dump(worker, sending) => self.queue_transfer(worker, Transfer::Dump(*sending)),
            Command::Load(worker, loading) => self.queue_transfer(worker, Transfer::Load(*loading)),
            Command::Reset(worker, scope) => self.reset(worker, scope),
            Command::AddWorker(worker, answer) => {
                self.pending_answer = Some((worker.record.index, true, answer));
                let outcome = self.add_worker(*worker);
                self.answer(outcome);
            }
            Command::UpdateWorker(update, answer) => {
                self.pending_answer = Some((update.record.index, false, answer));
                let outcome = self.update_worker(*update, self.clock.now());
                self.answer(outcome);
            }
            Command::RemoveWorker(removal, answer) => {
                // First: the worker has left, whatever becomes of the rest.
                self.removals.push((removal, answer));
                self.remove_worker(removal.index, self.clock.now());
            }
        }
    }

    fn answer(&mut self, outcome: Result<WorkerAccepted>) {
        if let Some((_, _, answer)) = self.pending_answer.take() {
            // The caller may have gone; the command is carried out all the same.
            let _ = answer.send(outcome);
        }
    }

    /// Empties a worker, or all.
    fn reset(&mut self, worker: Option<Worker>, scope: ResetScope) {
        let now = self.clock.now();
        self.transfers.refuse_queued_loads(worker);
        let is_meant = |publisher: &&mut PublisherState| worker.is_none_or(|worker| worker == publisher.stream.worker);
        for publisher in self.publishers.iter_mut().filter(is_meant) {
            let space = &mut self.spaces[publisher.space];
            match scope {
                ResetScope::Everything => publisher.stream.reset(space, now),
                ResetScope::ClearedDevice => publisher.stream.device_cleared(space, now),
            }
        }
        for at in 0..self.publishers.len() {
            if !self.transfers.is_loading(self.publishers[at].stream.worker) {
                self.resume_messages(at);
            }
        }
    }

    /// Gives a worker a slot, then its record, then its sockets: a change of its connection needs the record.
    fn add_worker(&mut self, worker: AddWorker) -> Result<WorkerAccepted> {
        let AddWorker { mut record, blocks_max, publisher, load } = worker;
        let space = self.space_of(record.space)?;
        let slot = self.spaces[space].writer.add_worker().ok_or_else(|| {
            let remedy = "remove workers, raise ingest.shards, or run a second daemon";
            Error::new(Kind::Overloaded, format!("worker {} does not fit shard {}", record.worker, self.id), remedy)
        })?;
        self.spaces[space].writer.bound_worker(slot, blocks_max);
        record.slot = slot;
        self.fleet.update(|table| {
            table.put(record);
            true
        });
        let Some(plan) = publisher else { return Ok(WorkerAccepted::default()) };
        let plan = PublisherPlan { slot, ..plan };
        self.spaces[space].add_worker(&plan, self.config.shards);
        let at = self.publishers.len();
        self.plans.push(plan.clone());
        let no_events = self.open_publisher(&plan, None).err();
        if no_events.is_some() {
            self.plans.retain(|other| other.index != plan.index);
        }
        if let (Some(load), None) = (load, &no_events) {
            self.publishers[at].waits_for_load = true;
            self.queue_load(load);
        }
        Ok(WorkerAccepted { no_events })
    }

    /// Gives a worker another record, and other sockets if its events come from elsewhere.
    fn update_worker(&mut self, update: UpdateWorker, now: Now) -> Result<WorkerAccepted> {
        let UpdateWorker { mut record, blocks_max, resubscribe } = update;
        let space = self.space_of(record.space)?;
        self.spaces[space].writer.bound_worker(record.slot, blocks_max);
        let is_open = self.publisher_of(record.index).is_some();
        if let Some(plan) = self.plans.iter_mut().find(|plan| plan.index == record.index) {
            plan.capacity_blocks = record.capacity_blocks;
            // A publisher that waits to be opened again is opened at its new source.
            if let Some(source) = record.events.as_ref().filter(|_| resubscribe && !is_open) {
                plan.source.clone_from(source);
            }
        }
        let mut no_events = None;
        if let Some(at) = self.publisher_of(record.index) {
            self.publishers[at].stream.set_capacity(record.capacity_blocks);
            if let Some(source) = record.events.as_ref().filter(|_| resubscribe) {
                no_events = self.resubscribe(at, source, now).err();
            }
        }
        // A publisher whose sockets could not be opened is no longer in the list.
        if let Some(at) = self.publisher_of(record.index) {
            record.state = match (record.state, self.publishers[at].link) {
                (WorkerState::Draining, _) => WorkerState::Draining,
                (_, Link::Up) => WorkerState::Ready,
                (_, Link::Down) => WorkerState::Down,
                (_, Link::Connecting { .. } | Link::Lost { .. }) => WorkerState::Joining,
            };
        }
        self.fleet.update(|table| match table.worker_mut(record.index) {
            Some(known) => {
                *known = record;
                true
            }
            None => false,
        });
        Ok(WorkerAccepted { no_events })
    }

    /// Subscribes to another publisher for the same worker.
    fn resubscribe(&mut self, at: usize, source: &EventSource, now: Now) -> Result<()> {
        self.current_worker = Some(self.publishers[at].index);
        let opened = self.subscribe((self.publishers[at].stream.worker, source), at, now);
        let publisher = &mut self.publishers[at];
        publisher.change_source(source, &mut self.spaces[publisher.space], &mut self.scratch, now);
        self.close_replay(at);
        let publisher = &mut self.publishers[at];
        match opened {
            Ok(subscription) => {
                self.panics.forgive(publisher.index);
                if let Some(plan) = self.plans.iter_mut().find(|plan| plan.index == publisher.index) {
                    plan.source.clone_from(source);
                }
                publisher.subscription = subscription;
                publisher.endpoint.clone_from(&source.endpoint);
                publisher.link = Link::new(now.uptime_ms);
                publisher.unopened_logged = false;
                self.enqueue(at);
                Ok(())
            }
            Err(error) => {
                let trust = Arc::clone(&publisher.stream.view.trust);
                self.drop_publisher(at, now);
                let reasons = [TrustReason::NoEvents].into_iter().collect();
                trust.store(Trust { level: TrustLevel::None, reasons, ..trust.load() });
                Err(error)
            }
        }
    }

    /// Closes the sockets of a worker, if it has any.
    fn remove_worker(&mut self, index: WorkerIndex, now: Now) {
        self.plans.retain(|plan| plan.index != index);
        self.panics.forgive(index);
        if let Some(at) = self.publisher_of(index) {
            self.drop_publisher(at, now);
        }
    }

    /// Drops a publisher. The last one moves to its place, and its sockets are signalled under that number.
    fn drop_publisher(&mut self, at: usize, now: Now) {
        let mut publisher = self.publishers.swap_remove(at);
        self.plans.retain(|plan| plan.index != publisher.index);
        let space = &mut self.spaces[publisher.space];
        publisher.stream.break_hold(space, AbortReason::WorkerRemoved, now);
        publisher.stream.end(TrustInput::Disconnected, now);
        self.transfers.refuse_all_of(publisher.stream.worker);
        space.slots.retain(|slot| *slot != publisher.stream.slot);
        // If it had a replay, there is a free slot for another.
        self.replays.open -= usize::from(publisher.replay.is_some());
        self.replays.check = true;
        let last = self.publishers.len();
        self.ready.retain(|queued| *queued != at);
        self.ready.iter_mut().filter(|queued| **queued == last).for_each(|queued| *queued = at);
        if at == last {
            return;
        }
        let publisher = &mut self.publishers[at];
        let moved = publisher
            .subscription
            .set_token(Token(at))
            .and_then(|()| publisher.replay.as_mut().map_or(Ok(()), |replay| replay.client.set_token(Token(at))));
        if let Err(error) = moved {
            tracing::error!(worker = %publisher.stream.worker, %error, "cannot wait for the publisher's connection");
            publisher.fail(&mut self.spaces[publisher.space], &mut self.scratch, now);
        }
        self.enqueue(at);
    }

    /// Frees the slots of removed workers that no reader can meet any more.
    pub(super) fn free_removed_slots(&mut self) {
        if self.removals.is_empty() {
            return;
        }
        let in_use = self.fleet.oldest_in_use();
        let (free, removals): (Removals, Removals) =
            std::mem::take(&mut self.removals).into_iter().partition(|(removal, _)| removal.table_version <= in_use);
        self.removals = removals;
        for (removal, answer) in free {
            if let Ok(space) = self.space_of(removal.space) {
                self.spaces[space].slots.retain(|slot| *slot != removal.slot);
                self.spaces[space].writer.remove_worker(removal.slot);
                self.spaces[space].writer.publish();
                self.spaces[space].unswept = true;
            }
            // The caller may have gone.
            let _ = answer.send(());
        }
    }

    fn publisher_of(&self, index: WorkerIndex) -> Option<usize> {
        self.publishers.iter().position(|publisher| publisher.index == index)
    }

    pub(super) fn space_of(&self, id: SpaceId) -> Result<usize> {
        self.spaces
            .iter()
            .position(|space| space.id == id)
            .ok_or_else(|| Error::new(Kind::Internal, format!("shard {} has no writer for space {id}", self.id), ""))
    }
}
