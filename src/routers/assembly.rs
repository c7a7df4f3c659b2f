//! The parts of one snapshot, until all have come.

use std::collections::BTreeMap;

use super::digest::Digest;
use super::protocol::SnapshotSection;
use super::values::{Incarnation, WorkerGauge};
use crate::ids::Worker;
use crate::limits::ORIGIN_WORKERS_MAX;

/// A snapshot of which some parts have come.
#[derive(Clone, Debug)]
pub(super) struct Assembly {
    incarnation: Incarnation,
    sequence: u64,
    parts: u32,
    stated: Digest,
    /// A bit for each part that has come.
    received: u128,
    gauges: BTreeMap<Worker, WorkerGauge>,
    digest: Digest,
}

/// Where an assembly stands after a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Parts are missing.
    Incomplete,
    /// All parts have come, and they add up to the stated digest.
    Complete,
    /// All parts have come, and they do not add up.
    Torn,
}

impl Assembly {
    /// A snapshot of which `section` is the first part to come.
    pub(super) const fn new(incarnation: Incarnation, section: &SnapshotSection) -> Self {
        Self {
            incarnation,
            sequence: section.sequence,
            parts: section.parts,
            stated: section.digest,
            received: 0,
            gauges: BTreeMap::new(),
            digest: Digest { sum: 0, count: 0 },
        }
    }

    /// Whether a part belongs to it. A request that the carrier repeats gets two answers, which may differ.
    pub(super) fn contains(&self, incarnation: Incarnation, section: &SnapshotSection) -> bool {
        let (own, stated) =
            ((self.sequence, self.parts, self.stated), (section.sequence, section.parts, section.digest));
        self.incarnation == incarnation && own == stated
    }

    pub(super) const fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// The last batch that it contains.
    pub(super) const fn sequence(&self) -> u64 {
        self.sequence
    }

    /// By worker; none is zero.
    pub(super) const fn gauges(&self) -> &BTreeMap<Worker, WorkerGauge> {
        &self.gauges
    }

    /// Takes a part that belongs to it. A part that comes twice counts once.
    pub(super) fn take(&mut self, section: &SnapshotSection) -> Progress {
        // The decoder admits no part beyond the bits of the word.
        let bit = 1_u128 << section.part;
        if self.received & bit == 0 {
            self.received |= bit;
            for row in section.gauges.iter().filter(|row| !row.gauge.is_zero()) {
                if self.gauges.len() >= ORIGIN_WORKERS_MAX {
                    return Progress::Torn;
                }
                self.digest.add(row.worker, &row.gauge);
                if let Some(before) = self.gauges.insert(row.worker, *row) {
                    self.digest.remove(row.worker, &before.gauge);
                }
            }
        }
        match (self.received.count_ones() == self.parts, self.digest == self.stated) {
            (false, _) => Progress::Incomplete,
            (true, true) => Progress::Complete,
            (true, false) => Progress::Torn,
        }
    }
}
