//! The predictor's thread. It runs if a space is approximate.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::RngExt;

use super::endable_thread::EndableThread;
use super::resources::Resources;
use crate::budget::{Gauge, MemoryPart, Shed, ShedFlags};
use crate::config::{Config, SpaceConfig};
use crate::error::Result;
use crate::fleet::Fleet;
use crate::limits::{CHOKED_PAUSE_MS, PREDICTED_BOOKINGS_PER_QUANTUM_MAX, PREDICTIONS_EXPIRY_EVERY_MS};
use crate::metrics::PredictorCounter;
use crate::predict::{BookedQueue, PredictionLimits, Predictor};
use crate::requests::PredictionAccess;
use crate::sandbox::{self, ThreadKind};
use crate::watchdog::Activity;

/// Starts the thread if a space of `config` is approximate. The clock of bookings begins at `started`.
///
/// # Errors
/// `System` if the thread cannot be started.
pub(super) fn start(
    config: &Config,
    fleet: &Arc<Fleet>,
    (started, resources): (Instant, &Resources),
) -> Result<(PredictionAccess, Option<EndableThread>)> {
    let secret = rand::rng().random();
    let memory_of = |space: &SpaceConfig| resources.predictions_of(space, config);
    let limits: Vec<_> = config.spaces.iter().map(|space| limits(space, memory_of(space), secret)).collect();
    if limits.iter().all(Option::is_none) {
        return Ok((PredictionAccess::default(), None));
    }
    let mut predictor = Predictor::new(&limits);
    // Before the first request, so that the first booking of each worker finds its place.
    predictor.follow(&fleet.load());
    let booked_queue = Arc::new(BookedQueue::default());
    let predictions = PredictionAccess {
        readers: predictor.readers(),
        booked_queue: Arc::clone(&booked_queue),
        counters: predictor.counters(),
    };
    let fleet = Arc::clone(fleet);
    let mark = resources.watchlist.add("predictor", false);
    let mut memory = PredictorMemory {
        shed: resources.shed.clone(),
        is_shed: false,
        gauge: resources.memory.gauge(MemoryPart::Predictions),
        shown_ms: 0,
    };
    let thread = EndableThread::start("predictor", "the predictor", move |ending| {
        sandbox::enter(ThreadKind::Predictor);
        let now_ms = || started.elapsed().as_millis() as u64;
        while !ending.is_asked_for() {
            mark.begin_round(Activity::Predicting);
            memory.follow(&mut predictor, now_ms());
            if let Some(pause) = step(&mut predictor, &booked_queue, (&fleet, memory.is_shed), now_ms()) {
                mark.wait();
                std::thread::park_timeout(pause);
            }
        }
        mark.wait();
    })?;
    predictions.booked_queue.set_consumer(thread.thread().clone());
    Ok((predictions, Some(thread)))
}

/// What the predictor takes, and whether it gives up all predictions.
struct PredictorMemory {
    shed: ShedFlags,
    is_shed: bool,
    gauge: Gauge,
    /// When the gauge was last set.
    shown_ms: u64,
}

impl PredictorMemory {
    /// Drops all predictions when memory gets short, and shows what they take.
    fn follow(&mut self, predictor: &mut Predictor, now_ms: u64) {
        let is_shed = self.shed.has(Shed::Predictions);
        if is_shed && !self.is_shed {
            predictor.forget_all();
        }
        let is_due = now_ms.saturating_sub(self.shown_ms) >= PREDICTIONS_EXPIRY_EVERY_MS;
        if is_due || is_shed != self.is_shed {
            self.gauge.set(predictor.memory_bytes());
            self.shown_ms = now_ms;
        }
        self.is_shed = is_shed;
    }
}

fn limits(space: &SpaceConfig, memory_bytes_max: u64, secret: u64) -> Option<PredictionLimits> {
    space.approximate.then_some(PredictionLimits {
        ttl_ms: space.approximate_ttl_s * 1000,
        worker_blocks_max: space.approximate_blocks_max,
        memory_bytes_max,
        secret,
    })
}

/// One step of the thread. Without memory it predicts nothing from bookings. Returns the pause after it, if there is one;
/// a booking that arrives meanwhile ends the pause.
fn step(
    predictor: &mut Predictor,
    booked_queue: &BookedQueue,
    (fleet, is_shed): (&Fleet, bool),
    now_ms: u64,
) -> Option<Duration> {
    predictor.follow(&fleet.load());
    let choked = predictor.is_choked();
    for _ in 0..if choked { 0 } else { PREDICTED_BOOKINGS_PER_QUANTUM_MAX } {
        let Some(booked) = booked_queue.pop() else { break };
        if is_shed {
            predictor.counters().bump(PredictorCounter::BookingsShed);
        } else {
            predictor.book(&booked);
        }
        booked_queue.recycle(booked);
    }
    let more = predictor.pass_time(now_ms);
    match () {
        () if choked => Some(Duration::from_millis(CHOKED_PAUSE_MS)),
        () if more || !booked_queue.is_empty() => None,
        () => Some(Duration::from_millis(PREDICTIONS_EXPIRY_EVERY_MS)),
    }
}
