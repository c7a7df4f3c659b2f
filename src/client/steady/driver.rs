//! The task behind an async client: it connects, carries bytes both ways until the connection ends, and reconnects.

use std::convert::Infallible;
use std::hint::spin_loop;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::time::timeout;

use super::SteadyOptions;
use super::state::{ClientState, Phase, RunReply, Waiter};
use crate::client::conversation::{Channel, Rejection};
use crate::client::fallback::Fleet;
use crate::client::lane::{Lane, broken_lane};
use crate::client::{lost, socket};
use crate::error::{Error, Kind, Result};
use crate::lane::{Awaited, Heard, LaneFault, hear};
use crate::limits::POLLS_PER_ROUND;
use crate::protocol::SessionToken;

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

/// A lane whose bell the client's runtime watches.
type AsyncLane = Lane<Arc<UnixStream>>;

/// The state that the handles of an async client share with its task.
pub(super) struct Shared {
    pub(super) path: PathBuf,
    pub(super) options: SteadyOptions,
    pub(super) session: SessionToken,
    pub(super) state: Mutex<ClientState<Caller>>,
    /// The lane of the connection, if it has one. Code that locks both locks the state first.
    pub(super) lane: Mutex<Option<AsyncLane>>,
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
            let sent = send_over(lane, &mut state.conversation.unsent);
            if sent.is_ok() && state.conversation.unsent.is_empty() && !busy_polls {
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
    loop {
        match timeout(shared.options.timeout, connect(&shared)).await {
            Ok(Ok(channels)) => {
                shared.publish();
                // The waiting calls get an error without this reason.
                let lane_fault = match carry(&shared, &channels).await {
                    Ended::Connection => None,
                    Ended::Lane(fault) => Some(broken_lane(&fault)),
                };
                drop(shared.lane.lock().take());
                shared.state.lock().ended(lane_fault.as_ref(), Instant::now(), Shared::chance());
            }
            Ok(Err(why)) => shared.state.lock().failed(&why, Instant::now(), Shared::chance()),
            Err(_) => {
                let what = format!("no connection to {} within the timeout", shared.path.display());
                let error = Error::new(Kind::Connection, what, "check the daemon, or raise the timeout");
                shared.state.lock().failed(&error.into(), Instant::now(), Shared::chance());
            }
        }
        shared.publish();
        let resting = shared.state.lock().silence.paused_until(Instant::now());
        if let Some(until) = resting {
            tokio::time::sleep_until(until.into()).await;
            shared.state.lock().resumed();
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

/// Connects, and carries bytes until the connection is open.
async fn connect(shared: &Shared) -> Result<Channels, Rejection> {
    let cannot = |error: io::Error| {
        Error::new(Kind::Connection, format!("cannot connect to {}", shared.path.display()), "start the daemon")
            .caused_by(error)
    };
    let socket = UnixStream::connect(&shared.path).await.map_err(cannot)?;
    shared.state.lock().begin(&shared.options.name, shared.session);
    let mut descriptors = Vec::new();
    loop {
        let carried = carry_opening(shared, &socket, &mut descriptors).await;
        let mut state = shared.state.lock();
        carried.map_err(|error| match state.conversation.is_greeted() {
            true => lost().caused_by(error),
            false => cannot(error),
        })?;
        let map = |opened| Lane::map(opened, std::mem::take(&mut descriptors), watched);
        if let Some(opened) = state.opening(Instant::now(), map)? {
            let lane = state.opened(opened, Instant::now());
            let bell = lane.as_ref().map(|lane| Arc::clone(lane.bell()));
            *shared.lane.lock() = lane;
            return Ok(Channels { socket, bell });
        }
    }
}

/// Sends what begins the connection, and receives the next bytes and descriptors.
async fn carry_opening(shared: &Shared, socket: &UnixStream, descriptors: &mut Vec<OwnedFd>) -> io::Result<()> {
    loop {
        let interest = {
            let unsent = &mut shared.state.lock().conversation.unsent;
            write(socket, unsent)?;
            interest(unsent)
        };
        if !socket.ready(interest).await?.is_readable() {
            continue;
        }
        let mut state = shared.state.lock();
        let received = state.conversation.room(Channel::Socket);
        let read = || socket::read_with_descriptors(socket, received, descriptors);
        match socket.try_io(Interest::READABLE, read) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            read => return read.map(drop),
        }
    }
}

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
    let mut carrier = Carrier { shared, received: Vec::new(), fleet };
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
            Some(lane) => Ok(send_over(lane, &mut state.conversation.unsent)?),
            None => Ok(write(&channels.socket, &mut state.conversation.unsent)?),
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
    match shared.state.lock().conversation.unsent.is_empty() {
        true => Awaited::DATA,
        false => Awaited::BOTH,
    }
}

/// Busy-polls for a while, if a reply is due. Other tasks run between polls. `None` = nothing arrived; otherwise whether the
/// socket is readable.
async fn busy_poll(shared: &Shared, channels: &Channels) -> Result<Option<bool>, Ended> {
    let spin = shared.options.spin;
    if spin.is_zero() || !shared.state.lock().conversation.is_waiting() {
        return Ok(None);
    }
    let (awaited, until) = (awaited(shared), Instant::now() + spin);
    loop {
        if channels.bell.is_some() {
            for _ in 0..POLLS_PER_ROUND {
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
        let interest = interest(&shared.state.lock().conversation.unsent);
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
    while !unsent.is_empty() {
        match socket.try_io(Interest::WRITABLE, || socket::write(socket, unsent)) {
            Ok(sent) => drop(unsent.drain(..sent)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Sends as much of `unsent` as the lane has room for, and removes it from there.
fn send_over(lane: &mut AsyncLane, unsent: &mut Vec<u8>) -> Result<(), LaneFault> {
    if !unsent.is_empty() {
        let sent = lane.send(unsent)?;
        unsent.drain(..sent);
    }
    Ok(())
}

/// Appends what the socket has to `received`.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if the socket has nothing; the end of the stream.
fn read(socket: &UnixStream, received: &mut Vec<u8>) -> io::Result<()> {
    let mut read = Err(io::ErrorKind::WouldBlock.into());
    // A read that leaves room has emptied the socket. Reporting WouldBlock then saves another system call.
    let all = socket.try_io(Interest::READABLE, || {
        read = socket::read(socket, received);
        match &read {
            Ok((_, true)) => Ok(()),
            _ => Err(io::ErrorKind::WouldBlock.into()),
        }
    });
    drop(all);
    read.map(drop)
}

/// Registers the bell of a lane with this runtime.
fn watched(bell: std::os::unix::net::UnixStream) -> Result<Arc<UnixStream>> {
    let watched = bell.set_nonblocking(true).and_then(|()| UnixStream::from_std(bell));
    watched.map(Arc::new).map_err(|error| {
        let remedy = "raise the limit of open files, or go without a lane";
        Error::new(Kind::System, "the bell of a lane cannot be watched", remedy).caused_by(error)
    })
}

/// Waits until a bell rings.
///
/// # Errors
/// The daemon has closed its end.
async fn rung(bell: &UnixStream) -> io::Result<()> {
    bell.readable().await?;
    let mut heard = Heard::Quiet;
    // Reports WouldBlock, so that the next wait is for the next ring.
    let emptied = bell.try_io(Interest::READABLE, || {
        heard = hear(bell);
        Err::<(), _>(io::ErrorKind::WouldBlock.into())
    });
    drop(emptied);
    match heard {
        Heard::Quiet => Ok(()),
        Heard::Gone => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
