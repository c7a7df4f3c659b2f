//! The events of a shard, and every answer it may give: computed before a thread starts, and stored as changes, so that
//! many events take little memory.

use super::oracle::Oracle;
use super::oracle::event::{Event, Outcome};
use super::oracle::stream::{Stream, Style, with_windows};
use kvrouted::ids::{LocalHash, TierBlocks};
use kvrouted::index::ShardLimits;

/// The groups of the device tier that are windows, and how many blocks they need.
pub(crate) type Windows = (&'static [u32], u32);

/// Queries of one script.
const QUERIES_MAX: usize = 14;

pub(crate) struct Script {
    pub(crate) limits: ShardLimits,
    pub(crate) workers: usize,
    pub(crate) events: Vec<Event>,
    /// The expected outcome of each event.
    pub(crate) outcomes: Vec<Outcome>,
    pub(crate) queries: Vec<Vec<LocalHash>>,
    /// By worker and query.
    pub(crate) timelines: Vec<Vec<Timeline>>,
}

/// The answers of one worker to one query. A boundary is the number of events before it.
#[derive(Debug)]
pub(crate) struct Timeline {
    /// The boundary from which on an answer holds, and the answer; the first is from 0 on.
    changes: Vec<(u64, TierBlocks)>,
}

impl Timeline {
    fn new() -> Self {
        Self { changes: vec![(0, TierBlocks::default())] }
    }

    fn push(&mut self, boundary: u64, answer: TierBlocks) {
        if self.changes.last().is_none_or(|(_, last)| *last != answer) {
            self.changes.push((boundary, answer));
        }
    }

    /// The answers of the boundaries `from..=to`, each with the first of these boundaries that has it.
    pub(crate) fn within(&self, from: u64, to: u64) -> impl Iterator<Item = (u64, TierBlocks)> {
        let first = self.changes.partition_point(|(since, _)| *since <= from) - 1;
        let begun = self.changes[first..].iter().take_while(move |(since, _)| *since <= to);
        begun.map(move |(since, answer)| ((*since).max(from), *answer))
    }

    /// The first of the boundaries `from..=to` that has this answer.
    fn first(&self, from: u64, to: u64, answer: TierBlocks) -> Option<u64> {
        let (boundary, _) = self.within(from, to).find(|(_, of_boundary)| *of_boundary == answer)?;
        Some(boundary)
    }
}

impl Script {
    pub(crate) fn new(style: Style, limits: ShardLimits, seed: u64, events: usize) -> Self {
        Self::streamed(style, limits, seed, |stream| stream.events(events))
    }

    /// For workers whose engines have sliding windows.
    pub(crate) fn windowed(style: Style, limits: ShardLimits, seed: u64, events: usize, windows: Windows) -> Self {
        let (groups, blocks) = windows;
        Self::streamed(style, limits, seed, |stream| {
            with_windows(stream.events(events), style.of.workers, groups, blocks)
        })
    }

    /// The events of a stream, and some of the prompts that it knows.
    fn streamed(style: Style, limits: ShardLimits, seed: u64, events: impl FnOnce(Stream) -> Vec<Event>) -> Self {
        let workers = style.of.workers;
        let limits = ShardLimits { workers_max: workers, ..limits };
        let stream = Stream::new(style, limits, seed);
        let asked: Vec<&Vec<LocalHash>> = stream.queries().iter().filter(|query| !query.is_empty()).collect();
        let step = asked.len().div_ceil(QUERIES_MAX);
        let queries: Vec<Vec<LocalHash>> = asked.into_iter().step_by(step).cloned().collect();
        Self::of(limits, workers, events(stream), queries)
    }

    /// These events, and the queries beside them.
    pub(crate) fn of(limits: ShardLimits, workers: usize, events: Vec<Event>, queries: Vec<Vec<LocalHash>>) -> Self {
        // A removed worker can only come back into the slot it had.
        let limits = ShardLimits { workers_max: workers, ..limits };
        let timelines = (0..workers).map(|_| queries.iter().map(|_| Timeline::new()).collect()).collect();
        let mut script = Self { limits, workers, events, outcomes: Vec::new(), queries, timelines };
        script.work_out();
        script
    }

    /// The first of the boundaries `from..=to` at which these are the answers of all workers to a query.
    pub(crate) fn boundary(&self, at: usize, from: u64, to: u64, answers: &[TierBlocks]) -> Option<u64> {
        let mut boundary = from;
        loop {
            let before = boundary;
            for (timelines, answer) in self.timelines.iter().zip(answers) {
                boundary = timelines[at].first(boundary, to, *answer)?;
            }
            if boundary == before {
                return Some(boundary);
            }
        }
    }

    fn work_out(&mut self) {
        let mut oracles = vec![Oracle::default(); self.workers];
        let mut present = vec![true; self.workers];
        for (boundary, event) in (1..).zip(&self.events) {
            let Some(worker) = event.worker() else {
                self.outcomes.push(Outcome::Nothing);
                continue;
            };
            match event {
                Event::RemoveWorker { .. } => {
                    (present[worker], oracles[worker]) = (false, Oracle::default());
                }
                Event::AddWorker { .. } => present[worker] = true,
                _ => {}
            }
            let outcome = match present[worker] {
                true => event.apply_to_oracle(&mut oracles[worker], &self.limits),
                false => outcome_without_worker(event),
            };
            self.outcomes.push(outcome);
            for (query, timeline) in self.queries.iter().zip(&mut self.timelines[worker]) {
                timeline.push(boundary, oracles[worker].depths(query));
            }
        }
    }
}

/// The outcome of an event whose worker has been removed.
fn outcome_without_worker(event: &Event) -> Outcome {
    use kvrouted::index::{Refusal, RemoveOutcome, StoreOutcome};
    match event {
        Event::Window { .. } => Outcome::Announced(false),
        Event::Store(_) => {
            Outcome::Stored(StoreOutcome { refused: Some(Refusal::UnknownWorker), ..StoreOutcome::default() })
        }
        Event::Remove { hashes, .. } => {
            Outcome::Removed(RemoveOutcome { unknown: hashes.len() as u32, ..RemoveOutcome::default() })
        }
        _ => Outcome::Nothing,
    }
}
