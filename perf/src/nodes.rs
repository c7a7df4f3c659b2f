//! Every prefix of the run once: a block after its parent.

use rustc_hash::FxHashMap;

use crate::args::EngineHashing;
use crate::mix::mix;
use crate::trace::{ID_TOKENS, Request};

/// A prefix, and its last block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeId(pub(crate) u32);

#[derive(Clone, Copy, Debug)]
struct Node {
    parent: Option<NodeId>,
    local: u64,
    prefix: u64,
}

/// All prefixes. Equal content after equal content is one node.
#[derive(Debug)]
pub(crate) struct Nodes {
    hashing: EngineHashing,
    nodes: Vec<Node>,
    by_prefix: FxHashMap<u64, NodeId>,
}

impl Nodes {
    /// None yet.
    #[must_use]
    pub(crate) fn new(hashing: EngineHashing) -> Self {
        Self { hashing, nodes: Vec::new(), by_prefix: FxHashMap::default() }
    }

    /// The block with the content `local` after `parent`.
    pub(crate) fn intern(&mut self, parent: Option<NodeId>, local: u64) -> NodeId {
        let before = parent.map_or(0, |parent| self.node(parent).prefix);
        let prefix = mix(before, local);
        let next = NodeId(self.nodes.len() as u32);
        let id = *self.by_prefix.entry(prefix).or_insert(next);
        if id == next {
            self.nodes.push(Node { parent, local, prefix });
        }
        id
    }

    /// Appends the prompt's blocks to `path`. The content of a block follows from the trace's id, its place
    /// under that id and the copy of the trace.
    pub(crate) fn prompt(&mut self, request: &Request, block_size: u32, copy: u32, path: &mut Vec<NodeId>) {
        let per_id = ID_TOKENS / block_size;
        let mut parent = None;
        for at in 0..request.prompt_blocks(block_size) {
            let id = request.ids[(at / per_id) as usize];
            let local = mix(mix(id, u64::from(copy) + 1), u64::from(at % per_id));
            let node = self.intern(parent, local);
            path.push(node);
            parent = Some(node);
        }
    }

    /// Gives every content another name.
    pub(crate) fn rename(&mut self, mut name: impl FnMut(u64) -> u64) {
        self.nodes.iter_mut().for_each(|node| node.local = name(node.local));
    }

    /// The block before.
    #[must_use]
    pub(crate) fn parent(&self, node: NodeId) -> Option<NodeId> {
        self.node(node).parent
    }

    /// The local hash.
    #[must_use]
    pub(crate) fn local(&self, node: NodeId) -> u64 {
        self.node(node).local
    }

    /// What a worker's engine calls the block.
    #[must_use]
    pub(crate) fn engine_hash(&self, node: NodeId, worker: u16) -> u64 {
        let prefix = self.node(node).prefix;
        match self.hashing {
            EngineHashing::Shared => prefix,
            EngineHashing::PerWorker => mix(prefix, u64::from(worker) + 1),
        }
    }

    fn node(&self, node: NodeId) -> &Node {
        &self.nodes[node.0 as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_prefixes_are_one_node() {
        let mut nodes = Nodes::new(EngineHashing::PerWorker);
        let request =
            |ids: &[u64]| Request { prompt_tokens: ids.len() as u32 * 512, output_tokens: 1, ids: ids.into() };
        let (mut a, mut b, mut copy) = (Vec::new(), Vec::new(), Vec::new());
        nodes.prompt(&request(&[1, 2]), 64, 0, &mut a);
        nodes.prompt(&request(&[1, 3]), 64, 0, &mut b);
        nodes.prompt(&request(&[1, 2]), 64, 1, &mut copy);
        assert_eq!((a.len(), b.len()), (16, 16));
        assert_eq!(a[..8], b[..8]);
        assert_ne!(a[8], b[8]);
        assert!(copy.iter().all(|node| !a.contains(node)));
        assert_eq!(nodes.parent(a[0]), None);
        assert_eq!(nodes.parent(b[8]), Some(a[7]));
        assert_ne!(nodes.engine_hash(a[0], 0), nodes.engine_hash(a[0], 1));
    }
}
