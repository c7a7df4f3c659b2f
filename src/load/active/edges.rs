//! From a node and a block's hash to the node below: hash tables, a few for each root, with open addresses.

use super::node::Node;
use super::room::Room;
use super::words::{CHUNK_ORDER, Words, halves, word};
use super::{AtomicU64, Ordering};

/// Tables of one root, each as long as a chunk at most.
pub(super) const TABLES: usize = if cfg!(all(test, kvrouted_loom)) { 1 } else { 8 };
/// Slots of the smallest table, as a power of two.
const ORDER_MIN: u32 = 3;
/// Slots that a reader looks at before it takes what it reads for nonsense: tables are at most half full.
pub(super) const READER_PROBES_MAX: u32 = 512;
/// The writer knows what it reads to be true.
pub(super) const WRITER_PROBES_MAX: u32 = u32::MAX;

/// What names an edge: the node above and the hash of the first block below, mixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) parent: u32,
    pub(super) first: u64,
    mixed: u64,
}

impl Key {
    /// `secret` keeps those who choose prompts from choosing slots.
    #[inline]
    pub(super) const fn new(parent: u32, first: u64, secret: u64) -> Self {
        let mut mixed = (first ^ secret).wrapping_add((parent as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        mixed = (mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        mixed = (mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        Self { parent, first, mixed: mixed ^ mixed >> 32 }
    }

    /// A number below a power of two.
    pub(super) const fn below(self, power: usize) -> usize {
        (self.mixed >> 8) as usize & (power - 1)
    }

    const fn table(self) -> usize {
        self.mixed as usize & (TABLES - 1)
    }

    const fn tag(self) -> u32 {
        (self.mixed >> 32) as u32
    }
}

/// The tables of one root: each as where it is and 1 + its order, 0 = it is empty and not there.
#[derive(Debug)]
pub(super) struct Tables([AtomicU64; TABLES]);

impl Tables {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// Where a table is, and its order.
    #[inline]
    fn at(&self, table: usize) -> Option<(u32, u32)> {
        // Relaxed: the root's sequence says whether it still holds.
        let (at, order) = halves(self.0[table].load(Ordering::Relaxed));
        (1..=CHUNK_ORDER + 1).contains(&order).then(|| (at, order - 1))
    }

    /// The slot of an edge, the node below and its words as `load` gives them, if it is among so many slots.
    #[inline]
    pub(super) fn find(
        &self,
        words: &Words,
        key: Key,
        probes_max: u32,
        load: impl Fn(&Words, u32) -> Node,
    ) -> Option<(u32, u32, Node)> {
        let (at, order) = self.at(key.table())?;
        let slots = words.slice(at, 1 << order)?;
        let mask = (1 << order) - 1;
        for probe in 0..probes_max.min(1 << order) {
            let slot = key.tag().wrapping_add(probe) & mask;
            let (tag, child) = halves(slots[slot as usize].load(Ordering::Relaxed));
            if child == 0 {
                return None;
            }
            if tag == key.tag() {
                let node = load(words, child);
                if node.parent == key.parent && node.len > 0 && node.first == key.first {
                    return Some((slot, child, node));
                }
            }
        }
        None
    }
}

/// How full the tables of one root are; the writer's.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Filled([u32; TABLES]);

/// The tables of one root, to be changed.
pub(super) struct Edges<'a> {
    pub(super) tables: &'a Tables,
    pub(super) filled: &'a mut Filled,
    pub(super) words: &'a Words,
    pub(super) room: &'a mut Room,
}

impl Edges<'_> {
    /// Makes room for so many edges more in the table of `key`; `None` if there is no memory for it.
    pub(super) fn reserve(&mut self, key: Key, more: u32) -> Option<()> {
        let wanted = (self.filled.0[key.table()] + more).checked_mul(2)?.next_power_of_two();
        let order = wanted.trailing_zeros().max(ORDER_MIN);
        let before = self.tables.at(key.table());
        if before.is_some_and(|(_, has)| has >= order) {
            return Some(());
        }
        let at = self.room.take(self.words, u32::checked_shl(1, order)?)?;
        (at..at + (1 << order)).for_each(|slot| self.words.store(slot, 0));
        if let Some((old, has)) = before {
            for slot in old..old + (1 << has) {
                let edge = self.words.load(slot);
                if edge != 0 {
                    self.put((at, order), edge);
                }
            }
            self.room.give_back(old, 1 << has);
        }
        self.tables.0[key.table()].store(word(at, order + 1), Ordering::Relaxed);
        Some(())
    }

    /// Adds an edge for which there is room.
    pub(super) fn add(&mut self, key: Key, child: u32) {
        if let Some(table) = self.tables.at(key.table()) {
            self.put(table, word(key.tag(), child));
            self.filled.0[key.table()] += 1;
        }
    }

    /// Lets an edge lead to another node, which has the words already by which it is found.
    pub(super) fn lead(&mut self, key: Key, slot: u32, child: u32) {
        if let Some((at, _)) = self.tables.at(key.table()) {
            self.words.store(at + slot, word(key.tag(), child));
        }
    }

    /// Takes an edge out; those behind it move up, so that no search ends early.
    pub(super) fn remove(&mut self, key: Key, slot: u32) {
        let table = key.table();
        let Some((at, order)) = self.tables.at(table) else { return };
        self.filled.0[table] -= 1;
        if self.filled.0[table] == 0 {
            self.tables.0[table].store(0, Ordering::Relaxed);
            self.room.give_back(at, 1 << order);
            return;
        }
        let mask = (1 << order) - 1;
        let (mut hole, mut next) = (slot, slot);
        loop {
            next = (next + 1) & mask;
            let edge = self.words.load(at + next);
            if edge == 0 {
                break;
            }
            // It may move if its own slot does not lie between the hole and where it is.
            let own = halves(edge).0 & mask;
            if next.wrapping_sub(own) & mask >= next.wrapping_sub(hole) & mask {
                self.words.store(at + hole, edge);
                hole = next;
            }
        }
        self.words.store(at + hole, 0);
    }

    fn put(&self, (at, order): (u32, u32), edge: u64) {
        let mask = (1 << order) - 1;
        let mut slot = halves(edge).0 & mask;
        while self.words.load(at + slot) != 0 {
            slot = (slot + 1) & mask;
        }
        self.words.store(at + slot, edge);
    }
}
