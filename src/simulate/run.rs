//! One run: a workload, a fleet of engines and its routers, in virtual time.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;

use super::figures::Outcome;
use super::prompt_blocks::blocks_of;
use super::router::Decider;
use super::routers::{RouterSettings, Routers, Sent};
use super::workload::{Arrivals, Workload};
use crate::fleet::PoolRole;
use crate::route::DisaggregationPolicy;
use crate::simulated_engine::{Block, Engine, EngineRequest, EngineSpec, KvEvent, Part, Progress, RequestId};

/// Of how many decisions one is sampled for its regret and the engines' queues: enough for a mean, and too few to be felt
/// in the run's time.
const SAMPLE_EVERY: u32 = 64;

/// Arrivals after which a run says how far it is.
const ARRIVED_EVERY: u32 = 512;

/// Nanoseconds of a second.
const SECOND_NS: f64 = 1e9;

/// A change of the fleet during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FleetChange {
    /// Seconds from the beginning.
    pub at_s: f64,
    /// The worker, from 0. One whose first change is to join is not there before.
    pub worker: usize,
    /// What happens to it.
    pub kind: FleetChangeKind,
}

/// What happens to a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FleetChangeKind {
    /// It loses its requests and its cache. The gateway sends the requests to others.
    Dies,
    /// It joins with an empty cache.
    Joins,
    /// Its steps take this many times as long.
    Slows(f64),
}

/// What a run depends on, besides workload and policy.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The engines: all of role `Both`, or a pool that prefills and one that decodes. Their blocks have one size.
    pub engines: Vec<EngineSpec>,
    /// The delay from a change in an engine to its event's effect in the router, seconds.
    pub event_lag_s: f64,
    /// What happens to the fleet.
    pub changes: Vec<FleetChange>,
    /// The engines' true constants times this are what the router begins with; `None` = it knows nothing of them.
    pub prior_factor: Option<f64>,
    /// Whether gateways report first tokens. Otherwise they only book and free.
    pub reports_first_tokens: bool,
    /// How many routers decide, and what they know of each other.
    pub routers: RouterSettings,
    /// When our policies bypass the pool that prefills.
    pub disaggregation: DisaggregationPolicy,
    /// The seed of all chance.
    pub seed: u64,
}

/// The delay of KV events, unless a fleet's description has another: as ZeroMQ and a busy engine take.
pub const EVENT_LAG_S: f64 = 0.005;

impl Settings {
    /// These engines behind one router that knows their constants, with the usual lag of events, and nothing happens to
    /// them.
    #[must_use]
    pub fn of(engines: Vec<EngineSpec>, seed: u64) -> Self {
        Self {
            engines,
            event_lag_s: EVENT_LAG_S,
            changes: Vec::new(),
            prior_factor: Some(1.0),
            reports_first_tokens: true,
            routers: RouterSettings::default(),
            disaggregation: DisaggregationPolicy::default(),
            seed,
        }
    }

    /// Whether one pool of engines prefills for another.
    #[must_use]
    pub fn has_pools(&self) -> bool {
        self.engines.iter().any(|engine| engine.role == PoolRole::Prefill)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    /// Events of a worker reach the routers.
    Deliver {
        worker: u32,
    },
    /// What one router did reaches the others.
    Hear,
    /// The step of a worker ends, if it is still the same life of the worker.
    StepEnd {
        worker: u32,
        life: u32,
    },
    /// A worker that had nothing to compute has something now.
    Wake {
        worker: u32,
        life: u32,
    },
    Change {
        at: u32,
    },
    Arrive {
        session: u32,
        turn: u32,
    },
}

struct RequestState {
    blocks: Rc<[Block]>,
    session: u32,
    turn: u32,
    sent: Option<Sent>,
    outcome: Outcome,
}

struct WorkerState {
    engine: Engine,
    slowness: f64,
    is_present: bool,
    life: u32,
    /// Batches of events on their way to the routers, in order.
    on_their_way: std::collections::VecDeque<Vec<KvEvent>>,
}

/// A run in progress.
pub(super) struct Run<'a> {
    workload: &'a Workload,
    settings: &'a Settings,
    workers: Vec<WorkerState>,
    routers: Routers,
    requests: Vec<RequestState>,
    heap: BinaryHeap<Reverse<(u64, u64, Happening)>>,
    happenings: u64,
    now_ns: u64,
    /// The next session to begin, if a number of sessions is live at a time.
    next_session: usize,
    progress: Vec<Progress>,
    scratch: Vec<Block>,
    /// Hears how many more requests have arrived.
    arrived: &'a dyn Fn(u64),
}

impl<'a> Run<'a> {
    /// A run of a workload. `deciders` makes the deciders of one router, by pool; `arrived` hears how many more requests
    /// have arrived. `None`: there are no deciders.
    pub(super) fn new(
        workload: &'a Workload,
        settings: &'a Settings,
        deciders: impl FnMut() -> Option<Vec<Decider>>,
        arrived: &'a dyn Fn(u64),
    ) -> Option<Self> {
        let worker = |spec: &EngineSpec| WorkerState {
            engine: Engine::new(spec.clone()),
            slowness: 1.0,
            is_present: true,
            life: 0,
            on_their_way: std::collections::VecDeque::new(),
        };
        let mut run = Self {
            workload,
            settings,
            workers: settings.engines.iter().map(worker).collect(),
            routers: Routers::new(settings, deciders)?,
            requests: Vec::new(),
            heap: BinaryHeap::new(),
            happenings: 0,
            now_ns: 0,
            next_session: 0,
            progress: Vec::new(),
            scratch: Vec::new(),
            arrived,
        };
        run.plan();
        Some(run)
    }

    /// Runs to the end. Returns one outcome for each request that arrived, in the order of arrival.
    pub(super) fn finish(mut self) -> Vec<Outcome> {
        while let Some(Reverse((at_ns, _, happening))) = self.heap.pop() {
            self.now_ns = at_ns;
            match happening {
                Happening::Arrive { session, turn } => self.arrive(session, turn),
                Happening::StepEnd { worker, life } => self.end_step(worker as usize, life),
                Happening::Wake { worker, life } => {
                    if self.workers[worker as usize].life == life {
                        self.begin_step(worker as usize);
                    }
                }
                Happening::Deliver { worker } => {
                    if let Some(events) = self.workers[worker as usize].on_their_way.pop_front() {
                        self.routers.apply(worker as usize, &events);
                    }
                }
                Happening::Hear => self.routers.hear(self.now_ns),
                Happening::Change { at } => self.change(at as usize),
            }
        }
        (self.arrived)(self.requests.len() as u64 % u64::from(ARRIVED_EVERY));
        self.requests.into_iter().map(|request| request.outcome).collect()
    }

    fn plan(&mut self) {
        match self.workload.arrivals {
            Arrivals::Timed => {
                for (at, session) in self.workload.sessions.iter().enumerate() {
                    self.schedule(ns(session.start_s), Happening::Arrive { session: at as u32, turn: 0 });
                }
            }
            Arrivals::Live(live) => {
                for at in 0..live.min(self.workload.sessions.len()) {
                    // Sessions do not all begin at once: the first minute takes them in.
                    let begins_ns = ns(60.0 * at as f64 / live as f64);
                    self.schedule(begins_ns, Happening::Arrive { session: at as u32, turn: 0 });
                }
                self.next_session = live.min(self.workload.sessions.len());
            }
        }
        let changes = &self.settings.changes;
        for (at, change) in changes.iter().enumerate() {
            self.schedule(ns(change.at_s), Happening::Change { at: at as u32 });
        }
        for worker in 0..self.workers.len() {
            let of_worker = changes.iter().filter(|change| change.worker == worker);
            let first = of_worker.min_by(|a, b| a.at_s.total_cmp(&b.at_s));
            if first.is_some_and(|change| change.kind == FleetChangeKind::Joins) {
                self.workers[worker].is_present = false;
                self.routers.set_present(worker, false);
            }
        }
    }

    fn schedule(&mut self, at_ns: u64, happening: Happening) {
        self.happenings += 1;
        self.heap.push(Reverse((at_ns, self.happenings, happening)));
    }

    fn arrive(&mut self, session: u32, turn: u32) {
        let spec_size = self.settings.engines[0].block_size;
        let asked = &self.workload.sessions[session as usize].turns[turn as usize];
        let prompt_tokens = asked.prompt_tokens();
        let output_tokens = asked.output.tokens.max(1);
        let id = RequestId(self.requests.len() as u32);
        if id.0 % ARRIVED_EVERY == ARRIVED_EVERY - 1 {
            (self.arrived)(u64::from(ARRIVED_EVERY));
        }
        let mut outcome = Outcome::new(prompt_tokens, output_tokens, self.now_ns);
        let fits = |worker: &WorkerState| match worker.engine.spec().role {
            PoolRole::Prefill => worker.engine.can_hold(prompt_tokens, 0),
            PoolRole::Decode | PoolRole::Both => worker.engine.can_hold(prompt_tokens, output_tokens),
        };
        if !self.workers.iter().all(fits) {
            outcome.is_refused = true;
            self.requests.push(RequestState { blocks: Rc::new([]), session, turn, sent: None, outcome });
            self.end_session();
            return;
        }
        self.scratch.clear();
        blocks_of(asked, spec_size, &mut self.scratch);
        let blocks: Rc<[Block]> = self.scratch.as_slice().into();
        self.requests.push(RequestState { blocks, session, turn, sent: None, outcome });
        self.send(id);
    }

    fn send(&mut self, id: RequestId) {
        let request = &mut self.requests[id.0 as usize];
        let (prompt_tokens, blocks) = (request.outcome.prompt_tokens, request.blocks.clone());
        let Some(sent) = self.routers.send((id, request.session), &blocks, prompt_tokens, self.now_ns) else {
            request.outcome.is_refused = true;
            self.end_session();
            return;
        };
        request.sent = Some(sent);
        request.outcome.worker = sent.computes() as u32;
        request.outcome.believed_tokens = sent.held_tokens;
        request.outcome.predicted_ttft_s = sent.predicted_ttft_s;
        if id.0.is_multiple_of(SAMPLE_EVERY) {
            let pool = Pool::of(&self.workers, sent.computes());
            request.outcome.regret_s = pool.regret_s(sent.computes(), &blocks, prompt_tokens);
            request.outcome.imbalance_s = pool.imbalance_s();
        }
        self.post();
        let part = if sent.prefills.is_some() { Part::Prefill } else { Part::Whole };
        self.push(sent.computes(), id, part);
        self.begin_step(sent.computes());
    }

    /// Gives a request to an engine.
    fn push(&mut self, worker: usize, id: RequestId, part: Part) {
        let request = &self.requests[id.0 as usize];
        let Outcome { prompt_tokens, output_tokens, .. } = request.outcome;
        let blocks = request.blocks.clone();
        self.workers[worker].engine.push(EngineRequest { id, blocks, prompt_tokens, output_tokens, part });
    }

    /// Schedules when the routers hear what was reported since the last call.
    fn post(&mut self) {
        let heard_ns = self.now_ns + ns(self.routers.age_s());
        for _ in 0..self.routers.take_sent_off() {
            self.schedule(heard_ns, Happening::Hear);
        }
    }

    /// Lets a worker look for something to compute.
    fn wake(&mut self, worker: usize) {
        let life = self.workers[worker].life;
        self.schedule(self.now_ns, Happening::Wake { worker: worker as u32, life });
    }

    fn begin_step(&mut self, worker: usize) {
        let at = &mut self.workers[worker];
        if at.engine.is_stepping() || !at.is_present {
            return;
        }
        let mut progress = std::mem::take(&mut self.progress);
        let (step_s, life) = (at.engine.begin_step(self.now_ns, &mut progress), at.life);
        let slowness = at.slowness;
        match step_s {
            Some(step_s) => {
                let end_ns = self.now_ns + ns(step_s * slowness).max(1);
                self.schedule(end_ns, Happening::StepEnd { worker: worker as u32, life });
            }
            None => {
                if let Some(at_ns) = at.engine.next_fetched_ns() {
                    self.schedule(at_ns, Happening::Wake { worker: worker as u32, life });
                }
            }
        }
        self.tell(&mut progress);
        self.progress = progress;
        self.publish(worker);
    }

    fn end_step(&mut self, worker: usize, life: u32) {
        if self.workers[worker].life != life {
            return;
        }
        let mut progress = std::mem::take(&mut self.progress);
        self.workers[worker].engine.end_step(&mut progress);
        self.publish(worker);
        self.tell(&mut progress);
        self.progress = progress;
        self.begin_step(worker);
    }

    /// Sends a worker's new events to the routers.
    fn publish(&mut self, worker: usize) {
        let mut events = Vec::new();
        self.workers[worker].engine.take_events(&mut events);
        if events.is_empty() {
            return;
        }
        if self.settings.event_lag_s <= 0.0 {
            self.routers.apply(worker, &events);
            return;
        }
        self.workers[worker].on_their_way.push_back(events);
        let at_ns = self.now_ns + ns(self.settings.event_lag_s);
        self.schedule(at_ns, Happening::Deliver { worker: worker as u32 });
    }

    /// Notes what requests went through, and reports it to their routers.
    fn tell(&mut self, progress: &mut Vec<Progress>) {
        for told in progress.drain(..) {
            match told {
                Progress::Scheduled { id, cached_tokens } => {
                    self.requests[id.0 as usize].outcome.cached_tokens = cached_tokens;
                }
                Progress::Preempted(id) => self.requests[id.0 as usize].outcome.preemptions += 1,
                Progress::FirstToken(id) => {
                    let request = &mut self.requests[id.0 as usize];
                    request.outcome.first_ns = self.now_ns;
                    let Some(sent) = request.sent else { continue };
                    if self.settings.reports_first_tokens || sent.prefills.is_some() {
                        self.routers.first_token(&sent, self.now_ns);
                    }
                    if let Some(prefills) = sent.prefills {
                        self.hand_over(id, prefills, sent.worker);
                    }
                }
                Progress::Received(id) => {
                    if let Some(prefills) = self.requests[id.0 as usize].sent.and_then(|sent| sent.prefills) {
                        self.forget(prefills, id);
                    }
                }
                Progress::Finished(id) => self.finish_request(id),
            }
        }
        self.post();
    }

    /// The worker that prefilled a request lets another one decode it.
    fn hand_over(&mut self, id: RequestId, prefills: usize, decodes: usize) {
        if self.requests[id.0 as usize].outcome.output_tokens == 1 {
            self.forget(prefills, id);
            self.finish_request(id);
        } else if self.workers[decodes].is_present {
            self.push(decodes, id, Part::Decode);
            self.wake(decodes);
        } else {
            self.forget(prefills, id);
            self.send_again(id);
        }
    }

    /// A worker drops what it still holds for a request, and may have room for others now.
    fn forget(&mut self, worker: usize, id: RequestId) {
        self.workers[worker].engine.forget(id);
        self.wake(worker);
    }

    fn finish_request(&mut self, id: RequestId) {
        let request = &mut self.requests[id.0 as usize];
        request.outcome.end_ns = self.now_ns;
        request.blocks = Rc::new([]);
        let (session, turn) = (request.session, request.turn + 1);
        if let Some(sent) = request.sent.take() {
            self.routers.end(&sent, self.now_ns);
        }
        match self.workload.sessions[session as usize].turns.get(turn as usize) {
            Some(next) => self.schedule(self.now_ns + ns(next.think_s), Happening::Arrive { session, turn }),
            None => self.end_session(),
        }
    }

    /// A request has lost a worker: it begins again.
    fn send_again(&mut self, id: RequestId) {
        let request = &mut self.requests[id.0 as usize];
        request.outcome.first_ns = 0;
        if let Some(sent) = request.sent.take() {
            self.routers.end(&sent, self.now_ns);
        }
        self.send(id);
    }

    /// If a number of sessions is live at a time, the next one begins.
    fn end_session(&mut self) {
        if matches!(self.workload.arrivals, Arrivals::Live(_)) && self.next_session < self.workload.sessions.len() {
            let session = self.next_session as u32;
            self.next_session += 1;
            self.schedule(self.now_ns, Happening::Arrive { session, turn: 0 });
        }
    }

    fn change(&mut self, at: usize) {
        let FleetChange { worker, kind, .. } = self.settings.changes[at];
        match kind {
            FleetChangeKind::Slows(slowness) => self.workers[worker].slowness = slowness,
            FleetChangeKind::Joins => {
                self.workers[worker].is_present = true;
                self.routers.set_present(worker, true);
            }
            FleetChangeKind::Dies => self.die(worker),
        }
    }

    fn die(&mut self, worker: usize) {
        let at = &mut self.workers[worker];
        let mut lost: Vec<RequestId> = at.engine.requests().collect();
        lost.sort_unstable();
        at.engine = Engine::new(at.engine.spec().clone());
        (at.is_present, at.life) = (false, at.life + 1);
        at.on_their_way.iter_mut().for_each(Vec::clear);
        self.routers.set_present(worker, false);
        for id in lost {
            let sent = self.requests[id.0 as usize].sent;
            for half in sent.into_iter().flat_map(|sent| [sent.computes(), sent.worker]).filter(|half| *half != worker)
            {
                self.forget(half, id);
            }
            self.send_again(id);
        }
    }
}

/// The workers among which the one that computes a prompt was chosen.
struct Pool<'a> {
    workers: Vec<&'a WorkerState>,
    all: &'a [WorkerState],
}

impl<'a> Pool<'a> {
    /// The workers that are there, of the pool of one of them.
    fn of(all: &'a [WorkerState], chosen: usize) -> Self {
        let role = all[chosen].engine.spec().role;
        Self {
            workers: all.iter().filter(|worker| worker.is_present && worker.engine.spec().role == role).collect(),
            all,
        }
    }

    /// The regret of sending a prompt to `chosen`: see [`Outcome::regret_s`].
    fn regret_s(&self, chosen: usize, blocks: &[Block], prompt_tokens: u32) -> f64 {
        let cost_s = |worker: &WorkerState| worker.slowness * worker.engine.prefill_ahead_s(blocks, prompt_tokens);
        let least_s = self.workers.iter().map(|worker| cost_s(worker)).fold(f64::INFINITY, f64::min);
        cost_s(&self.all[chosen]) - least_s
    }

    /// How unequal the queues are: see [`Outcome::imbalance_s`].
    fn imbalance_s(&self) -> f64 {
        let queue_s = |worker: &&WorkerState| worker.slowness * worker.engine.prefill_ahead_s(&[], 0);
        let queues: Vec<f64> = self.workers.iter().map(queue_s).collect();
        let mean_s = queues.iter().sum::<f64>() / queues.len() as f64;
        (queues.iter().map(|queue_s| (queue_s - mean_s).powi(2)).sum::<f64>() / queues.len() as f64).sqrt()
    }
}

/// Seconds in nanoseconds of virtual time.
fn ns(seconds: f64) -> u64 {
    (seconds * SECOND_NS) as u64
}
