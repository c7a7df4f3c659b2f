//! One worker's stream without a socket: applies messages from memory as an ingest thread would.
//!
//! Fuzzers and benchmarks use it, so that they run the same code as messages from a socket.

use std::sync::Arc;

use super::space_shard::SpaceShard;
use super::stream::{Now, Scratch, Stream};
use super::{PublisherPlan, WorkerView};
use crate::endpoint::Endpoint;
use crate::fleet::{EventSource, SchemeCell, TrustCell};
use crate::ids::{EventSeq, Scheme, ShardId, SpaceId, Worker, WorkerIndex, WorkerSlot};
use crate::index::{self, IndexReader, ShardLimits, WorkerBlocks};
use crate::limits::INGEST_SWEEP_BLOCKS;
use crate::trust::Trust;

/// One worker in a shard of its own. Each message is a quantum.
#[derive(Debug)]
pub struct Feed {
    space: SpaceShard,
    stream: Stream,
    scratch: Scratch,
    view: Arc<WorkerView>,
    now: Now,
}

impl Feed {
    /// The shard of the index that a feed fills.
    pub const SHARD: ShardId = ShardId(0);
    /// The slot of its only worker.
    pub const SLOT: WorkerSlot = WorkerSlot(0);

    /// An empty shard with one worker, and its reader. Without a `scheme` it is learnt. `salts_possible` is false if
    /// chains with an unknown parent may be bound. Lost batches cannot be fetched again.
    #[must_use]
    pub fn new(
        worker: Worker,
        scheme: Option<Scheme>,
        salts_possible: bool,
        limits: ShardLimits,
    ) -> (Self, IndexReader) {
        let (mut writer, reader) = index::shard(Self::SHARD, limits);
        let slot = writer.add_worker().unwrap_or(Self::SLOT);
        let view = Arc::new(WorkerView::new(Arc::new(TrustCell::new(Trust::default()))));
        let plan = PublisherPlan {
            index: WorkerIndex(0),
            worker,
            space: SpaceId(0),
            slot,
            source: EventSource { endpoint: Endpoint::nowhere(), replay: None, topic: String::new() },
            scheme: Arc::new(SchemeCell::new(scheme)),
            scheme_configured: scheme.is_some(),
            salts_possible,
            capacity_blocks: 0,
            view: Arc::clone(&view),
            loads: None,
        };
        let mut space = SpaceShard::new(plan.space, writer);
        space.add_worker(&plan, 1);
        let now = Now::default();
        let stream = Stream::new(&plan, now);
        (Self { space, stream, scratch: Scratch::default(), view, now }, IndexReader::new(vec![reader]))
    }

    /// Applies a message, and shows the result to readers.
    pub fn message(&mut self, seq: EventSeq, payload: &[u8]) {
        self.pass_time();
        self.stream.message(&mut self.space, &mut self.scratch, seq, payload, self.now);
        self.end_quantum();
    }

    /// Simulates a broken connection.
    pub fn disconnected(&mut self) {
        self.pass_time();
        self.stream.disconnected(&mut self.space, self.now);
        self.end_quantum();
    }

    /// The view that other threads would have of the worker.
    #[must_use]
    pub fn view(&self) -> &WorkerView {
        &self.view
    }

    /// The blocks that the index holds for the worker.
    #[must_use]
    pub fn held(&self) -> WorkerBlocks {
        self.space.writer.held(self.stream.slot)
    }

    /// One millisecond for each quantum.
    fn pass_time(&mut self) {
        self.now.unix_ms += 1;
        self.now.uptime_ms += 1;
    }

    fn end_quantum(&mut self) {
        self.stream.show(&mut self.space);
        self.space.writer.sweep(INGEST_SWEEP_BLOCKS);
        self.stream.swept(&mut self.space, self.now);
    }
}
