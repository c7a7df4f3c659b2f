//! A worker's load, as every serving thread reads it.

use std::ops::Range;

use super::active::BLOCK_PARTS;
use super::change_log::{ChangeLog, ChangesSeen};
use super::prefill::{Backlog, PrefillLoad};
use super::recent_work::RecentWork;
use crate::engine_law::PrefillLaw;
use crate::ids::WorkerIndex;
use crate::limits::WORKERS_MAX;
use crate::prefetch::{prefetch, prefetch_value_to_write};
use crate::protocol::EngineLoad;
use crate::sync::{AtomicU32, AtomicU64, Ordering, SeqWord, spin};

/// A worker's load by the bookings of this router and of others.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Tokens still to prefill; at a given time, minus those that the prefill model counts as done.
    pub prefill_tokens: u64,
    /// Blocks of the prompts in flight; a block that several share at the same position counts once. Plus output
    /// blocks, if output is counted.
    pub decode_blocks: u64,
    /// Requests in flight.
    pub requests: u64,
    /// The predicted time of the prefills in progress.
    pub work: PrefillWork,
    /// How long a prefill takes on the worker, as learnt so far.
    pub law: PrefillLaw,
    /// What it was given lately.
    pub recent: RecentWork,
    /// The end of the back-off after a failure, nanoseconds of the bookings' clock; 0 = no failure.
    pub back_off_until_ns: u64,
    /// The worker's own report, if a time is given and the report is recent.
    pub engine: Option<EngineLoad>,
    /// Counts changes; equal versions mean an unchanged load.
    pub version: u64,
}

/// The predicted time of a worker's prefills in progress, which run one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefillWork {
    /// The sum over all of them, nanoseconds.
    pub queued_ns: u64,
    /// The first of them, which runs, nanoseconds.
    pub running_ns: u64,
    /// Since when it runs.
    pub since_ns: u64,
}

impl PrefillWork {
    /// The work of two routers at one worker. The sum is queued. Each router has a running prefill; the one with the
    /// earlier start runs.
    pub(super) fn beside(&self, other: &Self) -> Self {
        let runs =
            if other.queued_ns == 0 || self.queued_ns > 0 && self.since_ns <= other.since_ns { self } else { other };
        Self { queued_ns: self.queued_ns.saturating_add(other.queued_ns), ..*runs }
    }

    /// Seconds left at a time. A prefill that takes longer than predicted counts nothing until it is reported done.
    #[must_use]
    #[inline(always)]
    pub fn left_s(&self, now_ns: u64) -> f64 {
        let done_ns = now_ns.saturating_sub(self.since_ns).min(self.running_ns);
        self.queued_ns.saturating_sub(done_ns) as f64 * 1e-9
    }
}

/// One record, on three cache lines of its own: a decision reads the first and the last, and the one between only of
/// workers with modelled prefills or a load report. The seqlock of [`SeqWord`].
#[derive(Debug)]
#[repr(C, align(64))]
struct LoadCell {
    sequence: SeqWord,
    /// The worker that the cell belongs to: a [`WorkerIndex`], or `NO_WORKER`.
    owner: AtomicU32,
    prefill_tokens: AtomicU64,
    decode_parts: AtomicU64,
    requests: AtomicU64,
    back_off_until_ns: AtomicU64,
    /// Duration of the anchor of the backlog; unknown = `NO_DURATION`.
    anchor_ns: AtomicU64,
    /// The time of the last report; none = `NO_REPORT`.
    reported_ns: AtomicU64,
    /// The other fields of the backlog, which are only read with a duration.
    anchor_tokens: AtomicU64,
    since_ns: AtomicU64,
    all_modelled: AtomicU64,
    /// The last report: its fields, two to a word where they fit.
    engine_report: [AtomicU64; 4],
    /// No fact; begins the third line.
    spare: AtomicU64,
    /// The predicted time of the prefills in progress: all, the one that runs, and since when it runs.
    work: [AtomicU64; 3],
    /// The constants of a prefill's time, as bits.
    law: [AtomicU64; 3],
    /// The share of recent prefills, and when it was so; then the mean decode, and of how many requests.
    recent: [AtomicU64; 2],
}

const _: () = assert!(
    cfg!(all(test, kvrouted_loom))
        || std::mem::offset_of!(LoadCell, anchor_tokens) == 64
            && std::mem::offset_of!(LoadCell, work) == 128
            && size_of::<LoadCell>() == 192
);

/// The report time of a worker without a report.
const NO_REPORT: u64 = u64::MAX;

/// An unknown duration of the anchor.
const NO_DURATION: u64 = u64::MAX;

/// The content of a cell.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Record {
    pub(super) prefill: PrefillLoad,
    /// In parts of a block.
    pub(super) decode_parts: u64,
    pub(super) requests: u64,
    pub(super) recent: RecentWork,
    pub(super) back_off_until_ns: u64,
    /// The last report and its time.
    pub(super) engine_report: Option<(EngineLoad, u64)>,
}

impl LoadCell {
    fn new(owner: u32) -> Self {
        let zero = || AtomicU64::new(0);
        let cell = Self {
            sequence: SeqWord::new(),
            owner: AtomicU32::new(owner),
            prefill_tokens: zero(),
            decode_parts: zero(),
            requests: zero(),
            back_off_until_ns: zero(),
            anchor_ns: zero(),
            reported_ns: zero(),
            anchor_tokens: zero(),
            since_ns: zero(),
            all_modelled: zero(),
            engine_report: std::array::from_fn(|_| zero()),
            spare: zero(),
            work: std::array::from_fn(|_| zero()),
            law: std::array::from_fn(|_| zero()),
            recent: std::array::from_fn(|_| zero()),
        };
        cell.store(&Record::default());
        cell
    }

    /// Relaxed: the sequence tells whether the fields belong together.
    fn load(&self) -> Record {
        let of = |field: &AtomicU64| field.load(Ordering::Relaxed);
        let reported_ns = of(&self.reported_ns);
        Record {
            prefill: PrefillLoad { backlog: self.backlog(), work: self.work(), law: self.law(), ended_ns: 0 },
            decode_parts: of(&self.decode_parts),
            requests: of(&self.requests),
            recent: self.recent(),
            back_off_until_ns: of(&self.back_off_until_ns),
            engine_report: (reported_ns != NO_REPORT).then(|| (self.engine_report(), reported_ns)),
        }
    }

    /// Relaxed: as `load`.
    #[inline]
    fn work(&self) -> PrefillWork {
        let [queued_ns, running_ns, since_ns] = [0, 1, 2].map(|at: usize| self.work[at].load(Ordering::Relaxed));
        PrefillWork { queued_ns, running_ns, since_ns }
    }

    /// Relaxed: as `load`.
    #[inline]
    fn law(&self) -> PrefillLaw {
        let constant = |at: usize| f64::from_bits(self.law[at].load(Ordering::Relaxed));
        PrefillLaw { base_s: constant(0), token_s: constant(1), attention_s: constant(2) }
    }

    /// Relaxed: as `load`.
    #[inline]
    fn recent(&self) -> RecentWork {
        let [share_and_time, count_and_mean] = [0, 1].map(|at: usize| self.recent[at].load(Ordering::Relaxed));
        RecentWork {
            prefill_share: f32::from_bits((share_and_time >> 32) as u32),
            at_ms: share_and_time as u32,
            decode_s: f32::from_bits(count_and_mean as u32),
            decodes: (count_and_mean >> 32) as u32,
        }
    }

    /// Relaxed: as `load`.
    fn backlog(&self) -> Backlog {
        let of = |field: &AtomicU64| field.load(Ordering::Relaxed);
        let anchor_ns = of(&self.anchor_ns);
        Backlog {
            tokens: of(&self.prefill_tokens),
            anchor_tokens: of(&self.anchor_tokens),
            anchor_ns: (anchor_ns != NO_DURATION).then_some(anchor_ns),
            since_ns: of(&self.since_ns),
            all_modelled: of(&self.all_modelled) != 0,
        }
    }

    /// Relaxed: as `load`.
    fn engine_report(&self) -> EngineLoad {
        let [prefill_tokens, decode_blocks, requests, usage] =
            [0, 1, 2, 3].map(|at: usize| self.engine_report[at].load(Ordering::Relaxed));
        EngineLoad {
            prefill_tokens,
            decode_blocks,
            running: (requests >> 32) as u32,
            waiting: requests as u32,
            kv_usage_millionths: usage as u32,
        }
    }

    /// Writes the load as booked into `to`. Relaxed: as `load`.
    #[inline]
    fn booked(&self, version: u64, to: &mut Load) {
        let of = |field: &AtomicU64| field.load(Ordering::Relaxed);
        let Load {
            prefill_tokens,
            decode_blocks,
            requests,
            work,
            law,
            recent,
            back_off_until_ns,
            engine,
            version: of_version,
        } = to;
        *prefill_tokens = of(&self.prefill_tokens);
        *decode_blocks = (of(&self.decode_parts) + BLOCK_PARTS / 2) / BLOCK_PARTS;
        *requests = of(&self.requests);
        (*work, *law, *recent) = (self.work(), self.law(), self.recent());
        *back_off_until_ns = of(&self.back_off_until_ns);
        (*engine, *of_version) = (None, version);
    }

    /// As [`LoadCells::read_at`]. Relaxed: as `load`.
    #[inline]
    fn load_at(&self, version: u64, (now_ns, report_age_ns_max): (u64, u64), to: &mut Load) -> LoadStability {
        self.booked(version, to);
        let mut is_time_dependent = to.back_off_until_ns > now_ns;
        if self.anchor_ns.load(Ordering::Relaxed) != NO_DURATION {
            to.prefill_tokens = self.backlog().at(now_ns);
            is_time_dependent = true;
        }
        let reported_ns = self.reported_ns.load(Ordering::Relaxed);
        if reported_ns != NO_REPORT && now_ns.saturating_sub(reported_ns) <= report_age_ns_max {
            to.engine = Some(self.engine_report());
            is_time_dependent = true;
        }
        if is_time_dependent { LoadStability::TimeDependent } else { LoadStability::Stable }
    }

    /// Relaxed: as `load`.
    fn store(&self, record: &Record) {
        let Record { prefill, decode_parts, requests, recent, back_off_until_ns, engine_report } = record;
        let PrefillLoad { backlog, work, law, ended_ns: _ } = prefill;
        let (word, reported_ns) = engine_report.unwrap_or((EngineLoad::default(), NO_REPORT));
        let requests_word = u64::from(word.running) << 32 | u64::from(word.waiting);
        let words = [word.prefill_tokens, word.decode_blocks, requests_word, u64::from(word.kv_usage_millionths)];
        self.engine_report.iter().zip(words).for_each(|(field, value)| field.store(value, Ordering::Relaxed));
        self.reported_ns.store(reported_ns, Ordering::Relaxed);
        self.back_off_until_ns.store(*back_off_until_ns, Ordering::Relaxed);
        self.prefill_tokens.store(backlog.tokens, Ordering::Relaxed);
        self.anchor_tokens.store(backlog.anchor_tokens, Ordering::Relaxed);
        self.anchor_ns.store(backlog.anchor_ns.unwrap_or(NO_DURATION), Ordering::Relaxed);
        self.since_ns.store(backlog.since_ns, Ordering::Relaxed);
        self.all_modelled.store(u64::from(backlog.all_modelled), Ordering::Relaxed);
        self.decode_parts.store(*decode_parts, Ordering::Relaxed);
        self.requests.store(*requests, Ordering::Relaxed);
        let work = [work.queued_ns, work.running_ns, work.since_ns];
        self.work.iter().zip(work).for_each(|(field, value)| field.store(value, Ordering::Relaxed));
        let share_and_time = u64::from(recent.prefill_share.to_bits()) << 32 | u64::from(recent.at_ms);
        let count_and_mean = u64::from(recent.decodes) << 32 | u64::from(recent.decode_s.to_bits());
        self.recent
            .iter()
            .zip([share_and_time, count_and_mean])
            .for_each(|(field, value)| field.store(value, Ordering::Relaxed));
        let law = [law.base_s, law.token_s, law.attention_s];
        self.law.iter().zip(law).for_each(|(field, value)| field.store(value.to_bits(), Ordering::Relaxed));
    }
}

/// Whether a load can change with time alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadStability {
    /// It changes only when it is written.
    Stable,
    /// It changes with time: a modelled prefill, an ageing report, or a back-off.
    TimeDependent,
}

/// No worker; beyond all places.
const NO_WORKER: u32 = u32::MAX;

/// The loads of all workers, by place. Written under the bookings' lock, read without one.
#[derive(Debug)]
pub struct LoadCells {
    cells: Box<[LoadCell]>,
    changes: ChangeLog,
}

/// After this many torn reads a reader takes what it has: a load is a hint, and the writer is running.
const READ_TRIES_MAX: usize = 64;

impl LoadCells {
    pub(super) fn new(workers: usize) -> Self {
        let cell = |place: usize| LoadCell::new(if place < workers { place as u32 } else { NO_WORKER });
        Self { cells: (0..WORKERS_MAX.max(workers)).map(cell).collect(), changes: ChangeLog::new() }
    }

    /// Whether a place belongs to this worker. The caller holds the bookings' lock.
    pub(super) fn is_of(&self, worker: WorkerIndex) -> bool {
        // Relaxed: owners change under the caller's lock.
        self.cells.get(worker.place()).is_some_and(|cell| cell.owner.load(Ordering::Relaxed) == worker.0)
    }

    /// Gives a place to an idle worker. The caller holds the bookings' lock.
    pub(super) fn give(&self, worker: WorkerIndex) {
        self.hand_over(worker, worker.0);
    }

    /// Takes a worker's place from it, if it has it. The caller holds the bookings' lock.
    pub(super) fn take(&self, worker: WorkerIndex) -> bool {
        let taken = self.is_of(worker);
        if taken {
            self.hand_over(worker, NO_WORKER);
        }
        taken
    }

    fn hand_over(&self, worker: WorkerIndex, owner: u32) {
        let Some(cell) = self.cells.get(worker.place()) else { return };
        // Relaxed: only the holder of the lock writes it; readers see it within the sequence of the change below.
        let was = cell.owner.swap(worker.0, Ordering::Relaxed);
        self.change(worker, |record| *record = Record::default());
        cell.owner.store(owner, Ordering::Relaxed);
        // Again, for a reader that read the cell between the change and its new owner.
        self.changes.note(worker.place() as u32);
        debug_assert!(was == NO_WORKER || owner == NO_WORKER, "a place has one owner at a time");
    }

    /// The load as booked, with every prefill in progress in full; zero for a worker without a place.
    #[must_use]
    pub fn read(&self, worker: WorkerIndex) -> Load {
        let mut load = Load::default();
        self.read_consistent(worker, |cell, version| cell.booked(version, &mut load));
        load
    }

    /// Prefetches the cell of a worker that is about to be changed.
    #[inline]
    pub(super) fn prefetch_to_write(&self, worker: WorkerIndex) {
        if let Some(cell) = self.cells.get(worker.place()) {
            prefetch_value_to_write(cell);
        }
        self.changes.prefetch_to_write();
    }

    /// Prefetches what a decision reads of the cells that changed since `seen`.
    #[inline]
    pub(super) fn prefetch_changed(&self, seen: ChangesSeen) {
        for place in self.changes.last_since(seen) {
            if let Some(cell) = self.cells.get(place as usize) {
                prefetch((&raw const cell.sequence).cast());
                prefetch((&raw const cell.spare).cast());
            }
        }
    }

    /// The version of a worker's load; odd while it changes, and 0 for a worker without a place.
    #[inline]
    pub(super) fn version(&self, worker: WorkerIndex) -> u64 {
        // Relaxed: as in `read_consistent`.
        let is_of = |cell: &&LoadCell| cell.owner.load(Ordering::Relaxed) == worker.0;
        self.cells.get(worker.place()).filter(is_of).map_or(0, |cell| cell.sequence.load())
    }

    /// Writes the load at a time, nanoseconds of the bookings' clock, into `to`: modelled prefills count what is left
    /// of them, and a report counts up to the age `report_age_ns_max`. Returns whether the load changes with time.
    #[inline]
    pub fn read_at(&self, worker: WorkerIndex, now_ns: u64, report_age_ns_max: u64, to: &mut Load) -> LoadStability {
        let mut stability = LoadStability::Stable;
        if !self
            .read_consistent(worker, |cell, version| stability = cell.load_at(version, (now_ns, report_age_ns_max), to))
        {
            *to = Load::default();
        }
        stability
    }

    /// As [`ChangeLog::seen`].
    #[must_use]
    pub fn changes_seen(&self) -> ChangesSeen {
        self.changes.seen()
    }

    /// As [`ChangeLog::since`].
    #[must_use]
    pub fn changed_since(&self, seen: &mut ChangesSeen, places: &mut Vec<u32>) -> bool {
        self.changes.since(seen, places)
    }

    #[cfg(test)]
    pub(super) fn decode_parts(&self, worker: WorkerIndex) -> u64 {
        let mut parts = 0;
        self.read_consistent(worker, |cell, _| parts = cell.decode_parts.load(Ordering::Relaxed));
        parts
    }

    /// Runs `read` on a worker's cell, with its version, until the fields belong together. Returns `false`, without
    /// reading, for a worker without a place.
    #[inline]
    fn read_consistent(&self, worker: WorkerIndex, mut read: impl FnMut(&LoadCell, u64)) -> bool {
        let Some(cell) = self.cells.get(worker.place()) else { return false };
        // Relaxed: while a place changes hands, no reader can name its next owner yet. A reader with an older table
        // that names the previous owner finds its load or none.
        if cell.owner.load(Ordering::Relaxed) != worker.0 {
            return false;
        }
        for _ in 0..READ_TRIES_MAX {
            let before = cell.sequence.load();
            read(cell, before);
            if before.is_multiple_of(2) && cell.sequence.is_unchanged(before) {
                break;
            }
            spin();
        }
        true
    }

    /// Places for workers.
    pub(super) fn places(&self) -> usize {
        self.cells.len()
    }

    /// The workers that have these places. The caller holds the bookings' lock.
    pub(super) fn owners(&self, places: Range<usize>) -> impl Iterator<Item = WorkerIndex> {
        // Relaxed: owners change under the caller's lock.
        let owners = self.cells[places].iter().map(|cell| cell.owner.load(Ordering::Relaxed));
        owners.filter(|owner| *owner != NO_WORKER).map(WorkerIndex)
    }

    /// What a worker's cell holds; nothing for a worker without a place. The caller holds the bookings' lock.
    pub(super) fn record(&self, worker: WorkerIndex) -> Record {
        let cell = self.cells.get(worker.place()).filter(|_| self.is_of(worker));
        cell.map_or_else(Record::default, LoadCell::load)
    }

    /// Changes a worker's load. The caller holds the bookings' lock, so there is one writer.
    pub(super) fn change(&self, worker: WorkerIndex, change: impl FnOnce(&mut Record)) {
        let Some(cell) = self.cells.get(worker.place()).filter(|_| self.is_of(worker)) else { return };
        let mut record = cell.load();
        change(&mut record);
        cell.sequence.begin_write();
        cell.store(&record);
        cell.sequence.end_write();
        self.changes.note(worker.place() as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_seen_whole_and_counts() {
        let cells = LoadCells::new(2);
        let before = cells.read(WorkerIndex(1));
        cells.change(WorkerIndex(1), |record| record.requests += 1);
        let after = cells.read(WorkerIndex(1));
        assert_eq!((before.requests, after.requests), (0, 1));
        assert_ne!(before.version, after.version);
        assert_eq!(cells.read(WorkerIndex(0)), Load::default());
        assert_eq!(cells.read(WorkerIndex(7)), Load::default());
        assert_eq!([1, 0, 7].map(|index| cells.version(WorkerIndex(index))), [after.version, 0, 0]);
    }

    #[test]
    fn a_new_owner_of_a_place_is_logged_after_the_change() {
        let (cells, worker, mut places) = (LoadCells::new(1), WorkerIndex(0), Vec::new());
        let mut seen = cells.changes_seen();
        assert!(cells.take(worker) && cells.changed_since(&mut seen, &mut places));
        assert_eq!(places, [0, 0], "of the change, which shows the owner before, and of the owner");
        places.clear();
        cells.give(worker);
        assert!(cells.changed_since(&mut seen, &mut places));
        assert_eq!(places, [0, 0]);
    }

    #[test]
    fn readers_never_see_half_a_change() {
        let cells = LoadCells::new(1);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..20_000 {
                    cells.change(WorkerIndex(0), |record| {
                        record.prefill.backlog.tokens += 2;
                        record.decode_parts += 3 * BLOCK_PARTS;
                        record.requests += 1;
                    });
                }
            });
            loop {
                let load = cells.read(WorkerIndex(0));
                if load.version.is_multiple_of(2) {
                    assert_eq!((load.prefill_tokens, load.decode_blocks), (load.requests * 2, load.requests * 3));
                }
                if load.requests == 20_000 {
                    break;
                }
            }
        });
    }
}
