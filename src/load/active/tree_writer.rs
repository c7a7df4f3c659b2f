//! The writer of the tree of prompts in flight: a prompt begins, moves or ends.

use super::edge_table::{Edges, Key, Slot, WRITER_PROBES_MAX};
use super::memory::{CHUNK_WORDS, WordAllocator};
use super::node::{
    LIST_WORDS, List, NODE_WORDS, Node, capacity_for, have_equal_weights, is_node, join, join_path, leave, lower_path,
    raise_path, root_of,
};
use super::spare::{SPARE_WORDS, SPARE_WORDS_MIN, SpareRun};
use super::{ActiveTree, AtomicU64, BLOCK_PARTS, Divergence, NewPrompt, Ordering, SeenDivergence};
use crate::hash::words;
use crate::ids::{LocalHash, SpaceId, WorkerIndex};
use crate::limits::{ACTIVE_JOIN_BLOCKS_MAX, ACTIVE_NODE_BLOCKS_MAX, ACTIVE_PATH_NODES_MAX};
use crate::sync::fence;

/// A prompt that is in the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::load) struct PlacedPrompt {
    /// The node at which the prompt ends. It keeps its number while a prompt ends there.
    pub(in crate::load) node: u32,
    /// What the prompt adds to its worker, in parts of a block: [`BLOCK_PARTS`] for each block that the worker did not
    /// run before.
    pub(in crate::load) added_parts: u64,
}

/// The writer's own state; its methods are called under the bookings' lock.
#[derive(Debug, Default)]
pub(in crate::load) struct ActiveWriter {
    pub(super) allocator: WordAllocator,
    /// Words of all spare runs.
    spare_words: u32,
}

/// New nodes in a chain, not linked to the tree yet.
#[derive(Clone, Copy)]
struct NewNodes {
    first: u32,
    last: u32,
    nodes: usize,
}

impl ActiveWriter {
    /// Words in use by prompts; those of spare runs are not.
    pub(in crate::load) const fn words_used(&self) -> u32 {
        self.allocator.used() - self.spare_words
    }

    /// Adds a prompt to its worker. Its new blocks may have been written into `spare`. `None` if there is no memory or if a
    /// path would be too long, and nothing changed.
    pub(in crate::load) fn add(
        &mut self,
        tree: &ActiveTree,
        prompt: &NewPrompt<'_>,
        spare: Option<&mut SpareRun>,
    ) -> Option<PlacedPrompt> {
        // As OPEN, for words that are reused below and that another thread may have freed: a reader that still reads
        // them as what they were sees that thread's change of `sequence` too.
        fence(Ordering::Release);
        self.place(tree, prompt, spare)
    }

    /// As [`ActiveWriter::add`], after its fence.
    pub(super) fn place(
        &mut self,
        tree: &ActiveTree,
        prompt: &NewPrompt<'_>,
        mut spare: Option<&mut SpareRun>,
    ) -> Option<PlacedPrompt> {
        let NewPrompt { space, locals, worker, seen } = *prompt;
        let root = tree.root_at(space, *locals.first()?);
        let found = || tree.walk((root, space), locals, WRITER_PROBES_MAX, |_, _| ());
        let seen = seen.filter(|seen| seen.is_of((root, space), locals) && tree.still_diverges(seen, locals));
        let divergence = seen.map_or_else(found, |seen| seen.divergence);
        debug_assert_eq!(divergence, found(), "`seen` is of another prompt");
        // No reader can reach the new nodes yet.
        let (depth, new) = (divergence.depth, &locals[divergence.depth..]);
        if tree.path_nodes_with(&divergence, new.len()) > ACTIVE_PATH_NODES_MAX {
            return None;
        }
        let prepared = spare.as_ref().and_then(|spare| spare.prepared(root, worker, depth, new.len()));
        let tail = match prepared {
            Some(node) => Some(NewNodes { first: node, last: node, nodes: 1 }),
            None => match self.make_new_nodes(tree, root, new, worker) {
                Some(made) => made,
                // The last words are the prompts'.
                None => {
                    self.give_back_spare(&std::mem::take(spare.as_deref_mut()?));
                    self.make_new_nodes(tree, root, new, worker)?
                }
            },
        };
        tree.roots[root].open();
        let placed = self.attach_new(tree, root, &divergence, tail, worker);
        if placed.is_none() && prepared.is_none() {
            self.free_new_nodes(tree, tail);
        }
        tree.roots[root].close();
        if let Some(spare) = spare {
            if placed.is_some() && prepared.is_some() {
                self.spare_words -= spare.leave_prepared();
            }
            self.refill(tree, spare);
        }
        placed
    }

    /// Gives the words of a spare run back.
    pub(super) fn give_back_spare(&mut self, spare: &SpareRun) {
        self.allocator.give_back(spare.at, spare.len);
        self.spare_words -= spare.len;
    }

    /// Exchanges a short spare run for a full one, while at least half of all words are free. The tree grows for it only if
    /// most of its memory is in use: a prompt fits into shorter free runs, too.
    pub(super) fn refill(&mut self, tree: &ActiveTree, spare: &mut SpareRun) {
        if spare.len >= SPARE_WORDS_MIN {
            return;
        }
        self.give_back_spare(&std::mem::take(spare));
        if self.allocator.used() + SPARE_WORDS > tree.words.words_max() / 2 {
            return;
        }
        let at = if self.allocator.is_crowded() {
            self.allocator.take(&tree.words, SPARE_WORDS)
        } else {
            self.allocator.take_allocated(SPARE_WORDS)
        };
        if let Some(at) = at {
            *spare = SpareRun::full(at);
            self.spare_words += SPARE_WORDS;
        }
    }

    /// Removes a prompt that ended at `node` from a worker. Returns what the worker no longer runs, in parts of a
    /// block.
    pub(in crate::load) fn remove(&mut self, tree: &ActiveTree, node: u32, worker: WorkerIndex) -> u64 {
        let end = tree.node(node);
        let root = end.root();
        tree.roots[root].open();
        end.set_ends(end.ends() - 1);
        // A worker that runs a node runs those above it, so unused nodes come first.
        let (mut at, mut freed, mut last_run) = (node, 0, None);
        while is_node(at) {
            let here = tree.node(at);
            let above = here.parent();
            freed += leave(&tree.words, &here, worker);
            if here.workers() == 0 {
                self.prune(tree, root, at);
            } else {
                last_run.get_or_insert(at);
            }
            at = above;
        }
        if let Some(at) = last_run {
            lower_path(tree, at);
            self.join(tree, root, at);
        }
        tree.roots[root].close();
        freed
    }

    /// Moves a prompt that ended at `node` to another worker. Returns what is new to `to`, and what `from` no longer
    /// runs, in parts of a block. `None` if there is no memory, and nothing changed.
    pub(in crate::load) fn transfer(
        &mut self,
        tree: &ActiveTree,
        node: u32,
        from: WorkerIndex,
        to: WorkerIndex,
    ) -> Option<(u64, u64)> {
        let end = tree.node(node);
        let root = &tree.roots[end.root()];
        root.open();
        let reserved = self.reserve_path(tree, node, to);
        let added = reserved.map(|()| {
            end.set_ends(end.ends() + 1);
            join_path(tree, node, to)
        });
        root.close();
        added.map(|added| (added, self.remove(tree, node, from)))
    }

    /// Links new nodes where the prompt diverges, and adds the worker to all nodes above.
    fn attach_new(
        &mut self,
        tree: &ActiveTree,
        root: usize,
        divergence: &Divergence,
        tail: Option<NewNodes>,
        worker: WorkerIndex,
    ) -> Option<PlacedPrompt> {
        let attach = match divergence.within {
            Some((node, common)) => self.split(tree, root, node, common)?,
            None => divergence.parent,
        };
        if self.reserve_for_attach(tree, root, attach, tail, worker).is_none() {
            if is_node(attach) {
                self.join(tree, root, attach);
            }
            return None;
        }
        let mut added_parts = join_path(tree, attach, worker);
        let Some(NewNodes { first, last, .. }) = tail else {
            let end = tree.node(attach);
            end.set_ends(end.ends() + 1);
            return Some(PlacedPrompt { node: attach, added_parts });
        };
        let mut at = last;
        loop {
            let node = tree.node(at);
            self.edges(tree, root).add(key_of(tree, &node), at);
            added_parts += u64::from(node.len()) * BLOCK_PARTS;
            if at == first {
                break;
            }
            at = node.parent();
        }
        if is_node(attach) {
            tree.node(attach).adopt(first);
        }
        raise_path(tree, last);
        Some(PlacedPrompt { node: last, added_parts })
    }

    /// Reserves all memory that linking a prompt needs.
    fn reserve_for_attach(
        &mut self,
        tree: &ActiveTree,
        root: usize,
        attach: u32,
        tail: Option<NewNodes>,
        worker: WorkerIndex,
    ) -> Option<()> {
        if let Some(NewNodes { first, last, nodes }) = tail {
            tree.node(first).set_parent(attach);
            let mut at = last;
            loop {
                let node = tree.node(at);
                self.edges(tree, root).reserve(key_of(tree, &node), nodes)?;
                if at == first {
                    break;
                }
                at = node.parent();
            }
        }
        self.reserve_path(tree, attach, worker)
    }

    /// Makes a chain of nodes for the blocks that are not in the tree. Outer `None`: no memory. Inner `None`: no such
    /// blocks.
    #[expect(clippy::option_option, reason = "no memory is not no tail")]
    fn make_new_nodes(
        &mut self,
        tree: &ActiveTree,
        root: usize,
        blocks: &[LocalHash],
        worker: WorkerIndex,
    ) -> Option<Option<NewNodes>> {
        let mut tail: Option<NewNodes> = None;
        for piece in blocks.chunks(ACTIVE_NODE_BLOCKS_MAX) {
            let parent = tail.map_or(root_of(SpaceId(0)), |tail| tail.last);
            let Some(made) = self.make(tree, (root, parent), piece, worker) else {
                self.free_new_nodes(tree, tail);
                return None;
            };
            if let Some(tail) = tail {
                tree.node(tail.last).adopt(made);
            }
            let (first, nodes) = tail.map_or((made, 0), |tail| (tail.first, tail.nodes));
            tail = Some(NewNodes { first, last: made, nodes: nodes + 1 });
        }
        if let Some(tail) = tail {
            tree.node(tail.last).set_ends(1);
        }
        Some(tail)
    }

    fn free_new_nodes(&mut self, tree: &ActiveTree, tail: Option<NewNodes>) {
        let Some(NewNodes { first, last, .. }) = tail else { return };
        let mut at = last;
        loop {
            let above = tree.node(at).parent();
            self.free_node(tree, at);
            if at == first {
                break;
            }
            at = above;
        }
    }

    /// Makes a node below `parent` for one prompt of a worker.
    fn make(
        &mut self,
        tree: &ActiveTree,
        (root, parent): (usize, u32),
        blocks: &[LocalHash],
        worker: WorkerIndex,
    ) -> Option<u32> {
        let at = self.allocator.take(&tree.words, NODE_WORDS + blocks.len() as u32)?;
        write_node(tree, at, (root, parent), blocks, worker);
        Some(at)
    }

    fn free_node(&mut self, tree: &ActiveTree, at: u32) {
        let node = tree.node(at);
        let (hashes, len) = (node.hashes(), node.len());
        self.give_list_back(&node);
        if are_contiguous((at, NODE_WORDS), hashes) {
            self.allocator.give_back(at, NODE_WORDS + len);
        } else {
            self.allocator.give_back(hashes, len);
            self.allocator.give_back(at, NODE_WORDS);
        }
    }

    /// Moves the first `common` blocks of a node to a new node above it. The old node keeps its number, because prompts
    /// end at its last block. `None` if there is no memory, and nothing changed.
    pub(super) fn split(&mut self, tree: &ActiveTree, root: usize, at: u32, common: u32) -> Option<u32> {
        let (words, below) = (&tree.words, tree.node(at));
        let (hashes, len) = (below.hashes(), below.len());
        let number = self.allocator.take(words, NODE_WORDS)?;
        let above = tree.node(number);
        above.begin((below.parent(), root), (hashes, common), below.first());
        let first = words.run(hashes, len)[common as usize].load(Ordering::Relaxed);
        let (key, key_above) = (tree.key(number, LocalHash(first)), key_of(tree, &below));
        let capacity = capacity_for(below.workers());
        let made = self.edges(tree, root).reserve(key, 1).and_then(|()| self.move_list(tree, &below, &above, capacity));
        if made.is_none() {
            self.allocator.give_back(number, NODE_WORDS);
            return None;
        }
        let slot = tree.slot_of(root, key_above);
        if is_node(below.parent()) {
            tree.node(below.parent()).exchange(at, number);
        }
        above.adopt(at);
        self.allocator.split_run(hashes + common);
        below.set_blocks(number, (hashes + common, len - common), first);
        if let Some(slot) = slot {
            self.edges(tree, root).redirect(key_above, slot, number);
        }
        self.edges(tree, root).add(key, at);
        raise_path(tree, at);
        Some(number)
    }

    /// Removes an unused node.
    fn prune(&mut self, tree: &ActiveTree, root: usize, at: u32) {
        let node = tree.node(at);
        let key = key_of(tree, &node);
        if let Some(slot) = tree.slot_of(root, key) {
            self.edges(tree, root).remove(key, slot);
        }
        if is_node(node.parent()) {
            tree.node(node.parent()).disown(at);
        }
        self.free_node(tree, at);
    }

    /// Joins a node at which nothing ends or branches any more with the one below, which keeps its number. Both have
    /// the same workers.
    fn join(&mut self, tree: &ActiveTree, root: usize, at: u32) {
        let (words, above) = (&tree.words, tree.node(at));
        if above.ends() > 0 || above.children() != 1 {
            return;
        }
        let (child, below) = (above.only(), tree.node(above.only()));
        let ((above_at, above_len), (below_at, below_len)) =
            ((above.hashes(), above.len()), (below.hashes(), below.len()));
        let len = above_len + below_len;
        let are_contiguous = are_contiguous((above_at, above_len), below_at);
        let bound = if are_contiguous { ACTIVE_NODE_BLOCKS_MAX } else { ACTIVE_JOIN_BLOCKS_MAX };
        // The weights last: there is one for each worker.
        if len as usize > bound || !have_equal_weights(words, &above, &below) {
            return;
        }
        let mut hashes = above_at;
        if !are_contiguous {
            // Without memory the nodes stay apart, which is correct too.
            let Some(together) = self.allocator.take(words, len) else { return };
            words.copy(above_at, together, above_len);
            words.copy(below_at, together + above_len, below_len);
            hashes = together;
        }
        let (key, key_below) = (key_of(tree, &above), key_of(tree, &below));
        if let Some(slot) = tree.slot_of(root, key_below) {
            self.edges(tree, root).remove(key_below, slot);
        }
        if let Some(slot) = tree.slot_of(root, key) {
            self.edges(tree, root).redirect(key, slot, child);
        }
        if is_node(above.parent()) {
            tree.node(above.parent()).exchange(at, child);
        }
        below.set_blocks(above.parent(), (hashes, len), above.first());
        if are_contiguous {
            self.allocator.merge_runs(below_at);
        } else {
            self.allocator.give_back(above_at, above_len);
            self.allocator.give_back(below_at, below_len);
        }
        let parent = above.parent();
        self.give_list_back(&above);
        self.allocator.give_back(at, NODE_WORDS);
        lower_path(tree, parent);
    }

    fn edges<'a>(&'a mut self, tree: &'a ActiveTree, root: usize) -> Edges<'a> {
        Edges { root: &tree.roots[root], words: &tree.words, allocator: &mut self.allocator }
    }
}

impl ActiveWriter {
    /// Reserves room for a worker in the lists from a node up to the root.
    pub(super) fn reserve_path(&mut self, tree: &ActiveTree, mut at: u32, worker: WorkerIndex) -> Option<()> {
        while is_node(at) {
            let node = tree.node(at);
            let (workers, list) = (node.workers(), List::of(&node, &tree.words));
            if workers == node.list_capacity() && list.place_of(worker, workers).is_none() {
                self.move_list(tree, &node, &node, capacity_for(workers + 1))?;
            }
            at = node.parent();
        }
        Some(())
    }

    /// Moves the list of `from`, with this capacity, to `to`, which may be the same node, and frees the words of `to`'s
    /// old list. `None` if there is no memory, and nothing changed.
    pub(super) fn move_list(&mut self, tree: &ActiveTree, from: &Node<'_>, to: &Node<'_>, capacity: u32) -> Option<()> {
        let (words, workers) = (&tree.words, from.workers());
        let at = if capacity > 1 { self.allocator.take(words, capacity * LIST_WORDS)? } else { 0 };
        let (before, has) = (to.list_at(), to.list_capacity());
        let source = List::of(from, words);
        if capacity > 1 {
            let (workers_there, shares) = words.run(at, capacity * LIST_WORDS).split_at(capacity as usize);
            List { workers: workers_there, shares }.copy(&source, workers);
        } else {
            List::of(to, words).copy(&source, workers);
        }
        to.set_list((at, capacity));
        to.set_workers(workers);
        if let Some(before) = before {
            self.allocator.give_back(before, has * LIST_WORDS);
        }
        Some(())
    }

    /// Frees the words of a node's list, if it is outside the node.
    pub(super) fn give_list_back(&mut self, node: &Node<'_>) {
        if let Some(at) = node.list_at() {
            self.allocator.give_back(at, node.list_capacity() * LIST_WORDS);
        }
    }

    /// Sets the weight of the blocks that a worker runs for one prompt alone, which ended at `node`. Returns what that
    /// takes from the worker in parts of a block, negative if it adds. Changes nothing that readers use.
    pub(in crate::load) fn weigh(&mut self, tree: &ActiveTree, node: u32, worker: WorkerIndex, parts: u64) -> i64 {
        // As in `add`: these words may have been part of another node.
        fence(Ordering::Release);
        let (mut at, mut taken) = (node, 0);
        while is_node(at) {
            let node = tree.node(at);
            let list = List::of(&node, &tree.words);
            let Some(place) = list.place_of(worker, node.workers()) else { break };
            if list.prompts(place) > 1 {
                break;
            }
            taken += i64::from(node.len()) * (list.weight(place) as i64 - parts as i64);
            list.set_share(place, 1, parts);
            at = node.parent();
        }
        taken
    }
}

/// Writes a node of at least one block for one prompt of a worker: its line, with its hashes behind.
pub(super) fn write_node<'a>(
    tree: &'a ActiveTree,
    at: u32,
    (root, parent): (usize, u32),
    blocks: &[LocalHash],
    worker: WorkerIndex,
) -> Node<'a> {
    let (node, hashes, len) = (tree.node(at), at + NODE_WORDS, blocks.len() as u32);
    // It stores with Relaxed: the root's sequence tells readers of changes.
    words::store(tree.words.run(hashes, len), blocks);
    node.begin((parent, root), (hashes, len), blocks.first().map_or(0, |first| first.0));
    join(&tree.words, &node, worker);
    node
}

/// Whether the words behind a run continue it. Consecutive numbers in two chunks do not.
const fn are_contiguous((at, len): (u32, u32), behind: u32) -> bool {
    at + len == behind && !behind.is_multiple_of(CHUNK_WORDS)
}

/// Blocks from the first one to a node's last.
pub(in crate::load) fn blocks_to(tree: &ActiveTree, mut at: u32) -> u64 {
    let mut blocks = 0;
    while is_node(at) {
        let node = tree.node(at);
        blocks += u64::from(node.len());
        at = node.parent();
    }
    blocks
}

/// The nodes of a prompt, from the one at which it ends up to the root: their numbers, and the words of their blocks.
pub(in crate::load) fn nodes_to(tree: &ActiveTree, at: u32) -> impl Iterator<Item = (u32, &[AtomicU64])> {
    let above = |at: &u32| Some(tree.node(*at).parent()).filter(|parent| is_node(*parent));
    std::iter::successors(Some(at).filter(|at| is_node(*at)), above).map(|at| {
        let node = tree.node(at);
        (at, tree.words.run(node.hashes(), node.len()))
    })
}

/// The name of the edge to a node.
fn key_of(tree: &ActiveTree, node: &Node<'_>) -> Key {
    tree.key(node.parent(), LocalHash(node.first()))
}

impl ActiveTree {
    /// Whether a prompt still diverges where a look-up saw it, for the writer. A reader ends a search after some slots; the
    /// writer does not.
    fn still_diverges(&self, seen: &SeenDivergence, locals: &[LocalHash]) -> bool {
        let (root, Divergence { parent, depth, within, .. }) = (&self.roots[seen.root], seen.divergence);
        let has_edge =
            |first: &LocalHash| root.find(&self.words, self.key(parent, *first), WRITER_PROBES_MAX).is_some();
        root.is_unchanged_since(seen.sequence) && (within.is_some() || !locals.get(depth).is_some_and(has_edge))
    }

    /// The nodes of the longest path through where a prompt diverges, if this number of blocks is put there.
    fn path_nodes_with(&self, divergence: &Divergence, blocks: usize) -> usize {
        let new = blocks.div_ceil(ACTIVE_NODE_BLOCKS_MAX);
        // A split puts one more node above those that are there.
        let below = divergence.within.map_or(new, |(node, _)| 1 + new.max(self.node(node).height()));
        divergence.nodes + below
    }

    /// The position of an edge, for the writer.
    fn slot_of(&self, root: usize, key: Key) -> Option<Slot> {
        self.roots[root].find(&self.words, key, WRITER_PROBES_MAX).map(|found| found.slot)
    }
}
