//! From a serving core to the thread that writes: bounded, and the core never waits.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;

use crossbeam::queue::ArrayQueue;

use super::record::Record;
use crate::ids::SpaceId;
use crate::limits::{JOURNAL_BUFFER_WORKERS_KEPT, JOURNAL_WAITING_WORKERS_MAX};
use crate::route::{Decision, Observation, Policy};

/// A share of decisions, as the highest seed that is in it; 0 = none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Share(u64);

impl Share {
    /// Seeds are drawn evenly from all numbers of 64 bits.
    fn of(share: f64) -> Self {
        // The cast saturates: a share of 1 is every seed.
        Self((share.clamp(0.0, 1.0) * u64::MAX as f64) as u64)
    }

    const fn has(self, seed: u64) -> bool {
        self.0 != 0 && seed <= self.0
    }
}

/// Which decisions are taken, and what for. Every core looks here once for each decision.
///
/// Relaxed everywhere: a core may learn of another share some decisions late, and nothing else hangs on it.
#[derive(Debug, Default)]
pub struct Shares {
    journal: AtomicU64,
    shadow: AtomicU64,
    /// The larger of the two.
    any: AtomicU64,
}

impl Shares {
    /// Sets the share of decisions that are written, 0 to 1.
    pub fn set_journal(&self, share: f64) {
        self.journal.store(Share::of(share).0, Ordering::Relaxed);
        self.widen();
    }

    /// Sets the share of decisions that a shadow policy judges, 0 to 1.
    pub fn set_shadow(&self, share: f64) {
        self.shadow.store(Share::of(share).0, Ordering::Relaxed);
        self.widen();
    }

    /// The share of decisions that a shadow policy judges, 0 to 1.
    #[must_use]
    pub fn shadow(&self) -> f64 {
        self.shadow.load(Ordering::Relaxed) as f64 / u64::MAX as f64
    }

    fn widen(&self) {
        let any = self.journal.load(Ordering::Relaxed).max(self.shadow.load(Ordering::Relaxed));
        self.any.store(any, Ordering::Relaxed);
    }

    /// Whether nothing is taken.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.any.load(Ordering::Relaxed) == 0
    }
}

/// A decision on its way.
#[derive(Debug, Default)]
pub struct Waiting {
    /// The decision.
    pub record: Record,
    /// Decisions of the core that were lost just before it.
    pub lost_before: u64,
    /// Whether it is to be written.
    pub is_written: bool,
    /// Whether a shadow policy is to judge it.
    pub is_judged: bool,
}

/// What waits of one core.
#[derive(Debug)]
pub struct Ring {
    waiting: ArrayQueue<Box<Waiting>>,
    /// Buffers to use again.
    spent: ArrayQueue<Box<Waiting>>,
    /// Workers that what waits speaks of. Relaxed everywhere: it bounds memory, and orders nothing.
    workers: AtomicUsize,
    writer: OnceLock<Thread>,
}

impl Ring {
    /// A ring in which at most so many decisions wait.
    #[must_use]
    pub fn new(records_max: usize) -> Self {
        let queue = || ArrayQueue::new(records_max.max(1));
        Self { waiting: queue(), spent: queue(), workers: AtomicUsize::new(0), writer: OnceLock::new() }
    }

    /// Says who takes: it is woken when half of the ring is full.
    pub fn wakes(&self, writer: Thread) {
        if self.writer.set(writer).is_err() {
            tracing::warn!("the journal's writer was named before");
        }
    }

    /// The decision that has waited longest. Give it back.
    #[must_use]
    pub fn pop(&self) -> Option<Box<Waiting>> {
        self.waiting.pop()
    }

    /// Gives back what was taken, so that its buffers are used again.
    pub fn give_back(&self, mut waiting: Box<Waiting>) {
        let workers = &mut waiting.record.observation.workers;
        self.workers.fetch_sub(workers.len(), Ordering::Relaxed);
        workers.clear();
        workers.shrink_to(JOURNAL_BUFFER_WORKERS_KEPT);
        // One that finds no room is freed.
        drop(self.spent.push(waiting));
    }

    fn push(&self, fill: impl FnOnce(&mut Waiting), workers: usize) -> bool {
        let before = self.workers.fetch_add(workers, Ordering::Relaxed);
        if before + workers > JOURNAL_WAITING_WORKERS_MAX || self.waiting.is_full() {
            self.workers.fetch_sub(workers, Ordering::Relaxed);
            return false;
        }
        let mut waiting = self.spent.pop().unwrap_or_default();
        fill(&mut waiting);
        if let Err(refused) = self.waiting.push(waiting) {
            self.give_back(refused);
            return false;
        }
        // Waking costs a system call: as a rule the writer comes by itself.
        if self.waiting.len() == self.waiting.capacity().div_ceil(2)
            && let Some(writer) = self.writer.get()
        {
            writer.unpark();
        }
        true
    }
}

/// What came of noting a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noted {
    /// Nobody wants it.
    Passed,
    /// It is on its way.
    Taken,
    /// Too many wait: it is lost, and the next that is taken says so.
    Lost,
}

/// One core's end of its ring.
#[derive(Debug)]
pub struct Recorder {
    ring: Arc<Ring>,
    shares: Arc<Shares>,
    lost: u64,
}

impl Recorder {
    /// Notes into `ring` what `shares` want.
    #[must_use]
    pub const fn new(ring: Arc<Ring>, shares: Arc<Shares>) -> Self {
        Self { ring, shares, lost: 0 }
    }

    /// Whether anything is noted at all.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.shares.is_off()
    }

    /// Whether a decision is noted that may be.
    #[must_use]
    pub fn takes(&self, decision: &Decision) -> bool {
        // Relaxed: see Shares.
        Share(self.shares.any.load(Ordering::Relaxed)).has(decision.seed)
    }

    /// Notes a decision that was made from `observation` at a time, nanoseconds since the daemon started. Once as many
    /// buffers go round as wait at most, and they are as large as a space has workers, nothing is allocated.
    pub fn note(
        &mut self,
        (at_ns, space): (u64, SpaceId),
        policy: &Policy,
        observation: &Observation,
        decision: &Decision,
    ) -> Noted {
        if !self.takes(decision) {
            return Noted::Passed;
        }
        let is_written = Share(self.shares.journal.load(Ordering::Relaxed)).has(decision.seed);
        let is_judged = Share(self.shares.shadow.load(Ordering::Relaxed)).has(decision.seed);
        let lost_before = self.lost;
        let fill = |waiting: &mut Waiting| {
            waiting.record.take_over((at_ns, space), policy, observation, decision);
            (waiting.lost_before, waiting.is_written, waiting.is_judged) = (lost_before, is_written, is_judged);
        };
        if self.ring.push(fill, observation.workers.len()) {
            self.lost = 0;
            Noted::Taken
        } else {
            self.lost += 1;
            Noted::Lost
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(recorder: &mut Recorder, seed: u64) -> Noted {
        let decision = Decision { seed, ..Decision::default() };
        recorder.note((seed, SpaceId(0)), &Policy::default(), &Observation::default(), &decision)
    }

    fn recorder(records_max: usize) -> (Arc<Ring>, Arc<Shares>, Recorder) {
        let (ring, shares) = (Arc::new(Ring::new(records_max)), Arc::new(Shares::default()));
        let recorder = Recorder::new(Arc::clone(&ring), Arc::clone(&shares));
        (ring, shares, recorder)
    }

    #[test]
    fn a_full_ring_loses_decisions_and_the_next_says_how_many() {
        let (ring, shares, mut recorder) = recorder(2);
        assert_eq!(noted(&mut recorder, 1), Noted::Passed);
        shares.set_journal(1.0);
        let noted: Vec<_> = (0..5).map(|seed| noted(&mut recorder, seed)).collect();
        assert_eq!(noted, [Noted::Taken, Noted::Taken, Noted::Lost, Noted::Lost, Noted::Lost]);
        let first = ring.pop().expect("the first");
        assert_eq!((first.record.at_ns, first.lost_before, first.is_written, first.is_judged), (0, 0, true, false));
        ring.give_back(first);
        assert_eq!(self::noted(&mut recorder, 9), Noted::Taken);
        let told: Vec<_> = std::iter::from_fn(|| ring.pop()).map(|w| (w.record.at_ns, w.lost_before)).collect();
        assert_eq!(told, [(1, 0), (9, 3)]);
    }

    #[test]
    fn a_share_is_of_the_seeds_and_none_is_none() {
        assert!(Share::of(1.0).has(u64::MAX) && Share::of(1.0).has(0) && Share::of(2.0).has(u64::MAX));
        assert!(!Share::of(0.0).has(0) && !Share::of(f64::NAN).has(0) && !Share::of(-1.0).has(0));
        assert!(Share::of(0.5).has(u64::MAX / 2 - 1024) && !Share::of(0.5).has(u64::MAX / 2 + 2048));
    }

    #[test]
    fn each_of_the_two_takes_its_own_share() {
        let (ring, shares, mut recorder) = recorder(8);
        shares.set_journal(0.25);
        shares.set_shadow(0.75);
        for quarter in [0, 1, 3] {
            noted(&mut recorder, u64::MAX / 4 * quarter + 1_000_000);
        }
        let told: Vec<_> = std::iter::from_fn(|| ring.pop()).map(|w| (w.is_written, w.is_judged)).collect();
        assert_eq!(told, [(true, true), (false, true)]);
        shares.set_shadow(0.0);
        assert!(!shares.is_off());
        shares.set_journal(0.0);
        assert!(shares.is_off());
    }
}
