//! Clients that outlive their daemon.
//!
//! ```text
//! asynchronous, inquiries (calls) ─▶ asking (deadlines, once more) ─▶ the conversation ◀─ driver (the connection)
//! blocking: the same calls, for a thread of its own
//! ```

mod answer;
mod asking;
mod asynchronous;
mod blocking;
mod driver;
mod inquiries;
mod options;
mod prompt;

use super::{no_progress, spaces, unexpected};
pub use answer::Answer;
pub use asynchronous::AsyncClient;
pub use blocking::SteadyClient;
pub use options::SteadyOptions;
