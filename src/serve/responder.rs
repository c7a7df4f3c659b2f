//! The dispatcher: frames of the routing socket ↔ calls of a [`RequestHandler`].
//!
//! [`RoutingResponder::dispatch`] is one match over all requests, without a wildcard. Each arm returns an [`Answer`],
//! and an answer with a reply exists only once the reply is encoded. So a request without an arm, or an arm without an
//! answer, does not compile.

use std::sync::Arc;

use super::connection::{Peer, Phase, Respond, TransportKind};
use super::lane::{CoreLanes, Lanes};
use super::watch::Watches;
use crate::error::{Error, Kind, Result};
use crate::fleet::FleetTable;
use crate::hash::TOKEN_BYTES;
use crate::ids::{CorrelationId, SpaceId};
use crate::limits::{CANDIDATES_MAX, PROMPT_TOKENS_MAX, REQUEST_OVERHEAD_BYTES_MAX, WORKERS_PAGE_MAX};
use crate::metrics::{CoreCounter, CounterSet};
use crate::requests::{HelloInfo, KeptRequest, PendingReply, QueueInbox, Replied, RequestHandler, Requester, Service};
use crate::route::RouteRequest;
use crate::watchdog::{Activity, ThreadMark};
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
    /// The request waits in a queue, from which its reply is sent later.
    Queued,
    /// The connection's watch sends a page when the fleet changes.
    Watching,
}

impl Answer {
    fn reply(out: &mut Vec<u8>, encode: impl FnOnce(&mut Vec<u8>)) -> Result<Self> {
        Ok(Self::Reply(Encoded::reply(out, encode)))
    }
}

/// Answers the frames of a core's connections. Its buffers are reused from one request to the next.
#[derive(Debug)]
pub struct RoutingResponder<S> {
    pub(super) requests: RequestHandler<S>,
    frame_body_bytes_max: u32,
    /// `None` while a request borrows it.
    scratch: Option<Box<RequestScratch>>,
    pub(super) encoder: ReplyEncoder,
    pub(super) watches: Watches,
    pub(super) lanes: CoreLanes,
    mark: Arc<ThreadMark>,
}

/// The body of a route frame, kept while its request waits.
#[derive(Debug)]
struct RouteBody(Box<[u8]>);

impl KeptRequest for RouteBody {
    fn bytes(&self) -> usize {
        self.0.len()
    }

    fn read(&self, decide: &mut dyn FnMut(&RouteRequest<'_>)) -> Result<()> {
        let mut scratch = RequestScratch::default();
        match decode_request(FrameKind::Route as u8, &self.0, &mut scratch)? {
            Request::Route(request) => decide(&request),
            _ => return Err(Error::new(Kind::Internal, "the queued frame is no route", "report it")),
        }
        Ok(())
    }
}

impl<S: Service> RoutingResponder<S> {
    /// Answers by `service`, without lanes. The hello reply states `frame_body_bytes_max` as the limit of the
    /// connections' frames.
    #[must_use]
    pub fn new(service: S, counters: Arc<CounterSet<CoreCounter>>, frame_body_bytes_max: u32) -> Self {
        Self {
            requests: RequestHandler::new(service, counters),
            frame_body_bytes_max,
            scratch: None,
            encoder: ReplyEncoder::default(),
            watches: Watches::default(),
            lanes: CoreLanes::new(Arc::new(Lanes::new(0, 0))),
            mark: Arc::new(ThreadMark::new("core", true)),
        }
    }

    /// The same for the thread of this mark.
    pub(super) fn marking(self, mark: &Arc<ThreadMark>) -> Self {
        Self { mark: Arc::clone(mark), ..self }
    }

    /// The same for core number `core` with its lanes. Messages about its queued requests go to `inbox`.
    pub(super) fn on_core(mut self, core: usize, inbox: &Arc<QueueInbox>, lanes: Option<Arc<Lanes>>) -> Self {
        self.requests = self.requests.on_core(core, inbox);
        if let Some(lanes) = lanes {
            self.lanes = CoreLanes::new(lanes);
        }
        self
    }

    /// The core's counters.
    #[must_use]
    pub fn counters(&self) -> &CounterSet<CoreCounter> {
        self.requests.counters()
    }

    fn answer(&mut self, peer: &mut Peer, header: &FrameHeader, body: &[u8], out: &mut Vec<u8>) -> Result<Answer> {
        require_hello(peer, header)?;
        self.mark.enter(Activity::Deciding);
        // Taken out while the request borrows it.
        let mut scratch = self.scratch.take().unwrap_or_default();
        let answered = {
            // Matched by reference: a request is large, and costs a copy each time that it moves.
            let decoded = decode_request(header.kind, body, &mut scratch);
            match decoded {
                Ok(ref request) => self.dispatch(peer, (header, body), request, out),
                Err(error) => Err(error),
            }
        };
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
        let session = if let Phase::Open(Some(session)) = peer.phase { Ok(session) } else { Err(NoHello) };
        let Self { requests, encoder, .. } = self;
        let instance_id = requests.service().hello().instance_id;
        match request {
            Request::Hello(hello) => self.hello(peer, id, hello, out),
            Request::Route(route) => {
                let from = Requester { connection: peer.connection, session: session?, uid: peer.uid, id };
                self.route(&from, route, body, out)
            }
            Request::Overlap(route) => {
                let decision = requests.overlap(session?, route)?;
                Answer::reply(out, |out| encoder.overlap(id, decision, out))
            }
            Request::PotentialLoads(route) => {
                session?;
                let potential = requests.potential_loads(route)?;
                Answer::reply(out, |out| encoder.potential_loads(id, potential, out))
            }
            Request::Workers { space, cursor, limit } => {
                session?;
                self.workers(id, *space, (*cursor, *limit), out)
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
                let outcome = requests.prefill_complete(session?, booking, *prefill_us)?;
                Answer::reply(out, |out| encoder.prefill_complete(id, outcome, instance_id, out))
            }
            Request::OutputProgress { booking, output_tokens } => {
                let outcome = requests.output_progress(session?, booking, *output_tokens)?;
                Answer::reply(out, |out| encoder.output_progress(id, outcome, instance_id, out))
            }
            Request::Served { booking, worker } => {
                let outcome = requests.served(session?, booking, *worker)?;
                Answer::reply(out, |out| encoder.served(id, outcome, instance_id, out))
            }
            Request::ReportLoad { space, worker, load } => {
                let accepted = requests.report_load(session?, *space, *worker, *load)?;
                Answer::reply(out, |out| encoder.report_load(id, accepted, out))
            }
            Request::ReportFailure { space, worker, reason } => {
                let back_off_ms = requests.report_failure(session?, *space, *worker, reason)?;
                Answer::reply(out, |out| encoder.report_failure(id, back_off_ms, out))
            }
            Request::Free(booking) => {
                let outcome = requests.free(session?, booking)?;
                Answer::reply(out, |out| encoder.free(id, outcome, instance_id, out))
            }
            Request::Admin(_) => {
                session?;
                Err(self.admin_only())
            }
        }
    }

    /// Answers a route, or leaves it in the queue with its frame's body.
    fn route(&mut self, from: &Requester, route: &RouteRequest<'_>, body: &[u8], out: &mut Vec<u8>) -> Result<Answer> {
        let Self { requests, encoder, .. } = self;
        match requests.route(from, route, || Box::new(RouteBody(body.into())))? {
            Replied::Later => Ok(Answer::Queued),
            Replied::Now => {
                let decision = requests.decision();
                requests.service().with_fleet(|fleet| {
                    Answer::reply(out, |out| encoder.route(from.id, decision, route.explain, fleet, out))
                })
            }
        }
    }

    fn workers(
        &mut self,
        id: CorrelationId,
        space: Option<SpaceId>,
        (cursor, limit): (u32, u32),
        out: &mut Vec<u8>,
    ) -> Result<Answer> {
        let fleet = self.requests.service().fleet();
        require_space(&fleet, space)?;
        Answer::reply(out, |out| self.encoder.workers(id, &fleet, space, (cursor, limit), out))
    }

    fn hello(&mut self, peer: &mut Peer, id: CorrelationId, hello: &Hello<'_>, out: &mut Vec<u8>) -> Result<Answer> {
        if peer.phase != Phase::HelloAwaited {
            return Err(hello_again());
        }
        let version = hello.negotiate()?;
        let session = self.requests.service_mut().session_opened(hello.session, peer.uid)?;
        peer.phase = Phase::Open(Some(session));
        tracing::debug!(client = hello.client_name, uid = peer.uid, session = session.0, "hello");
        let is_remote = peer.transport == TransportKind::Remote;
        let lanes_on = self.lanes.are_on() && !is_remote;
        let Self { requests, encoder, .. } = self;
        let info = requests.service().hello();
        let mut facts = hello_facts(version, &info, self.frame_body_bytes_max);
        if lanes_on {
            facts.features |= features::LANES;
        }
        if is_remote {
            // A path of this host: on the peer's it names nothing, or another daemon.
            facts.admin_socket = None;
        }
        Answer::reply(out, |out| encoder.hello(id, &facts, &requests.service().fleet(), out))
    }

    /// Appends an error reply, and counts it.
    fn refuse_with(&mut self, id: CorrelationId, error: &Error, out: &mut Vec<u8>) {
        self.requests.count_error(error);
        self.encoder.error(id, error, out);
    }

    /// The frame of a pending reply. The core that decided the request has counted it.
    pub(super) fn encode_pending(&mut self, reply: &PendingReply) -> Vec<u8> {
        let mut frame = Vec::new();
        match &reply.outcome {
            Ok(decision) => {
                let fleet = self.requests.service().fleet();
                self.encoder.route(reply.id, decision, reply.explain, &fleet, &mut frame);
            }
            Err(error) => self.encoder.error(reply.id, error, &mut frame),
        }
        frame
    }

    fn admin_only(&self) -> Error {
        let path = self.requests.service().hello().admin_socket.map(|path| path.display().to_string());
        let remedy = path.map_or("start the daemon with an admin socket".to_owned(), |path| {
            format!("send it to the admin socket {path}")
        });
        Error::new(Kind::AdminOnly, "the routing socket does not answer administration", remedy)
    }
}

impl<S: Service> Respond for RoutingResponder<S> {
    fn respond(&mut self, peer: &mut Peer, header: &FrameHeader, body: &[u8], out: &mut Vec<u8>) {
        match self.answer(peer, header, body, out) {
            Ok(Answer::Reply(_) | Answer::Watching) => self.counters().bump(CoreCounter::Requests),
            // Counted when the reply is sent.
            Ok(Answer::Queued) => {}
            Err(error) => self.refuse(header.correlation_id, &error, out),
        }
    }

    fn refuse(&mut self, id: CorrelationId, error: &Error, out: &mut Vec<u8>) {
        self.counters().bump(CoreCounter::Requests);
        self.refuse_with(id, error, out);
    }

    fn take_work(&mut self) -> u64 {
        self.requests.take_work()
    }

    fn begin_batch(&mut self) {
        self.requests.begin_batch();
    }

    fn end_batch(&mut self) {
        self.requests.end_batch();
    }

    fn quantum_ended_by_work(&mut self) {
        self.counters().bump(CoreCounter::TurnsEndedByWork);
    }

    fn closed(&mut self, peer: &mut Peer) {
        self.requests.cancel_queued(peer.connection);
        self.watches.end(peer.connection);
        if let Phase::Open(Some(session)) = std::mem::replace(&mut peer.phase, Phase::HelloAwaited)
            // A lane shares the session of its connection, which is still open.
            && peer.transport != TransportKind::Lane
        {
            self.requests.service_mut().session_closed(session);
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
