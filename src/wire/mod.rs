//! The routing protocol as bytes: encoders and decoders of its frames. Pure: no socket, no clock.
//!
//! A frame is a 16-byte header ([`FrameHeader`]) and a body: one table of `schemas/routing.fbs`, finished
//! with the identifier `KVRT`, padded to 8 bytes. [`decode_request()`] and [`ReplyEncoder`] are the daemon's
//! half, [`RequestEncoder`] and [`decode_reply()`] the gateway's.

pub(crate) mod admin;
#[cfg(feature = "daemon")]
mod candidates;
#[cfg(feature = "daemon")]
mod daemon_replies;
mod decode_reply;
mod decode_request;
mod encode_reply;
mod encode_request;
#[cfg_attr(not(feature = "daemon"), expect(dead_code, reason = "the daemon's route replies need more of it"))]
mod frame_composer;
mod header;
mod message;
mod read_only_requests;
mod report_codec;
#[cfg(feature = "daemon")]
mod request_limits;
mod route_request_codec;
mod running_config;
#[cfg_attr(not(feature = "daemon"), expect(dead_code, reason = "it has both directions, and a client needs one"))]
mod schema_conversions;
mod table;

#[cfg(test)]
#[cfg(feature = "daemon")]
mod tests;

pub use admin::*;
#[cfg(feature = "daemon")]
pub use daemon_replies::HelloFacts;
pub use decode_reply::decode_reply;
#[cfg(feature = "daemon")]
pub(crate) use decode_request::unsupported_version;
pub use decode_request::{Hello, LaneOpened, LaneRequest, Request, RequestScratch, decode_request};
pub use encode_reply::ReplyEncoder;
#[cfg(feature = "daemon")]
pub(crate) use encode_reply::retry_after_us;
pub use encode_request::RequestEncoder;
pub use header::{FRAME_IDENTIFIER, FrameHeader, FrameKind, HeaderFault, PROTOCOL_VERSION};
pub use message::{
    Candidate, HelloReply, OverlapEntry, OverlapReply, RemoteError, Reply, RouteReply, ServerLimits, SpaceInfo,
    WatchCursor, WatchReply, WorkerInfo, WorkersPage,
};
#[cfg(feature = "daemon")]
pub(crate) use request_limits::check_request;
pub use running_config::{ConfigField, RunningConfigPage};

/// What the default path of the admin socket adds to the path of the routing socket.
pub(crate) const ADMIN_SOCKET_SUFFIX: &str = ".admin";

/// Feature bits: of a request's `must_understand`, and of the hello reply's `features`.
pub mod features {
    /// Route requests.
    pub const ROUTING: u64 = 1;
    /// Bookings: `book`, prefill-complete, free.
    pub const BOOKINGS: u64 = 1 << 1;
    /// Prompts as local hashes.
    pub const LOCAL_HASHES: u64 = 1 << 2;
    /// Multimodal hashes.
    pub const MEDIA: u64 = 1 << 3;
    /// The terms of every cost, and the excluded workers.
    pub const EXPLAIN: u64 = 1 << 4;
    /// Overlap requests.
    pub const OVERLAP: u64 = 1 << 5;
    /// Workers requests.
    pub const WORKERS: u64 = 1 << 6;
    /// Modes and weights of a request.
    pub const OVERRIDES: u64 = 1 << 7;
    /// Pins, and required or preferred labels.
    pub const CONSTRAINTS: u64 = 1 << 8;
    /// Blocks in a cache that all workers share.
    pub const SHARED_HITS: u64 = 1 << 9;
    /// Output progress, and requests that another worker than the booked one runs.
    pub const PROGRESS: u64 = 1 << 10;
    /// Reports about workers: their failures, and their engines' load.
    pub const REPORTS: u64 = 1 << 11;
    /// Waiting for a worker: `priority`, `priority_jump`, `deadline_us`.
    pub const QUEUE: u64 = 1 << 12;
    /// Affinity: the requests of a session go to one worker.
    pub const AFFINITY: u64 = 1 << 13;
    /// Pairs: one reply names a worker to prefill and one to decode.
    pub const PAIRS: u64 = 1 << 14;
    /// The work of every worker if it took a prompt.
    pub const POTENTIAL_LOADS: u64 = 1 << 15;
    /// Watch requests.
    pub const WATCH: u64 = 1 << 16;
    /// Shm lanes: memory that both sides share in place of the socket.
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
