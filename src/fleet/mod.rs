//! The fleet: spaces, workers and the facts about them, as one copy-on-write table.
//!
//! The table changes seldom (a worker joins, drains, dies). Trust changes with every event batch and is in cells of
//! atomics behind the table, so that a decision reads one table and current trust without a lock.

mod cells;
mod table;

pub use crate::protocol::{DeviceClass, PoolRole, WorkerState};
pub use cells::{SchemeCell, TrustCell, trust_changes};
pub use table::{EventSource, Fleet, FleetTable, PlaceAllocator, SnapshotSource, Space, WorkerRecord};
