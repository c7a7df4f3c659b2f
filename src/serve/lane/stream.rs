//! A lane as a stream, so that what drives a connection drives it too.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::Shutdown;
use std::rc::Rc;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::sync::Notify;

use super::looks::Looks;
use super::terms::Lanes;
use crate::lane::{Awaited, Heard, LaneEnd, LaneFault, hear, ring};
use crate::metrics::LaneCounter;

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
    bell: tokio::net::UnixStream,
    phase: Cell<Phase>,
    /// Rings when `phase` has changed.
    changed: Notify,
    looks: Rc<Looks>,
    lanes: Arc<Lanes>,
}

impl LaneStream {
    pub(super) fn new(
        end: LaneEnd,
        bell: std::os::unix::net::UnixStream,
        looks: &Rc<Looks>,
        lanes: &Arc<Lanes>,
    ) -> io::Result<Self> {
        bell.set_nonblocking(true)?;
        Ok(Self {
            end: RefCell::new(end),
            bell: tokio::net::UnixStream::from_std(bell)?,
            phase: Cell::new(Phase::Open),
            changed: Notify::new(),
            looks: Rc::clone(looks),
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

    /// Waits until `come` gives something: looks for a while if this core does, then sleeps until the bell rings.
    async fn wait<C>(
        &self,
        awaited: Awaited,
        mut come: impl FnMut() -> Result<Option<C>, LaneFault>,
    ) -> Result<C, LaneFault> {
        if let Some(come) = come()? {
            return Ok(come);
        }
        let looking = self.looks.begin();
        while looking.goes_on() {
            if let Some(come) = looking.turn(&mut come)? {
                return Ok(come);
            }
            tokio::task::yield_now().await;
        }
        drop(looking);
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

    fn heard(&self, rung: io::Result<()>) {
        self.lanes.counters().bump(LaneCounter::BellsHeard);
        let heard = rung.and_then(|()| {
            self.bell.try_io(Interest::READABLE, || match hear(&self.bell) {
                Heard::Gone => Ok(()),
                // Makes the runtime wait for the next ring; those that are left in the socket mean nothing else.
                Heard::Quiet => Err(io::ErrorKind::WouldBlock.into()),
            })
        });
        match heard {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok(()) | Err(_) => self.set(Phase::Cut(Why::Bell)),
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

    pub(super) async fn read(&self, mut buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        let come = || {
            Ok(match self.incoming()? {
                None => Some(0),
                Some(0) => None,
                Some(bytes) => Some(bytes),
            })
        };
        let received = match self.wait(Awaited::DATA, come).await {
            Ok(0) => return (Ok(0), buffer),
            Ok(bytes) => {
                let room = buffer.capacity() - buffer.len();
                self.end.borrow_mut().receive(bytes.min(room), &mut buffer)
            }
            Err(fault) => Err(fault),
        };
        match received {
            Ok(moved) => {
                if moved.rings {
                    ring(&self.bell);
                }
                (Ok(moved.bytes), buffer)
            }
            Err(fault) => (Err(self.distrust(fault)), buffer),
        }
    }

    pub(super) async fn write_all(&self, bytes: Vec<u8>) -> (io::Result<()>, Vec<u8>) {
        let mut rest = bytes.as_slice();
        loop {
            if self.cut().is_some() {
                return (Err(io::ErrorKind::BrokenPipe.into()), bytes);
            }
            let sent = self.end.borrow_mut().send(rest);
            match sent {
                Ok(moved) => {
                    rest = &rest[moved.bytes..];
                    if moved.rings {
                        ring(&self.bell);
                    }
                }
                Err(fault) => return (Err(self.distrust(fault)), bytes),
            }
            if rest.is_empty() {
                return (Ok(()), bytes);
            }
            let room = || {
                let is_room = self.cut().is_some() || self.end.borrow_mut().room_bytes()? > 0;
                Ok(is_room.then_some(()))
            };
            if let Err(fault) = self.wait(Awaited::ROOM, room).await {
                return (Err(self.distrust(fault)), bytes);
            }
        }
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
