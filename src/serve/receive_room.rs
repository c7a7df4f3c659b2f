//! What the receive buffers of a core's connections may take together, beyond what each has anyway. One frame is bounded
//! by its length; a flood of connections with a large frame each, none of which ever ends, is bounded here, and what one
//! user's of them may take.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::limits::CORE_RECEIVE_BYTES_MAX;
use crate::metrics::{CoreCounter, CounterSet};
use crate::shares::share;

/// The room that is left.
#[derive(Debug)]
pub struct ReceiveRoom {
    /// All of it.
    bytes: usize,
    left_bytes: Cell<usize>,
    /// What the connections of one user may take.
    user_bytes_max: usize,
    /// What those of each user have taken; only of those that have.
    users: RefCell<FxHashMap<u32, usize>>,
    /// Whose refusals are counted.
    counters: Option<Arc<CounterSet<CoreCounter>>>,
}

/// Why there is no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoRoom {
    /// The frames of all take it.
    All,
    /// Those of the same user take as much of it as they may.
    User,
}

impl Default for ReceiveRoom {
    /// Room that does not end, for one connection by itself.
    fn default() -> Self {
        let (bytes, users) = (usize::MAX, RefCell::default());
        Self { bytes, left_bytes: Cell::new(bytes), user_bytes_max: bytes, users, counters: None }
    }
}

impl ReceiveRoom {
    /// Room for the connections of one core, for at least one frame of the largest size, of which one user may have so many
    /// percent, and at least such a frame; what is refused is counted.
    #[must_use]
    pub fn new(frame_body_bytes_max: u32, user_share_percent: u8, counters: Arc<CounterSet<CoreCounter>>) -> Self {
        // Beside a frame's body there are its header and what the next read is given.
        let frame_bytes = 2 * frame_body_bytes_max as usize;
        let bytes = CORE_RECEIVE_BYTES_MAX.max(frame_bytes);
        let user_bytes_max = share(user_share_percent, bytes).max(frame_bytes);
        Self {
            bytes,
            left_bytes: Cell::new(bytes),
            user_bytes_max,
            users: RefCell::default(),
            counters: Some(counters),
        }
    }

    fn refusal(&self, uid: u32, bytes: usize) -> Option<NoRoom> {
        if self.left_bytes.get() < bytes {
            return Some(NoRoom::All);
        }
        let held = self.users.borrow().get(&uid).copied().unwrap_or_default();
        (bytes > self.user_bytes_max - held).then_some(NoRoom::User)
    }

    /// Whether so many bytes are left for a user, for what can go without.
    pub(super) fn has(&self, uid: u32, bytes: usize) -> bool {
        self.refusal(uid, bytes).is_none()
    }

    /// Whether so much is left, for all and for a user, that idle connections of that user may keep what they have for
    /// their next large frame.
    pub(super) fn is_ample(&self, uid: u32) -> bool {
        let held = self.users.borrow().get(&uid).copied().unwrap_or_default();
        self.left_bytes.get() >= self.bytes / 2 && held <= self.user_bytes_max / 2
    }

    /// Takes so many bytes of it for a user, if they are there.
    ///
    /// # Errors
    /// Who takes what is missing.
    pub(super) fn take(&self, uid: u32, bytes: usize) -> Result<(), NoRoom> {
        if let Some(refusal) = self.refusal(uid, bytes) {
            if let Some(counters) = &self.counters {
                counters.bump(match refusal {
                    NoRoom::All => CoreCounter::FramesNoRoom,
                    NoRoom::User => CoreCounter::FramesNoRoomUser,
                });
            }
            return Err(refusal);
        }
        if bytes > 0 {
            self.left_bytes.set(self.left_bytes.get() - bytes);
            *self.users.borrow_mut().entry(uid).or_default() += bytes;
        }
        Ok(())
    }

    /// Gives so many bytes back that a user had taken.
    pub(super) fn give_back(&self, uid: u32, bytes: usize) {
        if bytes == 0 {
            return;
        }
        self.left_bytes.set(self.left_bytes.get().saturating_add(bytes));
        let mut users = self.users.borrow_mut();
        if let Some(held) = users.get_mut(&uid) {
            *held = held.saturating_sub(bytes);
            if *held == 0 {
                users.remove(&uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: usize = CORE_RECEIVE_BYTES_MAX;

    #[test]
    fn what_is_not_there_is_not_given_and_is_counted() {
        let counters: Arc<CounterSet<CoreCounter>> = Arc::default();
        let room = ReceiveRoom::new(8, 100, Arc::clone(&counters));
        assert_eq!([room.take(1, ALL - 1), room.take(2, 1)], [Ok(()); 2]);
        assert_eq!([room.take(1, 1), room.take(1, 0)], [Err(NoRoom::All), Ok(())]);
        assert_eq!(counters.get(CoreCounter::FramesNoRoom), 1);
        room.give_back(1, 5);
        assert_eq!([room.take(3, 5), room.take(3, 1)], [Ok(()), Err(NoRoom::All)]);
        let room = ReceiveRoom::new(u32::MAX, 1, counters);
        assert_eq!(room.take(1, u32::MAX as usize), Ok(()), "one largest frame always fits");
    }

    #[test]
    fn one_user_leaves_room_for_others() {
        let counters: Arc<CounterSet<CoreCounter>> = Arc::default();
        let room = ReceiveRoom::new(8, 75, Arc::clone(&counters));
        assert_eq!(room.take(1, ALL / 4 * 3), Ok(()));
        assert_eq!((room.take(1, 1), room.has(1, 1), room.has(2, 1)), (Err(NoRoom::User), false, true));
        assert_eq!([room.take(2, ALL / 4), room.take(2, 1)], [Ok(()), Err(NoRoom::All)]);
        let refused = [CoreCounter::FramesNoRoomUser, CoreCounter::FramesNoRoom].map(|counter| counters.get(counter));
        assert_eq!(refused, [1, 1]);
        room.give_back(1, ALL / 4 * 3);
        assert_eq!(room.take(1, ALL / 2), Ok(()));
        assert_eq!([room.is_ample(1), room.is_ample(3)], [false; 2], "little is left for anybody");
        room.give_back(2, ALL / 4);
        assert_eq!([room.is_ample(1), room.is_ample(3)], [false, true], "this user has most of what it may have");
        room.give_back(1, ALL / 2);
        assert!(room.users.borrow().is_empty(), "nothing is remembered of those who have nothing");
    }
}
