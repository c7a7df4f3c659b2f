//! From a writer's record to what readers see: the header line, and a record beside it where many lanes are.

use super::bits::Bits;
use super::cover::Entry;
use super::header::{Header, LEAF, PAIRS, Pair};
use super::lanes::{Lane, LaneState, Lanes};
use super::layer::Layer;
use super::node::{Node, NodeId};

/// Coverage that does not fit into a header line. Never changed: a new one takes its place.
#[derive(Debug, Default)]
pub(super) struct More {
    /// Lanes that cover all of the node, 64 to a word; those below 64 are in the header too.
    pub(super) full: Vec<u64>,
    /// Lanes that cover the node up to a first gap.
    pub(super) partial: Vec<Pair>,
    /// Lanes of lower tiers with blocks beyond a gap: all that they cover. A walk comes to them in the
    /// middle of an edge.
    pub(super) islands: Vec<(Lane, Bits)>,
}

impl More {
    pub(super) fn bytes(&self) -> u64 {
        let parts = self.full.capacity() * 8
            + self.partial.capacity() * size_of::<Pair>()
            + self.islands.capacity() * size_of::<(Lane, Bits)>();
        (parts + size_of::<Self>()) as u64
    }
}

/// What a header says of one entry.
enum Shown<'a> {
    Nothing,
    Full,
    Cut(u16),
    Islands(&'a Bits),
}

fn shown<'a>(entry: &'a Entry, len: u16, lanes: &Lanes) -> Shown<'a> {
    let record = lanes.record(entry.lane);
    match &entry.islands {
        _ if record.state != LaneState::Shown => Shown::Nothing,
        Some(islands) if record.tier != Layer::Device => Shown::Islands(islands),
        _ if entry.cut == len => Shown::Full,
        _ if entry.cut == 0 => Shown::Nothing,
        _ => Shown::Cut(entry.cut),
    }
}

/// The header of a node, its `more` apart, and the record that must be there too.
pub(super) fn encode(id: NodeId, node: &Node, lanes: &Lanes) -> (Header, Option<Box<More>>) {
    let mut header = Header {
        parent: node.parent.0,
        variant: node.variant,
        first: node.first,
        id: id.0,
        len: node.len,
        base: node.locals.base,
        flags: Header::forked(node.forks) | if node.has_children() { 0 } else { LEAF },
        mask: 0,
        pairs: [Pair { lane: 0, cut: 0 }; PAIRS],
        pairs_len: 0,
        more: 0,
    };
    let mut fits = true;
    for entry in &node.entries {
        let cut = match shown(entry, node.len, lanes) {
            Shown::Nothing => continue,
            Shown::Full if entry.lane.0 < 64 => {
                header.mask |= 1 << entry.lane.0;
                continue;
            }
            Shown::Full => node.len,
            Shown::Cut(cut) => cut,
            Shown::Islands(_) => {
                fits = false;
                continue;
            }
        };
        match header.pairs.get_mut(usize::from(header.pairs_len)) {
            Some(pair) => {
                *pair = Pair { lane: entry.lane.0, cut };
                header.pairs_len += 1;
            }
            None => fits = false,
        }
    }
    if fits {
        return (header, None);
    }
    header.pairs_len = 0;
    (header, Some(Box::new(more(node, lanes))))
}

fn more(node: &Node, lanes: &Lanes) -> More {
    let mut more = More::default();
    for entry in &node.entries {
        match shown(entry, node.len, lanes) {
            Shown::Nothing => {}
            Shown::Full => {
                let word = usize::from(entry.lane.0 / 64);
                more.full.resize(more.full.len().max(word + 1), 0);
                more.full[word] |= 1 << (entry.lane.0 % 64);
            }
            Shown::Cut(cut) => more.partial.push(Pair { lane: entry.lane.0, cut }),
            Shown::Islands(islands) => more.islands.push((entry.lane, islands.clone())),
        }
    }
    more.partial.shrink_to_fit();
    more
}
