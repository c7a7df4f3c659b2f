//! The async client's calls for a thread that blocks.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};

use super::{Answer, AsyncClient, SteadyOptions};
use crate::client::{Booking, ClientCounter, Fleet};
use crate::error::{Error, Kind, Result};
use crate::ids::{SpaceId, Worker};
use crate::limits::CLIENT_CHECK_AFTER_MS;
use crate::protocol::{BookingOutcome, EngineLoad, PoolRole, PotentialLoads, RouteRequest, SessionToken};
use crate::wire::{OverlapReply, SpaceInfo, WorkerInfo};

/// [`AsyncClient`] for one thread that blocks: deadlines, reconnects, and decisions without the daemon. Each method is that
/// client's of the same name. The client serves the connection during calls, not between them.
///
/// Do not use it within an async task: its calls would block the task's thread, and tokio refuses them there.
#[derive(Debug)]
pub struct SteadyClient {
    runtime: Runtime,
    client: AsyncClient,
    /// When a call last served the connection first.
    served_at: Mutex<Instant>,
}

impl SteadyClient {
    /// See [`AsyncClient::new`].
    ///
    /// # Errors
    /// [`Kind::System`] if the kernel refuses a poller.
    pub fn new(path: impl Into<PathBuf>, options: SteadyOptions) -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_io().enable_time().build().map_err(|error| {
            Error::new(Kind::System, "no poller can be made", "raise the limit of open files").caused_by(error)
        })?;
        let client = {
            let _entered = runtime.enter();
            AsyncClient::new(path, options)
        };
        Ok(Self { runtime, client, served_at: Mutex::new(Instant::now()) })
    }

    /// Makes a call. It first serves the connection: what has arrived since the last call, and what has become due. A call that
    /// is answered at once would leave no time for that. Calls in quick succession skip it, because it takes as many system
    /// calls as a request.
    fn call<T>(&self, call: impl Future<Output = T>) -> T {
        let is_due = {
            let (mut last, now) = (self.served_at.lock(), Instant::now());
            let is_due = now.duration_since(*last) >= Duration::from_millis(CLIENT_CHECK_AFTER_MS);
            if is_due {
                *last = now;
            }
            is_due
        };
        self.runtime.block_on(async {
            if is_due {
                tokio::task::yield_now().await;
            }
            call.await
        })
    }

    /// See [`AsyncClient::session`].
    #[must_use]
    pub fn session(&self) -> SessionToken {
        self.client.session()
    }

    /// The fleet as the daemon had reported it by the last call.
    #[must_use]
    pub fn fleet(&self) -> Arc<Fleet> {
        Arc::clone(&self.client.fleet().borrow())
    }

    /// See [`AsyncClient::has_lane`].
    #[must_use]
    pub fn has_lane(&self) -> bool {
        self.client.has_lane()
    }

    /// See [`AsyncClient::lane_refusal`].
    #[must_use]
    pub fn lane_refusal(&self) -> Option<Error> {
        self.client.lane_refusal()
    }

    /// See [`AsyncClient::counter`].
    #[must_use]
    pub fn counter(&self, counter: ClientCounter) -> u64 {
        self.client.counter(counter)
    }

    /// See [`AsyncClient::space`].
    ///
    /// # Errors
    /// As there.
    pub fn space(&self, model: &str, namespace: Option<&str>, role: Option<PoolRole>) -> Result<SpaceInfo> {
        self.client.space(model, namespace, role)
    }

    /// See [`AsyncClient::close`].
    pub fn close(self) -> bool {
        self.runtime.block_on(self.client.close())
    }
}

/// Calls of the async client, each made by [`SteadyClient::call`].
macro_rules! calls {
    ($($name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*) => {
        impl SteadyClient {$(
            #[doc = concat!("See [`AsyncClient::", stringify!($name), "`].\n\n# Errors\nAs there.")]
            pub fn $name(&self, $($argument: $type),*) -> Result<$answer> {
                self.call(self.client.$name($($argument),*))
            }
        )*}
    };
}

calls! {
    connected() -> ();
    route(request: &RouteRequest<'_>) -> Answer;
    overlap(request: &RouteRequest<'_>) -> OverlapReply;
    potential_loads(request: &RouteRequest<'_>) -> PotentialLoads;
    workers(space: Option<SpaceId>) -> Vec<WorkerInfo>;
    prefill_complete(booking: Booking, prefill_us: u64) -> Option<BookingOutcome>;
    output_progress(booking: Booking, output_tokens: u32) -> Option<BookingOutcome>;
    served(booking: Booking, worker: Worker) -> Option<BookingOutcome>;
    free(booking: Booking) -> Option<BookingOutcome>;
    report_load(space: SpaceId, worker: Worker, load: &EngineLoad) -> bool;
    report_failure(space: SpaceId, worker: Worker, reason: &str) -> u32;
}
