//! The commands that an ingest thread handles: what they are, how another thread sends them, and what each does.
//!
//! | command | sent by | handled by |
//! |---|---|---|
//! | end | [`IngestHandle::stop`] | [`Shard::handle_commands`] |
//! | dump a worker, or load one | [`IngestHandle::dump`], [`IngestHandle::load`] | `transfers` |
//! | empty a worker, or all | [`IngestHandle::reset`] | [`Shard::reset`] |
//! | add, change or remove a worker | [`IngestHandle::admit`], [`IngestHandle::amend`], [`IngestHandle::depart`] | [`Shard::handle_worker_command`] |
//!
//! A new command is a variant of [`Command`], a method of [`IngestHandle`] and an arm of [`Shard::handle_command`].

use std::sync::Arc;

use crossbeam::channel::Receiver;
use crossbeam::queue::ArrayQueue;
use mio::{Token, Waker};
use tokio::sync::oneshot;

use super::transfers::Transfer;
use super::{Link, Now, Shard};
use crate::error::{Error, Kind, Result};
use crate::event::trust::TrustInput;
use crate::fleet::{EventSource, WorkerRecord, WorkerState};
use crate::ids::{SpaceId, Worker, WorkerIndex, WorkerSlot};
use crate::ingest::dump::{AbortReason, DumpPart, FirstLoad, LoadAnswer, Loading, Sending};
use crate::ingest::handle::IngestHandle;
use crate::ingest::{Publisher, system};
use crate::trust::{Trust, TrustLevel, TrustReason};

/// What an ingest thread can be asked to do.
#[derive(Debug)]
pub(in crate::ingest) enum Command {
    /// Close every socket and end.
    Stop,
    /// Dump a worker.
    Dump(Worker, Box<Sending>),
    /// Take a worker in, change it, or let it go.
    WorkerCommand(Box<WorkerCommand>),
    /// Load a dump into a worker.
    Load(Worker, Box<Loading>),
    /// Empty a worker, or every worker.
    Reset(Option<Worker>, ResetScope),
}

/// What of a worker is forgotten because somebody asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetScope {
    /// Everything, although its engine still holds it.
    Everything,
    /// What its device held: the engine's cache was cleared, which the engine publishes with its next step only.
    ClearedDevice,
}

/// The way into a thread that waits in its event loop.
#[derive(Debug)]
pub(in crate::ingest) struct Inbox {
    pub(in crate::ingest) commands: ArrayQueue<Command>,
    pub(in crate::ingest) waker: Waker,
}

/// A worker that comes.
#[derive(Clone, Debug)]
pub struct AddWorker {
    /// Its record; the thread gives it a slot and puts it into the fleet's table.
    pub record: WorkerRecord,
    /// Blocks bound for it at most.
    pub blocks_max: u64,
    /// Where its events come from, if it publishes any; the slot is the thread's to give.
    pub publisher: Option<Publisher>,
    /// What it is loaded with before any of its messages; dropped where its events cannot be received.
    pub load: Option<FirstLoad>,
}

/// What came of an [`AddWorker`] or an [`UpdateWorker`].
#[derive(Debug, Default)]
pub struct WorkerAccepted {
    /// Why its events cannot be received. Its trust says `no_events`.
    pub no_events: Option<Error>,
}

/// What changes of a worker that stays.
#[derive(Clone, Debug)]
pub struct UpdateWorker {
    /// Its record from now on: worker, index, shard, slot and space are as before. The thread decides the
    /// state of a worker that is not draining.
    pub record: WorkerRecord,
    /// Blocks bound for it at most.
    pub blocks_max: u64,
    /// Whether its events come from elsewhere now. Where they can be replayed there, the first replay shows whether
    /// they go on where the others ended; where that is not shown the worker is emptied.
    pub resubscribe: bool,
}

/// A worker that has been taken out of the fleet's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoveWorker {
    /// Which worker it was.
    pub index: WorkerIndex,
    /// The space it served.
    pub space: SpaceId,
    /// What the index calls it.
    pub slot: WorkerSlot,
    /// The first version of the table without it. The slot is used again once no reader has an older one.
    pub table_version: u64,
}

/// A command and where its answer goes.
#[derive(Debug)]
pub(in crate::ingest) enum WorkerCommand {
    Admit(AddWorker, oneshot::Sender<Result<WorkerAccepted>>),
    Amend(UpdateWorker, oneshot::Sender<Result<WorkerAccepted>>),
    Depart(RemoveWorker, oneshot::Sender<()>),
}

impl IngestHandle {
    /// Asks for everything that a worker holds, while it is served. The parts come as they are taken: whoever
    /// asked takes them soon, since the worker's own events wait meanwhile.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] where too many commands wait. What else is in the way is the dump's last part.
    pub fn dump(&self, worker: Worker) -> Result<Receiver<DumpPart>> {
        let (sending, parts) = Sending::new();
        self.command(Command::Dump(worker, Box::new(sending)))?;
        Ok(parts)
    }

    /// Puts a dump into a worker, in place of everything it holds. The dump of a busy worker is best asked for once
    /// the first answer is there: one that was taken before may be behind what was applied meanwhile.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] where too many commands wait.
    pub fn load(&self, worker: Worker, parts: Receiver<DumpPart>) -> Result<Receiver<LoadAnswer>> {
        let (loading, answers) = Loading::new(parts);
        self.command(Command::Load(worker, Box::new(loading)))?;
        Ok(answers)
    }

    /// Empties a worker, or every worker of the shard, in the thread's next turn; a dump or load of it is broken off.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] where too many commands wait.
    pub fn reset(&self, worker: Option<Worker>, scope: ResetScope) -> Result<()> {
        self.command(Command::Reset(worker, scope))
    }

    fn command(&self, command: Command) -> Result<()> {
        self.inbox.commands.push(command).map_err(|_| {
            Error::new(Kind::Overloaded, "too many commands wait for an ingest thread", "ask again later")
        })?;
        self.inbox.waker.wake().map_err(|error| system("cannot wake an ingest thread").caused_by(error))
    }

    /// Asks for a worker to be taken in. The answer is an error, and nothing is changed, where the shard has no
    /// room; a publisher that cannot be opened is none.
    ///
    /// # Errors
    /// [`Kind::Overloaded`](crate::error::Kind::Overloaded) where too many commands wait.
    pub fn admit(&self, admission: AddWorker) -> Result<oneshot::Receiver<Result<WorkerAccepted>>> {
        let (answer, answered) = oneshot::channel();
        self.command(Command::WorkerCommand(Box::new(WorkerCommand::Admit(admission, answer))))?;
        Ok(answered)
    }

    /// Asks for a worker's record to be changed.
    ///
    /// # Errors
    /// As [`IngestHandle::admit`].
    pub fn amend(&self, amendment: UpdateWorker) -> Result<oneshot::Receiver<Result<WorkerAccepted>>> {
        let (answer, answered) = oneshot::channel();
        self.command(Command::WorkerCommand(Box::new(WorkerCommand::Amend(amendment, answer))))?;
        Ok(answered)
    }

    /// Asks for everything of a worker that has left to be given up. The answer comes when nobody can meet it in
    /// the index any more.
    ///
    /// # Errors
    /// As [`IngestHandle::admit`].
    pub fn depart(&self, departure: RemoveWorker) -> Result<oneshot::Receiver<()>> {
        let (answer, answered) = oneshot::channel();
        self.command(Command::WorkerCommand(Box::new(WorkerCommand::Depart(departure, answer))))?;
        Ok(answered)
    }
}

/// Departures that wait until no reader can meet the worker.
pub(super) type Removals = Vec<(RemoveWorker, oneshot::Sender<()>)>;

impl Shard {
    /// Takes what other threads ask for; `true` = to end.
    pub(super) fn handle_commands(&mut self) -> bool {
        while let Some(command) = self.inbox.commands.pop() {
            match command {
                Command::Stop => return true,
                Command::Dump(worker, sending) => self.accept(worker, Transfer::Dump(*sending)),
                Command::WorkerCommand(roll) => self.handle_worker_command(*roll, self.clock.now()),
                Command::Load(worker, loading) => self.accept(worker, Transfer::Load(*loading)),
                Command::Reset(worker, scope) => self.reset(worker, scope),
            }
        }
        false
    }

    /// Empties a worker, or all.
    fn reset(&mut self, worker: Option<Worker>, scope: ResetScope) {
        let now = self.clock.now();
        self.transfers.refuse_queued_loads(worker);
        let asked = |publisher: &&mut super::PublisherState| worker.is_none_or(|worker| worker == publisher.stream.worker);
        for publisher in self.publishers.iter_mut().filter(asked) {
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

    pub(super) fn handle_worker_command(&mut self, roll: WorkerCommand, now: Now) {
        // Whoever asked may have gone: what was asked for is done all the same.
        match roll {
            WorkerCommand::Admit(admission, answer) => {
                self.pending_answer = Some((admission.record.index, true, answer));
                let done = self.come(admission);
                self.answer(done);
            }
            WorkerCommand::Amend(amendment, answer) => {
                self.pending_answer = Some((amendment.record.index, false, answer));
                let done = self.change(amendment, now);
                self.answer(done);
            }
            WorkerCommand::Depart(departure, answer) => {
                // First: whatever becomes of the rest, the worker has left.
                self.leaving.push((departure, answer));
                self.go(departure.index, now);
            }
        }
    }

    fn answer(&mut self, done: Result<WorkerAccepted>) {
        if let Some((_, _, answer)) = self.pending_answer.take() {
            // Whoever asked may have gone.
            let _ = answer.send(done);
        }
    }

    /// Takes a worker in: a slot, then its record, then its sockets, so that what becomes of its connection has a
    /// record to be told to.
    fn come(&mut self, admission: AddWorker) -> Result<WorkerAccepted> {
        let AddWorker { mut record, blocks_max, publisher, load } = admission;
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
        let Some(publisher) = publisher else { return Ok(WorkerAccepted::default()) };
        let publisher = Publisher { slot, ..publisher };
        self.spaces[space].take_in(&publisher, self.config.shards);
        let at = self.publishers.len();
        self.plans.push(publisher.clone());
        let no_events = self.admit(&publisher, None).err();
        if no_events.is_some() {
            self.plans.retain(|other| other.index != publisher.index);
        }
        if let (Some(load), None) = (load, &no_events) {
            self.publishers[at].waits_for_load = true;
            self.queue_load(load);
        }
        Ok(WorkerAccepted { no_events })
    }

    /// Gives a worker another record, and other sockets if its events come from elsewhere.
    fn change(&mut self, amendment: UpdateWorker, now: Now) -> Result<WorkerAccepted> {
        let UpdateWorker { mut record, blocks_max, resubscribe } = amendment;
        let space = self.space_of(record.space)?;
        self.spaces[space].writer.bound_worker(record.slot, blocks_max);
        let is_open = self.publisher_of(record.index).is_some();
        if let Some(plan) = self.plans.iter_mut().find(|plan| plan.index == record.index) {
            plan.capacity_blocks = record.capacity_blocks;
            // One that waits to be opened again is opened where it is now.
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
        // One whose sockets could not be opened is a publisher no more.
        if let Some(at) = self.publisher_of(record.index) {
            record.state = match (record.state, self.publishers[at].link) {
                (WorkerState::Draining, _) => WorkerState::Draining,
                (_, Link::Up) => WorkerState::Ready,
                (_, Link::Down) => WorkerState::Down,
                (_, Link::Connecting { .. } | Link::Lost { .. }) => WorkerState::Joining,
            };
        }
        self.fleet.update(|table| match table.worker_mut(record.index) {
            Some(held) => {
                *held = record;
                true
            }
            None => false,
        });
        Ok(WorkerAccepted { no_events })
    }

    /// Subscribes to another publisher for the same worker.
    fn resubscribe(&mut self, at: usize, source: &EventSource, now: Now) -> Result<()> {
        self.current_worker = Some(self.publishers[at].index);
        let opened = self.subscribe(source, at, now);
        let publisher = &mut self.publishers[at];
        publisher.redirect(source.replay.as_ref(), &mut self.spaces[publisher.space], &mut self.scratch, now);
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
    fn go(&mut self, index: WorkerIndex, now: Now) {
        self.plans.retain(|plan| plan.index != index);
        self.panics.forgive(index);
        if let Some(at) = self.publisher_of(index) {
            self.drop_publisher(at, now);
        }
    }

    /// Takes a publisher out. The last one moves to its place and is waited for under that number.
    fn drop_publisher(&mut self, at: usize, now: Now) {
        let mut publisher = self.publishers.swap_remove(at);
        self.plans.retain(|plan| plan.index != publisher.index);
        let space = &mut self.spaces[publisher.space];
        publisher.stream.break_hold(space, AbortReason::WorkerRemoved, now);
        publisher.stream.end(TrustInput::Disconnected, now);
        self.transfers.refuse_all_of(publisher.stream.worker);
        space.slots.retain(|slot| *slot != publisher.stream.slot);
        // Its replay, if it had one, leaves a place.
        self.replays.open -= usize::from(publisher.replay.is_some());
        self.replays.look = true;
        let last = self.publishers.len();
        self.ready.retain(|queued| *queued != at);
        self.ready.iter_mut().filter(|queued| **queued == last).for_each(|queued| *queued = at);
        if at == last {
            return;
        }
        let publisher = &mut self.publishers[at];
        let moved = publisher.subscription.set_token(Token(at));
        let moved =
            moved.and_then(|()| publisher.replay.as_mut().map_or(Ok(()), |replay| replay.client.set_token(Token(at))));
        if let Err(error) = moved {
            tracing::error!(worker = %publisher.stream.worker, %error, "the publisher's connection cannot be waited for");
            publisher.fail(&mut self.spaces[publisher.space], &mut self.scratch, now);
        }
        self.enqueue(at);
    }

    /// Gives up the slots of those that left whom no reader can meet any more.
    pub(super) fn free_removed_slots(&mut self) {
        if self.leaving.is_empty() {
            return;
        }
        let in_use = self.fleet.oldest_in_use();
        let (gone, leaving) =
            std::mem::take(&mut self.leaving).into_iter().partition(|(departure, _)| departure.table_version <= in_use);
        self.leaving = leaving;
        let gone: Removals = gone;
        for (departure, answer) in gone {
            if let Ok(space) = self.space_of(departure.space) {
                self.spaces[space].slots.retain(|slot| *slot != departure.slot);
                self.spaces[space].writer.remove_worker(departure.slot);
                self.spaces[space].writer.publish();
                self.spaces[space].unswept = true;
            }
            // Whoever asked may have gone.
            let _ = answer.send(());
        }
    }

    fn publisher_of(&self, index: WorkerIndex) -> Option<usize> {
        self.publishers.iter().position(|publisher| publisher.index == index)
    }

    fn space_of(&self, space: SpaceId) -> Result<usize> {
        self.spaces
            .iter()
            .position(|space| space.id == space)
            .ok_or_else(|| Error::new(Kind::Internal, format!("shard {} has no writer for space {space}", self.id), ""))
    }
}
