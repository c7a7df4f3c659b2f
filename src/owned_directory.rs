//! A directory that one process at a time writes to: the journal's, the snapshots'. No other user reads its files.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::error::{Error, Kind, Result};

/// The mode of a directory that [`make`] creates.
pub(crate) const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
/// The file that the lock is on. It stays when the lock is released.
const LOCK_NAME: &str = "lock";

/// The locks that this process holds.
static HELD: Mutex<Vec<Weak<File>>> = Mutex::new(Vec::new());
/// Locks that the process before this one held, and has passed on. A lock belongs to all processes that have its open
/// file, so none of them has to let go of it for the next one.
static RECEIVED: Mutex<Vec<File>> = Mutex::new(Vec::new());

/// Uses these locks of another process for the directories that are locked from now on.
pub(crate) fn receive_locks(locks: Vec<File>) {
    *RECEIVED.lock() = locks;
}

/// Copies of the locks that this process holds, to pass them on.
///
/// # Errors
/// No descriptor is left.
pub(crate) fn held_locks() -> io::Result<Vec<OwnedFd>> {
    HELD.lock().iter().filter_map(Weak::upgrade).map(|lock| Ok(lock.try_clone()?.into())).collect()
}

/// The received lock on the same file.
fn received_lock(file: &File) -> Option<File> {
    let identity = |file: &File| file.metadata().ok().map(|found| (found.dev(), found.ino()));
    let (sought, mut received) = (identity(file)?, RECEIVED.lock());
    let at = received.iter().position(|lock| identity(lock) == Some(sought))?;
    Some(received.swap_remove(at))
}

/// Makes the directory at `path`, if it is not there and its parent is. `field` is the configuration field that
/// names it.
///
/// # Errors
/// [`Kind::System`] if it cannot be made.
pub(crate) fn make(path: &Path, field: &str) -> Result<()> {
    match DirBuilder::new().mode(DIRECTORY_MODE).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            let remedy = format!("set {field} to a directory whose parent exists and that the daemon's user may write");
            let message = format!("cannot make the directory {}", path.display());
            Err(Error::new(Kind::System, message, remedy).caused_by(error))
        }
        _ => Ok(()),
    }
}

/// A directory that is locked until this value is dropped or the process ends, however it ends.
#[derive(Debug)]
pub(crate) struct OwnedDirectory {
    path: PathBuf,
    _lock: Arc<File>,
}

impl OwnedDirectory {
    /// Locks the directory at `path`, in which the daemon keeps `contents`, as the configuration field `field` says.
    ///
    /// # Errors
    /// [`Kind::Config`] if another process holds the lock; [`Kind::System`] if locking fails otherwise.
    pub(crate) fn lock(path: &Path, contents: &str, field: &str) -> Result<Self> {
        let system = |error: io::Error| {
            let remedy = format!("set {field} to a directory of the daemon's user, on a file system with locks");
            Error::new(Kind::System, format!("cannot lock the directory {}", path.display()), remedy).caused_by(error)
        };
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(false).write(true).mode(FILE_MODE).open(path.join(LOCK_NAME));
        let file = file.map_err(system)?;
        let lock = match (file.try_lock(), received_lock(&file)) {
            (Ok(()), _) => file,
            (Err(TryLockError::WouldBlock), Some(received)) => received,
            (Err(TryLockError::WouldBlock), None) => {
                let message = format!("another daemon keeps its {contents} in {}", path.display());
                return Err(Error::new(Kind::Config, message, format!("set a different {field} for each daemon")));
            }
            (Err(TryLockError::Error(error)), _) => return Err(system(error)),
        };
        let lock = Arc::new(lock);
        let mut held = HELD.lock();
        held.retain(|held| held.strong_count() > 0);
        held.push(Arc::downgrade(&lock));
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a file that is not there yet.
    pub(crate) fn create_new(&self, name: &str) -> io::Result<File> {
        OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(self.path.join(name))
    }

    /// Makes a file in place of what is there: an unfinished one, which may be open to others, or anything else.
    pub(crate) fn create_anew(&self, name: &str) -> io::Result<File> {
        match fs::remove_file(self.path.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => self.create_new(name),
        }
    }
}

/// The files of a directory whose names satisfy `is_wanted`, in the order of their paths.
pub(crate) fn list(directory: &Path, is_wanted: impl Fn(&str) -> bool) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(&is_wanted) {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

/// Removes files; answers with how many. It stops at the first that cannot be removed.
pub(crate) fn remove(paths: &[PathBuf]) -> io::Result<usize> {
    paths.iter().try_for_each(fs::remove_file)?;
    Ok(paths.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_holder_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let lock = || OwnedDirectory::lock(folder.path(), "journal", "journal.dir");
        let held = lock().unwrap();
        let refused = lock().unwrap_err();
        assert!(refused.kind() == Kind::Config && refused.to_string().contains("another daemon keeps its journal"));
        drop(held);
        assert!(lock().is_ok());
        let absent = OwnedDirectory::lock(&folder.path().join("absent"), "journal", "journal.dir").unwrap_err();
        assert_eq!(absent.kind(), Kind::System);
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_refused_with_its_path() {
        let folder = tempfile::tempdir().unwrap();
        make(&folder.path().join("made"), "journal.dir").unwrap();
        make(&folder.path().join("made"), "journal.dir").expect("it is there");
        let error = make(&folder.path().join("absent/child"), "journal.dir").unwrap_err();
        assert!(error.kind() == Kind::System && error.message().contains("absent/child"), "{error}");
        assert!(error.remedy().contains("journal.dir"), "{error}");
    }
}
