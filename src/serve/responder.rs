//! Frames of the routing socket ↔ calls of a [`Service`], and what is counted of them.

use std::sync::Arc;

use super::connection::{Carried, Peer, Phase, Respond};
use super::lane::CoreLanes;
use super::request_queue::Parking;
use super::request_queue::{Booked, LateBox};
use super::service::{HelloInfo, Routed, Service};
use super::watch::Watches;
use crate::error::{Error, Kind, Result};
use crate::fleet::FleetTable;
use crate::hash::TOKEN_BYTES;
use crate::ids::{CorrelationId, SpaceId};
use crate::limits::{CANDIDATES_MAX, PROMPT_TOKENS_MAX, REQUEST_OVERHEAD_BYTES_MAX, WORKERS_PAGE_MAX};
use crate::load::{BookingOutcome, BookingRef, SessionId};
use crate::metrics::{CoreCounter, CounterSet};
use crate::route::{Decision, MatchStatus, PotentialLoads, ReplyNotes, RouteRequest};
use crate::wire::{
    FrameHeader, FrameKind, Hello, HelloFacts, ReplyEncoder, Request, RequestScratch, ServerLimits, decode_request,
    features,
};

/// Answers a core's connections. Everything it needs per request is kept from one to the next.
#[derive(Debug)]
pub struct RoutingResponder<S> {
    pub(super) service: S,
    counters: Arc<CounterSet<CoreCounter>>,
    frame_body_bytes_max: u32,
    /// `None` while a request borrows it.
    scratch: Option<Box<RequestScratch>>,
    decision: Decision,
    potential: PotentialLoads,
    /// Done since a turn was last charged for it.
    work: u64,
    pub(super) encoder: ReplyEncoder,
    pub(super) watches: Watches,
    pub(super) lanes: CoreLanes,
    /// Where requests wait; `None` = nowhere.
    pub(super) parking: Option<Parking>,
}

/// When a request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Replied {
    Now,
    Later,
}

impl<S: Service> RoutingResponder<S> {
    /// Answers by `service`; `frame_body_bytes_max` is what hello says of the connections' bound.
    #[must_use]
    pub fn new(service: S, counters: Arc<CounterSet<CoreCounter>>, frame_body_bytes_max: u32) -> Self {
        let lanes = CoreLanes::new(service.lanes());
        Self {
            service,
            counters,
            frame_body_bytes_max,
            scratch: None,
            decision: Decision::default(),
            potential: PotentialLoads::default(),
            work: 0,
            encoder: ReplyEncoder::default(),
            watches: Watches::default(),
            lanes,
            parking: None,
        }
    }

    /// The same as core number `core`, which is told by `late`: its requests may wait, if the service has room for that.
    pub(super) fn on_core(mut self, core: usize, late: &Arc<LateBox>) -> Self {
        self.parking = self.service.waiting_room().map(|room| Parking::new(room, core, late));
        self
    }

    /// What the last decision booked, for either half of the request.
    pub(super) fn booked(&self) -> Booked {
        [self.decision.booking, self.decision.prefill.as_ref().and_then(|prefill| prefill.booking)]
    }

    /// All the work that no turn was charged for.
    pub(super) fn gather_work(&mut self) -> u64 {
        self.work += self.service.take_work();
        self.work
    }

    /// What is counted.
    #[must_use]
    pub fn counters(&self) -> &CounterSet<CoreCounter> {
        &self.counters
    }

    fn answer(&mut self, peer: &mut Peer, header: &FrameHeader, body: &[u8], out: &mut Vec<u8>) -> Result<Replied> {
        require_hello(peer, header)?;
        // Taken out for the time of the request, which borrows it.
        let mut scratch = self.scratch.take().unwrap_or_default();
        let answered = decode_request(header.kind, body, &mut scratch)
            .and_then(|request| self.dispatch(peer, (header, body), &request, out));
        self.scratch = Some(scratch);
        answered
    }

    fn dispatch(
        &mut self,
        peer: &mut Peer,
        (header, body): (&FrameHeader, &[u8]),
        request: &Request<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Replied> {
        let id = header.correlation_id;
        if let Request::Hello(hello) = request {
            return self.hello(peer, id, hello, out).map(|()| Replied::Now);
        }
        let Phase::Open(Some(session)) = peer.phase else { return Err(hello_required()) };
        match request {
            // Answered above.
            Request::Hello(_) => {}
            Request::Route(route) => {
                if let Routed::Busy(wait) = self.route(session, id, route, out)? {
                    return self.park(peer, session, (header, body), route, &wait).map(|()| Replied::Later);
                }
            }
            Request::Overlap(route) => {
                self.service.overlap(session, route, &mut self.decision)?;
                self.encoder.overlap(id, &self.decision, out);
            }
            Request::PotentialLoads(route) => {
                self.service.potential_loads(route, &mut self.potential)?;
                self.encoder.potential_loads(id, &self.potential, out);
            }
            Request::Workers { space, cursor, limit } => {
                let fleet = self.service.fleet();
                require_space(&fleet, *space)?;
                self.encoder.workers(id, &fleet, *space, (*cursor, *limit), out);
            }
            Request::Watch { space, fleet_version_seen, page_limit } => {
                let watched = (*space, *page_limit);
                return self.watch(peer.connection, id, watched, *fleet_version_seen, out);
            }
            Request::OpenLane(asked) => self.open_lane(peer, id, *asked, out)?,
            told => self.told(session, id, told, out)?,
        }
        Ok(Replied::Now)
    }

    /// What gateways tell of bookings and of workers; who administers is sent elsewhere.
    fn told(&mut self, session: SessionId, id: CorrelationId, told: &Request<'_>, out: &mut Vec<u8>) -> Result<()> {
        match told {
            Request::PrefillComplete { booking, prefill_us } => {
                self.prefill_complete(session, id, (booking, *prefill_us), out)?;
            }
            Request::OutputProgress { booking, output_tokens } => {
                let outcome = self.service.output_progress(session, booking, *output_tokens)?;
                self.count_outcome(outcome);
                self.encoder.output_progress(id, outcome, self.service.hello().instance_id, out);
            }
            Request::Served { booking, worker } => {
                let left = self.about_to_end(session, booking);
                let outcome = self.service.served(session, booking, *worker)?;
                self.count_outcome(outcome);
                if outcome == BookingOutcome::Applied {
                    self.counters.bump(CoreCounter::BookingsMoved);
                }
                self.encoder.served(id, outcome, self.service.hello().instance_id, out);
                self.on_room(left);
            }
            Request::ReportLoad { space, worker, load } => {
                let accepted = self.service.report_load(session, *space, *worker, *load)?;
                self.counters.bump(CoreCounter::LoadsReported);
                self.encoder.report_load(id, accepted, out);
            }
            Request::ReportFailure { space, worker, reason } => {
                let back_off_ms = self.service.report_failure(session, *space, *worker, reason)?;
                self.counters.bump(CoreCounter::FailuresReported);
                self.encoder.report_failure(id, back_off_ms, out);
            }
            Request::Free(booking) => self.free(session, id, booking, out)?,
            Request::Status { .. } | Request::ChangeWorker(_) | Request::Reset(_) | Request::SetPolicy(_) => {
                return Err(self.admin_only());
            }
            // Answered where this is called.
            Request::Hello(_)
            | Request::Route(_)
            | Request::Overlap(_)
            | Request::PotentialLoads(_)
            | Request::Workers { .. }
            | Request::Watch { .. }
            | Request::OpenLane(_) => {}
        }
        Ok(())
    }

    fn prefill_complete(
        &mut self,
        session: SessionId,
        id: CorrelationId,
        (booking, prefill_us): (&BookingRef<'_>, u64),
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let worker = self.about_to_end(session, booking);
        let outcome = self.service.prefill_complete(session, booking, prefill_us)?;
        self.count_outcome(outcome);
        self.encoder.prefill_complete(id, outcome, self.service.hello().instance_id, out);
        self.on_room(worker);
        Ok(())
    }

    fn free(
        &mut self,
        session: SessionId,
        id: CorrelationId,
        booking: &BookingRef<'_>,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let worker = self.about_to_end(session, booking);
        let outcome = self.service.free(session, booking)?;
        self.count_outcome(outcome);
        if outcome == BookingOutcome::Applied {
            self.counters.bump(CoreCounter::BookingsFreed);
        }
        self.encoder.free(id, outcome, self.service.hello().instance_id, out);
        self.on_room(worker);
        Ok(())
    }

    fn hello(&mut self, peer: &mut Peer, id: CorrelationId, hello: &Hello<'_>, out: &mut Vec<u8>) -> Result<()> {
        if peer.phase != Phase::HelloAwaited {
            return Err(hello_again());
        }
        let version = hello.negotiate()?;
        let session = self.service.session_opened(hello.session, peer.uid)?;
        peer.phase = Phase::Open(Some(session));
        tracing::debug!(client = hello.client_name, uid = peer.uid, session = session.0, "hello");
        let info = self.service.hello();
        let mut facts = hello_facts(version, &info, self.frame_body_bytes_max);
        if self.lanes.are_on() {
            facts.features |= features::LANES;
        }
        self.encoder.hello(id, &facts, &self.service.fleet(), out);
        Ok(())
    }

    /// Decides, and appends the reply unless everybody is busy.
    pub(super) fn route(
        &mut self,
        session: SessionId,
        id: CorrelationId,
        request: &RouteRequest<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Routed> {
        if let busy @ Routed::Busy(_) = self.service.route(session, request, &mut self.decision)? {
            return Ok(busy);
        }
        let (decision, counters) = (&self.decision, &self.counters);
        counters.bump(CoreCounter::Routes);
        counters.add(CoreCounter::RequestBlocks, u64::from(decision.request_blocks));
        match decision.candidates.first() {
            Some(chosen) => counters.add(CoreCounter::ChosenOverlapBlocks, u64::from(chosen.overlap.total())),
            None => counters.bump(CoreCounter::RoutesNobody),
        }
        let seen = [
            (CoreCounter::RoutesPinnedNotAllowed, decision.no_worker == Some(Kind::PinnedNotAllowed)),
            (CoreCounter::RoutesPinnedBusy, decision.no_worker == Some(Kind::PinnedBusy)),
            (CoreCounter::RoutesAllBusy, decision.no_worker == Some(Kind::AllBusy)),
            (CoreCounter::RoutesAllFiltered, decision.no_worker == Some(Kind::AllFiltered)),
            (CoreCounter::RoutesNobodyAvailable, decision.no_worker == Some(Kind::NobodyAvailable)),
            (CoreCounter::RoutesUnmatchable, decision.matched == MatchStatus::Unmatchable),
            (CoreCounter::RoutesSchemeUnknown, decision.notes.contains(ReplyNotes::SCHEME_UNKNOWN)),
            (CoreCounter::RoutesAllDown, decision.notes.contains(ReplyNotes::ALL_DOWN)),
            (CoreCounter::RoutesContended, decision.notes.contains(ReplyNotes::READ_CONTENDED)),
            (CoreCounter::Bookings, decision.booking.is_some()),
            (CoreCounter::Bookings, decision.prefill.as_ref().is_some_and(|prefill| prefill.booking.is_some())),
        ];
        for (counter, _) in seen.iter().filter(|(_, is_so)| *is_so) {
            counters.bump(*counter);
        }
        self.encoder.route(id, decision, request.explain, &self.service.fleet(), out);
        Ok(Routed::Decided)
    }

    /// Appends an error, and counts it.
    pub(super) fn refuse_with(&mut self, id: CorrelationId, error: &Error, out: &mut Vec<u8>) {
        self.counters.bump(CoreCounter::Errors);
        if error.kind() == Kind::SchemeMismatch {
            self.counters.bump(CoreCounter::RequestsSchemeMismatch);
        }
        tracing::debug!(%error, "a request is refused");
        self.encoder.error(id, error, out);
    }

    fn count_outcome(&self, outcome: BookingOutcome) {
        if outcome == BookingOutcome::Unknown {
            self.counters.bump(CoreCounter::BookingsUnknown);
        }
    }

    fn admin_only(&self) -> Error {
        let path = self.service.hello().admin_socket.map(|path| path.display().to_string());
        let remedy = path.map_or("start the daemon with an admin socket".to_owned(), |path| format!("ask on {path}"));
        Error::new(Kind::AdminOnly, "administration is answered on the admin socket only", remedy)
    }
}

impl<S: Service> Respond for RoutingResponder<S> {
    fn respond(&mut self, peer: &mut Peer, header: &FrameHeader, body: &[u8], out: &mut Vec<u8>) {
        match self.answer(peer, header, body, out) {
            Ok(Replied::Now) => self.counters.bump(CoreCounter::Requests),
            // Counted where it is answered.
            Ok(Replied::Later) => {}
            Err(error) => self.refuse(header.correlation_id, &error, out),
        }
    }

    fn refuse(&mut self, id: CorrelationId, error: &Error, out: &mut Vec<u8>) {
        self.counters.bump(CoreCounter::Requests);
        self.refuse_with(id, error, out);
    }

    fn take_work(&mut self) -> u64 {
        self.gather_work();
        std::mem::take(&mut self.work)
    }

    fn turn_ended_by_work(&mut self) {
        self.counters.bump(CoreCounter::TurnsEndedByWork);
    }

    fn closed(&mut self, peer: &mut Peer) {
        self.cancel_parked(peer.connection);
        self.watches.end(peer.connection);
        if let Phase::Open(Some(session)) = std::mem::replace(&mut peer.phase, Phase::HelloAwaited)
            // The session of a lane is its connection's, which is still there.
            && peer.carried == Carried::Socket
        {
            self.service.session_closed(session);
        }
    }
}

/// Refuses a space that there is not; `None` = every space.
pub(super) fn require_space(fleet: &FleetTable, space: Option<SpaceId>) -> Result<()> {
    if space.is_none_or(|space| fleet.space(space).is_some()) {
        return Ok(());
    }
    Err(Error::new(Kind::UnknownSpace, "no such space", "ask hello for the spaces there are"))
}

/// Lets nothing but hello through until it was said.
pub(super) fn require_hello(peer: &Peer, header: &FrameHeader) -> Result<()> {
    let allowed = peer.phase != Phase::HelloAwaited || header.kind == FrameKind::Hello as u8;
    if allowed { Ok(()) } else { Err(hello_required()) }
}

fn hello_required() -> Error {
    Error::new(
        Kind::HelloRequired,
        "the first request of a connection must be hello",
        "send hello and wait for its reply",
    )
}

pub(super) fn hello_again() -> Error {
    Error::new(Kind::InvalidArgument, "hello was said on this connection already", "open another connection")
}

pub(super) fn hello_facts<'a>(version: u16, info: &HelloInfo<'a>, frame_body_bytes_max: u32) -> HelloFacts<'a> {
    HelloFacts {
        version,
        instance_id: info.instance_id,
        limits: ServerLimits {
            frame_body_bytes_max,
            prompt_tokens_max: prompt_tokens_max(frame_body_bytes_max),
            candidates_max: CANDIDATES_MAX as u32,
            workers_page_max: WORKERS_PAGE_MAX as u32,
            bookings_per_session_max: info.bookings_per_session_max,
        },
        // Whoever has lanes to give says so.
        features: features::SERVED & !features::LANES,
        admin_socket: info.admin_socket.and_then(std::path::Path::to_str),
    }
}

/// Tokens that fit a body of `frame_body_bytes_max`, with room for everything else a request may carry.
fn prompt_tokens_max(frame_body_bytes_max: u32) -> u32 {
    let tokens = frame_body_bytes_max.saturating_sub(REQUEST_OVERHEAD_BYTES_MAX) / TOKEN_BYTES as u32;
    tokens.min(PROMPT_TOKENS_MAX as u32)
}
