//! The files of a directory: one is written, the oldest go.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::directory_lock::DirectoryLock;
use crate::error::{Error, Kind, Result};

const SUFFIX: &str = ".kvrj";

/// Which files there are, and how large they get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilesPlan {
    /// Where.
    pub dir: PathBuf,
    /// A file is ended once it has so many bytes.
    pub file_bytes_max: u64,
    /// Files kept, the one that is written included.
    pub files_max: usize,
}

/// The journal's files. They are of mode 0600: prompts are not in them, but who is asked how much is.
#[derive(Debug)]
pub(super) struct Files {
    plan: FilesPlan,
    /// What the names of this run begin with: they sort by when the daemon started.
    run: String,
    /// Counts the files of this run.
    next: u64,
    open: Option<(File, u64)>,
    /// Two daemons would remove each other's files.
    _lock: DirectoryLock,
}

impl Files {
    /// Makes the directory, if its parent is there, and takes it for this daemon alone.
    ///
    /// # Errors
    /// `System` if it cannot be had, `Config` if another daemon has it.
    pub(super) fn open(plan: FilesPlan, started_unix_ms: u64, instance_id: u64) -> Result<Self> {
        let made = fs::DirBuilder::new().mode(0o700).create(&plan.dir);
        match made {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists || !plan.dir.is_dir() => {
                let what = format!("cannot make the directory {}", plan.dir.display());
                return Err(Error::new(Kind::System, what, "set [journal] dir to one this user may make or write")
                    .caused_by(error));
            }
            _ => {}
        }
        let lock = DirectoryLock::take(&plan.dir, "journal", "journal.dir")?;
        let run = format!("journal-{started_unix_ms:013}-{instance_id:016x}");
        Ok(Self { plan, run, next: 0, open: None, _lock: lock })
    }

    /// Whether a file is open.
    pub(super) const fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Whether the open file, with `more` bytes, is large enough to be ended.
    pub(super) fn is_full(&self, more: usize) -> bool {
        self.open.as_ref().is_some_and(|(_, bytes)| bytes + more as u64 >= self.plan.file_bytes_max)
    }

    /// Begins the next file; answers with how many old ones were removed.
    pub(super) fn begin(&mut self) -> io::Result<usize> {
        let path = self.plan.dir.join(format!("{}-{:06}{SUFFIX}", self.run, self.next));
        self.next += 1;
        let file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
        self.open = Some((file, 0));
        self.remove_oldest()
    }

    fn remove_oldest(&self) -> io::Result<usize> {
        let all = list(&self.plan.dir)?;
        let surplus = all.len().saturating_sub(self.plan.files_max.max(1));
        all.iter().take(surplus).try_for_each(fs::remove_file)?;
        Ok(surplus)
    }

    /// Writes to the open file. One that fails is left as it is: what stands in it so far can be read.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some((file, written)) = &mut self.open else { return Ok(()) };
        let outcome = file.write_all(bytes);
        *written += bytes.len() as u64;
        if outcome.is_err() {
            self.open = None;
        }
        outcome
    }

    /// Ends the open file: it is on the disk then.
    pub(super) fn end(&mut self) -> io::Result<()> {
        self.open.take().map_or(Ok(()), |(file, _)| file.sync_all())
    }
}

/// The journal files of a directory, the oldest first.
///
/// # Errors
/// Those of reading the directory.
pub fn list(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().map(|name| name.to_string_lossy());
        if name.is_some_and(|name| name.starts_with("journal-") && name.ends_with(SUFFIX)) {
            all.push(path);
        }
    }
    all.sort();
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(dir: &Path) -> FilesPlan {
        FilesPlan { dir: dir.to_owned(), file_bytes_max: 10, files_max: 2 }
    }

    #[test]
    fn the_oldest_files_go_those_of_runs_before_too_and_no_others() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("j");
        let mut before = Files::open(plan(&dir), 1, 0xff).unwrap();
        before.begin().unwrap();
        let second = Files::open(plan(&dir), 2, 1).unwrap_err();
        assert!(second.message().contains("another daemon"), "{second}");
        drop(before);
        fs::write(dir.join("journal-notes.txt"), "mine").unwrap();
        let mut files = Files::open(plan(&dir), 2, 1).unwrap();
        assert_eq!(files.begin().unwrap(), 0);
        files.write(b"123456789").unwrap();
        assert!(files.is_full(1) && !files.is_full(0));
        files.end().unwrap();
        assert!(!files.is_open());
        assert_eq!(files.begin().unwrap(), 1);
        let names: Vec<_> = list(&dir).unwrap().into_iter().map(|path| path.file_name().unwrap().to_owned()).collect();
        assert_eq!(
            names,
            [
                "journal-0000000000002-0000000000000001-000000.kvrj",
                "journal-0000000000002-0000000000000001-000001.kvrj"
            ]
        );
        assert!(dir.join("journal-notes.txt").exists());
    }

    #[test]
    fn a_directory_that_cannot_be_had_is_refused_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("file");
        fs::write(&dir, "").unwrap();
        let error = Files::open(plan(&dir), 1, 1).unwrap_err();
        assert!(error.kind() == Kind::System && error.message().contains("file"), "{error}");
    }
}
