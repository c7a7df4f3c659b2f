//! What a diagnosis knows of earlier ones: counters, the beginning of each symptom, and the clock. Pure but for reading
//! the counters.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::Arc;

use super::findings::{Cause, FoundSymptom};
use crate::daemon::statistics::Statistics;
use crate::fleet::WorkerRecord;
use crate::ids::{Worker, WorkerIndex};
use crate::ingest::WorkerView;
use crate::limits::{CLOCK_STEP_MS_MIN, RECENT_MS};
use crate::metrics::{
    CoreCounter, CounterName, DaemonCounter, RemoteCounter, RouteCounter, SnapshotCounter, TraceCounter, WorkerCounter,
};

/// The values of one list at one moment, or what was added between two. Without values everything is 0.
#[derive(Debug)]
pub(in crate::daemon) struct Counts<L>(Vec<u64>, PhantomData<fn() -> L>);

impl<L> Default for Counts<L> {
    fn default() -> Self {
        Self(Vec::new(), PhantomData)
    }
}

impl<L> Clone for Counts<L> {
    fn clone(&self) -> Self {
        Self(self.0.clone(), PhantomData)
    }
}

impl<L: CounterName> Counts<L> {
    /// Reads every counter of the list.
    pub(super) fn read(value: impl Fn(L) -> u64) -> Self {
        Self(L::ALL.iter().map(|counter| value(*counter)).collect(), PhantomData)
    }

    pub(in crate::daemon) fn get(&self, counter: L) -> u64 {
        self.0.get(counter.index()).copied().unwrap_or(0)
    }

    /// What was added since `earlier`. A counter that fell counts as 0.
    pub(super) fn since(&self, earlier: &Self) -> Self {
        let grown = |(at, value): (usize, &u64)| value.saturating_sub(earlier.0.get(at).copied().unwrap_or(0));
        Self(self.0.iter().enumerate().map(grown).collect(), PhantomData)
    }

    #[cfg(test)]
    pub(super) fn of(values: &[(L, u64)]) -> Self {
        let value = |counter: &L| values.iter().find(|(of, _)| of.index() == counter.index()).map_or(0, |(_, n)| *n);
        Self(L::ALL.iter().map(value).collect(), PhantomData)
    }
}

/// Two earlier moments. The older one is between half of `RECENT_MS` and all of it ago, once the daemon is up that
/// long. Until then it is the start, when everything was 0.
#[derive(Debug)]
pub(super) struct Recent<T> {
    older: T,
    newer: T,
    newer_at_ms: u64,
}

impl<T: Default> Default for Recent<T> {
    fn default() -> Self {
        Self { older: T::default(), newer: T::default(), newer_at_ms: 0 }
    }
}

impl<T: Clone> Recent<T> {
    /// The moment from which recent counts are taken. Remembers `now` if half of `RECENT_MS` has passed.
    pub(super) fn older(&mut self, now: &T, now_ms: u64) -> &T {
        if now_ms.saturating_sub(self.newer_at_ms) >= RECENT_MS / 2 {
            self.older = std::mem::replace(&mut self.newer, now.clone());
            self.newer_at_ms = now_ms;
        }
        &self.older
    }
}

/// One worker's counters.
#[derive(Clone, Debug, Default)]
pub(super) struct WorkerCounts {
    pub(super) ingest: Counts<WorkerCounter>,
    pub(super) route: Counts<RouteCounter>,
}

/// Every counter at one moment, or what was added between two.
#[derive(Clone, Debug, Default)]
pub(super) struct Moment {
    /// By worker index. A worker that gets the place of another has another index, and so counts from 0.
    pub(super) workers: BTreeMap<WorkerIndex, WorkerCounts>,
    pub(super) cores: Counts<CoreCounter>,
    pub(super) daemon: Counts<DaemonCounter>,
    pub(super) snapshots: Counts<SnapshotCounter>,
    pub(super) remote: Counts<RemoteCounter>,
    pub(super) traces: Counts<TraceCounter>,
}

impl Moment {
    pub(super) fn read(statistics: &Statistics) -> Self {
        let table = statistics.fleet.load();
        let views = statistics.views.of(&table);
        let counts = |(record, view): &(&WorkerRecord, Arc<WorkerView>)| {
            let ingest = Counts::read(|counter| view.counters.get(counter));
            let route = Counts::read(|counter| statistics.routed(record.index, counter));
            (record.index, WorkerCounts { ingest, route })
        };
        Self {
            workers: views.iter().map(counts).collect(),
            cores: Counts::read(|counter| statistics.cores.iter().map(|core| core.counters.get(counter)).sum()),
            daemon: Counts::read(|counter| statistics.daemon.get(counter)),
            snapshots: Counts::read(|counter| statistics.snapshots.counters.get(counter)),
            remote: Counts::read(|counter| statistics.remote.counters.get(counter)),
            traces: Counts::read(|counter| statistics.traces.counters.get(counter)),
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
            remote: self.remote.since(&earlier.remote),
            traces: self.traces.since(&earlier.traces),
        }
    }
}

/// The wall clock and the monotonic clock at one diagnosis, milliseconds.
#[derive(Clone, Copy, Debug)]
struct Clocks {
    steady_ms: u64,
    unix_ms: u64,
}

/// The history from one diagnosis to the next.
#[derive(Debug, Default)]
pub(super) struct History {
    counters: Recent<Moment>,
    /// When each present symptom began, on both clocks.
    began: BTreeMap<(Cause, Option<Worker>), Clocks>,
    clocks: Option<Clocks>,
    /// The last jump of the clock, and when it was.
    step: Option<(i64, u64)>,
}

impl History {
    /// The recent counts.
    pub(super) fn recent(&mut self, now: &Moment, now_ms: u64) -> Moment {
        now.since(self.counters.older(now, now_ms))
    }

    /// The recent jump of the wall clock; 0 = none. A host that slept looks the same.
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

    /// Gives each symptom its beginning, and leaves out those that have not lasted long enough.
    pub(super) fn since(&mut self, symptoms: Vec<FoundSymptom>, steady_ms: u64, unix_ms: u64) -> Vec<FoundSymptom> {
        let before = std::mem::take(&mut self.began);
        let now = Clocks { steady_ms, unix_ms };
        let mut lasting = Vec::with_capacity(symptoms.len());
        for found in symptoms {
            let key = (found.cause, found.worker);
            let began = *self.began.entry(key).or_insert_with(|| before.get(&key).copied().unwrap_or(now));
            if steady_ms.saturating_sub(began.steady_ms) >= found.lasting_ms_min {
                lasting.push(FoundSymptom { since_unix_ms: found.since_unix_ms.or(Some(began.unix_ms)), ..found });
            }
        }
        lasting
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Symptom;
    use crate::metrics::DaemonCounter as C;

    #[test]
    fn counts_differ_by_what_was_added() {
        let (before, after) = (Counts::of(&[(C::MailboxFull, 2)]), Counts::of(&[(C::MailboxFull, 5)]));
        assert_eq!(after.since(&before).get(C::MailboxFull), 3);
        assert_eq!(after.since(&Counts::default()).get(C::MailboxFull), 5);
        assert_eq!(before.since(&after).get(C::MailboxFull), 0);
    }

    #[test]
    fn recent_counts_cover_between_half_and_all_of_the_window() {
        let (half, mut recent) = (RECENT_MS / 2, Recent::<u64>::default());
        assert_eq!(*recent.older(&10, 1), 0);
        assert_eq!(*recent.older(&20, half), 0, "the start, half a window ago");
        assert_eq!(*recent.older(&30, 2 * half - 1), 0);
        assert_eq!(*recent.older(&40, 2 * half), 20);
        assert_eq!(*recent.older(&50, 3 * half), 40);
    }

    #[test]
    fn a_symptom_keeps_its_beginning_until_it_is_gone() {
        let mut history = History::default();
        let found = || vec![FoundSymptom::symptom(Symptom::WorkerDown, Worker::new(1, 0))];
        let at = |symptoms: Vec<FoundSymptom>| symptoms.first().and_then(|found| found.since_unix_ms);
        assert_eq!(at(history.since(found(), 10, 1010)), Some(1010));
        assert_eq!(at(history.since(found(), 20, 1020)), Some(1010));
        assert_eq!(at(history.since(Vec::new(), 30, 1030)), None);
        assert_eq!(at(history.since(found(), 40, 1040)), Some(1040));
    }

    #[test]
    fn a_symptom_that_must_last_is_reported_once_it_has_lasted() {
        let mut history = History::default();
        let found = || {
            vec![FoundSymptom { lasting_ms_min: 100, ..FoundSymptom::symptom(Symptom::EventsOff, Worker::new(1, 0)) }]
        };
        assert!(history.since(found(), 10, 1010).is_empty());
        assert!(history.since(found(), 109, 1109).is_empty());
        assert_eq!(history.since(found(), 110, 1110)[0].since_unix_ms, Some(1010));
    }

    #[test]
    fn only_a_jump_of_the_clock_counts_as_a_step() {
        let mut history = History::default();
        assert_eq!(history.clock_step(0, 5_000), 0);
        assert_eq!(history.clock_step(60_000, 65_900), 0, "slewed");
        assert_eq!(history.clock_step(61_000, 60_000), -6_900);
        assert_eq!(history.clock_step(62_000, 61_000), -6_900, "still recent");
        assert_eq!(history.clock_step(62_000 + RECENT_MS, 61_000 + RECENT_MS), 0);
    }

    #[test]
    fn a_worker_that_joined_since_counts_from_zero_even_in_the_place_of_another() {
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
