//! The fast path of a store: runs of blocks at a time. And new blocks in the tree: their words, their nodes, and room
//! at the end of a leaf.
//!
//! The fast path serves nearly all stores of engines. It leaves some cases, without having changed anything, to
//! [`super::slow_path`]: a name that another block has, a block whose parent has no place, a second group, a place with
//! two names.
//!
//! Readers see all of a store at once: lower nodes are published before the nodes above them. Splits in the course of a
//! store change no answer.

use super::holders::{HolderBit, HolderState, Layer};
use super::name_map::SpotsAhead;
use super::node::{Column, Entry, Extent, GRANULE_WORDS, Node, NodeId, Place, Run};
use super::tree::Tree;
use super::worker::{Worker, digest_of};
use super::{ShardLimits, StoreBlocks, StoreOutcome, types};
use crate::ids::{EngineHash, GroupId, LocalHash, Seed};
use smallvec::{SmallVec, smallvec};

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
            Some(parent) => self.find_last(tree, parent).ok_or(StoreError::NeedsSlowPath)?.behind(),
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
        let batch = self.batch;
        let mut groups = self.layers[layer.index()].groups.iter_mut();
        groups.find(|holder| holder.group == group).is_some_and(|holder| holder.new_references.has_any(batch, names))
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

/// Why blocks could not be stored. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreError {
    /// A case for the slow path.
    NeedsSlowPath,
    /// The arena has run out of words.
    ArenaFull,
}

/// Whether a name may be stored that another word already has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DuplicateNames {
    Refused,
    Allowed,
}

/// Consecutive blocks of a store.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockSlice<'a> {
    pub(super) locals: &'a [LocalHash],
    pub(super) names: &'a [EngineHash],
    pub(super) seed: Seed,
}

impl<'a> BlockSlice<'a> {
    pub(super) fn from(&self, at: usize) -> Self {
        Self { locals: &self.locals[at..], names: &self.names[at..], seed: self.seed }
    }

    pub(super) fn first(&self, blocks: usize) -> Self {
        Self { locals: &self.locals[..blocks], names: &self.names[..blocks], seed: self.seed }
    }

    pub(super) const fn len(&self) -> usize {
        self.names.len()
    }

    fn local_words(&self) -> &'a [u64] {
        super::types::of_locals(self.locals)
    }

    pub(super) fn name_words(&self) -> &'a [u64] {
        super::types::of_names(self.names)
    }
}

impl Tree {
    pub(super) fn extent(&mut self, words: u16) -> Result<Extent, StoreError> {
        let granted = self.arena.allocate(u32::from(words)).ok_or(StoreError::ArenaFull)?;
        Ok(Extent::of(granted.base, granted.words))
    }

    /// Writes names and adds them to the map. If one of them is there already and may not be, removes them again.
    fn put_names(&mut self, base: u32, names: &[u64], duplicate_names: DuplicateNames) -> Result<(), StoreError> {
        self.arena.write(base, names);
        if duplicate_names == DuplicateNames::Allowed {
            for (at, name) in names.iter().enumerate() {
                self.put_name(*name, base + at as u32);
            }
            return Ok(());
        }
        let Self { name_map, arena, .. } = self;
        let name_of = |word: u32| arena.word(word);
        if let [name] = names {
            // What an engine generates comes block by block: there is no name ahead.
            let put = name_map.put_unless(name_map.spot(*name), base, |other| name_of(other) == *name, name_of);
            return put.map_err(|_| StoreError::NeedsSlowPath);
        }
        let mut spots = SpotsAhead::new(name_map, names);
        for (at, name) in names.iter().enumerate() {
            let spot = spots.next(name_map, names, at);
            let put = name_map.put_unless(spot, base + at as u32, |other| name_of(other) == *name, name_of);
            if put.is_err() {
                for (at, name) in names[..at].iter().enumerate() {
                    name_map.take(name_map.spot(*name), base + at as u32);
                }
                return Err(StoreError::NeedsSlowPath);
            }
        }
        Ok(())
    }

    /// Makes a chain of nodes below `parent` from blocks with new names; `holder` covers them all. Returns the nodes,
    /// nearest the root first. Readers see nothing of them until they are inserted.
    pub(super) fn chain(
        &mut self,
        parent: NodeId,
        holder: HolderBit,
        slice: BlockSlice<'_>,
    ) -> Result<SmallVec<[NodeId; 4]>, StoreError> {
        let mut made: SmallVec<[NodeId; 4]> = SmallVec::new();
        let (mut above, mut rest) = (parent, slice);
        while rest.len() > 0 {
            let len = rest.len().min(usize::from(self.node_blocks_max));
            match self.make(above, holder, rest.first(len), DuplicateNames::Refused) {
                Ok(id) => {
                    made.push(id);
                    above = id;
                }
                Err(error) => {
                    made.into_iter().rev().for_each(|id| self.unmake(id));
                    return Err(error);
                }
            }
            rest = rest.from(len);
        }
        Ok(made)
    }

    fn make(
        &mut self,
        parent: NodeId,
        holder: HolderBit,
        slice: BlockSlice<'_>,
        duplicate_names: DuplicateNames,
    ) -> Result<NodeId, StoreError> {
        let len = slice.len() as u16;
        let locals = self.extent(len)?;
        let names = match self.extent(len) {
            Ok(names) => names,
            Err(error) => {
                self.arena.free(locals.base, u32::from(locals.room));
                return Err(error);
            }
        };
        if let Err(error) = self.put_names(names.base, slice.name_words(), duplicate_names) {
            self.arena.free(locals.base, u32::from(locals.room));
            self.arena.free(names.base, u32::from(names.room));
            return Err(error);
        }
        self.arena.write(locals.base, slice.local_words());
        let id = self.node(parent, locals, len);
        let node = &mut self.nodes[id];
        node.columns.push(Column { names, len, users: 1, seed: slice.seed });
        node.entries = smallvec![Entry { cut: len, ..Entry::anchor(holder, 0) }];
        self.holders.add_nodes(holder, 1);
        self.own_all(&names, id);
        Ok(id)
    }

    /// The nodes directly below one that begin with this content.
    pub(super) fn variants(&self, parent: NodeId, local: LocalHash) -> SmallVec<[NodeId; 2]> {
        let Some(main) = self.child(parent, local, 0) else { return SmallVec::new() };
        let mut all = smallvec![main];
        let mut variant = 1;
        while all.len() <= usize::from(self.nodes[main].forks) {
            all.extend(self.child(parent, local, variant));
            variant += 1;
        }
        all
    }

    /// Adds a node directly below one for a block that `others` may have there under other names. It is published at
    /// once: the holder bit has an entry there and covers nothing yet.
    pub(super) fn new_variant(
        &mut self,
        parent: NodeId,
        holder: HolderBit,
        slice: BlockSlice<'_>,
        others: &[NodeId],
    ) -> Result<NodeId, StoreError> {
        let was_leaf = !self.nodes[parent].has_children();
        let id = self.make(parent, holder, slice, DuplicateNames::Allowed)?;
        let taken = |variant: u8| others.iter().any(|other| self.nodes[*other].variant == variant);
        let variant = (0..=u8::MAX).find(|variant| !taken(*variant)).unwrap_or(u8::MAX);
        self.nodes[id].variant = variant;
        self.nodes[id].entries[0].cut = 0;
        self.insert(id);
        if let Some(main) = others.first() {
            self.nodes[*main].forks += 1;
            self.publish(*main);
        }
        if was_leaf {
            self.publish(parent);
        }
        Ok(id)
    }

    /// Enters a holder bit at a node's first block: into the column that has its name for that block, or into a new
    /// one.
    pub(super) fn newcomer(&mut self, id: NodeId, holder: HolderBit, slice: BlockSlice<'_>) -> Result<(), StoreError> {
        let same =
            |column: &Column| column.seed == slice.seed && self.names(column).first() == slice.name_words().first();
        let known = self.nodes[id].columns.iter().position(same).map(|at| at as u16);
        let column = match known {
            Some(column) => column,
            None => self.new_column(id, slice, DuplicateNames::Allowed)?,
        };
        self.enter(id, holder, column);
        Ok(())
    }

    /// A node below `parent` for blocks whose local hashes are written, without names.
    pub(super) fn node(&mut self, parent: NodeId, locals: Extent, len: u16) -> NodeId {
        let depth = self.nodes[parent].depth + u32::from(self.nodes[parent].len);
        let first = self.arena.word(locals.base);
        let node = Node { parent, depth, first, locals, len, written: len, initial: len, used: true, ..Node::EMPTY };
        let id = self.nodes.add(node);
        self.nodes.link(id);
        id
    }

    /// Undoes a node that no reader has seen.
    fn unmake(&mut self, id: NodeId) {
        let (locals, names) = (self.nodes[id].locals, self.nodes[id].columns[0]);
        self.take_names(&names.names, 0, names.len);
        self.arena.free(names.names.base, u32::from(names.names.room));
        self.arena.free(locals.base, u32::from(locals.room));
        for entry in &self.nodes[id].entries {
            self.holders.drop_node(entry.holder);
        }
        self.nodes.unlink(id);
        self.nodes.drop(id);
    }

    /// Whether blocks may be appended to a node: it is a leaf that only this holder bit covers, and wholly.
    pub(super) fn may_append(&self, id: NodeId, holder: HolderBit, seed: Seed) -> bool {
        let node = &self.nodes[id];
        let [entry] = &node.entries[..] else { return false };
        let [column] = &node.columns[..] else { return false };
        id != NodeId::ROOT
            && !node.has_children()
            && (node.forks, node.len < self.node_blocks_max) == (0, true)
            && (entry.holder, entry.cut, column.len, column.seed) == (holder, node.len, node.len, seed)
    }

    /// Appends a whole store to the leaf that ends at `place`, if the leaf [allows it](Self::may_append) and has room:
    /// the case of every block that an engine generates. Returns whether it did. Readers see the blocks when the node is
    /// [published](Self::publish_longer).
    fn append_in_room(&mut self, place: Place, holder: HolderBit, slice: BlockSlice<'_>) -> Result<bool, StoreError> {
        let node = &self.nodes[place.node];
        let len = node.len;
        if place.at != len || !self.may_append(place.node, holder, slice.seed) {
            return Ok(false);
        }
        let (locals, names) = (node.locals, node.columns[0].names);
        let room = self.node_blocks_max.min(locals.room).min(names.room) - len;
        // Behind what was cut off, a reader may still compare blocks.
        if slice.len() > usize::from(room) || node.written != len {
            return Ok(false);
        }
        self.put_names(names.base + u32::from(len), slice.name_words(), DuplicateNames::Refused)?;
        self.arena.write(locals.base + u32::from(len), slice.local_words());
        let end = len + slice.len() as u16;
        let node = &mut self.nodes[place.node];
        (node.len, node.written, node.columns[0].len, node.entries[0].cut) = (end, end, end, end);
        Ok(true)
    }

    /// Appends to a node that [allows it](Self::may_append) as many blocks as have room, and returns their number.
    /// Readers see them when the node is published.
    pub(super) fn append(
        &mut self,
        id: NodeId,
        slice: BlockSlice<'_>,
        duplicate_names: DuplicateNames,
    ) -> Result<usize, StoreError> {
        let node = &self.nodes[id];
        let len = node.len;
        let blocks = slice.len().min(usize::from(self.node_blocks_max - len));
        let slice = slice.first(blocks);
        // A reader may still compare blocks that were cut off here. Equal ones may stay; others must go elsewhere.
        let stale = usize::from(node.written - len).min(blocks);
        let base = node.locals.base + u32::from(len);
        if stale > 0 && self.arena.words(base, stale as u32) != &slice.local_words()[..stale] {
            return Ok(0);
        }
        if !self.make_room(id, len + blocks as u16)? {
            return Ok(0);
        }
        let node = &self.nodes[id];
        let (locals, names) = (node.locals, node.columns[0].names);
        self.put_names(names.base + u32::from(len), slice.name_words(), duplicate_names)?;
        let written = usize::from(self.nodes[id].written - len).min(blocks);
        self.arena.write(locals.base + u32::from(len) + written as u32, &slice.local_words()[written..]);
        let end = len + blocks as u16;
        let node = &mut self.nodes[id];
        node.len = end;
        node.written = node.written.max(end);
        node.columns[0].len = end;
        node.entries[0].cut = end;
        Ok(blocks)
    }

    /// Undoes an append beyond the first `len` blocks that was not published yet.
    fn unappend(&mut self, id: NodeId, len: u16) {
        if self.nodes[id].len <= len {
            return;
        }
        let column = self.nodes[id].columns[0];
        self.take_names(&column.names, len, column.len);
        let node = &mut self.nodes[id];
        node.len = len;
        node.columns[0].len = len;
        node.entries[0].cut = len;
    }

    /// Names the blocks of a node that follow those of a column.
    pub(super) fn extend_column(
        &mut self,
        id: NodeId,
        column: u16,
        slice: BlockSlice<'_>,
        duplicate_names: DuplicateNames,
    ) -> Result<(), StoreError> {
        let Column { names, len, .. } = self.nodes[id].columns[usize::from(column)];
        let wanted = len + slice.len() as u16;
        if names.room < wanted {
            let wider = self.widen(names, wanted);
            self.nodes[id].columns[usize::from(column)].names = wider;
            self.own_all(&wider, id);
            if wider.room < wanted {
                let room = (wanted * 2).min(self.nodes[id].len).max(wanted);
                self.move_names(id, usize::from(column), room)?;
            }
        }
        let base = self.nodes[id].columns[usize::from(column)].names.base + u32::from(len);
        self.put_names(base, slice.name_words(), duplicate_names)?;
        self.nodes[id].columns[usize::from(column)].len = wanted;
        Ok(())
    }

    /// Adds a column for the first blocks of a node; returns it, without users yet.
    fn new_column(
        &mut self,
        id: NodeId,
        slice: BlockSlice<'_>,
        duplicate_names: DuplicateNames,
    ) -> Result<u16, StoreError> {
        let names = self.extent(slice.len() as u16)?;
        if let Err(error) = self.put_names(names.base, slice.name_words(), duplicate_names) {
            self.arena.free(names.base, u32::from(names.room));
            return Err(error);
        }
        self.own_all(&names, id);
        let node = &mut self.nodes[id];
        node.columns.push(Column { names, len: slice.len() as u16, users: 0, seed: slice.seed });
        Ok(node.columns.len() as u16 - 1)
    }

    /// Forgets the names of a column from block `len` on.
    fn truncate_column(&mut self, id: NodeId, column: u16, len: u16) {
        let column = &mut self.nodes[id].columns[usize::from(column)];
        let Column { names, len: had, .. } = *column;
        column.len = len;
        self.take_names(&names, len, had);
    }

    /// Makes room for `wanted` blocks in a node with one column: in place, or elsewhere if enough blocks were appended
    /// so far to pay for the move.
    fn make_room(&mut self, id: NodeId, wanted: u16) -> Result<bool, StoreError> {
        let node = &self.nodes[id];
        let (locals, names) = (node.locals, node.columns[0].names);
        let roomy = |extent: &Extent| extent.room >= wanted;
        let locals = if roomy(&locals) { locals } else { self.widen(locals, wanted) };
        self.nodes[id].locals = locals;
        let names = if roomy(&names) { names } else { self.widen(names, wanted) };
        if names.room != self.nodes[id].columns[0].names.room {
            self.nodes[id].columns[0].names = names;
            self.own_all(&names, id);
        }
        if roomy(&locals) && roomy(&names) {
            return Ok(true);
        }
        let node = &self.nodes[id];
        if u32::from(node.len - node.initial) * 2 < u32::from(node.len) && node.len > GRANULE_WORDS as u16 {
            return Ok(false);
        }
        let room = (wanted * 2).min(self.node_blocks_max.next_multiple_of(GRANULE_WORDS as u16)).max(wanted);
        if !roomy(&locals) {
            self.move_locals(id, room)?;
        }
        if !roomy(&names) {
            self.move_names(id, 0, room)?;
        }
        Ok(true)
    }

    /// Lengthens an extent in place, if the words behind it are free.
    fn widen(&mut self, extent: Extent, wanted: u16) -> Extent {
        let base = extent.base / GRANULE_WORDS * GRANULE_WORDS;
        let end = extent.base + u32::from(extent.room);
        let wanted_end = (extent.base + u32::from(wanted)).next_multiple_of(GRANULE_WORDS);
        if !end.is_multiple_of(GRANULE_WORDS) || !self.arena.extend(base, end - base, wanted_end - base) {
            return extent;
        }
        Extent { room: (wanted_end - extent.base) as u16, ..extent }
    }

    /// Moves a node's local hashes to where there is more room. Readers are shown the new words at once, whatever the
    /// outcome of the event. The old words are reused after the readers that may look at them have left.
    fn move_locals(&mut self, id: NodeId, room: u16) -> Result<(), StoreError> {
        let to = self.extent(room)?;
        let (from, len) = (self.nodes[id].locals, self.nodes[id].len);
        self.arena.copy(from.base, to.base, u32::from(len));
        self.waste_locals(&from, 0);
        let node = &mut self.nodes[id];
        (node.locals, node.written) = (to, len);
        self.publish(id);
        Ok(())
    }

    /// Moves one of a node's columns to where there is more room.
    fn move_names(&mut self, id: NodeId, column: usize, room: u16) -> Result<(), StoreError> {
        let to = self.extent(room)?;
        let Column { names: from, len, .. } = self.nodes[id].columns[column];
        self.arena.copy(from.base, to.base, u32::from(len));
        self.rename(from.base, to.base, len);
        self.nodes[id].columns[column].names = to;
        self.release_names(id, from);
        self.own_all(&to, id);
        Ok(())
    }

    /// Lets names that have been copied lead to their new words.
    pub(super) fn rename(&mut self, from: u32, to: u32, len: u16) {
        let Self { name_map, arena, .. } = self;
        let names = arena.words(to, u32::from(len));
        let mut spots = SpotsAhead::new(name_map, names);
        for at in 0..u32::from(len) {
            let spot = spots.next(name_map, names, at as usize);
            let replaced = name_map.replace(spot, from + at, to + at);
            debug_assert!(replaced, "a name that moves was known");
        }
    }
}
