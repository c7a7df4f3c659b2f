//! The commands that an ingest thread handles: what they are, how another thread sends them, and what each does.
//!
//! | command | sent by | handled by |
//! |---|---|---|
//! | end | [`IngestHandle::stop`] | [`Shard::handle_commands`] |
//! | dump a worker, or load one | [`IngestHandle::dump`], [`IngestHandle::load`] | `transfers` |
//! | empty a worker, or all | [`IngestHandle::reset`] | [`Shard::reset`] |
//! | add, change or remove a worker | [`IngestHandle::admit`], [`IngestHandle::amend`], [`IngestHandle::depart`] | [`Shard::call_roll`] |
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
    Roll(Box<Roll>),
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
pub struct Admission {
    /// Its record; the thread gives it a slot and puts it into the fleet's table.
    pub record: WorkerRecord,
    /// Blocks bound for it at most.
    pub blocks_max: u64,
    /// Where its events come from, if it publishes any; the slot is the thread's to give.
    pub publisher: Option<Publisher>,
    /// What it is loaded with before any of its messages; dropped where its events cannot be received.
    pub load: Option<FirstLoad>,
}

/// What came of an [`Admission`] or an [`Amendment`].
#[derive(Debug, Default)]
pub struct Admitted {
    /// Why its events cannot be received. Its trust says `no_events`.
    pub unheard: Option<Error>,
}

/// What changes of a worker that stays.
#[derive(Clone, Debug)]
pub struct Amendment {
    /// Its record from now on: worker, index, shard, slot and space are as before. The thread decides the
    /// state of a worker that is not draining.
    pub record: WorkerRecord,
    /// Blocks bound for it at most.
    pub blocks_max: u64,
    /// Whether its events come from elsewhere now. Where they can be replayed there, the first replay shows whether
    /// they go on where the others ended; where that is not shown the worker is emptied.
    pub restream: bool,
}

/// A worker that has been taken out of the fleet's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departure {
    /// Which worker it was.
    pub index: WorkerIndex,
    /// The space it served.
    pub space: SpaceId,
    /// What the index calls it.
    pub slot: WorkerSlot,
    /// The first version of the table without it. The slot is used again once no reader has an older one.
    pub gone_since: u64,
}

/// A command and where its answer goes.
#[derive(Debug)]
pub(in crate::ingest) enum Roll {
    Admit(Admission, oneshot::Sender<Result<Admitted>>),
    Amend(Amendment, oneshot::Sender<Result<Admitted>>),
    Depart(Departure, oneshot::Sender<()>),
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
    pub fn admit(&self, admission: Admission) -> Result<oneshot::Receiver<Result<Admitted>>> {
        let (answer, answered) = oneshot::channel();
        self.command(Command::Roll(Box::new(Roll::Admit(admission, answer))))?;
        Ok(answered)
    }

    /// Asks for a worker's record to be changed.
    ///
    /// # Errors
    /// As [`IngestHandle::admit`].
    pub fn amend(&self, amendment: Amendment) -> Result<oneshot::Receiver<Result<Admitted>>> {
        let (answer, answered) = oneshot::channel();
        self.command(Command::Roll(Box::new(Roll::Amend(amendment, answer))))?;
        Ok(answered)
    }

    /// Asks for everything of a worker that has left to be given up. The answer comes when nobody can meet it in
    /// the index any more.
    ///
    /// # Errors
    /// As [`IngestHandle::admit`].
    pub fn depart(&self, departure: Departure) -> Result<oneshot::Receiver<()>> {
        let (answer, answered) = oneshot::channel();
        self.command(Command::Roll(Box::new(Roll::Depart(departure, answer))))?;
        Ok(answered)
    }
}

/// Departures that wait until no reader can meet the worker.
pub(super) type Leaving = Vec<(Departure, oneshot::Sender<()>)>;

impl Shard {
    /// Takes what other threads ask for; `true` = to end.
    pub(super) fn obey(&mut self) -> bool {
        while let Some(command) = self.inbox.commands.pop() {
            match command {
                Command::Stop => return true,
                Command::Dump(worker, sending) => self.accept(worker, Transfer::Dump(*sending)),
                Command::Roll(roll) => self.call_roll(*roll, self.clock.now()),
                Command::Load(worker, loading) => self.accept(worker, Transfer::Load(*loading)),
                Command::Reset(worker, scope) => self.reset(worker, scope),
            }
        }
        false
    }

    /// Empties a worker, or all.
    fn reset(&mut self, worker: Option<Worker>, scope: ResetScope) {
        let now = self.clock.now();
        self.transfers.give_up_loads(worker);
        let asked = |member: &&mut super::Member| worker.is_none_or(|worker| worker == member.stream.worker);
        for member in self.members.iter_mut().filter(asked) {
            let home = &mut self.homes[member.home];
            match scope {
                ResetScope::Everything => member.stream.reset(home, now),
                ResetScope::ClearedDevice => member.stream.device_cleared(home, now),
            }
        }
        for at in 0..self.members.len() {
            if !self.transfers.is_loading(self.members[at].stream.worker) {
                self.listen(at);
            }
        }
    }

    pub(super) fn call_roll(&mut self, roll: Roll, now: Now) {
        // Whoever asked may have gone: what was asked for is done all the same.
        match roll {
            Roll::Admit(admission, answer) => {
                self.answering = Some((admission.record.index, true, answer));
                let done = self.come(admission);
                self.answer(done);
            }
            Roll::Amend(amendment, answer) => {
                self.answering = Some((amendment.record.index, false, answer));
                let done = self.change(amendment, now);
                self.answer(done);
            }
            Roll::Depart(departure, answer) => {
                // First: whatever becomes of the rest, the worker has left.
                self.leaving.push((departure, answer));
                self.go(departure.index, now);
            }
        }
    }

    fn answer(&mut self, done: Result<Admitted>) {
        if let Some((_, _, answer)) = self.answering.take() {
            // Whoever asked may have gone.
            let _ = answer.send(done);
        }
    }

    /// Takes a worker in: a slot, then its record, then its sockets, so that what becomes of its connection has a
    /// record to be told to.
    fn come(&mut self, admission: Admission) -> Result<Admitted> {
        let Admission { mut record, blocks_max, publisher, load } = admission;
        let home = self.home_of(record.space)?;
        let slot = self.homes[home].writer.add_worker().ok_or_else(|| {
            let remedy = "remove workers, raise ingest.shards, or run a second daemon";
            Error::new(Kind::Overloaded, format!("worker {} does not fit shard {}", record.worker, self.id), remedy)
        })?;
        self.homes[home].writer.bound_worker(slot, blocks_max);
        record.slot = slot;
        self.fleet.update(|table| {
            table.put(record);
            true
        });
        let Some(publisher) = publisher else { return Ok(Admitted::default()) };
        let publisher = Publisher { slot, ..publisher };
        self.homes[home].take_in(&publisher, self.config.shards);
        let at = self.members.len();
        self.plans.push(publisher.clone());
        let unheard = self.admit(&publisher, None).err();
        if unheard.is_some() {
            self.plans.retain(|other| other.index != publisher.index);
        }
        if let (Some(load), None) = (load, &unheard) {
            self.members[at].loads_first = true;
            self.wait_for_load(load);
        }
        Ok(Admitted { unheard })
    }

    /// Gives a worker another record, and other sockets if its events come from elsewhere.
    fn change(&mut self, amendment: Amendment, now: Now) -> Result<Admitted> {
        let Amendment { mut record, blocks_max, restream } = amendment;
        let home = self.home_of(record.space)?;
        self.homes[home].writer.bound_worker(record.slot, blocks_max);
        let is_open = self.member_of(record.index).is_some();
        if let Some(plan) = self.plans.iter_mut().find(|plan| plan.index == record.index) {
            plan.capacity_blocks = record.capacity_blocks;
            // One that waits to be opened again is opened where it is now.
            if let Some(source) = record.events.as_ref().filter(|_| restream && !is_open) {
                plan.source.clone_from(source);
            }
        }
        let mut unheard = None;
        if let Some(at) = self.member_of(record.index) {
            self.members[at].stream.set_capacity(record.capacity_blocks);
            if let Some(source) = record.events.as_ref().filter(|_| restream) {
                unheard = self.restream(at, source, now).err();
            }
        }
        // One whose sockets could not be opened is a member no more.
        if let Some(at) = self.member_of(record.index) {
            record.state = match (record.state, self.members[at].link) {
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
        Ok(Admitted { unheard })
    }

    /// Subscribes to another publisher for the same worker.
    fn restream(&mut self, at: usize, source: &EventSource, now: Now) -> Result<()> {
        self.hand = Some(self.members[at].index);
        let opened = self.subscribe(source, at, now);
        let member = &mut self.members[at];
        member.redirect(source.replay.as_ref(), &mut self.homes[member.home], &mut self.scratch, now);
        self.close_replay(at);
        let member = &mut self.members[at];
        match opened {
            Ok(subscription) => {
                self.panics.forgive(member.index);
                if let Some(plan) = self.plans.iter_mut().find(|plan| plan.index == member.index) {
                    plan.source.clone_from(source);
                }
                member.subscription = subscription;
                member.endpoint.clone_from(&source.endpoint);
                member.link = Link::new(now.uptime_ms);
                member.unopened_said = false;
                self.enqueue(at);
                Ok(())
            }
            Err(error) => {
                let trust = Arc::clone(&member.stream.view.trust);
                self.dismiss(at, now);
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
        if let Some(at) = self.member_of(index) {
            self.dismiss(at, now);
        }
    }

    /// Takes a member out. The last one moves to its place and is waited for under that number.
    fn dismiss(&mut self, at: usize, now: Now) {
        let mut member = self.members.swap_remove(at);
        self.plans.retain(|plan| plan.index != member.index);
        let home = &mut self.homes[member.home];
        member.stream.break_hold(home, AbortReason::WorkerRemoved, now);
        member.stream.end(TrustInput::Disconnected, now);
        self.transfers.refuse_of(member.stream.worker);
        home.slots.retain(|slot| *slot != member.stream.slot);
        // Its replay, if it had one, leaves a place.
        self.replays.open -= usize::from(member.replay.is_some());
        self.replays.look = true;
        let last = self.members.len();
        self.ready.retain(|queued| *queued != at);
        self.ready.iter_mut().filter(|queued| **queued == last).for_each(|queued| *queued = at);
        if at == last {
            return;
        }
        let member = &mut self.members[at];
        let moved = member.subscription.set_token(Token(at));
        let moved =
            moved.and_then(|()| member.replay.as_mut().map_or(Ok(()), |replay| replay.client.set_token(Token(at))));
        if let Err(error) = moved {
            tracing::error!(worker = %member.stream.worker, %error, "the publisher's connection cannot be waited for");
            member.fail(&mut self.homes[member.home], &mut self.scratch, now);
        }
        self.enqueue(at);
    }

    /// Gives up the slots of those that left whom no reader can meet any more.
    pub(super) fn see_off(&mut self) {
        if self.leaving.is_empty() {
            return;
        }
        let in_use = self.fleet.oldest_in_use();
        let (gone, leaving) =
            std::mem::take(&mut self.leaving).into_iter().partition(|(departure, _)| departure.gone_since <= in_use);
        self.leaving = leaving;
        let gone: Leaving = gone;
        for (departure, answer) in gone {
            if let Ok(home) = self.home_of(departure.space) {
                self.homes[home].slots.retain(|slot| *slot != departure.slot);
                self.homes[home].writer.remove_worker(departure.slot);
                self.homes[home].writer.publish();
                self.homes[home].unswept = true;
            }
            // Whoever asked may have gone.
            let _ = answer.send(());
        }
    }

    fn member_of(&self, index: WorkerIndex) -> Option<usize> {
        self.members.iter().position(|member| member.index == index)
    }

    fn home_of(&self, space: SpaceId) -> Result<usize> {
        self.homes
            .iter()
            .position(|home| home.space == space)
            .ok_or_else(|| Error::new(Kind::Internal, format!("shard {} has no writer for space {space}", self.id), ""))
    }
}
