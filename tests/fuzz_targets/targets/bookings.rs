//! Images of the bookings: an image that was read is written the same, and a daemon can start with whatever it holds.
//! Checksums are also corrected, to reach the code behind them.

use kvrouted::ids::{SpaceId, Worker, WorkerIndex};
use kvrouted::load::{KeptLoads, KeptSlice, Loads, LoadsConfig, RestoredAt, Skipped};
use kvrouted::route::AffinityTable;
use kvrouted::snapshot::{BookingsImage, decode_bookings, encode_bookings};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const PREAMBLE_BYTES: usize = 16;
const SECTION_HEAD_BYTES: usize = 16;

/// A file as it is, and with its checksums put right.
pub(crate) fn bookings(data: &[u8]) {
    read(data);
    let mut repaired = data.to_vec();
    repair(&mut repaired);
    read(&repaired);
}

fn read(data: &[u8]) {
    let Ok(image) = decode_bookings(data) else { return };
    let again = decode_bookings(&encode_bookings(&image).expect("memory")).expect("what is written can be read");
    assert_eq!(again, image);
    let config = LoadsConfig { track_output_blocks: data.len().is_multiple_of(2), ..LoadsConfig::default() };
    let loads = Loads::new(2, config);
    let at = RestoredAt { since_ns: 5, now_ns: 1 << 50 };
    let found = |worker: Worker| (worker.id.0 < 2).then_some((WorkerIndex(worker.id.0 as u32), SpaceId(0)));
    let restored = loads.restore(&image.loads, at, Skipped { generations: 3, sessions: 3 }, found);
    assert_eq!(restored.bookings, loads.live() as u64);
    let requests: u64 = (0..2).map(|place| loads.read(WorkerIndex(place)).requests).sum();
    assert_eq!(requests + restored.absent, restored.bookings, "each is on its worker, or waits for it");
    let mut slices = Vec::new();
    let mut next = Some(0);
    while let Some(from) = next {
        let mut slice = KeptSlice::default();
        next = loads.keep((from, true), at.now_ns, |index| Some(Worker::new(u64::from(index.0), 0)), &mut slice);
        slices.push(slice);
    }
    let kept = KeptLoads { numbers: loads.numbers(), slices, workers: loads.keep_absent_workers(None, at.now_ns) };
    // A daemon adds this much to its numbers at each start.
    if image.loads.numbers.generations < 1 << 61 {
        let next = BookingsImage { loads: kept, ..image.clone() };
        let read = decode_bookings(&encode_bookings(&next).expect("memory"));
        assert!(read.is_ok(), "the next start can use what this one keeps: {read:?}");
    }
    let affinities = AffinityTable::new(64, image.facts.identity.affinity_secret);
    for binding in &image.bindings {
        affinities.restore(binding, 5, (1 << 20, 3600));
    }
    // What is left when all have ended is nothing.
    while loads.expire(u64::MAX, 1000).bookings() > 0 {}
    assert_eq!((loads.live(), loads.active_bytes()), (0, 0));
    for place in 0..2 {
        let load = loads.read(WorkerIndex(place));
        assert_eq!((load.requests, load.prefill_tokens, load.decode_blocks), (0, 0, 0));
    }
}

/// The checksum of each section, as far as their lengths lead.
fn repair(file: &mut [u8]) {
    let (mut at, mut position) = (PREAMBLE_BYTES, 0_u64);
    while let Some(body_at) = at.checked_add(SECTION_HEAD_BYTES).filter(|body_at| *body_at <= file.len()) {
        let number = |from: usize| u32::from_le_bytes(file[from..from + 4].try_into().expect("four bytes"));
        let (body_bytes, kind) = (number(at) as usize, number(at + 4));
        let Some(end) = body_at.checked_add(body_bytes).filter(|end| *end <= file.len()) else { return };
        let sum = xxh3_64_with_seed(&file[body_at..end], position << 32 | u64::from(kind));
        file[at + 8..body_at].copy_from_slice(&sum.to_le_bytes());
        (at, position) = (end, position + 1);
    }
}
