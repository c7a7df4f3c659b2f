//! The list of workers in a file: who is there, the last batch of each that was applied, and how far it is trusted.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};

use crate::error::Result;
use crate::fleet::{FleetTable, WorkerRecord};
use crate::ids::{EventSeq, Worker};
use crate::limits::{TAKEOVER_WORKER_BYTES, TAKEOVER_WORKERS_BYTES_MAX};

use super::failed;

/// In place of a batch's number where there was no batch.
const NO_BATCH: u64 = u64::MAX;

/// How far a worker is. The incarnation of its engine is not part of it. A daemon that is still at the batches of an earlier
/// incarnation has a subscription, so it sees the restart as any daemon does: in the next batch, or by a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) worker: Worker,
    /// The last batch that was applied; `None` = there was none.
    pub(super) last: Option<EventSeq>,
    /// The level of its trust, as a number that grows with it.
    pub(super) trust: u8,
}

/// The positions of all workers.
fn positions(table: &FleetTable) -> Vec<Position> {
    table.workers.iter().map(Position::of).collect()
}

impl Position {
    pub(super) fn of(record: &WorkerRecord) -> Self {
        let trust = record.trust.load();
        Self { worker: record.worker, last: trust.as_of_seq, trust: trust.level as u8 }
    }
}

pub(super) fn encode(positions: &[Position]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(positions.len() * TAKEOVER_WORKER_BYTES);
    for Position { worker, last, trust } in positions {
        bytes.extend_from_slice(&worker.id.0.to_le_bytes());
        bytes.extend_from_slice(&u64::from(worker.rank.0).to_le_bytes());
        bytes.extend_from_slice(&last.map_or(NO_BATCH, |seq| seq.0).to_le_bytes());
        bytes.extend_from_slice(&u64::from(*trust).to_le_bytes());
    }
    bytes
}

/// `None` = it is no list.
pub(super) fn decode(bytes: &[u8]) -> Option<Vec<Position>> {
    let (workers, rest) = bytes.as_chunks::<TAKEOVER_WORKER_BYTES>();
    if !rest.is_empty() {
        return None;
    }
    let number = |bytes: &[u8; TAKEOVER_WORKER_BYTES], at: usize| {
        let mut eight = [0; 8];
        eight.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(eight)
    };
    let position = |bytes: &[u8; TAKEOVER_WORKER_BYTES]| {
        let worker = Worker::new(number(bytes, 0), u32::try_from(number(bytes, 8)).ok()?);
        let last = number(bytes, 16);
        let trust = u8::try_from(number(bytes, 24)).ok()?;
        Some(Position { worker, last: (last != NO_BATCH).then_some(EventSeq(last)), trust })
    };
    workers.iter().map(position).collect()
}

pub(super) fn write(file: &File, table: &FleetTable) -> std::io::Result<()> {
    let mut file = file;
    file.write_all(&encode(&positions(table)))
}

/// Reads a list from a file of the other daemon.
///
/// # Errors
/// It is no list, or it is too long.
pub(super) fn read(file: File) -> Result<Vec<Position>> {
    decode(&read_bytes(file, TAKEOVER_WORKERS_BYTES_MAX)?)
        .ok_or_else(|| failed("the other daemon sent no list of workers"))
}

/// Reads a whole file of the other daemon.
///
/// # Errors
/// It is none, or it is longer than `bytes_max`.
pub(super) fn read_bytes(mut file: File, bytes_max: usize) -> Result<Vec<u8>> {
    let unreadable = |cause: std::io::Error| failed("a file of the other daemon cannot be read").caused_by(cause);
    // Reading anything else could wait.
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err(failed("the other daemon sent a descriptor that is no file"));
    }
    file.seek(SeekFrom::Start(0)).map_err(unreadable)?;
    let mut bytes = Vec::new();
    let read = file.take(bytes_max as u64 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if read > bytes_max {
        return Err(failed("a file of the other daemon is too long"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_as_it_was_written_and_no_part_of_one_is() {
        let positions = [
            Position { worker: Worker::new(1, 0), last: None, trust: 0 },
            Position { worker: Worker::new(u64::MAX, u32::MAX), last: Some(EventSeq(7)), trust: 255 },
        ];
        let bytes = encode(&positions);
        assert_eq!(decode(&bytes).as_deref(), Some(&positions[..]));
        assert_eq!(decode(&[]), Some(Vec::new()));
        for length in (1..bytes.len()).filter(|length| length % TAKEOVER_WORKER_BYTES > 0) {
            assert_eq!(decode(&bytes[..length]), None, "{length}");
        }
        assert_eq!(decode(&[0xff; TAKEOVER_WORKER_BYTES]), None, "no rank is that large");
    }
}
