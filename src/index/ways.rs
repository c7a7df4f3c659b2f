//! A lookup where chains of one content take several ways, or tiers follow each other: every way that the
//! query can take is walked, and each lane is followed along it.

use super::bits::{Bits, Run};
use super::compare::common_prefix;
use super::header::{FORKED, Header, LEAF};
use super::lanes::{Lane, TieredWorker};
use super::layer::Layer;
use super::more::More;
use super::node::NodeId;
use super::place::ALIASES_CEILING;
use super::reader::ShardDepths;
use super::table::Found;
use super::walk::View;

/// One edge of a way.
#[derive(Clone, Copy, Debug)]
struct Hop {
    header: Header,
    /// Blocks before it.
    depth: u32,
    /// Blocks of it that the query has.
    run: u16,
}

/// A way not yet taken: `hops` edges of the one before, then a variant of what follows.
#[derive(Clone, Copy, Debug)]
struct Turn {
    parent: u32,
    depth: usize,
    hops: usize,
    variant: u8,
}

/// The working memory of such a lookup.
#[derive(Clone, Debug, Default)]
pub(super) struct Ways {
    hops: Vec<Hop>,
    turns: Vec<Turn>,
    /// Of how many blocks of the query a worker with windows is measured at most; `None` = of all.
    pub(super) windowed_blocks_max: Option<u32>,
}

/// Where a lane's run has come to: a block of an edge.
#[derive(Clone, Copy, Debug)]
struct At {
    hop: usize,
    block: u16,
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
        self.turns.clear();
        self.turns.push(Turn { parent: NodeId::ROOT.0, depth: 0, hops: 0, variant: 0 });
        while let Some(turn) = self.turns.pop() {
            self.hops.truncate(turn.hops);
            if !self.follow(view, locals, steps, turn) {
                return false;
            }
            if self.hops.len() > turn.hops {
                self.measure(view, out);
            }
        }
        true
    }

    fn follow(&mut self, view: &View<'_>, locals: &[u64], steps: &mut Vec<(u32, u32)>, turn: Turn) -> bool {
        let Turn { mut parent, mut depth, mut variant, .. } = turn;
        while depth < locals.len() {
            let (line, version, header) = match view.table.find(parent, locals[depth], variant) {
                Found::Here(line, version, header) => (line, version, header),
                Found::Missing => return true,
                Found::Busy => return false,
            };
            steps.push((view.table.index(line), version));
            if variant == 0 && header.has(FORKED) {
                let hops = self.hops.len();
                let others = 1..=ALIASES_CEILING as u8;
                self.turns.extend(others.map(|variant| Turn { parent, depth, hops, variant }));
            }
            let run = common_prefix(view.blocks(&header), &locals[depth..]);
            self.hops.push(Hop { header, depth: depth as u32, run: run as u16 });
            depth += run;
            if run < usize::from(header.len) || header.has(LEAF) {
                return true;
            }
            (parent, variant) = (header.id, 0);
        }
        true
    }

    /// What each worker holds along the way; kept where it is the best so far.
    fn measure(&self, view: &View<'_>, out: &mut ShardDepths) {
        let lanes = view.lanes;
        for (word, mut device) in lanes.device.iter().copied().enumerate() {
            while device != 0 {
                let lane = (word * 64) as u16 + device.trailing_zeros() as u16;
                device &= device - 1;
                let slot = lanes.owners[usize::from(lane)];
                if lanes.is_tiered(slot) {
                    continue;
                }
                let depth = self.depth(self.extend(view, Lane(lane), Layer::Device, At { hop: 0, block: 0 }));
                let best = &mut out.device[usize::from(lane)];
                *best = depth.max(*best);
            }
        }
        for worker in &lanes.tiered {
            self.measure_tiers(view, worker, out);
        }
    }

    fn measure_tiers(&self, view: &View<'_>, worker: &TieredWorker, out: &mut ShardDepths) {
        let mut at = At { hop: 0, block: 0 };
        let mut found = [0_u32; 4];
        for layer in [Layer::Device, Layer::Host, Layer::Disk, Layer::External] {
            let lane = worker.lanes[layer.index()];
            if lane.is_some() {
                let before = self.depth(at);
                at = self.extend(view, lane, layer, at);
                if layer == Layer::Device && worker.lanes[Layer::Windows.index()].is_some() {
                    at = self.at(self.windowed(view, worker, self.depth(at)));
                }
                found[layer.index()] = self.depth(at) - before;
            }
        }
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

    /// How much of the first `device` blocks can be used again: the most at whose end the windows have as many blocks
    /// without a gap as they must, or all blocks there are.
    fn windowed(&self, view: &View<'_>, worker: &TieredWorker, device: u32) -> u32 {
        let lane = worker.lanes[Layer::Windows.index()];
        let device = self.windowed_blocks_max.map_or(device, |max| max.min(device));
        let (mut usable, mut run) = (0, 0..0);
        for hop in self.hops.iter().take_while(|hop| hop.depth < device) {
            let end = u32::from(hop.run).min(device - hop.depth);
            for held in window_runs(&hop.header, view.more(&hop.header), lane) {
                let (from, to) = (hop.depth + u32::from(held.from).min(end), hop.depth + u32::from(held.to).min(end));
                run = if run.end == from { run.start..to } else { from..to };
                if run.start == 0 || run.end - run.start >= worker.window_blocks {
                    usable = run.end.max(usable);
                }
            }
        }
        usable
    }

    /// The place so many blocks into the way.
    fn at(&self, depth: u32) -> At {
        let hop = self.hops.partition_point(|hop| hop.depth + u32::from(hop.header.len) <= depth);
        let block = self.hops.get(hop).map_or(0, |hop| depth - hop.depth);
        At { hop, block: block as u16 }
    }

    fn depth(&self, at: At) -> u32 {
        self.hops.get(at.hop).map_or_else(
            || self.hops.last().map_or(0, |last| last.depth + u32::from(last.run)),
            |hop| hop.depth + u32::from(at.block),
        )
    }

    /// How far a lane's run goes on from a place.
    fn extend(&self, view: &View<'_>, lane: Lane, layer: Layer, mut at: At) -> At {
        while let Some(hop) = self.hops.get(at.hop) {
            let end = covered_to(&hop.header, view.more(&hop.header), lane, layer, at.block).min(hop.run).max(at.block);
            if end < hop.header.len {
                return At { block: end, ..at };
            }
            at = At { hop: at.hop + 1, block: 0 };
        }
        at
    }
}

/// The end of the run of blocks from `from` on that a lane covers in a node.
fn covered_to(header: &Header, more: Option<&More>, lane: Lane, tier: Layer, from: u16) -> u16 {
    if lane.0 < 64 && header.mask >> lane.0 & 1 == 1 {
        return header.len;
    }
    let full = |more: &More| more.full.get(usize::from(lane.0 / 64)).is_some_and(|word| word >> (lane.0 % 64) & 1 == 1);
    if more.is_some_and(full) {
        return header.len;
    }
    if tier != Layer::Device
        && let Some((_, islands)) = more.and_then(|more| more.islands.iter().find(|(of, _)| *of == lane))
    {
        return islands.end_of_run(from);
    }
    let pairs = more.map_or(header.pairs(), |more| &more.partial);
    pairs.iter().find(|pair| pair.lane == lane.0).map_or(from, |pair| pair.cut.max(from))
}

/// The blocks of a node that a worker's windows have.
fn window_runs(header: &Header, more: Option<&More>, lane: Lane) -> impl Iterator<Item = Run> {
    let islands = more.and_then(|more| more.islands.iter().find(|(of, _)| *of == lane)).map(|(_, islands)| islands);
    let first = islands.is_none().then(|| Run::new(0, covered_to(header, more, lane, Layer::Windows, 0)));
    first.into_iter().chain(islands.into_iter().flat_map(Bits::runs))
}
