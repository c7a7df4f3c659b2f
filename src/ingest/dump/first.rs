//! Loads that a shard begins with.

use crossbeam::channel::Receiver;

use super::{DumpPart, LoadAnswer, Loading};
use crate::ids::Worker;

/// A load that comes before any message of any worker of its shard: see [`spawn_loading`].
///
/// [`spawn_loading`]: crate::ingest::spawn_loading
#[derive(Debug)]
pub struct FirstLoad {
    pub(in crate::ingest) worker: Worker,
    pub(in crate::ingest) loading: Box<Loading>,
}

impl FirstLoad {
    /// A load into a worker, and where its answers will be.
    #[must_use]
    pub fn new(worker: Worker, parts: Receiver<DumpPart>) -> (Self, Receiver<LoadAnswer>) {
        let (loading, answers) = Loading::new(parts);
        (Self { worker, loading: Box::new(loading) }, answers)
    }
}
