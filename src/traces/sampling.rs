//! Which requests are traced.

use std::sync::Arc;

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::exemplars::Exemplars;
use super::traced_decision::{TraceQueue, TracedDecision};
use crate::metrics::{CounterSet, TraceCounter};
use crate::protocol::TraceContext;

/// What all threads share of the traces. By default traces are off.
#[derive(Clone, Debug, Default)]
pub(crate) struct Traces {
    /// `None` = traces are off.
    queue: Option<Arc<TraceQueue>>,
    /// The share of requests without a context that are traced, 0 to 1.
    ratio: f64,
    pub(crate) counters: Arc<CounterSet<TraceCounter>>,
    pub(crate) exemplars: Arc<Exemplars>,
}

impl Traces {
    /// Traces with room for `decisions_max` sampled decisions that wait.
    pub(crate) fn new(decisions_max: usize, ratio: f64) -> Self {
        Self { queue: Some(Arc::new(TraceQueue::new(decisions_max))), ratio, ..Self::default() }
    }

    /// Where decisions wait; `None` = traces are off.
    pub(crate) const fn queue(&self) -> Option<&Arc<TraceQueue>> {
        self.queue.as_ref()
    }

    /// The tracer of one thread; `None` = traces are off.
    pub(crate) fn tracer(&self) -> Option<Tracer> {
        self.queue.as_ref()?;
        Some(Tracer { traces: self.clone(), rng: Xoshiro256PlusPlus::seed_from_u64(rand::rng().random()) })
    }

    /// Queues a sampled decision. Takes no lock, and never waits.
    pub(crate) fn record(&self, decision: TracedDecision) {
        let counter = match self.queue.as_ref().is_some_and(|queue| queue.push(decision)) {
            true => TraceCounter::Requests,
            false => TraceCounter::RecordsLost,
        };
        self.counters.bump(counter);
    }
}

/// A request that is traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TracedRequest {
    /// The caller's context, which is valid; `None` = the trace begins here.
    pub context: Option<TraceContext>,
}

/// One thread's end of the traces. Its random numbers are its own: sampling changes no decision.
#[derive(Debug)]
pub(crate) struct Tracer {
    pub(crate) traces: Traces,
    rng: Xoshiro256PlusPlus,
}

impl Tracer {
    /// Whether a request with this context is traced: as its caller does, or a share of those without a valid context.
    pub(crate) fn sample(&mut self, context: Option<TraceContext>) -> Option<TracedRequest> {
        let context = context.filter(TraceContext::is_valid);
        let is_traced = match context {
            Some(context) => context.is_sampled(),
            None => self.traces.ratio > 0.0 && self.rng.random_bool(self.traces.ratio.min(1.0)),
        };
        is_traced.then_some(TracedRequest { context })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caller_decides_and_a_share_of_the_others_is_drawn() {
        let context = |flags| Some(TraceContext { trace_id: 1, span_id: 2, flags });
        let invalid = Some(TraceContext { trace_id: 0, span_id: 2, flags: 1 });
        for (ratio, others) in [(0.0, 0..=0), (1.0, 1000..=1000), (0.2, 100..=300)] {
            let mut tracer = Traces::new(1, ratio).tracer().unwrap();
            assert!(tracer.sample(context(1)).is_some() && tracer.sample(context(3)).is_some());
            assert!(tracer.sample(context(0)).is_none() && tracer.sample(context(2)).is_none());
            for other in [None, invalid] {
                let sampled = (0..1000)
                    .filter_map(|_| tracer.sample(other))
                    .inspect(|traced| assert_eq!(traced.context, None))
                    .count();
                assert!(others.contains(&sampled), "{sampled} of 1000 at {ratio}");
            }
        }
        assert!(Traces::default().tracer().is_none());
    }
}
