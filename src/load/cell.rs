//! A worker's load as every core reads it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::active::BLOCK_PARTS;
use super::changes::{ChangeLog, ChangesSeen};
use super::prefill::Backlog;
use crate::ids::WorkerIndex;
use crate::limits::WORKERS_MAX;

/// What a worker, or who watches it, says that it is busy with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineLoad {
    /// Tokens still to be prefilled.
    pub prefill_tokens: u64,
    /// KV blocks of its requests in flight.
    pub decode_blocks: u64,
    /// Requests that it computes.
    pub running: u32,
    /// Requests that wait in it.
    pub waiting: u32,
    /// Share of its KV blocks in use, millionths.
    pub kv_usage_millionths: u32,
}

/// What a worker is busy with, as far as bookings tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Tokens still to be prefilled, less those that are reckoned done where a time is asked for.
    pub prefill_tokens: u64,
    /// Blocks of the prompts in flight: those that several share at the same place count once. And
    /// those of their output, where that is counted.
    pub decode_blocks: u64,
    /// Requests in flight.
    pub requests: u64,
    /// Until when it is left alone after a failure, nanoseconds of the bookings' clock; 0 = it has not failed.
    pub back_off_until_ns: u64,
    /// What it says itself, where a time is asked for and it said so not too long before.
    pub engine: Option<EngineLoad>,
    /// Counts changes; equal versions mean that nothing moved between.
    pub version: u64,
}

/// One record, on two cache lines of its own: a decision reads the first, and the second only of workers whose prefills
/// are modelled or who say something. A seqlock: odd while it is written.
///
/// | tag | write | read |
/// |---|---|---|
/// | OPEN | `sequence` to odd, then a Release fence | the Acquire fence before `sequence` is read again |
/// | DONE | `sequence` to even, Release | `sequence`, Acquire, before the fields |
#[derive(Debug)]
#[repr(C, align(128))]
struct LoadCell {
    sequence: AtomicU64,
    /// Whose load it is: a [`WorkerIndex`], or `NOBODY`.
    owner: AtomicU32,
    prefill_tokens: AtomicU64,
    decode_parts: AtomicU64,
    requests: AtomicU64,
    back_off_until_ns: AtomicU64,
    /// How long the anchor of the backlog takes; not known = `NO_DURATION`.
    anchor_ns: AtomicU64,
    /// When the worker said something; never = `NO_REPORT`.
    reported_ns: AtomicU64,
    /// The backlog's other fields, of which nothing is read without a duration.
    anchor_tokens: AtomicU64,
    since_ns: AtomicU64,
    all_modelled: AtomicU64,
    /// What the worker says: its fields, two of them in a word where they fit.
    engine_report: [AtomicU64; 4],
}

const _: () = assert!(std::mem::offset_of!(LoadCell, anchor_tokens) == 64 && size_of::<LoadCell>() == 128);

/// "It has said nothing" of when it did.
const NO_REPORT: u64 = u64::MAX;

/// "Not known" of how long the anchor takes.
const NO_DURATION: u64 = u64::MAX;

/// What a cell holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) backlog: Backlog,
    /// In parts of a block.
    pub(super) decode_parts: u64,
    pub(super) requests: u64,
    pub(super) back_off_until_ns: u64,
    /// What the worker said last, and when.
    pub(super) engine_report: Option<(EngineLoad, u64)>,
}

impl LoadCell {
    fn new(owner: u32) -> Self {
        let zero = || AtomicU64::new(0);
        let cell = Self {
            sequence: zero(),
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
        };
        cell.store(&Record::default());
        cell
    }

    /// Relaxed: the sequence says whether the fields belong together.
    fn load(&self) -> Record {
        let of = |field: &AtomicU64| field.load(Ordering::Relaxed);
        let reported_ns = of(&self.reported_ns);
        Record {
            backlog: self.backlog(),
            decode_parts: of(&self.decode_parts),
            requests: of(&self.requests),
            back_off_until_ns: of(&self.back_off_until_ns),
            engine_report: (reported_ns != NO_REPORT).then(|| (self.engine_report(), reported_ns)),
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

    /// Writes the load to where it is wanted, with the prefills as booked. Relaxed: as `load`.
    #[inline]
    fn booked(&self, version: u64, to: &mut Load) {
        let of = |field: &AtomicU64| field.load(Ordering::Relaxed);
        let Load { prefill_tokens, decode_blocks, requests, back_off_until_ns, engine, version: of_version } = to;
        *prefill_tokens = of(&self.prefill_tokens);
        *decode_blocks = (of(&self.decode_parts) + BLOCK_PARTS / 2) / BLOCK_PARTS;
        *requests = of(&self.requests);
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
        let Record { backlog, decode_parts, requests, back_off_until_ns, engine_report } = record;
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
    }
}

/// Whether a load that was read at a time may be another later without having been changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadStability {
    /// It stays until it is changed.
    Stable,
    /// A modelled prefill goes on, what the worker said grows old, or it is left alone for a while.
    TimeDependent,
}

/// No worker's index: its place is beyond all.
const NOBODY: u32 = u32::MAX;

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
        let cell = |place: usize| LoadCell::new(if place < workers { place as u32 } else { NOBODY });
        Self { cells: (0..WORKERS_MAX.max(workers)).map(cell).collect(), changes: ChangeLog::new() }
    }

    /// Whether a place is this worker's. The caller holds the bookings' lock.
    pub(super) fn is_of(&self, worker: WorkerIndex) -> bool {
        // Relaxed: owners change under the lock that the caller holds.
        self.cells.get(worker.place()).is_some_and(|cell| cell.owner.load(Ordering::Relaxed) == worker.0)
    }

    /// Gives a place to a worker, idle. The caller holds the bookings' lock.
    pub(super) fn give(&self, worker: WorkerIndex) {
        self.hand_over(worker, worker.0);
    }

    /// Takes a worker's place from it; nothing happens if it is another's. The caller holds the bookings' lock.
    pub(super) fn take(&self, worker: WorkerIndex) -> bool {
        let taken = self.is_of(worker);
        if taken {
            self.hand_over(worker, NOBODY);
        }
        taken
    }

    fn hand_over(&self, worker: WorkerIndex, owner: u32) {
        let Some(cell) = self.cells.get(worker.place()) else { return };
        // Relaxed: only the lock's holder writes it; readers see it within the sequence of the change below.
        let was = cell.owner.swap(worker.0, Ordering::Relaxed);
        self.change(worker, |record| *record = Record::default());
        cell.owner.store(owner, Ordering::Relaxed);
        // Once more: who read the cell between the change and its new owner reads it again.
        self.changes.note(worker.place() as u32);
        debug_assert!(was == NOBODY || owner == NOBODY, "a place has one owner at a time");
    }

    /// The load as it was booked, prefills under way in full; all zero for a worker that is not in the table.
    #[must_use]
    pub fn read(&self, worker: WorkerIndex) -> Load {
        let mut load = Load::default();
        self.read_consistent(worker, |cell, version| cell.booked(version, &mut load));
        load
    }

    /// Writes to `to` the load at a time, nanoseconds of the bookings' clock: of prefills that are modelled, what is left
    /// of them; what the worker said itself, if that is no longer ago than `report_age_ns_max`. Says whether it stays so.
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

    /// Has `read` read a worker's cell, told its version, until the fields belong together; `false` for a worker that is
    /// not in the table, of which nothing is read.
    #[inline]
    fn read_consistent(&self, worker: WorkerIndex, mut read: impl FnMut(&LoadCell, u64)) -> bool {
        let Some(cell) = self.cells.get(worker.place()) else { return false };
        // Relaxed: nobody can name the next owner yet while a place changes hands; who still names the last one, by a table
        // of before, finds its load or none.
        if cell.owner.load(Ordering::Relaxed) != worker.0 {
            return false;
        }
        for _ in 0..READ_TRIES_MAX {
            // Acquire: pairs with DONE.
            let before = cell.sequence.load(Ordering::Acquire);
            read(cell, before);
            // Acquire fence: pairs with OPEN; a field of a later write makes the later sequence visible.
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && cell.sequence.load(Ordering::Relaxed) == before {
                break;
            }
            std::hint::spin_loop();
        }
        true
    }

    /// Changes a worker's load. The caller holds the bookings' lock: there is one writer at a time.
    pub(super) fn change(&self, worker: WorkerIndex, change: impl FnOnce(&mut Record)) {
        let Some(cell) = self.cells.get(worker.place()).filter(|_| self.is_of(worker)) else { return };
        // Relaxed: only writers change these, and the lock orders writers.
        let sequence = cell.sequence.load(Ordering::Relaxed);
        let mut record = cell.load();
        change(&mut record);
        cell.sequence.store(sequence + 1, Ordering::Relaxed);
        // OPEN: no field may be seen changed before the odd sequence.
        fence(Ordering::Release);
        cell.store(&record);
        // DONE.
        cell.sequence.store(sequence + 2, Ordering::Release);
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
    }

    #[test]
    fn who_looked_before_a_place_had_its_new_owner_is_told_of_it_again() {
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
                        record.backlog.tokens += 2;
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
