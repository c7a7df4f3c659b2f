//! Snapshot files, and files of learnt prefill times: a file that was read is written the same. Checksums are also
//! corrected, to reach the code behind them.

use kvrouted::ids::{Worker, WorkerIndex};
use kvrouted::index::StoreBlocks;
use kvrouted::ingest::{DumpChunk, References};
use kvrouted::load::{Loads, LoadsConfig};
use kvrouted::snapshot::{Encoder, decode, decode_laws, encode_laws};
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128};

const PREAMBLE_BYTES: usize = 16;
const SECTION_HEAD_BYTES: usize = 16;
const FOOTER_BYTES: usize = 16;
const LAWS_HEAD_BYTES: usize = PREAMBLE_BYTES + 8;

/// A file as it is, and with its checksums put right.
pub(crate) fn snapshot(data: &[u8]) {
    read(data);
    let mut repaired = data.to_vec();
    repair(&mut repaired);
    read(&repaired);
    laws(data);
    let mut repaired = data.to_vec();
    repair_laws(&mut repaired);
    laws(&repaired);
}

/// What can be read can be written again, and the laws that workers get of it are sound.
fn laws(data: &[u8]) {
    let Ok(laws) = decode_laws(data) else { return };
    let again = decode_laws(&encode_laws(&laws).expect("finite numbers")).expect("what is written can be read");
    assert_eq!((again.classes.len(), again.workers.len()), (laws.classes.len(), laws.workers.len()));
    let loads = Loads::new(1, LoadsConfig::default());
    loads.restore_laws(&laws, 1 << 41);
    for class in laws.classes.iter().take(4) {
        loads.set_prefill_class(WorkerIndex(0), Worker::new(1, 0), &class.name, None);
        let law = loads.read(WorkerIndex(0)).law;
        assert!(law.constants().iter().all(|constant| constant.is_finite() && *constant > 0.0), "{law:?}");
    }
}

/// The length and the checksum of the body.
fn repair_laws(file: &mut [u8]) {
    if file.len() < LAWS_HEAD_BYTES {
        return;
    }
    let body_bytes = (file.len() - LAWS_HEAD_BYTES) as u32;
    let checksum = xxh3_64_with_seed(&file[LAWS_HEAD_BYTES..], 1);
    file[PREAMBLE_BYTES - 4..PREAMBLE_BYTES].copy_from_slice(&body_bytes.to_le_bytes());
    file[PREAMBLE_BYTES..LAWS_HEAD_BYTES].copy_from_slice(&checksum.to_le_bytes());
}

fn read(data: &[u8]) {
    let Ok((header, chunks, references)) = decode(data) else { return };
    let mut counted = References::default();
    stores(&chunks).for_each(|store| counted.add(&store));
    assert_eq!(counted, references, "the end says what was read");
    let mut encoder = Encoder::begin(Vec::new(), &header).expect("memory");
    chunks.iter().for_each(|chunk| encoder.chunk(chunk).expect("memory"));
    let (bytes, written) = encoder.end(references).expect("memory");
    assert_eq!(bytes.len() as u64, written);
    let (header_again, chunks_again, references_again) = decode(&bytes).expect("what is written can be read");
    assert_eq!((header_again, references_again), (header, references));
    let blocks = |chunks: &[DumpChunk]| stores(chunks).map(|store| store.hashes.len()).sum::<usize>();
    assert_eq!(blocks(&chunks_again), blocks(&chunks));
}

fn stores(chunks: &[DumpChunk]) -> impl Iterator<Item = StoreBlocks<'_>> {
    chunks.iter().flat_map(|chunk| (0..chunk.stores()).filter_map(|at| chunk.store(at)))
}

/// The checksums of every section that lies there whole, and of the file.
fn repair(file: &mut [u8]) {
    let Some(footer_at) = file.len().checked_sub(FOOTER_BYTES) else { return };
    let mut at = PREAMBLE_BYTES;
    while at + SECTION_HEAD_BYTES <= footer_at {
        let number = |from: usize| u32::from_le_bytes([file[from], file[from + 1], file[from + 2], file[from + 3]]);
        let (body_bytes, kind) = (number(at) as usize, number(at + 4));
        let body = at + SECTION_HEAD_BYTES..(at + SECTION_HEAD_BYTES).saturating_add(body_bytes);
        if body.end > footer_at {
            break;
        }
        let checksum = xxh3_64_with_seed(&file[body.clone()], u64::from(kind));
        file[at + 8..at + SECTION_HEAD_BYTES].copy_from_slice(&checksum.to_le_bytes());
        at = body.end;
    }
    let checksum = xxh3_128(&file[..footer_at]);
    file[footer_at..].copy_from_slice(&checksum.to_le_bytes());
}
