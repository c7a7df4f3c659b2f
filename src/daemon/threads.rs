//! Threads beside those that serve and those that take events in.

use std::sync::Arc;

use super::predicting::PredictorThread;
use crate::ingest::LoadListener;
use crate::journal::WriterThread;
use crate::serve::{HttpThread, MetricsThread};
use crate::snapshot::Keeper;

/// Which of them run.
pub(super) struct Threads {
    pub(super) predictor: Option<PredictorThread>,
    pub(super) keeper: Option<Keeper>,
    pub(super) journal: WriterThread,
    /// Whoever takes workers in tells it whom to listen to.
    pub(super) listener: Arc<LoadListener>,
    pub(super) http: Option<HttpThread>,
    pub(super) metrics: MetricsThread,
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
        if !self.listener.is_running() {
            return Some("the thread of the engines' loads");
        }
        if !self.http.as_ref().is_none_or(HttpThread::is_running) {
            return Some("the HTTP port");
        }
        if !self.metrics.is_running() {
            return Some("the metrics page");
        }
        (!self.journal.is_running()).then_some("the journal's writer")
    }
}
