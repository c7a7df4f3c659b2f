//! The workers of one space as a serving thread last read them, so that the next decision reads again only what
//! changed.
//!
//! | facts | read again |
//! |---|---|
//! | of the fleet table | when its version changes |
//! | load | of workers whose load changed or depends on time |
//! | trust | of all workers, when that of any worker changed |
//! | the batch that trust speaks of, overlap, active depth | for every decision |
//! | lower tiers, shared blocks, constraints | for every decision that has them; empty otherwise |
//!
//! Only this file writes to the cached columns. A look-up that changes the trust of a worker (contention, a prediction)
//! marks the cached trust as out of date, so that the next decision reads it again.

use std::sync::Arc;

use super::observation::{ConstraintFacts, Observation, WorkerFacts};
use super::read_observation::View;
use super::request_facts::RequestFacts;
use crate::fleet::{TrustCell, WorkerRecord, trust_changes};
use crate::ids::{LocalHash, ShardId, SpaceId, TierBlocks, WorkerIndex, WorkerSlot};
use crate::index::Depths;
use crate::load::{ActiveDepths, ChangesSeen, Load, LoadStability};
use crate::protocol::{MatchStatus, ReplyNotes};
use crate::trust::{Trust, TrustLevel, TrustReason};

/// The cached observation of a space.
#[derive(Debug, Default)]
pub(super) struct SpaceCache {
    observation: Observation,
    /// Where each worker's facts are read, by row.
    sources: Vec<Source>,
    /// By place in the fleet table, the worker there and its row; any worker and `NO_ROW` for a place of another space.
    rows: Vec<(WorkerIndex, u32)>,
    /// The fleet table that the rows come from; `None` = nothing is cached.
    fleet_version: Option<u64>,
    /// The time of the last decision.
    now_ns: u64,
    loads_seen: ChangesSeen,
    /// Rows whose load depends on time, each once.
    time_dependent: Vec<u32>,
    /// A buffer for the places whose loads are to be read again.
    changed: Vec<u32>,
    /// The count of trust changes that the rows show; `None` = one look-up changed them.
    trust_seen: Option<u64>,
}

/// A place in the fleet table without a row.
const NO_ROW: u32 = u32::MAX;

/// Where one worker's facts are read.
#[derive(Debug)]
struct Source {
    trust: Arc<TrustCell>,
    shard: ShardId,
    slot: WorkerSlot,
    is_time_dependent: bool,
}

impl SpaceCache {
    /// The facts of the last request and of every worker.
    pub(super) const fn observation(&self) -> &Observation {
        &self.observation
    }

    /// Begins the observation of another request. The workers stay until [`SpaceCache::refresh`].
    pub(super) fn begin(&mut self, request: RequestFacts, notes: ReplyNotes, fleet_version: u64) {
        self.observation.request = request;
        self.observation.notes = notes;
        self.observation.matched = MatchStatus::Matched;
        self.observation.request_blocks = 0;
        self.observation.fleet_version = fleet_version;
        self.observation.index_epoch = 0;
    }

    /// Adds a remark on what was read.
    pub(super) fn note(&mut self, note: ReplyNotes) {
        self.observation.notes.insert(note);
    }

    /// Brings the workers up to date, without what depends on the prompt, and without loads: call
    /// [`SpaceCache::refresh_loads`] later. Call this before the index is read: the index is then at least as new as the
    /// trust.
    pub(super) fn refresh(&mut self, view: &View<'_>, space: SpaceId) {
        if !self.is_of(view) {
            self.rebuild(view, space);
        }
        self.refresh_trust();
        let workers = &mut self.observation.workers;
        workers.clear_sparse();
        for (as_of, source) in workers.as_of_mut().iter_mut().zip(&self.sources) {
            *as_of = source.trust.as_of();
        }
    }

    /// Reads the fleet table and every load.
    fn rebuild(&mut self, view: &View<'_>, space: SpaceId) {
        (self.fleet_version, self.now_ns) = (Some(view.fleet.version), view.now_ns);
        self.sources.clear();
        self.time_dependent.clear();
        self.rows.clear();
        let workers = &mut self.observation.workers;
        workers.clear();
        for record in view.fleet.workers_of(space) {
            self.rows.resize(record.index.place(), (record.index, NO_ROW));
            self.rows.push((record.index, workers.len() as u32));
            workers.push(&facts_of(record));
            let (trust, shard, slot) = (Arc::clone(&record.trust), record.shard, record.slot);
            self.sources.push(Source { trust, shard, slot, is_time_dependent: false });
        }
        self.loads_seen = view.loads.changes_seen();
        (0..self.sources.len()).for_each(|row| self.read_load(view, row));
        self.trust_seen = None;
    }

    /// Whether the workers are those of this fleet table, as of a time that is not later than the view's.
    pub(super) fn is_of(&self, view: &View<'_>) -> bool {
        self.fleet_version == Some(view.fleet.version) && self.now_ns <= view.now_ns
    }

    /// Reads the loads again that changed, or that depend on time. Call it only if [`SpaceCache::is_of`] the view.
    pub(super) fn refresh_loads(&mut self, view: &View<'_>) {
        self.now_ns = view.now_ns;
        let mut changed = std::mem::take(&mut self.changed);
        changed.clear();
        for row in self.time_dependent.drain(..) {
            self.sources[row as usize].is_time_dependent = false;
            changed.push(self.observation.workers.index(row as usize).place() as u32);
        }
        if view.loads.changed_since(&mut self.loads_seen, &mut changed) {
            for place in &changed {
                if let Some((_, row)) = self.rows.get(*place as usize).filter(|(_, row)| *row != NO_ROW) {
                    self.read_load(view, *row as usize);
                }
            }
        } else {
            (0..self.sources.len()).for_each(|row| self.read_load(view, row));
        }
        self.changed = changed;
    }

    /// Fetches ahead what [`SpaceCache::refresh_loads`] will read, and the prompts in flight that begin as this one.
    #[inline]
    pub(super) fn prefetch_loads(&self, view: &View<'_>, space: SpaceId, locals: &[LocalHash]) {
        view.loads.prefetch(self.loads_seen, space, locals);
    }

    fn read_load(&mut self, view: &View<'_>, row: usize) {
        let (workers, source) = (&mut self.observation.workers, &mut self.sources[row]);
        let mut load = Load::default();
        let stability = view.loads.read_into(workers.index(row), view.now_ns, &mut load);
        workers.set_load(row, &load, load.back_off_until_ns > view.now_ns);
        if stability == LoadStability::TimeDependent && !source.is_time_dependent {
            source.is_time_dependent = true;
            self.time_dependent.push(row as u32);
        }
    }

    /// Reads the trust of all workers again, if that of any changed.
    fn refresh_trust(&mut self) {
        let changes = trust_changes();
        if self.trust_seen != Some(changes) {
            self.trust_seen = Some(changes);
            for (row, source) in self.sources.iter().enumerate() {
                self.observation.workers.set_trust(row, &source.trust.load());
            }
        }
    }

    /// The version of a worker's load when it was read; 0 for a worker of no row.
    pub(super) fn load_version_of(&self, index: WorkerIndex) -> u64 {
        row_of(&self.rows, index).map_or(0, |row| self.observation.workers.load_version(row))
    }

    /// Notes how each worker meets the constraints of the request.
    pub(super) fn constrain(&mut self, constraints: impl Iterator<Item = ConstraintFacts>) {
        self.observation.workers.set_constraints(constraints);
    }

    /// The rows to which a look-up writes how many leading blocks of the prompt each worker already runs.
    pub(super) fn active_rows(&mut self) -> ActiveRows<'_> {
        ActiveRows { rows: &self.rows, blocks: self.observation.workers.active_depths_mut() }
    }

    /// Notes that the prompt cannot be compared with the index.
    pub(super) fn set_unmatchable(&mut self) {
        self.observation.matched = MatchStatus::Unmatchable;
        self.note(ReplyNotes::SCHEME_UNKNOWN);
        self.active_rows().clear();
        self.clear_overlaps();
    }

    /// Notes that no worker holds anything of the prompt.
    pub(super) fn clear_overlaps(&mut self) {
        self.observation.workers.device_mut().fill(0);
        self.observation.workers.set_lower_tiers(std::iter::empty());
    }

    /// Notes how many whole blocks of the prompt are looked up.
    pub(super) const fn set_request_blocks(&mut self, blocks: u32) {
        self.observation.request_blocks = blocks;
    }

    /// Notes what each worker holds of the prompt, by a look-up of the index at this epoch.
    pub(super) fn set_overlaps(&mut self, depths: &Depths, epoch: u64) {
        self.observation.index_epoch = epoch;
        let workers = self.sources.iter().map(|source| (source.shard, source.slot));
        depths.devices(workers.clone(), self.observation.workers.device_mut());
        if depths.has_lower_tiers() {
            let overlaps = workers.map(|(shard, slot)| depths.of(shard, slot));
            self.observation.workers.set_lower_tiers(overlaps);
        }
    }

    /// Lowers the trust of workers that may have lost blocks between the reading of trust and the end of the look-up;
    /// of all workers, if the look-up was `contended`. Returns whether any worker's overlap may mix several states.
    pub(super) fn mark_contended(&mut self, contended: bool) -> bool {
        if !contended && self.trust_seen == Some(trust_changes()) {
            return false;
        }
        self.trust_seen = None;
        let mut any = contended;
        for (row, source) in self.sources.iter().enumerate() {
            let mut trust = self.observation.workers.trust(row);
            if let Some(later) = source.trust.changed_since(&trust) {
                trust = trust.meet(later);
            }
            any |= trust.reasons.contains(TrustReason::ReadContended);
            if contended {
                trust.reasons.insert(TrustReason::ReadContended);
                trust.level = trust.level.min(TrustLevel::Unproven);
            }
            self.observation.workers.set_trust(row, &trust);
        }
        any
    }

    /// Replaces what workers hold by a prediction, which may be `contended`. `predicted` gives the blocks of a worker
    /// that publishes no events, by row; `None` leaves the worker as it is.
    pub(super) fn predict(&mut self, contended: bool, predicted: impl Iterator<Item = Option<u32>>) {
        self.trust_seen = None;
        let workers = &mut self.observation.workers;
        for (row, device) in predicted.enumerate() {
            let Some(device) = device else { continue };
            let mut trust = workers.trust(row);
            trust.level = TrustLevel::Predicted;
            trust.reasons.remove(TrustReason::NoEvents);
            trust.reasons.insert(TrustReason::OwnDecisions);
            if contended {
                trust.reasons.insert(TrustReason::ReadContended);
            }
            workers.set_trust(row, &trust);
            workers.set_overlap(row, TierBlocks { device, ..TierBlocks::default() });
        }
    }

    /// Notes the blocks of a shared cache: `beyond` gives those behind a number of leading blocks.
    pub(super) fn set_shared_blocks(&mut self, beyond: impl Fn(u32) -> u32) {
        self.observation.request.shared_blocks = beyond(0);
        self.observation.workers.set_shared_blocks(beyond);
    }

    /// Notes the space's round-robin counter.
    pub(super) const fn set_round_robin_counter(&mut self, counter: u64) {
        self.observation.request.round_robin_counter = counter;
    }
}

/// The active depths of a space's workers, by row.
pub(super) struct ActiveRows<'a> {
    rows: &'a [(WorkerIndex, u32)],
    blocks: &'a mut [u32],
}

impl ActiveDepths for ActiveRows<'_> {
    fn clear(&mut self) {
        self.blocks.fill(0);
    }

    #[inline]
    fn set(&mut self, worker: WorkerIndex, blocks: u32) {
        if let Some(row) = row_of(self.rows, worker) {
            self.blocks[row] = blocks;
        }
    }
}

/// The row of a worker; `None` if another worker has its place.
#[inline]
fn row_of(rows: &[(WorkerIndex, u32)], index: WorkerIndex) -> Option<usize> {
    let (worker, row) = *rows.get(index.place())?;
    (worker == index && row != NO_ROW).then_some(row as usize)
}

/// An idle worker, as its record describes it.
fn facts_of(record: &WorkerRecord) -> WorkerFacts {
    WorkerFacts {
        index: record.index,
        worker: record.worker,
        trust: Trust::default(),
        state: record.state,
        device_class: record.device_class,
        weight: record.weight,
        capacity_blocks: record.capacity_blocks,
        batched_tokens_max: record.batched_tokens_max,
        ..WorkerFacts::default()
    }
}
