//! A set of nodes in the order of their last use.

use rustc_hash::FxHashMap;

use crate::nodes::NodeId;

/// No slot.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Slot {
    node: NodeId,
    newer: u32,
    older: u32,
}

/// A set of nodes from the newest to the oldest, as a doubly linked list in dense slots.
///
/// If a child is always put behind its parent, the oldest node never has a child in the set, so taking the
/// oldest keeps the set closed under prefixes: what real engines do, which free the end of a sequence first.
#[derive(Debug)]
pub(crate) struct Lru {
    slots: Vec<Slot>,
    at: FxHashMap<NodeId, u32>,
    newest: u32,
    oldest: u32,
}

impl Default for Lru {
    fn default() -> Self {
        Self { slots: Vec::new(), at: FxHashMap::default(), newest: NONE, oldest: NONE }
    }
}

impl Lru {
    /// Nodes in the set.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether the node is in the set.
    #[must_use]
    pub(crate) fn contains(&self, node: NodeId) -> bool {
        self.at.contains_key(&node)
    }

    /// Leading nodes of `path` in the set, if the set is closed under prefixes.
    #[must_use]
    pub(crate) fn leading(&self, path: &[NodeId]) -> usize {
        path.partition_point(|node| self.contains(*node))
    }

    /// The node in some slot below [`len`](Self::len), in no particular order.
    #[must_use]
    pub(crate) fn at(&self, slot: usize) -> NodeId {
        self.slots[slot].node
    }

    /// Makes a node the newest; it may be new to the set.
    pub(crate) fn touch(&mut self, node: NodeId) {
        self.remove(node);
        self.put(node, NONE, self.newest);
    }

    /// Adds a node right behind another one, or as the newest.
    pub(crate) fn insert_behind(&mut self, node: NodeId, newer: Option<NodeId>) {
        match newer.and_then(|newer| self.at.get(&newer).copied()) {
            Some(newer) => self.put(node, newer, self.slots[newer as usize].older),
            None => self.touch(node),
        }
    }

    /// Adds a node as the oldest.
    pub(crate) fn insert_oldest(&mut self, node: NodeId) {
        self.remove(node);
        self.put(node, self.oldest, NONE);
    }

    /// Takes the oldest node out.
    pub(crate) fn pop_oldest(&mut self) -> Option<NodeId> {
        let node = self.slots.get(self.oldest as usize)?.node;
        self.remove(node);
        Some(node)
    }

    /// Takes a node out; whether it was in.
    pub(crate) fn remove(&mut self, node: NodeId) -> bool {
        let Some(at) = self.at.remove(&node) else { return false };
        let Slot { newer, older, .. } = self.slots[at as usize];
        self.link(newer, older);
        // The last slot fills the hole, so that slots stay dense.
        let last = self.slots.len() as u32 - 1;
        self.slots.swap_remove(at as usize);
        if at != last {
            let moved = self.slots[at as usize];
            self.at.insert(moved.node, at);
            self.link(moved.newer, at);
            self.link(at, moved.older);
        }
        true
    }

    fn put(&mut self, node: NodeId, newer: u32, older: u32) {
        let at = self.slots.len() as u32;
        self.slots.push(Slot { node, newer, older });
        self.at.insert(node, at);
        self.link(newer, at);
        self.link(at, older);
    }

    /// Makes two slots neighbours; an absent one stands for the end of the list.
    fn link(&mut self, newer: u32, older: u32) {
        match self.slots.get_mut(newer as usize) {
            Some(slot) => slot.older = older,
            None => self.newest = older,
        }
        match self.slots.get_mut(older as usize) {
            Some(slot) => slot.newer = newer,
            None => self.oldest = newer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(lru: &mut Lru) -> Vec<u32> {
        std::iter::from_fn(|| lru.pop_oldest()).map(|node| node.0).collect()
    }

    #[test]
    fn the_oldest_goes_first() {
        let mut lru = Lru::default();
        (1..=5).for_each(|node| lru.touch(NodeId(node)));
        lru.touch(NodeId(2));
        lru.insert_behind(NodeId(9), Some(NodeId(4)));
        lru.insert_oldest(NodeId(8));
        assert!(lru.remove(NodeId(3)) && !lru.remove(NodeId(3)));
        assert_eq!(lru.len(), 6);
        assert_eq!(order(&mut lru), [8, 1, 9, 4, 5, 2]);
        assert_eq!((lru.len(), lru.pop_oldest()), (0, None));
    }

    #[test]
    fn children_behind_parents_keep_prefixes_whole() {
        let mut lru = Lru::default();
        let path: Vec<NodeId> = (0..6).map(NodeId).collect();
        lru.insert_behind(path[0], None);
        path.windows(2).for_each(|pair| lru.insert_behind(pair[1], Some(pair[0])));
        assert_eq!(lru.leading(&path), 6);
        assert_eq!(order(&mut lru), [5, 4, 3, 2, 1, 0]);
    }
}
