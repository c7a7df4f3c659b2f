//! The load that engines publish on separate sockets: gauges, of which only the newest reading counts.
//!
//! One thread reads them for all engines ([`LoadListener`]), apart from the shards: a reading that is late or lost
//! costs one second of freshness, and no cache event must wait for it. Readings go the same way as a gateway's report
//! ([`Loads::report_load`]).
//!
//! The event loop is one `epoll` over the sockets of all engines that publish their load. Descriptors are
//! edge-triggered: after a wake the thread reads a socket until it is empty, and uses only the newest reading.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use mio::{Events, Poll, Registry, Token, Waker};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::connection::Brokers;
use super::publisher_socket::{Received, Subscription};
use super::system;
use crate::endpoint::Endpoint;
use crate::error::{Error, Kind, Result};
use crate::event::msgpack::{LoadStat, decode_load_stat};
use crate::fleet::{EventSource, SchemeCell};
use crate::ids::{Scheme, Worker, WorkerIndex};
use crate::limits::{LOAD_REPORT_MESSAGES_MAX, LOAD_REPORT_SILENT_MS, LOAD_REPORT_TICK_MS, NOMINAL_BLOCK_SIZE_TOKENS};
use crate::load::{EngineLoad, Loads};
use crate::metrics::{CounterSet, LoadReportCounter};
use crate::sandbox::{self, ThreadKind};
use crate::watchdog::{Activity, ThreadMark};
use crate::zmtp::LinkEvent;

/// A worker that publishes its load.
#[derive(Clone, Debug)]
pub(crate) struct LoadSource {
    /// Its index in the fleet's table.
    pub(crate) index: WorkerIndex,
    /// The worker.
    pub(crate) worker: Worker,
    /// ZeroMQ endpoint of its PUB socket, as the daemon connects to it.
    pub(crate) endpoint: Endpoint,
    /// Its space's scheme, which converts tokens to blocks.
    pub(crate) scheme: Arc<SchemeCell>,
}

/// What the handle asks of the thread: only the newest list of sources counts.
#[derive(Debug)]
struct Wanted {
    sources: Mutex<Option<Vec<LoadSource>>>,
    ending: AtomicBool,
    waker: Waker,
}

/// The running thread. Dropping the handle ends the thread too.
#[derive(Debug)]
pub(crate) struct LoadListener {
    wanted: Arc<Wanted>,
    thread: Option<JoinHandle<()>>,
}

impl LoadListener {
    /// Starts the thread without a source. `now_ns` is the clock of bookings.
    ///
    /// # Errors
    /// [`Kind::System`] if the thread or its event loop cannot be made.
    pub(crate) fn start(
        loads: Arc<Loads>,
        (counters, mark): (Arc<CounterSet<LoadReportCounter>>, Arc<ThreadMark>),
        now_ns: impl Fn() -> u64 + Send + 'static,
    ) -> Result<Self> {
        let (listening, waker) = Listening::new(loads, counters, now_ns)
            .map_err(|error| system("cannot make an event loop").caused_by(error))?;
        let wanted = Arc::new(Wanted { sources: Mutex::new(None), ending: AtomicBool::new(false), waker });
        let of_thread = Arc::clone(&wanted);
        let thread = std::thread::Builder::new()
            .name("engine-loads".into())
            .spawn(move || {
                sandbox::enter(ThreadKind::Loads);
                listening.run(&of_thread, &mark);
            })
            .map_err(|error| system("cannot start the thread that reads the engines' loads").caused_by(error))?;
        Ok(Self { wanted, thread: Some(thread) })
    }

    /// Listens to these sources only. Connections to sources that are named again stay open.
    ///
    /// # Errors
    /// [`Kind::System`] if the thread cannot be woken.
    pub(crate) fn follow(&self, sources: Vec<LoadSource>) -> Result<()> {
        *self.wanted.sources.lock() = Some(sources);
        self.wanted
            .waker
            .wake()
            .map_err(|error| system("cannot wake the thread of the engines' loads").caused_by(error))
    }

    /// Whether the thread runs. It ends by itself only after a fault, which it has logged.
    #[must_use]
    pub(crate) fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Ends the thread and waits for it.
    ///
    /// # Errors
    /// [`Kind::Internal`] if the thread had panicked.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        // Release: pairs with the Acquire of the thread's loop.
        self.wanted.ending.store(true, Ordering::Release);
        self.wanted
            .waker
            .wake()
            .map_err(|error| system("cannot wake the thread of the engines' loads").caused_by(error))?;
        let panicked = |_| {
            Error::new(Kind::Internal, "the thread that reads the engines' loads panicked", "report it with the log")
        };
        thread.join().map_err(panicked)
    }
}

impl Drop for LoadListener {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "the thread that reads the engines' loads did not end cleanly");
        }
    }
}

const WAKER: Token = Token(usize::MAX);
const POLL_EVENTS: usize = 256;

/// Everything that the thread owns.
struct Listening<N> {
    poll: Poll,
    loads: Arc<Loads>,
    counters: Arc<CounterSet<LoadReportCounter>>,
    now_ns: N,
    started: Instant,
    /// The registry of `poll`, for connections that open and close their sockets by themselves.
    registry: Arc<Registry>,
    /// By token. A place is used again once its source has been dropped.
    open_sources: Vec<Option<OpenSource>>,
    /// Sources whose sockets have more messages than one quantum may take: the event loop does not signal those again.
    unread: Vec<usize>,
}

/// A source that the thread listens to.
struct OpenSource {
    source: LoadSource,
    subscription: Subscription,
    liveness: Liveness,
    /// Its last reading could not be decoded, which is logged.
    undecodable_logged: bool,
}

impl<N: Fn() -> u64> Listening<N> {
    fn new(loads: Arc<Loads>, counters: Arc<CounterSet<LoadReportCounter>>, now_ns: N) -> io::Result<(Self, Waker)> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let (started, registry) = (Instant::now(), Arc::new(poll.registry().try_clone()?));
        Ok((
            Self { poll, loads, counters, now_ns, started, registry, open_sources: Vec::new(), unread: Vec::new() },
            waker,
        ))
    }

    /// Runs until `wanted.ending`, or until the event loop itself fails.
    fn run(mut self, wanted: &Wanted, mark: &ThreadMark) {
        let mut events = Events::with_capacity(POLL_EVENTS);
        // Acquire: pairs with the Release in `LoadListener::end`.
        while !wanted.ending.load(Ordering::Acquire) {
            mark.wait();
            match self.poll.poll(&mut events, self.poll_timeout()) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    tracing::error!(%error, "the event loop failed; the engines' published loads are no longer read");
                    return;
                }
            }
            mark.begin_round(Activity::ReadingLoads);
            self.read_ready(events.iter().map(|event| event.token()));
            let sources = wanted.sources.lock().take();
            if let Some(sources) = sources {
                self.follow(&sources);
            }
            self.tick();
        }
        mark.wait();
    }

    /// Reads the sockets that have more, and those that were signalled: each once.
    fn read_ready(&mut self, signalled: impl Iterator<Item = Token>) {
        let mut places = std::mem::take(&mut self.unread);
        places.extend(signalled.filter(|token| *token != WAKER).map(|token| token.0));
        places.sort_unstable();
        places.dedup();
        places.into_iter().for_each(|at| self.read(at));
    }

    /// How long the poll may wait; `None` = for ever.
    fn poll_timeout(&self) -> Option<Duration> {
        match (self.unread.is_empty(), self.open_sources.iter().any(Option::is_some)) {
            (false, _) => Some(Duration::ZERO),
            (true, true) => Some(Duration::from_millis(LOAD_REPORT_TICK_MS)),
            (true, false) => None,
        }
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Closes sources that are no longer wanted, and opens those that are missing.
    fn follow(&mut self, sources: &[LoadSource]) {
        let mut missing: FxHashMap<WorkerIndex, &LoadSource> =
            sources.iter().map(|source| (source.index, source)).collect();
        for at in 0..self.open_sources.len() {
            let Some(open) = &self.open_sources[at] else { continue };
            let index = open.source.index;
            if missing.get(&index).is_some_and(|source| source.endpoint == open.source.endpoint) {
                missing.remove(&index);
            } else {
                self.close(at);
            }
        }
        missing.into_values().for_each(|source| self.open(source));
    }

    fn open(&mut self, source: &LoadSource) {
        let free = self.open_sources.iter().position(Option::is_none);
        let at = free.unwrap_or_else(|| {
            self.open_sources.push(None);
            self.open_sources.len() - 1
        });
        // Only loads come over such a socket, whatever topic an engine gives them.
        let from =
            EventSource { endpoint: source.endpoint.clone(), replay: None, topic: String::new(), snapshots: None };
        let of = ((&Brokers::default(), source.worker), LOAD_REPORT_MESSAGES_MAX);
        match Subscription::open(&from, of, (&self.registry, Token(at)), self.now_ms()) {
            Ok(subscription) => {
                let (source, liveness) = (source.clone(), Liveness::Waiting { since_ms: self.now_ms() });
                let open = OpenSource { source, subscription, liveness, undecodable_logged: false };
                self.open_sources[at] = Some(open);
                self.read(at);
            }
            Err(error) => {
                self.counters.bump(LoadReportCounter::SourcesRefused);
                let (worker, endpoint) = (source.worker, source.endpoint.as_str());
                tracing::error!(%worker, endpoint, %error, "the worker's published load cannot be received");
            }
        }
    }

    fn close(&mut self, at: usize) {
        self.open_sources[at] = None;
    }

    /// Reads a socket, up to one quantum, and reports the newest reading.
    fn read(&mut self, at: usize) {
        let now_ms = self.now_ms();
        let Some(open) = self.open_sources.get_mut(at).and_then(Option::as_mut) else { return };
        let (newest, drained) = open.newest(&self.counters, now_ms);
        let worker = open.source.worker;
        if !drained {
            self.unread.push(at);
        }
        let Some(payload) = newest else { return };
        match decode_load_stat(&payload) {
            Ok(stat) => {
                open.undecodable_logged = false;
                if open.liveness.note_reading(now_ms) {
                    tracing::info!(%worker, "the worker publishes its load again");
                }
                let load = engine_load(&stat, open.source.scheme.get());
                let known = self.loads.report_load(open.source.index, load, (self.now_ns)());
                self.counters.bump(match known {
                    true => LoadReportCounter::Reports,
                    false => LoadReportCounter::ReportsUnknownWorker,
                });
            }
            Err(error) => {
                self.counters.bump(LoadReportCounter::ReportsUndecodable);
                if !std::mem::replace(&mut open.undecodable_logged, true) {
                    let endpoint = open.source.endpoint.as_str();
                    tracing::warn!(%worker, endpoint, %error, "the worker's published load cannot be decoded");
                }
            }
        }
    }

    fn tick(&mut self) {
        let now_ms = self.now_ms();
        for (at, open) in self.open_sources.iter_mut().enumerate() {
            let Some(open) = open else { continue };
            if open.subscription.tick(now_ms) && !self.unread.contains(&at) {
                self.unread.push(at);
            }
            if open.liveness.tick(now_ms) {
                self.counters.bump(LoadReportCounter::SourcesSilent);
                let (worker, endpoint) = (open.source.worker, open.source.endpoint.as_str());
                tracing::warn!(%worker, endpoint, "the worker has stopped publishing its load; only its bookings count");
            }
        }
    }
}

impl OpenSource {
    /// Takes one quantum of messages. Returns the payload of the newest, if there is one, and whether the socket is
    /// drained.
    fn newest(&mut self, counters: &CounterSet<LoadReportCounter>, now_ms: u64) -> (Option<Bytes>, bool) {
        let (mut newest, mut drained, mut taken) = (None, false, 0);
        while !drained && taken < LOAD_REPORT_MESSAGES_MAX {
            // An event of the connection counts as a message, so it ends the quantum too.
            taken += 1;
            self.link_events(counters);
            drained = self.subscription.fetch(now_ms);
            while let Some(received) = self.subscription.take() {
                taken += 1;
                match received {
                    Received::Batch(_, payload) | Received::BatchOf(_, _, payload) => {
                        if newest.replace(payload).is_some() {
                            counters.bump(LoadReportCounter::ReportsOvertaken);
                        }
                    }
                    Received::Misframed(_) => counters.bump(LoadReportCounter::ReportsMisframed),
                }
            }
        }
        (newest, drained)
    }

    fn link_events(&mut self, counters: &CounterSet<LoadReportCounter>) {
        while let Some(event) = self.subscription.link_event() {
            let (worker, endpoint) = (self.source.worker, &self.source.endpoint);
            if let LinkEvent::Refused(refusal) = event {
                counters.bump(LoadReportCounter::ConnectionsCut);
                if counters.get(LoadReportCounter::ConnectionsCut).is_power_of_two() {
                    tracing::warn!(%worker, %endpoint, %refusal, "the daemon cut the connection of the worker's published load");
                }
            } else {
                tracing::debug!(%worker, %endpoint, ?event, "connection event of the worker's published load");
            }
        }
    }
}

/// Converts a reading. Without a scheme a block has the nominal size, which decisions assume too.
fn engine_load(stat: &LoadStat, scheme: Option<Scheme>) -> EngineLoad {
    let block_size = scheme.map_or(NOMINAL_BLOCK_SIZE_TOKENS, |scheme| scheme.block_size);
    let millionths = u128::from(stat.used_tokens) * 1_000_000;
    // An engine that does not know its capacity says 0.
    let usage = millionths.checked_div(u128::from(stat.capacity_tokens)).unwrap_or(0);
    EngineLoad {
        prefill_tokens: stat.waiting_uncached_tokens,
        decode_blocks: stat.used_tokens.div_ceil(u64::from(block_size.max(1))),
        running: stat.running,
        waiting: stat.waiting,
        kv_usage_millionths: u32::try_from(usage).unwrap_or(u32::MAX),
    }
}

/// Whether an engine publishes its load. It does so at least once a second, also while it is idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Liveness {
    /// No reading yet since this time, milliseconds.
    Waiting { since_ms: u64 },
    /// The last reading came at this time, milliseconds.
    Alive { at_ms: u64 },
    /// No reading for [`LOAD_REPORT_SILENT_MS`], which is logged once.
    Silent,
}

impl Liveness {
    /// Notes a reading; `true` = the engine was silent before.
    fn note_reading(&mut self, now_ms: u64) -> bool {
        std::mem::replace(self, Self::Alive { at_ms: now_ms }) == Self::Silent
    }

    /// Checks the deadline; `true` = the engine is silent from now on.
    fn tick(&mut self, now_ms: u64) -> bool {
        let (Self::Waiting { since_ms: last_ms } | Self::Alive { at_ms: last_ms }) = *self else { return false };
        let silent = now_ms.saturating_sub(last_ms) >= LOAD_REPORT_SILENT_MS;
        if silent {
            *self = Self::Silent;
        }
        silent
    }
}

#[cfg(test)]
mod tests;
