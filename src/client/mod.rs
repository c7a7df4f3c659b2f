//! A gateway's side of the routing protocol, for processes of their own. Three clients share its words:
//!
//! * [`AsyncClient`] for gateways on tokio: one handle for all tasks, any number of requests in flight on a connection that is
//!   made again when it breaks, deadlines, and a decision without the daemon where that does not answer;
//! * [`SteadyClient`], the same for a thread that blocks;
//! * [`Client`], a bare blocking connection that ends when it breaks: for administration, measurement and pipelines.
//!
//! On a bare connection requests may be sent ahead: [`Client::send_route`] queues, [`Client::recv`] returns replies in the
//! order they come, each with the id of its request. While it waits for room to send, the client reads:
//! any number of requests can be queued without either side waiting for the other forever.
//!
//! Connections that share a [`SessionToken`] share their bookings.
//!
//! ```text
//! connection/     Client: frames on a socket or a lane, one thread that blocks
//! conversation/   what is said and owed on a connection that is made again; pure
//! steady/         AsyncClient, SteadyClient: connections, deadlines and calls around a conversation
//! fallback/       a decision without the daemon; pure
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
//! // No candidate, no booking: nobody is in the running.
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

mod connection;
mod conversation;
mod fallback;
mod frame;
mod handed;
mod pages;
mod spaces;
mod steady;

use crate::error::{Error, Kind};
#[doc(inline)]
pub use crate::finding::{Finding, Harm};
#[doc(inline)]
pub use crate::protocol::{
    BookingHandle, BookingOutcome, BookingRef, BookingRequest, CostTerms, DeviceClass, EngineLoad, MatchStatus, Mode,
    Names, Overrides, PoolRole, PotentialLoad, PotentialLoads, Preferences, Prompt, ReplyNotes, RouteRequest,
    SessionToken, WorkerState,
};
#[doc(inline)]
pub use crate::trust::{Trust, TrustLevel, TrustReason, TrustReasons};
#[doc(inline)]
pub use crate::wire::{
    Candidate, HelloReply, LaneOpened, OverlapEntry, OverlapReply, PolicyDone, PolicyOrder, RemoteError, Reply,
    ResetDone, ResetOrder, RouteReply, ServerLimits, SourceStatus, SpaceInfo, StatusPage, WatchReply, WorkerChange,
    WorkerInfo, WorkerOp, WorkerStatus, WorkersPage, features,
};
pub use connection::{Client, ClientOptions, LaneUse, Watch};
pub use conversation::{BackOff, Booking, ClientCounter};
pub use fallback::{Fallback, FallbackReason, Fleet};
pub use steady::{Answer, AsyncClient, SteadyClient, SteadyOptions};

fn unexpected(request: &str, reply: &Reply) -> Error {
    match reply {
        Reply::Error(error) => error.clone().into(),
        _ => Error::new(
            Kind::Malformed,
            format!("the daemon's reply to {request} is of another kind"),
            "use both from one release",
        ),
    }
}

fn no_progress() -> Error {
    Error::new(Kind::Malformed, "the daemon's pages do not advance", "use both from one release")
}

/// What those are told who waited when the connection ended.
fn lost() -> Error {
    Error::new(Kind::Connection, "the connection to the daemon ended", "ask again; the daemon's log says why")
}
