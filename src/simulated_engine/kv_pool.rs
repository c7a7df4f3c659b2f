//! The KV memory of one simulated engine, which running requests and cached blocks share.

use std::hash::BuildHasherDefault;

use hashbrown::HashMap;
use rustc_hash::FxHasher;

/// The end of the list of unreferenced blocks.
const NONE: u32 = u32::MAX;

/// A cached block, by its place in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CachedBlock(u32);

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// The hash of the chain that ends with the block.
    chain: u64,
    /// Running requests that use the block.
    references: u32,
    /// Neighbours in the list of unreferenced blocks.
    older: u32,
    younger: u32,
}

/// Blocks of an engine: *plain* blocks belong to one running request; *cached* blocks have a hash and are shared.
/// Cached blocks that no request uses are evicted, the least recently used first, when room is needed.
#[derive(Debug)]
pub(super) struct KvPool {
    capacity_blocks: u32,
    plain_blocks: u32,
    referenced_blocks: u32,
    slots: Vec<Slot>,
    unused_slots: Vec<u32>,
    by_chain: HashMap<u64, u32, BuildHasherDefault<FxHasher>>,
    oldest: u32,
    youngest: u32,
    evicted: Vec<u64>,
}

impl KvPool {
    pub(super) fn new(capacity_blocks: u32) -> Self {
        Self {
            capacity_blocks,
            plain_blocks: 0,
            referenced_blocks: 0,
            slots: Vec::new(),
            unused_slots: Vec::new(),
            by_chain: HashMap::default(),
            oldest: NONE,
            youngest: NONE,
            evicted: Vec::new(),
        }
    }

    pub(super) fn capacity_blocks(&self) -> u32 {
        self.capacity_blocks
    }

    /// Blocks that a running request could take, unreferenced cached blocks among them.
    pub(super) fn available_blocks(&self) -> u32 {
        self.capacity_blocks - self.plain_blocks - self.referenced_blocks
    }

    /// Blocks of running requests.
    #[cfg(test)]
    pub(super) fn used_blocks(&self) -> u32 {
        self.plain_blocks + self.referenced_blocks
    }

    /// The cached block of a chain, if there is one.
    pub(super) fn find(&self, chain: u64) -> Option<CachedBlock> {
        self.by_chain.get(&chain).map(|slot| CachedBlock(*slot))
    }

    /// Whether a request uses the block.
    pub(super) fn is_referenced(&self, block: CachedBlock) -> bool {
        self.slots[block.0 as usize].references > 0
    }

    /// Adds a reference to a cached block.
    pub(super) fn refer(&mut self, block: CachedBlock) {
        if self.slots[block.0 as usize].references == 0 {
            self.unlink(block.0);
            self.referenced_blocks += 1;
        }
        self.slots[block.0 as usize].references += 1;
    }

    /// Takes back a reference. A block without references becomes the youngest of those that may be evicted.
    pub(super) fn release(&mut self, block: CachedBlock) {
        let slot = &mut self.slots[block.0 as usize];
        slot.references -= 1;
        if slot.references == 0 {
            self.referenced_blocks -= 1;
            self.link(block.0);
        }
    }

    /// Takes plain blocks, and evicts as many cached ones as that needs. `false`: there is no room, and nothing changed.
    pub(super) fn take_plain(&mut self, blocks: u32) -> bool {
        if blocks > self.available_blocks() {
            return false;
        }
        self.plain_blocks += blocks;
        while self.plain_blocks + self.by_chain.len() as u32 > self.capacity_blocks {
            self.evict_oldest();
        }
        true
    }

    pub(super) fn give_back_plain(&mut self, blocks: u32) {
        self.plain_blocks -= blocks;
    }

    /// Turns a plain block of a request into a cached one, which the request refers to. `None`: the chain is cached
    /// already, and the request's block stays plain.
    pub(super) fn cache(&mut self, chain: u64) -> Option<CachedBlock> {
        if self.by_chain.contains_key(&chain) {
            return None;
        }
        let slot = Slot { chain, references: 1, older: NONE, younger: NONE };
        let at = match self.unused_slots.pop() {
            Some(at) => {
                self.slots[at as usize] = slot;
                at
            }
            None => {
                self.slots.push(slot);
                self.slots.len() as u32 - 1
            }
        };
        self.by_chain.insert(chain, at);
        self.plain_blocks -= 1;
        self.referenced_blocks += 1;
        Some(CachedBlock(at))
    }

    /// Moves the chains evicted since the last call to `to`, in order.
    pub(super) fn take_evicted(&mut self, to: &mut Vec<u64>) {
        to.append(&mut self.evicted);
    }

    pub(super) fn has_evicted(&self) -> bool {
        !self.evicted.is_empty()
    }

    /// The chains of all cached blocks.
    #[cfg(test)]
    pub(super) fn cached(&self) -> impl Iterator<Item = u64> {
        self.by_chain.keys().copied()
    }

    fn evict_oldest(&mut self) {
        let at = self.oldest;
        self.unlink(at);
        let chain = self.slots[at as usize].chain;
        self.by_chain.remove(&chain);
        self.unused_slots.push(at);
        self.evicted.push(chain);
    }

    fn link(&mut self, at: u32) {
        let before = self.youngest;
        let slot = &mut self.slots[at as usize];
        (slot.older, slot.younger) = (before, NONE);
        match before {
            NONE => self.oldest = at,
            before => self.slots[before as usize].younger = at,
        }
        self.youngest = at;
    }

    fn unlink(&mut self, at: u32) {
        let Slot { older, younger, .. } = self.slots[at as usize];
        match older {
            NONE => self.oldest = younger,
            older => self.slots[older as usize].younger = younger,
        }
        match younger {
            NONE => self.youngest = older,
            younger => self.slots[younger as usize].older = older,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool in which a request has cached these chains and ended, the last of them first.
    fn pool_with(capacity_blocks: u32, chains: &[u64]) -> KvPool {
        let mut pool = KvPool::new(capacity_blocks);
        assert!(pool.take_plain(chains.len() as u32));
        let held: Vec<_> = chains.iter().filter_map(|chain| pool.cache(*chain)).collect();
        held.into_iter().rev().for_each(|block| pool.release(block));
        pool
    }

    #[test]
    fn the_end_of_the_oldest_chain_is_evicted_first() {
        let mut pool = pool_with(4, &[1, 2, 3]);
        assert!(pool.take_plain(2), "one free block, and one that is evicted");
        let mut evicted = Vec::new();
        pool.take_evicted(&mut evicted);
        assert_eq!((evicted, pool.find(3), pool.find(2).is_some()), (vec![3], None, true));
        assert_eq!((pool.used_blocks(), pool.available_blocks()), (2, 2));
    }

    #[test]
    fn a_block_in_use_is_not_evicted() {
        let mut pool = pool_with(3, &[1, 2]);
        let first = pool.find(1).unwrap();
        pool.refer(first);
        assert!(pool.is_referenced(first) && !pool.take_plain(3) && pool.take_plain(2));
        assert_eq!((pool.find(1), pool.find(2)), (Some(first), None));
        assert!(!pool.take_plain(1), "nothing is left to evict");
        pool.release(first);
        assert!(pool.take_plain(1) && pool.find(1).is_none());
    }

    #[test]
    fn a_chain_is_cached_once() {
        let mut pool = pool_with(4, &[1]);
        assert!(pool.take_plain(1) && pool.cache(1).is_none());
        assert_eq!(pool.used_blocks(), 1, "the copy stays with its request");
        pool.give_back_plain(1);
        assert_eq!(pool.available_blocks(), 4);
    }
}
