//! The journal: files with a sample of the decisions, each with all its inputs, and what became of their bookings. A
//! recorded decision can be recomputed, by the same policy or by another. The recorded requests are a load that a
//! simulated fleet can run.
//!
//! ```text
//! serving thread: observation, policy, decision → DecisionRecorder → DecisionQueue
//! any thread:     a booking ends → Loads
//! writer thread:  DecisionQueue, Loads → WriterThread → files
//! afterwards:     files → Reader → Replayed; simulate
//! ```
//!
//! A serving thread copies a decision into its queue and goes on. It never waits, and makes at most one system call: it
//! wakes the writer when its queue becomes half full. If the queue is full, the decision is dropped and counted; the
//! next record of that thread says how many are missing. One writer serves all serving threads.
//!
//! A record holds what [`judge`](crate::route::judge) reads, and who asked as far as `identity` tells: no prompt, no
//! token, no block hash. The records of one serving thread are in the order of its decisions. Records of different
//! threads, and ends of bookings, are in the order in which the writer took them.

mod columns;
mod decision_record;
mod decision_recorder;
mod format;
mod identity;
mod prefix_table;
mod replay;
#[cfg(test)]
mod tests;
mod writer_thread;

pub use decision_record::{DecisionRecord, ListedCandidate, Outcome, RemovedWorker};
pub use decision_recorder::{DecisionQueue, DecisionRecorder, Noted, NotedRequest, RequestSample, SampleShares};
pub use format::{Encoder, Ending, JournalEntry, Origin, Reader, SpaceLabel};
pub use identity::{IdentityHasher, RequestIdentity};
pub use replay::{Difference, ReplayJudge, Replayed};
pub use writer_thread::{FilesPlan, Judge, WriterPlan, WriterThread, list};
