use std::fs::{self, File};
use std::io::Write;
use std::ops::RangeInclusive;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use proptest::prelude::*;
use rustix::fs::{CWD, Mode, mkfifoat};

use super::store::WriteTo;
use super::*;
use crate::fleet::{Fleet, FleetTable};
use crate::ids::{LocalHash, SpaceId, Worker, WorkerIndex};
use crate::limits::{BOOKINGS_MAX, KEPT_LOST_RANGES_MAX, PROMPT_BLOCKS_MAX};
use crate::load::{
    BookingRef, Demand, EngineLoad, KeptBlocks, KeptBooking, KeptNumbers, KeptRun, KeptSession, KeptSlice, KeptWorker,
    Loads, LoadsConfig, RecentWork, SessionId,
};
use crate::protocol::SessionToken;
use crate::route::{AffinityTable, PolicyTable};
use crate::snapshot::{Directory, Refusal};
use crate::watchdog::Watchlist;

fn worker() -> impl Strategy<Value = Worker> {
    (0..4_u64, 0..2_u32).prop_map(|(id, rank)| Worker::new(id, rank))
}

/// A booking; its run is put right by [`slice`].
fn booking() -> impl Strategy<Value = KeptBooking> {
    let numbers = (0..BOOKINGS_MAX as u32, 1..1_u64 << 40, any::<[u64; 2]>(), any::<u32>(), any::<[u32; 2]>());
    let output = (0..=1_u32 << 16, any::<u32>(), any::<u32>());
    let blocks =
        prop_oneof![(0..=PROMPT_BLOCKS_MAX as u64).prop_map(KeptBlocks::Alone), any::<u32>().prop_map(KeptBlocks::Run)];
    let rest = (any::<u32>(), 0..2_u32, any::<bool>(), any::<bool>(), any::<u64>(), any::<u64>());
    (numbers, output, blocks, worker(), rest).prop_map(|(numbers, output, blocks, worker, rest)| {
        let (slot, generation, name, attempt, prompt_tokens) = numbers;
        let (block_size, expected_output_tokens, output_tokens) = output;
        let (session, space, prefilling, is_prefill_half, age_ns, since_first_token_ns) = rest;
        KeptBooking {
            slot,
            generation,
            session: SessionId(session),
            name,
            attempt,
            worker,
            space: SpaceId(space),
            prompt_tokens,
            blocks,
            block_size,
            expected_output_tokens,
            output_tokens,
            prefilling,
            is_prefill_half,
            age_ns,
            since_first_token_ns,
        }
    })
}

fn slice() -> impl Strategy<Value = KeptSlice> {
    let session = (any::<u32>(), any::<Option<[u64; 2]>>(), any::<u32>()).prop_map(|(id, token, uid)| {
        let token = token.map(|[hi, lo]| SessionToken { hi, lo });
        KeptSession { id: SessionId(id), token, uid }
    });
    let runs = prop::collection::vec((any::<Option<u32>>(), 1..4_u32), 0..5);
    let (bookings, sessions) = (prop::collection::vec(booking(), 1..6), prop::collection::vec(session, 0..4));
    (bookings, sessions, runs).prop_map(|(mut bookings, sessions, runs)| {
        let run = |(place, (parent, blocks)): (usize, (Option<u32>, u32))| {
            let parent = parent.filter(|_| place > 0).map(|parent| parent % place.max(1) as u32);
            KeptRun { parent, blocks }
        };
        let runs: Vec<KeptRun> = runs.into_iter().enumerate().map(run).collect();
        for booking in &mut bookings {
            if let KeptBlocks::Run(run) = booking.blocks {
                let place = run.checked_rem(runs.len() as u32);
                booking.blocks = place.map_or(KeptBlocks::Alone(0), KeptBlocks::Run);
            }
        }
        let blocks: u32 = runs.iter().map(|run| run.blocks).sum();
        KeptSlice { bookings, sessions, runs, hashes: (0..u64::from(blocks)).map(LocalHash).collect() }
    })
}

fn image() -> impl Strategy<Value = BookingsImage> {
    let recent = (0.0..=4.0_f32, any::<u32>(), 0.0..=600.0_f32, any::<u32>());
    let kept_worker = (worker(), any::<u64>(), recent).prop_map(|(worker, elapsed_ns, recent)| {
        let (prefill_share, at_ms, decode_s, decodes) = recent;
        KeptWorker { worker, elapsed_ns, recent: RecentWork { prefill_share, at_ms, decode_s, decodes } }
    });
    let binding = (any::<[u64; 2]>(), worker(), any::<u32>(), any::<u32>())
        .prop_map(|(key, worker, user, age_s)| KeptBinding { key, worker, user, age_s });
    let lists = (
        prop::collection::vec(slice(), 0..4),
        prop::collection::vec(kept_worker, 0..4),
        prop::collection::vec(binding, 0..4),
        prop::collection::vec(any::<u128>(), 2..4),
    );
    let growing = [0..1_u64 << 61, 0..1_u64 << 61, 0..1_u64 << 61];
    let numbers = (0..=1_u64 << 62, 1..=u64::MAX, any::<[u64; 4]>(), any::<u128>(), growing, any::<u32>());
    (lists, numbers).prop_map(|((slices, workers, bindings, spaces), numbers)| {
        let (number, instance_id, others, boot, growing, next_session) = numbers;
        let [secret, affinity_secret, since_boot_ns, unix_ms] = others;
        let [fleet_version, one, other] = growing;
        let lost = [one / 4..=one / 3, one / 2 + 1..=one];
        let lost = lost[..one as usize % 3].to_vec();
        let numbers = KeptNumbers { complete_to: one, generations: (1 << 61) + other, next_session, lost };
        BookingsImage {
            facts: ImageFacts {
                number,
                identity: Identity { instance_id, secret, affinity_secret, fleet_version },
                taken: ImageTime { boot, since_boot_ns, unix_ms },
                spaces,
            },
            loads: KeptLoads { numbers, slices, workers },
            bindings,
        }
    })
}

/// An image without bookings.
fn numbered(number: u64) -> BookingsImage {
    BookingsImage {
        facts: ImageFacts {
            number,
            identity: Identity::random(),
            taken: ImageTime::default(),
            // The last byte is another one in each, so that no cut image is whole.
            spaces: vec![u128::from_le_bytes([number as u8; 16])],
        },
        loads: KeptLoads::default(),
        bindings: Vec::new(),
    }
}

proptest! {
    #[test]
    fn an_image_is_read_as_it_was_written_and_a_changed_one_not_at_all(
        image in image(), at in any::<prop::sample::Index>(), bit in 0..8_u8, cut in any::<prop::sample::Index>(),
    ) {
        let bytes = encode_bookings(&image).expect("memory");
        let decoded = decode_bookings(&bytes);
        prop_assert_eq!(decoded.as_ref(), Ok(&image));
        let mut flipped = bytes.clone();
        flipped[at.index(bytes.len())] ^= 1 << bit;
        prop_assert!(decode_bookings(&flipped).is_err());
        prop_assert!(decode_bookings(&bytes[..cut.index(bytes.len())]).is_err());
        prop_assert!(decode_bookings(&[bytes.as_slice(), &[0]].concat()).is_err());
    }

    #[test]
    fn what_contradicts_itself_is_refused(mut image in image(), slice in slice(), what in 0..13_u8) {
        image.loads.slices.push(slice);
        let slice = image.loads.slices.last_mut().expect("one");
        slice.runs.push(KeptRun { parent: None, blocks: 1 });
        slice.hashes.push(LocalHash(1));
        let run = slice.runs.len() as u32 - 1;
        match what {
            0 => slice.runs[run as usize].parent = Some(run),
            1 => slice.runs[run as usize].blocks = 0,
            2 => drop(slice.hashes.pop()),
            3 => image.loads.numbers.complete_to = image.loads.numbers.generations + 1,
            4 => image.facts.identity.instance_id = 0,
            5 => image.facts.spaces = vec![0; 257],
            6 => image.facts.number = u64::MAX,
            7 => image.loads.numbers.generations = u64::MAX,
            8 => image.loads.numbers.lost = vec![RangeInclusive::new(2, 1)],
            9 => image.loads.numbers.lost = vec![1..=2, 2..=3],
            10 => image.loads.numbers.lost = vec![1..=image.loads.numbers.complete_to + 1],
            11 => image.loads.numbers.lost = (0..=KEPT_LOST_RANGES_MAX as u64).map(|at| 2 * at..=2 * at).collect(),
            _ => image.loads.workers.push(KeptWorker {
                worker: Worker::new(1, 0),
                elapsed_ns: 0,
                recent: RecentWork { decode_s: f32::NAN, ..RecentWork::default() },
            }),
        }
        let bytes = encode_bookings(&image).expect("memory");
        prop_assert_eq!(decode_bookings(&bytes).map_err(|fault| fault.refusal), Err(Refusal::Malformed));
    }
}

#[test]
fn another_kind_of_file_and_another_version_are_named() {
    let bytes = encode_bookings(&numbered(1)).unwrap();
    let refusal = |at: usize, byte: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = byte;
        decode_bookings(&bytes).unwrap_err().refusal
    };
    assert_eq!(refusal(0, b'X'), Refusal::NotASnapshot);
    assert_eq!(refusal(8, 2), Refusal::OtherVersion);
    assert_eq!(refusal(12, 1), Refusal::Malformed);
    assert_eq!(decode_bookings(&bytes[..bytes.len() - 1]).unwrap_err().refusal, Refusal::Truncated);
    assert_eq!(decode_bookings(b"").unwrap_err().refusal, Refusal::Truncated);
}

#[test]
fn time_goes_on_by_the_clock_that_did_not_stop() {
    let at = |boot, since_boot_ns, unix_ms| ImageTime { boot, since_boot_ns, unix_ms };
    let until = |one: ImageTime, later: ImageTime| one.until_ns(later);
    assert_eq!(until(at(7, 5, 1000), at(7, 9, 1_000_000_000)), 4, "the wall clock jumped");
    assert_eq!(until(at(7, 9, 1000), at(7, 5, 1000)), 0);
    assert_eq!(until(at(7, 9, 1000), at(8, 5, 1004)), 4_000_000, "the machine has booted");
    assert_eq!(until(at(7, 9, 1004), at(8, 5, 1000)), 0, "an image from the future");
    assert_eq!(until(at(0, 9, 1000), at(0, 5, 1004)), 4_000_000, "the kernel names no boot");
    assert_eq!(until(at(0, 0, 0), at(0, 0, u64::MAX)), u64::MAX);
}

fn memory(folder: &Path) -> [File; 2] {
    ["one", "two"].map(|name| {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).open(folder.join(name)).unwrap()
    })
}

/// Writes an image to a store, or breaks off after these bytes.
fn write(store: &mut BookingsStore, image: &BookingsImage, to: WriteTo, cut: Option<usize>) -> std::io::Result<u64> {
    let bytes = encode_bookings(image)?;
    store.write(to, |out| match cut {
        Some(cut) => {
            out.write_all(&bytes[..cut])?;
            out.flush()?;
            Err(std::io::Error::other("the daemon is killed here"))
        }
        None => out.write_all(&bytes).map(|()| bytes.len() as u64),
    })
}

fn newest(store: &mut BookingsStore) -> (Option<u64>, usize) {
    let Found { image, faults } = store.read();
    (image.map(|image| image.facts.number), faults.len())
}

#[test]
fn of_two_memory_files_the_last_whole_image_outlives_a_crash_at_any_byte() {
    let folder = tempfile::tempdir().unwrap();
    let store = || BookingsStore::new(None, Some(memory(folder.path())));
    assert!(store().is_some() && store().has_memory() && !BookingsStore::new(None, None).is_some());
    assert_eq!(newest(&mut store()), (None, 0), "they are empty at first");
    for number in [1, 2, 3] {
        assert!(write(&mut store_of(&folder), &numbered(number), WriteTo::Memory, None).is_ok());
        assert_eq!(newest(&mut store()), (Some(number), 0));
    }
    let bytes = encode_bookings(&numbered(4)).unwrap().len();
    for cut in 1..bytes {
        let mut writer = store_of(&folder);
        assert!(write(&mut writer, &numbered(4), WriteTo::Memory, Some(cut)).is_err());
        let (number, _) = newest(&mut store());
        assert_eq!(number, Some(3), "cut at {cut}");
    }
    // The run after the crash writes over the broken one, not over the good one.
    assert!(write(&mut store_of(&folder), &numbered(4), WriteTo::Memory, None).is_ok());
    assert_eq!(newest(&mut store()), (Some(4), 0));
    store().clear().unwrap();
    assert_eq!(newest(&mut store()), (None, 0));
}

/// A store that has read its images, as a start does.
fn store_of(folder: &tempfile::TempDir) -> BookingsStore {
    let mut store = BookingsStore::new(None, Some(memory(folder.path())));
    store.read();
    store
}

#[test]
fn the_file_beside_the_snapshots_is_whole_and_private() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let directory = Arc::new(Directory::open(&path).unwrap());
    let mut store = BookingsStore::new(Some(Arc::clone(&directory)), None);
    assert_eq!(newest(&mut store), (None, 0));
    assert!(write(&mut store, &numbered(1), WriteTo::Memory, None).is_ok());
    assert!(write(&mut store, &numbered(2), WriteTo::Memory, Some(20)).is_err());
    assert_eq!(newest(&mut store), (Some(1), 0), "the partial file has another name");
    assert_eq!(fs::metadata(directory.bookings_file()).unwrap().mode() & 0o777, 0o600);
    assert_eq!(directory.remove(None).unwrap(), 0, "it is no worker's snapshot");
    // With memory files, not every image goes to the directory.
    let memory_of = tempfile::tempdir().unwrap();
    let mut both = BookingsStore::new(Some(Arc::clone(&directory)), Some(memory(memory_of.path())));
    both.read();
    assert!(write(&mut both, &numbered(5), WriteTo::Memory, None).is_ok());
    assert_eq!((newest(&mut store), newest(&mut both)), ((Some(1), 0), (Some(5), 0)));
    assert!(write(&mut both, &numbered(6), WriteTo::Disk, None).is_ok());
    assert_eq!((newest(&mut store), newest(&mut both)), ((Some(6), 0), (Some(6), 0)));
    both.clear().unwrap();
    assert_eq!(newest(&mut both), (None, 0));
}

#[test]
fn an_image_that_cannot_be_used_never_comes_back() {
    let (folder, memory_of) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let directory = Arc::new(Directory::open(&folder.path().join("s")).unwrap());
    let mut both = BookingsStore::new(Some(Arc::clone(&directory)), Some(memory(memory_of.path())));
    // Another version of the daemon has written many images.
    let mut bytes = encode_bookings(&numbered(900)).unwrap();
    bytes[8] += 1;
    fs::write(directory.bookings_file(), &bytes).unwrap();
    fs::write(memory_of.path().join("one"), &bytes).unwrap();
    fs::write(memory_of.path().join("two"), &bytes).unwrap();
    let found = both.read();
    assert!(found.image.is_none() && found.faults.iter().all(|fault| fault.refusal == Refusal::OtherVersion));
    assert_eq!(found.faults.len(), 3);
    assert_eq!(newest(&mut both), (None, 0), "the version that can use them starts afresh too");
    assert_eq!(fs::read(directory.path().join("bookings.unusable")).unwrap(), bytes, "for the one who asks why");
    assert!(write(&mut both, &numbered(1), WriteTo::Memory, None).is_ok());
    assert_eq!(newest(&mut both), (Some(1), 0));
    both.clear().unwrap();
    assert!(!directory.path().join("bookings.unusable").exists());
}

#[test]
fn something_else_in_the_place_of_an_image_costs_the_image_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let directory = Arc::new(Directory::open(&folder.path().join("s")).unwrap());
    let mut store = BookingsStore::new(Some(Arc::clone(&directory)), None);
    let (image, partial) = (directory.bookings_file(), directory.path().join("bookings.partial"));
    let pipe = |path: &Path| mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR).unwrap();
    pipe(&image);
    assert_eq!(store.read().faults[0].refusal, Refusal::Unreadable, "it is not waited for");
    assert!(!image.exists());
    File::create(&image).unwrap().write_all(&[7; 100]).unwrap();
    assert_eq!(store.read().faults[0].refusal, Refusal::NotASnapshot);
    fs::create_dir(&image).unwrap();
    assert_eq!(store.read().faults[0].refusal, Refusal::Unreadable);
    fs::remove_dir(&image).unwrap_or_default();
    // An unfinished file is replaced, whatever it is.
    pipe(&partial);
    assert!(write(&mut store, &numbered(1), WriteTo::Memory, None).is_ok());
    fs::write(&partial, [7; 5000]).unwrap();
    fs::set_permissions(&partial, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(write(&mut store, &numbered(2), WriteTo::Memory, None).is_ok());
    assert_eq!((newest(&mut store), fs::metadata(&image).unwrap().mode() & 0o777), ((Some(2), 0), 0o600));
}

#[test]
fn slices_without_bookings_are_refused() {
    // The length, the kind and the checksum are right.
    let empty = |encoded: &mut Vec<u8>| {
        let body = [0_u8; 16];
        encoded.extend_from_slice(&16_u32.to_le_bytes());
        encoded.extend_from_slice(&1_u32.to_le_bytes());
        encoded.extend_from_slice(&crate::framed_file::checksum(1, &body).to_le_bytes());
        encoded.extend_from_slice(&body);
    };
    let bytes = encode_bookings(&numbered(1)).unwrap();
    let mut many = bytes[..crate::framed_file::PREAMBLE_BYTES].to_vec();
    empty(&mut many);
    assert_eq!(decode_bookings(&many).unwrap_err().refusal, Refusal::Malformed);
}

/// Images of these loads and bindings.
fn writer(
    store: BookingsStore,
    loads: &Arc<Loads>,
    affinities: &Arc<AffinityTable>,
    directory_every: Duration,
) -> BookingsWriter {
    let mut writer = BookingsWriter::new(BookingsPlan {
        store,
        number: 5,
        identity: Identity::random(),
        spaces: vec![1],
        fleet: Arc::new(Fleet::new(FleetTable::default())),
        loads: Arc::clone(loads),
        affinities: Arc::clone(affinities),
        policies: Arc::new(ArcSwap::from_pointee(PolicyTable::default())),
        clock: Box::new(|| 1_000_000_000),
        time: Box::new(ImageTime::default),
        every: Some(Duration::from_millis(1)),
        directory_every,
        stats: Arc::default(),
        mark: Watchlist::default().add("bookings", false),
    });
    writer.write();
    writer
}

#[test]
fn an_image_is_written_when_something_has_changed_and_only_then() {
    let (folder, memory_of) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let directory = Arc::new(Directory::open(&folder.path().join("s")).unwrap());
    let (loads, affinities) = (Arc::new(Loads::new(1, LoadsConfig::default())), Arc::new(AffinityTable::new(64, 3)));
    let places = |has_memory: bool| {
        let files = has_memory.then(|| memory(memory_of.path()));
        BookingsStore::new(Some(Arc::clone(&directory)), files)
    };
    let in_directory = || newest(&mut places(false)).0;
    let in_all = || newest(&mut places(true)).0;
    let mut images = writer(places(true), &loads, &affinities, Duration::from_secs(3600));
    assert_eq!((in_directory(), in_all()), (Some(5), Some(5)), "the first one goes everywhere");
    images.write();
    assert_eq!(in_all(), Some(5), "nothing has changed");
    assert!(loads.report_load(WorkerIndex(0), EngineLoad::default(), 5), "no part of an image");
    images.write();
    assert_eq!(in_all(), Some(5));
    affinities.bind(SpaceId(0), "s", (Worker::new(1, 0), 7), 1, 60);
    images.write();
    assert_eq!((in_directory(), in_all()), (Some(5), Some(6)), "a binding");
    let session = loads.open_session(None, 7).unwrap();
    loads.book(session, "r", 0, WorkerIndex(0), Demand::default(), 5).unwrap();
    images.write();
    images.write();
    assert_eq!((in_directory(), in_all()), (Some(5), Some(7)), "a booking");
    images.write_last();
    assert_eq!((in_directory(), in_all()), (Some(8), Some(8)), "the last one goes everywhere, too");
    // The directory follows at its own pace, also if nothing has changed since the last image in memory.
    let mut images = writer(places(true), &loads, &affinities, Duration::ZERO);
    loads.free(session, BookingRef::Request { request_id: "r", attempt: 0 }, 5);
    images.write();
    assert_eq!(in_directory(), Some(6));
    images.write();
    assert_eq!(in_directory(), Some(6), "it has everything");
    // Without memory files, each image goes there.
    let mut images = writer(places(false), &loads, &affinities, Duration::from_secs(3600));
    affinities.bind(SpaceId(0), "t", (Worker::new(1, 0), 7), 1, 60);
    images.write();
    assert_eq!(in_directory(), Some(6));
}
