//! The workers of a node: how many prompts each runs through it, and what its blocks weigh for it.
//!
//! A block weighs a whole one, or less where the only prompt that a worker runs through it is about to end; another
//! prompt that comes to share it makes it whole again. A list is as many words of workers as there is room for, and
//! as many of weights; readers look at the first alone. The list of one worker is in the node itself.

use super::node::{Node, capacity_for, is_node};
use super::words::{Words, halves, word};
use super::writer::ActiveWriter;
use super::{ActiveTree, BLOCK_PARTS};
use crate::ids::WorkerIndex;
use crate::sync::{AtomicU64, Ordering, fence};

/// Words of a list for each worker that it has room for.
pub(super) const LIST_WORDS: u32 = 2;

/// The list of a node, for the writer. Relaxed: readers learn from the root's sequence whether to believe it.
struct List<'a> {
    workers: &'a [AtomicU64],
    weights: &'a [AtomicU64],
}

impl<'a> List<'a> {
    fn of(node: &Node<'a>, words: &'a Words) -> Self {
        let list = node.list(words);
        let (workers, weights) = list.split_at(node.list_capacity() as usize);
        Self { workers, weights }
    }

    /// Where a worker stands among the first so many.
    fn place_of(&self, worker: WorkerIndex, workers: u32) -> Option<usize> {
        let is_it = |entry: &AtomicU64| halves(entry.load(Ordering::Relaxed)).0 == worker.0;
        self.workers[..workers as usize].iter().position(is_it)
    }

    /// How many prompts run through the node of the worker that stands at `place`.
    fn prompts(&self, place: usize) -> u32 {
        halves(self.workers[place].load(Ordering::Relaxed)).1
    }

    fn weight(&self, place: usize) -> u64 {
        self.weights[place].load(Ordering::Relaxed)
    }

    fn set(&self, place: usize, worker: WorkerIndex, prompts: u32) {
        self.workers[place].store(word(worker.0, prompts), Ordering::Relaxed);
    }

    fn set_weight(&self, place: usize, parts: u64) {
        self.weights[place].store(parts, Ordering::Relaxed);
    }

    /// Takes the first so many workers of another list, each at its place.
    fn copy(&self, from: &List<'_>, workers: u32) {
        for place in 0..workers as usize {
            self.workers[place].store(from.workers[place].load(Ordering::Relaxed), Ordering::Relaxed);
            self.set_weight(place, from.weight(place));
        }
    }
}

impl ActiveWriter {
    /// Makes room for a worker in the lists from a node up to the root.
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

    /// Gives the list of `from`, in words with room for so many, to `to`, which may be the same node. The words that the
    /// list of `to` is in are given back. `None` if there is no memory for it, and nothing changed.
    pub(super) fn move_list(&mut self, tree: &ActiveTree, from: &Node<'_>, to: &Node<'_>, capacity: u32) -> Option<()> {
        let (words, workers) = (&tree.words, from.workers());
        let at = if capacity > 1 { self.allocator.take(words, capacity * LIST_WORDS)? } else { 0 };
        let (before, has) = (to.list_at(), to.list_capacity());
        let source = List::of(from, words);
        if capacity > 1 {
            let (workers_there, weights) = words.run(at, capacity * LIST_WORDS).split_at(capacity as usize);
            List { workers: workers_there, weights }.copy(&source, workers);
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

    /// Gives the words of a node's list back, if it has any beside the node's.
    pub(super) fn give_list_back(&mut self, node: &Node<'_>) {
        if let Some(at) = node.list_at() {
            self.allocator.give_back(at, node.list_capacity() * LIST_WORDS);
        }
    }

    /// The blocks that a worker runs for one prompt alone, which ended with `node`, weigh so many parts from now on.
    /// Returns what that takes from the worker, less than 0 where it gives, in parts of a block.
    /// Nothing that readers look at changes.
    pub(in crate::load) fn weigh(&mut self, tree: &ActiveTree, node: u32, worker: WorkerIndex, parts: u64) -> i64 {
        // As in `add`: these words may have been another node's.
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
            list.set_weight(place, parts);
            at = node.parent();
        }
        taken
    }
}

/// Whether the blocks of two nodes that the same workers run weigh the same for each.
pub(super) fn weigh_alike(words: &Words, one: &Node<'_>, other: &Node<'_>) -> bool {
    let (here, there) = (List::of(one, words), List::of(other, words));
    (0..one.workers() as usize).all(|place| {
        let worker = WorkerIndex(halves(here.workers[place].load(Ordering::Relaxed)).0);
        there.place_of(worker, other.workers()).is_some_and(|other| here.weight(place) == there.weight(other))
    })
}

/// A prompt of a worker runs through a node, in whose list there is room. Returns what that adds to the worker, in parts
/// of a block.
#[inline]
pub(super) fn join(words: &Words, node: &Node<'_>, worker: WorkerIndex) -> u64 {
    let (workers, list) = (node.workers(), List::of(node, words));
    let place = list.place_of(worker, workers);
    let before = place.map_or(0, |place| list.weight(place));
    if let Some(place) = place {
        list.set(place, worker, list.prompts(place) + 1);
    } else {
        list.set(workers as usize, worker, 1);
        node.set_workers(workers + 1);
    }
    list.set_weight(place.unwrap_or(workers as usize), BLOCK_PARTS);
    u64::from(node.len()) * (BLOCK_PARTS - before)
}

/// A prompt of a worker runs through a node and all above it; there is room in their lists. Returns what that adds to
/// the worker, in parts of a block.
pub(super) fn join_path(tree: &ActiveTree, mut at: u32, worker: WorkerIndex) -> u64 {
    let mut added = 0;
    while is_node(at) {
        let node = tree.node(at);
        added += join(&tree.words, &node, worker);
        at = node.parent();
    }
    added
}

/// A prompt of a worker leaves one node. Returns what that takes from the worker, in parts of a block.
#[inline]
pub(super) fn leave(words: &Words, node: &Node<'_>, worker: WorkerIndex) -> u64 {
    let (workers, list) = (node.workers(), List::of(node, words));
    let Some(place) = list.place_of(worker, workers) else {
        debug_assert!(false, "a prompt ended that was not there");
        return 0;
    };
    let (prompts, weight, last) = (list.prompts(place), list.weight(place), workers as usize - 1);
    if prompts > 1 {
        list.set(place, worker, prompts - 1);
        return 0;
    }
    list.workers[place].store(list.workers[last].load(Ordering::Relaxed), Ordering::Relaxed);
    list.set_weight(place, list.weight(last));
    node.set_workers(last as u32);
    u64::from(node.len()) * weight
}
