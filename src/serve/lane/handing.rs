//! Descriptors on their way to a gateway.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::opening::Handed;
use crate::limits::{LANE_HAND_OVER_MS_MAX, LANE_HAND_OVER_REST_MS};

/// Sends descriptors with the first of `bytes`; gives how many of those went with them. A socket that takes nothing is
/// tried again for a while: whoever asks for a lane reads.
pub(in crate::serve) async fn hand_over(socket: BorrowedFd<'_>, bytes: &[u8], handed: &Handed) -> io::Result<usize> {
    for _ in 0..LANE_HAND_OVER_MS_MAX / LANE_HAND_OVER_REST_MS {
        match send(socket, bytes, handed) {
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            sent => return sent,
        }
        tokio::time::sleep(Duration::from_millis(LANE_HAND_OVER_REST_MS)).await;
    }
    Err(io::ErrorKind::TimedOut.into())
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], handed: &Handed) -> io::Result<usize> {
    let descriptors = [handed.memory.as_fd(), handed.bell.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags).map_err(Into::into)
}
