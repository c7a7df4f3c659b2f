//! Starts requests in the workload's order, none before its arrival and none before the request it continues is
//! complete.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::super::workload::Request;

/// Time from creating a pacer to the first arrival, so that starting the threads delays no request.
const HEAD_START: Duration = Duration::from_millis(100);

/// The order of a workload, shared by the threads that run it.
pub(super) struct Pacer<'a> {
    requests: &'a [Request],
    opened: Instant,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    next: usize,
    complete: Vec<bool>,
    complete_count: usize,
    closed: bool,
}

impl<'a> Pacer<'a> {
    /// No request has started; the clock of arrivals starts after [`HEAD_START`].
    pub(super) fn new(requests: &'a [Request]) -> Self {
        let state = State { next: 0, complete: vec![false; requests.len()], complete_count: 0, closed: false };
        Self { requests, opened: Instant::now() + HEAD_START, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Waits for the next request and returns it; `None` if there are no more, or after a failure.
    pub(super) fn enter(&self) -> Option<usize> {
        let index = self.take()?;
        let arrival = self.opened + Duration::from_micros(self.requests[index].arrival_us);
        // Without the lock, so that other threads need not wait for this arrival.
        std::thread::sleep(arrival.saturating_duration_since(Instant::now()));
        Some(index)
    }

    fn take(&self) -> Option<usize> {
        let mut state = self.state.lock();
        loop {
            let request = self.requests.get(state.next).filter(|_| !state.closed)?;
            if request.after.is_none_or(|before| state.complete[before]) {
                state.next += 1;
                self.wake(&state);
                return Some(state.next - 1);
            }
            self.changed.wait(&mut state);
        }
    }

    /// Wakes a thread that can go on. All wait for the same request, so one thread is woken for it, and wakes one for
    /// the next. Waking all of them each time would take processor time from daemon and engines.
    fn wake(&self, state: &State) {
        match self.requests.get(state.next) {
            None => {
                self.changed.notify_all();
            }
            Some(next) if next.after.is_none_or(|before| state.complete[before]) => {
                self.changed.notify_one();
            }
            Some(_) => {}
        }
    }

    /// Notes that a request is complete. Returns the number of complete requests.
    pub(super) fn leave(&self, index: usize) -> usize {
        let mut state = self.state.lock();
        state.complete[index] = true;
        state.complete_count += 1;
        self.wake(&state);
        state.complete_count
    }

    /// Starts no more requests.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::workload::Workload;
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
                        pacer.leave(index);
                    }
                });
            }
        });
        let mut passed = passed.into_inner();
        passed.sort_unstable();
        assert_eq!(passed, (0..300).collect::<Vec<_>>());
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
