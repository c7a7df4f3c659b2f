//! Edges: from a node and the hash of a block to the node below. Each root has a few inline edges beside its sequence,
//! on one cache line. If few prompts are in flight and none begins as the queried one, a look-up reads that line alone.
//! Further edges spill into hash tables with open addressing, a few for each root.

use super::memory::{CHUNK_ORDER, LINE_WORDS, WordAllocator, Words, halves, word};
use super::node::Node;
use super::{AtomicU64, Ordering};
use crate::sync::{SeqWord, spin};

/// Inline edges of a root: the rest of its cache line. The model checker gets a small world.
const INLINE_EDGES: u32 = if cfg!(all(test, kvrouted_loom)) { 2 } else { LINE_WORDS - 2 };
/// Spill tables of a root, each at most as long as a chunk.
const TABLES: u32 = if cfg!(all(test, kvrouted_loom)) { 1 } else { 8 };
/// Words that describe the spill tables: position and length of each, then the filled slots of each. Readers use the
/// first half.
const SPILL_WORDS: u32 = 2 * TABLES;
/// Slots of the smallest table, as a power of two.
const ORDER_MIN: u32 = if cfg!(all(test, kvrouted_loom)) { 1 } else { 3 };
/// Slots that a reader probes before it gives up, because what it reads is torn: tables are at most half full.
pub(super) const READER_PROBES_MAX: u32 = 512;
/// The writer never reads torn words.
pub(super) const WRITER_PROBES_MAX: u32 = u32::MAX;

/// The name of an edge: the node above, and the hash of the first block below; and a mix of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    parent: u32,
    first: u64,
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

    /// A number below `power`, a power of two.
    pub(super) const fn below(self, power: usize) -> usize {
        (self.mixed >> 8) as usize & (power - 1)
    }

    const fn table(self) -> u32 {
        self.mixed as u32 & (TABLES - 1)
    }

    const fn tag(self) -> u32 {
        (self.mixed >> 32) as u32
    }

    /// The node below an edge, if the edge has this name.
    #[inline]
    fn child_if(self, words: &Words, edge: u64) -> Option<(u32, Node<'_>)> {
        let (tag, child) = halves(edge);
        if tag != self.tag() {
            return None;
        }
        let node = Node::new(words.line(child)?);
        (node.parent() == self.parent && node.first() == self.first && node.len() > 0).then_some((child, node))
    }
}

/// The position of an edge: the first [`INLINE_EDGES`] are inline, the others are in the table of the key.
pub(super) type Slot = u32;

/// An edge that was found: its position and its node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found<'a> {
    pub(super) slot: Slot,
    pub(super) at: u32,
    pub(super) node: Node<'a>,
}

/// A root: the edges below the first blocks that belong to it.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Root {
    sequence: SeqWord,
    /// Inline edges, without gaps; 0 = the end.
    inline: [AtomicU64; INLINE_EDGES as usize],
    /// The words that describe the spill tables; 0 = there are none.
    spill: AtomicU64,
}

const _: () = assert!(cfg!(all(test, kvrouted_loom)) || size_of::<Root>() == 64, "a line");

impl Root {
    pub(super) fn new() -> Self {
        Self { sequence: SeqWord::new(), inline: std::array::from_fn(|_| AtomicU64::new(0)), spill: AtomicU64::new(0) }
    }

    /// The sequence before a walk; `None` = a change is in progress.
    #[inline]
    pub(super) fn stable_sequence(&self) -> Option<u64> {
        self.sequence.begin_read()
    }

    /// As [`Root::stable_sequence`], after pauses while a change is in progress, which it takes off `pauses`. `None` = they
    /// are used up.
    #[inline]
    pub(super) fn wait_stable(&self, pauses: &mut usize) -> Option<u64> {
        loop {
            if let Some(sequence) = self.stable_sequence() {
                return Some(sequence);
            }
            *pauses = pauses.checked_sub(1)?;
            spin();
        }
    }

    /// Whether nothing has changed since [`Root::stable_sequence`] returned `sequence`.
    #[inline]
    pub(super) fn is_unchanged_since(&self, sequence: u64) -> bool {
        self.sequence.is_unchanged(sequence)
    }

    /// Begins a change. There is one writer.
    pub(super) fn open(&self) {
        self.sequence.begin_write();
    }

    /// Ends a change.
    pub(super) fn close(&self) {
        self.sequence.end_write();
    }

    /// The edge of a name, among the inline ones or the first `probes_max` slots of its table. Relaxed: see
    /// `stable_sequence`.
    #[inline]
    pub(super) fn find<'a>(&self, words: &'a Words, key: Key, probes_max: u32) -> Option<Found<'a>> {
        for (place, edge) in self.inline.iter().enumerate() {
            let edge = edge.load(Ordering::Relaxed);
            if edge == 0 {
                break;
            }
            if let Some((at, node)) = key.child_if(words, edge) {
                return Some(Found { slot: place as Slot, at, node });
            }
        }
        let spill = self.spill.load(Ordering::Relaxed) as u32;
        if spill == 0 { None } else { find_spilled(words, spill, key, probes_max) }
    }
}

/// As [`Root::find`], in the table of the key.
fn find_spilled(words: &Words, spill: u32, key: Key, probes_max: u32) -> Option<Found<'_>> {
    let (at, order) = table_of(words, spill, key)?;
    let slots = words.slice(at, 1 << order)?;
    let mask = (1 << order) - 1;
    for probe in 0..probes_max.min(1 << order) {
        let slot = key.tag().wrapping_add(probe) & mask;
        let edge = slots[slot as usize].load(Ordering::Relaxed);
        if edge == 0 {
            return None;
        }
        if let Some((at, node)) = key.child_if(words, edge) {
            return Some(Found { slot: INLINE_EDGES + slot, at, node });
        }
    }
    None
}

/// Position and order of the table of a key.
#[inline]
fn table_of(words: &Words, spill: u32, key: Key) -> Option<(u32, u32)> {
    // Relaxed: the root's sequence tells whether it still holds.
    let (at, order) = halves(words.slice(spill, SPILL_WORDS)?[key.table() as usize].load(Ordering::Relaxed));
    (1..=CHUNK_ORDER + 1).contains(&order).then(|| (at, order - 1))
}

/// The edges of one root, for the writer. Relaxed throughout: the root's sequence tells readers of changes.
pub(super) struct Edges<'a> {
    pub(super) root: &'a Root,
    pub(super) words: &'a Words,
    pub(super) allocator: &'a mut WordAllocator,
}

impl Edges<'_> {
    /// Reserves room for `more` edges, one of which has the name `key`; `None` if there is no memory. Call it for each
    /// of them before the first is added.
    pub(super) fn reserve(&mut self, key: Key, more: usize) -> Option<()> {
        if self.inline_used() + more <= INLINE_EDGES as usize {
            Some(())
        } else {
            self.reserve_spilled(key, more as u32)
        }
    }

    fn reserve_spilled(&mut self, key: Key, more: u32) -> Option<()> {
        let spill = self.spill();
        let before = table_of(self.words, spill, key).filter(|_| spill != 0);
        let filled = if spill == 0 { 0 } else { self.filled(spill, key).load(Ordering::Relaxed) as u32 };
        let order = (filled + more).checked_mul(2)?.next_power_of_two().trailing_zeros().max(ORDER_MIN);
        if before.is_some_and(|(_, has)| has >= order) {
            return Some(());
        }
        let at = self.allocator.take(self.words, u32::checked_shl(1, order)?)?;
        let slots = self.words.run(at, 1 << order);
        slots.iter().for_each(|slot| slot.store(0, Ordering::Relaxed));
        let Some(spill) = self.begin_spill(spill) else {
            self.allocator.give_back(at, 1 << order);
            return None;
        };
        if let Some((old, has)) = before {
            for edge in self.words.run(old, 1 << has).iter().map(|edge| edge.load(Ordering::Relaxed)) {
                if edge != 0 {
                    put(slots, edge);
                }
            }
            self.allocator.give_back(old, 1 << has);
        }
        self.words.run(spill, TABLES)[key.table() as usize].store(word(at, order + 1), Ordering::Relaxed);
        Some(())
    }

    /// Inline edges in use.
    fn inline_used(&self) -> usize {
        self.root.inline.iter().take_while(|edge| edge.load(Ordering::Relaxed) != 0).count()
    }

    /// The words that describe the spill tables; 0 = there are none.
    fn spill(&self) -> u32 {
        self.root.spill.load(Ordering::Relaxed) as u32
    }

    /// Filled slots of the table of a key.
    fn filled(&self, spill: u32, key: Key) -> &AtomicU64 {
        &self.words.run(spill, SPILL_WORDS)[(TABLES + key.table()) as usize]
    }

    /// Allocates the words that describe spill tables, unless they exist.
    fn begin_spill(&mut self, spill: u32) -> Option<u32> {
        if spill != 0 {
            return Some(spill);
        }
        let spill = self.allocator.take(self.words, SPILL_WORDS)?;
        self.words.run(spill, SPILL_WORDS).iter().for_each(|table| table.store(0, Ordering::Relaxed));
        self.root.spill.store(u64::from(spill), Ordering::Relaxed);
        Some(spill)
    }

    /// Adds an edge for which room was reserved: to its table if there is one, otherwise inline.
    pub(super) fn add(&mut self, key: Key, child: u32) {
        let edge = word(key.tag(), child);
        let spill = self.spill();
        if spill != 0
            && let Some((at, order)) = table_of(self.words, spill, key)
        {
            let filled = self.filled(spill, key);
            let has = filled.load(Ordering::Relaxed);
            if 2 * has < 1 << order {
                put(self.words.run(at, 1 << order), edge);
                filled.store(has + 1, Ordering::Relaxed);
                return;
            }
        }
        let inline = self.root.inline.get(self.inline_used());
        debug_assert!(inline.is_some(), "an edge is added for which there is no room");
        if let Some(inline) = inline {
            inline.store(edge, Ordering::Relaxed);
        }
    }

    /// Points an edge at another node, which already has the words by which it is found.
    pub(super) fn redirect(&mut self, key: Key, slot: Slot, child: u32) {
        let edge = word(key.tag(), child);
        if let Some(inline) = self.root.inline.get(slot as usize) {
            inline.store(edge, Ordering::Relaxed);
        } else if let Some((at, order)) = table_of(self.words, self.spill(), key) {
            self.words.run(at, 1 << order)[(slot - INLINE_EDGES) as usize].store(edge, Ordering::Relaxed);
        }
    }

    /// Removes an edge.
    pub(super) fn remove(&mut self, key: Key, slot: Slot) {
        let Some(inline) = self.root.inline.get(slot as usize) else {
            return self.remove_spilled(key, slot - INLINE_EDGES);
        };
        let last = self.inline_used() - 1;
        if slot as usize != last {
            inline.store(self.root.inline[last].load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.root.inline[last].store(0, Ordering::Relaxed);
    }

    /// Later edges of the probe sequence move up, so that no search ends early.
    fn remove_spilled(&mut self, key: Key, slot: Slot) {
        let spill = self.spill();
        let Some((at, order)) = table_of(self.words, spill, key) else { return };
        let left = self.filled(spill, key).load(Ordering::Relaxed) - 1;
        self.filled(spill, key).store(left, Ordering::Relaxed);
        if left == 0 {
            self.end_table(spill, key, (at, order));
            return;
        }
        let (slots, mask) = (self.words.run(at, 1 << order), (1 << order) - 1);
        let (mut hole, mut next) = (slot, slot);
        loop {
            next = (next + 1) & mask;
            let edge = slots[next as usize].load(Ordering::Relaxed);
            if edge == 0 {
                break;
            }
            // An edge may move unless its own slot lies between the hole and its position.
            let own = halves(edge).0 & mask;
            if next.wrapping_sub(own) & mask >= next.wrapping_sub(hole) & mask {
                slots[hole as usize].store(edge, Ordering::Relaxed);
                hole = next;
            }
        }
        slots[hole as usize].store(0, Ordering::Relaxed);
    }

    /// Frees an empty table, and with the last one the words that describe the tables.
    fn end_table(&mut self, spill: u32, key: Key, (at, order): (u32, u32)) {
        let tables = self.words.run(spill, TABLES);
        tables[key.table() as usize].store(0, Ordering::Relaxed);
        self.allocator.give_back(at, 1 << order);
        if tables.iter().all(|table| table.load(Ordering::Relaxed) == 0) {
            self.root.spill.store(0, Ordering::Relaxed);
            self.allocator.give_back(spill, SPILL_WORDS);
        }
    }
}

fn put(slots: &[AtomicU64], edge: u64) {
    let mask = slots.len() - 1;
    let mut slot = halves(edge).0 as usize & mask;
    while slots[slot].load(Ordering::Relaxed) != 0 {
        slot = (slot + 1) & mask;
    }
    slots[slot].store(edge, Ordering::Relaxed);
}
