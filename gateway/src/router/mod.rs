//! Which engine should run a prompt: the question to the daemon, the booking of its answer, and what the gateway does
//! without an answer.
//!
//! ```text
//!  Ask ─▶ eligible (engines that serve the model) ─▶ Router::pick ─▶ daemon ─▶ Pick ─▶ BookingGuard
//!                                                        │                               │ progress, end
//!                                                        └─▶ alone (without the daemon)  ▼
//!                                                                              reports ─▶ daemon
//!
//!  DaemonProcess: `kvrouted serve` as a child, configured from what the engines say of themselves
//! ```
//!
//! Three can decide, and [`Pick::decided_by`] says which: the daemon by caches and load, the daemon by load alone
//! because the prompt has no tokens, or this process while the daemon does not answer.

mod ask;
mod booking;
mod daemon;
mod eligible;
mod figures;
mod pick;
mod prediction;
mod refusal;
mod reports;

pub use ask::{Ask, DecidedBy, Pick, PrefillPick};
pub use booking::BookingGuard;
pub use daemon::{DaemonError, DaemonOptions, DaemonProcess, DaemonStarter, DaemonState, find_program};
pub use figures::{RouterFigure, RouterFigures};
pub use kvrouted::ids::Worker;
pub use pick::{Router, RouterOptions};
pub use reports::{ReportFigure, ReportFigures};
