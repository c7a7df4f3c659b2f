//! What the writer knows of one worker beside the tree.
//!
//! Blocks of one worker that have no place in the tree: their chain to the root is not known.
//!
//! References of one worker beyond the first that a lane has to a block.
//!
//! Which blocks a group has come to refer to in the batch under way.

use super::holders::{HolderBit, Layer};
use super::node::{Bits, Node, NodeId, Place, Run};
use super::tree::Tree;
use super::{ShardLimits, TierDigest, WorkerBlocks};
use crate::ids::{EngineHash, GroupId, LocalHash, Seed, Tier, WorkerSlot};
use crate::limits::{INDEX_BLOCK_BYTES, INDEX_NODE_BYTES};
use hashbrown::{HashMap, HashSet};
use smallvec::SmallVec;

/// The references of one group in one tier.
#[derive(Clone, Debug)]
pub(super) struct GroupHolder {
    pub(super) group: GroupId,
    pub(super) holder: HolderBit,
    /// Blocks that it refers to since this batch only.
    pub(super) new_references: NewReferences,
}

/// One tier of a worker.
#[derive(Clone, Debug)]
pub(super) struct LayerState {
    /// Groups seen in a store since the tier was last cleared.
    pub(super) groups: SmallVec<[GroupHolder; 1]>,
    /// What readers see: the lane of the only group, or one of what all groups refer to.
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
    pub(super) batch: u64,
    pub(super) tiers: [LayerState; Layer::COUNT],
    /// Every lane by which nodes may know the worker: of groups, shown, or retired in this life.
    pub(super) all_holders: SmallVec<[HolderBit; 4]>,
    /// Bound blocks by the set of tiers that refer to them.
    pub(super) blocks_by_layers: [u64; Layer::SETS],
    pub(super) dormant: DormantBlocks,
    /// The last block stored the quick way and where it went: what the next store mostly hangs on.
    pub(super) last: (EngineHash, Place),
    /// References beyond the first.
    pub(super) extras: Extras,
    /// The most that a count of `extras` has ever been.
    pub(super) extras_most: u32,
    /// Names that its removes have left in the tree, as far as its own events tell: beneath them hang others.
    pub(super) removed_inner_blocks: u64,
    /// What the tree's totals have of it: bytes, blocks with a place.
    accounted: (u64, u64),
    /// Names that have a place and may have others waiting for them, which a sweep gives places.
    pub(super) placement_queue: Vec<EngineHash>,
    /// What the event under way may still move.
    pub(super) allowance: Allowance,
    /// It has given one content two names at one place, or has been at such a place: its events may touch
    /// several chains that one query walks.
    pub(super) forked: bool,
    /// How many of the last blocks of a prompt its window groups must have.
    pub(super) window_blocks: u32,
    /// A sweep has emptied the worker, and nobody has asked for that yet.
    pub(super) emptied_by_sweep: bool,
}

/// What one event, or one slice of a sweep, may move of a worker's blocks: out of their places, or to places.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Allowance {
    /// Blocks that may get a place which they waited for.
    pub(super) placements: usize,
    /// Blocks that may lose their places.
    pub(super) displacements: usize,
    /// Blocks of the worker that may wait.
    pub(super) dormant_max: usize,
    /// What is not allowed was necessary: the worker must be emptied.
    pub(super) exhausted: bool,
}

/// Beyond so many children a worker that was at their parent is taken to be at one of them.
const SEED_CHILDREN_MAX: usize = 1024;

/// What a block adds to a digest: its engine hash, mixed so that sums tell sets apart.
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
            batch: 0,
            tiers: std::array::from_fn(|_| LayerState::default()),
            all_holders: SmallVec::new(),
            blocks_by_layers: [0; Layer::SETS],
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
        }
    }

    /// In which layer a group of a tier counts: sliding windows count apart from what a tier holds.
    pub(super) fn layer(&self, tier: Tier, group: GroupId) -> Layer {
        let windows = &self.tiers[Layer::Windows.index()].groups;
        let is_window = tier == Tier::Device && windows.iter().any(|window| window.group == group);
        if is_window { Layer::Windows } else { tier.into() }
    }

    pub(super) fn group(&self, tier: Layer, group: GroupId) -> Option<&GroupHolder> {
        self.tiers[tier.index()].groups.iter().find(|holder| holder.group == group)
    }

    /// The tier's only group, if it has no other.
    pub(super) fn sole_holder(&self, tier: Layer, group: GroupId) -> Option<HolderBit> {
        match &self.tiers[tier.index()].groups[..] {
            [only] if only.group == group => Some(only.holder),
            _ => None,
        }
    }

    /// The lanes of references, with their tiers.
    pub(super) fn references(&self) -> impl Iterator<Item = (Layer, HolderBit)> + '_ {
        Layer::ALL
            .into_iter()
            .flat_map(|tier| self.tiers[tier.index()].groups.iter().map(move |group| (tier, group.holder)))
    }

    /// The column of a node that has the worker's names, if it is there.
    pub(super) fn column_of(&self, node: &Node) -> Option<u16> {
        match (&node.entries[..], &self.all_holders[..]) {
            ([], _) | (_, []) => None,
            ([entry], all_holders) => all_holders.contains(&entry.holder).then_some(entry.column),
            (_, all_holders) => all_holders.iter().find_map(|holder| node.entry(*holder)).map(|entry| entry.column),
        }
    }

    /// Whether a block is bound: some tier refers to it.
    pub(super) fn binds(&self, node: &Node, at: u16) -> bool {
        self.references().any(|(_, holder)| node.entry(holder).is_some_and(|entry| entry.covers(at)))
    }

    /// As [`find`](Self::find), for a name that was probably stored last.
    pub(super) fn find_last(&self, tree: &Tree, name: EngineHash) -> Option<Place> {
        let (last, place) = self.last;
        let is_there = || {
            let node = tree.nodes.get(place.node)?;
            let column = node.columns.get(usize::from(self.column_of(node)?))?;
            let same = place.at < column.len && tree.name(column.names.base + u32::from(place.at)) == name;
            (same && self.binds(node, place.at)).then_some(place)
        };
        let found = if last == name && place != Place::ROOT { is_there() } else { None };
        found.or_else(|| self.find(tree, name).map(|(place, _)| place))
    }

    /// Where the block is that a name is bound to, if it has a place.
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

    /// What the worker calls the block before one; `None` for the first of a chain.
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

    /// The blocks of a node to which each tier refers, by a lane other than `without`.
    fn tier_bits(&self, node: &Node, without: HolderBit) -> [Bits; Layer::COUNT] {
        let mut bits = std::array::from_fn(|_| Bits::EMPTY);
        for (tier, holder) in self.references() {
            if let Some(entry) = node.entry(holder).filter(|_| holder != without) {
                let of = &mut bits[tier.index()];
                *of = std::mem::replace(of, Bits::EMPTY).or(&entry.bits());
            }
        }
        bits
    }

    /// Whether only one lane of the worker exists, so that nothing else can refer to a block.
    pub(super) fn is_plain(&self) -> bool {
        self.references().nth(1).is_none()
    }

    /// Counts blocks to which a lane refers from now on or, `gone`, no longer does.
    pub(super) fn count(&mut self, node: &Node, tier: Layer, holder: HolderBit, runs: &[Run], gone: bool) {
        let bit = 1_usize << tier.index();
        let move_blocks = |blocks_by_layers: &mut [u64; Layer::SETS], others: usize, blocks: u64| {
            let (from, to) = if gone { (others | bit, others) } else { (others, others | bit) };
            if from != 0 {
                blocks_by_layers[from] -= blocks;
            }
            if to != 0 {
                blocks_by_layers[to] += blocks;
            }
        };
        if self.is_plain() {
            let blocks = runs.iter().map(|run| u64::from(run.len())).sum();
            move_blocks(&mut self.blocks_by_layers, 0, blocks);
            return;
        }
        let tiers = self.tier_bits(node, holder);
        for at in runs.iter().flat_map(|run| run.from..run.to) {
            let others =
                (0..Layer::COUNT).filter(|tier| tiers[*tier].contains(at)).fold(0, |set, tier| set | 1 << tier);
            if others & bit == 0 {
                move_blocks(&mut self.blocks_by_layers, others, 1);
            }
        }
    }

    /// Forgets what a tier refers to; returns the lanes that count for nothing from now on.
    pub(super) fn clear_tier(&mut self, tier: Layer) -> Vec<HolderBit> {
        let cleared = std::mem::take(&mut self.tiers[tier.index()]);
        let mut holders: Vec<HolderBit> = cleared.groups.iter().map(|group| group.holder).collect();
        if cleared.shown.is_some() && !holders.contains(&cleared.shown) {
            holders.push(cleared.shown);
        }
        let bit = 1_usize << tier.index();
        for tiers in (0..Layer::SETS).filter(|tiers| tiers & bit != 0) {
            let blocks = std::mem::take(&mut self.blocks_by_layers[tiers]);
            self.blocks_by_layers[tiers & !bit] += blocks;
        }
        self.blocks_by_layers[0] = 0;
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
        if let Some((place, _)) = self.find(tree, name) {
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

    /// Whether the worker has bound blocks behind a place in its node, or may have below.
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

    /// Bound blocks.
    pub(super) fn bound(&self) -> u64 {
        self.blocks_by_layers.iter().sum()
    }

    /// What the worker's blocks may take of the index with so many more, if none of them are others' too: what each
    /// block takes, and what each node at which the worker is takes beside.
    pub(super) fn bytes_with(&self, tree: &Tree, more: usize) -> u64 {
        let nodes = self.references().map(|(_, holder)| u64::from(tree.holders.record(holder).nodes)).sum::<u64>();
        // The last of them may be nodes of their own, each.
        let (blocks, nodes) =
            (self.bound() + more as u64, nodes + more.div_ceil(usize::from(tree.node_blocks_max)) as u64);
        blocks * INDEX_BLOCK_BYTES + nodes * INDEX_NODE_BYTES + self.bytes()
    }

    pub(super) fn figures(&self) -> WorkerBlocks {
        WorkerBlocks {
            bound: self.bound(),
            by_tier: std::array::from_fn(|tier| self.tiers[tier].held),
            references: std::array::from_fn(|tier| self.tiers[tier].references),
            dormant: self.dormant.len() as u64,
        }
    }

    pub(super) fn digest(&self, tier: Layer) -> TierDigest {
        let tier = &self.tiers[tier.index()];
        TierDigest { blocks: tier.held, digest: tier.digest }
    }

    /// Remembers what a group refers to since this batch only.
    pub(super) fn note_new_references(&mut self, tier: Layer, group: usize, names: &[EngineHash]) {
        self.tiers[tier.index()].groups[group].new_references.note(self.batch, names);
    }

    /// A new batch begins: what was fresh is not any more.
    pub(super) fn begin_batch(&mut self) {
        self.batch += 1;
        let groups = self.tiers.iter_mut().flat_map(|tier| &mut tier.groups);
        groups.for_each(|group| group.new_references.begin(self.batch));
    }

    /// One reference more to a block that the lane refers to.
    pub(super) fn refer_again(&mut self, name: EngineHash, holder: HolderBit) {
        let extra = self.extras.get(name, holder) + 1;
        self.extras.set(name, holder, extra);
        self.extras_most = self.extras_most.max(extra);
    }

    /// Brings the tree's totals up to date with the worker.
    pub(super) fn account(&mut self, tree: &mut Tree) {
        let now = (self.bytes(), self.bound() - self.dormant.len() as u64);
        let (bytes, placed) = std::mem::replace(&mut self.accounted, now);
        tree.workers_bytes = tree.workers_bytes + now.0 - bytes;
        tree.placed = tree.placed + now.1 - placed;
    }

    /// As [`account`](Self::account), after an event of the worker's before which there were so many names. Names
    /// that came beyond the blocks that did, or stayed beyond those that stayed, are left behind.
    pub(super) fn account_for(&mut self, tree: &mut Tree, names_before: usize) {
        let placed_before = self.accounted.1;
        self.account(tree);
        let (names, placed) = (tree.name_map.len() as u64, self.accounted.1);
        self.removed_inner_blocks =
            (self.removed_inner_blocks + names + placed_before).saturating_sub(names_before as u64 + placed);
    }

    /// What is left behind counts only as far as the shard has names that nobody holds; whether that is not too
    /// many. Others may have taken over what was left, or have given it up, or a sweep has.
    pub(super) fn recount_removed_inner_blocks(&mut self, tree: &Tree, limits: &ShardLimits) -> bool {
        self.removed_inner_blocks =
            self.removed_inner_blocks.min((tree.name_map.len() as u64).saturating_sub(tree.placed));
        self.removed_inner_blocks <= limits.dormant_blocks_max as u64
    }

    /// The worker is gone: the tree's totals go on without it.
    pub(super) fn unaccount(&mut self, tree: &mut Tree) {
        let (bytes, placed) = std::mem::take(&mut self.accounted);
        tree.workers_bytes -= bytes;
        tree.placed -= placed;
    }

    /// What it may take more when so many blocks are stored.
    pub(super) fn growth_bytes(&self, blocks: usize) -> u64 {
        // A list doubles, and the old one is there until the new one is.
        let fresh = self.tiers.iter().flat_map(|tier| &tier.groups).map(|group| group.new_references.bytes()).max();
        let lists = fresh.unwrap_or(0) + blocks * size_of::<EngineHash>();
        (2 * lists) as u64 + self.dormant.growth_bytes(if self.dormant.is_empty() { 0 } else { blocks })
    }

    pub(super) fn bytes(&self) -> u64 {
        let fresh =
            self.tiers.iter().flat_map(|tier| &tier.groups).map(|group| group.new_references.bytes()).sum::<usize>();
        let placement_queue = self.placement_queue.capacity() * size_of::<EngineHash>();
        self.dormant.bytes() + (fresh + self.extras.bytes() + placement_queue + size_of::<Self>()) as u64
    }
}

/// A block that waits.
#[derive(Clone, Debug)]
pub(super) struct DormantBlock {
    /// `None` never waits by itself, but may below a block that has lost its place.
    pub(super) parent: Option<EngineHash>,
    pub(super) local: LocalHash,
    pub(super) seed: Seed,
    /// HolderBits with a reference to it; never empty.
    pub(super) holders: SmallVec<[HolderBit; 2]>,
    /// Its neighbours among what waits for the same parent.
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

/// All of them, by their names and by what they wait for. Nothing here takes longer where many wait for one.
#[derive(Debug, Default)]
pub(super) struct DormantBlocks {
    blocks: HashMap<EngineHash, DormantBlock>,
    /// The first of those that wait for a parent; each knows the next.
    children: HashMap<EngineHash, EngineHash>,
    /// How many of one content wait for a parent.
    alike: HashMap<(EngineHash, LocalHash), u32>,
}

impl DormantBlocks {
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(super) fn get(&self, name: EngineHash) -> Option<&DormantBlock> {
        self.blocks.get(&name)
    }

    /// The lanes that refer to a block that waits.
    pub(super) fn holders_mut(&mut self, name: EngineHash) -> Option<&mut SmallVec<[HolderBit; 2]>> {
        self.blocks.get_mut(&name).map(|block| &mut block.holders)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (EngineHash, &DormantBlock)> {
        self.blocks.iter().map(|(name, block)| (*name, block))
    }

    /// What waits for `parent`.
    pub(super) fn children(&self, parent: EngineHash) -> impl Iterator<Item = EngineHash> + '_ {
        let first = self.children.get(&parent).copied();
        std::iter::successors(first, |name| self.blocks.get(name)?.next)
    }

    /// How many blocks of one content wait for `parent`.
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

    /// Takes lanes off all blocks; those to which none is left go.
    pub(super) fn forget(&mut self, holders: &[HolderBit]) {
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

    /// Panics unless blocks and children say the same.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let below = self.blocks.values().filter(|block| block.parent.is_some()).count();
        let known: usize = self.children.keys().map(|parent| self.children(*parent).count()).sum();
        assert_eq!((known, self.alike.values().sum::<u32>() as usize), (below, below), "children");
        for (name, block) in &self.blocks {
            assert!(block.parent.is_none_or(|parent| self.children(parent).any(|child| child == *name)), "{name:?}");
        }
    }

    /// What it may take more when so many more wait.
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

/// The counts, apart for each lane: a clear drops those of its lanes at once, however many there are.
#[derive(Debug, Default)]
pub(super) struct Extras {
    holders: SmallVec<[(HolderBit, HashMap<EngineHash, u32>); 1]>,
}

impl Extras {
    pub(super) fn is_empty(&self) -> bool {
        self.holders.iter().all(|(_, counts)| counts.is_empty())
    }

    /// References beyond the first that a lane has to a block.
    pub(super) fn get(&self, name: EngineHash, holder: HolderBit) -> u32 {
        let counts = self.holders.iter().find(|(of, _)| *of == holder);
        counts.and_then(|(_, counts)| counts.get(&name)).copied().unwrap_or(0)
    }

    /// Sets a count; returns what it was.
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

    /// Drops all counts of these lanes.
    pub(super) fn forget(&mut self, holders: &[HolderBit]) {
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

/// What the list keeps between batches.
const NEW_REFERENCES_KEPT: usize = 512;

/// Blocks whose references left 0 in one batch; may name some twice, or some that left again. As long as the
/// batch at most: nothing of it outlives the next.
#[derive(Clone, Debug, Default)]
pub(super) struct NewReferences {
    batch: u64,
    names: Vec<EngineHash>,
    /// The first `indexed` of `names`. Made only when somebody asks, and never twice of the same.
    index: HashSet<EngineHash>,
    indexed: usize,
}

impl NewReferences {
    pub(super) fn begin(&mut self, batch: u64) {
        self.batch = batch;
        self.names.clear();
        self.names.shrink_to(NEW_REFERENCES_KEPT);
        self.index.clear();
        self.index.shrink_to(NEW_REFERENCES_KEPT);
        self.indexed = 0;
    }

    pub(super) fn note(&mut self, batch: u64, names: &[EngineHash]) {
        if self.batch != batch {
            self.begin(batch);
        }
        self.names.extend_from_slice(names);
    }

    /// Whether one of `names` is among them.
    pub(super) fn has_any(&mut self, batch: u64, names: &[EngineHash]) -> bool {
        if self.batch != batch || self.names.is_empty() {
            return false;
        }
        self.index.extend(&self.names[self.indexed..]);
        self.indexed = self.names.len();
        names.iter().any(|name| self.index.contains(name))
    }

    pub(super) fn bytes(&self) -> usize {
        (self.names.capacity() + self.index.capacity()) * size_of::<EngineHash>()
    }
}
