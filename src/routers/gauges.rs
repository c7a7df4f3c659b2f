//! The gauges of one incarnation of an origin, as far as they were received.

use std::collections::BTreeMap;

use super::assembly::Assembly;
use super::digest::Digest;
use super::protocol::{Batch, Heartbeat};
use super::values::{Gauge, Incarnation, WorkerGauge};
use crate::ids::Worker;
use crate::limits::{ORIGIN_WORKERS_MAX, ROUTER_BYTES};

/// Gauges held, with those of zeros.
const HELD_MAX: usize = 2 * ORIGIN_WORKERS_MAX;

// A node of the map is half full at least; a snapshot that arrives has as many gauges as workers.
const _: () = assert!(
    (2 * HELD_MAX + ORIGIN_WORKERS_MAX) * size_of::<(Worker, HeldGauge)>() <= ROUTER_BYTES as usize / 2,
    "of what is reserved for a router, the load has the other half"
);

/// A gauge, and what it is as of.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldGauge {
    pub(super) gauge: Gauge,
    /// The batch, or the last batch of the snapshot, that set it.
    sequence: u64,
    /// When it was first sent, on this router's clock, milliseconds.
    pub(super) sent_ms: u64,
}

/// There are more workers than [`ORIGIN_WORKERS_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooManyWorkers;

/// A copy of an origin's gauges. It may lack what was lost; [`OriginGauges::is_whole`] says whether it does.
#[derive(Clone, Debug)]
pub(super) struct OriginGauges {
    pub(super) incarnation: Incarnation,
    /// The last batch received, or contained in a snapshot.
    last: u64,
    /// The highest sequence number that the origin has named.
    heard: u64,
    /// The highest missing batch before `last`; 0 = none is missing.
    hole: u64,
    /// The last heartbeat.
    beat: u64,
    /// By worker. While a snapshot is awaited, gauges of zeros stay, so that it cannot bring back what a later batch
    /// took away.
    gauges: BTreeMap<Worker, HeldGauge>,
    digest: Digest,
}

impl OriginGauges {
    pub(super) const fn new(incarnation: Incarnation) -> Self {
        Self {
            incarnation,
            last: 0,
            heard: 0,
            hole: 0,
            beat: 0,
            gauges: BTreeMap::new(),
            digest: Digest { sum: 0, count: 0 },
        }
    }

    pub(super) const fn is_whole(&self) -> bool {
        self.hole == 0 && self.heard <= self.last
    }

    /// The last batch.
    pub(super) const fn last(&self) -> u64 {
        self.last
    }

    /// The highest sequence number that the origin has named.
    pub(super) const fn heard(&self) -> u64 {
        self.heard
    }

    pub(super) const fn digest(&self) -> Digest {
        self.digest
    }

    pub(super) fn get(&self, worker: Worker) -> Option<&HeldGauge> {
        self.gauges.get(&worker)
    }

    /// All gauges that are not zero.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Worker, &HeldGauge)> {
        self.gauges.iter().filter(|(_, held)| !held.gauge.is_zero()).map(|(worker, held)| (*worker, held))
    }

    /// Whether the number of a batch is above those before it.
    pub(super) const fn is_next(&self, sequence: u64) -> bool {
        sequence > self.last
    }

    /// Takes a batch with a number above those before it.
    pub(super) fn apply(&mut self, batch: &Batch, now_ms: u64, keeps_zeros: bool) -> Result<(), TooManyWorkers> {
        if batch.sequence > self.last + 1 {
            self.hole = batch.sequence - 1;
        }
        self.last = batch.sequence;
        self.heard = self.heard.max(self.last);
        for row in &batch.gauges {
            self.set(row, self.last, now_ms, keeps_zeros)?;
        }
        Ok(())
    }

    /// Says that a batch must come once more, although it was received.
    pub(super) fn forget_part_of(&mut self, sequence: u64) {
        self.hole = self.hole.max(sequence);
    }

    /// Takes a heartbeat. Whether it is new.
    pub(super) fn hear(&mut self, heartbeat: &Heartbeat) -> bool {
        if heartbeat.beat <= self.beat {
            return false;
        }
        self.beat = heartbeat.beat;
        self.heard = self.heard.max(heartbeat.sequence);
        true
    }

    /// Takes a snapshot: it replaces every gauge that no later batch has set. Answers with the workers whose gauges
    /// changed.
    pub(super) fn merge(&mut self, snapshot: &Assembly, now_ms: u64) -> Result<Vec<Worker>, TooManyWorkers> {
        let mut changed = Vec::new();
        let sequence = snapshot.sequence();
        let is_older = |held: &HeldGauge| held.sequence <= sequence;
        let gone = |(worker, held): (&Worker, &HeldGauge)| {
            (is_older(held) && !held.gauge.is_zero() && !snapshot.gauges().contains_key(worker)).then_some(*worker)
        };
        for worker in self.gauges.iter().filter_map(gone).collect::<Vec<_>>() {
            self.set(&WorkerGauge { worker, ..WorkerGauge::default() }, sequence, now_ms, false)?;
            changed.push(worker);
        }
        for row in snapshot.gauges().values() {
            let held = self.gauges.get(&row.worker);
            if held.is_some_and(|held| !is_older(held)) {
                continue;
            }
            if held.is_none_or(|held| held.gauge != row.gauge) {
                changed.push(row.worker);
                self.set(row, sequence, now_ms, true)?;
            }
        }
        if self.hole <= sequence {
            self.hole = 0;
        }
        self.last = self.last.max(sequence);
        self.heard = self.heard.max(self.last);
        Ok(changed)
    }

    /// Forgets the gauges of zeros: no snapshot is awaited.
    pub(super) fn forget_zeros(&mut self) {
        self.gauges.retain(|_, held| !held.gauge.is_zero());
    }

    fn set(&mut self, row: &WorkerGauge, sequence: u64, now_ms: u64, keeps_zeros: bool) -> Result<(), TooManyWorkers> {
        let before = if row.gauge.is_zero() && !keeps_zeros {
            self.gauges.remove(&row.worker)
        } else {
            let is_full = self.digest.count as usize >= ORIGIN_WORKERS_MAX && !row.gauge.is_zero();
            if (is_full || self.gauges.len() >= HELD_MAX) && !self.gauges.contains_key(&row.worker) {
                return Err(TooManyWorkers);
            }
            let sent_ms = now_ms.saturating_sub(row.age_ms.into());
            self.gauges.insert(row.worker, HeldGauge { gauge: row.gauge, sequence, sent_ms })
        };
        if let Some(before) = before {
            self.digest.remove(row.worker, &before.gauge);
        }
        self.digest.add(row.worker, &row.gauge);
        Ok(())
    }
}
