//! How far a worker with several tiers has come along the path of a lookup: one run of blocks of each tier, after another.
//!
//! A worker with sliding windows can use its device run up to the last place where the windows have enough blocks. Its
//! lower tiers count only if that place is the end of the run: no engine's rule says what a lower tier adds to a run
//! that the windows cut back.

use super::header::{Header, Overflow};
use super::holders::{HolderBit, Layer, TieredWorker};
use super::node::{Bits, Run};
use super::reader::ShardDepths;
use crate::ids::Tier;

/// How far a worker with several tiers has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reach {
    /// The tier whose run goes on, by [`Tier::index`]; [`TIERS`] after the last.
    pub(super) tier: usize,
    /// Where that run begins, in blocks from the root.
    start: u32,
    /// Blocks of each tier before it.
    pub(super) found: [u32; TIERS],
    /// The last run of blocks of its windows, if it has windows.
    windows: (u32, u32),
    /// Blocks from the root that its windows let it use.
    usable: u32,
}

pub(super) const TIERS: usize = Tier::ALL.len();
/// Before the first block of the query.
pub(super) const START: Reach = Reach { tier: 0, start: 0, found: [0; TIERS], windows: (0, 0), usable: 0 };

impl Reach {
    /// The state after a node of which the query has the first `run` blocks.
    pub(super) fn along(
        mut self,
        (header, overflow): (&Header, Option<&Overflow>),
        worker: &TieredWorker,
        (depth, run): (u32, u16),
        windowed_blocks_max: Option<u32>,
    ) -> Self {
        let mut at = 0;
        while self.tier < TIERS {
            let holder = worker.holders[self.tier];
            if holder.is_some() {
                let end = covered_to(header, overflow, holder, Layer::ALL[self.tier], at).min(run).max(at);
                let end_depth = depth + u32::from(end);
                let is_windowed = self.tier == 0 && worker.has_windows();
                if is_windowed {
                    self.see_windows(
                        header,
                        overflow,
                        worker,
                        (depth, windowed_blocks_max.unwrap_or(u32::MAX).min(end_depth)),
                    );
                }
                if end == header.len {
                    break;
                }
                if is_windowed && self.usable < end_depth {
                    self.found[0] = self.usable;
                    self.tier = TIERS;
                    break;
                }
                self.found[self.tier] = end_depth - self.start;
                (self.start, at) = (end_depth, end);
            }
            self.tier += 1;
        }
        self
    }

    /// Ends a run that has held everything up to `depth`.
    pub(super) fn arrive(self, worker: &TieredWorker, depth: u32, out: &mut ShardDepths) {
        let Self { tier, start, mut found, usable, .. } = self;
        if worker.holders[tier].is_some() {
            found[tier] = if tier == 0 && worker.has_windows() { usable } else { depth - start };
        }
        best_of_tiers(out, worker, found);
    }

    /// Adds the blocks of a node that the windows have, up to a depth. A prefix is usable if, at its end, the windows
    /// have `window_blocks` blocks without a gap, or every block from the root.
    fn see_windows(
        &mut self,
        header: &Header,
        overflow: Option<&Overflow>,
        worker: &TieredWorker,
        (depth, end): (u32, u32),
    ) {
        for held in window_runs(header, overflow, worker.holders[Layer::Windows.index()]) {
            let (from, to) = ((depth + u32::from(held.from)).min(end), (depth + u32::from(held.to)).min(end));
            if from == to {
                continue;
            }
            self.windows = if self.windows.1 == from { (self.windows.0, to) } else { (from, to) };
            let (start, end) = self.windows;
            if start == 0 || end - start >= worker.window_blocks {
                self.usable = end.max(self.usable);
            }
        }
    }
}

/// Moves a worker without windows along a node of which the query has the first `run` blocks. Whether a tier's run goes on; else
/// its depths are noted.
pub(super) fn descend(
    reach: &mut Reach,
    node: (&Header, Option<&Overflow>),
    worker: &TieredWorker,
    way: (u32, u16),
    out: &mut ShardDepths,
) -> bool {
    *reach = reach.along(node, worker, way, None);
    if reach.tier == TIERS {
        best_of_tiers(out, worker, reach.found);
    }
    reach.tier < TIERS
}

/// Keeps the best depths of a worker with several tiers.
pub(super) fn best_of_tiers(out: &mut ShardDepths, worker: &TieredWorker, found: [u32; TIERS]) {
    let slot = usize::from(worker.slot);
    let device = usize::from(worker.holders[Layer::Device.index()].0);
    let [host, disk, external] = out.lower[slot];
    if found > [out.device.get(device).copied().unwrap_or(0), host, disk, external] {
        if let Some(best) = out.device.get_mut(device) {
            *best = found[0];
        }
        out.lower[slot] = [found[1], found[2], found[3]];
    }
}

/// The end of the run of blocks from `from` on that a holder bit covers in a node.
fn covered_to(header: &Header, overflow: Option<&Overflow>, holder: HolderBit, layer: Layer, from: u16) -> u16 {
    if holder.0 < 64 && header.mask >> holder.0 & 1 == 1 {
        return header.len;
    }
    let Some(overflow) = overflow else {
        return header
            .partials()
            .find(|partial| partial.holder == holder.0)
            .map_or(from, |partial| partial.cut.max(from));
    };
    if overflow.full.get(usize::from(holder.0 / 64)).is_some_and(|word| word >> (holder.0 % 64) & 1 == 1) {
        return header.len;
    }
    // Both lists are in the order of their holder bits.
    if layer != Layer::Device
        && let Some(sparse) = sparse_of(overflow, holder)
    {
        return sparse.end_of_run(from);
    }
    let partial = overflow.partials.binary_search_by_key(&holder.0, |partial| partial.holder);
    partial.map_or(from, |at| overflow.partials[at].cut.max(from))
}

/// The sparse coverage of a holder bit. The list is in the order of the holder bits.
fn sparse_of(overflow: &Overflow, holder: HolderBit) -> Option<&Bits> {
    let at = overflow.sparse.binary_search_by_key(&holder, |(of, _)| *of).ok()?;
    Some(&overflow.sparse[at].1)
}

/// The runs of blocks of a node that a worker's windows have.
fn window_runs(header: &Header, overflow: Option<&Overflow>, holder: HolderBit) -> impl Iterator<Item = Run> {
    let sparse = overflow.and_then(|overflow| sparse_of(overflow, holder));
    let first = sparse.is_none().then(|| Run::new(0, covered_to(header, overflow, holder, Layer::Windows, 0)));
    first.into_iter().chain(sparse.into_iter().flat_map(Bits::runs))
}
