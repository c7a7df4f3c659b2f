//! The shm lane of a connection that many tasks share. A task writes its request into the ring at once. The task behind the
//! client sends requests that found no room, and receives.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::client::lane_opening;
use crate::error::{Error, Kind, Result};
use crate::lane::{Awaited, Heard, LaneEnd, LaneFault, hear, ring};
use crate::wire::LaneOpened;

/// The gateway's end of a lane.
pub(super) struct Lane {
    end: LaneEnd,
    bell: Arc<UnixStream>,
}

impl Lane {
    /// Maps an opened lane.
    ///
    /// # Errors
    /// As [`lane_opening::map`], and if its bell cannot be watched.
    pub(super) fn map(opened: LaneOpened, descriptors: Vec<OwnedFd>) -> Result<Self> {
        let (end, bell) = lane_opening::map(opened, descriptors)?;
        let watched = bell.set_nonblocking(true).and_then(|()| UnixStream::from_std(bell));
        let bell = watched.map_err(|error| {
            let remedy = "raise the limit of open files, or go without a lane";
            Error::new(Kind::System, "the bell of a lane cannot be watched", remedy).caused_by(error)
        })?;
        Ok(Self { end, bell: Arc::new(bell) })
    }

    /// The bell, which rings when the daemon has moved a position.
    pub(super) fn bell(&self) -> Arc<UnixStream> {
        Arc::clone(&self.bell)
    }

    /// Sends as much of `unsent` as there is room for, and removes it from there.
    pub(super) fn send(&mut self, unsent: &mut Vec<u8>) -> Result<(), LaneFault> {
        if unsent.is_empty() {
            return Ok(());
        }
        let moved = self.end.send(unsent)?;
        if moved.rings {
            ring(&self.bell);
        }
        unsent.drain(..moved.bytes);
        Ok(())
    }

    /// Appends received bytes to `out`.
    pub(super) fn receive(&mut self, out: &mut Vec<u8>) -> Result<(), LaneFault> {
        let moved = self.end.receive(usize::MAX, out)?;
        if moved.rings {
            ring(&self.bell);
        }
        Ok(())
    }

    /// Whether the awaited words or room are there.
    pub(super) fn is_ready(&mut self, awaited: Awaited) -> Result<bool, LaneFault> {
        Ok(self.end.incoming_bytes()? > 0 || (awaited == Awaited::BOTH && self.end.room_bytes()? > 0))
    }

    /// Announces what this side is about to sleep for. Check once more before sleeping.
    pub(super) fn announce(&self, awaited: Awaited) {
        self.end.announce(awaited);
    }

    /// Withdraws any announcement.
    pub(super) fn settle(&self) {
        self.end.settle(Awaited::BOTH);
    }
}

/// Waits until a bell rings.
///
/// # Errors
/// [`Kind::Connection`] if the daemon has closed its end.
pub(super) async fn rung(bell: &UnixStream) -> Result<()> {
    let ended = |error: std::io::Error| crate::client::lost().caused_by(error);
    bell.readable().await.map_err(ended)?;
    let mut heard = Heard::Quiet;
    // Reports WouldBlock, so that the next wait is for the next ring.
    let emptied = bell.try_io(Interest::READABLE, || {
        heard = hear(bell);
        Err::<(), _>(std::io::ErrorKind::WouldBlock.into())
    });
    drop(emptied);
    match heard {
        Heard::Quiet => Ok(()),
        Heard::Gone => Err(ended(std::io::ErrorKind::UnexpectedEof.into())),
    }
}
