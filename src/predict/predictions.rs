//! One space's predictions: what was booked, until it is too old or too much.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use arc_swap::ArcSwap;

use super::blocks::{BLOCK_BYTES_MAX, Blocks, Place};
use super::reader::{Member, PredictionReader, Roster, SHARD};
use crate::fleet::{FleetTable, WorkerRecord, WorkerState};
use crate::hash::{self, SEED_BASE};
use crate::ids::{EngineHash, GroupId, LocalHash, Seed, SequenceHash, SpaceId, Tier, Worker, WorkerIndex, WorkerSlot};
use crate::index::{IndexReader, Refusal, ShardLimits, ShardWriter, StoreBlocks, shard};
use crate::metrics::{CounterSet, PredictorCounter};

/// What bounds one space's predictions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PredictionLimits {
    /// A block that is not booked again for this long is dropped, milliseconds.
    pub ttl_ms: u64,
    /// Blocks of a worker whose capacity is not known.
    pub worker_blocks_max: u64,
    /// Memory, bytes: one half for the index, one for what is known of each block's age.
    pub memory_bytes_max: u64,
    /// Mixed into the index's hash tables.
    pub secret: u64,
}

/// What is predicted for the workers of one space. Time is told to it and never goes back.
#[derive(Debug)]
pub struct Predictions {
    limits: PredictionLimits,
    now_ms: u64,
    blocks: Blocks,
    writer: ShardWriter,
    reader: PredictionReader,
    /// How many blocks each worker may have, by `WorkerSlot`.
    blocks_max: Vec<usize>,
    counters: Arc<CounterSet<PredictorCounter>>,
    names: Vec<SequenceHash>,
    places: Vec<Place>,
    /// Blocks on their way out of the index, of one worker.
    leaving: Vec<EngineHash>,
}

/// Tries of a store that the index's memory does not hold, with older blocks dropped in between.
const STORE_TRIES_MAX: usize = 4;
/// Of all blocks, one in so many is dropped before another try.
const MEMORY_EVICTED_PART: usize = 32;

impl Predictions {
    /// None yet.
    #[must_use]
    pub fn new(limits: PredictionLimits, counters: Arc<CounterSet<PredictorCounter>>) -> Self {
        let half = limits.memory_bytes_max / 2;
        let shard_limits = ShardLimits { memory_bytes_max: half, secret: limits.secret, ..ShardLimits::default() };
        let (writer, reader) = shard(SHARD, shard_limits);
        let roster = Arc::new(ArcSwap::from_pointee(Roster::default()));
        Self {
            limits,
            now_ms: 0,
            blocks: Blocks::new(usize::try_from(half / BLOCK_BYTES_MAX).unwrap_or(usize::MAX)),
            writer,
            reader: PredictionReader { index: IndexReader::new(vec![reader]), roster },
            blocks_max: Vec::new(),
            counters,
            names: Vec::new(),
            places: Vec::new(),
            leaving: Vec::new(),
        }
    }

    /// What cores ask.
    #[must_use]
    pub fn reader(&self) -> PredictionReader {
        self.reader.clone()
    }

    /// Predicts for the workers of `space` that publish no events and are not down, and for nobody else: what is
    /// predicted for others is dropped.
    pub fn follow(&mut self, table: &FleetTable, space: SpaceId) {
        let before = self.reader.roster.load_full();
        let wanted = |record: &WorkerRecord| {
            record.space == space && record.events.is_none() && record.state != WorkerState::Down
        };
        let mut roster = Roster(vec![None; table.workers.last().map_or(0, |last| last.index.place() + 1)]);
        for record in table.workers.iter().filter(|record| wanted(record)) {
            roster.0[record.index.place()] = before.member(record.index, record.worker).cloned();
        }
        let stays = |member: &Member| roster.0.iter().flatten().any(|other| other.slot == member.slot);
        let leaving: Vec<_> = before.0.iter().flatten().filter(|member| !stays(member)).cloned().collect();
        for record in table.workers.iter().filter(|record| wanted(record)) {
            let member = &mut roster.0[record.index.place()];
            if member.is_none() {
                *member = self.admit(record);
            }
            member.iter().for_each(|member| self.set_blocks_max(member.slot, record.capacity_blocks));
        }
        // Nobody reads a slot that nobody has any more.
        self.reader.roster.store(Arc::new(roster));
        leaving.iter().for_each(|member| self.dismiss(member));
    }

    fn admit(&mut self, record: &WorkerRecord) -> Option<Member> {
        let Some(slot) = self.writer.add_worker() else {
            self.counters.bump(PredictorCounter::WorkersNotAdmitted);
            return None;
        };
        Some(Member { index: record.index, worker: record.worker, slot, blocks: Arc::default() })
    }

    fn set_blocks_max(&mut self, slot: WorkerSlot, capacity_blocks: u64) {
        let blocks_max = if capacity_blocks > 0 { capacity_blocks } else { self.limits.worker_blocks_max };
        let place = usize::from(slot.0);
        if self.blocks_max.len() <= place {
            self.blocks_max.resize(place + 1, 0);
        }
        self.blocks_max[place] = usize::try_from(blocks_max).unwrap_or(usize::MAX);
    }

    /// Drops everything of a worker. Its slot is free once the index has been swept.
    fn dismiss(&mut self, member: &Member) {
        self.counters.add(PredictorCounter::BlocksForgotten, self.blocks.of(member.slot) as u64);
        self.writer.remove_worker(member.slot);
        while let Some(place) = self.blocks.oldest_of(member.slot) {
            self.blocks.take(place);
        }
        self.blocks.shrink();
    }

    /// Drops everything predicted for a worker, which stays one of those that are predicted for.
    pub fn forget(&mut self, index: WorkerIndex, worker: Worker) {
        let roster = self.reader.roster.load_full();
        let Some(member) = roster.member(index, worker) else { return };
        self.counters.add(PredictorCounter::BlocksForgotten, self.blocks.of(member.slot) as u64);
        self.writer.clear(member.slot, None);
        while let Some(place) = self.blocks.oldest_of(member.slot) {
            self.blocks.take(place);
        }
        self.blocks.shrink();
        member.blocks.store(0, Ordering::Relaxed);
    }

    /// A prompt with the blocks `locals` was booked on a worker: it holds them from now on, the first ones at least
    /// if they are more than its bound.
    pub fn book(&mut self, index: WorkerIndex, worker: Worker, locals: &[LocalHash], now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
        let roster = self.reader.roster.load_full();
        let Some(member) = roster.member(index, worker) else {
            self.counters.bump(PredictorCounter::BookingsOfOthers);
            return;
        };
        let blocks_max = self.blocks_max[usize::from(member.slot.0)].min(self.blocks.max());
        let locals = &locals[..locals.len().min(blocks_max)];
        let (mut names, mut places) = (std::mem::take(&mut self.names), std::mem::take(&mut self.places));
        hash::sequence_hashes(locals, &mut names);
        self.blocks.follow(member.slot, &names, &mut places);
        // Before room is made, so that it is not made of these.
        self.blocks.renew(&places, self.now_ms);
        let held = places.len();
        let new = names.len() - held;
        self.make_room(member.slot, blocks_max, new);
        if new > 0 && self.store(member.slot, held, &names, locals) {
            self.blocks.add(member.slot, &names[held..], self.now_ms);
            // A block is younger than those below it.
            self.blocks.renew(&places, self.now_ms);
        }
        self.counters.bump(PredictorCounter::Bookings);
        self.counters.add(PredictorCounter::BlocksRenewed, held as u64);
        member.blocks.store(self.blocks.of(member.slot) as u64, Ordering::Relaxed);
        (self.names, self.places) = (names, places);
    }

    /// Drops the oldest blocks of a worker, and of all, until there is room for `new` more.
    fn make_room(&mut self, slot: WorkerSlot, worker_max: usize, new: usize) {
        let beyond = (self.blocks.of(slot) + new).saturating_sub(worker_max);
        self.drop_oldest(beyond, PredictorCounter::BlocksEvicted, |blocks| blocks.oldest_of(slot));
        let beyond = (self.blocks.len() + new).saturating_sub(self.blocks.max());
        self.drop_oldest(beyond, PredictorCounter::BlocksEvictedMemory, Blocks::oldest);
    }

    /// Puts what a worker does not hold of a chain into the index; whether it fitted.
    fn store(&mut self, slot: WorkerSlot, held: usize, names: &[SequenceHash], locals: &[LocalHash]) -> bool {
        let engine = |name: &SequenceHash| EngineHash(name.0);
        let mut hashes = std::mem::take(&mut self.leaving);
        hashes.clear();
        hashes.extend(names[held..].iter().map(engine));
        let parent = held.checked_sub(1).map(|last| engine(&names[last]));
        // One for all: which LoRA and salt a prompt has is in its local hashes.
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
                tracing::debug!(refusal = refusal.name(), "a prediction is refused by its index");
                self.counters.bump(PredictorCounter::BookingsRefused);
            }
        }
        refused.is_none()
    }

    /// Drops what is too old by `now_ms`, about `blocks_max` blocks at most; whether there is more.
    pub fn pass_time(&mut self, now_ms: u64, blocks_max: usize) -> bool {
        self.now_ms = self.now_ms.max(now_ms);
        let more = self.expire(blocks_max);
        let roster = self.reader.roster.load_full();
        self.note(&roster);
        more
    }

    fn expire(&mut self, blocks_max: usize) -> bool {
        let (now_ms, ttl_ms) = (self.now_ms, self.limits.ttl_ms);
        let too_old = |blocks: &Blocks| {
            blocks.oldest().filter(|place| blocks.renewed_at_ms(*place).saturating_add(ttl_ms) <= now_ms)
        };
        self.drop_oldest(blocks_max, PredictorCounter::BlocksExpired, too_old);
        too_old(&self.blocks).is_some()
    }

    /// Drops up to `blocks_max` blocks, those that `next` names while it does.
    fn drop_oldest(&mut self, blocks_max: usize, counter: PredictorCounter, next: impl Fn(&Blocks) -> Option<Place>) {
        let mut leaving = std::mem::take(&mut self.leaving);
        leaving.clear();
        let (mut of, mut dropped) = (WorkerSlot(0), 0);
        while dropped < blocks_max
            && let Some(place) = next(&self.blocks)
        {
            let (slot, name) = self.blocks.take(place);
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

    /// Ends a turn: what was given up is used again, and cleaned up by about `blocks` blocks' worth of work. Whether
    /// there is more to do.
    pub fn tidy(&mut self, blocks: usize) -> bool {
        self.writer.publish();
        let more = self.writer.sweep(blocks);
        if !more {
            self.writer.reclaim();
        }
        more
    }

    /// Whether readers hold up the memory of what was dropped, so that nothing more should be booked for now.
    #[must_use]
    pub fn is_choked(&self) -> bool {
        self.writer.is_choked()
    }

    /// Blocks predicted, over all workers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether nothing is predicted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What the predictions take, bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.blocks.bytes() + self.writer.memory().bytes()
    }

    /// Shows what each worker has.
    fn note(&self, roster: &Roster) {
        for member in roster.0.iter().flatten() {
            member.blocks.store(self.blocks.of(member.slot) as u64, Ordering::Relaxed);
        }
    }
}
