//! The gateway's end of a shm lane, and how a daemon hands it over: by descriptors that come with its reply.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::error::{Error, Kind, Result};
use crate::lane::{Awaited, LANE_LAYOUT, LaneEnd, LaneFault, LaneMemory, LaneSide, LaneSizes, Moved, ring};
use crate::wire::LaneOpened;

/// The gateway's end of a lane and of its bell, which a driver waits for as a `B`.
#[derive(Debug)]
pub(super) struct Lane<B> {
    end: LaneEnd,
    bell: B,
}

impl<B: AsFd> Lane<B> {
    /// Maps an opened lane. `watch` makes the bell one that the driver can wait for.
    ///
    /// # Errors
    /// [`Kind::System`] if the descriptors did not arrive; [`Kind::Unsupported`] for another layout; [`Kind::Malformed`]; those
    /// of `watch`.
    pub(super) fn map(
        opened: LaneOpened,
        descriptors: Vec<OwnedFd>,
        watch: impl FnOnce(UnixStream) -> Result<B>,
    ) -> Result<Self> {
        let Ok([memory, bell]) = <[OwnedFd; 2]>::try_from(descriptors) else {
            let what = "the descriptors of a lane did not arrive";
            return Err(Error::new(Kind::System, what, "raise the limit of open files, or go without a lane"));
        };
        if opened.layout != LANE_LAYOUT {
            let what = format!("the daemon's lanes have layout {}, not {LANE_LAYOUT}", opened.layout);
            return Err(Error::new(
                Kind::Unsupported,
                what,
                "use a client and a daemon of the same release, or go without a lane",
            ));
        }
        let sizes = LaneSizes::granted(opened.request_ring_bytes, opened.reply_ring_bytes)?;
        let end = LaneEnd::new(LaneMemory::map(&memory, sizes)?, LaneSide::Gateway);
        Ok(Self { end, bell: watch(bell.into())? })
    }

    /// The bell, which rings when the daemon has moved a position.
    pub(super) const fn bell(&self) -> &B {
        &self.bell
    }

    /// Sends as many of `bytes` as there is room for. Returns how many.
    pub(super) fn send(&mut self, bytes: &[u8]) -> Result<usize, LaneFault> {
        let moved = self.end.send(bytes)?;
        Ok(self.ring_if_awaited(moved))
    }

    /// Appends received bytes to `out`. Returns how many.
    pub(super) fn receive(&mut self, out: &mut Vec<u8>) -> Result<usize, LaneFault> {
        let moved = self.end.receive(usize::MAX, out)?;
        Ok(self.ring_if_awaited(moved))
    }

    fn ring_if_awaited(&self, moved: Moved) -> usize {
        if moved.rings {
            ring(&self.bell);
        }
        moved.bytes
    }

    /// Whether the awaited words or room are there.
    pub(super) fn is_ready(&mut self, awaited: Awaited) -> Result<bool, LaneFault> {
        Ok(self.end.incoming_bytes()? > 0 || (awaited == Awaited::BOTH && self.end.room_bytes()? > 0))
    }

    /// Takes cache lines of the next bytes to send. Call it while busy-polling.
    pub(super) fn own_ahead(&mut self) {
        self.end.own_ahead();
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

/// The error for a lane that cannot be used any more.
pub(super) fn broken_lane(fault: &LaneFault) -> Error {
    // A daemon that closes a lane empties its memory, which looks like an invalid position.
    let what = format!("the lane was closed or cannot be trusted: {fault}");
    Error::new(Kind::Connection, what, "connect again; the daemon's log says why if it did not end")
}
