//! The writer thread of the journal takes sampled decisions from the serving threads: it writes them to files, and
//! passes them to the shadow policy.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::decision_record::DecisionRecord;
use super::decision_recorder::{DecisionQueue, QueuedDecision};
use super::format::{Encoder, Origin};
use super::identity::IdentityHasher;
use crate::error::{Error, Kind, Result};
use crate::limits::{
    JOURNAL_OFF_PAUSE_MS, JOURNAL_PAUSE_MS, JOURNAL_RECORDS_PER_QUANTUM_MAX, JOURNAL_RETRY_ROUNDS, JOURNAL_WRITE_BYTES,
};
use crate::load::Loads;
use crate::metrics::{CounterSet, JournalCounter};
use crate::owned_directory::{self, OwnedDirectory};
use crate::sandbox::{self, ThreadKind};
use crate::watchdog::{Activity, ThreadMark};

const SUFFIX: &str = ".kvrj";

/// The configuration of the journal's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilesPlan {
    /// The directory.
    pub dir: PathBuf,
    /// The size at which a file is closed and the next one begun.
    pub file_bytes_max: u64,
    /// The number of files to keep, including the one being written.
    pub files_max: usize,
}

/// The journal's files: one is written, and the oldest are removed. Their mode is 0600: they hold no prompts, but they
/// show which workers get how many requests.
#[derive(Debug)]
struct Files {
    plan: FilesPlan,
    /// The beginning of this run's file names. The names sort by when the daemon started.
    run: String,
    /// Counts the files of this run.
    next: u64,
    open: Option<OpenFile>,
    /// Dropped last, so that the lock outlives the open file.
    directory: OwnedDirectory,
}

/// The file being written.
#[derive(Debug)]
struct OpenFile {
    file: File,
    name: String,
    /// Bytes so far.
    bytes: u64,
}

impl Files {
    /// Makes the directory, if its parent is there, and locks it for this daemon: two daemons would remove each other's
    /// files.
    ///
    /// # Errors
    /// `System` if the directory cannot be made or locked, `Config` if another daemon holds it.
    fn open(plan: FilesPlan, started_unix_ms: u64, instance_id: u64) -> Result<Self> {
        const FIELD: &str = "journal.dir";
        owned_directory::make(&plan.dir, FIELD)?;
        let directory = OwnedDirectory::lock(&plan.dir, "journal", FIELD)?;
        let run = format!("journal-{started_unix_ms:013}-{instance_id:016x}");
        Ok(Self { plan, run, next: 0, open: None, directory })
    }

    const fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Whether `more` bytes would bring the open file to its size limit.
    fn is_full(&self, more: usize) -> bool {
        self.open.as_ref().is_some_and(|open| open.bytes + more as u64 >= self.plan.file_bytes_max)
    }

    /// Begins the next file; answers with how many old ones were removed.
    fn begin(&mut self) -> io::Result<usize> {
        let name = format!("{}-{:06}{SUFFIX}", self.run, self.next);
        self.next += 1;
        self.open = Some(OpenFile { file: self.directory.create_new(&name)?, name, bytes: 0 });
        self.remove_oldest()
    }

    /// Removes what is more than may be kept. Files of earlier runs go first, also those that a clock which has gone back
    /// since gave a later name.
    fn remove_oldest(&self) -> io::Result<usize> {
        let mut all = list(&self.plan.dir)?;
        let is_own = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(self.run.as_bytes()))
        };
        // A stable sort: within each part they stay in order.
        all.sort_by_key(is_own);
        let surplus = all.len().saturating_sub(self.plan.files_max.max(1));
        owned_directory::remove(&all[..surplus])
    }

    /// Writes to the open file. After a failure the file is closed as it is: the records before the failure can be
    /// read. A file whose first write fails is removed: while a disk is full, files without records must not take the
    /// place of older ones.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(open) = &mut self.open else { return Ok(()) };
        let outcome = open.file.write_all(bytes);
        if outcome.is_ok() {
            open.bytes += bytes.len() as u64;
        } else if let Some(OpenFile { name, bytes: 0, .. }) = self.open.take() {
            // If this fails too, the error of the write says enough.
            let _ = owned_directory::remove(&[self.plan.dir.join(name)]);
        }
        outcome
    }

    /// Closes the open file after it has reached the disk.
    fn end(&mut self) -> io::Result<()> {
        self.open.take().map_or(Ok(()), |open| open.file.sync_all())
    }
}

/// The journal files of a directory, the oldest first.
///
/// # Errors
/// Those of reading the directory.
pub fn list(dir: &Path) -> io::Result<Vec<PathBuf>> {
    owned_directory::list(dir, |name| name.starts_with("journal-") && name.ends_with(SUFFIX))
}

/// Judges decisions under a shadow policy.
pub trait Judge: Send {
    /// Judges a decision. The journal then writes `record` as this call leaves it.
    fn judge(&mut self, record: &mut DecisionRecord);
}

/// What a writer needs.
pub struct WriterPlan {
    /// The daemon run, for the head of every file.
    pub origin: Origin,
    /// The files; `None` = decisions are judged and not written.
    pub files: Option<FilesPlan>,
    /// The queues, by serving thread.
    pub queues: Vec<Arc<DecisionQueue>>,
    /// Where the ends of recorded bookings wait.
    pub loads: Arc<Loads>,
    /// Makes the identities of prefixes.
    pub hasher: IdentityHasher,
    /// The shadow policy's judge.
    pub judge: Box<dyn Judge>,
    /// The journal's counters.
    pub counters: Arc<CounterSet<JournalCounter>>,
    /// The thread's mark.
    pub mark: Arc<ThreadMark>,
}

/// The writer without its thread, which calls [`round`](Self::round).
pub(super) struct Writer {
    plan: WriterPlan,
    files: Option<Files>,
    encoder: Encoder,
    /// Encoded records that are not written yet.
    bytes: Vec<u8>,
    /// Rounds until a disk that failed is tried again.
    retry_rounds: u32,
}

impl Writer {
    /// Takes the directory. The first file is begun with the first decision.
    ///
    /// # Errors
    /// `System` if the directory cannot be made or locked, `Config` if another daemon holds it.
    pub(super) fn new(mut plan: WriterPlan) -> Result<Self> {
        let open = |files| Files::open(files, plan.origin.started_unix_ms, plan.origin.instance_id);
        let files = plan.files.take().map(open).transpose()?;
        Ok(Self { plan, files, encoder: Encoder::default(), bytes: Vec::new(), retry_rounds: 0 })
    }

    /// Takes a bounded number of records from every queue. Whether more may wait.
    pub(super) fn round(&mut self) -> bool {
        self.retry_rounds = self.retry_rounds.saturating_sub(1);
        let mut more = false;
        for core in 0..self.plan.queues.len() {
            let queue = Arc::clone(&self.plan.queues[core]);
            let taken = std::iter::from_fn(|| queue.pop()).take(JOURNAL_RECORDS_PER_QUANTUM_MAX);
            let count = taken.map(|queued| self.take(core as u32, &queue, queued)).count();
            more |= count == JOURNAL_RECORDS_PER_QUANTUM_MAX;
        }
        // After the decisions, so that most bookings are recorded before their end.
        more |= self.take_ends();
        self.flush();
        more
    }

    /// Takes a bounded number of ended bookings. Whether more may wait.
    fn take_ends(&mut self) -> bool {
        let loads = Arc::clone(&self.plan.loads);
        let lost = loads.take_ended_lost();
        if lost > 0 {
            self.plan.counters.add(JournalCounter::EndsLost, lost);
            self.append(|encoder, bytes| encoder.ends_lost(lost, bytes));
        }
        let ends = std::iter::from_fn(|| loads.take_ended()).take(JOURNAL_RECORDS_PER_QUANTUM_MAX);
        let take = |ended| {
            let counter = match self.append(|encoder, bytes| encoder.ended(&ended, bytes)) {
                true => JournalCounter::Ends,
                false => JournalCounter::EndsLost,
            };
            self.plan.counters.bump(counter);
        };
        ends.map(take).count() == JOURNAL_RECORDS_PER_QUANTUM_MAX
    }

    fn take(&mut self, core: u32, queue: &DecisionQueue, mut queued: Box<QueuedDecision>) {
        if queued.is_judged {
            self.plan.judge.judge(&mut queued.record);
        }
        if self.files.is_some() && (queued.is_written || queued.lost_before > 0) {
            self.plan.hasher.chain(&mut queued.record.identity.prefix);
            self.write(core, &queued);
        }
        queue.recycle(queued);
    }

    fn write(&mut self, core: u32, queued: &QueuedDecision) {
        let lost = queued.lost_before;
        if lost > 0 && self.append(|encoder, bytes| encoder.gap(core, lost, bytes)) {
            self.plan.counters.bump(JournalCounter::Gaps);
        }
        if queued.is_written {
            let counter = match self.append(|encoder, bytes| encoder.decision(core, &queued.record, bytes)) {
                true => JournalCounter::Records,
                false => JournalCounter::Unwritten,
            };
            self.plan.counters.bump(counter);
        }
    }

    /// Appends a record to the open file, or to one that is begun for it. `false` = no file can be written.
    fn append(&mut self, encode: impl FnOnce(&mut Encoder, &mut Vec<u8>)) -> bool {
        if !self.begin_file() {
            return false;
        }
        encode(&mut self.encoder, &mut self.bytes);
        if self.files.as_ref().is_some_and(|files| files.is_full(self.bytes.len())) {
            self.end_file();
        } else if self.bytes.len() >= JOURNAL_WRITE_BYTES {
            self.flush();
        }
        true
    }

    /// Begins a file if none is open. Whether one is open now.
    fn begin_file(&mut self) -> bool {
        let Some(files) = &mut self.files else { return false };
        if files.is_open() {
            return true;
        }
        if self.retry_rounds > 0 {
            return false;
        }
        match files.begin() {
            Ok(removed) => {
                self.plan.counters.bump(JournalCounter::Files);
                self.plan.counters.add(JournalCounter::FilesRemoved, removed as u64);
            }
            Err(error) => self.failed(&error),
        }
        if !self.files.as_ref().is_some_and(Files::is_open) {
            return false;
        }
        self.bytes.clear();
        self.plan.origin.classes = self.plan.loads.prefill_class_names();
        self.encoder = Encoder::begin(&self.plan.origin, &mut self.bytes);
        true
    }

    fn flush(&mut self) {
        let Some(files) = &mut self.files else { return };
        if self.bytes.is_empty() || !files.is_open() {
            return;
        }
        match files.write(&self.bytes) {
            Ok(()) => self.plan.counters.add(JournalCounter::Bytes, self.bytes.len() as u64),
            Err(error) => self.failed(&error),
        }
        self.bytes.clear();
    }

    fn end_file(&mut self) {
        std::mem::take(&mut self.encoder).end(&mut self.bytes);
        self.flush();
        if let Some(Err(error)) = self.files.as_mut().map(Files::end) {
            self.failed(&error);
        }
    }

    /// Counts and logs a failure of the disk, and pauses writing for some rounds.
    fn failed(&mut self, error: &io::Error) {
        self.plan.counters.bump(JournalCounter::WritesFailed);
        self.retry_rounds = JOURNAL_RETRY_ROUNDS;
        let remedy = "free disk space, or correct the permissions of the directory that [journal] dir names";
        tracing::warn!(%error, remedy, "the journal cannot be written; later decisions will be tried");
    }

    /// Takes all decisions that wait, and closes the file.
    pub(super) fn finish(mut self) {
        while self.round() {}
        if self.files.as_ref().is_some_and(Files::is_open) {
            self.end_file();
        }
    }
}

/// The running writer.
#[derive(Debug)]
pub struct WriterThread {
    thread: JoinHandle<()>,
    ending: Arc<AtomicBool>,
}

impl WriterThread {
    /// Starts the thread. While `is_off` says that no decision is sampled, it polls the queues less often.
    ///
    /// # Errors
    /// `System` if the directory cannot be made or locked or the thread cannot start, `Config` if another daemon holds
    /// the directory.
    pub fn start(plan: WriterPlan, is_off: impl Fn() -> bool + Send + 'static) -> Result<Self> {
        let (queues, mark) = (plan.queues.clone(), Arc::clone(&plan.mark));
        let mut writer = Writer::new(plan)?;
        let ending = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&ending);
        let run = move || {
            sandbox::enter(ThreadKind::Journal);
            // Acquire: pairs with the Release in `stop`.
            while !ended.load(Ordering::Acquire) {
                mark.begin_round(Activity::WritingJournal);
                if !writer.round() {
                    mark.wait();
                    let pause_ms = if is_off() { JOURNAL_OFF_PAUSE_MS } else { JOURNAL_PAUSE_MS };
                    std::thread::park_timeout(Duration::from_millis(pause_ms));
                }
            }
            mark.begin_round(Activity::WritingJournal);
            writer.finish();
            mark.wait();
        };
        let thread = std::thread::Builder::new().name("journal".into()).spawn(run).map_err(|error| {
            Error::new(Kind::System, "cannot start the journal's writer", "raise the limit of threads").caused_by(error)
        })?;
        queues.iter().for_each(|queue| queue.set_consumer(thread.thread().clone()));
        Ok(Self { thread, ending })
    }

    /// Whether it runs. It ends by itself only after a panic.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !self.thread.is_finished()
    }

    /// Makes it poll the queues at once.
    pub fn wake(&self) {
        self.thread.thread().unpark();
    }

    /// Stops the thread, after all queued decisions are on the disk.
    ///
    /// # Errors
    /// `Internal` if the thread had panicked.
    pub fn stop(self) -> Result<()> {
        // Release: pairs with the Acquire of the thread's loop.
        self.ending.store(true, Ordering::Release);
        self.thread.thread().unpark();
        let panicked =
            |_| Error::new(Kind::Internal, "the journal's writer panicked", "report it with the log around it");
        self.thread.join().map_err(panicked)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn plan(dir: &Path) -> FilesPlan {
        FilesPlan { dir: dir.to_owned(), file_bytes_max: 10, files_max: 2 }
    }

    #[test]
    fn the_oldest_journal_files_are_removed_those_of_earlier_runs_too() {
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

    fn names(dir: &Path) -> Vec<String> {
        let name = |path: PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        list(dir).unwrap().into_iter().map(name).collect()
    }

    #[test]
    fn a_full_disk_costs_one_of_the_older_files_and_leaves_none_without_records() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("j");
        let mut files = Files::open(FilesPlan { files_max: 3, ..plan(&dir) }, 1, 1).unwrap();
        for _ in 0..3 {
            files.begin().unwrap();
            files.write(b"records").unwrap();
            files.end().unwrap();
        }
        let older = names(&dir);
        for _ in 0..5 {
            files.begin().unwrap();
            files.open.as_mut().unwrap().file = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
            files.write(b"records").unwrap_err();
            assert!(!files.is_open());
        }
        assert_eq!(names(&dir), older[1..], "the newest files are still there");
        // A file that has records keeps them.
        files.begin().unwrap();
        files.write(b"records").unwrap();
        files.open.as_mut().unwrap().file = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        files.write(b"more").unwrap_err();
        assert_eq!(names(&dir).len(), 3);
    }

    #[test]
    fn a_clock_that_has_gone_back_costs_no_file_of_this_run() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("j");
        let mut before = Files::open(plan(&dir), 9, 0xff).unwrap();
        assert_eq!((before.begin().unwrap(), before.begin().unwrap()), (0, 0));
        drop(before);
        let mut files = Files::open(plan(&dir), 1, 1).unwrap();
        for _ in 0..3 {
            assert_eq!(files.begin().unwrap(), 1);
            files.write(b"records").unwrap();
            files.end().unwrap();
        }
        let own = |at: u32| format!("journal-0000000000001-0000000000000001-{at:06}.kvrj");
        assert_eq!(names(&dir), [own(1), own(2)]);
    }

    #[test]
    fn a_directory_that_cannot_be_locked_is_refused_with_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("file");
        fs::write(&dir, "").unwrap();
        let error = Files::open(plan(&dir), 1, 1).unwrap_err();
        assert!(error.kind() == Kind::System && error.message().contains("file"), "{error}");
    }
}
