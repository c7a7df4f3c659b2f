//! The write half: what an ingest thread does to its shard.

use super::blocks::Planned;
use super::entries::Blocks;
use super::lanes::Lane;
use super::positions::Positions;
use super::{Refusal, RemoveOutcome, ShardLimits, StoreBlocks, StoreOutcome, WorkerBlocks};
use crate::ids::{EngineHash, GroupId, Seed, Tier, WorkerSlot};
use std::collections::VecDeque;

/// The only hand that changes a shard. Readers see its changes from the next [`publish`](Self::publish) on.
#[derive(Debug)]
pub struct ShardWriter {
    limits: ShardLimits,
    positions: Positions,
    workers: Vec<Slot>,
    debris: VecDeque<Debris>,
    /// Workers with something to sweep, in the order of their turns.
    unswept: VecDeque<WorkerSlot>,
    plan: Vec<Planned>,
}

#[derive(Debug)]
enum Slot {
    Free,
    /// Its worker is gone; its blocks are not yet swept.
    Leaving,
    Used(Box<Blocks>),
}

/// Blocks that nobody holds any more, and that positions still know.
#[derive(Debug)]
struct Debris {
    blocks: Blocks,
    lanes: Vec<Lane>,
    leaving: bool,
}

/// Entries that a clear sweeps at a time when too many lanes wait.
const FORCED_SWEEP_BLOCKS: usize = 4096;

impl ShardWriter {
    pub(super) const fn new(limits: ShardLimits, positions: Positions) -> Self {
        Self {
            limits,
            positions,
            workers: Vec::new(),
            debris: VecDeque::new(),
            unswept: VecDeque::new(),
            plan: Vec::new(),
        }
    }

    /// A slot for one more worker, the lowest that is free; `None` when the shard is full. The slot of a
    /// removed worker is free again once its blocks have been swept.
    pub fn add_worker(&mut self) -> Option<WorkerSlot> {
        let at = match self.workers.iter().position(|slot| matches!(slot, Slot::Free)) {
            Some(at) => at,
            None if self.workers.len() < self.limits.workers_max.min(usize::from(u16::MAX)) => {
                self.workers.push(Slot::Free);
                self.workers.len() - 1
            }
            None => return None,
        };
        let slot = WorkerSlot(at as u16);
        self.workers[at] = Slot::Used(Box::new(Blocks::new(slot, &self.limits)));
        Some(slot)
    }

    /// Gives a worker a bound of its own in place of the shard's `worker_blocks_max`.
    pub fn bound_worker(&mut self, slot: WorkerSlot, blocks_max: u64) {
        if let Some(blocks) = self.blocks_mut(slot) {
            blocks.blocks_max = blocks_max;
        }
    }

    /// Forgets a worker: at once for readers (from the next publish on), by and by in [`sweep`](Self::sweep)
    /// for the writer. Nothing happens if the slot is nobody's.
    pub fn remove_worker(&mut self, slot: WorkerSlot) {
        let Some(place @ Slot::Used(_)) = self.workers.get_mut(usize::from(slot.0)) else { return };
        if let Slot::Used(blocks) = std::mem::replace(place, Slot::Leaving) {
            let lanes: Vec<Lane> = blocks.tiers.iter().map(|tier| tier.lane).filter(|lane| lane.is_some()).collect();
            self.discard(*blocks, lanes, true);
        }
    }

    /// Says that a new batch of events of this worker begins. A store at the root is ambiguous when all its
    /// blocks were held before the batch began, and still are.
    pub fn begin_batch(&mut self, slot: WorkerSlot) {
        if let Some(blocks) = self.blocks_mut(slot) {
            blocks.batch += 1;
        }
    }

    /// The seed of a bound hash, or of an unbound one that bound blocks wait for: what its children take.
    #[must_use]
    pub fn seed_of(&self, slot: WorkerSlot, hash: EngineHash) -> Option<Seed> {
        self.blocks(slot)?.seed_of(hash)
    }

    /// Counts one reference of a tier and group to each block, binding those that are not bound. All of
    /// the store is applied or none of it.
    pub fn store(&mut self, slot: WorkerSlot, blocks: &StoreBlocks<'_>) -> StoreOutcome {
        let Some(Slot::Used(worker)) = self.workers.get_mut(usize::from(slot.0)) else {
            return StoreOutcome::refused(Refusal::UnknownWorker);
        };
        let outcome = worker.store(&mut self.positions, &self.limits, blocks, &mut self.plan);
        self.want_sweep(slot);
        outcome
    }

    /// Takes one reference of a tier and group from each block. What has no such reference is counted as
    /// unknown and stays as it is.
    pub fn remove(&mut self, slot: WorkerSlot, tier: Tier, group: GroupId, hashes: &[EngineHash]) -> RemoveOutcome {
        let mut outcome = RemoveOutcome::default();
        let worker = match self.workers.get_mut(usize::from(slot.0)) {
            Some(Slot::Used(worker)) => worker,
            _ => return RemoveOutcome { unknown: hashes.len() as u32, ..outcome },
        };
        for hash in hashes {
            if worker.remove(&mut self.positions, &self.limits, tier, group, *hash) {
                outcome.removed += 1;
            } else {
                outcome.unknown += 1;
            }
        }
        outcome
    }

    /// Empties one tier of a worker, or all: as if what is emptied had never been used, groups included.
    /// At once for readers (from the next publish on), by and by in [`sweep`](Self::sweep) for the writer.
    pub fn clear(&mut self, slot: WorkerSlot, tier: Option<Tier>) {
        let Some(Slot::Used(worker)) = self.workers.get_mut(usize::from(slot.0)) else { return };
        if let Some(tier) = tier {
            worker.clear_tier(&mut self.positions, tier);
            self.want_sweep(slot);
        } else {
            let mut fresh =
                Blocks { batch: worker.batch, blocks_max: worker.blocks_max, ..Blocks::new(slot, &self.limits) };
            let mut lanes = Vec::new();
            for (tier, fresh) in worker.tiers.iter().zip(&mut fresh.tiers) {
                if tier.held > 0 {
                    lanes.push(tier.lane);
                } else {
                    fresh.lane = tier.lane;
                }
            }
            let old = std::mem::replace(&mut **worker, fresh);
            self.discard(old, lanes, false);
        }
        while self.lanes_waiting() > self.limits.retired_lanes_max {
            self.sweep(FORCED_SWEEP_BLOCKS);
        }
    }

    /// Makes everything since the last publish visible to readers at once. Waits for lookups that are
    /// still in the copy that was replaced by the last publish.
    pub fn publish(&mut self) {
        self.positions.publish();
    }

    /// Cleans up after clears and removed workers: looks at up to about `budget_blocks` blocks, and says
    /// whether there is more to do. What it does is invisible to readers and to every other call, except
    /// that slots become free.
    pub fn sweep(&mut self, budget_blocks: usize) -> bool {
        let mut budget = budget_blocks.max(1);
        while budget > 0 {
            if let Some(debris) = self.debris.front_mut() {
                budget -= debris.sweep(&mut self.positions, budget);
                if debris.blocks.entries.is_empty() {
                    self.finish_debris();
                }
            } else if let Some(slot) = self.unswept.pop_front() {
                let Some(Slot::Used(worker)) = self.workers.get_mut(usize::from(slot.0)) else { continue };
                budget -= worker.sweep(&mut self.positions, &self.limits, budget);
                if worker.cursor.is_some() {
                    self.unswept.push_back(slot);
                }
            } else {
                return false;
            }
        }
        !self.debris.is_empty() || !self.unswept.is_empty()
    }

    /// The figures of a worker; all 0 where the slot is nobody's.
    #[must_use]
    pub fn held(&self, slot: WorkerSlot) -> WorkerBlocks {
        self.blocks(slot).map(Blocks::figures).unwrap_or_default()
    }

    pub(super) fn blocks(&self, slot: WorkerSlot) -> Option<&Blocks> {
        match self.workers.get(usize::from(slot.0))? {
            Slot::Used(blocks) => Some(blocks),
            Slot::Free | Slot::Leaving => None,
        }
    }

    fn blocks_mut(&mut self, slot: WorkerSlot) -> Option<&mut Blocks> {
        match self.workers.get_mut(usize::from(slot.0))? {
            Slot::Used(blocks) => Some(blocks),
            Slot::Free | Slot::Leaving => None,
        }
    }

    fn want_sweep(&mut self, slot: WorkerSlot) {
        let wanted = self.blocks(slot).is_some_and(|blocks| blocks.cursor.is_some());
        if wanted && !self.unswept.contains(&slot) {
            self.unswept.push_back(slot);
        }
    }

    fn discard(&mut self, mut blocks: Blocks, mut lanes: Vec<Lane>, leaving: bool) {
        lanes.iter().for_each(|lane| self.positions.retire_lane(*lane));
        lanes.append(&mut blocks.retired);
        lanes.append(&mut blocks.sweeping);
        self.unswept.retain(|slot| *slot != blocks.slot);
        self.debris.push_back(Debris { blocks, lanes, leaving });
    }

    fn finish_debris(&mut self) {
        let Some(debris) = self.debris.pop_front() else { return };
        debris.lanes.iter().for_each(|lane| self.positions.free_lane(*lane));
        if debris.leaving
            && let Some(place) = self.workers.get_mut(usize::from(debris.blocks.slot.0))
        {
            *place = Slot::Free;
        }
    }

    fn lanes_waiting(&self) -> usize {
        let debris: usize = self.debris.iter().map(|debris| debris.lanes.len()).sum();
        let unswept = self.unswept.iter().filter_map(|slot| self.blocks(*slot));
        debris + unswept.map(|blocks| blocks.retired.len() + blocks.sweeping.len()).sum::<usize>()
    }

    #[cfg(test)]
    pub(super) const fn positions(&self) -> &Positions {
        &self.positions
    }

    #[cfg(test)]
    pub(super) fn hashes_len(&self, slot: WorkerSlot) -> usize {
        self.blocks(slot).map_or(0, Blocks::hashes_len)
    }
}

impl Debris {
    /// Takes up to `budget` entries out of the trie; returns how many it looked at.
    fn sweep(&mut self, positions: &mut Positions, budget: usize) -> usize {
        let mut looked_at = 0;
        while looked_at < budget
            && let Some(entry) = self.blocks.entries.pop()
        {
            looked_at += 1;
            // The last entry is the root, which is nobody's.
            if !entry.used || self.blocks.entries.is_empty() || entry.node == super::positions::NO_NODE {
                continue;
            }
            self.lanes.iter().for_each(|lane| positions.drop_hold(entry.node, *lane));
            positions.leave(entry.node);
        }
        looked_at
    }
}
