//! The walk of a lookup through one shard: all holder bits at once, an edge at a time.
//!
//! # The fast walk
//!
//! It serves paths where each content has one name for each worker, unless a worker of the shard has windows. It keeps the
//! device holder bits that hold everything so far as a bit set; where one drops out, its depth is known. A worker with
//! lower tiers goes on by these from there. So few workers are looked at one by one: those of whose lower tiers the node has
//! entries in which their device runs end.
//!
//! # The branching walk
//!
//! It serves all other lookups: where one content has several names, or where workers have windows.
//!
//! The paths that a query can take are a tree of nodes. Each node is walked once, one branch to its end before the next
//! branch. The walk carries its state along: which device holder bits hold everything so far, and how far each worker
//! with several tiers has come. The **trail** records the changes of each hop, so that the next branch begins with the
//! state at its fork. A branch ends where no worker holds anything of it. So a lookup takes a number of steps in
//! proportion to the nodes that it meets, however many branches there are.
//!
//! A worker with sliding windows can use its device run up to the last place where the windows have enough blocks. Its
//! lower tiers count only if that place is the end of the run: no engine's rule says what a lower tier adds to a run
//! that the windows cut back.

#![expect(unsafe_code, reason = "readers follow addresses in headers that were read as a whole")]

use super::arena::ArenaView;
use super::header::{FORKED, Header, LEAF, Overflow, Partial, partials};
use super::holders::{HolderBit, HolderTable, Layer, TieredWorker};
use super::node::{Bits, NodeId, Run};
use super::reader::ShardDepths;
#[cfg(all(target_arch = "x86_64", not(miri)))]
use super::simd::Avx512;
use super::simd::{Chosen, LINES_AHEAD, Vectors, WORD_HOLDERS, common_prefix, record};
use super::slow_path::ALIASES_CEILING;
use super::table::{Found, Search, Segments};
use crate::ids::Tier;

/// Blocks from which on a node is long enough to prefetch its blocks, and the next one's from its middle. The processor
/// reads fewer side by side in any case.
const LONG_BLOCKS_MIN: usize = 64;
/// Lines of the next node's blocks that are prefetched then.
const PEEK_LINES: u32 = 8;
/// Lines of a node's blocks that are prefetched when its header is known. The vector code prefetches those behind.
const BLOCK_LINES_FIRST: u32 = LINES_AHEAD as u32;
const BLOCKS_OF_LINE: u32 = 8;

/// The shared memory that a walk reads. All of it stays mapped while the reader is inside.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    pub(super) table: Segments<'a>,
    pub(super) arena: &'a ArenaView,
    pub(super) holders: &'a HolderTable,
}

impl<'a> View<'a> {
    pub(super) fn blocks(&self, header: &Header) -> &'a [u64] {
        // SAFETY: the header was read as a whole, so these are the words of a node at some moment since the reader
        // entered. They are written before a header names them, and are neither changed nor reused before the reader
        // has left.
        unsafe { self.arena.words(header.base, u32::from(header.len)) }
    }

    /// Prefetches the first lines of a node's blocks.
    #[inline(always)]
    fn prefetch_blocks(&self, header: &Header, lines_max: u32) {
        self.arena.prefetch(header.base, u32::from(header.len).min(lines_max * BLOCKS_OF_LINE));
    }

    /// As [`common_prefix`] of a node's blocks and the rest of the query, which begin with the same block. In the middle
    /// of a long node, it looks up the header of the next one, so that the next one's first blocks are prefetched in
    /// time.
    #[inline(always)]
    fn compare(&self, with: impl Vectors, header: &Header, rest: &[u64], next: Option<Search<'a>>) -> usize {
        let blocks = self.blocks(header);
        if blocks.len() < LONG_BLOCKS_MIN {
            return with.common_prefix(blocks, rest);
        }
        self.prefetch_blocks(header, BLOCK_LINES_FIRST);
        let Some(next) = next else { return with.common_prefix(blocks, rest) };
        let half = blocks.len() / 2;
        let run = with.common_prefix(blocks, &rest[..half]);
        if run < half {
            return run;
        }
        if let Found::Here(_, _, next) = next.find() {
            self.prefetch_blocks(&next, PEEK_LINES);
        }
        half + with.common_prefix(&blocks[half..], &rest[half..])
    }

    /// The overflow record of a header, if it has one.
    pub(super) fn overflow(&self, header: &Header) -> Option<&'a Overflow> {
        // SAFETY: as above: the address was a box's that is dropped only after a grace period.
        (header.overflow != 0).then(|| unsafe { &*(header.overflow as *const Overflow) })
    }
}

/// The working memory of a lookup, reused by the next.
#[derive(Clone, Debug, Default)]
pub(super) struct Walk {
    /// The lines of the path, and their versions.
    steps: Vec<(u32, u32)>,
    /// Holder bits that hold everything so far, if there are more than fit in a word.
    active: Vec<u64>,
    /// Device holder bits that dropped out in the present node, 64 to a word.
    left: Vec<u64>,
    /// Workers whose device runs have ended, by position in [`HolderTable::tiered`], while a lower tier's goes on.
    descended: Vec<(u16, Reach)>,
    pub(super) branching: BranchingWalk,
}

/// Why a fast walk did not come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// A node was being changed.
    Busy,
    /// One content has several names here.
    Forked,
}

/// The way of a fast walk: an edge at a time, for as long as the query has all blocks of each.
struct Path<'a, 'q> {
    view: View<'a>,
    /// The blocks of the query from the next edge on.
    rest: &'q [u64],
    /// Blocks before them.
    depth: usize,
    /// The search for the next edge; `None` if there is none.
    next: Option<Search<'a>>,
}

/// An edge of a path.
struct Edge<'a> {
    header: Header,
    overflow: Option<&'a Overflow>,
    /// Blocks before it.
    depth: usize,
    /// How many of its blocks the query has.
    run: usize,
}

impl<'a, 'q> Path<'a, 'q> {
    #[inline(always)]
    fn new(view: View<'a>, query: &'q [u64]) -> Self {
        let next = query.first().map(|first| view.table.search(NodeId::ROOT.0, *first));
        Self { view, rest: query, depth: 0, next }
    }

    /// The next edge.
    #[inline(always)]
    fn hop(&mut self, with: impl Vectors, steps: &mut Vec<(u32, u32)>) -> Result<Option<Edge<'a>>, Stop> {
        let Some(search) = self.next.take() else { return Ok(None) };
        let (line, version, header) = match search.find() {
            Found::Here(line, version, header) => (line, version, header),
            Found::Missing => return Ok(None),
            Found::Busy => return Err(Stop::Busy),
        };
        steps.push((line, version));
        if header.has(FORKED) {
            return Err(Stop::Forked);
        }
        // Its key follows from the header, so it is prefetched before the blocks are compared.
        let following = self.rest.get(usize::from(header.len)).filter(|_| !header.has(LEAF));
        let next = following.map(|first| self.view.table.search(header.id, *first));
        let run = self.view.compare(with, &header, self.rest, next);
        let edge = Edge { overflow: self.view.overflow(&header), depth: self.depth, run, header };
        if run == usize::from(edge.header.len) {
            (self.next, self.rest) = (next, &self.rest[run..]);
        }
        self.depth += run;
        Ok(Some(edge))
    }
}

impl Walk {
    /// Fills `out` with the shard's state; `false` if the walk met a node that was being changed.
    #[inline]
    pub(super) fn run(&mut self, view: &View<'_>, locals: &[u64], out: &mut ShardDepths) -> bool {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if let Some(vectors) = Avx512::here() {
            // SAFETY: `vectors` proves that the processor has these instructions.
            return unsafe { self.run_avx512(vectors, view, locals, out) };
        }
        self.run_with(Chosen, view, locals, out)
    }

    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[target_feature(enable = "avx512f,bmi2")]
    fn run_avx512(&mut self, with: Avx512, view: &View<'_>, locals: &[u64], out: &mut ShardDepths) -> bool {
        self.run_with(with, view, locals, out)
    }

    #[inline(always)]
    fn run_with(&mut self, with: impl Vectors, view: &View<'_>, locals: &[u64], out: &mut ShardDepths) -> bool {
        out.fit(view.holders);
        if !view.holders.has_windows {
            self.steps.clear();
            match self.walk(with, view, locals, out) {
                Ok(()) => return true,
                Err(Stop::Busy) => return false,
                Err(Stop::Forked) => {}
            }
        }
        self.steps.clear();
        out.clear(view.holders);
        self.branching.run(view, locals, &mut self.steps, out)
    }

    #[inline(always)]
    fn walk(&mut self, with: impl Vectors, view: &View<'_>, locals: &[u64], out: &mut ShardDepths) -> Result<(), Stop> {
        let path = Path::new(*view, locals);
        if view.holders.tiered.is_empty()
            && let ([device], [out]) = (&view.holders.device[..], out.device.as_chunks_mut().0)
        {
            return self.walk_word(with, path, *device, out);
        }
        out.clear(view.holders);
        if view.holders.tiered.is_empty() {
            self.walk_words(with, path, out.device.as_chunks_mut().0)
        } else {
            self.walk_tiers(path, out)
        }
    }

    /// Lines searched and holder bits visited by all branching walks so far.
    #[cfg(test)]
    pub(super) fn branching_steps(&self) -> usize {
        self.branching.steps
    }

    /// Headers that the last walk met.
    #[cfg(test)]
    pub(super) fn lines_met(&self) -> usize {
        self.steps.len()
    }

    /// Whether no line of the walk has changed since.
    #[inline]
    pub(super) fn is_unchanged(&self, table: Segments<'_>) -> bool {
        self.steps.iter().all(|(line, version)| table.version(*line) == *version)
    }

    /// Writes the depth of each device holder bit, so `out` need not be cleared before.
    #[inline(always)]
    fn walk_word(
        &mut self,
        with: impl Vectors,
        mut path: Path<'_, '_>,
        device: u64,
        out: &mut [u32; WORD_HOLDERS],
    ) -> Result<(), Stop> {
        let mut active = device;
        let mut end = Ok(());
        while active != 0 {
            let Edge { header, overflow, depth, run } = match path.hop(with, &mut self.steps) {
                Ok(Some(edge)) => edge,
                Ok(None) => break,
                Err(stop) => {
                    end = Err(stop);
                    break;
                }
            };
            let mut leaving = active & !header.mask;
            active &= header.mask;
            if leaving == 0 {
                continue;
            }
            for Partial { holder, cut } in partials(&header, overflow) {
                let bit = 1 << (holder & 63);
                if leaving & bit != 0 {
                    leaving &= !bit;
                    out[usize::from(holder & 63)] = (depth + run.min(usize::from(cut))) as u32;
                }
            }
            with.record(out, leaving, depth as u32);
        }
        with.record(out, active, path.depth as u32);
        end
    }

    #[inline(always)]
    fn walk_words(
        &mut self,
        with: impl Vectors,
        mut path: Path<'_, '_>,
        out: &mut [[u32; WORD_HOLDERS]],
    ) -> Result<(), Stop> {
        let active = &mut self.active;
        active.clone_from(&path.view.holders.device);
        // From the first holder bit that exists to the last. Without any, nothing is walked, and no overflow record is
        // followed that was freed with its writer.
        let mut words = 0..active.len();
        narrow(active, &mut words);
        while !words.is_empty()
            && let Some(edge) = path.hop(with, &mut self.steps)?
        {
            drop_out(with, &edge, (&mut *active, words.clone()), out);
            narrow(active, &mut words);
        }
        for at in words {
            with.record(&mut out[at], active[at], path.depth as u32);
        }
        Ok(())
    }

    /// As [`Self::walk_words`], beside workers with several tiers.
    fn walk_tiers(&mut self, mut path: Path<'_, '_>, out: &mut ShardDepths) -> Result<(), Stop> {
        let Self { steps, active, left, descended, .. } = self;
        let holders = path.view.holders;
        active.clone_from(&holders.device);
        descended.clear();
        // Those without a device holder bit begin below it.
        let has_no_device = |at: &u16| !holders.tiered[usize::from(*at)].holders[Layer::Device.index()].is_some();
        descended.extend((0..holders.tiered.len() as u16).filter(has_no_device).map(|at| (at, START)));
        let mut words = 0..active.len();
        narrow(active, &mut words);
        while !(words.is_empty() && descended.is_empty())
            && let Some(edge) = path.hop(Chosen, steps)?
        {
            left.clone_from(active);
            drop_out(Chosen, &edge, (&mut *active, words.clone()), out.device.as_chunks_mut().0);
            left.iter_mut().zip(&*active).for_each(|(left, stays)| *left &= !stays);
            let (node, way) = ((&edge.header, edge.overflow), (edge.depth as u32, edge.run as u16));
            descended.retain_mut(|(at, reach)| descend(reach, node, &holders.tiered[usize::from(*at)], way, out));
            if left.iter().any(|word| *word != 0) {
                lower_entries(node, holders, |at| {
                    let worker = &holders.tiered[usize::from(at)];
                    let device = worker.holders[Layer::Device.index()].0;
                    // Each of its lower tiers may have an entry.
                    let bit = 1 << (device % 64);
                    if let Some(left) = left.get_mut(usize::from(device / 64)).filter(|left| **left & bit != 0) {
                        *left &= !bit;
                        let mut reach = START;
                        if descend(&mut reach, node, worker, way, out) {
                            descended.push((at, reach));
                        }
                    }
                });
            }
            narrow(active, &mut words);
        }
        for at in words {
            record(&mut out.device.as_chunks_mut().0[at], active[at], path.depth as u32);
        }
        for (at, reach) in &*descended {
            reach.arrive(&holders.tiered[usize::from(*at)], path.depth as u32, out);
        }
        Ok(())
    }
}

/// Takes out of `active` the device holder bits that do not cover an edge, and notes their depths. `words` are those in
/// which some are.
#[inline(always)]
fn drop_out(
    with: impl Vectors,
    Edge { header, overflow, depth, run }: &Edge<'_>,
    (active, words): (&mut [u64], std::ops::Range<usize>),
    out: &mut [[u32; WORD_HOLDERS]],
) {
    let (overflow, depth, run) = (*overflow, *depth, *run);
    // Holder bits that cover a part of the node end in it; those that cover all of it and are listed, not masked, go on.
    for Partial { holder, cut } in partials(header, overflow).filter(|partial| partial.cut < header.len) {
        // A holder bit that is newer than the table of this walk: there was a multi-write since.
        let Some(word) = active.get_mut(usize::from(holder / 64)) else { continue };
        let bit = 1 << (holder % 64);
        if *word & bit != 0 {
            *word &= !bit;
            out[usize::from(holder / 64)][usize::from(holder % 64)] = (depth + run.min(usize::from(cut))) as u32;
        }
    }
    for at in words {
        let full = match overflow {
            Some(overflow) => overflow.full.get(at).copied().unwrap_or(0),
            None => named(header, at),
        };
        let leaving = active[at] & !full;
        active[at] &= full;
        if depth > 0 {
            with.record(&mut out[at], leaving, depth as u32);
        }
    }
}

/// Takes the place in [`HolderTable::tiered`] of the worker of each entry of a lower tier in a node.
fn lower_entries((header, overflow): (&Header, Option<&Overflow>), holders: &HolderTable, mut take: impl FnMut(u16)) {
    for (at, lower) in holders.lower.iter().enumerate() {
        let full = match overflow {
            Some(overflow) => overflow.full.get(at).copied().unwrap_or(0),
            None => named(header, at),
        };
        let mut entries = full & lower;
        while entries != 0 {
            holders.tiered_by_lower((at * 64) as u16 + entries.trailing_zeros() as u16).into_iter().for_each(&mut take);
            entries &= entries - 1;
        }
    }
    partials(header, overflow).filter_map(|partial| holders.tiered_by_lower(partial.holder)).for_each(&mut take);
    let sparse = overflow.into_iter().flat_map(|overflow| &overflow.sparse);
    sparse.filter_map(|(holder, _)| holders.tiered_by_lower(holder.0)).for_each(take);
}

/// Moves a worker without windows along a node of which the query has the first `run` blocks. Whether a tier's run goes on; else
/// its depths are noted.
fn descend(
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

/// Drops empty words at either end.
#[inline]
fn narrow(active: &[u64], words: &mut std::ops::Range<usize>) {
    while words.end > words.start && active[words.end - 1] == 0 {
        words.end -= 1;
    }
    while words.start < words.end && active[words.start] == 0 {
        words.start += 1;
    }
}

/// The holder bits of one word that cover all of a node without an overflow record.
pub(super) fn named(header: &Header, word: usize) -> u64 {
    let masked = if word == 0 { header.mask } else { 0 };
    let named =
        header.partials().filter(|partial| partial.cut == header.len && usize::from(partial.holder / 64) == word);
    named.fold(masked, |holders, partial| holders | 1 << (partial.holder % 64))
}

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

/// How far a worker with several tiers has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reach {
    /// The tier whose run goes on, by [`Tier::index`]; [`TIERS`] after the last.
    tier: usize,
    /// Where that run begins, in blocks from the root.
    start: u32,
    /// Blocks of each tier before it.
    found: [u32; TIERS],
    /// The last run of blocks of its windows, if it has windows.
    windows: (u32, u32),
    /// Blocks from the root that its windows let it use.
    usable: u32,
}

const TIERS: usize = Tier::ALL.len();
/// Before the first block of the query.
const START: Reach = Reach { tier: 0, start: 0, found: [0; TIERS], windows: (0, 0), usable: 0 };

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

impl Reach {
    /// The state after a node of which the query has the first `run` blocks.
    fn along(
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
    fn arrive(self, worker: &TieredWorker, depth: u32, out: &mut ShardDepths) {
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

/// Keeps the best depth of a device holder bit.
fn best(out: &mut ShardDepths, holder: HolderBit, depth: u32) {
    if let Some(best) = out.device.get_mut(usize::from(holder.0)) {
        *best = depth.max(*best);
    }
}

/// Keeps the best depths of a worker with several tiers.
fn best_of_tiers(out: &mut ShardDepths, worker: &TieredWorker, found: [u32; TIERS]) {
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
