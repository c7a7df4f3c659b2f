//! Records of a run of the demo: engines and gateway write them, and `verify` reads them. One JSON object in each line.
//! Also the clocks of their time stamps.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind};

/// One event of a published batch, by the blocks' names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum EventRecord {
    /// These blocks are held now.
    Stored(Vec<u64>),
    /// These blocks are no longer held.
    Removed(Vec<u64>),
    /// No block is held any more.
    Cleared,
}

/// One published batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BatchRecord {
    /// Its sequence number, from 0.
    pub(crate) seq: u64,
    /// CLOCK_MONOTONIC before it was sent, in nanoseconds.
    pub(crate) sent_ns: u64,
    /// Its events, in order.
    pub(crate) events: Vec<EventRecord>,
}

/// One engine in one reply of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CandidateRecord {
    /// The engine.
    pub(crate) worker: u64,
    /// Overlap in device memory, in blocks.
    pub(crate) device: u32,
    /// Overlap in lower tiers; the demo's engines have none.
    pub(crate) lower: u32,
    /// Sequence number of the last batch applied before the lookup; `None` = none yet.
    pub(crate) as_of_seq: Option<u64>,
    /// Whether its trust was `exact`.
    pub(crate) exact: bool,
}

/// One reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReplyRecord {
    /// Index of the policy.
    pub(crate) phase: usize,
    /// Index of the request, for people.
    pub(crate) request: usize,
    /// CLOCK_MONOTONIC when the request was sent, in nanoseconds.
    pub(crate) left_ns: u64,
    /// CLOCK_MONOTONIC when the reply had arrived, in nanoseconds.
    pub(crate) replied_ns: u64,
    /// The engines' names of the prompt's whole blocks.
    pub(crate) chain: Vec<u64>,
    /// Every engine.
    pub(crate) candidates: Vec<CandidateRecord>,
}

/// A file of records being written.
#[derive(Debug)]
pub(crate) struct RecordWriter(BufWriter<File>);

impl RecordWriter {
    /// Creates the file.
    ///
    /// # Errors
    /// `system` if it cannot be created.
    pub(crate) fn create(path: &Path) -> Result<Self, Error> {
        let file = File::create(path).map_err(|error| unusable(path, "created").caused_by(error))?;
        Ok(Self(BufWriter::with_capacity(1 << 18, file)))
    }

    /// Adds a record.
    ///
    /// # Errors
    /// `system` if it cannot be written.
    pub(crate) fn write(&mut self, record: &impl Serialize) -> Result<(), Error> {
        self.write_line(&line_of(record)?)
    }

    /// Adds a line made by [`line_of`], so that threads that share the file encode in parallel.
    ///
    /// # Errors
    /// `system` if it cannot be written.
    pub(crate) fn write_line(&mut self, line: &[u8]) -> Result<(), Error> {
        self.0.write_all(line).map_err(|error| unwritable().caused_by(error))
    }

    /// Writes everything to the file.
    ///
    /// # Errors
    /// `system` if it cannot be written.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        self.0.flush().map_err(|error| unwritable().caused_by(error))
    }
}

/// A record as a line, with its line end.
///
/// # Errors
/// `system` if it cannot be encoded.
pub(crate) fn line_of(record: &impl Serialize) -> Result<Vec<u8>, Error> {
    let mut line = serde_json::to_vec(record).map_err(|error| unwritable().caused_by(error))?;
    line.push(b'\n');
    Ok(line)
}

/// Reads a file of records and passes each to `take`.
///
/// # Errors
/// `system` if it cannot be read, `internal` if a line is not such a record.
pub(crate) fn read_all<T: DeserializeOwned>(path: &Path, mut take: impl FnMut(T)) -> Result<(), Error> {
    let file = File::open(path).map_err(|error| unusable(path, "opened").caused_by(error))?;
    let (mut reader, mut line) = (BufReader::with_capacity(1 << 18, file), String::new());
    loop {
        line.clear();
        if reader.read_line(&mut line).map_err(|error| unusable(path, "read").caused_by(error))? == 0 {
            return Ok(());
        }
        take(serde_json::from_str(&line).map_err(|error| {
            Error::new(Kind::Internal, format!("{} has a line that is not a record", path.display()), "report it")
                .caused_by(error)
        })?);
    }
}

fn unusable(path: &Path, what: &str) -> Error {
    Error::new(Kind::System, format!("{} cannot be {what}", path.display()), "check the folder given by --keep")
}

fn unwritable() -> Error {
    Error::new(Kind::System, "a record of the demo cannot be written", "make room in the temporary folder")
}

/// CLOCK_MONOTONIC in nanoseconds: one clock for all processes of the machine.
pub(crate) fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Unix time in seconds, as in vLLM's batches.
pub(crate) fn unix_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}
