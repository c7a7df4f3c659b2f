//! The gateway's side of the routing protocol. There are three clients:
//!
//! * [`AsyncClient`], for gateways on tokio. All tasks share one handle, and any number of requests are in flight on its
//!   connection. It reconnects when the connection breaks, enforces a deadline for each call, and decides by itself
//!   while the daemon does not answer.
//! * [`SteadyClient`], the same for a thread that blocks.
//! * [`Client`], one blocking connection, which does not reconnect; for administration, benchmarks and pipelined
//!   requests.
//!
//! A [`Client`] can send requests ahead: [`Client::send_route`] queues a request, and [`Client::recv`] returns the
//! replies in the order of their arrival, each with the id of its request. While its send buffer is full, the client
//! reads replies. Any number of requests can therefore be queued without a deadlock between the two sides.
//!
//! Connections that share a [`SessionToken`] share their bookings.
//!
//! ```text
//! conversation/        one connection: hello, requests, replies and errors, as bytes in and bytes out; no I/O
//! blocking/            Client: drives a conversation on a thread that blocks
//! steady/              AsyncClient, SteadyClient: drive one conversation after another on tokio
//! socket.rs, lane.rs   the reads and writes of both drivers
//! fallback.rs          decisions without the daemon; no I/O
//! ```
//!
//! ```no_run
//! use std::path::Path;
//!
//! use kvrouted::client::{BookingRef, BookingRequest, Client, ClientOptions, Prompt, RouteRequest};
//!
//! # fn main() -> kvrouted::error::Result<()> {
//! let options = ClientOptions { name: "my-gateway".into(), ..ClientOptions::default() };
//! let mut client = Client::connect(Path::new("/run/kvrouted/kvrouted.sock"), &options)?;
//! let space = client.space("example-model", None)?.id;
//!
//! let tokens: Vec<u32> = vec![1, 2, 3, 4];
//! let book = Some(BookingRequest { request_id: "request-1", attempt: 0 });
//! let request = RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) };
//! let reply = client.route(&request)?;
//! // Without an eligible worker there are no candidates and no booking.
//! if let (Some(best), Some(handle)) = (reply.candidates.first(), reply.booking) {
//!     println!("send the prompt to worker {}", best.worker);
//!     let booking = BookingRef::Handle(handle);
//!     // When the first token comes:
//!     client.prefill_complete(&booking)?;
//!     // When the request has ended, however it ended:
//!     client.free(&booking)?;
//! }
//! # Ok(())
//! # }
//! ```

/// The value of a reply that must be of the kind `$kind`.
macro_rules! expect {
    ($reply:expr, $kind:ident, $request:expr) => {
        match $reply {
            crate::wire::Reply::$kind(value) => Ok(value),
            other => Err(crate::client::unexpected($request, &other)),
        }
    };
}

mod blocking;
mod conversation;
#[cfg(test)]
mod daemon_script;
mod fallback;
mod lane;
mod socket;
mod spaces;
mod steady;

use crate::error::{Error, Kind};
#[doc(inline)]
pub use crate::finding::{Finding, Harm};
#[doc(inline)]
pub use crate::protocol::{
    BookingHandle, BookingOutcome, BookingRef, BookingRequest, CostTerms, DeviceClass, EngineLoad, MatchStatus, Mode,
    Names, OtherLoad, Overrides, PoolRole, PotentialLoad, PotentialLoads, Preferences, Prompt, ReplyNotes,
    RouteRequest, SessionToken, TraceContext, WorkerState,
};
#[doc(inline)]
pub use crate::trust::{Trust, TrustLevel, TrustReason, TrustReasons};
#[doc(inline)]
pub use crate::wire::admin::*;
#[doc(inline)]
pub use crate::wire::{
    Candidate, HelloReply, LaneOpened, OverlapEntry, OverlapReply, RemoteError, Reply, RouteReply, ServerLimits,
    SpaceInfo, WatchReply, WorkerInfo, WorkersPage, features,
};
pub use blocking::{Client, ClientOptions, LaneUse, Watch};

pub use fallback::{Fallback, FallbackReason, Fleet};
pub use steady::{Answer, AsyncClient, BackOff, Booking, ClientCounter, SteadyClient, SteadyOptions};

/// The error for a reply of another kind: the daemon's own error, if the reply is one.
fn unexpected(request: &str, reply: &Reply) -> Error {
    match reply {
        Reply::Error(error) => error.clone().into(),
        _ => Error::new(
            Kind::Malformed,
            format!("the daemon's reply to {request} has another kind"),
            "use a client and a daemon of the same release",
        ),
    }
}

/// The error for callers whose connection ended while they waited.
fn lost() -> Error {
    Error::new(
        Kind::Connection,
        "the connection to the daemon ended",
        "send the request again; the daemon's log says why it ended",
    )
}
