//! One run: a workload, a fleet of engines and a router, in virtual time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;

use super::figures::Outcome;
use super::prompt_blocks::blocks_of;
use super::router::{Decider, Router, Sent};
use super::workload::{Arrivals, Workload};
use crate::simulated_engine::{Block, Engine, EngineRequest, EngineSpec, KvEvent, Progress, RequestId};

/// Of how many decisions one is sampled for its regret: enough for a mean, and too few to be felt in the run's time.
const REGRET_EVERY: u32 = 64;

/// Nanoseconds of a second.
const SECOND_NS: f64 = 1e9;

/// A change of the fleet during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FleetChange {
    /// Seconds from the beginning.
    pub at_s: f64,
    /// The worker, from 0.
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
    /// The engines.
    pub engines: Vec<EngineSpec>,
    /// The delay from a change in an engine to its event's effect in the router, seconds.
    pub event_lag_s: f64,
    /// What happens to the fleet.
    pub changes: Vec<FleetChange>,
    /// The engines' true constants times this are what the router begins with; `None` = it knows nothing of them.
    pub prior_factor: Option<f64>,
    /// Whether gateways report first tokens. Otherwise they only book and free.
    pub reports_first_tokens: bool,
    /// The seed of all chance.
    pub seed: u64,
}

impl Settings {
    /// A fleet that nothing happens to. The router knows its constants, and events reach it after 5 ms.
    #[must_use]
    pub fn of(engines: Vec<EngineSpec>, seed: u64) -> Self {
        let (event_lag_s, changes, prior_factor) = (0.005, Vec::new(), Some(1.0));
        Self { engines, event_lag_s, changes, prior_factor, reports_first_tokens: true, seed }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    /// Events of a worker reach the router.
    Deliver {
        worker: u32,
    },
    /// The step of a worker ends, if it is still the same life of the worker.
    StepEnd {
        worker: u32,
        life: u32,
    },
    /// Blocks that a worker fetched from a lower tier arrive.
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
    /// Batches of events on their way to the router, in order.
    on_their_way: std::collections::VecDeque<Vec<KvEvent>>,
}

/// A run in progress.
pub(super) struct Run<'a> {
    workload: &'a Workload,
    settings: &'a Settings,
    workers: Vec<WorkerState>,
    router: Router,
    requests: Vec<RequestState>,
    heap: BinaryHeap<Reverse<(u64, u64, Happening)>>,
    happenings: u64,
    now_ns: u64,
    /// The next session to begin, if a number of sessions is live at a time.
    next_session: usize,
    progress: Vec<Progress>,
    scratch: Vec<Block>,
}

impl<'a> Run<'a> {
    pub(super) fn new(workload: &'a Workload, settings: &'a Settings, decider: Decider) -> Self {
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
            router: Router::new(&settings.engines, decider, settings.prior_factor, settings.seed),
            requests: Vec::new(),
            heap: BinaryHeap::new(),
            happenings: 0,
            now_ns: 0,
            next_session: 0,
            progress: Vec::new(),
            scratch: Vec::new(),
        };
        run.plan();
        run
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
                        self.router.apply(worker as usize, &events);
                    }
                }
                Happening::Change { at } => self.change(at as usize),
            }
        }
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
        for (at, change) in self.settings.changes.iter().enumerate() {
            self.schedule(ns(change.at_s), Happening::Change { at: at as u32 });
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
        let mut outcome = Outcome::new(prompt_tokens, output_tokens, self.now_ns);
        let fits = |worker: &WorkerState| worker.engine.can_hold(prompt_tokens, output_tokens);
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
        let Outcome { prompt_tokens, output_tokens, .. } = request.outcome;
        let sent = self.router.send(u64::from(id.0), &request.blocks, prompt_tokens, self.now_ns);
        let Some(sent) = sent else {
            request.outcome.is_refused = true;
            self.end_session();
            return;
        };
        request.sent = Some(sent);
        request.outcome.worker = sent.worker as u32;
        request.outcome.believed_tokens = sent.held_tokens;
        request.outcome.predicted_ttft_s = sent.predicted_ttft_s;
        if id.0.is_multiple_of(REGRET_EVERY) {
            request.outcome.regret_s = regret_s(&self.workers, sent.worker, &request.blocks, prompt_tokens);
        }
        let blocks = request.blocks.clone();
        self.workers[sent.worker].engine.push(EngineRequest { id, blocks, prompt_tokens, output_tokens });
        self.begin_step(sent.worker);
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

    /// Sends a worker's new events to the router.
    fn publish(&mut self, worker: usize) {
        let mut events = Vec::new();
        self.workers[worker].engine.take_events(&mut events);
        if events.is_empty() {
            return;
        }
        if self.settings.event_lag_s <= 0.0 {
            self.router.apply(worker, &events);
            return;
        }
        self.workers[worker].on_their_way.push_back(events);
        let at_ns = self.now_ns + ns(self.settings.event_lag_s);
        self.schedule(at_ns, Happening::Deliver { worker: worker as u32 });
    }

    /// Notes what requests went through, and reports it to the router.
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
                    if let Some(sent) = request.sent.as_ref().filter(|_| self.settings.reports_first_tokens) {
                        self.router.first_token(u64::from(id.0), sent, self.now_ns);
                    }
                }
                Progress::Finished(id) => {
                    let request = &mut self.requests[id.0 as usize];
                    request.outcome.end_ns = self.now_ns;
                    request.blocks = Rc::new([]);
                    let (session, turn) = (request.session, request.turn + 1);
                    if let Some(sent) = request.sent.take() {
                        self.router.end(u64::from(id.0), &sent, self.now_ns);
                    }
                    match self.workload.sessions[session as usize].turns.get(turn as usize) {
                        Some(next) => {
                            self.schedule(self.now_ns + ns(next.think_s), Happening::Arrive { session, turn });
                        }
                        None => self.end_session(),
                    }
                }
            }
        }
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
                self.router.set_present(worker, true);
            }
            FleetChangeKind::Dies => {
                let at = &mut self.workers[worker];
                let mut lost: Vec<RequestId> = at.engine.requests().collect();
                lost.sort_unstable();
                at.engine = Engine::new(at.engine.spec().clone());
                (at.is_present, at.life) = (false, at.life + 1);
                at.on_their_way.iter_mut().for_each(Vec::clear);
                self.router.set_present(worker, false);
                for id in lost {
                    let request = &mut self.requests[id.0 as usize];
                    request.outcome.first_ns = 0;
                    if let Some(sent) = request.sent.take() {
                        self.router.end(u64::from(id.0), &sent, self.now_ns);
                    }
                    self.send(id);
                }
            }
        }
    }
}

/// The regret of sending a prompt to `chosen`: see [`Outcome::regret_s`].
fn regret_s(workers: &[WorkerState], chosen: usize, blocks: &[Block], prompt_tokens: u32) -> f64 {
    let cost_s = |worker: &WorkerState| worker.slowness * worker.engine.prefill_ahead_s(blocks, prompt_tokens);
    let least_s = workers.iter().filter(|worker| worker.is_present).map(cost_s).fold(f64::INFINITY, f64::min);
    cost_s(&workers[chosen]) - least_s
}

/// Seconds in nanoseconds of virtual time.
fn ns(seconds: f64) -> u64 {
    (seconds * SECOND_NS) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine_law::EngineLaw;
    use crate::simulate::workload::{Session, Span, Turn};
    use crate::simulate::{SimulatedPolicy, simulate};

    const SPEC_TOKENS: u64 = 100_000;

    fn settings(workers: usize) -> Settings {
        let engine = EngineSpec {
            class: "test".into(),
            law: EngineLaw::of([5e-3, 5e-5, 1e-9], [1e-2, 3e-5, 3e-8]),
            kv_tokens: SPEC_TOKENS,
            block_size: 16,
            step_tokens_max: 2048,
            sequences_max: 64,
            tiers: Vec::new(),
        };
        Settings { event_lag_s: 0.0, prior_factor: None, ..Settings::of(vec![engine; workers], 1) }
    }

    /// A conversation: each prompt is all that was said before, and 200 tokens more.
    fn conversation(at: u64, turns: u64) -> Session {
        let mut prompt = vec![Span { content: 1, from: 0, tokens: 1000 }];
        let turn = |number: u64| {
            prompt.push(Span { content: at * 100 + number * 2 + 2, from: 0, tokens: 200 });
            let output = Span { content: at * 100 + number * 2 + 3, from: 0, tokens: 50 };
            let turn = Turn { think_s: if number == 0 { 0.0 } else { 1.5 }, prompt: prompt.clone(), output };
            prompt.push(output);
            turn
        };
        Session { start_s: at as f64 * 0.05, turns: (0..turns).map(turn).collect() }
    }

    fn run(workload: &Workload, settings: &Settings, policy: &str) -> Vec<Outcome> {
        simulate(workload, settings, &SimulatedPolicy::parse(policy).unwrap()).unwrap()
    }

    #[test]
    fn a_turn_comes_think_time_after_the_last_one_ended_and_finds_what_was_said() {
        let workload = Workload { sessions: vec![conversation(3, 4)], arrivals: Arrivals::Timed };
        let outcomes = run(&workload, &settings(1), "latency");
        assert_eq!(outcomes.len(), 4);
        assert_eq!(outcomes[0].arrived_ns, 150_000_000);
        for (before, turn) in outcomes.iter().zip(&outcomes[1..]) {
            assert_eq!(turn.arrived_ns, before.end_ns + 1_500_000_000);
            let said = before.prompt_tokens + before.output_tokens - 1;
            assert_eq!((turn.cached_tokens, turn.believed_tokens), (said / 16 * 16, said / 16 * 16));
        }
    }

    #[test]
    fn the_router_believes_what_the_engine_finds_if_events_do_not_lag_and_nothing_overlaps() {
        let mut sessions: Vec<_> = (0..40).map(|at| conversation(at, 3)).collect();
        sessions.iter_mut().enumerate().for_each(|(at, session)| session.start_s = at as f64 * 30.0);
        let outcomes = run(&Workload { sessions, arrivals: Arrivals::Timed }, &settings(3), "lmetric");
        assert!(outcomes.iter().all(|outcome| outcome.believed_tokens == outcome.cached_tokens));
        assert!(outcomes.iter().filter(|outcome| outcome.cached_tokens > 0).count() > 80);
    }

    #[test]
    fn sessions_are_live_one_after_the_other() {
        let sessions = (0..6).map(|at| conversation(at, 2)).collect();
        let outcomes = run(&Workload { sessions, arrivals: Arrivals::Live(1) }, &settings(2), "round-robin");
        assert_eq!(outcomes.len(), 12);
        let in_turn = outcomes.windows(2).all(|pair| pair[1].arrived_ns >= pair[0].end_ns);
        assert!(in_turn, "no two requests are in flight at once");
    }

    #[test]
    fn requests_of_a_worker_that_dies_run_elsewhere() {
        let sessions: Vec<_> = (0..60).map(|at| conversation(at, 2)).collect();
        let workload = Workload { sessions, arrivals: Arrivals::Timed };
        let change = |at_s, kind| FleetChange { at_s, worker: 0, kind };
        let changes = vec![change(1.0, FleetChangeKind::Dies), change(4.0, FleetChangeKind::Joins)];
        let outcomes = run(&workload, &Settings { changes, ..settings(2) }, "latency");
        assert_eq!(outcomes.len(), 120);
        assert!(outcomes.iter().all(|outcome| !outcome.is_refused && outcome.end_ns > outcome.first_ns));
        let on_dead =
            |outcome: &&Outcome| outcome.worker == 0 && (1_000_000_000..4_000_000_000).contains(&outcome.end_ns);
        assert_eq!(outcomes.iter().filter(on_dead).count(), 0);
        assert!(outcomes.iter().any(|outcome| outcome.worker == 0 && outcome.arrived_ns > 4_000_000_000), "it is back");
    }

    #[test]
    fn a_slow_worker_gets_less_once_that_is_learnt() {
        let sessions: Vec<_> = (0..400).map(|at| conversation(at, 1)).collect();
        let workload = Workload { sessions, arrivals: Arrivals::Timed };
        let changes = vec![FleetChange { at_s: 0.0, worker: 0, kind: FleetChangeKind::Slows(4.0) }];
        let outcomes = run(&workload, &Settings { changes, ..settings(4) }, "latency");
        let of_slow = outcomes[200..].iter().filter(|outcome| outcome.worker == 0).count();
        assert!(of_slow < 40, "{of_slow} of 200 on one of four workers");
    }

    #[test]
    fn a_request_that_no_engine_can_hold_is_refused_and_ends_its_session() {
        let mut session = conversation(1, 3);
        session.turns[1].prompt = vec![Span { content: 9, from: 0, tokens: SPEC_TOKENS as u32 }];
        let outcomes = run(&Workload { sessions: vec![session], arrivals: Arrivals::Timed }, &settings(2), "kv");
        assert_eq!(outcomes.iter().map(|outcome| outcome.is_refused).collect::<Vec<_>>(), [false, true]);
    }

    #[test]
    fn lagging_events_leave_the_router_behind() {
        let sessions: Vec<_> = (0..30).map(|at| conversation(at, 1)).collect();
        let workload = Workload { sessions, arrivals: Arrivals::Timed };
        let believed = |event_lag_s| {
            let outcomes = run(&workload, &Settings { event_lag_s, ..settings(1) }, "kv");
            outcomes.iter().map(|outcome| u64::from(outcome.believed_tokens)).sum::<u64>()
        };
        assert!(believed(0.0) > believed(0.5) && believed(1e6) == 0);
    }
}
