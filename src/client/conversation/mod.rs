//! What an async client remembers of its daemon, and what it says and hears on a connection: who waits for which reply,
//! what is owed, whom the fleet has. Pure: no sockets and no clock; `W` is whatever a reply is handed to.

mod backoff;
mod counters;
mod refusal;
mod report;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use rustc_hash::FxHashMap;

use backoff::Silence;

use super::fallback::Fleet;
use super::frame::next_frame;
use super::pages::FleetPages;
use super::spaces::Spaces;
use crate::error::{Error, Result};
use crate::ids::CorrelationId;
use crate::limits::{CLIENT_REPORTS_OWED_MAX, WORKERS_PAGE_MAX};
use crate::protocol::SessionToken;
use crate::wire::{HelloReply, LaneAsked, PROTOCOL_VERSION, Reply, RequestEncoder, WatchReply, features};
pub use backoff::BackOff;
pub use counters::ClientCounter;
pub(in crate::client) use refusal::Refusal;
pub use report::Booking;
pub(in crate::client) use report::{Name, Report, Word};

/// How a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::client) enum Phase {
    /// Being made; `is_first` = nothing has failed since the daemon last answered, so that it is worth waiting for.
    Connecting { is_first: bool },
    /// Requests can be sent.
    Open,
    /// Nobody answers; it is tried again later.
    Resting,
}

/// A reply, and the run of the daemon that gave it: handles in it mean nothing to another.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::client) struct Told {
    pub(in crate::client) reply: Reply,
    pub(in crate::client) instance_id: u64,
}

/// Who is handed a reply.
pub(in crate::client) trait Waiter {
    /// Hands over a reply, or why there is none; answers with a reply that nobody waits for.
    fn hand(self, told: Result<Told>) -> Option<Told>;
}

/// What stays behind if a request's reply is not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::client) enum Leaves {
    Nothing,
    /// It may have booked.
    Booking {
        request_id: Box<str>,
        attempt: u32,
    },
    /// It is to be said again on the next connection.
    Report(Report),
}

/// By which way bytes come: frames of one are not mixed with those of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::client) enum Source {
    /// The connection's socket.
    Socket,
    /// Its lane.
    Lane,
}

/// A request in flight.
struct Asked<W> {
    /// `None` = the client's own, or whoever asked has given up.
    waiter: Option<W>,
    leaves: Leaves,
}

/// The state of one client.
pub(in crate::client) struct Conversation<W> {
    encoder: RequestEncoder,
    next_id: u64,
    /// Encoded and not yet taken by the socket.
    pub(in crate::client) unsent: Vec<u8>,
    /// What has come and is not whole yet, by source.
    received: [Vec<u8>; 2],
    asked: FxHashMap<CorrelationId, Asked<W>>,
    owed: VecDeque<Report>,
    pub(in crate::client) phase: Phase,
    pub(in crate::client) silence: Silence,
    back_off: BackOff,
    heard_at: Option<Instant>,
    pub(in crate::client) hello: Option<HelloReply>,
    /// Why the last connection was refused for good, in the daemon's words.
    pub(in crate::client) refusal: Option<Refusal>,
    /// Why the last connection could not be made.
    pub(in crate::client) last_failure: Option<Refusal>,
    /// Why the last connection goes by its socket though a lane was to be tried.
    pub(in crate::client) lane_refusal: Option<Refusal>,
    pub(in crate::client) spaces: Spaces,
    pub(in crate::client) fleet: Arc<Fleet>,
    watch: Option<CorrelationId>,
    pages: FleetPages,
    pub(in crate::client) counters: [u64; ClientCounter::ALL.len()],
}

impl<W: Waiter> Conversation<W> {
    pub(in crate::client) fn new(back_off: BackOff) -> Self {
        Self {
            encoder: RequestEncoder::default(),
            next_id: 1,
            unsent: Vec::new(),
            received: Default::default(),
            asked: FxHashMap::default(),
            owed: VecDeque::new(),
            phase: Phase::Connecting { is_first: true },
            silence: Silence::default(),
            back_off,
            heard_at: None,
            hello: None,
            refusal: None,
            last_failure: None,
            lane_refusal: None,
            spaces: Spaces::default(),
            fleet: Arc::default(),
            watch: None,
            pages: FleetPages::default(),
            counters: [0; ClientCounter::ALL.len()],
        }
    }

    pub(in crate::client) const fn count(&mut self, counter: ClientCounter) {
        self.counters[counter as usize] += 1;
    }

    /// Which run of the daemon was last spoken to; 0 = none yet.
    pub(in crate::client) fn instance_id(&self) -> u64 {
        self.hello.as_ref().map_or(0, |hello| hello.instance_id)
    }

    /// The number of the last connection that was made.
    pub(in crate::client) const fn connection(&self) -> u64 {
        self.counters[ClientCounter::Connected as usize]
    }

    /// Whether this run of the daemon was the last that was spoken to.
    pub(in crate::client) fn is_run(&self, instance_id: u64) -> bool {
        self.hello.as_ref().is_some_and(|hello| hello.instance_id == instance_id)
    }

    /// Whether everything that was asked or is owed has been answered.
    pub(in crate::client) fn is_settled(&self) -> bool {
        self.unsent.is_empty() && self.owed.is_empty() && !self.is_waiting()
    }

    /// Whether replies are due; what a watch tells comes when it comes.
    pub(in crate::client) fn is_waiting(&self) -> bool {
        self.asked.len() > usize::from(self.watch.is_some())
    }

    // The connection's life.

    /// Begins a connection with its first frame.
    pub(in crate::client) fn greet(&mut self, name: &str, session: SessionToken) -> CorrelationId {
        let id = self.take_id();
        self.encoder.hello(id, name, Some(session), &mut self.unsent);
        id
    }

    /// Takes the answer to it.
    ///
    /// # Errors
    /// Why the connection is refused.
    pub(in crate::client) fn accepted(&mut self, reply: Reply) -> Result<HelloReply> {
        match reply {
            Reply::Hello(hello) if hello.version == PROTOCOL_VERSION => Ok(hello),
            Reply::Error(error) => {
                let is_final = !error.retryable;
                let error = Error::from(error);
                if is_final {
                    self.refusal = Some(Refusal::of(&error));
                }
                Err(error)
            }
            other => Err(super::unexpected("hello", &other)),
        }
    }

    /// Asks for a lane, before anything else is asked on this connection.
    pub(in crate::client) fn ask_lane(&mut self) -> CorrelationId {
        let id = self.take_id();
        self.encoder.open_lane(id, LaneAsked::default(), &mut self.unsent);
        id
    }

    /// The connection was refused, in a way that asking again may not mend.
    pub(in crate::client) fn refuse(&mut self, error: &Error) {
        if !error.is_retryable() {
            self.refusal = Some(Refusal::of(error));
        }
    }

    /// The connection, or the next one, is to go by its socket though a lane was to be tried.
    pub(in crate::client) fn refuse_lane(&mut self, error: &Error) {
        self.count(ClientCounter::LanesRefused);
        self.lane_refusal = Some(Refusal::of(error));
    }

    /// Requests can be sent from now on, by a lane or not. What is owed goes first, and the fleet is watched.
    pub(in crate::client) fn greeted(&mut self, hello: HelloReply, learns_fleet: bool, has_lane: bool) {
        if has_lane {
            self.count(ClientCounter::LanesOpened);
            self.lane_refusal = None;
        }
        if self.hello.as_ref().is_some_and(|last| last.instance_id != hello.instance_id) {
            // Another run of the daemon: it knows nothing of what the last one held.
            self.owed.clear();
        }
        self.spaces.learn(&hello.spaces);
        let watches = learns_fleet && hello.features & features::WATCH != 0;
        self.hello = Some(hello);
        (self.refusal, self.last_failure) = (None, None);
        self.phase = Phase::Open;
        self.count(ClientCounter::Connected);
        for report in std::mem::take(&mut self.owed) {
            self.say(report, None);
        }
        if watches {
            let id = self.take_id();
            self.encoder.watch(id, None, (0, WORKERS_PAGE_MAX as u32), &mut self.unsent);
            self.pages = FleetPages::default();
            self.asked.insert(id, Asked { waiter: None, leaves: Leaves::Nothing });
            self.watch = Some(id);
        }
    }

    /// The connection could not be made.
    pub(in crate::client) fn failed(&mut self, error: &Error, now: Instant, chance: f64) {
        self.last_failure = Some(Refusal::of(error));
        self.count(ClientCounter::ConnectsFailed);
        self.silence.failed(self.back_off, now, chance);
        self.closed(Phase::Resting);
    }

    /// The connection that was made has ended; one that did not last is not made again at once.
    pub(in crate::client) fn ended(&mut self, is_stable: bool, now: Instant, chance: f64) {
        self.count(ClientCounter::ConnectionsLost);
        if is_stable {
            self.closed(Phase::Connecting { is_first: true });
        } else {
            self.silence.failed(self.back_off, now, chance);
            self.closed(Phase::Resting);
        }
    }

    /// The connection has ended. Who waits is told, and what they leave is said on the next one.
    fn closed(&mut self, phase: Phase) {
        self.phase = phase;
        self.unsent.clear();
        self.received.iter_mut().for_each(Vec::clear);
        self.watch = None;
        let mut left: Vec<_> = self.asked.drain().collect();
        left.sort_unstable_by_key(|(id, _)| *id);
        for (_, asked) in left {
            match asked.leaves {
                Leaves::Nothing => {}
                Leaves::Booking { request_id, attempt } => {
                    self.owe(Report { name: Name::Request { request_id, attempt }, word: Word::Free });
                }
                Leaves::Report(report) => self.owe(report),
            }
            if let Some(waiter) = asked.waiter {
                // Whoever has left needs no word.
                drop(waiter.hand(Err(super::lost())));
            }
        }
    }

    /// A call ended in vain: that is the daemon's silence if nothing was heard of it all the while.
    pub(in crate::client) fn waited_in_vain(&mut self, since: Instant, now: Instant, chance: f64) {
        if self.heard_at.is_none_or(|heard| heard < since) {
            self.silence.failed(self.back_off, now, chance);
        }
    }

    // Requests.

    fn take_id(&mut self) -> CorrelationId {
        let id = CorrelationId(self.next_id);
        self.next_id += 1;
        id
    }

    /// Sends a request that `encode` appends, for whoever waits for its reply.
    ///
    /// # Errors
    /// Those of the encoder; nothing is sent then.
    pub(in crate::client) fn ask(
        &mut self,
        encode: impl FnOnce(&mut RequestEncoder, CorrelationId, &mut Vec<u8>) -> Result<()>,
        leaves: Leaves,
        waiter: W,
    ) -> Result<()> {
        let id = self.take_id();
        encode(&mut self.encoder, id, &mut self.unsent)?;
        self.asked.insert(id, Asked { waiter: Some(waiter), leaves });
        Ok(())
    }

    /// Says a report on this connection.
    pub(in crate::client) fn say(&mut self, report: Report, waiter: Option<W>) {
        let id = self.take_id();
        report.encode(&mut self.encoder, id, &mut self.unsent);
        self.asked.insert(id, Asked { waiter, leaves: Leaves::Report(report) });
    }

    /// Keeps a report for the next connection. What is only an interim count is left out: the next count says it all.
    pub(in crate::client) fn owe(&mut self, report: Report) {
        if matches!(report.word, Word::OutputProgress { .. }) {
            return;
        }
        if self.owed.len() >= CLIENT_REPORTS_OWED_MAX {
            self.owed.pop_front();
            self.count(ClientCounter::ReportsForgotten);
        }
        self.count(ClientCounter::ReportsOwed);
        self.owed.push_back(report);
    }

    // Replies.

    /// Takes bytes that came, and hands out the replies in them.
    ///
    /// # Errors
    /// [`Kind::Malformed`] if what came cannot be trusted: the connection cannot go on.
    pub(in crate::client) fn hear(&mut self, source: Source, bytes: &[u8], now: Instant) -> Result<()> {
        self.received[source as usize].extend_from_slice(bytes);
        let mut consumed = 0;
        while let Some(frame) = next_frame(&self.received[source as usize][consumed..])? {
            consumed += frame.bytes;
            self.heard_at = Some(now);
            self.silence.answered();
            self.answered(frame.id, frame.reply);
        }
        self.received[source as usize].drain(..consumed);
        Ok(())
    }

    /// The reply to what begins a connection, hello or the request for a lane, once it is whole: it or the word that the
    /// connection is refused, which is on no request's id.
    ///
    /// # Errors
    /// As [`Conversation::hear`].
    pub(in crate::client) fn hear_beginning(&mut self, bytes: &[u8], now: Instant) -> Result<Option<Reply>> {
        let received = &mut self.received[Source::Socket as usize];
        received.extend_from_slice(bytes);
        let Some(frame) = next_frame(received)? else { return Ok(None) };
        received.drain(..frame.bytes);
        self.heard_at = Some(now);
        if matches!(frame.reply, Ok(Reply::Hello(_))) {
            self.silence.answered();
        }
        frame.reply.map(Some)
    }

    fn answered(&mut self, id: CorrelationId, reply: Result<Reply>) {
        if Some(id) == self.watch {
            match reply {
                Ok(Reply::Watch(page)) => self.pages.take(page).into_iter().for_each(|fleet| self.learn(fleet)),
                // An error ends the watch; the fleet stays as it was.
                _ => {
                    self.asked.remove(&id);
                    self.watch = None;
                }
            }
            return;
        }
        let Some(asked) = self.asked.remove(&id) else { return };
        if let (Err(_), Leaves::Booking { request_id, attempt }) = (&reply, asked.leaves) {
            // It cannot be read what was booked.
            self.count(ClientCounter::BookingsGivenBack);
            self.say(Report { name: Name::Request { request_id, attempt }, word: Word::Free }, None);
        }
        let instance_id = self.instance_id();
        let told = reply.map(|reply| Told { reply, instance_id });
        let untaken = match asked.waiter {
            Some(waiter) => waiter.hand(told),
            None => told.ok(),
        };
        if let Some(told) = untaken {
            self.untaken(&told);
        }
    }

    /// A reply that nobody takes: what it booked nobody else would ever free.
    pub(in crate::client) fn untaken(&mut self, told: &Told) {
        let Reply::Route(route) = &told.reply else { return };
        if !self.is_run(told.instance_id) {
            return;
        }
        for handle in [route.booking, route.prefill_booking].into_iter().flatten() {
            self.count(ClientCounter::BookingsGivenBack);
            let report = Report { name: Name::Handle(handle), word: Word::Free };
            match self.phase {
                Phase::Open => self.say(report, None),
                _ => self.owe(report),
            }
        }
    }

    fn learn(&mut self, told: WatchReply) {
        let (version, instance_id) = (told.fleet_version, self.instance_id());
        self.fleet = Arc::new(Fleet { workers: self.spaces.ours_of(told.workers), version, instance_id });
    }
}

#[cfg(test)]
mod tests;
