//! The owners of bookings: sessions, one for each gateway, and the users of the sessions.

use std::collections::BTreeSet;

use hashbrown::HashMap;

use super::kept::KeptSession;
use crate::error::{Error, Kind, Result};
use crate::limits::{SESSIONS_ENDED_PER_LOCK_MAX, SESSIONS_MAX};
use crate::protocol::SessionToken;
use crate::shares::share;

/// A session of this daemon run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u32);

/// One session: its connections and its bookings, on lines of its own.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Session {
    token: Option<SessionToken>,
    uid: u32,
    /// The slot of its user.
    pub(super) user: UserSlot,
    connections: u32,
    /// When the last connection closed; meaningless while there is one.
    left_at_ns: u64,
    /// Slots of its live bookings; a booking knows its place here.
    pub(super) bookings: Vec<u32>,
    /// Prefill halves among them.
    pub(super) prefill_halves: u32,
}

/// Every session, by id and by token.
#[derive(Debug)]
pub(super) struct Sessions {
    by_id: HashMap<SessionId, Session>,
    by_token: HashMap<SessionToken, SessionId>,
    next: u32,
    /// Sessions without a connection, by the time the last one closed.
    left: BTreeSet<(u64, SessionId)>,
    /// Of these, the ones without a booking.
    idle: BTreeSet<(u64, SessionId)>,
    pub(super) users: UserTable,
    /// Sessions that one user may have.
    user_sessions_max: usize,
}

impl Sessions {
    /// No sessions; one user may have this share of all, in percent.
    pub(super) fn new(user_share_percent: u8) -> Self {
        Self {
            by_id: HashMap::default(),
            by_token: HashMap::default(),
            next: 0,
            left: BTreeSet::new(),
            idle: BTreeSet::new(),
            users: UserTable::default(),
            user_sessions_max: share(user_share_percent, SESSIONS_MAX),
        }
    }

    /// Adds a connection of `uid` to the session of `token`, or to a new one.
    ///
    /// # Errors
    /// `NotPermitted` if the token is another user's; `Overloaded` if there are too many sessions, of this user or of
    /// all.
    pub(super) fn open(&mut self, token: Option<SessionToken>, uid: u32) -> Result<SessionId> {
        if let Some(id) = token.and_then(|token| self.by_token.get(&token).copied())
            && let Some(session) = self.by_id.get_mut(&id)
        {
            if session.uid != uid {
                return Err(Error::new(
                    Kind::NotPermitted,
                    "the session token belongs to another user",
                    "draw a random token for each gateway",
                ));
            }
            session.connections += 1;
            if session.connections == 1 {
                let (at, user) = ((session.left_at_ns, id), session.user);
                self.left.remove(&at);
                self.idle.remove(&at);
                self.users.get_mut(user).idle.remove(&at);
            }
            return Ok(id);
        }
        let user = self.users.place_of(uid);
        if let Err(error) = self.make_room(user) {
            self.users.remove_if_unused(user);
            return Err(error);
        }
        // After a wrap, a session that still lives keeps its number.
        while self.by_id.contains_key(&SessionId(self.next)) {
            self.next = self.next.wrapping_add(1);
        }
        let id = SessionId(self.next);
        self.next = self.next.wrapping_add(1);
        if let Some(token) = token {
            self.by_token.insert(token, id);
        }
        let session =
            Session { token, uid, user, connections: 1, left_at_ns: 0, bookings: Vec::new(), prefill_halves: 0 };
        self.by_id.insert(id, session);
        self.users.get_mut(user).sessions += 1;
        Ok(id)
    }

    /// Takes up a session of an earlier run, without a connection. Its grace begins now. `false` = there is no room,
    /// or another session has its token.
    pub(super) fn restore(&mut self, kept: &KeptSession, now_ns: u64) -> bool {
        let KeptSession { id, token, uid } = *kept;
        if let Some(session) = self.by_id.get(&id) {
            return (session.token, session.uid) == (token, uid);
        }
        if self.by_id.len() >= SESSIONS_MAX || token.is_some_and(|token| self.by_token.contains_key(&token)) {
            return false;
        }
        let user = self.users.place_of(uid);
        self.users.get_mut(user).sessions += 1;
        if let Some(token) = token {
            self.by_token.insert(token, id);
        }
        let session =
            Session { token, uid, user, connections: 0, left_at_ns: now_ns, bookings: Vec::new(), prefill_halves: 0 };
        self.by_id.insert(id, session);
        self.left.insert((now_ns, id));
        self.note_idle(id);
        true
    }

    /// What a restart keeps of a session.
    pub(super) fn kept(&self, id: SessionId) -> Option<KeptSession> {
        self.by_id.get(&id).map(|session| KeptSession { id, token: session.token, uid: session.uid })
    }

    /// The number of the next session.
    pub(super) const fn next(&self) -> u32 {
        self.next
    }

    /// Continues with this number.
    pub(super) const fn continue_from(&mut self, next: u32) {
        self.next = next;
    }

    /// Sessions.
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Makes room for one more session of a user: among sessions without connection and booking, drops the one that was
    /// left first, before its grace is over. Looks at no other session.
    fn make_room(&mut self, user: UserSlot) -> Result<()> {
        if self.users.get(user).sessions >= self.user_sessions_max {
            let oldest = self.users.get(user).idle.first().copied();
            oldest
                .map(|(_, id)| self.remove(id))
                .ok_or_else(|| too_many(format!("{} sessions of this user are open", self.user_sessions_max)))?;
        }
        if self.by_id.len() >= SESSIONS_MAX {
            let oldest = self.idle.first().copied();
            oldest
                .map(|(_, id)| self.remove(id))
                .ok_or_else(|| too_many(format!("{SESSIONS_MAX} sessions are open")))?;
        }
        Ok(())
    }

    /// Removes a connection. A session without token and bookings ends at once, so that clients which come and go
    /// cannot fill the table.
    pub(super) fn close(&mut self, id: SessionId, now_ns: u64) {
        let Some(session) = self.by_id.get_mut(&id) else { return };
        if session.connections == 0 {
            return;
        }
        session.connections -= 1;
        if session.connections > 0 {
            return;
        }
        session.left_at_ns = now_ns;
        let (has_token, is_empty) = (session.token.is_some(), session.bookings.is_empty());
        self.left.insert((now_ns, id));
        if !is_empty {
            return;
        }
        if has_token { self.note_idle(id) } else { self.remove(id) }
    }

    /// Notes that a session without a connection lost its last booking.
    fn note_idle(&mut self, id: SessionId) {
        let Some(session) = self.by_id.get(&id) else { return };
        let (at, user) = ((session.left_at_ns, id), session.user);
        self.idle.insert(at);
        self.users.get_mut(user).idle.insert(at);
    }

    /// Removes a session without bookings.
    fn remove(&mut self, id: SessionId) {
        let Some(session) = self.by_id.remove(&id) else { return };
        let at = (session.left_at_ns, id);
        self.left.remove(&at);
        self.idle.remove(&at);
        if let Some(token) = session.token {
            self.by_token.remove(&token);
        }
        let user = self.users.get_mut(session.user);
        user.idle.remove(&at);
        user.sessions -= 1;
        self.users.remove_if_unused(session.user);
    }

    /// The user of a session; 0 if there is no such session.
    pub(super) fn uid_of(&self, id: SessionId) -> u32 {
        self.by_id.get(&id).map_or(0, |session| session.uid)
    }

    pub(super) fn get_mut(&mut self, id: SessionId) -> Option<&mut Session> {
        self.by_id.get_mut(&id)
    }

    /// Adds a booking to a session's list.
    pub(super) fn add_booking(&mut self, id: SessionId, slot: u32, is_prefill_half: bool) {
        let Some(session) = self.by_id.get_mut(&id) else { return };
        session.bookings.push(slot);
        session.prefill_halves += u32::from(is_prefill_half);
        if session.connections == 0 && session.bookings.len() == 1 {
            let (at, user) = ((session.left_at_ns, id), session.user);
            self.idle.remove(&at);
            self.users.get_mut(user).idle.remove(&at);
        }
    }

    /// Removes the booking at a place of a session's list. Returns the slot of the booking that is there now.
    pub(super) fn take_booking(&mut self, id: SessionId, place: usize, is_prefill_half: bool) -> Option<u32> {
        let session = self.by_id.get_mut(&id)?;
        session.prefill_halves -= u32::from(is_prefill_half);
        // An abandoned session has already released it.
        if place >= session.bookings.len() {
            return None;
        }
        session.bookings.swap_remove(place);
        let moved = session.bookings.get(place).copied();
        if session.connections == 0 && session.bookings.is_empty() {
            self.note_idle(id);
        }
        moved
    }

    /// Takes at most `bookings_max` bookings from the sessions whose last connection closed `grace_ns` ago. A session
    /// ends with its last booking. Its token is free at once, so no gateway can return to it meanwhile.
    pub(super) fn end_abandoned(&mut self, now_ns: u64, grace_ns: u64, bookings_max: usize) -> Vec<u32> {
        let mut slots = Vec::new();
        for _ in 0..SESSIONS_ENDED_PER_LOCK_MAX {
            let Some((left_at_ns, id)) = self.left.first().copied() else { break };
            if now_ns.saturating_sub(left_at_ns) < grace_ns {
                break;
            }
            let Some(session) = self.by_id.get_mut(&id) else { break };
            if let Some(token) = session.token.take() {
                self.by_token.remove(&token);
            }
            let kept = session.bookings.len().saturating_sub(bookings_max - slots.len());
            // From the end, so that the places of the others do not change.
            slots.extend(session.bookings.drain(kept..));
            if kept > 0 {
                break;
            }
            self.remove(id);
        }
        slots
    }
}

fn too_many(what: String) -> Error {
    let remedy = "share one session token among the connections of a gateway, or raise serve.user_share_percent";
    Error::new(Kind::Overloaded, what, remedy)
}

/// The slot of a user with a session or a booking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UserSlot(u32);

/// What one user holds.
#[derive(Debug, Default)]
pub(super) struct User {
    uid: u32,
    pub(super) sessions: usize,
    pub(super) bookings: usize,
    /// Blocks of its prompts in the tree, once for each booking that has them.
    pub(super) prompt_blocks: u64,
    /// Its sessions without connection and booking, by the time they were left.
    pub(super) idle: BTreeSet<(u64, SessionId)>,
}

/// Every user that holds something.
#[derive(Debug, Default)]
pub(super) struct UserTable {
    users: Vec<User>,
    by_uid: HashMap<u32, UserSlot>,
    free: Vec<UserSlot>,
}

impl UserTable {
    /// The slot of a user, who may be new. The caller then gives the user something, or calls
    /// [`UserTable::remove_if_unused`].
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

    /// Whether any other user holds something.
    pub(super) fn has_others(&self, uid: u32) -> bool {
        self.by_uid.len() > usize::from(self.by_uid.contains_key(&uid))
    }

    pub(super) fn get(&self, place: UserSlot) -> &User {
        &self.users[place.0 as usize]
    }

    pub(super) fn get_mut(&mut self, place: UserSlot) -> &mut User {
        &mut self.users[place.0 as usize]
    }

    /// Removes a user that holds nothing.
    pub(super) fn remove_if_unused(&mut self, place: UserSlot) {
        let user = &self.users[place.0 as usize];
        if user.sessions == 0 && user.bookings == 0 {
            self.by_uid.remove(&user.uid);
            self.free.push(place);
        }
    }
}
