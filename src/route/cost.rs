//! The cost of a candidate, as one record of named terms.

use super::observation::{PlainFacts, RequestFacts, WorkerFacts};
use super::policy::{CostModel, Mode, Policy};
use crate::fleet::PoolRole;
use crate::ids::TierBlocks;
use crate::trust::TrustLevel;

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
    /// The worker's weight, which divides the sum; 1 = not applied.
    pub capability_weight: f64,
    /// Factor of the preferred taints; 1 = none.
    pub taint_factor: f64,
    /// Factor of a session that is bound to the worker; 1 = none.
    pub affinity_factor: f64,
    /// What decides, and in `kv` the sum: blocks there, in other modes what the mode counts.
    pub cost: f64,
}

/// What a cost depends on beside the worker itself: all those in the running together. What no cost of a policy depends
/// on is left at 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PoolFacts {
    /// How many there are.
    pub count: u32,
    /// The least prefill load, in tokens: where a backlog begins.
    pub prefill_tokens_min: u64,
    /// Whose turn it is: a place among them.
    pub round_robin_first: u32,
    /// Requests in flight for each unit of weight, on GPUs and on CPUs.
    pub pool_loads: [f64; 2],
}

impl PoolFacts {
    /// Of those in the running, as far as the costs of `policy` depend on it; `round_robin_counter` counts decisions.
    #[must_use]
    pub fn of(
        policy: &Policy,
        round_robin_counter: u64,
        running: impl ExactSizeIterator<Item = WorkerFacts> + Clone,
    ) -> Self {
        let mut pool = Self { count: running.len() as u32, ..Self::default() };
        pool.round_robin_first = round_robin_counter.checked_rem(u64::from(pool.count)).unwrap_or(0) as u32;
        if policy.track_prefill_tokens && policy.credit_decay > 0.0 {
            let tokens = running.clone().map(|worker| worker.load.prefill_tokens);
            pool.prefill_tokens_min = tokens.min().unwrap_or(u64::MAX);
        }
        if policy.mode.cost_model() == CostModel::PoolLoad {
            let mut pools = [(0_u64, 0.0_f64); 2];
            for worker in running {
                let (requests, weight) = &mut pools[worker.device_class as usize];
                *requests += worker.load.requests;
                *weight += worker.weight;
            }
            let load = |(requests, weight)| if weight > 0.0 { requests as f64 / weight } else { 0.0 };
            pool.pool_loads = pools.map(load);
        }
        pool
    }
}

/// What it costs to run what is asked on a worker. `place` is its place among those in the running.
///
/// The formula of `kv` is Dynamo 1.6.1's (`scheduling/selector/reference.rs` there), every tier told apart; the
/// lowest cost wins. In other modes the terms say the same of the worker, and only the cost is another.
///
/// Always inlined, with what it is made of: who wants the cost alone, of thousands, makes no terms then.
#[must_use]
#[inline(always)]
pub fn cost(policy: &Policy, request: &RequestFacts, worker: &WorkerFacts, pool: &PoolFacts, place: u32) -> CostTerms {
    let terms = blocks(policy, request, worker, pool.prefill_tokens_min);
    let cost = match policy.mode.cost_model() {
        CostModel::Blocks => terms.cost,
        CostModel::UncachedTimesInFlight => {
            (request.prompt_tokens as f64 - terms.cached_tokens).max(0.0) * (terms.active_requests + 1.0)
        }
        CostModel::InFlight => terms.active_requests,
        CostModel::PoolLoad => pool.pool_loads[worker.device_class as usize],
        CostModel::RoundRobin if place >= pool.round_robin_first => f64::from(place - pool.round_robin_first),
        CostModel::RoundRobin => f64::from(pool.count - pool.round_robin_first) + f64::from(place),
        CostModel::Nothing => 0.0,
    };
    CostTerms { cost, ..terms }
}

/// Whether a request's costs under a policy depend on [`PlainFacts`] alone, where
/// [`WorkerColumns::plain`](super::observation::WorkerColumns::plain) gives them.
pub(super) fn is_plain(policy: &Policy, request: &RequestFacts) -> bool {
    let divides_or_decays = policy.capability || policy.credit_decay > 0.0 || applies_preferences(request);
    policy.mode.cost_model() == CostModel::Blocks && !divides_or_decays && policy.track_active_blocks
}

/// Overwrites `costs` with the plain cost of every worker, if [`is_plain`].
pub(super) fn plain_costs(policy: &Policy, request: &RequestFacts, plain: PlainFacts<'_>, costs: &mut Vec<f64>) {
    // These values are the policy's own, or cannot matter here. As constants they let the compiler drop the terms that they
    // switch off, and compute several costs at once.
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
        true => fill_costs(&Policy { track_prefill_tokens: true, ..policy }, &request, plain, costs),
        false => fill_costs(&Policy { track_prefill_tokens: false, ..policy }, &request, plain, costs),
    }
}

#[inline(always)]
fn fill_costs(policy: &Policy, request: &RequestFacts, plain: PlainFacts<'_>, costs: &mut Vec<f64>) {
    let pool = PoolFacts::default();
    costs.clear();
    costs.resize(plain.len(), 0.0);
    for (to, facts) in costs.iter_mut().zip(plain.iter()) {
        *to = cost(policy, request, &facts, &pool, 0).cost;
    }
}

/// The terms, and the cost in blocks.
#[inline(always)]
fn blocks(policy: &Policy, request: &RequestFacts, worker: &WorkerFacts, prefill_tokens_min: u64) -> CostTerms {
    let load = &worker.load;
    let held = CostTerms { decay: decay(policy, request, worker, prefill_tokens_min), ..CostTerms::default() };
    let held = credits(policy, request, worker, held);
    let credit = held.device_credit + held.host_credit + held.disk_credit + held.shared_credit;

    // A worker whose load nobody knows is idle to us: the prompt alone, as there.
    let uncached_tokens = (request.prompt_tokens as f64 - held.cached_tokens).max(0.0);
    let active_prefill_tokens = load.prefill_tokens as f64;
    let raw_tokens =
        if policy.track_prefill_tokens { active_prefill_tokens + uncached_tokens + held.cached_tokens } else { 0.0 };
    let prefill = policy.prefill_load_scale * (in_blocks(raw_tokens, request.block_size) - credit).max(0.0);

    let run_already = if policy.assume_kv_reuse { worker.active_depth_blocks } else { 0 };
    let (active_decode_blocks, additional_decode_blocks) = if policy.track_active_blocks {
        (load.decode_blocks as f64, exact(request.whole_blocks.saturating_sub(run_already)))
    } else {
        (0.0, 0.0)
    };
    let decode = active_decode_blocks + additional_decode_blocks;
    let active_requests = load.requests as f64;
    let active_requests_cost = policy.active_request_weight * active_requests;

    let sum = if request.role == PoolRole::Decode && !policy.track_prefill_tokens && policy.device_credit > 0.0 {
        (decode - credit).max(0.0) + active_requests_cost
    } else {
        prefill + decode + active_requests_cost
    };
    let capability_weight = if policy.capability { worker.weight } else { 1.0 };
    let taint_factor = taint_factor(request, worker);
    // Without a weight or labels there is nothing to wait for: a quotient or product by 1 is the number itself.
    let weighed = if policy.capability { sum / capability_weight } else { sum };
    let cost = if applies_preferences(request) { weighed * taint_factor } else { weighed };
    CostTerms {
        active_prefill_tokens,
        prefill,
        active_decode_blocks,
        additional_decode_blocks,
        decode,
        active_requests,
        active_requests_cost,
        capability_weight,
        taint_factor,
        affinity_factor: 1.0,
        cost,
        ..held
    }
}

/// How much a backlog lessens the device credit.
#[inline(always)]
fn decay(policy: &Policy, request: &RequestFacts, worker: &WorkerFacts, prefill_tokens_min: u64) -> f64 {
    if !policy.track_prefill_tokens || policy.credit_decay <= 0.0 {
        return 1.0;
    }
    let excess_tokens = worker.load.prefill_tokens.saturating_sub(prefill_tokens_min) as f64;
    let excess_blocks = excess_tokens / f64::from(request.block_size);
    1.0 / (1.0 + policy.credit_decay * excess_blocks / (request.request_blocks() as f64).max(1.0))
}

/// Adds what the worker holds, and the credit it is worth, to `terms`.
#[inline(always)]
fn credits(policy: &Policy, request: &RequestFacts, worker: &WorkerFacts, terms: CostTerms) -> CostTerms {
    let is_believed = worker.trust.level >= policy.credit_trust_min;
    let (overlap, shared) = match is_believed {
        true => (worker.overlap, worker.shared_blocks),
        false => (TierBlocks::default(), request.shared_blocks),
    };
    let (device, host) = (exact(overlap.device), exact(overlap.host));
    let disk = exact(overlap.disk) + exact(overlap.external);
    let effective_overlap = device + host * policy.host_hit_weight + disk * policy.disk_hit_weight;
    let tokens = effective_overlap * exact(request.block_size);
    let is_whole = overlap.host == 0 && overlap.disk == 0 && overlap.external == 0;
    CostTerms {
        request_blocks: request.request_blocks() as f64,
        cached_tokens: if is_whole { tokens } else { rounded(tokens) },
        effective_overlap,
        device_credit: policy.device_credit * terms.decay * device,
        host_credit: policy.host_hit_weight * host,
        disk_credit: policy.disk_hit_weight * disk,
        shared_credit: policy.shared_multiplier * exact(shared),
        ..terms
    }
}

/// From here on every number is whole.
const WHOLE_FROM: f64 = (1_u64 << 52) as f64;

/// The nearest whole number, of two the higher: for what is not negative as [`f64::round`], which is a call into the
/// system's library where the processor's own instruction is not asked for.
#[inline(always)]
fn rounded(value: f64) -> f64 {
    if !(0.0..WHOLE_FROM).contains(&value) {
        return value.round();
    }
    // The sum keeps no part of a whole: it is rounded, of two to the even one.
    let nearest = (value + WHOLE_FROM) - WHOLE_FROM;
    nearest + if value - nearest == 0.5 { 1.0 } else { 0.0 }
}

/// As [`f64::from`]. The processor's instruction waits for the number that its register held before, which is another
/// worker's: thousands of costs would be worked out one after the other instead of side by side.
#[inline(always)]
fn exact(count: u32) -> f64 {
    f64::from_bits(WHOLE_FROM.to_bits() | u64::from(count)) - WHOLE_FROM
}

/// Tokens as blocks: their quotient, which for a power of two is also a product, sooner there and the same to the last bit.
#[inline(always)]
fn in_blocks(tokens: f64, block_size: u32) -> f64 {
    /// The exponent's bits of 1, and where they are.
    const EXPONENT: (u32, u32) = (1023, 52);
    match block_size.is_power_of_two() {
        true => tokens * f64::from_bits(u64::from(EXPONENT.0 - block_size.trailing_zeros()) << EXPONENT.1),
        false => tokens / exact(block_size),
    }
}

/// Whether labels that the request prefers make a difference.
#[inline(always)]
pub(super) const fn applies_preferences(request: &RequestFacts) -> bool {
    request.prefers_taints && request.pin.is_none()
}

/// What the labels that the request prefers make of the cost: from 1/e, where the worker has many, to e.
#[inline]
fn taint_factor(request: &RequestFacts, worker: &WorkerFacts) -> f64 {
    match applies_preferences(request) {
        // Not the system's functions: those differ in their last bit from one machine to the next.
        true => libm::exp(-libm::tanh(worker.taint_weight)),
        false => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::DeviceClass;
    use crate::ids::{Worker, WorkerIndex};
    use crate::load::Load;
    use crate::route::Mode;
    use crate::trust::{Trust, TrustLevel};

    fn request_facts() -> RequestFacts {
        RequestFacts { prompt_tokens: 100, block_size: 16, whole_blocks: 6, ..RequestFacts::default() }
    }

    /// What a worker costs in an idle fleet.
    fn cost(policy: &Policy, request: &RequestFacts, worker: &WorkerFacts, prefill_tokens_min: u64) -> CostTerms {
        let pool = PoolFacts { count: 1, prefill_tokens_min, ..PoolFacts::default() };
        super::cost(policy, request, worker, &pool, 0)
    }

    fn held(device: u32, host: u32, disk: u32, external: u32) -> WorkerFacts {
        WorkerFacts {
            index: WorkerIndex(0),
            worker: Worker::new(1, 0),
            overlap: TierBlocks { device, host, disk, external },
            ..WorkerFacts::default()
        }
    }

    #[test]
    fn an_idle_cold_worker_costs_its_prefill_and_its_blocks() {
        let terms = cost(&Policy::default(), &request_facts(), &held(0, 0, 0, 0), 0);
        // 100 tokens are 6.25 blocks to prefill and 6 whole ones to decode on.
        assert_eq!((terms.prefill, terms.decode, terms.cost), (6.25, 6.0, 12.25));
    }

    #[test]
    fn numbers_are_rounded_as_the_library_does() {
        let halves = (0..4000_u32).map(|at| f64::from(at) / 2.0);
        let awkward = [0.499_999_999_999_999_94, 0.5, 2.5, 4_503_599_627_370_495.5, 4_503_599_627_370_497.0, 1e300];
        let around = |value: f64| [value.next_down(), value, value.next_up()];
        for value in halves.chain(awkward).flat_map(around) {
            assert_eq!(rounded(value).to_bits(), value.round().to_bits(), "{value:?}");
        }
        assert!(rounded(f64::NAN).is_nan());
        for count in [0, 1, 709, 1 << 20, u32::MAX - 1, u32::MAX] {
            assert_eq!(exact(count).to_bits(), f64::from(count).to_bits());
            for size in [1, 2, 16, 24, 64, 1 << 16, 1 << 31, u32::MAX] {
                let tokens = f64::from(count) + 0.25;
                assert_eq!(
                    in_blocks(tokens, size).to_bits(),
                    (tokens / f64::from(size)).to_bits(),
                    "{tokens} by {size}"
                );
            }
        }
    }

    #[test]
    fn every_tier_is_credited_at_its_weight() {
        let terms = cost(&Policy::default(), &request_facts(), &held(2, 2, 1, 1), 0);
        assert_eq!(terms.effective_overlap, 2.0 + 1.5 + 0.5);
        assert_eq!(terms.cached_tokens, 64.0);
        assert_eq!((terms.device_credit, terms.host_credit, terms.disk_credit), (2.0, 1.5, 0.5));
        assert_eq!(terms.prefill, 6.25 - 4.0);
    }

    #[test]
    fn load_adds_its_prefill_in_blocks_and_its_decode_blocks() {
        let load = Load { prefill_tokens: 320, decode_blocks: 5, requests: 3, ..Load::default() };
        let policy = Policy { active_request_weight: 0.5, ..Policy::default() };
        let terms = cost(&policy, &request_facts(), &WorkerFacts { load, ..held(6, 0, 0, 0) }, 0);
        assert_eq!(terms.prefill, 20.0 + 6.25 - 6.0);
        assert_eq!(terms.decode, 11.0);
        assert_eq!(terms.cost, 20.25 + 11.0 + 1.5);
    }

    #[test]
    fn blocks_that_requests_in_flight_run_already_are_not_added_again() {
        let terms =
            cost(&Policy::default(), &request_facts(), &WorkerFacts { active_depth_blocks: 4, ..held(0, 0, 0, 0) }, 0);
        assert_eq!((terms.additional_decode_blocks, terms.cost), (2.0, 8.25));
    }

    #[test]
    fn a_prefill_term_is_never_negative() {
        let policy = Policy { device_credit: 3.0, ..Policy::default() };
        assert_eq!(cost(&policy, &request_facts(), &held(6, 0, 0, 0), 0).prefill, 0.0);
    }

    #[test]
    fn a_backlog_beyond_the_least_loaded_lessens_the_credit() {
        let policy = Policy { credit_decay: 1.0, ..Policy::default() };
        let load = Load { prefill_tokens: 100 + 7 * 16, ..Load::default() };
        // The excess is 7 blocks, as many as the request has: the credit is halved.
        let terms = cost(&policy, &request_facts(), &WorkerFacts { load, ..held(4, 0, 0, 0) }, 100);
        assert_eq!((terms.decay, terms.device_credit), (0.5, 2.0));
    }

    #[test]
    fn a_decode_pool_credits_the_decode_term() {
        let policy = Policy { track_prefill_tokens: false, ..Policy::default() };
        let decode = RequestFacts { role: PoolRole::Decode, ..request_facts() };
        let terms = cost(&policy, &decode, &held(3, 0, 0, 0), 0);
        assert_eq!((terms.prefill, terms.cost), (0.0, 3.0));
        assert_eq!(cost(&policy, &request_facts(), &held(3, 0, 0, 0), 0).cost, 6.0);
    }

    #[test]
    fn shared_blocks_are_credited_and_doubted_ones_are_not() {
        let policy = Policy { shared_multiplier: 0.5, credit_trust_min: TrustLevel::LowerBound, ..Policy::default() };
        let shared = RequestFacts { shared_blocks: 5, ..request_facts() };
        let trusted = |level| Trust { level, ..Trust::default() };
        let holds = WorkerFacts { shared_blocks: 2, ..held(3, 1, 0, 0) };
        let terms = cost(&policy, &shared, &WorkerFacts { trust: trusted(TrustLevel::Exact), ..holds }, 0);
        assert_eq!((terms.device_credit, terms.host_credit, terms.shared_credit), (3.0, 0.75, 1.0));
        let terms = cost(&policy, &shared, &WorkerFacts { trust: trusted(TrustLevel::Unproven), ..holds }, 0);
        assert_eq!((terms.device_credit, terms.host_credit, terms.shared_credit), (0.0, 0.0, 2.5));
        assert_eq!((terms.cached_tokens, terms.effective_overlap), (0.0, 0.0));
    }

    #[test]
    fn labels_and_weights_are_factors() {
        let policy = Policy { capability: true, ..Policy::default() };
        let worker = WorkerFacts { weight: 4.0, taint_weight: 1e9, ..held(0, 0, 0, 0) };
        assert_eq!(cost(&policy, &request_facts(), &worker, 0).cost, 12.25 / 4.0);
        let prefers = RequestFacts { prefers_taints: true, ..request_facts() };
        let terms = cost(&Policy::default(), &prefers, &worker, 0);
        assert!((terms.taint_factor - (-1.0_f64).exp()).abs() < 1e-15, "at most by e: {terms:?}");
        assert_eq!(terms.cost, 12.25 * terms.taint_factor);
        let pinned = RequestFacts { pin: Some(Worker::new(1, 0)), ..prefers };
        assert_eq!(cost(&Policy::default(), &pinned, &worker, 0).taint_factor, 1.0);
        assert_eq!(libm::exp(-libm::tanh(0.5)).to_bits(), 0x3fe4_2889_d332_40c2, "the same on every machine");
    }

    #[test]
    fn without_reuse_a_prompt_shares_nothing() {
        let policy = Policy { assume_kv_reuse: false, ..Policy::default() };
        let terms = cost(&policy, &request_facts(), &WorkerFacts { active_depth_blocks: 4, ..held(0, 0, 0, 0) }, 0);
        assert_eq!(terms.additional_decode_blocks, 6.0);
    }

    #[test]
    fn other_modes_count_something_else_and_say_the_same_terms() {
        let load = Load { requests: 3, decode_blocks: 7, ..Load::default() };
        let workers = [
            held(0, 0, 0, 0),
            WorkerFacts { load, ..held(4, 0, 0, 0) },
            WorkerFacts {
                device_class: DeviceClass::Cpu,
                weight: 0.5,
                load: Load { requests: 1, ..Load::default() },
                ..held(0, 0, 0, 0)
            },
        ];
        let costs = |mode| {
            let policy = Policy { mode, ..Policy::default() };
            let pool = PoolFacts::of(&policy, 4, workers.iter().copied());
            let terms = |place: usize| super::cost(&policy, &request_facts(), &workers[place], &pool, place as u32);
            assert_eq!(terms(1).decode, 13.0);
            [0, 1, 2].map(|place| terms(place).cost)
        };
        assert_eq!(costs(Mode::Kv), [12.25, 6.25 - 4.0 + 13.0, 12.25]);
        assert_eq!(costs(Mode::LeastLoaded), [0.0, 3.0, 1.0]);
        assert_eq!(costs(Mode::RoundRobin), [2.0, 0.0, 1.0], "the fourth round_robin_counter is the second worker's");
        assert_eq!(costs(Mode::Random), [0.0; 3]);
        assert_eq!(costs(Mode::DeviceAwareWeighted), [1.5, 1.5, 2.0]);
        assert_eq!(costs(Mode::Lmetric), [100.0, 36.0 * 4.0, 200.0]);
    }
}
