//! What a diagnosis remembers of earlier ones: counters, since when a sign is there, and the clock.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::counts::{Counts, Recent};
use super::sign::{Cause, Sign};
use crate::daemon::sources::Sources;
use crate::fleet::WorkerRecord;
use crate::ids::{Worker, WorkerIndex};
use crate::ingest::WorkerView;
use crate::limits::{CLOCK_STEP_MS_MIN, RECENT_MS};
use crate::metrics::{CoreCounter, DaemonCounter, RouteCounter, SnapshotCounter, WorkerCounter};

/// One worker's counters.
#[derive(Clone, Debug, Default)]
pub(super) struct WorkerCounts {
    pub(super) ingest: Counts<WorkerCounter>,
    pub(super) route: Counts<RouteCounter>,
}

/// Every counter at one moment, or what was added between two.
#[derive(Clone, Debug, Default)]
pub(super) struct Moment {
    /// A worker that comes to a place of another has another index, and so counts from 0.
    pub(super) workers: BTreeMap<WorkerIndex, WorkerCounts>,
    pub(super) cores: Counts<CoreCounter>,
    pub(super) daemon: Counts<DaemonCounter>,
    pub(super) snapshots: Counts<SnapshotCounter>,
}

impl Moment {
    pub(super) fn read(sources: &Sources) -> Self {
        let table = sources.fleet.load();
        let views = sources.views.of(&table);
        let counts = |(record, view): &(&WorkerRecord, Arc<WorkerView>)| {
            let ingest = Counts::read(|counter| view.counters.get(counter));
            let route = Counts::read(|counter| sources.routed(record.index, counter));
            (record.index, WorkerCounts { ingest, route })
        };
        Self {
            workers: views.iter().map(counts).collect(),
            cores: Counts::read(|counter| sources.cores.iter().map(|core| core.counters.get(counter)).sum()),
            daemon: Counts::read(|counter| sources.daemon.get(counter)),
            snapshots: Counts::read(|counter| sources.snapshots.counters.get(counter)),
        }
    }

    fn since(&self, earlier: &Self) -> Self {
        let nothing = WorkerCounts::default();
        let workers = self.workers.iter().map(|(index, counts)| {
            let before = earlier.workers.get(index).unwrap_or(&nothing);
            let (ingest, route) = (counts.ingest.since(&before.ingest), counts.route.since(&before.route));
            (*index, WorkerCounts { ingest, route })
        });
        Self {
            workers: workers.collect(),
            cores: self.cores.since(&earlier.cores),
            daemon: self.daemon.since(&earlier.daemon),
            snapshots: self.snapshots.since(&earlier.snapshots),
        }
    }
}

/// The wall clock beside one that is never set, at one look, milliseconds.
#[derive(Clone, Copy, Debug)]
struct Clocks {
    steady_ms: u64,
    unix_ms: u64,
}

/// What is remembered from one diagnosis to the next.
#[derive(Debug, Default)]
pub(super) struct Memory {
    counters: Recent<Moment>,
    /// When each sign was first there (steady and Unix milliseconds), of those that still are.
    began: BTreeMap<(Cause, Option<Worker>), Clocks>,
    clocks: Option<Clocks>,
    /// How far the clock jumped last, and when.
    step: Option<(i64, u64)>,
}

impl Memory {
    /// What was added of late.
    pub(super) fn recent(&mut self, now: &Moment, now_ms: u64) -> Moment {
        now.since(self.counters.older(now, now_ms))
    }

    /// How far the wall clock jumped of late; 0 = it did not. A host that slept looks the same.
    pub(super) fn clock_step(&mut self, steady_ms: u64, unix_ms: u64) -> i64 {
        let before = self.clocks.replace(Clocks { steady_ms, unix_ms });
        let step_ms = before.map_or(0, |before| {
            (unix_ms as i64 - before.unix_ms as i64) - (steady_ms as i64 - before.steady_ms as i64)
        });
        if step_ms.unsigned_abs() >= CLOCK_STEP_MS_MIN {
            self.step = Some((step_ms, steady_ms));
        }
        self.step.filter(|(_, at_ms)| steady_ms.saturating_sub(*at_ms) < RECENT_MS).map_or(0, |(step_ms, _)| step_ms)
    }

    /// Gives signs their time, and keeps back those that have not lasted long enough.
    pub(super) fn since(&mut self, signs: Vec<Sign>, steady_ms: u64, unix_ms: u64) -> Vec<Sign> {
        let before = std::mem::take(&mut self.began);
        let now = Clocks { steady_ms, unix_ms };
        let mut lasting = Vec::with_capacity(signs.len());
        for sign in signs {
            let key = (sign.cause, sign.worker);
            let began = *self.began.entry(key).or_insert_with(|| before.get(&key).copied().unwrap_or(now));
            if steady_ms.saturating_sub(began.steady_ms) >= sign.patience_ms {
                lasting.push(Sign { since_unix_ms: sign.since_unix_ms.or(Some(began.unix_ms)), ..sign });
            }
        }
        lasting
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Symptom;

    #[test]
    fn a_sign_has_the_time_it_began_and_begins_anew_after_it_was_gone() {
        let mut memory = Memory::default();
        let sign = || vec![Sign::symptom(Symptom::WorkerDown, Worker::new(1, 0))];
        let at = |signs: Vec<Sign>| signs.first().and_then(|sign| sign.since_unix_ms);
        assert_eq!(at(memory.since(sign(), 10, 1010)), Some(1010));
        assert_eq!(at(memory.since(sign(), 20, 1020)), Some(1010));
        assert_eq!(at(memory.since(Vec::new(), 30, 1030)), None);
        assert_eq!(at(memory.since(sign(), 40, 1040)), Some(1040));
    }

    #[test]
    fn a_sign_that_needs_patience_is_told_once_it_has_lasted() {
        let mut memory = Memory::default();
        let sign = || vec![Sign { patience_ms: 100, ..Sign::symptom(Symptom::EventsOff, Worker::new(1, 0)) }];
        assert!(memory.since(sign(), 10, 1010).is_empty());
        assert!(memory.since(sign(), 109, 1109).is_empty());
        assert_eq!(memory.since(sign(), 110, 1110)[0].since_unix_ms, Some(1010));
    }

    #[test]
    fn only_a_jump_of_the_clock_is_a_step() {
        let mut memory = Memory::default();
        assert_eq!(memory.clock_step(0, 5_000), 0);
        assert_eq!(memory.clock_step(60_000, 65_900), 0, "slewed");
        assert_eq!(memory.clock_step(61_000, 60_000), -6_900);
        assert_eq!(memory.clock_step(62_000, 61_000), -6_900, "still recent");
        assert_eq!(memory.clock_step(62_000 + RECENT_MS, 61_000 + RECENT_MS), 0);
    }

    #[test]
    fn a_worker_that_joined_since_counts_from_zero_whoever_had_its_place() {
        let counts = |n| WorkerCounts { ingest: Counts::of(&[(WorkerCounter::Gaps, n)]), ..WorkerCounts::default() };
        let moment = |workers: &[(u16, u32, u64)]| Moment {
            workers: workers.iter().map(|(at, turn, n)| (WorkerIndex::at(*at, *turn), counts(*n))).collect(),
            ..Moment::default()
        };
        let (before, now) = (moment(&[(0, 0, 2), (1, 0, 4)]), moment(&[(0, 0, 5), (1, 1, 6), (2, 0, 7)]));
        let gaps = |index: &WorkerIndex| now.since(&before).workers[index].ingest.get(WorkerCounter::Gaps);
        assert_eq!(
            now.workers.keys().map(|index| (index.place(), gaps(index))).collect::<Vec<_>>(),
            [(0, 3), (2, 7), (1, 6)]
        );
    }
}
