//! The daemon assembles its parts: it starts the threads, gives them the tables that they share, and ends them in
//! order. What a request does is in [`requests`](crate::requests).
//!
//! The control thread calls [`run`]. It accepts connections, answers administration, expires bookings, follows the
//! sources of workers, and turns SIGTERM or SIGINT into a drain: it takes no new connections, requests that were read
//! are answered, then the serving threads and the ingest threads end. The last snapshots are written in between.

mod audit_texts;
mod desired_fleet;
mod doctor;
mod endable_thread;
mod engine_http;
mod engine_snapshots;
mod exposition;
mod fleet_reconciler;
mod http;
mod ingest_threads;
mod kept_bookings;
mod memory_thread;
mod opening;
mod other_routers;
mod peers_file;
mod predictor_thread;
mod process_exposition;
mod reload;
mod resources;
mod routers_thread;
mod running_config;
mod sandboxed;
mod service_manager;
mod snapshots;
mod startup;
mod statistics;
mod status;
mod takeover;
mod threads;
mod timed_reads;
mod trace_export;
mod watchdog_thread;
mod worker_files;
mod worker_records;
mod worker_sources;

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rand::RngExt;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::signal::unix::Signal;
use tokio::sync::{mpsc, watch};

use crate::budget::{MemoryAccounts, MemoryPart, Shed};
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::fleet::Fleet;
use crate::index;
use crate::ingest::descriptors::Descriptors;
use crate::ingest::{self, EventMemory, LoadListener};
use crate::limits::{
    BOOKINGS_EXPIRED_PER_LOCK_MAX, BOOKINGS_EXPIRY_EVERY_MS, CONNECTION_BYTES, LAWS_PUBLISH_EVERY_MS,
    LAWS_PUBLISHED_PER_LOCK_MAX, QUEUE_RECHECK_MS,
};
use crate::metrics::{CounterSet, DaemonCounter, LoadReportCounter};
use crate::requests::{CoreMetrics, RequestTables, RoutingService};
use crate::sandbox::{self, ThreadKind};
use crate::serve::{
    Acceptor, AdminServer, Admissions, BoundSocket, Core, CoreHandle, CoreMemory, CoreOptions, IoBackend, Lanes,
    MetricsPort, MetricsThread, PortThread, RemoteAccess, RemoteConnection, RemotePort, RunningRemotePort, Turns,
    choose_io_backend,
};
use crate::shares::UserQuotas;
use crate::trust::{Trust, TrustLevel, TrustReason};
use crate::watchdog::{Activity, ThreadMark, Watchlist, phase, watched};
use desired_fleet::DesiredFleet;
use doctor::Doctor;
use endable_thread::EndableThread;
use fleet_reconciler::FleetReconciler;
use http::Http;
use ingest_threads::IngestThreads;
use opening::{Listeners, Signals};
pub use reload::ReadConfig;
use resources::Resources;
use routers_thread::NamedPeers;
use running_config::RunningConfig;
use service_manager::Notifier;
use snapshots::Snapshots;
use startup::Startup;
use statistics::Statistics;
use status::Administration;
use takeover::Takeovers;
use threads::{OtherThreads, Writers};
pub use worker_files::unusable_files;
use worker_records::WorkerRecords;
use worker_sources::WorkerSources;

/// Runs the daemon until a signal ends it. `read_again` reads the configuration anew, for SIGHUP.
///
/// # Errors
/// The reason why it could not start, with the remedy. No socket is left bound then.
pub fn run(config: &Config, read_again: ReadConfig) -> Result<()> {
    run_from(None, config, read_again)
}

/// As [`run`], for a daemon that takes over from the one that serves `socket`. That one then ends.
///
/// # Errors
/// The reason why it does not take over, with the remedy. The other daemon goes on then.
pub fn take_over(socket: &Path, config: &Config, read_again: ReadConfig) -> Result<()> {
    run_from(Some(socket), config, read_again)
}

fn run_from(before: Option<&Path>, config: &Config, read_again: ReadConfig) -> Result<()> {
    // Before the runtimes, which panic where they have too few descriptors.
    let mut resources = Resources::divide(config)?;
    if before.is_some() {
        resources.turns = Turns::theirs();
    }
    let runtime = runtime_of(Builder::new_current_thread().enable_all(), ThreadKind::Files)?;
    // Threads that wait for engines have no other use: what they read comes from the network.
    let asking = runtime_of(&mut Builder::new_current_thread(), ThreadKind::Asking)?;
    let ended = runtime.block_on(async {
        Daemon::start(before, config, &resources).await?.serve(config, read_again, asking.handle()).await
    });
    // Do not wait for threads that wait for a file system or an engine: they may never return.
    asking.shutdown_background();
    runtime.shutdown_background();
    ended
}

/// A runtime on the control thread, with threads of this kind for calls that block.
fn runtime_of(builder: &mut Builder, blocking: ThreadKind) -> Result<Runtime> {
    builder
        .on_thread_start(move || sandbox::enter(blocking))
        .build()
        .map_err(|cause| Error::new(Kind::System, "cannot start the control thread", "see the cause").caused_by(cause))
}

/// The parts of a daemon that has started, as the control thread holds them.
struct Daemon {
    mark: Arc<ThreadMark>,
    signals: Signals,
    tables: RequestTables,
    counters: Arc<CounterSet<DaemonCounter>>,
    desired: Rc<DesiredFleet>,
    running: Rc<RunningConfig>,
    doctor: Arc<Doctor>,
    reconciler: FleetReconciler,
    admissions: Admissions,
    admin: AdminServer,
    acceptor: Acceptor,
    cores: Vec<Core>,
    http: Http,
    /// Replaces what the files of the remote port say; `None` = there is no such port.
    remote: Option<watch::Sender<Arc<RemoteAccess>>>,
    ingest_threads: Arc<IngestThreads>,
    snapshots: Snapshots,
    named_peers: Arc<NamedPeers>,
    others: OtherThreads,
    takeovers: Takeovers,
    /// `None` = there is no service manager.
    notifier: Option<Notifier>,
}

impl Daemon {
    async fn start(before: Option<&Path>, config: &Config, resources: &Resources) -> Result<Self> {
        let (started, now_unix_ms, watchlist) = (Instant::now(), now_unix_ms(), &resources.watchlist);
        let counters = Arc::<CounterSet<DaemonCounter>>::default();
        let io_backend = choose_io_backend(config.serve.io, config.serve.spin_us_max > 0)?;
        let (signals, listeners, (snapshots, kept, old, notifier)) = opening::open(before, config, resources).await?;
        let Listeners { routing, admin, next, admissions, scrapes, http, remote, routers, sockets } = listeners;
        let made = startup::prepare(config, &resources.memory, &kept.identity, now_unix_ms)?;
        let Startup { fleet, loads, indexes, views, records, places, plans } =
            made.joined(config, &snapshots, now_unix_ms);
        let clock_began = kept.clock_begins(config, started);
        let (predictions, predictor) = predictor_thread::start(config, &fleet, (clock_began, resources))?;
        let deciding = resources.cores + usize::from(http.is_some()); // The HTTP port decides and counts as one serving thread more.
        let (configured, of_threads) = ((config, resources.memory.division()), (deciding, clock_began));
        let (of_fleet, of_bookings) = ((&fleet, reload::policies_at_start(config)), (&loads, &kept.identity));
        let tables = RequestTables::new(configured, of_threads, of_fleet, indexes, &predictions, of_bookings);
        let (bookings, writer) = kept.resume(config, &tables, &snapshots.stats, (watchlist, &resources.turns))?;
        let lanes = Arc::new(lanes(config, resources.descriptors, &tables.users));
        let writers = start_writers(config, &tables, watchlist, now_unix_ms)?;
        let ingest_threads = Arc::new(start_ingest((config, resources), plans, &fleet, &snapshots, &counters)?);
        let keeper = snapshots.keep(config, &tables, &ingest_threads, (watchlist, &resources.turns))?;
        let (listener, load_reports) = start_listener(resources, &tables)?;
        let (routers, routers_view, named_peers) = routers_thread::start(config, routers, &tables, resources)?;
        let core_metrics: Vec<Arc<CoreMetrics>> = (0..deciding).map(|_| Arc::default()).collect();
        let cores = start_cores((config, resources), io_backend, (&tables, &lanes), &core_metrics[..resources.cores])?;
        let handles: Vec<CoreHandle> = cores.iter().map(Core::handle).collect();
        account(&resources.memory, &tables, &lanes, &handles);
        let (desired, running) = desired_and_running(config, &records, &counters);
        let (counted, of_process) = ((&snapshots.stats, load_reports, routers_view), (resources, handles.clone()));
        let stats = Statistics::new((&tables, &lanes, config), views, core_metrics, &counters, counted, of_process);
        let doctor = Arc::new(Doctor::new(&stats));
        let shown = (&stats, &doctor);
        let reconciler =
            FleetReconciler::new((config, resources.descriptors), (records, places), (&snapshots, &listener), &stats);
        let service = Administration::new(&tables, shown, &desired, &ingest_threads, &snapshots, &running);
        let metrics = start_metrics(scrapes, shown)?;
        let mut http =
            Http::start(config, http, (&tables, resources.cores), (&stats, metrics.pages()), &ingest_threads)?;
        let (remote_thread, remote, opened) = start_remote(config, remote, &stats)?;
        let (memory, watchdog) = start_watches(config, resources, &stats)?;
        let ports = http.thread.take().into_iter().chain(remote_thread).collect();
        let takeovers = Takeovers::start(config, (next, sockets), old, (&stats, &tables), (&ingest_threads, &writer))?;
        let others =
            OtherThreads { predictor, keeper, bookings, writers, listener, routers, ports, metrics, memory, watchdog };
        let admin = admin_server(config, admin, service, &admissions, &counters)?;
        let acceptor = acceptor(routing, &handles, (&admissions, &tables), resources, &counters)?.receiving(opened);
        sandbox::enter(ThreadKind::Control);
        announce(config, io_backend, resources.cores, ingest_threads.len());
        Ok(Self {
            mark: watchlist.add("control", true),
            signals,
            tables,
            counters,
            desired,
            running,
            doctor,
            reconciler,
            admissions,
            admin,
            acceptor,
            cores,
            http,
            remote,
            ingest_threads,
            snapshots,
            named_peers,
            others,
            takeovers,
            notifier,
        })
    }

    async fn serve(self, config: &Config, read_again: ReadConfig, asking: &Handle) -> Result<()> {
        let Self { mark, mut signals, tables, counters, desired, doctor, reconciler, admissions, admin, .. } = self;
        let Self { running, mut acceptor, cores, mut http, remote, ingest_threads, snapshots, named_peers, .. } = self;
        let Self { others, mut takeovers, notifier, .. } = self;
        let (turns, failed) = (takeovers.turns().clone(), Cell::new(None));
        let member = turns.join();
        let handles: Vec<CoreHandle> = cores.iter().map(Core::handle).collect();
        let sources = WorkerSources {
            config,
            read_again,
            asking,
            hangup: &mut signals.hangup,
            desired: &desired,
            running: &running,
            reconciler,
            ingest_threads: &ingest_threads,
            tables: &tables,
            admissions: &admissions,
            peers: &named_peers,
            remote: remote.as_ref(),
            mark: &mark,
        };
        let version = || tables.fleet.load().version;
        let parts = async {
            tokio::select! {
                signal = first_of(&mut signals.terminate, &mut signals.interrupt) => Ok(signal),
                ended = phase(&mark, Activity::WatchingThreads, threads::watch(&handles, &ingest_threads, &others)) => Err(ended),
                () = phase(&mark, Activity::Accepting, after(turns.opened(), acceptor.run())) => Err("the acceptor"),
                () = phase(&mark, Activity::Administering, after(turns.opened(), admin.run())) => Err("administration"),
                () = phase(&mark, Activity::Accepting, member.stand_by()) => Ok("a takeover by another daemon"),
                error = takeovers.fail() => { failed.set(Some(error)); Err("the takeover") }
                () = phase(&mark, Activity::Administering, http.change_workers(&desired)) => Err("administration by HTTP"),
                () = phase(&mark, Activity::Expiring, tend_bookings(&tables, &counters)) => Err("the care of bookings"),
                () = phase(&mark, Activity::Expiring, tables.queue.expire_and_recheck(QUEUE_RECHECK_MS, version)) => Err("the queue"),
                () = phase(&mark, Activity::Diagnosing, doctor::watch(&doctor, &desired)) => Err("diagnosis"),
                () = phase(&mark, Activity::Diagnosing, Notifier::report(notifier.as_ref(), || turns.is_ours().then(|| doctor.condition()))) => Err("the service manager"),
                ended = worker_sources::run(sources) => Err(ended),
            }
        };
        let ending = threads::catch_panic(watched(&*mark, Activity::HandlingCommands, parts)).await;
        tracing::info!(?ending, deadline_ms = config.serve.drain_ms_max, "draining");
        if let Some(notifier) = notifier.as_ref().filter(|_| turns.is_ours()) {
            notifier.stopping();
        }
        // The listening sockets go first: gateways do not connect to a daemon that ends. So do the users of ingest threads.
        let stopped = takeovers.stop();
        drop((acceptor, admin));
        end((cores, http), ingest_threads, others, (&snapshots, turns.is_ours()), config.serve.drain_ms_max);
        tracing::info!(up_ms = tables.up_ms(), "ended");
        stopped.and(ending.map(drop).map_err(|what| failed.take().unwrap_or_else(|| ended_by_itself(what))))
    }
}

/// The fleet and the configuration at the start, which requests and reloads change.
fn desired_and_running(
    config: &Config,
    records: &WorkerRecords,
    counters: &Arc<CounterSet<DaemonCounter>>,
) -> (Rc<DesiredFleet>, Rc<RunningConfig>) {
    let desired = DesiredFleet::new(reload::named(config), records.configs(), Arc::clone(counters));
    (Rc::new(desired), Rc::new(RunningConfig::new(config)))
}

fn now_unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// Starts the thread that writes the journal, and the one that exports traces if there is a collector.
fn start_writers(config: &Config, tables: &RequestTables, watchlist: &Watchlist, now_unix_ms: u64) -> Result<Writers> {
    // A journal is one run's. The daemon's instance may be that of several runs.
    let origin = (rand::rng().random_range(1..=u64::MAX), now_unix_ms);
    let of_bookings = (&*tables.fleet.load().spaces, &tables.loads);
    let journal = tables.recording.start(config, origin, of_bookings, watchlist.add("journal", false))?;
    Ok(Writers { journal, traces: trace_export::start(config, tables, watchlist)? })
}

/// Starts the thread that receives the loads that engines publish, and gives its counters.
fn start_listener(
    resources: &Resources,
    tables: &RequestTables,
) -> Result<(Arc<LoadListener>, Arc<CounterSet<LoadReportCounter>>)> {
    let counters = Arc::<CounterSet<LoadReportCounter>>::default();
    let counted = (Arc::clone(&counters), resources.watchlist.add("engine-loads", false));
    let listener = LoadListener::start(Arc::clone(&tables.loads), counted, tables.clock())?;
    Ok((Arc::new(listener), counters))
}

/// Starts the threads that watch the memory and the other threads. Last, so that a start takes what time it needs.
fn start_watches(
    config: &Config,
    resources: &Resources,
    statistics: &Statistics,
) -> Result<(EndableThread, EndableThread)> {
    let (watchlist, counters) = (&resources.watchlist, &statistics.daemon);
    if let Some(mark) = index::prefault_mark() {
        watchlist.add_mark(mark);
    }
    let of_fleet = (Arc::clone(&statistics.fleet), Arc::clone(&statistics.views));
    let mark = watchlist.add("memory", false);
    let memory = memory_thread::start(
        (statistics.memory.clone(), resources.resident.clone()),
        of_fleet,
        Arc::clone(counters),
        mark,
    )?;
    let (fleet, stalled_ms_max) = (Arc::clone(&statistics.fleet), config.process.stalled_ms_max);
    let watchdog = watchdog_thread::start(watchlist.clone(), fleet, Arc::clone(counters), stalled_ms_max)?;
    Ok((memory, watchdog))
}

/// Accounts for the memory of tables that show what they take by themselves.
fn account(accounts: &MemoryAccounts, tables: &RequestTables, lanes: &Arc<Lanes>, cores: &[CoreHandle]) {
    let cores = cores.to_vec();
    let connections = move || cores.iter().map(CoreHandle::connections).sum::<usize>() as u64;
    accounts.watch(MemoryPart::Connections, move || connections() * CONNECTION_BYTES);
    let lanes = Arc::clone(lanes);
    accounts.watch(MemoryPart::Lanes, move || lanes.open() as u64 * lanes.lane_bytes_max());
    let queue = Arc::clone(&tables.queue);
    accounts.watch(MemoryPart::Queue, move || queue.bytes());
    let loads = Arc::clone(&tables.loads);
    accounts.watch(MemoryPart::Bookings, move || loads.bytes());
    let recording = tables.recording.clone();
    accounts.watch(MemoryPart::Journal, move || recording.bytes());
}

/// Serves administration to the users that may administer.
fn admin_server(
    config: &Config,
    socket: BoundSocket,
    service: Administration,
    admissions: &Admissions,
    counters: &Arc<CounterSet<DaemonCounter>>,
) -> Result<AdminServer> {
    let server = AdminServer::new(socket, Rc::new(service), Arc::clone(counters))?;
    Ok(server.admitting(Arc::clone(&admissions.admin), config.serve.frame_timeout_ms))
}

/// Accepts connections for the serving threads, within the limits for users, descriptors and memory.
fn acceptor(
    routing: BoundSocket,
    cores: &[CoreHandle],
    (admissions, tables): (&Admissions, &RequestTables),
    resources: &Resources,
    counters: &Arc<CounterSet<DaemonCounter>>,
) -> Result<Acceptor> {
    let connections_max = resources.descriptors.connections_max;
    let acceptor = Acceptor::new(routing, cores.to_vec(), connections_max, Arc::clone(counters))?;
    let acceptor = acceptor.admitting(Arc::clone(&admissions.routing)).shared_by(Arc::clone(&tables.users));
    Ok(acceptor.shedding(resources.shed.clone()))
}

/// The lanes that gateways may open, on all serving threads together.
fn lanes(config: &Config, descriptors: Descriptors, users: &Arc<UserQuotas>) -> Lanes {
    Lanes::new(descriptors.lanes_max, config.serve.lane_ring_bytes_max).shared_by(Arc::clone(users))
}

/// Starts the thread of the remote port, if there is one: the thread, what replaces its files, and what it opens.
fn start_remote(config: &Config, port: Option<RemotePort>, statistics: &Statistics) -> Result<Remote> {
    let Some(port) = port else { return Ok((None, None, None)) };
    let shown = (Arc::clone(&statistics.remote), statistics.watchlist.add("remote", true));
    let RunningRemotePort { thread, access, opened } = port.start(config.serve.user_share_percent, shown)?;
    Ok((Some(thread), Some(access), Some(opened)))
}

type Remote = (Option<PortThread>, Option<watch::Sender<Arc<RemoteAccess>>>, Option<mpsc::Receiver<RemoteConnection>>);

/// Starts the thread that renders the metrics page for both ports, and serves it on the metrics port if there is one.
fn start_metrics(
    port: Option<MetricsPort>,
    (statistics, doctor): (&Arc<Statistics>, &Arc<Doctor>),
) -> Result<MetricsThread> {
    let accounts = &statistics.memory.accounts;
    let of_pages = (accounts.division().bound(MemoryPart::MetricsPages), accounts.gauge(MemoryPart::MetricsPages));
    let counted = (Arc::clone(&statistics.pages), statistics.watchlist.add("metrics", false));
    let (statistics, doctor) = (Arc::clone(statistics), Arc::clone(doctor));
    MetricsThread::start(port, counted, of_pages, move |form, text| {
        exposition::render((&statistics, &doctor), form, text)
    })
}

fn ended_by_itself(what: &str) -> Error {
    Error::new(
        Kind::Internal,
        format!("{what} ended by itself"),
        "start the daemon again, and report it with the log's last lines",
    )
}

/// Logs that the daemon serves, and warnings if it has no workers, or fields without effect.
fn announce(config: &Config, io_backend: IoBackend, cores: usize, shards: usize) {
    tracing::info!(
        socket = %config.serve.socket.display(), admin_socket = %config.serve.admin_socket.display(),
        metrics_port = config.metrics.port, http_port = config.http.port, engine = io_backend.name(), cores, shards,
        spaces = config.spaces.len(), workers = config.workers.len(), "serving"
    );
    if config.workers.is_empty() && config.servers.is_empty() && config.discovery.path.is_none() {
        tracing::warn!(
            "no workers: every decision will be empty; add workers with --worker, [[worker]] or `kvrouted worker add`"
        );
    }
    reload::note_weights_without_effect(config);
}

/// The seed of a thread's random choices: the configured seed plus the thread's number, or a random one.
fn core_seed(config: &Config, core: usize) -> u64 {
    match config.policy.seed {
        0 => rand::rng().random(),
        seed => seed.wrapping_add(core as u64),
    }
}

fn start_ingest(
    (config, resources): (&Config, &Resources),
    mut plans: Vec<ingest::ShardPlan>,
    fleet: &Arc<Fleet>,
    snapshots: &Snapshots,
    counters: &Arc<CounterSet<DaemonCounter>>,
) -> Result<IngestThreads> {
    refuse_beyond_descriptors(&mut plans, fleet, resources.descriptors);
    let ingest_config = ingest::IngestConfig {
        core: None,
        down_after_ms: config.ingest.down_after_ms,
        silence_ms_max: config.ingest.silence_ms_max,
        probe_after_ms: config.ingest.probe_after_ms,
        receive_messages_max: config.ingest.receive_messages_max,
        shards: usize::from(config.ingest.shards),
        brokers: resources.brokers.clone(),
    };
    let mut checked = snapshots.check(&fleet.load());
    let (threads, shed, counters) = (Vec::new(), resources.shed.clone(), Arc::clone(counters));
    let mut ingest_threads = IngestThreads { threads, shed, counters };
    let shards = plans.len();
    for plan in plans {
        let shard = plan.shard;
        let (restore, loads) = snapshots::loads_of(&plan, &mut checked);
        let mark = resources.watchlist.add(format!("ingest-{}", shard.0), true);
        let surroundings = (mark, EventMemory::of(&resources.memory, shards));
        let thread = ingest::spawn_loading(plan, ingest_config.clone(), Arc::clone(fleet), loads, surroundings)?;
        snapshots.feed(restore)?;
        for refused in thread.refused() {
            tracing::error!(worker = %refused.worker, error = %refused.error, "worker's events are refused");
        }
        ingest_threads.threads.push((shard, thread));
    }
    Ok(ingest_threads)
}

/// Removes the publishers beyond the limit of open files from the plans, and logs each.
fn refuse_beyond_descriptors(plans: &mut [ingest::ShardPlan], fleet: &Fleet, descriptors: Descriptors) {
    let mut left = descriptors.publishers_max;
    for plan in plans {
        let fit = left.min(plan.publishers.len());
        left -= fit;
        for refused in plan.publishers.drain(fit..) {
            let limit = descriptors.limit;
            tracing::error!(worker = %refused.worker, limit, "too few open files for the worker's events: raise the limit (ulimit -n)");
            let reasons = [TrustReason::NoEvents].into_iter().collect();
            if let Some(record) = fleet.load().worker(refused.index) {
                record.trust.store(Trust { level: TrustLevel::None, reasons, ..record.trust.load() });
            }
        }
    }
}

/// Starts a serving thread for each of `metrics`.
fn start_cores(
    (config, resources): (&Config, &Resources),
    io_backend: IoBackend,
    (tables, lanes): (&RequestTables, &Arc<Lanes>),
    metrics: &[Arc<CoreMetrics>],
) -> Result<Vec<Core>> {
    let cpus = &resources.cpus;
    let start = |(index, core_metrics): (usize, &Arc<CoreMetrics>)| {
        let options = CoreOptions {
            pin: config.serve.pin.then(|| cpus.get(index % cpus.len().max(1)).copied()).flatten(),
            frame_body_bytes_max: config.serve.frame_body_bytes_max,
            spin_us_max: config.serve.spin_us_max,
            unread_ms_max: config.serve.unread_ms_max,
            frame_timeout_ms: config.serve.frame_timeout_ms,
            user_share_percent: config.serve.user_share_percent,
            lanes: Some(Arc::clone(lanes)),
            mark: Some(resources.watchlist.add(format!("core-{index}"), true)),
            memory: CoreMemory::of(&resources.memory, metrics.len()),
            turns: resources.turns.clone(),
            ..CoreOptions::new(index, io_backend)
        };
        // Threads do not share readers: each clones its own.
        let (tables, metrics, seed) = (tables.clone(), Arc::clone(core_metrics), core_seed(config, index));
        let counters = Arc::clone(&metrics.counters);
        Core::start(options, counters, move || Ok(RoutingService::new(tables, metrics, index, seed)))
    };
    metrics.iter().enumerate().map(start).collect()
}

/// The name of the first signal.
async fn first_of(terminate: &mut Signal, interrupt: &mut Signal) -> &'static str {
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}

/// Expires bookings, and publishes what is learnt from them, each at its own pace.
async fn tend_bookings(tables: &RequestTables, counters: &CounterSet<DaemonCounter>) {
    tokio::join!(expire(tables, counters), publish_laws(tables));
}

/// Expires bookings that are too old or whose session has gone, every second, a bounded number at a time.
async fn expire(tables: &RequestTables, counters: &CounterSet<DaemonCounter>) {
    let mut every = tokio::time::interval(Duration::from_millis(BOOKINGS_EXPIRY_EVERY_MS));
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        loop {
            let expired = tables.loads.expire(tables.now_ns(), BOOKINGS_EXPIRED_PER_LOCK_MAX);
            counters.add(DaemonCounter::BookingsExpiredAge, expired.by_age);
            counters.add(DaemonCounter::BookingsExpiredSession, expired.by_session);
            if expired.bookings() > 0 {
                tables.queue.made_room();
            }
            if expired.bookings() < BOOKINGS_EXPIRED_PER_LOCK_MAX as u64 {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
}

/// Does one thing after another.
async fn after<T>(first: impl Future<Output = ()>, second: impl Future<Output = T>) -> T {
    first.await;
    second.await
}

/// Gives workers the laws of their prefills as reports change them, a bounded number at a time.
async fn publish_laws(tables: &RequestTables) {
    let mut every = tokio::time::interval(Duration::from_millis(LAWS_PUBLISH_EVERY_MS));
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        let mut next = tables.loads.publish_laws(0, LAWS_PUBLISHED_PER_LOCK_MAX);
        while let Some(from) = next {
            tokio::task::yield_now().await;
            next = tables.loads.publish_laws(from, LAWS_PUBLISHED_PER_LOCK_MAX);
        }
    }
}

/// Ends the serving threads first, so that the index keeps up while they answer. The last snapshots are written
/// meanwhile.
fn end(
    (cores, http_port): (Vec<Core>, Http),
    ingest_threads: Arc<IngestThreads>,
    others: OtherThreads,
    (snapshots, is_ours): (&Snapshots, bool),
    drain_ms_max: u64,
) {
    let OtherThreads { predictor, keeper, bookings, writers, listener, routers, .. } = others;
    let OtherThreads { ports, metrics, memory, watchdog, .. } = others;
    // Another daemon decides: what this one would keep is no longer the newest.
    let keeper = keeper.filter(|_| is_ours);
    let deadline = Instant::now() + Duration::from_millis(drain_ms_max);
    http_port.drain();
    for core in &cores {
        core.drain(deadline);
    }
    // The last snapshots are worth their memory.
    let mut ended = vec![memory.stop()];
    ingest_threads.shed.set(Shed::Dumps, false);
    keeper.iter().for_each(|keeper| keeper.finish(deadline));
    ended.extend(cores.into_iter().map(Core::join));
    // Until now the HTTP port has answered requests with the error `draining`, and the remote port has carried replies.
    ended.extend(ports.into_iter().map(PortThread::stop));
    // No thread books any more, and no connection is open.
    ended.push(kept_bookings::finish(bookings, &snapshots.stats));
    ended.push(metrics.stop());
    snapshots::finish(keeper, deadline, &snapshots.stats);
    // This is the last reference. If another were left, the threads would end with the process.
    let ingest_threads = Arc::into_inner(ingest_threads).unwrap_or_default();
    ended.extend(ingest_threads.threads.into_iter().map(|(_, thread)| thread.stop()));
    ended.extend(predictor.map(EndableThread::stop));
    ended.extend(routers.map(EndableThread::stop));
    ended.extend(Arc::into_inner(listener).map(LoadListener::stop));
    // After the serving threads, so that it writes their last notes.
    ended.push(writers.journal.stop());
    ended.extend(writers.traces.map(trace_export::finish));
    ended.push(watchdog.stop());
    for error in ended.into_iter().filter_map(Result::err) {
        tracing::error!(%error, "a thread ended with an error");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Gauge;
    use crate::limits::THREADS_WATCH_EVERY_MS;
    use crate::requests::{Identity, PredictionAccess};

    #[test]
    fn a_thread_that_has_ended_is_noticed() {
        let config = Config::default();
        let resources = Resources::divide(&config).unwrap();
        let Startup { fleet, loads, indexes, views, .. } =
            startup::prepare(&config, &resources.memory, &Identity::random(), 0).unwrap();
        let predictions = PredictionAccess::default();
        let of_fleet = (&fleet, reload::policies_at_start(&config));
        let division = resources.memory.division();
        let tables = RequestTables::new(
            (&config, division),
            (1, Instant::now()),
            of_fleet,
            indexes,
            &predictions,
            (&loads, &Identity::random()),
        );
        let lanes = Arc::new(Lanes::new(0, 0));
        let (served, metrics) = ((&tables, &lanes), [Arc::default()]);
        let mut cores = start_cores((&config, &resources), IoBackend::Epoll, served, &metrics).unwrap();
        let core = cores.pop().unwrap();
        let mark = resources.watchlist.add("journal", false);
        let journal = tables.recording.start(&config, (1, 0), (&[], &loads), mark).unwrap();
        let of_loads = (Arc::default(), resources.watchlist.add("engine-loads", false));
        let listener = Arc::new(LoadListener::start(loads, of_loads, tables.clock()).unwrap());
        let counted = (Arc::default(), resources.watchlist.add("metrics", false));
        let metrics = MetricsThread::start(None, counted, (u64::MAX, Gauge::default()), |_, _| Ok(())).unwrap();
        let counters = Arc::default();
        let (of_process, counted) =
            ((&resources, vec![core.handle()]), (&Arc::default(), Arc::default(), Arc::default()));
        let shared = (&tables, &lanes, &config);
        let statistics = Statistics::new(shared, views, Vec::new(), &counters, counted, of_process);
        let (memory, watchdog) = start_watches(&config, &resources, &statistics).unwrap();
        let others = OtherThreads {
            predictor: None,
            keeper: None,
            bookings: None,
            writers: Writers { journal, traces: None },
            listener,
            routers: None,
            ports: vec![],
            metrics,
            memory,
            watchdog,
        };
        let (handles, ingest_threads) = ([core.handle()], IngestThreads::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let watched = runtime.block_on(async {
            let watching = threads::watch(&handles, &ingest_threads, &others);
            tokio::time::timeout(Duration::from_millis(THREADS_WATCH_EVERY_MS / 2), watching).await
        });
        assert!(watched.is_err(), "all threads run");
        core.drain(Instant::now());
        core.join().unwrap();
        assert_eq!(runtime.block_on(threads::watch(&handles, &ingest_threads, &others)), "a serving thread");
    }
}
