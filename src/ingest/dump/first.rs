//! Loads that come before any message of their worker.

use crossbeam::channel::{Receiver, Sender, bounded};

use super::{DumpPart, LoadAnswer, Loading};
use crate::ids::Worker;

/// A load that comes before any message of its worker: of one that is there when its shard begins ([`spawn_loading`]), or
/// of one that comes later ([`Admission`]). Its messages wait in their socket meanwhile.
///
/// [`spawn_loading`]: crate::ingest::spawn_loading
/// [`Admission`]: crate::ingest::Admission
#[derive(Clone, Debug)]
pub struct FirstLoad {
    pub(in crate::ingest) worker: Worker,
    parts: Receiver<DumpPart>,
    answers: Sender<LoadAnswer>,
}

impl FirstLoad {
    /// A load into a worker, and where its answers will be.
    #[must_use]
    pub fn new(worker: Worker, parts: Receiver<DumpPart>) -> (Self, Receiver<LoadAnswer>) {
        // Held, and how it ended: neither ever finds the channel full.
        let (answers, answered) = bounded(2);
        (Self { worker, parts, answers }, answered)
    }

    /// The load itself, which has not begun.
    pub(in crate::ingest) fn loading(self) -> Loading {
        Loading::of(self.parts, self.answers)
    }
}
