//! The load of workers: one record of scalars per worker, the prompts in flight, and the bookings that change both.
//!
//! A worker's decode blocks are the distinct prefix blocks of its prompts in flight, however many requests share them
//! (`active`). Every serving thread sees a booking at once, in the record and in the prompts. A decision reads the two
//! at different moments, so it may see a concurrent booking in one of them only. The record's version changes with
//! every booking; a decision that finds it changed is made again. A change log lists the workers whose load changed
//! (`changes`), so that a cache of thousands of loads reads only those again.
//!
//! Routers that serve the same fleet tell each other what their bookings add to each worker (`gauge`). The record holds
//! the sum of own bookings and those of others (`others`). All else here is about own bookings.
//!
//! A decision makes a booking. The booking loses its prefill share when the gateway reports the prefill done. It ends
//! when the gateway frees it, a later attempt takes over, it gets too old, or its session is gone. Time is an argument:
//! nanoseconds of a monotonic clock.
//!
//! A restart of the daemon keeps bookings: one run takes them out in slices (`kept`), the next one restores them
//! (`restored`).

mod active;
mod booking;
mod change_log;
mod ended;
mod gauge;
mod kept;
mod law_estimate;
mod ledger;
mod load_cells;
mod loads;
mod loads_config;
mod others;
mod prefill;
mod prefill_laws;
mod recent_work;
mod reporters;
mod restored;
mod session;
mod spares;
#[cfg(test)]
mod tests;

pub use crate::protocol::{BookingHandle, BookingOutcome, BookingRef, EngineLoad, SessionToken};
pub use active::{ActiveDepths, SeenDivergence};
pub use booking::{Demand, PromptBlocks};
pub use change_log::ChangesSeen;
pub use ended::{EndReason, EndedBooking};
pub use gauge::{Gauge, GaugeEffect, OriginPlace};
pub use kept::{KeptBlocks, KeptBooking, KeptLoads, KeptNumbers, KeptRun, KeptSession, KeptSlice, KeptWorker};
pub use law_estimate::{LawRefusal, LearntClass};
pub use load_cells::{Load, LoadCells, LoadStability, PrefillWork};
pub use loads::{ActiveRead, Booked, Expired, Freed, Leaving, Loads, Moved};
pub use loads_config::LoadsConfig;
pub use prefill::{PrefillFigures, PrefillModel};
pub use prefill_laws::{LawRestored, LearntLaws, LearntWorker, PrefillClass};
pub use recent_work::{RecentWork, recent_ms};
pub use reporters::{BackOff, BeyondShare, Reporter};
pub use restored::{Restored, RestoredAt, Skipped};
pub use session::SessionId;
