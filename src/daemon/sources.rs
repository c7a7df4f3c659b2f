//! Where the figures are that the metrics page, status and the doctor show.

use std::sync::Arc;

use super::core_metrics::CoreMetrics;
use super::predicting::Predicting;
use super::recording::Recording;
use super::shared::Shared;
use super::views::Views;
use crate::fleet::Fleet;
use crate::ids::WorkerIndex;
use crate::load::Loads;
use crate::metrics::{CounterSet, DaemonCounter, HttpCounter, LoadReportCounter, PageCounter, RouteCounter};
use crate::serve::{Lanes, RequestQueue};
use crate::snapshot::SnapshotStats;

/// Where every figure is found.
#[derive(Debug)]
pub(super) struct Sources {
    pub(super) fleet: Arc<Fleet>,
    pub(super) loads: Arc<Loads>,
    pub(super) views: Arc<Views>,
    pub(super) predicting: Predicting,
    pub(super) recording: Recording,
    pub(super) cores: Vec<Arc<CoreMetrics>>,
    pub(super) daemon: Arc<CounterSet<DaemonCounter>>,
    pub(super) snapshots: Arc<SnapshotStats>,
    pub(super) heard: Arc<CounterSet<LoadReportCounter>>,
    pub(super) room: Arc<RequestQueue>,
    pub(super) lanes: Arc<Lanes>,
    pub(super) http: Arc<CounterSet<HttpCounter>>,
    pub(super) pages: Arc<CounterSet<PageCounter>>,
}

impl Sources {
    /// The figures of what the cores share, of what each counts, and of the rest.
    pub(super) fn new(
        shared: &Shared,
        views: Arc<Views>,
        cores: Vec<Arc<CoreMetrics>>,
        daemon: &Arc<CounterSet<DaemonCounter>>,
        (snapshots, heard): (&Arc<SnapshotStats>, Arc<CounterSet<LoadReportCounter>>),
    ) -> Self {
        Self {
            fleet: Arc::clone(&shared.fleet),
            loads: Arc::clone(&shared.loads),
            views,
            predicting: shared.predicting.clone(),
            recording: shared.recording.clone(),
            cores,
            daemon: Arc::clone(daemon),
            snapshots: Arc::clone(snapshots),
            heard,
            room: Arc::clone(&shared.room),
            lanes: Arc::clone(&shared.lanes),
            http: Arc::default(),
            pages: Arc::default(),
        }
    }

    /// What decisions showed of a worker, all cores together.
    pub(super) fn routed(&self, worker: WorkerIndex, counter: RouteCounter) -> u64 {
        self.cores.iter().map(|core| core.workers.get(worker, counter)).sum()
    }
}
