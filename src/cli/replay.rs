//! `kvrouted replay`: repeats recorded decisions and compares them with their recorded results.

use std::io::Write as _;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::exit::{Exit, Failure};
use super::journal_files::{journal_files, open, read, remarks};
use crate::error::counted;
use crate::journal::{self, Ending, Replayed};

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
