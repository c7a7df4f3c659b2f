//! The dispatcher: frames of the routing socket ↔ calls of a [`Service`], and their counters.
//!
//! [`RoutingResponder::dispatch`] is one match over all requests, without a wildcard. Each arm returns an [`Answer`],
//! and an answer with a reply exists only once the reply is encoded. So a request without an arm, or an arm without an
//! answer, does not compile.

use std::sync::Arc;

use super::connection::{Peer, Phase, Respond, TransportKind};
use super::lane::CoreLanes;
use super::request_queue::{Booked, CoreQueue, QueueInbox};
use super::service::{HelloInfo, Routed, Service};
use super::watch::Watches;
use crate::error::{Error, Kind, Result};
use crate::fleet::FleetTable;
use crate::hash::TOKEN_BYTES;
use crate::ids::{CorrelationId, SpaceId, Worker};
use crate::limits::{CANDIDATES_MAX, PROMPT_TOKENS_MAX, REQUEST_OVERHEAD_BYTES_MAX, WORKERS_PAGE_MAX};
use crate::load::{BookingOutcome, BookingRef, SessionId};
use crate::metrics::{CoreCounter, CounterSet};
use crate::queue::Ticket;
use crate::route::{Decision, MatchStatus, PotentialLoads, ReplyNotes, RouteRequest, Wait};
use crate::wire::{
    FrameHeader, FrameKind, Hello, HelloFacts, ReplyEncoder, Request, RequestScratch, ServerLimits, decode_request,
    features,
};

pub(super) use encoded::Encoded;

/// Keeps the field of [`Encoded`] private.
mod encoded {
    /// Proof that a reply was appended to the output.
    #[derive(Debug)]
    #[must_use]
    pub(in crate::serve) struct Encoded(());

    impl Encoded {
        /// Appends a reply to `out` by `encode`.
        pub(in crate::serve) fn reply(out: &mut Vec<u8>, encode: impl FnOnce(&mut Vec<u8>)) -> Self {
            let bytes_before = out.len();
            encode(out);
            debug_assert!(out.len() > bytes_before, "a reply has bytes");
            Self(())
        }
    }
}

/// The answer to a request. Every message of the protocol has a reply, now or later.
#[derive(Debug)]
#[must_use]
pub(super) enum Answer {
    /// The reply is appended to the output.
    Reply(Encoded),
    /// The request is queued, and the queue sends the reply.
    Queued,
    /// The connection's watch sends a page when the fleet changes.
    Watching,
}

impl Answer {
    fn reply(out: &mut Vec<u8>, encode: impl FnOnce(&mut Vec<u8>)) -> Result<Self> {
        Ok(Self::Reply(Encoded::reply(out, encode)))
    }
}

/// The outcome of a decision.
pub(super) enum RouteOutcome {
    /// The reply is appended to the output.
    Replied(Encoded),
    /// Every worker is busy, and nothing is appended.
    Busy(Box<Wait>),
}

/// Answers the requests of a core's connections. Its buffers are reused from one request to the next.
#[derive(Debug)]
pub struct RoutingResponder<S> {
    pub(super) service: S,
    pub(super) counters: Arc<CounterSet<CoreCounter>>,
    frame_body_bytes_max: u32,
    /// `None` while a request borrows it.
    scratch: Option<Box<RequestScratch>>,
    decision: Decision,
    potential: PotentialLoads,
    /// Work done since a quantum was last charged for it.
    work: u64,
    pub(super) encoder: ReplyEncoder,
    pub(super) watches: Watches,
    pub(super) lanes: CoreLanes,
    /// `None` = requests cannot be queued.
    pub(super) queue: Option<CoreQueue>,
}

impl<S: Service> RoutingResponder<S> {
    /// Answers by `service`. The hello reply states `frame_body_bytes_max` as the limit of the connections' frames.
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
            queue: None,
        }
    }

    /// The same for core number `core`, whose messages about queued requests go to `inbox`. Its requests can be queued if
    /// the service has a queue.
    pub(super) fn on_core(mut self, core: usize, inbox: &Arc<QueueInbox>) -> Self {
        self.queue = self.service.request_queue().map(|queue| CoreQueue::new(queue, core, inbox));
        self
    }

    /// The bookings of the last decision.
    pub(super) fn booked(&self) -> Booked {
        [self.decision.booking, self.decision.prefill.as_ref().and_then(|prefill| prefill.booking)]
    }

    /// All work for which no quantum was charged.
    pub(super) fn gather_work(&mut self) -> u64 {
        self.work += self.service.take_work();
        self.work
    }

    /// The core's counters.
    #[must_use]
    pub fn counters(&self) -> &CounterSet<CoreCounter> {
        &self.counters
    }

    fn answer(&mut self, peer: &mut Peer, header: &FrameHeader, body: &[u8], out: &mut Vec<u8>) -> Result<Answer> {
        require_hello(peer, header)?;
        // Taken out while the request borrows it.
        let mut scratch = self.scratch.take().unwrap_or_default();
        let answered = decode_request(header.kind, body, &mut scratch)
            .and_then(|request| self.dispatch(peer, (header, body), &request, out));
        self.scratch = Some(scratch);
        answered
    }

    /// Answers one request.
    fn dispatch(
        &mut self,
        peer: &mut Peer,
        (header, body): (&FrameHeader, &[u8]),
        request: &Request<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Answer> {
        let id = header.correlation_id;
        let session = match peer.phase {
            Phase::Open(Some(session)) => Ok(session),
            Phase::Open(None) | Phase::HelloAwaited => Err(NoHello),
        };
        match request {
            Request::Hello(hello) => self.hello(peer, id, hello, out),
            Request::Route(route) => match self.route(session?, id, route, out)? {
                RouteOutcome::Replied(reply) => Ok(Answer::Reply(reply)),
                RouteOutcome::Busy(wait) => {
                    self.enqueue(peer, session?, (header, body), route, &wait).map(|_: Ticket| Answer::Queued)
                }
            },
            Request::Overlap(route) => {
                self.service.overlap(session?, route, &mut self.decision)?;
                Answer::reply(out, |out| self.encoder.overlap(id, &self.decision, out))
            }
            Request::PotentialLoads(route) => {
                session?;
                self.service.potential_loads(route, &mut self.potential)?;
                Answer::reply(out, |out| self.encoder.potential_loads(id, &self.potential, out))
            }
            Request::Workers { space, cursor, limit } => {
                session?;
                let fleet = self.service.fleet();
                require_space(&fleet, *space)?;
                Answer::reply(out, |out| self.encoder.workers(id, &fleet, *space, (*cursor, *limit), out))
            }
            Request::Watch { space, fleet_version_seen, page_limit } => {
                session?;
                self.watch(peer.connection, id, (*space, *page_limit), *fleet_version_seen, out)
            }
            Request::OpenLane(asked) => {
                session?;
                self.open_lane(peer, id, *asked, out).map(Answer::Reply)
            }
            Request::PrefillComplete { booking, prefill_us } => {
                self.prefill_complete(session?, id, (booking, *prefill_us), out)
            }
            Request::OutputProgress { booking, output_tokens } => {
                let outcome = self.service.output_progress(session?, booking, *output_tokens)?;
                self.count_outcome(outcome);
                let instance_id = self.service.hello().instance_id;
                Answer::reply(out, |out| self.encoder.output_progress(id, outcome, instance_id, out))
            }
            Request::Served { booking, worker } => self.served(session?, id, (booking, *worker), out),
            Request::ReportLoad { space, worker, load } => {
                let accepted = self.service.report_load(session?, *space, *worker, *load)?;
                self.counters.bump(CoreCounter::LoadsReported);
                Answer::reply(out, |out| self.encoder.report_load(id, accepted, out))
            }
            Request::ReportFailure { space, worker, reason } => {
                let back_off_ms = self.service.report_failure(session?, *space, *worker, reason)?;
                self.counters.bump(CoreCounter::FailuresReported);
                Answer::reply(out, |out| self.encoder.report_failure(id, back_off_ms, out))
            }
            Request::Free(booking) => self.free(session?, id, booking, out),
            Request::Status { .. } | Request::ChangeWorker(_) | Request::Reset(_) | Request::SetPolicy(_) => {
                session?;
                Err(self.admin_only())
            }
        }
    }

    fn prefill_complete(
        &mut self,
        session: SessionId,
        id: CorrelationId,
        (booking, prefill_us): (&BookingRef<'_>, u64),
        out: &mut Vec<u8>,
    ) -> Result<Answer> {
        let worker = self.worker_to_free(session, booking);
        let outcome = self.service.prefill_complete(session, booking, prefill_us)?;
        self.count_outcome(outcome);
        let instance_id = self.service.hello().instance_id;
        let answer = Answer::reply(out, |out| self.encoder.prefill_complete(id, outcome, instance_id, out));
        self.on_room(worker);
        answer
    }

    fn served(
        &mut self,
        session: SessionId,
        id: CorrelationId,
        (booking, worker): (&BookingRef<'_>, Worker),
        out: &mut Vec<u8>,
    ) -> Result<Answer> {
        let left = self.worker_to_free(session, booking);
        let outcome = self.service.served(session, booking, worker)?;
        self.count_outcome(outcome);
        if outcome == BookingOutcome::Applied {
            self.counters.bump(CoreCounter::BookingsMoved);
        }
        let instance_id = self.service.hello().instance_id;
        let answer = Answer::reply(out, |out| self.encoder.served(id, outcome, instance_id, out));
        self.on_room(left);
        answer
    }

    fn free(
        &mut self,
        session: SessionId,
        id: CorrelationId,
        booking: &BookingRef<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Answer> {
        let worker = self.worker_to_free(session, booking);
        let outcome = self.service.free(session, booking)?;
        self.count_outcome(outcome);
        if outcome == BookingOutcome::Applied {
            self.counters.bump(CoreCounter::BookingsFreed);
        }
        let instance_id = self.service.hello().instance_id;
        let answer = Answer::reply(out, |out| self.encoder.free(id, outcome, instance_id, out));
        self.on_room(worker);
        answer
    }

    fn hello(&mut self, peer: &mut Peer, id: CorrelationId, hello: &Hello<'_>, out: &mut Vec<u8>) -> Result<Answer> {
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
        Answer::reply(out, |out| self.encoder.hello(id, &facts, &self.service.fleet(), out))
    }

    /// Decides a request, and appends the reply unless every worker is busy.
    pub(super) fn route(
        &mut self,
        session: SessionId,
        id: CorrelationId,
        request: &RouteRequest<'_>,
        out: &mut Vec<u8>,
    ) -> Result<RouteOutcome> {
        if let Routed::Busy(wait) = self.service.route(session, request, &mut self.decision)? {
            return Ok(RouteOutcome::Busy(wait));
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
        let explain = request.explain;
        let reply = Encoded::reply(out, |out| {
            self.encoder.route(id, &self.decision, explain, &self.service.fleet(), out);
        });
        Ok(RouteOutcome::Replied(reply))
    }

    /// Appends an error reply, and counts it.
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
        let remedy = path.map_or("start the daemon with an admin socket".to_owned(), |path| {
            format!("send it to the admin socket {path}")
        });
        Error::new(Kind::AdminOnly, "the routing socket does not answer administration", remedy)
    }
}

impl<S: Service> Respond for RoutingResponder<S> {
    fn respond(&mut self, peer: &mut Peer, header: &FrameHeader, body: &[u8], out: &mut Vec<u8>) {
        match self.answer(peer, header, body, out) {
            Ok(Answer::Reply(_) | Answer::Watching) => self.counters.bump(CoreCounter::Requests),
            // Counted when the reply is sent.
            Ok(Answer::Queued) => {}
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

    fn quantum_ended_by_work(&mut self) {
        self.counters.bump(CoreCounter::TurnsEndedByWork);
    }

    fn closed(&mut self, peer: &mut Peer) {
        self.cancel_queued(peer.connection);
        self.watches.end(peer.connection);
        if let Phase::Open(Some(session)) = std::mem::replace(&mut peer.phase, Phase::HelloAwaited)
            // A lane shares the session of its connection, which is still open.
            && peer.transport == TransportKind::Socket
        {
            self.service.session_closed(session);
        }
    }
}

/// Refuses an unknown space; `None` = every space.
pub(super) fn require_space(fleet: &FleetTable, space: Option<SpaceId>) -> Result<()> {
    if space.is_none_or(|space| fleet.space(space).is_some()) {
        return Ok(());
    }
    Err(Error::new(Kind::UnknownSpace, "no such space", "the hello reply lists the spaces"))
}

/// Refuses every request but hello until hello was said.
pub(super) fn require_hello(peer: &Peer, header: &FrameHeader) -> Result<()> {
    let allowed = peer.phase != Phase::HelloAwaited || header.kind == FrameKind::Hello as u8;
    if allowed { Ok(()) } else { Err(NoHello.into()) }
}

/// The connection has no session yet.
#[derive(Clone, Copy)]
struct NoHello;

impl From<NoHello> for Error {
    fn from(_: NoHello) -> Self {
        Self::new(
            Kind::HelloRequired,
            "the first request of a connection must be hello",
            "send hello and wait for its reply",
        )
    }
}

pub(super) fn hello_again() -> Error {
    Error::new(Kind::InvalidArgument, "this connection has sent hello already", "open another connection")
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
        // A responder with lanes adds the bit.
        features: features::SERVED & !features::LANES,
        admin_socket: info.admin_socket.and_then(std::path::Path::to_str),
    }
}

/// Tokens that fit a body of `frame_body_bytes_max`, beside everything else that a request may hold.
fn prompt_tokens_max(frame_body_bytes_max: u32) -> u32 {
    let tokens = frame_body_bytes_max.saturating_sub(REQUEST_OVERHEAD_BYTES_MAX) / TOKEN_BYTES as u32;
    tokens.min(PROMPT_TOKENS_MAX as u32)
}
