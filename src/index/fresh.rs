//! Which blocks a group has come to refer to in the batch under way.

use crate::ids::EngineHash;
use hashbrown::HashSet;

/// What the list keeps between batches.
const FRESH_BLOCKS_KEPT: usize = 512;

/// Blocks whose references left 0 in one batch; may name some twice, or some that left again. As long as the
/// batch at most: nothing of it outlives the next.
#[derive(Clone, Debug, Default)]
pub(super) struct Fresh {
    batch: u64,
    names: Vec<EngineHash>,
    /// The first `indexed` of `names`. Made only when somebody asks, and never twice of the same.
    index: HashSet<EngineHash>,
    indexed: usize,
}

impl Fresh {
    pub(super) fn begin(&mut self, batch: u64) {
        self.batch = batch;
        self.names.clear();
        self.names.shrink_to(FRESH_BLOCKS_KEPT);
        self.index.clear();
        self.index.shrink_to(FRESH_BLOCKS_KEPT);
        self.indexed = 0;
    }

    pub(super) fn note(&mut self, batch: u64, names: &[EngineHash]) {
        if self.batch != batch {
            self.begin(batch);
        }
        self.names.extend_from_slice(names);
    }

    /// Whether one of `names` is among them.
    pub(super) fn has_any(&mut self, batch: u64, names: &[EngineHash]) -> bool {
        if self.batch != batch || self.names.is_empty() {
            return false;
        }
        self.index.extend(&self.names[self.indexed..]);
        self.indexed = self.names.len();
        names.iter().any(|name| self.index.contains(name))
    }

    pub(super) fn bytes(&self) -> usize {
        (self.names.capacity() + self.index.capacity()) * size_of::<EngineHash>()
    }
}
