//! Where the requests of all cores wait that found every worker busy.
//!
//! Whoever makes room for a request decides it, on whichever core that is: the request is there with its body, so that
//! nothing happens between the room and who takes it. The reply goes by the mailbox of the core that has the
//! connection. A core that has nobody waiting pays one load when something ends.
//!
//! A request that begins to wait may just have been passed by what it waits for. So, sync point ROOM: who waits is put
//! into the queue first and looks at the workers' loads once more after; who changes a load changes it first and looks
//! whether anybody waits after. One of them sees the other.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::awaited::Awaited;
use super::late::{Booked, Late, LateBox};
use super::users::{UserPlace, Users};
use crate::error::{Error, Kind};
use crate::ids::{CorrelationId, SpaceId, WorkerIndex};
use crate::limits::{QUEUE_BYTES_MAX, QUEUE_SETS_MAX};
use crate::load::SessionId;
use crate::metrics::{CounterSet, Latency, QueueCounter};
use crate::queue::{Claim, Dequeued, Queue, QueueFull, QueueLimits, Requeued, Ticket};
use crate::shares::Scarce;
use crate::wire::ReplyEncoder;

/// A request that waits, with all that is needed to answer it from any core.
#[derive(Debug)]
pub(super) struct Parked {
    /// The core that has its connection.
    pub(super) core: usize,
    pub(super) connection: u64,
    pub(super) session: SessionId,
    pub(super) id: CorrelationId,
    /// The user whose process asked.
    pub(super) uid: u32,
    /// What it takes of what that user's requests may, from when it begins to wait.
    pub(super) places: Option<[UserPlace; 2]>,
    /// Which space it is a request of.
    pub(super) space: SpaceId,
    /// How long its prompt is.
    pub(super) prompt_tokens: u64,
    /// The body of its frame.
    pub(super) body: Box<[u8]>,
}

/// The requests of all cores that wait, and the way to those cores.
#[derive(Debug)]
pub struct WaitingRoom {
    started: Instant,
    bounds: QueueLimits,
    users: Arc<Users>,
    queue: Mutex<Queue<Parked>>,
    waiting: Awaited,
    cores: Box<[OnceLock<Arc<LateBox>>]>,
    /// Who is to be decided again whatever room there is, in order: the fleet has changed, and with it who may take them.
    reconsidered: Mutex<VecDeque<Ticket>>,
    /// Somebody is to be given up sooner than all before.
    ends_sooner: Notify,
    counters: CounterSet<QueueCounter>,
    /// In microseconds.
    waited: Latency,
}

impl WaitingRoom {
    /// A room for up to `requests_max` requests of `cores` cores, by a clock that began at `started`.
    #[must_use]
    pub fn new(cores: usize, requests_max: usize, started: Instant) -> Self {
        let bounds = QueueLimits {
            requests_max,
            bytes_max: QUEUE_BYTES_MAX,
            sets_max: QUEUE_SETS_MAX,
            user_sets_max: QUEUE_SETS_MAX,
        };
        Self {
            started,
            bounds,
            users: Arc::default(),
            queue: Mutex::new(Queue::new(bounds)),
            waiting: Awaited::default(),
            cores: (0..cores).map(|_| OnceLock::new()).collect(),
            reconsidered: Mutex::default(),
            ends_sooner: Notify::new(),
            counters: CounterSet::default(),
            waited: Latency::default(),
        }
    }

    /// The same with so much of it for each user as `users` say.
    #[must_use]
    pub fn shared_by(self, users: Arc<Users>) -> Self {
        let bounds = QueueLimits { user_sets_max: users.share_of(self.bounds.sets_max), ..self.bounds };
        Self { users, bounds, queue: Mutex::new(Queue::new(bounds)), ..self }
    }

    /// What is counted.
    #[must_use]
    pub const fn counters(&self) -> &CounterSet<QueueCounter> {
        &self.counters
    }

    /// How many wait now.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.count()
    }

    /// How many of a space wait now, and the tokens of their prompts. Looks at everybody who waits: for people.
    #[must_use]
    pub fn waiting_of(&self, space: SpaceId) -> (usize, u64) {
        let queue = self.queue.lock();
        let of_space = queue.iter().filter(|parked| parked.space == space);
        of_space.fold((0, 0), |(count, tokens), parked| (count + 1, tokens + parked.prompt_tokens))
    }

    /// How long those waited that were answered by a decision: the sum in seconds, and (upper bound in seconds, count) of each
    /// bucket.
    #[must_use]
    pub fn waited(&self) -> (f64, Vec<(f64, u64)>) {
        let (sum, buckets) = self.waited.read();
        (sum * 1e3, buckets.into_iter().map(|(bound, count)| (bound * 1e3, count)).collect())
    }

    /// Nanoseconds of the room's clock.
    pub(super) fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// A core serves from now on; its replies go into `late`.
    pub(super) fn open_core(&self, core: usize, late: &Arc<LateBox>) {
        if let Some(place) = self.cores.get(core)
            && place.set(Arc::clone(late)).is_err()
        {
            tracing::error!(core, "a core has begun twice; the requests of the second cannot wait");
        }
    }

    /// Whether somebody waits, asked by whoever has just changed a load.
    pub(super) fn is_awaited(&self) -> bool {
        self.waiting.is_any()
    }

    /// Something has ended that may give room, and no core serves who waits for it: bookings expired, or made way for a
    /// later attempt. A core is told, if anybody waits. Call it after the loads have changed.
    pub fn made_room(&self) {
        if self.is_awaited()
            && let Some(core) = self.first_core()
        {
            core.serve();
        }
    }

    fn first_core(&self) -> Option<&Arc<LateBox>> {
        self.cores.iter().find_map(OnceLock::get)
    }

    /// Does something with the queue, and lets everybody see how many wait after.
    fn with<R>(&self, act: impl FnOnce(&mut Queue<Parked>) -> R) -> R {
        let mut queue = self.queue.lock();
        let done = act(&mut queue);
        self.waiting.set(queue.len());
        done
    }

    /// Lets a request wait. The caller looks at the loads of `workers` once more.
    pub(super) fn park(&self, claim: &Claim, workers: &[WorkerIndex], mut parked: Parked) -> Result<Ticket, Error> {
        if self.cores.get(parked.core).is_none_or(|core| core.get().is_none()) {
            return Err(Error::new(
                Kind::Overloaded,
                "every worker is busy, and this core lets nobody wait",
                "ask again",
            ));
        }
        parked.places = self.places_for(parked.uid, claim.bytes);
        if parked.places.is_none() {
            return Err(self.refused_user(claim.bytes));
        }
        let now_ns = self.now_ns();
        let (pushed, ends_sooner, retry_after_ns) = self.with(|queue| {
            let ended_ns = queue.next_end_ns();
            let pushed = queue.push(now_ns, claim, workers, parked);
            (pushed, queue.next_end_ns() != ended_ns, queue.retry_after_ns())
        });
        if ends_sooner {
            self.ends_sooner.notify_one();
        }
        match pushed {
            Ok(ticket) => {
                self.counters.bump(QueueCounter::Queued);
                Ok(ticket)
            }
            Err((full, _)) => Err(self.refused(full, retry_after_ns)),
        }
    }

    /// Places for one more request of a user, of so many bytes.
    fn places_for(&self, uid: u32, bytes: usize) -> Option<[UserPlace; 2]> {
        let QueueLimits { requests_max, bytes_max, .. } = self.bounds;
        let request = self.users.take(uid, Scarce::WaitingRequests, 1, requests_max)?;
        Some([request, self.users.take(uid, Scarce::WaitingBytes, bytes, bytes_max)?])
    }

    /// As many requests of one user wait as may, or as many bytes of them that so many more are too many. Where that is all
    /// there is, it is not said of the user.
    fn refused_user(&self, bytes: usize) -> Error {
        let queue = self.queue.lock();
        let retry_after_ns = queue.retry_after_ns();
        if queue.len() >= self.bounds.requests_max {
            return self.refused(QueueFull::Requests, retry_after_ns);
        }
        if queue.bytes().saturating_add(bytes) > self.bounds.bytes_max {
            return self.refused(QueueFull::Bytes, retry_after_ns);
        }
        self.counters.bump(QueueCounter::RefusedUser);
        let what = "as many requests of this user wait, or as much of them, as serve.user_share_percent allows";
        queue_full(what, retry_after_ns)
    }

    fn refused(&self, full: QueueFull, retry_after_ns: u64) -> Error {
        let (counter, what) = match full {
            QueueFull::Closed => return draining(),
            QueueFull::Requests => (QueueCounter::RefusedRequests, "as many requests wait as may"),
            QueueFull::Bytes => (QueueCounter::RefusedMemory, "the requests that wait take as much memory as they may"),
            QueueFull::Sets => (QueueCounter::RefusedSets, "requests wait for too many different sets of workers"),
            QueueFull::UserSets => {
                let what = "requests of this user wait for as many different sets of workers as serve.user_share_percent allows";
                (QueueCounter::RefusedUser, what)
            }
        };
        self.counters.bump(counter);
        queue_full(what, retry_after_ns)
    }

    /// Takes the first request that finds room: with this worker, or with any of whom `has_room` says so.
    pub(super) fn next(
        self: &Arc<Self>,
        worker: Option<WorkerIndex>,
        has_room: impl FnMut(WorkerIndex) -> bool,
    ) -> Option<InHand> {
        let taken = self.with(|queue| match worker {
            Some(worker) => queue.next_for(worker),
            None => self.next_reconsidered(queue).or_else(|| queue.next_where(has_room)),
        })?;
        Some(InHand { room: Arc::clone(self), taken: Some(taken) })
    }

    /// Whether there are some who are to be decided again whatever room there is.
    pub(super) fn reconsiders(&self) -> bool {
        !self.reconsidered.lock().is_empty()
    }

    fn next_reconsidered(&self, queue: &mut Queue<Parked>) -> Option<Dequeued<Parked>> {
        let mut tickets = self.reconsidered.lock();
        while let Some(ticket) = tickets.pop_front() {
            if let Some(taken) = queue.take_back(ticket) {
                return Some(taken);
            }
        }
        None
    }

    /// Takes a request back that has just begun to wait, if nobody else has it.
    pub(super) fn take_back(self: &Arc<Self>, ticket: Ticket) -> Option<InHand> {
        let taken = self.with(|queue| queue.take_back(ticket))?;
        Some(InHand { room: Arc::clone(self), taken: Some(taken) })
    }

    /// Nobody wants to know any more.
    pub(super) fn cancel(&self, ticket: Ticket) {
        if self.with(|queue| queue.cancel(ticket)).is_some() {
            self.counters.bump(QueueCounter::Cancelled);
        }
    }

    /// Nobody waits any more: who does is told that the daemon drains.
    pub(super) fn drain(&self) {
        let waited = self.with(Queue::drain);
        self.counters.add(QueueCounter::Drained, waited.len() as u64);
        for (ticket, parked) in waited {
            self.refuse(ticket, &parked, &draining());
        }
    }

    fn refuse(&self, ticket: Ticket, parked: &Parked, error: &Error) {
        let mut frame = Vec::new();
        ReplyEncoder::default().error(parked.id, error, &mut frame);
        self.reply(ticket, parked, frame, Booked::default());
    }

    fn reply(&self, ticket: Ticket, parked: &Parked, frame: Vec<u8>, booked: Booked) {
        // It is there: nobody is let in of a core that is not.
        if let Some(core) = self.cores.get(parked.core).and_then(OnceLock::get) {
            core.put(Late::Reply { connection: parked.connection, ticket, frame, session: parked.session, booked });
        }
    }

    /// Gives up, for ever, who has waited for too long, and lets a core look once in `recheck_ms` whether somebody who
    /// waits finds room that nobody told of: back-offs end, and prefills are reckoned done.
    /// When `fleet_version` has moved, everybody who waits is decided again.
    pub async fn tend(&self, recheck_ms: u64, fleet_version: impl Fn() -> u64) {
        let mut version_seen = fleet_version();
        loop {
            let next_end_ns = self.queue.lock().next_end_ns();
            let sooner = self.ends_sooner.notified();
            match next_end_ns {
                None => sooner.await,
                Some(end_ns) => {
                    let until_end = Duration::from_nanos(end_ns.saturating_sub(self.now_ns()));
                    let rest = until_end.min(Duration::from_millis(recheck_ms));
                    // Whether it came is seen by looking.
                    drop(tokio::time::timeout(rest, sooner).await);
                }
            }
            self.give_up();
            let version = fleet_version();
            if std::mem::replace(&mut version_seen, version) != version {
                let waiting = self.queue.lock().tickets();
                *self.reconsidered.lock() = waiting.into();
            }
            if self.waiting() > 0
                && let Some(core) = self.first_core()
            {
                core.look();
            }
        }
    }

    fn give_up(&self) {
        let now_ns = self.now_ns();
        while let Some(taken) = self.with(|queue| queue.next_expired(now_ns)) {
            self.counters.bump(QueueCounter::Expired);
            let waited_ms = now_ns.saturating_sub(taken.since_ns) / 1_000_000;
            let error = Error::new(
                Kind::DeadlinePassed,
                format!("every worker was busy for {waited_ms} ms"),
                "ask again, with a later deadline_us, or add workers",
            );
            self.refuse(taken.ticket, &taken.what, &error);
        }
    }
}

fn queue_full(what: &str, retry_after_ns: u64) -> Error {
    let remedy = "ask again after retry_after_us, add workers, or raise policy.queue_requests_max";
    Error::new(Kind::QueueFull, format!("every worker is busy, and {what}"), remedy)
        .retry_after_us((retry_after_ns / 1000) as u32)
}

fn draining() -> Error {
    Error::new(
        Kind::Draining,
        "the daemon drains, and every worker is busy",
        "ask another daemon, or this one again once it has restarted",
    )
}

/// A request that is being served. If it is dropped unanswered, whoever served it panicked, and its gateway is told.
pub(super) struct InHand {
    room: Arc<WaitingRoom>,
    taken: Option<Dequeued<Parked>>,
}

/// Whether the one who asked still wants to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answered {
    /// The reply is on its way.
    Sent,
    /// Its connection has gone: what was booked is to be undone.
    Unwanted,
}

impl InHand {
    /// What is to be served.
    pub(super) fn parked(&self) -> Option<&Parked> {
        self.taken.as_ref().map(|taken| &taken.what)
    }

    /// Answers it. `booked` is what its decision booked.
    pub(super) fn answer(mut self, frame: Vec<u8>, booked: Booked) -> Answered {
        let Some(taken) = self.taken.take() else { return Answered::Unwanted };
        let now_ns = self.room.now_ns();
        if self.room.with(|queue| queue.finish(taken.ticket, now_ns)) {
            self.room.counters.bump(QueueCounter::Cancelled);
            return Answered::Unwanted;
        }
        self.room.counters.bump(QueueCounter::Woken);
        self.room.waited.record(now_ns.saturating_sub(taken.since_ns) / 1000);
        self.room.reply(taken.ticket, &taken.what, frame, booked);
        Answered::Sent
    }

    /// Everybody is busy again: it waits on, for one of `workers`. The caller looks at their loads once more, if this
    /// gives a ticket.
    pub(super) fn put_back(mut self, workers: &[WorkerIndex]) -> Option<Ticket> {
        let taken = self.taken.take()?;
        let ticket = taken.ticket;
        self.room.counters.bump(QueueCounter::PutBack);
        match self.room.with(|queue| queue.put_back(taken, workers)) {
            Requeued::Waits => {
                // It may end sooner than whoever gives up knows of.
                self.room.ends_sooner.notify_one();
                return Some(ticket);
            }
            Requeued::Cancelled(_) => self.room.counters.bump(QueueCounter::Cancelled),
            Requeued::Closed(parked) => {
                self.room.counters.bump(QueueCounter::Drained);
                self.room.refuse(ticket, &parked, &draining());
            }
        }
        None
    }
}

impl Drop for InHand {
    fn drop(&mut self) {
        let Some(taken) = self.taken.take() else { return };
        let now_ns = self.room.now_ns();
        if !self.room.with(|queue| queue.finish(taken.ticket, now_ns)) {
            let error =
                Error::new(Kind::Internal, "deciding the request failed", "report it with the log's last lines");
            self.room.refuse(taken.ticket, &taken.what, &error);
        }
    }
}
