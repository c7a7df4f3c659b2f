//! Lock-free words by which a request that begins to wait and a thread that makes room do not miss each other.
//!
//! | tag | one side | the other side |
//! |---|---|---|
//! | ROOM | a request enters the queue, a SeqCst fence, its thread reads the loads | a thread changes a load, a SeqCst fence, it reads the number of waiting requests |
//! | NOTIFIED | a thread changes something, then sets the flag, Release | the receiver clears the flag, Acquire, then reads the change |

use crate::sync::{AtomicBool, AtomicUsize, Ordering, fence};

/// The number of waiting requests, readable without the queue's lock.
#[derive(Debug, Default)]
pub(super) struct WaitFlag(AtomicUsize);

impl WaitFlag {
    /// Sets the number of waiting requests. The caller holds the queue's lock, and may read loads afterwards.
    pub(super) fn set(&self, waiting: usize) {
        self.0.store(waiting, Ordering::Relaxed);
        // SeqCst fence: ROOM, between the change of the queue and the read of the loads.
        fence(Ordering::SeqCst);
    }

    /// Whether a request waits. For a thread that has just changed a load.
    pub(super) fn is_set(&self) -> bool {
        // SeqCst fence: ROOM, between the change of the load and the read of the number.
        fence(Ordering::SeqCst);
        self.count() > 0
    }

    /// The number of waiting requests. For callers that have changed no load.
    pub(super) fn count(&self) -> usize {
        // Relaxed: it orders nothing.
        self.0.load(Ordering::Relaxed)
    }
}

/// A notification that is in flight at most once.
#[derive(Debug, Default)]
pub(super) struct Notification(AtomicBool);

impl Notification {
    /// Marks the notification as in flight. `true` = it was not, and the caller sends it.
    pub(super) fn raise(&self) -> bool {
        // NOTIFIED. Release: `clear` sees what the caller has changed.
        !self.0.swap(true, Ordering::Release)
    }

    /// Marks the notification as received.
    pub(super) fn clear(&self) {
        // Acquire: pairs with NOTIFIED. A thread that found the notification in flight, and so sent none, made its
        // change before all that the receiver reads from now on. A plain store would not do: those reads could be
        // ordered before it.
        self.0.swap(false, Ordering::Acquire);
    }
}

/// Every order of accesses that the memory model allows, tried by the model checker:
/// `RUSTFLAGS="--cfg kvrouted_loom" cargo test --lib --release serve::wait_flag`
#[cfg(all(test, kvrouted_loom))]
mod loom {
    use std::sync::Arc;

    use super::*;
    use crate::sync::AtomicU64;

    /// A load, and the requests that wait for it to fall.
    #[derive(Default)]
    struct Model {
        busy: AtomicU64,
        waiting: WaitFlag,
    }

    /// One thread begins to wait while another makes room. `is_fenced`: the second thread calls `is_set`.
    fn missed_each_other(is_fenced: bool) {
        ::loom::model(move || {
            let model = Arc::new(Model::default());
            // Relaxed here and below: a load's own orders pair with its readers', and with nothing of the queue.
            model.busy.store(1, Ordering::Relaxed);
            let frees = Arc::clone(&model);
            let maker = ::loom::thread::spawn(move || {
                frees.busy.store(0, Ordering::Relaxed);
                if is_fenced { frees.waiting.is_set() } else { frees.waiting.count() > 0 }
            });
            model.waiting.set(1);
            let sees_room = model.busy.load(Ordering::Relaxed) == 0;
            let is_seen = maker.join().expect("it ended");
            assert!(sees_room || is_seen, "a wake-up is lost");
        });
    }

    #[test]
    fn a_waiting_request_sees_the_room_or_is_seen() {
        missed_each_other(true);
    }

    #[test]
    #[should_panic(expected = "a wake-up is lost")]
    fn without_a_fence_the_wake_up_is_lost() {
        missed_each_other(false);
    }

    /// One thread raises the notification while another clears it.
    #[test]
    fn a_change_without_a_second_notification_is_seen() {
        ::loom::model(|| {
            let (notification, change) = (Arc::new(Notification::default()), Arc::new(AtomicU64::new(0)));
            assert!(notification.raise());
            let (of_other, changed) = (Arc::clone(&notification), Arc::clone(&change));
            let other = ::loom::thread::spawn(move || {
                changed.store(1, Ordering::Relaxed);
                of_other.raise()
            });
            notification.clear();
            let seen = change.load(Ordering::Relaxed) == 1;
            assert!(other.join().expect("it ended") || seen, "a notification is lost");
        });
    }
}
