//! Operations on an index, whoever's it is.

use std::ops::Range;

use kvrouted::ids::Tier;

use crate::nodes::{NodeId, Nodes};

/// What happens to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// They are stored as a chain, nearest the root first.
    Store,
    /// They are removed, in this order.
    Remove,
}

/// One event of one worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    /// Whose.
    pub(crate) worker: u16,
    /// What happens.
    pub(crate) action: Action,
    /// Where.
    pub(crate) tier: Tier,
    from: u32,
    to: u32,
}

/// Events in order, in batches of one worker each.
#[derive(Debug, Default)]
pub(crate) struct Script {
    ops: Vec<Op>,
    blocks: Vec<NodeId>,
    batch_ends: Vec<u32>,
}

impl Script {
    /// Appends an event to the batch that is open; nothing without blocks.
    pub(crate) fn push(&mut self, worker: u16, action: Action, tier: Tier, blocks: &[NodeId]) {
        if !blocks.is_empty() {
            let from = self.blocks.len() as u32;
            self.blocks.extend_from_slice(blocks);
            self.ops.push(Op { worker, action, tier, from, to: self.blocks.len() as u32 });
        }
    }

    /// Ends the batch that is open; nothing if it is empty.
    pub(crate) fn end_batch(&mut self) {
        let end = self.ops.len() as u32;
        if self.batch_ends.last().copied().unwrap_or(0) < end {
            self.batch_ends.push(end);
        }
    }

    /// Stores blocks that may be several chains: one event for each.
    pub(crate) fn store_runs(&mut self, nodes: &Nodes, worker: u16, tier: Tier, blocks: &[NodeId]) {
        for run in blocks.chunk_by(|before, after| nodes.parent(*after) == Some(*before)) {
            self.push(worker, Action::Store, tier, run);
        }
    }

    /// Batches.
    #[must_use]
    pub(crate) fn batches(&self) -> usize {
        self.batch_ends.len()
    }

    /// Events.
    #[must_use]
    pub(crate) fn events(&self) -> usize {
        self.ops.len()
    }

    /// Blocks over all events, stored and removed alike.
    #[must_use]
    pub(crate) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// The events of one batch; they are of one worker.
    #[must_use]
    pub(crate) fn batch(&self, batch: usize) -> &[Op] {
        &self.ops[self.batch_range(batch)]
    }

    /// The blocks of an event of this script.
    #[must_use]
    pub(crate) fn blocks_of(&self, op: &Op) -> &[NodeId] {
        &self.blocks[op.from as usize..op.to as usize]
    }

    fn batch_range(&self, batch: usize) -> Range<usize> {
        let start = if batch == 0 { 0 } else { self.batch_ends[batch - 1] as usize };
        start..self.batch_ends[batch] as usize
    }

    /// A copy of some batches.
    #[must_use]
    pub(crate) fn slice(&self, batches: Range<usize>) -> Self {
        let mut slice = Self::default();
        for batch in batches {
            for op in self.batch(batch) {
                slice.push(op.worker, op.action, op.tier, self.blocks_of(op));
            }
            slice.end_batch();
        }
        slice
    }

    /// The same with one block in each event, in the same batches.
    #[must_use]
    pub(crate) fn in_single_blocks(&self, batches: Range<usize>) -> Self {
        let mut single = Self::default();
        for batch in batches {
            for op in self.batch(batch) {
                for block in self.blocks_of(op).chunks(1) {
                    single.push(op.worker, op.action, op.tier, block);
                }
            }
            single.end_batch();
        }
        single
    }

    /// What takes everything back, last event first.
    #[must_use]
    pub(crate) fn undone(&self, nodes: &Nodes) -> Self {
        let mut undo = Self::default();
        for op in self.ops.iter().rev() {
            let reversed: Vec<NodeId> = self.blocks_of(op).iter().rev().copied().collect();
            match op.action {
                Action::Store => undo.push(op.worker, Action::Remove, op.tier, &reversed),
                Action::Remove => undo.store_runs(nodes, op.worker, op.tier, &reversed),
            }
            undo.end_batch();
        }
        undo
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::EngineHashing;
    use crate::oracle::Oracle;

    #[test]
    fn undone_leaves_what_was() {
        let mut nodes = Nodes::new(EngineHashing::Shared);
        let mut path = Vec::new();
        (0..8).for_each(|local| path.push(nodes.intern(path.last().copied(), local + 1)));
        let mut script = Script::default();
        script.push(0, Action::Store, Tier::Device, &path[..6]);
        script.end_batch();
        let before = script.slice(0..1);
        script.push(0, Action::Remove, Tier::Device, &[path[5], path[4], path[3]]);
        script.push(0, Action::Store, Tier::Device, &path[3..8]);
        script.end_batch();
        script.end_batch();
        assert_eq!((script.batches(), script.events(), script.blocks()), (2, 3, 14));
        let tail = script.slice(1..2);
        let mut oracle = Oracle::new(1);
        oracle.apply(&before, 0..1);
        oracle.apply(&tail, 0..1);
        assert_eq!(oracle.depth(0, &path).device, 8);
        let undo = tail.undone(&nodes);
        oracle.apply(&undo, 0..undo.batches());
        assert_eq!((oracle.depth(0, &path).device, oracle.memberships()), (6, 6));
        assert_eq!(tail.in_single_blocks(0..1).events(), 8);
    }
}
