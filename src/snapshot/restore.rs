//! Restores workers from snapshots, at the daemon's start and when a worker joins later. Every file is checked from its
//! first byte to its last. Only then is it read once more, part by part, into the worker.
//!
//! Whether the engine's events continue from the snapshot is not known yet. The worker is therefore restored as one
//! whose connection broke: `unproven`, reason `disconnected`. A replay of the payloads that the snapshot remembers
//! proves it.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, bounded};
use rustix::fs::OFlags;

use super::directory::Directory;
use super::format::{Decoder, Header, Part, SpaceName};
use super::stats::{Fault, Refusal, SnapshotStats};
use crate::ids::{Scheme, Worker};
use crate::ingest::{AbortReason, DumpPart, FirstLoad, LoadAnswer, References};
use crate::limits::{DUMP_PARTS_MAX, SNAPSHOT_BUFFER_BYTES};
use crate::metrics::SnapshotCounter;
use crate::sandbox::{self, ThreadKind};
use crate::trust::{TrustLevel, TrustReason};

/// The facts of a worker with which its snapshot must agree.
#[derive(Clone, Debug)]
pub struct Expected {
    /// The worker.
    pub worker: Worker,
    /// The worker's space.
    pub space: SpaceName,
    /// The block size and hashing of the space, where they are known.
    pub scheme: Option<Scheme>,
    /// Whether its record names a replay endpoint. Only a replay can show that the engine's events continue from a
    /// snapshot.
    pub is_provable: bool,
}

impl Expected {
    pub(super) fn agrees(&self, header: &Header) -> Result<(), Refusal> {
        let schemes = self.scheme.zip(header.begin.scheme);
        match header {
            _ if header.worker != self.worker => Err(Refusal::OtherWorker),
            _ if header.space != self.space => Err(Refusal::OtherSpace),
            _ if schemes.is_some_and(|(ours, theirs)| ours != theirs) => Err(Refusal::OtherScheme),
            _ if !self.is_provable => Err(Refusal::Unprovable),
            _ => Ok(()),
        }
    }

    /// Reads a snapshot to its end, and checks everything that can be checked.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn check(&self, input: impl Read) -> Result<(Header, References), Fault> {
        let (header, mut decoder) = Decoder::open(input)?;
        self.agrees(&header).map_err(|refusal| Fault { refusal, offset: decoder.offset() })?;
        loop {
            if let Part::End(references) = decoder.part()? {
                return Ok((header, references));
            }
        }
    }
}

/// A snapshot that passed every check.
#[derive(Debug)]
pub struct Checked {
    worker: Worker,
    path: PathBuf,
}

impl Checked {
    /// The snapshot's worker.
    #[must_use]
    pub const fn worker(&self) -> Worker {
        self.worker
    }
}

/// Checks the snapshot of each worker that has one. A refused snapshot is counted and logged, and its file stays.
#[must_use]
pub fn check(directory: &Directory, workers: &[Expected], stats: &SnapshotStats) -> Vec<Checked> {
    let mut checked = Vec::new();
    for expected in workers {
        let (worker, path) = (expected.worker, directory.file_of(expected.worker));
        let file = match open(&path) {
            Ok(Some(file)) => file,
            Ok(None) => continue,
            Err(fault) => {
                refuse(worker, fault, stats);
                continue;
            }
        };
        match expected.check(BufReader::with_capacity(SNAPSHOT_BUFFER_BYTES, file)) {
            Ok((header, references)) => {
                let (references, watermark) = (references.blocks, header.begin.watermark);
                tracing::info!(%worker, references, ?watermark, taken_unix_ms = header.taken_unix_ms, "snapshot found");
                checked.push(Checked { worker, path });
            }
            Err(fault) => refuse(worker, fault, stats),
        }
    }
    checked
}

/// Opens a file without waiting: what has the name of a snapshot may be a pipe. `None` = there is none.
pub(super) fn open(path: &Path) -> Result<Option<File>, Fault> {
    let unreadable = Fault { refusal: Refusal::Unreadable, offset: 0 };
    let nonblocking = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    match File::options().read(true).custom_flags(nonblocking).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Ok(file) if file.metadata().is_ok_and(|metadata| metadata.is_file()) => Ok(Some(file)),
        _ => Err(unreadable),
    }
}

/// Counts and logs that the snapshot of an added worker was not read.
pub fn refuse_unread(worker: Worker, refusal: Refusal, stats: &SnapshotStats) {
    stats.counters.bump(SnapshotCounter::SnapshotsFailed);
    refuse(worker, Fault { refusal, offset: 0 }, stats);
}

fn refuse(worker: Worker, fault: Fault, stats: &SnapshotStats) {
    stats.refuse(fault.refusal);
    let (reason, remedy) = (fault.refusal.name(), fault.refusal.remedy());
    tracing::warn!(%worker, reason, offset = fault.offset, remedy, "snapshot not used; the worker starts empty");
}

/// The channels of one worker's load: parts go in, answers come out.
#[derive(Debug)]
struct Feed {
    checked: Checked,
    parts: Sender<DumpPart>,
    answers: Receiver<LoadAnswer>,
}

/// The snapshots to load into the workers of one shard.
#[derive(Debug, Default)]
pub struct Restore {
    feeds: Vec<Feed>,
}

impl Restore {
    /// Makes the loads that a shard begins with, and the feeds for them.
    #[must_use]
    pub fn new(checked: Vec<Checked>) -> (Self, Vec<FirstLoad>) {
        let (mut feeds, mut loads) = (Vec::with_capacity(checked.len()), Vec::with_capacity(checked.len()));
        for checked in checked {
            let (parts, received) = bounded(DUMP_PARTS_MAX);
            let (load, answers) = FirstLoad::new(checked.worker, received);
            loads.push(load);
            feeds.push(Feed { checked, parts, answers });
        }
        (Self { feeds }, loads)
    }

    /// Feeds the loads one after the other, on a thread that then drops `place` and ends.
    ///
    /// # Errors
    /// The thread cannot be started. The loads then fail.
    pub fn start<P: Send + 'static>(
        self,
        stats: Arc<SnapshotStats>,
        place: P,
    ) -> std::io::Result<Option<JoinHandle<()>>> {
        if self.feeds.is_empty() {
            return Ok(None);
        }
        let run = move || {
            sandbox::enter(ThreadKind::SnapshotLoads);
            self.feeds.into_iter().for_each(|feed| feed.run(&stats));
            drop(place);
        };
        std::thread::Builder::new().name("snapshot-load".into()).spawn(run).map(Some)
    }
}

impl Feed {
    fn run(self, stats: &SnapshotStats) {
        let (worker, read) = (self.checked.worker, self.send());
        drop(self.parts);
        // The first answer is `Held`, the last the outcome. No answer comes from a shard that has ended.
        let ended = self.answers.iter().find(|answer| !matches!(answer, LoadAnswer::Held { .. }));
        match (ended, read) {
            (Some(LoadAnswer::Loaded(_)), Ok(bytes)) => {
                stats.counters.bump(SnapshotCounter::SnapshotsLoaded);
                stats.counters.add(SnapshotCounter::SnapshotLoadedBytes, bytes);
            }
            (_, Err(fault)) => refuse(worker, fault, stats),
            _ => refuse(worker, Fault { refusal: Refusal::LoadFailed, offset: 0 }, stats),
        }
    }

    /// Sends every part. If the file has become faulty since its check, it aborts the load.
    fn send(&self) -> Result<u64, Fault> {
        let sent = self.send_parts();
        if sent.is_err() {
            // A closed channel means that the load has ended already.
            let _ = self.parts.send(DumpPart::Aborted(AbortReason::Corrupt));
        }
        sent
    }

    fn send_parts(&self) -> Result<u64, Fault> {
        let gone = Fault { refusal: Refusal::Unreadable, offset: 0 };
        let file = open(&self.checked.path)?.ok_or(gone)?;
        let opened = Decoder::open(BufReader::with_capacity(SNAPSHOT_BUFFER_BYTES, file))?;
        send_decoded(opened, unproven, &self.parts)
    }
}

/// Sends the parts of a snapshot to a load, its header as `lowered`. Returns its bytes.
pub(super) fn send_decoded(
    (header, mut decoder): (Header, Decoder<impl Read>),
    lowered: impl FnOnce(Header) -> Header,
    parts: &Sender<DumpPart>,
) -> Result<u64, Fault> {
    // A closed channel means that the load has ended; its answer says why.
    if parts.send(DumpPart::Begin(Box::new(lowered(header).begin))).is_err() {
        return Ok(decoder.offset());
    }
    loop {
        let (part, is_last) = match decoder.part()? {
            Part::Chunk(chunk) => (DumpPart::Chunk(chunk), false),
            Part::End(references) => (DumpPart::End(references), true),
        };
        if parts.send(part).is_err() || is_last {
            return Ok(decoder.offset());
        }
    }
}

/// Lowers a snapshot's trust to what holds until a replay proves it. Its `view` keeps the trust that it then regains.
pub(super) fn unproven(mut header: Header) -> Header {
    let trust = &mut header.begin.trust;
    trust.reasons.insert(TrustReason::Disconnected);
    trust.level = trust.level.min(TrustLevel::Unproven);
    header
}
