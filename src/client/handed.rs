//! A lane as a daemon hands it over: descriptors that come with its reply, and what they are.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::error::{Error, Kind, Result};
use crate::lane::{LANE_LAYOUT, LaneEnd, LaneFault, LaneMemory, LaneSide, LaneSizes};
use crate::wire::{LaneOpened, features};

/// Bytes read at once of a reply that comes with descriptors.
const HANDED_BYTES: usize = 4 << 10;
/// Descriptors taken with it.
const DESCRIPTORS_MAX: usize = 2;

/// Whether a daemon of these features has lanes to give.
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

/// Receives bytes and the descriptors that come with them, each behind what is there; never waits. Gives how many bytes
/// came, 0 at the end of the stream.
pub(super) fn receive(socket: impl AsFd, bytes: &mut Vec<u8>, descriptors: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut came = [0; HANDED_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = recvmsg(socket, &mut [IoSliceMut::new(&mut came)], &mut control, flags)?;
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            descriptors.extend(rights);
        }
    }
    bytes.extend_from_slice(&came[..message.bytes]);
    Ok(message.bytes)
}

/// The gateway's end of a lane that was opened, and of its bell.
///
/// # Errors
/// [`Kind::System`] where the descriptors did not come; [`Kind::Unsupported`] for another layout; [`Kind::Malformed`].
pub(super) fn take_over(opened: LaneOpened, descriptors: Vec<OwnedFd>) -> Result<(LaneEnd, UnixStream)> {
    let Ok([memory, bell]) = <[OwnedFd; 2]>::try_from(descriptors) else {
        let what = "the descriptors of a lane did not arrive";
        return Err(Error::new(Kind::System, what, "raise the limit of open files, or go without a lane"));
    };
    if opened.layout != LANE_LAYOUT {
        let what = format!("the daemon's lanes are of layout {}, not {LANE_LAYOUT}", opened.layout);
        return Err(Error::new(Kind::Unsupported, what, "use both from one release, or go without a lane"));
    }
    let sizes = LaneSizes::told(opened.request_ring_bytes, opened.reply_ring_bytes)?;
    Ok((LaneEnd::new(LaneMemory::map(&memory, sizes)?, LaneSide::Gateway), bell.into()))
}

/// Why a lane is of no more use.
pub(super) fn distrust(fault: &LaneFault) -> Error {
    // A daemon that closes a lane empties its memory.
    let what = format!("the lane was closed or cannot be trusted: {fault}");
    Error::new(Kind::Connection, what, "connect again; the daemon's log says why if it did not end")
}
