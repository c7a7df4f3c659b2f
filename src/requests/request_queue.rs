//! The request queue: the requests of all serving threads that wait because every worker is busy. `crate::queue` orders
//! them; this file adds threads, locks and replies.
//!
//! The thread that notices free capacity decides a queued request, even if another thread owns its connection: the
//! queue entry holds all that a decision needs. The reply goes to the inbox of the thread that owns the connection.
//! While the queue is empty, ending a booking costs one fence and one atomic load.
//!
//! A request and the capacity that it waits for must not miss each other (sync point ROOM, defined in `wait_flag`). A
//! thread that queues a request puts it into the queue first, and then reads the loads of the request's workers once
//! more. A thread that changes a load changes it first, and then reads whether a request waits. At least one thread
//! then sees the other's change.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam::queue::SegQueue;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::handler::KeptRequest;
use super::wait_flag::{Notification, WaitFlag};
use crate::budget::Gauge;
use crate::error::{Error, Kind, Result};
use crate::ids::{CorrelationId, SpaceId, WorkerIndex};
use crate::limits::{QUEUE_BYTES_MAX, QUEUE_SETS_MAX};
use crate::load::{BookingHandle, SessionId};
use crate::metrics::{CounterSet, Latency, QueueCounter};
use crate::queue::{Claim, Dequeued, Queue, QueueFull, QueueLimits, Requeued, Ticket};
use crate::route::Decision;
use crate::shares::{SharedResource, UserQuotas, UserReservation};
use crate::traces::{TracedDecision, TracedRequest, Traces};

/// The decision of a queued request, or why there is none.
pub(crate) type Outcome = Result<Box<Decision>>;

/// The bookings of a request: of the worker that decodes or does both, and of the worker that prefills.
pub(crate) type BookedHandles = [Option<BookingHandle>; 2];

/// The bookings of a decision.
pub(crate) fn booked_by(decision: &Decision) -> BookedHandles {
    [decision.booking, decision.prefill.as_ref().and_then(|prefill| prefill.booking)]
}

/// A queued request, with everything that any thread needs to decide and answer it.
#[derive(Debug)]
pub(super) struct QueuedRequest {
    /// The number of the serving thread that has its connection.
    pub(super) core: usize,
    pub(super) connection: u64,
    pub(super) session: SessionId,
    pub(super) id: CorrelationId,
    /// The user of the process that asked.
    pub(super) uid: u32,
    /// Its part of that user's quotas, set when it is queued.
    pub(super) reservations: Option<[UserReservation; 2]>,
    pub(super) space: SpaceId,
    pub(super) prompt_tokens: u64,
    /// `Some` = it is traced.
    pub(super) traced: Option<TracedRequest>,
    /// Whether the reply lists cost terms and removed workers.
    pub(super) explain: bool,
    /// The request itself.
    pub(super) request: Box<dyn KeptRequest>,
}

/// The reply to a request that waited.
#[derive(Debug)]
pub(crate) struct PendingReply {
    pub(crate) connection: u64,
    pub(crate) id: CorrelationId,
    pub(crate) ticket: Ticket,
    pub(crate) session: SessionId,
    pub(crate) explain: bool,
    pub(crate) outcome: Outcome,
}

impl PendingReply {
    /// The bookings to undo if the reply cannot be delivered.
    pub(crate) fn booked(&self) -> BookedHandles {
        self.outcome.as_ref().map_or_else(|_| BookedHandles::default(), |decision| booked_by(decision))
    }
}

/// A message to a serving thread about queued requests.
#[derive(Debug)]
pub(crate) enum QueueMessage {
    /// The reply to a request of one of the thread's connections.
    Reply(PendingReply),
    /// A queued request may find a worker with room: dispatch.
    Dispatch,
    /// Check the queue for capacity that no thread reported.
    Recheck,
}

/// The messages of other threads to one serving thread. Bounded by the queue: a reply stands for a request that waited,
/// and `Dispatch` and `Recheck` are in it at most once each.
#[derive(Debug, Default)]
pub(crate) struct QueueInbox {
    messages: SegQueue<QueueMessage>,
    /// Wakes the owner when a message arrives. The owner may also wake itself, for messages of its own.
    pub(crate) arrived: Notify,
    dispatch: Notification,
    recheck: Notification,
}

impl QueueInbox {
    pub(crate) fn pop(&self) -> Option<QueueMessage> {
        let message = self.messages.pop()?;
        match message {
            QueueMessage::Dispatch => self.dispatch.take(),
            QueueMessage::Recheck => self.recheck.take(),
            QueueMessage::Reply(_) => {}
        }
        Some(message)
    }

    fn put(&self, message: QueueMessage) {
        self.messages.push(message);
        self.arrived.notify_one();
    }

    /// Asks the thread to dispatch, unless that message is under way.
    pub(super) fn dispatch(&self) {
        if self.dispatch.send() {
            self.put(QueueMessage::Dispatch);
        }
    }

    /// Asks the thread to check for unreported capacity, unless that message is under way.
    fn recheck(&self) {
        if self.recheck.send() {
            self.put(QueueMessage::Recheck);
        }
    }
}

/// The queue of all serving threads, and the way to their inboxes.
#[derive(Debug)]
pub struct RequestQueue {
    started: Instant,
    limits: QueueLimits,
    users: Arc<UserQuotas>,
    traces: Traces,
    queue: Mutex<Queue<QueuedRequest>>,
    /// Shows the memory of the requests.
    held: Gauge,
    waiting: WaitFlag,
    inboxes: Box<[OnceLock<Arc<QueueInbox>>]>,
    /// Requests to decide again whatever capacity there is, in order: the fleet changed, and so may their workers.
    reconsidered: Mutex<VecDeque<Ticket>>,
    /// Wakes the task that waits for deadlines when the earliest deadline of the queue moves forward.
    ends_sooner: Notify,
    counters: CounterSet<QueueCounter>,
    /// Microseconds. Written under the lock of `queue`.
    waited: Latency,
}

impl RequestQueue {
    /// A queue for up to `requests_max` requests of `bytes_max`, of `cores` serving threads, on a clock that began at
    /// `started`.
    #[must_use]
    pub(crate) fn new(cores: usize, (requests_max, bytes_max): (usize, usize), started: Instant) -> Self {
        let limits = QueueLimits {
            requests_max,
            bytes_max: bytes_max.min(QUEUE_BYTES_MAX),
            sets_max: QUEUE_SETS_MAX,
            user_sets_max: QUEUE_SETS_MAX,
        };
        Self {
            started,
            limits,
            users: Arc::default(),
            traces: Traces::default(),
            queue: Mutex::new(Queue::new(limits)),
            held: Gauge::default(),
            waiting: WaitFlag::default(),
            inboxes: (0..cores).map(|_| OnceLock::new()).collect(),
            reconsidered: Mutex::default(),
            ends_sooner: Notify::new(),
            counters: CounterSet::default(),
            waited: Latency::default(),
        }
    }

    /// The same queue, in which one user gets the share that `users` allow.
    #[must_use]
    pub(crate) fn shared_by(self, users: Arc<UserQuotas>) -> Self {
        let limits = QueueLimits { user_sets_max: users.share_of(self.limits.sets_max), ..self.limits };
        Self { users, limits, queue: Mutex::new(Queue::new(limits)), ..self }
    }

    /// The same queue, whose refusals of traced requests are traced.
    #[must_use]
    pub(crate) fn traced_by(self, traces: Traces) -> Self {
        Self { traces, ..self }
    }

    /// Records that a traced request of a space, with a prompt of this many tokens, was refused after it had waited since
    /// `since_ns`.
    pub(super) fn trace_refusal(
        &self,
        TracedRequest { context }: TracedRequest,
        prompt: (SpaceId, u64),
        since_ns: u64,
        kind: Kind,
    ) {
        self.traces.record(TracedDecision::refused(context, prompt, (since_ns, self.now_ns()), kind));
    }

    pub(crate) const fn counters(&self) -> &CounterSet<QueueCounter> {
        &self.counters
    }

    /// The memory of the requests that wait.
    #[must_use]
    pub(crate) fn bytes(&self) -> u64 {
        self.held.get()
    }

    /// How many requests wait now.
    #[must_use]
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.count()
    }

    /// How many requests of a space wait now, and the tokens of their prompts. Reads the whole queue: for people.
    #[must_use]
    pub(crate) fn waiting_of(&self, space: SpaceId) -> (usize, u64) {
        let queue = self.queue.lock();
        let of_space = queue.iter().filter(|queued| queued.space == space);
        of_space.fold((0, 0), |(count, tokens), queued| (count + 1, tokens + queued.prompt_tokens))
    }

    /// The waits of requests that got a decision: the sum in seconds, and (upper bound in seconds, count) of each
    /// bucket.
    #[must_use]
    pub(crate) fn waited(&self) -> (f64, Vec<(f64, u64)>) {
        let (sum, buckets) = self.waited.read();
        (sum * 1e3, buckets.into_iter().map(|(bound, count)| (bound * 1e3, count)).collect())
    }

    /// Nanoseconds of the queue's clock.
    pub(super) fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Serving thread number `core` gets its replies in `inbox` from now on.
    pub(super) fn open_core(&self, core: usize, inbox: &Arc<QueueInbox>) {
        if let Some(place) = self.inboxes.get(core)
            && place.set(Arc::clone(inbox)).is_err()
        {
            tracing::error!(core, "a serving thread began twice; requests of the second one cannot wait");
        }
    }

    /// Whether a request waits; for a thread that has just changed a load.
    pub(super) fn is_awaited(&self) -> bool {
        self.waiting.is_any()
    }

    /// Capacity was freed where no serving thread dispatches for it: bookings expired, or a later attempt took one
    /// over. Asks a serving thread to dispatch if a request waits. Call it after the loads have changed.
    pub(crate) fn made_room(&self) {
        if self.is_awaited()
            && let Some(inbox) = self.first_inbox()
        {
            inbox.dispatch();
        }
    }

    fn first_inbox(&self) -> Option<&Arc<QueueInbox>> {
        self.inboxes.iter().find_map(OnceLock::get)
    }

    /// Changes the queue, and publishes how many requests wait afterwards.
    fn with<R>(&self, act: impl FnOnce(&mut Queue<QueuedRequest>) -> R) -> R {
        let mut queue = self.queue.lock();
        let done = act(&mut queue);
        self.waiting.set(queue.len());
        self.held.set(queue.bytes() as u64);
        done
    }

    /// Queues a request. The caller then reads the loads of `workers` once more.
    pub(super) fn enqueue(
        &self,
        claim: &Claim,
        workers: &[WorkerIndex],
        mut queued: QueuedRequest,
    ) -> Result<Ticket, Error> {
        if self.inboxes.get(queued.core).is_none_or(|inbox| inbox.get().is_none()) {
            return Err(Error::new(
                Kind::Overloaded,
                "every worker is busy, and requests on this connection cannot wait",
                "ask again",
            ));
        }
        queued.reservations = self.reservations(queued.uid, claim.bytes);
        if queued.reservations.is_none() {
            return Err(self.refused_user(claim.bytes));
        }
        let now_ns = self.now_ns();
        let (pushed, ends_sooner, retry_after_ns) = self.with(|queue| {
            let ended_ns = queue.next_end_ns();
            let pushed = queue.push(now_ns, claim, workers, queued);
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

    /// Reserves one more request of `bytes` for a user; `None` if that is beyond the user's quotas.
    fn reservations(&self, uid: u32, bytes: usize) -> Option<[UserReservation; 2]> {
        let QueueLimits { requests_max, bytes_max, .. } = self.limits;
        let request = self.users.reserve(uid, SharedResource::WaitingRequests, 1, requests_max)?;
        Some([request, self.users.reserve(uid, SharedResource::WaitingBytes, bytes, bytes_max)?])
    }

    /// The error for a request of `bytes` beyond a user's quotas. It names the user's share only if the queue itself
    /// has room left.
    fn refused_user(&self, bytes: usize) -> Error {
        let queue = self.queue.lock();
        let retry_after_ns = queue.retry_after_ns();
        if queue.len() >= self.limits.requests_max {
            return self.refused(QueueFull::Requests, retry_after_ns);
        }
        if queue.bytes().saturating_add(bytes) > self.limits.bytes_max {
            return self.refused(QueueFull::Bytes, retry_after_ns);
        }
        self.counters.bump(QueueCounter::RefusedUser);
        let what = "this user's waiting requests, or their memory, have reached serve.user_share_percent";
        queue_full(what, retry_after_ns)
    }

    fn refused(&self, full: QueueFull, retry_after_ns: u64) -> Error {
        let (counter, what) = match full {
            QueueFull::Closed => return draining(),
            QueueFull::Requests => (QueueCounter::RefusedRequests, "the queue has policy.queue_requests_max requests"),
            QueueFull::Bytes => (QueueCounter::RefusedMemory, "the memory for queued requests is full"),
            QueueFull::Sets => {
                (QueueCounter::RefusedSets, "the queued requests wait for too many different sets of workers")
            }
            QueueFull::UserSets => {
                let what =
                    "this user's requests wait for too many different sets of workers for serve.user_share_percent";
                (QueueCounter::RefusedUser, what)
            }
        };
        self.counters.bump(counter);
        queue_full(what, retry_after_ns)
    }

    /// Takes the first request that finds room: with `worker`, or with any worker for which `has_room` answers true.
    pub(super) fn next(
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

    /// Whether some requests are to be decided again whatever capacity there is.
    pub(super) fn reconsiders(&self) -> bool {
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

    /// Takes back a request that was queued just now, unless another thread has it.
    pub(super) fn take_back(self: &Arc<Self>, ticket: Ticket) -> Option<DispatchedRequest> {
        let taken = self.with(|queue| queue.take_back(ticket))?;
        Some(DispatchedRequest { queue: Arc::clone(self), taken: Some(taken) })
    }

    /// Drops a request whose connection has gone.
    pub(super) fn cancel(&self, ticket: Ticket) {
        if self.with(|queue| queue.cancel(ticket)).is_some() {
            self.counters.bump(QueueCounter::Cancelled);
        }
    }

    /// Closes the queue, and refuses the requests in it because the daemon drains.
    pub(super) fn drain(&self) {
        let waited = self.with(Queue::drain);
        self.counters.add(QueueCounter::Drained, waited.len() as u64);
        for (ticket, queued) in waited {
            self.reply(ticket, &queued, Err(draining()));
        }
    }

    fn reply(&self, ticket: Ticket, queued: &QueuedRequest, outcome: Outcome) {
        let QueuedRequest { core, connection, session, id, explain, .. } = *queued;
        // The inbox is there: `enqueue` refuses a thread without one.
        if let Some(inbox) = self.inboxes.get(core).and_then(OnceLock::get) {
            inbox.put(QueueMessage::Reply(PendingReply { connection, id, ticket, session, explain, outcome }));
        }
    }

    /// Refuses requests whose deadline has passed, for ever. At least every `recheck_ms` it has a serving thread check
    /// for capacity that no thread reported: back-offs end, and prefills are assumed done. When `fleet_version` moves,
    /// all queued requests are decided again.
    pub(crate) async fn expire_and_recheck(&self, recheck_ms: u64, fleet_version: impl Fn() -> u64) {
        let mut version_seen = fleet_version();
        loop {
            let next_end_ns = self.queue.lock().next_end_ns();
            let sooner = self.ends_sooner.notified();
            match next_end_ns {
                None => sooner.await,
                Some(end_ns) => {
                    let until_end = Duration::from_nanos(end_ns.saturating_sub(self.now_ns()));
                    let rest = until_end.min(Duration::from_millis(recheck_ms));
                    // The code below finds out which of the two ended the wait.
                    drop(tokio::time::timeout(rest, sooner).await);
                }
            }
            self.refuse_expired();
            let version = fleet_version();
            if std::mem::replace(&mut version_seen, version) != version {
                let waiting = self.queue.lock().tickets();
                *self.reconsidered.lock() = waiting.into();
            }
            if self.waiting() > 0
                && let Some(inbox) = self.first_inbox()
            {
                inbox.recheck();
            }
        }
    }

    fn refuse_expired(&self) {
        let now_ns = self.now_ns();
        while let Some(taken) = self.with(|queue| queue.next_expired(now_ns)) {
            self.counters.bump(QueueCounter::Expired);
            let waited_ms = now_ns.saturating_sub(taken.since_ns) / 1_000_000;
            if let Some(traced) = taken.what.traced {
                let prompt = (taken.what.space, taken.what.prompt_tokens);
                self.trace_refusal(traced, prompt, taken.since_ns, Kind::DeadlinePassed);
            }
            let error = Error::new(
                Kind::DeadlinePassed,
                format!("every worker was busy for {waited_ms} ms"),
                "ask again, with a later deadline_us, or add workers",
            );
            self.reply(taken.ticket, &taken.what, Err(error));
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

/// A request that a thread is deciding. If it is dropped unanswered, that thread panicked: the gateway gets an error.
pub(super) struct DispatchedRequest {
    queue: Arc<RequestQueue>,
    taken: Option<Dequeued<QueuedRequest>>,
}

/// What became of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    /// It is on its way.
    Sent,
    /// The connection has gone: the caller undoes the bookings.
    Unwanted,
}

impl DispatchedRequest {
    /// When the request was queued, nanoseconds since the daemon started.
    pub(super) fn since_ns(&self) -> u64 {
        self.taken.as_ref().map_or(0, |taken| taken.since_ns)
    }

    pub(super) fn queued(&self) -> Option<&QueuedRequest> {
        self.taken.as_ref().map(|taken| &taken.what)
    }

    /// Sends its outcome to the thread of its connection.
    pub(super) fn answer(mut self, outcome: Outcome) -> Delivery {
        let Some(taken) = self.taken.take() else { return Delivery::Unwanted };
        let now_ns = self.queue.now_ns();
        let is_unwanted = self.queue.with(|queue| {
            let is_unwanted = queue.finish(taken.ticket, now_ns);
            // Under the lock, as several serving threads answer requests that waited.
            if !is_unwanted {
                self.queue.waited.record(now_ns.saturating_sub(taken.since_ns) / 1000);
            }
            is_unwanted
        });
        if is_unwanted {
            self.queue.counters.bump(QueueCounter::Cancelled);
            return Delivery::Unwanted;
        }
        self.queue.counters.bump(QueueCounter::Woken);
        self.queue.reply(taken.ticket, &taken.what, outcome);
        Delivery::Sent
    }

    /// Queues it again, for one of `workers`: all are busy again. If this gives a ticket, the caller reads the loads of
    /// the workers once more.
    pub(super) fn put_back(mut self, workers: &[WorkerIndex]) -> Option<Ticket> {
        let taken = self.taken.take()?;
        let ticket = taken.ticket;
        self.queue.counters.bump(QueueCounter::PutBack);
        match self.queue.with(|queue| queue.put_back(taken, workers)) {
            Requeued::Waits => {
                // Its deadline may be the earliest, and `expire_and_recheck` may not know of it.
                self.queue.ends_sooner.notify_one();
                return Some(ticket);
            }
            Requeued::Cancelled(_) => self.queue.counters.bump(QueueCounter::Cancelled),
            Requeued::Closed(queued) => {
                self.queue.counters.bump(QueueCounter::Drained);
                self.queue.reply(ticket, &queued, Err(draining()));
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
            self.queue.reply(taken.ticket, &taken.what, Err(error));
        }
    }
}
