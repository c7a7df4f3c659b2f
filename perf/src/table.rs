//! kvrouted's fleet table of made-up workers: one space, one shard.

use std::sync::Arc;

use kvrouted::fleet::{DeviceClass, FleetTable, PoolRole, SchemeCell, Space, TrustCell, WorkerRecord, WorkerState};
use kvrouted::ids::{Scheme, ShardId, SpaceId, Worker, WorkerIndex, WorkerSlot};
use kvrouted::trust::Trust;

/// The only space.
pub(crate) const SPACE: SpaceId = SpaceId(0);

/// A worker at a place of the table: ready, trusted, on a GPU, without labels.
#[must_use]
pub(crate) fn record(place: u32, worker: Worker, slot: WorkerSlot) -> WorkerRecord {
    WorkerRecord {
        index: WorkerIndex(place),
        worker,
        space: SPACE,
        name: format!("w{place}"),
        shard: ShardId(0),
        slot,
        capacity_blocks: 0,
        batched_tokens_max: 8192,
        device_class: DeviceClass::Gpu,
        weight: 1.0,
        taints: Vec::new(),
        loras: Vec::new(),
        state: WorkerState::Ready,
        trust: Arc::new(TrustCell::new(Trust::default())),
        events: None,
    }
}

/// The table of these workers.
#[must_use]
pub(crate) fn table(scheme: Scheme, role: PoolRole, workers: Vec<WorkerRecord>) -> FleetTable {
    let scheme = Arc::new(SchemeCell::new(Some(scheme)));
    let space = Space { id: SPACE, model: "m".to_owned(), namespace: String::new(), role, scheme };
    FleetTable { version: 1, spaces: vec![space], workers }
}
