//! The readers: every answer must be that of one boundary within the read.

use super::oracle::checked_shard::numbers;
use super::player::Progress;
use super::script::Script;
use kvrouted::ids::{ShardId, TierBlocks, WorkerSlot};
use kvrouted::index::{Depths, IndexReader};
use std::sync::atomic::Ordering;

pub(crate) const SHARD: ShardId = ShardId(0);

/// The counts of a reader.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) reads: u64,
    /// Contended reads, whose answers may mix boundaries; these are not checked.
    pub(crate) contended: u64,
    /// Reads during which an event began or ended.
    pub(crate) beside_an_event: u64,
    /// Reads in which the answer for a worker differs from the one before.
    pub(crate) changed: u64,
}

impl Seen {
    pub(crate) const fn plus(self, other: Self) -> Self {
        Self {
            reads: self.reads + other.reads,
            contended: self.contended + other.contended,
            beside_an_event: self.beside_an_event + other.beside_an_event,
            changed: self.changed + other.changed,
        }
    }
}

/// One reader's memory.
struct Watcher<'a> {
    script: &'a Script,
    reader: &'a IndexReader,
    progress: &'a Progress,
    depths: Depths,
    /// The first boundary that the last answer may belong to: no later answer belongs to an earlier one.
    boundary: u64,
    /// The answers of all workers to the current query.
    answers: Vec<TierBlocks>,
    /// The last answers, by query.
    last: Vec<Vec<TierBlocks>>,
    seen: Seen,
}

/// Reads until the writer has finished, and once after.
pub(crate) fn watch(script: &Script, reader: &IndexReader, progress: &Progress) -> Seen {
    let (depths, answers) = (Depths::new(), vec![TierBlocks::default(); script.workers]);
    let last = vec![answers.clone(); script.queries.len()];
    let seen = Seen::default();
    let mut watcher = Watcher { script, reader, progress, depths, boundary: 0, answers, last, seen };
    loop {
        let ended = progress.ended.load(Ordering::SeqCst);
        (0..script.queries.len()).for_each(|at| watcher.read(at));
        if ended {
            return watcher.seen;
        }
    }
}

impl Watcher<'_> {
    fn read(&mut self, at: usize) {
        let publishes_done = self.progress.publishes_done.load(Ordering::SeqCst);
        let from = self.progress.done.load(Ordering::SeqCst);
        let lookup = self.reader.lookup(&self.script.queries[at], &mut self.depths);
        let to = self.progress.begun.load(Ordering::SeqCst);
        let publishes_begun = self.progress.publishes_begun.load(Ordering::SeqCst);
        self.seen.reads += 1;
        self.seen.beside_an_event += u64::from(from != to);
        if lookup.contended {
            self.seen.contended += 1;
            return;
        }
        let epochs = publishes_done..=publishes_begun;
        assert!(epochs.contains(&lookup.epoch), "epoch {} is not one of {epochs:?}", lookup.epoch);
        for (worker, answer) in self.answers.iter_mut().enumerate() {
            let slot = WorkerSlot(worker as u16);
            *answer = self.depths.of(SHARD, slot);
            assert_eq!(self.depths.device(SHARD, slot), answer.device);
        }
        match self.script.boundary(at, from.max(self.boundary), to, &self.answers) {
            Some(boundary) => self.boundary = boundary,
            None => panic!("{}", self.wrong(at, from, to)),
        }
        self.seen.changed += u64::from(self.last[at] != self.answers);
        self.last[at].clone_from(&self.answers);
    }

    /// Describes answers that are not those of one boundary within the read.
    fn wrong(&self, at: usize, from: u64, to: u64) -> String {
        let mut text = format!("the query {} was read from {from} to {to}\n", numbers(&self.script.queries[at]));
        for (worker, answer) in self.answers.iter().enumerate() {
            let right: Vec<_> = self.script.timelines[worker][at].within(from, to).collect();
            let verdict = if right.iter().any(|(_, right)| right == answer) { "right" } else { "WRONG" };
            text += &format!("  worker {worker}, alone {verdict}: {answer:?} of {right:?}\n");
        }
        let together = self.script.boundary(at, from, to, &self.answers);
        text += &format!("all together right at {together:?}; an answer before was of {} or later\n", self.boundary);
        let first = (from as usize).saturating_sub(3);
        let last = (to as usize).min(first + 40);
        for (at, event) in self.script.events[first..last].iter().enumerate() {
            text += &format!("  up to {}: {event}\n", first + at + 1);
        }
        text
    }
}
