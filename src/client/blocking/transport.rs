//! The reads, writes and waits of a blocking client.

use std::hint::spin_loop;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::time::Timespec;

use crate::client::conversation::{Channel, Conversation, Opened};
use crate::client::lane::{Lane, broken_lane};
use crate::client::socket;
use crate::error::{Error, Kind, Result};
use crate::lane::{Awaited, Heard, hear};
use crate::limits::LANE_POLLS_PER_CLOCK;
use crate::wire::HelloReply;

/// The pause before another try of a listener whose backlog is full.
const CONNECT_PAUSE: Duration = Duration::from_millis(5);

/// A connected socket, and a lane if there is one. The socket never blocks: every wait is a poll with the client's timeout.
#[derive(Debug)]
pub(super) struct Transport {
    stream: UnixStream,
    /// Of a call.
    timeout: Option<Duration>,
    /// When the present call began.
    began: Instant,
    /// How long to busy-poll for replies before sleeping.
    spin: Duration,
    /// Once there is a lane, it carries all requests and replies.
    lane: Option<Lane<UnixStream>>,
}

/// What ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Woken {
    /// The awaited words or room are there.
    Lane,
    /// The connection's socket is readable, or has ended.
    Socket,
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
        let began = Instant::now();
        let deadline = timeout.map(|timeout| began + timeout);
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
        Ok(Self { stream: socket.into(), timeout, began, spin, lane: None })
    }

    /// Carries the beginning of a conversation until the connection is open. Returns hello's reply, and why there is no lane
    /// though one was requested.
    pub(super) fn open(&mut self, conversation: &mut Conversation<()>) -> Result<(HelloReply, Option<Error>)> {
        let mut descriptors = Vec::new();
        loop {
            self.send(conversation)?;
            self.wait(PollFlags::IN)?;
            let received = conversation.room(Channel::Socket);
            bytes_of(socket::read_with_descriptors(&self.stream, received, &mut descriptors))?;
            let map = |opened| Lane::map(opened, std::mem::take(&mut descriptors), Ok);
            let opened = conversation.opening(map).map_err(|why| why.error)?;
            if let Some(Opened { hello, lane, lane_refusal }) = opened {
                self.lane = lane;
                return Ok((hello, lane_refusal));
            }
        }
    }

    /// A call begins: its timeout counts from now on, whatever the daemon sends meanwhile.
    pub(super) fn begin_call(&mut self) {
        self.began = Instant::now();
    }

    /// What is left of the call's time; `None` = there is no timeout.
    ///
    /// # Errors
    /// [`Kind::Connection`] if it has passed.
    fn left(&self) -> Result<Option<Duration>> {
        let Some(timeout) = self.timeout else { return Ok(None) };
        let left = timeout.saturating_sub(self.began.elapsed());
        if !left.is_zero() {
            return Ok(Some(left));
        }
        let what = format!("the daemon has not answered within {} ms", timeout.as_millis());
        Err(Error::new(Kind::Connection, what, "check the daemon, or raise the timeout"))
    }

    /// Removes the timeout.
    pub(super) const fn wait_for_ever(&mut self) {
        self.timeout = None;
    }

    pub(super) const fn has_lane(&self) -> bool {
        self.lane.is_some()
    }

    /// Sends all encoded requests, and receives replies meanwhile.
    pub(super) fn send(&mut self, conversation: &mut Conversation<()>) -> Result<()> {
        let mut unsent = std::mem::take(&mut conversation.unsent);
        let sent = self.send_all(&unsent, conversation);
        unsent.clear();
        conversation.unsent = unsent;
        sent
    }

    fn send_all(&mut self, mut bytes: &[u8], conversation: &mut Conversation<()>) -> Result<()> {
        while !bytes.is_empty() {
            let sent = match &mut self.lane {
                Some(lane) => lane.send(bytes).map_err(|fault| broken_lane(&fault))?,
                None => bytes_of(socket::write(&self.stream, bytes))?,
            };
            bytes = bytes.get(sent..).unwrap_or_default();
            if bytes.is_empty() {
                break;
            }
            self.left()?;
            if self.lane.is_none() {
                if self.wait(PollFlags::IN | PollFlags::OUT)?.contains(PollFlags::IN) {
                    self.read(conversation)?;
                }
            } else if self.receive_from_lane(conversation)? == 0
                && self.wait_for_lane(Awaited::BOTH)? == Woken::Socket
                && self.read(conversation).is_err()
            {
                // The daemon reads no more: `receive` finds what has arrived, and then the end.
                break;
            }
        }
        Ok(())
    }

    /// Waits for the next bytes of the daemon. After an error, everything that it sent before the end has been received.
    pub(super) fn receive(&mut self, conversation: &mut Conversation<()>) -> Result<()> {
        // The daemon may send replies to no request without end.
        self.left()?;
        if self.lane.is_none() {
            return self.busy_poll_then_wait(conversation);
        }
        let woken = match self.receive_from_lane(conversation) {
            Ok(0) => self.wait_for_lane(Awaited::DATA),
            received => received.map(|_| Woken::Lane),
        };
        match woken {
            Ok(Woken::Lane) => Ok(()),
            Ok(Woken::Socket) => match self.read(conversation) {
                // The bytes that the daemon wrote to the lane before it ended the connection are there by now.
                Err(ended) if !matches!(self.receive_from_lane(conversation), Ok(1..)) => Err(ended),
                _ => Ok(()),
            },
            Err(fault) => {
                // The daemon may have said over the socket why it ended the lane.
                if fault.kind() == Kind::Connection {
                    while matches!(self.read(conversation), Ok(1..)) {}
                }
                Err(fault)
            }
        }
    }

    /// Receives what the lane has. Returns the number of bytes.
    fn receive_from_lane(&mut self, conversation: &mut Conversation<()>) -> Result<usize> {
        let Some(lane) = &mut self.lane else { return Ok(0) };
        lane.receive(conversation.room(Channel::Lane)).map_err(|fault| broken_lane(&fault))
    }

    /// Reads what the socket has. Returns the number of bytes. The end of the stream is an error, because a reply is always due.
    fn read(&self, conversation: &mut Conversation<()>) -> Result<usize> {
        bytes_of(socket::read(&self.stream, conversation.room(Channel::Socket)).map(|(bytes, _)| bytes))
    }

    /// Reads the next bytes: busy-polls for `spin`, then sleeps.
    fn busy_poll_then_wait(&self, conversation: &mut Conversation<()>) -> Result<()> {
        if !self.spin.is_zero() {
            let until = Instant::now() + self.spin;
            while Instant::now() < until {
                if self.read(conversation)? > 0 {
                    return Ok(());
                }
            }
        }
        self.wait(PollFlags::IN)?;
        self.read(conversation).map(drop)
    }

    /// Waits until the socket has one of `events`, and returns them.
    fn wait(&self, events: PollFlags) -> Result<PollFlags> {
        loop {
            let [ready, _] = self.sleep(events)?;
            if !ready.is_empty() {
                // The next read finds an end or an error of the stream.
                let ended = ready.intersects(PollFlags::HUP | PollFlags::ERR);
                return Ok(if ended { ready | PollFlags::IN } else { ready });
            }
        }
    }

    /// Waits for data, or for data or room, or for the connection's socket: busy-polls for `spin`, then sleeps.
    fn wait_for_lane(&mut self, awaited: Awaited) -> Result<Woken> {
        let since = Instant::now();
        loop {
            for _ in 0..LANE_POLLS_PER_CLOCK {
                if self.is_ready(awaited)? {
                    return Ok(Woken::Lane);
                }
                if !self.spin.is_zero() {
                    self.lane.iter_mut().for_each(Lane::own_ahead);
                }
                spin_loop();
            }
            if since.elapsed() >= self.spin {
                break;
            }
        }
        loop {
            self.lane.iter().for_each(|lane| lane.announce(awaited));
            // Checks for words that arrived before the daemon could know that this side sleeps.
            let woken = if self.is_ready(awaited)? { Ok(Woken::Lane) } else { self.sleep_for_lane() };
            self.lane.iter().for_each(Lane::settle);
            if self.is_ready(awaited)? {
                return Ok(Woken::Lane);
            }
            if woken? == Woken::Socket {
                return Ok(Woken::Socket);
            }
        }
    }

    fn is_ready(&mut self, awaited: Awaited) -> Result<bool> {
        let ready = self.lane.as_mut().map_or(Ok(false), |lane| lane.is_ready(awaited));
        ready.map_err(|fault| broken_lane(&fault))
    }

    /// Sleeps until the bell rings or the socket is readable.
    fn sleep_for_lane(&self) -> Result<Woken> {
        let [socket, bell] = self.sleep(PollFlags::IN)?;
        if !socket.is_empty() {
            return Ok(Woken::Socket);
        }
        match &self.lane {
            Some(lane) if !bell.is_empty() && hear(lane.bell()) == Heard::Gone => Err(closed()),
            _ => Ok(Woken::Lane),
        }
    }

    /// Sleeps until the socket has one of `events`, or the bell of the lane rings; a signal may end it too. Returns the events
    /// of both.
    fn sleep(&self, events: PollFlags) -> Result<[PollFlags; 2]> {
        let left = self.left()?.and_then(|left| Timespec::try_from(left).ok());
        let bell = self.lane.as_ref().map_or(&self.stream, Lane::bell);
        let mut fds = [PollFd::new(&self.stream, events), PollFd::new(bell, PollFlags::IN)];
        match poll(&mut fds[..1 + usize::from(self.has_lane())], left.as_ref()) {
            // The time has passed. If the clock still leaves a rest, the caller sleeps again.
            Ok(0) => self.left().map(|_| [PollFlags::empty(); 2]),
            Ok(_) => Ok(fds.map(|fd| fd.revents())),
            Err(Errno::INTR) => Ok([PollFlags::empty(); 2]),
            Err(error) => Err(closed().caused_by(io::Error::from(error))),
        }
    }
}

/// The number of bytes that a read or a write moved.
fn bytes_of(moved: io::Result<usize>) -> Result<usize> {
    match moved {
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock => Ok(0),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => Err(closed()),
            _ => Err(closed().caused_by(error)),
        },
        Ok(bytes) => Ok(bytes),
    }
}

fn closed() -> Error {
    Error::new(
        Kind::Connection,
        "the daemon has closed the connection",
        "connect again; the daemon's log says why if it did not end",
    )
}
