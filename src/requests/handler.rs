//! One serving thread's requests: each is answered by the [`Service`] and counted, and waits while every worker is
//! busy.

use std::fmt;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::request_queue::{
    BookedHandles, Delivery, DispatchedRequest, Outcome, PendingReply, QueueInbox, QueuedRequest, RequestQueue,
    booked_by,
};
use super::service::{Routed, Service};
use crate::error::{Error, Kind, Result};
use crate::ids::{CorrelationId, SpaceId, Worker, WorkerIndex};
use crate::limits::{QUEUE_RECHECKS_MAX, QUEUE_SERVED_PER_QUANTUM_MAX, WORK_PER_QUANTUM_MAX};
use crate::load::{BookingOutcome, BookingRef, EngineLoad, SessionId};
use crate::metrics::{CoreCounter, CounterSet, QueueCounter};
use crate::queue::{Claim, Ticket};
use crate::route::{Decision, MatchStatus, PotentialLoads, ReplyNotes, RouteRequest, Wait};

/// The asking connection, and the name of its request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Requester {
    pub(crate) connection: u64,
    pub(crate) session: SessionId,
    /// The user of the process that asks.
    pub(crate) uid: u32,
    pub(crate) id: CorrelationId,
}

/// A route request in the form in which it came. The queue keeps it so, and reads it each time it is decided.
pub(crate) trait KeptRequest: fmt::Debug + Send {
    /// Its memory.
    fn bytes(&self) -> usize;

    /// Calls `decide` once with the request.
    ///
    /// # Errors
    /// The form holds no route request; `decide` was not called.
    fn read(&self, decide: &mut dyn FnMut(&RouteRequest<'_>)) -> Result<()>;
}

/// When a request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replied {
    /// At once.
    Now,
    /// Once a worker has room, by a [`PendingReply`].
    Later,
}

/// Answers one serving thread's requests. What it needs for each is reused for the next.
#[derive(Debug)]
pub(crate) struct RequestHandler<S> {
    service: S,
    counters: Arc<CounterSet<CoreCounter>>,
    decision: Decision,
    potential: PotentialLoads,
    /// Work done and not yet charged to a connection's quantum.
    work: u64,
    /// The thread's end of the queue; `None` = no request waits.
    queue: Option<CoreQueue>,
}

/// One serving thread's end of the queue.
#[derive(Debug)]
struct CoreQueue {
    queue: Arc<RequestQueue>,
    core: usize,
    /// Gets a message for work that this thread leaves to a later quantum.
    inbox: Arc<QueueInbox>,
    /// The queued requests of each connection.
    tickets: FxHashMap<u64, FxHashSet<Ticket>>,
}

impl CoreQueue {
    fn forget(&mut self, connection: u64, ticket: Ticket) {
        if let Some(tickets) = self.tickets.get_mut(&connection) {
            tickets.remove(&ticket);
            if tickets.is_empty() {
                self.tickets.remove(&connection);
            }
        }
    }
}

impl<S: Service> RequestHandler<S> {
    /// A handler whose requests do not wait.
    pub(crate) fn new(service: S, counters: Arc<CounterSet<CoreCounter>>) -> Self {
        let (decision, potential) = (Decision::default(), PotentialLoads::default());
        Self { service, counters, decision, potential, work: 0, queue: None }
    }

    /// The same handler for serving thread number `core`, whose messages go to `inbox`. Its requests may wait if the
    /// service has a queue.
    pub(crate) fn on_core(mut self, core: usize, inbox: &Arc<QueueInbox>) -> Self {
        self.queue = self.service.request_queue().map(|queue| {
            queue.open_core(core, inbox);
            CoreQueue { queue, core, inbox: Arc::clone(inbox), tickets: FxHashMap::default() }
        });
        self
    }

    pub(crate) const fn service(&self) -> &S {
        &self.service
    }

    pub(crate) const fn service_mut(&mut self) -> &mut S {
        &mut self.service
    }

    pub(crate) fn counters(&self) -> &CounterSet<CoreCounter> {
        &self.counters
    }

    /// See [`Service::begin_batch`].
    pub(crate) fn begin_batch(&mut self) {
        self.service.begin_batch();
    }

    /// See [`Service::end_batch`].
    pub(crate) fn end_batch(&mut self) {
        self.service.end_batch();
    }

    /// The last decision, or the last overlaps.
    pub(crate) const fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Takes the last decision, or the last overlaps.
    pub(crate) fn take_decision(&mut self) -> Decision {
        self.decision.take()
    }

    /// All work that has not been charged to a quantum.
    fn gather_work(&mut self) -> u64 {
        self.work += self.service.take_work();
        self.work
    }

    /// Takes that work.
    pub(crate) fn take_work(&mut self) -> u64 {
        self.gather_work();
        std::mem::take(&mut self.work)
    }

    /// Counts a request that got an error.
    pub(crate) fn count_error(&self, error: &Error) {
        self.counters.bump(CoreCounter::Errors);
        if error.kind() == Kind::SchemeMismatch {
            self.counters.bump(CoreCounter::RequestsSchemeMismatch);
        }
        tracing::debug!(%error, "a request is refused");
    }

    fn count_outcome(&self, outcome: BookingOutcome) {
        if outcome == BookingOutcome::Unknown {
            self.counters.bump(CoreCounter::BookingsUnknown);
        }
    }

    /// Decides a route request, and books it if it says so. If every worker is busy the request waits, in the form that
    /// `keep` gives.
    pub(crate) fn route(
        &mut self,
        from: &Requester,
        request: &RouteRequest<'_>,
        keep: impl FnOnce() -> Box<dyn KeptRequest>,
    ) -> Result<Replied> {
        match self.decide(from.session, request)? {
            Routed::Decided => Ok(Replied::Now),
            Routed::Busy(wait) => self.enqueue(from, request, &wait, keep).map(|()| Replied::Later),
        }
    }

    /// Decides and counts.
    fn decide(&mut self, session: SessionId, request: &RouteRequest<'_>) -> Result<Routed> {
        if let busy @ Routed::Busy(_) = self.service.route(session, request, &mut self.decision)? {
            return Ok(busy);
        }
        let (decision, counters) = (&self.decision, &self.counters);
        counters.bump(CoreCounter::Routes);
        counters.add(CoreCounter::RequestBlocks, u64::from(decision.request_blocks));
        match decision.candidates.first() {
            Some(chosen) => counters.add(CoreCounter::ChosenOverlapBlocks, u64::from(chosen.overlap.total())),
            None => counters.bump(CoreCounter::RoutesNobody),
        }
        if decision.booking.is_some() {
            counters.bump(CoreCounter::Bookings);
        }
        if decision.no_worker.is_some() || decision.notes != ReplyNotes::default() || decision.prefill.is_some() {
            self.count_remarks();
        }
        if decision.matched == MatchStatus::Unmatchable {
            counters.bump(CoreCounter::RoutesUnmatchable);
        }
        Ok(Routed::Decided)
    }

    /// Counts what most decisions do not have.
    #[cold]
    fn count_remarks(&self) {
        let (decision, no_worker) = (&self.decision, self.decision.no_worker);
        let seen = [
            (CoreCounter::RoutesPinnedNotAllowed, no_worker == Some(Kind::PinnedNotAllowed)),
            (CoreCounter::RoutesPinnedBusy, no_worker == Some(Kind::PinnedBusy)),
            (CoreCounter::RoutesAllBusy, no_worker == Some(Kind::AllBusy)),
            (CoreCounter::RoutesAllFiltered, no_worker == Some(Kind::AllFiltered)),
            (CoreCounter::RoutesNobodyAvailable, no_worker == Some(Kind::NobodyAvailable)),
            (CoreCounter::RoutesSchemeUnknown, decision.notes.contains(ReplyNotes::SCHEME_UNKNOWN)),
            (CoreCounter::RoutesAllDown, decision.notes.contains(ReplyNotes::ALL_DOWN)),
            (CoreCounter::RoutesContended, decision.notes.contains(ReplyNotes::READ_CONTENDED)),
            (CoreCounter::Bookings, decision.prefill.as_ref().is_some_and(|prefill| prefill.booking.is_some())),
        ];
        seen.iter().filter(|(_, is_so)| *is_so).for_each(|(counter, _)| self.counters.bump(*counter));
    }

    /// What every eligible worker holds of a prompt, as the candidates of a decision.
    pub(crate) fn overlap(&mut self, session: SessionId, request: &RouteRequest<'_>) -> Result<&Decision> {
        self.service.overlap(session, request, &mut self.decision)?;
        Ok(&self.decision)
    }

    /// The load that every worker would have if it took a prompt.
    pub(crate) fn potential_loads(&mut self, request: &RouteRequest<'_>) -> Result<&PotentialLoads> {
        self.service.potential_loads(request, &mut self.potential)?;
        Ok(&self.potential)
    }

    pub(crate) fn report_load(
        &mut self,
        session: SessionId,
        space: SpaceId,
        worker: Worker,
        load: EngineLoad,
    ) -> Result<bool> {
        let accepted = self.service.report_load(session, space, worker, load)?;
        self.counters.bump(CoreCounter::LoadsReported);
        Ok(accepted)
    }

    pub(crate) fn report_failure(
        &mut self,
        session: SessionId,
        space: SpaceId,
        worker: Worker,
        reason: &str,
    ) -> Result<u32> {
        let back_off_ms = self.service.report_failure(session, space, worker, reason)?;
        self.counters.bump(CoreCounter::FailuresReported);
        Ok(back_off_ms)
    }
}

/// Bookings, after their decision.
impl<S: Service> RequestHandler<S> {
    pub(crate) fn prefill_complete(
        &mut self,
        session: SessionId,
        booking: &BookingRef<'_>,
        prefill_us: u64,
    ) -> Result<BookingOutcome> {
        let worker = self.worker_to_free(session, booking);
        let outcome = self.service.prefill_complete(session, booking, prefill_us)?;
        self.count_outcome(outcome);
        if outcome == BookingOutcome::Applied {
            self.counters.bump(CoreCounter::PrefillsReported);
        }
        self.on_room(worker);
        Ok(outcome)
    }

    pub(crate) fn output_progress(
        &mut self,
        session: SessionId,
        booking: &BookingRef<'_>,
        output_tokens: u32,
    ) -> Result<BookingOutcome> {
        let outcome = self.service.output_progress(session, booking, output_tokens)?;
        self.count_outcome(outcome);
        Ok(outcome)
    }

    pub(crate) fn served(
        &mut self,
        session: SessionId,
        booking: &BookingRef<'_>,
        worker: Worker,
    ) -> Result<BookingOutcome> {
        let left = self.worker_to_free(session, booking);
        let outcome = self.service.served(session, booking, worker)?;
        self.count_outcome(outcome);
        if outcome == BookingOutcome::Applied {
            self.counters.bump(CoreCounter::BookingsMoved);
        }
        self.on_room(left);
        Ok(outcome)
    }

    pub(crate) fn free(&mut self, session: SessionId, booking: &BookingRef<'_>) -> Result<BookingOutcome> {
        let worker = self.worker_to_free(session, booking);
        let outcome = self.service.free(session, booking)?;
        self.count_outcome(outcome);
        if outcome == BookingOutcome::Applied {
            self.counters.bump(CoreCounter::BookingsFreed);
        }
        self.on_room(worker);
        Ok(outcome)
    }

    /// The worker whose load is about to fall, if a request waits that may use it.
    fn worker_to_free(&self, session: SessionId, booking: &BookingRef<'_>) -> Option<WorkerIndex> {
        let is_awaited = self.queue.as_ref().is_some_and(|own| own.queue.waiting() > 0);
        if is_awaited { self.service.booked_worker(session, booking) } else { None }
    }

    /// A load has fallen, that of `worker` if it is known: dispatches if a request waits.
    fn on_room(&mut self, worker: Option<WorkerIndex>) {
        if self.queue.as_ref().is_some_and(|own| own.queue.is_awaited()) {
            self.dispatch_queued(worker);
        }
    }
}

/// Requests that wait while every worker is busy.
impl<S: Service> RequestHandler<S> {
    /// Whether a reply to one of the thread's requests is still to come.
    pub(crate) fn has_queued(&self) -> bool {
        self.queue.as_ref().is_some_and(|own| !own.tickets.is_empty())
    }

    /// Refuses the queued requests of all threads, and those to come: the daemon drains.
    pub(crate) fn drain_queue(&self) {
        if let Some(own) = &self.queue {
            own.queue.drain();
        }
    }

    fn enqueue(
        &mut self,
        from: &Requester,
        request: &RouteRequest<'_>,
        wait: &Wait,
        keep: impl FnOnce() -> Box<dyn KeptRequest>,
    ) -> Result<()> {
        let Some(own) = &mut self.queue else {
            return Err(Error::new(Kind::AllBusy, "every worker is busy, and requests do not wait here", "ask again"));
        };
        let Requester { connection, session, uid, id } = *from;
        let (kept, traced) = (keep(), self.service.traced());
        let bytes = kept.bytes() + size_of::<QueuedRequest>() + size_of_val(wait.workers.as_slice());
        let queued = QueuedRequest {
            core: own.core,
            connection,
            session,
            id,
            uid,
            reservations: None,
            space: request.space,
            prompt_tokens: request.prompt.token_count() as u64,
            traced,
            explain: request.explain,
            request: kept,
        };
        let claim = Claim { bytes, user: uid, ..wait.claim };
        let ticket = own.queue.enqueue(&claim, &wait.workers, queued).inspect_err(|error| {
            if let Some(traced) = traced {
                let prompt = (request.space, request.prompt.token_count() as u64);
                own.queue.trace_refusal(traced, prompt, own.queue.now_ns(), error.kind());
            }
        })?;
        own.tickets.entry(connection).or_default().insert(ticket);
        self.recheck_loads(ticket, wait.workers.clone());
        Ok(())
    }

    /// Reads the loads of the workers of a request that was queued just now. If one of them has room, the thread that
    /// made that room may not have seen the request, and it is decided here.
    fn recheck_loads(&mut self, ticket: Ticket, workers: Vec<WorkerIndex>) {
        let mut waiting = (ticket, workers);
        for _ in 0..QUEUE_RECHECKS_MAX {
            let (ticket, workers) = &waiting;
            if !workers.iter().any(|worker| self.service.has_room(*worker)) {
                return;
            }
            let Some(own) = &self.queue else { return };
            let Some(dispatched) = own.queue.take_back(*ticket) else { return };
            match self.decide_queued(dispatched) {
                Some(again) => waiting = again,
                None => return,
            }
        }
        // Loads change faster than they are read: other connections first.
        if let Some(own) = &self.queue {
            own.inbox.dispatch();
        }
    }

    /// Checks the queue for capacity that no thread reported. The requests that it dispatches are counted, unless the
    /// fleet has changed, because then all requests are decided again.
    pub(crate) fn recheck_queue(&mut self) {
        let Some(own) = &self.queue else { return };
        let (queue, reconsiders) = (Arc::clone(&own.queue), own.queue.reconsiders());
        let answered = self.dispatch_queued(None);
        if !reconsiders {
            queue.counters().add(QueueCounter::FoundByLook, answered as u64);
        }
    }

    /// Decides queued requests that find room, with `worker` or with any worker. Does a bounded number of requests and
    /// of work, and leaves the rest to a later quantum. Returns how many requests it answered.
    pub(crate) fn dispatch_queued(&mut self, worker: Option<WorkerIndex>) -> usize {
        let (mut answered, begun_at) = (0, self.gather_work());
        for _ in 0..QUEUE_SERVED_PER_QUANTUM_MAX {
            if self.gather_work() - begun_at >= WORK_PER_QUANTUM_MAX {
                self.counters.bump(CoreCounter::TurnsEndedByWork);
                break;
            }
            let (Some(own), service) = (&self.queue, &self.service) else { return answered };
            if worker.is_some_and(|worker| !service.has_room(worker)) {
                return answered;
            }
            let mut seen = FxHashMap::default();
            let has_room = |worker| *seen.entry(worker).or_insert_with(|| service.has_room(worker));
            let Some(dispatched) = own.queue.next(worker, has_room) else { return answered };
            if let Some((ticket, workers)) = self.decide_queued(dispatched) {
                self.recheck_loads(ticket, workers);
                // It waits for other workers now, or the room has gone again. The requests behind it get their check.
                if worker.is_some() {
                    return answered;
                }
            } else {
                answered += 1;
            }
        }
        // A quantum without an answer is not followed by another at once, unless requests are to be decided again
        // anyhow.
        if let Some(own) = self.queue.as_ref().filter(|own| answered > 0 || own.queue.reconsiders()) {
            own.inbox.dispatch();
        }
        answered
    }

    /// Decides a dispatched request and answers it. If all its workers are busy again it is queued again, and returned.
    fn decide_queued(&mut self, dispatched: DispatchedRequest) -> Option<(Ticket, Vec<WorkerIndex>)> {
        let queued = dispatched.queued()?;
        let (session, mut decided) = (queued.session, None);
        self.service.waited_since(dispatched.since_ns());
        let read = queued.request.read(&mut |request| decided = Some(self.decide(session, request)));
        let unread = || Err(Error::new(Kind::Internal, "the queued request is no route request", "report it"));
        let outcome: Outcome = match read.and_then(|()| decided.unwrap_or_else(unread)) {
            Ok(Routed::Busy(wait)) => return dispatched.put_back(&wait.workers).map(|ticket| (ticket, wait.workers)),
            Ok(Routed::Decided) => Ok(Box::new(self.take_decision())),
            Err(error) => {
                self.count_error(&error);
                Err(error)
            }
        };
        let booked = outcome.as_ref().map_or_else(|_| BookedHandles::default(), |decision| booked_by(decision));
        if dispatched.answer(outcome) == Delivery::Unwanted {
            self.free_undelivered(session, booked);
        }
        None
    }

    /// A reply has come for a connection, which may have gone.
    pub(crate) fn forget_queued(&mut self, reply: &PendingReply) {
        if let Some(own) = &mut self.queue {
            own.forget(reply.connection, reply.ticket);
        }
    }

    /// Counts a connection that is closed because it does not read the replies to its queued requests.
    pub(crate) fn count_unread(&self) {
        if let Some(own) = &self.queue {
            own.queue.counters().bump(QueueCounter::RepliesUnread);
        }
    }

    /// Frees the bookings of a reply that could not be delivered.
    pub(crate) fn free_undelivered(&mut self, session: SessionId, booked: BookedHandles) {
        let Some(own) = self.queue.as_ref().filter(|_| booked != BookedHandles::default()) else { return };
        own.queue.counters().bump(QueueCounter::Undelivered);
        for handle in booked.into_iter().flatten() {
            if let Err(error) = self.service.free(session, &BookingRef::Handle(handle)) {
                tracing::warn!(%error, "a booking of a connection that has gone stays until it expires");
            }
        }
        // In a later quantum: the caller may be dispatching.
        own.inbox.dispatch();
    }

    /// Drops the queued requests of a connection that has gone.
    pub(crate) fn cancel_queued(&mut self, connection: u64) {
        let Some(own) = &mut self.queue else { return };
        for ticket in own.tickets.remove(&connection).unwrap_or_default() {
            own.queue.cancel(ticket);
        }
    }
}
