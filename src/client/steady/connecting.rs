//! The beginning of a connection: hello, and a lane where one is wanted.

use std::io;
use std::time::Instant;

use tokio::io::Interest;
use tokio::net::UnixStream;

use super::carrying::{Way, interest, read, write};
use super::driver::Shared;
use super::lane::Lane;
use super::unexpected;
use crate::client::connection::LaneUse;
use crate::client::handed;
use crate::client::lost;
use crate::error::{Error, Kind, Result};
use crate::wire::{HelloReply, Reply};

/// Connects and says hello, and asks for a lane where one is wanted.
pub(super) async fn connect(shared: &Shared, wanted: LaneUse) -> Result<Way> {
    let cannot = |error: io::Error| {
        Error::new(Kind::Connection, format!("cannot connect to {}", shared.path.display()), "start the daemon")
            .caused_by(error)
    };
    let socket = UnixStream::connect(&shared.path).await.map_err(cannot)?;
    shared.conversation.lock().greet(&shared.options.name, shared.session);
    let reply = beginning(shared, &socket, |bytes| read(&socket, bytes)).await.map_err(|error| match error {
        Broken::Stream(error) => cannot(error),
        Broken::Frame(error) => error,
    })?;
    let hello = shared.conversation.lock().accepted(reply)?;
    let lane = match wanted {
        LaneUse::Off => None,
        LaneUse::Try | LaneUse::Require => match open_lane(shared, &socket, &hello).await {
            Ok(lane) => Some(lane),
            Err(error) if wanted == LaneUse::Try && error.kind() != Kind::Connection => {
                shared.conversation.lock().refuse_lane(&error);
                None
            }
            Err(error) => {
                shared.conversation.lock().refuse(&error);
                return Err(error);
            }
        },
    };
    let bell = lane.as_ref().map(Lane::bell);
    let has_lane = lane.is_some();
    *shared.lane.lock() = lane;
    shared.conversation.lock().greeted(hello, shared.options.fallback, has_lane);
    Ok(Way { socket, bell })
}

/// Asks for a lane. Its descriptors come with the reply.
async fn open_lane(shared: &Shared, socket: &UnixStream, hello: &HelloReply) -> Result<Lane> {
    handed::has_lanes(hello.features)?;
    shared.conversation.lock().ask_lane();
    let mut descriptors = Vec::new();
    let receive = |bytes: &mut Vec<u8>| {
        socket.try_io(Interest::READABLE, || match handed::receive(socket, bytes, &mut descriptors) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            other => other.map(drop),
        })
    };
    match beginning(shared, socket, receive).await {
        Ok(Reply::OpenLane(opened)) => Lane::take_over(opened, descriptors),
        Ok(other) => Err(unexpected("open_lane", &other)),
        Err(Broken::Stream(error)) => Err(lost().caused_by(error)),
        Err(Broken::Frame(error)) => Err(error),
    }
}

/// Why a connection did not begin.
enum Broken {
    /// Its stream ended.
    Stream(io::Error),
    /// What came by it cannot be read.
    Frame(Error),
}

/// Sends what begins a connection and waits for its reply, which `receive` reads where it says that there is something.
async fn beginning(
    shared: &Shared,
    socket: &UnixStream,
    mut receive: impl FnMut(&mut Vec<u8>) -> io::Result<()>,
) -> Result<Reply, Broken> {
    let mut bytes = Vec::new();
    loop {
        let interest = {
            let unsent = &mut shared.conversation.lock().unsent;
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
        let reply = shared.conversation.lock().hear_beginning(&bytes, Instant::now());
        if let Some(reply) = reply.map_err(Broken::Frame)? {
            return Ok(reply);
        }
    }
}
