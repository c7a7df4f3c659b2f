//! The whole run: engines, routers, gateways; then rounds of faults; then everything must agree.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvrouted::wire::{RouterStatus, StatusPage};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::broker::Broker;
use super::check::{Checker, Compared};
use super::engine::Engine;
use super::gateways::Gateways;
use super::namespace::Namespace;
use super::network::Network;
use super::plan::{FINE, Places, ProcessFault, Round};
use super::report::{Agreement, Report};
use super::router::Router;
use crate::args::FaultsArgs;
use crate::compare::machine;
use crate::failure::Failure;
use crate::large_fleet::contents::{SHARED_PROMPTS, shared_prompt};
use crate::socket::load_average;

/// How long routers may take to start, to agree, and to trust all engines.
const SETTLE_MAX: Duration = Duration::from_secs(60);
/// How often they are asked about it.
const ASK_EVERY: Duration = Duration::from_millis(20);
/// How long something is waited for before the run says so.
const TELL_AFTER: Duration = Duration::from_secs(2);
/// The pause between two looks at overlaps while there are faults.
const CHECK_EVERY: Duration = Duration::from_millis(10);
/// How long the fleet runs before the first fault.
const CALM: Duration = Duration::from_secs(2);

struct Run {
    places: Places,
    network: Network,
    engines: Vec<Engine>,
    routers: Vec<Router>,
    broker: Option<Broker>,
    /// When routers that are dead start again.
    due: Vec<Option<Instant>>,
    /// When the broker does, if it is dead.
    broker_due: Option<Instant>,
    checker: Checker,
    random: Xoshiro256PlusPlus,
    faults: BTreeMap<&'static str, u32>,
}

/// Runs everything.
///
/// # Errors
/// This process may not make network namespaces, a process does not start, or one ends by itself.
pub(crate) fn run(args: &FaultsArgs) -> Result<Report, Failure> {
    let load_average = load_average();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(Failure::system("start a runtime for gateways"))?;
    let mut run = Run::start(args)?;
    run.until("all routers are ready", |pages| pages.iter().all(is_ready))?;
    let sockets: Vec<PathBuf> = run.routers.iter().map(Router::socket).collect();
    let each = args.gateways / u32::from(args.routers);
    let mut gateways = Gateways::start(runtime.handle(), &sockets, each, args.routes_per_s, args.seed);
    run.look_for(CALM)?;
    let before = run.resources()?;
    let began = Instant::now();
    let mut number = 0;
    while began.elapsed().as_secs_f64() < args.minutes * 60.0 {
        number += 1;
        let round = Round::draw(&mut run.random, run.places);
        run.round(&round, number, began)?;
    }
    let last = Round::last(&mut run.random, run.places);
    run.round(&last, number + 1, began)?;
    run.end_faults()?;
    let faults_s = began.elapsed().as_secs_f64();
    let during = run.checker.compared;
    let (agreement, exact_s) = run.agree(&mut gateways, &runtime)?;
    let after = Compared {
        exact: run.checker.compared.exact - during.exact,
        wrong: run.checker.compared.wrong - during.wrong,
        inexact: 0,
        unanswered: run.checker.compared.unanswered - during.unanswered,
    };
    let resources = before.into_iter().zip(run.resources()?).map(|(before, after)| [before, after]).collect();
    Ok(Report {
        machine: machine(),
        args: args.clone(),
        load_average,
        faults_s,
        packets: run.network.packets(),
        seen: gateways.seen(),
        during,
        after,
        first_wrong: run.checker.first_wrong.clone(),
        agreement,
        exact_s,
        resources,
        counters: counters(&run.pages()?),
        faults: run.faults,
    })
}

impl Run {
    fn start(args: &FaultsArgs) -> Result<Self, Failure> {
        let places = Places { routers: args.routers, engines: args.engines, brokers: u8::from(args.nats) };
        let (mut namespaces, mut devices) = (Vec::new(), Vec::new());
        for place in 0..places.all() {
            let (namespace, device) = Namespace::new(place)?;
            namespaces.push(Arc::new(namespace));
            devices.push(device);
        }
        let network = Network::start(devices, FINE, args.seed);
        let per_s = args.batches_per_s / f64::from(args.engines);
        let engine = |engine: u8| {
            Engine::start(&namespaces[usize::from(places.engine(engine))], u32::from(engine), args.cache_blocks, per_s)
        };
        let engines = (0..args.engines).map(engine).collect::<Result<_, _>>()?;
        let broker = places.broker().map(|place| Broker::start(&namespaces[usize::from(place)])).transpose()?;
        let router = |router: u8| Router::start(router, &namespaces[usize::from(router)], places);
        let routers: Vec<_> = (0..args.routers).map(router).collect::<Result<_, _>>()?;
        let prompts: Vec<_> = (0..SHARED_PROMPTS).map(shared_prompt).collect();
        Ok(Self {
            places,
            network,
            engines,
            broker,
            due: vec![None; routers.len()],
            broker_due: None,
            checker: Checker::new(routers.len(), &prompts),
            routers,
            random: Xoshiro256PlusPlus::seed_from_u64(args.seed),
            faults: BTreeMap::new(),
        })
    }

    /// One round of faults, with the pause after it.
    fn round(&mut self, round: &Round, number: u32, began: Instant) -> Result<(), Failure> {
        let Round { network, process, lasts, pause } = *round;
        tell(&format!(
            "{:.0} s, round {number}: {network:?}, {process:?} for {lasts:?}",
            began.elapsed().as_secs_f64()
        ));
        if let Some(fault) = network {
            *self.faults.entry(fault.name()).or_default() += 1;
            self.network.set(fault.weather(self.places));
        }
        if let Some(fault) = process {
            *self.faults.entry(fault.name()).or_default() += 1;
            self.begin(fault)?;
        }
        self.look_for(lasts)?;
        self.network.set(FINE);
        if let Some(ProcessFault::DropBatches(engine, _)) = process {
            self.engines[usize::from(engine)].drop_batches(0.0);
        }
        self.look_for(pause)
    }

    fn begin(&mut self, fault: ProcessFault) -> Result<(), Failure> {
        match fault {
            ProcessFault::KillRouter(router, pause) => {
                self.routers[usize::from(router)].kill();
                self.due[usize::from(router)] = Some(Instant::now() + pause);
            }
            ProcessFault::RestartRouter(router) => {
                // One that is dead starts again in its time.
                if self.due[usize::from(router)].is_none() {
                    self.routers[usize::from(router)].stop()?;
                    self.routers[usize::from(router)].start_again()?;
                }
            }
            ProcessFault::KillEngine(engine, pause) => self.engines[usize::from(engine)].die(pause),
            ProcessFault::DropBatches(engine, share) => self.engines[usize::from(engine)].drop_batches(share),
            ProcessFault::KillBroker(pause) => {
                if let Some(broker) = &mut self.broker {
                    broker.kill();
                    self.broker_due = Some(Instant::now() + pause);
                }
            }
        }
        Ok(())
    }

    /// Compares overlaps for a while, and starts routers that are due.
    fn look_for(&mut self, time: Duration) -> Result<(), Failure> {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.start_due(|due| due <= Instant::now())?;
            self.engines.iter().try_for_each(Engine::check)?;
            let daemon = self.random.random_range(0..self.routers.len());
            if self.due[daemon].is_none() {
                self.routers[daemon].check()?;
                let prompt = self.random.random_range(0..SHARED_PROMPTS) as usize;
                let socket = self.routers[daemon].socket();
                self.checker.look(daemon, &socket, prompt, &self.engines);
            }
            thread::sleep(CHECK_EVERY);
        }
        Ok(())
    }

    fn start_due(&mut self, is_due: impl Fn(Instant) -> bool) -> Result<(), Failure> {
        for (router, due) in self.routers.iter_mut().zip(&mut self.due) {
            if due.is_some_and(&is_due) {
                router.start_again()?;
                *due = None;
            }
        }
        if self.broker_due.is_some_and(&is_due)
            && let Some(broker) = &mut self.broker
        {
            broker.start_again()?;
            self.broker_due = None;
        }
        Ok(())
    }

    /// Ends all faults: dead routers start at once.
    fn end_faults(&mut self) -> Result<(), Failure> {
        self.network.set(FINE);
        self.start_due(|_| true)?;
        self.engines.iter().for_each(|engine| engine.drop_batches(0.0));
        Ok(())
    }

    /// How routers agree once all faults have ended, and how long they take to trust every engine.
    fn agree(
        &mut self,
        gateways: &mut Gateways,
        runtime: &tokio::runtime::Runtime,
    ) -> Result<(Agreement, Option<f64>), Failure> {
        let ended = Instant::now();
        gateways.hold();
        let digests_equal_s = self.until("digests are equal", all_agree).ok().map(|_| ended.elapsed().as_secs_f64());
        let bookings_live = sum(&self.pages()?, "bookings_live");
        let exact_s = self.trust()?;
        runtime.block_on(gateways.end())?;
        let ended = Instant::now();
        let known_s = self.until("routers know what is freed", all_agree).ok().map(|_| ended.elapsed().as_secs_f64());
        let bookings_kept = sum(&self.pages()?, "bookings_live");
        let has_none = |pages: &[StatusPage]| others(pages) == 0 && sum(pages, "bookings_live") == 0;
        let none_s = self.until("nothing is booked", has_none).ok().map(|_| ended.elapsed().as_secs_f64());
        let pages = self.pages()?;
        let (bookings_left, phantoms) = (sum(&pages, "bookings_live"), others(&pages));
        let agreement =
            Agreement { digests_equal_s, bookings_live, known_s, bookings_kept, none_s, bookings_left, phantoms };
        Ok((agreement, exact_s))
    }

    /// Lets engines rest, and waits until every router has applied all, and calls every overlap exact.
    fn trust(&mut self) -> Result<Option<f64>, Failure> {
        self.engines.iter().for_each(Engine::rest);
        let began = Instant::now();
        while began.elapsed() < SETTLE_MAX {
            let mut has_all = true;
            for (daemon, router) in self.routers.iter().enumerate() {
                has_all &= self.checker.look_at_all(daemon, &router.socket(), &self.engines)?;
            }
            if has_all {
                return Ok(Some(began.elapsed().as_secs_f64()));
            }
            thread::sleep(ASK_EVERY);
        }
        Ok(None)
    }

    fn pages(&self) -> Result<Vec<StatusPage>, Failure> {
        self.routers.iter().map(Router::status).collect()
    }

    fn until(&mut self, what: &str, is_so: impl Fn(&[StatusPage]) -> bool) -> Result<(), Failure> {
        let began = Instant::now();
        let (mut last, mut is_told) = (None, false);
        while began.elapsed() < SETTLE_MAX {
            for router in &mut self.routers {
                router.check()?;
            }
            if began.elapsed() > TELL_AFTER && !std::mem::replace(&mut is_told, true) {
                tell(&format!("waits until {what}: {:?}", self.pages().ok().map(|pages| rows(&pages))));
            }
            // One that has just started does not answer yet.
            last = self.pages().ok();
            if last.as_deref().is_some_and(&is_so) {
                return Ok(());
            }
            thread::sleep(ASK_EVERY);
        }
        tell(&format!("waited in vain until {what}: {:?}", last.as_deref().map(rows)));
        Err(Failure::Contract(format!("waited in vain until {what}")))
    }

    fn resources(&self) -> Result<Vec<(usize, u64)>, Failure> {
        let mebibytes = |(files, bytes): (usize, u64)| (files, bytes >> 20);
        self.routers.iter().map(|router| router.resources().map(mebibytes)).collect()
    }
}

fn is_ready(page: &StatusPage) -> bool {
    !page.workers.is_empty()
        && page.workers.iter().all(|worker| worker.trust.level == kvrouted::trust::TrustLevel::Exact)
        && page.routers.iter().all(|router| ["self", "live"].contains(&router.state.as_str()))
        && page.routers.len() > 1
}

/// Whether each router holds what each other one has, by their digests.
fn all_agree(pages: &[StatusPage]) -> bool {
    let holds = |of: &RouterStatus| (of.origin, of.incarnation, of.sequence, of.digest, of.workers);
    let own: Option<Vec<_>> =
        pages.iter().map(|page| page.routers.iter().find(|of| of.state == "self").map(holds)).collect();
    own.is_some_and(|own| {
        pages.iter().enumerate().all(|(at, page)| {
            let held: Vec<_> = page.routers.iter().filter(|of| of.state == "live").map(holds).collect();
            own.iter().enumerate().all(|(of, own)| of == at || held.contains(own))
        })
    })
}

/// What each router says of itself and of the others: state, number, run, sequence, digest, workers, requests.
fn rows(pages: &[StatusPage]) -> Vec<String> {
    let row = |of: &RouterStatus| {
        let RouterStatus { state, origin, incarnation, sequence, digest, workers, requests, .. } = of;
        format!("{state} {origin:x} {incarnation:x} {sequence} {digest:x} {workers} {requests}")
    };
    pages.iter().map(|page| page.routers.iter().map(row).collect::<Vec<_>>().join("; ")).collect()
}

/// Requests that routers count for others.
fn others(pages: &[StatusPage]) -> u64 {
    pages.iter().flat_map(|page| &page.routers).filter(|of| of.state != "self").map(|of| of.requests).sum()
}

fn sum(pages: &[StatusPage], counter: &str) -> u64 {
    pages.iter().flat_map(|page| &page.counters).filter(|(name, _)| name == counter).map(|(_, value)| value).sum()
}

/// Counters of interest that are not 0: those of routers' exchange, and of bookings that a restart kept.
fn counters(pages: &[StatusPage]) -> BTreeMap<String, u64> {
    const OF_INTEREST: [&str; 4] = ["router_", "routers_", "bookings_", "sessions_"];
    let mut sums = BTreeMap::new();
    for (name, value) in pages.iter().flat_map(|page| &page.counters) {
        if *value > 0 && OF_INTEREST.iter().any(|begin| name.starts_with(begin)) {
            *sums.entry(name.clone()).or_default() += value;
        }
    }
    for (name, value) in pages.iter().flat_map(|page| &page.routers).flat_map(|router| &router.counters) {
        if *value > 0 {
            *sums.entry(format!("router_{name}")).or_default() += value;
        }
    }
    sums
}

/// Says how far the run is: it takes minutes.
fn tell(line: &str) {
    // A closed terminal is no reason to end the run.
    let _ = writeln!(std::io::stderr(), "{line}");
}
