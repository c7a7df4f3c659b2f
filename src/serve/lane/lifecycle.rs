//! A core's lanes from their opening to their end.
//!
//! 1. `open_lane` makes the memory and the bell. The daemon's ends go to the core's queue of new lanes; the gateway's
//!    descriptors go with the reply ([`send_descriptors`]).
//! 2. [`serve_lanes`] starts a task for each new lane, which drives the lane as if it were a socket. The lane has a
//!    connection number of its own, so that pending replies and watches find it as they find any connection.
//! 3. A lane ends before its connection does, because it uses the connection's session: whatever ends the connection
//!    ends the lane first. A lane that ends by itself (a fault, an untrusted header, replies left unread) then ends its
//!    connection. A gateway that merely closes the bell goes on by its socket.

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
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::sync::Notify;

use super::Lanes;
use super::stream::{CutReason, LaneStream, Transport};
use crate::error::{Error, Kind, Result};
use crate::ids::CorrelationId;
use crate::lane::{LANE_LAYOUT, LaneEnd, LaneMemory, LaneSide, LaneSizes, bell_pair};
use crate::limits::{LANE_HAND_OVER_MS_MAX, LANE_HAND_OVER_RETRY_MS};
use crate::metrics::{CounterName, LaneCounter};
use crate::requests::Service;
use crate::serve::busy_poll::Poller;
use crate::serve::connection::{Connection, Ended, Peer, TransportKind, drive};
use crate::serve::core::{ConnectionHandle, CoreState};
use crate::serve::io_backend::Stream;
use crate::serve::responder::{Encoded, RoutingResponder};
use crate::watchdog::Activity;
use crate::wire::{LaneOpened, LaneRequest};

/// The descriptors of a lane for its gateway. Dropped, they are closed.
#[derive(Debug)]
pub(crate) struct LaneDescriptors {
    memory: OwnedFd,
    /// The gateway's end of the bell.
    bell: OwnedFd,
}

/// A lane that its core does not serve yet.
#[derive(Debug)]
struct NewLane {
    /// The lane's connection, with its session and user.
    owner: Peer,
    end: LaneEnd,
    bell: UnixStream,
}

/// The lanes of one core.
#[derive(Debug)]
pub(in crate::serve) struct CoreLanes {
    daemon: Arc<Lanes>,
    new: VecDeque<NewLane>,
    /// Wakes [`serve_lanes`] when a lane is new.
    opened: Arc<Notify>,
    /// By connection: the number of its lane, once a task serves it.
    by_owner: FxHashMap<u64, Option<u64>>,
    /// Wakes all tasks that wait for the end of a lane.
    ended: Arc<Notify>,
    /// Whether the requests received so far are still answered when a connection ends.
    pub(in crate::serve) draining: bool,
}

impl CoreLanes {
    pub(in crate::serve) fn new(daemon: Arc<Lanes>) -> Self {
        let (opened, ended, by_owner) = (Arc::default(), Arc::default(), FxHashMap::default());
        Self { daemon, new: VecDeque::new(), opened, by_owner, ended, draining: false }
    }

    /// Whether the daemon allows any.
    pub(in crate::serve) fn are_on(&self) -> bool {
        self.daemon.are_on()
    }

    fn make(&self, peer: &Peer, asked: LaneRequest) -> Result<(NewLane, LaneDescriptors), (LaneCounter, Error)> {
        if peer.transport == TransportKind::Lane || self.by_owner.contains_key(&peer.connection) {
            let problem = "the connection has a lane already";
            let error = Error::new(Kind::InvalidArgument, problem, "use it, or open another connection");
            return Err((LaneCounter::RefusedSecond, error));
        }
        if peer.transport == TransportKind::Remote {
            let problem = "a connection from another host cannot have a lane: its memory is on this host";
            let error = Error::new(Kind::Unsupported, problem, "go on by the connection itself");
            return Err((LaneCounter::RefusedRemote, error));
        }
        if !self.are_on() {
            let error =
                Error::new(Kind::Unsupported, "this daemon has no lanes", "raise serve.lanes_max, or use the socket");
            return Err((LaneCounter::RefusedOff, error));
        }
        let (request_bytes, reply_bytes) = (asked.request_ring_bytes, asked.reply_ring_bytes);
        let sizes = LaneSizes::requested(request_bytes, reply_bytes, self.daemon.ring_bytes_max)
            .map_err(|error| (LaneCounter::RefusedSizes, error))?;
        let reservation = self.daemon.reserve(peer.uid)?;
        let reclaimer = Arc::clone(&self.daemon.reclaimer);
        let made = move || {
            let mut memory = LaneMemory::make(sizes)?;
            memory.reclaimed_by(&reclaimer, reservation);
            let (bell, theirs) = bell_pair()?;
            let descriptors = LaneDescriptors { memory: memory.share()?, bell: theirs.into() };
            Ok((LaneEnd::new(memory, LaneSide::Daemon), bell, descriptors))
        };
        let (end, bell, descriptors) = made().map_err(|error| (LaneCounter::RefusedSystem, error))?;
        let owner = Peer { descriptors: None, ..*peer };
        Ok((NewLane { owner, end, bell }, descriptors))
    }
}

impl<S: Service> RoutingResponder<S> {
    /// Opens a lane for a connection. `peer` then has the lane's descriptors, which go with this reply: no other reply
    /// may follow it before they are sent.
    pub(in crate::serve) fn open_lane(
        &mut self,
        peer: &mut Peer,
        id: CorrelationId,
        asked: LaneRequest,
        out: &mut Vec<u8>,
    ) -> Result<Encoded> {
        let (lane, descriptors) = match self.lanes.make(peer, asked) {
            Ok(made) => made,
            Err((counter, error)) => {
                self.lanes.daemon.counters().bump(counter);
                return Err(error);
            }
        };
        let sizes = lane.end.sizes();
        let opened = LaneOpened {
            layout: LANE_LAYOUT,
            request_ring_bytes: sizes.request_bytes(),
            reply_ring_bytes: sizes.reply_bytes(),
        };
        let reply = Encoded::reply(out, |out| self.encoder.lane_opened(id, opened, out));
        peer.descriptors = Some(descriptors);
        self.lanes.daemon.counters().bump(LaneCounter::Opened);
        self.lanes.by_owner.insert(peer.connection, None);
        self.lanes.new.push_back(lane);
        self.lanes.opened.notify_one();
        Ok(reply)
    }
}

/// Sends a lane's descriptors with the first of `bytes`; returns the number of those bytes that were sent. A socket
/// whose buffer is full is retried for a while: a gateway that asks for a lane reads.
pub(in crate::serve) async fn send_descriptors(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &LaneDescriptors,
) -> io::Result<usize> {
    for _ in 0..LANE_HAND_OVER_MS_MAX / LANE_HAND_OVER_RETRY_MS {
        match try_send(socket, bytes, descriptors) {
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            sent => return sent,
        }
        tokio::time::sleep(Duration::from_millis(LANE_HAND_OVER_RETRY_MS)).await;
    }
    Err(io::ErrorKind::TimedOut.into())
}

fn try_send(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &LaneDescriptors) -> io::Result<usize> {
    let both = [descriptors.memory.as_fd(), descriptors.bell.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&both)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags).map_err(Into::into)
}

/// Starts a task for every new lane of a core, for ever.
pub(in crate::serve) async fn serve_lanes<T: Stream, S: Service + 'static>(core: Rc<CoreState<T, S>>) {
    let opened = Arc::clone(&core.responder.borrow().lanes.opened);
    loop {
        opened.notified().await;
        loop {
            let Some(lane) = core.responder.borrow_mut().lanes.new.pop_front() else { break };
            start(&core, lane);
        }
    }
}

fn start<T: Stream, S: Service + 'static>(core: &Rc<CoreState<T, S>>, lane: NewLane) {
    let NewLane { owner, end, bell } = lane;
    let (uid, owner_id) = (owner.uid, owner.connection);
    let daemon = Arc::clone(&core.responder.borrow().lanes.daemon);
    let id = core.take_id();
    let stream = match LaneStream::new(end, bell, Poller::new(&core.poll_shares, id), &daemon) {
        Ok(stream) => stream,
        Err(error) => {
            daemon.counters().bump(LaneCounter::RefusedSystem);
            tracing::warn!(core = core.options.index, uid, %error, "cannot serve a lane; its connection is closed");
            core.responder.borrow_mut().lanes.by_owner.remove(&owner_id);
            return core.cut(owner_id);
        }
    };
    core.responder.borrow_mut().lanes.by_owner.insert(owner_id, Some(id));
    let connection =
        RefCell::new(Connection::of_lane(&owner, id, core.options.frame_body_bytes_max).within(&core.receive_budget));
    let peer_wait = connection.borrow().peer_wait();
    let handle = Rc::new(ConnectionHandle::new(Transport::Lane(Box::new(stream)), peer_wait, &core.reply_budget));
    core.open.borrow_mut().insert(id, Rc::clone(&handle));
    let open = LaneGuard { core: Rc::clone(core), id, owner: owner_id, connection, handle, ended: Cell::new(None) };
    core.spawn(Activity::ReadingFrames, async move {
        let (core, ConnectionHandle { stream, writer, .. }) = (&open.core, &*open.handle);
        let poller = Poller::new(&core.poll_shares, id);
        let ended = drive(stream, &core.responder, &open.connection, writer, Some(&poller)).await;
        open.count_end(uid, &ended);
        writer.flushed().await;
    });
}

/// How a lane ended: its counter, and whether a drain ended it and leaves its last replies to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LaneEnded {
    counter: LaneCounter,
    drained: bool,
}

/// A lane's entry in its core. It is removed when the lane's task ends, by a panic too.
struct LaneGuard<T: Stream, S: Service + 'static> {
    core: Rc<CoreState<T, S>>,
    id: u64,
    owner: u64,
    connection: RefCell<Connection>,
    handle: Rc<ConnectionHandle<T>>,
    ended: Cell<Option<LaneEnded>>,
}

impl<T: Stream, S: Service + 'static> LaneGuard<T, S> {
    fn count_end(&self, uid: u32, ended: &Ended) {
        let Transport::Lane(lane) = &self.handle.stream else { return };
        let is_unread = self.handle.is_unread();
        let counter = match (ended, lane.cut()) {
            _ if is_unread => LaneCounter::ClosedUnread,
            (Ended::Untrusted(_), _) => LaneCounter::ClosedHeader,
            (_, Some(CutReason::Fault(_))) => LaneCounter::ClosedPositions,
            (_, Some(CutReason::Local | CutReason::BellClosed) | None) => LaneCounter::ClosedWithConnection,
        };
        let is_draining = self.core.responder.borrow().lanes.draining;
        let drained = is_draining && counter == LaneCounter::ClosedWithConnection && lane.cut().is_none();
        self.ended.set(Some(LaneEnded { counter, drained }));
        let core = self.core.options.index;
        if counter == LaneCounter::ClosedWithConnection {
            tracing::debug!(core, uid, %ended, "a lane has ended");
        } else if let Some(withheld) = self.core.log_quota.take(Instant::now()) {
            tracing::warn!(core, uid, %ended, why = counter.name(), withheld, "a lane and its connection are closed");
        }
    }
}

impl<T: Stream, S: Service + 'static> Drop for LaneGuard<T, S> {
    fn drop(&mut self) {
        let panicked = LaneEnded { counter: LaneCounter::ClosedPanic, drained: false };
        let end = self.ended.get().unwrap_or(panicked);
        if thread::panicking() {
            tracing::error!(
                core = self.core.options.index,
                "answering a request of a lane panicked; its connection is closed"
            );
        }
        if let Transport::Lane(lane) = &self.handle.stream {
            lane.end(end.drained);
        }
        let is_first = {
            let mut responder = self.core.responder.borrow_mut();
            self.connection.get_mut().on_closed(&mut *responder);
            responder.lanes.daemon.counters().bump(end.counter);
            responder.lanes.by_owner.remove(&self.owner).is_some()
        };
        self.core.open.borrow_mut().remove(&self.id);
        let bell_closed =
            matches!(&self.handle.stream, Transport::Lane(lane) if lane.cut() == Some(CutReason::BellClosed));
        if is_first && !end.drained && !bell_closed {
            self.core.cut(self.owner);
        }
        self.core.responder.borrow().lanes.ended.notify_waiters();
        self.core.notify_ended();
    }
}

impl<T: Stream, S: Service + 'static> CoreState<T, S> {
    /// Ends the lane of a connection that has ended. Returns the lane's number if a task serves it.
    pub(in crate::serve) fn shut_lane_of(&self, owner: u64) -> Option<u64> {
        let (begun, how) = {
            let lanes = &mut self.responder.borrow_mut().lanes;
            let begun = lanes.by_owner.remove(&owner)?;
            lanes.new.retain(|lane| lane.owner.connection != owner);
            if begun.is_none() {
                lanes.daemon.counters().bump(LaneCounter::ClosedWithConnection);
            }
            (begun, if lanes.draining { Shutdown::Read } else { Shutdown::Both })
        };
        if let Some(Transport::Lane(lane)) = self.open.borrow().get(&begun?).map(|handle| &handle.stream) {
            lane.shutdown(how);
        }
        begun
    }

    /// As [`CoreState::shut_lane_of`], and waits until the lane has ended.
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

    /// The connection of a lane.
    pub(in crate::serve) fn owner_of(&self, lane: u64) -> Option<Rc<ConnectionHandle<T>>> {
        let responder = self.responder.borrow();
        let (owner, _) = responder.lanes.by_owner.iter().find(|(_, id)| **id == Some(lane))?;
        self.open.borrow().get(owner).map(Rc::clone)
    }

    /// Closes a connection, if it is open.
    fn cut(&self, connection: u64) {
        if let Some(handle) = self.open.borrow().get(&connection) {
            // A pending reply is still written: the connection's task closes after it.
            let how = if handle.writer.is_flushing() { Shutdown::Read } else { Shutdown::Both };
            // An error means that the peer has gone by itself.
            let _ = handle.stream.shutdown(how);
        }
    }
}
