//! The predicted blocks of each worker, ordered by the time of their last booking.
//!
//! A prompt's blocks are renewed from the last to the first, so a block is always younger than the blocks after it. The
//! oldest block therefore never has a block after it.

use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;

use crate::ids::{SequenceHash, WorkerSlot};

/// Ends a list.
const NOWHERE: u32 = u32::MAX;
/// The most memory of one block, bytes: its entry, and its part of a table that has just grown, with the old table.
pub(super) const BLOCK_BYTES_MAX: u64 = 64;
/// The entries of the first allocation.
const ENTRIES_MIN: usize = 64;

/// The position of a block. It is valid until the block is taken out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockAt(u32);

/// The neighbours of a block in one order of age.
#[derive(Clone, Copy, Debug)]
struct Neighbours {
    older: u32,
    younger: u32,
}

impl Neighbours {
    const NONE: Self = Self { older: NOWHERE, younger: NOWHERE };
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    name: SequenceHash,
    renewed_at_ms: u64,
    /// By [`Order`].
    neighbours: [Neighbours; 2],
    slot: WorkerSlot,
}

const _: () = assert!(size_of::<Entry>() == 40);

/// The two orders of age of a block.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// Among the blocks of its worker.
    Worker = 0,
    /// Among all blocks.
    All = 1,
}

/// The ends of an order.
#[derive(Clone, Copy, Debug)]
struct Ends {
    oldest: u32,
    youngest: u32,
}

impl Ends {
    const EMPTY: Self = Self { oldest: NOWHERE, youngest: NOWHERE };
}

/// The blocks of one worker.
#[derive(Clone, Copy, Debug)]
struct WorkerBlocks {
    ends: Ends,
    blocks: usize,
}

/// The predicted blocks of all workers of one space.
#[derive(Debug)]
pub(super) struct Blocks {
    entries: Vec<Entry>,
    entries_max: usize,
    /// The first free entry; `neighbours[0].older` leads to the next.
    free: u32,
    by_name: HashTable<u32>,
    hasher: DefaultHashBuilder,
    all: Ends,
    /// By slot.
    workers: Vec<WorkerBlocks>,
}

impl Blocks {
    /// No blocks yet, and never more than `blocks_max`.
    pub(super) fn new(blocks_max: usize) -> Self {
        Self {
            entries: Vec::new(),
            entries_max: blocks_max.min(NOWHERE as usize),
            free: NOWHERE,
            by_name: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
            all: Ends::EMPTY,
            workers: Vec::new(),
        }
    }

    /// The limit of the number of blocks.
    pub(super) const fn max(&self) -> usize {
        self.entries_max
    }

    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    /// The number of a worker's blocks.
    pub(super) fn of(&self, slot: WorkerSlot) -> usize {
        self.workers.get(usize::from(slot.0)).map_or(0, |held| held.blocks)
    }

    /// Fills `found` with the leading blocks of a chain that a worker has.
    pub(super) fn find_leading(&self, slot: WorkerSlot, names: &[SequenceHash], found: &mut Vec<BlockAt>) {
        found.clear();
        found.extend(names.iter().map_while(|name| self.find(slot, *name)));
    }

    /// Makes these blocks the youngest of all. They are of one chain, in its order.
    pub(super) fn renew(&mut self, blocks: &[BlockAt], now_ms: u64) {
        for BlockAt(at) in blocks.iter().rev() {
            self.unlink(*at);
            self.entries[*at as usize].renewed_at_ms = now_ms;
            self.link(*at);
        }
    }

    /// Adds blocks of one chain, in its order. The worker must not have them, and there must be room.
    pub(super) fn add(&mut self, slot: WorkerSlot, names: &[SequenceHash], now_ms: u64) {
        let place = usize::from(slot.0);
        if self.workers.len() <= place {
            self.workers.resize(place + 1, WorkerBlocks { ends: Ends::EMPTY, blocks: 0 });
        }
        for name in names.iter().rev() {
            let entry = Entry { name: *name, renewed_at_ms: now_ms, neighbours: [Neighbours::NONE; 2], slot };
            let at = self.insert(entry);
            let (entries, hasher) = (&self.entries, &self.hasher);
            let hash_of = |at: &u32| hash_of(hasher, entries[*at as usize].slot, entries[*at as usize].name);
            self.by_name.insert_unique(hash_of(&at), at, hash_of);
            self.workers[place].blocks += 1;
            self.link(at);
        }
    }

    /// The worker's block whose last renewal is longest ago.
    pub(super) fn oldest_of(&self, slot: WorkerSlot) -> Option<BlockAt> {
        let held = self.workers.get(usize::from(slot.0))?;
        (held.ends.oldest != NOWHERE).then_some(BlockAt(held.ends.oldest))
    }

    /// The block whose last renewal is longest ago.
    pub(super) fn oldest(&self) -> Option<BlockAt> {
        (self.all.oldest != NOWHERE).then_some(BlockAt(self.all.oldest))
    }

    pub(super) fn renewed_at_ms(&self, BlockAt(at): BlockAt) -> u64 {
        self.entries[at as usize].renewed_at_ms
    }

    /// Takes a block out. Answers with its worker and its name.
    pub(super) fn take(&mut self, BlockAt(at): BlockAt) -> (WorkerSlot, SequenceHash) {
        self.unlink(at);
        let Entry { slot, name, .. } = self.entries[at as usize];
        if let Ok(found) = self.by_name.find_entry(hash_of(&self.hasher, slot, name), |other| *other == at) {
            found.remove();
        }
        self.workers[usize::from(slot.0)].blocks -= 1;
        self.entries[at as usize].neighbours[0].older = std::mem::replace(&mut self.free, at);
        (slot, name)
    }

    /// Frees all memory if there are no blocks.
    pub(super) fn shrink(&mut self) {
        if self.len() == 0 {
            (self.entries, self.free, self.by_name) = (Vec::new(), NOWHERE, HashTable::new());
        }
    }

    /// The memory of the blocks, bytes.
    pub(super) fn bytes(&self) -> u64 {
        let entries = self.entries.capacity() * size_of::<Entry>();
        (entries + self.by_name.allocation_size() + self.workers.capacity() * size_of::<WorkerBlocks>()) as u64
    }

    fn find(&self, slot: WorkerSlot, name: SequenceHash) -> Option<BlockAt> {
        let is_it = |at: &u32| {
            let entry = &self.entries[*at as usize];
            entry.slot == slot && entry.name == name
        };
        self.by_name.find(hash_of(&self.hasher, slot, name), is_it).map(|at| BlockAt(*at))
    }

    /// Stores an entry. Answers with its position.
    fn insert(&mut self, entry: Entry) -> u32 {
        if let Some(freed) = self.entries.get_mut(self.free as usize) {
            let at = std::mem::replace(&mut self.free, freed.neighbours[0].older);
            *freed = entry;
            return at;
        }
        let len = self.entries.len();
        assert!(len < self.entries_max, "the caller makes room before it adds blocks");
        if len == self.entries.capacity() {
            let capacity = (len * 2).clamp(ENTRIES_MIN, self.entries_max.max(ENTRIES_MIN));
            self.entries.reserve_exact(capacity - len);
        }
        self.entries.push(entry);
        len as u32
    }

    fn ends(&mut self, order: Order, slot: WorkerSlot) -> &mut Ends {
        match order {
            Order::Worker => &mut self.workers[usize::from(slot.0)].ends,
            Order::All => &mut self.all,
        }
    }

    /// Makes an entry the youngest in both orders. It must be in neither.
    fn link(&mut self, at: u32) {
        let slot = self.entries[at as usize].slot;
        for order in [Order::Worker, Order::All] {
            let before = std::mem::replace(&mut self.ends(order, slot).youngest, at);
            self.entries[at as usize].neighbours[order as usize] = Neighbours { older: before, younger: NOWHERE };
            match self.entries.get_mut(before as usize) {
                Some(older) => older.neighbours[order as usize].younger = at,
                None => self.ends(order, slot).oldest = at,
            }
        }
    }

    /// Takes an entry out of both orders.
    fn unlink(&mut self, at: u32) {
        let Entry { slot, neighbours, .. } = self.entries[at as usize];
        for order in [Order::Worker, Order::All] {
            let Neighbours { older, younger } = neighbours[order as usize];
            match self.entries.get_mut(older as usize) {
                Some(entry) => entry.neighbours[order as usize].younger = younger,
                None => self.ends(order, slot).oldest = younger,
            }
            match self.entries.get_mut(younger as usize) {
                Some(entry) => entry.neighbours[order as usize].older = older,
                None => self.ends(order, slot).youngest = older,
            }
        }
    }
}

fn hash_of(hasher: &DefaultHashBuilder, slot: WorkerSlot, name: SequenceHash) -> u64 {
    hasher.hash_one((slot, name))
}
