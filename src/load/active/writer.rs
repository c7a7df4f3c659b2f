//! How the tree changes: a prompt comes, a prompt ends.

use super::edges::{Edges, Filled, Key, WRITER_PROBES_MAX};
use super::lists::{LIST_WORDS, copy_list, join_path, leave, weigh_alike};
use super::node::{NODE_WORDS, Node, is_node, own_list, room_for, root_of};
use super::room::Room;
use super::words::{CHUNK_WORDS, word};
use super::{ActiveTree, BLOCK_PARTS, ROOTS};
use crate::ids::{LocalHash, SpaceId, WorkerIndex};
use crate::limits::{ACTIVE_JOIN_BLOCKS_MAX, ACTIVE_NODE_BLOCKS_MAX};
use crate::sync::{Ordering, fence};

/// A prompt that is in the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::load) struct Placed {
    /// The node that ends with its last block. It keeps its number as long as a prompt ends there.
    pub(in crate::load) node: u32,
    /// What it adds to its worker, in parts of a block: [`BLOCK_PARTS`] for each that the worker did not run before.
    pub(in crate::load) added_parts: u64,
}

/// What only the writer needs of the tree; its methods are called under the bookings' lock.
#[derive(Debug)]
pub(in crate::load) struct ActiveWriter {
    pub(super) room: Room,
    filled: Box<[Filled]>,
}

impl Default for ActiveWriter {
    fn default() -> Self {
        Self { room: Room::default(), filled: vec![Filled::default(); ROOTS].into() }
    }
}

/// Where a prompt leaves what is in the tree.
struct Branch {
    /// The last node that it runs through to the end, or the root.
    parent: u32,
    /// Its blocks down to there, and into the node below.
    depth: usize,
    /// The node below of which it shares some blocks, and how many.
    within: Option<(u32, u32)>,
}

impl ActiveWriter {
    /// Words in use.
    pub(in crate::load) const fn words_used(&self) -> u32 {
        self.room.used()
    }

    /// A prompt of at least a block comes to a worker; `None` if there is no memory for it, and nothing changed.
    pub(in crate::load) fn add(
        &mut self,
        tree: &ActiveTree,
        space: SpaceId,
        locals: &[LocalHash],
        worker: WorkerIndex,
    ) -> Option<Placed> {
        let root = tree.root_at(space, *locals.first()?);
        let branch = descend(tree, root, space, locals);
        // As OPEN, for the words used again below, which another thread may have let go of: a reader that still looks at
        // them for what they were sees that thread's change of `sequence`, too.
        fence(Ordering::Release);
        // Nobody can come upon the new nodes yet.
        let tail = self.make_tail(tree, root, &locals[branch.depth..], worker)?;
        tree.roots[root].open();
        let placed = self.graft(tree, root, &branch, tail, worker);
        if placed.is_none() {
            self.unmake_tail(tree, tail);
        }
        tree.roots[root].close();
        placed
    }

    /// A prompt that ended with `node` leaves a worker. Returns what the worker no longer runs, in parts
    /// of a block.
    pub(in crate::load) fn remove(&mut self, tree: &ActiveTree, node: u32, worker: WorkerIndex) -> u64 {
        let root = Node::load(&tree.words, node).root as usize;
        tree.roots[root].open();
        Node::change(&tree.words, node, |end| end.ends -= 1);
        let (mut at, mut freed) = (node, 0);
        while is_node(at) {
            let here = Node::load(&tree.words, at);
            freed += leave(tree, at, worker);
            at = here.parent;
        }
        let mut at = node;
        while is_node(at) && Node::load(&tree.words, at).workers == 0 {
            at = self.prune(tree, root, at);
        }
        if is_node(at) {
            self.join(tree, root, at);
        }
        tree.roots[root].close();
        freed
    }

    /// A prompt that ended with `node` is run by another worker now: what is new to `to`, and what `from` no longer
    /// runs, in parts of a block. `None` if there is no memory for it, and nothing changed.
    pub(in crate::load) fn pass_on(
        &mut self,
        tree: &ActiveTree,
        node: u32,
        from: WorkerIndex,
        to: WorkerIndex,
    ) -> Option<(u64, u64)> {
        let root = Node::load(&tree.words, node).root as usize;
        tree.roots[root].open();
        let reserved = self.reserve_path(tree, node, to);
        let added = reserved.map(|()| {
            Node::change(&tree.words, node, |end| end.ends += 1);
            join_path(tree, node, to)
        });
        tree.roots[root].close();
        added.map(|added| (added, self.remove(tree, node, from)))
    }

    /// Links a prompt's tail to where it leaves the tree, and counts the worker all the way up.
    fn graft(
        &mut self,
        tree: &ActiveTree,
        root: usize,
        branch: &Branch,
        tail: Option<(u32, u32)>,
        worker: WorkerIndex,
    ) -> Option<Placed> {
        let attach = match branch.within {
            Some((node, common)) => self.split(tree, root, node, common)?,
            None => branch.parent,
        };
        if self.make_way(tree, root, attach, tail, worker).is_none() {
            if is_node(attach) {
                self.join(tree, root, attach);
            }
            return None;
        }
        let mut added_parts = join_path(tree, attach, worker);
        let Some((first, last)) = tail else {
            Node::change(&tree.words, attach, |end| end.ends += 1);
            return Some(Placed { node: attach, added_parts });
        };
        Node::change(&tree.words, first, |node| node.parent = attach);
        let mut at = last;
        loop {
            let node = Node::load(&tree.words, at);
            self.edges(tree, root).add(key_of(tree, &node), at);
            added_parts += u64::from(node.len) * BLOCK_PARTS;
            if at == first {
                break;
            }
            at = node.parent;
        }
        adopt(tree, attach, first);
        Some(Placed { node: last, added_parts })
    }

    /// Everything that needs memory before a prompt can be linked.
    fn make_way(
        &mut self,
        tree: &ActiveTree,
        root: usize,
        attach: u32,
        tail: Option<(u32, u32)>,
        worker: WorkerIndex,
    ) -> Option<()> {
        if let Some((first, last)) = tail {
            Node::change(&tree.words, first, |node| node.parent = attach);
            let (mut at, mut edges) = (last, 1);
            loop {
                let node = Node::load(&tree.words, at);
                self.edges(tree, root).reserve(key_of(tree, &node), edges)?;
                if at == first {
                    break;
                }
                // All of them may be in one table.
                (at, edges) = (node.parent, edges + 1);
            }
        }
        self.reserve_path(tree, attach, worker)
    }

    /// Nodes for the blocks that are nowhere yet, one below the other: the first and the last. The outer `None`: there
    /// is no memory. The inner: there are no such blocks.
    #[expect(clippy::option_option, reason = "no memory is not no tail")]
    fn make_tail(
        &mut self,
        tree: &ActiveTree,
        root: usize,
        blocks: &[LocalHash],
        worker: WorkerIndex,
    ) -> Option<Option<(u32, u32)>> {
        let mut tail: Option<(u32, u32)> = None;
        for piece in blocks.chunks(ACTIVE_NODE_BLOCKS_MAX) {
            let parent = tail.map_or(root_of(SpaceId(0)), |(_, last)| last);
            let Some(made) = self.make(tree, (root, parent), piece, worker) else {
                self.unmake_tail(tree, tail);
                return None;
            };
            if let Some((_, last)) = tail {
                adopt(tree, last, made);
            }
            tail = Some((tail.map_or(made, |(first, _)| first), made));
        }
        if let Some((_, last)) = tail {
            Node::change(&tree.words, last, |node| node.ends = 1);
        }
        Some(tail)
    }

    fn unmake_tail(&mut self, tree: &ActiveTree, tail: Option<(u32, u32)>) {
        let Some((first, last)) = tail else { return };
        let mut at = last;
        loop {
            let above = Node::load(&tree.words, at).parent;
            self.unmake(tree, at);
            if at == first {
                break;
            }
            at = above;
        }
    }

    /// A node below `parent` that one prompt of a worker runs through.
    fn make(
        &mut self,
        tree: &ActiveTree,
        (root, parent): (usize, u32),
        blocks: &[LocalHash],
        worker: WorkerIndex,
    ) -> Option<u32> {
        let (len, first) = (blocks.len() as u32, blocks.first()?.0);
        let hashes = self.room.take(&tree.words, len)?;
        let Some(at) = self.room.take(&tree.words, NODE_WORDS) else {
            self.room.give_back(hashes, len);
            return None;
        };
        for (word, local) in tree.words.slice(hashes, len).unwrap_or_default().iter().zip(blocks) {
            // Relaxed: no root leads here yet.
            word.store(local.0, super::Ordering::Relaxed);
        }
        let (list, root) = (own_list(at), root as u32);
        tree.words.store(list, word(worker.0, 1));
        tree.words.store(list + 1, BLOCK_PARTS);
        Node { parent, len, hashes, list, workers: 1, room: 1, root, first, ..Node::default() }.store(&tree.words, at);
        Some(at)
    }

    fn unmake(&mut self, tree: &ActiveTree, at: u32) {
        let node = Node::load(&tree.words, at);
        self.room.give_back(node.hashes, node.len);
        self.give_list_back(&node);
        self.room.give_back(at, NODE_WORDS);
    }

    /// Gives the first `common` blocks of a node to a new one above it: the old one keeps its number, as prompts end
    /// with its last block. `None` if there is no memory, and nothing changed.
    fn split(&mut self, tree: &ActiveTree, root: usize, at: u32, common: u32) -> Option<u32> {
        let (words, below) = (&tree.words, Node::load(&tree.words, at));
        let room = room_for(below.workers);
        let above = self.room.take(words, NODE_WORDS)?;
        let list = if room > 1 { self.room.take(words, room * LIST_WORDS) } else { Some(own_list(above)) };
        let copied = Node { len: common, list: list.unwrap_or(0), room, ends: 0, children: 1, only: at, ..below };
        let first = words.load(below.hashes + common);
        let key = tree.key(above, LocalHash(first));
        if list.is_none() || self.edges(tree, root).reserve(key, 1).is_none() {
            if list.is_some() {
                self.give_list_back(&copied);
            }
            self.room.give_back(above, NODE_WORDS);
            return None;
        }
        let key_above = key_of(tree, &below);
        let slot = slot_of(tree, root, key_above);
        copy_list(words, &below, (copied.list, room));
        copied.store(words, above);
        let (hashes, len) = (below.hashes + common, below.len - common);
        self.room.cut(hashes);
        Node { parent: above, hashes, len, first, ..below }.store(words, at);
        if let Some(slot) = slot {
            self.edges(tree, root).lead(key_above, slot, above);
        }
        self.edges(tree, root).add(key, at);
        if is_node(below.parent) {
            Node::change(words, below.parent, |parent| parent.only ^= at ^ above);
        }
        Some(above)
    }

    /// Takes out a node that nobody runs any more. Returns the one above.
    fn prune(&mut self, tree: &ActiveTree, root: usize, at: u32) -> u32 {
        let node = Node::load(&tree.words, at);
        let key = key_of(tree, &node);
        if let Some(slot) = slot_of(tree, root, key) {
            self.edges(tree, root).remove(key, slot);
        }
        if is_node(node.parent) {
            Node::change(&tree.words, node.parent, |parent| {
                parent.children -= 1;
                parent.only ^= at;
            });
        }
        self.unmake(tree, at);
        node.parent
    }

    /// Joins a node at which nothing ends or branches any more with the one below, which keeps its number. Whoever
    /// runs through one then runs through the other.
    fn join(&mut self, tree: &ActiveTree, root: usize, at: u32) {
        let (words, above) = (&tree.words, Node::load(&tree.words, at));
        if above.ends > 0 || above.children != 1 {
            return;
        }
        let (child, below) = (above.only, Node::load(words, above.only));
        if !weigh_alike(words, &above, &below) {
            return;
        }
        let len = above.len + below.len;
        // Two chunks are not one run, though the numbers of their words follow each other.
        let follows = above.hashes + above.len == below.hashes;
        let lie_together = follows && !below.hashes.is_multiple_of(CHUNK_WORDS);
        let bound = if lie_together { ACTIVE_NODE_BLOCKS_MAX } else { ACTIVE_JOIN_BLOCKS_MAX };
        if len as usize > bound {
            return;
        }
        let mut hashes = above.hashes;
        if !lie_together {
            // Without memory they stay apart, which is as true.
            let Some(together) = self.room.take(words, len) else { return };
            words.copy(above.hashes, together, above.len);
            words.copy(below.hashes, together + above.len, below.len);
            hashes = together;
        }
        let (key, key_below) = (key_of(tree, &above), key_of(tree, &below));
        if let Some(slot) = slot_of(tree, root, key_below) {
            self.edges(tree, root).remove(key_below, slot);
        }
        if let Some(slot) = slot_of(tree, root, key) {
            self.edges(tree, root).lead(key, slot, child);
        }
        if is_node(above.parent) {
            Node::change(words, above.parent, |parent| parent.only ^= at ^ child);
        }
        Node { parent: above.parent, len, hashes, first: above.first, ..below }.store(words, child);
        if lie_together {
            self.room.mend(below.hashes);
        } else {
            self.room.give_back(above.hashes, above.len);
            self.room.give_back(below.hashes, below.len);
        }
        self.give_list_back(&above);
        self.room.give_back(at, NODE_WORDS);
    }

    fn edges<'a>(&'a mut self, tree: &'a ActiveTree, root: usize) -> Edges<'a> {
        let tables = &tree.roots[root].tables;
        Edges { tables, filled: &mut self.filled[root], words: &tree.words, room: &mut self.room }
    }
}

fn descend(tree: &ActiveTree, root: usize, space: SpaceId, locals: &[LocalHash]) -> Branch {
    let mut branch = Branch { parent: root_of(space), depth: 0, within: None };
    while branch.depth < locals.len() {
        let key = tree.key(branch.parent, locals[branch.depth]);
        let Some((_, at, node)) = tree.roots[root].tables.find(&tree.words, key, WRITER_PROBES_MAX, Node::load) else {
            break;
        };
        let common = tree.common(&node, &locals[branch.depth..]);
        branch.depth += common;
        if common < node.len as usize {
            branch.within = Some((at, common as u32));
            break;
        }
        branch.parent = at;
    }
    branch
}

/// Blocks from the first to a node's last.
pub(in crate::load) fn blocks_to(tree: &ActiveTree, mut at: u32) -> u64 {
    let mut blocks = 0;
    while is_node(at) {
        let node = Node::load(&tree.words, at);
        blocks += u64::from(node.len);
        at = node.parent;
    }
    blocks
}

/// Where an edge stands in its table.
fn slot_of(tree: &ActiveTree, root: usize, key: Key) -> Option<u32> {
    tree.roots[root].tables.find(&tree.words, key, WRITER_PROBES_MAX, Node::load).map(|(slot, ..)| slot)
}

/// What a node is found by.
const fn key_of(tree: &ActiveTree, node: &Node) -> Key {
    tree.key(node.parent, LocalHash(node.first))
}

/// A node gets another below it.
fn adopt(tree: &ActiveTree, parent: u32, child: u32) {
    if is_node(parent) {
        Node::change(&tree.words, parent, |node| {
            node.children += 1;
            node.only ^= child;
        });
    }
}
