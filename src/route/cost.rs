//! The cost of a candidate, as one record of named terms.

use super::observation::{Asked, Observed};
use super::policy::Policy;
use crate::fleet::PoolRole;

/// What a cost was made of, in the order the terms are applied. Blocks unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CostTerms {
    /// Blocks of the prompt, the partial one included.
    pub request_blocks: f64,
    /// Tokens of the prompt that need not be computed, every tier at its weight.
    pub cached_tokens: f64,
    /// The blocks those tokens are.
    pub effective_overlap: f64,
    /// Tokens of prefill the worker is busy with.
    pub active_prefill_tokens: f64,
    /// Factor in (0, 1] by which a backlog lessens the device credit.
    pub decay: f64,
    /// Credit for blocks in device memory.
    pub device_credit: f64,
    /// Credit for blocks in host memory.
    pub host_credit: f64,
    /// Credit for blocks on disk or in an external store.
    pub disk_credit: f64,
    /// Credit for blocks in a cache shared by all.
    pub shared_credit: f64,
    /// The prefill term: what would have to be computed, less all credits, scaled.
    pub prefill: f64,
    /// Decode blocks the worker is busy with.
    pub active_decode_blocks: f64,
    /// Decode blocks the prompt would add.
    pub additional_decode_blocks: f64,
    /// The decode term: their sum.
    pub decode: f64,
    /// Requests the worker is busy with.
    pub active_requests: f64,
    /// What they add to the cost.
    pub active_requests_cost: f64,
    /// Factor by which the worker's device class and weight divide the cost; 1 = not applied.
    pub capability_weight: f64,
    /// Factor of the preferred taints; 1 = none.
    pub taint_factor: f64,
    /// The sum.
    pub cost: f64,
}

/// The cost of running what is asked on a worker. `prefill_tokens_min` is the least prefill load among the eligible,
/// in tokens: where a backlog begins.
///
/// The formula is Dynamo 1.6.1's (`scheduling/selector/reference.rs` there), every tier told apart; the
/// lowest cost wins.
#[must_use]
pub fn cost(policy: &Policy, asked: &Asked, observed: &Observed, prefill_tokens_min: u64) -> CostTerms {
    let Observed { overlap, load, .. } = observed;
    let block_size = f64::from(asked.block_size);
    let prompt_tokens = asked.prompt_tokens as f64;
    let request_blocks = asked.request_blocks() as f64;
    let (device, host) = (f64::from(overlap.device), f64::from(overlap.host));
    let disk = f64::from(overlap.disk) + f64::from(overlap.external);
    let effective_overlap = device + host * policy.host_hit_weight + disk * policy.disk_hit_weight;
    let cached_tokens = (effective_overlap * block_size).round();
    let active_prefill_tokens = load.prefill_tokens as f64;

    let decay = if policy.track_prefill_tokens && policy.credit_decay > 0.0 {
        let excess_blocks = load.prefill_tokens.saturating_sub(prefill_tokens_min) as f64 / block_size;
        1.0 / (1.0 + policy.credit_decay * excess_blocks / request_blocks.max(1.0))
    } else {
        1.0
    };
    let device_credit = policy.device_credit * decay * device;
    let host_credit = policy.host_hit_weight * host;
    let disk_credit = policy.disk_hit_weight * disk;
    let shared_credit = 0.0;
    let credit = device_credit + host_credit + disk_credit + shared_credit;

    let raw_tokens = if policy.track_prefill_tokens {
        active_prefill_tokens + (prompt_tokens - cached_tokens).max(0.0) + cached_tokens
    } else {
        0.0
    };
    let prefill = policy.prefill_load_scale * (raw_tokens / block_size - credit).max(0.0);

    let added = f64::from(asked.whole_blocks.saturating_sub(observed.active_depth_blocks));
    let (active_decode_blocks, additional_decode_blocks) =
        if policy.track_active_blocks { (load.decode_blocks as f64, added) } else { (0.0, 0.0) };
    let decode = active_decode_blocks + additional_decode_blocks;
    let active_requests = load.requests as f64;
    let active_requests_cost = policy.active_request_weight * active_requests;

    let cost = if asked.role == PoolRole::Decode && !policy.track_prefill_tokens && policy.device_credit > 0.0 {
        (decode - credit).max(0.0) + active_requests_cost
    } else {
        prefill + decode + active_requests_cost
    };
    CostTerms {
        request_blocks,
        cached_tokens,
        effective_overlap,
        active_prefill_tokens,
        decay,
        device_credit,
        host_credit,
        disk_credit,
        shared_credit,
        prefill,
        active_decode_blocks,
        additional_decode_blocks,
        decode,
        active_requests,
        active_requests_cost,
        capability_weight: 1.0,
        taint_factor: 1.0,
        cost,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{DeviceClass, WorkerState};
    use crate::ids::{TierBlocks, Worker, WorkerIndex};
    use crate::load::Load;
    use crate::trust::Trust;

    const ASKED: Asked =
        Asked { prompt_tokens: 100, block_size: 16, whole_blocks: 6, role: PoolRole::Both, candidates_max: 8 };

    fn held(device: u32, host: u32, disk: u32, external: u32) -> Observed {
        Observed {
            index: WorkerIndex(0),
            worker: Worker::new(1, 0),
            overlap: TierBlocks { device, host, disk, external },
            active_depth_blocks: 0,
            load: Load::default(),
            trust: Trust::default(),
            state: WorkerState::Ready,
            device_class: DeviceClass::Gpu,
            weight: 1.0,
            capacity_blocks: 0,
            batched_tokens_max: 8192,
            allowed: true,
        }
    }

    #[test]
    fn an_idle_cold_worker_costs_its_prefill_and_its_blocks() {
        let terms = cost(&Policy::default(), &ASKED, &held(0, 0, 0, 0), 0);
        // 100 tokens are 6.25 blocks to prefill and 6 whole ones to decode on.
        assert_eq!((terms.prefill, terms.decode, terms.cost), (6.25, 6.0, 12.25));
    }

    #[test]
    fn every_tier_is_credited_at_its_weight() {
        let terms = cost(&Policy::default(), &ASKED, &held(2, 2, 1, 1), 0);
        assert_eq!(terms.effective_overlap, 2.0 + 1.5 + 0.5);
        assert_eq!(terms.cached_tokens, 64.0);
        assert_eq!((terms.device_credit, terms.host_credit, terms.disk_credit), (2.0, 1.5, 0.5));
        assert_eq!(terms.prefill, 6.25 - 4.0);
    }

    #[test]
    fn load_adds_its_prefill_in_blocks_and_its_decode_blocks() {
        let load = Load { prefill_tokens: 320, decode_blocks: 5, requests: 3, ..Load::default() };
        let policy = Policy { active_request_weight: 0.5, ..Policy::default() };
        let terms = cost(&policy, &ASKED, &Observed { load, ..held(6, 0, 0, 0) }, 0);
        assert_eq!(terms.prefill, 20.0 + 6.25 - 6.0);
        assert_eq!(terms.decode, 11.0);
        assert_eq!(terms.cost, 20.25 + 11.0 + 1.5);
    }

    #[test]
    fn blocks_that_requests_in_flight_run_already_are_not_added_again() {
        let terms = cost(&Policy::default(), &ASKED, &Observed { active_depth_blocks: 4, ..held(0, 0, 0, 0) }, 0);
        assert_eq!((terms.additional_decode_blocks, terms.cost), (2.0, 8.25));
    }

    #[test]
    fn a_prefill_term_is_never_negative() {
        let policy = Policy { device_credit: 3.0, ..Policy::default() };
        assert_eq!(cost(&policy, &ASKED, &held(6, 0, 0, 0), 0).prefill, 0.0);
    }

    #[test]
    fn a_backlog_beyond_the_least_loaded_lessens_the_credit() {
        let policy = Policy { credit_decay: 1.0, ..Policy::default() };
        let load = Load { prefill_tokens: 100 + 7 * 16, ..Load::default() };
        // The excess is 7 blocks, as many as the request has: the credit is halved.
        let terms = cost(&policy, &ASKED, &Observed { load, ..held(4, 0, 0, 0) }, 100);
        assert_eq!((terms.decay, terms.device_credit), (0.5, 2.0));
    }

    #[test]
    fn a_decode_pool_credits_the_decode_term() {
        let policy = Policy { track_prefill_tokens: false, ..Policy::default() };
        let asked = Asked { role: PoolRole::Decode, ..ASKED };
        let terms = cost(&policy, &asked, &held(3, 0, 0, 0), 0);
        assert_eq!((terms.prefill, terms.cost), (0.0, 3.0));
        assert_eq!(cost(&policy, &ASKED, &held(3, 0, 0, 0), 0).cost, 6.0);
    }
}
