//! The journal files that a command names.

use std::path::{Path, PathBuf};

use super::exit::{Exit, Failure};
use crate::journal::{self, Ending, Reader};
use crate::limits::JOURNAL_FILE_BYTES_CEILING;

/// The named files, and the journal files in named folders, oldest first.
pub(super) fn journal_files(named: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let mut files = Vec::new();
    for path in named {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let listed = journal::list(path).map_err(|error| unusable(path, &error.to_string()))?;
        if listed.is_empty() {
            return Err(unusable(path, "the folder has no journal files; check dir in [journal]"));
        }
        files.extend(listed);
    }
    Ok(files)
}

/// The bytes of a file, which is not larger than a daemon makes them.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let bytes = std::fs::metadata(path).map_err(|error| unusable(path, &error.to_string()))?.len();
    // A daemon closes a file with the record that reaches the size.
    if bytes > 2 * JOURNAL_FILE_BYTES_CEILING {
        return Err(unusable(path, &format!("it has {bytes} bytes, more than a journal file may have")));
    }
    std::fs::read(path).map_err(|error| unusable(path, &error.to_string()))
}

pub(super) fn open<'a>(path: &Path, bytes: &'a [u8]) -> Result<Reader<'a>, Failure> {
    Reader::open(bytes).map_err(|error| unusable(path, &format!("{} ({})", error.message(), error.remedy())))
}

fn unusable(path: &Path, why: &str) -> Failure {
    Failure::new(Exit::Usage, format!("{}: {why}", path.display()))
}

/// Remarks about a file that is incomplete, damaged, or of another release.
pub(super) fn remarks(path: &Path, reader: &Reader<'_>, ending: Ending) -> Vec<String> {
    let mut lines = Vec::new();
    let path = path.display();
    match ending {
        Ending::Closed => {}
        Ending::Open => lines.push(format!("{path}: not closed: a daemon is writing it, or was killed")),
        Ending::Torn { at, bytes } => {
            lines.push(format!("{path}: cut off within a record at byte {at}; its last {bytes} bytes are ignored"));
        }
        Ending::Damaged { at, bytes } => {
            lines.push(format!("{path}: damaged at byte {at}; the {bytes} bytes from there on are ignored"));
        }
    }
    let listed = |names: &[String]| names.join(", ");
    if !reader.missing_values().is_empty() {
        let (release, names) = (&reader.origin().release, listed(reader.missing_values()));
        lines.push(format!("{path}: release {release} did not record {names}; their defaults are used"));
    }
    if !reader.unknown_values().is_empty() {
        let (release, names) = (&reader.origin().release, listed(reader.unknown_values()));
        lines.push(format!("{path}: release {release} recorded {names}, which this release does not know; ignored"));
    }
    lines
}
