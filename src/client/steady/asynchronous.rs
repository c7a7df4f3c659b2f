//! The client for gateways on tokio.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::AbortHandle;

use super::asking::{self, Failure};
use super::driver::{self, Shared};
use super::options::SteadyOptions;
use super::prompt::{Hashed, PutPrompt, Question};
use super::{Answer, spaces, unexpected};
use crate::client::conversation::{Booking, ClientCounter, Conversation, Name, Phase, Refusal, Report, Told, Word};
use crate::client::fallback::{Fallback, FallbackReason, Fleet, rank};
use crate::error::{Error, Kind, Result};
use crate::ids::Worker;
use crate::limits::CLIENT_QUEUE_SHARE_PERCENT;
use crate::protocol::{BookingOutcome, PoolRole, Prompt, RouteRequest, SessionToken};
use crate::wire::{Reply, SpaceInfo, features};

/// Ends the task with the last handle.
struct Task(AbortHandle);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A daemon, for all the tasks of a gateway: clones share one connection, on which any number of requests are in flight
/// and replies come in any order. It is made beside requests, again when it breaks, and further and further apart while
/// nobody answers.
///
/// One connection is served by one of the daemon's cores: a gateway that needs more of them makes several clients, which
/// share their bookings where they share a [session](SteadyOptions::session).
///
/// Every call ends within [`SteadyOptions::timeout`]. It may be dropped at any time: what a call that nobody waits for any
/// more has booked is given back, and what was to be said of a booking is said nevertheless.
///
/// Ids of spaces are the client's own: they stay when the daemon starts again with others.
///
/// ```no_run
/// use kvrouted::client::{Answer, AsyncClient, BookingRequest, Prompt, RouteRequest, SteadyOptions};
///
/// # async fn complete(tokens: &[u32]) -> kvrouted::error::Result<()> {
/// let options = SteadyOptions { name: "my-gateway".into(), ..SteadyOptions::default() };
/// let client = AsyncClient::new("/run/kvrouted/kvrouted.sock", options);
/// client.connected().await?;
/// let space = client.space("example-model", None, None)?.id;
///
/// let book = Some(BookingRequest { request_id: "request-1", attempt: 0 });
/// let answer = client.route(&RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(tokens)) }).await?;
/// if let Answer::Fallback(alone) = &answer {
///     eprintln!("decided without the daemon: {}", alone.why.name());
/// }
/// if let Some(worker) = answer.best() {
///     println!("send the prompt to worker {worker}");
/// }
/// if let Some(booking) = answer.booking() {
///     client.prefill_complete(booking, 0).await?; // when its first token comes
///     client.free(booking).await?; // when it has ended, however it ended
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct AsyncClient {
    shared: Arc<Shared>,
    task: Arc<Task>,
}

impl std::fmt::Debug for AsyncClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AsyncClient").field("path", &self.shared.path).finish_non_exhaustive()
    }
}

impl AsyncClient {
    /// A client of the daemon at the socket `path`, which need not be there yet. To be called within a tokio runtime with
    /// its io and time drivers, where its task runs until the last clone is dropped.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, options: SteadyOptions) -> Self {
        let session = options.session.unwrap_or_else(|| SessionToken { hi: rand::random(), lo: rand::random() });
        let shared = Arc::new(Shared {
            path: path.into(),
            session,
            conversation: Mutex::new(Conversation::new(options.back_off)),
            lane: Mutex::new(None),
            wake: Notify::new(),
            places: Arc::new(Semaphore::new(options.in_flight_max.clamp(1, Semaphore::MAX_PERMITS))),
            phases: watch::Sender::new(Phase::Connecting { is_first: true }),
            fleets: watch::Sender::new(Arc::default()),
            options,
        });
        let task = tokio::spawn(driver::drive(Arc::clone(&shared))).abort_handle();
        Self { shared, task: Arc::new(Task(task)) }
    }

    /// Waits until the daemon can be asked and, if this client may decide alone, its workers are known.
    ///
    /// # Errors
    /// [`Kind::Connection`] if it is not there within the timeout, or its own word why it takes no connection.
    pub async fn connected(&self) -> Result<()> {
        let deadline = self.deadline();
        asking::connected(&self.shared, deadline).await?;
        let has_fleet = |conversation: &Conversation<_>| {
            let watches = conversation.hello.as_ref().is_some_and(|hello| hello.features & features::WATCH != 0);
            !watches || conversation.fleet.version > 0
        };
        if !self.shared.options.fallback || has_fleet(&self.shared.conversation.lock()) {
            return Ok(());
        }
        let mut fleets = self.fleet();
        let learnt = fleets.wait_for(|fleet| fleet.version > 0);
        match tokio::time::timeout_at(deadline.into(), learnt).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(Failure::Unreachable(FallbackReason::Silent).into()),
        }
    }

    /// What this client's connections are known by; for the options of another that shares its bookings.
    #[must_use]
    pub fn session(&self) -> SessionToken {
        self.shared.session
    }

    /// Who there is, as the daemon last told, and again after each change. Also what decisions without it are made from.
    #[must_use]
    pub fn fleet(&self) -> watch::Receiver<Arc<Fleet>> {
        self.shared.fleets.subscribe()
    }

    /// Whether requests and replies go by a lane now.
    #[must_use]
    pub fn has_lane(&self) -> bool {
        self.shared.lane.lock().is_some()
    }

    /// Why they go by the socket though a lane was to be tried.
    #[must_use]
    pub fn lane_refusal(&self) -> Option<Error> {
        self.shared.conversation.lock().lane_refusal.as_ref().map(Refusal::error)
    }

    /// Since the client was made.
    #[must_use]
    pub fn counter(&self, counter: ClientCounter) -> u64 {
        self.shared.conversation.lock().counters[counter as usize]
    }

    /// The spaces of the daemon, or of the last one.
    #[must_use]
    pub fn spaces(&self) -> Vec<SpaceInfo> {
        self.shared.conversation.lock().spaces.infos().cloned().collect()
    }

    /// The space of `model`, in `namespace` and of `role` where they are given. Known once [`AsyncClient::connected`] is.
    ///
    /// # Errors
    /// [`Kind::UnknownSpace`] with the models there are, or if more than one space fits.
    pub fn space(&self, model: &str, namespace: Option<&str>, role: Option<PoolRole>) -> Result<SpaceInfo> {
        spaces::find(self.shared.conversation.lock().spaces.infos(), model, namespace, role).cloned()
    }

    /// Asks which worker should run a prompt. Where no daemon answers in time the client decides alone, if its options
    /// allow it and it knows somebody; the answer says who decided.
    ///
    /// # Errors
    /// The daemon's refusals; [`Kind::Connection`] where nobody could decide.
    pub async fn route(&self, request: &RouteRequest<'_>) -> Result<Answer> {
        let failure = match self.ask_route(request).await {
            Ok(answer) => return Ok(answer),
            Err(failure) => failure,
        };
        let why = match &failure {
            Failure::Unreachable(why) => *why,
            Failure::NotConnected(_) => FallbackReason::Unreachable,
            Failure::Refused(error) if error.kind() == Kind::Draining => FallbackReason::Draining,
            Failure::Refused(_) => return Err(failure.into()),
        };
        let options = &self.shared.options;
        let mut conversation = self.shared.conversation.lock();
        let (workers, all_down) = match options.fallback {
            true => rank(&conversation.fleet, request, options.fallback_prefix_tokens),
            false => (Vec::new(), false),
        };
        if workers.is_empty() {
            return Err(failure.into());
        }
        conversation.count(match why {
            FallbackReason::Unreachable => ClientCounter::FallbackUnreachable,
            FallbackReason::ConnectionLost => ClientCounter::FallbackConnectionLost,
            FallbackReason::Silent => ClientCounter::FallbackSilent,
            FallbackReason::Draining => ClientCounter::FallbackDraining,
        });
        let since = conversation.silence.since().unwrap_or_else(Instant::now);
        Ok(Answer::Fallback(Fallback { workers, all_down, why, since }))
    }

    async fn ask_route(&self, request: &RouteRequest<'_>) -> Result<Answer, Failure> {
        let Told { reply, instance_id } = self.ask_prompt(Question::Route, request).await?;
        match reply {
            Reply::Route(reply) => Ok(Answer::Daemon { reply: Box::new(reply), instance_id }),
            other => Err(unexpected("route", &other).into()),
        }
    }

    /// Asks about a prompt, hashed here where that is wanted, and as tokens where the daemon refuses its hashes.
    pub(super) async fn ask_prompt(&self, question: Question, request: &RouteRequest<'_>) -> Result<Told, Failure> {
        let deadline = self.deadline();
        let put = || {
            let (space, scheme, waits) = {
                let conversation = self.shared.conversation.lock();
                let spaces = &conversation.spaces;
                let waits = conversation.hello.as_ref().is_some_and(|hello| hello.features & features::QUEUE != 0);
                (spaces.theirs(request.space)?, spaces.scheme_to_hash_by(request.space), waits)
            };
            let scheme = scheme.filter(|_| self.shared.options.hash_locally);
            let hashed = scheme.and_then(|scheme| Hashed::of(request, scheme));
            let mut request = *request;
            if waits && request.book.is_some() && request.deadline_us == 0 {
                request.deadline_us = queue_us(deadline);
            }
            Ok(PutPrompt { question, request, space, hashed })
        };
        match asking::ask(&self.shared, deadline, put).await {
            Err(Failure::Refused(error)) if self.hashes_refused(&error, request) => {
                asking::ask(&self.shared, deadline, put).await
            }
            other => other,
        }
    }

    /// Whether a request failed because it was hashed here: it is hashed by the daemon from now on.
    fn hashes_refused(&self, error: &Error, request: &RouteRequest<'_>) -> bool {
        if error.kind() != Kind::SchemeMismatch || !matches!(request.prompt, Prompt::Tokens(_)) {
            return false;
        }
        let mut conversation = self.shared.conversation.lock();
        let was_hashed = conversation.spaces.scheme_to_hash_by(request.space).is_some();
        if was_hashed {
            conversation.spaces.hashes_were_refused(request.space);
            conversation.count(ClientCounter::HashesRefused);
        }
        was_hashed
    }

    /// Reports that a booked request's prompt is computed, in so many microseconds; 0 = not said.
    ///
    /// This and the other reports answer with what became of the booking, or with `None` where that will be said only when
    /// the daemon can be reached again.
    ///
    /// # Errors
    /// The daemon's refusals.
    pub async fn prefill_complete(&self, booking: Booking, prefill_us: u64) -> Result<Option<BookingOutcome>> {
        self.tell(booking, Word::PrefillComplete { prefill_us }).await
    }

    /// Reports how many tokens a booked request has put out so far, all of them.
    ///
    /// # Errors
    /// The daemon's refusals.
    pub async fn output_progress(&self, booking: Booking, output_tokens: u32) -> Result<Option<BookingOutcome>> {
        self.tell(booking, Word::OutputProgress { output_tokens }).await
    }

    /// Reports that a booked request runs on another worker of its space than the one it was booked on.
    ///
    /// # Errors
    /// The daemon's refusals.
    pub async fn served(&self, booking: Booking, worker: Worker) -> Result<Option<BookingOutcome>> {
        self.tell(booking, Word::Served { worker }).await
    }

    /// Reports that a booked request has ended, however it ended.
    ///
    /// # Errors
    /// The daemon's refusals.
    pub async fn free(&self, booking: Booking) -> Result<Option<BookingOutcome>> {
        self.tell(booking, Word::Free).await
    }

    /// Closes the connection for every clone, once what was said is answered or the timeout is over; whether it was.
    pub async fn close(self) -> bool {
        let settled = driver::settle(&self.shared, self.shared.options.timeout).await;
        self.task.0.abort();
        settled
    }

    async fn tell(&self, booking: Booking, word: Word) -> Result<Option<BookingOutcome>> {
        let other_run = |id: u64| id != 0 && id != booking.instance_id;
        if other_run(self.shared.conversation.lock().instance_id()) {
            // Its handles are no names of this one's bookings.
            return Ok(Some(BookingOutcome::Unknown));
        }
        let report = Report { name: Name::Handle(booking.handle), word };
        let told = asking::tell(&self.shared, self.deadline(), booking.instance_id, report).await;
        match told? {
            None => Ok(None),
            Some(
                Reply::PrefillComplete(outcome)
                | Reply::OutputProgress(outcome)
                | Reply::Served(outcome)
                | Reply::Free(outcome),
            ) => Ok(Some(outcome)),
            Some(other) => Err(unexpected("a report", &other)),
        }
    }

    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.shared.options.timeout
    }

    pub(super) const fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

/// How long a request may wait in the daemon's queue whose caller waits until `deadline`, microseconds.
fn queue_us(deadline: Instant) -> u32 {
    let left = deadline.saturating_duration_since(Instant::now()) * CLIENT_QUEUE_SHARE_PERCENT / 100;
    u32::try_from(left.as_micros()).unwrap_or(u32::MAX).max(1)
}
