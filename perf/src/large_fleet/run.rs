//! The whole run: engines with full caches, then the daemons, then measurements one after the other, each followed by a
//! comparison of all daemons with all caches.

use std::collections::BTreeMap;
use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use super::children::{Engines, Work};
use super::gateways::{Asked, Gateways};
use super::orders::{Order, RankState};
use super::report::{End, Partition, Report, Row, Start};
use super::router::{Behind, Router, Started, WorkerFiles};
use super::verify::{Verified, verify};
use crate::args::FleetArgs;
use crate::compare::machine;
use crate::failure::Failure;
use crate::socket::load_average;

/// How long daemons may take until they have applied everything.
const SETTLE_MAX: Duration = Duration::from_secs(90);
/// How often they are asked.
const ASK_EVERY: Duration = Duration::from_millis(20);
/// Request numbers of one measurement.
const NUMBERS: u64 = 1 << 40;

/// What runs.
struct Fleet<'a> {
    args: &'a FleetArgs,
    engines: Engines,
    files: WorkerFiles,
    routers: Vec<Router>,
    /// The worker in each place.
    workers: Vec<u32>,
    next_worker: u32,
    next_place: usize,
    /// Measurements so far.
    measured: u64,
}

/// How daemons got to the engines' last batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settled {
    /// Batches that the slowest daemon had not applied when publishing ended.
    pub(super) behind: u64,
    /// Seconds until it had applied all; `None` = not in time.
    pub(super) applied_s: Option<f64>,
    /// Seconds until all overlaps were exact too; `None` = not in time.
    pub(super) exact_s: Option<f64>,
}

/// Measures everything.
///
/// # Errors
/// A process ends or does not answer.
pub(crate) fn run(args: &FleetArgs) -> Result<Report, Failure> {
    let (mut fleet, start) = Fleet::start(args)?;
    tell(&start.line());
    let mut rows = Vec::new();
    for routes_per_s in &args.routes_per_s {
        for batches_per_s in &args.batches_per_s {
            let row = fleet.measure(batches_per_s * args.share, routes_per_s * args.share)?;
            tell(&row.line());
            rows.push(row);
        }
    }
    let partition = (args.partition_s > 0.0).then(|| fleet.cut_off()).transpose()?;
    Ok(Report { machine: machine(), args: args.clone(), start, rows, partition, end: fleet.end()? })
}

impl<'a> Fleet<'a> {
    fn start(args: &'a FleetArgs) -> Result<(Self, Start), Failure> {
        let load = load_average();
        let (mut engines, endpoints) = Engines::start(args)?;
        engines.order(|_| Order::Fill)?;
        let (files, workers) = (WorkerFiles::new()?, args.workers_run());
        for place in 0..workers {
            let ranks: Vec<_> = endpoints.iter().filter(|rank| rank.worker == place).cloned().collect();
            files.write(place as usize, &ranks)?;
        }
        let mut routers =
            (0..args.routers).map(|_| Router::start(&files, args.shards)).collect::<Result<Vec<_>, _>>()?;
        let started = await_exact(&mut routers, endpoints.len())?;
        let state = engines.state()?;
        let start = Start {
            workers,
            ranks: endpoints.len(),
            engine_processes: engines.processes(),
            held_blocks: state.iter().map(|rank| u64::from(rank.held_blocks)).sum(),
            batches: state.iter().map(|rank| rank.next_seq).sum(),
            started,
            resources: routers.iter().map(Router::resources).collect::<Result<_, _>>()?,
            verified: routers.iter_mut().map(|router| verify(router, &state)).collect::<Result<_, _>>()?,
            load_average: load,
        };
        let (workers, next_worker) = ((0..workers).collect(), workers);
        Ok((Self { args, engines, files, routers, workers, next_worker, next_place: 0, measured: 0 }, start))
    }

    /// Publishes and asks at these rates for a while.
    fn measure(&mut self, batches_per_s: f64, routes_per_s: f64) -> Result<Row, Failure> {
        let load_average = load_average();
        let (threads_before, counters_before) = (self.threads_ns()?, self.counters()?);
        let gateways = Gateways {
            sockets: self.routers.iter().map(Router::socket).collect(),
            connections: self.args.gateways,
            routes_per_s,
            time: Duration::from_secs_f64(self.args.seconds),
            hold: Duration::from_secs_f64(self.args.hold_s),
            first: self.measured * NUMBERS,
        };
        self.measured += 1;
        let (before, began) = (self.engines.publish(batches_per_s)?, Instant::now());
        let asking = thread::spawn(move || gateways.ask());
        let mut replaced = 0;
        while !asking.is_finished() {
            thread::sleep(ASK_EVERY);
            let is_over = began.elapsed().as_secs_f64() > self.args.seconds;
            if !is_over && began.elapsed().as_secs_f64() * self.args.replaced_per_s >= f64::from(replaced + 1) {
                self.replace()?;
                replaced += 1;
            }
        }
        let Asked { measured, cpu_ns } =
            asking.join().map_err(|_| Failure::Contract("asking panicked".to_owned()))??;
        let after = self.engines.publish(0.0)?;
        let seconds = began.elapsed().as_secs_f64();
        let state = self.engines.state()?;
        let settled = self.settle(&state)?;
        let threads_after = self.threads_ns()?;
        let threads_s = threads_after.iter().map(|(name, ns)| {
            (name.clone(), ns.saturating_sub(threads_before.get(name).copied().unwrap_or(0)) as f64 / 1e9)
        });
        let threads_s = threads_s.collect();
        let counters = increase(&counters_before, &self.counters()?);
        let work = Work { batches: after.batches - before.batches, cpu_ns: after.cpu_ns - before.cpu_ns };
        let mut row = Row::new((batches_per_s, routes_per_s), seconds, work, &measured, cpu_ns, threads_s);
        row.answered_routes_per_s = measured.requests as f64 / (measured.seconds - self.args.hold_s).max(1e-9);
        row.ingest_us /= f64::from(self.args.routers);
        row.settle(settled, self.args.loss);
        row.counters = counters;
        row.replaced = replaced;
        row.dropped = state.iter().map(|rank| rank.dropped).sum();
        row.verified = self.verify(&state)?;
        row.load_average = load_average;
        Ok(row)
    }

    /// Ends the worker of the next place, and starts another there.
    fn replace(&mut self) -> Result<(), Failure> {
        let (place, by) = (self.next_place, self.next_worker);
        let ranks = self.engines.replace(place, self.workers[place], by)?;
        self.files.write(place, &ranks)?;
        self.workers[place] = by;
        self.next_worker += 1;
        self.next_place = (place + 1) % self.workers.len();
        Ok(())
    }

    /// Waits until every daemon has applied the engines' last batches, and trusts every rank.
    fn settle(&mut self, state: &[RankState]) -> Result<Settled, Failure> {
        let (began, mut first, mut applied_s) = (Instant::now(), None, None);
        loop {
            let mut worst = Behind::default();
            for router in &mut self.routers {
                let behind = router.behind(state)?;
                worst.batches = worst.batches.max(behind.batches);
                worst.inexact_ranks = worst.inexact_ranks.max(behind.inexact_ranks);
            }
            let behind = *first.get_or_insert(worst.batches);
            let elapsed_s = began.elapsed().as_secs_f64();
            if worst.batches == 0 {
                applied_s.get_or_insert(elapsed_s);
            }
            let is_exact = worst.batches == 0 && worst.inexact_ranks == 0;
            if is_exact || began.elapsed() > SETTLE_MAX {
                return Ok(Settled { behind, applied_s, exact_s: is_exact.then_some(elapsed_s) });
            }
            thread::sleep(ASK_EVERY);
        }
    }

    /// Cuts the first process of engines off while all compute, and waits until the daemons know what they missed.
    fn cut_off(&mut self) -> Result<Partition, Failure> {
        let rate = self.args.batches_per_s.iter().copied().fold(f64::INFINITY, f64::min) * self.args.share;
        let first_only = |begins| move |process| Order::CutOff { begins: begins && process == 0 };
        let counters_before = self.counters()?;
        let before = self.engines.publish(rate)?;
        self.engines.order(first_only(true))?;
        thread::sleep(Duration::from_secs_f64(self.args.partition_s));
        self.engines.order(first_only(false))?;
        // A further batch of each rank shows the daemons what they missed.
        thread::sleep(Duration::from_secs(1));
        let after = self.engines.publish(0.0)?;
        let state = self.engines.state()?;
        let settled = self.settle(&state)?;
        Ok(Partition {
            seconds: self.args.partition_s,
            batches_per_s: rate,
            batches: after.batches - before.batches,
            behind: settled.behind,
            exact_s: settled.exact_s,
            counters: increase(&counters_before, &self.counters()?),
            verified: self.verify(&state)?,
        })
    }

    fn end(&mut self) -> Result<End, Failure> {
        let mut bookings_live = Vec::new();
        for router in &self.routers {
            bookings_live.push(router.counters()?.get("bookings_live").copied().unwrap_or(0));
        }
        let state = self.engines.state()?;
        let verified = self.verify(&state)?;
        let digests_equal = verified.windows(2).all(|pair| pair[0].digest == pair[1].digest);
        let resources = self.routers.iter().map(Router::resources).collect::<Result<_, _>>()?;
        Ok(End { bookings_live, digests_equal, resources, subscribers_cut: state.iter().map(|rank| rank.cut).sum() })
    }

    fn verify(&mut self, state: &[RankState]) -> Result<Vec<Verified>, Failure> {
        self.routers.iter_mut().map(|router| verify(router, state)).collect()
    }

    /// Processor time of all daemons by kind of thread, nanoseconds.
    fn threads_ns(&self) -> Result<BTreeMap<String, u64>, Failure> {
        let mut sum = BTreeMap::new();
        for router in &self.routers {
            for (name, ns) in router.threads_ns()? {
                *sum.entry(name).or_default() += ns;
            }
        }
        Ok(sum)
    }

    /// The counters of all daemons, summed.
    fn counters(&self) -> Result<BTreeMap<String, u64>, Failure> {
        let mut sum = BTreeMap::new();
        for router in &self.routers {
            for (name, value) in router.counters()? {
                *sum.entry(name).or_default() += value;
            }
        }
        Ok(sum)
    }
}

/// Says how far the run is: it takes minutes.
fn tell(line: &str) {
    // A closed terminal is no reason to end the run.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Waits until every daemon trusts every rank.
fn await_exact(routers: &mut [Router], ranks: usize) -> Result<Vec<Started>, Failure> {
    let mut started = vec![None; routers.len()];
    while started.iter().any(Option::is_none) {
        for (router, started) in routers.iter_mut().zip(&mut started).filter(|(_, started)| started.is_none()) {
            *started = router.look(ranks)?;
        }
        thread::sleep(ASK_EVERY);
    }
    Ok(started.into_iter().flatten().collect())
}

/// Counters of interest that have grown, and by how much. Those of replaced workers are gone.
fn increase(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    const OF_INTEREST: [&str; 12] = [
        "worker_batches_missed",
        "worker_batches_replayed",
        "worker_disconnects",
        "worker_emptied",
        "worker_gaps",
        "worker_removes_unknown",
        "worker_renewed",
        "worker_replays_asked",
        "worker_replays_unfillable",
        "bookings_ended_worker_removed",
        "bookings_unshared",
        "routes_contended",
    ];
    let grown = |name: &&str| {
        let more = after.get(*name)?.saturating_sub(before.get(*name).copied().unwrap_or(0));
        (more > 0).then(|| ((*name).to_owned(), more))
    };
    OF_INTEREST.iter().filter_map(grown).collect()
}
