//! WHAT workers without events probably hold: guessed from our own decisions, and kept apart from what is observed.
//!
//! A booked prompt is taken to be in the cache of the worker it was booked on, from then on and for a while. That is
//! a guess: an engine evicts when it likes. Nothing here is ever mixed with the index of observed blocks, and a worker
//! that publishes events is never answered from here.
//!
//! ```text
//! core, after booking → HandOver (bounded, never waits) → Predictor (one thread) → Predictions of the space
//! core, deciding      ← PredictionReader (lock-free)    ←──────────────────────── an index of its own
//! ```
//!
//! # What is guaranteed
//!
//! * The blocks predicted for a worker are closed under prefixes: never a block without those before it.
//! * A prediction is dropped once it has not been renewed for the space's time to live, when the worker has more than
//!   its bound or the space more than its memory (least recently booked first, the tail of a prompt before its head),
//!   and with everything else of the worker when it is down, gone, or has events.
//! * **Own bookings are seen late.** A booking is visible to lookups that begin after the predictor has taken it over,
//!   and a core's bookings are taken over in their order. That takes microseconds when the thread is free, and nothing
//!   waits for it: two equal prompts closer together than that may go to two workers. A hand-over that finds the
//!   queue full is dropped and counted.
//! * A booking that ends keeps its prediction: the cache stays warm.
//!
//! Blocks are named by their sequence hashes, as there is no engine to name them.

mod blocks;
mod hand_over;
mod predictions;
mod predictor;
mod reader;
#[cfg(test)]
mod tests;

pub use hand_over::{Booked, HandOver, NotTaken};
pub use predictions::{PredictionLimits, Predictions};
pub use predictor::Predictor;
pub use reader::{Predicted, PredictionReader};
