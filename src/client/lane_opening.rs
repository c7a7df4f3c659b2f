//! How a daemon hands over a shm lane: by descriptors that come with its reply.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::error::{Error, Kind, Result};
use crate::lane::{LANE_LAYOUT, LaneEnd, LaneFault, LaneMemory, LaneSide, LaneSizes};
use crate::wire::{LaneOpened, features};

/// Bytes of one read of a reply that comes with descriptors.
const READ_BYTES: usize = 4 << 10;
/// Descriptors of a lane: its memory and its bell.
const DESCRIPTORS_MAX: usize = 2;

/// Checks that a daemon with these features offers lanes.
///
/// # Errors
/// [`Kind::Unsupported`].
pub(super) fn has_lanes(features_served: u64) -> Result<()> {
    if features_served & features::LANES == 0 {
        let remedy = "raise serve.lanes_max, or go without a lane";
        return Err(Error::new(Kind::Unsupported, "the daemon has no lanes", remedy));
    }
    Ok(())
}

/// Receives bytes and the descriptors that come with them, and appends both. It never waits. Answers with the number of
/// bytes, 0 at the end of the stream.
pub(super) fn receive(socket: impl AsFd, bytes: &mut Vec<u8>, descriptors: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut received = [0; READ_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = recvmsg(socket, &mut [IoSliceMut::new(&mut received)], &mut control, flags)?;
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            descriptors.extend(rights);
        }
    }
    bytes.extend_from_slice(&received[..message.bytes]);
    Ok(message.bytes)
}

/// Maps a lane: answers with the gateway's ends of the lane and of its bell.
///
/// # Errors
/// [`Kind::System`] if the descriptors did not arrive; [`Kind::Unsupported`] for another layout; [`Kind::Malformed`].
pub(super) fn map(opened: LaneOpened, descriptors: Vec<OwnedFd>) -> Result<(LaneEnd, UnixStream)> {
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
    Ok((LaneEnd::new(LaneMemory::map(&memory, sizes)?, LaneSide::Gateway), bell.into()))
}

/// The error for a lane that cannot be used any more.
pub(super) fn broken_lane(fault: &LaneFault) -> Error {
    // A daemon that closes a lane empties its memory, which looks like an invalid position.
    let what = format!("the lane was closed or cannot be trusted: {fault}");
    Error::new(Kind::Connection, what, "connect again; the daemon's log says why if it did not end")
}
