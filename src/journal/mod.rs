//! The journal: files with a sample of the decisions, each with all its inputs. A recorded decision can be recomputed,
//! by the same policy or by another.
//!
//! ```text
//! serving thread: observation, policy, decision → DecisionRecorder → DecisionQueue
//! writer thread:  DecisionQueue → WriterThread → files
//! afterwards:     files → Reader → Replayed
//! ```
//!
//! A serving thread copies a decision into its queue and goes on. It never waits, and makes at most one system call: it
//! wakes the writer when its queue becomes half full. If the queue is full, the decision is dropped and counted; the
//! next record of that thread says how many are missing. One writer serves all serving threads.
//!
//! A record holds what [`judge`](crate::route::judge) reads: no prompt, no token, no hash. The records of one serving
//! thread are in the order of its decisions. Records of different threads are in the order in which the writer took
//! them.

mod columns;
mod decision_record;
mod decision_recorder;
mod format;
mod replay;
#[cfg(test)]
mod tests;
mod writer_thread;

pub use decision_record::{DecisionRecord, ListedCandidate, Outcome, RemovedWorker};
pub use decision_recorder::{DecisionQueue, DecisionRecorder, Noted, SampleShares};
pub use format::{Encoder, Ending, JournalEntry, Origin, Reader, SpaceLabel};
pub use replay::{Difference, ReplayJudge, Replayed};
pub use writer_thread::{FilesPlan, Judge, WriterPlan, WriterThread, list};
