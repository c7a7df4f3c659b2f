//! Picks whose end has not come. No I/O, and time is an argument.

use std::collections::HashMap;
use std::time::Instant;

use kvrouted::ids::Worker;

use super::choose::{Booking, Observer};
use crate::engines::InflightGuard;
use crate::limits::PICK_EARLY_END_MAX;

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
    picks_max: usize,
}

impl OpenPicks {
    pub(super) fn new(picks_max: usize) -> Self {
        Self { picks: HashMap::new(), early_ends: HashMap::new(), picks_max }
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

    /// Takes a pick out.
    pub(super) fn end(&mut self, id: &str, now: Instant) -> Option<OpenPick> {
        let pick = self.picks.remove(id);
        if pick.is_none() && self.early_ends.len() < self.picks_max {
            self.early_ends.insert(id.to_owned(), now + PICK_EARLY_END_MAX);
        }
        pick
    }

    pub(super) fn get_mut(&mut self, id: &str) -> Option<&mut OpenPick> {
        self.picks.get_mut(id)
    }

    /// Frees the picks whose time is over, and counts them.
    pub(super) fn expire(&mut self, now: Instant) -> usize {
        let before = self.picks.len();
        self.early_ends.retain(|_, until| *until > now);
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
        picks.end("e", start);
        picks.expire(start + PICK_EARLY_END_MAX);
        picks.insert("e".into(), pick(10));
        assert_eq!(picks.len(), 1);
    }
}
