//! The quick walks of several shards, side by side.
//!
//! A walk is a chain of cache misses: a header, the blocks that it points at, the next header. The chains of
//! two shards have nothing to do with each other, so each **round** takes every shard one edge further and asks for
//! what that shard's next round looks at: what one waits for is on its way while the others are walked.
//!
//! A shard alone has nothing to overlap with: [`super::walk`] goes to the end of its way in one loop, with the same steps.
//!
//! Here every shard is tried once, and nothing is waited for. A shard that this cannot answer is left to
//! [`super::walk`], alone: one that is torn or has changed meanwhile, one with tiers or with more than a word of
//! lanes, and one where a content on the way has several names.
//!
//! The orderings are those of a walk alone. For each shard, what is compared at the end is loaded before its
//! first line, and compared behind a fence that all loads of its walk come before; what was loaded of other
//! shards between is no part of the argument, so each shard's answer is of a moment of its own.

use super::header::{Header, LEAF};
use super::node::NodeId;
use super::reader::{Moment, ShardDepths, ShardReader};
use super::reclaim::Guard;
use super::record::{LANES, record};
use super::sync::{Ordering, fence};
use super::walk::{End, View};

/// Shards that are walked side by side; of more, so many at a time.
pub(super) const ABREAST_MAX: usize = 8;

/// A line on the way of one of the shards.
#[derive(Clone, Copy, Debug)]
struct Step {
    /// Which shard, by its place in the call.
    at: u8,
    line: u32,
    version: u32,
}

/// The working memory of such walks, kept from one lookup to the next.
#[derive(Clone, Debug, Default)]
pub(super) struct Abreast {
    steps: Vec<Step>,
}

/// Which shards have been answered.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Answered {
    /// A bit for each shard, by its place in the call.
    shards: u8,
    /// Batches that had ended, over these shards.
    pub(super) epoch: u64,
}

const _: () = assert!(ABREAST_MAX <= u8::BITS as usize, "a bit for each shard");

impl Answered {
    /// Whether the shard at a place of the call has its answer.
    #[inline]
    pub(super) const fn has(&self, at: usize) -> bool {
        self.shards >> at & 1 == 1
    }
}

impl Abreast {
    /// Fills `out`, one for each reader, where that can be done quickly; what is in the others means nothing.
    pub(super) fn run(
        &mut self,
        guard: &Guard<'_>,
        readers: &[ShardReader],
        locals: &[u64],
        out: &mut [ShardDepths],
    ) -> Answered {
        self.steps.clear();
        let mut courses = [const { None }; ABREAST_MAX];
        for ((course, reader), out) in courses.iter_mut().zip(readers).zip(&mut *out) {
            *course = Course::begin(reader, guard, locals, out);
        }
        self.finish(&mut courses, locals, out);
        // Orders every load of the walks before those of `is_still`; `version` has a fence of its own.
        fence(Ordering::Acquire);
        let mut changed = 0_u8;
        for Step { at, line, version } in &self.steps {
            if let Some(course) = &courses[usize::from(*at)] {
                changed |= u8::from(course.view.table.version(*line) != *version) << at;
            }
        }
        let mut answered = Answered::default();
        for (at, (course, reader)) in courses.iter().zip(readers).enumerate() {
            if let Some(Course { moment, .. }) = course
                && changed >> at & 1 == 0
                && reader.is_still(moment)
            {
                answered.shards |= 1 << at;
                answered.epoch += moment.epoch;
            }
        }
        answered
    }

    /// Goes round until no shard has an edge left. Those that cannot go on have no course then.
    fn finish(&mut self, courses: &mut [Option<Course<'_>>; ABREAST_MAX], locals: &[u64], out: &mut [ShardDepths]) {
        let mut under_way = u8::MAX >> (u8::BITS as usize - out.len());
        while under_way != 0 {
            let mut round = under_way;
            while round != 0 {
                let at = round.trailing_zeros() as usize;
                round &= round - 1;
                let end = courses[at].as_mut().map_or(Some(End::Busy), |course| {
                    course.advance(locals, at as u8, &mut self.steps, &mut out[at].device)
                });
                if let Some(end) = end {
                    under_way &= !(1 << at);
                    if end != End::Whole {
                        courses[at] = None;
                    }
                }
            }
        }
    }
}

/// Where the walk of one shard has come to.
#[derive(Debug)]
struct Course<'a> {
    moment: Moment,
    view: View<'a>,
    /// Lanes that hold everything so far.
    active: u64,
    /// The edge whose blocks have been asked for.
    edge: Option<Header>,
    /// What it, or the first edge, hangs below.
    parent: u32,
    /// Blocks before it.
    depth: usize,
}

impl<'a> Course<'a> {
    /// Asks for the shard's first line. `None` if this is nothing for a quick walk.
    #[inline]
    fn begin(reader: &'a ShardReader, guard: &'a Guard<'_>, locals: &[u64], out: &mut ShardDepths) -> Option<Self> {
        let (moment, view) = reader.begin(guard)?;
        let lanes = view.lanes;
        if !lanes.tiered.is_empty() || lanes.device.len() > 1 {
            return None;
        }
        if let Some(first) = locals.first() {
            view.table.prefetch(NodeId::ROOT.0, *first, 0);
        }
        out.prepare(lanes);
        let active = lanes.device.first().copied().unwrap_or(0);
        Some(Self { moment, view, active, edge: None, parent: NodeId::ROOT.0, depth: 0 })
    }

    /// Goes over the edge that was asked for, and finds the next one; says how the walk ended, if it has.
    #[inline]
    fn advance(&mut self, locals: &[u64], at: u8, steps: &mut Vec<Step>, out: &mut [u32]) -> Option<End> {
        // Without a lane, nothing is walked, and no record is followed that went with its writer.
        let Some(out) = out.first_chunk_mut::<LANES>() else { return Some(End::Whole) };
        let mut last = false;
        if let Some(edge) = &self.edge {
            let run = self.view.compare(edge, &locals[self.depth..]);
            self.active = self.view.leave(edge, self.depth, run, self.active, out);
            self.depth += run;
            self.parent = edge.id;
            last = run < usize::from(edge.len) || edge.has(LEAF);
        }
        if !last && self.active != 0 && self.depth < locals.len() {
            let rest = &locals[self.depth..];
            match self.view.seek(self.parent, rest) {
                Ok(Some((line, version, header))) => {
                    steps.push(Step { at, line, version });
                    self.view.prefetch(&header, rest.len());
                    self.edge = Some(header);
                    return None;
                }
                Ok(None) => {}
                Err(end) => return Some(end),
            }
        }
        record(out, self.active, self.depth as u32);
        Some(End::Whole)
    }
}
