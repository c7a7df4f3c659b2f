//! Who bookings belong to: a gateway, however many connections it has.

use hashbrown::HashMap;

use crate::error::{Error, Kind, Result};
use crate::limits::SESSIONS_MAX;

/// What a gateway's connections show to belong together; drawn by the gateway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SessionToken {
    /// The upper half.
    pub hi: u64,
    /// The lower half.
    pub lo: u64,
}

/// A session of this daemon run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u32);

/// One session: its connections, and the bookings it holds.
#[derive(Debug)]
pub(super) struct Session {
    token: Option<SessionToken>,
    uid: u32,
    connections: u32,
    /// When the last connection went; meaningless while there is one.
    left_at_ns: u64,
    /// Slots of its live bookings; a booking knows its place here.
    pub(super) bookings: Vec<u32>,
    /// How many of them are halves that prefill.
    pub(super) prefill_halves: u32,
}

/// Every session, by id and by token.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    by_id: HashMap<SessionId, Session>,
    by_token: HashMap<SessionToken, SessionId>,
    next: u32,
}

impl Sessions {
    /// Adds a connection of `uid` to the session of `token`, or to a new one.
    ///
    /// # Errors
    /// `NotPermitted` if the token is another user's; `Overloaded` if there are too many sessions.
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
            return Ok(id);
        }
        if self.by_id.len() >= SESSIONS_MAX {
            self.forget_idle();
        }
        if self.by_id.len() >= SESSIONS_MAX {
            return Err(Error::new(
                Kind::Overloaded,
                format!("{SESSIONS_MAX} sessions are open"),
                "share one session token among the connections of a gateway",
            ));
        }
        // After a wrap, a session that has been there ever since keeps its number.
        while self.by_id.contains_key(&SessionId(self.next)) {
            self.next = self.next.wrapping_add(1);
        }
        let id = SessionId(self.next);
        self.next = self.next.wrapping_add(1);
        if let Some(token) = token {
            self.by_token.insert(token, id);
        }
        let session = Session { token, uid, connections: 1, left_at_ns: 0, bookings: Vec::new(), prefill_halves: 0 };
        self.by_id.insert(id, session);
        Ok(id)
    }

    /// Takes a connection away. What nobody can come back to and holds nothing is gone at once, so that
    /// clients that come and go cannot fill the table.
    pub(super) fn close(&mut self, id: SessionId, now_ns: u64) {
        let Some(session) = self.by_id.get_mut(&id) else { return };
        session.connections = session.connections.saturating_sub(1);
        session.left_at_ns = now_ns;
        if session.connections == 0 && session.token.is_none() && session.bookings.is_empty() {
            self.by_id.remove(&id);
        }
    }

    /// Makes room: forgets every session that has neither a connection nor a booking before its grace is over.
    fn forget_idle(&mut self) {
        let by_token = &mut self.by_token;
        self.by_id.retain(|_, session| {
            let idle = session.connections == 0 && session.bookings.is_empty();
            if idle && let Some(token) = session.token {
                by_token.remove(&token);
            }
            !idle
        });
    }

    pub(super) fn get_mut(&mut self, id: SessionId) -> Option<&mut Session> {
        self.by_id.get_mut(&id)
    }

    /// Takes at most `bookings_max` slots of bookings from the sessions whose last connection went `grace_ns`
    /// ago; a session ends with its last one. Nobody comes back to it meanwhile: its token is free at once.
    pub(super) fn end_abandoned(&mut self, now_ns: u64, grace_ns: u64, bookings_max: usize) -> Vec<u32> {
        let (by_token, mut slots) = (&mut self.by_token, Vec::new());
        self.by_id.retain(|_, session| {
            if session.connections > 0 || now_ns.saturating_sub(session.left_at_ns) < grace_ns {
                return true;
            }
            if let Some(token) = session.token.take() {
                by_token.remove(&token);
            }
            let kept = session.bookings.len().saturating_sub(bookings_max - slots.len());
            // From the end: the places of those that stay do not change.
            slots.extend(session.bookings.drain(kept..));
            kept > 0
        });
        slots
    }
}
