//! One lookup in one shard: all lanes at once, an edge at a time.
//!
//! The quick walk is for shards of which no worker has more than a device lane, on ways where each content
//! has one name for each worker. It keeps the lanes that hold everything so far as bits; where lanes leave,
//! their depth is known. Everything else is in [`super::ways`].

#![expect(unsafe_code, reason = "readers follow what a header that was read as a whole says")]

use super::arena::ArenaView;
use super::compare::common_prefix;
use super::header::{FORKED, Header, LEAF, Pair};
use super::lanes::LaneTable;
use super::more::More;
use super::node::NodeId;
use super::reader::ShardDepths;
use super::record::{LANES, record};
use super::table::{Found, Segments};
use super::ways::Ways;

/// Blocks of a node from which on it is worth looking at the next one half way.
const PEEK_BLOCKS_MIN: usize = 64;
/// Lines of the next node's blocks that are asked for then.
const PEEK_LINES: u32 = 8;
const BLOCKS_OF_LINE: u32 = 8;

/// What a walk looks at; all of it stays where it is while the reader is inside.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    pub(super) table: Segments<'a>,
    pub(super) arena: &'a ArenaView,
    pub(super) lanes: &'a LaneTable,
}

impl<'a> View<'a> {
    /// The local hashes of a node.
    pub(super) fn blocks(&self, header: &Header) -> &'a [u64] {
        // SAFETY: the header was read as a whole, so these are the words of a node as it was at some moment
        // since the reader entered. They are written before the header says so and neither changed nor used
        // again before the reader has left.
        unsafe { self.arena.words(header.base, u32::from(header.len)) }
    }

    /// As [`common_prefix`] of a node's blocks and what is left of the query. Where the node is long, the
    /// header of the one that follows is looked at half way, so that its first blocks are on their way when they
    /// are wanted.
    #[inline]
    fn compare(&self, header: &Header, rest: &[u64]) -> usize {
        let blocks = self.blocks(header);
        let len = blocks.len();
        if len < PEEK_BLOCKS_MIN || rest.len() <= len || header.has(LEAF) {
            return common_prefix(blocks, rest);
        }
        let half = len / 2;
        let run = common_prefix(&blocks[..half], rest);
        if run < half {
            return run;
        }
        if let Found::Here(_, _, next) = self.table.find(header.id, rest[len], 0) {
            for line in 0..PEEK_LINES.min(u32::from(next.len).div_ceil(BLOCKS_OF_LINE)) {
                self.arena.prefetch(next.base + line * BLOCKS_OF_LINE);
            }
        }
        half + common_prefix(&blocks[half..], &rest[half..])
    }

    /// The record beside a header, where there is one.
    pub(super) fn more(&self, header: &Header) -> Option<&'a More> {
        // SAFETY: as above: the address was a box's that is dropped only after a grace period.
        (header.more != 0).then(|| unsafe { &*(header.more as *const More) })
    }
}

/// The working memory of a lookup, kept from one to the next.
#[derive(Clone, Debug, Default)]
pub(super) struct Walk {
    /// The lines of the way, and their versions.
    steps: Vec<(u32, u32)>,
    /// Lanes that hold everything so far, where there are more than fit in a word.
    active: Vec<u64>,
    pub(super) ways: Ways,
}

/// How a walk ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Whole,
    /// Something was being changed.
    Busy,
    /// One content has several names here.
    Forked,
}

impl Walk {
    /// Fills `out` as the shard is; says whether nothing was being changed that was looked at.
    pub(super) fn run(&mut self, view: &View<'_>, locals: &[u64], out: &mut ShardDepths) -> bool {
        let lanes = view.lanes;
        if out.edition != lanes.edition {
            out.edition = lanes.edition;
            out.lanes.clone_from(&lanes.devices);
        }
        out.device.clear();
        out.device.resize(lanes.device.len() * LANES, 0);
        out.lower.clear();
        self.steps.clear();
        if lanes.tiered.is_empty() {
            let end = match &lanes.device[..] {
                [] => End::Whole,
                [device] => self.walk_word(view, locals, *device, &mut out.device),
                _ => self.walk_words(view, locals, &mut out.device),
            };
            if end != End::Forked {
                return end == End::Whole;
            }
            self.steps.clear();
            out.device.fill(0);
        } else {
            out.lower.resize(lanes.workers, [0; 3]);
        }
        self.ways.run(view, locals, &mut self.steps, out)
    }

    /// Lines looked for and lanes looked at by all walks on several ways so far.
    #[cfg(test)]
    pub(super) fn steps_of_ways(&self) -> usize {
        self.ways.steps
    }

    /// How many headers the last walk met.
    #[cfg(test)]
    pub(super) fn lines_met(&self) -> usize {
        self.steps.len()
    }

    /// Whether all that was walked is as it was.
    #[inline]
    pub(super) fn is_unchanged(&self, table: Segments<'_>) -> bool {
        self.steps.iter().all(|(line, version)| table.version(*line) == *version)
    }

    fn walk_word(&mut self, view: &View<'_>, locals: &[u64], device: u64, out: &mut [u32]) -> End {
        let Some(out) = out.first_chunk_mut::<LANES>() else { return End::Whole };
        let mut active = device;
        let (mut parent, mut depth) = (NodeId::ROOT.0, 0);
        while depth < locals.len() && active != 0 {
            let (header, run) = match hop(&mut self.steps, view, parent, &locals[depth..]) {
                Ok(Some(edge)) => edge,
                Ok(None) => break,
                Err(end) => return end,
            };
            let mut leaving = active & !header.mask;
            active &= header.mask;
            let pairs = view.more(&header).map_or(header.pairs(), |more| &more.partial);
            for Pair { lane, cut } in pairs {
                let bit = 1 << (lane & 63);
                if leaving & bit != 0 {
                    leaving &= !bit;
                    out[usize::from(lane & 63)] = (depth + run.min(usize::from(*cut))) as u32;
                }
            }
            if depth > 0 {
                record(out, leaving, depth as u32);
            }
            depth += run;
            if run < usize::from(header.len) || header.has(LEAF) {
                break;
            }
            parent = header.id;
        }
        record(out, active, depth as u32);
        End::Whole
    }

    fn walk_words(&mut self, view: &View<'_>, locals: &[u64], out: &mut [u32]) -> End {
        let (out, _) = out.as_chunks_mut::<LANES>();
        let active = &mut self.active;
        active.clear();
        active.extend_from_slice(&view.lanes.device);
        // From the first lane there is to the last: without any, nothing is walked, and no record is followed that
        // went with its writer.
        let mut words = 0..active.len();
        narrow(active, &mut words);
        let (mut parent, mut depth) = (NodeId::ROOT.0, 0);
        while depth < locals.len() && !words.is_empty() {
            let (header, run) = match hop(&mut self.steps, view, parent, &locals[depth..]) {
                Ok(Some(edge)) => edge,
                Ok(None) => break,
                Err(end) => return end,
            };
            let more = view.more(&header);
            let pairs = more.map_or(header.pairs(), |more| &more.partial);
            // Lanes that hold part of the node end in it; those that hold all of it and are named, not masked, go on.
            for Pair { lane, cut } in pairs.iter().filter(|pair| pair.cut < header.len) {
                // A lane that came after the lanes that this walk knows: the shard has been torn since.
                let Some(word) = active.get_mut(usize::from(lane / 64)) else { continue };
                let bit = 1 << (lane % 64);
                if *word & bit != 0 {
                    *word &= !bit;
                    out[usize::from(lane / 64)][usize::from(lane % 64)] = (depth + run.min(usize::from(*cut))) as u32;
                }
            }
            for at in words.clone() {
                let full = match more {
                    Some(more) => more.full.get(at).copied().unwrap_or(0),
                    None => named(&header, at),
                };
                let leaving = active[at] & !full;
                active[at] &= full;
                if depth > 0 {
                    record(&mut out[at], leaving, depth as u32);
                }
            }
            narrow(active, &mut words);
            depth += run;
            if run < usize::from(header.len) || header.has(LEAF) {
                break;
            }
            parent = header.id;
        }
        for at in words {
            record(&mut out[at], active[at], depth as u32);
        }
        End::Whole
    }
}

/// The edge below `parent` on which the rest of the query goes on, and how many of its blocks the query has.
#[inline(always)]
fn hop(
    steps: &mut Vec<(u32, u32)>,
    view: &View<'_>,
    parent: u32,
    rest: &[u64],
) -> Result<Option<(Header, usize)>, End> {
    let (line, version, header) = match view.table.find(parent, rest[0], 0) {
        Found::Here(line, version, header) => (line, version, header),
        Found::Missing => return Ok(None),
        Found::Busy => return Err(End::Busy),
    };
    steps.push((line, version));
    if header.has(FORKED) {
        return Err(End::Forked);
    }
    if let Some(next) = rest.get(usize::from(header.len)).filter(|_| !header.has(LEAF)) {
        view.table.prefetch(header.id, *next, 0);
    }
    let run = view.compare(&header, rest);
    Ok(Some((header, run)))
}

/// Leaves out words without a lane at either end.
#[inline]
fn narrow(active: &[u64], words: &mut std::ops::Range<usize>) {
    while words.end > words.start && active[words.end - 1] == 0 {
        words.end -= 1;
    }
    while words.start < words.end && active[words.start] == 0 {
        words.start += 1;
    }
}

/// The lanes of one word that hold all of a node, where its header says it all.
pub(super) fn named(header: &Header, word: usize) -> u64 {
    let masked = if word == 0 { header.mask } else { 0 };
    let named = header.pairs().iter().filter(|pair| pair.cut == header.len && usize::from(pair.lane / 64) == word);
    named.fold(masked, |lanes, pair| lanes | 1 << (pair.lane % 64))
}
