//! Spans on their way to the collector: batches, attempts, and what is dropped. Pure; times are given.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::otlp::Span;
use crate::limits::{
    TRACE_ATTEMPTS_MAX, TRACE_BACK_OFF_MS, TRACE_BACK_OFF_MS_MAX, TRACE_BATCH_SPANS_MAX, TRACE_EXPORT_EVERY_MS,
};

/// What a collector made of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It took the batch, but for this many spans.
    Taken {
        /// Spans that it rejected.
        rejected: u64,
    },
    /// It will never take this batch.
    Refused,
    /// It may take the batch later, not before this time if it says so: it is busy, or was not reached.
    Later(Option<Duration>),
}

/// Why spans did not reach the collector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Undelivered {
    /// Spans that the collector refused, alone or with their batch.
    pub(crate) refused: u64,
    /// Spans of batches that were given up after the last attempt.
    pub(crate) given_up: u64,
}

/// The spans that wait.
#[derive(Debug)]
pub(crate) struct Delivery {
    waiting: VecDeque<Span>,
    waiting_max: usize,
    /// When the span arrived that makes the next batch due.
    since: Option<Instant>,
    /// Failed attempts of the batch that is first in line.
    attempts: u32,
    /// Attempts that failed one after another, of any batch.
    failures: u32,
    /// No attempt before this time.
    not_before: Option<Instant>,
}

impl Delivery {
    /// Holds at most this many spans.
    pub(crate) const fn new(waiting_max: usize) -> Self {
        Self { waiting: VecDeque::new(), waiting_max, since: None, attempts: 0, failures: 0, not_before: None }
    }

    /// Queues a span; `false` = there is no room, and it is dropped.
    #[must_use]
    pub(crate) fn push(&mut self, span: Span, now: Instant) -> bool {
        if self.waiting.len() >= self.waiting_max {
            return false;
        }
        self.since.get_or_insert(now);
        self.waiting.push_back(span);
        true
    }

    /// The spans of the next batch, if it is due: enough of them wait, or one waits for long enough.
    pub(crate) fn due(&self, now: Instant) -> Option<Vec<Span>> {
        if self.not_before.is_some_and(|not_before| now < not_before) {
            return None;
        }
        let is_full = self.waiting.len() >= TRACE_BATCH_SPANS_MAX;
        let is_old =
            self.since.is_some_and(|since| now.duration_since(since).as_millis() >= u128::from(TRACE_EXPORT_EVERY_MS));
        (is_full || is_old).then(|| self.batch())
    }

    /// The spans of the next batch, due or not; none if none wait.
    pub(crate) fn batch(&self) -> Vec<Span> {
        self.waiting.iter().take(TRACE_BATCH_SPANS_MAX).cloned().collect()
    }

    /// The number of spans that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Takes the answer to the batch that [`due`](Self::due) gave, of `spans` spans. Returns what was dropped.
    pub(crate) fn answered(&mut self, spans: usize, answer: Answer, now: Instant) -> Undelivered {
        match answer {
            Answer::Taken { rejected } => {
                (self.failures, self.not_before) = (0, None);
                self.remove(spans, now);
                Undelivered { refused: rejected.min(spans as u64), given_up: 0 }
            }
            Answer::Refused => {
                self.back_off(None, now);
                self.remove(spans, now);
                Undelivered { refused: spans as u64, given_up: 0 }
            }
            Answer::Later(after) => {
                self.attempts += 1;
                self.back_off(after, now);
                if self.attempts < TRACE_ATTEMPTS_MAX {
                    return Undelivered::default();
                }
                self.remove(spans, now);
                Undelivered { refused: 0, given_up: spans as u64 }
            }
        }
    }

    fn remove(&mut self, spans: usize, now: Instant) {
        self.attempts = 0;
        self.waiting.drain(..spans.min(self.waiting.len()));
        self.since = (!self.waiting.is_empty()).then_some(now);
    }

    /// Waits before the next attempt: twice as long after each failure, and no longer than the limit whatever the
    /// collector says.
    fn back_off(&mut self, after: Option<Duration>, now: Instant) {
        let own_ms = TRACE_BACK_OFF_MS.saturating_mul(1 << self.failures.min(16)).min(TRACE_BACK_OFF_MS_MAX);
        self.failures = self.failures.saturating_add(1);
        let most = Duration::from_millis(TRACE_BACK_OFF_MS_MAX);
        let rest = after.unwrap_or_default().max(Duration::from_millis(own_ms)).min(most);
        self.not_before = Some(now + rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_millis(TRACE_EXPORT_EVERY_MS);

    fn filled(spans: usize, now: Instant) -> Delivery {
        let mut delivery = Delivery::new(10 * TRACE_BATCH_SPANS_MAX);
        (0..spans).for_each(|_| assert!(delivery.push(Span::default(), now)));
        delivery
    }

    #[test]
    fn a_batch_is_due_when_it_is_full_or_old() {
        let now = Instant::now();
        let mut few = filled(3, now);
        assert_eq!(few.due(now), None);
        assert_eq!(few.due(now + EVERY).map(|spans| spans.len()), Some(3));
        assert_eq!(few.answered(3, Answer::Taken { rejected: 1 }, now), Undelivered { refused: 1, given_up: 0 });
        assert_eq!((few.waiting(), few.due(now + EVERY)), (0, None));
        let many = filled(TRACE_BATCH_SPANS_MAX + 1, now);
        assert_eq!(many.due(now).map(|spans| spans.len()), Some(TRACE_BATCH_SPANS_MAX));
    }

    #[test]
    fn a_collector_that_is_down_costs_a_bounded_number_of_attempts_and_of_spans() {
        let mut now = Instant::now();
        let mut delivery = filled(2, now);
        let (mut attempts, mut pauses) = (0, Vec::new());
        let dropped = loop {
            now += EVERY;
            while delivery.due(now).is_none() {
                now += Duration::from_millis(100);
            }
            attempts += 1;
            let dropped = delivery.answered(2, Answer::Later(None), now);
            let mut rest = now;
            while delivery.due(rest).is_none() && delivery.waiting() > 0 {
                rest += Duration::from_millis(100);
            }
            pauses.push((rest - now).as_millis() as u64);
            if dropped != Undelivered::default() {
                break dropped;
            }
        };
        assert_eq!((attempts, dropped), (TRACE_ATTEMPTS_MAX, Undelivered { refused: 0, given_up: 2 }));
        assert!(pauses[0] >= TRACE_BACK_OFF_MS && pauses[1] >= 2 * TRACE_BACK_OFF_MS, "{pauses:?}");
        assert!(pauses.iter().all(|pause| *pause <= TRACE_BACK_OFF_MS_MAX), "{pauses:?}");
        // The pause outlives the batch: the next one does not hurry.
        assert!(delivery.push(Span::default(), now));
        assert_eq!(delivery.due(now + EVERY), None);
    }

    #[test]
    fn a_collector_cannot_ask_for_an_endless_pause() {
        let now = Instant::now();
        let mut delivery = filled(1, now);
        delivery.answered(1, Answer::Later(Some(Duration::MAX)), now);
        assert!(delivery.due(now + Duration::from_millis(TRACE_BACK_OFF_MS_MAX)).is_some());
        let mut delivery = filled(1, now);
        delivery.answered(1, Answer::Later(Some(Duration::from_millis(4 * TRACE_BACK_OFF_MS))), now);
        assert!(delivery.due(now + Duration::from_millis(4 * TRACE_BACK_OFF_MS - 1)).is_none());
    }

    #[test]
    fn spans_beyond_the_bound_are_dropped() {
        let (now, mut delivery) = (Instant::now(), Delivery::new(2));
        let pushed = [(); 3].map(|()| delivery.push(Span::default(), now));
        assert_eq!((pushed, delivery.waiting()), ([true, true, false], 2));
        assert_eq!(delivery.answered(2, Answer::Refused, now), Undelivered { refused: 2, given_up: 0 });
    }
}
