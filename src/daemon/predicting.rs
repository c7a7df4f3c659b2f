//! The predictor's thread, where a space is approximate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rand::RngExt;

use crate::config::{Config, SpaceConfig};
use crate::error::{Error, Kind, Result};
use crate::fleet::{Fleet, WorkerRecord};
use crate::ids::SpaceId;
use crate::limits::{CHOKED_REST_MS, PREDICTED_BOOKINGS_PER_TURN_MAX, PREDICTIONS_EXPIRY_EVERY_MS};
use crate::metrics::{CounterSet, PredictorCounter};
use crate::predict::{BookedQueue, PredictionLimits, PredictionReader, Predictor};

/// What cores need to read predictions and to hand over bookings. Empty where no space is approximate.
#[derive(Clone, Debug, Default)]
pub(super) struct Predicting {
    /// By `SpaceId`.
    pub(super) readers: Vec<Option<PredictionReader>>,
    pub(super) hand_over: Arc<BookedQueue>,
    pub(super) counters: Arc<CounterSet<PredictorCounter>>,
}

impl Predicting {
    /// Where to hand over the bookings of a space; `None` if nothing is predicted from them.
    pub(super) fn of(&self, space: SpaceId) -> Option<&BookedQueue> {
        self.readers.get(space.0 as usize)?.as_ref().map(|_| &*self.hand_over)
    }

    /// Blocks predicted for a worker; `None` if nothing is.
    pub(super) fn blocks_of(&self, record: &WorkerRecord) -> Option<u64> {
        self.readers.get(record.space.0 as usize)?.as_ref()?.blocks_of(record.index, record.worker)
    }
}

/// A running predictor.
pub(super) struct PredictorThread {
    thread: JoinHandle<()>,
    ending: Arc<AtomicBool>,
}

/// Starts predicting, if `config` says so anywhere. `started` is where the clock of bookings starts.
///
/// # Errors
/// `System` if the thread cannot be had.
pub(super) fn start(
    config: &Config,
    fleet: &Arc<Fleet>,
    started: Instant,
) -> Result<(Predicting, Option<PredictorThread>)> {
    let secret = rand::rng().random();
    let limits: Vec<_> = config.spaces.iter().map(|space| limits(space, secret)).collect();
    if limits.iter().all(Option::is_none) {
        return Ok((Predicting::default(), None));
    }
    let mut predictor = Predictor::new(&limits);
    // Before the first request, so that nobody's first booking finds no place.
    predictor.follow(&fleet.load());
    let hand_over = Arc::new(BookedQueue::default());
    let predicting =
        Predicting { readers: predictor.readers(), hand_over: Arc::clone(&hand_over), counters: predictor.counters() };
    let ending = Arc::new(AtomicBool::new(false));
    let (fleet, ended) = (Arc::clone(fleet), Arc::clone(&ending));
    let spawned = std::thread::Builder::new().name("predictor".into()).spawn(move || {
        let now_ms = || started.elapsed().as_millis() as u64;
        // Acquire: pairs with the Release in `stop`.
        while !ended.load(Ordering::Acquire) {
            if let Some(rest) = turn(&mut predictor, &hand_over, &fleet, now_ms()) {
                std::thread::park_timeout(rest);
            }
        }
    });
    let thread = spawned.map_err(|error| {
        Error::new(Kind::System, "cannot start the predictor", "raise the limit of processes").caused_by(error)
    })?;
    predicting.hand_over.set_consumer(thread.thread().clone());
    Ok((predicting, Some(PredictorThread { thread, ending })))
}

fn limits(space: &SpaceConfig, secret: u64) -> Option<PredictionLimits> {
    space.approximate.then_some(PredictionLimits {
        ttl_ms: space.approximate_ttl_s * 1000,
        worker_blocks_max: space.approximate_blocks_max,
        memory_bytes_max: space.approximate_memory_bytes_max,
        secret,
    })
}

/// One turn; how long to rest after it, if at all. A booking that comes meanwhile ends the rest.
fn turn(predictor: &mut Predictor, hand_over: &BookedQueue, fleet: &Fleet, now_ms: u64) -> Option<Duration> {
    predictor.follow(&fleet.load());
    let choked = predictor.is_choked();
    for _ in 0..if choked { 0 } else { PREDICTED_BOOKINGS_PER_TURN_MAX } {
        let Some(booked) = hand_over.pop() else { break };
        predictor.book(&booked);
        hand_over.recycle(booked);
    }
    let more = predictor.pass_time(now_ms);
    match () {
        () if choked => Some(Duration::from_millis(CHOKED_REST_MS)),
        () if more || !hand_over.is_empty() => None,
        () => Some(Duration::from_millis(PREDICTIONS_EXPIRY_EVERY_MS)),
    }
}

impl PredictorThread {
    /// Whether it runs; it ends by itself only by a fault.
    pub(super) fn is_running(&self) -> bool {
        !self.thread.is_finished()
    }

    /// Ends it and waits for it. What it predicted goes with it.
    ///
    /// # Errors
    /// `Internal` if it had panicked.
    pub(super) fn stop(self) -> Result<()> {
        // Release: pairs with the Acquire of its loop.
        self.ending.store(true, Ordering::Release);
        self.thread.thread().unpark();
        self.thread
            .join()
            .map_err(|_| Error::new(Kind::Internal, "the predictor panicked", "report it with the log around it"))
    }
}
