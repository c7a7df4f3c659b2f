//! What the writer knows of one worker beside the tree: counts, bounds, dormant blocks, references beyond the first,
//! and the references that are new in the current batch.

use super::holders::{HolderBit, Layer};
use super::new_references::{NewReferences, SpareLists};
use super::node::{Bits, Node, NodeId, Place, Run};
use super::tree::Tree;
use super::{ShardLimits, TierDigest, WorkerBlocks};
use crate::ids::{EngineHash, GroupId, LocalHash, Seed, Tier, WorkerSlot};
use crate::limits::{INDEX_BLOCK_BYTES, INDEX_NODE_BYTES};
use hashbrown::HashMap;
use smallvec::SmallVec;

/// The references of one group in one layer.
#[derive(Clone, Debug)]
pub(super) struct GroupHolder {
    pub(super) group: GroupId,
    pub(super) holder: HolderBit,
    /// Blocks that it refers to since this batch only.
    pub(super) new_references: NewReferences,
}

/// One layer of a worker.
#[derive(Clone, Debug)]
pub(super) struct LayerState {
    /// Groups seen in a store since the tier was last cleared.
    pub(super) groups: SmallVec<[GroupHolder; 1]>,
    /// What readers see: the holder bit of the only group, or one for the blocks to which all groups refer.
    pub(super) shown: HolderBit,
    pub(super) held: u64,
    pub(super) references: u64,
    pub(super) digest: u64,
}

impl Default for LayerState {
    fn default() -> Self {
        Self { groups: SmallVec::new(), shown: HolderBit::NONE, held: 0, references: 0, digest: 0 }
    }
}

/// One life of a worker: from when it is added, or cleared as a whole, to the next such moment.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) slot: WorkerSlot,
    pub(super) life: u64,
    pub(super) blocks_max: u64,
    pub(super) bytes_max: u64,
    pub(super) layers: [LayerState; Layer::COUNT],
    /// Every holder bit of which nodes may have entries: of groups, shown, or retired in this life.
    pub(super) all_holders: SmallVec<[HolderBit; 4]>,
    pub(super) bound: BoundBlocks,
    pub(super) dormant: DormantBlocks,
    /// The last block stored by the fast path, and its place: the parent of most next stores.
    pub(super) last: (EngineHash, Place),
    /// References beyond the first.
    pub(super) extras: Extras,
    /// The highest count that `extras` has ever had.
    pub(super) extras_most: u32,
    /// Estimate of the names of removed inner blocks in the tree, from the worker's own events.
    pub(super) removed_inner_blocks: u64,
    /// The worker's part of the tree's totals: bytes, blocks with a place.
    accounted: (u64, u64),
    /// Names that have a place and may have dormant children, to which a sweep gives places.
    pub(super) placement_queue: Vec<EngineHash>,
    /// How many blocks the current event may still move.
    pub(super) allowance: Allowance,
    /// The worker has given one content two names at one place, or has been at such a place: its events may touch
    /// several chains that one query walks.
    pub(super) forked: bool,
    /// How many of the last blocks of a prompt its window groups must have.
    pub(super) window_blocks: u32,
    /// A sweep has emptied the worker, and the caller has not asked for that yet.
    pub(super) emptied_by_sweep: bool,
    /// Whether new blocks are refused, because memory is short.
    pub(super) is_held_back: bool,
}

/// How many of a worker's blocks one event, or one slice of a sweep, may place or displace.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Allowance {
    /// Dormant blocks that may get a place.
    pub(super) placements: usize,
    /// Blocks that may lose their places.
    pub(super) displacements: usize,
    /// Dormant blocks that the worker may have.
    pub(super) dormant_max: usize,
    /// More was necessary than is allowed: the worker must be emptied.
    pub(super) exhausted: bool,
}

/// A worker at a node with more children than this is assumed to be at one of them.
const SEED_CHILDREN_MAX: usize = 1024;

/// A block's part of a digest: its engine hash, mixed so that sums tell sets apart.
pub(super) const fn mixed(name: u64) -> u64 {
    let name = (name ^ name >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    name ^ name >> 29
}

pub(super) fn digest_of(names: &[u64]) -> u64 {
    names.iter().fold(0, |sum, name| sum.wrapping_add(mixed(*name)))
}

impl Worker {
    pub(super) fn new(slot: WorkerSlot, life: u64, (blocks_max, bytes_max): (u64, u64)) -> Self {
        Self {
            slot,
            life,
            blocks_max,
            bytes_max,
            layers: std::array::from_fn(|_| LayerState::default()),
            all_holders: SmallVec::new(),
            bound: BoundBlocks::default(),
            dormant: DormantBlocks::default(),
            extras: Extras::default(),
            last: (EngineHash(0), Place::ROOT),
            extras_most: 0,
            removed_inner_blocks: 0,
            accounted: (0, 0),
            placement_queue: Vec::new(),
            allowance: Allowance::default(),
            forked: false,
            window_blocks: 0,
            emptied_by_sweep: false,
            is_held_back: false,
        }
    }

    /// The layer in which a group of a tier counts: sliding windows count apart from the tier.
    pub(super) fn layer(&self, tier: Tier, group: GroupId) -> Layer {
        let windows = &self.layers[Layer::Windows.index()].groups;
        let is_window = tier == Tier::Device && windows.iter().any(|window| window.group == group);
        if is_window { Layer::Windows } else { tier.into() }
    }

    /// Adds a group to a layer.
    pub(super) fn add_group(&mut self, layer: Layer, group: GroupId, holder: HolderBit) {
        let new_references = NewReferences::default();
        self.layers[layer.index()].groups.push(GroupHolder { group, holder, new_references });
    }

    pub(super) fn group(&self, layer: Layer, group: GroupId) -> Option<&GroupHolder> {
        self.layers[layer.index()].groups.iter().find(|holder| holder.group == group)
    }

    /// The holder bit of the layer's only group, if it has no other.
    pub(super) fn sole_holder(&self, layer: Layer, group: GroupId) -> Option<HolderBit> {
        match &self.layers[layer.index()].groups[..] {
            [only] if only.group == group => Some(only.holder),
            _ => None,
        }
    }

    /// The holder bits that count references, with their layers.
    pub(super) fn references(&self) -> impl Iterator<Item = (Layer, HolderBit)> + '_ {
        let layers = Layer::ALL.into_iter().zip(&self.layers);
        layers.flat_map(|(layer, state)| state.groups.iter().map(move |group| (layer, group.holder)))
    }

    /// The column of a node that has the worker's names, if there is one.
    pub(super) fn column_of(&self, node: &Node) -> Option<u16> {
        match (&node.entries[..], &self.all_holders[..]) {
            ([], _) | (_, []) => None,
            ([entry], all_holders) => all_holders.contains(&entry.holder).then_some(entry.column),
            (_, all_holders) => all_holders.iter().find_map(|holder| node.entry(*holder)).map(|entry| entry.column),
        }
    }

    /// Whether a block is bound: some layer refers to it.
    pub(super) fn binds(&self, node: &Node, at: u16) -> bool {
        match &node.entries[..] {
            [entry] => entry.covers(at) && self.groups().any(|group| group.holder == entry.holder),
            _ => self.groups().any(|group| node.entry(group.holder).is_some_and(|entry| entry.covers(at))),
        }
    }

    /// The groups of all layers.
    fn groups(&self) -> impl Iterator<Item = &GroupHolder> {
        self.layers.iter().flat_map(|layer| &layer.groups)
    }

    /// As [`find`](Self::find), for a name that was probably stored last.
    #[inline]
    pub(super) fn find_last(&self, tree: &Tree, name: EngineHash) -> Option<Place> {
        let (last, place) = self.last;
        let is_there = || {
            let node = tree.nodes.get(place.node)?;
            let (column, binds) = match (&node.entries[..], &self.layers[Layer::Device.index()].groups[..]) {
                // Nearly always the node is the worker's alone, and the worker has one group on its device. What the last
                // arm finds is then known.
                ([entry], [group]) if entry.holder == group.holder => (entry.column, entry.covers(place.at)),
                _ => (self.column_of(node)?, self.binds(node, place.at)),
            };
            let column = node.columns.get(usize::from(column))?;
            let same = place.at < column.len && tree.name(column.names.base + u32::from(place.at)) == name;
            (same && binds).then_some(place)
        };
        let found = if last == name && place != Place::ROOT { is_there() } else { None };
        found.or_else(|| self.find(tree, name).map(|(place, _)| place))
    }

    /// The place of a bound block, if it has one, and its word.
    pub(super) fn find(&self, tree: &Tree, name: EngineHash) -> Option<(Place, u32)> {
        let mut found = None;
        let word = tree.name_map.find(tree.name_map.spot(name.0), |word| {
            if tree.name(word) != name {
                return false;
            }
            let Some((place, column)) = tree.resolve(word) else { return false };
            let node = &tree.nodes[place.node];
            let is_it = self.column_of(node) == Some(column) && self.binds(node, place.at);
            found = is_it.then_some(place);
            is_it
        })?;
        found.map(|place| (place, word))
    }

    /// The worker's name of the block before a place; `None` for the first of a chain.
    pub(super) fn name_before(&self, tree: &Tree, place: Place) -> Option<EngineHash> {
        let (id, at) = match place.at.checked_sub(1) {
            Some(at) => (place.node, at),
            None => {
                let parent = tree.nodes[place.node].parent;
                if parent == NodeId::ROOT {
                    return None;
                }
                (parent, tree.nodes[parent].len - 1)
            }
        };
        let node = &tree.nodes[id];
        let column = node.columns[usize::from(self.column_of(node)?)];
        Some(tree.name(column.names.base + u32::from(at)))
    }

    /// The blocks of a node to which each layer refers, by a holder bit other than `without`.
    fn layer_bits(&self, node: &Node, without: HolderBit) -> [Bits; Layer::COUNT] {
        let mut bits = std::array::from_fn(|_| Bits::EMPTY);
        for (layer, holder) in self.references() {
            if let Some(entry) = node.entry(holder).filter(|_| holder != without) {
                let of = &mut bits[layer.index()];
                *of = std::mem::replace(of, Bits::EMPTY).or(&entry.bits());
            }
        }
        bits
    }

    /// Whether the worker has only one holder bit, so that no other can refer to a block.
    fn is_plain(&self) -> bool {
        self.references().nth(1).is_none()
    }

    /// Counts blocks to which a holder bit refers from now on, or no longer refers (`gone`).
    pub(super) fn count(&mut self, node: &Node, layer: Layer, holder: HolderBit, runs: &[Run], gone: bool) {
        let bit = 1_usize << layer.index();
        let sets = |others: usize| if gone { (others | bit, others) } else { (others, others | bit) };
        if self.is_plain() {
            let blocks = runs.iter().map(|run| u64::from(run.len())).sum();
            self.bound.change(sets(0), blocks);
            return;
        }
        let layers = self.layer_bits(node, holder);
        for at in runs.iter().flat_map(|run| run.from..run.to) {
            let others =
                (0..Layer::COUNT).filter(|layer| layers[*layer].contains(at)).fold(0, |set, layer| set | 1 << layer);
            if others & bit == 0 {
                self.bound.change(sets(others), 1);
            }
        }
    }

    /// Forgets the references of a layer; returns the holder bits that no longer count.
    pub(super) fn clear_layer(&mut self, layer: Layer) -> Vec<HolderBit> {
        let cleared = std::mem::take(&mut self.layers[layer.index()]);
        let mut holders: Vec<HolderBit> = cleared.groups.iter().map(|group| group.holder).collect();
        if cleared.shown.is_some() && !holders.contains(&cleared.shown) {
            holders.push(cleared.shown);
        }
        let bit = 1_usize << layer.index();
        for layers in (0..Layer::SETS).filter(|layers| layers & bit != 0) {
            self.bound.change((layers, layers & !bit), self.bound.of(layers));
        }
        self.extras.forget(&holders);
        self.dormant.forget(&holders);
        holders
    }

    pub(super) fn seed_of(&self, tree: &Tree, name: EngineHash) -> Option<Seed> {
        if let Some(block) = self.dormant.get(name) {
            return Some(block.seed);
        }
        let column_at = |place: Place| {
            let node = &tree.nodes[place.node];
            self.column_of(node).map(|at| node.columns[usize::from(at)].seed)
        };
        if let Some(place) = self.find_last(tree, name) {
            return column_at(place);
        }
        if let Some(child) = self.dormant.children(name).next() {
            return self.dormant.get(child).map(|block| block.seed);
        }
        let words = tree.words_named(name);
        let mut places = words.into_iter().filter_map(|word| tree.resolve(word));
        places.find_map(|(place, column)| {
            let node = &tree.nodes[place.node];
            let is_it = self.column_of(node) == Some(column) && self.holds_behind(tree, place);
            is_it.then(|| column_at(place)).flatten()
        })
    }

    /// Whether the worker has bound blocks behind a place in its node, or may have some below.
    fn holds_behind(&self, tree: &Tree, place: Place) -> bool {
        let node = &tree.nodes[place.node];
        let beyond = |holder: HolderBit| node.entry(holder).is_some_and(|entry| entry.end() > place.at + 1);
        if self.references().any(|(_, holder)| beyond(holder)) {
            return true;
        }
        let mut children = tree.nodes.children(place.node);
        let below = |child: NodeId| self.column_of(&tree.nodes[child]).is_some();
        children.by_ref().take(SEED_CHILDREN_MAX).any(below) || children.next().is_some()
    }

    /// An upper bound of what the worker's blocks take of the index after `more` are stored, if no other worker shares
    /// them: bytes for each block, and bytes for each node with an entry of the worker.
    pub(super) fn bytes_with(&self, tree: &Tree, more: usize) -> u64 {
        let nodes_of = |group: &GroupHolder| u64::from(tree.holders.record(group.holder).nodes);
        let nodes = self.layers.iter().map(|layer| layer.groups.iter().map(nodes_of).sum::<u64>()).sum::<u64>();
        // The new blocks may begin that many nodes.
        let (blocks, nodes) =
            (self.bound.all() + more as u64, nodes + more.div_ceil(usize::from(tree.node_blocks_max)) as u64);
        // What the worker takes beside the tree was counted after its last event.
        blocks * INDEX_BLOCK_BYTES + nodes * INDEX_NODE_BYTES + self.accounted.0
    }

    pub(super) fn figures(&self) -> WorkerBlocks {
        WorkerBlocks {
            bound: self.bound.all(),
            by_tier: std::array::from_fn(|tier| self.layers[tier].held),
            references: std::array::from_fn(|tier| self.layers[tier].references),
            dormant: self.dormant.len() as u64,
        }
    }

    pub(super) fn digest(&self, layer: Layer) -> TierDigest {
        let layer = &self.layers[layer.index()];
        TierDigest { blocks: layer.held, digest: layer.digest }
    }

    /// Notes blocks to which a group refers since this batch only.
    pub(super) fn note_new_references(&mut self, layer: Layer, group: usize, names: &[EngineHash]) {
        self.layers[layer.index()].groups[group].new_references.note(names);
    }

    /// Begins a batch: the new references of the one before are no longer new. Groups take their lists from `spare`.
    /// Returns whether the worker's memory changed.
    pub(super) fn begin_batch(&mut self, spare: &mut SpareLists) -> bool {
        let mut changed = false;
        for layer in &mut self.layers {
            for group in &mut layer.groups {
                changed |= group.new_references.begin(spare);
            }
        }
        changed
    }

    /// Ends a batch: its lists of new references go to `spare`. Returns whether the worker's memory changed.
    pub(super) fn end_batch(&mut self, spare: &mut SpareLists) -> bool {
        let mut changed = false;
        for layer in &mut self.layers {
            for group in &mut layer.groups {
                changed |= group.new_references.end(spare);
            }
        }
        changed
    }

    /// Adds a reference to a block to which the holder bit already refers.
    pub(super) fn refer_again(&mut self, name: EngineHash, holder: HolderBit) {
        let extra = self.extras.get(name, holder) + 1;
        self.extras.set(name, holder, extra);
        self.extras_most = self.extras_most.max(extra);
    }

    /// Brings the tree's totals up to date with the worker.
    pub(super) fn account(&mut self, tree: &mut Tree) {
        let now = (self.bytes(), self.bound.all() - self.dormant.len() as u64);
        let (bytes, placed) = std::mem::replace(&mut self.accounted, now);
        tree.workers_bytes = tree.workers_bytes + now.0 - bytes;
        tree.placed = tree.placed + now.1 - placed;
    }

    /// As [`account`](Self::account), after an event of the worker. `names_before` is the number of names before the
    /// event. Names added beyond the blocks that were placed, or kept beyond the blocks that stayed, belong to removed
    /// inner blocks.
    pub(super) fn account_for(&mut self, tree: &mut Tree, names_before: usize) {
        let placed_before = self.accounted.1;
        self.account(tree);
        let (names, placed) = (tree.name_map.len() as u64, self.accounted.1);
        self.removed_inner_blocks =
            (self.removed_inner_blocks + names + placed_before).saturating_sub(names_before as u64 + placed);
    }

    /// Caps the estimate of removed inner blocks at the names of the shard that no worker holds; returns whether it is
    /// within the limit. Other workers may have taken over such names or given them up, or a sweep has removed them.
    pub(super) fn recount_removed_inner_blocks(&mut self, tree: &Tree, limits: &ShardLimits) -> bool {
        self.removed_inner_blocks =
            self.removed_inner_blocks.min((tree.name_map.len() as u64).saturating_sub(tree.placed));
        self.removed_inner_blocks <= limits.dormant_blocks_max as u64
    }

    /// Takes the worker, which is gone, out of the tree's totals.
    pub(super) fn unaccount(&mut self, tree: &mut Tree) {
        let (bytes, placed) = std::mem::take(&mut self.accounted);
        tree.workers_bytes -= bytes;
        tree.placed -= placed;
    }

    /// How much [`bytes`](Self::bytes) may grow when `blocks` are stored.
    pub(super) fn growth_bytes(&self, blocks: usize) -> u64 {
        let lists = self.groups().map(|group| group.new_references.growth_bytes(blocks)).max().unwrap_or(0);
        lists as u64 + self.dormant.growth_bytes(if self.dormant.is_empty() { 0 } else { blocks })
    }

    pub(super) fn bytes(&self) -> u64 {
        // Each layer by itself: one iterator over the groups of all layers takes three times the instructions.
        let of_layer =
            |layer: &LayerState| layer.groups.iter().map(|group| group.new_references.bytes()).sum::<usize>();
        let fresh = self.layers.iter().map(of_layer).sum::<usize>();
        let placement_queue = self.placement_queue.capacity() * size_of::<EngineHash>();
        self.dormant.bytes() + (fresh + self.extras.bytes() + placement_queue + size_of::<Self>()) as u64
    }
}

/// How many blocks of a worker some layer refers to: all of them, and by the set of layers that do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct BoundBlocks {
    all: u64,
    by_layers: [u64; Layer::SETS],
}

impl BoundBlocks {
    pub(super) const fn all(&self) -> u64 {
        self.all
    }

    /// Blocks to which exactly this set of layers refers.
    const fn of(&self, layers: usize) -> u64 {
        self.by_layers[layers]
    }

    /// Moves blocks from one set of layers to another. No layer refers to those of the empty set, 0: they are not counted.
    pub(super) const fn change(&mut self, (from, to): (usize, usize), blocks: u64) {
        if from != 0 {
            self.by_layers[from] -= blocks;
            self.all -= blocks;
        }
        if to != 0 {
            self.by_layers[to] += blocks;
            self.all += blocks;
        }
    }
}

/// A bound block that has no place in the tree, because its chain to the root is unknown.
#[derive(Clone, Debug)]
pub(super) struct DormantBlock {
    /// `None` only for a block that lost its place below another one.
    pub(super) parent: Option<EngineHash>,
    pub(super) local: LocalHash,
    pub(super) seed: Seed,
    /// Holder bits with a reference to it; never empty.
    pub(super) holders: SmallVec<[HolderBit; 2]>,
    /// Its neighbours among the dormant blocks of the same parent.
    next: Option<EngineHash>,
    previous: Option<EngineHash>,
}

impl DormantBlock {
    pub(super) const fn new(
        parent: Option<EngineHash>,
        local: LocalHash,
        seed: Seed,
        holders: SmallVec<[HolderBit; 2]>,
    ) -> Self {
        Self { parent, local, seed, holders, next: None, previous: None }
    }
}

/// All dormant blocks of a worker, by name and by parent. No operation takes longer if many have the same parent.
#[derive(Debug, Default)]
pub(super) struct DormantBlocks {
    blocks: HashMap<EngineHash, DormantBlock>,
    /// The first dormant child of each parent; each child knows the next.
    children: HashMap<EngineHash, EngineHash>,
    /// How many dormant children of one parent have the same content.
    alike: HashMap<(EngineHash, LocalHash), u32>,
    /// How many children have been walked, so that a test can say that the work does not grow with the siblings.
    #[cfg(test)]
    walked: std::cell::Cell<u64>,
}

impl DormantBlocks {
    /// How many children have been walked.
    #[cfg(test)]
    pub(super) const fn walked(&self) -> u64 {
        self.walked.get()
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(super) fn get(&self, name: EngineHash) -> Option<&DormantBlock> {
        self.blocks.get(&name)
    }

    /// The holder bits that refer to a dormant block.
    pub(super) fn holders_mut(&mut self, name: EngineHash) -> Option<&mut SmallVec<[HolderBit; 2]>> {
        self.blocks.get_mut(&name).map(|block| &mut block.holders)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (EngineHash, &DormantBlock)> {
        self.blocks.iter().map(|(name, block)| (*name, block))
    }

    /// The dormant children of `parent`.
    pub(super) fn children(&self, parent: EngineHash) -> impl Iterator<Item = EngineHash> + '_ {
        let first = self.children.get(&parent).copied();
        std::iter::successors(first, |name| {
            #[cfg(test)]
            self.walked.set(self.walked.get() + 1);
            self.blocks.get(name)?.next
        })
    }

    /// How many dormant children of `parent` have this content.
    pub(super) fn alike(&self, parent: EngineHash, local: LocalHash) -> usize {
        self.alike.get(&(parent, local)).map_or(0, |blocks| *blocks as usize)
    }

    pub(super) fn insert(&mut self, name: EngineHash, block: DormantBlock) {
        let mut block = DormantBlock { next: None, previous: None, ..block };
        if let Some(parent) = block.parent {
            *self.alike.entry((parent, block.local)).or_insert(0) += 1;
            block.next = self.children.insert(parent, name);
            if let Some(next) = block.next.and_then(|next| self.blocks.get_mut(&next)) {
                next.previous = Some(name);
            }
        }
        self.blocks.insert(name, block);
    }

    pub(super) fn remove(&mut self, name: EngineHash) -> Option<DormantBlock> {
        let block = self.blocks.remove(&name)?;
        let Some(parent) = block.parent else { return Some(block) };
        if let Some(next) = block.next.and_then(|next| self.blocks.get_mut(&next)) {
            next.previous = block.previous;
        }
        match (block.previous.and_then(|previous| self.blocks.get_mut(&previous)), block.next) {
            (Some(previous), next) => previous.next = next,
            (None, Some(next)) => drop(self.children.insert(parent, next)),
            (None, None) => drop(self.children.remove(&parent)),
        }
        let alike = (parent, block.local);
        match self.alike.get_mut(&alike) {
            Some(blocks) if *blocks > 1 => *blocks -= 1,
            _ => drop(self.alike.remove(&alike)),
        }
        Some(block)
    }

    /// Removes holder bits from all blocks, and the blocks without any.
    fn forget(&mut self, holders: &[HolderBit]) {
        let mut gone = Vec::new();
        for (name, block) in &mut self.blocks {
            block.holders.retain(|holder| !holders.contains(holder));
            if block.holders.is_empty() {
                gone.push(*name);
            }
        }
        for name in gone {
            self.remove(name);
        }
    }

    /// Panics unless blocks and children agree.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let below = self.blocks.values().filter(|block| block.parent.is_some()).count();
        let known: usize = self.children.keys().map(|parent| self.children(*parent).count()).sum();
        assert_eq!((known, self.alike.values().sum::<u32>() as usize), (below, below), "children");
        for (name, block) in &self.blocks {
            assert!(block.parent.is_none_or(|parent| self.children(parent).any(|child| child == *name)), "{name:?}");
        }
    }

    /// How much memory `more` blocks may need in addition.
    pub(super) fn growth_bytes(&self, more: usize) -> u64 {
        if self.blocks.len() + more <= self.blocks.capacity() {
            return 0;
        }
        let entry = size_of::<(EngineHash, DormantBlock)>() + size_of::<((EngineHash, LocalHash), u32)>();
        let entries = ((self.blocks.len() + more) * 8 / 7).next_power_of_two();
        (entries * (entry + size_of::<(EngineHash, EngineHash)>())) as u64
    }

    pub(super) fn bytes(&self) -> u64 {
        let blocks = self.blocks.capacity() * size_of::<(EngineHash, DormantBlock)>();
        let children = self.children.capacity() * size_of::<(EngineHash, EngineHash)>();
        let alike = self.alike.capacity() * size_of::<((EngineHash, LocalHash), u32)>();
        (blocks + children + alike) as u64
    }
}

/// References to blocks beyond the first, for each holder bit. A clear drops those of its holder bits at once, however
/// many there are.
#[derive(Debug, Default)]
pub(super) struct Extras {
    holders: SmallVec<[(HolderBit, HashMap<EngineHash, u32>); 1]>,
}

impl Extras {
    pub(super) fn is_empty(&self) -> bool {
        self.holders.iter().all(|(_, counts)| counts.is_empty())
    }

    pub(super) fn get(&self, name: EngineHash, holder: HolderBit) -> u32 {
        let counts = self.holders.iter().find(|(of, _)| *of == holder);
        counts.and_then(|(_, counts)| counts.get(&name)).copied().unwrap_or(0)
    }

    /// Sets a count; returns the one before.
    pub(super) fn set(&mut self, name: EngineHash, holder: HolderBit, count: u32) -> u32 {
        let at = match self.holders.iter().position(|(of, _)| *of == holder) {
            Some(at) => at,
            None if count == 0 => return 0,
            None => {
                self.holders.push((holder, HashMap::default()));
                self.holders.len() - 1
            }
        };
        let counts = &mut self.holders[at].1;
        let before = if count == 0 { counts.remove(&name) } else { counts.insert(name, count) };
        before.unwrap_or(0)
    }

    /// Drops all counts of these holder bits.
    fn forget(&mut self, holders: &[HolderBit]) {
        self.holders.retain(|(of, _)| !holders.contains(of));
    }

    pub(super) fn bytes(&self) -> usize {
        let entry = size_of::<(EngineHash, u32)>();
        self.holders.iter().map(|(_, counts)| counts.capacity() * entry).sum()
    }

    #[cfg(test)]
    pub(super) fn keys(&self) -> impl Iterator<Item = (EngineHash, HolderBit)> + '_ {
        self.holders.iter().flat_map(|(holder, counts)| counts.keys().map(|name| (*name, *holder)))
    }
}
