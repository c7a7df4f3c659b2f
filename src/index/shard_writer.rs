//! The writer of a shard: the calls by which an ingest thread changes its shard.

use super::grant::{Bound, Grant};
use super::holders::{HolderBit, HolderState, Layer};
use super::maintain::Pass;
use super::reclaim::Reclaimer;
use super::remove::Removal;
use super::shared_index::{SharedIndex, SharedIndexCell};
use super::tree::{Tree, Waste};
use super::worker::Worker;
use super::{
    Binding, Refusal, RemoveOutcome, ShardLimits, ShardMemory, Shortfall, StoreBlocks, StoreOutcome, TierDigest,
    WorkerBlocks,
};
use crate::budget::{Gauge, MemoryPool};
use crate::ids::{EngineHash, GroupId, Seed, Tier, WorkerSlot};
use crate::limits::{
    INDEX_EVENT_SWEEP_MAX, INDEX_GARBAGE_BYTES_STRAINED, INDEX_IDLE_SHRINKS_MAX, WORKER_BYTES_PER_BLOCK_MAX,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// The only writer of a shard. When a call returns, readers see all of its change.
#[derive(Debug)]
pub struct ShardWriter {
    limits: ShardLimits,
    pub(super) tree: Tree,
    workers: Vec<Slot>,
    lives: u64,
    pass: Option<Pass>,
    /// Slots that the next sweep pass will free.
    leaving: Vec<WorkerSlot>,
    /// Workers with dormant blocks that could have places.
    deferring: Vec<WorkerSlot>,
    removal: Removal,
    /// Where readers find the tree.
    shared: Arc<SharedIndexCell>,
    reclaimer: Reclaimer,
    grant: Grant,
}

#[derive(Debug)]
enum Slot {
    Free,
    /// Its worker is removed; nodes may still have entries of its holder bits.
    Leaving,
    Used(Box<Worker>),
}

impl ShardWriter {
    pub(super) fn new(limits: ShardLimits, mut tree: Tree, shared: Arc<SharedIndexCell>, reclaimer: Reclaimer) -> Self {
        tree.set_maps_ahead(limits.maps_ahead());
        let (workers, leaving) = (Vec::new(), Vec::new());
        let deferring = Vec::new();
        Self {
            limits,
            tree,
            workers,
            lives: 0,
            pass: None,
            leaving,
            deferring,
            removal: Removal::EMPTY,
            shared,
            reclaimer,
            grant: Grant::default(),
        }
    }

    /// Draws memory from what all shards share from now on. `gauge` shows what this shard takes.
    pub fn draw_from(&mut self, pool: Arc<MemoryPool>, gauge: Gauge) {
        self.grant = Grant::of(pool, gauge, self.memory().bytes());
    }

    /// Whether new blocks of a worker are refused, because memory is short and it has more blocks than others.
    pub fn hold_back(&mut self, slot: WorkerSlot, is_held_back: bool) {
        if let Some(worker) = self.worker_mut(slot) {
            worker.is_held_back = is_held_back;
        }
    }

    /// Replaces the index by an empty one, whatever state a panic left it in. Workers keep their slots and bounds and
    /// hold nothing; readers see the empty index from their next try on. Slots whose worker was being swept out become
    /// free.
    ///
    /// Reads only those parts of the old index that no event changes in several steps: bounds, slots, and the epoch.
    /// Returns whether all of the old memory could be freed.
    pub fn reset_after_panic(&mut self) -> bool {
        let ShardLimits { node_blocks_max, secret, .. } = self.limits;
        let mut tree = Tree::new(&self.reclaimer, node_blocks_max, secret, self.tree.head.epoch() + 1);
        tree.set_maps_ahead(self.limits.maps_ahead());
        let mut workers = Vec::with_capacity(self.workers.len());
        for (at, slot) in self.workers.iter().enumerate() {
            workers.push(match slot {
                Slot::Used(worker) => {
                    self.lives += 1;
                    let mut fresh =
                        Box::new(Worker::new(WorkerSlot(at as u16), self.lives, (worker.blocks_max, worker.bytes_max)));
                    fresh.account(&mut tree);
                    Slot::Used(fresh)
                }
                Slot::Free | Slot::Leaving => Slot::Free,
            });
        }
        tree.workers = workers.len();
        // Readers first: headers of the old tree may still name memory that dropping it frees.
        let shared = self.shared.replace(tree.shared_index(&self.reclaimer));
        tree.garbage.push(Waste::SharedIndex(shared), size_of::<SharedIndex>() as u64);
        let old = (
            std::mem::replace(&mut self.tree, tree),
            std::mem::replace(&mut self.workers, workers),
            std::mem::replace(&mut self.removal, Removal::EMPTY),
        );
        (self.pass, self.leaving, self.deferring) = (None, Vec::new(), Vec::new());
        // Memory that cannot be freed, because the panic left it inconsistent, is leaked.
        let is_freed = catch_unwind(AssertUnwindSafe(|| drop(old))).is_ok();
        self.tree.reclaim(true);
        is_freed
    }

    /// Adds a worker and returns its slot, the lowest free one; `None` when the shard is full. The slot of a removed
    /// worker becomes free once its blocks have been swept.
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
        self.lives += 1;
        let bounds = (self.limits.worker_blocks_max, self.limits.worker_bytes_max);
        let mut worker = Box::new(Worker::new(slot, self.lives, bounds));
        worker.account(&mut self.tree);
        self.workers[at] = Slot::Used(worker);
        self.tree.workers = self.workers.len();
        Some(slot)
    }

    /// Whether a store at the root of blocks that are already held counts as one more copy.
    #[must_use]
    pub const fn counts_copies(&self) -> bool {
        self.limits.counts_copies
    }

    /// Gives a worker a bound of its own in place of the shard's `worker_blocks_max`. Its bound in bytes grows in
    /// proportion.
    pub fn bound_worker(&mut self, slot: WorkerSlot, blocks_max: u64) {
        let bytes_max = self.limits.worker_bytes_max.max(blocks_max.saturating_mul(WORKER_BYTES_PER_BLOCK_MAX));
        if let Some(worker) = self.worker_mut(slot) {
            (worker.blocks_max, worker.bytes_max) = (blocks_max, bytes_max);
        }
    }

    /// Removes a worker: at once for readers, gradually in [`sweep`](Self::sweep) for the writer. Does nothing if the
    /// slot has no worker.
    pub fn remove_worker(&mut self, slot: WorkerSlot) {
        let Some(entry @ Slot::Used(_)) = self.workers.get_mut(usize::from(slot.0)) else { return };
        if let Slot::Used(mut worker) = std::mem::replace(entry, Slot::Leaving) {
            worker.unaccount(&mut self.tree);
            self.leaving.push(slot);
            self.retire(&worker.all_holders);
        }
        self.sweep_if_crowded();
    }

    /// Begins a batch of events of this worker. A store at the root is ambiguous if all its blocks were held before the
    /// batch began, and still are.
    pub fn begin_batch(&mut self, slot: WorkerSlot) {
        if let Some(Slot::Used(worker)) = self.workers.get_mut(usize::from(slot.0))
            && worker.begin_batch(&mut self.tree.spare_lists)
        {
            worker.account(&mut self.tree);
        }
    }

    /// Ends the worker's batch: batches that begin later, of any worker, use its memory. Until the worker's next batch
    /// begins, a store counts as one of a batch in which nothing was stored before.
    ///
    /// A caller that does not end batches gives each worker memory of its own for its last one.
    pub fn end_batch(&mut self, slot: WorkerSlot) {
        if let Some(Slot::Used(worker)) = self.workers.get_mut(usize::from(slot.0))
            && worker.end_batch(&mut self.tree.spare_lists)
        {
            worker.account(&mut self.tree);
        }
    }

    /// The seed of a bound hash, or of an unbound parent of bound blocks: the seed that its children take.
    #[must_use]
    pub fn seed_of(&self, slot: WorkerSlot, hash: EngineHash) -> Option<Seed> {
        self.worker(slot)?.seed_of(&self.tree, hash)
    }

    /// The binding of a hash, whichever tier holds it; `None` if no tier does.
    #[must_use]
    pub fn binding_of(&self, slot: WorkerSlot, hash: EngineHash) -> Option<Binding> {
        self.worker(slot)?.binding(&self.tree, hash)
    }

    /// Whether a tier has a reference to a block, by any of its groups.
    #[must_use]
    pub fn refers_to(&self, slot: WorkerSlot, tier: Tier, hash: EngineHash) -> bool {
        let Some(worker) = self.worker(slot) else { return false };
        worker.references().any(|(of, holder)| of == tier.into() && worker.refers(&self.tree, holder, hash))
    }

    /// Prefetches for later events of the batch: `far` is the first block of the event about a dozen events later,
    /// `near` that of an event half as far away. Has no other effect. Worth it if events have only a few blocks.
    pub fn look_ahead(&self, far: Option<EngineHash>, near: Option<EngineHash>) {
        far.into_iter().for_each(|name| self.tree.prefetch_far(name));
        near.into_iter().for_each(|name| self.tree.prefetch_near(name));
    }

    /// Counts one reference of a tier and group to each block, and binds the unbound ones. Applies all of the store or
    /// none of it.
    pub fn store(&mut self, slot: WorkerSlot, blocks: &StoreBlocks<'_>) -> StoreOutcome {
        self.store_announced(slot, blocks, &mut |_| {})
    }

    /// As [`store`](Self::store). `before_shortfall` is called before readers can see answers about the worker that are
    /// too low, so that the worker's trust falls first. Readers wait meanwhile, so it must be short.
    pub fn store_announced(
        &mut self,
        slot: WorkerSlot,
        blocks: &StoreBlocks<'_>,
        before_shortfall: &mut dyn FnMut(Shortfall),
    ) -> StoreOutcome {
        let Some(Slot::Used(worker)) = self.workers.get_mut(usize::from(slot.0)) else {
            return StoreOutcome::refused(Refusal::UnknownWorker);
        };
        let (tree, limits) = (&mut self.tree, &self.limits);
        let (len, names) = (blocks.hashes.len(), tree.name_map.len());
        let beyond = bound_of(worker, tree, (limits, &mut self.grant), len);
        let has_room = worker.removed_inner_blocks <= limits.dormant_blocks_max as u64
            || worker.recount_removed_inner_blocks(tree, limits);
        let fast = if beyond.is_none() && has_room { worker.store_fast(tree, limits, blocks).ok() } else { None };
        let outcome = fast.unwrap_or_else(|| {
            // Blocks that are bound already need no memory.
            let ceiling = match beyond {
                Some(Bound::Withheld) => 0,
                Some(Bound::Budget) => limits.memory_bytes_max.min(self.grant.bytes()),
                Some(Bound::Ceiling) | None => limits.memory_bytes_max,
            };
            let limits = ShardLimits { memory_bytes_max: ceiling, ..*limits };
            let mut outcome = worker.store_slow(tree, &limits, blocks, before_shortfall);
            if outcome.refused == Some(Refusal::MemoryBound) && matches!(beyond, Some(Bound::Budget | Bound::Withheld))
            {
                outcome.refused = Some(Refusal::BudgetBound);
            }
            outcome
        });
        worker.account_for(tree, names);
        if outcome.deferred && !self.deferring.contains(&slot) {
            self.deferring.push(slot);
        }
        if outcome.refused == Some(Refusal::WorkBound) {
            self.empty(slot);
        }
        self.tree.reclaim(false);
        outcome
    }

    /// Declares that a group of the device tier serves attention with a sliding window: for a prompt held up to a
    /// block, this group needs only the `window_blocks` before that block. The group's blocks then count neither for
    /// nor against the device tier itself. The device tier is held as far as its other groups go, and within that as
    /// far as every window group has the last blocks. If groups have different windows, all must have the longest.
    ///
    /// Lasts until the tier is cleared. Returns `false` and changes nothing if the group has already counted for the
    /// tier itself, `window_blocks` is 0, there are `GROUPS_MAX` such groups, or the slot has no worker.
    pub fn announce_window(&mut self, slot: WorkerSlot, group: GroupId, window_blocks: u32) -> bool {
        let Some(Slot::Used(worker)) = self.workers.get_mut(usize::from(slot.0)) else { return false };
        let announced = worker.announce_window(&mut self.tree, group, window_blocks);
        worker.account(&mut self.tree);
        announced
    }

    /// Forgets all windows of a worker: none of its groups serves one any more.
    pub fn forget_windows(&mut self, slot: WorkerSlot) {
        let Some(Slot::Used(worker)) = self.workers.get_mut(usize::from(slot.0)) else { return };
        if worker.layers[Layer::Windows.index()].groups.is_empty() {
            return;
        }
        worker.window_blocks = 0;
        let holders = worker.clear_layer(Layer::Windows);
        worker.account(&mut self.tree);
        self.retire(&holders);
        self.sweep_if_crowded();
    }

    /// Whether a group of a tier has a reference to a block.
    #[must_use]
    pub fn refers(&self, slot: WorkerSlot, tier: Tier, group: GroupId, hash: EngineHash) -> bool {
        let refers = |worker: &Worker| worker.refers_to(&self.tree, worker.layer(tier, group), group, hash);
        self.worker(slot).is_some_and(refers)
    }

    /// Takes one reference of a tier and group from each block that has more than one. Called after a store of these
    /// blocks, it undoes what the store counted for blocks that already had a reference.
    pub fn take_back_repeated(&mut self, slot: WorkerSlot, tier: Tier, group: GroupId, hashes: &[EngineHash]) {
        let Some(worker) = self.worker(slot) else { return };
        let Some(holder) = worker.group(worker.layer(tier, group), group).map(|group| group.holder) else { return };
        let has_more = |hash: &&EngineHash| worker.extras.get(**hash, holder) > 0;
        let repeated: Vec<EngineHash> = hashes.iter().filter(has_more).copied().collect();
        self.remove(slot, tier, group, &repeated);
    }

    /// Takes one reference of a tier and group from each block. Hashes without such a reference are counted as unknown
    /// and change nothing.
    pub fn remove(&mut self, slot: WorkerSlot, tier: Tier, group: GroupId, hashes: &[EngineHash]) -> RemoveOutcome {
        let worker = match self.workers.get_mut(usize::from(slot.0)) {
            Some(Slot::Used(worker)) => worker,
            _ => return RemoveOutcome { removed: 0, unknown: hashes.len() as u32 },
        };
        let tree = &mut self.tree;
        let names = tree.name_map.len();
        let layer = worker.layer(tier, group);
        let outcome = worker.remove(tree, &mut self.removal, layer, group, hashes);
        worker.account_for(tree, names);
        tree.reclaim(false);
        outcome
    }

    /// Whether a worker has more dormant blocks than one event may move. A [`clear`](Self::clear) of one tier then
    /// empties the whole worker, because each of these blocks would have to be visited.
    #[must_use]
    pub fn is_cleared_whole(&self, slot: WorkerSlot) -> bool {
        self.worker(slot).is_some_and(|worker| worker.dormant.len() > self.limits.event_moves_max)
    }

    /// Empties one tier of a worker, or all tiers, as if they had never been used, groups included. At once for
    /// readers, gradually in [`sweep`](Self::sweep) for the writer.
    pub fn clear(&mut self, slot: WorkerSlot, tier: Option<Tier>) {
        let tier = tier.filter(|_| !self.is_cleared_whole(slot));
        let Some(Slot::Used(worker)) = self.workers.get_mut(usize::from(slot.0)) else { return };
        match tier {
            Some(tier) => {
                let mut holders = worker.clear_layer(tier.into());
                if tier == Tier::Device {
                    holders.extend(worker.clear_layer(Layer::Windows));
                    worker.window_blocks = 0;
                }
                worker.account(&mut self.tree);
                self.retire(&holders);
            }
            None => self.empty(slot),
        }
        self.sweep_if_crowded();
    }

    /// Begins a new life of a worker, without blocks.
    fn empty(&mut self, slot: WorkerSlot) {
        let Some(Slot::Used(worker)) = self.workers.get_mut(usize::from(slot.0)) else { return };
        self.lives += 1;
        let fresh = Worker::new(slot, self.lives, (worker.blocks_max, worker.bytes_max));
        let mut old = std::mem::replace(&mut **worker, fresh);
        old.unaccount(&mut self.tree);
        worker.account(&mut self.tree);
        self.retire(&old.all_holders);
    }

    fn retire(&mut self, holders: &[HolderBit]) {
        let Self { tree, .. } = self;
        for holder in holders {
            tree.holders.set_state(*holder, HolderState::Retired);
        }
        if !holders.is_empty() {
            tree.publish_holders();
        }
    }

    /// Sweeps a slice if too many holder bits wait for it. Whatever the shard holds, one event does no more.
    fn sweep_if_crowded(&mut self) {
        if self.tree.holders.retired() > self.limits.retired_holders_max {
            self.sweep(INDEX_EVENT_SWEEP_MAX);
        }
    }

    /// Gives places to deferred dormant blocks, up to about `budget`; returns how many it placed.
    fn continue_placements(&mut self, budget: usize) -> usize {
        let Some(slot) = self.deferring.pop() else { return 0 };
        let Some(Slot::Used(worker)) = self.workers.get_mut(usize::from(slot.0)) else { return 0 };
        let (tree, moves) = (&mut self.tree, budget.min(self.limits.event_moves_max));
        let names = tree.name_map.len();
        worker.set_allowance(moves, &self.limits);
        if worker.continue_placement(tree) {
            self.deferring.push(slot);
        }
        let done = moves - worker.allowance.placements.min(moves);
        let exhausted = worker.allowance.exhausted;
        worker.account_for(tree, names);
        if exhausted {
            self.empty(slot);
            if let Some(worker) = self.worker_mut(slot) {
                worker.emptied_by_sweep = true;
            }
        }
        done.max(1)
    }

    /// Whether blocks that a store [deferred](StoreOutcome::deferred) still wait for their places.
    #[must_use]
    pub fn is_deferring(&self, slot: WorkerSlot) -> bool {
        self.worker(slot).is_some_and(|worker| !worker.placement_queue.is_empty())
    }

    /// Whether a sweep has emptied a worker, because more of its blocks would have to move than may; `true` once. This
    /// happens only to workers of which a store was [deferred](StoreOutcome::deferred).
    pub fn take_emptied_by_sweep(&mut self, slot: WorkerSlot) -> bool {
        self.worker_mut(slot).is_some_and(|worker| std::mem::take(&mut worker.emptied_by_sweep))
    }

    /// How many references a tier and group has to a block.
    #[must_use]
    pub fn references_to(&self, slot: WorkerSlot, tier: Tier, group: GroupId, hash: EngineHash) -> u64 {
        let Some(worker) = self.worker(slot) else { return 0 };
        let Some(holder) = worker.group(worker.layer(tier, group), group).map(|group| group.holder) else { return 0 };
        if !worker.refers(&self.tree, holder, hash) {
            return 0;
        }
        1 + u64::from(worker.extras.get(hash, holder))
    }

    /// Whether any block of a worker has more than one reference.
    #[must_use]
    pub fn has_copies(&self, slot: WorkerSlot) -> bool {
        self.worker(slot).is_some_and(|worker| !worker.extras.is_empty())
    }

    /// Ends a batch: advances the epoch, and reuses memory that no reader can be looking at.
    pub fn publish(&mut self) {
        self.tree.head.end_batch();
        self.tree.reclaim(false);
        self.tree.shrink(1);
    }

    /// Hands over all garbage, however little, and shrinks tables that have become too large. For idle times.
    pub fn reclaim(&mut self) {
        self.tree.shrink(INDEX_IDLE_SHRINKS_MAX);
        self.tree.reclaim(true);
        let Self { grant, tree, .. } = self;
        grant.settle(tree.workers, || tree.bytes());
    }

    /// Cleans up after clears and removed workers, and joins nodes: does about `budget_blocks` blocks' worth of work,
    /// and returns whether there is more. Invisible to readers and to every other call, except that slots become free,
    /// and that blocks that a store [deferred](StoreOutcome::deferred) get their places.
    pub fn sweep(&mut self, budget_blocks: usize) -> bool {
        let budget = budget_blocks.max(1);
        let mut work = self.continue_placements(budget);
        work += self.tree.join_some(budget.div_ceil(2));
        while work < budget {
            if self.pass.is_none() {
                if self.tree.holders.retired() == 0 && self.leaving.is_empty() {
                    break;
                }
                self.pass = Some(Pass::begin(&mut self.tree, std::mem::take(&mut self.leaving)));
            }
            let Some(pass) = &mut self.pass else { break };
            let workers = &self.workers;
            let worker_of = |slot: WorkerSlot, life: u64| match workers.get(usize::from(slot.0)) {
                Some(Slot::Used(worker)) if worker.life == life => Some(&**worker),
                _ => None,
            };
            match pass.step(&mut self.tree, budget - work, worker_of) {
                Some(done) => work += done,
                None => self.finish_pass(),
            }
        }
        self.tree.reclaim(false);
        let joins = !self.tree.joins.is_empty() && self.tree.garbage.waiting_bytes() < INDEX_GARBAGE_BYTES_STRAINED;
        let deferring = !self.deferring.is_empty();
        deferring || joins || self.pass.is_some() || self.tree.holders.retired() > 0 || !self.leaving.is_empty()
    }

    fn finish_pass(&mut self) {
        let Some(pass) = self.pass.take() else { return };
        for slot in &mut self.workers {
            if let Slot::Used(worker) = slot {
                worker.all_holders.retain(|holder| !pass.wants(*holder));
            }
        }
        let leaving = pass.finish(&mut self.tree);
        leaving.into_iter().for_each(|slot| self.workers[usize::from(slot.0)] = Slot::Free);
    }

    /// The counts of a worker; all 0 if the slot has none.
    #[must_use]
    pub fn held(&self, slot: WorkerSlot) -> WorkerBlocks {
        self.worker(slot).map(Worker::figures).unwrap_or_default()
    }

    /// How many blocks a tier of a worker holds, and the sum over their engine hashes that tells two such sets apart:
    /// for audits. All 0 if the slot has no worker.
    #[must_use]
    pub fn digest(&self, slot: WorkerSlot, tier: Tier) -> TierDigest {
        self.worker(slot).map(|worker| worker.digest(tier.into())).unwrap_or_default()
    }

    /// The memory that the shard takes.
    #[must_use]
    pub fn memory(&self) -> ShardMemory {
        let workers = self.tree.workers_bytes + (self.workers.capacity() * size_of::<Slot>()) as u64;
        let tree = &self.tree;
        ShardMemory {
            blocks_bytes: tree.arena.bytes(),
            blocks_free_bytes: tree.arena.free_words() * 8,
            names_bytes: tree.name_map.bytes(),
            nodes_bytes: tree.table.bytes() + tree.idle_rows_bytes() + tree.nodes.bytes() + tree.lists_bytes(),
            workers_bytes: workers,
            garbage_bytes: tree.garbage.waiting_bytes(),
            nodes: tree.nodes.len() as u64,
            names: tree.name_map.len() as u64,
        }
    }

    /// Whether more garbage than `garbage_bytes_max` waits for readers. The caller should then apply no more events
    /// until, after a [`publish`](Self::publish) or [`reclaim`](Self::reclaim), this returns `false`.
    #[must_use]
    pub fn is_choked(&self) -> bool {
        self.tree.garbage.waiting_bytes() > self.limits.garbage_bytes_max
    }

    /// How many dormant children of a worker have been walked.
    #[cfg(test)]
    pub(super) fn dormant_children_walked(&self, slot: WorkerSlot) -> u64 {
        self.worker(slot).map_or(0, |worker| worker.dormant.walked())
    }

    #[cfg(test)]
    pub(super) fn all_workers(&self) -> impl Iterator<Item = &Worker> + '_ {
        self.workers.iter().filter_map(|slot| if let Slot::Used(worker) = slot { Some(&**worker) } else { None })
    }

    /// Sets the number of references of the device's only group to a block beyond the first.
    #[cfg(test)]
    pub(super) fn set_extras(&mut self, slot: WorkerSlot, name: EngineHash, extras: u32) {
        let worker = self.worker_mut(slot).expect("a worker in the slot");
        let holder = worker.layers[0].groups[0].holder;
        let before = worker.extras.set(name, holder, extras);
        worker.layers[0].references += u64::from(extras) - u64::from(before);
        worker.extras_most = extras;
    }

    pub(super) fn worker(&self, slot: WorkerSlot) -> Option<&Worker> {
        match self.workers.get(usize::from(slot.0))? {
            Slot::Used(worker) => Some(worker),
            Slot::Free | Slot::Leaving => None,
        }
    }

    fn worker_mut(&mut self, slot: WorkerSlot) -> Option<&mut Worker> {
        match self.workers.get_mut(usize::from(slot.0))? {
            Slot::Used(worker) => Some(worker),
            Slot::Free | Slot::Leaving => None,
        }
    }
}

/// What bounds a store of `blocks` blocks, if anything does.
fn bound_of(worker: &Worker, tree: &Tree, (limits, grant): (&ShardLimits, &mut Grant), blocks: usize) -> Option<Bound> {
    let bytes = || tree.bytes_with(blocks as u64) + worker.growth_bytes(blocks);
    if worker.is_held_back {
        return Some(Bound::Withheld);
    }
    if limits.memory_bytes_max != u64::MAX && bytes() > limits.memory_bytes_max {
        return Some(Bound::Ceiling);
    }
    grant.bound(blocks as u64, bytes, || worker.bytes_with(tree, blocks))
}

impl Drop for ShardWriter {
    /// A shard without a writer holds nothing, because it would learn of no block that its workers lose.
    fn drop(&mut self) {
        let holders: Vec<HolderBit> = self
            .workers
            .iter()
            .filter_map(|slot| if let Slot::Used(worker) = slot { Some(&worker.all_holders) } else { None })
            .flatten()
            .copied()
            .collect();
        self.retire(&holders);
    }
}
