//! HOW a worker's events arrive: sockets, threads and time. What they mean is decided in `event`, where
//! the blocks go in `index`; this module carries one to the other.
//!
//! ```text
//! ZMTP frames → subscription → stream: gate → decode → apply: scheme, seed, hashes → index → trust cell
//! ```
//!
//! One thread per shard, with one event loop over a connection to each publisher ([`spawn`], [`crate::zmtp`]). It is the only
//! writer of the shard's part of the index, and nothing is handed from thread to thread on the way. A
//! publisher has its turn of a bounded number of messages. Readers see every event once it has been applied; as of
//! which sequence that is they see at the turn's end, so that what they read is at least as new. Trust that falls is
//! shown at once, before the index changes, and trust that rises at the turn's end.
//!
//! Where a publisher replays (`replay`), what was lost is fetched again instead of emptying its worker: on every
//! connection, on a gap, and, should the last batches have been lost, once it has been quiet for a while. Its live
//! messages wait meanwhile. When to ask, and what an answer means, is [`crate::event::recovery`].
//!
//! What engines say of their load comes over sockets of its own, to a thread of its own ([`LoadListener`]).
//!
//! Besides, two things make events wait, both bounded and both to be seen: a worker that is dumped or loaded
//! ([`DumpPart`]), whose messages wait in a buffer of its own, and an index that cannot free what it gave up, for
//! which all of its workers' messages wait in their sockets.

mod apply;
mod copies;
pub mod descriptors;
mod dump;
pub mod exposition;
mod feed;
mod groups;
mod handle;
mod hashing;
mod loads;
mod lower_tiers;
mod publisher_socket;
mod republish;
mod shard;
mod stream;
mod view;

#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use dump::{AbortReason, DumpBegin, DumpChunk, DumpPart, FirstLoad, LoadAnswer, References};
pub use feed::Feed;
pub use handle::{IngestHandle, RefusedPublisher, spawn, spawn_loading, spawn_republishing};
pub use loads::{LoadListener, LoadSource};
pub use republish::{Outlet, RelayName, Republished, Republisher, stored_event};
pub use shard::{AddWorker, WorkerAccepted, UpdateWorker, RemoveWorker, ResetScope};
pub use view::{Tally, UnknownNames, WorkerGauges, WorkerView};

use crate::error::{Error, Kind};
use crate::fleet::{EventSource, SchemeCell};
use crate::ids::{ShardId, SpaceId, Worker, WorkerIndex, WorkerSlot};
use crate::index::ShardWriter;
use crate::limits::ZMQ_RECEIVE_MESSAGES_MAX;
use crate::load::Loads;

/// What an ingest thread is told once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IngestConfig {
    /// Logical CPU to run on, as the operating system numbers them; `None` = wherever it likes.
    pub core: Option<usize>,
    /// How long a publisher may be gone, or not be reached from the start, before its worker is down,
    /// milliseconds; 0 = for ever.
    pub down_after_ms: u64,
    /// How long a connected publisher may send no batch before trust falls, milliseconds; 0 = for ever.
    pub silence_ms_max: u64,
    /// How long a connected publisher may send no batch before it is asked whether its last ones were lost,
    /// milliseconds; 0 = for ever. Only where it has a replay endpoint.
    pub probe_after_ms: u64,
    /// Messages received from one publisher and not yet applied: at most these, and never more than
    /// [`crate::limits::INGEST_FETCH_MESSAGES_MAX`]. All others wait in the kernel and in the engine, which drops by its own
    /// mark.
    pub receive_messages_max: i32,
    /// How many shards the daemon has. With more than one, a space's learnt scheme is never learnt again: no
    /// thread can tell that the workers of the others hold nothing.
    pub shards: usize,
}

impl Default for IngestConfig {
    fn default() -> Self {
        Self {
            core: None,
            down_after_ms: 10_000,
            silence_ms_max: 0,
            probe_after_ms: 5_000,
            receive_messages_max: ZMQ_RECEIVE_MESSAGES_MAX,
            shards: 1,
        }
    }
}

/// One publisher and the worker it speaks for.
#[derive(Clone, Debug)]
pub struct Publisher {
    /// Its worker's place in the fleet table.
    pub index: WorkerIndex,
    /// Who the worker is. Batches that name another rank are refused.
    pub worker: Worker,
    /// The space it serves; the plan has a writer for it.
    pub space: SpaceId,
    /// What that writer calls it.
    pub slot: WorkerSlot,
    /// Where its events come from.
    pub source: EventSource,
    /// Its space's scheme.
    pub scheme: Arc<SchemeCell>,
    /// Whether the scheme is the operator's word and so never forgotten.
    pub scheme_configured: bool,
    /// Whether prompts of this space may be salted; `false` lets chains with an unknown parent be bound.
    pub salts_possible: bool,
    /// KV blocks its device holds; 0 = not known.
    pub capacity_blocks: u64,
    /// What others see of it.
    pub view: Arc<WorkerView>,
    /// What workers are busy with: the busy ones' lost events are fetched first. `None` = not known.
    pub loads: Option<Arc<Loads>>,
}

/// Everything one ingest thread owns.
#[derive(Debug)]
pub struct ShardPlan {
    /// Its number, for its name and the logs.
    pub shard: ShardId,
    /// One writer for each space: any worker may come.
    pub writers: Vec<(SpaceId, ShardWriter)>,
    /// Its publishers.
    pub publishers: Vec<Publisher>,
}

/// An error of the operating system.
fn system(message: &str) -> Error {
    Error::new(Kind::System, message, "check the limits of threads and open files of this user")
}
