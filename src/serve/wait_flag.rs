//! How who begins to wait and who makes room do not miss each other, whichever comes first.
//!
//! | tag | one side | the other side |
//! |---|---|---|
//! | ROOM | who waits is put into the queue, a SeqCst fence, the loads are looked at | a load changes, a SeqCst fence, it is looked whether anybody waits |
//! | TOLD | something changes, `told` to true, Release | `told` to false, Acquire, what has changed is looked at |

use crate::sync::{AtomicBool, AtomicUsize, Ordering, fence};

/// How many wait, to be looked at without the queue's lock.
#[derive(Debug, Default)]
pub(super) struct Awaited(AtomicUsize);

impl Awaited {
    /// So many wait from now on. The caller has the queue's lock, and may look at loads after.
    pub(super) fn set(&self, waiting: usize) {
        self.0.store(waiting, Ordering::Relaxed);
        // SeqCst fence: ROOM, between the change of the queue and the look at loads.
        fence(Ordering::SeqCst);
    }

    /// Whether anybody waits, asked by whoever has just changed a load.
    pub(super) fn is_any(&self) -> bool {
        // SeqCst fence: ROOM, between the load's change and the look at who waits.
        fence(Ordering::SeqCst);
        self.count() > 0
    }

    /// How many wait, for those who have changed nothing.
    pub(super) fn count(&self) -> usize {
        // Relaxed: it orders nothing.
        self.0.load(Ordering::Relaxed)
    }
}

/// A message that is under way at most once.
#[derive(Debug, Default)]
pub(super) struct Told(AtomicBool);

impl Told {
    /// It is to be sent, as it is not under way.
    pub(super) fn tell(&self) -> bool {
        // TOLD. Release: what the caller has changed is seen by who takes it back.
        !self.0.swap(true, Ordering::Release)
    }

    /// It has come.
    pub(super) fn take(&self) {
        // Acquire: pairs with TOLD. Whoever found it under way, and so sent nothing, had changed before what is looked
        // at after this. A store alone would not do: the looks could come before it.
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

    /// A load, and who waits for it to fall.
    #[derive(Default)]
    struct Room {
        busy: AtomicU64,
        awaited: Awaited,
    }

    /// One begins to wait while another makes room. `is_fenced`: the one who makes room asks as it should.
    fn missed_each_other(is_fenced: bool) {
        ::loom::model(move || {
            let room = Arc::new(Room::default());
            // Relaxed here and below: a load's own orders pair with its readers', and with nothing of the queue.
            room.busy.store(1, Ordering::Relaxed);
            let frees = Arc::clone(&room);
            let maker = ::loom::thread::spawn(move || {
                frees.busy.store(0, Ordering::Relaxed);
                if is_fenced { frees.awaited.is_any() } else { frees.awaited.count() > 0 }
            });
            room.awaited.set(1);
            let sees_room = room.busy.load(Ordering::Relaxed) == 0;
            let is_seen = maker.join().expect("it ended");
            assert!(sees_room || is_seen, "a wake-up is lost");
        });
    }

    #[test]
    fn who_waits_sees_the_room_or_is_seen() {
        missed_each_other(true);
    }

    #[test]
    #[should_panic(expected = "a wake-up is lost")]
    fn without_a_fence_they_miss_each_other() {
        missed_each_other(false);
    }

    /// One is told while it takes what it was told before.
    #[test]
    fn what_was_not_sent_again_is_seen() {
        ::loom::model(|| {
            let (told, change) = (Arc::new(Told::default()), Arc::new(AtomicU64::new(0)));
            assert!(told.tell());
            let (of_other, changed) = (Arc::clone(&told), Arc::clone(&change));
            let other = ::loom::thread::spawn(move || {
                changed.store(1, Ordering::Relaxed);
                of_other.tell()
            });
            told.take();
            let seen = change.load(Ordering::Relaxed) == 1;
            assert!(other.join().expect("it ended") || seen, "a message is lost");
        });
    }
}
