//! The only writer: plays a script, and reports how many events have begun and ended.

use super::oracle::checked_shard::{publish_until_unchoked, slot_for_worker};
use super::oracle::event::{Event, Outcome};
use super::script::Script;
use kvrouted::ids::WorkerSlot;
use kvrouted::index::ShardWriter;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The writer's progress. All accesses are `SeqCst`: the counters bracket the index's accesses, and must not be the
/// reason why the index looks right or wrong.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Events that have begun, and that have ended.
    pub(crate) begun: AtomicU64,
    pub(crate) done: AtomicU64,
    /// Publishes that have begun, and that have ended.
    pub(crate) publishes_begun: AtomicU64,
    pub(crate) publishes_done: AtomicU64,
    /// The writer has finished or failed.
    pub(crate) ended: AtomicBool,
}

/// Signals the end to the readers even if the writer panics.
struct End<'a>(&'a Progress);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::SeqCst);
    }
}

struct Player<'a> {
    writer: &'a mut ShardWriter,
    progress: &'a Progress,
}

/// Plays the whole script to workers in the slots 0, 1, ...
pub(crate) fn play(script: &Script, writer: &mut ShardWriter, progress: &Progress, seed: u64) {
    let _end = End(progress);
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed ^ 0x0bed);
    let mut player = Player { writer, progress };
    for (event, expected) in script.events.iter().zip(&script.outcomes) {
        progress.begun.fetch_add(1, Ordering::SeqCst);
        let outcome = player.apply(event);
        progress.done.fetch_add(1, Ordering::SeqCst);
        assert_eq!(outcome.without_dormant(), *expected, "{event}");
        // Most events follow at once; now and then the readers get the core.
        if rng.random_bool(0.05) {
            std::thread::yield_now();
        }
    }
}

impl Player<'_> {
    fn apply(&mut self, event: &Event) -> Outcome {
        let slot = event.worker().map_or(WorkerSlot(0), |worker| WorkerSlot(worker as u16));
        match event {
            Event::RemoveWorker { .. } => {
                self.writer.remove_worker(slot);
                Outcome::Nothing
            }
            Event::AddWorker { .. } => {
                self.counted(|writer| {
                    let (free, publishes) = slot_for_worker(writer);
                    assert_eq!(free, slot, "the only slot that is nobody's");
                    publishes
                });
                Outcome::Nothing
            }
            Event::Sweep { budget_blocks } => {
                self.writer.sweep(*budget_blocks);
                Outcome::Nothing
            }
            Event::Publish => {
                self.counted(|writer| {
                    writer.publish();
                    1
                });
                self.counted(publish_until_unchoked);
                Outcome::Nothing
            }
            _ => event.apply_to_writer(self.writer, slot),
        }
    }

    /// Publishes, and counts it. How many a run takes is known only afterwards.
    fn counted(&mut self, publish: impl FnOnce(&mut ShardWriter) -> u64) {
        const MANY: u64 = 1 << 32;
        self.progress.publishes_begun.fetch_add(MANY, Ordering::SeqCst);
        let publishes = publish(self.writer);
        self.progress.publishes_done.fetch_add(publishes, Ordering::SeqCst);
        self.progress.publishes_begun.fetch_sub(MANY - publishes, Ordering::SeqCst);
    }
}
