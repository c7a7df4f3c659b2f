//! A prefix cache like vLLM's, and the names of its blocks. Pure.
//!
//! Blocks in use are pinned. The others are evicted in the order of their last use; of one request, the block farthest
//! from the root goes first. The names are a chained hash with nothing in common with the daemon's, so that a
//! comparison of both proves something.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Tokens per KV block of the demo's engines.
pub(crate) const BLOCK_TOKENS: usize = 16;

const ROOT: u64 = 0x6465_6d6f_5f72_6f6f;

/// The names of the whole blocks of `tokens`, first block first.
pub(crate) fn block_names(tokens: &[u32]) -> Vec<u64> {
    let mut parent = ROOT;
    let mut bytes = [0_u8; BLOCK_TOKENS * 4];
    tokens
        .chunks_exact(BLOCK_TOKENS)
        .map(|block| {
            for (to, token) in bytes.chunks_exact_mut(4).zip(block) {
                to.copy_from_slice(&token.to_be_bytes());
            }
            parent = xxh3_64_with_seed(&bytes, parent);
            parent
        })
        .collect()
}

/// A block in the cache.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// Running requests that use it.
    pins: u32,
    /// Its key in the order of eviction; not used while pinned.
    stamp: u64,
}

/// An LRU cache of blocks. It never holds a block without the block before it.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    capacity_blocks: usize,
    held: FxHashMap<u64, Held>,
    /// Unpinned blocks in the order of eviction.
    unpinned: BTreeMap<u64, u64>,
    stamp_next: u64,
    /// Blocks reserved for the output of running requests.
    reserved_blocks: usize,
}

impl PrefixCache {
    pub(crate) fn new(capacity_blocks: usize) -> Self {
        Self {
            capacity_blocks,
            held: FxHashMap::default(),
            unpinned: BTreeMap::new(),
            stamp_next: 0,
            reserved_blocks: 0,
        }
    }

    /// The number of leading blocks of `chain` that are held.
    pub(crate) fn depth(&self, chain: &[u64]) -> usize {
        chain.iter().take_while(|name| self.held.contains_key(name)).count()
    }

    /// Admits a prompt: pins its held blocks, stores the others, and reserves `output_blocks` for
    /// [`PrefixCache::append`]. Returns how many blocks were held before, or `None`, without a change, if running
    /// requests leave no room. Adds evicted blocks to `evicted`.
    pub(crate) fn admit(&mut self, chain: &[u64], output_blocks: usize, evicted: &mut Vec<u64>) -> Option<usize> {
        let cached = self.depth(chain);
        let already_pinned =
            chain[..cached].iter().filter(|name| self.held.get(name).is_some_and(|held| held.pins > 0)).count();
        let pinned = self.held.len() - self.unpinned.len();
        let wanted = chain.len() - already_pinned + output_blocks;
        if pinned + self.reserved_blocks + wanted > self.capacity_blocks {
            return None;
        }
        self.reserved_blocks += output_blocks;
        // Pin before evicting, so that held blocks are not evicted to make room for the others.
        for name in &chain[..cached] {
            self.pin(*name);
        }
        for name in &chain[cached..] {
            self.store(*name, evicted);
        }
        Some(cached)
    }

    /// Stores one more block of a running request, from its reserve. Returns whether the block is new: another running
    /// request may have generated the same.
    pub(crate) fn append(&mut self, name: u64, evicted: &mut Vec<u64>) -> bool {
        self.reserved_blocks = self.reserved_blocks.saturating_sub(1);
        if self.held.contains_key(&name) {
            self.pin(name);
            return false;
        }
        self.store(name, evicted);
        true
    }

    /// Unpins a finished request's blocks. They stay until they are evicted.
    pub(crate) fn release(&mut self, chain: &[u64]) {
        for name in chain.iter().rev() {
            let Some(held) = self.held.get_mut(name) else { continue };
            held.pins = held.pins.saturating_sub(1);
            if held.pins == 0 {
                held.stamp = self.stamp_next;
                self.unpinned.insert(self.stamp_next, *name);
                self.stamp_next += 1;
            }
        }
    }

    /// Drops all blocks. Only valid while no request runs.
    pub(crate) fn clear(&mut self) {
        self.held.clear();
        self.unpinned.clear();
        self.reserved_blocks = 0;
    }

    fn pin(&mut self, name: u64) {
        if let Some(held) = self.held.get_mut(&name) {
            if held.pins == 0 {
                self.unpinned.remove(&held.stamp);
            }
            held.pins += 1;
        }
    }

    fn store(&mut self, name: u64, evicted: &mut Vec<u64>) {
        if self.held.len() >= self.capacity_blocks
            && let Some((_, oldest)) = self.unpinned.pop_first()
        {
            self.held.remove(&oldest);
            evicted.push(oldest);
        }
        self.held.insert(name, Held { pins: 1, stamp: 0 });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_depends_on_everything_before_it_and_partial_blocks_have_none() {
        let tokens: Vec<u32> = (0..40).collect();
        let mut other = tokens.clone();
        other[0] = 99;
        let (names, others) = (block_names(&tokens), block_names(&other));
        assert_eq!(names.len(), 2);
        assert_eq!(names, block_names(&tokens[..32]));
        assert_ne!(names[1], others[1]);
    }

    #[test]
    fn the_least_recently_used_is_evicted_first_and_its_end_before_its_start() {
        let mut cache = PrefixCache::new(4);
        let mut evicted = Vec::new();
        assert_eq!(cache.admit(&[1, 2], 0, &mut evicted), Some(0));
        cache.release(&[1, 2]);
        assert_eq!(cache.admit(&[3, 4], 0, &mut evicted), Some(0));
        cache.release(&[3, 4]);
        assert_eq!(cache.admit(&[1, 2], 0, &mut evicted), Some(2), "a hit makes it recent");
        cache.release(&[1, 2]);
        assert!(evicted.is_empty());
        assert_eq!(cache.admit(&[5], 0, &mut evicted), Some(0));
        assert_eq!(evicted, [4]);
        assert_eq!((cache.depth(&[3, 4]), cache.depth(&[1, 2])), (1, 2));
    }

    #[test]
    fn running_requests_are_never_evicted_and_their_output_always_fits() {
        let mut cache = PrefixCache::new(4);
        let mut evicted = Vec::new();
        assert_eq!(cache.admit(&[1, 2], 1, &mut evicted), Some(0));
        assert_eq!(cache.admit(&[3, 4], 0, &mut evicted), None, "one block too many");
        assert_eq!(cache.admit(&[1, 3], 0, &mut evicted), Some(1), "a shared block counts once");
        cache.release(&[1, 3]);
        assert!(cache.append(9, &mut evicted));
        assert!(evicted.is_empty());
        cache.release(&[1, 2, 9]);
        assert_eq!(cache.admit(&[6, 7, 8], 0, &mut evicted), Some(0));
        assert_eq!(evicted, [3, 9, 2]);
    }

    #[test]
    fn the_same_output_of_two_requests_is_one_block() {
        let mut cache = PrefixCache::new(4);
        let mut evicted = Vec::new();
        cache.admit(&[1], 1, &mut evicted);
        cache.admit(&[1], 1, &mut evicted);
        assert!(cache.append(2, &mut evicted));
        assert!(!cache.append(2, &mut evicted));
        cache.release(&[1, 2]);
        assert_eq!(cache.admit(&[5, 6, 7], 0, &mut evicted), None, "the other request still uses both");
        cache.release(&[1, 2]);
        assert_eq!(cache.admit(&[5, 6, 7], 0, &mut evicted), Some(0));
        cache.release(&[5, 6, 7]);
        cache.clear();
        assert_eq!(cache.depth(&[5]), 0);
    }
}
