//! Everything that a diagnosis is made from, as plain values.

use super::counts::Counts;
use crate::fleet::WorkerState;
use crate::ids::{Scheme, SpaceId, Worker};
use crate::metrics::{CoreCounter, DaemonCounter, RouteCounter, SnapshotCounter, WorkerCounter};
use crate::trust::Trust;
use crate::wire::SourceStatus;

/// The daemon at one moment.
#[derive(Debug, Default)]
pub(super) struct Facts {
    pub(super) workers: Vec<WorkerFacts>,
    pub(super) spaces: Vec<SpaceFacts>,
    /// What all cores counted of late.
    pub(super) cores: Counts<CoreCounter>,
    /// What the control thread counted of late.
    pub(super) daemon: Counts<DaemonCounter>,
    /// What was counted of snapshots of late.
    pub(super) snapshots: Counts<SnapshotCounter>,
    /// Open files, and how many there may be; `None` = not known.
    pub(super) open_files: Option<(u64, u64)>,
    /// How far the wall clock jumped lately, milliseconds; 0 = it did not.
    pub(super) clock_step_ms: i64,
    /// Who names workers, with what is the matter with each.
    pub(super) naming: Vec<SourceStatus>,
    /// Fields of the configuration whose change waits for the next start.
    pub(super) pending: Vec<&'static str>,
}

/// One space.
#[derive(Debug)]
pub(super) struct SpaceFacts {
    pub(super) id: SpaceId,
    pub(super) model: String,
    pub(super) scheme: Option<Scheme>,
}

/// One worker.
#[derive(Clone, Debug)]
pub(super) struct WorkerFacts {
    pub(super) worker: Worker,
    pub(super) space: SpaceId,
    pub(super) state: WorkerState,
    pub(super) trust: Trust,
    /// The topic its events are subscribed by; `None` = its record names no events.
    pub(super) topic: Option<String>,
    /// The scheme of a store that was refused for it.
    pub(super) refused_scheme: Option<Scheme>,
    pub(super) blocks_held: u64,
    pub(super) messages_waiting: u64,
    pub(super) choked: bool,
    pub(super) total: Counts<WorkerCounter>,
    pub(super) recent: Counts<WorkerCounter>,
    pub(super) routed_total: Counts<RouteCounter>,
    pub(super) routed_recent: Counts<RouteCounter>,
}
