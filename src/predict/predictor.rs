//! The predictor: turns bookings into predictions, for every space.

use std::sync::Arc;
use std::thread::Thread;

use super::space_predictions::{PredictionLimits, PredictionReader, SpacePredictions};
use crate::fleet::FleetTable;
use crate::ids::{LocalHash, SpaceId, Worker, WorkerIndex};
use crate::limits::{
    PREDICTED_BLOCKS_PER_QUANTUM, PREDICTED_BOOKINGS_WAITING_MAX, PREDICTED_BUFFER_BLOCKS_KEPT,
    PREDICTED_WAITING_BLOCKS_MAX,
};
use crate::metrics::{CounterSet, PredictorCounter};
use crate::recycling_queue::{QueueBounds, Recycle, RecyclingQueue, Wake};

/// A prompt that was booked.
#[derive(Debug, Default)]
pub struct Booked {
    /// The space of the request.
    pub space: SpaceId,
    /// The worker's place in the fleet table.
    pub index: WorkerIndex,
    /// The worker that runs the request.
    pub worker: Worker,
    /// The time of the booking, on the clock of bookings.
    pub now_ms: u64,
    /// The prompt's whole blocks.
    pub locals: Vec<LocalHash>,
}

impl Recycle for Booked {
    fn weight(&self) -> usize {
        self.locals.len()
    }

    fn clear(&mut self) {
        self.locals.clear();
        self.locals.shrink_to(PREDICTED_BUFFER_BLOCKS_KEPT);
    }
}

/// Bookings that wait for the predictor. Any thread may push; the predictor's thread pops.
#[derive(Debug)]
pub struct BookedQueue(RecyclingQueue<Booked>);

impl Default for BookedQueue {
    fn default() -> Self {
        let bounds =
            QueueBounds { items_max: PREDICTED_BOOKINGS_WAITING_MAX, weight_max: PREDICTED_WAITING_BLOCKS_MAX };
        Self(RecyclingQueue::new(bounds, Wake::EachItem))
    }
}

impl BookedQueue {
    /// Queues the booking of a prompt with the blocks `locals`, and wakes the predictor. `false` if there is no room
    /// for the booking or for its blocks: nothing is predicted from it.
    #[must_use]
    pub fn push(
        &self,
        space: SpaceId,
        (index, worker): (WorkerIndex, Worker),
        locals: &[LocalHash],
        now_ms: u64,
    ) -> bool {
        let fill = |booked: &mut Booked| {
            (booked.space, booked.index, booked.worker, booked.now_ms) = (space, index, worker, now_ms);
            booked.locals.extend_from_slice(locals);
        };
        self.0.push(locals.len(), fill)
    }

    /// The booking that has waited longest. Pass it to [`recycle`](Self::recycle) afterwards.
    #[must_use]
    pub fn pop(&self) -> Option<Booked> {
        self.0.pop()
    }

    /// Whether no booking waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes a popped booking back, so that its buffer is used again.
    pub fn recycle(&self, booked: Booked) {
        self.0.recycle(booked);
    }

    /// Sets the predictor's thread, which each push wakes from now on.
    pub fn set_consumer(&self, predictor: Thread) {
        self.0.set_consumer(predictor);
    }
}

/// Changes the predictions of all spaces. Only its thread does; time and fleet tables are arguments.
#[derive(Debug)]
pub struct Predictor {
    /// By `SpaceId`; `None` for a space without predictions.
    spaces: Vec<Option<SpacePredictions>>,
    /// The version of the fleet table that [`follow`](Self::follow) saw last; 0 = none yet.
    fleet_version: u64,
    counters: Arc<CounterSet<PredictorCounter>>,
}

impl Predictor {
    /// Makes predictions for the spaces that have limits, by `SpaceId`.
    #[must_use]
    pub fn new(limits: &[Option<PredictionLimits>]) -> Self {
        let counters = Arc::default();
        let of = |limits: &Option<PredictionLimits>| {
            limits.map(|limits| SpacePredictions::new(limits, Arc::clone(&counters)))
        };
        Self { spaces: limits.iter().map(of).collect(), fleet_version: 0, counters }
    }

    /// The predictor's counters.
    #[must_use]
    pub fn counters(&self) -> Arc<CounterSet<PredictorCounter>> {
        Arc::clone(&self.counters)
    }

    /// The readers for serving threads, by `SpaceId`; `None` for a space without predictions.
    #[must_use]
    pub fn readers(&self) -> Vec<Option<PredictionReader>> {
        self.spaces.iter().map(|space| space.as_ref().map(SpacePredictions::reader)).collect()
    }

    /// Adds and removes workers as the fleet table says, if it has changed.
    pub fn follow(&mut self, table: &FleetTable) {
        if self.fleet_version == table.version {
            return;
        }
        self.fleet_version = table.version;
        for (at, space) in self.spaces.iter_mut().enumerate() {
            space.iter_mut().for_each(|predictions| predictions.follow(table, SpaceId(at as u32)));
        }
    }

    /// Predicts from a booking.
    pub fn book(&mut self, booked: &Booked) {
        match self.spaces.get_mut(booked.space.0 as usize) {
            Some(Some(space)) => space.book(booked.index, booked.worker, &booked.locals, booked.now_ms),
            _ => self.counters.bump(PredictorCounter::BookingsOfOthers),
        }
    }

    /// Drops all predictions.
    pub fn forget_all(&mut self) {
        self.spaces.iter_mut().flatten().for_each(SpacePredictions::forget_all);
    }

    /// The memory of all predictions, bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.spaces.iter().flatten().map(SpacePredictions::memory_bytes).sum()
    }

    /// Drops expired blocks and sweeps the indexes, up to a bounded number of blocks. Whether there is more to do.
    pub fn pass_time(&mut self, now_ms: u64) -> bool {
        let mut more = false;
        for space in self.spaces.iter_mut().flatten() {
            more |= space.pass_time(now_ms, PREDICTED_BLOCKS_PER_QUANTUM);
            more |= space.tidy(PREDICTED_BLOCKS_PER_QUANTUM);
        }
        more
    }

    /// Whether bookings must wait because readers delay the reclaiming of too much memory.
    #[must_use]
    pub fn is_choked(&self) -> bool {
        self.spaces.iter().flatten().any(SpacePredictions::is_choked)
    }
}
