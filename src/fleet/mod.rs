//! WHO there is: spaces, workers and what is known about each, as one copy-on-write table.
//!
//! The table changes seldom (a worker joins, drains, dies); what changes with every event batch (trust)
//! sits behind it in cells of atomics, so that a decision reads one table and current trust without a lock.

mod cells;
mod table;

pub use cells::{SchemeCell, TrustCell, trust_changes};
pub use table::{
    DeviceClass, EventSource, Fleet, FleetTable, PlaceAllocator, PoolRole, Space, WorkerRecord, WorkerState,
};
