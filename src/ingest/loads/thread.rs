//! The event loop: one `epoll` over the sockets of all engines that publish their load.
//!
//! Descriptors are edge-triggered: after a wake a socket is read until it has no more, and of what it had only the
//! newest reading is used.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use mio::{Events, Poll, Registry, Token, Waker};
use rustc_hash::FxHashMap;

use super::source::{Hearing, engine_load};
use super::{LoadSource, Wanted};
use crate::event::msgpack::decode_load_stat;
use crate::fleet::EventSource;
use crate::ids::WorkerIndex;
use crate::ingest::subscription::{Received, Subscription};
use crate::limits::{LOAD_REPORT_MESSAGES_MAX, LOAD_REPORT_TICK_MS};
use crate::load::Loads;
use crate::metrics::{CounterSet, LoadReportCounter};
use crate::zmtp::LinkEvent;

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
