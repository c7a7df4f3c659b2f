//! `kvrouted replay`: repeats recorded decisions and compares them with their recorded results.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::exit::{Exit, Failure};
use crate::error::counted;
use crate::journal::{self, DecisionRecord, Ending, JournalEntry, Reader, Replayed};

/// Repeats the decisions of a journal and compares the results bit for bit.
#[derive(Debug, clap::Args)]
pub struct ReplayArgs {
    /// Journal files, or folders of them
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Print one JSON object instead of lines
    #[arg(long)]
    pub json: bool,
}

impl ReplayArgs {
    /// Repeats, compares and prints. The exit code is 1 if a result differs.
    ///
    /// # Errors
    /// A file that cannot be read or is not a journal, a closed standard output.
    pub fn run(&self) -> Result<Exit, Failure> {
        let (mut all, mut lines, mut endings) = (Replayed::default(), Vec::new(), Vec::new());
        for path in journal_files(&self.files)? {
            let bytes = read(&path)?;
            let mut reader = open(&path, &bytes)?;
            let ending = all.read(&mut reader);
            lines.extend(remarks(&path, &reader, ending));
            endings.push(json!({"file": path.display().to_string(), "ending": ending_name(ending), "unused_bytes": unused(ending)}));
        }
        let mut stdout = std::io::stdout().lock();
        if self.json {
            writeln!(stdout, "{}", object(&all, &endings))?;
        } else {
            writeln!(stdout, "{}", text(&all))?;
            lines.iter().try_for_each(|line| writeln!(stdout, "{line}"))?;
        }
        stdout.flush()?;
        Ok(if all.different > 0 { Exit::Refused } else { Exit::Done })
    }
}

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

/// Passes every decision of the files to `each`. Returns remarks about incomplete files.
pub(super) fn decisions(
    files: &[PathBuf],
    mut each: impl FnMut(&mut DecisionRecord) -> Result<(), Failure>,
) -> Result<Vec<String>, Failure> {
    let mut lines = Vec::new();
    for path in files {
        let bytes = read(path)?;
        let mut reader = open(path, &bytes)?;
        let mut record = DecisionRecord::default();
        let ending = loop {
            match reader.next(&mut record) {
                JournalEntry::Decision { .. } => each(&mut record)?,
                JournalEntry::Gap { .. } | JournalEntry::Ended(_) | JournalEntry::EndsLost { .. } => {}
                JournalEntry::End(ending) => break ending,
            }
        };
        lines.extend(remarks(path, &reader, ending));
    }
    Ok(lines)
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|error| unusable(path, &error.to_string()))
}

fn open<'a>(path: &Path, bytes: &'a [u8]) -> Result<Reader<'a>, Failure> {
    Reader::open(bytes).map_err(|error| unusable(path, &format!("{} ({})", error.message(), error.remedy())))
}

fn unusable(path: &Path, why: &str) -> Failure {
    Failure::new(Exit::Usage, format!("{}: {why}", path.display()))
}

const fn ending_name(ending: Ending) -> &'static str {
    match ending {
        Ending::Closed => "closed",
        Ending::Open => "open",
        Ending::Torn { .. } => "torn",
        Ending::Damaged { .. } => "damaged",
    }
}

const fn unused(ending: Ending) -> u64 {
    match ending {
        Ending::Closed | Ending::Open => 0,
        Ending::Torn { bytes, .. } | Ending::Damaged { bytes, .. } => bytes,
    }
}

/// Remarks about a file that is incomplete, damaged, or of another release.
fn remarks(path: &Path, reader: &Reader<'_>, ending: Ending) -> Vec<String> {
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

fn text(all: &Replayed) -> String {
    let Replayed { decisions, equal, different, gaps, lost, .. } = all;
    let mut text = format!("{}: {equal} equal, {different} different", counted(*decisions as usize, "decision"));
    if *gaps > 0 {
        text.push_str(&format!("; {} with {lost} lost decisions", counted(*gaps as usize, "gap")));
    }
    for of in &all.differences {
        text.push_str(&format!(
            "\ndecision {} ({:.3} s after the start): {}",
            of.decision,
            of.at_ns as f64 / 1e9,
            of.what
        ));
    }
    text
}

fn object(all: &Replayed, files: &[Value]) -> Value {
    let difference = |of: &journal::Difference| json!({"decision": of.decision, "at_ns": of.at_ns, "what": of.what});
    json!({
        "decisions": all.decisions,
        "equal": all.equal,
        "different": all.different,
        "gaps": all.gaps,
        "lost": all.lost,
        "differences": all.differences.iter().map(difference).collect::<Vec<_>>(),
        "files": files,
    })
}
