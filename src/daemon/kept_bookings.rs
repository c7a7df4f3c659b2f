//! The daemon's use of images of the bookings: it restores the newest one at the start, continues under its identity, and
//! writes new ones while it runs.

use std::collections::HashMap;
use std::fs::File;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rand::RngExt;
use rustix::time::{ClockId, clock_gettime};
use xxhash_rust::xxh3::xxh3_128;

use super::endable_thread::{EndableThread, Ending};
use super::service_manager;
use super::snapshots::Snapshots;
use crate::config::{Config, SpaceConfig};
use crate::error::{Error, Kind, Result};
use crate::ids::{SpaceId, Worker, WorkerIndex};
use crate::limits::{
    AFFINITY_TTL_S_CEILING, BOOKINGS_FOLDER_IMAGE_MS, BOOKINGS_LAST_IMAGE_MS_MAX, KEPT_FLEET_VERSIONS_GAP,
    KEPT_GENERATIONS_GAP, KEPT_SESSIONS_GAP, TURN_LOOK_EVERY_MS,
};
use crate::load::{Restored, RestoredAt, Skipped};
use crate::metrics::SnapshotCounter as C;
use crate::requests::{Identity, RequestTables};
use crate::sandbox::{self, ThreadKind};
use crate::serve::{Turn, Turns};
use crate::snapshot::{
    BookingsImage, BookingsPlan, BookingsStore, BookingsWriter, FoundBookings, ImageTime, SnapshotStats,
};
use crate::watchdog::Watchlist;

/// Where the kernel names the time since it booted.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const SECOND_NS: u64 = 1_000_000_000;

/// What an earlier run kept, and where this one keeps its own.
pub(super) struct KeptBookings {
    store: BookingsStore,
    image: Option<KeptImage>,
    /// Whether the bookings come later, from a daemon that still decides. The image then only says when they began.
    awaits_others: bool,
    /// The number of the next image.
    number: u64,
    /// The identity of this run.
    pub(super) identity: Identity,
    boot: u128,
}

/// An image on its way into the tables.
pub(super) struct KeptImage {
    image: BookingsImage,
    /// The time since it was taken, nanoseconds.
    since_ns: u64,
    skipped: Skipped,
    /// Bookings whose space is not configured any more, and which the image has lost.
    of_no_space: u64,
}

/// The writer of images, for the thread that keeps bookings and for the one that hands them over.
pub(super) type SharedWriter = Arc<Mutex<BookingsWriter>>;

impl KeptBookings {
    /// Reads the images of earlier runs, or removes them for a fresh start. Call it before another thread starts, and
    /// before the sandbox.
    ///
    /// # Errors
    /// [`Kind::System`] if a fresh start cannot remove them.
    pub(super) fn open(config: &Config, snapshots: &Snapshots) -> Result<Self> {
        let mut store = BookingsStore::new(snapshots.directory(), service_manager::memory_files());
        if config.snapshot.fresh {
            store.clear().map_err(|error| {
                Error::new(Kind::System, "cannot remove the bookings of an earlier run", "remove them by hand")
                    .caused_by(error)
            })?;
        }
        let FoundBookings { image, faults } = store.read();
        for fault in faults {
            snapshots.stats.refuse(fault.refusal);
            let (reason, offset, remedy) = (fault.refusal.name(), fault.offset, fault.refusal.remedy());
            tracing::warn!(reason, offset, remedy, "an image of the bookings is not used");
        }
        let mut kept = Self::of(store);
        if let Some(image) = image {
            kept.continue_with(image, config);
        }
        Ok(kept)
    }

    /// Continues under the identity of the daemon that took this image and still decides, with its memory files.
    pub(super) fn beside(
        image: BookingsImage,
        memory: Option<[File; 2]>,
        (config, snapshots): (&Config, &Snapshots),
    ) -> Self {
        let mut kept = Self::of(BookingsStore::new(snapshots.directory(), memory));
        kept.continue_with(image, config);
        kept.awaits_others = true;
        kept
    }

    fn of(store: BookingsStore) -> Self {
        let (identity, boot) = (Identity::random(), boot_id());
        Self { store, image: None, awaits_others: false, number: 1, identity, boot }
    }

    fn continue_with(&mut self, image: BookingsImage, config: &Config) {
        self.number = image.facts.number.saturating_add(1);
        self.identity = image.facts.identity;
        let versions = KEPT_FLEET_VERSIONS_GAP + rand::rng().random_range(0..KEPT_FLEET_VERSIONS_GAP);
        self.identity.fleet_version = self.identity.fleet_version.saturating_add(versions);
        self.image = Some(KeptImage::of(image, config));
    }

    /// Where the clock of bookings begins for a daemon that started at a time: before the oldest booking and binding.
    pub(super) fn clock_begins(&self, config: &Config, started: Instant) -> Instant {
        let Some(image) = &self.image else { return started };
        let KeptImage { image, since_ns, .. } = image;
        let oldest_ns = image.loads.oldest_ns().saturating_add(*since_ns).min(config.booking.age_s_max * SECOND_NS);
        let oldest_s = image.bindings.iter().map(|binding| u64::from(binding.age_s)).max().unwrap_or(0);
        let oldest_s = (oldest_s + since_ns / SECOND_NS).min(AFFINITY_TTL_S_CEILING);
        let before = Duration::from_nanos(oldest_ns.max(oldest_s * SECOND_NS));
        started.checked_sub(before).unwrap_or(started)
    }

    /// Restores bookings, sessions and bindings, unless they come later, and starts the thread that writes images; `None` =
    /// there is nowhere to write them. Call it once the workers have joined their classes.
    ///
    /// # Errors
    /// [`Kind::System`] if the thread cannot be started.
    pub(super) fn resume(
        mut self,
        config: &Config,
        tables: &RequestTables,
        stats: &Arc<SnapshotStats>,
        (watchlist, turns): (&Watchlist, &Turns),
    ) -> Result<(Option<EndableThread>, SharedWriter)> {
        if let Some(image) = self.image.take().filter(|_| !self.awaits_others) {
            image.restore(tables, stats);
        }
        self.keep(config, tables, stats, (watchlist, turns))
    }

    fn keep(
        self,
        config: &Config,
        tables: &RequestTables,
        stats: &Arc<SnapshotStats>,
        (watchlist, turns): (&Watchlist, &Turns),
    ) -> Result<(Option<EndableThread>, SharedWriter)> {
        let Self { store, number, identity, boot, .. } = self;
        let is_kept = store.is_some();
        let every_ms = config.snapshot.bookings_image_ms;
        let mut writer = BookingsWriter::new(BookingsPlan {
            store,
            number,
            identity,
            spaces: config.spaces.iter().map(space_hash).collect(),
            fleet: Arc::clone(&tables.fleet),
            loads: Arc::clone(&tables.loads),
            affinities: Arc::clone(&tables.affinities),
            policies: Arc::clone(&tables.policies),
            clock: Box::new(tables.clock()),
            time: Box::new(move || now(boot)),
            every: (every_ms > 0).then(|| Duration::from_millis(every_ms)),
            directory_every: Duration::from_millis(BOOKINGS_FOLDER_IMAGE_MS),
            stats: Arc::clone(stats),
            mark: watchlist.add("bookings", false),
        });
        if is_kept && turns.is_ours() {
            writer.write();
        }
        let (writer, turns) = (Arc::new(Mutex::new(writer)), turns.clone());
        if !is_kept {
            return Ok((None, writer));
        }
        let of_thread = Arc::clone(&writer);
        let run = move |ending: &_| write_images(&of_thread, &turns, ending);
        let thread = EndableThread::start("bookings", "the thread that keeps bookings", run)?;
        Ok((Some(thread), writer))
    }
}

impl KeptImage {
    /// An image of a run that ended, or of one that hands over, for this configuration.
    pub(super) fn of(mut image: BookingsImage, config: &Config) -> Self {
        let since_ns = image.facts.taken.until_ns(now(boot_id())).min(AFFINITY_TTL_S_CEILING * SECOND_NS);
        let mut rng = rand::rng();
        let skipped = Skipped {
            generations: rng.random_range(0..KEPT_GENERATIONS_GAP),
            sessions: rng.random_range(0..KEPT_SESSIONS_GAP),
        };
        let of_no_space = with_spaces_of(&mut image, &config.spaces);
        Self { image, since_ns, skipped, of_no_space }
    }

    /// The number of the image.
    pub(super) const fn number(&self) -> u64 {
        self.image.facts.number
    }

    /// Restores bookings, sessions and bindings into tables without any.
    pub(super) fn restore(&self, tables: &RequestTables, stats: &SnapshotStats) {
        let image = &self.image;
        let table = tables.fleet.load();
        let workers: HashMap<Worker, (WorkerIndex, SpaceId)> =
            table.workers.iter().map(|record| (record.worker, (record.index, record.space))).collect();
        let at = RestoredAt { since_ns: self.since_ns, now_ns: tables.now_ns() };
        let restored = tables.loads.restore(&image.loads, at, self.skipped, |worker| workers.get(&worker).copied());
        let bindings = restore_bindings(image, tables, at);
        let Restored { bookings, absent, sessions, too_old, mut other_space, refused } = restored;
        other_space += self.of_no_space;
        let counters = &stats.counters;
        counters.add(C::BookingsRestored, bookings);
        counters.add(C::BookingsRestoredAbsent, absent);
        counters.add(C::BookingsNotRestored, too_old + other_space + refused);
        counters.add(C::SessionsRestored, sessions);
        counters.add(C::BindingsRestored, bindings);
        let since_ms = self.since_ns / 1_000_000;
        tracing::info!(
            bookings,
            absent,
            sessions,
            too_old,
            other_space,
            refused,
            bindings,
            since_ms,
            "bookings of the run before are restored"
        );
    }
}

/// The work of the thread: one image after another, and the last one when it is asked to end. Only in this daemon's turn:
/// before and after it, another daemon writes to the same places.
fn write_images(writer: &Mutex<BookingsWriter>, turns: &Turns, ending: &Ending) {
    sandbox::enter(ThreadKind::Snapshots);
    while turns.turn() == Turn::Theirs && !ending.is_asked_for() {
        std::thread::park_timeout(Duration::from_millis(TURN_LOOK_EVERY_MS));
    }
    if turns.is_ours() {
        writer.lock().write();
    }
    loop {
        let pause = writer.lock().pause();
        match pause {
            Some(pause) => std::thread::park_timeout(pause),
            None => std::thread::park(),
        }
        // The thread that hands the bookings over holds the lock until it is known which daemon decides.
        let mut writer = writer.lock();
        match (turns.is_ours(), ending.is_asked_for()) {
            (true, true) => return writer.write_last(),
            (false, true) => return,
            (true, false) if pause.is_some() => writer.write(),
            (_, false) => {}
        }
    }
}

/// Has the last image written, and waits for it. Whether that went well.
///
/// # Errors
/// [`Kind::Internal`] if the thread panicked.
pub(super) fn finish(thread: Option<EndableThread>, stats: &SnapshotStats) -> Result<()> {
    let Some(thread) = thread else { return Ok(()) };
    if !thread.stop_by(Instant::now() + Duration::from_millis(BOOKINGS_LAST_IMAGE_MS_MAX))? {
        stats.counters.bump(C::BookingImagesFailed);
        tracing::warn!(
            remedy = "check the disk of snapshot.dir",
            "the last image of the bookings was not written in time"
        );
    }
    Ok(())
}

/// Restores bindings that are as old as the bookings. Returns how many hold.
fn restore_bindings(image: &BookingsImage, tables: &RequestTables, at: RestoredAt) -> u64 {
    let (since_s, now_s) = ((at.since_ns / SECOND_NS) as u32, (at.now_ns / SECOND_NS) as u32);
    let ttl_s = tables.policies.load().affinity_ttl_s_max();
    let holds = |binding: &&_| tables.affinities.restore(binding, since_s, (now_s, ttl_s));
    image.bindings.iter().filter(holds).count() as u64
}

/// Gives the bookings of an image this run's numbers of their spaces. Those of a space that is gone are removed; returns how
/// many. Bindings name their space by a hash that contains its number, so they are valid only if all numbers are as before.
fn with_spaces_of(image: &mut BookingsImage, spaces: &[SpaceConfig]) -> u64 {
    let ours: Vec<u128> = spaces.iter().map(space_hash).collect();
    if ours != image.facts.spaces {
        image.bindings.clear();
    }
    let number_of = |hash: &u128| ours.iter().position(|ours| ours == hash);
    let numbers: Vec<Option<usize>> = image.facts.spaces.iter().map(number_of).collect();
    let number = |before: SpaceId| numbers.get(before.0 as usize).copied().flatten().map(|at| SpaceId(at as u32));
    let count = |image: &BookingsImage| image.loads.slices.iter().map(|slice| slice.bookings.len() as u64).sum::<u64>();
    let before = count(image);
    for slice in &mut image.loads.slices {
        slice.bookings.retain_mut(|booking| number(booking.space).inspect(|space| booking.space = *space).is_some());
    }
    before - count(image)
}

/// Names a space in an image.
fn space_hash(space: &SpaceConfig) -> u128 {
    let names = [space.model.as_bytes(), space.namespace.as_bytes(), space.role.name().as_bytes()];
    let lengths = names.iter().flat_map(|name| (name.len() as u64).to_le_bytes());
    xxh3_128(&lengths.chain(names.concat()).collect::<Vec<u8>>())
}

/// Names the time since the machine booted. The first call reads it, before the sandbox; threads in it may open no file.
fn boot_id() -> u128 {
    static READ: LazyLock<u128> = LazyLock::new(|| {
        let id = std::fs::read_to_string(BOOT_ID).unwrap_or_default();
        u128::from_str_radix(&id.trim().replace('-', ""), 16).unwrap_or(0)
    });
    *READ
}

/// The time now, as images have it.
fn now(boot: u128) -> ImageTime {
    let since_boot = clock_gettime(ClockId::Boottime);
    let since_boot_ns = (since_boot.tv_sec as u64).saturating_mul(SECOND_NS).saturating_add(since_boot.tv_nsec as u64);
    let unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    ImageTime { boot, since_boot_ns, unix_ms }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Flags;
    use crate::load::{Demand, KeptLoads, KeptSlice, Loads, LoadsConfig, SessionToken, Skipped};
    use crate::snapshot::{ImageFacts, decode_bookings, encode_bookings};

    /// An image of one booking in each of these spaces, on worker 7 and so on.
    fn image(spaces: &[SpaceConfig]) -> BookingsImage {
        let loads = Loads::new(spaces.len(), LoadsConfig::default());
        let session = loads.open_session(Some(SessionToken { hi: 1, lo: 2 }), 7).expect("room");
        for at in 0..spaces.len() as u32 {
            let demand = Demand { space: SpaceId(at), ..Demand::default() };
            loads.book(session, &at.to_string(), 0, WorkerIndex(at), demand, 1).expect("room");
        }
        let identity = Identity::random();
        let spaces = spaces.iter().map(space_hash).collect();
        let facts = ImageFacts { number: 3, identity, taken: ImageTime::default(), spaces };
        let (worker_of, mut slice) = (|index: WorkerIndex| Some(worker(index.0)), KeptSlice::default());
        assert_eq!(loads.keep((0, true), 1, worker_of, &mut slice), None);
        let loads = KeptLoads { numbers: loads.numbers(), slices: vec![slice], workers: Vec::new() };
        BookingsImage { facts, loads, bindings: Vec::new() }
    }

    fn worker(at: u32) -> Worker {
        Worker::new(7 + u64::from(at), 0)
    }

    fn config(spaces: &str) -> Config {
        crate::config::parse("test", spaces, &Flags::default()).expect("valid")
    }

    #[test]
    fn a_space_that_is_gone_costs_its_bookings_and_no_later_image() {
        let before = config("[[space]]\nmodel = \"a\"\n[[space]]\nmodel = \"b\"\n").spaces;
        let ours = config("[[space]]\nmodel = \"b\"\n").spaces;
        let mut image = image(&before);
        assert_eq!(with_spaces_of(&mut image, &ours), 1);
        let loads = Loads::new(1, LoadsConfig::default());
        let at = RestoredAt { since_ns: 0, now_ns: 1 << 40 };
        // Neither worker is there yet.
        let restored = loads.restore(&image.loads, at, Skipped::default(), |_| None);
        assert_eq!((restored.bookings, restored.absent), (1, 1));
        let mut slice = KeptSlice::default();
        assert_eq!(loads.keep((0, true), at.now_ns, |_| None, &mut slice), None);
        let loads = KeptLoads { numbers: loads.numbers(), slices: vec![slice], workers: Vec::new() };
        let spaces = ours.iter().map(space_hash).collect();
        let next = BookingsImage { facts: ImageFacts { spaces, ..image.facts }, loads, bindings: Vec::new() };
        let read = decode_bookings(&encode_bookings(&next).expect("memory")).expect("the next start can use it");
        assert_eq!(read.loads.slices[0].bookings[0].worker, worker(1));
        assert_eq!(read.loads.slices[0].bookings[0].space, SpaceId(0));
    }

    #[test]
    fn two_runs_after_one_image_give_out_different_numbers() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut config = config("[[space]]\nmodel = \"a\"\n");
        config.snapshot.dir = Some(folder.path().join("snapshots"));
        let snapshots = Snapshots::open(&config, None).expect("it is free");
        let image = image(&config.spaces);
        let bytes = encode_bookings(&image).expect("memory");
        let run = || {
            std::fs::write(folder.path().join("snapshots/bookings"), &bytes).expect("written");
            KeptBookings::open(&config, &snapshots).expect("readable")
        };
        let runs = [run(), run(), run()];
        let differ = |of: fn(&KeptBookings) -> u64| runs.iter().any(|run| of(run) != of(&runs[0]));
        assert!(differ(|run| run.identity.fleet_version));
        let skipped = |run: &KeptBookings| run.image.as_ref().expect("an image").skipped;
        assert!(runs.iter().any(|run| skipped(run).generations != skipped(&runs[0]).generations));
        assert!(runs.iter().any(|run| skipped(run).sessions != skipped(&runs[0]).sessions));
        for run in &runs {
            assert_eq!((run.identity.instance_id, run.number), (image.facts.identity.instance_id, 4));
            assert!(run.identity.fleet_version >= image.facts.identity.fleet_version + KEPT_FLEET_VERSIONS_GAP);
        }
    }
}
