//! The thread that writes snapshots: one worker at a time, every so often, and once more when the daemon stops.

use std::collections::BTreeMap;
use std::io::{self, BufWriter};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use arc_swap::Guard;
use crossbeam::channel::{self, Receiver, RecvTimeoutError, Sender, select};

use super::directory::{Directory, Partial};
use super::encode::Encoder;
use super::format::{Header, SpaceName};
use super::stats::SnapshotStats;
use crate::error::{Error, Kind, Result};
use crate::fleet::{Fleet, FleetTable, WorkerRecord};
use crate::ids::{ShardId, Worker};
use crate::ingest::{DumpBegin, DumpPart};
use crate::limits::SNAPSHOT_BUFFER_BYTES;
use crate::metrics::SnapshotCounter as C;
use crate::trust::{Trust, TrustReason};

/// Asks the shard of a worker for a dump of it.
pub type AskDump = Box<dyn Fn(ShardId, Worker) -> Result<Receiver<DumpPart>> + Send>;

/// What the thread needs.
pub struct KeeperPlan {
    /// Where the files are.
    pub directory: Arc<Directory>,
    /// Who there is.
    pub fleet: Arc<Fleet>,
    /// How dumps are asked for.
    pub dump: AskDump,
    /// What is counted.
    pub stats: Arc<SnapshotStats>,
    /// How long after one round the next begins.
    pub every: Duration,
    /// The age at which a file is removed whose worker is not there.
    pub keep: Duration,
}

/// The running thread. Dropping it lets the thread end by itself, after the snapshot in hand.
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
            Writing { plan, stopped, deadline: None, kept: BTreeMap::new() }.run();
            // Nobody may wait any more.
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

    /// Asks for a last snapshot of everything that has changed, by `deadline`.
    pub fn finish(&self, deadline: Instant) {
        // Full only if it was asked already.
        let _ = self.stop.try_send(deadline);
    }

    /// Waits for the last snapshot, no longer than until a moment after `deadline`. Whether the thread has ended.
    #[must_use]
    pub fn join(self, deadline: Instant) -> bool {
        let has_ended = self.ended.recv_deadline(deadline + LAST_WRITE).is_ok();
        if has_ended && self.thread.join().is_err() {
            tracing::error!("the snapshot thread panicked");
        }
        has_ended
    }
}

/// What the write in hand may take beyond the deadline: it is nearly done, and its file worth having.
const LAST_WRITE: Duration = Duration::from_millis(500);

/// What is known of a worker's snapshot.
struct InPlace {
    /// The worker's trust when it was taken, which names the last batch and when that came: while it is the same,
    /// so are the blocks.
    as_of: Trust,
    /// When the snapshot was last known to hold everything, milliseconds of Unix time.
    current_unix_ms: u64,
}

/// Why a snapshot was given up.
enum GivenUp {
    /// The file system refused.
    File(io::Error),
    /// The shard did.
    Dump(&'static str),
    /// The daemon stops, and there is no more time.
    Late,
}

impl From<io::Error> for GivenUp {
    fn from(error: io::Error) -> Self {
        Self::File(error)
    }
}

struct Writing {
    plan: KeeperPlan,
    stopped: Receiver<Instant>,
    /// When the daemon stops, once it does.
    deadline: Option<Instant>,
    kept: BTreeMap<Worker, InPlace>,
}

impl Writing {
    fn run(mut self) {
        loop {
            match self.stopped.recv_timeout(self.plan.every) {
                Ok(deadline) => self.deadline = Some(deadline),
                Err(RecvTimeoutError::Timeout) => {
                    self.round();
                    self.remove_expired();
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if self.deadline.is_some() {
                return self.round();
            }
        }
    }

    /// Writes every worker that has changed since it was last written.
    fn round(&mut self) {
        let table = Guard::into_inner(self.plan.fleet.load());
        for record in table.workers.iter().filter(|record| record.events.is_some()) {
            self.worker(&table, record);
        }
        self.kept.retain(|worker, _| table.workers.iter().any(|record| record.worker == *worker));
        let oldest = self.kept.values().map(|in_place| in_place.current_unix_ms).min();
        self.plan.stats.set_oldest(oldest.unwrap_or(0));
    }

    fn worker(&mut self, table: &FleetTable, record: &WorkerRecord) {
        let (stats, now_unix_ms) = (Arc::clone(&self.plan.stats), unix_ms());
        let as_of = record.trust.load();
        if as_of.as_of_seq.is_none() {
            return;
        }
        let path = self.plan.directory.file_of(record.worker);
        let in_place =
            self.kept.entry(record.worker).or_insert(InPlace { as_of: Trust::default(), current_unix_ms: now_unix_ms });
        if in_place.as_of == as_of && path.exists() {
            in_place.current_unix_ms = now_unix_ms;
            return stats.counters.bump(C::SnapshotsUnchanged);
        }
        let began = Instant::now();
        let written = self.write(table, record);
        stats.add_writing_ns(began.elapsed().as_nanos() as u64);
        let worker = record.worker;
        match written {
            Ok(true) => {
                self.kept.insert(worker, InPlace { as_of, current_unix_ms: now_unix_ms });
            }
            // Nothing of it is to be kept now, so nothing is behind.
            Ok(false) => drop(self.kept.remove(&worker)),
            Err(GivenUp::Late) => {
                stats.counters.bump(C::SnapshotsLate);
                tracing::warn!(%worker, remedy = "raise serve.drain_ms_max", "no time left for the worker's snapshot");
            }
            Err(GivenUp::Dump(reason)) => {
                stats.counters.bump(C::SnapshotsBrokenOff);
                tracing::info!(%worker, reason, "the worker's snapshot is given up; the next round tries again");
            }
            Err(GivenUp::File(error)) => {
                stats.counters.bump(C::SnapshotsFailed);
                let remedy = "check the space and the owner of the snapshot directory";
                tracing::warn!(%worker, %error, remedy, "the worker's snapshot cannot be written");
            }
        }
    }

    /// Writes a worker's snapshot; `false` = there was nothing to write, or it is not to be kept.
    fn write(&mut self, table: &FleetTable, record: &WorkerRecord) -> std::result::Result<bool, GivenUp> {
        let directory = Arc::clone(&self.plan.directory);
        // Before the dump is asked for: a reset between the two is one that came after.
        let partial = directory.begin(record.worker)?;
        let written = self.write_parts(table, record, &partial);
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

    /// Writes the parts of a dump as they come. Bytes and references; `None` = nothing could follow it.
    fn write_parts(
        &mut self,
        table: &FleetTable,
        record: &WorkerRecord,
        partial: &Partial,
    ) -> std::result::Result<Option<(u64, u64)>, GivenUp> {
        let parts = (self.plan.dump)(record.shard, record.worker).map_err(|_| GivenUp::Dump("overloaded"))?;
        let begin = match self.next_part(&parts)? {
            DumpPart::Begin(begin) => begin,
            other => return Err(broken_off(&other)),
        };
        // A dump has no windows: only the engine's own replay brings a hybrid worker back as it was.
        if begin.watermark.is_none() || begin.trust.reasons.contains(TrustReason::Hybrid) {
            return Ok(None);
        }
        let file = BufWriter::with_capacity(SNAPSHOT_BUFFER_BYTES, partial.file());
        let mut encoder = Encoder::begin(file, &header(table, record, *begin))?;
        loop {
            match self.next_part(&parts)? {
                DumpPart::Chunk(chunk) => encoder.chunk(&chunk)?,
                DumpPart::End(references) => {
                    let (_, bytes) = encoder.end(references)?;
                    return Ok(Some((bytes, references.blocks)));
                }
                other => return Err(broken_off(&other)),
            }
        }
    }

    /// The next part of a dump. A stop of the daemon is heard meanwhile.
    fn next_part(&mut self, parts: &Receiver<DumpPart>) -> std::result::Result<DumpPart, GivenUp> {
        if self.deadline.is_none() {
            select! {
                recv(parts) -> part => return part.map_err(|_| GivenUp::Dump("shard_ended")),
                recv(self.stopped) -> deadline => self.deadline = Some(deadline.unwrap_or_else(|_| Instant::now())),
            }
        }
        let deadline = self.deadline.unwrap_or_else(Instant::now);
        parts.recv_deadline(deadline).map_err(|error| match error {
            RecvTimeoutError::Timeout => GivenUp::Late,
            RecvTimeoutError::Disconnected => GivenUp::Dump("shard_ended"),
        })
    }

    /// Removes the files of workers that are not there, once they are old enough.
    fn remove_expired(&self) {
        let table = self.plan.fleet.load();
        let (directory, now) = (&self.plan.directory, SystemTime::now());
        let kept = match directory.kept() {
            Ok(kept) => kept,
            Err(error) => {
                return tracing::warn!(path = %directory.path().display(), %error, "cannot list the snapshots");
            }
        };
        let is_gone = |worker| !table.workers.iter().any(|record| record.worker == worker);
        let is_old = |written| now.duration_since(written).is_ok_and(|age| age > self.plan.keep);
        for file in kept.into_iter().filter(|file| is_gone(file.worker) && is_old(file.written)) {
            match directory.remove(Some(file.worker)) {
                Ok(removed) => {
                    self.plan.stats.counters.add(C::SnapshotsExpired, removed as u64);
                    tracing::info!(worker = %file.worker, "snapshot removed: its worker has long been gone");
                }
                Err(error) => tracing::warn!(worker = %file.worker, %error, "cannot remove a snapshot"),
            }
        }
    }
}

fn broken_off(part: &DumpPart) -> GivenUp {
    GivenUp::Dump(match part {
        DumpPart::Aborted(reason) => reason.name(),
        _ => "out_of_order",
    })
}

fn header(table: &FleetTable, record: &WorkerRecord, begin: DumpBegin) -> Header {
    let space = table.space(record.space).map(|space| SpaceName {
        model: space.model.clone(),
        namespace: space.namespace.clone(),
        role: space.role,
    });
    Header { worker: record.worker, space: space.unwrap_or_default(), taken_unix_ms: unix_ms(), begin }
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests;
