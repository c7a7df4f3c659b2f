//! The lanes of a core from their beginning to their end.
//!
//! A lane is driven as a socket is, by a task of its own, under a number of its own: replies that come late and watches
//! find it as they find any connection. It ends before its connection does, whose session it uses: whatever ends the
//! connection ends the lane first. What ends the lane alone (a fault, an untrusted header, replies left unread) ends the
//! connection after it; but a gateway that merely lets go of the bell goes on by its socket.

use std::cell::{Cell, RefCell};
use std::net::Shutdown;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;

use super::carrier::Carrier;
use super::opening::NewLane;
use super::stream::{LaneStream, Why};
use crate::metrics::{CounterName, LaneCounter};
use crate::serve::connection::Connection;
use crate::serve::core::{Link, Shared};
use crate::serve::engine::{Ended, Stream, drive};
use crate::serve::looks::Looker;
use crate::serve::service::Service;

/// Begins to serve every lane of a core that is opened, for ever.
pub(in crate::serve) async fn attend<T: Stream, S: Service + 'static>(core: Rc<Shared<T, S>>) {
    let opened = Arc::clone(&core.responder.borrow().lanes.opened);
    loop {
        opened.notified().await;
        loop {
            let Some(lane) = core.responder.borrow_mut().lanes.new.pop_front() else { break };
            begin(&core, lane);
        }
    }
}

fn begin<T: Stream, S: Service + 'static>(core: &Rc<Shared<T, S>>, lane: NewLane) {
    let NewLane { owner, end, bell } = lane;
    let (uid, owner_id) = (owner.uid, owner.connection);
    let terms = Arc::clone(&core.responder.borrow().lanes.terms);
    let id = core.take_id();
    let stream = match LaneStream::new(end, bell, Looker::new(&core.looks, id), &terms) {
        Ok(stream) => stream,
        Err(error) => {
            terms.counters().bump(LaneCounter::RefusedSystem);
            tracing::warn!(core = core.options.index, uid, %error, "a lane cannot be taken over; its connection is closed");
            core.responder.borrow_mut().lanes.by_owner.remove(&owner_id);
            return core.cut(owner_id);
        }
    };
    core.responder.borrow_mut().lanes.by_owner.insert(owner_id, Some(id));
    let connection =
        RefCell::new(Connection::of_lane(&owner, id, core.options.frame_body_bytes_max).within(&core.receive_room));
    let owed = connection.borrow().owed();
    let link = Rc::new(Link::new(Carrier::Lane(Box::new(stream)), owed));
    core.open.borrow_mut().insert(id, Rc::clone(&link));
    let open = OpenLane { core: Rc::clone(core), id, owner: owner_id, connection, link, ended: Cell::new(None) };
    tokio::task::spawn_local(async move {
        let (core, Link { stream, outlet, .. }) = (&open.core, &*open.link);
        let looker = Looker::new(&core.looks, id);
        let ended = drive(stream, &core.responder, &open.connection, outlet, Some(&looker)).await;
        open.count_end(uid, &ended);
        outlet.flushed().await;
    });
}

/// How a lane ended: its counter, and whether it was a drain that leaves its last replies to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct End {
    counter: LaneCounter,
    drained: bool,
}

/// A lane's entry in its core, undone when its task ends, however it ends.
struct OpenLane<T: Stream, S: Service + 'static> {
    core: Rc<Shared<T, S>>,
    id: u64,
    owner: u64,
    connection: RefCell<Connection>,
    link: Rc<Link<T>>,
    ended: Cell<Option<End>>,
}

impl<T: Stream, S: Service + 'static> OpenLane<T, S> {
    fn count_end(&self, uid: u32, ended: &Ended) {
        let Carrier::Lane(lane) = &self.link.stream else { return };
        let is_unread = self.link.is_unread();
        let counter = match (ended, lane.cut()) {
            _ if is_unread => LaneCounter::ClosedUnread,
            (Ended::Untrusted(_), _) => LaneCounter::ClosedHeader,
            (_, Some(Why::Fault(_))) => LaneCounter::ClosedPositions,
            (_, Some(Why::Here | Why::Bell) | None) => LaneCounter::ClosedWithConnection,
        };
        let is_draining = self.core.responder.borrow().lanes.draining;
        let drained = is_draining && counter == LaneCounter::ClosedWithConnection && lane.cut().is_none();
        self.ended.set(Some(End { counter, drained }));
        let core = self.core.options.index;
        if counter == LaneCounter::ClosedWithConnection {
            tracing::debug!(core, uid, %ended, "a lane has ended");
        } else if let Some(withheld) = self.core.log_quota.take(std::time::Instant::now()) {
            tracing::warn!(core, uid, %ended, why = counter.name(), withheld, "a lane is closed, and its connection");
        }
    }
}

impl<T: Stream, S: Service + 'static> Drop for OpenLane<T, S> {
    fn drop(&mut self) {
        let panicked = End { counter: LaneCounter::ClosedPanic, drained: false };
        let end = self.ended.get().unwrap_or(panicked);
        if thread::panicking() {
            tracing::error!(
                core = self.core.options.index,
                "answering a request of a lane panicked; its connection is closed"
            );
        }
        if let Carrier::Lane(lane) = &self.link.stream {
            lane.end(end.drained);
        }
        let is_first = {
            let mut responder = self.core.responder.borrow_mut();
            self.connection.get_mut().on_closed(&mut *responder);
            responder.lanes.terms.counters().bump(end.counter);
            responder.lanes.by_owner.remove(&self.owner).is_some()
        };
        self.core.open.borrow_mut().remove(&self.id);
        let bell_let_go = matches!(&self.link.stream, Carrier::Lane(lane) if lane.cut() == Some(Why::Bell));
        if is_first && !end.drained && !bell_let_go {
            self.core.cut(self.owner);
        }
        self.core.responder.borrow().lanes.ended.notify_waiters();
        self.core.one_ended();
    }
}

impl<T: Stream, S: Service + 'static> Shared<T, S> {
    /// A connection has ended: its lane, if it has one, is to end. Gives its number, if it has begun.
    pub(in crate::serve) fn shut_lane_of(&self, owner: u64) -> Option<u64> {
        let (begun, how) = {
            let lanes = &mut self.responder.borrow_mut().lanes;
            let begun = lanes.by_owner.remove(&owner)?;
            lanes.new.retain(|lane| lane.owner.connection != owner);
            if begun.is_none() {
                lanes.terms.counters().bump(LaneCounter::ClosedWithConnection);
            }
            (begun, if lanes.draining { Shutdown::Read } else { Shutdown::Both })
        };
        if let Some(Carrier::Lane(lane)) = self.open.borrow().get(&begun?).map(|link| &link.stream) {
            lane.shutdown(how);
        }
        begun
    }

    /// As [`Shared::shut_lane_of`], and waits until it has ended.
    pub(in crate::serve) async fn end_lane_of(&self, owner: u64) {
        let Some(id) = self.shut_lane_of(owner) else { return };
        let ended = Arc::clone(&self.responder.borrow().lanes.ended);
        loop {
            let notified = ended.notified();
            if !self.open.borrow().contains_key(&id) {
                return;
            }
            notified.await;
        }
    }

    /// The connection that a lane belongs to.
    pub(in crate::serve) fn owner_of(&self, lane: u64) -> Option<Rc<Link<T>>> {
        let responder = self.responder.borrow();
        let (owner, _) = responder.lanes.by_owner.iter().find(|(_, id)| **id == Some(lane))?;
        self.open.borrow().get(owner).map(Rc::clone)
    }

    /// Closes a connection, if it is there.
    fn cut(&self, connection: u64) {
        if let Some(link) = self.open.borrow().get(&connection) {
            // Its task lets what is being said be said before it closes.
            let how = if link.outlet.is_flushing() { Shutdown::Read } else { Shutdown::Both };
            // An error says that the peer has gone by itself.
            let _ = link.stream.shutdown(how);
        }
    }
}
