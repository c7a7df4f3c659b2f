//! Threads beside those that serve and those that take events in.

use super::predicting::PredictorThread;
use crate::journal::WriterThread;
use crate::snapshot::Keeper;

/// Which of them run.
pub(super) struct Threads {
    pub(super) predictor: Option<PredictorThread>,
    pub(super) keeper: Option<Keeper>,
    pub(super) journal: WriterThread,
}

impl Threads {
    /// One that has ended though nobody asked it to.
    pub(super) fn ended(&self) -> Option<&'static str> {
        if !self.predictor.as_ref().is_none_or(PredictorThread::is_running) {
            return Some("the predictor");
        }
        if !self.keeper.as_ref().is_none_or(Keeper::is_running) {
            return Some("the snapshot thread");
        }
        (!self.journal.is_running()).then_some("the journal's writer")
    }
}
