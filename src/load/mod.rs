//! HOW busy workers are: one record of scalars per worker, and the bookings that move it.
//!
//! A booking is made by a decision, loses its prefill share when the gateway reports the prefill done,
//! and ends when it is freed, superseded by a later attempt, too old, or its session has gone. Time is
//! an argument: milliseconds of a clock that never goes back.

mod booking;
mod cell;
mod session;
mod table;

#[cfg(test)]
mod tests;

pub use booking::{BookingHandle, BookingOutcome, BookingRef, Demand};
pub use cell::{Load, LoadCells};
pub use session::{SessionId, SessionToken};
pub use table::{Booked, Expired, Leaving, Loads, LoadsConfig};
