//! The counters, gauges and tables that the metrics page, `kvrouted status` and the doctor read.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use parking_lot::RwLock;

use super::resources::Resources;
use crate::budget::{Gauge, MemoryAccounts, ShedFlags};
use crate::config::Config;
use crate::fleet::{Fleet, FleetTable, WorkerRecord};
use crate::ids::WorkerIndex;
use crate::ingest::WorkerView;
use crate::ingest::descriptors::{self, Descriptors, Takers};
use crate::limits::{DESCRIPTORS_PER_CONNECTION, DESCRIPTORS_PER_LANE, DESCRIPTORS_PER_PUBLISHER, WORKERS_MAX};
use crate::load::Loads;
use crate::metrics::{CounterSet, DaemonCounter, HttpCounter, LoadReportCounter, PageCounter, RouteCounter};
use crate::requests::{CoreMetrics, DecisionRecording, PredictionAccess, RequestQueue, RequestTables};
use crate::route::PolicyTable;
use crate::routers::RoutersView;
use crate::serve::{CoreHandle, Lanes, RemoteStats};
use crate::snapshot::SnapshotStats;
use crate::traces::Traces;
use crate::watchdog::Watchlist;

/// Everything that is shown of the daemon.
#[derive(Debug)]
pub(super) struct Statistics {
    pub(super) fleet: Arc<Fleet>,
    pub(super) loads: Arc<Loads>,
    pub(super) policies: Arc<ArcSwap<PolicyTable>>,
    pub(super) views: Arc<WorkerViews>,
    pub(super) predictions: PredictionAccess,
    pub(super) recording: DecisionRecording,
    pub(super) traces: Traces,
    /// By thread that decides.
    pub(super) cores: Vec<Arc<CoreMetrics>>,
    pub(super) daemon: Arc<CounterSet<DaemonCounter>>,
    pub(super) snapshots: Arc<SnapshotStats>,
    pub(super) load_reports: Arc<CounterSet<LoadReportCounter>>,
    pub(super) routers: Arc<RoutersView>,
    pub(super) queue: Arc<RequestQueue>,
    pub(super) lanes: Arc<Lanes>,
    pub(super) http: Arc<CounterSet<HttpCounter>>,
    pub(super) remote: Arc<RemoteStats>,
    pub(super) pages: Arc<CounterSet<PageCounter>>,
    pub(super) memory: MemoryFigures,
    pub(super) watchlist: Watchlist,
    pub(super) open_files: OpenFiles,
    /// The NUMA nodes of the daemon's processors.
    pub(super) numa_nodes: Vec<u32>,
    /// Whether the daemon ends: it takes no new selections and changes.
    pub(super) is_draining: Arc<AtomicBool>,
    /// The largest fleet of which the metrics page has every metric of each worker.
    pub(super) detailed_workers_max: usize,
}

/// The part of a worker's load that other routers told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OthersPart {
    pub(super) prefill_tokens: u64,
    pub(super) decode_blocks: u64,
    pub(super) requests: u64,
    /// When the oldest of their gauges came, nanoseconds of the bookings' clock; `None` = there is none.
    pub(super) oldest_ns: Option<u64>,
}

impl OthersPart {
    /// Of a worker.
    pub(super) fn of(loads: &Loads, worker: WorkerIndex) -> Self {
        loads.gauges_of(worker).iter().fold(Self::default(), |sum, (_, gauge, set_at_ns)| Self {
            prefill_tokens: sum.prefill_tokens + gauge.prefill_tokens,
            decode_blocks: sum.decode_blocks + gauge.decode_blocks(),
            requests: sum.requests + u64::from(gauge.requests),
            oldest_ns: Some(sum.oldest_ns.map_or(*set_at_ns, |oldest_ns| oldest_ns.min(*set_at_ns))),
        })
    }
}

/// What the process takes of its memory budget, and what it gives up.
#[derive(Clone, Debug)]
pub(super) struct MemoryFigures {
    pub(super) accounts: MemoryAccounts,
    pub(super) flags: ShedFlags,
    /// The resident memory of the process at the last reading.
    pub(super) resident: Gauge,
}

impl MemoryFigures {
    /// The larger of what the accounts say and what is resident.
    pub(super) fn used_bytes(&self) -> u64 {
        self.accounts.used_in_all().max(self.resident.get())
    }
}

/// The division of open files.
#[derive(Clone, Debug)]
pub(super) struct OpenFiles {
    pub(super) descriptors: Descriptors,
    pub(super) takers: Takers,
    pub(super) cores: Vec<CoreHandle>,
    /// Open files at the last diagnosis.
    pub(super) open: Gauge,
}

/// What takes open files: its name, how many it takes now, and how many at most.
pub(super) type OpenFilesRow = (&'static str, u64, u64);

impl Statistics {
    /// The statistics of the shared tables, of each thread that decides, and of the rest of the daemon.
    pub(super) fn new(
        (tables, lanes, config): (&RequestTables, &Arc<Lanes>, &Config),
        views: Arc<WorkerViews>,
        cores: Vec<Arc<CoreMetrics>>,
        daemon: &Arc<CounterSet<DaemonCounter>>,
        (snapshots, load_reports, routers): (&Arc<SnapshotStats>, Arc<CounterSet<LoadReportCounter>>, Arc<RoutersView>),
        (resources, threads): (&Resources, Vec<CoreHandle>),
    ) -> Arc<Self> {
        let Resources { memory, shed, watchlist, descriptors, takers, .. } = resources;
        let (descriptors, takers, open) = (*descriptors, *takers, Gauge::default());
        let open_files = OpenFiles { descriptors, takers, cores: threads, open };
        let memory = MemoryFigures { accounts: memory.clone(), flags: shed.clone(), resident: Gauge::default() };
        Arc::new(Self {
            fleet: Arc::clone(&tables.fleet),
            loads: Arc::clone(&tables.loads),
            policies: Arc::clone(&tables.policies),
            views,
            predictions: tables.predictions.clone(),
            recording: tables.recording.clone(),
            traces: tables.traces.clone(),
            cores,
            daemon: Arc::clone(daemon),
            snapshots: Arc::clone(snapshots),
            load_reports,
            routers,
            queue: Arc::clone(&tables.queue),
            lanes: Arc::clone(lanes),
            http: Arc::default(),
            remote: Arc::default(),
            pages: Arc::default(),
            memory,
            watchlist: watchlist.clone(),
            open_files,
            numa_nodes: resources.numa_nodes.clone(),
            is_draining: Arc::default(),
            detailed_workers_max: config.metrics.detailed_workers_max,
        })
    }

    /// Whether the daemon may be sent requests: its threads go round, and the load of other routers is known or was awaited
    /// for long enough.
    pub(super) fn is_ready(&self) -> bool {
        !self.watchlist.is_stalled() && !self.routers.is_joining()
    }

    /// Whether `GET /ready` answers with 200: it is ready, does not drain, and a worker may be chosen.
    pub(super) fn takes_requests(&self) -> bool {
        // Relaxed: nothing else hangs on it.
        let is_draining = self.is_draining.load(Ordering::Relaxed);
        !is_draining && self.is_ready() && self.fleet.load().has_schedulable()
    }

    /// The division of open files. Publishers are those of events and of loads.
    pub(super) fn open_files(&self) -> [OpenFilesRow; 4] {
        let OpenFiles { descriptors, takers, cores, .. } = &self.open_files;
        let connections: usize = cores.iter().map(CoreHandle::connections).sum();
        let publishers = self.fleet.load().workers.iter().filter(|record| record.events.is_some()).count();
        let own = descriptors::own(*takers);
        let row = |name, taken: usize, most: usize, each: u64| (name, taken as u64 * each, most as u64 * each);
        [
            ("reserved", own, own),
            row("connections", connections, descriptors.connections_max, DESCRIPTORS_PER_CONNECTION),
            row("lanes", self.lanes.open(), descriptors.lanes_max, DESCRIPTORS_PER_LANE),
            row("publishers", publishers, descriptors.publishers_max.min(2 * WORKERS_MAX), DESCRIPTORS_PER_PUBLISHER),
        ]
    }

    /// A counter of the decisions for a worker, summed over all threads.
    pub(super) fn routed(&self, worker: WorkerIndex, counter: RouteCounter) -> u64 {
        self.cores.iter().map(|core| core.workers.get(worker, counter)).sum()
    }
}

/// The ingest threads' view of every worker that is in the fleet's table, was there just now, or is about to be.
#[derive(Debug, Default)]
pub(super) struct WorkerViews(RwLock<HashMap<WorkerIndex, Arc<WorkerView>>>);

impl WorkerViews {
    pub(super) fn put(&self, index: WorkerIndex, view: Arc<WorkerView>) {
        self.0.write().insert(index, view);
    }

    pub(super) fn take(&self, index: WorkerIndex) {
        self.0.write().remove(&index);
    }

    /// Every worker of `table` with its view.
    pub(super) fn of<'a>(&self, table: &'a FleetTable) -> Vec<(&'a WorkerRecord, Arc<WorkerView>)> {
        let views = self.0.read();
        let with_view = |record: &'a WorkerRecord| Some((record, Arc::clone(views.get(&record.index)?)));
        table.workers.iter().filter_map(with_view).collect()
    }
}
