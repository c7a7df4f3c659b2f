//! A lookup where chains of one content take several ways, or tiers follow each other.
//!
//! The ways that a query can take are a tree of nodes. Each node is walked once, a way to its end before the next way.
//! What is known of the lanes goes along: which device lanes hold everything so far, and how far each worker with
//! several tiers has come. The **trail** says what changed at which hop, so that the next way begins with what was
//! known where it leaves. A way ends where nobody holds anything of it any more. So a lookup takes a number of steps
//! in proportion to the nodes that it meets, however often the ways fork.
//!
//! A worker with sliding windows can use its device run up to the last place where the windows have enough blocks. Its
//! lower tiers count only where that place is the end of the run: no engine's rule says what a lower tier adds to a run
//! that the windows cut back.

use super::bits::{Bits, Run};
use super::compare::common_prefix;
use super::header::{Header, LEAF};
use super::lanes::{Lane, LaneTable, TieredWorker};
use super::layer::Layer;
use super::more::More;
use super::node::NodeId;
use super::place::ALIASES_CEILING;
use super::reader::ShardDepths;
use super::table::Found;
use super::walk::{View, named};
use crate::ids::Tier;

/// A variant of a block at which a way leaves one that was walked.
#[derive(Clone, Copy, Debug)]
struct Turn {
    parent: u32,
    /// Blocks before it.
    depth: usize,
    /// Nodes before it.
    hops: u32,
    variant: u8,
    /// Variants that exist from this one on.
    left: u8,
}

/// How far a worker with several tiers has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reach {
    /// The tier whose run goes on, by [`Tier::index`]; [`TIERS`] after the last.
    tier: usize,
    /// Where that run begins, blocks from the root.
    start: u32,
    /// Blocks of each tier before it.
    found: [u32; TIERS],
    /// The last run of blocks that its windows have, where it has windows.
    windows: (u32, u32),
    /// Blocks from the root that it can use by its windows.
    usable: u32,
}

const TIERS: usize = Tier::ALL.len();
/// Nothing of the query yet.
const START: Reach = Reach { tier: 0, start: 0, found: [0; TIERS], windows: (0, 0), usable: 0 };

/// What a hop changed.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// A device lane no longer holds everything so far.
    Left(Lane),
    /// A worker with several tiers had come this far before.
    Moved(u32, Reach),
}

/// The working memory of such a lookup.
#[derive(Clone, Debug, Default)]
pub(super) struct Ways {
    turns: Vec<Turn>,
    /// Of how many blocks of the query a worker with windows is measured at most; `None` = of all.
    pub(super) windowed_blocks_max: Option<u32>,
    /// Device lanes that hold everything so far, 64 to a word; workers with several tiers apart.
    active: Vec<u64>,
    /// By place in [`LaneTable::tiered`].
    reach: Vec<Reach>,
    /// Which of them still have a run that goes on.
    going: Vec<u32>,
    /// With the number of the hop.
    trail: Vec<(u32, Change)>,
    /// Lines looked for, and lanes looked at.
    #[cfg(test)]
    pub(super) steps: usize,
}

impl Ways {
    /// Walks every way; says whether nothing was being changed.
    pub(super) fn run(
        &mut self,
        view: &View<'_>,
        locals: &[u64],
        steps: &mut Vec<(u32, u32)>,
        out: &mut ShardDepths,
    ) -> bool {
        self.begin(view.lanes);
        let mut next = Some(Turn { parent: NodeId::ROOT.0, depth: 0, hops: 0, variant: 0, left: 0 });
        while let Some(turn) = next {
            self.undo(turn.hops);
            if !self.follow(view, locals, steps, turn, out) {
                return false;
            }
            next = self.turns.pop();
        }
        true
    }

    fn begin(&mut self, lanes: &LaneTable) {
        self.turns.clear();
        self.trail.clear();
        self.active.clone_from(&lanes.device);
        self.going.clear();
        self.going.extend(0..lanes.tiered.len() as u32);
        self.reach.clear();
        self.reach.resize(lanes.tiered.len(), START);
        for worker in &lanes.tiered {
            let device = worker.lanes[Layer::Device.index()];
            if let Some(word) = self.active.get_mut(usize::from(device.0 / 64)) {
                *word &= !(1 << (device.0 % 64));
            }
        }
    }

    /// Everything is known again as it was before a hop.
    fn undo(&mut self, hops: u32) {
        while let Some((_, change)) = self.trail.pop_if(|(hop, _)| *hop >= hops) {
            match change {
                Change::Left(lane) => self.active[usize::from(lane.0 / 64)] |= 1 << (lane.0 % 64),
                Change::Moved(worker, before) => {
                    let now = std::mem::replace(&mut self.reach[worker as usize], before);
                    if now.tier == TIERS {
                        self.going.push(worker);
                    }
                }
            }
        }
    }

    /// Walks a way from a turn to its end.
    fn follow(
        &mut self,
        view: &View<'_>,
        locals: &[u64],
        steps: &mut Vec<(u32, u32)>,
        turn: Turn,
        out: &mut ShardDepths,
    ) -> bool {
        let Turn { mut parent, mut depth, mut hops, mut variant, left } = turn;
        while depth < locals.len() {
            #[cfg(test)]
            {
                self.steps += 1;
            }
            let (line, version, header) = match view.table.find(parent, locals[depth], variant) {
                Found::Here(line, version, header) => (line, version, header),
                Found::Missing if variant > 0 => {
                    self.turn_next(turn, left);
                    return true;
                }
                Found::Missing => break,
                Found::Busy => return false,
            };
            steps.push((line, version));
            let others = if variant == 0 { header.forks() } else { left.saturating_sub(1) };
            if others > 0 {
                self.turn_next(Turn { parent, depth, hops, variant, left }, others);
            }
            let run = common_prefix(view.blocks(&header), &locals[depth..]);
            if !self.hop(view, &header, (depth as u32, run as u16), hops, out) {
                return true;
            }
            (depth, hops) = (depth + run, hops + 1);
            if run < usize::from(header.len) || header.has(LEAF) {
                break;
            }
            (parent, variant) = (header.id, 0);
        }
        self.arrive(view.lanes, depth as u32, out);
        true
    }

    /// The variant after this one is a way of its own.
    fn turn_next(&mut self, turn: Turn, left: u8) {
        if usize::from(turn.variant) < ALIASES_CEILING {
            self.turns.push(Turn { variant: turn.variant + 1, left, ..turn });
        }
    }

    /// Takes everybody along a node of which the query has the first `run` blocks; whether anybody goes on.
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
        let more = view.more(header);
        let pairs = more.map_or(header.pairs(), |more| &more.partial);
        for pair in pairs.iter().filter(|pair| pair.cut < header.len) {
            // A lane that came after the lanes that this walk knows: the shard has been torn since.
            let Some(word) = self.active.get_mut(usize::from(pair.lane / 64)) else { continue };
            let bit = 1 << (pair.lane % 64);
            if *word & bit != 0 {
                *word &= !bit;
                self.trail.push((hop, Change::Left(Lane(pair.lane))));
                best(out, Lane(pair.lane), depth + u32::from(run.min(pair.cut)));
            }
        }
        let mut stays = false;
        for (at, word) in self.active.iter_mut().enumerate() {
            let full = match more {
                Some(more) => more.full.get(at).copied().unwrap_or(0),
                None => named(header, at),
            };
            let mut leaving = *word & !full;
            *word &= full;
            stays |= *word != 0;
            while leaving != 0 {
                let lane = Lane((at * 64) as u16 + leaving.trailing_zeros() as u16);
                leaving &= leaving - 1;
                self.trail.push((hop, Change::Left(lane)));
                best(out, lane, depth);
            }
        }
        let mut at = 0;
        while let Some(worker) = self.going.get(at).copied() {
            let (lanes, before) = (&view.lanes.tiered[worker as usize], self.reach[worker as usize]);
            let after = before.along((header, more), lanes, (depth, run), self.windowed_blocks_max);
            if after != before {
                self.trail.push((hop, Change::Moved(worker, before)));
                self.reach[worker as usize] = after;
            }
            if after.tier == TIERS {
                best_of_tiers(out, lanes, after.found);
                self.going.swap_remove(at);
            } else {
                at += 1;
            }
        }
        stays || !self.going.is_empty()
    }

    /// A way ends: whoever has held everything so far holds this much.
    fn arrive(&self, lanes: &LaneTable, depth: u32, out: &mut ShardDepths) {
        for (at, mut word) in self.active.iter().copied().enumerate() {
            while word != 0 {
                best(out, Lane((at * 64) as u16 + word.trailing_zeros() as u16), depth);
                word &= word - 1;
            }
        }
        for worker in &self.going {
            let (reach, worker) = (self.reach[*worker as usize], &lanes.tiered[*worker as usize]);
            let Reach { tier, start, mut found, usable, .. } = reach;
            if worker.lanes[tier].is_some() {
                found[tier] = if tier == 0 && worker.has_windows() { usable } else { depth - start };
            }
            best_of_tiers(out, worker, found);
        }
    }
}

impl Reach {
    /// After a node of which the query has the first `run` blocks.
    fn along(
        mut self,
        (header, more): (&Header, Option<&More>),
        worker: &TieredWorker,
        (depth, run): (u32, u16),
        windowed_blocks_max: Option<u32>,
    ) -> Self {
        let mut at = 0;
        while self.tier < TIERS {
            let lane = worker.lanes[self.tier];
            if lane.is_some() {
                let end = covered_to(header, more, lane, Layer::ALL[self.tier], at).min(run).max(at);
                let end_depth = depth + u32::from(end);
                let is_windowed = self.tier == 0 && worker.has_windows();
                if is_windowed {
                    self.see_windows(
                        header,
                        more,
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

    /// Adds the blocks of a node that the windows have, up to a depth. A prefix can be used if, at its end, the windows have
    /// `window_blocks` blocks without a gap, or every block from the root.
    fn see_windows(&mut self, header: &Header, more: Option<&More>, worker: &TieredWorker, (depth, end): (u32, u32)) {
        for held in window_runs(header, more, worker.lanes[Layer::Windows.index()]) {
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

/// Keeps the best that is known of a device lane.
fn best(out: &mut ShardDepths, lane: Lane, depth: u32) {
    if let Some(best) = out.device.get_mut(usize::from(lane.0)) {
        *best = depth.max(*best);
    }
}

/// Keeps the best that is known of a worker with several tiers.
fn best_of_tiers(out: &mut ShardDepths, worker: &TieredWorker, found: [u32; TIERS]) {
    let slot = usize::from(worker.slot);
    let device = usize::from(worker.lanes[Layer::Device.index()].0);
    let [host, disk, external] = out.lower[slot];
    if found > [out.device.get(device).copied().unwrap_or(0), host, disk, external] {
        if let Some(best) = out.device.get_mut(device) {
            *best = found[0];
        }
        out.lower[slot] = [found[1], found[2], found[3]];
    }
}

/// The end of the run of blocks from `from` on that a lane covers in a node.
fn covered_to(header: &Header, more: Option<&More>, lane: Lane, layer: Layer, from: u16) -> u16 {
    if lane.0 < 64 && header.mask >> lane.0 & 1 == 1 {
        return header.len;
    }
    let Some(more) = more else {
        return header.pairs().iter().find(|pair| pair.lane == lane.0).map_or(from, |pair| pair.cut.max(from));
    };
    if more.full.get(usize::from(lane.0 / 64)).is_some_and(|word| word >> (lane.0 % 64) & 1 == 1) {
        return header.len;
    }
    // Both lists are in the order of their lanes.
    if layer != Layer::Device
        && let Some(islands) = islands_of(more, lane)
    {
        return islands.end_of_run(from);
    }
    let pair = more.partial.binary_search_by_key(&lane.0, |pair| pair.lane);
    pair.map_or(from, |at| more.partial[at].cut.max(from))
}

/// The blocks of a node that a lane has with gaps between them. The list is in the order of the lanes.
fn islands_of(more: &More, lane: Lane) -> Option<&Bits> {
    let at = more.islands.binary_search_by_key(&lane, |(of, _)| *of).ok()?;
    Some(&more.islands[at].1)
}

/// The blocks of a node that a worker's windows have.
fn window_runs(header: &Header, more: Option<&More>, lane: Lane) -> impl Iterator<Item = Run> {
    let islands = more.and_then(|more| islands_of(more, lane));
    let first = islands.is_none().then(|| Run::new(0, covered_to(header, more, lane, Layer::Windows, 0)));
    first.into_iter().chain(islands.into_iter().flat_map(Bits::runs))
}
