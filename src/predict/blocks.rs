//! Which blocks are predicted for whom, by the time they were last booked.
//!
//! A prompt's blocks are renewed from the last to the first, so a block is always younger than those that hang under
//! it: whoever takes the oldest takes a leaf.

use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;

use crate::ids::{SequenceHash, WorkerSlot};

/// No place.
const NOWHERE: u32 = u32::MAX;
/// What one block takes at most, bytes: its entry, and its part of a table that has just grown, the old one included.
pub(super) const BLOCK_BYTES_MAX: u64 = 64;
/// Entries of the first allocation.
const ENTRIES_MIN: usize = 64;

/// Where a block is, until it is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(u32);

/// The neighbours of a block in one order of age.
#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    younger: u32,
}

impl Link {
    const LOOSE: Self = Self { older: NOWHERE, younger: NOWHERE };
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    name: SequenceHash,
    renewed_at_ms: u64,
    /// By [`Order`].
    links: [Link; 2],
    slot: WorkerSlot,
}

const _: () = assert!(size_of::<Entry>() == 40);

/// The two orders of age that a block is in.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// Among those of its worker.
    Worker = 0,
    /// Among all.
    All = 1,
}

/// Both ends of an order.
#[derive(Clone, Copy, Debug)]
struct Ends {
    oldest: u32,
    youngest: u32,
}

impl Ends {
    const EMPTY: Self = Self { oldest: NOWHERE, youngest: NOWHERE };
}

/// A worker's blocks.
#[derive(Clone, Copy, Debug)]
struct Held {
    ends: Ends,
    blocks: usize,
}

/// The predicted blocks of all workers of one space.
#[derive(Debug)]
pub(super) struct Blocks {
    entries: Vec<Entry>,
    entries_max: usize,
    /// The first entry of nobody; each leads to the next by `links[0].older`.
    free: u32,
    by_name: HashTable<u32>,
    hasher: DefaultHashBuilder,
    all: Ends,
    /// By slot.
    workers: Vec<Held>,
}

impl Blocks {
    /// None yet; never more than `blocks_max`.
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

    /// How many there can be.
    pub(super) const fn max(&self) -> usize {
        self.entries_max
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    /// How many a worker has.
    pub(super) fn of(&self, slot: WorkerSlot) -> usize {
        self.workers.get(usize::from(slot.0)).map_or(0, |held| held.blocks)
    }

    /// Fills `places` with the leading blocks of a chain that a worker has.
    pub(super) fn follow(&self, slot: WorkerSlot, names: &[SequenceHash], places: &mut Vec<Place>) {
        places.clear();
        places.extend(names.iter().map_while(|name| self.find(slot, *name)));
    }

    /// Makes blocks of one chain, its first block first, the youngest of all.
    pub(super) fn renew(&mut self, places: &[Place], now_ms: u64) {
        for Place(at) in places.iter().rev() {
            self.unlink(*at);
            self.entries[*at as usize].renewed_at_ms = now_ms;
            self.link(*at);
        }
    }

    /// Adds blocks of one chain, its first block first, that the worker does not have; there must be room.
    pub(super) fn add(&mut self, slot: WorkerSlot, names: &[SequenceHash], now_ms: u64) {
        let place = usize::from(slot.0);
        if self.workers.len() <= place {
            self.workers.resize(place + 1, Held { ends: Ends::EMPTY, blocks: 0 });
        }
        for name in names.iter().rev() {
            let entry = Entry { name: *name, renewed_at_ms: now_ms, links: [Link::LOOSE; 2], slot };
            let at = self.place(entry);
            let (entries, hasher) = (&self.entries, &self.hasher);
            let hash_of = |at: &u32| hash_of(hasher, entries[*at as usize].slot, entries[*at as usize].name);
            self.by_name.insert_unique(hash_of(&at), at, hash_of);
            self.workers[place].blocks += 1;
            self.link(at);
        }
    }

    /// The block of a worker that was not renewed for longest.
    pub(super) fn oldest_of(&self, slot: WorkerSlot) -> Option<Place> {
        let held = self.workers.get(usize::from(slot.0))?;
        (held.ends.oldest != NOWHERE).then_some(Place(held.ends.oldest))
    }

    /// The block that was not renewed for longest.
    pub(super) fn oldest(&self) -> Option<Place> {
        (self.all.oldest != NOWHERE).then_some(Place(self.all.oldest))
    }

    /// When a block was last renewed.
    pub(super) fn renewed_at_ms(&self, place: Place) -> u64 {
        self.entries[place.0 as usize].renewed_at_ms
    }

    /// Takes a block out; says whose it was, and its name.
    pub(super) fn take(&mut self, Place(at): Place) -> (WorkerSlot, SequenceHash) {
        self.unlink(at);
        let Entry { slot, name, .. } = self.entries[at as usize];
        if let Ok(found) = self.by_name.find_entry(hash_of(&self.hasher, slot, name), |other| *other == at) {
            found.remove();
        }
        self.workers[usize::from(slot.0)].blocks -= 1;
        self.entries[at as usize].links[0].older = std::mem::replace(&mut self.free, at);
        (slot, name)
    }

    /// Gives all memory back once there are none.
    pub(super) fn shrink(&mut self) {
        if self.len() == 0 {
            (self.entries, self.free, self.by_name) = (Vec::new(), NOWHERE, HashTable::new());
        }
    }

    /// What all this takes, bytes.
    pub(super) fn bytes(&self) -> u64 {
        let entries = self.entries.capacity() * size_of::<Entry>();
        (entries + self.by_name.allocation_size() + self.workers.capacity() * size_of::<Held>()) as u64
    }

    fn find(&self, slot: WorkerSlot, name: SequenceHash) -> Option<Place> {
        let is_it = |at: &u32| {
            let entry = &self.entries[*at as usize];
            entry.slot == slot && entry.name == name
        };
        self.by_name.find(hash_of(&self.hasher, slot, name), is_it).map(|at| Place(*at))
    }

    /// Puts an entry where there is room.
    fn place(&mut self, entry: Entry) -> u32 {
        if let Some(freed) = self.entries.get_mut(self.free as usize) {
            let at = std::mem::replace(&mut self.free, freed.links[0].older);
            *freed = entry;
            return at;
        }
        let len = self.entries.len();
        assert!(len < self.entries_max, "whoever adds blocks makes room for them");
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

    /// Makes a loose entry the youngest in both orders.
    fn link(&mut self, at: u32) {
        let slot = self.entries[at as usize].slot;
        for order in [Order::Worker, Order::All] {
            let before = std::mem::replace(&mut self.ends(order, slot).youngest, at);
            self.entries[at as usize].links[order as usize] = Link { older: before, younger: NOWHERE };
            match self.entries.get_mut(before as usize) {
                Some(older) => older.links[order as usize].younger = at,
                None => self.ends(order, slot).oldest = at,
            }
        }
    }

    /// Takes an entry out of both orders.
    fn unlink(&mut self, at: u32) {
        let Entry { slot, links, .. } = self.entries[at as usize];
        for order in [Order::Worker, Order::All] {
            let Link { older, younger } = links[order as usize];
            match self.entries.get_mut(older as usize) {
                Some(entry) => entry.links[order as usize].younger = younger,
                None => self.ends(order, slot).oldest = younger,
            }
            match self.entries.get_mut(younger as usize) {
                Some(entry) => entry.links[order as usize].older = older,
                None => self.ends(order, slot).youngest = older,
            }
        }
    }
}

fn hash_of(hasher: &DefaultHashBuilder, slot: WorkerSlot, name: SequenceHash) -> u64 {
    hasher.hash_one((slot, name))
}
