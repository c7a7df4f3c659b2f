//! What one decision is made from: the facts of the request and of every worker, read once and stored as plain values.
//!
//! [`WorkerColumns`] is the only representation of the workers. Rules, costs, explanations and the journal read the
//! same columns, so no copy of a fact can be stale.

use super::policy::Policy;
use super::request_facts::RequestFacts;
use crate::columns::{Column, Word, column};
use crate::engine_law::PrefillLaw;
use crate::ids::{EventSeq, TierBlocks, Worker, WorkerIndex};
use crate::load::{Load, PrefillWork, RecentWork};
use crate::protocol::{DeviceClass, EngineLoad, MatchStatus, ReplyNotes, WorkerState};
use crate::trust::{Trust, TrustLevel, TrustReasons};

/// The facts of one worker: one row of [`WorkerColumns`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerFacts {
    /// The worker's place in the fleet table of the observation's version.
    pub index: WorkerIndex,
    /// The worker's id and rank.
    pub worker: Worker,
    /// Blocks of the prompt that the worker holds, by tier; zero if the prompt could not be matched.
    pub overlap: TierBlocks,
    /// Leading blocks of the prompt that the worker's requests in flight already run; 0 = none, or unknown.
    pub active_depth_blocks: u32,
    /// Blocks of the prompt in a shared cache, beyond those in the worker's device memory.
    pub shared_blocks: u32,
    /// The worker's load.
    pub load: Load,
    /// Trust in the overlap.
    pub trust: Trust,
    /// The worker's state.
    pub state: WorkerState,
    /// The class of the worker's device.
    pub device_class: DeviceClass,
    /// Throughput relative to a CPU worker, which has 1.
    pub weight: f64,
    /// KV blocks that the device can hold; 0 = unknown.
    pub capacity_blocks: u64,
    /// Tokens that the worker batches in one step.
    pub batched_tokens_max: u64,
    /// Whether the request has no allow-list, or the list names the worker.
    pub allowed: bool,
    /// Whether the worker failed a gateway so recently that it gets no requests.
    pub backing_off: bool,
    /// Whether the request has no pin, or the pin names the worker.
    pub is_pinned: bool,
    /// Whether the worker advertises the request's adapter.
    pub has_adapter: bool,
    /// Whether the worker has every label that the request requires.
    pub has_required_taints: bool,
    /// Sum of the request's weights of the worker's labels.
    pub taint_weight: f64,
}

/// An idle worker without blocks, which no rule removes.
impl Default for WorkerFacts {
    fn default() -> Self {
        Self {
            index: WorkerIndex::default(),
            worker: Worker::default(),
            overlap: TierBlocks::default(),
            active_depth_blocks: 0,
            shared_blocks: 0,
            load: Load::default(),
            trust: Trust::default(),
            state: WorkerState::Ready,
            device_class: DeviceClass::default(),
            weight: 1.0,
            capacity_blocks: 0,
            batched_tokens_max: 0,
            allowed: true,
            backing_off: false,
            is_pinned: true,
            has_adapter: false,
            has_required_taints: true,
            taint_weight: 0.0,
        }
    }
}

impl WorkerFacts {
    /// The values that a journal records. No decision depends on when a worker's trust changed, or on how many requests its
    /// engine reports: both are left out.
    pub(crate) const COLUMNS: &'static [Column<Self>] = &[
        column!("index": index),
        column!("worker_id": worker.id),
        column!("dp_rank": worker.rank),
        column!("device": overlap.device),
        column!("host": overlap.host),
        column!("disk": overlap.disk),
        column!("external": overlap.external),
        column!("active_depth_blocks": active_depth_blocks),
        column!("shared_blocks": shared_blocks),
        column!("prefill_tokens": load.prefill_tokens),
        column!("decode_blocks": load.decode_blocks),
        column!("requests": load.requests),
        column!("load_version": load.version),
        column!("prefill_queued_ns": load.work.queued_ns),
        column!("prefill_running_ns": load.work.running_ns),
        column!("prefill_since_ns": load.work.since_ns),
        column!("prefill_base_s": load.law.base_s),
        column!("prefill_token_s": load.law.token_s),
        column!("prefill_attention_s": load.law.attention_s),
        column!("recent_prefill_share": load.recent.prefill_share),
        column!("recent_at_ms": load.recent.at_ms),
        column!("recent_decode_s": load.recent.decode_s),
        column!("recent_decodes": load.recent.decodes),
        Column {
            name: "engine_prefill_tokens",
            get: |facts| facts.load.engine.map(|report| report.prefill_tokens).to_word(),
            set: |facts, word| set_reported(facts, word, |report, tokens| report.prefill_tokens = tokens),
        },
        Column {
            name: "engine_decode_blocks",
            get: |facts| facts.load.engine.map(|report| report.decode_blocks).to_word(),
            set: |facts, word| set_reported(facts, word, |report, blocks| report.decode_blocks = blocks),
        },
        Column {
            name: "engine_kv_usage_millionths",
            get: |facts| facts.load.engine.map(|report| report.kv_usage_millionths).to_word(),
            set: |facts, word| set_reported(facts, word, |report, usage| report.kv_usage_millionths = usage),
        },
        column!("trust": trust.level),
        column!("reasons": trust.reasons),
        column!("as_of_seq": trust.as_of_seq),
        column!("state": state),
        column!("device_class": device_class),
        column!("weight": weight),
        column!("capacity_blocks": capacity_blocks),
        column!("batched_tokens_max": batched_tokens_max),
        column!("allowed": allowed),
        column!("backing_off": backing_off),
        column!("is_pinned": is_pinned),
        column!("has_adapter": has_adapter),
        column!("has_required_taints": has_required_taints),
        column!("taint_weight": taint_weight),
    ];
}

/// Sets one number of an engine's own load report, if the engine reported it.
fn set_reported<T: Word>(facts: &mut WorkerFacts, word: u64, set: fn(&mut EngineLoad, T)) -> Option<()> {
    if let Some(value) = Option::from_word(word)? {
        set(facts.load.engine.get_or_insert_default(), value);
    }
    Some(())
}

/// Facts of a worker that come from its record in the fleet table.
#[derive(Clone, Copy, Debug)]
struct RecordFacts {
    index: WorkerIndex,
    worker: Worker,
    device_class: DeviceClass,
    weight: f64,
    capacity_blocks: u64,
    batched_tokens_max: u64,
}

/// The part of a worker's load that costs do not read.
#[derive(Clone, Copy, Debug)]
struct LoadDetails {
    back_off_until_ns: u64,
    engine: Option<EngineLoad>,
    version: u64,
}

/// The part of a worker's trust that rules and costs do not read.
#[derive(Clone, Copy, Debug)]
struct TrustDetails {
    reasons: TrustReasons,
    since_unix_ms: u64,
}

/// The batch that a worker's trust speaks of, and when that batch came.
pub(super) type AsOf = (Option<EventSeq>, u64);

/// Blocks of the prompt below device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct LowerTiers {
    host: u32,
    disk: u32,
    external: u32,
}

/// How a worker meets the constraints of a request. The default is that of a request without constraints.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ConstraintFacts {
    pub(super) allowed: bool,
    pub(super) is_pinned: bool,
    pub(super) has_adapter: bool,
    pub(super) has_required_taints: bool,
    pub(super) taint_weight: f64,
}

impl Default for ConstraintFacts {
    fn default() -> Self {
        Self { allowed: true, is_pinned: true, has_adapter: false, has_required_taints: true, taint_weight: 0.0 }
    }
}

/// The facts of a worker that every rule but the busy one reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct RuleFacts {
    pub(super) worker: Worker,
    pub(super) state: WorkerState,
    pub(super) backing_off: bool,
    pub(super) trust_level: TrustLevel,
    pub(super) constraints: ConstraintFacts,
}

/// A column that most requests leave at its default: while it is empty, every row has the default value.
#[derive(Clone, Debug, Default)]
struct Sparse<T>(Vec<T>);

impl<T: Copy + Default + PartialEq> Sparse<T> {
    /// Whether every row has the default value. May be false for a column that was written with defaults.
    const fn is_default(&self) -> bool {
        self.0.is_empty()
    }

    #[inline(always)]
    fn get(&self, row: usize) -> T {
        self.0.get(row).copied().unwrap_or_default()
    }

    /// Writes one of `rows` rows.
    fn set(&mut self, row: usize, rows: usize, value: T) {
        if self.is_default() && value == T::default() {
            return;
        }
        if self.is_default() {
            self.0.resize(rows, T::default());
        }
        self.0[row] = value;
    }

    /// Appends a value behind `rows` rows.
    fn push(&mut self, rows: usize, value: T) {
        if !self.is_default() || value != T::default() {
            self.0.resize(rows, T::default());
            self.0.push(value);
        }
    }

    /// Writes every row, or none if `values` has none.
    fn refill(&mut self, values: impl Iterator<Item = T>) {
        self.0.clear();
        self.0.extend(values);
    }

    fn copy_from(&mut self, other: &Self) {
        self.0.clear();
        self.0.extend_from_slice(&other.0);
    }
}

/// The workers of a space: one column for each fact, one row for each worker, in table order.
///
/// The columns that costs read are separate arrays, so that a processor computes several costs at once.
/// [`WorkerColumns::row`] gathers one worker's facts.
#[derive(Clone, Default)]
pub struct WorkerColumns {
    records: Vec<RecordFacts>,
    states: Vec<WorkerState>,
    device: Vec<u32>,
    active_depth_blocks: Vec<u32>,
    prefill_tokens: Vec<u64>,
    decode_blocks: Vec<u64>,
    requests: Vec<u64>,
    work: Vec<PrefillWork>,
    laws: Vec<PrefillLaw>,
    recent: Vec<RecentWork>,
    load_details: Vec<LoadDetails>,
    backing_off: Vec<bool>,
    trust_levels: Vec<TrustLevel>,
    trust_details: Vec<TrustDetails>,
    as_of: Vec<AsOf>,
    lower_tiers: Sparse<LowerTiers>,
    shared_blocks: Sparse<u32>,
    constraints: Sparse<ConstraintFacts>,
}

/// Runs a method on every column. A new column is added here once.
macro_rules! each_column {
    ($columns:expr, $($method:tt)+) => {{
        let WorkerColumns {
            records, states, device, active_depth_blocks, prefill_tokens, decode_blocks, requests, work, laws,
            recent, load_details, backing_off, trust_levels, trust_details, as_of,
            lower_tiers: Sparse(lower_tiers), shared_blocks: Sparse(shared_blocks), constraints: Sparse(constraints),
        } = $columns;
        records.$($method)+;
        states.$($method)+;
        device.$($method)+;
        active_depth_blocks.$($method)+;
        prefill_tokens.$($method)+;
        decode_blocks.$($method)+;
        requests.$($method)+;
        work.$($method)+;
        laws.$($method)+;
        recent.$($method)+;
        load_details.$($method)+;
        backing_off.$($method)+;
        trust_levels.$($method)+;
        trust_details.$($method)+;
        as_of.$($method)+;
        lower_tiers.$($method)+;
        shared_blocks.$($method)+;
        constraints.$($method)+;
    }};
}

impl WorkerColumns {
    /// Workers.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether the space has no worker.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// All facts of one worker.
    ///
    /// # Panics
    /// If there is no such row.
    #[must_use]
    #[inline(always)]
    pub fn row(&self, row: usize) -> WorkerFacts {
        let RecordFacts { index, worker, device_class, weight, capacity_blocks, batched_tokens_max } =
            self.records[row];
        let ConstraintFacts { allowed, is_pinned, has_adapter, has_required_taints, taint_weight } =
            self.constraints.get(row);
        WorkerFacts {
            index,
            worker,
            overlap: self.overlap(row),
            active_depth_blocks: self.active_depth_blocks[row],
            shared_blocks: self.shared_blocks.get(row),
            load: self.load(row),
            trust: self.trust(row),
            state: self.states[row],
            device_class,
            weight,
            capacity_blocks,
            batched_tokens_max,
            allowed,
            backing_off: self.backing_off[row],
            is_pinned,
            has_adapter,
            has_required_taints,
            taint_weight,
        }
    }

    /// The facts of every worker, in table order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = WorkerFacts> + Clone + '_ {
        (0..self.len()).map(|row| self.row(row))
    }

    /// Appends a worker.
    pub fn push(&mut self, facts: &WorkerFacts) {
        let rows = self.len();
        let WorkerFacts { index, worker, device_class, weight, capacity_blocks, batched_tokens_max, .. } = *facts;
        self.records.push(RecordFacts { index, worker, device_class, weight, capacity_blocks, batched_tokens_max });
        self.states.push(facts.state);
        self.device.push(0);
        self.active_depth_blocks.push(0);
        self.prefill_tokens.push(0);
        self.decode_blocks.push(0);
        self.requests.push(0);
        self.work.push(PrefillWork::default());
        self.laws.push(PrefillLaw::default());
        self.recent.push(RecentWork::default());
        self.load_details.push(LoadDetails { back_off_until_ns: 0, engine: None, version: 0 });
        self.backing_off.push(false);
        self.trust_levels.push(TrustLevel::None);
        self.trust_details.push(TrustDetails { reasons: TrustReasons::NONE, since_unix_ms: 0 });
        self.as_of.push((None, 0));
        self.lower_tiers.push(rows, LowerTiers::default());
        self.shared_blocks.push(rows, 0);
        self.constraints.push(rows, ConstraintFacts::default());
        self.set(rows, facts);
    }

    /// Overwrites all facts of a worker.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn set(&mut self, row: usize, facts: &WorkerFacts) {
        // Without `..`: a new fact has to be given a column here.
        let WorkerFacts {
            index,
            worker,
            overlap,
            active_depth_blocks,
            shared_blocks,
            load,
            trust,
            state,
            device_class,
            weight,
            capacity_blocks,
            batched_tokens_max,
            allowed,
            backing_off,
            is_pinned,
            has_adapter,
            has_required_taints,
            taint_weight,
        } = *facts;
        let rows = self.len();
        self.records[row] = RecordFacts { index, worker, device_class, weight, capacity_blocks, batched_tokens_max };
        self.states[row] = state;
        self.active_depth_blocks[row] = active_depth_blocks;
        self.set_overlap(row, overlap);
        self.shared_blocks.set(row, rows, shared_blocks);
        self.set_load(row, &load, backing_off);
        self.set_trust(row, &trust);
        self.as_of[row] = (trust.as_of_seq, trust.as_of_unix_ms);
        let constraints = ConstraintFacts { allowed, is_pinned, has_adapter, has_required_taints, taint_weight };
        self.constraints.set(row, rows, constraints);
    }

    /// Changes some facts of a worker.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn update(&mut self, row: usize, change: impl FnOnce(&mut WorkerFacts)) {
        let mut facts = self.row(row);
        change(&mut facts);
        self.set(row, &facts);
    }

    /// Removes every worker; the memory stays for the next ones.
    pub fn clear(&mut self) {
        each_column!(self, clear());
    }

    /// Frees memory beyond `workers` workers.
    pub fn shrink_to(&mut self, workers: usize) {
        each_column!(self, shrink_to(workers));
    }

    /// Becomes a copy of `other`, in the memory that is there.
    pub fn copy_from(&mut self, other: &Self) {
        self.records.clone_from(&other.records);
        self.states.clone_from(&other.states);
        self.device.clone_from(&other.device);
        self.active_depth_blocks.clone_from(&other.active_depth_blocks);
        self.prefill_tokens.clone_from(&other.prefill_tokens);
        self.decode_blocks.clone_from(&other.decode_blocks);
        self.requests.clone_from(&other.requests);
        self.work.clone_from(&other.work);
        self.laws.clone_from(&other.laws);
        self.recent.clone_from(&other.recent);
        self.load_details.clone_from(&other.load_details);
        self.backing_off.clone_from(&other.backing_off);
        self.trust_levels.clone_from(&other.trust_levels);
        self.trust_details.clone_from(&other.trust_details);
        self.as_of.clone_from(&other.as_of);
        self.lower_tiers.copy_from(&other.lower_tiers);
        self.shared_blocks.copy_from(&other.shared_blocks);
        self.constraints.copy_from(&other.constraints);
    }

    /// A worker's place in the fleet table.
    pub(super) fn index(&self, row: usize) -> WorkerIndex {
        self.records[row].index
    }

    /// A worker's id and rank.
    pub(super) fn worker(&self, row: usize) -> Worker {
        self.records[row].worker
    }

    /// The facts of every worker that rules read, in table order.
    pub(super) fn rule_facts(&self) -> impl Iterator<Item = RuleFacts> + '_ {
        (0..self.len()).map(|row| RuleFacts {
            worker: self.worker(row),
            state: self.states[row],
            backing_off: self.backing_off[row],
            trust_level: self.trust_levels[row],
            constraints: self.constraints.get(row),
        })
    }

    /// A worker's state.
    pub(super) fn state(&self, row: usize) -> WorkerState {
        self.states[row]
    }

    /// Requests in flight on a worker.
    pub(super) fn requests(&self, row: usize) -> u64 {
        self.requests[row]
    }

    /// What each worker was given lately.
    #[inline(always)]
    pub(super) fn recents(&self) -> &[RecentWork] {
        &self.recent
    }

    /// The version of a worker's load when it was read.
    pub(super) fn load_version(&self, row: usize) -> u64 {
        self.load_details[row].version
    }

    /// Blocks of the prompt that a worker holds.
    #[inline(always)]
    pub(super) fn overlap(&self, row: usize) -> TierBlocks {
        let LowerTiers { host, disk, external } = self.lower_tiers.get(row);
        TierBlocks { device: self.device[row], host, disk, external }
    }

    pub(super) fn set_overlap(&mut self, row: usize, overlap: TierBlocks) {
        let TierBlocks { device, host, disk, external } = overlap;
        let rows = self.len();
        self.device[row] = device;
        self.lower_tiers.set(row, rows, LowerTiers { host, disk, external });
    }

    #[inline(always)]
    fn load(&self, row: usize) -> Load {
        let LoadDetails { back_off_until_ns, engine, version } = self.load_details[row];
        Load {
            prefill_tokens: self.prefill_tokens[row],
            decode_blocks: self.decode_blocks[row],
            requests: self.requests[row],
            work: self.work[row],
            law: self.laws[row],
            recent: self.recent[row],
            back_off_until_ns,
            engine,
            version,
        }
    }

    pub(super) fn set_load(&mut self, row: usize, load: &Load, backing_off: bool) {
        let Load { prefill_tokens, decode_blocks, requests, work, law, recent, back_off_until_ns, engine, version } =
            *load;
        self.prefill_tokens[row] = prefill_tokens;
        self.decode_blocks[row] = decode_blocks;
        self.requests[row] = requests;
        (self.work[row], self.laws[row], self.recent[row]) = (work, law, recent);
        self.load_details[row] = LoadDetails { back_off_until_ns, engine, version };
        self.backing_off[row] = backing_off;
    }

    /// Trust in a worker's overlap.
    #[inline(always)]
    pub(super) fn trust(&self, row: usize) -> Trust {
        let TrustDetails { reasons, since_unix_ms } = self.trust_details[row];
        let (as_of_seq, as_of_unix_ms) = self.as_of[row];
        Trust { level: self.trust_levels[row], reasons, since_unix_ms, as_of_seq, as_of_unix_ms }
    }

    /// Overwrites level, reasons and time of a worker's trust; the batch that it speaks of stays.
    pub(super) fn set_trust(&mut self, row: usize, trust: &Trust) {
        self.trust_levels[row] = trust.level;
        self.trust_details[row] = TrustDetails { reasons: trust.reasons, since_unix_ms: trust.since_unix_ms };
    }

    /// The batches that the trust of each worker speaks of, to be overwritten.
    pub(super) fn as_of_mut(&mut self) -> &mut [AsOf] {
        &mut self.as_of
    }

    /// Blocks of the prompt that each worker holds in device memory, to be overwritten.
    pub(super) fn device_mut(&mut self) -> &mut [u32] {
        &mut self.device
    }

    /// Leading blocks of the prompt that each worker already runs, to be overwritten.
    pub(super) fn active_depths_mut(&mut self) -> &mut [u32] {
        &mut self.active_depth_blocks
    }

    /// Overwrites the blocks that each worker holds below device memory.
    pub(super) fn set_lower_tiers(&mut self, overlaps: impl Iterator<Item = TierBlocks>) {
        let lower = |TierBlocks { host, disk, external, .. }: TierBlocks| LowerTiers { host, disk, external };
        self.lower_tiers.refill(overlaps.map(lower));
    }

    /// Overwrites how each worker meets the constraints of the request.
    pub(super) fn set_constraints(&mut self, constraints: impl Iterator<Item = ConstraintFacts>) {
        self.constraints.refill(constraints);
    }

    /// Overwrites the blocks of a shared cache that each worker can use, by the blocks that its device holds.
    pub(super) fn set_shared_blocks(&mut self, beyond: impl Fn(u32) -> u32) {
        self.shared_blocks.refill(self.device.iter().map(|device| beyond(*device)));
    }

    /// Forgets what belongs to one request alone: lower tiers, shared blocks and constraints.
    pub(super) fn clear_sparse(&mut self) {
        self.lower_tiers.0.clear();
        self.shared_blocks.0.clear();
        self.constraints.0.clear();
    }

    /// Whether every worker's trust is at least `level`.
    fn are_trusted(&self, level: TrustLevel) -> bool {
        // Without a branch, so that the processor compares many at once.
        level == TrustLevel::None || self.trust_levels.iter().fold(true, |all, trust| all & (*trust >= level))
    }

    /// Whether no rule of a policy can remove a worker.
    pub(super) fn admits_all(&self, policy: &Policy) -> bool {
        let takes_requests = |state: &WorkerState| matches!(state, WorkerState::Joining | WorkerState::Ready);
        self.constraints.is_default()
            && !policy.busy.any()
            && self.are_trusted(policy.trust_min)
            && self.states.iter().fold(true, |all, state| all & takes_requests(state))
            && self.backing_off.iter().fold(true, |all, backing_off| all & !backing_off)
    }

    /// The columns that [`plain`](PlainFacts) costs read, if a policy credits every worker's overlap, no worker holds
    /// blocks below its device memory, and no cache is shared.
    pub(super) fn plain(&self, policy: &Policy) -> Option<PlainFacts<'_>> {
        let is_plain = self.lower_tiers.is_default()
            && self.shared_blocks.is_default()
            && self.are_trusted(policy.credit_trust_min);
        is_plain.then_some(PlainFacts {
            device: &self.device,
            active_depth_blocks: &self.active_depth_blocks,
            prefill_tokens: &self.prefill_tokens,
            decode_blocks: &self.decode_blocks,
            requests: &self.requests,
            work: &self.work,
            laws: &self.laws,
            recent: &self.recent,
        })
    }

    /// Writes defaults into the sparse columns, so that rules and costs go row by row: to compare both ways.
    #[cfg(test)]
    pub(super) fn fill_sparse(&mut self) {
        let rows = self.len();
        self.lower_tiers.0.resize(rows, LowerTiers::default());
        self.shared_blocks.0.resize(rows, 0);
        self.constraints.0.resize(rows, ConstraintFacts::default());
    }
}

impl PartialEq for WorkerColumns {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl std::fmt::Debug for WorkerColumns {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_list().entries(self.iter()).finish()
    }
}

impl FromIterator<WorkerFacts> for WorkerColumns {
    fn from_iter<I: IntoIterator<Item = WorkerFacts>>(rows: I) -> Self {
        let mut columns = Self::default();
        rows.into_iter().for_each(|facts| columns.push(&facts));
        columns
    }
}

/// The facts that a cost depends on where nothing else varies between workers, column by column.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlainFacts<'a> {
    device: &'a [u32],
    active_depth_blocks: &'a [u32],
    prefill_tokens: &'a [u64],
    decode_blocks: &'a [u64],
    requests: &'a [u64],
    work: &'a [PrefillWork],
    laws: &'a [PrefillLaw],
    recent: &'a [RecentWork],
}

impl PlainFacts<'_> {
    /// Workers.
    pub(super) const fn len(&self) -> usize {
        self.device.len()
    }

    /// The facts of every worker. Facts without a column here have a value that a plain cost does not depend on.
    #[inline(always)]
    pub(super) fn iter(&self) -> impl Iterator<Item = WorkerFacts> + '_ {
        let prompts = self.device.iter().zip(self.active_depth_blocks);
        let booked = self.prefill_tokens.iter().zip(self.decode_blocks).zip(self.requests);
        let loads = booked.zip(self.work.iter().zip(self.laws).zip(self.recent));
        // Without `..`: a new fact has to be given a column here, or a reason why no plain cost depends on it.
        prompts.zip(loads).map(
            |((device, depth), (((prefill_tokens, decode_blocks), requests), ((work, law), recent)))| {
                WorkerFacts {
                    overlap: TierBlocks { device: *device, host: 0, disk: 0, external: 0 },
                    active_depth_blocks: *depth,
                    load: Load {
                        prefill_tokens: *prefill_tokens,
                        decode_blocks: *decode_blocks,
                        requests: *requests,
                        work: *work,
                        law: *law,
                        recent: *recent,
                        back_off_until_ns: 0,
                        engine: None,
                        version: 0,
                    },
                    // These default in every row: see `WorkerColumns::plain`.
                    shared_blocks: 0,
                    // A plain cost is not divided by a weight, and every worker's trust is high enough.
                    weight: 1.0,
                    trust: Trust::default(),
                    taint_weight: 0.0,
                    // No plain cost depends on these: see `is_plain` in cost.rs.
                    index: WorkerIndex::default(),
                    worker: Worker::default(),
                    state: WorkerState::Ready,
                    device_class: DeviceClass::Gpu,
                    capacity_blocks: 0,
                    batched_tokens_max: 0,
                    allowed: true,
                    backing_off: false,
                    is_pinned: true,
                    has_adapter: false,
                    has_required_taints: true,
                }
            },
        )
    }
}

/// What one decision is made from. Nothing else is read once it is there: the same observation, policy and seed give
/// the same decision.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observation {
    /// Facts of the request.
    pub request: RequestFacts,
    /// Every worker of the space, eligible or not, in table order: ascending by place.
    pub workers: WorkerColumns,
    /// Whether overlaps are valid.
    pub matched: MatchStatus,
    /// Remarks on what was read.
    pub notes: ReplyNotes,
    /// Whole blocks of the prompt that were looked up.
    pub request_blocks: u32,
    /// The version of the fleet table that was read.
    pub fleet_version: u64,
    /// Batches that had ended in the index, summed over its shards.
    pub index_epoch: u64,
}

impl Observation {
    /// The facts of the worker with this index, if it is one of the space.
    #[must_use]
    pub fn worker(&self, index: WorkerIndex) -> Option<WorkerFacts> {
        let records = &self.workers.records;
        let row = records.binary_search_by_key(&index.place(), |record| record.index.place()).ok()?;
        (records[row].index == index).then(|| self.workers.row(row))
    }
}
