//! The daemon's [`Service`]: decides over the shared tables, and books.

use std::sync::Arc;
use std::time::Instant;

use arc_swap::Guard;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::core_metrics::CoreMetrics;
use super::hit_audit::HitAudit;
use super::loaded_tables::LoadedTables;
use super::prefill_decode_pair::prefill_name;
use super::request_queue::RequestQueue;
use super::service::{HelloInfo, Routed, Service};
use super::shared_tables::RequestTables;
use crate::error::{Error, Kind, Result};
use crate::fleet::{FleetTable, WorkerRecord};
use crate::ids::{SpaceId, Worker, WorkerIndex};
use crate::journal::{DecisionRecorder, Noted, NotedRequest, RequestSample};
use crate::limits::PREFILL_BOOKING_SUFFIX;
use crate::load::{BeyondShare, BookingOutcome, BookingRef, EngineLoad, Reporter, SessionId, SessionToken};
use crate::log_quota::LogQuota;
use crate::metrics::CoreCounter;
use crate::route::{
    AffinityOutcome, BindOutcome, Decision, Draws, MatchStatus, Mode, Policy, PotentialLoads, RouteRequest, Scratch,
    View, Wait, advance_round_robin, overlaps, potential_loads, propose, propose_again, seconds,
};
use crate::traces::{TracedDecision, TracedOutcome, TracedRequest, TracedWorker, Tracer};
use crate::trust::TrustLevel;

/// A request is decided at most this often again because the chosen worker has just left; then its gateway gets the
/// error.
const LEAVERS_CHOSEN_MAX: usize = 4;

/// How a decision is made: [`propose`] or [`propose_again`].
type Propose = fn(&View<'_>, &RouteRequest<'_>, &mut Scratch, Draws, &mut Decision) -> Result<()>;

/// The service of one serving thread, with its own readers, buffers, random numbers and counters.
pub(crate) struct RoutingService {
    pub(super) tables: RequestTables,
    pub(super) loaded: LoadedTables,
    pub(super) metrics: Arc<CoreMetrics>,
    pub(super) scratch: Scratch,
    hit_audit: HitAudit,
    recorder: DecisionRecorder,
    /// `None` = traces are off.
    tracer: Option<Tracer>,
    /// The present request, if it is traced.
    traced: Option<TracedRequest>,
    /// The policy of the last decision, if the journal or a shadow policy wants decisions.
    judged_by: Option<Policy>,
    /// The booking name of a request's prefill half; kept to reuse its memory.
    prefill_name: String,
    rng: Xoshiro256PlusPlus,
    /// Work since the last [`Service::take_work`], as [`Scratch::work`] counts it.
    work: u64,
    /// When the present request began: one reading of the clock for all its decisions.
    now_ns: u64,
    /// Since when the next request has waited in the queue; `None` = it has not.
    waited_since_ns: Option<u64>,
    /// How long the present request waited there.
    waited_ns: u64,
    /// By what the journal samples the present request.
    sample: RequestSample,
    /// For the failures that gateways report.
    failures_logged: LogQuota,
}

impl RoutingService {
    /// The service of serving thread number `core`, whose random choices begin at `seed`.
    pub(crate) fn new(tables: RequestTables, metrics: Arc<CoreMetrics>, core: usize, seed: u64) -> Self {
        let hit_audit = HitAudit::new(Arc::clone(&metrics.workers));
        let (recorder, tracer) = (tables.recording.recorder(core), tables.traces.tracer());
        let loaded = LoadedTables::new(&tables.policies);
        let rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let (scratch, prefill_name, failures_logged) = (Scratch::default(), String::new(), LogQuota::default());
        Self {
            tables,
            loaded,
            metrics,
            scratch,
            hit_audit,
            recorder,
            tracer,
            traced: None,
            judged_by: None,
            prefill_name,
            rng,
            work: 0,
            now_ns: 0,
            waited_since_ns: None,
            waited_ns: 0,
            sample: RequestSample::default(),
            failures_logged,
        }
    }

    /// Decides without advancing the round-robin counter.
    pub(super) fn decide(&mut self, request: &RouteRequest<'_>, decision: &mut Decision) -> Result<()> {
        self.decide_by(propose, request, decision)
    }

    fn decide_by(&mut self, propose: Propose, request: &RouteRequest<'_>, decision: &mut Decision) -> Result<()> {
        let (fleet, policies) = self.loaded.current(&self.tables.fleet);
        let draws = Draws::new(self.rng.next_u64());
        self.judged_by = (!self.recorder.is_off()).then(|| *policies.of(request.space));
        decision.only_costs = !request.explain && self.judged_by.is_none();
        propose(
            &self.tables.view(fleet, policies, (request.space, self.now_ns)),
            request,
            &mut self.scratch,
            draws,
            decision,
        )?;
        self.work += self.scratch.work();
        if self.scratch.active_locked() {
            self.metrics.counters.bump(CoreCounter::ActiveReadsLocked);
        }
        Ok(())
    }

    /// Advances the round-robin counter for the request that was just decided and does not wait.
    fn advance_round_robin(&mut self, request: &RouteRequest<'_>, decision: &mut Decision) {
        if decision.mode != Mode::RoundRobin {
            return;
        }
        let (fleet, policies) = self.loaded.current(&self.tables.fleet);
        advance_round_robin(
            &self.tables.view(fleet, policies, (request.space, self.now_ns)),
            request,
            &mut self.scratch,
            decision,
        );
    }

    /// How long, and for which workers, the request waits that was just decided; `None` = it does not wait.
    fn wait(&mut self, request: &RouteRequest<'_>, decision: &Decision) -> Option<Wait> {
        let queue = self.loaded.policies().of(request.space).queue;
        queue.threshold?;
        queue.wait(request, self.scratch.observation(), decision, self.tables.now_ns())
    }

    pub(super) fn decide_and_book(
        &mut self,
        session: SessionId,
        request: &RouteRequest<'_>,
        decision: &mut Decision,
    ) -> Result<Routed> {
        for _ in 0..LEAVERS_CHOSEN_MAX {
            match self.decide_and_book_once(session, request, decision) {
                // The decision used an older fleet table. The next one does not have the worker.
                Err(error) if error.kind() == Kind::Overloaded && self.chosen_left(decision) => {
                    self.metrics.counters.bump(CoreCounter::RoutesDecidedAgain);
                }
                done => return done,
            }
        }
        self.decide_and_book_once(session, request, decision)
    }

    /// Lists what other routers' bookings add to the candidates.
    fn list_others(&self, decision: &mut Decision) {
        let Decision { candidates, prefill, others, .. } = decision;
        let of_pair = prefill.iter().flat_map(|prefill| &prefill.candidates);
        for of in candidates.iter().chain(of_pair) {
            self.tables.loads.list_others((of.index, of.worker), self.now_ns, others);
        }
    }

    /// Whether the chosen worker has left, so that it cannot be booked.
    fn chosen_left(&self, decision: &Decision) -> bool {
        decision.candidates.first().is_some_and(|chosen| !self.tables.loads.is_admitted(chosen.index))
    }

    fn decide_and_book_once(
        &mut self,
        session: SessionId,
        request: &RouteRequest<'_>,
        decision: &mut Decision,
    ) -> Result<Routed> {
        self.decide(request, decision)?;
        let Some(book) = request.book else {
            self.advance_round_robin(request, decision);
            return Ok(Routed::Decided);
        };
        // Another thread may have booked the same worker meanwhile: decide once more with the present loads.
        if self.scratch.chosen_moved(decision, &self.tables.loads) {
            self.metrics.counters.bump(CoreCounter::RoutesDecidedAgain);
            self.decide_by(propose_again, request, decision)?;
        }
        if let Some(wait) = self.wait(request, decision) {
            return Ok(Routed::Busy(Box::new(wait)));
        }
        self.advance_round_robin(request, decision);
        let Some(chosen) = decision.candidates.first() else { return Ok(Routed::Decided) };
        // Of a pair, the journal and the trace have the decode half.
        let is_whole = !book.request_id.ends_with(PREFILL_BOOKING_SUFFIX);
        let (is_recorded, is_traced) = (self.sample.is_recorded && is_whole, self.traced.is_some() && is_whole);
        // Written in place: a copy with other fields would be read while it is still being written.
        let mut demand = self.scratch.demand(request, decision, chosen);
        (demand.is_recorded, demand.is_traced) = (is_recorded, is_traced);
        let now_ns = self.now_ns;
        let booked = self.tables.loads.book(session, book.request_id, book.attempt, chosen.index, demand, now_ns)?;
        if booked.superseded {
            self.metrics.counters.bump(CoreCounter::BookingsSuperseded);
        }
        // The previous attempt may have been a pair, even if this one is not.
        let of_pair = book.attempt > 0 && {
            let prefill = prefill_name(book.request_id, &mut self.prefill_name);
            self.tables.loads.free_earlier(session, prefill, book.attempt, now_ns)
        };
        if booked.superseded || of_pair {
            self.tables.queue.made_room();
        }
        if booked.unshared {
            self.metrics.counters.bump(CoreCounter::BookingsUnshared);
        }
        decision.booking = Some(booked.handle);
        self.predict(request, decision, now_ns / 1_000_000);
        self.bind(request, decision, booked.uid, now_ns);
        Ok(Routed::Decided)
    }
}

impl RoutingService {
    /// Binds the request's session to the worker that was just booked.
    fn bind(&mut self, request: &RouteRequest<'_>, decision: &Decision, uid: u32, now_ns: u64) {
        let (Some(session), Some(chosen)) = (request.affinity_session, decision.candidates.first()) else { return };
        let counter = match decision.affinity {
            AffinityOutcome::None => return,
            AffinityOutcome::New => CoreCounter::AffinityNew,
            AffinityOutcome::Kept => CoreCounter::AffinityKept,
            AffinityOutcome::Ineligible => CoreCounter::AffinityMovedIneligible,
            AffinityOutcome::Overloaded => CoreCounter::AffinityMovedOverloaded,
            AffinityOutcome::Outweighed => CoreCounter::AffinityMovedOutweighed,
            AffinityOutcome::Pinned => CoreCounter::AffinityMovedPinned,
        };
        self.metrics.counters.bump(counter);
        let ttl_s = self.loaded.policies().of(request.space).affinity.ttl_s;
        match self.tables.affinities.bind(request.space, session, (chosen.worker, uid), seconds(now_ns), ttl_s) {
            BindOutcome::Done => {}
            BindOutcome::Evicted => self.metrics.counters.bump(CoreCounter::AffinityEvicted),
            BindOutcome::Skipped => self.metrics.counters.bump(CoreCounter::AffinitySkipped),
        }
    }

    /// Hands the new booking to the predictor, if the worker's cache is predicted from bookings.
    fn predict(&self, request: &RouteRequest<'_>, decision: &Decision, now_ms: u64) {
        let Some(booked_queue) = self.tables.predictions.of(request.space) else { return };
        let Some(chosen) = decision.candidates.first().filter(|chosen| chosen.trust.level == TrustLevel::Predicted)
        else {
            return;
        };
        let locals = self.scratch.locals(request, decision);
        if locals.is_empty() {
            return;
        }
        if !booked_queue.push(request.space, (chosen.index, chosen.worker), locals, now_ms) {
            self.metrics.counters.bump(CoreCounter::PredictionsDropped);
        }
    }
}

impl RoutingService {
    /// Records the decision for the journal and the shadow policy, if either wants it.
    fn record(&mut self, request: &RouteRequest<'_>, decision: &Decision) {
        let Some(policy) = self.judged_by.filter(|_| self.recorder.takes(decision, self.sample)) else { return };
        let (at_ns, observation) = (self.now_ns, self.scratch.observation());
        let noted = NotedRequest {
            sample: self.sample,
            waited_ns: self.waited_ns,
            expected_output_tokens: request.expected_output_tokens,
            locals: (decision.matched == MatchStatus::Matched).then(|| self.scratch.locals(request, decision)),
        };
        if self.recorder.note((at_ns, request.space), &policy, observation, (decision, &noted)) == Noted::Lost {
            self.metrics.counters.bump(CoreCounter::JournalLost);
        }
    }
}

impl RoutingService {
    /// Hands the facts of a traced request's decision to the thread that makes spans.
    #[inline]
    fn trace(&self, request: &RouteRequest<'_>, decision: &Decision, ended_ns: u64) {
        let (Some(tracer), Some(TracedRequest { context })) = (&self.tracer, self.traced) else { return };
        let outcome = match (decision.no_worker, decision.booking) {
            (Some(kind), _) => TracedOutcome::NoWorker(kind),
            (None, Some(_)) => TracedOutcome::Booked,
            (None, None) => TracedOutcome::Chosen,
        };
        let prefill = decision.prefill.as_ref().and_then(|prefill| prefill.candidates.first());
        tracer.traces.record(TracedDecision {
            context,
            space: request.space,
            began_ns: self.now_ns,
            waited_ns: self.waited_ns,
            ended_ns,
            outcome,
            mode: decision.mode,
            prompt_tokens: request.prompt.token_count() as u64,
            prompt_blocks: decision.request_blocks,
            eligible: decision.eligible,
            chosen: decision.candidates.first().map(TracedWorker::of),
            prefill: prefill.map(TracedWorker::of),
            booking: decision.booking,
        });
    }

    /// The same of a request that gets an error.
    #[cold]
    fn trace_refusal(&self, request: &RouteRequest<'_>, kind: Kind) {
        let (Some(tracer), Some(TracedRequest { context })) = (&self.tracer, self.traced) else { return };
        let prompt = (request.space, request.prompt.token_count() as u64);
        let times = (self.now_ns.saturating_sub(self.waited_ns), self.tables.now_ns());
        tracer.traces.record(TracedDecision::refused(context, prompt, times, kind));
    }
}

impl RoutingService {
    /// Decides a request, books it, and counts, records and traces the decision.
    fn route_once(
        &mut self,
        session: SessionId,
        request: &RouteRequest<'_>,
        decision: &mut Decision,
    ) -> Result<Routed> {
        self.now_ns = self.tables.now_ns();
        self.sample = self.recorder.sample(request);
        self.waited_ns = self.waited_since_ns.take().map_or(0, |since_ns| self.now_ns.saturating_sub(since_ns));
        self.traced = self.tracer.as_mut().and_then(|tracer| tracer.sample(request.trace));
        if request.trace.is_some_and(|context| !context.is_valid()) {
            self.metrics.counters.bump(CoreCounter::TraceContextsInvalid);
        }
        let routed = match request.disaggregate {
            false => self.decide_and_book(session, request, decision),
            true => self.route_pair(session, request, decision),
        };
        let routed = routed.inspect_err(|error| self.trace_refusal(request, error.kind()))?;
        if let busy @ Routed::Busy(_) = routed {
            return Ok(busy);
        }
        let fleet = self.loaded.fleet(&self.tables.fleet);
        self.hit_audit.note(fleet, request, decision, &self.scratch, self.now_ns / 1_000_000);
        if request.explain {
            self.list_others(decision);
        }
        self.record(request, decision);
        let ended_ns = self.tables.now_ns();
        self.loaded.note_time(ended_ns);
        self.metrics.decisions.record(ended_ns - self.now_ns);
        self.trace(request, decision, ended_ns);
        Ok(Routed::Decided)
    }
}

impl Service for RoutingService {
    fn hello(&self) -> HelloInfo<'_> {
        self.tables.hello()
    }

    fn fleet(&self) -> Guard<Arc<FleetTable>> {
        self.tables.fleet.load()
    }

    fn with_fleet<R>(&self, read: impl FnOnce(&FleetTable) -> R) -> R {
        match self.loaded.last_fleet() {
            Some(fleet) => read(fleet),
            None => read(&self.fleet()),
        }
    }

    fn begin_batch(&mut self) {
        self.loaded.begin_batch();
    }

    fn end_batch(&mut self) {
        self.loaded.end_batch();
    }

    fn session_opened(&mut self, token: Option<SessionToken>, peer_uid: u32) -> Result<SessionId> {
        self.tables.loads.open_session(token, peer_uid)
    }

    fn session_closed(&mut self, session: SessionId) {
        self.tables.loads.close_session(session, self.tables.now_ns());
    }

    fn route(&mut self, session: SessionId, request: &RouteRequest<'_>, decision: &mut Decision) -> Result<Routed> {
        let routed = self.route_once(session, request, decision);
        self.loaded.end_request();
        routed
    }

    fn traced(&self) -> Option<TracedRequest> {
        self.traced
    }

    fn waited_since(&mut self, since_ns: u64) {
        self.waited_since_ns = Some(since_ns);
    }

    fn take_work(&mut self) -> u64 {
        std::mem::take(&mut self.work)
    }

    fn request_queue(&self) -> Option<Arc<RequestQueue>> {
        Some(Arc::clone(&self.tables.queue))
    }

    fn has_room(&self, worker: WorkerIndex) -> bool {
        let fleet = self.tables.fleet.load();
        let Some(record) = fleet.worker(worker) else { return true };
        let load = self.tables.loads.read_at(worker, self.tables.now_ns());
        self.tables.policies.load().of(record.space).queue.has_room(load.prefill_tokens, record.batched_tokens_max)
    }

    fn booked_worker(&self, session: SessionId, booking: &BookingRef<'_>) -> Option<WorkerIndex> {
        self.tables.loads.worker_of(session, *booking)
    }

    fn booked_output(&self, session: SessionId, booking: &BookingRef<'_>) -> Option<(u32, u32)> {
        self.tables.loads.output_of(session, *booking)
    }

    fn overlap(&mut self, _: SessionId, request: &RouteRequest<'_>, decision: &mut Decision) -> Result<()> {
        self.now_ns = self.tables.now_ns();
        let (fleet, policies) = self.loaded.current(&self.tables.fleet);
        let view = self.tables.view(fleet, policies, (request.space, self.now_ns));
        let outcome = overlaps(&view, request, &mut self.scratch, decision);
        self.loaded.end_request();
        outcome?;
        self.work += self.scratch.work();
        Ok(())
    }

    fn potential_loads(&mut self, request: &RouteRequest<'_>, potential: &mut PotentialLoads) -> Result<()> {
        self.now_ns = self.tables.now_ns();
        let (fleet, policies) = self.loaded.current(&self.tables.fleet);
        let view = self.tables.view(fleet, policies, (request.space, self.now_ns));
        let outcome = potential_loads(&view, request, &mut self.scratch, potential);
        self.loaded.end_request();
        outcome?;
        self.work += self.scratch.work();
        Ok(())
    }

    fn prefill_complete(
        &mut self,
        session: SessionId,
        booking: &BookingRef<'_>,
        prefill_us: u64,
    ) -> Result<BookingOutcome> {
        let now_ns = self.tables.now_ns();
        self.loaded.note_time(now_ns);
        Ok(self.tables.loads.prefill_complete(session, *booking, prefill_us, now_ns))
    }

    fn output_progress(
        &mut self,
        session: SessionId,
        booking: &BookingRef<'_>,
        output_tokens: u32,
    ) -> Result<BookingOutcome> {
        Ok(self.tables.loads.output_progress(session, *booking, output_tokens))
    }

    fn served(&mut self, session: SessionId, booking: &BookingRef<'_>, worker: Worker) -> Result<BookingOutcome> {
        let fleet = self.tables.fleet.load();
        let Some(record) = fleet.workers.iter().find(|record| record.worker == worker) else {
            return Err(no_worker(worker));
        };
        let (to, now_ns) = ((record.space, record.index), self.tables.now_ns());
        let moved = self.tables.loads.served(session, *booking, to, now_ns)?;
        if moved.unshared {
            self.metrics.counters.bump(CoreCounter::BookingsUnshared);
        }
        Ok(moved.outcome)
    }

    fn report_load(&mut self, session: SessionId, space: SpaceId, worker: Worker, load: EngineLoad) -> Result<bool> {
        let fleet = self.tables.fleet.load();
        let record = fleet.workers_of(space).find(|record| record.worker == worker);
        let record = record.ok_or_else(|| no_worker(worker))?;
        let reporter = Reporter { session, space, workers: fleet.workers_of(space).count() };
        let known = self.tables.loads.report_load_by(reporter, record.index, load, self.tables.now_ns());
        Ok(known.unwrap_or_else(|BeyondShare| {
            self.metrics.counters.bump(CoreCounter::LoadReportsRefusedUser);
            false
        }))
    }

    fn report_failure(&mut self, session: SessionId, space: SpaceId, worker: Worker, reason: &str) -> Result<u32> {
        let (fleet, now_ns) = (self.tables.fleet.load(), self.tables.now_ns());
        let failed = |record: &&WorkerRecord| worker.selects(record.worker);
        let reporter = Reporter { session, space, workers: fleet.workers_of(space).count() };
        let (mut longest_ns, mut is_refused) = (None, false);
        for record in fleet.workers_of(space).filter(failed) {
            let back_off_ns = self.tables.loads.report_failure(reporter, record.index, now_ns);
            is_refused |= back_off_ns.is_err();
            longest_ns = longest_ns.max(Some(back_off_ns.unwrap_or(0)));
        }
        let back_off_ms = longest_ns.ok_or_else(|| no_worker(worker))?.div_ceil(1_000_000);
        if is_refused {
            self.metrics.counters.bump(CoreCounter::FailureReportsRefusedUser);
        }
        if let Some(withheld) = self.failures_logged.take(Instant::now()) {
            let beyond_user_share = is_refused;
            tracing::info!(
                %worker,
                reason,
                back_off_ms,
                beyond_user_share,
                withheld,
                "a gateway reports that the worker failed"
            );
        }
        Ok(u32::try_from(back_off_ms).unwrap_or(u32::MAX))
    }

    fn free(&mut self, session: SessionId, booking: &BookingRef<'_>) -> Result<BookingOutcome> {
        // The age of a booking counts in milliseconds: all frees of a batch share one reading of the clock.
        let now_ns = self.loaded.recent_ns(|| self.tables.now_ns());
        let loads = &self.tables.loads;
        let BookingRef::Request { request_id, attempt } = booking else {
            return Ok(loads.free(session, *booking, now_ns));
        };
        // A name ends both halves of a request.
        let freed = loads.free_request(session, request_id, *attempt, now_ns);
        if freed.prefill_half {
            self.tables.queue.made_room();
        }
        Ok(freed.outcome)
    }
}

fn no_worker(worker: Worker) -> Error {
    let message = format!("there is no worker {worker} in the space");
    Error::new(Kind::InvalidArgument, message, "name a candidate of the route's reply")
}
