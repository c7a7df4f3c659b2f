//! Files of workers: looked at when something tells of a change, and now and then in case nothing does.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use notify::event::{AccessKind, AccessMode};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::mpsc;
use xxhash_rust::xxh3::xxh3_64;

use super::roster::Roster;
use crate::config::{FileFormat, SpaceConfig, parse_workers};
use crate::discovery::{Files, FilesChange, Seen, Source};
use crate::limits::{DISCOVERY_FILE_BYTES_MAX, DISCOVERY_FILES_MAX, DISCOVERY_SETTLE_MS};
use crate::metrics::{CounterSet, DaemonCounter};

/// What was in each file when it was last looked at.
type Hashes = BTreeMap<PathBuf, u64>;

/// Follows `path`, a file or a folder, for ever.
pub(super) async fn run(
    path: PathBuf,
    rescan_ms: u64,
    grace_ms: &Cell<u64>,
    roster: &Roster,
    counters: &CounterSet<DaemonCounter>,
) {
    let (_watcher, mut told) = listen(&path);
    let (started, mut files, mut hashes) = (Instant::now(), Files::default(), Hashes::default());
    loop {
        let (at, spaces, known) = (path.clone(), roster.spaces().to_vec(), hashes.clone());
        match tokio::task::spawn_blocking(move || scan(&at, &known, &spaces)).await {
            Ok(Ok((seen, scanned))) => {
                hashes = scanned;
                roster.note(&name(&path), None);
                let change = files.look(seen, grace_ms.get(), started.elapsed().as_millis() as u64);
                apply(change, roster, counters, grace_ms.get());
            }
            Ok(Err(error)) => refuse(&name(&path), &error.to_string(), roster, counters),
            Err(error) => refuse(&name(&path), &error.to_string(), roster, counters),
        }
        let now_ms = started.elapsed().as_millis() as u64;
        let next_ms = files.next_ms(grace_ms.get()).map_or(rescan_ms, |at| at.saturating_sub(now_ms).min(rescan_ms));
        tokio::select! {
            // Nothing more is told by a watcher that could not be made.
            Some(()) = told.recv() => tokio::time::sleep(Duration::from_millis(DISCOVERY_SETTLE_MS)).await,
            () = tokio::time::sleep(Duration::from_millis(next_ms)) => {}
        }
    }
}

fn name(path: &Path) -> String {
    Source::File(path.to_owned()).to_string()
}

fn apply(change: FilesChange, roster: &Roster, counters: &CounterSet<DaemonCounter>, grace_ms: u64) {
    for path in &change.missing {
        tracing::warn!(path = %path.display(), grace_ms, "a file of workers is gone; its workers stay for the grace");
    }
    for path in &change.gone {
        counters.bump(DaemonCounter::DiscoveryFilesGone);
        roster.note(&name(path), None);
        tracing::warn!(path = %path.display(), "a file of workers is gone for good; its workers are removed");
    }
    for (path, problem) in &change.unusable {
        refuse(&name(path), problem, roster, counters);
    }
    for (path, named) in change.said {
        if !change.gone.contains(&path) {
            counters.bump(DaemonCounter::DiscoveryFilesRead);
            roster.note(&name(&path), None);
            tracing::info!(path = %path.display(), workers = named.workers.len(), urls = named.servers.len(), "a file of workers is read");
        }
        roster.say(Source::File(path), named);
    }
}

fn refuse(name: &str, problem: &str, roster: &Roster, counters: &CounterSet<DaemonCounter>) {
    if roster.note(name, Some(format!("{problem}; what it said before holds"))) {
        counters.bump(DaemonCounter::DiscoveryFilesUnusable);
        tracing::error!(source = name, problem, "workers cannot be read; what was said before holds");
    }
}

/// Waits for changes in the folder of `path`: files are replaced there.
fn listen(path: &Path) -> (Option<RecommendedWatcher>, mpsc::Receiver<()>) {
    let (tell, told) = mpsc::channel(1);
    let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Looking at a file is an event too, and must not make it be looked at again.
        let looked = |event: &notify::Event| match event.kind {
            EventKind::Access(AccessKind::Close(AccessMode::Write)) => false,
            EventKind::Access(_) => true,
            _ => false,
        };
        if !event.as_ref().is_ok_and(looked) {
            // Full: somebody has been told already and has not looked yet.
            let _ = tell.try_send(());
        }
    });
    let folder = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let watched = watcher.and_then(|mut watcher| {
        watcher.watch(folder, RecursiveMode::NonRecursive)?;
        Ok(watcher)
    });
    match watched {
        Ok(watcher) => (Some(watcher), told),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "nothing tells of changes of workers; they are found by looking");
            (None, told)
        }
    }
}

/// Looks at every file; one that is as `known` is not read again.
fn scan(path: &Path, known: &Hashes, spaces: &[SpaceConfig]) -> std::io::Result<(BTreeMap<PathBuf, Seen>, Hashes)> {
    let (mut seen, mut hashes) = (BTreeMap::new(), Hashes::new());
    for (file, format) in list(path)? {
        match read(&file) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => drop(seen.insert(file, Seen::Unusable(format!("cannot be read: {error}")))),
            Ok(bytes) => {
                let hash = xxh3_64(&bytes);
                hashes.insert(file.clone(), hash);
                let is =
                    if known.get(&file) == Some(&hash) { Seen::Unchanged } else { parse(&file, format, bytes, spaces) };
                seen.insert(file, is);
            }
        }
    }
    Ok((seen, hashes))
}

fn parse(file: &Path, format: FileFormat, bytes: Vec<u8>, spaces: &[SpaceConfig]) -> Seen {
    let Ok(text) = String::from_utf8(bytes) else { return Seen::Unusable("is not UTF-8".to_owned()) };
    match parse_workers(&file.display().to_string(), &text, format, spaces) {
        Ok(named) => Seen::Read(named),
        Err(problems) => Seen::Unusable(problems.to_string().trim().to_owned()),
    }
}

fn read(file: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(file)?.take(DISCOVERY_FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > DISCOVERY_FILE_BYTES_MAX {
        return Err(std::io::Error::other(format!("it is larger than {DISCOVERY_FILE_BYTES_MAX} bytes")));
    }
    Ok(bytes)
}

/// The file, or the files of the folder. Hidden ones are left out: they are being written, or somebody's own.
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
