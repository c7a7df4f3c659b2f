//! The index against the oracle, a plain model of it.
//!
//! Two more binaries test the index, because each needs a process to itself: `index_concurrent` and `allocator`.
#![cfg(feature = "daemon")]

mod bounds;
mod contract;
mod dump;
mod fuzz;
#[path = "../oracle/mod.rs"]
mod oracle;
mod properties;
mod shards;
mod stress;
