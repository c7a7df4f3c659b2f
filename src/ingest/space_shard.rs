//! One space in one shard: the index writer of the space, and everything that its workers in this shard share.

use std::sync::Arc;

use super::PublisherPlan;
use crate::fleet::SchemeCell;
use crate::ids::{SpaceId, WorkerSlot};
use crate::index::ShardWriter;
use crate::limits::INGEST_SWEEP_BLOCKS;

/// One space in one shard.
#[derive(Debug)]
pub(super) struct SpaceShard {
    pub(super) id: SpaceId,
    pub(super) writer: ShardWriter,
    pub(super) scheme: Arc<SchemeCell>,
    /// Whether a learnt scheme may be learnt again once no worker holds a block.
    pub(super) relearns: bool,
    /// Whether the scheme was learnt from a block that came alone, and no event since has shown that it was a full one.
    pub(super) unsure: bool,
    /// The slots of the workers: [`SpaceShard::holds_nothing`] asks all of them.
    pub(super) slots: Vec<WorkerSlot>,
    /// Whether the writer has more to sweep.
    pub(super) unswept: bool,
    /// Whether events wait until the index has got memory back.
    pub(super) choked: bool,
    /// Whether a sweep may still place blocks of a worker that wait for their places.
    pub(super) deferring: bool,
}

impl SpaceShard {
    /// A space without workers.
    pub(super) fn new(id: SpaceId, writer: ShardWriter) -> Self {
        Self {
            id,
            writer,
            scheme: Arc::default(),
            relearns: false,
            unsure: false,
            slots: Vec::new(),
            unswept: false,
            choked: false,
            deferring: false,
        }
    }

    /// Adds a worker. All workers of a space have the same scheme cell.
    pub(super) fn add_worker(&mut self, plan: &PublisherPlan, shards: usize) {
        self.scheme = Arc::clone(&plan.scheme);
        self.relearns = shards == 1 && !plan.scheme_configured;
        self.slots.push(plan.slot);
    }

    /// Cleans up a slice of what was emptied; `true` = there is more. `ticks` = also reclaims what was given up.
    pub(super) fn sweep(&mut self, ticks: bool) -> bool {
        // A sweep gives up memory too, which would only add to what chokes the index.
        let more = !self.choked && self.writer.sweep(INGEST_SWEEP_BLOCKS);
        if ticks || (self.unswept && !more) {
            // On a quiet shard no further batch fills up a remainder that is too small to be reclaimed by itself.
            self.writer.reclaim();
            self.writer.publish();
        }
        self.unswept = more;
        more
    }

    /// Whether no worker of this space and shard holds a block.
    pub(super) fn holds_nothing(&self) -> bool {
        self.slots.iter().all(|slot| self.is_empty(*slot))
    }

    /// Whether no other worker than this one holds a block.
    pub(super) fn holds_only(&self, of: WorkerSlot) -> bool {
        self.slots.iter().all(|slot| *slot == of || self.is_empty(*slot))
    }

    fn is_empty(&self, slot: WorkerSlot) -> bool {
        let held = self.writer.held(slot);
        held.bound == 0 && held.dormant == 0
    }
}
