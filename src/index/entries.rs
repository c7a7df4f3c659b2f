//! The blocks of one worker as records: references, links to the parent and children, figures.

use super::ShardLimits;
use super::lanes::Lane;
use super::positions::{NO_NODE, Positions};
use super::trie::ROOT_NODE;
use crate::ids::{EngineHash, GroupId, LocalHash, Seed, Tier, WorkerSlot};
use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

/// No entry.
pub(super) const NONE: u32 = u32::MAX;
/// The entry that stands for the root: the parent of every chain's first block.
pub(super) const ROOT: u32 = 0;

/// References of one (tier, group) to a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reference {
    /// How many; never 0.
    pub(super) count: u32,
    /// The tier.
    pub(super) tier: Tier,
    /// The group's place among those the tier has announced.
    pub(super) group: u8,
    /// The worker's batch in which the count left 0.
    pub(super) since: u64,
}

/// An engine hash: a bound block, or (with no references) one that others wait for.
///
/// `tiers` and `held` are as of `stamp`; what has been cleared since must be left out
/// ([`Blocks::tiers_of`], [`Blocks::held_of`]) until the entry is settled.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) hash: EngineHash,
    pub(super) local: LocalHash,
    pub(super) seed: Seed,
    /// `NONE` where it is not known (an entry that is only waited for).
    pub(super) parent: u32,
    pub(super) first_child: u32,
    pub(super) next_sibling: u32,
    pub(super) previous_sibling: u32,
    /// A child whose local hash is looked up here and not in [`Blocks::siblings`].
    pub(super) named_child: u32,
    /// The next entry with the same parent and local hash.
    pub(super) next_alias: u32,
    /// Its position; `NO_NODE` while the chain to the root is not known.
    pub(super) node: u32,
    pub(super) alias: u8,
    /// Tiers with a reference, one bit each.
    pub(super) tiers: u8,
    /// Tiers that hold it: every announced group has a reference.
    pub(super) held: u8,
    pub(super) used: bool,
    pub(super) stamp: u64,
    /// The store that looked at it last; tells a hash that occurs twice in one store.
    pub(super) mark: u64,
    pub(super) references: References,
}

/// References of a block: nearly always one kind, so the first is kept in place.
#[derive(Clone, Debug, Default)]
pub(super) struct References {
    first: Option<Reference>,
    more: Vec<Reference>,
}

impl References {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Reference> {
        self.first.iter().chain(&self.more)
    }

    pub(super) fn find(&self, tier: Tier, group: u8) -> Option<&Reference> {
        self.iter().find(|reference| reference.tier == tier && reference.group == group)
    }

    /// One reference more; returns whether there had been one of this tier and group.
    pub(super) fn add(&mut self, tier: Tier, group: u8, batch: u64) -> bool {
        let mut all = self.first.iter_mut().chain(&mut self.more);
        if let Some(reference) = all.find(|reference| reference.tier == tier && reference.group == group) {
            reference.count += 1;
            return true;
        }
        let reference = Reference { count: 1, tier, group, since: batch };
        match &mut self.first {
            first @ None => *first = Some(reference),
            Some(_) => self.more.push(reference),
        }
        false
    }

    /// One reference fewer; returns how many are left, `None` if there was none.
    pub(super) fn take(&mut self, tier: Tier, group: u8) -> Option<u32> {
        let mut all = self.first.iter_mut().chain(&mut self.more);
        let reference = all.find(|reference| reference.tier == tier && reference.group == group)?;
        reference.count -= 1;
        let left = reference.count;
        if left == 0 {
            self.retain(|reference| reference.count > 0);
        }
        Some(left)
    }

    pub(super) fn retain(&mut self, keep: impl Fn(&Reference) -> bool) {
        self.more.retain(&keep);
        if self.first.as_ref().is_some_and(|first| !keep(first)) {
            self.first = self.more.pop();
        }
    }
}

/// What a worker has said about one tier since the tier was last cleared.
#[derive(Clone, Debug)]
pub(super) struct TierState {
    /// Groups seen in a store, in the order in which they were seen.
    pub(super) groups: Vec<GroupId>,
    /// The lane of the blocks it holds; `Lane::NONE` until it holds one.
    pub(super) lane: Lane,
    /// Blocks it holds.
    pub(super) held: u64,
    /// References, over all groups.
    pub(super) references: u64,
    /// References of entries stamped before this are void.
    pub(super) cleared_at: u64,
    /// What entries stamped before this say is held is void.
    pub(super) lane_at: u64,
}

/// The blocks of one worker.
///
/// Entries form trees by `parent`; the tree of [`ROOT`] is mirrored by positions of the shard's trie.
/// These hold between any two calls:
///
/// * an entry is bound iff it has references; it exists iff it is bound or has children;
/// * an entry has a position iff its parent is known and has one;
/// * an entry without references keeps its parent only while it has a position, which it reserves for
///   the blocks below it (so a ring of blocks without a root falls apart when they are removed);
/// * two entries of one worker never share a position.
#[derive(Debug)]
pub(super) struct Blocks {
    pub(super) slot: WorkerSlot,
    /// Entries that may share a parent and a local hash, 1 to 64.
    pub(super) aliases_max: usize,
    /// Blocks that may be bound, over all tiers.
    pub(super) blocks_max: u64,
    pub(super) by_hash: HashMap<EngineHash, u32, FxBuildHasher>,
    /// First entry of each (parent, local hash) that the parent does not name itself.
    pub(super) siblings: HashMap<(u32, LocalHash), u32, FxBuildHasher>,
    pub(super) entries: Vec<Entry>,
    pub(super) free: Vec<u32>,
    pub(super) tiers: [TierState; 4],
    /// Entries without and with a position, by the set of tiers that refer to them.
    pub(super) population: [[u64; 16]; 2],
    pub(super) now: u64,
    pub(super) batch: u64,
    pub(super) stores: u64,
    /// Retired lanes that positions may know; those of `sweeping` are gone when `cursor` is through.
    pub(super) retired: Vec<Lane>,
    pub(super) sweeping: Vec<Lane>,
    pub(super) cursor: Option<u32>,
    pub(super) sweep_again: bool,
    pub(super) stack: Vec<u32>,
}

impl Entry {
    fn new(hash: EngineHash, seed: Seed, stamp: u64) -> Self {
        Self {
            hash,
            local: LocalHash(0),
            seed,
            parent: NONE,
            first_child: NONE,
            next_sibling: NONE,
            previous_sibling: NONE,
            named_child: NONE,
            next_alias: NONE,
            node: NO_NODE,
            alias: 0,
            tiers: 0,
            held: 0,
            used: true,
            stamp,
            mark: 0,
            references: References::default(),
        }
    }
}

impl Blocks {
    pub(super) fn new(slot: WorkerSlot, limits: &ShardLimits) -> Self {
        let root = Entry { node: ROOT_NODE, ..Entry::new(EngineHash(0), Seed(0), 0) };
        Self {
            slot,
            aliases_max: limits.aliases_max.clamp(1, 64),
            blocks_max: limits.worker_blocks_max,
            by_hash: HashMap::default(),
            siblings: HashMap::default(),
            entries: vec![root],
            free: Vec::new(),
            tiers: std::array::from_fn(|_| TierState {
                groups: Vec::new(),
                lane: Lane::NONE,
                held: 0,
                references: 0,
                cleared_at: 0,
                lane_at: 0,
            }),
            population: [[0; 16]; 2],
            now: 1,
            batch: 0,
            stores: 0,
            retired: Vec::new(),
            sweeping: Vec::new(),
            cursor: None,
            sweep_again: false,
            stack: Vec::new(),
        }
    }

    pub(super) fn entry(&self, at: u32) -> &Entry {
        &self.entries[at as usize]
    }

    pub(super) fn entry_mut(&mut self, at: u32) -> &mut Entry {
        &mut self.entries[at as usize]
    }

    pub(super) fn find(&self, hash: EngineHash) -> Option<u32> {
        self.by_hash.get(&hash).copied()
    }

    /// A new entry, unbound and without a place in any tree.
    pub(super) fn create(&mut self, hash: EngineHash, seed: Seed) -> u32 {
        let entry = Entry::new(hash, seed, self.now);
        let at = match self.free.pop() {
            Some(at) => {
                self.entries[at as usize] = entry;
                at
            }
            None => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
        };
        self.by_hash.insert(hash, at);
        self.population[0][0] += 1;
        at
    }

    /// Forgets an entry that has no references, no children, no parent and no position.
    pub(super) fn forget(&mut self, at: u32) {
        let hash = self.entry(at).hash;
        self.by_hash.remove(&hash);
        self.population[0][0] -= 1;
        let entry = self.entry_mut(at);
        entry.used = false;
        entry.references = References::default();
        self.free.push(at);
    }

    /// Tiers that refer to an entry, clears not yet swept left out.
    pub(super) fn tiers_of(&self, at: u32) -> u8 {
        let entry = self.entry(at);
        self.without(entry.tiers, entry.stamp, |tier| tier.cleared_at)
    }

    /// Tiers that hold an entry, clears not yet swept left out.
    pub(super) fn held_of(&self, at: u32) -> u8 {
        let entry = self.entry(at);
        self.without(entry.held, entry.stamp, |tier| tier.lane_at)
    }

    fn without(&self, tiers: u8, stamp: u64, void_at: impl Fn(&TierState) -> u64) -> u8 {
        if stamp == self.now || tiers == 0 {
            return tiers;
        }
        let void = (0..4).filter(|tier| void_at(&self.tiers[*tier]) > stamp).fold(0, |bits, tier| bits | 1 << tier);
        tiers & !void
    }

    /// Whether an entry has references.
    pub(super) fn is_bound(&self, at: u32) -> bool {
        self.tiers_of(at) != 0
    }

    /// Whether an entry's chain to the root is known.
    pub(super) fn is_placed(&self, at: u32) -> bool {
        self.entry(at).node != NO_NODE
    }

    fn counted(&mut self, at: u32) -> &mut u64 {
        let (placed, tiers) = (self.is_placed(at), self.tiers_of(at));
        &mut self.population[usize::from(placed)][usize::from(tiers)]
    }

    /// Sets which tiers refer to a settled entry.
    pub(super) fn set_tiers(&mut self, at: u32, tiers: u8) {
        *self.counted(at) -= 1;
        self.entry_mut(at).tiers = tiers;
        *self.counted(at) += 1;
    }

    fn set_node(&mut self, at: u32, node: u32) {
        *self.counted(at) -= 1;
        self.entry_mut(at).node = node;
        *self.counted(at) += 1;
    }

    /// Puts an entry at a position and tells the readers who holds it.
    pub(super) fn occupy(&mut self, positions: &mut Positions, at: u32, parent_node: u32, alias: u8) {
        let node = positions.enter(parent_node, self.entry(at).local, alias);
        self.entry_mut(at).alias = alias;
        self.set_node(at, node);
        let held = self.held_of(at);
        for tier in Tier::ALL.into_iter().filter(|tier| held & (1 << tier.index()) != 0) {
            positions.hold(node, self.tiers[tier.index()].lane);
        }
    }

    /// Takes an entry from its position, and every lane of the worker with it.
    pub(super) fn vacate(&mut self, positions: &mut Positions, at: u32) {
        let node = self.entry(at).node;
        let held = self.held_of(at);
        for tier in Tier::ALL.into_iter().filter(|tier| held & (1 << tier.index()) != 0) {
            positions.drop_hold(node, self.tiers[tier.index()].lane);
        }
        for lane in self.retired.iter().chain(&self.sweeping) {
            positions.drop_hold(node, *lane);
        }
        positions.leave(node);
        self.set_node(at, NO_NODE);
    }

    /// Bound blocks.
    pub(super) fn bound(&self) -> u64 {
        self.population.iter().flat_map(|by_tiers| &by_tiers[1..]).sum()
    }

    /// Bound blocks without a position.
    pub(super) fn dormant(&self) -> u64 {
        self.population[0][1..].iter().sum()
    }

    /// Unbound hashes whose position is reserved for the blocks below them.
    pub(super) fn reserved(&self) -> u64 {
        self.population[1][0]
    }
}
