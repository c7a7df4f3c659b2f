//! The walk of a lookup through one shard: all holder bits at once, an edge at a time.
//!
//! It serves paths where each content has one name for each worker, unless a worker of the shard has windows. It keeps the
//! device holder bits that hold everything so far as a bit set; where one drops out, its depth is known. A worker with
//! lower tiers goes on by these from there. So few workers are looked at one by one: those of whose lower tiers the node has
//! entries in which their device runs end.
//!
//! All other lookups are [`branching_walk`](super::branching_walk)'s.

#![expect(unsafe_code, reason = "readers follow addresses in headers that were read as a whole")]

use super::arena::ArenaView;
use super::branching_walk::BranchingWalk;
use super::fingerprint::Fingerprinted;
use super::header::{FORKED, Header, LEAF, Overflow, Partial, partials};
use super::holders::{HolderTable, Layer};
use super::node::NodeId;
use super::reader::ShardDepths;
#[cfg(all(target_arch = "x86_64", not(miri)))]
use super::simd::Avx512;
use super::simd::{AnyProcessor, LINES_AHEAD, Vectors, WORD_HOLDERS, common_prefix};
use super::table::{Found, Search, Segments};
use super::tier_reach::{Reach, START, descend};
use super::types::LINE_BLOCKS;

/// Blocks from which on a node is compared by its fingerprints, if there are any, and what is read of the next one is
/// prefetched from its middle. The processor reads fewer lines side by side in any case.
const LONG_BLOCKS_MIN: u32 = 64;
/// Lines of the next node's blocks that are prefetched then.
const PEEK_LINES: u32 = 8;
/// Lines of a node's blocks that are prefetched when its header is known. The vector code prefetches those behind.
const BLOCK_LINES_FIRST: u32 = LINES_AHEAD as u32;

/// The shared memory that a walk reads. All of it stays mapped while the reader is inside.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    pub(super) table: Segments<'a>,
    pub(super) arena: &'a ArenaView,
    pub(super) holders: &'a HolderTable,
}

impl<'a> View<'a> {
    /// As [`common_prefix`](super::simd::common_prefix) of a node's blocks and the rest of the query, which begin with
    /// the same block. In the middle of a long node, it looks up the header of the next one, so that the next one's
    /// first lines are prefetched in time.
    #[inline(always)]
    pub(super) fn compare(&self, with: impl Vectors, header: &Header, rest: &[u64], next: Option<Search<'a>>) -> usize {
        let blocks = NodeBlocks::of(self.arena, header);
        if blocks.len < LONG_BLOCKS_MIN { with.common_prefix(blocks.words(), rest) } else { blocks.compare(rest, next) }
    }

    /// The overflow record of a header, if it has one.
    pub(super) fn overflow(&self, header: &Header) -> Option<&'a Overflow> {
        // SAFETY: the header was read as a whole, so the address was a box's at some moment since the reader entered. The
        // box is dropped only after a grace period.
        (header.overflow != 0).then(|| unsafe { &*(header.overflow as *const Overflow) })
    }
}

/// The blocks of a node in the arena. A walk keeps its header in registers, so this does not refer to it.
#[derive(Clone, Copy, Debug)]
struct NodeBlocks<'a> {
    arena: &'a ArenaView,
    base: u32,
    len: u32,
}

impl<'a> NodeBlocks<'a> {
    #[inline(always)]
    fn of(arena: &'a ArenaView, header: &Header) -> Self {
        Self { arena, base: header.base, len: u32::from(header.len) }
    }

    #[inline(always)]
    fn words(self) -> &'a [u64] {
        // SAFETY: the header was read as a whole, so these are the words of a node at some moment since the reader
        // entered. They are written before a header names them, and are neither changed nor reused before the reader
        // has left.
        unsafe { self.arena.words(self.base, self.len) }
    }

    /// The same with their fingerprints, on a processor that has those.
    fn fingerprinted(self) -> Option<Fingerprinted<'a>> {
        // SAFETY: as in `words`; they are sealed before a header names them.
        unsafe { self.arena.fingerprinted(self.base, self.len) }
    }

    /// Prefetches the first lines.
    fn prefetch_first(self, lines_max: u32) {
        self.arena.prefetch(self.base, self.len.min(lines_max * LINE_BLOCKS as u32));
    }

    /// Prefetches what [`View::compare`] reads first.
    fn prefetch(self) {
        match self.fingerprinted().filter(|_| self.len >= LONG_BLOCKS_MIN) {
            Some(blocks) => blocks.prefetch(),
            None => self.prefetch_first(PEEK_LINES),
        }
    }

    /// [`View::compare`] for a long node.
    #[inline(never)]
    fn compare(self, rest: &[u64], next: Option<Search<'a>>) -> usize {
        let prefetch_next = |next: Option<Search<'a>>| {
            if let Some(Found::Here(_, _, next)) = next.map(Search::find) {
                Self::of(self.arena, &next).prefetch();
            }
        };
        if let Some(blocks) = self.fingerprinted() {
            blocks.prefetch();
            return blocks.common_prefix(rest, || prefetch_next(next));
        }
        self.prefetch_first(BLOCK_LINES_FIRST);
        let blocks = self.words();
        let half = blocks.len() / 2;
        let run = common_prefix(&blocks[..half], rest);
        if run < half {
            return run;
        }
        prefetch_next(next);
        half + common_prefix(&blocks[half..], &rest[half..])
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
        self.run_with(AnyProcessor, view, locals, out)
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
            self.walk_tiers(with, path, out)
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
    #[inline(always)]
    fn walk_tiers(&mut self, with: impl Vectors, mut path: Path<'_, '_>, out: &mut ShardDepths) -> Result<(), Stop> {
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
            && let Some(edge) = path.hop(with, steps)?
        {
            left.clone_from(active);
            drop_out(with, &edge, (&mut *active, words.clone()), out.device.as_chunks_mut().0);
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
            with.record(&mut out.device.as_chunks_mut().0[at], active[at], path.depth as u32);
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
