//! Bytes ↔ requests and replies of the routing protocol. Pure: no socket, no clock.
//!
//! A frame is a 16-byte header ([`FrameHeader`]) and a body: one table of `schemas/routing.fbs`, finished
//! with the identifier `KVRT`, padded to 8 bytes. [`decode_request`] and [`ReplyEncoder`] are the daemon's
//! half, [`RequestEncoder`] and [`decode_reply`] the gateway's.

mod bookings;
#[cfg(feature = "daemon")]
mod check;
#[cfg_attr(not(feature = "daemon"), expect(dead_code, reason = "the daemon's route replies need more of it"))]
mod compose;
mod constraints;
#[cfg_attr(not(feature = "daemon"), expect(dead_code, reason = "it has both directions, and a client needs one"))]
mod convert;
#[cfg(feature = "daemon")]
mod encode_fleet;
mod encode_reply;
mod encode_request;
#[cfg(feature = "daemon")]
mod encode_route;
mod header;
mod lanes;
mod message;
mod policy;
mod questions;
mod reply;
mod reports;
mod request;
mod route;
mod route_reply;
mod table;
mod verify;

#[cfg(test)]
#[cfg(feature = "daemon")]
mod tests;

#[cfg(feature = "daemon")]
pub(crate) use check::check_request;
#[cfg(feature = "daemon")]
pub use encode_fleet::HelloFacts;
pub use encode_reply::ReplyEncoder;
#[cfg(feature = "daemon")]
pub(crate) use encode_reply::retry_after_us;
pub use encode_request::RequestEncoder;
pub use header::{FRAME_IDENTIFIER, FrameHeader, FrameKind, HeaderFault, PROTOCOL_VERSION};
pub use lanes::{LaneAsked, LaneOpened};
pub use message::{
    Candidate, HelloReply, OverlapEntry, OverlapReply, RemoteError, Reply, ResetDone, ResetOrder, RouteReply,
    ServerLimits, SourceStatus, SpaceInfo, StatusPage, WatchCursor, WatchReply, WorkerChange, WorkerInfo, WorkerOp,
    WorkerStatus, WorkersPage,
};
pub use policy::{PolicyDone, PolicyOrder};
pub use reply::decode_reply;
#[cfg(feature = "daemon")]
pub(crate) use request::unsupported_version;
pub use request::{Hello, Request, RequestScratch, decode_request};

/// Bits of `must_understand` and of the hello reply's `features`: what a request may depend on.
pub mod features {
    /// Route requests.
    pub const ROUTING: u64 = 1;
    /// Bookings: `book`, prefill-complete, free.
    pub const BOOKINGS: u64 = 1 << 1;
    /// Prompts as local hashes.
    pub const LOCAL_HASHES: u64 = 1 << 2;
    /// Multimodal hashes.
    pub const MEDIA: u64 = 1 << 3;
    /// The terms of every cost, and who was removed.
    pub const EXPLAIN: u64 = 1 << 4;
    /// Overlap requests.
    pub const OVERLAP: u64 = 1 << 5;
    /// Workers requests.
    pub const WORKERS: u64 = 1 << 6;
    /// Modes and weights set by a request.
    pub const OVERRIDES: u64 = 1 << 7;
    /// Pins, and labels that are required or preferred.
    pub const CONSTRAINTS: u64 = 1 << 8;
    /// What a cache shared by all workers holds.
    pub const SHARED_HITS: u64 = 1 << 9;
    /// Output progress, and requests served by another worker than the one they were booked on.
    pub const PROGRESS: u64 = 1 << 10;
    /// Reports of workers: their failures and their own word on their load.
    pub const REPORTS: u64 = 1 << 11;
    /// Waiting for a worker: `priority`, `priority_jump`, `deadline_us`.
    pub const QUEUE: u64 = 1 << 12;
    /// Sessions that are kept with a worker.
    pub const AFFINITY: u64 = 1 << 13;
    /// A worker to prefill and one to decode in one reply.
    pub const PAIRS: u64 = 1 << 14;
    /// What every worker would have to do if it took a prompt.
    pub const POTENTIAL_LOADS: u64 = 1 << 15;
    /// Watch requests.
    pub const WATCH: u64 = 1 << 16;
    /// Memory that both sides share in place of the socket.
    pub const LANES: u64 = 1 << 17;
    /// Everything this version serves.
    pub const SERVED: u64 = ROUTING
        | BOOKINGS
        | LOCAL_HASHES
        | MEDIA
        | EXPLAIN
        | OVERLAP
        | WORKERS
        | OVERRIDES
        | CONSTRAINTS
        | SHARED_HITS
        | PROGRESS
        | REPORTS
        | QUEUE
        | AFFINITY
        | PAIRS
        | POTENTIAL_LOADS
        | WATCH
        | LANES;
}
