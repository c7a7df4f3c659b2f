//! The watchdog: a thread that looks at the marks of all others a few times a second, and does nothing else.
//!
//! It sets the figures that metrics, status, readiness and the doctor show before it logs: the log may be what a thread
//! waits for.

use std::sync::Arc;
use std::time::Instant;

use super::endable_thread::EndableThread;
use crate::error::Result;
use crate::fleet::{Fleet, FleetTable};
use crate::ids::WorkerIndex;
use crate::log_quota::LogQuota;
use crate::metrics::{CounterSet, DaemonCounter};
use crate::sandbox::{self, ThreadKind};
use crate::watchdog::{Look, StallChange, Stalls, ThreadMark, Watchlist, look_every};

/// Watches the threads of the list, also those that are added later. A thread that stays in a round for
/// `stalled_ms_max` is stalled.
///
/// # Errors
/// `System` if the thread cannot be started.
pub(super) fn start(
    watchlist: Watchlist,
    fleet: Arc<Fleet>,
    counters: Arc<CounterSet<DaemonCounter>>,
    stalled_ms_max: u64,
) -> Result<EndableThread> {
    let every = look_every(stalled_ms_max);
    let mut watch = Watch {
        watchlist,
        fleet,
        counters,
        stalls: Stalls::new(stalled_ms_max, every.as_millis() as u64),
        started: Instant::now(),
        log_quota: LogQuota::default(),
    };
    EndableThread::start("kvrouted-watch", "the watchdog", move |ending| {
        sandbox::enter(ThreadKind::Watchdog);
        while !ending.is_asked_for() {
            watch.look();
            std::thread::park_timeout(every);
        }
    })
}

struct Watch {
    watchlist: Watchlist,
    fleet: Arc<Fleet>,
    counters: Arc<CounterSet<DaemonCounter>>,
    stalls: Stalls,
    started: Instant,
    log_quota: LogQuota,
}

impl Watch {
    fn look(&mut self) {
        let marks = self.watchlist.marks();
        let looks: Vec<Look> = marks.iter().map(|mark| mark.look()).collect();
        let changes = self.stalls.look(self.started.elapsed().as_millis() as u64, &looks);
        for ((at, mark), look) in marks.iter().enumerate().zip(&looks) {
            mark.note_stalled_ms(self.stalls.stalled_ms(at), *look);
        }
        let began = |change: &&StallChange| matches!(change, StallChange::Began { .. });
        self.counters.add(DaemonCounter::ThreadStalls, changes.iter().filter(began).count() as u64);
        for change in changes {
            self.log(&marks, change);
        }
    }

    fn log(&self, marks: &[Arc<ThreadMark>], change: StallChange) {
        let Some(withheld) = self.log_quota.take(Instant::now()) else { return };
        match change {
            StallChange::Began { thread, for_ms, look } => {
                let (thread, activity) = (marks[thread].name(), describe(look, &self.fleet.load()));
                tracing::error!(
                    thread,
                    activity,
                    for_ms,
                    withheld,
                    "a thread is stalled: it stays in one round of its loop; see the finding thread_stalled"
                );
            }
            StallChange::Ended { thread, after_ms } => {
                tracing::warn!(thread = marks[thread].name(), after_ms, withheld, "the thread goes on");
            }
        }
    }
}

/// What a thread does, and for which worker.
pub(super) fn describe(look: Look, table: &FleetTable) -> String {
    let worker = (look.of != 0 || is_about_a_worker(look)).then(|| table.worker(WorkerIndex(look.of))).flatten();
    match worker {
        Some(record) => format!("{} of worker {}", look.activity.name(), record.worker),
        None => look.activity.name().to_owned(),
    }
}

/// Whether the activity is always about a worker: the first one has the number 0.
const fn is_about_a_worker(look: Look) -> bool {
    use crate::watchdog::Activity::{ApplyingEvents, Transferring, WritingSnapshot};
    matches!(look.activity, ApplyingEvents | Transferring | WritingSnapshot)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::WorkerRecord;
    use crate::ids::{Worker, WorkerSlot};
    use crate::watchdog::Activity;

    #[test]
    fn a_stalled_thread_is_shown_with_its_worker_until_it_goes_on() {
        let watchlist = Watchlist::default();
        let (mark, idle) = (watchlist.add("ingest-0", true), watchlist.add("idle", true));
        let record = WorkerRecord::new(WorkerIndex(0), Worker::new(7, 1), WorkerSlot(0));
        let table = FleetTable { workers: vec![record], ..FleetTable::default() };
        mark.begin_round_of(Activity::ApplyingEvents, 0);
        assert_eq!(describe(mark.look(), &table), "applying events of worker 7/1");
        assert_eq!(describe(idle.look(), &table), "waiting");
        let counters = Arc::<CounterSet<DaemonCounter>>::default();
        let fleet = Arc::new(Fleet::new(table));
        let watchdog = start(watchlist.clone(), fleet, Arc::clone(&counters), 20).expect("a thread");
        // The watchdog notes the stall first, and counts it then.
        while !watchlist.is_stalled() || counters.get(DaemonCounter::ThreadStalls) == 0 {
            std::thread::yield_now();
        }
        assert_eq!((counters.get(DaemonCounter::ThreadStalls), idle.stalls()), (1, 0));
        mark.wait();
        while watchlist.is_stalled() {
            std::thread::yield_now();
        }
        assert!(mark.longest_ms() >= 20 && mark.stalls() == 1 && watchdog.is_running());
        watchdog.stop().expect("no panic");
    }
}
