//! The cost of a worker, as one record of named terms.

use super::observation::{PlainFacts, WorkerFacts};
use super::policy::{CostModel, Policy};
use super::request_facts::RequestFacts;
use crate::ids::TierBlocks;
use crate::load::{RecentWork, recent_ms};
use crate::protocol::{CostTerms, Mode, PoolRole};
use crate::trust::TrustLevel;

/// Facts of all eligible workers together, which costs depend on. A value that no cost of the policy depends on is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PoolFacts {
    /// Eligible workers.
    pub count: u32,
    /// The smallest prefill backlog, tokens: decay counts what is above it.
    pub prefill_tokens_min: u64,
    /// The place among the eligible workers that round-robin chooses.
    pub round_robin_first: u32,
    /// Requests in flight per unit of weight, on GPUs and on CPUs.
    pub pool_loads: [f64; 2],
    /// What a second of prefill costs the requests that come later, seconds: `ρ / (1 − ρ)`, the wait in a queue with
    /// the load `ρ`, which is the share of their time that all workers spent on prefills lately.
    pub later_wait: f64,
    /// The mean time from a request's first token to its end, seconds.
    pub decode_s: f64,
}

impl PoolFacts {
    /// The facts of these workers that the policy's costs depend on. `recent` sums their recent work at a time from
    /// [`recent_ms`]; only mode `latency` calls it.
    #[must_use]
    #[inline(always)]
    pub(super) fn of(
        policy: &Policy,
        request: &RequestFacts,
        running: impl ExactSizeIterator<Item = WorkerFacts> + Clone,
        recent: impl FnOnce(u32) -> RecentSums,
    ) -> Self {
        let mut pool = Self { count: running.len() as u32, ..Self::default() };
        pool.round_robin_first = request.round_robin_counter.checked_rem(u64::from(pool.count)).unwrap_or(0) as u32;
        if policy.track_prefill_tokens && policy.credit_decay > 0.0 {
            let tokens = running.clone().map(|worker| worker.load.prefill_tokens);
            pool.prefill_tokens_min = tokens.min().unwrap_or(u64::MAX);
        }
        if policy.mode.cost_model() == CostModel::Seconds && pool.count > 0 {
            (pool.later_wait, pool.decode_s) = recent(recent_ms(request.now_ns)).later_wait_and_decode_s(pool.count);
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

/// The load from which on a queue's wait grows no more: there a small error of the load would decide.
const LOAD_MAX: f64 = 0.8;

/// The mean time of an output before any request of the workers has ended, seconds.
const DECODE_S_PRIOR: f64 = 8.0;

/// Workers whose shares are computed before they are added.
const SHARES_AT_ONCE: usize = 64;

/// Partial sums that a sum over workers is kept in. The worker at place `p` is added to number `p % PARTIAL_SUMS`, and at the
/// end these are added in their order: several workers are added at once, and a sum has the same bits on every processor.
const PARTIAL_SUMS: usize = 8;

const _: () =
    assert!(SHARES_AT_ONCE.is_multiple_of(PARTIAL_SUMS), "each of them begins with a place that is a multiple");

/// The recent work of all eligible workers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RecentSums {
    /// Shares of their time that prefills took.
    shares: [f64; PARTIAL_SUMS],
    /// Their mean times from a first token to the end, seconds.
    decodes_s: [f64; PARTIAL_SUMS],
    /// Workers whose mean decode is known.
    known: u32,
}

impl RecentSums {
    /// Of the workers in these rows, which ascend.
    #[inline(always)]
    pub(super) fn of(recents: &[RecentWork], rows: &[u32], now_ms: u32) -> Self {
        if rows.len() == recents.len() {
            return Self::of_all(recents, now_ms);
        }
        let mut sums = Self::default();
        for (row, partial) in rows.iter().zip((0..PARTIAL_SUMS).cycle()) {
            let recent = &recents[*row as usize];
            sums.add(partial, recent.prefill_share_at(now_ms), recent);
        }
        sums
    }

    /// Of all workers.
    #[inline(always)]
    pub(crate) fn of_all(recents: &[RecentWork], now_ms: u32) -> Self {
        let (mut sums, mut shares) = (Self::default(), [0.0; SHARES_AT_ONCE]);
        // In loops of their own, which the compiler turns into vectors.
        for recents in recents.chunks(SHARES_AT_ONCE) {
            for (share, recent) in shares.iter_mut().zip(recents) {
                *share = recent.prefill_share_at(now_ms);
            }
            let (shares, last_shares) = shares[..recents.len()].as_chunks::<PARTIAL_SUMS>();
            let (recents, last_recents) = recents.as_chunks::<PARTIAL_SUMS>();
            for (shares, recents) in shares.iter().zip(recents) {
                (0..PARTIAL_SUMS).for_each(|partial| sums.add(partial, shares[partial], &recents[partial]));
            }
            for (partial, (share, recent)) in last_shares.iter().zip(last_recents).enumerate() {
                sums.add(partial, *share, recent);
            }
        }
        sums
    }

    #[inline(always)]
    fn add(&mut self, partial: usize, share: f64, recent: &RecentWork) {
        self.shares[partial] += share;
        self.decodes_s[partial] += f64::from(recent.decode_s);
        self.known += u32::from(recent.decodes > 0);
    }

    /// [`PoolFacts::later_wait`] and [`PoolFacts::decode_s`] of `count` workers, at least one.
    #[inline(always)]
    pub(crate) fn later_wait_and_decode_s(&self, count: u32) -> (f64, f64) {
        let (share, decode_s) = (self.shares.iter().sum::<f64>(), self.decodes_s.iter().sum::<f64>());
        let load = (share / f64::from(count)).min(LOAD_MAX);
        (load / (1.0 - load), if self.known > 0 { decode_s / f64::from(self.known) } else { DECODE_S_PRIOR })
    }
}

/// The cost of running the request on a worker. `place` is the place of the worker among the eligible ones.
///
/// The formula of `kv` is that of Dynamo 1.6.1 (`scheduling/selector/reference.rs` there), with every tier counted
/// separately. The lowest cost wins. In other modes the terms are the same, and only the cost differs.
///
/// Always inlined, so that a caller that needs only the cost of thousands of workers does not build their terms.
#[must_use]
#[inline(always)]
pub fn cost(policy: &Policy, request: &RequestFacts, worker: &WorkerFacts, pool: &PoolFacts, place: u32) -> CostTerms {
    let terms = seconds(policy, request, worker, pool, blocks(policy, request, worker, pool.prefill_tokens_min));
    let cost = match policy.mode.cost_model() {
        CostModel::Blocks => terms.cost,
        // Without a prefill, as in the decode half of a pair, there are no seconds to weigh.
        CostModel::Seconds if !policy.track_prefill_tokens => terms.cost,
        CostModel::UncachedTimesInFlight => {
            (request.prompt_tokens as f64 - terms.cached_tokens).max(0.0) * (terms.active_requests + 1.0)
        }
        CostModel::Seconds => in_seconds(request, &terms),
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
    matches!(policy.mode.cost_model(), CostModel::Blocks | CostModel::Seconds)
        && !divides_or_decays
        && policy.track_active_blocks
}

/// Overwrites `costs` with the plain cost of every worker, if [`is_plain`].
#[inline(always)]
pub(super) fn plain_costs(
    policy: &Policy,
    request: &RequestFacts,
    plain: (PlainFacts<'_>, &PoolFacts),
    costs: &mut Vec<f64>,
) {
    // These values are the policy's own, or cannot matter here. As constants they let the compiler drop the terms that
    // they switch off, and compute several costs at once.
    let policy = Policy {
        capability: false,
        credit_decay: 0.0,
        track_active_blocks: true,
        credit_trust_min: TrustLevel::None,
        ..*policy
    };
    let request = RequestFacts { prefers_taints: false, shared_blocks: 0, ..*request };
    match (policy.mode.cost_model(), policy.track_prefill_tokens) {
        (CostModel::Seconds, true) => {
            fill_costs(&Policy { mode: Mode::Latency, track_prefill_tokens: true, ..policy }, &request, plain, costs)
        }
        (_, track_prefill_tokens) => {
            let policy = Policy { mode: Mode::Kv, ..policy };
            match track_prefill_tokens {
                true => fill_costs(&Policy { track_prefill_tokens: true, ..policy }, &request, plain, costs),
                false => fill_costs(&Policy { track_prefill_tokens: false, ..policy }, &request, plain, costs),
            }
        }
    }
}

#[inline(always)]
fn fill_costs(
    policy: &Policy,
    request: &RequestFacts,
    (plain, pool): (PlainFacts<'_>, &PoolFacts),
    costs: &mut Vec<f64>,
) {
    costs.clear();
    costs.resize(plain.len(), 0.0);
    for (to, facts) in costs.iter_mut().zip(plain.iter()) {
        *to = cost(policy, request, &facts, pool, 0).cost;
    }
}

/// The terms, and the cost in blocks.
#[inline(always)]
fn blocks(policy: &Policy, request: &RequestFacts, worker: &WorkerFacts, prefill_tokens_min: u64) -> CostTerms {
    let load = &worker.load;
    let held = CostTerms { decay: decay(policy, request, worker, prefill_tokens_min), ..CostTerms::default() };
    let held = credits(policy, request, worker, held);
    let credit = held.device_credit + held.host_credit + held.disk_credit + held.shared_credit;

    // An unknown load counts as idle: the cost is that of the prompt alone, as in Dynamo.
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
    // Skips a division or multiplication by 1, so that the cost does not wait for it.
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

/// Adds the terms in seconds: what the worker has to do before the first token, whom that delays, and what delays the
/// output.
#[inline(always)]
fn seconds(
    policy: &Policy,
    request: &RequestFacts,
    worker: &WorkerFacts,
    pool: &PoolFacts,
    terms: CostTerms,
) -> CostTerms {
    let is_believed = worker.trust.level >= policy.credit_trust_min;
    let overlap = if is_believed { worker.overlap } else { TierBlocks::default() };
    let (host, below) = (exact(overlap.host), exact(overlap.disk) + exact(overlap.external));
    let held = exact(overlap.device) + host + below;
    // A prompt in flight is not in the index yet, but the engine will find its blocks when this one's turn comes.
    let in_flight_blocks = (exact(worker.active_depth_blocks) - held).max(0.0);
    let block_tokens = exact(request.block_size);
    let prompt_tokens = request.prompt_tokens as f64;
    // Even of a prompt that it holds whole, an engine computes the last token.
    let cached_tokens = ((held + in_flight_blocks) * block_tokens).min(prompt_tokens - 1.0).max(0.0);
    let law = &worker.load.law;
    let prefill_s = law.prefill_s(prompt_tokens - cached_tokens, cached_tokens);
    // A tier's weight is the share of a block's computation that it saves; the rest is the time to fetch the block.
    let fetched_tokens =
        block_tokens * (host * (1.0 - policy.host_hit_weight) + below * (1.0 - policy.disk_hit_weight));
    CostTerms {
        in_flight_blocks,
        queue_s: worker.load.work.left_s(request.now_ns),
        prefill_s,
        fetch_s: fetched_tokens * law.token_s,
        delay_s: policy.delay_weight * prefill_s * worker.load.requests as f64,
        later_delay_s: policy.later_delay_weight * prefill_s * pool.later_wait,
        output_delay_s: policy.output_delay_weight
            * pool.decode_s
            * worker.load.recent.prefill_share_at(recent_ms(request.now_ns)),
        ..terms
    }
}

/// The cost in seconds.
#[inline(always)]
fn in_seconds(request: &RequestFacts, terms: &CostTerms) -> f64 {
    let ttft_s = terms.queue_s + terms.prefill_s + terms.fetch_s;
    let sum = ttft_s + terms.delay_s + terms.later_delay_s + terms.output_delay_s;
    if applies_preferences(request) { sum * terms.taint_factor } else { sum }
}

/// The factor by which a backlog reduces the device credit.
#[inline(always)]
fn decay(policy: &Policy, request: &RequestFacts, worker: &WorkerFacts, prefill_tokens_min: u64) -> f64 {
    if !policy.track_prefill_tokens || policy.credit_decay <= 0.0 {
        return 1.0;
    }
    let excess_tokens = worker.load.prefill_tokens.saturating_sub(prefill_tokens_min) as f64;
    let excess_blocks = excess_tokens / f64::from(request.block_size);
    1.0 / (1.0 + policy.credit_decay * excess_blocks / (request.request_blocks() as f64).max(1.0))
}

/// Adds the blocks that the worker holds, and their credit, to `terms`.
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

/// Every `f64` from here on is a whole number.
const WHOLE_FROM: f64 = (1_u64 << 52) as f64;

/// Rounds half up. Equal to [`f64::round`] for values that are not negative, but without the call into the C library
/// that `round` needs on the baseline instruction set.
#[inline(always)]
fn rounded(value: f64) -> f64 {
    if !(0.0..WHOLE_FROM).contains(&value) {
        return value.round();
    }
    // The sum cannot hold a fraction: it rounds half to even.
    let nearest = (value + WHOLE_FROM) - WHOLE_FROM;
    nearest + if value - nearest == 0.5 { 1.0 } else { 0.0 }
}

/// Equal to [`f64::from`]. The processor's conversion instruction depends on the previous value of its register, so the
/// costs of thousands of workers could not be computed in parallel.
#[inline(always)]
fn exact(count: u32) -> f64 {
    f64::from_bits(WHOLE_FROM.to_bits() | u64::from(count)) - WHOLE_FROM
}

/// Tokens in blocks. For a power of two a multiplication gives the same bits as the division, and is faster.
#[inline(always)]
fn in_blocks(tokens: f64, block_size: u32) -> f64 {
    /// The exponent bits of 1.0, and their position.
    const EXPONENT: (u32, u32) = (1023, 52);
    match block_size.is_power_of_two() {
        true => tokens * f64::from_bits(u64::from(EXPONENT.0 - block_size.trailing_zeros()) << EXPONENT.1),
        false => tokens / exact(block_size),
    }
}

/// Whether preferred labels affect the cost.
#[inline(always)]
pub(super) const fn applies_preferences(request: &RequestFacts) -> bool {
    request.prefers_taints && request.pin.is_none()
}

/// The factor of the preferred labels: from 1/e for a worker with preferred labels to e for one with avoided labels.
#[inline]
fn taint_factor(request: &RequestFacts, worker: &WorkerFacts) -> f64 {
    match applies_preferences(request) {
        // libm instead of the C library, whose results differ in the last bit between machines.
        true => libm::exp(-libm::tanh(worker.taint_weight)),
        false => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Worker, WorkerIndex};
    use crate::load::Load;
    use crate::protocol::{DeviceClass, Mode};
    use crate::trust::{Trust, TrustLevel};

    fn request_facts() -> RequestFacts {
        RequestFacts { prompt_tokens: 100, block_size: 16, whole_blocks: 6, ..RequestFacts::default() }
    }

    /// The cost on a worker of an idle fleet.
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

    /// Sums of workers, one by one.
    fn sums_one_by_one<'a>(recents: impl Iterator<Item = &'a RecentWork>, now_ms: u32) -> RecentSums {
        let mut sums = RecentSums::default();
        for (place, recent) in recents.enumerate() {
            sums.shares[place % PARTIAL_SUMS] += recent.prefill_share_at(now_ms);
            sums.decodes_s[place % PARTIAL_SUMS] += f64::from(recent.decode_s);
            sums.known += u32::from(recent.decodes > 0);
        }
        sums
    }

    #[test]
    fn sums_of_many_workers_at_once_have_the_bits_of_sums_one_by_one() {
        let recents: Vec<RecentWork> = (0..150_u16)
            .map(|at| RecentWork {
                prefill_share: f32::from(at * 37 % 11) / 7.0,
                at_ms: u32::from(at) * 977,
                decode_s: f32::from(at % 13) / 3.0,
                decodes: u32::from(at % 3),
            })
            .collect();
        let now_ms = 41_000;
        let bits = |sums: RecentSums, count| {
            let (later_wait, decode_s) = sums.later_wait_and_decode_s(count as u32);
            (later_wait.to_bits(), decode_s.to_bits())
        };
        for count in 1..=recents.len() {
            let (recents, rows) = (&recents[..count], Vec::from_iter(0..count as u32));
            let expected = bits(sums_one_by_one(recents.iter(), now_ms), count);
            assert_eq!(bits(RecentSums::of(recents, &rows, now_ms), count), expected, "all of {count}");
            // Without every third worker, and without the first.
            for rows in [rows.iter().copied().filter(|row| row % 3 != 1).collect(), rows[1..].to_vec()] {
                let (eligible, some) = (rows.iter().map(|row| &recents[*row as usize]), rows.len());
                if some == 0 {
                    continue;
                }
                let expected = bits(sums_one_by_one(eligible, now_ms), some);
                assert_eq!(bits(RecentSums::of(recents, &rows, now_ms), some), expected, "{some} of {count}");
            }
        }
    }

    #[test]
    fn a_mean_load_and_a_mean_decode_are_those_of_the_workers() {
        let worker = |prefill_share, decode_s, decodes| RecentWork { prefill_share, at_ms: 0, decode_s, decodes };
        let recents = [worker(0.5, 3.0, 2), worker(0.25, 0.0, 0), worker(0.0, 5.0, 1)];
        let of_all = RecentSums::of_all(&recents, 0).later_wait_and_decode_s(3);
        assert_eq!(of_all, (0.25 / 0.75, 4.0), "workers without an ended request are not part of the mean decode");
        let of_two = RecentSums::of(&recents, &[0, 1], 0).later_wait_and_decode_s(2);
        assert_eq!(of_two, (0.375 / 0.625, 3.0));
        assert_eq!(RecentSums::of(&recents, &[1], 0).later_wait_and_decode_s(1).1, DECODE_S_PRIOR);
        let overloaded = RecentSums::of_all(&[worker(3.0, 1.0, 1)], 0).later_wait_and_decode_s(1);
        assert_eq!(overloaded.0, LOAD_MAX / (1.0 - LOAD_MAX));
    }

    #[test]
    fn an_idle_worker_without_blocks_costs_prefill_and_decode() {
        let terms = cost(&Policy::kv(), &request_facts(), &held(0, 0, 0, 0), 0);
        // 100 tokens are 6.25 blocks to prefill and 6 whole blocks to decode.
        assert_eq!((terms.prefill, terms.decode, terms.cost), (6.25, 6.0, 12.25));
    }

    #[test]
    fn rounding_equals_the_standard_library() {
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
        let terms = cost(&Policy::kv(), &request_facts(), &held(2, 2, 1, 1), 0);
        assert_eq!(terms.effective_overlap, 2.0 + 1.5 + 0.5);
        assert_eq!(terms.cached_tokens, 64.0);
        assert_eq!((terms.device_credit, terms.host_credit, terms.disk_credit), (2.0, 1.5, 0.5));
        assert_eq!(terms.prefill, 6.25 - 4.0);
    }

    #[test]
    fn load_adds_its_prefill_and_decode_blocks() {
        let load = Load { prefill_tokens: 320, decode_blocks: 5, requests: 3, ..Load::default() };
        let policy = Policy { active_request_weight: 0.5, ..Policy::kv() };
        let terms = cost(&policy, &request_facts(), &WorkerFacts { load, ..held(6, 0, 0, 0) }, 0);
        assert_eq!(terms.prefill, 20.0 + 6.25 - 6.0);
        assert_eq!(terms.decode, 11.0);
        assert_eq!(terms.cost, 20.25 + 11.0 + 1.5);
    }

    #[test]
    fn active_blocks_are_not_added_again() {
        let terms =
            cost(&Policy::kv(), &request_facts(), &WorkerFacts { active_depth_blocks: 4, ..held(0, 0, 0, 0) }, 0);
        assert_eq!((terms.additional_decode_blocks, terms.cost), (2.0, 8.25));
    }

    #[test]
    fn the_prefill_term_is_never_negative() {
        let policy = Policy { device_credit: 3.0, ..Policy::kv() };
        assert_eq!(cost(&policy, &request_facts(), &held(6, 0, 0, 0), 0).prefill, 0.0);
    }

    #[test]
    fn a_backlog_above_the_minimum_reduces_the_credit() {
        let policy = Policy { credit_decay: 1.0, ..Policy::kv() };
        let load = Load { prefill_tokens: 100 + 7 * 16, ..Load::default() };
        // The excess is 7 blocks, as many as the request has: this halves the credit.
        let terms = cost(&policy, &request_facts(), &WorkerFacts { load, ..held(4, 0, 0, 0) }, 100);
        assert_eq!((terms.decay, terms.device_credit), (0.5, 2.0));
    }

    #[test]
    fn a_decode_pool_credits_the_decode_term() {
        let policy = Policy { track_prefill_tokens: false, ..Policy::kv() };
        let decode = RequestFacts { role: PoolRole::Decode, ..request_facts() };
        let terms = cost(&policy, &decode, &held(3, 0, 0, 0), 0);
        assert_eq!((terms.prefill, terms.cost), (0.0, 3.0));
        assert_eq!(cost(&policy, &request_facts(), &held(3, 0, 0, 0), 0).cost, 6.0);
    }

    #[test]
    fn shared_blocks_are_credited_and_distrusted_overlap_is_not() {
        let policy = Policy { shared_multiplier: 0.5, credit_trust_min: TrustLevel::LowerBound, ..Policy::kv() };
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
        let policy = Policy { capability: true, ..Policy::kv() };
        let worker = WorkerFacts { weight: 4.0, taint_weight: 1e9, ..held(0, 0, 0, 0) };
        assert_eq!(cost(&policy, &request_facts(), &worker, 0).cost, 12.25 / 4.0);
        let prefers = RequestFacts { prefers_taints: true, ..request_facts() };
        let terms = cost(&Policy::kv(), &prefers, &worker, 0);
        assert!((terms.taint_factor - (-1.0_f64).exp()).abs() < 1e-15, "at most by e: {terms:?}");
        assert_eq!(terms.cost, 12.25 * terms.taint_factor);
        let pinned = RequestFacts { pin: Some(Worker::new(1, 0)), ..prefers };
        assert_eq!(cost(&Policy::kv(), &pinned, &worker, 0).taint_factor, 1.0);
        assert_eq!(libm::exp(-libm::tanh(0.5)).to_bits(), 0x3fe4_2889_d332_40c2, "the same on every machine");
    }

    #[test]
    fn without_reuse_a_prompt_shares_nothing() {
        let policy = Policy { assume_kv_reuse: false, ..Policy::kv() };
        let terms = cost(&policy, &request_facts(), &WorkerFacts { active_depth_blocks: 4, ..held(0, 0, 0, 0) }, 0);
        assert_eq!(terms.additional_decode_blocks, 6.0);
    }

    #[test]
    fn other_modes_change_the_cost_and_keep_the_terms() {
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
            let counted = RequestFacts { round_robin_counter: 4, ..request_facts() };
            let recents = workers.map(|worker| worker.load.recent);
            let recent = |now_ms| RecentSums::of_all(&recents, now_ms);
            let pool = PoolFacts::of(&policy, &counted, workers.iter().copied(), recent);
            let terms = |place: usize| super::cost(&policy, &request_facts(), &workers[place], &pool, place as u32);
            assert_eq!(terms(1).decode, 13.0);
            [0, 1, 2].map(|place| terms(place).cost)
        };
        assert_eq!(costs(Mode::Kv), [12.25, 6.25 - 4.0 + 13.0, 12.25]);
        assert_eq!(costs(Mode::LeastLoaded), [0.0, 3.0, 1.0]);
        assert_eq!(costs(Mode::RoundRobin), [2.0, 0.0, 1.0], "counter 4 of 3 workers chooses the second one");
        assert_eq!(costs(Mode::Random), [0.0; 3]);
        assert_eq!(costs(Mode::DeviceAwareWeighted), [1.5, 1.5, 2.0]);
        assert_eq!(costs(Mode::Lmetric), [100.0, 36.0 * 4.0, 200.0]);
    }

    #[test]
    fn the_largest_weights_of_delays_make_no_cost_that_is_not_a_number() {
        use crate::limits::{DELAY_WEIGHT_CEILING as MOST, PREFILL_NS_CEILING, PROMPT_TOKENS_MAX};
        let policy =
            Policy { delay_weight: MOST, later_delay_weight: MOST, output_delay_weight: MOST, ..Policy::default() };
        let request = RequestFacts { prompt_tokens: PROMPT_TOKENS_MAX as u64, ..request_facts() };
        for requests in [0, u64::from(u32::MAX)] {
            let mut load = Load { requests, ..Load::default() };
            load.law.token_s = PREFILL_NS_CEILING as f64 * 1e-9;
            let cost = cost(&policy, &request, &WorkerFacts { load, ..held(0, 0, 0, 0) }, 0).cost;
            assert!(cost.is_finite(), "{cost}");
        }
    }

    #[test]
    fn without_a_prefill_the_mode_of_seconds_counts_blocks() {
        let decodes = Policy { track_prefill_tokens: false, ..Policy::default() };
        let load = Load { decode_blocks: 5, requests: 3, ..Load::default() };
        let busy = WorkerFacts { load, ..held(6, 0, 0, 0) };
        assert_eq!(cost(&decodes, &request_facts(), &busy, 0).cost, 11.0);
        assert!(cost(&Policy::default(), &request_facts(), &busy, 0).cost < 1.0, "seconds");
    }
}
