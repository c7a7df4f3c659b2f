//! Bytes and frames between a client and its daemon.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send, socket_with,
};
use rustix::time::Timespec;

use super::frame::next_frame;
use crate::error::{Error, Kind, Result};
use crate::ids::CorrelationId;
use crate::wire::Reply;

/// Bytes read at once.
const READ_BYTES: usize = 64 << 10;
/// How long to rest before trying a listener again whose backlog is full.
const CONNECT_REST: Duration = Duration::from_millis(5);

/// A connected socket that never blocks by itself: every wait is a poll with the client's timeout.
#[derive(Debug)]
pub(super) struct Link {
    stream: UnixStream,
    timeout: Option<Duration>,
    received: Vec<u8>,
    /// Bytes of `received` that are read already.
    consumed: usize,
}

impl Link {
    /// Connects.
    pub(super) fn connect(path: &Path, timeout: Option<Duration>) -> Result<Self> {
        let cannot = |error: std::io::Error| {
            let remedy = "start the daemon with `kvrouted serve`, or give the --socket it listens on";
            Error::new(Kind::Connection, format!("cannot connect to {}", path.display()), remedy).caused_by(error)
        };
        let address = SocketAddrUnix::new(path).map_err(|error| cannot(error.into()))?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(|error| cannot(error.into()))?;
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            match connect(&socket, &address) {
                Ok(()) => break,
                Err(Errno::INTR) => {}
                // The backlog is full; a Unix socket cannot be polled for room in it.
                Err(Errno::AGAIN) if deadline.is_none_or(|deadline| Instant::now() < deadline) => {
                    std::thread::sleep(CONNECT_REST);
                }
                Err(error) => return Err(cannot(error.into())),
            }
        }
        Ok(Self { stream: socket.into(), timeout, received: Vec::new(), consumed: 0 })
    }

    /// Waits for as long as it takes from now on.
    pub(super) const fn wait_for_ever(&mut self) {
        self.timeout = None;
    }

    /// Sends all of `bytes`, reading what comes meanwhile.
    pub(super) fn send(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            match send(&self.stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let ready = self.wait(PollFlags::IN | PollFlags::OUT)?;
                    if ready.contains(PollFlags::IN) {
                        self.read()?;
                    }
                }
                // The daemon takes no more, but may have answered what came before, or said why: `recv`
                // gives that out, and then the end.
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                Err(error) => return Err(gone().caused_by(std::io::Error::from(error))),
            }
        }
        Ok(())
    }

    /// Waits for the next reply.
    pub(super) fn recv(&mut self) -> Result<(CorrelationId, Reply)> {
        loop {
            if let Some(reply) = self.next_reply()? {
                return Ok(reply);
            }
            self.wait(PollFlags::IN)?;
            self.read()?;
        }
    }

    fn next_reply(&mut self) -> Result<Option<(CorrelationId, Reply)>> {
        let rest = self.received.get(self.consumed..).unwrap_or_default();
        let Some(frame) = next_frame(rest)? else { return Ok(None) };
        self.consumed += frame.bytes;
        Ok(Some((frame.id, frame.reply?)))
    }

    /// Reads what there is. The end of the stream is an error, because a reply is always waited for.
    fn read(&mut self) -> Result<()> {
        self.received.drain(..self.consumed);
        self.consumed = 0;
        self.received.reserve(READ_BYTES);
        match recv(&self.stream, spare_capacity(&mut self.received), RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(Errno::CONNRESET) => Err(gone()),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(error) => Err(gone().caused_by(std::io::Error::from(error))),
        }
    }

    /// Waits until one of `events` is there.
    fn wait(&self, events: PollFlags) -> Result<PollFlags> {
        let timeout = self.timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        loop {
            let mut fds = [PollFd::new(&self.stream, events)];
            match poll(&mut fds, timeout.as_ref()) {
                Ok(0) => {
                    let what =
                        format!("the daemon has been silent for {} ms", self.timeout.unwrap_or_default().as_millis());
                    return Err(Error::new(Kind::Connection, what, "check the daemon, or raise the timeout"));
                }
                Ok(_) => {
                    let ready = fds[0].revents();
                    // An end or an error of the stream is found by reading.
                    let ended = ready.intersects(PollFlags::HUP | PollFlags::ERR);
                    return Ok(if ended { ready | PollFlags::IN } else { ready });
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(gone().caused_by(std::io::Error::from(error))),
            }
        }
    }
}

fn gone() -> Error {
    Error::new(
        Kind::Connection,
        "the daemon has closed the connection",
        "connect again; the daemon's log says why if it did not end",
    )
}
