//! Reads and writes of a daemon's socket that never wait.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::io::retry_on_intr;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recv, recvmsg, send};

/// Bytes of one read.
const READ_BYTES: usize = 64 << 10;
/// Bytes of one read of a reply that may come with descriptors.
const BEGINNING_READ_BYTES: usize = 4 << 10;
/// Descriptors of a lane: its memory and its bell.
const DESCRIPTORS_MAX: usize = 2;

/// Sends as many of `bytes` as the socket takes. Returns how many. If the daemon reads no more, it says that all were sent: the
/// daemon may have answered earlier requests, or sent a reason. The next reads find that, and then the end.
pub(super) fn write(socket: impl AsFd, bytes: &[u8]) -> io::Result<usize> {
    let sent = retry_on_intr(|| send(&socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL));
    match sent.map_err(io::Error::from) {
        Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
            Ok(bytes.len())
        }
        sent => sent,
    }
}

/// Appends what the socket has to `received`. Returns the number of bytes, and whether more may be there.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if the socket has nothing; [`io::ErrorKind::UnexpectedEof`] at the end of the stream.
pub(super) fn read(socket: impl AsFd, received: &mut Vec<u8>) -> io::Result<(usize, bool)> {
    received.reserve(READ_BYTES);
    let room = received.spare_capacity_mut().len();
    match retry_on_intr(|| recv(&socket, spare_capacity(received), RecvFlags::DONTWAIT))? {
        (_, 0) => Err(io::ErrorKind::UnexpectedEof.into()),
        (_, bytes) => Ok((bytes, bytes == room)),
    }
}

/// As [`read`], for replies that may come with descriptors, which it appends.
pub(super) fn read_with_descriptors(
    socket: impl AsFd,
    received: &mut Vec<u8>,
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut bytes = [0; BEGINNING_READ_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = retry_on_intr(|| recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags))?;
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            descriptors.extend(rights);
        }
    }
    if message.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    received.extend_from_slice(&bytes[..message.bytes]);
    Ok(message.bytes)
}
