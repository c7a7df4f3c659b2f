//! What a gateway and the daemon say to each other, as plain values: what a request asks, what a reply and a report
//! say. How they become bytes is in `wire`; what the daemon makes of them, in `route`, `load` and `fleet`.

mod mode;
mod reply;
mod request;
mod worker;

pub use mode::Mode;
pub use reply::{CostTerms, MatchStatus, PotentialLoad, PotentialLoads, ReplyNotes};
pub use request::{BookingRequest, Names, Overrides, Preferences, Prompt, RouteRequest};
pub use worker::{
    BookingHandle, BookingOutcome, BookingRef, DeviceClass, EngineLoad, PoolRole, SessionToken, WorkerState,
};
