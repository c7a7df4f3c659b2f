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

use crossbeam::queue::SegQueue;
use parking_lot::Mutex;
use rustc_hash::{FxHashMap, FxHashSet};
use tokio::sync::Notify;

use super::accept::{UserPlace, Users};
use super::connection::Peer;
use super::responder::RoutingResponder;
use super::service::{Routed, Service};
use super::wait_flag::{Awaited, Told};
use crate::error::{Error, Kind, Result};
use crate::ids::{CorrelationId, SpaceId, WorkerIndex};
use crate::limits::{QUEUE_BYTES_MAX, QUEUE_LOOKS_MAX, QUEUE_SERVED_PER_TURN_MAX, QUEUE_SETS_MAX, WORK_PER_TURN_MAX};
use crate::load::{BookingHandle, BookingRef, SessionId};
use crate::metrics::{CoreCounter, CounterSet, Latency, QueueCounter};
use crate::queue::{Claim, Dequeued, Queue, QueueFull, QueueLimits, Requeued, Ticket};
use crate::route::{RouteRequest, Wait};
use crate::shares::Scarce;
use crate::wire::{FrameHeader, FrameKind, ReplyEncoder, Request, RequestScratch, decode_request};

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
            QueueFull::Bytes => (QueueCounter::RefusedBytes, "the requests that wait take as much memory as they may"),
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

// Requests that find every worker busy: left to wait, decided once somebody has room, answered where they came from.

/// Where a core's requests wait, and which of them do.
#[derive(Debug)]
pub(super) struct Parking {
    pub(super) room: Arc<WaitingRoom>,
    core: usize,
    /// Told what is left to be done in another turn.
    late: Arc<LateBox>,
    /// By connection.
    tickets: FxHashMap<u64, FxHashSet<Ticket>>,
    scratch: RequestScratch,
}

impl Parking {
    /// Of core number `core`, which is told by `late`.
    pub(super) fn new(room: Arc<WaitingRoom>, core: usize, late: &Arc<LateBox>) -> Self {
        room.open_core(core, late);
        let (tickets, scratch) = (FxHashMap::default(), RequestScratch::default());
        Self { room, core, late: Arc::clone(late), tickets, scratch }
    }

    fn forget(&mut self, connection: u64, ticket: Ticket) {
        if let Some(tickets) = self.tickets.get_mut(&connection) {
            tickets.remove(&ticket);
            if tickets.is_empty() {
                self.tickets.remove(&connection);
            }
        }
    }
}

impl<S: Service> RoutingResponder<S> {
    /// Whether a reply to one of the core's requests is still to come.
    pub(super) fn has_parked(&self) -> bool {
        self.parking.as_ref().is_some_and(|parking| !parking.tickets.is_empty())
    }

    /// Nobody waits any more, on any core.
    pub(super) fn drain_waiting(&self) {
        if let Some(parking) = &self.parking {
            parking.room.drain();
        }
    }

    /// Leaves a request to wait whose workers are all busy.
    pub(super) fn park(
        &mut self,
        peer: &Peer,
        session: SessionId,
        (header, body): (&FrameHeader, &[u8]),
        route: &RouteRequest<'_>,
        wait: &Wait,
    ) -> Result<()> {
        let Some(parking) = &mut self.parking else {
            return Err(Error::new(Kind::AllBusy, "every worker is busy, and nobody waits here", "ask again"));
        };
        let (connection, id) = (peer.connection, header.correlation_id);
        let (space, prompt_tokens) = (route.space, route.prompt.token_count() as u64);
        let (core, uid, places, body_kept) = (parking.core, peer.uid, None, body.into());
        let parked = Parked { core, connection, session, id, uid, places, space, prompt_tokens, body: body_kept };
        let bytes = body.len() + size_of::<Parked>() + size_of_val(wait.workers.as_slice());
        let ticket = parking.room.park(&Claim { bytes, user: peer.uid, ..wait.claim }, &wait.workers, parked)?;
        parking.tickets.entry(connection).or_default().insert(ticket);
        self.look_again(ticket, wait.workers.clone());
        Ok(())
    }

    /// A request has begun to wait for `workers`: if one of them has had room since it was looked at, whoever made that
    /// room may not have known of the request, and it is decided here.
    fn look_again(&mut self, ticket: Ticket, workers: Vec<WorkerIndex>) {
        let mut waiting = (ticket, workers);
        for _ in 0..QUEUE_LOOKS_MAX {
            let (ticket, workers) = &waiting;
            if !workers.iter().any(|worker| self.service.has_room(*worker)) {
                return;
            }
            let Some(parking) = &self.parking else { return };
            let Some(in_hand) = parking.room.take_back(*ticket) else { return };
            match self.serve(in_hand) {
                Some(again) => waiting = again,
                None => return,
            }
        }
        // Loads move faster than they can be looked at: others first.
        if let Some(parking) = &self.parking {
            parking.late.serve();
        }
    }

    /// Something has ended that may give room, of this worker if it is known.
    pub(super) fn on_room(&mut self, worker: Option<WorkerIndex>) {
        if self.parking.as_ref().is_some_and(|parking| parking.room.is_awaited()) {
            self.serve_waiting(worker);
        }
    }

    /// Whose load is about to change, if somebody waits who may want to know.
    pub(super) fn about_to_end(&self, session: SessionId, booking: &BookingRef<'_>) -> Option<WorkerIndex> {
        let is_awaited = self.parking.as_ref().is_some_and(|parking| parking.room.waiting() > 0);
        if is_awaited { self.service.booked_worker(session, booking) } else { None }
    }

    /// Decides who waits and finds room of which nobody told; how many they are is counted, unless the fleet has changed,
    /// for which everybody is decided again.
    pub(super) fn look_for_room(&mut self) {
        let Some(parking) = &self.parking else { return };
        let (room, reconsiders) = (Arc::clone(&parking.room), parking.room.reconsiders());
        let answered = self.serve_waiting(None);
        if !reconsiders {
            room.counters().add(QueueCounter::FoundByLook, answered as u64);
        }
    }

    /// Decides who waits and finds room, with this worker or with any; a bounded number, and so much work, the rest in
    /// another turn. Returns how many were answered.
    pub(super) fn serve_waiting(&mut self, worker: Option<WorkerIndex>) -> usize {
        let (mut answered, begun_at) = (0, self.gather_work());
        for _ in 0..QUEUE_SERVED_PER_TURN_MAX {
            if self.gather_work() - begun_at >= WORK_PER_TURN_MAX {
                self.counters().bump(CoreCounter::TurnsEndedByWork);
                break;
            }
            let (Some(parking), service) = (&self.parking, &self.service) else { return answered };
            if worker.is_some_and(|worker| !service.has_room(worker)) {
                return answered;
            }
            let mut seen = FxHashMap::default();
            let has_room = |worker| *seen.entry(worker).or_insert_with(|| service.has_room(worker));
            let Some(in_hand) = parking.room.next(worker, has_room) else { return answered };
            if let Some((ticket, workers)) = self.serve(in_hand) {
                self.look_again(ticket, workers);
                // It waits for others now, or the room has gone again. Who is behind it is looked at in time.
                if worker.is_some() {
                    return answered;
                }
            } else {
                answered += 1;
            }
        }
        // A whole turn in vain is not followed by another at once, unless there are some who are to be decided anyhow.
        if let Some(parking) = self.parking.as_ref().filter(|parking| answered > 0 || parking.room.reconsiders()) {
            parking.late.serve();
        }
        answered
    }

    /// Decides a request that waits and answers it; if everybody is busy again it waits on, and that is returned.
    fn serve(&mut self, in_hand: InHand) -> Option<(Ticket, Vec<WorkerIndex>)> {
        let parked = in_hand.parked()?;
        let mut scratch = self.parking.as_mut().map(|parking| std::mem::take(&mut parking.scratch)).unwrap_or_default();
        let mut frame = Vec::new();
        let decided = self.decide_parked(parked, &mut scratch, &mut frame);
        if let Some(parking) = &mut self.parking {
            parking.scratch = scratch;
        }
        let booked = match decided {
            Ok(Routed::Busy(wait)) => return in_hand.put_back(&wait.workers).map(|ticket| (ticket, wait.workers)),
            Ok(Routed::Decided) => self.booked(),
            Err(error) => {
                self.refuse_with(parked.id, &error, &mut frame);
                Booked::default()
            }
        };
        let session = parked.session;
        if in_hand.answer(frame, booked) == Answered::Unwanted {
            self.undo(session, booked);
        }
        None
    }

    fn decide_parked(&mut self, parked: &Parked, scratch: &mut RequestScratch, frame: &mut Vec<u8>) -> Result<Routed> {
        match decode_request(FrameKind::Route as u8, &parked.body, scratch)? {
            Request::Route(request) => self.route(parked.session, parked.id, &request, frame),
            _ => Err(Error::new(Kind::Internal, "what waited is no route", "report it")),
        }
    }

    /// A reply is about to be given to connection number `connection`, which may have gone.
    pub(super) fn unpark(&mut self, connection: u64, ticket: Ticket) {
        if let Some(parking) = &mut self.parking {
            parking.forget(connection, ticket);
        }
    }

    /// A connection is closed because it does not read what comes late.
    pub(super) fn count_unread(&self) {
        if let Some(parking) = &self.parking {
            parking.room.counters().bump(QueueCounter::RepliesUnread);
        }
    }

    /// A reply could not be given to anybody: what it booked is freed.
    pub(super) fn undo(&mut self, session: SessionId, booked: Booked) {
        let Some(parking) = self.parking.as_ref().filter(|_| booked != Booked::default()) else { return };
        parking.room.counters().bump(QueueCounter::Undelivered);
        for handle in booked.into_iter().flatten() {
            if let Err(error) = self.service.free(session, &BookingRef::Handle(handle)) {
                tracing::warn!(%error, "what was booked for a connection that has gone stays booked until it is too old");
            }
        }
        // In another turn: whoever undoes may be serving who waits.
        parking.late.serve();
    }

    /// The connection has gone, and with it whoever wants to know.
    pub(super) fn cancel_parked(&mut self, connection: u64) {
        let Some(parking) = &mut self.parking else { return };
        for ticket in parking.tickets.remove(&connection).unwrap_or_default() {
            parking.room.cancel(ticket);
        }
    }
}

// What a core is told about requests that wait, from any thread: replies, and that it is to serve or to look.

/// What was booked for a request: where it is decoded, or both, and where it is prefilled.
pub(super) type Booked = [Option<BookingHandle>; 2];

/// What a core is told about requests that wait.
#[derive(Debug)]
pub(super) enum Late {
    /// The reply to a request of one of its connections.
    Reply {
        connection: u64,
        ticket: Ticket,
        frame: Vec<u8>,
        session: SessionId,
        /// What was booked for it, to be undone if nobody can be told.
        booked: Booked,
    },
    /// Somebody who waits may find room.
    Serve,
    /// It is time to look whether somebody who waits finds room that nobody told of.
    Look,
}

/// What other threads put before a core. Not bounded by itself: a reply is there for each request that waited, whose
/// number is, and `Serve` and `Look` at most once each.
#[derive(Debug, Default)]
pub(super) struct LateBox {
    pub(super) queue: SegQueue<Late>,
    pub(super) arrived: Notify,
    serve_told: Told,
    look_told: Told,
}

impl LateBox {
    pub(super) fn pop(&self) -> Option<Late> {
        let late = self.queue.pop()?;
        match late {
            Late::Serve => self.serve_told.take(),
            Late::Look => self.look_told.take(),
            Late::Reply { .. } => {}
        }
        Some(late)
    }

    pub(super) fn put(&self, late: Late) {
        self.queue.push(late);
        self.arrived.notify_one();
    }

    /// Tells it to serve who waits, unless it is told already.
    pub(super) fn serve(&self) {
        if self.serve_told.tell() {
            self.put(Late::Serve);
        }
    }

    /// Tells it to look for those whose room nobody tells of, unless it is told already.
    pub(super) fn look(&self) {
        if self.look_told.tell() {
            self.put(Late::Look);
        }
    }
}
