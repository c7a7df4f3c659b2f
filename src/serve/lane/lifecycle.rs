//! Giving a connection a lane: the memory and the bell are made, one end is put before the core, the other goes to the
//! gateway with the reply.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustc_hash::FxHashMap;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::sync::Notify;

use super::Lanes;
use super::stream::Carrier;
use super::stream::{LaneStream, Why};
use crate::error::{Error, Kind, Result};
use crate::ids::CorrelationId;
use crate::lane::{LANE_LAYOUT, LaneEnd, LaneMemory, LaneSide, LaneSizes, bell_pair};
use crate::limits::{LANE_HAND_OVER_MS_MAX, LANE_HAND_OVER_REST_MS};
use crate::metrics::{CounterName, LaneCounter};
use crate::serve::busy_poll::Looker;
use crate::serve::connection::{Carried, Connection, Peer};
use crate::serve::connection::{Ended, drive};
use crate::serve::core::{Link, Shared};
use crate::serve::io_backend::Stream;
use crate::serve::responder::RoutingResponder;
use crate::serve::service::Service;
use crate::wire::{LaneAsked, LaneOpened};

/// Descriptors that go with a reply. Dropped, they are closed.
#[derive(Debug)]
pub struct Handed {
    /// The lane's memory.
    pub memory: OwnedFd,
    /// The gateway's end of the bell.
    pub bell: OwnedFd,
}

/// A lane that a core is to begin to serve.
#[derive(Debug)]
pub(super) struct NewLane {
    /// The connection that it belongs to, with its session and user.
    pub(super) owner: Peer,
    pub(super) end: LaneEnd,
    pub(super) bell: UnixStream,
}

/// The lanes of one core.
#[derive(Debug)]
pub(in crate::serve) struct CoreLanes {
    pub(super) terms: Arc<Lanes>,
    /// Opened, and not yet begun.
    pub(super) new: VecDeque<NewLane>,
    /// Rings when there is one.
    pub(super) opened: Arc<Notify>,
    /// By connection: the number of its lane, once that has begun.
    pub(super) by_owner: FxHashMap<u64, Option<u64>>,
    /// Rings for all who wait for a lane to end.
    pub(super) ended: Arc<Notify>,
    /// Whether what has come is still answered when a connection ends.
    pub(in crate::serve) draining: bool,
}

impl CoreLanes {
    pub(in crate::serve) fn new(terms: Arc<Lanes>) -> Self {
        let (opened, ended, by_owner) = (Arc::default(), Arc::default(), FxHashMap::default());
        Self { terms, new: VecDeque::new(), opened, by_owner, ended, draining: false }
    }

    /// Whether there may be any.
    pub(in crate::serve) fn are_on(&self) -> bool {
        self.terms.are_on()
    }

    fn make(&self, peer: &Peer, asked: LaneAsked) -> Result<(NewLane, Handed), (LaneCounter, Error)> {
        if peer.carried == Carried::Lane || self.by_owner.contains_key(&peer.connection) {
            let what = "the connection has a lane";
            let error = Error::new(Kind::InvalidArgument, what, "use it, or open another connection");
            return Err((LaneCounter::RefusedSecond, error));
        }
        if !self.terms.are_on() {
            let error =
                Error::new(Kind::Unsupported, "this daemon has no lanes", "raise serve.lanes_max, or go without");
            return Err((LaneCounter::RefusedOff, error));
        }
        let (request_bytes, reply_bytes) = (asked.request_ring_bytes, asked.reply_ring_bytes);
        let sizes = LaneSizes::asked(request_bytes, reply_bytes, self.terms.ring_bytes_max())
            .map_err(|error| (LaneCounter::RefusedSizes, error))?;
        let place = self.terms.take(peer.uid)?;
        let reclaimer = Arc::clone(self.terms.reclaimer());
        let made = move || {
            let mut memory = LaneMemory::make(sizes)?;
            memory.reclaimed_by(&reclaimer, place);
            let (bell, theirs) = bell_pair()?;
            let handed = Handed { memory: memory.share()?, bell: theirs.into() };
            Ok((LaneEnd::new(memory, LaneSide::Daemon), bell, handed))
        };
        let (end, bell, handed) = made().map_err(|error| (LaneCounter::RefusedSystem, error))?;
        let owner = Peer { handed: None, ..*peer };
        Ok((NewLane { owner, end, bell }, handed))
    }
}

impl<S: Service> RoutingResponder<S> {
    /// Opens a lane for a connection. The reply must be the last before the descriptors that `peer` then has are handed
    /// over.
    pub(in crate::serve) fn open_lane(
        &mut self,
        peer: &mut Peer,
        id: CorrelationId,
        asked: LaneAsked,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let (lane, handed) = match self.lanes.make(peer, asked) {
            Ok(made) => made,
            Err((counter, error)) => {
                self.lanes.terms.counters().bump(counter);
                return Err(error);
            }
        };
        let sizes = lane.end.sizes();
        let opened = LaneOpened {
            layout: LANE_LAYOUT,
            request_ring_bytes: sizes.request_bytes(),
            reply_ring_bytes: sizes.reply_bytes(),
        };
        self.encoder.lane_opened(id, opened, out);
        peer.handed = Some(handed);
        self.lanes.terms.counters().bump(LaneCounter::Opened);
        self.lanes.by_owner.insert(peer.connection, None);
        self.lanes.new.push_back(lane);
        self.lanes.opened.notify_one();
        Ok(())
    }
}

// Descriptors on their way to a gateway.

/// Sends descriptors with the first of `bytes`; gives how many of those went with them. A socket that takes nothing is
/// tried again for a while: whoever asks for a lane reads.
pub(in crate::serve) async fn hand_over(socket: BorrowedFd<'_>, bytes: &[u8], handed: &Handed) -> io::Result<usize> {
    for _ in 0..LANE_HAND_OVER_MS_MAX / LANE_HAND_OVER_REST_MS {
        match send(socket, bytes, handed) {
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            sent => return sent,
        }
        tokio::time::sleep(Duration::from_millis(LANE_HAND_OVER_REST_MS)).await;
    }
    Err(io::ErrorKind::TimedOut.into())
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], handed: &Handed) -> io::Result<usize> {
    let descriptors = [handed.memory.as_fd(), handed.bell.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags).map_err(Into::into)
}

// The lanes of a core from their beginning to their end.
//
// A lane is driven as a socket is, by a task of its own, under a number of its own: replies that come late and watches
// find it as they find any connection. It ends before its connection does, whose session it uses: whatever ends the
// connection ends the lane first. What ends the lane alone (a fault, an untrusted header, replies left unread) ends the
// connection after it; but a gateway that merely lets go of the bell goes on by its socket.

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
