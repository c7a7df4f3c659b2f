//! The listening sockets of a process: bound by it, or received from the daemon that it takes over from or from the service
//! manager.
//!
//! A socket that is passed on never closes, so no connection is refused in between: a peer that connects waits in the
//! socket's backlog until a daemon accepts.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::net::sockopt::{socket_acceptconn, socket_type};
use rustix::net::{SocketAddrUnix, SocketType, getsockname};

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

/// What the name of a socket ends with that a service manager keeps, so that its file stays when the daemon ends.
const KEPT: &str = " kept";

/// Names a listening socket that a service manager keeps by its own address; `None` = it is none.
#[must_use]
pub fn kept_socket(socket: OwnedFd) -> Option<NamedSocket> {
    if !socket_acceptconn(&socket).unwrap_or(false) {
        return None;
    }
    let address = getsockname(&socket).ok()?;
    let name = match (SocketAddrUnix::try_from(address.clone()), SocketAddr::try_from(address)) {
        (Ok(unix), _) => unix_name(Path::new(OsStr::from_bytes(unix.path_bytes()?))),
        (_, Ok(tcp)) => tcp_name(tcp),
        _ => return None,
    };
    Some((name + KEPT, socket))
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
            tracing::info!(name, "the configuration does not use this socket, which was passed to the daemon");
        }
        self.in_use
    }

    /// Takes the received socket of a name, if it listens.
    pub(crate) fn take(&mut self, name: &str) -> Option<OwnedFd> {
        self.take_named(name).map(|(_, socket)| socket)
    }

    /// The same with the name that the socket goes on to have.
    fn take_named(&mut self, name: &str) -> Option<NamedSocket> {
        let at = self.received.iter().position(|(of, _)| of.strip_suffix(KEPT).unwrap_or(of) == name)?;
        let received = self.received.swap_remove(at);
        socket_acceptconn(&received.1).unwrap_or(false).then_some(received)
    }

    /// The received socket of a name, and the name that it goes on to have.
    fn named(&mut self, name: String) -> (String, Option<OwnedFd>) {
        match self.take_named(&name) {
            Some((name, socket)) => (name, Some(socket)),
            None => (name, None),
        }
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
        let (name, received) = self.named(tcp_name(address));
        let received = received.map(TcpListener::from);
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
        let (name, received) = self.named(unix_name(path));
        let received = received.filter(|socket| socket_type(socket).is_ok_and(|of| of == kind));
        let bound = match received.map(UnixListener::from) {
            Some(listener) if listener.set_nonblocking(true).is_ok() => {
                let made = fs::symlink_metadata(path).map_err(|cause| no_file(path, cause))?;
                let received = BoundSocket::received(listener, path, (made.dev(), made.ino()));
                if name.ends_with(KEPT) { received.kept() } else { received }
            }
            _ => BoundSocket::bind_of(path, kind, mode)?,
        };
        self.note(name, bound.descriptor())?;
        Ok(bound.owned_in(self.turns.clone()))
    }
}

/// A socket whose file is gone, or another's, gets no connections.
fn no_file(path: &Path, cause: io::Error) -> Error {
    let what = format!("the socket that was passed to the daemon has no file {} any more", path.display());
    let remedy = "let systemd make it again: systemctl restart kvrouted.socket; otherwise start without it";
    Error::new(Kind::System, what, remedy).caused_by(cause)
}

fn no_descriptor(name: &str, cause: io::Error) -> Error {
    let what = format!("cannot keep the listening socket {name}");
    Error::new(Kind::System, what, "raise the limit of open files").caused_by(cause)
}
