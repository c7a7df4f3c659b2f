//! A queued request and freed capacity do not miss each other, whichever comes first.
//!
//! | tag | one side | the other side |
//! |---|---|---|
//! | ROOM | a request enters the queue, SeqCst fence, its workers' loads are read | a load changes, SeqCst fence, the number of queued requests is read |
//! | NOTIFIED | something changes, `under_way` to true, Release | `under_way` to false, Acquire, the change is read |

use crate::sync::{AtomicBool, AtomicUsize, Ordering, fence};

/// How many requests wait, readable without the queue's lock.
#[derive(Debug, Default)]
pub(super) struct WaitFlag(AtomicUsize);

impl WaitFlag {
    /// Publishes the length of the queue. The caller holds the queue's lock, and may read loads afterwards.
    pub(super) fn set(&self, waiting: usize) {
        self.0.store(waiting, Ordering::Relaxed);
        // SeqCst fence: ROOM, between the change of the queue and the reads of loads.
        fence(Ordering::SeqCst);
    }

    /// Whether any request waits; for a thread that has just changed a load.
    pub(super) fn is_any(&self) -> bool {
        // SeqCst fence: ROOM, between the load's change and the read of the queue's length.
        fence(Ordering::SeqCst);
        self.count() > 0
    }

    /// How many requests wait; for threads that have changed no load.
    pub(super) fn count(&self) -> usize {
        // Relaxed: it orders nothing.
        self.0.load(Ordering::Relaxed)
    }
}

/// A message that is under way at most once.
#[derive(Debug, Default)]
pub(super) struct Notification(AtomicBool);

impl Notification {
    /// Whether the caller is to send the message: it is not under way.
    pub(super) fn send(&self) -> bool {
        // NOTIFIED. Release: the receiver sees what the caller changed before.
        !self.0.swap(true, Ordering::Release)
    }

    /// The message has arrived.
    pub(super) fn take(&self) {
        // Acquire: pairs with NOTIFIED. A thread that found the message under way, and so sent none, made its change
        // before this point; the receiver's reads come after. A plain store would not do: those reads could come first.
        self.0.swap(false, Ordering::Acquire);
    }
}

/// Every order of accesses that the memory model allows, tried by the model checker:
/// `RUSTFLAGS="--cfg kvrouted_loom" cargo test --lib --release requests::wait_flag`
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

    /// One thread queues a request while another frees capacity. `is_fenced`: the second thread uses the fence.
    fn missed_each_other(is_fenced: bool) {
        ::loom::model(move || {
            let model = Arc::new(Model::default());
            // Relaxed here and below: a load's own orderings pair with its readers', and with nothing of the queue.
            model.busy.store(1, Ordering::Relaxed);
            let frees = Arc::clone(&model);
            let maker = ::loom::thread::spawn(move || {
                frees.busy.store(0, Ordering::Relaxed);
                if is_fenced { frees.waiting.is_any() } else { frees.waiting.count() > 0 }
            });
            model.waiting.set(1);
            let sees_room = model.busy.load(Ordering::Relaxed) == 0;
            let is_seen = maker.join().expect("it ended");
            assert!(sees_room || is_seen, "a wake-up is lost");
        });
    }

    #[test]
    fn a_queued_request_sees_the_capacity_or_is_seen() {
        missed_each_other(true);
    }

    #[test]
    #[should_panic(expected = "a wake-up is lost")]
    fn without_a_fence_they_miss_each_other() {
        missed_each_other(false);
    }

    /// One thread sends a message while the other takes the one before.
    #[test]
    fn a_change_whose_message_was_not_sent_is_seen() {
        ::loom::model(|| {
            let (message, change) = (Arc::new(Notification::default()), Arc::new(AtomicU64::new(0)));
            assert!(message.send());
            let (of_other, changed) = (Arc::clone(&message), Arc::clone(&change));
            let other = ::loom::thread::spawn(move || {
                changed.store(1, Ordering::Relaxed);
                of_other.send()
            });
            message.take();
            let seen = change.load(Ordering::Relaxed) == 1;
            assert!(other.join().expect("it ended") || seen, "a message is lost");
        });
    }
}
