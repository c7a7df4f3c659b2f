//! A relay runs beside one engine: it takes the engine's events, keeps an index of its own, and says what it holds once
//! more in our own format (`schemas/kv_events.fbs`): hashed, with what it believes of itself, and with everything that
//! lets a router tell whether it has all of it.
//!
//! ```text
//! engine → ingest (as in the daemon) → republisher → outbound → PUB            → routers
//!                                                  → buffer → ROUTER, on demand → routers
//!                                    → dump → snapshot → ROUTER, on demand      → routers
//! ```
//!
//! * Every batch has the relay's generation, drawn at its start. A router that sees another one has seen a restart.
//! * A heartbeat a second says the last sequence, so that a lost tail shows at once, and silence too.
//! * Lost batches are asked for as engines are asked. What the buffer no longer has is sent as a snapshot, as of a
//!   watermark, and then the batches behind it: so a router that comes late holds all that the relay holds.
//!
//! The ingest thread makes the stream and waits for nobody. A second thread sends it to all who subscribe. A third
//! answers questions, a few at once, each as fast as whoever asked takes it. All that is kept is bounded: batches in
//! number and bytes, one snapshot, peers, what each may send and what waits for it ([`crate::zmtp`]).

mod answer;
mod answering;
mod buffer;
mod exposition;
mod outbound;
mod publication;
mod run;
mod snapshot;

pub use answer::{Answer, Message, Step};
pub use buffer::ReplayBuffer;
pub use run::run;
pub use snapshot::{Failure, Progress, TakenSnapshot};

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rand::RngExt;

use crate::endpoint::BoundEndpoint;
use crate::error::{Error, Kind, Result};
use crate::fleet::{EventSource, Fleet, FleetTable, SchemeCell, TrustCell};
use crate::ids::{DpRank, Scheme, ShardId, SpaceId, Worker, WorkerIndex};
use crate::index::{self, ShardLimits};
use crate::ingest::{self, IngestConfig, IngestHandle, Publisher, RelayName, Republisher, ShardPlan, WorkerView};
use crate::limits::{
    RELAY_ANSWER_BYTES_MAX, RELAY_ANSWER_MESSAGES_MAX, RELAY_BUFFER_BATCHES_DEFAULT, RELAY_BUFFER_BYTES_DEFAULT,
    RELAY_HEARTBEAT_MS, RELAY_REQUEST_BYTES_MAX, RELAY_REQUEST_PARTS_MAX, RELAY_SUBSCRIBER_BYTES_MAX,
    RELAY_SUBSCRIBER_MESSAGES_MAX, WORKER_BLOCKS_MAX_DEFAULT, ZMQ_COMMAND_BYTES_MAX,
};
use crate::metrics::{CounterSet, RelayCounter};
use crate::trust::Trust;
use crate::zmtp::{Bounds, Role, Server, ServerPlan};
use answering::Answering;
use exposition::Sources;
use outbound::{Outbound, Sending};
use publication::{Kept, Publication};

/// What a peer of either port may send: a subscription or a question.
const REQUESTS: Bounds = Bounds {
    message_bytes_max: RELAY_REQUEST_BYTES_MAX,
    parts_max: RELAY_REQUEST_PARTS_MAX,
    command_bytes_max: ZMQ_COMMAND_BYTES_MAX,
};
const PUBLISHING: ServerPlan = ServerPlan {
    role: Role::Publisher,
    bounds: REQUESTS,
    waiting_bytes_max: RELAY_SUBSCRIBER_BYTES_MAX,
    waiting_messages_max: RELAY_SUBSCRIBER_MESSAGES_MAX,
};
const REPLAYING: ServerPlan = ServerPlan {
    role: Role::Router,
    bounds: REQUESTS,
    waiting_bytes_max: RELAY_ANSWER_BYTES_MAX,
    waiting_messages_max: RELAY_ANSWER_MESSAGES_MAX,
};

/// What a relay is told once.
#[derive(Clone, Debug, PartialEq)]
pub struct RelayPlan {
    /// Where it publishes: a ZeroMQ endpoint to bind.
    pub endpoint: String,
    /// Where it replays.
    pub replay: String,
    /// The engine it is beside.
    pub worker: Worker,
    /// Where that publishes.
    pub source: EventSource,
    /// Its scheme, where the operator says it.
    pub scheme: Option<Scheme>,
    /// Whether its prompts may be salted.
    pub salts_possible: bool,
    /// Whether a chain that is announced again is one more copy: nobody can ask the engine for full reports.
    pub counts_copies: bool,
    /// KV blocks its device holds; 0 = not known.
    pub capacity_blocks: u64,
    /// Blocks remembered of it over all tiers.
    pub blocks_max: u64,
    /// Memory of its index, bytes; `u64::MAX` = no ceiling.
    pub memory_bytes_max: u64,
    /// Batches kept for replays.
    pub buffer_batches_max: usize,
    /// Bytes of those batches.
    pub buffer_bytes_max: usize,
    /// How long it may be silent, milliseconds.
    pub heartbeat_ms: u64,
    /// How its events are taken in.
    pub ingest: IngestConfig,
    /// Port of the loopback interface for its metrics page; 0 = none.
    pub metrics_port: u16,
    /// Names by which that page may be asked, beside IP addresses and `localhost`.
    pub metrics_hosts: Vec<String>,
}

impl RelayPlan {
    /// A relay of one engine with the defaults for everything else.
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
            buffer_batches_max: RELAY_BUFFER_BATCHES_DEFAULT,
            buffer_bytes_max: RELAY_BUFFER_BYTES_DEFAULT,
            heartbeat_ms: RELAY_HEARTBEAT_MS,
            ingest: IngestConfig::default(),
            metrics_port: 0,
            metrics_hosts: Vec::new(),
        }
    }
}

/// A running relay. Dropping it ends it.
#[derive(Debug)]
pub struct Relay {
    /// Where it publishes, as bound.
    endpoint: String,
    /// Where it replays, as bound.
    replay: String,
    sources: Sources,
    ingest: Arc<IngestHandle>,
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Relay {
    /// Binds the sockets and starts to listen to the engine.
    ///
    /// # Errors
    /// [`Kind::Config`] where an endpoint cannot be bound or the engine's cannot be used, [`Kind::System`] where there
    /// are no sockets or threads left.
    pub fn start(plan: &RelayPlan) -> Result<Self> {
        let publishing = bind(&plan.endpoint, PUBLISHING)?;
        let replaying = bind(&plan.replay, REPLAYING)?;
        let (endpoint, replay) = (publishing.endpoint().to_owned(), replaying.endpoint().to_owned());
        let counters = Arc::new(CounterSet::default());
        let kept = Arc::new(Mutex::new(Kept {
            buffer: ReplayBuffer::new(plan.buffer_batches_max, plan.buffer_bytes_max),
            dumped_after: None,
            forgotten: 0,
        }));
        // The number is the router's to give; the rank is the engine's own.
        let generation = rand::rng().random_range(1..=u64::MAX);
        let name = RelayName { generation, worker_id: None, dp_rank: Some(DpRank(plan.worker.rank.0)) };
        let outbound = Arc::new(Outbound::new(publishing.waker()));
        let outlet =
            Publication { outbound: Arc::clone(&outbound), kept: Arc::clone(&kept), counters: Arc::clone(&counters) };
        let republisher = Republisher::new(name, plan.heartbeat_ms, Box::new(outlet));
        let view = Arc::new(WorkerView::new(Arc::new(TrustCell::new(Trust::default()))));
        let fleet = Arc::new(Fleet::new(FleetTable::default()));
        let ingest = ingest::spawn_republishing(shard_plan(plan, &view)?, plan.ingest, fleet, republisher)?;
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
        let mut answering = Answering::new(
            replaying,
            (plan.worker, name),
            Arc::clone(&ingest),
            kept,
            Arc::clone(&counters),
            Arc::clone(&ends),
        );
        let mut relay = Self {
            endpoint,
            replay,
            sources: Sources { worker: plan.worker, view, counters, pages: Arc::default() },
            ingest,
            ends,
            threads: Vec::new(),
        };
        // Dropping the relay ends those that have started.
        relay.threads.push(thread("relay-sends", move || sending.run())?);
        relay.threads.push(thread("relay-answers", move || answering.run())?);
        let (endpoint, replay) = (&relay.endpoint, &relay.replay);
        tracing::info!(%endpoint, %replay, engine = %plan.source.endpoint, generation, "relay runs");
        Ok(relay)
    }

    /// Where it publishes.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Where it replays.
    #[must_use]
    pub fn replay(&self) -> &str {
        &self.replay
    }

    /// What it knows of its engine.
    #[must_use]
    pub fn view(&self) -> &WorkerView {
        &self.sources.view
    }

    /// What it counts.
    #[must_use]
    pub fn counters(&self) -> &CounterSet<RelayCounter> {
        &self.sources.counters
    }

    /// Whether its threads run; they end by themselves only by a fault, which they have logged.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.ingest.is_running() && self.threads.iter().all(|thread| !thread.is_finished())
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // Relaxed: nothing else hangs on it.
        self.ends.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the relay panicked");
            }
        }
    }
}

fn shard_plan(plan: &RelayPlan, view: &Arc<WorkerView>) -> Result<ShardPlan> {
    // Nobody outside knows it, so nobody can choose prompts that collide in the tables.
    let limits = ShardLimits {
        memory_bytes_max: plan.memory_bytes_max,
        counts_copies: plan.counts_copies,
        secret: rand::rng().random(),
        ..ShardLimits::default()
    };
    // Nobody asks this index; what it gives up needs no grace.
    let (mut writer, _) = index::shard(ShardId(0), limits);
    let slot = writer
        .add_worker()
        .ok_or_else(|| Error::new(Kind::Config, "the worker does not fit the index", "raise memory_bytes_max"))?;
    writer.bound_worker(slot, plan.blocks_max);
    let publisher = Publisher {
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

fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(run).map_err(|cause| {
        Error::new(Kind::System, "cannot start a thread of the relay", "check the limit of threads").caused_by(cause)
    })
}
