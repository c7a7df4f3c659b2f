//! A store below an engine's device memory: it takes what the tier above evicts.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use super::spec::TierSpec;

#[derive(Debug)]
pub(super) struct TierStore {
    spec: TierSpec,
    capacity_blocks: usize,
    block_s: f64,
    /// By chain: the number of the last push.
    held: FxHashMap<u64, u64>,
    /// Pushes in order; those that a later push repeats are stale.
    order: VecDeque<(u64, u64)>,
    pushes: u64,
}

impl TierStore {
    pub(super) fn new(spec: TierSpec, block_size: u32) -> Self {
        Self {
            spec,
            capacity_blocks: (spec.tokens / u64::from(block_size)) as usize,
            block_s: spec.token_s * f64::from(block_size),
            held: FxHashMap::default(),
            order: VecDeque::new(),
            pushes: 0,
        }
    }

    pub(super) fn tier(&self) -> crate::ids::Tier {
        self.spec.tier
    }

    pub(super) fn holds(&self, chain: u64) -> bool {
        self.held.contains_key(&chain)
    }

    /// Seconds to bring one block to the device.
    pub(super) fn block_s(&self) -> f64 {
        self.block_s
    }

    /// Takes blocks; what it evicts for them replaces them in `chains`.
    pub(super) fn push(&mut self, chains: &mut Vec<u64>) {
        for chain in chains.drain(..) {
            self.pushes += 1;
            self.held.insert(chain, self.pushes);
            self.order.push_back((chain, self.pushes));
        }
        while self.held.len() > self.capacity_blocks {
            let Some((chain, push)) = self.order.pop_front() else { return };
            if self.held.get(&chain) == Some(&push) {
                self.held.remove(&chain);
                chains.push(chain);
            }
        }
    }
}
