//! What a plain cost depends on, value by value instead of worker by worker: of thousands of workers a processor adds up
//! several at a time.

use super::cost::{PoolFacts, cost, prefers};
use super::mode::{CostModel, Mode};
use super::observation::{RequestFacts, WorkerFacts};
use super::policy::Policy;
use crate::ids::TierBlocks;
use crate::load::Load;
use crate::trust::TrustLevel;

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
