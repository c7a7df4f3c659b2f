//! The daemon assembles its parts: it starts the threads, gives them the tables that they share, and ends them in
//! order. What a request does is in [`requests`](crate::requests).
//!
//! The control thread calls [`run`]. It accepts connections, answers administration, expires bookings, follows the
//! sources of workers, and turns SIGTERM or SIGINT into a drain: it takes no new connections, requests that were read
//! are answered, then the serving threads and the ingest threads end. The last snapshots are written in between.

mod desired_fleet;
mod doctor;
mod engine_http;
mod exposition;
mod fleet_reconciler;
mod http;
mod ingest_threads;
mod predictor_thread;
mod reload;
mod sandboxed;
mod snapshots;
mod startup;
mod statistics;
mod status;
mod threads;
mod worker_files;
mod worker_records;
mod worker_sources;

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use core_affinity::CoreId;
use rand::RngExt;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::{Config, WorkerConfig};
use crate::error::{Error, Kind, Result};
use crate::fleet::Fleet;
use crate::ingest::descriptors::{self, Descriptors, Takers};
use crate::ingest::{self, LoadListener};
use crate::limits::{
    BOOKINGS_EXPIRED_PER_LOCK_MAX, BOOKINGS_EXPIRY_EVERY_MS, CONNECTIONS_MAX, LAWS_PUBLISH_EVERY_MS,
    LAWS_PUBLISHED_PER_LOCK_MAX, QUEUE_RECHECK_MS,
};
use crate::metrics::{CounterSet, DaemonCounter, LoadReportCounter};
use crate::requests::{CoreMetrics, RequestTables, RoutingService};
use crate::sandbox::{self, ThreadKind};
use crate::serve::{
    Acceptor, AdminServer, Admissions, BoundSocket, Core, CoreHandle, CoreOptions, HttpPort, IoBackend, Lanes,
    MetricsPort, MetricsThread, PortThread, choose_io_backend,
};
use crate::shares::UserQuotas;
use crate::trust::{Trust, TrustLevel, TrustReason};
use desired_fleet::DesiredFleet;
use doctor::Doctor;
use fleet_reconciler::FleetReconciler;
use http::Http;
use ingest_threads::IngestThreads;
use predictor_thread::PredictorThread;
pub use reload::ReadConfig;
use snapshots::Snapshots;
use startup::Startup;
use statistics::Statistics;
use status::Administration;
use threads::OtherThreads;
pub use worker_files::unusable_files;
use worker_sources::WorkerSources;

/// Runs the daemon until a signal ends it. `read_again` reads the configuration anew, for SIGHUP.
///
/// # Errors
/// The reason why it could not start, with the remedy. No socket is left bound then.
pub fn run(config: &Config, read_again: ReadConfig<'_>) -> Result<()> {
    // Before the runtimes, which panic where they have too few descriptors.
    let machine = Machine::of(config)?;
    let runtime = runtime_of(Builder::new_current_thread().enable_all(), ThreadKind::Files)?;
    // Threads that wait for engines have no other use: what they read comes from the network.
    let asking = runtime_of(&mut Builder::new_current_thread(), ThreadKind::Asking)?;
    let ended = runtime.block_on(control(config, read_again, asking.handle(), &machine));
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

async fn control(config: &Config, read_again: ReadConfig<'_>, asking: &Handle, machine: &Machine) -> Result<()> {
    let Machine { ref cpus, core_count, descriptors } = *machine;
    let started = Instant::now();
    let io_backend = choose_io_backend(config.serve.io, config.serve.spin_us_max > 0)?;
    let now_unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    let (mut signals, listeners, snapshots) = open(config).await?;
    let Listeners { routing, admin, admissions, scrapes, http } = listeners;
    let made = startup::prepare(config, now_unix_ms)?;
    let Startup { fleet, loads, indexes, views, records, places, plans } = made.joined(config, &snapshots, now_unix_ms);
    let (predictions, predictor) = predictor_thread::start(config, &fleet, started)?;
    let deciding = core_count + usize::from(http.is_some()); // The HTTP port decides and counts as one serving thread more.
    let policies = reload::policies(config, 1);
    let tables = RequestTables::new(config, (deciding, started), (&fleet, policies), indexes, &predictions, &loads);
    let lanes = Arc::new(lanes(config, descriptors, &tables.users));
    let journal = tables.recording.start(config, (tables.instance_id, now_unix_ms), (&fleet.load().spaces, &loads))?;
    let ingest_threads = Arc::new(start_ingest(config, (plans, descriptors), &fleet, &snapshots)?);
    let keeper = snapshots.keep(config, &fleet, &ingest_threads, &tables)?;
    let load_reports: Arc<CounterSet<LoadReportCounter>> = Arc::default();
    let listener = Arc::new(LoadListener::start(Arc::clone(&loads), Arc::clone(&load_reports), tables.clock())?);
    let counters: Arc<CounterSet<DaemonCounter>> = Arc::default();
    let core_metrics: Vec<Arc<CoreMetrics>> = (0..deciding).map(|_| Arc::default()).collect();
    let cores = start_cores(config, (io_backend, cpus), (&tables, &lanes), &core_metrics[..core_count])?;
    let desired = Rc::new(DesiredFleet::new(reload::named(config), records.configs(), Arc::clone(&counters)));
    let counted = (&snapshots.stats, load_reports);
    let stats = Arc::new(Statistics::new((&tables, &lanes), views, core_metrics, &counters, counted));
    let doctor = Arc::new(Doctor::new(&stats));
    let shown = (&stats, &doctor);
    let reconciler = FleetReconciler::new((config, descriptors), (records, places), (&snapshots, &listener), &stats);
    let service = Administration::new(&tables, shown, &desired, &ingest_threads, &snapshots, config.metrics.port);
    let metrics = start_metrics(scrapes, shown)?;
    let mut http = Http::start(config, http, (&tables, core_count), (&stats, metrics.pages()), &ingest_threads)?;
    let others = OtherThreads { predictor, keeper, journal, listener, http: http.thread.take(), metrics };
    let admin = admin_server(config, admin, service, &admissions, &counters)?;
    let handles: Vec<CoreHandle> = cores.iter().map(Core::handle).collect();
    let mut acceptor = acceptor(routing, &handles, (&admissions, &tables), descriptors, &counters)?;
    sandbox::enter(ThreadKind::Control);
    announce(config, io_backend, core_count, ingest_threads.len());
    let sources = WorkerSources {
        config,
        read_again,
        asking,
        hangup: &mut signals.hangup,
        desired: &desired,
        reconciler,
        ingest_threads: &ingest_threads,
        tables: &tables,
        admissions: &admissions,
    };
    let ending = threads::catch_panic(async {
        tokio::select! {
            signal = first_of(&mut signals.terminate, &mut signals.interrupt) => Ok(signal),
            ended = threads::watch(&handles, &ingest_threads, &others) => Err(ended),
            () = acceptor.run() => Err("the acceptor"),
            () = admin.run() => Err("administration"),
            () = http.change_workers(&desired) => Err("administration by HTTP"),
            () = tend_bookings(&tables, &counters) => Err("the care of bookings"),
            () = tables.queue.expire_and_recheck(QUEUE_RECHECK_MS, || tables.fleet.load().version) => Err("the queue"),
            () = doctor::watch(&doctor, &desired) => Err("diagnosis"),
            ended = worker_sources::run(sources) => Err(ended),
        }
    })
    .await;
    tracing::info!(?ending, deadline_ms = config.serve.drain_ms_max, "draining");
    // The routing socket goes first: gateways do not connect to a daemon that ends. So do the users of ingest threads.
    drop((acceptor, admin));
    end((cores, http), ingest_threads, others, &snapshots, config.serve.drain_ms_max);
    tracing::info!(up_ms = tables.now_ms(), "ended");
    ending.map(drop).map_err(ended_by_itself)
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

/// Opens what the process needs of the system, and then gives up the rest: no other thread runs yet.
async fn open(config: &Config) -> Result<(Signals, Listeners, Snapshots)> {
    // Before a socket file exists: a signal that arrives from now on is handled after the start, and drains.
    let signals = Signals::listen()?;
    let opened = (signals, Listeners::bind(config).await?, Snapshots::open(config)?);
    sandboxed::start(config)?;
    Ok(opened)
}

/// Accepts connections for the serving threads, within the limits for users and descriptors.
fn acceptor(
    routing: BoundSocket,
    cores: &[CoreHandle],
    (admissions, tables): (&Admissions, &RequestTables),
    descriptors: Descriptors,
    counters: &Arc<CounterSet<DaemonCounter>>,
) -> Result<Acceptor> {
    let acceptor = Acceptor::new(routing, cores.to_vec(), descriptors.connections_max, Arc::clone(counters))?;
    Ok(acceptor.admitting(Arc::clone(&admissions.routing)).shared_by(Arc::clone(&tables.users)))
}

/// The lanes that gateways may open, on all serving threads together.
fn lanes(config: &Config, descriptors: Descriptors, users: &Arc<UserQuotas>) -> Lanes {
    Lanes::new(descriptors.lanes_max, config.serve.lane_ring_bytes_max).shared_by(Arc::clone(users))
}

/// The daemon's listening sockets, and the users that may connect. All of them are bound before any thread runs.
struct Listeners {
    routing: BoundSocket,
    admin: BoundSocket,
    admissions: Admissions,
    scrapes: Option<MetricsPort>,
    http: Option<HttpPort>,
}

impl Listeners {
    async fn bind(config: &Config) -> Result<Self> {
        let admissions = Admissions::resolve(config)?;
        let routing = BoundSocket::bind(&config.serve.socket, config.serve.socket_mode)?;
        let admin = BoundSocket::bind(&config.serve.admin_socket, config.admin.socket_mode)?;
        let scrapes = MetricsPort::bind(config.metrics.port, &config.metrics.hosts)?;
        Ok(Self { routing, admin, admissions, scrapes, http: HttpPort::bind(&config.http)? })
    }
}

/// Starts the thread that renders the metrics page for both ports, and serves it on the metrics port if there is one.
fn start_metrics(
    port: Option<MetricsPort>,
    (statistics, doctor): (&Arc<Statistics>, &Arc<Doctor>),
) -> Result<MetricsThread> {
    let (counters, statistics, doctor) = (Arc::clone(&statistics.pages), Arc::clone(statistics), Arc::clone(doctor));
    MetricsThread::start(port, counters, move |text| exposition::render(&statistics, &doctor, text))
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
    config: &Config,
    (mut plans, descriptors): (Vec<ingest::ShardPlan>, Descriptors),
    fleet: &Arc<Fleet>,
    snapshots: &Snapshots,
) -> Result<IngestThreads> {
    refuse_beyond_descriptors(&mut plans, fleet, descriptors);
    let ingest_config = ingest::IngestConfig {
        core: None,
        down_after_ms: config.ingest.down_after_ms,
        silence_ms_max: config.ingest.silence_ms_max,
        probe_after_ms: config.ingest.probe_after_ms,
        receive_messages_max: config.ingest.receive_messages_max,
        shards: usize::from(config.ingest.shards),
    };
    let mut checked = snapshots.check(&fleet.load());
    let mut ingest_threads = IngestThreads::default();
    for plan in plans {
        let shard = plan.shard;
        let (restore, loads) = snapshots::loads_of(&plan, &mut checked);
        let thread = ingest::spawn_loading(plan, ingest_config, Arc::clone(fleet), loads)?;
        snapshots.feed(restore)?;
        for refused in thread.refused() {
            tracing::error!(worker = %refused.worker, error = %refused.error, "worker's events are refused");
        }
        ingest_threads.0.push((shard, thread));
    }
    Ok(ingest_threads)
}

/// What this process may use of its machine.
struct Machine {
    cpus: Vec<CoreId>,
    /// Serving threads.
    core_count: usize,
    descriptors: Descriptors,
}

impl Machine {
    /// Call it before any thread is pinned: a pinned thread sees only its own processor.
    fn of(config: &Config) -> Result<Self> {
        let cpus = core_affinity::get_core_ids().unwrap_or_default();
        let core_count = config.serve.core_count(cpus.len(), usize::from(config.ingest.shards));
        let descriptors = descriptors_for(config, core_count)?;
        Ok(Self { cpus, core_count, descriptors })
    }
}

/// Raises the limit of open files and divides them among connections, lanes and publishers. Warns if one gets fewer
/// than configured.
fn descriptors_for(config: &Config, cores: usize) -> Result<Descriptors> {
    let count = |has: fn(&WorkerConfig) -> bool| config.workers.iter().filter(|worker| has(worker)).count();
    let publishers = count(|worker| worker.events.is_some()) + count(|worker| worker.load.is_some());
    let (shards, lanes) = (usize::from(config.ingest.shards), config.serve.lanes_max);
    let descriptors = descriptors::divide(descriptors::raise(), Takers { cores, shards, publishers, lanes })?;
    let Descriptors { limit, connections_max, lanes_max, publishers_max } = descriptors;
    if connections_max < CONNECTIONS_MAX || lanes_max < lanes || publishers_max < publishers {
        tracing::warn!(
            limit,
            connections_max,
            lanes_max,
            publishers_max,
            "too few open files: the daemon allows fewer connections, lanes and workers than configured; raise the hard limit (ulimit -Hn, LimitNOFILE=)"
        );
    }
    Ok(descriptors)
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
    config: &Config,
    (io_backend, cpus): (IoBackend, &[CoreId]),
    (tables, lanes): (&RequestTables, &Arc<Lanes>),
    metrics: &[Arc<CoreMetrics>],
) -> Result<Vec<Core>> {
    let start = |(index, metrics): (usize, &Arc<CoreMetrics>)| {
        let options = CoreOptions {
            pin: config.serve.pin.then(|| cpus.get(index % cpus.len().max(1)).copied()).flatten(),
            frame_body_bytes_max: config.serve.frame_body_bytes_max,
            spin_us_max: config.serve.spin_us_max,
            unread_ms_max: config.serve.unread_ms_max,
            frame_timeout_ms: config.serve.frame_timeout_ms,
            user_share_percent: config.serve.user_share_percent,
            lanes: Some(Arc::clone(lanes)),
            ..CoreOptions::new(index, io_backend)
        };
        // Threads do not share readers: each clones its own.
        let (tables, metrics, seed) = (tables.clone(), Arc::clone(metrics), core_seed(config, index));
        let counters = Arc::clone(&metrics.counters);
        Core::start(options, counters, move || Ok(RoutingService::new(tables, metrics, index, seed)))
    };
    metrics.iter().enumerate().map(start).collect()
}

/// The signals that the daemon handles: two end it, one reloads the configuration.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    /// From now on the signals do not end the process by themselves.
    fn listen() -> Result<Self> {
        let listen = |kind| {
            signal(kind).map_err(|cause| {
                Error::new(Kind::System, "cannot listen for signals", "see the cause").caused_by(cause)
            })
        };
        // A write beyond the limit on a file's size then fails, as on a full disk, and does not end the daemon.
        drop(listen(SignalKind::from_raw(libc::SIGXFSZ))?);
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }
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
    OtherThreads { predictor, keeper, journal, listener, http, metrics }: OtherThreads,
    snapshots: &Snapshots,
    drain_ms_max: u64,
) {
    let deadline = Instant::now() + Duration::from_millis(drain_ms_max);
    http_port.drain();
    for core in &cores {
        core.drain(deadline);
    }
    keeper.iter().for_each(|keeper| keeper.finish(deadline));
    let mut ended: Vec<Result<()>> = cores.into_iter().map(Core::join).collect();
    // Until now it has answered requests with the error `draining`.
    ended.extend(http.map(PortThread::stop));
    ended.push(metrics.stop());
    snapshots::finish(keeper, deadline, &snapshots.stats);
    // This is the last reference. If another were left, the threads would end with the process.
    let ingest_threads = Arc::into_inner(ingest_threads).unwrap_or_default();
    ended.extend(ingest_threads.0.into_iter().map(|(_, thread)| thread.stop()));
    ended.extend(predictor.map(PredictorThread::stop));
    ended.extend(Arc::into_inner(listener).map(LoadListener::stop));
    // After the serving threads, so that it writes their last notes.
    ended.push(journal.stop());
    for error in ended.into_iter().filter_map(Result::err) {
        tracing::error!(%error, "a thread ended with an error");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::THREADS_WATCH_EVERY_MS;
    use crate::requests::PredictionAccess;

    #[test]
    fn a_thread_that_has_ended_is_noticed() {
        let config = Config::default();
        let Startup { fleet, loads, indexes, .. } = startup::prepare(&config, 0).unwrap();
        let predictions = PredictionAccess::default();
        let fleet = (&fleet, reload::policies(&config, 1));
        let tables = RequestTables::new(&config, (1, Instant::now()), fleet, indexes, &predictions, &loads);
        let lanes = Arc::new(Lanes::new(0, 0));
        let mut cores = start_cores(&config, (IoBackend::Epoll, &[]), (&tables, &lanes), &[Arc::default()]).unwrap();
        let core = cores.pop().unwrap();
        let journal = tables.recording.start(&config, (1, 0), (&[], &loads)).unwrap();
        let listener = Arc::new(LoadListener::start(loads, Arc::default(), tables.clock()).unwrap());
        let metrics = MetricsThread::start(None, Arc::default(), |_| Ok(())).unwrap();
        let others = OtherThreads { predictor: None, keeper: None, journal, listener, http: None, metrics };
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
