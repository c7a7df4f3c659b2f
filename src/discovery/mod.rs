//! WHO is named by whom (pure): the workers of every source, merged, and what has to be done for the fleet to be
//! as they say.
//!
//! ```text
//! configuration file ─┐
//! files of workers  ──┼→ directory: one owner each, refusals → plan: add, change, remove → the daemon does it
//! admin requests    ──┘        ↑ what engines named by URL answered
//! ```
//!
//! A worker belongs to the source that named it first, for as long as that source names it. Whoever else names
//! it, or its endpoint, is refused by name, and takes over when the owner lets go.

mod directory;
mod files;
mod plan;
mod server_info;
mod source;

pub use directory::{Directory, Merged, Refusal, RefusalReason};
pub use files::{FileState, Files, FilesChange, Seen};
pub use plan::{Step, plan};
pub use server_info::{RankInfo, ServerInfo, no_events};
pub use source::Source;
