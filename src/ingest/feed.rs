//! One worker's stream without its socket: what an ingest thread does with messages, for whoever has them as bytes.
//!
//! Fuzzing and measurements go through here, so that they take the same way as what comes from a socket.

use std::sync::Arc;

use super::stream::{SpaceShard, Now, Scratch, Stream};
use super::{Publisher, WorkerView};
use crate::endpoint::Endpoint;
use crate::fleet::{EventSource, SchemeCell, TrustCell};
use crate::ids::{EventSeq, Scheme, ShardId, SpaceId, Worker, WorkerIndex, WorkerSlot};
use crate::index::{self, IndexReader, ShardLimits, WorkerBlocks};
use crate::limits::INGEST_SWEEP_BLOCKS;
use crate::trust::Trust;

/// One worker of a shard of its own, fed by hand. Every message is a turn.
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
    /// The place of its only worker there.
    pub const SLOT: WorkerSlot = WorkerSlot(0);

    /// An empty shard with one worker, and its reader. `scheme` `None` = it is learnt; `salts_possible` is false
    /// where chains with an unknown parent may be bound. Lost batches cannot be fetched again.
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
        let publisher = Publisher {
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
        let space = SpaceShard {
            space: publisher.space,
            writer,
            scheme: Arc::clone(&publisher.scheme),
            relearns: scheme.is_none(),
            unsure: false,
            slots: vec![slot],
            unswept: false,
            choked: false,
            deferring: false,
        };
        let now = Now::default();
        let stream = Stream::new(&publisher, now);
        (Self { space, stream, scratch: Scratch::default(), view, now }, IndexReader::new(vec![reader]))
    }

    /// Takes a message, and shows what it changed.
    pub fn message(&mut self, seq: EventSeq, payload: &[u8]) {
        self.pass_time();
        self.stream.message(&mut self.space, &mut self.scratch, seq, payload, self.now);
        self.end_turn();
    }

    /// The connection broke.
    pub fn disconnected(&mut self) {
        self.pass_time();
        self.stream.disconnected(&mut self.space, self.now);
        self.end_turn();
    }

    /// What other threads would see of the worker.
    #[must_use]
    pub fn view(&self) -> &WorkerView {
        &self.view
    }

    /// How much the index holds for it.
    #[must_use]
    pub fn held(&self) -> WorkerBlocks {
        self.space.writer.held(self.stream.slot)
    }

    /// A millisecond for each turn.
    fn pass_time(&mut self) {
        self.now.unix_ms += 1;
        self.now.uptime_ms += 1;
    }

    fn end_turn(&mut self) {
        self.stream.show(&mut self.space);
        self.space.writer.sweep(INGEST_SWEEP_BLOCKS);
        self.stream.swept(&mut self.space, self.now);
    }
}
