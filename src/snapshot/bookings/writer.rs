//! The images of a run: one after another while bookings or bindings change, and a last one when the daemon stops.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;

use super::store::WriteTo;
use super::{BookingsStore, Encoder, ImageFacts, ImageTime};
use crate::fleet::{Fleet, WorkerRecord};
use crate::ids::{Worker, WorkerIndex};
use crate::limits::{
    BOOKINGS_IMAGE_PAUSE_TIMES, KEPT_BINDINGS_MAX, KEPT_BLOCKS_MAX, KEPT_BLOCKS_PER_LOCK_MAX, KEPT_BUCKETS_AT_ONCE,
    KEPT_WORKERS_PER_LOCK_MAX, PROMPT_BLOCKS_MAX, SNAPSHOT_BUFFER_BYTES,
};
use crate::load::{KeptNumbers, KeptSlice, Loads};
use crate::machine::processor_time;
use crate::metrics::SnapshotCounter as C;
use crate::requests::Identity;
use crate::route::{AffinityTable, PolicyTable};
use crate::snapshot::SnapshotStats;
use crate::watchdog::{Activity, ThreadMark};

/// What images are made of, and where they go.
pub struct BookingsPlan {
    /// Where images go.
    pub store: BookingsStore,
    /// The number of the first image.
    pub number: u64,
    /// The identity of the daemon.
    pub identity: Identity,
    /// The spaces by their number: a hash of their names.
    pub spaces: Vec<u128>,
    /// The workers.
    pub fleet: Arc<Fleet>,
    /// The bookings.
    pub loads: Arc<Loads>,
    /// The bindings.
    pub affinities: Arc<AffinityTable>,
    /// How long bindings hold.
    pub policies: Arc<ArcSwap<PolicyTable>>,
    /// The clock of bookings and bindings, nanoseconds.
    pub clock: Box<dyn Fn() -> u64 + Send>,
    /// The time, as images have it.
    pub time: Box<dyn Fn() -> ImageTime + Send>,
    /// The pause between two images; `None` = one at the start, and one at the stop.
    pub every: Option<Duration>,
    /// The pause between two of them that go to a directory beside memory files.
    pub directory_every: Duration,
    /// Counters.
    pub stats: Arc<SnapshotStats>,
    /// The thread's mark.
    pub mark: Arc<ThreadMark>,
}

/// What an image depends on: changes of bookings and of bindings, counted.
type Changes = (u64, u64);

/// What an image took.
#[derive(Clone, Copy, Debug)]
struct Took {
    elapsed: Duration,
    /// Processor time of the thread, without waits for the disk.
    computed: Duration,
}

impl Took {
    /// The pause before the next image: it bounds the share of a processor, and leaves the disk half of the time.
    fn pause(self, every: Duration) -> Duration {
        every.max(self.computed * BOOKINGS_IMAGE_PAUSE_TIMES).max(self.elapsed)
    }
}

/// Writes images for the thread that keeps bookings.
pub struct BookingsWriter {
    plan: BookingsPlan,
    /// The changes that the last image has, and those that the last one in the directory has.
    written: Option<Changes>,
    written_to_directory: Option<Changes>,
    /// When the last image went to the directory.
    directory_at: Option<Instant>,
    /// What the last image took.
    took: Took,
    /// Whether the last image could not be written.
    fails: bool,
}

impl BookingsWriter {
    /// A writer that has written nothing yet. Write the first image before the first booking, so that no later run gives
    /// out the numbers of this one.
    #[must_use]
    pub const fn new(plan: BookingsPlan) -> Self {
        let (written, written_to_directory, directory_at) = (None, None, None);
        Self {
            plan,
            written,
            written_to_directory,
            directory_at,
            took: Took { elapsed: Duration::ZERO, computed: Duration::ZERO },
            fails: false,
        }
    }

    /// Continues behind the images of another run, of which the last had this number.
    pub const fn continue_from(&mut self, number: u64) {
        self.plan.number = number.saturating_add(1);
    }

    /// Copies of the memory files, to pass them on.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn memory_files(&self) -> io::Result<Vec<File>> {
        self.plan.store.memory_files()
    }

    /// Writes an image to a file for another daemon. Returns its bytes.
    ///
    /// # Errors
    /// The first of the file.
    pub fn write_for_other(&mut self, file: &File) -> io::Result<u64> {
        let mut out = BufWriter::with_capacity(SNAPSHOT_BUFFER_BYTES, file);
        let bytes = self.plan.write(self.plan.number, &mut out)?;
        self.plan.number += 1;
        out.flush().map(|()| bytes)
    }

    /// The pause before the next image; `None` = only the last one is to come.
    #[must_use]
    pub fn pause(&self) -> Option<Duration> {
        self.plan.every.map(|every| self.took.pause(every))
    }

    /// Writes an image where the last one is older than the last change.
    pub fn write(&mut self) {
        let seen = self.changes();
        let (is_new, is_new_there) = (self.written != Some(seen), self.written_to_directory != Some(seen));
        let is_due = self.directory_at.is_none_or(|at| at.elapsed() >= self.plan.directory_every);
        let to_directory = self.plan.store.has_directory() && is_new_there && (!self.plan.store.has_memory() || is_due);
        match (to_directory, is_new) {
            (true, _) => self.write_to(WriteTo::Directory, seen),
            (false, true) => self.write_to(WriteTo::Memory, seen),
            (false, false) => {}
        }
    }

    /// Writes the last image, to all places.
    pub fn write_last(&mut self) {
        self.write_to(WriteTo::Disk, self.changes());
    }

    fn changes(&self) -> Changes {
        (self.plan.loads.booking_changes(), self.plan.affinities.changes())
    }

    fn write_to(&mut self, to: WriteTo, seen: Changes) {
        let Self { plan, .. } = self;
        plan.mark.begin_round(Activity::WritingSnapshot);
        let (began, computed, number) = (Instant::now(), processor_time(), plan.number);
        let mut store = std::mem::take(&mut plan.store);
        let written = store.write(to, |out| plan.write(number, out));
        plan.store = store;
        // Also after a fault: the image may be in one of two places.
        plan.number += 1;
        self.took = Took { elapsed: began.elapsed(), computed: processor_time().saturating_sub(computed) };
        let counters = &plan.stats.counters;
        plan.stats.add_bookings_ns(self.took.elapsed.as_nanos() as u64);
        match written {
            Ok(bytes) => {
                counters.bump(C::BookingImagesWritten);
                counters.add(C::BookingImageBytes, bytes);
                (self.written, self.fails) = (Some(seen), false);
                if to != WriteTo::Memory {
                    (self.written_to_directory, self.directory_at) = (Some(seen), Some(began));
                }
            }
            Err(error) => {
                counters.bump(C::BookingImagesFailed);
                let remedy = "check the free space and the owner of the directory that snapshot.dir names";
                if !std::mem::replace(&mut self.fails, true) {
                    tracing::warn!(%error, remedy, "the bookings cannot be kept for a restart");
                }
            }
        }
        plan.mark.wait();
    }
}

impl BookingsPlan {
    /// Writes an image. Returns its bytes.
    fn write(&self, number: u64, out: &mut dyn Write) -> io::Result<u64> {
        let (taken, now_ns, first) = ((self.time)(), (self.clock)(), self.loads.numbers());
        let mut encoder = Encoder::begin(out)?;
        self.write_slices(&mut encoder, now_ns)?;
        let table = self.fleet.load();
        let workers: Vec<_> = table.workers.iter().map(|record| (record.worker, record.index)).collect();
        drop(table);
        for workers in workers.chunks(KEPT_WORKERS_PER_LOCK_MAX) {
            encoder.workers(&self.loads.keep_workers(workers, now_ns))?;
        }
        let mut absent = self.loads.keep_absent_workers(None, now_ns);
        while let Some(last) = absent.last().map(|kept| kept.worker) {
            encoder.workers(&absent)?;
            absent = self.loads.keep_absent_workers(Some(last), now_ns);
        }
        self.write_bindings(&mut encoder, (now_ns / 1_000_000_000) as u32)?;
        let identity = Identity { fleet_version: self.fleet.load().version, ..self.identity };
        let facts = ImageFacts { number, identity, taken, spaces: self.spaces.clone() };
        let numbers = KeptNumbers { complete_to: first.generations, ..self.loads.numbers() };
        encoder.end(&facts, &numbers).map(|(_, bytes)| bytes)
    }

    fn write_slices(&self, encoder: &mut Encoder<&mut dyn Write>, now_ns: u64) -> io::Result<()> {
        let (mut slice, mut next, mut blocks) = (KeptSlice::default(), Some(0), 0);
        while let Some(from) = next {
            let with_blocks = blocks + PROMPT_BLOCKS_MAX + KEPT_BLOCKS_PER_LOCK_MAX <= KEPT_BLOCKS_MAX;
            let table = self.fleet.load();
            let name = |record: &WorkerRecord| record.worker;
            let worker_of = |index: WorkerIndex| -> Option<Worker> { table.worker(index).map(name) };
            next = self.loads.keep((from, with_blocks), now_ns, worker_of, &mut slice);
            blocks += slice.hashes.len();
            encoder.slice(&slice)?;
        }
        Ok(())
    }

    fn write_bindings(&self, encoder: &mut Encoder<&mut dyn Write>, now_s: u32) -> io::Result<()> {
        let ttl_s = self.policies.load().affinity_ttl_s_max();
        let (mut bindings, mut next, mut left) = (Vec::new(), Some(0), KEPT_BINDINGS_MAX);
        while let Some(from) = next.filter(|_| left > 0) {
            next = self.affinities.keep((from, KEPT_BUCKETS_AT_ONCE), (now_s, ttl_s), &mut bindings);
            bindings.truncate(left);
            left -= bindings.len();
            if !bindings.is_empty() {
                encoder.bindings(&bindings)?;
            }
            bindings.clear();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_disk_delays_images_less_than_much_work_does() {
        let ms = Duration::from_millis;
        let pause = |elapsed, computed| Took { elapsed: ms(elapsed), computed: ms(computed) }.pause(ms(1000));
        assert_eq!(pause(10, 5), ms(1000));
        assert_eq!(pause(1500, 5), ms(1500), "as long as the disk needed");
        let times = u64::from(BOOKINGS_IMAGE_PAUSE_TIMES);
        assert_eq!(pause(200, 150), ms(150 * times), "a bounded share of a processor");
    }
}
