//! What each request of a gateway does: decide, book, queue, report and free. Frames, JSON and sockets are the concern
//! of [`serve`](crate::serve), which calls this module; this module calls [`route`](crate::route) and the tables below
//! it.
//!
//! ```text
//! serve: socket frame ─┐                        ┌─▶ route: decide ─▶ index, fleet, load
//!                      ├─▶ RequestHandler ─▶ RoutingService ─▶ load: book, report, free
//! serve: HTTP ─────────┘        │               └─▶ journal, predict: what was decided
//!                               └─▶ RequestQueue: requests that wait until a worker is less busy
//! ```
//!
//! Each serving thread has a [`RequestHandler`] of its own, and so has the thread of the HTTP port. They share
//! [`RequestTables`] and the [`RequestQueue`]. The daemon makes both and starts the threads.

mod core_metrics;
mod decision_recording;
mod handler;
mod hit_audit;
mod identity;
mod loaded_tables;
mod others_loads;
mod prediction_access;
mod prefill_decode_pair;
mod request_queue;
mod routing;
mod service;
mod shared_tables;
mod wait_flag;

pub(crate) use core_metrics::CoreMetrics;
pub(crate) use decision_recording::{DecisionRecording, policy_with_settings};
pub(crate) use handler::{KeptRequest, Replied, RequestHandler, Requester};
pub use identity::Identity;
pub use others_loads::OthersLoads;
pub(crate) use prediction_access::PredictionAccess;
pub use request_queue::RequestQueue;
pub(crate) use request_queue::{Outcome, PendingReply, QueueInbox, QueueMessage, booked_by};
pub(crate) use routing::RoutingService;
pub use service::{HelloInfo, Routed, Service};
pub(crate) use shared_tables::RequestTables;
