//! The directory of snapshots: one file per worker, written aside and put in place whole.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use parking_lot::Mutex;

use crate::directory_lock::DirectoryLock;
use crate::error::{Error, Kind, Result};
use crate::ids::Worker;

const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
const SUFFIX: &str = ".snapshot";
const PARTIAL_SUFFIX: &str = ".snapshot.partial";

/// A directory that this daemon alone writes, for as long as this value lives.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    _lock: DirectoryLock,
    /// How often files were removed because what they hold is not to be used again. Held while a file is put
    /// in place, so that one begun before a removal is never put in place after it.
    removals: Mutex<u64>,
}

/// A file being written, not yet in place.
#[derive(Debug)]
pub(super) struct Partial {
    worker: Worker,
    path: PathBuf,
    file: File,
    removals: u64,
}

/// A file in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kept {
    pub(super) worker: Worker,
    pub(super) written: SystemTime,
}

impl Directory {
    /// Takes a directory, which is made if it is not there. What a writer left unfinished is removed.
    ///
    /// # Errors
    /// [`Kind::Config`] if it is open to other users or another daemon has it; [`Kind::System`] for the rest.
    pub fn open(path: &Path) -> Result<Self> {
        let system = |what: &str, error: io::Error| {
            let remedy = "check that its parent exists and that the daemon's user owns it";
            Error::new(Kind::System, format!("cannot {what} the snapshot directory {}", path.display()), remedy)
                .caused_by(error)
        };
        match DirBuilder::new().mode(DIRECTORY_MODE).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(system("make", error)),
            _ => {}
        }
        let mode = fs::metadata(path).map_err(|error| system("look at", error))?.mode() & 0o777;
        if mode & !DIRECTORY_MODE != 0 {
            let what = format!("the snapshot directory {} is open to other users: mode {mode:o}", path.display());
            return Err(Error::new(Kind::Config, what, format!("chmod 700 {}", path.display())));
        }
        let lock = DirectoryLock::take(path, "snapshots", "snapshot.dir")?;
        let this = Self { path: path.to_owned(), _lock: lock, removals: Mutex::new(0) };
        this.remove_ending(PARTIAL_SUFFIX).map_err(|error| system("clean", error))?;
        Ok(this)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A worker's file.
    pub(super) fn file_of(&self, worker: Worker) -> PathBuf {
        self.path.join(format!("{}-{}{SUFFIX}", worker.id, worker.rank))
    }

    /// The files in place.
    pub(super) fn kept(&self) -> io::Result<Vec<Kept>> {
        let mut kept = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            if let Some(worker) = entry.file_name().to_str().and_then(worker_of) {
                kept.push(Kept { worker, written: entry.metadata()?.modified()? });
            }
        }
        Ok(kept)
    }

    /// Begins a worker's file, aside.
    pub(super) fn begin(&self, worker: Worker) -> io::Result<Partial> {
        let removals = *self.removals.lock();
        let path = self.path.join(format!("{}-{}{PARTIAL_SUFFIX}", worker.id, worker.rank));
        let file = OpenOptions::new().create(true).truncate(true).write(true).mode(FILE_MODE).open(&path)?;
        Ok(Partial { worker, path, file, removals })
    }

    /// Puts a file in place that is written in full: on the disk first, then under its name. `false` = files were
    /// removed meanwhile, and this one with them.
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

    /// Gives up a file that is not written in full.
    pub(super) fn abandon(&self, partial: &Partial) {
        if let Err(error) = fs::remove_file(&partial.path) {
            tracing::warn!(path = %partial.path.display(), %error, "cannot remove an unfinished snapshot");
        }
    }

    /// Removes a worker's file, or everybody's, and lets no file that was begun before be put in place. Answers
    /// how many there were.
    ///
    /// # Errors
    /// The first file that could not be removed; others may have been.
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

    fn remove_ending(&self, suffix: &str) -> io::Result<usize> {
        let mut removed = 0;
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            if entry.file_name().to_str().is_some_and(|name| name.ends_with(suffix)) {
                fs::remove_file(entry.path())?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }
}

impl Partial {
    /// Where to write.
    pub(super) const fn file(&self) -> &File {
        &self.file
    }
}

/// The worker that a file's name says; other files are nobody's.
fn worker_of(name: &str) -> Option<Worker> {
    let (id, rank) = name.strip_suffix(SUFFIX)?.split_once('-')?;
    let worker = Worker::new(id.parse().ok()?, rank.parse().ok()?);
    // Only as it is written here: `01` or `+1` is no name of ours.
    (format!("{}-{}{SUFFIX}", worker.id, worker.rank) == name).then_some(worker)
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
    fn it_is_the_owners_alone_and_one_daemons() {
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
    fn a_file_is_in_place_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("snapshots");
        let directory = Directory::open(&path).unwrap();
        let worker = Worker::new(u64::MAX, 7);
        assert!(write(&directory, worker, b"old"));
        let partial = directory.begin(worker).unwrap();
        partial.file().write_all(b"ne").unwrap();
        assert_eq!(fs::read(directory.file_of(worker)).unwrap(), b"old");
        // The daemon is killed here; the next one finds what was there, and nothing else.
        drop(directory);
        fs::write(path.join("notes.txt"), "mine").unwrap();
        fs::write(path.join("01-0.snapshot"), "mine").unwrap();
        let directory = Directory::open(&path).unwrap();
        let kept = directory.kept().unwrap();
        assert_eq!(kept.iter().map(|kept| kept.worker).collect::<Vec<_>>(), [worker]);
        assert_eq!(fs::read_dir(&path).unwrap().count(), 4, "the lock, the snapshot, and two files of somebody else");
        directory.abandon(&directory.begin(worker).unwrap());
        assert_eq!(fs::read(directory.file_of(worker)).unwrap(), b"old");
    }

    #[test]
    fn what_was_begun_before_a_removal_never_comes_into_place() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::open(&folder.path().join("snapshots")).unwrap();
        let (one, two) = (Worker::new(1, 0), Worker::new(2, 0));
        assert!(write(&directory, one, b"1") && write(&directory, two, b"2"));
        let partial = directory.begin(one).unwrap();
        assert_eq!(directory.remove(Some(one)).unwrap(), 1);
        assert!(!directory.commit(&partial).unwrap());
        assert_eq!(directory.kept().unwrap().len(), 1);
        assert_eq!((directory.remove(Some(one)).unwrap(), directory.remove(None).unwrap()), (0, 1));
        assert!(write(&directory, one, b"1"), "what is begun after it does");
    }
}
