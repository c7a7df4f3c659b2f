//! The thread that writes snapshots: one worker at a time, in rounds, and a last round when the daemon stops.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufWriter};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam::channel::{self, Receiver, RecvTimeoutError, Sender, select};

use super::directory::{Directory, Partial};
use super::format::{Encoder, Header, SpaceName};
use super::laws::encode_laws;
use super::stats::SnapshotStats;
use crate::error::{Error, Kind, Result};
use crate::fleet::{Fleet, FleetTable, Space, WorkerRecord};
use crate::ids::{ShardId, Worker};
use crate::ingest::{DumpBegin, DumpPart};
use crate::limits::SNAPSHOT_BUFFER_BYTES;
use crate::load::LearntLaws;
use crate::metrics::SnapshotCounter as C;
use crate::sandbox::{self, ThreadKind};
use crate::trust::{Trust, TrustReason};
use crate::watchdog::{Activity, ThreadMark};

/// Asks the shard of a worker for a dump of it.
pub type AskDump = Box<dyn Fn(ShardId, Worker) -> Result<Receiver<DumpPart>> + Send>;

/// Answers what was learnt so far of all workers.
pub type AskLaws = Box<dyn Fn() -> LearntLaws + Send>;

/// What the thread needs.
pub struct KeeperPlan {
    /// The directory of the files.
    pub directory: Arc<Directory>,
    /// The workers.
    pub fleet: Arc<Fleet>,
    /// Asks a shard for a dump.
    pub dump: AskDump,
    /// Asks for what was learnt.
    pub laws: AskLaws,
    /// Counters and gauges.
    pub stats: Arc<SnapshotStats>,
    /// The pause between two rounds.
    pub every: Duration,
    /// The age at which the file of a removed worker is removed.
    pub keep: Duration,
    /// The thread's mark.
    pub mark: Arc<ThreadMark>,
}

/// The running thread. If this value is dropped, the thread abandons the snapshot that it is writing, and ends.
#[derive(Debug)]
pub struct Keeper {
    stop: Sender<Instant>,
    ended: Receiver<()>,
    thread: JoinHandle<()>,
}

impl Keeper {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`Kind::System`] if it cannot be started.
    pub fn start(plan: KeeperPlan) -> Result<Self> {
        let (stop, stopped) = channel::bounded(1);
        let (done, ended) = channel::bounded(1);
        let run = move || {
            sandbox::enter(ThreadKind::Snapshots);
            Rounds { plan, stopped, deadline: None, files: BTreeMap::new(), laws: LearntLaws::default() }.run();
            // Fails if no thread waits any more.
            let _ = done.send(());
        };
        let thread = std::thread::Builder::new().name("snapshot".into()).spawn(run).map_err(|error| {
            Error::new(Kind::System, "cannot start the snapshot thread", "raise the limit of threads").caused_by(error)
        })?;
        Ok(Self { stop, ended, thread })
    }

    /// Whether the thread still runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !self.thread.is_finished()
    }

    /// Asks for a last round, of every worker that has changed. It must end by `deadline`.
    pub fn finish(&self, deadline: Instant) {
        // The channel is full only after an earlier call.
        let _ = self.stop.try_send(deadline);
    }

    /// Waits for the last round, until `deadline` and half a second more. Whether the thread has ended.
    #[must_use]
    pub fn join(self, deadline: Instant) -> bool {
        let has_ended = self.ended.recv_deadline(deadline + LAST_WRITE).is_ok();
        if has_ended && self.thread.join().is_err() {
            tracing::error!("the snapshot thread panicked");
        }
        has_ended
    }
}

/// How much longer than the deadline the last write may take: it is nearly done, and its file is useful.
const LAST_WRITE: Duration = Duration::from_millis(500);

/// A worker's snapshot file.
struct Written {
    /// The worker's trust when the snapshot was taken. It names the last batch and when that was applied: while it is
    /// unchanged, so are the blocks.
    as_of: Trust,
    /// When the snapshot was last known to hold all blocks, milliseconds of Unix time.
    current_unix_ms: u64,
}

/// Why a snapshot was abandoned.
enum Abandoned {
    /// The file system failed.
    File(io::Error),
    /// The shard broke the dump off, for this reason.
    Dump(&'static str),
    /// The daemon stops, and its deadline has passed.
    DeadlinePassed,
}

impl From<io::Error> for Abandoned {
    fn from(error: io::Error) -> Self {
        Self::File(error)
    }
}

/// The thread's work.
struct Rounds {
    plan: KeeperPlan,
    stopped: Receiver<Instant>,
    /// The end of the last round, once the daemon stops.
    deadline: Option<Instant>,
    files: BTreeMap<Worker, Written>,
    /// What was learnt at the last write.
    laws: LearntLaws,
}

impl Rounds {
    fn run(mut self) {
        loop {
            self.plan.mark.wait();
            match self.stopped.recv_timeout(self.plan.every) {
                Ok(deadline) => self.deadline = Some(deadline),
                Err(RecvTimeoutError::Timeout) => {
                    self.round();
                    self.plan.mark.begin_round(Activity::WritingSnapshot);
                    self.remove_expired();
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if self.deadline.is_some() {
                self.round();
                return self.plan.mark.wait();
            }
        }
    }

    /// Writes what was learnt, and a snapshot of every worker, where they have changed since the last time.
    fn round(&mut self) {
        // First: it is small, and the last round may run out of time.
        self.write_laws();
        let workers: Vec<_> = self.plan.fleet.load().workers.iter().map(|record| record.index).collect();
        for index in workers {
            // No table is held while a snapshot is written: removed workers keep their places for as long as one has them.
            let found = {
                let table = self.plan.fleet.load();
                let record = table.worker(index).filter(|record| record.events.is_some());
                record.map(|record| (record.clone(), space_name(&table, record)))
            };
            if let Some((record, space)) = found {
                self.worker(&record, &space);
            }
        }
        let table = self.plan.fleet.load();
        self.files.retain(|worker, _| table.workers.iter().any(|record| record.worker == *worker));
        drop(table);
        let oldest = self.files.values().map(|written| written.current_unix_ms).min();
        self.plan.stats.set_oldest(oldest.unwrap_or(0));
    }

    fn write_laws(&mut self) {
        let laws = (self.plan.laws)();
        if laws == self.laws {
            return;
        }
        match encode_laws(&laws).and_then(|bytes| self.plan.directory.write_laws(&bytes)) {
            Ok(()) => self.laws = laws,
            Err(error) => {
                self.plan.stats.counters.bump(C::SnapshotsFailed);
                let remedy = "check the free space and the owner of the directory that snapshot.dir names";
                tracing::warn!(%error, remedy, "learnt prefill times cannot be written");
            }
        }
    }

    fn worker(&mut self, record: &WorkerRecord, space: &SpaceName) {
        self.plan.mark.begin_round_of(Activity::WritingSnapshot, record.index.0);
        let (stats, now_unix_ms) = (Arc::clone(&self.plan.stats), unix_ms());
        let as_of = record.trust.load();
        if as_of.as_of_seq.is_none() {
            return;
        }
        let path = self.plan.directory.file_of(record.worker);
        let last = self
            .files
            .entry(record.worker)
            .or_insert(Written { as_of: Trust::default(), current_unix_ms: now_unix_ms });
        if last.as_of == as_of && path.exists() {
            last.current_unix_ms = now_unix_ms;
            return stats.counters.bump(C::SnapshotsUnchanged);
        }
        let began = Instant::now();
        let written = self.write(record, space);
        stats.add_writing_ns(began.elapsed().as_nanos() as u64);
        let worker = record.worker;
        match written {
            Ok(true) => {
                self.files.insert(worker, Written { as_of, current_unix_ms: now_unix_ms });
            }
            // The worker needs no snapshot now, so it does not count towards the oldest one.
            Ok(false) => drop(self.files.remove(&worker)),
            Err(Abandoned::DeadlinePassed) => {
                stats.counters.bump(C::SnapshotsLate);
                tracing::warn!(%worker, remedy = "raise serve.drain_ms_max", "no time left for the worker's snapshot");
            }
            Err(Abandoned::Dump(reason)) => {
                stats.counters.bump(C::SnapshotsBrokenOff);
                tracing::info!(%worker, reason, "the worker's snapshot was abandoned; the next round tries again");
            }
            Err(Abandoned::File(error)) => {
                stats.counters.bump(C::SnapshotsFailed);
                let remedy = "check the free space and the owner of the directory that snapshot.dir names";
                tracing::warn!(%worker, %error, remedy, "the worker's snapshot cannot be written");
            }
        }
    }

    /// Writes a worker's snapshot. `false` if there is nothing to write, or if the file was removed meanwhile.
    fn write(&mut self, record: &WorkerRecord, space: &SpaceName) -> std::result::Result<bool, Abandoned> {
        let directory = Arc::clone(&self.plan.directory);
        // Begun before the dump is asked for: a reset between the two removes this file.
        let partial = directory.begin(record.worker)?;
        let written = self.write_parts(record, space, &partial);
        if !matches!(written, Ok(Some(_))) {
            directory.abandon(&partial);
        }
        let Some((bytes, references)) = written? else { return Ok(false) };
        let counters = &self.plan.stats.counters;
        if !directory.commit(&partial)? {
            counters.bump(C::SnapshotsOvertaken);
            return Ok(false);
        }
        counters.bump(C::SnapshotsWritten);
        counters.add(C::SnapshotWrittenBytes, bytes);
        counters.add(C::SnapshotReferencesWritten, references);
        Ok(true)
    }

    /// Writes the parts of a dump as they arrive. Answers with bytes and references; `None` if no events could continue
    /// from such a snapshot.
    fn write_parts(
        &mut self,
        record: &WorkerRecord,
        space: &SpaceName,
        partial: &Partial,
    ) -> std::result::Result<Option<(u64, u64)>, Abandoned> {
        let parts = (self.plan.dump)(record.shard, record.worker).map_err(|_| Abandoned::Dump("overloaded"))?;
        let begin = match self.next_part(&parts)? {
            DumpPart::Begin(begin) => begin,
            other => return Err(broken_off(&other)),
        };
        // A dump holds no sliding windows: only the engine's own replay restores a hybrid worker.
        if begin.watermark.is_none() || begin.trust.reasons.contains(TrustReason::Hybrid) {
            return Ok(None);
        }
        let file = BufWriter::with_capacity(SNAPSHOT_BUFFER_BYTES, partial.file());
        let mut encoder = Encoder::begin(file, &header(record.worker, space.clone(), *begin))?;
        loop {
            let part = self.next_part(&parts)?;
            self.plan.mark.begin_round_of(Activity::WritingSnapshot, record.index.0);
            match part {
                DumpPart::Chunk(chunk) => encoder.chunk(&chunk)?,
                DumpPart::End(references) => {
                    let (_, bytes) = encoder.end(references)?;
                    return Ok(Some((bytes, references.blocks)));
                }
                other => return Err(broken_off(&other)),
            }
        }
    }

    /// The next part of a dump. While it waits, it also notices that the daemon stops.
    fn next_part(&mut self, parts: &Receiver<DumpPart>) -> std::result::Result<DumpPart, Abandoned> {
        self.plan.mark.wait();
        if self.deadline.is_none() {
            select! {
                recv(parts) -> part => return part.map_err(|_| Abandoned::Dump("shard_ended")),
                recv(self.stopped) -> deadline => self.deadline = Some(deadline.unwrap_or_else(|_| Instant::now())),
            }
        }
        let deadline = self.deadline.unwrap_or_else(Instant::now);
        parts.recv_deadline(deadline).map_err(|error| match error {
            RecvTimeoutError::Timeout => Abandoned::DeadlinePassed,
            RecvTimeoutError::Disconnected => Abandoned::Dump("shard_ended"),
        })
    }

    /// Removes the files of removed workers, once they are old enough.
    fn remove_expired(&self) {
        let (directory, now) = (&self.plan.directory, SystemTime::now());
        let files = match directory.files() {
            Ok(files) => files,
            Err(error) => {
                return tracing::warn!(path = %directory.path().display(), %error, "cannot list the snapshots");
            }
        };
        let there: BTreeSet<Worker> = self.plan.fleet.load().workers.iter().map(|record| record.worker).collect();
        let is_gone = |worker| !there.contains(&worker);
        let is_old = |written| now.duration_since(written).is_ok_and(|age| age > self.plan.keep);
        for file in files.into_iter().filter(|file| is_gone(file.worker) && is_old(file.written)) {
            match directory.remove(Some(file.worker)) {
                Ok(removed) => {
                    self.plan.stats.counters.add(C::SnapshotsExpired, removed as u64);
                    tracing::info!(worker = %file.worker, "snapshot removed: its worker was removed long ago");
                }
                Err(error) => tracing::warn!(worker = %file.worker, %error, "cannot remove a snapshot"),
            }
        }
    }
}

fn broken_off(part: &DumpPart) -> Abandoned {
    Abandoned::Dump(match part {
        DumpPart::Aborted(reason) => reason.name(),
        _ => "out_of_order",
    })
}

/// The names of a worker's space.
pub(super) fn space_name(table: &FleetTable, record: &WorkerRecord) -> SpaceName {
    let name =
        |space: &Space| SpaceName { model: space.model.clone(), namespace: space.namespace.clone(), role: space.role };
    table.space(record.space).map(name).unwrap_or_default()
}

pub(super) fn header(worker: Worker, space: SpaceName, begin: DumpBegin) -> Header {
    Header { worker, space, taken_unix_ms: unix_ms(), begin }
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests;
