//! A lane as a stream, so that what drives a connection drives it too.

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
use crate::limits::WRITES_PER_TURN_MAX;
use crate::metrics::LaneCounter;
use crate::serve::busy_poll::{LookCost, Looker};
use crate::serve::io_backend::Stream;
use crate::serve::io_backend::registered;

/// How far a lane has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Requests come and replies go.
    Open,
    /// What had come by then is answered, nothing after it.
    Draining {
        /// Where that ends, bytes since the lane was made.
        end_bytes: u64,
    },
    /// Nothing passes any more.
    Cut(Why),
}

/// Why a lane was cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// From this side: with its connection, or because its replies are not read.
    Here,
    /// The gateway let go of the bell.
    Bell,
    /// The gateway wrote a position that cannot be.
    Fault(LaneFault),
}

/// The daemon's end of a lane.
pub(in crate::serve) struct LaneStream {
    end: RefCell<LaneEnd>,
    /// Registered for what rings only: a ring that the gateway hears is to wake nobody here.
    bell: AsyncFd<UnixStream>,
    phase: Cell<Phase>,
    /// Rings when `phase` has changed.
    changed: Notify,
    looker: Looker,
    lanes: Arc<Lanes>,
}

impl LaneStream {
    pub(super) fn new(end: LaneEnd, bell: UnixStream, looker: Looker, lanes: &Arc<Lanes>) -> io::Result<Self> {
        bell.set_nonblocking(true)?;
        Ok(Self {
            end: RefCell::new(end),
            bell: registered(bell, Interest::READABLE)?,
            phase: Cell::new(Phase::Open),
            changed: Notify::new(),
            looker,
            lanes: Arc::clone(lanes),
        })
    }

    /// Why it was cut, if it was.
    pub(super) fn cut(&self) -> Option<Why> {
        match self.phase.get() {
            Phase::Cut(why) => Some(why),
            Phase::Open | Phase::Draining { .. } => None,
        }
    }

    fn set(&self, phase: Phase) {
        self.phase.set(phase);
        self.changed.notify_waiters();
    }

    fn distrust(&self, fault: LaneFault) -> io::Error {
        self.set(Phase::Cut(Why::Fault(fault)));
        io::Error::new(io::ErrorKind::InvalidData, fault)
    }

    /// Bytes that may be read now; `None` = nothing will come any more.
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

    /// Sleeps until `come` gives something.
    async fn wait<C>(
        &self,
        awaited: Awaited,
        mut come: impl FnMut() -> Result<Option<C>, LaneFault>,
    ) -> Result<C, LaneFault> {
        loop {
            let changed = self.changed.notified();
            self.end.borrow().announce(awaited);
            // What came before the other side could know that this one sleeps.
            let came = come()?;
            if came.is_none() {
                tokio::select! {
                    rung = self.bell.readable() => self.heard(rung),
                    () = changed => {}
                }
            }
            self.end.borrow().settle(awaited);
            if let Some(come) = came {
                return Ok(come);
            }
            if let Some(come) = come()? {
                return Ok(come);
            }
        }
    }

    fn heard(&self, rung: io::Result<AsyncFdReadyGuard<'_, UnixStream>>) {
        self.lanes.counters().bump(LaneCounter::BellsHeard);
        match rung.map(|mut ready| (hear(self.bell.get_ref()), ready.clear_ready())) {
            // The runtime waits for the next ring; those that are left in the socket mean nothing else.
            Ok((Heard::Quiet, ())) => {}
            Ok((Heard::Gone, ())) | Err(_) => self.set(Phase::Cut(Why::Bell)),
        }
    }

    /// It has ended. If that was a `drained` end, the gateway may still read what was written for it.
    pub(super) fn end(&self, drained: bool) {
        if drained {
            self.end.borrow_mut().leave();
        }
        if self.cut().is_none() {
            self.set(Phase::Cut(Why::Here));
        }
    }

    /// Takes what has come; `None` = nothing has.
    pub(super) fn try_read(&self, buffer: &mut Vec<u8>) -> Option<io::Result<usize>> {
        let received = match self.incoming() {
            Ok(Some(0)) => return None,
            Ok(None) => return Some(Ok(0)),
            Ok(Some(bytes)) => {
                let room = buffer.capacity() - buffer.len();
                // The rest of a frame that is being written is taken as it comes, unless this is the last that is read.
                let bytes_max = if self.phase.get() == Phase::Open { room } else { bytes.min(room) };
                self.end.borrow_mut().receive(bytes_max, buffer)
            }
            Err(fault) => Err(fault),
        };
        Some(received.map(|moved| self.rung(moved)).map_err(|fault| self.distrust(fault)))
    }

    /// Rings if the other side sleeps for what was moved; gives how much was.
    fn rung(&self, moved: Moved) -> usize {
        if moved.rings {
            ring(self.bell.get_ref());
        }
        moved.bytes
    }

    /// Reads what comes, asleep until then.
    pub(super) async fn read(&self, mut buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        loop {
            if let Some(read) = self.try_read(&mut buffer) {
                return (read, buffer);
            }
            let come = || Ok((self.incoming()? != Some(0)).then_some(()));
            if let Err(fault) = self.wait(Awaited::DATA, come).await {
                return (Err(self.distrust(fault)), buffer);
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
                Ok(moved) => rest = &rest[self.rung(moved)..],
                Err(fault) => return (Err(self.distrust(fault)), bytes),
            }
            if rest.is_empty() {
                return (Ok(()), bytes);
            }
            writes += 1;
            if writes == WRITES_PER_TURN_MAX {
                // Room may come by the word, and each time at once.
                writes = 0;
                tokio::task::yield_now().await;
            }
            if let Err(fault) = self.wait_for_room().await {
                return (Err(self.distrust(fault)), bytes);
            }
        }
    }

    /// Waits for room to write, or until it is cut: looks for a while if this core does, then sleeps.
    async fn wait_for_room(&self) -> Result<(), LaneFault> {
        let room = || {
            let is_room = self.cut().is_some() || self.end.borrow_mut().room_bytes()? > 0;
            Ok(is_room.then_some(()))
        };
        let looking = self.looker.begin(LookCost::Load);
        while looking.goes_on() {
            if let Some(come) = looking.turn(|| room().transpose()) {
                return come;
            }
            tokio::task::yield_now().await;
        }
        drop(looking);
        self.wait(Awaited::ROOM, room).await
    }

    pub(super) fn shutdown(&self, how: Shutdown) {
        if self.cut().is_some() {
            return;
        }
        if how != Shutdown::Read {
            return self.set(Phase::Cut(Why::Here));
        }
        if self.phase.get() == Phase::Open {
            let mut end = self.end.borrow_mut();
            match end.incoming_bytes() {
                Ok(bytes) => {
                    let end_bytes = end.received_bytes() + bytes as u64;
                    drop(end);
                    self.set(Phase::Draining { end_bytes });
                }
                Err(fault) => self.set(Phase::Cut(Why::Fault(fault))),
            }
        }
    }
}

// What carries the bytes of a connection: a socket of the core's engine, or a lane.

/// A socket or a lane.
pub(in crate::serve) enum Carrier<T> {
    /// A socket.
    Socket(T),
    /// A lane.
    Lane(Box<LaneStream>),
}

impl<T: Stream> Stream for Carrier<T> {
    fn from_std(stream: UnixStream) -> io::Result<Self> {
        T::from_std(stream).map(Self::Socket)
    }

    fn look_cost(&self) -> LookCost {
        match self {
            Self::Socket(socket) => socket.look_cost(),
            Self::Lane(_) => LookCost::Load,
        }
    }

    fn try_read(&self, buffer: &mut Vec<u8>) -> Option<io::Result<usize>> {
        match self {
            Self::Socket(socket) => socket.try_read(buffer),
            Self::Lane(lane) => lane.try_read(buffer),
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
