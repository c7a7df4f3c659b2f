//! The lane of a connection that many tasks share. Who asks something writes it into the ring at once; the task behind
//! the client sends what found no room, and receives.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::client::handed;
use crate::error::{Error, Kind, Result};
use crate::lane::{Awaited, Heard, LaneEnd, LaneFault, hear, ring};
use crate::wire::LaneOpened;

/// The gateway's end of a lane.
pub(super) struct Lane {
    end: LaneEnd,
    bell: Arc<UnixStream>,
}

impl Lane {
    /// Takes over a lane that was opened.
    ///
    /// # Errors
    /// As [`handed::take_over`].
    pub(super) fn take_over(opened: LaneOpened, descriptors: Vec<OwnedFd>) -> Result<Self> {
        let (end, bell) = handed::take_over(opened, descriptors)?;
        let watched = bell.set_nonblocking(true).and_then(|()| UnixStream::from_std(bell));
        let bell = watched.map_err(|error| {
            let remedy = "raise the limit of open files, or go without a lane";
            Error::new(Kind::System, "the bell of a lane cannot be watched", remedy).caused_by(error)
        })?;
        Ok(Self { end, bell: Arc::new(bell) })
    }

    /// What rings when the daemon has moved something.
    pub(super) fn bell(&self) -> Arc<UnixStream> {
        Arc::clone(&self.bell)
    }

    /// Sends what there is room for, and takes it out of `unsent`.
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

    /// Receives what has come behind what `out` holds.
    pub(super) fn receive(&mut self, out: &mut Vec<u8>) -> Result<(), LaneFault> {
        let moved = self.end.receive(usize::MAX, out)?;
        if moved.rings {
            ring(&self.bell);
        }
        Ok(())
    }

    /// Whether there is what is waited for.
    pub(super) fn is_there(&mut self, awaited: Awaited) -> Result<bool, LaneFault> {
        Ok(self.end.incoming_bytes()? > 0 || (awaited == Awaited::BOTH && self.end.room_bytes()? > 0))
    }

    /// Says what is about to be slept for; look once more before that.
    pub(super) fn announce(&self, awaited: Awaited) {
        self.end.announce(awaited);
    }

    /// Takes that back, whatever it was.
    pub(super) fn settle(&self) {
        self.end.settle(Awaited::BOTH);
    }
}

/// Waits until a bell has rung.
///
/// # Errors
/// [`Kind::Connection`] where the daemon has let go of it.
pub(super) async fn rung(bell: &UnixStream) -> Result<()> {
    let ended = |error: std::io::Error| crate::client::lost().caused_by(error);
    bell.readable().await.map_err(ended)?;
    let mut heard = Heard::Quiet;
    // Said to be empty, so that the next ring is waited for.
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
