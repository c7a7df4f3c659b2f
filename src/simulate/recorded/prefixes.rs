//! The prefixes of recorded prompts as a tree, and prompts as spans of it.

use hashbrown::HashMap;

use crate::simulate::workload::Span;

/// No node: the empty prefix.
const ROOT: u32 = u32::MAX;

/// A prefix of a recorded prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Prefix(u32);

impl Prefix {
    /// The prefix without tokens.
    pub(super) const EMPTY: Self = Self(ROOT);
}

#[derive(Clone, Copy, Debug)]
struct Node {
    parent: u32,
    /// Identities up to this one.
    depth: u32,
    /// The content of its tokens: that of its parent, for the first that continues it.
    content: u64,
    has_child: bool,
}

/// Every prefix of the recorded prompts, each by its identity.
#[derive(Clone, Debug, Default)]
pub(super) struct Prefixes {
    places: HashMap<u64, u32>,
    nodes: Vec<Node>,
    contents: u64,
    nodes_max: usize,
    /// Identities that had no room.
    left_out: u64,
}

impl Prefixes {
    /// A tree of at most `nodes_max` prefixes.
    pub(super) fn new(nodes_max: usize) -> Self {
        Self { nodes_max: nodes_max.min(ROOT as usize), ..Self::default() }
    }

    /// A content that no prefix has.
    pub(super) fn fresh_content(&mut self) -> u64 {
        self.contents += 1;
        self.contents - 1
    }

    /// Identities that had no room in the tree: prompts that share them seem to share less.
    pub(super) const fn left_out(&self) -> u64 {
        self.left_out
    }

    pub(super) const fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The prefix with these identities, which is added. Identities that contradict those before are no prefix.
    pub(super) fn insert(&mut self, identities: &[u64]) -> Prefix {
        // An identity stands for all before it.
        let known = identities.partition_point(|identity| self.places.contains_key(identity));
        let mut at = known.checked_sub(1).map_or(ROOT, |last| self.places[&identities[last]]);
        if self.depth(Prefix(at)) as usize != known {
            return Prefix::EMPTY;
        }
        let room = self.nodes_max - self.nodes.len();
        let new = &identities[known..];
        self.left_out += new.len().saturating_sub(room) as u64;
        for identity in &new[..new.len().min(room)] {
            let node = self.child_of(at);
            at = self.nodes.len() as u32;
            self.nodes.push(node);
            self.places.insert(*identity, at);
        }
        Prefix(at)
    }

    fn child_of(&mut self, parent: u32) -> Node {
        let inherited = self.nodes.get_mut(parent as usize).map(|node| {
            let content = (!std::mem::replace(&mut node.has_child, true)).then_some(node.content);
            (content, node.depth + 1)
        });
        let (content, depth) = inherited.unwrap_or((None, 1));
        let content = content.unwrap_or_else(|| self.fresh_content());
        Node { parent, depth, content, has_child: false }
    }

    /// Identities of a prefix.
    pub(super) fn depth(&self, prefix: Prefix) -> u32 {
        self.nodes.get(prefix.0 as usize).map_or(0, |node| node.depth)
    }

    /// A prefix and those before it, the longest first.
    pub(super) fn ancestors(&self, prefix: Prefix) -> impl Iterator<Item = Prefix> {
        let at = |place: u32| (place != ROOT).then_some(place);
        std::iter::successors(at(prefix.0), move |place| at(self.nodes[*place as usize].parent)).map(Prefix)
    }

    /// The place of a prefix among all; `None` for the empty one.
    pub(super) fn place(prefix: Prefix) -> Option<usize> {
        (prefix.0 != ROOT).then_some(prefix.0 as usize)
    }

    /// The tokens of a prefix, each identity of which stands for `tokens_each`. A token of a content is at its own place
    /// in the prompt.
    pub(super) fn spans(&self, prefix: Prefix, tokens_each: u32) -> Vec<Span> {
        let mut spans: Vec<Span> = Vec::new();
        for node in self.ancestors(prefix).filter_map(Self::place).map(|place| self.nodes[place]) {
            let from = u64::from(node.depth - 1) * u64::from(tokens_each);
            match spans.last_mut() {
                Some(span) if span.content == node.content => {
                    (span.from, span.tokens) = (from, span.tokens + tokens_each);
                }
                _ => spans.push(Span { content: node.content, from, tokens: tokens_each }),
            }
        }
        spans.reverse();
        spans
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(content: u64, from: u64, tokens: u32) -> Span {
        Span { content, from, tokens }
    }

    #[test]
    fn prompts_share_the_spans_of_their_common_prefix() {
        let mut prefixes = Prefixes::new(100);
        let first = prefixes.insert(&[10, 11, 12]);
        let longer = prefixes.insert(&[10, 11, 12, 13]);
        let other = prefixes.insert(&[10, 11, 22, 23]);
        let alone = prefixes.insert(&[30]);
        assert_eq!(prefixes.spans(first, 64), [span(0, 0, 192)]);
        assert_eq!(prefixes.spans(longer, 64), [span(0, 0, 256)]);
        assert_eq!(prefixes.spans(other, 64), [span(0, 0, 128), span(1, 128, 128)]);
        assert_eq!(prefixes.spans(alone, 64), [span(2, 0, 64)]);
        assert_eq!((prefixes.spans(Prefix::EMPTY, 64), prefixes.depth(other)), (Vec::new(), 4));
        assert_eq!(prefixes.insert(&[10, 11]), prefixes.ancestors(other).nth(2).expect("two more before it"));
        assert_eq!(prefixes.insert(&[]), Prefix::EMPTY);
        assert_eq!(prefixes.insert(&[12, 99]), Prefix::EMPTY, "12 was the third before");
    }

    #[test]
    fn a_tree_does_not_outgrow_its_bound() {
        let mut prefixes = Prefixes::new(3);
        let cut = prefixes.insert(&[1, 2, 3, 4, 5]);
        assert_eq!((prefixes.len(), prefixes.depth(cut), prefixes.left_out()), (3, 3, 2));
        assert_eq!(prefixes.insert(&[9]), Prefix::EMPTY);
    }
}
