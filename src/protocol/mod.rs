//! The messages between a gateway and the daemon, as plain values: requests, replies and reports. `wire` makes bytes of
//! them; `route`, `load` and `fleet` act on them.

mod mode;
mod reply;
mod route_request;
mod trace_context;
mod worker;

pub use mode::Mode;
pub(crate) use reply::cost_terms;
pub use reply::{CostTerms, MatchStatus, OtherLoad, PotentialLoad, PotentialLoads, ReplyNotes};
pub(crate) use route_request::plain_request_fields;
pub use route_request::{BookingRequest, Names, Overrides, Preferences, Prompt, RouteRequest};
pub use trace_context::TraceContext;
pub use worker::{
    BookingHandle, BookingOutcome, BookingRef, DeviceClass, EngineLoad, PoolRole, SessionToken, WorkerState,
};
