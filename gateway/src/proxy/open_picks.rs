//! Picks whose end has not come. No I/O, and time is an argument.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use kvrouted::ids::Worker;

use super::choose::{Booking, Observer};
use crate::engines::InflightGuard;
use crate::limits::{PICK_EARLY_END_MAX, REQUEST_ID_BYTES_MAX};

/// A pick that another proxy runs.
pub(super) struct OpenPick {
    /// Freed when the pick is dropped.
    pub(super) booking: Option<Box<dyn Booking>>,
    pub(super) observer: Option<Observer>,
    /// The worker that runs it, as far as is known.
    pub(super) worker: Worker,
    /// Counts it at that worker's engine.
    pub(super) in_flight: Option<InflightGuard>,
    /// All workers of the list.
    pub(super) candidates: Vec<Worker>,
    /// The base model, for reports of failure.
    pub(super) model: String,
    /// When it is freed without its end.
    pub(super) expires: Instant,
}

/// All open picks, by their request's id.
pub(super) struct OpenPicks {
    picks: HashMap<String, OpenPick>,
    /// Ends that found no pick, and until when they are remembered.
    early_ends: HashMap<String, Instant>,
    /// Their ids as they came.
    early_order: VecDeque<String>,
    picks_max: usize,
}

impl OpenPicks {
    pub(super) fn new(picks_max: usize) -> Self {
        Self { picks: HashMap::new(), early_ends: HashMap::new(), early_order: VecDeque::new(), picks_max }
    }

    pub(super) fn is_full(&self) -> bool {
        self.picks.len() >= self.picks_max
    }

    /// Adds a pick. One with the same id ends: it was a former attempt of the request. A pick whose end has come
    /// already is not added: its caller hung up while it was decided.
    pub(super) fn insert(&mut self, id: String, pick: OpenPick) {
        if self.early_ends.remove(&id).is_none() {
            self.picks.insert(id, pick);
        }
    }

    /// Takes a pick out. Of many ends that found none, the oldest are forgotten: a proxy may tell the ends of requests that
    /// it never asked about.
    pub(super) fn end(&mut self, id: &str, now: Instant) -> Option<OpenPick> {
        let pick = self.picks.remove(id);
        // No pick has a longer id.
        if pick.is_none() && id.len() <= REQUEST_ID_BYTES_MAX {
            if self.early_order.len() >= self.picks_max
                && let Some(oldest) = self.early_order.pop_front()
            {
                self.early_ends.remove(&oldest);
            }
            self.early_ends.insert(id.to_owned(), now + PICK_EARLY_END_MAX);
            self.early_order.push_back(id.to_owned());
        }
        pick
    }

    pub(super) fn get_mut(&mut self, id: &str) -> Option<&mut OpenPick> {
        self.picks.get_mut(id)
    }

    /// Frees the picks whose time is over, and counts them.
    pub(super) fn expire(&mut self, now: Instant) -> usize {
        let before = self.picks.len();
        let is_over = |until: Option<&Instant>| until.is_none_or(|until| *until <= now);
        while let Some(oldest) = self.early_order.pop_front_if(|id| is_over(self.early_ends.get(id))) {
            self.early_ends.remove(&oldest);
        }
        self.picks.retain(|_, pick| pick.expires > now);
        before - self.picks.len()
    }

    pub(super) fn len(&self) -> usize {
        self.picks.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    struct Counting(Arc<AtomicUsize>);

    impl Booking for Counting {
        fn prefill_complete(&mut self) {}
        fn output_progress(&mut self, _: u32) {}
        fn served(&mut self, _: Worker) {}
    }

    impl Drop for Counting {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_pick_is_freed_by_its_end_its_successor_or_its_time() {
        let freed = Arc::new(AtomicUsize::new(0));
        let start = Instant::now();
        let pick = |seconds| OpenPick {
            booking: Some(Box::new(Counting(Arc::clone(&freed)))),
            observer: None,
            worker: Worker::new(1, 0),
            in_flight: None,
            candidates: Vec::new(),
            model: String::new(),
            expires: start + Duration::from_secs(seconds),
        };
        let mut picks = OpenPicks::new(2);
        picks.insert("a".into(), pick(10));
        picks.insert("a".into(), pick(10));
        assert_eq!(freed.load(Ordering::Relaxed), 1);
        picks.insert("b".into(), pick(20));
        assert!(picks.is_full());
        assert!(picks.end("c", start).is_none());
        assert!(picks.end("a", start).is_some());
        assert_eq!(freed.load(Ordering::Relaxed), 2);
        assert_eq!(picks.expire(start + Duration::from_secs(19)), 0);
        assert_eq!(picks.expire(start + Duration::from_secs(20)), 1);
        assert_eq!((freed.load(Ordering::Relaxed), picks.len()), (3, 0));
        // An end that overtakes its pick, and one that is forgotten.
        picks.end("d", start);
        picks.insert("d".into(), pick(10));
        assert_eq!((freed.load(Ordering::Relaxed), picks.len()), (4, 0));
        // Many ends of requests that were never picked hide none that comes after them.
        for other in 0..10 {
            picks.end(&format!("other {other}"), start);
        }
        picks.end("f", start);
        picks.insert("f".into(), pick(10));
        assert_eq!((freed.load(Ordering::Relaxed), picks.len()), (5, 0));
        assert!(picks.early_order.len() <= 2 && picks.early_ends.len() <= 2);
        picks.end("e", start);
        picks.expire(start + PICK_EARLY_END_MAX);
        assert!(picks.early_order.is_empty() && picks.early_ends.is_empty());
        picks.insert("e".into(), pick(10));
        assert_eq!(picks.len(), 1);
    }
}
