//! Workers that come, change and go while the daemon runs, from every source.

#![cfg(feature = "daemon")]

mod daemon;
mod hostile;
#[path = "../process/mod.rs"]
mod process;
mod requests;
mod sources;
mod stress;
