//! A worker's blocks on their way from one daemon to the one that takes over from it: a snapshot in a file that both
//! have, which is read once.

use std::fs::File;
use std::io::{BufReader, BufWriter, Seek, SeekFrom, Write};
use std::time::Instant;

use crossbeam::channel::{Receiver, Sender};

use super::format::{Decoder, Encoder};
use super::keeper::{header, space_name};
use super::restore::{Expected, send_decoded, unproven};
use super::stats::{Fault, Refusal};
use crate::fleet::{FleetTable, WorkerRecord};
use crate::ingest::{AbortReason, DumpPart};
use crate::limits::SNAPSHOT_BUFFER_BYTES;
use crate::trust::TrustReason;

/// Writes a dump to a file until `deadline`.
///
/// # Errors
/// Why there is no whole dump in the file.
pub fn write_dump(
    file: &File,
    (table, record): (&FleetTable, &WorkerRecord),
    parts: &Receiver<DumpPart>,
    deadline: Instant,
) -> Result<u64, &'static str> {
    let next = || parts.recv_deadline(deadline).map_err(|_| "late");
    let unwritten = |_| "unwritten";
    let begin = match next()? {
        DumpPart::Begin(begin) => begin,
        DumpPart::Aborted(reason) => return Err(reason.name()),
        DumpPart::Chunk(_) | DumpPart::End(_) => return Err("out_of_order"),
    };
    // As in a snapshot: nothing can follow such a dump, or it lacks blocks.
    if begin.watermark.is_none() {
        return Err("no_batch");
    }
    if begin.trust.reasons.contains(TrustReason::Hybrid) {
        return Err("hybrid");
    }
    let mut out = BufWriter::with_capacity(SNAPSHOT_BUFFER_BYTES, file);
    let mut encoder =
        Encoder::begin(&mut out, &header(record.worker, space_name(table, record), *begin)).map_err(unwritten)?;
    loop {
        match next()? {
            DumpPart::Chunk(chunk) => encoder.chunk(&chunk).map_err(unwritten)?,
            DumpPart::End(references) => {
                encoder.end(references).map_err(unwritten)?;
                out.flush().map_err(unwritten)?;
                return Ok(references.blocks);
            }
            DumpPart::Aborted(reason) => return Err(reason.name()),
            DumpPart::Begin(_) => return Err("out_of_order"),
        }
    }
}

/// Feeds a passed dump to a load. If `is_live`, the worker's events have waited since before the dump was taken, so they
/// go on where it ends. Otherwise the worker is as after a restart until a replay proves it.
///
/// # Errors
/// The first fault. The load is aborted then.
pub fn feed_dump(file: File, expected: &Expected, is_live: bool, parts: &Sender<DumpPart>) -> Result<u64, Fault> {
    let fed = fed(file, expected, is_live, parts);
    if fed.is_err() {
        // A closed channel means that the load has ended already.
        drop(parts.send(DumpPart::Aborted(AbortReason::Corrupt)));
    }
    fed
}

fn fed(mut file: File, expected: &Expected, is_live: bool, parts: &Sender<DumpPart>) -> Result<u64, Fault> {
    let unreadable = |_| Fault { refusal: Refusal::Unreadable, offset: 0 };
    // Reading anything else could wait.
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err(Fault { refusal: Refusal::Unreadable, offset: 0 });
    }
    // The writer has left the place that both share at the end.
    file.seek(SeekFrom::Start(0)).map_err(unreadable)?;
    let (header, decoder) = Decoder::open(BufReader::with_capacity(SNAPSHOT_BUFFER_BYTES, file))?;
    let expected = Expected { is_provable: is_live || expected.is_provable, ..expected.clone() };
    expected.agrees(&header).map_err(|refusal| Fault { refusal, offset: decoder.offset() })?;
    send_decoded((header, decoder), |header| if is_live { header } else { unproven(header) }, parts)
}
