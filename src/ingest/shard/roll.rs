//! Workers that come, change and go while the shard runs.

use std::sync::Arc;

use mio::Token;
use tokio::sync::oneshot;

use super::{Link, Member, Now, Shard, Subscription};
use crate::error::{Error, Kind, Result};
use crate::event::trust::TrustInput;
use crate::fleet::{EventSource, WorkerState};
use crate::ids::{SpaceId, WorkerIndex};
use crate::ingest::Publisher;
use crate::ingest::dump::AbortReason;
use crate::ingest::roll::{Admission, Admitted, Amendment, Departure, Roll};
use crate::ingest::stream::{Home, Stream};
use crate::trust::{Trust, TrustLevel, TrustReason};

/// Departures that wait until no reader can meet the worker.
pub(super) type Leaving = Vec<(Departure, oneshot::Sender<()>)>;

impl Shard {
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

    /// Opens a publisher's sockets and waits for them. Where that fails its worker's trust says so. Its trust begins with
    /// `input`.
    pub(super) fn admit(&mut self, publisher: &Publisher, input: Option<TrustInput>) -> Result<()> {
        let at = self.members.len();
        self.hand = Some(publisher.index);
        let now = self.clock.now();
        let home = self.home_of(publisher.space);
        let opened = home.and_then(|home| Ok((home, self.subscribe(&publisher.source, at, now)?)));
        let (home, subscription) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                Stream::new(publisher, now).end(TrustInput::NoEventSource, now);
                return Err(error);
            }
        };
        self.hand = None;
        let mut stream = Stream::begun_with(publisher, input, now);
        stream.share_held_bytes(&self.replays.held_bytes);
        self.members.push(Member {
            index: publisher.index,
            endpoint: publisher.source.endpoint.clone(),
            home,
            subscription,
            link: Link::new(now.uptime_ms),
            stream,
            unopened_said: false,
            broken: false,
            reconnected: false,
            replay_endpoint: publisher.source.replay.clone(),
            replay: None,
            replayed_bytes: None,
            loads: publisher.loads.clone(),
            loads_first: false,
            queued: false,
            turn_messages: 0,
        });
        self.enqueue(at);
        Ok(())
    }

    /// Starts to connect to a publisher, signalled under a member's number.
    fn subscribe(&self, source: &EventSource, at: usize, now: Now) -> Result<Subscription> {
        Subscription::open(source, self.config.receive_messages_max, (&self.registry, Token(at)), now.uptime_ms)
    }
}

impl Home {
    /// Counts one more worker in, which knows the space's scheme as they all do.
    pub(super) fn take_in(&mut self, publisher: &Publisher, shards: usize) {
        self.scheme = Arc::clone(&publisher.scheme);
        self.relearns = shards == 1 && !publisher.scheme_configured;
        self.slots.push(publisher.slot);
    }
}
