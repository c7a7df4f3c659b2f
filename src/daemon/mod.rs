//! The daemon: which threads there are, what they share, and in which order they start and end.
//!
//! The control thread is the one that calls [`run`]. It accepts, answers administration,
//! expires bookings, follows what the sources of workers say, and turns SIGTERM or SIGINT into a drain: no new
//! connections, what has been read is answered, then the cores and the ingest threads end, and the last snapshots are
//! taken in between.

mod boot;
mod core_metrics;
mod discover;
mod doctor;
mod evidence;
mod exposition;
mod http;
mod looks;
mod muster;
mod orderly;
mod pair;
mod predicting;
mod recording;
mod records;
mod reload;
mod roster;
mod servers;
mod service;
mod shadowing;
mod shared;
mod snapshots;
mod sources;
mod status;
mod streams;
mod threads;
mod views;
mod watch;

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use core_affinity::CoreId;
use rand::RngExt;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::{Config, IoEngine, WorkerConfig};
use crate::error::{Error, Kind, Result};
use crate::fleet::Fleet;
use crate::ingest::descriptors::{self, Descriptors, Takers};
use crate::ingest::{self, LoadListener};
use crate::limits::{
    BOOKINGS_EXPIRED_PER_TURN_MAX, BOOKINGS_EXPIRY_EVERY_MS, CONNECTIONS_MAX, QUEUE_RECHECK_MS, THREADS_WATCH_EVERY_MS,
};
use crate::metrics::{CounterSet, DaemonCounter, LoadReportCounter};
use crate::serve::{
    Acceptor, AdminServer, Admissions, BoundSocket, Core, CoreHandle, CoreOptions, HttpPort, HttpThread, IoBackend,
    IoChoice, MetricsPort, MetricsThread, choose_io_backend,
};
use crate::trust::{Trust, TrustLevel, TrustReason};
use boot::Booted;
use core_metrics::CoreMetrics;
use discover::Discovery;
use doctor::Doctor;
use http::Http;
use muster::Muster;
use predicting::PredictorThread;
pub use reload::ReadConfig;
use roster::Roster;
use service::CoreService;
use shared::Shared;
use snapshots::Snapshots;
use sources::Sources;
use status::Administration;
use streams::Streams;
use threads::Threads;
pub use watch::unusable_files;

/// Runs the daemon until it is asked to end. `read_again` reads the configuration anew, for SIGHUP.
///
/// # Errors
/// What kept it from starting, with the remedy; nothing is left bound.
pub fn run(config: &Config, read_again: ReadConfig<'_>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|cause| {
        Error::new(Kind::System, "cannot start the control thread", "see the cause").caused_by(cause)
    })?;
    let ended = runtime.block_on(control(config, read_again));
    // Threads that wait for a file system or an engine are not waited for: they may never come back.
    runtime.shutdown_background();
    ended
}

async fn control(config: &Config, read_again: ReadConfig<'_>) -> Result<()> {
    let started = Instant::now();
    let (cpus, core_count) = processors(config);
    let descriptors = descriptors_for(config, core_count)?;
    let engine = choose_io_backend(io_choice(config.serve.io), config.serve.spin_us_max > 0)?;
    let now_unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    let Booted { fleet, loads, indexes, views, records, places, plans } = boot::boot(config, now_unix_ms)?;
    // Before there is a file to leave behind: a signal that comes meanwhile waits for the end of the start, and drains.
    let mut signals = Signals::listen()?;
    let Doors { routing, admin, admissions, scrapes, http } = Doors::bind(config).await?;
    let snapshots = Snapshots::open(config)?;
    let (predicting, predictor) = predicting::start(config, &fleet, started)?;
    let deciding = core_count + usize::from(http.is_some()); // The HTTP port decides and counts as one core more.
    let shared = Shared::new(config, (deciding, descriptors), started, &fleet, indexes, &predicting, &loads);
    let journal = shared.recording.start(config, (shared.instance_id, now_unix_ms), &fleet.load().spaces)?;
    let streams = Arc::new(start_ingest(config, (plans, descriptors), &fleet, &snapshots)?);
    let keeper = snapshots.keep(config, &fleet, &streams)?;
    let heard: Arc<CounterSet<LoadReportCounter>> = Arc::default();
    let listener = Arc::new(LoadListener::start(Arc::clone(&loads), Arc::clone(&heard), shared.clock())?);
    let counters: Arc<CounterSet<DaemonCounter>> = Arc::default();
    let core_metrics: Vec<Arc<CoreMetrics>> = (0..deciding).map(|_| Arc::default()).collect();
    let cores = start_cores(config, engine, &cpus, &shared, &core_metrics[..core_count])?;
    let roster = Rc::new(Roster::new(reload::named(config), records.configs(), Arc::clone(&counters)));
    let sources = Arc::new(Sources::new(&shared, views, core_metrics, &counters, (&snapshots.stats, heard)));
    let doctor = Arc::new(Doctor::new(&sources));
    let shown = (&sources, &doctor);
    let muster =
        Muster::new((config, descriptors), (records, places), snapshots.clone(), Arc::clone(&listener), &sources);
    let administration = Administration::new(&shared, shown, &roster, &streams, &snapshots, config.metrics.port);
    let metrics = start_metrics(scrapes, shown)?;
    let mut http = Http::start(config, http, (&shared, core_count), (&sources, metrics.pages()), &streams)?;
    let threads = Threads { predictor, keeper, journal, listener, http: http.thread.take(), metrics };
    let admin = AdminServer::new(admin, Rc::new(administration), Arc::clone(&counters))?
        .admitting(Arc::clone(&admissions.admin), config.serve.frame_timeout_ms);
    let handles: Vec<CoreHandle> = cores.iter().map(Core::handle).collect();
    let mut acceptor = acceptor(routing, &handles, &admissions, &shared, &counters)?;
    announce(config, engine, core_count, streams.len());
    let discovery = Discovery {
        config,
        read_again,
        hangup: &mut signals.hangup,
        roster: &roster,
        muster,
        streams: &streams,
        shared: &shared,
        admissions: &admissions,
        counters: &counters,
    };
    let ending = orderly::caught(async {
        tokio::select! {
            signal = first_of(&mut signals.terminate, &mut signals.interrupt) => Ok(signal),
            ended = watch_threads(&handles, &streams, &threads) => Err(ended),
            () = acceptor.run() => Err("the acceptor"),
            () = admin.run() => Err("administration"),
            () = http.obey(&roster) => Err("administration by HTTP"),
            () = expire(&shared, &counters) => Err("expiry"),
            () = tend(&shared) => Err("the queue"),
            () = doctor::watch(&doctor, &roster) => Err("diagnosis"),
            ended = discover::run(discovery) => Err(ended),
        }
    })
    .await;
    tracing::info!(?ending, deadline_ms = config.serve.drain_ms_max, "draining");
    // The routing socket goes first: nobody connects to a daemon that leaves. So does what holds on to the ingest threads.
    drop((acceptor, admin));
    http.drain();
    end(cores, streams, threads, &snapshots, Instant::now() + Duration::from_millis(config.serve.drain_ms_max));
    tracing::info!(up_ms = shared.now_ms(), "ended");
    ending.map(drop).map_err(ended_by_itself)
}

/// Accepts for the cores, from whom and as many as may connect.
fn acceptor(
    routing: BoundSocket,
    cores: &[CoreHandle],
    admissions: &Admissions,
    shared: &Shared,
    counters: &Arc<CounterSet<DaemonCounter>>,
) -> Result<Acceptor> {
    let acceptor = Acceptor::new(routing, cores.to_vec(), shared.descriptors.connections_max, Arc::clone(counters))?;
    Ok(acceptor.admitting(Arc::clone(&admissions.routing)).shared_by(Arc::clone(&shared.users)))
}

/// Where the daemon is reached, and by whom. Everything that can be refused is bound before any thread runs.
struct Doors {
    routing: BoundSocket,
    admin: BoundSocket,
    admissions: Admissions,
    scrapes: Option<MetricsPort>,
    http: Option<HttpPort>,
}

impl Doors {
    async fn bind(config: &Config) -> Result<Self> {
        let admissions = Admissions::resolve(config)?;
        let routing = BoundSocket::bind(&config.serve.socket, config.serve.socket_mode)?;
        let admin = BoundSocket::bind(&config.serve.admin_socket, config.admin.socket_mode)?;
        let scrapes = MetricsPort::bind(config.metrics.port, &config.metrics.hosts)?;
        Ok(Self { routing, admin, admissions, scrapes, http: HttpPort::bind(&config.http)? })
    }
}

const fn io_choice(io: IoEngine) -> IoChoice {
    match io {
        IoEngine::Auto => IoChoice::Auto,
        IoEngine::Uring => IoChoice::Uring,
        IoEngine::Epoll => IoChoice::Epoll,
    }
}

/// Makes the metrics page for both ports, and serves it on its own, where that is configured.
fn start_metrics(port: Option<MetricsPort>, (sources, doctor): (&Arc<Sources>, &Arc<Doctor>)) -> Result<MetricsThread> {
    let (counters, sources, doctor) = (Arc::clone(&sources.pages), Arc::clone(sources), Arc::clone(doctor));
    MetricsThread::start(port, counters, move |text| exposition::render(&sources, &doctor, text))
}

fn ended_by_itself(what: &str) -> Error {
    Error::new(
        Kind::Internal,
        format!("{what} ended by itself"),
        "start the daemon again, and report it with the log's last lines",
    )
}

/// Returns when a thread has ended that nobody asked to: a daemon without it would serve ever less truth.
async fn watch_threads(cores: &[CoreHandle], streams: &Streams, threads: &Threads) -> &'static str {
    let mut every = tokio::time::interval(Duration::from_millis(THREADS_WATCH_EVERY_MS));
    loop {
        every.tick().await;
        if !cores.iter().all(CoreHandle::is_alive) {
            return "a core thread";
        }
        if !streams.are_running() {
            return "an ingest thread";
        }
        if let Some(ended) = threads.ended() {
            return ended;
        }
    }
}

/// Says that the daemon serves, and what will surprise whoever asks it.
fn announce(config: &Config, engine: IoBackend, cores: usize, shards: usize) {
    tracing::info!(
        socket = %config.serve.socket.display(), admin_socket = %config.serve.admin_socket.display(),
        metrics_port = config.metrics.port, http_port = config.http.port, engine = engine.name(), cores, shards,
        spaces = config.spaces.len(), workers = config.workers.len(), "serving"
    );
    if config.workers.is_empty() && config.servers.is_empty() && config.discovery.path.is_none() {
        tracing::warn!(
            "no workers: every decision will be empty; name them with --worker, [[worker]] or `kvrouted worker add`"
        );
    }
}

/// Where a core's chance begins: the configured seed told apart by core, or the system's.
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
) -> Result<Streams> {
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
    let mut streams = Streams::default();
    for plan in plans {
        let shard = plan.shard;
        let (restore, loads) = snapshots::loads_of(&plan, &mut checked);
        let stream = ingest::spawn_loading(plan, ingest_config, Arc::clone(fleet), loads)?;
        snapshots.feed(restore)?;
        for refused in stream.refused() {
            tracing::error!(worker = %refused.worker, error = %refused.error, "worker's events are refused");
        }
        streams.0.push((shard, stream));
    }
    Ok(streams)
}

/// The processors there are, and how many serving threads run on them.
fn processors(config: &Config) -> (Vec<CoreId>, usize) {
    // The one call that sees every processor: a pinned thread sees only its own.
    let cpus = core_affinity::get_core_ids().unwrap_or_default();
    let core_count = config.serve.core_count(cpus.len(), usize::from(config.ingest.shards));
    (cpus, core_count)
}

/// Raises the limit of open files, divides what there may be, and says so where not everybody has all.
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
            "too few open files for all that may come: fewer connections, lanes and workers are let in; raise the hard limit (ulimit -Hn, LimitNOFILE=)"
        );
    }
    Ok(descriptors)
}

/// Takes out, by name, the publishers that do not fit under the limit of open files.
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
    engine: IoBackend,
    cpus: &[CoreId],
    shared: &Shared,
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
            ..CoreOptions::new(index, engine)
        };
        // Readers are not shared between threads: each core clones its own.
        let (shared, metrics, seed) = (shared.clone(), Arc::clone(metrics), core_seed(config, index));
        let counters = Arc::clone(&metrics.counters);
        Core::start(options, counters, move || Ok(CoreService::new(shared, metrics, index, seed)))
    };
    metrics.iter().enumerate().map(start).collect()
}

/// The signals that are heeded: two ask to end, one to read the configuration again.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    /// From now on they do not end the process by themselves.
    fn listen() -> Result<Self> {
        let listen = |kind| {
            signal(kind).map_err(|cause| {
                Error::new(Kind::System, "cannot listen for signals", "see the cause").caused_by(cause)
            })
        };
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }
}

/// The name of the first that came.
async fn first_of(terminate: &mut Signal, interrupt: &mut Signal) -> &'static str {
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}

/// Drops what is too old and whose session has gone, every second, a bounded number at a time.
async fn expire(shared: &Shared, counters: &CounterSet<DaemonCounter>) {
    let mut every = tokio::time::interval(Duration::from_millis(BOOKINGS_EXPIRY_EVERY_MS));
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        loop {
            let expired = shared.loads.expire(shared.now_ns(), BOOKINGS_EXPIRED_PER_TURN_MAX);
            counters.add(DaemonCounter::BookingsExpiredAge, expired.by_age);
            counters.add(DaemonCounter::BookingsExpiredSession, expired.by_session);
            if expired.bookings() > 0 {
                shared.room.made_room();
            }
            if expired.bookings() < BOOKINGS_EXPIRED_PER_TURN_MAX as u64 {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
}

/// Gives up, in the queue, who has waited too long, and lets those who wait be decided again when workers come and go.
async fn tend(shared: &Shared) {
    shared.room.expire_and_recheck(QUEUE_RECHECK_MS, || shared.fleet.load().version).await;
}

/// Ends cores first, so that the index stands still only when nobody asks any more; the last snapshots are taken
/// meanwhile.
fn end(
    cores: Vec<Core>,
    streams: Arc<Streams>,
    Threads { predictor, keeper, journal, listener, http, metrics }: Threads,
    snapshots: &Snapshots,
    deadline: Instant,
) {
    for core in &cores {
        core.drain(deadline);
    }
    keeper.iter().for_each(|keeper| keeper.finish(deadline));
    let mut ended: Vec<Result<()>> = cores.into_iter().map(Core::join).collect();
    // It has told those who ask that the daemon drains.
    ended.extend(http.map(HttpThread::stop));
    ended.push(metrics.stop());
    snapshots::finish(keeper, deadline, &snapshots.stats);
    // Nobody else has them any more; if somebody had, they would end with the process.
    let streams = Arc::into_inner(streams).unwrap_or_default();
    ended.extend(streams.0.into_iter().map(|(_, stream)| stream.stop()));
    ended.extend(predictor.map(PredictorThread::stop));
    ended.extend(Arc::into_inner(listener).map(LoadListener::stop));
    // After the cores: what they noted last is written, too.
    ended.push(journal.stop());
    for error in ended.into_iter().filter_map(Result::err) {
        tracing::error!(%error, "a thread did not end well");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_has_ended_is_noticed() {
        let config = Config::default();
        let Booted { fleet, loads, indexes, .. } = boot::boot(&config, 0).unwrap();
        let predicting = predicting::Predicting::default();
        let descriptors = descriptors_for(&config, 1).unwrap();
        let shared = Shared::new(&config, (1, descriptors), Instant::now(), &fleet, indexes, &predicting, &loads);
        let mut cores = start_cores(&config, IoBackend::Epoll, &[], &shared, &[Arc::default()]).unwrap();
        let core = cores.pop().unwrap();
        let journal = shared.recording.start(&config, (1, 0), &[]).unwrap();
        let listener = Arc::new(LoadListener::start(loads, Arc::default(), shared.clock()).unwrap());
        let metrics = MetricsThread::start(None, Arc::default(), |_| Ok(())).unwrap();
        let threads = Threads { predictor: None, keeper: None, journal, listener, http: None, metrics };
        let (handles, streams) = ([core.handle()], Streams::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let looked = runtime.block_on(async {
            let watching = watch_threads(&handles, &streams, &threads);
            tokio::time::timeout(Duration::from_millis(THREADS_WATCH_EVERY_MS / 2), watching).await
        });
        assert!(looked.is_err(), "all is well as long as it runs");
        core.drain(Instant::now());
        core.join().unwrap();
        assert_eq!(runtime.block_on(watch_threads(&handles, &streams, &threads)), "a core thread");
    }
}
