//! The predictions of one space: the blocks of booked prompts, until they expire or there are too many.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::{ArcSwap, Guard};

use super::blocks::{BLOCK_BYTES_MAX, BlockAt, Blocks};
use crate::fleet::{FleetTable, WorkerRecord, WorkerState};
use crate::hash::{self, SEED_BASE};
use crate::ids::{
    EngineHash, GroupId, LocalHash, Seed, SequenceHash, ShardId, SpaceId, Tier, Worker, WorkerIndex, WorkerSlot,
};
use crate::index::{Depths, IndexReader, Refusal, ShardLimits, ShardWriter, StoreBlocks, shard};
use crate::metrics::{CounterSet, PredictorCounter};

/// The limits of one space's predictions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PredictionLimits {
    /// A block that is not booked again for this long is dropped, milliseconds.
    pub ttl_ms: u64,
    /// The most blocks of a worker whose capacity is not known.
    pub worker_blocks_max: u64,
    /// Memory, bytes: one half for the index, one for the ages of the blocks.
    pub memory_bytes_max: u64,
    /// Mixed into the hashes of the index's tables.
    pub secret: u64,
}

/// The predictions for the workers of one space. Time is an argument; an earlier time than the last one is ignored.
#[derive(Debug)]
pub struct SpacePredictions {
    limits: PredictionLimits,
    now_ms: u64,
    blocks: Blocks,
    writer: ShardWriter,
    reader: PredictionReader,
    /// The most blocks of each worker, by `WorkerSlot`.
    blocks_max: Vec<usize>,
    counters: Arc<CounterSet<PredictorCounter>>,
    names: Vec<SequenceHash>,
    held: Vec<BlockAt>,
    /// Blocks of one worker to remove from the index.
    leaving: Vec<EngineHash>,
}

/// Tries of a store that exceeds the index's memory limit. Older blocks are dropped before each next try.
const STORE_TRIES_MAX: usize = 4;
/// Before each next try, one in this many of all blocks is dropped.
const MEMORY_EVICTED_PART: usize = 32;

impl SpacePredictions {
    /// No predictions yet.
    #[must_use]
    pub fn new(limits: PredictionLimits, counters: Arc<CounterSet<PredictorCounter>>) -> Self {
        let half = limits.memory_bytes_max / 2;
        let shard_limits = ShardLimits { memory_bytes_max: half, secret: limits.secret, ..ShardLimits::default() };
        let (writer, reader) = shard(SHARD, shard_limits);
        let workers = Arc::new(ArcSwap::from_pointee(PredictedWorkers::default()));
        Self {
            limits,
            now_ms: 0,
            blocks: Blocks::new(usize::try_from(half / BLOCK_BYTES_MAX).unwrap_or(usize::MAX)),
            writer,
            reader: PredictionReader { index: IndexReader::new(vec![reader]), workers },
            blocks_max: Vec::new(),
            counters,
            names: Vec::new(),
            held: Vec::new(),
            leaving: Vec::new(),
        }
    }

    /// The reader for serving threads.
    #[must_use]
    pub fn reader(&self) -> PredictionReader {
        self.reader.clone()
    }

    /// Predicts for the workers of `space` that publish no events and are not down. Drops the predictions of all other
    /// workers.
    pub fn follow(&mut self, table: &FleetTable, space: SpaceId) {
        let before = self.reader.workers.load_full();
        let wanted = |record: &WorkerRecord| {
            record.space == space && record.events.is_none() && record.state != WorkerState::Down
        };
        let mut workers = PredictedWorkers(vec![None; table.workers.last().map_or(0, |last| last.index.place() + 1)]);
        for record in table.workers.iter().filter(|record| wanted(record)) {
            workers.0[record.index.place()] = before.get(record.index, record.worker).cloned();
        }
        let stays = |worker: &PredictedWorker| workers.0.iter().flatten().any(|other| other.slot == worker.slot);
        let leaving: Vec<_> = before.0.iter().flatten().filter(|worker| !stays(worker)).cloned().collect();
        for record in table.workers.iter().filter(|record| wanted(record)) {
            let worker = &mut workers.0[record.index.place()];
            if worker.is_none() {
                *worker = self.add(record);
            }
            worker.iter().for_each(|worker| self.set_blocks_max(worker.slot, record.capacity_blocks));
        }
        // Published first, so that no lookup that begins later reads the slot of a removed worker.
        self.reader.workers.store(Arc::new(workers));
        leaving.iter().for_each(|worker| self.remove_worker(worker));
    }

    fn add(&mut self, record: &WorkerRecord) -> Option<PredictedWorker> {
        let Some(slot) = self.writer.add_worker() else {
            self.counters.bump(PredictorCounter::WorkersNotAdmitted);
            return None;
        };
        Some(PredictedWorker { index: record.index, worker: record.worker, slot, blocks: Arc::default() })
    }

    fn set_blocks_max(&mut self, slot: WorkerSlot, capacity_blocks: u64) {
        let blocks_max = if capacity_blocks > 0 { capacity_blocks } else { self.limits.worker_blocks_max };
        let place = usize::from(slot.0);
        if self.blocks_max.len() <= place {
            self.blocks_max.resize(place + 1, 0);
        }
        self.blocks_max[place] = usize::try_from(blocks_max).unwrap_or(usize::MAX);
    }

    /// Drops all blocks of a worker, and its slot, which is free once the index has been swept.
    fn remove_worker(&mut self, worker: &PredictedWorker) {
        self.writer.remove_worker(worker.slot);
        self.forget_blocks(worker.slot);
    }

    fn forget_blocks(&mut self, slot: WorkerSlot) {
        self.counters.add(PredictorCounter::BlocksForgotten, self.blocks.of(slot) as u64);
        while let Some(at) = self.blocks.oldest_of(slot) {
            self.blocks.take(at);
        }
        self.blocks.shrink();
    }

    /// Drops all blocks of a worker, which goes on having predictions.
    pub fn forget(&mut self, index: WorkerIndex, worker: Worker) {
        let workers = self.reader.workers.load_full();
        let Some(found) = workers.get(index, worker) else { return };
        self.writer.clear(found.slot, None);
        self.forget_blocks(found.slot);
        found.blocks.store(0, Ordering::Relaxed);
    }

    /// Drops the blocks of all workers.
    pub fn forget_all(&mut self) {
        let workers = self.reader.workers.load_full();
        workers.0.iter().flatten().for_each(|found| self.forget(found.index, found.worker));
    }

    /// Predicts that a worker holds the blocks `locals` of a prompt that was booked on it, up to the worker's limit.
    pub fn book(&mut self, index: WorkerIndex, worker: Worker, locals: &[LocalHash], now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
        let workers = self.reader.workers.load_full();
        let Some(found) = workers.get(index, worker) else {
            self.counters.bump(PredictorCounter::BookingsOfOthers);
            return;
        };
        let blocks_max = self.blocks_max[usize::from(found.slot.0)].min(self.blocks.max());
        let locals = &locals[..locals.len().min(blocks_max)];
        let (mut names, mut held) = (std::mem::take(&mut self.names), std::mem::take(&mut self.held));
        hash::sequence_hashes(locals, &mut names);
        self.blocks.find_leading(found.slot, &names, &mut held);
        // Renewed before room is made, so that these blocks are not dropped.
        self.blocks.renew(&held, self.now_ms);
        let new = names.len() - held.len();
        self.make_room(found.slot, blocks_max, new);
        if new > 0 && self.store(found.slot, held.len(), &names, locals) {
            self.blocks.add(found.slot, &names[held.len()..], self.now_ms);
            // Renewed once more: a block must be younger than the blocks after it.
            self.blocks.renew(&held, self.now_ms);
        }
        self.counters.bump(PredictorCounter::Bookings);
        self.counters.add(PredictorCounter::BlocksRenewed, held.len() as u64);
        found.blocks.store(self.blocks.of(found.slot) as u64, Ordering::Relaxed);
        (self.names, self.held) = (names, held);
    }

    /// Drops the oldest blocks of a worker, and of all workers, until there is room for `new` more.
    fn make_room(&mut self, slot: WorkerSlot, worker_max: usize, new: usize) {
        let beyond = (self.blocks.of(slot) + new).saturating_sub(worker_max);
        self.drop_oldest(beyond, PredictorCounter::BlocksEvicted, |blocks| blocks.oldest_of(slot));
        let beyond = (self.blocks.len() + new).saturating_sub(self.blocks.max());
        self.drop_oldest(beyond, PredictorCounter::BlocksEvictedMemory, Blocks::oldest);
    }

    /// Adds the blocks of a chain after the first `held` to the index. Whether it had room.
    fn store(&mut self, slot: WorkerSlot, held: usize, names: &[SequenceHash], locals: &[LocalHash]) -> bool {
        let engine = |name: &SequenceHash| EngineHash(name.0);
        let mut hashes = std::mem::take(&mut self.leaving);
        hashes.clear();
        hashes.extend(names[held..].iter().map(engine));
        let parent = held.checked_sub(1).map(|last| engine(&names[last]));
        // One seed for all prompts: the LoRA adapter and the salt are in the local hashes already.
        let seed = Seed(SEED_BASE);
        let blocks = StoreBlocks {
            parent,
            hashes: &hashes,
            locals: &locals[held..],
            tier: Tier::Device,
            group: GroupId(0),
            seed,
        };
        let mut refused = None;
        for _ in 0..STORE_TRIES_MAX {
            self.writer.begin_batch(slot);
            let outcome = self.writer.store(slot, &blocks);
            self.writer.end_batch(slot);
            refused = outcome.refused;
            let spare = self.blocks.len() - held;
            if refused != Some(Refusal::MemoryBound) || spare == 0 {
                break;
            }
            let part = hashes.len().max(self.blocks.len() / MEMORY_EVICTED_PART);
            self.drop_oldest(part.min(spare), PredictorCounter::BlocksEvictedMemory, Blocks::oldest);
            self.writer.publish();
            self.writer.reclaim();
        }
        self.leaving = hashes;
        match refused {
            None => self.counters.add(PredictorCounter::BlocksPredicted, (names.len() - held) as u64),
            Some(Refusal::MemoryBound) => self.counters.bump(PredictorCounter::BookingsMemoryBound),
            Some(refusal) => {
                tracing::debug!(refusal = refusal.name(), "the index refused a prediction");
                self.counters.bump(PredictorCounter::BookingsRefused);
            }
        }
        refused.is_none()
    }

    /// Drops blocks that have expired by `now_ms`, about `blocks_max` at most. Whether more have expired.
    pub fn pass_time(&mut self, now_ms: u64, blocks_max: usize) -> bool {
        self.now_ms = self.now_ms.max(now_ms);
        let more = self.expire(blocks_max);
        for worker in self.reader.workers.load().0.iter().flatten() {
            worker.blocks.store(self.blocks.of(worker.slot) as u64, Ordering::Relaxed);
        }
        more
    }

    fn expire(&mut self, blocks_max: usize) -> bool {
        let (now_ms, ttl_ms) = (self.now_ms, self.limits.ttl_ms);
        let expired =
            |blocks: &Blocks| blocks.oldest().filter(|at| blocks.renewed_at_ms(*at).saturating_add(ttl_ms) <= now_ms);
        self.drop_oldest(blocks_max, PredictorCounter::BlocksExpired, expired);
        expired(&self.blocks).is_some()
    }

    /// Drops the blocks that `next` returns, up to `blocks_max` of them.
    fn drop_oldest(&mut self, blocks_max: usize, counter: PredictorCounter, next: impl Fn(&Blocks) -> Option<BlockAt>) {
        let mut leaving = std::mem::take(&mut self.leaving);
        leaving.clear();
        let (mut of, mut dropped) = (WorkerSlot(0), 0);
        while dropped < blocks_max
            && let Some(at) = next(&self.blocks)
        {
            let (slot, name) = self.blocks.take(at);
            if slot != of {
                self.remove(of, &leaving);
                leaving.clear();
                of = slot;
            }
            leaving.push(EngineHash(name.0));
            dropped += 1;
        }
        self.remove(of, &leaving);
        self.counters.add(counter, dropped as u64);
        self.leaving = leaving;
        self.blocks.shrink();
    }

    fn remove(&mut self, slot: WorkerSlot, names: &[EngineHash]) {
        if !names.is_empty() {
            self.writer.remove(slot, Tier::Device, GroupId(0), names);
        }
    }

    /// Publishes the changes, sweeps the index by about `blocks` blocks, and reclaims memory. Whether there is more to
    /// sweep.
    pub fn tidy(&mut self, blocks: usize) -> bool {
        self.writer.publish();
        let more = self.writer.sweep(blocks);
        if !more {
            self.writer.reclaim();
        }
        more
    }

    /// Whether bookings must wait because readers delay the reclaiming of too many dropped blocks.
    #[must_use]
    pub fn is_choked(&self) -> bool {
        self.writer.is_choked()
    }

    /// The blocks predicted, over all workers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether no block is predicted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory of the predictions, bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.blocks.bytes() + self.writer.memory().bytes()
    }

    /// The part of it that workers have in the index, each for itself, bytes.
    #[cfg(test)]
    pub(super) fn workers_bytes(&self) -> u64 {
        self.writer.memory().workers_bytes
    }
}

// ---- lookups ----

/// The one shard of a space's predictions.
const SHARD: ShardId = ShardId(0);

/// A worker with predictions.
#[derive(Clone, Debug)]
struct PredictedWorker {
    index: WorkerIndex,
    worker: Worker,
    slot: WorkerSlot,
    /// Blocks predicted for it, for display. The predictor writes it. Relaxed everywhere: it orders nothing.
    blocks: Arc<AtomicU64>,
}

/// The workers with predictions, by their place in the fleet table.
#[derive(Debug, Default)]
struct PredictedWorkers(Vec<Option<PredictedWorker>>);

impl PredictedWorkers {
    fn get(&self, index: WorkerIndex, worker: Worker) -> Option<&PredictedWorker> {
        let is_it = |found: &&PredictedWorker| found.index == index && found.worker == worker;
        self.0.get(index.place())?.as_ref().filter(is_it)
    }
}

/// Looks up one space's predictions, for a serving thread. Clone it for every thread.
#[derive(Clone, Debug)]
pub struct PredictionReader {
    index: IndexReader,
    workers: Arc<ArcSwap<PredictedWorkers>>,
}

impl PredictionReader {
    /// Looks up a prompt whose blocks have the hashes `locals`. It takes no lock, and allocates nothing once `depths`
    /// has grown.
    pub fn look_up<'a>(&self, locals: &[LocalHash], depths: &'a mut Depths) -> Predicted<'a> {
        let workers = self.workers.load();
        let contended = self.index.lookup(locals, depths).contended;
        // A slot may have become another worker's meanwhile. Its former worker has left the list before that.
        let moved = !Arc::ptr_eq(&workers, &self.workers.load());
        Predicted { workers, depths, contended: contended || moved }
    }

    /// The number of blocks predicted for a worker now; `None` if it has no predictions.
    #[must_use]
    pub fn blocks_of(&self, index: WorkerIndex, worker: Worker) -> Option<u64> {
        let workers = self.workers.load();
        workers.get(index, worker).map(|found| found.blocks.load(Ordering::Relaxed))
    }
}

/// The result of one lookup.
#[derive(Debug)]
pub struct Predicted<'a> {
    workers: Guard<Arc<PredictedWorkers>>,
    depths: &'a Depths,
    contended: bool,
}

impl Predicted<'_> {
    /// Whether the predictions, or their workers, changed too often during the lookup. The result is then no blocks.
    #[must_use]
    pub const fn is_contended(&self) -> bool {
        self.contended
    }

    /// The leading blocks predicted for a worker; `None` if it has no predictions.
    #[must_use]
    pub fn blocks(&self, index: WorkerIndex, worker: Worker) -> Option<u32> {
        let found = self.workers.get(index, worker)?;
        Some(if self.contended { 0 } else { self.depths.device(SHARD, found.slot) })
    }
}
