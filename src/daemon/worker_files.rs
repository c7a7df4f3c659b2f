//! Files of workers. The daemon reads them when the system reports a change, and at intervals in case it does not.
//!
//! A folder of workers may hold anything, and be on a mount whose server is gone. The daemon opens only regular files,
//! without blocking, and makes the calls that a file system may hold up on a thread beside the control thread. That one
//! waits a bounded time for each call, then names the file, and goes on without it on another thread.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use notify::event::{AccessKind, AccessMode};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher as _};
use rustix::fs::{Mode, OFlags};
use tokio::sync::{mpsc, oneshot};
use xxhash_rust::xxh3::xxh3_64;

use super::desired_fleet::DesiredFleet;
use crate::config::{Config, FileFormat, SpaceConfig, parse_workers};
use crate::discovery::{Files, FilesChange, Seen, Source};
use crate::limits::{
    DISCOVERY_ENTRIES_MAX, DISCOVERY_FILE_BYTES_MAX, DISCOVERY_FILES_MAX, DISCOVERY_READ_MS_MAX,
    DISCOVERY_READS_HELD_MAX, DISCOVERY_SETTLE_MS,
};
use crate::metrics::{CounterSet, DaemonCounter};

/// The hash of each file when it was last read.
type Hashes = BTreeMap<PathBuf, u64>;

/// Follows `path`, a file or a folder, for ever.
pub(super) async fn run(
    path: PathBuf,
    rescan_ms: u64,
    grace_ms: &Cell<u64>,
    desired: &DesiredFleet,
    counters: &CounterSet<DaemonCounter>,
) {
    let (notify, mut notified) = mpsc::channel(1);
    let at = path.clone();
    // The task owns it: it ends with the runtime.
    let mut listening = Some(tokio::task::spawn_blocking(move || listen(&at, notify)));
    let (started, mut files, mut scanner) = (Instant::now(), Files::default(), Scanner::default());
    let (mut _watcher, mut scan) = (None, Scan::First);
    loop {
        match scanner.scan(&path, desired.spaces()).await {
            Ok(seen) => {
                desired.note(&listing_name(&path), None);
                let change = files.update(seen, grace_ms.get(), started.elapsed().as_millis() as u64);
                for refused in apply(change, scan, desired, counters, grace_ms.get()) {
                    // It is read again when other files may have become shorter.
                    scanner.hashes.remove(&refused);
                }
                scan = Scan::Later;
            }
            Err(problem) => refuse(&listing_name(&path), &problem, desired, counters),
        }
        if listening.as_ref().is_some_and(tokio::task::JoinHandle::is_finished)
            && let Some(made) = listening.take()
        {
            _watcher = made.await.ok().flatten();
        }
        let now_ms = started.elapsed().as_millis() as u64;
        let next_ms = files.next_ms(grace_ms.get()).map_or(rescan_ms, |at| at.saturating_sub(now_ms).min(rescan_ms));
        tokio::select! {
            // If there is no watcher, this branch is never taken.
            Some(()) = notified.recv() => tokio::time::sleep(Duration::from_millis(DISCOVERY_SETTLE_MS)).await,
            () = tokio::time::sleep(Duration::from_millis(next_ms)) => {}
        }
    }
}

/// Whether the files are read for the first time: then their workers are no change of a fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scan {
    First,
    Later,
}

/// What a call that a file system may hold up will return.
type SlowCall<T> = oneshot::Receiver<std::io::Result<T>>;

/// A thread that makes such calls, one after the other. Always the same, so that what a file takes while it is read is
/// there for the next file. It ends when this is dropped and its call has returned.
struct CallThread {
    calls: std::sync::mpsc::Sender<Box<dyn FnOnce() + Send>>,
}

impl CallThread {
    fn start() -> std::io::Result<Self> {
        let (calls, made) = std::sync::mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let run = move || made.into_iter().for_each(|call| call());
        std::thread::Builder::new().name("worker-files".to_owned()).spawn(run)?;
        Ok(Self { calls })
    }

    fn call<T: Send + 'static>(&self, call: impl FnOnce() -> std::io::Result<T> + Send + 'static) -> SlowCall<T> {
        let (result, returned) = oneshot::channel();
        // If the thread has panicked, or the scanner no longer waits, the channels end, and the other side sees that.
        let _ = self.calls.send(Box::new(move || drop(result.send(call()))));
        returned
    }
}

/// Reads the files, and remembers the calls of earlier scans that have not returned.
#[derive(Default)]
struct Scanner {
    hashes: Hashes,
    /// The thread for the next call; none yet, or the last one's call is late.
    thread: Option<CallThread>,
    /// The listing that has not returned.
    listing: Option<SlowCall<Vec<(PathBuf, FileFormat)>>>,
    /// Files whose reading has not returned. Each holds a thread.
    reading: BTreeMap<PathBuf, SlowCall<Reading>>,
}

/// The result of reading a file.
struct Reading {
    hash: u64,
    seen: Seen,
}

impl Scanner {
    /// Reads every file, and parses those that have changed. An error is about all of them.
    async fn scan(&mut self, path: &Path, spaces: &[SpaceConfig]) -> Result<BTreeMap<PathBuf, Seen>, String> {
        let at = path.to_owned();
        let listing = match self.listing.take() {
            Some(listing) => Ok(listing),
            None => self.begin(move || list(&at)),
        };
        let files = match self.in_time(listing).await {
            Ok(listed) => listed.map_err(|error| error.to_string())?,
            Err(listing) => {
                self.listing = Some(listing);
                return Err(format!("{}: {LATE}", path.display()));
            }
        };
        let (mut seen, mut hashes) = (BTreeMap::new(), Hashes::new());
        let spaces: Arc<[SpaceConfig]> = spaces.into();
        for (file, format) in files {
            let known = self.hashes.get(&file).copied();
            match self.read(&file, format, known, &spaces).await {
                Ok(Err(error)) if error.kind() == ErrorKind::NotFound => {}
                Ok(Err(error)) => drop(seen.insert(file, Seen::Unusable(format!("cannot be read: {error}")))),
                Ok(Ok(reading)) => {
                    hashes.insert(file.clone(), reading.hash);
                    seen.insert(file, reading.seen);
                }
                Err(late) => drop(seen.insert(file, Seen::Unusable(late.to_owned()))),
            }
        }
        self.hashes = hashes;
        Ok(seen)
    }

    /// Reads one file, unless an earlier reading of it has not returned.
    async fn read(
        &mut self,
        file: &Path,
        format: FileFormat,
        known: Option<u64>,
        spaces: &Arc<[SpaceConfig]>,
    ) -> Result<std::io::Result<Reading>, &'static str> {
        // A late result is dropped: the file is read again.
        self.reading.retain(|_, reading| matches!(reading.try_recv(), Err(oneshot::error::TryRecvError::Empty)));
        if self.reading.contains_key(file) {
            return Err(LATE);
        }
        if self.reading.len() >= DISCOVERY_READS_HELD_MAX {
            return Err(TOO_MANY_LATE);
        }
        let (at, spaces) = (file.to_owned(), Arc::clone(spaces));
        let reading = self.begin(move || reading(&at, format, known, &spaces));
        match self.in_time(reading).await {
            Ok(read) => Ok(read),
            Err(reading) => {
                self.reading.insert(file.to_owned(), reading);
                Err(LATE)
            }
        }
    }

    /// Begins a call.
    fn begin<T: Send + 'static>(
        &mut self,
        call: impl FnOnce() -> std::io::Result<T> + Send + 'static,
    ) -> std::io::Result<SlowCall<T>> {
        let thread = match self.thread.take() {
            Some(thread) => thread,
            None => CallThread::start()?,
        };
        Ok(self.thread.insert(thread).call(call))
    }

    /// The result of a call, or the call itself if it takes too long. Later calls then have another thread.
    async fn in_time<T>(&mut self, call: std::io::Result<SlowCall<T>>) -> Result<std::io::Result<T>, SlowCall<T>> {
        let mut call = match call {
            Ok(call) => call,
            Err(error) => return Ok(Err(error)),
        };
        match tokio::time::timeout(Duration::from_millis(DISCOVERY_READ_MS_MAX), &mut call).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(_)) => {
                self.thread = None;
                Ok(Err(std::io::Error::other("reading it ended in a panic")))
            }
            Err(_) => {
                self.thread = None;
                Err(call)
            }
        }
    }
}

const LATE: &str = "reading it takes too long; check whether its file system responds";
const TOO_MANY_ENTRIES: &str =
    "names more workers than all files together may: four times as many as one daemon has; run a second daemon";
const TOO_MANY_LATE: &str =
    "is not read because reading other files takes too long; check whether their file system responds";

fn reading(file: &Path, format: FileFormat, known: Option<u64>, spaces: &[SpaceConfig]) -> std::io::Result<Reading> {
    let bytes = read(file)?;
    let hash = xxh3_64(&bytes);
    let seen = if known == Some(hash) { Seen::Unchanged } else { parse(file, format, bytes, spaces) };
    Ok(Reading { hash, seen })
}

/// The problems of the files of workers that a configuration names, each with its path.
#[must_use]
pub fn unusable_files(config: &Config) -> Vec<String> {
    let Some(path) = &config.discovery.path else { return Vec::new() };
    let files = match list(path) {
        Ok(files) => files,
        Err(error) => return vec![format!("{}: {error}", path.display())],
    };
    let unusable = |(file, format): (PathBuf, FileFormat)| match reading(&file, format, None, &config.spaces) {
        Ok(Reading { seen: Seen::Unusable(problem), .. }) => Some(format!("{}: {problem}", file.display())),
        Ok(_) => None,
        Err(error) => Some(format!("{}: cannot be read: {error}", file.display())),
    };
    files.into_iter().filter_map(unusable).collect()
}

fn name(path: &Path) -> String {
    Source::File(path.to_owned()).to_string()
}

/// What has the problems of finding the files. The problems of each file go by its own name: that the files were found
/// says nothing of what is in them.
fn listing_name(path: &Path) -> String {
    format!("discovery.path {}", path.display())
}

/// Takes over what the files name now. Returns the files that name too many workers.
fn apply(
    change: FilesChange,
    scan: Scan,
    desired: &DesiredFleet,
    counters: &CounterSet<DaemonCounter>,
    grace_ms: u64,
) -> Vec<PathBuf> {
    for path in &change.missing {
        tracing::warn!(path = %path.display(), grace_ms, "a file of workers is gone; its workers stay for grace_ms");
    }
    for path in &change.gone {
        counters.bump(DaemonCounter::DiscoveryFilesGone);
        desired.note(&name(path), None);
        tracing::warn!(path = %path.display(), "a file of workers has been gone for the grace time; its workers are removed");
    }
    for (path, problem) in &change.unusable {
        refuse(&name(path), problem, desired, counters);
    }
    let gone: BTreeSet<PathBuf> = change.gone.into_iter().collect();
    let mut entries = desired.merge().file_entries();
    let (mut sources, mut refused) = (Vec::new(), Vec::new());
    for (path, named) in change.changed {
        let source = Source::File(path.clone());
        let left = entries - desired.merge().entries_of(&source);
        if left + named.len() > DISCOVERY_ENTRIES_MAX {
            refuse(&name(&path), TOO_MANY_ENTRIES, desired, counters);
            refused.push(path);
            continue;
        }
        entries = left + named.len();
        if !gone.contains(&path) {
            counters.bump(DaemonCounter::DiscoveryFilesRead);
            desired.note(&name(&path), None);
            tracing::info!(path = %path.display(), workers = named.workers.len(), urls = named.servers.len(), "a file of workers is read");
        }
        sources.push((source, named));
    }
    if !sources.is_empty() {
        // Once for all files: a merge takes time in proportion to the fleet.
        match scan {
            Scan::First => desired.set_sources(sources),
            Scan::Later => desired.set_changed_files(sources),
        }
    }
    refused
}

fn refuse(name: &str, problem: &str, desired: &DesiredFleet, counters: &CounterSet<DaemonCounter>) {
    if desired.note(name, Some(format!("{problem}; its earlier contents stay in force"))) {
        counters.bump(DaemonCounter::DiscoveryFilesUnusable);
        tracing::error!(source = name, problem, "workers cannot be read; the earlier contents stay in force");
    }
}

/// Watches the folder of `path` for changes. The folder, because files are replaced in it.
fn listen(path: &Path, notify: mpsc::Sender<()>) -> Option<RecommendedWatcher> {
    let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Reading a file is an event too, and must not cause another reading.
        let is_read = |event: &notify::Event| match event.kind {
            EventKind::Access(AccessKind::Close(AccessMode::Write)) => false,
            EventKind::Access(_) => true,
            _ => false,
        };
        if !event.as_ref().is_ok_and(is_read) {
            // Full: a notification waits already.
            let _ = notify.try_send(());
        }
    });
    let folder = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let watched = watcher.and_then(|mut watcher| {
        watcher.watch(folder, RecursiveMode::NonRecursive)?;
        Ok(watcher)
    });
    match watched {
        Ok(watcher) => Some(watcher),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "changes of the files of workers cannot be watched; the daemon scans for them instead");
            None
        }
    }
}

fn parse(file: &Path, format: FileFormat, bytes: Vec<u8>, spaces: &[SpaceConfig]) -> Seen {
    let Ok(text) = String::from_utf8(bytes) else { return Seen::Unusable("is not UTF-8".to_owned()) };
    match parse_workers(&file.display().to_string(), &text, format, spaces) {
        Ok(named) => Seen::Read(named),
        Err(problems) => Seen::Unusable(problems.to_string().trim().to_owned()),
    }
}

/// The bytes of a regular file. Other files are refused before they are opened, because opening a device may have an
/// effect, and once more when open, because the file may have been replaced meanwhile.
pub(super) fn read(file: &Path) -> std::io::Result<Vec<u8>> {
    let regular = |metadata: std::fs::Metadata| match metadata.is_file() {
        true => Ok(metadata.len()),
        false => Err(std::io::Error::other("it is not a regular file")),
    };
    regular(std::fs::metadata(file)?)?;
    // Nonblocking: a pipe may have taken its place.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let opened = std::fs::File::from(rustix::fs::open(file, flags, Mode::empty())?);
    let too_large = || std::io::Error::other(format!("it is larger than {DISCOVERY_FILE_BYTES_MAX} bytes"));
    let length = regular(opened.metadata()?)?;
    if length > DISCOVERY_FILE_BYTES_MAX {
        return Err(too_large());
    }
    let mut bytes = Vec::with_capacity(length as usize + 1);
    opened.take(DISCOVERY_FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > DISCOVERY_FILE_BYTES_MAX {
        return Err(too_large());
    }
    Ok(bytes)
}

/// The file, or the files of the folder. Hidden files are left out: they are being written, or not meant for the
/// daemon.
fn list(path: &Path) -> std::io::Result<Vec<(PathBuf, FileFormat)>> {
    let format = |file: &Path| match file.extension().and_then(|extension| extension.to_str()) {
        Some("json") => Some(FileFormat::Json),
        Some("toml") => Some(FileFormat::Toml),
        _ => None,
    };
    match std::fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
        Ok(metadata) if !metadata.is_dir() => {
            return Ok(vec![(path.to_owned(), format(path).unwrap_or(FileFormat::Toml))]);
        }
        Ok(_) => {}
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        let file = entry.path();
        if let Some(format) = format(&file).filter(|_| !hidden) {
            files.push((file, format));
        }
    }
    if files.len() > DISCOVERY_FILES_MAX {
        return Err(std::io::Error::other(format!("there are more than {DISCOVERY_FILES_MAX} files of workers")));
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::NamedWorkers;

    fn named(first: usize, count: usize) -> NamedWorkers {
        let spaces = [SpaceConfig { model: "m".into(), ..SpaceConfig::default() }];
        let list: Vec<_> = (first..first + count).map(|id| format!(r#"{{"id": {id}}}"#)).collect();
        parse_workers("t", &format!("[{}]", list.join(",")), FileFormat::Json, &spaces).expect("valid")
    }

    #[test]
    fn all_changed_files_are_merged_at_once_and_their_sum_is_limited() {
        let (counters, spaces) = (Arc::<CounterSet<DaemonCounter>>::default(), Vec::new());
        let desired = DesiredFleet::new(NamedWorkers::default(), spaces, Arc::clone(&counters));
        let version = *desired.changes().borrow();
        let put = |files: &[(&str, usize, usize)]| {
            let changed = files.iter().map(|(path, first, count)| (PathBuf::from(path), named(*first, *count)));
            apply(
                FilesChange { changed: changed.collect(), ..FilesChange::default() },
                Scan::First,
                &desired,
                &counters,
                0,
            )
        };
        // As many as one file may name.
        let most = DISCOVERY_ENTRIES_MAX / 4;
        let full = [("a", 0, most), ("b", most, most), ("c", 2 * most, most), ("d", 3 * most, most)];
        assert_eq!(put(&[&full[..], &[("e", 0, 1)]].concat()), [PathBuf::from("e")]);
        assert_eq!(*desired.changes().borrow() - version, 1, "one merge");
        assert_eq!(desired.merge().file_entries(), DISCOVERY_ENTRIES_MAX);
        let problem = desired.sources().into_iter().find(|source| source.name == "file e").and_then(|of| of.problem);
        assert!(problem.is_some_and(|problem| problem.contains("second daemon")));
        assert!(put(&[("a", 0, 1), ("e", 0, 1)]).is_empty(), "there is room again");
    }
}
