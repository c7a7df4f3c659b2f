//! The daemon's end of a lane as a [`Stream`], so that the code which drives a socket drives it too.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};
use tokio::sync::Notify;

use super::Lanes;
use crate::lane::{Awaited, Heard, LaneEnd, LaneFault, Moved, hear, ring};
use crate::limits::WRITES_PER_QUANTUM_MAX;
use crate::metrics::LaneCounter;
use crate::serve::busy_poll::{PollCost, Poller};
use crate::serve::io_backend::{Stream, registered};

/// The state of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Requests come and replies go.
    Open,
    /// Requests received before the drain are answered, later ones are not.
    Draining {
        /// The end of those requests, bytes since the lane was made.
        end_bytes: u64,
    },
    /// Nothing passes any more.
    Cut(CutReason),
}

/// Why a lane was cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CutReason {
    /// By the daemon: with its connection, or because its replies are not read.
    Local,
    /// The gateway closed the bell.
    BellClosed,
    /// The gateway wrote an impossible position.
    Fault(LaneFault),
}

/// The daemon's end of a lane.
pub(in crate::serve) struct LaneStream {
    end: RefCell<LaneEnd>,
    /// Registered for rings from the gateway only: a ring to the gateway must wake nothing here.
    bell: AsyncFd<UnixStream>,
    phase: Cell<Phase>,
    /// Wakes the lane's tasks when `phase` has changed.
    changed: Notify,
    poller: Poller,
    lanes: Arc<Lanes>,
}

impl LaneStream {
    pub(super) fn new(end: LaneEnd, bell: UnixStream, poller: Poller, lanes: &Arc<Lanes>) -> io::Result<Self> {
        bell.set_nonblocking(true)?;
        Ok(Self {
            end: RefCell::new(end),
            bell: registered(bell, Interest::READABLE)?,
            phase: Cell::new(Phase::Open),
            changed: Notify::new(),
            poller,
            lanes: Arc::clone(lanes),
        })
    }

    /// Why it was cut; `None` = it was not.
    pub(super) fn cut(&self) -> Option<CutReason> {
        match self.phase.get() {
            Phase::Cut(why) => Some(why),
            Phase::Open | Phase::Draining { .. } => None,
        }
    }

    fn set(&self, phase: Phase) {
        self.phase.set(phase);
        self.changed.notify_waiters();
    }

    fn fail(&self, fault: LaneFault) -> io::Error {
        self.set(Phase::Cut(CutReason::Fault(fault)));
        io::Error::new(io::ErrorKind::InvalidData, fault)
    }

    /// Bytes that can be read now; `None` = no more will come.
    fn incoming(&self) -> Result<Option<usize>, LaneFault> {
        let mut end = self.end.borrow_mut();
        match self.phase.get() {
            Phase::Open => end.incoming_bytes().map(Some),
            Phase::Draining { end_bytes } => {
                let left = end_bytes - end.received_bytes();
                Ok(Some(left as usize).filter(|left| *left > 0))
            }
            Phase::Cut(_) => Ok(None),
        }
    }

    /// Sleeps until `poll` finds something.
    async fn wait<C>(
        &self,
        awaited: Awaited,
        mut poll: impl FnMut() -> Result<Option<C>, LaneFault>,
    ) -> Result<C, LaneFault> {
        loop {
            let changed = self.changed.notified();
            self.end.borrow().announce(awaited);
            // Data may have come before the gateway could see that this side sleeps.
            let found = poll()?;
            if found.is_none() {
                tokio::select! {
                    rung = self.bell.readable() => self.on_bell(rung),
                    () = changed => {}
                }
            }
            self.end.borrow().settle(awaited);
            if let Some(found) = found {
                return Ok(found);
            }
            if let Some(found) = poll()? {
                return Ok(found);
            }
        }
    }

    fn on_bell(&self, rung: io::Result<AsyncFdReadyGuard<'_, UnixStream>>) {
        self.lanes.counters().bump(LaneCounter::BellsHeard);
        match rung.map(|mut ready| (hear(self.bell.get_ref()), ready.clear_ready())) {
            // The runtime waits for the next ring. All rings mean the same, so that those left in the socket add
            // nothing.
            Ok((Heard::Quiet, ())) => {}
            Ok((Heard::Gone, ())) | Err(_) => self.set(Phase::Cut(CutReason::BellClosed)),
        }
    }

    /// Ends the lane. After a `drained` end the gateway may still read the replies.
    pub(super) fn end(&self, drained: bool) {
        if drained {
            self.end.borrow_mut().leave();
        }
        if self.cut().is_none() {
            self.set(Phase::Cut(CutReason::Local));
        }
    }

    /// Takes the bytes that have arrived; `None` = none have.
    pub(super) fn try_read(&self, buffer: &mut Vec<u8>) -> Option<io::Result<usize>> {
        let received = match self.incoming() {
            Ok(Some(0)) => return None,
            Ok(None) => return Some(Ok(0)),
            Ok(Some(bytes)) => {
                let room = buffer.capacity() - buffer.len();
                // The rest of a frame is taken while the gateway writes it, unless this is the last read of a drain.
                let bytes_max = if self.phase.get() == Phase::Open { room } else { bytes.min(room) };
                self.end.borrow_mut().receive(bytes_max, buffer)
            }
            Err(fault) => Err(fault),
        };
        Some(received.map(|moved| self.ring_if_awaited(moved)).map_err(|fault| self.fail(fault)))
    }

    /// Rings if the other side sleeps for these bytes; returns their number.
    fn ring_if_awaited(&self, moved: Moved) -> usize {
        if moved.rings {
            ring(self.bell.get_ref());
        }
        moved.bytes
    }

    /// Reads the bytes that arrive, and sleeps until then.
    pub(super) async fn read(&self, mut buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        loop {
            if let Some(read) = self.try_read(&mut buffer) {
                return (read, buffer);
            }
            let poll = || Ok((self.incoming()? != Some(0)).then_some(()));
            if let Err(fault) = self.wait(Awaited::DATA, poll).await {
                return (Err(self.fail(fault)), buffer);
            }
        }
    }

    pub(super) async fn write_all(&self, bytes: Vec<u8>) -> (io::Result<()>, Vec<u8>) {
        let (mut rest, mut writes) = (bytes.as_slice(), 0);
        loop {
            if self.cut().is_some() {
                return (Err(io::ErrorKind::BrokenPipe.into()), bytes);
            }
            let sent = self.end.borrow_mut().send(rest);
            match sent {
                Ok(moved) => rest = &rest[self.ring_if_awaited(moved)..],
                Err(fault) => return (Err(self.fail(fault)), bytes),
            }
            if rest.is_empty() {
                return (Ok(()), bytes);
            }
            writes += 1;
            if writes == WRITES_PER_QUANTUM_MAX {
                // Space may come word by word, each time at once.
                writes = 0;
                tokio::task::yield_now().await;
            }
            if let Err(fault) = self.wait_for_room().await {
                return (Err(self.fail(fault)), bytes);
            }
        }
    }

    /// Waits for space to write, or until the lane is cut: polls for a while if this core does, then sleeps.
    async fn wait_for_room(&self) -> Result<(), LaneFault> {
        let room = || {
            let is_room = self.cut().is_some() || self.end.borrow_mut().room_bytes()? > 0;
            Ok(is_room.then_some(()))
        };
        let polling = self.poller.begin(PollCost::Load);
        while polling.continues() {
            if let Some(found) = polling.round(|| room().transpose()) {
                return found;
            }
            tokio::task::yield_now().await;
        }
        drop(polling);
        self.wait(Awaited::ROOM, room).await
    }

    pub(super) fn shutdown(&self, how: Shutdown) {
        if self.cut().is_some() {
            return;
        }
        if how != Shutdown::Read {
            return self.set(Phase::Cut(CutReason::Local));
        }
        if self.phase.get() == Phase::Open {
            let mut end = self.end.borrow_mut();
            match end.incoming_bytes() {
                Ok(bytes) => {
                    let end_bytes = end.received_bytes() + bytes as u64;
                    drop(end);
                    self.set(Phase::Draining { end_bytes });
                }
                Err(fault) => self.set(Phase::Cut(CutReason::Fault(fault))),
            }
        }
    }
}

/// The transport of a connection: a socket of the core's backend, or a lane.
pub(in crate::serve) enum Transport<T> {
    Socket(T),
    Lane(Box<LaneStream>),
}

impl<T: Stream> Stream for Transport<T> {
    fn from_std(stream: UnixStream) -> io::Result<Self> {
        T::from_std(stream).map(Self::Socket)
    }

    fn poll_cost(&self) -> PollCost {
        match self {
            Self::Socket(socket) => socket.poll_cost(),
            Self::Lane(_) => PollCost::Load,
        }
    }

    fn try_read(&self, buffer: &mut Vec<u8>) -> Option<io::Result<usize>> {
        match self {
            Self::Socket(socket) => socket.try_read(buffer),
            Self::Lane(lane) => lane.try_read(buffer),
        }
    }

    fn prepare_write(&self) {
        if let Self::Lane(lane) = self {
            lane.end.borrow_mut().own_ahead();
        }
    }

    async fn read(&self, buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        match self {
            Self::Socket(socket) => socket.read(buffer).await,
            Self::Lane(lane) => lane.read(buffer).await,
        }
    }

    async fn write_all(&self, bytes: Vec<u8>) -> (io::Result<()>, Vec<u8>) {
        match self {
            Self::Socket(socket) => socket.write_all(bytes).await,
            Self::Lane(lane) => lane.write_all(bytes).await,
        }
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Self::Socket(socket) => socket.shutdown(how),
            Self::Lane(lane) => {
                lane.shutdown(how);
                Ok(())
            }
        }
    }

    fn socket(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Socket(socket) => socket.socket(),
            Self::Lane(_) => None,
        }
    }
}
