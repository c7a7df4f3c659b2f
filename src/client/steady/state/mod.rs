//! The state of a client across its connections: the calls that wait for replies, the reports to send on the next connection, the
//! spaces and the fleet. Pure: no sockets and no clock. `W` is what takes a reply.

mod backoff;
mod counters;
mod failure;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::client::conversation::{Channel, Conversation, Incoming, Opened, Rejection};
use crate::client::fallback::{FallbackReason, Fleet};
use crate::client::spaces::Spaces;
use crate::client::{LaneUse, SteadyOptions, lost};
use crate::error::{Error, Result};
use crate::ids::{CorrelationId, Worker};
use crate::limits::{CLIENT_FREES_KEPT_MAX, CLIENT_FREES_KEPT_MS, CLIENT_REPORTS_STORED_MAX};
use crate::protocol::{BookingHandle, BookingOutcome, BookingRef, SessionToken};
use crate::wire::{HelloReply, LaneOpened, Reply, RequestEncoder, WatchReply, features};
use backoff::Silence;

pub use backoff::BackOff;
pub use counters::ClientCounter;
pub(super) use failure::{Failure, StoredError};

/// The state of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It is being made. `is_first` = nothing has failed since the daemon last answered, so calls wait for it.
    Connecting { is_first: bool },
    /// Requests can be sent.
    Open,
    /// The daemon does not answer; the next try follows after a pause.
    BackingOff,
}

/// A reply, and the daemon run that sent it. Booking handles are valid for that run only.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RunReply {
    pub(super) reply: Reply,
    pub(super) instance_id: u64,
}

/// A call that waits for a reply.
pub(super) trait Waiter {
    /// Delivers a reply, or the reason why there is none. Returns a reply that no call waits for any more.
    fn deliver(self, reply: Result<RunReply>) -> Option<RunReply>;
}

/// What a request leaves to do if no call takes its reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Leftover {
    Nothing,
    /// The request may have booked a worker: free the booking.
    Booking {
        request_id: Box<str>,
        attempt: u32,
    },
    /// Send the report again on the next connection.
    Report(Report),
}

/// A request in flight.
pub(super) struct InFlight<W> {
    /// `None` = the request is the client's own, or its caller has given up.
    waiter: Option<W>,
    leftover: Leftover,
}

/// The state of one client.
pub(super) struct ClientState<W> {
    pub(super) conversation: Conversation<InFlight<W>>,
    /// Reports for the next connection.
    stored_reports: VecDeque<Report>,
    /// Bookings that this run of the daemon has freed lately, and when: a crash may have brought them back.
    freed: VecDeque<(Instant, BookingHandle)>,
    pub(super) phase: Phase,
    pub(super) silence: Silence,
    back_off: BackOff,
    heard_at: Option<Instant>,
    /// When the last connection was made.
    opened_at: Option<Instant>,
    /// Whether the fleet is watched, for decisions without the daemon.
    learns_fleet: bool,
    /// The use of lanes by the client's options, and by the next connection.
    lane: LaneUse,
    next_lane: LaneUse,
    pub(super) hello: Option<HelloReply>,
    /// Why the daemon refused the last connection for good.
    refusal: Option<StoredError>,
    /// Why the last connection could not be made.
    last_failure: Option<StoredError>,
    /// Why the last connection has no lane, though one was requested.
    pub(super) lane_refusal: Option<StoredError>,
    pub(super) spaces: Spaces,
    pub(super) fleet: Arc<Fleet>,
    pub(super) counters: [u64; ClientCounter::ALL.len()],
}

impl<W: Waiter> ClientState<W> {
    pub(super) fn new(options: &SteadyOptions) -> Self {
        Self {
            conversation: Conversation::default(),
            stored_reports: VecDeque::new(),
            freed: VecDeque::new(),
            phase: Phase::Connecting { is_first: true },
            silence: Silence::default(),
            back_off: options.back_off,
            heard_at: None,
            opened_at: None,
            learns_fleet: options.fallback,
            lane: options.lane,
            next_lane: options.lane,
            hello: None,
            refusal: None,
            last_failure: None,
            lane_refusal: None,
            spaces: Spaces::default(),
            fleet: Arc::default(),
            counters: [0; ClientCounter::ALL.len()],
        }
    }

    pub(super) const fn count(&mut self, counter: ClientCounter) {
        self.counters[counter as usize] += 1;
    }

    /// The daemon run of the last connection; 0 = none yet.
    pub(super) fn instance_id(&self) -> u64 {
        self.hello.as_ref().map_or(0, |hello| hello.instance_id)
    }

    /// The number of the last connection that was made.
    pub(super) const fn connection(&self) -> u64 {
        self.counters[ClientCounter::Connected as usize]
    }

    /// Whether the last connection was to this daemon run.
    pub(super) fn is_run(&self, instance_id: u64) -> bool {
        self.hello.as_ref().is_some_and(|hello| hello.instance_id == instance_id)
    }

    /// Whether every request and every report has been answered.
    pub(super) fn is_settled(&self) -> bool {
        let (has_sent, is_waiting) = (self.conversation.unsent.is_empty(), self.conversation.is_waiting());
        has_sent && !is_waiting && self.stored_reports.is_empty()
    }

    // Making and ending a connection.

    /// Begins a connection.
    pub(super) fn begin(&mut self, name: &str, session: SessionToken) {
        self.conversation.begin(name, Some(session), self.next_lane);
    }

    /// Takes what has been received while the connection begins: see [`Conversation::opening`].
    ///
    /// # Errors
    /// As there.
    pub(super) fn opening<L>(
        &mut self,
        now: Instant,
        map: impl FnOnce(LaneOpened) -> Result<L>,
    ) -> Result<Option<Opened<L>>, Rejection> {
        let opening = self.conversation.opening(map);
        self.heard_at = Some(now);
        if self.conversation.is_greeted() {
            self.silence.answered();
        }
        opening
    }

    /// Counts and remembers that the connection, or the next one, has no lane though one was requested.
    fn refuse_lane(&mut self, error: &Error) {
        self.count(ClientCounter::LanesRefused);
        self.lane_refusal = Some(StoredError::of(error));
    }

    /// Opens the connection for requests. The stored reports are sent first, and the fleet is watched. Returns the lane.
    pub(super) fn opened<L>(&mut self, opened: Opened<L>, now: Instant) -> Option<L> {
        let Opened { hello, lane, lane_refusal } = opened;
        match lane_refusal {
            Some(error) => self.refuse_lane(&error),
            None if lane.is_some() => {
                self.count(ClientCounter::LanesOpened);
                self.lane_refusal = None;
            }
            None => {}
        }
        if self.hello.as_ref().is_some_and(|last| last.instance_id != hello.instance_id) {
            // Another run of the daemon has no bookings of the last one.
            self.stored_reports.clear();
            self.freed.clear();
        }
        self.spaces.learn(&hello.spaces);
        let watches = self.learns_fleet && hello.features & features::WATCH != 0;
        self.hello = Some(hello);
        (self.refusal, self.last_failure) = (None, None);
        self.phase = Phase::Open;
        self.opened_at = Some(now);
        self.count(ClientCounter::Connected);
        for report in std::mem::take(&mut self.stored_reports) {
            self.send_report(&report, None);
        }
        // If the daemon has crashed, it goes on with what it had written down before the last of these were freed.
        for (_, handle) in std::mem::take(&mut self.freed) {
            self.send_report(&Report { name: BookingName::Handle(handle), kind: ReportKind::Free }, None);
        }
        if watches {
            self.conversation.watch(None);
        }
        lane
    }

    /// The connection could not be made.
    pub(super) fn failed(&mut self, why: &Rejection, now: Instant, chance: f64) {
        let stored = StoredError::of(&why.error);
        if why.is_final {
            self.refusal = Some(stored.clone());
        }
        self.last_failure = Some(stored);
        self.count(ClientCounter::ConnectsFailed);
        self.silence.failed(self.back_off, now, chance);
        self.closed(Phase::BackingOff);
    }

    /// Notes that the connection has ended, by a fault of its lane if there is one. After one that did not last, a pause precedes
    /// the next.
    pub(super) fn ended(&mut self, lane_fault: Option<&Error>, now: Instant, chance: f64) {
        self.count(ClientCounter::ConnectionsLost);
        let is_stable = self.opened_at.is_some_and(|opened| now.duration_since(opened) >= self.back_off.first);
        let tried = std::mem::replace(&mut self.next_lane, self.lane);
        if let Some(fault) = lane_fault.filter(|_| tried == LaneUse::Try && !is_stable) {
            // The next connection goes without a lane, because another lane may break too. The one after it requests one again.
            self.refuse_lane(fault);
            self.next_lane = LaneUse::Off;
        }
        if is_stable {
            self.closed(Phase::Connecting { is_first: true });
        } else {
            self.silence.failed(self.back_off, now, chance);
            self.closed(Phase::BackingOff);
        }
    }

    /// Notes that a pause is over: the next connection is being made.
    pub(super) fn resumed(&mut self) {
        self.phase = Phase::Connecting { is_first: self.silence.since().is_none() };
    }

    /// Delivers an error to all waiting calls, and stores the reports that the next connection must send.
    fn closed(&mut self, phase: Phase) {
        self.phase = phase;
        for request in self.conversation.end() {
            match request.leftover {
                Leftover::Nothing => {}
                Leftover::Booking { request_id, attempt } => {
                    self.store_report(Report {
                        name: BookingName::Request { request_id, attempt },
                        kind: ReportKind::Free,
                    });
                }
                Leftover::Report(report) => self.store_report(report),
            }
            if let Some(waiter) = request.waiter {
                // A caller that has given up gets nothing.
                drop(waiter.deliver(Err(lost())));
            }
        }
    }

    /// Notes that a call timed out. If the daemon sent nothing during the call, it counts as silent.
    pub(super) fn timed_out(&mut self, since: Instant, now: Instant, chance: f64) {
        if self.heard_at.is_none_or(|heard| heard < since) {
            self.silence.failed(self.back_off, now, chance);
        }
    }

    // Requests.

    /// Whether requests can be sent; `false` = wait for the next phase. `is_tried` is of the call: whether it waits for the
    /// outcome of a try.
    ///
    /// # Errors
    /// The daemon is in a pause: a call fails early.
    pub(super) fn may_send(&self, now: Instant, is_tried: &mut bool) -> Result<bool, Failure> {
        let is_paused = self.silence.paused_until(now).is_some();
        match self.phase {
            Phase::Open if !is_paused => Ok(true),
            Phase::Connecting { is_first: true } => Ok(false),
            // The pause is over: this call waits for the outcome of the next try.
            Phase::BackingOff if !is_paused => {
                *is_tried = true;
                Ok(false)
            }
            Phase::Connecting { is_first: false } if *is_tried => Ok(false),
            _ => Err(match (&self.refusal, &self.last_failure) {
                (Some(refusal), _) => Failure::Refused(refusal.error()),
                (None, Some(why)) => Failure::NotConnected(why.clone()),
                (None, None) => Failure::Unreachable(FallbackReason::Unreachable),
            }),
        }
    }

    /// Sends a request that `encode` appends. `waiter` takes its reply.
    ///
    /// # Errors
    /// Those of the encoder; then nothing is sent.
    pub(super) fn ask(
        &mut self,
        encode: impl FnOnce(&mut RequestEncoder, CorrelationId, &mut Vec<u8>) -> Result<()>,
        leftover: Leftover,
        waiter: W,
    ) -> Result<()> {
        self.conversation.ask(InFlight { waiter: Some(waiter), leftover }, encode).map(drop)
    }

    /// Sends a report on this connection.
    pub(super) fn send_report(&mut self, report: &Report, waiter: Option<W>) {
        let in_flight = InFlight { waiter, leftover: Leftover::Report(report.clone()) };
        let sent = self.conversation.ask(in_flight, |encoder, id, out| {
            report.encode(encoder, id, out);
            Ok(())
        });
        debug_assert!(sent.is_ok(), "the encoding of a report cannot fail");
    }

    /// Stores a report for the next connection, except counts of output tokens: the next count replaces them.
    pub(super) fn store_report(&mut self, report: Report) {
        if matches!(report.kind, ReportKind::OutputProgress { .. }) {
            return;
        }
        if self.stored_reports.len() >= CLIENT_REPORTS_STORED_MAX {
            self.stored_reports.pop_front();
            self.count(ClientCounter::ReportsForgotten);
        }
        self.count(ClientCounter::ReportsOwed);
        self.stored_reports.push_back(report);
    }

    // Replies.

    /// Takes received bytes, and delivers the replies in them.
    ///
    /// # Errors
    /// [`Kind::Malformed`] for an invalid frame: the connection must be closed.
    pub(super) fn receive(&mut self, channel: Channel, bytes: &[u8], now: Instant) -> Result<()> {
        self.conversation.room(channel).extend_from_slice(bytes);
        while let Some(incoming) = self.conversation.next()? {
            self.heard_at = Some(now);
            self.silence.answered();
            match incoming {
                Incoming::Reply { waiter, reply, .. } => self.answered(waiter, reply, now),
                Incoming::Fleet(fleet) => self.learn(fleet),
                // An error ends the watch; the fleet stays as it was. The end of the connection follows by itself.
                Incoming::WatchEnded(_) | Incoming::Closing(_) | Incoming::Other => {}
            }
        }
        Ok(())
    }

    fn answered(&mut self, request: InFlight<W>, reply: Result<Reply>, now: Instant) {
        match (&reply, request.leftover) {
            (Err(_), Leftover::Booking { request_id, attempt }) => {
                // The reply cannot be read, so the booking is freed by its name.
                self.count(ClientCounter::BookingsGivenBack);
                let name = BookingName::Request { request_id, attempt };
                self.send_report(&Report { name, kind: ReportKind::Free }, None);
            }
            (
                Ok(Reply::Free(BookingOutcome::Applied)),
                Leftover::Report(Report { name: BookingName::Handle(handle), kind: ReportKind::Free }),
            ) => self.note_freed(handle, now),
            _ => {}
        }
        let instance_id = self.instance_id();
        let reply = reply.map(|reply| RunReply { reply, instance_id });
        let unclaimed = match request.waiter {
            Some(waiter) => waiter.deliver(reply),
            None => reply.ok(),
        };
        if let Some(reply) = unclaimed {
            self.free_unclaimed(&reply);
        }
    }

    /// Remembers for a while that the daemon has freed a booking.
    fn note_freed(&mut self, handle: BookingHandle, now: Instant) {
        let is_old = |at: &Instant| now.saturating_duration_since(*at) > Duration::from_millis(CLIENT_FREES_KEPT_MS);
        while self.freed.front().is_some_and(|(at, _)| is_old(at)) || self.freed.len() >= CLIENT_FREES_KEPT_MAX {
            self.freed.pop_front();
        }
        self.freed.push_back((now, handle));
    }

    /// Frees the bookings of a reply that no call takes: nothing else would free them.
    pub(super) fn free_unclaimed(&mut self, reply: &RunReply) {
        let Reply::Route(route) = &reply.reply else { return };
        if !self.is_run(reply.instance_id) {
            return;
        }
        for handle in [route.booking, route.prefill_booking].into_iter().flatten() {
            self.count(ClientCounter::BookingsGivenBack);
            let report = Report { name: BookingName::Handle(handle), kind: ReportKind::Free };
            match self.phase {
                Phase::Open => self.send_report(&report, None),
                _ => self.store_report(report),
            }
        }
    }

    fn learn(&mut self, fleet: WatchReply) {
        let (version, instance_id) = (fleet.fleet_version, self.instance_id());
        self.fleet = Arc::new(Fleet { workers: self.spaces.ours_of(fleet.workers), version, instance_id });
    }
}

/// A booking, and the daemon run that holds it: another run does not know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Booking {
    /// The daemon's handle of the booking.
    pub handle: BookingHandle,
    /// The daemon run.
    pub instance_id: u64,
}

/// How a report names its booking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum BookingName {
    Handle(BookingHandle),
    /// The booking that a route without a reply may have made.
    Request {
        request_id: Box<str>,
        attempt: u32,
    },
}

impl BookingName {
    fn as_ref(&self) -> BookingRef<'_> {
        match self {
            Self::Handle(handle) => BookingRef::Handle(*handle),
            Self::Request { request_id, attempt } => BookingRef::Request { request_id, attempt: *attempt },
        }
    }
}

/// What is reported about a booking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReportKind {
    /// The prompt was computed, in `prefill_us` microseconds; 0 = not known.
    PrefillComplete { prefill_us: u64 },
    /// The request has generated `output_tokens` tokens.
    OutputProgress { output_tokens: u32 },
    /// Another worker runs the request.
    Served { worker: Worker },
    /// The request has ended.
    Free,
}

/// A report about a booking. The daemon ignores a report that arrives twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Report {
    pub(super) name: BookingName,
    pub(super) kind: ReportKind,
}

impl Report {
    /// Appends the report as a frame.
    pub(super) fn encode(&self, encoder: &mut RequestEncoder, id: CorrelationId, out: &mut Vec<u8>) {
        let booking = self.name.as_ref();
        match self.kind {
            ReportKind::PrefillComplete { prefill_us } => encoder.prefill_complete(id, &booking, prefill_us, out),
            ReportKind::OutputProgress { output_tokens } => encoder.output_progress(id, &booking, output_tokens, out),
            ReportKind::Served { worker } => encoder.served(id, &booking, worker, out),
            ReportKind::Free => encoder.free(id, &booking, out),
        }
    }
}

#[cfg(test)]
mod tests;
