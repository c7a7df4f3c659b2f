//! Starts requests when they arrive. One that continues another also waits until that is complete, as a user would; no
//! other request waits for it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::super::run_records::monotonic_ns;
use super::super::workload::Request;

/// Time from creating a pacer to the first arrival, so that starting the threads delays no request.
const HEAD_START_NS: u64 = 100_000_000;

/// The requests of a workload, shared by the threads that run them.
pub(super) struct Pacer {
    /// By request: when it arrives at the earliest, nanoseconds of CLOCK_MONOTONIC, and the request that continues it.
    requests: Vec<(u64, Option<usize>)>,
    state: Mutex<State>,
    /// Wakes one of the threads that wait for their turn to wait for an arrival.
    turn: Condvar,
    /// Wakes the thread that waits for the next arrival.
    earlier: Condvar,
}

struct State {
    /// Requests that may start, by the time of their arrival.
    due: BinaryHeap<Reverse<(u64, usize)>>,
    started: usize,
    complete: usize,
    /// Whether a thread waits for the next arrival. The others wait for their turn, so that an arrival wakes one thread.
    is_watched: bool,
    closed: bool,
}

impl Pacer {
    /// No request has started; the clock of arrivals starts after [`HEAD_START_NS`].
    pub(super) fn new(workload: &[Request]) -> Self {
        let opened_ns = monotonic_ns() + HEAD_START_NS;
        let mut requests: Vec<_> =
            workload.iter().map(|request| (opened_ns + request.arrival_us * 1000, None)).collect();
        let mut due = BinaryHeap::new();
        for (index, request) in workload.iter().enumerate() {
            match request.after {
                Some(before) => requests[before].1 = Some(index),
                None => due.push(Reverse((requests[index].0, index))),
            }
        }
        let state = State { due, started: 0, complete: 0, is_watched: false, closed: false };
        Self { requests, state: Mutex::new(state), turn: Condvar::new(), earlier: Condvar::new() }
    }

    /// Waits for the next request and returns it; `None` if there are no more, or after a failure.
    pub(super) fn enter(&self) -> Option<usize> {
        let mut state = self.state.lock();
        loop {
            if state.closed || state.started == self.requests.len() {
                self.turn.notify_all();
                return None;
            }
            let next = state.due.peek().map(|Reverse(next)| *next);
            match next {
                Some((due_ns, index)) if !state.is_watched => {
                    let early_ns = due_ns.saturating_sub(monotonic_ns());
                    if early_ns == 0 {
                        state.due.pop();
                        state.started += 1;
                        self.turn.notify_one();
                        return Some(index);
                    }
                    state.is_watched = true;
                    self.earlier.wait_for(&mut state, Duration::from_nanos(early_ns));
                    state.is_watched = false;
                }
                _ => self.turn.wait(&mut state),
            }
        }
    }

    /// Notes that a request is complete, since `at_ns`. Returns the number of complete requests.
    pub(super) fn leave(&self, index: usize, at_ns: u64) -> usize {
        let mut state = self.state.lock();
        state.complete += 1;
        if let Some(next) = self.requests[index].1 {
            state.due.push(Reverse((self.requests[next].0.max(at_ns), next)));
            match state.is_watched {
                true => self.earlier.notify_one(),
                false => self.turn.notify_one(),
            };
        }
        state.complete
    }

    /// Starts no more requests.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.turn.notify_all();
        self.earlier.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::workload::{Segment, Workload};
    use super::*;

    #[test]
    fn every_request_starts_once_and_after_the_one_it_continues() {
        let workload = Workload::generate(1, 300);
        let pacer = Pacer::new(&workload.requests);
        let complete = Mutex::new(vec![false; 300]);
        let passed = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    while let Some(index) = pacer.enter() {
                        passed.lock().push(index);
                        if let Some(before) = workload.requests[index].after {
                            assert!(complete.lock()[before]);
                        }
                        complete.lock()[index] = true;
                        pacer.leave(index, monotonic_ns());
                    }
                });
            }
        });
        let mut passed = passed.into_inner();
        passed.sort_unstable();
        assert_eq!(passed, (0..300).collect::<Vec<_>>());
    }

    #[test]
    fn a_request_that_waits_for_another_delays_no_third() {
        let request = |arrival_us, after| Request {
            prompt: Vec::new(),
            output: Segment { stream: 0, tokens: 1 },
            arrival_us,
            after,
        };
        let requests = [request(0, None), request(1, Some(0)), request(2, None)];
        let pacer = Pacer::new(&requests);
        assert_eq!([pacer.enter(), pacer.enter()], [Some(0), Some(2)]);
        let later_ns = monotonic_ns() + 20_000_000;
        pacer.leave(0, later_ns);
        assert_eq!(pacer.enter(), Some(1));
        assert!(monotonic_ns() >= later_ns, "a user answers after the last token, by the engine's clock");
        assert_eq!(pacer.enter(), None);
    }

    #[test]
    fn closing_wakes_waiting_threads() {
        let workload = Workload::generate(1, 300);
        let pacer = Pacer::new(&workload.requests);
        std::thread::scope(|scope| {
            let all = scope.spawn(|| std::iter::from_fn(|| pacer.enter()).count());
            pacer.close();
            assert!(all.join().unwrap() < 300, "the second turn of a conversation never comes");
        });
    }
}
