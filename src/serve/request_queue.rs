//! The queue of requests that found every worker busy. All cores share it.
//!
//! ```text
//! responder ─ enqueue ─▶ RequestQueue ─ next ─▶ DispatchedRequest ─┬─ answer    reply ─▶ inbox of the request's core
//!                            ▲                                     └─ put_back  every worker was busy again
//!                            └──────────────────────────────────────────┘
//! ```
//!
//! The thread that makes room for a request decides it, on whichever core that is. The queue holds the request's body,
//! so that nothing happens between the room and the request that takes it. The reply goes to the [`QueueInbox`] of the
//! core that has the connection. A core that ends a booking while no request waits pays one load.
//!
//! A request that begins to wait may just have missed the room that it waits for. So, sync point ROOM (see
//! [`wait_flag`](super::wait_flag)): a request first enters the queue, and then its thread reads the workers' loads once
//! more. A thread that changes a load first changes it, and then reads whether a request waits. One of the two sees the
//! other.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam::queue::SegQueue;
use parking_lot::Mutex;
use rustc_hash::{FxHashMap, FxHashSet};
use tokio::sync::Notify;

use super::accept::{UserQuotas, UserReservation};
use super::connection::Peer;
use super::responder::{RouteOutcome, RoutingResponder};
use super::service::Service;
use super::wait_flag::{Notification, WaitFlag};
use crate::error::{Error, Kind, Result};
use crate::ids::{CorrelationId, SpaceId, WorkerIndex};
use crate::limits::{QUEUE_BYTES_MAX, QUEUE_LOOKS_MAX, QUEUE_SERVED_PER_TURN_MAX, QUEUE_SETS_MAX, WORK_PER_TURN_MAX};
use crate::load::{BookingHandle, BookingRef, SessionId};
use crate::metrics::{CoreCounter, CounterSet, Latency, QueueCounter};
use crate::queue::{Claim, Dequeued, Queue, QueueFull, QueueLimits, Requeued, Ticket};
use crate::route::{RouteRequest, Wait};
use crate::shares::SharedResource;
use crate::wire::{FrameHeader, FrameKind, ReplyEncoder, Request, RequestScratch, decode_request};

/// The bookings of one request: of its worker, and of the worker that prefills it if that is another.
pub(super) type Booked = [Option<BookingHandle>; 2];

/// A message to a core about queued requests.
#[derive(Debug)]
pub(super) enum QueueMessage {
    /// The pending reply to a request of one of the core's connections.
    Reply {
        connection: u64,
        ticket: Ticket,
        frame: Vec<u8>,
        session: SessionId,
        /// The request's bookings, to be freed if the connection has gone.
        booked: Booked,
    },
    /// A queued request may find room: dispatch.
    Dispatch,
    /// The periodic recheck: a queued request may find room of which no report came.
    Recheck,
}

/// The messages of other threads to a core. It has no bound of its own: it holds one reply for each request that waited,
/// and their number is bounded, and at most one `Dispatch` and one `Recheck`.
#[derive(Debug, Default)]
pub(super) struct QueueInbox {
    messages: SegQueue<QueueMessage>,
    pub(super) arrived: Notify,
    dispatch: Notification,
    recheck: Notification,
}

impl QueueInbox {
    pub(super) fn pop(&self) -> Option<QueueMessage> {
        let message = self.messages.pop()?;
        match message {
            QueueMessage::Dispatch => self.dispatch.clear(),
            QueueMessage::Recheck => self.recheck.clear(),
            QueueMessage::Reply { .. } => {}
        }
        Some(message)
    }

    fn push(&self, message: QueueMessage) {
        self.messages.push(message);
        self.arrived.notify_one();
    }

    /// Asks the core to dispatch queued requests, unless such a message is in flight.
    fn request_dispatch(&self) {
        if self.dispatch.raise() {
            self.push(QueueMessage::Dispatch);
        }
    }

    /// Asks the core to recheck queued requests, unless such a message is in flight.
    fn request_recheck(&self) {
        if self.recheck.raise() {
            self.push(QueueMessage::Recheck);
        }
    }
}

/// A queued request, with all that any core needs to answer it.
#[derive(Debug)]
struct QueuedRequest {
    /// The core that has its connection.
    core: usize,
    connection: u64,
    session: SessionId,
    id: CorrelationId,
    /// The user of the process that sent it.
    uid: u32,
    /// Its part of the user's quotas, from the beginning of its wait.
    reservations: Option<[UserReservation; 2]>,
    space: SpaceId,
    prompt_tokens: u64,
    /// The body of its frame.
    body: Box<[u8]>,
}

/// The queued requests of all cores, and the inboxes of those cores.
#[derive(Debug)]
pub struct RequestQueue {
    started: Instant,
    bounds: QueueLimits,
    users: Arc<UserQuotas>,
    queue: Mutex<Queue<QueuedRequest>>,
    waiting: WaitFlag,
    cores: Box<[OnceLock<Arc<QueueInbox>>]>,
    /// Requests to decide again whatever room there is, in order: the fleet has changed, and with it their workers.
    reconsidered: Mutex<VecDeque<Ticket>>,
    /// Wakes the expiry task: a request ends sooner than all before it.
    ends_sooner: Notify,
    counters: CounterSet<QueueCounter>,
    /// In microseconds.
    waited: Latency,
}

impl RequestQueue {
    /// A queue for up to `requests_max` requests of `cores` cores, by a clock that began at `started`.
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
            waiting: WaitFlag::default(),
            cores: (0..cores).map(|_| OnceLock::new()).collect(),
            reconsidered: Mutex::default(),
            ends_sooner: Notify::new(),
            counters: CounterSet::default(),
            waited: Latency::default(),
        }
    }

    /// The same with the users' quotas.
    #[must_use]
    pub fn shared_by(self, users: Arc<UserQuotas>) -> Self {
        let bounds = QueueLimits { user_sets_max: users.share_of(self.bounds.sets_max), ..self.bounds };
        Self { users, bounds, queue: Mutex::new(Queue::new(bounds)), ..self }
    }

    /// The queue's counters.
    #[must_use]
    pub const fn counters(&self) -> &CounterSet<QueueCounter> {
        &self.counters
    }

    /// The number of requests that wait now.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.count()
    }

    /// The number of a space's requests that wait now, and the tokens of their prompts. Reads every queued request: for
    /// status and metrics only.
    #[must_use]
    pub fn waiting_of(&self, space: SpaceId) -> (usize, u64) {
        let queue = self.queue.lock();
        let of_space = queue.iter().filter(|request| request.space == space);
        of_space.fold((0, 0), |(count, tokens), request| (count + 1, tokens + request.prompt_tokens))
    }

    /// The waits of requests that were answered by a decision: their sum in seconds, and (upper bound in seconds, count)
    /// of each bucket.
    #[must_use]
    pub fn waited(&self) -> (f64, Vec<(f64, u64)>) {
        let (sum, buckets) = self.waited.read();
        (sum * 1e3, buckets.into_iter().map(|(bound, count)| (bound * 1e3, count)).collect())
    }

    /// Nanoseconds of the queue's clock.
    fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Registers a core that serves from now on, with the inbox of its replies.
    fn register_core(&self, core: usize, inbox: &Arc<QueueInbox>) {
        if let Some(place) = self.cores.get(core)
            && place.set(Arc::clone(inbox)).is_err()
        {
            tracing::error!(core, "a second core has this number; its requests cannot be queued");
        }
    }

    /// Notes that a worker may have room, for callers that dispatch nothing themselves: bookings expired, or a later
    /// attempt superseded them. A core is notified if a request waits. Call it after the loads have changed.
    pub fn made_room(&self) {
        if self.waiting.is_set()
            && let Some(core) = self.first_core()
        {
            core.request_dispatch();
        }
    }

    fn first_core(&self) -> Option<&Arc<QueueInbox>> {
        self.cores.iter().find_map(OnceLock::get)
    }

    /// Changes the queue, and then publishes the number of requests that wait.
    fn with<R>(&self, act: impl FnOnce(&mut Queue<QueuedRequest>) -> R) -> R {
        let mut queue = self.queue.lock();
        let done = act(&mut queue);
        self.waiting.set(queue.len());
        done
    }

    /// Queues a request. The caller reads the loads of `workers` once more.
    fn enqueue(&self, claim: &Claim, workers: &[WorkerIndex], mut request: QueuedRequest) -> Result<Ticket, Error> {
        if self.cores.get(request.core).is_none_or(|core| core.get().is_none()) {
            let problem = "every worker is busy, and the requests of this serving thread cannot be queued";
            return Err(Error::new(Kind::Overloaded, problem, "retry"));
        }
        request.reservations = self.reserve(request.uid, claim.bytes);
        if request.reservations.is_none() {
            return Err(self.refused_user(claim.bytes));
        }
        let now_ns = self.now_ns();
        let (pushed, ends_sooner, retry_after_ns) = self.with(|queue| {
            let ended_ns = queue.next_end_ns();
            let pushed = queue.push(now_ns, claim, workers, request);
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

    /// Reserves one request of this many bytes for a user.
    fn reserve(&self, uid: u32, bytes: usize) -> Option<[UserReservation; 2]> {
        let QueueLimits { requests_max, bytes_max, .. } = self.bounds;
        let request = self.users.reserve(uid, SharedResource::WaitingRequests, 1, requests_max)?;
        Some([request, self.users.reserve(uid, SharedResource::WaitingBytes, bytes, bytes_max)?])
    }

    /// The error for a request beyond its user's quota. Where the queue itself is full, the error blames the queue.
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
        let what =
            "the queued requests of this user are as many, or take as much memory, as serve.user_share_percent allows";
        queue_full(what, retry_after_ns)
    }

    fn refused(&self, full: QueueFull, retry_after_ns: u64) -> Error {
        let (counter, what) = match full {
            QueueFull::Closed => return draining(),
            QueueFull::Requests => {
                (QueueCounter::RefusedRequests, "the queue holds as many requests as policy.queue_requests_max allows")
            }
            QueueFull::Bytes => {
                (QueueCounter::RefusedBytes, "the queued requests take all the memory there is for them")
            }
            QueueFull::Sets => {
                (QueueCounter::RefusedSets, "queued requests wait for too many different sets of workers")
            }
            QueueFull::UserSets => {
                let what = "requests of this user wait for as many different sets of workers as serve.user_share_percent allows";
                (QueueCounter::RefusedUser, what)
            }
        };
        self.counters.bump(counter);
        queue_full(what, retry_after_ns)
    }

    /// Dispatches the first request that finds room: with this worker, or with any worker for which `has_room` holds.
    fn next(
        self: &Arc<Self>,
        worker: Option<WorkerIndex>,
        has_room: impl FnMut(WorkerIndex) -> bool,
    ) -> Option<DispatchedRequest> {
        let taken = self.with(|queue| match worker {
            Some(worker) => queue.next_for(worker),
            None => self.next_reconsidered(queue).or_else(|| queue.next_where(has_room)),
        })?;
        Some(DispatchedRequest { queue: Arc::clone(self), taken: Some(taken) })
    }

    /// Whether there are requests to decide again whatever room there is.
    fn has_reconsidered(&self) -> bool {
        !self.reconsidered.lock().is_empty()
    }

    fn next_reconsidered(&self, queue: &mut Queue<QueuedRequest>) -> Option<Dequeued<QueuedRequest>> {
        let mut tickets = self.reconsidered.lock();
        while let Some(ticket) = tickets.pop_front() {
            if let Some(taken) = queue.take_back(ticket) {
                return Some(taken);
            }
        }
        None
    }

    /// Dispatches a request that has just begun to wait, unless another core has dispatched it.
    fn take_back(self: &Arc<Self>, ticket: Ticket) -> Option<DispatchedRequest> {
        let taken = self.with(|queue| queue.take_back(ticket))?;
        Some(DispatchedRequest { queue: Arc::clone(self), taken: Some(taken) })
    }

    /// Drops a request whose connection has gone.
    fn cancel(&self, ticket: Ticket) {
        if self.with(|queue| queue.cancel(ticket)).is_some() {
            self.counters.bump(QueueCounter::Cancelled);
        }
    }

    /// Closes the queue. Every queued request is answered with `draining`.
    fn drain(&self) {
        let waited = self.with(Queue::drain);
        self.counters.add(QueueCounter::Drained, waited.len() as u64);
        for (ticket, request) in waited {
            self.refuse(ticket, &request, &draining());
        }
    }

    fn refuse(&self, ticket: Ticket, request: &QueuedRequest, error: &Error) {
        let mut frame = Vec::new();
        ReplyEncoder::default().error(request.id, error, &mut frame);
        self.reply(ticket, request, frame, Booked::default());
    }

    fn reply(&self, ticket: Ticket, request: &QueuedRequest, frame: Vec<u8>, booked: Booked) {
        // Always there: `enqueue` refuses the requests of a core that has not registered.
        if let Some(core) = self.cores.get(request.core).and_then(OnceLock::get) {
            let (connection, session) = (request.connection, request.session);
            core.push(QueueMessage::Reply { connection, ticket, frame, session, booked });
        }
    }

    /// Expires queued requests, and has a core recheck the others every `recheck_ms`, for ever. The recheck finds room of
    /// which no report came: the end of a back-off, or of a prefill by its estimate. When `fleet_version` has changed,
    /// every queued request is decided again.
    pub async fn expire_and_recheck(&self, recheck_ms: u64, fleet_version: impl Fn() -> u64) {
        let mut version_seen = fleet_version();
        loop {
            let next_end_ns = self.queue.lock().next_end_ns();
            let sooner = self.ends_sooner.notified();
            match next_end_ns {
                None => sooner.await,
                Some(end_ns) => {
                    let until_end = Duration::from_nanos(end_ns.saturating_sub(self.now_ns()));
                    let pause = until_end.min(Duration::from_millis(recheck_ms));
                    // The queue itself shows whether the notification came.
                    drop(tokio::time::timeout(pause, sooner).await);
                }
            }
            self.expire();
            let version = fleet_version();
            if std::mem::replace(&mut version_seen, version) != version {
                let waiting = self.queue.lock().tickets();
                *self.reconsidered.lock() = waiting.into();
            }
            if self.waiting() > 0
                && let Some(core) = self.first_core()
            {
                core.request_recheck();
            }
        }
    }

    fn expire(&self) {
        let now_ns = self.now_ns();
        while let Some(taken) = self.with(|queue| queue.next_expired(now_ns)) {
            self.counters.bump(QueueCounter::Expired);
            let waited_ms = now_ns.saturating_sub(taken.since_ns) / 1_000_000;
            let error = Error::new(
                Kind::DeadlinePassed,
                format!("every worker was busy for {waited_ms} ms"),
                "retry with a later deadline_us, or add workers",
            );
            self.refuse(taken.ticket, &taken.what, &error);
        }
    }
}

fn queue_full(what: &str, retry_after_ns: u64) -> Error {
    let remedy = "retry after retry_after_us, add workers, or raise policy.queue_requests_max";
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

/// A request that has left the queue to be decided. If it is dropped unanswered, its decision panicked, and its gateway
/// gets an error.
struct DispatchedRequest {
    queue: Arc<RequestQueue>,
    taken: Option<Dequeued<QueuedRequest>>,
}

/// Whether a reply to a dispatched request was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Delivery {
    /// The reply is in the inbox of the request's core.
    Sent,
    /// The request was cancelled: its connection has gone. The caller frees its bookings.
    Cancelled,
}

impl DispatchedRequest {
    /// The request to decide.
    fn request(&self) -> Option<&QueuedRequest> {
        self.taken.as_ref().map(|taken| &taken.what)
    }

    /// Sends its reply. `booked` holds the bookings of its decision.
    fn answer(mut self, frame: Vec<u8>, booked: Booked) -> Delivery {
        let Some(taken) = self.taken.take() else { return Delivery::Cancelled };
        let now_ns = self.queue.now_ns();
        if self.queue.with(|queue| queue.finish(taken.ticket, now_ns)) {
            self.queue.counters.bump(QueueCounter::Cancelled);
            return Delivery::Cancelled;
        }
        self.queue.counters.bump(QueueCounter::Woken);
        self.queue.waited.record(now_ns.saturating_sub(taken.since_ns) / 1000);
        self.queue.reply(taken.ticket, &taken.what, frame, booked);
        Delivery::Sent
    }

    /// Puts the request back: every worker is busy again, and it waits for one of `workers`. If this returns a ticket, the
    /// caller reads their loads once more.
    fn put_back(mut self, workers: &[WorkerIndex]) -> Option<Ticket> {
        let taken = self.taken.take()?;
        let ticket = taken.ticket;
        self.queue.counters.bump(QueueCounter::PutBack);
        match self.queue.with(|queue| queue.put_back(taken, workers)) {
            Requeued::Waits => {
                // It may end sooner than the expiry task knows.
                self.queue.ends_sooner.notify_one();
                return Some(ticket);
            }
            Requeued::Cancelled(_) => self.queue.counters.bump(QueueCounter::Cancelled),
            Requeued::Closed(request) => {
                self.queue.counters.bump(QueueCounter::Drained);
                self.queue.refuse(ticket, &request, &draining());
            }
        }
        None
    }
}

impl Drop for DispatchedRequest {
    fn drop(&mut self) {
        let Some(taken) = self.taken.take() else { return };
        let now_ns = self.queue.now_ns();
        if !self.queue.with(|queue| queue.finish(taken.ticket, now_ns)) {
            let error =
                Error::new(Kind::Internal, "deciding the request failed", "report it with the log's last lines");
            self.queue.refuse(taken.ticket, &taken.what, &error);
        }
    }
}

/// A core's way to the queue, and its own queued requests.
#[derive(Debug)]
pub(super) struct CoreQueue {
    queue: Arc<RequestQueue>,
    core: usize,
    /// Takes the dispatches that are left for another quantum.
    inbox: Arc<QueueInbox>,
    /// By connection.
    tickets: FxHashMap<u64, FxHashSet<Ticket>>,
    scratch: RequestScratch,
}

impl CoreQueue {
    /// For core number `core`, whose messages go to `inbox`.
    pub(super) fn new(queue: Arc<RequestQueue>, core: usize, inbox: &Arc<QueueInbox>) -> Self {
        queue.register_core(core, inbox);
        let (tickets, scratch) = (FxHashMap::default(), RequestScratch::default());
        Self { queue, core, inbox: Arc::clone(inbox), tickets, scratch }
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
    /// Whether a reply to one of the core's queued requests is still to come.
    pub(super) fn has_queued(&self) -> bool {
        self.queue.as_ref().is_some_and(|own| !own.tickets.is_empty())
    }

    /// Closes the queue, for all cores.
    pub(super) fn drain_queue(&self) {
        if let Some(own) = &self.queue {
            own.queue.drain();
        }
    }

    /// Queues a request whose workers are all busy.
    pub(super) fn enqueue(
        &mut self,
        peer: &Peer,
        session: SessionId,
        (header, body): (&FrameHeader, &[u8]),
        route: &RouteRequest<'_>,
        wait: &Wait,
    ) -> Result<Ticket> {
        let Some(own) = &mut self.queue else {
            return Err(Error::new(Kind::AllBusy, "every worker is busy, and there is no queue", "retry"));
        };
        let (connection, id) = (peer.connection, header.correlation_id);
        let (space, prompt_tokens) = (route.space, route.prompt.token_count() as u64);
        let (core, uid, reservations, body_copy) = (own.core, peer.uid, None, body.into());
        let request =
            QueuedRequest { core, connection, session, id, uid, reservations, space, prompt_tokens, body: body_copy };
        let bytes = body.len() + size_of::<QueuedRequest>() + size_of_val(wait.workers.as_slice());
        let ticket = own.queue.enqueue(&Claim { bytes, user: peer.uid, ..wait.claim }, &wait.workers, request)?;
        own.tickets.entry(connection).or_default().insert(ticket);
        self.recheck_loads(ticket, wait.workers.clone());
        Ok(ticket)
    }

    /// Reads the loads of `workers`, for which a request has begun to wait, once more. A thread that made room since the
    /// decision may not have seen the request in the queue. If one of the workers has room, the request is decided here.
    fn recheck_loads(&mut self, ticket: Ticket, workers: Vec<WorkerIndex>) {
        let mut waiting = (ticket, workers);
        for _ in 0..QUEUE_LOOKS_MAX {
            let (ticket, workers) = &waiting;
            if !workers.iter().any(|worker| self.service.has_room(*worker)) {
                return;
            }
            let Some(own) = &self.queue else { return };
            let Some(dispatched) = own.queue.take_back(*ticket) else { return };
            match self.decide_dispatched(dispatched) {
                Some(again) => waiting = again,
                None => return,
            }
        }
        // Loads change faster than this thread can read them: others first.
        if let Some(own) = &self.queue {
            own.inbox.request_dispatch();
        }
    }

    /// Dispatches queued requests after a change that may give room: with this worker if the caller knows it.
    pub(super) fn on_room(&mut self, worker: Option<WorkerIndex>) {
        if self.queue.as_ref().is_some_and(|own| own.queue.waiting.is_set()) {
            self.dispatch_queued(worker);
        }
    }

    /// The worker whose load is about to fall, if a request waits.
    pub(super) fn worker_to_free(&self, session: SessionId, booking: &BookingRef<'_>) -> Option<WorkerIndex> {
        let is_any_queued = self.queue.as_ref().is_some_and(|own| own.queue.waiting() > 0);
        if is_any_queued { self.service.booked_worker(session, booking) } else { None }
    }

    /// Dispatches queued requests that find room of which no report came. They are counted, unless the fleet has
    /// changed: then every queued request is decided again.
    pub(super) fn recheck_queue(&mut self) {
        let Some(own) = &self.queue else { return };
        let (queue, has_reconsidered) = (Arc::clone(&own.queue), own.queue.has_reconsidered());
        let answered = self.dispatch_queued(None);
        if !has_reconsidered {
            queue.counters().add(QueueCounter::FoundByLook, answered as u64);
        }
    }

    /// Decides queued requests that find room, with this worker or with any. The number of requests and their work are
    /// bounded; the rest follows in another quantum. Returns the number of answered requests.
    pub(super) fn dispatch_queued(&mut self, worker: Option<WorkerIndex>) -> usize {
        let (mut answered, begun_at) = (0, self.gather_work());
        for _ in 0..QUEUE_SERVED_PER_TURN_MAX {
            if self.gather_work() - begun_at >= WORK_PER_TURN_MAX {
                self.counters().bump(CoreCounter::TurnsEndedByWork);
                break;
            }
            let (Some(own), service) = (&self.queue, &self.service) else { return answered };
            if worker.is_some_and(|worker| !service.has_room(worker)) {
                return answered;
            }
            let mut seen = FxHashMap::default();
            let has_room = |worker| *seen.entry(worker).or_insert_with(|| service.has_room(worker));
            let Some(dispatched) = own.queue.next(worker, has_room) else { return answered };
            if let Some((ticket, workers)) = self.decide_dispatched(dispatched) {
                self.recheck_loads(ticket, workers);
                // It waits for others now, or the room has gone again. Requests behind it are rechecked in time.
                if worker.is_some() {
                    return answered;
                }
            } else {
                answered += 1;
            }
        }
        // A quantum that answered nothing is not followed by another at once, unless there are requests to decide
        // whatever room there is.
        if let Some(own) = self.queue.as_ref().filter(|own| answered > 0 || own.queue.has_reconsidered()) {
            own.inbox.request_dispatch();
        }
        answered
    }

    /// Decides a dispatched request and answers it. If every worker is busy again, it goes back to the queue, and this
    /// returns its ticket and workers.
    fn decide_dispatched(&mut self, dispatched: DispatchedRequest) -> Option<(Ticket, Vec<WorkerIndex>)> {
        let request = dispatched.request()?;
        let mut scratch = self.queue.as_mut().map(|own| std::mem::take(&mut own.scratch)).unwrap_or_default();
        let mut frame = Vec::new();
        let decided = self.decide_queued(request, &mut scratch, &mut frame);
        if let Some(own) = &mut self.queue {
            own.scratch = scratch;
        }
        let booked = match decided {
            Ok(RouteOutcome::Busy(wait)) => {
                return dispatched.put_back(&wait.workers).map(|ticket| (ticket, wait.workers));
            }
            Ok(RouteOutcome::Replied(_)) => self.booked(),
            Err(error) => {
                self.refuse_with(request.id, &error, &mut frame);
                Booked::default()
            }
        };
        let session = request.session;
        if dispatched.answer(frame, booked) == Delivery::Cancelled {
            self.free_undelivered(session, booked);
        }
        None
    }

    fn decide_queued(
        &mut self,
        queued: &QueuedRequest,
        scratch: &mut RequestScratch,
        frame: &mut Vec<u8>,
    ) -> Result<RouteOutcome> {
        match decode_request(FrameKind::Route as u8, &queued.body, scratch)? {
            Request::Route(request) => self.route(queued.session, queued.id, &request, frame),
            _ => Err(Error::new(Kind::Internal, "a queued request is not a route", "report it")),
        }
    }

    /// Removes a ticket whose reply is about to be written to connection number `connection`, which may have gone.
    pub(super) fn forget_queued(&mut self, connection: u64, ticket: Ticket) {
        if let Some(own) = &mut self.queue {
            own.forget(connection, ticket);
        }
    }

    /// Counts a connection that is closed because it does not read its pending replies.
    pub(super) fn count_unread(&self) {
        if let Some(own) = &self.queue {
            own.queue.counters().bump(QueueCounter::RepliesUnread);
        }
    }

    /// Frees the bookings of a request whose reply could not be delivered.
    pub(super) fn free_undelivered(&mut self, session: SessionId, booked: Booked) {
        let Some(own) = self.queue.as_ref().filter(|_| booked != Booked::default()) else { return };
        own.queue.counters().bump(QueueCounter::Undelivered);
        for handle in booked.into_iter().flatten() {
            if let Err(error) = self.service.free(session, &BookingRef::Handle(handle)) {
                tracing::warn!(%error, "a booking of a closed connection cannot be freed; it stays until it expires");
            }
        }
        // In another quantum: this caller may be dispatching already.
        own.inbox.request_dispatch();
    }

    /// Drops the queued requests of a connection that has gone.
    pub(super) fn cancel_queued(&mut self, connection: u64) {
        let Some(own) = &mut self.queue else { return };
        for ticket in own.tickets.remove(&connection).unwrap_or_default() {
            own.queue.cancel(ticket);
        }
    }
}
