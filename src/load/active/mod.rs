//! The prompts in flight: every distinct prefix block of a worker counts once, however many of its requests share it.
//!
//! A compressed radix tree over the local hashes of the prompts in flight, chained by position. A node is a run of
//! blocks, with the workers that run a prompt through all of it and how many prompts each runs. A prompt adds to its
//! worker the blocks below the last node that already has the worker. When it ends, it takes away the nodes of which it
//! was the worker's last prompt. One walk down the tree finds the active depth of all workers. If no prompt in flight
//! begins as the queried one, the walk reads the one cache line of the first block's root.
//!
//! # What readers see
//!
//! The one writer, under the bookings' lock, changes words that readers read without a lock. Every first block belongs
//! to a root, one of [`ROOTS`], whose sequence is odd while anything below it changes. A reader that finds the sequence
//! odd pauses, up to [`ACTIVE_READ_PAUSES_MAX`] times. If it finds it changed after its walk, it walks again, up to
//! [`ACTIVE_READ_TRIES_MAX`] times. Beyond either bound it asks for the lock. Its answer was therefore true at one moment
//! during the look-up: nothing is stale. Prompts of other roots do not disturb it. The sequence is a
//! [`SeqWord`](crate::sync::SeqWord), with its tags OPEN and DONE.
//!
//! Any root may reuse words once the change that freed them is done. The new owner writes them after the OPEN of that
//! change. A reader that still reads them sees the sequence of its own root move, by the same pair of fences. The new owner
//! may be a thread without the lock, which writes a prompt's blocks [ahead](SpareRun), behind a fence of its own.

mod edge_table;
mod memory;
mod node;
mod spare;
mod tree_writer;

#[cfg(all(test, kvrouted_loom))]
mod loom;
#[cfg(all(test, not(kvrouted_loom)))]
mod tests;

pub(in crate::load) use spare::SpareRun;
pub(in crate::load) use tree_writer::{ActiveWriter, PlacedPrompt, blocks_to, nodes_to};

use crate::hash::words;
use crate::ids::{LocalHash, SpaceId, WorkerIndex};
use crate::limits::{ACTIVE_READ_PAUSES_MAX, ACTIVE_READ_TRIES_MAX};
use crate::prefetch::prefetch;
use crate::sync::{AtomicU64, Ordering};
use edge_table::{Key, READER_PROBES_MAX, Root};
use memory::{Words, halves};
use node::{NODE_WORDS, Node, root_of};

/// Parts of a block: the unit of weights.
pub(in crate::load) const BLOCK_PARTS: u64 = 1 << 16;
/// Tries of a look-up. The model checker, for which each try squares the number of orders, gets one.
const TRIES_MAX: usize = if cfg!(all(test, kvrouted_loom)) { 1 } else { ACTIVE_READ_TRIES_MAX };
/// Pauses of a look-up, over all tries, while a change is in progress.
const PAUSES_MAX: usize = if cfg!(all(test, kvrouted_loom)) { 0 } else { ACTIVE_READ_PAUSES_MAX };
/// Roots: a change below one does not disturb the readers of another.
const ROOTS: usize = if cfg!(all(test, kvrouted_loom)) { 1 } else { 2048 };

/// Where a prompt diverges from the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Divergence {
    /// The last node that the prompt runs through, or the root.
    parent: u32,
    /// Nodes from the first one down to `parent`.
    nodes: usize,
    /// Blocks of the prompt that are in the tree.
    depth: usize,
    /// The node below that shares some blocks, and how many.
    within: Option<(u32, u32)>,
}

/// Where the prompt of a look-up diverges from the tree. It holds until something below the prompt's root changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenDivergence {
    space: SpaceId,
    root: usize,
    /// The sequence of the root.
    sequence: u64,
    /// Blocks of the prompt, and the last of them that is in the tree; the first if none is.
    blocks: usize,
    last: LocalHash,
    divergence: Divergence,
}

/// A prompt of at least one block that a worker is about to run.
#[derive(Clone, Copy, Debug)]
pub(in crate::load) struct NewPrompt<'a> {
    pub(in crate::load) space: SpaceId,
    pub(in crate::load) locals: &'a [LocalHash],
    pub(in crate::load) worker: WorkerIndex,
    /// What the last look-up of the same prompt saw, if there was one.
    pub(in crate::load) seen: Option<&'a SeenDivergence>,
}

impl SeenDivergence {
    /// Whether a prompt is that of the look-up, as far as its root, its length and one block tell.
    fn is_of(&self, (root, space): (usize, SpaceId), locals: &[LocalHash]) -> bool {
        (self.root, self.space, self.blocks) == (root, space, locals.len())
            && locals.get(self.divergence.depth.saturating_sub(1)) == Some(&self.last)
    }
}

/// The prompts in flight, as every serving thread reads them.
#[derive(Debug)]
pub(in crate::load) struct ActiveTree {
    words: Words,
    roots: Box<[Root]>,
    secret: u64,
}

impl ActiveTree {
    /// An empty tree that never has more than `words_max` words. Who chooses prompts must not know `secret`.
    pub(in crate::load) fn new(secret: u64, words_max: usize) -> Self {
        Self { words: Words::new(words_max), roots: (0..ROOTS).map(|_| Root::new()).collect(), secret }
    }

    /// Memory of the words that were ever needed, bytes. It takes no lock.
    pub(in crate::load) fn bytes(&self) -> u64 {
        self.words.bytes()
    }

    /// Prefetches what a look-up of a prompt reads first.
    #[inline]
    pub(in crate::load) fn prefetch(&self, space: SpaceId, locals: &[LocalHash]) {
        if let Some(first) = locals.first() {
            prefetch((&raw const self.roots[self.root_at(space, *first)]).cast());
        }
    }

    /// Finds the leading blocks of `locals`, at least one, that each worker already runs, and where the prompt diverges.
    /// `None` = every try met a change, and nothing is known.
    pub(in crate::load) fn read(
        &self,
        space: SpaceId,
        locals: &[LocalHash],
        depths: &mut impl ActiveDepths,
    ) -> Option<SeenDivergence> {
        let at = self.root_at(space, *locals.first()?);
        let (root, mut pauses) = (&self.roots[at], PAUSES_MAX);
        for _ in 0..TRIES_MAX {
            let sequence = root.wait_stable(&mut pauses)?;
            let divergence = self.note_depths((at, space), locals, depths);
            if root.is_unchanged_since(sequence) {
                let (blocks, last) = (locals.len(), locals[divergence.depth.saturating_sub(1)]);
                return Some(SeenDivergence { space, root: at, sequence, blocks, last, divergence });
            }
        }
        None
    }

    /// As [`ActiveTree::read`], while the caller keeps the writer out.
    pub(in crate::load) fn read_alone(&self, space: SpaceId, locals: &[LocalHash], depths: &mut impl ActiveDepths) {
        if let Some(first) = locals.first() {
            self.note_depths((self.root_at(space, *first), space), locals, depths);
        }
    }

    /// Notes the depth of every worker that runs leading blocks of a prompt.
    #[inline]
    fn note_depths(&self, root: (usize, SpaceId), locals: &[LocalHash], depths: &mut impl ActiveDepths) -> Divergence {
        depths.clear();
        self.walk(root, locals, READER_PROBES_MAX, |node, depth| {
            let list = node.list(&self.words);
            for entry in list.get(..node.workers() as usize).unwrap_or_default() {
                // Relaxed: see `read`.
                depths.set(WorkerIndex(halves(entry.load(Ordering::Relaxed)).0), depth as u32);
            }
        })
    }

    /// Follows a prompt down the tree as far as both agree. Calls `visit` with each node on the way, and with the blocks of
    /// the prompt up to the last one that the node shares.
    #[inline]
    fn walk(
        &self,
        (root, space): (usize, SpaceId),
        locals: &[LocalHash],
        probes_max: u32,
        mut visit: impl FnMut(&Node<'_>, usize),
    ) -> Divergence {
        let mut divergence = Divergence { parent: root_of(space), nodes: 0, depth: 0, within: None };
        while divergence.depth < locals.len() {
            let key = self.key(divergence.parent, locals[divergence.depth]);
            let Some(found) = self.roots[root].find(&self.words, key, probes_max) else { break };
            let common = self.common(&found.node, &locals[divergence.depth..]);
            if common == 0 {
                // Torn words; the reader discards what it read.
                break;
            }
            divergence.depth += common;
            visit(&found.node, divergence.depth);
            if common < found.node.len() as usize {
                divergence.within = Some((found.at, common as u32));
                break;
            }
            divergence.parent = found.at;
            divergence.nodes += 1;
        }
        divergence
    }

    /// Leading blocks of `locals` that equal those of a node.
    fn common(&self, node: &Node<'_>, locals: &[LocalHash]) -> usize {
        let Some(hashes) = self.words.slice(node.hashes(), node.len()) else { return 0 };
        // It loads with Relaxed: see `read`.
        words::common_prefix(hashes, locals)
    }

    /// A node, for the writer, which knows that it exists.
    fn node(&self, at: u32) -> Node<'_> {
        Node::new(&self.words.run(at, NODE_WORDS).as_chunks().0[0])
    }

    const fn key(&self, parent: u32, first: LocalHash) -> Key {
        Key::new(parent, first.0, self.secret)
    }

    const fn root_at(&self, space: SpaceId, first: LocalHash) -> usize {
        self.key(root_of(space), first).below(ROOTS)
    }
}

/// Takes the leading blocks of a prompt that each worker already runs.
pub trait ActiveDepths {
    /// No worker runs any: a look-up begins, or begins again.
    fn clear(&mut self);

    /// A worker runs that many. Later calls for a worker have larger numbers. The worker may have left, or be one that
    /// never was: of these nothing counts.
    fn set(&mut self, worker: WorkerIndex, blocks: u32);
}

#[cfg(test)]
impl ActiveDepths for std::collections::BTreeMap<WorkerIndex, u32> {
    fn clear(&mut self) {
        self.clear();
    }

    fn set(&mut self, worker: WorkerIndex, blocks: u32) {
        self.insert(worker, blocks);
    }
}
