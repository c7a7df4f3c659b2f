//! The bytes of a connection, both ways until it ends: by its socket, or by a lane.

use std::convert::Infallible;
use std::hint::spin_loop;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use rustix::buffer::spare_capacity;
use rustix::net::{RecvFlags, recv};
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::driver::Shared;
use super::lane::rung;
use crate::client::conversation::Source;
use crate::client::fallback::Fleet;
use crate::error::Error;
use crate::lane::{Awaited, LaneFault};
use crate::limits::LOOKS_PER_TURN;

/// Bytes read at once.
const READ_BYTES: usize = 64 << 10;

/// By which way the bytes of a connection go.
pub(super) struct Way {
    pub(super) socket: UnixStream,
    /// Of the lane, if there is one: everything goes by that, and the socket says when it ends.
    pub(super) bell: Option<Arc<UnixStream>>,
}

/// Why a connection ended.
pub(super) enum Ended {
    /// The daemon has closed it, or sent what cannot be trusted.
    Connection,
    /// Its lane cannot be used any further.
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

/// Carries bytes both ways until the connection ends; why it did.
pub(super) async fn carry(shared: &Shared, way: &Way) -> Ended {
    let fleet = Arc::clone(&shared.conversation.lock().fleet);
    let mut ear = Ear { shared, came: Vec::with_capacity(READ_BYTES), fleet };
    let Err(ended) = ear.carry(way).await;
    if matches!(ended, Ended::Connection) {
        // What the daemon wrote before it ended the connection is there by now, if it has left it.
        while matches!(ear.hear_lane(), Ok(true)) {}
    }
    ended
}

/// What hears for the conversation.
struct Ear<'a> {
    shared: &'a Shared,
    came: Vec<u8>,
    /// The last that was told.
    fleet: Arc<Fleet>,
}

impl Ear<'_> {
    async fn carry(&mut self, way: &Way) -> Result<Infallible, Ended> {
        // What came with the hello.
        self.hear(Source::Socket)?;
        loop {
            self.send(way)?;
            if self.hear_lane()? {
                continue;
            }
            let is_readable = match look(self.shared, way).await? {
                Some(is_readable) => is_readable,
                None => sleep(self.shared, way).await?,
            };
            if is_readable {
                self.hear_socket(&way.socket)?;
            }
        }
    }

    /// Sends what there is room for.
    fn send(&self, way: &Way) -> Result<(), Ended> {
        let mut conversation = self.shared.conversation.lock();
        match &mut *self.shared.lane.lock() {
            Some(lane) => Ok(lane.send(&mut conversation.unsent)?),
            None => Ok(write(&way.socket, &mut conversation.unsent)?),
        }
    }

    /// Hears what has come by the lane; whether something has.
    fn hear_lane(&mut self) -> Result<bool, Ended> {
        if let Some(lane) = &mut *self.shared.lane.lock() {
            lane.receive(&mut self.came)?;
        }
        let has_come = !self.came.is_empty();
        if has_come {
            self.hear(Source::Lane)?;
        }
        Ok(has_come)
    }

    fn hear_socket(&mut self, socket: &UnixStream) -> Result<(), Ended> {
        match read(socket, &mut self.came) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            read => read?,
        }
        self.hear(Source::Socket)
    }

    /// Hands on what came.
    fn hear(&mut self, source: Source) -> Result<(), Ended> {
        let mut conversation = self.shared.conversation.lock();
        let heard = conversation.hear(source, &self.came, Instant::now());
        self.came.clear();
        heard?;
        if !Arc::ptr_eq(&self.fleet, &conversation.fleet) {
            self.fleet = Arc::clone(&conversation.fleet);
            drop(conversation);
            self.shared.publish();
        }
        Ok(())
    }
}

/// What a lane is waited for.
fn awaited(shared: &Shared) -> Awaited {
    match shared.conversation.lock().unsent.is_empty() {
        true => Awaited::DATA,
        false => Awaited::BOTH,
    }
}

/// Looks for what comes, for a while, where a reply is due. Others have their turn between looks. `None` = nothing came,
/// else whether it is the socket that can be read.
async fn look(shared: &Shared, way: &Way) -> Result<Option<bool>, Ended> {
    let spin = shared.options.spin;
    if spin.is_zero() || !shared.conversation.lock().is_waiting() {
        return Ok(None);
    }
    let (awaited, until) = (awaited(shared), Instant::now() + spin);
    loop {
        if way.bell.is_some() {
            for _ in 0..LOOKS_PER_TURN {
                if is_there(shared, awaited)? {
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
            ready = way.socket.readable() => {
                ready?;
                return Ok(Some(true));
            }
            () = shared.wake.notified() => return Ok(Some(false)),
            () = tokio::task::yield_now() => {}
        }
    }
}

fn is_there(shared: &Shared, awaited: Awaited) -> Result<bool, LaneFault> {
    shared.lane.lock().as_mut().map_or(Ok(false), |lane| lane.is_there(awaited))
}

/// Sleeps until there is something to do; whether it is the socket that can be read.
async fn sleep(shared: &Shared, way: &Way) -> Result<bool, Ended> {
    let Some(bell) = &way.bell else {
        let interest = interest(&shared.conversation.lock().unsent);
        return tokio::select! {
            ready = way.socket.ready(interest) => Ok(ready?.is_readable()),
            () = shared.wake.notified() => Ok(false),
        };
    };
    let asleep = Asleep::fall(shared);
    // What came before the daemon could know that this side sleeps.
    if is_there(shared, asleep.awaited)? {
        return Ok(false);
    }
    tokio::select! {
        ready = way.socket.readable() => {
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

/// While it is there the daemon is to ring for what is waited for.
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

pub(super) fn interest(unsent: &[u8]) -> Interest {
    match unsent.is_empty() {
        true => Interest::READABLE,
        false => Interest::READABLE | Interest::WRITABLE,
    }
}

/// Writes what the socket takes of what is to be sent, and takes it out of that.
pub(super) fn write(socket: &UnixStream, unsent: &mut Vec<u8>) -> io::Result<()> {
    let mut sent = 0;
    let ended = loop {
        match unsent.get(sent..) {
            None | Some([]) => break Ok(()),
            Some(rest) => match socket.try_write(rest) {
                Ok(bytes) => sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break Ok(()),
                // The daemon takes no more, but may have said why: what it said is read, and then the end.
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

/// Reads what there is, behind what `came` holds.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] where there is nothing; the end of the stream.
pub(super) fn read(socket: &UnixStream, came: &mut Vec<u8>) -> io::Result<()> {
    came.reserve(READ_BYTES);
    let room = came.spare_capacity_mut().len();
    let mut read = Err(io::ErrorKind::WouldBlock.into());
    // Where there is room left nothing more has come: that is said to be so, and need not be found out by asking again.
    let all = socket.try_io(Interest::READABLE, || {
        read = recv(socket, spare_capacity(came), RecvFlags::DONTWAIT).map(|(_, bytes)| bytes).map_err(io::Error::from);
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
