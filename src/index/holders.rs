//! HolderBits: one small number for each tier of each worker, and the table by which readers tell whose they are.
//!
//! What a lane speaks of: one of the tiers, or the windows of the device tier.

use crate::ids::{Tier, WorkerSlot};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

/// Of tables of lanes, over all shards; 0 is nobody's.
static EDITIONS: AtomicU64 = AtomicU64::new(1);

/// A lane of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct HolderBit(pub(super) u16);

impl HolderBit {
    /// No lane.
    pub(super) const NONE: Self = Self(u16::MAX);

    pub(super) const fn is_some(self) -> bool {
        self.0 != Self::NONE.0
    }
}

/// What a lane is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HolderState {
    /// Nobody's.
    Free,
    /// Says what a tier of a worker holds; readers see it.
    Shown,
    /// Says what one of several groups of a tier refers to; only the writer sees it.
    Hidden,
    /// Counts for nothing; nodes may still know it.
    Retired,
}

/// Whose a lane is. A worker's **life** ends when all of it is cleared.
#[derive(Clone, Copy, Debug)]
pub(super) struct HolderRecord {
    pub(super) slot: WorkerSlot,
    pub(super) life: u64,
    pub(super) tier: Layer,
    pub(super) state: HolderState,
    /// Of what windows have: how many of the last blocks of a prompt they must.
    pub(super) window_blocks: u32,
    /// Nodes that know it.
    pub(super) nodes: u32,
}

/// What readers know of the lanes. Replaced as a whole when a lane is given out or retired.
#[derive(Clone, Debug, Default)]
pub(super) struct HolderTable {
    /// Slots of the shard's workers are below this.
    pub(super) workers: usize,
    /// Tells this table from every other of the process.
    pub(super) edition: u64,
    /// The slot of the worker of each lane.
    pub(super) owners: Vec<u16>,
    /// The device lane of each slot's worker; `HolderBit::NONE` where there is none.
    pub(super) devices: Vec<HolderBit>,
    /// Device lanes, 64 to a word.
    pub(super) device: Vec<u64>,
    /// Workers with a lane of another tier.
    pub(super) tiered: Vec<TieredWorker>,
}

impl HolderTable {
    pub(super) fn bytes(&self) -> u64 {
        let words = (self.owners.capacity() + self.devices.capacity()) * 2 + self.device.capacity() * 8;
        (words + self.tiered.capacity() * size_of::<TieredWorker>() + size_of::<Self>()) as u64
    }
}

/// The lanes of a worker that has more than a device lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct TieredWorker {
    pub(super) slot: u16,
    /// By layer; `HolderBit::NONE` where it has none.
    pub(super) holders: [HolderBit; Layer::COUNT],
    /// How many of the last blocks of a prompt its windows must have, where it has windows.
    pub(super) window_blocks: u32,
}

impl TieredWorker {
    /// Whether some of its groups serve attention with a sliding window.
    pub(super) const fn has_windows(&self) -> bool {
        self.holders[Layer::Windows.index()].is_some()
    }
}

/// The writer's side: which lanes are in use.
#[derive(Debug, Default)]
pub(super) struct HolderBits {
    records: Vec<HolderRecord>,
    free: BTreeSet<HolderBit>,
    retired: usize,
    table: HolderTable,
}

impl HolderBits {
    /// A lane that no node knows; `None` when the numbers are used up. The lowest are given out first, so
    /// that few workers need few words.
    pub(super) fn give(&mut self, slot: WorkerSlot, life: u64, tier: Layer, state: HolderState) -> Option<HolderBit> {
        let record = HolderRecord { slot, life, tier, state, window_blocks: 0, nodes: 0 };
        if let Some(holder) = self.free.pop_first() {
            self.records[usize::from(holder.0)] = record;
            return Some(holder);
        }
        let holder = HolderBit(u16::try_from(self.records.len()).ok().filter(|holder| *holder < HolderBit::NONE.0)?);
        self.records.push(record);
        Some(holder)
    }

    /// So many nodes more know a lane.
    pub(super) fn add_nodes(&mut self, holder: HolderBit, nodes: u32) {
        self.records[usize::from(holder.0)].nodes += nodes;
    }

    /// One node no longer knows a lane.
    pub(super) fn drop_node(&mut self, holder: HolderBit) {
        self.records[usize::from(holder.0)].nodes -= 1;
    }

    pub(super) fn record(&self, holder: HolderBit) -> &HolderRecord {
        &self.records[usize::from(holder.0)]
    }

    pub(super) fn set_state(&mut self, holder: HolderBit, state: HolderState) {
        let record = &mut self.records[usize::from(holder.0)];
        self.retired += usize::from(state == HolderState::Retired);
        self.retired -= usize::from(record.state == HolderState::Retired);
        record.state = state;
        if state == HolderState::Free {
            self.free.insert(holder);
        }
    }

    /// From the next table on, the windows that a lane speaks of must have so many of the last blocks of a prompt.
    pub(super) fn set_window_blocks(&mut self, holder: HolderBit, window_blocks: u32) {
        self.records[usize::from(holder.0)].window_blocks = window_blocks;
    }

    /// HolderBits that nodes may know though they count for nothing.
    pub(super) const fn retired(&self) -> usize {
        self.retired
    }

    pub(super) fn retired_holders(&self) -> impl Iterator<Item = HolderBit> + '_ {
        let all = self.records.iter().enumerate();
        all.filter(|(_, record)| record.state == HolderState::Retired).map(|(holder, _)| HolderBit(holder as u16))
    }

    /// The table as readers should see it from now on.
    pub(super) fn table(&mut self, workers: usize) -> HolderTable {
        let table = &mut self.table;
        table.workers = workers;
        // Relaxed: only that no two are the same matters.
        table.edition = EDITIONS.fetch_add(1, Ordering::Relaxed);
        table.owners.clear();
        table.device.clear();
        table.tiered.clear();
        table.device.resize(self.records.len().div_ceil(64), 0);
        let mut holders = vec![([HolderBit::NONE; Layer::COUNT], 0); workers];
        for (holder, record) in self.records.iter().enumerate() {
            table.owners.push(record.slot.0);
            if record.state == HolderState::Shown {
                let (of_worker, window_blocks) = &mut holders[usize::from(record.slot.0)];
                of_worker[record.tier.index()] = HolderBit(holder as u16);
                *window_blocks = record.window_blocks.max(*window_blocks);
                if record.tier == Layer::Device {
                    table.device[holder / 64] |= 1 << (holder % 64);
                }
            }
        }
        table.devices.clear();
        table.devices.extend(holders.iter().map(|(holders, _)| holders[Layer::Device.index()]));
        let tiered = holders
            .into_iter()
            .enumerate()
            .filter(|(_, (holders, _))| holders[1..].iter().any(|holder| holder.is_some()));
        let worker = |(slot, (holders, window_blocks))| TieredWorker { slot: slot as u16, holders, window_blocks };
        table.tiered.extend(tiered.map(worker));
        table.clone()
    }

    /// HolderBits that readers see.
    #[cfg(test)]
    pub(super) fn shown_holders(&self) -> impl Iterator<Item = HolderBit> + '_ {
        let all = self.records.iter().enumerate();
        all.filter(|(_, record)| record.state == HolderState::Shown).map(|(holder, _)| HolderBit(holder as u16))
    }
}

/// One set of blocks that a worker has. A block is in it while every group of the layer refers to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layer {
    Device,
    Host,
    Disk,
    External,
    /// Blocks of the device tier that sliding-window groups have. A prompt needs only the last of them.
    Windows,
}

impl Layer {
    /// How many layers there are.
    pub(super) const COUNT: usize = 5;
    /// How many sets of layers there are.
    pub(super) const SETS: usize = 1 << Self::COUNT;

    pub(super) const ALL: [Self; Self::COUNT] = [Self::Device, Self::Host, Self::Disk, Self::External, Self::Windows];

    pub(super) const fn index(self) -> usize {
        self as usize
    }
}

impl From<Tier> for Layer {
    fn from(tier: Tier) -> Self {
        match tier {
            Tier::Device => Self::Device,
            Tier::Host => Self::Host,
            Tier::Disk => Self::Disk,
            Tier::External => Self::External,
        }
    }
}
