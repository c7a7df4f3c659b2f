//! Snapshots at the daemon's start, and of workers that come later: every file is checked from its first byte to its last before a worker is
//! given anything of it, and then read once more, part by part, into the worker.
//!
//! Nothing has shown yet that the worker's stream went on from there. It is loaded as a worker whose connection
//! broke: `unproven`, reason `disconnected`, until a replay has shown the payloads that the snapshot remembers.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, bounded};

use super::decode::{Decoder, Part};
use super::directory::Directory;
use super::format::{Header, SpaceName};
use super::refusal::{Fault, Refusal};
use super::stats::SnapshotStats;
use crate::ids::{Scheme, Worker};
use crate::ingest::{AbortReason, DumpPart, FirstLoad, LoadAnswer, References};
use crate::limits::{DUMP_PARTS_MAX, SNAPSHOT_BUFFER_BYTES};
use crate::metrics::SnapshotCounter;
use crate::trust::{TrustLevel, TrustReason};

/// What a worker's snapshot has to agree with.
#[derive(Clone, Debug)]
pub struct Expected {
    /// The worker.
    pub worker: Worker,
    /// Its space.
    pub space: SpaceName,
    /// How that space's blocks are cut and hashed, where that is known.
    pub scheme: Option<Scheme>,
    /// Whether its record names a replay endpoint: without one nothing can show that its stream went on.
    pub is_provable: bool,
}

impl Expected {
    fn agrees(&self, header: &Header) -> Result<(), Refusal> {
        let schemes = self.scheme.zip(header.begin.scheme);
        match header {
            _ if header.worker != self.worker => Err(Refusal::OtherWorker),
            _ if header.space != self.space => Err(Refusal::OtherSpace),
            _ if schemes.is_some_and(|(ours, theirs)| ours != theirs) => Err(Refusal::OtherScheme),
            _ if !self.is_provable => Err(Refusal::Unprovable),
            _ => Ok(()),
        }
    }

    /// Reads a snapshot to its end and compares everything that can be compared.
    ///
    /// # Errors
    /// Why it is not to be used.
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
    /// Whose it is.
    #[must_use]
    pub const fn worker(&self) -> Worker {
        self.worker
    }
}

/// Checks the snapshot of each worker that has one. What is not used is counted and said, and left where it is.
#[must_use]
pub fn check(directory: &Directory, workers: &[Expected], stats: &SnapshotStats) -> Vec<Checked> {
    let mut checked = Vec::new();
    for expected in workers {
        let (worker, path) = (expected.worker, directory.file_of(expected.worker));
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(_) => {
                refuse(worker, Fault { refusal: Refusal::Unreadable, offset: 0 }, stats);
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

fn refuse(worker: Worker, fault: Fault, stats: &SnapshotStats) {
    stats.refuse(fault.refusal);
    let (reason, remedy) = (fault.refusal.name(), fault.refusal.remedy());
    tracing::warn!(%worker, reason, offset = fault.offset, remedy, "snapshot not used; the worker starts empty");
}

/// Where the parts of one snapshot go, and where its worker's answers come from.
#[derive(Debug)]
struct Feed {
    checked: Checked,
    parts: Sender<DumpPart>,
    answers: Receiver<LoadAnswer>,
}

/// Snapshots on their way into the workers of one shard.
#[derive(Debug, Default)]
pub struct Restore {
    feeds: Vec<Feed>,
}

impl Restore {
    /// The loads that a shard begins with, and what feeds them once it runs.
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

    /// Feeds the loads, in their order, on a thread of their own that ends with the last and then drops `place`.
    ///
    /// # Errors
    /// The thread cannot be started; the loads then fail.
    pub fn start<P: Send + 'static>(
        self,
        stats: Arc<SnapshotStats>,
        place: P,
    ) -> std::io::Result<Option<JoinHandle<()>>> {
        if self.feeds.is_empty() {
            return Ok(None);
        }
        let run = move || {
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
        // Held, and then how it ended; nothing if the shard has ended.
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

    /// Sends every part; what shows to be wrong now, though it was right when it was checked, breaks the load off.
    fn send(&self) -> Result<u64, Fault> {
        let sent = self.send_parts();
        if sent.is_err() {
            // Where nobody listens any more there is nothing to break off.
            let _ = self.parts.send(DumpPart::Aborted(AbortReason::Corrupt));
        }
        sent
    }

    fn send_parts(&self) -> Result<u64, Fault> {
        let unreadable = |_| Fault { refusal: Refusal::Unreadable, offset: 0 };
        let file = File::open(&self.checked.path).map_err(unreadable)?;
        let (header, mut decoder) = Decoder::open(BufReader::with_capacity(SNAPSHOT_BUFFER_BYTES, file))?;
        // A load that has ended takes no more; its answer says why.
        if self.parts.send(DumpPart::Begin(Box::new(unproven(header).begin))).is_err() {
            return Ok(decoder.offset());
        }
        loop {
            let (part, is_last) = match decoder.part()? {
                Part::Chunk(chunk) => (DumpPart::Chunk(chunk), false),
                Part::End(references) => (DumpPart::End(references), true),
            };
            if self.parts.send(part).is_err() || is_last {
                return Ok(decoder.offset());
            }
        }
    }
}

/// What a snapshot is believed before its stream has been seen to go on. What its blocks are worth then is its view.
fn unproven(mut header: Header) -> Header {
    let trust = &mut header.begin.trust;
    trust.reasons.insert(TrustReason::Disconnected);
    trust.level = trust.level.min(TrustLevel::Unproven);
    header
}
