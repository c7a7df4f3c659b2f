//! The cache of one simulated rank, which is the oracle too: each prompt is held as its leading blocks, and the prompt
//! that was used least recently is evicted from its end.

use rand::{Rng, RngExt};
use rustc_hash::FxHashMap;

use super::contents::{BATCH_BLOCKS, PROMPT_BLOCKS, Range, SHARED_PROMPTS, Step};
use crate::lru::Lru;
use crate::nodes::NodeId;

/// Requests for prompts that are held whole, one after the other, before a rank gets a prompt of its own.
const HITS_MAX: usize = 4;

/// What one rank holds.
#[derive(Debug)]
pub(crate) struct Cache {
    capacity_blocks: u32,
    held_blocks: u32,
    depths: FxHashMap<u32, u8>,
    order: Lru,
    /// The prompt that is computed.
    current: Option<u32>,
    /// The number of the rank's next own prompt.
    next_private: u32,
}

impl Cache {
    /// An empty cache.
    #[must_use]
    pub(crate) fn new(capacity_blocks: u32) -> Self {
        let (depths, order) = (FxHashMap::default(), Lru::default());
        Self { capacity_blocks, held_blocks: 0, depths, order, current: None, next_private: SHARED_PROMPTS }
    }

    /// Leading blocks of a prompt that are held.
    #[must_use]
    pub(crate) fn depth(&self, prompt: u32) -> u8 {
        self.depths.get(&prompt).copied().unwrap_or(0)
    }

    /// The newest of the rank's own prompts.
    #[must_use]
    pub(crate) fn newest_private(&self) -> Option<u32> {
        self.next_private.checked_sub(1).filter(|prompt| *prompt >= SHARED_PROMPTS)
    }

    /// Blocks held.
    #[must_use]
    pub(crate) const fn held_blocks(&self) -> u32 {
        self.held_blocks
    }

    /// Whether each further step evicts.
    #[must_use]
    pub(crate) const fn is_full(&self) -> bool {
        self.held_blocks >= self.capacity_blocks
    }

    /// Computes the next blocks.
    pub(crate) fn step(&mut self, random: &mut impl Rng) -> Step {
        let unfinished = self.current.filter(|prompt| self.depth(*prompt) < PROMPT_BLOCKS);
        let prompt = unfinished.unwrap_or_else(|| self.next_prompt(random));
        self.current = Some(prompt);
        self.order.touch(NodeId(prompt));
        let depth = self.depths.entry(prompt).or_default();
        let stored = Range { prompt, from: *depth, to: *depth + BATCH_BLOCKS };
        *depth = stored.to;
        self.held_blocks += u32::from(BATCH_BLOCKS);
        let removed = if self.held_blocks > self.capacity_blocks { self.evict(prompt) } else { None };
        Step { stored, removed }
    }

    /// A prompt that is not held whole. Those that are held whole are used on the way.
    fn next_prompt(&mut self, random: &mut impl Rng) -> u32 {
        for _ in 0..HITS_MAX {
            if random.random_bool(0.5) {
                break;
            }
            // Low numbers are asked for more often.
            let skewed = random.random_range(0.0..1.0_f64).powi(2);
            let prompt = (skewed * f64::from(SHARED_PROMPTS)) as u32;
            if self.depth(prompt) < PROMPT_BLOCKS {
                return prompt;
            }
            self.order.touch(NodeId(prompt));
        }
        self.next_private += 1;
        self.next_private - 1
    }

    /// Evicts as many blocks as a step stores, if another prompt than `kept` has them.
    fn evict(&mut self, kept: u32) -> Option<Range> {
        let NodeId(prompt) = self.order.pop_oldest()?;
        if prompt == kept {
            self.order.touch(NodeId(prompt));
            return None;
        }
        let depth = self.depth(prompt);
        let left = depth - BATCH_BLOCKS;
        self.held_blocks -= u32::from(BATCH_BLOCKS);
        if left == 0 {
            self.depths.remove(&prompt);
        } else {
            self.depths.insert(prompt, left);
            self.order.insert_oldest(NodeId(prompt));
        }
        Some(Range { prompt, from: left, to: depth })
    }
}

#[cfg(test)]
mod tests {
    use kvrouted::ids::{EventSeq, Worker};
    use kvrouted::index::{Depths, ShardLimits};
    use kvrouted::ingest::Feed;
    use kvrouted::metrics::WorkerCounter;
    use rand::SeedableRng;
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::*;
    use crate::large_fleet::contents::Owner;

    #[test]
    fn the_daemon_holds_what_the_cache_holds_after_each_of_its_batches() {
        let (owner, capacity) = (Owner { worker: 3, rank: 2 }, 1000);
        let (mut feed, reader) = Feed::new(Worker::new(3, 2), None, true, ShardLimits::default());
        let (mut cache, mut random) = (Cache::new(capacity), Xoshiro256PlusPlus::seed_from_u64(7));
        let mut depths = Depths::new();
        for at in 0..5000_u64 {
            let step = cache.step(&mut random);
            feed.message(EventSeq(at), &owner.payload(at, &step));
            assert!(cache.held_blocks() <= capacity + u32::from(BATCH_BLOCKS));
            for prompt in [Some(step.stored), step.removed].into_iter().flatten().map(|range| range.prompt) {
                reader.lookup(&owner.prompt(prompt), &mut depths);
                let found = depths.of(Feed::SHARD, Feed::SLOT).device;
                assert_eq!(found, u32::from(cache.depth(prompt)), "prompt {prompt} after batch {at}");
            }
        }
        assert!(cache.is_full() && cache.newest_private().is_some());
        let counters = &feed.view().counters;
        assert_eq!((counters.get(WorkerCounter::Batches), counters.get(WorkerCounter::RemovesUnknown)), (5000, 0));
    }
}
