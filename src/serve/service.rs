//! The seam between connections and what answers them.

use std::path::Path;
use std::sync::Arc;

use arc_swap::Guard;

use super::lane::Lanes;
use super::request_queue::RequestQueue;
use crate::error::Result;
use crate::fleet::FleetTable;
use crate::ids::{SpaceId, Worker, WorkerIndex};
use crate::load::{BookingOutcome, BookingRef, EngineLoad, SessionId, SessionToken};
use crate::route::{Decision, PotentialLoads, RouteRequest, Wait};

/// What a hello reply says that only the daemon knows.
#[derive(Clone, Copy, Debug, Default)]
pub struct HelloInfo<'a> {
    /// Drawn when the daemon started.
    pub instance_id: u64,
    /// Bookings one session may hold.
    pub bookings_per_session_max: u32,
    /// Where status is answered; a path that is not UTF-8 is not told.
    pub admin_socket: Option<&'a Path>,
}

/// What came of a route.
#[derive(Clone, Debug, PartialEq)]
pub enum Routed {
    /// It is decided, and booked if that was asked for.
    Decided,
    /// Nothing is booked: nobody who may run it has room, and it is to wait for somebody who has.
    Busy(Box<Wait>),
}

/// What answers the requests of one core's connections.
///
/// A core owns one value, built on the core's thread, and calls it only from there. Every call runs to
/// completion between two reads of the socket: it must not block. An error becomes a typed error on the
/// request's correlation id; the connection goes on.
pub trait Service {
    /// The daemon's identity, for the hello reply.
    fn hello(&self) -> HelloInfo<'_>;

    /// The current fleet table: spaces for hello, names for candidates, records for a page of workers.
    fn fleet(&self) -> Guard<Arc<FleetTable>>;

    /// A connection of user `peer_uid` said hello. `token` names the session that its connections share;
    /// `None` asks for one of its own. Called once per connection.
    ///
    /// # Errors
    /// [`Kind::NotPermitted`](crate::error::Kind::NotPermitted) if the token's session is another user's,
    /// [`Kind::Overloaded`](crate::error::Kind::Overloaded) if there are too many sessions,
    /// [`Kind::Draining`](crate::error::Kind::Draining). The gateway may say hello again.
    fn session_opened(&mut self, token: Option<SessionToken>, peer_uid: u32) -> Result<SessionId>;

    /// A connection for which `session_opened` gave `session` is gone. Called exactly once for each.
    fn session_closed(&mut self, session: SessionId);

    /// Decides `request` and overwrites all of `decision`, which is the last call's, reused; books if the
    /// request says so and somebody is eligible. `candidates` is cut to `candidates_max` already, and
    /// `removed` is filled at least when the request asks to explain or nobody was eligible.
    ///
    /// # Errors
    /// Unknown space, scheme mismatch, a full table. Nobody eligible is no error but an empty decision.
    fn route(&mut self, session: SessionId, request: &RouteRequest<'_>, decision: &mut Decision) -> Result<Routed>;

    /// How much work was done since this was last asked, in blocks of prompts that are hashed and looked up: by it a
    /// connection's turn is bounded. 0 = it is not reckoned.
    fn take_work(&mut self) -> u64 {
        0
    }

    /// The lanes that gateways may open, on all cores together.
    fn lanes(&self) -> Arc<Lanes> {
        Arc::new(Lanes::new(0, 0))
    }

    /// Where requests of all cores wait; `None` = nowhere, so that no route may be [`Routed::Busy`].
    fn request_queue(&self) -> Option<Arc<RequestQueue>> {
        None
    }

    /// Whether a worker that a request waits for has room, or is no longer there, so that the request is to be decided
    /// again. Without a lock.
    fn has_room(&self, _worker: WorkerIndex) -> bool {
        true
    }

    /// The worker of a live booking of `session`.
    fn booked_worker(&self, _session: SessionId, _booking: &BookingRef<'_>) -> Option<WorkerIndex> {
        None
    }

    /// How many tokens a live booking of `session` is known to have put out, and how many make a block; 0 = output is
    /// not counted.
    fn booked_output(&self, _session: SessionId, _booking: &BookingRef<'_>) -> Option<(u32, u32)> {
        None
    }

    /// Fills `decision.candidates` with what every eligible worker holds of the prompt. `request` books
    /// nothing and lists everybody, so that a route answers it; override to list the others too.
    ///
    /// # Errors
    /// As [`Service::route`].
    fn overlap(&mut self, session: SessionId, request: &RouteRequest<'_>, decision: &mut Decision) -> Result<()> {
        self.route(session, request, decision).map(drop)
    }

    /// Overwrites `potential` with what every worker of the space would have to do if it took the prompt of `request`.
    ///
    /// # Errors
    /// Unknown space, scheme mismatch.
    fn potential_loads(&mut self, request: &RouteRequest<'_>, potential: &mut PotentialLoads) -> Result<()>;

    /// The prefill of a booked request is done, after `prefill_us` microseconds (0 = not said).
    ///
    /// # Errors
    /// Only what keeps the daemon from looking; a booking it does not know is an outcome.
    fn prefill_complete(
        &mut self,
        session: SessionId,
        booking: &BookingRef<'_>,
        prefill_us: u64,
    ) -> Result<BookingOutcome>;

    /// A booked request has put out `output_tokens` so far.
    ///
    /// # Errors
    /// As [`Service::prefill_complete`].
    fn output_progress(
        &mut self,
        session: SessionId,
        booking: &BookingRef<'_>,
        output_tokens: u32,
    ) -> Result<BookingOutcome>;

    /// A booked request runs on `worker`, not on the one it was booked on.
    ///
    /// # Errors
    /// As [`Service::prefill_complete`], and if there is no such worker in the booking's space.
    fn served(&mut self, session: SessionId, booking: &BookingRef<'_>, worker: Worker) -> Result<BookingOutcome>;

    /// What a gateway says of a worker's load. `false` = the worker has just left, or the gateway's user reports on as many
    /// workers of the space as one user may.
    ///
    /// # Errors
    /// If there is no such worker in the space.
    fn report_load(&mut self, session: SessionId, space: SpaceId, worker: Worker, load: EngineLoad) -> Result<bool>;

    /// A worker, or every rank of it, failed a request. Answers with how long it is left alone, milliseconds: 0 where the
    /// gateway's user keeps requests away from as many workers of the space as one user may.
    ///
    /// # Errors
    /// If there is no such worker in the space.
    fn report_failure(&mut self, session: SessionId, space: SpaceId, worker: Worker, reason: &str) -> Result<u32>;

    /// A booked request is done.
    ///
    /// # Errors
    /// As [`Service::prefill_complete`].
    fn free(&mut self, session: SessionId, booking: &BookingRef<'_>) -> Result<BookingOutcome>;
}
