//! Bytes and frames between a blocking client and its daemon.

use std::io;
use std::os::fd::OwnedFd;
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

use super::shm::{Lane, Woken};
use crate::client::lane_opening;
use crate::client::replies::{next_frame, untrusted};
use crate::error::{Error, Kind, Result};
use crate::ids::CorrelationId;
use crate::lane::Awaited;
use crate::wire::Reply;

/// Bytes of one read.
const READ_BYTES: usize = 64 << 10;
/// The pause before another try of a listener whose backlog is full.
const CONNECT_PAUSE: Duration = Duration::from_millis(5);

/// A connected socket, and a lane if there is one. The socket never blocks: every wait is a poll with the client's timeout.
#[derive(Debug)]
pub(super) struct Transport {
    stream: UnixStream,
    timeout: Option<Duration>,
    /// How long to busy-poll for replies before sleeping.
    spin: Duration,
    /// The replies from the socket.
    inbox: Inbox,
    /// Once there is a lane, it carries all requests and replies.
    lane: Option<Lane>,
}

impl Transport {
    pub(super) fn connect(path: &Path, timeout: Option<Duration>, spin: Duration) -> Result<Self> {
        let cannot = |error: io::Error| {
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
                    std::thread::sleep(CONNECT_PAUSE);
                }
                Err(error) => return Err(cannot(error.into())),
            }
        }
        Ok(Self { stream: socket.into(), timeout, spin, inbox: Inbox::default(), lane: None })
    }

    /// Removes the timeout.
    pub(super) const fn wait_for_ever(&mut self) {
        self.timeout = None;
    }

    /// Sends and receives over `lane` from now on.
    pub(super) fn use_lane(&mut self, lane: Lane) {
        self.lane = Some(lane);
    }

    pub(super) const fn has_lane(&self) -> bool {
        self.lane.is_some()
    }

    /// Sends all of `bytes`, and reads replies meanwhile.
    pub(super) fn send(&mut self, mut bytes: &[u8]) -> Result<()> {
        while let Some(lane) = self.lane.as_mut().filter(|_| !bytes.is_empty()) {
            let sent = lane.send(bytes)?;
            bytes = bytes.get(sent..).unwrap_or_default();
            if bytes.is_empty() || lane.receive()? > 0 {
                continue;
            }
            let woken = lane.wait(Awaited::BOTH, &self.stream, self.timeout)?;
            if woken == Woken::Socket && self.read().is_err() {
                // As below: `recv` returns what has arrived, and then the end.
                return Ok(());
            }
        }
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
                // The daemon reads no more, but may have answered earlier requests, or sent a reason: `recv` returns that, and
                // then the end.
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                Err(error) => return Err(closed().caused_by(io::Error::from(error))),
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
            let Some(lane) = &mut self.lane else {
                self.busy_poll_then_wait()?;
                continue;
            };
            let woken = match lane.receive() {
                Ok(1..) => Ok(Woken::Ready),
                Ok(0) => lane.wait(Awaited::DATA, &self.stream, self.timeout),
                Err(fault) => Err(fault),
            };
            match woken {
                Ok(Woken::Ready) => continue,
                Ok(Woken::Socket) => {}
                Err(fault) => return self.last_reply(fault),
            }
            if let Err(ended) = self.read() {
                // The bytes that the daemon wrote to the lane before it ended the connection are there by now.
                let last = self.lane.as_mut().map(Lane::receive);
                if !matches!(last, Some(Ok(1..))) {
                    return Err(ended);
                }
            }
        }
    }

    /// The reply that the daemon sent over the socket before it ended the lane, or else the fault that showed the end.
    fn last_reply(&mut self, fault: Error) -> Result<(CorrelationId, Reply)> {
        if fault.kind() == Kind::Connection {
            while matches!(self.read(), Ok(1..)) {}
        }
        self.inbox.next_reply()?.ok_or(fault)
    }

    /// Waits for the reply to `id`, the only request in flight, and for the descriptors that come with it.
    pub(super) fn recv_with_descriptors(&mut self, id: CorrelationId) -> Result<(Reply, Vec<OwnedFd>)> {
        let mut descriptors = Vec::new();
        loop {
            match self.inbox.next_reply()? {
                Some((of, reply)) if of == id => return Ok((reply, descriptors)),
                Some(_) => return Err(untrusted("a reply to no request")),
                None => self.wait(PollFlags::IN)?,
            };
            match lane_opening::receive(&self.stream, self.inbox.room(), &mut descriptors) {
                Ok(0) => return Err(closed()),
                Ok(_) => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(error) => return Err(closed().caused_by(error)),
            }
        }
    }

    fn next_reply(&mut self) -> Result<Option<(CorrelationId, Reply)>> {
        if let Some(lane) = &mut self.lane
            && let Some(reply) = lane.inbox.next_reply()?
        {
            return Ok(Some(reply));
        }
        self.inbox.next_reply()
    }

    /// Reads what the socket has. Answers with the number of bytes. The end of the stream is an error, because a reply is
    /// always due.
    fn read(&mut self) -> Result<usize> {
        let received = self.inbox.room();
        received.reserve(READ_BYTES);
        match recv(&self.stream, spare_capacity(received), RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(Errno::CONNRESET) => Err(closed()),
            Ok((_, read)) => Ok(read),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(error) => Err(closed().caused_by(io::Error::from(error))),
        }
    }

    /// Reads the next bytes: busy-polls for `spin`, then sleeps.
    fn busy_poll_then_wait(&mut self) -> Result<()> {
        if !self.spin.is_zero() {
            let until = Instant::now() + self.spin;
            while Instant::now() < until {
                if self.read()? > 0 {
                    return Ok(());
                }
            }
        }
        self.wait(PollFlags::IN)?;
        self.read().map(drop)
    }

    /// Waits for one of `events`.
    fn wait(&self, events: PollFlags) -> Result<PollFlags> {
        let timeout = self.timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        loop {
            let mut fds = [PollFd::new(&self.stream, events)];
            match poll(&mut fds, timeout.as_ref()) {
                Ok(0) => return Err(timed_out(self.timeout)),
                Ok(_) => {
                    let ready = fds[0].revents();
                    // The next read finds an end or an error of the stream.
                    let ended = ready.intersects(PollFlags::HUP | PollFlags::ERR);
                    return Ok(if ended { ready | PollFlags::IN } else { ready });
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(closed().caused_by(io::Error::from(error))),
            }
        }
    }
}

pub(super) fn timed_out(timeout: Option<Duration>) -> Error {
    let what = format!("the daemon has been silent for {} ms", timeout.unwrap_or_default().as_millis());
    Error::new(Kind::Connection, what, "check the daemon, or raise the timeout")
}

pub(super) fn closed() -> Error {
    Error::new(
        Kind::Connection,
        "the daemon has closed the connection",
        "connect again; the daemon's log says why if it did not end",
    )
}

/// The received bytes of one channel, and the replies in them.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    received: Vec<u8>,
    /// Bytes of `received` that are decoded already.
    consumed: usize,
}

impl Inbox {
    /// The buffer to append received bytes to. Decoded bytes are dropped from it.
    pub(super) fn room(&mut self) -> &mut Vec<u8> {
        self.received.drain(..self.consumed);
        self.consumed = 0;
        &mut self.received
    }

    /// The next reply, if it is complete.
    ///
    /// # Errors
    /// [`Kind::Malformed`](crate::error::Kind::Malformed) if it cannot be read.
    pub(super) fn next_reply(&mut self) -> Result<Option<(CorrelationId, Reply)>> {
        let rest = self.received.get(self.consumed..).unwrap_or_default();
        let Some(frame) = next_frame(rest)? else { return Ok(None) };
        self.consumed += frame.bytes;
        Ok(Some((frame.id, frame.reply?)))
    }
}
