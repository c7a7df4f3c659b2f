//! The counters, gauges and tables that the metrics page, `kvrouted status` and the doctor read.

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::RwLock;

use crate::fleet::{Fleet, FleetTable, WorkerRecord};
use crate::ids::WorkerIndex;
use crate::ingest::WorkerView;
use crate::load::Loads;
use crate::metrics::{CounterSet, DaemonCounter, HttpCounter, LoadReportCounter, PageCounter, RouteCounter};
use crate::requests::{CoreMetrics, DecisionRecording, PredictionAccess, RequestQueue, RequestTables};
use crate::route::PolicyTable;
use crate::serve::Lanes;
use crate::snapshot::SnapshotStats;

/// Everything that is shown of the daemon.
#[derive(Debug)]
pub(super) struct Statistics {
    pub(super) fleet: Arc<Fleet>,
    pub(super) loads: Arc<Loads>,
    pub(super) policies: Arc<ArcSwap<PolicyTable>>,
    pub(super) views: Arc<WorkerViews>,
    pub(super) predictions: PredictionAccess,
    pub(super) recording: DecisionRecording,
    /// By thread that decides.
    pub(super) cores: Vec<Arc<CoreMetrics>>,
    pub(super) daemon: Arc<CounterSet<DaemonCounter>>,
    pub(super) snapshots: Arc<SnapshotStats>,
    pub(super) load_reports: Arc<CounterSet<LoadReportCounter>>,
    pub(super) queue: Arc<RequestQueue>,
    pub(super) lanes: Arc<Lanes>,
    pub(super) http: Arc<CounterSet<HttpCounter>>,
    pub(super) pages: Arc<CounterSet<PageCounter>>,
}

impl Statistics {
    /// The statistics of the shared tables, of each thread that decides, and of the rest of the daemon.
    pub(super) fn new(
        (tables, lanes): (&RequestTables, &Arc<Lanes>),
        views: Arc<WorkerViews>,
        cores: Vec<Arc<CoreMetrics>>,
        daemon: &Arc<CounterSet<DaemonCounter>>,
        (snapshots, load_reports): (&Arc<SnapshotStats>, Arc<CounterSet<LoadReportCounter>>),
    ) -> Self {
        Self {
            fleet: Arc::clone(&tables.fleet),
            loads: Arc::clone(&tables.loads),
            policies: Arc::clone(&tables.policies),
            views,
            predictions: tables.predictions.clone(),
            recording: tables.recording.clone(),
            cores,
            daemon: Arc::clone(daemon),
            snapshots: Arc::clone(snapshots),
            load_reports,
            queue: Arc::clone(&tables.queue),
            lanes: Arc::clone(lanes),
            http: Arc::default(),
            pages: Arc::default(),
        }
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
