//! The interface between a gateway's requests and what answers them.

use std::path::Path;
use std::sync::Arc;

use arc_swap::Guard;

use super::request_queue::RequestQueue;
use crate::error::Result;
use crate::fleet::FleetTable;
use crate::ids::{SpaceId, Worker, WorkerIndex};
use crate::load::{BookingOutcome, BookingRef, EngineLoad, SessionId, SessionToken};
use crate::route::{Decision, PotentialLoads, RouteRequest, Wait};
use crate::traces::TracedRequest;

/// The parts of a hello reply that only the daemon knows.
#[derive(Clone, Copy, Debug, Default)]
pub struct HelloInfo<'a> {
    /// A random number of this daemon process.
    pub instance_id: u64,
    /// The most bookings that one session may hold.
    pub bookings_per_session_max: u32,
    /// The admin socket. A path that is not UTF-8 is left out of the reply.
    pub admin_socket: Option<&'a Path>,
}

/// The outcome of a route request.
#[derive(Clone, Debug, PartialEq)]
pub enum Routed {
    /// It is decided, and booked if the request says so.
    Decided,
    /// Nothing is booked: every worker that may run the request is busy, and it waits for one of them.
    Busy(Box<Wait>),
}

/// Answers the requests of one serving thread's connections.
///
/// A serving thread owns one value, built on that thread, and calls it only from there. Every call runs to completion
/// between two reads of the socket: it must not block. An error becomes an error reply; the connection goes on.
pub trait Service {
    /// The daemon's identity, for the hello reply.
    fn hello(&self) -> HelloInfo<'_>;

    /// The current fleet table: spaces for hello, names for candidates, records for a page of workers.
    fn fleet(&self) -> Guard<Arc<FleetTable>>;

    /// Calls `read` with the fleet table of the last decision, or with the current one.
    fn with_fleet<R>(&self, read: impl FnOnce(&FleetTable) -> R) -> R
    where
        Self: Sized,
    {
        read(&self.fleet())
    }

    /// Requests come from now on one after the other, without a pause, until [`Service::end_batch`]. What they read may be
    /// loaded once for all of them.
    fn begin_batch(&mut self) {}

    /// The batch is over: nothing of it is kept.
    fn end_batch(&mut self) {}

    /// A connection of user `peer_uid` said hello. `token` names the session that several connections share; `None`
    /// opens a session for this connection alone. Called once per connection.
    ///
    /// # Errors
    /// [`Kind::NotPermitted`](crate::error::Kind::NotPermitted) if the session belongs to another user,
    /// [`Kind::Overloaded`](crate::error::Kind::Overloaded) if there are too many sessions,
    /// [`Kind::Draining`](crate::error::Kind::Draining). The gateway may say hello again.
    fn session_opened(&mut self, token: Option<SessionToken>, peer_uid: u32) -> Result<SessionId>;

    /// A connection for which `session_opened` gave `session` is gone. Called exactly once for each.
    fn session_closed(&mut self, session: SessionId);

    /// Decides `request`, and books it if the request says so and a worker is eligible. Overwrites all of `decision`,
    /// which holds the previous decision, for its memory. `candidates` never exceeds `candidates_max`. `removed` is
    /// filled at least if the request asks to explain or no worker is eligible.
    ///
    /// # Errors
    /// Unknown space, scheme mismatch, a full table. If no worker is eligible the decision is empty; that is no error.
    fn route(&mut self, session: SessionId, request: &RouteRequest<'_>, decision: &mut Decision) -> Result<Routed>;

    /// The request that is routed next came at `since_ns`, nanoseconds of the bookings' clock, and waited in the queue.
    fn waited_since(&mut self, _since_ns: u64) {}

    /// The request that was routed last, if it is traced.
    fn traced(&self) -> Option<TracedRequest> {
        None
    }

    /// Takes the work done since the previous call, in blocks of prompts that were hashed and looked up. It limits a
    /// connection's quantum. 0 = the service does not count work.
    fn take_work(&mut self) -> u64 {
        0
    }

    /// The queue of all serving threads; `None` = no request waits, and no route is [`Routed::Busy`].
    fn request_queue(&self) -> Option<Arc<RequestQueue>> {
        None
    }

    /// Whether a request that waits for a worker is to be decided again: the worker has room, or has left. Takes no
    /// lock.
    fn has_room(&self, _worker: WorkerIndex) -> bool {
        true
    }

    /// The worker of a live booking of `session`.
    fn booked_worker(&self, _session: SessionId, _booking: &BookingRef<'_>) -> Option<WorkerIndex> {
        None
    }

    /// The output tokens known of a live booking of `session`, and the tokens of a block; 0 = output is not counted.
    fn booked_output(&self, _session: SessionId, _booking: &BookingRef<'_>) -> Option<(u32, u32)> {
        None
    }

    /// Fills `decision.candidates` with the overlaps of every eligible worker. `request` books nothing and lists every
    /// worker, so that a route answers it. Override to list the workers that are not eligible too.
    ///
    /// # Errors
    /// As [`Service::route`].
    fn overlap(&mut self, session: SessionId, request: &RouteRequest<'_>, decision: &mut Decision) -> Result<()> {
        self.route(session, request, decision).map(drop)
    }

    /// Overwrites `potential` with the load that each worker of the space would have if it took the prompt of
    /// `request`.
    ///
    /// # Errors
    /// Unknown space, scheme mismatch.
    fn potential_loads(&mut self, request: &RouteRequest<'_>, potential: &mut PotentialLoads) -> Result<()>;

    /// The prefill of a booked request is done, after `prefill_us` microseconds (0 = not known).
    ///
    /// # Errors
    /// The daemon could not look the booking up. An unknown booking is an outcome, not an error.
    fn prefill_complete(
        &mut self,
        session: SessionId,
        booking: &BookingRef<'_>,
        prefill_us: u64,
    ) -> Result<BookingOutcome>;

    /// A booked request has produced `output_tokens` so far.
    ///
    /// # Errors
    /// As [`Service::prefill_complete`].
    fn output_progress(
        &mut self,
        session: SessionId,
        booking: &BookingRef<'_>,
        output_tokens: u32,
    ) -> Result<BookingOutcome>;

    /// A booked request runs on `worker` instead of the worker that it was booked on.
    ///
    /// # Errors
    /// As [`Service::prefill_complete`], and if `worker` is not in the booking's space.
    fn served(&mut self, session: SessionId, booking: &BookingRef<'_>, worker: Worker) -> Result<BookingOutcome>;

    /// A gateway reports a worker's load. `false` = the report is not used: the worker has just left, or the gateway's
    /// user already reports on its share of the space's workers.
    ///
    /// # Errors
    /// The space has no such worker.
    fn report_load(&mut self, session: SessionId, space: SpaceId, worker: Worker, load: EngineLoad) -> Result<bool>;

    /// A worker, or every rank of it, failed a request. Returns its back-off in milliseconds: 0 if the gateway's user
    /// already keeps requests away from its share of the space's workers.
    ///
    /// # Errors
    /// The space has no such worker.
    fn report_failure(&mut self, session: SessionId, space: SpaceId, worker: Worker, reason: &str) -> Result<u32>;

    /// A booked request is done.
    ///
    /// # Errors
    /// As [`Service::prefill_complete`].
    fn free(&mut self, session: SessionId, booking: &BookingRef<'_>) -> Result<BookingOutcome>;
}
