//! Discovery: merges the workers of all sources, and plans the changes that make the fleet match. It does no I/O and
//! reads no clock.
//!
//! ```text
//! configuration file ─┐
//! files of workers  ──┼→ merge: one owner for each worker, refusals → plan: add, change, remove → the daemon applies it
//! admin requests    ──┘     ↑ answers of engines named by URL
//! ```
//!
//! A worker belongs to the source that named it first, for as long as that source still lists it. If another source
//! lists the same worker or endpoint, the second entry is refused, and the refusal names the owner. The other source
//! takes over when the owner no longer lists the worker.

mod merge;
mod plan;
mod server_info;
mod worker_files;

pub(crate) use merge::{Refusal, RefusalReason, Source, SourceMerge};
pub(crate) use plan::{Step, plan};
pub use server_info::ServerInfo;
pub(crate) use server_info::no_events;
pub(crate) use worker_files::{Files, FilesChange, Seen};
