//! What the other side of a lane cannot have meant.

use thiserror::Error;

/// A position that is no position of the ring. Whoever wrote it is not to be trusted any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LaneFault {
    /// The writer has taken back what it had published.
    #[error("the end of what is written went backwards")]
    TailBackwards,
    /// The writer says that it has written more than the ring holds.
    #[error("the end of what is written lies beyond the ring")]
    TailBeyond,
    /// The reader has taken back what it had freed.
    #[error("the end of what is read went backwards")]
    HeadBackwards,
    /// The reader says that it has read what was not written.
    #[error("the end of what is read lies beyond what is written")]
    HeadBeyond,
}
