//! Second copies of a root chain, and how full reports are told from them.
//!
//! vLLM announces a block once for each physical block that comes to hold it, and removes it once for each that is
//! used for something else. A request that may not read the cache (`prompt_logprobs`, some pooling) computes its whole
//! prompt again, so that a chain is announced from its root although it is held: a second copy. A request with
//! `kv_cache_report_mode = "full"` has the same event sent for what it found in the cache, and nothing is ever removed
//! for that. The two events are equal byte for byte, so copies are counted only where the space says that nobody can
//! ask for full reports. What cannot be a copy shows that the space is wrong:
//!
//! | sign | why a copy does not look so |
//! |---|---|
//! | more references on the device than it has blocks | each copy takes a block |
//! | behind the repeated chain, in its batch, blocks that were not held, and less than half of the chain evicted for it | a request stores all its full blocks of a step in one event, but reports what it found before it stores the rest. The first token that a copy generates may fill a block in the same batch (vLLM schedules a step ahead); the blocks of that copy were evicted before |
//! | more than [`REPORT_FREE_BLOCKS_MAX`] blocks repeated, and none evicted before in the batch, by an engine without windows that has evicted since its last clear | such an engine has no other free blocks than the unfilled ones of requests that have ended, which it uses first. Window groups free blocks that were never announced: those that the window has left behind |
//!
//! What stays unseen: reports of fewer blocks, all together, than the device has blocks that are in use and not full,
//! which is about one for each running request; and where `capacity_blocks` is not known, reports that come before the
//! first eviction and are followed by nothing new.

use smallvec::SmallVec;

use crate::ids::{EngineHash, Tier};
use crate::index::{StoreBlocks, StoreOutcome};
use crate::limits::REPORT_FREE_BLOCKS_MAX;

/// What is remembered of a worker's device to tell copies from reports.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// Chains were repeated since the device was last empty, and counted.
    pub(super) has_counted: bool,
    /// Blocks were removed since the device was last empty: no block was free then that had not been used.
    has_evicted: bool,
    /// Blocks were removed in this batch.
    evicts: bool,
    /// Blocks that were removed in this batch and that no store has taken since.
    evicted_unused: usize,
    /// The last blocks of the chains repeated in this batch for which too little was evicted.
    repeated: SmallVec<[EngineHash; 4]>,
}

impl Copies {
    /// A batch begins.
    pub(super) fn begin_batch(&mut self) {
        (self.evicts, self.evicted_unused) = (false, 0);
        self.repeated.clear();
    }

    /// References of the device were taken.
    pub(super) const fn removed(&mut self, references: u32) {
        (self.has_evicted, self.evicts) = (true, true);
        self.evicted_unused += references as usize;
    }

    /// References of the device were added, and blocks taken for them.
    pub(super) const fn placed(&mut self, references: u32) {
        self.evicted_unused = self.evicted_unused.saturating_sub(references as usize);
    }

    /// The device is empty.
    pub(super) fn cleared(&mut self) {
        *self = Self::default();
    }

    /// Blocks were stored on the device and counted; whether that shows a full report.
    pub(super) fn stored(&mut self, blocks: &StoreBlocks<'_>, outcome: &StoreOutcome, has_windows: bool) -> bool {
        let is_evicted_for = 2 * self.evicted_unused >= blocks.hashes.len();
        self.placed(outcome.stored);
        if is_repeated(blocks, outcome) {
            self.has_counted = true;
            self.repeated.extend(blocks.hashes.last().copied().filter(|_| !is_evicted_for));
            let needs_evictions = self.has_evicted && !has_windows;
            return needs_evictions && !self.evicts && blocks.hashes.len() > REPORT_FREE_BLOCKS_MAX;
        }
        outcome.already == 0 && blocks.parent.is_some_and(|parent| self.repeated.contains(&parent))
    }
}

/// Whether a store that the index counted says of some blocks at least what the device held already. Where the engine
/// may hold more than is counted here, it may be a report, and the first that is heard of the other blocks.
pub(super) fn repeats(blocks: &StoreBlocks<'_>, outcome: &StoreOutcome) -> bool {
    outcome.stored > 0 && outcome.already > 0 && blocks.parent.is_none() && blocks.tier == Tier::Device
}

/// Whether a store that the index counted says only what the device held already. Where copies are not counted the
/// index leaves a chain that was held before the batch alone, but not one whose first reference is of the same batch:
/// one request may store its prompt, and another of the same step report it. Other tiers are reported by connectors
/// that ask for every announcement to be counted.
pub(super) fn is_repeated(blocks: &StoreBlocks<'_>, outcome: &StoreOutcome) -> bool {
    repeats(blocks, outcome) && outcome.already == outcome.stored
}
