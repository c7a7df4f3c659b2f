//! Words taken ahead, into which a prompt's new blocks are written before the bookings' lock is taken.
//!
//! Copying the hashes of a long prompt takes longer than all else that a booking does under the lock. So a booking writes
//! its node into a [`SpareRun`] first, where its look-up saw the prompt diverge. Under the lock it links the node, if the
//! prompt still diverges at that depth; otherwise it makes its nodes there, as if nothing had been prepared.
//!
//! A spare run belongs to one thread at a time: a writer holds its lock, which it takes before that of the bookings.

use super::memory::LINE_WORDS;
use super::node::{NODE_WORDS, root_of};
use super::tree_writer::write_node;
use super::{ActiveTree, NewPrompt};
use crate::ids::WorkerIndex;
use crate::limits::{ACTIVE_NODE_BLOCKS_MAX, ACTIVE_SPARE_WORDS};
use crate::sync::{Ordering, fence};

/// Words of a full run. The model checker gets a small world.
pub(super) const SPARE_WORDS: u32 = if cfg!(all(test, kvrouted_loom)) { 2 * LINE_WORDS } else { ACTIVE_SPARE_WORDS };
/// A run of fewer words is exchanged for a full one.
pub(super) const SPARE_WORDS_MIN: u32 = if cfg!(all(test, kvrouted_loom)) { SPARE_WORDS } else { SPARE_WORDS / 2 };

/// A node that was written and is not linked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PreparedNode {
    root: usize,
    worker: WorkerIndex,
    /// Blocks of the prompt above the node, and in it: the rest.
    depth: usize,
    blocks: usize,
}

/// Words taken ahead, whole lines of one chunk, and the node at their beginning.
#[derive(Debug, Default)]
pub(in crate::load) struct SpareRun {
    pub(super) at: u32,
    pub(super) len: u32,
    prepared: Option<PreparedNode>,
}

impl SpareRun {
    /// [`SPARE_WORDS`] words from `at`.
    pub(super) const fn full(at: u32) -> Self {
        Self { at, len: SPARE_WORDS, prepared: None }
    }

    /// The node of a prompt's blocks behind the first `depth`, if that is what was prepared.
    pub(super) fn prepared(&self, root: usize, worker: WorkerIndex, depth: usize, blocks: usize) -> Option<u32> {
        (self.prepared == Some(PreparedNode { root, worker, depth, blocks })).then_some(self.at)
    }

    /// Leaves the prepared node to the tree. Returns its words.
    pub(super) fn leave_prepared(&mut self) -> u32 {
        let Some(PreparedNode { blocks, .. }) = self.prepared.take() else { return 0 };
        let words = (NODE_WORDS + blocks as u32).next_multiple_of(LINE_WORDS);
        (self.at, self.len) = (self.at + words, self.len - words);
        words
    }
}

impl ActiveTree {
    /// Writes the node of a prompt's new blocks into `spare`, if a look-up has seen where they begin, and if they have room.
    pub(in crate::load) fn prepare(&self, spare: &mut SpareRun, prompt: &NewPrompt<'_>) {
        // As in `add`: a reader that still reads the words as what they were sees the change of `sequence` that freed them.
        // Its thread passed them on by the locks of the bookings and of the spare run.
        fence(Ordering::Release);
        self.prepare_behind_fence(spare, prompt);
    }

    /// As [`ActiveTree::prepare`], after its fence.
    pub(super) fn prepare_behind_fence(&self, spare: &mut SpareRun, prompt: &NewPrompt<'_>) {
        spare.prepared = None;
        let NewPrompt { space, locals, worker, seen } = *prompt;
        let (Some(first), Some(seen)) = (locals.first(), seen) else { return };
        let root = self.root_at(space, *first);
        if !seen.is_of((root, space), locals) {
            return;
        }
        let depth = seen.divergence.depth;
        let new = &locals[depth..];
        if new.is_empty() || new.len() > ACTIVE_NODE_BLOCKS_MAX || spare.len < NODE_WORDS + new.len() as u32 {
            return;
        }
        write_node(self, spare.at, (root, root_of(space)), new, worker).set_ends(1);
        spare.prepared = Some(PreparedNode { root, worker, depth, blocks: new.len() });
    }
}
