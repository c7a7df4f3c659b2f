//! The file of a listening Unix socket. It has its mode before a process can connect. It replaces another file only if
//! no process listens on that, and is removed only if it is still the daemon's own.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};

use super::turns::Turns;
use crate::error::{Error, Kind, Result};
use crate::limits::{BIND_LOCK_MS_MAX, BIND_LOCK_RETRY_MS, LISTEN_BACKLOG};
use crate::wire::ADMIN_SOCKET_SUFFIX;

/// What the path of the socket for a daemon that takes over has beyond that of the routing socket. It is no longer than
/// the suffix of the admin socket, so every path that has room for that has room for this.
const NEXT_SOCKET_SUFFIX: &str = ".next";
const _: () = assert!(NEXT_SOCKET_SUFFIX.len() <= ADMIN_SOCKET_SUFFIX.len());

/// A listening socket and its file. Dropping it closes the socket and removes the file.
#[derive(Debug)]
pub struct BoundSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the file that the daemon made.
    identity: (u64, u64),
    /// The file is removed only in this daemon's turn: before and after it, another daemon listens.
    turns: Turns,
    /// A service manager goes on listening: the file stays.
    is_kept: bool,
}

/// The path of the socket for a daemon that takes over: `<routing socket>.next`.
#[must_use]
pub fn next_path(routing: &Path) -> PathBuf {
    let mut path = routing.as_os_str().to_owned();
    path.push(NEXT_SOCKET_SUFFIX);
    path.into()
}

/// The default path of the admin socket: `<routing socket>.admin`.
#[must_use]
pub fn admin_path(routing: &Path) -> PathBuf {
    let mut path = routing.as_os_str().to_owned();
    path.push(ADMIN_SOCKET_SUFFIX);
    path.into()
}

impl BoundSocket {
    /// Listens on `path` with permission bits `mode`. A socket file on which no process listens is replaced.
    ///
    /// # Errors
    /// [`Kind::Config`] if the path is in use, too long, not a socket, or its directory does not exist;
    /// [`Kind::System`] for the rest.
    pub fn bind(path: &Path, mode: u32) -> Result<Self> {
        Self::bind_of(path, SocketType::STREAM, mode)
    }

    /// A socket that another process has bound, and its file.
    pub(super) fn received(listener: UnixListener, path: &Path, identity: (u64, u64)) -> Self {
        Self { listener, path: path.to_owned(), identity, turns: Turns::default(), is_kept: false }
    }

    /// The same if a service manager keeps the socket.
    pub(super) fn kept(mut self) -> Self {
        self.is_kept = true;
        self
    }

    /// The same with the turns of its process.
    pub(super) fn owned_in(mut self, turns: Turns) -> Self {
        self.turns = turns;
        self
    }

    /// As [`BoundSocket::bind`], for this type of connections.
    ///
    /// # Errors
    /// As [`BoundSocket::bind`].
    pub(super) fn bind_of(path: &Path, kind: SocketType, mode: u32) -> Result<Self> {
        let refuse = |what: &str, remedy: &str, error: io::Error| {
            Error::new(Kind::System, format!("{what} {}", path.display()), remedy).caused_by(error)
        };
        let address = SocketAddrUnix::new(path).map_err(|error| {
            Error::new(
                Kind::Config,
                format!("{} cannot be a socket's path", path.display()),
                "use a path of at most 107 bytes",
            )
            .caused_by(error)
        })?;
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // Of two daemons that start at once, both must not find the file stale: the lock on the directory lets one go
        // first.
        let directory = fs::File::open(directory).map_err(|error| {
            Error::new(Kind::Config, format!("cannot open the directory of {}", path.display()), "create it first")
                .caused_by(error)
        })?;
        lock(&directory).map_err(|error| match error {
            Errno::AGAIN => refuse("another process holds the lock on the directory of", "stop it first", error.into()),
            _ => refuse("cannot lock the directory of", "use a local file system", error.into()),
        })?;
        remove_stale(path, kind, &address)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, kind, flags, None)
            .map_err(|error| refuse("cannot make a socket for", "raise the limit of open files", error.into()))?;
        bind(&listener, &address)
            .map_err(|error| refuse("cannot bind", "check the directory's permissions", error.into()))?;
        // The mode before the backlog: no peer can connect until `listen`.
        let mode_set = fs::set_permissions(path, fs::Permissions::from_mode(mode));
        mode_set.map_err(|error| refuse("cannot set the mode of", "check the directory's permissions", error))?;
        listen(&listener, LISTEN_BACKLOG).map_err(|error| refuse("cannot listen on", "report it", error.into()))?;
        let made = fs::symlink_metadata(path).map_err(|error| refuse("cannot stat", "report it", error))?;
        Ok(Self {
            listener: listener.into(),
            path: path.to_owned(),
            identity: (made.dev(), made.ino()),
            turns: Turns::default(),
            is_kept: false,
        })
    }

    /// Its descriptor.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// The path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The listener for tokio. Call it inside a runtime.
    pub(crate) fn listen_async(&self) -> Result<tokio::net::UnixListener> {
        let listener = self.listener.try_clone().and_then(tokio::net::UnixListener::from_std);
        listener.map_err(|error| {
            let what = format!("cannot wait for connections on {}", self.path.display());
            Error::new(Kind::System, what, "raise the limit of open files").caused_by(error)
        })
    }
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        if self.is_kept || !self.turns.is_ours() {
            return;
        }
        let ours = fs::symlink_metadata(&self.path).is_ok_and(|found| (found.dev(), found.ino()) == self.identity);
        if !ours {
            tracing::warn!(path = %self.path.display(), "the socket file is no longer the daemon's; it stays");
        } else if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket file");
        }
    }
}

/// Locks the directory until it is closed. Another daemon holds this lock for the moment of a bind. A process that
/// holds it for longer, as any user of a shared directory may, must not keep the daemon waiting without an error.
fn lock(directory: &fs::File) -> Result<(), Errno> {
    let deadline = Instant::now() + Duration::from_millis(BIND_LOCK_MS_MAX);
    loop {
        match flock(directory, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::AGAIN) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(BIND_LOCK_RETRY_MS));
            }
            outcome => return outcome,
        }
    }
}

/// Removes the file of a dead daemon at `path`.
fn remove_stale(path: &Path, kind: SocketType, address: &SocketAddrUnix) -> Result<()> {
    let shown = path.display();
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => {
            let what = format!("cannot stat {shown}");
            return Err(Error::new(Kind::System, what, "check the directory's permissions").caused_by(error));
        }
        Ok(found) => found,
    };
    if !found.file_type().is_socket() {
        let what = format!("{shown} exists and is not a socket");
        return Err(Error::new(Kind::Config, what, "give another path, or remove the file if it is not needed"));
    }
    // Without blocking: a listener whose backlog is full is alive too.
    let probe = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None);
    match probe.and_then(|probe| connect(&probe, address)) {
        Err(Errno::CONNREFUSED) => {}
        Ok(()) | Err(Errno::AGAIN) => {
            let what = format!("another process listens on {shown}");
            return Err(Error::new(Kind::Config, what, "stop it first, or give another path"));
        }
        Err(error) => {
            let what = format!("cannot check whether another process listens on {shown}");
            return Err(Error::new(Kind::System, what, "check the file's permissions").caused_by(error));
        }
    }
    tracing::info!(path = %shown, "replacing a socket file on which no process listens");
    fs::remove_file(path).map_err(|error| {
        Error::new(Kind::System, format!("cannot remove the stale socket file {shown}"), "remove it").caused_by(error)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_stale_file_is_replaced_and_a_live_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("r.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "std leaves the file behind");
        let bound = BoundSocket::bind(&path, 0o640).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
        UnixStream::connect(&path).unwrap();
        let refused = BoundSocket::bind(&path, 0o640).unwrap_err();
        assert_eq!(refused.kind(), Kind::Config);
        assert!(path.exists());
        drop(bound);
        assert!(!path.exists());
    }

    #[test]
    fn a_locked_directory_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let held = fs::File::open(directory.path()).unwrap();
        flock(&held, FlockOperation::LockExclusive).unwrap();
        let path = directory.path().join("r.sock");
        let refused = BoundSocket::bind(&path, 0o600).unwrap_err();
        assert!(refused.to_string().contains("holds the lock"), "{refused}");
        assert!(!path.exists());
        drop(held);
        BoundSocket::bind(&path, 0o600).unwrap();
    }

    #[test]
    fn a_file_that_is_no_socket_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("precious");
        fs::write(&path, "data").unwrap();
        assert_eq!(BoundSocket::bind(&path, 0o600).unwrap_err().kind(), Kind::Config);
        assert_eq!(fs::read(&path).unwrap(), b"data");
        let long = directory.path().join("x".repeat(200));
        assert_eq!(BoundSocket::bind(&long, 0o600).unwrap_err().kind(), Kind::Config);
        assert_eq!(BoundSocket::bind(Path::new("/no/such/dir/s"), 0o600).unwrap_err().kind(), Kind::Config);
    }

    #[test]
    fn a_file_of_another_process_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("r.sock");
        let first = BoundSocket::bind(&path, 0o600).unwrap();
        let moved = directory.path().join("moved.sock");
        fs::rename(&path, moved).unwrap();
        let second = BoundSocket::bind(&path, 0o600).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn the_admin_socket_lies_beside_the_routing_socket() {
        assert_eq!(admin_path(Path::new("/run/kvrouted.sock")), Path::new("/run/kvrouted.sock.admin"));
    }
}
