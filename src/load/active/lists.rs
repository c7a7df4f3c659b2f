//! The workers of a node: how many prompts each runs through it, and what its blocks weigh for it.
//!
//! A block weighs a whole one, or less where the only prompt that a worker runs through it is about to end; another
//! prompt that comes to share it makes it whole again. A list is as many words of workers as there is room for, and
//! as many of weights; readers look at the first alone. The list of one worker is in the node itself.

use super::node::{Node, is_node, room_for};
use super::words::{Words, halves, word};
use super::writer::ActiveWriter;
use super::{ActiveTree, BLOCK_PARTS};
use crate::ids::WorkerIndex;
use crate::sync::{Ordering, fence};

/// Words of a list for each worker that it has room for.
pub(super) const LIST_WORDS: u32 = 2;

impl ActiveWriter {
    /// Makes room for a worker in the lists from a node up to the root.
    pub(super) fn reserve_path(&mut self, tree: &ActiveTree, mut at: u32, worker: WorkerIndex) -> Option<()> {
        let words = &tree.words;
        while is_node(at) {
            let node = Node::load(words, at);
            if node.workers == node.room && node.place_of(words, worker).is_none() {
                let room = room_for(node.workers + 1);
                let list = self.room.take(words, room * LIST_WORDS)?;
                copy_list(words, &node, (list, room));
                self.give_list_back(&node);
                Node { list, room, ..node }.store(words, at);
            }
            at = node.parent;
        }
        Some(())
    }

    /// Gives the words of a node's list back, if it has any beside the node's.
    pub(super) fn give_list_back(&mut self, node: &Node) {
        if node.room > 1 {
            self.room.give_back(node.list, node.room * LIST_WORDS);
        }
    }

    /// The blocks that a worker runs for one prompt alone, which ended with `node`, weigh so many parts from now on.
    /// Returns what that takes from the worker, less than 0 where it gives, in parts of a block.
    /// Nothing that readers look at changes.
    pub(in crate::load) fn weigh(&mut self, tree: &ActiveTree, node: u32, worker: WorkerIndex, parts: u64) -> i64 {
        let words = &tree.words;
        // As in `add`: these words may have been another node's.
        fence(Ordering::Release);
        let (mut at, mut taken) = (node, 0);
        while is_node(at) {
            let node = Node::load(words, at);
            let Some(place) = node.place_of(words, worker) else { break };
            if halves(words.load(node.list + place)).1 > 1 {
                break;
            }
            let weight = node.list + node.room + place;
            taken += i64::from(node.len) * (words.load(weight) as i64 - parts as i64);
            words.store(weight, parts);
            at = node.parent;
        }
        taken
    }
}

/// Copies a node's list to where there is room for so many.
pub(super) fn copy_list(words: &Words, node: &Node, (list, room): (u32, u32)) {
    words.copy(node.list, list, node.workers);
    words.copy(node.list + node.room, list + room, node.workers);
}

/// Whether the blocks of two nodes that the same workers run weigh the same for each.
pub(super) fn weigh_alike(words: &Words, one: &Node, other: &Node) -> bool {
    let weight = |node: &Node, place: u32| words.load(node.list + node.room + place);
    (0..one.workers).all(|place| {
        let worker = WorkerIndex(halves(words.load(one.list + place)).0);
        let there = other.place_of(words, worker);
        there.is_some_and(|there| weight(one, place) == weight(other, there))
    })
}

/// A prompt of a worker runs through a node and all above it; there is room in their lists. Returns what that adds to
/// the worker, in parts of a block.
pub(super) fn join_path(tree: &ActiveTree, mut at: u32, worker: WorkerIndex) -> u64 {
    let (words, mut added) = (&tree.words, 0);
    while is_node(at) {
        let node = Node::load(words, at);
        let mut before = 0;
        let place = node.place_of(words, worker);
        if let Some(place) = place {
            let (_, prompts) = halves(words.load(node.list + place));
            words.store(node.list + place, word(worker.0, prompts + 1));
            before = words.load(node.list + node.room + place);
        } else {
            words.store(node.list + node.workers, word(worker.0, 1));
            Node { workers: node.workers + 1, ..node }.store(words, at);
        }
        words.store(node.list + node.room + place.unwrap_or(node.workers), BLOCK_PARTS);
        added += u64::from(node.len) * (BLOCK_PARTS - before);
        at = node.parent;
    }
    added
}

/// A prompt of a worker leaves one node. Returns what that takes from the worker, in parts of a block.
pub(super) fn leave(tree: &ActiveTree, at: u32, worker: WorkerIndex) -> u64 {
    let (words, node) = (&tree.words, Node::load(&tree.words, at));
    let Some(place) = node.place_of(words, worker) else {
        debug_assert!(false, "a prompt ended that was not there");
        return 0;
    };
    let (_, prompts) = halves(words.load(node.list + place));
    if prompts > 1 {
        words.store(node.list + place, word(worker.0, prompts - 1));
        return 0;
    }
    let (weights, last) = (node.list + node.room, node.workers - 1);
    let weight = words.load(weights + place);
    words.store(node.list + place, words.load(node.list + last));
    words.store(weights + place, words.load(weights + last));
    Node { workers: last, ..node }.store(words, at);
    u64::from(node.len) * weight
}
