//! Every space's predictions, in one hand.

use std::sync::Arc;

use super::hand_over::Booked;
use super::predictions::{PredictionLimits, Predictions};
use super::reader::PredictionReader;
use crate::fleet::FleetTable;
use crate::ids::SpaceId;
use crate::limits::PREDICTED_BLOCKS_PER_TURN;
use crate::metrics::{CounterSet, PredictorCounter};

/// The only hand that changes predictions. Time and tables are arguments.
#[derive(Debug)]
pub struct Predictor {
    /// By `SpaceId`; `None` where nothing is predicted.
    spaces: Vec<Option<Predictions>>,
    /// The fleet's version that the predictions follow; 0 = none yet.
    fleet_version: u64,
    counters: Arc<CounterSet<PredictorCounter>>,
}

impl Predictor {
    /// Predicts in the spaces that have limits, by `SpaceId`.
    #[must_use]
    pub fn new(limits: &[Option<PredictionLimits>]) -> Self {
        let counters = Arc::default();
        let of =
            |limits: &Option<PredictionLimits>| limits.map(|limits| Predictions::new(limits, Arc::clone(&counters)));
        Self { spaces: limits.iter().map(of).collect(), fleet_version: 0, counters }
    }

    /// What is counted.
    #[must_use]
    pub fn counters(&self) -> Arc<CounterSet<PredictorCounter>> {
        Arc::clone(&self.counters)
    }

    /// What cores ask, by `SpaceId`; `None` where nothing is predicted.
    #[must_use]
    pub fn readers(&self) -> Vec<Option<PredictionReader>> {
        self.spaces.iter().map(|space| space.as_ref().map(Predictions::reader)).collect()
    }

    /// Takes over who there is, if that has changed.
    pub fn follow(&mut self, table: &FleetTable) {
        if self.fleet_version == table.version {
            return;
        }
        self.fleet_version = table.version;
        for (at, space) in self.spaces.iter_mut().enumerate() {
            space.iter_mut().for_each(|predictions| predictions.follow(table, SpaceId(at as u32)));
        }
    }

    /// Takes over a booking.
    pub fn book(&mut self, booked: &Booked) {
        match self.spaces.get_mut(booked.space.0 as usize) {
            Some(Some(space)) => space.book(booked.index, booked.worker, &booked.locals, booked.now_ms),
            _ => self.counters.bump(PredictorCounter::BookingsOfOthers),
        }
    }

    /// Does a slice of what time brings: drops what is too old, cleans up. Whether there is more to do.
    pub fn pass_time(&mut self, now_ms: u64) -> bool {
        let mut more = false;
        for space in self.spaces.iter_mut().flatten() {
            more |= space.pass_time(now_ms, PREDICTED_BLOCKS_PER_TURN);
            more |= space.tidy(PREDICTED_BLOCKS_PER_TURN);
        }
        more
    }

    /// Whether readers hold up so much memory that bookings have to wait.
    #[must_use]
    pub fn is_choked(&self) -> bool {
        self.spaces.iter().flatten().any(Predictions::is_choked)
    }
}
