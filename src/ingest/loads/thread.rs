//! The event loop: one `epoll` over the sockets of all engines that publish their load.
//!
//! Descriptors are edge-triggered: after a wake a socket is read until it has no more, and of what it had only the
//! newest reading is used.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use rustc_hash::FxHashMap;

use super::source::{Hearing, engine_load};
use super::{LoadSource, Wanted};
use crate::event::msgpack::decode_load_stat;
use crate::fleet::EventSource;
use crate::ids::WorkerIndex;
use crate::ingest::contexts::Contexts;
use crate::ingest::subscription::{Received, Subscription};
use crate::limits::{LOAD_REPORT_MESSAGES_MAX, LOAD_REPORT_TICK_MS};
use crate::load::Loads;
use crate::metrics::{CounterSet, LoadReportCounter};

const WAKER: Token = Token(usize::MAX);
const POLL_EVENTS: usize = 256;

/// Everything the thread owns.
pub(super) struct Listening<N> {
    poll: Poll,
    loads: Arc<Loads>,
    counters: Arc<CounterSet<LoadReportCounter>>,
    now_ns: N,
    started: Instant,
    contexts: Contexts,
    /// By token; a place is used again once its engine is no longer listened to.
    heard: Vec<Option<Heard>>,
    /// Those whose sockets have more than one turn may take: nothing signals it again.
    unread: Vec<usize>,
}

/// An engine that is listened to.
struct Heard {
    source: LoadSource,
    subscription: Subscription,
    context: usize,
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
        let (started, contexts) = (Instant::now(), Contexts::default());
        Ok((Self { poll, loads, counters, now_ns, started, contexts, heard: Vec::new(), unread: Vec::new() }, waker))
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
        let (berth, context) = self.contexts.take();
        // Nothing but loads comes over such a socket, whatever topic an engine gives them.
        let from = EventSource { endpoint: source.endpoint.clone(), replay: None, topic: String::new() };
        let opened = Subscription::open(context, &from, LOAD_REPORT_MESSAGES_MAX, berth.number);
        let registered = opened.and_then(|subscription| {
            register(&self.poll, &subscription, at)
                .map(|()| subscription)
                .map_err(|error| super::system("cannot wait for an engine's load").caused_by(error))
        });
        match registered {
            Ok(subscription) => {
                let (source, hearing) = (source.clone(), Hearing::Waiting { since_ms: self.now_ms() });
                let heard = Heard { source, subscription, context: berth.context, hearing, misread: false };
                self.heard[at] = Some(heard);
                // What came before the descriptors were waited for signals no more.
                self.read(at);
            }
            Err(error) => {
                self.contexts.give_back(berth.context);
                self.counters.bump(LoadReportCounter::SourcesRefused);
                let (worker, endpoint) = (source.worker, &source.endpoint);
                tracing::error!(%worker, endpoint, %error, "what the worker says of its load cannot be received");
            }
        }
    }

    fn close(&mut self, at: usize) {
        let Some(heard) = self.heard[at].take() else { return };
        for descriptor in heard.subscription.descriptors().into_iter().flatten() {
            if let Err(error) = self.poll.registry().deregister(&mut SourceFd(&descriptor)) {
                tracing::debug!(worker = %heard.source.worker, %error, "a descriptor was not waited for");
            }
        }
        self.contexts.give_back(heard.context);
    }

    /// Reads what a socket has, up to one turn's share, and reports the newest of it.
    fn read(&mut self, at: usize) {
        let now_ms = self.now_ms();
        let Some(heard) = self.heard.get_mut(at).and_then(Option::as_mut) else { return };
        let outcome = heard.newest(&self.counters);
        let worker = heard.source.worker;
        let (newest, drained) = match outcome {
            Ok(read) => read,
            Err(error) => {
                tracing::error!(%worker, %error, "the socket of the worker's load failed");
                self.counters.bump(LoadReportCounter::SourcesRefused);
                return self.close(at);
            }
        };
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
                    let endpoint = &heard.source.endpoint;
                    tracing::warn!(%worker, endpoint, %error, "what the worker says of its load cannot be read");
                }
            }
        }
    }

    fn tick(&mut self) {
        let now_ms = self.now_ms();
        for heard in self.heard.iter_mut().flatten() {
            if heard.hearing.tick(now_ms) {
                self.counters.bump(LoadReportCounter::SourcesSilent);
                let (worker, endpoint) = (heard.source.worker, &heard.source.endpoint);
                tracing::warn!(%worker, endpoint, "the worker does not say how busy it is; bookings alone tell");
            }
        }
    }
}

impl Heard {
    /// Takes a turn's share of messages; the payload of the newest, if any came, and whether there are no more.
    fn newest(&mut self, counters: &CounterSet<LoadReportCounter>) -> zmq::Result<(Option<zmq::Message>, bool)> {
        while let Some(event) = self.subscription.link_event()? {
            tracing::debug!(worker = %self.source.worker, ?event, "the socket of the worker's load");
        }
        let (mut newest, mut drained, mut taken) = (None, false, 0);
        while !drained && taken < LOAD_REPORT_MESSAGES_MAX {
            drained = self.subscription.fetch()?;
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
        Ok((newest, drained))
    }
}

fn register(poll: &Poll, subscription: &Subscription, at: usize) -> io::Result<()> {
    let descriptors = subscription.descriptors().map_err(io::Error::other)?;
    descriptors
        .iter()
        .try_for_each(|descriptor| poll.registry().register(&mut SourceFd(descriptor), Token(at), Interest::READABLE))
}
