//! The fast path of a store: runs of blocks at a time.
//!
//! The fast path serves nearly all stores of engines. It leaves some cases, without having changed anything, to
//! [`super::slow_path`]: a name that another block has, a block whose parent has no place, a second group, a place with
//! two names.
//!
//! Readers see all of a store at once: lower nodes are published before the nodes above them. Splits in the course of a
//! store change no answer.

use super::holders::{HolderBit, HolderState, Layer};
use super::new_blocks::{BlockSlice, DuplicateNames, StoreError};
use super::node::{Column, NodeId, Place, Run};
use super::tree::Tree;
use super::worker::{Worker, digest_of};
use super::{ShardLimits, StoreBlocks, StoreOutcome, types};
use crate::ids::{EngineHash, GroupId};
use smallvec::SmallVec;

/// Blocks of a store that are already in a node.
#[derive(Clone, Copy, Debug)]
struct MatchedRun {
    node: NodeId,
    from: u16,
    to: u16,
    /// The first of them in the store.
    at: usize,
    naming: Naming,
    /// The holder bit had an entry at the node before.
    known: bool,
}

/// How the worker's names get into a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Naming {
    /// A column has all of them.
    Same(u16),
    /// They are added to a column, from the block on at which it ends.
    Extend(u16, u16),
    /// They become a new column.
    New,
}

type Path = SmallVec<[MatchedRun; 8]>;

/// The layer, group and holder bit of a store.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoreTarget {
    pub(super) layer: Layer,
    pub(super) group: GroupId,
    pub(super) holder: HolderBit,
}

impl Worker {
    /// Applies a store, or refuses it without a change.
    ///
    /// Inlined, as [`find_last`](Self::find_last) is: a result that goes through memory, written in small parts and read in
    /// larger ones, waits until all stores before it are done.
    #[inline]
    pub(super) fn store_fast(
        &mut self,
        tree: &mut Tree,
        limits: &ShardLimits,
        store: &StoreBlocks<'_>,
    ) -> Result<StoreOutcome, StoreError> {
        let blocks = store.hashes.len();
        let slice = BlockSlice { locals: store.locals, names: store.hashes, seed: store.seed };
        let usual = self.dormant.is_empty() && !self.forked && blocks > 0 && blocks == store.locals.len();
        let countable = self.extras_most < u32::MAX;
        let fits =
            self.bound.all() + blocks as u64 <= self.blocks_max && self.bytes_with(tree, blocks) <= self.bytes_max;
        if !usual || !countable || !fits {
            return Err(StoreError::NeedsSlowPath);
        }
        let layer = self.layer(store.tier, store.group);
        let known = self.sole_holder(layer, store.group);
        if layer == Layer::Windows || (known.is_none() && !self.layers[layer.index()].groups.is_empty()) {
            return Err(StoreError::NeedsSlowPath);
        }
        let start = match store.parent {
            None => Place::ROOT,
            Some(parent) => self.find_last(tree, parent).ok_or(StoreError::NeedsSlowPath)?.following(),
        };
        if let Some(holder) = known
            && tree.append_in_room(start, holder, slice)?
        {
            self.show_appended(tree, StoreTarget { layer, group: store.group, holder }, slice, start);
            return Ok(StoreOutcome { stored: blocks as u32, ..StoreOutcome::default() });
        }
        let mut path = Path::new();
        let place = self.follow(tree, start, slice, &mut path)?;
        let on_path = path.last().map_or(0, |last| last.at + usize::from(last.to - last.from));
        let is_repeated = store.parent.is_none() && on_path == blocks;
        if is_repeated && !limits.counts_copies && self.is_ambiguous(tree, known, store, &path) {
            return Ok(StoreOutcome { ambiguous: true, already: blocks as u32, ..StoreOutcome::default() });
        }
        let holder = match known {
            Some(holder) => holder,
            None => {
                tree.holders.give(self.slot, self.life, layer, HolderState::Shown).ok_or(StoreError::NeedsSlowPath)?
            }
        };
        let target = StoreTarget { layer, group: store.group, holder };
        if known.is_none() {
            self.all_holders.push(holder);
        }
        let taken = self.take(tree, target, slice, &mut path, place);
        if taken.is_err() && known.is_none() {
            self.all_holders.pop();
            tree.holders.set_state(holder, HolderState::Free);
        }
        let already = taken?;
        self.layers[target.layer.index()].references += blocks as u64;
        Ok(StoreOutcome { stored: blocks as u32, already, ..StoreOutcome::default() })
    }

    /// Adds a layer's first group.
    fn announce(&mut self, tree: &mut Tree, target: StoreTarget) {
        self.add_group(target.layer, target.group, target.holder);
        self.layers[target.layer.index()].shown = target.holder;
        tree.publish_holders();
    }

    /// Follows a store along the existing nodes, from the place where its first block belongs. Adds the runs that it
    /// matches to `path`, and returns the place behind the last.
    fn follow(
        &self,
        tree: &Tree,
        mut place: Place,
        slice: BlockSlice<'_>,
        path: &mut Path,
    ) -> Result<Place, StoreError> {
        let mut at = 0;
        while at < slice.len() {
            let node = &tree.nodes[place.node];
            if place.at == node.len {
                if !node.has_children() {
                    break;
                }
                match tree.child(place.node, slice.locals[at], 0) {
                    Some(child) if tree.nodes[child].forks > 0 => return Err(StoreError::NeedsSlowPath),
                    Some(child) => place = Place { node: child, at: 0 },
                    None => break,
                }
                continue;
            }
            let rest = slice.from(at);
            let run = super::simd::common_prefix(&tree.locals(place.node)[usize::from(place.at)..], rest.local_words());
            if run == 0 {
                break;
            }
            let to = place.at + run as u16;
            let naming = self.naming(tree, place, rest.first(run))?;
            path.push(MatchedRun { node: place.node, from: place.at, to, at, naming, known: false });
            (place.at, at) = (to, at + run);
        }
        Ok(place)
    }

    /// How a run's names are in a node, or can get there.
    fn naming(&self, tree: &Tree, place: Place, run: BlockSlice<'_>) -> Result<Naming, StoreError> {
        let node = &tree.nodes[place.node];
        if !tree.duplicate_names.is_empty() && run.names.iter().any(|name| tree.duplicate_names.contains_key(name)) {
            return Err(StoreError::NeedsSlowPath);
        }
        let fits = |at: u16, column: &Column| {
            let known = tree.names(column).get(usize::from(place.at)..).ok_or(StoreError::NeedsSlowPath)?;
            let known = &known[..known.len().min(run.len())];
            if column.seed != run.seed || known != &run.name_words()[..known.len()] {
                return Err(StoreError::NeedsSlowPath);
            }
            let to = place.at + run.len() as u16;
            Ok(if column.len >= to { Naming::Same(at) } else { Naming::Extend(at, column.len) })
        };
        match self.column_of(node) {
            Some(at) => fits(at, &node.columns[usize::from(at)]),
            None if place.at > 0 => Err(StoreError::NeedsSlowPath),
            None => {
                let same =
                    |column: &Column| column.seed == run.seed && tree.names(column).first() == run.name_words().first();
                match node.columns.iter().position(same) {
                    Some(at) => fits(at as u16, &node.columns[at]),
                    None => Ok(Naming::New),
                }
            }
        }
    }

    /// Whether the holder bit held all blocks of a store at the root before the batch began.
    fn is_ambiguous(&mut self, tree: &Tree, holder: Option<HolderBit>, store: &StoreBlocks<'_>, path: &Path) -> bool {
        let Some(holder) = holder else { return false };
        let held = path.iter().all(|found| {
            let entry = tree.nodes[found.node].entry(holder);
            entry.is_some_and(|entry| (found.from..found.to).all(|at| entry.covers(at)))
        });
        held && !self.is_new_in_batch(store.tier.into(), store.group, store.hashes)
    }

    /// Whether a group has referred to one of these held blocks since this batch only.
    pub(super) fn is_new_in_batch(&mut self, layer: Layer, group: GroupId, names: &[EngineHash]) -> bool {
        let mut groups = self.layers[layer.index()].groups.iter_mut();
        groups.find(|holder| holder.group == group).is_some_and(|holder| holder.new_references.has_any(names))
    }

    /// Applies a store that has been followed; returns how many blocks already had a reference.
    fn take(
        &mut self,
        tree: &mut Tree,
        target: StoreTarget,
        slice: BlockSlice<'_>,
        path: &mut Path,
        mut place: Place,
    ) -> Result<u32, StoreError> {
        let on_path = path.last().map_or(0, MatchedRun::end);
        let tail = slice.from(on_path);
        if tail.len() > 0 && place.at < tree.nodes[place.node].len {
            let prefix = tree.split(place.node, place.at);
            if let Some(last) = path.last_mut().filter(|last| last.node == place.node) {
                last.node = prefix;
                last.naming = self.naming(tree, Place { node: prefix, at: last.from }, last.of(slice))?;
            }
            place.node = prefix;
        }
        self.name_path(tree, target.holder, slice, path)?;
        let grown = match grow(tree, target, tail, place) {
            Ok(grown) => grown,
            Err(error) => {
                undo_naming(tree, target.holder, path);
                return Err(error);
            }
        };
        if self.layers[target.layer.index()].groups.is_empty() {
            self.announce(tree, target);
        }
        Ok(self.show(tree, target, slice, path, &grown))
    }

    /// Writes the names that are missing, and enters the holder bit at every node of the path.
    fn name_path(
        &self,
        tree: &mut Tree,
        holder: HolderBit,
        slice: BlockSlice<'_>,
        path: &mut Path,
    ) -> Result<(), StoreError> {
        for step in 0..path.len() {
            let found = &mut path[step];
            found.known = tree.nodes[found.node].entry(holder).is_some();
            let run = found.of(slice);
            let named = match found.naming {
                Naming::Same(column) => Ok(column),
                Naming::Extend(column, from) => tree
                    .extend_column(
                        found.node,
                        column,
                        run.from(usize::from(from - found.from)),
                        DuplicateNames::Refused,
                    )
                    .map(|()| column),
                Naming::New => tree.new_column(found.node, run, DuplicateNames::Refused),
            };
            match named {
                Ok(column) => {
                    tree.enter(found.node, holder, column);
                }
                Err(error) => {
                    undo_naming(tree, holder, &path[..step]);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Counts and publishes blocks that were [appended](Tree::append_in_room) at a place.
    fn show_appended(&mut self, tree: &mut Tree, target: StoreTarget, slice: BlockSlice<'_>, at: Place) {
        self.gain(target, slice.names);
        self.bound.change((0, 1 << target.layer.index()), slice.len() as u64);
        self.layers[target.layer.index()].references += slice.len() as u64;
        tree.publish_longer(at.node);
        if let Some(last) = slice.names.last() {
            self.last = (*last, Place { at: at.at + slice.len() as u16 - 1, ..at });
        }
    }

    /// Publishes the prepared changes, farthest from the root first.
    fn show(&mut self, tree: &mut Tree, target: StoreTarget, slice: BlockSlice<'_>, path: &Path, grown: &Grown) -> u32 {
        grown.nodes.iter().rev().for_each(|id| tree.insert(*id));
        let tail = slice.from(path.last().map_or(0, MatchedRun::end));
        self.gain(target, tail.names);
        self.bound.change((0, 1 << target.layer.index()), tail.len() as u64);
        let mut shown = grown.at;
        let mut changed = grown.appended > 0 || (grown.first_child && !grown.nodes.is_empty());
        let mut already = 0;
        for found in path.iter().rev() {
            if found.node != shown && changed {
                tree.publish(shown);
                changed = false;
            }
            shown = found.node;
            let node = &mut tree.nodes[found.node];
            let Ok(entry) = node.find(target.holder) else { continue };
            let newly = node.entries[entry].add(found.from, found.to);
            self.count(node, target.layer, target.holder, &newly, false);
            changed |= !newly.is_empty();
            already += self.refer(target, *found, slice, &newly);
        }
        if changed {
            tree.publish(shown);
        }
        if let Some(last) = slice.names.last() {
            self.last = (*last, grown.last(tree, path));
        }
        already
    }

    /// Counts the references of a run of which the blocks in `newly` were not covered before; returns how many blocks
    /// were.
    fn refer(&mut self, target: StoreTarget, found: MatchedRun, slice: BlockSlice<'_>, newly: &[Run]) -> u32 {
        let names = found.of(slice).names;
        let mut again = found.from;
        let mut already = 0;
        for run in newly.iter().copied().chain([Run::new(found.to, found.to)]) {
            for at in again..run.from {
                self.refer_again(names[usize::from(at - found.from)], target.holder);
                already += 1;
            }
            self.gain(target, &names[usize::from(run.from - found.from)..usize::from(run.to - found.from)]);
            again = run.to;
        }
        already
    }

    /// Counts blocks to which the layer's only group now refers, so that the layer holds them.
    fn gain(&mut self, target: StoreTarget, names: &[EngineHash]) {
        let layer = &mut self.layers[target.layer.index()];
        layer.held += names.len() as u64;
        layer.digest = layer.digest.wrapping_add(digest_of(types::of_names(names)));
        self.note_new_references(target.layer, 0, names);
    }
}

impl MatchedRun {
    const fn end(&self) -> usize {
        self.at + (self.to - self.from) as usize
    }

    fn of<'a>(&self, slice: BlockSlice<'a>) -> BlockSlice<'a> {
        slice.from(self.at).first(usize::from(self.to - self.from))
    }
}

/// What was made of the blocks that were in no node.
struct Grown {
    /// The node at or below which they are.
    at: NodeId,
    /// That node had no child before.
    first_child: bool,
    /// Blocks appended to it.
    appended: usize,
    /// New nodes below it.
    nodes: SmallVec<[NodeId; 4]>,
}

impl Grown {
    /// The place of the store's last block.
    fn last(&self, tree: &Tree, path: &Path) -> Place {
        let node = match (self.nodes.last(), path.last()) {
            (Some(node), _) => *node,
            (None, Some(found)) if self.appended == 0 => return Place { node: found.node, at: found.to - 1 },
            _ => self.at,
        };
        Place { node, at: tree.nodes[node].len - 1 }
    }
}

/// Adds the blocks that are in no node below the place where the store leaves the existing nodes.
fn grow(tree: &mut Tree, target: StoreTarget, tail: BlockSlice<'_>, place: Place) -> Result<Grown, StoreError> {
    let mut grown = Grown { at: place.node, first_child: false, appended: 0, nodes: SmallVec::new() };
    if tail.len() == 0 {
        return Ok(grown);
    }
    let len = tree.nodes[place.node].len;
    if tree.may_append(place.node, target.holder, tail.seed) {
        grown.appended = tree.append(place.node, tail, DuplicateNames::Refused)?;
    }
    grown.first_child = !tree.nodes[place.node].has_children();
    match tree.chain(place.node, target.holder, tail.from(grown.appended)) {
        Ok(nodes) => grown.nodes = nodes,
        Err(error) => {
            tree.unappend(place.node, len);
            return Err(error);
        }
    }
    Ok(grown)
}

/// Undoes [`Worker::name_path`] for some nodes.
fn undo_naming(tree: &mut Tree, holder: HolderBit, path: &[MatchedRun]) {
    for found in path {
        if let Naming::Extend(column, from) = found.naming {
            tree.truncate_column(found.node, column, from);
        }
        if let Ok(entry) = tree.nodes[found.node].find(holder)
            && !found.known
        {
            tree.remove_entry(found.node, entry);
        }
    }
}
