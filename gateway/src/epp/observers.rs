//! Leases of requests whose own stream ends before their response does.
//!
//! Where the picker's filter looks at no part of the response's body, Envoy 1.37 and later end its stream at the
//! response's headers, and the picker's death harms no answer. The end of the answer is then heard on a second stream,
//! of a filter in `observability_mode`. The two are joined by `x-request-id`: the first stream hands its lease over to
//! the second.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::limits::EPP_OBSERVERS_MAX;

type Slot<L> = Arc<Mutex<Option<L>>>;

/// The streams that observe, by request id.
#[derive(Debug)]
pub(super) struct Observers<L>(Mutex<HashMap<String, Slot<L>>>);

/// One stream that observes.
#[derive(Debug)]
pub(super) struct Observer<L> {
    observers: Arc<Observers<L>>,
    id: String,
    slot: Slot<L>,
}

impl<L> Observers<L> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(HashMap::new()))
    }

    /// Begins to observe a request; `None` if another stream does, or if there are too many.
    pub(super) fn register(self: &Arc<Self>, id: String) -> Option<Observer<L>> {
        let mut slots = self.0.lock();
        if slots.len() >= EPP_OBSERVERS_MAX {
            return None;
        }
        let Entry::Vacant(vacant) = slots.entry(id.clone()) else { return None };
        let slot = Arc::clone(vacant.insert(Arc::default()));
        Some(Observer { observers: Arc::clone(self), id, slot })
    }

    /// Gives a lease to the stream that observes its request; `Err` returns it if there is none, or if that stream has
    /// one.
    pub(super) fn hand_over(&self, id: &str, lease: L) -> Result<(), L> {
        let slots = self.0.lock(); // held, so that the observer cannot end between the look-up and the gift
        let Some(slot) = slots.get(id) else { return Err(lease) };
        let mut held = slot.lock();
        if held.is_some() {
            return Err(lease);
        }
        *held = Some(lease);
        Ok(())
    }
}

impl<L> Observer<L> {
    /// Does something with the lease, if it has been handed over.
    pub(super) fn with(&self, act: impl FnOnce(&mut L)) {
        if let Some(lease) = self.slot.lock().as_mut() {
            act(lease);
        }
    }

    /// Takes the lease, if it has been handed over. Nothing can be handed over after this.
    pub(super) fn end(self) -> Option<L> {
        self.observers.0.lock().remove(&self.id);
        self.slot.lock().take()
    }
}

impl<L> Drop for Observer<L> {
    fn drop(&mut self) {
        let mut slots = self.observers.0.lock();
        if slots.get(&self.id).is_some_and(|slot| Arc::ptr_eq(slot, &self.slot)) {
            slots.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_goes_to_the_stream_that_observes_its_request() {
        let observers = Arc::new(Observers::new());
        let observer = observers.register("a".into()).expect("nobody observes a");
        assert_eq!(observers.hand_over("b", 1), Err(1), "nobody observes b");
        assert_eq!(observers.hand_over("a", 2), Ok(()));
        assert_eq!(observers.hand_over("a", 3), Err(3), "a has its lease");
        observer.with(|lease| *lease += 5);
        assert_eq!(observer.end(), Some(7));
        assert_eq!(observers.hand_over("a", 4), Err(4), "the observer has ended");
    }

    #[test]
    fn two_streams_cannot_observe_one_id_and_the_first_one_stays() {
        let observers = Arc::new(Observers::new());
        let first = observers.register("a".into()).expect("nobody observes a");
        assert!(observers.register("a".into()).is_none());
        assert_eq!(observers.hand_over("a", 1), Ok(()));
        drop(first);
        assert!(observers.register("a".into()).is_some(), "an observer that ends makes room");
    }
}
