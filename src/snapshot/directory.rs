//! The directory of snapshots: one file per worker, and one of what was learnt of all workers, each written under another
//! name and renamed when it is whole.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use parking_lot::Mutex;

use crate::error::{Error, Kind, Result};
use crate::ids::Worker;
use crate::owned_directory::{self, DIRECTORY_MODE, OwnedDirectory};

const FIELD: &str = "snapshot.dir";
const SUFFIX: &str = ".snapshot";
const PARTIAL_SUFFIX: &str = ".snapshot.partial";
const LAWS_NAME: &str = "prefill-laws";
const LAWS_PARTIAL_NAME: &str = "prefill-laws.partial";
const BOOKINGS_NAME: &str = "bookings";
const BOOKINGS_PARTIAL_NAME: &str = "bookings.partial";
const BOOKINGS_UNUSABLE_NAME: &str = "bookings.unusable";

/// The directory of snapshots. Only this daemon writes to it while this value lives.
#[derive(Debug)]
pub struct Directory {
    owned: OwnedDirectory,
    /// Goes up by one with each call of [`remove`](Self::remove), which discards contents that must not be used again.
    /// A file that was begun under a smaller number is not given its final name. The lock is held during each removal
    /// and each rename, so no removal can come between the check of the number and the rename.
    removals: Mutex<u64>,
}

/// A file that is being written, under a name of its own.
#[derive(Debug)]
pub(super) struct Partial {
    worker: Worker,
    path: PathBuf,
    file: File,
    removals: u64,
}

/// A whole snapshot file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SnapshotFile {
    pub(super) worker: Worker,
    pub(super) written: SystemTime,
}

impl Directory {
    /// Makes the directory if it is not there, locks it, and removes unfinished files of an earlier daemon.
    ///
    /// # Errors
    /// [`Kind::Config`] if it is open to other users or another daemon holds it; [`Kind::System`] otherwise.
    pub fn open(path: &Path) -> Result<Self> {
        let this = Self::share(path)?;
        this.remove_ending(PARTIAL_SUFFIX).map_err(|error| {
            let what = format!("cannot clean the snapshot directory {}", path.display());
            Error::new(Kind::System, what, "check that the daemon's user owns it").caused_by(error)
        })?;
        Ok(this)
    }

    /// The same beside a daemon that still uses the directory and has passed on its lock: unfinished files stay.
    ///
    /// # Errors
    /// As [`Directory::open`].
    pub fn share(path: &Path) -> Result<Self> {
        let system = |what: &str, error: io::Error| {
            let remedy = "check that the daemon's user owns it";
            Error::new(Kind::System, format!("cannot {what} the snapshot directory {}", path.display()), remedy)
                .caused_by(error)
        };
        owned_directory::make(path, FIELD)?;
        let mode = fs::metadata(path).map_err(|error| system("read the mode of", error))?.mode() & 0o777;
        if mode & !DIRECTORY_MODE != 0 {
            let what = format!("the snapshot directory {} is open to other users: mode {mode:o}", path.display());
            return Err(Error::new(Kind::Config, what, format!("chmod 700 {}", path.display())));
        }
        Ok(Self { owned: OwnedDirectory::lock(path, "snapshots", FIELD)?, removals: Mutex::new(0) })
    }

    /// The path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.owned.path()
    }

    /// The path of a worker's whole snapshot.
    pub(super) fn file_of(&self, worker: Worker) -> PathBuf {
        self.path().join(name_of(worker, SUFFIX))
    }

    /// The whole snapshots.
    pub(super) fn files(&self) -> io::Result<Vec<SnapshotFile>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(self.path())? {
            let entry = entry?;
            if let Some(worker) = entry.file_name().to_str().and_then(worker_of) {
                files.push(SnapshotFile { worker, written: entry.metadata()?.modified()? });
            }
        }
        Ok(files)
    }

    /// Begins a worker's file under a partial name.
    pub(super) fn begin(&self, worker: Worker) -> io::Result<Partial> {
        let removals = *self.removals.lock();
        let name = name_of(worker, PARTIAL_SUFFIX);
        let file = self.owned.create_anew(&name)?;
        Ok(Partial { worker, path: self.path().join(name), file, removals })
    }

    /// Gives a whole file its final name, once it has reached the disk. `false`: files were removed meanwhile, so this
    /// one is removed too.
    pub(super) fn commit(&self, partial: &Partial) -> io::Result<bool> {
        partial.file.sync_all()?;
        {
            let removals = self.removals.lock();
            if *removals != partial.removals {
                fs::remove_file(&partial.path)?;
                return Ok(false);
            }
            fs::rename(&partial.path, self.file_of(partial.worker))?;
        }
        self.sync()?;
        Ok(true)
    }

    /// Removes a file that will not be finished.
    pub(super) fn abandon(&self, partial: &Partial) {
        if let Err(error) = fs::remove_file(&partial.path) {
            tracing::warn!(path = %partial.path.display(), %error, "cannot remove an unfinished snapshot");
        }
    }

    /// Removes a worker's file, or all files if `worker` is `None`. Files that were begun before this call are not
    /// given their final names. Answers with the number of files removed.
    ///
    /// # Errors
    /// The error of the first file that cannot be removed. Other files may have been removed before it.
    pub fn remove(&self, worker: Option<Worker>) -> io::Result<usize> {
        let mut removals = self.removals.lock();
        *removals += 1;
        let removed = match worker {
            None => self.remove_ending(SUFFIX)?,
            Some(worker) => match fs::remove_file(self.file_of(worker)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
                done => done.map(|()| 1)?,
            },
        };
        drop(removals);
        self.sync()?;
        Ok(removed)
    }

    /// The path of the file of learnt prefill times.
    pub(super) fn laws_file(&self) -> PathBuf {
        self.path().join(LAWS_NAME)
    }

    /// Replaces the file of learnt prefill times. An unfinished one of a daemon that was killed is removed.
    pub(super) fn write_laws(&self, bytes: &[u8]) -> io::Result<()> {
        let mut file = self.owned.create_anew(LAWS_PARTIAL_NAME)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(self.path().join(LAWS_PARTIAL_NAME), self.laws_file())?;
        self.sync()
    }

    /// Removes the file of learnt prefill times. Answers whether there was one.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn remove_laws(&self) -> io::Result<bool> {
        match fs::remove_file(self.laws_file()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            removed => removed.and_then(|()| self.sync()).map(|()| true),
        }
    }

    /// The path of the image of bookings.
    pub(super) fn bookings_file(&self) -> PathBuf {
        self.path().join(BOOKINGS_NAME)
    }

    /// Replaces the image of bookings. With `syncs` it outlives a crash of the machine, else one of the daemon.
    pub(super) fn write_bookings<T>(&self, syncs: bool, write: impl FnOnce(&File) -> io::Result<T>) -> io::Result<T> {
        let file = self.owned.create_anew(BOOKINGS_PARTIAL_NAME)?;
        let written = write(&file)?;
        if syncs {
            file.sync_all()?;
        }
        fs::rename(self.path().join(BOOKINGS_PARTIAL_NAME), self.bookings_file())?;
        if syncs {
            self.sync()?;
        }
        Ok(written)
    }

    /// Removes the image of bookings, and one that could not be used, if they are there.
    pub(super) fn remove_bookings(&self) -> io::Result<()> {
        for name in [BOOKINGS_NAME, BOOKINGS_UNUSABLE_NAME] {
            match fs::remove_file(self.path().join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        self.sync()
    }

    /// Gives what has the name of the image of bookings, and is none, another name.
    pub(super) fn set_bookings_aside(&self) -> io::Result<()> {
        fs::rename(self.bookings_file(), self.path().join(BOOKINGS_UNUSABLE_NAME)).and_then(|()| self.sync())
    }

    fn remove_ending(&self, suffix: &str) -> io::Result<usize> {
        owned_directory::remove(&owned_directory::list(self.path(), |name| name.ends_with(suffix))?)
    }

    fn sync(&self) -> io::Result<()> {
        File::open(self.path())?.sync_all()
    }
}

impl Partial {
    pub(super) const fn file(&self) -> &File {
        &self.file
    }
}

fn name_of(worker: Worker, suffix: &str) -> String {
    format!("{}-{}{suffix}", worker.id, worker.rank)
}

/// The worker of a snapshot file's name; `None` if it is not the name of a snapshot.
fn worker_of(name: &str) -> Option<Worker> {
    let (id, rank) = name.strip_suffix(SUFFIX)?.split_once('-')?;
    let worker = Worker::new(id.parse().ok()?, rank.parse().ok()?);
    // Only the daemon's own spelling counts: it never writes `01` or `+1`.
    (name_of(worker, SUFFIX) == name).then_some(worker)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    fn write(directory: &Directory, worker: Worker, bytes: &[u8]) -> bool {
        let partial = directory.begin(worker).unwrap();
        partial.file().write_all(bytes).unwrap();
        directory.commit(&partial).unwrap()
    }

    #[test]
    fn the_directory_belongs_to_one_user_and_one_daemon() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("snapshots");
        let directory = Directory::open(&path).unwrap();
        assert!(write(&directory, Worker::new(1, 0), b"x"));
        assert_eq!((mode(&path), mode(&directory.file_of(Worker::new(1, 0)))), (0o700, 0o600));
        let error = Directory::open(&path).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        assert!(error.to_string().contains("another daemon keeps its snapshots"), "{error}");
        drop(directory);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).unwrap();
        let error = Directory::open(&path).unwrap_err();
        assert!(error.to_string().contains("open to other users: mode 750") && error.remedy().contains("chmod 700"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        assert!(Directory::open(&path).is_ok());
        assert_eq!(Directory::open(&folder.path().join("a/b")).unwrap_err().kind(), Kind::System);
    }

    #[test]
    fn a_snapshot_is_there_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("snapshots");
        let directory = Directory::open(&path).unwrap();
        let worker = Worker::new(u64::MAX, 7);
        assert!(write(&directory, worker, b"old"));
        let partial = directory.begin(worker).unwrap();
        partial.file().write_all(b"ne").unwrap();
        assert_eq!(fs::read(directory.file_of(worker)).unwrap(), b"old");
        // The daemon is killed here. The next one finds the old snapshot, and nothing else.
        drop(directory);
        fs::write(path.join("notes.txt"), "mine").unwrap();
        fs::write(path.join("01-0.snapshot"), "mine").unwrap();
        let directory = Directory::open(&path).unwrap();
        let files = directory.files().unwrap();
        assert_eq!(files.iter().map(|file| file.worker).collect::<Vec<_>>(), [worker]);
        assert_eq!(fs::read_dir(&path).unwrap().count(), 4, "the lock, the snapshot, and two foreign files");
        directory.abandon(&directory.begin(worker).unwrap());
        assert_eq!(fs::read(directory.file_of(worker)).unwrap(), b"old");
    }

    #[test]
    fn a_file_begun_before_a_removal_never_gets_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::open(&folder.path().join("snapshots")).unwrap();
        let (one, two) = (Worker::new(1, 0), Worker::new(2, 0));
        assert!(write(&directory, one, b"1") && write(&directory, two, b"2"));
        let partial = directory.begin(one).unwrap();
        assert_eq!(directory.remove(Some(one)).unwrap(), 1);
        assert!(!directory.commit(&partial).unwrap());
        assert_eq!(directory.files().unwrap().len(), 1);
        assert_eq!((directory.remove(Some(one)).unwrap(), directory.remove(None).unwrap()), (0, 1));
        assert!(write(&directory, one, b"1"), "a file begun after it does");
    }
}
