//! The listening sockets of a process: bound by it, or received from the daemon that it takes over from.
//!
//! A socket that is passed on never closes, so no connection is refused in between: a peer that connects waits in the
//! socket's backlog until a daemon accepts.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::net::SocketType;
use rustix::net::sockopt::{socket_acceptconn, socket_type};

use super::socket_file::BoundSocket;
use super::turns::Turns;
use crate::error::{Error, Kind, Result};

/// A listening socket by its address, as [`unix_name`] and [`tcp_name`] write it.
pub type NamedSocket = (String, OwnedFd);

/// The listening sockets that a process has received and not yet used, and copies of those in use.
#[derive(Debug, Default)]
pub struct ListeningSockets {
    received: Vec<NamedSocket>,
    in_use: Vec<NamedSocket>,
    turns: Turns,
}

fn unix_name(path: &Path) -> String {
    // Both daemons may have been started in other folders.
    format!("unix {}", std::path::absolute(path).as_deref().unwrap_or(path).display())
}

fn tcp_name(address: SocketAddr) -> String {
    format!("tcp {address}")
}

impl ListeningSockets {
    /// Sockets of a process with these turns, which has received these.
    #[must_use]
    pub const fn new(received: Vec<NamedSocket>, turns: Turns) -> Self {
        Self { received, in_use: Vec::new(), turns }
    }

    /// The turns of the process.
    #[must_use]
    pub const fn turns(&self) -> &Turns {
        &self.turns
    }

    /// Copies of all sockets in use, to pass them on. Sockets that were received and not used are closed.
    #[must_use]
    pub fn into_shared(self) -> Vec<NamedSocket> {
        for (name, _) in &self.received {
            tracing::info!(name, "the configuration does not use this socket of the daemon before; it closes with it");
        }
        self.in_use
    }

    /// Takes the received socket of a name, if it listens.
    pub(crate) fn take(&mut self, name: &str) -> Option<OwnedFd> {
        let at = self.received.iter().position(|(of, _)| of == name)?;
        let (_, socket) = self.received.swap_remove(at);
        socket_acceptconn(&socket).unwrap_or(false).then_some(socket)
    }

    /// Notes that a socket is in use, to pass a copy of it on.
    ///
    /// # Errors
    /// [`Kind::System`] if no descriptor is left.
    pub(crate) fn note(&mut self, name: String, socket: impl AsFd) -> Result<()> {
        let copy = socket.as_fd().try_clone_to_owned().map_err(|cause| no_descriptor(&name, cause))?;
        self.in_use.push((name, copy));
        Ok(())
    }

    /// The TCP socket of an address: received, or bound. `port` names it in the error: "HTTP port".
    ///
    /// # Errors
    /// [`Kind::System`] if it is in use or the daemon may not bind it.
    pub(super) fn tcp(&mut self, address: SocketAddr, port: &str, remedy: &str) -> Result<TcpListener> {
        let name = tcp_name(address);
        let received = self.take(&name).map(TcpListener::from);
        let is_meant = |listener: &TcpListener| listener.local_addr().is_ok_and(|at| at == address);
        let listener = match received.filter(is_meant) {
            Some(listener) => Ok(listener),
            None => TcpListener::bind(address),
        };
        let listener = listener.and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
        let listener = listener.map_err(|cause| {
            Error::new(Kind::System, format!("cannot bind the {port} {address}"), remedy).caused_by(cause)
        })?;
        self.note(name, &listener)?;
        Ok(listener)
    }

    /// The Unix socket of a path, for this type of connections: received, or bound with these permission bits.
    ///
    /// # Errors
    /// As [`BoundSocket::bind`].
    pub fn unix(&mut self, path: &Path, kind: SocketType, mode: u32) -> Result<BoundSocket> {
        let name = unix_name(path);
        let received = self.take(&name).filter(|socket| socket_type(socket).is_ok_and(|of| of == kind));
        let bound = match received.map(UnixListener::from) {
            Some(listener) if listener.set_nonblocking(true).is_ok() => {
                let made = fs::symlink_metadata(path).map_err(|cause| no_descriptor(&name, cause))?;
                BoundSocket::received(listener, path, (made.dev(), made.ino()))
            }
            _ => BoundSocket::bind_of(path, kind, mode)?,
        };
        self.note(name, bound.descriptor())?;
        Ok(bound.owned_in(self.turns.clone()))
    }
}

fn no_descriptor(name: &str, cause: io::Error) -> Error {
    let what = format!("cannot keep the listening socket {name}");
    Error::new(Kind::System, what, "raise the limit of open files").caused_by(cause)
}
