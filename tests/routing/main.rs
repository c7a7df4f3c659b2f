//! Which worker a request gets: decisions against an independent oracle, and policies, queues, affinity, pairs and
//! predictions as a gateway meets them.
#![cfg(feature = "daemon")]

mod affinity;
mod approximate;
mod disaggregate;
#[path = "../kit/mod.rs"]
mod kit;
mod oracle;
mod policy;
mod queue;
