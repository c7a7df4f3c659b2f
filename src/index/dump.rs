//! A dump of one worker: all its bindings, a slice at a time, as the stores that would bind them again.

use super::node::{Entry, NodeId, Place, Run, Runs};
use super::tree::Tree;
use super::worker::Worker;
use super::{ShardWriter, StoreBlocks, types};
use crate::ids::{EngineHash, GroupId, Tier, WorkerSlot};
use smallvec::SmallVec;

/// The progress of a dump. Valid as long as its worker does not change. Other workers may change meanwhile, because the
/// cursor names the last block and not its place.
#[derive(Clone, Debug, Default)]
pub struct DumpCursor {
    stage: Stage,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// Nothing has been dumped.
    #[default]
    Start,
    /// The blocks up to this one have been dumped, in the order of the walk.
    After(EngineHash),
    /// All blocks with a place have been dumped, and this many dormant ones.
    Dormant(usize),
    End,
}

impl ShardWriter {
    /// Dumps the next blocks of a worker, at least `blocks_max` if it has that many: chains nearest the root first, one
    /// store for each run of each group, and one more for each further reference. Returns whether there may be more.
    ///
    /// Dormant blocks are dumped with their bindings. A slot without a worker has no blocks.
    pub fn dump(
        &self,
        slot: WorkerSlot,
        cursor: &mut DumpCursor,
        blocks_max: usize,
        out: &mut dyn FnMut(StoreBlocks<'_>),
    ) -> bool {
        let Some(worker) = self.worker(slot) else { return false };
        let mut slice = Slice { tree: &self.tree, worker, given: 0, blocks_max: blocks_max.max(1), out };
        cursor.stage = match cursor.stage {
            Stage::Start => slice.walk(None),
            Stage::After(last) => slice.walk(Some(last)),
            Stage::Dormant(given) => slice.dormant(given),
            Stage::End => Stage::End,
        };
        cursor.stage != Stage::End
    }
}

/// The part of a dump that one call makes.
struct Slice<'a, 'o> {
    tree: &'a Tree,
    worker: &'a Worker,
    given: usize,
    blocks_max: usize,
    out: &'o mut dyn FnMut(StoreBlocks<'_>),
}

impl Slice<'_, '_> {
    /// Continues behind the block `last`, depth first; a node's blocks come before those of nodes below it.
    fn walk(&mut self, last: Option<EngineHash>) -> Stage {
        let mut at = match last {
            None => self.below(NodeId::ROOT).map(|node| Place { node, at: 0 }),
            // If the worker has changed after all, the dump cannot continue here.
            Some(last) => self.worker.find(self.tree, last).map(|(place, _)| Place { at: place.at + 1, ..place }),
        };
        while let Some(place) = at {
            if let Some(last) = self.node(place) {
                return Stage::After(last);
            }
            at = self.below(place.node).or_else(|| self.beside(place.node)).map(|node| Place { node, at: 0 });
        }
        self.dormant(0)
    }

    /// The first node below one that has names of the worker.
    fn below(&self, id: NodeId) -> Option<NodeId> {
        self.tree.nodes.children(id).find(|child| self.is_at(*child))
    }

    /// The next node that has names of the worker, going up as far as necessary.
    fn beside(&self, mut id: NodeId) -> Option<NodeId> {
        while id != NodeId::ROOT {
            let mut next = self.tree.nodes[id].next;
            while next.is_some() {
                if self.is_at(next) {
                    return Some(next);
                }
                next = self.tree.nodes[next].next;
            }
            id = self.tree.nodes[id].parent;
        }
        None
    }

    fn is_at(&self, id: NodeId) -> bool {
        self.worker.column_of(&self.tree.nodes[id]).is_some()
    }

    /// Dumps a node's blocks from a place on. Returns the last of them if that fills the slice.
    fn node(&mut self, from: Place) -> Option<EngineHash> {
        let (tree, worker) = (self.tree, self.worker);
        let node = &tree.nodes[from.node];
        let column = node.columns[usize::from(worker.column_of(node)?)];
        let mut runs: SmallVec<[(Run, Tier, GroupId, &Entry); 4]> = SmallVec::new();
        for (tier, group) in groups(worker) {
            let Some(entry) = worker.group(tier.into(), group).and_then(|group| node.entry(group.holder)) else {
                continue;
            };
            let behind = entry.bits().runs().filter(|run| run.to > from.at).collect::<Runs>();
            runs.extend(behind.iter().map(|run| (Run::new(run.from.max(from.at), run.to), tier, group, entry)));
        }
        // A block of one group may be the child of a block that only another group has.
        runs.sort_by_key(|(run, ..)| run.from);
        for (run, tier, group, entry) in &runs {
            let parent = worker.name_before(tree, Place { at: run.from, ..from });
            let (base, blocks) = (u32::from(run.from), run.len());
            let hashes = types::as_names(tree.arena.words(column.names.base + base, blocks));
            let locals = types::as_locals(tree.arena.words(node.locals.base + base, blocks));
            let (tier, group) = (*tier, *group);
            self.give(&StoreBlocks { parent, hashes, locals, tier, group, seed: column.seed }, entry);
        }
        let last = runs.iter().map(|(run, ..)| run.to - 1).max().filter(|_| self.given >= self.blocks_max)?;
        Some(tree.name(column.names.base + u32::from(last)))
    }

    /// Dumps one run, and each block of it again for each further reference.
    fn give(&mut self, run: &StoreBlocks<'_>, entry: &Entry) {
        (self.out)(*run);
        self.given += run.hashes.len();
        self.again(run, entry.holder);
    }

    fn again(&mut self, run: &StoreBlocks<'_>, holder: super::holders::HolderBit) {
        if self.worker.extras.is_empty() {
            return;
        }
        for at in 0..run.hashes.len() {
            let more = self.worker.extras.get(run.hashes[at], holder);
            let parent = if at == 0 { run.parent } else { Some(run.hashes[at - 1]) };
            for _ in 0..more {
                let (hashes, locals) = (&run.hashes[at..=at], &run.locals[at..=at]);
                (self.out)(StoreBlocks { parent, hashes, locals, ..*run });
                self.given += 1;
            }
        }
    }

    /// Dumps the dormant blocks from the `given`th on.
    fn dormant(&mut self, mut given: usize) -> Stage {
        let worker = self.worker;
        for (name, block) in worker.dormant.iter().skip(given) {
            if self.given >= self.blocks_max {
                return Stage::Dormant(given);
            }
            for (tier, group) in groups(worker) {
                let holder = worker.group(tier.into(), group).map(|group| group.holder);
                let Some(holder) = holder.filter(|holder| block.holders.contains(holder)) else { continue };
                let (hashes, locals) = (&[name][..], &[block.local][..]);
                let run = StoreBlocks { parent: block.parent, hashes, locals, tier, group, seed: block.seed };
                (self.out)(run);
                self.given += 1;
                self.again(&run, holder);
            }
            given += 1;
        }
        Stage::End
    }
}

fn groups(worker: &Worker) -> impl Iterator<Item = (Tier, GroupId)> + '_ {
    Tier::ALL
        .into_iter()
        .flat_map(|tier| worker.layers[tier.index()].groups.iter().map(move |group| (tier, group.group)))
}
