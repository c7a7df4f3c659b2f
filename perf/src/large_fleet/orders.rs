//! What the measuring process and a process of engines say to each other: a line of JSON for each order, and one for
//! each reply.

use serde::{Deserialize, Serialize};

/// An order to a process of engines.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Order {
    /// Compute until every cache is full.
    Fill,
    /// Publish this number of batches a second, all ranks in turns; 0 = none.
    Publish {
        /// Batches a second.
        per_s: f64,
    },
    /// Say what every rank holds.
    State,
    /// End a worker, and start a new one in its place.
    Replace {
        /// The id of the worker that ends.
        worker: u32,
        /// The id of the new one.
        by: u32,
    },
    /// Publish and answer nothing from now on, but compute.
    CutOff {
        /// Whether it begins or ends.
        begins: bool,
    },
}

/// The reply to an order.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply {
    /// It is done. The batches and the processor time are those of the process since its start.
    Done {
        /// Batches computed since the caches were filled.
        batches: u64,
        /// Processor time of the process, nanoseconds.
        cpu_ns: u64,
    },
    /// Where ranks are: of all workers at the start, then of a new one.
    Endpoints(Vec<Endpoints>),
    /// What every rank holds.
    State(Vec<RankState>),
}

/// Where one rank is.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Endpoints {
    /// The worker.
    pub(crate) worker: u32,
    /// The rank.
    pub(crate) rank: u32,
    /// Its publisher.
    pub(crate) endpoint: String,
    /// Its replay socket.
    pub(crate) replay: String,
}

/// What one rank holds.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct RankState {
    /// The worker.
    pub(crate) worker: u32,
    /// The rank.
    pub(crate) rank: u32,
    /// The sequence number of its next batch.
    pub(crate) next_seq: u64,
    /// Blocks in its cache.
    pub(crate) held_blocks: u32,
    /// Leading blocks of each shared prompt.
    pub(crate) shared: Vec<u8>,
    /// The newest of its own prompts, and the leading blocks of it.
    pub(crate) private: Option<(u32, u8)>,
    /// Batches that were not published, or missed by a subscriber.
    pub(crate) dropped: u64,
    /// Subscribers that were disconnected.
    pub(crate) cut: u64,
}
