//! Decisions of several threads on one index, one fleet table, one set of loads and one table of sessions.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use kvrouted::fleet::FleetTable;
use kvrouted::ids::Scheme;
use kvrouted::index::IndexReader;
use kvrouted::load::{BookingOutcome, BookingRef, Loads, LoadsConfig, SessionId};
use kvrouted::route::{
    AffinityTable, Decision, Draws, Policy, Prompt, RouteRequest, Scratch, View, decide, propose_again,
};

use super::{HashedPrompt, Scheduled, Span};
use crate::args::CoresArgs;
use crate::decide::{NS_MAX, WARM_UP, scheme};
use crate::failure::Failure;
use crate::measure::Percentiles;
use crate::table::SPACE;

/// Bookings that one look for expired ones may end.
const EXPIRED_MAX: usize = 256;

/// All that the threads share.
pub(super) struct Decisions<'a> {
    scheme: Scheme,
    prompts: &'a [HashedPrompt],
    fleet: FleetTable,
    index: IndexReader,
    loads: Loads,
    affinities: AffinityTable,
    policy: Policy,
    /// One for each thread.
    sessions: Vec<SessionId>,
    in_flight: u32,
    length: Duration,
    began: Instant,
}

/// What the threads of one pass did, together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass {
    pub(super) decisions_per_s: f64,
    /// Processor time of a decision, nanoseconds.
    pub(super) cpu_ns: f64,
    /// Processors that the threads had, on average.
    pub(super) processors_used: f64,
    /// The part of their time for which threads were ready to run, but another thread had the processor.
    pub(super) queued_share: f64,
    /// Of a decision with its booking and the end of another, nanoseconds.
    pub(super) latency: Percentiles,
    /// Decisions that were made again, of all.
    pub(super) again_share: f64,
    /// Reads of active prompts that took the lock, of all decisions.
    pub(super) locked_share: f64,
    /// In `Loads::book` and `Loads::free`, for each decision, nanoseconds, the clock's own cost included.
    pub(super) locked_ns: f64,
}

impl<'a> Decisions<'a> {
    /// On a filled index and the table of its workers.
    ///
    /// # Errors
    /// A session cannot be opened.
    pub(super) fn new(
        args: &CoresArgs,
        (index, fleet): (IndexReader, FleetTable),
        prompts: &'a [HashedPrompt],
    ) -> Result<Self, Failure> {
        let loads = Loads::new(usize::from(args.tape.workers), LoadsConfig::default());
        let threads_max = args.threads.iter().copied().max().unwrap_or(1);
        let sessions = (0..threads_max).map(|_| loads.open_session(None, 0)).collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            scheme: scheme(&args.tape),
            prompts,
            fleet,
            index,
            loads,
            affinities: AffinityTable::new(0, 0),
            policy: Policy::kv(),
            sessions,
            in_flight: args.in_flight,
            length: Duration::from_secs_f64(args.seconds),
            began: Instant::now(),
        })
    }

    /// Lets `threads` threads decide at the same time.
    ///
    /// # Errors
    /// A decision or a booking is refused.
    pub(super) fn pass(&self, threads: u16, timing: Timing, clock_ns: f64) -> Result<Pass, Failure> {
        let start_line = Barrier::new(usize::from(threads));
        let done: Result<Vec<Done>, Failure> = std::thread::scope(|scope| {
            let running: Vec<_> = self
                .sessions
                .iter()
                .take(usize::from(threads))
                .zip(0..)
                .map(|(session, at)| ServingThread::new(self, (*session, at), threads, timing))
                .map(|thread| scope.spawn(|| thread.run(&start_line)))
                .collect();
            let ended = running.into_iter().map(|thread| thread.join());
            ended.map(|done| done.map_err(|_| Failure::Contract("a thread panicked".to_owned()))?).collect()
        });
        // As the daemon does every second.
        self.loads.expire(self.began.elapsed().as_nanos() as u64, EXPIRED_MAX);
        Ok(Pass::of(&done?, clock_ns))
    }
}

impl Pass {
    fn of(done: &[Done], clock_ns: f64) -> Self {
        let mut latency = histogram();
        for thread in done {
            latency += &thread.latency;
        }
        let sum = |of: fn(&Done) -> u64| done.iter().map(of).sum::<u64>() as f64;
        let (seconds, decisions) =
            (Span::seconds_around(done.iter().map(|done| done.span)), sum(|done| done.decisions));
        let of_decisions = |number: f64| number / decisions.max(1.0);
        Self {
            decisions_per_s: decisions / seconds,
            cpu_ns: of_decisions(sum(|done| done.scheduled.cpu_ns)),
            processors_used: sum(|done| done.scheduled.cpu_ns) / 1e9 / seconds,
            queued_share: sum(|done| done.scheduled.queued_ns) / 1e9 / seconds / done.len().max(1) as f64,
            latency: Percentiles::of(&latency, clock_ns),
            again_share: of_decisions(sum(|done| done.again)),
            locked_share: of_decisions(sum(|done| done.locked)),
            locked_ns: of_decisions(sum(|done| done.locked_ns)),
        }
    }
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timing {
    /// Decisions as a whole.
    Whole,
    /// Booking and ending as well, which takes two more readings of the clock.
    Locked,
}

/// What one thread did.
struct Done {
    span: Span,
    decisions: u64,
    scheduled: Scheduled,
    latency: Histogram<u64>,
    again: u64,
    locked: u64,
    locked_ns: u64,
}

fn histogram() -> Histogram<u64> {
    Histogram::new_with_max(NS_MAX, 3).expect("3 digits up to 10 s is a histogram")
}

/// One thread, with what a serving thread has of its own.
struct ServingThread<'a> {
    shared: &'a Decisions<'a>,
    indexes: [IndexReader; 1],
    session: SessionId,
    /// Its number.
    at: u64,
    scratch: Scratch,
    decision: Decision,
    /// Names of its requests in flight, the oldest first.
    running: VecDeque<String>,
    /// A name that is not in use: names take no memory once all are in flight.
    unused: String,
    in_flight: usize,
    /// The hashes of the present request, as in a connection's buffer.
    copied: Vec<u8>,
    asked: u64,
    first_prompt: usize,
    timing: Timing,
    again: u64,
    locked: u64,
}

/// The times of one turn.
struct Turn {
    began: Instant,
    ended: Instant,
    /// In `Loads::book` and `Loads::free`, nanoseconds; 0 unless that is timed.
    locked_ns: u64,
}

impl<'a> ServingThread<'a> {
    fn new(shared: &'a Decisions<'a>, (session, at): (SessionId, u64), threads: u16, timing: Timing) -> Self {
        let in_flight = (shared.in_flight / u32::from(threads)).max(1) as usize;
        Self {
            shared,
            indexes: [shared.index.clone()],
            session,
            at,
            scratch: Scratch::default(),
            // As for a request that does not ask to explain.
            decision: Decision { only_costs: true, ..Decision::default() },
            running: VecDeque::with_capacity(in_flight + 1),
            unused: String::new(),
            in_flight,
            copied: Vec::new(),
            asked: 0,
            // All threads go round all prompts, each from a place of its own: a part of the prompts for each thread
            // would fit caches better the more threads there are.
            first_prompt: shared.prompts.len() * at as usize / usize::from(threads),
            timing,
            again: 0,
            locked: 0,
        }
    }

    /// Decides until the time is over, and ends what is in flight then.
    fn run(mut self, start_line: &Barrier) -> Result<Done, Failure> {
        let warmed_up = (0..self.in_flight + WARM_UP).try_for_each(|_| self.turn().map(drop));
        start_line.wait();
        warmed_up?;
        (self.again, self.locked) = (0, 0);
        let (mut latency, mut decisions, mut locked_ns) = (histogram(), 0, 0);
        let (before, began) = (Scheduled::so_far(), Instant::now());
        let ended = loop {
            let turn = self.turn()?;
            decisions += 1;
            locked_ns += turn.locked_ns;
            latency.saturating_record(((turn.ended - turn.began).as_nanos() as u64).max(1));
            if turn.ended - began >= self.shared.length {
                break turn.ended;
            }
        };
        let scheduled = Scheduled::since(before);
        while let Some(request_id) = self.running.pop_front() {
            self.free(&request_id, Instant::now())?;
        }
        let (span, again, locked) = (Span { began, ended }, self.again, self.locked);
        Ok(Done { span, decisions, scheduled, latency, again, locked, locked_ns })
    }

    /// Decides and books one request, and ends the oldest.
    fn turn(&mut self) -> Result<Turn, Failure> {
        let prompt = &self.shared.prompts[(self.first_prompt + self.asked as usize) % self.shared.prompts.len()];
        self.asked += 1;
        self.copied.clear();
        self.copied.extend_from_slice(&prompt.hashes);
        let mut request_id = std::mem::take(&mut self.unused);
        request_id.clear();
        // A string takes all that is written into it.
        let _ = write!(request_id, "request-{}", self.asked);
        let began = Instant::now();
        let booked_in_ns = self.decide_and_book(prompt.tokens, &request_id, self.time_ns(began))?;
        self.running.push_back(request_id);
        let freed = Instant::now();
        if self.running.len() > self.in_flight
            && let Some(oldest) = self.running.pop_front()
        {
            self.free(&oldest, freed)?;
            self.unused = oldest;
        }
        let ended = Instant::now();
        let locked_ns = match self.timing {
            Timing::Whole => 0,
            Timing::Locked => booked_in_ns + (ended - freed).as_nanos() as u64,
        };
        Ok(Turn { began, ended, locked_ns })
    }

    /// Nanoseconds of the bookings' clock.
    fn time_ns(&self, at: Instant) -> u64 {
        (at - self.shared.began).as_nanos() as u64
    }

    /// Returns how long booking took, nanoseconds; 0 unless that is timed.
    fn decide_and_book(&mut self, tokens: u32, request_id: &str, now_ns: u64) -> Result<u64, Failure> {
        let Decisions { scheme, fleet, loads, affinities, policy, .. } = self.shared;
        let prompt = Prompt::LocalHashes { hashes: &self.copied, scheme: *scheme, token_count: tokens };
        let request = RouteRequest::new(SPACE, prompt);
        let (indexes, predictions, round_robin_counters) = (&self.indexes, &[], &[]);
        let view = View { fleet, indexes, predictions, loads, policy, round_robin_counters, affinities, now_ns };
        let draws = || Draws::new(self.at << 40 | self.asked);
        let (scratch, decision) = (&mut self.scratch, &mut self.decision);
        decide(&view, &request, scratch, draws(), decision)?;
        self.locked += u64::from(scratch.active_locked());
        // As a serving thread does: another one may have booked the same worker meanwhile.
        if scratch.chosen_moved(decision, loads) {
            self.again += 1;
            propose_again(&view, &request, scratch, draws(), decision)?;
            self.locked += u64::from(scratch.active_locked());
        }
        let chosen = decision.candidates.first();
        let chosen = chosen.ok_or_else(|| Failure::Contract("no worker was chosen".to_owned()))?;
        let demand = scratch.demand(&request, decision, chosen);
        let book = || loads.book(self.session, request_id, 0, chosen.index, demand, now_ns);
        match self.timing {
            Timing::Whole => book().map(|_| 0),
            Timing::Locked => {
                let start = Instant::now();
                book().map(|_| start.elapsed().as_nanos() as u64)
            }
        }
        .map_err(Failure::from)
    }

    fn free(&self, request_id: &str, now: Instant) -> Result<(), Failure> {
        let reference = BookingRef::Request { request_id, attempt: 0 };
        match self.shared.loads.free(self.session, reference, self.time_ns(now)) {
            BookingOutcome::Applied => Ok(()),
            outcome => Err(Failure::Contract(format!("the end of {request_id}: {outcome:?}"))),
        }
    }
}
