//! kvrouted's fleet table of made-up workers: one space, one shard.

use std::sync::Arc;

use kvrouted::fleet::{FleetTable, PoolRole, SchemeCell, Space, WorkerRecord};
use kvrouted::ids::{Scheme, SpaceId, Worker, WorkerIndex, WorkerSlot};

/// The only space.
pub(crate) const SPACE: SpaceId = SpaceId(0);

/// A worker at a place of the table: ready, trusted, on a GPU, without labels.
#[must_use]
pub(crate) fn record(place: u32, worker: Worker, slot: WorkerSlot) -> WorkerRecord {
    WorkerRecord {
        space: SPACE,
        name: format!("w{place}"),
        batched_tokens_max: 8192,
        ..WorkerRecord::new(WorkerIndex(place), worker, slot)
    }
}

/// The table of these workers.
#[must_use]
pub(crate) fn table(scheme: Scheme, role: PoolRole, workers: Vec<WorkerRecord>) -> FleetTable {
    let scheme = Arc::new(SchemeCell::new(Some(scheme)));
    let space = Space { id: SPACE, model: "m".to_owned(), namespace: String::new(), role, scheme };
    FleetTable { version: 1, spaces: vec![space], workers }
}
