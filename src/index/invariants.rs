//! Invariants of a whole shard between two events, for tests: each check starts from nothing.

use super::ShardWriter;
use super::header::{Header, Overflow, encode, partials};
use super::holders::{HolderBit, HolderState, Layer};
use super::node::{Bits, GRANULE_WORDS, Node, NodeId, Place};
use super::tree::Tree;
use super::worker::{BoundBlocks, Worker, mixed};
use crate::ids::EngineHash;
use std::collections::{BTreeMap, BTreeSet};

impl ShardWriter {
    /// Panics if an invariant is broken. With `quiet`, no reader is inside, so that all garbage comes back and every
    /// word of the arena must be in an extent or free.
    pub(super) fn check(&mut self, quiet: bool) {
        if quiet {
            self.reclaim();
            assert_eq!(self.tree.garbage.waiting_items(), 0, "no reader is inside");
        }
        let tree = &self.tree;
        tree.check_shape();
        tree.check_names();
        tree.check_headers();
        tree.check_words(quiet);
        let mut lives = BTreeMap::new();
        for worker in self.all_workers() {
            lives.insert(worker.slot.0, worker.life);
            check_worker(tree, worker);
        }
        let placed: u64 = self.all_workers().map(|worker| worker.bound.all() - worker.dormant.len() as u64).sum();
        let bytes: u64 = self.all_workers().map(Worker::bytes).sum();
        assert_eq!((tree.placed, tree.workers_bytes), (placed, bytes), "totals over all workers");
        let mut nodes: BTreeMap<HolderBit, u32> = BTreeMap::new();
        let entries = tree.used().flat_map(|id| &tree.nodes[id].entries);
        entries.for_each(|entry| *nodes.entry(entry.holder).or_insert(0) += 1);
        for (holder, nodes) in nodes {
            assert_eq!(tree.holders.record(holder).nodes, nodes, "nodes that know {holder:?}");
        }
        for id in tree.used() {
            for entry in &tree.nodes[id].entries {
                let record = tree.holders.record(entry.holder);
                let lives = lives.get(&record.slot.0) == Some(&record.life);
                match record.state {
                    HolderState::Free => panic!("{id:?} knows {:?}, which is free", entry.holder),
                    HolderState::Retired => {}
                    HolderState::Shown | HolderState::Hidden => {
                        assert!(lives, "{:?} at {id:?} has no worker", entry.holder)
                    }
                }
            }
        }
    }
}

impl Tree {
    fn used(&self) -> impl Iterator<Item = NodeId> + '_ {
        (1..self.nodes.end()).map(NodeId).filter(|id| self.nodes.is_used(*id))
    }

    /// Links, depths, entries, columns, variants.
    fn check_shape(&self) {
        let mut reached = 0;
        let mut open = vec![NodeId::ROOT];
        while let Some(id) = open.pop() {
            let mut previous = NodeId::NONE;
            let mut firsts: BTreeMap<u64, BTreeSet<u8>> = BTreeMap::new();
            for child in self.nodes.children(id) {
                let node = &self.nodes[child];
                assert!(node.used && node.parent == id && node.previous == previous, "{child:?} below {id:?}");
                previous = child;
                reached += 1;
                assert_eq!(node.depth, self.nodes[id].depth + u32::from(self.nodes[id].len), "{child:?}");
                assert!(
                    firsts.entry(self.locals(child)[0]).or_default().insert(node.variant),
                    "{child:?} is there twice"
                );
                self.check_node(child, node);
                open.push(child);
            }
            for (first, variants) in firsts {
                let line = self.table.find(id.0, first, 0).expect("the first of its variants");
                let main = NodeId(self.table.id(line));
                assert_eq!(usize::from(self.nodes[main].forks) + 1, variants.len(), "forks of {main:?}");
                assert!(variants.iter().all(|variant| usize::from(*variant) < super::slow_path::ALIASES_CEILING));
            }
        }
        assert_eq!(reached, self.used().count(), "nodes that are reached");
        assert_eq!((reached, reached), (self.nodes.len(), self.table.len()), "nodes that are counted");
    }

    fn check_node(&self, id: NodeId, node: &Node) {
        assert!((1..=self.node_blocks_max).contains(&node.len), "{id:?}: {node:?}");
        assert!(node.written >= node.len && node.locals.room >= node.written, "{id:?}: {node:?}");
        assert!(node.variant == 0 || node.forks == 0, "{id:?}: only the first counts its forks");
        assert!(node.entries.is_sorted_by(|one, next| one.holder < next.holder), "{id:?}: {node:?}");
        for (at, column) in node.columns.iter().enumerate() {
            let users = node.entries.iter().filter(|entry| usize::from(entry.column) == at).count();
            assert_eq!(usize::from(column.users), users, "{id:?}: users of column {at}");
            assert!(users > 0 && column.len <= node.len && column.names.room >= column.len, "{id:?}: {column:?}");
        }
        for entry in &node.entries {
            assert!(entry.end() <= node.columns[usize::from(entry.column)].len, "{id:?}: {entry:?} has no names");
            if let Some(sparse) = &entry.sparse {
                assert!(sparse.first_gap() == entry.cut && sparse.end() > entry.cut, "{id:?}: {entry:?}");
            }
        }
        let needed = node.has_children() || node.forks > 0 || node.entries.iter().any(|entry| !entry.is_empty());
        assert!(needed, "{id:?} is covered by no holder bit");
    }

    /// Every name leads to its word, and every word with a name to its place; there are no others.
    fn check_names(&self) {
        let mut names: BTreeMap<u64, u32> = BTreeMap::new();
        let mut words = 0;
        for id in self.used() {
            for (at, column) in self.nodes[id].columns.iter().enumerate() {
                for block in 0..column.len {
                    let word = column.names.base + u32::from(block);
                    let name = self.name(word);
                    *names.entry(name.0).or_insert(0) += 1;
                    words += 1;
                    let known = self.name_map.find(self.name_map.spot(name.0), |other| other == word);
                    assert_eq!(known, Some(word), "{name:?} of {id:?} is not known");
                    let place = Place { node: id, at: block };
                    let owner = self.arena.owner(word);
                    assert_eq!(self.resolve(word), Some((place, at as u16)), "word {word} is marked as {owner}'s");
                }
            }
        }
        assert_eq!(self.name_map.len(), words, "names that are known");
        let shared: BTreeMap<u64, u32> = names.into_iter().filter(|(_, n)| *n > 1).map(|(k, n)| (k, n - 1)).collect();
        let counted = self.duplicate_names.iter().map(|(name, others)| (name.0, *others)).collect();
        assert_eq!(shared, counted, "names that several words have");
    }

    /// Headers show readers what the records say.
    fn check_headers(&self) {
        for id in self.used() {
            let node = &self.nodes[id];
            let line = self.line(id).unwrap_or_else(|| panic!("{id:?} has no header"));
            let shown = self.table.header(line);
            let mut overflow = None;
            let meant = encode(id, node, &self.holders, |kept| {
                overflow = kept;
                0
            });
            assert_eq!(shown.overflow, node.overflow, "{id:?}");
            let plain = |header: &Header| (header.parent, header.id, header.len, header.base, header.flags);
            assert_eq!(plain(&shown), plain(&meant), "{id:?}");
            let beside = overflow_of(&shown);
            for holder in self.holders.shown_holders() {
                let (is, should) = (covered(&shown, beside, holder), covered(&meant, overflow.as_deref(), holder));
                assert_eq!(is, should, "{holder:?} at {id:?}");
            }
        }
    }

    /// Every granule of the arena is free, or belongs to exactly one extent; no word belongs to two blocks.
    fn check_words(&self, quiet: bool) {
        let known = self.arena.known_words() as usize;
        let mut granules = vec![None; known / GRANULE_WORDS as usize];
        let mut words = vec![false; known];
        let mut own = |(base, count): (u32, u32), of: (NodeId, &'static str)| {
            for granule in base / GRANULE_WORDS..(base + count) / GRANULE_WORDS {
                let before = granules[granule as usize].replace(of);
                assert!(before.is_none(), "granule {granule} is {before:?}'s and {of:?}'s");
                assert!(!self.arena.is_free_granule(granule), "granule {granule} of {of:?} is free");
            }
        };
        let mut say = |base: u32, count: u16| {
            for word in base..base + u32::from(count) {
                assert!(!std::mem::replace(&mut words[word as usize], true), "word {word} is two blocks'");
                assert!(!self.arena.is_free_granule(word / GRANULE_WORDS), "word {word} is free");
            }
        };
        for id in self.used() {
            let node = &self.nodes[id];
            own(node.locals.granules_from(0), (id, "locals"));
            say(node.locals.base, node.written);
            self.arena.check_sealed(node.locals.base, u32::from(node.len));
            for column in &node.columns {
                own(column.names.granules_from(0), (id, "names"));
                say(column.names.base, column.len);
            }
        }
        for (granule, owner) in granules.iter().enumerate().filter(|_| quiet) {
            let free = self.arena.is_free_granule(granule as u32);
            assert!(free != owner.is_some(), "granule {granule} is lost");
        }
    }
}

fn overflow_of(header: &Header) -> Option<&Overflow> {
    // SAFETY: the address is a box's that is dropped after its header has been replaced; the writer, which alone does
    // that, is borrowed.
    #[expect(unsafe_code, reason = "headers have the addresses of boxes")]
    (header.overflow != 0).then(|| unsafe { &*(header.overflow as *const Overflow) })
}

/// The blocks that a header says a holder bit covers.
fn covered(header: &Header, overflow: Option<&Overflow>, holder: HolderBit) -> Bits {
    let masked = holder.0 < 64 && header.mask >> holder.0 & 1 == 1;
    let listed = overflow.is_some_and(|overflow| {
        overflow.full.get(usize::from(holder.0 / 64)).is_some_and(|word| word >> (holder.0 % 64) & 1 == 1)
    });
    if masked || listed {
        return Bits::range(0, header.len);
    }
    if let Some((_, bits)) = overflow.and_then(|overflow| overflow.sparse.iter().find(|(of, _)| *of == holder)) {
        return bits.clone();
    }
    let partial = partials(header, overflow).find(|partial| partial.holder == holder.0);
    Bits::range(0, partial.map_or(0, |partial| partial.cut))
}

/// The counts of a worker equal a recount, and a search for each of its names finds the block.
fn check_worker(tree: &Tree, worker: &Worker) {
    let mut holders_of: BTreeMap<EngineHash, Vec<HolderBit>> = BTreeMap::new();
    for id in tree.used() {
        let node = &tree.nodes[id];
        let columns: BTreeSet<u16> =
            worker.all_holders.iter().filter_map(|holder| Some(node.entry(*holder)?.column)).collect();
        assert!(columns.len() <= 1, "worker {} at {id:?} has columns {columns:?}", worker.slot.0);
        let Some(column) = columns.first().map(|at| &node.columns[usize::from(*at)]) else { continue };
        for at in 0..node.len {
            let place = Place { node: id, at };
            let holders = worker.holders_at(tree, place);
            if holders.is_empty() {
                continue;
            }
            let name = tree.name(column.names.base + u32::from(at));
            assert!(holders_of.insert(name, holders.to_vec()).is_none(), "{name:?} is bound twice");
            assert_eq!(worker.find(tree, name).map(|(place, _)| place), Some(place), "{name:?}");
            let is_first = at == 0 && node.parent == NodeId::ROOT;
            assert_eq!(worker.name_before(tree, place).is_none(), is_first, "{name:?} at {place:?} has no parent");
            if at == 0 && !is_first {
                let above = &tree.nodes[node.parent];
                let column = worker.column_of(above).expect("a name above");
                assert_eq!(above.columns[usize::from(column)].len, above.len, "{name:?}: the name above");
            }
            for layer in Layer::ALL.into_iter().filter(|layer| worker.layers[layer.index()].groups.len() > 1) {
                let shown = worker.layers[layer.index()].shown;
                let shows = node.entry(shown).is_some_and(|entry| entry.covers(at));
                assert_eq!(shows, worker.is_held(layer, &holders), "{name:?} in {layer:?}");
            }
        }
    }
    worker.dormant.check();
    for (name, block) in worker.dormant.iter() {
        assert!(!block.holders.is_empty(), "{name:?} is dormant without a reference");
        assert!(holders_of.insert(name, block.holders.to_vec()).is_none(), "{name:?} is dormant and placed");
    }
    check_figures(worker, &holders_of);
}

fn check_figures(worker: &Worker, holders_of: &BTreeMap<EngineHash, Vec<HolderBit>>) {
    let (mut bound, mut references) = (BoundBlocks::default(), [0_u64; Layer::COUNT]);
    let (mut held, mut digest) = ([0_u64; Layer::COUNT], [0_u64; Layer::COUNT]);
    for (name, holders) in holders_of {
        let mut layers = 0_usize;
        for (layer, holder) in worker.references().filter(|(_, holder)| holders.contains(holder)) {
            layers |= 1 << layer.index();
            references[layer.index()] += 1 + u64::from(worker.extras.get(*name, holder));
        }
        assert_ne!(layers, 0, "{name:?} is bound, and no layer refers to it");
        bound.change((0, layers), 1);
        for layer in Layer::ALL.into_iter().filter(|layer| worker.is_held(*layer, holders)) {
            held[layer.index()] += 1;
            digest[layer.index()] = digest[layer.index()].wrapping_add(mixed(name.0));
        }
    }
    assert_eq!(worker.bound, bound, "bound");
    let layers = &worker.layers;
    assert_eq!(std::array::from_fn(|layer| layers[layer].references), references, "references");
    assert_eq!(std::array::from_fn(|layer| layers[layer].held), held, "held");
    assert_eq!(std::array::from_fn(|layer| layers[layer].digest), digest, "digests");
    for (name, holder) in worker.extras.keys() {
        assert!(
            holders_of.get(&name).is_some_and(|holders| holders.contains(&holder)),
            "{name:?} has a second reference only"
        );
    }
}
