//! The facts that a diagnosis is made from, as plain values.

use std::sync::Arc;

use super::super::sandboxed::SandboxCondition;
use super::history::Counts;
use crate::budget::Shed;
use crate::fleet::WorkerState;
use crate::ids::{Scheme, SpaceId, Worker};
use crate::load::PrefillClass;
use crate::metrics::{
    CoreCounter, DaemonCounter, RemoteCounter, RouteCounter, SnapshotCounter, TraceCounter, WorkerCounter,
};
use crate::routers::RoutersShown;
use crate::trust::Trust;
use crate::wire::SourceStatus;

/// The daemon at one moment.
#[derive(Debug, Default)]
pub(super) struct Facts {
    pub(super) workers: Vec<WorkerCondition>,
    pub(super) spaces: Vec<SpaceCondition>,
    /// Recent counts of all threads that decide.
    pub(super) cores: Counts<CoreCounter>,
    /// Recent counts of the control thread.
    pub(super) daemon: Counts<DaemonCounter>,
    /// Recent counts of snapshots.
    pub(super) snapshots: Counts<SnapshotCounter>,
    /// Recent counts of the remote port.
    pub(super) remote: Counts<RemoteCounter>,
    /// Recent counts of traces.
    pub(super) traces: Counts<TraceCounter>,
    /// Whether mode `latency` decides in any space.
    pub(super) decides_by_latency: bool,
    /// What is known of the prefill times of each class of workers.
    pub(super) prefill_classes: Vec<PrefillClass>,
    /// Open files and their limit; `None` = unknown.
    pub(super) open_files: Option<(u64, u64)>,
    /// The memory of the process.
    pub(super) memory: MemoryCondition,
    /// The NUMA nodes of its processors.
    pub(super) numa_nodes: Vec<u32>,
    /// The threads that are stalled now.
    pub(super) threads_stalled: Vec<ThreadCondition>,
    /// The recent jump of the wall clock, milliseconds; 0 = none.
    pub(super) clock_step_ms: i64,
    pub(super) sandbox: SandboxCondition,
    pub(super) routers: Arc<RoutersShown>,
    /// The sources of workers, each with its problem.
    pub(super) naming: Vec<SourceStatus>,
    /// Changed fields of the configuration that need a restart.
    pub(super) pending: Vec<&'static str>,
}

/// The memory of the process.
#[derive(Clone, Debug, Default)]
pub(super) struct MemoryCondition {
    /// The larger of what the accounts say and what is resident.
    pub(super) used_bytes: u64,
    /// What the daemon gives up now.
    pub(super) shed: Vec<Shed>,
}

/// A stalled thread.
#[derive(Clone, Debug)]
pub(super) struct ThreadCondition {
    pub(super) name: String,
    /// Whether requests or events stand still while it does.
    pub(super) is_vital: bool,
    /// What it does, and for which worker.
    pub(super) activity: String,
}

/// One space.
#[derive(Debug)]
pub(super) struct SpaceCondition {
    pub(super) id: SpaceId,
    pub(super) model: String,
    pub(super) scheme: Option<Scheme>,
}

/// One worker.
#[derive(Clone, Debug)]
pub(super) struct WorkerCondition {
    pub(super) worker: Worker,
    pub(super) space: SpaceId,
    pub(super) state: WorkerState,
    pub(super) trust: Trust,
    /// The topic of its subscription; `None` = its record names no events.
    pub(super) topic: Option<String>,
    /// The scheme of a store that was refused because of it.
    pub(super) refused_scheme: Option<Scheme>,
    pub(super) blocks_held: u64,
    pub(super) messages_waiting: u64,
    pub(super) choked: bool,
    pub(super) total: Counts<WorkerCounter>,
    pub(super) recent: Counts<WorkerCounter>,
    pub(super) routed_total: Counts<RouteCounter>,
    pub(super) routed_recent: Counts<RouteCounter>,
}
