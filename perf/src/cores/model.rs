//! Decisions a second of serving threads that each have a processor. This is a model and measures nothing.
//!
//! The threads share one lock, that of the bookings. The model is a closed queueing network: each thread works outside
//! the lock for the think time Z, then queues for the lock, which serves one thread at a time for the service time S.
//! Exact mean value analysis gives the throughput X of n threads from that of n - 1:
//!
//! R(n) = S (1 + Q(n - 1)), X(n) = n / (Z + R(n)), Q(n) = X(n) R(n), Q(0) = 0.
//!
//! It holds for exponential times. Real times vary less, so a real queue is shorter. A thread that waits for the lock may
//! sleep; what sleeping and waking cost is not in the model.

/// What a decision with its booking and its end costs a thread, as measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DecisionCost {
    /// All of it on one thread, nanoseconds; above 0.
    pub(crate) whole_ns: f64,
    /// The part of it in calls that take the lock, nanoseconds: at least the time for which they hold it.
    pub(crate) locked_ns: f64,
    /// Processor time that a decision gains from one thread to two, nanoseconds; 0 = not measured.
    pub(crate) growth_ns: f64,
}

/// How the processor time of a decision is assumed to grow beyond two threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Growth {
    /// By the growth from one to two at each doubling of threads.
    EachDoubling,
    /// By the growth from one to two with each further thread: as if each of them changed further loads and further
    /// cache lines that this one then reads.
    EachThread,
}

impl DecisionCost {
    /// Decisions a second of all threads together.
    #[must_use]
    pub(crate) fn per_s(&self, threads: u16, growth: Growth) -> f64 {
        let threads_f64 = f64::from(threads.max(1));
        let steps = match growth {
            Growth::EachDoubling => threads_f64.log2(),
            Growth::EachThread => threads_f64 - 1.0,
        };
        let service_ns = self.locked_ns.clamp(0.0, self.whole_ns);
        let think_ns = self.whole_ns - service_ns + steps * self.growth_ns.max(0.0);
        1e9 * throughput(threads, think_ns, service_ns)
    }

    /// Times as many decisions a second as one thread makes.
    #[must_use]
    pub(crate) fn speedup(&self, threads: u16, growth: Growth) -> f64 {
        self.per_s(threads, growth) / self.per_s(1, growth)
    }
}

/// Passes through the queue in a unit of time, by exact mean value analysis; `think` + `service` is above 0.
fn throughput(threads: u16, think: f64, service: f64) -> f64 {
    let (mut queued, mut rate) = (0.0, 0.0);
    for present in 1..=threads.max(1) {
        let response = service * (1.0 + queued);
        rate = f64::from(present) / (think + response);
        queued = rate * response;
    }
    rate
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROWTHS: [Growth; 2] = [Growth::EachDoubling, Growth::EachThread];

    fn cost(whole_ns: f64, locked_ns: f64, growth_ns: f64) -> DecisionCost {
        DecisionCost { whole_ns, locked_ns, growth_ns }
    }

    #[track_caller]
    fn assert_near(a: f64, b: f64) {
        assert!((a - b).abs() <= 1e-9 * b.abs(), "{a} is not {b}");
    }

    #[test]
    fn one_thread_makes_one_decision_in_its_time() {
        for (locked_ns, growth) in [0.0, 300.0, 2000.0].into_iter().flat_map(|locked| GROWTHS.map(|of| (locked, of))) {
            assert_near(cost(2000.0, locked_ns, 150.0).per_s(1, growth), 1e9 / 2000.0);
            assert_near(cost(2000.0, locked_ns, 150.0).speedup(1, growth), 1.0);
        }
    }

    #[test]
    fn without_a_lock_threads_add_up() {
        for threads in 1..=64 {
            assert_near(cost(2000.0, 0.0, 0.0).speedup(threads, Growth::EachDoubling), f64::from(threads));
        }
    }

    #[test]
    fn with_nothing_but_the_lock_threads_add_nothing() {
        for threads in 1..=64 {
            assert_near(cost(500.0, 500.0, 0.0).per_s(threads, Growth::EachThread), 1e9 / 500.0);
        }
    }

    #[test]
    fn two_threads_meet_at_the_lock_as_calculated_by_hand() {
        // Z = S = 1: R(1) = 1, X(1) = 1/2, Q(1) = 1/2; R(2) = 3/2, X(2) = 2 / (1 + 3/2).
        assert_near(throughput(2, 1.0, 1.0), 0.8);
    }

    #[test]
    fn growth_counts_by_doublings_or_by_threads() {
        let grown = cost(2000.0, 0.0, 100.0);
        assert_near(grown.per_s(2, Growth::EachDoubling), 2e9 / 2100.0);
        assert_near(grown.per_s(2, Growth::EachThread), 2e9 / 2100.0);
        assert_near(grown.per_s(8, Growth::EachDoubling), 8e9 / 2300.0);
        assert_near(grown.per_s(8, Growth::EachThread), 8e9 / 2700.0);
        assert_near(cost(2000.0, 0.0, -100.0).per_s(8, Growth::EachThread), 8e9 / 2000.0);
    }

    #[test]
    fn more_threads_decide_more_up_to_both_bounds() {
        for (locked_ns, growth_ns) in [(0.0, 0.0), (1.0, 0.0), (200.0, 50.0), (900.0, 0.0), (1000.0, 0.0)] {
            let of = cost(1000.0, locked_ns, growth_ns);
            for growth in GROWTHS {
                let mut before = 0.0;
                for threads in 1..=64 {
                    let per_s = of.per_s(threads, growth);
                    assert!(per_s >= before * (1.0 - 1e-12), "{of:?} {threads} {growth:?}");
                    assert!(per_s <= f64::from(threads) * 1e9 / 1000.0 * (1.0 + 1e-12), "{of:?} {threads} {growth:?}");
                    assert!(per_s * locked_ns <= 1e9 * (1.0 + 1e-12), "{of:?} {threads} {growth:?}");
                    before = per_s;
                }
            }
        }
    }
}
