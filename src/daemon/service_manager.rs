//! The service manager. It keeps memory files that outlive the daemon, passes listening sockets, and learns that the daemon is
//! ready, lives and stops.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use sd_notify::NotifyState;

use crate::error::{Error, Kind, Result};
use crate::limits::SERVICE_STATUS_EVERY_MS;
use crate::serve::{NamedSocket, kept_socket};

/// The name of the files in the store, and in `/proc`.
const NAME: &str = "kvrouted-bookings";
/// The variable with the number of descriptors that the service manager stores for the daemon.
const STORED_MAX: &str = "FDSTORE";
/// The variable with the socket to tell it.
const SOCKET: &str = "NOTIFY_SOCKET";
const FILE_MODE: u32 = 0o600;

/// Two memory files that the service manager stores: those that it has, or new ones. `None` = it stores none.
///
/// Call it before another thread starts, and before the sandbox.
pub(super) fn memory_files() -> Option<[File; 2]> {
    let stored = stored_files().inspect_err(|error| {
        tracing::warn!(%error, "the descriptors that the service manager passes cannot be read");
    });
    let has_others = stored.as_ref().map_or(true, |files| !files.is_empty());
    if let Ok(Ok(files)) = stored.map(<[File; 2]>::try_from) {
        return Some(files);
    }
    let stored_max = std::env::var(STORED_MAX).ok().and_then(|max| max.parse::<u32>().ok()).unwrap_or(0);
    // Without the socket, telling the service manager succeeds, and it stores nothing.
    if stored_max < 2 || std::env::var_os(SOCKET).is_none() {
        return None;
    }
    let files = new_files(has_others);
    let remedy = "check NotifyAccess= and FileDescriptorStoreMax= of the unit; a crash costs the bookings meanwhile";
    files.inspect_err(|error| tracing::warn!(%error, remedy, "the service manager stores no bookings")).ok()
}

/// Tells the service manager that this process is the unit's main one from now on.
pub(super) fn become_main() {
    if let Err(error) = sd_notify::notify(&[NotifyState::MainPid(std::process::id()), NotifyState::Ready]) {
        let remedy = "set NotifyAccess=all in the unit";
        tracing::warn!(%error, remedy, "the service manager does not learn that this daemon has taken over");
    }
}

/// The listening sockets that the service manager has bound and passes. It goes on listening on them.
///
/// Call it before another thread starts, and before the sandbox.
///
/// # Errors
/// The descriptors cannot be read.
pub(super) fn passed_sockets() -> Result<Vec<NamedSocket>> {
    let failed = |cause: io::Error| {
        let what = "cannot take the sockets that the service manager passes";
        Error::new(Kind::System, what, "start the daemon without them, and report this").caused_by(cause)
    };
    let passed: Vec<RawFd> = sd_notify::listen_fds_with_names()
        .map_err(failed)?
        .filter(|(_, name)| name != NAME)
        .map(|(descriptor, _)| descriptor)
        .collect();
    if passed.is_empty() {
        return Ok(Vec::new());
    }
    // A copy by way of the process itself: an inherited number alone does not say that nothing else owns the descriptor.
    let own = pidfd_open(getpid(), PidfdFlags::empty()).map_err(|error| failed(error.into()))?;
    let copy = |descriptor| pidfd_getfd(&own, descriptor, PidfdGetfdFlags::empty());
    let sockets = passed.into_iter().map(|descriptor| Ok(kept_socket(copy(descriptor)?)));
    let sockets = sockets.collect::<io::Result<Vec<_>>>().map_err(failed)?;
    Ok(sockets.into_iter().flatten().collect())
}

/// The way to the service manager, which learns from it how the daemon is.
#[derive(Debug)]
pub(super) struct Notifier {
    socket: UnixDatagram,
    /// How often it must hear that the daemon lives; `None` = it does not watch.
    watchdog: Option<Duration>,
}

impl Notifier {
    /// Connects to the service manager; `None` = there is none. Call it before the sandbox.
    pub(super) fn connect() -> Option<Self> {
        let path = std::env::var_os(SOCKET).filter(|path| !path.is_empty())?;
        let address = match path.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
            _ => SocketAddr::from_pathname(&path),
        };
        let connected = address.and_then(|address| {
            let socket = UnixDatagram::unbound()?;
            socket.set_nonblocking(true)?;
            socket.connect_addr(&address).map(|()| socket)
        });
        let socket =
            connected.inspect_err(|error| tracing::warn!(%error, "the service manager cannot be told anything"));
        Some(Self { socket: socket.ok()?, watchdog: sd_notify::watchdog_enabled() })
    }

    /// Says something. If the manager does not read, that is lost, and the next thing is said all the same.
    fn say(&self, message: &str) {
        if let Err(error) = self.socket.send(message.as_bytes()) {
            tracing::debug!(%error, message, "the service manager was not told");
        }
    }

    /// Says that the daemon stops.
    pub(super) fn stopping(&self) {
        self.say("STOPPING=1\nSTATUS=answers the requests that it has read\n");
    }

    /// Says when the daemon becomes ready, how it is, and again and again that it lives, for ever. `condition` is asked each
    /// time; `None` = another daemon serves.
    pub(super) async fn report(this: Option<&Self>, condition: impl Fn() -> Option<Condition>) {
        let Some(this) = this else { return std::future::pending().await };
        // Three times within the time that it waits: one late message is no death.
        let every = Duration::from_millis(SERVICE_STATUS_EVERY_MS);
        let every = this.watchdog.map_or(every, |within| every.min(within / 3));
        let (mut is_announced, mut said) = (false, String::new());
        loop {
            if let Some(Condition { is_ready, is_alive, status }) = condition() {
                let mut message = String::new();
                if is_ready && !is_announced {
                    message.push_str("READY=1\n");
                    is_announced = true;
                }
                if is_alive && this.watchdog.is_some() {
                    message.push_str("WATCHDOG=1\n");
                }
                if status != said {
                    message.push_str(&format!("STATUS={status}\n"));
                    said = status;
                }
                if !message.is_empty() {
                    this.say(&message);
                }
            }
            tokio::time::sleep(every).await;
        }
    }
}

/// How the daemon is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Condition {
    /// It may be sent requests.
    pub(super) is_ready: bool,
    /// No thread stands still.
    pub(super) is_alive: bool,
    /// One line for people.
    pub(super) status: String,
}

/// The files that the service manager has stored under the name.
fn stored_files() -> io::Result<Vec<File>> {
    let passed = sd_notify::listen_fds_with_names()?;
    passed.filter(|(_, name)| name == NAME).map(|(descriptor, _)| reopen(descriptor)).collect()
}

/// Opens the file of an inherited descriptor once more, which stays open beside it.
fn reopen(descriptor: RawFd) -> io::Result<File> {
    let path = format!("/proc/self/fd/{descriptor}");
    // Opening anything else could wait.
    if !fs::metadata(&path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("descriptor {descriptor} is no file")));
    }
    File::options().read(true).write(true).open(path)
}

/// Makes two files and stores them, after it has removed `others` that have the name.
fn new_files(others: bool) -> io::Result<[File; 2]> {
    if others {
        sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(NAME)])?;
    }
    let files = [new_file()?, new_file()?];
    // Without FDPOLL, the service manager would drop a file that it believes to be closed at the other end.
    let store = [NotifyState::FdStore, NotifyState::FdName(NAME), NotifyState::Custom("FDPOLL=0")];
    sd_notify::notify_with_fds(&store, &[files[0].as_fd(), files[1].as_fd()])?;
    Ok(files)
}

fn new_file() -> io::Result<File> {
    let file: OwnedFd = match memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL) {
        // Linux before 6.3.
        Err(Errno::INVAL) => memfd_create(NAME, MemfdFlags::CLOEXEC)?,
        made => made?,
    };
    let file = File::from(file);
    file.set_permissions(Permissions::from_mode(FILE_MODE))?;
    Ok(file)
}
