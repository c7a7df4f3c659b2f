//! What a gateway and the daemon say to each other, as plain values: what a request asks, what a reply and a report
//! say. How they become bytes is in `wire`; what the daemon makes of them, in `route`, `load` and `fleet`.

mod mode;
mod names;
mod overrides;
mod reply;
mod report;
mod request;
mod terms;
mod worker;

pub use mode::Mode;
pub use names::{Names, Preferences};
pub use overrides::Overrides;
pub use reply::{MatchStatus, PotentialLoad, PotentialLoads, ReplyNotes};
pub use report::{BookingHandle, BookingOutcome, BookingRef, EngineLoad, SessionToken};
pub use request::{BookingRequest, Prompt, RouteRequest};
pub use terms::CostTerms;
pub use worker::{DeviceClass, PoolRole, WorkerState};
