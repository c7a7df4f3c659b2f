//! The branching walk of a lookup through one shard. It serves what [`lookup_walk`](super::lookup_walk) does not: where one
//! content has several names, or where workers have windows.
//!
//! The paths that a query can take are a tree of nodes. Each node is walked once, one branch to its end before the next
//! branch. The walk carries its state along: which device holder bits hold everything so far, and how far each worker
//! with several tiers has come. The **trail** records the changes of each hop, so that the next branch begins with the
//! state at its fork. A branch ends where no worker holds anything of it. So a lookup takes a number of steps in
//! proportion to the nodes that it meets, however many branches there are.

use super::header::{Header, LEAF, partials};
use super::holders::{HolderBit, HolderTable, Layer};
use super::lookup_walk::{View, named};
use super::node::NodeId;
use super::reader::ShardDepths;
use super::simd::AnyProcessor;
use super::slow_path::ALIASES_CEILING;
use super::table::Found;
use super::tier_reach::{Reach, START, TIERS, best_of_tiers};

/// A variant of a block at which a branch leaves a walked one.
#[derive(Clone, Copy, Debug)]
struct Branch {
    parent: u32,
    /// Blocks before it.
    depth: usize,
    /// Nodes before it.
    hops: u32,
    variant: u8,
    /// Number of variants from this one on.
    left: u8,
}

/// A change of a hop.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// A device holder bit no longer holds everything so far.
    Left(HolderBit),
    /// The state of a worker with several tiers before the hop.
    Moved(u32, Reach),
}

/// The working memory of a branching walk.
#[derive(Clone, Debug, Default)]
pub(super) struct BranchingWalk {
    branches: Vec<Branch>,
    /// The number of blocks of the query up to which a worker with windows is measured; `None` = all.
    pub(super) windowed_blocks_max: Option<u32>,
    /// Device holder bits that hold everything so far, 64 to a word, without those of workers with several tiers.
    active: Vec<u64>,
    /// By position in [`HolderTable::tiered`].
    reach: Vec<Reach>,
    /// Those of them with a run that goes on.
    going: Vec<u32>,
    /// Changes, with the number of the hop.
    trail: Vec<(u32, Change)>,
    /// Lines searched, and holder bits visited.
    #[cfg(test)]
    pub(super) steps: usize,
}

impl BranchingWalk {
    /// Walks every branch; `false` if it met a node that was being changed.
    pub(super) fn run(
        &mut self,
        view: &View<'_>,
        locals: &[u64],
        steps: &mut Vec<(u32, u32)>,
        out: &mut ShardDepths,
    ) -> bool {
        self.begin(view.holders);
        let mut next = Some(Branch { parent: NodeId::ROOT.0, depth: 0, hops: 0, variant: 0, left: 0 });
        while let Some(branch) = next {
            self.undo(branch.hops);
            if !self.follow(view, locals, steps, branch, out) {
                return false;
            }
            next = self.branches.pop();
        }
        true
    }

    fn begin(&mut self, holders: &HolderTable) {
        self.branches.clear();
        self.trail.clear();
        self.active.clone_from(&holders.device);
        self.going.clear();
        self.going.extend(0..holders.tiered.len() as u32);
        self.reach.clear();
        self.reach.resize(holders.tiered.len(), START);
        for worker in &holders.tiered {
            let device = worker.holders[Layer::Device.index()];
            if let Some(word) = self.active.get_mut(usize::from(device.0 / 64)) {
                *word &= !(1 << (device.0 % 64));
            }
        }
    }

    /// Restores the state before a hop.
    fn undo(&mut self, hops: u32) {
        while let Some((_, change)) = self.trail.pop_if(|(hop, _)| *hop >= hops) {
            match change {
                Change::Left(holder) => self.active[usize::from(holder.0 / 64)] |= 1 << (holder.0 % 64),
                Change::Moved(worker, before) => {
                    let now = std::mem::replace(&mut self.reach[worker as usize], before);
                    if now.tier == TIERS {
                        self.going.push(worker);
                    }
                }
            }
        }
    }

    /// Walks a branch to its end.
    fn follow(
        &mut self,
        view: &View<'_>,
        locals: &[u64],
        steps: &mut Vec<(u32, u32)>,
        branch: Branch,
        out: &mut ShardDepths,
    ) -> bool {
        let Branch { mut parent, mut depth, mut hops, mut variant, left } = branch;
        while depth < locals.len() {
            #[cfg(test)]
            {
                self.steps += 1;
            }
            let (line, version, header) = match view.table.find(parent, locals[depth], variant) {
                Found::Here(line, version, header) => (line, version, header),
                Found::Missing if variant > 0 => {
                    self.push_next_variant(branch, left);
                    return true;
                }
                Found::Missing => break,
                Found::Busy => return false,
            };
            steps.push((line, version));
            let others = if variant == 0 { header.forks() } else { left.saturating_sub(1) };
            if others > 0 {
                self.push_next_variant(Branch { parent, depth, hops, variant, left }, others);
            }
            let run = view.compare(AnyProcessor, &header, &locals[depth..], None);
            if !self.hop(view, &header, (depth as u32, run as u16), hops, out) {
                return true;
            }
            (depth, hops) = (depth + run, hops + 1);
            if run < usize::from(header.len) || header.has(LEAF) {
                break;
            }
            (parent, variant) = (header.id, 0);
        }
        self.arrive(view.holders, depth as u32, out);
        true
    }

    /// Adds a branch for the variant after this one.
    fn push_next_variant(&mut self, branch: Branch, left: u8) {
        if usize::from(branch.variant) < ALIASES_CEILING {
            self.branches.push(Branch { variant: branch.variant + 1, left, ..branch });
        }
    }

    /// Moves all workers along a node of which the query has the first `run` blocks; returns whether any goes on.
    fn hop(
        &mut self,
        view: &View<'_>,
        header: &Header,
        (depth, run): (u32, u16),
        hop: u32,
        out: &mut ShardDepths,
    ) -> bool {
        #[cfg(test)]
        {
            self.steps += self.active.len() + self.going.len();
        }
        let overflow = view.overflow(header);
        for partial in partials(header, overflow).filter(|partial| partial.cut < header.len) {
            // A holder bit that is newer than the table of this walk: there was a multi-write since.
            let Some(word) = self.active.get_mut(usize::from(partial.holder / 64)) else { continue };
            let bit = 1 << (partial.holder % 64);
            if *word & bit != 0 {
                *word &= !bit;
                self.trail.push((hop, Change::Left(HolderBit(partial.holder))));
                best(out, HolderBit(partial.holder), depth + u32::from(run.min(partial.cut)));
            }
        }
        let mut stays = false;
        for (at, word) in self.active.iter_mut().enumerate() {
            let full = match overflow {
                Some(overflow) => overflow.full.get(at).copied().unwrap_or(0),
                None => named(header, at),
            };
            let mut leaving = *word & !full;
            *word &= full;
            stays |= *word != 0;
            while leaving != 0 {
                let holder = HolderBit((at * 64) as u16 + leaving.trailing_zeros() as u16);
                leaving &= leaving - 1;
                self.trail.push((hop, Change::Left(holder)));
                best(out, holder, depth);
            }
        }
        let mut at = 0;
        while let Some(worker) = self.going.get(at).copied() {
            let (holders, before) = (&view.holders.tiered[worker as usize], self.reach[worker as usize]);
            let after = before.along((header, overflow), holders, (depth, run), self.windowed_blocks_max);
            if after != before {
                self.trail.push((hop, Change::Moved(worker, before)));
                self.reach[worker as usize] = after;
            }
            if after.tier == TIERS {
                best_of_tiers(out, holders, after.found);
                self.going.swap_remove(at);
            } else {
                at += 1;
            }
        }
        stays || !self.going.is_empty()
    }

    /// Ends a branch: workers that have held everything so far hold `depth` blocks.
    fn arrive(&self, holders: &HolderTable, depth: u32, out: &mut ShardDepths) {
        for (at, mut word) in self.active.iter().copied().enumerate() {
            while word != 0 {
                best(out, HolderBit((at * 64) as u16 + word.trailing_zeros() as u16), depth);
                word &= word - 1;
            }
        }
        for worker in &self.going {
            self.reach[*worker as usize].arrive(&holders.tiered[*worker as usize], depth, out);
        }
    }
}

/// Keeps the best depth of a device holder bit.
fn best(out: &mut ShardDepths, holder: HolderBit, depth: u32) {
    if let Some(best) = out.device.get_mut(usize::from(holder.0)) {
        *best = depth.max(*best);
    }
}
