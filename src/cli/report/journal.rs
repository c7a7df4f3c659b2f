//! The journal of the last minutes. It is not copied: its records are read and written anew, so that a file holds nothing
//! but the numbers that this release knows. No column of a journal is a prompt, a token or a block hash; prefixes and
//! sessions are hashes under a key that is in no file.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use super::archive::Contents;
use crate::journal::{self, DecisionRecord, Encoder, JournalEntry, Origin, Reader, SpaceLabel};
use crate::limits::{REPORT_JOURNAL_BYTES_MAX, REPORT_JOURNAL_FILE_BYTES_MAX};
use crate::masking::masked;

const NAME: &str = "journal/";

/// Adds the journal files of a folder, with the decisions of the last `minutes`.
pub(super) fn add(contents: &mut Contents, dir: &Path, minutes: u64, now_unix_ms: u64) {
    let files = match journal::list(dir) {
        Ok(files) if files.is_empty() => {
            return contents.leave_out(NAME, "the folder that [journal] dir names has no files");
        }
        Ok(files) => files,
        Err(error) => return contents.leave_out(NAME, format!("{} cannot be read: {error}", dir.display())),
    };
    let mut ms = minutes * 60_000;
    let files = recent(contents, files, now_unix_ms.saturating_sub(ms));
    // Half of the time at each try, until its records fit.
    let fitting = loop {
        match cut(&files, now_unix_ms.saturating_sub(ms)) {
            Some(fitting) => break fitting,
            // A clock that went back may leave decisions of the future.
            None if ms == 0 => break Vec::new(),
            None => ms /= 2,
        }
    };
    if ms < minutes * 60_000 {
        let why = format!(
            "decisions older than {} s: together with them the journal has more than {REPORT_JOURNAL_BYTES_MAX} bytes",
            ms / 1000
        );
        contents.leave_out(NAME, why);
    }
    if fitting.is_empty() {
        contents.leave_out(NAME, format!("no decision of the last {} s is in it", ms / 1000));
    }
    for (name, bytes) in fitting {
        let about = "decisions and ends of requests, for kvrouted replay; no prompts and no tokens.";
        contents.add(&format!("{NAME}{name}"), about, bytes);
    }
}

/// The name and the bytes of the files that were written since a time.
fn recent(contents: &mut Contents, files: Vec<PathBuf>, since_unix_ms: u64) -> Vec<(String, Vec<u8>)> {
    let mut read = Vec::new();
    for path in files {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        match bytes(&path, since_unix_ms) {
            Ok(Some(bytes)) => match Reader::open(&bytes) {
                Ok(_) => read.push((name, bytes)),
                Err(error) => contents.leave_out(&format!("{NAME}{name}"), error.message()),
            },
            Ok(None) => {}
            Err(why) => contents.leave_out(&format!("{NAME}{name}"), why),
        }
    }
    read
}

/// The bytes of a file; `None` = nothing was written to it since.
fn bytes(path: &Path, since_unix_ms: u64) -> Result<Option<Vec<u8>>, String> {
    let unreadable = |error: std::io::Error| format!("it cannot be read: {error}");
    let file = File::open(path).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    if !metadata.is_file() {
        return Err("it is no file".to_owned());
    }
    let written = metadata.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    if written.is_some_and(|at| (at.as_millis() as u64) < since_unix_ms) {
        return Ok(None);
    }
    if metadata.len() > REPORT_JOURNAL_FILE_BYTES_MAX {
        return Err(format!("it has {} bytes, and at most {REPORT_JOURNAL_FILE_BYTES_MAX} are read", metadata.len()));
    }
    let mut bytes = Vec::new();
    file.take(REPORT_JOURNAL_FILE_BYTES_MAX).read_to_end(&mut bytes).map_err(unreadable)?;
    Ok(Some(bytes))
}

/// Each file with its decisions since a time, if it has any; `None` = together they have too many bytes.
fn cut(files: &[(String, Vec<u8>)], since_unix_ms: u64) -> Option<Vec<(String, Vec<u8>)>> {
    let (mut all, mut left) = (Vec::new(), REPORT_JOURNAL_BYTES_MAX);
    for (name, bytes) in files {
        let Ok(mut reader) = Reader::open(bytes) else { continue };
        let Some(bytes) = since(&mut reader, since_unix_ms, left)? else { continue };
        left -= bytes.len();
        all.push((name.clone(), bytes));
    }
    Some(all)
}

/// The names in the head of a file, without what looks like a secret.
fn head(of: &Origin) -> Origin {
    let space = |of: &SpaceLabel| SpaceLabel {
        model: masked(&of.model),
        namespace: masked(&of.namespace),
        role: masked(&of.role),
    };
    Origin {
        release: masked(&of.release),
        spaces: of.spaces.iter().map(space).collect(),
        classes: of.classes.iter().map(|class| masked(class)).collect(),
        ..of.clone()
    }
}

/// A file of the records since a time: `None` = it has more than `bytes_max`, `Some(None)` = there is no decision.
fn since(reader: &mut Reader<'_>, since_unix_ms: u64, bytes_max: usize) -> Option<Option<Vec<u8>>> {
    let started_unix_ms = reader.origin().started_unix_ms;
    let mut bytes = Vec::new();
    let mut encoder = Encoder::begin(&head(reader.origin()), &mut bytes);
    let (mut record, mut has_begun) = (DecisionRecord::default(), false);
    loop {
        // What stands before the first decision of that time is older.
        match reader.next(&mut record) {
            JournalEntry::Decision { core } => {
                has_begun |= started_unix_ms.saturating_add(record.at_ns / 1_000_000) >= since_unix_ms;
                if has_begun {
                    encoder.decision(core, &record, &mut bytes);
                }
            }
            JournalEntry::Gap { core, lost } if has_begun => encoder.gap(core, lost, &mut bytes),
            JournalEntry::Ended(ended) if has_begun => encoder.ended(&ended, &mut bytes),
            JournalEntry::EndsLost { lost } if has_begun => encoder.ends_lost(lost, &mut bytes),
            JournalEntry::Gap { .. } | JournalEntry::Ended(_) | JournalEntry::EndsLost { .. } => {}
            JournalEntry::End(_) => break,
        }
        if bytes.len() > bytes_max {
            return None;
        }
    }
    encoder.end(&mut bytes);
    Some(has_begun.then_some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::Ending;

    /// A journal of decisions at these times, milliseconds since a start at 1 000 000 ms.
    fn file(times_ms: &[u64], tail: &[u8]) -> Vec<u8> {
        let space = SpaceLabel { model: "sk-modelsecret".into(), ..SpaceLabel::default() };
        let origin = Origin { started_unix_ms: 1_000_000, spaces: vec![space], ..Origin::default() };
        let mut bytes = Vec::new();
        let mut encoder = Encoder::begin(&origin, &mut bytes);
        for at in times_ms {
            let mut record = DecisionRecord { at_ns: at * 1_000_000, ..DecisionRecord::default() };
            record.observation.request.block_size = 16;
            encoder.decision(0, &record, &mut bytes);
        }
        bytes.extend_from_slice(tail);
        bytes
    }

    fn decisions(bytes: &[u8]) -> (usize, Ending) {
        let (mut reader, mut record, mut found) = (Reader::open(bytes).unwrap(), DecisionRecord::default(), 0);
        loop {
            match reader.next(&mut record) {
                JournalEntry::Decision { .. } => found += 1,
                JournalEntry::End(ending) => return (found, ending),
                _ => {}
            }
        }
    }

    #[test]
    fn a_file_is_cut_to_its_last_decisions_and_to_what_is_a_record() {
        let bytes = file(&[1_000, 2_000, 3_000], b"a prompt that was written behind the records");
        let files = vec![("j".to_owned(), bytes)];
        let kept = cut(&files, 1_002_000).unwrap();
        assert_eq!(decisions(&kept[0].1), (2, Ending::Closed));
        let text = String::from_utf8_lossy(&kept[0].1);
        assert!(!text.contains("prompt that") && !text.contains("modelsecret"), "{text}");
        assert!(cut(&files, 2_000_000).unwrap().is_empty(), "all of them are older");
    }

    #[test]
    fn a_file_that_does_not_fit_is_refused() {
        let bytes = file(&[1_000; 50], b"");
        assert_eq!(since(&mut Reader::open(&bytes).unwrap(), 0, 100), None);
        assert!(since(&mut Reader::open(&bytes).unwrap(), 0, 1 << 20).unwrap().is_some());
    }

    #[test]
    fn files_that_are_no_journal_are_named_and_left_out() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("journal-1.kvrj"), "prompts").unwrap();
        let mut contents = Contents::default();
        add(&mut contents, folder.path(), 5, u64::MAX / 2);
        assert!(contents.parts().is_empty(), "{contents:?}");
        add(&mut contents, folder.path(), 5, 0);
        assert!(contents.left_out().iter().any(|(name, _)| name == "journal/journal-1.kvrj"), "{contents:?}");
        add(&mut contents, &folder.path().join("none"), 5, 0);
        assert!(contents.left_out().last().unwrap().1.contains("cannot be read"), "{contents:?}");
    }
}
