//! Predictions: the blocks that workers without events probably hold, guessed from the daemon's own bookings.
//!
//! A booked prompt counts as cached by its worker, from the booking on and for a while. That is a guess: an engine
//! evicts when it likes. Predictions are never mixed with the index of observed blocks, and a worker that publishes
//! events is never answered from them.
//!
//! ```text
//! serving thread, after a booking  → BookedQueue (bounded, never waits) → Predictor (one thread) → SpacePredictions
//! serving thread, for a decision   ← PredictionReader (lock-free)       ←──────────────────────── an index of its own
//! ```
//!
//! # Guarantees
//!
//! * The predicted blocks of a worker are closed under prefixes: a block is never there without the blocks before it.
//! * A block is dropped once it was not booked again for the space's time to live.
//! * Blocks are dropped when a worker exceeds its limit, or the space its memory. The least recently booked blocks go
//!   first, and the end of a prompt before its beginning.
//! * All blocks of a worker are dropped when the worker is down, is removed, or publishes events.
//! * **A thread's own bookings become visible late.** A lookup sees a booking if it begins after the predictor has
//!   taken the booking. The predictor takes a thread's bookings in their order, within microseconds when it is idle,
//!   and no request waits for it: two equal prompts closer together than that may go to two workers. A booking that
//!   finds the queue full is dropped and counted.
//! * A booking that ends keeps its predictions: the cache stays warm.
//!
//! Blocks are named by their sequence hashes, because no engine names them.

mod blocks;
mod predictor;
mod space_predictions;
#[cfg(test)]
mod tests;

pub use predictor::{Booked, BookedQueue, Predictor};
pub use space_predictions::{Predicted, PredictionLimits, PredictionReader, SpacePredictions};
