//! The memory thread: it compares what the process takes with its budget ten times a second, and sheds while memory is
//! short. `budget::shedding` decides what and when; this file reads the figures and carries it out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::endable_thread::EndableThread;
use super::statistics::{MemoryFigures, WorkerViews};
use crate::budget::{MemoryPart, Pressure, Shed, ShedChange, Shedding, next_to_hold_back};
use crate::error::Result;
use crate::fleet::Fleet;
use crate::ids::{Worker, WorkerIndex};
use crate::ingest::WorkerView;
use crate::limits::{MEMORY_LOOK_EVERY_MS, RESIDENT_READ_EVERY_MS};
use crate::log_quota::LogQuota;
use crate::machine::ResidentMemory;
use crate::metrics::{CounterSet, DaemonCounter};
use crate::sandbox::{self, ThreadKind};
use crate::watchdog::{Activity, ThreadMark};

/// Starts the thread.
///
/// # Errors
/// `System` if it cannot be started.
pub(super) fn start(
    (figures, resident): (MemoryFigures, Option<Arc<ResidentMemory>>),
    (fleet, views): (Arc<Fleet>, Arc<WorkerViews>),
    counters: Arc<CounterSet<DaemonCounter>>,
    mark: Arc<ThreadMark>,
) -> Result<EndableThread> {
    let mut look = MemoryLook::new((figures, resident), (fleet, views), counters);
    EndableThread::start("kvrouted-memory", "the memory thread", move |ending| {
        sandbox::enter(ThreadKind::Memory);
        let mut looks = 0;
        while !ending.is_asked_for() {
            mark.begin_round(Activity::MeasuringMemory);
            look.take(looks % (RESIDENT_READ_EVERY_MS / MEMORY_LOOK_EVERY_MS) == 0);
            looks += 1;
            mark.wait();
            std::thread::park_timeout(Duration::from_millis(MEMORY_LOOK_EVERY_MS));
        }
    })
}

struct MemoryLook {
    figures: MemoryFigures,
    resident: Option<Arc<ResidentMemory>>,
    fleet: Arc<Fleet>,
    views: Arc<WorkerViews>,
    counters: Arc<CounterSet<DaemonCounter>>,
    shedding: Shedding,
    /// The workers of which new blocks are refused, in the order in which that began.
    held: Vec<(Worker, Arc<WorkerView>)>,
    log_quota: LogQuota,
}

impl MemoryLook {
    fn new(
        (figures, resident): (MemoryFigures, Option<Arc<ResidentMemory>>),
        (fleet, views): (Arc<Fleet>, Arc<WorkerViews>),
        counters: Arc<CounterSet<DaemonCounter>>,
    ) -> Self {
        if resident.is_none() {
            tracing::warn!("the kernel does not tell the resident memory of the process: only the accounts count");
        }
        let (shedding, held, log_quota) = (Shedding::default(), Vec::new(), LogQuota::default());
        Self { figures, resident, fleet, views, counters, shedding, held, log_quota }
    }

    fn take(&mut self, reads_resident: bool) {
        if reads_resident && let Some(bytes) = self.resident.as_ref().and_then(|file| file.bytes()) {
            self.figures.resident.set(bytes);
        }
        let accounts = &self.figures.accounts;
        if accounts.division().bytes_max() == u64::MAX {
            return;
        }
        let pressure = Pressure {
            used: self.figures.used_bytes(),
            bytes_max: accounts.division().bytes_max(),
            index_used: accounts.used(MemoryPart::Index),
            index_bytes_max: accounts.division().bound(MemoryPart::Index),
        };
        let mut next = None;
        let (fleet, views) = (&self.fleet, &self.views);
        let change = self.shedding.look(pressure, || {
            next = largest(fleet, views);
            next.is_some()
        });
        match change {
            None => {}
            Some(ShedChange::Begin(Shed::Stores)) => self.hold_back(next, pressure),
            Some(ShedChange::End(Shed::Stores)) => self.let_go(pressure),
            Some(ShedChange::Begin(shed)) => {
                self.figures.flags.set(shed, true);
                self.counters.bump(counter_of(shed));
                self.log(pressure, "memory is short", shed.meaning(), None);
            }
            Some(ShedChange::End(shed)) => {
                self.figures.flags.set(shed, false);
                self.log(pressure, "there is memory again, and this has ended", shed.meaning(), None);
            }
        }
    }

    fn hold_back(&mut self, next: Option<(Worker, Arc<WorkerView>)>, pressure: Pressure) {
        let Some((worker, view)) = next else { return };
        view.gauges.set_held_back(true);
        self.figures.flags.set(Shed::Stores, true);
        self.counters.bump(DaemonCounter::MemoryShedStores);
        self.held.push((worker, view));
        self.log(
            pressure,
            "memory is short",
            "new blocks of the worker with the most blocks are refused",
            Some(worker),
        );
    }

    fn let_go(&mut self, pressure: Pressure) {
        let Some((worker, view)) = self.held.pop() else { return };
        view.gauges.set_held_back(false);
        self.figures.flags.set(Shed::Stores, !self.held.is_empty());
        self.log(
            pressure,
            "there is memory again, and this has ended",
            "the worker's new blocks were refused",
            Some(worker),
        );
    }

    fn log(&self, pressure: Pressure, message: &str, what: &str, worker: Option<Worker>) {
        let Some(withheld) = self.log_quota.take(Instant::now()) else { return };
        let Pressure { used, bytes_max, index_used, index_bytes_max } = pressure;
        let worker = worker.map(|worker| worker.to_string());
        tracing::warn!(used, bytes_max, index_used, index_bytes_max, worker, what, withheld, "{message}");
    }
}

const fn counter_of(shed: Shed) -> DaemonCounter {
    match shed {
        Shed::Connections => DaemonCounter::MemoryShedConnections,
        Shed::Dumps => DaemonCounter::MemoryShedDumps,
        Shed::Predictions => DaemonCounter::MemoryShedPredictions,
        Shed::Stores => DaemonCounter::MemoryShedStores,
    }
}

/// The worker with the most blocks among those that are not held back.
fn largest(fleet: &Fleet, views: &WorkerViews) -> Option<(Worker, Arc<WorkerView>)> {
    let table = fleet.load();
    let found = views.of(&table);
    let facts = found.iter().map(|(record, view)| (record.index, view.gauges.bound(), view.gauges.is_held_back()));
    let index: WorkerIndex = next_to_hold_back(facts)?;
    found.into_iter().find(|(record, _)| record.index == index).map(|(record, view)| (record.worker, view))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::{Demands, Gauge, MemoryAccounts, ShedFlags, divide};
    use crate::fleet::{FleetTable, WorkerRecord};
    use crate::ids::WorkerSlot;
    use crate::index::WorkerBlocks;
    use crate::limits::RESUME_AFTER_LOOKS;

    /// Workers with these numbers of blocks.
    fn fleet(blocks: &[u64]) -> (Arc<Fleet>, Arc<WorkerViews>) {
        let record =
            |at: usize| WorkerRecord::new(WorkerIndex(at as u32), Worker::new(at as u64, 0), WorkerSlot(at as u16));
        let workers: Vec<WorkerRecord> = (0..blocks.len()).map(record).collect();
        let views = Arc::new(WorkerViews::default());
        for (record, bound) in workers.iter().zip(blocks) {
            let view = Arc::new(WorkerView::new(Arc::clone(&record.trust)));
            view.gauges.set(&WorkerBlocks { bound: *bound, ..WorkerBlocks::default() });
            views.put(record.index, view);
        }
        (Arc::new(Fleet::new(FleetTable { workers, ..FleetTable::default() })), views)
    }

    #[test]
    fn a_full_index_holds_back_the_largest_worker_and_lets_it_go_when_there_is_room() {
        let demands = Demands { cores: 1, shards: 1, spaces: 1, connections_max: 64, ..Demands::default() };
        let accounts = MemoryAccounts::new(divide(1 << 30, &demands).expect("enough"));
        let index: Gauge = accounts.gauge(MemoryPart::Index);
        let (flags, resident) = (ShedFlags::default(), ResidentMemory::open().map(Arc::new));
        let figures = MemoryFigures { accounts, flags: flags.clone(), resident: Gauge::default() };
        let ((fleet, views), counters) = (fleet(&[10, 30, 0, 20]), Arc::<CounterSet<DaemonCounter>>::default());
        let held_back = |views: &WorkerViews| -> Vec<bool> {
            views.of(&fleet.load()).iter().map(|(_, view)| view.gauges.is_held_back()).collect()
        };
        let bound = figures.accounts.division().bound(MemoryPart::Index);
        let mut look =
            MemoryLook::new((figures, resident), (Arc::clone(&fleet), Arc::clone(&views)), Arc::clone(&counters));
        look.take(true);
        assert!(look.figures.resident.get() > 0 && !held_back(&views).contains(&true));
        index.set(bound / 100 * 96);
        look.take(false);
        assert_eq!(held_back(&views), [false, true, false, false]);
        (0..5).for_each(|_| look.take(false));
        assert_eq!(look.held.len(), 1, "it takes no more");
        for percent in [97, 98, 99] {
            index.set(bound / 100 * percent);
            look.take(false);
        }
        assert_eq!((held_back(&views), look.held.len()), (vec![true, true, false, true], 3), "all that have blocks");
        assert_eq!((counters.get(DaemonCounter::MemoryShedStores), flags.has(Shed::Stores)), (3, true));
        index.set(0);
        (0..RESUME_AFTER_LOOKS).for_each(|_| look.take(false));
        assert_eq!(held_back(&views), [false, true, false, true], "the last one first");
        (0..3 * RESUME_AFTER_LOOKS).for_each(|_| look.take(false));
        assert!(!held_back(&views).contains(&true) && !flags.has(Shed::Stores));
    }
}
