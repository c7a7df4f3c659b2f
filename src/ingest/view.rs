//! What other threads may see of a worker's ingest: trust, counters and gauges, without a lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::dump::AbortReason;
use super::unruled::UnruledNames;
use crate::event::{Oddity, Reason};
use crate::fleet::{SchemeCell, TrustCell};
use crate::index::WorkerBlocks;
use crate::metrics::{CounterSet, WorkerCounter};

/// One worker as its ingest thread shows it. Written by that thread alone, read by any.
#[derive(Debug)]
pub struct WorkerView {
    /// The same cell as in the worker's fleet record.
    pub trust: Arc<TrustCell>,
    /// What happened to its stream.
    pub counters: CounterSet<WorkerCounter>,
    /// Batches that could not be decoded, by [`Reason`].
    pub undecodable: Tally,
    /// What decodable batches held that was passed over or could not be used, by [`Oddity`].
    pub oddities: Tally,
    /// Names that it uses and no rule covers.
    pub unruled: UnruledNames,
    /// Dumps and loads that came to no end, by [`AbortReason`].
    pub transfers_aborted: Tally,
    /// How much the index holds for it.
    pub gauges: WorkerGauges,
    /// The scheme of the store that was refused last because its space has another.
    pub refused_scheme: SchemeCell,
}

impl WorkerView {
    /// A view that has seen nothing yet, over the cell of the worker's fleet record.
    #[must_use]
    pub fn new(trust: Arc<TrustCell>) -> Self {
        Self {
            trust,
            counters: CounterSet::default(),
            undecodable: Tally::new(Reason::ALL.len()),
            oddities: Tally::new(Oddity::ALL.len()),
            unruled: UnruledNames::default(),
            transfers_aborted: Tally::new(AbortReason::ALL.len()),
            gauges: WorkerGauges::default(),
            refused_scheme: SchemeCell::default(),
        }
    }

    /// Undecodable batches by reason, only the reasons that occurred.
    pub fn undecodable_by_reason(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Reason::ALL
            .iter()
            .map(|reason| (reason.name(), self.undecodable.get(*reason as usize)))
            .filter(|(_, times)| *times > 0)
    }

    /// Oddities by name, only those that occurred.
    pub fn oddities_by_name(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Oddity::ALL
            .iter()
            .map(|oddity| (oddity.name(), self.oddities.get(*oddity as usize)))
            .filter(|(_, times)| *times > 0)
    }

    /// Dumps and loads that came to no end, by reason, only the reasons that occurred.
    pub fn transfers_aborted_by_reason(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        AbortReason::ALL
            .iter()
            .map(|reason| (reason.name(), self.transfers_aborted.get(*reason as usize)))
            .filter(|(_, times)| *times > 0)
    }
}

/// Counts by the number of a reason.
#[derive(Debug)]
pub struct Tally(Box<[AtomicU64]>);

impl Tally {
    fn new(reasons: usize) -> Self {
        Self((0..reasons).map(|_| AtomicU64::new(0)).collect())
    }

    /// Adds to a reason and answers with its count now.
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

/// How much the index holds for one worker, as of the end of its last turn. Each number is whole by
/// itself; two of them may be of neighbouring turns.
#[derive(Debug, Default)]
pub struct WorkerGauges {
    bound: AtomicU64,
    dormant: AtomicU64,
    by_tier: [AtomicU64; 4],
    choked: AtomicBool,
    waiting: AtomicU64,
}

impl WorkerGauges {
    /// Distinct blocks bound, in whatever tier.
    #[must_use]
    pub fn bound(&self) -> u64 {
        // Relaxed, here and below: statistics, no other memory hangs on them.
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

    /// Whether its events wait because the index gave memory up that is not yet free: something reads on and on.
    #[must_use]
    pub fn is_choked(&self) -> bool {
        self.choked.load(Ordering::Relaxed)
    }

    /// Messages that wait while the worker is dumped or loaded.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }

    pub(crate) fn set_waiting(&self, messages: usize) {
        self.waiting.store(messages as u64, Ordering::Relaxed);
    }

    pub(crate) fn set_choked(&self, choked: bool) {
        self.choked.store(choked, Ordering::Relaxed);
    }

    pub(super) fn set(&self, held: &WorkerBlocks) {
        self.bound.store(held.bound, Ordering::Relaxed);
        self.dormant.store(held.dormant, Ordering::Relaxed);
        for (gauge, blocks) in self.by_tier.iter().zip(held.by_tier) {
            gauge.store(blocks, Ordering::Relaxed);
        }
    }
}
