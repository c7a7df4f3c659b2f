//! The HTTP port. It answers clients of Dynamo 1.6.1's standalone indexer and selection service, with the JSON and the
//! statuses that they expect, and clients that watch the daemon: `/metrics`, `/health`, `/ready`.
//!
//! ```text
//! TcpListener ─ hyper ─▶ axum ─▶ Bodies (JSON in bounds) ─▶ handlers ─┬─▶ Gateway ─▶ RequestHandler
//!                                                                     └─▶ HttpBackend (workers, dumps, metrics)
//! ```
//!
//! It has a thread and a runtime of its own, so that no serving thread waits for it. To the module
//! [`requests`](crate::requests) it is one more gateway, with the same queue, bookings and counters as a gateway on the
//! socket. All its bookings belong to one session, which ends with the daemon. A client that disconnects does not end
//! its bookings, as with Dynamo's service.

pub(super) mod browser_guard;
pub(super) mod connections;
mod dump;
mod gateway;
mod indexer;
mod memory;
pub(super) mod port_thread;
mod prompt;
mod queries;
mod reader_time;
mod registry;
mod reply;
mod request_body;
mod selection;
mod workers;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::Guard;
use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{delete, get, patch, post};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, oneshot, watch};

use crate::config::{HostRule, HttpConfig, SpaceConfig};
use crate::error::{Error, Kind, Result};
use crate::fleet::{FleetTable, WorkerRecord};
use crate::ids::{Scheme, SpaceId};
use crate::index::StoreBlocks;
use crate::limits::{HTTP_CONNECTIONS_MAX, HTTP_CONNECTIONS_RESERVED, HTTP_DUMPS_MAX};
use crate::metrics::{CoreCounter, CounterSet, HttpCounter};
use crate::requests::RoutingService;
use crate::sandbox::ThreadKind;
use crate::serve::{ListeningSockets, MetricsPages, Turns};
use crate::watchdog::{Activity, ThreadMark};
use connections::{ConnectionLimits, TimeLimits};
use gateway::Gateway;
pub(crate) use memory::HttpMemory;
pub(crate) use port_thread::PortThread;
use prompt::PromptFields;
use registry::{Registry, scheme_of, space_to_select};
use reply::{Refusal, Replies};
use request_body::Bodies;
use selection::{Forgotten, Selections};
pub(crate) use workers::WorkerChangeOrder;

/// The port's name in errors.
const PORT: &str = "HTTP port";

/// A bound port that does not serve yet.
#[derive(Debug)]
pub(crate) struct HttpPort {
    listener: std::net::TcpListener,
    turns: Turns,
    config: HttpConfig,
}

/// The counters of an HTTP port.
#[derive(Clone, Debug, Default)]
pub(crate) struct HttpMetrics {
    /// HTTP requests and connections.
    pub(crate) http: Arc<CounterSet<HttpCounter>>,
    /// The requests made from them, as every serving thread counts its own.
    pub(crate) core: Arc<CounterSet<CoreCounter>>,
}

impl HttpPort {
    /// Binds the configured port; `None` = no port is configured.
    ///
    /// # Errors
    /// [`Kind::System`] if it is in use or the daemon may not bind it.
    pub(crate) fn bind(config: &HttpConfig, sockets: &mut ListeningSockets) -> Result<Option<Self>> {
        if config.port == 0 {
            return Ok(None);
        }
        let address = SocketAddr::from((config.listen, config.port));
        let listener = sockets.tcp(address, PORT, "choose another http.port or http.listen")?;
        if !config.listen.is_loopback() {
            tracing::warn!(%address, administer = config.administer, "the HTTP port can be reached from other machines, and asks for no credentials");
        }
        Ok(Some(Self { listener, turns: sockets.turns().clone(), config: config.clone() }))
    }

    /// Serves the port by a thread of its own, as number `core` of the threads that decide. Returns once it serves.
    ///
    /// # Errors
    /// [`Kind::System`] if the thread or its runtime cannot be started; the error of `service` if it opens no session.
    pub(crate) fn start(
        self,
        service: RoutingService,
        core: usize,
        (metrics, mark, memory): (HttpMetrics, Arc<ThreadMark>, HttpMemory),
        backend: Arc<dyn HttpBackend>,
    ) -> Result<PortThread> {
        let Self { listener, turns, config } = self;
        let HttpMetrics { http, core: core_counters } = metrics;
        let of_tasks = Arc::clone(&mark);
        let thread = ("kvrouted-http", ThreadKind::HttpPort);
        PortThread::start(thread, (PORT, &turns), (mark, Activity::AnsweringHttp), move |ending| {
            let listener = port_thread::register(listener, PORT)?;
            let gateway = Gateway::open(service, core, core_counters, Arc::clone(&http))?;
            let app = Arc::new(App::new((gateway, backend), Arc::clone(&http), (config, memory)));
            Ok(run(listener, app, (http, of_tasks), ending))
        })
    }
}

async fn run(
    listener: tokio::net::TcpListener,
    app: Arc<App>,
    counted: (Arc<CounterSet<HttpCounter>>, Arc<ThreadMark>),
    ending: watch::Receiver<bool>,
) {
    let limits = ConnectionLimits {
        times: TimeLimits::default(),
        connections_max: HTTP_CONNECTIONS_MAX,
        reserved: (HTTP_CONNECTIONS_RESERVED, reserve_router(Arc::clone(&app))),
    };
    let serving = connections::serve(listener, router(Arc::clone(&app)), limits, counted, ending);
    tokio::select! {
        () = serving => {}
        () = app.gateway.serve_queue() => {}
    }
    app.gateway.drain();
}

fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/register", post(indexer::register))
        .route("/unregister", post(indexer::unregister))
        .route("/query", post(indexer::query))
        .route("/query_by_hash", post(indexer::query_by_hash))
        .route("/register_peer", post(indexer::no_peers))
        .route("/deregister_peer", post(indexer::no_peers))
        .route("/peers", get(indexer::peers))
        .route("/reopen_logs", post(indexer::reopen_logs))
        .route("/replica_sync/register_peer", post(indexer::no_peers))
        .route("/replica_sync/deregister_peer", post(indexer::no_peers))
        .route("/replica_sync/peers", get(indexer::peers))
        .route("/dump", get(dump::dump))
        .route("/workers", get(workers::list).post(workers::create))
        .route("/workers/{worker_id}", patch(workers::patch).delete(workers::delete))
        .route("/select", post(selection::select))
        .route("/select_and_reserve", post(selection::select_and_reserve))
        .route("/reservations", post(selection::reserve))
        .route("/reservations/{selection_id}", delete(selection::free))
        .route("/reservations/{selection_id}/prefill_complete", post(selection::prefill_complete))
        .route("/reservations/{selection_id}/output_block", post(selection::output_block))
        .route("/loads", get(queries::loads))
        .route("/potential_loads", post(queries::potential_loads))
        .route("/overlap_scores", post(queries::overlap_scores))
        .route("/ready", get(queries::ready))
        .layer(from_fn_with_state(Arc::clone(&app), reply::bound))
        .merge(watching())
        .fallback(queries::not_found)
        .method_not_allowed_fallback(queries::method_not_allowed)
        .layer(from_fn_with_state(Arc::clone(&app), browser_guard::refuse))
        .layer(from_fn_with_state(Arc::clone(&app), count))
        .with_state(app)
}

/// The endpoints that watch the daemon, except `/ready`: its reply lists workers, and is bounded like other replies.
/// The metrics page is bounded where it is made.
fn watching() -> Router<Arc<App>> {
    Router::new().route("/health", get(queries::health)).route("/metrics", get(queries::metrics))
}

/// The router for reserved connections, while all others have requests in progress.
fn reserve_router(app: Arc<App>) -> Router {
    watching()
        .fallback(queries::crowded)
        .method_not_allowed_fallback(queries::method_not_allowed)
        .layer(from_fn_with_state(Arc::clone(&app), browser_guard::refuse))
        .layer(from_fn_with_state(Arc::clone(&app), count))
        .with_state(app)
}

/// Counts a request by its status.
async fn count(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    let status = response.status();
    app.counters.bump(HttpCounter::Requests);
    if status.is_client_error() {
        app.counters.bump(HttpCounter::Refused);
    } else if status.is_server_error() {
        app.counters.bump(HttpCounter::Failed);
    }
    response
}

/// The error of whatever a draining daemon refuses.
pub(crate) fn draining() -> Error {
    Error::new(Kind::Draining, "the daemon drains", "ask another, or this one once it has restarted")
}

/// The daemon behind an HTTP port, beside the requests of its gateway.
pub(crate) trait HttpBackend: Send + Sync + 'static {
    /// Whether the daemon drains.
    fn is_draining(&self) -> bool;

    /// Whether a thread without which requests or events stand still is stalled.
    fn is_stalled(&self) -> bool;
    /// Whether the load of other routers is still awaited.
    fn is_joining(&self) -> bool;

    /// The current fleet table.
    fn fleet(&self) -> Guard<Arc<FleetTable>>;

    /// The configured spaces, by [`SpaceId`].
    fn spaces(&self) -> &[SpaceConfig];

    /// Whether costs in a space include the prefill term.
    fn tracks_prefill(&self, space: SpaceId) -> bool;

    /// How many requests of a space wait for a worker, and the tokens of their prompts.
    fn waiting(&self, space: SpaceId) -> (usize, u64);

    /// The maker of metrics pages.
    fn metrics(&self) -> &MetricsPages;

    /// Orders changes of workers for a client, as administration does: all of them, or none. The receiver gets the result.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] if too many changes wait, [`Kind::Draining`].
    fn change(&self, client: SocketAddr, orders: Vec<WorkerChangeOrder>) -> Result<oneshot::Receiver<Result<()>>>;

    /// Gives every block of a worker to `each`, a parent before its children, until `each` returns false. Blocks the
    /// calling thread.
    ///
    /// # Errors
    /// The name of the reason why blocks are missing.
    fn dump(&self, worker: &WorkerRecord, each: &mut dyn FnMut(&StoreBlocks<'_>) -> bool) -> Result<(), &'static str>;
}

/// The state of one HTTP port.
struct App {
    pub(super) gateway: Gateway,
    pub(super) backend: Arc<dyn HttpBackend>,
    pub(super) bodies: Bodies,
    pub(super) records: Mutex<Registry>,
    pub(super) selections: Mutex<Selections>,
    /// Locked during a change of workers, so that its checks stay true until it is made.
    pub(super) changing: tokio::sync::Mutex<()>,
    pub(super) dumps: Arc<Semaphore>,
    pub(super) replies: Replies,
    pub(super) counters: Arc<CounterSet<HttpCounter>>,
    may_administer: bool,
    /// Host names that requests to the port may use.
    pub(super) hosts: Vec<String>,
    /// Hosts that registered workers may have; empty = see [`HttpConfig::worker_hosts`].
    pub(super) worker_hosts: Vec<HostRule>,
    /// The longest time for the dump of one worker.
    pub(super) dump_worker: Duration,
    started: Instant,
}

impl App {
    pub(super) fn new(
        (gateway, backend): (Gateway, Arc<dyn HttpBackend>),
        counters: Arc<CounterSet<HttpCounter>>,
        (config, memory): (HttpConfig, HttpMemory),
    ) -> Self {
        Self {
            gateway,
            backend,
            bodies: Bodies::new(config.body_bytes_max, &memory, Arc::clone(&counters)),
            records: Mutex::default(),
            selections: Mutex::new(Selections::within(&memory)),
            changing: tokio::sync::Mutex::default(),
            dumps: Arc::new(Semaphore::new(HTTP_DUMPS_MAX)),
            replies: Replies::new(&memory, Arc::clone(&counters)),
            counters,
            may_administer: config.administer,
            hosts: config.hosts,
            // The configuration was checked: every rule is valid.
            worker_hosts: config.worker_hosts.iter().filter_map(|rule| HostRule::parse(rule)).collect(),
            dump_worker: Duration::from_millis(config.dump_worker_ms_max),
            started: Instant::now(),
        }
    }

    /// Milliseconds of this port's clock.
    pub(super) fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Refuses a request that begins something while the daemon drains.
    pub(super) fn serving(&self) -> Result<()> {
        if self.backend.is_draining() {
            return Err(draining());
        }
        Ok(())
    }

    /// Refuses administration, which is changes of workers and dumps, if the port does not allow it.
    pub(super) fn administering(&self) -> Result<()> {
        if self.may_administer {
            return self.serving();
        }
        self.counters.bump(HttpCounter::AdministrationRefused);
        let remedy = "set administer = true under [http], or use `kvrouted worker` on the daemon's host";
        let message = "this HTTP port neither changes nor dumps workers: http.administer is false";
        Err(Error::new(Kind::NotPermitted, message, remedy))
    }

    /// The space of a request for a worker, and its scheme.
    pub(super) fn space_of(&self, fields: &PromptFields) -> Result<(SpaceId, Scheme), Refusal> {
        let fleet = self.backend.fleet();
        let space = space_to_select(&fleet, &fields.model_name, &fields.routing_group)?;
        Ok((space.id, scheme_of(space, self.records.lock().block_size_of(space.id))))
    }

    pub(super) fn count_forgotten(&self, forgotten: Forgotten) {
        self.counters.add(HttpCounter::SelectionsEvicted, forgotten.evicted);
        self.counters.add(HttpCounter::SelectionsExpired, forgotten.expired);
    }
}
