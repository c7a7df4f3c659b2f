//! What answers the requests of one core: a decision over the shared tables, and the bookings.

use std::sync::Arc;
use std::time::Instant;

use arc_swap::Guard;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::core_metrics::CoreMetrics;
use super::evidence::Evidence;
use super::pair::prefill_name;
use super::shared::Shared;
use crate::error::{Error, Kind, Result};
use crate::fleet::{FleetTable, WorkerRecord};
use crate::ids::{SpaceId, Worker, WorkerIndex};
use crate::journal::{Noted, Recorder};
use crate::load::{BeyondShare, BookingOutcome, BookingRef, EngineLoad, Reporter, SessionId, SessionToken};
use crate::metrics::CoreCounter;
use crate::predict::NotTaken;
use crate::route::{
    AffinityOutcome, BindOutcome, Decision, Draws, Mode, Policy, PotentialLoads, RouteRequest, Scratch, Wait,
    advance_round_robin, demand, overlaps, potential_loads, propose, seconds,
};
use crate::serve::{HelloInfo, Lanes, LogQuota, RequestQueue, Routed, Service};
use crate::trust::TrustLevel;

/// Times in a row that a decision may choose a worker that has just left, before its gateway is told.
const LEAVERS_CHOSEN_MAX: usize = 4;

/// One core's own half: readers, buffers, chance and counters.
pub(super) struct CoreService {
    pub(super) shared: Shared,
    pub(super) metrics: Arc<CoreMetrics>,
    pub(super) scratch: Scratch,
    evidence: Evidence,
    recorder: Recorder,
    /// What the last decision was judged by, where somebody notes it.
    judged_by: Option<Policy>,
    /// The name of the other half of a request, kept for its memory.
    prefill_name: String,
    rng: Xoshiro256PlusPlus,
    /// Done since it was last asked for, as [`Scratch::work`] counts it.
    work: u64,
    /// When the request came up that is answered: one look at the clock for all that is decided of it.
    now_ns: u64,
    /// Of failures that gateways report.
    failures_logged: LogQuota,
}

impl CoreService {
    /// The service of core `core`, whose ties are drawn from `seed`.
    pub(super) fn new(shared: Shared, metrics: Arc<CoreMetrics>, core: usize, seed: u64) -> Self {
        let evidence = Evidence::new(Arc::clone(&metrics.workers));
        let recorder = shared.recording.recorder(core);
        let rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let (scratch, prefill_name, failures_logged) = (Scratch::default(), String::new(), LogQuota::default());
        Self {
            shared,
            metrics,
            scratch,
            evidence,
            recorder,
            judged_by: None,
            prefill_name,
            rng,
            work: 0,
            now_ns: 0,
            failures_logged,
        }
    }

    /// Decides, but takes nobody's turn.
    pub(super) fn decide(&mut self, request: &RouteRequest<'_>, decision: &mut Decision) -> Result<()> {
        let (fleet, policies) = (self.shared.fleet.load(), self.shared.policies.load());
        let draws = Draws::new(self.rng.next_u64());
        self.judged_by = (!self.recorder.is_off()).then(|| *policies.of(request.space));
        propose(
            &self.shared.view(&fleet, &policies, (request.space, self.now_ns)),
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

    /// Takes the turn of the request that was just decided and does not wait.
    fn advance_round_robin(&mut self, request: &RouteRequest<'_>, decision: &mut Decision) {
        if decision.mode != Mode::RoundRobin {
            return;
        }
        let (fleet, policies) = (self.shared.fleet.load(), self.shared.policies.load());
        advance_round_robin(
            &self.shared.view(&fleet, &policies, (request.space, self.now_ns)),
            request,
            &mut self.scratch,
            decision,
        );
    }

    /// How the request waits that was just decided, if it has to.
    fn wait(&mut self, request: &RouteRequest<'_>, decision: &Decision) -> Option<Wait> {
        let queue = self.shared.policies.load().of(request.space).queue;
        queue.threshold?;
        queue.wait(request, self.scratch.observation(), decision, self.shared.now_ns())
    }

    pub(super) fn decide_and_book(
        &mut self,
        session: SessionId,
        request: &RouteRequest<'_>,
        decision: &mut Decision,
    ) -> Result<Routed> {
        for _ in 0..LEAVERS_CHOSEN_MAX {
            match self.decide_and_book_once(session, request, decision) {
                // Chosen from a table of before: the next has it no more.
                Err(error) if error.kind() == Kind::Overloaded && self.chosen_left(decision) => {
                    self.metrics.counters.bump(CoreCounter::RoutesDecidedAgain);
                }
                done => return done,
            }
        }
        self.decide_and_book_once(session, request, decision)
    }

    /// Whether the worker that was chosen can be booked no more.
    fn chosen_left(&self, decision: &Decision) -> bool {
        decision.candidates.first().is_some_and(|chosen| !self.shared.loads.is_admitted(chosen.index))
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
        // Another core may have booked the same worker meanwhile: decide once more, on what is known now.
        if self.scratch.chosen_moved(decision, &self.shared.loads) {
            self.metrics.counters.bump(CoreCounter::RoutesDecidedAgain);
            self.decide(request, decision)?;
        }
        if let Some(wait) = self.wait(request, decision) {
            return Ok(Routed::Busy(Box::new(wait)));
        }
        self.advance_round_robin(request, decision);
        let Some(chosen) = decision.candidates.first() else { return Ok(Routed::Decided) };
        let block_size = self.scratch.request_facts().block_size;
        let demand = demand(request, decision, chosen, block_size, self.scratch.shared_locals(decision));
        let now_ns = self.now_ns;
        let booked = self.shared.loads.book(session, book.request_id, book.attempt, chosen.index, demand, now_ns)?;
        if booked.superseded {
            self.metrics.counters.bump(CoreCounter::BookingsSuperseded);
        }
        // The attempt before may have been a pair, whatever this one is.
        let of_pair = book.attempt > 0 && {
            let prefill = prefill_name(book.request_id, &mut self.prefill_name);
            self.shared.loads.free_earlier(session, prefill, book.attempt, now_ns)
        };
        if booked.superseded || of_pair {
            self.shared.room.made_room();
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

impl CoreService {
    /// Binds the request's session to the worker that was just booked.
    fn bind(&self, request: &RouteRequest<'_>, decision: &Decision, uid: u32, now_ns: u64) {
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
        let ttl_s = self.shared.policies.load().of(request.space).affinity.ttl_s;
        match self.shared.affinities.bind(request.space, session, (chosen.worker, uid), seconds(now_ns), ttl_s) {
            BindOutcome::Done => {}
            BindOutcome::Evicted => self.metrics.counters.bump(CoreCounter::AffinityEvicted),
            BindOutcome::Skipped => self.metrics.counters.bump(CoreCounter::AffinitySkipped),
        }
    }

    /// Hands over what was just booked, if the worker's cache is predicted from it.
    fn predict(&self, request: &RouteRequest<'_>, decision: &Decision, now_ms: u64) {
        let Some(hand_over) = self.shared.predicting.of(request.space) else { return };
        let Some(chosen) = decision.candidates.first().filter(|chosen| chosen.trust.level == TrustLevel::Predicted)
        else {
            return;
        };
        let locals = self.scratch.locals(decision);
        if locals.is_empty() {
            return;
        }
        if let Err(NotTaken::Full) = hand_over.push(request.space, (chosen.index, chosen.worker), locals, now_ms) {
            self.metrics.counters.bump(CoreCounter::PredictionsDropped);
        }
    }
}

impl CoreService {
    /// Notes the decision for the journal and the shadow policy, where there is one.
    fn record(&mut self, request: &RouteRequest<'_>, decision: &Decision) {
        let Some(policy) = self.judged_by.filter(|_| self.recorder.takes(decision)) else { return };
        let (at_ns, observation) = (self.now_ns, self.scratch.observation());
        if self.recorder.note((at_ns, request.space), &policy, observation, decision) == Noted::Lost {
            self.metrics.counters.bump(CoreCounter::JournalLost);
        }
    }
}

impl Service for CoreService {
    fn hello(&self) -> HelloInfo<'_> {
        self.shared.hello()
    }

    fn fleet(&self) -> Guard<Arc<FleetTable>> {
        self.shared.fleet.load()
    }

    fn session_opened(&mut self, token: Option<SessionToken>, peer_uid: u32) -> Result<SessionId> {
        self.shared.loads.open_session(token, peer_uid)
    }

    fn session_closed(&mut self, session: SessionId) {
        self.shared.loads.close_session(session, self.shared.now_ns());
    }

    fn route(&mut self, session: SessionId, request: &RouteRequest<'_>, decision: &mut Decision) -> Result<Routed> {
        self.now_ns = self.shared.now_ns();
        let routed = match request.disaggregate {
            false => self.decide_and_book(session, request, decision)?,
            true => self.route_pair(session, request, decision)?,
        };
        if let busy @ Routed::Busy(_) = routed {
            return Ok(busy);
        }
        self.evidence.note(&self.shared.fleet.load(), request, decision, &self.scratch, self.now_ns / 1_000_000);
        self.record(request, decision);
        self.metrics.decisions.record(self.shared.now_ns() - self.now_ns);
        Ok(Routed::Decided)
    }

    fn take_work(&mut self) -> u64 {
        std::mem::take(&mut self.work)
    }

    fn lanes(&self) -> Arc<Lanes> {
        Arc::clone(&self.shared.lanes)
    }

    fn request_queue(&self) -> Option<Arc<RequestQueue>> {
        Some(Arc::clone(&self.shared.room))
    }

    fn has_room(&self, worker: WorkerIndex) -> bool {
        let fleet = self.shared.fleet.load();
        let Some(record) = fleet.worker(worker) else { return true };
        let load = self.shared.loads.read_at(worker, self.shared.now_ns());
        self.shared.policies.load().of(record.space).queue.has_room(load.prefill_tokens, record.batched_tokens_max)
    }

    fn booked_worker(&self, session: SessionId, booking: &BookingRef<'_>) -> Option<WorkerIndex> {
        self.shared.loads.worker_of(session, *booking)
    }

    fn booked_output(&self, session: SessionId, booking: &BookingRef<'_>) -> Option<(u32, u32)> {
        self.shared.loads.output_of(session, *booking)
    }

    fn overlap(&mut self, _: SessionId, request: &RouteRequest<'_>, decision: &mut Decision) -> Result<()> {
        self.now_ns = self.shared.now_ns();
        let (fleet, policies) = (self.shared.fleet.load(), self.shared.policies.load());
        overlaps(
            &self.shared.view(&fleet, &policies, (request.space, self.now_ns)),
            request,
            &mut self.scratch,
            decision,
        )?;
        self.work += self.scratch.work();
        Ok(())
    }

    fn potential_loads(&mut self, request: &RouteRequest<'_>, potential: &mut PotentialLoads) -> Result<()> {
        self.now_ns = self.shared.now_ns();
        let (fleet, policies) = (self.shared.fleet.load(), self.shared.policies.load());
        potential_loads(
            &self.shared.view(&fleet, &policies, (request.space, self.now_ns)),
            request,
            &mut self.scratch,
            potential,
        )?;
        self.work += self.scratch.work();
        Ok(())
    }

    fn prefill_complete(
        &mut self,
        session: SessionId,
        booking: &BookingRef<'_>,
        prefill_us: u64,
    ) -> Result<BookingOutcome> {
        Ok(self.shared.loads.prefill_complete(session, *booking, prefill_us, self.shared.now_ns()))
    }

    fn output_progress(
        &mut self,
        session: SessionId,
        booking: &BookingRef<'_>,
        output_tokens: u32,
    ) -> Result<BookingOutcome> {
        Ok(self.shared.loads.output_progress(session, *booking, output_tokens))
    }

    fn served(&mut self, session: SessionId, booking: &BookingRef<'_>, worker: Worker) -> Result<BookingOutcome> {
        let fleet = self.shared.fleet.load();
        let Some(record) = fleet.workers.iter().find(|record| record.worker == worker) else {
            return Err(no_worker(worker));
        };
        let (to, now_ns) = ((record.space, record.index), self.shared.now_ns());
        let moved = self.shared.loads.served(session, *booking, to, now_ns)?;
        if moved.unshared {
            self.metrics.counters.bump(CoreCounter::BookingsUnshared);
        }
        Ok(moved.outcome)
    }

    fn report_load(&mut self, session: SessionId, space: SpaceId, worker: Worker, load: EngineLoad) -> Result<bool> {
        let fleet = self.shared.fleet.load();
        let record = fleet.workers_of(space).find(|record| record.worker == worker);
        let record = record.ok_or_else(|| no_worker(worker))?;
        let reporter = Reporter { session, space, workers: fleet.workers_of(space).count() };
        let known = self.shared.loads.report_load_by(reporter, record.index, load, self.shared.now_ns());
        Ok(known.unwrap_or_else(|BeyondShare| {
            self.metrics.counters.bump(CoreCounter::LoadReportsRefusedUser);
            false
        }))
    }

    fn report_failure(&mut self, session: SessionId, space: SpaceId, worker: Worker, reason: &str) -> Result<u32> {
        let (fleet, now_ns) = (self.shared.fleet.load(), self.shared.now_ns());
        let failed = |record: &&WorkerRecord| worker.selects(record.worker);
        let reporter = Reporter { session, space, workers: fleet.workers_of(space).count() };
        let (mut longest_ns, mut is_refused) = (None, false);
        for record in fleet.workers_of(space).filter(failed) {
            let back_off_ns = self.shared.loads.report_failure(reporter, record.index, now_ns);
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
        let (loads, now_ns) = (&self.shared.loads, self.shared.now_ns());
        let BookingRef::Request { request_id, attempt } = booking else {
            return Ok(loads.free(session, *booking, now_ns));
        };
        // By its name a request ends as a whole.
        let freed = loads.free_request(session, request_id, *attempt, now_ns);
        if freed.prefill_half {
            self.shared.room.made_room();
        }
        Ok(freed.outcome)
    }
}

fn no_worker(worker: Worker) -> Error {
    let message = format!("there is no worker {worker} in the space");
    Error::new(Kind::InvalidArgument, message, "name a candidate of the route's reply")
}
