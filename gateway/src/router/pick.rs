//! Choosing a worker: the daemon's decision, or this process's while the daemon does not answer.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use kvrouted::client::{
    Answer, AsyncClient, Booking, BookingRequest, ClientCounter, Fallback, Fleet, PoolRole, Prompt, RouteReply,
    RouteRequest, SpaceInfo, SteadyOptions,
};
use kvrouted::error::{Error, Kind};
use kvrouted::ids::{SpaceId, Worker};
use tokio::sync::watch;

use super::eligible::{Eligible, EngineView};
use super::reports::{Report, Reports};
use super::{Ask, BookingGuard, DecidedBy, Pick, PrefillPick, ReportFigures, RouterFigure, RouterFigures};
use super::{prediction, refusal};
use crate::api::ApiError;
use crate::engines::{EngineRole, EngineSet};
use crate::limits::{BOOKING_NAME_BYTES_MAX, CANDIDATES_DEFAULT, CONNECT_PAUSE, DAEMON_TIMEOUT_DEFAULT};

/// How the router talks to the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouterOptions {
    /// The daemon's socket.
    pub socket: PathBuf,
    /// The namespace of the spaces; `None` = the only one of each model.
    pub namespace: Option<String>,
    /// How long one question may take, the wait in the daemon's queue included. After it this process decides.
    pub timeout: Duration,
    /// Candidates to ask for: the best one, and some to retry on.
    pub candidates_max: usize,
    /// Whether to hash prompts here and send 8 bytes a block instead of 4 a token.
    pub hash_locally: bool,
}

impl RouterOptions {
    /// The usual options for the daemon at `socket`.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            namespace: None,
            timeout: DAEMON_TIMEOUT_DEFAULT,
            candidates_max: CANDIDATES_DEFAULT,
            hash_locally: false,
        }
    }
}

/// Spaces of a fleet with workers that are no engines of this gateway.
struct Strangers {
    fleet: Arc<Fleet>,
    /// That of the engines, which come and go.
    generation: u64,
    spaces: Vec<SpaceId>,
}

/// Chooses a worker for each request, and books it. All requests share one router.
pub struct Router {
    client: AsyncClient,
    engines: Arc<EngineSet>,
    options: RouterOptions,
    fleets: watch::Receiver<Arc<Fleet>>,
    strangers: ArcSwap<Strangers>,
    reports: Arc<Reports>,
    figures: RouterFigures,
    /// Numbers requests, so that two with one id have bookings of their own.
    asked: AtomicU64,
}

impl std::fmt::Debug for Router {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Router").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Router {
    /// Makes a router. Call it within the tokio runtime, on which its connection and its reports then run. The daemon
    /// need not run yet.
    #[must_use]
    pub fn new(options: RouterOptions, engines: Arc<EngineSet>) -> Self {
        let client_options = SteadyOptions {
            name: "kvrouted-gateway".to_owned(),
            timeout: options.timeout,
            hash_locally: options.hash_locally,
            ..SteadyOptions::default()
        };
        let client = AsyncClient::new(&options.socket, client_options);
        let nothing = Strangers { fleet: Arc::default(), generation: 0, spaces: Vec::new() };
        Self {
            fleets: client.fleet(),
            reports: Arc::new(Reports::start(client.clone())),
            client,
            engines,
            options,
            strangers: ArcSwap::from_pointee(nothing),
            figures: RouterFigures::default(),
            asked: AtomicU64::new(0),
        }
    }

    /// Chooses a worker for a request and books it.
    ///
    /// # Errors
    /// 404 if no engine serves the model; 503 if no engine may run the request, with the reason; 429 if all are busy,
    /// the daemon's queue is full or the request waited in it until its deadline; 400 or 413 if the daemon refuses the
    /// prompt.
    pub async fn pick(&self, ask: &Ask<'_>) -> Result<Pick, ApiError> {
        let decided = self.decide(ask).await;
        match &decided {
            Ok((_, figure)) => self.figures.count(*figure),
            Err(error) => self.figures.count(refusal::figure(error)),
        }
        decided.map(|(pick, _)| pick)
    }

    async fn decide(&self, ask: &Ask<'_>) -> Result<(Pick, RouterFigure), ApiError> {
        let now = Instant::now();
        let eligible = Eligible::among(self.engines.iter().map(|engine| EngineView::of(&engine, now)), ask)?;
        let number = self.asked.fetch_add(1, Ordering::Relaxed);
        let space = match self.space(ask, &eligible) {
            Ok(space) => space,
            Err(error) => return Ok(self.alone(&eligible, ask, number, &error)),
        };
        let needs_list = eligible.is_narrowed || self.has_strangers(space.id);
        let allow = needs_list.then(|| eligible.allow_list(ask.allow));
        let name = booking_name(ask, number);
        let tokens = ask.prompt.tokens.as_deref().unwrap_or_default();
        let request = RouteRequest {
            lora: ask.model.lora.as_deref(),
            salt: ask.prompt.salt.as_deref(),
            media: &ask.prompt.media,
            book: Some(BookingRequest { request_id: &name, attempt: 0 }),
            candidates_max: self.options.candidates_max,
            allow: allow.as_deref(),
            affinity_session: ask.session,
            trace: ask.trace,
            disaggregate: ask.disaggregate,
            expected_output_tokens: ask.output_tokens.unwrap_or(0),
            priority: ask.priority,
            ..RouteRequest::new(space.id, Prompt::of_tokens(tokens))
        };
        // A question whose caller stops waiting takes its booking back.
        let answer = match tokio::time::timeout_at(ask.deadline.into(), self.client.route(&request)).await {
            Err(_) => return Err(refusal::deadline_passed()),
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => {
                let is_absent = matches!(error.kind(), Kind::Connection | Kind::Draining | Kind::UnknownSpace);
                return if is_absent {
                    Ok(self.alone(&eligible, ask, number, &error))
                } else {
                    Err(refusal::of(&error))
                };
            }
        };
        match &answer {
            Answer::Daemon { reply, .. } if reply.candidates.is_empty() && !self.knows_any(&eligible, space.id) => {
                let error = Error::new(Kind::NobodyAvailable, "the daemon has none of the engines yet", "");
                Ok(self.alone(&eligible, ask, number, &error))
            }
            Answer::Daemon { reply, .. } => self.decided(ask, &eligible, &space, reply, &answer),
            Answer::Fallback(fallback) => Ok(self.fallback(&eligible, ask, number, fallback)),
        }
    }

    /// The daemon's decision.
    fn decided(
        &self,
        ask: &Ask<'_>,
        eligible: &Eligible,
        space: &SpaceInfo,
        reply: &RouteReply,
        answer: &Answer,
    ) -> Result<(Pick, RouterFigure), ApiError> {
        let Some(best) = reply.candidates.first() else { return Err(refusal::nobody(reply)) };
        let guard = |booking| BookingGuard::new(Arc::clone(&self.reports), booking, best.worker);
        let mut booking = answer.booking().map(guard);
        // Taken before a refusal can return, because a booking is freed when its guard is dropped.
        let scheme_blocks = space.scheme.map(|scheme| scheme.block_size);
        let prefill = self.prefill(ask, reply, answer.prefill_booking(), scheme_blocks);
        let known = reply.candidates.iter().filter(|candidate| eligible.has(candidate.worker.id));
        let candidates: Vec<Worker> = known.clone().map(|candidate| candidate.worker).collect();
        let Some(first) = candidates.first().copied() else { return Err(refusal::nobody(reply)) };
        if let Some(booking) = &mut booking {
            booking.served(first);
        }
        let block_size = |worker: Worker| scheme_blocks.or_else(|| eligible.block_size(worker.id));
        let predict = |candidate| prediction::of(candidate, reply, ask.prompt, block_size(candidate.worker));
        let predictions: Vec<_> = known.filter_map(predict).collect();
        let is_first = |prediction: &&crate::parity::Prediction| prediction.worker == (first.id.0, first.rank.0);
        let (decided_by, figure) = match ask.prompt.tokens {
            Some(_) => (DecidedBy::Daemon, RouterFigure::Daemon),
            None => (DecidedBy::LoadOnly, RouterFigure::LoadOnly),
        };
        let prediction = predictions.iter().find(is_first).cloned();
        Ok((Pick { candidates, booking, prediction, predictions, decided_by, prefill }, figure))
    }

    /// The prefill half of the daemon's decision.
    fn prefill(
        &self,
        ask: &Ask<'_>,
        reply: &RouteReply,
        booked: Option<Booking>,
        block_size: Option<u32>,
    ) -> Option<PrefillPick> {
        let chosen = reply.prefill.first()?.worker;
        let mut booking = booked.map(|booked| BookingGuard::new(Arc::clone(&self.reports), booked, chosen));
        // The daemon's allow-list names decode workers, so that those that prefill are filtered here.
        let now = Instant::now();
        let may = |worker: Worker| {
            let engine = self.engines.get(worker.id.0).filter(|_| !ask.exclude.contains(&worker.id.0));
            engine.is_some_and(|engine| {
                engine.config().role == EngineRole::Prefill && engine.takes_requests() && engine.is_usable(now)
            })
        };
        let known = reply.prefill.iter().filter(|candidate| may(candidate.worker));
        let candidates: Vec<Worker> = known.clone().map(|candidate| candidate.worker).collect();
        let first = candidates.first().copied()?;
        if let Some(booking) = &mut booking {
            booking.served(first);
        }
        let predict = |candidate: &kvrouted::client::Candidate| {
            let engine = self.engines.get(candidate.worker.id.0);
            let of_engine = engine.and_then(|engine| engine.facts().block_size);
            prediction::of(candidate, reply, ask.prompt, block_size.or(of_engine))
        };
        Some(PrefillPick { candidates, booking, predictions: known.filter_map(predict).collect() })
    }

    /// The engines that prefill, where this process decides: those with the fewest requests first.
    fn prefill_by_load(&self, ask: &Ask<'_>, number: u64) -> Option<PrefillPick> {
        if !ask.disaggregate {
            return None;
        }
        let now = Instant::now();
        let views = self.engines.iter().map(|engine| EngineView::of(&engine, now));
        let eligible = Eligible::to_prefill(views, ask)?;
        let mut candidates = eligible.by_load(None, usize::try_from(number).unwrap_or_default());
        candidates.truncate(self.options.candidates_max);
        Some(PrefillPick { candidates, booking: None, predictions: Vec::new() })
    }

    /// The client's decision, among the workers that the daemon last reported.
    fn fallback(&self, eligible: &Eligible, ask: &Ask<'_>, number: u64, fallback: &Fallback) -> (Pick, RouterFigure) {
        // Without tokens and session, all requests have the same key, and one worker would get them all.
        let has_key = ask.prompt.tokens.is_some() || ask.session.is_some();
        let known = fallback.workers.iter().copied().filter(|worker| eligible.has(worker.id));
        let candidates: Vec<_> = known.take(self.options.candidates_max).collect();
        if !has_key || candidates.is_empty() {
            return (self.by_load(eligible, ask, number), RouterFigure::Fallback);
        }
        let prefill = self.prefill_by_load(ask, number);
        (unbooked(candidates, prefill), RouterFigure::Fallback)
    }

    /// A decision of this process, which knows nothing of the daemon's workers.
    fn alone(&self, eligible: &Eligible, ask: &Ask<'_>, number: u64, why: &Error) -> (Pick, RouterFigure) {
        tracing::debug!(model = ask.model.base, error = %why, "chosen by this gateway's own requests in flight");
        (self.by_load(eligible, ask, number), RouterFigure::Alone)
    }

    fn by_load(&self, eligible: &Eligible, ask: &Ask<'_>, number: u64) -> Pick {
        let count = usize::try_from(number).unwrap_or_default();
        let mut candidates = eligible.by_load(ask.allow, count);
        candidates.truncate(self.options.candidates_max);
        unbooked(candidates, self.prefill_by_load(ask, number))
    }

    /// The space of the engines that may run the request: a model with engines of several roles has several.
    fn space(&self, ask: &Ask<'_>, eligible: &Eligible) -> Result<SpaceInfo, Error> {
        let find = |role| self.client.space(&ask.model.base, self.options.namespace.as_deref(), role);
        let (first, second) = match eligible.only_decode() {
            true => (PoolRole::Decode, PoolRole::Both),
            false => (PoolRole::Both, PoolRole::Decode),
        };
        find(Some(first)).or_else(|_| find(Some(second)))
    }

    /// Whether a space has workers that this gateway cannot send requests to.
    fn has_strangers(&self, space: SpaceId) -> bool {
        let fleet = Arc::clone(&self.fleets.borrow());
        let generation = self.engines.generation();
        let known = self.strangers.load();
        if Arc::ptr_eq(&known.fleet, &fleet) && known.generation == generation {
            return known.spaces.contains(&space);
        }
        let strange = fleet.workers.iter().filter(|info| self.engines.get(info.worker.id.0).is_none());
        let mut spaces: Vec<SpaceId> = strange.map(|info| info.space).collect();
        spaces.sort_unstable();
        spaces.dedup();
        let has_some = spaces.contains(&space);
        self.strangers.store(Arc::new(Strangers { fleet, generation, spaces }));
        has_some
    }

    /// Whether the daemon has a worker that may run the request. It may not have learnt of a new engine yet.
    fn knows_any(&self, eligible: &Eligible, space: SpaceId) -> bool {
        self.fleets.borrow().workers.iter().any(|info| info.space == space && eligible.has(info.worker.id))
    }

    /// Tells the daemon that a worker failed, without waiting; rank `u32::MAX` = every rank of the engine. The daemon
    /// then sends requests of all gateways elsewhere for a while.
    pub fn report_failure(&self, worker: Worker, model: &str, why: &str) {
        let fleet = Arc::clone(&self.fleets.borrow());
        let Some(info) = fleet.workers.iter().find(|info| worker.selects(info.worker)) else {
            tracing::debug!(%worker, model, why, "the daemon has no such worker to back off");
            return;
        };
        self.reports.send(Report::Failure { space: info.space, worker, why: why.to_owned() });
    }

    /// Whether the daemon has answered since the start. From then on the router also decides while the daemon is away,
    /// among the workers that the daemon last reported.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.fleets.borrow().version > 0
    }

    /// Whether the connection to the daemon is open now.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.client.counter(ClientCounter::Connected) > self.client.counter(ClientCounter::ConnectionsLost)
    }

    /// Waits until the daemon has answered. `false` = it has not by `deadline`.
    pub async fn ready(&self, deadline: Instant) -> bool {
        loop {
            if self.client.connected().await.is_ok() && self.is_ready() {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            tokio::time::sleep(CONNECT_PAUSE).await;
        }
    }

    /// How the questions to this router ended.
    #[must_use]
    pub const fn figures(&self) -> &RouterFigures {
        &self.figures
    }

    /// How the reports to the daemon ended.
    #[must_use]
    pub fn report_figures(&self) -> &ReportFigures {
        self.reports.figures()
    }

    /// A count of the daemon's client.
    #[must_use]
    pub fn client_counter(&self, counter: ClientCounter) -> u64 {
        self.client.counter(counter)
    }

    /// Waits until all reports are answered, and closes the connection. Whether all were answered within the timeout.
    pub async fn close(&self) -> bool {
        let flushed = tokio::time::timeout(self.options.timeout, self.reports.flush()).await.is_ok();
        self.client.clone().close().await && flushed
    }
}

fn unbooked(candidates: Vec<Worker>, prefill: Option<PrefillPick>) -> Pick {
    Pick {
        candidates,
        booking: None,
        prediction: None,
        predictions: Vec::new(),
        decided_by: DecidedBy::Fallback,
        prefill,
    }
}

/// The name of a request's booking: unique, whatever ids callers choose.
fn booking_name(ask: &Ask<'_>, number: u64) -> String {
    let tenant = ask.tenant.map(|tenant| format!("{tenant}/")).unwrap_or_default();
    let mut name = format!("{tenant}{}", ask.request_id);
    let end = (0..=BOOKING_NAME_BYTES_MAX.min(name.len())).rev().find(|at| name.is_char_boundary(*at));
    name.truncate(end.unwrap_or(0));
    format!("{name}#{number:x}")
}
