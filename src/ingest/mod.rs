//! The way of a worker's events from its sockets into the index: sockets, threads and time. `event` decides what the
//! events mean, and `index` holds the blocks.
//!
//! ```text
//! ZMTP frames → publisher_socket → stream: gate → decode → apply: scheme, seed, hashes → index → trust cell
//! ```
//!
//! Each shard has one thread, with one event loop over a connection to each publisher ([`spawn`], [`crate::zmtp`]). The
//! thread is the only writer of the shard's part of the index, and hands nothing to another thread on the way. It takes
//! a bounded number of messages of one publisher, its quantum, before the next publisher gets the thread.
//!
//! Readers see each event as soon as it is applied. The sequence number that they see moves only at the end of the
//! quantum, so the blocks that they see are at least as new as that number. Trust that falls is shown at once, before
//! the index changes. Trust that rises is shown at the end of the quantum.
//!
//! If a publisher can replay, the thread fetches lost batches again and does not empty the worker. It does so on every
//! connection, on a gap, and, in case the last batches were lost, once the publisher has been quiet for a while. Live
//! messages wait meanwhile. [`crate::event::recovery`] decides when to ask and what an answer means.
//!
//! Engines publish their load over separate sockets, which one further thread reads (`loads`).
//!
//! Two more things make events wait. Both are bounded, and metrics show both:
//! - While a worker is dumped or loaded ([`DumpPart`]), its messages wait in a buffer.
//! - While an index cannot free memory that it gave up, the messages of all its workers wait in their sockets.
//!
//! | to read | file |
//! |---|---|
//! | start, stop and panics of an ingest thread | `handle.rs`, `shard/rebuild.rs` |
//! | the event loop | `shard.rs` |
//! | the commands: dump, load, reset, add, update and remove a worker | `shard/commands.rs` |
//! | one publisher's sockets, or its subjects at a NATS server | `shard/publisher.rs`, `publisher_socket.rs`, `connection.rs` |
//! | the state of one stream | `stream.rs`, with `stream/hold.rs`, `stream/recover.rs`, `stream/relay.rs` |
//! | dumps and loads of a worker | `dump.rs`, `shard/transfers.rs`, `stream/hold.rs` |
//! | snapshots that engines send themselves | `engine_snapshot.rs`, `stream/engine_snapshot.rs` |
//! | replays of lost batches | `shard/replays.rs`, `stream/recover.rs` |
//! | engines' published loads | `loads.rs` |
//! | one batch onto the index | `apply.rs`, with `hashing.rs`, `groups.rs`, `copies.rs`, `lower_tiers.rs` |

mod apply;
mod connection;
mod copies;
pub mod descriptors;
mod dump;
mod engine_snapshot;
mod event_memory;
pub(crate) mod exposition;
mod groups;
mod handle;
mod hashing;
mod in_memory_stream;
mod loads;
mod lower_tiers;
mod publisher_socket;
mod republish;
mod shard;
mod space_shard;
mod stream;
mod worker_view;

#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use connection::Brokers;
pub use dump::{AbortReason, DumpBegin, DumpChunk, DumpPart, References};
pub(crate) use dump::{FirstLoad, LoadAnswer};
pub(crate) use engine_snapshot::SnapshotOrder;
pub(crate) use event_memory::EventMemory;
pub use handle::{IngestHandle, RefusedPublisher, spawn};
pub(crate) use handle::{spawn_loading, spawn_republishing};
pub use in_memory_stream::Feed;
pub(crate) use loads::{LoadListener, LoadSource};
pub(crate) use republish::{Outlet, Republisher, stored_event};
pub use republish::{RelayName, Republished};
pub(crate) use shard::{AddWorker, RemoveWorker, ResetScope};
pub use shard::{UpdateWorker, WorkerAccepted};
pub use worker_view::{Tally, UnknownNames, WorkerGauges, WorkerView};

use crate::error::{Error, Kind};
use crate::fleet::{EventSource, SchemeCell};
use crate::ids::{ShardId, SpaceId, Worker, WorkerIndex, WorkerSlot};
use crate::index::ShardWriter;
use crate::limits::ZMQ_RECEIVE_MESSAGES_MAX;
use crate::load::Loads;

/// The settings of an ingest thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IngestConfig {
    /// Logical CPU to run on, by the operating system's number; `None` = any.
    pub core: Option<usize>,
    /// How long a publisher may be disconnected, or not be reached from the start, before its worker is down,
    /// milliseconds; 0 = for ever.
    pub down_after_ms: u64,
    /// How long a connected publisher may send no batch before trust falls, milliseconds; 0 = for ever.
    pub silence_ms_max: u64,
    /// How long a connected publisher may send no batch before the thread asks it for a replay, in case its last
    /// batches were lost, milliseconds; 0 = for ever. Needs a replay endpoint.
    pub probe_after_ms: u64,
    /// The most messages of one publisher that are received and not yet applied. Never more than
    /// [`crate::limits::INGEST_FETCH_MESSAGES_MAX`]. Further messages wait in the kernel and in the engine, which drops
    /// messages beyond its own high-water mark.
    pub receive_messages_max: i32,
    /// How many shards the daemon has. With more than one, a space's learnt scheme is never learnt again: no thread can
    /// know that the workers of the other shards hold no block.
    pub shards: usize,
    /// What workers need whose events come from NATS servers.
    pub brokers: Brokers,
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
            brokers: Brokers::default(),
        }
    }
}

/// The plan of one publisher and its worker.
#[derive(Clone, Debug)]
pub struct PublisherPlan {
    /// The index of its worker in the fleet's table.
    pub index: WorkerIndex,
    /// Its worker. Batches that name another rank are refused.
    pub worker: Worker,
    /// The space that the worker serves. The plan has a writer for it.
    pub space: SpaceId,
    /// The worker's slot in that writer's index.
    pub slot: WorkerSlot,
    /// Where its events come from.
    pub source: EventSource,
    /// Its space's scheme.
    pub scheme: Arc<SchemeCell>,
    /// Whether the scheme comes from the configuration. Then it is never learnt again.
    pub scheme_configured: bool,
    /// Whether prompts of this space may be salted. If not, chains with an unknown parent can be bound.
    pub salts_possible: bool,
    /// KV blocks that fit its device memory; 0 = not known.
    pub capacity_blocks: u64,
    /// The state that other threads see.
    pub view: Arc<WorkerView>,
    /// The loads of the workers: lost batches of busy workers are fetched first. `None` = not known.
    pub loads: Option<Arc<Loads>>,
}

/// Everything that one ingest thread owns.
#[derive(Debug)]
pub struct ShardPlan {
    /// Its number, for the thread's name and the logs.
    pub shard: ShardId,
    /// One writer for each space: a worker of any space may be added.
    pub writers: Vec<(SpaceId, ShardWriter)>,
    /// The publishers of its workers.
    pub publishers: Vec<PublisherPlan>,
}

/// An error of the operating system.
fn system(message: &str) -> Error {
    Error::new(Kind::System, message, "check the limits of threads and open files of this user")
}
