//! A lock on a folder, so that only one process at a time writes to it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::error::{Error, Kind, Result};

const NAME: &str = "lock";
const MODE: u32 = 0o600;

/// Holds the lock of a folder until it is dropped or its process ends in any way. The lock file stays.
#[derive(Debug)]
pub(crate) struct DirectoryLock {
    _file: File,
}

impl DirectoryLock {
    /// Locks the folder at `path`. For error messages: the daemon keeps its `what` there, as the configuration's `field`
    /// says.
    ///
    /// # Errors
    /// [`Kind::Config`] if another process holds the lock; [`Kind::System`] if the lock file cannot be used.
    pub(crate) fn take(path: &Path, what: &str, field: &str) -> Result<Self> {
        let system = |error: io::Error| {
            let remedy =
                format!("set {field} to a folder that the daemon's user owns, on a file system with file locks");
            Error::new(Kind::System, format!("cannot lock the folder {}", path.display()), remedy).caused_by(error)
        };
        let file = OpenOptions::new().create(true).truncate(false).write(true).mode(MODE).open(path.join(NAME));
        let file = file.map_err(system)?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => {
                let message = format!("another daemon keeps its {what} in {}", path.display());
                Err(Error::new(Kind::Config, message, format!("set a different {field} for each daemon")))
            }
            Err(TryLockError::Error(error)) => Err(system(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_one_holder_at_a_time() {
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
