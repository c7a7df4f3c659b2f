//! Clients that outlive their daemon.
//!
//! ```text
//! asynchronous, inquiries (calls) ─▶ asking (deadlines, once more) ─▶ the conversation
//!                                                                        ▲
//! driver (one task: makes the connection, again and again) ─▶ connecting, carrying ─▶ the socket, or the lane
//!
//! blocking: the same calls, for a thread of its own
//! ```

mod answer;
mod asking;
mod asynchronous;
mod blocking;
mod carrying;
mod connecting;
mod driver;
mod inquiries;
mod lane;
mod options;
mod prompt;

use super::{no_progress, spaces, unexpected};
pub use answer::Answer;
pub use asynchronous::AsyncClient;
pub use blocking::SteadyClient;
pub use options::SteadyOptions;
