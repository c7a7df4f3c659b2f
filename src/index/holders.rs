//! Holder bits: one small number for each layer of each worker, the layers, and the table from which readers learn the
//! worker of a holder bit.

use crate::ids::{Tier, WorkerSlot};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

/// Editions of tables, over all shards; 0 is no table's.
static EDITIONS: AtomicU64 = AtomicU64::new(1);

/// The bit that stands for one worker in one layer of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct HolderBit(pub(super) u16);

impl HolderBit {
    pub(super) const NONE: Self = Self(u16::MAX);

    pub(super) const fn is_some(self) -> bool {
        self.0 != Self::NONE.0
    }
}

/// The use of a holder bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HolderState {
    Free,
    /// Says what a layer of a worker holds; readers see it.
    Shown,
    /// Says to what one of several groups of a layer refers; only the writer sees it.
    Hidden,
    /// Counts for nothing; nodes may still have entries of it.
    Retired,
}

/// The worker and the layer of a holder bit. A worker's **life** ends when all of it is cleared.
#[derive(Clone, Copy, Debug)]
pub(super) struct HolderRecord {
    pub(super) slot: WorkerSlot,
    pub(super) life: u64,
    pub(super) layer: Layer,
    pub(super) state: HolderState,
    /// For windows: how many of the last blocks of a prompt they must have.
    pub(super) window_blocks: u32,
    /// Nodes with an entry of it.
    pub(super) nodes: u32,
}

/// The readers' copy of the holder bits. Replaced as a whole when one is given out or retired.
#[derive(Clone, Debug, Default)]
pub(super) struct HolderTable {
    /// All slots of the shard's workers are below this.
    pub(super) workers: usize,
    /// Tells this table from every other of the process.
    pub(super) edition: u64,
    /// The slot of each holder bit's worker.
    pub(super) owners: Vec<u16>,
    /// The device holder bit of each slot's worker; `HolderBit::NONE` where there is none.
    pub(super) devices: Vec<HolderBit>,
    /// Device holder bits, 64 to a word.
    pub(super) device: Vec<u64>,
    /// Workers with a holder bit of another layer.
    pub(super) tiered: Vec<TieredWorker>,
    /// The place in `tiered` of each slot's worker; [`Self::UNTIERED`] where it has none.
    pub(super) tiered_of: Vec<u16>,
    /// Holder bits of lower tiers, 64 to a word.
    pub(super) lower: Vec<u64>,
    /// Whether some worker has windows.
    pub(super) has_windows: bool,
}

impl HolderTable {
    const UNTIERED: u16 = u16::MAX;

    /// The place in `tiered` of the worker of a lower tier's holder bit; `None` if it is no such bit of this table.
    pub(super) fn tiered_by_lower(&self, holder: u16) -> Option<u16> {
        let word = self.lower.get(usize::from(holder / 64))?;
        (word >> (holder % 64) & 1 == 1).then(|| self.tiered_of[usize::from(self.owners[usize::from(holder)])])
    }

    pub(super) fn bytes(&self) -> u64 {
        let slots = self.owners.capacity() + self.devices.capacity() + self.tiered_of.capacity();
        let words = slots * 2 + (self.device.capacity() + self.lower.capacity()) * 8;
        (words + self.tiered.capacity() * size_of::<TieredWorker>() + size_of::<Self>()) as u64
    }
}

/// The holder bits of a worker that has more than one for its device.
#[derive(Clone, Copy, Debug)]
pub(super) struct TieredWorker {
    pub(super) slot: u16,
    /// By layer; `HolderBit::NONE` where it has none.
    pub(super) holders: [HolderBit; Layer::COUNT],
    /// How many of the last blocks of a prompt its windows must have, if it has windows.
    pub(super) window_blocks: u32,
}

impl TieredWorker {
    /// Whether some of its groups serve attention with a sliding window.
    pub(super) const fn has_windows(&self) -> bool {
        self.holders[Layer::Windows.index()].is_some()
    }
}

/// The writer's side: which holder bits are in use.
#[derive(Debug, Default)]
pub(super) struct HolderBits {
    records: Vec<HolderRecord>,
    free: BTreeSet<HolderBit>,
    retired: usize,
    table: HolderTable,
}

impl HolderBits {
    /// A holder bit of which no node has an entry; `None` when the numbers are used up. The lowest are given out first,
    /// so that few workers need few words.
    pub(super) fn give(&mut self, slot: WorkerSlot, life: u64, layer: Layer, state: HolderState) -> Option<HolderBit> {
        let record = HolderRecord { slot, life, layer, state, window_blocks: 0, nodes: 0 };
        if let Some(holder) = self.free.pop_first() {
            self.records[usize::from(holder.0)] = record;
            return Some(holder);
        }
        let holder = HolderBit(u16::try_from(self.records.len()).ok().filter(|holder| *holder < HolderBit::NONE.0)?);
        self.records.push(record);
        Some(holder)
    }

    pub(super) fn add_nodes(&mut self, holder: HolderBit, nodes: u32) {
        self.records[usize::from(holder.0)].nodes += nodes;
    }

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

    /// From the next table on, the windows of this holder bit must have this many of the last blocks of a prompt.
    pub(super) fn set_window_blocks(&mut self, holder: HolderBit, window_blocks: u32) {
        self.records[usize::from(holder.0)].window_blocks = window_blocks;
    }

    /// Holder bits that count for nothing, but of which nodes may still have entries.
    pub(super) const fn retired(&self) -> usize {
        self.retired
    }

    pub(super) fn retired_holders(&self) -> impl Iterator<Item = HolderBit> + '_ {
        let all = self.records.iter().enumerate();
        all.filter(|(_, record)| record.state == HolderState::Retired).map(|(holder, _)| HolderBit(holder as u16))
    }

    /// The table that readers should see from now on.
    pub(super) fn table(&mut self, workers: usize) -> HolderTable {
        let table = &mut self.table;
        table.workers = workers;
        // Relaxed: it matters only that no two are equal.
        table.edition = EDITIONS.fetch_add(1, Ordering::Relaxed);
        table.owners.clear();
        table.device.clear();
        table.tiered.clear();
        table.lower.clear();
        table.device.resize(self.records.len().div_ceil(64), 0);
        table.lower.resize(table.device.len(), 0);
        let mut holders = vec![([HolderBit::NONE; Layer::COUNT], 0); workers];
        for (holder, record) in self.records.iter().enumerate() {
            table.owners.push(record.slot.0);
            if record.state == HolderState::Shown {
                let (of_worker, window_blocks) = &mut holders[usize::from(record.slot.0)];
                of_worker[record.layer.index()] = HolderBit(holder as u16);
                *window_blocks = record.window_blocks.max(*window_blocks);
                let bit = 1 << (holder % 64);
                match record.layer {
                    Layer::Device => table.device[holder / 64] |= bit,
                    Layer::Host | Layer::Disk | Layer::External => table.lower[holder / 64] |= bit,
                    Layer::Windows => {}
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
        table.has_windows = table.tiered.iter().any(TieredWorker::has_windows);
        table.tiered_of.clear();
        table.tiered_of.resize(workers, HolderTable::UNTIERED);
        for (at, worker) in table.tiered.iter().enumerate() {
            table.tiered_of[usize::from(worker.slot)] = at as u16;
        }
        table.clone()
    }

    /// Holder bits that readers see.
    #[cfg(test)]
    pub(super) fn shown_holders(&self) -> impl Iterator<Item = HolderBit> + '_ {
        let all = self.records.iter().enumerate();
        all.filter(|(_, record)| record.state == HolderState::Shown).map(|(holder, _)| HolderBit(holder as u16))
    }
}

/// One of the tiers, or the windows of the device tier: a set of blocks that a worker holds. A block is in the set
/// while every group of the layer refers to it.
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
    pub(super) const COUNT: usize = 5;
    /// The number of sets of layers.
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
