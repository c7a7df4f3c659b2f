//! The file of learnt prefill times: one for all workers, beside their snapshots. All numbers are little-endian.
//!
//! ```text
//! preamble   magic, version, bytes of the body
//! checksum   u64, of the body
//! body       LearntLaws as JSON
//! ```
//!
//! As those of snapshots, the checksum guards against disk errors and accidents only. Constants that no report could
//! have taught are refused when a class takes them ([`Loads::restore_laws`](crate::load::Loads::restore_laws)).

use std::collections::BTreeSet;
use std::io::{self, Read};

use super::directory::Directory;
use super::restore::open;
use super::stats::{Fault, Refusal};
use crate::framed_file::{PREAMBLE_BYTES, Preamble, checksum};
use crate::limits::{LAWS_FILE_BYTES_MAX, NAME_BYTES_MAX, PREFILL_CLASSES_MAX, WORKERS_MAX};
use crate::load::LearntLaws;

const MAGIC: [u8; 8] = *b"KVRDLAWS";
/// The version that is written, and the only one that is read. Change it whenever the framing or [`LearntLaws`] changes.
const VERSION: u32 = 1;
const HEAD_BYTES: usize = PREAMBLE_BYTES + 8;

/// The bytes of the file.
///
/// # Errors
/// `InvalidData` if a number is not finite: JSON has none such.
pub fn encode_laws(laws: &LearntLaws) -> io::Result<Vec<u8>> {
    let body = serde_json::to_vec(laws)?;
    // The limits of classes and workers keep it far below 4 GiB.
    let mut bytes = Preamble { magic: MAGIC, version: VERSION, extra: body.len() as u32 }.to_bytes().to_vec();
    bytes.extend_from_slice(&checksum(u64::from(VERSION), &body).to_le_bytes());
    bytes.extend_from_slice(&body);
    Ok(bytes)
}

/// Reads the bytes of the file.
///
/// # Errors
/// The first fault of the bytes, and its offset.
pub fn decode_laws(bytes: &[u8]) -> Result<LearntLaws, Fault> {
    let fault = |refusal, offset: usize| Fault { refusal, offset: offset as u64 };
    let truncated = fault(Refusal::Truncated, bytes.len());
    let (preamble, rest) = bytes.split_first_chunk::<PREAMBLE_BYTES>().ok_or(truncated)?;
    let Preamble { magic, version, extra } = Preamble::from_bytes(preamble);
    if magic != MAGIC {
        return Err(fault(Refusal::NotASnapshot, 0));
    }
    if version != VERSION {
        return Err(fault(Refusal::OtherVersion, 8));
    }
    let (sum, body) = rest.split_first_chunk::<8>().ok_or(truncated)?;
    if body.len() < extra as usize {
        return Err(truncated);
    }
    if body.len() > extra as usize {
        return Err(fault(Refusal::Malformed, HEAD_BYTES + extra as usize));
    }
    if *sum != checksum(u64::from(VERSION), body).to_le_bytes() {
        return Err(fault(Refusal::Checksum, HEAD_BYTES));
    }
    let laws = serde_json::from_slice::<LearntLaws>(body).ok().filter(is_bounded);
    laws.ok_or(fault(Refusal::Malformed, HEAD_BYTES))
}

/// Whether classes and workers are no more than a daemon has, and each class is named once.
fn is_bounded(laws: &LearntLaws) -> bool {
    let names: BTreeSet<&str> = laws.classes.iter().map(|class| class.name.as_str()).collect();
    names.len() == laws.classes.len()
        && names.iter().all(|name| name.len() <= NAME_BYTES_MAX)
        // Twice: those of this run, and absent ones of an earlier one.
        && laws.classes.len() <= 2 * PREFILL_CLASSES_MAX
        && laws.workers.len() <= 2 * WORKERS_MAX
        && laws.workers.iter().all(|worker| worker.class < laws.classes.len())
}

/// Reads the file of a directory; `None` = there is none.
///
/// # Errors
/// The first fault of the file.
pub fn read_laws(directory: &Directory) -> Result<Option<LearntLaws>, Fault> {
    let unreadable = |_| Fault { refusal: Refusal::Unreadable, offset: 0 };
    let Some(file) = open(&directory.laws_file())? else { return Ok(None) };
    let mut bytes = Vec::new();
    let read = file.take(LAWS_FILE_BYTES_MAX as u64 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if read > LAWS_FILE_BYTES_MAX {
        return Err(Fault { refusal: Refusal::Malformed, offset: LAWS_FILE_BYTES_MAX as u64 });
    }
    decode_laws(&bytes).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Worker, WorkerIndex};
    use crate::load::{BookingOutcome, BookingRef, Demand, LearntClass, LearntWorker, Loads, LoadsConfig};

    fn laws() -> LearntLaws {
        let class = |name: &str| LearntClass {
            name: name.to_owned(),
            prior: [0.1, 1e-5, 0.375],
            is_preset: true,
            factors: [1.0, 0.7, 63.9],
            variance: [1.0, 2.0, 3.0, 0.1, -0.2, 0.3],
            error: 0.07,
            samples: u64::MAX,
            learnt_unix_ms: 1 << 41,
        };
        let worker = LearntWorker { id: u64::MAX, rank: 3, class: 1, slowness: 1.9, learnt_unix_ms: 5 };
        LearntLaws { classes: vec![class("a"), class("ü")], workers: vec![worker] }
    }

    fn refusal(bytes: &[u8]) -> Option<Refusal> {
        decode_laws(bytes).err().map(|fault| fault.refusal)
    }

    #[test]
    fn laws_are_read_as_they_were_written() {
        assert_eq!(decode_laws(&encode_laws(&laws()).unwrap()), Ok(laws()));
        assert_eq!(decode_laws(&encode_laws(&LearntLaws::default()).unwrap()), Ok(LearntLaws::default()));
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_refused() {
        let bytes = encode_laws(&laws()).unwrap();
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut bytes = bytes.clone();
                bytes[at] ^= 1 << bit;
                let expected: &[Refusal] = match at {
                    0..8 => &[Refusal::NotASnapshot],
                    8..12 => &[Refusal::OtherVersion],
                    12..PREAMBLE_BYTES => &[Refusal::Truncated, Refusal::Malformed],
                    _ => &[Refusal::Checksum],
                };
                assert!(refusal(&bytes).is_some_and(|refusal| expected.contains(&refusal)), "byte {at}, bit {bit}");
            }
            assert_eq!(refusal(&bytes[..at]), Some(Refusal::Truncated));
        }
        assert_eq!(refusal(&[bytes.as_slice(), &[0]].concat()), Some(Refusal::Malformed));
    }

    #[test]
    fn right_checksums_over_other_contents_are_refused() {
        let framed = |body: &[u8]| {
            let head = Preamble { magic: MAGIC, version: VERSION, extra: body.len() as u32 }.to_bytes();
            [&head[..], &checksum(u64::from(VERSION), body).to_le_bytes(), body].concat()
        };
        let nested = "[".repeat(100_000);
        let bodies: [&str; 5] = ["", "null", "{\"classes\":[],\"workers\":[],\"more\":1}", "{\"classes\":[]}", &nested];
        for body in bodies {
            assert_eq!(refusal(&framed(body.as_bytes())), Some(Refusal::Malformed), "{body:.40}");
        }
        let with = |change: &dyn Fn(&mut LearntLaws)| {
            let mut laws = laws();
            change(&mut laws);
            refusal(&encode_laws(&laws).unwrap())
        };
        let class = laws().classes[0].clone();
        assert_eq!(with(&|laws| laws.workers[0].class = 2), Some(Refusal::Malformed));
        assert_eq!(with(&|laws| laws.classes[1].name = "a".to_owned()), Some(Refusal::Malformed));
        assert_eq!(with(&|laws| laws.classes[1].name = "n".repeat(NAME_BYTES_MAX + 1)), Some(Refusal::Malformed));
        let many = |laws: &mut LearntLaws| {
            let of = |at: usize| LearntClass { name: at.to_string(), ..class.clone() };
            laws.classes = (0..2 * PREFILL_CLASSES_MAX + 1).map(of).collect();
        };
        assert_eq!(with(&many), Some(Refusal::Malformed));
        // JSON has no word for them: they are written as null, which is no number.
        assert_eq!(with(&|laws| laws.classes[0].error = f64::NAN), Some(Refusal::Malformed));
    }

    #[test]
    fn the_file_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::open(&folder.path().join("s")).unwrap();
        assert_eq!(read_laws(&directory), Ok(None));
        let class = |at: usize| LearntClass { name: format!("{at:0256}"), ..laws().classes[0].clone() };
        let worker = LearntWorker { slowness: 1.234_567_890_625, class: 300, ..laws().workers[0] };
        let largest = LearntLaws {
            classes: (0..2 * PREFILL_CLASSES_MAX).map(class).collect(),
            workers: vec![worker; 2 * WORKERS_MAX],
        };
        directory.write_laws(&encode_laws(&largest).unwrap()).unwrap();
        assert_eq!(read_laws(&directory), Ok(Some(largest)));
        directory.write_laws(&vec![0; LAWS_FILE_BYTES_MAX + 1]).unwrap();
        assert_eq!(read_laws(&directory).map_err(|fault| fault.refusal), Err(Refusal::Malformed));
        assert_eq!(directory.files().unwrap().len(), 0, "it is no worker's");
        assert_eq!((directory.remove(None).unwrap(), directory.laws_file().exists()), (0, true));
        assert!(directory.remove_laws().unwrap() && !directory.remove_laws().unwrap());
    }

    #[test]
    fn what_a_run_saves_is_read_by_the_next_one_however_many_classes_and_workers_came_and_went() {
        // That of the workers was learnt last.
        let class = |at: usize| {
            let learnt_unix_ms = (1 << 40) - at as u64;
            LearntClass { name: format!("before {at}"), learnt_unix_ms, ..laws().classes[0].clone() }
        };
        let worker = |at: u64| LearntWorker { id: at, rank: 9, class: 0, slowness: 2.0, learnt_unix_ms: at };
        let full = LearntLaws {
            classes: (0..2 * PREFILL_CLASSES_MAX).map(class).collect(),
            workers: (0..2 * WORKERS_MAX as u64).map(worker).collect(),
        };
        assert!(decode_laws(&encode_laws(&full).unwrap()).is_ok());
        let loads = Loads::new(PREFILL_CLASSES_MAX, LoadsConfig::default());
        assert!(loads.restore_laws(&full, 1 << 41).is_empty());
        let session = loads.open_session(None, 7).unwrap();
        for at in 0..PREFILL_CLASSES_MAX as u32 {
            let (index, name) = (WorkerIndex(at), format!("now {at}"));
            loads.set_prefill_class(index, Worker::new(u64::from(at), 0), &name, None);
            let demand = Demand { prefill_tokens: 1000, ..Demand::default() };
            let booked = loads.book(session, &name, 0, index, demand, 1).unwrap();
            let booking = BookingRef::Handle(booked.handle);
            assert_eq!(loads.prefill_complete(session, booking, 0, 300_000_000), BookingOutcome::Applied);
        }
        let saved = loads.learnt_laws(1 << 30, 1 << 41, u64::MAX);
        let read = decode_laws(&encode_laws(&saved).unwrap()).unwrap();
        assert_eq!((read.classes.len(), read.workers.len()), (2 * PREFILL_CLASSES_MAX, WORKERS_MAX));
        assert!(saved.classes.iter().take(PREFILL_CLASSES_MAX).all(|class| class.name.starts_with("now")));
    }
}
