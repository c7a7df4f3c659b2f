//! The thread that takes what the cores noted: it writes it down, and has a shadow policy judge it. Pure but for its
//! files: turns are called, time is the records' own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::encode::Encoder;
use super::files::{Files, FilesPlan};
use super::format::Origin;
use super::record::Record;
use super::ring::{Ring, Waiting};
use crate::error::{Error, Kind, Result};
use crate::limits::{
    JOURNAL_OFF_REST_MS, JOURNAL_RECORDS_PER_TURN_MAX, JOURNAL_REST_MS, JOURNAL_RETRY_TURNS, JOURNAL_WRITE_BYTES,
};
use crate::metrics::{CounterSet, JournalCounter};

/// What judges decisions under another policy.
pub trait Judge: Send {
    /// Judges a decision; `record` is as it was afterwards.
    fn judge(&mut self, record: &mut Record);
}

/// What a writer works on.
pub struct WriterPlan {
    /// Who writes; the head of every file.
    pub origin: Origin,
    /// Where to write; `None` = nothing is written, only judged.
    pub files: Option<FilesPlan>,
    /// By core.
    pub rings: Vec<Arc<Ring>>,
    /// Who judges what is to be judged.
    pub judge: Box<dyn Judge>,
    /// What is counted.
    pub counters: Arc<CounterSet<JournalCounter>>,
}

/// Takes from rings. Call its turns.
pub struct Writer {
    plan: WriterPlan,
    files: Option<Files>,
    encoder: Encoder,
    /// Encoded, not written.
    bytes: Vec<u8>,
    /// Turns until the disk is tried again.
    rest: u32,
}

impl Writer {
    /// Takes the directory. A file is begun with the first decision.
    ///
    /// # Errors
    /// `System` if the directory cannot be had, `Config` if another daemon has it.
    pub fn new(mut plan: WriterPlan) -> Result<Self> {
        let open = |files| Files::open(files, plan.origin.started_unix_ms, plan.origin.instance_id);
        let files = plan.files.take().map(open).transpose()?;
        Ok(Self { plan, files, encoder: Encoder::default(), bytes: Vec::new(), rest: 0 })
    }

    /// Takes a bounded number of decisions from every core; whether there may be more.
    pub fn turn(&mut self) -> bool {
        self.rest = self.rest.saturating_sub(1);
        let mut more = false;
        for core in 0..self.plan.rings.len() {
            let ring = Arc::clone(&self.plan.rings[core]);
            let taken = std::iter::from_fn(|| ring.pop()).take(JOURNAL_RECORDS_PER_TURN_MAX);
            let count = taken.map(|waiting| self.take(core as u32, &ring, waiting)).count();
            more |= count == JOURNAL_RECORDS_PER_TURN_MAX;
        }
        self.flush();
        more
    }

    fn take(&mut self, core: u32, ring: &Ring, mut waiting: Box<Waiting>) {
        if waiting.is_judged {
            self.plan.judge.judge(&mut waiting.record);
        }
        if self.files.is_some() && (waiting.is_written || waiting.lost_before > 0) {
            self.write(core, &waiting);
        }
        ring.give_back(waiting);
    }

    fn write(&mut self, core: u32, waiting: &Waiting) {
        if !self.begin_file() {
            self.plan.counters.bump(JournalCounter::Unwritten);
            return;
        }
        if waiting.lost_before > 0 {
            self.plan.counters.bump(JournalCounter::Gaps);
            self.encoder.gap(core, waiting.lost_before, &mut self.bytes);
        }
        if waiting.is_written {
            self.plan.counters.bump(JournalCounter::Records);
            self.encoder.decision(core, &waiting.record, &mut self.bytes);
        }
        if self.files.as_ref().is_some_and(|files| files.is_full(self.bytes.len())) {
            self.end_file();
        } else if self.bytes.len() >= JOURNAL_WRITE_BYTES {
            self.flush();
        }
    }

    /// Whether there is a file to write to.
    fn begin_file(&mut self) -> bool {
        let Some(files) = &mut self.files else { return false };
        if files.is_open() {
            return true;
        }
        if self.rest > 0 {
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

    /// A disk that fails is left alone for a while.
    fn failed(&mut self, error: &std::io::Error) {
        self.plan.counters.bump(JournalCounter::WritesFailed);
        self.rest = JOURNAL_RETRY_TURNS;
        tracing::warn!(%error, remedy = "make room, or see to the permissions of [journal] dir", "the journal cannot be written");
    }

    /// Takes what is left, and ends the file.
    pub fn finish(mut self) {
        while self.turn() {}
        if self.files.as_ref().is_some_and(Files::is_open) {
            self.end_file();
        }
    }
}

/// A writer with a thread of its own.
#[derive(Debug)]
pub struct WriterThread {
    thread: JoinHandle<()>,
    ending: Arc<AtomicBool>,
}

impl WriterThread {
    /// Starts writing. `is_off` says whether the cores note nothing: there is nothing to look for then.
    ///
    /// # Errors
    /// `System` if the directory or the thread cannot be had.
    pub fn start(plan: WriterPlan, is_off: impl Fn() -> bool + Send + 'static) -> Result<Self> {
        let rings = plan.rings.clone();
        let mut writer = Writer::new(plan)?;
        let ending = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&ending);
        let run = move || {
            // Acquire: pairs with the Release in `stop`.
            while !ended.load(Ordering::Acquire) {
                if !writer.turn() {
                    let rest_ms = if is_off() { JOURNAL_OFF_REST_MS } else { JOURNAL_REST_MS };
                    std::thread::park_timeout(Duration::from_millis(rest_ms));
                }
            }
            writer.finish();
        };
        let thread = std::thread::Builder::new().name("journal".into()).spawn(run).map_err(|error| {
            Error::new(Kind::System, "cannot start the journal's writer", "raise the limit of threads").caused_by(error)
        })?;
        rings.iter().for_each(|ring| ring.wakes(thread.thread().clone()));
        Ok(Self { thread, ending })
    }

    /// Whether it runs; it ends by itself only by a fault.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !self.thread.is_finished()
    }

    /// Has it look at once.
    pub fn wake(&self) {
        self.thread.thread().unpark();
    }

    /// Ends it and waits until all that was noted is on the disk.
    ///
    /// # Errors
    /// `Internal` if it had panicked.
    pub fn stop(self) -> Result<()> {
        // Release: pairs with the Acquire of its loop.
        self.ending.store(true, Ordering::Release);
        self.thread.thread().unpark();
        let panicked =
            |_| Error::new(Kind::Internal, "the journal's writer panicked", "report it with the log around it");
        self.thread.join().map_err(panicked)
    }
}
