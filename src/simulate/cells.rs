//! The cells of a suite: results by name, kept in a file of JSON lines so that a suite which was stopped goes on.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::measure::Measured;

/// What a cell holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Found {
    /// The result of a search.
    Capacity {
        /// A factor of the workload's own rate, or live sessions; `None` = none was found.
        load: Option<f64>,
        /// Requests in a second at that load.
        rps: Option<f64>,
        /// Runs that the search took.
        probes: usize,
    },
    /// The figures of one run.
    Run(Box<Measured>),
}

#[derive(Serialize, Deserialize)]
struct Line {
    cell: String,
    #[serde(flatten)]
    found: Found,
}

/// The cells of a suite.
#[derive(Debug, Default)]
pub struct Cells {
    known: Mutex<HashMap<String, Found>>,
    file: Option<Mutex<File>>,
}

impl Cells {
    /// The cells in a file, which is made if it is not there. An unfinished last line, left by a suite that was
    /// stopped, is run again.
    ///
    /// # Errors
    /// A sentence that names the file, and the line that is not a cell.
    pub fn open(path: &Path) -> Result<Self, String> {
        let cannot = |error: std::io::Error| format!("cannot use {}: {error}", path.display());
        let mut file = OpenOptions::new().create(true).read(true).append(true).open(path).map_err(cannot)?;
        let (mut known, mut ends_with_newline) = (HashMap::new(), true);
        let mut lines = BufReader::new(&file);
        let (mut text, mut number) = (String::new(), 0_usize);
        while lines.read_line(&mut text).map_err(cannot)? > 0 {
            number += 1;
            ends_with_newline = text.ends_with('\n');
            match serde_json::from_str::<Line>(&text) {
                Ok(line) => drop(known.insert(line.cell, line.found)),
                Err(_) if !ends_with_newline => {}
                Err(error) => return Err(format!("{}, line {number} is not a cell: {error}", path.display())),
            }
            text.clear();
        }
        drop(lines);
        if !ends_with_newline {
            // The broken line is made one that is skipped: a suite must not lose its cells to a power cut.
            let length = file.metadata().map_err(cannot)?.len();
            let whole = last_newline(path, length).map_err(cannot)?;
            file.set_len(whole).map_err(cannot)?;
            file.flush().map_err(cannot)?;
        }
        Ok(Self { known: Mutex::new(known), file: Some(Mutex::new(file)) })
    }

    /// The cell of this name, found by `find` unless it is known. `Err`: the file cannot be written.
    pub fn get(&self, cell: &str, find: impl FnOnce() -> Found) -> Result<Found, String> {
        if let Some(found) = self.known.lock().unwrap_or_else(PoisonError::into_inner).get(cell) {
            return Ok(found.clone());
        }
        let found = find();
        if let Some(file) = &self.file {
            let line = Line { cell: cell.into(), found: found.clone() };
            let mut text = serde_json::to_string(&line).map_err(|error| format!("cell {cell}: {error}"))?;
            text.push('\n');
            let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
            file.write_all(text.as_bytes()).map_err(|error| format!("cannot write the cell {cell}: {error}"))?;
        }
        self.known.lock().unwrap_or_else(PoisonError::into_inner).insert(cell.into(), found.clone());
        Ok(found)
    }

    /// How many cells are known.
    #[must_use]
    pub fn len(&self) -> usize {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether no cell is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The length of a file up to its last newline.
fn last_newline(path: &Path, length: u64) -> std::io::Result<u64> {
    let bytes = std::fs::read(path)?;
    let kept = usize::try_from(length).unwrap_or(usize::MAX).min(bytes.len());
    Ok(bytes[..kept].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at as u64 + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("cells-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        path
    }

    fn capacity(load: f64) -> Found {
        Found::Capacity { load: Some(load), rps: None, probes: 4 }
    }

    #[test]
    fn a_cell_that_is_there_is_not_run_again() {
        let path = path("again");
        let cells = Cells::open(&path).expect("a new file");
        assert_eq!(cells.get("a", || capacity(2.0)), Ok(capacity(2.0)));
        assert_eq!(cells.get("r", || Found::Run(Box::default())), Ok(Found::Run(Box::default())));
        let again = Cells::open(&path).expect("the same file");
        assert_eq!(again.len(), 2);
        assert_eq!(again.get("a", || unreachable!("it is known")), Ok(capacity(2.0)));
    }

    #[test]
    fn a_line_that_was_cut_off_is_run_again() {
        let path = path("cut");
        let cells = Cells::open(&path).expect("a new file");
        cells.get("a", || capacity(2.0)).expect("written");
        let whole = std::fs::read_to_string(&path).expect("text");
        std::fs::write(&path, format!("{whole}{{\"cell\":\"b\",\"capa")).expect("written");
        let again = Cells::open(&path).expect("the same file");
        assert_eq!(again.len(), 1);
        assert_eq!(again.get("b", || capacity(3.0)), Ok(capacity(3.0)));
        assert_eq!(Cells::open(&path).expect("whole lines").len(), 2);
    }

    #[test]
    fn a_file_of_something_else_is_refused_with_its_line() {
        let path = path("else");
        std::fs::write(&path, "{\"x\":1}\n").expect("written");
        assert!(Cells::open(&path).is_err_and(|error| error.contains("line 1")));
    }
}
