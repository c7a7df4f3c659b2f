//! The state of a client across its connections: the requests in flight and who waits for their replies, the reports to send
//! on the next connection, the spaces and the fleet. Pure: no sockets and no clock. `W` is what takes a reply.

mod backoff;
mod counters;

use std::collections::VecDeque;
use std::error::Error as _;
use std::sync::Arc;
use std::time::Instant;

use rustc_hash::FxHashMap;

use super::fallback::Fleet;
use super::replies::FleetPages;
use super::replies::next_frame;
use super::spaces::Spaces;
use crate::error::{Error, Kind, Result};
use crate::ids::{CorrelationId, Worker};
use crate::limits::{CLIENT_REPORTS_STORED_MAX, WORKERS_PAGE_MAX};
use crate::protocol::{BookingHandle, BookingRef, SessionToken};
use crate::wire::{HelloReply, LaneAsked, PROTOCOL_VERSION, Reply, RequestEncoder, WatchReply, features};
use backoff::Silence;

pub use backoff::BackOff;
pub use counters::ClientCounter;

/// The state of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::client) enum Phase {
    /// It is being made. `is_first` = nothing has failed since the daemon last answered, so calls wait for it.
    Connecting { is_first: bool },
    /// Requests can be sent.
    Open,
    /// The daemon does not answer; the next try follows after a pause.
    BackingOff,
}

/// A reply, and the daemon run that sent it. Booking handles are valid for that run only.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::client) struct RunReply {
    pub(in crate::client) reply: Reply,
    pub(in crate::client) instance_id: u64,
}

/// A call that waits for a reply.
pub(in crate::client) trait Waiter {
    /// Delivers a reply, or the reason why there is none. Returns a reply that no call waits for any more.
    fn deliver(self, reply: Result<RunReply>) -> Option<RunReply>;
}

/// What a request leaves to do if no call takes its reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::client) enum Leftover {
    Nothing,
    /// The request may have booked a worker: free the booking.
    Booking {
        request_id: Box<str>,
        attempt: u32,
    },
    /// Send the report again on the next connection.
    Report(Report),
}

/// The channel of received bytes. Frames of one channel are not mixed with those of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::client) enum Channel {
    /// The connection's socket.
    Socket,
    /// Its lane.
    Lane,
}

/// A request in flight.
struct InFlight<W> {
    /// `None` = the request is the client's own, or its caller has given up.
    waiter: Option<W>,
    leftover: Leftover,
}

/// The state of one client.
pub(in crate::client) struct Conversation<W> {
    encoder: RequestEncoder,
    next_id: u64,
    /// Encoded requests that are not sent yet.
    pub(in crate::client) unsent: Vec<u8>,
    /// The received bytes of incomplete frames, by channel.
    received: [Vec<u8>; 2],
    in_flight: FxHashMap<CorrelationId, InFlight<W>>,
    /// Reports for the next connection.
    stored_reports: VecDeque<Report>,
    pub(in crate::client) phase: Phase,
    pub(in crate::client) silence: Silence,
    back_off: BackOff,
    heard_at: Option<Instant>,
    pub(in crate::client) hello: Option<HelloReply>,
    /// Why the daemon refused the last connection for good.
    pub(in crate::client) refusal: Option<StoredError>,
    /// Why the last connection could not be made.
    pub(in crate::client) last_failure: Option<StoredError>,
    /// Why the last connection has no lane, though one was requested.
    pub(in crate::client) lane_refusal: Option<StoredError>,
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
            in_flight: FxHashMap::default(),
            stored_reports: VecDeque::new(),
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

    /// The daemon run of the last connection; 0 = none yet.
    pub(in crate::client) fn instance_id(&self) -> u64 {
        self.hello.as_ref().map_or(0, |hello| hello.instance_id)
    }

    /// The number of the last connection that was made.
    pub(in crate::client) const fn connection(&self) -> u64 {
        self.counters[ClientCounter::Connected as usize]
    }

    /// Whether the last connection was to this daemon run.
    pub(in crate::client) fn is_run(&self, instance_id: u64) -> bool {
        self.hello.as_ref().is_some_and(|hello| hello.instance_id == instance_id)
    }

    /// Whether every request and every report has been answered.
    pub(in crate::client) fn is_settled(&self) -> bool {
        self.unsent.is_empty() && self.stored_reports.is_empty() && !self.is_waiting()
    }

    /// Whether replies are due, other than those of the watch.
    pub(in crate::client) fn is_waiting(&self) -> bool {
        self.in_flight.len() > usize::from(self.watch.is_some())
    }

    // Making and ending a connection.

    /// Encodes hello, the first frame of a connection.
    pub(in crate::client) fn begin(&mut self, name: &str, session: SessionToken) -> CorrelationId {
        let id = self.take_id();
        self.encoder.hello(id, name, Some(session), &mut self.unsent);
        id
    }

    /// Takes the reply to hello.
    ///
    /// # Errors
    /// The daemon refuses the connection.
    pub(in crate::client) fn accepted(&mut self, reply: Reply) -> Result<HelloReply> {
        match reply {
            Reply::Hello(hello) if hello.version == PROTOCOL_VERSION => Ok(hello),
            Reply::Error(error) => {
                let is_final = !error.retryable;
                let error = Error::from(error);
                if is_final {
                    self.refusal = Some(StoredError::of(&error));
                }
                Err(error)
            }
            other => Err(super::unexpected("hello", &other)),
        }
    }

    /// Encodes the request for a lane, which must precede all others.
    pub(in crate::client) fn ask_lane(&mut self) -> CorrelationId {
        let id = self.take_id();
        self.encoder.open_lane(id, LaneAsked::default(), &mut self.unsent);
        id
    }

    /// Remembers a refusal of the connection, unless a retry may succeed.
    pub(in crate::client) fn refuse(&mut self, error: &Error) {
        if !error.is_retryable() {
            self.refusal = Some(StoredError::of(error));
        }
    }

    /// Counts and remembers that the connection, or the next one, has no lane though one was requested.
    pub(in crate::client) fn refuse_lane(&mut self, error: &Error) {
        self.count(ClientCounter::LanesRefused);
        self.lane_refusal = Some(StoredError::of(error));
    }

    /// Opens the connection for requests. The stored reports are sent first, and the fleet is watched.
    pub(in crate::client) fn opened(&mut self, hello: HelloReply, learns_fleet: bool, has_lane: bool) {
        if has_lane {
            self.count(ClientCounter::LanesOpened);
            self.lane_refusal = None;
        }
        if self.hello.as_ref().is_some_and(|last| last.instance_id != hello.instance_id) {
            // Another run of the daemon has no bookings of the last one.
            self.stored_reports.clear();
        }
        self.spaces.learn(&hello.spaces);
        let watches = learns_fleet && hello.features & features::WATCH != 0;
        self.hello = Some(hello);
        (self.refusal, self.last_failure) = (None, None);
        self.phase = Phase::Open;
        self.count(ClientCounter::Connected);
        for report in std::mem::take(&mut self.stored_reports) {
            self.send_report(report, None);
        }
        if watches {
            let id = self.take_id();
            self.encoder.watch(id, None, (0, WORKERS_PAGE_MAX as u32), &mut self.unsent);
            self.pages = FleetPages::default();
            self.in_flight.insert(id, InFlight { waiter: None, leftover: Leftover::Nothing });
            self.watch = Some(id);
        }
    }

    /// The connection could not be made.
    pub(in crate::client) fn failed(&mut self, error: &Error, now: Instant, chance: f64) {
        self.last_failure = Some(StoredError::of(error));
        self.count(ClientCounter::ConnectsFailed);
        self.silence.failed(self.back_off, now, chance);
        self.closed(Phase::BackingOff);
    }

    /// Notes that the connection has ended. After one that did not last, a pause precedes the next.
    pub(in crate::client) fn ended(&mut self, is_stable: bool, now: Instant, chance: f64) {
        self.count(ClientCounter::ConnectionsLost);
        if is_stable {
            self.closed(Phase::Connecting { is_first: true });
        } else {
            self.silence.failed(self.back_off, now, chance);
            self.closed(Phase::BackingOff);
        }
    }

    /// Delivers an error to all waiting calls, and stores the reports that the next connection must send.
    fn closed(&mut self, phase: Phase) {
        self.phase = phase;
        self.unsent.clear();
        self.received.iter_mut().for_each(Vec::clear);
        self.watch = None;
        let mut left: Vec<_> = self.in_flight.drain().collect();
        left.sort_unstable_by_key(|(id, _)| *id);
        for (_, request) in left {
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
                drop(waiter.deliver(Err(super::lost())));
            }
        }
    }

    /// Notes that a call timed out. If the daemon sent nothing during the call, it counts as silent.
    pub(in crate::client) fn timed_out(&mut self, since: Instant, now: Instant, chance: f64) {
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

    /// Sends a request that `encode` appends. `waiter` takes its reply.
    ///
    /// # Errors
    /// Those of the encoder; then nothing is sent.
    pub(in crate::client) fn ask(
        &mut self,
        encode: impl FnOnce(&mut RequestEncoder, CorrelationId, &mut Vec<u8>) -> Result<()>,
        leftover: Leftover,
        waiter: W,
    ) -> Result<()> {
        let id = self.take_id();
        encode(&mut self.encoder, id, &mut self.unsent)?;
        self.in_flight.insert(id, InFlight { waiter: Some(waiter), leftover });
        Ok(())
    }

    /// Sends a report on this connection.
    pub(in crate::client) fn send_report(&mut self, report: Report, waiter: Option<W>) {
        let id = self.take_id();
        report.encode(&mut self.encoder, id, &mut self.unsent);
        self.in_flight.insert(id, InFlight { waiter, leftover: Leftover::Report(report) });
    }

    /// Stores a report for the next connection, except counts of output tokens: the next count replaces them.
    pub(in crate::client) fn store_report(&mut self, report: Report) {
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
    pub(in crate::client) fn receive(&mut self, channel: Channel, bytes: &[u8], now: Instant) -> Result<()> {
        self.received[channel as usize].extend_from_slice(bytes);
        let mut consumed = 0;
        while let Some(frame) = next_frame(&self.received[channel as usize][consumed..])? {
            consumed += frame.bytes;
            self.heard_at = Some(now);
            self.silence.answered();
            self.answered(frame.id, frame.reply);
        }
        self.received[channel as usize].drain(..consumed);
        Ok(())
    }

    /// Takes received bytes while the connection begins. Returns the reply to hello or to the request for a lane once it is
    /// whole. That may be an error about the whole connection, which has no request's id.
    ///
    /// # Errors
    /// As [`Conversation::receive`].
    pub(in crate::client) fn receive_beginning(&mut self, bytes: &[u8], now: Instant) -> Result<Option<Reply>> {
        let received = &mut self.received[Channel::Socket as usize];
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
                    self.in_flight.remove(&id);
                    self.watch = None;
                }
            }
            return;
        }
        let Some(request) = self.in_flight.remove(&id) else { return };
        if let (Err(_), Leftover::Booking { request_id, attempt }) = (&reply, request.leftover) {
            // The reply cannot be read, so the booking is freed by its name.
            self.count(ClientCounter::BookingsGivenBack);
            self.send_report(
                Report { name: BookingName::Request { request_id, attempt }, kind: ReportKind::Free },
                None,
            );
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

    /// Frees the bookings of a reply that no call takes: nothing else would free them.
    pub(in crate::client) fn free_unclaimed(&mut self, reply: &RunReply) {
        let Reply::Route(route) = &reply.reply else { return };
        if !self.is_run(reply.instance_id) {
            return;
        }
        for handle in [route.booking, route.prefill_booking].into_iter().flatten() {
            self.count(ClientCounter::BookingsGivenBack);
            let report = Report { name: BookingName::Handle(handle), kind: ReportKind::Free };
            match self.phase {
                Phase::Open => self.send_report(report, None),
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
pub(in crate::client) enum BookingName {
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
pub(in crate::client) enum ReportKind {
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
pub(in crate::client) struct Report {
    pub(in crate::client) name: BookingName,
    pub(in crate::client) kind: ReportKind,
}

impl Report {
    /// Appends the report as a frame.
    pub(in crate::client) fn encode(&self, encoder: &mut RequestEncoder, id: CorrelationId, out: &mut Vec<u8>) {
        let booking = self.name.as_ref();
        match self.kind {
            ReportKind::PrefillComplete { prefill_us } => encoder.prefill_complete(id, &booking, prefill_us, out),
            ReportKind::OutputProgress { output_tokens } => encoder.output_progress(id, &booking, output_tokens, out),
            ReportKind::Served { worker } => encoder.served(id, &booking, worker, out),
            ReportKind::Free => encoder.free(id, &booking, out),
        }
    }
}

/// A copy of an error, for calls that fail later for the same reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::client) struct StoredError {
    kind: Kind,
    message: String,
    remedy: String,
}

impl StoredError {
    pub(in crate::client) fn of(error: &Error) -> Self {
        let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
        let message = format!("{}{cause}", error.message());
        Self { kind: error.kind(), message, remedy: error.remedy().to_owned() }
    }

    pub(in crate::client) fn error(&self) -> Error {
        Error::new(self.kind, self.message.as_str(), self.remedy.as_str())
    }

    /// The error of a call that needs a connection, if this is why there is none.
    pub(in crate::client) fn unreachable(&self) -> Error {
        let what = format!("the daemon cannot be reached: {}", self.message);
        Error::new(Kind::Connection, what, self.remedy.as_str())
    }
}

#[cfg(test)]
mod tests;
