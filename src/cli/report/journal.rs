//! The journal of the last minutes. Files are not copied: each record is decoded and encoded anew, so that a file of the
//! archive has only fields that this release knows. No column of a journal is a prompt, a token or a block hash. Prefixes
//! and sessions are keyed hashes, and the key is in no file.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
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
    let since_unix_ms = now_unix_ms.saturating_sub(minutes * 60_000);
    // The newest first, and one at a time: all of them may be far more than fits.
    let newest_first = files.into_iter().rev().filter_map(|path| read(contents, &path, since_unix_ms));
    let (fitting, from_unix_ms) = cut(newest_first, (since_unix_ms, now_unix_ms), REPORT_JOURNAL_BYTES_MAX);
    let seconds = now_unix_ms.saturating_sub(from_unix_ms) / 1000;
    if from_unix_ms > since_unix_ms {
        let why = format!(
            "decisions older than {seconds} s: together with them the journal has more than {REPORT_JOURNAL_BYTES_MAX} bytes"
        );
        contents.leave_out(NAME, why);
    }
    if fitting.is_empty() {
        contents.leave_out(NAME, format!("no decision of the last {seconds} s is in it"));
    }
    for (name, bytes) in fitting {
        let about = "decisions and ends of requests, for kvrouted replay; no prompts and no tokens.";
        contents.add(&format!("{NAME}{name}"), about, bytes);
    }
}

/// The name and the bytes of a file, if it is a journal file that was written to since `since_unix_ms`.
fn read(contents: &mut Contents, path: &Path, since_unix_ms: u64) -> Option<(String, Vec<u8>)> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let read = bytes(path, since_unix_ms).and_then(|bytes| match bytes {
        Some(bytes) => {
            Reader::open(&bytes).map(|_| ()).map_err(|error| error.message().to_owned()).map(|()| Some(bytes))
        }
        None => Ok(None),
    });
    match read {
        Ok(bytes) => bytes.map(|bytes| (name, bytes)),
        Err(why) => {
            contents.leave_out(&format!("{NAME}{name}"), why);
            None
        }
    }
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

/// Files by name, the oldest first.
type Files = Vec<(String, Vec<u8>)>;

/// The files with decisions since `since_unix_ms`, cut to `bytes_max` bytes in all, and the time since which they have all
/// decisions.
fn cut(
    newest_first: impl Iterator<Item = (String, Vec<u8>)>,
    (since_unix_ms, now_unix_ms): (u64, u64),
    bytes_max: usize,
) -> (Files, u64) {
    let (mut all, mut left, mut from_unix_ms) = (Files::new(), bytes_max, since_unix_ms);
    for (name, bytes) in newest_first {
        let of =
            |from_unix_ms| Reader::open(&bytes).map_or(Some(None), |mut file| since(&mut file, from_unix_ms, left));
        // Halves the time at each try, until the records fit. After a clock went back, there may be decisions of the future,
        // so even the shortest time may not fit.
        let mut fitting = of(from_unix_ms);
        while fitting.is_none() && from_unix_ms < now_unix_ms {
            from_unix_ms += (now_unix_ms - from_unix_ms).div_ceil(2);
            fitting = of(from_unix_ms);
        }
        if let Some(bytes) = fitting.flatten() {
            left -= bytes.len();
            all.push((name, bytes));
        }
        if from_unix_ms > since_unix_ms {
            break;
        }
    }
    all.reverse();
    (all, from_unix_ms)
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

/// A file of the records since a time. `None` = it would have more than `bytes_max` bytes; `Some(None)` = it would have no
/// decision.
fn since(reader: &mut Reader<'_>, since_unix_ms: u64, bytes_max: usize) -> Option<Option<Vec<u8>>> {
    let started_unix_ms = reader.origin().started_unix_ms;
    let mut bytes = Vec::new();
    let mut encoder = Encoder::begin(&head(reader.origin()), &mut bytes);
    let (mut record, mut has_begun) = (DecisionRecord::default(), false);
    loop {
        // Records before the first decision of that time are older.
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
        let kept = cut(files.clone().into_iter(), (1_002_000, 2_000_000), 1 << 20).0;
        assert_eq!(decisions(&kept[0].1), (2, Ending::Closed));
        let text = String::from_utf8_lossy(&kept[0].1);
        assert!(!text.contains("prompt that") && !text.contains("modelsecret"), "{text}");
        assert!(cut(files.into_iter(), (2_000_000, 2_000_000), 1 << 20).0.is_empty(), "all of them are older");
    }

    #[test]
    fn of_files_that_do_not_fit_the_newest_decisions_stay_and_older_files_are_not_read() {
        let files = [("3", file(&[3_000; 10], b"")), ("2", file(&[2_000; 10], b"")), ("1", file(&[1_000; 10], b""))];
        let mut read = 0;
        let newest_first = files.iter().inspect(|_| read += 1).map(|(name, bytes)| ((*name).to_owned(), bytes.clone()));
        let (kept, from) = cut(newest_first, (0, 1_004_000), files[0].1.len() + files[1].1.len() / 2);
        assert_eq!((kept.len(), &kept[0].0[..], decisions(&kept[0].1).0, read), (1, "3", 10, 2));
        assert!(from > 1_002_000 && from <= 1_004_000, "{from}");
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
