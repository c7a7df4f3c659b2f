//! What each user has of the sessions, the bookings and the memory of their prompts.

use std::collections::BTreeSet;

use hashbrown::HashMap;

use super::session::SessionId;

/// Where a user is kept, while it has a session or a booking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UserSlot(u32);

/// What one user has.
#[derive(Debug, Default)]
pub(super) struct User {
    uid: u32,
    pub(super) sessions: usize,
    pub(super) bookings: usize,
    /// Prompt blocks of its bookings that are in the tree of prompts, each time that a booking has one.
    pub(super) prompt_blocks: u64,
    /// Its sessions that have neither a connection nor a booking, by when they were left.
    pub(super) idle: BTreeSet<(u64, SessionId)>,
}

/// Every user who has something.
#[derive(Debug, Default)]
pub(super) struct UserTable {
    users: Vec<User>,
    by_uid: HashMap<u32, UserSlot>,
    free: Vec<UserSlot>,
}

impl UserTable {
    /// The place of a user, who may have had nothing so far. Whoever asks gives it something, or calls [`UserTable::remove_if_unused`].
    pub(super) fn place_of(&mut self, uid: u32) -> UserSlot {
        if let Some(place) = self.by_uid.get(&uid) {
            return *place;
        }
        let user = User { uid, ..User::default() };
        let place = if let Some(place) = self.free.pop() {
            self.users[place.0 as usize] = user;
            place
        } else {
            self.users.push(user);
            UserSlot(self.users.len() as u32 - 1)
        };
        self.by_uid.insert(uid, place);
        place
    }

    /// Whether any user but this one has something.
    pub(super) fn has_others(&self, uid: u32) -> bool {
        self.by_uid.len() > usize::from(self.by_uid.contains_key(&uid))
    }

    pub(super) fn get(&self, place: UserSlot) -> &User {
        &self.users[place.0 as usize]
    }

    pub(super) fn get_mut(&mut self, place: UserSlot) -> &mut User {
        &mut self.users[place.0 as usize]
    }

    /// Forgets a user who has nothing any more.
    pub(super) fn remove_if_unused(&mut self, place: UserSlot) {
        let user = &self.users[place.0 as usize];
        if user.sessions == 0 && user.bookings == 0 {
            self.by_uid.remove(&user.uid);
            self.free.push(place);
        }
    }
}
