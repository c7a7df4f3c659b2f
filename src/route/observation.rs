//! What a decision is made from, read at once and kept as plain values.

use super::affinity::AffinitySession;
use super::decision::{MatchStatus, ReplyNotes};
use super::policy::Overrides;
use crate::fleet::{DeviceClass, PoolRole, WorkerState};
use crate::ids::{TierBlocks, Worker, WorkerIndex};
use crate::load::Load;
use crate::trust::Trust;

/// What is asked, as far as a decision depends on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RequestFacts {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens per block, at least 1.
    pub block_size: u32,
    /// Whole blocks of the prompt: what it adds to decode. The partial one is not counted before it is full.
    pub whole_blocks: u32,
    /// Which part of a request the pool serves.
    pub role: PoolRole,
    /// How many candidates to list, from 1.
    pub candidates_max: u32,
    /// The only worker that may be chosen, rank `u32::MAX` = any rank of it.
    pub pin: Option<Worker>,
    /// Whether the request prefers labels.
    pub prefers_taints: bool,
    /// Blocks of the prompt in a cache shared by all workers.
    pub shared_blocks: u32,
    /// What it sets in place of the policy.
    pub overrides: Overrides,
    /// Whose turn it is, where workers take turns: counts decisions of the space.
    pub round_robin_counter: u64,
    /// Whom the session that it names is bound to.
    pub session: AffinitySession,
}

impl Default for RequestFacts {
    fn default() -> Self {
        Self {
            prompt_tokens: 0,
            block_size: 1,
            whole_blocks: 0,
            role: PoolRole::Both,
            candidates_max: 1,
            pin: None,
            prefers_taints: false,
            shared_blocks: 0,
            overrides: Overrides::default(),
            round_robin_counter: 0,
            session: AffinitySession::None,
        }
    }
}

impl RequestFacts {
    /// Blocks of the prompt, the partial one included.
    #[must_use]
    pub fn request_blocks(&self) -> u64 {
        self.prompt_tokens.div_ceil(u64::from(self.block_size))
    }
}

/// One worker of the space as it was found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerFacts {
    /// Its place in the fleet table of the observation's version.
    pub index: WorkerIndex,
    /// Who it is.
    pub worker: Worker,
    /// What it holds of the prompt; zero where the prompt could not be matched.
    pub overlap: TierBlocks,
    /// Leading blocks of the prompt that its requests in flight run already; 0 = none, or not known.
    pub active_depth_blocks: u32,
    /// Blocks of the prompt in a cache shared by all workers, beyond what it holds in device memory.
    pub shared_blocks: u32,
    /// What it is busy with.
    pub load: Load,
    /// How far the overlap may be believed.
    pub trust: Trust,
    /// Where it is in its life.
    pub state: WorkerState,
    /// What it computes on.
    pub device_class: DeviceClass,
    /// Its throughput relative to a CPU worker's 1.
    pub weight: f64,
    /// KV blocks its device holds; 0 = not known.
    pub capacity_blocks: u64,
    /// Tokens it batches in one step.
    pub batched_tokens_max: u64,
    /// Whether the request's allow-list names it, or there is none.
    pub allowed: bool,
    /// Whether it failed a gateway so lately that it is to be spared.
    pub backing_off: bool,
    /// Whether the request is pinned to it, or to nobody.
    pub is_pinned: bool,
    /// Whether it advertises the request's adapter.
    pub has_adapter: bool,
    /// Whether it has every label that the request requires.
    pub has_required_taints: bool,
    /// Sum of the weights of those labels that the request prefers and it has.
    pub taint_weight: f64,
}

/// An idle worker that holds nothing, of which nothing more is known, and that no rule takes out of the running.
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

/// What one decision is made from: nothing else is looked at once it is there, so that the same observation under the
/// same policy and draws is the same decision, whenever it is judged.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observation {
    /// What is asked.
    pub request: RequestFacts,
    /// Every worker of the space, eligible or not, in table order: ascending by index place.
    pub workers: Vec<WorkerFacts>,
    /// Whether overlaps mean anything.
    pub matched: MatchStatus,
    /// Remarks on what was read.
    pub notes: ReplyNotes,
    /// Whole blocks of the prompt that were looked up.
    pub request_blocks: u32,
    /// Which fleet table was read.
    pub fleet_version: u64,
    /// How many batches had ended in the index, summed over shards.
    pub index_epoch: u64,
}

impl Observation {
    /// The worker of this index, if it is of the space.
    #[must_use]
    pub fn worker(&self, index: WorkerIndex) -> Option<&WorkerFacts> {
        let place = self.workers.binary_search_by_key(&index.place(), |facts| facts.index.place()).ok()?;
        self.workers.get(place).filter(|facts| facts.index == index)
    }
}
