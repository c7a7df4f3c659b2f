//! The HTTP port's gateway: it turns requests that came by HTTP into requests of [`requests`](crate::requests), in the
//! daemon's own process. All bookings belong to one session, which ends with the daemon.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::oneshot;

use super::prompt::{PromptFields, RequestBuilder};
use super::reply::Refusal;
use crate::error::{Error, Kind, Result};
use crate::ids::{CorrelationId, Scheme, SpaceId, Worker};
use crate::limits::CANDIDATES_MAX;
use crate::load::{BookingOutcome, BookingRef, SessionId};
use crate::metrics::{CoreCounter, CounterSet, HttpCounter};
use crate::requests::{
    KeptRequest, Outcome, QueueInbox, QueueMessage, Replied, RequestHandler, Requester, RoutingService, Service as _,
    booked_by,
};
use crate::route::{Decision, PotentialLoad, RouteRequest, Rule, Scored};
use crate::shares::HTTP_USER;
use crate::wire::{RouteReply, check_request, retry_after_us};

/// A selection that a client asks for. It owns all of it, so that it can wait for a worker.
#[derive(Clone, Debug)]
pub(super) struct SelectionRequest {
    pub(super) fields: Arc<PromptFields>,
    pub(super) space: SpaceId,
    pub(super) scheme: Scheme,
    /// The name of the booking to make; `None` = make none.
    pub(super) book: Option<String>,
    /// The only worker that may be chosen, in place of those that the fields name.
    pub(super) pin: Option<Worker>,
}

impl KeptRequest for SelectionRequest {
    fn bytes(&self) -> usize {
        self.fields.bytes() + self.book.as_ref().map_or(0, String::len) + size_of::<Self>()
    }

    fn read(&self, decide: &mut dyn FnMut(&RouteRequest<'_>)) -> Result<()> {
        let builder = RequestBuilder::of(&self.fields, self.scheme).map_err(Refusal::into_error)?;
        decide(&builder.request(self.space, self.book.as_deref(), self.pin));
        Ok(())
    }
}

/// The gateway of one HTTP port. Only that port's thread uses it, so its locks are free whenever they are taken. No
/// lock is held across an await.
pub(super) struct Gateway {
    handler: Mutex<RequestHandler<RoutingService>>,
    inbox: Arc<QueueInbox>,
    /// The selections that wait for a worker, by the number of their connection: each selection counts as one.
    waiting: Mutex<FxHashMap<u64, oneshot::Sender<Outcome>>>,
    next_connection: AtomicU64,
    session: SessionId,
    core_counters: Arc<CounterSet<CoreCounter>>,
    counters: Arc<CounterSet<HttpCounter>>,
}

impl Gateway {
    /// Opens a session with `service`, as thread number `core` of those that decide.
    ///
    /// # Errors
    /// The service opens no session.
    pub(super) fn open(
        mut service: RoutingService,
        core: usize,
        core_counters: Arc<CounterSet<CoreCounter>>,
        counters: Arc<CounterSet<HttpCounter>>,
    ) -> Result<Self> {
        let inbox = Arc::<QueueInbox>::default();
        let session = service.session_opened(None, HTTP_USER)?;
        let handler = RequestHandler::new(service, Arc::clone(&core_counters)).on_core(core, &inbox);
        Ok(Self {
            handler: Mutex::new(handler),
            inbox,
            waiting: Mutex::default(),
            next_connection: AtomicU64::new(1),
            session,
            core_counters,
            counters,
        })
    }

    /// Decides a selection, and books it if it says so. Waits if every worker is busy. If the caller drops the future,
    /// nothing stays booked.
    pub(super) async fn select(&self, asked: &SelectionRequest) -> Result<Box<Decision>, Refusal> {
        let builder = RequestBuilder::of(&asked.fields, asked.scheme)?;
        let request = builder.request(asked.space, asked.book.as_deref(), asked.pin);
        // Relaxed: the number orders nothing.
        let connection = self.next_connection.fetch_add(1, Ordering::Relaxed);
        let (send, outcome) = oneshot::channel();
        self.waiting.lock().insert(connection, send);
        let mut pending = PendingSelection { gateway: self, connection, outcome, is_answered: false };
        let from = Requester { connection, session: self.session, uid: HTTP_USER, id: CorrelationId(0) };
        let replied = {
            let mut handler = self.handler.lock();
            let replied = check_request(&request)
                .and_then(|()| handler.route(&from, &request, || Box::new(asked.clone())))
                .inspect_err(|error| handler.count_error(error));
            replied.map(|replied| (replied == Replied::Now).then(|| Box::new(handler.take_decision())))
        };
        let outcome = match replied {
            Ok(None) => (&mut pending.outcome).await.unwrap_or_else(|_| Err(unanswered())),
            Ok(Some(decision)) => {
                self.core_counters.bump(CoreCounter::Requests);
                Ok(decision)
            }
            Err(error) => {
                self.core_counters.bump(CoreCounter::Requests);
                Err(error)
            }
        };
        pending.is_answered = true;
        let decision = outcome.map_err(with_retry_after)?;
        if decision.candidates.is_empty() { Err(no_worker(&decision).into()) } else { Ok(decision) }
    }

    /// The overlaps of all workers with a prompt.
    pub(super) fn overlaps(&self, question: &RouteRequest<'_>) -> Result<Vec<Scored>> {
        let question = RouteRequest { candidates_max: CANDIDATES_MAX, ..*question };
        self.call(|handler, session| {
            check_request(&question)?;
            handler.overlap(session, &question)?;
            Ok(handler.take_decision().candidates)
        })
    }

    /// The load that each worker would have if it took a prompt.
    pub(super) fn potential_loads(&self, question: &RouteRequest<'_>) -> Result<Vec<PotentialLoad>> {
        self.call(|handler, _| {
            check_request(question)?;
            Ok(handler.potential_loads(question)?.workers.clone())
        })
    }

    /// The prefill of a booking is done.
    pub(super) fn prefill_complete(&self, booking: &BookingRef<'_>) -> Result<BookingOutcome> {
        self.call(|handler, session| handler.prefill_complete(session, booking, 0))
    }

    /// A booking has produced `output_tokens` so far.
    pub(super) fn output_progress(&self, booking: &BookingRef<'_>, output_tokens: u32) -> Result<BookingOutcome> {
        self.call(|handler, session| handler.output_progress(session, booking, output_tokens))
    }

    /// A booking is done.
    pub(super) fn free(&self, booking: &BookingRef<'_>) -> Result<BookingOutcome> {
        self.call(|handler, session| handler.free(session, booking))
    }

    /// The output tokens known of a live booking, and the tokens of a block; 0 = output is not counted.
    pub(super) fn output(&self, booking: &BookingRef<'_>) -> Option<(u32, u32)> {
        self.handler.lock().service().booked_output(self.session, booking)
    }

    /// Makes one request that does not wait, and counts it.
    fn call<T>(&self, act: impl FnOnce(&mut RequestHandler<RoutingService>, SessionId) -> Result<T>) -> Result<T> {
        let mut handler = self.handler.lock();
        self.core_counters.bump(CoreCounter::Requests);
        act(&mut handler, self.session).inspect_err(|error| handler.count_error(error)).map_err(with_retry_after)
    }

    /// Passes on the replies to selections that waited, and dispatches when asked to, for ever.
    pub(super) async fn serve_queue(&self) {
        loop {
            while let Some(message) = self.inbox.pop() {
                self.take(message);
                tokio::task::yield_now().await;
            }
            self.inbox.arrived.notified().await;
        }
    }

    /// Refuses the queued requests of all threads: the daemon drains.
    pub(super) fn drain(&self) {
        self.handler.lock().drain_queue();
    }

    fn take(&self, message: QueueMessage) {
        let mut handler = self.handler.lock();
        match message {
            QueueMessage::Dispatch => drop(handler.dispatch_queued(None)),
            QueueMessage::Recheck => handler.recheck_queue(),
            QueueMessage::Reply(reply) => {
                handler.forget_queued(&reply);
                let (session, booked) = (reply.session, reply.booked());
                let waiting = self.waiting.lock().remove(&reply.connection);
                match waiting.map(|waiting| waiting.send(reply.outcome)) {
                    Some(Ok(())) => self.core_counters.bump(CoreCounter::Requests),
                    Some(Err(_)) | None => handler.free_undelivered(session, booked),
                }
            }
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.handler.get_mut().service_mut().session_closed(self.session);
    }
}

/// A selection that is not answered yet.
struct PendingSelection<'a> {
    gateway: &'a Gateway,
    connection: u64,
    outcome: oneshot::Receiver<Outcome>,
    is_answered: bool,
}

impl Drop for PendingSelection<'_> {
    fn drop(&mut self) {
        self.gateway.waiting.lock().remove(&self.connection);
        if self.is_answered {
            return;
        }
        let mut handler = self.gateway.handler.lock();
        handler.cancel_queued(self.connection);
        self.gateway.counters.bump(HttpCounter::Unwanted);
        // It was decided, and its client has gone.
        if let Ok(Ok(decision)) = self.outcome.try_recv() {
            handler.free_undelivered(self.gateway.session, booked_by(&decision));
        }
    }
}

/// An error with the pause after which it makes sense to ask again.
fn with_retry_after(error: Error) -> Error {
    match (error.retry_after(), retry_after_us(error.kind())) {
        (None, us) if us > 0 => error.retry_after_us(us),
        _ => error,
    }
}

/// Why a decision has no candidate, with the workers that each rule removed.
fn no_worker(decision: &Decision) -> Error {
    let removed_by = |rule: &Rule| {
        let workers = decision.removed.iter().filter(|(by, _)| by == rule).map(|(_, worker)| *worker).collect();
        (rule.name().to_owned(), workers)
    };
    let removed: Vec<(String, Vec<Worker>)> = Rule::ALL.iter().map(removed_by).collect();
    let removed = removed.into_iter().filter(|(_, workers)| !workers.is_empty()).collect();
    let no_worker_code = decision.no_worker.unwrap_or(Kind::NobodyAvailable) as u16;
    let reply = RouteReply { nobody: no_worker_code, removed, ..RouteReply::default() };
    with_retry_after(reply.chosen().err().unwrap_or_else(unanswered))
}

/// A fault of the daemon.
pub(super) fn unanswered() -> Error {
    Error::new(Kind::Internal, "the request was not answered as it should be", "report it with the log's last lines")
}
