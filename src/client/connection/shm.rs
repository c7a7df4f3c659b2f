//! A blocking client's end of a shm lane.

use std::hint::spin_loop;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::Timespec;

use super::LaneUse;
use super::transport::Inbox;
use super::transport::{closed, timed_out};
use super::{Client, unexpected};
use crate::client::lane_opening::{self, broken_lane};
use crate::error::{Error, Kind, Result};
use crate::lane::{Awaited, Heard, LaneEnd, LaneFault, hear, ring};
use crate::limits::LANE_POLLS_PER_CLOCK;
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
    /// The awaited words or room are there.
    Ready,
    /// The connection's socket is readable, or has ended.
    Socket,
}

impl Lane {
    /// Maps an opened lane.
    fn map(opened: LaneOpened, descriptors: Vec<OwnedFd>, spin: Duration) -> Result<Self> {
        let (end, bell) = lane_opening::map(opened, descriptors)?;
        Ok(Self { end, bell, spin, inbox: Inbox::default() })
    }

    /// Sends as many of `bytes` as there is room for. Answers with how many.
    pub(super) fn send(&mut self, bytes: &[u8]) -> Result<usize> {
        let moved = self.end.send(bytes).map_err(|fault| broken_lane(&fault))?;
        if moved.rings {
            ring(&self.bell);
        }
        Ok(moved.bytes)
    }

    /// Receives what has arrived. Answers with the number of bytes.
    pub(super) fn receive(&mut self) -> Result<usize> {
        let moved = self.end.receive(usize::MAX, self.inbox.room()).map_err(|fault| broken_lane(&fault))?;
        if moved.rings {
            ring(&self.bell);
        }
        Ok(moved.bytes)
    }

    fn is_ready(&mut self, awaited: Awaited) -> Result<bool> {
        let is_room = |end: &mut LaneEnd| Ok(awaited != Awaited::DATA && end.room_bytes()? > 0);
        let is_data = |end: &mut LaneEnd| Ok(awaited != Awaited::ROOM && end.incoming_bytes()? > 0);
        let ready: Result<bool, LaneFault> =
            is_data(&mut self.end).and_then(|data| Ok(data || is_room(&mut self.end)?));
        ready.map_err(|fault| broken_lane(&fault))
    }

    /// Waits for data, for room or for either, or for the connection's socket: busy-polls for `spin`, then sleeps.
    pub(super) fn wait(&mut self, awaited: Awaited, socket: &UnixStream, timeout: Option<Duration>) -> Result<Woken> {
        let began = Instant::now();
        loop {
            for _ in 0..LANE_POLLS_PER_CLOCK {
                if self.is_ready(awaited)? {
                    return Ok(Woken::Ready);
                }
                spin_loop();
            }
            if began.elapsed() >= self.spin {
                break;
            }
        }
        loop {
            self.end.announce(awaited);
            // Checks for words that arrived before the daemon could know that this side sleeps.
            let woken = if self.is_ready(awaited)? { Ok(Woken::Ready) } else { self.sleep(socket, (began, timeout)) };
            self.end.settle(awaited);
            if self.is_ready(awaited)? {
                return Ok(Woken::Ready);
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
            Ok(0) => return Err(timed_out(timeout)),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(closed().caused_by(std::io::Error::from(error))),
        }
        if !fds[1].revents().is_empty() {
            return Ok(Woken::Socket);
        }
        if !fds[0].revents().is_empty() && hear(&self.bell) == Heard::Gone {
            return Err(closed());
        }
        Ok(Woken::Ready)
    }
}

impl Client {
    /// Opens a lane, as `wanted`. It then carries all requests and replies.
    pub(super) fn begin_lane(&mut self, wanted: LaneUse, spin: Duration) -> Result<()> {
        if wanted == LaneUse::Off {
            return Ok(());
        }
        match self.open_lane(spin) {
            Ok(lane) => self.transport.use_lane(lane),
            Err(error) if wanted == LaneUse::Require || error.kind() == Kind::Connection => return Err(error),
            Err(error) => self.lane_refusal = Some(error),
        }
        Ok(())
    }

    fn open_lane(&mut self, spin: Duration) -> Result<Lane> {
        lane_opening::has_lanes(self.hello.features)?;
        let id = self.take_id();
        self.encoder.open_lane(id, LaneAsked::default(), &mut self.unsent);
        self.flush()?;
        let (reply, descriptors) = self.transport.recv_with_descriptors(id)?;
        match reply {
            Reply::OpenLane(opened) => Lane::map(opened, descriptors, spin),
            other => Err(unexpected("open_lane", &other)),
        }
    }

    /// Whether the connection uses a shm lane.
    #[must_use]
    pub const fn has_lane(&self) -> bool {
        self.transport.has_lane()
    }

    /// Why the connection has no lane, though one was requested.
    #[must_use]
    pub const fn lane_refusal(&self) -> Option<&Error> {
        self.lane_refusal.as_ref()
    }
}
