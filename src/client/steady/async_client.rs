//! The client for gateways on tokio.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::AbortHandle;

use super::calls::{self, Ask};
use super::driver::{self, Shared};
use super::{Answer, SteadyOptions};
use crate::client::conversation::next_page;
use crate::client::fallback::{Fallback, FallbackReason, Fleet, rank};
use crate::client::steady::state::{
    Booking, BookingName, ClientCounter, ClientState, Failure, Leftover, Phase, Report, ReportKind, RunReply,
    StoredError,
};
use crate::client::{spaces, unexpected};
use crate::error::{Error, Kind, Result};
use crate::hash;
use crate::ids::{CorrelationId, Scheme, SpaceId, Worker};
use crate::limits::CLIENT_QUEUE_SHARE_PERCENT;
use crate::protocol::{BookingOutcome, EngineLoad, PoolRole, PotentialLoads, Prompt, RouteRequest, SessionToken};
use crate::wire::{OverlapReply, Reply, RequestEncoder, SpaceInfo, WorkerInfo, features};

/// Aborts the task with the last handle.
struct Task(AbortHandle);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The client for gateways on tokio. All tasks of a gateway share it: clones share one connection, on which any number of
/// requests are in flight, and replies arrive in any order. A task in the background connects and reconnects, with growing
/// pauses while the daemon does not answer.
///
/// One serving thread of the daemon serves a connection. A gateway that needs more of them makes several clients. They share
/// their bookings if they share a [session](SteadyOptions::session).
///
/// Every call ends within [`SteadyOptions::timeout`], and its future may be dropped at any time. The client then frees what
/// the call has booked, and still sends the report that the call was to send.
///
/// The ids of spaces are the client's own: they stay the same when the daemon restarts with others.
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
///     client.prefill_complete(booking, 0).await?; // at the first token
///     client.free(booking).await?; // at the end, however the request ended
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
    /// Makes a client of the daemon at the socket `path`, which need not exist yet. Call it within a tokio runtime with its io
    /// and time drivers. The client's task runs there until the last clone is dropped.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, options: SteadyOptions) -> Self {
        let session = options.session.unwrap_or_else(|| SessionToken { hi: rand::random(), lo: rand::random() });
        let shared = Arc::new(Shared {
            path: path.into(),
            session,
            state: Mutex::new(ClientState::new(&options)),
            lane: Mutex::new(None),
            wake: Notify::new(),
            permits: Arc::new(Semaphore::new(options.in_flight_max.clamp(1, Semaphore::MAX_PERMITS))),
            phases: watch::Sender::new(Phase::Connecting { is_first: true }),
            fleets: watch::Sender::new(Arc::default()),
            options,
        });
        let task = tokio::spawn(driver::drive(Arc::clone(&shared))).abort_handle();
        Self { shared, task: Arc::new(Task(task)) }
    }

    /// Waits until the connection is open and, if this client may decide without the daemon, the workers are known.
    ///
    /// # Errors
    /// [`Kind::Connection`] if that takes longer than the timeout, or the daemon's refusal of the connection.
    pub async fn connected(&self) -> Result<()> {
        let deadline = self.deadline();
        calls::connected(&self.shared, deadline).await?;
        let has_fleet = |state: &ClientState<_>| {
            let watches = state.hello.as_ref().is_some_and(|hello| hello.features & features::WATCH != 0);
            !watches || state.fleet.version > 0
        };
        if !self.shared.options.fallback || has_fleet(&self.shared.state.lock()) {
            return Ok(());
        }
        let mut fleets = self.fleet();
        let learnt = fleets.wait_for(|fleet| fleet.version > 0);
        match tokio::time::timeout_at(deadline.into(), learnt).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(Failure::Unreachable(FallbackReason::Silent).into()),
        }
    }

    /// The session of this client, for the options of another that shares its bookings.
    #[must_use]
    pub fn session(&self) -> SessionToken {
        self.shared.session
    }

    /// The fleet as the daemon last reported it, and again after each change. Decisions without the daemon use it.
    #[must_use]
    pub fn fleet(&self) -> watch::Receiver<Arc<Fleet>> {
        self.shared.fleets.subscribe()
    }

    /// Whether the connection uses a shm lane now.
    #[must_use]
    pub fn has_lane(&self) -> bool {
        self.shared.lane.lock().is_some()
    }

    /// Why the connection has no lane, though one was requested.
    #[must_use]
    pub fn lane_refusal(&self) -> Option<Error> {
        self.shared.state.lock().lane_refusal.as_ref().map(StoredError::error)
    }

    /// A count since the client was made.
    #[must_use]
    pub fn counter(&self, counter: ClientCounter) -> u64 {
        self.shared.state.lock().counters[counter as usize]
    }

    /// The spaces of the present or the last connection's daemon.
    #[must_use]
    pub fn spaces(&self) -> Vec<SpaceInfo> {
        self.shared.state.lock().spaces.infos().cloned().collect()
    }

    /// Finds the space of `model`, of `namespace` and `role` if they are given. Wait for [`AsyncClient::connected`] first.
    ///
    /// # Errors
    /// [`Kind::UnknownSpace`] if no space fits, with the models of the daemon, or if several fit.
    pub fn space(&self, model: &str, namespace: Option<&str>, role: Option<PoolRole>) -> Result<SpaceInfo> {
        spaces::find(self.shared.state.lock().spaces.infos(), model, namespace, role).cloned()
    }

    /// Asks which worker should run a prompt, and books it if the request says so. If the daemon does not answer in time, the
    /// client decides by itself, if its options allow it and it knows a worker. The answer says who decided.
    ///
    /// # Errors
    /// The daemon's refusals; [`Kind::Connection`] if neither could decide.
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
        let mut state = self.shared.state.lock();
        let (workers, all_down) = match options.fallback {
            true => rank(&state.fleet, request, options.fallback_prefix_tokens),
            false => (Vec::new(), false),
        };
        if workers.is_empty() {
            return Err(failure.into());
        }
        state.count(match why {
            FallbackReason::Unreachable => ClientCounter::FallbackUnreachable,
            FallbackReason::ConnectionLost => ClientCounter::FallbackConnectionLost,
            FallbackReason::Silent => ClientCounter::FallbackSilent,
            FallbackReason::Draining => ClientCounter::FallbackDraining,
        });
        let since = state.silence.since().unwrap_or_else(Instant::now);
        Ok(Answer::Fallback(Fallback { workers, all_down, why, since }))
    }

    async fn ask_route(&self, request: &RouteRequest<'_>) -> Result<Answer, Failure> {
        let RunReply { reply, instance_id } = self.ask_prompt(Question::Route, request).await?;
        let reply = Box::new(expect!(reply, Route, "route")?);
        Ok(Answer::Daemon { reply, instance_id })
    }

    /// Asks about a prompt: as hashes if the options say so, and as tokens if the daemon refuses the hashes.
    async fn ask_prompt(&self, question: Question, request: &RouteRequest<'_>) -> Result<RunReply, Failure> {
        let deadline = self.deadline();
        let put = || {
            let (space, scheme, waits) = {
                let state = self.shared.state.lock();
                let spaces = &state.spaces;
                let waits = state.hello.as_ref().is_some_and(|hello| hello.features & features::QUEUE != 0);
                (spaces.theirs(request.space)?, spaces.scheme_to_hash_by(request.space), waits)
            };
            let scheme = scheme.filter(|_| self.shared.options.hash_locally);
            let hashed = scheme.and_then(|scheme| Hashed::of(request, scheme));
            let mut request = *request;
            if waits && request.book.is_some() && request.deadline_us == 0 {
                request.deadline_us = queue_us(deadline);
            }
            Ok(AskPrompt { question, request, space, hashed })
        };
        match calls::ask(&self.shared, deadline, put).await {
            Err(Failure::Refused(error)) if self.hashes_refused(&error, request) => {
                calls::ask(&self.shared, deadline, put).await
            }
            other => other,
        }
    }

    /// Whether a request failed because the client hashed it. From now on the client sends tokens.
    fn hashes_refused(&self, error: &Error, request: &RouteRequest<'_>) -> bool {
        if error.kind() != Kind::SchemeMismatch || !matches!(request.prompt, Prompt::Tokens(_)) {
            return false;
        }
        let mut state = self.shared.state.lock();
        let was_hashed = state.spaces.scheme_to_hash_by(request.space).is_some();
        if was_hashed {
            state.spaces.hashes_were_refused(request.space);
            state.count(ClientCounter::HashesRefused);
        }
        was_hashed
    }

    /// Reports that the prefill of a booked request is complete, in `prefill_us` microseconds; 0 = not known.
    ///
    /// This and the other reports answer with the outcome for the booking, or with `None` if the report is sent only when the
    /// daemon can be reached again.
    ///
    /// # Errors
    /// The daemon's refusals.
    pub async fn prefill_complete(&self, booking: Booking, prefill_us: u64) -> Result<Option<BookingOutcome>> {
        self.report(booking, ReportKind::PrefillComplete { prefill_us }).await
    }

    /// Reports how many tokens a booked request has generated since its start.
    ///
    /// # Errors
    /// The daemon's refusals.
    pub async fn output_progress(&self, booking: Booking, output_tokens: u32) -> Result<Option<BookingOutcome>> {
        self.report(booking, ReportKind::OutputProgress { output_tokens }).await
    }

    /// Reports that another worker of the space runs a booked request than the booked one.
    ///
    /// # Errors
    /// The daemon's refusals.
    pub async fn served(&self, booking: Booking, worker: Worker) -> Result<Option<BookingOutcome>> {
        self.report(booking, ReportKind::Served { worker }).await
    }

    /// Frees a booking: its request has ended, however it ended.
    ///
    /// # Errors
    /// The daemon's refusals.
    pub async fn free(&self, booking: Booking) -> Result<Option<BookingOutcome>> {
        self.report(booking, ReportKind::Free).await
    }

    /// Closes the connection for every clone, after all requests and reports are answered or the timeout has passed. Whether all
    /// were answered.
    pub async fn close(self) -> bool {
        let settled = driver::settle(&self.shared, self.shared.options.timeout).await;
        self.task.0.abort();
        settled
    }

    async fn report(&self, booking: Booking, kind: ReportKind) -> Result<Option<BookingOutcome>> {
        let other_run = |id: u64| id != 0 && id != booking.instance_id;
        if other_run(self.shared.state.lock().instance_id()) {
            // The handle may name another booking of this run.
            return Ok(Some(BookingOutcome::Unknown));
        }
        let report = Report { name: BookingName::Handle(booking.handle), kind };
        match calls::report(&self.shared, self.deadline(), booking.instance_id, report).await? {
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

    fn deadline(&self) -> Instant {
        Instant::now() + self.shared.options.timeout
    }

    /// Asks how much of a prompt each worker holds. Only the request's prompt and space matter.
    ///
    /// # Errors
    /// The daemon's refusals; [`Kind::Connection`](crate::error::Kind::Connection) if it does not answer.
    pub async fn overlap(&self, request: &RouteRequest<'_>) -> Result<OverlapReply> {
        expect!(self.ask_prompt(Question::Overlap, request).await?.reply, Overlap, "overlap")
    }

    /// Asks for the work of every worker if it took a prompt, for a gateway that chooses by itself.
    ///
    /// # Errors
    /// As [`AsyncClient::overlap`]; [`Kind::Unsupported`](crate::error::Kind::Unsupported) from a daemon without
    /// [`features::POTENTIAL_LOADS`](crate::wire::features::POTENTIAL_LOADS).
    pub async fn potential_loads(&self, request: &RouteRequest<'_>) -> Result<PotentialLoads> {
        let reply = self.ask_prompt(Question::PotentialLoads, request).await?.reply;
        expect!(reply, PotentialLoads, "potential_loads")
    }

    /// The record of every worker, of one space or of all, as the daemon has it now.
    ///
    /// # Errors
    /// As [`AsyncClient::overlap`].
    pub async fn workers(&self, space: Option<SpaceId>) -> Result<Vec<WorkerInfo>> {
        let (mut all, mut cursor, deadline) = (Vec::new(), Some(0), self.deadline());
        while let Some(at) = cursor {
            let put = || {
                let theirs = space.map(|space| self.theirs(space)).transpose()?;
                Ok(move |encoder: &mut RequestEncoder, id: CorrelationId, out: &mut Vec<u8>| {
                    encoder.workers(id, theirs, at, 0, out);
                    Ok(())
                })
            };
            let page = expect!(calls::ask(&self.shared, deadline, put).await?.reply, Workers, "workers")?;
            all.extend(self.shared.state.lock().spaces.ours_of(page.workers));
            cursor = next_page(at, page.next_cursor)?;
        }
        Ok(all)
    }

    /// Passes on an engine's own report of its load. `false` = the worker has just left, or reports of this user are in force
    /// for as many workers as `serve.user_share_percent` allows.
    ///
    /// # Errors
    /// As [`AsyncClient::overlap`].
    pub async fn report_load(&self, space: SpaceId, worker: Worker, load: &EngineLoad) -> Result<bool> {
        let put = || {
            let of = (self.theirs(space)?, worker);
            Ok(move |encoder: &mut RequestEncoder, id: CorrelationId, out: &mut Vec<u8>| {
                encoder.report_load(id, of, load, out);
                Ok(())
            })
        };
        expect!(calls::ask(&self.shared, self.deadline(), put).await?.reply, ReportLoad, "report_load")
    }

    /// Reports that a worker failed a request; rank 2³² - 1 = every rank of it. Answers with how long requests avoid the worker
    /// while others can run them, milliseconds. It is 0 if reports of this user already keep requests away from as many
    /// workers as `serve.user_share_percent` allows.
    ///
    /// # Errors
    /// As [`AsyncClient::overlap`].
    pub async fn report_failure(&self, space: SpaceId, worker: Worker, reason: &str) -> Result<u32> {
        let put = || {
            let of = (self.theirs(space)?, worker);
            Ok(move |encoder: &mut RequestEncoder, id: CorrelationId, out: &mut Vec<u8>| {
                encoder.report_failure(id, of, reason, out);
                Ok(())
            })
        };
        expect!(calls::ask(&self.shared, self.deadline(), put).await?.reply, ReportFailure, "report_failure")
    }

    /// The daemon's id of a space.
    fn theirs(&self, space: SpaceId) -> Result<SpaceId> {
        self.shared.state.lock().spaces.theirs(space)
    }
}

/// How long a request may wait in the daemon's queue, if its caller waits until `deadline`; microseconds.
fn queue_us(deadline: Instant) -> u32 {
    let left = deadline.saturating_duration_since(Instant::now()) * CLIENT_QUEUE_SHARE_PERCENT / 100;
    u32::try_from(left.as_micros()).unwrap_or(u32::MAX).max(1)
}

/// The requests about a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Question {
    Route,
    Overlap,
    PotentialLoads,
}

/// The hashes of a prompt whose caller gave tokens.
#[derive(Debug)]
struct Hashed {
    /// Little-endian.
    bytes: Vec<u8>,
    scheme: Scheme,
    token_count: u32,
}

impl Hashed {
    /// Hashes a request's tokens; `None` = the request has hashes already.
    fn of(request: &RouteRequest<'_>, scheme: Scheme) -> Option<Self> {
        let Prompt::Tokens(tokens) = request.prompt else { return None };
        let token_count = u32::try_from(request.prompt.token_count()).ok()?;
        let mut locals = Vec::new();
        let seed = hash::seed(request.lora, request.salt);
        hash::local_hashes(scheme, seed, tokens, request.media, &mut locals);
        let bytes = locals.iter().flat_map(|local| local.0.to_le_bytes()).collect();
        Some(Self { bytes, scheme, token_count })
    }
}

/// A request about a prompt, with the daemon's id of the space.
struct AskPrompt<'a> {
    question: Question,
    request: RouteRequest<'a>,
    space: SpaceId,
    hashed: Option<Hashed>,
}

impl Ask for AskPrompt<'_> {
    fn encode(&self, encoder: &mut RequestEncoder, id: CorrelationId, out: &mut Vec<u8>) -> Result<()> {
        let request = match &self.hashed {
            None => RouteRequest { space: self.space, ..self.request },
            Some(hashed) => {
                let (scheme, token_count) = (hashed.scheme, hashed.token_count);
                let prompt = Prompt::LocalHashes { hashes: &hashed.bytes, scheme, token_count };
                // The hashes cover the objects already.
                RouteRequest { space: self.space, prompt, media: &[], ..self.request }
            }
        };
        match self.question {
            Question::Route => encoder.route(id, &request, out),
            Question::Overlap => encoder.overlap(id, &request, out),
            Question::PotentialLoads => encoder.potential_loads(id, &request, out),
        }
    }

    fn leftover(&self) -> Leftover {
        match (self.question, self.request.book) {
            (Question::Route, Some(book)) => {
                Leftover::Booking { request_id: book.request_id.into(), attempt: book.attempt }
            }
            _ => Leftover::Nothing,
        }
    }
}
