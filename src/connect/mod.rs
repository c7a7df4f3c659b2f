//! `kvrouted connect` gives the clients of one host the daemon of another host. It listens on a local Unix socket as a
//! daemon does, and carries each connection to the daemon's remote port, over TLS and with this host's token.
//!
//! ```text
//! client ─ frames ─▶ Unix socket ─▶ open: name, TCP, TLS, token ─▶ carried ═▶ remote port of the daemon
//! ```
//!
//! It reads no frame. Clients therefore behave as beside a daemon: they have their own deadlines, and decide alone while
//! none answers. While the daemon cannot be reached, a connection is closed at once, after one error frame that says why.
//! Each connection is opened anew, so that nothing has to be resumed. Token and authorities are read again on SIGHUP.

mod open;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use tokio::net::UnixStream;
use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{JoinHandle, JoinSet};

use crate::budget::Gauge;
use crate::config::AccessConfig;
use crate::error::{Error, Kind, Result};
use crate::ingest::descriptors;
use crate::ingest::exposition;
use crate::limits::{
    ACCEPT_PAUSE_MS, CONNECT_CONNECTIONS_MAX, CONNECT_LOOKUPS_MAX, CONNECT_REPORT_EVERY_S,
    DESCRIPTORS_PER_REMOTE_CONNECTION, DISCOVERY_READ_MS_MAX, REMOTE_OPEN_MS_MAX, THREADS_WATCH_EVERY_MS,
};
use crate::log_quota::LogQuota;
use crate::metrics::{ConnectCounter, CounterName as _, CounterSet, PageCounter};
use crate::remote::carry::{TimeLimits, carry};
use crate::sandbox::{self, Grant, Place, Program, RefusalLog, ThreadKind};
use crate::serve::{Admission, BoundSocket, ListeningSockets, MetricsPort, MetricsThread, turn_away};
use crate::watchdog::ThreadMark;
use crate::wire::ReplyEncoder;
use open::{Credentials, Failed};

pub use open::Target;

/// Descriptors of the process itself: the log, files, the runtime, the metrics page.
const OWN_DESCRIPTORS: u64 = 128;

/// The configuration of the command.
#[derive(Clone, Debug, PartialEq)]
pub struct ConnectPlan {
    /// The daemon's remote port.
    pub target: Target,
    /// The name that the daemon's certificate has to have.
    pub server_name: String,
    /// The file with this host's token.
    pub token_file: PathBuf,
    /// The certificates of the authorities that are trusted, PEM.
    pub ca_file: PathBuf,
    /// The Unix socket for local clients.
    pub socket: PathBuf,
    /// Its permission bits.
    pub socket_mode: u32,
    /// Users and groups who may use it, if restricted further.
    pub access: AccessConfig,
    /// What the process gives up once it has started.
    pub sandbox: sandbox::Mode,
    /// The address and port of the metrics page; `None` = no page.
    pub metrics: Option<SocketAddr>,
}

/// Serves local clients until SIGTERM or SIGINT.
///
/// # Errors
/// Why it could not start. No socket is left bound then.
pub fn run(plan: &ConnectPlan) -> Result<()> {
    let system = |cause| Error::new(Kind::System, "cannot start", "see the cause").caused_by(cause);
    let limit = descriptors::raise();
    let mut builder = Builder::new_current_thread();
    let runtime = builder.max_blocking_threads(CONNECT_LOOKUPS_MAX + 2).enable_all().build().map_err(system)?;
    let ended = runtime.block_on(async {
        // A write beyond the limit on a file's size then fails, and does not end the process.
        drop(signal(SignalKind::from_raw(libc::SIGXFSZ)).map_err(system)?);
        let listen = |kind| signal(kind).map_err(system);
        let signals = Signals {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        };
        let caller = Arc::new(Caller::new(plan, limit)?);
        let port = MetricsPort::bind(plan.metrics, &[], &mut ListeningSockets::default())?;
        let socket = BoundSocket::bind(&plan.socket, plan.socket_mode)?;
        confine(plan)?;
        let metrics = port.map(|port| start_metrics(port, &caller)).transpose()?;
        sandbox::enter(ThreadKind::Connect);
        tracing::info!(socket = %plan.socket.display(), to = %plan.target, server_name = plan.server_name, "connecting");
        let ended = serve(&caller, &socket, signals, metrics.as_ref()).await;
        caller.report();
        metrics.map_or(Ok(()), MetricsThread::stop).and(ended)
    });
    // A lookup may never return.
    runtime.shutdown_background();
    ended
}

/// The signals that the process handles: two end it, one has it read token and authorities again.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

/// Confines the process, if the plan says so.
fn confine(plan: &ConnectPlan) -> Result<()> {
    let mut grants = Grant::resolver();
    for file in [&plan.token_file, &plan.ca_file] {
        grants.extend(Grant::replaceable(Place::Keys, file));
    }
    grants.extend(Grant::folder_of(Place::Sockets, &plan.socket));
    sandbox::start(&sandbox::Plan { mode: plan.sandbox, program: Program::Connect, grants, bind_ports: Vec::new() })
}

fn start_metrics(port: MetricsPort, caller: &Arc<Caller>) -> Result<MetricsThread> {
    let sources = Sources { caller: Arc::clone(caller), pages: Arc::default() };
    // No watchdog looks at the thread, and nothing divides its memory.
    let counted = (Arc::clone(&sources.pages), Arc::new(ThreadMark::new("metrics", false)));
    MetricsThread::start(Some(port), counted, (u64::MAX, Gauge::default()), move |_, text| sources.render(text))
}

/// Accepts local clients until a signal ends the process. Connections that are open then are cut.
async fn serve(
    caller: &Arc<Caller>,
    socket: &BoundSocket,
    signals: Signals,
    metrics: Option<&MetricsThread>,
) -> Result<()> {
    let listener = socket.listen_async()?;
    let Signals { mut terminate, mut interrupt, hangup } = signals;
    // Beside all else: a file system that does not respond holds up neither clients nor the end.
    let mut reloads = pin!(caller.reload_at(hangup));
    let mut carried = JoinSet::new();
    let mut watch = tokio::time::interval(Duration::from_millis(THREADS_WATCH_EVERY_MS));
    let mut report = tokio::time::interval(Duration::from_secs(CONNECT_REPORT_EVERY_S));
    let mut refusals = RefusalLog::default();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    if let Some((stream, place)) = caller.admit(stream) {
                        carried.spawn(Arc::clone(caller).carry(stream, place));
                    }
                }
                Err(error) => {
                    caller.log(|withheld| tracing::error!(%error, withheld, "cannot accept connections; they wait"));
                    tokio::time::sleep(Duration::from_millis(ACCEPT_PAUSE_MS)).await;
                }
            },
            Some(ended) = carried.join_next(), if !carried.is_empty() => caller.note_end(ended),
            () = &mut reloads => {}
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
            _ = report.tick() => caller.report(),
            _ = watch.tick() => {
                refusals.note();
                if metrics.is_some_and(|metrics| !metrics.is_running()) {
                    let what = "the metrics page ended by itself";
                    return Err(Error::new(Kind::Internal, what, "report it with the log's last lines"));
                }
            }
        }
    }
}

/// What all connections share.
struct Caller {
    plan: ConnectPlan,
    admission: Admission,
    credentials: ArcSwap<Credentials>,
    /// Connections that may still be admitted.
    places: Arc<Semaphore>,
    connections_max: usize,
    /// Lookups of the host's name that may still start.
    lookups: Arc<Semaphore>,
    counters: CounterSet<ConnectCounter>,
    log_quota: Mutex<LogQuota>,
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller").field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl Caller {
    fn new(plan: &ConnectPlan, open_files: u64) -> Result<Self> {
        let fit = open_files.saturating_sub(OWN_DESCRIPTORS) / DESCRIPTORS_PER_REMOTE_CONNECTION;
        let connections_max = CONNECT_CONNECTIONS_MAX.min(usize::try_from(fit).unwrap_or(usize::MAX));
        if connections_max < CONNECT_CONNECTIONS_MAX {
            tracing::warn!(open_files, connections_max, "too few open files for {CONNECT_CONNECTIONS_MAX} connections");
        }
        Ok(Self {
            admission: Admission::resolve_flags(&plan.access)?,
            credentials: ArcSwap::from_pointee(Credentials::read(&plan.token_file, &plan.ca_file, &plan.server_name)?),
            places: Arc::new(Semaphore::new(connections_max)),
            connections_max,
            lookups: Arc::new(Semaphore::new(CONNECT_LOOKUPS_MAX)),
            counters: CounterSet::default(),
            log_quota: Mutex::default(),
            plan: plan.clone(),
        })
    }

    /// A local client that may connect, with its place. Any other gets the reason.
    fn admit(&self, stream: UnixStream) -> Option<(UnixStream, OwnedSemaphorePermit)> {
        let admitted = match stream.peer_cred() {
            Ok(credentials) => self.admission.admit(&stream, &credentials),
            Err(error) => Err(Error::new(Kind::System, "the kernel does not report the peer's user", "see the cause")
                .caused_by(error)),
        };
        let place = match admitted {
            Ok(()) => self.places.clone().try_acquire_owned().map_err(|_| {
                let remedy = "share connections: one connection takes any number of requests in flight";
                (ConnectCounter::RefusedFull, Error::new(Kind::Overloaded, "too many connections are open", remedy))
            }),
            Err(error) => Err((ConnectCounter::RefusedUser, error)),
        };
        match place {
            Ok(place) => Some((stream, place)),
            Err((counter, error)) => {
                self.counters.bump(counter);
                self.log(|withheld| tracing::warn!(%error, withheld, "a connection is refused"));
                turn_away(&stream, &error, &mut ReplyEncoder::default());
                None
            }
        }
    }

    /// Opens the way to the daemon for a local client, and carries its connection.
    async fn carry(self: Arc<Self>, stream: UnixStream, place: OwnedSemaphorePermit) {
        let _place = place;
        let time = Duration::from_millis(REMOTE_OPEN_MS_MAX);
        let opened = tokio::time::timeout(time, open::open(&self)).await;
        match opened.unwrap_or_else(|_| Err(Failed::slow(&self.plan.target))) {
            Ok(tls) => {
                self.counters.bump(ConnectCounter::Connections);
                if let Err(error) = carry(stream, tls, TimeLimits::default()).await {
                    self.counters.bump(ConnectCounter::Broken);
                    self.log(|withheld| tracing::warn!(%error, withheld, "a carried connection broke"));
                }
            }
            Err(Failed { counter, error }) => {
                self.counters.bump(counter);
                self.log(|withheld| tracing::warn!(%error, withheld, "a local client is turned away"));
                turn_away(&stream, &error, &mut ReplyEncoder::default());
            }
        }
    }

    fn note_end(&self, ended: Result<(), tokio::task::JoinError>) {
        if let Err(error) = ended {
            self.counters.bump(ConnectCounter::Broken);
            tracing::error!(%error, "carrying a connection panicked; it is closed, the others go on");
        }
    }

    /// Reads token and authorities again at each SIGHUP, for ever.
    async fn reload_at(&self, mut hangup: Signal) {
        let mut late = None;
        while let Some(()) = hangup.recv().await {
            self.reload(&mut late).await;
        }
        std::future::pending().await
    }

    /// Reads token and authorities again, on another thread: their file system may not respond. `late` is a reading that
    /// has taken too long.
    async fn reload(&self, late: &mut Option<JoinHandle<Result<Credentials>>>) {
        let is_late = late.as_ref().is_some_and(|reading| !reading.is_finished());
        let problem =
            if is_late { Some("an earlier reading has not returned".to_owned()) } else { self.read_again(late).await };
        match problem {
            None => {
                self.counters.bump(ConnectCounter::Reloads);
                tracing::info!("token and authorities are read again; open connections stay");
            }
            Some(problem) => {
                self.counters.bump(ConnectCounter::ReloadsFailed);
                tracing::error!(problem, "token and authorities stay as they were read before");
            }
        }
    }

    /// The problem, if there is one.
    async fn read_again(&self, late: &mut Option<JoinHandle<Result<Credentials>>>) -> Option<String> {
        let ConnectPlan { token_file, ca_file, server_name, .. } = self.plan.clone();
        let mut reading = tokio::task::spawn_blocking(move || {
            sandbox::count_as(ThreadKind::Connect);
            Credentials::read(&token_file, &ca_file, &server_name)
        });
        match tokio::time::timeout(Duration::from_millis(DISCOVERY_READ_MS_MAX), &mut reading).await {
            Ok(Ok(Ok(credentials))) => {
                self.credentials.store(Arc::new(credentials));
                None
            }
            Ok(Ok(Err(error))) => Some(error.to_string()),
            Ok(Err(error)) => Some(format!("reading panicked: {error}")),
            Err(_) => {
                *late = Some(reading);
                Some("reading takes too long; check whether the file system responds".to_owned())
            }
        }
    }

    fn open_now(&self) -> usize {
        self.connections_max - self.places.available_permits()
    }

    fn report(&self) {
        let count = |counter: &ConnectCounter| (counter.name(), self.counters.get(*counter));
        let counted: Vec<_> = ConnectCounter::ALL.iter().map(count).filter(|(_, times)| *times > 0).collect();
        tracing::info!(?counted, open = self.open_now(), "connect");
    }

    fn log(&self, line: impl FnOnce(u64)) {
        let granted = self.log_quota.lock().take(Instant::now());
        if let Some(withheld) = granted {
            line(withheld);
        }
    }
}

/// The sources of the metrics.
#[derive(Clone, Debug)]
struct Sources {
    caller: Arc<Caller>,
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
        exposition::counters_of(&mut encoder, &self.caller.counters)?;
        exposition::counters_of(&mut encoder, &self.pages)?;
        let (name, help) = ("kvrouted_connect_connections_open", "Connections of local clients that are open.");
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        metric.encode_gauge(&(self.caller.open_now() as i64))?;
        exposition::sandbox(&mut encoder)
    }
}
