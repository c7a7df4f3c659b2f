//! What engines say of their load, on sockets of its own: gauges, of which only the newest reading counts.
//!
//! One thread for all engines that publish one ([`LoadListener`]), apart from the shards: a reading that comes late
//! or is lost costs nothing but a second, and no event of a cache must wait for it. What is read goes where a
//! gateway's report goes ([`Loads::report_load`]).
//!
//! The event loop is one `epoll` over the sockets of all engines that publish their load. Descriptors are edge-triggered:
//! after a wake the thread reads a socket until it is empty, and uses only the newest reading.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use mio::{Events, Poll, Registry, Token, Waker};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::publisher_socket::{Received, Subscription};
use super::system;
use crate::endpoint::Endpoint;
use crate::error::{Error, Kind, Result};
use crate::event::msgpack::{LoadStat, decode_load_stat};
use crate::fleet::{EventSource, SchemeCell};
use crate::ids::{Scheme, Worker, WorkerIndex};
use crate::limits::{
    LOAD_REPORT_MESSAGES_MAX, LOAD_REPORT_SILENT_MS, LOAD_REPORT_TICK_MS, NOMINAL_BLOCK_SIZE_TOKENS,
};
use crate::load::{EngineLoad, Loads};
use crate::metrics::{CounterSet, LoadReportCounter};
use crate::zmtp::LinkEvent;

/// A worker that publishes how busy it is.
#[derive(Clone, Debug)]
pub struct LoadSource {
    /// Its place in the fleet table.
    pub index: WorkerIndex,
    /// Who it is.
    pub worker: Worker,
    /// ZeroMQ endpoint of the PUB socket, as we connect to it.
    pub endpoint: Endpoint,
    /// Its space's scheme: tokens become blocks by it.
    pub scheme: Arc<SchemeCell>,
}

/// What the thread is told, newest only.
#[derive(Debug)]
struct Wanted {
    sources: Mutex<Option<Vec<LoadSource>>>,
    ending: AtomicBool,
    waker: Waker,
}

/// The running thread. Dropping it ends the thread too.
#[derive(Debug)]
pub struct LoadListener {
    wanted: Arc<Wanted>,
    thread: Option<JoinHandle<()>>,
}

impl LoadListener {
    /// Starts to resume_messages to nobody. `now_ns` is the clock of bookings.
    ///
    /// # Errors
    /// [`Kind::System`] where the thread or its event loop cannot be made.
    pub fn start(
        loads: Arc<Loads>,
        counters: Arc<CounterSet<LoadReportCounter>>,
        now_ns: impl Fn() -> u64 + Send + 'static,
    ) -> Result<Self> {
        let (listening, waker) = Listening::new(loads, counters, now_ns)
            .map_err(|error| system("cannot make an event loop").caused_by(error))?;
        let wanted = Arc::new(Wanted { sources: Mutex::new(None), ending: AtomicBool::new(false), waker });
        let told = Arc::clone(&wanted);
        let thread = std::thread::Builder::new()
            .name("engine-loads".into())
            .spawn(move || listening.run(&told))
            .map_err(|error| system("cannot start the thread of the engines' loads").caused_by(error))?;
        Ok(Self { wanted, thread: Some(thread) })
    }

    /// Listens to these and to nobody else; who was listened to before and is named again is not disturbed.
    ///
    /// # Errors
    /// [`Kind::System`] if the thread cannot be woken.
    pub fn follow(&self, sources: Vec<LoadSource>) -> Result<()> {
        *self.wanted.sources.lock() = Some(sources);
        self.wanted
            .waker
            .wake()
            .map_err(|error| system("cannot wake the thread of the engines' loads").caused_by(error))
    }

    /// Whether it runs; it ends by itself only by a fault, which it has logged.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Ends the thread and waits for it.
    ///
    /// # Errors
    /// [`Kind::Internal`] where the thread had panicked.
    pub fn stop(mut self) -> Result<()> {
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
        let panicked =
            |_| Error::new(Kind::Internal, "the thread of the engines' loads panicked", "report it with the log");
        thread.join().map_err(panicked)
    }
}

impl Drop for LoadListener {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "the thread of the engines' loads did not end cleanly");
        }
    }
}

const WAKER: Token = Token(usize::MAX);
const POLL_EVENTS: usize = 256;

/// Everything the thread owns.
pub(super) struct Listening<N> {
    poll: Poll,
    loads: Arc<Loads>,
    counters: Arc<CounterSet<LoadReportCounter>>,
    now_ns: N,
    started: Instant,
    /// Of the same event loop, for connections that come and go by themselves.
    registry: Arc<Registry>,
    /// By token; a place is used again once its engine is no longer listened to.
    heard: Vec<Option<Heard>>,
    /// Those whose sockets have more than one turn may take: nothing signals it again.
    unread: Vec<usize>,
}

/// An engine that is listened to.
struct Heard {
    source: LoadSource,
    subscription: Subscription,
    hearing: Hearing,
    /// What it sent could not be read, and that was said.
    misread: bool,
}

impl<N: Fn() -> u64> Listening<N> {
    pub(super) fn new(
        loads: Arc<Loads>,
        counters: Arc<CounterSet<LoadReportCounter>>,
        now_ns: N,
    ) -> io::Result<(Self, Waker)> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let (started, registry) = (Instant::now(), Arc::new(poll.registry().try_clone()?));
        Ok((Self { poll, loads, counters, now_ns, started, registry, heard: Vec::new(), unread: Vec::new() }, waker))
    }

    /// Runs until it is told to end, or until the event loop itself fails.
    pub(super) fn run(mut self, wanted: &Wanted) {
        let mut events = Events::with_capacity(POLL_EVENTS);
        // Acquire: pairs with the Release in `LoadListener::end`.
        while !wanted.ending.load(Ordering::Acquire) {
            match self.poll.poll(&mut events, self.rest()) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    tracing::error!(%error, "the event loop failed; what engines say of their load is no longer heard");
                    return;
                }
            }
            let unread = std::mem::take(&mut self.unread);
            let signalled = events.iter().map(|event| event.token()).filter(|token| *token != WAKER);
            unread.into_iter().chain(signalled.map(|token| token.0)).for_each(|at| self.read(at));
            let sources = wanted.sources.lock().take();
            if let Some(sources) = sources {
                self.follow(&sources);
            }
            self.tick();
        }
    }

    /// How long the poll may wait; `None` = for ever.
    fn rest(&self) -> Option<Duration> {
        match (self.unread.is_empty(), self.heard.iter().any(Option::is_some)) {
            (false, _) => Some(Duration::ZERO),
            (true, true) => Some(Duration::from_millis(LOAD_REPORT_TICK_MS)),
            (true, false) => None,
        }
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Closes who is not wanted any more, and opens who is wanted now.
    fn follow(&mut self, sources: &[LoadSource]) {
        let mut missing: FxHashMap<WorkerIndex, &LoadSource> =
            sources.iter().map(|source| (source.index, source)).collect();
        for at in 0..self.heard.len() {
            let Some(heard) = &self.heard[at] else { continue };
            let index = heard.source.index;
            if missing.get(&index).is_some_and(|source| source.endpoint == heard.source.endpoint) {
                missing.remove(&index);
            } else {
                self.close(at);
            }
        }
        missing.into_values().for_each(|source| self.open(source));
    }

    fn open(&mut self, source: &LoadSource) {
        let free = self.heard.iter().position(Option::is_none);
        let at = free.unwrap_or_else(|| {
            self.heard.push(None);
            self.heard.len() - 1
        });
        // Nothing but loads comes over such a socket, whatever topic an engine gives them.
        let from = EventSource { endpoint: source.endpoint.clone(), replay: None, topic: String::new() };
        match Subscription::open(&from, LOAD_REPORT_MESSAGES_MAX, (&self.registry, Token(at)), self.now_ms()) {
            Ok(subscription) => {
                let (source, hearing) = (source.clone(), Hearing::Waiting { since_ms: self.now_ms() });
                let heard = Heard { source, subscription, hearing, misread: false };
                self.heard[at] = Some(heard);
                self.read(at);
            }
            Err(error) => {
                self.counters.bump(LoadReportCounter::SourcesRefused);
                let (worker, endpoint) = (source.worker, source.endpoint.as_str());
                tracing::error!(%worker, endpoint, %error, "what the worker says of its load cannot be received");
            }
        }
    }

    fn close(&mut self, at: usize) {
        self.heard[at] = None;
    }

    /// Reads what a socket has, up to one turn's share, and reports the newest of it.
    fn read(&mut self, at: usize) {
        let now_ms = self.now_ms();
        let Some(heard) = self.heard.get_mut(at).and_then(Option::as_mut) else { return };
        let (newest, drained) = heard.newest(&self.counters, now_ms);
        let worker = heard.source.worker;
        if !drained {
            self.unread.push(at);
        }
        let Some(payload) = newest else { return };
        match decode_load_stat(&payload) {
            Ok(stat) => {
                heard.misread = false;
                if heard.hearing.hear(now_ms) {
                    tracing::info!(%worker, "the worker says again how busy it is");
                }
                let load = engine_load(&stat, heard.source.scheme.get());
                let known = self.loads.report_load(heard.source.index, load, (self.now_ns)());
                self.counters.bump(match known {
                    true => LoadReportCounter::Reports,
                    false => LoadReportCounter::ReportsUnknownWorker,
                });
            }
            Err(error) => {
                self.counters.bump(LoadReportCounter::ReportsUndecodable);
                if !std::mem::replace(&mut heard.misread, true) {
                    let endpoint = heard.source.endpoint.as_str();
                    tracing::warn!(%worker, endpoint, %error, "what the worker says of its load cannot be read");
                }
            }
        }
    }

    fn tick(&mut self) {
        let now_ms = self.now_ms();
        for (at, heard) in self.heard.iter_mut().enumerate() {
            let Some(heard) = heard else { continue };
            if heard.subscription.tick(now_ms) && !self.unread.contains(&at) {
                self.unread.push(at);
            }
            if heard.hearing.tick(now_ms) {
                self.counters.bump(LoadReportCounter::SourcesSilent);
                let (worker, endpoint) = (heard.source.worker, heard.source.endpoint.as_str());
                tracing::warn!(%worker, endpoint, "the worker does not say how busy it is; bookings alone tell");
            }
        }
    }
}

impl Heard {
    /// Takes a turn's share of messages; the payload of the newest, if any came, and whether there are no more.
    fn newest(&mut self, counters: &CounterSet<LoadReportCounter>, now_ms: u64) -> (Option<Bytes>, bool) {
        let (mut newest, mut drained, mut taken) = (None, false, 0);
        while !drained && taken < LOAD_REPORT_MESSAGES_MAX {
            // What the connection did counts as a message: it ends the turn as well.
            taken += 1;
            self.link_events(counters);
            drained = self.subscription.fetch(now_ms);
            while let Some(received) = self.subscription.take() {
                taken += 1;
                match received {
                    Received::Batch(_, payload) => {
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
                    tracing::warn!(%worker, %endpoint, %refusal, "the connection of the worker's load was cut");
                }
            } else {
                tracing::debug!(%worker, %endpoint, ?event, "the connection of the worker's load");
            }
        }
    }
}

/// A reading as loads have it. Without a scheme a block is as large as decisions take it to be then.
pub(super) fn engine_load(stat: &LoadStat, scheme: Option<Scheme>) -> EngineLoad {
    let block_size = scheme.map_or(NOMINAL_BLOCK_SIZE_TOKENS, |scheme| scheme.block_size);
    let millionths = u128::from(stat.used_tokens) * 1_000_000;
    // An engine that does not know its room says 0.
    let usage = millionths.checked_div(u128::from(stat.capacity_tokens)).unwrap_or(0);
    EngineLoad {
        prefill_tokens: stat.waiting_uncached_tokens,
        decode_blocks: stat.used_tokens.div_ceil(u64::from(block_size.max(1))),
        running: stat.running,
        waiting: stat.waiting,
        kv_usage_millionths: u32::try_from(usage).unwrap_or(u32::MAX),
    }
}

/// Whether an engine is heard. It says at least each second what it is busy with, also if that is nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hearing {
    /// Not for so long that it would be wrong to call it silent; since then, milliseconds.
    Waiting { since_ms: u64 },
    /// Its last reading came then.
    Heard { at_ms: u64 },
    /// For too long not; said once.
    Silent,
}

impl Hearing {
    /// A reading has come; `true` = it was silent before.
    pub(super) fn hear(&mut self, now_ms: u64) -> bool {
        std::mem::replace(self, Self::Heard { at_ms: now_ms }) == Self::Silent
    }

    /// Time has passed; `true` = it is silent from now on.
    pub(super) fn tick(&mut self, now_ms: u64) -> bool {
        let (Self::Waiting { since_ms: last_ms } | Self::Heard { at_ms: last_ms }) = *self else { return false };
        let silent = now_ms.saturating_sub(last_ms) >= LOAD_REPORT_SILENT_MS;
        if silent {
            *self = Self::Silent;
        }
        silent
    }
}

#[cfg(test)]
mod tests;
