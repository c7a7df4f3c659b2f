//! One node, a run of blocks, and its list of workers: how many prompts each worker runs through the node, and how much
//! the node's blocks weigh for it.
//!
//! A block weighs one block, or less while the only prompt that a worker runs through it nears its expected end.
//! Another prompt that shares the block restores its full weight. A list has one word per worker and, behind all of
//! these, one word per worker with the number of its prompts and their weight. Readers use the first half only, which
//! changes only when a worker comes or goes: a prompt that runs beside others of its worker takes no line from them. The
//! node itself holds a list of one worker.

use super::memory::{LINE_WORDS, Line, Words, halves, word};
use super::{ActiveTree, BLOCK_PARTS, ROOTS};
use crate::ids::{SpaceId, WorkerIndex};
use crate::limits::ACTIVE_PATH_NODES_MAX;
use crate::sync::{AtomicU64, Ordering};

/// Words of a node: a cache line, with room for a list of one worker.
pub(super) const NODE_WORDS: u32 = LINE_WORDS;
/// The smallest capacity of a list outside the node: a cache line.
const LIST_CAPACITY_MIN: u32 = LINE_WORDS / LIST_WORDS;
/// Parents from here on are the roots of spaces, not nodes.
const ROOTS_FROM: u32 = 1 << 31;

/// The parent of a space's first nodes.
pub(super) const fn root_of(space: SpaceId) -> u32 {
    ROOTS_FROM | space.0
}

/// Whether a parent is a node.
#[inline]
pub(super) const fn is_node(parent: u32) -> bool {
    parent < ROOTS_FROM
}

/// The capacity to allocate for a list of `workers` entries.
pub(super) const fn capacity_for(workers: u32) -> u32 {
    if workers <= 1 {
        return 1;
    }
    let capacity = workers.next_power_of_two();
    if capacity < LIST_CAPACITY_MIN { LIST_CAPACITY_MIN } else { capacity }
}

/// The words of the fields in a node, two fields to a word.
const PARENT_LEN: usize = 0;
const HASHES_LIST: usize = 1;
const WORKERS_CAPACITY: usize = 2;
const ENDS_CHILDREN: usize = 3;
/// In the lower half the root, with the height above its bits.
const ONLY_ROOT: usize = 4;
const FIRST: usize = 5;
/// The list of one worker.
const OWN_LIST: usize = 6;

/// Bits of a root's number.
const ROOT_BITS: u32 = ROOTS.ilog2();
const ROOT_MASK: u32 = (1 << ROOT_BITS) - 1;

const _: () = assert!(ROOTS.is_power_of_two() && ACTIVE_PATH_NODES_MAX < 1 << (u32::BITS - ROOT_BITS));

/// A node. The writer changes it in place, so that a reader may see torn values, which it discards later.
///
/// Every access is relaxed: the root's sequence tells whether the values belong together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node<'a>(&'a Line);

impl<'a> Node<'a> {
    pub(super) const fn new(line: &'a Line) -> Self {
        Self(line)
    }

    #[inline]
    fn get(&self, at: usize) -> (u32, u32) {
        halves(self.0[at].load(Ordering::Relaxed))
    }

    #[inline]
    fn put(&self, at: usize, (upper, lower): (u32, u32)) {
        self.0[at].store(word(upper, lower), Ordering::Relaxed);
    }

    /// The node above, or the root of the space.
    #[inline]
    pub(super) fn parent(&self) -> u32 {
        self.get(PARENT_LEN).0
    }

    /// Its blocks.
    #[inline]
    pub(super) fn len(&self) -> u32 {
        self.get(PARENT_LEN).1
    }

    /// The position of their hashes.
    #[inline]
    pub(super) fn hashes(&self) -> u32 {
        self.get(HASHES_LIST).0
    }

    /// The position of the list of workers, if it is outside the node.
    #[inline]
    pub(super) fn list_at(&self) -> Option<u32> {
        (self.list_capacity() > 1).then(|| self.get(HASHES_LIST).1)
    }

    /// Workers in the list.
    #[inline]
    pub(super) fn workers(&self) -> u32 {
        self.get(WORKERS_CAPACITY).0
    }

    /// Capacity of the list.
    #[inline]
    pub(super) fn list_capacity(&self) -> u32 {
        self.get(WORKERS_CAPACITY).1
    }

    /// Prompts that end with its last block.
    #[inline]
    pub(super) fn ends(&self) -> u32 {
        self.get(ENDS_CHILDREN).0
    }

    /// Nodes below.
    #[inline]
    pub(super) fn children(&self) -> u32 {
        self.get(ENDS_CHILDREN).1
    }

    /// The numbers of the nodes below, combined by exclusive or. If there is one node below, this is its number.
    #[inline]
    pub(super) fn only(&self) -> u32 {
        self.get(ONLY_ROOT).0
    }

    /// The root it is under.
    #[inline]
    pub(super) fn root(&self) -> usize {
        (self.get(ONLY_ROOT).1 & ROOT_MASK) as usize
    }

    /// Nodes from this one down to the lowest, or more: while a node has several below it, its height only grows.
    #[inline]
    pub(super) fn height(&self) -> usize {
        (self.get(ONLY_ROOT).1 >> ROOT_BITS) as usize
    }

    /// The hash of its first block.
    #[inline]
    pub(super) fn first(&self) -> u64 {
        self.0[FIRST].load(Ordering::Relaxed)
    }

    /// The words of the list: first the workers, then as many shares. Empty for a reader with torn values.
    #[inline]
    pub(super) fn list(&self, words: &'a Words) -> &'a [AtomicU64] {
        match self.list_at() {
            None => &self.0[OWN_LIST..],
            Some(at) => words.slice(at, self.list_capacity().saturating_mul(LIST_WORDS)).unwrap_or_default(),
        }
    }

    /// Initializes a node with `len` blocks, whose first hash is `first`; with an empty list for one worker, no ends
    /// and no nodes below, so that its height is 1.
    pub(super) fn begin(&self, (parent, root): (u32, usize), (hashes, len): (u32, u32), first: u64) {
        self.put(PARENT_LEN, (parent, len));
        self.put(HASHES_LIST, (hashes, 0));
        self.put(WORKERS_CAPACITY, (0, 1));
        self.put(ENDS_CHILDREN, (0, 0));
        self.put(ONLY_ROOT, (0, root as u32));
        self.set_height(1);
        self.0[FIRST].store(first, Ordering::Relaxed);
    }

    pub(super) fn set_parent(&self, parent: u32) {
        self.put(PARENT_LEN, (parent, self.len()));
    }

    /// Moves the node below another one, with other blocks.
    pub(super) fn set_blocks(&self, parent: u32, (hashes, len): (u32, u32), first: u64) {
        self.put(PARENT_LEN, (parent, len));
        self.put(HASHES_LIST, (hashes, self.get(HASHES_LIST).1));
        self.0[FIRST].store(first, Ordering::Relaxed);
    }

    /// Sets position and capacity of the list.
    pub(super) fn set_list(&self, (at, capacity): (u32, u32)) {
        self.put(HASHES_LIST, (self.hashes(), at));
        self.put(WORKERS_CAPACITY, (self.workers(), capacity));
    }

    pub(super) fn set_workers(&self, workers: u32) {
        self.put(WORKERS_CAPACITY, (workers, self.list_capacity()));
    }

    pub(super) fn set_ends(&self, ends: u32) {
        self.put(ENDS_CHILDREN, (ends, self.children()));
    }

    /// Adds a node below.
    pub(super) fn adopt(&self, child: u32) {
        self.put(ENDS_CHILDREN, (self.ends(), self.children() + 1));
        self.exchange(child, 0);
    }

    /// Removes a node below.
    pub(super) fn disown(&self, child: u32) {
        self.put(ENDS_CHILDREN, (self.ends(), self.children() - 1));
        self.exchange(child, 0);
    }

    /// Replaces a node below.
    pub(super) fn exchange(&self, one: u32, other: u32) {
        let (only, root) = self.get(ONLY_ROOT);
        self.put(ONLY_ROOT, (only ^ one ^ other, root));
    }

    pub(super) fn set_height(&self, height: usize) {
        self.put(ONLY_ROOT, (self.only(), (height as u32) << ROOT_BITS | self.root() as u32));
    }
}

/// Whether an entry of a list is a worker's.
fn is_of(entry: &AtomicU64, worker: WorkerIndex) -> bool {
    halves(entry.load(Ordering::Relaxed)).0 == worker.0
}

/// Words of a list for each worker.
pub(super) const LIST_WORDS: u32 = 2;

/// The list of a node, for the writer. Relaxed: the root's sequence tells readers of changes.
pub(super) struct List<'a> {
    pub(super) workers: &'a [AtomicU64],
    /// Of each worker, its prompts through the node and the weight of the node's blocks.
    pub(super) shares: &'a [AtomicU64],
}

impl<'a> List<'a> {
    pub(super) fn of(node: &Node<'a>, words: &'a Words) -> Self {
        let list = node.list(words);
        let (workers, shares) = list.split_at(node.list_capacity() as usize);
        Self { workers, shares }
    }

    /// The position of a worker among the first `workers`.
    pub(super) fn place_of(&self, worker: WorkerIndex, workers: u32) -> Option<usize> {
        self.workers[..workers as usize].iter().position(|entry| is_of(entry, worker))
    }

    /// Prompts through the node of the worker at `place`.
    pub(super) fn prompts(&self, place: usize) -> u32 {
        halves(self.shares[place].load(Ordering::Relaxed)).0
    }

    /// The weight of a block of the node for the worker at `place`, at most [`BLOCK_PARTS`].
    pub(super) fn weight(&self, place: usize) -> u64 {
        u64::from(halves(self.shares[place].load(Ordering::Relaxed)).1)
    }

    pub(super) fn set_worker(&self, place: usize, worker: WorkerIndex) {
        self.workers[place].store(word(worker.0, 0), Ordering::Relaxed);
    }

    pub(super) fn set_share(&self, place: usize, prompts: u32, parts: u64) {
        self.shares[place].store(word(prompts, parts as u32), Ordering::Relaxed);
    }

    /// Copies an entry of another list, or of this one.
    fn copy_entry(&self, place: usize, from: &List<'_>, from_place: usize) {
        self.workers[place].store(from.workers[from_place].load(Ordering::Relaxed), Ordering::Relaxed);
        self.shares[place].store(from.shares[from_place].load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Copies the first `workers` entries of another list.
    pub(super) fn copy(&self, from: &List<'_>, workers: u32) {
        (0..workers as usize).for_each(|place| self.copy_entry(place, from, place));
    }
}

/// Notes in all nodes above one how high they are at least, after something was put below them.
pub(super) fn raise_path(tree: &ActiveTree, mut at: u32) {
    let mut node = tree.node(at);
    loop {
        let height = node.height() + 1;
        at = node.parent();
        if !is_node(at) {
            return;
        }
        node = tree.node(at);
        if node.height() >= height {
            return;
        }
        node.set_height(height);
    }
}

/// Notes the heights of a node and of those above, after something below it went. Where a node has several below, the
/// others may be as high.
pub(super) fn lower_path(tree: &ActiveTree, mut at: u32) {
    while is_node(at) {
        let node = tree.node(at);
        let height = match node.children() {
            0 => 1,
            1 => tree.node(node.only()).height() + 1,
            _ => return,
        };
        if node.height() == height {
            return;
        }
        node.set_height(height);
        at = node.parent();
    }
}

/// Whether the blocks of two nodes with the same workers have the same weight for each.
pub(super) fn have_equal_weights(words: &Words, one: &Node<'_>, other: &Node<'_>) -> bool {
    let (here, there) = (List::of(one, words), List::of(other, words));
    (0..one.workers() as usize).all(|place| {
        let worker = WorkerIndex(halves(here.workers[place].load(Ordering::Relaxed)).0);
        // A split copies the list, so most workers have the same place in both.
        let is_same = there.workers[..other.workers() as usize].get(place).is_some_and(|entry| is_of(entry, worker));
        let other = if is_same { Some(place) } else { there.place_of(worker, other.workers()) };
        other.is_some_and(|other| here.weight(place) == there.weight(other))
    })
}

/// Adds a prompt of a worker to a node whose list has room. Returns what that adds to the worker, in parts of a block.
#[inline]
pub(super) fn join(words: &Words, node: &Node<'_>, worker: WorkerIndex) -> u64 {
    let (workers, list) = (node.workers(), List::of(node, words));
    let place = list.place_of(worker, workers);
    let (before, prompts) = place.map_or((0, 0), |place| (list.weight(place), list.prompts(place)));
    list.set_share(place.unwrap_or(workers as usize), prompts + 1, BLOCK_PARTS);
    if place.is_none() {
        list.set_worker(workers as usize, worker);
        node.set_workers(workers + 1);
    }
    u64::from(node.len()) * (BLOCK_PARTS - before)
}

/// Adds a prompt of a worker to a node and all above it, whose lists have room. Returns what that adds to the worker,
/// in parts of a block.
pub(super) fn join_path(tree: &ActiveTree, mut at: u32, worker: WorkerIndex) -> u64 {
    let mut added = 0;
    while is_node(at) {
        let node = tree.node(at);
        added += join(&tree.words, &node, worker);
        at = node.parent();
    }
    added
}

/// Removes a prompt of a worker from one node. Returns what that takes from the worker, in parts of a block.
#[inline]
pub(super) fn leave(words: &Words, node: &Node<'_>, worker: WorkerIndex) -> u64 {
    let (workers, list) = (node.workers(), List::of(node, words));
    let Some(place) = list.place_of(worker, workers) else {
        debug_assert!(false, "a prompt ended that was not there");
        return 0;
    };
    let (prompts, weight, last) = (list.prompts(place), list.weight(place), workers as usize - 1);
    if prompts > 1 {
        list.set_share(place, prompts - 1, weight);
        return 0;
    }
    list.copy_entry(place, &list, last);
    node.set_workers(last as u32);
    u64::from(node.len()) * weight
}
