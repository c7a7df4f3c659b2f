//! One worker's stream without a socket: applies messages from memory as an ingest thread would.
//!
//! Fuzzers and benchmarks use it, so that they run the same code as messages from a socket. Snapshots that engines send
//! themselves are built in one.

use std::sync::Arc;

use super::dump::AbortReason;
use super::space_shard::SpaceShard;
use super::stream::{Now, Scratch, Stream};
use super::{PublisherPlan, WorkerView};
use crate::endpoint::Endpoint;
use crate::event::{SourceTrust, Stored};
use crate::fleet::{EventSource, SchemeCell, TrustCell};
use crate::ids::{EventSeq, GroupId, Scheme, ShardId, SpaceId, Tier, Worker, WorkerIndex, WorkerSlot};
use crate::index::{self, DumpCursor, IndexReader, ShardLimits, StoreBlocks, WorkerBlocks};
use crate::limits::INGEST_SWEEP_BLOCKS;
use crate::trust::Trust;

/// What a snapshot left in the worker, besides its blocks.
#[derive(Debug)]
pub(super) struct BuiltSnapshot {
    /// How the blocks are cut and hashed, if there is one.
    pub(super) scheme: Option<Scheme>,
    /// The KV groups of each tier.
    pub(super) groups: Vec<(Tier, GroupId)>,
    /// Whether some of the groups are windows.
    pub(super) has_windows: bool,
    /// The trust that the blocks have.
    pub(super) view: SourceTrust,
}

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
            source: EventSource { endpoint: Endpoint::nowhere(), replay: None, topic: String::new(), snapshots: None },
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

    /// Begins to build an engine's snapshot in the worker, which is empty.
    pub(super) fn begin_snapshot(&mut self) {
        self.stream.begin_built(&mut self.space, self.now);
    }

    /// Applies one batch of the snapshot. `each_store` gets its stores.
    ///
    /// # Errors
    /// It is none of a snapshot.
    pub(super) fn snapshot_batch(
        &mut self,
        payload: &[u8],
        each_store: &mut dyn FnMut(&Stored<'_>),
    ) -> Result<(), AbortReason> {
        let applied =
            self.stream.apply_snapshot_batch(&mut self.space, &mut self.scratch, (payload, each_store), self.now);
        // No other thread reads meanwhile, so what the index gives up is free at once.
        self.space.sweep(true);
        applied
    }

    /// Ends the snapshot: places all blocks, and says what was built.
    pub(super) fn end_snapshot(&mut self) -> BuiltSnapshot {
        while self.space.writer.sweep(INGEST_SWEEP_BLOCKS) {}
        self.stream.swept(&mut self.space, self.now);
        let (groups, has_windows) = self.stream.built();
        let (scheme, view) = (self.space.scheme.get(), self.stream.view_of_blocks());
        BuiltSnapshot { scheme, groups, has_windows, view }
    }

    /// Dumps the next blocks: see [`crate::index::ShardWriter::dump`].
    pub(super) fn dump(
        &self,
        cursor: &mut DumpCursor,
        blocks_max: usize,
        out: &mut dyn FnMut(StoreBlocks<'_>),
    ) -> bool {
        self.space.writer.dump(self.stream.slot, cursor, blocks_max, out)
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
