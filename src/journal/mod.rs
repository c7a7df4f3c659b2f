//! WHAT was decided, and from what: a sample of decisions on the disk, each with everything it was made from, so that
//! it can be judged again, by the same policy or another.
//!
//! ```text
//! core: observation, policy, decision → Recorder → Ring → WriterThread → files → Reader → Replayed
//! ```
//!
//! A core copies a decision into a buffer and goes on; it never waits and makes no system call but one to wake a
//! writer that has fallen half a ring behind. Where the ring is full the decision is lost, counted, and the next
//! record of that core says how many are missing. The writer is one thread for all cores.
//!
//! What a record has is what [`judge`](crate::route::judge) reads: no prompt, no token, no hash. The order of the
//! records of one core is that of its decisions; records of different cores stand in the order in which the writer came by.

mod columns;
mod decode;
mod encode;
mod files;
mod format;
mod record;
mod replay;
mod ring;
#[cfg(test)]
mod tests;
mod word;
mod writer;

pub use decode::{Ending, Entry, Reader};
pub use encode::Encoder;
pub use files::{FilesPlan, list};
pub use format::{Origin, SpaceLabel};
pub use record::{Listed, Outcome, Record, Removed};
pub use replay::{Again, Difference, Replayed};
pub use ring::{Noted, Recorder, Ring, Shares, Waiting};
pub use writer::{Judge, Writer, WriterPlan, WriterThread};
