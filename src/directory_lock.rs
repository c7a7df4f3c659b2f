//! A directory that one process at a time writes to.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::error::{Error, Kind, Result};

const NAME: &str = "lock";
const MODE: u32 = 0o600;

/// Holds a directory until it is dropped, or its process ends however it ends. The file it is held by stays.
#[derive(Debug)]
pub(crate) struct DirectoryLock {
    _file: File,
}

impl DirectoryLock {
    /// Takes the directory at `path`, in which the daemon keeps `what`, as the field `field` says.
    ///
    /// # Errors
    /// [`Kind::Config`] if another process has it; [`Kind::System`] if it cannot be known.
    pub(crate) fn take(path: &Path, what: &str, field: &str) -> Result<Self> {
        let system = |error: io::Error| {
            let remedy = format!("set {field} to a directory of the daemon's user, on a file system with locks");
            Error::new(Kind::System, format!("cannot lock the directory {}", path.display()), remedy).caused_by(error)
        };
        let file = OpenOptions::new().create(true).truncate(false).write(true).mode(MODE).open(path.join(NAME));
        let file = file.map_err(system)?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => {
                let message = format!("another daemon keeps its {what} in {}", path.display());
                Err(Error::new(Kind::Config, message, format!("give each daemon a {field} of its own")))
            }
            Err(TryLockError::Error(error)) => Err(system(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_holder_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let take = || DirectoryLock::take(folder.path(), "journal", "journal.dir");
        let held = take().unwrap();
        let refused = take().unwrap_err();
        assert!(refused.kind() == Kind::Config && refused.to_string().contains("another daemon keeps its journal"));
        drop(held);
        assert!(take().is_ok());
        let absent = DirectoryLock::take(&folder.path().join("absent"), "journal", "journal.dir").unwrap_err();
        assert_eq!(absent.kind(), Kind::System);
    }
}
