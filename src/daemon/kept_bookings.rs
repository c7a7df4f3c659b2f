//! The daemon's use of images of the bookings: it restores the newest one at the start, continues under its identity, and
//! writes new ones while it runs.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rand::RngExt;
use rustix::time::{ClockId, clock_gettime};
use xxhash_rust::xxh3::xxh3_128;

use super::service_manager;
use super::snapshots::Snapshots;
use crate::config::{Config, SpaceConfig};
use crate::error::{Error, Kind, Result};
use crate::ids::{SpaceId, Worker, WorkerIndex};
use crate::limits::{
    AFFINITY_TTL_S_CEILING, BOOKINGS_LAST_IMAGE_MS_MAX, KEPT_FLEET_VERSIONS_GAP, KEPT_GENERATIONS_GAP,
};
use crate::load::{Restored, RestoredAt};
use crate::metrics::SnapshotCounter as C;
use crate::requests::{Identity, RequestTables};
use crate::snapshot::{
    BookingsImage, BookingsKeeper, BookingsPlan, BookingsStore, FoundBookings, ImageTime, SnapshotStats,
};
use crate::watchdog::Watchlist;

/// Where the kernel names the time since it booted.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const SECOND_NS: u64 = 1_000_000_000;

/// What an earlier run kept, and where this one keeps its own.
pub(super) struct KeptBookings {
    store: BookingsStore,
    image: Option<BookingsImage>,
    /// The number of the next image.
    number: u64,
    /// The identity of this run.
    pub(super) identity: Identity,
    /// The time since the image was taken, nanoseconds.
    since_ns: u64,
    boot: u128,
}

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
        let boot = boot_id();
        let mut kept = Self { store, image: None, number: 1, identity: Identity::random(), since_ns: 0, boot };
        if let Some(mut image) = image {
            kept.since_ns = image.facts.taken.until_ns(now(boot)).min(AFFINITY_TTL_S_CEILING * SECOND_NS);
            kept.number = image.facts.number.saturating_add(1);
            kept.identity = image.facts.identity;
            kept.identity.fleet_version = kept.identity.fleet_version.saturating_add(KEPT_FLEET_VERSIONS_GAP);
            with_spaces_of(&mut image, &config.spaces);
            kept.image = Some(image);
        }
        Ok(kept)
    }

    /// Where the clock of bookings begins for a daemon that started at a time: before the oldest booking and binding.
    pub(super) fn clock_begins(&self, config: &Config, started: Instant) -> Instant {
        let Some(image) = &self.image else { return started };
        let oldest_ns = image.loads.oldest_ns().saturating_add(self.since_ns).min(config.booking.age_s_max * SECOND_NS);
        let oldest_s = image.bindings.iter().map(|binding| u64::from(binding.age_s)).max().unwrap_or(0);
        let oldest_s = (oldest_s + self.since_ns / SECOND_NS).min(AFFINITY_TTL_S_CEILING);
        let before = Duration::from_nanos(oldest_ns.max(oldest_s * SECOND_NS));
        started.checked_sub(before).unwrap_or(started)
    }

    /// Restores bookings, sessions and bindings, and starts the thread that writes images; `None` = there is nowhere to write
    /// them. Call it once the workers have joined their classes.
    ///
    /// # Errors
    /// [`Kind::System`] if the thread cannot be started.
    pub(super) fn resume(
        mut self,
        config: &Config,
        tables: &RequestTables,
        stats: &Arc<SnapshotStats>,
        watchlist: &Watchlist,
    ) -> Result<Option<BookingsKeeper>> {
        if let Some(image) = self.image.take() {
            self.restore(&image, tables, stats);
        }
        self.keep(config, tables, stats, watchlist)
    }

    fn restore(&self, image: &BookingsImage, tables: &RequestTables, stats: &SnapshotStats) {
        let table = tables.fleet.load();
        let workers: HashMap<Worker, (WorkerIndex, SpaceId)> =
            table.workers.iter().map(|record| (record.worker, (record.index, record.space))).collect();
        let at = RestoredAt { since_ns: self.since_ns, now_ns: tables.now_ns() };
        // At random, in case that no image of this run can be written.
        let skipped = rand::rng().random_range(0..KEPT_GENERATIONS_GAP);
        let restored = tables.loads.restore(&image.loads, at, skipped, |worker| workers.get(&worker).copied());
        let bindings = restore_bindings(image, tables, at);
        let Restored { bookings, absent, sessions, too_old, other_space, refused } = restored;
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

    fn keep(
        self,
        config: &Config,
        tables: &RequestTables,
        stats: &Arc<SnapshotStats>,
        watchlist: &Watchlist,
    ) -> Result<Option<BookingsKeeper>> {
        let Self { store, number, identity, boot, .. } = self;
        if !store.is_some() {
            return Ok(None);
        }
        let every_ms = config.snapshot.bookings_image_ms;
        BookingsKeeper::start(BookingsPlan {
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
            stats: Arc::clone(stats),
            mark: watchlist.add("bookings", false),
        })
        .map(Some)
    }
}

/// Waits for the last image.
pub(super) fn finish(keeper: Option<BookingsKeeper>, stats: &SnapshotStats) {
    let deadline = Instant::now() + Duration::from_millis(BOOKINGS_LAST_IMAGE_MS_MAX);
    if keeper.is_some_and(|keeper| !keeper.finish(deadline)) {
        stats.counters.bump(C::BookingImagesFailed);
        tracing::warn!(
            remedy = "check the disk of snapshot.dir",
            "the last image of the bookings was not written in time"
        );
    }
}

/// Restores bindings that are as old as the bookings. Returns how many hold.
fn restore_bindings(image: &BookingsImage, tables: &RequestTables, at: RestoredAt) -> u64 {
    let (since_s, now_s) = ((at.since_ns / SECOND_NS) as u32, (at.now_ns / SECOND_NS) as u32);
    let ttl_s = tables.policies.load().affinity_ttl_s_max();
    let holds = |binding: &&_| tables.affinities.restore(binding, since_s, (now_s, ttl_s));
    image.bindings.iter().filter(holds).count() as u64
}

/// Gives the bookings of an image this run's numbers of their spaces. Bindings name their space by a hash that contains its
/// number, so they are valid only if all numbers are as before.
fn with_spaces_of(image: &mut BookingsImage, spaces: &[SpaceConfig]) {
    let ours: Vec<u128> = spaces.iter().map(space_hash).collect();
    if ours != image.facts.spaces {
        image.bindings.clear();
    }
    let number_of = |hash: &u128| ours.iter().position(|ours| ours == hash);
    let numbers: Vec<Option<usize>> = image.facts.spaces.iter().map(number_of).collect();
    // A space that is gone gets a number that no worker has.
    let number = |before: SpaceId| numbers.get(before.0 as usize).copied().flatten().map_or(u32::MAX, |at| at as u32);
    for booking in image.loads.slices.iter_mut().flat_map(|slice| &mut slice.bookings) {
        booking.space = SpaceId(number(booking.space));
    }
}

/// Names a space in an image.
fn space_hash(space: &SpaceConfig) -> u128 {
    let names = [space.model.as_bytes(), space.namespace.as_bytes(), space.role.name().as_bytes()];
    let lengths = names.iter().flat_map(|name| (name.len() as u64).to_le_bytes());
    xxh3_128(&lengths.chain(names.concat()).collect::<Vec<u8>>())
}

fn boot_id() -> u128 {
    let id = std::fs::read_to_string(BOOT_ID).unwrap_or_default();
    u128::from_str_radix(&id.trim().replace('-', ""), 16).unwrap_or(0)
}

/// The time now, as images have it.
fn now(boot: u128) -> ImageTime {
    let since_boot = clock_gettime(ClockId::Boottime);
    let since_boot_ns = (since_boot.tv_sec as u64).saturating_mul(SECOND_NS).saturating_add(since_boot.tv_nsec as u64);
    let unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    ImageTime { boot, since_boot_ns, unix_ms }
}
