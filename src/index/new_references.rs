//! The new references of a batch: which blocks a group of a worker refers to since this batch only.

use crate::ids::EngineHash;
use hashbrown::HashSet;

/// Lists without names, for batches that begin later.
#[derive(Debug, Default)]
pub(super) struct SpareLists(Vec<Vec<EngineHash>>);

impl SpareLists {
    /// Lists that are kept: as many as groups of one worker have a list in most batches.
    const LISTS_MAX: usize = 8;
    /// Capacity that a list keeps.
    const NAMES_KEPT: usize = 1 << 14;

    fn put(&mut self, mut list: Vec<EngineHash>) {
        if list.capacity() > 0 && self.0.len() < Self::LISTS_MAX {
            list.clear();
            list.shrink_to(Self::NAMES_KEPT);
            self.0.push(list);
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let names = self.0.iter().map(Vec::capacity).sum::<usize>() * size_of::<EngineHash>();
        names + self.0.capacity() * size_of::<Vec<EngineHash>>()
    }
}

/// Blocks whose references left 0 in the current batch. Some may be listed twice, or have lost the reference again. At
/// most as long as the batch.
#[derive(Clone, Debug, Default)]
pub(super) struct NewReferences {
    names: Vec<EngineHash>,
    /// The first `indexed` of `names`. Filled only on demand, and never twice with the same names.
    index: HashSet<EngineHash>,
    indexed: usize,
}

impl NewReferences {
    /// Ends the batch before, if nothing else did, and takes a list of `spare` for the next one. Returns whether the
    /// memory changed.
    pub(super) fn begin(&mut self, spare: &mut SpareLists) -> bool {
        let ends = self.end(spare);
        self.names = spare.0.pop().unwrap_or_default();
        ends || self.names.capacity() > 0
    }

    /// Forgets all of them; the list goes to `spare`. Returns whether there was one.
    pub(super) fn end(&mut self, spare: &mut SpareLists) -> bool {
        let before = self.bytes();
        spare.put(std::mem::take(self).names);
        before > 0
    }

    /// How much [`bytes`](Self::bytes) may grow when `blocks` are noted. A list that is full doubles, and the old one
    /// exists until the new one is filled. One with room counts too, so that there is memory when it is full; by its names
    /// and not by its room, as it may have been another worker's.
    pub(super) fn growth_bytes(&self, blocks: usize) -> usize {
        2 * (self.names.len() + blocks + self.index.capacity()) * size_of::<EngineHash>()
    }

    pub(super) fn note(&mut self, names: &[EngineHash]) {
        self.names.extend_from_slice(names);
    }

    /// Whether one of `names` is among them.
    pub(super) fn has_any(&mut self, names: &[EngineHash]) -> bool {
        self.index.extend(&self.names[self.indexed..]);
        self.indexed = self.names.len();
        names.iter().any(|name| self.index.contains(name))
    }

    pub(super) fn bytes(&self) -> usize {
        (self.names.capacity() + self.index.capacity()) * size_of::<EngineHash>()
    }
}
