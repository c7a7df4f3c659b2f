//! The thread that writes images of the bookings, and a last one when the daemon stops.

use std::io::{self, Write};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use crossbeam::channel::{self, Receiver, RecvTimeoutError, Sender};

use super::{BookingsStore, Encoder, ImageFacts, ImageTime};
use crate::error::{Error, Kind, Result};
use crate::fleet::{Fleet, WorkerRecord};
use crate::ids::{Worker, WorkerIndex};
use crate::limits::{
    BOOKINGS_IMAGE_PAUSE_TIMES, KEPT_BINDINGS_MAX, KEPT_BLOCKS_MAX, KEPT_BLOCKS_PER_LOCK_MAX, KEPT_BUCKETS_AT_ONCE,
    KEPT_WORKERS_PER_LOCK_MAX, PROMPT_BLOCKS_MAX,
};
use crate::load::{ChangesSeen, KeptNumbers, KeptSlice, Loads};
use crate::metrics::SnapshotCounter as C;
use crate::requests::Identity;
use crate::route::{AffinityTable, PolicyTable};
use crate::sandbox::{self, ThreadKind};
use crate::snapshot::SnapshotStats;
use crate::watchdog::{Activity, ThreadMark};

/// What the thread needs.
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
    /// Counters.
    pub stats: Arc<SnapshotStats>,
    /// The thread's mark.
    pub mark: Arc<ThreadMark>,
}

/// The running thread. If this value is dropped, the thread ends without a last image.
#[derive(Debug)]
pub struct BookingsKeeper {
    stop: Sender<()>,
    ended: Receiver<()>,
    thread: JoinHandle<()>,
}

impl BookingsKeeper {
    /// Writes the first image, so that no later run gives out the numbers of this one, and starts the thread.
    ///
    /// # Errors
    /// [`Kind::System`] if it cannot be started.
    pub fn start(plan: BookingsPlan) -> Result<Self> {
        let (stop, stopped) = channel::bounded(1);
        let (done, ended) = channel::bounded(1);
        let mut images = Images { plan, stopped, written: None, took: Duration::ZERO, fails: false };
        images.write(false);
        let run = move || {
            sandbox::enter(ThreadKind::Snapshots);
            images.run();
            // Fails if no thread waits any more.
            let _ = done.send(());
        };
        let thread = std::thread::Builder::new().name("bookings".into()).spawn(run).map_err(|error| {
            Error::new(Kind::System, "cannot start the thread that keeps bookings", "raise the limit of threads")
                .caused_by(error)
        })?;
        Ok(Self { stop, ended, thread })
    }

    /// Whether the thread still runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !self.thread.is_finished()
    }

    /// Asks for a last image and waits for it, until `deadline`. Whether it was written in time.
    #[must_use]
    pub fn finish(self, deadline: Instant) -> bool {
        // Fails if the thread has ended.
        let _ = self.stop.try_send(());
        let has_ended = self.ended.recv_deadline(deadline).is_ok();
        if has_ended && self.thread.join().is_err() {
            tracing::error!("the thread that keeps bookings panicked");
        }
        has_ended
    }
}

/// The thread's work.
struct Images {
    plan: BookingsPlan,
    stopped: Receiver<()>,
    /// The changes of loads that the last image has.
    written: Option<ChangesSeen>,
    /// How long the last image took.
    took: Duration,
    /// Whether the last image could not be written.
    fails: bool,
}

impl Images {
    fn run(mut self) {
        loop {
            self.plan.mark.wait();
            let stopped = match self.plan.every {
                Some(every) => self.stopped.recv_timeout(every.max(self.took * BOOKINGS_IMAGE_PAUSE_TIMES)),
                None => self.stopped.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match stopped {
                Ok(()) => {
                    self.write(true);
                    return self.plan.mark.wait();
                }
                Err(RecvTimeoutError::Timeout) => self.write(false),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Writes an image, unless no load has changed since the last one.
    fn write(&mut self, is_last: bool) {
        let seen = self.plan.loads.changes_seen();
        if self.written == Some(seen) && !is_last {
            return;
        }
        let Self { plan, .. } = self;
        plan.mark.begin_round(Activity::WritingSnapshot);
        let (began, number) = (Instant::now(), plan.number);
        let mut store = std::mem::take(&mut plan.store);
        let written = store.write(is_last, |out| plan.write(number, out));
        plan.store = store;
        self.took = began.elapsed();
        let counters = &plan.stats.counters;
        plan.stats.add_bookings_ns(self.took.as_nanos() as u64);
        match written {
            Ok(bytes) => {
                counters.bump(C::BookingImagesWritten);
                counters.add(C::BookingImageBytes, bytes);
                plan.number += 1;
                (self.written, self.fails) = (Some(seen), false);
            }
            Err(error) => {
                counters.bump(C::BookingImagesFailed);
                let remedy = "check the free space and the owner of the directory that snapshot.dir names";
                if !std::mem::replace(&mut self.fails, true) {
                    tracing::warn!(%error, remedy, "the bookings cannot be kept for a restart");
                }
            }
        }
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
            if !slice.bookings.is_empty() {
                encoder.slice(&slice)?;
            }
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
