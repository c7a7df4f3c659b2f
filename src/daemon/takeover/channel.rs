//! One message at a time over a Unix socket that keeps messages apart, each with its descriptors, within limits of bytes,
//! descriptors and time.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, sendmsg, socket_with,
};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use super::messages::{decode, encode};
use crate::error::{Error, Kind, Result};
use crate::limits::{TAKEOVER_DESCRIPTORS_MAX, TAKEOVER_MESSAGE_BYTES_MAX};
use crate::serve::AdminCaller;

/// Why no message came.
#[derive(Debug)]
pub(super) enum Silence {
    /// The other process has closed the connection, or has died.
    Ended,
    /// It said nothing in time.
    Late,
    /// What it sent cannot be used.
    Nonsense(Error),
    /// This daemon ends.
    Stopped,
}

/// One end of a conversation.
#[derive(Debug)]
pub(super) struct Channel {
    socket: OwnedFd,
    peer: AdminCaller,
}

impl Channel {
    /// A connection that was accepted or made, if its other end is a process of the same user, or of root.
    ///
    /// # Errors
    /// `NotPermitted` if it is not.
    pub(super) fn of(socket: OwnedFd) -> Result<Self> {
        let peer = socket_peercred(&socket).map_err(|cause| {
            Error::new(Kind::System, "the kernel does not say whose the other daemon is", "see the cause")
                .caused_by(io::Error::from(cause))
        })?;
        if !(peer.uid == geteuid() || peer.uid.is_root()) {
            let what = format!("user {} may not take part in a takeover", peer.uid.as_raw());
            return Err(Error::new(Kind::NotPermitted, what, "run both daemons as the same user"));
        }
        let pid = Some(peer.pid.as_raw_pid()).filter(|pid| *pid > 0);
        Ok(Self { socket, peer: AdminCaller { uid: peer.uid.as_raw(), pid } })
    }

    /// The process at the other end, as the kernel saw it when the connection was made.
    pub(super) const fn peer(&self) -> AdminCaller {
        self.peer
    }

    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// `Config` if no daemon listens there.
    pub(super) fn connect(path: &Path) -> Result<Self> {
        let absent = |cause: Errno| {
            let what = format!("no daemon can be taken over at {}", path.display());
            let remedy = "name the socket of a running daemon of this version, or start without --take-over";
            Error::new(Kind::Config, what, remedy).caused_by(io::Error::from(cause))
        };
        let address = SocketAddrUnix::new(path).map_err(absent)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(absent)?;
        connect(&socket, &address).map_err(absent)?;
        Self::of(socket)
    }

    /// Sends a message with descriptors until `deadline`.
    ///
    /// # Errors
    /// The other end is gone, or reads nothing.
    pub(super) fn send(
        &self,
        message: &impl Serialize,
        descriptors: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> io::Result<()> {
        let bytes = encode(message);
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(TAKEOVER_DESCRIPTORS_MAX))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, flags) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if Instant::now() < deadline => {
                    wait(&[PollFd::new(&self.socket, PollFlags::OUT)], deadline)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Receives a message with its descriptors until `deadline`. If `stop` becomes readable before, it ends with `Stopped`.
    pub(super) fn receive<T: for<'a> Deserialize<'a>>(
        &self,
        deadline: Instant,
        stop: Option<BorrowedFd<'_>>,
    ) -> std::result::Result<(T, Vec<OwnedFd>), Silence> {
        loop {
            match self.try_receive() {
                Ok(received) => return received,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {}
                // A connection that was reset has ended.
                Err(_) => return Err(Silence::Ended),
            }
            if Instant::now() >= deadline {
                return Err(Silence::Late);
            }
            let mut polled = vec![PollFd::new(&self.socket, PollFlags::IN)];
            polled.extend(stop.as_ref().map(|stop| PollFd::new(stop, PollFlags::IN)));
            match wait(&polled, deadline) {
                Ok(ready) if ready.get(1).copied().unwrap_or(false) => return Err(Silence::Stopped),
                Ok(_) => {}
                Err(error) => {
                    return Err(Silence::Nonsense(super::failed("cannot wait for the other daemon").caused_by(error)));
                }
            }
        }
    }

    /// Receives what is there.
    fn try_receive<T: for<'a> Deserialize<'a>>(
        &self,
    ) -> std::result::Result<std::result::Result<(T, Vec<OwnedFd>), Silence>, Errno> {
        let mut bytes = [0; TAKEOVER_MESSAGE_BYTES_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(TAKEOVER_DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
        let mut descriptors = Vec::new();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = part {
                descriptors.extend(rights);
            }
        }
        if received.bytes == 0 {
            let nothing = || Silence::Nonsense(super::failed("the other daemon sent an empty message"));
            return Ok(Err(if self.has_ended() { Silence::Ended } else { nothing() }));
        }
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Ok(Err(Silence::Nonsense(super::failed("a message of the other daemon is too long"))));
        }
        Ok(decode(&bytes[..received.bytes]).map(|message| (message, descriptors)).map_err(Silence::Nonsense))
    }

    /// Whether the other end has closed its side.
    pub(super) fn has_ended(&self) -> bool {
        let mut polled = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let ended = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
        poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().intersects(ended)
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Waits until one of these is ready, or `deadline`. Answers which are.
pub(super) fn wait(polled: &[PollFd<'_>], deadline: Instant) -> io::Result<Vec<bool>> {
    let mut polled = polled.to_vec();
    let left = deadline.saturating_duration_since(Instant::now());
    let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    match poll(&mut polled, Some(&left)) {
        Ok(_) | Err(Errno::INTR) => Ok(polled.iter().map(|one| !one.revents().is_empty()).collect()),
        Err(error) => Err(error.into()),
    }
}

/// The time in this number of milliseconds.
pub(super) fn after_ms(ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(ms)
}

/// A new memory file, to be passed on.
///
/// # Errors
/// No descriptor is left.
pub(super) fn memory_file() -> io::Result<File> {
    const NAME: &str = "kvrouted-takeover";
    let file = match memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL) {
        // Linux before 6.3.
        Err(Errno::INVAL) => memfd_create(NAME, MemfdFlags::CLOEXEC)?,
        made => made?,
    };
    Ok(File::from(file))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::net::socketpair;

    use super::super::messages::Request;
    use super::*;

    fn pair() -> (Channel, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (Channel::of(one).unwrap(), other)
    }

    #[test]
    fn messages_come_whole_with_their_own_descriptors() {
        let (one, other) = pair();
        let other = Channel::of(other).unwrap();
        let file = memory_file().unwrap();
        (&file).write_all(b"x").unwrap();
        one.send(&Request::Workers, &[], after_ms(1000)).unwrap();
        one.send(&Request::Taken, &[file.as_fd(), file.as_fd()], after_ms(1000)).unwrap();
        drop(one);
        let (first, none): (Request, _) = other.receive(after_ms(1000), None).unwrap();
        let (second, two): (Request, _) = other.receive(after_ms(1000), None).unwrap();
        assert_eq!((first, none.len(), second, two.len()), (Request::Workers, 0, Request::Taken, 2));
        assert!(matches!(other.receive::<Request>(after_ms(1000), None), Err(Silence::Ended)), "after what was sent");
        assert!(other.has_ended());
    }

    #[test]
    fn what_is_too_long_or_nonsense_is_named_and_silence_ends() {
        let (one, other) = pair();
        rustix::net::send(&other, &vec![b'x'; TAKEOVER_MESSAGE_BYTES_MAX + 1], SendFlags::NOSIGNAL).unwrap();
        rustix::net::send(&other, b"nonsense", SendFlags::NOSIGNAL).unwrap();
        for _ in 0..2 {
            assert!(matches!(one.receive::<Request>(after_ms(1000), None), Err(Silence::Nonsense(_))));
        }
        assert!(matches!(one.receive::<Request>(after_ms(1), None), Err(Silence::Late)));
        assert!(!one.has_ended());
        let (stopped, stop) = std::os::unix::net::UnixStream::pair().unwrap();
        drop(stop);
        assert!(matches!(one.receive::<Request>(after_ms(60_000), Some(stopped.as_fd())), Err(Silence::Stopped)));
    }
}
