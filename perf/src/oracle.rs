//! What is right: for each worker, the set of blocks it holds.

use std::ops::Range;

use kvrouted::ids::{Tier, TierBlocks};
use rustc_hash::FxHashMap;

use crate::nodes::NodeId;
use crate::script::{Action, Script};

#[derive(Clone, Debug, Default)]
struct Held {
    /// References, by tier.
    tiers: [FxHashMap<NodeId, u32>; 4],
}

/// The plain model. A node stands for its whole prefix, so the leading blocks of a path that are in a
/// worker's set are what that worker holds of it, whatever happened in which order.
#[derive(Clone, Debug)]
pub(crate) struct Oracle {
    workers: Vec<Held>,
}

impl Oracle {
    /// A fleet that holds nothing.
    #[must_use]
    pub(crate) fn new(workers: u16) -> Self {
        Self { workers: vec![Held::default(); usize::from(workers)] }
    }

    /// Workers of the fleet.
    #[must_use]
    pub(crate) fn workers(&self) -> u16 {
        self.workers.len() as u16
    }

    /// Plays some batches.
    pub(crate) fn apply(&mut self, script: &Script, batches: Range<usize>) {
        for op in batches.flat_map(|batch| script.batch(batch)) {
            for node in script.blocks_of(op) {
                match op.action {
                    Action::Store => self.store(op.worker, op.tier, *node),
                    Action::Remove => self.remove(op.worker, op.tier, *node),
                }
            }
        }
    }

    /// One more reference.
    pub(crate) fn store(&mut self, worker: u16, tier: Tier, node: NodeId) {
        *self.tier_mut(worker, tier).entry(node).or_insert(0) += 1;
    }

    /// One reference less, if there is one.
    pub(crate) fn remove(&mut self, worker: u16, tier: Tier, node: NodeId) {
        let tier = self.tier_mut(worker, tier);
        if let Some(references) = tier.get_mut(&node) {
            *references -= 1;
            if *references == 0 {
                tier.remove(&node);
            }
        }
    }

    /// Nothing of this worker is left.
    pub(crate) fn clear(&mut self, worker: u16) {
        self.workers[usize::from(worker)].tiers.iter_mut().for_each(FxHashMap::clear);
    }

    /// What a worker holds of a path: a run in each tier, each where the one before ended.
    #[must_use]
    pub(crate) fn depth(&self, worker: u16, path: &[NodeId]) -> TierBlocks {
        let tiers = &self.workers[usize::from(worker)].tiers;
        let mut from = 0;
        let mut run = |tier: Tier| {
            let run = path[from..].iter().take_while(|node| tiers[tier.index()].contains_key(node)).count();
            from += run;
            run as u32
        };
        TierBlocks {
            device: run(Tier::Device),
            host: run(Tier::Host),
            disk: run(Tier::Disk),
            external: run(Tier::External),
        }
    }

    /// Pairs of a worker's tier and a block it holds.
    #[must_use]
    pub(crate) fn memberships(&self) -> usize {
        self.workers.iter().flat_map(|held| &held.tiers).map(FxHashMap::len).sum()
    }

    fn tier_mut(&mut self, worker: u16, tier: Tier) -> &mut FxHashMap<NodeId, u32> {
        &mut self.workers[usize::from(worker)].tiers[tier.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_ends_the_run_and_a_reference_keeps_a_block() {
        let path: Vec<NodeId> = (0..4).map(NodeId).collect();
        let mut oracle = Oracle::new(2);
        path.iter().for_each(|node| oracle.store(1, Tier::Device, *node));
        oracle.store(1, Tier::Device, path[3]);
        oracle.remove(1, Tier::Device, path[3]);
        assert_eq!((oracle.depth(1, &path).device, oracle.depth(0, &path).device), (4, 0));
        oracle.remove(1, Tier::Device, path[1]);
        oracle.store(1, Tier::Host, path[1]);
        let depth = oracle.depth(1, &path);
        assert_eq!((depth.device, depth.host, oracle.memberships()), (1, 1, 4));
        oracle.clear(1);
        assert_eq!(oracle.memberships(), 0);
    }
}
