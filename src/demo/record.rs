//! What engines and gateway write down while the demo runs, and read back to check it: JSON, a record a line.

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
    /// These are held now.
    Stored(Vec<u64>),
    /// These are gone.
    Removed(Vec<u64>),
    /// All are gone.
    Cleared,
}

/// One published batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BatchRecord {
    /// Its sequence, from 0.
    pub(crate) seq: u64,
    /// CLOCK_MONOTONIC before it was sent, in nanoseconds.
    pub(crate) sent_ns: u64,
    /// Its events, in order.
    pub(crate) events: Vec<EventRecord>,
}

/// What the daemon said about one engine in one reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CandidateRecord {
    /// The engine.
    pub(crate) worker: u64,
    /// Leading blocks of the prompt on its device.
    pub(crate) device: u32,
    /// Blocks in lower tiers; the demo's engines have none.
    pub(crate) lower: u32,
    /// The last sequence applied when the daemon looked; `None` = nothing yet.
    pub(crate) as_of_seq: Option<u64>,
    /// Whether its trust was `exact`.
    pub(crate) exact: bool,
}

/// One reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReplyRecord {
    /// Which request, for people.
    pub(crate) request: usize,
    /// CLOCK_MONOTONIC when the request left, in nanoseconds.
    pub(crate) left_ns: u64,
    /// CLOCK_MONOTONIC when the reply had come, in nanoseconds.
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

    /// Adds a record that [`line_of`] has made: threads that share the file encode side by side.
    ///
    /// # Errors
    /// `system` if it cannot be written.
    pub(crate) fn write_line(&mut self, line: &[u8]) -> Result<(), Error> {
        self.0.write_all(line).map_err(|error| unwritable().caused_by(error))
    }

    /// Hands everything to the kernel.
    ///
    /// # Errors
    /// `system` if it cannot be written.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        self.0.flush().map_err(|error| unwritable().caused_by(error))
    }
}

/// A record as its line, with the end of it.
///
/// # Errors
/// `system` if it cannot be encoded.
pub(crate) fn line_of(record: &impl Serialize) -> Result<Vec<u8>, Error> {
    let mut line = serde_json::to_vec(record).map_err(|error| unwritable().caused_by(error))?;
    line.push(b'\n');
    Ok(line)
}

/// Reads a file of records, handing each to `take`.
///
/// # Errors
/// `system` if it cannot be read, `internal` if a line is no such record.
pub(crate) fn read_all<T: DeserializeOwned>(path: &Path, mut take: impl FnMut(T)) -> Result<(), Error> {
    let file = File::open(path).map_err(|error| unusable(path, "opened").caused_by(error))?;
    let (mut reader, mut line) = (BufReader::with_capacity(1 << 18, file), String::new());
    loop {
        line.clear();
        if reader.read_line(&mut line).map_err(|error| unusable(path, "read").caused_by(error))? == 0 {
            return Ok(());
        }
        take(serde_json::from_str(&line).map_err(|error| {
            Error::new(Kind::Internal, format!("{} has a line that is no record", path.display()), "report it")
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

/// CLOCK_MONOTONIC in nanoseconds: the same for every process of the machine.
pub(crate) fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Seconds since 1970, as vLLM stamps its batches.
pub(crate) fn unix_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}
