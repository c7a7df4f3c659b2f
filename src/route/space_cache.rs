//! What a core keeps of a space's workers from one decision to the next, so that it reads again only what is another.
//!
//! Workers stand in rows, as a decision is explained and recorded by, and once more in [`WorkerColumns`], as it is calculated
//! by. Loads are read again where one changed or passes with time; trust where any changed; the rest with every fleet
//! table. What depends on the prompt is written into the columns, and into a row when somebody looks at it.

use std::sync::Arc;

use super::cost::{PoolFacts, cost, prefers};
use super::observation::{Observation, RequestFacts, WorkerFacts};
use super::observe::View;
use super::policy::Policy;
use super::policy::{CostModel, Mode};
use crate::fleet::{TrustCell, WorkerRecord, WorkerState, trust_changes};
use crate::ids::{EventSeq, ShardId, SpaceId, TierBlocks, WorkerIndex, WorkerSlot};
use crate::index::Depths;
use crate::load::{ActiveDepths, ChangesSeen, Load, LoadStability};
use crate::trust::{Trust, TrustLevel, TrustReason};

/// A space's workers as they were last found.
#[derive(Debug, Default)]
pub(super) struct SpaceCache {
    /// Whose rows say all where they [are whole](SpaceCache::materialize).
    pub(super) observation: Observation,
    pub(super) columns: WorkerColumns,
    /// Whether the columns say of every worker what a plain cost depends on.
    pub(super) columns_cover_cost: bool,
    /// Where to read of each worker, by row.
    sources: Vec<Source>,
    /// As of which batch each worker's trust is, by row.
    as_of: Vec<(Option<EventSeq>, u64)>,
    /// The row of each place of the table; `NO_ROW` where it is none of the space's.
    rows: Vec<u32>,
    /// The fleet table that the rows are of; `None` = nothing is kept.
    fleet_version: Option<u64>,
    /// When it was last looked.
    now_ns: u64,
    loads_seen: ChangesSeen,
    /// Rows whose load passes with time, each once.
    time_dependent: Vec<u32>,
    /// Room for the places whose loads are to be read again.
    changed: Vec<u32>,
    /// Rows of workers that are out, or back off.
    ineligible: usize,
    /// The changes of trust that the rows show; `None` = they show what only one look-up found.
    trust_changes: Option<u64>,
    /// No worker is believed less.
    level_min: TrustLevel,
    /// Whether some row says that it suits a request, or not.
    has_constraints: bool,
    /// Rows of workers that run some of the prompt.
    active: Vec<u32>,
    /// Whether the rows say what the columns say of the prompt.
    is_whole: bool,
}

/// A place of the table that has no row.
const NO_ROW: u32 = u32::MAX;

/// Where to read of a worker.
#[derive(Debug)]
struct Source {
    trust: Arc<TrustCell>,
    shard: ShardId,
    slot: WorkerSlot,
    is_time_dependent: bool,
}

impl SpaceCache {
    /// Brings what does not depend on a prompt up to date. To be called before the index is read: what that says is then
    /// at least as new.
    pub(super) fn refresh(&mut self, view: &View<'_>, space: SpaceId) {
        if self.fleet_version == Some(view.fleet.version) && self.now_ns <= view.now_ns {
            self.refresh_loads(view);
            self.now_ns = view.now_ns;
            self.refresh_trust();
        } else {
            self.rebuild(view, space);
        }
        (self.is_whole, self.columns_cover_cost) = (false, true);
        for (as_of, source) in self.as_of.iter_mut().zip(&self.sources) {
            *as_of = source.trust.as_of();
        }
    }

    /// Reads everything.
    fn rebuild(&mut self, view: &View<'_>, space: SpaceId) {
        (self.fleet_version, self.now_ns) = (Some(view.fleet.version), view.now_ns);
        self.sources.clear();
        self.time_dependent.clear();
        self.active.clear();
        self.rows.clear();
        let workers = &mut self.observation.workers;
        workers.clear();
        for record in view.fleet.workers_of(space) {
            let place = record.index.place();
            self.rows.resize(place, NO_ROW);
            self.rows.push(workers.len() as u32);
            workers.push(facts(record));
            let (trust, shard, slot) = (Arc::clone(&record.trust), record.shard, record.slot);
            self.sources.push(Source { trust, shard, slot, is_time_dependent: false });
        }
        let count = workers.len();
        self.ineligible = workers.iter().filter(|facts| is_ineligible(facts)).count();
        self.columns.reset(count);
        self.as_of.clear();
        self.as_of.resize(count, (None, 0));
        self.has_constraints = false;
        self.loads_seen = view.loads.changes_seen();
        (0..count).for_each(|row| self.read_load(view, row));
        self.trust_changes = None;
        self.refresh_trust();
    }

    /// Reads the loads again that are another, or may be.
    fn refresh_loads(&mut self, view: &View<'_>) {
        let mut changed = std::mem::take(&mut self.changed);
        changed.clear();
        for row in self.time_dependent.drain(..) {
            self.sources[row as usize].is_time_dependent = false;
            changed.push(self.observation.workers[row as usize].index.place() as u32);
        }
        if view.loads.changed_since(&mut self.loads_seen, &mut changed) {
            for place in &changed {
                if let Some(row) = self.rows.get(*place as usize).filter(|row| **row != NO_ROW) {
                    self.read_load(view, *row as usize);
                }
            }
        } else {
            (0..self.sources.len()).for_each(|row| self.read_load(view, row));
        }
        self.changed = changed;
    }

    fn read_load(&mut self, view: &View<'_>, row: usize) {
        let (facts, source) = (&mut self.observation.workers[row], &mut self.sources[row]);
        self.ineligible -= usize::from(is_ineligible(facts));
        let time_dependent = view.loads.read_into(facts.index, view.now_ns, &mut facts.load);
        facts.backing_off = facts.load.back_off_until_ns > view.now_ns;
        self.ineligible += usize::from(is_ineligible(facts));
        if time_dependent == LoadStability::TimeDependent && !source.is_time_dependent {
            source.is_time_dependent = true;
            self.time_dependent.push(row as u32);
        }
        self.columns.prefill_tokens[row] = facts.load.prefill_tokens;
        self.columns.decode_blocks[row] = facts.load.decode_blocks;
        self.columns.requests[row] = facts.load.requests;
    }

    /// Reads all trust again, if any is another.
    fn refresh_trust(&mut self) {
        let changes = trust_changes();
        if self.trust_changes == Some(changes) {
            return;
        }
        self.trust_changes = Some(changes);
        for (facts, source) in self.observation.workers.iter_mut().zip(&self.sources) {
            facts.trust = source.trust.load();
        }
        let levels = self.observation.workers.iter().map(|facts| facts.trust.level);
        self.level_min = levels.min().unwrap_or(TrustLevel::Exact);
    }

    /// The rows, to write into them how the workers suit a request; `None` if it takes every worker as it is, and the
    /// rows say so already.
    pub(super) fn rows_to_constrain(&mut self, has_constraints: bool) -> Option<&mut [WorkerFacts]> {
        let said_before = std::mem::replace(&mut self.has_constraints, has_constraints);
        (has_constraints || said_before).then_some(&mut self.observation.workers[..])
    }

    /// Takes over how far each worker runs the prompt already; nobody does where that was not looked up.
    pub(super) fn set_active_depths(&mut self, depths: Option<&ActiveDepths>) {
        for row in self.active.drain(..) {
            self.columns.active_depth_blocks[row as usize] = 0;
        }
        for (index, depth) in depths.into_iter().flat_map(ActiveDepths::iter) {
            if let Some(row) = self.row(index) {
                self.columns.active_depth_blocks[row] = depth;
                self.active.push(row as u32);
            }
        }
    }

    /// A worker, as far as it does not depend on the prompt.
    pub(super) fn of(&self, index: WorkerIndex) -> Option<&WorkerFacts> {
        self.row(index).map(|row| &self.observation.workers[row])
    }

    /// The row of a worker, not of another one in its place.
    fn row(&self, index: WorkerIndex) -> Option<usize> {
        let row = *self.rows.get(index.place())? as usize;
        self.observation.workers.get(row).filter(|facts| facts.index == index).map(|_| row)
    }

    /// Nobody holds anything of the prompt.
    pub(super) fn clear_overlaps(&mut self) {
        self.columns.device.fill(0);
    }

    /// Takes over what each worker holds of the prompt.
    pub(super) fn set_overlaps(&mut self, depths: &Depths) {
        let workers = self.sources.iter().map(|source| (source.shard, source.slot));
        depths.devices(workers, &mut self.columns.device);
        if depths.has_lower_tiers() {
            self.materialize();
            self.columns_cover_cost = false;
            for (facts, source) in self.observation.workers.iter_mut().zip(&self.sources) {
                facts.overlap = depths.of(source.shard, source.slot);
            }
        }
    }

    /// Lessens the trust of workers that may have been emptied since it was read, in time for the look-up that is just
    /// over; of all, if that was `contended`. Says whether anybody's answer may mix several states.
    pub(super) fn mark_contended(&mut self, contended: bool) -> bool {
        if !contended && self.trust_changes == Some(trust_changes()) {
            return false;
        }
        // What this look-up makes of it is not to be kept.
        (self.trust_changes, self.level_min) = (None, TrustLevel::None);
        let mut any = contended;
        for (facts, source) in self.observation.workers.iter_mut().zip(&self.sources) {
            if let Some(later) = source.trust.changed_since(&facts.trust) {
                facts.trust = facts.trust.meet(later);
            }
            any |= facts.trust.reasons.contains(TrustReason::ReadContended);
            if contended {
                facts.trust.reasons.insert(TrustReason::ReadContended);
                facts.trust.level = facts.trust.level.min(TrustLevel::Unproven);
            }
        }
        any
    }

    /// The rows, whole, to write into them what is known for one request alone.
    pub(super) fn overlay(&mut self) -> &mut [WorkerFacts] {
        self.materialize();
        self.columns_cover_cost = false;
        (self.trust_changes, self.level_min) = (None, TrustLevel::None);
        &mut self.observation.workers
    }

    /// Writes into every row what the columns say of the prompt.
    pub(super) fn materialize(&mut self) {
        if !self.is_whole {
            (0..self.sources.len()).for_each(|row| self.materialize_row(row));
            self.is_whole = true;
        }
    }

    /// The same for some rows.
    pub(super) fn materialize_rows(&mut self, rows: impl Iterator<Item = u32>) {
        if !self.is_whole {
            rows.for_each(|row| self.materialize_row(row as usize));
        }
    }

    fn materialize_row(&mut self, row: usize) {
        let facts = &mut self.observation.workers[row];
        facts.overlap = TierBlocks { device: self.columns.device[row], ..TierBlocks::default() };
        facts.active_depth_blocks = self.columns.active_depth_blocks[row];
        facts.shared_blocks = 0;
        (facts.trust.as_of_seq, facts.trust.as_of_unix_ms) = self.as_of[row];
    }

    /// Whether no rule can take anybody out of the running.
    pub(super) fn admits_all(&self, policy: &Policy) -> bool {
        let is_fit = self.ineligible == 0 && self.level_min >= policy.trust_min;
        is_fit && !self.has_constraints && !policy.busy.any()
    }

    /// Whether what every worker holds is credited by a policy, and the columns say all that it is.
    pub(super) fn cover_credits(&self, policy: &Policy) -> bool {
        self.columns_cover_cost && self.level_min >= policy.credit_trust_min
    }
}

/// Whether a worker takes no requests while others can.
const fn is_ineligible(facts: &WorkerFacts) -> bool {
    facts.backing_off || !matches!(facts.state, WorkerState::Joining | WorkerState::Ready)
}

/// A worker as its record is.
fn facts(record: &WorkerRecord) -> WorkerFacts {
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

/// Values of a space's workers, each in table order.
#[derive(Debug, Default)]
pub(super) struct WorkerColumns {
    /// Blocks of the prompt in device memory.
    pub(super) device: Vec<u32>,
    /// Leading blocks of the prompt that the worker runs already.
    pub(super) active_depth_blocks: Vec<u32>,
    /// The worker's load.
    pub(super) prefill_tokens: Vec<u64>,
    pub(super) decode_blocks: Vec<u64>,
    pub(super) requests: Vec<u64>,
}

impl WorkerColumns {
    /// Makes them so many idle workers that hold nothing.
    pub(super) fn reset(&mut self, workers: usize) {
        let Self { device, active_depth_blocks, prefill_tokens, decode_blocks, requests } = self;
        for column in [device, active_depth_blocks] {
            column.clear();
            column.resize(workers, 0);
        }
        for column in [prefill_tokens, decode_blocks, requests] {
            column.clear();
            column.resize(workers, 0);
        }
    }

    /// Whether these values are all that a cost depends on, where every worker is believed, holds blocks in device memory
    /// alone, and no cache is shared.
    pub(super) fn cover_costs(policy: &Policy, request: &RequestFacts) -> bool {
        let is_in_blocks = policy.mode.cost_model() == CostModel::Blocks;
        let is_weighed = policy.capability || policy.credit_decay > 0.0 || prefers(request);
        is_in_blocks && !is_weighed && policy.track_active_blocks
    }

    /// Overwrites `costs` with every worker's, where [`WorkerColumns::cover_costs`].
    pub(super) fn costs(&self, policy: &Policy, request: &RequestFacts, costs: &mut Vec<f64>) {
        // As they are; but now the compiler knows it, and leaves out of the one function what they switch off.
        let policy = Policy {
            mode: Mode::Kv,
            capability: false,
            credit_decay: 0.0,
            track_active_blocks: true,
            credit_trust_min: TrustLevel::None,
            ..*policy
        };
        let request = RequestFacts { prefers_taints: false, shared_blocks: 0, ..*request };
        match policy.track_prefill_tokens {
            true => self.fill(&Policy { track_prefill_tokens: true, ..policy }, &request, costs),
            false => self.fill(&Policy { track_prefill_tokens: false, ..policy }, &request, costs),
        }
    }

    #[inline(always)]
    fn fill(&self, policy: &Policy, request: &RequestFacts, costs: &mut Vec<f64>) {
        let pool = PoolFacts::default();
        costs.clear();
        costs.resize(self.device.len(), 0.0);
        let prompts = self.device.iter().zip(&self.active_depth_blocks);
        let loads = self.prefill_tokens.iter().zip(&self.decode_blocks).zip(&self.requests);
        for (to, ((device, depth), ((prefill_tokens, decode_blocks), requests))) in
            costs.iter_mut().zip(prompts.zip(loads))
        {
            let facts = WorkerFacts {
                overlap: TierBlocks { device: *device, ..TierBlocks::default() },
                active_depth_blocks: *depth,
                load: Load {
                    prefill_tokens: *prefill_tokens,
                    decode_blocks: *decode_blocks,
                    requests: *requests,
                    ..Load::default()
                },
                ..WorkerFacts::default()
            };
            *to = cost(policy, request, &facts, &pool, 0).cost;
        }
    }
}
