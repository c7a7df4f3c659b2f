//! The descriptor store of the service manager: memory files that outlive the daemon.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use sd_notify::NotifyState;

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
