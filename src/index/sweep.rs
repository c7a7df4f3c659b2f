//! Cleaning up behind clears: retired lanes are taken out of every node, a few nodes at a time.

use super::lanes::{Lane, LaneState};
use super::node::NodeId;
use super::tree::Tree;
use super::worker::Worker;
use crate::ids::WorkerSlot;

/// One pass over all nodes, for the lanes that had been retired when it began.
#[derive(Debug)]
pub(super) struct Pass {
    lanes: Vec<Lane>,
    /// By lane.
    wanted: Vec<bool>,
    cursor: NodeId,
    /// Slots that are free once it is through.
    pub(super) leaving: Vec<WorkerSlot>,
}

impl Pass {
    pub(super) fn begin(tree: &mut Tree, leaving: Vec<WorkerSlot>) -> Self {
        let lanes: Vec<Lane> = tree.lanes.retired_lanes().collect();
        let mut wanted = vec![false; lanes.iter().map(|lane| usize::from(lane.0) + 1).max().unwrap_or(0)];
        lanes.iter().for_each(|lane| wanted[usize::from(lane.0)] = true);
        tree.sweeping = true;
        Self { lanes, wanted, cursor: NodeId(1), leaving }
    }

    pub(super) fn wants(&self, lane: Lane) -> bool {
        self.wanted.get(usize::from(lane.0)).copied().unwrap_or(false)
    }

    /// Looks at up to about `budget` nodes and entries; returns how much it did, or `None` when it is through.
    pub(super) fn step<'a>(
        &mut self,
        tree: &mut Tree,
        budget: usize,
        worker_of: impl Fn(WorkerSlot, u64) -> Option<&'a Worker>,
    ) -> Option<usize> {
        let mut work = 0;
        while work < budget {
            let id = match tree.unswept.pop() {
                Some(id) => id,
                None if tree.nodes.from(self.cursor).0 < tree.nodes.end() => {
                    let id = tree.nodes.from(self.cursor);
                    self.cursor.0 = id.0 + 1;
                    id
                }
                None => return None,
            };
            work += 1;
            if tree.nodes.is_used(id) {
                work += self.purge(tree, id, &worker_of);
            }
        }
        Some(work)
    }

    /// Takes the lanes out of one node. Where a worker lives on in other lanes and may hold blocks below,
    /// one of those keeps its names there.
    fn purge<'a>(
        &self,
        tree: &mut Tree,
        id: NodeId,
        worker_of: impl Fn(WorkerSlot, u64) -> Option<&'a Worker>,
    ) -> usize {
        let retired: Vec<Lane> =
            tree.nodes[id].entries.iter().map(|entry| entry.lane).filter(|lane| self.wants(*lane)).collect();
        for lane in &retired {
            let record = *tree.lanes.record(*lane);
            let node = &tree.nodes[id];
            if let Some(worker) = worker_of(record.slot, record.life).filter(|_| node.has_children())
                && let Some(heir) = worker.references().map(|(_, lane)| lane).next()
                && let Some(column) = node.entry(*lane).map(|entry| entry.column)
            {
                tree.enter(id, heir, column);
            }
            if let Ok(at) = tree.nodes[id].find(*lane) {
                tree.remove_entry(id, at);
            }
        }
        if !retired.is_empty() {
            tree.settle(id);
        }
        retired.len() * 4
    }

    /// The lanes are nobody's from now on.
    pub(super) fn finish(self, tree: &mut Tree) -> Vec<WorkerSlot> {
        tree.sweeping = false;
        self.lanes.iter().for_each(|lane| tree.lanes.set_state(*lane, LaneState::Free));
        self.leaving
    }
}
