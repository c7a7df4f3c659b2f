//! The task behind an async client: it connects, carries bytes both ways until the connection ends, and reconnects.

use std::convert::Infallible;
use std::hint::spin_loop;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::buffer::spare_capacity;
use rustix::net::{RecvFlags, recv};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::time::timeout;

use super::SteadyOptions;
use super::shm::{Lane, rung};
use super::unexpected;
use crate::client::connection::LaneUse;
use crate::client::fallback::Fleet;
use crate::client::lane_opening::broken_lane;
use crate::client::steady::state::{Channel, ClientState, Phase, RunReply, Waiter};
use crate::client::{lane_opening, lost};
use crate::error::{Error, Kind, Result};
use crate::lane::{Awaited, LaneFault};
use crate::limits::LOOKS_PER_TURN;
use crate::protocol::SessionToken;
use crate::wire::{HelloReply, Reply};

/// A call that waits for its reply, with its permit to have a request in flight. The reply frees the permit.
pub(super) struct Caller {
    pub(super) reply: oneshot::Sender<Result<RunReply>>,
    pub(super) _permit: OwnedSemaphorePermit,
}

impl Waiter for Caller {
    fn deliver(self, reply: Result<RunReply>) -> Option<RunReply> {
        self.reply.send(reply).err().and_then(Result::ok)
    }
}

/// The state that the handles of an async client share with its task.
pub(super) struct Shared {
    pub(super) path: PathBuf,
    pub(super) options: SteadyOptions,
    pub(super) session: SessionToken,
    pub(super) state: Mutex<ClientState<Caller>>,
    /// The lane of the connection, if it has one. Code that locks both locks the state first.
    pub(super) lane: Mutex<Option<Lane>>,
    /// Wakes the task: there are bytes to send, or a reply to busy-poll for.
    pub(super) wake: Notify,
    /// Permits for requests in flight.
    pub(super) permits: Arc<Semaphore>,
    pub(super) phases: watch::Sender<Phase>,
    pub(super) fleets: watch::Sender<Arc<Fleet>>,
}

impl Shared {
    /// A number from 0 up to 1.
    pub(super) fn chance() -> f64 {
        rand::random()
    }

    /// Sends the encoded requests: over a lane at once, as far as there is room, and otherwise by the task.
    pub(super) fn send_encoded(&self, mut state: MutexGuard<'_, ClientState<Caller>>) {
        let mut lane = self.lane.lock();
        let busy_polls = !self.options.spin.is_zero();
        if let Some(lane) = &mut *lane {
            // If it fails, the task meets the same fault, and ends the connection.
            let sent = lane.send(&mut state.unsent);
            if sent.is_ok() && state.unsent.is_empty() && !busy_polls {
                return;
            }
            // This wakes the task, so the daemon need not.
            lane.settle();
        }
        drop((state, lane));
        self.wake.notify_one();
    }

    /// Publishes the phase and the fleet to the calls that wait for them.
    pub(super) fn publish(&self) {
        let state = self.state.lock();
        let (phase, fleet) = (state.phase, Arc::clone(&state.fleet));
        drop(state);
        self.phases.send_if_modified(|last| std::mem::replace(last, phase) != phase);
        self.fleets.send_if_modified(|last| {
            let is_new = !Arc::ptr_eq(last, &fleet);
            *last = fleet;
            is_new
        });
    }
}

/// Connects and carries bytes, again and again, until the task is aborted.
pub(super) async fn drive(shared: Arc<Shared>) {
    let mut wanted = shared.options.lane;
    loop {
        match timeout(shared.options.timeout, connect(&shared, wanted)).await {
            Ok(Ok(channels)) => {
                shared.publish();
                let began = Instant::now();
                // The waiting calls get an error without this reason.
                let ended = carry(&shared, &channels).await;
                let is_stable = began.elapsed() >= shared.options.back_off.first;
                drop(shared.lane.lock().take());
                let mut state = shared.state.lock();
                state.ended(is_stable, Instant::now(), Shared::chance());
                wanted = match ended {
                    // The next connection goes without a lane, because another lane may break too. The one after it requests
                    // one again.
                    Ended::Lane(fault) if wanted == LaneUse::Try && !is_stable => {
                        state.refuse_lane(&broken_lane(&fault));
                        LaneUse::Off
                    }
                    _ => shared.options.lane,
                };
            }
            Ok(Err(error)) => shared.state.lock().failed(&error, Instant::now(), Shared::chance()),
            Err(_) => {
                let what = format!("no connection to {} within the timeout", shared.path.display());
                let error = Error::new(Kind::Connection, what, "check the daemon, or raise the timeout");
                shared.state.lock().failed(&error, Instant::now(), Shared::chance());
            }
        }
        shared.publish();
        let resting = shared.state.lock().silence.paused_until(Instant::now());
        if let Some(until) = resting {
            tokio::time::sleep_until(until.into()).await;
            let mut state = shared.state.lock();
            let is_first = state.silence.since().is_none();
            state.phase = Phase::Connecting { is_first };
            drop(state);
            // Calls that found the pause over wait for the next phase, which may be another pause.
            shared.publish();
        }
    }
}

/// Waits until every request and report has been answered, for at most `limit`. Whether it was.
pub(super) async fn settle(shared: &Shared, limit: Duration) -> bool {
    const CHECK_EVERY: Duration = Duration::from_millis(1);
    let settled = async {
        while !shared.state.lock().is_settled() {
            tokio::time::sleep(CHECK_EVERY).await;
        }
    };
    timeout(limit, settled).await.is_ok()
}

/// Connects, sends hello, and requests a lane if one is `wanted`.
async fn connect(shared: &Shared, wanted: LaneUse) -> Result<Channels> {
    let cannot = |error: io::Error| {
        Error::new(Kind::Connection, format!("cannot connect to {}", shared.path.display()), "start the daemon")
            .caused_by(error)
    };
    let socket = UnixStream::connect(&shared.path).await.map_err(cannot)?;
    shared.state.lock().begin(&shared.options.name, shared.session);
    let reply = beginning(shared, &socket, |bytes| read(&socket, bytes)).await.map_err(|error| match error {
        Broken::Stream(error) => cannot(error),
        Broken::Frame(error) => error,
    })?;
    let hello = shared.state.lock().accepted(reply)?;
    let lane = match wanted {
        LaneUse::Off => None,
        LaneUse::Try | LaneUse::Require => match open_lane(shared, &socket, &hello).await {
            Ok(lane) => Some(lane),
            Err(error) if wanted == LaneUse::Try && error.kind() != Kind::Connection => {
                shared.state.lock().refuse_lane(&error);
                None
            }
            Err(error) => {
                shared.state.lock().refuse(&error);
                return Err(error);
            }
        },
    };
    let bell = lane.as_ref().map(Lane::bell);
    let has_lane = lane.is_some();
    *shared.lane.lock() = lane;
    shared.state.lock().opened(hello, shared.options.fallback, has_lane);
    Ok(Channels { socket, bell })
}

/// Requests a lane. Its descriptors come with the reply.
async fn open_lane(shared: &Shared, socket: &UnixStream, hello: &HelloReply) -> Result<Lane> {
    lane_opening::has_lanes(hello.features)?;
    shared.state.lock().ask_lane();
    let mut descriptors = Vec::new();
    let receive = |bytes: &mut Vec<u8>| {
        socket.try_io(Interest::READABLE, || match lane_opening::receive(socket, bytes, &mut descriptors) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            other => other.map(drop),
        })
    };
    match beginning(shared, socket, receive).await {
        Ok(Reply::OpenLane(opened)) => Lane::map(opened, descriptors),
        Ok(other) => Err(unexpected("open_lane", &other)),
        Err(Broken::Stream(error)) => Err(lost().caused_by(error)),
        Err(Broken::Frame(error)) => Err(error),
    }
}

/// Why a connection could not begin.
enum Broken {
    /// The stream ended.
    Stream(io::Error),
    /// A frame cannot be read.
    Frame(Error),
}

/// Sends a frame that begins a connection and waits for its reply. `receive` reads from a readable socket.
async fn beginning(
    shared: &Shared,
    socket: &UnixStream,
    mut receive: impl FnMut(&mut Vec<u8>) -> io::Result<()>,
) -> Result<Reply, Broken> {
    let mut bytes = Vec::new();
    loop {
        let interest = {
            let unsent = &mut shared.state.lock().unsent;
            write(socket, unsent).map_err(Broken::Stream)?;
            interest(unsent)
        };
        let ready = socket.ready(interest).await.map_err(Broken::Stream)?;
        if !ready.is_readable() {
            continue;
        }
        bytes.clear();
        match receive(&mut bytes) {
            Ok(()) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(Broken::Stream(error)),
        }
        let reply = shared.state.lock().receive_beginning(&bytes, Instant::now());
        if let Some(reply) = reply.map_err(Broken::Frame)? {
            return Ok(reply);
        }
    }
}

/// Bytes of one read.
const READ_BYTES: usize = 64 << 10;

/// The channels of a connection.
struct Channels {
    socket: UnixStream,
    /// The bell of the lane, if there is one. The lane then carries all frames, and the socket shows the end.
    bell: Option<Arc<UnixStream>>,
}

/// Why a connection ended.
pub(super) enum Ended {
    /// The daemon closed it, or sent an invalid frame.
    Connection,
    /// Its lane cannot be used any more.
    Lane(LaneFault),
}

impl From<io::Error> for Ended {
    fn from(_: io::Error) -> Self {
        Self::Connection
    }
}

impl From<Error> for Ended {
    fn from(_: Error) -> Self {
        Self::Connection
    }
}

impl From<LaneFault> for Ended {
    fn from(fault: LaneFault) -> Self {
        Self::Lane(fault)
    }
}

/// Carries bytes both ways until the connection ends. Returns why it ended.
async fn carry(shared: &Shared, channels: &Channels) -> Ended {
    let fleet = Arc::clone(&shared.state.lock().fleet);
    let mut carrier = Carrier { shared, received: Vec::with_capacity(READ_BYTES), fleet };
    let Err(ended) = carrier.carry(channels).await;
    if matches!(ended, Ended::Connection) {
        // The bytes that the daemon wrote to the lane before it ended the connection are there by now.
        while matches!(carrier.receive_from_lane(), Ok(true)) {}
    }
    ended
}

/// Moves bytes between the channels and the state.
struct Carrier<'a> {
    shared: &'a Shared,
    received: Vec<u8>,
    /// The fleet that was published last.
    fleet: Arc<Fleet>,
}

impl Carrier<'_> {
    async fn carry(&mut self, channels: &Channels) -> Result<Infallible, Ended> {
        // Bytes may have arrived behind the hello.
        self.take_received(Channel::Socket)?;
        loop {
            self.send(channels)?;
            if self.receive_from_lane()? {
                continue;
            }
            let is_readable = match busy_poll(self.shared, channels).await? {
                Some(is_readable) => is_readable,
                None => sleep(self.shared, channels).await?,
            };
            if is_readable {
                self.receive_from_socket(&channels.socket)?;
            }
        }
    }

    /// Sends as many encoded bytes as there is room for.
    fn send(&self, channels: &Channels) -> Result<(), Ended> {
        let mut state = self.shared.state.lock();
        match &mut *self.shared.lane.lock() {
            Some(lane) => Ok(lane.send(&mut state.unsent)?),
            None => Ok(write(&channels.socket, &mut state.unsent)?),
        }
    }

    /// Receives from the lane. Whether bytes have arrived.
    fn receive_from_lane(&mut self) -> Result<bool, Ended> {
        if let Some(lane) = &mut *self.shared.lane.lock() {
            lane.receive(&mut self.received)?;
        }
        let has_received = !self.received.is_empty();
        if has_received {
            self.take_received(Channel::Lane)?;
        }
        Ok(has_received)
    }

    fn receive_from_socket(&mut self, socket: &UnixStream) -> Result<(), Ended> {
        match read(socket, &mut self.received) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            read => read?,
        }
        self.take_received(Channel::Socket)
    }

    /// Passes received bytes to the state.
    fn take_received(&mut self, channel: Channel) -> Result<(), Ended> {
        let mut state = self.shared.state.lock();
        let outcome = state.receive(channel, &self.received, Instant::now());
        self.received.clear();
        outcome?;
        if !Arc::ptr_eq(&self.fleet, &state.fleet) {
            self.fleet = Arc::clone(&state.fleet);
            drop(state);
            self.shared.publish();
        }
        Ok(())
    }
}

/// What the task waits for in a lane.
fn awaited(shared: &Shared) -> Awaited {
    match shared.state.lock().unsent.is_empty() {
        true => Awaited::DATA,
        false => Awaited::BOTH,
    }
}

/// Busy-polls for a while, if a reply is due. Other tasks run between polls. `None` = nothing arrived; otherwise whether the
/// socket is readable.
async fn busy_poll(shared: &Shared, channels: &Channels) -> Result<Option<bool>, Ended> {
    let spin = shared.options.spin;
    if spin.is_zero() || !shared.state.lock().is_waiting() {
        return Ok(None);
    }
    let (awaited, until) = (awaited(shared), Instant::now() + spin);
    loop {
        if channels.bell.is_some() {
            for _ in 0..LOOKS_PER_TURN {
                if is_ready(shared, awaited)? {
                    return Ok(Some(false));
                }
                spin_loop();
            }
        }
        if Instant::now() >= until {
            return Ok(None);
        }
        tokio::select! {
            biased;
            ready = channels.socket.readable() => {
                ready?;
                return Ok(Some(true));
            }
            () = shared.wake.notified() => return Ok(Some(false)),
            () = tokio::task::yield_now() => {}
        }
    }
}

fn is_ready(shared: &Shared, awaited: Awaited) -> Result<bool, LaneFault> {
    shared.lane.lock().as_mut().map_or(Ok(false), |lane| lane.is_ready(awaited))
}

/// Sleeps until there is something to do. Whether the socket is readable.
async fn sleep(shared: &Shared, channels: &Channels) -> Result<bool, Ended> {
    let Some(bell) = &channels.bell else {
        let interest = interest(&shared.state.lock().unsent);
        return tokio::select! {
            ready = channels.socket.ready(interest) => Ok(ready?.is_readable()),
            () = shared.wake.notified() => Ok(false),
        };
    };
    let asleep = Asleep::fall(shared);
    // Checks for words that arrived before the daemon could know that this side sleeps.
    if is_ready(shared, asleep.awaited)? {
        return Ok(false);
    }
    tokio::select! {
        ready = channels.socket.readable() => {
            ready?;
            Ok(true)
        }
        heard = rung(bell) => {
            heard?;
            Ok(false)
        }
        () = shared.wake.notified() => Ok(false),
    }
}

/// An announcement that this side sleeps. It is withdrawn on drop.
struct Asleep<'a> {
    shared: &'a Shared,
    awaited: Awaited,
}

impl<'a> Asleep<'a> {
    fn fall(shared: &'a Shared) -> Self {
        let awaited = awaited(shared);
        if let Some(lane) = &*shared.lane.lock() {
            lane.announce(awaited);
        }
        Self { shared, awaited }
    }
}

impl Drop for Asleep<'_> {
    fn drop(&mut self) {
        if let Some(lane) = &*self.shared.lane.lock() {
            lane.settle();
        }
    }
}

fn interest(unsent: &[u8]) -> Interest {
    match unsent.is_empty() {
        true => Interest::READABLE,
        false => Interest::READABLE | Interest::WRITABLE,
    }
}

/// Writes as much of `unsent` as the socket takes, and removes it from there.
fn write(socket: &UnixStream, unsent: &mut Vec<u8>) -> io::Result<()> {
    let mut sent = 0;
    let ended = loop {
        match unsent.get(sent..) {
            None | Some([]) => break Ok(()),
            Some(rest) => match socket.try_write(rest) {
                Ok(bytes) => sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break Ok(()),
                // The daemon reads no more, but may have sent a reason: the next reads find it, and then the end.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                    sent = unsent.len();
                    break Ok(());
                }
                Err(error) => break Err(error),
            },
        }
    };
    unsent.drain(..sent);
    ended
}

/// Appends what the socket has to `received`.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if the socket has nothing; the end of the stream.
fn read(socket: &UnixStream, received: &mut Vec<u8>) -> io::Result<()> {
    received.reserve(READ_BYTES);
    let room = received.spare_capacity_mut().len();
    let mut read = Err(io::ErrorKind::WouldBlock.into());
    // A read that leaves room has emptied the socket. Reporting WouldBlock then saves another system call.
    let all = socket.try_io(Interest::READABLE, || {
        read = recv(socket, spare_capacity(received), RecvFlags::DONTWAIT)
            .map(|(_, bytes)| bytes)
            .map_err(io::Error::from);
        match &read {
            Ok(bytes) if *bytes == room => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            _ => Err(io::ErrorKind::WouldBlock.into()),
        }
    });
    drop(all);
    match read {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Err(io::ErrorKind::WouldBlock.into()),
        read => read.map(drop),
    }
}
