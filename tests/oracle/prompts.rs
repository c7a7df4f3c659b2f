//! A family of prompts that share prefixes, and the engine hashes that workers give to their blocks.

use kvrouted::ids::{EngineHash, LocalHash};
use rand::RngExt;
use rand_xoshiro::Xoshiro256PlusPlus;
use std::collections::BTreeMap;

/// Prompts as the contents of their blocks. Equal prefixes have equal numbers, so they get equal names.
#[derive(Clone, Debug)]
pub(crate) struct Prompts {
    prompts: Vec<Vec<Block>>,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    local: LocalHash,
    /// One number for one prefix.
    prefix: u64,
}

/// Engine hashes that a worker may use for one prefix.
pub(crate) const NAMES_PER_PREFIX: u64 = 4;

impl Prompts {
    /// `count` prompts of up to `blocks_max` blocks, the first of as many; most begin like one of the others.
    pub(crate) fn random(rng: &mut Xoshiro256PlusPlus, count: usize, blocks_max: usize, locals: u64) -> Self {
        let mut contents: Vec<Vec<u64>> = Vec::new();
        for _ in 0..count {
            let mut prompt = Vec::new();
            if !contents.is_empty() && rng.random_bool(0.8) {
                let other = &contents[rng.random_range(0..contents.len())];
                prompt.extend_from_slice(&other[..rng.random_range(0..=other.len())]);
            }
            let blocks = match contents.is_empty() {
                true => blocks_max,
                false => rng.random_range(prompt.len().max(1)..=blocks_max.max(prompt.len() + 1)),
            };
            prompt.extend((prompt.len()..blocks).map(|_| rng.random_range(0..locals)).collect::<Vec<_>>());
            contents.push(prompt);
        }
        let mut numbers = BTreeMap::new();
        let mut number = |prefix: &[u64]| {
            let next = numbers.len() as u64;
            *numbers.entry(prefix.to_vec()).or_insert(next)
        };
        let prompts = contents.iter().map(|prompt| {
            let block = |at| Block { local: LocalHash(prompt[at]), prefix: number(&prompt[..=at]) };
            (0..prompt.len()).map(block).collect()
        });
        Self { prompts: prompts.collect() }
    }

    pub(crate) const fn len(&self) -> usize {
        self.prompts.len()
    }

    pub(crate) fn blocks(&self, prompt: usize) -> usize {
        self.prompts[prompt].len()
    }

    pub(crate) fn local(&self, prompt: usize, at: usize) -> LocalHash {
        self.prompts[prompt][at].local
    }

    /// A worker's engine hash of a block; `name_number` is below [`NAMES_PER_PREFIX`]. Workers with odd numbers use
    /// names that others use for other content.
    pub(crate) fn name(&self, worker: usize, prompt: usize, at: usize, name_number: u64) -> EngineHash {
        EngineHash((self.prompts[prompt][at].prefix + worker as u64 % 2) * NAMES_PER_PREFIX + name_number)
    }

    /// Every prompt, its first half, and the prompt with a block that no worker holds, in place of one or at the end.
    pub(crate) fn queries(&self, rng: &mut Xoshiro256PlusPlus) -> Vec<Vec<LocalHash>> {
        let mut queries = vec![vec![]];
        for prompt in &self.prompts {
            let whole: Vec<LocalHash> = prompt.iter().map(|block| block.local).collect();
            let mut other = whole.clone();
            other[rng.random_range(0..whole.len())] = LocalHash(u64::MAX);
            let mut longer = whole.clone();
            longer.push(LocalHash(u64::MAX));
            queries.extend([whole[..whole.len().div_ceil(2)].to_vec(), other, longer, whole]);
        }
        queries
    }
}
