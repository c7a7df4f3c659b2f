//! The access of requests to predictions, and to the predictor's queue, for spaces whose workers publish no events.

use std::sync::Arc;

use crate::fleet::WorkerRecord;
use crate::ids::SpaceId;
use crate::metrics::{CounterSet, PredictorCounter};
use crate::predict::{BookedQueue, PredictionReader};

/// What requests need to read predictions and to queue bookings. Empty if no space is approximate.
#[derive(Clone, Debug, Default)]
pub(crate) struct PredictionAccess {
    /// By `SpaceId`.
    pub(crate) readers: Vec<Option<PredictionReader>>,
    pub(crate) booked_queue: Arc<BookedQueue>,
    pub(crate) counters: Arc<CounterSet<PredictorCounter>>,
}

impl PredictionAccess {
    /// The queue for the bookings of a space; `None` if nothing is predicted from them.
    pub(super) fn of(&self, space: SpaceId) -> Option<&BookedQueue> {
        self.readers.get(space.0 as usize)?.as_ref().map(|_| &*self.booked_queue)
    }

    /// The blocks predicted for a worker; `None` if its cache is not predicted.
    pub(crate) fn blocks_of(&self, record: &WorkerRecord) -> Option<u64> {
        self.readers.get(record.space.0 as usize)?.as_ref()?.blocks_of(record.index, record.worker)
    }
}
