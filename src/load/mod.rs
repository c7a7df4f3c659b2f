//! HOW busy workers are: one record of scalars per worker, the prompts they run, and the bookings that move both.
//!
//! A worker's decode blocks are the distinct prefix blocks of its prompts in flight, however many requests share them
//! (`active`). Every core sees a booking at once, in the record and in the prompts; the two are not read at one moment,
//! so that a decision beside a booking may know one without the other. The record's version moves with every booking:
//! who finds it moved decides again. Whose load changed is noted in order (`changes`), so that a core that keeps what it
//! read of thousands reads again only those.
//!
//! A booking is made by a decision, loses its prefill share when the gateway reports the prefill done,
//! and ends when it is freed, superseded by a later attempt, too old, or its session has gone. Time is
//! an argument: nanoseconds of a clock that never goes back.

mod active;
mod booking;
mod cell;
mod changes;
mod ledger;
mod loads;
mod prefill;
mod reporters;
mod session;
#[cfg(test)]
mod tests;

pub use active::ActiveDepths;
pub use booking::{BookingHandle, BookingOutcome, BookingRef, Demand, PromptBlocks};
pub use cell::{EngineLoad, Load, LoadCells, LoadStability};
pub use changes::ChangesSeen;
pub use loads::{ActiveRead, Booked, Expired, Freed, Leaving, Loads, LoadsConfig, Moved};
pub use prefill::{PrefillFigures, PrefillModel};
pub use reporters::{BackOff, BeyondShare, Reporter};
pub use session::{SessionId, SessionToken};
