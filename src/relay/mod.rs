//! A relay runs beside one engine. It takes the engine's events, keeps an index of its own, and publishes the events
//! again in our own format (`schemas/kv_events.fbs`): hashed, with their trust, and with everything that lets a router
//! tell whether it has received all of them.
//!
//! ```text
//! engine → ingest (as in the daemon) → republisher → Outbound → PUB            → routers
//!                                                  → ReplayBuffer → ROUTER, on request → routers
//!                                                                 → Forward → a stream of a NATS server, if one is named
//!                                    → dump → TakenSnapshot → ROUTER, on request, and the same stream → routers
//! ```
//!
//! * Every batch carries the relay's generation, which is drawn at its start. A router that sees another generation has
//!   seen a restart.
//! * A heartbeat each second names the last sequence. A lost tail therefore shows at once, and so does silence.
//! * A router requests lost batches as from an engine. Batches that have left the buffer are replaced by a snapshot, as
//!   of a watermark, and the batches after it. A router that connects late thus gets everything that the relay holds.
//!
//! The ingest thread makes the stream, and never waits. A second thread sends it to all subscribers. A third thread
//! answers requests, a few at once, each as fast as its router reads. All memory is bounded: batches by number and
//! bytes, one snapshot, the number of peers, and the bytes that each may send and that wait for it ([`crate::zmtp`]).

mod answer;
#[cfg(feature = "nats")]
mod nats;
mod publish;
mod snapshot;
mod snapshot_taker;

use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Registry;
use rand::RngExt;
use tokio::signal::unix::{SignalKind, signal};

use crate::budget::Gauge;
use crate::endpoint::{BoundEndpoint, NatsServer};
use crate::error::{Error, Kind, Result};
use crate::fleet::{EventSource, Fleet, FleetTable, SchemeCell, TrustCell};
use crate::ids::{DpRank, Scheme, ShardId, SpaceId, Worker, WorkerIndex};
use crate::index::{self, ShardLimits};
use crate::ingest::{
    self, IngestConfig, IngestHandle, PublisherPlan, RelayName, Republisher, ShardPlan, WorkerView,
    exposition::{self, WorkerFamilies},
};
use crate::limits::{
    RELAY_ANSWER_BYTES_MAX, RELAY_ANSWER_MESSAGES_MAX, RELAY_BUFFER_BATCHES_DEFAULT, RELAY_BUFFER_BYTES_DEFAULT,
    RELAY_HEARTBEAT_MS, RELAY_PEERS_MAX, RELAY_PEERS_PER_ADDRESS_MAX, RELAY_REPORT_EVERY_S, RELAY_REQUEST_BYTES_MAX,
    RELAY_REQUEST_PARTS_MAX, RELAY_SUBSCRIBER_BYTES_MAX, RELAY_SUBSCRIBER_MESSAGES_MAX, THREADS_WATCH_EVERY_MS,
    WORKER_BLOCKS_MAX_DEFAULT, ZMQ_COMMAND_BYTES_MAX,
};
use crate::metrics::{CounterName as _, CounterSet, PageCounter, RelayCounter};
use crate::sandbox::{self, Grant, Place, Program, RefusalLog, ThreadKind};
use crate::serve::{ListeningSockets, MetricsPort, MetricsThread};
use crate::trust::Trust;
use crate::watchdog::ThreadMark;
use crate::zmtp::{Bounds, Role, Server, ServerPlan, prepare_lookups};
use answer::Answering;
#[cfg(feature = "nats")]
use nats::{EventLoop, Forward, Forwarding};
use publish::{Bell, Kept, Outbound, Publication, Sending};
use snapshot_taker::SnapshotTaker;

pub use answer::{Answer, Message, Step};
pub use publish::ReplayBuffer;
pub use snapshot::{Failure, Progress, TakenSnapshot};

/// The limits of what a peer of either port may send: a subscription or a request.
const REQUESTS: Bounds = Bounds {
    message_bytes_max: RELAY_REQUEST_BYTES_MAX,
    parts_max: RELAY_REQUEST_PARTS_MAX,
    command_bytes_max: ZMQ_COMMAND_BYTES_MAX,
    keeps_parts: false,
};
const PUBLISHING: ServerPlan = ServerPlan {
    role: Role::Publisher,
    bounds: REQUESTS,
    peers_max: RELAY_PEERS_MAX,
    peers_per_address_max: RELAY_PEERS_PER_ADDRESS_MAX,
    waiting_bytes_max: RELAY_SUBSCRIBER_BYTES_MAX,
    waiting_messages_max: RELAY_SUBSCRIBER_MESSAGES_MAX,
};
const REPLAYING: ServerPlan = ServerPlan {
    role: Role::Router,
    bounds: REQUESTS,
    peers_max: RELAY_PEERS_MAX,
    peers_per_address_max: RELAY_PEERS_PER_ADDRESS_MAX,
    waiting_bytes_max: RELAY_ANSWER_BYTES_MAX,
    waiting_messages_max: RELAY_ANSWER_MESSAGES_MAX,
};

/// The configuration of a relay.
#[derive(Clone, Debug, PartialEq)]
pub struct RelayPlan {
    /// The ZeroMQ endpoint to bind for the stream.
    pub endpoint: String,
    /// The endpoint to bind for replays.
    pub replay: String,
    /// The engine's rank.
    pub worker: Worker,
    /// The engine's endpoints.
    pub source: EventSource,
    /// The hash scheme, if the operator states it.
    pub scheme: Option<Scheme>,
    /// Whether prompts may have cache salts.
    pub salts_possible: bool,
    /// Whether a chain that is announced again counts as another copy: the engine cannot send full reports.
    pub counts_copies: bool,
    /// KV blocks in the engine's device memory; 0 = not known.
    pub capacity_blocks: u64,
    /// The most blocks to remember, over all tiers.
    pub blocks_max: u64,
    /// The memory limit of the index, bytes; `u64::MAX` = none.
    pub memory_bytes_max: u64,
    /// NATS servers of one cluster where the batches are also stored; empty = nowhere. A build without the feature `nats`
    /// ignores them.
    pub nats: Vec<NatsServer>,
    /// The most batches to keep for replays.
    pub buffer_batches_max: usize,
    /// The most bytes of those batches.
    pub buffer_bytes_max: usize,
    /// The pause without a batch after which the relay sends a heartbeat, milliseconds.
    pub heartbeat_ms: u64,
    /// The ingest configuration.
    pub ingest: IngestConfig,
    /// What the relay gives up once it has started.
    pub sandbox: sandbox::Mode,
    /// The address and port of the metrics page; `None` = no page.
    pub metrics: Option<SocketAddr>,
    /// Host names that requests for that page may use, beside IP addresses and `localhost`.
    pub metrics_hosts: Vec<String>,
}

impl RelayPlan {
    /// The plan for one engine, with defaults for everything else.
    #[must_use]
    pub fn new(endpoint: &str, replay: &str, source: EventSource) -> Self {
        Self {
            endpoint: endpoint.to_owned(),
            replay: replay.to_owned(),
            worker: Worker::new(0, 0),
            source,
            scheme: None,
            salts_possible: true,
            counts_copies: false,
            capacity_blocks: 0,
            blocks_max: WORKER_BLOCKS_MAX_DEFAULT,
            memory_bytes_max: u64::MAX,
            nats: Vec::new(),
            buffer_batches_max: RELAY_BUFFER_BATCHES_DEFAULT,
            buffer_bytes_max: RELAY_BUFFER_BYTES_DEFAULT,
            heartbeat_ms: RELAY_HEARTBEAT_MS,
            ingest: IngestConfig::default(),
            sandbox: sandbox::Mode::Off,
            metrics: None,
            metrics_hosts: Vec::new(),
        }
    }
}

/// A running relay. Dropping this value ends it.
#[derive(Debug)]
pub struct Relay {
    /// The bound endpoint of the stream.
    endpoint: String,
    /// The bound endpoint for replays.
    replay: String,
    sources: Sources,
    ingest: Arc<IngestHandle>,
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Relay {
    /// Binds the sockets and connects to the engine.
    ///
    /// # Errors
    /// [`Kind::Config`] if an endpoint cannot be bound or the engine's cannot be used; [`Kind::System`] if no socket or
    /// thread is left.
    pub fn start(plan: &RelayPlan) -> Result<Self> {
        let publishing = bind(&plan.endpoint, PUBLISHING)?;
        let replaying = bind(&plan.replay, REPLAYING)?;
        let (endpoint, replay) = (publishing.endpoint().to_owned(), replaying.endpoint().to_owned());
        confine(plan)?;
        let counters = Arc::new(CounterSet::default());
        let kept = Arc::new(Mutex::new(Kept {
            buffer: ReplayBuffer::new(plan.buffer_batches_max, plan.buffer_bytes_max),
            heartbeat: None,
            forgotten: 0,
        }));
        // The router assigns the id; the rank is the engine's own.
        let generation = rand::rng().random_range(1..=u64::MAX);
        let name = RelayName { generation, worker_id: None, dp_rank: Some(DpRank(plan.worker.rank.0)) };
        let outbound = Arc::new(Outbound::new(publishing.waker()));
        #[cfg(feature = "nats")]
        let nats_loop = if plan.nats.is_empty() { None } else { Some(EventLoop::new()?) };
        #[cfg(feature = "nats")]
        let bell: Option<Arc<Bell>> = nats_loop.as_ref().map(|nats_loop| Arc::clone(&nats_loop.bell));
        #[cfg(not(feature = "nats"))]
        let bell: Option<Arc<Bell>> = None;
        let (of_outlet, of_counters) = (Arc::clone(&kept), Arc::clone(&counters));
        let outlet = Publication { outbound: Arc::clone(&outbound), kept: of_outlet, counters: of_counters, bell };
        let republisher = Republisher::new(name, plan.heartbeat_ms, Box::new(outlet));
        let view = Arc::new(WorkerView::new(Arc::new(TrustCell::new(Trust::default()))));
        let fleet = Arc::new(Fleet::new(FleetTable::default()));
        let ingest = ingest::spawn_republishing(shard_plan(plan, &view)?, plan.ingest.clone(), fleet, republisher)?;
        if let Some(refused) = ingest.refused().first() {
            return Err(Error::new(
                Kind::Config,
                format!("the engine's events: {}", refused.error),
                "correct its endpoint",
            ));
        }
        let (ingest, ends) = (Arc::new(ingest), Arc::new(AtomicBool::new(false)));
        let mut sending =
            Sending { server: publishing, outbound, counters: Arc::clone(&counters), ends: Arc::clone(&ends) };
        let snapshots = || SnapshotTaker::new((plan.worker, name), Arc::clone(&ingest), Arc::clone(&counters));
        let shared = (Arc::clone(&counters), Arc::clone(&ends));
        #[cfg(feature = "nats")]
        let forwarding = match (nats_loop, plan.ingest.brokers.access()) {
            (Some(nats_loop), Some(access)) => {
                let (to, from) = ((&**access, plan.nats.clone()), (snapshots(), Arc::clone(&kept)));
                let forward = Forward::new(generation, plan.buffer_batches_max as u64);
                Some(Forwarding::open(nats_loop, to, (plan.worker, forward), from, shared.clone())?)
            }
            _ => None,
        };
        let mut answering = Answering::new(replaying, snapshots(), kept, shared);
        let mut relay = Self {
            endpoint,
            replay,
            sources: Sources { worker: plan.worker, view, counters, pages: Arc::default() },
            ingest,
            ends,
            threads: Vec::new(),
        };
        // Dropping the relay ends the threads that have started.
        relay.threads.push(thread(("relay-sends", ThreadKind::RelayPort), move || sending.run())?);
        relay.threads.push(thread(("relay-answers", ThreadKind::RelayPort), move || answering.run())?);
        #[cfg(feature = "nats")]
        if let Some(mut forwarding) = forwarding {
            relay.threads.push(thread(("relay-nats", ThreadKind::RelayForward), move || forwarding.run())?);
        }
        let (endpoint, replay) = (&relay.endpoint, &relay.replay);
        tracing::info!(%endpoint, %replay, engine = %plan.source.endpoint, generation, nats = ?plan.nats.len(), "the relay runs");
        Ok(relay)
    }

    /// The bound endpoint of the stream.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// The bound endpoint for replays.
    #[must_use]
    pub fn replay(&self) -> &str {
        &self.replay
    }

    /// The view of the engine's worker.
    #[must_use]
    pub fn view(&self) -> &WorkerView {
        &self.sources.view
    }

    /// The relay's counters.
    #[must_use]
    pub fn counters(&self) -> &CounterSet<RelayCounter> {
        &self.sources.counters
    }

    /// Whether its threads run. They end by themselves only after a fault, which they have logged.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.ingest.is_running() && self.threads.iter().all(|thread| !thread.is_finished())
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // Relaxed: nothing else depends on it.
        self.ends.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the relay panicked");
            }
        }
    }
}

fn shard_plan(plan: &RelayPlan, view: &Arc<WorkerView>) -> Result<ShardPlan> {
    // It is secret, so callers cannot choose prompts that collide in the tables.
    let limits = ShardLimits {
        memory_bytes_max: plan.memory_bytes_max,
        counts_copies: plan.counts_copies,
        secret: rand::rng().random(),
        ..ShardLimits::default()
    };
    // This index has no readers, so freed memory needs no grace period.
    let (mut writer, _) = index::shard(ShardId(0), limits);
    let slot = writer
        .add_worker()
        .ok_or_else(|| Error::new(Kind::Config, "the worker does not fit the index", "raise memory_bytes_max"))?;
    writer.bound_worker(slot, plan.blocks_max);
    let publisher = PublisherPlan {
        index: WorkerIndex(0),
        worker: plan.worker,
        space: SpaceId(0),
        slot,
        source: plan.source.clone(),
        scheme: Arc::new(SchemeCell::new(plan.scheme)),
        scheme_configured: plan.scheme.is_some(),
        salts_possible: plan.salts_possible,
        capacity_blocks: plan.capacity_blocks,
        view: Arc::clone(view),
        loads: None,
    };
    Ok(ShardPlan { shard: ShardId(0), writers: vec![(SpaceId(0), writer)], publishers: vec![publisher] })
}

fn bind(endpoint: &str, plan: ServerPlan) -> Result<Server> {
    let remedy = "name a free port of this machine, tcp://*:PORT, or ipc:///PATH";
    let endpoint = BoundEndpoint::parse(endpoint)
        .map_err(|fault| Error::new(Kind::Config, "cannot bind the relay", remedy).caused_by(fault))?;
    Server::bind(&endpoint, plan)
}

/// Confines the process, if the plan says so, and starts the thread that looks up host names.
fn confine(plan: &RelayPlan) -> Result<()> {
    let mut grants = Grant::resolver();
    grants.push(Grant::new(Place::Process, "/proc/self"));
    for endpoint in [&plan.endpoint, &plan.replay] {
        let path = endpoint.strip_prefix("ipc://").filter(|path| !path.starts_with('@'));
        grants.extend(path.and_then(|path| Grant::folder_of(Place::Sockets, Path::new(path))));
    }
    sandbox::start(&sandbox::Plan { mode: plan.sandbox, program: Program::Relay, grants, bind_ports: Vec::new() })?;
    prepare_lookups();
    Ok(())
}

fn thread((name, kind): (&str, ThreadKind), run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let run = move || {
        sandbox::enter(kind);
        run();
    };
    std::thread::Builder::new().name(name.into()).spawn(run).map_err(|cause| {
        Error::new(Kind::System, "cannot start a thread of the relay", "check the limit of threads").caused_by(cause)
    })
}

/// Runs a relay until SIGTERM or SIGINT.
///
/// # Errors
/// The relay could not start, or one of its threads ended by itself.
pub fn run(plan: &RelayPlan) -> Result<()> {
    let system = |cause| Error::new(Kind::System, "cannot start the relay", "see the cause").caused_by(cause);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(system)?;
    runtime.block_on(async {
        // A write beyond the limit on a file's size then fails, and does not end the relay.
        drop(signal(SignalKind::from_raw(libc::SIGXFSZ)).map_err(system)?);
        let mut terminate = signal(SignalKind::terminate()).map_err(system)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(system)?;
        let port = MetricsPort::bind(plan.metrics, &plan.metrics_hosts, &mut ListeningSockets::default())?;
        let relay = Relay::start(plan)?;
        let metrics = port.map(|port| start_metrics(port, &relay)).transpose()?;
        sandbox::enter(ThreadKind::RelayControl);
        let ended = tokio::select! {
            _ = terminate.recv() => Ok(()),
            _ = interrupt.recv() => Ok(()),
            what = watch(&relay, metrics.as_ref()) => Err(ended(what)),
        };
        report(&relay);
        metrics.map_or(Ok(()), MetricsThread::stop).and(ended)
    })
}

fn start_metrics(port: MetricsPort, relay: &Relay) -> Result<MetricsThread> {
    let sources = relay.sources.clone();
    // No watchdog looks at a relay, and nothing divides its memory.
    let counted = (Arc::clone(&sources.pages), Arc::new(ThreadMark::new("metrics", false)));
    MetricsThread::start(Some(port), counted, (u64::MAX, Gauge::default()), move |_, text| sources.render(text))
}

fn ended(what: &str) -> Error {
    let what = format!("{what} ended by itself");
    Error::new(Kind::Internal, what, "start the relay again, and report it with the log's last lines")
}

/// Watches the threads, and logs the counters at intervals. Returns the name of a thread that has ended by itself.
async fn watch(relay: &Relay, metrics: Option<&MetricsThread>) -> &'static str {
    let mut every = tokio::time::interval(Duration::from_millis(THREADS_WATCH_EVERY_MS));
    let ticks_per_report = RELAY_REPORT_EVERY_S * 1000 / THREADS_WATCH_EVERY_MS;
    let (mut ticks, mut refusals) = (0_u64, RefusalLog::default());
    loop {
        if !relay.is_running() {
            return "a thread of the relay";
        }
        if metrics.is_some_and(|metrics| !metrics.is_running()) {
            return "the metrics page";
        }
        every.tick().await;
        refusals.note();
        ticks += 1;
        if ticks.is_multiple_of(ticks_per_report) {
            report(relay);
        }
    }
}

fn report(relay: &Relay) {
    let count = |counter: &RelayCounter| (counter.name(), relay.counters().get(*counter));
    let counted: Vec<_> = RelayCounter::ALL.iter().map(count).filter(|(_, times)| *times > 0).collect();
    let (trust, blocks) = (relay.view().trust.load(), relay.view().gauges.bound());
    tracing::info!(?counted, blocks, level = ?trust.level, reasons = ?trust.reasons, "relay");
}

/// The sources of a relay's metrics.
#[derive(Clone, Debug)]
struct Sources {
    worker: Worker,
    view: Arc<WorkerView>,
    counters: Arc<CounterSet<RelayCounter>>,
    pages: Arc<CounterSet<PageCounter>>,
}

impl Sources {
    /// Writes the metrics as Prometheus text.
    fn render(&self, text: &mut String) -> fmt::Result {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self.clone()));
        prometheus_client::encoding::text::encode(text, &registry)
    }
}

impl Collector for Sources {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        exposition::counters_of(&mut encoder, &self.counters)?;
        exposition::counters_of(&mut encoder, &self.pages)?;
        exposition::encode(&mut encoder, &WorkerFamilies::default(), &[(self.worker, &self.view)])?;
        exposition::sandbox(&mut encoder)
    }
}
