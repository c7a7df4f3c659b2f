//! The recorder of a serving thread's decisions: which decisions are sampled, and the queue to the thread that writes
//! them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Thread;

use super::decision_record::DecisionRecord;
use crate::ids::SpaceId;
use crate::limits::{JOURNAL_BUFFER_WORKERS_KEPT, JOURNAL_WAITING_WORKERS_MAX};
use crate::recycling_queue::{QueueBounds, Recycle, RecyclingQueue, Wake};
use crate::route::{Decision, Observation, Policy};

/// A share of the decisions, as the highest seed in it; 0 = no decision.
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

/// The shares of decisions that are sampled for the journal and for the shadow policy. Every serving thread reads them
/// for each decision.
///
/// Relaxed everywhere: a thread may see a new share some decisions late, and nothing else depends on it.
#[derive(Debug, Default)]
pub struct SampleShares {
    journal: AtomicU64,
    shadow: AtomicU64,
    /// The larger of the two.
    any: AtomicU64,
}

impl SampleShares {
    /// Sets the share of decisions that are written, 0 to 1.
    pub fn set_journal(&self, share: f64) {
        self.journal.store(Share::of(share).0, Ordering::Relaxed);
        self.update_any();
    }

    /// Sets the share of decisions that a shadow policy judges, 0 to 1.
    pub fn set_shadow(&self, share: f64) {
        self.shadow.store(Share::of(share).0, Ordering::Relaxed);
        self.update_any();
    }

    /// The share of decisions that a shadow policy judges, 0 to 1.
    #[must_use]
    pub fn shadow(&self) -> f64 {
        self.shadow.load(Ordering::Relaxed) as f64 / u64::MAX as f64
    }

    fn update_any(&self) {
        let any = self.journal.load(Ordering::Relaxed).max(self.shadow.load(Ordering::Relaxed));
        self.any.store(any, Ordering::Relaxed);
    }

    /// Whether no decision is sampled.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.any.load(Ordering::Relaxed) == 0
    }
}

/// A sampled decision on its way to the writer.
#[derive(Debug, Default)]
pub(super) struct QueuedDecision {
    pub(super) record: DecisionRecord,
    /// Sampled decisions of the same thread that were lost just before this one.
    pub(super) lost_before: u64,
    /// Whether the journal samples it.
    pub(super) is_written: bool,
    /// Whether the shadow policy judges it.
    pub(super) is_judged: bool,
}

/// A queued decision weighs as much as the workers that it was made from.
impl Recycle for Box<QueuedDecision> {
    fn weight(&self) -> usize {
        self.record.observation.workers.len()
    }

    fn clear(&mut self) {
        let workers = &mut self.record.observation.workers;
        workers.clear();
        workers.shrink_to(JOURNAL_BUFFER_WORKERS_KEPT);
    }
}

/// The decisions of one serving thread that wait for the writer.
#[derive(Debug)]
pub struct DecisionQueue(RecyclingQueue<Box<QueuedDecision>>);

impl DecisionQueue {
    /// A queue with room for `records_max` decisions.
    #[must_use]
    pub fn new(records_max: usize) -> Self {
        let bounds = QueueBounds { items_max: records_max, weight_max: JOURNAL_WAITING_WORKERS_MAX };
        Self(RecyclingQueue::new(bounds, Wake::HalfFull))
    }

    /// Sets the writer's thread, which is woken whenever the queue gets half full.
    pub(super) fn set_consumer(&self, writer: Thread) {
        self.0.set_consumer(writer);
    }

    /// The decision that has waited longest. Pass it to [`recycle`](Self::recycle) afterwards.
    pub(super) fn pop(&self) -> Option<Box<QueuedDecision>> {
        self.0.pop()
    }

    /// Takes a popped decision back, so that its buffers are used again.
    pub(super) fn recycle(&self, queued: Box<QueuedDecision>) {
        self.0.recycle(queued);
    }
}

/// What [`DecisionRecorder::note`] did with a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noted {
    /// The decision is in neither sample.
    NotSampled,
    /// It is on its way to the writer.
    Queued,
    /// The queue is full. The decision is lost; the next one that is queued says so.
    Lost,
}

/// One serving thread's end of its queue.
#[derive(Debug)]
pub struct DecisionRecorder {
    queue: Arc<DecisionQueue>,
    shares: Arc<SampleShares>,
    /// Sampled decisions lost since the last one that was queued.
    lost: u64,
}

impl DecisionRecorder {
    /// Queues into `queue` the decisions that `shares` sample.
    #[must_use]
    pub const fn new(queue: Arc<DecisionQueue>, shares: Arc<SampleShares>) -> Self {
        Self { queue, shares, lost: 0 }
    }

    /// Whether no decision is sampled.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.shares.is_off()
    }

    /// Whether [`note`](Self::note) would sample this decision.
    #[must_use]
    pub fn takes(&self, decision: &Decision) -> bool {
        // Relaxed: see SampleShares.
        Share(self.shares.any.load(Ordering::Relaxed)).has(decision.seed)
    }

    /// Queues a decision, if it is sampled, with the observation that it was made from. `at_ns` is its time,
    /// nanoseconds since the daemon started. It allocates nothing once enough buffers circulate and each has room for
    /// the workers of a space: see `RecyclingQueue`.
    pub fn note(
        &mut self,
        (at_ns, space): (u64, SpaceId),
        policy: &Policy,
        observation: &Observation,
        decision: &Decision,
    ) -> Noted {
        if !self.takes(decision) {
            return Noted::NotSampled;
        }
        let is_written = Share(self.shares.journal.load(Ordering::Relaxed)).has(decision.seed);
        let is_judged = Share(self.shares.shadow.load(Ordering::Relaxed)).has(decision.seed);
        let lost_before = self.lost;
        let fill = |queued: &mut Box<QueuedDecision>| {
            queued.record.copy_from((at_ns, space), policy, observation, decision);
            (queued.lost_before, queued.is_written, queued.is_judged) = (lost_before, is_written, is_judged);
        };
        if self.queue.0.push(observation.workers.len(), fill) {
            self.lost = 0;
            Noted::Queued
        } else {
            self.lost += 1;
            Noted::Lost
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(recorder: &mut DecisionRecorder, seed: u64) -> Noted {
        let decision = Decision { seed, ..Decision::default() };
        recorder.note((seed, SpaceId(0)), &Policy::default(), &Observation::default(), &decision)
    }

    fn recorder(records_max: usize) -> (Arc<DecisionQueue>, Arc<SampleShares>, DecisionRecorder) {
        let (queue, shares) = (Arc::new(DecisionQueue::new(records_max)), Arc::new(SampleShares::default()));
        let recorder = DecisionRecorder::new(Arc::clone(&queue), Arc::clone(&shares));
        (queue, shares, recorder)
    }

    #[test]
    fn a_full_queue_loses_decisions_and_the_next_one_says_how_many() {
        let (queue, shares, mut recorder) = recorder(2);
        assert_eq!(noted(&mut recorder, 1), Noted::NotSampled);
        shares.set_journal(1.0);
        let noted: Vec<_> = (0..5).map(|seed| noted(&mut recorder, seed)).collect();
        assert_eq!(noted, [Noted::Queued, Noted::Queued, Noted::Lost, Noted::Lost, Noted::Lost]);
        let first = queue.pop().expect("the first");
        assert_eq!((first.record.at_ns, first.lost_before, first.is_written, first.is_judged), (0, 0, true, false));
        queue.recycle(first);
        assert_eq!(self::noted(&mut recorder, 9), Noted::Queued);
        let queued: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|of| (of.record.at_ns, of.lost_before)).collect();
        assert_eq!(queued, [(1, 0), (9, 3)]);
    }

    #[test]
    fn a_share_selects_by_the_seed_and_a_share_of_zero_selects_nothing() {
        assert!(Share::of(1.0).has(u64::MAX) && Share::of(1.0).has(0) && Share::of(2.0).has(u64::MAX));
        assert!(!Share::of(0.0).has(0) && !Share::of(f64::NAN).has(0) && !Share::of(-1.0).has(0));
        assert!(Share::of(0.5).has(u64::MAX / 2 - 1024) && !Share::of(0.5).has(u64::MAX / 2 + 2048));
    }

    #[test]
    fn the_journal_and_the_shadow_policy_sample_by_their_own_shares() {
        let (queue, shares, mut recorder) = recorder(8);
        shares.set_journal(0.25);
        shares.set_shadow(0.75);
        for quarter in [0, 1, 3] {
            noted(&mut recorder, u64::MAX / 4 * quarter + 1_000_000);
        }
        let queued: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|of| (of.is_written, of.is_judged)).collect();
        assert_eq!(queued, [(true, true), (false, true)]);
        shares.set_shadow(0.0);
        assert!(!shares.is_off());
        shares.set_journal(0.0);
        assert!(shares.is_off());
    }
}
