//! The view that other threads have of a worker's ingest: trust, counters and gauges, without a lock.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::dump::AbortReason;
use crate::event::{DecodeWarning, Reason, UnknownName};
use crate::fleet::{SchemeCell, TrustCell};
use crate::index::WorkerBlocks;
use crate::limits::UNKNOWN_NAMES_WORKER_MAX;
use crate::metrics::{CounterSet, WorkerCounter};

/// One worker as its ingest thread shows it. Only that thread writes it; any thread may read it.
#[derive(Debug)]
pub struct WorkerView {
    /// The same cell as in the worker's fleet record.
    pub trust: Arc<TrustCell>,
    /// Counters of its stream.
    pub counters: CounterSet<WorkerCounter>,
    /// Batches that could not be decoded, by [`Reason`].
    pub undecodable: Tally,
    /// Decode warnings of its batches, by [`DecodeWarning`].
    pub warnings: Tally,
    /// Names in its events that this version does not know.
    pub unknown_names: UnknownNames,
    /// Aborted dumps and loads, by [`AbortReason`].
    pub transfers_aborted: Tally,
    /// The number of blocks that the index holds for it.
    pub gauges: WorkerGauges,
    /// The scheme of the last store that was refused because its space has another scheme.
    pub refused_scheme: SchemeCell,
}

impl WorkerView {
    /// An empty view over the trust cell of the worker's fleet record.
    #[must_use]
    pub fn new(trust: Arc<TrustCell>) -> Self {
        Self {
            trust,
            counters: CounterSet::default(),
            undecodable: Tally::new(Reason::ALL.len()),
            warnings: Tally::new(DecodeWarning::ALL.len()),
            unknown_names: UnknownNames::default(),
            transfers_aborted: Tally::new(AbortReason::ALL.len()),
            gauges: WorkerGauges::default(),
            refused_scheme: SchemeCell::default(),
        }
    }

    /// The count of undecodable batches for each reason that occurred.
    pub fn undecodable_by_reason(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Reason::ALL
            .iter()
            .map(|reason| (reason.name(), self.undecodable.get(*reason as usize)))
            .filter(|(_, times)| *times > 0)
    }

    /// The count of decode warnings for each kind that occurred.
    pub fn warnings_by_name(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        DecodeWarning::ALL
            .iter()
            .map(|warning| (warning.name(), self.warnings.get(*warning as usize)))
            .filter(|(_, times)| *times > 0)
    }

    /// The count of aborted dumps and loads for each reason that occurred.
    pub fn transfers_aborted_by_reason(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        AbortReason::ALL
            .iter()
            .map(|reason| (reason.name(), self.transfers_aborted.get(*reason as usize)))
            .filter(|(_, times)| *times > 0)
    }
}

/// A count for each reason of a list, by the reason's number.
#[derive(Debug)]
pub struct Tally(Box<[AtomicU64]>);

impl Tally {
    fn new(reasons: usize) -> Self {
        Self((0..reasons).map(|_| AtomicU64::new(0)).collect())
    }

    /// Adds to the count of a reason and returns the new count.
    pub(crate) fn add(&self, reason: usize, times: u64) -> u64 {
        // Relaxed: a count orders nothing.
        self.0[reason].fetch_add(times, Ordering::Relaxed) + times
    }

    /// The count of a reason by its number.
    #[must_use]
    pub fn get(&self, reason: usize) -> u64 {
        // Relaxed: see `add`.
        self.0.get(reason).map_or(0, |count| count.load(Ordering::Relaxed))
    }
}

/// The blocks of one worker in the index at the end of its last quantum. Each number is consistent by itself; two
/// numbers may come from neighbouring quanta.
#[derive(Debug, Default)]
pub struct WorkerGauges {
    bound: AtomicU64,
    dormant: AtomicU64,
    by_tier: [AtomicU64; 4],
    choked: AtomicBool,
    waiting: AtomicU64,
    /// The one field that the memory thread writes, and the ingest thread reads.
    held_back: AtomicBool,
}

impl WorkerGauges {
    /// Distinct bound blocks over all tiers.
    #[must_use]
    pub fn bound(&self) -> u64 {
        // Relaxed, here and below: these are statistics, and no other memory depends on them.
        self.bound.load(Ordering::Relaxed)
    }

    /// Blocks that wait for a parent.
    #[must_use]
    pub fn dormant(&self) -> u64 {
        self.dormant.load(Ordering::Relaxed)
    }

    /// Distinct blocks per tier, by [`crate::ids::Tier::index`].
    #[must_use]
    pub fn by_tier(&self) -> [u64; 4] {
        std::array::from_fn(|tier| self.by_tier[tier].load(Ordering::Relaxed))
    }

    /// Whether its events wait because the index cannot free memory that it gave up: a reader reads on and on.
    #[must_use]
    pub fn is_choked(&self) -> bool {
        self.choked.load(Ordering::Relaxed)
    }

    /// Messages that wait while the worker is dumped, loaded or recovered.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Whether its new blocks are refused, because memory is short and it has more blocks than others.
    #[must_use]
    pub fn is_held_back(&self) -> bool {
        self.held_back.load(Ordering::Relaxed)
    }

    /// Refuses its new blocks from the next quantum on, or takes them again.
    pub(crate) fn set_held_back(&self, held_back: bool) {
        self.held_back.store(held_back, Ordering::Relaxed);
    }

    pub(crate) fn set_waiting(&self, messages: usize) {
        self.waiting.store(messages as u64, Ordering::Relaxed);
    }

    pub(crate) fn set_choked(&self, choked: bool) {
        self.choked.store(choked, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, held: &WorkerBlocks) {
        self.bound.store(held.bound, Ordering::Relaxed);
        self.dormant.store(held.dormant, Ordering::Relaxed);
        for (gauge, blocks) in self.by_tier.iter().zip(held.by_tier) {
            gauge.store(blocks, Ordering::Relaxed);
        }
    }
}

/// Unknown names of one worker and their counts. One thread writes, any thread reads, without a lock: the name of an
/// entry is written once.
#[derive(Debug)]
pub struct UnknownNames {
    entries: Box<[Entry]>,
    /// Occurrences of names that found no free entry.
    others: AtomicU64,
}

#[derive(Debug, Default)]
struct Entry {
    name: OnceLock<(UnknownName, Box<str>)>,
    times: AtomicU64,
}

impl Default for UnknownNames {
    fn default() -> Self {
        let entries = (0..UNKNOWN_NAMES_WORKER_MAX).map(|_| Entry::default()).collect();
        Self { entries, others: AtomicU64::new(0) }
    }
}

impl UnknownNames {
    /// Counts a name. Returns whether it came for the first time.
    pub(super) fn count(&self, of: UnknownName, name: &str, times: u64) -> bool {
        for entry in &self.entries {
            let is_new = entry.name.get().is_none();
            let (kind, known) = entry.name.get_or_init(|| (of, name.into()));
            if (*kind, &**known) == (of, name) {
                // Relaxed, here and below: a count orders nothing.
                entry.times.fetch_add(times, Ordering::Relaxed);
                return is_new;
            }
        }
        self.others.fetch_add(times, Ordering::Relaxed);
        false
    }

    /// The kind, the name and the count of each listed name, in the order of their first occurrence.
    pub fn iter(&self) -> impl Iterator<Item = (UnknownName, &str, u64)> {
        let named = |entry: &'_ Entry| entry.times.load(Ordering::Relaxed);
        self.entries.iter().map_while(move |entry| {
            let (of, name) = entry.name.get()?;
            Some((*of, &**name, named(entry)))
        })
    }

    /// Occurrences of names that are not listed because the list was full.
    #[must_use]
    pub fn others(&self) -> u64 {
        self.others.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_counted_each_and_the_rest_together() {
        let names = UnknownNames::default();
        assert!(names.count(UnknownName::Medium, "TAPE", 2));
        assert!(!names.count(UnknownName::Medium, "TAPE", 1));
        assert!(names.count(UnknownName::Tag, "TAPE", 1), "another kind of name");
        for name in 2..UNKNOWN_NAMES_WORKER_MAX + 3 {
            names.count(UnknownName::Tag, &name.to_string(), 1);
        }
        let listed: Vec<_> = names.iter().collect();
        assert_eq!(listed[..2], [(UnknownName::Medium, "TAPE", 3), (UnknownName::Tag, "TAPE", 1)]);
        assert_eq!((listed.len(), names.others()), (UNKNOWN_NAMES_WORKER_MAX, 3));
    }
}
