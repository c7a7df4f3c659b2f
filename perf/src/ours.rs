//! kvrouted's index, as this package uses it: the only file that knows its interface.

use std::ops::Range;
use std::time::{Duration, Instant};

use kvrouted::ids::{EngineHash, GroupId, LocalHash, Seed, ShardId, Tier, TierBlocks, WorkerSlot};
use kvrouted::index::{Depths, IndexReader, Lookup, Reclaimer, ShardLimits, ShardWriter, StoreBlocks, shard_in};
use kvrouted::limits::LOOK_AHEAD_EVENTS;

use crate::failure::Failure;
use crate::measure::Lookups;
use crate::nodes::Nodes;
use crate::script::{Action, Op, Script};

const GROUP: GroupId = GroupId(0);
const SEED: Seed = Seed(1337);
/// Blocks one turn of sweeping looks at.
const SWEEP_BLOCKS: usize = 4096;

/// A script in our types: the hashes of its blocks side by side, in its order.
#[derive(Debug)]
pub(crate) struct Feed {
    hashes: Vec<EngineHash>,
    locals: Vec<LocalHash>,
    events: Vec<Event>,
    /// Where each batch ends in `events`.
    batch_ends: Vec<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Event {
    worker: u16,
    action: Action,
    tier: Tier,
    parent: Option<EngineHash>,
    from: u32,
    to: u32,
}

impl Feed {
    /// Prepares a script.
    #[must_use]
    pub(crate) fn new(nodes: &Nodes, script: &Script) -> Self {
        let mut feed = Self { hashes: Vec::new(), locals: Vec::new(), events: Vec::new(), batch_ends: Vec::new() };
        for batch in 0..script.batches() {
            for op in script.batch(batch) {
                feed.push(nodes, script, op);
            }
            feed.batch_ends.push(feed.events.len());
        }
        feed
    }

    fn push(&mut self, nodes: &Nodes, script: &Script, op: &Op) {
        let from = self.hashes.len() as u32;
        let blocks = script.blocks_of(op);
        self.hashes.extend(blocks.iter().map(|node| EngineHash(nodes.engine_hash(*node, op.worker))));
        self.locals.extend(blocks.iter().map(|node| LocalHash(nodes.local(*node))));
        let parent = match op.action {
            Action::Store => nodes.parent(blocks[0]).map(|node| EngineHash(nodes.engine_hash(node, op.worker))),
            Action::Remove => None,
        };
        let to = self.hashes.len() as u32;
        self.events.push(Event { worker: op.worker, action: op.action, tier: op.tier, parent, from, to });
    }

    /// Batches.
    #[must_use]
    pub(crate) fn batches(&self) -> usize {
        self.batch_ends.len()
    }

    fn batch(&self, batch: usize) -> &[Event] {
        let start = if batch == 0 { 0 } else { self.batch_ends[batch - 1] };
        &self.events[start..self.batch_ends[batch]]
    }

    /// Whose events a batch has.
    fn worker_of(&self, batch: usize) -> u16 {
        self.batch(batch)[0].worker
    }

    /// Blocks stored and removed by some batches.
    #[must_use]
    pub(crate) fn blocks_in(&self, batches: &[usize]) -> u64 {
        let events = batches.iter().flat_map(|batch| self.batch(*batch));
        events.map(|event| u64::from(event.to - event.from)).sum()
    }

    fn blocks<'a>(&'a self, event: &Event) -> Blocks<'a> {
        let range = event.from as usize..event.to as usize;
        Blocks { parent: event.parent, hashes: &self.hashes[range.clone()], locals: &self.locals[range] }
    }
}

#[derive(Clone, Copy)]
struct Blocks<'a> {
    parent: Option<EngineHash>,
    hashes: &'a [EngineHash],
    locals: &'a [LocalHash],
}

/// An event that owns its blocks, as it travels through a queue.
#[derive(Debug)]
struct Queued {
    event: Event,
    hashes: Box<[EngineHash]>,
    locals: Box<[LocalHash]>,
    begins: bool,
    ends: bool,
}

/// The index: all of its writers, and the place of each worker.
#[derive(Debug)]
pub(crate) struct Ours {
    writers: Vec<ShardWriter>,
    places: Vec<Place>,
    reader: IndexReader,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    shard: ShardId,
    slot: WorkerSlot,
}

impl Ours {
    /// An index of empty workers, spread over shards.
    ///
    /// # Errors
    /// A shard has no room for its workers.
    pub(crate) fn new(workers: u16, shards: u16) -> Result<Self, Failure> {
        let reclaimer = Reclaimer::new();
        let limits = ShardLimits { secret: 0x6b76_726f_7574_6564, ..ShardLimits::default() };
        let (mut writers, readers): (Vec<_>, Vec<_>) =
            (0..shards).map(|id| shard_in(ShardId(id), limits, &reclaimer)).unzip();
        let place = |worker: u16| {
            let shard = ShardId(worker % shards);
            writers[usize::from(shard.0)].add_worker().map(|slot| Place { shard, slot })
        };
        let places = (0..workers).map(place).collect::<Option<Vec<Place>>>();
        let places = places.ok_or_else(|| Failure::Contract(format!("no room for {workers} workers")))?;
        Ok(Self { writers, places, reader: IndexReader::new(readers) })
    }

    /// One more reader.
    #[must_use]
    pub(crate) fn reader(&self) -> OurReader {
        OurReader { reader: self.reader.clone(), depths: Depths::new(), places: self.places.clone(), contended: 0 }
    }

    /// The index as a decision reads it.
    #[must_use]
    pub(crate) fn index(&self) -> IndexReader {
        self.reader.clone()
    }

    /// Where a worker is in its shard.
    #[must_use]
    pub(crate) fn slot(&self, worker: u16) -> WorkerSlot {
        self.places[usize::from(worker)].slot
    }

    /// Applies some batches by direct calls.
    ///
    /// # Panics
    /// A store was not taken as a whole, or a removed block was unknown: the tape never does that, so the
    /// index would be wrong. Checked in every measured run.
    pub(crate) fn apply(&mut self, feed: &Feed, batches: Range<usize>) {
        for batch in batches {
            let worker = feed.worker_of(batch);
            let (writer, slot) = self.at(worker);
            apply_batch(writer, slot, feed, batch);
            self.end_batch(worker);
        }
    }

    /// Applies a whole feed through a queue to a thread that writes; gives the index back with the time from
    /// the first send until everything is applied.
    pub(crate) fn apply_queued(mut self, feed: &Feed) -> (Self, Duration) {
        let queued = Self::owned(feed);
        let (sender, receiver) = crossbeam::channel::unbounded::<Queued>();
        let writer = std::thread::spawn(move || {
            for queued in &receiver {
                let Queued { event, hashes, locals, begins, ends } = queued;
                if begins {
                    self.begin_batch(event.worker);
                }
                self.apply_event(&event, Blocks { parent: event.parent, hashes: &hashes, locals: &locals });
                if ends {
                    self.end_batch(event.worker);
                }
            }
            self
        });
        let start = Instant::now();
        for event in queued {
            assert!(sender.send(event).is_ok(), "the writer has ended");
        }
        drop(sender);
        let index = writer.join().expect("the writer does not panic");
        (index, start.elapsed())
    }

    fn owned(feed: &Feed) -> Vec<Queued> {
        let mut queued = Vec::with_capacity(feed.events.len());
        for batch in 0..feed.batches() {
            let events = feed.batch(batch);
            for (at, event) in events.iter().enumerate() {
                let blocks = feed.blocks(event);
                let locals = if event.action == Action::Store { blocks.locals.into() } else { Box::default() };
                let (begins, ends) = (at == 0, at + 1 == events.len());
                queued.push(Queued { event: *event, hashes: blocks.hashes.into(), locals, begins, ends });
            }
        }
        queued
    }

    /// Empties a worker in all tiers.
    pub(crate) fn clear(&mut self, worker: u16) {
        let (writer, slot) = self.at(worker);
        writer.clear(slot, None);
        self.end_batch(worker);
    }

    /// Removes a worker and adds it again, empty, maybe in another slot.
    ///
    /// # Errors
    /// There is no room for it.
    pub(crate) fn replace_worker(&mut self, worker: u16) -> Result<(), Failure> {
        let (writer, slot) = self.at(worker);
        writer.remove_worker(slot);
        let added = writer.add_worker();
        let slot = added.ok_or_else(|| Failure::Contract(format!("no slot for worker {worker} again")))?;
        self.places[usize::from(worker)].slot = slot;
        self.end_batch(worker);
        Ok(())
    }

    /// Does a turn of what clears and removals left to do; whether there is more.
    pub(crate) fn sweep(&mut self) -> bool {
        let mut more = false;
        for writer in &mut self.writers {
            more |= writer.sweep(SWEEP_BLOCKS);
            writer.publish();
        }
        more
    }

    /// What the index says it uses; `None` while it does not say.
    #[must_use]
    pub(crate) fn accounted_bytes(&self) -> Option<u64> {
        Some(self.writers.iter().map(|writer| writer.memory().bytes()).sum())
    }

    /// Whether readers hold up so much garbage that no batch should be applied before the next publish.
    #[must_use]
    fn is_choked(&self) -> bool {
        self.writers.iter().any(ShardWriter::is_choked)
    }

    fn at(&mut self, worker: u16) -> (&mut ShardWriter, WorkerSlot) {
        let Place { shard, slot } = self.places[usize::from(worker)];
        (&mut self.writers[usize::from(shard.0)], slot)
    }

    fn begin_batch(&mut self, worker: u16) {
        let (writer, slot) = self.at(worker);
        writer.begin_batch(slot);
    }

    /// Ends a batch, and takes no other before readers have let go of enough of what is no longer used: the
    /// wait is in every measured time.
    fn end_batch(&mut self, worker: u16) {
        let (writer, slot) = self.at(worker);
        writer.end_batch(slot);
        writer.publish();
        while self.is_choked() {
            std::thread::yield_now();
            self.at(worker).0.publish();
        }
    }

    fn apply_event(&mut self, event: &Event, blocks: Blocks<'_>) {
        let (writer, slot) = self.at(event.worker);
        apply_event(writer, slot, event, blocks);
    }

    /// Takes the index apart: the writer of each shard, in the order of shards, each of which can go to a thread of its
    /// own.
    #[must_use]
    pub(crate) fn into_shards(self) -> Vec<Shard> {
        let Self { writers, places, .. } = self;
        let shard = |(id, writer)| Shard { id: ShardId(id), writer, places: places.clone() };
        (0..).zip(writers).map(shard).collect()
    }
}

/// The writer of one shard, as an ingest thread has it.
#[derive(Debug)]
pub(crate) struct Shard {
    id: ShardId,
    writer: ShardWriter,
    /// Of the workers of all shards.
    places: Vec<Place>,
}

impl Shard {
    /// The batches of this shard's workers.
    #[must_use]
    pub(crate) fn batches(&self, feed: &Feed) -> Vec<usize> {
        let is_ours = |batch: &usize| self.places[usize::from(feed.worker_of(*batch))].shard == self.id;
        (0..feed.batches()).filter(is_ours).collect()
    }

    /// Applies batches of this shard's workers by direct calls.
    ///
    /// # Panics
    /// As [`Ours::apply`].
    pub(crate) fn apply(&mut self, feed: &Feed, batches: &[usize]) {
        for batch in batches {
            let slot = self.places[usize::from(feed.worker_of(*batch))].slot;
            apply_batch(&mut self.writer, slot, feed, *batch);
            self.writer.end_batch(slot);
            self.writer.publish();
            // As in `Ours::end_batch`.
            while self.writer.is_choked() {
                std::thread::yield_now();
                self.writer.publish();
            }
        }
    }
}

/// Applies a batch of one worker, and leaves its end to the caller.
fn apply_batch(writer: &mut ShardWriter, slot: WorkerSlot, feed: &Feed, batch: usize) {
    let events = feed.batch(batch);
    writer.begin_batch(slot);
    for (at, event) in events.iter().enumerate() {
        if events.len() > LOOK_AHEAD_EVENTS {
            let first = |ahead: usize| events.get(at + ahead).and_then(|event| feed.blocks(event).hashes.first());
            let (far, near) = (first(LOOK_AHEAD_EVENTS), first(LOOK_AHEAD_EVENTS / 2));
            writer.look_ahead(far.copied(), near.copied());
        }
        apply_event(writer, slot, event, feed.blocks(event));
    }
}

fn apply_event(writer: &mut ShardWriter, slot: WorkerSlot, event: &Event, blocks: Blocks<'_>) {
    let Blocks { parent, hashes, locals } = blocks;
    match event.action {
        Action::Store => {
            let store = StoreBlocks { parent, hashes, locals, tier: event.tier, group: GROUP, seed: SEED };
            let outcome = writer.store(slot, &store);
            let whole = outcome.stored as usize == hashes.len() && outcome.dormant == 0;
            assert!(whole, "{event:?}: {outcome:?}");
        }
        Action::Remove => {
            let outcome = writer.remove(slot, event.tier, GROUP, hashes);
            assert!(outcome.unknown == 0, "{event:?}: {outcome:?}");
        }
    }
}

/// One thread's way to read.
#[derive(Clone, Debug)]
pub(crate) struct OurReader {
    reader: IndexReader,
    depths: Depths,
    places: Vec<Place>,
    /// Lookups that gave up on finding the index unchanged.
    pub(crate) contended: u64,
}

impl OurReader {
    /// What a worker holds, as of the last lookup.
    #[must_use]
    pub(crate) fn of(&self, worker: u16) -> TierBlocks {
        let Place { shard, slot } = self.places[usize::from(worker)];
        self.depths.of(shard, slot)
    }

    /// Learns where workers are now.
    pub(crate) fn follow(&mut self, index: &Ours) {
        self.places.clone_from(&index.places);
    }
}

impl Lookups for OurReader {
    type Block = LocalHash;
    type Answer = Lookup;

    fn look(&mut self, blocks: &[LocalHash]) -> Lookup {
        self.reader.lookup(blocks, &mut self.depths)
    }

    fn sum(&mut self, answer: Lookup) -> u64 {
        self.contended += u64::from(answer.contended);
        self.places.iter().map(|place| u64::from(self.depths.device(place.shard, place.slot))).sum()
    }
}
