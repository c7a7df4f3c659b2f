//! A client's end of a lane.

use std::hint::spin_loop;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::Timespec;

use super::inbox::Inbox;
use super::link::{gone, silent};
use super::options::LaneUse;
use super::{Client, unexpected};
use crate::client::handed::{self, distrust};
use crate::error::{Error, Kind, Result};
use crate::lane::{Awaited, Heard, LaneEnd, LaneFault, hear, ring};
use crate::limits::LANE_LOOKS_PER_CLOCK;
use crate::wire::{LaneAsked, LaneOpened, Reply};

/// The lane of a connection.
#[derive(Debug)]
pub(super) struct Lane {
    end: LaneEnd,
    bell: UnixStream,
    spin: Duration,
    pub(super) inbox: Inbox,
}

/// What ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Woken {
    /// What was waited for is there.
    There,
    /// The connection's socket has something to say, or has ended.
    Socket,
}

impl Lane {
    /// Maps a lane that was opened.
    fn map(opened: LaneOpened, descriptors: Vec<OwnedFd>, spin: Duration) -> Result<Self> {
        let (end, bell) = handed::take_over(opened, descriptors)?;
        Ok(Self { end, bell, spin, inbox: Inbox::default() })
    }

    /// Sends as much of `bytes` as there is room for; gives how much.
    pub(super) fn send(&mut self, bytes: &[u8]) -> Result<usize> {
        let moved = self.end.send(bytes).map_err(|fault| distrust(&fault))?;
        if moved.rings {
            ring(&self.bell);
        }
        Ok(moved.bytes)
    }

    /// Receives what has come; gives how much.
    pub(super) fn receive(&mut self) -> Result<usize> {
        let moved = self.end.receive(usize::MAX, self.inbox.room()).map_err(|fault| distrust(&fault))?;
        if moved.rings {
            ring(&self.bell);
        }
        Ok(moved.bytes)
    }

    fn is_there(&mut self, awaited: Awaited) -> Result<bool> {
        let is_room = |end: &mut LaneEnd| Ok(awaited != Awaited::DATA && end.room_bytes()? > 0);
        let is_data = |end: &mut LaneEnd| Ok(awaited != Awaited::ROOM && end.incoming_bytes()? > 0);
        let there: Result<bool, LaneFault> =
            is_data(&mut self.end).and_then(|data| Ok(data || is_room(&mut self.end)?));
        there.map_err(|fault| distrust(&fault))
    }

    /// Waits for data, room or either, first by looking and then asleep, or for the connection's socket.
    pub(super) fn wait(&mut self, awaited: Awaited, socket: &UnixStream, timeout: Option<Duration>) -> Result<Woken> {
        let began = Instant::now();
        loop {
            for _ in 0..LANE_LOOKS_PER_CLOCK {
                if self.is_there(awaited)? {
                    return Ok(Woken::There);
                }
                spin_loop();
            }
            if began.elapsed() >= self.spin {
                break;
            }
        }
        loop {
            self.end.announce(awaited);
            // What came before the daemon could know that this side sleeps.
            let woken = if self.is_there(awaited)? { Ok(Woken::There) } else { self.sleep(socket, (began, timeout)) };
            self.end.settle(awaited);
            if self.is_there(awaited)? {
                return Ok(Woken::There);
            }
            if woken? == Woken::Socket {
                return Ok(Woken::Socket);
            }
        }
    }

    /// Sleeps until the bell rings or the socket is readable.
    fn sleep(&self, socket: &UnixStream, (began, timeout): (Instant, Option<Duration>)) -> Result<Woken> {
        let left = timeout.map(|timeout| timeout.saturating_sub(began.elapsed()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = [PollFd::new(&self.bell, PollFlags::IN), PollFd::new(socket, PollFlags::IN)];
        match poll(&mut fds, left.as_ref()) {
            Ok(0) => return Err(silent(timeout)),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(gone().caused_by(std::io::Error::from(error))),
        }
        if !fds[1].revents().is_empty() {
            return Ok(Woken::Socket);
        }
        if !fds[0].revents().is_empty() && hear(&self.bell) == Heard::Gone {
            return Err(gone());
        }
        Ok(Woken::There)
    }
}

impl Client {
    /// Opens a lane, as `wanted`. From then on everything goes by it.
    pub(super) fn begin_lane(&mut self, wanted: LaneUse, spin: Duration) -> Result<()> {
        if wanted == LaneUse::Off {
            return Ok(());
        }
        match self.open_lane(spin) {
            Ok(lane) => self.link.use_lane(lane),
            Err(error) if wanted == LaneUse::Require || error.kind() == Kind::Connection => return Err(error),
            Err(error) => self.lane_refusal = Some(error),
        }
        Ok(())
    }

    fn open_lane(&mut self, spin: Duration) -> Result<Lane> {
        handed::has_lanes(self.hello.features)?;
        let id = self.take_id();
        self.encoder.open_lane(id, LaneAsked::default(), &mut self.unsent);
        self.flush()?;
        let (reply, descriptors) = self.link.recv_handed(id)?;
        match reply {
            Reply::OpenLane(opened) => Lane::map(opened, descriptors, spin),
            other => Err(unexpected("open_lane", &other)),
        }
    }

    /// Whether requests and replies go by a lane.
    #[must_use]
    pub const fn has_lane(&self) -> bool {
        self.link.has_lane()
    }

    /// Why they go by the socket though a lane was to be tried.
    #[must_use]
    pub const fn lane_refusal(&self) -> Option<&Error> {
        self.lane_refusal.as_ref()
    }
}
