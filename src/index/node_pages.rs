//! The store of a shard's node records: pages, each kept while one of its nodes exists.
//!
//! A new node makes at most one new page necessary, so no store waits while other records are copied. The memory of an
//! emptied worker's nodes goes back to the system page by page.

use super::node::{Node, NodeId};
use crate::prefetch::prefetch;
use std::collections::BTreeSet;

const PAGE_NODES: usize = 256;
const PAGE_WORDS: usize = PAGE_NODES / u64::BITS as usize;
/// Pages without a node that are kept, so that a shard whose size varies around a page's end does not allocate each
/// time.
const IDLE_PAGES_KEPT: usize = 1;

/// Consecutive node records.
type Page = Box<[Node; PAGE_NODES]>;

/// Which numbers of a page are in use.
#[derive(Clone, Copy, Debug)]
struct PageRecord {
    /// One bit for each free number.
    free: [u64; PAGE_WORDS],
    /// One bit for each number in the join queue, even if another node has got the number since: so no number is queued
    /// twice.
    queued: [u64; PAGE_WORDS],
    used: u16,
}

impl PageRecord {
    const EMPTY: Self = Self { free: [u64::MAX; PAGE_WORDS], queued: [0; PAGE_WORDS], used: 0 };

    /// No node, and no number in the join queue.
    fn is_idle(&self) -> bool {
        self.used == 0 && self.queued == [0; PAGE_WORDS]
    }
}

/// All nodes of a shard.
#[derive(Debug)]
pub(super) struct Nodes {
    /// `None` for a freed page. Apart from the page records: nodes are looked up more often than anything else, so the
    /// way to a node is short and stays in the cache.
    pages: Vec<Option<Page>>,
    records: Vec<PageRecord>,
    /// Pages with a free number. The lowest is used first, so that the highest become empty.
    open: BTreeSet<u32>,
    /// Number of allocated pages.
    present: usize,
    /// Of these, pages without a node.
    unused: usize,
    /// Nodes, including the root.
    used: usize,
    side_bytes: u64,
}

const fn split(id: NodeId) -> (usize, usize) {
    (id.0 as usize / PAGE_NODES, id.0 as usize % PAGE_NODES)
}

const fn bit(at: usize) -> (usize, u64) {
    (at / u64::BITS as usize, 1 << (at % u64::BITS as usize))
}

impl Nodes {
    pub(super) fn new() -> Self {
        let mut nodes = Self {
            pages: Vec::new(),
            records: Vec::new(),
            open: BTreeSet::new(),
            present: 0,
            unused: 0,
            used: 0,
            side_bytes: 0,
        };
        nodes.add(Node { used: true, ..Node::EMPTY });
        nodes
    }

    /// Sets the heap bytes of a node.
    pub(super) fn set_side_bytes(&mut self, id: NodeId, bytes: usize) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let before = std::mem::replace(&mut self[id].side_bytes, bytes);
        self.side_bytes = self.side_bytes + u64::from(bytes) - u64::from(before);
    }

    /// Adds a node; returns its number.
    pub(super) fn add(&mut self, node: Node) -> NodeId {
        let page = self.open.first().copied().unwrap_or_else(|| {
            self.pages.push(None);
            self.records.push(PageRecord::EMPTY);
            self.open.insert(self.pages.len() as u32 - 1);
            self.pages.len() as u32 - 1
        });
        let of = &mut self.records[page as usize];
        if self.pages[page as usize].is_none() {
            let nodes: Box<[Node]> = (0..PAGE_NODES).map(|_| Node::EMPTY).collect();
            self.pages[page as usize] = nodes.try_into().ok();
            self.present += 1;
        } else {
            self.unused -= usize::from(of.used == 0);
        }
        let word = of.free.iter().position(|word| *word != 0).unwrap_or_default();
        let at = word * u64::BITS as usize + of.free[word].trailing_zeros() as usize;
        of.free[word] &= of.free[word] - 1;
        of.used += 1;
        if usize::from(of.used) == PAGE_NODES {
            self.open.remove(&page);
        }
        self.used += 1;
        let id = NodeId(page * PAGE_NODES as u32 + at as u32);
        self[id] = node;
        id
    }

    /// Removes a node that is linked to no other.
    pub(super) fn drop(&mut self, id: NodeId) {
        self.set_side_bytes(id, 0);
        self[id] = Node::EMPTY;
        let (page, at) = split(id);
        let of = &mut self.records[page];
        let (word, bit) = bit(at);
        of.free[word] |= bit;
        if usize::from(of.used) == PAGE_NODES {
            self.open.insert(page as u32);
        }
        of.used -= 1;
        self.used -= 1;
        if of.used == 0 {
            self.unused += 1;
            self.give_back(page);
        }
    }

    /// Frees a page without nodes, unless it is one of those kept.
    fn give_back(&mut self, page: usize) {
        if self.unused > IDLE_PAGES_KEPT && self.records[page].is_idle() && self.pages[page].is_some() {
            self.pages[page] = None;
            self.unused -= 1;
            self.present -= 1;
        }
    }

    /// Marks a number as in the join queue; `false` if it already was.
    pub(super) fn queue(&mut self, id: NodeId) -> bool {
        let (page, at) = split(id);
        let (word, bit) = bit(at);
        let queued = &mut self.records[page].queued[word];
        let is_new = *queued & bit == 0;
        *queued |= bit;
        is_new
    }

    /// Marks a number as no longer in the join queue.
    pub(super) fn unqueue(&mut self, id: NodeId) {
        let (page, at) = split(id);
        let (word, bit) = bit(at);
        self.records[page].queued[word] &= !bit;
        self.give_back(page);
    }

    /// All numbers in use are below this.
    pub(super) fn end(&self) -> u32 {
        (self.pages.len() * PAGE_NODES) as u32
    }

    /// The first number from this one on that may be in use; skips pages without nodes.
    pub(super) fn from(&self, id: NodeId) -> NodeId {
        let (page, at) = split(id);
        match self.records.get(page..).and_then(|records| records.iter().position(|record| record.used > 0)) {
            None => NodeId(self.end()),
            Some(0) => NodeId((page * PAGE_NODES + at) as u32),
            Some(more) => NodeId(((page + more) * PAGE_NODES) as u32),
        }
    }

    pub(super) fn is_used(&self, id: NodeId) -> bool {
        self.get(id).is_some()
    }

    pub(super) fn prefetch(&self, id: NodeId) {
        let (page, at) = split(id);
        if let Some(Some(page)) = self.pages.get(page) {
            prefetch(std::ptr::from_ref(&page[at]).cast());
        }
    }

    pub(super) fn get(&self, id: NodeId) -> Option<&Node> {
        let (page, at) = split(id);
        self.pages.get(page)?.as_ref().map(|page| &page[at]).filter(|node| node.used)
    }

    /// Nodes in use, without the root.
    pub(super) const fn len(&self) -> usize {
        self.used - 1
    }

    pub(super) fn bytes(&self) -> u64 {
        let open = self.open.len() * 2 * size_of::<u32>();
        (self.present * PAGE_NODES * size_of::<Node>() + self.lists_bytes() + open) as u64 + self.side_bytes
    }

    const fn lists_bytes(&self) -> usize {
        self.pages.capacity() * size_of::<Option<Page>>() + self.records.capacity() * size_of::<PageRecord>()
    }

    /// How much [`bytes`](Self::bytes) may grow by `more` nodes.
    pub(super) const fn growth_bytes(&self, more: usize) -> u64 {
        let pages = more.div_ceil(PAGE_NODES) + 1;
        (pages * (PAGE_NODES * size_of::<Node>()) + self.lists_bytes()) as u64
    }

    /// The nodes directly below one.
    pub(super) fn children(&self, of: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let some = |id: NodeId| Some(id).filter(|id| id.is_some());
        std::iter::successors(some(self[of].first_child), move |child| some(self[*child].next))
    }

    /// Puts a node first among the children of its parent.
    pub(super) fn link(&mut self, id: NodeId) {
        let parent = self[id].parent;
        let first = std::mem::replace(&mut self[parent].first_child, id);
        (self[id].next, self[id].previous) = (first, NodeId::NONE);
        if first.is_some() {
            self[first].previous = id;
        }
    }

    /// Removes a node from the children of its parent.
    pub(super) fn unlink(&mut self, id: NodeId) {
        let (parent, next, previous) = (self[id].parent, self[id].next, self[id].previous);
        if previous.is_some() {
            self[previous].next = next;
        } else {
            self[parent].first_child = next;
        }
        if next.is_some() {
            self[next].previous = previous;
        }
    }

    /// Puts `new` in the place of `old` among the children of their parent.
    pub(super) fn relink(&mut self, old: NodeId, new: NodeId) {
        let (parent, next, previous) = (self[old].parent, self[old].next, self[old].previous);
        (self[new].parent, self[new].next, self[new].previous) = (parent, next, previous);
        if previous.is_some() {
            self[previous].next = new;
        } else {
            self[parent].first_child = new;
        }
        if next.is_some() {
            self[next].previous = new;
        }
    }
}

impl std::ops::Index<NodeId> for Nodes {
    type Output = Node;

    fn index(&self, id: NodeId) -> &Node {
        let (page, at) = split(id);
        &self.pages[page].as_ref().expect("a number in use is on a page that is there")[at]
    }
}

impl std::ops::IndexMut<NodeId> for Nodes {
    fn index_mut(&mut self, id: NodeId) -> &mut Node {
        let (page, at) = split(id);
        &mut self.pages[page].as_mut().expect("a number in use is on a page that is there")[at]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> Node {
        Node { used: true, ..Node::EMPTY }
    }

    #[test]
    fn pages_come_one_at_a_time_and_go_with_their_last_node() {
        let mut nodes = Nodes::new();
        let page_bytes = (PAGE_NODES * size_of::<Node>()) as u64;
        let at_first = nodes.bytes();
        let mut before = at_first;
        let ids: Vec<NodeId> = (0..20 * PAGE_NODES).map(|_| nodes.add(node())).collect();
        assert!(ids.iter().enumerate().all(|(at, id)| id.0 as usize == at + 1), "the lowest comes first");
        assert!(nodes.bytes() - before >= 20 * page_bytes);
        for id in ids.iter().rev() {
            before = nodes.bytes();
            nodes.drop(*id);
            assert!(before.saturating_sub(nodes.bytes()) <= page_bytes);
        }
        assert_eq!(nodes.len(), 0);
        assert!(nodes.bytes() <= at_first + 2 * page_bytes, "{} after {at_first}", nodes.bytes());
    }

    #[test]
    fn a_page_stays_while_one_of_its_numbers_is_queued() {
        let mut nodes = Nodes::new();
        let ids: Vec<NodeId> = (0..5 * PAGE_NODES).map(|_| nodes.add(node())).collect();
        let last = ids[ids.len() - 1];
        assert!(nodes.queue(last) && !nodes.queue(last));
        ids.iter().for_each(|id| nodes.drop(*id));
        let before = nodes.bytes();
        assert!(!nodes.is_used(last) && nodes.from(NodeId(PAGE_NODES as u32)).0 == nodes.end());
        nodes.unqueue(last);
        assert!(nodes.bytes() < before, "the page is freed with its last queued number");
        let again: Vec<NodeId> = ids.iter().map(|_| nodes.add(node())).collect();
        assert_eq!((again, nodes.len()), (ids, 5 * PAGE_NODES));
    }
}
